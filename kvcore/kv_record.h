/* The four records of a snapshot, as offsets.  docs/snapshot-format.md says what they mean; the
 * numbers stand here and there and nowhere else. */
#ifndef KV_RECORD_H
#define KV_RECORD_H

#include "kvcore/kv_digest.h"
#include "kvcore/kvcore.h"

#include <string.h>

enum {
    KV_RECORD_MAJOR = 1,
    KV_RECORD_MINOR = 0,

    /* Every record. */
    KV_RECORD_MAGIC = 0, /* 4 bytes */
    KV_RECORD_CRC = 4,   /* of all that follows, see kv_record_seed() */
    KV_RECORD_BODY = 8,

    KV_HEADER_VERSION = 8, /* major in the low 16 bits, minor in the high ones */
    KV_HEADER_LENGTH = 12,
    KV_HEADER_REQUIRED = 16, /* feature bits; this build knows none */
    KV_HEADER_OPTIONAL = 24,
    KV_HEADER_SNAPSHOT_ID = 32,
    KV_HEADER_FINGERPRINT = 48,
    KV_HEADER_NAMESPACE = 80,
    KV_HEADER_NUMERICS = 112,
    KV_HEADER_LAYERS = 144,
    KV_HEADER_KV_HEADS = 148,
    KV_HEADER_HEAD_DIM = 152,
    KV_HEADER_PRECISION = 156,
    KV_HEADER_FRAME_POSITIONS = 160,
    KV_HEADER_BOUND = 164,
    KV_HEADER_BASE = 168,
    KV_HEADER_ZERO = 172,
    KV_HEADER_PARENT_ID = 176,
    KV_HEADER_BASE_DIGEST = 192,
    KV_HEADER_IDS = 224,

    KV_FRAME_FIRST = 8,
    KV_FRAME_COUNT = 12,
    KV_FRAME_DIGEST = 16,
    KV_FRAME_IDS = 48,

    KV_SECTION_KIND = 8,
    KV_SECTION_LENGTH = 12,
    KV_SECTION_DATA = 16,

    KV_SEAL_POSITIONS = 8,
    KV_SEAL_FRAMES = 12,
    KV_SEAL_SECTIONS = 16,
    KV_SEAL_ZERO = 20,
    KV_SEAL_ROOT = 24,
    KV_SEAL_BYTES = 56,

    /* In files only. */
    KV_FILE_BLOCK = 4096, /* payloads, the index and the footer begin at a multiple */

    KV_INDEX_COUNT = 8,
    KV_INDEX_ZERO = 12,
    KV_INDEX_FRAMES = 16, /* of each: */
    KV_INDEX_OFFSET = 0,  /* 8 bytes */
    KV_INDEX_FIRST = 8,
    KV_INDEX_LENGTH = 12, /* in positions */
    KV_INDEX_CRC = 16,
    KV_INDEX_PAD = 20, /* zero */
    KV_INDEX_DIGEST = 24,
    KV_INDEX_STRIDE = 56,

    KV_FOOTER_POSITIONS = 8,
    KV_FOOTER_N_FRAMES = 12,
    KV_FOOTER_N_SECTIONS = 16,
    KV_FOOTER_HEADER_BYTES = 20,
    KV_FOOTER_ROOT = 24,
    KV_FOOTER_SNAPSHOT_ID = 56,
    KV_FOOTER_INDEX_OFFSET = 72, /* 8 bytes, as the next two */
    KV_FOOTER_INDEX_BYTES = 80,
    KV_FOOTER_FILE_BYTES = 88,
    KV_FOOTER_SECTIONS = 96, /* of each: */
    KV_FOOTER_OFFSET = 0,    /* 8 bytes */
    KV_FOOTER_KIND = 8,
    KV_FOOTER_LENGTH = 12,
    KV_FOOTER_CRC = 16,
    KV_FOOTER_PAD = 20, /* zero */
    KV_FOOTER_STRIDE = 24,
    KV_MAX_SECTIONS = 2,
    KV_FOOTER_END = KV_FOOTER_SECTIONS + KV_MAX_SECTIONS * KV_FOOTER_STRIDE, /* zero from here on */
};

#define KV_MAGIC_HEADER "BKVH"
#define KV_MAGIC_FRAME "BKVF"
#define KV_MAGIC_SECTION "BKVS"
#define KV_MAGIC_SEAL "BKVE"
#define KV_MAGIC_INDEX "BKVI"
#define KV_MAGIC_FOOTER "BKVZ"

static inline void kv_put_u32(unsigned char *record, size_t at, uint32_t value)
{
    memcpy(record + at, &value, sizeof(value));
}

static inline uint32_t kv_get_u32(const unsigned char *record, size_t at)
{
    uint32_t value;

    memcpy(&value, record + at, sizeof(value));
    return value;
}

static inline void kv_put_u64(unsigned char *record, size_t at, uint64_t value)
{
    memcpy(record + at, &value, sizeof(value));
}

static inline uint64_t kv_get_u64(const unsigned char *record, size_t at)
{
    uint64_t value;

    memcpy(&value, record + at, sizeof(value));
    return value;
}

/* What the CRC of a frame, section or seal starts from: the snapshot it belongs to and the position
 * it stands at, so that a valid record at a wrong place does not pass. */
static inline uint32_t kv_record_seed(const uint8_t *snapshot_id, uint32_t position)
{
    const uint32_t crc = kv_crc32c(0, snapshot_id, KV_SNAPSHOT_ID_BYTES);

    return kv_crc32c(crc, &position, sizeof(position));
}

/* Root = SHA-256 over the header's CRC, then what these add, in order. */
static inline void kv_root_add_frame(struct kv_hash *root, uint32_t first, uint32_t count,
                                     const struct kv_digest *digest, uint32_t crc)
{
    kv_hash_add_u32(root, first);
    kv_hash_add_u32(root, count);
    kv_hash_add(root, digest->bytes, sizeof(digest->bytes));
    kv_hash_add_u32(root, crc);
}

static inline void kv_root_add_section(struct kv_hash *root, uint32_t kind, uint32_t len,
                                       uint32_t crc)
{
    kv_hash_add_u32(root, kind);
    kv_hash_add_u32(root, len);
    kv_hash_add_u32(root, crc);
}

/* Where a record stands in a file when the one before ends at `end`: as early as its payload, that
 * begins `before` bytes into it, can be at a multiple of a block. */
static inline uint64_t kv_record_place(uint64_t end, size_t before)
{
    return (end + before + KV_FILE_BLOCK - 1) / KV_FILE_BLOCK * KV_FILE_BLOCK - before;
}

/* Read a header record that stands in one piece, without expecting anything: its form, CRC and
 * fields are checked, its base digest is not.  base_ids points into the record. */
int kv_header_parse(const unsigned char *record, size_t len, struct kv_snapshot_header *out,
                    struct kv_why *why);

/* KV_ERR_MISMATCH names the first of fingerprint, numerics id and namespace that differs, and both
 * values. */
int kv_header_compare_digests(const struct kv_snapshot_header *is,
                              const struct kv_snapshot_header *want, struct kv_why *why);

/* Go on at the frame that begins at `first`, a multiple of F past the base, where `digest` is
 * D(first).  Wants the header and no frame before; a seal cannot be checked afterwards. */
void kv_decoder_skip(struct kv_decoder *d, uint32_t first, const struct kv_digest *digest);

/* 0, KV_ERR_INVALID (a kind that this build does not know) or KV_ERR_LIMIT, naming the field. */
int kv_section_check(uint32_t kind, size_t len, struct kv_why *why);

#endif

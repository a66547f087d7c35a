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
};

#define KV_MAGIC_HEADER "BKVH"
#define KV_MAGIC_FRAME "BKVF"
#define KV_MAGIC_SECTION "BKVS"
#define KV_MAGIC_SEAL "BKVE"

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

/* 0, KV_ERR_INVALID (a kind that this build does not know) or KV_ERR_LIMIT, naming the field. */
int kv_section_check(uint32_t kind, size_t len, struct kv_why *why);

#endif

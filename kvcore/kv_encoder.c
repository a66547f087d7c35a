#include "kvcore/kv_cache.h"
#include "kvcore/kv_pieces.h"
#include "kvcore/kv_record.h"

#include <assert.h>
#include <stdlib.h>

struct kv_encoder {
    struct kv_snapshot_header header; /* base_ids point into header_record */
    unsigned char *header_record;     /* [header_bytes], complete */
    size_t header_bytes;
    struct kv_prefix prefix; /* fed up to the next frame */
    uint32_t *ids;           /* [F], of the frame at hand */
    struct kv_hash root;
    uint32_t n_frames;
    uint32_t n_sections;
    uint32_t last_kind; /* of the last section; 0 while frames may come */
    bool base_checked;
    bool sealed;
};

/* ---- Header ---- */

static int check_header(const struct kv_snapshot_header *h, struct kv_why *why)
{
    static const uint8_t no_parent[KV_SNAPSHOT_ID_BYTES];
    int rc = kv_geometry_check(&h->geometry, why);

    if (rc < 0)
        return rc;
    if (h->frame_positions != kv_frame_positions(&h->geometry))
        return kv_fail(why, KV_ERR_INVALID, "frame_positions is %u, of this geometry %u",
                       h->frame_positions, kv_frame_positions(&h->geometry));
    if (h->n_bound > KV_MAX_POSITIONS)
        return kv_fail(why, KV_ERR_INVALID, "n_bound is %u: at most %u", h->n_bound,
                       (unsigned)KV_MAX_POSITIONS);
    if (h->base > h->n_bound)
        return kv_fail(why, KV_ERR_INVALID, "base is %u, past n_bound %u", h->base, h->n_bound);
    if (h->base > 0 && h->base_ids == NULL)
        return kv_fail(why, KV_ERR_INVALID, "base is %u, but there are no base_ids", h->base);
    if (h->base == 0 && memcmp(h->parent_id, no_parent, sizeof(no_parent)) != 0)
        return kv_fail(why, KV_ERR_INVALID, "parent_id is set, but base is 0");
    return 0;
}

static void write_header(struct kv_encoder *e)
{
    const struct kv_snapshot_header *h = &e->header;
    unsigned char *r = e->header_record;

    memcpy(r, KV_MAGIC_HEADER, 4);
    kv_put_u32(r, KV_HEADER_VERSION, KV_RECORD_MAJOR | KV_RECORD_MINOR << 16);
    kv_put_u32(r, KV_HEADER_LENGTH, (uint32_t)e->header_bytes);
    memcpy(r + KV_HEADER_SNAPSHOT_ID, h->snapshot_id, KV_SNAPSHOT_ID_BYTES);
    memcpy(r + KV_HEADER_FINGERPRINT, h->fingerprint.bytes, KV_DIGEST_BYTES);
    memcpy(r + KV_HEADER_NAMESPACE, h->ns.bytes, KV_DIGEST_BYTES);
    memcpy(r + KV_HEADER_NUMERICS, h->numerics_id.bytes, KV_DIGEST_BYTES);
    kv_put_u32(r, KV_HEADER_LAYERS, h->geometry.n_layers);
    kv_put_u32(r, KV_HEADER_KV_HEADS, h->geometry.n_kv_heads);
    kv_put_u32(r, KV_HEADER_HEAD_DIM, h->geometry.head_dim);
    kv_put_u32(r, KV_HEADER_PRECISION, h->geometry.precision);
    kv_put_u32(r, KV_HEADER_FRAME_POSITIONS, h->frame_positions);
    kv_put_u32(r, KV_HEADER_BOUND, h->n_bound);
    kv_put_u32(r, KV_HEADER_BASE, h->base);
    memcpy(r + KV_HEADER_PARENT_ID, h->parent_id, KV_SNAPSHOT_ID_BYTES);
    memcpy(r + KV_HEADER_BASE_DIGEST, h->base_digest.bytes, KV_DIGEST_BYTES);
    if (h->base > 0)
        memcpy(r + KV_HEADER_IDS, h->base_ids, h->base * sizeof(uint32_t));
    kv_put_u32(r, KV_RECORD_CRC,
               kv_crc32c(0, r + KV_RECORD_BODY, e->header_bytes - KV_RECORD_BODY));
}

static int encoder_init(struct kv_encoder *e, const struct kv_snapshot_header *header)
{
    int rc;

    e->header = *header;
    e->header_bytes = KV_HEADER_IDS + header->base * sizeof(uint32_t);
    e->header_record = calloc(1, e->header_bytes);
    e->ids = malloc(header->frame_positions * sizeof(*e->ids));
    if (e->header_record == NULL || e->ids == NULL)
        return KV_ERR_NOMEM;
    rc = kv_prefix_init(&e->prefix, &header->ns, header->frame_positions);
    if (rc < 0)
        return rc;
    kv_prefix_feed(&e->prefix, header->base_ids, header->base);
    kv_prefix_digest(&e->prefix, &e->header.base_digest);
    write_header(e);
    e->header.base_ids = (const uint32_t *)(const void *)(e->header_record + KV_HEADER_IDS);
    kv_hash_init(&e->root);
    kv_hash_add_u32(&e->root, kv_get_u32(e->header_record, KV_RECORD_CRC));
    return 0;
}

int kv_encoder_open(const struct kv_snapshot_header *header, struct kv_encoder **out,
                    struct kv_why *why)
{
    struct kv_encoder *e;
    int rc = check_header(header, why);

    if (rc < 0)
        return rc;
    e = calloc(1, sizeof(*e));
    if (e == NULL || encoder_init(e, header) < 0) {
        kv_encoder_close(e);
        return kv_fail(why, KV_ERR_NOMEM, "no memory for a header of %u base ids", header->base);
    }
    *out = e;
    return 0;
}

void kv_encoder_close(struct kv_encoder *e)
{
    if (e == NULL)
        return;
    kv_prefix_release(&e->prefix);
    free(e->ids);
    free(e->header_record);
    free(e);
}

size_t kv_encoder_header_bytes(const struct kv_encoder *e)
{
    return e->header_bytes;
}

void kv_encoder_header(struct kv_encoder *e, void *dst)
{
    memcpy(dst, e->header_record, e->header_bytes);
}

/* ---- Frames ---- */

uint32_t kv_encoder_next(const struct kv_encoder *e)
{
    return e->prefix.n;
}

/* The most positions that the next frame may take. */
static uint32_t frame_room(const struct kv_encoder *e)
{
    const uint32_t next = e->prefix.n, f = e->header.frame_positions;
    const uint32_t to_border = f - next % f, to_bound = e->header.n_bound - next;

    return to_border < to_bound ? to_border : to_bound;
}

uint32_t kv_encoder_frame_count(const struct kv_encoder *e, uint32_t n, bool flush)
{
    const uint32_t room = frame_room(e);
    const uint32_t have = n > e->prefix.n ? n - e->prefix.n : 0;

    if (have >= room)
        return room;
    return flush ? have : 0;
}

size_t kv_encoder_frame_bytes(const struct kv_encoder *e, uint32_t count)
{
    return KV_FRAME_IDS + count * (sizeof(uint32_t) + kv_position_bytes(&e->header.geometry));
}

/* The ids below the base are in the header already; a context of others would make a snapshot that
 * no receiver takes. */
static int check_base(struct kv_encoder *e, const struct kv_context *ctx)
{
    const struct kv_key key = kv_context_key(ctx, e->header.base);
    uint32_t at = 0;

    while (at < key.n) {
        uint32_t run;
        const uint32_t *ids = kv_key_run(&key, at, &run);

        if (memcmp(ids, e->header.base_ids + at, run * sizeof(*ids)) != 0)
            return KV_ERR_MISMATCH;
        at += run;
    }
    e->base_checked = true;
    return 0;
}

/* Whether the next frame may have so many positions. */
static int check_count(const struct kv_encoder *e, uint32_t count)
{
    if (e->last_kind != 0 || e->sealed)
        return KV_ERR_ORDER;
    return count > 0 && count <= frame_room(e) ? 0 : KV_ERR_INVALID;
}

static int check_context(struct kv_encoder *e, const struct kv_context *ctx, uint32_t count)
{
    if (count + e->prefix.n > kv_context_settled(ctx))
        return KV_ERR_INVALID;
    if (!kv_geometry_equal(&e->header.geometry, &ctx->cache->layout.geometry) ||
        !kv_digest_equal(&e->header.ns, &ctx->ns.digest))
        return KV_ERR_MISMATCH;
    return e->base_checked ? 0 : check_base(e, ctx);
}

/* Write what stands before the rows, which are at dst already; the ids are e->ids. */
static void end_frame(struct kv_encoder *e, uint32_t count, unsigned char *r)
{
    const uint32_t first = e->prefix.n;
    struct kv_digest digest;
    uint32_t crc;

    kv_prefix_ahead(&e->prefix, e->ids, count, &digest);
    memcpy(r, KV_MAGIC_FRAME, 4);
    kv_put_u32(r, KV_FRAME_FIRST, first);
    kv_put_u32(r, KV_FRAME_COUNT, count);
    memcpy(r + KV_FRAME_DIGEST, digest.bytes, sizeof(digest.bytes));
    memcpy(r + KV_FRAME_IDS, e->ids, count * sizeof(*e->ids));
    crc = kv_crc32c(kv_record_seed(e->header.snapshot_id, first), r + KV_RECORD_BODY,
                    kv_encoder_frame_bytes(e, count) - KV_RECORD_BODY);
    kv_put_u32(r, KV_RECORD_CRC, crc);
    kv_root_add_frame(&e->root, first, count, &digest, crc);
    kv_prefix_feed(&e->prefix, e->ids, count);
    e->n_frames++;
}

int kv_encoder_frame(struct kv_encoder *e, const struct kv_context *ctx, uint32_t count, void *dst)
{
    unsigned char *r = dst;
    int rc = check_count(e, count);

    if (rc == 0)
        rc = check_context(e, ctx, count);
    if (rc == 0)
        rc = kv_context_ids(ctx, e->prefix.n, count, e->ids);
    if (rc == 0)
        rc = kv_context_gather(ctx, e->prefix.n, count, r + KV_FRAME_IDS + count * sizeof(*e->ids));
    if (rc == 0)
        end_frame(e, count, r);
    return rc;
}

int kv_encoder_frame_rows(struct kv_encoder *e, const uint32_t *ids, const struct iovec *rows,
                          size_t n_rows, uint32_t count, void *dst)
{
    const size_t bytes = count * kv_position_bytes(&e->header.geometry);
    struct kv_reader from = {.src = rows, .n_src = n_rows};
    unsigned char *r = dst;
    int rc = check_count(e, count);

    if (rc == 0 && kv_pieces_bytes(rows, n_rows) != bytes)
        rc = KV_ERR_INVALID;
    if (rc < 0)
        return rc;
    memcpy(e->ids, ids, count * sizeof(*ids));
    kv_reader_read(&from, r + KV_FRAME_IDS + count * sizeof(*ids), bytes);
    end_frame(e, count, r);
    return 0;
}

/* ---- Sections and seal ---- */

size_t kv_encoder_section_bytes(size_t len)
{
    return KV_SECTION_DATA + len;
}

int kv_section_check(uint32_t kind, size_t len, struct kv_why *why)
{
    switch (kind) {
    case KV_SECTION_LOGITS:
        if (len > KV_MAX_LOGITS * sizeof(float))
            return kv_fail(why, KV_ERR_LIMIT, "logits section is %zu bytes: at most %zu", len,
                           KV_MAX_LOGITS * sizeof(float));
        if (len == 0 || len % sizeof(float) != 0)
            return kv_fail(why, KV_ERR_INVALID, "logits section is %zu bytes: a multiple of 4",
                           len);
        return 0;
    case KV_SECTION_SESSION:
        if (len > KV_MAX_SESSION_BYTES)
            return kv_fail(why, KV_ERR_LIMIT, "session section is %zu bytes: at most %u", len,
                           (unsigned)KV_MAX_SESSION_BYTES);
        return 0;
    default:
        return kv_fail(why, KV_ERR_INVALID, "section kind is %u: logits is 1, session is 2", kind);
    }
}

int kv_encoder_section(struct kv_encoder *e, enum kv_section kind, const void *data, size_t len,
                       void *dst)
{
    unsigned char *r = dst;
    uint32_t crc;
    int rc = kv_section_check(kind, len, NULL);

    if (rc < 0)
        return rc;
    if (e->sealed || kind <= e->last_kind)
        return KV_ERR_ORDER;
    memcpy(r, KV_MAGIC_SECTION, 4);
    kv_put_u32(r, KV_SECTION_KIND, kind);
    kv_put_u32(r, KV_SECTION_LENGTH, (uint32_t)len);
    if (len > 0)
        memcpy(r + KV_SECTION_DATA, data, len);
    crc = kv_crc32c(kv_record_seed(e->header.snapshot_id, e->prefix.n), r + KV_RECORD_BODY,
                    KV_SECTION_DATA + len - KV_RECORD_BODY);
    kv_put_u32(r, KV_RECORD_CRC, crc);
    kv_root_add_section(&e->root, kind, (uint32_t)len, crc);
    e->last_kind = kind;
    e->n_sections++;
    return 0;
}

size_t kv_encoder_seal_bytes(void)
{
    return KV_SEAL_BYTES;
}

void kv_encoder_seal(struct kv_encoder *e, void *dst, struct kv_seal *out)
{
    struct kv_seal seal = {
        .n_positions = e->prefix.n, .n_frames = e->n_frames, .n_sections = e->n_sections};
    struct kv_hash root = e->root; /* so that a second seal says the same */
    unsigned char *r = dst;

    kv_hash_end(&root, &seal.root);
    memcpy(r, KV_MAGIC_SEAL, 4);
    kv_put_u32(r, KV_SEAL_POSITIONS, seal.n_positions);
    kv_put_u32(r, KV_SEAL_FRAMES, seal.n_frames);
    kv_put_u32(r, KV_SEAL_SECTIONS, seal.n_sections);
    kv_put_u32(r, KV_SEAL_ZERO, 0);
    memcpy(r + KV_SEAL_ROOT, seal.root.bytes, sizeof(seal.root.bytes));
    kv_put_u32(r, KV_RECORD_CRC,
               kv_crc32c(kv_record_seed(e->header.snapshot_id, seal.n_positions),
                         r + KV_RECORD_BODY, KV_SEAL_BYTES - KV_RECORD_BODY));
    e->sealed = true;
    if (out != NULL)
        *out = seal;
}

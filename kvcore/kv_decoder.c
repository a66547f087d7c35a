/* Reads the records of a snapshot.  Each is checked in this order: its own length and magic, the
 * lengths it declares (limits first, then against its own length), its CRC, and only then what it
 * says.  A record that is refused changes nothing: the right one may still follow. */
#include "kvcore/kv_pieces.h"
#include "kvcore/kv_record.h"

#include <assert.h>
#include <stdlib.h>

enum state {
    WANT_HEADER,
    WANT_FRAME,
    WANT_SECTION,
    SEALED
}; /* a seal may come in both middle ones */

struct kv_decoder {
    struct kv_snapshot_header expect; /* base_digest is D(base); base_ids not kept */
    struct kv_snapshot_header header; /* as declared, from WANT_FRAME on */
    enum state state;
    struct kv_prefix prefix; /* fed up to the next frame */
    uint32_t *ids;           /* [F], of the last frame */
    void *section;           /* of the last section */
    struct kv_hash root;
    uint32_t n_frames;
    uint32_t n_sections;
    uint32_t last_kind;
};

/* ---- Records in pieces ---- */

static uint32_t crc_bytes(struct kv_reader *r, uint32_t crc, size_t n)
{
    while (n > 0) {
        size_t n_run;
        const unsigned char *run = kv_reader_run(r, n, &n_run);

        crc = kv_crc32c(crc, run, n_run);
        n -= n_run;
    }
    return crc;
}

/* Read the fixed part of a record into fixed[n_fixed], and see that it is there and of the kind. */
static int read_fixed(const struct iovec *src, size_t n_src, const char *magic, const char *name,
                      unsigned char *fixed, size_t n_fixed, size_t *total, struct kv_why *why)
{
    struct kv_reader r = {.src = src, .n_src = n_src};

    *total = kv_pieces_bytes(src, n_src);
    if (*total < n_fixed || *total == SIZE_MAX)
        return kv_fail(why, KV_ERR_FORMAT, "%s record is %zu bytes: its fixed part is %zu", name,
                       *total, n_fixed);
    kv_reader_read(&r, fixed, n_fixed);
    if (memcmp(fixed, magic, 4) != 0)
        return kv_fail(why, KV_ERR_FORMAT, "%s magic is %02x%02x%02x%02x, expected \"%s\"", name,
                       fixed[0], fixed[1], fixed[2], fixed[3], magic);
    return 0;
}

static int check_crc(const struct iovec *src, size_t n_src, uint32_t seed, size_t total,
                     const unsigned char *fixed, const char *name, struct kv_why *why)
{
    struct kv_reader r = kv_reader_at(src, n_src, KV_RECORD_BODY);
    const uint32_t crc = crc_bytes(&r, seed, total - KV_RECORD_BODY);
    const uint32_t declared = kv_get_u32(fixed, KV_RECORD_CRC);

    if (crc != declared)
        return kv_fail(why, KV_ERR_CHECK, "%s CRC is %08x, computed %08x", name, declared, crc);
    return 0;
}

static int check_length(size_t total, uint64_t declared, const char *name, struct kv_why *why)
{
    if (total != declared)
        return kv_fail(why, KV_ERR_FORMAT, "%s record is %zu bytes, what it declares is %llu", name,
                       total, (unsigned long long)declared);
    return 0;
}

/* ---- Life ---- */

static int decoder_init(struct kv_decoder *d, const struct kv_snapshot_header *expect)
{
    const uint32_t f = kv_frame_positions(&expect->geometry);
    int rc = kv_prefix_init(&d->prefix, &expect->ns, f);

    if (rc < 0)
        return rc;
    d->ids = malloc(f * sizeof(*d->ids));
    if (d->ids == NULL)
        return KV_ERR_NOMEM;
    d->expect = *expect;
    d->expect.frame_positions = f;
    d->expect.base_ids = NULL;
    if (expect->base_ids != NULL || expect->base == 0) {
        kv_prefix_feed(&d->prefix, expect->base_ids, expect->base);
        kv_prefix_digest(&d->prefix, &d->expect.base_digest);
        kv_prefix_release(&d->prefix); /* the header's own ids will be fed */
        rc = kv_prefix_init(&d->prefix, &expect->ns, f);
    }
    return rc;
}

int kv_decoder_open(const struct kv_snapshot_header *expect, struct kv_decoder **out)
{
    struct kv_decoder *d;
    int rc = kv_geometry_check(&expect->geometry, NULL);

    if (rc < 0 || expect->n_bound > KV_MAX_POSITIONS || expect->base > expect->n_bound)
        return KV_ERR_INVALID;
    d = calloc(1, sizeof(*d));
    if (d == NULL)
        return KV_ERR_NOMEM;
    rc = decoder_init(d, expect);
    if (rc < 0) {
        kv_decoder_close(d);
        return rc;
    }
    *out = d;
    return 0;
}

void kv_decoder_close(struct kv_decoder *d)
{
    if (d == NULL)
        return;
    kv_prefix_release(&d->prefix);
    free(d->ids);
    free(d->section);
    free(d);
}

const struct kv_snapshot_header *kv_decoder_snapshot(const struct kv_decoder *d)
{
    return d->state == WANT_HEADER ? NULL : &d->header;
}

uint32_t kv_decoder_next(const struct kv_decoder *d)
{
    return d->state == WANT_HEADER ? d->expect.base : d->prefix.n;
}

/* ---- Header ---- */

static void parse_header(const unsigned char *r, struct kv_snapshot_header *h)
{
    *h = (struct kv_snapshot_header){
        .geometry = {.n_layers = kv_get_u32(r, KV_HEADER_LAYERS),
                     .n_kv_heads = kv_get_u32(r, KV_HEADER_KV_HEADS),
                     .head_dim = kv_get_u32(r, KV_HEADER_HEAD_DIM),
                     .precision = (enum kv_precision)kv_get_u32(r, KV_HEADER_PRECISION)},
        .frame_positions = kv_get_u32(r, KV_HEADER_FRAME_POSITIONS),
        .n_bound = kv_get_u32(r, KV_HEADER_BOUND),
        .base = kv_get_u32(r, KV_HEADER_BASE),
    };
    memcpy(h->snapshot_id, r + KV_HEADER_SNAPSHOT_ID, KV_SNAPSHOT_ID_BYTES);
    memcpy(h->parent_id, r + KV_HEADER_PARENT_ID, KV_SNAPSHOT_ID_BYTES);
    memcpy(h->fingerprint.bytes, r + KV_HEADER_FINGERPRINT, KV_DIGEST_BYTES);
    memcpy(h->ns.bytes, r + KV_HEADER_NAMESPACE, KV_DIGEST_BYTES);
    memcpy(h->numerics_id.bytes, r + KV_HEADER_NUMERICS, KV_DIGEST_BYTES);
    memcpy(h->base_digest.bytes, r + KV_HEADER_BASE_DIGEST, KV_DIGEST_BYTES);
}

static int mismatch_digest(const char *field, const struct kv_digest *is,
                           const struct kv_digest *want, struct kv_why *why)
{
    char text[2][2 * KV_DIGEST_BYTES + 1];

    for (size_t i = 0; i < KV_DIGEST_BYTES; i++)
        for (int j = 0; j < 2; j++) {
            const uint8_t byte = (j == 0 ? is : want)->bytes[i];

            text[j][2 * i] = "0123456789abcdef"[byte >> 4];
            text[j][2 * i + 1] = "0123456789abcdef"[byte & 15];
            text[j][2 * i + 2] = '\0';
        }
    return kv_fail(why, KV_ERR_MISMATCH, "%s is %s, expected %s", field, text[0], text[1]);
}

int kv_header_compare_digests(const struct kv_snapshot_header *is,
                              const struct kv_snapshot_header *want, struct kv_why *why)
{
    if (!kv_digest_equal(&is->fingerprint, &want->fingerprint))
        return mismatch_digest("fingerprint", &is->fingerprint, &want->fingerprint, why);
    if (!kv_digest_equal(&is->numerics_id, &want->numerics_id))
        return mismatch_digest("numerics_id", &is->numerics_id, &want->numerics_id, why);
    if (!kv_digest_equal(&is->ns, &want->ns))
        return mismatch_digest("namespace", &is->ns, &want->ns, why);
    return 0;
}

static int compare_geometry(const struct kv_snapshot_header *is,
                            const struct kv_snapshot_header *want, struct kv_why *why)
{
    const char *name = kv_precision_name(is->geometry.precision);
    const struct {
        const char *field;
        uint32_t is, want;
    } numbers[] = {
        {"n_layers", is->geometry.n_layers, want->geometry.n_layers},
        {"n_kv_heads", is->geometry.n_kv_heads, want->geometry.n_kv_heads},
        {"head_dim", is->geometry.head_dim, want->geometry.head_dim},
        {"frame_positions", is->frame_positions, want->frame_positions},
        {"base", is->base, want->base},
    };

    if (is->geometry.precision != want->geometry.precision)
        return kv_fail(why, KV_ERR_MISMATCH, "precision is %s (%u), expected %s",
                       name != NULL ? name : "unknown", (unsigned)is->geometry.precision,
                       kv_precision_name(want->geometry.precision));
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++)
        if (numbers[i].is != numbers[i].want)
            return kv_fail(why, KV_ERR_MISMATCH, "%s is %u, expected %u", numbers[i].field,
                           numbers[i].is, numbers[i].want);
    return 0;
}

/* Version and lengths: what must hold before the CRC can be computed at all. */
static int check_header_form(const unsigned char *r, size_t total, struct kv_why *why)
{
    const uint32_t version = kv_get_u32(r, KV_HEADER_VERSION) & 0xffff;
    const uint32_t base = kv_get_u32(r, KV_HEADER_BASE);

    if (version != KV_RECORD_MAJOR)
        return kv_fail(why, KV_ERR_FORMAT, "version is %u, this build reads %u", version,
                       (unsigned)KV_RECORD_MAJOR);
    if (base > KV_MAX_POSITIONS)
        return kv_fail(why, KV_ERR_LIMIT, "base is %u: at most %u", base,
                       (unsigned)KV_MAX_POSITIONS);
    if (kv_get_u32(r, KV_HEADER_LENGTH) != total)
        return kv_fail(why, KV_ERR_FORMAT, "header length is %u, its record is %zu bytes",
                       kv_get_u32(r, KV_HEADER_LENGTH), total);
    return check_length(total, KV_HEADER_IDS + base * (uint64_t)sizeof(uint32_t), "header", why);
}

/* What a header may not say, whatever is expected. */
static int check_header_fields(const unsigned char *r, const struct kv_snapshot_header *h,
                               uint32_t max_bound, struct kv_why *why)
{
    static const uint8_t no_parent[KV_SNAPSHOT_ID_BYTES];
    uint64_t required;

    memcpy(&required, r + KV_HEADER_REQUIRED, sizeof(required));
    if (required != 0)
        return kv_fail(why, KV_ERR_FORMAT, "required features are %016llx: this build knows none",
                       (unsigned long long)required);
    if (kv_get_u32(r, KV_HEADER_ZERO) != 0)
        return kv_fail(why, KV_ERR_FORMAT, "header bytes 172 to 175 are %08x, expected 0",
                       kv_get_u32(r, KV_HEADER_ZERO));
    if (h->n_bound > max_bound)
        return kv_fail(why, KV_ERR_LIMIT, "n_bound is %u: at most %u", h->n_bound, max_bound);
    if (h->base > h->n_bound)
        return kv_fail(why, KV_ERR_FORMAT, "base is %u, past n_bound %u", h->base, h->n_bound);
    if (h->base == 0 && memcmp(h->parent_id, no_parent, sizeof(no_parent)) != 0)
        return kv_fail(why, KV_ERR_FORMAT, "parent_id is set, but base is 0");
    return 0;
}

int kv_header_parse(const unsigned char *record, size_t len, struct kv_snapshot_header *out,
                    struct kv_why *why)
{
    const struct iovec piece = {(void *)(uintptr_t)record, len};
    unsigned char fixed[KV_HEADER_IDS];
    struct kv_snapshot_header h;
    size_t total;
    int rc = read_fixed(&piece, 1, KV_MAGIC_HEADER, "header", fixed, sizeof(fixed), &total, why);

    if (rc == 0)
        rc = check_header_form(fixed, total, why);
    if (rc == 0)
        rc = check_crc(&piece, 1, 0, total, fixed, "header", why);
    if (rc < 0)
        return rc;
    parse_header(fixed, &h);
    rc = check_header_fields(fixed, &h, KV_MAX_POSITIONS, why);
    if (rc == 0 && kv_geometry_check(&h.geometry, why) < 0)
        rc = KV_ERR_FORMAT; /* it is not our caller's argument here */
    if (rc == 0 && h.frame_positions != kv_frame_positions(&h.geometry))
        rc = kv_fail(why, KV_ERR_FORMAT, "frame_positions is %u, of this geometry %u",
                     h.frame_positions, kv_frame_positions(&h.geometry));
    if (rc < 0)
        return rc;
    h.base_ids = (const uint32_t *)(const void *)(record + KV_HEADER_IDS);
    *out = h;
    return 0;
}

/* Feed the header's base ids into an empty prefix, a frame's worth at a time. */
static void feed_base(struct kv_decoder *d, const struct iovec *src, size_t n_src,
                      struct kv_prefix *p, uint32_t base)
{
    struct kv_reader r = kv_reader_at(src, n_src, KV_HEADER_IDS);

    for (uint32_t left = base; left > 0;) {
        const uint32_t n = left < p->frame_positions ? left : p->frame_positions;

        kv_reader_read(&r, d->ids, n * sizeof(*d->ids));
        kv_prefix_feed(p, d->ids, n);
        left -= n;
    }
}

static int take_header(struct kv_decoder *d, const struct iovec *src, size_t n_src,
                       const struct kv_snapshot_header *h, struct kv_why *why)
{
    struct kv_digest digest;
    struct kv_prefix prefix;

    if (kv_prefix_init(&prefix, &h->ns, h->frame_positions) < 0)
        return kv_fail(why, KV_ERR_NOMEM, "no memory for %u ids", h->frame_positions);
    feed_base(d, src, n_src, &prefix, h->base);
    kv_prefix_digest(&prefix, &digest);
    if (!kv_digest_equal(&digest, &h->base_digest)) {
        kv_prefix_release(&prefix);
        return kv_fail(why, KV_ERR_CHECK, "base_digest is not that of the %u base ids", h->base);
    }
    kv_prefix_release(&d->prefix);
    d->prefix = prefix;
    d->header = *h;
    return 0;
}

int kv_decoder_header(struct kv_decoder *d, const struct iovec *src, size_t n_src,
                      struct kv_why *why)
{
    unsigned char fixed[KV_HEADER_IDS];
    struct kv_snapshot_header h;
    size_t total;
    int rc;

    if (d->state != WANT_HEADER)
        return kv_fail(why, KV_ERR_ORDER, "a second header");
    rc = read_fixed(src, n_src, KV_MAGIC_HEADER, "header", fixed, sizeof(fixed), &total, why);
    if (rc == 0)
        rc = check_header_form(fixed, total, why);
    if (rc == 0)
        rc = check_crc(src, n_src, 0, total, fixed, "header", why);
    if (rc < 0)
        return rc;
    parse_header(fixed, &h);
    rc = check_header_fields(fixed, &h, d->expect.n_bound, why);
    if (rc == 0)
        rc = compare_geometry(&h, &d->expect, why);
    if (rc == 0)
        rc = kv_header_compare_digests(&h, &d->expect, why);
    if (rc == 0 && !kv_digest_equal(&h.base_digest, &d->expect.base_digest))
        rc = mismatch_digest("base_digest", &h.base_digest, &d->expect.base_digest, why);
    if (rc == 0)
        rc = take_header(d, src, n_src, &h, why);
    if (rc < 0)
        return rc;
    kv_hash_init(&d->root);
    kv_hash_add_u32(&d->root, kv_get_u32(fixed, KV_RECORD_CRC));
    d->state = WANT_FRAME;
    return 0;
}

/* ---- Frames ---- */

static int check_frame_range(const struct kv_decoder *d, uint32_t first, uint32_t count,
                             struct kv_why *why)
{
    const uint32_t f = d->header.frame_positions;

    if (first != d->prefix.n)
        return kv_fail(why, KV_ERR_ORDER, "frame first is %u, expected %u", first, d->prefix.n);
    if (count > f - first % f)
        return kv_fail(why, KV_ERR_ORDER, "frame [%u, %u) goes past a multiple of %u", first,
                       first + count, f);
    if (count > d->header.n_bound - first)
        return kv_fail(why, KV_ERR_ORDER, "frame [%u, %u) goes past n_bound %u", first,
                       first + count, d->header.n_bound);
    return 0;
}

static int check_frame_form(const struct kv_decoder *d, const unsigned char *fixed, size_t total,
                            struct kv_why *why)
{
    const uint64_t position_bytes = kv_position_bytes(&d->header.geometry);
    const uint32_t count = kv_get_u32(fixed, KV_FRAME_COUNT);

    if (count == 0 || count > d->header.frame_positions)
        return kv_fail(why, KV_ERR_LIMIT, "frame count is %u: from 1 to %u", count,
                       d->header.frame_positions);
    return check_length(total, KV_FRAME_IDS + count * (sizeof(uint32_t) + position_bytes), "frame",
                        why);
}

int kv_decoder_frame(struct kv_decoder *d, const struct iovec *src, size_t n_src,
                     struct kv_frame *out, struct kv_why *why)
{
    unsigned char fixed[KV_FRAME_IDS];
    struct kv_digest digest;
    struct kv_reader r;
    size_t total;
    uint32_t first, count;
    int rc;

    if (d->state != WANT_FRAME)
        return kv_fail(why, KV_ERR_ORDER, "a frame %s",
                       d->state == WANT_HEADER ? "before the header" : "after a section or seal");
    rc = read_fixed(src, n_src, KV_MAGIC_FRAME, "frame", fixed, sizeof(fixed), &total, why);
    if (rc == 0)
        rc = check_frame_form(d, fixed, total, why);
    if (rc < 0)
        return rc;
    first = kv_get_u32(fixed, KV_FRAME_FIRST);
    count = kv_get_u32(fixed, KV_FRAME_COUNT);
    rc = check_crc(src, n_src, kv_record_seed(d->header.snapshot_id, first), total, fixed, "frame",
                   why);
    if (rc == 0)
        rc = check_frame_range(d, first, count, why);
    if (rc < 0)
        return rc;
    r = kv_reader_at(src, n_src, KV_FRAME_IDS);
    kv_reader_read(&r, d->ids, count * sizeof(*d->ids));
    kv_prefix_ahead(&d->prefix, d->ids, count, &digest);
    if (memcmp(digest.bytes, fixed + KV_FRAME_DIGEST, sizeof(digest.bytes)) != 0)
        return kv_fail(why, KV_ERR_CHECK, "frame digest is not that of the ids up to %u",
                       first + count);
    kv_root_add_frame(&d->root, first, count, &digest, kv_get_u32(fixed, KV_RECORD_CRC));
    kv_prefix_feed(&d->prefix, d->ids, count);
    d->n_frames++;
    *out = (struct kv_frame){
        .first = first,
        .count = count,
        .ids = d->ids,
        .rows_offset = KV_FRAME_IDS + count * sizeof(uint32_t),
        .rows_bytes = count * kv_position_bytes(&d->header.geometry),
        .digest = digest,
    };
    return 0;
}

void kv_decoder_skip(struct kv_decoder *d, uint32_t first, const struct kv_digest *digest)
{
    assert(d->state == WANT_FRAME && d->n_frames == 0);
    assert(first % d->header.frame_positions == 0 && first > d->prefix.n);
    d->prefix.border = *digest;
    d->prefix.n = first;
}

/* ---- Sections and seal ---- */

static int check_after_header(const struct kv_decoder *d, const char *name, struct kv_why *why)
{
    if (d->state == WANT_HEADER || d->state == SEALED)
        return kv_fail(why, KV_ERR_ORDER, "a %s %s", name,
                       d->state == SEALED ? "after the seal" : "before the header");
    return 0;
}

static int read_section(struct kv_decoder *d, const struct iovec *src, size_t n_src,
                        unsigned char *fixed, struct kv_why *why)
{
    size_t total;
    uint32_t kind, len;
    int rc;

    rc = read_fixed(src, n_src, KV_MAGIC_SECTION, "section", fixed, KV_SECTION_DATA, &total, why);
    if (rc < 0)
        return rc;
    kind = kv_get_u32(fixed, KV_SECTION_KIND);
    len = kv_get_u32(fixed, KV_SECTION_LENGTH);
    rc = kv_section_check(kind, len, why);
    if (rc == KV_ERR_INVALID)
        rc = KV_ERR_FORMAT; /* it is not our caller's argument here */
    if (rc == 0)
        rc = check_length(total, KV_SECTION_DATA + (uint64_t)len, "section", why);
    if (rc == 0)
        rc = check_crc(src, n_src, kv_record_seed(d->header.snapshot_id, d->prefix.n), total, fixed,
                       "section", why);
    if (rc == 0 && kind <= d->last_kind)
        rc = kv_fail(why, KV_ERR_ORDER, "section kind is %u after %u", kind, d->last_kind);
    return rc;
}

int kv_decoder_section(struct kv_decoder *d, const struct iovec *src, size_t n_src,
                       enum kv_section *kind, const void **data, size_t *len, struct kv_why *why)
{
    unsigned char fixed[KV_SECTION_DATA];
    struct kv_reader r;
    uint32_t n;
    void *copy;
    int rc = check_after_header(d, "section", why);

    if (rc == 0)
        rc = read_section(d, src, n_src, fixed, why);
    if (rc < 0)
        return rc;
    n = kv_get_u32(fixed, KV_SECTION_LENGTH);
    copy = malloc(n > 0 ? n : 1);
    if (copy == NULL)
        return kv_fail(why, KV_ERR_NOMEM, "no memory for a section of %u bytes", n);
    r = kv_reader_at(src, n_src, KV_SECTION_DATA);
    kv_reader_read(&r, copy, n);
    free(d->section);
    d->section = copy;
    d->last_kind = kv_get_u32(fixed, KV_SECTION_KIND);
    kv_root_add_section(&d->root, d->last_kind, n, kv_get_u32(fixed, KV_RECORD_CRC));
    d->n_sections++;
    d->state = WANT_SECTION;
    *kind = (enum kv_section)d->last_kind;
    *data = copy;
    *len = n;
    return 0;
}

static int check_count(const char *field, uint32_t is, uint32_t want, struct kv_why *why)
{
    if (is != want)
        return kv_fail(why, KV_ERR_CHECK, "seal %s is %u, came %u", field, is, want);
    return 0;
}

static int check_seal(const struct kv_decoder *d, const unsigned char *r, struct kv_digest *root,
                      struct kv_why *why)
{
    struct kv_hash hash = d->root;
    int rc = check_count("n_positions", kv_get_u32(r, KV_SEAL_POSITIONS), d->prefix.n, why);

    if (rc == 0)
        rc = check_count("n_frames", kv_get_u32(r, KV_SEAL_FRAMES), d->n_frames, why);
    if (rc == 0)
        rc = check_count("n_sections", kv_get_u32(r, KV_SEAL_SECTIONS), d->n_sections, why);
    if (rc == 0 && kv_get_u32(r, KV_SEAL_ZERO) != 0)
        rc = kv_fail(why, KV_ERR_FORMAT, "seal bytes 20 to 23 are %08x, expected 0",
                     kv_get_u32(r, KV_SEAL_ZERO));
    if (rc < 0)
        return rc;
    kv_hash_end(&hash, root);
    if (memcmp(root->bytes, r + KV_SEAL_ROOT, sizeof(root->bytes)) != 0)
        return kv_fail(why, KV_ERR_CHECK, "seal root is not that of the records that came");
    return 0;
}

int kv_decoder_seal(struct kv_decoder *d, const struct iovec *src, size_t n_src,
                    struct kv_seal *out, struct kv_why *why)
{
    unsigned char fixed[KV_SEAL_BYTES];
    struct kv_digest root;
    size_t total;
    int rc = check_after_header(d, "seal", why);

    if (rc == 0)
        rc = read_fixed(src, n_src, KV_MAGIC_SEAL, "seal", fixed, sizeof(fixed), &total, why);
    if (rc == 0)
        rc = check_length(total, KV_SEAL_BYTES, "seal", why);
    if (rc == 0)
        rc = check_crc(src, n_src,
                       kv_record_seed(d->header.snapshot_id, kv_get_u32(fixed, KV_SEAL_POSITIONS)),
                       total, fixed, "seal", why);
    if (rc == 0)
        rc = check_seal(d, fixed, &root, why);
    if (rc < 0)
        return rc;
    d->state = SEALED;
    *out = (struct kv_seal){.n_positions = d->prefix.n,
                            .n_frames = d->n_frames,
                            .n_sections = d->n_sections,
                            .root = root};
    return 0;
}

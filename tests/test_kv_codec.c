/* The snapshot codec: what is written reads back, and nothing that was touched on the way passes.
 * Method: small snapshots of a real cache, taken apart record by record. */
#include "kvcore/kvcore.h"

#include <check.h>
#include <stdlib.h>
#include <string.h>

enum { P = 16, MAX_RECORDS = 64 };

/* 20 KiB a position, so F is 32: frames of a size that a test of every byte can afford only at
 * `small`, where F is large and frames are partial. */
static const struct kv_geometry wide = {
    .n_layers = 5, .n_kv_heads = 8, .head_dim = 128, .precision = KV_F16};
static const struct kv_geometry small = {
    .n_layers = 1, .n_kv_heads = 1, .head_dim = 3, .precision = KV_F32};

enum kind { HEADER, FRAME, SECTION, SEAL };

struct record {
    enum kind kind;
    unsigned char *bytes;
    size_t len;
};

struct snapshot {
    struct record records[MAX_RECORDS];
    size_t n;
    struct kv_seal seal;
};

static struct kv_cache *cache;
static struct kv_context *ctx;
static struct kv_namespace ns;
static struct kv_snapshot_header header;

static void fill(void *dst, size_t len, unsigned seed)
{
    for (size_t i = 0; i < len; i++)
        ((unsigned char *)dst)[i] = (unsigned char)(seed = seed * 1103515245u + 12345u, seed >> 16);
}

static void append(struct kv_context *c, uint32_t n, uint32_t first_id)
{
    const uint32_t first = kv_context_length(c);
    const size_t bytes = n * kv_position_bytes(&header.geometry);
    unsigned char *rows = malloc(bytes);
    struct iovec piece = {.iov_base = rows, .iov_len = bytes};
    uint32_t *ids = malloc(n * sizeof(*ids));

    for (uint32_t i = 0; i < n; i++)
        ids[i] = first_id + first + i;
    fill(rows, bytes, first + first_id);
    ck_assert_int_eq(kv_context_begin(c, ids, n), 0);
    ck_assert_int_eq(kv_context_scatter(c, first, n, &piece, 1), 0);
    ck_assert_int_eq(kv_context_commit(c, n), 0);
    free(rows);
    free(ids);
}

/* A context of n positions, and the header of a full snapshot of it. */
static void set_up(const struct kv_geometry *g, uint32_t n)
{
    const struct kv_cache_config config = {
        .geometry = *g, .page_tokens = P, .n_pages = n / P * 3 + 8};

    memset(&header, 0, sizeof(header));
    fill(&ns.digest, sizeof(ns.digest), 1);
    fill(header.snapshot_id, sizeof(header.snapshot_id), 2);
    fill(&header.fingerprint, sizeof(header.fingerprint), 3);
    fill(&header.numerics_id, sizeof(header.numerics_id), 4);
    header.ns = ns.digest;
    header.geometry = *g;
    header.frame_positions = kv_frame_positions(g);
    header.n_bound = n + 10;
    ck_assert_int_eq(kv_cache_open(&config, &cache, NULL), 0);
    ck_assert_int_eq(kv_context_open(cache, &ns, &ctx), 0);
    append(ctx, n, 100);
}

static void tear_down(void)
{
    kv_context_close(ctx);
    kv_cache_close(cache);
}

static unsigned char *add(struct snapshot *s, enum kind kind, size_t len)
{
    struct record *r = &s->records[s->n++];

    ck_assert_uint_le(s->n, MAX_RECORDS);
    *r = (struct record){.kind = kind, .bytes = malloc(len), .len = len};
    ck_assert_ptr_nonnull(r->bytes);
    return r->bytes;
}

static void add_frame(struct snapshot *s, struct kv_encoder *e, uint32_t count)
{
    unsigned char *dst = add(s, FRAME, kv_encoder_frame_bytes(e, count));

    ck_assert_int_eq(kv_encoder_frame(e, ctx, count, dst), 0);
}

static void add_section(struct snapshot *s, struct kv_encoder *e, enum kv_section kind,
                        const void *data, size_t len)
{
    unsigned char *dst = add(s, SECTION, kv_encoder_section_bytes(len));

    ck_assert_int_eq(kv_encoder_section(e, kind, data, len, dst), 0);
}

/* All of ctx from header.base on, pausing (a partial frame) at `pause`, with both sections. */
static struct snapshot encode(uint32_t pause)
{
    const float logits[5] = {1, 2, 3, 4, 5};
    struct snapshot s = {0};
    struct kv_encoder *e;
    struct kv_why why;
    uint32_t count;

    ck_assert_msg(kv_encoder_open(&header, &e, &why) == 0, "%s", why.text);
    kv_encoder_header(e, add(&s, HEADER, kv_encoder_header_bytes(e)));
    while ((count = kv_encoder_frame_count(e, pause, true)) > 0)
        add_frame(&s, e, count);
    while ((count = kv_encoder_frame_count(e, kv_context_length(ctx), true)) > 0)
        add_frame(&s, e, count);
    ck_assert_uint_eq(kv_encoder_next(e), kv_context_length(ctx));
    add_section(&s, e, KV_SECTION_LOGITS, logits, sizeof(logits));
    add_section(&s, e, KV_SECTION_SESSION, "session", 7);
    kv_encoder_seal(e, add(&s, SEAL, kv_encoder_seal_bytes()), &s.seal);
    kv_encoder_close(e);
    return s;
}

static void release(struct snapshot *s)
{
    for (size_t i = 0; i < s->n; i++)
        free(s->records[i].bytes);
}

static struct kv_decoder *open_decoder(void)
{
    struct kv_decoder *d;

    ck_assert_int_eq(kv_decoder_open(&header, &d), 0);
    return d;
}

/* Feed bytes as a record of that kind; the frame's rows go into `into` if that is not NULL. */
static int feed_pieces(struct kv_decoder *d, enum kind kind, const struct iovec *src, size_t n_src,
                       struct kv_context *into, struct kv_why *why)
{
    struct kv_frame frame;
    struct kv_seal seal;
    enum kv_section section;
    const void *data;
    size_t len;
    int rc;

    switch (kind) {
    case HEADER:
        return kv_decoder_header(d, src, n_src, why);
    case SECTION:
        return kv_decoder_section(d, src, n_src, &section, &data, &len, why);
    case SEAL:
        return kv_decoder_seal(d, src, n_src, &seal, why);
    case FRAME:
        break;
    }
    rc = kv_decoder_frame(d, src, n_src, &frame, why);
    if (rc == 0 && into != NULL) {
        struct iovec *rows = malloc(n_src * sizeof(*rows));
        const size_t n_rows = kv_pieces(src, n_src, frame.rows_offset, frame.rows_bytes, rows);

        ck_assert_int_eq(kv_context_begin(into, frame.ids, frame.count), 0);
        ck_assert_int_eq(kv_context_scatter(into, frame.first, frame.count, rows, n_rows), 0);
        ck_assert_int_eq(kv_context_commit(into, frame.count), 0);
        free(rows);
    }
    return rc;
}

static int feed(struct kv_decoder *d, enum kind kind, const void *bytes, size_t len,
                struct kv_why *why)
{
    const struct iovec piece = {.iov_base = (void *)(uintptr_t)bytes, .iov_len = len};

    return feed_pieces(d, kind, &piece, 1, NULL, why);
}

static int feed_record(struct kv_decoder *d, const struct record *r, struct kv_why *why)
{
    return feed(d, r->kind, r->bytes, r->len, why);
}

static void check_same(struct kv_context *a, struct kv_context *b)
{
    const uint32_t n = kv_context_length(a);
    const size_t bytes = n * kv_position_bytes(&header.geometry);
    unsigned char *rows[2] = {malloc(bytes), malloc(bytes)};
    uint32_t *ids[2] = {malloc(n * sizeof(uint32_t)), malloc(n * sizeof(uint32_t))};

    ck_assert_uint_eq(kv_context_length(b), n);
    ck_assert_int_eq(kv_context_gather(a, 0, n, rows[0]), 0);
    ck_assert_int_eq(kv_context_gather(b, 0, n, rows[1]), 0);
    ck_assert_int_eq(kv_context_ids(a, 0, n, ids[0]), 0);
    ck_assert_int_eq(kv_context_ids(b, 0, n, ids[1]), 0);
    ck_assert(memcmp(rows[0], rows[1], bytes) == 0);
    ck_assert(memcmp(ids[0], ids[1], n * sizeof(uint32_t)) == 0);
    for (int i = 0; i < 2; i++) {
        free(rows[i]);
        free(ids[i]);
    }
}

START_TEST(crc_and_sha_are_the_published_ones)
{
    /* RFC 3720 B.4: 32 bytes of zeros, of ones. */
    unsigned char bytes[32] = {0};
    struct kv_prefix p;
    struct kv_digest d;
    /* First bytes of SHA-256 (32 zero bytes), and of SHA-256 (that, id 1), by Python's hashlib. */
    static const unsigned char zero_ns[4] = {0x66, 0x68, 0x7a, 0xad};
    static const unsigned char one_id[4] = {0x0a, 0x62, 0xd6, 0xbf};

    ck_assert_uint_eq(kv_crc32c(0, "123456789", 9), 0xe3069283u);
    ck_assert_uint_eq(kv_crc32c(kv_crc32c(0, "1234", 4), "56789", 5), 0xe3069283u);
    ck_assert_uint_eq(kv_crc32c(0, bytes, 32), 0x8a9136aau);
    memset(bytes, 0xff, 32);
    ck_assert_uint_eq(kv_crc32c(0, bytes, 32), 0x62a8ab43u);
    ck_assert_int_eq(kv_prefix_init(&p, &(struct kv_digest){0}, 4), 0);
    kv_prefix_digest(&p, &d);
    ck_assert_mem_eq(d.bytes, zero_ns, 4);
    kv_prefix_feed(&p, &(uint32_t){1}, 1);
    kv_prefix_digest(&p, &d);
    ck_assert_mem_eq(d.bytes, one_id, 4);
    kv_prefix_release(&p);
}
END_TEST

START_TEST(a_prefix_digest_does_not_depend_on_how_ids_are_fed)
{
    uint32_t ids[23];
    struct kv_digest whole[24], d;
    struct kv_prefix p;

    for (uint32_t i = 0; i < 23; i++)
        ids[i] = i * i;
    for (uint32_t n = 0; n <= 23; n++) {
        ck_assert_int_eq(kv_prefix_init(&p, &ns.digest, 8), 0);
        kv_prefix_feed(&p, ids, n);
        kv_prefix_digest(&p, &whole[n]);
        kv_prefix_release(&p);
    }
    for (uint32_t step = 1; step < 12; step++) {
        ck_assert_int_eq(kv_prefix_init(&p, &ns.digest, 8), 0);
        for (uint32_t at = 0; at < 23; at += step) {
            kv_prefix_digest(&p, &d);
            ck_assert_mem_eq(&d, &whole[at], sizeof(d));
            kv_prefix_feed(&p, ids + at, 23 - at < step ? 23 - at : step);
        }
        kv_prefix_release(&p);
    }
    for (uint32_t n = 0; n < 23; n++)
        ck_assert(memcmp(&whole[n], &whole[n + 1], sizeof(d)) != 0);
}
END_TEST

START_TEST(namespaces_of_different_fields_differ)
{
    struct kv_namespace_fields f[] = {
        {.tenant = "a", .salt = "bc", .salt_len = 2, .precision = KV_F16},
        {.tenant = "ab", .salt = "c", .salt_len = 1, .precision = KV_F16},
        {.tenant = "a", .salt = "bc", .salt_len = 2, .precision = KV_F32},
        {.tenant = "a", .salt = "bc", .salt_len = 2, .precision = KV_Q8},
        {.tenant = "a", .salt = NULL, .salt_len = 0, .precision = KV_F16},
        {.tenant = "", .salt = "abc", .salt_len = 3, .precision = KV_F16},
        {.tenant = "a", .salt = "bc", .salt_len = 2, .precision = KV_F16, .fingerprint = {{1}}},
        {.tenant = "a", .salt = "bc", .salt_len = 2, .precision = KV_F16, .numerics_id = {{1}}},
    };
    struct kv_digest d[sizeof(f) / sizeof(f[0])];

    for (size_t i = 0; i < sizeof(f) / sizeof(f[0]); i++) {
        kv_namespace_digest(&f[i], &d[i]);
        for (size_t j = 0; j < i; j++)
            ck_assert(memcmp(&d[i], &d[j], sizeof(d[i])) != 0);
    }
}
END_TEST

/* Frames end at multiples of F wherever the base is and wherever the sender paused; the receiver
 * has another page size.  F is 32 at each precision. */
START_TEST(a_snapshot_reads_back_bit_for_bit)
{
    static const struct kv_geometry geometries[] = {[KV_F32] = {5, 8, 64, KV_F32},
                                                    [KV_F16] = {5, 8, 128, KV_F16},
                                                    [KV_Q8] = {8, 8, 128, KV_Q8}};
    const struct kv_geometry *g = &geometries[_i];
    static const uint32_t bases[] = {0, 1, 31, 32, 33, 69, 70};

    set_up(g, 70);
    ck_assert_uint_eq(header.frame_positions, 32);
    for (size_t i = 0; i < sizeof(bases) / sizeof(bases[0]); i++) {
        struct kv_cache_config config = {
            .geometry = *g, .page_tokens = 32, .n_pages = 8, .arena = true};
        uint32_t ids[70];
        struct kv_cache *other;
        struct kv_context *copy, *part;
        struct kv_decoder *d;
        struct snapshot s;
        struct kv_why why;

        header.base = bases[i];
        header.base_ids = ids;
        ck_assert_int_eq(kv_context_ids(ctx, 0, 70, ids), 0);
        s = encode(bases[i] < 67 ? bases[i] + 3 : 70);
        ck_assert_int_eq(kv_cache_open(&config, &other, NULL), 0);
        ck_assert_int_eq(kv_context_open(other, &ns, &copy), 0);
        /* The receiver has the base already; here it comes from a decoder of a full snapshot. */
        if (bases[i] > 0) {
            unsigned char *rows = malloc(bases[i] * kv_position_bytes(g));
            struct iovec piece = {.iov_base = rows, .iov_len = bases[i] * kv_position_bytes(g)};

            ck_assert_int_eq(kv_context_fork(ctx, bases[i], &part), 0);
            ck_assert_int_eq(kv_context_gather(part, 0, bases[i], rows), 0);
            ck_assert_int_eq(kv_context_begin(copy, ids, bases[i]), 0);
            ck_assert_int_eq(kv_context_scatter(copy, 0, bases[i], &piece, 1), 0);
            ck_assert_int_eq(kv_context_commit(copy, bases[i]), 0);
            kv_context_close(part);
            free(rows);
        }
        d = open_decoder();
        ck_assert_uint_eq(kv_decoder_next(d), bases[i]);
        ck_assert_ptr_null(kv_decoder_snapshot(d));
        for (size_t j = 0; j < s.n; j++) {
            const struct record *r = &s.records[j];
            struct iovec pieces[40];
            size_t n = 0;

            for (size_t at = 0, step = r->len / 37 + 1; at < r->len; at += step)
                pieces[n++] = (struct iovec){.iov_base = r->bytes + at,
                                             .iov_len = r->len - at < step ? r->len - at : step};
            ck_assert_msg(feed_pieces(d, r->kind, pieces, n, copy, &why) == 0, "%s", why.text);
        }
        ck_assert_mem_eq(kv_decoder_snapshot(d)->snapshot_id, header.snapshot_id,
                         KV_SNAPSHOT_ID_BYTES);
        check_same(ctx, copy);
        kv_decoder_close(d);
        release(&s);
        kv_context_close(copy);
        kv_cache_close(other);
    }
    tear_down();
}
END_TEST

START_TEST(a_frame_is_held_back_until_it_is_full_or_flushed)
{
    struct kv_encoder *e;
    struct snapshot s = {0};

    set_up(&wide, 40);
    header.n_bound = 40;
    ck_assert_int_eq(kv_encoder_open(&header, &e, NULL), 0);
    ck_assert_uint_eq(kv_encoder_frame_count(e, 0, true), 0);
    ck_assert_uint_eq(kv_encoder_frame_count(e, 31, false), 0);
    ck_assert_uint_eq(kv_encoder_frame_count(e, 31, true), 31);
    ck_assert_uint_eq(kv_encoder_frame_count(e, 40, false), 32);
    add_frame(&s, e, 5);
    ck_assert_uint_eq(kv_encoder_frame_count(e, 40, false), 27);
    ck_assert_int_eq(kv_encoder_frame(e, ctx, 28, NULL), KV_ERR_INVALID);
    add_frame(&s, e, 27);
    ck_assert_uint_eq(kv_encoder_frame_count(e, 39, false), 0);
    ck_assert_uint_eq(kv_encoder_frame_count(e, 40, false), 8); /* the bound: no more will come */
    kv_encoder_close(e);
    release(&s);
    tear_down();
}
END_TEST

/* The record after the touched one must still be taken: nothing had changed. */
/* Frames of rows in memory, in pieces that end anywhere, are those of a context. */
START_TEST(a_frame_of_rows_is_that_of_a_context)
{
    enum { N = 70 };
    uint32_t ids[N];
    struct kv_encoder *a, *b;
    struct kv_seal seals[2];
    unsigned char seal_record[56];

    set_up(&wide, N);
    const size_t position = kv_position_bytes(&wide), room = 2 << 20;
    unsigned char *rows = malloc(N * position), *x = malloc(room), *y = malloc(room);

    ck_assert_int_eq(kv_context_ids(ctx, 0, N, ids), 0);
    ck_assert_int_eq(kv_context_gather(ctx, 0, N, rows), 0);
    ck_assert_int_eq(kv_encoder_open(&header, &a, NULL), 0);
    ck_assert_int_eq(kv_encoder_open(&header, &b, NULL), 0);
    for (uint32_t count; (count = kv_encoder_frame_count(a, N, true)) > 0;) {
        const uint32_t first = kv_encoder_next(a);
        const size_t len = kv_encoder_frame_bytes(a, count), bytes = count * position;
        unsigned char *begin = rows + first * position;
        const struct iovec pieces[] = {{begin, 1},
                                       {begin + 1, 0},
                                       {begin + 1, position},
                                       {begin + 1 + position, bytes - 1 - position}};
        const struct iovec more[] = {{begin, bytes}, {begin, 1}};
        const struct iovec wraps[] = {{begin, bytes}, {begin, SIZE_MAX}, {begin, 1}};

        ck_assert_int_eq(kv_encoder_frame(a, ctx, count, x), 0);
        /* What is refused changes nothing. */
        ck_assert_int_eq(kv_encoder_frame_rows(b, ids + first, pieces, 3, count, y),
                         KV_ERR_INVALID);
        ck_assert_int_eq(kv_encoder_frame_rows(b, ids + first, more, 2, count, y), KV_ERR_INVALID);
        ck_assert_int_eq(kv_encoder_frame_rows(b, ids + first, wraps, 3, count, y), KV_ERR_INVALID);
        ck_assert_int_eq(kv_encoder_frame_rows(b, ids + first, NULL, 0, 0, y), KV_ERR_INVALID);
        ck_assert_int_eq(kv_encoder_frame_rows(b, ids + first, more, 1, 33, y), KV_ERR_INVALID);
        ck_assert_uint_eq(kv_encoder_next(b), first);
        ck_assert_int_eq(kv_encoder_frame_rows(b, ids + first, pieces, 4, count, y), 0);
        ck_assert_mem_eq(x, y, len);
    }
    ck_assert_uint_eq(kv_encoder_next(b), N);
    kv_encoder_seal(a, seal_record, &seals[0]);
    kv_encoder_seal(b, seal_record, &seals[1]);
    ck_assert_mem_eq(seals[0].root.bytes, seals[1].root.bytes, sizeof(seals[0].root.bytes));
    ck_assert_int_eq(kv_encoder_frame_rows(b, ids, &(struct iovec){rows, position}, 1, 1, y),
                     KV_ERR_ORDER);
    kv_encoder_close(a);
    kv_encoder_close(b);
    free(rows);
    free(x);
    free(y);
    tear_down();
}
END_TEST

START_TEST(every_flipped_byte_is_refused_and_changes_nothing)
{
    struct kv_decoder *d;
    struct snapshot s;
    struct kv_why why;

    set_up(&small, 21);
    header.base = 2;
    header.base_ids = (const uint32_t[]){100, 101};
    s = encode(9);
    d = open_decoder();
    for (size_t i = 0; i < s.n; i++) {
        struct record *r = &s.records[i];

        for (size_t at = 0; at < r->len; at++)
            for (int bit = 0; bit < 8; bit++) {
                const uint32_t next = kv_decoder_next(d);
                int rc;

                r->bytes[at] ^= (unsigned char)(1 << bit);
                why.text[0] = '\0';
                rc = feed_record(d, r, &why);
                ck_assert_msg(rc < 0, "record %zu byte %zu bit %d passed", i, at, bit);
                ck_assert_str_ne(why.text, "");
                ck_assert_uint_eq(kv_decoder_next(d), next);
                r->bytes[at] ^= (unsigned char)(1 << bit);
            }
        ck_assert_msg(feed_record(d, r, &why) == 0, "record %zu: %s", i, why.text);
    }
    kv_decoder_close(d);
    release(&s);
    tear_down();
}
END_TEST

START_TEST(every_truncation_and_excess_is_refused_and_changes_nothing)
{
    struct kv_decoder *d;
    struct snapshot s;
    struct kv_why why;

    set_up(&small, 21);
    s = encode(9);
    d = open_decoder();
    for (size_t i = 0; i < s.n; i++) {
        struct record *r = &s.records[i];
        unsigned char *more = malloc(r->len + 1);

        /* A copy of exactly that length, so that a read past it is seen by the sanitizer. */
        for (size_t len = 0; len < r->len; len++) {
            unsigned char *less = malloc(len > 0 ? len : 1);

            memcpy(less, r->bytes, len);
            ck_assert_int_lt(feed(d, r->kind, less, len, &why), 0);
            free(less);
        }
        memcpy(more, r->bytes, r->len);
        more[r->len] = 0;
        ck_assert_int_lt(feed(d, r->kind, more, r->len + 1, &why), 0);
        free(more);
        ck_assert_msg(feed_record(d, r, &why) == 0, "record %zu: %s", i, why.text);
    }
    kv_decoder_close(d);
    release(&s);
    tear_down();
}
END_TEST

START_TEST(records_out_of_order_are_refused)
{
    struct kv_decoder *d;
    struct snapshot s;
    struct kv_why why;

    set_up(&small, 21);
    s = encode(9); /* header, two frames, two sections, seal */
    ck_assert_uint_eq(s.n, 6);
    d = open_decoder();
    for (size_t i = 0; i < s.n; i++) {
        for (size_t j = 0; j < s.n; j++)
            if (j != i && !(s.records[i].kind == FRAME && s.records[j].kind == SECTION) &&
                !(i == 3 && j == 4) && !(i == 1 && j == 5))
                ck_assert_msg(feed_record(d, &s.records[j], &why) < 0, "%zu came for %zu", j, i);
        ck_assert_int_eq(feed_record(d, &s.records[i], &why), 0);
    }
    for (size_t j = 0; j < s.n; j++)
        ck_assert_int_eq(feed_record(d, &s.records[j], &why), KV_ERR_ORDER);
    kv_decoder_close(d);
    release(&s);
    tear_down();
}
END_TEST

START_TEST(a_frame_of_another_snapshot_is_refused)
{
    struct snapshot a, b;
    struct kv_decoder *d;
    struct kv_why why;

    set_up(&small, 21);
    a = encode(9);
    header.snapshot_id[0] ^= 1;
    b = encode(9);
    d = open_decoder();
    ck_assert_int_eq(feed_record(d, &a.records[0], &why), 0);
    ck_assert_int_eq(feed_record(d, &b.records[1], &why), KV_ERR_CHECK);
    ck_assert_int_eq(feed_record(d, &a.records[1], &why), 0);
    kv_decoder_close(d);
    release(&a);
    release(&b);
    tear_down();
}
END_TEST

/* Open a decoder that expects `want`, feed it this header's record, and find `text` in the why. */
static void check_header_refused(const struct snapshot *s, const struct kv_snapshot_header *want,
                                 int rc, const char *text)
{
    struct kv_decoder *d;
    struct kv_why why = {{0}};

    ck_assert_int_eq(kv_decoder_open(want, &d), 0);
    ck_assert_int_eq(feed_record(d, &s->records[0], &why), rc);
    ck_assert_msg(strstr(why.text, text) != NULL, "\"%s\" is not in \"%s\"", text, why.text);
    ck_assert_ptr_null(kv_decoder_snapshot(d));
    kv_decoder_close(d);
}

START_TEST(a_header_that_differs_is_refused_naming_field_and_both_values)
{
    struct kv_snapshot_header want;
    struct snapshot s;

    set_up(&small, 21);
    header.base = 2;
    header.base_ids = (const uint32_t[]){100, 101};
    s = encode(9);
    want = header;
    want.geometry.n_layers = 2;
    check_header_refused(&s, &want, KV_ERR_MISMATCH, "n_layers is 1, expected 2");
    want = header;
    want.geometry.n_kv_heads = 7;
    check_header_refused(&s, &want, KV_ERR_MISMATCH, "n_kv_heads is 1, expected 7");
    want = header;
    want.geometry.head_dim = 4;
    check_header_refused(&s, &want, KV_ERR_MISMATCH, "head_dim is 3, expected 4");
    want = header;
    want.geometry.precision = KV_F16;
    check_header_refused(&s, &want, KV_ERR_MISMATCH, "precision is f32 (0), expected f16");
    want.geometry.precision = KV_Q8;
    want.geometry.head_dim = 32;
    check_header_refused(&s, &want, KV_ERR_MISMATCH, "precision is f32 (0), expected q8");
    want = header;
    want.fingerprint.bytes[31] ^= 0xff;
    check_header_refused(&s, &want, KV_ERR_MISMATCH, "fingerprint is ");
    want = header;
    want.numerics_id.bytes[0] ^= 1;
    check_header_refused(&s, &want, KV_ERR_MISMATCH, "numerics_id is ");
    want = header;
    want.ns.bytes[0] ^= 1;
    check_header_refused(&s, &want, KV_ERR_MISMATCH, "namespace is ");
    want = header;
    want.base = 1;
    check_header_refused(&s, &want, KV_ERR_MISMATCH, "base is 2, expected 1");
    want = header;
    want.base_ids = (const uint32_t[]){100, 102};
    check_header_refused(&s, &want, KV_ERR_MISMATCH, "base_digest is ");
    want = header;
    want.n_bound = header.n_bound - 1;
    check_header_refused(&s, &want, KV_ERR_LIMIT, "n_bound is 31: at most 30");
    release(&s);
    tear_down();
}
END_TEST

/* A lying length with a right CRC: the limit must catch it before anything is allocated for it. */
START_TEST(declared_lengths_over_their_limit_are_refused_first)
{
    struct kv_decoder *d;
    struct snapshot s;
    struct kv_why why;
    const uint32_t huge = 0xfffffff0u;

    set_up(&small, 21);
    s = encode(9);
    d = open_decoder();
    memcpy(s.records[0].bytes + 168, &huge, 4);
    ck_assert_int_eq(feed_record(d, &s.records[0], &why), KV_ERR_LIMIT);
    memcpy(s.records[0].bytes + 168, &(uint32_t){0}, 4);
    ck_assert_int_eq(feed_record(d, &s.records[0], &why), 0);
    memcpy(s.records[1].bytes + 12, &huge, 4);
    ck_assert_int_eq(feed_record(d, &s.records[1], &why), KV_ERR_LIMIT);
    memcpy(s.records[3].bytes + 12, &huge, 4);
    ck_assert_int_eq(feed_record(d, &s.records[3], &why), KV_ERR_LIMIT);
    kv_decoder_close(d);
    release(&s);
    tear_down();
}
END_TEST

/* Make a record's CRC right again, as somebody would who knows the format. */
static void reseal(const struct record *r, uint32_t position)
{
    uint32_t crc = 0;

    if (r->kind != HEADER) {
        crc = kv_crc32c(crc, header.snapshot_id, sizeof(header.snapshot_id));
        crc = kv_crc32c(crc, &position, sizeof(position));
    }
    crc = kv_crc32c(crc, r->bytes + 8, r->len - 8);
    memcpy(r->bytes + 4, &crc, sizeof(crc));
}

/* Write value at an offset, with a right CRC; the record must be refused with rc and the text, and
 * must pass when it is as it was. */
static void check_forged(struct kv_decoder *d, struct record *r, uint32_t position, size_t offset,
                         uint32_t value, int rc, const char *text)
{
    struct kv_why why = {{0}};
    uint32_t was;

    memcpy(&was, r->bytes + offset, sizeof(was));
    ck_assert_uint_ne(was, value);
    memcpy(r->bytes + offset, &value, sizeof(value));
    reseal(r, position);
    ck_assert_int_eq(feed_record(d, r, &why), rc);
    ck_assert_msg(strstr(why.text, text) != NULL, "\"%s\" is not in \"%s\"", text, why.text);
    memcpy(r->bytes + offset, &was, sizeof(was));
    reseal(r, position);
}

START_TEST(a_right_crc_does_not_excuse_wrong_content)
{
    struct kv_decoder *d;
    struct snapshot s;
    struct kv_why why;

    set_up(&small, 21);
    header.base = 2;
    header.base_ids = (const uint32_t[]){100, 101};
    s = encode(9); /* frames [2, 9) and [9, 21) */
    d = open_decoder();
    check_forged(d, &s.records[0], 0, 16, 1, KV_ERR_FORMAT, "required features");
    check_forged(d, &s.records[0], 0, 172, 1, KV_ERR_FORMAT, "bytes 172");
    check_forged(d, &s.records[0], 0, 164, 1, KV_ERR_FORMAT, "past n_bound");
    check_forged(d, &s.records[0], 0, 228, 7, KV_ERR_CHECK, "base_digest");
    check_forged(d, &s.records[0], 0, 160, 8, KV_ERR_MISMATCH, "frame_positions is 8");
    check_forged(d, &s.records[0], 0, 8, 2, KV_ERR_FORMAT, "version is 2");
    ck_assert_int_eq(feed_record(d, &s.records[0], &why), 0);
    check_forged(d, &s.records[1], 2, 16, 0, KV_ERR_CHECK, "frame digest");
    check_forged(d, &s.records[1], 2, 48, 5, KV_ERR_CHECK, "frame digest");
    check_forged(d, &s.records[1], 3, 8, 3, KV_ERR_ORDER, "first is 3, expected 2");
    check_forged(d, &s.records[1], 0, 8, 0, KV_ERR_ORDER, "first is 0, expected 2");
    reseal(&s.records[1], 2);
    ck_assert_int_eq(feed_record(d, &s.records[1], &why), 0);
    ck_assert_int_eq(feed_record(d, &s.records[2], &why), 0);
    check_forged(d, &s.records[3], 21, 8, 9, KV_ERR_FORMAT, "kind is 9");
    ck_assert_int_eq(feed_record(d, &s.records[3], &why), 0);
    ck_assert_int_eq(feed_record(d, &s.records[4], &why), 0);
    check_forged(d, &s.records[5], 22, 8, 22, KV_ERR_CHECK, "n_positions is 22, came 21");
    check_forged(d, &s.records[5], 21, 12, 3, KV_ERR_CHECK, "n_frames is 3, came 2");
    check_forged(d, &s.records[5], 21, 16, 1, KV_ERR_CHECK, "n_sections is 1, came 2");
    check_forged(d, &s.records[5], 21, 20, 1, KV_ERR_FORMAT, "bytes 20");
    check_forged(d, &s.records[5], 21, 24, 1, KV_ERR_CHECK, "root");
    reseal(&s.records[5], 21);
    ck_assert_int_eq(feed_record(d, &s.records[5], &why), 0);
    kv_decoder_close(d);
    release(&s);
    tear_down();
}
END_TEST

/* Each record is well formed and has its right digest; only the place is wrong. */
START_TEST(a_frame_past_the_bound_or_a_border_is_refused)
{
    const uint32_t f = 32;
    struct snapshot s, t;
    struct kv_decoder *d;
    struct kv_why why;

    set_up(&wide, 40);
    ck_assert_uint_eq(header.frame_positions, f);
    s = encode(0); /* [0, 32) and [32, 40) */
    header.n_bound = 20;
    d = open_decoder();
    ck_assert_int_eq(feed_record(d, &s.records[0], &why), KV_ERR_LIMIT);
    memcpy(s.records[0].bytes + 164, &(uint32_t){20}, 4);
    reseal(&s.records[0], 0);
    ck_assert_int_eq(feed_record(d, &s.records[0], &why), 0);
    ck_assert_int_eq(feed_record(d, &s.records[1], &why), KV_ERR_ORDER);
    ck_assert_msg(strstr(why.text, "past n_bound 20") != NULL, "%s", why.text);
    kv_decoder_close(d);

    /* A frame of 32 from 5 on: full frames are within the length limit, but 37 is past the border.
     */
    header.n_bound = 50;
    t = encode(5); /* [0, 5), [5, 32), [32, 40) */
    d = open_decoder();
    ck_assert_int_eq(feed_record(d, &t.records[0], &why), 0);
    ck_assert_int_eq(feed_record(d, &t.records[1], &why), 0);
    memcpy(s.records[1].bytes + 8, &(uint32_t){5}, 4);
    reseal(&s.records[1], 5);
    ck_assert_int_eq(feed_record(d, &s.records[1], &why), KV_ERR_ORDER);
    ck_assert_msg(strstr(why.text, "past a multiple of 32") != NULL, "%s", why.text);
    ck_assert_int_eq(feed_record(d, &t.records[2], &why), 0);
    kv_decoder_close(d);
    release(&s);
    release(&t);
    tear_down();
}
END_TEST

START_TEST(an_encoder_refuses_what_no_decoder_would_take)
{
    struct kv_snapshot_header h;
    struct kv_encoder *e = NULL;
    struct kv_context *other;
    struct kv_namespace ns2 = ns;
    unsigned char buffer[4096];
    struct kv_why why;

    set_up(&small, 21);
    h = header;
    h.frame_positions *= 2;
    ck_assert_int_eq(kv_encoder_open(&h, &e, &why), KV_ERR_INVALID);
    h = header;
    h.base = 40;
    h.base_ids = (const uint32_t[]){1};
    ck_assert_int_eq(kv_encoder_open(&h, &e, &why), KV_ERR_INVALID);
    h = header;
    h.base = 1;
    ck_assert_int_eq(kv_encoder_open(&h, &e, &why), KV_ERR_INVALID);
    h = header;
    h.parent_id[3] = 1;
    ck_assert_int_eq(kv_encoder_open(&h, &e, &why), KV_ERR_INVALID);
    ck_assert_ptr_null(e);
    ck_assert_int_eq(kv_encoder_open(&header, &e, &why), 0);
    ns2.digest.bytes[0] ^= 1;
    ck_assert_int_eq(kv_context_open(cache, &ns2, &other), 0);
    append(other, 3, 100);
    ck_assert_int_eq(kv_encoder_frame(e, other, 3, buffer), KV_ERR_MISMATCH);
    kv_context_close(other);
    ck_assert_int_eq(kv_encoder_frame(e, ctx, 22, buffer), KV_ERR_INVALID);
    ck_assert_int_eq(kv_encoder_section(e, KV_SECTION_SESSION, "", 0, buffer), 0);
    ck_assert_int_eq(kv_encoder_section(e, KV_SECTION_SESSION, "", 0, buffer), KV_ERR_ORDER);
    ck_assert_int_eq(kv_encoder_section(e, KV_SECTION_LOGITS, "1234", 4, buffer), KV_ERR_ORDER);
    ck_assert_int_eq(kv_encoder_frame(e, ctx, 3, buffer), KV_ERR_ORDER);
    kv_encoder_close(e);
    h = header;
    h.base = 1;
    h.base_ids = (const uint32_t[]){999};
    ck_assert_int_eq(kv_encoder_open(&h, &e, &why), 0);
    ck_assert_int_eq(kv_encoder_frame(e, ctx, 3, buffer), KV_ERR_MISMATCH);
    kv_encoder_close(e);
    tear_down();
}
END_TEST

int main(void)
{
    Suite *s = suite_create("kv_codec");
    TCase *tc = tcase_create("codec");
    SRunner *sr = srunner_create(s);
    int n_failed;

    suite_add_tcase(s, tc);
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, crc_and_sha_are_the_published_ones);
    tcase_add_test(tc, a_prefix_digest_does_not_depend_on_how_ids_are_fed);
    tcase_add_test(tc, namespaces_of_different_fields_differ);
    tcase_add_loop_test(tc, a_snapshot_reads_back_bit_for_bit, 0, KV_Q8 + 1);
    tcase_add_test(tc, a_frame_is_held_back_until_it_is_full_or_flushed);
    tcase_add_test(tc, a_frame_of_rows_is_that_of_a_context);
    tcase_add_test(tc, every_flipped_byte_is_refused_and_changes_nothing);
    tcase_add_test(tc, every_truncation_and_excess_is_refused_and_changes_nothing);
    tcase_add_test(tc, records_out_of_order_are_refused);
    tcase_add_test(tc, a_frame_of_another_snapshot_is_refused);
    tcase_add_test(tc, a_header_that_differs_is_refused_naming_field_and_both_values);
    tcase_add_test(tc, declared_lengths_over_their_limit_are_refused_first);
    tcase_add_test(tc, a_right_crc_does_not_excuse_wrong_content);
    tcase_add_test(tc, a_frame_past_the_bound_or_a_border_is_refused);
    tcase_add_test(tc, an_encoder_refuses_what_no_decoder_would_take);
    srunner_run_all(sr, CK_ENV);
    n_failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return n_failed != 0;
}

/* Rows in pages, at each precision.  Method: pages beside a map that says for every byte of a
 * position's rows where in the page it stands, made from the picture in kvcore.h element by
 * element; scatter, gather and clone must agree with it in every byte of the page.  All of it with
 * the vectors that this CPU has, and with those that all have. */
#include "kvcore/kv_cache.h"
#include "kvcore/kv_lanes.h"
#include "kvcore/kv_page.h"
#include "kvcore/kvcore.h"

#include <check.h>
#include <stdlib.h>
#include <string.h>

static const struct kv_geometry geometries[] = {
    {2, 2, 6, KV_F16},   {1, 1, 1, KV_F16},    {2, 3, 64, KV_F16}, {1, 2, 5, KV_F32},
    {2, 3, 48, KV_F32},  {2, 1, 32, KV_Q8},    {1, 3, 64, KV_Q8},  {2, 2, 96, KV_Q8},
    {1, 3, 272, KV_F32}, {2, 1, 1088, KV_F16}, {2, 3, 32, KV_Q8},  {1, 5, 128, KV_Q8},
    {1, 17, 128, KV_Q8}, {1, 1, 83, KV_F16},
};
enum { N_GEOMETRIES = sizeof(geometries) / sizeof(geometries[0]) };

static const struct kv_namespace ns;
static struct kv_cache *cache;
static struct kv_layout layout;
static size_t position_bytes;
static size_t *map; /* [page_tokens][position_bytes] offsets in the page */

/* Add the bytes of one element that stands at `at`. */
static size_t *add(size_t *next, size_t at, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        *next++ = at + i;
    return next;
}

/* [H][P / 16][dim][16] from `base` on. */
static size_t *add_lanes(size_t *next, size_t base, size_t head_bytes, uint32_t dim, size_t bytes,
                         uint32_t slot)
{
    for (uint32_t h = 0; h < layout.geometry.n_kv_heads; h++)
        for (uint32_t d = 0; d < dim; d++)
            next =
                add(next, base + h * head_bytes + ((slot / 16 * dim + d) * 16 + slot % 16) * bytes,
                    bytes);
    return next;
}

static void make_map(void)
{
    const struct kv_geometry *g = &layout.geometry;
    const bool q8 = g->precision == KV_Q8;
    const size_t bytes = g->precision == KV_F32 ? 4 : q8 ? 1 : 2;
    size_t *next;

    map = malloc(layout.page_tokens * position_bytes * sizeof(*map));
    ck_assert_ptr_nonnull(map);
    next = map;
    for (uint32_t slot = 0; slot < layout.page_tokens; slot++)
        for (uint32_t l = 0; l < g->n_layers; l++) {
            const size_t base = l * layout.layer_bytes;

            next = add_lanes(next, base, layout.k_head_bytes, g->head_dim, bytes, slot);
            if (q8)
                next = add_lanes(next, base + layout.ks_offset, layout.scales_head_bytes,
                                 g->head_dim / 32, 2, slot);
            for (uint32_t i = 0; i < g->n_kv_heads * g->head_dim; i++)
                next = add(next, base + layout.v_offset + slot * layout.v_row_bytes + i * bytes,
                           bytes);
            if (q8)
                next = add_lanes(next, base + layout.vs_offset, layout.scales_head_bytes,
                                 g->head_dim / 32, 2, slot);
        }
    ck_assert_ptr_eq(next, map + layout.page_tokens * position_bytes);
}

static void open_cache(const struct kv_geometry *g, uint32_t page_tokens)
{
    const struct kv_cache_config config = {
        .geometry = *g, .page_tokens = page_tokens, .n_pages = 8, .arena = true};

    ck_assert_int_eq(kv_cache_open(&config, &cache, NULL), 0);
    layout = *kv_cache_layout(cache);
    position_bytes = kv_position_bytes(g);
    make_map();
}

static void close_cache(void)
{
    free(map);
    kv_cache_close(cache);
}

static unsigned char *random_bytes(size_t n)
{
    unsigned char *bytes = malloc(n + 1);
    uint32_t x = 12345;

    ck_assert_ptr_nonnull(bytes);
    for (size_t i = 0; i < n; i++) {
        x = x * 1664525u + 1013904223u;
        bytes[i] = (unsigned char)(x >> 24);
    }
    return bytes;
}

static struct kv_context *begun(uint32_t n)
{
    struct kv_context *ctx;
    uint32_t *ids = calloc(n, sizeof(*ids));

    ck_assert_ptr_nonnull(ids);
    ck_assert_int_eq(kv_context_open(cache, &ns, &ctx), 0);
    ck_assert_int_eq(kv_context_begin(ctx, ids, n), 0);
    free(ids);
    return ctx;
}

/* The page of these rows, [n <= page_tokens] positions, zero everywhere else; ids are zero. */
static unsigned char *page_of(const unsigned char *rows, uint32_t n)
{
    unsigned char *page = calloc(1, layout.page_bytes);

    ck_assert_ptr_nonnull(page);
    for (size_t i = 0; i < n * position_bytes; i++)
        page[map[i]] = rows[i];
    return page;
}

/* Two pages of 16 and one position. */
START_TEST(every_byte_stands_where_the_header_says)
{
    struct kv_context *ctx;
    unsigned char *rows, *page;
    struct iovec piece;

    open_cache(&geometries[_i], 32);
    rows = random_bytes(33 * position_bytes);
    piece = (struct iovec){rows, 33 * position_bytes};
    ctx = begun(33);
    ck_assert_int_eq(kv_context_scatter(ctx, 0, 33, &piece, 1), 0);
    for (uint32_t i = 0; i < 2; i++) {
        page = page_of(rows + i * 32 * position_bytes, i == 0 ? 32 : 1);
        ck_assert(memcmp(kv_context_page(ctx, i), page, layout.page_bytes) == 0);
        free(page);
    }
    kv_context_close(ctx);
    free(rows);
    close_cache();
}
END_TEST

START_TEST(any_run_of_positions_reads_back_as_it_was_written)
{
    enum { N = 50 };
    unsigned char *rows, *got;
    struct kv_context *ctx;
    struct iovec piece;

    open_cache(&geometries[_i], 16);
    rows = random_bytes(N * position_bytes);
    got = malloc(N * position_bytes + 2);
    got++; /* not aligned */
    ctx = begun(N);
    for (uint32_t first = 0, n = 1; first < N;
         first += n, n = first + n + 3 < N ? n + 3 : N - first) {
        piece = (struct iovec){rows + first * position_bytes, n * position_bytes};
        ck_assert_int_eq(kv_context_scatter(ctx, first, n, &piece, 1), 0);
    }
    ck_assert_int_eq(kv_context_commit(ctx, N), 0);
    for (uint32_t first = 0; first < N; first++)
        for (uint32_t n = 0; n <= N - first; n++) {
            got[n * position_bytes] = 0x5a;
            ck_assert_int_eq(kv_context_gather(ctx, first, n, got), 0);
            ck_assert(memcmp(got, rows + first * position_bytes, n * position_bytes) == 0);
            ck_assert_uint_eq(got[n * position_bytes], 0x5a);
        }
    kv_context_close(ctx);
    free(got - 1);
    free(rows);
    close_cache();
}
END_TEST

/* Pieces of one length, 1 to a little over a position, and an empty one now and then. */
START_TEST(rows_come_in_pieces_of_any_length)
{
    enum { N = 19, FIRST = 5 };
    unsigned char *rows, *got;
    struct iovec *pieces;

    open_cache(&geometries[_i], 16);
    rows = random_bytes(N * position_bytes);
    got = malloc(N * position_bytes);
    pieces = malloc((2 * N * position_bytes + 2) * sizeof(*pieces));
    for (size_t len = 1; len < position_bytes + 8; len += len < 40 ? 1 : 37) {
        struct kv_context *ctx = begun(FIRST + N);
        size_t n = 0;

        for (size_t at = 0; at < N * position_bytes; at += len) {
            const size_t left = N * position_bytes - at;

            if (at / len % 3 == 0)
                pieces[n++] = (struct iovec){NULL, 0};
            pieces[n++] = (struct iovec){rows + at, left < len ? left : len};
        }
        ck_assert_int_eq(kv_context_scatter(ctx, FIRST, N, pieces, n), 0);
        ck_assert_int_eq(kv_context_commit(ctx, FIRST + N), 0);
        ck_assert_int_eq(kv_context_gather(ctx, FIRST, N, got), 0);
        ck_assert_msg(memcmp(got, rows, N * position_bytes) == 0, "pieces of %zu", len);
        kv_context_close(ctx);
    }
    free(pieces);
    free(got);
    free(rows);
    close_cache();
}
END_TEST

START_TEST(a_clone_has_the_valid_positions_and_zeros_at_every_length)
{
    unsigned char *rows, *full, *copy, *want;

    open_cache(&geometries[_i], 64);
    rows = random_bytes(64 * position_bytes);
    full = page_of(rows, 64);
    copy = malloc(layout.page_bytes);
    for (size_t i = 0; i < 64 * sizeof(uint32_t); i++)
        full[layout.ids_offset + i] = (unsigned char)(i + 1);
    for (uint32_t n = 0; n <= 64; n++) {
        memset(copy, 0xee, layout.page_bytes);
        kv_page_clone(&layout, copy, full, n);
        want = page_of(rows, n);
        memcpy(want + layout.ids_offset, full + layout.ids_offset, n * sizeof(uint32_t));
        ck_assert_msg(memcmp(copy, want, layout.page_bytes) == 0, "%u positions", n);
        free(want);
    }
    free(copy);
    free(full);
    free(rows);
    close_cache();
}
END_TEST

START_TEST(one_position_is_replaced_and_no_other_byte)
{
    unsigned char *rows, *page, *want;

    open_cache(&geometries[_i], 16);
    rows = random_bytes(17 * position_bytes);
    page = page_of(rows, 16);
    for (uint32_t slot = 0; slot < 16; slot++) {
        want = page_of(rows, 16);
        memcpy(page, want, layout.page_bytes);
        for (size_t i = 0; i < position_bytes; i++)
            want[map[slot * position_bytes + i]] = rows[16 * position_bytes + i];
        kv_page_put(&layout, page, slot, rows + 16 * position_bytes);
        ck_assert(memcmp(page, want, layout.page_bytes) == 0);
        free(want);
    }
    free(page);
    free(rows);
    close_cache();
}
END_TEST

/* Every page of the arena full of other bytes. */
static void soil(void)
{
    struct kv_context *ctx = begun(8 * layout.page_tokens);

    for (uint32_t i = 0; i < 8; i++)
        memset(kv_context_page(ctx, i), 0xee, layout.page_bytes);
    kv_context_close(ctx);
}

START_TEST(loaded_pages_are_those_of_an_append)
{
    enum { N = 80 };
    uint32_t ids[N];
    unsigned char *rows;

    open_cache(&geometries[_i], 32);
    rows = random_bytes(N * position_bytes);
    for (uint32_t i = 0; i < N; i++)
        ids[i] = i + 7;
    for (uint32_t n = 1; n <= N; n += n % 16 == 1 ? 14 : 1) {
        const struct iovec all = {rows, n * position_bytes};
        struct kv_context *want, *got;

        soil();
        ck_assert_int_eq(kv_context_open(cache, &ns, &want), 0);
        ck_assert_int_eq(kv_context_begin(want, ids, n), 0);
        ck_assert_int_eq(kv_context_scatter(want, 0, n, &all, 1), 0);
        ck_assert_int_eq(kv_context_commit(want, n), 0);
        ck_assert_int_eq(kv_context_open(cache, &ns, &got), 0);
        for (uint32_t at = 0, run; at < n; at += run) {
            const size_t cut = at * position_bytes / 3;
            struct iovec pieces[2];

            run = at % 7 + 16 < n - at ? at % 7 + 16 : n - at;
            pieces[0] = (struct iovec){rows + at * position_bytes, cut % position_bytes};
            pieces[1] = (struct iovec){rows + at * position_bytes + pieces[0].iov_len,
                                       run * position_bytes - pieces[0].iov_len};
            ck_assert_int_eq(kv_context_load(got, ids + at, run, pieces, 2), 0);
        }
        kv_context_loaded(got);
        ck_assert_uint_eq(kv_context_length(got), n);
        ck_assert_uint_eq(kv_context_n_pages(got), kv_context_n_pages(want));
        for (uint32_t i = 0; i < kv_context_n_pages(want); i++)
            ck_assert_msg(
                memcmp(kv_context_page(got, i), kv_context_page(want, i), layout.page_bytes) == 0,
                "page %u of %u positions", i, n);
        kv_context_close(got);
        kv_context_close(want);
    }
    free(rows);
    close_cache();
}
END_TEST

START_TEST(a_load_of_rows_that_do_not_add_up_appends_nothing)
{
    unsigned char *rows;
    struct kv_context *ctx;
    struct iovec piece;
    const uint32_t ids[3] = {1, 2, 3};

    open_cache(&geometries[0], 16);
    rows = random_bytes(3 * position_bytes);
    piece = (struct iovec){rows, 3 * position_bytes - 1};
    ck_assert_int_eq(kv_context_open(cache, &ns, &ctx), 0);
    ck_assert_int_eq(kv_context_load(ctx, ids, 3, &piece, 1), KV_ERR_INVALID);
    ck_assert_uint_eq(kv_context_length(ctx), 0);
    piece.iov_len++;
    ck_assert_int_eq(kv_context_load(ctx, ids, 3, &piece, 1), 0);
    kv_context_loaded(ctx);
    ck_assert_int_eq(kv_context_freeze(ctx), 0);
    ck_assert_int_eq(kv_context_load(ctx, ids, 3, &piece, 1), KV_ERR_BUSY);
    kv_context_close(ctx);
    ck_assert_int_eq(kv_cache_check(cache, NULL), 0);
    free(rows);
    close_cache();
}
END_TEST

static void use_plain(void)
{
    kv_lanes_plain(true);
}

static void use_best(void)
{
    kv_lanes_plain(false);
}

static void add_tests(TCase *tc)
{
    tcase_set_timeout(tc, 60);
    tcase_add_loop_test(tc, every_byte_stands_where_the_header_says, 0, N_GEOMETRIES);
    tcase_add_loop_test(tc, any_run_of_positions_reads_back_as_it_was_written, 0, N_GEOMETRIES);
    tcase_add_loop_test(tc, rows_come_in_pieces_of_any_length, 0, N_GEOMETRIES);
    tcase_add_loop_test(tc, a_clone_has_the_valid_positions_and_zeros_at_every_length, 0,
                        N_GEOMETRIES);
    tcase_add_loop_test(tc, one_position_is_replaced_and_no_other_byte, 0, N_GEOMETRIES);
    tcase_add_loop_test(tc, loaded_pages_are_those_of_an_append, 0, N_GEOMETRIES);
    tcase_add_test(tc, a_load_of_rows_that_do_not_add_up_appends_nothing);
}

int main(void)
{
    Suite *s = suite_create("kv_rows");
    TCase *best = tcase_create("rows"), *plain = tcase_create("rows, plain vectors");
    SRunner *sr = srunner_create(s);
    int n_failed;

    suite_add_tcase(s, best);
    add_tests(best);
    suite_add_tcase(s, plain);
    tcase_add_checked_fixture(plain, use_plain, use_best);
    add_tests(plain);
    srunner_run_all(sr, CK_ENV);
    n_failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return n_failed != 0;
}

/* Contexts: what append, fork, freeze, truncate and reservations promise.  Method: a tiny geometry,
 * rows that are a function of (position, a salt), read back through gather. */
#include "kvcore/kvcore.h"

#include <check.h>
#include <stdlib.h>
#include <string.h>

enum { P = 16, N_PAGES = 8 };

static const struct kv_geometry geometry = {
    .n_layers = 2, .n_kv_heads = 2, .head_dim = 6, .precision = KV_F16};
static const struct kv_namespace ns = {.group = 1};
static struct kv_cache *cache;

static void open_cache(void)
{
    const struct kv_cache_config config = {
        .geometry = geometry, .page_tokens = P, .n_pages = N_PAGES, .arena = true};

    ck_assert_int_eq(kv_cache_open(&config, &cache, NULL), 0);
}

static void close_cache(void)
{
    struct kv_stats s;

    kv_cache_stats(cache, &s);
    ck_assert_uint_eq(s.n_contexts, 0);
    ck_assert_uint_eq(s.n_reserved, 0);
    ck_assert_uint_eq(s.n_live, s.n_evictable);
    kv_cache_close(cache);
}

static struct kv_stats stats(void)
{
    struct kv_stats s;

    kv_cache_stats(cache, &s);
    return s;
}

static struct kv_context *new_context(void)
{
    struct kv_context *ctx;

    ck_assert_int_eq(kv_context_open(cache, &ns, &ctx), 0);
    return ctx;
}

static unsigned char row_byte(uint32_t position, size_t i, unsigned salt)
{
    return (unsigned char)(position * 31 + i * 7 + salt * 101 + 1);
}

/* n rows of positions from `first` on; the caller frees. */
static unsigned char *make_rows(uint32_t first, uint32_t n, unsigned salt)
{
    const size_t bytes = kv_position_bytes(&geometry);
    unsigned char *rows = malloc(n * bytes + 1);

    ck_assert_ptr_nonnull(rows);
    for (uint32_t p = 0; p < n; p++)
        for (size_t i = 0; i < bytes; i++)
            rows[p * bytes + i] = row_byte(first + p, i, salt);
    return rows;
}

static int try_append(struct kv_context *ctx, uint32_t n, unsigned salt)
{
    const uint32_t first = kv_context_length(ctx);
    unsigned char *rows = make_rows(first, n, salt);
    struct iovec piece = {.iov_base = rows, .iov_len = n * kv_position_bytes(&geometry)};
    uint32_t ids[KV_PAGE_TOKENS_MAX];
    int rc;

    for (uint32_t i = 0; i < n; i++)
        ids[i] = (first + i) * 1000 + salt;
    rc = kv_context_begin(ctx, ids, n);
    if (rc == 0) {
        ck_assert_int_eq(kv_context_scatter(ctx, first, n, &piece, 1), 0);
        ck_assert_int_eq(kv_context_commit(ctx, n), 0);
    }
    free(rows);
    return rc;
}

static void append(struct kv_context *ctx, uint32_t n, unsigned salt)
{
    ck_assert_int_eq(try_append(ctx, n, salt), 0);
}

/* Positions [first, first + n) hold what an append with that salt wrote. */
static void check_rows(struct kv_context *ctx, uint32_t first, uint32_t n, unsigned salt)
{
    const size_t bytes = kv_position_bytes(&geometry);
    unsigned char *want = make_rows(first, n, salt), *got = malloc(n * bytes + 1);
    uint32_t ids[KV_PAGE_TOKENS_MAX];

    ck_assert_int_eq(kv_context_gather(ctx, first, n, got), 0);
    ck_assert_mem_eq(got, want, n * bytes);
    ck_assert_int_eq(kv_context_ids(ctx, first, n, ids), 0);
    for (uint32_t i = 0; i < n; i++)
        ck_assert_uint_eq(ids[i], (first + i) * 1000 + salt);
    free(want);
    free(got);
}

START_TEST(rows_and_ids_read_back_as_they_were_written)
{
    struct kv_context *ctx = new_context();

    append(ctx, 5, 1);
    append(ctx, 30, 1);
    append(ctx, 1, 1);
    ck_assert_uint_eq(kv_context_length(ctx), 36);
    ck_assert_uint_eq(kv_context_n_pages(ctx), 3);
    check_rows(ctx, 0, 36, 1);
    check_rows(ctx, 14, 4, 1);
    kv_context_close(ctx);
}
END_TEST

/* One position either side of a page border and on it. */
START_TEST(a_fork_takes_no_page_and_keeps_its_parents_rows)
{
    static const uint32_t cuts[] = {0, 1, 15, 16, 17, 31, 32, 33};

    for (size_t i = 0; i < sizeof(cuts) / sizeof(cuts[0]); i++) {
        struct kv_context *ctx = new_context(), *child;
        uint32_t n_live;

        append(ctx, 33, 1);
        n_live = stats().n_live;
        ck_assert_int_eq(kv_context_fork(ctx, cuts[i], &child), 0);
        ck_assert_uint_eq(stats().n_live, n_live);
        append(child, 20, 2);
        append(ctx, 9, 3);
        check_rows(ctx, 0, 33, 1);
        check_rows(ctx, 33, 9, 3);
        check_rows(child, 0, cuts[i], 1);
        check_rows(child, cuts[i], 20, 2);
        kv_context_close(ctx);
        check_rows(child, 0, cuts[i], 1);
        kv_context_close(child);
        ck_assert_uint_eq(stats().n_free, N_PAGES);
    }
}
END_TEST

START_TEST(a_first_write_after_a_fork_clones_one_page_only)
{
    struct kv_context *ctx = new_context(), *child;
    uint64_t n_clones = stats().n_clones;

    append(ctx, 20, 1);
    ck_assert_int_eq(kv_context_fork(ctx, 20, &child), 0);
    append(child, 1, 2);
    append(child, 1, 2);
    append(ctx, 1, 3); /* its sole holder again: in place */
    ck_assert_uint_eq(stats().n_clones, n_clones + 1);
    kv_context_close(ctx);
    kv_context_close(child);
}
END_TEST

START_TEST(a_clone_has_zeros_where_the_cut_is)
{
    struct kv_context *ctx = new_context(), *child;
    const struct kv_layout *l = kv_cache_layout(cache);
    const uint32_t id = 5;
    const unsigned char *page;
    size_t n_zero = 0;

    append(ctx, 16, 1);
    ck_assert_int_eq(kv_context_fork(ctx, 3, &child), 0);
    ck_assert_int_eq(kv_context_begin(child, &id, 1), 0);
    page = kv_context_page(child, 0);
    for (size_t i = 0; i < l->ids_offset; i++)
        n_zero += page[i] == 0;
    ck_assert_uint_ge(n_zero, l->ids_offset - 3 * kv_position_bytes(&geometry));
    ck_assert_int_eq(kv_context_abort(child), 0);
    check_rows(child, 0, 3, 1);
    kv_context_close(child);
    kv_context_close(ctx);
}
END_TEST

START_TEST(recycled_pages_are_issued_zero)
{
    const struct kv_layout *l = kv_cache_layout(cache);
    struct kv_context *ctx = new_context();
    const uint32_t id = 0;
    const unsigned char *page;

    append(ctx, P * N_PAGES, 1);
    kv_context_close(ctx);
    ctx = new_context();
    ck_assert_int_eq(kv_context_begin(ctx, &id, 1), 0);
    page = kv_context_page(ctx, 0);
    for (size_t i = 0; i < l->page_bytes; i++)
        ck_assert_uint_eq(page[i], 0);
    kv_context_close(ctx);
}
END_TEST

START_TEST(between_begin_and_its_end_every_other_change_is_busy)
{
    struct kv_context *ctx = new_context(), *child = NULL;
    const uint32_t ids[4] = {1, 2, 3, 4};

    append(ctx, 4, 1);
    ck_assert_int_eq(kv_context_begin(ctx, ids, 4), 0);
    ck_assert_int_eq(kv_context_begin(ctx, ids, 4), KV_ERR_BUSY);
    ck_assert_int_eq(kv_context_reserve(ctx, 40), KV_ERR_BUSY);
    ck_assert_int_eq(kv_context_fork(ctx, 1, &child), KV_ERR_BUSY);
    ck_assert_int_eq(kv_context_freeze(ctx), KV_ERR_BUSY);
    ck_assert_int_eq(kv_context_truncate(ctx, 1), KV_ERR_BUSY);
    ck_assert_int_eq(kv_context_publish(ctx, NULL, 0), KV_ERR_BUSY);
    ck_assert_int_eq(kv_context_give_up(ctx, NULL, 0), KV_ERR_BUSY);
    ck_assert_ptr_null(child);
    ck_assert_int_eq(kv_context_commit(ctx, 5), KV_ERR_INVALID);
    ck_assert_int_eq(kv_context_commit(ctx, 4), 0);
    ck_assert_int_eq(kv_context_commit(ctx, 0), KV_ERR_INVALID);
    kv_context_close(ctx);
}
END_TEST

START_TEST(a_partial_commit_gives_unused_pages_back_to_the_reservation)
{
    struct kv_context *ctx = new_context();
    uint32_t ids[40] = {0};

    ck_assert_int_eq(kv_context_reserve(ctx, 40), 0);
    ck_assert_int_eq(kv_context_begin(ctx, ids, 40), 0);
    ck_assert_uint_eq(stats().n_live, 3);
    ck_assert_uint_eq(stats().n_reserved, 0);
    ck_assert_int_eq(kv_context_commit(ctx, 1), 0);
    ck_assert_uint_eq(stats().n_live, 1);
    ck_assert_uint_eq(stats().n_reserved, 2);
    ck_assert_uint_eq(kv_context_length(ctx), 1);
    kv_context_close(ctx);
    ck_assert_uint_eq(stats().n_reserved, 0);
}
END_TEST

START_TEST(a_close_inside_an_append_returns_everything)
{
    struct kv_context *ctx = new_context();
    uint32_t ids[40] = {0};

    ck_assert_int_eq(kv_context_begin(ctx, ids, 40), 0);
    kv_context_close(ctx);
    ck_assert_uint_eq(stats().n_free, N_PAGES);
}
END_TEST

START_TEST(a_full_budget_is_an_error_and_changes_nothing)
{
    struct kv_context *a = new_context(), *b = new_context();
    struct kv_stats before;

    append(a, P * 6, 1);
    ck_assert_int_eq(kv_context_reserve(b, P * 2), 0);
    before = stats();
    ck_assert_int_eq(kv_context_reserve(a, P * 6 + 1), KV_ERR_FULL);
    ck_assert_int_eq(try_append(a, 1, 1), KV_ERR_FULL);
    ck_assert_int_eq(kv_context_reserve(b, P * 2 + 1), KV_ERR_FULL);
    ck_assert_uint_eq(stats().n_reserved, before.n_reserved);
    ck_assert_uint_eq(stats().n_live, before.n_live);
    check_rows(a, 0, P * 6, 1);
    append(b, P * 2, 2); /* the promise holds */
    kv_context_close(a);
    kv_context_close(b);
}
END_TEST

START_TEST(a_fork_of_a_parent_with_a_reservation_keeps_the_promise)
{
    struct kv_context *ctx = new_context(), *child, *rest = new_context();

    append(ctx, 2, 1);
    ck_assert_int_eq(kv_context_reserve(ctx, 2 * P), 0); /* one slot held */
    ck_assert_int_eq(kv_context_fork(ctx, 2, &child), 0);
    ck_assert_uint_eq(stats().n_reserved, 2); /* and one for the clone of its tail */
    ck_assert_int_eq(kv_context_reserve(rest, (N_PAGES - 3) * P), 0);
    append(ctx, 2 * P - 2, 1);
    kv_context_close(child);
    kv_context_close(ctx);
    kv_context_close(rest);
}
END_TEST

START_TEST(a_fork_that_would_break_a_reservation_is_full_and_changes_nothing)
{
    struct kv_context *ctx = new_context(), *child = NULL;

    append(ctx, 2, 1);
    ck_assert_int_eq(kv_context_reserve(ctx, N_PAGES * P), 0);
    ck_assert_int_eq(kv_context_fork(ctx, 2, &child), KV_ERR_FULL);
    ck_assert_ptr_null(child);
    ck_assert_uint_eq(stats().n_contexts, 1);
    append(ctx, N_PAGES * P - 2, 1);
    ck_assert_int_eq(kv_context_fork(ctx, P, &child), 0); /* at a border: no slot needed */
    kv_context_close(child);
    kv_context_close(ctx);
}
END_TEST

START_TEST(a_frozen_context_never_changes_and_lives_as_long_as_its_references)
{
    struct kv_context *ctx = new_context(), *child, *other;
    const uint32_t id = 1;

    append(ctx, 20, 1);
    ck_assert_int_eq(kv_context_reserve(ctx, 60), 0);
    ck_assert_int_eq(kv_context_freeze(ctx), 0);
    ck_assert_uint_eq(stats().n_reserved, 0);
    ck_assert_int_eq(kv_context_begin(ctx, &id, 1), KV_ERR_BUSY);
    ck_assert_int_eq(kv_context_truncate(ctx, 1), KV_ERR_BUSY);
    ck_assert_int_eq(kv_context_freeze(ctx), KV_ERR_BUSY);
    ck_assert_int_eq(kv_context_reserve(ctx, 60), KV_ERR_BUSY);
    other = kv_context_ref(ctx);
    kv_context_close(ctx);
    ck_assert_int_eq(kv_context_fork(other, 18, &child), 0);
    append(child, 10, 2);
    check_rows(other, 0, 20, 1);
    kv_context_close(other);
    check_rows(child, 0, 18, 1);
    kv_context_close(child);
    ck_assert_uint_eq(stats().n_free, N_PAGES);
}
END_TEST

START_TEST(every_truncation_of_a_shared_context_leaves_the_other_alone)
{
    for (uint32_t cut = 0; cut <= 35; cut++) {
        struct kv_context *ctx = new_context(), *child;

        append(ctx, 35, 1);
        ck_assert_int_eq(kv_context_fork(ctx, 35, &child), 0);
        ck_assert_int_eq(kv_context_truncate(child, cut), 0);
        ck_assert_int_eq(kv_context_truncate(child, cut + 1), KV_ERR_INVALID);
        append(child, 36 - cut, 2);
        check_rows(ctx, 0, 35, 1);
        check_rows(child, 0, cut, 1);
        check_rows(child, cut, 36 - cut, 2);
        kv_context_close(ctx);
        kv_context_close(child);
    }
}
END_TEST

START_TEST(a_truncation_ends_the_reservation)
{
    struct kv_context *ctx = new_context();

    append(ctx, 10, 1);
    ck_assert_int_eq(kv_context_reserve(ctx, 64), 0);
    ck_assert_int_eq(kv_context_truncate(ctx, 10), 0);
    ck_assert_uint_eq(stats().n_reserved, 0);
    kv_context_close(ctx);
}
END_TEST

/* A dozen generations, each forked from a branch that was itself forked and written. */
START_TEST(branches_of_branches_stay_apart)
{
    struct kv_context *branch[12];

    branch[0] = new_context();
    append(branch[0], 5, 1);
    for (uint32_t i = 1; i < 12; i++) {
        ck_assert_int_eq(kv_context_fork(branch[i - 1], 5, &branch[i]), 0);
        if (i <= 6)
            append(branch[i], i, 10 + i);
    }
    for (uint32_t i = 1; i < 12; i++) {
        check_rows(branch[i], 0, 5, 1);
        if (i <= 6)
            check_rows(branch[i], 5, i, 10 + i);
    }
    for (uint32_t i = 0; i < 12; i++)
        kv_context_close(branch[i]);
    ck_assert_uint_eq(stats().n_free, N_PAGES);
}
END_TEST

START_TEST(rows_scatter_from_pieces_of_any_size)
{
    const size_t bytes = 20 * kv_position_bytes(&geometry);
    unsigned char *rows = make_rows(3, 20, 4);
    uint32_t ids[20];
    struct iovec pieces[4096];

    ck_assert_uint_lt(bytes, sizeof(pieces) / sizeof(pieces[0]));
    for (uint32_t i = 0; i < 20; i++)
        ids[i] = (3 + i) * 1000 + 4;
    for (size_t step = 1; step <= bytes; step = step * 2 + 1) {
        struct kv_context *ctx = new_context();
        size_t n = 0;

        append(ctx, 3, 1);
        ck_assert_int_eq(kv_context_begin(ctx, ids, 20), 0);
        pieces[n++] = (struct iovec){.iov_base = NULL, .iov_len = 0};
        for (size_t at = 0; at < bytes; at += step)
            pieces[n++] = (struct iovec){.iov_base = rows + at,
                                         .iov_len = bytes - at < step ? bytes - at : step};
        ck_assert_int_eq(kv_context_scatter(ctx, 3, 20, pieces, n - 1), KV_ERR_INVALID);
        ck_assert_int_eq(kv_context_scatter(ctx, 2, 20, pieces, n), KV_ERR_INVALID);
        ck_assert_int_eq(kv_context_scatter(ctx, 4, 20, pieces, n), KV_ERR_INVALID);
        ck_assert_int_eq(kv_context_scatter(ctx, 3, 20, pieces, n), 0);
        ck_assert_int_eq(kv_context_commit(ctx, 20), 0);
        check_rows(ctx, 3, 20, 4);
        kv_context_close(ctx);
    }
    free(rows);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("kv_context");
    TCase *tc = tcase_create("contexts");
    SRunner *sr = srunner_create(s);
    int n_failed;

    suite_add_tcase(s, tc);
    tcase_add_checked_fixture(tc, open_cache, close_cache);
    tcase_add_test(tc, rows_and_ids_read_back_as_they_were_written);
    tcase_add_test(tc, a_fork_takes_no_page_and_keeps_its_parents_rows);
    tcase_add_test(tc, a_first_write_after_a_fork_clones_one_page_only);
    tcase_add_test(tc, a_clone_has_zeros_where_the_cut_is);
    tcase_add_test(tc, recycled_pages_are_issued_zero);
    tcase_add_test(tc, between_begin_and_its_end_every_other_change_is_busy);
    tcase_add_test(tc, a_partial_commit_gives_unused_pages_back_to_the_reservation);
    tcase_add_test(tc, a_close_inside_an_append_returns_everything);
    tcase_add_test(tc, a_full_budget_is_an_error_and_changes_nothing);
    tcase_add_test(tc, a_fork_of_a_parent_with_a_reservation_keeps_the_promise);
    tcase_add_test(tc, a_fork_that_would_break_a_reservation_is_full_and_changes_nothing);
    tcase_add_test(tc, a_frozen_context_never_changes_and_lives_as_long_as_its_references);
    tcase_add_test(tc, every_truncation_of_a_shared_context_leaves_the_other_alone);
    tcase_add_test(tc, a_truncation_ends_the_reservation);
    tcase_add_test(tc, branches_of_branches_stay_apart);
    tcase_add_test(tc, rows_scatter_from_pieces_of_any_size);
    srunner_run_all(sr, CK_ENV);
    n_failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return n_failed != 0;
}

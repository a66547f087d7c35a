/* A context remembers where it was published last.  Method: everything that can happen to that
 * place happens between two publishes, and the second must enter what it would from the root: the
 * audit compares each entry's ids with its edges. */
#include "kv_rig.h"

static void publish(struct kv_context *ctx)
{
    ck_assert_int_eq(kv_context_publish(ctx, NULL, 0), 0);
    check();
}

static void grow_and_publish(struct kv_context *ctx, const char *text)
{
    ck_assert_int_eq(grow(ctx, text), 0);
    publish(ctx);
}

START_TEST(a_context_cut_back_and_grown_otherwise_is_entered_as_it_is)
{
    struct kv_context *ctx;

    open_cache(16);
    ctx = context("a32");
    publish(ctx);
    ck_assert_int_eq(kv_context_truncate(ctx, 20), 0);
    grow_and_publish(ctx, "a20b28");
    EXPECT_ENTRIES("a32 a20b28");
    kv_context_close(ctx);
    close_cache();
}
END_TEST

/* The entry stays the same one throughout: cut to a16, then extended by another context. */
START_TEST(an_entry_cut_and_grown_by_another_is_not_taken_for_what_it_was)
{
    struct kv_context *first, *ctx, *other;

    open_cache(16);
    first = context("a32");
    publish(first);
    ctx = context("a32");
    publish(ctx); /* equal key: it is the first's entry, with the first's pages */
    kv_context_close(first);
    ck_assert_uint_eq(kv_cache_trim(cache, 1), 1);
    EXPECT_ENTRIES("a16");
    other = match("a16c16", 0, 16);
    grow_and_publish(other, "a16c16");
    EXPECT_ENTRIES("a16c16");
    grow_and_publish(ctx, "a48");
    EXPECT_ENTRIES("a16c16 a48");
    kv_context_close(other);
    kv_context_close(ctx);
    close_cache();
}
END_TEST

/* What is entered is a context as it is, not a front of one and a rest of another. */
START_TEST(pages_that_another_context_put_in_are_replaced)
{
    struct kv_context *ctx, *other;

    open_cache(16);
    ctx = context("a32");
    publish(ctx);
    other = context("a48");
    publish(other);
    ck_assert_uint_eq(tree_refs(ctx, 0), 0);
    ck_assert_uint_eq(tree_refs(other, 0), 1);
    grow_and_publish(ctx, "a64");
    for (uint32_t i = 0; i < 4; i++)
        ck_assert_uint_eq(tree_refs(ctx, i), 1);
    for (uint32_t i = 0; i < 3; i++)
        ck_assert_uint_eq(tree_refs(other, i), 0);
    EXPECT_ENTRIES("a64");
    kv_context_close(other);
    kv_context_close(ctx);
    close_cache();
}
END_TEST

START_TEST(the_place_is_found_after_splits_merges_and_growth_by_others)
{
    struct kv_context *ctx, *ahead;

    open_cache(32);
    ctx = context("a32");
    publish(ctx);
    put("a7b9");
    put("a20c12");
    grow_and_publish(ctx, "a48");
    put("a40d8"); /* a split below what was published before */
    ahead = fork_at(ctx, 48);
    grow_and_publish(ahead, "a96");
    grow_and_publish(ctx, "a48e16");
    EXPECT_ENTRIES("a7b9 a20c12 a40d8 a96 a48e16");
    ck_assert_uint_eq(kv_cache_trim(cache, 6), 6); /* all that nobody holds */
    EXPECT_ENTRIES("a96 a48e16");
    grow_and_publish(ctx, "a48e32");
    grow_and_publish(ahead, "a112");
    EXPECT_ENTRIES("a48e32 a112");
    kv_context_close(ahead);
    kv_context_close(ctx);
    close_cache();
}
END_TEST

START_TEST(an_entry_that_was_removed_is_entered_again)
{
    struct kv_context *first, *ctx;

    open_cache(16);
    first = context("a32");
    publish(first);
    ctx = context("a32");
    publish(ctx);
    kv_context_close(first);
    ck_assert_uint_eq(kv_cache_trim(cache, 2), 2);
    EXPECT_ENTRIES("");
    grow_and_publish(ctx, "a48");
    EXPECT_ENTRIES("a48");
    kv_context_close(ctx);
    close_cache();
}
END_TEST

START_TEST(logits_on_the_way_stay_in_entries_of_their_own)
{
    const float logits[2] = {1, 2};
    struct kv_context *ctx;

    open_cache(16);
    ctx = context("a32");
    ck_assert_int_eq(kv_context_publish(ctx, logits, 2), 0);
    grow_and_publish(ctx, "a48");
    grow_and_publish(ctx, "a64");
    EXPECT_ENTRIES("a32 a64");
    kv_context_close(ctx);
    close_cache();
}
END_TEST

/* A taint ends what is published before the place that is remembered. */
START_TEST(a_taint_below_the_place_publishes_what_is_before_it)
{
    struct kv_context *ctx, *tainted;
    unsigned char *rows;

    open_cache(16);
    ctx = context("a48");
    publish(ctx);
    tainted = fork_at(ctx, 48);
    publish(tainted);
    rows = calloc(1, kv_position_bytes(&geometry));
    ck_assert_int_eq(kv_context_overwrite(tainted, 20, rows), 0);
    publish(tainted);
    EXPECT_ENTRIES("a48");
    ck_assert_int_eq(kv_context_truncate(tainted, 20), 0);
    grow_and_publish(tainted, "a20b28");
    EXPECT_ENTRIES("a48 a20b28");
    free(rows);
    kv_context_close(tainted);
    kv_context_close(ctx);
    close_cache();
}
END_TEST

int main(int argc, char **argv)
{
    Suite *s = suite_create("kv_marks");
    TCase *tc = tcase_create("marks");
    SRunner *sr = srunner_create(s);
    int n_failed;

    if (!take_precision(&geometry, argc, argv))
        return 2;
    suite_add_tcase(s, tc);
    tcase_add_test(tc, a_context_cut_back_and_grown_otherwise_is_entered_as_it_is);
    tcase_add_test(tc, an_entry_cut_and_grown_by_another_is_not_taken_for_what_it_was);
    tcase_add_test(tc, pages_that_another_context_put_in_are_replaced);
    tcase_add_test(tc, the_place_is_found_after_splits_merges_and_growth_by_others);
    tcase_add_test(tc, an_entry_that_was_removed_is_entered_again);
    tcase_add_test(tc, logits_on_the_way_stay_in_entries_of_their_own);
    tcase_add_test(tc, a_taint_below_the_place_publishes_what_is_before_it);
    srunner_run_all(sr, CK_ENV);
    n_failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return n_failed != 0;
}

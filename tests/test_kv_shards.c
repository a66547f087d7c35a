/* What is one for the whole cache stays so when it is shared out among shards: slots, quotas, the
 * order of eviction, the bound of bookkeeping.  Keys begin with letters of different shards. */
#include "kv_rig.h"

enum { N_SHARDS = 4 };

static void open_shards(uint32_t n_pages, size_t bookkeeping)
{
    const struct kv_cache_config config = {.geometry = geometry,
                                           .page_tokens = P,
                                           .n_pages = n_pages,
                                           .arena = true,
                                           .bookkeeping_bytes = bookkeeping,
                                           .n_shards = N_SHARDS};

    ns = tenant_a;
    ck_assert_int_eq(kv_cache_open(&config, &cache, NULL), 0);
}

static const struct kv_shard *shard_of(uint32_t letter)
{
    return kv_shard_of(cache, &ns, letter);
}

/* A key of n positions whose letter is of the i-th shard. */
static const char *text_of(uint32_t i, uint32_t n)
{
    static char texts[8][16];
    static uint32_t at;
    uint32_t letter = 'A';

    while (shard_of(letter) != &cache->shards[i])
        letter++;
    ck_assert_uint_le(letter, 'z');
    at = (at + 1) % 8;
    snprintf(texts[at], sizeof(texts[at]), "%c%u", (char)letter, n);
    return texts[at];
}

START_TEST(a_number_of_shards_that_is_no_power_of_two_or_too_large_is_refused)
{
    static const uint32_t bad[] = {3, 12, 2 * KV_MAX_SHARDS, UINT32_MAX};
    struct kv_cache_config config = {.geometry = geometry, .page_tokens = P, .n_pages = 8};
    struct kv_cache *none = NULL;
    struct kv_why why;

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        config.n_shards = bad[i];
        ck_assert_int_eq(kv_cache_open(&config, &none, &why), KV_ERR_INVALID);
        ck_assert_ptr_nonnull(strstr(why.text, "n_shards"));
        ck_assert_ptr_null(none);
    }
}
END_TEST

START_TEST(there_may_be_fewer_pages_than_shards)
{
    open_shards(2, 0);
    for (uint32_t i = 0; i < N_SHARDS; i++)
        put(text_of(i, 20));
    ck_assert_uint_eq(stats().n_live, 2);
    ck_assert_uint_eq(stats().n_entries, 1);
    close_cache();
}
END_TEST

START_TEST(one_context_can_have_all_slots_and_no_other_then_any)
{
    struct kv_context *ctx, *other;

    open_shards(15, 0);
    ctx = context(text_of(2, 15 * P));
    other = empty();
    check();
    ck_assert_int_eq(kv_context_reserve(other, 1), KV_ERR_FULL);
    kv_context_close(ctx);
    ck_assert_int_eq(kv_context_reserve(other, 15 * P), 0);
    ck_assert_uint_eq(stats().n_reserved, 15);
    check();
    kv_context_close(other);
    close_cache();
}
END_TEST

START_TEST(an_empty_context_takes_its_reservation_along_to_where_its_first_id_is)
{
    open_shards(16, 0);
    for (uint32_t i = 0; i < N_SHARDS; i++) {
        const char *text = text_of(i, 3 * P);
        struct kv_context *ctx = empty(), *rest = empty();

        ck_assert_int_eq(kv_context_reserve(ctx, 3 * P), 0);
        ck_assert_int_eq(kv_context_reserve(rest, 13 * P), 0);
        ck_assert_int_eq(grow(ctx, text), 0);
        ck_assert_ptr_eq(ctx->shard, shard_of((unsigned char)text[0]));
        check();
        kv_context_close(rest);
        kv_context_close(ctx);
    }
    close_cache();
}
END_TEST

START_TEST(a_context_cut_to_nothing_may_begin_anew_elsewhere)
{
    struct kv_context *ctx;

    open_shards(16, 0);
    ctx = context(text_of(0, 40));
    ck_assert_int_eq(kv_context_publish(ctx, NULL, 0), 0);
    ck_assert_int_eq(kv_context_truncate(ctx, 0), 0);
    ck_assert_int_eq(grow(ctx, text_of(3, 32)), 0);
    check();
    ck_assert_int_eq(kv_context_publish(ctx, NULL, 0), 0);
    check();
    ck_assert_uint_eq(reach(text_of(0, 32)), 32);
    ck_assert_uint_eq(reach(text_of(3, 32)), 32);
    kv_context_close(ctx);
    close_cache();
}
END_TEST

/* Entered in the order of shards 3 1 0 2, the second one used again. */
START_TEST(the_oldest_entry_of_all_shards_goes_first)
{
    static const uint32_t order[] = {3, 1, 0, 2}, gone[] = {3, 0, 2, 1};

    open_shards(16, 0);
    for (uint32_t i = 0; i < N_SHARDS; i++)
        put(text_of(order[i], P));
    kv_context_close(match(text_of(1, P), 0, P - 1));
    for (uint32_t i = 0; i < N_SHARDS; i++) {
        ck_assert_uint_eq(kv_cache_trim(cache, 1), 1);
        ck_assert_uint_eq(reach(text_of(gone[i], P)), 0);
        ck_assert_uint_eq(stats().n_entries, N_SHARDS - 1 - i);
    }
    close_cache();
}
END_TEST

START_TEST(a_quota_counts_and_evicts_over_all_shards)
{
    struct kv_context *ctx;

    open_shards(32, 0);
    put(text_of(1, 2 * P));
    ns = tenant_b;
    ck_assert_int_eq(kv_cache_set_quota(cache, ns.group, 4), 0);
    for (uint32_t i = 0; i < N_SHARDS; i++)
        put(text_of(i, P));
    ctx = empty();
    ck_assert_int_eq(kv_context_reserve(ctx, 3 * P), 0);
    ck_assert_uint_eq(stats().n_entries, 2); /* one of each tenant */
    ck_assert_uint_eq(reach(text_of(N_SHARDS - 1, P)), P);
    ck_assert_int_eq(kv_context_reserve(ctx, 5 * P), KV_ERR_FULL);
    check();
    kv_context_close(ctx);
    close_cache();
}
END_TEST

/* What each shard may have of tenant b's quota without asking, as "7 3 3 3". */
static const char *shares(void)
{
    static char text[64];
    size_t at = 0;

    for (uint32_t i = 0; i < N_SHARDS; i++)
        at += (size_t)snprintf(text + at, sizeof(text) - at, i > 0 ? " %u" : "%u",
                               cache->shards[i].pool.groups[1].share);
    return text;
}

START_TEST(a_quota_is_shared_out_so_that_most_calls_need_one_lock)
{
    struct kv_context *a, *b, *c;

    open_shards(32, 0);
    ns = tenant_b;
    ck_assert_int_eq(kv_cache_set_quota(cache, 1, 16), 0);
    ck_assert_str_eq(shares(), "0 0 0 0");
    a = context(text_of(0, P));
    ck_assert_str_eq(shares(), "7 3 3 3"); /* 15 are left: an even part each, 3 for who asked */
    b = context(text_of(1, 2 * P));
    ck_assert_str_eq(shares(), "7 3 3 3");
    c = context(text_of(2, 4 * P));
    ck_assert_str_eq(shares(), "3 4 7 2");
    check();
    kv_context_close(c);
    ck_assert_int_eq(kv_context_reserve(b, 4 * P), 0);
    ck_assert_int_eq(kv_context_reserve(a, 3 * P), 0);
    ck_assert_str_eq(shares(), "3 4 7 2");
    ck_assert_int_eq(kv_context_reserve(a, 12 * P), 0); /* all of it */
    ck_assert_str_eq(shares(), "12 4 0 0");
    ck_assert_int_eq(kv_context_reserve(b, 5 * P), KV_ERR_FULL);
    check();
    kv_context_close(a);
    kv_context_close(b);
    close_cache();
}
END_TEST

START_TEST(a_quota_that_is_lowered_holds_at_once_and_in_every_shard)
{
    struct kv_context *ctx[N_SHARDS];

    open_shards(32, 0);
    ns = tenant_b;
    ck_assert_int_eq(kv_cache_set_quota(cache, 1, 24), 0);
    for (uint32_t i = 0; i < N_SHARDS; i++)
        ctx[i] = context(text_of(i, 2 * P));
    ck_assert_int_eq(kv_cache_set_quota(cache, 1, 4), 0);
    check();
    for (uint32_t i = 0; i < N_SHARDS; i++)
        ck_assert_int_eq(kv_context_reserve(ctx[i], 3 * P), KV_ERR_FULL);
    kv_context_close(ctx[0]);
    kv_context_close(ctx[1]);
    ck_assert_int_eq(kv_context_reserve(ctx[2], 3 * P), KV_ERR_FULL);
    kv_context_close(ctx[2]);
    ck_assert_int_eq(kv_context_reserve(ctx[3], 4 * P), 0);
    ck_assert_int_eq(kv_context_reserve(ctx[3], 5 * P), KV_ERR_FULL);
    check();
    kv_context_close(ctx[3]);
    close_cache();
}
END_TEST

START_TEST(a_reservation_that_moves_takes_its_share_of_the_quota_along)
{
    struct kv_context *ctx;

    open_shards(32, 0);
    ns = tenant_b;
    ck_assert_int_eq(kv_cache_set_quota(cache, 1, 16), 0);
    ctx = empty();
    while (ctx->shard != &cache->shards[0]) { /* where an empty one is does not matter */
        kv_context_close(ctx);
        ctx = context(text_of(0, 1));
        ck_assert_int_eq(kv_context_truncate(ctx, 0), 0);
    }
    ck_assert_int_eq(kv_cache_set_quota(cache, 1, 16), 0);
    ck_assert_int_eq(kv_context_reserve(ctx, 4 * P), 0);
    ck_assert_str_eq(shares(), "7 3 3 3");
    ck_assert_int_eq(grow(ctx, text_of(2, 4 * P)), 0);
    ck_assert_str_eq(shares(), "3 3 7 3");
    check();
    kv_context_close(ctx);
    close_cache();
}
END_TEST

START_TEST(an_insert_may_take_all_of_the_bound_of_bookkeeping)
{
    open_shards(200, need_alone(1000, 0));
    for (uint32_t round = 0; round < 2; round++)
        for (uint32_t i = 0; i < N_SHARDS; i++) {
            put(text_of(i, 1000)); /* and for it the last one goes */
            ck_assert_uint_eq(stats().n_entries, 1);
            ck_assert_uint_eq(reach(text_of(i, 1000)), 1000);
        }
    put(text_of(0, 1001));
    ck_assert_uint_eq(reach(text_of(0, 1001)), 0);
    ck_assert_uint_eq(reach(text_of(N_SHARDS - 1, 1000)), 1000);
    close_cache();
}
END_TEST

START_TEST(many_small_inserts_fill_the_bound_wherever_they_are)
{
    const size_t each = kv_tree_node_bytes(P) + kv_tree_entry_bytes(1, 0);
    const size_t bound = N_SHARDS * kv_tree_root_bytes() + 20 * each + kv_tree_node_bytes(0);
    uint32_t n_most = 0;

    open_shards(200, bound);
    for (char c = 'A'; c <= 'z'; c++) {
        put((const char[]){c, '1', '6', '\0'});
        n_most = stats().n_entries > n_most ? stats().n_entries : n_most;
    }
    ck_assert_uint_ge(n_most, 19);
    ck_assert_uint_ge(stats().n_entries, 18);
    close_cache();
}
END_TEST

/* Whatever is refused under all locks leaves the order of use as it was. */
START_TEST(a_refused_match_refreshes_no_entry_of_any_shard)
{
    struct kv_context *pin[N_SHARDS], *none = NULL;

    open_shards(2 * N_SHARDS, 0);
    for (uint32_t i = 0; i < N_SHARDS; i++) {
        put(text_of(i, P));
        pin[i] = context(text_of(i, P - 1)); /* of its own page */
    }
    check();
    ck_assert_int_eq(try_match(text_of(0, P), 6 * P, &none, NULL), KV_ERR_FULL);
    check();
    for (uint32_t i = 0; i < N_SHARDS; i++) {
        ck_assert_uint_eq(kv_cache_trim(cache, 1), 1);
        ck_assert_uint_eq(reach(text_of(i, P)), 0);
        kv_context_close(pin[i]);
    }
    close_cache();
}
END_TEST

START_TEST(the_audit_sees_what_stands_in_the_wrong_shard)
{
    struct kv_context *a, *b;
    struct kv_page *page;
    struct kv_shard *home;
    struct kv_why why;

    open_shards(16, 0);
    a = context(text_of(0, 20));
    b = context(text_of(1, 20));
    home = a->shard;
    a->shard = b->shard;
    ck_assert_int_eq(kv_cache_check(cache, &why), KV_ERR_CHECK);
    ck_assert_ptr_nonnull(strstr(why.text, "in the list of another shard"));
    a->shard = home;
    page = b->pages[1];
    b->pages[1] = a->pages[1];
    ck_assert_int_eq(kv_cache_check(cache, &why), KV_ERR_CHECK);
    ck_assert_ptr_nonnull(strstr(why.text, "is held in two shards"));
    b->pages[1] = page;
    cache->shards[2].tree.bound++;
    ck_assert_int_eq(kv_cache_check(cache, &why), KV_ERR_CHECK);
    ck_assert_ptr_nonnull(strstr(why.text, "the shards' bounds of bookkeeping"));
    cache->shards[2].tree.bound--;
    ck_assert_int_eq(kv_cache_set_quota(cache, 0, 8), 0);
    cache->shards[3].pool.groups[0].share = 1; /* less than others have */
    ck_assert_int_eq(kv_cache_check(cache, &why), KV_ERR_CHECK);
    ck_assert_ptr_nonnull(strstr(why.text, "its shares 1, and one is passed"));
    for (uint32_t i = 0; i < N_SHARDS; i++)
        cache->shards[i].pool.groups[0].share = 3;
    ck_assert_int_eq(kv_cache_check(cache, &why), KV_ERR_CHECK);
    ck_assert_str_eq(why.text, "the quota of group 0 is 8, its shares 12");
    ck_assert_int_eq(kv_cache_set_quota(cache, 0, 8), 0);
    kv_context_close(a);
    kv_context_close(b);
    close_cache();
}
END_TEST

int main(void)
{
    Suite *s = suite_create("kv_shards");
    TCase *tc = tcase_create("shards");
    SRunner *sr = srunner_create(s);
    int n_failed;

    suite_add_tcase(s, tc);
    tcase_add_test(tc, a_number_of_shards_that_is_no_power_of_two_or_too_large_is_refused);
    tcase_add_test(tc, there_may_be_fewer_pages_than_shards);
    tcase_add_test(tc, one_context_can_have_all_slots_and_no_other_then_any);
    tcase_add_test(tc, an_empty_context_takes_its_reservation_along_to_where_its_first_id_is);
    tcase_add_test(tc, a_context_cut_to_nothing_may_begin_anew_elsewhere);
    tcase_add_test(tc, the_oldest_entry_of_all_shards_goes_first);
    tcase_add_test(tc, a_quota_counts_and_evicts_over_all_shards);
    tcase_add_test(tc, a_quota_is_shared_out_so_that_most_calls_need_one_lock);
    tcase_add_test(tc, a_quota_that_is_lowered_holds_at_once_and_in_every_shard);
    tcase_add_test(tc, a_reservation_that_moves_takes_its_share_of_the_quota_along);
    tcase_add_test(tc, an_insert_may_take_all_of_the_bound_of_bookkeeping);
    tcase_add_test(tc, many_small_inserts_fill_the_bound_wherever_they_are);
    tcase_add_test(tc, a_refused_match_refreshes_no_entry_of_any_shard);
    tcase_add_test(tc, the_audit_sees_what_stands_in_the_wrong_shard);
    srunner_run_all(sr, CK_ENV);
    n_failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return n_failed != 0;
}

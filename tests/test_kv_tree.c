/* The prefix tree and its budget, rule by rule: what matches, what is entered, what goes when space
 * is needed.  Method: keys of letters, one letter a position; each test opens the cache it needs.
 */
#include "kv_help.h"

#include <stdio.h>

enum { P = 16, MAX = 2048 };

static const struct kv_geometry geometry = {
    .n_layers = 1, .n_kv_heads = 1, .head_dim = 2, .precision = KV_F16};
static struct kv_namespace ns = {.digest = {{7}}, .group = 0};
static struct kv_cache *cache;

static void open_cache(uint32_t n_pages, size_t bookkeeping)
{
    const struct kv_cache_config config = {.geometry = geometry,
                                           .page_tokens = P,
                                           .n_pages = n_pages,
                                           .bookkeeping_bytes = bookkeeping};

    ns = (struct kv_namespace){.digest = {{7}}, .group = 0};
    ck_assert_int_eq(kv_cache_open(&config, &cache, NULL), 0);
}

static struct kv_stats stats(void)
{
    struct kv_stats s;

    kv_cache_stats(cache, &s);
    return s;
}

static void check(void)
{
    struct kv_why why;

    ck_assert_msg(kv_cache_check(cache, &why) == 0, "%s", why.text);
}

/* Everything that ended is back, and the tree can give back the rest. */
static void close_cache(void)
{
    struct kv_stats s;

    check();
    kv_cache_trim(cache, UINT32_MAX);
    s = stats();
    ck_assert_uint_eq(s.n_free, s.n_pages);
    ck_assert_uint_eq(s.n_contexts, 0);
    ck_assert_uint_eq(s.n_nodes, 0);
    ck_assert_uint_eq(s.bookkeeping_bytes, 0);
    check();
    kv_cache_close(cache);
}

/* "a20b3" is twenty a and three b.  Returns the length. */
static uint32_t key(const char *text, uint32_t *ids)
{
    uint32_t n = 0;

    while (*text != '\0') {
        const uint32_t letter = (unsigned char)*text++;
        char *end;
        const unsigned long count = strtoul(text, &end, 10);

        for (unsigned long i = 0; i < (end == text ? 1 : count); i++)
            ids[n++] = letter;
        text = end;
        ck_assert_uint_le(n, MAX);
    }
    return n;
}

static struct kv_context *context(const char *text)
{
    struct kv_context *ctx;
    uint32_t ids[MAX];
    const uint32_t n = key(text, ids);

    ck_assert_int_eq(kv_context_open(cache, &ns, &ctx), 0);
    ck_assert_int_eq(append_to(ctx, &geometry, &ns, ids, n), 0);
    return ctx;
}

static void put(const char *text)
{
    ck_assert_int_eq(kv_context_give_up(context(text), NULL, 0), 0);
    check();
}

static void put_with_logits(const char *text, float value)
{
    const float logits[2] = {value, value};

    ck_assert_int_eq(kv_context_give_up(context(text), logits, 2), 0);
    check();
}

/* Match, check that what came is right, and return the context. */
static struct kv_context *match(const char *text, uint32_t extra, uint32_t want)
{
    uint32_t ids[MAX];
    const uint32_t n = key(text, ids);
    struct kv_context *ctx;
    struct kv_match m;

    ck_assert_int_eq(kv_cache_match(cache, &ns, ids, n, n + extra, NULL, 0, &ctx, &m), 0);
    ck_assert_uint_eq(m.n_matched, want);
    ck_assert(!m.has_logits);
    ck_assert(holds(ctx, &geometry, &ns, ids, want));
    check();
    return ctx;
}

static uint32_t peek(const char *text)
{
    uint32_t ids[MAX];
    const uint32_t n = key(text, ids);

    return kv_cache_peek(cache, &ns, ids, n);
}

/* What of a key is in the tree: one more id makes peek count the whole. */
static uint32_t reach(const char *text)
{
    char more[64];

    snprintf(more, sizeof(more), "%s!", text);
    return peek(more);
}

START_TEST(a_match_is_as_long_as_the_common_prefix_to_the_token)
{
    static const char *const prompts[] = {"a1",     "a15b",  "a16b",   "a17b",
                                          "a20b5c", "a20b9", "a20b10c"};
    static const uint32_t want[] = {0, 15, 16, 17, 25, 28, 30};

    open_cache(16, 0);
    put("a20b10");
    for (size_t i = 0; i < sizeof(want) / sizeof(want[0]); i++) {
        struct kv_context *ctx = match(prompts[i], 0, want[i]);

        kv_context_close(ctx);
        ck_assert_uint_eq(peek(prompts[i]), want[i]);
    }
    close_cache();
}
END_TEST

START_TEST(what_follows_a_match_in_the_page_stays_out_of_sight)
{
    uint32_t ids[MAX];
    struct kv_context *ctx;

    open_cache(16, 0);
    put("a20b10");
    ctx = match("a20c8", 0, 20);
    ck_assert_int_eq(append_to(ctx, &geometry, &ns, ids, key("a20c8", ids)), 0);
    ck_assert(holds(ctx, &geometry, &ns, ids, 28));
    kv_context_close(ctx);
    kv_context_close(match("a20b10d", 0, 30)); /* and the entry is as it was */
    close_cache();
}
END_TEST

START_TEST(a_miss_changes_nothing)
{
    uint32_t a, b;

    open_cache(4, 0);
    put("a16");
    put("b16");
    kv_context_close(match("c5", 0, 0));
    a = stats().n_nodes;
    ns.digest.bytes[0] ^= 1;
    kv_context_close(match("a16", 0, 0)); /* another namespace: made no root, saw nothing */
    b = stats().n_nodes;
    ck_assert_uint_eq(a, b);
    ns.digest.bytes[0] ^= 1;
    ck_assert_uint_eq(stats().n_misses, 2);
    ck_assert_uint_eq(kv_cache_trim(cache, 1), 1);
    ck_assert_uint_eq(reach("a16"), 0); /* a is still the oldest */
    ck_assert_uint_eq(reach("b16"), 16);
    close_cache();
}
END_TEST

START_TEST(the_last_token_of_a_prompt_is_left_to_run)
{
    open_cache(8, 0);
    put("a20");
    kv_context_close(match("a20", 0, 19));
    kv_context_close(match("a10", 0, 9));
    kv_context_close(match("a", 0, 0));
    close_cache();
}
END_TEST

START_TEST(logits_come_only_where_prompt_match_and_entry_have_one_length)
{
    static const struct {
        const char *prompt;
        uint32_t n_logits, want;
        bool has;
    } cases[] = {
        {"a20", 2, 20, true},   {"a20", 3, 19, false},   {"a19", 2, 18, false},
        {"a20b", 2, 20, false}, {"a20b4", 2, 23, false},
    };
    struct kv_context *ctx;
    struct kv_match m;
    uint32_t ids[MAX];

    open_cache(16, 0);
    put_with_logits("a20", 5);
    put("a20b5");
    ck_assert_uint_eq(stats().n_entries, 2); /* one with logits is not taken over */
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const uint32_t n = key(cases[i].prompt, ids);
        float logits[3] = {-1, -1, -1};

        ck_assert_int_eq(kv_cache_match(cache, &ns, ids, n, n, logits, cases[i].n_logits, &ctx, &m),
                         0);
        ck_assert_uint_eq(m.n_matched, cases[i].want);
        ck_assert(m.has_logits == cases[i].has);
        ck_assert(logits[1] == (cases[i].has ? 5.0f : -1.0f));
        ck_assert(logits[2] == -1.0f);
        kv_context_close(ctx);
    }
    close_cache();
}
END_TEST

START_TEST(an_equal_key_keeps_its_pages_and_takes_logits_that_it_lacked)
{
    const float other[2] = {9, 9};
    float logits[2];
    struct kv_context *ctx;
    struct kv_match m;
    uint32_t ids[MAX], n = key("a20", ids), n_live;

    open_cache(16, 0);
    put("a20");
    n_live = stats().n_live;
    put_with_logits("a20", 3);
    ck_assert_uint_eq(stats().n_live, n_live);
    ck_assert_uint_eq(stats().n_entries, 1);
    ck_assert_int_eq(kv_context_give_up(context("a20"), other, 2), 0);
    ck_assert_int_eq(kv_cache_match(cache, &ns, ids, n, n, logits, 2, &ctx, &m), 0);
    ck_assert(m.has_logits && logits[0] == 3.0f);
    kv_context_close(ctx);
    close_cache();
}
END_TEST

START_TEST(a_live_context_is_published_in_whole_pages_and_a_given_up_one_with_its_tail)
{
    struct kv_context *ctx;

    open_cache(16, 0);
    ctx = context("a15");
    ck_assert_int_eq(kv_context_publish(ctx, NULL, 0), 0);
    ck_assert_uint_eq(stats().n_entries, 0);
    kv_context_close(ctx);
    ctx = context("b40");
    ck_assert_int_eq(kv_context_publish(ctx, NULL, 0), 0);
    ck_assert_uint_eq(reach("b40"), 32);
    ck_assert_int_eq(kv_context_give_up(ctx, NULL, 0), 0);
    ck_assert_uint_eq(reach("b40"), 40);
    ck_assert_uint_eq(stats().n_entries, 1); /* the shorter one was taken over */
    ck_assert_uint_eq(stats().n_live, 3);
    close_cache();
}
END_TEST

START_TEST(a_frozen_context_is_published_whole_and_outlives_its_reference)
{
    struct kv_context *ctx, *ref;

    open_cache(16, 0);
    ctx = context("a20");
    ck_assert_int_eq(kv_context_freeze(ctx), 0);
    ref = kv_context_ref(ctx);
    ck_assert_int_eq(kv_context_publish(ctx, NULL, 0), 0);
    ck_assert_uint_eq(stats().n_evictable, 0); /* held by a context too */
    ck_assert_int_eq(kv_context_give_up(ctx, NULL, 0), 0);
    ck_assert_uint_eq(stats().n_contexts, 1);
    ck_assert_uint_eq(stats().n_evictable, 0);
    ck_assert_int_eq(kv_context_give_up(ref, NULL, 0), 0);
    ck_assert_uint_eq(stats().n_evictable, 2);
    ck_assert_uint_eq(reach("a20"), 20);
    close_cache();
}
END_TEST

START_TEST(a_key_that_a_longer_entry_covers_adds_nothing)
{
    open_cache(16, 0);
    put("a40");
    put("b16");
    put("a20");
    ck_assert_uint_eq(stats().n_entries, 2);
    ck_assert_uint_eq(stats().n_live, 4);
    ck_assert_uint_eq(kv_cache_trim(cache, 1), 1);
    ck_assert_uint_eq(reach("b16"), 0); /* the longer one was refreshed */
    ck_assert_uint_eq(reach("a40"), 40);
    close_cache();
}
END_TEST

/* Entries c < d below a common node: a match at the node uses the first in order of ids. */
START_TEST(a_match_refreshes_the_entry_it_uses_and_no_other)
{
    open_cache(16, 0);
    put("a20d12");
    put("a20c12");
    put("b16");
    kv_context_close(match("a20x", 0, 20)); /* uses c, which becomes the youngest */
    ck_assert_uint_eq(kv_cache_trim(cache, 2), 2);
    ck_assert_uint_eq(reach("a20d12"), 20);
    ck_assert_uint_eq(reach("a20c12"), 32);
    ck_assert_uint_eq(reach("b16"), 16);
    ck_assert_uint_eq(kv_cache_trim(cache, 1), 1);
    ck_assert_uint_eq(reach("b16"), 0);
    ck_assert_uint_eq(reach("a20c12"), 32);
    close_cache();
}
END_TEST

START_TEST(a_split_moves_no_page_and_a_removal_merges_again)
{
    uint32_t n_live;

    open_cache(16, 0);
    put("a20b12");
    n_live = stats().n_live;
    ck_assert_uint_eq(stats().n_nodes, 1);
    put("a20c12");
    ck_assert_uint_eq(stats().n_nodes, 3);
    ck_assert_uint_eq(stats().n_live, n_live + 2);
    ck_assert_uint_eq(kv_cache_trim(cache, 1),
                      1); /* b's only own page: nothing of its edge stays */
    check();
    ck_assert_uint_eq(stats().n_nodes, 1);
    ck_assert_uint_eq(reach("a20c12"), 32);
    close_cache();
}
END_TEST

START_TEST(the_last_victim_is_cut_from_its_end_page_by_page)
{
    open_cache(8, 0);
    put_with_logits("a100", 1); /* seven pages */
    for (uint32_t left = 6; left > 0; left--) {
        ck_assert_uint_eq(kv_cache_trim(cache, 1), 1);
        check();
        ck_assert_uint_eq(reach("a100"), left * P);
        ck_assert_uint_eq(stats().n_entries, 1);
    }
    ck_assert_uint_eq(kv_cache_trim(cache, 3), 1);
    ck_assert_uint_eq(stats().n_entries, 0);
    ck_assert_uint_eq(stats().n_evicted, 7);
    close_cache();
}
END_TEST

START_TEST(an_entry_with_others_below_it_goes_whole)
{
    open_cache(16, 0);
    put_with_logits("a32", 1);
    put_with_logits("a32b16", 1);
    put_with_logits("a32c16", 1);
    ck_assert_uint_eq(stats().n_live, 8); /* they were computed apart: nothing is shared */
    ck_assert_uint_eq(kv_cache_trim(cache, 1), 1);
    ck_assert_uint_eq(stats().n_live, 6);
    ck_assert_uint_eq(reach("a32"), 32);
    close_cache();
}
END_TEST

START_TEST(eviction_takes_the_oldest_first_and_a_reservation_is_all_or_nothing)
{
    struct kv_context *ctx;

    open_cache(6, 0);
    put("a32");
    put("b32");
    put("c32");
    ck_assert_int_eq(kv_context_open(cache, &ns, &ctx), 0);
    ck_assert_int_eq(kv_context_reserve(ctx, 3 * P), 0);
    ck_assert_uint_eq(reach("a32"), 0);
    ck_assert_uint_eq(reach("b32"), 16);
    ck_assert_uint_eq(reach("c32"), 32);
    ck_assert_int_eq(kv_context_reserve(ctx, 7 * P), KV_ERR_FULL);
    ck_assert_uint_eq(reach("b32"), 16);
    ck_assert_uint_eq(reach("c32"), 32);
    check();
    kv_context_close(ctx);
    close_cache();
}
END_TEST

START_TEST(trim_frees_what_it_can_and_says_how_much)
{
    struct kv_context *ctx;

    open_cache(6, 0);
    put("a32");
    ctx = match("a20b", 0, 20); /* pins both pages */
    ck_assert_uint_eq(kv_cache_trim(cache, 3), 0);
    ck_assert_uint_eq(stats().n_entries, 1);
    kv_context_close(ctx);
    ck_assert_uint_eq(kv_cache_trim(cache, 3), 2);
    close_cache();
}
END_TEST

START_TEST(an_entry_whose_pages_are_all_in_use_is_passed_over)
{
    struct kv_context *ctx;

    open_cache(6, 0);
    put("a32");
    ctx = match("a32b", 0, 32);
    put("b32");
    ck_assert_uint_eq(kv_cache_trim(cache, 1), 1);
    ck_assert_uint_eq(reach("a32"), 32);
    ck_assert_uint_eq(reach("b32"), 16);
    kv_context_close(ctx);
    close_cache();
}
END_TEST

/* Two pages in all, both held by the entry: a mid-page match would need a clone besides. */
START_TEST(a_match_that_cannot_be_extended_is_cut_at_the_page_border)
{
    struct kv_context *ctx;
    uint32_t ids[MAX];

    open_cache(2, 0);
    put("a24");
    ctx = match("a24b4", 4, 16);
    ck_assert_int_eq(append_to(ctx, &geometry, &ns, ids, key("a24b4", ids)), 0);
    kv_context_close(ctx);
    close_cache();
}
END_TEST

START_TEST(a_refused_match_leaves_no_trace)
{
    struct kv_context *ctx = NULL, *pin;
    struct kv_match m = {.n_matched = 77};
    uint32_t ids[MAX];
    const uint32_t n = key("a20x", ids);
    struct kv_stats before;

    open_cache(6, 0);
    put("a32");
    put("b32");
    pin = context("c32");
    before = stats();
    ck_assert_int_eq(kv_cache_match(cache, &ns, ids, n, 5 * P, NULL, 0, &ctx, &m), KV_ERR_FULL);
    ck_assert_int_eq(kv_cache_match(cache, &ns, ids, n, 500 * P, NULL, 0, &ctx, &m), KV_ERR_FULL);
    ck_assert_int_eq(kv_cache_match(cache, &ns, ids, n, n - 1, NULL, 0, &ctx, &m), KV_ERR_INVALID);
    ck_assert_ptr_null(ctx);
    ck_assert_uint_eq(m.n_matched, 77);
    ck_assert_uint_eq(stats().n_contexts, before.n_contexts);
    ck_assert_uint_eq(stats().n_evictable, before.n_evictable);
    ck_assert_uint_eq(stats().n_misses + stats().n_hits, before.n_misses + before.n_hits);
    ck_assert_uint_eq(kv_cache_trim(cache, 1), 1);
    ck_assert_uint_eq(reach("a32"), 16); /* still the oldest */
    kv_context_close(pin);
    close_cache();
}
END_TEST

/* The matched entry is evicted for the room of its own match; the match keeps what it pinned. */
START_TEST(a_matched_entry_is_not_exempt_from_eviction)
{
    struct kv_context *ctx;
    uint32_t ids[MAX];

    open_cache(3, 0);
    put("a48");
    ctx = match("a16b32", 0, 16);
    ck_assert_int_eq(append_to(ctx, &geometry, &ns, ids, key("a16b32", ids)), 0);
    ck_assert(holds(ctx, &geometry, &ns, ids, 48));
    kv_context_close(ctx);
    close_cache();
}
END_TEST

START_TEST(a_groups_quota_evicts_its_own_entries_first)
{
    struct kv_context *ctx;

    open_cache(8, 0);
    put("x32"); /* the oldest, of group 0 */
    ns = (struct kv_namespace){.digest = {{9}}, .group = 3};
    ck_assert_int_eq(kv_cache_set_quota(cache, 3, 3), 0);
    put("a32");
    ck_assert_int_eq(kv_context_open(cache, &ns, &ctx), 0);
    ck_assert_int_eq(kv_context_reserve(ctx, 2 * P), 0);
    ck_assert_uint_eq(reach("a32"), 16);
    ck_assert_int_eq(kv_context_reserve(ctx, 4 * P), KV_ERR_FULL);
    ck_assert_uint_eq(reach("a32"), 16);
    check();
    kv_context_close(ctx);
    ns = (struct kv_namespace){.digest = {{7}}, .group = 0};
    ck_assert_uint_eq(reach("x32"), 32);
    ck_assert_int_eq(kv_cache_set_quota(cache, KV_MAX_GROUPS, 1), KV_ERR_INVALID);
    close_cache();
}
END_TEST

/* The quota could be met by eviction, the whole cannot: nothing may go. */
START_TEST(both_limits_are_checked_before_anything_is_removed)
{
    struct kv_context *pin, *ctx;

    open_cache(4, 0);
    ck_assert_int_eq(kv_cache_set_quota(cache, 0, 2), 0);
    put("a16");
    ns = (struct kv_namespace){.digest = {{9}}, .group = 1};
    pin = context("b48");
    ns = (struct kv_namespace){.digest = {{7}}, .group = 0};
    ck_assert_int_eq(kv_context_open(cache, &ns, &ctx), 0);
    ck_assert_int_eq(kv_context_reserve(ctx, 2 * P), KV_ERR_FULL);
    ck_assert_uint_eq(reach("a16"), 16);
    ck_assert_int_eq(kv_context_reserve(ctx, P), 0);
    ck_assert_uint_eq(reach("a16"), 0);
    kv_context_close(ctx);
    kv_context_close(pin);
    close_cache();
}
END_TEST

START_TEST(namespaces_share_nothing)
{
    open_cache(16, 0);
    put("a20");
    ns.digest.bytes[31] = 1;
    kv_context_close(match("a20b", 0, 0));
    put("a20");
    ck_assert_uint_eq(stats().n_live, 4);
    ck_assert_uint_eq(stats().n_entries, 2);
    ns = (struct kv_namespace){.digest = {{7}}, .group = 2}; /* the digest alone is not enough */
    kv_context_close(match("a20b", 0, 0));
    close_cache();
}
END_TEST

START_TEST(five_hundred_inserts_stay_within_the_bookkeeping_bound)
{
    const size_t bound = 4096;
    uint32_t ids[12];

    open_cache(600, bound);
    for (uint32_t i = 0; i < 500; i++) {
        struct kv_context *ctx;

        for (uint32_t j = 0; j < 12; j++)
            ids[j] = (uint32_t)(mix(i * 12 + j) % 3);
        ck_assert_int_eq(kv_context_open(cache, &ns, &ctx), 0);
        ck_assert_int_eq(append_to(ctx, &geometry, &ns, ids, 12), 0);
        ck_assert_int_eq(kv_context_give_up(ctx, NULL, 0), 0);
        ck_assert_uint_le(stats().bookkeeping_bytes, bound);
        ck_assert_uint_eq(stats().n_live, stats().n_entries); /* a page each, slots come back */
        check();
    }
    ck_assert_uint_gt(stats().n_entries, 3);
    close_cache();
}
END_TEST

START_TEST(an_entry_over_the_bookkeeping_bound_is_refused_and_the_context_closes)
{
    struct kv_context *ctx;

    open_cache(64, 1024);
    put("b20");
    ctx = context("a900"); /* edge alone is 3,600 bytes */
    ck_assert_int_eq(kv_context_publish(ctx, NULL, 0), 0);
    ck_assert_uint_eq(reach("a900"), 0);
    ck_assert_int_eq(kv_context_give_up(ctx, NULL, 0), 0);
    ck_assert_uint_eq(reach("b20"), 20); /* and nothing went for it */
    ck_assert_uint_eq(stats().n_live, 2);
    close_cache();
}
END_TEST

START_TEST(logits_that_do_not_fit_are_refused_alone_at_an_equal_key)
{
    static float logits[1024];

    open_cache(64, 2048);
    put("b20");
    ck_assert_int_eq(kv_context_give_up(context("b20"), logits, 1024), 0);
    ck_assert_uint_eq(stats().n_entries, 1);
    ck_assert_uint_eq(reach("b20"), 20);
    check();
    close_cache();
}
END_TEST

/* Each page published as it fills: one entry, its pages held once by the tree. */
START_TEST(publishing_as_a_context_grows_keeps_one_entry)
{
    struct kv_context *ctx;
    uint32_t ids[MAX];

    open_cache(64, 0);
    ck_assert_int_eq(kv_context_open(cache, &ns, &ctx), 0);
    for (uint32_t i = 0; i < MAX; i++)
        ids[i] = i;
    for (uint32_t n = 5; n < 800; n += 5) {
        ck_assert_int_eq(append_to(ctx, &geometry, &ns, ids, n), 0);
        ck_assert_int_eq(kv_context_publish(ctx, NULL, 0), 0);
        ck_assert_uint_eq(stats().n_entries, n >= P);
        check();
    }
    kv_context_close(ctx);
    close_cache();
}
END_TEST

int main(void)
{
    Suite *s = suite_create("kv_tree");
    TCase *tc = tcase_create("tree");
    SRunner *sr = srunner_create(s);
    int n_failed;

    suite_add_tcase(s, tc);
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, a_match_is_as_long_as_the_common_prefix_to_the_token);
    tcase_add_test(tc, what_follows_a_match_in_the_page_stays_out_of_sight);
    tcase_add_test(tc, a_miss_changes_nothing);
    tcase_add_test(tc, the_last_token_of_a_prompt_is_left_to_run);
    tcase_add_test(tc, logits_come_only_where_prompt_match_and_entry_have_one_length);
    tcase_add_test(tc, an_equal_key_keeps_its_pages_and_takes_logits_that_it_lacked);
    tcase_add_test(tc, a_live_context_is_published_in_whole_pages_and_a_given_up_one_with_its_tail);
    tcase_add_test(tc, a_frozen_context_is_published_whole_and_outlives_its_reference);
    tcase_add_test(tc, a_key_that_a_longer_entry_covers_adds_nothing);
    tcase_add_test(tc, a_match_refreshes_the_entry_it_uses_and_no_other);
    tcase_add_test(tc, a_split_moves_no_page_and_a_removal_merges_again);
    tcase_add_test(tc, the_last_victim_is_cut_from_its_end_page_by_page);
    tcase_add_test(tc, an_entry_with_others_below_it_goes_whole);
    tcase_add_test(tc, eviction_takes_the_oldest_first_and_a_reservation_is_all_or_nothing);
    tcase_add_test(tc, trim_frees_what_it_can_and_says_how_much);
    tcase_add_test(tc, an_entry_whose_pages_are_all_in_use_is_passed_over);
    tcase_add_test(tc, a_match_that_cannot_be_extended_is_cut_at_the_page_border);
    tcase_add_test(tc, a_refused_match_leaves_no_trace);
    tcase_add_test(tc, a_matched_entry_is_not_exempt_from_eviction);
    tcase_add_test(tc, a_groups_quota_evicts_its_own_entries_first);
    tcase_add_test(tc, both_limits_are_checked_before_anything_is_removed);
    tcase_add_test(tc, namespaces_share_nothing);
    tcase_add_test(tc, five_hundred_inserts_stay_within_the_bookkeeping_bound);
    tcase_add_test(tc, an_entry_over_the_bookkeeping_bound_is_refused_and_the_context_closes);
    tcase_add_test(tc, logits_that_do_not_fit_are_refused_alone_at_an_equal_key);
    tcase_add_test(tc, publishing_as_a_context_grows_keeps_one_entry);
    srunner_run_all(sr, CK_ENV);
    n_failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return n_failed != 0;
}

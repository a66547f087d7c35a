/* Each rule that kvcore is built on as a test of its own, from the shortest sequence that breaks
 * its simpler wording.
 *
 * Method: small caches and keys of letters (kv_rig.h); the audit runs in check().  How much work a
 * call does is counted in changes of page counters: the linker puts __wrap_kv_pool_count() in
 * between. */
#include "kv_rig.h"

static size_t n_counter_writes;

void __real_kv_pool_count(struct kv_pool *pool, struct kv_page *page, int refs, int tree_refs);
void __wrap_kv_pool_count(struct kv_pool *pool, struct kv_page *page, int refs, int tree_refs);

void __wrap_kv_pool_count(struct kv_pool *pool, struct kv_page *page, int refs, int tree_refs)
{
    n_counter_writes++;
    __real_kv_pool_count(pool, page, refs, tree_refs);
}

/* ---- The rules ---- */

START_TEST(rule_1_a_page_counts_its_holders_and_is_evictable_when_all_are_entries)
{
    struct kv_context *ctx, *fork;

    open_cache(8);
    ctx = context("a20");
    ck_assert_uint_eq(refs(ctx, 0), 1);
    fork = fork_at(ctx, 17);
    ck_assert_uint_eq(refs(ctx, 0), 2);
    ck_assert_uint_eq(refs(ctx, 1), 2);
    ck_assert_int_eq(kv_context_publish(ctx, NULL, 0), 0);
    ck_assert_uint_eq(refs(ctx, 0), 3);
    ck_assert_uint_eq(tree_refs(ctx, 0), 1);
    ck_assert_uint_eq(tree_refs(ctx, 1), 0);
    ck_assert_uint_eq(stats().n_evictable, 0);
    check();
    kv_context_close(ctx);
    ck_assert_uint_eq(stats().n_evictable, 0);
    ck_assert_uint_eq(stats().n_live, 2);
    kv_context_close(fork);
    ck_assert_uint_eq(stats().n_evictable, 1);
    ck_assert_uint_eq(stats().n_live, 1);
    close_cache();
}
END_TEST

START_TEST(rule_1_free_and_live_pages_are_all_pages_while_slots_are_reserved)
{
    struct kv_context *ctx;

    open_cache(8);
    ctx = context("a20");
    ck_assert_int_eq(kv_context_reserve(ctx, 4 * P), 0);
    ck_assert_uint_eq(stats().n_free, 6);
    ck_assert_uint_eq(stats().n_reserved, 2);
    check();
    kv_context_close(ctx);
    ck_assert_uint_eq(stats().n_free, 8);
    close_cache();
}
END_TEST

START_TEST(rule_2_a_sole_holder_writes_in_place_and_any_other_into_a_clone)
{
    struct kv_context *ctx, *fork;
    const unsigned char *page;

    open_cache(8);
    ctx = context("a20");
    page = kv_context_page(ctx, 1);
    ck_assert_int_eq(grow(ctx, "a21"), 0);
    ck_assert_ptr_eq(kv_context_page(ctx, 1), page);
    fork = fork_at(ctx, 21);
    ck_assert_int_eq(grow(fork, "a21b1"), 0);
    ck_assert_uint_eq(stats().n_clones, 1);
    ck_assert_ptr_ne(kv_context_page(fork, 1), page);
    ck_assert_ptr_eq(kv_context_page(fork, 0), kv_context_page(ctx, 0));
    ck_assert_int_eq(grow(ctx, "a21c1"), 0); /* the fork let go of it: the parent is alone again */
    ck_assert_ptr_eq(kv_context_page(ctx, 1), page);
    ck_assert_uint_eq(stats().n_clones, 1);
    ck_assert(reads(ctx, "a21c1") && reads(fork, "a21b1"));
    kv_context_close(ctx);
    kv_context_close(fork);
    close_cache();
}
END_TEST

/* Cut in the middle of a page that was full: what is past the cut must not be in the clone, be it
 * rows or ids. */
START_TEST(rule_2_a_clone_has_the_valid_rows_and_ids_and_zeros)
{
    struct kv_context *ctx, *fork, *fresh;

    open_cache(8);
    ctx = context("a16b16");
    for (uint32_t cut = P + 1; cut < 2 * P; cut++) {
        char text[32];

        snprintf(text, sizeof(text), "a16b%uz1", cut - P);
        fork = fork_at(ctx, cut);
        ck_assert_int_eq(grow(fork, text), 0);
        fresh = context(text);
        ck_assert_mem_eq(kv_context_page(fork, 1), kv_context_page(fresh, 1),
                         kv_cache_layout(cache)->page_bytes);
        kv_context_close(fork);
        kv_context_close(fresh);
    }
    kv_context_close(ctx);
    close_cache();
}
END_TEST

START_TEST(rule_3_a_fork_that_shares_the_tail_tops_the_parents_reservation_up)
{
    struct kv_context *ctx, *fork;

    open_cache(3);
    ctx = context("a8");
    ck_assert_int_eq(kv_context_reserve(ctx, 2 * P), 0);
    ck_assert_uint_eq(stats().n_reserved, 1);
    fork = fork_at(ctx, 8);
    ck_assert_uint_eq(stats().n_reserved, 2);
    check();
    ck_assert_int_eq(grow(ctx, "a8b24"), 0);
    ck_assert(reads(ctx, "a8b24") && reads(fork, "a8"));
    kv_context_close(fork);
    kv_context_close(ctx);
    close_cache();
}
END_TEST

START_TEST(rule_3_such_a_fork_is_full_and_changes_nothing_where_there_is_no_slot)
{
    struct kv_context *ctx, *other, *fork = NULL;

    open_cache(3);
    ctx = context("a8");
    other = empty();
    ck_assert_int_eq(kv_context_reserve(ctx, 2 * P), 0);
    ck_assert_int_eq(kv_context_reserve(other, P), 0);
    ck_assert_int_eq(kv_context_fork(ctx, 8, &fork), KV_ERR_FULL);
    ck_assert_ptr_null(fork);
    ck_assert_uint_eq(stats().n_contexts, 2);
    ck_assert_uint_eq(refs(ctx, 0), 1);
    check();
    ck_assert_int_eq(grow(ctx, "a8b24"), 0); /* the promise still holds */
    kv_context_close(other);
    kv_context_close(ctx);
    close_cache();
}
END_TEST

/* One slot set aside at reservation "because the tail may become shared" lasts for one fork. */
START_TEST(rule_3_each_fork_tops_up_anew)
{
    struct kv_context *ctx, *one, *two, *three = NULL;

    open_cache(4);
    ctx = context("a8");
    ck_assert_int_eq(kv_context_reserve(ctx, 2 * P), 0);
    one = fork_at(ctx, 8);
    ck_assert_int_eq(grow(ctx, "a9"), 0);
    two = fork_at(ctx, 9);
    ck_assert_int_eq(grow(ctx, "a10"), 0);
    ck_assert_int_eq(kv_context_fork(ctx, 10, &three), KV_ERR_FULL);
    check();
    ck_assert_int_eq(grow(ctx, "a32"), 0);
    ck_assert(reads(one, "a8") && reads(two, "a9") && reads(ctx, "a32"));
    kv_context_close(one);
    kv_context_close(two);
    kv_context_close(ctx);
    close_cache();
}
END_TEST

START_TEST(rule_3_a_fork_cut_at_a_whole_page_needs_no_slot)
{
    struct kv_context *ctx, *fork;

    open_cache(3);
    ctx = context("a20");
    ck_assert_int_eq(kv_context_reserve(ctx, 3 * P), 0);
    ck_assert_uint_eq(stats().n_free - stats().n_reserved, 0);
    fork = fork_at(ctx, P);
    ck_assert_int_eq(grow(ctx, "a48"), 0);
    kv_context_close(fork);
    kv_context_close(ctx);
    close_cache();
}
END_TEST

START_TEST(rule_3_truncate_freeze_and_giving_up_end_a_reservation)
{
    struct kv_context *ctx;

    open_cache(8);
    ctx = context("a20");
    ck_assert_int_eq(kv_context_reserve(ctx, 6 * P), 0);
    ck_assert_int_eq(kv_context_truncate(ctx, 20), 0);
    ck_assert_uint_eq(stats().n_reserved, 0);
    ck_assert_int_eq(kv_context_reserve(ctx, 6 * P), 0);
    ck_assert_int_eq(kv_context_freeze(ctx), 0);
    ck_assert_uint_eq(stats().n_reserved, 0);
    kv_context_close(ctx);
    ctx = context("b20");
    ck_assert_int_eq(kv_context_reserve(ctx, 6 * P), 0);
    ck_assert_int_eq(kv_context_give_up(ctx, NULL, 0), 0);
    ck_assert_uint_eq(stats().n_reserved, 0);
    close_cache();
}
END_TEST

/* The tree shares the tail once it is published and truncated into: growing on takes a clone that
 * the old reservation did not count. */
START_TEST(rule_3_a_truncation_into_a_shared_page_keeps_no_promise)
{
    struct kv_context *ctx, *other;
    uint32_t ids[MAX];

    open_cache(3);
    ctx = context("a16");
    ck_assert_int_eq(kv_context_publish(ctx, NULL, 0), 0);
    ck_assert_int_eq(kv_context_reserve(ctx, 2 * P), 0);
    ck_assert_int_eq(kv_context_truncate(ctx, 8), 0);
    other = empty();
    ck_assert_int_eq(kv_context_reserve(other, P), 0);
    key("a8b24", ids);
    ck_assert_int_eq(kv_context_begin(ctx, ids + 8, 24), KV_ERR_FULL);
    check();
    kv_context_close(other);
    ck_assert_int_eq(grow(ctx, "a8b24"), 0);
    kv_context_close(ctx);
    close_cache();
}
END_TEST

START_TEST(rule_3_a_reservation_that_needs_no_slot_is_always_granted)
{
    struct kv_context *ctx, *other;

    open_cache(4);
    ctx = context("a20");
    other = context("b32");
    ck_assert_int_eq(kv_cache_set_quota(cache, ns.group, 0), 0);
    ck_assert_int_eq(kv_context_reserve(ctx, 2 * P), 0);
    ck_assert_int_eq(kv_context_reserve(ctx, 0), 0);
    ck_assert_int_eq(kv_context_reserve(ctx, 2 * P + 1), KV_ERR_FULL);
    ck_assert_int_eq(grow(ctx, "a32"), 0);
    kv_context_close(ctx);
    kv_context_close(other);
    close_cache();
}
END_TEST

START_TEST(rule_4_between_begin_and_its_end_every_other_change_is_busy)
{
    static const float logits[1];
    struct kv_context *ctx, *fork = NULL;
    unsigned char rows[256] = {0};
    const uint32_t ids[4] = {1, 2, 3, 4};

    open_cache(8);
    ck_assert_uint_le(kv_position_bytes(&geometry), sizeof(rows));
    ctx = context("a20");
    ck_assert_int_eq(kv_context_begin(ctx, ids, 4), 0);
    ck_assert_int_eq(kv_context_begin(ctx, ids, 1), KV_ERR_BUSY);
    ck_assert_int_eq(kv_context_reserve(ctx, 40), KV_ERR_BUSY);
    ck_assert_int_eq(kv_context_fork(ctx, 10, &fork), KV_ERR_BUSY);
    ck_assert_int_eq(kv_context_freeze(ctx), KV_ERR_BUSY);
    ck_assert_int_eq(kv_context_truncate(ctx, 10), KV_ERR_BUSY);
    ck_assert_int_eq(kv_context_overwrite(ctx, 3, rows), KV_ERR_BUSY);
    ck_assert_int_eq(kv_context_publish(ctx, logits, 1), KV_ERR_BUSY);
    ck_assert_int_eq(kv_context_give_up(ctx, logits, 1), KV_ERR_BUSY);
    ck_assert_ptr_null(fork);
    ck_assert_uint_eq(stats().n_entries, 0);
    ck_assert_int_eq(kv_context_abort(ctx), 0);
    ck_assert(reads(ctx, "a20"));
    ck_assert_int_eq(kv_context_abort(ctx), KV_ERR_INVALID);
    kv_context_close(ctx);
    close_cache();
}
END_TEST

START_TEST(rule_4_a_partial_commit_and_an_abort_put_unused_pages_back_into_the_reservation)
{
    struct kv_context *ctx;
    uint32_t ids[MAX];

    open_cache(4);
    ctx = context("a8");
    key("a64", ids);
    ck_assert_int_eq(kv_context_begin(ctx, ids + 8, 56), 0);
    ck_assert_uint_eq(stats().n_free, 0);
    ck_assert_int_eq(kv_context_commit(ctx, 9), 0);
    ck_assert_uint_eq(kv_context_n_pages(ctx), 2);
    ck_assert_uint_eq(stats().n_reserved, 2);
    check();
    ck_assert_int_eq(kv_context_begin(ctx, ids + 17, 47), 0);
    ck_assert_int_eq(kv_context_abort(ctx), 0);
    ck_assert_uint_eq(stats().n_reserved, 2);
    ck_assert_uint_eq(kv_context_length(ctx), 17);
    kv_context_close(ctx);
    close_cache();
}
END_TEST

START_TEST(rule_4_a_close_inside_an_append_aborts_it)
{
    struct kv_context *ctx, *fork;
    uint32_t ids[MAX];

    open_cache(6);
    ctx = context("a24");
    fork = fork_at(ctx, 20);
    key("a20b40", ids);
    ck_assert_int_eq(kv_context_begin(fork, ids + 20, 40), 0);
    kv_context_close(fork);
    check();
    ck_assert_uint_eq(stats().n_live, 2);
    ck_assert_uint_eq(stats().n_reserved, 0);
    ck_assert(reads(ctx, "a24"));
    kv_context_close(ctx);
    close_cache();
}
END_TEST

START_TEST(rule_5_a_frozen_context_never_changes_and_lives_by_its_references)
{
    struct kv_context *ctx, *ref, *fork;
    const uint32_t ids[1] = {1};
    unsigned char rows[256] = {0};

    open_cache(6);
    ctx = context("a20");
    ck_assert_int_eq(kv_context_freeze(ctx), 0);
    ck_assert_int_eq(kv_context_freeze(ctx), KV_ERR_BUSY);
    ck_assert_int_eq(kv_context_begin(ctx, ids, 1), KV_ERR_BUSY);
    ck_assert_int_eq(kv_context_reserve(ctx, 30), KV_ERR_BUSY);
    ck_assert_int_eq(kv_context_truncate(ctx, 1), KV_ERR_BUSY);
    ck_assert_int_eq(kv_context_overwrite(ctx, 1, rows), KV_ERR_BUSY);
    ref = kv_context_ref(ctx);
    kv_context_close(ctx);
    fork = fork_at(ref, 18);
    kv_context_close(ref);
    ck_assert_uint_eq(stats().n_contexts, 1);
    ck_assert_int_eq(grow(fork, "a18b20"), 0);
    ck_assert(reads(fork, "a18b20"));
    kv_context_close(fork);
    close_cache();
}
END_TEST

/* What an overwrite of a shared page takes: one page, whatever is reserved. */
START_TEST(rule_6_a_raw_overwrite_of_a_shared_page_needs_one_of_its_own)
{
    const size_t bytes = kv_position_bytes(&geometry);
    struct kv_context *ctx, *fork, *other;
    unsigned char rows[256], got[256];

    open_cache(4);
    memset(rows, 0xab, sizeof(rows));
    ctx = context("a20");
    fork = fork_at(ctx, 20);
    other = empty();
    ck_assert_int_eq(kv_context_reserve(other, 2 * P), 0);
    ck_assert_int_eq(kv_context_overwrite(fork, 3, rows), KV_ERR_FULL);
    ck_assert(reads(fork, "a20"));
    ck_assert_int_eq(kv_context_publish(fork, NULL, 0), 0);
    ck_assert_uint_eq(reach("a16"), 16); /* the refusal did not taint */
    kv_context_close(other);
    ck_assert_int_eq(kv_context_overwrite(fork, 3, rows), 0);
    ck_assert_int_eq(kv_context_overwrite(fork, 3, rows), 0); /* in place */
    ck_assert_int_eq(kv_context_overwrite(fork, 20, rows), KV_ERR_INVALID);
    ck_assert_uint_eq(stats().n_clones, 1);
    ck_assert_int_eq(kv_context_gather(fork, 3, 1, got), 0);
    ck_assert_mem_eq(got, rows, bytes);
    ck_assert(reads(ctx, "a20"));
    check();
    kv_context_close(ctx);
    kv_context_close(fork);
    close_cache();
}
END_TEST

/* The slot that was promised for the clone of a shared tail is not needed once it is the
 * context's own. */
START_TEST(rule_6_an_overwrite_of_a_shared_tail_gives_back_the_slot_of_its_clone)
{
    struct kv_context *ctx, *fork;
    unsigned char rows[256] = {1};

    open_cache(4);
    ctx = context("a20");
    fork = fork_at(ctx, 20);
    ck_assert_int_eq(kv_context_reserve(fork, 3 * P), 0);
    ck_assert_uint_eq(stats().n_reserved, 2);
    ck_assert_int_eq(kv_context_overwrite(fork, 18, rows), KV_ERR_FULL);
    kv_context_close(ctx); /* now the sole holder: no page is needed, in place */
    ck_assert_int_eq(kv_context_overwrite(fork, 18, rows), 0);
    ck_assert_uint_eq(stats().n_clones, 0);
    check();
    kv_context_close(fork);
    close_cache();

    open_cache(5);
    ctx = context("a20");
    fork = fork_at(ctx, 20);
    ck_assert_int_eq(kv_context_reserve(fork, 3 * P), 0);
    ck_assert_int_eq(kv_context_overwrite(fork, 18, rows), 0);
    ck_assert_uint_eq(stats().n_reserved, 1);
    check();
    kv_context_close(ctx);
    kv_context_close(fork);
    close_cache();
}
END_TEST

START_TEST(rule_6_publish_and_giving_up_stop_at_the_taint)
{
    const float logits[2] = {1, 2};
    struct kv_context *ctx, *frozen;
    unsigned char rows[256] = {1};

    open_cache(12);
    ctx = context("a40");
    ck_assert_int_eq(kv_context_overwrite(ctx, 20, rows), 0);
    ck_assert_int_eq(kv_context_publish(ctx, NULL, 0), 0);
    EXPECT_ENTRIES("a16");
    ck_assert_int_eq(kv_context_overwrite(ctx, 10, rows), 0);
    ck_assert_int_eq(kv_context_truncate(ctx, 11), 0);
    ck_assert_int_eq(kv_context_give_up(ctx, logits, 2), 0);
    EXPECT_ENTRIES("a16"); /* a10, without logits, is covered by it */
    ctx = context("b40");
    ck_assert_int_eq(kv_context_overwrite(ctx, 20, rows), 0);
    ck_assert_int_eq(kv_context_give_up(ctx, logits, 2), 0);
    EXPECT_ENTRIES("a16 b20");
    ck_assert_uint_eq(stats().n_live, 3); /* the page past the taint is back */
    kv_context_close(match("b20c4", 0, 20));
    frozen = context("c40");
    ck_assert_int_eq(kv_context_overwrite(frozen, 35, rows), 0);
    ck_assert_int_eq(kv_context_freeze(frozen), 0);
    ck_assert_int_eq(kv_context_publish(frozen, logits, 2), 0);
    EXPECT_ENTRIES("a16 b20 c35");
    kv_context_close(frozen);
    close_cache();
}
END_TEST

START_TEST(rule_6_a_fork_carries_a_taint_below_its_cut_and_a_truncation_to_it_ends_it)
{
    struct kv_context *ctx, *tainted, *clean;
    unsigned char rows[256] = {1};

    open_cache(12);
    ctx = context("a40");
    ck_assert_int_eq(kv_context_overwrite(ctx, 17, rows), 0);
    tainted = fork_at(ctx, 32);
    clean = fork_at(ctx, 17);
    ck_assert_int_eq(kv_context_publish(tainted, NULL, 0), 0);
    EXPECT_ENTRIES("a16");
    ck_assert_int_eq(grow(clean, "a17b15"), 0);
    ck_assert_int_eq(kv_context_publish(clean, NULL, 0), 0);
    EXPECT_ENTRIES("a17b15"); /* it took the shorter one over */
    ck_assert_int_eq(kv_context_truncate(tainted, 18), 0);
    ck_assert_int_eq(kv_context_truncate(tainted, 17), 0);
    ck_assert_int_eq(grow(tainted, "a32"), 0);
    ck_assert(reads(tainted, "a32"));
    ck_assert_int_eq(kv_context_publish(tainted, NULL, 0), 0);
    EXPECT_ENTRIES("a17b15 a32");
    kv_context_close(ctx);
    kv_context_close(tainted);
    kv_context_close(clean);
    close_cache();
}
END_TEST

START_TEST(rule_6_a_snapshot_stops_at_the_taint)
{
    struct kv_snapshot_header header = {.geometry = geometry, .ns = tenant_a.digest, .n_bound = 64};
    struct kv_context *ctx;
    struct kv_encoder *e;
    unsigned char rows[256] = {1}, *record;

    open_cache(8);
    header.frame_positions = kv_frame_positions(&geometry);
    ctx = context("a40");
    ck_assert_int_eq(kv_context_overwrite(ctx, 20, rows), 0);
    ck_assert_int_eq(kv_encoder_open(&header, &e, NULL), 0);
    record = malloc(kv_encoder_frame_bytes(e, 40));
    ck_assert_int_eq(kv_encoder_frame(e, ctx, 21, record), KV_ERR_INVALID);
    ck_assert_int_eq(kv_encoder_frame(e, ctx, 20, record), 0);
    ck_assert_int_eq(kv_encoder_frame(e, ctx, 1, record), KV_ERR_INVALID);
    free(record);
    kv_encoder_close(e);
    kv_context_close(ctx);
    close_cache();
}
END_TEST

START_TEST(rule_7_a_match_leaves_the_last_token_of_a_prompt_to_run)
{
    open_cache(8);
    put("a32");
    kv_context_close(match("a32", 0, 31));
    kv_context_close(match("a20", 0, 19));
    kv_context_close(match("a33", 0, 32));
    kv_context_close(match("a1", 0, 0));
    ck_assert_uint_eq(stats().n_hits, 3);
    ck_assert_uint_eq(stats().n_misses, 1);
    close_cache();
}
END_TEST

/* One page in all, and it is the entry's.  Running the last token again needs a clone, so that the
 * match must be refused it, and be given what needs none: nothing. */
START_TEST(rule_7_the_last_token_is_cut_before_the_reservation_is_counted)
{
    struct kv_context *ctx;

    open_cache(1);
    put("a16");
    ctx = match("a16", 16, 0);
    ck_assert_int_eq(grow(ctx, "a16"), 0);
    EXPECT_ENTRIES("");
    kv_context_close(ctx);
    close_cache();
}
END_TEST

START_TEST(rule_7_logits_come_only_where_prompt_match_and_entry_have_one_length)
{
    static const struct {
        const char *prompt;
        uint32_t want;
        bool has;
    } cases[] = {{"a32", 32, true}, {"a31", 30, false}, {"a32b1", 32, false}, {"c20", 19, false}};

    open_cache(8);
    put_logits("a32", 5);
    put("c20");
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct kv_context *ctx;
        struct kv_match m;
        uint32_t ids[MAX], n = key(cases[i].prompt, ids);
        float logits[2] = {-1, -1};

        ck_assert_int_eq(kv_cache_match(cache, &ns, ids, n, n, logits, 2, &ctx, &m), 0);
        ck_assert_uint_eq(m.n_matched, cases[i].want);
        ck_assert(m.has_logits == cases[i].has);
        ck_assert(logits[0] == (cases[i].has ? 5.0f : -1.0f));
        kv_context_close(ctx);
    }
    close_cache();
}
END_TEST

START_TEST(rule_7_a_miss_forks_refreshes_and_makes_nothing)
{
    struct kv_stats before;

    open_cache(8);
    put("a16");
    put("b16");
    before = stats();
    kv_context_close(match("c20", 0, 0));
    ns = tenant_b;
    kv_context_close(match("a20", 0, 0));
    ns = tenant_a;
    ck_assert_uint_eq(stats().bookkeeping_bytes, before.bookkeeping_bytes); /* no root either */
    EXPECT_ENTRIES("a16 b16");
    close_cache();
}
END_TEST

START_TEST(rule_7_a_root_exists_only_while_it_has_entries)
{
    size_t one;

    open_cache(8);
    put("a16");
    one = stats().bookkeeping_bytes;
    ns = tenant_b;
    put("a16");
    ck_assert_uint_eq(stats().bookkeeping_bytes, 2 * one);
    ck_assert_uint_eq(kv_cache_trim(cache, 1), 1);
    ck_assert_uint_eq(stats().bookkeeping_bytes, one);
    ck_assert_uint_eq(reach("a16"), 16); /* the older one, of the other tenant, went */
    close_cache();
}
END_TEST

/* The one at the match or below that comes first, a prefix before its extensions. */
START_TEST(rule_8_a_match_uses_the_first_entry_below_it_and_refreshes_only_that)
{
    open_cache(24);
    put_logits("a20d12", 1);
    put_logits("a20c12", 1);
    put_logits("a20c12b4", 1);
    put("b16");
    kv_context_close(match("a20x1", 0, 20));
    EXPECT_ENTRIES("a20d12 a20c12b4 b16 a20c12");
    kv_context_close(match("a20d1x1", 0, 21));
    EXPECT_ENTRIES("a20c12b4 b16 a20c12 a20d12");
    kv_context_close(match("a20c12b1x1", 0, 33));
    EXPECT_ENTRIES("b16 a20c12 a20d12 a20c12b4");
    close_cache();
}
END_TEST

/* The pointer to the first entry is mended by insert and remove, in whatever order they come. */
START_TEST(rule_8_the_first_entry_is_known_after_each_insert_and_removal)
{
    static const char *const keys[] = {"a8m8", "a8k8",   "a8z8",   "a4b4",  "a8k8a8",
                                       "a2b2", "a8k4x4", "a8k8b8", "a8a16", "b16"};
    enum { N = sizeof(keys) / sizeof(keys[0]) };

    open_cache(64);
    for (uint32_t turn = 0; turn < 40; turn++) {
        uint64_t h = mix(turn);

        for (uint32_t i = 0; i < N; i++, h = mix(h))
            put_logits(keys[h % N], 1);
        while (stats().n_entries > 0) {
            kv_cache_trim(cache, 1);
            check(); /* compares every pointer with the entry that comes first */
        }
    }
    close_cache();
}
END_TEST

/* Pin, check, refresh, then evict: refreshed after the eviction, the entry would have been the
 * oldest and gone for its own match. */
START_TEST(rule_9_the_used_entry_is_refreshed_before_the_eviction)
{
    struct kv_context *ctx;

    open_cache(3);
    put("a16b16");
    put("c16");
    ctx = match("a16x16", 32, 16);
    EXPECT_ENTRIES("a16b16");
    kv_context_close(ctx);
    close_cache();
}
END_TEST

START_TEST(rule_9_a_matched_entry_is_not_exempt_from_eviction)
{
    struct kv_context *ctx;

    open_cache(2);
    put("a32");
    ctx = match("a16x16", 32, 16);
    EXPECT_ENTRIES("a16");
    ck_assert_int_eq(grow(ctx, "a16x16"), 0);
    ck_assert(reads(ctx, "a16x16"));
    kv_context_close(ctx);
    close_cache();
}
END_TEST

START_TEST(rule_9_a_match_whose_clone_has_no_room_is_cut_at_the_page_border)
{
    struct kv_context *ctx;

    open_cache(2);
    put("a24");
    ctx = match("a24b8", 32, 16);
    ck_assert_int_eq(grow(ctx, "a24b8"), 0);
    ck_assert(reads(ctx, "a24b8"));
    kv_context_close(ctx);
    close_cache();
}
END_TEST

START_TEST(rule_9_a_refused_match_refreshes_nothing_and_pins_nothing)
{
    struct kv_context *pin, *ctx = NULL;
    struct kv_match m = {.n_matched = 77};
    struct kv_stats before;

    open_cache(6);
    put("a32");
    put("b32");
    pin = context("c32");
    before = stats();
    ck_assert_int_eq(try_match("a20x1", 5 * P, &ctx, &m), KV_ERR_FULL);
    ck_assert_ptr_null(ctx);
    ck_assert_uint_eq(m.n_matched, 77);
    EXPECT_ENTRIES("a32 b32");
    ck_assert_uint_eq(stats().n_evictable, before.n_evictable);
    ck_assert_uint_eq(stats().n_hits + stats().n_misses, before.n_hits + before.n_misses);
    ck_assert_uint_eq(stats().n_contexts, 1);
    kv_context_close(pin);
    close_cache();
}
END_TEST

/* What was evicted belongs to who asked: it is reserved in the same step, so that nobody can take
 * it in between. */
START_TEST(rule_10_freed_slots_go_straight_to_the_reservation_that_evicted)
{
    struct kv_context *ctx;

    open_cache(4);
    put("a64");
    ctx = empty();
    ck_assert_int_eq(kv_context_reserve(ctx, 3 * P), 0);
    ck_assert_uint_eq(stats().n_free, 3);
    ck_assert_uint_eq(stats().n_reserved, 3);
    EXPECT_ENTRIES("a16");
    check();
    kv_context_close(ctx);
    close_cache();
}
END_TEST

START_TEST(rule_11_whole_pages_are_published_of_a_live_context_and_all_of_one_given_up)
{
    struct kv_context *ctx;

    open_cache(8);
    ctx = context("a15");
    ck_assert_int_eq(kv_context_publish(ctx, NULL, 0), 0);
    EXPECT_ENTRIES("");
    ck_assert_int_eq(grow(ctx, "a40"), 0);
    ck_assert_int_eq(kv_context_publish(ctx, NULL, 0), 0);
    EXPECT_ENTRIES("a32");
    ck_assert_int_eq(kv_context_give_up(ctx, NULL, 0), 0);
    EXPECT_ENTRIES("a40");
    ck_assert_uint_eq(stats().n_live, 3);
    ck_assert_uint_eq(stats().n_evictable, 3);
    close_cache();
}
END_TEST

START_TEST(rule_11_an_empty_key_makes_no_entry)
{
    struct kv_context *ctx;

    open_cache(8);
    ck_assert_int_eq(kv_context_give_up(empty(), NULL, 0), 0);
    ctx = empty();
    ck_assert_int_eq(kv_context_freeze(ctx), 0);
    ck_assert_int_eq(kv_context_publish(ctx, NULL, 0), 0);
    kv_context_close(ctx);
    ck_assert_uint_eq(stats().bookkeeping_bytes, 0);
    close_cache();
}
END_TEST

/* Only committed positions: what an open append holds is never seen. */
START_TEST(rule_11_an_aborted_append_is_not_published)
{
    struct kv_context *ctx;
    uint32_t ids[MAX];

    open_cache(8);
    ctx = context("a16");
    key("a16b32", ids);
    ck_assert_int_eq(kv_context_begin(ctx, ids + 16, 32), 0);
    ck_assert_int_eq(kv_context_commit(ctx, 3), 0);
    ck_assert_int_eq(kv_context_give_up(ctx, NULL, 0), 0);
    EXPECT_ENTRIES("a16b3");
    close_cache();
}
END_TEST

/* The list is copied where somebody still holds the object: its entry can go and frees nothing. */
START_TEST(rule_11_the_entry_of_a_frozen_context_has_a_list_of_its_own)
{
    struct kv_context *ctx;

    open_cache(4);
    ctx = context("a20");
    ck_assert_int_eq(kv_context_freeze(ctx), 0);
    ck_assert_int_eq(kv_context_publish(ctx, NULL, 0), 0);
    ck_assert_uint_eq(stats().n_evictable, 0);
    ck_assert_uint_eq(kv_cache_trim(cache, 4), 0);
    EXPECT_ENTRIES("a20");
    ck_assert(reads(ctx, "a20"));
    ck_assert_int_eq(kv_context_give_up(kv_context_ref(ctx), NULL, 0), 0);
    ck_assert_uint_eq(stats().n_evictable, 0);
    ck_assert_int_eq(kv_context_give_up(ctx, NULL, 0), 0); /* the last reference */
    ck_assert_uint_eq(stats().n_contexts, 0);
    ck_assert_uint_eq(stats().n_evictable, 2);
    close_cache();
}
END_TEST

START_TEST(rule_12_an_equal_key_keeps_its_pages_and_adopts_logits)
{
    struct kv_context *ctx, *hit;
    struct kv_match m;
    uint32_t ids[MAX], n = key("a20", ids);
    float logits[2];

    open_cache(8);
    put("a20");
    put("b20");
    put_logits("a20", 3);
    EXPECT_ENTRIES("b20 a20");
    ck_assert_uint_eq(stats().n_live, 4);
    put_logits("a20", 9); /* it has some: they stay */
    ck_assert_int_eq(kv_cache_match(cache, &ns, ids, n, n, logits, 2, &hit, &m), 0);
    ck_assert(m.has_logits && logits[0] == 3.0f);
    kv_context_close(hit);
    ctx = context("b20");
    ck_assert_int_eq(kv_context_give_up(ctx, NULL, 0), 0);
    EXPECT_ENTRIES("a20 b20");
    close_cache();
}
END_TEST

START_TEST(rule_12_an_insert_takes_over_entries_without_logits_on_its_path)
{
    struct kv_context *ctx;

    open_cache(24);
    ctx = context("a16");
    ck_assert_int_eq(kv_context_publish(ctx, NULL, 0), 0);
    ck_assert_int_eq(grow(ctx, "a32"), 0);
    ck_assert_int_eq(kv_context_publish(ctx, (const float[]){1}, 1), 0);
    EXPECT_ENTRIES("a32");
    ck_assert_int_eq(grow(ctx, "a48"), 0);
    ck_assert_int_eq(kv_context_publish(ctx, NULL, 0), 0);
    EXPECT_ENTRIES("a32 a48"); /* a32 carries logits: it stays */
    ck_assert_uint_eq(tree_refs(ctx, 0), 2);
    ck_assert_uint_eq(tree_refs(ctx, 2), 1);
    ck_assert_int_eq(kv_context_give_up(ctx, NULL, 0), 0);
    put("b20");
    put("b20c20");
    EXPECT_ENTRIES("a32 a48 b20c20");
    ck_assert_uint_eq(stats().n_live, 6); /* b20's pages were others: they are back */
    close_cache();
}
END_TEST

START_TEST(rule_12_a_key_that_a_longer_entry_covers_adds_nothing_and_refreshes_that)
{
    open_cache(16);
    put("a40");
    put("b16");
    put("a20");
    EXPECT_ENTRIES("b16 a40");
    ck_assert_uint_eq(stats().n_live, 4);
    put_logits("a20", 1); /* with logits it has something to add */
    EXPECT_ENTRIES("b16 a40 a20");
    close_cache();
}
END_TEST

START_TEST(rule_12_logits_are_kept_only_if_the_key_is_the_whole_context)
{
    struct kv_context *ctx, *hit;
    struct kv_match m;
    uint32_t ids[MAX], n = key("a16", ids);
    float logits[1] = {-1};

    open_cache(8);
    ctx = context("a20");
    ck_assert_int_eq(kv_context_publish(ctx, (const float[]){4}, 1), 0);
    EXPECT_ENTRIES("a16");
    ck_assert_int_eq(kv_cache_match(cache, &ns, ids, n, n, logits, 1, &hit, &m), 0);
    ck_assert(!m.has_logits && logits[0] == -1.0f);
    kv_context_close(hit);
    kv_context_close(ctx);
    close_cache();
}
END_TEST

/* At each offset, while somebody holds the entry's pages and while nobody does. */
START_TEST(rule_13_a_split_moves_no_page_and_changes_no_counter)
{
    for (uint32_t at = 1; at < 2 * P; at++)
        for (int held = 0; held < 2; held++) {
            struct kv_context *pin = NULL;
            struct kv_stats before, after;
            char text[32];

            open_cache(8);
            put("a32");
            pin = held ? match("a33", 0, 32) : NULL;
            before = stats();
            snprintf(text, sizeof(text), "a%ub1", at);
            put(text);
            after = stats();
            ck_assert_uint_eq(after.n_nodes, 3);
            ck_assert_uint_eq(after.n_live - before.n_live, (at + P) / P);
            ck_assert_uint_eq(after.n_evictable - before.n_evictable, (at + P) / P);
            ck_assert_uint_eq(reach("a32"), 32);
            kv_context_close(pin);
            close_cache();
        }
}
END_TEST

START_TEST(rule_13_an_insert_fits_its_bookkeeping_or_is_refused)
{
    struct kv_context *ctx;

    open_with(16, need_alone(40, 0), true);
    put("a40");
    EXPECT_ENTRIES("a40");
    put("a20b20"); /* only one of them fits: the older goes, whole */
    EXPECT_ENTRIES("a20b20");
    ck_assert_uint_eq(stats().n_live, 3);
    ctx = context("a41");
    ck_assert_int_eq(kv_context_publish(ctx, NULL, 0), 0); /* a32 fits */
    EXPECT_ENTRIES("a32");
    ck_assert_int_eq(kv_context_give_up(ctx, NULL, 0), 0); /* does not, and simply closes */
    EXPECT_ENTRIES("a32");
    ck_assert_uint_eq(stats().n_contexts, 0);
    ck_assert_uint_eq(stats().n_live, 2);
    close_cache();

    open_with(16, need_alone(40, 0) - 1, true);
    put("b16");
    put("a40");
    EXPECT_ENTRIES("b16"); /* a need over the bound removes nothing */
    close_cache();
}
END_TEST

START_TEST(rule_13_at_an_equal_key_only_logits_that_do_not_fit_are_refused)
{
    static const float logits[64];

    open_with(16, need_alone(20, 0), true);
    put("a20");
    ck_assert_int_eq(kv_context_give_up(context("a20"), logits, 64), 0);
    EXPECT_ENTRIES("a20");
    ck_assert_ptr_null(TAILQ_FIRST(&cache->shards[0].tree.by_use)->logits);
    close_cache();
}
END_TEST

START_TEST(rule_14_both_limits_are_checked_before_either_removes_anything)
{
    struct kv_context *pin, *ctx;

    open_cache(4);
    ck_assert_int_eq(kv_cache_set_quota(cache, 0, 2), 0);
    put("a16");
    ns = tenant_b;
    pin = context("b48");
    ns = tenant_a;
    ctx = empty();
    ck_assert_int_eq(kv_context_reserve(ctx, 2 * P), KV_ERR_FULL); /* free is what is short */
    EXPECT_ENTRIES("a16");
    ck_assert_int_eq(kv_context_reserve(ctx, P), 0);
    EXPECT_ENTRIES("");
    kv_context_close(ctx);
    kv_context_close(pin);
    close_cache();
}
END_TEST

START_TEST(rule_14_a_groups_quota_is_met_from_its_own_entries)
{
    struct kv_context *ctx;

    open_cache(8);
    put("x32"); /* the oldest, of the other tenant */
    ns = tenant_b;
    ck_assert_int_eq(kv_cache_set_quota(cache, ns.group, 3), 0);
    put("b32");
    ctx = empty();
    ck_assert_int_eq(kv_context_reserve(ctx, 2 * P), 0);
    EXPECT_ENTRIES("x32 b16");
    ck_assert_int_eq(kv_context_reserve(ctx, 4 * P), KV_ERR_FULL);
    EXPECT_ENTRIES("x32 b16");
    kv_context_close(ctx);
    close_cache();
}
END_TEST

START_TEST(rule_15_the_oldest_goes_first_a_match_rejuvenates_and_a_cut_does_not)
{
    open_cache(8);
    put("a32");
    put("b32");
    put("c32");
    kv_context_close(match("a20x1", 0, 20));
    EXPECT_ENTRIES("b32 c32 a32");
    ck_assert_uint_eq(kv_cache_trim(cache, 1), 1);
    EXPECT_ENTRIES("b16 c32 a32");
    ck_assert_uint_eq(kv_cache_trim(cache, 2), 2);
    EXPECT_ENTRIES("c16 a32");
    close_cache();
}
END_TEST

/* Removing it would free nothing and lose it for its holder. */
START_TEST(rule_15_an_entry_in_use_is_refreshed_instead_of_removed)
{
    struct kv_context *user, *ctx;

    open_cache(4);
    user = context("a32");
    ck_assert_int_eq(kv_context_publish(user, NULL, 0), 0);
    put("b32");
    ctx = empty();
    ck_assert_int_eq(kv_context_reserve(ctx, P), 0);
    EXPECT_ENTRIES("b16 a32");
    kv_context_close(user);
    kv_context_close(ctx);
    close_cache();
}
END_TEST

START_TEST(rule_16_a_leaf_is_cut_from_its_end_in_place_and_its_logits_die)
{
    const struct kv_entry *e;
    uint64_t serial;

    open_cache(8);
    put_logits("a100", 1);
    e = TAILQ_FIRST(&cache->shards[0].tree.by_use);
    serial = e->serial;
    for (uint32_t left = 6; left > 0; left--) {
        ck_assert_uint_eq(kv_cache_trim(cache, 1), 1);
        check();
        ck_assert_ptr_eq(TAILQ_FIRST(&cache->shards[0].tree.by_use), e);
        ck_assert_uint_eq(e->n, left * P);
        ck_assert_ptr_null(e->logits);
        ck_assert_uint_eq(e->serial, serial);
    }
    close_cache();
}
END_TEST

START_TEST(rule_16_a_cut_that_reaches_the_parent_removes_and_merges_what_is_left)
{
    open_cache(16);
    put("a20b12");
    put("a20c12");
    ck_assert_uint_eq(stats().n_nodes, 3);
    kv_cache_trim(cache, 1); /* a16 would be shorter than the fork in the road */
    EXPECT_ENTRIES("a20c12");
    ck_assert_uint_eq(stats().n_live, 2);
    ck_assert_uint_eq(stats().n_nodes, 1);
    check();
    close_cache();
}
END_TEST

START_TEST(rule_16_a_victim_with_entries_below_it_is_removed_whole)
{
    open_cache(16);
    put_logits("a32", 1);
    put_logits("a32c16", 1);
    put_logits("a32d16", 1);
    kv_cache_trim(cache, 1);
    EXPECT_ENTRIES("a32c16 a32d16");
    ck_assert_uint_eq(stats().n_evicted, 2);
    ck_assert_uint_eq(stats().n_nodes, 3);
    check();
    close_cache();
}
END_TEST

START_TEST(rule_17_trim_frees_what_is_evictable_and_says_how_much)
{
    struct kv_context *pin;

    open_cache(8);
    ck_assert_uint_eq(kv_cache_trim(cache, 3), 0);
    put("a16");
    ck_assert_uint_eq(kv_cache_trim(cache, 3), 1);
    EXPECT_ENTRIES("");
    put("a48");
    pin = match("a20x1", 0, 20);
    ck_assert_uint_eq(kv_cache_trim(cache, UINT32_MAX), 1);
    EXPECT_ENTRIES("a32");
    kv_context_close(pin);
    close_cache();
}
END_TEST

START_TEST(rule_18_publishing_as_a_context_grows_touches_each_page_once)
{
    struct kv_context *ctx;
    uint32_t ids[MAX];
    size_t before = 0;

    open_cache(130);
    for (uint32_t i = 0; i < MAX; i++)
        ids[i] = i;
    ctx = empty();
    for (uint32_t page = 1; page <= MAX / P; page++) {
        ck_assert_int_eq(append_to(ctx, &geometry, &ns, ids, page * P), 0);
        before = n_counter_writes;
        ck_assert_int_eq(kv_context_publish(ctx, NULL, 0), 0);
        ck_assert_uint_eq(n_counter_writes - before, 1);
        ck_assert_uint_eq(stats().n_entries, 1);
    }
    kv_context_close(ctx);
    for (uint32_t page = MAX / P; page > 0; page--) {
        before = n_counter_writes;
        ck_assert_uint_eq(kv_cache_trim(cache, 1), 1);
        ck_assert_uint_eq(n_counter_writes - before, 1); /* a cut: the pages it drops */
    }
    close_cache();
}
END_TEST

START_TEST(rule_18_a_fork_a_match_and_a_split_touch_their_own_pages_only)
{
    struct kv_context *ctx, *fork;
    size_t before;

    open_cache(64);
    for (char c = 'a'; c < 'k'; c++)
        put((const char[]){c, '5', '0', '\0'});
    before = n_counter_writes;
    ctx = match("c40x1", 0, 40);
    ck_assert_uint_eq(n_counter_writes - before, 3);
    before = n_counter_writes;
    fork = fork_at(ctx, 33);
    ck_assert_uint_eq(n_counter_writes - before, 3);
    kv_context_close(fork);
    kv_context_close(ctx);
    close_cache();
}
END_TEST

int main(int argc, char **argv)
{
    Suite *s = suite_create("kv_rules");
    TCase *tc = tcase_create("rules");
    SRunner *sr = srunner_create(s);
    int n_failed;

    if (!take_precision(&geometry, argc, argv))
        return 2;
    suite_add_tcase(s, tc);
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, rule_1_a_page_counts_its_holders_and_is_evictable_when_all_are_entries);
    tcase_add_test(tc, rule_1_free_and_live_pages_are_all_pages_while_slots_are_reserved);
    tcase_add_test(tc, rule_2_a_sole_holder_writes_in_place_and_any_other_into_a_clone);
    tcase_add_test(tc, rule_2_a_clone_has_the_valid_rows_and_ids_and_zeros);
    tcase_add_test(tc, rule_3_a_fork_that_shares_the_tail_tops_the_parents_reservation_up);
    tcase_add_test(tc, rule_3_such_a_fork_is_full_and_changes_nothing_where_there_is_no_slot);
    tcase_add_test(tc, rule_3_each_fork_tops_up_anew);
    tcase_add_test(tc, rule_3_a_fork_cut_at_a_whole_page_needs_no_slot);
    tcase_add_test(tc, rule_3_truncate_freeze_and_giving_up_end_a_reservation);
    tcase_add_test(tc, rule_3_a_truncation_into_a_shared_page_keeps_no_promise);
    tcase_add_test(tc, rule_3_a_reservation_that_needs_no_slot_is_always_granted);
    tcase_add_test(tc, rule_4_between_begin_and_its_end_every_other_change_is_busy);
    tcase_add_test(tc,
                   rule_4_a_partial_commit_and_an_abort_put_unused_pages_back_into_the_reservation);
    tcase_add_test(tc, rule_4_a_close_inside_an_append_aborts_it);
    tcase_add_test(tc, rule_5_a_frozen_context_never_changes_and_lives_by_its_references);
    tcase_add_test(tc, rule_6_a_raw_overwrite_of_a_shared_page_needs_one_of_its_own);
    tcase_add_test(tc, rule_6_an_overwrite_of_a_shared_tail_gives_back_the_slot_of_its_clone);
    tcase_add_test(tc, rule_6_publish_and_giving_up_stop_at_the_taint);
    tcase_add_test(tc, rule_6_a_fork_carries_a_taint_below_its_cut_and_a_truncation_to_it_ends_it);
    tcase_add_test(tc, rule_6_a_snapshot_stops_at_the_taint);
    tcase_add_test(tc, rule_7_a_match_leaves_the_last_token_of_a_prompt_to_run);
    tcase_add_test(tc, rule_7_the_last_token_is_cut_before_the_reservation_is_counted);
    tcase_add_test(tc, rule_7_logits_come_only_where_prompt_match_and_entry_have_one_length);
    tcase_add_test(tc, rule_7_a_miss_forks_refreshes_and_makes_nothing);
    tcase_add_test(tc, rule_7_a_root_exists_only_while_it_has_entries);
    tcase_add_test(tc, rule_8_a_match_uses_the_first_entry_below_it_and_refreshes_only_that);
    tcase_add_test(tc, rule_8_the_first_entry_is_known_after_each_insert_and_removal);
    tcase_add_test(tc, rule_9_the_used_entry_is_refreshed_before_the_eviction);
    tcase_add_test(tc, rule_9_a_matched_entry_is_not_exempt_from_eviction);
    tcase_add_test(tc, rule_9_a_match_whose_clone_has_no_room_is_cut_at_the_page_border);
    tcase_add_test(tc, rule_9_a_refused_match_refreshes_nothing_and_pins_nothing);
    tcase_add_test(tc, rule_10_freed_slots_go_straight_to_the_reservation_that_evicted);
    tcase_add_test(tc, rule_11_whole_pages_are_published_of_a_live_context_and_all_of_one_given_up);
    tcase_add_test(tc, rule_11_an_empty_key_makes_no_entry);
    tcase_add_test(tc, rule_11_an_aborted_append_is_not_published);
    tcase_add_test(tc, rule_11_the_entry_of_a_frozen_context_has_a_list_of_its_own);
    tcase_add_test(tc, rule_12_an_equal_key_keeps_its_pages_and_adopts_logits);
    tcase_add_test(tc, rule_12_an_insert_takes_over_entries_without_logits_on_its_path);
    tcase_add_test(tc, rule_12_a_key_that_a_longer_entry_covers_adds_nothing_and_refreshes_that);
    tcase_add_test(tc, rule_12_logits_are_kept_only_if_the_key_is_the_whole_context);
    tcase_add_test(tc, rule_13_a_split_moves_no_page_and_changes_no_counter);
    tcase_add_test(tc, rule_13_an_insert_fits_its_bookkeeping_or_is_refused);
    tcase_add_test(tc, rule_13_at_an_equal_key_only_logits_that_do_not_fit_are_refused);
    tcase_add_test(tc, rule_14_both_limits_are_checked_before_either_removes_anything);
    tcase_add_test(tc, rule_14_a_groups_quota_is_met_from_its_own_entries);
    tcase_add_test(tc, rule_15_the_oldest_goes_first_a_match_rejuvenates_and_a_cut_does_not);
    tcase_add_test(tc, rule_15_an_entry_in_use_is_refreshed_instead_of_removed);
    tcase_add_test(tc, rule_16_a_leaf_is_cut_from_its_end_in_place_and_its_logits_die);
    tcase_add_test(tc, rule_16_a_cut_that_reaches_the_parent_removes_and_merges_what_is_left);
    tcase_add_test(tc, rule_16_a_victim_with_entries_below_it_is_removed_whole);
    tcase_add_test(tc, rule_17_trim_frees_what_is_evictable_and_says_how_much);
    tcase_add_test(tc, rule_18_publishing_as_a_context_grows_touches_each_page_once);
    tcase_add_test(tc, rule_18_a_fork_a_match_and_a_split_touch_their_own_pages_only);
    srunner_run_all(sr, CK_ENV);
    n_failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return n_failed != 0;
}

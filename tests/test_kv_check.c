/* The audit sees each thing that it is there to see.  Method: a sound cache is bent in one place,
 * the audit must name just that, and bent back it must hold again. */
#include "kv_rig.h"

/* ---- A cache with one of everything ---- */

static struct kv_context *live, *frozen, *open_one;
static struct kv_namespace tenant_c = {.digest = {{8}}, .group = 0};

static void open_scene(bool arena)
{
    uint32_t ids[MAX];

    open_with(32, 0, arena);
    put_logits("c20d20", 1);
    put("c20e20");
    put_logits("f40", 2);
    ns = tenant_b;
    put("g20");
    ns = tenant_c;
    put("h20");
    ns = tenant_a;
    live = context("a20");
    ck_assert_int_eq(kv_context_reserve(live, 3 * P), 0);
    frozen = context("b20");
    ck_assert_int_eq(kv_context_freeze(frozen), 0);
    open_one = context("i20");
    key("i20j20", ids);
    ck_assert_int_eq(kv_context_begin(open_one, ids + 20, 20), 0);
    check();
}

static void close_scene(void)
{
    check();
    kv_context_close(live);
    kv_context_close(frozen);
    kv_context_close(open_one);
    close_cache();
}

static struct kv_entry *entry_of(const char *text)
{
    struct kv_entry *e;

    TAILQ_FOREACH(e, &cache->shards[0].tree.by_use, by_use)
    {
        uint32_t ids[MAX], run;
        const uint32_t n = key(text, ids);
        const struct kv_key k = {.pages = e->pages, .layout = &cache->layout, .n = e->n};
        bool same = e->n == n;

        for (uint32_t i = 0; same && i < n; i++)
            same = *kv_key_run(&k, i, &run) == ids[i];
        if (same)
            return e;
    }
    ck_abort_msg("no entry %s", text);
    return NULL;
}

/* ---- Bending, and bending back in the reverse order ---- */

enum { MAX_BENT = 8 };

static struct {
    void *at;
    size_t size;
    unsigned char was[16];
} bent[MAX_BENT];
static uint32_t n_bent;

static void poke(void *at, const void *value, size_t size)
{
    ck_assert_uint_lt(n_bent, MAX_BENT);
    ck_assert_uint_le(size, sizeof(bent[0].was));
    bent[n_bent].at = at;
    bent[n_bent].size = size;
    memcpy(bent[n_bent++].was, at, size);
    memcpy(at, value, size);
}

static void poke_u32(uint32_t *at, uint32_t value)
{
    poke(at, &value, sizeof(value));
}

static void poke_pointer(void *at, const void *value)
{
    poke(at, &value, sizeof(value));
}

static void unbend(void)
{
    while (n_bent > 0) {
        n_bent--;
        memcpy(bent[n_bent].at, bent[n_bent].was, bent[n_bent].size);
    }
}

static void foreign_page(void)
{
    poke_pointer(&live->pages[0], cache->slots.pages + cache->slots.n_pages);
}

static void page_of_another_group(void)
{
    poke_u32(&live->pages[1]->group, 5);
}

static void longer_context(void)
{
    poke_u32(&live->n, live->n + P);
}

static void slots_of_a_frozen_context(void)
{
    poke_u32(&frozen->held, 1);
}

static void references_to_a_live_context(void)
{
    poke_u32(&live->refs, 2);
}

static void promise_without_slots(void)
{
    poke_u32(&live->bound, 5 * P);
}

static void missing_context(void)
{
    poke_u32(&cache->shards[0].n_contexts, 2);
}

static void short_entry(void)
{
    struct kv_entry *e = entry_of("c20d20");

    poke_u32(&e->n, 10);
    poke_u32(&e->n_pages, 1);
}

static void entry_without_positions(void)
{
    poke_u32(&entry_of("f40")->n, 0);
}

static void entry_with_other_ids(void)
{
    struct kv_entry *e = entry_of("f40");

    poke_u32(kv_page_ids(&cache->layout, e->pages[1]) + 3, 7);
}

static void entry_of_another_root(void)
{
    struct kv_root *other;

    ns = tenant_c;
    other = entry_of("h20")->root;
    ns = tenant_a;
    poke_pointer(&entry_of("f40")->root, other);
}

static void entry_that_its_node_forgot(void)
{
    poke_pointer(&entry_of("f40")->node->entry, NULL);
}

static void logits_without_a_number(void)
{
    poke_u32(&entry_of("f40")->n_logits, 0);
}

static void serial_from_the_past(void)
{
    const uint64_t serial = 0;

    poke(&entry_of("f40")->serial, &serial, sizeof(serial));
}

static void entry_that_is_not_counted(void)
{
    poke_u32(&cache->shards[0].tree.n_entries, cache->shards[0].tree.n_entries - 1);
}

/* The node that "c20d20" and "c20e20" have in common. */
static struct kv_node *fork_in_the_road(void)
{
    return entry_of("c20d20")->node->up;
}

static void child_of_another_parent(void)
{
    poke_pointer(&entry_of("c20d20")->node->up, entry_of("f40")->node);
}

static void child_under_another_id(void)
{
    poke_u32(&entry_of("c20d20")->node->first_id, 'c');
}

static void child_that_is_gone(void)
{
    struct kv_node *top = fork_in_the_road()->kids;

    poke_pointer(&top->left, NULL);
    poke_pointer(&top->right, NULL);
}

static void wrong_first_entry(void)
{
    poke_pointer(&fork_in_the_road()->first, entry_of("c20e20"));
}

static void root_with_an_edge(void)
{
    poke_u32(&entry_of("f40")->root->node.n_edge, 1);
}

static void node_that_is_not_counted(void)
{
    poke_u32(&cache->shards[0].tree.n_nodes, cache->shards[0].tree.n_nodes + 1);
}

static void node_that_the_index_has_not(void)
{
    poke_u32(&cache->shards[0].tree.index.n_nodes, cache->shards[0].tree.index.n_nodes - 1);
}

static void bytes_that_are_not_counted(void)
{
    const size_t bytes = cache->shards[0].tree.bytes + 1;

    poke(&cache->shards[0].tree.bytes, &bytes, sizeof(bytes));
}

static void bound_that_is_passed(void)
{
    const size_t bound = 100;

    poke(&cache->shards[0].tree.bound, &bound, sizeof(bound));
}

static void reference_that_nobody_has(void)
{
    const uint64_t counts = 2;

    poke(&live->pages[0]->counts, &counts, sizeof(counts));
}

static void reference_of_the_tree_that_is_not_there(void)
{
    const uint64_t counts = 1 | (uint64_t)1 << 32;

    poke(&live->pages[0]->counts, &counts, sizeof(counts));
}

static void live_page_without_memory(void)
{
    poke_pointer(&live->pages[0]->bytes, NULL);
}

static void slot_that_is_lost(void)
{
    poke_u32(&cache->shards[0].pool.n_free, cache->shards[0].pool.n_free - 1);
}

static void evictable_that_is_none(void)
{
    poke_u32(&cache->shards[0].pool.n_evictable, cache->shards[0].pool.n_evictable + 1);
}

static void reservation_of_nobody(void)
{
    poke_u32(&cache->shards[0].pool.n_reserved, cache->shards[0].pool.n_reserved + 1);
}

static void more_reserved_than_free(void)
{
    poke_u32(&cache->shards[0].pool.n_reserved, cache->shards[0].pool.n_free + 1);
}

static void group_with_too_many(void)
{
    poke_u32(&cache->shards[0].pool.groups[0].n_live, 1);
}

static void slot_that_is_free_twice(void)
{
    struct kv_page *pages = cache->slots.pages;

    poke_u32(&pages[cache->shards[0].pool.free].next_free, cache->shards[0].pool.free);
}

static const struct {
    const char *says; /* part of what the audit must say */
    void (*bend)(void);
    bool heap;
} bends[] = {
    {"something that is no page", foreign_page, false},
    {"of group 5 is held in group 0", page_of_another_group, false},
    {"a context of 36 + 0 positions has 2 pages", longer_context, false},
    {"a frozen context has 1 references, 1 slots", slots_of_a_frozen_context, false},
    {"a live context has 2 references", references_to_a_live_context, false},
    {"was promised 80 positions: 1 slots held, 3 needed", promise_without_slots, false},
    {"n_contexts is 2, counted 3", missing_context, false},
    {"an entry of 10 positions stands deeper", short_entry, false},
    {"an entry of 0 positions has 3 pages", entry_without_positions, false},
    {"an entry's ids differ from its edges", entry_with_other_ids, false},
    {"an entry of 40 positions stands 40 deep", entry_of_another_root, false},
    {"an entry's node does not know it", entry_that_its_node_forgot, false},
    {"an entry's logits are half there", logits_without_a_number, false},
    {"the list by use is out of order at serial", serial_from_the_past, false},
    {"n_entries is 4, counted 5", entry_that_is_not_counted, false},
    {"stands", child_of_another_parent, false},
    {"does not hang where it should", child_under_another_id, false},
    {"a node without entry has 1 children", child_that_is_gone, false},
    {"a node does not know the first entry below it", wrong_first_entry, false},
    {"a root has an entry, an edge, or no child", root_with_an_edge, false},
    {"n_nodes is", node_that_is_not_counted, false},
    {"nodes in the index is", node_that_the_index_has_not, false},
    {"bookkeeping_bytes is", bytes_that_are_not_counted, false},
    {"its bound 100", bound_that_is_passed, false},
    {"has 2 references, 0 of the tree; counted 1 and 0", reference_that_nobody_has, false},
    {"has 1 references, 1 of the tree; counted 1 and 0", reference_of_the_tree_that_is_not_there,
     false},
    {"is live, but its memory is not there", live_page_without_memory, true},
    {"free and live pages is 31, counted 32", slot_that_is_lost, false},
    {"n_evictable is", evictable_that_is_none, false},
    {"n_reserved is 2, counted 1", reservation_of_nobody, false},
    {"n_reserved is", more_reserved_than_free, false},
    {"group 0 has 1 live", group_with_too_many, false},
    {"is in the free list twice, or live", slot_that_is_free_twice, false},
};

enum { N_BENDS = sizeof(bends) / sizeof(bends[0]) };

START_TEST(the_audit_names_what_does_not_hold)
{
    struct kv_why why = {""};

    open_scene(!bends[_i].heap);
    bends[_i].bend();
    ck_assert_int_eq(kv_cache_check(cache, &why), KV_ERR_CHECK);
    ck_assert_msg(strstr(why.text, bends[_i].says) != NULL, "\"%s\" does not say \"%s\"", why.text,
                  bends[_i].says);
    ck_assert_int_eq(kv_cache_check(cache, NULL), KV_ERR_CHECK);
    unbend();
    close_scene();
}
END_TEST

START_TEST(the_audit_sees_a_group_list_out_of_order_or_short)
{
    struct kv_entry_list *list;
    struct kv_entry *e;
    struct kv_why why;

    open_scene(true);
    list = &cache->shards[0].tree.in_group[0];
    e = TAILQ_FIRST(list);
    TAILQ_REMOVE(list, e, in_group);
    ck_assert_int_eq(kv_cache_check(cache, &why), KV_ERR_CHECK);
    ck_assert_ptr_nonnull(strstr(why.text, "entries in groups is 4, counted 5"));
    TAILQ_INSERT_TAIL(list, e, in_group);
    ck_assert_int_eq(kv_cache_check(cache, &why), KV_ERR_CHECK);
    ck_assert_ptr_nonnull(strstr(why.text, "the list of group 0 is out of order"));
    TAILQ_REMOVE(list, e, in_group);
    TAILQ_INSERT_HEAD(list, e, in_group);
    close_scene();
}
END_TEST

START_TEST(a_sound_cache_passes_whatever_is_open)
{
    open_scene(true);
    close_scene();
    open_scene(false);
    close_scene();
}
END_TEST

/* ---- What calls refuse ---- */

START_TEST(a_cache_of_nothing_or_past_all_memory_is_refused_by_name)
{
    struct kv_cache_config config = {.geometry = geometry, .page_tokens = P};
    struct kv_cache *none = NULL;
    struct kv_why why;

    ck_assert_int_eq(kv_cache_open(&config, &none, &why), KV_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(why.text, "n_pages is 0"));
    config.n_pages = UINT32_MAX;
    config.page_tokens = KV_PAGE_TOKENS_MAX;
    config.geometry = (struct kv_geometry){
        .n_layers = 512, .n_kv_heads = 4, .head_dim = KV_MAX_HEAD_DIM, .precision = KV_F32};
    ck_assert_int_eq(kv_cache_open(&config, &none, &why), KV_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(why.text, "n_pages is 4294967295"));
    config.page_tokens = 24;
    ck_assert_int_eq(kv_cache_open(&config, &none, &why), KV_ERR_INVALID);
    config.page_tokens = P;
    config.geometry.n_layers = 0;
    ck_assert_int_eq(kv_cache_open(&config, &none, NULL), KV_ERR_INVALID);
    ck_assert_ptr_null(none);
}
END_TEST

START_TEST(a_closed_cache_lets_go_of_its_entries)
{
    open_cache(16);
    put("a40");
    put_logits("a20b20", 1);
    kv_cache_close(cache);
    kv_cache_close(NULL);
    kv_context_close(NULL);
}
END_TEST

/* Each argument out of its range, on a context that must be as it was. */
START_TEST(arguments_out_of_range_are_invalid_and_change_nothing)
{
    struct kv_namespace nowhere = {.group = KV_MAX_GROUPS};
    const float logits[1] = {1};
    const uint32_t ids[1] = {1};
    struct kv_context *ctx, *none = NULL;
    unsigned char rows[1024];
    uint32_t got[4];
    struct iovec piece = {.iov_base = rows, .iov_len = sizeof(rows)};

    open_cache(16);
    ctx = context("a20");
    ck_assert_int_eq(kv_context_open(cache, &nowhere, &none), KV_ERR_INVALID);
    ck_assert_int_eq(kv_cache_match(cache, &nowhere, ids, 1, 1, NULL, 0, &none, NULL),
                     KV_ERR_INVALID);
    ck_assert_int_eq(kv_cache_match(cache, &ns, ids, 1, 0, NULL, 0, &none, NULL), KV_ERR_INVALID);
    ck_assert_int_eq(kv_cache_match(cache, &ns, ids, 1, KV_MAX_POSITIONS + 1, NULL, 0, &none, NULL),
                     KV_ERR_INVALID);
    ck_assert_uint_eq(kv_cache_peek(cache, &nowhere, ids, 1), 0);
    ck_assert_int_eq(kv_cache_set_quota(cache, KV_MAX_GROUPS, 1), KV_ERR_INVALID);
    ck_assert_int_eq(kv_context_reserve(ctx, KV_MAX_POSITIONS + 1), KV_ERR_INVALID);
    ck_assert_int_eq(kv_context_begin(ctx, ids, 0), KV_ERR_INVALID);
    ck_assert_int_eq(kv_context_begin(ctx, ids, KV_MAX_POSITIONS), KV_ERR_INVALID);
    ck_assert_int_eq(kv_context_commit(ctx, 0), KV_ERR_INVALID);
    ck_assert_int_eq(kv_context_fork(ctx, 21, &none), KV_ERR_INVALID);
    ck_assert_int_eq(kv_context_truncate(ctx, 21), KV_ERR_INVALID);
    ck_assert_int_eq(kv_context_ids(ctx, 18, 3, got), KV_ERR_INVALID);
    ck_assert_int_eq(kv_context_ids(ctx, UINT32_MAX, 2, got), KV_ERR_INVALID);
    ck_assert_int_eq(kv_context_gather(ctx, 18, 3, rows), KV_ERR_INVALID);
    ck_assert_int_eq(kv_context_gather(ctx, UINT32_MAX, 2, rows), KV_ERR_INVALID);
    ck_assert_int_eq(kv_context_publish(ctx, logits, 0), KV_ERR_INVALID);
    ck_assert_int_eq(kv_context_publish(ctx, NULL, 1), KV_ERR_INVALID);
    ck_assert_int_eq(kv_context_give_up(ctx, logits, KV_MAX_LOGITS + 1), KV_ERR_INVALID);
    ck_assert_int_eq(kv_context_scatter(ctx, 20, 1, &piece, 1), KV_ERR_INVALID); /* not open */
    ck_assert_int_eq(kv_context_begin(ctx, ids, 1), 0);
    ck_assert_int_eq(kv_context_scatter(ctx, 20, 1, &piece, 1), KV_ERR_INVALID); /* too long */
    piece.iov_len = 1;
    ck_assert_int_eq(kv_context_scatter(ctx, 20, 1, &piece, 1), KV_ERR_INVALID); /* too short */
    ck_assert_int_eq(kv_context_scatter(ctx, 19, 1, &piece, 1), KV_ERR_INVALID); /* committed */
    ck_assert_int_eq(kv_context_commit(ctx, 2), KV_ERR_INVALID);
    ck_assert_int_eq(kv_context_abort(ctx), 0);
    ck_assert_ptr_null(none);
    ck_assert(reads(ctx, "a20"));
    ck_assert_uint_eq(stats().n_entries, 0);
    kv_context_close(ctx);
    close_cache();
}
END_TEST

START_TEST(each_error_has_a_name_of_its_own)
{
    for (int rc = KV_ERR_NOT_FOUND; rc <= KV_OK; rc++) {
        ck_assert_ptr_nonnull(kv_strerror(rc));
        ck_assert_str_ne(kv_strerror(rc), kv_strerror(1));
        for (int other = KV_ERR_NOT_FOUND; other < rc; other++)
            ck_assert_str_ne(kv_strerror(rc), kv_strerror(other));
    }
    ck_assert_str_eq(kv_strerror(KV_ERR_NOT_FOUND - 1), kv_strerror(1));
}
END_TEST

int main(void)
{
    Suite *s = suite_create("kv_check");
    TCase *tc = tcase_create("check");
    SRunner *sr = srunner_create(s);
    int n_failed;

    suite_add_tcase(s, tc);
    tcase_set_timeout(tc, 60);
    tcase_add_loop_test(tc, the_audit_names_what_does_not_hold, 0, N_BENDS);
    tcase_add_test(tc, the_audit_sees_a_group_list_out_of_order_or_short);
    tcase_add_test(tc, a_sound_cache_passes_whatever_is_open);
    tcase_add_test(tc, a_cache_of_nothing_or_past_all_memory_is_refused_by_name);
    tcase_add_test(tc, a_closed_cache_lets_go_of_its_entries);
    tcase_add_test(tc, arguments_out_of_range_are_invalid_and_change_nothing);
    tcase_add_test(tc, each_error_has_a_name_of_its_own);
    srunner_run_all(sr, CK_ENV);
    n_failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return n_failed != 0;
}

/* The audit: every counter again from what is really held, and the form of every structure.  It
 * holds all locks throughout, which is the gate: nothing changes while it walks.  What others are
 * in the middle of outside the locks is written down in their contexts (n_open, aside). */
#include "kvcore/kv_cache.h"

#include <stdlib.h>
#include <string.h>

struct audit {
    struct kv_cache *cache;
    const struct kv_shard *shard;             /* at hand */
    uint32_t *refs;                           /* [n_pages], counted anew */
    uint32_t *tree_refs;                      /* [n_pages] */
    uint8_t *shards;                          /* [n_pages], of the holders */
    struct kv_group (*groups)[KV_MAX_GROUPS]; /* [n_shards] */
    struct kv_why *why;
};

static uint8_t shard_id(const struct audit *a)
{
    return (uint8_t)(a->shard - a->cache->shards);
}

#define FAIL(a, ...) kv_fail((a)->why, KV_ERR_CHECK, __VA_ARGS__)

static int check_equal(const struct audit *a, const char *what, uint64_t is, uint64_t counted)
{
    if (is != counted)
        return FAIL(a, "%s is %llu, counted %llu", what, (unsigned long long)is,
                    (unsigned long long)counted);
    return 0;
}

/* ---- Holders ---- */

static int count_pages(struct audit *a, struct kv_page *const *pages, uint32_t n, uint32_t group,
                       bool tree)
{
    const struct kv_slots *slots = &a->cache->slots;

    for (uint32_t i = 0; i < n; i++) {
        const size_t id = (size_t)(pages[i] - slots->pages);

        if (id >= slots->n_pages)
            return FAIL(a, "a page list holds something that is no page");
        if (pages[i]->group != group)
            return FAIL(a, "page %zu of group %u is held in group %u", id, pages[i]->group, group);
        if (a->refs[id] > 0 && a->shards[id] != shard_id(a))
            return FAIL(a, "page %zu is held in two shards", id);
        a->shards[id] = shard_id(a);
        a->refs[id]++;
        a->tree_refs[id] += tree;
    }
    return 0;
}

static int check_context(struct audit *a, const struct kv_context *ctx)
{
    const uint32_t open = ctx->n_open;
    const bool frozen = atomic_load(&ctx->frozen);
    int rc = 0;

    if (ctx->shard != a->shard)
        return FAIL(a, "a context is in the list of another shard");
    if (ctx->n_pages != kv_pages_for(a->cache, ctx->n + open) || ctx->n_pages > ctx->cap)
        return FAIL(a, "a context of %u + %u positions has %u pages", ctx->n, open, ctx->n_pages);
    if (frozen ? open != 0 || ctx->held != 0 || ctx->refs == 0 : ctx->refs != 1)
        return FAIL(a, "a %s context has %u references, %u slots held, %u positions open",
                    frozen ? "frozen" : "live", ctx->refs, ctx->held, open);
    if (open == 0 && ctx->held < kv_context_need(ctx, ctx->bound))
        return FAIL(a, "a context was promised %u positions: %u slots held, %u needed", ctx->bound,
                    ctx->held, kv_context_need(ctx, ctx->bound));
    a->groups[shard_id(a)][ctx->ns.group].n_reserved += ctx->held;
    if (ctx->aside != NULL)
        rc = count_pages(a, &ctx->aside, 1, ctx->ns.group, false);
    return rc < 0 ? rc : count_pages(a, ctx->pages, ctx->n_pages, ctx->ns.group, false);
}

static int check_contexts(struct audit *a)
{
    const struct kv_context *ctx;
    uint32_t n = 0;
    int rc;

    LIST_FOREACH(ctx, &a->shard->contexts, link)
    {
        rc = check_context(a, ctx);
        if (rc < 0)
            return rc;
        n++;
    }
    return check_equal(a, "n_contexts", a->shard->n_contexts, n);
}

/* ---- Entries ---- */

/* The ids in an entry's pages are the edges from the root to its node. */
static int check_key(const struct audit *a, const struct kv_entry *entry)
{
    const struct kv_key key = {.pages = entry->pages, .layout = &a->cache->layout, .n = entry->n};
    const struct kv_node *node = entry->node;
    uint32_t end = entry->n;

    for (; node->up != NULL; node = node->up) {
        if (node->n_edge > end)
            return FAIL(a, "an entry of %u positions stands deeper than that", entry->n);
        end -= node->n_edge;
        for (uint32_t at = end, run; at < end + node->n_edge; at += run) {
            const uint32_t *ids = kv_key_run(&key, at, &run);

            if (run > end + node->n_edge - at)
                run = end + node->n_edge - at;
            if (memcmp(ids, node->edge + (at - end), run * sizeof(*ids)) != 0)
                return FAIL(a, "an entry's ids differ from its edges after position %u", at);
        }
    }
    if (end != 0 || node != &entry->root->node)
        return FAIL(a, "an entry of %u positions stands %u deep", entry->n, entry->n - end);
    return 0;
}

static int check_entry(struct audit *a, const struct kv_entry *entry)
{
    if (entry->n == 0 || entry->n_pages != kv_pages_for(a->cache, entry->n))
        return FAIL(a, "an entry of %u positions has %u pages", entry->n, entry->n_pages);
    if (entry->node->entry != entry)
        return FAIL(a, "an entry's node does not know it");
    if ((entry->logits == NULL) != (entry->n_logits == 0))
        return FAIL(a, "an entry's logits are half there");
    return count_pages(a, entry->pages, entry->n_pages, entry->root->group, true);
}

static int check_entries(struct audit *a)
{
    const struct kv_tree *tree = &a->shard->tree;
    const struct kv_entry *entry;
    uint64_t serial = 0;
    uint32_t n = 0, n_in_groups = 0;
    int rc;

    TAILQ_FOREACH(entry, &tree->by_use, by_use)
    {
        if (entry->serial <= serial || entry->serial > tree->serial)
            return FAIL(a, "the list by use is out of order at serial %llu",
                        (unsigned long long)entry->serial);
        serial = entry->serial;
        rc = check_entry(a, entry);
        if (rc == 0)
            rc = check_key(a, entry);
        if (rc < 0)
            return rc;
        n++;
    }
    for (uint32_t g = 0; g < KV_MAX_GROUPS; g++) {
        serial = 0;
        TAILQ_FOREACH(entry, &tree->in_group[g], in_group)
        {
            if (entry->serial <= serial || entry->root->group != g)
                return FAIL(a, "the list of group %u is out of order", g);
            serial = entry->serial;
            n_in_groups++;
        }
    }
    rc = check_equal(a, "entries in groups", n_in_groups, n);
    return rc < 0 ? rc : check_equal(a, "n_entries", tree->n_entries, n);
}

/* ---- Nodes ---- */

struct totals {
    uint32_t n_nodes;
    uint32_t n_entries;
    size_t bytes;
};

/* Children in order, each knowing its parent; how many there are, up to 2. */
static int check_children(const struct audit *a, const struct kv_node *node, uint32_t *n)
{
    const struct kv_node *kid = kv_node_first_child(node);

    *n = 0;
    while (kid != NULL) {
        const struct kv_node *next = kv_node_child_after(node, kid->first_id);

        if (kid->up != node || kid->n_edge == 0 || kid->edge[0] != kid->first_id)
            return FAIL(a, "a child at id %u does not hang where it should", kid->first_id);
        if (kv_index_find(&a->shard->tree.index, node, kid->first_id) != kid)
            return FAIL(a, "a child at id %u is not found", kid->first_id);
        if (next != NULL && next->first_id <= kid->first_id)
            return FAIL(a, "children are out of order at id %u", kid->first_id);
        *n += *n < 2;
        kid = next;
    }
    return 0;
}

static int check_node(struct audit *a, const struct kv_node *node, struct totals *t)
{
    const struct kv_entry *first = node->entry;
    uint32_t n_kids;
    int rc = check_children(a, node, &n_kids);

    if (rc < 0)
        return rc;
    if (first == NULL && n_kids > 0)
        first = kv_node_first_child(node)->first;
    if (node->first != first || first == NULL)
        return FAIL(a, "a node does not know the first entry below it");
    if (node->up == NULL) {
        if (node->entry != NULL || n_kids == 0 || node->n_edge != 0)
            return FAIL(a, "a root has an entry, an edge, or no child");
        return 0;
    }
    if (node->entry == NULL && n_kids < 2 && !node->unmerged)
        return FAIL(a, "a node without entry has %u children", n_kids);
    t->n_nodes++;
    t->bytes += kv_tree_node_bytes(node->n_edge);
    if (node->entry != NULL) {
        t->n_entries++;
        t->bytes += kv_tree_entry_bytes(node->entry->n_pages, node->entry->n_logits);
    }
    return 0;
}

/* Parent before children, without recursion: a tree may be as deep as a context is long. */
static const struct kv_node *next_node(const struct kv_node *node)
{
    if (node->kids != NULL)
        return kv_node_first_child(node);
    for (; node->up != NULL; node = node->up) {
        const struct kv_node *sibling = kv_node_child_after(node->up, node->first_id);

        if (sibling != NULL)
            return sibling;
    }
    return NULL;
}

static int check_roots(struct audit *a, struct totals *t)
{
    const struct kv_tree *tree = &a->shard->tree;
    int rc;

    for (uint32_t i = 0; i < tree->n_buckets; i++)
        for (const struct kv_root *root = tree->buckets[i]; root != NULL; root = root->next) {
            t->bytes += kv_tree_root_bytes();
            for (const struct kv_node *n = &root->node; n != NULL; n = next_node(n)) {
                rc = check_node(a, n, t);
                if (rc < 0)
                    return rc;
            }
        }
    return 0;
}

static int check_tree(struct audit *a)
{
    const struct kv_tree *tree = &a->shard->tree;
    struct totals t = {0};
    int rc = check_roots(a, &t);

    if (rc == 0)
        rc = check_equal(a, "n_nodes", tree->n_nodes, t.n_nodes);
    if (rc == 0)
        rc = check_equal(a, "nodes in the index", tree->index.n_nodes, t.n_nodes);
    if (rc == 0)
        rc = check_equal(a, "entries at nodes", tree->n_entries, t.n_entries);
    if (rc == 0)
        rc = check_equal(a, "bookkeeping_bytes", tree->bytes, t.bytes);
    if (rc == 0 && tree->bytes > tree->bound)
        rc = FAIL(a, "bookkeeping_bytes is %zu, its bound %zu", tree->bytes, tree->bound);
    return rc;
}

/* ---- Pages ---- */

static int check_pages(struct audit *a)
{
    const struct kv_slots *slots = &a->cache->slots;

    for (uint32_t i = 0; i < slots->n_pages; i++) {
        const struct kv_page *page = &slots->pages[i];
        const bool live = a->refs[i] > 0, evictable = live && a->refs[i] == a->tree_refs[i];

        if (kv_page_refs(page) != a->refs[i] || kv_page_tree_refs(page) != a->tree_refs[i])
            return FAIL(a, "page %u has %u references, %u of the tree; counted %u and %u", i,
                        kv_page_refs(page), kv_page_tree_refs(page), a->refs[i], a->tree_refs[i]);
        if (slots->arena == NULL && (page->bytes != NULL) != live)
            return FAIL(a, "page %u is %s, but its memory is %s", i, live ? "live" : "free",
                        live ? "not there" : "still there");
        a->groups[a->shards[i]][page->group].n_live += live;
        a->groups[a->shards[i]][page->group].n_evictable += evictable;
    }
    return 0;
}

/* Each free slot once: mark them in refs, where free pages have 0. */
static int check_free_list(struct audit *a)
{
    const struct kv_slots *slots = &a->cache->slots;
    uint32_t id = a->shard->pool.free;

    for (uint32_t i = 0; i < a->shard->pool.n_free; i++) {
        if (id >= slots->n_pages || a->refs[id] != 0)
            return FAIL(a, "slot %u is in the free list twice, or live", id);
        a->refs[id] = UINT32_MAX;
        id = slots->pages[id].next_free;
    }
    return 0;
}

static int check_groups(const struct audit *a)
{
    uint64_t n_reserved = 0, n_evictable = 0;
    int rc;

    for (uint32_t g = 0; g < KV_MAX_GROUPS; g++) {
        const struct kv_group *is = &a->shard->pool.groups[g];
        const struct kv_group *counted = &a->groups[shard_id(a)][g];

        if (is->n_live != counted->n_live || is->n_reserved != counted->n_reserved ||
            is->n_evictable != counted->n_evictable)
            return FAIL(a, "group %u has %u live, %u reserved, %u evictable; counted %u, %u and %u",
                        g, is->n_live, is->n_reserved, is->n_evictable, counted->n_live,
                        counted->n_reserved, counted->n_evictable);
        n_reserved += is->n_reserved;
        n_evictable += is->n_evictable;
    }
    rc = check_equal(a, "n_evictable", a->shard->pool.n_evictable, n_evictable);
    return rc < 0 ? rc : check_equal(a, "n_reserved", a->shard->pool.n_reserved, n_reserved);
}

static int check_pool(struct audit *a)
{
    const struct kv_pool *pool = &a->shard->pool;

    if (pool->n_reserved > pool->n_free)
        return FAIL(a, "n_reserved is %u, n_free %u", pool->n_reserved, pool->n_free);
    return check_groups(a);
}

/* ---- All of it ---- */

/* Shares of a quota are within it together, and each is enough for what its shard has; or there are
 * none, since it was set. */
static int check_quota(const struct audit *a, uint32_t group)
{
    const struct kv_cache *cache = a->cache;
    uint64_t shares = 0;
    bool passed = false;

    if (cache->quota[group] >= cache->slots.n_pages)
        return 0; /* nobody looks at shares */
    for (uint32_t i = 0; i < cache->n_shards; i++) {
        const struct kv_group *g = &cache->shards[i].pool.groups[group];

        shares += g->share;
        passed = passed || g->n_live + g->n_reserved > g->share;
    }
    if (shares > 0 && (shares > cache->quota[group] || passed))
        return FAIL(a, "the quota of group %u is %u, its shares %llu%s", group, cache->quota[group],
                    (unsigned long long)shares, passed ? ", and one is passed" : "");
    return 0;
}

static int check_totals(struct audit *a)
{
    const struct kv_cache *cache = a->cache;
    uint64_t n_slots = 0;
    size_t bound = 0;
    int rc = 0;

    for (uint32_t g = 0; g < KV_MAX_GROUPS && rc == 0; g++)
        rc = check_quota(a, g);
    if (rc < 0)
        return rc;
    for (uint32_t i = 0; i < cache->n_shards; i++) {
        n_slots += cache->shards[i].pool.n_free;
        bound += cache->shards[i].tree.bound;
    }
    for (uint32_t i = 0; i < cache->slots.n_pages; i++)
        n_slots += a->refs[i] > 0;
    if (bound > cache->bookkeeping_bound)
        return FAIL(a, "the shards' bounds of bookkeeping are %zu, the cache's %zu", bound,
                    cache->bookkeeping_bound);
    return check_equal(a, "free and live pages", n_slots, cache->slots.n_pages);
}

static int for_shards(struct audit *a, int (*check)(struct audit *a))
{
    int rc = 0;

    for (uint32_t i = 0; i < a->cache->n_shards && rc == 0; i++) {
        a->shard = &a->cache->shards[i];
        rc = check(a);
    }
    return rc;
}

static int check_all(struct audit *a)
{
    int rc;

    rc = for_shards(a, check_contexts);
    if (rc == 0)
        rc = for_shards(a, check_entries);
    if (rc == 0)
        rc = for_shards(a, check_tree);
    if (rc == 0)
        rc = check_pages(a);
    if (rc == 0)
        rc = check_totals(a);
    if (rc == 0)
        rc = for_shards(a, check_pool);
    return rc < 0 ? rc : for_shards(a, check_free_list);
}

int kv_cache_check(struct kv_cache *cache, struct kv_why *why)
{
    const uint32_t n_pages = cache->slots.n_pages;
    struct audit *a = calloc(1, sizeof(*a));
    int rc = KV_ERR_NOMEM;

    if (a == NULL)
        return kv_fail(why, rc, "no memory to audit %u pages", n_pages);
    a->cache = cache;
    a->why = why;
    a->refs = calloc(n_pages, sizeof(*a->refs));
    a->tree_refs = calloc(n_pages, sizeof(*a->tree_refs));
    a->shards = calloc(n_pages, sizeof(*a->shards));
    a->groups = calloc(cache->n_shards, sizeof(*a->groups));
    if (a->refs == NULL || a->tree_refs == NULL || a->shards == NULL || a->groups == NULL) {
        kv_fail(why, rc, "no memory to audit %u pages", n_pages);
        goto out;
    }
    kv_cache_lock_all(cache);
    rc = check_all(a);
    kv_cache_unlock_all(cache);
out:
    free(a->refs);
    free(a->tree_refs);
    free(a->shards);
    free(a->groups);
    free(a);
    return rc;
}

/* Eviction by bytes.
 *
 * A request for n slots needs, in its group, used + n - quota pages back, and in all, n - free.
 * Both are compared with what is evictable before either takes anything, so a refusal changes
 * nothing.  Victims go oldest first, whole; only the last one is cut from its end, and only as far
 * as needed.  An entry none of whose pages would come back is in use by somebody: it is refreshed
 * instead of removed, or it would be lost for nothing.
 *
 * All of that counts and takes over all shards, under all locks.  Where a shard's own share is
 * enough for a request, no pages have to come back. */
#include "kvcore/kv_cache.h"

#include <assert.h>

enum { ANY = KV_MAX_GROUPS }; /* for a group: all of them */

/* ---- What all shards have ---- */

struct totals {
    uint32_t n_unreserved;
    uint32_t n_evictable;
    struct kv_group group;
};

static struct totals count(const struct kv_cache *cache, uint32_t group)
{
    struct totals t = {0};

    for (uint32_t i = 0; i < cache->n_shards; i++) {
        const struct kv_pool *pool = &cache->shards[i].pool;

        t.n_unreserved += kv_pool_unreserved(pool);
        t.n_evictable += pool->n_evictable;
        t.group.n_live += pool->groups[group].n_live;
        t.group.n_reserved += pool->groups[group].n_reserved;
        t.group.n_evictable += pool->groups[group].n_evictable;
    }
    return t;
}

/* How many pages must come back in the group, and in all, before it can reserve n. */
static uint32_t over_quota(const struct kv_cache *cache, uint32_t group, uint32_t n)
{
    const struct totals t = count(cache, group);
    const uint64_t used = (uint64_t)t.group.n_live + t.group.n_reserved + n;

    return used > cache->quota[group] ? (uint32_t)(used - cache->quota[group]) : 0;
}

static uint32_t short_of(const struct kv_cache *cache, uint32_t n)
{
    const uint32_t have = count(cache, 0).n_unreserved;

    return n > have ? n - have : 0;
}

static size_t all_bytes(const struct kv_cache *cache)
{
    size_t bytes = 0;

    for (uint32_t i = 0; i < cache->n_shards; i++)
        bytes += cache->shards[i].tree.bytes;
    return bytes;
}

/* The entry that was used least recently, of a group or of all.  NULL: there is none. */
static struct kv_entry *oldest(const struct kv_cache *cache, uint32_t group)
{
    struct kv_entry *best = NULL;

    for (uint32_t i = 0; i < cache->n_shards; i++) {
        const struct kv_tree *tree = &cache->shards[i].tree;
        struct kv_entry *entry =
            group == ANY ? TAILQ_FIRST(&tree->by_use) : TAILQ_FIRST(&tree->in_group[group]);

        if (entry != NULL && (best == NULL || entry->serial < best->serial))
            best = entry;
    }
    return best;
}

/* ---- Pages ---- */

static bool gives_pages(const struct kv_entry *entry)
{
    for (uint32_t i = entry->n_pages; i-- > 0;)
        if (kv_page_evictable(entry->pages[i]))
            return true;
    return false;
}

/* How many pages off the end of an entry bring back n, or 0 if all of them do not. */
static uint32_t cut_for(const struct kv_entry *entry, uint32_t n)
{
    uint32_t cut = 0, got = 0;

    while (cut < entry->n_pages && got < n)
        got += kv_page_refs(entry->pages[entry->n_pages - ++cut]) == 1;
    return got < n ? 0 : cut;
}

/* Bring back at least n pages from entries of the group; that many are evictable there. */
static void evict(struct kv_cache *cache, uint32_t group, uint32_t n)
{
    while (n > 0) {
        struct kv_entry *victim = oldest(cache, group);
        struct kv_tree *tree;
        uint32_t cut, freed;

        assert(victim != NULL);
        tree = victim->root->tree;
        if (!gives_pages(victim)) {
            kv_tree_refresh(tree, victim);
            continue;
        }
        cut = cut_for(victim, n);
        freed = cut > 0 ? kv_tree_cut(tree, victim, cut) : kv_tree_remove(tree, victim);
        n -= freed < n ? freed : n;
    }
}

bool kv_evict_feasible(const struct kv_cache *cache, uint32_t group, uint32_t n)
{
    const struct totals t = count(cache, group);

    return n == 0 || (over_quota(cache, group, n) <= t.group.n_evictable &&
                      short_of(cache, n) <= t.n_evictable);
}

static uint32_t used(const struct kv_group *g)
{
    return g->n_live + g->n_reserved;
}

/* Is there no quota, or is the shard's share of it enough for n more? */
static bool quota_has(const struct kv_shard *shard, uint32_t group, uint32_t n)
{
    const struct kv_cache *cache = shard->cache;
    const struct kv_group *g = &shard->pool.groups[group];

    return cache->quota[group] >= cache->slots.n_pages || (uint64_t)used(g) + n <= g->share;
}

/* Each shard may go on to use what it uses and an even part of the rest; the one that has asked
 * gets what does not divide evenly.  The quota holds now. */
static void share_quota(struct kv_shard *shard, uint32_t group)
{
    struct kv_cache *cache = shard->cache;
    uint32_t left = cache->quota[group];

    if (left >= cache->slots.n_pages)
        return;
    for (uint32_t i = 0; i < cache->n_shards; i++)
        left -= used(&cache->shards[i].pool.groups[group]);
    for (uint32_t i = 0; i < cache->n_shards; i++) {
        struct kv_group *g = &cache->shards[i].pool.groups[group];

        g->share = used(g) + left / cache->n_shards;
    }
    shard->pool.groups[group].share += left % cache->n_shards;
}

int kv_evict_reserve(struct kv_shard *shard, uint32_t group, uint32_t n, bool all)
{
    struct kv_cache *cache = shard->cache;

    if (n == 0)
        return 0;
    if (!all && (n > kv_pool_unreserved(&shard->pool) || !quota_has(shard, group, n)))
        return KV_AGAIN;
    if (all) {
        if (!kv_evict_feasible(cache, group, n))
            return KV_ERR_FULL;
        evict(cache, group, over_quota(cache, group, n));
        evict(cache, ANY, short_of(cache, n));
        assert(over_quota(cache, group, n) == 0);
        kv_shard_bring_slots(shard, n);
    }
    kv_pool_reserve(&shard->pool, group, n);
    if (all)
        share_quota(shard, group);
    return 0;
}

uint32_t kv_cache_trim(struct kv_cache *cache, uint32_t n_pages)
{
    uint32_t n;

    kv_cache_lock_all(cache);
    n = count(cache, 0).n_evictable;
    n = n_pages < n ? n_pages : n;
    evict(cache, ANY, n);
    kv_cache_unlock_all(cache);
    return n;
}

/* ---- Bookkeeping ---- */

int kv_evict_bytes(struct kv_shard *shard, size_t n, size_t least, bool all)
{
    struct kv_cache *cache = shard->cache;

    if (shard->tree.bytes + n <= shard->tree.bound)
        return 0;
    if (!all)
        return KV_AGAIN;
    if (all_bytes(cache) + n > cache->bookkeeping_bound) {
        if (least + n > cache->bookkeeping_bound)
            return KV_ERR_FULL;
        while (all_bytes(cache) + n > cache->bookkeeping_bound) {
            struct kv_entry *entry = oldest(cache, ANY);

            kv_tree_remove(entry->root->tree, entry);
        }
    }
    kv_shard_bring_bytes(shard, n);
    return 0;
}

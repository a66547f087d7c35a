/* Eviction by bytes.
 *
 * A request for n slots needs, in its group, used + n - quota pages back, and in all, n - free.
 * Both are compared with what is evictable before either takes anything, so a refusal changes
 * nothing.  Victims go oldest first, whole; only the last one is cut from its end, and only as far
 * as needed.  An entry none of whose pages would come back is in use by somebody: it is refreshed
 * instead of removed, or it would be lost for nothing. */
#include "kvcore/kv_cache.h"

#include <assert.h>

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

/* Bring back at least n pages from entries of the list; that many are evictable there. */
static void evict(struct kv_cache *cache, struct kv_entry_list *list, uint32_t n)
{
    struct kv_tree *tree = &cache->tree;

    while (n > 0) {
        struct kv_entry *victim = TAILQ_FIRST(list);
        uint32_t cut, freed;

        assert(victim != NULL);
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
    const struct kv_pool *pool = &cache->pool;

    return n == 0 || (kv_pool_over_quota(pool, group, n) <= pool->groups[group].n_evictable &&
                      kv_pool_short(pool, n) <= pool->n_evictable);
}

int kv_evict_reserve(struct kv_cache *cache, uint32_t group, uint32_t n)
{
    struct kv_pool *pool = &cache->pool;

    if (n == 0)
        return 0;
    if (!kv_evict_feasible(cache, group, n))
        return KV_ERR_FULL;
    evict(cache, &cache->tree.in_group[group], kv_pool_over_quota(pool, group, n));
    evict(cache, &cache->tree.by_use, kv_pool_short(pool, n));
    assert(kv_pool_over_quota(pool, group, n) == 0);
    kv_pool_reserve(pool, group, n);
    return 0;
}

uint32_t kv_cache_trim(struct kv_cache *cache, uint32_t n_pages)
{
    uint32_t n;

    kv_cache_lock(cache);
    n = n_pages < cache->pool.n_evictable ? n_pages : cache->pool.n_evictable;
    evict(cache, &cache->tree.by_use, n);
    kv_cache_unlock(cache);
    return n;
}

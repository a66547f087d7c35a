/* The cache: opening, closing and counting.  Its parts are kv_pool.c, kv_tree.c and kv_evict.c. */
#include "kvcore/kv_cache.h"

#include <assert.h>
#include <stdlib.h>

static size_t default_bookkeeping(const struct kv_cache *cache)
{
    const size_t share = cache->pool.page_bytes * cache->pool.n_pages / 16;

    return share > 1024 * 1024 ? share : 1024 * 1024;
}

static int open_parts(struct kv_cache *cache, const struct kv_cache_config *config,
                      struct kv_why *why)
{
    const uint32_t page_tokens =
        config->page_tokens != 0 ? config->page_tokens : KV_PAGE_TOKENS_DEFAULT;
    size_t bound = config->bookkeeping_bytes;
    int rc;

    rc = kv_layout_init(&cache->layout, &config->geometry, page_tokens, why);
    if (rc < 0)
        return rc;
    rc = kv_pool_open(&cache->pool, cache->layout.page_bytes, config->n_pages, config->arena, why);
    if (rc < 0)
        return rc;
    if (bound == 0)
        bound = default_bookkeeping(cache);
    if (kv_tree_open(&cache->tree, &cache->pool, &cache->layout, bound) < 0) {
        kv_pool_release(&cache->pool);
        return kv_fail(why, KV_ERR_NOMEM, "no memory for the prefix tree's index");
    }
    return 0;
}

int kv_cache_open(const struct kv_cache_config *config, struct kv_cache **out, struct kv_why *why)
{
    struct kv_cache *cache = calloc(1, sizeof(*cache));
    int rc;

    if (cache == NULL)
        return kv_fail(why, KV_ERR_NOMEM, "no memory for a cache's head of %zu bytes",
                       sizeof(*cache));
    rc = open_parts(cache, config, why);
    if (rc < 0) {
        free(cache);
        return rc;
    }
    pthread_mutex_init(&cache->lock, NULL);
    LIST_INIT(&cache->contexts);
    *out = cache;
    return 0;
}

/* Contexts point into the cache, so they must be gone; entries are the cache's own and go here. */
void kv_cache_close(struct kv_cache *cache)
{
    if (cache == NULL)
        return;
    assert(LIST_EMPTY(&cache->contexts));
    kv_tree_release(&cache->tree);
    kv_pool_release(&cache->pool);
    pthread_mutex_destroy(&cache->lock);
    free(cache);
}

const struct kv_layout *kv_cache_layout(const struct kv_cache *cache)
{
    return &cache->layout;
}

int kv_cache_set_quota(struct kv_cache *cache, uint32_t group, uint32_t n_pages)
{
    if (group >= KV_MAX_GROUPS)
        return KV_ERR_INVALID;
    kv_cache_lock(cache);
    cache->pool.groups[group].quota = n_pages;
    kv_cache_unlock(cache);
    return 0;
}

void kv_cache_stats(struct kv_cache *cache, struct kv_stats *out)
{
    const struct kv_pool *pool = &cache->pool;
    const struct kv_tree *tree = &cache->tree;

    kv_cache_lock(cache);
    *out = (struct kv_stats){
        .n_pages = pool->n_pages,
        .n_free = pool->n_free,
        .n_reserved = pool->n_reserved,
        .n_live = pool->n_pages - pool->n_free,
        .n_evictable = pool->n_evictable,
        .n_entries = tree->n_entries,
        .n_nodes = tree->n_nodes,
        .n_contexts = cache->n_contexts,
        .bookkeeping_bytes = tree->bytes,
        .n_clones = cache->n_clones,
        .n_evicted = tree->n_evicted,
        .n_hits = cache->n_hits,
        .n_misses = cache->n_misses,
    };
    kv_cache_unlock(cache);
}

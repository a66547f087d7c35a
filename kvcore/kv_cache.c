/* The cache: opening, closing and counting.  Its parts are kv_shard.c, kv_pool.c,
 * kv_tree.c and kv_evict.c. */
#include "kvcore/kv_cache.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static size_t default_bookkeeping(const struct kv_cache *cache)
{
    const size_t share = cache->slots.page_bytes * cache->slots.n_pages / 16;

    return share > 1024 * 1024 ? share : 1024 * 1024;
}

/* A few pages are not worth sharing out. */
static uint32_t default_shards(uint32_t n_pages)
{
    return n_pages < 64 * KV_MAX_SHARDS ? 1 : KV_MAX_SHARDS;
}

static int check_shards(uint32_t n, struct kv_why *why)
{
    if (n == 0 || n > KV_MAX_SHARDS || (n & (n - 1)) != 0)
        return kv_fail(why, KV_ERR_INVALID, "n_shards is %u: a power of two up to %u", n,
                       (unsigned)KV_MAX_SHARDS);
    return 0;
}

static void close_shards(struct kv_cache *cache, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        struct kv_shard *shard = &cache->shards[i];

        assert(LIST_EMPTY(&shard->contexts));
        kv_tree_release(&shard->tree);
        pthread_mutex_destroy(&shard->lock);
    }
    free(cache->shards);
}

/* Even shares; what does not divide evenly goes to the first shard. */
static int open_shard(struct kv_cache *cache, uint32_t i)
{
    struct kv_shard *shard = &cache->shards[i];
    const uint32_t n = cache->slots.n_pages / cache->n_shards,
                   odd = cache->slots.n_pages % cache->n_shards;
    const size_t share = cache->bookkeeping_bound / cache->n_shards;

    shard->cache = cache;
    LIST_INIT(&shard->contexts);
    kv_pool_init(&shard->pool, &cache->slots, i == 0 ? 0 : i * n + odd, i == 0 ? n + odd : n);
    if (kv_tree_open(shard, i == 0 ? share + cache->bookkeeping_bound % cache->n_shards : share,
                     share) < 0)
        return KV_ERR_NOMEM;
    pthread_mutex_init(&shard->lock, NULL);
    return 0;
}

static int open_shards(struct kv_cache *cache)
{
    const size_t bytes = cache->n_shards * sizeof(*cache->shards);

    cache->shards = aligned_alloc(KV_SHARD_ALIGN, bytes);
    if (cache->shards == NULL)
        return KV_ERR_NOMEM;
    memset(cache->shards, 0, bytes);
    for (uint32_t i = 0; i < cache->n_shards; i++)
        if (open_shard(cache, i) < 0) {
            close_shards(cache, i);
            return KV_ERR_NOMEM;
        }
    return 0;
}

static int open_parts(struct kv_cache *cache, const struct kv_cache_config *config,
                      struct kv_why *why)
{
    const uint32_t page_tokens =
        config->page_tokens != 0 ? config->page_tokens : KV_PAGE_TOKENS_DEFAULT;
    int rc;

    cache->n_shards = config->n_shards != 0 ? config->n_shards : default_shards(config->n_pages);
    rc = check_shards(cache->n_shards, why);
    if (rc == 0)
        rc = kv_layout_init(&cache->layout, &config->geometry, page_tokens, why);
    if (rc == 0)
        rc = kv_slots_open(&cache->slots, cache->layout.page_bytes, config->n_pages, config->arena,
                           why);
    if (rc < 0)
        return rc;
    cache->bookkeeping_bound =
        config->bookkeeping_bytes != 0 ? config->bookkeeping_bytes : default_bookkeeping(cache);
    if (open_shards(cache) < 0) {
        kv_slots_release(&cache->slots);
        return kv_fail(why, KV_ERR_NOMEM, "no memory for the prefix tree's index");
    }
    return 0;
}

int kv_cache_open(const struct kv_cache_config *config, struct kv_cache **out, struct kv_why *why)
{
    struct kv_cache *cache = aligned_alloc(alignof(struct kv_cache), sizeof(*cache));
    int rc;

    if (cache == NULL)
        return kv_fail(why, KV_ERR_NOMEM, "no memory for a cache's head of %zu bytes",
                       sizeof(*cache));
    memset(cache, 0, sizeof(*cache));
    kv_clock_open(&cache->clock);
    rc = open_parts(cache, config, why);
    if (rc < 0) {
        free(cache);
        return rc;
    }
    for (uint32_t i = 0; i < KV_MAX_GROUPS; i++)
        cache->quota[i] = cache->slots.n_pages;
    *out = cache;
    return 0;
}

/* Contexts point into the cache, so they must be gone; entries are the cache's own and go here. */
void kv_cache_close(struct kv_cache *cache)
{
    if (cache == NULL)
        return;
    close_shards(cache, cache->n_shards);
    kv_slots_release(&cache->slots);
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
    kv_cache_lock_all(cache);
    cache->quota[group] = n_pages;
    for (uint32_t i = 0; i < cache->n_shards; i++)
        cache->shards[i].pool.groups[group].share = 0;
    kv_cache_unlock_all(cache);
    return 0;
}

static void add_shard(struct kv_stats *s, const struct kv_shard *shard)
{
    s->n_free += shard->pool.n_free;
    s->n_reserved += shard->pool.n_reserved;
    s->n_evictable += shard->pool.n_evictable;
    s->n_entries += shard->tree.n_entries;
    s->n_nodes += shard->tree.n_nodes;
    s->n_contexts += shard->n_contexts;
    s->bookkeeping_bytes += shard->tree.bytes;
    s->n_clones += shard->n_clones;
    s->n_evicted += shard->tree.n_evicted;
    s->n_hits += shard->n_hits;
    s->n_misses += shard->n_misses;
}

void kv_cache_stats(struct kv_cache *cache, struct kv_stats *out)
{
    struct kv_stats s = {.n_pages = cache->slots.n_pages};

    kv_cache_lock_all(cache);
    for (uint32_t i = 0; i < cache->n_shards; i++)
        add_shard(&s, &cache->shards[i]);
    kv_cache_unlock_all(cache);
    s.n_live = s.n_pages - s.n_free;
    *out = s;
}

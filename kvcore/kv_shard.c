#include "kvcore/kv_cache.h"

#include <assert.h>
#include <string.h>

struct kv_shard *kv_shard_of(const struct kv_cache *cache, const struct kv_namespace *ns,
                             uint32_t first_id)
{
    uint32_t h;

    memcpy(&h, ns->digest.bytes, sizeof(h)); /* a digest is as good a hash as any */
    h = (h ^ ns->group ^ first_id) * 0x9e3779b1u;
    return &cache->shards[h >> 16 & (cache->n_shards - 1)];
}

/* Let the other hardware thread of the core run, and the line of the lock rest. */
static void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

/* Sections are short, so a thread that waits looks again, ever more seldom, and sleeps only after
 * some hundred microseconds.  Meanwhile the one that has the lock may have it several times over,
 * with all that it guards in its cache: two threads in one shard then do nearly as much as one,
 * where a lock that goes from one to the other each time makes it half. */
void kv_shard_wait(struct kv_shard *shard)
{
    enum { FIRST = 512, LAST = 4096 };

    for (unsigned n = FIRST; n <= LAST; n *= 2) {
        for (unsigned i = 0; i < n; i++)
            relax();
        if (pthread_mutex_trylock(&shard->lock) == 0)
            return;
    }
    pthread_mutex_lock(&shard->lock);
}

void kv_cache_lock_all(struct kv_cache *cache)
{
    for (uint32_t i = 0; i < cache->n_shards; i++)
        kv_shard_lock(&cache->shards[i]);
}

void kv_cache_unlock_all(struct kv_cache *cache)
{
    for (uint32_t i = 0; i < cache->n_shards; i++)
        kv_shard_unlock(&cache->shards[i]);
}

int kv_shard_run(struct kv_shard *shard, int (*fn)(void *arg, bool all), void *arg)
{
    int rc;

    kv_shard_lock(shard);
    rc = fn(arg, false);
    kv_shard_unlock(shard);
    if (rc != KV_AGAIN)
        return rc;
    kv_cache_lock_all(shard->cache);
    rc = fn(arg, true);
    kv_cache_unlock_all(shard->cache);
    assert(rc != KV_AGAIN);
    return rc;
}

/* More than this at once would make one call long, however many slots there are. */
enum { MOST_SLOTS = 1024 };

/* Take what other shards have unreserved above `leave`, until this one has `want`. */
static void bring_above(struct kv_shard *shard, uint32_t want, uint32_t leave)
{
    struct kv_cache *cache = shard->cache;

    for (uint32_t i = 0; i < cache->n_shards; i++) {
        struct kv_pool *from = &cache->shards[i].pool;
        const uint32_t have = kv_pool_unreserved(&shard->pool);
        uint32_t n = kv_pool_unreserved(from);

        if (have >= want)
            break;
        if (from == &shard->pool || n <= leave)
            continue;
        n -= leave;
        kv_pool_move(from, &shard->pool, n < want - have ? n : want - have);
    }
}

void kv_shard_bring_slots(struct kv_shard *shard, uint32_t n)
{
    const struct kv_cache *cache = shard->cache;
    uint32_t total = 0, even;

    for (uint32_t i = 0; i < cache->n_shards; i++)
        total += kv_pool_unreserved(&cache->shards[i].pool);
    assert(n <= total);
    if (n <= kv_pool_unreserved(&shard->pool))
        return;
    even = (total - n) / cache->n_shards;
    bring_above(shard, n + (even < MOST_SLOTS ? even : MOST_SLOTS), even);
    bring_above(shard, n, 0);
}

void kv_shard_bring_bytes(struct kv_shard *shard, size_t n)
{
    struct kv_cache *cache = shard->cache;
    size_t left = cache->bookkeeping_bound - n;

    for (uint32_t i = 0; i < cache->n_shards; i++)
        left -= cache->shards[i].tree.bytes;
    for (uint32_t i = 0; i < cache->n_shards; i++) {
        struct kv_tree *tree = &cache->shards[i].tree;

        tree->bound = tree->bytes + left / cache->n_shards;
    }
    shard->tree.bound += n + left % cache->n_shards;
}

/* The cache and its contexts, as the files of kvcore see them.
 *
 * One lock guards the tree, the accounting and every context's page list.  Page contents are
 * touched outside it: rows by whoever has an append open, clones and zeroing in
 * kv_context_begin(), reads by whoever holds a context.  What makes that safe is said at struct
 * kv_page.
 *
 * Functions here that are not in kvcore.h want the lock held, unless they say otherwise. */
#ifndef KV_CACHE_H
#define KV_CACHE_H

#include "kvcore/kv_pool.h"
#include "kvcore/kv_tree.h"
#include "kvcore/kvcore.h"

#include <pthread.h>
#include <sys/queue.h>

struct kv_cache {
    struct kv_layout layout; /* read-only once open */

    pthread_mutex_t lock;
    /* Guarded by lock. */
    struct kv_pool pool;
    struct kv_tree tree;
    LIST_HEAD(, kv_context) contexts;
    uint32_t n_contexts;
    uint64_t n_clones;
    uint64_t n_hits;
    uint64_t n_misses;
};

/* States: live, with `open` 0 between appends and the appended count within one; frozen, for good.
 *
 * Live pages number ceil((n + open) / P).  A reservation is `held` slots of the pool that keep the
 * promise that the context can grow to `bound` positions: held >= kv_context_need(ctx, bound). */
struct kv_context {
    struct kv_cache *cache;
    struct kv_namespace ns;
    struct kv_page **pages; /* [n_pages], room for cap */
    uint32_t n_pages;
    uint32_t cap;
    uint32_t n;
    uint32_t held;
    uint32_t bound;
    struct kv_mark mark; /* where it was published last */
    uint32_t taint;      /* the first position whose rows were overwritten; UINT32_MAX: none */
    uint32_t refs;       /* above 1 only when frozen */
    /* Atomic, so that a call from a thread that is not the owner is refused and not a race. */
    _Atomic uint32_t open;
    atomic_bool frozen;
    LIST_ENTRY(kv_context) link; /* of the cache's contexts */
};

static inline void kv_cache_lock(struct kv_cache *cache)
{
    pthread_mutex_lock(&cache->lock);
}

static inline void kv_cache_unlock(struct kv_cache *cache)
{
    pthread_mutex_unlock(&cache->lock);
}

static inline uint32_t kv_pages_for(const struct kv_cache *cache, uint32_t n_positions)
{
    return n_positions / cache->layout.page_tokens + (n_positions % cache->layout.page_tokens != 0);
}

/* The ids that stand in a page. */
static inline uint32_t *kv_page_ids(const struct kv_layout *layout, const struct kv_page *page)
{
    return (uint32_t *)(void *)(page->bytes + layout->ids_offset);
}

/* Memory for a context with room for cap pages, in no list and counted nowhere.  NULL: no memory.
 * Does not need the lock; kv_context_free() neither. */
struct kv_context *kv_context_alloc(struct kv_cache *cache, const struct kv_namespace *ns,
                                    uint32_t cap);
void kv_context_free(struct kv_context *ctx);
void kv_context_link(struct kv_context *ctx);
void kv_context_unlink(struct kv_context *ctx);

/* Hold pages[0..k) for n positions; ctx is empty and has the room. */
void kv_context_pin(struct kv_context *ctx, struct kv_page *const *pages, uint32_t n);
/* Let go of the pages from the k-th on. */
void kv_context_drop(struct kv_context *ctx, uint32_t k);

/* Positions from the front whose rows are what their ids give: all, or those before the taint. */
uint32_t kv_context_settled(const struct kv_context *ctx);

/* Slots that growing to `to` positions takes in all, as things are now. */
uint32_t kv_context_need(const struct kv_context *ctx, uint32_t to);
/* Hold what is still missing for `to`, evicting for it.  KV_ERR_FULL: nothing changed. */
int kv_context_hold(struct kv_context *ctx, uint32_t to);
void kv_context_unhold(struct kv_context *ctx);

/* Can n more slots be had for the group, by eviction if need be? */
bool kv_evict_feasible(const struct kv_cache *cache, uint32_t group, uint32_t n);
/* Reserve n slots for the group, evicting what is missing, oldest first: in the group until its
 * quota holds, then anywhere until enough is free.  KV_ERR_FULL: nothing changed. */
int kv_evict_reserve(struct kv_cache *cache, uint32_t group, uint32_t n);
/* The key that the first n positions of ctx are. */
struct kv_key kv_context_key(const struct kv_context *ctx, uint32_t n);

#endif

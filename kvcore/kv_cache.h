/* The cache, its shards and contexts, as the files of kvcore see them.
 *
 * All that can share a page is in one *shard*: pages are shared by forks and matches, so by
 * contexts and entries of one namespace whose first id is the same.  A shard has a tree, a pool of
 * slots and a list of contexts, and one lock that guards them; nothing that a match touches belongs
 * to two shards.  An empty context is in any; it moves when its first id is known.
 *
 * What is one for the cache is shared out among the shards: free slots, quotas and the bound of
 * bookkeeping.  A call takes its shard's lock and makes do with the shard's share.  Where that is
 * not enough, it changes nothing (KV_AGAIN) and begins anew under all locks: then it sees all
 * shares, evicts by age over all shards, and brings home what it needs and some for the next.  So a
 * call with one lock says yes only to what all locks would say yes to, and no is said under all.
 *
 * Locks are taken in the order of the shards.  All of them are also the gate of the audit: no
 * critical section leaves anything half done.  What a call has in hand between two of them is
 * written down in its context: the positions of an append that has its pages (n_open), and a page
 * that is held besides those of the list (aside).
 *
 * Page contents are touched outside the locks: rows by whoever has an append open, clones and
 * zeroing in kv_context_begin(), reads by whoever holds a context.  What makes that safe is said at
 * struct kv_page.
 *
 * Functions here that are not in kvcore.h want the lock of the shard held, unless they say
 * otherwise; `all` says that all are. */
#ifndef KV_CACHE_H
#define KV_CACHE_H

#include "kvcore/kv_clock.h"
#include "kvcore/kv_pool.h"
#include "kvcore/kv_tree.h"
#include "kvcore/kvcore.h"

#include <pthread.h>
#include <stdalign.h>
#include <sys/queue.h>

enum {
    KV_AGAIN = 1,         /* what a locked function returns that needs all locks */
    KV_SHARD_ALIGN = 128, /* two lines: they are fetched in pairs */
};

struct kv_shard {
    alignas(KV_SHARD_ALIGN) pthread_mutex_t lock;
    struct kv_cache *cache;
    /* Guarded by lock. */
    struct kv_pool pool;
    struct kv_tree tree;
    LIST_HEAD(, kv_context) contexts;
    uint32_t n_contexts;
    uint64_t n_clones;
    uint64_t n_hits;
    uint64_t n_misses;
};

struct kv_cache {
    /* Read-only once open. */
    struct kv_layout layout;
    struct kv_slots slots;
    size_t bookkeeping_bound; /* of all trees */
    uint32_t n_shards;        /* a power of two */
    struct kv_shard *shards;

    /* Changed under all locks, read under any. */
    uint32_t quota[KV_MAX_GROUPS];

    struct kv_clock clock; /* of atomics */
};

/* States: live, with n_open 0 between appends and the appended count within one; frozen, for good.
 *
 * Pages number ceil((n + n_open) / P).  A reservation is `held` slots of the pool that keep the
 * promise that the context can grow to `bound` positions: held >= kv_context_need(ctx, bound). */
struct kv_context {
    struct kv_cache *cache;
    struct kv_shard *shard; /* changes only while the context is empty */
    struct kv_namespace ns;
    struct kv_page **pages; /* [n_pages], room for cap */
    struct kv_page *aside;  /* held besides, while a page is cloned; or NULL */
    uint32_t n_pages;
    uint32_t cap;
    uint32_t n;
    uint32_t n_open;
    uint32_t held;
    uint32_t bound;
    struct kv_mark mark; /* where it was published last */
    uint32_t taint;      /* the first position whose rows were overwritten; UINT32_MAX: none */
    uint32_t refs;       /* above 1 only when frozen */
    /* Who has it: positions of the append from the call of begin to its end, else 0.  Atomic, so
     * that a call from a thread that is not the owner is refused and not a race. */
    _Atomic uint32_t open;
    atomic_bool frozen;
    LIST_ENTRY(kv_context) link; /* of the shard's contexts */
};

/* Where keys of the namespace are that begin with that id.  Needs no lock. */
struct kv_shard *kv_shard_of(const struct kv_cache *cache, const struct kv_namespace *ns,
                             uint32_t first_id);

/* Wait for a lock that another thread has. */
void kv_shard_wait(struct kv_shard *shard);

static inline void kv_shard_lock(struct kv_shard *shard)
{
    if (pthread_mutex_trylock(&shard->lock) != 0)
        kv_shard_wait(shard);
}

static inline void kv_shard_unlock(struct kv_shard *shard)
{
    pthread_mutex_unlock(&shard->lock);
}

void kv_cache_lock_all(struct kv_cache *cache);
void kv_cache_unlock_all(struct kv_cache *cache);

/* Run fn(arg, false) under the shard's lock, and where it returns KV_AGAIN fn(arg, true) under all.
 * Wants no lock held. */
int kv_shard_run(struct kv_shard *shard, int (*fn)(void *arg, bool all), void *arg);

/* Bring free slots home until n are unreserved, and more, up to an even share.  There are n in all.
 * Wants all locks. */
void kv_shard_bring_slots(struct kv_shard *shard, uint32_t n);
/* Share the bound of bookkeeping out anew, so that the shard's tree can grow by n bytes.  There are
 * n bytes free.  Wants all locks. */
void kv_shard_bring_bytes(struct kv_shard *shard, size_t n);

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
struct kv_context *kv_context_alloc(struct kv_shard *shard, const struct kv_namespace *ns,
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

/* For restores, into a context that nobody else sees yet: append n positions whose rows are at
 * hand, as begin, scatter and commit would, but without zeroing new pages first, and past the CPU's
 * caches.  Then, or after an error, only these two and close may follow, until the second has
 * zeroed what is left of the last page.  Errors as those of the three; nothing is appended then.
 * Both do not need the lock. */
int kv_context_load(struct kv_context *ctx, const uint32_t *ids, uint32_t n,
                    const struct iovec *rows, size_t n_rows);
void kv_context_loaded(struct kv_context *ctx);
/* kv_rows.c: write rows into an open append that has whole groups to itself, past the caches. */
int kv_context_stream(struct kv_context *ctx, uint32_t first, uint32_t n, const struct iovec *src,
                      size_t n_src);

/* Slots that growing to `to` positions takes in all, as things are now. */
uint32_t kv_context_need(const struct kv_context *ctx, uint32_t to);
/* Hold what is still missing for `to`, evicting for it.  KV_ERR_FULL, KV_AGAIN: nothing changed. */
int kv_context_hold(struct kv_context *ctx, uint32_t to, bool all);
void kv_context_unhold(struct kv_context *ctx);

/* The key that the first n positions of ctx are. */
struct kv_key kv_context_key(const struct kv_context *ctx, uint32_t n);

/* Can n more slots be had for the group, by eviction if need be?  Wants all locks. */
bool kv_evict_feasible(const struct kv_cache *cache, uint32_t group, uint32_t n);
/* Reserve n slots of the shard for the group, evicting what is missing, oldest first: in the group
 * until its quota holds, then anywhere until enough is free.  KV_ERR_FULL, KV_AGAIN: nothing
 * changed. */
int kv_evict_reserve(struct kv_shard *shard, uint32_t group, uint32_t n, bool all);
/* Let the shard's tree grow by n bytes, removing entries whole, oldest first, until they fit.
 * `least` is the cost of the youngest entry where that one must stay: it fits beside them, so all
 * others go before it would be reached.  0, KV_ERR_FULL where it does not fit, or KV_AGAIN; then
 * nothing changed. */
int kv_evict_bytes(struct kv_shard *shard, size_t n, size_t least, bool all);

#endif

/* The budget: a fixed number of slots, each free or a live page, some of the free ones reserved.
 *
 * free (reserved ones included) + live = n_pages, always; a slot is reserved by number, not by
 * name, so whoever holds a reservation takes any free slot.  Each group (tenant) has the same
 * counters and a quota on live + reserved.
 *
 * Bytes come from one arena that is allocated and touched at open, or page by page from the heap
 * when a slot is taken.  Both hand out the slots in the same order and neither zeroes: who takes a
 * slot writes or zeroes all of it (kv_context.c), outside the lock.
 *
 * Every function but open and release wants the cache's lock held. */
#ifndef KV_POOL_H
#define KV_POOL_H

#include "kvcore/kv_page.h"
#include "kvcore/kvcore.h"

struct kv_group {
    uint32_t n_live;
    uint32_t n_reserved;
    uint32_t n_evictable;
    uint32_t quota;
};

struct kv_pool {
    struct kv_page *pages; /* [n_pages] */
    uint32_t *free;        /* [n_free] page indexes, the next to be taken last */
    uint32_t n_pages;
    uint32_t n_free;
    uint32_t n_reserved;
    uint32_t n_evictable;
    size_t page_bytes;
    unsigned char *arena; /* [n_pages][page_bytes], or NULL: pages come from the heap */
    size_t arena_bytes;   /* as mapped */
    struct kv_group groups[KV_MAX_GROUPS];
};

int kv_pool_open(struct kv_pool *pool, size_t page_bytes, uint32_t n_pages, bool arena,
                 struct kv_why *why);
void kv_pool_release(struct kv_pool *pool);

/* Turn one reserved slot of the group into a live page with one reference.  Its bytes are whatever
 * they were.  NULL: the heap has no memory, and nothing changed. */
struct kv_page *kv_pool_take(struct kv_pool *pool, uint32_t group);

/* Add to both counts (either may be negative); at zero references the slot is free again. */
void kv_pool_count(struct kv_pool *pool, struct kv_page *page, int refs, int tree_refs);

/* Free slots that nobody has reserved. */
static inline uint32_t kv_pool_unreserved(const struct kv_pool *pool)
{
    return pool->n_free - pool->n_reserved;
}

/* How many slots must be evicted in the group, and after that in all, before it can reserve n. */
uint32_t kv_pool_over_quota(const struct kv_pool *pool, uint32_t group, uint32_t n);
uint32_t kv_pool_short(const struct kv_pool *pool, uint32_t n);

/* n <= kv_pool_unreserved().  Whether the quota has room is for the caller to see: slots that go
 * back into a reservation were counted before, also where the quota has since been lowered. */
void kv_pool_reserve(struct kv_pool *pool, uint32_t group, uint32_t n);
void kv_pool_unreserve(struct kv_pool *pool, uint32_t group, uint32_t n);

#endif

/* The budget: a fixed number of slots, each free or a live page, some of the free ones reserved.
 *
 * The slots of a cache (kv_slots) are shared out among its shards; a pool is one shard's part. Over
 * all pools, free (reserved ones included) + live = n_pages, always; a slot is reserved by number,
 * not by name, so whoever holds a reservation takes any free slot of his pool.  Each group (tenant)
 * has the same counters in each pool, and a quota on live + reserved over all of them.
 *
 * Bytes come from one arena that is allocated and touched at open, or page by page from the heap
 * when a slot is taken.  Neither zeroes: who takes a slot writes or zeroes all of it
 * (kv_context.c), outside the lock.
 *
 * Functions on a pool want its shard's lock held. */
#ifndef KV_POOL_H
#define KV_POOL_H

#include "kvcore/kv_page.h"
#include "kvcore/kvcore.h"

/* Read-only once open. */
struct kv_slots {
    struct kv_page *pages; /* [n_pages] */
    uint32_t n_pages;
    size_t page_bytes;
    unsigned char *arena; /* [n_pages][page_bytes], or NULL: pages come from the heap */
    size_t arena_bytes;   /* as mapped */
};

struct kv_group {
    uint32_t n_live;
    uint32_t n_reserved;
    uint32_t n_evictable;
    uint32_t share; /* of the quota, where there is one: live + reserved may grow to it */
};

struct kv_pool {
    const struct kv_slots *slots;
    uint32_t free; /* index of the slot to be taken next; the others by next_free */
    uint32_t n_free;
    uint32_t n_reserved;
    uint32_t n_evictable;
    struct kv_group groups[KV_MAX_GROUPS];
};

int kv_slots_open(struct kv_slots *slots, size_t page_bytes, uint32_t n_pages, bool arena,
                  struct kv_why *why);
void kv_slots_release(struct kv_slots *slots);

/* Make *pool empty but for slots [first, first + n), all free. */
void kv_pool_init(struct kv_pool *pool, const struct kv_slots *slots, uint32_t first, uint32_t n);

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

/* n <= kv_pool_unreserved().  Whether the quota has room is for the caller to see: slots that go
 * back into a reservation were counted before, also where the quota has since been lowered. */
void kv_pool_reserve(struct kv_pool *pool, uint32_t group, uint32_t n);
void kv_pool_unreserve(struct kv_pool *pool, uint32_t group, uint32_t n);

/* Hand n <= kv_pool_unreserved(from) free slots to another pool; or n that the group has reserved,
 * which are so there.  Want both locks. */
void kv_pool_move(struct kv_pool *from, struct kv_pool *to, uint32_t n);
void kv_pool_move_reserved(struct kv_pool *from, struct kv_pool *to, uint32_t group, uint32_t n);

#endif

/* A page: a slot of the budget, and while it is live the bytes that stand in it.
 *
 * `counts` holds two numbers in one word, so that both are always read as of one moment: refs (all
 * holders: contexts and entries) in the low half, tree_refs (the holders that are entries) in the
 * high half.  A page is evictable iff refs == tree_refs > 0.
 *
 * All holders of a page are in one shard (kv_cache.h).  The counts change under that shard's lock
 * only (kv_pool_count), with release; they may be read without it, with acquire.  Who reads
 * refs == 1 and is that holder may write the page: only a holder can add a holder, so nobody else
 * can raise it, and what the last other holder read from the page it read before the release that
 * let go of it. */
#ifndef KV_PAGE_H
#define KV_PAGE_H

#include <stdatomic.h>
#include <stdint.h>

struct kv_page {
    _Atomic uint64_t counts;
    unsigned char *bytes; /* page_bytes; NULL for a heap page that is not live */
    uint32_t group;       /* while live */
    uint32_t next_free;   /* while free: the index of the one after it in its pool */
};

static inline uint32_t kv_page_refs(const struct kv_page *p)
{
    return (uint32_t)atomic_load_explicit(&p->counts, memory_order_acquire);
}

static inline uint32_t kv_page_tree_refs(const struct kv_page *p)
{
    return (uint32_t)(atomic_load_explicit(&p->counts, memory_order_acquire) >> 32);
}

static inline int kv_counts_evictable(uint64_t counts)
{
    return counts != 0 && (uint32_t)counts == (uint32_t)(counts >> 32);
}

static inline int kv_page_evictable(const struct kv_page *p)
{
    return kv_counts_evictable(atomic_load_explicit(&p->counts, memory_order_acquire));
}

struct kv_layout;

/* Make dst the first n_valid positions of src, rows and ids, and zero everywhere else.  Both are
 * page_bytes long.  Needs no lock: src is held, dst is the caller's alone. */
void kv_page_clone(const struct kv_layout *layout, unsigned char *dst, const unsigned char *src,
                   uint32_t n_valid);

/* Write one position's rows, position-major, into slot of a page that is the caller's alone. */
void kv_page_put(const struct kv_layout *layout, unsigned char *page, uint32_t slot,
                 const void *rows);

#endif

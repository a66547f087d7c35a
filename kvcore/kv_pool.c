#include "kvcore/kv_pool.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static size_t system_page(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

/* A budget that this machine cannot have is refused by its size, before anything is allocated: the
 * kernel would grant the address range and kill the process at the touch. */
static int check_arena(size_t bytes, struct kv_why *why)
{
    const size_t memory = (size_t)sysconf(_SC_PHYS_PAGES) * system_page();

    if (bytes > memory)
        return kv_fail(why, KV_ERR_NOMEM, "the arena is %zu bytes: this machine has %zu", bytes,
                       memory);
    return 0;
}

/* Address space of so many bytes that begins at a huge page; NULL: it cannot be had. */
static unsigned char *map_arena(size_t bytes)
{
    const size_t huge = (size_t)2 << 20;
    unsigned char *base;
    size_t before;

    if (bytes > SIZE_MAX - huge)
        return NULL;
    base = mmap(NULL, bytes + huge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED)
        return NULL;
    before = (huge - (uintptr_t)base % huge) % huge;
    if (before > 0)
        munmap(base, before);
    munmap(base + before + bytes, huge - before);
    return base + before;
}

/* Give each page its memory: in one call where the kernel knows it, else by touching. */
static void populate(unsigned char *base, size_t bytes)
{
#ifdef MADV_POPULATE_WRITE
    if (madvise(base, bytes, MADV_POPULATE_WRITE) == 0)
        return;
#endif
    for (size_t at = 0; at < bytes; at += system_page())
        *(volatile unsigned char *)(base + at) = 0;
}

/* Mapped with huge pages where the kernel allows them, and touched here: first touch runs at a
 * fraction of memory speed, and it must not be the first request that pays. */
static int open_arena(struct kv_slots *slots, struct kv_why *why)
{
    const size_t step = system_page();
    const size_t bytes = (slots->n_pages * slots->page_bytes + step - 1) / step * step;
    unsigned char *base = map_arena(bytes);

    if (base == NULL)
        return kv_fail(why, KV_ERR_NOMEM, "the arena of %zu bytes cannot be allocated", bytes);
    (void)madvise(base, bytes, MADV_HUGEPAGE); /* an optimisation; a kernel without it says so */
    slots->arena = base;
    slots->arena_bytes = bytes;
    populate(base, bytes);
    for (uint32_t i = 0; i < slots->n_pages; i++)
        slots->pages[i].bytes = slots->arena + i * slots->page_bytes;
    return 0;
}

int kv_slots_open(struct kv_slots *slots, size_t page_bytes, uint32_t n_pages, bool arena,
                  struct kv_why *why)
{
    int rc = 0;

    memset(slots, 0, sizeof(*slots));
    if (n_pages == 0)
        return kv_fail(why, KV_ERR_INVALID, "n_pages is 0");
    if (n_pages > SIZE_MAX / 2 / page_bytes)
        return kv_fail(why, KV_ERR_INVALID, "n_pages is %u: with %zu bytes a page past all memory",
                       n_pages, page_bytes);
    if (arena && (rc = check_arena(n_pages * page_bytes, why)) < 0)
        return rc;
    slots->n_pages = n_pages;
    slots->page_bytes = page_bytes;
    slots->pages = calloc(n_pages, sizeof(*slots->pages));
    if (slots->pages == NULL)
        rc = kv_fail(why, KV_ERR_NOMEM, "no memory for the headers of %u pages", n_pages);
    else if (arena)
        rc = open_arena(slots, why);
    if (rc < 0)
        kv_slots_release(slots);
    return rc;
}

void kv_slots_release(struct kv_slots *slots)
{
    if (slots->arena != NULL)
        munmap(slots->arena, slots->arena_bytes);
    free(slots->pages);
    memset(slots, 0, sizeof(*slots));
}

static void push(struct kv_pool *pool, struct kv_page *page)
{
    page->next_free = pool->free;
    pool->free = (uint32_t)(page - pool->slots->pages);
    pool->n_free++;
}

static struct kv_page *pop(struct kv_pool *pool)
{
    struct kv_page *page = &pool->slots->pages[pool->free];

    assert(pool->n_free > 0);
    pool->free = page->next_free;
    pool->n_free--;
    return page;
}

void kv_pool_init(struct kv_pool *pool, const struct kv_slots *slots, uint32_t first, uint32_t n)
{
    memset(pool, 0, sizeof(*pool));
    pool->slots = slots;
    for (uint32_t i = first + n; i-- > first;) {
        atomic_init(&slots->pages[i].counts, 0);
        push(pool, &slots->pages[i]);
    }
}

struct kv_page *kv_pool_take(struct kv_pool *pool, uint32_t group)
{
    struct kv_group *g = &pool->groups[group];
    struct kv_page *page = &pool->slots->pages[pool->free];

    assert(pool->n_reserved > 0 && g->n_reserved > 0 && pool->n_free >= pool->n_reserved);
    if (pool->slots->arena == NULL) {
        page->bytes = aligned_alloc(KV_PAGE_ALIGN, pool->slots->page_bytes);
        if (page->bytes == NULL)
            return NULL;
    }
    (void)pop(pool);
    pool->n_reserved--;
    g->n_reserved--;
    g->n_live++;
    page->group = group;
    atomic_store_explicit(&page->counts, 1, memory_order_release);
    return page;
}

static void give_back(struct kv_pool *pool, struct kv_page *page)
{
    if (pool->slots->arena == NULL) {
        free(page->bytes);
        page->bytes = NULL;
    }
    pool->groups[page->group].n_live--;
    push(pool, page);
}

void kv_pool_count(struct kv_pool *pool, struct kv_page *page, int refs, int tree_refs)
{
    struct kv_group *g = &pool->groups[page->group];
    const uint64_t before = atomic_load_explicit(&page->counts, memory_order_relaxed);
    const int64_t new_refs = (int64_t)(uint32_t)before + refs;
    const int64_t new_tree_refs = (int64_t)(before >> 32) + tree_refs;
    const uint64_t after = (uint64_t)new_refs | (uint64_t)new_tree_refs << 32;
    const int change = kv_counts_evictable(after) - kv_counts_evictable(before);

    assert(before != 0 && new_tree_refs >= 0 && new_tree_refs <= new_refs);
    assert(new_refs <= UINT32_MAX);
    atomic_store_explicit(&page->counts, after, memory_order_release);
    g->n_evictable += (uint32_t)change;
    pool->n_evictable += (uint32_t)change;
    if (new_refs == 0)
        give_back(pool, page);
}

void kv_pool_reserve(struct kv_pool *pool, uint32_t group, uint32_t n)
{
    assert(n <= kv_pool_unreserved(pool));
    pool->n_reserved += n;
    pool->groups[group].n_reserved += n;
}

void kv_pool_unreserve(struct kv_pool *pool, uint32_t group, uint32_t n)
{
    assert(n <= pool->n_reserved && n <= pool->groups[group].n_reserved);
    pool->n_reserved -= n;
    pool->groups[group].n_reserved -= n;
}

void kv_pool_move(struct kv_pool *from, struct kv_pool *to, uint32_t n)
{
    assert(n <= kv_pool_unreserved(from));
    while (n-- > 0)
        push(to, pop(from));
}

void kv_pool_move_reserved(struct kv_pool *from, struct kv_pool *to, uint32_t group, uint32_t n)
{
    const uint32_t had = from->groups[group].share, share = n < had ? n : had;

    kv_pool_unreserve(from, group, n);
    kv_pool_move(from, to, n);
    kv_pool_reserve(to, group, n);
    from->groups[group].share -= share;
    to->groups[group].share += share;
}

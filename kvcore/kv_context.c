/* Contexts: growing, branching and giving back lists of pages. */
#include "kvcore/kv_cache.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* ---- Parts that the other files use ---- */

struct kv_context *kv_context_alloc(struct kv_shard *shard, const struct kv_namespace *ns,
                                    uint32_t cap)
{
    struct kv_context *ctx = calloc(1, sizeof(*ctx));

    if (ctx == NULL)
        return NULL;
    if (cap > 0 && (ctx->pages = malloc(cap * sizeof(*ctx->pages))) == NULL) {
        free(ctx);
        return NULL;
    }
    ctx->cache = shard->cache;
    ctx->shard = shard;
    ctx->ns = *ns;
    ctx->cap = cap;
    ctx->taint = UINT32_MAX;
    ctx->refs = 1;
    atomic_init(&ctx->open, 0);
    atomic_init(&ctx->frozen, false);
    return ctx;
}

void kv_context_free(struct kv_context *ctx)
{
    if (ctx == NULL)
        return;
    free(ctx->pages);
    free(ctx);
}

void kv_context_link(struct kv_context *ctx)
{
    LIST_INSERT_HEAD(&ctx->shard->contexts, ctx, link);
    ctx->shard->n_contexts++;
}

void kv_context_unlink(struct kv_context *ctx)
{
    LIST_REMOVE(ctx, link);
    ctx->shard->n_contexts--;
}

void kv_context_pin(struct kv_context *ctx, struct kv_page *const *pages, uint32_t n)
{
    const uint32_t k = kv_pages_for(ctx->cache, n);

    assert(ctx->n_pages == 0 && k <= ctx->cap);
    for (uint32_t i = 0; i < k; i++) {
        kv_pool_count(&ctx->shard->pool, pages[i], 1, 0);
        ctx->pages[i] = pages[i];
    }
    ctx->n_pages = k;
    ctx->n = n;
}

void kv_context_drop(struct kv_context *ctx, uint32_t k)
{
    while (ctx->n_pages > k)
        kv_pool_count(&ctx->shard->pool, ctx->pages[--ctx->n_pages], -1, 0);
}

struct kv_key kv_context_key(const struct kv_context *ctx, uint32_t n)
{
    return (struct kv_key){.pages = ctx->pages, .layout = &ctx->cache->layout, .n = n};
}

/* ---- Reservation ---- */

/* The last page holds positions past a border and somebody else holds it too. */
static bool tail_is_shared(const struct kv_context *ctx)
{
    return ctx->n % ctx->cache->layout.page_tokens != 0 &&
           kv_page_refs(ctx->pages[ctx->n_pages - 1]) > 1;
}

uint32_t kv_context_need(const struct kv_context *ctx, uint32_t to)
{
    if (to <= ctx->n)
        return 0;
    return kv_pages_for(ctx->cache, to) - ctx->n_pages + tail_is_shared(ctx);
}

int kv_context_hold(struct kv_context *ctx, uint32_t to, bool all)
{
    const uint32_t bound = to > ctx->bound ? to : ctx->bound;
    const uint32_t need = kv_context_need(ctx, bound);
    int rc;

    if (need > ctx->held) {
        rc = kv_evict_reserve(ctx->shard, ctx->ns.group, need - ctx->held, all);
        if (rc != 0)
            return rc;
        ctx->held = need;
    }
    ctx->bound = bound;
    return 0;
}

void kv_context_unhold(struct kv_context *ctx)
{
    kv_pool_unreserve(&ctx->shard->pool, ctx->ns.group, ctx->held);
    ctx->held = 0;
    ctx->bound = 0;
}

/* Between a begin and its end nothing else may change the context, and a frozen one never changes.
 */
static bool is_busy(const struct kv_context *ctx)
{
    return atomic_load(&ctx->open) != 0 || atomic_load(&ctx->frozen);
}

/* A context that is to grow, or to have another. */
struct growing {
    struct kv_context *ctx;
    uint32_t n;
    struct kv_context *child; /* fork */
};

static int reserve_locked(void *arg, bool all)
{
    const struct growing *g = arg;

    return kv_context_hold(g->ctx, g->n, all);
}

int kv_context_reserve(struct kv_context *ctx, uint32_t n_positions)
{
    struct growing g = {.ctx = ctx, .n = n_positions};

    if (n_positions > KV_MAX_POSITIONS)
        return KV_ERR_INVALID;
    if (is_busy(ctx))
        return KV_ERR_BUSY;
    return kv_shard_run(ctx->shard, reserve_locked, &g);
}

/* ---- Life ---- */

int kv_context_open(struct kv_cache *cache, const struct kv_namespace *ns, struct kv_context **out)
{
    struct kv_context *ctx;

    if (ns->group >= KV_MAX_GROUPS)
        return KV_ERR_INVALID;
    ctx = kv_context_alloc(kv_shard_of(cache, ns, 0), ns, 0);
    if (ctx == NULL)
        return KV_ERR_NOMEM;
    kv_shard_lock(ctx->shard);
    kv_context_link(ctx);
    kv_shard_unlock(ctx->shard);
    *out = ctx;
    return 0;
}

/* Pages that an append took and did not fill go back to being reserved slots. */
static void end_append(struct kv_context *ctx, uint32_t keep)
{
    struct kv_pool *pool = &ctx->shard->pool;
    uint32_t k;

    ctx->n += keep;
    k = kv_pages_for(ctx->cache, ctx->n);
    for (uint32_t back = ctx->n_pages - k; back > 0; back--) {
        kv_context_drop(ctx, ctx->n_pages - 1);
        kv_pool_reserve(pool, ctx->ns.group, 1);
        ctx->held++;
    }
    ctx->n_open = 0;
    atomic_store(&ctx->open, 0);
}

void kv_context_close(struct kv_context *ctx)
{
    struct kv_shard *shard;
    bool last;

    if (ctx == NULL)
        return;
    shard = ctx->shard;
    kv_shard_lock(shard);
    last = --ctx->refs == 0;
    if (last) {
        if (atomic_load(&ctx->open) != 0)
            end_append(ctx, 0);
        kv_context_unhold(ctx);
        kv_context_drop(ctx, 0);
        kv_mark_clear(&ctx->mark);
        kv_context_unlink(ctx);
    }
    kv_shard_unlock(shard);
    if (last)
        kv_context_free(ctx);
}

int kv_context_freeze(struct kv_context *ctx)
{
    if (is_busy(ctx))
        return KV_ERR_BUSY;
    kv_shard_lock(ctx->shard);
    kv_context_unhold(ctx);
    atomic_store(&ctx->frozen, true);
    kv_shard_unlock(ctx->shard);
    return 0;
}

struct kv_context *kv_context_ref(struct kv_context *ctx)
{
    assert(atomic_load(&ctx->frozen));
    kv_shard_lock(ctx->shard);
    ctx->refs++;
    kv_shard_unlock(ctx->shard);
    return ctx;
}

int kv_context_truncate(struct kv_context *ctx, uint32_t n)
{
    if (is_busy(ctx))
        return KV_ERR_BUSY;
    if (n > ctx->n)
        return KV_ERR_INVALID;
    kv_shard_lock(ctx->shard);
    kv_context_drop(ctx, kv_pages_for(ctx->cache, n));
    ctx->n = n;
    if (n < ctx->mark.n)
        kv_mark_clear(&ctx->mark);
    if (n <= ctx->taint)
        ctx->taint = UINT32_MAX;
    kv_context_unhold(ctx);
    kv_shard_unlock(ctx->shard);
    return 0;
}

/* The fork may make the parent's tail shared, and then the parent must clone it to go on: where it
 * was promised room, the slot for that clone is part of the promise from now on. */
static int fork_locked(void *arg, bool all)
{
    const struct growing *g = arg;
    struct kv_context *ctx = g->ctx, *child = g->child;
    int rc = 0;

    kv_context_pin(child, ctx->pages, g->n);
    if (!atomic_load(&ctx->frozen) && ctx->bound > ctx->n)
        rc = kv_context_hold(ctx, ctx->bound, all);
    if (rc == 0)
        kv_context_link(child);
    else
        kv_context_drop(child, 0);
    return rc;
}

int kv_context_fork(struct kv_context *ctx, uint32_t n, struct kv_context **out)
{
    struct growing g = {.ctx = ctx, .n = n};
    int rc;

    if (atomic_load(&ctx->open) != 0)
        return KV_ERR_BUSY;
    if (n > ctx->n)
        return KV_ERR_INVALID;
    g.child = kv_context_alloc(ctx->shard, &ctx->ns, kv_pages_for(ctx->cache, n));
    if (g.child == NULL)
        return KV_ERR_NOMEM;
    if (ctx->taint < n)
        g.child->taint = ctx->taint;
    rc = kv_shard_run(ctx->shard, fork_locked, &g);
    if (rc < 0) {
        kv_context_free(g.child);
        return rc;
    }
    *out = g.child;
    return 0;
}

/* ---- Append ---- */

/* The list is swapped under the lock: an audit may be reading it. */
static int grow_list(struct kv_context *ctx, uint32_t n_pages)
{
    struct kv_page **pages, **old = ctx->pages;
    uint32_t cap = ctx->cap;

    if (n_pages <= cap)
        return 0;
    cap = cap * 2 > n_pages ? cap * 2 : n_pages;
    pages = malloc(cap * sizeof(*pages));
    if (pages == NULL)
        return KV_ERR_NOMEM;
    if (ctx->n_pages > 0)
        memcpy(pages, old, ctx->n_pages * sizeof(*pages));
    kv_shard_lock(ctx->shard);
    ctx->pages = pages;
    ctx->cap = cap;
    kv_shard_unlock(ctx->shard);
    free(old);
    return 0;
}

static struct kv_page *take(struct kv_context *ctx)
{
    struct kv_page *page = kv_pool_take(&ctx->shard->pool, ctx->ns.group);

    if (page != NULL)
        ctx->held--;
    return page;
}

/* Take the pages of an append to n_pages in all: a page of its own in place of a shared tail, the
 * old one then stands aside, and the new ones.  KV_ERR_NOMEM: nothing changed. */
static int take_pages(struct kv_context *ctx, uint32_t n_pages)
{
    const uint32_t held = ctx->held, had = ctx->n_pages;
    struct kv_page *page, *old = NULL;

    if (tail_is_shared(ctx)) {
        page = take(ctx);
        if (page == NULL)
            return KV_ERR_NOMEM;
        old = ctx->pages[had - 1];
        ctx->pages[had - 1] = page;
    }
    while (ctx->n_pages < n_pages) {
        page = take(ctx);
        if (page == NULL)
            goto undo;
        ctx->pages[ctx->n_pages++] = page;
    }
    ctx->aside = old;
    return 0;
undo:
    kv_context_drop(ctx, had);
    if (old != NULL) {
        kv_pool_count(&ctx->shard->pool, ctx->pages[had - 1], -1, 0);
        ctx->pages[had - 1] = old;
    }
    kv_pool_reserve(&ctx->shard->pool, ctx->ns.group, held - ctx->held);
    ctx->held = held;
    return KV_ERR_NOMEM;
}

/* Reserve and take; on an error the reservation is as it was. */
static int begin_locked(void *arg, bool all)
{
    const struct growing *g = arg;
    struct kv_context *ctx = g->ctx;
    const uint32_t held = ctx->held, bound = ctx->bound;
    int rc;

    rc = kv_context_hold(ctx, ctx->n + g->n, all);
    if (rc != 0)
        return rc;
    rc = take_pages(ctx, kv_pages_for(ctx->cache, ctx->n + g->n));
    if (rc < 0) {
        kv_pool_unreserve(&ctx->shard->pool, ctx->ns.group, ctx->held - held);
        ctx->held = held;
        ctx->bound = bound;
        return rc;
    }
    ctx->n_open = g->n;
    return 0;
}

/* An empty context gets its first id: that decides where it is.  Its slots move with it. */
static void settle(struct kv_context *ctx, uint32_t first_id)
{
    struct kv_shard *from = ctx->shard, *to = kv_shard_of(ctx->cache, &ctx->ns, first_id);
    struct kv_shard *first = from < to ? from : to, *second = from < to ? to : from;

    if (from == to)
        return;
    kv_shard_lock(first);
    kv_shard_lock(second);
    kv_pool_move_reserved(&from->pool, &to->pool, ctx->ns.group, ctx->held);
    kv_context_unlink(ctx);
    ctx->shard = to;
    kv_context_link(ctx);
    kv_shard_unlock(second);
    kv_shard_unlock(first);
}

static void write_ids(struct kv_context *ctx, const uint32_t *ids, uint32_t n)
{
    const struct kv_layout *layout = &ctx->cache->layout;
    uint32_t at = ctx->n;

    while (n > 0) {
        const uint32_t slot = at % layout->page_tokens;
        const uint32_t run = layout->page_tokens - slot < n ? layout->page_tokens - slot : n;

        memcpy(kv_page_ids(layout, ctx->pages[at / layout->page_tokens]) + slot, ids,
               run * sizeof(*ids));
        ids += run;
        at += run;
        n -= run;
    }
}

/* The pages are the context's alone now: what they had is cloned or made zero, or left to the
 * caller to write. */
static void prepare_pages(struct kv_context *ctx, uint32_t first_new, bool zero)
{
    const struct kv_layout *layout = &ctx->cache->layout;

    if (ctx->aside != NULL)
        kv_page_clone(layout, ctx->pages[first_new - 1]->bytes, ctx->aside->bytes,
                      ctx->n % layout->page_tokens);
    for (uint32_t i = first_new; zero && i < ctx->n_pages; i++)
        memset(ctx->pages[i]->bytes, 0, layout->page_bytes);
}

/* The page that was cloned is let go of: only now, or another could write it meanwhile. */
static void drop_aside(struct kv_context *ctx)
{
    if (ctx->aside == NULL)
        return;
    kv_shard_lock(ctx->shard);
    kv_pool_count(&ctx->shard->pool, ctx->aside, -1, 0);
    ctx->aside = NULL;
    ctx->shard->n_clones++;
    kv_shard_unlock(ctx->shard);
}

static int begin(struct kv_context *ctx, const uint32_t *ids, uint32_t n, bool zero)
{
    struct growing g = {.ctx = ctx, .n = n};
    const uint32_t first_new = ctx->n_pages;
    uint32_t closed = 0;
    int rc;

    if (n == 0 || n > KV_MAX_POSITIONS - ctx->n)
        return KV_ERR_INVALID;
    if (atomic_load(&ctx->frozen) || !atomic_compare_exchange_strong(&ctx->open, &closed, n))
        return KV_ERR_BUSY;
    if (ctx->n == 0)
        settle(ctx, ids[0]);
    rc = grow_list(ctx, kv_pages_for(ctx->cache, ctx->n + n));
    if (rc == 0)
        rc = kv_shard_run(ctx->shard, begin_locked, &g);
    if (rc < 0) {
        atomic_store(&ctx->open, 0);
        return rc;
    }
    prepare_pages(ctx, first_new, zero);
    write_ids(ctx, ids, n);
    drop_aside(ctx);
    return 0;
}

int kv_context_begin(struct kv_context *ctx, const uint32_t *ids, uint32_t n)
{
    return begin(ctx, ids, n, true);
}

int kv_context_commit(struct kv_context *ctx, uint32_t k)
{
    const uint32_t open = atomic_load(&ctx->open);

    if (open == 0 || k > open)
        return KV_ERR_INVALID;
    kv_shard_lock(ctx->shard);
    end_append(ctx, k);
    kv_shard_unlock(ctx->shard);
    return 0;
}

int kv_context_abort(struct kv_context *ctx)
{
    return kv_context_commit(ctx, 0);
}

int kv_context_load(struct kv_context *ctx, const uint32_t *ids, uint32_t n,
                    const struct iovec *rows, size_t n_rows)
{
    int rc = begin(ctx, ids, n, false);

    if (rc < 0)
        return rc;
    rc = kv_context_stream(ctx, ctx->n, n, rows, n_rows);
    kv_context_commit(ctx, rc == 0 ? n : 0);
    return rc;
}

void kv_context_loaded(struct kv_context *ctx)
{
    const struct kv_layout *layout = &ctx->cache->layout;
    const uint32_t n_valid = ctx->n % layout->page_tokens;

    if (n_valid != 0) {
        unsigned char *last = ctx->pages[ctx->n_pages - 1]->bytes;

        kv_page_clone(layout, last, last, n_valid);
    }
}

/* ---- Reading ---- */

uint32_t kv_context_length(const struct kv_context *ctx)
{
    return ctx->n;
}

int kv_context_ids(const struct kv_context *ctx, uint32_t first, uint32_t n, uint32_t *out)
{
    const struct kv_key key = kv_context_key(ctx, ctx->n);

    if (n > ctx->n || first > ctx->n - n)
        return KV_ERR_INVALID;
    while (n > 0) {
        uint32_t run;
        const uint32_t *ids = kv_key_run(&key, first, &run);

        run = run < n ? run : n;
        memcpy(out, ids, run * sizeof(*out));
        out += run;
        first += run;
        n -= run;
    }
    return 0;
}

uint32_t kv_context_n_pages(const struct kv_context *ctx)
{
    return ctx->n_pages;
}

unsigned char *kv_context_page(const struct kv_context *ctx, uint32_t i)
{
    assert(i < ctx->n_pages);
    return ctx->pages[i]->bytes;
}

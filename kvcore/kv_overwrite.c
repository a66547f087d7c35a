/* Rows that are not what their ids say.  A context that has some is tainted from the first of them
 * on: what the tree, a snapshot or a claim would pass on ends before it. */
#include "kvcore/kv_cache.h"

/* A slot of its own for the copy, whatever the context has reserved: that was promised for growth.
 * NULL with *rc set: nothing changed. */
static struct kv_page *take_copy(struct kv_context *ctx, int *rc)
{
    struct kv_cache *cache = ctx->cache;
    struct kv_page *page;

    *rc = kv_evict_reserve(cache, ctx->ns.group, 1);
    if (*rc < 0)
        return NULL;
    page = kv_pool_take(&cache->pool, ctx->ns.group);
    if (page == NULL) {
        kv_pool_unreserve(&cache->pool, ctx->ns.group, 1);
        *rc = KV_ERR_NOMEM;
    }
    return page;
}

/* A tail that is no longer shared needs no slot for its clone. */
static void return_excess(struct kv_context *ctx)
{
    const uint32_t need = kv_context_need(ctx, ctx->bound);

    if (ctx->held <= need)
        return;
    kv_pool_unreserve(&ctx->cache->pool, ctx->ns.group, ctx->held - need);
    ctx->held = need;
}

/* Make page i the context's alone. */
static int own_page(struct kv_context *ctx, uint32_t i)
{
    struct kv_cache *cache = ctx->cache;
    const uint32_t page_tokens = cache->layout.page_tokens;
    const uint32_t left = ctx->n - i * page_tokens;
    struct kv_page *old = ctx->pages[i], *copy;
    int rc;

    if (kv_page_refs(old) == 1)
        return 0;
    kv_cache_lock(cache);
    copy = take_copy(ctx, &rc);
    kv_cache_unlock(cache);
    if (copy == NULL)
        return rc;
    kv_page_clone(&cache->layout, copy->bytes, old->bytes, left < page_tokens ? left : page_tokens);
    kv_cache_lock(cache);
    ctx->pages[i] = copy;
    kv_pool_count(&cache->pool, old, -1, 0);
    cache->n_clones++;
    return_excess(ctx);
    kv_cache_unlock(cache);
    return 0;
}

int kv_context_overwrite(struct kv_context *ctx, uint32_t position, const void *rows)
{
    const struct kv_layout *layout = &ctx->cache->layout;
    const uint32_t i = position / layout->page_tokens;
    int rc;

    if (atomic_load(&ctx->open) != 0 || atomic_load(&ctx->frozen))
        return KV_ERR_BUSY;
    if (position >= ctx->n)
        return KV_ERR_INVALID;
    rc = own_page(ctx, i);
    if (rc < 0)
        return rc;
    kv_page_put(layout, ctx->pages[i]->bytes, position % layout->page_tokens, rows);
    ctx->taint = position < ctx->taint ? position : ctx->taint;
    return 0;
}

uint32_t kv_context_settled(const struct kv_context *ctx)
{
    return ctx->taint < ctx->n ? ctx->taint : ctx->n;
}

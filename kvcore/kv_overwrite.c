/* Rows that are not what their ids say.  A context that has some is tainted from the first of them
 * on: what the tree, a snapshot or a claim would pass on ends before it. */
#include "kvcore/kv_cache.h"

/* A slot of its own for the copy (ctx->aside), whatever the context has reserved: that was promised
 * for growth. */
static int take_copy(void *arg, bool all)
{
    struct kv_context *ctx = arg;
    struct kv_pool *pool = &ctx->shard->pool;
    int rc;

    rc = kv_evict_reserve(ctx->shard, ctx->ns.group, 1, all);
    if (rc != 0)
        return rc;
    ctx->aside = kv_pool_take(pool, ctx->ns.group);
    if (ctx->aside == NULL) {
        kv_pool_unreserve(pool, ctx->ns.group, 1);
        return KV_ERR_NOMEM;
    }
    return 0;
}

/* A tail that is no longer shared needs no slot for its clone. */
static void return_excess(struct kv_context *ctx)
{
    const uint32_t need = kv_context_need(ctx, ctx->bound);

    if (ctx->held <= need)
        return;
    kv_pool_unreserve(&ctx->shard->pool, ctx->ns.group, ctx->held - need);
    ctx->held = need;
}

/* Make page i the context's alone. */
static int own_page(struct kv_context *ctx, uint32_t i)
{
    const struct kv_layout *layout = &ctx->cache->layout;
    const uint32_t left = ctx->n - i * layout->page_tokens;
    struct kv_page *old = ctx->pages[i];
    int rc;

    if (kv_page_refs(old) == 1)
        return 0;
    rc = kv_shard_run(ctx->shard, take_copy, ctx);
    if (rc < 0)
        return rc;
    kv_page_clone(layout, ctx->aside->bytes, old->bytes,
                  left < layout->page_tokens ? left : layout->page_tokens);
    kv_shard_lock(ctx->shard);
    ctx->pages[i] = ctx->aside;
    ctx->aside = NULL;
    kv_pool_count(&ctx->shard->pool, old, -1, 0);
    ctx->shard->n_clones++;
    return_excess(ctx);
    kv_shard_unlock(ctx->shard);
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

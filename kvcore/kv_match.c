/* Contexts out of the tree and into it: match, peek, publish, give up. */
#include "kvcore/kv_cache.h"

#include <assert.h>
#include <string.h>

static struct kv_key prompt_key(const struct kv_cache *cache, const uint32_t *ids, uint32_t n)
{
    return (struct kv_key){.ids = ids, .layout = &cache->layout, .n = n};
}

/* What a match would use: `n` positions of `entry` (NULL: nothing), and whether its logits are the
 * prompt's. */
struct found {
    struct kv_entry *entry;
    uint32_t n;
    bool logits;
};

/* The longest common prefix, less the last token where that would be the whole prompt: somebody has
 * to run it, unless an entry of just this length carries the n_logits that come after it. */
static struct found find(const struct kv_cache *cache, const struct kv_namespace *ns,
                         const struct kv_key *key, uint32_t n_logits)
{
    struct found f = {0};

    f.n = kv_tree_match(&cache->tree, ns, key, &f.entry);
    if (f.n == key->n) {
        f.logits = f.entry != NULL && f.entry->n == f.n && f.entry->logits != NULL &&
                   f.entry->n_logits == n_logits;
        f.n -= f.logits || f.n == 0 ? 0 : 1;
    }
    if (f.n == 0)
        f.entry = NULL;
    return f;
}

/* Pin what was found and see whether room up to reserve_to can be had.  If not, and the cut is
 * inside a page, one at the page's border needs no clone: try that once.  KV_ERR_FULL: ctx is empty
 * again. */
static int pin_found(struct kv_context *ctx, struct found *f, uint32_t reserve_to)
{
    const uint32_t page_tokens = ctx->cache->layout.page_tokens;

    for (int attempt = 0; attempt < 2; attempt++) {
        if (f->entry != NULL)
            kv_context_pin(ctx, f->entry->pages, f->n);
        if (kv_evict_feasible(ctx->cache, ctx->ns.group, kv_context_need(ctx, reserve_to)))
            return 0;
        kv_context_drop(ctx, 0);
        ctx->n = 0;
        if (f->n % page_tokens == 0)
            break;
        f->n -= f->n % page_tokens;
        f->logits = false;
        if (f->n == 0)
            f->entry = NULL;
    }
    return KV_ERR_FULL;
}

/* The one exclusive step: nothing of it is seen by others in part, and a refusal leaves no trace.
 */
static int match_locked(struct kv_context *ctx, const struct kv_key *key, uint32_t reserve_to,
                        float *logits, uint32_t n_logits, struct kv_match *match)
{
    struct kv_cache *cache = ctx->cache;
    struct found f = find(cache, &ctx->ns, key, logits != NULL ? n_logits : 0);
    int rc;

    rc = pin_found(ctx, &f, reserve_to);
    if (rc < 0)
        return rc;
    if (f.logits)
        memcpy(logits, f.entry->logits, n_logits * sizeof(*logits));
    if (f.entry != NULL)
        kv_tree_refresh(&cache->tree, f.entry);
    rc = kv_context_hold(ctx, reserve_to); /* may evict the entry: the pins keep what was matched */
    assert(rc == 0);
    kv_context_link(ctx);
    *(f.n > 0 ? &cache->n_hits : &cache->n_misses) += 1;
    *match = (struct kv_match){.n_matched = f.n, .has_logits = f.logits};
    return rc;
}

int kv_cache_match(struct kv_cache *cache, const struct kv_namespace *ns, const uint32_t *ids,
                   uint32_t n_ids, uint32_t reserve_to, float *logits, uint32_t n_logits,
                   struct kv_context **out, struct kv_match *match)
{
    const struct kv_key key = prompt_key(cache, ids, n_ids);
    struct kv_context *ctx;
    struct kv_match found;
    int rc;

    if (ns->group >= KV_MAX_GROUPS || reserve_to < n_ids || reserve_to > KV_MAX_POSITIONS ||
        n_logits > KV_MAX_LOGITS)
        return KV_ERR_INVALID;
    if (kv_pages_for(cache, reserve_to) > cache->pool.n_pages)
        return KV_ERR_FULL; /* before the page list is allocated for it */
    ctx = kv_context_alloc(cache, ns, kv_pages_for(cache, reserve_to));
    if (ctx == NULL)
        return KV_ERR_NOMEM;
    kv_cache_lock(cache);
    rc = match_locked(ctx, &key, reserve_to, logits, n_logits, &found);
    kv_cache_unlock(cache);
    if (rc < 0) {
        kv_context_free(ctx);
        return rc;
    }
    *out = ctx;
    if (match != NULL)
        *match = found;
    return 0;
}

uint32_t kv_cache_peek(struct kv_cache *cache, const struct kv_namespace *ns, const uint32_t *ids,
                       uint32_t n_ids)
{
    const struct kv_key key = prompt_key(cache, ids, n_ids);
    struct found f;

    if (ns->group >= KV_MAX_GROUPS)
        return 0;
    kv_cache_lock(cache);
    f = find(cache, ns, &key, 0);
    kv_cache_unlock(cache);
    return f.n;
}

/* ---- Into the tree ---- */

static int check_logits(const float *logits, uint32_t n_logits)
{
    return (logits == NULL) == (n_logits == 0) && n_logits <= KV_MAX_LOGITS ? 0 : KV_ERR_INVALID;
}

/* The first n positions; logits only where that is all of the context. */
static struct kv_admission admission(struct kv_context *ctx, uint32_t n, const float *logits,
                                     uint32_t n_logits)
{
    const bool whole = n == ctx->n;

    return (struct kv_admission){
        .ns = ctx->ns,
        .key = kv_context_key(ctx, n),
        .logits = whole ? logits : NULL,
        .n_logits = whole ? n_logits : 0,
        .mark = &ctx->mark,
    };
}

static int publish_locked(struct kv_context *ctx, const float *logits, uint32_t n_logits)
{
    const bool frozen = atomic_load(&ctx->frozen);
    const uint32_t settled = kv_context_settled(ctx);
    const uint32_t n = frozen ? settled : settled - settled % ctx->cache->layout.page_tokens;
    const struct kv_admission a = admission(ctx, n, logits, n_logits);

    return n > 0 ? kv_tree_admit(&ctx->cache->tree, &a) : 0;
}

int kv_context_publish(struct kv_context *ctx, const float *logits, uint32_t n_logits)
{
    int rc = check_logits(logits, n_logits);

    if (rc < 0)
        return rc;
    if (atomic_load(&ctx->open) != 0)
        return KV_ERR_BUSY;
    kv_cache_lock(ctx->cache);
    rc = publish_locked(ctx, logits, n_logits);
    kv_cache_unlock(ctx->cache);
    return rc;
}

/* The last reference hands its pages over; with other references left the tree gets its own. */
static int give_up_locked(struct kv_context *ctx, const float *logits, uint32_t n_logits)
{
    const uint32_t n = kv_context_settled(ctx);
    struct kv_admission a;
    int rc = 0;

    if (ctx->refs > 1) {
        rc = publish_locked(ctx, logits, n_logits);
        ctx->refs--;
        return rc;
    }
    kv_context_unhold(ctx);
    a = admission(ctx, n, logits, n_logits);
    a.move = true;
    kv_context_drop(ctx, kv_pages_for(ctx->cache, n));
    if (n > 0)
        rc = kv_tree_admit(&ctx->cache->tree, &a);
    ctx->refs = 0;
    kv_mark_clear(&ctx->mark);
    kv_context_unlink(ctx);
    return rc;
}

int kv_context_give_up(struct kv_context *ctx, const float *logits, uint32_t n_logits)
{
    struct kv_cache *cache = ctx->cache;
    bool last;
    int rc = check_logits(logits, n_logits);

    if (rc < 0)
        return rc;
    if (atomic_load(&ctx->open) != 0)
        return KV_ERR_BUSY;
    kv_cache_lock(cache);
    rc = give_up_locked(ctx, logits, n_logits);
    last = ctx->refs == 0;
    kv_cache_unlock(cache);
    if (last)
        kv_context_free(ctx);
    return rc;
}

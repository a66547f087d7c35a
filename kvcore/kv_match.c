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
static struct found find(const struct kv_shard *shard, const struct kv_namespace *ns,
                         const struct kv_key *key, uint32_t n_logits)
{
    struct found f = {0};

    f.n = kv_tree_match(&shard->tree, ns, key, &f.entry);
    if (f.n == key->n) {
        f.logits = f.entry != NULL && f.entry->n == f.n && f.entry->logits != NULL &&
                   f.entry->n_logits == n_logits;
        f.n -= f.logits || f.n == 0 ? 0 : 1;
    }
    if (f.n == 0)
        f.entry = NULL;
    return f;
}

/* A match on its way. */
struct matching {
    struct kv_context *ctx;
    struct kv_key key;
    uint32_t reserve_to;
    float *logits; /* NULL with n_logits 0: not asked for */
    uint32_t n_logits;
    struct kv_match match;
};

static void pin(struct kv_context *ctx, const struct found *f)
{
    if (f->entry != NULL)
        kv_context_pin(ctx, f->entry->pages, f->n);
}

static void unpin(struct kv_context *ctx)
{
    kv_context_drop(ctx, 0);
    ctx->n = 0;
}

/* Pin what was found and see whether room up to reserve_to can be had.  If not, and the cut is
 * inside a page, one at the page's border needs no clone: try that once.  KV_ERR_FULL: ctx is empty
 * again. */
static int pin_found(const struct matching *m, struct found *f)
{
    struct kv_context *ctx = m->ctx;
    const uint32_t page_tokens = ctx->cache->layout.page_tokens;

    for (int attempt = 0; attempt < 2; attempt++) {
        pin(ctx, f);
        if (kv_evict_feasible(ctx->cache, ctx->ns.group, kv_context_need(ctx, m->reserve_to)))
            return 0;
        unpin(ctx);
        if (f->n % page_tokens == 0)
            break;
        f->n -= f->n % page_tokens;
        f->logits = false;
        if (f->n == 0)
            f->entry = NULL;
    }
    return KV_ERR_FULL;
}

/* The one step: nothing of it is seen by others in part, and a refusal leaves no trace.  Where the
 * shard has the slots itself, one lock is enough; else all of it, the eviction included, is done
 * under all. */
static int match_locked(void *arg, bool all)
{
    struct matching *m = arg;
    struct kv_context *ctx = m->ctx;
    struct kv_shard *shard = ctx->shard;
    struct found f = find(shard, &ctx->ns, &m->key, m->n_logits);
    int rc = 0;

    if (all)
        rc = pin_found(m, &f);
    else
        pin(ctx, &f);
    if (rc < 0)
        return rc;
    if (!all && kv_context_hold(ctx, m->reserve_to, false) == KV_AGAIN) {
        unpin(ctx);
        return KV_AGAIN;
    }
    if (f.logits)
        memcpy(m->logits, f.entry->logits, m->n_logits * sizeof(*m->logits));
    if (f.entry != NULL)
        kv_tree_refresh(&shard->tree, f.entry);
    if (all)
        rc = kv_context_hold(ctx, m->reserve_to, true); /* may evict the entry: the pins keep what
                                                           was matched */
    assert(rc == 0);
    kv_context_link(ctx);
    *(f.n > 0 ? &shard->n_hits : &shard->n_misses) += 1;
    m->match = (struct kv_match){.n_matched = f.n, .has_logits = f.logits};
    return rc;
}

/* Where prompts of that first id are; an empty one may be anywhere. */
static struct kv_shard *prompt_shard(const struct kv_cache *cache, const struct kv_namespace *ns,
                                     const uint32_t *ids, uint32_t n_ids)
{
    return kv_shard_of(cache, ns, n_ids > 0 ? ids[0] : 0);
}

int kv_cache_match(struct kv_cache *cache, const struct kv_namespace *ns, const uint32_t *ids,
                   uint32_t n_ids, uint32_t reserve_to, float *logits, uint32_t n_logits,
                   struct kv_context **out, struct kv_match *match)
{
    struct matching m = {.key = prompt_key(cache, ids, n_ids),
                         .reserve_to = reserve_to,
                         .logits = logits,
                         .n_logits = logits != NULL ? n_logits : 0};
    int rc;

    if (ns->group >= KV_MAX_GROUPS || reserve_to < n_ids || reserve_to > KV_MAX_POSITIONS ||
        n_logits > KV_MAX_LOGITS)
        return KV_ERR_INVALID;
    if (kv_pages_for(cache, reserve_to) > cache->slots.n_pages)
        return KV_ERR_FULL; /* before the page list is allocated for it */
    m.ctx =
        kv_context_alloc(prompt_shard(cache, ns, ids, n_ids), ns, kv_pages_for(cache, reserve_to));
    if (m.ctx == NULL)
        return KV_ERR_NOMEM;
    rc = kv_shard_run(m.ctx->shard, match_locked, &m);
    if (rc < 0) {
        kv_context_free(m.ctx);
        return rc;
    }
    *out = m.ctx;
    if (match != NULL)
        *match = m.match;
    return 0;
}

uint32_t kv_cache_peek(struct kv_cache *cache, const struct kv_namespace *ns, const uint32_t *ids,
                       uint32_t n_ids)
{
    const struct kv_key key = prompt_key(cache, ids, n_ids);
    struct kv_shard *shard = prompt_shard(cache, ns, ids, n_ids);
    struct found f;

    if (ns->group >= KV_MAX_GROUPS)
        return 0;
    kv_shard_lock(shard);
    f = find(shard, ns, &key, 0);
    kv_shard_unlock(shard);
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

/* A context on its way into the tree. */
struct publishing {
    struct kv_context *ctx;
    const float *logits;
    uint32_t n_logits;
    bool last; /* give_up: that was the last reference */
};

static int publish_locked(void *arg, bool all)
{
    const struct publishing *p = arg;
    struct kv_context *ctx = p->ctx;
    const bool frozen = atomic_load(&ctx->frozen);
    const uint32_t settled = kv_context_settled(ctx);
    const uint32_t n = frozen ? settled : settled - settled % ctx->cache->layout.page_tokens;
    struct kv_admission a = admission(ctx, n, p->logits, p->n_logits);

    a.all = all;
    return n > 0 ? kv_tree_admit(&ctx->shard->tree, &a) : 0;
}

int kv_context_publish(struct kv_context *ctx, const float *logits, uint32_t n_logits)
{
    struct publishing p = {.ctx = ctx, .logits = logits, .n_logits = n_logits};
    int rc = check_logits(logits, n_logits);

    if (rc < 0)
        return rc;
    if (atomic_load(&ctx->open) != 0)
        return KV_ERR_BUSY;
    return kv_shard_run(ctx->shard, publish_locked, &p);
}

/* The last reference hands its pages over; with other references left the tree gets its own. */
static int give_up_locked(void *arg, bool all)
{
    struct publishing *p = arg;
    struct kv_context *ctx = p->ctx;
    const uint32_t n = kv_context_settled(ctx);
    struct kv_admission a;
    int rc = 0;

    p->last = ctx->refs == 1;
    if (ctx->refs > 1) {
        rc = publish_locked(arg, all);
        ctx->refs -= rc != KV_AGAIN;
        return rc;
    }
    a = admission(ctx, n, p->logits, p->n_logits);
    a.move = true;
    a.all = all;
    if (n > 0)
        rc = kv_tree_admit(&ctx->shard->tree, &a);
    if (rc == KV_AGAIN)
        return rc;
    kv_context_unhold(ctx);
    kv_context_drop(ctx, kv_pages_for(ctx->cache, n));
    ctx->refs = 0;
    kv_mark_clear(&ctx->mark);
    kv_context_unlink(ctx);
    return rc;
}

int kv_context_give_up(struct kv_context *ctx, const float *logits, uint32_t n_logits)
{
    struct publishing p = {.ctx = ctx, .logits = logits, .n_logits = n_logits};
    int rc = check_logits(logits, n_logits);

    if (rc < 0)
        return rc;
    if (atomic_load(&ctx->open) != 0)
        return KV_ERR_BUSY;
    rc = kv_shard_run(ctx->shard, give_up_locked, &p);
    if (p.last)
        kv_context_free(ctx);
    return rc;
}

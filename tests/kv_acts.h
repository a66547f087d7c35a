/* For the tests of kvcore: one thread that makes any public call in any order, over and over, with
 * a context of its own.  What it asks for may be refused; nothing else may go wrong. */
#ifndef KV_ACTS_H
#define KV_ACTS_H

#include "kv_help.h"

#include <sched.h>

enum { ACT_MAX = 160, ACT_QUOTA = 48 };

struct actor {
    struct kv_cache *cache;
    const struct kv_geometry *geometry;
    const struct kv_namespace *ns;
    struct kv_context *ctx; /* NULL: none */
    uint64_t h;             /* this step's own random number */
};

/* An append that stays open for a while, of which some is kept. */
static int act_append(struct actor *a)
{
    const uint32_t n = 1 + (uint32_t)(a->h >> 8) % 40, keep = (uint32_t)(a->h >> 16) % (n + 1);
    uint32_t ids[40];
    int rc;

    if (kv_context_length(a->ctx) + n > ACT_MAX)
        return 0;
    for (uint32_t i = 0; i < n; i++)
        ids[i] = 1 + ((uint32_t)(a->h >> 24) + kv_context_length(a->ctx) + i / 9) % 5;
    rc = kv_context_begin(a->ctx, ids, n);
    if (rc < 0)
        return rc;
    sched_yield();
    return a->h >> 60 == 0 ? kv_context_abort(a->ctx) : kv_context_commit(a->ctx, keep);
}

static int act_reserve(struct actor *a)
{
    return kv_context_reserve(a->ctx, (uint32_t)(a->h >> 8) % ACT_MAX);
}

/* Often to nothing: what is appended next may begin with another id. */
static int act_truncate(struct actor *a)
{
    const uint32_t n = kv_context_length(a->ctx);

    return kv_context_truncate(a->ctx, a->h >> 62 == 0 ? 0 : (uint32_t)(a->h >> 8) % (n + 1));
}

static int act_overwrite(struct actor *a)
{
    const uint32_t n = kv_context_length(a->ctx);
    unsigned char rows[256] = {0};

    ck_assert_uint_le(kv_position_bytes(a->geometry), sizeof(rows));
    return n == 0 ? 0 : kv_context_overwrite(a->ctx, (uint32_t)(a->h >> 8) % n, rows);
}

static int act_publish(struct actor *a)
{
    return kv_context_publish(a->ctx, NULL, 0);
}

/* Go on with a fork; the parent is frozen or not, given up or closed. */
static int act_fork(struct actor *a)
{
    const uint32_t n = (uint32_t)(a->h >> 8) % (kv_context_length(a->ctx) + 1);
    struct kv_context *child;
    int rc;

    if (a->h >> 63 && (rc = kv_context_freeze(a->ctx)) < 0)
        return rc;
    rc = kv_context_fork(a->ctx, n, &child);
    if (rc == 0 && a->h >> 62 & 1)
        rc = kv_context_give_up(a->ctx, NULL, 0);
    else
        kv_context_close(a->ctx);
    a->ctx = rc == 0 ? child : NULL;
    return rc;
}

/* Often of a context whose rows hold good only up to somewhere. */
static int act_give_up(struct actor *a)
{
    static const float logits[3] = {1, 2, 3};
    const bool with = a->h >> 63 && kv_context_length(a->ctx) > 0;
    int rc = a->h >> 61 & 1 ? act_overwrite(a) : 0;

    if (rc == 0) {
        rc = kv_context_give_up(a->ctx, with ? logits : NULL, with ? 3 : 0);
        a->ctx = NULL;
    }
    return rc;
}

static int act_match(struct actor *a)
{
    const uint32_t n = 2 + (uint32_t)(a->h >> 8) % (ACT_MAX - 2);
    uint32_t ids[ACT_MAX];

    for (uint32_t i = 0; i < n; i++)
        ids[i] = 1 + ((uint32_t)(a->h >> 24) + i / 9) % 5;
    kv_context_close(a->ctx);
    a->ctx = NULL;
    return kv_cache_match(a->cache, a->ns, ids, n, n, NULL, 0, &a->ctx, NULL);
}

static int act_trim(struct actor *a)
{
    kv_cache_trim(a->cache, (uint32_t)(a->h >> 8) % 4);
    return kv_cache_set_quota(a->cache, 1, ACT_QUOTA + (uint32_t)(a->h >> 16) % 4);
}

static inline const char *act(struct kv_cache *cache, const struct kv_geometry *g,
                              const struct kv_namespace *ns, uint64_t seed, uint32_t n_rounds)
{
    static int (*const acts[])(struct actor * a) = {
        act_append,  act_append, act_append,  act_reserve, act_truncate, act_overwrite,
        act_publish, act_fork,   act_give_up, act_give_up, act_match,    act_trim};
    struct actor a = {.cache = cache, .geometry = g, .ns = ns};

    for (uint32_t round = 0; round < n_rounds; round++) {
        int rc = 0;

        a.h = mix(seed * 104729 + round);
        if (a.ctx == NULL)
            rc = kv_context_open(cache, ns, &a.ctx);
        if (rc == 0)
            rc = acts[a.h % (sizeof(acts) / sizeof(acts[0]))](&a);
        if (rc != 0 && rc != KV_ERR_FULL)
            return kv_strerror(rc);
    }
    kv_context_close(a.ctx);
    return NULL;
}

#endif

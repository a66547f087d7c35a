/* For the tests of the snapshot store: a store on a simulated disk, a cache beside it, and contexts
 * whose rows follow from their ids. */
#ifndef KV_STORE_RIG_H
#define KV_STORE_RIG_H

#include "kvcore/kv_io.h"
#include "kvcore/kv_store.h"
#include "tests/kv_help.h"
#include "tests/sim_disk.h"

struct store_rig {
    struct kv_store_config config;
    struct kv_namespace ns;
    struct sim_disk *sim;
    struct kv_store *store;
    struct kv_cache *cache;
};

static inline void rig_open_store(struct store_rig *r)
{
    struct kv_why why = {""};

    r->config.disk = sim_disk_open(r->sim);
    ck_assert_msg(kv_store_open(&r->config, &r->store, &why) == 0, "%s", why.text);
}

static inline struct kv_cache *rig_cache(const struct kv_geometry *g, uint32_t page_tokens)
{
    const struct kv_cache_config config = {
        .geometry = *g, .page_tokens = page_tokens, .n_pages = 2048 / page_tokens};
    struct kv_cache *cache;

    ck_assert_int_eq(kv_cache_open(&config, &cache, NULL), 0);
    return cache;
}

static inline void rig_open(struct store_rig *r, const struct kv_geometry *g)
{
    memset(r, 0, sizeof(*r));
    r->config.geometry = *g;
    memset(&r->config.fingerprint, 1, sizeof(r->config.fingerprint));
    memset(&r->config.numerics_id, 2, sizeof(r->config.numerics_id));
    memset(&r->ns.digest, 3, sizeof(r->ns.digest));
    r->sim = sim_disk_new(1);
    r->cache = rig_cache(g, 16);
    rig_open_store(r);
}

static inline void rig_close(struct store_rig *r)
{
    kv_store_close(r->store);
    kv_cache_close(r->cache);
    sim_disk_free(r->sim);
}

static inline void rig_reopen(struct store_rig *r)
{
    kv_store_close(r->store);
    rig_open_store(r);
}

/* ids [0, n) of conversation c: those below `same` are of conversation 0. */
static inline void rig_ids(uint32_t *ids, uint32_t c, uint32_t same, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        ids[i] = (uint32_t)mix(i < same ? i : i + 1000003u * c);
}

static inline struct kv_context *rig_context(struct store_rig *r, const uint32_t *ids, uint32_t n)
{
    struct kv_context *ctx;

    ck_assert_int_eq(kv_context_open(r->cache, &r->ns, &ctx), 0);
    ck_assert_int_eq(append_to(ctx, &r->config.geometry, &r->ns, ids, n), 0);
    return ctx;
}

/* Save the first n of ids; `session` says who it is. */
static inline int rig_save(struct store_rig *r, const uint32_t *ids, uint32_t n,
                           const char *session, const struct kv_snapshot_id *replaces,
                           struct kv_snapshot_info *out, struct kv_why *why)
{
    struct kv_context *ctx = rig_context(r, ids, n);
    const struct kv_save save = {.ctx = ctx,
                                 .session = session,
                                 .session_len = session != NULL ? strlen(session) + 1 : 0,
                                 .replaces = replaces};
    const int rc = kv_store_save(r->store, &save, out, why);

    kv_context_close(ctx);
    return rc;
}

/* Restore into a cache; 0 where it holds exactly these ids and rows, and the session is this. */
static inline int rig_restore(struct store_rig *r, struct kv_cache *cache,
                              const struct kv_snapshot_id *id, const uint32_t *ids, uint32_t n,
                              const char *session, struct kv_why *why)
{
    const struct kv_restore restore = {
        .id = *id, .cache = cache, .ns = r->ns, .n_positions = session == NULL ? n : 0};
    struct kv_restored got;
    int rc = kv_store_restore(r->store, &restore, &got, why);

    if (rc < 0)
        return rc;
    ck_assert(holds(got.ctx, &r->config.geometry, &r->ns, ids, n));
    if (session != NULL) {
        ck_assert_uint_eq(got.session_len, strlen(session) + 1);
        ck_assert_str_eq(got.session, session);
    }
    free(got.session);
    kv_context_close(got.ctx);
    return 0;
}

#endif

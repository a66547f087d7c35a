#include "decode/decode_scheduler.h"
#include "decode/decode_store.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* Have the scheduler, who owns the engine, compute one position. */
static int compute_one(struct decode_store *s, struct kv_context *ctx, uint32_t id)
{
    struct node_inbox back;
    struct decode_seed seed = {.ctx = ctx, .id = id, .back = &back};

    seed.mail = (struct decode_mail){.kind = DECODE_MAIL_SEED, .item = &seed};
    if (node_inbox_init(&back) < 0)
        return KV_ERR_NOMEM;
    node_inbox_put(&s->node->inbox, &seed.mail.link);
    while (node_inbox_take(&back, -1) == NULL)
        ;
    node_inbox_release(&back);
    return seed.rc;
}

/* A frozen context of as many of the ids as the tree holds, at least one; it reserves nothing. */
static int take_context(struct decode_store *s, const struct kv_namespace *ns,
                        const struct token_list *ids, struct kv_context **out)
{
    struct kv_cache *cache = s->node->runtime.cache;
    struct kv_context *ctx = NULL, *fork;
    const uint32_t n = kv_cache_peek(cache, ns, ids->ids, (uint32_t)ids->n);
    int rc = kv_cache_match(cache, ns, ids->ids, n + 1, n + 1, NULL, 0, &ctx, NULL);

    if (rc < 0)
        return rc;
    if (kv_context_length(ctx) == 0)
        rc = compute_one(s, ctx, ids->ids[0]);
    if (rc == 0)
        rc = kv_context_fork(ctx, kv_context_length(ctx), &fork);
    if (rc == 0) {
        rc = kv_context_freeze(fork);
        assert(rc == 0);
        *out = fork;
    }
    kv_context_close(ctx);
    return rc;
}

static int save_context(struct decode_store *s, const struct decode_session_copy *c,
                        struct kv_context *ctx, bool full, struct kv_snapshot_info *out,
                        struct kv_why *why)
{
    const uint32_t n = kv_context_length(ctx);
    struct node_session session = {
        .tenant = DECODE_TENANT,
        .salt = c->salt,
        .n_ids = (uint32_t)c->ids.n,
        .tail = c->ids.ids + n,
        .n_tail = (uint32_t)c->ids.n - n,
    };
    struct kv_save save = {
        .ctx = ctx,
        .full = full,
        .replaces = c->stored ? &c->snapshot : NULL,
        .progress = decode_store_progress,
        .arg = s,
    };
    void *section;
    int rc;

    strcpy(session.name, c->name);
    rc = node_session_encode(&session, &section, &save.session_len, why);
    if (rc < 0)
        return rc;
    save.session = section;
    rc = kv_store_save(s->kv, &save, out, why);
    free(section);
    return rc;
}

/* Write it.  The session may have ended meanwhile: then nobody wants what was written. */
static int write_session(struct decode_store *s, const struct decode_session_copy *c, bool full,
                         bool leave, struct decode_stored *out, struct kv_why *why)
{
    struct kv_context *ctx = NULL;
    struct kv_namespace ns;
    int rc;

    decode_store_namespace(s, &c->salt, &ns);
    rc = take_context(s, &ns, &c->ids, &ctx);
    if (rc == KV_ERR_FULL && atomic_load(&s->node->n_running) > 0)
        return DECODE_AGAIN;
    if (rc < 0)
        return kv_fail(why, decode_store_status(s, rc), "session: a page to save it from: %s",
                       kv_strerror(rc));
    rc = save_context(s, c, ctx, full, &out->info, why);
    kv_context_close(ctx);
    if (rc < 0)
        return decode_store_status(s, rc);
    out->bytes = out->info.file_bytes;
    if (decode_sessions_saved(&s->node->sessions, c, &out->info.id, leave))
        return TRANSPORT_OK;
    kv_store_delete(s->kv, &out->info.id, NULL);
    return kv_fail(why, TRANSPORT_NOT_FOUND, "session: %s was closed meanwhile", c->name);
}

int decode_store_save(struct decode_store *s, const char *name, bool full, bool leave,
                      struct decode_stored *out, struct kv_why *why)
{
    struct decode_session_copy c;
    int rc = decode_sessions_copy(&s->node->sessions, name, &c, why);

    if (rc != TRANSPORT_OK)
        return rc;
    strcpy(out->session, name);
    if (c.current && (!full || c.ids.n == 0) &&
        kv_store_find(s->kv, &c.snapshot, &out->info) == 0) {
        decode_sessions_saved(&s->node->sessions, &c, &c.snapshot, leave);
    } else if (c.ids.n == 0) {
        rc = kv_fail(why, TRANSPORT_NOT_FOUND, "session: the snapshot of %s is gone", name);
    } else {
        rc = write_session(s, &c, full, leave, out, why);
    }
    token_list_release(&c.ids);
    return rc;
}

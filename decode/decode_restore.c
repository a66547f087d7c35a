#include "decode/decode_store.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

int decode_store_read(struct decode_store *s, const struct kv_snapshot_info *info,
                      struct node_session *out, struct kv_why *why)
{
    void *section;
    size_t len;
    int rc;

    if (info->session_bytes == 0)
        return kv_fail(why, TRANSPORT_FAILED_PRECONDITION, "snapshot: holds no session");
    rc = kv_store_session(s->kv, &info->id, &section, &len, why);
    if (rc < 0)
        return decode_store_status(s, rc);
    rc = node_session_decode(section, len, info->n_positions, out, why);
    free(section);
    return rc == 0 ? TRANSPORT_OK : decode_store_status(s, rc);
}

/* What must be equal, as far as it is known before the file is read: precision by its name. */
static int check_geometry(const struct decode_store *s, const struct kv_geometry *theirs,
                          struct kv_why *why)
{
    const struct kv_geometry *ours = &s->node->identity.geometry;

    if (theirs->precision != ours->precision)
        return kv_fail(why, TRANSPORT_FAILED_PRECONDITION,
                       "kv_precision: the snapshot has %s, this node %s",
                       kv_precision_name(theirs->precision), kv_precision_name(ours->precision));
    if (!kv_geometry_equal(theirs, ours))
        return kv_fail(why, TRANSPORT_FAILED_PRECONDITION,
                       "model: the snapshot has %" PRIu32 " layers, %" PRIu32 " heads of %" PRIu32
                       ", this node %" PRIu32 ", %" PRIu32 " of %" PRIu32,
                       theirs->n_layers, theirs->n_kv_heads, theirs->head_dim, ours->n_layers,
                       ours->n_kv_heads, ours->head_dim);
    return TRANSPORT_OK;
}

static int check_vocabulary(const struct decode_store *s, const struct token_list *ids,
                            struct kv_why *why)
{
    const uint32_t n_vocab = tokenizer_n_vocab(s->node->tokenizer);

    for (size_t i = 0; i < ids->n; i++) {
        if (ids->ids[i] >= n_vocab)
            return kv_fail(why, TRANSPORT_DATA_LOSS,
                           "snapshot: id %" PRIu32 " at %zu is not in the vocabulary of %" PRIu32,
                           ids->ids[i], i, n_vocab);
    }
    return TRANSPORT_OK;
}

/* The session's ids: those of the context, and the tail. */
static int join_ids(const struct decode_store *s, const struct kv_context *ctx,
                    const struct node_session *snapshot, struct token_list *out, struct kv_why *why)
{
    const uint32_t n = kv_context_length(ctx);
    int rc;

    out->ids = malloc(((size_t)n + snapshot->n_tail) * sizeof(*out->ids));
    if (out->ids == NULL)
        return kv_fail(why, TRANSPORT_RESOURCE_EXHAUSTED, "session: no memory");
    rc = kv_context_ids(ctx, 0, n, out->ids);
    if (rc < 0)
        return kv_fail(why, TRANSPORT_INTERNAL, "snapshot: its ids: %s", kv_strerror(rc));
    memcpy(out->ids + n, snapshot->tail, snapshot->n_tail * sizeof(*out->ids));
    out->n = out->cap = n + snapshot->n_tail;
    return check_vocabulary(s, out, why);
}

/* All of it verified and in the tree, and its ids in *ids; or nothing. */
static int restore_context(struct decode_store *s, const struct kv_snapshot_info *info,
                           const struct node_session *snapshot, struct token_list *ids,
                           struct kv_why *why)
{
    struct kv_restore restore = {
        .id = info->id,
        .cache = s->node->runtime.cache,
        .progress = decode_store_progress,
        .arg = s,
    };
    struct kv_restored restored = {0};
    int rc;

    decode_store_namespace(s, &snapshot->salt, &restore.ns);
    rc = kv_store_restore(s->kv, &restore, &restored, why);
    if (rc == KV_ERR_FULL && s->at_work->method == DECODE_GENERATE &&
        atomic_load(&s->node->n_running) > 0)
        return DECODE_AGAIN;
    if (rc < 0)
        return decode_store_status(s, rc);
    free(restored.session);
    rc = join_ids(s, restored.ctx, snapshot, ids, why);
    if (rc == TRANSPORT_OK)
        kv_context_give_up(restored.ctx, NULL, 0);
    else
        kv_context_close(restored.ctx);
    return rc;
}

static int restore(struct decode_store *s, const struct kv_snapshot_info *info,
                   const struct node_session *snapshot, struct decode_session *session,
                   struct kv_why *why)
{
    /* Under another name it is another session, and the snapshot not its own. */
    const bool own = strcmp(session->name, snapshot->name) == 0;
    struct token_list ids = {0};
    int rc = check_geometry(s, &info->geometry, why);

    if (rc == TRANSPORT_OK)
        rc = restore_context(s, info, snapshot, &ids, why);
    if (rc == TRANSPORT_OK)
        decode_sessions_fill(&s->node->sessions, session, &ids, &snapshot->salt,
                             own ? &info->id : NULL);
    token_list_release(&ids);
    return rc;
}

/* Find the snapshot and read its session.  The caller releases *snapshot. */
static int find(struct decode_store *s, const struct kv_snapshot_id *id, struct decode_stored *out,
                struct node_session *snapshot, struct kv_why *why)
{
    char text[KV_SNAPSHOT_ID_TEXT];

    if (kv_store_find(s->kv, id, &out->info) == 0)
        return decode_store_read(s, &out->info, snapshot, why);
    kv_snapshot_id_print(id, text);
    return kv_fail(why, TRANSPORT_NOT_FOUND, "snapshot: there is none of the id %s", text);
}

int decode_store_restore(struct decode_store *s, const struct kv_snapshot_id *id,
                         struct decode_session *session, struct decode_stored *out,
                         struct kv_why *why)
{
    struct node_session snapshot;
    int rc = find(s, id, out, &snapshot, why);

    if (rc != TRANSPORT_OK)
        return rc;
    rc = restore(s, &out->info, &snapshot, session, why);
    strcpy(out->session, session->name);
    out->bytes = (uint64_t)out->info.n_positions * kv_position_bytes(&out->info.geometry);
    node_session_release(&snapshot);
    return rc;
}

int decode_store_restore_as(struct decode_store *s, const struct kv_snapshot_id *id,
                            const char *name, struct decode_stored *out, struct kv_why *why)
{
    struct decode_session *session;
    struct node_session snapshot;
    int rc = find(s, id, out, &snapshot, why);

    if (rc != TRANSPORT_OK)
        return rc;
    strcpy(out->session, name[0] != '\0' ? name : snapshot.name);
    node_session_release(&snapshot);
    rc = decode_sessions_take(&s->node->sessions, out->session, DECODE_TAKE_ABSENT, &session, why);
    if (rc != TRANSPORT_OK)
        return rc;
    /* One of that name that is on disk alone may only come from there. */
    if (session->stored && memcmp(&session->snapshot, id, sizeof(*id)) != 0)
        rc = kv_fail(why, TRANSPORT_ALREADY_EXISTS, "session: %s is on disk as another snapshot",
                     out->session);
    else
        rc = decode_store_restore(s, id, session, out, why);
    decode_sessions_give_back(&s->node->sessions, session, NULL, NULL, 0);
    return rc;
}

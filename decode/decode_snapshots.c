/* The Snapshots service: its requests, its list, its replies. */
#include "decode/decode_store.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define REFUSE(why, ...) kv_fail(why, TRANSPORT_INVALID_ARGUMENT, __VA_ARGS__)

bool decode_snapshots_streams(enum decode_method method)
{
    return method == DECODE_SAVE || method == DECODE_RESTORE || method == DECODE_VERIFY ||
           method == DECODE_COMPACT;
}

/* ---- Requests ---- */

static int check_id(const ProtobufCBinaryData *id, const char *field, struct kv_why *why)
{
    if (id->len == KV_SNAPSHOT_ID_BYTES)
        return TRANSPORT_OK;
    return REFUSE(why, "%s: %zu bytes, not %d", field, id->len, (int)KV_SNAPSHOT_ID_BYTES);
}

static int check_name(const char *name, const char *field, struct kv_why *why)
{
    const size_t n = node_message_strlen(name);

    if (node_session_name_ok(name, n))
        return TRANSPORT_OK;
    return REFUSE(why, "%s: a name of %zu bytes is not 1 to %d of [A-Za-z0-9._-]", field, n,
                  (int)NODE_SESSION_NAME);
}

static int check_restore(const Baton__V1__RestoreRequest *q, struct kv_why *why)
{
    if (node_message_strlen(q->as_session) > 0 &&
        check_name(q->as_session, "as_session", why) != TRANSPORT_OK)
        return TRANSPORT_INVALID_ARGUMENT;
    switch (q->which_case) {
    case BATON__V1__RESTORE_REQUEST__WHICH_ID:
        return check_id(&q->id, "id", why);
    case BATON__V1__RESTORE_REQUEST__WHICH_SESSION:
        return check_name(q->session, "session", why);
    default:
        return REFUSE(why, "which: neither id nor session is there");
    }
}

static const ProtobufCMessageDescriptor *request_type(enum decode_method method)
{
    switch (method) {
    case DECODE_SAVE:
        return &baton__v1__save_request__descriptor;
    case DECODE_RESTORE:
        return &baton__v1__restore_request__descriptor;
    case DECODE_DELETE_SNAPSHOT:
        return &baton__v1__delete_snapshot_request__descriptor;
    case DECODE_VERIFY:
        return &baton__v1__verify_request__descriptor;
    case DECODE_COMPACT:
        return &baton__v1__compact_request__descriptor;
    default:
        return &baton__v1__list_snapshots_request__descriptor;
    }
}

static int check(struct decode_request *r, struct kv_why *why)
{
    const ProtobufCMessage *m;

    if (r->node->store == NULL)
        return kv_fail(why, TRANSPORT_FAILED_PRECONDITION,
                       "snapshots: the node was started without --snapshots");
    if (node_message_unpack(request_type(r->method), r->bytes, &r->message, why) < 0)
        return TRANSPORT_INVALID_ARGUMENT;
    transport_message_unref(r->bytes);
    r->bytes = NULL;
    m = r->message.message;
    switch (r->method) {
    case DECODE_SAVE:
        return check_name(((const Baton__V1__SaveRequest *)m)->session, "session", why);
    case DECODE_RESTORE:
        return check_restore((const Baton__V1__RestoreRequest *)m, why);
    case DECODE_DELETE_SNAPSHOT:
        return check_id(&((const Baton__V1__DeleteSnapshotRequest *)m)->id, "id", why);
    case DECODE_VERIFY:
        return check_id(&((const Baton__V1__VerifyRequest *)m)->id, "id", why);
    case DECODE_COMPACT:
        return check_id(&((const Baton__V1__CompactRequest *)m)->id, "id", why);
    default:
        if (((const Baton__V1__ListSnapshotsRequest *)m)->after.len == 0)
            return TRANSPORT_OK;
        return check_id(&((const Baton__V1__ListSnapshotsRequest *)m)->after, "after", why);
    }
}

/* ---- Snapshots as messages ---- */

/* A message, and what it points into. */
struct snapshot_message {
    Baton__V1__Snapshot message;
    Baton__V1__Geometry geometry;
    struct kv_snapshot_info info;
    char session[NODE_SESSION_NAME + 1];
};

static void fill_snapshot(struct snapshot_message *m, const struct kv_snapshot_info *info)
{
    static const struct kv_snapshot_id none;
    Baton__V1__Snapshot *s = &m->message;

    m->info = *info;
    info = &m->info;
    baton__v1__geometry__init(&m->geometry);
    m->geometry.n_layers = info->geometry.n_layers;
    m->geometry.n_kv_heads = info->geometry.n_kv_heads;
    m->geometry.head_dim = info->geometry.head_dim;
    m->geometry.precision = (Baton__V1__Precision)info->geometry.precision;
    baton__v1__snapshot__init(s);
    s->id.data = m->info.id.bytes;
    s->id.len = sizeof(info->id.bytes);
    if (memcmp(&info->parent, &none, sizeof(none)) != 0) {
        s->parent.data = m->info.parent.bytes;
        s->parent.len = sizeof(info->parent.bytes);
    }
    s->namespace_digest.data = m->info.ns.bytes;
    s->namespace_digest.len = sizeof(info->ns.bytes);
    s->session = m->session;
    s->geometry = &m->geometry;
    s->positions = info->n_positions;
    s->base_position = info->base;
    s->depth = info->depth;
    s->children = info->n_children;
    s->file_bytes = info->file_bytes;
    s->used_unix_ns = info->used_ns;
}

/* ---- List ---- */

static int by_id(const void *a, const void *b)
{
    const struct kv_snapshot_info *x = a, *y = b;

    return memcmp(&x->id, &y->id, sizeof(x->id));
}

static int by_message_id(const void *id, const void *m)
{
    return memcmp(id, &((const struct snapshot_message *)m)->info.id,
                  sizeof(struct kv_snapshot_id));
}

struct page {
    struct snapshot_message items[DECODE_LIST_SNAPSHOTS];
    Baton__V1__Snapshot *list[DECODE_LIST_SNAPSHOTS];
    size_t n;
};

/* Every session that is on disk, into the message of its snapshot where that is on the page. */
static void name_one(void *arg, const char *name, const struct kv_snapshot_id *id)
{
    struct page *p = arg;
    struct snapshot_message *m = bsearch(id, p->items, p->n, sizeof(p->items[0]), by_message_id);

    if (m != NULL)
        strcpy(m->session, name);
}

/* Those after `after`, by their ids. */
static bool fill_page(struct page *p, struct kv_snapshot_info *info, uint32_t n,
                      const ProtobufCBinaryData *after)
{
    uint32_t i = 0;

    qsort(info, n, sizeof(*info), by_id);
    while (i < n && after->len > 0 && memcmp(info[i].id.bytes, after->data, after->len) <= 0)
        i++;
    for (; i < n && p->n < DECODE_LIST_SNAPSHOTS; i++) {
        fill_snapshot(&p->items[p->n], &info[i]);
        p->list[p->n] = &p->items[p->n].message;
        p->n++;
    }
    return i < n;
}

static void list(struct decode_node *node, struct decode_request *r)
{
    const Baton__V1__ListSnapshotsRequest *q =
        (const Baton__V1__ListSnapshotsRequest *)r->message.message;
    Baton__V1__ListSnapshotsReply reply = BATON__V1__LIST_SNAPSHOTS_REPLY__INIT;
    const uint32_t max = kv_store_list(node->store->kv, NULL, NULL, 0);
    struct kv_snapshot_info *info = calloc((size_t)max + 1, sizeof(*info));
    struct page *p = calloc(1, sizeof(*p));
    uint32_t n;

    if (info == NULL || p == NULL) {
        decode_request_refuse(r, TRANSPORT_RESOURCE_EXHAUSTED, "no memory for a list");
    } else {
        n = kv_store_list(node->store->kv, NULL, info, max);
        reply.more = fill_page(p, info, n < max ? n : max, &q->after);
        decode_sessions_stored(&node->sessions, name_one, p);
        reply.snapshots = p->list;
        reply.n_snapshots = p->n;
        decode_request_answer(r, &reply.base);
    }
    free(p);
    free(info);
}

void decode_snapshots_front(struct decode_node *node, struct decode_request *r)
{
    struct kv_why why = {.text = ""};
    const int status = check(r, &why);

    if (status != TRANSPORT_OK)
        decode_request_refuse(r, status, why.text);
    else if (r->method == DECODE_LIST)
        list(node, r);
    else
        decode_store_put(node->store, r);
}

/* ---- Replies ---- */

static void send_event(struct decode_request *r, const Baton__V1__SnapshotReply *reply)
{
    struct transport_out *out = node_message_pack(&reply->base);

    if (out != NULL)
        transport_call_send(r->call, out);
}

void decode_reply_progress(struct decode_request *r, uint64_t done, uint64_t total)
{
    Baton__V1__SnapshotReply reply = BATON__V1__SNAPSHOT_REPLY__INIT;
    Baton__V1__SnapshotProgress progress = BATON__V1__SNAPSHOT_PROGRESS__INIT;

    progress.done = done;
    progress.total = total;
    reply.event_case = BATON__V1__SNAPSHOT_REPLY__EVENT_PROGRESS;
    reply.progress = &progress;
    send_event(r, &reply); /* it may be lost: another follows */
}

void decode_reply_stored(struct decode_request *r, const struct decode_stored *d)
{
    Baton__V1__SnapshotReply reply = BATON__V1__SNAPSHOT_REPLY__INIT;
    Baton__V1__SnapshotDone done = BATON__V1__SNAPSHOT_DONE__INIT;
    struct snapshot_message m = {.session = ""};

    fill_snapshot(&m, &d->info);
    strcpy(m.session, d->session);
    done.snapshot = &m.message;
    done.bytes = d->bytes;
    done.ns = d->ns;
    reply.event_case = BATON__V1__SNAPSHOT_REPLY__EVENT_DONE;
    reply.done = &done;
    decode_request_answer(r, &reply.base);
}

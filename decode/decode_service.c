#include "decode/decode_service.h"

#include "decode/decode_store.h"

#include <stdlib.h>
#include <string.h>

/* ---- Handlers, on gRPC threads: nothing is looked at here ---- */

static void on_sent(void *user, struct transport_call *call)
{
    struct decode_request *r = user;

    (void)call;
    node_inbox_wake(&r->node->inbox);
}

static void on_cancel(void *user, struct transport_call *call)
{
    struct decode_request *r = user;

    on_sent(user, call);
    if (r->node->store != NULL)
        node_inbox_wake(&r->node->store->inbox);
}

static void on_done(void *user, struct transport_call *call)
{
    (void)call;
    decode_request_unref(user);
}

static void receive(struct decode_node *node, enum decode_method method,
                    struct transport_call *call, struct transport_message *bytes)
{
    static const struct transport_call_events events = {
        .on_cancel = on_cancel, .on_sent = on_sent, .on_done = on_done};
    struct decode_request *r = decode_request_new(node, method, call, bytes);

    if (r == NULL) {
        transport_call_finish(call, TRANSPORT_RESOURCE_EXHAUSTED, "no memory for a call");
        transport_call_unref(call);
        return;
    }
    atomic_fetch_add(&r->refs, 1);
    transport_call_set_events(call, &events, r);
    if (!node_queue_push(&node->front, r)) {
        transport_call_finish(call, TRANSPORT_RESOURCE_EXHAUSTED, "too many calls wait");
        decode_request_unref(r);
    }
}

/* A handler for each method. */
#define HANDLER(name, method)                                                                  \
    static void name(void *user, struct transport_call *call, struct transport_message *bytes) \
    {                                                                                          \
        receive(user, method, call, bytes);                                                    \
    }
HANDLER(on_generate, DECODE_GENERATE)
HANDLER(on_describe, DECODE_DESCRIBE)
HANDLER(on_list_sessions, DECODE_LIST_SESSIONS)
HANDLER(on_close_session, DECODE_CLOSE_SESSION)
HANDLER(on_save, DECODE_SAVE)
HANDLER(on_restore, DECODE_RESTORE)
HANDLER(on_list, DECODE_LIST)
HANDLER(on_delete, DECODE_DELETE_SNAPSHOT)
HANDLER(on_verify, DECODE_VERIFY)
HANDLER(on_compact, DECODE_COMPACT)

void decode_service_methods(struct decode_node *node, struct transport_method out[DECODE_METHODS])
{
    const struct transport_method methods[DECODE_METHODS] = {
        {"/baton.v1.Decode/Generate", TRANSPORT_SERVER_STREAM, on_generate, node},
        {"/baton.v1.Decode/Describe", TRANSPORT_UNARY, on_describe, node},
        {"/baton.v1.Decode/ListSessions", TRANSPORT_UNARY, on_list_sessions, node},
        {"/baton.v1.Decode/CloseSession", TRANSPORT_UNARY, on_close_session, node},
        {"/baton.v1.Snapshots/Save", TRANSPORT_SERVER_STREAM, on_save, node},
        {"/baton.v1.Snapshots/Restore", TRANSPORT_SERVER_STREAM, on_restore, node},
        {"/baton.v1.Snapshots/List", TRANSPORT_UNARY, on_list, node},
        {"/baton.v1.Snapshots/Delete", TRANSPORT_UNARY, on_delete, node},
        {"/baton.v1.Snapshots/Verify", TRANSPORT_SERVER_STREAM, on_verify, node},
        {"/baton.v1.Snapshots/Compact", TRANSPORT_SERVER_STREAM, on_compact, node},
    };

    memcpy(out, methods, sizeof(methods));
}

/* ---- Front worker ---- */

/* The first time: its fields, its session, its place in the queue. */
static int begin_generate(struct decode_node *node, struct decode_request *r, struct kv_why *why)
{
    int status = decode_request_check(r, why);
    uint32_t n_waiting;

    if (status != TRANSPORT_OK)
        return status;
    n_waiting = atomic_fetch_add(&node->n_waiting, 1);
    r->waits = true;
    if (n_waiting < node->options->serve.queue)
        return TRANSPORT_OK;
    return kv_fail(why, TRANSPORT_RESOURCE_EXHAUSTED, "queue: %u requests wait already", n_waiting);
}

/* A session that is on disk alone is restored first; then the request comes here again. */
static void front_generate(struct decode_node *node, struct decode_request *r)
{
    struct kv_why why = {.text = ""};
    int status = r->waits ? TRANSPORT_OK : begin_generate(node, r, &why);

    if (status == TRANSPORT_OK && r->session != NULL && !r->session->resident) {
        decode_store_put(node->store, r);
        return;
    }
    if (status == TRANSPORT_OK)
        status = decode_request_prompt(r, &why);
    if (status == TRANSPORT_OK)
        node_inbox_put(&node->inbox, &r->mail.link);
    else
        decode_request_refuse(r, status, why.text);
}

/* Strings of the model and the command line, as protobuf-c wants them. */
static char *borrowed(const char *s)
{
    char *p;

    memcpy(&p, &s, sizeof(p));
    return p;
}

static void fill_store(struct decode_node *node, Baton__V1__Store *out)
{
    struct kv_store_stats stats;
    uint32_t n_resident;

    kv_store_stats(node->store->kv, &stats);
    baton__v1__store__init(out);
    decode_sessions_count(&node->sessions, &n_resident, &out->sessions);
    out->snapshots = stats.n_snapshots;
    out->retired = stats.n_retired;
    out->unreadable = stats.n_unreadable;
    out->bytes = stats.bytes;
    out->budget_bytes = stats.budget_bytes;
    out->durability = borrowed(kv_durability_name(stats.durability));
    out->io = borrowed(kv_store_describe(node->store->kv));
}

static void front_describe(struct decode_node *node, struct decode_request *r)
{
    const struct runtime *rt = &node->runtime;
    const struct model_params *p = model_params(rt->model);
    Baton__V1__DescribeReply reply = BATON__V1__DESCRIBE_REPLY__INIT;
    Baton__V1__Hello hello;
    Baton__V1__Geometry geometry;
    Baton__V1__Pages pages;
    struct kv_stats stats;
    Baton__V1__Store store;
    uint32_t n_disk_only;
    char *peers[DECODE_MAX_PEERS];

    node_hello_fill(&node->identity, &hello, &geometry);
    kv_cache_stats(rt->cache, &stats);
    node_pages_fill(&stats, &pages);
    reply.hello = &hello;
    reply.model_name = borrowed(p->name);
    reply.architecture = borrowed(p->arch);
    reply.n_ctx = rt->n_ctx;
    reply.n_vocab = p->n_vocab;
    reply.kernels = borrowed(model_kernels(rt->model));
    reply.threads = engine_n_threads(rt->engine);
    reply.page_tokens = rt->page_tokens;
    reply.pages = &pages;
    reply.running = atomic_load(&node->n_running);
    reply.queued = atomic_load(&node->n_waiting);
    decode_sessions_count(&node->sessions, &reply.sessions, &n_disk_only);
    if (node->store != NULL) {
        fill_store(node, &store);
        reply.store = &store;
    }
    reply.prefill_serving = peers;
    for (uint32_t i = 0; i < node->peers.n; i++) {
        if (atomic_load(&node->peers.items[i].serving))
            peers[reply.n_prefill_serving++] = borrowed(node->peers.items[i].address);
    }
    decode_request_answer(r, &reply.base);
}

static void front_list(struct decode_node *node, struct decode_request *r)
{
    uint32_t max = node->options->max_sessions, n;
    struct decode_session_info *info = calloc(max, sizeof(*info));
    Baton__V1__SessionInfo *items = calloc(max, sizeof(*items));
    Baton__V1__SessionInfo **list = calloc(max, sizeof(Baton__V1__SessionInfo *));
    Baton__V1__ListSessionsReply reply = BATON__V1__LIST_SESSIONS_REPLY__INIT;

    if (info == NULL || items == NULL || list == NULL) {
        decode_request_refuse(r, TRANSPORT_RESOURCE_EXHAUSTED, "no memory for a reply");
        goto out;
    }
    n = decode_sessions_list(&node->sessions, info, max);
    for (uint32_t i = 0; i < n; i++) {
        baton__v1__session_info__init(&items[i]);
        items[i].name = info[i].name;
        items[i].tokens = info[i].n_ids;
        items[i].busy = info[i].busy;
        items[i].idle_ns = info[i].idle_ns;
        items[i].saved = info[i].saved;
        list[i] = &items[i];
    }
    reply.sessions = list;
    reply.n_sessions = n;
    decode_request_answer(r, &reply.base);
out:
    free(list);
    free(items);
    free(info);
}

/* Where there is a store, what is on disk of it goes too: that is for the I/O thread. */
static int close_session(struct decode_node *node, const char *name, struct kv_why *why)
{
    struct decode_session *session;
    int rc = decode_sessions_take(&node->sessions, name, DECODE_TAKE_KNOWN, &session, why);

    if (rc == TRANSPORT_OK)
        decode_sessions_drop(&node->sessions, session, false);
    return rc;
}

static void front_close(struct decode_node *node, struct decode_request *r)
{
    Baton__V1__CloseSessionReply reply = BATON__V1__CLOSE_SESSION_REPLY__INIT;
    const Baton__V1__CloseSessionRequest *q;
    struct kv_why why = {.text = ""};
    int status = TRANSPORT_INVALID_ARGUMENT;

    if (node_message_unpack(&baton__v1__close_session_request__descriptor, r->bytes, &r->message,
                            &why) == 0) {
        q = (const Baton__V1__CloseSessionRequest *)r->message.message;
        if (!node_session_name_ok(q->name, node_message_strlen(q->name)))
            kv_fail(&why, 0, "name: %zu bytes are not 1 to %d of [A-Za-z0-9._-]",
                    node_message_strlen(q->name), (int)NODE_SESSION_NAME);
        else if (node->store != NULL)
            status = DECODE_AGAIN;
        else
            status = close_session(node, q->name, &why);
    }
    if (status == DECODE_AGAIN)
        decode_store_put(node->store, r);
    else if (status == TRANSPORT_OK)
        decode_request_answer(r, &reply.base);
    else
        decode_request_refuse(r, status, why.text);
}

void *decode_service_front(void *arg)
{
    static void (*const work[DECODE_METHODS])(struct decode_node *, struct decode_request *) = {
        [DECODE_GENERATE] = front_generate,       [DECODE_DESCRIBE] = front_describe,
        [DECODE_LIST_SESSIONS] = front_list,      [DECODE_CLOSE_SESSION] = front_close,
        [DECODE_SAVE] = decode_snapshots_front,   [DECODE_RESTORE] = decode_snapshots_front,
        [DECODE_LIST] = decode_snapshots_front,   [DECODE_DELETE_SNAPSHOT] = decode_snapshots_front,
        [DECODE_VERIFY] = decode_snapshots_front, [DECODE_COMPACT] = decode_snapshots_front,
    };
    struct decode_node *node = arg;
    struct decode_request *r;

    while ((r = node_queue_pop(&node->front, -1)) != NULL)
        work[r->method](node, r);
    return NULL;
}

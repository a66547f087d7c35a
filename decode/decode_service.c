#include "decode/decode_service.h"

#include "decode/decode_request.h"

#include <stdlib.h>
#include <string.h>

/* ---- Handlers, on gRPC threads: nothing is looked at here ---- */

static void on_wake(void *user, struct transport_call *call)
{
    struct decode_request *r = user;

    (void)call;
    node_inbox_wake(&r->node->inbox);
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
        .on_cancel = on_wake, .on_sent = on_wake, .on_done = on_done};
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

static void on_generate(void *user, struct transport_call *call, struct transport_message *bytes)
{
    receive(user, DECODE_GENERATE, call, bytes);
}

static void on_describe(void *user, struct transport_call *call, struct transport_message *bytes)
{
    receive(user, DECODE_DESCRIBE, call, bytes);
}

static void on_list(void *user, struct transport_call *call, struct transport_message *bytes)
{
    receive(user, DECODE_LIST_SESSIONS, call, bytes);
}

static void on_close(void *user, struct transport_call *call, struct transport_message *bytes)
{
    receive(user, DECODE_CLOSE_SESSION, call, bytes);
}

void decode_service_methods(struct decode_node *node, struct transport_method out[DECODE_METHODS])
{
    const struct transport_method methods[DECODE_METHODS] = {
        {"/baton.v1.Decode/Generate", TRANSPORT_SERVER_STREAM, on_generate, node},
        {"/baton.v1.Decode/Describe", TRANSPORT_UNARY, on_describe, node},
        {"/baton.v1.Decode/ListSessions", TRANSPORT_UNARY, on_list, node},
        {"/baton.v1.Decode/CloseSession", TRANSPORT_UNARY, on_close, node},
    };

    memcpy(out, methods, sizeof(methods));
}

/* ---- Front worker ---- */

static void refuse(struct decode_request *r, int status, const char *details)
{
    if (r->method == DECODE_GENERATE)
        decode_request_log(r, status, details);
    decode_sessions_give_back(&r->node->sessions, r->session, NULL);
    r->session = NULL;
    transport_call_finish(r->call, status, details);
    decode_request_unref(r);
}

static void front_generate(struct decode_node *node, struct decode_request *r)
{
    struct kv_why why = {.text = ""};
    int status = decode_request_check(r, &why);
    uint32_t n_waiting;

    if (status != TRANSPORT_OK) {
        refuse(r, status, why.text);
        return;
    }
    n_waiting = atomic_fetch_add(&node->n_waiting, 1);
    if (n_waiting >= node->options->serve.queue) {
        atomic_fetch_sub(&node->n_waiting, 1);
        kv_fail(&why, 0, "queue: %u requests wait already", n_waiting);
        refuse(r, TRANSPORT_RESOURCE_EXHAUSTED, why.text);
        return;
    }
    node_inbox_put(&node->inbox, &r->mail.link);
}

/* Answer a unary call, and let go of it. */
static void answer(struct decode_request *r, const ProtobufCMessage *reply)
{
    struct transport_out *out = node_message_pack(reply);

    if (out == NULL) {
        refuse(r, TRANSPORT_RESOURCE_EXHAUSTED, "no memory for a reply");
        return;
    }
    transport_call_send(r->call, out);
    transport_call_finish(r->call, TRANSPORT_OK, NULL);
    decode_request_unref(r);
}

/* Strings of the model and the command line, as protobuf-c wants them. */
static char *borrowed(const char *s)
{
    char *p;

    memcpy(&p, &s, sizeof(p));
    return p;
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
    reply.sessions = decode_sessions_count(&node->sessions);
    reply.prefill_serving = peers;
    for (uint32_t i = 0; i < node->peers.n; i++) {
        if (atomic_load(&node->peers.items[i].serving))
            peers[reply.n_prefill_serving++] = borrowed(node->peers.items[i].address);
    }
    answer(r, &reply.base);
}

static void front_list(struct decode_node *node, struct decode_request *r)
{
    uint32_t max = node->options->max_sessions, n;
    struct decode_session_info *info = calloc(max, sizeof(*info));
    Baton__V1__SessionInfo *items = calloc(max, sizeof(*items));
    Baton__V1__SessionInfo **list = calloc(max, sizeof(Baton__V1__SessionInfo *));
    Baton__V1__ListSessionsReply reply = BATON__V1__LIST_SESSIONS_REPLY__INIT;

    if (info == NULL || items == NULL || list == NULL) {
        refuse(r, TRANSPORT_RESOURCE_EXHAUSTED, "no memory for a reply");
        goto out;
    }
    n = decode_sessions_list(&node->sessions, info, max);
    for (uint32_t i = 0; i < n; i++) {
        baton__v1__session_info__init(&items[i]);
        items[i].name = info[i].name;
        items[i].tokens = info[i].n_ids;
        items[i].busy = info[i].busy;
        items[i].idle_ns = info[i].idle_ns;
        list[i] = &items[i];
    }
    reply.sessions = list;
    reply.n_sessions = n;
    answer(r, &reply.base);
out:
    free(list);
    free(items);
    free(info);
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
        if (decode_session_name_ok(q->name, node_message_strlen(q->name)))
            status = decode_sessions_close(&node->sessions, q->name, &why);
        else
            kv_fail(&why, 0, "name: %zu bytes are not 1 to %d of [A-Za-z0-9._-]",
                    node_message_strlen(q->name), (int)DECODE_SESSION_NAME);
    }
    if (status == TRANSPORT_OK)
        answer(r, &reply.base);
    else
        refuse(r, status, why.text);
}

void *decode_service_front(void *arg)
{
    static void (*const work[])(struct decode_node *, struct decode_request *) = {
        [DECODE_GENERATE] = front_generate,
        [DECODE_DESCRIBE] = front_describe,
        [DECODE_LIST_SESSIONS] = front_list,
        [DECODE_CLOSE_SESSION] = front_close,
    };
    struct decode_node *node = arg;
    struct decode_request *r;

    while ((r = node_queue_pop(&node->front, -1)) != NULL)
        work[r->method](node, r);
    return NULL;
}

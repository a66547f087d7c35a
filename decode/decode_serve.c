#include "decode/decode.h"
#include "decode/decode_flight.h"
#include "decode/decode_scheduler.h"
#include "decode/decode_service.h"
#include "decode/decode_store.h"

#include <inttypes.h>
#include <string.h>

void decode_node_namespace(const struct decode_node *node, const void *salt, size_t salt_len,
                           struct kv_namespace *out)
{
    const struct kv_namespace_fields fields = {
        .tenant = DECODE_TENANT,
        .salt = salt,
        .salt_len = salt_len,
        .fingerprint = node->identity.fingerprint,
        .numerics_id = node->identity.numerics_id,
        .precision = node->identity.geometry.precision,
    };

    kv_namespace_digest(&fields, &out->digest);
    out->group = 0;
}

static int fail(const char *what, const char *why)
{
    fprintf(stderr, "baton-decode: %s%s%s\n", what, why[0] != '\0' ? ": " : "", why);
    return NODE_EXIT_FAILED;
}

/* ---- The model ---- */

static int open_text(struct decode_node *node)
{
    struct kv_why why = {.text = ""};
    int rc = tokenizer_open(node->runtime.gguf, &node->tokenizer, &why);

    if (rc < 0)
        return fail(node->options->serve.model, why.text);
    /* A file whose template is not known still serves text and ids. */
    if (chat_open(node->runtime.gguf, node->tokenizer, &node->chat, &node->chat_why) < 0) {
        char quoted[512];

        node->chat = NULL;
        node_log(NODE_WARN, "chat", "why=%s",
                 node_quote(quoted, sizeof(quoted), node->chat_why.text));
    }
    return NODE_EXIT_OK;
}

static int open_model(struct decode_node *node)
{
    const struct node_serve *o = &node->options->serve;
    const struct runtime_config config = {
        .path = o->model,
        .kernels = o->kernels,
        .precision = (enum kv_precision)kv_precision_parse(o->precision),
        .page_tokens = o->page_tokens,
        .n_pages = o->n_pages,
        .kv_bytes = o->kv_bytes != 0 ? o->kv_bytes : node_default_kv_bytes(),
        .n_threads = o->threads,
        .chunk = o->chunk,
        .max_items = node->options->max_batch,
        .max_context = o->max_context,
    };
    struct kv_why why = {.text = ""};
    int rc = runtime_open(&config, &node->runtime, &why);

    if (rc == MODEL_ERR_OPTION) {
        fail(why.text, "");
        return NODE_EXIT_USAGE;
    }
    if (rc < 0)
        return fail(o->model, why.text[0] != '\0' ? why.text : model_strerror(rc));
    node_random(node->identity.epoch, sizeof(node->identity.epoch));
    node->identity.fingerprint = *model_fingerprint(node->runtime.model);
    node->identity.numerics_id = *model_numerics_id(node->runtime.model);
    node->identity.geometry = node->runtime.geometry;
    return open_text(node);
}

static void close_model(struct decode_node *node)
{
    chat_close(node->chat);
    tokenizer_close(node->tokenizer);
    runtime_close(&node->runtime);
}

/* ---- The service ---- */

static int open_server(struct decode_node *node)
{
    static const char *const services[] = {"baton.v1.Decode", "baton.v1.Snapshots",
                                           "baton.v1.Operator", NULL};
    static const char *const while_draining[] = {"/baton.v1.Decode/Describe",
                                                 "/baton.v1.Operator/Audit", NULL};
    struct transport_method methods[DECODE_METHODS + NODE_OPERATOR_METHODS];
    const struct transport_server_config config = {
        .listen = node->options->serve.listen,
        .methods = methods,
        .n_methods = DECODE_METHODS + NODE_OPERATOR_METHODS,
        .services = services,
        .while_draining = while_draining,
        .max_calls = node->max_requests,
        .call_queue_bytes = DECODE_CALL_QUEUE_BYTES,
    };
    char error[TRANSPORT_DETAIL_BYTES] = "";
    int rc;

    decode_service_methods(node, methods);
    node_operator_methods(node->operator, methods + DECODE_METHODS);
    rc = transport_server_open(&config, &node->server, error);
    if (rc == 0)
        return NODE_EXIT_OK;
    fail(error, "");
    return rc == TRANSPORT_ERR_ADDRESS ? NODE_EXIT_UNAVAILABLE : NODE_EXIT_FAILED;
}

static void log_settings(const struct decode_node *node)
{
    const struct runtime *rt = &node->runtime;
    const struct model_params *p = model_params(rt->model);
    uint64_t kv_bytes = (uint64_t)rt->n_pages * kv_cache_layout(rt->cache)->page_bytes;
    char name[128];

    node_log(NODE_INFO, "settings",
             "port=%d model=%s kv_bytes=%" PRIu64 " pages=%" PRIu32 " page=%" PRIu32
             " kv_precision=%s chunk=%" PRIu32 " threads=%" PRIu32 " kernels=%s context=%" PRIu32
             " queue=%" PRIu32 " max_batch=%" PRIu32 " max_sessions=%" PRIu32 " max_tokens=%" PRIu32
             " remote_min=%" PRIu32 " prefill_nodes=%" PRIu32 " chat=%s tokens_per_second=%" PRIu32,
             transport_server_port(node->server), node_quote(name, sizeof(name), p->name), kv_bytes,
             rt->n_pages, rt->page_tokens, kv_precision_name(rt->geometry.precision),
             runtime_chunk(rt, RUNTIME_STEP_MS), engine_n_threads(rt->engine),
             model_kernels(rt->model), rt->n_ctx, node->options->serve.queue,
             node->options->max_batch, node->options->max_sessions, node->options->max_tokens,
             node->options->remote_min, node->peers.n,
             node->chat != NULL ? chat_name(node->chat) : "none", atomic_load(&rt->rows_per_s));
}

/* Ready, until a signal comes; then the open calls have the grace time.  After
 * transport_server_close() no call is left, so no request is. */
static int serve(struct decode_node *node)
{
    const struct node_serve *o = &node->options->serve;
    int signal;

    if (node_serve_ready(o, "baton-decode", transport_server_port(node->server)) < 0) {
        transport_server_close(node->server, 0);
        return NODE_EXIT_FAILED;
    }
    log_settings(node);
    transport_server_set_serving(node->server, true);
    signal = node_signals_wait();
    node_log(NODE_INFO, "drain", "signal=%d calls=%" PRIu32, signal,
             transport_server_n_calls(node->server));
    transport_server_close(node->server, o->grace_ms);
    node_log(NODE_INFO, "stopped", "signal=%d", signal);
    return NODE_EXIT_OK;
}

/* ---- Threads: started in this order, and stopped in the reverse, for each leaves things to those
 * before it.  (The I/O thread leaves turns to the front worker, too; but when threads are stopped
 * no call is left.) ---- */

enum { RECEIVE, SCHEDULER, STORE, FRONT, WATCH, N_THREADS };

struct threads {
    pthread_t ids[N_THREADS];
    bool run[N_THREADS];
};

static void stop_thread(struct decode_node *node, int which)
{
    switch (which) {
    case WATCH:
        decode_peers_stop(&node->peers);
        break;
    case FRONT:
        node_queue_close(&node->front);
        break;
    case STORE:
        decode_store_stop(node->store);
        break;
    case SCHEDULER:
    case RECEIVE:
        atomic_store(&node->stopping, true);
        node_inbox_wake(&node->inbox);
        node_inbox_wake(&node->receive);
        break;
    }
}

static void stop_threads(struct decode_node *node, const struct threads *t)
{
    for (int i = N_THREADS - 1; i >= 0; i--) {
        if (!t->run[i])
            continue;
        stop_thread(node, i);
        pthread_join(t->ids[i], NULL);
    }
}

static bool start_threads(struct decode_node *node, struct threads *t)
{
    void *(*const run[N_THREADS])(void *) = {decode_flight_receive, decode_scheduler_run,
                                             decode_store_run, decode_service_front,
                                             decode_peers_watch};
    void *const args[N_THREADS] = {node, node->scheduler, node->store, node, &node->peers};

    for (int i = 0; i < N_THREADS; i++) {
        if (i == STORE && node->store == NULL)
            continue;
        if (pthread_create(&t->ids[i], NULL, run[i], args[i]) != 0)
            return false;
        t->run[i] = true;
    }
    return true;
}

static int run_threads(struct decode_node *node)
{
    struct threads threads = {.run = {false}};
    int rc = NODE_EXIT_FAILED;

    if (!start_threads(node, &threads) ||
        node_operator_open(node->runtime.cache, &node->operator) < 0) {
        fail("cannot start a thread", "");
    } else {
        rc = open_server(node);
        if (rc == NODE_EXIT_OK)
            rc = serve(node);
    }
    node_operator_close(node->operator);
    stop_threads(node, &threads);
    return rc;
}

static int open_peers(struct decode_node *node)
{
    const struct runtime *rt = &node->runtime;
    uint32_t record = node_record_bytes(&rt->geometry, rt->n_ctx, model_params(rt->model)->n_vocab);
    char error[TRANSPORT_DETAIL_BYTES] = "";

    if (decode_peers_open(&node->peers, &node->options->prefill, record, error) < 0)
        return fail("--prefill", error);
    return NODE_EXIT_OK;
}

static int open_store(struct decode_node *node)
{
    struct kv_why why = {.text = ""};

    if (decode_store_open(node, &node->store, &why) < 0)
        return fail("--snapshots", why.text);
    return NODE_EXIT_OK;
}

static int run_node(struct decode_node *node)
{
    int rc = NODE_EXIT_FAILED;

    if (decode_sessions_init(&node->sessions, node->options->max_sessions) < 0)
        return fail("no memory", "");
    if (node_queue_init(&node->front, node->max_requests) < 0)
        goto no_front;
    if (node_inbox_init(&node->inbox) < 0)
        goto no_inbox;
    if (node_inbox_init(&node->receive) < 0)
        goto no_receive;
    rc = open_peers(node);
    if (rc == NODE_EXIT_OK)
        rc = open_store(node);
    if (rc == NODE_EXIT_OK && decode_scheduler_open(node, &node->scheduler) == 0)
        rc = run_threads(node);
    else if (rc == NODE_EXIT_OK)
        rc = fail("no memory", "");
    decode_scheduler_close(node->scheduler);
    decode_store_close(node->store);
    decode_peers_close(&node->peers);
    node_inbox_release(&node->receive);
no_receive:
    node_inbox_release(&node->inbox);
no_inbox:
    node_queue_release(&node->front);
no_front:
    decode_sessions_release(&node->sessions);
    return rc;
}

int decode_serve(const struct decode_options *options)
{
    struct decode_node node = {.options = options};
    int rc = node_serve_begin(&options->serve, "baton-decode");

    if (rc != NODE_EXIT_OK)
        return rc;
    node.max_requests = options->serve.queue + options->max_batch + DECODE_EXTRA_CALLS;
    rc = open_model(&node);
    if (rc == NODE_EXIT_OK)
        rc = run_node(&node);
    close_model(&node);
    return rc;
}

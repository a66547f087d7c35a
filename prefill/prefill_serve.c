#include "prefill/prefill.h"
#include "prefill/prefill_node.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static int open_runtime(struct prefill_node *node)
{
    const struct node_serve *o = node->options;
    const struct runtime_config config = {
        .path = o->model,
        .kernels = o->kernels,
        .precision = (enum kv_precision)kv_precision_parse(o->precision),
        .page_tokens = o->page_tokens,
        .n_pages = o->n_pages,
        .kv_bytes = o->kv_bytes != 0 ? o->kv_bytes : node_default_kv_bytes(),
        .n_threads = o->threads,
        .chunk = o->chunk,
        .max_items = 1,
        .max_context = o->max_context,
    };
    struct kv_why why = {.text = ""};
    int rc = runtime_open(&config, &node->runtime, &why);

    if (rc == MODEL_ERR_OPTION) {
        fprintf(stderr, "baton-prefill: %s\n", why.text);
        return NODE_EXIT_USAGE;
    }
    if (rc < 0) {
        fprintf(stderr, "baton-prefill: %s: %s\n", o->model,
                why.text[0] != '\0' ? why.text : model_strerror(rc));
        return NODE_EXIT_FAILED;
    }
    node_random(node->identity.epoch, sizeof(node->identity.epoch));
    node->identity.fingerprint = *model_fingerprint(node->runtime.model);
    node->identity.numerics_id = *model_numerics_id(node->runtime.model);
    node->identity.geometry = node->runtime.geometry;
    return NODE_EXIT_OK;
}

static void size_buffers(struct prefill_node *node)
{
    const struct kv_geometry *g = &node->runtime.geometry;
    size_t frame = kv_frame_positions(g) * kv_position_bytes(g);

    node->staging_bytes = PREFILL_STAGING_BYTES;
    if (node->staging_bytes < 2 * frame)
        node->staging_bytes = 2 * frame;
    node->max_jobs = node->options->queue + PREFILL_ACTIVE_CALLS;
}

static int open_server(struct prefill_node *node)
{
    static const char *const services[] = {"baton.v1.Prefill", "baton.v1.Operator", NULL};
    static const char *const while_draining[] = {"/baton.v1.Operator/Audit", NULL};
    struct transport_method methods[1 + NODE_OPERATOR_METHODS] = {
        {"/baton.v1.Prefill/Compute", TRANSPORT_SERVER_STREAM, prefill_service_compute, node}};
    const struct runtime *rt = &node->runtime;
    const uint32_t record =
        node_record_bytes(&rt->geometry, rt->n_ctx, model_params(rt->model)->n_vocab);
    const struct transport_server_config config = {
        .listen = node->options->listen,
        .methods = methods,
        .n_methods = 1 + NODE_OPERATOR_METHODS,
        .services = services,
        .while_draining = while_draining,
        .max_message_bytes = record,
        .max_calls = node->max_jobs,
        /* Beside the staged frames a header, the logits and the seal must always fit. */
        .call_queue_bytes = (uint32_t)node->staging_bytes + 2 * record,
    };
    char error[TRANSPORT_DETAIL_BYTES];
    int rc;

    node_operator_methods(node->operator, methods + 1);
    rc = transport_server_open(&config, &node->server, error);
    if (rc == 0)
        return NODE_EXIT_OK;
    fprintf(stderr, "baton-prefill: %s\n", error);
    return rc == TRANSPORT_ERR_ADDRESS ? NODE_EXIT_UNAVAILABLE : NODE_EXIT_FAILED;
}

static void log_settings(const struct prefill_node *node)
{
    const struct runtime *rt = &node->runtime;
    const struct model_params *p = model_params(rt->model);
    uint64_t kv_bytes = (uint64_t)rt->n_pages * kv_cache_layout(rt->cache)->page_bytes;
    char name[128];

    node_log(NODE_INFO, "settings",
             "port=%d model=%s kv_bytes=%" PRIu64 " pages=%" PRIu32 " page=%" PRIu32
             " kv_precision=%s chunk=%" PRIu32 " threads=%" PRIu32 " kernels=%s context=%" PRIu32
             " queue=%" PRIu32 " tokens_per_second=%" PRIu32,
             transport_server_port(node->server), node_quote(name, sizeof(name), p->name), kv_bytes,
             rt->n_pages, rt->page_tokens, kv_precision_name(rt->geometry.precision),
             runtime_chunk(rt, RUNTIME_STEP_MS), engine_n_threads(rt->engine),
             model_kernels(rt->model), rt->n_ctx, node->options->queue,
             atomic_load(&rt->rows_per_s));
}

/* Ready, until a signal comes; then the open calls have the grace time.  After
 * transport_server_close() no call is left, so no job is. */
static int serve(struct prefill_node *node)
{
    int signal;

    if (node_serve_ready(node->options, "baton-prefill", transport_server_port(node->server)) < 0) {
        transport_server_close(node->server, 0);
        return NODE_EXIT_FAILED;
    }
    log_settings(node);
    transport_server_set_serving(node->server, true);
    signal = node_signals_wait();
    node_log(NODE_INFO, "drain", "signal=%d calls=%" PRIu32, signal,
             transport_server_n_calls(node->server));
    transport_server_close(node->server, node->options->grace_ms);
    node_log(NODE_INFO, "stopped", "signal=%d", signal);
    return NODE_EXIT_OK;
}

static int run_server(struct prefill_node *node)
{
    int rc = NODE_EXIT_FAILED;

    if (node_operator_open(node->runtime.cache, &node->operator) < 0) {
        fprintf(stderr, "baton-prefill: cannot start a thread\n");
        return rc;
    }
    rc = open_server(node);
    if (rc == NODE_EXIT_OK)
        rc = serve(node);
    node_operator_close(node->operator);
    return rc;
}

static int run_threads(struct prefill_node *node)
{
    pthread_t front, scheduler;
    int rc = NODE_EXIT_FAILED;

    if (pthread_create(&front, NULL, prefill_service_front, node) != 0) {
        fprintf(stderr, "baton-prefill: cannot start a thread\n");
        return rc;
    }
    if (pthread_create(&scheduler, NULL, prefill_scheduler_run, node) == 0) {
        rc = run_server(node);
        atomic_store(&node->stopping, true);
        node_inbox_wake(&node->inbox);
        pthread_join(scheduler, NULL);
    }
    node_queue_close(&node->front);
    pthread_join(front, NULL);
    return rc;
}

int prefill_serve(const struct node_serve *options)
{
    struct prefill_node node = {.options = options};
    int rc = node_serve_begin(options, "baton-prefill");

    if (rc != NODE_EXIT_OK)
        return rc;
    rc = open_runtime(&node);
    if (rc != NODE_EXIT_OK)
        return rc;
    size_buffers(&node);
    rc = NODE_EXIT_FAILED;
    node.jobs = calloc(node.max_jobs, sizeof(struct prefill_job *));
    if (node.jobs == NULL || node_queue_init(&node.front, node.max_jobs) < 0)
        goto out;
    if (node_inbox_init(&node.inbox) == 0) {
        rc = run_threads(&node);
        node_inbox_release(&node.inbox);
    }
    node_queue_release(&node.front);
out:
    free(node.jobs);
    runtime_close(&node.runtime);
    return rc;
}

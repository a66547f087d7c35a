/* Audits, one at a time, on a thread of their own: they wait for the locks of the cache, which a
 * handler must not.
 *
 * A call's life: the handler leaves it in the queue, the thread answers it and lets go of it.  The
 * server is closed first, which waits for all calls, so none is left when the thread ends. */
#include "node/node.h"

#include "proto/proto.h"
#include "transport/transport.h"

#include <inttypes.h>
#include <stdlib.h>

struct node_operator {
    struct kv_cache *cache;
    struct node_queue calls; /* of transport_call, a reference each */
    pthread_t thread;
};

void node_pages_fill(const struct kv_stats *stats, Baton__V1__Pages *out)
{
    baton__v1__pages__init(out);
    out->total = stats->n_pages;
    out->free = stats->n_free;
    out->live = stats->n_live;
    out->reserved = stats->n_reserved;
    out->evictable = stats->n_evictable;
}

static void answer(struct transport_call *call, const struct kv_stats *stats, char *fault,
                   int64_t took_ns)
{
    Baton__V1__AuditReply reply = BATON__V1__AUDIT_REPLY__INIT;
    Baton__V1__Pages pages;
    struct transport_out *out;

    node_pages_fill(stats, &pages);
    reply.fault = fault;
    reply.pages = &pages;
    reply.contexts = stats->n_contexts;
    reply.entries = stats->n_entries;
    reply.nodes = stats->n_nodes;
    reply.bookkeeping_bytes = stats->bookkeeping_bytes;
    reply.took_ns = (uint64_t)took_ns;
    out = node_message_pack(&reply.base);
    if (out == NULL) {
        transport_call_finish(call, TRANSPORT_RESOURCE_EXHAUSTED, "no memory for a reply");
        return;
    }
    transport_call_send(call, out);
    transport_call_finish(call, TRANSPORT_OK, NULL);
}

static void audit(struct kv_cache *cache, struct transport_call *call)
{
    const int64_t start_ns = node_now_ns();
    struct kv_why why = {.text = ""};
    struct kv_stats stats;
    char quoted[2 * sizeof(why.text)];
    int64_t took_ns;
    int rc;

    rc = kv_cache_check(cache, &why);
    took_ns = node_now_ns() - start_ns;
    if (rc == KV_ERR_NOMEM) {
        transport_call_finish(call, TRANSPORT_RESOURCE_EXHAUSTED, why.text);
        return;
    }
    node_log(rc == 0 ? NODE_INFO : NODE_ERROR, "audit", "fault=%s took_us=%" PRId64,
             node_quote(quoted, sizeof(quoted), why.text), took_ns / 1000);
    kv_cache_stats(cache, &stats);
    answer(call, &stats, why.text, took_ns);
}

static void *run(void *arg)
{
    struct node_operator *op = arg;
    struct transport_call *call;

    while ((call = node_queue_pop(&op->calls, -1)) != NULL) {
        if (transport_call_cancelled(call))
            transport_call_finish(call, TRANSPORT_CANCELLED, NULL);
        else
            audit(op->cache, call);
        transport_call_unref(call);
    }
    return NULL;
}

static void on_audit(void *user, struct transport_call *call, struct transport_message *bytes)
{
    struct node_operator *op = user;

    (void)bytes; /* the request says nothing */
    if (node_queue_push(&op->calls, call))
        return;
    transport_call_finish(call, TRANSPORT_RESOURCE_EXHAUSTED, "too many audits wait");
    transport_call_unref(call);
}

int node_operator_open(struct kv_cache *cache, struct node_operator **out)
{
    struct node_operator *op = calloc(1, sizeof(*op));

    if (op == NULL)
        return -1;
    op->cache = cache;
    if (node_queue_init(&op->calls, NODE_OPERATOR_WAITING) < 0)
        goto no_queue;
    if (pthread_create(&op->thread, NULL, run, op) != 0)
        goto no_thread;
    *out = op;
    return 0;

no_thread:
    node_queue_release(&op->calls);
no_queue:
    free(op);
    return -1;
}

void node_operator_methods(struct node_operator *op, struct transport_method *out)
{
    out[0] = (struct transport_method){"/baton.v1.Operator/Audit", TRANSPORT_UNARY, on_audit, op};
}

void node_operator_close(struct node_operator *op)
{
    if (op == NULL)
        return;
    node_queue_close(&op->calls);
    pthread_join(op->thread, NULL);
    node_queue_release(&op->calls);
    free(op);
}

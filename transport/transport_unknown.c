/* Calls of methods that the server does not have.  Without a request posted for them they would
 * hang until the client's deadline; so each gets one batch: its close, and UNIMPLEMENTED. */
#include "transport/transport_server.h"

#include <grpc/slice.h>
#include <stdlib.h>
#include <string.h>

struct unknown {
    struct transport_tag accepted, answered;
    struct transport_server *server;
    grpc_completion_queue *cq;
    grpc_call *call;
    grpc_call_details details;
    grpc_metadata_array metadata;
    int close_flag;
    bool repost; /* as in a call */
};

static void unknown_accepted(struct transport_tag *tag, bool ok);
static void unknown_answered(struct transport_tag *tag, bool ok);

static void unknown_init(struct unknown *u, struct transport_server *s, grpc_completion_queue *cq)
{
    memset(u, 0, sizeof(*u));
    u->accepted.fn = unknown_accepted;
    u->answered.fn = unknown_answered;
    u->server = s;
    u->cq = cq;
    grpc_call_details_init(&u->details);
    grpc_metadata_array_init(&u->metadata);
}

static void unknown_release(struct unknown *u)
{
    if (u->call)
        grpc_call_unref(u->call);
    grpc_call_details_destroy(&u->details);
    grpc_metadata_array_destroy(&u->metadata);
}

/* Takes it, also on failure. */
static int unknown_post(struct unknown *u)
{
    transport_cq_give(&u->accepted);
    if (grpc_server_request_call(u->server->grpc, &u->call, &u->details, &u->metadata, u->cq, u->cq,
                                 &u->accepted) != GRPC_CALL_OK) {
        unknown_release(u);
        free(u);
        return TRANSPORT_ERR_CLOSED;
    }
    return 0;
}

static void unknown_answered(struct transport_tag *tag, bool ok)
{
    struct unknown *u = TRANSPORT_CONTAINER(tag, struct unknown, answered);
    struct transport_server *s = u->server;
    bool repost = u->repost;

    (void)ok;
    unknown_release(u);
    if (repost) {
        unknown_init(u, s, u->cq);
        unknown_post(u);
    } else {
        free(u);
    }
    server_call_ended(s, false);
    server_call_freed(s);
}

static void unknown_answer(struct unknown *u)
{
    char text[TRANSPORT_DETAIL_BYTES] = "unknown method ";
    size_t n = strlen(text), length = GRPC_SLICE_LENGTH(u->details.method);
    grpc_slice details;
    grpc_op ops[3];
    size_t n_ops = 0;
    grpc_op *op;

    if (length > sizeof(text) - n - 1)
        length = sizeof(text) - n - 1;
    memcpy(text + n, GRPC_SLICE_START_PTR(u->details.method), length);
    details = grpc_slice_from_copied_buffer(text, n + length);
    transport_cq_op(ops, &n_ops, GRPC_OP_RECV_CLOSE_ON_SERVER)
        ->data.recv_close_on_server.cancelled = &u->close_flag;
    transport_cq_op(ops, &n_ops, GRPC_OP_SEND_INITIAL_METADATA);
    op = transport_cq_op(ops, &n_ops, GRPC_OP_SEND_STATUS_FROM_SERVER);
    op->data.send_status_from_server.status = GRPC_STATUS_UNIMPLEMENTED;
    op->data.send_status_from_server.status_details = &details;
    if (!transport_cq_batch(u->call, ops, n_ops, &u->answered))
        unknown_answered(&u->answered, false);
    grpc_slice_unref(details);
}

static void unknown_accepted(struct transport_tag *tag, bool ok)
{
    struct unknown *u = TRANSPORT_CONTAINER(tag, struct unknown, accepted);

    if (!ok) {
        unknown_release(u);
        free(u);
        return;
    }
    u->repost = server_unknown_post(u->server, u->cq) == TRANSPORT_ERR_NOMEM;
    server_call_begins(u->server, NULL);
    unknown_answer(u);
}

int server_unknown_post(struct transport_server *s, grpc_completion_queue *cq)
{
    struct unknown *u = malloc(sizeof(*u));

    if (!u)
        return TRANSPORT_ERR_NOMEM;
    unknown_init(u, s, cq);
    return unknown_post(u);
}

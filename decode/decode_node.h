/* What the threads of a decode node share.  Private to decode. */
#ifndef DECODE_NODE_H
#define DECODE_NODE_H

#include "decode/decode.h"
#include "decode/decode_peer.h"
#include "decode/decode_session.h"
#include "model/model.h"
#include "node/node.h"
#include "proto/proto.h"
#include "transport/transport.h"

#include <stdatomic.h>

/* Every bound of this module; decode_peer.h and decode_session.h have theirs. */
enum {
    /* A request whose reader leaves more than this unread is not stepped until there is room. */
    DECODE_PAUSE_BYTES = 64 * 1024,
    /* Beside it, what the messages of one step and an end may take. */
    DECODE_CALL_QUEUE_BYTES = 1024 * 1024,
    /* A reader that takes nothing for so long is ended. */
    DECODE_STALL_MS = 30000,
    /* A request ends after this where its caller set no earlier deadline. */
    DECODE_MAX_REQUEST_MS = 3600 * 1000,
    /* How often deadlines and stalls are looked at when nothing happens. */
    DECODE_TICK_MS = 50,
    /* A step with a prompt's chunk in it, while others stream. */
    DECODE_SHARED_STEP_MS = 50,
    DECODE_MAX_TEMPERATURE = 100,
    DECODE_MAX_STOP_IDS = 64,
    /* Calls beside those that wait or run: unary ones, and those whose end is not read yet. */
    DECODE_EXTRA_CALLS = 64,
    DECODE_WHY_BYTES = 512,
};

/* Namespaces are derived from it until clients have tenants of their own. */
#define DECODE_TENANT "default"

/* What is in an inbox of this module. */
enum decode_mail_kind {
    DECODE_MAIL_REQUEST, /* to the scheduler, or the I/O thread: struct decode_request */
    DECODE_MAIL_SEED,    /* to the scheduler: struct decode_seed */
    DECODE_MAIL_FLIGHT,  /* to the scheduler: struct decode_flight, its stream is over */
    DECODE_MAIL_MESSAGE, /* to the receive worker: struct decode_flight, a message came */
    DECODE_MAIL_END,     /* to the receive worker: struct decode_flight, the call ended */
};

struct decode_mail {
    struct node_link link; /* first */
    enum decode_mail_kind kind;
    void *item;
};

struct decode_node {
    /* Set before any thread starts, read-only afterwards. */
    const struct decode_options *options;
    struct runtime runtime;
    struct tokenizer *tokenizer;
    struct chat *chat;      /* NULL: the file has no template that is known */
    struct kv_why chat_why; /* then, why */
    struct node_identity identity;
    struct transport_server *server;
    struct node_operator *operator;
    uint32_t max_requests; /* in the scheduler's table */

    struct decode_peers peers;
    struct decode_sessions sessions;
    struct node_queue front;   /* of struct decode_request */
    struct node_inbox inbox;   /* of struct decode_mail, the scheduler's */
    struct node_inbox receive; /* of struct decode_mail, the receive worker's */
    struct decode_scheduler *scheduler;
    struct decode_store *store; /* NULL: there is no directory for snapshots */

    /* For Describe and the bound of the queue; relaxed counts of the scheduler's table. */
    atomic_uint n_waiting; /* past the front worker, not admitted */
    atomic_uint n_running; /* admitted */
    atomic_uint n_flights; /* calls to prefill nodes that have not ended */

    atomic_bool stopping; /* no request is left and none will come */
};

void decode_node_namespace(const struct decode_node *node, const void *salt, size_t salt_len,
                           struct kv_namespace *out);

#endif

/* What the threads of a prefill node share.  Private to prefill. */
#ifndef PREFILL_NODE_H
#define PREFILL_NODE_H

#include "model/model.h"
#include "node/node.h"
#include "proto/proto.h"
#include "transport/transport.h"

#include <stdatomic.h>

/* Every bound of this module. */
enum {
    /* Frames of a call that wait for its receiver, or two frames where those are larger.  More stay
     * in pages. */
    PREFILL_STAGING_BYTES = 8 * 1024 * 1024,
    /* A receiver that takes no further frame for so long is ended. */
    PREFILL_STALL_MS = 10000,
    /* A call ends after this where its caller set no earlier deadline. */
    PREFILL_MAX_CALL_MS = 3600 * 1000,
    /* How often deadlines and stalls are looked at when nothing happens. */
    PREFILL_TICK_MS = 50,
    /* Calls beside those that wait: being computed or sent. */
    PREFILL_ACTIVE_CALLS = 64,
    PREFILL_TENANT_BYTES = 64,
    PREFILL_SALT_BYTES = 64,
};

struct prefill_node {
    /* Set before any thread starts, read-only afterwards. */
    const struct node_serve *options;
    struct runtime runtime;
    struct node_identity identity;
    struct transport_server *server;
    struct node_operator *operator;
    size_t staging_bytes;
    uint32_t max_jobs;
    struct prefill_job **jobs; /* [max_jobs]; the scheduler's */

    struct node_queue front; /* of jobs: handlers to the front worker */
    struct node_inbox inbox; /* of jobs: front worker to scheduler */
    atomic_uint n_queued;    /* jobs past the front worker that are not admitted; a hint */
    atomic_bool stopping;    /* no job is left and none will come */
};

/* A call to Compute.
 *
 *   QUEUED      holds nothing but its request
 *   COMPUTING   a live context with a reservation for the whole prompt; frames leave as they fill
 *   SENDING     the context is frozen and in the tree; frames, logits and seal leave as there is
 * room DRAINING    everything, the status too, is in the call's send queue; no context
 *
 * References: one of whoever works on it (handler, front worker, scheduler, in this order), and one
 * of transport's events until on_done. */
enum prefill_state { PREFILL_QUEUED, PREFILL_COMPUTING, PREFILL_SENDING, PREFILL_DRAINING };

struct prefill_job {
    struct node_link link; /* first: in the scheduler's inbox */
    atomic_int refs;
    struct prefill_node *node;
    struct transport_call *call;
    struct transport_message *bytes; /* the request, until the front worker has unpacked it */
    int64_t arrived_ns;
    int64_t deadline_ns;

    /* Set by the front worker, read-only afterwards. */
    struct node_message message;
    const Baton__V1__ComputeRequest *request;
    struct kv_namespace ns;

    /* The scheduler's. */
    enum prefill_state state;
    struct kv_context *ctx;
    struct kv_encoder *encoder;
    float *logits; /* [n_vocab] */
    uint32_t n_matched;
    uint32_t n_computed;
    uint64_t waited_rows; /* computed for others since it had its last turn */
    int64_t admitted_ns;
    int64_t compute_start_ns;
    int64_t compute_end_ns;
    int64_t compute_end_wall_ns;
    int64_t blocked_ns; /* since when a frame waits for room; 0: none does */
    uint32_t n_frames;
    uint64_t n_bytes; /* of records */
};

struct prefill_job *prefill_job_new(struct prefill_node *node, struct transport_call *call,
                                    struct transport_message *request);
void prefill_job_unref(struct prefill_job *job);
/* Unpack and check.  TRANSPORT_OK, or the status to refuse it with and why. */
int prefill_job_check(struct prefill_job *job, struct kv_why *why);
int prefill_job_send_accepted(struct prefill_job *job, uint32_t n_queued);
/* After admission: ctx, n_matched and logits are set.  Opens the encoder and sends the header.
 * TRANSPORT_OK or a status. */
int prefill_job_begin_stream(struct prefill_job *job, struct kv_why *why);
/* Send what can be sent now: frames that are full, and in SENDING the rest, logits and seal, which
 * leads to DRAINING.  TRANSPORT_OK or a status. */
int prefill_job_pump(struct prefill_job *job, struct kv_why *why);
/* Let go of context, encoder and logits. */
void prefill_job_drop(struct prefill_job *job);
/* Log its end.  status is the one that the caller is told. */
void prefill_job_log(const struct prefill_job *job, int status, const char *details);

/* prefill_service.c */
void prefill_service_compute(void *user, struct transport_call *call,
                             struct transport_message *request);
void *prefill_service_front(void *node); /* thread */

/* prefill_scheduler.c */
void *prefill_scheduler_run(void *node); /* thread */

#endif

/* A call to the decode node, from its handler to its end. */
#ifndef DECODE_REQUEST_H
#define DECODE_REQUEST_H

#include "decode/decode_node.h"

struct decode_flight;

/* Where a Generate stands.  All but the first are in the scheduler's table.
 *
 *   NEW         with handler, front worker or I/O thread (its session is restored from disk); no
 *               context
 *   WAITING     checked and tokenized, holds its session; no slot, no context
 *   RECEIVING   has a slot; the context is the flight's, which scatters frames into it
 *   PREFILLING  has a slot and a context that is shorter than the prompt
 *   RUNNING     has a slot and a context; the last of ids is to run next
 *   DRAINING    all replies and the status are in the call's send queue; nothing else is held
 *
 *   NEW -> WAITING                    decode_scheduler's take_in
 *   WAITING -> RECEIVING, PREFILLING, RUNNING     its admit, by what matched and the route
 *   RECEIVING -> RUNNING              sealed
 *   RECEIVING -> RECEIVING, PREFILLING    broken: the next peer, or the rest here; declined: here
 *   RECEIVING -> WAITING              false frames: all of them are dropped, and it starts anew
 * here PREFILLING -> RUNNING             the last chunk RUNNING -> DRAINING decode_scheduler's
 * finish any -> gone                       end
 *
 * References: one of whoever works on it (handler, front worker, perhaps the I/O thread and the
 * front worker again, scheduler, in this order) and one of transport's events until on_done. */
enum decode_state {
    DECODE_NEW,
    DECODE_WAITING,
    DECODE_RECEIVING,
    DECODE_PREFILLING,
    DECODE_RUNNING,
    DECODE_DRAINING,
};

enum decode_method {
    DECODE_GENERATE,
    DECODE_DESCRIBE,
    DECODE_LIST_SESSIONS,
    DECODE_CLOSE_SESSION,
    DECODE_SAVE,
    DECODE_RESTORE,
    DECODE_LIST,
    DECODE_DELETE_SNAPSHOT,
    DECODE_VERIFY,
    DECODE_COMPACT,
    DECODE_METHODS,
};

/* Proto's Usage and Timings, by their names. */
struct decode_usage {
    uint32_t reused, prefill_reused, received, local, generated, frames;
    uint64_t bytes;
};
struct decode_timings {
    int64_t admitted_ns, first_token_ns, last_token_ns; /* moments; 0: not yet */
    int64_t local_start_ns;                             /* a moment, while computing the prompt */
    uint64_t prefill_queue_ns, prefill_ns, local_prefill_ns, exposed_transfer_ns;
};

struct decode_request {
    struct decode_mail mail; /* in the inbox of the scheduler, or of the I/O thread */
    atomic_int refs;
    struct decode_node *node;
    enum decode_method method;
    struct transport_call *call;
    struct transport_message *bytes; /* until the front worker has unpacked it */
    int64_t arrived_ns;
    int64_t deadline_ns;

    /* Set by the front worker, read-only afterwards. */
    struct node_message message;
    const Baton__V1__GenerateRequest *q; /* of a Generate */
    struct decode_session *session;      /* busy; NULL: none */
    struct kv_namespace ns;
    struct sampler_params sampling;
    struct text_stream *text;
    uint32_t n_prompt;
    uint32_t n_dropped;  /* bytes that the vocabulary lacks */
    uint32_t max_tokens; /* what the context has room for, at most */
    bool waits;          /* it is one of node->n_waiting */

    /* The I/O thread's: not to be tried before. */
    int64_t again_ns;

    /* The front worker's, then the scheduler's: prompt, then what was generated.  There is room for
     * max_tokens. */
    struct token_list ids;

    /* The scheduler's. */
    enum decode_state state;
    uint32_t slot; /* which row of logits; valid while a slot is held */
    struct kv_context *ctx;
    struct decode_flight *flight;
    uint64_t tried;       /* peers, a bit each */
    bool local_only;      /* false frames came: no further try elsewhere */
    bool started;         /* `started` was sent */
    bool began;           /* a prefill node has accepted it */
    uint64_t waited_rows; /* prompt rows computed for others since its last chunk */
    int64_t blocked_ns;   /* since when its reader has taken too little; 0: it keeps up */
    char fallback[DECODE_WHY_BYTES];
    struct decode_usage usage;
    struct decode_timings timings;
};

struct decode_request *decode_request_new(struct decode_node *node, enum decode_method method,
                                          struct transport_call *call,
                                          struct transport_message *bytes);
void decode_request_unref(struct decode_request *r);
/* Unpack and check a Generate's fields, and take its session (decode_check.c).  TRANSPORT_OK, or
 * the status to refuse it with and why. */
int decode_request_check(struct decode_request *r, struct kv_why *why);
/* Then, once the session is in memory: the prompt as ids. */
int decode_request_prompt(struct decode_request *r, struct kv_why *why);
/* End a call that no scheduler has: give back its session, tell the caller, let go of it. */
void decode_request_refuse(struct decode_request *r, int status, const char *details);
/* Answer a unary call, and let go of it. */
void decode_request_answer(struct decode_request *r, const ProtobufCMessage *reply);
/* One log line for a Generate that ended. */
void decode_request_log(const struct decode_request *r, int status, const char *details);

/* ---- Replies (decode_reply.c).  0, or a transport_error; ERR_CLOSED where the call has ended.
 * ---- */

int decode_reply_started(struct decode_request *r, const char *prefill);

struct decode_token {
    bool any; /* false: text alone */
    uint32_t id;
    uint64_t digest;
    float logprob;
};

int decode_reply_delta(struct decode_request *r, const struct decode_token *token, const char *text,
                       size_t len);
int decode_reply_finished(struct decode_request *r, Baton__V1__FinishReason reason,
                          const char *stopped_by, size_t len);

#endif

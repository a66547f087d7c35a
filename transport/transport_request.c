/* A client's call.  Two tags: `ended`, for one batch with all that happens once (what is sent, the
 * peer's first metadata, the status), and `received`, for each message asked for.  Its end is when
 * the status is there and no message is asked for; both tags come to the channel's one thread, so
 * exactly one of them sees it.
 *
 * Memory: one reference is transport's own until on_end has returned; the others are owners'. */
#include "transport/transport_channel.h"
#include "transport/transport_message.h"
#include "transport/transport_out.h"
#include "transport/transport_status.h"

#include <assert.h>
#include <grpc/slice.h>
#include <grpc/support/time.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

struct transport_request {
    /* Set by start, read-only afterwards; the channel may be gone after the end. */
    struct transport_channel *channel;
    struct transport_request_events events;
    void *user;

    struct channel_entry entry; /* guarded by the channel's lock */
    atomic_uint refs;
    struct transport_tag ended, received;

    /* gRPC's while a tag is out, then its function's. */
    grpc_metadata_array initial, trailing;
    grpc_status_code code;
    grpc_slice details;
    grpc_byte_buffer *sent, *got;
    bool ask_failed;
    bool no_memory; /* for a message that came */

    pthread_mutex_t lock;
    /* Guarded by lock. */
    grpc_call *grpc;  /* NULL once it is over */
    bool asked;       /* a message is asked for */
    bool last;        /* no message comes any more */
    bool have_status; /* `ended` came */
};

static void on_ended(struct transport_tag *tag, bool ok);
static void on_received(struct transport_tag *tag, bool ok);

/* ---- Memory ---- */

struct transport_request *channel_entry_request(struct channel_entry *entry)
{
    return TRANSPORT_CONTAINER(entry, struct transport_request, entry);
}

static struct transport_request *
request_new(struct transport_channel *ch, const struct transport_request_events *events, void *user)
{
    struct transport_request *r = calloc(1, sizeof(*r));

    if (!r)
        return NULL;
    r->channel = ch;
    if (events)
        r->events = *events;
    r->user = user;
    r->ended.fn = on_ended;
    r->received.fn = on_received;
    r->details = grpc_empty_slice();
    atomic_init(&r->refs, 2);
    grpc_metadata_array_init(&r->initial);
    grpc_metadata_array_init(&r->trailing);
    pthread_mutex_init(&r->lock, NULL);
    return r;
}

static void request_free(struct transport_request *r)
{
    assert(!r->grpc && !r->sent && !r->got);
    grpc_metadata_array_destroy(&r->initial);
    grpc_metadata_array_destroy(&r->trailing);
    grpc_slice_unref(r->details);
    pthread_mutex_destroy(&r->lock);
    free(r);
}

struct transport_request *transport_request_ref(struct transport_request *r)
{
    atomic_fetch_add_explicit(&r->refs, 1, memory_order_relaxed);
    return r;
}

void transport_request_unref(struct transport_request *r)
{
    if (r && atomic_fetch_sub_explicit(&r->refs, 1, memory_order_acq_rel) == 1)
        request_free(r);
}

/* ---- Receiving and the end ---- */

/* On the queue's thread: tell the end if this is it. */
static void request_settle(struct transport_request *r)
{
    struct transport_channel *ch = r->channel;
    char details[TRANSPORT_DETAIL_BYTES];
    grpc_call *call = NULL;

    pthread_mutex_lock(&r->lock);
    if (r->have_status && !r->asked) {
        call = r->grpc;
        r->grpc = NULL;
    }
    pthread_mutex_unlock(&r->lock);
    if (!call)
        return;
    transport_status_text(details, (const char *)GRPC_SLICE_START_PTR(r->details),
                          GRPC_SLICE_LENGTH(r->details));
    if (r->no_memory) { /* the peer may long have said OK */
        r->code = GRPC_STATUS_RESOURCE_EXHAUSTED;
        strcpy(details, "no memory for a message");
    }
    if (r->sent)
        grpc_byte_buffer_destroy(r->sent);
    r->sent = NULL;
    grpc_call_unref(call);
    if (r->events.on_end)
        r->events.on_end(r->user, r, transport_status_code((int)r->code), details);
    channel_request_ended(ch, &r->entry);
    transport_request_unref(r);
}

static void on_ended(struct transport_tag *tag, bool ok)
{
    struct transport_request *r = TRANSPORT_CONTAINER(tag, struct transport_request, ended);

    (void)ok; /* true with a status, always */
    pthread_mutex_lock(&r->lock);
    r->have_status = true;
    pthread_mutex_unlock(&r->lock);
    request_settle(r);
}

static void on_received(struct transport_tag *tag, bool ok)
{
    struct transport_request *r = TRANSPORT_CONTAINER(tag, struct transport_request, received);
    struct transport_message *m = NULL;
    bool any = ok && !r->ask_failed && r->got;

    if (any)
        m = transport_message_new(r->got);
    else if (r->got)
        grpc_byte_buffer_destroy(r->got);
    r->got = NULL;
    pthread_mutex_lock(&r->lock);
    r->asked = false;
    r->last = !m;
    pthread_mutex_unlock(&r->lock);
    if (any && !m) {
        r->no_memory = true;
        grpc_call_cancel(r->grpc, NULL);
    }
    if (m && r->events.on_message)
        r->events.on_message(r->user, r, m);
    transport_message_unref(m);
    request_settle(r);
}

void transport_request_next(struct transport_request *r)
{
    grpc_call *call = NULL;
    grpc_op op;

    pthread_mutex_lock(&r->lock);
    if (!r->asked && !r->last && !r->have_status) {
        r->asked = true;
        call = r->grpc;
    }
    pthread_mutex_unlock(&r->lock);
    if (!call)
        return;
    memset(&op, 0, sizeof(op));
    op.op = GRPC_OP_RECV_MESSAGE;
    op.data.recv_message.recv_message = &r->got;
    if (!transport_cq_batch(call, &op, 1, &r->received)) {
        r->ask_failed = true;
        grpc_call_cancel(call, NULL);
        transport_cq_post(call, &r->received);
    }
}

void transport_request_cancel(struct transport_request *r)
{
    grpc_call *call;

    pthread_mutex_lock(&r->lock);
    call = r->grpc;
    if (call)
        grpc_call_ref(call); /* it may come to its end meanwhile */
    pthread_mutex_unlock(&r->lock);
    if (!call)
        return;
    grpc_call_cancel(call, NULL);
    grpc_call_unref(call);
}

/* ---- Starting ---- */

static gpr_timespec deadline_in(int64_t ms)
{
    const int64_t longest = (int64_t)365 * 24 * 3600 * 1000;

    if (ms > longest)
        ms = longest;
    return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_millis(ms, GPR_TIMESPAN));
}

/* Everything that happens once; the first metadata must be asked for, or no message ever comes. */
static bool start_once(struct transport_request *r, bool wait_for_ready)
{
    grpc_op ops[5];

    memset(ops, 0, sizeof(ops));
    ops[0].op = GRPC_OP_SEND_INITIAL_METADATA;
    if (wait_for_ready)
        ops[0].flags = GRPC_INITIAL_METADATA_WAIT_FOR_READY |
                       GRPC_INITIAL_METADATA_WAIT_FOR_READY_EXPLICITLY_SET;
    ops[1].op = GRPC_OP_SEND_MESSAGE;
    ops[1].data.send_message.send_message = r->sent;
    ops[2].op = GRPC_OP_SEND_CLOSE_FROM_CLIENT;
    ops[3].op = GRPC_OP_RECV_INITIAL_METADATA;
    ops[3].data.recv_initial_metadata.recv_initial_metadata = &r->initial;
    ops[4].op = GRPC_OP_RECV_STATUS_ON_CLIENT;
    ops[4].data.recv_status_on_client.trailing_metadata = &r->trailing;
    ops[4].data.recv_status_on_client.status = &r->code;
    ops[4].data.recv_status_on_client.status_details = &r->details;
    return transport_cq_batch(r->grpc, ops, 5, &r->ended);
}

static void create_call(struct transport_request *r, const char *path, int64_t deadline_ms)
{
    grpc_slice method = grpc_slice_from_copied_string(path);

    r->grpc =
        grpc_channel_create_call(r->channel->grpc, NULL, GRPC_PROPAGATE_DEFAULTS, r->channel->cq.cq,
                                 method, NULL, deadline_in(deadline_ms), NULL);
    grpc_slice_unref(method);
}

/* Undo all, with no tag out. */
static int start_failed(struct transport_request *r, int rc)
{
    grpc_call *call = r->grpc;

    if (r->sent)
        grpc_byte_buffer_destroy(r->sent);
    r->sent = NULL;
    r->grpc = NULL;
    if (call)
        grpc_call_unref(call);
    request_free(r);
    return rc;
}

int transport_request_start(struct transport_channel *ch, const char *path,
                            struct transport_out *message, int64_t deadline_ms, bool wait_for_ready,
                            const struct transport_request_events *events, void *user,
                            struct transport_request **out)
{
    struct transport_request *r;
    int rc;

    if (deadline_ms <= 0 || !path || path[0] != '/') {
        transport_out_free(message);
        return TRANSPORT_ERR_INVALID;
    }
    r = request_new(ch, events, user);
    if (!r) {
        transport_out_free(message);
        return TRANSPORT_ERR_NOMEM;
    }
    r->sent = transport_out_buffer(message);
    create_call(r, path, deadline_ms);
    rc = channel_request_begins(ch, &r->entry); /* from here on close may cancel it */
    if (rc < 0)
        return start_failed(r, rc);
    *out = r;
    if (!start_once(r, wait_for_ready)) {
        *out = NULL;
        channel_request_ended(ch, &r->entry);
        return start_failed(r, TRANSPORT_ERR_INVALID);
    }
    transport_request_next(r);
    return 0;
}

/* ---- Unary, waiting ---- */

struct unary {
    pthread_mutex_t lock;
    pthread_cond_t ended;
    /* Guarded by lock. */
    bool over;
    bool too_many;
    struct transport_message *reply;
    int code;
    char details[TRANSPORT_DETAIL_BYTES];
};

static void unary_message(void *user, struct transport_request *r, struct transport_message *m)
{
    struct unary *u = user;

    pthread_mutex_lock(&u->lock);
    u->too_many = u->reply != NULL;
    if (!u->reply)
        u->reply = transport_message_ref(m);
    pthread_mutex_unlock(&u->lock);
    if (u->too_many)
        transport_request_cancel(r);
    else
        transport_request_next(r);
}

static void unary_end(void *user, struct transport_request *r, int code, const char *details)
{
    struct unary *u = user;

    (void)r;
    pthread_mutex_lock(&u->lock);
    u->code = code;
    strcpy(u->details, details);
    if (u->too_many || (code == TRANSPORT_OK && !u->reply)) {
        u->code = TRANSPORT_INTERNAL;
        strcpy(u->details, u->too_many ? "more than one reply" : "no reply");
    }
    u->over = true;
    pthread_cond_signal(&u->ended);
    pthread_mutex_unlock(&u->lock);
}

static void unary_wait(struct unary *u)
{
    pthread_mutex_lock(&u->lock);
    while (!u->over)
        pthread_cond_wait(&u->ended, &u->lock);
    pthread_mutex_unlock(&u->lock);
}

int transport_unary(struct transport_channel *ch, const char *path, struct transport_out *message,
                    int64_t deadline_ms, bool wait_for_ready, struct transport_message **reply,
                    char *details)
{
    static const struct transport_request_events events = {unary_message, unary_end};
    struct unary u = {.lock = PTHREAD_MUTEX_INITIALIZER, .ended = PTHREAD_COND_INITIALIZER};
    struct transport_request *r = NULL;
    int rc;

    rc = transport_request_start(ch, path, message, deadline_ms, wait_for_ready, &events, &u, &r);
    if (rc < 0) {
        u.code = rc == TRANSPORT_ERR_NOMEM    ? TRANSPORT_RESOURCE_EXHAUSTED
                 : rc == TRANSPORT_ERR_CLOSED ? TRANSPORT_CANCELLED
                                              : TRANSPORT_INVALID_ARGUMENT;
        strcpy(u.details, "the call could not be started");
    } else {
        unary_wait(&u);
        transport_request_unref(r);
    }
    if (details)
        strcpy(details, u.details);
    if (u.code == TRANSPORT_OK && reply)
        *reply = u.reply;
    else
        transport_message_unref(u.reply);
    pthread_cond_destroy(&u.ended);
    pthread_mutex_destroy(&u.lock);
    return u.code;
}

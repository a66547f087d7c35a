/* A server's call, from the moment it is posted to gRPC to the last unref.
 *
 *   posted      no call yet, only the place where gRPC will put one
 *   accepted    gRPC has filled it; RECV_CLOSE is asked for before anything else
 *   open        the handler has been called; messages may be queued
 *   finishing   the status is known, and follows the queue; nothing more is taken
 *   status out  the status is gRPC's; what is left is to wait for the tags
 *   done        every tag is back: gRPC's call is let go, on_done is called
 *
 * Tags: `accepted` once, `closed` once, `written` for each batch of sends (never two at a time),
 * `posted` at most once.  As the queue has one thread, the functions of a call's tags never run at
 * the same time, and all events are called from them: an owner is never called back from inside a
 * call of its own.
 *
 * Starting a batch, cancelling and letting a payload go can each run other people's release
 * functions, which may take locks of theirs.  So none of it is done with c->lock held: who sets
 * `writing` under the lock has the right to start a batch after it.
 *
 * Memory: one reference is transport's own, from accepted to done; the others are owners'.  Both
 * are counted in refs; owners counts the latter alone, to see a call dropped without a status. */
#include "transport/transport_message.h"
#include "transport/transport_out.h"
#include "transport/transport_server.h"
#include "transport/transport_status.h"

#include <assert.h>
#include <grpc/slice.h>
#include <grpc/support/alloc.h>
#include <grpc/support/time.h>
#include <stdlib.h>
#include <string.h>

enum call_end { END_NONE, END_ASKED, END_STARTED };

struct transport_call {
    /* Set before the handler is called, read-only afterwards. */
    struct server_slot *slot;
    int64_t deadline_ns;
    char *peer;
    char *metadata; /* key NUL value NUL ..., then an empty key */
    bool counted;
    bool repost; /* no next call could be posted: this one's memory is for it */

    atomic_uint refs;
    atomic_uint owners;

    struct transport_tag accepted, closed, written, posted;

    /* gRPC's while a tag is out. */
    grpc_metadata_array request_metadata;
    gpr_timespec deadline;
    grpc_byte_buffer *request;
    int close_flag;

    /* The batch being written, its starter's. */
    grpc_byte_buffer *sent;
    size_t sent_bytes;
    bool sent_failed;

    /* Set in the handler; afterwards for the queue's thread. */
    struct transport_call_events events;
    void *user;

    pthread_mutex_t lock;
    /* Guarded by lock. */
    grpc_call *grpc; /* NULL when done */
    struct transport_out *first, *last;
    size_t queued; /* bytes, those being written included */
    uint32_t n_queued;
    bool any_sent;  /* a message was taken */
    bool initial;   /* initial metadata has been sent */
    bool writing;   /* a batch is out */
    bool broken;    /* a write failed: `closed` is to come */
    bool cancelled; /* `closed` came without a status of ours having gone */
    bool over;      /* `closed` came */
    bool posting;   /* `posted` is out */
    enum call_end end;
    int code;
    char *details;
};

static void on_accepted(struct transport_tag *tag, bool ok);
static void on_closed(struct transport_tag *tag, bool ok);
static void on_written(struct transport_tag *tag, bool ok);
static void on_posted(struct transport_tag *tag, bool ok);

/* ---- Memory ---- */

static void call_init(struct transport_call *c, struct server_slot *slot)
{
    memset(c, 0, sizeof(*c));
    c->slot = slot;
    c->accepted.fn = on_accepted;
    c->closed.fn = on_closed;
    c->written.fn = on_written;
    c->posted.fn = on_posted;
    atomic_init(&c->refs, 2);
    atomic_init(&c->owners, 1);
    pthread_mutex_init(&c->lock, NULL);
    grpc_metadata_array_init(&c->request_metadata);
}

static void call_release(struct transport_call *c)
{
    assert(!c->first && !c->sent && !c->grpc);
    grpc_metadata_array_destroy(&c->request_metadata);
    pthread_mutex_destroy(&c->lock);
    gpr_free(c->peer);
    free(c->metadata);
    free(c->details);
}

static int call_post(struct transport_call *c);

static void call_put(struct transport_call *c)
{
    struct server_slot *slot = c->slot;
    bool repost = c->repost;

    if (atomic_fetch_sub_explicit(&c->refs, 1, memory_order_acq_rel) != 1)
        return;
    call_release(c);
    if (repost) {
        call_init(c, slot);
        call_post(c);
    } else {
        free(c);
    }
    server_call_freed(slot->server);
}

struct transport_call *transport_call_ref(struct transport_call *c)
{
    atomic_fetch_add_explicit(&c->owners, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&c->refs, 1, memory_order_relaxed);
    return c;
}

void transport_call_unref(struct transport_call *c)
{
    bool dropped;

    if (!c)
        return;
    if (atomic_fetch_sub_explicit(&c->owners, 1, memory_order_acq_rel) == 1) {
        pthread_mutex_lock(&c->lock);
        dropped = c->end == END_NONE;
        pthread_mutex_unlock(&c->lock);
        if (dropped) /* nobody is left to finish it */
            transport_call_abort(c, TRANSPORT_INTERNAL, "the call was dropped without a status");
    }
    call_put(c);
}

static struct transport_out *take_queue(struct transport_call *c)
{
    struct transport_out *out = c->first;

    c->first = c->last = NULL;
    c->n_queued = 0;
    c->queued = c->writing ? c->sent_bytes : 0;
    return out;
}

/* ---- A new call ---- */

/* Takes the call, also on failure. */
static int call_post(struct transport_call *c)
{
    struct server_slot *slot = c->slot;
    grpc_call_error error;

    transport_cq_give(&c->accepted);
    error = grpc_server_request_registered_call(slot->server->grpc, slot->registered, &c->grpc,
                                                &c->deadline, &c->request_metadata, &c->request,
                                                slot->cq, slot->cq, &c->accepted);
    if (error != GRPC_CALL_OK) {
        call_release(c);
        free(c);
        return TRANSPORT_ERR_CLOSED;
    }
    return 0;
}

int server_call_post(struct server_slot *slot)
{
    struct transport_call *c = malloc(sizeof(*c));

    if (!c)
        return TRANSPORT_ERR_NOMEM;
    call_init(c, slot);
    return call_post(c);
}

static int64_t monotonic_ns(gpr_timespec deadline)
{
    gpr_timespec t;

    if (gpr_time_cmp(deadline, gpr_inf_future(deadline.clock_type)) == 0)
        return INT64_MAX;
    t = gpr_convert_clock_type(deadline, GPR_CLOCK_MONOTONIC);
    if (t.tv_sec >= INT64_MAX / GPR_NS_PER_SEC)
        return INT64_MAX;
    return t.tv_sec * GPR_NS_PER_SEC + t.tv_nsec;
}

/* The part of a slice that is a C string. */
static size_t text_length(const grpc_slice *slice)
{
    return strnlen((const char *)GRPC_SLICE_START_PTR(*slice), GRPC_SLICE_LENGTH(*slice));
}

/* gRPC's metadata dies with its call, and its strings have no end mark. */
static char *copy_metadata(const grpc_metadata_array *array)
{
    size_t n = 1, i, k;
    char *all, *p;

    for (i = 0; i < array->count; i++)
        n += GRPC_SLICE_LENGTH(array->metadata[i].key) +
             GRPC_SLICE_LENGTH(array->metadata[i].value) + 2;
    all = p = malloc(n);
    if (!all)
        return NULL;
    for (i = 0; i < array->count; i++) {
        const grpc_slice *pair[2] = {&array->metadata[i].key, &array->metadata[i].value};
        for (k = 0; k < 2; k++) {
            memcpy(p, GRPC_SLICE_START_PTR(*pair[k]), text_length(pair[k]));
            p += text_length(pair[k]);
            *p++ = '\0';
        }
    }
    *p = '\0';
    return all;
}

static bool ask_for_close(struct transport_call *c)
{
    grpc_op op;

    memset(&op, 0, sizeof(op));
    op.op = GRPC_OP_RECV_CLOSE_ON_SERVER;
    op.data.recv_close_on_server.cancelled = &c->close_flag;
    return transport_cq_batch(c->grpc, &op, 1, &c->closed);
}

/* Hand the call to its handler, or say why not. */
static void serve(struct transport_call *c, enum server_admission admission)
{
    const struct transport_method *method = &c->slot->method;
    struct transport_message *request;
    grpc_byte_buffer *buffer = c->request;

    c->request = NULL;
    if (admission != SERVER_ADMITTED) {
        if (buffer)
            grpc_byte_buffer_destroy(buffer);
        if (admission == SERVER_DRAINING)
            transport_call_finish(c, TRANSPORT_UNAVAILABLE, "draining");
        else
            transport_call_finish(c, TRANSPORT_RESOURCE_EXHAUSTED,
                                  "the server has as many calls as it takes");
    } else if (!buffer) {
        transport_call_finish(c, TRANSPORT_INVALID_ARGUMENT, "the request has no message");
    } else {
        request = transport_message_new(buffer);
        if (request && c->metadata) {
            method->handler(method->user, c, request); /* its owner's from here on */
            transport_message_unref(request);
            return;
        }
        transport_message_unref(request);
        transport_call_finish(c, TRANSPORT_RESOURCE_EXHAUSTED, "no memory");
    }
    transport_call_unref(c);
}

static void on_accepted(struct transport_tag *tag, bool ok)
{
    struct transport_call *c = TRANSPORT_CONTAINER(tag, struct transport_call, accepted);
    enum server_admission admission;

    if (!ok) { /* the server shuts down */
        call_release(c);
        free(c);
        return;
    }
    /* Without memory for a next one, this one's is used again. */
    c->repost = server_call_post(c->slot) == TRANSPORT_ERR_NOMEM;
    admission = server_call_begins(c->slot->server, c->slot);
    c->counted = admission == SERVER_ADMITTED && c->slot->counted;
    c->deadline_ns = monotonic_ns(c->deadline);
    c->peer = grpc_call_get_peer(c->grpc);
    c->metadata = copy_metadata(&c->request_metadata);
    if (!ask_for_close(c)) {
        c->over = c->cancelled = true;
        grpc_call_cancel(c->grpc, NULL);
    }
    serve(c, admission);
}

/* ---- Sending ---- */

/* With the lock held and nothing being written: what can be sent now, in ops[3].  A message and a
 * status that follows it go in one batch, and so to the wire in one write. */
static size_t next_batch(struct transport_call *c, grpc_op *ops, grpc_slice *details)
{
    struct transport_out *out = c->first;
    bool message, status;
    size_t n = 0;

    if (c->cancelled || c->broken || c->end == END_STARTED)
        return 0;
    /* A unary reply waits for its status. */
    message = out && (c->slot->method.kind != TRANSPORT_UNARY || c->end == END_ASKED);
    status = c->end == END_ASKED && (!out || !out->next);
    if (!message && !status)
        return 0;
    if (!c->initial)
        transport_cq_op(ops, &n, GRPC_OP_SEND_INITIAL_METADATA);
    c->initial = true;
    if (message) {
        c->first = out->next;
        if (!c->first)
            c->last = NULL;
        c->n_queued--;
        c->sent_bytes = out->bytes;
        c->sent = transport_out_buffer(out);
        transport_cq_op(ops, &n, GRPC_OP_SEND_MESSAGE)->data.send_message.send_message = c->sent;
    }
    if (status) {
        grpc_op *op = transport_cq_op(ops, &n, GRPC_OP_SEND_STATUS_FROM_SERVER);
        op->data.send_status_from_server.status = (grpc_status_code)c->code;
        if (c->details) {
            *details = grpc_slice_from_copied_string(c->details);
            op->data.send_status_from_server.status_details = details;
        }
        c->end = END_STARTED;
    }
    c->writing = true;
    return n;
}

/* Start the next batch, if there is one to start. */
static void call_pump(struct transport_call *c)
{
    grpc_slice details = grpc_empty_slice();
    grpc_op ops[3];
    grpc_call *call;
    size_t n = 0;

    pthread_mutex_lock(&c->lock);
    if (!c->writing)
        n = next_batch(c, ops, &details);
    call = c->grpc;
    pthread_mutex_unlock(&c->lock);
    if (n == 0)
        return;
    if (!transport_cq_batch(call, ops, n, &c->written)) {
        /* Nothing was started, nothing can be: the tag comes all the same, to say so. */
        c->sent_failed = true;
        grpc_call_cancel(call, NULL);
        transport_cq_post(call, &c->written);
    }
    grpc_slice_unref(details);
}

/* On the queue's thread: if every tag is back and the owner has finished, the call is done. */
static void call_settle(struct transport_call *c)
{
    struct transport_server *s = c->slot->server;
    struct transport_out *dropped = NULL;
    grpc_call *call = NULL;

    pthread_mutex_lock(&c->lock);
    if (c->over && !c->writing && !c->posting && c->end != END_NONE) {
        call = c->grpc;
        c->grpc = NULL;
        dropped = take_queue(c);
    }
    pthread_mutex_unlock(&c->lock);
    if (!call)
        return;
    transport_out_free_all(dropped);
    grpc_call_unref(call);
    if (c->events.on_done)
        c->events.on_done(c->user, c);
    server_call_ended(s, c->counted);
    call_put(c);
}

static void on_written(struct transport_tag *tag, bool ok)
{
    struct transport_call *c = TRANSPORT_CONTAINER(tag, struct transport_call, written);
    struct transport_out *dropped = NULL;
    grpc_byte_buffer *sent = c->sent;
    bool tell, cancel = false;

    c->sent = NULL;
    ok = ok && !c->sent_failed;
    pthread_mutex_lock(&c->lock);
    c->writing = false;
    c->queued -= c->sent_bytes;
    c->sent_bytes = 0;
    if (!ok) {
        c->broken = true;
        dropped = take_queue(c);
        cancel = !c->over;
    }
    tell = sent && ok && !c->cancelled && c->end == END_NONE;
    pthread_mutex_unlock(&c->lock);
    if (sent)
        grpc_byte_buffer_destroy(sent);
    transport_out_free_all(dropped);
    if (cancel) /* so that `closed` is sure to come */
        grpc_call_cancel(c->grpc, NULL);
    call_pump(c);
    if (tell && c->events.on_sent)
        c->events.on_sent(c->user, c);
    call_settle(c);
}

static void on_closed(struct transport_tag *tag, bool ok)
{
    struct transport_call *c = TRANSPORT_CONTAINER(tag, struct transport_call, closed);
    struct transport_out *dropped = NULL;
    bool tell;

    (void)ok;
    pthread_mutex_lock(&c->lock);
    c->over = true;
    c->cancelled = c->close_flag != 0 || c->end != END_STARTED;
    tell = c->cancelled && c->end == END_NONE;
    if (c->cancelled)
        dropped = take_queue(c);
    pthread_mutex_unlock(&c->lock);
    transport_out_free_all(dropped);
    if (tell && c->events.on_cancel)
        c->events.on_cancel(c->user, c);
    call_settle(c);
}

static void on_posted(struct transport_tag *tag, bool ok)
{
    struct transport_call *c = TRANSPORT_CONTAINER(tag, struct transport_call, posted);

    (void)ok;
    pthread_mutex_lock(&c->lock);
    c->posting = false;
    pthread_mutex_unlock(&c->lock);
    call_settle(c);
}

int transport_call_send(struct transport_call *c, struct transport_out *out)
{
    size_t limit = c->slot->server->queue_bytes;
    int rc = 0;

    out->next = NULL;
    pthread_mutex_lock(&c->lock);
    if (c->cancelled || c->broken || c->end != END_NONE) {
        rc = TRANSPORT_ERR_CLOSED;
    } else if (c->slot->method.kind == TRANSPORT_UNARY && c->any_sent) {
        rc = TRANSPORT_ERR_INVALID;
    } else if (c->queued > 0 && (c->queued >= limit || out->bytes > limit - c->queued)) {
        rc = TRANSPORT_ERR_FULL;
    } else if (c->n_queued >= SERVER_QUEUE_MESSAGES) {
        rc = TRANSPORT_ERR_FULL;
    } else {
        if (c->last)
            c->last->next = out;
        else
            c->first = out;
        c->last = out;
        c->queued += out->bytes;
        c->n_queued++;
        c->any_sent = true;
    }
    pthread_mutex_unlock(&c->lock);
    if (rc < 0)
        transport_out_free(out);
    else
        call_pump(c);
    return rc;
}

/* ---- Ending ---- */

static void set_status(struct transport_call *c, int code, const char *details)
{
    char text[TRANSPORT_DETAIL_BYTES];

    free(c->details);
    c->details = NULL;
    c->code = transport_status_code(code);
    if (c->code == TRANSPORT_OK && c->slot->method.kind == TRANSPORT_UNARY && !c->any_sent) {
        c->code = TRANSPORT_INTERNAL;
        details = "the call was finished without a reply";
    }
    /* Without memory the code goes alone. */
    if (details && transport_status_text(text, details, strlen(details)) > 0)
        c->details = strdup(text);
}

void transport_call_finish(struct transport_call *c, int code, const char *details)
{
    bool first, post;
    grpc_call *call;

    pthread_mutex_lock(&c->lock);
    first = c->end == END_NONE;
    if (first) {
        set_status(c, code, details);
        c->end = END_ASKED;
    }
    /* If all tags are back the queue's thread has to be called for on_done. */
    post = first && c->over && !c->writing;
    c->posting = c->posting || post;
    call = c->grpc;
    pthread_mutex_unlock(&c->lock);
    if (!first)
        return;
    if (post)
        transport_cq_post(call, &c->posted);
    else
        call_pump(c);
}

/* gRPC keeps the order of sends, so behind a write that waits for the peer a status would wait,
 * too; but a server's cancel with a status overtakes it, and carries the status to the peer. */
void transport_call_abort(struct transport_call *c, int code, const char *details)
{
    struct transport_out *dropped = NULL;
    grpc_call *call = NULL, *cancel = NULL;
    char text[TRANSPORT_DETAIL_BYTES] = "";
    bool post = false, pump = false;

    if (code == TRANSPORT_OK)
        code = TRANSPORT_UNKNOWN;
    code = transport_status_code(code);
    if (details)
        transport_status_text(text, details, strlen(details));
    pthread_mutex_lock(&c->lock);
    if (c->end != END_STARTED && c->grpc) {
        post = c->end == END_NONE && c->over && !c->writing;
        c->posting = c->posting || post;
        set_status(c, code, text);
        dropped = take_queue(c);
        c->end = END_ASKED;
        if (c->writing) {
            c->end = END_STARTED;
            cancel = c->grpc;
            grpc_call_ref(cancel);
        }
        call = c->grpc;
        pump = !post && !cancel;
    }
    pthread_mutex_unlock(&c->lock);
    transport_out_free_all(dropped);
    if (cancel) {
        grpc_call_cancel_with_status(cancel, (grpc_status_code)code, text, NULL);
        grpc_call_unref(cancel);
    }
    if (post)
        transport_cq_post(call, &c->posted);
    if (pump)
        call_pump(c);
}

/* ---- What an owner may ask ---- */

void transport_call_set_events(struct transport_call *c, const struct transport_call_events *events,
                               void *user)
{
    c->events = *events;
    c->user = user;
}

size_t transport_call_queued(const struct transport_call *c)
{
    pthread_mutex_t *lock = (pthread_mutex_t *)(uintptr_t)&c->lock;
    size_t n;

    pthread_mutex_lock(lock);
    n = c->queued;
    pthread_mutex_unlock(lock);
    return n;
}

bool transport_call_cancelled(const struct transport_call *c)
{
    pthread_mutex_t *lock = (pthread_mutex_t *)(uintptr_t)&c->lock;
    bool cancelled;

    pthread_mutex_lock(lock);
    cancelled = c->cancelled || c->broken;
    pthread_mutex_unlock(lock);
    return cancelled;
}

int64_t transport_call_deadline(const struct transport_call *c)
{
    return c->deadline_ns;
}

const char *transport_call_peer(const struct transport_call *c)
{
    return c->peer;
}

const char *transport_call_metadata(const struct transport_call *c, const char *key)
{
    const char *p = c->metadata;

    while (*p) {
        const char *value = p + strlen(p) + 1;
        if (strcmp(p, key) == 0)
            return value;
        p = value + strlen(value) + 1;
    }
    return NULL;
}

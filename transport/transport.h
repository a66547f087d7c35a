/* transport: gRPC servers, clients and calls on the gRPC C core.  The only module that includes
 * grpc headers.
 *
 * Threads: completion-queue threads, started here, move messages and call handlers; nothing else. A
 * handler must not block, sleep or compute: it takes what it was given, hands it to a queue and
 * returns.  Everything else may be called from any thread, handlers included.
 *
 * Messages are protobuf bytes, not yet looked at.  A received message is reference-counted and
 * keeps its slices where gRPC put them; a message to send may end in a payload that is never
 * copied. */
#ifndef TRANSPORT_H
#define TRANSPORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

/* gRPC's status codes, by their numbers on the wire. */
enum transport_status {
    TRANSPORT_OK = 0,
    TRANSPORT_CANCELLED = 1,
    TRANSPORT_UNKNOWN = 2,
    TRANSPORT_INVALID_ARGUMENT = 3,
    TRANSPORT_DEADLINE_EXCEEDED = 4,
    TRANSPORT_NOT_FOUND = 5,
    TRANSPORT_ALREADY_EXISTS = 6,
    TRANSPORT_PERMISSION_DENIED = 7,
    TRANSPORT_RESOURCE_EXHAUSTED = 8,
    TRANSPORT_FAILED_PRECONDITION = 9,
    TRANSPORT_ABORTED = 10,
    TRANSPORT_OUT_OF_RANGE = 11,
    TRANSPORT_UNIMPLEMENTED = 12,
    TRANSPORT_INTERNAL = 13,
    TRANSPORT_UNAVAILABLE = 14,
    TRANSPORT_DATA_LOSS = 15,
    TRANSPORT_UNAUTHENTICATED = 16,
};

/* "INVALID_ARGUMENT"; "?" for an unknown number. */
const char *transport_status_name(int code);

enum transport_error {
    TRANSPORT_ERR_NOMEM = -201,
    TRANSPORT_ERR_ADDRESS = -202, /* cannot be resolved, or the port is in use */
    TRANSPORT_ERR_CLOSED = -203,  /* the call or server has ended */
    TRANSPORT_ERR_FULL = -204,    /* the call's send queue is at its limit */
    TRANSPORT_ERR_INVALID = -205,
};

/* One home for the bounds of this module. */
enum {
    TRANSPORT_MIN_MESSAGE_BYTES = 4 * 1024 * 1024,
    TRANSPORT_DETAIL_BYTES = 1024, /* of a status's text; longer is cut at a character */
    TRANSPORT_MAX_METHODS = 64,
    TRANSPORT_MAX_PAYLOADS = 1024, /* of one message to send */
    TRANSPORT_KEEPALIVE_MS = 10000,
    TRANSPORT_KEEPALIVE_TIMEOUT_MS = 5000,
};

/* Call once in main, before any thread is started: sets the allocator up for bulk streams, blocks
 * SIGPIPE, starts gRPC.  transport_stop() when all servers and channels are closed. */
void transport_start(void);
void transport_stop(void);

/* ---- Messages ---- */

struct transport_message; /* received; reference-counted, any thread */

size_t transport_message_bytes(const struct transport_message *m);
/* Its pieces in order.  Returns how many there are; fills at most max.  Valid while a reference is
 * held. */
size_t transport_message_pieces(const struct transport_message *m, struct iovec *out, size_t max);
/* One contiguous view; copies once, at the first call, if there are several pieces.  NULL: no
 * memory. */
const uint8_t *transport_message_flat(struct transport_message *m);
struct transport_message *transport_message_ref(struct transport_message *m);
void transport_message_unref(struct transport_message *m); /* NULL is fine */

struct transport_out; /* to send; given away by a send, whatever it returns */

/* n bytes to be written at *bytes.  NULL: no memory. */
struct transport_out *transport_out_new(size_t n, uint8_t **bytes);
/* Append a payload that is sent from where it stands; again for the next piece.  release(owner) is
 * called exactly once, on any thread, after its last byte was used, whether sent or not; perhaps
 * after the call's on_done or on_end.  On an error nothing was taken, and it is not called. */
int transport_out_payload(struct transport_out *out, const void *data, size_t n,
                          void (*release)(void *owner), void *owner);
void transport_out_free(struct transport_out *out); /* unsent; NULL is fine */
size_t transport_out_bytes(const struct transport_out *out);

/* ---- Server ---- */

struct transport_server;
struct transport_call; /* a call on the server's side; reference-counted */

enum transport_kind { TRANSPORT_UNARY, TRANSPORT_SERVER_STREAM };

/* What the owner of a server call is told.  Any may be NULL.  Called one at a time for a call, on
 * its completion-queue thread, and never from inside a function that the owner calls. */
struct transport_call_events {
    /* Cancelled, deadline passed, or the connection is gone.  At most once, never after finish (but
     * one that is on its way when another thread calls finish still arrives). */
    void (*on_cancel)(void *user, struct transport_call *call);
    /* A message left the send queue: there is room. */
    void (*on_sent)(void *user, struct transport_call *call);
    /* The call is over and its last reference of transport's own is gone; nothing is called after
     * it. Exactly once for each call whose events were set. */
    void (*on_done)(void *user, struct transport_call *call);
};

/* A new call with its one request.  The handler owns a reference to the call and must, now or later
 * and on any thread, finish it and unref it.  The request is borrowed: ref it to keep it.  A call
 * whose last owner unrefs it unfinished ends INTERNAL. */
typedef void transport_handler_fn(void *user, struct transport_call *call,
                                  struct transport_message *request);

struct transport_method {
    const char *path; /* "/baton.v1.Decode/Generate" */
    enum transport_kind kind;
    transport_handler_fn *handler;
    void *user;
};

struct transport_server_config {
    const char *listen; /* "HOST:PORT", port 0: any free one */
    const struct transport_method *methods;
    size_t n_methods;
    const char *const *services; /* names that grpc.health.v1 knows, beside ""; NULL-terminated */
    /* Paths of methods that answer while a close waits for open calls, too; NULL-terminated, or
     * NULL. */
    const char *const *while_draining;
    uint32_t max_message_bytes; /* received; 0: TRANSPORT_MIN_MESSAGE_BYTES */
    uint32_t max_calls;         /* open at once; past it RESOURCE_EXHAUSTED; 0: 256 */
    uint32_t call_queue_bytes;  /* each call's send queue; 0: 8 MiB */
    uint32_t n_threads;         /* completion-queue threads; 0: 1 */
};

/* Whether a server could listen there now, without one: for what takes long before it is opened.
 * 0, or TRANSPORT_ERR_ADDRESS with a message, as transport_server_open(). */
int transport_listen_check(const char *listen, char *error);
/* Starts NOT_SERVING.  A port in use is TRANSPORT_ERR_ADDRESS with a message that names it.
 * error: at least TRANSPORT_DETAIL_BYTES, or NULL; set whenever an error is returned.  Methods and
 * services are copied. */
int transport_server_open(const struct transport_server_config *config,
                          struct transport_server **out, char *error);
/* The port that it listens on. */
int transport_server_port(const struct transport_server *s);
/* Health of "" and every service, told to all watchers. */
void transport_server_set_serving(struct transport_server *s, bool serving);
/* Calls now open, health watches not counted. */
uint32_t transport_server_n_calls(const struct transport_server *s);
/* NOT_SERVING from now on; wait up to grace_ms for the open calls, while new ones are told
 * UNAVAILABLE "draining" and health and the methods that are for it answer; then stop listening,
 * cancel the rest, and free everything. Calls' owners must still finish and unref theirs; close
 * waits for that.  Not from a handler. */
void transport_server_close(struct transport_server *s, uint32_t grace_ms);

/* Set who is told; only inside the handler. */
void transport_call_set_events(struct transport_call *c, const struct transport_call_events *events,
                               void *user);
/* Queue a message.  TRANSPORT_ERR_FULL: the queue would pass its limit (a single message always
 * fits an empty queue); TRANSPORT_ERR_CLOSED: cancelled or finished; TRANSPORT_ERR_INVALID: a
 * second reply to a unary call.  `out` is gone in any case.  A unary call's reply goes out with its
 * finish, so a finish must follow. */
int transport_call_send(struct transport_call *c, struct transport_out *out);
/* Bytes that wait in the queue, those being written included. */
size_t transport_call_queued(const struct transport_call *c);
/* End the call with a status once all queued messages are out.  details is UTF-8 or NULL.  The
 * second finish of a call does nothing. */
void transport_call_finish(struct transport_call *c, int code, const char *details);
/* Drop what is queued and end the call with a status, not TRANSPORT_OK, at once: after a finish,
 * too, as long as its status waits behind messages.  The client sees it behind those messages that
 * have reached it already. */
void transport_call_abort(struct transport_call *c, int code, const char *details);
bool transport_call_cancelled(const struct transport_call *c);
/* CLOCK_MONOTONIC nanoseconds; INT64_MAX: none. */
int64_t transport_call_deadline(const struct transport_call *c);
/* "ipv4:127.0.0.1:5000"; lives as long as the call. */
const char *transport_call_peer(const struct transport_call *c);
/* The value of a metadata key of the request, or NULL. */
const char *transport_call_metadata(const struct transport_call *c, const char *key);
struct transport_call *transport_call_ref(struct transport_call *c);
void transport_call_unref(struct transport_call *c); /* NULL is fine */

/* ---- Client ---- */

struct transport_channel;
struct transport_request; /* a call on the client's side; reference-counted */

struct transport_channel_config {
    const char *target;         /* "HOST:PORT" */
    uint32_t max_message_bytes; /* received; 0: TRANSPORT_MIN_MESSAGE_BYTES */
};

/* Connects with the first call.  TRANSPORT_ERR_ADDRESS: not of that form.  A name that cannot be
 * resolved, or a machine that does not answer, is seen by the calls, as UNAVAILABLE. */
int transport_channel_open(const struct transport_channel_config *config,
                           struct transport_channel **out, char *error);
/* Cancels its open requests and waits for them to end.  Requests may be unref'd later.  Not from an
 * event. */
void transport_channel_close(struct transport_channel *ch);

struct transport_request_events {
    /* A message came.  The next is read only after transport_request_next(): that is the receiver's
     * flow control.  Borrowed: ref it to keep it. */
    void (*on_message)(void *user, struct transport_request *r, struct transport_message *m);
    /* The call is over: always, exactly once, last.  details is "" where there are none.  An end
     * that the server sent comes after its messages were read, so keep asking for the next; a
     * cancel, the deadline and a lost connection come at once, whatever is unread. */
    void (*on_end)(void *user, struct transport_request *r, int code, const char *details);
};

/* Start a call with its one request message (given away).  deadline_ms from now, > 0.  The first
 * message is asked for by itself.  wait_for_ready: wait for a connection until the deadline instead
 * of failing at once.  On an error no event comes.  *out holds a reference for the caller and is
 * set before the first event.  Events come one at a time, on the channel's completion-queue thread.
 */
int transport_request_start(struct transport_channel *ch, const char *path,
                            struct transport_out *message, int64_t deadline_ms, bool wait_for_ready,
                            const struct transport_request_events *events, void *user,
                            struct transport_request **out);
void transport_request_next(struct transport_request *r);
/* Free-threaded, any number of times; on_end follows. */
void transport_request_cancel(struct transport_request *r);
struct transport_request *transport_request_ref(struct transport_request *r);
void transport_request_unref(struct transport_request *r); /* NULL is fine */

/* Unary, waiting: not from a handler.  *reply is the caller's reference.  Returns the status code;
 * details, if not NULL, is at least TRANSPORT_DETAIL_BYTES. */
int transport_unary(struct transport_channel *ch, const char *path, struct transport_out *message,
                    int64_t deadline_ms, bool wait_for_ready, struct transport_message **reply,
                    char *details);
/* grpc.health.v1 of `service` ("" for all), waiting.  1 serving, 0 not, negative: no answer, minus
 * the status code. */
int transport_health(struct transport_channel *ch, const char *service, int64_t deadline_ms);

#endif

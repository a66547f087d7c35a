/* grpc.health.v1: Check and Watch on the server, Check as a client.
 *
 * Only the latest state is of use to a watcher.  One that does not read gets no queue of old ones:
 * the next state is sent when the one before has left, and is whatever holds by then. */
#include "transport/transport_server.h"

#include "grpc/health/v1/health.pb-c.h"

#include <stdlib.h>
#include <string.h>

enum health_limits { HEALTH_MAX_SERVICES = 32 };

typedef Grpc__Health__V1__HealthCheckRequest health_request;
typedef Grpc__Health__V1__HealthCheckResponse health_response;
#define HEALTH_STATUS(name) GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__##name

struct watch {
    struct transport_health *health;
    struct transport_call *call;
    bool known;       /* the service is one of ours */
    atomic_uint refs; /* the call's, until on_done; a pusher's */
    /* Guarded by health->lock. */
    bool listed;
    bool pushing; /* somebody is in push() with it */
    int last;     /* the status sent last, -1: none */
};

struct transport_health {
    char *services[HEALTH_MAX_SERVICES + 1];
    size_t n_services;

    pthread_mutex_t lock;
    /* Guarded by lock. */
    bool serving;
    bool stopped;
    struct watch *watches[SERVER_MAX_WATCHES];
    size_t n_watches;
};

static int status_of(const struct transport_health *h, bool known)
{
    if (!known)
        return HEALTH_STATUS(SERVICE_UNKNOWN);
    return h->serving ? HEALTH_STATUS(SERVING) : HEALTH_STATUS(NOT_SERVING);
}

static struct transport_out *pack_response(int status)
{
    health_response response = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;
    struct transport_out *out;
    uint8_t *bytes;

    response.status = (Grpc__Health__V1__HealthCheckResponse__ServingStatus)status;
    out = transport_out_new(grpc__health__v1__health_check_response__get_packed_size(&response),
                            &bytes);
    if (out)
        grpc__health__v1__health_check_response__pack(&response, bytes);
    return out;
}

/* 1: one of ours, 0: unknown, negative: not a request. */
static int request_known(const struct transport_health *h, struct transport_message *message)
{
    const uint8_t *bytes = transport_message_flat(message);
    health_request *request;
    int known;
    size_t i;

    if (!bytes)
        return TRANSPORT_ERR_NOMEM;
    request = grpc__health__v1__health_check_request__unpack(NULL, transport_message_bytes(message),
                                                             bytes);
    if (!request)
        return TRANSPORT_ERR_INVALID;
    known = request->service[0] == '\0';
    for (i = 0; i < h->n_services && !known; i++)
        known = strcmp(request->service, h->services[i]) == 0;
    grpc__health__v1__health_check_request__free_unpacked(request, NULL);
    return known;
}

static void refuse(struct transport_call *call, int error)
{
    if (error == TRANSPORT_ERR_NOMEM)
        transport_call_finish(call, TRANSPORT_RESOURCE_EXHAUSTED, "no memory");
    else
        transport_call_finish(call, TRANSPORT_INVALID_ARGUMENT, "not a HealthCheckRequest");
}

/* ---- Check ---- */

static void check(void *user, struct transport_call *call, struct transport_message *message)
{
    struct transport_health *h = user;
    struct transport_out *out = NULL;
    int known, status;

    known = request_known(h, message);
    if (known > 0) {
        pthread_mutex_lock(&h->lock);
        status = status_of(h, true);
        pthread_mutex_unlock(&h->lock);
        out = pack_response(status);
    }
    if (out)
        transport_call_send(call, out);
    if (known > 0)
        transport_call_finish(call, out ? TRANSPORT_OK : TRANSPORT_RESOURCE_EXHAUSTED,
                              out ? NULL : "no memory");
    else if (known == 0)
        transport_call_finish(call, TRANSPORT_NOT_FOUND, "unknown service");
    else
        refuse(call, known);
    transport_call_unref(call);
}

/* ---- Watch ---- */

static void watch_put(struct watch *w)
{
    if (atomic_fetch_sub_explicit(&w->refs, 1, memory_order_acq_rel) == 1)
        free(w);
}

/* Take it off the list and end its call; the first to come does it. */
static void watch_end(struct watch *w, int code, const char *details)
{
    struct transport_health *h = w->health;
    bool listed;
    size_t i;

    pthread_mutex_lock(&h->lock);
    listed = w->listed;
    w->listed = false;
    for (i = 0; i < h->n_watches; i++)
        if (h->watches[i] == w)
            h->watches[i] = h->watches[--h->n_watches];
    pthread_mutex_unlock(&h->lock);
    if (!listed)
        return;
    transport_call_finish(w->call, code, details);
    transport_call_unref(w->call);
}

/* With the lock held, which is let go meanwhile: send the state as long as it is not the one sent
 * last.  Whether all went well. */
static bool push_changes(struct watch *w)
{
    struct transport_health *h = w->health;
    struct transport_call *call;
    struct transport_out *out;
    int status;

    while (w->listed && (status = status_of(h, w->known)) != w->last &&
           (h->stopped || transport_call_queued(w->call) == 0)) {
        w->last = status;
        call = transport_call_ref(w->call); /* listed, so it is there; soon it may not be */
        pthread_mutex_unlock(&h->lock);
        out = pack_response(status);
        if (out)
            transport_call_send(call, out);
        transport_call_unref(call);
        pthread_mutex_lock(&h->lock);
        if (!out)
            return false;
    }
    return true;
}

/* Tell a watch what has changed, and that it ends when the service is stopped.  One thread at a
 * time does; what changes meanwhile is its business, too. */
static void push(struct watch *w)
{
    struct transport_health *h = w->health;
    bool well = true, stopped = false;

    pthread_mutex_lock(&h->lock);
    if (!w->pushing) {
        w->pushing = true;
        well = push_changes(w);
        w->pushing = false;
        stopped = h->stopped;
    }
    pthread_mutex_unlock(&h->lock);
    if (stopped)
        watch_end(w, TRANSPORT_UNAVAILABLE, "the server closes");
    else if (!well)
        watch_end(w, TRANSPORT_RESOURCE_EXHAUSTED, "no memory");
}

static void on_watch_cancel(void *user, struct transport_call *call)
{
    (void)call;
    watch_end(user, TRANSPORT_CANCELLED, NULL);
}

static void on_watch_sent(void *user, struct transport_call *call)
{
    (void)call;
    push(user);
}

static void on_watch_done(void *user, struct transport_call *call)
{
    (void)call;
    watch_put(user);
}

static struct watch *watch_new(struct transport_health *h, struct transport_call *call, bool known)
{
    struct watch *w = calloc(1, sizeof(*w));
    bool room;

    if (!w)
        return NULL;
    w->health = h;
    w->call = call;
    w->known = known;
    w->last = -1;
    w->listed = true;
    atomic_init(&w->refs, 2); /* the call's, and the caller's */
    pthread_mutex_lock(&h->lock);
    room = !h->stopped && h->n_watches < SERVER_MAX_WATCHES;
    if (room)
        h->watches[h->n_watches++] = w;
    pthread_mutex_unlock(&h->lock);
    if (!room) {
        free(w);
        return NULL;
    }
    return w;
}

static void watch(void *user, struct transport_call *call, struct transport_message *message)
{
    static const struct transport_call_events events = {on_watch_cancel, on_watch_sent,
                                                        on_watch_done};
    struct transport_health *h = user;
    struct watch *w;
    int known;

    known = request_known(h, message);
    if (known < 0) {
        refuse(call, known);
        transport_call_unref(call);
        return;
    }
    w = watch_new(h, call, known > 0);
    if (!w) {
        transport_call_finish(call, TRANSPORT_RESOURCE_EXHAUSTED, "too many watches");
        transport_call_unref(call);
        return;
    }
    transport_call_set_events(call, &events, w);
    push(w);
    watch_put(w);
}

/* ---- The whole ---- */

static size_t take_watches(struct transport_health *h, struct watch **out)
{
    size_t i;

    for (i = 0; i < h->n_watches; i++) {
        out[i] = h->watches[i];
        atomic_fetch_add_explicit(&out[i]->refs, 1, memory_order_relaxed);
    }
    return h->n_watches;
}

void health_set(struct transport_health *h, bool serving)
{
    struct watch *watches[SERVER_MAX_WATCHES];
    size_t n, i;

    pthread_mutex_lock(&h->lock);
    h->serving = serving && !h->stopped;
    n = take_watches(h, watches);
    pthread_mutex_unlock(&h->lock);
    for (i = 0; i < n; i++) {
        push(watches[i]);
        watch_put(watches[i]);
    }
}

void health_stop(struct transport_health *h)
{
    struct watch *watches[SERVER_MAX_WATCHES];
    size_t n, i;

    pthread_mutex_lock(&h->lock);
    h->serving = false;
    h->stopped = true;
    n = take_watches(h, watches);
    pthread_mutex_unlock(&h->lock);
    for (i = 0; i < n; i++) {
        push(watches[i]);
        watch_put(watches[i]);
    }
}

int health_open(struct transport_health **out, const char *const *services)
{
    struct transport_health *h = calloc(1, sizeof(*h));

    if (!h)
        return TRANSPORT_ERR_NOMEM;
    pthread_mutex_init(&h->lock, NULL);
    for (; services && *services; services++) {
        if (h->n_services == HEALTH_MAX_SERVICES) {
            health_close(h);
            return TRANSPORT_ERR_INVALID;
        }
        h->services[h->n_services] = strdup(*services);
        if (!h->services[h->n_services]) {
            health_close(h);
            return TRANSPORT_ERR_NOMEM;
        }
        h->n_services++;
    }
    *out = h;
    return 0;
}

void health_close(struct transport_health *h)
{
    size_t i;

    if (!h)
        return;
    for (i = 0; i < h->n_services; i++)
        free(h->services[i]);
    pthread_mutex_destroy(&h->lock);
    free(h);
}

void health_methods(struct transport_health *h, struct transport_method methods[HEALTH_METHODS])
{
    methods[0] =
        (struct transport_method){"/grpc.health.v1.Health/Check", TRANSPORT_UNARY, check, h};
    methods[1] = (struct transport_method){"/grpc.health.v1.Health/Watch", TRANSPORT_SERVER_STREAM,
                                           watch, h};
}

/* ---- As a client ---- */

int transport_health(struct transport_channel *ch, const char *service, int64_t deadline_ms)
{
    health_request request = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    char name[256];
    struct transport_message *reply = NULL;
    health_response *response = NULL;
    struct transport_out *out;
    const uint8_t *bytes;
    uint8_t *to;
    int rc;

    if (strlen(service) >= sizeof(name))
        return -TRANSPORT_INVALID_ARGUMENT;
    strcpy(name, service);
    request.service = name;
    out = transport_out_new(grpc__health__v1__health_check_request__get_packed_size(&request), &to);
    if (!out)
        return -TRANSPORT_RESOURCE_EXHAUSTED;
    grpc__health__v1__health_check_request__pack(&request, to);
    rc = transport_unary(ch, "/grpc.health.v1.Health/Check", out, deadline_ms, false, &reply, NULL);
    if (rc != TRANSPORT_OK)
        return -rc;
    bytes = transport_message_flat(reply);
    rc = bytes ? -TRANSPORT_INTERNAL : -TRANSPORT_RESOURCE_EXHAUSTED;
    if (bytes)
        response = grpc__health__v1__health_check_response__unpack(
            NULL, transport_message_bytes(reply), bytes);
    transport_message_unref(reply);
    if (!response)
        return rc;
    rc = response->status == HEALTH_STATUS(SERVING);
    grpc__health__v1__health_check_response__free_unpacked(response, NULL);
    return rc;
}

#include "transport_fixture.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { PAYLOAD_BYTES = 64 * 1024, WAIT_MS = 10000 };

struct tally tally = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

int64_t now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* Wait on a condition until now + ms; false when the time is over. */
static bool wait_ms(pthread_cond_t *cond, pthread_mutex_t *lock, int64_t until)
{
    struct timespec t;
    int64_t left = until - now_ms();

    if (left <= 0)
        return false;
    clock_gettime(CLOCK_REALTIME, &t);
    t.tv_nsec += (long)(left % 1000) * 1000000;
    t.tv_sec += left / 1000 + t.tv_nsec / 1000000000;
    t.tv_nsec %= 1000000000;
    pthread_cond_timedwait(cond, lock, &t);
    return true;
}

/* ---- The tally ---- */

static void count(int *counter)
{
    pthread_mutex_lock(&tally.lock);
    ++*counter;
    pthread_cond_broadcast(&tally.changed);
    pthread_mutex_unlock(&tally.lock);
}

bool tally_wait(const int *counter, int n)
{
    int64_t until = now_ms() + WAIT_MS;
    bool there;

    pthread_mutex_lock(&tally.lock);
    while (*counter < n && wait_ms(&tally.changed, &tally.lock, until))
        ;
    there = *counter >= n;
    pthread_mutex_unlock(&tally.lock);
    return there;
}

int tally_get(const int *counter)
{
    int n;

    pthread_mutex_lock(&tally.lock);
    n = *counter;
    pthread_mutex_unlock(&tally.lock);
    return n;
}

struct transport_call *tally_take(void)
{
    int64_t until = now_ms() + WAIT_MS;
    struct transport_call *call;

    pthread_mutex_lock(&tally.lock);
    while (!tally.held && wait_ms(&tally.changed, &tally.lock, until))
        ;
    call = tally.held;
    tally.held = NULL;
    pthread_mutex_unlock(&tally.lock);
    return call;
}

/* ---- Messages ---- */

struct transport_out *fixture_out(const void *bytes, size_t n)
{
    uint8_t *to;
    struct transport_out *out = transport_out_new(n, &to);

    if (n > 0)
        memcpy(to, bytes, n);
    return out;
}

struct transport_out *fixture_text(const char *text)
{
    return fixture_out(text, strlen(text));
}

static void released(void *owner)
{
    free(owner);
    count(&tally.released);
}

struct transport_out *fixture_payload(uint32_t head, size_t n)
{
    struct transport_out *out = fixture_out(&head, sizeof(head));
    uint8_t *payload = malloc(n ? n : 1);

    memset(payload, (uint8_t)head, n);
    if (transport_out_payload(out, payload, n, released, payload) < 0)
        abort();
    return out;
}

/* ---- The server's methods ---- */

static void on_cancel(void *user, struct transport_call *call)
{
    (void)user;
    (void)call;
    count(&tally.cancelled);
}

static void on_sent(void *user, struct transport_call *call)
{
    (void)user;
    (void)call;
    count(&tally.sent);
}

static void on_done(void *user, struct transport_call *call)
{
    (void)user;
    (void)call;
    count(&tally.done);
}

static const struct transport_call_events events = {on_cancel, on_sent, on_done};

static void accept_call(struct transport_call *call, struct transport_message *request)
{
    const char *value = transport_call_metadata(call, "x-test");
    const uint8_t *bytes = transport_message_flat(request);

    transport_call_set_events(call, &events, NULL);
    pthread_mutex_lock(&tally.lock);
    tally.accepted++;
    snprintf(tally.peer, sizeof(tally.peer), "%s", transport_call_peer(call));
    snprintf(tally.metadata, sizeof(tally.metadata), "%s", value ? value : "(none)");
    if (tally.accepted == 1)
        memcpy(tally.first_metadata, tally.metadata, sizeof(tally.metadata));
    tally.n_request = transport_message_bytes(request);
    memcpy(tally.request, bytes,
           tally.n_request < sizeof(tally.request) ? tally.n_request : sizeof(tally.request));
    tally.deadline_ns = transport_call_deadline(call);
    pthread_cond_broadcast(&tally.changed);
    pthread_mutex_unlock(&tally.lock);
}

static uint32_t number(struct transport_message *request)
{
    char text[16] = "";
    size_t n = transport_message_bytes(request);

    memcpy(text, transport_message_flat(request), n < sizeof(text) ? n : sizeof(text) - 1);
    return (uint32_t)strtoul(text, NULL, 10);
}

static void echo(void *user, struct transport_call *call, struct transport_message *request)
{
    (void)user;
    accept_call(call, request);
    transport_call_send(
        call, fixture_out(transport_message_flat(request), transport_message_bytes(request)));
    transport_call_finish(call, TRANSPORT_OK, NULL);
    transport_call_unref(call);
}

static void count_up(void *user, struct transport_call *call, struct transport_message *request)
{
    uint32_t n = number(request), i;

    (void)user;
    accept_call(call, request);
    for (i = 0; i < n; i++)
        if (transport_call_send(call, fixture_out(&i, sizeof(i))) < 0)
            break;
    transport_call_finish(call, TRANSPORT_OK, "");
    transport_call_unref(call);
}

static void payload(void *user, struct transport_call *call, struct transport_message *request)
{
    uint32_t n = number(request), i;

    (void)user;
    accept_call(call, request);
    for (i = 0; i < n; i++)
        if (transport_call_send(call, fixture_payload(i, PAYLOAD_BYTES)) < 0)
            break;
    transport_call_finish(call, TRANSPORT_OK, NULL);
    transport_call_unref(call);
}

static void hold(void *user, struct transport_call *call, struct transport_message *request)
{
    (void)user;
    accept_call(call, request);
    pthread_mutex_lock(&tally.lock);
    tally.held = call;
    pthread_cond_broadcast(&tally.changed);
    pthread_mutex_unlock(&tally.lock);
}

static void fail(void *user, struct transport_call *call, struct transport_message *request)
{
    size_t n = transport_message_bytes(request);
    char *text = strndup((const char *)transport_message_flat(request), n), *details;
    int code = (int)strtol(text, &details, 10);

    (void)user;
    accept_call(call, request);
    transport_call_finish(call, code, *details ? details + 1 : NULL);
    transport_call_finish(call, TRANSPORT_DATA_LOSS, "the second finish does nothing");
    transport_call_unref(call);
    free(text);
}

static void drop(void *user, struct transport_call *call, struct transport_message *request)
{
    (void)user;
    accept_call(call, request);
    transport_call_unref(call);
}

static void silent(void *user, struct transport_call *call, struct transport_message *request)
{
    (void)user;
    accept_call(call, request);
    transport_call_finish(call, TRANSPORT_OK, NULL);
    transport_call_unref(call);
}

static const struct transport_method methods[] = {
    {"/t.T/Echo", TRANSPORT_UNARY, echo, NULL},
    {"/t.T/Count", TRANSPORT_SERVER_STREAM, count_up, NULL},
    {"/t.T/Payload", TRANSPORT_SERVER_STREAM, payload, NULL},
    {"/t.T/Hold", TRANSPORT_SERVER_STREAM, hold, NULL},
    {"/t.T/HoldUnary", TRANSPORT_UNARY, hold, NULL},
    {"/t.T/Fail", TRANSPORT_SERVER_STREAM, fail, NULL},
    {"/t.T/Drop", TRANSPORT_SERVER_STREAM, drop, NULL},
    {"/t.T/Silent", TRANSPORT_UNARY, silent, NULL},
};

struct transport_server *fixture_server(const char *listen, uint32_t max_calls,
                                        uint32_t max_message_bytes, uint32_t queue_bytes,
                                        uint32_t n_threads)
{
    static const char *const services[] = {"t.T", NULL};
    struct transport_server_config config = {
        .listen = listen,
        .methods = methods,
        .n_methods = sizeof(methods) / sizeof(methods[0]),
        .services = services,
        .max_message_bytes = max_message_bytes,
        .max_calls = max_calls,
        .call_queue_bytes = queue_bytes,
        .n_threads = n_threads,
    };
    struct transport_server *s = NULL;
    char error[TRANSPORT_DETAIL_BYTES];

    if (transport_server_open(&config, &s, error) < 0) {
        fprintf(stderr, "%s\n", error);
        abort();
    }
    return s;
}

struct transport_channel *fixture_channel_port(int port)
{
    struct transport_channel_config config = {.max_message_bytes = 0};
    struct transport_channel *ch = NULL;
    char target[64];

    snprintf(target, sizeof(target), "127.0.0.1:%d", port);
    config.target = target;
    if (transport_channel_open(&config, &ch, NULL) < 0)
        abort();
    return ch;
}

struct transport_channel *fixture_channel(const struct transport_server *s)
{
    return fixture_channel_port(transport_server_port(s));
}

/* ---- The listener ---- */

static bool payload_unharmed(struct transport_message *m, uint32_t head)
{
    struct iovec pieces[256];
    size_t n = transport_message_pieces(m, pieces, 256), i, k, at = 0;

    for (i = 0; i < n && i < 256; i++)
        for (k = 0; k < pieces[i].iov_len; k++, at++)
            if (at >= sizeof(head) && ((uint8_t *)pieces[i].iov_base)[k] != (uint8_t)head)
                return false;
    return n > 256 || at == transport_message_bytes(m);
}

static void on_message(void *user, struct transport_request *r, struct transport_message *m)
{
    struct listener *l = user;
    size_t n = transport_message_bytes(m);
    uint32_t head = 0;
    bool by_hand;

    pthread_mutex_lock(&l->lock);
    if (n >= sizeof(head)) {
        memcpy(&head, transport_message_flat(m), sizeof(head));
        l->in_order = l->in_order && head == (uint32_t)l->n_messages;
        l->unharmed = l->unharmed && payload_unharmed(m, head);
    }
    memcpy(l->last, transport_message_flat(m), n < sizeof(l->last) ? n : sizeof(l->last));
    l->n_messages++;
    l->n_bytes += n;
    l->after_end += l->n_ends;
    by_hand = l->by_hand;
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->lock);
    if (!by_hand)
        transport_request_next(r);
}

static void on_end(void *user, struct transport_request *r, int code, const char *details)
{
    struct listener *l = user;

    (void)r;
    pthread_mutex_lock(&l->lock);
    l->after_end += l->n_ends;
    l->n_ends++;
    l->code = code;
    snprintf(l->details, sizeof(l->details), "%s", details);
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->lock);
}

void listener_init(struct listener *l)
{
    memset(l, 0, sizeof(*l));
    pthread_mutex_init(&l->lock, NULL);
    pthread_cond_init(&l->changed, NULL);
    l->in_order = l->unharmed = true;
}

void listener_release(struct listener *l)
{
    transport_request_unref(l->request);
    pthread_cond_destroy(&l->changed);
    pthread_mutex_destroy(&l->lock);
}

int listener_start(struct listener *l, struct transport_channel *ch, const char *path,
                   struct transport_out *message, int64_t deadline_ms)
{
    static const struct transport_request_events request_events = {on_message, on_end};

    return transport_request_start(ch, path, message, deadline_ms, false, &request_events, l,
                                   &l->request);
}

bool listener_wait(struct listener *l, int64_t ms)
{
    int64_t until = now_ms() + ms;
    bool there;

    pthread_mutex_lock(&l->lock);
    while (l->n_ends == 0 && wait_ms(&l->changed, &l->lock, until))
        ;
    there = l->n_ends == 1;
    pthread_mutex_unlock(&l->lock);
    return there;
}

bool listener_wait_messages(struct listener *l, int n)
{
    int64_t until = now_ms() + WAIT_MS;
    bool there;

    pthread_mutex_lock(&l->lock);
    while (l->n_messages < n && l->n_ends == 0 && wait_ms(&l->changed, &l->lock, until))
        ;
    there = l->n_messages >= n;
    pthread_mutex_unlock(&l->lock);
    return there;
}

int listener_get(struct listener *l, const int *counter)
{
    int n;

    pthread_mutex_lock(&l->lock);
    n = *counter;
    pthread_mutex_unlock(&l->lock);
    return n;
}

#include "prefill_proxy.h"

#include <check.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A call, and the one behind it.  Its callbacks run on two threads of gRPC: messages and the end
 * come from the channel's, cancels from the server's. */
struct passing {
    struct proxy *proxy;
    struct transport_call *call;
    struct transport_request *request;
    atomic_int refs;
    int n; /* messages that came */
    bool ended;
    struct transport_message *kept;
};

static void passing_unref(struct passing *x)
{
    if (atomic_fetch_sub(&x->refs, 1) != 1)
        return;
    atomic_fetch_sub(&x->proxy->n_open, 1);
    transport_message_unref(x->kept);
    transport_call_unref(x->call);
    transport_request_unref(x->request);
    free(x);
}

static void end(struct passing *x, int code, const char *details)
{
    if (!x->ended)
        transport_call_finish(x->call, code, details);
    x->ended = true;
    if (x->request != NULL)
        transport_request_cancel(x->request);
}

static void pass(struct passing *x, struct transport_message *m, size_t n, bool flip)
{
    uint8_t *bytes;
    struct transport_out *out = transport_out_new(n, &bytes);

    memcpy(bytes, transport_message_flat(m), n);
    if (flip)
        bytes[n / 2] ^= 0x10;
    transport_call_send(x->call, out);
}

static void harm(struct passing *x, struct transport_message *m)
{
    size_t n = transport_message_bytes(m);

    switch (atomic_load(&x->proxy->fault)) {
    case PROXY_BREAK:
        end(x, TRANSPORT_UNAVAILABLE, "the proxy broke it");
        break;
    case PROXY_END:
        end(x, TRANSPORT_OK, NULL);
        break;
    case PROXY_FLIP:
        pass(x, m, n, true);
        break;
    case PROXY_TWICE:
        pass(x, m, n, false);
        pass(x, m, n, false);
        break;
    case PROXY_CUT:
        pass(x, m, n - 1, false);
        break;
    case PROXY_EMPTY:
        pass(x, m, 0, false);
        break;
    case PROXY_AFTER_END:
        x->kept = transport_message_ref(m);
        pass(x, m, n, false);
        break;
    default: /* dropped, stalled */
        break;
    }
}

static void on_message(void *user, struct transport_request *r, struct transport_message *m)
{
    struct passing *x = user;
    int i = x->n++;
    bool here = x->proxy->fault != PROXY_NONE && i == x->proxy->at;

    atomic_fetch_add(&x->proxy->n_messages, 1);
    if (x->ended)
        return;
    if (here)
        harm(x, m);
    else
        pass(x, m, transport_message_bytes(m), false);
    if (!(x->proxy->fault == PROXY_STALL && i >= x->proxy->at))
        transport_request_next(r);
}

static void on_end(void *user, struct transport_request *r, int code, const char *details)
{
    struct passing *x = user;

    (void)r;
    if (x->kept != NULL)
        pass(x, x->kept, transport_message_bytes(x->kept), false);
    if (!x->ended)
        transport_call_finish(x->call, code, details);
    x->ended = true;
    passing_unref(x);
}

static void on_cancel(void *user, struct transport_call *call)
{
    struct passing *x = user;

    (void)call;
    transport_request_cancel(x->request);
}

static void on_done(void *user, struct transport_call *call)
{
    (void)call;
    passing_unref(user);
}

static void on_call(void *user, struct transport_call *call, struct transport_message *m)
{
    static const struct transport_call_events call_events = {.on_cancel = on_cancel,
                                                             .on_done = on_done};
    static const struct transport_request_events request_events = {.on_message = on_message,
                                                                   .on_end = on_end};
    struct proxy *p = user;
    struct passing *x;
    struct transport_out *out;
    uint8_t *bytes;

    atomic_fetch_add(&p->n_calls, 1);
    if (p->fault == PROXY_REFUSE) {
        transport_call_finish(call, TRANSPORT_RESOURCE_EXHAUSTED, "the proxy is full");
        transport_call_unref(call);
        return;
    }
    x = calloc(1, sizeof(*x));
    x->proxy = p;
    x->call = call;
    atomic_init(&x->refs, 2);
    atomic_fetch_add(&p->n_open, 1);
    transport_call_set_events(call, &call_events, x);
    out = transport_out_new(transport_message_bytes(m), &bytes);
    memcpy(bytes, transport_message_flat(m), transport_message_bytes(m));
    if (transport_request_start(p->channel, "/baton.v1.Prefill/Compute", out, 60000, false,
                                &request_events, x, &x->request) < 0) {
        transport_call_finish(call, TRANSPORT_UNAVAILABLE, "the proxy has no connection");
        passing_unref(x);
    }
}

void proxy_open(struct proxy *p, const char *target)
{
    static const char *const services[] = {"baton.v1.Prefill", NULL};
    const struct transport_method methods[] = {
        {"/baton.v1.Prefill/Compute", TRANSPORT_SERVER_STREAM, on_call, p}};
    const struct transport_server_config config = {.listen = "127.0.0.1:0",
                                                   .methods = methods,
                                                   .n_methods = 1,
                                                   .services = services,
                                                   .call_queue_bytes = 64 << 20};
    const struct transport_channel_config channel = {.target = target};

    memset(p, 0, sizeof(*p));
    ck_assert_int_eq(transport_channel_open(&channel, &p->channel, NULL), 0);
    ck_assert_int_eq(transport_server_open(&config, &p->server, NULL), 0);
    snprintf(p->address, sizeof(p->address), "127.0.0.1:%d", transport_server_port(p->server));
    transport_server_set_serving(p->server, true);
}

void proxy_close(struct proxy *p)
{
    transport_server_close(p->server, 0);
    transport_channel_close(p->channel);
}

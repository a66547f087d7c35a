/* A streaming call for one reader.  The transport's thread leaves each message in a queue and the
 * reader asks for the next one when it has taken it, so that a slow terminal holds the server back
 * instead of filling memory. */
#include "cli/cli.h"

#include <signal.h>
#include <stdlib.h>

struct cli_call {
    struct transport_channel *channel;
    struct transport_request *request;
    struct node_queue messages; /* of struct transport_message; closed by the end */
    /* Written before messages is closed, read after it was seen closed. */
    int code;
    char details[TRANSPORT_DETAIL_BYTES];
};

static void on_message(void *user, struct transport_request *r, struct transport_message *m)
{
    struct cli_call *c = user;

    /* At most one is under way, so there is room. */
    if (!node_queue_push(&c->messages, transport_message_ref(m))) {
        transport_message_unref(m);
        transport_request_cancel(r);
    }
}

static void on_end(void *user, struct transport_request *r, int code, const char *details)
{
    struct cli_call *c = user;

    (void)r;
    c->code = code;
    snprintf(c->details, sizeof(c->details), "%s", details);
    node_queue_close(&c->messages);
}

static int refuse_target(const char *target, int rc, const char *error)
{
    cli_say("%s: %s", target, error[0] != '\0' ? error : "no memory");
    return rc == TRANSPORT_ERR_ADDRESS ? NODE_EXIT_UNAVAILABLE : NODE_EXIT_FAILED;
}

int cli_call_open(struct cli_call **out, const char *target, const char *path,
                  struct transport_out *request, int64_t deadline_ms)
{
    static const struct transport_request_events events = {on_message, on_end};
    const struct transport_channel_config config = {.target = target};
    char error[TRANSPORT_DETAIL_BYTES] = "";
    struct cli_call *c = calloc(1, sizeof(*c));
    int rc;

    if (c == NULL || node_queue_init(&c->messages, 2) < 0) {
        transport_out_free(request);
        free(c);
        return refuse_target(target, TRANSPORT_ERR_NOMEM, error);
    }
    rc = transport_channel_open(&config, &c->channel, error);
    if (rc < 0) {
        transport_out_free(request);
        goto fail;
    }
    rc = transport_request_start(c->channel, path, request, deadline_ms, false, &events, c,
                                 &c->request);
    if (rc < 0)
        goto fail;
    *out = c;
    return NODE_EXIT_OK;

fail:
    cli_call_close(c);
    return refuse_target(target, rc, error);
}

struct transport_message *cli_call_next(struct cli_call *c)
{
    struct transport_message *m = node_queue_pop(&c->messages, -1);

    if (m != NULL)
        transport_request_next(c->request);
    return m;
}

void cli_call_cancel(struct cli_call *c)
{
    transport_request_cancel(c->request);
}

int cli_call_status(const struct cli_call *c, const char **details)
{
    *details = c->details;
    return c->code;
}

void cli_call_close(struct cli_call *c)
{
    struct transport_message *m;

    if (c->request != NULL) {
        transport_request_cancel(c->request);
        while ((m = node_queue_pop(&c->messages, -1)) != NULL)
            transport_message_unref(m);
        transport_request_unref(c->request);
    }
    if (c->channel != NULL)
        transport_channel_close(c->channel);
    node_queue_release(&c->messages);
    free(c);
}

static void *wait_for_signal(void *arg)
{
    struct cli_interrupt *i = arg;
    int sig = node_signals_wait();

    if (!atomic_load(&i->over)) {
        atomic_store(&i->signal, sig);
        cli_call_cancel(i->call);
    }
    return NULL;
}

int cli_interrupt_begin(struct cli_interrupt *i, struct cli_call *call)
{
    i->call = call;
    atomic_init(&i->signal, 0);
    atomic_init(&i->over, false);
    if (pthread_create(&i->thread, NULL, wait_for_signal, i) == 0)
        return NODE_EXIT_OK;
    cli_say("no thread can be started");
    return NODE_EXIT_FAILED;
}

int cli_interrupt_end(struct cli_interrupt *i)
{
    atomic_store(&i->over, true);
    pthread_kill(i->thread, SIGTERM);
    pthread_join(i->thread, NULL);
    return atomic_load(&i->signal);
}

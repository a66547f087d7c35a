/* The server: queues, methods, the port, and the order in which all of it is taken down.
 *
 * A call holds gRPC's call, and gRPC's call the server's queues.  Starting anything on a queue that
 * is shut down aborts the process, so close waits for n_live, which counts every call whose memory
 * is there yet, owners' references included, before it shuts the queues down. */
#include "transport/transport_server.h"

#include "transport/transport_address.h"
#include "transport/transport_status.h"

#include <errno.h>
#include <grpc/grpc_security.h>
#include <netdb.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static void say(char *error, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void say(char *error, const char *format, ...)
{
    char text[2 * TRANSPORT_DETAIL_BYTES];
    va_list args;

    if (!error)
        return;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    transport_status_text(error, text, strlen(text));
}

/* ---- Counting calls ---- */

enum server_admission server_call_begins(struct transport_server *s, const struct server_slot *slot)
{
    bool counted = slot && slot->counted;
    enum server_admission admission = SERVER_ADMITTED;

    pthread_mutex_lock(&s->lock);
    s->n_live++;
    s->n_busy++;
    if (counted && s->is_draining && !slot->while_draining)
        admission = SERVER_DRAINING;
    else if (counted && s->n_open >= s->max_calls)
        admission = SERVER_FULL;
    else if (counted)
        s->n_open++;
    pthread_mutex_unlock(&s->lock);
    return admission;
}

void server_call_ended(struct transport_server *s, bool counted)
{
    pthread_mutex_lock(&s->lock);
    s->n_busy--;
    if (counted)
        s->n_open--;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

void server_call_freed(struct transport_server *s)
{
    pthread_mutex_lock(&s->lock);
    s->n_live--;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

uint32_t transport_server_n_calls(const struct transport_server *s)
{
    pthread_mutex_t *lock = (pthread_mutex_t *)(uintptr_t)&s->lock;
    uint32_t n;

    pthread_mutex_lock(lock);
    n = s->n_open;
    pthread_mutex_unlock(lock);
    return n;
}

int transport_server_port(const struct transport_server *s)
{
    return s->port;
}

void transport_server_set_serving(struct transport_server *s, bool serving)
{
    health_set(s->health, serving);
}

/* ---- Closing ---- */

static void on_shut_down(struct transport_tag *tag, bool ok)
{
    struct transport_server *s = TRANSPORT_CONTAINER(tag, struct transport_server, shut_down);

    (void)ok;
    pthread_mutex_lock(&s->lock);
    s->is_shut_down = true;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

static struct timespec moment_in(uint32_t ms)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_sec += ms / 1000;
    t.tv_nsec += (long)(ms % 1000) * 1000000;
    if (t.tv_nsec >= 1000000000) {
        t.tv_sec++;
        t.tv_nsec -= 1000000000;
    }
    return t;
}

/* Wait until a count that the lock guards is 0. */
static void wait_none(struct transport_server *s, const uint32_t *count,
                      const struct timespec *until)
{
    pthread_mutex_lock(&s->lock);
    while (*count > 0)
        if (pthread_cond_timedwait(&s->changed, &s->lock, until) == ETIMEDOUT)
            break;
    pthread_mutex_unlock(&s->lock);
}

/* gRPC stops to listen with the shutdown, and a client would see a refused connection: so the open
 * calls are waited for before it, and new ones told. */
static void drain(struct transport_server *s, const struct timespec *until)
{
    health_set(s->health, false);
    pthread_mutex_lock(&s->lock);
    s->is_draining = true;
    pthread_mutex_unlock(&s->lock);
    wait_none(s, &s->n_open, until);
}

static void wait_all_gone(struct transport_server *s)
{
    pthread_mutex_lock(&s->lock);
    while (s->n_live > 0 || !s->is_shut_down)
        pthread_cond_wait(&s->changed, &s->lock);
    pthread_mutex_unlock(&s->lock);
}

static void free_server(struct transport_server *s)
{
    size_t i;

    for (i = 0; i < s->n_paths; i++)
        free(s->paths[i]);
    free(s->paths);
    free(s->slots);
    free(s->cqs);
    health_close(s->health);
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

void transport_server_close(struct transport_server *s, uint32_t grace_ms)
{
    struct timespec until = moment_in(grace_ms);
    size_t i;

    if (!s)
        return;
    if (s->health)
        drain(s, &until);
    if (s->health)
        health_stop(s->health);
    if (s->grpc && s->n_cqs > 0) {
        transport_cq_give(&s->shut_down);
        grpc_server_shutdown_and_notify(s->grpc, s->cqs[0].cq, &s->shut_down);
        wait_none(s, &s->n_busy, &until);
        grpc_server_cancel_all_calls(s->grpc);
        wait_all_gone(s);
    }
    for (i = 0; i < s->n_cqs; i++)
        transport_cq_close(&s->cqs[i]);
    if (s->grpc)
        grpc_server_destroy(s->grpc);
    free_server(s);
}

/* ---- The port ---- */

/* gRPC only says that it could not; ask the system why. */
static int bind_error(const struct addrinfo *ai)
{
    int fd, one = 1, error = 0;

    fd = socket(ai->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return errno;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (bind(fd, ai->ai_addr, ai->ai_addrlen) < 0 || listen(fd, 1) < 0)
        error = errno;
    close(fd);
    return error;
}

static void set_port(struct addrinfo *ai, uint16_t port)
{
    if (ai->ai_family == AF_INET)
        ((struct sockaddr_in *)(void *)ai->ai_addr)->sin_port = htons(port);
    else
        ((struct sockaddr_in6 *)(void *)ai->ai_addr)->sin6_port = htons(port);
}

/* Say why an address could not be had.  1: this machine has no such address or family. */
static int say_bind_error(int why, const char *text, char *error)
{
    if (why == EADDRNOTAVAIL || why == EAFNOSUPPORT) {
        say(error, "cannot listen on %s: the address is not one of this machine's", text);
        return 1;
    }
    if (why == EADDRINUSE || why == 0)
        say(error, "cannot listen on %s: the port is in use", text);
    else
        say(error, "cannot listen on %s: %s", text, strerror(why));
    return TRANSPORT_ERR_ADDRESS;
}

/* One address of those that the name has; s NULL: only try.  0; 1: this machine has no such address
 * or family; or TRANSPORT_ERR_ADDRESS. */
static int listen_one(struct transport_server *s, struct addrinfo *ai, uint16_t port, char *error)
{
    char host[128], text[TRANSPORT_ADDRESS_TEXT];
    grpc_server_credentials *insecure;
    int bound, why;

    set_port(ai, port);
    if (getnameinfo(ai->ai_addr, ai->ai_addrlen, host, sizeof(host), NULL, 0, NI_NUMERICHOST) != 0)
        return 1;
    transport_address_print(text, host, port);
    if (s) {
        insecure = grpc_insecure_server_credentials_create();
        bound = grpc_server_add_http2_port(s->grpc, text, insecure);
        grpc_server_credentials_release(insecure);
        if (bound > 0) {
            s->port = bound;
            return 0;
        }
    }
    why = bind_error(ai);
    return !s && why == 0 ? 0 : say_bind_error(why, text, error);
}

/* Every address that the name has must be had, but for those that this machine has not: gRPC by
 * itself is content with any one of them, and localhost would then quietly be ::1 alone.  s NULL:
 * only try. */
static int listen_all(struct transport_server *s, const char *listen, char *error)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
    struct addrinfo *list = NULL, *ai;
    struct transport_address address;
    bool any = false;
    int rc;

    if (transport_address_parse(&address, listen) < 0) {
        say(error, "cannot listen on %s: not of the form HOST:PORT", listen ? listen : "(nothing)");
        return TRANSPORT_ERR_ADDRESS;
    }
    rc = getaddrinfo(address.host, "0", &hints, &list);
    if (rc != 0) {
        say(error, "cannot listen on %s: cannot resolve %s: %s", listen, address.host,
            gai_strerror(rc));
        return TRANSPORT_ERR_ADDRESS;
    }
    for (ai = list; ai && rc >= 0; ai = ai->ai_next) {
        if (ai->ai_family == AF_INET || ai->ai_family == AF_INET6) {
            rc = listen_one(s, ai, s && s->port ? (uint16_t)s->port : address.port, error);
            any = any || rc == 0;
        }
    }
    freeaddrinfo(list);
    return rc < 0 || !any ? TRANSPORT_ERR_ADDRESS : 0;
}

int transport_listen_check(const char *listen, char *error)
{
    return listen_all(NULL, listen, error);
}

/* ---- Opening ---- */

static grpc_arg integer(const char *key, int64_t value)
{
    grpc_arg arg;

    arg.type = GRPC_ARG_INTEGER;
    arg.key = (char *)(uintptr_t)key; /* gRPC does not write to it */
    arg.value.integer = value > INT32_MAX ? INT32_MAX : (int)value;
    return arg;
}

static grpc_server *create_grpc(const struct transport_server_config *config, uint32_t max_calls)
{
    uint32_t max_bytes = config->max_message_bytes;
    grpc_arg args[] = {
        integer(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH,
                max_bytes ? max_bytes : TRANSPORT_MIN_MESSAGE_BYTES),
        /* Otherwise a second server shares the port without a word. */
        integer(GRPC_ARG_ALLOW_REUSEPORT, 0),
        integer(GRPC_ARG_KEEPALIVE_TIME_MS, TRANSPORT_KEEPALIVE_MS),
        integer(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, TRANSPORT_KEEPALIVE_TIMEOUT_MS),
        integer(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1),
        integer(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0),
        /* Clients of ours ping every TRANSPORT_KEEPALIVE_MS; half of it is no abuse. */
        integer(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, TRANSPORT_KEEPALIVE_MS / 2),
        /* What one connection can have open: enough to be told that there are too many. */
        integer(GRPC_ARG_MAX_CONCURRENT_STREAMS, (int64_t)max_calls + 2 * SERVER_MAX_WATCHES),
        integer(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, SERVER_HANDSHAKE_MS),
        /* Only the identity: unpacking is work for no completion-queue thread, and a small message
         * could unpack to any size.  A client that packs is told so, UNIMPLEMENTED. */
        integer(GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET, 1),
    };
    grpc_channel_args list = {sizeof(args) / sizeof(args[0]), args};

    return grpc_server_create(&list, NULL);
}

static int open_cqs(struct transport_server *s, uint32_t n)
{
    size_t i;
    int rc;

    s->cqs = calloc(n, sizeof(*s->cqs));
    if (!s->cqs)
        return TRANSPORT_ERR_NOMEM;
    for (i = 0; i < n; i++) {
        rc = transport_cq_open(&s->cqs[i]);
        if (rc < 0)
            return rc;
        s->n_cqs++;
        grpc_server_register_completion_queue(s->grpc, s->cqs[i].cq, NULL);
    }
    return 0;
}

static bool is_listed(const char *const *paths, const char *path)
{
    for (; paths && *paths; paths++)
        if (strcmp(*paths, path) == 0)
            return true;
    return false;
}

/* Register a method and make its slot on each queue. */
static int add_method(struct transport_server *s, const struct transport_method *method,
                      bool counted, const char *const *while_draining)
{
    void *registered;
    char *path;
    size_t i;

    if (!method->path || method->path[0] != '/' || !method->handler)
        return TRANSPORT_ERR_INVALID;
    path = strdup(method->path);
    if (!path)
        return TRANSPORT_ERR_NOMEM;
    s->paths[s->n_paths++] = path;
    registered = grpc_server_register_method(s->grpc, path, NULL,
                                             GRPC_SRM_PAYLOAD_READ_INITIAL_BYTE_BUFFER, 0);
    if (!registered) /* there twice */
        return TRANSPORT_ERR_INVALID;
    for (i = 0; i < s->n_cqs; i++) {
        struct server_slot *slot = &s->slots[s->n_slots++];
        slot->server = s;
        slot->method = *method;
        slot->method.path = path;
        slot->registered = registered;
        slot->cq = s->cqs[i].cq;
        slot->counted = counted;
        slot->while_draining = is_listed(while_draining, path);
    }
    return 0;
}

static int add_methods(struct transport_server *s, const struct transport_server_config *config)
{
    struct transport_method health[HEALTH_METHODS];
    size_t n = config->n_methods + HEALTH_METHODS, i;
    int rc = 0;

    s->paths = calloc(n, sizeof(*s->paths));
    s->slots = calloc(n * s->n_cqs, sizeof(*s->slots));
    if (!s->paths || !s->slots)
        return TRANSPORT_ERR_NOMEM;
    health_methods(s->health, health);
    for (i = 0; i < HEALTH_METHODS && rc == 0; i++)
        rc = add_method(s, &health[i], false, NULL);
    for (i = 0; i < config->n_methods && rc == 0; i++)
        rc = add_method(s, &config->methods[i], true, config->while_draining);
    return rc;
}

static int post_all(struct transport_server *s)
{
    size_t i, k;
    int rc = 0;

    for (i = 0; i < s->n_slots && rc == 0; i++)
        for (k = 0; k < SERVER_POSTED && rc == 0; k++)
            rc = server_call_post(&s->slots[i]);
    for (i = 0; i < s->n_cqs && rc == 0; i++)
        for (k = 0; k < SERVER_POSTED && rc == 0; k++)
            rc = server_unknown_post(s, s->cqs[i].cq);
    return rc;
}

static struct transport_server *new_server(const struct transport_server_config *config)
{
    struct transport_server *s = calloc(1, sizeof(*s));
    pthread_condattr_t attr;

    if (!s)
        return NULL;
    s->max_calls = config->max_calls ? config->max_calls : SERVER_MAX_CALLS;
    s->queue_bytes = config->call_queue_bytes ? config->call_queue_bytes : SERVER_QUEUE_BYTES;
    s->shut_down.fn = on_shut_down;
    pthread_mutex_init(&s->lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&s->changed, &attr);
    pthread_condattr_destroy(&attr);
    return s;
}

int transport_server_open(const struct transport_server_config *config,
                          struct transport_server **out, char *error)
{
    uint32_t n_threads = config->n_threads ? config->n_threads : 1;
    struct transport_server *s;
    int rc;

    if (config->n_methods > TRANSPORT_MAX_METHODS || n_threads > SERVER_MAX_THREADS) {
        say(error, "a server has at most %d methods and %d threads", TRANSPORT_MAX_METHODS,
            SERVER_MAX_THREADS);
        return TRANSPORT_ERR_INVALID;
    }
    s = new_server(config);
    if (!s) {
        say(error, "no memory");
        return TRANSPORT_ERR_NOMEM;
    }
    say(error, "no memory, or no thread");
    rc = health_open(&s->health, config->services);
    if (rc < 0)
        goto out;
    s->grpc = create_grpc(config, s->max_calls);
    rc = open_cqs(s, n_threads);
    if (rc < 0)
        goto out;
    rc = add_methods(s, config);
    if (rc == TRANSPORT_ERR_INVALID)
        say(error, "a method without a path or a handler, or one that is there twice");
    if (rc < 0)
        goto out;
    rc = listen_all(s, config->listen, error);
    if (rc < 0)
        goto out;
    grpc_server_start(s->grpc);
    rc = post_all(s);
    if (rc < 0)
        goto out;
    if (error)
        error[0] = '\0';
    *out = s;
    s = NULL;
out:
    transport_server_close(s, 0);
    return rc;
}

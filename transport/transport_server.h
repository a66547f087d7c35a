/* transport_server: what the server, its calls and its health service share. */
#ifndef TRANSPORT_SERVER_H
#define TRANSPORT_SERVER_H

#include "transport/transport.h"
#include "transport/transport_cq.h"

#include <grpc/grpc.h>
#include <pthread.h>
#include <stdatomic.h>

/* Bounds of the server that are nobody else's business. */
enum {
    SERVER_POSTED = 8, /* requests posted to gRPC for each method and queue */
    SERVER_QUEUE_BYTES = 8 << 20,
    SERVER_QUEUE_MESSAGES = 16384, /* in a call's queue: empty messages take memory, too */
    SERVER_MAX_CALLS = 256,        /* where the configuration says 0 */
    SERVER_MAX_THREADS = 64,
    SERVER_MAX_WATCHES = 64, /* of health */
    SERVER_HANDSHAKE_MS = 10000,
};

/* A method on one queue: where new calls of it are asked for. */
struct server_slot {
    struct transport_server *server;
    struct transport_method method; /* its path is the server's */
    void *registered;
    grpc_completion_queue *cq;
    bool counted; /* among the open calls, and limited: all but health */
    bool while_draining;
};

struct transport_server {
    /* Set by open, read-only afterwards. */
    grpc_server *grpc;
    struct transport_cq *cqs;
    size_t n_cqs;
    struct server_slot *slots;
    size_t n_slots;
    char **paths;
    size_t n_paths;
    struct transport_health *health;
    uint32_t max_calls;
    size_t queue_bytes;
    int port;

    struct transport_tag shut_down;

    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* Guarded by lock. */
    uint32_t n_open;  /* counted calls, from their handler to their on_done */
    uint32_t n_busy;  /* the same of all calls: health, refused and unknown ones, too */
    uint32_t n_live;  /* calls whose memory, or gRPC call, is there yet */
    bool is_draining; /* close has begun */
    bool is_shut_down;
};

enum server_admission { SERVER_ADMITTED, SERVER_FULL, SERVER_DRAINING };

/* One more call, and whether it may be served; one of no slot may. */
enum server_admission server_call_begins(struct transport_server *s,
                                         const struct server_slot *slot);
/* Its tags are back; then, its memory is free. */
void server_call_ended(struct transport_server *s, bool counted);
void server_call_freed(struct transport_server *s);

/* Ask gRPC for a next call.  TRANSPORT_ERR_NOMEM, TRANSPORT_ERR_CLOSED. */
int server_call_post(struct server_slot *slot);
/* The same for calls of no method that we have. */
int server_unknown_post(struct transport_server *s, grpc_completion_queue *cq);

/* grpc.health.v1 (transport_health.c). */
enum { HEALTH_METHODS = 2 };
int health_open(struct transport_health **out, const char *const *services);
void health_methods(struct transport_health *h, struct transport_method methods[HEALTH_METHODS]);
void health_set(struct transport_health *h, bool serving);
/* Ends all watches; new ones are refused. */
void health_stop(struct transport_health *h);
/* When no call is left. */
void health_close(struct transport_health *h);

#endif

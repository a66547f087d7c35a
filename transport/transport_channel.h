/* transport_channel: what a channel and its requests share. */
#ifndef TRANSPORT_CHANNEL_H
#define TRANSPORT_CHANNEL_H

#include "transport/transport.h"
#include "transport/transport_cq.h"

#include <grpc/grpc.h>
#include <pthread.h>

enum {
    CHANNEL_BACKOFF_FIRST_MS = 100,
    CHANNEL_BACKOFF_MAX_MS = 2000,
    CHANNEL_CONNECT_MS = 5000, /* given to one attempt */
};

struct transport_request;

/* A request's place in its channel's list. */
struct channel_entry {
    struct channel_entry *next, **at; /* at: what points here; NULL: not in the list */
};

struct transport_channel {
    /* Set by open, read-only afterwards. */
    grpc_channel *grpc;
    struct transport_cq cq;

    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* Guarded by lock. */
    struct channel_entry *open;
    uint32_t n_live; /* requests whose on_end has not returned yet */
    bool closing;
};

/* TRANSPORT_ERR_CLOSED: the channel closes. */
int channel_request_begins(struct transport_channel *ch, struct channel_entry *entry);
void channel_request_ended(struct transport_channel *ch, struct channel_entry *entry);

/* The request that an entry stands for (transport_request.c). */
struct transport_request *channel_entry_request(struct channel_entry *entry);

#endif

/* Prefill nodes: the list of the command line, with who of them serves now. */
#ifndef DECODE_PEER_H
#define DECODE_PEER_H

#include "node/node.h"
#include "transport/transport.h"

#include <stdatomic.h>

enum {
    DECODE_MAX_PEERS = 64,
    /* How long a peer may take to tell its health, and how often it is asked: more often while it
     * does not serve, so that one that comes up is used soon. */
    DECODE_HEALTH_MS = 1000,
    DECODE_HEALTH_EVERY_MS = 1000,
    DECODE_HEALTH_RETRY_MS = 200,
};

struct decode_peer {
    const char *address;
    struct transport_channel *channel;
    atomic_bool serving;
    atomic_bool told_unfit; /* since it came up, the log has said why it cannot be used */
    /* The receive worker's: which life of the peer spoke last. */
    uint8_t epoch[NODE_EPOCH_BYTES];
    bool known;
};

struct decode_peers {
    struct decode_peer items[DECODE_MAX_PEERS];
    uint32_t n;
    struct node_inbox
        watch; /* the watcher sleeps on it; woken when there is something to look at */
    atomic_bool stopping;
};

/* Open a channel to each address.  0, or -1 with a message in error, TRANSPORT_DETAIL_BYTES. */
int decode_peers_open(struct decode_peers *p, const struct node_strings *addresses,
                      uint32_t max_message_bytes, char *error);
/* The watcher must have ended. */
void decode_peers_close(struct decode_peers *p);
void *decode_peers_watch(void *peers); /* thread */
void decode_peers_stop(struct decode_peers *p);
/* A call to it failed: not serving until it says otherwise, which it is asked at once. */
void decode_peers_failed(struct decode_peers *p, struct decode_peer *peer);

#endif

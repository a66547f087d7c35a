/* A prefill node that is none: it passes calls on to a real one and its messages back, and harms
 * them on the way as it is told.  Used by the fault tests of decode/. */
#ifndef PREFILL_PROXY_H
#define PREFILL_PROXY_H

#include "transport/transport.h"

#include <stdatomic.h>
#include <stdbool.h>

enum proxy_fault {
    PROXY_NONE,
    PROXY_REFUSE,    /* RESOURCE_EXHAUSTED at once */
    PROXY_BREAK,     /* UNAVAILABLE instead of message `at` */
    PROXY_END,       /* OK instead of message `at` */
    PROXY_FLIP,      /* one bit in the middle of message `at` */
    PROXY_DROP,      /* message `at` does not come */
    PROXY_TWICE,     /* message `at` comes twice */
    PROXY_CUT,       /* message `at` lacks its last byte */
    PROXY_EMPTY,     /* an empty message instead of message `at` */
    PROXY_STALL,     /* nothing comes from message `at` on */
    PROXY_AFTER_END, /* message `at` comes once more behind the seal */
};

struct proxy {
    struct transport_server *server;
    struct transport_channel *channel; /* to the real node */
    char address[32];
    /* Set while no call runs. */
    atomic_int fault; /* enum proxy_fault */
    atomic_int at;
    /* Over all calls. */
    atomic_int n_calls, n_messages, n_open;
};

/* Listen, and pass on to target. */
void proxy_open(struct proxy *p, const char *target);
void proxy_close(struct proxy *p);

#endif

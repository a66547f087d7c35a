/* A server with methods to try the transport with, and a client that writes down what it is told.
 * Used by the tests of transport/. */
#ifndef TRANSPORT_FIXTURE_H
#define TRANSPORT_FIXTURE_H

#include "transport/transport.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

/* ---- The server's side ---- */

/* What became of the calls of a server, over all of them; and a place to keep one. */
struct tally {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int accepted, cancelled, sent, done, released;
    struct transport_call *held; /* /t.T/Hold keeps the last call, with a reference, here */
    char peer[128], metadata[128], first_metadata[128], request[64]; /* metadata: x-test */
    size_t n_request;
    int64_t deadline_ns;
};

extern struct tally tally;

/* Methods: /t.T/Echo replies with the request; /t.T/Count takes a decimal n and sends "0".."n-1" in
 * frames of 4 bytes; /t.T/Payload takes n and sends n messages with a payload of 64 KiB each, that
 * are counted in tally.released; /t.T/Hold keeps the call in tally.held and says no more;
 * /t.T/HoldUnary the same, unary; /t.T/Fail ends with the status in its request, "CODE text";
 * /t.T/Drop unrefs its call and no more; /t.T/Silent finishes OK without a reply. */
struct transport_server *fixture_server(const char *listen, uint32_t max_calls,
                                        uint32_t max_message_bytes, uint32_t queue_bytes,
                                        uint32_t n_threads);
struct transport_channel *fixture_channel(const struct transport_server *s);
struct transport_channel *fixture_channel_port(int port);

struct transport_out *fixture_out(const void *bytes, size_t n);
struct transport_out *fixture_text(const char *text);
/* A message of a 4-byte head and n bytes of payload, counted in tally.released. */
struct transport_out *fixture_payload(uint32_t head, size_t n);

/* Wait until *counter of the tally is at least n; false after ten seconds. */
bool tally_wait(const int *counter, int n);
int tally_get(const int *counter);
/* The held call, waited for; the caller's reference.  NULL: none came. */
struct transport_call *tally_take(void);

/* ---- The client's side ---- */

struct listener {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool by_hand; /* next() is the test's business */
    struct transport_request *request;
    int n_messages, n_ends, after_end;
    size_t n_bytes;
    bool in_order; /* messages carry their number in 4 bytes */
    bool unharmed; /* payload bytes are what they should be */
    int code;
    char details[TRANSPORT_DETAIL_BYTES];
    uint8_t last[64];
};

void listener_init(struct listener *l);
void listener_release(struct listener *l);
/* transport_request_start with this listener. */
int listener_start(struct listener *l, struct transport_channel *ch, const char *path,
                   struct transport_out *message, int64_t deadline_ms);
/* Wait for the end; false after ms. */
bool listener_wait(struct listener *l, int64_t ms);
bool listener_wait_messages(struct listener *l, int n);
/* A counter of a listener that is still told things. */
int listener_get(struct listener *l, const int *counter);

int64_t now_ms(void);

#endif

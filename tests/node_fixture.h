/* Runs the built node programs, and asks them.  Used by the tests of prefill/ and decode/. */
#ifndef NODE_FIXTURE_H
#define NODE_FIXTURE_H

#include "node/node.h"
#include "proto/proto.h"
#include "transport/transport.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

/* ---- Nodes ---- */

struct fixture_node {
    pid_t pid;
    int port;
    char address[32];
    struct transport_channel *channel;
};

/* Start build/NAME/baton-NAME with --listen 127.0.0.1:0 and further arguments, NULL-terminated, and
 * wait until it says where it listens and its health is SERVING.  Aborts the test otherwise. */
void fixture_start(struct fixture_node *node, const char *name, const char *const *args);
/* SIGTERM, and wait: the exit code, or -1 where a signal ended it. */
int fixture_stop(struct fixture_node *node);
void fixture_kill(struct fixture_node *node); /* SIGKILL */
/* Run a program to its end with its stderr in err: the exit code, or -1. */
int fixture_run(const char *name, const char *const *args, char *err, size_t n);
/* The path of a tiny model; static, until the next call. */
const char *fixture_tiny(const char *name);

/* ---- Asking ---- */

enum { ANSWER_IDS = 1100, ANSWER_TEXT = 16384 };

struct answer {
    int status;
    char details[TRANSPORT_DETAIL_BYTES];
    bool started, finished;
    char prefill[64];
    uint32_t n_started, n_finished, n_deltas;
    char text[ANSWER_TEXT];
    size_t n_text;
    uint32_t ids[ANSWER_IDS];
    uint64_t digests[ANSWER_IDS];
    float logprobs[ANSWER_IDS];
    size_t n_ids, n_digests;
    bool utf8; /* each delta's text is valid UTF-8 */
    int reason;
    char stopped_by[256], fallback[512];
    Baton__V1__Usage usage;     /* by value; of finished */
    Baton__V1__Timings timings; /* by value; of finished */
};

/* A Generate that runs. */
struct asking {
    struct transport_request *request;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct answer answer;
    bool over;
    bool hold; /* read one message and no more */
};

void asking_start(struct asking *a, const struct fixture_node *node,
                  const Baton__V1__GenerateRequest *q, int64_t deadline_ms);
/* Wait for its end, and let go of it. */
void asking_wait(struct asking *a);
/* Wait until n ids came, or it ended. */
void asking_wait_ids(struct asking *a, size_t n);
void asking_cancel(struct asking *a);
/* Ask and wait. */
void ask(const struct fixture_node *node, const Baton__V1__GenerateRequest *q, struct answer *out);

/* A request for ids: greedy, digests on, no end tokens. */
struct question {
    Baton__V1__GenerateRequest q;
    Baton__V1__TokenIds tokens;
    Baton__V1__Sampling sampling;
    Baton__V1__Chat chat;
    Baton__V1__ChatMessage message, *messages[1];
};

void question_ids(struct question *q, uint32_t *ids, size_t n, uint32_t max_tokens, int route);
void question_text(struct question *q, const char *text, uint32_t max_tokens, int route);
void question_chat(struct question *q, const char *text, uint32_t max_tokens, int route);

/* Ids that depend on seed, below n_vocab. */
void fixture_ids(uint32_t *ids, size_t n, uint32_t seed, uint32_t n_vocab);

struct description {
    uint32_t n_ctx, n_vocab, running, queued, sessions, n_serving;
    uint32_t total, free, live, reserved, evictable;
};

void describe(const struct fixture_node *node, struct description *out);
/* Wait until nothing runs, no page is reserved and every live one is there only for reuse.  False
 * after ten seconds. */
bool wait_idle(const struct fixture_node *node, struct description *out);
/* Wait until n prefill nodes serve. */
bool wait_serving(const struct fixture_node *node, uint32_t n);

/* ---- Audits ---- */

struct audit {
    int status;
    char details[TRANSPORT_DETAIL_BYTES];
    char fault[512];
    uint32_t total, free, live, contexts, entries;
};

/* Audit a node, prefill or decode; what does not hold ends the test. */
void audit(const struct fixture_node *node, struct audit *out);

/* Audits without end, beside what the test does. */
struct auditing {
    const struct fixture_node *node;
    pthread_t thread;
    atomic_bool enough;
    uint32_t n; /* so far */
    struct audit last;
};

void auditing_start(struct auditing *a, const struct fixture_node *node);
/* How many there were; all held. */
uint32_t auditing_stop(struct auditing *a);

#endif

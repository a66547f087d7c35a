/* The scheduler of a decode node: one thread that owns the engine and all live contexts, but those
 * that are with a flight.  decode_request.h has the states of a request, decode_scheduler.c the
 * rounds, decode_route.c where a prompt is computed, decode_token.c what a row of logits leads to.
 */
#ifndef DECODE_SCHEDULER_H
#define DECODE_SCHEDULER_H

#include "decode/decode_request.h"

struct decode_scheduler {
    struct decode_node *node;
    uint32_t n_vocab;
    uint32_t n_slots;
    struct sampler *sampler;
    struct engine_item *items;      /* [n_slots], of a step */
    struct decode_request **owners; /* [n_slots], of those items */
    float *logits;                  /* [n_slots][n_vocab] */
    bool *taken;                    /* [n_slots] */

    struct decode_request **requests; /* [node->max_requests], in order of arrival; NULL: gone in
                                         this round */
    uint32_t n_requests;
};

/* One position that another thread needs computed; it waits for `done` in its inbox. */
struct decode_seed {
    struct decode_mail mail; /* in the scheduler's inbox */
    struct kv_context *ctx;  /* the scheduler's meanwhile; the position is reserved */
    uint32_t id;
    int rc;
    struct node_inbox *back;
    struct node_link done;
};

int decode_scheduler_open(struct decode_node *node, struct decode_scheduler **out);
void decode_scheduler_close(struct decode_scheduler *s);
void *decode_scheduler_run(void *scheduler); /* thread */

static inline float *decode_slot_logits(const struct decode_scheduler *s,
                                        const struct decode_request *r)
{
    return s->logits + (size_t)r->slot * s->n_vocab;
}

/* Let go of slot and context.  keep: the context goes into the tree. */
void decode_scheduler_drop(struct decode_scheduler *s, struct decode_request *r, bool keep);
/* End a request with an error: drop everything, tell the caller, take it out of the table. */
void decode_scheduler_fail(struct decode_scheduler *s, struct decode_request *r, int status,
                           const char *details);
/* It was answered in full: the status follows what is queued, the context goes into the tree, and
 * keep_ids of its ids are the session's. */
void decode_scheduler_finish(struct decode_scheduler *s, struct decode_request *r, size_t keep_ids);

/* ---- decode_route.c ---- */

/* Match and reservation in one step, and then where the rest is computed.  false: no slot or no
 * page now, it has to wait. */
bool decode_route_admit(struct decode_scheduler *s, struct decode_request *r);
/* Its flight is over. */
void decode_route_landed(struct decode_scheduler *s, struct decode_request *r);

/* ---- decode_token.c ---- */

/* The whole prompt is computed, its logits are in the slot: others may start from it, and the first
 * token is drawn. */
void decode_token_first(struct decode_scheduler *s, struct decode_request *r);
/* Draw from the slot's logits, send what that shows, and end where it ends. */
void decode_token_next(struct decode_scheduler *s, struct decode_request *r);

#endif

/* A flight: one call to a prefill node, and the context that its frames go into.
 *
 *   gRPC threads     leave messages and the end in the receive inbox
 *   receive worker   verifies each record before anything of it is shown: the codec's checks, then
 *                    the ids against the prompt; only then rows are scattered and committed
 *   scheduler        starts it, gets it back in its inbox when it is over, or takes it over before
 *
 * Over means, for the receive worker:
 *   SEALED   every position of the prompt is in the context, and the seal holds: the commit
 *   BROKEN   the call ended without a seal: the context holds exactly the verified frames
 *   FALSE    a record that does not verify, or OK without a seal: nothing of it may be used
 *   DECLINED the peer accepted, but would compute so much more that it is quicker here: no fault
 *
 * Who has the context: the flight, from start until decode_flight_take(), which closes it to frames
 * first; a frame that is being verified then is waited for (a millisecond).  What the flight
 * borrows from its request (ids, logits) is touched only with the lock held and while it is not
 * closed.
 *
 * References: the scheduler's, until it has taken over; transport's, until the end was worked off;
 * and the one of the mail to the scheduler. */
#ifndef DECODE_FLIGHT_H
#define DECODE_FLIGHT_H

#include "decode/decode_node.h"

struct decode_flight;
struct decode_request;

enum decode_outcome { DECODE_FLYING, DECODE_SEALED, DECODE_BROKEN, DECODE_FALSE, DECODE_DECLINED };

struct decode_flight_start {
    struct decode_node *node;
    struct decode_peer *peer;
    const struct kv_namespace *ns;
    const void *salt;
    size_t salt_len;
    const uint32_t *ids; /* [n_ids]; borrowed until the flight is taken over */
    uint32_t n_ids;
    float *logits; /* [n_vocab]; likewise */
    bool logits_digest;
    bool may_decline; /* where the peer holds less of it than the context, and here is quicker */
    int64_t deadline_ms;
};

/* Begin to compute the rest of ctx's prompt over there.  The context is the flight's if 0 is
 * returned, and stays the caller's on an error, which *why names. */
int decode_flight_start(const struct decode_flight_start *start, struct kv_context *ctx,
                        struct decode_request *request, struct decode_flight **out,
                        struct kv_why *why);

/* What the scheduler gets back. */
struct decode_landing {
    enum decode_outcome outcome;
    struct kv_context *ctx;
    bool began; /* the peer accepted the call */
    bool unfit; /* it is no prefill node, or not of our model and precision; which was logged */
    char why[DECODE_WHY_BYTES];
    uint32_t n_received, n_frames;
    uint64_t n_bytes;
    uint32_t matched;
    uint64_t queue_ns, compute_ns, exposed_ns;
};

/* Close the flight to frames, take context and figures, cancel what still runs, and let go of the
 * scheduler's reference. */
void decode_flight_take(struct decode_flight *f, struct decode_landing *out);
/* The request whose flight is over; NULL where the scheduler has taken it over before.  Drops the
 * mail's reference; the flight lives as long as the request has it. */
struct decode_request *decode_flight_arrived(struct decode_flight *f);

void *decode_flight_receive(void *node); /* thread */

#endif

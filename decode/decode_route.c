/* Where a prompt is computed.
 *
 * A request that has a slot starts from what the tree holds.  The rest goes to the first prefill
 * node that serves, where there is one and the rest is worth the way; else it is computed here.  A
 * call that fails before a frame was used goes to the next one.  One that its node accepts, but
 * would be quicker here by what it says, is given up.  After that, and in every other case, the
 * rest is computed here: from exactly the verified frames where the stream broke, from the start
 * where it was false. */
#include "decode/decode_flight.h"
#include "decode/decode_scheduler.h"

#include <assert.h>
#include <inttypes.h>
#include <string.h>

/* Why the prompt is computed here although a prefill node is there.  The text may be a peer's. */
static void note_fallback(struct decode_request *r, const char *why)
{
    size_t i = 0;

    for (; why[i] != '\0' && i < sizeof(r->fallback) - 1; i++)
        r->fallback[i] = why[i] >= ' ' && why[i] <= '~' ? why[i] : '?';
    r->fallback[i] = '\0';
}

static bool started(struct decode_scheduler *s, struct decode_request *r, const char *where)
{
    if (r->started)
        return true;
    r->started = true;
    if (decode_reply_started(r, where) == 0)
        return true;
    decode_scheduler_fail(s, r, TRANSPORT_CANCELLED, "the caller is gone");
    return false;
}

static void go_local(struct decode_scheduler *s, struct decode_request *r)
{
    if (!started(s, r, "local"))
        return;
    r->state = DECODE_PREFILLING;
    r->timings.local_start_ns = node_now_ns();
}

/* The next peer to try: those that serve, and where a prefill node was asked for by name, then the
 * others, for what is known of them may be old.  NULL: none. */
static struct decode_peer *next_peer(struct decode_request *r)
{
    struct decode_peers *p = &r->node->peers;
    bool by_name = r->q->route == BATON__V1__ROUTE__ROUTE_PREFILL;

    for (int round = 0; round < (by_name ? 2 : 1); round++) {
        for (uint32_t i = 0; i < p->n; i++) {
            bool tried = (r->tried >> i & 1) != 0;

            if (!tried && (round == 1 || atomic_load(&p->items[i].serving))) {
                r->tried |= UINT64_C(1) << i;
                return &p->items[i];
            }
        }
    }
    return NULL;
}

static bool take_off(struct decode_scheduler *s, struct decode_request *r, struct decode_peer *peer)
{
    int64_t left_ms = (r->deadline_ns - node_now_ns()) / 1000000;
    const struct decode_flight_start start = {
        .node = s->node,
        .peer = peer,
        .ns = &r->ns,
        .salt = r->q->salt.data,
        .salt_len = r->q->salt.len,
        .ids = r->ids.ids,
        .n_ids = r->n_prompt,
        .logits = decode_slot_logits(s, r),
        .logits_digest = r->q->logits_digest,
        .may_decline = r->q->route == BATON__V1__ROUTE__ROUTE_AUTO,
        .deadline_ms = left_ms > 0 ? left_ms : 1,
    };
    struct kv_why why = {.text = ""};

    if (decode_flight_start(&start, r->ctx, r, &r->flight, &why) < 0) {
        note_fallback(r, why.text);
        return false;
    }
    r->ctx = NULL;
    r->state = DECODE_RECEIVING;
    return true;
}

/* To the next prefill node, or here.  The request has its context. */
static void go_remote(struct decode_scheduler *s, struct decode_request *r)
{
    struct decode_peer *peer;

    while ((peer = next_peer(r)) != NULL) {
        if (take_off(s, r, peer)) {
            started(s, r, peer->address);
            return;
        }
    }
    if (r->fallback[0] == '\0')
        note_fallback(r, "no prefill node serves");
    if (r->q->route == BATON__V1__ROUTE__ROUTE_PREFILL && !r->began) {
        decode_scheduler_fail(s, r, TRANSPORT_UNAVAILABLE, r->fallback);
        return;
    }
    go_local(s, r);
}

/* Where it does not although it might, the request notes why. */
static bool wants_remote(struct decode_request *r, uint32_t n_rest)
{
    uint32_t least = r->node->options->remote_min;
    char why[DECODE_WHY_BYTES];

    if (r->node->peers.n == 0 || r->local_only || r->q->route == BATON__V1__ROUTE__ROUTE_LOCAL)
        return false;
    if (r->q->route == BATON__V1__ROUTE__ROUTE_PREFILL || n_rest >= least)
        return true;
    snprintf(why, sizeof(why), "a rest of %" PRIu32 " positions is under --remote-min %" PRIu32,
             n_rest, least);
    note_fallback(r, why);
    return false;
}

static bool take_slot(struct decode_scheduler *s, struct decode_request *r)
{
    for (uint32_t i = 0; i < s->n_slots; i++) {
        if (!s->taken[i]) {
            s->taken[i] = true;
            r->slot = i;
            atomic_fetch_add(&s->node->n_running, 1);
            return true;
        }
    }
    return false;
}

/* How far a request's context may come. */
static uint32_t reserve_to(const struct decode_request *r)
{
    /* max_tokens is cut to the context, and the last token needs no position. */
    return r->n_prompt + r->max_tokens - 1;
}

bool decode_route_admit(struct decode_scheduler *s, struct decode_request *r)
{
    bool alone = atomic_load(&s->node->n_running) == 0;
    struct kv_match m;
    struct kv_why why;
    int rc;

    assert(reserve_to(r) < s->node->runtime.n_ctx);
    if (!take_slot(s, r))
        return false;
    rc = kv_cache_match(s->node->runtime.cache, &r->ns, r->ids.ids, r->n_prompt, reserve_to(r),
                        decode_slot_logits(s, r), s->n_vocab, &r->ctx, &m);
    if (rc < 0)
        decode_scheduler_drop(s, r, false);
    if (rc == KV_ERR_FULL && !alone)
        return false;
    if (rc < 0) {
        kv_fail(&why, rc, "pages for %" PRIu32 " positions: %s", reserve_to(r), kv_strerror(rc));
        decode_scheduler_fail(s, r, TRANSPORT_RESOURCE_EXHAUSTED, why.text);
        return true;
    }
    atomic_fetch_sub(&s->node->n_waiting, 1);
    r->state = DECODE_PREFILLING;
    if (r->timings.admitted_ns == 0)
        r->timings.admitted_ns = node_now_ns();
    r->usage.reused = m.n_matched;
    if (m.n_matched == r->n_prompt) {
        if (started(s, r, "local"))
            decode_token_first(s, r);
    } else if (wants_remote(r, r->n_prompt - m.n_matched)) {
        go_remote(s, r);
    } else {
        go_local(s, r);
    }
    return true;
}

/* Back among those that wait, with nothing in hand. */
static void wait_again(struct decode_scheduler *s, struct decode_request *r)
{
    r->local_only = true;
    r->began = true;
    decode_scheduler_drop(s, r, false);
    r->state = DECODE_WAITING;
    atomic_fetch_add(&s->node->n_waiting, 1);
}

/* All positions came, but no logits: the last one has to run here to have them.  The cut ends the
 * reservation, and nobody but this thread can take what it gave back; if it cannot be had again all
 * the same, the request takes its turn once more. */
static bool leave_one_to_run(struct decode_scheduler *s, struct decode_request *r)
{
    if (kv_context_length(r->ctx) < r->n_prompt)
        return true;
    if (kv_context_truncate(r->ctx, r->n_prompt - 1) == 0 &&
        kv_context_reserve(r->ctx, reserve_to(r)) == 0) {
        r->usage.received--;
        return true;
    }
    wait_again(s, r);
    return false;
}

static void note_landing(struct decode_request *r, const struct decode_landing *l)
{
    struct decode_usage *u = &r->usage;

    r->began = r->began || l->began;
    u->bytes += l->n_bytes;
    u->frames += l->n_frames;
    if (l->outcome == DECODE_FALSE)
        return;
    u->received += l->n_received;
    if (l->outcome != DECODE_SEALED)
        return;
    u->prefill_reused = l->matched > u->reused ? l->matched - u->reused : 0;
    r->timings.prefill_queue_ns = l->queue_ns;
    r->timings.prefill_ns = l->compute_ns;
    r->timings.exposed_transfer_ns = l->exposed_ns;
}

/* A call that was given up is policy, and no fault; of a peer that does not fit the log knows. */
static void log_fallback(const struct decode_request *r, const struct decode_landing *l)
{
    enum decode_outcome outcome = l->outcome;
    const char *name = outcome == DECODE_DECLINED ? "declined"
                       : outcome == DECODE_FALSE  ? "false"
                                                  : "broken";
    char quoted[DECODE_WHY_BYTES + 64];

    node_log(outcome == DECODE_DECLINED || l->unfit ? NODE_INFO : NODE_WARN, "fallback",
             "outcome=%s positions=%" PRIu32 " why=%s", name, kv_context_length(r->ctx),
             node_quote(quoted, sizeof(quoted), r->fallback));
}

void decode_route_landed(struct decode_scheduler *s, struct decode_request *r)
{
    struct decode_landing l;

    decode_flight_take(r->flight, &l);
    r->flight = NULL;
    r->ctx = l.ctx;
    r->state = DECODE_PREFILLING;
    note_landing(r, &l);
    if (l.outcome == DECODE_SEALED) {
        r->fallback[0] = '\0';
        decode_token_first(s, r);
        return;
    }
    note_fallback(r, l.why);
    log_fallback(r, &l);
    if (l.outcome == DECODE_DECLINED) {
        go_local(s, r);
    } else if (l.outcome == DECODE_FALSE) {
        /* Nothing of it may stay; its reservation goes with it, so it takes its turn again. */
        wait_again(s, r);
    } else if (l.n_received == 0) {
        go_remote(s, r);
    } else if (leave_one_to_run(s, r)) {
        go_local(s, r);
    }
}

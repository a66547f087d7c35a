#include "decode/decode_flight.h"

#include "decode/decode_request.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* What may come next. */
enum stage { WANT_ACCEPTED, WANT_HEADER, WANT_FRAME, WANT_SEAL };

struct decode_flight {
    struct decode_mail over;    /* in the scheduler's inbox */
    struct decode_mail message; /* in the receive inbox */
    struct decode_mail end;     /* in the receive inbox */
    atomic_int refs;
    struct decode_node *node;
    struct decode_peer *peer;
    struct transport_request *call;
    bool logits_digest;
    bool may_decline;

    /* The scheduler's; NULL once it has taken over. */
    struct decode_request *request;

    /* Left by a gRPC thread before it puts the mail: one message at a time, then the end. */
    struct transport_message *arrived;
    int code;
    char details[384];

    pthread_mutex_t lock;
    /* Guarded by lock. */
    bool closed; /* to frames */
    enum stage stage;
    struct kv_decoder *decoder;
    const uint32_t *ids;
    uint32_t n_ids;
    float *logits;
    bool has_logits;
    struct decode_landing landing;
};

static void flight_unref(struct decode_flight *f)
{
    if (atomic_fetch_sub(&f->refs, 1) != 1)
        return;
    assert(f->landing.ctx == NULL);
    transport_request_unref(f->call);
    kv_decoder_close(f->decoder);
    pthread_mutex_destroy(&f->lock);
    atomic_fetch_sub(&f->node->n_flights, 1);
    free(f);
}

/* ---- gRPC threads ---- */

static void on_message(void *user, struct transport_request *r, struct transport_message *m)
{
    struct decode_flight *f = user;

    (void)r;
    f->arrived = transport_message_ref(m);
    node_inbox_put(&f->node->receive, &f->message.link);
}

static void on_end(void *user, struct transport_request *r, int code, const char *details)
{
    struct decode_flight *f = user;

    (void)r;
    f->code = code;
    snprintf(f->details, sizeof(f->details), "%s", details);
    node_inbox_put(&f->node->receive, &f->end.link);
}

/* ---- Records.  With the lock held; 0, or -1 with *why: false. ---- */

/* A message as pieces, and the next byte to read. */
struct pieces {
    struct iovec *iov;
    size_t n;
};

enum { MAX_PIECES = 4096 };

static bool take_byte(struct pieces *p, uint8_t *out)
{
    while (p->n > 0 && p->iov->iov_len == 0) {
        p->iov++;
        p->n--;
    }
    if (p->n == 0)
        return false;
    *out = *(const uint8_t *)p->iov->iov_base;
    p->iov->iov_base = (uint8_t *)p->iov->iov_base + 1;
    p->iov->iov_len--;
    return true;
}

static size_t pieces_bytes(const struct pieces *p)
{
    size_t n = 0;

    for (size_t i = 0; i < p->n; i++)
        n += p->iov[i].iov_len;
    return n;
}

/* Read the tag and the length in front of a message's one field; what is left in *p is the field.
 * The number of the field, or 0 where this is not such a message. */
static int take_field(struct pieces *p)
{
    uint64_t len = 0;
    uint8_t tag, byte = 0x80;

    if (!take_byte(p, &tag) || (tag & 7) != 2 || (tag & 0x80) != 0)
        return 0;
    for (unsigned shift = 0; (byte & 0x80) != 0; shift += 7) {
        if (shift > 28 || !take_byte(p, &byte))
            return 0;
        len |= (uint64_t)(byte & 0x7f) << shift;
    }
    return len == pieces_bytes(p) ? tag >> 3 : 0;
}

/* The pieces without their first n bytes, in place. */
static void skip_bytes(struct pieces *p, size_t n)
{
    while (n > 0) {
        size_t take = p->iov->iov_len < n ? p->iov->iov_len : n;

        p->iov->iov_base = (uint8_t *)p->iov->iov_base + take;
        p->iov->iov_len -= take;
        n -= take;
        if (p->iov->iov_len == 0) {
            p->iov++;
            p->n--;
        }
    }
}

/* Whether the rest of the prompt is quicker here than over there, by both nodes' measured speeds.
 * Those that wait there are taken for as long as this one.  Where we hold no more of the prompt
 * than the peer, it is the peer's: our time is for the answers that run. */
static bool quicker_here(struct decode_flight *f, const Baton__V1__Accepted *a)
{
    uint32_t ours = f->n_ids - kv_context_length(f->landing.ctx);
    uint32_t theirs = f->n_ids - (a->matched < f->n_ids ? a->matched : f->n_ids);
    double speed = atomic_load(&f->node->runtime.rows_per_s), speed_there = a->tokens_per_second;

    /* A speed of 0, and what is no number, says nothing. */
    if (ours >= theirs || !(speed > 0) || !(speed_there > 0))
        return false;
    if (ours / speed >= theirs * (1.0 + a->queued) / speed_there)
        return false;
    snprintf(f->landing.why, sizeof(f->landing.why),
             "%" PRIu32 " positions here are cheaper than %" PRIu32 " at %.64s", ours, theirs,
             f->peer->address);
    return true;
}

static int record_accepted(struct decode_flight *f, struct transport_message *m, struct kv_why *why)
{
    struct decode_peer *peer = f->peer;
    struct node_message message = {0};
    const Baton__V1__ComputeReply *reply;
    const Baton__V1__Hello *hello;
    int rc;

    if (node_message_unpack(&baton__v1__compute_reply__descriptor, m, &message, why) < 0)
        return -1;
    reply = (const Baton__V1__ComputeReply *)message.message;
    hello = reply->accepted->hello;
    rc = node_hello_check(&f->node->identity, hello, "prefill", "this decode node", why);
    if (rc == 0) {
        if (peer->known && memcmp(peer->epoch, hello->epoch.data, NODE_EPOCH_BYTES) != 0)
            node_log(NODE_INFO, "peer", "prefill=%s restarted=1", peer->address);
        memcpy(peer->epoch, hello->epoch.data, NODE_EPOCH_BYTES);
        peer->known = true;
        f->landing.began = true;
        f->stage = WANT_HEADER;
        if (f->may_decline && quicker_here(f, reply->accepted))
            f->landing.outcome = DECODE_DECLINED;
    }
    node_message_free(&message);
    return rc;
}

static int record_header(struct decode_flight *f, struct pieces *p, struct kv_why *why)
{
    int rc = kv_decoder_header(f->decoder, p->iov, p->n, why);

    if (rc == 0)
        f->stage = WANT_FRAME;
    return rc;
}

/* The codec has checked CRC, digest and place; whether the ids are those that were asked for is for
 * us to say. */
static int check_frame(const struct decode_flight *f, const struct kv_frame *frame,
                       struct kv_why *why)
{
    uint32_t length = kv_context_length(f->landing.ctx);

    if (frame->first != length || frame->count == 0 || frame->count > f->n_ids - length)
        return kv_fail(why, -1,
                       "frame: positions %" PRIu32 " to %" PRIu32 " do not follow %" PRIu32,
                       frame->first, frame->first + frame->count, length);
    if (memcmp(frame->ids, f->ids + length, frame->count * sizeof(*f->ids)) != 0)
        return kv_fail(why, -1, "frame: the ids at %" PRIu32 " are not the prompt's", length);
    return 0;
}

static int record_frame(struct decode_flight *f, struct pieces *p, struct kv_why *why)
{
    struct kv_context *ctx = f->landing.ctx;
    struct kv_frame frame;
    int rc = kv_decoder_frame(f->decoder, p->iov, p->n, &frame, why);

    if (rc < 0)
        return rc;
    rc = check_frame(f, &frame, why);
    if (rc < 0)
        return rc;
    rc = kv_context_begin(ctx, frame.ids, frame.count);
    if (rc < 0)
        return kv_fail(why, rc, "frame: %s", kv_strerror(rc));
    skip_bytes(p, frame.rows_offset);
    rc = kv_context_scatter(ctx, frame.first, frame.count, p->iov, p->n);
    if (rc < 0) {
        kv_context_abort(ctx);
        return kv_fail(why, rc, "frame: rows: %s", kv_strerror(rc));
    }
    kv_context_commit(ctx, frame.count);
    f->landing.n_received += frame.count;
    f->landing.n_frames++;
    return 0;
}

static int record_section(struct decode_flight *f, struct pieces *p, struct kv_why *why)
{
    size_t want = model_params(f->node->runtime.model)->n_vocab * sizeof(float), len;
    enum kv_section kind;
    const void *data;
    int rc = kv_decoder_section(f->decoder, p->iov, p->n, &kind, &data, &len, why);

    if (rc < 0)
        return rc;
    if (kind != KV_SECTION_LOGITS)
        return 0; /* its CRC held; it is nothing that we asked for */
    if (len != want)
        return kv_fail(why, -1, "logits: %zu bytes, not %zu", len, want);
    memcpy(f->logits, data, len);
    f->has_logits = true;
    f->stage = WANT_SEAL;
    return 0;
}

static int check_seal(const struct decode_flight *f, const struct kv_seal *seal,
                      const Baton__V1__Sealed *sealed, struct kv_why *why)
{
    uint32_t n_vocab = model_params(f->node->runtime.model)->n_vocab;
    uint32_t length = kv_context_length(f->landing.ctx);

    if (seal->n_positions != f->n_ids || length != f->n_ids)
        return kv_fail(why, -1, "seal: %" PRIu32 " positions, %" PRIu32 " came, not %" PRIu32,
                       seal->n_positions, length, f->n_ids);
    if (!f->has_logits)
        return kv_fail(why, -1, "seal: no logits came before it");
    if (f->logits_digest && sealed->logits_digest != logits_digest(f->logits, n_vocab))
        return kv_fail(why, -1, "seal: the logits are not those that were computed");
    return 0;
}

static void note_seal(struct decode_flight *f, const Baton__V1__Sealed *sealed)
{
    int64_t now = node_wall_ns();
    struct decode_landing *l = &f->landing;

    l->outcome = DECODE_SEALED;
    l->matched = sealed->matched;
    l->queue_ns = sealed->queue_ns;
    l->compute_ns = sealed->compute_ns;
    /* The two clocks are one only on one machine: what they cannot say is 0. */
    if (now > 0 && (uint64_t)now > sealed->compute_end_unix_ns && sealed->computed > 0)
        l->exposed_ns = (uint64_t)now - sealed->compute_end_unix_ns;
}

static int record_sealed(struct decode_flight *f, struct transport_message *m, struct kv_why *why)
{
    struct node_message message = {0};
    const Baton__V1__Sealed *sealed;
    struct kv_seal seal;
    struct iovec iov;
    int rc;

    if (node_message_unpack(&baton__v1__compute_reply__descriptor, m, &message, why) < 0)
        return -1;
    sealed = ((const Baton__V1__ComputeReply *)message.message)->sealed;
    iov.iov_base = sealed->seal.data;
    iov.iov_len = sealed->seal.len;
    rc = kv_decoder_seal(f->decoder, &iov, 1, &seal, why);
    if (rc == 0)
        rc = check_seal(f, &seal, sealed, why);
    if (rc == 0)
        note_seal(f, sealed);
    node_message_free(&message);
    return rc;
}

static int record(struct decode_flight *f, struct transport_message *m, struct kv_why *why)
{
    struct iovec iov[MAX_PIECES];
    struct pieces p = {.iov = iov, .n = transport_message_pieces(m, iov, MAX_PIECES)};
    int field;

    if (p.n > MAX_PIECES) {
        const uint8_t *flat = transport_message_flat(m);

        if (flat == NULL)
            return kv_fail(why, -1, "no memory for a message of %zu bytes",
                           transport_message_bytes(m));
        p.n = transport_message_pieces(m, iov, MAX_PIECES);
    }
    f->landing.n_bytes += transport_message_bytes(m);
    field = take_field(&p);
    switch (field) {
    case BATON__V1__COMPUTE_REPLY__RECORD_ACCEPTED:
        if (f->stage == WANT_ACCEPTED)
            return record_accepted(f, m, why);
        break;
    case BATON__V1__COMPUTE_REPLY__RECORD_HEADER:
        if (f->stage == WANT_HEADER)
            return record_header(f, &p, why);
        break;
    case BATON__V1__COMPUTE_REPLY__RECORD_FRAME:
        if (f->stage == WANT_FRAME)
            return record_frame(f, &p, why);
        break;
    case BATON__V1__COMPUTE_REPLY__RECORD_SECTION:
        if (f->stage == WANT_FRAME || f->stage == WANT_SEAL)
            return record_section(f, &p, why);
        break;
    case BATON__V1__COMPUTE_REPLY__RECORD_SEALED:
        if (f->stage == WANT_SEAL)
            return record_sealed(f, m, why);
        break;
    default:
        return kv_fail(why, -1, "a message of %zu bytes is no record", transport_message_bytes(m));
    }
    return kv_fail(why, -1, "record %d is out of order", field);
}

/* ---- Receive worker ---- */

/* Close the flight and tell the scheduler, once.  With the lock held. */
static void flight_over(struct decode_flight *f, enum decode_outcome outcome)
{
    f->closed = true;
    f->landing.outcome = outcome;
    atomic_fetch_add(&f->refs, 1);
    node_inbox_put(&f->node->inbox, &f->over.link);
}

static void work_message(struct decode_flight *f)
{
    struct transport_message *m = f->arrived;
    struct kv_why why = {.text = ""};
    bool more = true;

    f->arrived = NULL;
    pthread_mutex_lock(&f->lock);
    if (f->closed) {
        /* Behind a seal nothing counts; behind a take-over nothing is wanted. */
        more = f->landing.outcome == DECODE_SEALED;
    } else if (record(f, m, &why) < 0) {
        snprintf(f->landing.why, sizeof(f->landing.why), "%.64s: %s", f->peer->address, why.text);
        flight_over(f, DECODE_FALSE);
        more = false;
    } else if (f->landing.outcome != DECODE_FLYING) {
        more = f->landing.outcome == DECODE_SEALED;
        flight_over(f, f->landing.outcome);
    }
    pthread_mutex_unlock(&f->lock);
    transport_message_unref(m);
    if (more)
        transport_request_next(f->call);
    else
        transport_request_cancel(f->call);
}

/* A call that the peer refused, or that could not be made.  A peer that does not fit is told once
 * for each time that it comes up, and not with every prompt. */
static void note_refusal(struct decode_flight *f)
{
    char quoted[2 * sizeof(f->landing.why)];

    if (f->code == TRANSPORT_UNIMPLEMENTED)
        snprintf(f->landing.why, sizeof(f->landing.why),
                 "%.64s: no prefill node is there (unknown method)", f->peer->address);
    else
        snprintf(f->landing.why, sizeof(f->landing.why), "%.64s: %s: %s", f->peer->address,
                 transport_status_name(f->code), f->details);
    if (f->code == TRANSPORT_UNAVAILABLE)
        decode_peers_failed(&f->node->peers, f->peer);
    f->landing.unfit =
        f->code == TRANSPORT_UNIMPLEMENTED || f->code == TRANSPORT_FAILED_PRECONDITION;
    if (f->landing.unfit && !atomic_exchange(&f->peer->told_unfit, true))
        node_log(NODE_WARN, "peer", "prefill=%s unfit=1 why=%s", f->peer->address,
                 node_quote(quoted, sizeof(quoted), f->landing.why));
}

/* A call that ends well without a seal has lied about what it sent. */
static void work_end(struct decode_flight *f)
{
    pthread_mutex_lock(&f->lock);
    if (!f->closed && f->code == TRANSPORT_OK) {
        snprintf(f->landing.why, sizeof(f->landing.why), "%.64s: the stream ended without a seal",
                 f->peer->address);
        flight_over(f, DECODE_FALSE);
    } else if (!f->closed) {
        note_refusal(f);
        flight_over(f, DECODE_BROKEN);
    }
    pthread_mutex_unlock(&f->lock);
    flight_unref(f); /* transport's */
}

void *decode_flight_receive(void *arg)
{
    struct decode_node *node = arg;
    struct node_link *link, *next;

    /* Flights outlive their requests by the time that gRPC takes to end a cancelled call. */
    while (!atomic_load(&node->stopping) || atomic_load(&node->n_flights) > 0) {
        link = node_inbox_take(&node->receive, atomic_load(&node->stopping) ? DECODE_TICK_MS : -1);
        for (; link != NULL; link = next) {
            struct decode_mail *mail = (struct decode_mail *)link;

            next = link->next;
            if (mail->kind == DECODE_MAIL_MESSAGE)
                work_message(mail->item);
            else
                work_end(mail->item);
        }
    }
    return NULL;
}

/* ---- Scheduler ---- */

static int open_decoder(struct decode_flight *f, const struct decode_flight_start *s, uint32_t have)
{
    const struct node_identity *id = &s->node->identity;
    struct kv_snapshot_header expect = {
        .fingerprint = id->fingerprint,
        .ns = s->ns->digest,
        .numerics_id = id->numerics_id,
        .geometry = id->geometry,
        .frame_positions = kv_frame_positions(&id->geometry),
        .base = have,
        .n_bound = s->n_ids,
        .base_ids = s->ids,
    };
    struct kv_prefix prefix;
    int rc = kv_prefix_init(&prefix, &s->ns->digest, expect.frame_positions);

    if (rc < 0)
        return rc;
    kv_prefix_feed(&prefix, s->ids, have);
    kv_prefix_digest(&prefix, &expect.base_digest);
    kv_prefix_release(&prefix);
    return kv_decoder_open(&expect, &f->decoder);
}

/* protobuf-c takes what it only reads without const. */
static void *borrowed(const void *p)
{
    void *q;

    memcpy(&q, &p, sizeof(q));
    return q;
}

static struct transport_out *pack_request(const struct decode_flight_start *s, uint32_t have)
{
    Baton__V1__ComputeRequest q = BATON__V1__COMPUTE_REQUEST__INIT;
    Baton__V1__Hello hello;
    Baton__V1__Geometry geometry;
    char tenant[] = DECODE_TENANT;

    node_hello_fill(&s->node->identity, &hello, &geometry);
    q.hello = &hello;
    q.tenant = tenant;
    q.salt.data = borrowed(s->salt);
    q.salt.len = s->salt_len;
    q.ids = borrowed(s->ids);
    q.n_ids = s->n_ids;
    q.have = have;
    q.logits_digest = s->logits_digest;
    return node_message_pack(&q.base);
}

static struct decode_flight *flight_new(const struct decode_flight_start *s)
{
    struct decode_flight *f = calloc(1, sizeof(*f));

    if (f == NULL)
        return NULL;
    if (pthread_mutex_init(&f->lock, NULL) != 0) {
        free(f);
        return NULL;
    }
    f->over = (struct decode_mail){.kind = DECODE_MAIL_FLIGHT, .item = f};
    f->message = (struct decode_mail){.kind = DECODE_MAIL_MESSAGE, .item = f};
    f->end = (struct decode_mail){.kind = DECODE_MAIL_END, .item = f};
    f->node = s->node;
    f->peer = s->peer;
    f->logits_digest = s->logits_digest;
    f->may_decline = s->may_decline;
    f->ids = s->ids;
    f->n_ids = s->n_ids;
    f->logits = s->logits;
    f->landing.outcome = DECODE_FLYING;
    atomic_init(&f->refs, 2); /* the scheduler's, transport's */
    atomic_fetch_add(&s->node->n_flights, 1);
    return f;
}

int decode_flight_start(const struct decode_flight_start *s, struct kv_context *ctx,
                        struct decode_request *request, struct decode_flight **out,
                        struct kv_why *why)
{
    static const struct transport_request_events events = {.on_message = on_message,
                                                           .on_end = on_end};
    uint32_t have = kv_context_length(ctx);
    struct decode_flight *f = flight_new(s);
    struct transport_out *message;
    int rc = TRANSPORT_ERR_NOMEM;

    if (f == NULL)
        return kv_fail(why, rc, "%s: no memory for a call", s->peer->address);
    if (open_decoder(f, s, have) < 0)
        goto fail;
    message = pack_request(s, have);
    if (message == NULL)
        goto fail;
    /* Events may come before the call below returns: the flight is complete before it. */
    f->landing.ctx = ctx;
    f->request = request;
    pthread_mutex_lock(&f->lock);
    rc = transport_request_start(s->peer->channel, "/baton.v1.Prefill/Compute", message,
                                 s->deadline_ms, false, &events, f, &f->call);
    pthread_mutex_unlock(&f->lock);
    if (rc == 0) {
        *out = f;
        return 0;
    }
    f->landing.ctx = NULL;
fail:
    atomic_store(&f->refs, 1);
    flight_unref(f);
    return kv_fail(why, rc, "%s: the call could not be started (%d)", s->peer->address, rc);
}

void decode_flight_take(struct decode_flight *f, struct decode_landing *out)
{
    bool running;

    pthread_mutex_lock(&f->lock);
    running = !f->closed;
    f->closed = true;
    *out = f->landing;
    f->landing.ctx = NULL;
    pthread_mutex_unlock(&f->lock);
    f->request = NULL;
    if (running)
        transport_request_cancel(f->call);
    flight_unref(f);
}

struct decode_request *decode_flight_arrived(struct decode_flight *f)
{
    struct decode_request *request = f->request;

    flight_unref(f);
    return request;
}

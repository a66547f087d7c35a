#include "prefill/prefill_node.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

struct prefill_job *prefill_job_new(struct prefill_node *node, struct transport_call *call,
                                    struct transport_message *request)
{
    struct prefill_job *job = calloc(1, sizeof(*job));

    if (job == NULL)
        return NULL;
    atomic_init(&job->refs, 1);
    job->node = node;
    job->call = call;
    job->bytes = transport_message_ref(request);
    job->arrived_ns = node_now_ns();
    job->deadline_ns = job->arrived_ns + PREFILL_MAX_CALL_MS * INT64_C(1000000);
    if (transport_call_deadline(call) < job->deadline_ns)
        job->deadline_ns = transport_call_deadline(call);
    return job;
}

void prefill_job_unref(struct prefill_job *job)
{
    if (atomic_fetch_sub(&job->refs, 1) != 1)
        return;
    assert(job->ctx == NULL);
    transport_message_unref(job->bytes);
    node_message_free(&job->message);
    transport_call_unref(job->call);
    free(job);
}

/* ---- The request ---- */

static int check_ids(const struct prefill_job *job, struct kv_why *why)
{
    const Baton__V1__ComputeRequest *q = job->request;
    const struct runtime *rt = &job->node->runtime;
    uint32_t n_vocab = model_params(rt->model)->n_vocab;

    if (q->n_ids == 0)
        return kv_fail(why, TRANSPORT_INVALID_ARGUMENT, "ids: empty");
    if (q->n_ids > rt->n_ctx)
        return kv_fail(why, TRANSPORT_INVALID_ARGUMENT,
                       "ids: %zu of them are more than the context of %" PRIu32, q->n_ids,
                       rt->n_ctx);
    if (q->have >= q->n_ids)
        return kv_fail(why, TRANSPORT_INVALID_ARGUMENT,
                       "have: %" PRIu32 " is not less than the %zu ids", q->have, q->n_ids);
    for (size_t i = 0; i < q->n_ids; i++) {
        if (q->ids[i] >= n_vocab)
            return kv_fail(why, TRANSPORT_INVALID_ARGUMENT,
                           "ids[%zu]: %" PRIu32 " is not in the vocabulary of %" PRIu32, i,
                           q->ids[i], n_vocab);
    }
    return TRANSPORT_OK;
}

static int check_namespace(const struct prefill_job *job, struct kv_why *why)
{
    const Baton__V1__ComputeRequest *q = job->request;
    size_t n = node_message_strlen(q->tenant);

    if (n == 0 || n > PREFILL_TENANT_BYTES || strlen(q->tenant) != n)
        return kv_fail(why, TRANSPORT_INVALID_ARGUMENT,
                       "tenant: %zu bytes, must be 1 to %d without NUL", n,
                       (int)PREFILL_TENANT_BYTES);
    if (q->salt.len > PREFILL_SALT_BYTES)
        return kv_fail(why, TRANSPORT_INVALID_ARGUMENT, "salt: %zu bytes are more than %d",
                       q->salt.len, (int)PREFILL_SALT_BYTES);
    return TRANSPORT_OK;
}

static void derive_namespace(struct prefill_job *job)
{
    const struct kv_namespace_fields fields = {
        .tenant = job->request->tenant,
        .salt = job->request->salt.data,
        .salt_len = job->request->salt.len,
        .fingerprint = job->node->identity.fingerprint,
        .numerics_id = job->node->identity.numerics_id,
        .precision = job->node->identity.geometry.precision,
    };

    kv_namespace_digest(&fields, &job->ns.digest);
    job->ns.group = 0;
}

int prefill_job_check(struct prefill_job *job, struct kv_why *why)
{
    int rc;

    if (node_message_unpack(&baton__v1__compute_request__descriptor, job->bytes, &job->message,
                            why) < 0)
        return TRANSPORT_INVALID_ARGUMENT;
    transport_message_unref(job->bytes);
    job->bytes = NULL;
    job->request = (const Baton__V1__ComputeRequest *)job->message.message;
    if (node_hello_check(&job->node->identity, job->request->hello, "decode", "this prefill node",
                         why) < 0)
        return TRANSPORT_FAILED_PRECONDITION;
    rc = check_ids(job, why);
    if (rc == TRANSPORT_OK)
        rc = check_namespace(job, why);
    if (rc == TRANSPORT_OK)
        derive_namespace(job);
    return rc;
}

/* ---- Records ---- */

/* Fields of ComputeReply, as prefill.proto numbers them. */
enum { FIELD_HEADER = 2, FIELD_SECTION = 3, FIELD_FRAME = 15 };

/* A ComputeReply up to the first of the n bytes of one of its bytes fields, with room for n_inside
 * of them.  The field numbers are below 16, so a tag takes one byte. */
static struct transport_out *record_new(int field, size_t n, size_t n_inside, uint8_t **bytes)
{
    uint8_t prefix[11], *p;
    size_t n_prefix = 0, rest = n;
    struct transport_out *out;

    prefix[n_prefix++] = (uint8_t)(field << 3 | 2);
    for (; rest >= 0x80; rest >>= 7)
        prefix[n_prefix++] = (uint8_t)(rest | 0x80);
    prefix[n_prefix++] = (uint8_t)rest;
    out = transport_out_new(n_prefix + n_inside, &p);
    if (out == NULL)
        return NULL;
    memcpy(p, prefix, n_prefix);
    if (bytes != NULL)
        *bytes = p + n_prefix;
    return out;
}

static int no_memory(struct kv_why *why)
{
    return kv_fail(why, TRANSPORT_RESOURCE_EXHAUSTED, "no memory for a message");
}

/* A send that is refused because the call has ended is no news: the scheduler sees that by itself.
 */
static int send_out(struct prefill_job *job, struct transport_out *out, struct kv_why *why)
{
    int rc = transport_call_send(job->call, out);

    if (rc == 0 || rc == TRANSPORT_ERR_CLOSED)
        return TRANSPORT_OK;
    if (rc == TRANSPORT_ERR_NOMEM)
        return no_memory(why);
    return kv_fail(why, TRANSPORT_RESOURCE_EXHAUSTED, "the call's send queue is full");
}

int prefill_job_send_accepted(struct prefill_job *job, uint32_t n_queued)
{
    struct prefill_node *node = job->node;
    Baton__V1__ComputeReply reply = BATON__V1__COMPUTE_REPLY__INIT;
    Baton__V1__Accepted accepted = BATON__V1__ACCEPTED__INIT;
    Baton__V1__Hello hello;
    Baton__V1__Geometry geometry;
    struct transport_out *out;
    struct kv_why why;

    node_hello_fill(&node->identity, &hello, &geometry);
    accepted.hello = &hello;
    accepted.matched = kv_cache_peek(node->runtime.cache, &job->ns, job->request->ids,
                                     (uint32_t)job->request->n_ids);
    accepted.queued = n_queued;
    accepted.tokens_per_second = (float)atomic_load(&node->runtime.rows_per_s);
    reply.record_case = BATON__V1__COMPUTE_REPLY__RECORD_ACCEPTED;
    reply.accepted = &accepted;
    out = node_message_pack(&reply.base);
    return out != NULL ? send_out(job, out, &why) : TRANSPORT_RESOURCE_EXHAUSTED;
}

static int base_digest(const struct prefill_job *job, uint32_t f, struct kv_digest *out)
{
    struct kv_prefix prefix;
    int rc = kv_prefix_init(&prefix, &job->ns.digest, f);

    if (rc < 0)
        return rc;
    kv_prefix_feed(&prefix, job->request->ids, job->request->have);
    kv_prefix_digest(&prefix, out);
    kv_prefix_release(&prefix);
    return 0;
}

int prefill_job_begin_stream(struct prefill_job *job, struct kv_why *why)
{
    const Baton__V1__ComputeRequest *q = job->request;
    const struct node_identity *id = &job->node->identity;
    struct kv_snapshot_header header = {
        .fingerprint = id->fingerprint,
        .ns = job->ns.digest,
        .numerics_id = id->numerics_id,
        .geometry = id->geometry,
        .frame_positions = kv_frame_positions(&id->geometry),
        .base = q->have,
        .n_bound = (uint32_t)q->n_ids,
        .base_ids = q->ids,
    };
    struct transport_out *out;
    uint8_t *bytes;
    size_t n;

    node_random(header.snapshot_id, sizeof(header.snapshot_id));
    if (base_digest(job, header.frame_positions, &header.base_digest) < 0)
        return no_memory(why);
    if (kv_encoder_open(&header, &job->encoder, why) < 0)
        return TRANSPORT_INTERNAL;
    n = kv_encoder_header_bytes(job->encoder);
    out = record_new(FIELD_HEADER, n, n, &bytes);
    if (out == NULL)
        return no_memory(why);
    kv_encoder_header(job->encoder, bytes);
    job->n_bytes += n;
    return send_out(job, out, why);
}

/* A frame is gathered once, out of the pages into the buffer that it is sent from. */
static int send_frame(struct prefill_job *job, uint32_t count, struct kv_why *why)
{
    size_t n = kv_encoder_frame_bytes(job->encoder, count);
    struct transport_out *out = record_new(FIELD_FRAME, n, 0, NULL);
    void *rows = malloc(n);
    int rc;

    if (out == NULL || rows == NULL)
        goto no_memory;
    rc = kv_encoder_frame(job->encoder, job->ctx, count, rows);
    if (rc < 0) {
        free(rows);
        transport_out_free(out);
        return kv_fail(why, TRANSPORT_INTERNAL, "a frame of %" PRIu32 " positions: %s", count,
                       kv_strerror(rc));
    }
    if (transport_out_payload(out, rows, n, free, rows) < 0)
        goto no_memory;
    job->n_frames++;
    job->n_bytes += n;
    return send_out(job, out, why);

no_memory:
    free(rows);
    transport_out_free(out);
    return no_memory(why);
}

static int send_logits(struct prefill_job *job, struct kv_why *why)
{
    size_t len = model_params(job->node->runtime.model)->n_vocab * sizeof(float);
    size_t n = kv_encoder_section_bytes(len);
    uint8_t *bytes;
    struct transport_out *out = record_new(FIELD_SECTION, n, n, &bytes);

    if (out == NULL)
        return no_memory(why);
    if (kv_encoder_section(job->encoder, KV_SECTION_LOGITS, job->logits, len, bytes) < 0) {
        transport_out_free(out);
        return kv_fail(why, TRANSPORT_INTERNAL, "the logits section could not be written");
    }
    job->n_bytes += n;
    return send_out(job, out, why);
}

/* 0 where the phase did not happen. */
static uint64_t span_ns(int64_t from, int64_t to)
{
    return from != 0 && to > from ? (uint64_t)(to - from) : 0;
}

static int send_sealed(struct prefill_job *job, struct kv_why *why)
{
    Baton__V1__ComputeReply reply = BATON__V1__COMPUTE_REPLY__INIT;
    Baton__V1__Sealed sealed = BATON__V1__SEALED__INIT;
    size_t n = kv_encoder_seal_bytes();
    uint8_t *record = malloc(n);
    struct transport_out *out;
    struct kv_seal seal;

    if (record == NULL)
        return no_memory(why);
    kv_encoder_seal(job->encoder, record, &seal);
    assert(seal.n_positions == job->request->n_ids);
    sealed.seal.data = record;
    sealed.seal.len = n;
    sealed.matched = job->n_matched;
    sealed.computed = job->n_computed;
    sealed.queue_ns = span_ns(job->arrived_ns, job->admitted_ns);
    sealed.compute_ns = span_ns(job->compute_start_ns, job->compute_end_ns);
    sealed.compute_end_unix_ns = (uint64_t)job->compute_end_wall_ns;
    if (job->request->logits_digest) {
        sealed.optional_logits_digest_case =
            BATON__V1__SEALED__OPTIONAL_LOGITS_DIGEST_LOGITS_DIGEST;
        sealed.logits_digest =
            logits_digest(job->logits, model_params(job->node->runtime.model)->n_vocab);
    }
    reply.record_case = BATON__V1__COMPUTE_REPLY__RECORD_SEALED;
    reply.sealed = &sealed;
    out = node_message_pack(&reply.base);
    free(record);
    job->n_bytes += n;
    return out != NULL ? send_out(job, out, why) : no_memory(why);
}

static bool has_room(const struct prefill_job *job, size_t n)
{
    size_t queued = transport_call_queued(job->call);

    return queued == 0 || queued + n <= job->node->staging_bytes;
}

/* Positions of the next frame that could leave now, 0 if there is none. */
static uint32_t next_frame(const struct prefill_job *job)
{
    uint32_t length = kv_context_length(job->ctx);

    if (length <= kv_encoder_next(job->encoder))
        return 0;
    return kv_encoder_frame_count(job->encoder, length, job->state == PREFILL_SENDING);
}

static int pump_frames(struct prefill_job *job, struct kv_why *why)
{
    uint32_t count;
    int rc;

    while ((count = next_frame(job)) > 0) {
        if (!has_room(job, kv_encoder_frame_bytes(job->encoder, count))) {
            if (job->blocked_ns == 0)
                job->blocked_ns = node_now_ns();
            return TRANSPORT_OK;
        }
        job->blocked_ns = 0;
        rc = send_frame(job, count, why);
        if (rc != TRANSPORT_OK)
            return rc;
    }
    return TRANSPORT_OK;
}

int prefill_job_pump(struct prefill_job *job, struct kv_why *why)
{
    int rc = pump_frames(job, why);

    if (rc != TRANSPORT_OK || job->state != PREFILL_SENDING || job->blocked_ns != 0)
        return rc;
    assert(kv_encoder_next(job->encoder) == job->request->n_ids);
    rc = send_logits(job, why);
    if (rc == TRANSPORT_OK)
        rc = send_sealed(job, why);
    if (rc != TRANSPORT_OK)
        return rc;
    transport_call_finish(job->call, TRANSPORT_OK, NULL);
    prefill_job_drop(job);
    job->state = PREFILL_DRAINING;
    job->blocked_ns = node_now_ns();
    return TRANSPORT_OK;
}

void prefill_job_drop(struct prefill_job *job)
{
    kv_context_close(job->ctx);
    kv_encoder_close(job->encoder);
    free(job->logits);
    job->ctx = NULL;
    job->encoder = NULL;
    job->logits = NULL;
}

void prefill_job_log(const struct prefill_job *job, int status, const char *details)
{
    const Baton__V1__ComputeRequest *q = job->request;
    int64_t now = node_now_ns();
    char peer[128], quoted[512];

    node_log(
        status == TRANSPORT_OK || status == TRANSPORT_CANCELLED ? NODE_INFO : NODE_WARN, "compute",
        "peer=%s status=%s prompt=%zu have=%" PRIu32 " matched=%" PRIu32 " computed=%" PRIu32
        " frames=%" PRIu32 " bytes=%" PRIu64 " queue_ms=%.1f compute_ms=%.1f total_ms=%.1f%s%s",
        node_quote(peer, sizeof(peer), transport_call_peer(job->call)),
        transport_status_name(status), q != NULL ? q->n_ids : 0, q != NULL ? q->have : 0,
        job->n_matched, job->n_computed, job->n_frames, job->n_bytes,
        (double)span_ns(job->arrived_ns, job->admitted_ns) / 1e6,
        (double)span_ns(job->compute_start_ns, job->compute_end_ns) / 1e6,
        (double)span_ns(job->arrived_ns, now) / 1e6, details != NULL ? " why=" : "",
        details != NULL ? node_quote(quoted, sizeof(quoted), details) : "");
}

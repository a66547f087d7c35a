#include "decode/decode_request.h"

#include <string.h>

static int send_event(struct decode_request *r, const Baton__V1__GenerateReply *reply)
{
    struct transport_out *out = node_message_pack(&reply->base);

    return out != NULL ? transport_call_send(r->call, out) : TRANSPORT_ERR_NOMEM;
}

/* protobuf-c takes strings that it may write to, and writes to none. */
static char *borrowed(const char *s)
{
    char *p;

    memcpy(&p, &s, sizeof(p));
    return p;
}

int decode_reply_started(struct decode_request *r, const char *prefill)
{
    Baton__V1__GenerateReply reply = BATON__V1__GENERATE_REPLY__INIT;
    Baton__V1__Started started = BATON__V1__STARTED__INIT;

    started.prompt_tokens = r->n_prompt;
    started.reused_tokens = r->usage.reused;
    started.dropped_bytes = r->n_dropped;
    started.prefill = borrowed(prefill);
    reply.event_case = BATON__V1__GENERATE_REPLY__EVENT_STARTED;
    reply.started = &started;
    return send_event(r, &reply);
}

static size_t put_varint(uint8_t *p, size_t v)
{
    size_t n = 0;

    for (; v >= 0x80; v >>= 7)
        p[n++] = (uint8_t)(v | 0x80);
    p[n++] = (uint8_t)v;
    return n;
}

/* A GenerateReply whose delta is d with this text.  The text is written by hand, as the last field:
 * a token may hold a NUL byte, which protobuf-c's strings end at. */
static struct transport_out *pack_delta(const Baton__V1__Delta *d, const char *text, size_t len)
{
    enum { REPLY_DELTA = 2 << 3 | 2, DELTA_TEXT = 1 << 3 | 2, VARINT_BYTES = 10 };
    uint8_t text_head[1 + VARINT_BYTES], head[1 + VARINT_BYTES], *p;
    size_t n_rest = baton__v1__delta__get_packed_size(d), n_text_head = 0, n_head;
    struct transport_out *out;

    if (len > 0) {
        text_head[0] = DELTA_TEXT;
        n_text_head = 1 + put_varint(text_head + 1, len);
    }
    head[0] = REPLY_DELTA;
    n_head = 1 + put_varint(head + 1, n_rest + n_text_head + len);
    out = transport_out_new(n_head + n_rest + n_text_head + len, &p);
    if (out == NULL)
        return NULL;
    memcpy(p, head, n_head);
    p += n_head;
    p += baton__v1__delta__pack(d, p);
    memcpy(p, text_head, n_text_head);
    if (len > 0)
        memcpy(p + n_text_head, text, len);
    return out;
}

int decode_reply_delta(struct decode_request *r, const struct decode_token *token, const char *text,
                       size_t len)
{
    Baton__V1__Delta delta = BATON__V1__DELTA__INIT;
    uint64_t digest = token->digest;
    float logprob = token->logprob;
    uint32_t id = token->id;
    struct transport_out *out;

    if (token->any) {
        delta.ids = &id;
        delta.n_ids = 1;
        delta.logprobs = &logprob;
        delta.n_logprobs = 1;
        delta.logits_digests = &digest;
        delta.n_logits_digests = r->q->logits_digest ? 1 : 0;
    }
    out = pack_delta(&delta, text, len);
    return out != NULL ? transport_call_send(r->call, out) : TRANSPORT_ERR_NOMEM;
}

static uint64_t since(int64_t from, int64_t to)
{
    return from != 0 && to > from ? (uint64_t)(to - from) : 0;
}

static void fill_usage(const struct decode_request *r, Baton__V1__Usage *out)
{
    baton__v1__usage__init(out);
    out->prompt_tokens = r->n_prompt;
    out->reused_tokens = r->usage.reused;
    out->prefill_reused_tokens = r->usage.prefill_reused;
    out->received_tokens = r->usage.received;
    out->local_tokens = r->usage.local;
    out->generated_tokens = r->usage.generated;
    out->dropped_bytes = r->n_dropped;
    out->frames = r->usage.frames;
    out->bytes = r->usage.bytes;
}

static void fill_timings(const struct decode_request *r, Baton__V1__Timings *out)
{
    const struct decode_timings *t = &r->timings;

    baton__v1__timings__init(out);
    out->queue_ns = since(r->arrived_ns, t->admitted_ns);
    out->prefill_queue_ns = t->prefill_queue_ns;
    out->prefill_ns = t->prefill_ns;
    out->local_prefill_ns = t->local_prefill_ns;
    out->exposed_transfer_ns = t->exposed_transfer_ns;
    out->first_token_ns = since(r->arrived_ns, t->first_token_ns);
    out->decode_ns = since(t->first_token_ns, t->last_token_ns);
}

int decode_reply_finished(struct decode_request *r, Baton__V1__FinishReason reason,
                          const char *stopped_by, size_t len)
{
    Baton__V1__GenerateReply reply = BATON__V1__GENERATE_REPLY__INIT;
    Baton__V1__Finished finished = BATON__V1__FINISHED__INIT;
    Baton__V1__Usage usage;
    Baton__V1__Timings timings;
    char text[TEXT_MAX_STOP_BYTES + 1];

    if (len > TEXT_MAX_STOP_BYTES)
        len = TEXT_MAX_STOP_BYTES;
    memcpy(text, stopped_by, len);
    text[len] = '\0';
    fill_usage(r, &usage);
    fill_timings(r, &timings);
    finished.reason = reason;
    finished.usage = &usage;
    finished.timings = &timings;
    finished.stopped_by = text;
    finished.fallback = r->fallback;
    reply.event_case = BATON__V1__GENERATE_REPLY__EVENT_FINISHED;
    reply.finished = &finished;
    return send_event(r, &reply);
}

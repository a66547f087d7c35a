#include "decode/decode_scheduler.h"

#include <assert.h>
#include <inttypes.h>
#include <string.h>

/* What the last token was. */
enum token_end {
    TOKEN_GOES_ON,
    TOKEN_END,     /* the model's own end: part of the session, so that the template sees it */
    TOKEN_STOP_ID, /* the caller's: not part of the answer */
    TOKEN_STOP_STRING,
    TOKEN_LENGTH,
};

static enum token_end end_of_id(const struct decode_request *r, uint32_t id)
{
    const Baton__V1__GenerateRequest *q = r->q;

    for (size_t i = 0; i < q->n_stop_ids; i++) {
        if (q->stop_ids[i] == id && !tokenizer_is_end(r->node->tokenizer, id))
            return TOKEN_STOP_ID;
        if (q->stop_ids[i] == id)
            return TOKEN_END;
    }
    if (!q->ignore_end && tokenizer_is_end(r->node->tokenizer, id))
        return TOKEN_END;
    return TOKEN_GOES_ON;
}

/* A reply that cannot be sent ends the request: cancelled calls are seen by the next sweep. */
static bool sent(struct decode_scheduler *s, struct decode_request *r, int rc)
{
    if (rc == 0)
        return true;
    if (rc == TRANSPORT_ERR_CLOSED)
        decode_scheduler_fail(s, r, TRANSPORT_CANCELLED, "the caller is gone");
    else
        decode_scheduler_fail(s, r, TRANSPORT_RESOURCE_EXHAUSTED, "no room for a reply");
    return false;
}

static uint32_t draw(struct decode_scheduler *s, struct decode_request *r,
                     struct decode_token *token)
{
    const float *logits = decode_slot_logits(s, r);
    int64_t now;

    token->any = true;
    token->id = sampler_draw(s->sampler, &r->sampling, logits, r->ids.n, &token->logprob);
    if (r->q->logits_digest)
        token->digest = logits_digest(logits, s->n_vocab);
    now = node_now_ns();
    if (r->timings.first_token_ns == 0)
        r->timings.first_token_ns = now;
    r->timings.last_token_ns = now;
    assert(r->ids.n < r->ids.cap);
    r->ids.ids[r->ids.n++] = token->id;
    r->usage.generated++;
    return token->id;
}

static void finish(struct decode_scheduler *s, struct decode_request *r, enum token_end end,
                   uint32_t n_keep)
{
    Baton__V1__FinishReason reason = end == TOKEN_LENGTH ? BATON__V1__FINISH_REASON__FINISH_LENGTH
                                                         : BATON__V1__FINISH_REASON__FINISH_STOP;
    struct gguf_string by = {.data = "", .len = 0};
    size_t keep = r->ids.n;

    if (end == TOKEN_END || end == TOKEN_STOP_ID)
        by = tokenizer_piece(r->node->tokenizer, r->ids.ids[r->ids.n - 1], true);
    if (end == TOKEN_STOP_ID)
        keep--;
    if (end == TOKEN_STOP_STRING) {
        keep = r->n_prompt + n_keep;
        by.data = text_stopped_by(r->text);
        by.len = strlen(by.data);
    }
    if (sent(s, r, decode_reply_finished(r, reason, by.data, by.len)))
        decode_scheduler_finish(s, r, keep);
}

void decode_token_next(struct decode_scheduler *s, struct decode_request *r)
{
    struct decode_token token = {0};
    const struct decode_token text_alone = {0};
    struct text_piece piece = {.data = ""};
    uint32_t id = draw(s, r, &token);
    enum token_end end = end_of_id(r, id);
    int rc = end == TOKEN_GOES_ON ? text_feed(r->text, id, &piece) : text_flush(r->text, &piece);

    if (rc < 0) {
        decode_scheduler_fail(s, r, TRANSPORT_RESOURCE_EXHAUSTED, "no memory for text");
        return;
    }
    if (!sent(s, r, decode_reply_delta(r, &token, piece.data, piece.len)))
        return;
    if (piece.stopped)
        end = TOKEN_STOP_STRING;
    if (end == TOKEN_GOES_ON && r->usage.generated == r->max_tokens) {
        end = TOKEN_LENGTH;
        if (text_flush(r->text, &piece) == 0 && piece.len > 0 &&
            !sent(s, r, decode_reply_delta(r, &text_alone, piece.data, piece.len)))
            return;
        if (piece.stopped)
            end = TOKEN_STOP_STRING;
    }
    if (end != TOKEN_GOES_ON)
        finish(s, r, end, piece.n_keep);
}

void decode_token_first(struct decode_scheduler *s, struct decode_request *r)
{
    int rc;

    assert(kv_context_length(r->ctx) == r->n_prompt);
    rc = kv_context_publish(r->ctx, decode_slot_logits(s, r), s->n_vocab);
    if (rc < 0)
        node_log(NODE_WARN, "publish", "error=\"%s\" positions=%" PRIu32, kv_strerror(rc),
                 r->n_prompt);
    if (r->timings.local_start_ns != 0)
        r->timings.local_prefill_ns += (uint64_t)(node_now_ns() - r->timings.local_start_ns);
    r->timings.local_start_ns = 0;
    r->state = DECODE_RUNNING;
    decode_token_next(s, r);
}

/* A Generate's fields, each checked before it is used; a refusal names the field and the value.
 * Then the prompt as ids: what the session has already, and what the request adds. */
#include "decode/decode_request.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define REFUSE(why, ...) kv_fail(why, TRANSPORT_INVALID_ARGUMENT, __VA_ARGS__)

/* ---- Fields that stand for themselves ---- */

static int check_session_name(const Baton__V1__GenerateRequest *q, struct kv_why *why)
{
    size_t n = node_message_strlen(q->session);

    if (n == 0 || node_session_name_ok(q->session, n))
        return TRANSPORT_OK;
    return REFUSE(why, "session: a name of %zu bytes is not 1 to %d of [A-Za-z0-9._-]", n,
                  (int)NODE_SESSION_NAME);
}

static int check_sampling(struct decode_request *r, struct kv_why *why)
{
    const Baton__V1__Sampling *s = r->q->sampling;
    struct kv_why inner = {.text = ""};

    sampler_defaults(&r->sampling);
    if (s == NULL)
        return TRANSPORT_OK;
    if (s->temperature > DECODE_MAX_TEMPERATURE)
        return REFUSE(why, "sampling.temperature: %g is more than %d", (double)s->temperature,
                      (int)DECODE_MAX_TEMPERATURE);
    r->sampling.temperature = s->temperature;
    r->sampling.top_k = s->top_k;
    r->sampling.min_p = s->min_p;
    r->sampling.seed = s->seed;
    if (s->optional_top_p_case == BATON__V1__SAMPLING__OPTIONAL_TOP_P_TOP_P) {
        if (s->top_p == 0)
            return REFUSE(why, "sampling.top_p: 0 keeps no token, leave it out to keep all");
        r->sampling.top_p = s->top_p;
    }
    if (sampler_check(&r->sampling, &inner) < 0)
        return REFUSE(why, "sampling.%s", inner.text);
    return TRANSPORT_OK;
}

static int check_limits(struct decode_request *r, struct kv_why *why)
{
    const Baton__V1__GenerateRequest *q = r->q;

    r->max_tokens = r->node->options->max_tokens;
    if (q->optional_max_tokens_case == BATON__V1__GENERATE_REQUEST__OPTIONAL_MAX_TOKENS_MAX_TOKENS)
        r->max_tokens = q->max_tokens;
    if (r->max_tokens == 0)
        return REFUSE(why, "max_tokens: 0, must be at least 1");
    if (q->salt.len > NODE_SALT_BYTES)
        return REFUSE(why, "salt: %zu bytes are more than %d", q->salt.len, (int)NODE_SALT_BYTES);
    return TRANSPORT_OK;
}

static int check_route(const struct decode_request *r, struct kv_why *why)
{
    switch (r->q->route) {
    case BATON__V1__ROUTE__ROUTE_AUTO:
    case BATON__V1__ROUTE__ROUTE_LOCAL:
        return TRANSPORT_OK;
    case BATON__V1__ROUTE__ROUTE_PREFILL:
        if (r->node->peers.n == 0)
            return kv_fail(why, TRANSPORT_UNAVAILABLE, "route: this node has no prefill node");
        return TRANSPORT_OK;
    default:
        return REFUSE(why, "route: %d is none", (int)r->q->route);
    }
}

static int check_stop_ids(const struct decode_request *r, struct kv_why *why)
{
    const Baton__V1__GenerateRequest *q = r->q;
    uint32_t n_vocab = tokenizer_n_vocab(r->node->tokenizer);

    if (q->n_stop_ids > DECODE_MAX_STOP_IDS)
        return REFUSE(why, "stop_ids: %zu of them are more than %d", q->n_stop_ids,
                      (int)DECODE_MAX_STOP_IDS);
    for (size_t i = 0; i < q->n_stop_ids; i++) {
        if (q->stop_ids[i] >= n_vocab)
            return REFUSE(why, "stop_ids[%zu]: %" PRIu32 " is not in the vocabulary of %" PRIu32, i,
                          q->stop_ids[i], n_vocab);
    }
    return TRANSPORT_OK;
}

static int check_stops(struct decode_request *r, struct kv_why *why)
{
    const Baton__V1__GenerateRequest *q = r->q;
    const char *stops[TEXT_MAX_STOPS];
    struct kv_why inner = {.text = ""};
    int rc;

    if (q->n_stop > TEXT_MAX_STOPS)
        return REFUSE(why, "stop: %zu strings are more than %d", q->n_stop, (int)TEXT_MAX_STOPS);
    for (size_t i = 0; i < q->n_stop; i++) {
        size_t n = node_message_strlen(q->stop[i]);

        if (n == 0 || n > TEXT_MAX_STOP_BYTES)
            return REFUSE(why, "stop[%zu]: %zu bytes, must be 1 to %d", i, n,
                          (int)TEXT_MAX_STOP_BYTES);
        if (strlen(q->stop[i]) != n)
            return REFUSE(why, "stop[%zu]: has a NUL byte at %zu", i, strlen(q->stop[i]));
        stops[i] = q->stop[i];
    }
    rc = text_open(r->node->tokenizer, stops, q->n_stop, &r->text, &inner);
    if (rc == MODEL_ERR_NOMEM)
        return kv_fail(why, TRANSPORT_RESOURCE_EXHAUSTED, "stop: no memory");
    if (rc < 0)
        return REFUSE(why, "stop: %s", inner.text);
    return TRANSPORT_OK;
}

/* ---- The prompt ---- */

static int encode_status(int rc, const char *field, const struct kv_why *inner, struct kv_why *why)
{
    if (rc == MODEL_ERR_NOMEM)
        return kv_fail(why, TRANSPORT_RESOURCE_EXHAUSTED, "%s: no memory", field);
    if (rc < 0)
        return REFUSE(why, "%s: %s", field, inner->text);
    return TRANSPORT_OK;
}

/* Tokenizing megabytes takes seconds, and others wait behind it: what cannot fit, even if every
 * token were the longest, is refused by its length. */
static int check_bytes(const struct decode_request *r, const char *field, size_t len,
                       struct kv_why *why)
{
    const size_t n_ctx = r->node->runtime.n_ctx, most = tokenizer_max_piece(r->node->tokenizer);

    if (len / n_ctx < most)
        return TRANSPORT_OK;
    return REFUSE(why, "%s: %zu bytes leave no room in the context of %zu", field, len, n_ctx);
}

static int encode_text(struct decode_request *r, size_t *n_dropped, struct kv_why *why)
{
    const char *text = r->q->text;
    size_t len = node_message_strlen(text);
    struct kv_why inner = {.text = ""};
    unsigned flags = 0;

    if (len == 0)
        return REFUSE(why, "text: empty");
    if (check_bytes(r, "text", len, why) != TRANSPORT_OK)
        return TRANSPORT_INVALID_ARGUMENT;
    if (r->ids.n == 0)
        flags |= TOKENIZE_BOS;
    if (r->q->parse_special)
        flags |= TOKENIZE_SPECIAL;
    return encode_status(
        tokenizer_encode(r->node->tokenizer, text, len, flags, &r->ids, n_dropped, &inner), "text",
        &inner, why);
}

static int encode_chat(struct decode_request *r, size_t *n_dropped, struct kv_why *why)
{
    enum { SOME = 64 };
    const Baton__V1__Chat *chat = r->q->chat;
    struct chat_message some[SOME], *messages = some;
    struct kv_why inner = {.text = ""};
    unsigned flags = CHAT_GENERATE;
    size_t len = 0;
    int rc;

    if (r->node->chat == NULL)
        return REFUSE(why, "chat: %s", r->node->chat_why.text);
    if (chat->n_messages == 0)
        return REFUSE(why, "chat.messages: empty");
    if (chat->n_messages > SOME)
        messages = calloc(chat->n_messages, sizeof(*messages));
    if (messages == NULL)
        return kv_fail(why, TRANSPORT_RESOURCE_EXHAUSTED, "chat: no memory");
    rc = TRANSPORT_OK;
    for (size_t i = 0; i < chat->n_messages && rc == TRANSPORT_OK; i++) {
        if (node_message_strlen(chat->messages[i]->role) != strlen(chat->messages[i]->role))
            rc = REFUSE(why, "chat.messages[%zu].role: a NUL byte", i);
        messages[i].role = chat->messages[i]->role;
        messages[i].content = chat->messages[i]->content;
        messages[i].content_len = node_message_strlen(chat->messages[i]->content);
        len += messages[i].content_len;
    }
    if (rc == TRANSPORT_OK)
        rc = check_bytes(r, "chat", len, why);
    if (rc != TRANSPORT_OK)
        goto out;
    if (r->ids.n > 0)
        flags |= CHAT_CONTINUE;
    if (r->q->parse_special)
        flags |= CHAT_SPECIAL;
    rc = encode_status(
        chat_encode(r->node->chat, messages, chat->n_messages, flags, &r->ids, n_dropped, &inner),
        "chat", &inner, why);
out:
    if (messages != some)
        free(messages);
    return rc;
}

static int add_ids(struct decode_request *r, struct kv_why *why)
{
    const Baton__V1__TokenIds *tokens = r->q->tokens;
    uint32_t n_vocab = tokenizer_n_vocab(r->node->tokenizer);

    if (tokens->n_ids == 0)
        return REFUSE(why, "tokens.ids: empty");
    for (size_t i = 0; i < tokens->n_ids; i++) {
        if (tokens->ids[i] >= n_vocab)
            return REFUSE(why, "tokens.ids[%zu]: %" PRIu32 " is not in the vocabulary of %" PRIu32,
                          i, tokens->ids[i], n_vocab);
        if (token_list_add(&r->ids, tokens->ids[i]) < 0)
            return kv_fail(why, TRANSPORT_RESOURCE_EXHAUSTED, "tokens.ids: no memory");
    }
    return TRANSPORT_OK;
}

/* What the request adds to the session's ids. */
static int add_prompt(struct decode_request *r, struct kv_why *why)
{
    size_t before = r->ids.n, n_dropped = 0;
    int rc;

    switch (r->q->prompt_case) {
    case BATON__V1__GENERATE_REQUEST__PROMPT_TEXT:
        rc = encode_text(r, &n_dropped, why);
        break;
    case BATON__V1__GENERATE_REQUEST__PROMPT_CHAT:
        rc = encode_chat(r, &n_dropped, why);
        break;
    case BATON__V1__GENERATE_REQUEST__PROMPT_TOKENS:
        rc = add_ids(r, why);
        break;
    default:
        return REFUSE(why, "prompt: none of text, chat and tokens is there");
    }
    r->n_dropped = (uint32_t)n_dropped;
    if (rc == TRANSPORT_OK && r->ids.n == before)
        return REFUSE(why, "prompt: no token is left, the vocabulary lacks all %zu bytes",
                      n_dropped);
    return rc;
}

/* The prompt must leave room for a token, and the list for all that may come. */
static int check_length(struct decode_request *r, struct kv_why *why)
{
    uint32_t n_ctx = r->node->runtime.n_ctx;
    uint32_t *ids;

    if (r->ids.n >= n_ctx)
        return REFUSE(why, "prompt: %zu tokens leave no room in the context of %" PRIu32, r->ids.n,
                      n_ctx);
    r->n_prompt = (uint32_t)r->ids.n;
    text_follow(r->text, r->ids.ids[r->ids.n - 1]);
    if (r->max_tokens > n_ctx - r->n_prompt)
        r->max_tokens = n_ctx - r->n_prompt;
    if (r->ids.cap >= r->ids.n + r->max_tokens)
        return TRANSPORT_OK;
    ids = realloc(r->ids.ids, (r->ids.n + r->max_tokens) * sizeof(*ids));
    if (ids == NULL)
        return kv_fail(why, TRANSPORT_RESOURCE_EXHAUSTED, "prompt: no memory");
    r->ids.ids = ids;
    r->ids.cap = r->ids.n + r->max_tokens;
    return TRANSPORT_OK;
}

static int take_session(struct decode_request *r, struct kv_why *why)
{
    if (node_message_strlen(r->q->session) == 0)
        return TRANSPORT_OK;
    return decode_sessions_take(&r->node->sessions, r->q->session, DECODE_TAKE_OR_BEGIN,
                                &r->session, why);
}

int decode_request_check(struct decode_request *r, struct kv_why *why)
{
    int rc;

    if (node_message_unpack(&baton__v1__generate_request__descriptor, r->bytes, &r->message, why) <
        0)
        return TRANSPORT_INVALID_ARGUMENT;
    transport_message_unref(r->bytes);
    r->bytes = NULL;
    r->q = (const Baton__V1__GenerateRequest *)r->message.message;
    rc = check_session_name(r->q, why);
    if (rc == TRANSPORT_OK)
        rc = check_sampling(r, why);
    if (rc == TRANSPORT_OK)
        rc = check_limits(r, why);
    if (rc == TRANSPORT_OK)
        rc = check_stop_ids(r, why);
    if (rc == TRANSPORT_OK)
        rc = check_stops(r, why);
    if (rc == TRANSPORT_OK)
        rc = check_route(r, why);
    if (rc == TRANSPORT_OK)
        rc = take_session(r, why);
    return rc;
}

int decode_request_prompt(struct decode_request *r, struct kv_why *why)
{
    int rc;

    for (size_t i = 0; r->session != NULL && i < r->session->ids.n; i++) {
        if (token_list_add(&r->ids, r->session->ids.ids[i]) < 0)
            return kv_fail(why, TRANSPORT_RESOURCE_EXHAUSTED, "session: no memory");
    }
    rc = add_prompt(r, why);
    if (rc == TRANSPORT_OK)
        rc = check_length(r, why);
    if (rc == TRANSPORT_OK)
        decode_node_namespace(r->node, r->q->salt.data, r->q->salt.len, &r->ns);
    return rc;
}

/* Conversations to text and ids, for ChatML:
 *
 *   <|im_start|>ROLE\nCONTENT<|im_end|>\n     each message
 *   <|im_start|>assistant\n                   the opening of an answer
 *
 * To ids, the two markers are written as ids and what stands between is plain text, one run, so
 * that nothing in a message can become a control token. */
#include "model/chat_template.h"
#include "model/utf8.h"

#include <stdlib.h>
#include <string.h>

static const char mark_start[] = "<|im_start|>", mark_end[] = "<|im_end|>";

struct chat {
    struct chat_template template;
    const struct tokenizer *tok;
    uint32_t start, end;
};

/* ---- Life ---- */

static int find_marker(const struct tokenizer *t, const char *text, uint32_t *out,
                       struct kv_why *why)
{
    int64_t id = tokenizer_find(t, text);

    if (id < 0)
        return kv_fail(
            why, MODEL_ERR_FORMAT,
            "tokenizer.chat_template is chatml, and tokenizer.ggml.tokens has no special "
            "token %s",
            text);
    *out = (uint32_t)id;
    return 0;
}

static int read_all(struct chat *c, const struct gguf *g, struct kv_why *why)
{
    struct gguf_string source;
    int rc = gguf_get_string(g, "tokenizer.chat_template", &source, why);

    if (rc > 0)
        return kv_fail(why, MODEL_ERR_FORMAT, "tokenizer.chat_template is missing");
    if (rc < 0)
        return rc;
    rc = chat_template_read(source, &c->template, why);
    if (rc < 0)
        return rc;
    rc = find_marker(c->tok, mark_start, &c->start, why);
    if (rc < 0)
        return rc;
    return find_marker(c->tok, mark_end, &c->end, why);
}

int chat_open(const struct gguf *g, const struct tokenizer *t, struct chat **out,
              struct kv_why *why)
{
    struct chat *c = calloc(1, sizeof *c);
    int rc;

    if (c == NULL)
        return kv_fail(why, MODEL_ERR_NOMEM, "no memory for tokenizer.chat_template");
    c->tok = t;
    rc = read_all(c, g, why);
    if (rc < 0) {
        chat_close(c);
        return rc;
    }
    *out = c;
    return 0;
}

void chat_close(struct chat *c)
{
    if (c == NULL)
        return;
    chat_template_release(&c->template);
    free(c);
}

const char *chat_name(const struct chat *c)
{
    return c->template.name;
}

/* ---- Messages ---- */

static bool known_role(const char *role)
{
    return role != NULL && (strcmp(role, "system") == 0 || strcmp(role, "user") == 0 ||
                            strcmp(role, "assistant") == 0);
}

static int check_message(const struct chat_message *m, size_t i, struct kv_why *why)
{
    size_t valid;

    if (!known_role(m->role))
        return kv_fail(why, MODEL_ERR_INVALID,
                       "messages[%zu].role is \"%.32s\": system, user or assistant", i,
                       m->role == NULL ? "" : m->role);
    if (m->content_len > TOKENIZE_MAX_BYTES)
        return kv_fail(why, MODEL_ERR_INVALID,
                       "messages[%zu].content has %zu bytes, the most is %d", i, m->content_len,
                       TOKENIZE_MAX_BYTES);
    valid = utf8_valid_prefix(m->content, m->content_len);
    if (valid < m->content_len)
        return kv_fail(why, MODEL_ERR_UTF8, "messages[%zu].content is not UTF-8 at byte %zu", i,
                       valid);
    return 0;
}

static int check_messages(const struct chat_message *messages, size_t n, struct kv_why *why)
{
    size_t i;
    int rc = 0;

    for (i = 0; i < n && rc == 0; i++)
        rc = check_message(&messages[i], i, why);
    return rc;
}

/* Whether the template's own system message comes first. */
static bool adds_system(const struct chat *c, const struct chat_message *messages, size_t n,
                        unsigned flags, struct chat_message *out)
{
    if (!c->template.has_system || (flags & CHAT_CONTINUE) || n == 0 ||
        strcmp(messages[0].role, "system") == 0)
        return false;
    *out = (struct chat_message){
        .role = "system", .content = c->template.system, .content_len = c->template.system_len};
    return true;
}

/* ---- Text ---- */

struct text {
    char *data; /* NULL: only counting */
    size_t len;
};

static void put(struct text *t, const char *data, size_t len)
{
    if (t->data != NULL && len > 0)
        memcpy(t->data + t->len, data, len);
    t->len += len;
}

static void put_message(struct text *t, const struct chat_message *m)
{
    put(t, mark_start, strlen(mark_start));
    put(t, m->role, strlen(m->role));
    put(t, "\n", 1);
    put(t, m->content, m->content_len);
    put(t, mark_end, strlen(mark_end));
    put(t, "\n", 1);
}

static void put_all(const struct chat *c, const struct chat_message *messages, size_t n,
                    unsigned flags, struct text *t)
{
    struct chat_message system;
    size_t i;

    if (adds_system(c, messages, n, flags, &system))
        put_message(t, &system);
    for (i = 0; i < n; i++)
        put_message(t, &messages[i]);
    if (flags & CHAT_GENERATE) {
        put(t, mark_start, strlen(mark_start));
        put(t, "assistant\n", 10);
    }
}

int chat_render(const struct chat *c, const struct chat_message *messages, size_t n, unsigned flags,
                char **out, size_t *len, struct kv_why *why)
{
    struct text t = {0};
    int rc = check_messages(messages, n, why);

    if (rc < 0)
        return rc;
    put_all(c, messages, n, flags, &t);
    t.data = malloc(t.len + 1);
    if (t.data == NULL)
        return kv_fail(why, MODEL_ERR_NOMEM, "no memory for a conversation of %zu bytes", t.len);
    t.len = 0;
    put_all(c, messages, n, flags, &t);
    t.data[t.len] = '\0';
    *out = t.data;
    *len = t.len;
    return 0;
}

/* ---- Ids ---- */

/* Where the ids go. */
struct sink {
    const struct chat *chat;
    struct token_list *out;
    size_t n_dropped;
    struct kv_why *why;
};

static int add_text(struct sink *s, const char *text, size_t len, unsigned flags)
{
    size_t n_dropped = 0;
    int rc = tokenizer_encode(s->chat->tok, text, len, flags, s->out, &n_dropped, s->why);

    s->n_dropped += n_dropped;
    return rc;
}

static int add_id(struct sink *s, uint32_t id)
{
    int rc = token_list_add(s->out, id);

    return rc < 0 ? kv_fail(s->why, rc, "no memory for %zu ids", s->out->n) : 0;
}

/* <|im_start|>ROLE\nCONTENT: role and content are one run of text, as they are in the rendered
 * form. */
static int add_opening(struct sink *s, const char *role, const char *content, size_t len)
{
    struct text t = {.data = malloc(strlen(role) + 1 + len)};
    int rc;

    if (t.data == NULL)
        return kv_fail(s->why, MODEL_ERR_NOMEM, "no memory for a message of %zu bytes", len);
    put(&t, role, strlen(role));
    put(&t, "\n", 1);
    put(&t, content, len);
    rc = add_id(s, s->chat->start);
    if (rc == 0)
        rc = add_text(s, t.data, t.len, 0);
    free(t.data);
    return rc;
}

static int add_message(struct sink *s, const struct chat_message *m)
{
    int rc = add_opening(s, m->role, m->content, m->content_len);

    if (rc == 0)
        rc = add_id(s, s->chat->end);
    return rc == 0 ? add_text(s, "\n", 1, 0) : rc;
}

static int add_safe(struct sink *s, const struct chat_message *messages, size_t n, unsigned flags)
{
    struct chat_message system;
    size_t i;
    int rc = 0;

    if (adds_system(s->chat, messages, n, flags, &system))
        rc = add_message(s, &system);
    for (i = 0; i < n && rc == 0; i++)
        rc = add_message(s, &messages[i]);
    if (rc == 0 && (flags & CHAT_GENERATE))
        rc = add_opening(s, "assistant", "", 0);
    return rc;
}

/* The whole text at once, markers wherever they stand. */
static int add_special(struct sink *s, const struct chat_message *messages, size_t n,
                       unsigned flags)
{
    char *text;
    size_t len;
    int rc = chat_render(s->chat, messages, n, flags, &text, &len, s->why);

    if (rc < 0)
        return rc;
    rc = add_text(s, text, len, TOKENIZE_SPECIAL);
    free(text);
    return rc;
}

/* What stands between an answer and the next message. */
static int close_turn(struct sink *s)
{
    int rc = 0;

    if (s->out->n == 0)
        return kv_fail(s->why, MODEL_ERR_INVALID,
                       "nothing to continue: no ids before the messages");
    if (!tokenizer_is_end(s->chat->tok, s->out->ids[s->out->n - 1]))
        rc = add_id(s, s->chat->end);
    return rc == 0 ? add_text(s, "\n", 1, 0) : rc;
}

int chat_encode(const struct chat *c, const struct chat_message *messages, size_t n, unsigned flags,
                struct token_list *out, size_t *n_dropped, struct kv_why *why)
{
    struct sink s = {.chat = c, .out = out, .why = why};
    size_t n_before = out->n;
    int rc = check_messages(messages, n, why);

    if (rc == 0 && (flags & CHAT_CONTINUE))
        rc = close_turn(&s);
    if (rc == 0)
        rc = flags & CHAT_SPECIAL ? add_special(&s, messages, n, flags)
                                  : add_safe(&s, messages, n, flags);
    if (rc < 0) {
        out->n = n_before;
        return rc;
    }
    if (n_dropped != NULL)
        *n_dropped = s.n_dropped;
    return 0;
}

/* Templates are programs in Jinja.  This build does not run them: it knows what a few of them do,
 * and must not mistake one for another.  So a template is cut into tokens, spelling is evened out,
 * and the tokens are compared with those of the known ones, every one of them.  What is evened out:
 *
 *   - white space inside tags; and between tags as renderers are set for chat templates (a line
 *     break behind a block tag and blanks before it go, `-` takes all white space on its side)
 *   - x['name'] is x.name; a string's quotes and escapes
 *   - text between tags is a string that is printed; things printed one after the other are one sum
 *     and strings added to one another are one string
 *
 * In a known template HOLE stands for text that differs from file to file: the default system
 * message. */
#include "model/chat_template.h"
#include "model/utf8.h"

#include <stdlib.h>
#include <string.h>

#define HOLE "\x01"

static const char part_flag[] = "{% if not add_generation_prompt is defined %}"
                                "{% set add_generation_prompt = false %}{% endif %}";
static const char part_for[] = "{% for message in messages %}";
static const char part_system[] = "{% if loop.first and messages[0]['role'] != 'system' %}"
                                  "{{ '<|im_start|>system\\n" HOLE "<|im_end|>\\n' }}{% endif %}";
static const char part_rest[] =
    "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/* Strings by which people know a family, for the refusal. */
static const struct family {
    const char *marker, *name;
} families[] = {
    {"<|start_header_id|>", "llama-3"},
    {"[INST]", "mistral"},
    {"<start_of_turn>", "gemma"},
    {"<|im_start|>", "chatml with rules of its own"},
    {"<|end|>", "phi-3"},
    {"<|user|>", "zephyr"},
};

/* ---- Tokens ---- */

enum kind {
    TOKEN_BLOCK,     /* {% */
    TOKEN_BLOCK_END, /* %} */
    TOKEN_PRINT,     /* {{ */
    TOKEN_PRINT_END, /* }} */
    TOKEN_NAME,      /* a name or a number */
    TOKEN_SIGN,      /* one sign */
    TOKEN_STRING,
};

struct token {
    enum kind kind;
    const char *text;
    size_t len;
};

/* Every token takes at least one byte of the source or stands beside one that does. */
struct scanner {
    const char *at, *end;
    struct token *tokens;
    size_t n_tokens, cap;
    char
        *strings; /* contents of string tokens one after the other, as long as the source at most */
    size_t n_strings;
};

static int scanner_init(struct scanner *s, struct gguf_string source)
{
    *s = (struct scanner){.at = source.data, .end = source.data + source.len};
    s->cap = 3 * source.len + 8;
    s->tokens = malloc(s->cap * sizeof *s->tokens);
    s->strings = malloc(source.len + 1);
    return s->tokens == NULL || s->strings == NULL ? MODEL_ERR_NOMEM : 0;
}

static void scanner_release(struct scanner *s)
{
    free(s->tokens);
    free(s->strings);
}

static bool is_sign(const struct token *t, char sign)
{
    return t->kind == TOKEN_SIGN && *t->text == sign;
}

static bool ends_operand(const struct token *t)
{
    return t->kind == TOKEN_NAME || is_sign(t, ']');
}

static void add(struct scanner *s, enum kind kind, const char *text, size_t len)
{
    static const char plus[] = "+";
    struct token *t = s->tokens + s->n_tokens;
    size_t n = s->n_tokens;

    if (kind == TOKEN_PRINT && n > 0 && t[-1].kind == TOKEN_PRINT_END) {
        t[-1] = (struct token){.kind = TOKEN_SIGN, .text = plus, .len = 1};
        return;
    }
    if (kind == TOKEN_STRING && n > 1 && is_sign(&t[-1], '+') && t[-2].kind == TOKEN_STRING) {
        t[-2].len += len; /* their contents are neighbours */
        s->n_tokens--;
        return;
    }
    if (kind == TOKEN_SIGN && *text == ']' && n > 2 && t[-1].kind == TOKEN_STRING &&
        is_sign(&t[-2], '[') && ends_operand(&t[-3])) {
        t[-2].text = ".";
        t[-1].kind = TOKEN_NAME;
        return;
    }
    *t = (struct token){.kind = kind, .text = text, .len = len};
    s->n_tokens++;
}

/* ---- Scanning ---- */

static bool is_blank(char c)
{
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

static bool is_name(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

static bool starts(const struct scanner *s, const char *text)
{
    size_t len = strlen(text);

    return (size_t)(s->end - s->at) >= len && memcmp(s->at, text, len) == 0;
}

/* A string in quotes.  false where it has an escape that is not known here, or no end. */
static bool scan_string(struct scanner *s)
{
    static const char escapes[] = "n\nt\tr\r\\\\''\"\"";
    char quote = *s->at++, *from = s->strings + s->n_strings;
    const char *escape;

    for (; s->at < s->end && *s->at != quote; s->at++) {
        char c = *s->at;
        if (c == '\\') {
            if (++s->at == s->end || *s->at == '\0')
                return false;
            for (escape = escapes; *escape != '\0' && *escape != *s->at; escape += 2)
                ;
            if (*escape == '\0')
                return false;
            c = escape[1];
        }
        s->strings[s->n_strings++] = c;
    }
    if (s->at++ == s->end)
        return false;
    add(s, TOKEN_STRING, from, (size_t)(s->strings + s->n_strings - from));
    return true;
}

/* What stands in a tag, up to its end.  *trims: the end has a '-'. */
static bool scan_tag(struct scanner *s, const char *close, bool *trims)
{
    const char *from;

    while (s->at < s->end) {
        *trims = *s->at == '-' && s->end - s->at >= 3 && memcmp(s->at + 1, close, 2) == 0;
        if (*trims || starts(s, close)) {
            s->at += *trims ? 3 : 2;
            return true;
        }
        from = s->at;
        if (is_blank(*s->at)) {
            s->at++;
        } else if (*s->at == '\'' || *s->at == '"') {
            if (!scan_string(s))
                return false;
        } else if (is_name(*s->at)) {
            while (s->at < s->end && is_name(*s->at))
                s->at++;
            add(s, TOKEN_NAME, from, (size_t)(s->at - from));
        } else {
            add(s, TOKEN_SIGN, s->at++, 1);
        }
    }
    return false;
}

/* Text up to the next tag or the end.  `line`: the text begins a line. */
static void scan_text(struct scanner *s, bool line)
{
    const char *from = s->at, *to, *p;

    while (s->at < s->end && !starts(s, "{{") && !starts(s, "{%") && !starts(s, "{#"))
        s->at++;
    to = s->at;
    if (s->end - s->at >= 3 && s->at[2] == '-') {
        while (to > from && is_blank(to[-1]))
            to--;
    } else if (starts(s, "{%")) {
        for (p = to; p > from && (p[-1] == ' ' || p[-1] == '\t'); p--)
            ;
        if (p > from ? p[-1] == '\n' : line)
            to = p;
    } else if (s->at == s->end && to > from && to[-1] == '\n') {
        to--; /* a renderer drops the last line break of the source */
    }
    if (to == from)
        return;
    memcpy(s->strings + s->n_strings, from, (size_t)(to - from));
    add(s, TOKEN_PRINT, from, 0);
    add(s, TOKEN_STRING, s->strings + s->n_strings, (size_t)(to - from));
    add(s, TOKEN_PRINT_END, from, 0);
    s->n_strings += (size_t)(to - from);
}

/* One tag, its end included.  false for what is no print or block tag. */
static bool scan_one(struct scanner *s, bool *line)
{
    bool block = starts(s, "{%"), trims;

    *line = false;
    if (!block && !starts(s, "{{"))
        return false;
    s->at += 2;
    if (s->at < s->end && *s->at == '-')
        s->at++;
    add(s, block ? TOKEN_BLOCK : TOKEN_PRINT, s->at, 0);
    if (!scan_tag(s, block ? "%}" : "}}", &trims))
        return false;
    add(s, block ? TOKEN_BLOCK_END : TOKEN_PRINT_END, s->at, 0);
    if (trims) {
        while (s->at < s->end && is_blank(*s->at))
            s->at++;
    } else if (block && s->at < s->end && *s->at == '\n') {
        s->at++;
        *line = true;
    }
    return true;
}

static bool scan_all(struct scanner *s)
{
    bool line = true;

    for (;;) {
        scan_text(s, line);
        if (s->at == s->end)
            return true;
        if (!scan_one(s, &line))
            return false;
    }
}

/* ---- Comparing ---- */

/* A string of the file against one with a hole.  The hole holds no marker of its own. */
static bool fits_hole(const struct token *t, const struct token *known, struct gguf_string *hole)
{
    const char *at = memchr(known->text, *HOLE, known->len);
    size_t before = (size_t)(at - known->text), behind = known->len - before - 1;

    if (t->len < before + behind || memcmp(t->text, known->text, before) != 0 ||
        memcmp(t->text + t->len - behind, at + 1, behind) != 0)
        return false;
    *hole = (struct gguf_string){.data = t->text + before, .len = t->len - before - behind};
    return memmem(hole->data, hole->len, "<|", 2) == NULL;
}

static bool same(const struct scanner *s, const struct scanner *known, struct gguf_string *hole)
{
    const struct token *t, *k;
    size_t i;

    if (s->n_tokens != known->n_tokens)
        return false;
    for (i = 0; i < s->n_tokens; i++) {
        t = &s->tokens[i];
        k = &known->tokens[i];
        if (t->kind != k->kind)
            return false;
        if (k->kind == TOKEN_STRING && memchr(k->text, *HOLE, k->len) != NULL) {
            if (!fits_hole(t, k, hole))
                return false;
        } else if (t->len != k->len || memcmp(t->text, k->text, k->len) != 0) {
            return false;
        }
    }
    return true;
}

/* 1 where the template is ChatML with or without these parts, 0 where not, or MODEL_ERR_NOMEM. */
static int matches(const struct scanner *s, bool flag, bool system, struct gguf_string *hole)
{
    char source[sizeof part_flag + sizeof part_for + sizeof part_system + sizeof part_rest];
    struct scanner known;
    int rc;

    strcpy(source, flag ? part_flag : "");
    strcat(source, part_for);
    strcat(source, system ? part_system : "");
    strcat(source, part_rest);
    rc = scanner_init(&known, (struct gguf_string){.data = source, .len = strlen(source)});
    if (rc == 0)
        rc = scan_all(&known) && same(s, &known, hole);
    scanner_release(&known);
    return rc;
}

static int recognise(const struct scanner *s, bool *has_system, struct gguf_string *hole)
{
    int i, rc = 0;

    for (i = 0; i < 4 && rc == 0; i++) {
        *has_system = (i & 1) != 0;
        rc = matches(s, (i & 2) != 0, *has_system, hole);
    }
    return rc;
}

static int refuse(struct gguf_string source, struct kv_why *why)
{
    char begin[49];
    size_t i, len = source.len < sizeof begin - 1 ? source.len : sizeof begin - 1;

    for (i = 0; i < sizeof families / sizeof families[0]; i++)
        if (memmem(source.data, source.len, families[i].marker, strlen(families[i].marker)) != NULL)
            return kv_fail(why, MODEL_ERR_UNSUPPORTED,
                           "tokenizer.chat_template looks like %s; this build has chatml",
                           families[i].name);
    for (i = 0; i < len; i++)
        begin[i] = source.data[i] >= ' ' && source.data[i] <= '~' ? source.data[i] : ' ';
    begin[len] = '\0';
    return kv_fail(why, MODEL_ERR_UNSUPPORTED,
                   "tokenizer.chat_template \"%s\" is not known; this build has chatml", begin);
}

int chat_template_read(struct gguf_string source, struct chat_template *out, struct kv_why *why)
{
    struct chat_template found = {.name = "chatml"};
    struct gguf_string hole = {.data = "", .len = 0};
    struct scanner s;
    int rc;

    if (source.len > CHAT_TEMPLATE_MAX_BYTES)
        return kv_fail(why, MODEL_ERR_UNSUPPORTED,
                       "tokenizer.chat_template has %zu bytes, the most is %d", source.len,
                       CHAT_TEMPLATE_MAX_BYTES);
    if (utf8_valid_prefix(source.data, source.len) < source.len)
        return kv_fail(why, MODEL_ERR_FORMAT, "tokenizer.chat_template is not UTF-8");
    rc = scanner_init(&s, source);
    if (rc == 0 && scan_all(&s))
        rc = recognise(&s, &found.has_system, &hole);
    if (rc == 1 && (found.system = malloc(hole.len + 1)) == NULL)
        rc = MODEL_ERR_NOMEM;
    if (rc == 1) {
        memcpy(found.system, hole.data, hole.len);
        found.system[hole.len] = '\0';
        found.system_len = hole.len;
        *out = found;
    }
    scanner_release(&s);
    if (rc == MODEL_ERR_NOMEM)
        return kv_fail(why, rc, "no memory for tokenizer.chat_template");
    return rc == 1 ? 0 : refuse(source, why);
}

void chat_template_release(struct chat_template *c)
{
    free(c->system);
    *c = (struct chat_template){0};
}

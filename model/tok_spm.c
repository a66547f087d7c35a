/* SentencePiece, the model "llama" of the files: a text is its characters; neighbours whose joined
 * text is a token are merged, the best score first.  What is no token at the end becomes byte
 * tokens.
 *
 * The files write a space as U+2581; here a space is a space on both sides.  So a U+2581 in a text
 * stays itself (as three byte tokens) instead of becoming a space for ever. */
#include "model/token_map.h"
#include "model/tokenizer.h"
#include "model/utf8.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct tok_spm {
    struct token_map map; /* normal tokens by their bytes; borrows the tokenizer's */
    uint32_t *ranks;      /* [n_vocab] less is the better score */
    size_t max_piece;
    int64_t byte_ids[256]; /* -1: the vocabulary lacks it */
    bool space_prefix;
    bool cuts_words; /* no token has a space behind something else */
};

static const char space_mark[] = "\xe2\x96\x81";
enum { SPACE_MARK_BYTES = 3 };

int64_t tok_spm_piece(struct gguf_string text, char *dst)
{
    size_t at = 0, n = 0;

    while (at < text.len) {
        if (text.len - at >= SPACE_MARK_BYTES &&
            memcmp(text.data + at, space_mark, SPACE_MARK_BYTES) == 0) {
            dst[n++] = ' ';
            at += SPACE_MARK_BYTES;
        } else {
            dst[n++] = text.data[at++];
        }
    }
    return (int64_t)n;
}

static int hex_digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

int tok_spm_byte(struct gguf_string text)
{
    int high, low;

    if (text.len != 6 || memcmp(text.data, "<0x", 3) != 0 || text.data[5] != '>')
        return -1;
    high = hex_digit(text.data[3]);
    low = hex_digit(text.data[4]);
    return high < 0 || low < 0 ? -1 : high << 4 | low;
}

/* Order of the float as an integer, the greatest score first; never TOK_NO_RANK. */
static uint32_t score_rank(float score)
{
    uint32_t bits;

    score += 0.0f; /* -0 is +0 */
    memcpy(&bits, &score, sizeof bits);
    return bits & UINT32_C(0x80000000) ? bits : ~(bits | UINT32_C(0x80000000));
}

static int read_scores(struct tok_spm *s, const struct gguf *g, const struct tokenizer *t,
                       struct kv_why *why)
{
    const struct gguf_kv *scores;
    uint32_t id;
    float score;
    int rc;

    rc = gguf_get_array(g, "tokenizer.ggml.scores", GGUF_VALUE_F32, &scores, why);
    if (rc > 0)
        return kv_fail(why, MODEL_ERR_FORMAT, "tokenizer.ggml.scores is missing");
    if (rc < 0)
        return rc;
    if (scores->n_items != t->n_vocab)
        return kv_fail(why, MODEL_ERR_FORMAT,
                       "tokenizer.ggml.scores has %llu items, tokenizer.ggml.tokens %u",
                       (unsigned long long)scores->n_items, t->n_vocab);
    for (id = 0; id < t->n_vocab; id++) {
        score = gguf_array_f32(scores, id);
        if (!isfinite(score))
            return kv_fail(why, MODEL_ERR_FORMAT, "tokenizer.ggml.scores[%u] is not finite", id);
        s->ranks[id] = score_rank(score);
    }
    return 0;
}

static bool crosses_words(struct gguf_string piece)
{
    size_t i;

    for (i = 1; i < piece.len; i++)
        if (piece.data[i] == ' ' && piece.data[i - 1] != ' ')
            return true;
    return false;
}

static int index_tokens(struct tok_spm *s, const struct tokenizer *t, struct kv_why *why)
{
    struct gguf_string piece;
    int64_t before;
    uint32_t id;
    int i;

    s->cuts_words = true;
    for (i = 0; i < 256; i++)
        s->byte_ids[i] = -1;
    for (id = 0; id < t->n_vocab; id++) {
        piece = token_bytes(t, id);
        if (t->types[id] == TOKEN_BYTE)
            s->byte_ids[(unsigned char)piece.data[0]] = id;
        if (t->types[id] != TOKEN_NORMAL || piece.len == 0)
            continue;
        s->cuts_words = s->cuts_words && !crosses_words(piece);
        before = token_map_put(&s->map, piece, id);
        if (before >= 0)
            return kv_fail(why, MODEL_ERR_FORMAT,
                           "tokenizer.ggml.tokens[%u] is the same text as tokens[%lld]", id,
                           (long long)before);
    }
    return 0;
}

int tok_spm_open(const struct gguf *g, const struct tokenizer *t, struct tok_spm **out,
                 struct kv_why *why)
{
    struct tok_spm *s = calloc(1, sizeof *s);
    int rc = MODEL_ERR_NOMEM;

    if (s == NULL)
        goto out;
    s->max_piece = t->max_piece;
    s->space_prefix = t->space_prefix;
    s->ranks = malloc(t->n_vocab * sizeof *s->ranks);
    if (s->ranks == NULL)
        goto out;
    rc = token_map_init(&s->map, t->n_vocab);
    if (rc < 0)
        goto out;
    rc = read_scores(s, g, t, why);
    if (rc < 0)
        goto out;
    rc = index_tokens(s, t, why);
    if (rc < 0)
        goto out;
    *out = s;
    s = NULL;
out:
    tok_spm_close(s);
    return rc;
}

void tok_spm_close(struct tok_spm *s)
{
    if (s == NULL)
        return;
    token_map_release(&s->map);
    free(s->ranks);
    free(s);
}

static uint32_t pair_rank(const void *vocab, const char *text, const struct tok_symbol *left,
                          const struct tok_symbol *right, uint32_t *id)
{
    const struct tok_spm *s = vocab;
    size_t len = (size_t)left->len + right->len;
    int64_t found;

    if (len > s->max_piece)
        return TOK_NO_RANK;
    found = token_map_get(&s->map, text + left->at, len);
    if (found < 0)
        return TOK_NO_RANK;
    *id = (uint32_t)found;
    return s->ranks[found];
}

/* Bytes of text that can be encoded by themselves: where no token goes on over the border between
 * something and a space behind it, nothing is merged over it either.  That is so in vocabularies of
 * prose, and keeps the heap small. */
static size_t part_bytes(const struct tok_spm *s, const char *text, size_t len)
{
    size_t n = 1;

    if (!s->cuts_words)
        return len;
    while (n < len && (text[n] != ' ' || text[n - 1] == ' '))
        n++;
    return n;
}

/* One symbol a character.  Returns how many. */
static uint32_t split_text(const char *text, size_t len, struct tok_symbol *symbols)
{
    uint32_t n = 0, at = 0, n_bytes;

    while (at < len) {
        n_bytes = utf8_char_bytes((unsigned char)text[at]);
        symbols[n] =
            (struct tok_symbol){.at = at, .len = n_bytes, .prev = n - 1, .next = n + 1, .id = 0};
        at += n_bytes;
        n++;
    }
    symbols[0].prev = TOK_NO_SYMBOL;
    symbols[n - 1].next = TOK_NO_SYMBOL;
    return n;
}

static int add_bytes(const struct tok_spm *s, const char *text, size_t len, struct tok_run *run)
{
    int64_t id;
    size_t i;
    int rc;

    for (i = 0; i < len; i++) {
        id = s->byte_ids[(unsigned char)text[i]];
        if (id < 0) {
            run->n_dropped++;
            continue;
        }
        rc = token_list_add(run->out, (uint32_t)id);
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int add_symbols(const struct tok_spm *s, const char *text, struct tok_run *run)
{
    const struct tok_symbol *symbol = run->work.symbols;
    int64_t id;
    int rc;

    for (;;) {
        id = token_map_get(&s->map, text + symbol->at, symbol->len);
        rc = id >= 0 ? token_list_add(run->out, (uint32_t)id)
                     : add_bytes(s, text + symbol->at, symbol->len, run);
        if (rc < 0 || symbol->next == TOK_NO_SYMBOL)
            return rc;
        symbol = &run->work.symbols[symbol->next];
    }
}

static int encode_part(const struct tok_spm *s, const char *text, size_t len, struct tok_run *run)
{
    int rc = tok_work_reserve(&run->work, len);

    if (rc < 0)
        return rc;
    tok_merge(&run->work, split_text(text, len, run->work.symbols), pair_rank, s, text);
    return add_symbols(s, text, run);
}

static int encode_text(const struct tok_spm *s, const char *text, size_t len, struct tok_run *run)
{
    size_t at, n;
    int rc = 0;

    for (at = 0; at < len && rc == 0; at += n) {
        n = part_bytes(s, text + at, len - at);
        rc = encode_part(s, text + at, n, run);
    }
    return rc;
}

int tok_spm_encode(const struct tok_spm *s, const char *text, size_t len, struct tok_run *run)
{
    char *prefixed;
    int rc;

    if (len == 0)
        return 0;
    if (!s->space_prefix)
        return encode_text(s, text, len, run);
    prefixed = malloc(len + 1);
    if (prefixed == NULL)
        return MODEL_ERR_NOMEM;
    prefixed[0] = ' ';
    memcpy(prefixed + 1, text, len);
    rc = encode_text(s, prefixed, len + 1, run);
    free(prefixed);
    return rc;
}

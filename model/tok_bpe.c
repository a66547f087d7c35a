/* Byte-level byte-pair encoding, the model "gpt2" of the files.
 *
 * A text is cut into words by the pre-tokenizer's pattern; a word is its bytes; neighbours are
 * merged by the file's list, the earliest rule first.  Nothing merges across words.  A byte that
 * the vocabulary lacks is left out before merging, as if the word had been written without it.
 *
 * The files write a byte as a printable character: those that are printable in Latin-1 as
 * themselves, the other 68, in their order, as U+0100 and on. */
#include "model/token_map.h"
#include "model/tokenizer.h"
#include "model/utf8.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

/* White space by Unicode's White_Space property.  PCRE2's own \s has U+180E in it as well, which
 * the tokenizers that these vocabularies were trained with do not. */
#define SPACE                                                                               \
    "\\x09-\\x0d\\x20\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}" \
    "\\x{205f}\\x{3000}"
#define CONTRACTIONS "'(?:s|t|re|ve|m|ll|d)"

/* Every character is a space, a letter, a number or none of these, so that each match of a pattern
 * begins where the one before it ended. */
static const char pattern_gpt2[] = CONTRACTIONS "| ?\\p{L}+| ?\\p{N}+| ?[^" SPACE "\\p{L}\\p{N}]+"
                                                "|[" SPACE "]+(?![^" SPACE "])|[" SPACE "]+";

/* Two steps in one: each single number is cut out first, then the rule above runs on what is left
 * between.  The end of a stretch is an end of text to that rule's look-ahead, so a number behind
 * white space counts as an end. */
static const char pattern_digits[] = "\\p{N}|" CONTRACTIONS "| ?\\p{L}+| ?[^" SPACE "\\p{L}\\p{N}]+"
                                     "|[" SPACE "]+(?![^" SPACE "\\p{N}])|[" SPACE "]+";

static const struct pre_tokenizer {
    const char *name;
    const char *pattern;
} pre_tokenizers[] = {
    {"gpt-2", pattern_gpt2},
    {"smollm", pattern_digits},
    {"starcoder", pattern_digits},
    {"refact", pattern_digits},
};

/* A word of n bytes takes a few steps a byte; this is far above what any text of the largest size
 * needs and stops a pattern that runs away. */
enum { MATCH_LIMIT = 64 * 1024 * 1024 };

struct merge_rule {
    uint64_t pair; /* left id << 32 | right id */
    uint32_t rank; /* TOK_NO_RANK: free slot */
    uint32_t id;   /* what the pair becomes */
};

struct tok_bpe {
    pcre2_code *pattern;
    pcre2_match_context *context;
    int64_t byte_ids[256];    /* -1: the vocabulary lacks it */
    struct merge_rule *rules; /* open addressing, at most half full */
    uint64_t mask;
};

static const struct pre_tokenizer *find_pre(const char *name, size_t len)
{
    size_t i;

    for (i = 0; i < sizeof pre_tokenizers / sizeof pre_tokenizers[0]; i++)
        if (strlen(pre_tokenizers[i].name) == len && memcmp(pre_tokenizers[i].name, name, len) == 0)
            return &pre_tokenizers[i];
    return NULL;
}

bool tok_bpe_knows(struct gguf_string pre)
{
    return find_pre(pre.data, pre.len) != NULL;
}

/* ---- Pieces ---- */

static bool printable(unsigned byte)
{
    return (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte != 0xad);
}

/* The byte that a character of the files' alphabet stands for, or -1. */
static int alphabet_byte(uint32_t c)
{
    unsigned byte, n = 0;

    if (c < 256)
        return printable(c) ? (int)c : -1;
    for (byte = 0; byte < 256; byte++)
        if (!printable(byte) && n++ == c - 256)
            return (int)byte;
    return -1;
}

/* The alphabet ends at U+0143, so its characters have one or two bytes. */
int64_t tok_bpe_piece(struct gguf_string text, char *dst)
{
    size_t at = 0, n = 0;
    uint32_t c;
    int byte;

    while (at < text.len) {
        c = (unsigned char)text.data[at++];
        if (c >= 0xc0 && c < 0xe0 && at < text.len)
            c = (c & 0x1f) << 6 | ((unsigned char)text.data[at++] & 0x3f);
        byte = alphabet_byte(c);
        if (byte < 0)
            return -1;
        dst[n++] = (char)byte;
    }
    return (int64_t)n;
}

/* ---- Merge rules ---- */

static struct merge_rule *find_rule(const struct tok_bpe *b, uint64_t pair)
{
    uint64_t at = pair * UINT64_C(0x9e3779b97f4a7c15);

    at = (at ^ at >> 32) & b->mask;
    while (b->rules[at].rank != TOK_NO_RANK && b->rules[at].pair != pair)
        at = (at + 1) & b->mask;
    return &b->rules[at];
}

static int64_t find_normal(const struct tokenizer *t, const struct token_map *map, const char *text,
                           size_t len)
{
    int64_t id = token_map_get(map, text, len);

    return id >= 0 && t->types[id] == TOKEN_NORMAL ? id : -1;
}

/* "left right" to ids.  Every part and the whole must be a normal token. */
static int read_rule(struct tok_bpe *b, const struct tokenizer *t, const struct token_map *map,
                     struct gguf_string text, uint32_t rank, struct kv_why *why)
{
    const char *space = memchr(text.data, ' ', text.len);
    size_t n_left = space == NULL ? 0 : (size_t)(space - text.data);
    char joined[2 * TOKENIZER_MAX_PIECE];
    struct merge_rule *rule;
    int64_t left, right, whole;

    if (n_left == 0 || n_left + 1 == text.len || text.len - 1 > sizeof joined)
        return kv_fail(why, MODEL_ERR_FORMAT,
                       "tokenizer.ggml.merges[%u] is not two tokens with a space between", rank);
    memcpy(joined, text.data, n_left);
    memcpy(joined + n_left, space + 1, text.len - n_left - 1);
    left = find_normal(t, map, joined, n_left);
    right = find_normal(t, map, joined + n_left, text.len - n_left - 1);
    whole = find_normal(t, map, joined, text.len - 1);
    if (left < 0 || right < 0 || whole < 0)
        return kv_fail(why, MODEL_ERR_FORMAT,
                       "tokenizer.ggml.merges[%u] names a token that is not in the vocabulary, or "
                       "not a normal one",
                       rank);
    rule = find_rule(b, (uint64_t)left << 32 | (uint64_t)right);
    if (rule->rank != TOK_NO_RANK)
        return kv_fail(why, MODEL_ERR_FORMAT,
                       "tokenizer.ggml.merges[%u] is the same rule as merges[%u]", rank,
                       rule->rank);
    rule->pair = (uint64_t)left << 32 | (uint64_t)right;
    rule->rank = rank;
    rule->id = (uint32_t)whole;
    return 0;
}

static int read_rules(struct tok_bpe *b, const struct gguf *g, const struct tokenizer *t,
                      const struct token_map *map, struct kv_why *why)
{
    const struct gguf_kv *merges;
    uint64_t n_slots = 16, i;
    int rc;

    rc = gguf_get_array(g, "tokenizer.ggml.merges", GGUF_VALUE_STRING, &merges, why);
    if (rc > 0)
        return kv_fail(why, MODEL_ERR_FORMAT, "tokenizer.ggml.merges is missing");
    if (rc < 0)
        return rc;
    if (merges->n_items >= UINT32_MAX / 4)
        return kv_fail(why, MODEL_ERR_FORMAT, "tokenizer.ggml.merges has %llu items",
                       (unsigned long long)merges->n_items);
    while (n_slots < 2 * merges->n_items)
        n_slots *= 2;
    b->rules = malloc(n_slots * sizeof *b->rules);
    if (b->rules == NULL)
        return MODEL_ERR_NOMEM;
    b->mask = n_slots - 1;
    for (i = 0; i < n_slots; i++)
        b->rules[i].rank = TOK_NO_RANK;
    for (i = 0; i < merges->n_items; i++) {
        rc = read_rule(b, t, map, gguf_array_string(g, merges, i), (uint32_t)i, why);
        if (rc < 0)
            return rc;
    }
    return 0;
}

/* ---- Life ---- */

static int compile_pattern(struct tok_bpe *b, const char *pre, struct kv_why *why)
{
    const struct pre_tokenizer *found = find_pre(pre, strlen(pre));
    PCRE2_SIZE at;
    int error;

    if (found == NULL)
        return kv_fail(why, MODEL_ERR_UNSUPPORTED,
                       "tokenizer.ggml.pre is \"%s\", which this build does not have", pre);
    b->context = pcre2_match_context_create(NULL);
    b->pattern = pcre2_compile((PCRE2_SPTR)found->pattern, PCRE2_ZERO_TERMINATED,
                               PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED, &error, &at, NULL);
    if (b->context == NULL || b->pattern == NULL)
        return kv_fail(why, MODEL_ERR_NOMEM, "pattern of tokenizer.ggml.pre \"%s\"", pre);
    pcre2_set_match_limit(b->context, MATCH_LIMIT);
    /* Where code may not be made at run time the interpreter finds the same words. */
    (void)pcre2_jit_compile(b->pattern, PCRE2_JIT_COMPLETE);
    return 0;
}

static void find_bytes(struct tok_bpe *b, const struct tokenizer *t)
{
    struct gguf_string piece;
    uint32_t id;
    int i;

    for (i = 0; i < 256; i++)
        b->byte_ids[i] = -1;
    for (id = 0; id < t->n_vocab; id++) {
        piece = token_bytes(t, id);
        if (t->types[id] == TOKEN_NORMAL && piece.len == 1)
            b->byte_ids[(unsigned char)piece.data[0]] = id;
    }
}

int tok_bpe_open(const struct gguf *g, const struct tokenizer *t, const struct token_map *map,
                 struct tok_bpe **out, struct kv_why *why)
{
    struct tok_bpe *b = calloc(1, sizeof *b);
    int rc;

    if (b == NULL)
        return kv_fail(why, MODEL_ERR_NOMEM, "tokenizer");
    find_bytes(b, t);
    rc = compile_pattern(b, t->pre, why);
    if (rc < 0)
        goto out;
    rc = read_rules(b, g, t, map, why);
    if (rc < 0)
        goto out;
    *out = b;
    b = NULL;
out:
    tok_bpe_close(b);
    return rc;
}

void tok_bpe_close(struct tok_bpe *b)
{
    if (b == NULL)
        return;
    pcre2_code_free(b->pattern);
    pcre2_match_context_free(b->context);
    free(b->rules);
    free(b);
}

/* ---- Encoding ---- */

static uint32_t rule_rank(const void *vocab, const char *text, const struct tok_symbol *left,
                          const struct tok_symbol *right, uint32_t *id)
{
    const struct merge_rule *rule = find_rule(vocab, (uint64_t)left->id << 32 | right->id);

    (void)text;
    *id = rule->id;
    return rule->rank;
}

/* One symbol for each byte of the word that the vocabulary has.  Returns how many. */
static uint32_t split_word(const struct tok_bpe *b, const char *word, size_t len,
                           struct tok_run *run)
{
    struct tok_symbol *symbols = run->work.symbols;
    uint32_t i, n = 0;
    int64_t id;

    for (i = 0; i < len; i++) {
        id = b->byte_ids[(unsigned char)word[i]];
        if (id < 0) {
            run->n_dropped++;
            continue;
        }
        symbols[n] = (struct tok_symbol){
            .id = (uint32_t)id, .at = i, .len = 1, .prev = n - 1, .next = n + 1};
        n++;
    }
    if (n > 0) {
        symbols[0].prev = TOK_NO_SYMBOL;
        symbols[n - 1].next = TOK_NO_SYMBOL;
    }
    return n;
}

static int encode_word(const struct tok_bpe *b, const char *word, size_t len, struct tok_run *run)
{
    const struct tok_symbol *symbols;
    uint32_t n, at;
    int rc;

    rc = tok_work_reserve(&run->work, len);
    if (rc < 0)
        return rc;
    n = split_word(b, word, len, run);
    if (n == 0)
        return 0;
    tok_merge(&run->work, n, rule_rank, b, word);
    symbols = run->work.symbols;
    for (at = 0; at != TOK_NO_SYMBOL; at = symbols[at].next) {
        rc = token_list_add(run->out, symbols[at].id);
        if (rc < 0)
            return rc;
    }
    return 0;
}

/* Bytes of the word that begins at text, or a negative error. */
static int64_t next_word(const struct tok_bpe *b, const char *text, size_t len, size_t at,
                         struct tok_run *run)
{
    int rc = pcre2_match(b->pattern, (PCRE2_SPTR)text, len, at, PCRE2_NO_UTF_CHECK, run->work.match,
                         b->context);
    size_t end = rc < 0 ? at : pcre2_get_ovector_pointer(run->work.match)[1];

    if (end > at)
        return (int64_t)(end - at);
    if (rc == PCRE2_ERROR_NOMEMORY || rc == PCRE2_ERROR_HEAPLIMIT)
        return kv_fail(run->why, MODEL_ERR_NOMEM, "pre-tokenizer at byte %zu of the text", at);
    return kv_fail(run->why, MODEL_ERR_UNSUPPORTED,
                   "pre-tokenizer gave up at byte %zu of the text (PCRE2 error %d)", at, rc);
}

int tok_bpe_encode(const struct tok_bpe *b, const char *text, size_t len, struct tok_run *run)
{
    size_t at = 0;
    int64_t n;
    int rc;

    if (run->work.match == NULL)
        run->work.match = pcre2_match_data_create(1, NULL);
    if (run->work.match == NULL)
        return MODEL_ERR_NOMEM;
    for (; at < len; at += (size_t)n) {
        n = next_word(b, text, len, at, run);
        if (n < 0)
            return (int)n;
        rc = encode_word(b, text + at, (size_t)n, run);
        if (rc < 0)
            return rc;
    }
    return 0;
}

void tok_bpe_run_release(struct tok_run *run)
{
    pcre2_match_data_free(run->work.match);
    run->work.match = NULL;
}

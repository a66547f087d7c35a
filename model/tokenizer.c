/* The vocabulary of a file, its special tokens, and the way from text to ids and back.
 *
 * Control and user-defined tokens are reachable from text with TOKENIZE_SPECIAL only, whatever the
 * file's merges and scores say: both tokenizers merge normal tokens and nothing else. */
#include "model/tokenizer.h"
#include "model/token_map.h"
#include "model/utf8.h"

#include <stdlib.h>
#include <string.h>

/* What ends an answer wherever a vocabulary has it as a special token. */
static const char *const end_markers[] = {
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<|EOT|>",
    "<EOT>",
    "<eos>",
    "<\357\275\234end\342\226\201of\342\226\201sentence\357\275\234>",
};

/* ---- Reading the vocabulary ---- */

static int read_kind(struct tokenizer *t, const struct gguf *g, struct kv_why *why)
{
    struct gguf_string name;
    int rc = gguf_get_string(g, "tokenizer.ggml.model", &name, why);

    if (rc > 0)
        return kv_fail(why, MODEL_ERR_FORMAT, "tokenizer.ggml.model is missing");
    if (rc < 0)
        return rc;
    if (name.len == 4 && memcmp(name.data, "gpt2", 4) == 0)
        t->kind = TOKENIZER_BPE;
    else if (name.len == 5 && memcmp(name.data, "llama", 5) == 0)
        t->kind = TOKENIZER_SPM;
    else
        return kv_fail(why, MODEL_ERR_UNSUPPORTED,
                       "tokenizer.ggml.model is \"%.*s\"; this build has gpt2 and llama",
                       (int)(name.len < 64 ? name.len : 64), name.data);
    return 0;
}

static int read_pre(struct tokenizer *t, const struct gguf *g, struct kv_why *why)
{
    struct gguf_string pre = {0};
    int rc = gguf_get_string(g, "tokenizer.ggml.pre", &pre, why);

    if (rc < 0)
        return rc;
    if (t->kind == TOKENIZER_BPE && rc > 0)
        return kv_fail(why, MODEL_ERR_UNSUPPORTED,
                       "tokenizer.ggml.pre is missing: the file does not say how text is split");
    if (t->kind == TOKENIZER_BPE && !tok_bpe_knows(pre))
        return kv_fail(why, MODEL_ERR_UNSUPPORTED,
                       "tokenizer.ggml.pre is \"%.*s\", which this build does not have",
                       (int)(pre.len < 64 ? pre.len : 64), pre.data);
    if (pre.len == 0)
        return 0;
    if (pre.len >= sizeof t->pre)
        return kv_fail(why, MODEL_ERR_FORMAT, "tokenizer.ggml.pre has %zu bytes", pre.len);
    memcpy(t->pre, pre.data, pre.len);
    return 0;
}

/* Absent: fallback. */
static int read_flag(const struct gguf *g, const char *key, bool fallback, bool *out,
                     struct kv_why *why)
{
    int rc;

    *out = fallback;
    rc = gguf_get_bool(g, key, out, why);
    return rc < 0 ? rc : 0;
}

static int read_flags(struct tokenizer *t, const struct gguf *g, struct kv_why *why)
{
    bool spm = t->kind == TOKENIZER_SPM, trims;
    int rc;

    rc = read_flag(g, "tokenizer.ggml.add_bos_token", spm, &t->add_bos, why);
    if (rc < 0)
        return rc;
    rc = read_flag(g, "tokenizer.ggml.add_space_prefix", spm, &t->space_prefix, why);
    if (rc < 0)
        return rc;
    if (!spm && t->space_prefix)
        return kv_fail(why, MODEL_ERR_UNSUPPORTED,
                       "tokenizer.ggml.add_space_prefix is true with tokenizer.ggml.model gpt2");
    rc = read_flag(g, "tokenizer.ggml.remove_extra_whitespaces", false, &trims, why);
    if (rc < 0)
        return rc;
    if (trims)
        return kv_fail(why, MODEL_ERR_UNSUPPORTED,
                       "tokenizer.ggml.remove_extra_whitespaces is true");
    if (gguf_find(g, "tokenizer.ggml.precompiled_charsmap") != NULL)
        return kv_fail(why, MODEL_ERR_UNSUPPORTED, "tokenizer.ggml.precompiled_charsmap");
    return 0;
}

static int read_types(struct tokenizer *t, const struct gguf *g, struct kv_why *why)
{
    const struct gguf_kv *types;
    uint32_t id;
    int32_t type;
    int rc;

    t->types = malloc(t->n_vocab);
    if (t->types == NULL)
        return MODEL_ERR_NOMEM;
    memset(t->types, TOKEN_NORMAL, t->n_vocab);
    rc = gguf_get_array(g, "tokenizer.ggml.token_type", GGUF_VALUE_I32, &types, why);
    if (rc != 0)
        return rc < 0 ? rc : 0;
    if (types->n_items != t->n_vocab)
        return kv_fail(why, MODEL_ERR_FORMAT,
                       "tokenizer.ggml.token_type has %llu items, tokenizer.ggml.tokens %u",
                       (unsigned long long)types->n_items, t->n_vocab);
    for (id = 0; id < t->n_vocab; id++) {
        type = gguf_array_i32(types, id);
        if (type < TOKEN_NORMAL || type > TOKEN_BYTE ||
            (type == TOKEN_BYTE && t->kind != TOKENIZER_SPM))
            return kv_fail(why, MODEL_ERR_FORMAT, "tokenizer.ggml.token_type[%u] is %d", id,
                           (int)type);
        t->types[id] = (unsigned char)type;
    }
    return 0;
}

/* The bytes that a token of the file stands for; dst has room for text.len, or 1. */
static int64_t piece_of(const struct tokenizer *t, uint32_t id, struct gguf_string text, char *dst)
{
    bool spm = t->kind == TOKENIZER_SPM;
    int byte;

    switch (t->types[id]) {
    case TOKEN_NORMAL:
        return spm ? tok_spm_piece(text, dst) : tok_bpe_piece(text, dst);
    case TOKEN_BYTE:
        byte = tok_spm_byte(text);
        *dst = (char)byte;
        return byte < 0 ? -1 : 1;
    case TOKEN_USER:
        if (spm)
            return tok_spm_piece(text, dst);
        break;
    default:
        break;
    }
    memcpy(dst, text.data, text.len);
    return (int64_t)text.len;
}

static int read_pieces(struct tokenizer *t, const struct gguf *g, const struct gguf_kv *tokens,
                       struct kv_why *why)
{
    struct gguf_string text;
    size_t at = 0;
    uint32_t id;
    int64_t n;

    for (id = 0; id < t->n_vocab; id++)
        at += gguf_array_string(g, tokens, id).len;
    if (at > UINT32_MAX)
        return kv_fail(why, MODEL_ERR_FORMAT, "tokenizer.ggml.tokens has %zu bytes of text", at);
    t->bytes = malloc(at + 1);
    t->offsets = malloc(((size_t)t->n_vocab + 1) * sizeof *t->offsets);
    if (t->bytes == NULL || t->offsets == NULL)
        return MODEL_ERR_NOMEM;
    for (id = 0, at = 0; id < t->n_vocab; id++, at += (size_t)n) {
        text = gguf_array_string(g, tokens, id);
        n = piece_of(t, id, text, t->bytes + at);
        if (n < 0)
            return kv_fail(why, MODEL_ERR_FORMAT,
                           "tokenizer.ggml.tokens[%u] has text that stands for no bytes", id);
        t->offsets[id] = (uint32_t)at;
        if ((size_t)n > t->max_piece)
            t->max_piece = (size_t)n;
    }
    t->offsets[t->n_vocab] = (uint32_t)at;
    return 0;
}

/* Fills map with the file's own texts. */
static int read_texts(struct tokenizer *t, const struct gguf *g, const struct gguf_kv *tokens,
                      struct token_map *map, struct kv_why *why)
{
    struct gguf_string text;
    int64_t before;
    uint32_t id;

    if (token_map_init(map, t->n_vocab) < 0)
        return MODEL_ERR_NOMEM;
    for (id = 0; id < t->n_vocab; id++) {
        text = gguf_array_string(g, tokens, id);
        if (text.len > TOKENIZER_MAX_PIECE)
            return kv_fail(why, MODEL_ERR_FORMAT, "tokenizer.ggml.tokens[%u] has %zu bytes", id,
                           text.len);
        if (text.len == 0) {
            if (t->types[id] == TOKEN_UNUSED)
                continue;
            return kv_fail(why, MODEL_ERR_FORMAT, "tokenizer.ggml.tokens[%u] is empty", id);
        }
        before = token_map_put(map, text, id);
        if (before >= 0)
            return kv_fail(why, MODEL_ERR_FORMAT,
                           "tokenizer.ggml.tokens[%u] is the same text as tokens[%lld]", id,
                           (long long)before);
    }
    return 0;
}

static int read_tokens(struct tokenizer *t, const struct gguf *g, struct token_map *map,
                       struct kv_why *why)
{
    const struct gguf_kv *tokens;
    int rc = gguf_get_array(g, "tokenizer.ggml.tokens", GGUF_VALUE_STRING, &tokens, why);

    if (rc > 0)
        return kv_fail(why, MODEL_ERR_FORMAT, "tokenizer.ggml.tokens is missing");
    if (rc < 0)
        return rc;
    if (tokens->n_items == 0 || tokens->n_items > TOKENIZER_MAX_VOCAB)
        return kv_fail(why, MODEL_ERR_FORMAT, "tokenizer.ggml.tokens has %llu items",
                       (unsigned long long)tokens->n_items);
    t->n_vocab = (uint32_t)tokens->n_items;
    rc = read_types(t, g, why);
    if (rc < 0)
        return rc;
    rc = read_texts(t, g, tokens, map, why);
    if (rc < 0)
        return rc;
    return read_pieces(t, g, tokens, why);
}

/* ---- Special tokens ---- */

static bool is_special(const struct tokenizer *t, uint32_t id)
{
    return t->types[id] == TOKEN_CONTROL || t->types[id] == TOKEN_USER;
}

static int compare_specials(const void *a, const void *b, void *tokenizer)
{
    const struct gguf_string x = token_bytes(tokenizer, *(const uint32_t *)a);
    const struct gguf_string y = token_bytes(tokenizer, *(const uint32_t *)b);
    int order = memcmp(x.data, y.data, x.len < y.len ? x.len : y.len);

    return order != 0 ? order : (x.len > y.len) - (x.len < y.len);
}

static int index_specials(struct tokenizer *t)
{
    uint32_t id, n = 0;

    for (id = 0; id < t->n_vocab; id++)
        n += is_special(t, id);
    t->specials = malloc((n + 1) * sizeof *t->specials);
    if (t->specials == NULL)
        return MODEL_ERR_NOMEM;
    for (id = 0; id < t->n_vocab; id++) {
        if (!is_special(t, id))
            continue;
        t->specials[t->n_specials++] = id;
        t->special_lead[(unsigned char)token_bytes(t, id).data[0]] = true;
    }
    qsort_r(t->specials, n, sizeof *t->specials, compare_specials, t);
    return 0;
}

/* The first of specials[lo..hi), which agree in their first `depth` bytes, whose next byte is at
 * least `byte`.  None of them ends there. */
static uint32_t lower_bound(const struct tokenizer *t, uint32_t lo, uint32_t hi, size_t depth,
                            unsigned byte)
{
    while (lo < hi) {
        uint32_t mid = lo + (hi - lo) / 2;
        if ((unsigned char)token_bytes(t, t->specials[mid]).data[depth] < byte)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* The longest special token that text begins with, or -1. */
static int64_t match_special(const struct tokenizer *t, const char *text, size_t len)
{
    uint32_t lo = 0, hi = t->n_specials;
    int64_t best = -1;
    size_t depth;
    unsigned byte;

    for (depth = 0; depth < len; depth++) {
        byte = (unsigned char)text[depth];
        lo = lower_bound(t, lo, hi, depth, byte);
        hi = lower_bound(t, lo, hi, depth, byte + 1);
        if (lo == hi)
            break;
        /* The shortest stands first: only it can end here. */
        if (token_bytes(t, t->specials[lo]).len == depth + 1)
            best = t->specials[lo++];
        if (lo == hi)
            break;
    }
    return best;
}

int64_t tokenizer_find(const struct tokenizer *t, const char *text)
{
    size_t len = strlen(text);
    int64_t id = match_special(t, text, len);

    return id >= 0 && token_bytes(t, (uint32_t)id).len == len ? id : -1;
}

static void add_end(struct tokenizer *t, int64_t id)
{
    if (id < 0 || tokenizer_is_end(t, (uint32_t)id) || t->n_ends == TOKENIZER_MAX_ENDS)
        return;
    t->ends[t->n_ends++] = (uint32_t)id;
    /* An end marker is never text of an answer, also where a converter called it user-defined. */
    if (t->types[id] == TOKEN_USER)
        t->types[id] = TOKEN_CONTROL;
}

/* *out: -1 where the file names none. */
static int read_special_id(const struct tokenizer *t, const struct gguf *g, const char *key,
                           int64_t *out, struct kv_why *why)
{
    uint32_t id;
    int rc = gguf_get_u32(g, key, &id, why);

    *out = -1;
    if (rc != 0)
        return rc < 0 ? rc : 0;
    if (id >= t->n_vocab)
        return kv_fail(why, MODEL_ERR_FORMAT, "%s is %u, the vocabulary has %u tokens", key, id,
                       t->n_vocab);
    *out = id;
    return 0;
}

static int read_special_ids(struct tokenizer *t, const struct gguf *g, struct kv_why *why)
{
    static const char *const end_keys[] = {"tokenizer.ggml.eos_token_id",
                                           "tokenizer.ggml.eot_token_id",
                                           "tokenizer.ggml.eom_token_id"};
    static const char *const other_keys[] = {"tokenizer.ggml.unknown_token_id",
                                             "tokenizer.ggml.padding_token_id",
                                             "tokenizer.ggml.seperator_token_id"};
    int64_t id;
    size_t i;
    int rc;

    rc = read_special_id(t, g, "tokenizer.ggml.bos_token_id", &t->bos, why);
    if (rc < 0)
        return rc;
    if (t->add_bos && t->bos < 0)
        return kv_fail(why, MODEL_ERR_FORMAT,
                       "tokenizer.ggml.bos_token_id is missing, and texts are to begin with it");
    for (i = 0; i < sizeof end_keys / sizeof end_keys[0]; i++) {
        rc = read_special_id(t, g, end_keys[i], &id, why);
        if (rc < 0)
            return rc;
        add_end(t, id);
    }
    for (i = 0; i < sizeof other_keys / sizeof other_keys[0]; i++) {
        rc = read_special_id(t, g, other_keys[i], &id, why);
        if (rc < 0)
            return rc;
    }
    for (i = 0; i < sizeof end_markers / sizeof end_markers[0]; i++)
        add_end(t, tokenizer_find(t, end_markers[i]));
    return 0;
}

/* ---- Life ---- */

static int read_all(struct tokenizer *t, const struct gguf *g, struct token_map *map,
                    struct kv_why *why)
{
    int rc;

    rc = read_kind(t, g, why);
    if (rc < 0)
        return rc;
    rc = read_pre(t, g, why);
    if (rc < 0)
        return rc;
    rc = read_flags(t, g, why);
    if (rc < 0)
        return rc;
    rc = read_tokens(t, g, map, why);
    if (rc < 0)
        return rc;
    rc = index_specials(t);
    if (rc < 0)
        return rc;
    rc = read_special_ids(t, g, why);
    if (rc < 0)
        return rc;
    return t->kind == TOKENIZER_SPM ? tok_spm_open(g, t, &t->spm, why)
                                    : tok_bpe_open(g, t, map, &t->bpe, why);
}

int tokenizer_open(const struct gguf *g, struct tokenizer **out, struct kv_why *why)
{
    struct tokenizer *t = calloc(1, sizeof *t);
    struct token_map map = {0};
    int rc;

    if (t == NULL)
        return kv_fail(why, MODEL_ERR_NOMEM, "tokenizer");
    rc = read_all(t, g, &map, why);
    token_map_release(&map);
    if (rc == MODEL_ERR_NOMEM)
        kv_fail(why, rc, "no memory for the tokenizer");
    if (rc < 0) {
        tokenizer_close(t);
        return rc;
    }
    *out = t;
    return 0;
}

void tokenizer_close(struct tokenizer *t)
{
    if (t == NULL)
        return;
    tok_bpe_close(t->bpe);
    tok_spm_close(t->spm);
    free(t->specials);
    free(t->offsets);
    free(t->bytes);
    free(t->types);
    free(t);
}

size_t tokenizer_max_piece(const struct tokenizer *t)
{
    return t->max_piece;
}

uint32_t tokenizer_n_vocab(const struct tokenizer *t)
{
    return t->n_vocab;
}

const char *tokenizer_model(const struct tokenizer *t)
{
    return t->kind == TOKENIZER_SPM ? "llama" : "gpt2";
}

const char *tokenizer_pre(const struct tokenizer *t)
{
    return t->pre;
}

/* ---- Text to ids ---- */

static int encode_plain(const struct tokenizer *t, const char *text, size_t len,
                        struct tok_run *run)
{
    return t->kind == TOKENIZER_SPM ? tok_spm_encode(t->spm, text, len, run)
                                    : tok_bpe_encode(t->bpe, text, len, run);
}

/* The longest special token at the leftmost place, and so on; plain text between. */
static int encode_special(const struct tokenizer *t, const char *text, size_t len,
                          struct tok_run *run)
{
    size_t from = 0, at = 0;
    int64_t id;
    int rc;

    while (at < len) {
        id = t->special_lead[(unsigned char)text[at]] ? match_special(t, text + at, len - at) : -1;
        if (id < 0) {
            at++;
            continue;
        }
        rc = encode_plain(t, text + from, at - from, run);
        if (rc < 0)
            return rc;
        rc = token_list_add(run->out, (uint32_t)id);
        if (rc < 0)
            return rc;
        at += token_bytes(t, (uint32_t)id).len;
        from = at;
    }
    return encode_plain(t, text + from, len - from, run);
}

static int check_text(const char *text, size_t len, struct kv_why *why)
{
    size_t valid;

    if (len > TOKENIZE_MAX_BYTES)
        return kv_fail(why, MODEL_ERR_INVALID, "text has %zu bytes, the most is %d", len,
                       TOKENIZE_MAX_BYTES);
    valid = utf8_valid_prefix(text, len);
    if (valid < len)
        return kv_fail(why, MODEL_ERR_UTF8, "text is not UTF-8 at byte %zu (0x%02x)", valid,
                       (unsigned)(unsigned char)text[valid]);
    return 0;
}

int tokenizer_encode(const struct tokenizer *t, const char *text, size_t len, unsigned flags,
                     struct token_list *out, size_t *n_dropped, struct kv_why *why)
{
    struct tok_run run = {.out = out, .why = why};
    size_t n_before = out->n;
    int rc;

    rc = check_text(text, len, why);
    if (rc < 0)
        return rc;
    if ((flags & TOKENIZE_BOS) && t->add_bos)
        rc = token_list_add(out, (uint32_t)t->bos);
    if (rc == 0)
        rc = flags & TOKENIZE_SPECIAL ? encode_special(t, text, len, &run)
                                      : encode_plain(t, text, len, &run);
    tok_bpe_run_release(&run);
    tok_work_release(&run.work);
    if (rc < 0) {
        out->n = n_before;
        return rc == MODEL_ERR_NOMEM ? kv_fail(why, rc, "no memory to tokenize %zu bytes", len)
                                     : rc;
    }
    if (n_dropped != NULL)
        *n_dropped = run.n_dropped;
    return 0;
}

/* ---- Ids to text ---- */

bool tokenizer_is_control(const struct tokenizer *t, uint32_t id)
{
    return t->types[id] == TOKEN_CONTROL || t->types[id] == TOKEN_UNKNOWN;
}

bool tokenizer_is_end(const struct tokenizer *t, uint32_t id)
{
    uint32_t i;

    for (i = 0; i < t->n_ends; i++)
        if (t->ends[i] == id)
            return true;
    return false;
}

struct gguf_string tokenizer_piece(const struct tokenizer *t, uint32_t id, bool special)
{
    struct gguf_string piece = token_bytes(t, id);

    if (!special && tokenizer_is_control(t, id))
        piece.len = 0;
    return piece;
}

struct gguf_string tokenizer_piece_after(const struct tokenizer *t, uint32_t id, bool special,
                                         bool *first)
{
    struct gguf_string piece = tokenizer_piece(t, id, special);

    /* The prefix is added where tok_spm_encode() begins: at the start and behind special tokens. */
    if (*first && t->space_prefix && !is_special(t, id) && piece.len > 0 && piece.data[0] == ' ') {
        piece.data++;
        piece.len--;
    }
    *first = is_special(t, id);
    return piece;
}

int tokenizer_decode(const struct tokenizer *t, const uint32_t *ids, size_t n, bool special,
                     char **out, size_t *len)
{
    struct gguf_string piece;
    size_t at = 0, i;
    bool first = true;
    char *text;

    for (i = 0; i < n; i++) {
        if (ids[i] >= t->n_vocab)
            return MODEL_ERR_INVALID;
        at += tokenizer_piece(t, ids[i], special).len;
    }
    text = malloc(at + 1);
    if (text == NULL)
        return MODEL_ERR_NOMEM;
    for (i = 0, at = 0; i < n; i++) {
        piece = tokenizer_piece_after(t, ids[i], special, &first);
        memcpy(text + at, piece.data, piece.len);
        at += piece.len;
    }
    text[at] = '\0';
    *out = text;
    *len = at;
    return 0;
}

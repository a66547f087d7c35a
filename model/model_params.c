/* Hyper-parameters: from metadata to struct model_params, each checked by itself and with the
 * others.  Every key of the architecture has to be known here: one that is not, or says something
 * that the forward pass does not do, is refused by name instead of being passed over. */
#include "model/gguf_internal.h"
#include "model/model_internal.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Longest architecture name plus longest suffix. */
enum { KEY_BYTES = 128 };

struct reader {
    const struct gguf *g;
    const char *arch;
    struct kv_why *why;
};

/* "llama" + "rope.freq_base" */
static const char *arch_key(const struct reader *r, const char *suffix, char key[KEY_BYTES])
{
    snprintf(key, KEY_BYTES, "%s.%s", r->arch, suffix);
    return key;
}

/* ---- What an architecture may say ---- */

/* Keys read below. */
static const char *const read_keys[] = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "vocab_size",
    /* Notes on how the file was made; they change nothing. */
    "tensor_data_layout",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
};

/* Keys that may be there with the value that changes nothing. */
static const struct {
    const char *suffix;
    double value;
} neutral_keys[] = {
    {"expert_count", 0},     {"expert_used_count", 0}, {"pooling_type", 0},
    {"attention.causal", 1}, {"attention.scale", 0},   {"rope.scaling.attn_factor", 1},
    {"logit_scale", 1},      {"residual_scale", 1},    {"embedding_scale", 1},
};

static bool is_neutral(const struct gguf_kv *kv, double neutral)
{
    char text[32], want[32];

    gguf_value_text(kv, text, sizeof(text));
    if (kv->type == GGUF_VALUE_BOOL)
        snprintf(want, sizeof(want), "%s", neutral != 0 ? "true" : "false");
    else
        snprintf(want, sizeof(want), "%.9g", neutral);
    return strcmp(text, want) == 0;
}

static int check_key(const struct reader *r, const struct gguf_kv *kv)
{
    size_t prefix = strlen(r->arch) + 1, i;
    const char *suffix = kv->key.data + prefix;
    size_t len = kv->key.len - prefix;
    char text[48];

    for (i = 0; i < sizeof(read_keys) / sizeof(read_keys[0]); i++) {
        if (len == strlen(read_keys[i]) && memcmp(suffix, read_keys[i], len) == 0)
            return 0;
    }
    for (i = 0; i < sizeof(neutral_keys) / sizeof(neutral_keys[0]); i++) {
        const char *s = neutral_keys[i].suffix;

        if (len == strlen(s) && memcmp(suffix, s, len) == 0 &&
            is_neutral(kv, neutral_keys[i].value))
            return 0;
    }
    gguf_value_text(kv, text, sizeof(text));
    return kv_fail(r->why, MODEL_ERR_UNSUPPORTED, "%.*s = %s is not supported", (int)kv->key.len,
                   kv->key.data, text);
}

static int check_keys(const struct reader *r)
{
    size_t prefix = strlen(r->arch);
    uint64_t i;

    for (i = 0; i < r->g->n_kv; i++) {
        const struct gguf_kv *kv = &r->g->kv[i];
        int rc;

        if (kv->key.len <= prefix || memcmp(kv->key.data, r->arch, prefix) != 0 ||
            kv->key.data[prefix] != '.')
            continue;
        rc = check_key(r, kv);
        if (rc < 0)
            return rc;
    }
    return 0;
}

/* ---- Reads ---- */

/* An integer in lo..hi; 1 where it is absent. */
static int read_u32(const struct reader *r, const char *suffix, uint32_t lo, uint32_t hi,
                    uint32_t *out)
{
    char key[KEY_BYTES];
    uint32_t v = 0;
    int rc = gguf_get_u32(r->g, arch_key(r, suffix, key), &v, r->why);

    if (rc != 0)
        return rc;
    if (v < lo || v > hi)
        return kv_fail(r->why, MODEL_ERR_FORMAT, "%s is %u, must be %u..%u", key, v, lo, hi);
    *out = v;
    return 0;
}

static int absent(const struct reader *r, const char *suffix)
{
    return kv_fail(r->why, MODEL_ERR_FORMAT, "%s.%s is missing", r->arch, suffix);
}

static int need_u32(const struct reader *r, const char *suffix, uint32_t lo, uint32_t hi,
                    uint32_t *out)
{
    int rc = read_u32(r, suffix, lo, hi, out);

    return rc == 1 ? absent(r, suffix) : rc;
}

/* An integer, or an array of one a layer that are all equal; 1 where it is absent. */
static int read_per_layer(const struct reader *r, const char *suffix, uint32_t n_layers,
                          uint32_t hi, uint32_t *out)
{
    const struct gguf_kv *kv;
    char key[KEY_BYTES];
    int32_t first;
    uint64_t i;

    kv = gguf_find(r->g, arch_key(r, suffix, key));
    if (kv == NULL || kv->type != GGUF_VALUE_ARRAY)
        return read_u32(r, suffix, 1, hi, out);
    if ((kv->item_type != GGUF_VALUE_I32 && kv->item_type != GGUF_VALUE_U32) ||
        kv->n_items != n_layers)
        return kv_fail(
            r->why, MODEL_ERR_FORMAT, "%s is an array of %llu %s, must be one integer or %u", key,
            (unsigned long long)kv->n_items, gguf_value_type_name(kv->item_type), n_layers);
    first = gguf_array_i32(kv, 0);
    if (first < 1 || (uint32_t)first > hi)
        return kv_fail(r->why, MODEL_ERR_FORMAT, "%s is %d in layer 0, must be 1..%u", key, first,
                       hi);
    for (i = 1; i < kv->n_items; i++) {
        if (gguf_array_i32(kv, i) != first)
            return kv_fail(r->why, MODEL_ERR_UNSUPPORTED,
                           "%s is %d in layer 0 but %d in layer %llu: layers that differ are not "
                           "supported",
                           key, first, gguf_array_i32(kv, i), (unsigned long long)i);
    }
    *out = (uint32_t)first;
    return 0;
}

/* A finite number in (lo, hi]; 1 where it is absent. */
static int read_f32(const struct reader *r, const char *suffix, float lo, float hi, float *out)
{
    char key[KEY_BYTES];
    float v = 0;
    int rc = gguf_get_f32(r->g, arch_key(r, suffix, key), &v, r->why);

    if (rc != 0)
        return rc;
    if (!(v > lo && v <= hi)) /* also where v is NaN */
        return kv_fail(r->why, MODEL_ERR_FORMAT, "%s is %g, must be over %g and at most %g", key,
                       (double)v, (double)lo, (double)hi);
    *out = v;
    return 0;
}

/* ---- Groups of parameters ---- */

static int read_general(const struct gguf *g, struct model_params *p, struct kv_why *why)
{
    struct gguf_string s = {0};
    uint32_t version = 2;
    char text[64];
    int rc;

    rc = gguf_get_string(g, "general.architecture", &s, why);
    if (rc != 0)
        return rc < 0 ? rc : kv_fail(why, MODEL_ERR_FORMAT, "general.architecture is missing");
    if (s.len != strlen("llama") || memcmp(s.data, "llama", s.len) != 0)
        return kv_fail(why, MODEL_ERR_UNSUPPORTED,
                       "general.architecture is \"%s\", only \"llama\" is supported",
                       gguf_escape(s.data, s.len, text, sizeof(text)));
    snprintf(p->arch, sizeof(p->arch), "%.*s", (int)s.len, s.data);
    rc = gguf_get_string(g, "general.type", &s, why);
    if (rc < 0)
        return rc;
    if (rc == 0 && (s.len != strlen("model") || memcmp(s.data, "model", s.len) != 0))
        return kv_fail(why, MODEL_ERR_UNSUPPORTED, "general.type is \"%s\", must be \"model\"",
                       gguf_escape(s.data, s.len, text, sizeof(text)));
    rc = gguf_get_u32(g, "general.quantization_version", &version, why);
    if (rc < 0)
        return rc;
    if (version != 2)
        return kv_fail(why, MODEL_ERR_UNSUPPORTED,
                       "general.quantization_version is %u, only 2 is supported", version);
    s = (struct gguf_string){.data = "", .len = 0};
    rc = gguf_get_string(g, "general.name", &s, why);
    if (rc < 0)
        return rc;
    gguf_escape(s.data, s.len, p->name, sizeof(p->name));
    return 0;
}

static int read_sizes(const struct reader *r, struct model_params *p)
{
    int rc;

    rc = need_u32(r, "block_count", 1, MODEL_MAX_LAYERS, &p->n_layers);
    if (rc < 0)
        return rc;
    rc = need_u32(r, "context_length", 1, KV_MAX_POSITIONS, &p->n_ctx);
    if (rc < 0)
        return rc;
    rc = need_u32(r, "embedding_length", 1, MODEL_MAX_EMBD, &p->n_embd);
    if (rc < 0)
        return rc;
    rc = read_per_layer(r, "feed_forward_length", p->n_layers, MODEL_MAX_FF, &p->n_ff);
    if (rc != 0)
        return rc < 0 ? rc : absent(r, "feed_forward_length");
    rc = read_f32(r, "attention.layer_norm_rms_epsilon", 0.0f, 1.0f, &p->norm_eps);
    return rc == 1 ? absent(r, "attention.layer_norm_rms_epsilon") : rc;
}

static int read_heads(const struct reader *r, struct model_params *p)
{
    uint32_t value_dim;
    int rc;

    rc = read_per_layer(r, "attention.head_count", p->n_layers, MODEL_MAX_HEADS, &p->n_heads);
    if (rc != 0)
        return rc < 0 ? rc : absent(r, "attention.head_count");
    p->n_kv_heads = p->n_heads;
    rc = read_per_layer(r, "attention.head_count_kv", p->n_layers, MODEL_MAX_HEADS, &p->n_kv_heads);
    if (rc < 0)
        return rc;
    if (p->n_heads % p->n_kv_heads != 0)
        return kv_fail(r->why, MODEL_ERR_FORMAT,
                       "%s.attention.head_count is %u, not a multiple of head_count_kv %u", r->arch,
                       p->n_heads, p->n_kv_heads);
    rc = read_u32(r, "attention.key_length", 1, MODEL_MAX_HEAD_DIM, &p->head_dim);
    if (rc < 0)
        return rc;
    if (rc == 1) {
        if (p->n_embd % p->n_heads != 0)
            return kv_fail(r->why, MODEL_ERR_FORMAT,
                           "%s.embedding_length is %u, not a multiple of attention.head_count %u",
                           r->arch, p->n_embd, p->n_heads);
        p->head_dim = p->n_embd / p->n_heads;
    }
    if (p->head_dim % 2 != 0 || p->head_dim > MODEL_MAX_HEAD_DIM)
        return kv_fail(r->why, MODEL_ERR_FORMAT, "head size is %u, must be even and at most %d",
                       p->head_dim, MODEL_MAX_HEAD_DIM);
    value_dim = p->head_dim;
    rc = read_u32(r, "attention.value_length", 1, UINT32_MAX, &value_dim);
    if (rc < 0)
        return rc;
    if (value_dim != p->head_dim)
        return kv_fail(r->why, MODEL_ERR_UNSUPPORTED,
                       "%s.attention.value_length is %u but keys have %u: not supported", r->arch,
                       value_dim, p->head_dim);
    return 0;
}

/* "none", "linear" or absent; *scaled: a factor counts. */
static int read_rope_type(const struct reader *r, bool *scaled)
{
    struct gguf_string s = {0};
    char key[KEY_BYTES], text[48];
    int rc = gguf_get_string(r->g, arch_key(r, "rope.scaling.type", key), &s, r->why);

    *scaled = true;
    if (rc != 0)
        return rc < 0 ? rc : 0;
    if (s.len == strlen("none") && memcmp(s.data, "none", s.len) == 0)
        *scaled = false;
    else if (s.len != strlen("linear") || memcmp(s.data, "linear", s.len) != 0)
        return kv_fail(r->why, MODEL_ERR_UNSUPPORTED,
                       "%s is \"%s\", only \"none\" and \"linear\" are supported", key,
                       gguf_escape(s.data, s.len, text, sizeof(text)));
    return 0;
}

static int read_rope(const struct reader *r, struct model_params *p)
{
    float factor = 1.0f;
    bool scaled;
    int rc;

    p->rope = MODEL_ROPE_NORM;
    p->rope_dims = p->head_dim;
    rc = read_u32(r, "rope.dimension_count", 2, p->head_dim, &p->rope_dims);
    if (rc < 0)
        return rc;
    if (p->rope_dims % 2 != 0)
        return kv_fail(r->why, MODEL_ERR_FORMAT, "%s.rope.dimension_count is %u, must be even",
                       r->arch, p->rope_dims);
    p->rope_base = 10000.0f;
    rc = read_f32(r, "rope.freq_base", 0.0f, 1e12f, &p->rope_base);
    if (rc < 0)
        return rc;
    rc = read_rope_type(r, &scaled);
    if (rc < 0)
        return rc;
    rc = read_f32(r, "rope.scaling.factor", 0.0f, 1e6f, &factor);
    if (rc == 1) /* the same by its older name */
        rc = read_f32(r, "rope.scale_linear", 0.0f, 1e6f, &factor);
    if (rc < 0)
        return rc;
    p->rope_scale = scaled ? 1.0f / factor : 1.0f;
    return 0;
}

/* The embedding's rows, llama.vocab_size and the tokenizer's list have to agree. */
static int read_vocab(const struct reader *r, struct model_params *p)
{
    const struct gguf_tensor *embd = gguf_find_tensor(r->g, "token_embd.weight");
    const struct gguf_kv *tokens = NULL;
    uint64_t n = 0;
    uint32_t said = 0;
    int rc;

    rc = gguf_get_array(r->g, "tokenizer.ggml.tokens", GGUF_VALUE_STRING, &tokens, r->why);
    if (rc < 0)
        return rc;
    rc = read_u32(r, "vocab_size", 1, MODEL_MAX_VOCAB, &said);
    if (rc < 0)
        return rc;
    n = embd != NULL ? embd->dims[1] : rc == 0 ? said : tokens != NULL ? tokens->n_items : 0;
    if (n < 1 || n > MODEL_MAX_VOCAB)
        return kv_fail(r->why, MODEL_ERR_FORMAT, "vocabulary has %llu tokens, must be 1..%d",
                       (unsigned long long)n, MODEL_MAX_VOCAB);
    if (rc == 0 && said != n)
        return kv_fail(r->why, MODEL_ERR_FORMAT,
                       "%s.vocab_size is %u, but token_embd.weight has %llu rows", r->arch, said,
                       (unsigned long long)n);
    if (tokens != NULL && tokens->n_items != n)
        return kv_fail(r->why, MODEL_ERR_FORMAT,
                       "tokenizer.ggml.tokens has %llu tokens, but the vocabulary %llu",
                       (unsigned long long)tokens->n_items, (unsigned long long)n);
    p->n_vocab = (uint32_t)n;
    return 0;
}

static uint64_t count_params(const struct gguf *g)
{
    uint64_t i, n = 0;

    for (i = 0; i < g->n_tensors; i++) {
        const uint64_t *d = g->tensors[i].dims;

        n += d[0] * d[1] * d[2] * d[3]; /* the file holds as many, so nothing wraps */
    }
    return n;
}

int model_read_params(const struct gguf *g, struct model_params *out, struct kv_why *why)
{
    struct model_params p = {0};
    struct reader r = {.g = g, .arch = p.arch, .why = why};
    struct kv_geometry geometry;
    int rc;

    rc = read_general(g, &p, why);
    if (rc < 0)
        return rc;
    rc = check_keys(&r);
    if (rc < 0)
        return rc;
    rc = read_sizes(&r, &p);
    if (rc < 0)
        return rc;
    rc = read_heads(&r, &p);
    if (rc < 0)
        return rc;
    rc = read_rope(&r, &p);
    if (rc < 0)
        return rc;
    rc = read_vocab(&r, &p);
    if (rc < 0)
        return rc;
    /* In the widest precision, so that every other fits too. */
    geometry = (struct kv_geometry){p.n_layers, p.n_kv_heads, p.head_dim, KV_F32};
    rc = kv_geometry_check(&geometry, why);
    if (rc < 0)
        return MODEL_ERR_UNSUPPORTED;
    p.tied = gguf_find_tensor(g, "output.weight") == NULL;
    p.n_params = count_params(g);
    *out = p;
    return 0;
}

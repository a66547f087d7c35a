/* Goal: a model is opened with every tensor in its place, or refused by a message that names the
 * hyper-parameter or tensor that this build does not do; nothing is passed over in silence.
 *
 * Method: the tiny models are opened with every kernel set that this machine runs, then bent, key
 * by key and tensor by tensor, and damaged at random.  What the forward pass makes of the bound
 * weights is tested with the engine. */
#include "fail_alloc.h"
#include "gguf_image.h"
#include "model/gguf_internal.h"
#include "model/model_internal.h"
#include "vocab_file.h"

#include <check.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- Good models ---- */

static const char *const tiny_names[] = {"tiny-f32",  "tiny-f16",  "tiny-bf16",   "tiny-q8_0",
                                         "tiny-q4_0", "tiny-q4_1", "tiny-spm-f32"};
enum { N_TINY = sizeof(tiny_names) / sizeof(tiny_names[0]) };

/* An open model and the file that it stands on. */
struct opened {
    struct gguf *g;
    struct model *m;
};

static struct opened open_image(const struct image *im, const char *kernels)
{
    struct opened o = {0};
    struct kv_why why = {""};

    ck_assert_msg(image_open(im, &o.g, &why) == 0, "%s", why.text);
    ck_assert_msg(model_open(o.g, kernels, &o.m, &why) == 0, "%s", why.text);
    return o;
}

static struct opened open_tiny(const char *name, const char *kernels)
{
    struct image im = image_tiny(name);
    struct opened o = open_image(&im, kernels);

    image_release(&im);
    return o;
}

static void close_model(struct opened *o)
{
    model_close(o->m);
    gguf_close(o->g);
}

static void check_matrix(const struct kern_matrix *w, uint32_t rows, uint32_t cols,
                         enum gguf_type type)
{
    ck_assert_uint_eq(w->n_rows, rows);
    ck_assert_uint_eq(w->n_cols, cols);
    ck_assert_int_eq(w->type, type);
    ck_assert_ptr_nonnull(w->data);
    ck_assert_uint_eq((uintptr_t)w->data % MODEL_ALIGN, 0);
}

/* Of the gpt2 models: 3 layers, C 96, H 6, G 2, D 16, F 160, V 309. */
static void check_layers(const struct model *m, enum gguf_type type)
{
    uint32_t i;

    for (i = 0; i < 3; i++) {
        const struct model_layer *l = &m->layers[i];

        check_matrix(&l->wq, 96, 96, type);
        check_matrix(&l->wk, 32, 96, type);
        check_matrix(&l->wv, 32, 96, type);
        check_matrix(&l->wo, 96, 96, type);
        check_matrix(&l->w_gate, 160, 96, type);
        check_matrix(&l->w_up, 160, 96, type);
        check_matrix(&l->w_down, 96, 160, type);
    }
}

START_TEST(a_model_has_every_tensor_in_its_place)
{
    struct opened o = open_tiny("tiny-q4_1", "plain");
    const struct model *m = o.m;
    size_t bytes = 0;
    uint32_t i;

    check_layers(m, GGUF_Q4_1);
    check_matrix(&m->output, 309, 96, GGUF_Q8_0);
    ck_assert_uint_eq(m->token_embd.n_rows, 309);
    ck_assert_uint_eq(m->token_embd.row_bytes, 96 / 32 * 34);
    ck_assert_ptr_eq(m->token_embd.data, gguf_find_tensor(o.g, "token_embd.weight")->data);
    ck_assert_ptr_eq(m->output.data, m->token_embd.data);
    for (i = 0; i < gguf_n_tensors(o.g); i++)
        bytes += gguf_tensor_at(o.g, i)->n_bytes;
    ck_assert_uint_eq(model_weight_bytes(m), bytes);
    ck_assert_ptr_null(m->rope_factors);
    /* The plain set reads the file's bytes, so that each matrix shows which tensor it is. */
    for (i = 0; i < 3; i++) {
        const struct model_layer *l = &m->layers[i];
        static const char *const names[] = {"attn_q",   "attn_k", "attn_v",  "attn_output",
                                            "ffn_gate", "ffn_up", "ffn_down"};
        const void *data[] = {l->wq.data,     l->wk.data,   l->wv.data,    l->wo.data,
                              l->w_gate.data, l->w_up.data, l->w_down.data};
        char name[64];
        size_t k;

        for (k = 0; k < 7; k++) {
            snprintf(name, sizeof(name), "blk.%u.%s.weight", i, names[k]);
            ck_assert_ptr_eq(data[k], gguf_find_tensor(o.g, name)->data);
        }
        snprintf(name, sizeof(name), "blk.%u.attn_norm.weight", i);
        ck_assert_mem_eq(l->attn_norm, gguf_find_tensor(o.g, name)->data, 96 * sizeof(float));
        snprintf(name, sizeof(name), "blk.%u.ffn_norm.weight", i);
        ck_assert_mem_eq(l->ffn_norm, gguf_find_tensor(o.g, name)->data, 96 * sizeof(float));
    }
    ck_assert_mem_eq(m->output_norm, gguf_find_tensor(o.g, "output_norm.weight")->data,
                     96 * sizeof(float));
    close_model(&o);
}
END_TEST

START_TEST(hyper_parameters_are_those_of_the_file)
{
    struct opened o = open_tiny("tiny-q4_1", NULL);
    const struct model_params *p = model_params(o.m);
    struct kv_geometry g;

    ck_assert_str_eq(p->arch, "llama");
    ck_assert_str_eq(p->name, "tiny q4_1");
    ck_assert_uint_eq(p->n_layers, 3);
    ck_assert_uint_eq(p->n_embd, 96);
    ck_assert_uint_eq(p->n_heads, 6);
    ck_assert_uint_eq(p->n_kv_heads, 2);
    ck_assert_uint_eq(p->head_dim, 16);
    ck_assert_uint_eq(p->n_ff, 160);
    ck_assert_uint_eq(p->n_vocab, 309);
    ck_assert_uint_eq(p->n_ctx, 1024);
    ck_assert_uint_eq(p->rope_dims, 16);
    ck_assert_int_eq(p->rope, MODEL_ROPE_NORM);
    ck_assert_float_eq(p->rope_base, 10000.0f);
    ck_assert_float_eq(p->rope_scale, 1.0f);
    ck_assert_float_eq(p->norm_eps, 1e-5f);
    ck_assert(p->tied);
    ck_assert_uint_eq(p->n_params,
                      309 * 96 + 96 + 3 * (2 * 96 + 2 * 96 * 96 + 2 * 32 * 96 + 3 * 160 * 96));
    model_geometry(o.m, KV_F16, &g);
    ck_assert(g.n_layers == 3 && g.n_kv_heads == 2 && g.head_dim == 16 && g.precision == KV_F16);
    close_model(&o);
}
END_TEST

START_TEST(a_model_that_differs_in_all_it_can_is_read_as_it_says)
{
    struct opened o = open_tiny("tiny-spm-f32", NULL);
    const struct model_params *p = model_params(o.m);
    uint32_t i;

    ck_assert_uint_eq(p->head_dim, 24);
    ck_assert_uint_eq(p->rope_dims, 24);
    ck_assert_float_eq(p->rope_scale, 0.5f);
    ck_assert(!p->tied);
    check_matrix(&o.m->layers[2].wq, 144, 96, GGUF_F32);
    check_matrix(&o.m->layers[2].wo, 96, 144, GGUF_F32);
    check_matrix(&o.m->output, 336, 96, GGUF_F32);
    ck_assert_ptr_nonnull(o.m->rope_factors);
    for (i = 0; i < 12; i++)
        ck_assert_float_eq(o.m->rope_factors[i], (float)(1.0 + i / 12.0));
    close_model(&o);
}
END_TEST

START_TEST(every_kernel_set_opens_every_type_with_one_numerics_id)
{
    const char *const *sets = model_kernel_sets();
    struct opened plain = open_tiny(tiny_names[_i], "plain");
    size_t i;

    for (i = 0; sets[i] != NULL; i++) {
        struct opened o = open_tiny(tiny_names[_i], sets[i]);

        ck_assert_str_eq(model_kernels(o.m), sets[i]);
        ck_assert_mem_eq(model_numerics_id(o.m), model_numerics_id(plain.m), KV_DIGEST_BYTES);
        ck_assert_mem_eq(model_fingerprint(o.m), model_fingerprint(plain.m), KV_DIGEST_BYTES);
        ck_assert_uint_ge(model_weight_bytes(o.m), gguf_file_bytes(o.g) / 2);
        ck_assert_uint_le(model_weight_bytes(o.m), gguf_file_bytes(o.g) * 2);
        close_model(&o);
    }
    ck_assert_uint_gt(i, 0);
    close_model(&plain);
}
END_TEST

START_TEST(weights_are_aligned_whatever_the_file_says)
{
    /* With an alignment of 8, some tensors of this file stand between two multiples of 32. */
    struct opened o = open_tiny("tiny-spm-f32", "plain");
    const struct gguf_tensor *t = gguf_find_tensor(o.g, "token_embd.weight");
    unsigned moved = 0;
    uint32_t i;

    ck_assert_uint_ne((uintptr_t)t->data % MODEL_ALIGN, 0);
    ck_assert_uint_eq((uintptr_t)o.m->token_embd.data % MODEL_ALIGN, 0);
    ck_assert_mem_eq(o.m->token_embd.data, t->data, t->n_bytes);
    for (i = 0; i < 3; i++) {
        char name[64];

        snprintf(name, sizeof(name), "blk.%u.ffn_down.weight", i);
        t = gguf_find_tensor(o.g, name);
        ck_assert_uint_eq((uintptr_t)o.m->layers[i].w_down.data % MODEL_ALIGN, 0);
        ck_assert_mem_eq(o.m->layers[i].w_down.data, t->data, t->n_bytes);
        moved += o.m->layers[i].w_down.data != t->data;
    }
    ck_assert_uint_gt(moved, 0);
    close_model(&o);
}
END_TEST

START_TEST(an_unknown_kernel_set_is_refused_by_name)
{
    struct image im = image_tiny("tiny-q4_1");
    struct gguf *g = NULL;
    struct model *m = NULL;
    struct kv_why why = {""};

    ck_assert_int_eq(image_open(&im, &g, NULL), 0);
    ck_assert_int_eq(model_open(g, "abacus", &m, &why), MODEL_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(why.text, "\"abacus\""));
    ck_assert_ptr_null(m);
    ck_assert_int_eq(model_open(g, "abacus", &m, NULL), MODEL_ERR_INVALID);
    gguf_close(g);
    image_release(&im);
}
END_TEST

START_TEST(the_default_model_is_what_its_card_says)
{
    struct gguf *g = NULL;
    struct model *m = NULL;
    const struct model_params *p;
    struct kv_why why = {""};

    if (skip_without("the_default_model_is_what_its_card_says", default_model()))
        return;
    ck_assert_msg(gguf_open(default_model(), &g, &why) == 0, "%s", why.text);
    ck_assert_msg(model_open(g, NULL, &m, &why) == 0, "%s", why.text);
    p = model_params(m);
    ck_assert(p->n_layers == 30 && p->n_embd == 576 && p->n_heads == 9 && p->n_kv_heads == 3);
    ck_assert(p->head_dim == 64 && p->n_ff == 1536 && p->n_vocab == 49152 && p->n_ctx == 8192);
    ck_assert(p->rope_dims == 64 && p->rope == MODEL_ROPE_NORM && p->tied);
    ck_assert_float_eq(p->rope_base, 100000.0f);
    ck_assert_float_eq(p->norm_eps, 1e-5f);
    ck_assert_uint_eq(p->n_params, 134515008);
    check_matrix(&m->layers[29].w_down, 576, 1536, GGUF_Q4_1);
    check_matrix(&m->output, 49152, 576, GGUF_Q8_0);
    model_close(m);
    gguf_close(g);
}
END_TEST

/* Greedy tokens behind 5 70 100 200 300, by an independent forward pass in float64 (numpy, weights
 * read by the gguf package), and the first token's logit.  The second model has linear rope
 * scaling, rope factors, heads wider than n_embd / n_heads and a head of its own: a matrix, a
 * factor or a scale in the wrong place gives other tokens. */
static const struct {
    const char *model;
    float logit;
    uint32_t ids[12];
} golden[] = {
    {"tiny-f32", 14.9373f, {147, 107, 160, 183, 4, 293, 61, 37, 173, 192, 99, 245}},
    {"tiny-spm-f32", 10.88524f, {271, 130, 88, 207, 271, 134, 255, 294, 252, 239, 195, 43}},
};

static uint32_t greatest(const float *x, uint32_t n)
{
    uint32_t best = 0, i;

    for (i = 1; i < n; i++) {
        if (x[i] > x[best])
            best = i;
    }
    return best;
}

START_TEST(bound_weights_draw_the_tokens_of_an_independent_forward_pass)
{
    struct opened o = open_tiny(golden[_i].model, NULL);
    struct kv_cache_config cache = {.n_pages = 4};
    struct engine_config config = {.model = o.m, .n_threads = 1, .max_rows = 8, .max_items = 1};
    struct kv_namespace ns = {0};
    struct engine *e = NULL;
    uint32_t n_vocab = model_params(o.m)->n_vocab, ids[5] = {5, 70, 100, 200, 300};
    float *logits = malloc(n_vocab * sizeof(*logits));
    struct engine_item item = {.ids = ids, .n_ids = 5, .logits = logits};
    size_t i;

    ck_assert_ptr_nonnull(logits);
    model_geometry(o.m, KV_F32, &cache.geometry);
    ck_assert_int_eq(kv_cache_open(&cache, &config.cache, NULL), 0);
    ck_assert_int_eq(engine_open(&config, &e, NULL), 0);
    ck_assert_int_eq(kv_context_open(config.cache, &ns, &item.ctx), 0);
    ck_assert_int_eq(kv_context_reserve(item.ctx, 17), 0);
    for (i = 0; i < 12; i++) {
        ck_assert_int_eq(engine_step(e, &item, 1), 0);
        ck_assert_msg(item.rc == 0, "%s", item.why.text);
        ids[0] = greatest(logits, n_vocab);
        item.n_ids = 1;
        ck_assert_uint_eq(ids[0], golden[_i].ids[i]);
        if (i == 0)
            ck_assert_float_eq_tol(logits[ids[0]], golden[_i].logit, 1e-3f);
    }
    kv_context_close(item.ctx);
    engine_close(e);
    kv_cache_close(config.cache);
    free(logits);
    close_model(&o);
}
END_TEST

/* ---- Refusals ---- */

/* The file opens, the model does not. */
static void refused(struct image *im, int rc, const char *text)
{
    struct gguf *g = NULL;
    struct model *m = NULL;
    struct kv_why why = {""};
    int got;

    ck_assert_msg(image_open(im, &g, &why) == 0, "%s", why.text);
    got = model_open(g, "plain", &m, &why);
    ck_assert_msg(got < 0, "a model is accepted that must be refused with \"%s\"", text);
    ck_assert_msg(got == rc && strstr(why.text, text) != NULL,
                  "refused with %d \"%s\", must be %d \"%s\"", got, why.text, rc, text);
    ck_assert_ptr_null(m);
    gguf_close(g);
    image_release(im);
}

/* Floats by their bits. */
enum { F_MINUS_ONE = (int)0xbf800000, F_INF = 0x7f800000, F_NAN = 0x7fc00000 };

static const struct {
    const char *key;
    uint32_t value;
    int rc;
    const char *text;
} wrong_values[] = {
    {"general.quantization_version", 1, MODEL_ERR_UNSUPPORTED, "general.quantization_version is 1"},
    {"llama.block_count", 0, MODEL_ERR_FORMAT, "llama.block_count is 0, must be 1..1024"},
    {"llama.block_count", 1025, MODEL_ERR_FORMAT, "llama.block_count is 1025"},
    {"llama.block_count", 1u << 31, MODEL_ERR_FORMAT, "llama.block_count is 2147483648"},
    {"llama.block_count", 4, MODEL_ERR_FORMAT, "tensor blk.3.attn_q.weight is missing"},
    {"llama.block_count", 2, MODEL_ERR_UNSUPPORTED, "tensor blk.2.attn_norm.weight is not"},
    {"llama.context_length", 0, MODEL_ERR_FORMAT, "llama.context_length is 0"},
    {"llama.context_length", UINT32_MAX, MODEL_ERR_FORMAT, "llama.context_length is 4294967295"},
    {"llama.embedding_length", 0, MODEL_ERR_FORMAT, "llama.embedding_length is 0"},
    {"llama.embedding_length", 1u << 31, MODEL_ERR_FORMAT, "llama.embedding_length is 2147483648"},
    {"llama.embedding_length", 97, MODEL_ERR_FORMAT,
     "llama.embedding_length is 97, not a multiple"},
    {"llama.embedding_length", 192, MODEL_ERR_FORMAT,
     "tensor token_embd.weight is [96, 309, 1, 1], must be [192, 309, 1, 1]"},
    {"llama.feed_forward_length", 0, MODEL_ERR_FORMAT, "llama.feed_forward_length is 0"},
    {"llama.feed_forward_length", UINT32_MAX, MODEL_ERR_FORMAT, "llama.feed_forward_length is 42"},
    {"llama.feed_forward_length", 128, MODEL_ERR_FORMAT,
     "tensor blk.0.ffn_gate.weight is [96, 160, 1, 1], must be [96, 128, 1, 1]"},
    {"llama.attention.head_count", 0, MODEL_ERR_FORMAT, "llama.attention.head_count is 0"},
    {"llama.attention.head_count", 1u << 31, MODEL_ERR_FORMAT, "llama.attention.head_count is 21"},
    {"llama.attention.head_count", 5, MODEL_ERR_FORMAT,
     "llama.attention.head_count is 5, not a multiple of head_count_kv 2"},
    {"llama.attention.head_count", 10, MODEL_ERR_FORMAT,
     "llama.embedding_length is 96, not a multiple of attention.head_count 10"},
    {"llama.attention.head_count", 32, MODEL_ERR_FORMAT, "head size is 3, must be even"},
    {"llama.attention.head_count_kv", 0, MODEL_ERR_FORMAT, "llama.attention.head_count_kv is 0"},
    {"llama.attention.head_count_kv", 4, MODEL_ERR_FORMAT, "head_count_kv 4"},
    {"llama.attention.head_count_kv", 12, MODEL_ERR_FORMAT, "head_count_kv 12"},
    {"llama.attention.head_count_kv", 3, MODEL_ERR_FORMAT,
     "tensor blk.0.attn_k.weight is [96, 32, 1, 1], must be [96, 48, 1, 1]"},
    {"llama.attention.layer_norm_rms_epsilon", F_NAN, MODEL_ERR_FORMAT,
     "llama.attention.layer_norm_rms_epsilon is nan"},
    {"llama.attention.layer_norm_rms_epsilon", F_INF, MODEL_ERR_FORMAT,
     "llama.attention.layer_norm_rms_epsilon is inf"},
    {"llama.attention.layer_norm_rms_epsilon", 0, MODEL_ERR_FORMAT,
     "llama.attention.layer_norm_rms_epsilon is 0"},
    {"llama.attention.layer_norm_rms_epsilon", (uint32_t)F_MINUS_ONE, MODEL_ERR_FORMAT,
     "llama.attention.layer_norm_rms_epsilon is -1"},
    {"llama.rope.freq_base", 0, MODEL_ERR_FORMAT, "llama.rope.freq_base is 0"},
    {"llama.rope.freq_base", F_NAN, MODEL_ERR_FORMAT, "llama.rope.freq_base is nan"},
    {"llama.rope.freq_base", F_INF | 0x80000000, MODEL_ERR_FORMAT, "llama.rope.freq_base is -inf"},
    {"llama.rope.dimension_count", 0, MODEL_ERR_FORMAT,
     "llama.rope.dimension_count is 0, must be 2..16"},
    {"llama.rope.dimension_count", 15, MODEL_ERR_FORMAT,
     "llama.rope.dimension_count is 15, must be even"},
    {"llama.rope.dimension_count", 18, MODEL_ERR_FORMAT, "llama.rope.dimension_count is 18"},
    {"llama.vocab_size", 0, MODEL_ERR_FORMAT, "llama.vocab_size is 0"},
    {"llama.vocab_size", 310, MODEL_ERR_FORMAT,
     "llama.vocab_size is 310, but token_embd.weight has 309 rows"},
};

START_TEST(a_wrong_hyper_parameter_is_refused_by_name)
{
    struct image im = image_tiny("tiny-q4_1");

    image_set(&im, wrong_values[_i].key, 4, wrong_values[_i].value);
    refused(&im, wrong_values[_i].rc, wrong_values[_i].text);
}
END_TEST

static const char *const needed[] = {
    "general.architecture",
    "llama.block_count",
    "llama.context_length",
    "llama.embedding_length",
    "llama.feed_forward_length",
    "llama.attention.head_count",
    "llama.attention.layer_norm_rms_epsilon",
};

START_TEST(a_missing_hyper_parameter_is_named)
{
    struct image im = image_tiny("tiny-q4_1");
    char text[96];

    snprintf(text, sizeof(text), "%s is missing", needed[_i]);
    image_remove(&im, needed[_i]);
    refused(&im, MODEL_ERR_FORMAT, text);
}
END_TEST

START_TEST(what_may_be_missing_has_its_default)
{
    struct image im = image_tiny("tiny-q4_1");
    struct opened o;

    image_remove(&im, "general.name");
    image_remove(&im, "general.type");
    image_remove(&im, "general.quantization_version");
    image_remove(&im, "llama.rope.freq_base");
    image_remove(&im, "llama.rope.dimension_count");
    image_remove(&im, "llama.vocab_size");
    o = open_image(&im, NULL);
    ck_assert_str_eq(model_params(o.m)->name, "");
    ck_assert_float_eq(model_params(o.m)->rope_base, 10000.0f);
    ck_assert_uint_eq(model_params(o.m)->rope_dims, 16);
    ck_assert_uint_eq(model_params(o.m)->n_vocab, 309);
    close_model(&o);
    image_remove(&im, "llama.attention.head_count_kv"); /* then as many as heads */
    refused(&im, MODEL_ERR_FORMAT,
            "tensor blk.0.attn_k.weight is [96, 32, 1, 1], must be [96, 96, 1, 1]");
}
END_TEST

START_TEST(another_architecture_is_refused_by_name)
{
    struct image im = image_tiny("tiny-q4_1");

    image_remove(&im, "general.architecture");
    image_add_string(&im, "general.architecture", "qwen2");
    refused(&im, MODEL_ERR_UNSUPPORTED, "general.architecture is \"qwen2\", only \"llama\"");
    im = image_tiny("tiny-q4_1");
    image_remove(&im, "general.architecture");
    image_add_string(&im, "general.architecture", "\x1b[31m\"");
    refused(&im, MODEL_ERR_UNSUPPORTED, "general.architecture is \"\\x1b[31m\\\"\"");
    im = image_tiny("tiny-q4_1");
    image_remove(&im, "general.type");
    image_add_string(&im, "general.type", "adapter");
    refused(&im, MODEL_ERR_UNSUPPORTED, "general.type is \"adapter\"");
    im = image_tiny("tiny-q4_1");
    image_remove(&im, "general.name");
    image_add_u32(&im, "general.name", 7);
    refused(&im, MODEL_ERR_FORMAT, "general.name is of type u32, must be string");
}
END_TEST

START_TEST(a_key_of_the_architecture_that_is_not_done_is_refused_by_name)
{
    struct image im = image_tiny("tiny-q4_1");
    struct opened o;

    image_add_u32(&im, "llama.attention.sliding_window", 4096);
    refused(&im, MODEL_ERR_UNSUPPORTED, "llama.attention.sliding_window = 4096 is not supported");
    im = image_tiny("tiny-q4_1");
    image_add_u32(&im, "llama.expert_count", 8);
    refused(&im, MODEL_ERR_UNSUPPORTED, "llama.expert_count = 8 is not supported");
    im = image_tiny("tiny-q4_1");
    image_add_f32(&im, "llama.logit_scale", 0.5f);
    refused(&im, MODEL_ERR_UNSUPPORTED, "llama.logit_scale = 0.5 is not supported");
    im = image_tiny("tiny-q4_1");
    image_add(&im, "llama.attention.causal", GGUF_VALUE_BOOL, "", 1);
    refused(&im, MODEL_ERR_UNSUPPORTED, "llama.attention.causal = false is not supported");
    /* The same keys with the value that changes nothing, and those of others. */
    im = image_tiny("tiny-q4_1");
    image_add_u32(&im, "llama.expert_count", 0);
    image_add_f32(&im, "llama.logit_scale", 1.0f);
    image_add(&im, "llama.attention.causal", GGUF_VALUE_BOOL, "\1", 1);
    image_add_u32(&im, "general.notes", 1);
    image_add_u32(&im, "llamas.block_count", 1);
    o = open_image(&im, NULL);
    close_model(&o);
    image_release(&im);
}
END_TEST

static struct image with_scaling(const char *type, const char *key, float factor)
{
    struct image im = image_tiny("tiny-q4_1");

    if (type != NULL)
        image_add_string(&im, "llama.rope.scaling.type", type);
    if (key != NULL)
        image_add_f32(&im, key, factor);
    return im;
}

static void scaled_by(struct image im, float scale)
{
    struct opened o = open_image(&im, "plain");

    ck_assert_float_eq(model_params(o.m)->rope_scale, scale);
    close_model(&o);
    image_release(&im);
}

START_TEST(rope_scaling_is_none_or_linear_or_refused_by_name)
{
    struct image im;

    scaled_by(with_scaling("none", "llama.rope.scaling.factor", 4), 1);
    scaled_by(with_scaling("linear", "llama.rope.scaling.factor", 4), 0.25f);
    scaled_by(with_scaling(NULL, "llama.rope.scaling.factor", 4), 0.25f);
    scaled_by(with_scaling(NULL, "llama.rope.scale_linear", 8), 0.125f);
    scaled_by(with_scaling("linear", NULL, 0), 1);
    im = with_scaling("yarn", NULL, 0);
    refused(&im, MODEL_ERR_UNSUPPORTED, "llama.rope.scaling.type is \"yarn\", only");
    im = with_scaling("longrope", NULL, 0);
    refused(&im, MODEL_ERR_UNSUPPORTED, "llama.rope.scaling.type is \"longrope\", only");
    im = with_scaling("linear", "llama.rope.scaling.factor", 0);
    refused(&im, MODEL_ERR_FORMAT, "llama.rope.scaling.factor is 0");
    im = with_scaling("linear", "llama.rope.scaling.factor", NAN);
    refused(&im, MODEL_ERR_FORMAT, "llama.rope.scaling.factor is nan");
    im = with_scaling("linear", "llama.rope.scaling.attn_factor", 2);
    refused(&im, MODEL_ERR_UNSUPPORTED, "llama.rope.scaling.attn_factor = 2");
}
END_TEST

/* head_count_kv as an array of three. */
static struct image with_kv_heads(int32_t a, int32_t b, int32_t c, uint64_t n)
{
    struct image im = image_tiny("tiny-q4_1");
    unsigned char value[24] = {GGUF_VALUE_I32};
    int32_t items[] = {a, b, c};

    memcpy(value + 4, &n, sizeof(n));
    memcpy(value + 12, items, sizeof(items));
    image_remove(&im, "llama.attention.head_count_kv");
    image_add(&im, "llama.attention.head_count_kv", GGUF_VALUE_ARRAY, value, 12 + 4 * n);
    return im;
}

START_TEST(a_number_a_layer_is_read_where_all_are_equal)
{
    struct image im = with_kv_heads(2, 2, 2, 3);
    struct opened o = open_image(&im, NULL);

    ck_assert_uint_eq(model_params(o.m)->n_kv_heads, 2);
    close_model(&o);
    image_release(&im);
    im = with_kv_heads(2, 2, 1, 3);
    refused(&im, MODEL_ERR_UNSUPPORTED,
            "llama.attention.head_count_kv is 2 in layer 0 but 1 in layer 2");
    im = with_kv_heads(-2, -2, -2, 3);
    refused(&im, MODEL_ERR_FORMAT, "llama.attention.head_count_kv is -2 in layer 0");
    im = with_kv_heads(2, 2, 2, 2);
    refused(&im, MODEL_ERR_FORMAT, "llama.attention.head_count_kv is an array of 2 i32");
}
END_TEST

START_TEST(head_sizes_are_honoured_or_refused_by_name)
{
    struct image im = image_tiny("tiny-q4_1");

    image_add_u32(&im, "llama.attention.key_length", 32);
    image_add_u32(&im, "llama.attention.value_length", 32);
    refused(&im, MODEL_ERR_FORMAT,
            "tensor blk.0.attn_q.weight is [96, 96, 1, 1], must be [96, 192, 1, 1]");
    im = image_tiny("tiny-q4_1");
    image_add_u32(&im, "llama.attention.value_length", 8);
    refused(&im, MODEL_ERR_UNSUPPORTED, "llama.attention.value_length is 8 but keys have 16");
    im = image_tiny("tiny-q4_1");
    image_add_u32(&im, "llama.attention.key_length", 17);
    refused(&im, MODEL_ERR_FORMAT, "head size is 17, must be even");
    im = image_tiny("tiny-q4_1");
    image_add_u32(&im, "llama.attention.key_length", 1u << 20);
    refused(&im, MODEL_ERR_FORMAT, "llama.attention.key_length is 1048576");
    /* Each in its bounds, all together not: 64 MiB a position. */
    im = image_tiny("tiny-q4_1");
    image_add_u32(&im, "llama.attention.key_length", 512);
    image_set(&im, "llama.attention.head_count", 4, 1024);
    image_set(&im, "llama.attention.head_count_kv", 4, 1024);
    image_set(&im, "llama.block_count", 4, 1024);
    refused(&im, MODEL_ERR_UNSUPPORTED, "a position would be over 67108864 bytes");
}
END_TEST

START_TEST(the_vocabulary_has_to_be_as_long_as_the_embedding)
{
    struct image im = image_tiny("tiny-q4_1");
    unsigned char two[] = {GGUF_VALUE_STRING,
                           0,
                           0,
                           0,
                           2,
                           0,
                           0,
                           0,
                           0,
                           0,
                           0,
                           0,
                           1,
                           0,
                           0,
                           0,
                           0,
                           0,
                           0,
                           0,
                           'a',
                           1,
                           0,
                           0,
                           0,
                           0,
                           0,
                           0,
                           0,
                           'b'};

    image_remove(&im, "tokenizer.ggml.tokens");
    image_add(&im, "tokenizer.ggml.tokens", GGUF_VALUE_ARRAY, two, sizeof(two));
    refused(&im, MODEL_ERR_FORMAT, "tokenizer.ggml.tokens has 2 tokens, but the vocabulary 309");
}
END_TEST

START_TEST(a_tensor_without_a_place_is_refused_by_name)
{
    static const char *const names[] = {"blk.0.attn_q.bias", "blk.3.attn_q.weight", "output.bias",
                                        "blk.0.attn_q_norm.weight", "v.patch_embd"};
    struct image im;
    char text[96];
    size_t i;

    for (i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        im = image_tiny("tiny-q4_1");
        image_add_tensor(&im, names[i], GGUF_F32, 96, 1, 96 * 4);
        snprintf(text, sizeof(text), "tensor %s is not supported for architecture llama", names[i]);
        refused(&im, MODEL_ERR_UNSUPPORTED, text);
    }
}
END_TEST

START_TEST(a_missing_tensor_is_named)
{
    static const char *const names[][2] = {
        {"token_embd.weight", "token_embx.weight"},
        {"output_norm.weight", "output_nor_.weight"},
        {"blk.0.attn_q.weight", "blk.0.attn_x.weight"},
        {"blk.1.ffn_norm.weight", "blk.1.ffn_nor_.weight"},
        {"blk.2.ffn_down.weight", "blk.2.ffn_dow_.weight"},
    };
    char text[64];
    size_t i;

    for (i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        struct image im = image_tiny("tiny-q4_1");

        image_rename(&im, names[i][0], names[i][1]);
        snprintf(text, sizeof(text), "tensor %s is missing", names[i][0]);
        refused(&im, MODEL_ERR_FORMAT, text);
    }
}
END_TEST

/* A tensor of that type and shape in the place of another. */
static struct image with_tensor(const char *name, const char *spare, uint32_t type, uint64_t cols,
                                uint64_t rows, size_t n_bytes)
{
    struct image im = image_tiny("tiny-q4_1");

    image_rename(&im, name, spare);
    image_add_tensor(&im, name, type, cols, rows, n_bytes);
    return im;
}

START_TEST(a_tensor_of_another_type_or_shape_is_refused_by_name)
{
    struct image im;

    im = with_tensor("blk.1.attn_v.weight", "blk.1.attn_x.weight", GGUF_Q5_0, 96, 32, 96 * 22);
    refused(&im, MODEL_ERR_UNSUPPORTED, "tensor blk.1.attn_v.weight: type Q5_0 is not supported");
    im = with_tensor("blk.1.attn_v.weight", "blk.1.attn_x.weight", 28, 96, 32, 96 * 32 * 8);
    refused(&im, MODEL_ERR_UNSUPPORTED, "tensor blk.1.attn_v.weight: type F64 is not supported");
    im = with_tensor("token_embd.weight", "token_embx.weight", GGUF_IQ4_NL, 96, 309, 309 * 54);
    refused(&im, MODEL_ERR_UNSUPPORTED, "tensor token_embd.weight: type IQ4_NL is not supported");
    im = with_tensor("blk.1.attn_norm.weight", "blk.1.attn_nor_.weight", GGUF_F16, 96, 1, 192);
    refused(&im, MODEL_ERR_UNSUPPORTED, "tensor blk.1.attn_norm.weight: type F16, must be F32");
    im = with_tensor("blk.1.attn_v.weight", "blk.1.attn_x.weight", GGUF_F32, 32, 96, 96 * 32 * 4);
    refused(&im, MODEL_ERR_FORMAT,
            "tensor blk.1.attn_v.weight is [32, 96, 1, 1], must be [96, 32, 1, 1]");
    im = with_tensor("output_norm.weight", "output_nor_.weight", GGUF_F32, 96, 2, 192 * 4);
    refused(&im, MODEL_ERR_FORMAT,
            "tensor output_norm.weight is [96, 2, 1, 1], must be [96, 1, 1, 1]");
}
END_TEST

START_TEST(weights_that_are_not_finite_are_refused_by_name)
{
    static const struct {
        const char *model, *tensor;
        size_t at; /* in the tensor's data */
        unsigned width;
        uint32_t value;
        const char *text;
    } cases[] = {
        {"tiny-q4_1", "blk.0.ffn_up.weight", 0, 2, 0x7c00, "scale of block 0"},
        {"tiny-q4_1", "blk.0.ffn_up.weight", 20 * 479 + 2, 2, 0xfe00, "scale of block 479"},
        {"tiny-q4_1", "token_embd.weight", 34 * 5, 2, 0x7c01, "scale of block 5"},
        {"tiny-q4_1", "output_norm.weight", 4 * 95, 4, 0x7fc00000, "weight 95"},
        {"tiny-q4_0", "blk.2.attn_v.weight", 18 * 7, 2, 0xfc00, "scale of block 7"},
        {"tiny-q8_0", "blk.2.attn_v.weight", 34 * 7, 2, 0xfc00, "scale of block 7"},
        {"tiny-f32", "blk.1.attn_k.weight", 4 * 3071, 4, 0xff800000, "weight 3071"},
        {"tiny-f16", "blk.1.attn_k.weight", 2 * 2048, 2, 0x7e00, "weight 2048"},
        {"tiny-bf16", "blk.1.attn_k.weight", 2 * 1, 2, 0x7f80, "weight 1 "},
    };
    size_t i;

    for (i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct image im = image_tiny(cases[i].model);
        char text[96];

        snprintf(text, sizeof(text), "tensor %s: %s", cases[i].tensor, cases[i].text);
        image_put(&im, image_tensor(&im, cases[i].tensor) + cases[i].at, cases[i].width,
                  cases[i].value);
        refused(&im, MODEL_ERR_FORMAT, text);
    }
}
END_TEST

START_TEST(a_rope_factor_of_zero_is_refused)
{
    struct image im = image_tiny("tiny-q4_1");

    image_add_tensor(&im, "rope_freqs.weight", GGUF_F32, 8, 1, 32);
    refused(&im, MODEL_ERR_FORMAT, "tensor rope_freqs.weight: factor 0 is 0");
}
END_TEST

START_TEST(a_file_with_a_vocabulary_only_is_refused_by_name)
{
    struct gguf *g = NULL;
    struct model *m = NULL;
    struct kv_why why = {""};
    const char *path = REFERENCE "tokenizer/ggml-vocab-llama-spm.gguf";

    if (skip_without("a_file_with_a_vocabulary_only_is_refused_by_name", path))
        return;
    ck_assert_int_eq(gguf_open(path, &g, NULL), 0);
    ck_assert_int_eq(model_open(g, NULL, &m, &why), MODEL_ERR_FORMAT);
    ck_assert_msg(strstr(why.text, "tensor token_embd.weight is missing") != NULL, "%s", why.text);
    gguf_close(g);
}
END_TEST

/* xorshift64* */
static uint64_t next_random(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * UINT64_C(0x2545f4914f6cdd1d);
}

START_TEST(a_damaged_model_is_refused_or_opened)
{
    enum { ROUNDS = 2000 };
    struct image im = image_tiny("tiny-q4_1");
    size_t first = image_find(&im, "llama.block_count"),
           last = image_find(&im, "tokenizer.ggml.pre");
    size_t tensors = image_find(&im, "token_embd.weight") - 8;
    unsigned char *bad = malloc(im.data);
    uint64_t state = 20240608;
    unsigned opened = 0, i;
    char path[64];
    int fd = image_file(&im, path);

    ck_assert_ptr_nonnull(bad);
    for (i = 0; i < ROUNDS; i++) {
        struct gguf *g = NULL;
        struct model_params p;
        struct kv_why why = {""};
        /* Half of them in the hyper-parameters, half in the tensors' infos. */
        size_t from = i % 2 ? first : tensors, to = i % 2 ? last : im.meta;

        memcpy(bad, im.bytes, im.data);
        bad[from + next_random(&state) % (to - from)] ^=
            (unsigned char)(1u << next_random(&state) % 8);
        ck_assert_int_eq(pwrite(fd, bad, im.data, 0), (ssize_t)im.data);
        if (gguf_open(path, &g, &why) != 0)
            continue;
        if (model_read_params(g, &p, &why) == 0) {
            struct model *m = NULL;

            /* Opening ends in a self-test, which is too slow for every round. */
            if (i % 16 != 0 || model_open(g, NULL, &m, &why) == 0)
                opened++;
            model_close(m);
        } else {
            ck_assert_int_ne(why.text[0], '\0');
        }
        gguf_close(g);
    }
    ck_assert_uint_gt(opened, 0);
    close(fd);
    free(bad);
    image_release(&im);
}
END_TEST

START_TEST(every_allocation_that_fails_is_an_error)
{
    struct image im = image_tiny("tiny-q4_1");
    struct gguf *g = NULL;
    struct model *m = NULL;
    struct kv_why why = {""};
    int rc = MODEL_ERR_NOMEM;
    uint64_t n;

    ck_assert_int_eq(image_open(&im, &g, NULL), 0);
    alloc_fails_once = true;
    for (n = 0; rc != 0; n++) {
        ck_assert_uint_lt(n, 200);
        allocs_left = n;
        rc = model_open(g, NULL, &m, &why);
        if (rc != 0) {
            ck_assert_msg(rc == MODEL_ERR_NOMEM, "%" PRIu64 ": %d %s", n, rc, why.text);
            ck_assert_ptr_null(m);
        }
    }
    allocs_left = UINT64_MAX;
    ck_assert_uint_gt(n, 4);
    model_close(m);
    gguf_close(g);
    image_release(&im);
}
END_TEST

static Suite *model_suite(void)
{
    Suite *s = suite_create("model");
    TCase *good = tcase_create("good models"), *bad = tcase_create("refusals");

    tcase_set_timeout(good, 60);
    tcase_add_test(good, a_model_has_every_tensor_in_its_place);
    tcase_add_test(good, hyper_parameters_are_those_of_the_file);
    tcase_add_test(good, a_model_that_differs_in_all_it_can_is_read_as_it_says);
    tcase_add_loop_test(good, every_kernel_set_opens_every_type_with_one_numerics_id, 0, N_TINY);
    tcase_add_test(good, weights_are_aligned_whatever_the_file_says);
    tcase_add_test(good, an_unknown_kernel_set_is_refused_by_name);
    tcase_add_test(good, what_may_be_missing_has_its_default);
    tcase_add_loop_test(good, bound_weights_draw_the_tokens_of_an_independent_forward_pass, 0,
                        (int)(sizeof(golden) / sizeof(golden[0])));
    tcase_add_test(good, the_default_model_is_what_its_card_says);
    suite_add_tcase(s, good);

    tcase_set_timeout(bad, 120);
    tcase_add_loop_test(bad, a_wrong_hyper_parameter_is_refused_by_name, 0,
                        (int)(sizeof(wrong_values) / sizeof(wrong_values[0])));
    tcase_add_loop_test(bad, a_missing_hyper_parameter_is_named, 0,
                        (int)(sizeof(needed) / sizeof(needed[0])));
    tcase_add_test(bad, another_architecture_is_refused_by_name);
    tcase_add_test(bad, a_key_of_the_architecture_that_is_not_done_is_refused_by_name);
    tcase_add_test(bad, rope_scaling_is_none_or_linear_or_refused_by_name);
    tcase_add_test(bad, a_number_a_layer_is_read_where_all_are_equal);
    tcase_add_test(bad, head_sizes_are_honoured_or_refused_by_name);
    tcase_add_test(bad, the_vocabulary_has_to_be_as_long_as_the_embedding);
    tcase_add_test(bad, a_tensor_without_a_place_is_refused_by_name);
    tcase_add_test(bad, a_missing_tensor_is_named);
    tcase_add_test(bad, a_tensor_of_another_type_or_shape_is_refused_by_name);
    tcase_add_test(bad, weights_that_are_not_finite_are_refused_by_name);
    tcase_add_test(bad, a_rope_factor_of_zero_is_refused);
    tcase_add_test(bad, a_file_with_a_vocabulary_only_is_refused_by_name);
    tcase_add_test(bad, a_damaged_model_is_refused_or_opened);
    tcase_add_test(bad, every_allocation_that_fails_is_an_error);
    suite_add_tcase(s, bad);
    return s;
}

int main(void)
{
    SRunner *r = srunner_create(model_suite());
    int failed;

    srunner_run_all(r, CK_NORMAL);
    failed = srunner_ntests_failed(r);
    srunner_free(r);
    return failed == 0 ? 0 : 1;
}

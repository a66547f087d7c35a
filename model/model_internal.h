/* An open model: hyper-parameters, bound weights and the kernels that read them.  Private to
 * model/.
 *
 * model_open() fills all of it; afterwards it is read-only and safe for any thread.  Letters in
 * shapes are those of model.h: C n_embd, H n_heads, G n_kv_heads, D head_dim, F n_ff, V n_vocab.
 *
 * Every pointer below stands on a multiple of MODEL_ALIGN (what was packed, on 64), whatever the
 * alignment of the file, and
 * every float, scale and minimum behind it has been checked finite. */
#ifndef MODEL_INTERNAL_H
#define MODEL_INTERNAL_H

#include "model/kern.h"
#include "model/model.h"

enum {
    MODEL_ALIGN = 32,
    /* Bounds of the hyper-parameters, checked before anything is allocated for them. */
    MODEL_MAX_LAYERS = 1024,
    MODEL_MAX_EMBD = 1 << 16,
    MODEL_MAX_HEADS = 1024,
    MODEL_MAX_HEAD_DIM = 512,
    MODEL_MAX_FF = 1 << 20,
    MODEL_MAX_VOCAB = KV_MAX_LOGITS,
};

/* Rows as the file has them: n_rows of n_cols weights each. */
struct model_table {
    enum gguf_type type;
    uint32_t n_rows, n_cols;
    size_t row_bytes;
    const unsigned char *data;
};

struct model_layer {
    const float *attn_norm;    /* [C] */
    struct kern_matrix wq;     /* [H * D][C] */
    struct kern_matrix wk, wv; /* [G * D][C] */
    struct kern_matrix wo;     /* [C][H * D] */
    const float *ffn_norm;     /* [C] */
    struct kern_matrix w_gate; /* [F][C] */
    struct kern_matrix w_up;   /* [F][C] */
    struct kern_matrix w_down; /* [C][F] */
};

struct model {
    struct model_params params;
    const struct kernels *kern;
    struct model_table token_embd; /* [V][C]; a row is widened when its token is looked up */
    struct model_layer *layers;    /* [n_layers] */
    const float *output_norm;      /* [C] */
    struct kern_matrix output;     /* [V][C]; token_embd again where params.tied */
    /* NULL, or [rope_dims / 2]: the angle of pair i is divided by factor i (rope_freqs.weight). */
    const float *rope_factors;
    struct kv_digest fingerprint;
    struct kv_digest numerics_id;

    size_t weight_bytes;  /* of all matrices and norms, as the kernels read them */
    unsigned char *arena; /* owned: packed matrices, norms, and copies of misaligned tensors */
    size_t arena_bytes;
};

/* Run fixed inputs through every kernel of m->kern that m's types use, m's rope table and exp, and
 * digest the results.  Everything in m but numerics_id is filled.  0 or an enum model_error. */
int model_selftest(const struct model *m, struct kv_digest *out, struct kv_why *why);

/* n_blocks blocks at data (unaligned): the index of the first whose scale, minimum or float is not
 * finite, or n_blocks.  type is one that model_open() binds. */
uint64_t gguf_type_first_not_finite(uint32_t type, const unsigned char *data, uint64_t n_blocks);

#endif

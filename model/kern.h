/* The kernels: one table of functions a set, chosen at run time.  Private to model/.
 *
 * kern_plain.c is the definition.  Every other set gives the same bits for every input, which the
 * tests check function by function, and the numerics id over all of them at start.
 *
 * The rules that make bits independent of batch, tile, thread and machine (contraction off
 * everywhere, no fast-math, denormals kept):
 *
 *   1. One accumulator per output, a fixed ascending order, explicit fma, everything from +0.
 *   2. Activations meet quantized weights as int8: per 32 values amax = max |x|; amax < 2^-100:
 * scale 0 and all q 0; else d = amax / 127, q = round-half-even(x * (1 / d)), sum = sum of q.
 *   3. Quantized dot, per block of 32: exact integer dot, then acc = fma((float)dot, dw * da, acc),
 * and for types with a minimum acc = fma(mw, da * (float)sum, acc).  The chain closes every 256
 * weights: total = total + acc, segments ascending, both from +0.
 *   4. Float weights: f32 activations, fma over k ascending, closed every 256 in the same way.
 *   5. Threads, lanes and tiles divide output rows; reductions are never divided.
 */
#ifndef MODEL_KERN_H
#define MODEL_KERN_H

#include "model/model.h"

enum {
    KERN_BLOCK = 32,    /* weights under one scale */
    KERN_SEGMENT = 256, /* weights after which a chain closes; positions in an attention segment */
    KERN_ROW_TILE = 16, /* output rows are handed to threads in multiples of this */
    KERN_ALIGN = 64,    /* of packed weights */
};

/* T rows of K activations, as a matrix kernel reads them.  For quantized weights q, d and ds are
 * filled by `quantize`; for float weights x alone is read. */
struct kern_acts {
    uint32_t n_rows; /* T */
    uint32_t n_cols; /* K */
    const float *x;  /* [T][K] */
    int8_t *q;       /* [T][K padded to 32] */
    float *d;        /* [T][K / 32] scales */
    float *ds;       /* [T][K / 32] d * (float)sum, one rounded product */
    int32_t *sum;    /* [T][K / 32] exact sums of q */
};

/* A weight matrix [n_rows][n_cols] as a set keeps it. */
struct kern_matrix {
    enum gguf_type type;
    uint32_t n_rows;  /* outputs */
    uint32_t n_cols;  /* K */
    const void *data; /* what pack() wrote, or the file's own bytes where pack_bytes() is 0 */
};

/* One KV head's attention for a few query rows over segments of 256 absolute positions. */
struct kern_attn {
    const struct kv_layout *kv;
    const unsigned char *const *pages; /* [.] base of each page of the sequence */
    uint32_t layer;
    uint32_t kv_head;
    uint32_t n_q;          /* query rows in this tile */
    const float *const *q; /* [n_q] -> float [D], after rope, times 1/sqrt(D) */
    const uint32_t *n_kv;  /* [n_q] positions that the row sees: 0..n_kv-1 */
};

/* The state of a row's softmax over the segments merged so far. */
struct kern_partial {
    float m;  /* maximum score */
    float l;  /* sum of exp(score - m) */
    float *o; /* [D] sum of exp(score - m) * v */
};

struct kernels {
    const char *name;

    /* -- matrices.  n_cols of quantized types is a multiple of 32. -- */
    /* Bytes that pack() writes; 0: the set reads the file's own bytes and pack() does nothing. */
    size_t (*pack_bytes)(enum gguf_type type, uint32_t n_rows, uint32_t n_cols);
    /* src: the file's bytes of the matrix, of any alignment; dst: aligned to KERN_ALIGN. */
    void (*pack)(enum gguf_type type, uint32_t n_rows, uint32_t n_cols, const void *src, void *dst);
    /* Row t of a: x to q, d, ds, sum; n_cols is a multiple of 32.  Returns 0, or -1 where a value
     * is not finite, and the row's outputs are then undefined. */
    int (*quantize)(struct kern_acts *a, uint32_t t);
    /* y[t * y_stride + r] for every row t of a and r in [row0, row1); row0 is a multiple of
     * KERN_ROW_TILE, row1 too or n_rows.  Ranges may be computed by different threads.  A result
     * that is not a number (an infinite scale times zero) is one in every set, its payload is
     * unspecified. */
    void (*gemm)(const struct kern_matrix *w, uint32_t row0, uint32_t row1,
                 const struct kern_acts *a, float *y, size_t y_stride);

    /* -- rows -- */
    /* y = x / rms(x) * w; eps as in the file. */
    void (*rmsnorm)(const float *x, const float *w, uint32_t n, float eps, float *y);
    /* In place on n_heads heads of D: the first rope_dims of each turn by (cos, sin) of this
     * position, cs is float [rope_dims / 2][2]. */
    void (*rope)(float *x, uint32_t n_heads, uint32_t head_dim, uint32_t rope_dims,
                 enum model_rope kind, const float *cs);
    void (*silu_mul)(const float *gate, const float *up, uint32_t n,
                     float *y);                        /* silu(gate) * up */
    void (*add)(float *x, const float *y, uint32_t n); /* x += y */
    bool (*finite)(const float *x, uint32_t n);
    float (*exp)(float x); /* the polynomial of rule "exp"; for the self-test */

    /* -- KV -- */
    /* Round one position's K and V (float [G][D] each) into its page.  0, or -1 on overflow. */
    int (*kv_put)(const struct kv_layout *kv, unsigned char *page, uint32_t layer, uint32_t slot,
                  const float *k, const float *v);
    /* Segment `seg` of a tile's rows: part[i] is written for each row with n_kv > 256 * seg. */
    void (*attn_segment)(const struct kern_attn *a, uint32_t seg, struct kern_partial *part);
    /* into = merge(into, next), ascending segments. */
    void (*attn_merge)(struct kern_partial *into, const struct kern_partial *next,
                       uint32_t head_dim);
    /* y = o / l */
    void (*attn_finish)(const struct kern_partial *p, uint32_t head_dim, float *y);
};

extern const struct kernels kern_plain;
extern const struct kernels kern_avx2;   /* x86-64 builds only; needs AVX2, FMA, F16C */
extern const struct kernels kern_avx512; /* x86-64 builds only; needs AVX-512 F, BW, VL, DQ, VNNI */

/* Whether the sets have matrix kernels for weights of this type (all of them or none). */
bool kern_has_type(enum gguf_type type);

/* The set of that name if this machine can run it, NULL otherwise.  "auto" or NULL: the fastest. */
const struct kernels *kern_find(const char *name);

#endif

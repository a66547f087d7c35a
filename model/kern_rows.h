/* The row half of the kernels (kern.h): norms, rope, SiLU, exp, KV rows and attention, once a set.
 *
 * kern_plain_rows.c is the definition.  Its choices where the rules leave one:
 *
 *   fold     16 partials p: for h in 8, 4, 2, 1: p[i] = p[i] op p[i + h] for i < h.
 *   maximum  16 partials (position mod 16) from -inf, s > p ? s : p, folded with a > b ? a : b.
 *   exp      n = nearest(x * log2 e), r = x - n ln 2 in two fmas, a polynomial of degree 7 in fmas,
 *            times 2^n, which is exact because no result in [-87, 88] is subnormal.  NaN gives the
 *            quiet NaN 7fc00000.
 *   q8       a block of 32: d = f16(amax / 127), which is refused where it is infinite or an
 * element is not finite; q = nearest(x * (1 / d)), ties to even, in -127..127, all 0 where d is. An
 * element read back is (float)q * (float)d: 7 bits by 11, so exact.
 *
 * Rows of the KV cache are read through one "load" a precision; a further precision adds its load,
 * its store and one case in each of kv_put and attn_segment.  Private to model/. */
#ifndef MODEL_KERN_ROWS_H
#define MODEL_KERN_ROWS_H

#include "model/kern.h"

enum {
    /* Query rows in one attention tile.  With 16 positions a vector, 12 rows x 2 vectors of scores
     * fill the 32 registers of AVX-512. */
    KERN_ATTN_ROWS = 12,
};

#define KERN_Q8_MOST 127.0f /* the largest q */

/* exp: constants of the polynomial, ascending powers: the minimax fit of exp(r) on |r| <= ln 2 / 2
 * with the first two fixed at 1, relative error 5.2e-11 (Taylor's of this degree: 5e-9); with the
 * roundings of f32 |error| < 1 ulp on [-87, 88]. */
#define KERN_EXP_LOG2E 0x1.715476p+0f
#define KERN_EXP_LN2_HI 0x1.62e400p-1f /* 15 bits: n * hi is exact */
#define KERN_EXP_LN2_LO 0x1.7f7d1cp-20f
#define KERN_EXP_MAGIC 12582912.0f /* 1.5 * 2^23: adding it rounds to an integer, ties to even */
#define KERN_EXP_LOWEST -87.0f
#define KERN_EXP_HIGHEST 88.0f
#define KERN_EXP_C2 0x1.000000p-1f
#define KERN_EXP_C3 0x1.555554p-3f
#define KERN_EXP_C4 0x1.55548ep-5f
#define KERN_EXP_C5 0x1.111270p-7f
#define KERN_EXP_C6 0x1.6d8d06p-10f
#define KERN_EXP_C7 0x1.9f0896p-13f

#define KERN_ROWS_DECLARE(set)                                                                  \
    void kern_##set##_rmsnorm(const float *x, const float *w, uint32_t n, float eps, float *y); \
    void kern_##set##_rope(float *x, uint32_t n_heads, uint32_t head_dim, uint32_t rope_dims,   \
                           enum model_rope kind, const float *cs);                              \
    void kern_##set##_silu_mul(const float *gate, const float *up, uint32_t n, float *y);       \
    void kern_##set##_add(float *x, const float *y, uint32_t n);                                \
    bool kern_##set##_finite(const float *x, uint32_t n);                                       \
    float kern_##set##_exp(float x);                                                            \
    int kern_##set##_kv_put(const struct kv_layout *kv, unsigned char *page, uint32_t layer,    \
                            uint32_t slot, const float *k, const float *v);                     \
    void kern_##set##_attn_segment(const struct kern_attn *a, uint32_t seg,                     \
                                   struct kern_partial *part);                                  \
    void kern_##set##_attn_merge(struct kern_partial *into, const struct kern_partial *next,    \
                                 uint32_t head_dim);                                            \
    void kern_##set##_attn_finish(const struct kern_partial *p, uint32_t head_dim, float *y)

KERN_ROWS_DECLARE(plain);
KERN_ROWS_DECLARE(avx2);
KERN_ROWS_DECLARE(avx512);

/* Members of struct kernels, for the tables. */
#define KERN_ROWS_MEMBERS(set)                                                                     \
    .rmsnorm = kern_##set##_rmsnorm, .rope = kern_##set##_rope, .silu_mul = kern_##set##_silu_mul, \
    .add = kern_##set##_add, .finite = kern_##set##_finite, .exp = kern_##set##_exp,               \
    .kv_put = kern_##set##_kv_put, .attn_segment = kern_##set##_attn_segment,                      \
    .attn_merge = kern_##set##_attn_merge, .attn_finish = kern_##set##_attn_finish

/* Nearest, ties to even; what overflows, infinities included, is infinite; NaN stays NaN. */
uint16_t kern_f16_from_f32(float x);

/* Positions of segment seg that a row with n_kv positions sees, 0..256. */
static inline uint32_t kern_segment_positions(uint32_t n_kv, uint32_t seg)
{
    uint64_t first = (uint64_t)seg * KERN_SEGMENT;

    if (n_kv <= first)
        return 0;
    return n_kv - first < KERN_SEGMENT ? (uint32_t)(n_kv - first) : KERN_SEGMENT;
}

/* The first of the 16 positions x D of K that hold absolute position pos (a multiple of 16). */
static inline const unsigned char *kern_k_group(const struct kern_attn *a, uint64_t pos)
{
    const struct kv_layout *kv = a->kv;
    uint64_t slot = pos % kv->page_tokens;

    return a->pages[pos / kv->page_tokens] + (size_t)a->layer * kv->layer_bytes +
           (size_t)a->kv_head * kv->k_head_bytes + slot * kv->geometry.head_dim * kv->element_bytes;
}

/* V [D] of absolute position pos. */
static inline const unsigned char *kern_v_row(const struct kern_attn *a, uint64_t pos)
{
    const struct kv_layout *kv = a->kv;

    return a->pages[pos / kv->page_tokens] + (size_t)a->layer * kv->layer_bytes + kv->v_offset +
           (size_t)(pos % kv->page_tokens) * kv->v_row_bytes +
           (size_t)a->kv_head * kv->geometry.head_dim * kv->element_bytes;
}

/* From the scales of K or V of a layer to those of (head, slot), the first block's; a block is
 * KV_LANES scales further. */
static inline size_t kern_scale_offset(const struct kv_layout *kv, uint32_t head, uint64_t slot)
{
    return head * kv->scales_head_bytes +
           (slot / KV_LANES * (kv->geometry.head_dim / KV_Q8_BLOCK) * KV_LANES + slot % KV_LANES) *
               sizeof(uint16_t);
}

/* q8: the first scale of absolute position pos, of K (offset: kv->ks_offset) or of V (vs_offset);
 * at a multiple of 16 [D / 32][16]. */
static inline const unsigned char *kern_scales(const struct kern_attn *a, size_t offset,
                                               uint64_t pos)
{
    const struct kv_layout *kv = a->kv;

    return a->pages[pos / kv->page_tokens] + (size_t)a->layer * kv->layer_bytes + offset +
           kern_scale_offset(kv, a->kv_head, pos % kv->page_tokens);
}

#endif

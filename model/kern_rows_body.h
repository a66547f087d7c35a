/* The row kernels with 16 lanes, for kern_avx2_rows.c and kern_avx512_rows.c.
 *
 * The including file has defined what 16 lanes are, `v16` and `m16` (a mask), with the operations
 * v16_*, and these constants:
 *
 *   SET            the set's name
 *   SCORE_GROUPS(rows)   groups of 16 positions in a register tile of that many query rows
 *   VALUE_VECTORS(rows)  vectors of V in a register tile of that many query rows
 *   TILE_ROWS            the tallest register tile: 12 or 6
 *
 * A lane of v16 is a position in scores, an element of the row elsewhere.  All of it is the same
 * arithmetic in the same order as kern_plain_rows.c, lane by lane. */
#include "model/kern_matrix.h"
#include "model/kern_rows.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 48")
#endif
#define INLINE static inline __attribute__((always_inline))
#define CONCAT3_(a, b, c) a##b##c
#define CONCAT3(a, b, c) CONCAT3_(a, b, c)
#define KERN(name) CONCAT3(CONCAT3(kern_, SET, _), name, )

enum { GROUPS = KERN_SEGMENT / KV_LANES, GROUPS_PAD = 8, FETCH_ROWS = 4, LINE = 64 };

/* exp of lanes that are at most 88, or not numbers: those come out as some NaN. */
INLINE v16 exp16_bounded(v16 x)
{
    const v16 magic = v16_set1(KERN_EXP_MAGIC);
    const v16 n = v16_sub(v16_fma(x, v16_set1(KERN_EXP_LOG2E), magic), magic);
    v16 r, p;

    r = v16_fma(n, v16_set1(-KERN_EXP_LN2_HI), x);
    r = v16_fma(n, v16_set1(-KERN_EXP_LN2_LO), r);
    p = v16_set1(KERN_EXP_C7);
    p = v16_fma(p, r, v16_set1(KERN_EXP_C6));
    p = v16_fma(p, r, v16_set1(KERN_EXP_C5));
    p = v16_fma(p, r, v16_set1(KERN_EXP_C4));
    p = v16_fma(p, r, v16_set1(KERN_EXP_C3));
    p = v16_fma(p, r, v16_set1(KERN_EXP_C2));
    p = v16_fma(p, r, v16_set1(1.0f));
    p = v16_fma(p, r, v16_set1(1.0f));
    p = v16_mul(p, v16_pow2(n));
    return v16_select(v16_less(x, v16_set1(KERN_EXP_LOWEST)), v16_zero(), p);
}

INLINE v16 exp16(v16 x)
{
    v16 p = exp16_bounded(x);

    p = v16_select(v16_less(v16_set1(KERN_EXP_HIGHEST), x), v16_set1(INFINITY), p);
    return v16_select(v16_is_nan(x), v16_quiet_nan(), p);
}

float KERN(exp)(float x)
{
    return v16_first_lane(exp16(v16_set1(x)));
}

void KERN(rmsnorm)(const float *x, const float *w, uint32_t n, float eps, float *y)
{
    const uint32_t whole = n / 16 * 16;
    v16 part = v16_zero(), r;
    float mean;
    uint32_t i;

    for (i = 0; i < whole; i += 16) {
        const v16 v = v16_load(x + i);

        part = v16_fma(v, v, part);
    }
    if (i < n) {
        const v16 v = v16_load_n(x + i, n - i);

        part = v16_select(v16_below(n - i), v16_fma(v, v, part), part);
    }
    mean = v16_fold_sum(part) / (float)n;
    r = v16_set1(1.0f / sqrtf(mean + eps));
    for (i = 0; i < whole; i += 16)
        v16_store(y + i, v16_mul(v16_mul(v16_load(x + i), r), v16_load(w + i)));
    if (i < n)
        v16_store_n(y + i, v16_mul(v16_mul(v16_load_n(x + i, n - i), r), v16_load_n(w + i, n - i)),
                    n - i);
}

/* ---- Rope ---- */

/* No scalar tails here: gcc 12.2 (bug 107647, fixed in 12.3) fuses a * c - b * s, a * s + b * c
 * into fmaddsub where the target has it, -ffp-contract=off or not. */

INLINE v16 turned_adjacent(v16 v, v16 t)
{
    return v16_sub_add(v16_mul(v, v16_dup_even(t)), v16_mul(v16_swap_pairs(v), v16_dup_odd(t)));
}

INLINE void turn_adjacent(float *x, uint32_t n, const float *cs)
{
    uint32_t i;

    for (i = 0; i + 16 <= n; i += 16)
        v16_store(x + i, turned_adjacent(v16_load(x + i), v16_load(cs + i)));
    if (i < n)
        v16_store_n(x + i, turned_adjacent(v16_load_n(x + i, n - i), v16_load_n(cs + i, n - i)),
                    n - i);
}

INLINE void turn_halves(float *x, uint32_t half, const float *cs)
{
    for (uint32_t i = 0; i < half; i += 16) {
        const uint32_t n = half - i < 16 ? half - i : 16;
        const v16 t0 = v16_load_n(cs + 2 * i, n < 8 ? 2 * n : 16);
        const v16 t1 = n <= 8 ? v16_zero() : v16_load_n(cs + 2 * i + 16, 2 * n - 16);
        const v16 c = v16_evens(t0, t1), s = v16_odds(t0, t1);
        const v16 x0 = v16_load_n(x + i, n), x1 = v16_load_n(x + half + i, n);

        v16_store_n(x + i, v16_sub(v16_mul(x0, c), v16_mul(x1, s)), n);
        v16_store_n(x + half + i, v16_add(v16_mul(x0, s), v16_mul(x1, c)), n);
    }
}

void KERN(rope)(float *x, uint32_t n_heads, uint32_t head_dim, uint32_t rope_dims,
                enum model_rope kind, const float *cs)
{
    for (uint32_t h = 0; h < n_heads; h++, x += head_dim)
        if (kind == MODEL_ROPE_NORM)
            turn_adjacent(x, rope_dims / 2 * 2, cs);
        else
            turn_halves(x, rope_dims / 2, cs);
}

/* ---- Element by element ---- */

INLINE v16 silu16(v16 g, v16 up)
{
    const v16 e = exp16(v16_sub(v16_set1(-0.0f), g)); /* -0 - g is -g for every g */

    return v16_mul(v16_div(g, v16_add(v16_set1(1.0f), e)), up);
}

void KERN(silu_mul)(const float *gate, const float *up, uint32_t n, float *y)
{
    uint32_t i;

    for (i = 0; i + 16 <= n; i += 16)
        v16_store(y + i, silu16(v16_load(gate + i), v16_load(up + i)));
    if (i < n)
        v16_store_n(y + i, silu16(v16_load_n(gate + i, n - i), v16_load_n(up + i, n - i)), n - i);
}

void KERN(add)(float *x, const float *y, uint32_t n)
{
    uint32_t i;

    for (i = 0; i + 16 <= n; i += 16)
        v16_store(x + i, v16_add(v16_load(x + i), v16_load(y + i)));
    if (i < n)
        v16_store_n(x + i, v16_add(v16_load_n(x + i, n - i), v16_load_n(y + i, n - i)), n - i);
}

bool KERN(finite)(const float *x, uint32_t n)
{
    const v16 limit = v16_set1(INFINITY);
    bool ok = true;
    uint32_t i;

    for (i = 0; i + 16 <= n; i += 16)
        ok &= v16_all_within(v16_load(x + i), limit);
    if (i < n)
        ok &= v16_all_within(v16_load_n(x + i, n - i), limit); /* the lanes past n are zero */
    return ok;
}

/* ---- KV rows ---- */

/* From this magnitude on, an element rounds to infinity. */
INLINE float overflow_from(enum kv_precision precision)
{
    return precision == KV_F32 ? INFINITY : 65520.0f;
}

INLINE bool put_k(enum kv_precision precision, unsigned char *group, uint32_t lane, const float *k,
                  uint32_t dim)
{
    const v16 limit = v16_set1(overflow_from(precision));
    const size_t size = precision == KV_F32 ? sizeof(float) : sizeof(uint16_t);
    unsigned char *dst = group + lane * size;
    bool ok = true;

    for (uint32_t d = 0; d < dim; d += 16) {
        const uint32_t n = dim - d < 16 ? dim - d : 16;
        const v16 v = v16_load_n(k + d, n);
        _Alignas(64) float f[16];
        _Alignas(32) uint16_t h[16];

        ok &= v16_all_within(v, limit);
        v16_store(f, v);
        v16_store_f16(h, v);
        for (uint32_t i = 0; i < n; i++, dst += KV_LANES * size)
            memcpy(dst, precision == KV_F32 ? (const void *)&f[i] : (const void *)&h[i], size);
    }
    return ok;
}

INLINE bool put_v(enum kv_precision precision, unsigned char *dst, const float *v, uint32_t n)
{
    const v16 limit = v16_set1(overflow_from(precision));
    const size_t size = precision == KV_F32 ? sizeof(float) : sizeof(uint16_t);
    bool ok = true;
    uint32_t i;

    for (i = 0; i < n; i += 16) {
        const uint32_t left = n - i < 16 ? n - i : 16;
        const v16 x = v16_load_n(v + i, left);
        _Alignas(32) uint16_t h[16];

        ok &= v16_all_within(x, limit);
        if (precision == KV_F32) {
            memcpy(dst + i * size, v + i, left * size);
        } else {
            v16_store_f16(h, x);
            memcpy(dst + i * size, h, left * size);
        }
    }
    return ok;
}

INLINE bool put(enum kv_precision precision, const struct kv_layout *kv, unsigned char *layer,
                uint32_t slot, const float *k, const float *v)
{
    const uint32_t n_heads = kv->geometry.n_kv_heads, dim = kv->geometry.head_dim;
    const size_t group = (size_t)(slot / KV_LANES) * dim * KV_LANES * kv->element_bytes;
    bool ok = true;

    for (uint32_t h = 0; h < n_heads; h++)
        ok &= put_k(precision, layer + h * kv->k_head_bytes + group, slot % KV_LANES,
                    k + (size_t)h * dim, dim);
    return ok & put_v(precision, layer + kv->v_offset + slot * kv->v_row_bytes, v, n_heads * dim);
}

INLINE v16 nearest_q8(v16 x, v16 inverse)
{
    const v16 most = v16_set1(KERN_Q8_MOST), least = v16_set1(-KERN_Q8_MOST);
    const v16 q = v16_max(v16_mul(x, inverse), least);

    return v16_select(v16_less(most, q), most, q);
}

INLINE v16 magnitude(v16 x)
{
    return v16_max(x, v16_sub(v16_set1(-0.0f), x));
}

/* 32 elements to q [32] and their scale. */
INLINE bool put_block(const float *x, int8_t *q, unsigned char *scale)
{
    const v16 lo = v16_load(x), hi = v16_load(x + 16), limit = v16_set1(INFINITY);
    uint16_t h;
    float d;
    v16 inverse;

    if (!v16_all_within(lo, limit) || !v16_all_within(hi, limit))
        return false;
    h = kern_f16_from_f32(v16_fold_max(v16_max(magnitude(lo), magnitude(hi))) / KERN_Q8_MOST);
    if (h == 0x7c00u)
        return false;
    memcpy(scale, &h, sizeof(h));
    d = kern_half(h);
    inverse = v16_set1(d > 0.0f ? 1.0f / d : 0.0f);
    v16_store_i8(q, nearest_q8(lo, inverse));
    v16_store_i8(q + 16, nearest_q8(hi, inverse));
    return true;
}

INLINE bool put_q8(const struct kv_layout *kv, unsigned char *layer, uint32_t slot, const float *k,
                   const float *v)
{
    const uint32_t dim = kv->geometry.head_dim;
    const size_t group = (size_t)(slot / KV_LANES) * dim * KV_LANES;
    bool ok = true;

    for (uint32_t h = 0; h < kv->geometry.n_kv_heads; h++, k += dim, v += dim) {
        unsigned char *kq = layer + h * kv->k_head_bytes + group + slot % KV_LANES;
        unsigned char *vq = layer + kv->v_offset + slot * kv->v_row_bytes + (size_t)h * dim;
        unsigned char *scale = layer + kern_scale_offset(kv, h, slot);

        for (uint32_t d = 0; d < dim; d += KV_Q8_BLOCK, scale += KV_LANES * sizeof(uint16_t)) {
            int8_t q[KV_Q8_BLOCK] = {0};

            ok &= put_block(k + d, q, scale + kv->ks_offset);
            for (uint32_t i = 0; i < KV_Q8_BLOCK; i++, kq += KV_LANES)
                memcpy(kq, &q[i], 1);
            ok &= put_block(v + d, q, scale + kv->vs_offset);
            memcpy(vq + d, q, sizeof(q));
        }
    }
    return ok;
}

int KERN(kv_put)(const struct kv_layout *kv, unsigned char *page, uint32_t layer, uint32_t slot,
                 const float *k, const float *v)
{
    unsigned char *base = page + (size_t)layer * kv->layer_bytes;
    bool ok;

    if (kv->geometry.precision == KV_F32)
        ok = put(KV_F32, kv, base, slot, k, v);
    else if (kv->geometry.precision == KV_F16)
        ok = put(KV_F16, kv, base, slot, k, v);
    else
        ok = put_q8(kv, base, slot, k, v);
    return ok ? 0 : -1;
}

/* ---- Attention ----
 *
 * A tile's rows are worked off in register tiles of 12, 6, 4, 3, 2 and 1 rows.  Every output has
 * one chain of fmas, ascending, whatever tile it stands in. */

INLINE size_t element_size(enum kv_precision precision)
{
    return precision == KV_F32 ? sizeof(float) : precision == KV_F16 ? sizeof(uint16_t) : 1;
}

/* 16 elements of a KV row, widened; scale: of each, q8 only. */
INLINE v16 kv_load(enum kv_precision precision, const unsigned char *row, size_t i, v16 scale)
{
    if (precision == KV_F32)
        return v16_load((const float *)(const void *)row + i);
    if (precision == KV_F16)
        return v16_load_f16(row + i * sizeof(uint16_t));
    return v16_mul(v16_load_i8(row + i), scale);
}

/* The first n < 16 elements; a row of q8 has whole blocks. */
INLINE v16 kv_load_n(enum kv_precision precision, const unsigned char *row, size_t i, uint32_t n)
{
    return precision == KV_F32 ? v16_load_n((const float *)(const void *)row + i, n)
                               : v16_load_f16_n(row + i * sizeof(uint16_t), n);
}

/* The scales of 16 positions' `block`-th 32 elements. */
INLINE v16 load_scales(const unsigned char *scales, uint32_t block)
{
    return v16_load_f16(scales + (size_t)block * KV_LANES * sizeof(uint16_t));
}

/* A segment of a tile: the rows that see any of it. */
struct segment {
    const struct kern_attn *a;
    uint32_t n_rows;
    uint32_t n_groups;              /* that any row sees */
    uint32_t n[KERN_ATTN_ROWS];     /* positions that the row sees */
    const float *q[KERN_ATTN_ROWS]; /* [D] */
    struct kern_partial *part[KERN_ATTN_ROWS];
    /* Groups past n_groups are those of the next segment, as far as there are any, for fetching
     * ahead; then the last is repeated, so that a register tile may run over the end. */
    const unsigned char *k[GROUPS + 2 * GROUPS_PAD];
    const unsigned char *v[GROUPS + GROUPS_PAD]; /* V of the group's first position */
    /* q8: the groups' scales [D / 32][16]. */
    const unsigned char *ks[GROUPS + 2 * GROUPS_PAD], *vs[GROUPS + GROUPS_PAD];
    /* Scores, then probabilities. */
    _Alignas(64) float s[KERN_ATTN_ROWS][KERN_SEGMENT + GROUPS_PAD * KV_LANES];
};

/* As segment_init() does for K and V, of which n_known groups are there. */
static void segment_scales(struct segment *t, uint64_t pos0, uint32_t n_known)
{
    const struct kv_layout *kv = t->a->kv;

    for (uint32_t g = 0; g < GROUPS + 2 * GROUPS_PAD; g++)
        t->ks[g] = g < n_known ? kern_scales(t->a, kv->ks_offset, pos0 + g * KV_LANES)
                               : t->ks[n_known - 1];
    for (uint32_t g = 0; g < GROUPS + GROUPS_PAD; g++)
        t->vs[g] = g < t->n_groups ? kern_scales(t->a, kv->vs_offset, pos0 + g * KV_LANES)
                                   : t->vs[t->n_groups - 1];
}

static void segment_init(struct segment *t, const struct kern_attn *a, uint32_t seg,
                         struct kern_partial *part)
{
    const uint64_t pos0 = (uint64_t)seg * KERN_SEGMENT;
    uint32_t most = 0, n_known = 0;

    assert(a->n_q <= KERN_ATTN_ROWS);
    t->a = a;
    t->n_rows = 0;
    for (uint32_t i = 0; i < a->n_q; i++) {
        const uint32_t n = kern_segment_positions(a->n_kv[i], seg);

        if (n == 0)
            continue;
        t->n[t->n_rows] = n;
        t->q[t->n_rows] = a->q[i];
        t->part[t->n_rows++] = &part[i];
        most = a->n_kv[i] > most ? a->n_kv[i] : most;
    }
    t->n_groups = 0;
    if (t->n_rows == 0)
        return;
    for (; n_known < GROUPS + GROUPS_PAD && pos0 + n_known * KV_LANES < most; n_known++) {
        t->k[n_known] = kern_k_group(a, pos0 + n_known * KV_LANES);
        if (n_known < GROUPS)
            t->v[t->n_groups++] = kern_v_row(a, pos0 + n_known * KV_LANES);
    }
    for (uint32_t g = n_known; g < GROUPS + 2 * GROUPS_PAD; g++)
        t->k[g] = t->k[n_known - 1];
    for (uint32_t g = t->n_groups; g < GROUPS + GROUPS_PAD; g++)
        t->v[g] = t->v[t->n_groups - 1];
    if (a->kv->geometry.precision == KV_Q8)
        segment_scales(t, pos0, n_known);
}

/* A tile of few rows waits for memory.  While the scores of one block of groups are computed,
 * element by element, fetch what comes next: the block behind it, and its own V rows. */
INLINE void fetch_ahead(const struct segment *t, enum kv_precision precision, const uint32_t groups,
                        uint32_t g, uint32_t d)
{
    const struct kv_layout *kv = t->a->kv;
    const size_t lanes_bytes = KV_LANES * element_size(precision);
    const size_t row_bytes = kv->geometry.head_dim * element_size(precision);

    if (d * lanes_bytes % LINE == 0) {
        UNROLL
        for (uint32_t j = 0; j < groups; j++)
            __builtin_prefetch(t->k[g + groups + j] + d * lanes_bytes);
    }
    if (precision == KV_Q8 && d % LINE == 0) { /* a byte of scales for an element */
        UNROLL
        for (uint32_t j = 0; j < groups; j++) {
            __builtin_prefetch(t->ks[g + groups + j] + d);
            __builtin_prefetch(t->vs[g + j] + d);
        }
    }
    if (d < groups * KV_LANES)
        for (size_t at = 0; at < row_bytes; at += LINE)
            __builtin_prefetch(t->v[g + d / KV_LANES] + d % KV_LANES * kv->v_row_bytes + at);
}

/* Scores of `rows` rows from row r0 on, `groups` groups at a time. */
INLINE void scores(struct segment *t, enum kv_precision precision, uint32_t r0, const uint32_t rows,
                   const uint32_t groups)
{
    const uint32_t dim = t->a->kv->geometry.head_dim;

    for (uint32_t g = 0; g < t->n_groups; g += groups) {
        v16 acc[24], scale[GROUPS_PAD];

        UNROLL
        for (uint32_t i = 0; i < rows * groups; i++)
            acc[i] = v16_zero();
        UNROLL
        for (uint32_t j = 0; j < groups; j++)
            scale[j] = v16_zero();
        for (uint32_t d = 0; d < dim; d++) {
            v16 k[GROUPS_PAD];

            if (precision == KV_Q8 && d % KV_Q8_BLOCK == 0) {
                UNROLL
                for (uint32_t j = 0; j < groups; j++)
                    scale[j] = load_scales(t->ks[g + j], d / KV_Q8_BLOCK);
            }

            if (rows <= FETCH_ROWS)
                fetch_ahead(t, precision, groups, g, d);
            UNROLL
            for (uint32_t j = 0; j < groups; j++)
                k[j] = kv_load(precision, t->k[g + j], (size_t)d * KV_LANES, scale[j]);
            UNROLL
            for (uint32_t i = 0; i < rows; i++) {
                const v16 q = v16_set1(t->q[r0 + i][d]);

                UNROLL
                for (uint32_t j = 0; j < groups; j++)
                    acc[i * groups + j] = v16_fma(q, k[j], acc[i * groups + j]);
            }
        }
        UNROLL
        for (uint32_t i = 0; i < rows; i++)
            UNROLL
        for (uint32_t j = 0; j < groups; j++)
            v16_store(&t->s[r0 + i][(g + j) * KV_LANES], acc[i * groups + j]);
    }
}

/* Row r's scores to exp(score - m), with m and l. */
INLINE void softmax(struct segment *t, uint32_t r)
{
    const uint32_t n = t->n[r], whole = n / 16 * 16;
    const m16 tail = v16_below(n - whole);
    float *s = t->s[r];
    v16 most = v16_set1(-INFINITY), sum = v16_zero(), m;
    uint32_t j;

    for (j = 0; j < whole; j += 16)
        most = v16_max(v16_load(s + j), most);
    if (j < n)
        most = v16_select(tail, v16_max(v16_load(s + j), most), most);
    t->part[r]->m = v16_fold_max(most);
    m = v16_set1(t->part[r]->m);
    for (j = 0; j < whole; j += 16) {
        const v16 p = exp16_bounded(v16_sub(v16_load(s + j), m));

        v16_store(s + j, p);
        sum = v16_add(sum, p);
    }
    if (j < n) {
        const v16 p = exp16_bounded(v16_sub(v16_load(s + j), m));

        v16_store(s + j, p);
        sum = v16_select(tail, v16_add(sum, p), sum);
    }
    t->part[r]->l = v16_fold_sum(sum);
}

/* o[i] = fma chain over positions [n0, n1) for `rows` rows from r0 on, elements [d, d + 16 *
 * vectors) or, where tail is not 0, [d, d + tail).  The chain starts at +0 where n0 is 0, else it
 * goes on from what part->o holds. */
INLINE void values(struct segment *t, enum kv_precision precision, uint32_t r0, const uint32_t rows,
                   uint32_t n0, uint32_t n1, uint32_t d, const uint32_t vectors, uint32_t tail)
{
    const size_t stride = t->a->kv->v_row_bytes;
    _Alignas(64) float scales[2][KV_LANES]; /* of the 16 positions, for each 32 elements */
    v16 acc[24];

    UNROLL
    for (uint32_t i = 0; i < rows; i++)
        UNROLL
    for (uint32_t j = 0; j < vectors; j++)
        acc[i * vectors + j] = n0 == 0 ? v16_zero()
                               : tail  ? v16_load_n(t->part[r0 + i]->o + d, tail)
                                       : v16_load(t->part[r0 + i]->o + d + 16 * j);
    for (uint32_t g = n0 / KV_LANES; g * KV_LANES < n1; g++) {
        const uint32_t first = g * KV_LANES < n0 ? n0 : g * KV_LANES;
        const uint32_t end = (g + 1) * KV_LANES < n1 ? (g + 1) * KV_LANES : n1;

        if (precision == KV_Q8) {
            UNROLL
            for (uint32_t b = 0; b < (vectors + 1) / 2; b++)
                v16_store(scales[b], load_scales(t->vs[g], d / KV_Q8_BLOCK + b));
        }
        for (uint32_t pos = first; pos < end; pos++) {
            const unsigned char *row = t->v[g] + (pos - g * KV_LANES) * stride;
            v16 v[4];

            UNROLL
            for (uint32_t j = 0; j < vectors; j++) {
                const v16 scale =
                    precision == KV_Q8 ? v16_set1(scales[j / 2][pos % KV_LANES]) : v16_zero();

                v[j] = tail ? kv_load_n(precision, row, d, tail)
                            : kv_load(precision, row, d + 16 * j, scale);
            }
            UNROLL
            for (uint32_t i = 0; i < rows; i++) {
                const v16 p = v16_set1(t->s[r0 + i][pos]);

                UNROLL
                for (uint32_t j = 0; j < vectors; j++)
                    acc[i * vectors + j] = v16_fma(p, v[j], acc[i * vectors + j]);
            }
        }
    }
    UNROLL
    for (uint32_t i = 0; i < rows; i++)
        UNROLL
    for (uint32_t j = 0; j < vectors; j++)
        if (tail)
            v16_store_n(t->part[r0 + i]->o + d, acc[i * vectors + j], tail);
        else
            v16_store(t->part[r0 + i]->o + d + 16 * j, acc[i * vectors + j]);
}

INLINE void values_all(struct segment *t, enum kv_precision precision, uint32_t r0,
                       const uint32_t rows, uint32_t n0, uint32_t n1, const uint32_t vectors)
{
    const uint32_t dim = t->a->kv->geometry.head_dim;
    uint32_t d = 0;

    for (; d + 16 * vectors <= dim; d += 16 * vectors)
        values(t, precision, r0, rows, n0, n1, d, vectors, 0);
    for (; d + 16 <= dim; d += 16)
        values(t, precision, r0, rows, n0, n1, d, 1, 0);
    if (d < dim)
        values(t, precision, r0, rows, n0, n1, d, 1, dim - d);
}

static __attribute__((noinline)) void values_one_f32(struct segment *t, uint32_t r, uint32_t n0)
{
    values_all(t, KV_F32, r, 1, n0, t->n[r], VALUE_VECTORS(1));
}

static __attribute__((noinline)) void values_one_f16(struct segment *t, uint32_t r, uint32_t n0)
{
    values_all(t, KV_F16, r, 1, n0, t->n[r], VALUE_VECTORS(1));
}

static __attribute__((noinline)) void values_one_q8(struct segment *t, uint32_t r, uint32_t n0)
{
    values_all(t, KV_Q8, r, 1, n0, t->n[r], VALUE_VECTORS(1));
}

/* Everything for `rows` rows from r0 on.  Positions that all of them see go through the register
 * tile, the few that only some see row by row. */
INLINE void rows_run(struct segment *t, enum kv_precision precision, uint32_t r0,
                     const uint32_t rows)
{
    uint32_t common = KERN_SEGMENT;

    scores(t, precision, r0, rows, SCORE_GROUPS(rows));
    for (uint32_t i = 0; i < rows; i++) {
        softmax(t, r0 + i);
        common = t->n[r0 + i] < common ? t->n[r0 + i] : common;
    }
    values_all(t, precision, r0, rows, 0, common, VALUE_VECTORS(rows));
    for (uint32_t i = 0; i < rows; i++)
        if (t->n[r0 + i] > common) {
            if (precision == KV_F32)
                values_one_f32(t, r0 + i, common);
            else if (precision == KV_F16)
                values_one_f16(t, r0 + i, common);
            else
                values_one_q8(t, r0 + i, common);
        }
}

#define ROWS_FUNCTION(precision, rows)                                                             \
    static __attribute__((noinline)) void rows_##precision##_##rows(struct segment *t, uint32_t r) \
    {                                                                                              \
        rows_run(t, KV_##precision, r, rows);                                                      \
    }
#define ROWS_FUNCTIONS(precision) \
    ROWS_FUNCTION(precision, 1)   \
    ROWS_FUNCTION(precision, 2)   \
    ROWS_FUNCTION(precision, 3)   \
    ROWS_FUNCTION(precision, 4)   \
    ROWS_FUNCTION(precision, 6)
ROWS_FUNCTIONS(F32)
ROWS_FUNCTIONS(F16)
ROWS_FUNCTIONS(Q8)
#if TILE_ROWS == 12
ROWS_FUNCTION(F32, 12)
ROWS_FUNCTION(F16, 12)
ROWS_FUNCTION(Q8, 12)
#endif

struct rows_function {
    uint32_t rows;
    void (*run[KV_Q8 + 1])(struct segment *t, uint32_t r); /* by precision */
};

#define ROWS_ENTRY(rows)                                     \
    {                                                        \
        rows,                                                \
        {                                                    \
            rows_F32_##rows, rows_F16_##rows, rows_Q8_##rows \
        }                                                    \
    }

/* Tallest first. */
static const struct rows_function rows_functions[] = {
#if TILE_ROWS == 12
    ROWS_ENTRY(12),
#endif
    ROWS_ENTRY(6),  ROWS_ENTRY(4), ROWS_ENTRY(3), ROWS_ENTRY(2), ROWS_ENTRY(1),
};

void KERN(attn_segment)(const struct kern_attn *a, uint32_t seg, struct kern_partial *part)
{
    const struct rows_function *f = rows_functions;
    struct segment t;

    segment_init(&t, a, seg, part);
    for (uint32_t r = 0; r < t.n_rows; r += f->rows) {
        while (f->rows > t.n_rows - r)
            f++;
        f->run[a->kv->geometry.precision](&t, r);
    }
}

void KERN(attn_merge)(struct kern_partial *into, const struct kern_partial *next, uint32_t head_dim)
{
    const float m = into->m > next->m ? into->m : next->m;
    const float a = KERN(exp)(into->m - m), b = KERN(exp)(next->m - m);
    const v16 va = v16_set1(a), vb = v16_set1(b);

    into->m = m;
    into->l = fmaf(into->l, a, next->l * b);
    for (uint32_t d = 0; d < head_dim; d += 16) {
        const uint32_t n = head_dim - d < 16 ? head_dim - d : 16;
        const v16 o = v16_load_n(into->o + d, n), os = v16_load_n(next->o + d, n);

        v16_store_n(into->o + d, v16_fma(o, va, v16_mul(os, vb)), n);
    }
}

void KERN(attn_finish)(const struct kern_partial *p, uint32_t head_dim, float *y)
{
    const v16 l = v16_set1(p->l);

    for (uint32_t d = 0; d < head_dim; d += 16) {
        const uint32_t n = head_dim - d < 16 ? head_dim - d : 16;

        v16_store_n(y + d, v16_div(v16_load_n(p->o + d, n), l), n);
    }
}

/* The definition of the row kernels.  Plain loops in the order that the rules give (kern.h); the
 * other sets are these functions with lanes. */
#include "model/kern_matrix.h"
#include "model/kern_rows.h"

#include <assert.h>
#include <math.h>
#include <string.h>

/* p[0..16) to one sum, in the one order. */
static float fold_sum(float *p)
{
    for (uint32_t h = 8; h > 0; h /= 2)
        for (uint32_t i = 0; i < h; i++)
            p[i] = p[i] + p[i + h];
    return p[0];
}

static float fold_max(float *p)
{
    for (uint32_t h = 8; h > 0; h /= 2)
        for (uint32_t i = 0; i < h; i++)
            p[i] = p[i] > p[i + h] ? p[i] : p[i + h];
    return p[0];
}

static uint32_t bits_of(float x)
{
    uint32_t u;

    memcpy(&u, &x, sizeof(u));
    return u;
}

static float float_of(uint32_t u)
{
    float x;

    memcpy(&x, &u, sizeof(x));
    return x;
}

float kern_plain_exp(float x)
{
    float n, r, p;

    if (x != x)
        return float_of(0x7fc00000u);
    if (x < KERN_EXP_LOWEST)
        return 0.0f;
    if (x > KERN_EXP_HIGHEST)
        return INFINITY;
    n = fmaf(x, KERN_EXP_LOG2E, KERN_EXP_MAGIC) - KERN_EXP_MAGIC;
    r = fmaf(n, -KERN_EXP_LN2_HI, x);
    r = fmaf(n, -KERN_EXP_LN2_LO, r);
    p = KERN_EXP_C7;
    p = fmaf(p, r, KERN_EXP_C6);
    p = fmaf(p, r, KERN_EXP_C5);
    p = fmaf(p, r, KERN_EXP_C4);
    p = fmaf(p, r, KERN_EXP_C3);
    p = fmaf(p, r, KERN_EXP_C2);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    return p * float_of((uint32_t)((int32_t)n + 127) << 23);
}

void kern_plain_rmsnorm(const float *x, const float *w, uint32_t n, float eps, float *y)
{
    float part[16] = {0};
    float mean, r;

    for (uint32_t i = 0; i < n; i++)
        part[i % 16] = fmaf(x[i], x[i], part[i % 16]);
    mean = fold_sum(part) / (float)n;
    r = 1.0f / sqrtf(mean + eps);
    for (uint32_t i = 0; i < n; i++)
        y[i] = (x[i] * r) * w[i];
}

void kern_plain_rope(float *x, uint32_t n_heads, uint32_t head_dim, uint32_t rope_dims,
                     enum model_rope kind, const float *cs)
{
    const uint32_t half = rope_dims / 2;
    const uint32_t step = kind == MODEL_ROPE_NORM ? 2 : 1;
    const uint32_t apart = kind == MODEL_ROPE_NORM ? 1 : half;

    for (uint32_t h = 0; h < n_heads; h++, x += head_dim)
        for (uint32_t i = 0; i < half; i++) {
            float *p = x + (size_t)i * step;
            const float c = cs[2 * i], s = cs[2 * i + 1];
            const float x0 = p[0], x1 = p[apart];

            p[0] = x0 * c - x1 * s;
            p[apart] = x0 * s + x1 * c;
        }
}

void kern_plain_silu_mul(const float *gate, const float *up, uint32_t n, float *y)
{
    for (uint32_t i = 0; i < n; i++) {
        const float g = gate[i];

        y[i] = g / (1.0f + kern_plain_exp(-g)) * up[i];
    }
}

void kern_plain_add(float *x, const float *y, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        x[i] = x[i] + y[i];
}

bool kern_plain_finite(const float *x, uint32_t n)
{
    uint32_t bad = 0;

    for (uint32_t i = 0; i < n; i++)
        bad |= (bits_of(x[i]) & 0x7f800000u) == 0x7f800000u;
    return bad == 0;
}

/* ---- KV rows ---- */

uint16_t kern_f16_from_f32(float x)
{
    const uint32_t u = bits_of(x);
    const uint16_t sign = (uint16_t)(u >> 16 & 0x8000u);
    const uint32_t a = u & 0x7fffffffu;
    uint32_t half, rest, tie, shift;

    if (a > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u);
    if (a >= 0x47800000u) /* 2^16 and up */
        return (uint16_t)(sign | 0x7c00u);
    if (a < 0x33000000u) /* below 2^-25: to zero */
        return sign;
    if (a < 0x38800000u) { /* below 2^-14: subnormal, units of 2^-24 */
        const uint32_t m = (a & 0x7fffffu) | 0x800000u;

        shift = 126 - (a >> 23);
        half = m >> shift;
        rest = m & ((1u << shift) - 1);
    } else {
        shift = 13;
        half = (a - 0x38000000u) >> shift;
        rest = a & 0x1fffu;
    }
    tie = 1u << (shift - 1);
    if (rest > tie || (rest == tie && half % 2 == 1))
        half++; /* a carry into the exponent is right, up to infinity */
    return (uint16_t)(sign | half);
}

/* Round x to f32 or f16 at element i of row.  false where that is not finite. */
static bool store(enum kv_precision precision, unsigned char *row, size_t i, float x)
{
    if (precision == KV_F32) {
        memcpy(row + i * sizeof(x), &x, sizeof(x));
        return (bits_of(x) & 0x7f800000u) != 0x7f800000u;
    }
    const uint16_t h = kern_f16_from_f32(x);

    memcpy(row + i * sizeof(h), &h, sizeof(h));
    return (h & 0x7c00u) != 0x7c00u;
}

/* Round 32 elements to q, `stride` bytes apart, and their scale.  false where one is not finite or
 * the scale is not. */
static bool store_block(const float *x, unsigned char *q, size_t stride, unsigned char *scale)
{
    float amax = 0.0f, d, inverse;
    uint16_t h;

    for (uint32_t i = 0; i < KV_Q8_BLOCK; i++) {
        if ((bits_of(x[i]) & 0x7f800000u) == 0x7f800000u)
            return false;
        amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
    }
    h = kern_f16_from_f32(amax / KERN_Q8_MOST);
    if (h == 0x7c00u)
        return false;
    memcpy(scale, &h, sizeof(h));
    d = kern_half(h);
    inverse = d > 0.0f ? 1.0f / d : 0.0f;
    for (uint32_t i = 0; i < KV_Q8_BLOCK; i++) {
        float v = x[i] * inverse;

        v = v > KERN_Q8_MOST ? KERN_Q8_MOST : v;
        v = v < -KERN_Q8_MOST ? -KERN_Q8_MOST : v;
        v = (v + KERN_EXP_MAGIC) - KERN_EXP_MAGIC;
        q[i * stride] = (unsigned char)(int8_t)v;
    }
    return true;
}

static bool put_q8(const struct kv_layout *kv, unsigned char *layer, uint32_t slot, const float *k,
                   const float *v)
{
    const uint32_t dim = kv->geometry.head_dim;
    const size_t group = slot / KV_LANES, lane = slot % KV_LANES;
    bool ok = true;

    for (uint32_t h = 0; h < kv->geometry.n_kv_heads; h++) {
        unsigned char *kq = layer + h * kv->k_head_bytes + group * dim * KV_LANES + lane;
        unsigned char *vq = layer + kv->v_offset + slot * kv->v_row_bytes + h * dim;
        unsigned char *scales = layer + kern_scale_offset(kv, h, slot);

        for (uint32_t d = 0; d < dim; d += KV_Q8_BLOCK) {
            const size_t block = d / KV_Q8_BLOCK * KV_LANES * sizeof(uint16_t);

            ok &= store_block(k + h * dim + d, kq + (size_t)d * KV_LANES, KV_LANES,
                              scales + kv->ks_offset + block);
            ok &= store_block(v + h * dim + d, vq + d, 1, scales + kv->vs_offset + block);
        }
    }
    return ok;
}

int kern_plain_kv_put(const struct kv_layout *kv, unsigned char *page, uint32_t layer,
                      uint32_t slot, const float *k, const float *v)
{
    const uint32_t n_heads = kv->geometry.n_kv_heads, dim = kv->geometry.head_dim;
    const enum kv_precision precision = kv->geometry.precision;
    unsigned char *base = page + (size_t)layer * kv->layer_bytes;
    const size_t group = slot / KV_LANES, lane = slot % KV_LANES;
    bool ok = true;

    if (precision == KV_Q8)
        return put_q8(kv, base, slot, k, v) ? 0 : -1;
    for (uint32_t h = 0; h < n_heads; h++) {
        unsigned char *kh = base + (size_t)h * kv->k_head_bytes;

        for (uint32_t d = 0; d < dim; d++)
            ok &= store(precision, kh, (group * dim + d) * KV_LANES + lane, k[h * dim + d]);
    }
    for (uint32_t i = 0; i < n_heads * dim; i++)
        ok &= store(precision, base + kv->v_offset + (size_t)slot * kv->v_row_bytes, i, v[i]);
    return ok ? 0 : -1;
}

/* Element i of row, widened exactly.  q8: scales are those of the position, KV_LANES apart, and the
 * element's is that of block. */
static float load(enum kv_precision precision, const unsigned char *row, size_t i,
                  const unsigned char *scales, uint32_t block)
{
    if (precision == KV_F32)
        return kern_load_f32(row + i * sizeof(float));
    if (precision == KV_F16)
        return kern_half(kern_load_u16(row + i * sizeof(uint16_t)));
    return (float)(int8_t)row[i] *
           kern_half(kern_load_u16(scales + (size_t)block * KV_LANES * sizeof(uint16_t)));
}

/* ---- Attention ---- */

/* Scores of one row over n positions from pos0 on. */
static void scores(const struct kern_attn *a, const float *q, uint64_t pos0, uint32_t n, float *s)
{
    const uint32_t dim = a->kv->geometry.head_dim;
    const enum kv_precision precision = a->kv->geometry.precision;

    for (uint32_t j = 0; j < n; j++) {
        const unsigned char *k = kern_k_group(a, pos0 + j - j % KV_LANES);
        const unsigned char *ks = kern_scales(a, a->kv->ks_offset, pos0 + j);
        float acc = 0.0f;

        for (uint32_t d = 0; d < dim; d++)
            acc = fmaf(q[d],
                       load(precision, k, (size_t)d * KV_LANES + j % KV_LANES, ks, d / KV_Q8_BLOCK),
                       acc);
        s[j] = acc;
    }
}

/* s to p = exp(s - m) in place, with m and l of the segment. */
static void softmax(float *s, uint32_t n, struct kern_partial *part)
{
    float most[16], sum[16] = {0};

    for (uint32_t i = 0; i < 16; i++)
        most[i] = -INFINITY;
    for (uint32_t j = 0; j < n; j++)
        most[j % 16] = s[j] > most[j % 16] ? s[j] : most[j % 16];
    part->m = fold_max(most);
    for (uint32_t j = 0; j < n; j++) {
        s[j] = kern_plain_exp(s[j] - part->m);
        sum[j % 16] = sum[j % 16] + s[j];
    }
    part->l = fold_sum(sum);
}

void kern_plain_attn_segment(const struct kern_attn *a, uint32_t seg, struct kern_partial *part)
{
    const uint32_t dim = a->kv->geometry.head_dim;
    const enum kv_precision precision = a->kv->geometry.precision;
    const uint64_t pos0 = (uint64_t)seg * KERN_SEGMENT;
    float s[KERN_SEGMENT];

    assert(a->n_q <= KERN_ATTN_ROWS);
    for (uint32_t i = 0; i < a->n_q; i++) {
        const uint32_t n = kern_segment_positions(a->n_kv[i], seg);

        if (n == 0)
            continue;
        scores(a, a->q[i], pos0, n, s);
        softmax(s, n, &part[i]);
        memset(part[i].o, 0, dim * sizeof(float));
        for (uint32_t j = 0; j < n; j++) {
            const unsigned char *v = kern_v_row(a, pos0 + j);
            const unsigned char *vs = kern_scales(a, a->kv->vs_offset, pos0 + j);

            for (uint32_t d = 0; d < dim; d++)
                part[i].o[d] = fmaf(s[j], load(precision, v, d, vs, d / KV_Q8_BLOCK), part[i].o[d]);
        }
    }
}

void kern_plain_attn_merge(struct kern_partial *into, const struct kern_partial *next,
                           uint32_t head_dim)
{
    const float m = into->m > next->m ? into->m : next->m;
    const float a = kern_plain_exp(into->m - m), b = kern_plain_exp(next->m - m);

    into->m = m;
    into->l = fmaf(into->l, a, next->l * b);
    for (uint32_t d = 0; d < head_dim; d++)
        into->o[d] = fmaf(into->o[d], a, next->o[d] * b);
}

void kern_plain_attn_finish(const struct kern_partial *p, uint32_t head_dim, float *y)
{
    for (uint32_t d = 0; d < head_dim; d++)
        y[d] = p->o[d] / p->l;
}

/* The plain set's matrices, and with them the definition of what a matrix product is.
 *
 * Built for the base instruction set, in plain C: every other set equals this file bit for bit, on
 * every machine.  The rules stand in kern.h.  The weights are the file's own bytes, nothing is
 * packed.
 *
 * An output is one chain over k ascending:
 *
 *     total = +0
 *     for each segment of 256 weights:
 *         acc = +0
 *         quantized: for each block of 32:  acc = fma((float)dot, dw * da, acc)
 *                    types with a minimum:  acc = fma(mw, ds, acc)
 *         float:     for each weight:       acc = fma(w, x, acc)
 *         total = total + acc
 *
 * dot is the exact integer sum of (weight - offset) * q; the offsets (8 for Q4_0) go in the
 * integers.  It stays below 2^24, so (float)dot is exact as well.  dw * da is one rounded product.
 * A type without a minimum has no second fma: adding zero would turn -0 into +0.
 *
 * Blocks, all little-endian, d and m IEEE half:
 *
 *     Q8_0  d, 32 int8                     d * q
 *     Q4_0  d, 16 bytes                    d * (nibble - 8)
 *     Q4_1  d, m, 16 bytes                 d * nibble + m
 *           low nibble of byte i is weight i, high nibble weight i + 16
 *
 * Another type is a line in `types` and its dot. */
#include "model/kern_matrix.h"

#include <math.h>

/* One row of weights against row t of the activations. */
typedef float plain_dot(const unsigned char *w, const struct kern_acts *a, uint32_t t);

/* The chain of one output. */
struct chain {
    float total;
    float acc;
};

/* The n-th step (weight or block, from 1) of n_all is done; `every` of them are a segment. */
static void chain_close(struct chain *c, uint32_t n, uint32_t n_all, uint32_t every)
{
    if (n % every == 0 || n == n_all) {
        c->total = c->total + c->acc;
        c->acc = 0.0f;
    }
}

static float dot_f32(const unsigned char *w, const struct kern_acts *a, uint32_t t)
{
    const float *x = a->x + (size_t)t * a->n_cols;
    struct chain c = {0.0f, 0.0f};

    for (uint32_t k = 0; k < a->n_cols; k++) {
        c.acc = fmaf(kern_load_f32(w + (size_t)k * 4), x[k], c.acc);
        chain_close(&c, k + 1, a->n_cols, KERN_SEGMENT);
    }
    return c.total;
}

static float dot_f16(const unsigned char *w, const struct kern_acts *a, uint32_t t)
{
    const float *x = a->x + (size_t)t * a->n_cols;
    struct chain c = {0.0f, 0.0f};

    for (uint32_t k = 0; k < a->n_cols; k++) {
        c.acc = fmaf(kern_half(kern_load_u16(w + (size_t)k * 2)), x[k], c.acc);
        chain_close(&c, k + 1, a->n_cols, KERN_SEGMENT);
    }
    return c.total;
}

static float dot_bf16(const unsigned char *w, const struct kern_acts *a, uint32_t t)
{
    const float *x = a->x + (size_t)t * a->n_cols;
    struct chain c = {0.0f, 0.0f};

    for (uint32_t k = 0; k < a->n_cols; k++) {
        c.acc = fmaf(kern_bfloat(kern_load_u16(w + (size_t)k * 2)), x[k], c.acc);
        chain_close(&c, k + 1, a->n_cols, KERN_SEGMENT);
    }
    return c.total;
}

static float dot_q8_0(const unsigned char *w, const struct kern_acts *a, uint32_t t)
{
    const uint32_t n_blocks = a->n_cols / KERN_BLOCK;
    const int8_t *q = a->q + (size_t)t * a->n_cols;
    const float *d = a->d + (size_t)t * n_blocks;
    struct chain c = {0.0f, 0.0f};

    for (uint32_t b = 0; b < n_blocks; b++, w += 34, q += KERN_BLOCK) {
        const int8_t *wq = (const int8_t *)(w + 2);
        int32_t dot = 0;

        for (int i = 0; i < KERN_BLOCK; i++)
            dot += wq[i] * q[i];
        c.acc = fmaf((float)dot, kern_half(kern_load_u16(w)) * d[b], c.acc);
        chain_close(&c, b + 1, n_blocks, KERN_SEGMENT_BLOCKS);
    }
    return c.total;
}

/* 32 nibbles less an offset, against 32 q. */
static int32_t dot_nibbles(const unsigned char *nibbles, int32_t offset, const int8_t *q)
{
    int32_t dot = 0;

    for (int i = 0; i < KERN_BLOCK / 2; i++) {
        const int32_t low = nibbles[i] & 15, high = nibbles[i] >> 4;

        dot += (low - offset) * q[i] + (high - offset) * q[i + KERN_BLOCK / 2];
    }
    return dot;
}

static float dot_q4_0(const unsigned char *w, const struct kern_acts *a, uint32_t t)
{
    const uint32_t n_blocks = a->n_cols / KERN_BLOCK;
    const int8_t *q = a->q + (size_t)t * a->n_cols;
    const float *d = a->d + (size_t)t * n_blocks;
    struct chain c = {0.0f, 0.0f};

    for (uint32_t b = 0; b < n_blocks; b++, w += 18, q += KERN_BLOCK) {
        const int32_t dot = dot_nibbles(w + 2, 8, q);

        c.acc = fmaf((float)dot, kern_half(kern_load_u16(w)) * d[b], c.acc);
        chain_close(&c, b + 1, n_blocks, KERN_SEGMENT_BLOCKS);
    }
    return c.total;
}

static float dot_q4_1(const unsigned char *w, const struct kern_acts *a, uint32_t t)
{
    const uint32_t n_blocks = a->n_cols / KERN_BLOCK;
    const int8_t *q = a->q + (size_t)t * a->n_cols;
    const float *d = a->d + (size_t)t * n_blocks;
    const float *ds = a->ds + (size_t)t * n_blocks;
    struct chain c = {0.0f, 0.0f};

    for (uint32_t b = 0; b < n_blocks; b++, w += 20, q += KERN_BLOCK) {
        const int32_t dot = dot_nibbles(w + 4, 0, q);

        c.acc = fmaf((float)dot, kern_half(kern_load_u16(w)) * d[b], c.acc);
        c.acc = fmaf(kern_half(kern_load_u16(w + 2)), ds[b], c.acc);
        chain_close(&c, b + 1, n_blocks, KERN_SEGMENT_BLOCKS);
    }
    return c.total;
}

static const struct plain_type {
    enum gguf_type type;
    uint32_t block_weights;
    uint32_t block_bytes;
    plain_dot *dot;
} types[] = {
    {GGUF_F32, 1, 4, dot_f32},
    {GGUF_F16, 1, 2, dot_f16},
    {GGUF_BF16, 1, 2, dot_bf16},
    {GGUF_Q8_0, KERN_BLOCK, 34, dot_q8_0},
    {GGUF_Q4_0, KERN_BLOCK, 18, dot_q4_0},
    {GGUF_Q4_1, KERN_BLOCK, 20, dot_q4_1},
};

static const struct plain_type *find_type(enum gguf_type type)
{
    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++)
        if (types[i].type == type)
            return &types[i];
    return NULL;
}

bool kern_has_type(enum gguf_type type)
{
    return find_type(type) != NULL;
}

size_t kern_plain_pack_bytes(enum gguf_type type, uint32_t n_rows, uint32_t n_cols)
{
    (void)type;
    (void)n_rows;
    (void)n_cols;
    return 0; /* gemm reads the file's bytes */
}

void kern_plain_pack(enum gguf_type type, uint32_t n_rows, uint32_t n_cols, const void *src,
                     void *dst)
{
    (void)type;
    (void)n_rows;
    (void)n_cols;
    (void)src;
    (void)dst; /* of pack_bytes() == 0 bytes */
}

/* Nearest integer, ties to even, of |v| < 2^22: past 1.5 * 2^23 a float's last place is 1. */
static int32_t round_even(float v)
{
    return (int32_t)((v + 0x1.8p23f) - 0x1.8p23f);
}

int kern_plain_quantize(struct kern_acts *a, uint32_t t)
{
    const uint32_t n_blocks = a->n_cols / KERN_BLOCK;
    const float *x = a->x + (size_t)t * a->n_cols;
    int8_t *q = a->q + (size_t)t * a->n_cols;
    const size_t first = (size_t)t * n_blocks;

    for (uint32_t b = 0; b < n_blocks; b++, x += KERN_BLOCK, q += KERN_BLOCK) {
        float amax = 0.0f, d = 0.0f, inverse = 0.0f;
        int32_t sum = 0;

        for (int i = 0; i < KERN_BLOCK; i++) {
            if (!isfinite(x[i]))
                return -1;
            amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
        }
        if (amax >= KERN_AMAX_MIN) {
            d = amax / 127.0f;
            inverse = 1.0f / d;
        }
        for (int i = 0; i < KERN_BLOCK; i++) {
            q[i] = (int8_t)round_even(x[i] * inverse);
            sum += q[i];
        }
        a->d[first + b] = d;
        a->ds[first + b] = d * (float)sum;
        a->sum[first + b] = sum;
    }
    return 0;
}

void kern_plain_gemm(const struct kern_matrix *w, uint32_t row0, uint32_t row1,
                     const struct kern_acts *a, float *y, size_t y_stride)
{
    const struct plain_type *type = find_type(w->type);
    const size_t row_bytes = (size_t)(w->n_cols / type->block_weights) * type->block_bytes;

    for (uint32_t r = row0; r < row1; r++) {
        const unsigned char *row = (const unsigned char *)w->data + r * row_bytes;

        for (uint32_t t = 0; t < a->n_rows; t++)
            y[t * y_stride + r] = type->dot(row, a, t);
    }
}

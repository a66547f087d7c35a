/* The AVX-512 set's matrices: 16 rows a tile, VNNI for the integer dots.
 *
 * vpdpbusd multiplies unsigned by signed bytes, exactly, into 32 bits.  Weights are the unsigned
 * side: nibbles as they are, int8 plus 128 (done by pack).  The chain of each dot starts at minus
 * offset times the sum of q, so that the offset is gone in the integers.
 *
 * A kernel takes two tiles and 1 to 6 tokens, or one tile and up to 8: it unpacks a vector of
 * weights once for all the tokens, and loads a dword of activations once for both tiles.  Per tile,
 * token and block that is 8 vpdpbusd and 4 instructions for the chain, whose order is that of
 * kern_plain.c lane by lane. */
#include "model/kern_tiles.h"

#include <immintrin.h>

/* Kernels are always_inline bodies with a constant count of tokens: the arrays below are registers.
 */
#define BODY static inline __attribute__((always_inline)) void
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif

/* Here v could have become anything, for all that the compiler knows.  In memory ("m"): gcc 12
 * would keep the totals, used once in 256 weights, in registers, and spill the sums of every block.
 * In a register ("r"): it would keep twenty addresses in place of five and their strides. */
#define OPAQUE(v, where) __asm__("" : "+" where(v))

enum { LANES = 16, VECTOR = 64, MAX_TILES = 4, MAX_TOKENS = 8 };

/* A sum for each row of some tiles (a lane each) and each token. */
typedef __m512 sums[MAX_TILES][MAX_TOKENS];

BODY clear(sums s, int n_tiles, int n)
{
    UNROLL
    for (int r = 0; r < n_tiles; r++) {
        UNROLL
        for (int i = 0; i < n; i++)
            s[r][i] = _mm512_setzero_ps();
    }
}

BODY close_segment(sums total, sums acc, int n_tiles, int n)
{
    UNROLL
    for (int r = 0; r < n_tiles; r++) {
        UNROLL
        for (int i = 0; i < n; i++) {
            total[r][i] = _mm512_add_ps(total[r][i], acc[r][i]);
            OPAQUE(total[r][i], "m");
        }
    }
    clear(acc, n_tiles, n);
}

BODY write_tiles(const struct tile_job *job, sums total, int n_tiles, int n)
{
    UNROLL
    for (int r = 0; r < n_tiles; r++) {
        const uint32_t n_left = job->n_rows - (uint32_t)r * LANES;
        const __mmask16 rows = (__mmask16)(n_left < LANES ? (1u << n_left) - 1 : 0xFFFFu);
        float *y = job->y + (size_t)r * LANES;

        UNROLL
        for (int i = 0; i < n; i++)
            _mm512_mask_storeu_ps(y + (size_t)i * job->y_stride, rows, total[r][i]);
    }
}

/* -- quantized types -- */

static inline __attribute__((always_inline)) __m512i load_dword(const int8_t *p)
{
    int32_t v;

    memcpy(&v, p, sizeof(v));
    return _mm512_set1_epi32(v);
}

typedef __m512i dots[MAX_TILES][MAX_TOKENS];

/* Four weights of every row, against the same four q of n tokens. */
BODY dot_step(const __m512i *w, int n_tiles, const int8_t *q, size_t stride, int n, dots dot)
{
    UNROLL
    for (int i = 0; i < n; i++) {
        const __m512i qi = load_dword(q + (size_t)i * stride);

        UNROLL
        for (int r = 0; r < n_tiles; r++)
            dot[r][i] = _mm512_dpbusd_epi32(dot[r][i], w[r], qi);
    }
}

/* Add the dots of a block: vector j of its quants is at quants + j * VECTOR, those of the next tile
 * tile_bytes on. */
BODY dot_block(const unsigned char *quants, size_t tile_bytes, enum gguf_type type, int n_tiles,
               const int8_t *q, size_t stride, int n, dots dot)
{
    const __m512i low = _mm512_set1_epi8(15);
    const int n_vectors = type == GGUF_Q8_0 ? 8 : 4;
    __m512i w[MAX_TILES], high[MAX_TILES];

    UNROLL
    for (int j = 0; j < n_vectors; j++) {
        UNROLL
        for (int r = 0; r < n_tiles; r++) {
            w[r] = _mm512_load_si512(quants + (size_t)r * tile_bytes + j * VECTOR);
            OPAQUE(w[r], "v"); /* once from memory, not once a use */
            if (type == GGUF_Q8_0)
                continue;
            high[r] = _mm512_and_si512(_mm512_srli_epi16(w[r], 4), low);
            w[r] = _mm512_and_si512(w[r], low);
        }
        dot_step(w, n_tiles, q + j * 4, stride, n, dot);
        if (type != GGUF_Q8_0)
            dot_step(high, n_tiles, q + 16 + j * 4, stride, n, dot);
    }
}

/* Continue the chains by the dots of a block.  halves: its d and m in the first tile; d, ds: those
 * of the first token, the next one's stride on. */
BODY chain_block(const unsigned char *halves, size_t tile_bytes, bool has_min, const float *d,
                 const float *ds, size_t stride, dots dot, int n_tiles, int n, sums acc)
{
    UNROLL
    for (int r = 0; r < n_tiles; r++) {
        const __m256i *h = (const __m256i *)(const void *)(halves + (size_t)r * tile_bytes);
        const __m512 dw = _mm512_cvtph_ps(_mm256_load_si256(h));
        const __m512 mw = has_min ? _mm512_cvtph_ps(_mm256_load_si256(h + 1)) : dw;

        UNROLL
        for (int i = 0; i < n; i++) {
            const __m512 scale = _mm512_mul_ps(dw, _mm512_set1_ps(d[(size_t)i * stride]));

            acc[r][i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[r][i]), scale, acc[r][i]);
            if (has_min)
                acc[r][i] = _mm512_fmadd_ps(mw, _mm512_set1_ps(ds[(size_t)i * stride]), acc[r][i]);
        }
    }
}

BODY quant_kernel(const struct tile_job *job, enum gguf_type type, int n_tiles, int n)
{
    const bool has_min = type == GGUF_Q4_1;
    const int32_t offset = type == GGUF_Q8_0 ? 128 : type == GGUF_Q4_0 ? 8 : 0;
    const int n_vectors = type == GGUF_Q8_0 ? 8 : 4;
    const size_t n_blocks = job->a->n_cols / KERN_BLOCK, tile_bytes = job->tile_bytes;
    const int8_t *q = job->a->q + job->t * n_blocks * KERN_BLOCK;
    const float *d = job->a->d + job->t * n_blocks, *ds = job->a->ds + job->t * n_blocks;
    const int32_t *sum = job->a->sum + job->t * n_blocks;
    const unsigned char *w = job->w, *next = w + job->ahead;
    sums acc, total;

    clear(acc, n_tiles, n);
    clear(total, n_tiles, n);
    for (size_t b = 0; b < n_blocks; b++) {
        const bool second = !has_min && b % 2; /* of the group */
        const unsigned char *halves = second ? w - n_vectors * VECTOR - VECTOR / 2 : w;
        dots dot;

        w += second ? 0 : VECTOR;
        UNROLL
        for (int r = 0; r < n_tiles; r++) {
            UNROLL
            for (int j = 0; j <= n_vectors; j++)
                _mm_prefetch((const char *)next + (size_t)r * tile_bytes + j * VECTOR, _MM_HINT_T0);
            UNROLL
            for (int i = 0; i < n; i++)
                dot[r][i] = _mm512_set1_epi32(offset ? -offset * sum[(size_t)i * n_blocks] : 0);
        }
        dot_block(w, tile_bytes, type, n_tiles, q, n_blocks * KERN_BLOCK, n, dot);
        chain_block(halves, tile_bytes, has_min, d, ds, n_blocks, dot, n_tiles, n, acc);
        if ((b + 1) % KERN_SEGMENT_BLOCKS == 0 || b + 1 == n_blocks)
            close_segment(total, acc, n_tiles, n);
        w += n_vectors * VECTOR;
        next += n_vectors * VECTOR + VECTOR / (has_min ? 1 : 2);
        q += KERN_BLOCK;
        d++, ds++, sum++;
        OPAQUE(w, "r");
        OPAQUE(next, "r");
        OPAQUE(q, "r");
        OPAQUE(d, "r");
        OPAQUE(ds, "r");
        OPAQUE(sum, "r");
    }
    write_tiles(job, total, n_tiles, n);
}

#define QUANT_KERNEL(name, type, n_tiles, n)                       \
    static void name##_##n_tiles##x##n(const struct tile_job *job) \
    {                                                              \
        quant_kernel(job, type, n_tiles, n);                       \
    }
#define QUANT_KERNELS(name, type)  \
    QUANT_KERNEL(name, type, 1, 1) \
    QUANT_KERNEL(name, type, 1, 2) \
    QUANT_KERNEL(name, type, 1, 3) \
    QUANT_KERNEL(name, type, 1, 4) \
    QUANT_KERNEL(name, type, 1, 5) \
    QUANT_KERNEL(name, type, 1, 6) \
    QUANT_KERNEL(name, type, 1, 7) \
    QUANT_KERNEL(name, type, 1, 8) \
    QUANT_KERNEL(name, type, 2, 1) \
    QUANT_KERNEL(name, type, 2, 2) \
    QUANT_KERNEL(name, type, 2, 3) \
    QUANT_KERNEL(name, type, 2, 4) \
    QUANT_KERNEL(name, type, 2, 5) \
    QUANT_KERNEL(name, type, 2, 6)
#define QUANT_TABLES(name)                                                                       \
    .few = {1,                                                                                   \
            8,                                                                                   \
            {name##_1x1, name##_1x2, name##_1x3, name##_1x4, name##_1x5, name##_1x6, name##_1x7, \
             name##_1x8}},                                                                       \
    .many = {2, 6, {name##_2x1, name##_2x2, name##_2x3, name##_2x4, name##_2x5, name##_2x6}}

QUANT_KERNELS(q8_0, GGUF_Q8_0)
QUANT_KERNELS(q4_0, GGUF_Q4_0)
QUANT_KERNELS(q4_1, GGUF_Q4_1)

/* -- float types -- */

static inline __attribute__((always_inline)) __m512 load_weights(enum gguf_type type,
                                                                 const unsigned char *p)
{
    if (type == GGUF_F32)
        return _mm512_load_ps(p);
    if (type == GGUF_F16)
        return _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)(const void *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm256_load_si256((const __m256i *)(const void *)p)), 16));
}

/* n_tiles tiles of rows against n tokens: n_tiles * n chains hide the latency of the fma. */
BODY float_kernel(const struct tile_job *job, enum gguf_type type, int n_tiles, int n)
{
    const size_t step = LANES * (type == GGUF_F32 ? 4 : 2);
    const uint32_t n_cols = job->a->n_cols;
    const float *x = job->a->x + (size_t)job->t * n_cols;
    sums acc, total;

    clear(acc, n_tiles, n);
    clear(total, n_tiles, n);
    for (uint32_t k0 = 0; k0 < n_cols; k0 += KERN_SEGMENT) {
        const uint32_t k1 = n_cols - k0 < KERN_SEGMENT ? n_cols : k0 + KERN_SEGMENT;

        for (uint32_t k = k0; k < k1; k++) {
            const unsigned char *p = job->w + k * step;
            __m512 w[MAX_TILES];

            UNROLL
            for (int r = 0; r < n_tiles; r++) {
                w[r] = load_weights(type, p + (size_t)r * job->tile_bytes);
                _mm_prefetch((const char *)p + (size_t)r * job->tile_bytes + job->ahead,
                             _MM_HINT_T0);
            }
            UNROLL
            for (int i = 0; i < n; i++) {
                const __m512 xi = _mm512_set1_ps(x[(size_t)i * n_cols + k]);

                UNROLL
                for (int r = 0; r < n_tiles; r++)
                    acc[r][i] = _mm512_fmadd_ps(w[r], xi, acc[r][i]);
            }
        }
        close_segment(total, acc, n_tiles, n);
    }
    write_tiles(job, total, n_tiles, n);
}

#define FLOAT_KERNEL(name, type, n_tiles, n)                       \
    static void name##_##n_tiles##x##n(const struct tile_job *job) \
    {                                                              \
        float_kernel(job, type, n_tiles, n);                       \
    }
#define FLOAT_KERNELS(name, type, n_tiles) \
    FLOAT_KERNEL(name, type, n_tiles, 1)   \
    FLOAT_KERNEL(name, type, n_tiles, 2)   \
    FLOAT_KERNEL(name, type, n_tiles, 3)   \
    FLOAT_KERNEL(name, type, n_tiles, 4)   \
    FLOAT_KERNEL(name, type, n_tiles, 5)   \
    FLOAT_KERNEL(name, type, n_tiles, 6)
#define FLOAT_TABLE(name, n_tiles)                                               \
    {                                                                            \
        n_tiles, 6,                                                              \
        {                                                                        \
            name##_##n_tiles##x1, name##_##n_tiles##x2, name##_##n_tiles##x3,    \
                name##_##n_tiles##x4, name##_##n_tiles##x5, name##_##n_tiles##x6 \
        }                                                                        \
    }

FLOAT_KERNELS(f32, GGUF_F32, 1)
FLOAT_KERNELS(f32, GGUF_F32, 4)
FLOAT_KERNELS(f16, GGUF_F16, 1)
FLOAT_KERNELS(f16, GGUF_F16, 4)
FLOAT_KERNELS(bf16, GGUF_BF16, 1)
FLOAT_KERNELS(bf16, GGUF_BF16, 4)

/* -- the set -- */

static const struct tile_type types[] = {
    {GGUF_F32, 128, 4, .few = FLOAT_TABLE(f32, 1), .many = FLOAT_TABLE(f32, 4),
     .lone = FLOAT_TABLE(f32, 4)},
    {GGUF_F16, 128, 2, .few = FLOAT_TABLE(f16, 1), .many = FLOAT_TABLE(f16, 4),
     .lone = FLOAT_TABLE(f16, 4)},
    {GGUF_BF16, 128, 2, .few = FLOAT_TABLE(bf16, 1), .many = FLOAT_TABLE(bf16, 4),
     .lone = FLOAT_TABLE(bf16, 4)},
    {GGUF_Q8_0, 44, 0, {34, 8, 2, 0x80808080u}, QUANT_TABLES(q8_0)},
    {GGUF_Q4_0, 44, 0, {18, 4, 2, 0}, QUANT_TABLES(q4_0)},
    {GGUF_Q4_1, 44, 0, {20, 4, 1, 0}, QUANT_TABLES(q4_1)},
};

static const struct tile_set set = {LANES, types, sizeof(types) / sizeof(types[0])};

size_t kern_avx512_pack_bytes(enum gguf_type type, uint32_t n_rows, uint32_t n_cols)
{
    return tile_pack_bytes(&set, type, n_rows, n_cols);
}

void kern_avx512_pack(enum gguf_type type, uint32_t n_rows, uint32_t n_cols, const void *src,
                      void *dst)
{
    tile_pack(&set, &(struct kern_matrix){type, n_rows, n_cols, src}, dst);
}

void kern_avx512_gemm(const struct kern_matrix *w, uint32_t row0, uint32_t row1,
                      const struct kern_acts *a, float *y, size_t y_stride)
{
    tile_gemm(&set, w, row0, row1, a, y, y_stride);
}

int kern_avx512_quantize(struct kern_acts *a, uint32_t t)
{
    const uint32_t n_blocks = a->n_cols / KERN_BLOCK;
    const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
    const float *x = a->x + (size_t)t * a->n_cols;
    const size_t first = (size_t)t * n_blocks;
    int8_t *q = a->q + first * KERN_BLOCK;

    for (uint32_t b = 0; b < n_blocks; b++, x += KERN_BLOCK, q += KERN_BLOCK) {
        const __m512 x0 = _mm512_loadu_ps(x), x1 = _mm512_loadu_ps(x + LANES);
        /* Magnitudes of floats are ordered as their bits are; infinities and NaNs are on top. */
        const uint32_t bits = _mm512_reduce_max_epu32(
            _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(x0), magnitude),
                             _mm512_and_si512(_mm512_castps_si512(x1), magnitude)));
        float amax, d = 0.0f, inverse = 0.0f;
        __m512i q0, q1;

        if (bits >= 0x7F800000u)
            return -1;
        memcpy(&amax, &bits, sizeof(amax));
        if (amax >= KERN_AMAX_MIN) {
            d = amax / 127.0f;
            inverse = 1.0f / d;
        }
        q0 = _mm512_cvtps_epi32(_mm512_mul_ps(x0, _mm512_set1_ps(inverse)));
        q1 = _mm512_cvtps_epi32(_mm512_mul_ps(x1, _mm512_set1_ps(inverse)));
        _mm_storeu_si128((__m128i *)(void *)q, _mm512_cvtepi32_epi8(q0));
        _mm_storeu_si128((__m128i *)(void *)(q + LANES), _mm512_cvtepi32_epi8(q1));
        a->sum[first + b] = _mm512_reduce_add_epi32(_mm512_add_epi32(q0, q1));
        a->d[first + b] = d;
        a->ds[first + b] = d * (float)a->sum[first + b];
    }
    return 0;
}

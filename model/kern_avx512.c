/* The AVX-512 set's matrices: 16 rows a tile, VNNI for the integer dots.
 *
 * vpdpbusd multiplies unsigned by signed bytes, exactly, into 32 bits.  Weights are the unsigned
 * side: nibbles as they are, int8 plus 128 (done by pack).  The chain of each dot starts at minus
 * offset times the sum of q, so that the offset is gone in the integers.
 *
 * A kernel takes 1 to 8 tokens: it unpacks a block of weights once for all of them, and one dword
 * of activations meets 16 rows.  Per token and block that is 8 vpdpbusd and 4 instructions for the
 * chain, whose order is that of kern_plain.c lane by lane. */
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

enum { LANES = 16, VECTOR = 64 };

/* -- quantized types -- */

static inline __attribute__((always_inline)) __m512i load_dword(const int8_t *p)
{
    int32_t v;

    memcpy(&v, p, sizeof(v));
    return _mm512_set1_epi32(v);
}

/* The quants of a block as 8 vectors of unsigned bytes, vector j for weights 4j..4j+3. */
BODY unpack(enum gguf_type type, const unsigned char *quants, __m512i w[8])
{
    const __m512i low = _mm512_set1_epi8(15);

    if (type == GGUF_Q8_0) {
        UNROLL
        for (int j = 0; j < 8; j++)
            w[j] = _mm512_load_si512(quants + j * VECTOR);
        return;
    }
    UNROLL
    for (int j = 0; j < 4; j++) {
        const __m512i v = _mm512_load_si512(quants + j * VECTOR);

        w[j] = _mm512_and_si512(v, low);
        w[j + 4] = _mm512_and_si512(_mm512_srli_epi16(v, 4), low);
    }
}

BODY write_rows(const struct tile_job *job, const __m512 *total, int n)
{
    const __mmask16 rows = (__mmask16)((1u << job->n_rows) - 1);

    UNROLL
    for (int i = 0; i < n; i++)
        _mm512_mask_storeu_ps(job->y + (size_t)i * job->y_stride, rows, total[i]);
}

BODY quant_kernel(const struct tile_job *job, enum gguf_type type, int n)
{
    const bool has_min = type == GGUF_Q4_1;
    const int32_t offset = type == GGUF_Q8_0 ? 128 : type == GGUF_Q4_0 ? 8 : 0;
    const int n_vectors = type == GGUF_Q8_0 ? 8 : 4;
    const uint32_t n_blocks = job->a->n_cols / KERN_BLOCK;
    const size_t first = (size_t)job->t * n_blocks;
    const int8_t *q = job->a->q + first * KERN_BLOCK;
    const float *d = job->a->d + first, *ds = job->a->ds + first;
    const int32_t *sum = job->a->sum + first;
    const unsigned char *w = job->w;
    __m512 acc[TILE_MAX_TOKENS], total[TILE_MAX_TOKENS];

    UNROLL
    for (int i = 0; i < n; i++)
        acc[i] = total[i] = _mm512_setzero_ps();
    for (uint32_t b = 0; b < n_blocks; b++) {
        const bool second = !has_min && b % 2; /* of the group */
        const __m256i *halves =
            (const __m256i *)(const void *)(second ? w - n_vectors * VECTOR - 32 : w);
        __m512 dw, mw = _mm512_setzero_ps();
        __m512i wq[8], dot[TILE_MAX_TOKENS];

        dw = _mm512_cvtph_ps(_mm256_load_si256(halves));
        if (has_min)
            mw = _mm512_cvtph_ps(_mm256_load_si256(halves + 1));
        if (!second) {
            _mm_prefetch((const char *)w + job->ahead, _MM_HINT_T0);
            w += VECTOR;
        }
        UNROLL
        for (int j = 0; j < n_vectors; j++)
            _mm_prefetch((const char *)w + job->ahead + j * VECTOR, _MM_HINT_T0);
        unpack(type, w, wq);
        w += n_vectors * VECTOR;
        UNROLL
        for (int i = 0; i < n; i++)
            dot[i] = _mm512_set1_epi32(-offset * sum[(size_t)i * n_blocks + b]);
        UNROLL
        for (int j = 0; j < 8; j++) {
            UNROLL
            for (int i = 0; i < n; i++)
                dot[i] = _mm512_dpbusd_epi32(
                    dot[i], wq[j], load_dword(q + ((size_t)i * n_blocks + b) * KERN_BLOCK + j * 4));
        }
        UNROLL
        for (int i = 0; i < n; i++) {
            const size_t at = (size_t)i * n_blocks + b;
            const __m512 scale = _mm512_mul_ps(dw, _mm512_set1_ps(d[at]));

            acc[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[i]), scale, acc[i]);
            if (has_min)
                acc[i] = _mm512_fmadd_ps(mw, _mm512_set1_ps(ds[at]), acc[i]);
        }
        if ((b + 1) % KERN_SEGMENT_BLOCKS == 0 || b + 1 == n_blocks) {
            UNROLL
            for (int i = 0; i < n; i++) {
                total[i] = _mm512_add_ps(total[i], acc[i]);
                acc[i] = _mm512_setzero_ps();
            }
        }
    }
    write_rows(job, total, n);
}

#define QUANT_KERNEL(name, type, n)                    \
    static void name##_##n(const struct tile_job *job) \
    {                                                  \
        quant_kernel(job, type, n);                    \
    }
#define QUANT_KERNELS(name, type) \
    QUANT_KERNEL(name, type, 1)   \
    QUANT_KERNEL(name, type, 2)   \
    QUANT_KERNEL(name, type, 3)   \
    QUANT_KERNEL(name, type, 4)   \
    QUANT_KERNEL(name, type, 5)   \
    QUANT_KERNEL(name, type, 6)   \
    QUANT_KERNEL(name, type, 7)   \
    QUANT_KERNEL(name, type, 8)
#define QUANT_TABLE(name)                                                                  \
    {                                                                                      \
        1, 8,                                                                              \
        {                                                                                  \
            name##_1, name##_2, name##_3, name##_4, name##_5, name##_6, name##_7, name##_8 \
        }                                                                                  \
    }

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
    __m512 acc[4][6], total[4][6];

    UNROLL
    for (int r = 0; r < n_tiles; r++) {
        UNROLL
        for (int i = 0; i < n; i++)
            total[r][i] = _mm512_setzero_ps();
    }
    for (uint32_t k0 = 0; k0 < n_cols; k0 += KERN_SEGMENT) {
        const uint32_t k1 = n_cols - k0 < KERN_SEGMENT ? n_cols : k0 + KERN_SEGMENT;

        UNROLL
        for (int r = 0; r < n_tiles; r++) {
            UNROLL
            for (int i = 0; i < n; i++)
                acc[r][i] = _mm512_setzero_ps();
        }
        for (uint32_t k = k0; k < k1; k++) {
            const unsigned char *p = job->w + k * step;
            __m512 w[4];

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
        UNROLL
        for (int r = 0; r < n_tiles; r++) {
            UNROLL
            for (int i = 0; i < n; i++)
                total[r][i] = _mm512_add_ps(total[r][i], acc[r][i]);
        }
    }
    UNROLL
    for (int r = 0; r < n_tiles; r++) {
        struct tile_job rows = *job;
        const uint32_t n_done = (uint32_t)r * LANES;

        rows.y += n_done;
        rows.n_rows = job->n_rows - n_done < LANES ? job->n_rows - n_done : LANES;
        write_rows(&rows, total[r], n);
    }
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
    {GGUF_Q8_0, 44, 0, {34, 8, 2, 0x80808080u}, .few = QUANT_TABLE(q8_0)},
    {GGUF_Q4_0, 44, 0, {18, 4, 2, 0}, .few = QUANT_TABLE(q4_0)},
    {GGUF_Q4_1, 44, 0, {20, 4, 1, 0}, .few = QUANT_TABLE(q4_1)},
};

static const struct tile_set set = {LANES, 4096, types, sizeof(types) / sizeof(types[0])};

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

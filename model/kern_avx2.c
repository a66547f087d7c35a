/* The AVX2 set's matrices: 8 rows a tile.
 *
 * vpmaddubsw multiplies unsigned by signed bytes and adds pairs, saturating at 16 bits, so each
 * type keeps within them:
 *
 *     nibbles  the weights are the unsigned side; a pair is at most 2 * 15 * 127 = 3810, so the 8
 *              pairs of a lane's block add up in 16 bits, and one vpmaddwd closes the block.  The
 *              offset is then gone in 32 bits: minus offset times the sum of q.
 *     int8     the unsigned side is |w|, whose sign moves to q; -128 has the magnitude 128 as an
 *              unsigned byte, and q is never -128, so that its sign can be turned.  A pair is at
 *              most 2 * 128 * 127 = 32512: each goes to 32 bits at once.
 *
 * A kernel takes 1 to 4 tokens, whose chains and dots stand in registers; the chain's order is that
 * of kern_plain.c lane by lane. */
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

/* Here v could have become anything, for all that the compiler knows.  In a register ("x"): gcc 12
 * would regroup integer sums and keep every product until the end, which takes more registers than
 * there are and a third of the speed.  In memory ("m"): as in kern_avx512.c. */
#define OPAQUE(v, where) __asm__("" : "+" where(v))

enum { LANES = 8, VECTOR = 32, LINE = 64, MAX_TILES = 4, MAX_TOKENS = 6 };

/* A sum for each row of some tiles (a lane each) and each token. */
typedef __m256 sums[MAX_TILES][MAX_TOKENS];

BODY clear(sums s, int n_tiles, int n)
{
    UNROLL
    for (int r = 0; r < n_tiles; r++) {
        UNROLL
        for (int i = 0; i < n; i++)
            s[r][i] = _mm256_setzero_ps();
    }
}

BODY close_segment(sums total, sums acc, int n_tiles, int n)
{
    UNROLL
    for (int r = 0; r < n_tiles; r++) {
        UNROLL
        for (int i = 0; i < n; i++) {
            total[r][i] = _mm256_add_ps(total[r][i], acc[r][i]);
            OPAQUE(total[r][i], "m");
        }
    }
    clear(acc, n_tiles, n);
}

/* Rows of a last tile that are not there are not written. */
BODY write_tiles(const struct tile_job *job, sums total, int n_tiles, int n)
{
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);

    UNROLL
    for (int r = 0; r < n_tiles; r++) {
        const __m256i n_left = _mm256_set1_epi32((int32_t)job->n_rows - r * LANES);
        const __m256i rows = _mm256_cmpgt_epi32(n_left, lane);
        float *y = job->y + (size_t)r * LANES;

        UNROLL
        for (int i = 0; i < n; i++)
            _mm256_maskstore_ps(y + (size_t)i * job->y_stride, rows, total[r][i]);
    }
}

/* -- quantized types -- */

static inline __attribute__((always_inline)) __m256i load_dword(const int8_t *p)
{
    int32_t v;

    memcpy(&v, p, sizeof(v));
    return _mm256_set1_epi32(v);
}

/* The dots of a block of nibbles with n tokens, q of token i being at q + i * stride. */
BODY dot_nibbles(const unsigned char *quants, const int8_t *q, size_t stride, int n, __m256i *dot)
{
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);

    UNROLL
    for (int j = 0; j < 4; j++) {
        const __m256i v = _mm256_load_si256((const __m256i *)(const void *)(quants + j * VECTOR));
        const __m256i w0 = _mm256_and_si256(v, low);
        const __m256i w1 = _mm256_and_si256(_mm256_srli_epi16(v, 4), low);

        UNROLL
        for (int i = 0; i < n; i++) {
            const int8_t *qi = q + (size_t)i * stride + j * 4;
            const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(w0, load_dword(qi)),
                                                   _mm256_maddubs_epi16(w1, load_dword(qi + 16)));

            dot[i] = j ? _mm256_add_epi16(dot[i], pairs) : pairs;
            OPAQUE(dot[i], "x");
        }
    }
    UNROLL
    for (int i = 0; i < n; i++)
        dot[i] = _mm256_madd_epi16(dot[i], ones);
}

BODY dot_bytes(const unsigned char *quants, const int8_t *q, size_t stride, int n, __m256i *dot)
{
    const __m256i ones = _mm256_set1_epi16(1);

    UNROLL
    for (int j = 0; j < 8; j++) {
        const __m256i w = _mm256_load_si256((const __m256i *)(const void *)(quants + j * VECTOR));
        const __m256i magnitude = _mm256_abs_epi8(w);

        UNROLL
        for (int i = 0; i < n; i++) {
            const __m256i signed_q =
                _mm256_sign_epi8(load_dword(q + (size_t)i * stride + j * 4), w);
            const __m256i part = _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, signed_q), ones);

            dot[i] = j ? _mm256_add_epi32(dot[i], part) : part;
            OPAQUE(dot[i], "x");
        }
    }
}

BODY quant_kernel(const struct tile_job *job, enum gguf_type type, int n)
{
    const bool has_min = type == GGUF_Q4_1;
    const int32_t offset = type == GGUF_Q4_0 ? 8 : 0;
    const int n_vectors = type == GGUF_Q8_0 ? 8 : 4;
    const uint32_t n_blocks = job->a->n_cols / KERN_BLOCK;
    const size_t first = (size_t)job->t * n_blocks;
    const int8_t *q = job->a->q + first * KERN_BLOCK;
    const float *d = job->a->d + first, *ds = job->a->ds + first;
    const int32_t *sum = job->a->sum + first;
    const unsigned char *w = job->w;
    sums acc, total;

    clear(acc, 1, n);
    clear(total, 1, n);
    for (uint32_t b = 0; b < n_blocks; b++) {
        const bool second = !has_min && b % 2; /* of the group */
        const __m128i *halves =
            (const __m128i *)(const void *)(second ? w - n_vectors * VECTOR - 16 : w);
        const __m256 dw = _mm256_cvtph_ps(_mm_load_si128(halves));
        __m256i dot[MAX_TOKENS];

        w += second ? 0 : VECTOR;
        UNROLL
        for (int j = 0; j < (n_vectors + 1) * VECTOR; j += LINE)
            _mm_prefetch((const char *)w + job->ahead + j, _MM_HINT_T0);
        if (type == GGUF_Q8_0)
            dot_bytes(w, q + b * KERN_BLOCK, job->a->n_cols, n, dot);
        else
            dot_nibbles(w, q + b * KERN_BLOCK, job->a->n_cols, n, dot);
        w += n_vectors * VECTOR;
        UNROLL
        for (int i = 0; i < n; i++) {
            const size_t at = (size_t)i * n_blocks + b;
            const __m256 scale = _mm256_mul_ps(dw, _mm256_set1_ps(d[at]));

            if (offset)
                dot[i] = _mm256_sub_epi32(dot[i], _mm256_set1_epi32(offset * sum[at]));
            acc[0][i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[i]), scale, acc[0][i]);
            if (has_min)
                acc[0][i] = _mm256_fmadd_ps(_mm256_cvtph_ps(_mm_load_si128(halves + 1)),
                                            _mm256_set1_ps(ds[at]), acc[0][i]);
        }
        if ((b + 1) % KERN_SEGMENT_BLOCKS == 0 || b + 1 == n_blocks)
            close_segment(total, acc, 1, n);
    }
    write_tiles(job, total, 1, n);
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
    QUANT_KERNEL(name, type, 4)
#define QUANT_TABLE(name)                          \
    {                                              \
        1, 4,                                      \
        {                                          \
            name##_1, name##_2, name##_3, name##_4 \
        }                                          \
    }

QUANT_KERNELS(q8_0, GGUF_Q8_0)
QUANT_KERNELS(q4_0, GGUF_Q4_0)
QUANT_KERNELS(q4_1, GGUF_Q4_1)

/* -- float types -- */

static inline __attribute__((always_inline)) __m256 load_weights(enum gguf_type type,
                                                                 const unsigned char *p)
{
    if (type == GGUF_F32)
        return _mm256_load_ps((const float *)(const void *)p);
    if (type == GGUF_F16)
        return _mm256_cvtph_ps(_mm_load_si128((const __m128i *)(const void *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(
        _mm256_cvtepu16_epi32(_mm_load_si128((const __m128i *)(const void *)p)), 16));
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
            __m256 w[MAX_TILES];

            UNROLL
            for (int r = 0; r < n_tiles; r++) {
                w[r] = load_weights(type, p + (size_t)r * job->tile_bytes);
                _mm_prefetch((const char *)p + (size_t)r * job->tile_bytes + job->ahead,
                             _MM_HINT_T0);
            }
            UNROLL
            for (int i = 0; i < n; i++) {
                const __m256 xi = _mm256_set1_ps(x[(size_t)i * n_cols + k]);

                UNROLL
                for (int r = 0; r < n_tiles; r++)
                    acc[r][i] = _mm256_fmadd_ps(w[r], xi, acc[r][i]);
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
        n_tiles, MAX_TOKENS,                                                     \
        {                                                                        \
            name##_##n_tiles##x1, name##_##n_tiles##x2, name##_##n_tiles##x3,    \
                name##_##n_tiles##x4, name##_##n_tiles##x5, name##_##n_tiles##x6 \
        }                                                                        \
    }

#define FLOAT_TYPE(name, type)   \
    FLOAT_KERNELS(name, type, 1) \
    FLOAT_KERNELS(name, type, 2) \
    FLOAT_KERNEL(name, type, 4, 1)
#define FLOAT_TABLES(name) \
    .few = FLOAT_TABLE(name, 1), .many = FLOAT_TABLE(name, 2), .lone = {4, 1, {name##_4x1}}

FLOAT_TYPE(f32, GGUF_F32)
FLOAT_TYPE(f16, GGUF_F16)
FLOAT_TYPE(bf16, GGUF_BF16)

/* -- the set -- */

static const struct tile_type types[] = {
    {GGUF_F32, 128, 4, FLOAT_TABLES(f32)},
    {GGUF_F16, 128, 2, FLOAT_TABLES(f16)},
    {GGUF_BF16, 128, 2, FLOAT_TABLES(bf16)},
    {GGUF_Q8_0, 44, 0, {34, 8, 2, 0}, .few = QUANT_TABLE(q8_0)},
    {GGUF_Q4_0, 44, 0, {18, 4, 2, 0}, .few = QUANT_TABLE(q4_0)},
    {GGUF_Q4_1, 44, 0, {20, 4, 1, 0}, .few = QUANT_TABLE(q4_1)},
};

static const struct tile_set set = {LANES, types, sizeof(types) / sizeof(types[0])};

size_t kern_avx2_pack_bytes(enum gguf_type type, uint32_t n_rows, uint32_t n_cols)
{
    return tile_pack_bytes(&set, type, n_rows, n_cols);
}

void kern_avx2_pack(enum gguf_type type, uint32_t n_rows, uint32_t n_cols, const void *src,
                    void *dst)
{
    tile_pack(&set, &(struct kern_matrix){type, n_rows, n_cols, src}, dst);
}

void kern_avx2_gemm(const struct kern_matrix *w, uint32_t row0, uint32_t row1,
                    const struct kern_acts *a, float *y, size_t y_stride)
{
    tile_gemm(&set, w, row0, row1, a, y, y_stride);
}

/* The largest of 8 unsigned dwords, and their sum. */
static uint32_t max_u32(__m256i v)
{
    __m128i m = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));

    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4E));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xB1));
    return (uint32_t)_mm_cvtsi128_si32(m);
}

static int32_t sum_i32(__m256i v)
{
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));

    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1));
    return _mm_cvtsi128_si32(s);
}

int kern_avx2_quantize(struct kern_acts *a, uint32_t t)
{
    const uint32_t n_blocks = a->n_cols / KERN_BLOCK;
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
    /* Packing 32 to 16 to 8 bits works in halves of a vector: dwords in the order they came. */
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const float *x = a->x + (size_t)t * a->n_cols;
    const size_t first = (size_t)t * n_blocks;
    int8_t *q = a->q + first * KERN_BLOCK;

    for (uint32_t b = 0; b < n_blocks; b++, x += KERN_BLOCK, q += KERN_BLOCK) {
        float amax, d = 0.0f, inverse = 0.0f;
        __m256i most = _mm256_setzero_si256(), sum = most, qv[4];
        uint32_t bits;

        /* Magnitudes of floats are ordered as their bits are; infinities and NaNs are on top. */
        UNROLL
        for (int i = 0; i < 4; i++)
            most = _mm256_max_epu32(most, _mm256_castps_si256(_mm256_and_ps(
                                              _mm256_loadu_ps(x + i * LANES), magnitude)));
        bits = max_u32(most);
        if (bits >= 0x7F800000u)
            return -1;
        memcpy(&amax, &bits, sizeof(amax));
        if (amax >= KERN_AMAX_MIN) {
            d = amax / 127.0f;
            inverse = 1.0f / d;
        }
        UNROLL
        for (int i = 0; i < 4; i++) {
            qv[i] = _mm256_cvtps_epi32(
                _mm256_mul_ps(_mm256_loadu_ps(x + i * LANES), _mm256_set1_ps(inverse)));
            sum = _mm256_add_epi32(sum, qv[i]);
        }
        _mm256_storeu_si256(
            (__m256i *)(void *)q,
            _mm256_permutevar8x32_epi32(_mm256_packs_epi16(_mm256_packs_epi32(qv[0], qv[1]),
                                                           _mm256_packs_epi32(qv[2], qv[3])),
                                        order));
        a->sum[first + b] = sum_i32(sum);
        a->d[first + b] = d;
        a->ds[first + b] = d * (float)a->sum[first + b];
    }
    return 0;
}

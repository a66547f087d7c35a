/* As kv_lanes.c, with vectors of 32 bytes, each of which is two of that file's side by side:
 * elements that are 16 bytes of a row apart.  The two do not mix until they are stored. */
#include "kvcore/kv_lanes.h"

#include <immintrin.h>
#include <string.h>

enum { VECTOR = KV_AVX2_VECTOR, HALF = 16, LINE = 64 };

#define INLINE static inline __attribute__((always_inline))

INLINE __m256i load(const unsigned char *at)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)at);
}

INLINE void store(unsigned char *at, __m256i v)
{
    _mm256_storeu_si256((__m256i *)(void *)at, v);
}

INLINE __m256i load_halves(const unsigned char *low, const unsigned char *high)
{
    return _mm256_inserti128_si256(
        _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)low)),
        _mm_loadu_si128((const __m128i *)(const void *)high), 1);
}

INLINE void store_halves(unsigned char *low, unsigned char *high, __m256i v)
{
    _mm_storeu_si128((__m128i *)(void *)low, _mm256_castsi256_si128(v));
    _mm_storeu_si128((__m128i *)(void *)high, _mm256_extracti128_si256(v, 1));
}

/* 8 bytes, four times: that and a blend cost no shuffle, which are what there is least of. */
INLINE __m256i load_quarter(const unsigned char *at)
{
    return _mm256_broadcastq_epi64(_mm_loadl_epi64((const __m128i *)(const void *)at));
}

INLINE void store_quarters(unsigned char *low, unsigned char *high, __m128i v)
{
    _mm_storel_epi64((__m128i *)(void *)low, v);
    _mm_storeh_pi((__m64 *)(void *)high, _mm_castsi128_ps(v));
}

/* ---- The deals of kv_lanes.c ---- */

#define DEFINE_DEAL(bits, n)                                                        \
    INLINE void deal_##bits(__m256i v[n], int rounds)                               \
    {                                                                               \
        for (int round = 0; round < rounds; round++) {                              \
            __m256i dealt[n];                                                       \
                                                                                    \
            for (int i = 0; i < (n) / 2; i++) {                                     \
                dealt[2 * i] = _mm256_unpacklo_epi##bits(v[i], v[i + (n) / 2]);     \
                dealt[2 * i + 1] = _mm256_unpackhi_epi##bits(v[i], v[i + (n) / 2]); \
            }                                                                       \
            memcpy(v, dealt, sizeof(dealt));                                        \
        }                                                                           \
    }

DEFINE_DEAL(8, 8)
DEFINE_DEAL(16, 8)
DEFINE_DEAL(32, 4)

/* ---- One block each way: rows at row[i] + at, lanes at group + i * KV_LANES elements ---- */

/* A half is 8 lanes of two elements. */
INLINE void to_rows_8(unsigned char *dst, size_t stride, const unsigned char *group)
{
    __m256i v[8];

    for (size_t i = 0; i < 8; i++, group += 2 * KV_LANES) {
        const __m256i low =
            _mm256_blend_epi32(load_quarter(group), load_quarter(group + KV_LANES), 0xcc);
        const __m256i high = _mm256_blend_epi32(load_quarter(group + HALF * KV_LANES),
                                                load_quarter(group + (HALF + 1) * KV_LANES), 0xcc);

        v[i] = _mm256_blend_epi32(low, high, 0xf0);
    }
    deal_8(v, 4);
    for (size_t i = 0; i < 8; i++)
        store(dst + i * stride, v[i]);
}

INLINE void to_lanes_8(unsigned char *group, const unsigned char *const *row, size_t at)
{
    __m256i v[8];

    for (size_t i = 0; i < 8; i++)
        v[i] = load(row[i] + at);
    deal_8(v, 3);
    for (size_t i = 0; i < 8; i++, group += 2 * KV_LANES) {
        store_quarters(group, group + KV_LANES, _mm256_castsi256_si128(v[i]));
        store_quarters(group + HALF * KV_LANES, group + (HALF + 1) * KV_LANES,
                       _mm256_extracti128_si256(v[i], 1));
    }
}

/* All 16 lanes: half as many stores. */
INLINE void to_whole_lanes_8(unsigned char *group, const unsigned char *const *row, size_t at)
{
    __m256i v[8], w[8];

    for (size_t i = 0; i < 8; i++) {
        v[i] = load(row[i] + at);
        w[i] = load(row[i + 8] + at);
    }
    deal_8(v, 3);
    deal_8(w, 3);
    for (size_t i = 0; i < 8; i++, group += 2 * KV_LANES) {
        const __m256i even = _mm256_unpacklo_epi64(v[i], w[i]),
                      odd = _mm256_unpackhi_epi64(v[i], w[i]);

        store_halves(group, group + HALF * KV_LANES, even);
        store_halves(group + KV_LANES, group + (HALF + 1) * KV_LANES, odd);
    }
}

#define DEFINE_BLOCK(bits, n, rounds)                                                             \
    INLINE void to_rows_##bits(unsigned char *dst, size_t stride, const unsigned char *group)     \
    {                                                                                             \
        __m256i v[n];                                                                             \
                                                                                                  \
        for (size_t i = 0; i < (n); i++, group += KV_LANES * ((bits) / 8))                        \
            v[i] = load_halves(group, group + HALF * KV_LANES);                                   \
        deal_##bits(v, rounds);                                                                   \
        for (size_t i = 0; i < (n); i++)                                                          \
            store(dst + i * stride, v[i]);                                                        \
    }                                                                                             \
    INLINE void to_lanes_##bits(unsigned char *group, const unsigned char *const *row, size_t at) \
    {                                                                                             \
        __m256i v[n];                                                                             \
                                                                                                  \
        for (size_t i = 0; i < (n); i++)                                                          \
            v[i] = load(row[i] + at);                                                             \
        deal_##bits(v, rounds);                                                                   \
        for (size_t i = 0; i < (n); i++, group += KV_LANES * ((bits) / 8))                        \
            store_halves(group, group + HALF * KV_LANES, v[i]);                                   \
    }

DEFINE_BLOCK(16, 8, 3)
DEFINE_BLOCK(32, 4, 2)

/* ---- Whole blocks ---- */

void kv_avx2_to_rows(unsigned char *dst, size_t stride, const unsigned char *src, size_t n,
                     size_t row, size_t element)
{
    const size_t block = kv_block_lanes(element);

    for (size_t line = 0; line < row; line += LINE)
        for (size_t lane = 0; lane < n; lane += block)
            for (size_t at = line; at < row && at < line + LINE; at += VECTOR) {
                unsigned char *to = dst + lane * stride + at;
                const unsigned char *from = src + at * KV_LANES + lane * element;

                if (element == 1)
                    to_rows_8(to, stride, from);
                else if (element == 2)
                    to_rows_16(to, stride, from);
                else
                    to_rows_32(to, stride, from);
            }
}

void kv_avx2_to_lanes(unsigned char *dst, const unsigned char *const *rows, size_t offset, size_t n,
                      size_t row, size_t element)
{
    const size_t block = kv_block_lanes(element);

    for (size_t at = 0; at < row; at += VECTOR) {
        if (element == 1 && n == KV_LANES) {
            to_whole_lanes_8(dst + at * KV_LANES, rows, offset + at);
            continue;
        }
        for (size_t lane = 0; lane < n; lane += block) {
            unsigned char *to = dst + at * KV_LANES + lane * element;

            if (element == 1)
                to_lanes_8(to, rows + lane, offset + at);
            else if (element == 2)
                to_lanes_16(to, rows + lane, offset + at);
            else
                to_lanes_32(to, rows + lane, offset + at);
        }
    }
}

/* Row kernels with AVX2, FMA and F16C: 16 lanes are two registers. */
#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define LANES static inline __attribute__((always_inline))

typedef struct {
    __m256 lo, hi; /* lanes 0..7, 8..15 */
} v16;
typedef v16 m16; /* all bits of a lane set, or none */

LANES v16 pair(__m256 lo, __m256 hi)
{
    return (v16){lo, hi};
}

LANES m16 v16_below(uint32_t n)
{
    const __m256i lane = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    const __m256i lo = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), lane);
    const __m256i hi = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n - 8), lane);

    return pair(_mm256_castsi256_ps(lo), _mm256_castsi256_ps(hi));
}

LANES v16 v16_zero(void)
{
    return pair(_mm256_setzero_ps(), _mm256_setzero_ps());
}

LANES v16 v16_set1(float x)
{
    return pair(_mm256_set1_ps(x), _mm256_set1_ps(x));
}

LANES v16 v16_quiet_nan(void)
{
    const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));

    return pair(nan, nan);
}

LANES v16 v16_load(const float *p)
{
    return pair(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8));
}

/* The lanes past n are zero. */
LANES v16 v16_load_n(const float *p, uint32_t n)
{
    const m16 m = v16_below(n);

    return pair(_mm256_maskload_ps(p, _mm256_castps_si256(m.lo)),
                _mm256_maskload_ps(p + 8, _mm256_castps_si256(m.hi)));
}

LANES void v16_store(float *p, v16 a)
{
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}

LANES void v16_store_n(float *p, v16 a, uint32_t n)
{
    const m16 m = v16_below(n);

    _mm256_maskstore_ps(p, _mm256_castps_si256(m.lo), a.lo);
    _mm256_maskstore_ps(p + 8, _mm256_castps_si256(m.hi), a.hi);
}

LANES v16 v16_load_f16(const void *p)
{
    const __m128i *h = p;

    return pair(_mm256_cvtph_ps(_mm_loadu_si128(h)), _mm256_cvtph_ps(_mm_loadu_si128(h + 1)));
}

LANES v16 v16_load_f16_n(const void *p, uint32_t n)
{
    uint16_t h[16] = {0};

    memcpy(h, p, n * sizeof(h[0]));
    return v16_load_f16(h);
}

/* Nearest, ties to even. */
LANES void v16_store_f16(void *p, v16 a)
{
    __m128i *h = p;

    _mm_storeu_si128(h, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(h + 1, _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}

LANES v16 v16_load_i8(const void *p)
{
    const __m128i q = _mm_loadu_si128(p);

    return pair(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(q)),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(q, q))));
}

LANES __m128i to_i16(__m256 a)
{
    const __m256i q = _mm256_cvtps_epi32(a);

    return _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
}

/* Nearest, ties to even, of lanes within -128..127. */
LANES void v16_store_i8(void *p, v16 a)
{
    _mm_storeu_si128(p, _mm_packs_epi16(to_i16(a.lo), to_i16(a.hi)));
}

LANES v16 v16_add(v16 a, v16 b)
{
    return pair(_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi));
}

LANES v16 v16_sub(v16 a, v16 b)
{
    return pair(_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi));
}

LANES v16 v16_mul(v16 a, v16 b)
{
    return pair(_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi));
}

LANES v16 v16_div(v16 a, v16 b)
{
    return pair(_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi));
}

/* a * b + c, rounded once. */
LANES v16 v16_fma(v16 a, v16 b, v16 c)
{
    return pair(_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi));
}

/* a > b ? a : b */
LANES v16 v16_max(v16 a, v16 b)
{
    return pair(_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi));
}

LANES m16 v16_less(v16 a, v16 b)
{
    return pair(_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ));
}

LANES m16 v16_is_nan(v16 a)
{
    return pair(_mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q), _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q));
}

/* m ? a : b */
LANES v16 v16_select(m16 m, v16 a, v16 b)
{
    return pair(_mm256_blendv_ps(b.lo, a.lo, m.lo), _mm256_blendv_ps(b.hi, a.hi, m.hi));
}

LANES __m256 pow2_half(__m256 n)
{
    const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));

    return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}

/* 2^n for whole n in -126..127. */
LANES v16 v16_pow2(v16 n)
{
    return pair(pow2_half(n.lo), pow2_half(n.hi));
}

/* |lane| < limit in every lane. */
LANES bool v16_all_within(v16 a, v16 limit)
{
    const __m256 sign = _mm256_set1_ps(-0.0f);
    const m16 m = v16_less(pair(_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)), limit);

    return _mm256_movemask_ps(_mm256_and_ps(m.lo, m.hi)) == 0xff;
}

LANES float v16_first_lane(v16 a)
{
    return _mm256_cvtss_f32(a.lo);
}

LANES float v16_fold_sum(v16 a)
{
    const __m256 b = _mm256_add_ps(a.lo, a.hi);
    const __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    const __m128 d = _mm_add_ps(c, _mm_movehl_ps(c, c));

    return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}

LANES float v16_fold_max(v16 a)
{
    const __m256 b = _mm256_max_ps(a.lo, a.hi);
    const __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    const __m128 d = _mm_max_ps(c, _mm_movehl_ps(c, c));

    return _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)));
}

/* (a0, a0, a2, a2, ...) */
LANES v16 v16_dup_even(v16 a)
{
    return pair(_mm256_moveldup_ps(a.lo), _mm256_moveldup_ps(a.hi));
}

/* (a1, a1, a3, a3, ...) */
LANES v16 v16_dup_odd(v16 a)
{
    return pair(_mm256_movehdup_ps(a.lo), _mm256_movehdup_ps(a.hi));
}

/* (a1, a0, a3, a2, ...) */
LANES v16 v16_swap_pairs(v16 a)
{
    return pair(_mm256_permute_ps(a.lo, 0xB1), _mm256_permute_ps(a.hi, 0xB1));
}

/* (a0 - b0, a1 + b1, a2 - b2, ...) */
LANES v16 v16_sub_add(v16 a, v16 b)
{
    return pair(_mm256_addsub_ps(a.lo, b.lo), _mm256_addsub_ps(a.hi, b.hi));
}

/* The lanes of a, then of b, that are even (which = 0x88) or odd (0xDD). */
#define PICK_HALF(a, b, which) \
    _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(_mm256_shuffle_ps(a, b, which)), 0xD8))

/* (a0, a2, .., a14, b0, b2, .., b14) */
LANES v16 v16_evens(v16 a, v16 b)
{
    return pair(PICK_HALF(a.lo, a.hi, 0x88), PICK_HALF(b.lo, b.hi, 0x88));
}

LANES v16 v16_odds(v16 a, v16 b)
{
    return pair(PICK_HALF(a.lo, a.hi, 0xDD), PICK_HALF(b.lo, b.hi, 0xDD));
}

/* 16 registers: 12 of sums, then 2 of K or V and a broadcast. */
#define SET avx2
#define TILE_ROWS 6
#define SCORE_GROUPS(rows) ((rows) == 1 ? 4u : (rows) == 2 ? 3u : (rows) == 3 ? 2u : 1u)
#define VALUE_VECTORS(rows) ((rows) == 1 ? 4u : (rows) == 2 ? 2u : (rows) == 3 ? 2u : 1u)

#include "model/kern_rows_body.h"

/* Row kernels with AVX-512: 16 lanes are one register. */
#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>

#define LANES static inline __attribute__((always_inline))

typedef __m512 v16;
typedef __mmask16 m16;

LANES m16 v16_below(uint32_t n)
{
    return (m16)((1u << n) - 1);
}

LANES v16 v16_zero(void)
{
    return _mm512_setzero_ps();
}

LANES v16 v16_set1(float x)
{
    return _mm512_set1_ps(x);
}

LANES v16 v16_quiet_nan(void)
{
    return _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000));
}

LANES v16 v16_load(const float *p)
{
    return _mm512_loadu_ps(p);
}

/* The lanes past n are zero. */
LANES v16 v16_load_n(const float *p, uint32_t n)
{
    return _mm512_maskz_loadu_ps(v16_below(n), p);
}

LANES void v16_store(float *p, v16 a)
{
    _mm512_storeu_ps(p, a);
}

LANES void v16_store_n(float *p, v16 a, uint32_t n)
{
    _mm512_mask_storeu_ps(p, v16_below(n), a);
}

LANES v16 v16_load_f16(const void *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256(p));
}

LANES v16 v16_load_f16_n(const void *p, uint32_t n)
{
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(v16_below(n), p));
}

/* Nearest, ties to even. */
LANES void v16_store_f16(void *p, v16 a)
{
    _mm256_storeu_si256(p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

LANES v16 v16_load_i8(const void *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p)));
}

/* Nearest, ties to even, of lanes within -128..127. */
LANES void v16_store_i8(void *p, v16 a)
{
    _mm_storeu_si128(p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a)));
}

LANES v16 v16_add(v16 a, v16 b)
{
    return _mm512_add_ps(a, b);
}

LANES v16 v16_sub(v16 a, v16 b)
{
    return _mm512_sub_ps(a, b);
}

LANES v16 v16_mul(v16 a, v16 b)
{
    return _mm512_mul_ps(a, b);
}

LANES v16 v16_div(v16 a, v16 b)
{
    return _mm512_div_ps(a, b);
}

/* a * b + c, rounded once. */
LANES v16 v16_fma(v16 a, v16 b, v16 c)
{
    return _mm512_fmadd_ps(a, b, c);
}

/* a > b ? a : b */
LANES v16 v16_max(v16 a, v16 b)
{
    return _mm512_max_ps(a, b);
}

LANES m16 v16_less(v16 a, v16 b)
{
    return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ);
}

LANES m16 v16_is_nan(v16 a)
{
    return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
}

/* m ? a : b */
LANES v16 v16_select(m16 m, v16 a, v16 b)
{
    return _mm512_mask_blend_ps(m, b, a);
}

/* 2^n for whole n in -126..127. */
LANES v16 v16_pow2(v16 n)
{
    const __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));

    return _mm512_castsi512_ps(_mm512_slli_epi32(e, 23));
}

/* |lane| < limit in every lane. */
LANES bool v16_all_within(v16 a, v16 limit)
{
    return v16_less(_mm512_abs_ps(a), limit) == 0xffff;
}

LANES float v16_first_lane(v16 a)
{
    return _mm512_cvtss_f32(a);
}

LANES float v16_fold_sum(v16 a)
{
    const __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    const __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    const __m128 d = _mm_add_ps(c, _mm_movehl_ps(c, c));

    return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}

LANES float v16_fold_max(v16 a)
{
    const __m256 b = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    const __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    const __m128 d = _mm_max_ps(c, _mm_movehl_ps(c, c));

    return _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)));
}

/* (a0, a0, a2, a2, ...) */
LANES v16 v16_dup_even(v16 a)
{
    return _mm512_moveldup_ps(a);
}

/* (a1, a1, a3, a3, ...) */
LANES v16 v16_dup_odd(v16 a)
{
    return _mm512_movehdup_ps(a);
}

/* (a1, a0, a3, a2, ...) */
LANES v16 v16_swap_pairs(v16 a)
{
    return _mm512_permute_ps(a, 0xB1);
}

/* (a0 - b0, a1 + b1, a2 - b2, ...) */
LANES v16 v16_sub_add(v16 a, v16 b)
{
    return _mm512_mask_sub_ps(_mm512_add_ps(a, b), 0x5555, a, b);
}

/* (a0, a2, .., a14, b0, b2, .., b14) */
LANES v16 v16_evens(v16 a, v16 b)
{
    const __m512i at = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);

    return _mm512_permutex2var_ps(a, at, b);
}

LANES v16 v16_odds(v16 a, v16 b)
{
    const __m512i at = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);

    return _mm512_permutex2var_ps(a, at, b);
}

/* 32 registers: at most 24 sums, then K or V and a broadcast. */
#define SET avx512
#define TILE_ROWS 12
#define SCORE_GROUPS(rows) ((rows) == 12 ? 2u : (rows) == 1 ? 8u : 4u)
#define VALUE_VECTORS(rows) ((rows) == 12 ? 2u : 4u)

#include "model/kern_rows_body.h"

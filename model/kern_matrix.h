/* The matrix half of each kernel set (kern.h says what the functions do), for kern_table.c, and
 * what the sets share.  Private to model/. */
#ifndef MODEL_KERN_MATRIX_H
#define MODEL_KERN_MATRIX_H

#include "model/kern.h"

#include <string.h>

enum { KERN_SEGMENT_BLOCKS = KERN_SEGMENT / KERN_BLOCK };

/* amax below this, 2^-100, quantizes to zeros: its reciprocal scale would near overflow. */
#define KERN_AMAX_MIN 0x1p-100f

/* Bytes from the file have no alignment. */
static inline uint16_t kern_load_u16(const unsigned char *p)
{
    uint16_t v;

    memcpy(&v, p, sizeof(v));
    return v;
}

static inline float kern_load_f32(const unsigned char *p)
{
    float v;

    memcpy(&v, p, sizeof(v));
    return v;
}

/* IEEE half to float, exact; a NaN stays one. */
static inline float kern_half(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    const uint32_t exponent = (h >> 10) & 31u;
    const uint32_t mantissa = h & 0x3FFu;
    const float tiny = (float)mantissa * 0x1p-24f; /* the value where the exponent is 0 */
    uint32_t bits;
    float v;

    if (exponent == 0)
        memcpy(&bits, &tiny, sizeof(bits));
    else if (exponent == 31)
        bits = 0x7F800000u | mantissa << 13 | (mantissa ? 0x400000u : 0u);
    else
        bits = (exponent + 112) << 23 | mantissa << 13;
    bits |= sign;
    memcpy(&v, &bits, sizeof(v));
    return v;
}

static inline float kern_bfloat(uint16_t b)
{
    const uint32_t bits = (uint32_t)b << 16;
    float v;

    memcpy(&v, &bits, sizeof(v));
    return v;
}

#define KERN_MATRIX_FUNCTIONS(set)                                                                 \
    size_t kern_##set##_pack_bytes(enum gguf_type type, uint32_t n_rows, uint32_t n_cols);         \
    void kern_##set##_pack(enum gguf_type type, uint32_t n_rows, uint32_t n_cols, const void *src, \
                           void *dst);                                                             \
    int kern_##set##_quantize(struct kern_acts *a, uint32_t t);                                    \
    void kern_##set##_gemm(const struct kern_matrix *w, uint32_t row0, uint32_t row1,              \
                           const struct kern_acts *a, float *y, size_t y_stride)

KERN_MATRIX_FUNCTIONS(plain);
#if defined(__x86_64__)
KERN_MATRIX_FUNCTIONS(avx2);
KERN_MATRIX_FUNCTIONS(avx512);
#endif

#endif

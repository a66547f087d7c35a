/* exp and log in double that give the same bits on every machine: only IEEE additions,
 * multiplications and divisions in a written order.  The C library's versions differ from release
 * to release.  Relative error below 1e-15 (tests/test_sampler.c).  Private to model/. */
#ifndef MODEL_FIXED_MATH_H
#define MODEL_FIXED_MATH_H

#include <stdint.h>
#include <string.h>

/* e^x for x <= 0; +0 below -700. */
static inline double fixed_exp(double x)
{
    /* x = k ln 2 + r with |r| <= ln 2 / 2; ln 2 in two parts, the first with zeros at its end so
     * that k times it is exact. */
    const double log2_e = 1.4426950408889634, ln2_hi = 0x1.62e42fee00000p-1,
                 ln2_lo = 0x1.a39ef35793c76p-33;
    const double shift =
        0x1.8p52; /* adding it rounds to an integer, which stands in the low bits */
    double clamped = x < -700.0 ? -700.0 : x, k, r, p;
    uint64_t bits;

    k = clamped * log2_e + shift;
    memcpy(&bits, &k, sizeof bits);
    k -= shift;
    r = (clamped - k * ln2_hi) - k * ln2_lo;
    /* Taylor, to r^13 / 13! */
    p = 1.0 / 6227020800.0;
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    /* times 2^k: the exponent is added to the low 11 bits of k */
    bits = (bits + 1023) << 52;
    memcpy(&k, &bits, sizeof k);
    return x < -700.0 ? 0.0 : p * k;
}

/* The natural logarithm of a normal x > 0. */
static inline double fixed_log(double x)
{
    const double ln2_hi = 0x1.62e42fee00000p-1, ln2_lo = 0x1.a39ef35793c76p-33;
    double m, s, z, p;
    uint64_t bits;
    int64_t e;

    /* x = 2^e m with m in [sqrt(1/2), sqrt(2)) */
    memcpy(&bits, &x, sizeof bits);
    e = (int64_t)(bits >> 52) - 1023;
    bits = (bits & UINT64_C(0x000fffffffffffff)) | UINT64_C(0x3ff0000000000000);
    memcpy(&m, &bits, sizeof m);
    if (m > 1.4142135623730951) {
        m *= 0.5;
        e++;
    }
    /* ln m = 2 artanh(s), s = (m - 1) / (m + 1), |s| < 0.172: the series to s^21 / 21 */
    s = (m - 1.0) / (m + 1.0);
    z = s * s;
    p = 1.0 / 21.0;
    p = p * z + 1.0 / 19.0;
    p = p * z + 1.0 / 17.0;
    p = p * z + 1.0 / 15.0;
    p = p * z + 1.0 / 13.0;
    p = p * z + 1.0 / 11.0;
    p = p * z + 1.0 / 9.0;
    p = p * z + 1.0 / 7.0;
    p = p * z + 1.0 / 5.0;
    p = p * z + 1.0 / 3.0;
    p = p * z * s + s;
    return (double)e * ln2_hi + ((double)e * ln2_lo + 2.0 * p);
}

#endif

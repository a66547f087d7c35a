#include "bench/bench_raw.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

double bench_cpu_seconds(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts);
    return (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
}

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

double bench_median(void (*fn)(void *arg), void *arg)
{
    double seconds[BENCH_REPEATS];

    fn(arg);
    for (int i = 0; i < BENCH_REPEATS; i++) {
        const double start = bench_cpu_seconds();

        fn(arg);
        seconds[i] = bench_cpu_seconds() - start;
    }
    qsort(seconds, BENCH_REPEATS, sizeof(seconds[0]), compare);
    return seconds[BENCH_REPEATS / 2];
}

static volatile uint64_t sink; /* keeps results alive */

/* -- reading -- */

struct span {
    const unsigned char *p;
    size_t n_bytes;
};

static void read_span(void *arg)
{
    const struct span *s = arg;
    uint64_t sums[8] = {0};

    for (size_t at = 0; at + 64 <= s->n_bytes; at += 64) {
        uint64_t words[8];

        __builtin_prefetch(s->p + at + 4096);
        memcpy(words, s->p + at, 64);
        for (int i = 0; i < 8; i++)
            sums[i] ^= words[i];
    }
    for (int i = 0; i < 8; i++)
        sink ^= sums[i];
}

double bench_raw_read(const void *p, size_t n_bytes)
{
    struct span s = {p, n_bytes};

    return 1e-9 * (double)n_bytes / bench_median(read_span, &s);
}

/* -- arithmetic: independent chains in registers, enough of them to hide any latency -- */

#if defined(__x86_64__)
#include <immintrin.h>

enum { ROUNDS = 400000, CHAINS = 10 };

#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
/* An empty instruction that the compiler takes for one that changes v. */
#define TOUCH(v) __asm__ volatile("" : "+v"(v))

#define CHAIN_LOOP(name, isa, vector, zero, step)            \
    __attribute__((target(isa))) static void name(void *arg) \
    {                                                        \
        vector c[CHAINS], x = zero, y = zero;                \
                                                             \
        (void)arg;                                           \
        TOUCH(y);                                            \
        UNROLL                                               \
        for (int j = 0; j < CHAINS; j++)                     \
            c[j] = zero;                                     \
        for (int i = 0; i < ROUNDS; i++) {                   \
            UNROLL                                           \
            for (int j = 0; j < CHAINS; j++) {               \
                TOUCH(x);                                    \
                c[j] = step;                                 \
                TOUCH(c[j]);                                 \
            }                                                \
        }                                                    \
    }

CHAIN_LOOP(fma_avx2, "avx2,fma", __m256, _mm256_setzero_ps(), _mm256_fmadd_ps(x, y, c[j]))
CHAIN_LOOP(int8_avx2, "avx2,fma", __m256i, _mm256_setzero_si256(),
           _mm256_add_epi16(c[j], _mm256_maddubs_epi16(x, y)))
CHAIN_LOOP(fma_avx512, "avx512f", __m512, _mm512_setzero_ps(), _mm512_fmadd_ps(x, y, c[j]))
CHAIN_LOOP(int8_avx512, "avx512f,avx512vnni", __m512i, _mm512_setzero_si512(),
           _mm512_dpbusd_epi32(c[j], x, y))

static double chains(void (*fn)(void *arg), int macs)
{
    return 1e-9 * ROUNDS * CHAINS * macs / bench_median(fn, NULL);
}
#endif

double bench_raw_fma(const char *set)
{
#if defined(__x86_64__)
    if (strcmp(set, "avx512") == 0)
        return chains(fma_avx512, 16);
    if (strcmp(set, "avx2") == 0)
        return chains(fma_avx2, 8);
#endif
    (void)set;
    return 0;
}

double bench_raw_int8(const char *set)
{
#if defined(__x86_64__)
    if (strcmp(set, "avx512") == 0)
        return chains(int8_avx512, 64);
    if (strcmp(set, "avx2") == 0)
        return chains(int8_avx2, 32);
#endif
    (void)set;
    return 0;
}

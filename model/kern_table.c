/* The sets, and which of them this machine can run. */
#include "model/kern_matrix.h"
#include "model/kern_rows.h"

#include <pthread.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#define MATRIX_OF(set)                                                \
    .pack_bytes = kern_##set##_pack_bytes, .pack = kern_##set##_pack, \
    .quantize = kern_##set##_quantize, .gemm = kern_##set##_gemm

const struct kernels kern_plain = {.name = "plain", MATRIX_OF(plain), KERN_ROWS_MEMBERS(plain)};
#if defined(__x86_64__)
const struct kernels kern_avx2 = {.name = "avx2", MATRIX_OF(avx2), KERN_ROWS_MEMBERS(avx2)};
const struct kernels kern_avx512 = {.name = "avx512", MATRIX_OF(avx512), KERN_ROWS_MEMBERS(avx512)};
#endif

/* Fastest first. */
static const struct kernels *const sets[] = {
#if defined(__x86_64__)
    &kern_avx512,
    &kern_avx2,
#endif
    &kern_plain,
};

#if defined(__x86_64__)
/* __builtin_cpu_supports() knows whether the system saves the wide registers; F16C, which clang's
 * does not know, comes with those of AVX. */
static bool has_avx2(void)
{
    unsigned eax, ebx, ecx, edx;

    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}

static bool has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}
#endif

static bool can_run(const struct kernels *k)
{
#if defined(__x86_64__)
    if (k == &kern_avx2)
        return has_avx2();
    if (k == &kern_avx512)
        return has_avx512();
#endif
    return k == &kern_plain;
}

const struct kernels *kern_find(const char *name)
{
    const bool any = name == NULL || strcmp(name, "auto") == 0;

    for (size_t i = 0; i < sizeof(sets) / sizeof(sets[0]); i++)
        if ((any || strcmp(name, sets[i]->name) == 0) && can_run(sets[i]))
            return sets[i];
    return NULL;
}

static const char *runnable[sizeof(sets) / sizeof(sets[0]) + 1]; /* set once, by list_runnable */

static void list_runnable(void)
{
    size_t n = 0;

    for (size_t i = 0; i < sizeof(sets) / sizeof(sets[0]); i++)
        if (can_run(sets[i]))
            runnable[n++] = sets[i]->name;
}

const char *const *model_kernel_sets(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    (void)pthread_once(&once, list_runnable);
    return runnable;
}

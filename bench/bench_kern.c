/* bench_kern [SET]...: matrix products of every weight type, one thread, for the named kernel sets
 * or all that the machine can run.
 *
 *     in cache   1536 x 576 weights against 1 to 512 tokens, 10^9 multiply-accumulates a second
 *     stream     49152 x 576 weights (an output head) against one token, beside a plain read of
 *                the same bytes: 10^9 bytes of packed weights a second
 *
 * Medians of BENCH_REPEATS runs in CPU time. */
#include "bench/bench_raw.h"
#include "model/kern.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

static const enum gguf_type types[] = {GGUF_Q4_1, GGUF_Q4_0, GGUF_Q8_0,
                                       GGUF_F16,  GGUF_BF16, GGUF_F32};
static const uint32_t token_counts[] = {1, 2, 3, 4, 6, 8, 16, 128, 512};

enum {
    N_COLS = 576,
    CACHE_ROWS = 1536,
    STREAM_ROWS = 49152,
    MAX_TOKENS = 512,
    HUGE_PAGE = 2 << 20
};

struct product {
    const struct kernels *k;
    struct kern_matrix w;
    struct kern_acts a;
    float *y;
    int n_times;
};

static void run(void *arg)
{
    struct product *p = arg;

    for (int i = 0; i < p->n_times; i++)
        p->k->gemm(&p->w, 0, p->w.n_rows, &p->a, p->y, p->w.n_rows);
}

/* A matrix in the set's own form; false without memory.  The scales are what 0x2A2A is as a half.
 */
static bool matrix_open(const struct kernels *k, enum gguf_type type, uint32_t n_rows,
                        struct kern_matrix *out, size_t *n_bytes, void **owned)
{
    uint32_t n_weights, block_bytes;
    size_t src_bytes;
    unsigned char *src;
    void *packed;

    if (!gguf_type_block(type, &n_weights, &block_bytes))
        return false;
    src_bytes = (size_t)n_rows * (N_COLS / n_weights) * block_bytes;
    src = malloc(src_bytes);
    if (!src)
        return false;
    for (size_t i = 0; i < src_bytes; i++)
        src[i] = i % block_bytes < 4 && block_bytes > 4 ? 0x2A : (unsigned char)(i * 37 & 0xBF);
    *n_bytes = k->pack_bytes(type, n_rows, N_COLS);
    packed = src;
    if (*n_bytes) {
        packed = aligned_alloc(HUGE_PAGE, (*n_bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
        if (packed) /* as a model keeps its weights; no matter where it is refused */
            (void)madvise(packed, *n_bytes, MADV_HUGEPAGE);
        if (packed)
            k->pack(type, n_rows, N_COLS, src, packed);
        free(src);
        if (!packed)
            return false;
    } else {
        *n_bytes = src_bytes;
    }
    *out = (struct kern_matrix){type, n_rows, N_COLS, packed};
    *owned = packed;
    return true;
}

static bool acts_open(struct kern_acts *a)
{
    const size_t n = (size_t)MAX_TOKENS * N_COLS, n_blocks = n / KERN_BLOCK;
    float *x = malloc(n * sizeof(float));

    *a = (struct kern_acts){MAX_TOKENS,
                            N_COLS,
                            x,
                            malloc(n),
                            malloc(n_blocks * sizeof(float)),
                            malloc(n_blocks * sizeof(float)),
                            malloc(n_blocks * sizeof(int32_t))};
    if (!x || !a->q || !a->d || !a->ds || !a->sum)
        return false;
    for (size_t i = 0; i < n; i++)
        x[i] = (float)(i * 29 % 255) - 127.0f;
    for (uint32_t t = 0; t < MAX_TOKENS; t++)
        if (kern_plain.quantize(a, t) < 0)
            return false;
    return true;
}

static void acts_close(struct kern_acts *a)
{
    free((void *)(uintptr_t)a->x);
    free(a->q);
    free(a->d);
    free(a->ds);
    free(a->sum);
}

static bool bench_cached(struct product *p, enum gguf_type type)
{
    size_t n_bytes;
    void *owned;

    if (!matrix_open(p->k, type, CACHE_ROWS, &p->w, &n_bytes, &owned))
        return false;
    for (size_t i = 0; i < COUNT(token_counts); i++) {
        const double macs = 1e-9 * CACHE_ROWS * N_COLS * token_counts[i];

        p->a.n_rows = token_counts[i];
        p->n_times = p->k == &kern_plain ? 1 : 1 + (int)(256 / token_counts[i]);
        if (p->k == &kern_plain && token_counts[i] > 8)
            printf("%8s", "-");
        else
            printf("%8.1f", macs * p->n_times / bench_median(run, p));
        fflush(stdout);
    }
    free(owned);
    return true;
}

static bool bench_stream(struct product *p, enum gguf_type type)
{
    size_t n_bytes;
    double read, used;
    void *owned;

    if (!matrix_open(p->k, type, STREAM_ROWS, &p->w, &n_bytes, &owned))
        return false;
    p->a.n_rows = 1;
    p->n_times = 1;
    used = 1e-9 * (double)n_bytes / bench_median(run, p);
    read = bench_raw_read(owned, n_bytes);
    printf("  | %6.1f of %5.1f GB/s\n", used, read);
    free(owned);
    return true;
}

static bool bench_set(const struct kernels *k, struct kern_acts *acts)
{
    struct product p = {.k = k, .a = *acts};
    bool ok = true;

    p.y = malloc(sizeof(float) *
                 (STREAM_ROWS > MAX_TOKENS * CACHE_ROWS ? STREAM_ROWS : MAX_TOKENS * CACHE_ROWS));
    if (!p.y)
        return false;
    printf("\n%s", k->name);
    if (bench_raw_fma(k->name) > 0)
        printf(": raw fma %.1f, raw int8 %.1f GMAC/s", bench_raw_fma(k->name),
               bench_raw_int8(k->name));
    printf("\n%-6s", "tokens");
    for (size_t i = 0; i < COUNT(token_counts); i++)
        printf("%8u", token_counts[i]);
    printf("  | one token, stream\n");
    for (size_t i = 0; ok && i < COUNT(types); i++) {
        printf("%-6s", gguf_type_name(types[i]));
        ok = bench_cached(&p, types[i]) && bench_stream(&p, types[i]);
    }
    free(p.y);
    return ok;
}

int main(int argc, char **argv)
{
    struct kern_acts acts = {0};
    bool ok = acts_open(&acts);

    for (int i = 1; ok && i < argc; i++)
        if (!kern_find(argv[i])) {
            fprintf(stderr, "bench_kern: %s: no such kernel set on this machine\n", argv[i]);
            acts_close(&acts);
            return 2;
        }
    for (int i = 1; ok && i < argc; i++)
        ok = bench_set(kern_find(argv[i]), &acts);
    for (const char *const *name = model_kernel_sets(); ok && argc == 1 && *name; name++)
        ok = bench_set(kern_find(*name), &acts);
    if (!ok)
        fprintf(stderr, "bench_kern: out of memory\n");
    acts_close(&acts);
    return ok ? 0 : 1;
}

/* What inserts, evictions and publishes cost as trees grow.
 *
 * The cost of an insert or an eviction must not grow with the number of entries beyond the
 * logarithm of the fan-out: a walk down a set of siblings that halves it at each step is all that
 * may depend on how many entries there are.  A step costs next to nothing in a tree of 1,000
 * entries, which is in cache, and one fetch from memory in a large one.  So
 *
 *     most(n) = cost(1,000) + log2(fan-out(n)) * step(n)
 *
 * The raw line is that step: a load whose address the one before it gave, anywhere in as much
 * memory as the tree takes.  Keys have SHORT ids, the first of them common, and each tenth context
 * stays open and pins its entry.  A publish is one more page of a context that was published as it
 * grew. */
#include "bench/bench_kvcore.h"

#include "bench/bench_raw.h"

#include <malloc.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { SHORT = 32, P = 16, N_CALLS = 4000, PIN_EVERY = 10, N_IDS = 50000 };

static const struct kv_namespace ns = {.group = 0};

/* Half of the keys end in a fork of their own, so that there are about as many nodes without entry.
 */
static void make_key(uint32_t *ids, uint32_t e)
{
    for (uint32_t i = 0; i < SHORT; i++)
        ids[i] = i < 8           ? i
                 : i < SHORT - 4 ? (uint32_t)bench_mix((uint64_t)(e / 2) * SHORT + i) % N_IDS
                                 : (uint32_t)bench_mix((uint64_t)e * SHORT + i);
}

struct growing {
    struct kv_cache *cache;
    uint32_t n;               /* entries made so far */
    struct kv_context **pins; /* [n / PIN_EVERY] */
    double base_insert, base_evict;
};

static struct kv_context *make(struct growing *g)
{
    uint32_t ids[SHORT];

    make_key(ids, g->n);
    return bench_context(g->cache, &ns, ids, SHORT);
}

static void enter(struct growing *g, struct kv_context *ctx)
{
    if (g->n % PIN_EVERY == 0)
        bench_must(kv_context_fork(ctx, SHORT, &g->pins[g->n / PIN_EVERY]), "fork");
    bench_must(kv_context_give_up(ctx, NULL, 0), "give up");
    g->n++;
}

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* Of N_CALLS times. */
static void summary(double *seconds, double *median, double *worst)
{
    qsort(seconds, N_CALLS, sizeof(seconds[0]), compare);
    *median = seconds[N_CALLS / 2];
    *worst = seconds[N_CALLS - 1];
}

/* How many children the node has from which all keys part: two keys have each id there. */
static double fan_out(uint32_t n_entries)
{
    return N_IDS * (1 - exp(-(double)n_entries / 2 / N_IDS));
}

/* Seconds of one load that waits for the one before it, in so many bytes. */
static double step(size_t bytes)
{
    enum { LINE = 64, WORDS = LINE / sizeof(size_t), N_STEPS = 200000 };
    const size_t n = bytes / LINE;
    size_t *lines = malloc(n * LINE), at = 0;
    double start;

    if (lines == NULL)
        bench_must(KV_ERR_NOMEM, "raw line");
    for (size_t i = 0; i < n; i++)
        lines[i * WORDS] = i;
    for (size_t i = n - 1; i > 0; i--) { /* one cycle through all of them */
        const size_t j = bench_mix(i) % i, line = lines[i * WORDS];

        lines[i * WORDS] = lines[j * WORDS];
        lines[j * WORDS] = line;
    }
    for (uint32_t i = 0; i < N_STEPS / 4; i++)
        at = lines[at * WORDS];
    start = bench_cpu_seconds();
    for (uint32_t i = 0; i < N_STEPS; i++)
        at = lines[at * WORDS];
    start = bench_cpu_seconds() - start;
    bench_must(at < n ? 0 : KV_ERR_CHECK, "raw line");
    free(lines);
    return start / N_STEPS;
}

static void measure(struct growing *g, uint32_t n_entries)
{
    static double insert[N_CALLS], evict[N_CALLS];
    double i_median, i_worst, e_median, e_worst, one_step, more;
    struct kv_stats s;
    bool ok;

    while (g->n < n_entries)
        enter(g, make(g));
    kv_cache_stats(g->cache, &s);
    for (uint32_t i = 0; i < N_CALLS; i++) {
        struct kv_context *ctx = make(g);
        const double start = bench_cpu_seconds();

        enter(g, ctx);
        insert[i] = bench_cpu_seconds() - start;
    }
    for (uint32_t i = 0; i < N_CALLS; i++) {
        const double start = bench_cpu_seconds();

        kv_cache_trim(g->cache, 2);
        evict[i] = bench_cpu_seconds() - start;
    }
    summary(insert, &i_median, &i_worst);
    summary(evict, &e_median, &e_worst);
    if (n_entries == 1000)
        g->base_insert = i_median, g->base_evict = e_median;
    one_step = step(s.bookkeeping_bytes);
    more = log2(fan_out(n_entries)) * one_step;
    ok = i_median <= g->base_insert + more && e_median <= g->base_evict + more && i_worst < 1e-3 &&
         e_worst < 1e-3;
    printf("%8u %8u %8.1f %9.2f <= %5.2f %8.1f %9.2f <= %5.2f %8.1f  < 1000  %s\n", n_entries,
           s.n_nodes, 1e9 * one_step, 1e6 * i_median, 1e6 * (g->base_insert + more), 1e6 * i_worst,
           1e6 * e_median, 1e6 * (g->base_evict + more), 1e6 * e_worst, bench_verdict(ok));
}

/* For as long as it takes, all that needs the cache waits. */
static void audit(const struct growing *g)
{
    struct kv_stats s;
    double start, seconds;

    kv_cache_stats(g->cache, &s);
    start = bench_cpu_seconds();
    bench_must(kv_cache_check(g->cache, NULL), "audit");
    seconds = bench_cpu_seconds() - start;
    printf("audit of %u entries, %u nodes, %u pages (%u live), %u contexts: %.1f ms\n", s.n_entries,
           s.n_nodes, s.n_pages, s.n_live, s.n_contexts, 1e3 * seconds);
}

void bench_tree(void)
{
    static const uint32_t sizes[] = {1000, 10000, 100000, 700000};
    const struct kv_cache_config config = {
        .geometry = {1, 1, 1, KV_F16},
        .page_tokens = P,
        .n_pages = 2 * (700000 + 4 * N_CALLS),
        .arena = true,
        .bookkeeping_bytes = (size_t)1 << 30,
    };
    struct growing g = {.cache = bench_cache(&config)};

    g.pins = calloc(config.n_pages / PIN_EVERY + 1, sizeof(struct kv_context *));
    if (g.pins == NULL)
        bench_must(KV_ERR_NOMEM, "pins");
    printf("\n entries    nodes  step ns    insert us        worst     evict us        worst us\n");
    for (uint32_t i = 0; i < N_CALLS; i++) /* the first of anything is slow */
        enter(&g, make(&g));
    kv_cache_trim(g.cache, 2 * N_CALLS);
    g.n = 0;
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
        measure(&g, sizes[i]);
    audit(&g);
    for (uint32_t i = 0; i <= config.n_pages / PIN_EVERY; i++)
        kv_context_close(g.pins[i]);
    free(g.pins);
    kv_cache_close(g.cache);
}

/* ---- Publishing as a context grows ---- */

enum { N_PAGES = 16384, FIRST = 256 };

/* The mean since the context was half as long: now and then a list has to be moved. */
void bench_publish(void)
{
    const struct kv_cache_config config = {
        .geometry = {1, 1, 1, KV_F16},
        .n_pages = N_PAGES,
        .arena = true,
        .bookkeeping_bytes = (size_t)64 << 20, /* or an insert would make room by its last entry */
    };
    struct kv_cache *cache = bench_cache(&config);
    uint32_t ids[KV_PAGE_TOKENS_DEFAULT];
    struct kv_context *ctx;
    double seconds = 0, base = 0;

    printf("\npublish, one page more\n   positions        us   / at first\n");
    bench_must(kv_context_open(cache, &ns, &ctx), "open");
    for (uint32_t page = 1; page <= N_PAGES; page++) {
        double start, mean;

        for (uint32_t i = 0; i < KV_PAGE_TOKENS_DEFAULT; i++)
            ids[i] = (uint32_t)bench_mix((uint64_t)page * KV_PAGE_TOKENS_DEFAULT + i);
        bench_must(kv_context_begin(ctx, ids, KV_PAGE_TOKENS_DEFAULT), "begin");
        bench_must(kv_context_commit(ctx, KV_PAGE_TOKENS_DEFAULT), "commit");
        start = bench_cpu_seconds();
        bench_must(kv_context_publish(ctx, NULL, 0), "publish");
        seconds += bench_cpu_seconds() - start;
        if (page < FIRST || (page & (page - 1)) != 0)
            continue;
        mean = seconds / (page == FIRST ? FIRST : page / 2);
        base = page == FIRST ? mean : base;
        printf("%12u  %8.2f      %5.2f  <= 2.00  %s\n", page * KV_PAGE_TOKENS_DEFAULT, 1e6 * mean,
               mean / base, bench_verdict(mean <= 2 * base));
        seconds = 0;
    }
    kv_context_close(ctx);
    kv_cache_close(cache);
}

/* ---- Memory ---- */

/* 1,000 prefixes of 1,000 ids; half of each is the same as its neighbour's, but was computed anew,
 * so that they share an edge and no page. */
void bench_memory(void)
{
    enum { N_PREFIXES = 1000, N = 1000 };
    const struct kv_cache_config config = {.geometry = {30, 3, 64, KV_F16},
                                           .n_pages = N_PREFIXES * 16 + 16,
                                           .bookkeeping_bytes = (size_t)64 << 20};
    const struct kv_cache_config small = {.geometry = {1, 1, 1, KV_F16},
                                          .n_pages = N_PREFIXES * 16 + 16,
                                          .arena = true,
                                          .bookkeeping_bytes = config.bookkeeping_bytes};
    struct kv_cache *cache = bench_cache(&small);
    size_t heap = mallinfo2().uordblks;
    struct kv_layout layout;
    struct kv_stats s;
    uint32_t ids[N];

    bench_must(kv_layout_init(&layout, &config.geometry, KV_PAGE_TOKENS_DEFAULT, NULL), "layout");
    for (uint32_t e = 0; e < N_PREFIXES; e++) {
        for (uint32_t i = 0; i < N; i++)
            ids[i] = (uint32_t)bench_mix((uint64_t)(i < N / 2 ? e / 2 : e) * N + i) % 50000;
        bench_must(kv_context_give_up(bench_context(cache, &ns, ids, N), NULL, 0), "give up");
    }
    heap = mallinfo2().uordblks - heap;
    kv_cache_stats(cache, &s);
    printf(
        "\nmemory of 1,000 prefixes of 1,000 ids: %u pages; bookkeeping %.2f MB counted, %.2f MB "
        "of heap, %.2f  <= 1.10  %s\n",
        s.n_live, 1e-6 * (double)s.bookkeeping_bytes, 1e-6 * (double)heap,
        (double)heap / (double)s.bookkeeping_bytes,
        bench_verdict((double)heap <= 1.1 * (double)s.bookkeeping_bytes));
    printf("at 30 x 3 x 64 in f16 their pages are %.1f MB and bookkeeping is %.3f %% of that\n",
           1e-6 * (double)layout.page_bytes * s.n_live,
           100 * (double)s.bookkeeping_bytes / ((double)layout.page_bytes * s.n_live));
    kv_cache_close(cache);
}

/* bench_kvcore [PART]...: what kvcore's calls cost, each beside a raw line that does the least that
 * such a call must do, timed in turn with it.  CPU time of one thread, medians.
 *
 *     rows     position-major rows out of pages and into them, beside memcpy
 *     fork     context forks, beside copies of the list and increments of the counts
 *     clone    the first write after a fork, beside memcpy and memset of the page
 *     match    prompts in trees of 1 to 100,000 entries, beside memcmp of their ids
 *     tree     inserts and evictions in trees of up to a million nodes
 *     publish  one page more of a context that is published as it grows
 *     memory   what 1,000 prefixes of 1,000 ids take
 *     threads  two threads on disjoint prefixes beside one
 *
 * A line that misses its target says so, and the exit status is 1. */
#include "bench/bench_kvcore.h"

#include "bench/bench_raw.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int n_missed;

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double timed(void (*prepare)(void *arg), void (*fn)(void *arg, uint32_t n), void *arg,
                    uint32_t n)
{
    double start;

    if (prepare != NULL)
        prepare(arg);
    start = bench_cpu_seconds();
    fn(arg, n);
    return (bench_cpu_seconds() - start) / n;
}

void pair_run_prepared(struct pair *p, void (*prepare)(void *arg),
                       void (*ours)(void *arg, uint32_t n), void (*raw)(void *arg, uint32_t n),
                       void *arg, uint32_t n)
{
    timed(prepare, raw, arg, n);
    timed(prepare, ours, arg, n);
    for (int i = 0; i < PAIR_REPEATS; i++) {
        if (i % 2 == 0)
            p->raw[i] = timed(prepare, raw, arg, n);
        p->ours[i] = timed(prepare, ours, arg, n);
        if (i % 2 != 0)
            p->raw[i] = timed(prepare, raw, arg, n);
    }
}

void pair_run(struct pair *p, void (*ours)(void *arg, uint32_t n),
              void (*raw)(void *arg, uint32_t n), void *arg, uint32_t n)
{
    pair_run_prepared(p, NULL, ours, raw, arg, n);
}

static double median(const double *values)
{
    double v[PAIR_REPEATS];

    memcpy(v, values, sizeof(v));
    qsort(v, PAIR_REPEATS, sizeof(v[0]), compare);
    return v[PAIR_REPEATS / 2];
}

double pair_ours(const struct pair *p)
{
    return median(p->ours);
}

double pair_raw(const struct pair *p)
{
    return median(p->raw);
}

double pair_ratio(const struct pair *p, double ns)
{
    double ratio[PAIR_REPEATS];

    for (int i = 0; i < PAIR_REPEATS; i++)
        ratio[i] = (p->ours[i] - 1e-9 * ns) / p->raw[i];
    return median(ratio);
}

const char *bench_verdict(bool met)
{
    n_missed += !met;
    return met ? "ok" : "MISSED";
}

const char *pair_verdict(const struct pair *p, double most, double ns)
{
    return bench_verdict(pair_ratio(p, ns) <= most);
}

uint64_t bench_mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

void bench_must(int rc, const char *what)
{
    if (rc >= 0)
        return;
    fprintf(stderr, "bench_kvcore: %s: %s\n", what, kv_strerror(rc));
    exit(2);
}

struct kv_cache *bench_cache(const struct kv_cache_config *config)
{
    struct kv_cache *cache;
    struct kv_why why;
    int rc = kv_cache_open(config, &cache, &why);

    bench_must(rc, rc < 0 ? why.text : "");
    return cache;
}

struct kv_context *bench_context(struct kv_cache *cache, const struct kv_namespace *ns,
                                 const uint32_t *ids, uint32_t n)
{
    struct kv_context *ctx;

    bench_must(kv_context_open(cache, ns, &ctx), "open");
    bench_must(kv_context_begin(ctx, ids, n), "begin");
    bench_must(kv_context_commit(ctx, n), "commit");
    return ctx;
}

static const struct {
    const char *name;
    void (*run)(void);
} parts[] = {
    {"rows", bench_rows},     {"fork", bench_fork},       {"clone", bench_clone},
    {"match", bench_match},   {"tree", bench_tree},       {"publish", bench_publish},
    {"memory", bench_memory}, {"threads", bench_threads},
};

enum { N_PARTS = sizeof(parts) / sizeof(parts[0]) };

static bool asked_for(const char *name, int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], name) == 0)
            return true;
    return argc == 1;
}

int main(int argc, char **argv)
{
    for (size_t i = 0; i < N_PARTS; i++)
        if (asked_for(parts[i].name, argc, argv))
            parts[i].run();
    if (n_missed > 0)
        printf("\n%d of the targets missed\n", n_missed);
    return n_missed > 0;
}

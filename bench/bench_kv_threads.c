/* Two threads on disjoint prefixes of one namespace beside one thread that does as much as each.
 * The lines without a target are where threads meet all the same: prefixes that have their first id
 * in common are in one shard, so in one lock, and in a cache that is full each request evicts,
 * which takes all locks.
 *
 * Wall time, since waiting is what is asked for; so a window counts only if no thread was taken off
 * its CPU in it, and each is pinned to its own.  On a machine that is busy there may be too few,
 * and then there is no verdict.  The raw line is the same with memory that nobody shares: what two
 * threads can have at most here.  Where pages are large that is how fast memory is. */
#include "bench/bench_kvcore.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

enum { N = 1000, KEEP = 960, MAX_THREADS = 2, WINDOWS = 15, TRIES = 600 };
enum { LARGE = 30 * 2 * 64 * 3 * 64 * 2, N_LARGE = 64 }; /* bytes of a large page, pages */

static const struct kv_namespace ns = {.group = 0};

struct worker {
    struct kv_cache *cache;
    uint32_t me;
    uint32_t n_ops;
    void (*op)(struct worker *w);
    uint32_t ids[N];
    uint32_t serial; /* of the last request */
    int sum;
    uint32_t *copies[2];       /* of the raw line */
    unsigned char *memory;     /* of the raw line of large pages */
    struct kv_context *holder; /* of the first KEEP ids */
    double seconds;
    bool disturbed;
    bool full; /* what requests leave stays, so that the next ones have to evict */
};

/* ---- What a thread does ---- */

static struct kv_context *match(struct worker *w)
{
    struct kv_context *ctx;

    bench_must(kv_cache_match(w->cache, &ns, w->ids, N, N, NULL, 0, &ctx, NULL), "match");
    return ctx;
}

static void op_match(struct worker *w)
{
    kv_context_close(match(w));
}

/* A prompt of which KEEP ids are known; the rest is computed and all of it given to the tree. */
static void op_request(struct worker *w)
{
    struct kv_context *ctx;

    w->serial++;
    for (uint32_t i = KEEP; i < N; i++)
        w->ids[i] = (uint32_t)bench_mix((uint64_t)w->serial * N + i);
    ctx = match(w);
    bench_must(kv_context_begin(ctx, w->ids + kv_context_length(ctx), N - kv_context_length(ctx)),
               "begin");
    bench_must(kv_context_commit(ctx, N - kv_context_length(ctx)), "commit");
    bench_must(kv_context_give_up(ctx, NULL, 0), "give up");
}

/* The page that a request of large pages zeroes. */
static void op_raw_page(struct worker *w)
{
    memset(w->memory + w->serial++ % N_LARGE * LARGE, 0, LARGE);
}

static void op_raw(struct worker *w)
{
    for (int i = 0; i < 8; i++)
        w->sum += memcmp(w->copies[0], w->copies[1], N * sizeof(uint32_t));
}

/* ---- Windows ---- */

static atomic_uint n_ready;

static void *run(void *arg)
{
    struct worker *w = arg;
    struct timespec from, to;
    struct rusage before, after;
    cpu_set_t cpu;

    CPU_ZERO(&cpu);
    CPU_SET(w->me, &cpu);
    pthread_setaffinity_np(pthread_self(), sizeof(cpu), &cpu);
    for (uint32_t i = 0; i < w->n_ops / 8; i++)
        w->op(w);
    getrusage(RUSAGE_THREAD, &before);
    atomic_fetch_sub(&n_ready, 1);
    while (atomic_load(&n_ready) > 0)
        ;
    clock_gettime(CLOCK_MONOTONIC, &from);
    for (uint32_t i = 0; i < w->n_ops; i++)
        w->op(w);
    clock_gettime(CLOCK_MONOTONIC, &to);
    getrusage(RUSAGE_THREAD, &after);
    w->seconds = (double)(to.tv_sec - from.tv_sec) + 1e-9 * (double)(to.tv_nsec - from.tv_nsec);
    w->disturbed = after.ru_nivcsw > before.ru_nivcsw;
    return NULL;
}

/* Seconds until the last is done, or 0 where one was disturbed. */
static double window(struct worker *w, uint32_t n_threads)
{
    pthread_t threads[MAX_THREADS];
    double seconds = 0;

    atomic_store(&n_ready, n_threads);
    for (uint32_t i = 0; i < n_threads; i++)
        if (pthread_create(&threads[i], NULL, run, &w[i]) != 0)
            bench_must(KV_ERR_NOMEM, "thread");
    for (uint32_t i = 0; i < n_threads; i++)
        pthread_join(threads[i], NULL);
    for (uint32_t i = 0; i < n_threads; i++) {
        if (w[i].disturbed)
            return 0;
        seconds = w[i].seconds > seconds ? w[i].seconds : seconds;
    }
    return seconds;
}

static double undisturbed(struct worker *w, uint32_t n_threads, uint32_t *n_tries)
{
    double seconds = 0;

    while (seconds <= 0 && ++*n_tries < TRIES) {
        seconds = window(w, n_threads);
        if (!w[0].full)
            kv_cache_trim(w[0].cache, UINT32_MAX); /* what requests left */
    }
    return seconds;
}

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double median(double *v, uint32_t n)
{
    qsort(v, n, sizeof(v[0]), compare);
    return v[n / 2];
}

static void line(struct worker *w, const char *name, void (*op)(struct worker *), uint32_t n_ops,
                 double least)
{
    double one[WINDOWS], two[WINDOWS], speed[WINDOWS];
    uint32_t n = 0, n_tries = 0;

    for (uint32_t i = 0; i < MAX_THREADS; i++)
        w[i].op = op, w[i].n_ops = n_ops;
    while (n < WINDOWS && n_tries < TRIES) {
        one[n] = undisturbed(w, 1, &n_tries);
        two[n] = undisturbed(w, 2, &n_tries);
        if (one[n] <= 0 || two[n] <= 0)
            break;
        speed[n] = 2 * one[n] / two[n];
        n++;
    }
    if (n < 5) {
        printf("%-40s too busy: %u undisturbed windows of %u\n", name, n, n_tries);
        return;
    }
    printf("%-40s %8.2f %8.2f    %5.2f", name, 1e6 * median(one, n) / n_ops,
           1e6 * median(two, n) / n_ops, median(speed, n));
    if (least > 0)
        printf("  >= %.2f  %s\n", least, bench_verdict(median(speed, n) >= least));
    else
        printf("\n");
}

/* The threads' prompts differ from id `apart` on. */
static void open_workers(struct worker *w, const struct kv_geometry *g, uint32_t n_pages,
                         uint32_t apart)
{
    const struct kv_cache_config config = {
        .geometry = *g, .n_pages = n_pages, .arena = true, .bookkeeping_bytes = (size_t)256 << 20};
    struct kv_cache *cache = bench_cache(&config);

    memset(w, 0, MAX_THREADS * sizeof(*w));
    for (uint32_t t = 0; t < MAX_THREADS; t++) {
        w[t].cache = cache;
        w[t].me = t;
        for (uint32_t i = 0; i < N; i++)
            w[t].ids[i] = (uint32_t)bench_mix((i < apart ? 0 : t * N) + i);
        for (uint32_t i = 0; i < 2; i++)
            w[t].copies[i] = calloc(N, sizeof(uint32_t));
        w[t].memory = calloc(N_LARGE, LARGE);
        if (w[t].copies[0] == NULL || w[t].copies[1] == NULL || w[t].memory == NULL)
            bench_must(KV_ERR_NOMEM, "raw lines");
        w[t].holder = bench_context(cache, &ns, w[t].ids, KEEP);
        bench_must(kv_context_publish(w[t].holder, NULL, 0), "publish");
    }
}

static void close_workers(struct worker *w)
{
    for (uint32_t t = 0; t < MAX_THREADS; t++) {
        kv_context_close(w[t].holder);
        free(w[t].copies[0]);
        free(w[t].copies[1]);
        free(w[t].memory);
    }
    kv_cache_close(w[0].cache);
}

void bench_threads(void)
{
    const struct kv_geometry small = {1, 1, 1, KV_F16}, large = {30, 3, 64, KV_F16};
    static struct worker w[MAX_THREADS];

    printf("\ntwo threads on disjoint prefixes            one us   two us   speed\n");
    open_workers(w, &small, 20000, 0);
    line(w, "memcmp of the same ids", op_raw, 4000, 0);
    line(w, "match and close", op_match, 4000, 1.8);
    line(w, "match, append, give up", op_request, 2000, 1.8);
    bench_must(kv_cache_set_quota(w[0].cache, ns.group, 19000), "quota");
    line(w, "the same, with a quota", op_request, 2000, 1.8);
    close_workers(w);
    open_workers(w, &large, 1100, 0);
    line(w, "memset of 1.4 MiB", op_raw_page, 8, 0);
    line(w, "the same, pages of 1.4 MiB", op_request, 8, 1.8);
    close_workers(w);
    printf("two threads that meet\n");
    open_workers(w, &small, 20000, 1);
    line(w, "one first id, one lock: match and close", op_match, 2000, 0);
    line(w, "the same: match, append, give up", op_request, 1000, 0);
    close_workers(w);
    open_workers(w, &small, 1200, 0);
    w[0].full = true;
    line(w, "full cache, all locks: the same", op_request, 2000, 0);
    close_workers(w);
}

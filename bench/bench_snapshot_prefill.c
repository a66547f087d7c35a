#include "bench/bench_snapshot.h"
#include "model/model.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { CHUNK = 512, N_LENGTHS = 7, N_QUICK = 4, PREFILL_ROUNDS = 3 };

static const uint32_t lengths[N_LENGTHS] = {8, 32, 64, 512, 2048, 4096, 8192};

struct prefill {
    struct gguf *gguf;
    struct model *model;
    struct kv_cache *cache;
    struct engine *engine;
    struct kv_store *store;
    struct kv_context *ctx; /* as far as it was computed */
    uint32_t *ids;
    float *logits;
    const char *directory;
};

/* Seconds by length. */
struct times {
    double prefill[N_LENGTHS], hot[N_LENGTHS], cold[N_LENGTHS];
};

/* t = c[0] + n c[1] + n^2 c[2]; the last is for attention, of which a restore has none. */
enum { N_TERMS = 3 };
struct cost {
    double c[N_TERMS];
};

static void open_model(struct prefill *p, const struct bench_options *o)
{
    struct engine_config config = {.n_threads = 1, .max_rows = CHUNK, .max_items = 1};
    struct kv_geometry g;
    struct kv_why why = {""};

    must(gguf_open(o->model, &p->gguf, &why), &why, "model");
    must(model_open(p->gguf, NULL, &p->model, &why), &why, "model");
    model_geometry(p->model, KV_F16, &g);
    p->cache = open_cache(&g, 3 * lengths[N_LENGTHS - 1]);
    config.model = p->model;
    config.cache = p->cache;
    must(engine_open(&config, &p->engine, &why), &why, "engine");
    p->store = open_store(o->directory, &g, 0, KV_DURABLE);
    p->ids = must_have(calloc(lengths[N_LENGTHS - 1], sizeof(*p->ids)));
    p->logits = must_have(calloc(model_params(p->model)->n_vocab, sizeof(*p->logits)));
    for (uint32_t i = 0; i < lengths[N_LENGTHS - 1]; i++)
        p->ids[i] =
            (uint32_t)(((uint64_t)i * 2654435761u + 12345) % model_params(p->model)->n_vocab);
}

static void close_model(struct prefill *p)
{
    free(p->logits);
    free(p->ids);
    kv_store_close(p->store);
    engine_close(p->engine);
    kv_cache_close(p->cache);
    model_close(p->model);
    gguf_close(p->gguf);
}

static void compute(struct prefill *p, uint32_t n)
{
    for (uint32_t at = 0; at < n; at += CHUNK) {
        const uint32_t k = n - at < CHUNK ? n - at : CHUNK;
        struct engine_item item = {.ctx = p->ctx,
                                   .ids = p->ids + at,
                                   .n_ids = k,
                                   .logits = at + k == n ? p->logits : NULL};

        must(engine_step(p->engine, &item, 1), NULL, "step");
        must(item.rc, &item.why, "step");
    }
}

/* Compute n positions from nothing; the context stays open in p->ctx. */
static double time_prefill(struct prefill *p, uint32_t n)
{
    struct stopwatch t;

    must(kv_context_open(p->cache, &bench_ns, &p->ctx), NULL, "context");
    must(kv_context_reserve(p->ctx, n), NULL, "reserve");
    t = stopwatch_start();
    compute(p, n);
    return stopwatch_read(t).wall;
}

static double time_restore(struct prefill *p, const struct kv_snapshot_info *saved)
{
    const struct kv_restore restore = {.id = saved->id,
                                       .cache = p->cache,
                                       .ns = bench_ns,
                                       .logits = p->logits,
                                       .n_logits = model_params(p->model)->n_vocab};
    struct kv_restored restored;
    struct kv_why why = {""};
    struct stopwatch t = stopwatch_start();

    must(kv_store_restore(p->store, &restore, &restored, &why), &why, "restore");
    t = stopwatch_read(t);
    kv_context_close(restored.ctx);
    return t.wall;
}

static double median_of(struct prefill *p, const struct kv_snapshot_info *saved, const char *path,
                        void (*prepare)(const char *path))
{
    double t[SNAPSHOT_ROUNDS];

    for (int i = -1; i < SNAPSHOT_ROUNDS; i++) {
        prepare(path);
        if (i < 0)
            time_restore(p, saved);
        else
            t[i] = time_restore(p, saved);
    }
    return rounds_median(t);
}

/* The middle of PREFILL_ROUNDS, but of the long ones, which take long enough, the only one. */
static double prefill_of(struct prefill *p, uint32_t n)
{
    double t[PREFILL_ROUNDS];

    for (int i = 0; i < PREFILL_ROUNDS; i++) {
        t[i] = time_prefill(p, n);
        if (n > CHUNK)
            return t[i];
        if (i < PREFILL_ROUNDS - 1)
            kv_context_close(p->ctx);
    }
    return fmax(fmin(t[0], t[1]), fmin(fmax(t[0], t[1]), t[2]));
}

static void run_length(struct prefill *p, uint32_t i, struct times *times)
{
    struct kv_save save = {
        .full = true, .logits = p->logits, .n_logits = model_params(p->model)->n_vocab};
    struct kv_snapshot_info saved;
    struct kv_why why = {""};
    char id[KV_SNAPSHOT_ID_TEXT], path[PATH_MAX];

    times->prefill[i] = prefill_of(p, lengths[i]);
    save.ctx = p->ctx;
    must(kv_store_save(p->store, &save, &saved, &why), &why, "save");
    kv_context_close(p->ctx);
    kv_snapshot_id_print(&saved.id, id);
    snprintf(path, sizeof(path), "%s/%s.kv", p->directory, id);
    times->cold[i] = median_of(p, &saved, path, file_cool);
    times->hot[i] = median_of(p, &saved, path, file_warm);
    must(kv_store_delete(p->store, &saved.id, NULL), NULL, "delete");
}

static double at(const struct cost *cost, double n)
{
    return cost->c[0] + n * (cost->c[1] + n * cost->c[2]);
}

/* Solve m x = y for the first n_terms, by elimination; m is symmetric and positive. */
static struct cost solve(double m[N_TERMS][N_TERMS], double *y, int n_terms)
{
    struct cost cost = {{0}};

    for (int k = 0; k < n_terms; k++)
        for (int i = k + 1; i < n_terms; i++) {
            const double f = m[i][k] / m[k][k];

            for (int j = k; j < n_terms; j++)
                m[i][j] -= f * m[k][j];
            y[i] -= f * y[k];
        }
    for (int k = n_terms - 1; k >= 0; k--) {
        cost.c[k] = y[k];
        for (int j = k + 1; j < n_terms; j++)
            cost.c[k] -= m[k][j] * cost.c[j];
        cost.c[k] /= m[k][k];
    }
    return cost;
}

/* Least squares of the relative error, so that the short ones count as much. */
static struct cost fit(const double *t, uint32_t n, int n_terms)
{
    double m[N_TERMS][N_TERMS] = {{0}}, y[N_TERMS] = {0};

    for (uint32_t k = 0; k < n; k++)
        for (int i = 0; i < n_terms; i++) {
            y[i] += pow(lengths[k], i) / t[k];
            for (int j = 0; j < n_terms; j++)
                m[i][j] += pow(lengths[k], i + j) / (t[k] * t[k]);
        }
    return solve(m, y, n_terms);
}

/* The shortest context that is restored faster than it is computed, by the fitted costs. */
static uint32_t crossover(const struct cost *restore, const struct cost *prefill)
{
    uint32_t n = 1;

    while (n < lengths[N_LENGTHS - 1] && at(restore, n) >= at(prefill, n))
        n++;
    return n;
}

static void print_cost(const char *what, const struct cost *cost)
{
    printf("| %s | %.3f | %.3f | %.3f |", what, 1e3 * cost->c[0], 1e6 * cost->c[1],
           1e9 * cost->c[2]);
}

void bench_prefill(const struct bench_options *o)
{
    const uint32_t n = o->quick ? N_QUICK : N_LENGTHS;
    struct prefill p = {.directory = o->directory};
    struct cost prefill, hot, cold;
    struct times t;

    open_model(&p, o);
    printf("%s, kernels %s, one thread, KV f16: %zu bytes a position.\n\n",
           model_params(p.model)->name, model_kernels(p.model),
           kv_position_bytes(&kv_cache_layout(p.cache)->geometry));
    printf(
        "| positions | MB | prefill ms | tok/s | cold restore ms | of prefill | hot restore ms | "
        "of prefill | target |\n|---:|---:|---:|---:|---:|---:|---:|---:|---|\n");
    for (uint32_t i = 0; i < n; i++) {
        run_length(&p, i, &t);
        printf("| %u | %.1f | %.1f | %.0f | %.2f | %.0fx | %.2f | %.0fx |", lengths[i],
               1e-6 * lengths[i] * (double)kv_position_bytes(&kv_cache_layout(p.cache)->geometry),
               1e3 * t.prefill[i], lengths[i] / t.prefill[i], 1e3 * t.cold[i],
               t.prefill[i] / t.cold[i], 1e3 * t.hot[i], t.prefill[i] / t.hot[i]);
        if (lengths[i] == 512)
            printf(" at least 91x hot: %s |\n", target(t.prefill[i] / t.hot[i] >= 91));
        else
            printf(" |\n");
        fflush(stdout);
    }
    prefill = fit(t.prefill, n, 3);
    hot = fit(t.hot, n, 2);
    cold = fit(t.cold, n, 2);
    printf("\nFitted, t = a + n b + n^2 c, and from which length on a restore is faster:\n\n"
           "| | a ms | b us | c ns | from n |\n|---|---:|---:|---:|---:|\n");
    print_cost("prefill", &prefill);
    printf(" |\n");
    print_cost("cold restore", &cold);
    printf(" %u |\n", crossover(&cold, &prefill));
    print_cost("hot restore", &hot);
    printf(" %u |\n\n", crossover(&hot, &prefill));
    close_model(&p);
}

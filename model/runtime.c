#include "model/model.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* A step of n rows takes (n + c) / s: c, the rows that a step's fixed cost is worth, is measured
 * once at open; s, rows a second, follows the machine.  Without c a busy moment would shrink the
 * chunks, small chunks would look slow, and they would stay small. */
enum {
    MEASURE_ROWS = 64,
    MEASURE_FEW_ROWS = 16,
    MEASURE_TIMES = 2,                  /* the quicker counts */
    MEASURE_MAX_NS = 500 * 1000 * 1000, /* a model slower than this is measured by one step */
    MAX_OVERHEAD_ROWS = 256,
    /* Where nothing could be measured. */
    UNMEASURED_CHUNK = 64,
};

static int64_t now_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static uint32_t smaller(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* The option that says how many pages there are, and its value, as one would type it. */
static void print_budget(char *out, size_t n, const struct runtime_config *config)
{
    static const char units[] = "KMGT";
    unsigned long long v = config->kv_bytes;
    size_t unit = 0;

    if (config->n_pages != 0) {
        snprintf(out, n, "--pages %u", config->n_pages);
        return;
    }
    for (; v != 0 && v % 1024 == 0 && unit < sizeof(units) - 1; unit++)
        v /= 1024;
    snprintf(out, n, "--kv-bytes %llu%.*s", v, unit > 0, unit > 0 ? &units[unit - 1] : "");
}

/* Most positions of a context. */
static int set_context(const struct runtime_config *config, struct runtime *r, struct kv_why *why)
{
    const uint64_t n_positions = (uint64_t)r->n_pages * r->page_tokens;
    const uint32_t wanted = config->max_context;

    r->n_ctx = model_params(r->model)->n_ctx;
    if (wanted > r->n_ctx)
        return kv_fail(why, MODEL_ERR_OPTION, "--max-context %u: the model has %u", wanted,
                       r->n_ctx);
    if (wanted > n_positions)
        return kv_fail(why, MODEL_ERR_OPTION, "--max-context %u: the pages hold %llu positions",
                       wanted, (unsigned long long)n_positions);
    if (wanted != 0)
        r->n_ctx = wanted;
    if (n_positions < r->n_ctx)
        r->n_ctx = (uint32_t)n_positions;
    return 0;
}

static int open_cache(const struct runtime_config *config, struct runtime *r, struct kv_why *why)
{
    struct kv_cache_config c = {.geometry = r->geometry, .arena = true};
    struct kv_layout layout;
    uint64_t n_pages = config->n_pages;
    struct kv_why refused = {.text = ""};
    char budget[64];
    int rc;

    c.page_tokens = config->page_tokens != 0 ? config->page_tokens : KV_PAGE_TOKENS_DEFAULT;
    rc = kv_geometry_check(&r->geometry, &refused);
    if (rc < 0)
        return kv_fail(why, MODEL_ERR_OPTION, "--kv-precision %s: %s",
                       kv_precision_name(r->geometry.precision), refused.text);
    rc = kv_layout_init(&layout, &r->geometry, c.page_tokens, &refused);
    if (rc < 0)
        return kv_fail(why, MODEL_ERR_OPTION, "--page %u: %s", c.page_tokens, refused.text);
    print_budget(budget, sizeof(budget), config);
    if (n_pages == 0)
        n_pages = config->kv_bytes / layout.page_bytes;
    if (n_pages == 0)
        return kv_fail(why, MODEL_ERR_OPTION, "%s: a page has %zu bytes", budget,
                       layout.page_bytes);
    c.n_pages = n_pages > UINT32_MAX ? UINT32_MAX : (uint32_t)n_pages;
    rc = kv_cache_open(&c, &r->cache, &refused);
    if (rc < 0)
        return kv_fail(why, MODEL_ERR_OPTION, "%s: %s", budget,
                       refused.text[0] != '\0' ? refused.text : kv_strerror(rc));
    r->n_pages = c.n_pages;
    r->page_tokens = c.page_tokens;
    return set_context(config, r, why);
}

/* One step in a context that is thrown away.  It also brings the weights into memory. */
static int measure_step(struct runtime *r, uint32_t n_rows, int64_t *ns)
{
    struct kv_namespace space = {0};
    struct engine_item item = {.n_ids = n_rows};
    uint32_t ids[MEASURE_ROWS], n_vocab = model_params(r->model)->n_vocab;
    int64_t start;
    int rc;

    for (uint32_t i = 0; i < n_rows; i++)
        ids[i] = i % n_vocab;
    item.ids = ids;
    rc = kv_context_open(r->cache, &space, &item.ctx);
    if (rc < 0)
        return rc;
    rc = kv_context_reserve(item.ctx, n_rows);
    if (rc == 0) {
        start = now_ns();
        rc = engine_step(r->engine, &item, 1);
        *ns = now_ns() - start;
    }
    kv_context_close(item.ctx);
    return rc < 0 ? rc : item.rc;
}

/* The quickest of a few steps of n_rows. */
static int measure_rows(struct runtime *r, uint32_t n_rows, int64_t *out)
{
    int64_t best = INT64_MAX, ns = 0;

    for (int i = 0; i < MEASURE_TIMES && (i == 0 || best < MEASURE_MAX_NS); i++) {
        int rc = measure_step(r, n_rows, &ns);

        if (rc < 0)
            return rc;
        best = ns < best ? ns : best;
    }
    *out = best > 0 ? best : 1;
    return 0;
}

/* A model that cannot run these ids is no reason not to serve: then the chunk is a fixed guess. */
static void measure(struct runtime *r)
{
    const uint32_t few = smaller(MEASURE_FEW_ROWS, r->n_ctx),
                   many = smaller(MEASURE_ROWS, r->n_ctx);
    int64_t t_few, t_many, c;

    if (measure_rows(r, few, &t_few) < 0)
        return;
    runtime_took(r, few, t_few);
    if (t_few > MEASURE_MAX_NS || many == few || measure_rows(r, many, &t_many) < 0)
        return;
    if (t_many > t_few) {
        c = (t_few * many - t_many * few) / (t_many - t_few);
        r->overhead_rows = c < 0 ? 0 : smaller((uint32_t)c, MAX_OVERHEAD_ROWS);
    }
    atomic_store(&r->rows_per_s, 0);
    runtime_took(r, many, t_many);
}

static int check_kernels(const char *name, struct kv_why *why)
{
    const char *const *sets = model_kernel_sets();

    if (name == NULL || strcmp(name, "auto") == 0)
        return 0;
    for (; *sets != NULL; sets++)
        if (strcmp(*sets, name) == 0)
            return 0;
    return kv_fail(why, MODEL_ERR_OPTION, "--kernels %s: not built, or cannot run here", name);
}

int runtime_open(const struct runtime_config *config, struct runtime *out, struct kv_why *why)
{
    struct runtime *r = out;
    struct engine_config e = {.n_threads = config->n_threads, .max_items = config->max_items};
    int rc;

    memset(r, 0, sizeof(*r));
    rc = gguf_open(config->path, &r->gguf, why);
    if (rc < 0)
        goto fail;
    rc = check_kernels(config->kernels, why);
    if (rc < 0)
        goto fail;
    rc = model_open(r->gguf, config->kernels, &r->model, why);
    if (rc < 0)
        goto fail;
    model_geometry(r->model, config->precision, &r->geometry);
    rc = open_cache(config, r, why);
    if (rc < 0)
        goto fail;
    r->fixed_chunk = config->chunk;
    e.model = r->model;
    e.cache = r->cache;
    e.max_rows = (r->fixed_chunk != 0 ? r->fixed_chunk : RUNTIME_MAX_CHUNK) + config->max_items;
    if (e.max_rows < MEASURE_ROWS)
        e.max_rows = MEASURE_ROWS;
    rc = engine_open(&e, &r->engine, why);
    if (rc < 0)
        goto fail;
    measure(r);
    return 0;

fail:
    runtime_close(r);
    return rc;
}

void runtime_close(struct runtime *r)
{
    engine_close(r->engine);
    kv_cache_close(r->cache);
    model_close(r->model);
    gguf_close(r->gguf);
    memset(r, 0, sizeof(*r));
}

uint32_t runtime_chunk(const struct runtime *r, uint32_t budget_ms)
{
    uint64_t n = atomic_load(&r->rows_per_s);

    if (r->fixed_chunk != 0)
        return r->fixed_chunk;
    if (n == 0)
        return UNMEASURED_CHUNK;
    n = n * budget_ms / 1000;
    n -= n < r->overhead_rows ? n : r->overhead_rows;
    /* Kernels work on tiles of 16 rows; a broken tile costs as much as a whole one. */
    n -= n % KV_LANES;
    if (n < KV_LANES)
        return KV_LANES;
    return n > RUNTIME_MAX_CHUNK ? RUNTIME_MAX_CHUNK : (uint32_t)n;
}

void runtime_took(struct runtime *r, uint32_t n_rows, int64_t ns)
{
    uint64_t now, before = atomic_load(&r->rows_per_s);

    if (ns <= 0)
        return;
    now = ((uint64_t)n_rows + r->overhead_rows) * 1000000000u / (uint64_t)ns;
    if (before != 0)
        now = (before * 3 + now) / 4;
    if (now == 0)
        now = 1;
    atomic_store(&r->rows_per_s, now > UINT32_MAX ? UINT32_MAX : (uint32_t)now);
}

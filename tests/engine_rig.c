#include "engine_rig.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void rig_open(struct rig *r, const struct rig_config *config)
{
    struct kv_cache_config cache = {.page_tokens = config->page_tokens};
    struct engine_config engine = {
        .n_threads = config->n_threads ? config->n_threads : 1, .max_rows = 1024, .max_items = 32};
    const uint32_t n_positions = config->n_positions ? config->n_positions : 2048;
    const uint32_t page = config->page_tokens ? config->page_tokens : KV_PAGE_TOKENS_DEFAULT;
    const struct model *model = config->model;
    struct kv_why why = {""};

    memset(r, 0, sizeof(*r));
    if (!model) {
        ck_assert_msg(gguf_open(config->path, &r->gguf, &why) == 0, "%s", why.text);
        ck_assert_msg(model_open(r->gguf, config->kernels, &r->model, &why) == 0, "%s", why.text);
        model = r->model;
    }
    r->params = model_params(model);
    model_geometry(model, config->precision, &cache.geometry);
    cache.n_pages = (n_positions + page - 1) / page + 33; /* and an open one a sequence */
    ck_assert_msg(kv_cache_open(&cache, &r->cache, &why) == 0, "%s", why.text);
    engine.model = model;
    engine.cache = r->cache;
    ck_assert_msg(engine_open(&engine, &r->engine, &why) == 0, "%s", why.text);
}

void rig_close(struct rig *r)
{
    engine_close(r->engine);
    kv_cache_close(r->cache);
    model_close(r->model);
    gguf_close(r->gguf);
}

struct kv_context *rig_context(struct rig *r)
{
    const struct kv_namespace ns = {.group = 0};
    struct kv_context *ctx;

    ck_assert_int_eq(kv_context_open(r->cache, &ns, &ctx), 0);
    return ctx;
}

void rig_logits(struct rig *r, struct kv_context *ctx, const uint32_t *ids, uint32_t n,
                float *logits)
{
    struct engine_item item = {.ctx = ctx, .ids = ids, .n_ids = n, .logits = logits};

    item.all_logits = true;
    ck_assert_int_eq(engine_step(r->engine, &item, 1), 0);
    ck_assert_msg(item.rc == 0, "%s", item.why.text);
}

void rig_run(struct rig *r, struct kv_context *ctx, const uint32_t *ids, uint32_t n, uint32_t chunk,
             uint64_t *digests)
{
    const uint32_t n_vocab = r->params->n_vocab;
    float *logits = malloc((size_t)(chunk < n ? chunk : n) * n_vocab * sizeof(*logits));

    ck_assert_ptr_nonnull(logits);
    for (uint32_t i = 0; i < n; i += chunk) {
        const uint32_t k = n - i < chunk ? n - i : chunk;

        rig_logits(r, ctx, ids + i, k, logits);
        for (uint32_t j = 0; j < k; j++)
            digests[i + j] = logits_digest(logits + (size_t)j * n_vocab, n_vocab);
    }
    free(logits);
}

static const char *if_there(const char *path)
{
    return access(path, R_OK) == 0 ? path : NULL;
}

const char *rig_tiny(const char *type)
{
    static char path[4096];

    snprintf(path, sizeof(path), "%s/tests/tiny/tiny-%s.gguf", BATON_BINARY_DIR, type);
    return if_there(path);
}

const char *rig_reference(const char *name)
{
    static char path[2][4096]; /* two at a time are in use */
    static unsigned turn;
    char *p = path[turn++ % 2];

    snprintf(p, sizeof(path[0]), "%s/../shared/reference/%s", BATON_SOURCE_DIR, name);
    return if_there(p);
}

const char *rig_default_model(void)
{
    static char path[4096];
    const char *model = getenv("BATON_MODEL"), *cache = getenv("XDG_CACHE_HOME");
    const char *home = getenv("HOME");

    if (model)
        return if_there(model);
    snprintf(path, sizeof(path), "%s%s/baton/SmolLM2-135M-Instruct.Q4_1.gguf",
             cache  ? cache
             : home ? home
                    : "",
             cache ? "" : "/.cache");
    return if_there(path);
}

void rig_ids(uint32_t *ids, uint32_t n, uint32_t n_vocab, uint32_t seed)
{
    uint64_t state = seed;

    for (uint32_t i = 0; i < n; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        ids[i] = (uint32_t)(state >> 33) % n_vocab;
    }
}

#include "model/engine_internal.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xxhash.h>

enum { HUGE_PAGE = 2 << 20 };

/* ---- Opening ---- */

static int check_config(const struct engine_config *c, struct kv_why *why)
{
    const struct model_params *p = &c->model->params;
    const struct kv_geometry *g = &kv_cache_layout(c->cache)->geometry;

    if (c->max_rows == 0 || c->max_rows > ENGINE_MAX_ROWS)
        return kv_fail(why, MODEL_ERR_INVALID, "max_rows is %u; it must be 1..%u", c->max_rows,
                       ENGINE_MAX_ROWS);
    if (c->max_items == 0 || c->max_items > ENGINE_MAX_ITEMS)
        return kv_fail(why, MODEL_ERR_INVALID, "max_items is %u; it must be 1..%u", c->max_items,
                       ENGINE_MAX_ITEMS);
    if (c->n_threads > ENGINE_MAX_THREADS)
        return kv_fail(why, MODEL_ERR_INVALID, "n_threads is %u; at most %u", c->n_threads,
                       ENGINE_MAX_THREADS);
    if (g->n_layers != p->n_layers || g->n_kv_heads != p->n_kv_heads || g->head_dim != p->head_dim)
        return kv_fail(
            why, MODEL_ERR_INVALID,
            "the cache holds %u layers of %u KV heads of %u, the model has %u of %u of %u",
            g->n_layers, g->n_kv_heads, g->head_dim, p->n_layers, p->n_kv_heads, p->head_dim);
    if (!engine_embed_has_type(c->model->token_embd.type))
        return kv_fail(why, MODEL_ERR_UNSUPPORTED, "token_embd.weight of type %s",
                       gguf_type_name(c->model->token_embd.type));
    return 0;
}

static uint32_t default_threads(void)
{
    const long n = sysconf(_SC_NPROCESSORS_ONLN);

    return n < 1 ? 1 : n > ENGINE_MAX_THREADS ? ENGINE_MAX_THREADS : (uint32_t)n;
}

static uint32_t min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static bool is_quantized(const struct kern_matrix *w)
{
    return w->type != GGUF_F32 && w->type != GGUF_F16 && w->type != GGUF_BF16;
}

static void plan_layers(struct engine *e)
{
    for (uint32_t l = 0; l < e->model->params.n_layers; l++) {
        const struct model_layer *w = &e->model->layers[l];

        e->plans[l] = (struct engine_layer_plan){
            .qkv = is_quantized(&w->wq) || is_quantized(&w->wk) || is_quantized(&w->wv),
            .out = is_quantized(&w->wo),
            .ffn = is_quantized(&w->w_gate) || is_quantized(&w->w_up),
            .down = is_quantized(&w->w_down),
        };
    }
    e->head_quantized = is_quantized(&e->model->output);
}

/* The sizes that follow from the model and the configuration. */
static void plan_sizes(struct engine *e)
{
    const struct model_params *p = &e->model->params;
    const uint32_t page_tokens = e->layout->page_tokens;
    const uint32_t n_segments = (p->n_ctx - 1) / KERN_SEGMENT + 1;
    const size_t row_bytes = (size_t)(p->rope_dims > 0 ? p->rope_dims : 1) * sizeof(float);
    size_t split_rows, fit;

    e->n_group = p->n_heads / p->n_kv_heads;
    e->tile_heads = min_u32(e->n_group, KERN_ATTN_ROWS);
    e->tile_rows = KERN_ATTN_ROWS / e->tile_heads;
    e->pages_per_seq = (p->n_ctx - 1) / page_tokens + 1;
    e->q_scale = (float)(1.0 / sqrt((double)p->head_dim));
    e->n_rope_table = (uint32_t)(ENGINE_ROPE_TABLE_BYTES / row_bytes);
    e->n_rope_table = min_u32(e->n_rope_table, p->n_ctx);
    e->o_stride = ((size_t)p->head_dim + 15) / 16 * 16;
    /* engine_attn_plan() divides by segments only below so many tiles a KV head. */
    split_rows = min_u32(e->max_rows, e->n_threads * e->tile_rows * ENGINE_SPLIT_TASKS);
    e->n_slots = e->n_threads > 1 ? split_rows * p->n_heads * n_segments : 0;
    fit = ENGINE_SPLIT_BYTES / (e->o_stride * sizeof(float));
    if (e->n_slots > fit)
        e->n_slots = fit;
}

/* Hand out n items of `size` bytes from the arena, on a cache line.  In the first pass base is NULL
 * and only the bytes are counted. */
static void *carve(struct engine *e, size_t n, size_t size)
{
    void *at = e->arena ? e->arena + e->arena_bytes : NULL;

    e->arena_bytes += (n * size + 63) / 64 * 64;
    return at;
}

static void carve_all(struct engine *e)
{
    const struct model_params *p = &e->model->params;
    const size_t rows = e->max_rows, n_q = (size_t)p->n_heads * p->head_dim;
    const size_t n_kv = (size_t)p->n_kv_heads * p->head_dim;
    size_t widest = n_q > p->n_ff ? n_q : p->n_ff;

    if (widest < p->n_embd)
        widest = p->n_embd;
    const size_t blocks = (widest + KERN_BLOCK - 1) / KERN_BLOCK;

    e->arena_bytes = 0;
    e->plans = carve(e, p->n_layers, sizeof(*e->plans));
    e->rope_freq = carve(e, p->rope_dims / 2, sizeof(double));
    e->rope_table = carve(e, (size_t)e->n_rope_table * p->rope_dims, sizeof(float));
    e->rows = carve(e, rows, sizeof(*e->rows));
    e->seqs = carve(e, e->max_items, sizeof(*e->seqs));
    e->tiles = carve(e, rows, sizeof(*e->tiles));
    e->pages = carve(e, (size_t)e->max_items * e->pages_per_seq, sizeof(*e->pages));
    e->wanted = carve(e, rows, sizeof(*e->wanted));
    e->x = carve(e, rows * p->n_embd, sizeof(float));
    e->h = carve(e, rows * p->n_embd, sizeof(float));
    e->q = carve(e, rows * n_q, sizeof(float));
    e->k = carve(e, rows * n_kv, sizeof(float));
    e->v = carve(e, rows * n_kv, sizeof(float));
    e->att = carve(e, rows * n_q, sizeof(float));
    e->gate = carve(e, rows * p->n_ff, sizeof(float));
    e->up = carve(e, rows * p->n_ff, sizeof(float));
    e->y = carve(e, rows * p->n_embd, sizeof(float));
    e->cs = carve(e, p->n_ctx > e->n_rope_table ? rows * p->rope_dims : 0, sizeof(float));
    e->act_q = carve(e, rows * blocks * KERN_BLOCK, 1);
    e->act_d = carve(e, rows * blocks, sizeof(float));
    e->act_ds = carve(e, rows * blocks, sizeof(float));
    e->act_sum = carve(e, rows * blocks, sizeof(int32_t));
    e->slot_m = carve(e, e->n_slots, sizeof(float));
    e->slot_l = carve(e, e->n_slots, sizeof(float));
    e->slot_o = carve(e, e->n_slots * e->o_stride, sizeof(float));
    e->locals = carve(e, e->n_threads, sizeof(*e->locals));
    for (uint32_t i = 0; i < e->n_threads; i++) {
        float *o = carve(e, 2 * KERN_ATTN_ROWS * e->o_stride, sizeof(float));
        float *logits = carve(e, ENGINE_HEAD_ROWS * ENGINE_HEAD_COLS, sizeof(float));

        if (e->arena)
            e->locals[i] = (struct engine_local){o, logits};
    }
}

static void fill_rope_table(struct engine *e)
{
    const uint32_t rope_dims = e->model->params.rope_dims;
    const unsigned mode = engine_float_enter();

    engine_rope_frequencies(e->model, e->rope_freq);
    for (uint32_t i = 0; i < e->n_rope_table; i++)
        engine_rope_row(e->rope_freq, rope_dims / 2, i, e->rope_table + (size_t)i * rope_dims);
    engine_float_leave(mode);
}

int engine_open(const struct engine_config *config, struct engine **out, struct kv_why *why)
{
    struct engine *e = NULL;
    void *arena;
    int rc;

    rc = check_config(config, why);
    if (rc < 0)
        return rc;
    e = calloc(1, sizeof(*e));
    if (!e)
        return kv_fail(why, MODEL_ERR_NOMEM, "no memory for an engine");
    e->model = config->model;
    e->kern = config->model->kern;
    e->cache = config->cache;
    e->layout = kv_cache_layout(config->cache);
    e->n_threads = config->n_threads > 0 ? config->n_threads : default_threads();
    e->max_rows = config->max_rows;
    e->max_items = config->max_items;
    plan_sizes(e);
    carve_all(e);
    if (posix_memalign(&arena, HUGE_PAGE, e->arena_bytes) != 0) {
        rc = kv_fail(why, MODEL_ERR_NOMEM, "no memory for %zu bytes of scratch (max_rows %u)",
                     e->arena_bytes, e->max_rows);
        goto out;
    }
    e->arena = arena;
    (void)madvise(arena, e->arena_bytes, MADV_HUGEPAGE); /* where the kernel has none, so be it */
    memset(arena, 0, e->arena_bytes);
    carve_all(e);
    plan_layers(e);
    fill_rope_table(e);
    rc = engine_pool_open(e->n_threads, &e->pool);
    if (rc < 0) {
        kv_fail(why, rc, "cannot start %u compute threads", e->n_threads);
        goto out;
    }
    *out = e;
    e = NULL;
out:
    engine_close(e);
    return rc;
}

void engine_close(struct engine *e)
{
    if (!e)
        return;
    engine_pool_close(e->pool);
    free(e->arena);
    free(e);
}

uint32_t engine_n_threads(const struct engine *e)
{
    return e->n_threads;
}

/* ---- A step ---- */

static int check_item(const struct engine *e, struct engine_item *item)
{
    const struct model_params *p = &e->model->params;
    const uint32_t length = kv_context_length(item->ctx);

    if (item->n_ids == 0)
        return kv_fail(&item->why, MODEL_ERR_INVALID, "n_ids is 0");
    if (length > p->n_ctx || item->n_ids > p->n_ctx - length)
        return kv_fail(&item->why, MODEL_ERR_INVALID,
                       "%u positions and %u more are over the model's context of %u", length,
                       item->n_ids, p->n_ctx);
    for (uint32_t i = 0; i < item->n_ids; i++)
        if (item->ids[i] >= p->n_vocab)
            return kv_fail(&item->why, MODEL_ERR_INVALID, "token id %u is not below %u",
                           item->ids[i], p->n_vocab);
    return 0;
}

static void add_row(struct engine *e, const struct engine_item *item, uint32_t i, uint32_t pos)
{
    struct engine_row *row = &e->rows[e->n_rows];
    const bool wanted = item->logits && (item->all_logits || i + 1 == item->n_ids);

    row->seq = e->n_seqs;
    row->id = item->ids[i];
    row->pos = pos;
    row->logits = NULL;
    row->head = 0;
    atomic_store_explicit(&row->fault, ENGINE_FAULT_NONE, memory_order_relaxed);
    if (wanted) {
        row->logits = item->logits;
        if (item->all_logits)
            row->logits += (size_t)i * e->model->params.n_vocab;
        row->head = e->n_wanted;
        e->wanted[e->n_wanted++] = e->n_rows;
    }
    e->n_rows++;
}

/* Begin the item's append and lay out its rows. */
static int begin_item(struct engine *e, struct engine_item *item)
{
    struct engine_seq *seq = &e->seqs[e->n_seqs];
    const uint32_t length = kv_context_length(item->ctx);
    uint32_t n_pages;
    int rc;

    item->why.text[0] = '\0';
    rc = check_item(e, item);
    if (rc < 0)
        return rc;
    rc = kv_context_begin(item->ctx, item->ids, item->n_ids);
    if (rc < 0)
        return kv_fail(&item->why, MODEL_ERR_KV, "cannot append %u positions at %u: %s",
                       item->n_ids, length, kv_strerror(rc));
    *seq = (struct engine_seq){
        .item = item,
        .pages = e->pages + (size_t)e->n_seqs * e->pages_per_seq,
        .row0 = e->n_rows,
        .n_rows = item->n_ids,
    };
    n_pages = kv_context_n_pages(item->ctx);
    assert(n_pages <= e->pages_per_seq);
    for (uint32_t i = 0; i < n_pages; i++)
        seq->pages[i] = kv_context_page(item->ctx, i);
    for (uint32_t i = 0; i < item->n_ids; i++)
        add_row(e, item, i, length + i);
    e->n_seqs++;
    return 0;
}

/* The first of the sequence's rows that failed, or NULL. */
static const struct engine_row *failed_row(const struct engine *e, const struct engine_seq *seq)
{
    for (uint32_t t = seq->row0; t < seq->row0 + seq->n_rows; t++)
        if (atomic_load_explicit(&e->rows[t].fault, memory_order_relaxed) != ENGINE_FAULT_NONE)
            return &e->rows[t];
    return NULL;
}

static int explain(const struct engine *e, const struct engine_row *row, struct kv_why *why)
{
    switch ((enum engine_fault)atomic_load_explicit(&row->fault, memory_order_relaxed)) {
    case ENGINE_FAULT_KV:
        return kv_fail(why, MODEL_ERR_NUMERIC, "position %u, layer %u: K or V overflows %s",
                       row->pos, row->fault_layer,
                       kv_precision_name(e->layout->geometry.precision));
    case ENGINE_FAULT_LOGITS:
        return kv_fail(why, MODEL_ERR_NUMERIC, "position %u: a logit is not finite", row->pos);
    default:
        return kv_fail(why, MODEL_ERR_NUMERIC, "position %u, layer %u: a value is not finite",
                       row->pos, row->fault_layer);
    }
}

static int end_item(struct engine *e, const struct engine_seq *seq)
{
    struct engine_item *item = seq->item;
    const struct engine_row *failed = failed_row(e, seq);
    int rc;

    if (failed) {
        kv_context_abort(item->ctx);
        return explain(e, failed, &item->why);
    }
    rc = kv_context_commit(item->ctx, item->n_ids);
    if (rc < 0) {
        kv_context_abort(item->ctx);
        return kv_fail(&item->why, MODEL_ERR_KV, "cannot commit %u positions: %s", item->n_ids,
                       kv_strerror(rc));
    }
    return 0;
}

int engine_step(struct engine *e, struct engine_item *items, uint32_t n_items)
{
    uint64_t n_rows = 0;

    for (uint32_t i = 0; i < n_items; i++)
        n_rows += items[i].n_ids;
    if (n_items > e->max_items || n_rows > e->max_rows)
        return MODEL_ERR_INVALID;
    e->n_rows = 0;
    e->n_seqs = 0;
    e->n_wanted = 0;
    for (uint32_t i = 0; i < n_items; i++)
        items[i].rc = begin_item(e, &items[i]);
    if (e->n_rows > 0) {
        engine_attn_plan(e);
        engine_pool_run(e->pool, engine_forward, e);
    }
    for (uint32_t s = 0; s < e->n_seqs; s++)
        e->seqs[s].item->rc = end_item(e, &e->seqs[s]);
    return 0;
}

uint64_t logits_digest(const float *logits, uint32_t n_vocab)
{
    return XXH3_64bits(logits, n_vocab * sizeof(*logits));
}

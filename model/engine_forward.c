/* The forward pass of one step.  Per layer:
 *
 *   products q, k, v          of h, by output rows
 *   row      rope, scale q, round K and V into the pages
 *   tasks    attention        (engine_attn.c)
 *   row      merge, quantize
 *   products attention output
 *   row      x += y, norm, quantize
 *   products gate, up
 *   row      silu(gate) * up, quantize
 *   products down
 *   row      x += y, norm of the next layer, quantize
 *
 * Row phases of very few rows are run by whichever thread arrives last, while the others wait: with
 * one row that saves a meeting and costs nothing. */
#include "model/engine_internal.h"

#include <string.h>

enum {
    SERIAL_ROWS = 2,    /* row phases up to this many rows are not divided */
    ROWS_PER_TASK = 4,  /* of a divided row phase */
    PRODUCT_ROWS = 256, /* tokens in one product: their int8 rows stay in the L2 cache */
    MAX_PRODUCTS = 3,   /* matrices with one input */
    FEW_ROWS = 4,       /* up to this many, products are bound by memory: few, equal tasks */
    TASKS_PER_THREAD = 8,
    TASKS_PER_THREAD_FEW = 2,
};

typedef void row_function(struct engine *e, uint32_t layer, uint32_t t);

uint32_t engine_draw(struct engine *e, uint32_t n)
{
    const uint32_t i = atomic_fetch_add_explicit(&e->next_task, 1, memory_order_relaxed);

    return i < n ? i : n;
}

void engine_row_fail(struct engine *e, uint32_t t, enum engine_fault fault, uint32_t layer)
{
    struct engine_row *row = &e->rows[t];
    unsigned none = ENGINE_FAULT_NONE;

    if (atomic_compare_exchange_strong_explicit(&row->fault, &none, fault, memory_order_relaxed,
                                                memory_order_relaxed))
        row->fault_layer = layer;
}

/* ---- Meeting ---- */

struct serial {
    struct engine *e;
    row_function *fn;
    uint32_t layer;
};

static void run_serial(void *arg)
{
    const struct serial *s = arg;

    if (s->fn)
        for (uint32_t t = 0; t < s->e->n_rows; t++)
            s->fn(s->e, s->layer, t);
    atomic_store_explicit(&s->e->next_task, 0, memory_order_relaxed);
}

static void meet(struct engine *e)
{
    struct serial s = {e, NULL, 0};

    engine_pool_sync(e->pool, run_serial, &s);
}

/* Wait for the phase before, run fn on every row, and wait again. */
static void rows_phase(struct engine *e, row_function *fn, uint32_t layer)
{
    const uint32_t n_tasks = (e->n_rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK;
    struct serial s = {e, fn, layer};

    if (e->n_rows <= SERIAL_ROWS || e->n_threads == 1) {
        engine_pool_sync(e->pool, run_serial, &s);
        return;
    }
    meet(e);
    for (uint32_t i; (i = engine_draw(e, n_tasks)) < n_tasks;)
        for (uint32_t t = i * ROWS_PER_TASK; t < (i + 1) * ROWS_PER_TASK && t < e->n_rows; t++)
            fn(e, layer, t);
    meet(e);
}

/* ---- Products ---- */

/* Rows [t0, t0 + n) of x [.][n_cols] with the shared int8 scratch. */
static struct kern_acts acts_of(const struct engine *e, const float *x, uint32_t n_cols,
                                uint32_t t0, uint32_t n)
{
    const size_t blocks = (n_cols + KERN_BLOCK - 1) / KERN_BLOCK;

    return (struct kern_acts){
        .n_rows = n,
        .n_cols = n_cols,
        .x = x + (size_t)t0 * n_cols,
        .q = e->act_q + t0 * blocks * KERN_BLOCK,
        .d = e->act_d + t0 * blocks,
        .ds = e->act_ds + t0 * blocks,
        .sum = e->act_sum + t0 * blocks,
    };
}

/* Quantize row t of x; a row that cannot be becomes zeros. */
static void quantize_row(struct engine *e, float *x, uint32_t n_cols, uint32_t t, uint32_t layer)
{
    struct kern_acts acts = acts_of(e, x, n_cols, t, 1);

    if (e->kern->quantize(&acts, 0) == 0)
        return;
    engine_row_fail(e, t, ENGINE_FAULT_VALUE, layer);
    memset(x + (size_t)t * n_cols, 0, n_cols * sizeof(*x));
    e->kern->quantize(&acts, 0);
}

struct product {
    const struct kern_matrix *w;
    float *y; /* [T][w->n_rows] */
};

static uint32_t n_row_tiles(const struct kern_matrix *w)
{
    return (w->n_rows + KERN_ROW_TILE - 1) / KERN_ROW_TILE;
}

/* Row tiles [first, last) of the matrices laid end to end. */
static void product_tiles(struct engine *e, const struct product *p, uint32_t n, uint32_t first,
                          uint32_t last, const struct kern_acts *acts, uint32_t t0)
{
    for (uint32_t i = 0; i < n && last > 0; i++) {
        const uint32_t tiles = n_row_tiles(p[i].w);

        if (first < tiles) {
            const uint32_t row0 = first * KERN_ROW_TILE;
            const uint32_t row1 = last < tiles ? last * KERN_ROW_TILE : p[i].w->n_rows;

            e->kern->gemm(p[i].w, row0, row1, acts, p[i].y + (size_t)t0 * p[i].w->n_rows,
                          p[i].w->n_rows);
        }
        first = first > tiles ? first - tiles : 0;
        last = last > tiles ? last - tiles : 0;
    }
}

/* y = W x for all rows and up to MAX_PRODUCTS matrices of one input. */
static void products(struct engine *e, const struct product *p, uint32_t n, const float *x)
{
    const uint32_t n_cols = p[0].w->n_cols;
    const uint32_t n_blocks = (e->n_rows + PRODUCT_ROWS - 1) / PRODUCT_ROWS;
    const uint32_t per_thread = e->n_rows <= FEW_ROWS ? TASKS_PER_THREAD_FEW : TASKS_PER_THREAD;
    uint32_t tiles = 0, step, n_parts, n_tasks;

    for (uint32_t i = 0; i < n; i++)
        tiles += n_row_tiles(p[i].w);
    step = e->n_threads == 1 ? tiles : tiles / (e->n_threads * per_thread) + 1;
    n_parts = (tiles + step - 1) / step;
    n_tasks = n_parts * n_blocks;
    for (uint32_t i; (i = engine_draw(e, n_tasks)) < n_tasks;) {
        const uint32_t t0 = i / n_parts * PRODUCT_ROWS;
        const uint32_t rows = e->n_rows - t0 < PRODUCT_ROWS ? e->n_rows - t0 : PRODUCT_ROWS;
        const uint32_t first = i % n_parts * step;
        const struct kern_acts acts = acts_of(e, x, n_cols, t0, rows);

        product_tiles(e, p, n, first, first + step < tiles ? first + step : tiles, &acts, t0);
    }
}

/* ---- Row phases ---- */

/* h = norm(x) as the input of the layer's next products. */
static void norm_row(struct engine *e, const float *w, bool quantized, uint32_t layer, uint32_t t)
{
    const struct model_params *p = &e->model->params;
    const size_t at = (size_t)t * p->n_embd;

    e->kern->rmsnorm(e->x + at, w, p->n_embd, p->norm_eps, e->h + at);
    if (quantized)
        quantize_row(e, e->h, p->n_embd, t, layer);
}

/* x += y.  A row that is no longer finite fails, and goes on as zeros. */
static void residual_row(struct engine *e, uint32_t layer, uint32_t t)
{
    const uint32_t n = e->model->params.n_embd;
    float *x = e->x + (size_t)t * n;

    e->kern->add(x, e->y + (size_t)t * n, n);
    if (e->kern->finite(x, n))
        return;
    engine_row_fail(e, t, ENGINE_FAULT_VALUE, layer);
    memset(x, 0, n * sizeof(*x));
}

static void begin_row(struct engine *e, uint32_t layer, uint32_t t)
{
    const struct model_params *p = &e->model->params;
    const uint32_t n_pairs = p->rope_dims / 2;
    struct engine_row *row = &e->rows[t];
    float *x = e->x + (size_t)t * p->n_embd;

    if (row->pos < e->n_rope_table) {
        row->cs = e->rope_table + (size_t)row->pos * n_pairs * 2;
    } else {
        float *cs = e->cs + (size_t)t * n_pairs * 2;

        engine_rope_row(e->rope_freq, n_pairs, row->pos, cs);
        row->cs = cs;
    }
    engine_embed(&e->model->token_embd, row->id, x);
    if (!e->kern->finite(x, p->n_embd)) {
        engine_row_fail(e, t, ENGINE_FAULT_VALUE, layer);
        memset(x, 0, p->n_embd * sizeof(*x));
    }
    norm_row(e, e->model->layers[0].attn_norm, e->plans[0].qkv, 0, t);
}

static void qkv_row(struct engine *e, uint32_t layer, uint32_t t)
{
    const struct model_params *p = &e->model->params;
    const struct engine_row *row = &e->rows[t];
    const uint32_t n_q = p->n_heads * p->head_dim, n_kv = p->n_kv_heads * p->head_dim;
    const uint32_t page_tokens = e->layout->page_tokens;
    float *q = e->q + (size_t)t * n_q, *k = e->k + (size_t)t * n_kv;
    unsigned char *page = e->seqs[row->seq].pages[row->pos / page_tokens];

    e->kern->rope(q, p->n_heads, p->head_dim, p->rope_dims, p->rope, row->cs);
    e->kern->rope(k, p->n_kv_heads, p->head_dim, p->rope_dims, p->rope, row->cs);
    for (uint32_t i = 0; i < n_q; i++)
        q[i] = q[i] * e->q_scale;
    if (e->kern->kv_put(e->layout, page, layer, row->pos % page_tokens, k,
                        e->v + (size_t)t * n_kv) != 0)
        engine_row_fail(e, t, ENGINE_FAULT_KV, layer);
}

static void attended_row(struct engine *e, uint32_t layer, uint32_t t)
{
    const struct model_params *p = &e->model->params;

    if (e->split)
        engine_attn_merge(e, t);
    if (e->plans[layer].out)
        quantize_row(e, e->att, p->n_heads * p->head_dim, t, layer);
}

static void ffn_row(struct engine *e, uint32_t layer, uint32_t t)
{
    residual_row(e, layer, t);
    norm_row(e, e->model->layers[layer].ffn_norm, e->plans[layer].ffn, layer, t);
}

static void silu_row(struct engine *e, uint32_t layer, uint32_t t)
{
    const uint32_t n = e->model->params.n_ff;
    float *gate = e->gate + (size_t)t * n;

    e->kern->silu_mul(gate, e->up + (size_t)t * n, n, gate);
    if (e->plans[layer].down)
        quantize_row(e, e->gate, n, t, layer);
}

static void next_row(struct engine *e, uint32_t layer, uint32_t t)
{
    residual_row(e, layer, t);
    norm_row(e, e->model->layers[layer + 1].attn_norm, e->plans[layer + 1].qkv, layer + 1, t);
}

/* The last norm, for rows whose logits are wanted: they move together, to h[row->head]. */
static void last_row(struct engine *e, uint32_t layer, uint32_t t)
{
    const struct model_params *p = &e->model->params;
    const struct engine_row *row = &e->rows[t];
    float *h = e->h + (size_t)row->head * p->n_embd;
    struct kern_acts acts = acts_of(e, e->h, p->n_embd, row->head, 1);

    residual_row(e, layer, t);
    if (!row->logits)
        return;
    e->kern->rmsnorm(e->x + (size_t)t * p->n_embd, e->model->output_norm, p->n_embd, p->norm_eps,
                     h);
    if (!e->head_quantized || e->kern->quantize(&acts, 0) == 0)
        return;
    engine_row_fail(e, t, ENGINE_FAULT_VALUE, layer);
    memset(h, 0, p->n_embd * sizeof(*h));
    e->kern->quantize(&acts, 0);
}

/* ---- The head ---- */

/* Rows [t0, t0 + n) whose logits are wanted, vocabulary rows [v0, v1). */
static void head_task(struct engine *e, const uint32_t *wanted, uint32_t t0, uint32_t n,
                      uint32_t v0, uint32_t v1, float *scratch)
{
    const struct model_params *p = &e->model->params;
    const struct kern_acts acts = acts_of(e, e->h, p->n_embd, t0, n);
    const size_t bytes = (v1 - v0) * sizeof(float);
    /* gemm() addresses outputs from vocabulary row 0; here the block begins at v0.  One row goes
     * where it is wanted, several, whose places are apart, through the scratch. */
    float *y =
        n == 1 ? e->rows[wanted[t0]].logits : (float *)((uintptr_t)scratch - v0 * sizeof(float));

    e->kern->gemm(&e->model->output, v0, v1, &acts, y, ENGINE_HEAD_COLS);
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t t = wanted[t0 + i];
        float *logits = e->rows[t].logits + v0;

        if (n > 1)
            memcpy(logits, scratch + (size_t)i * ENGINE_HEAD_COLS, bytes);
        if (!e->kern->finite(logits, v1 - v0))
            engine_row_fail(e, t, ENGINE_FAULT_LOGITS, p->n_layers);
    }
}

static void head(struct engine *e, uint32_t thread)
{
    const uint32_t n_vocab = e->model->params.n_vocab;
    const uint32_t n_cols = (n_vocab + ENGINE_HEAD_COLS - 1) / ENGINE_HEAD_COLS;
    const uint32_t n_rows = (e->n_wanted + ENGINE_HEAD_ROWS - 1) / ENGINE_HEAD_ROWS;

    for (uint32_t i; (i = engine_draw(e, n_cols * n_rows)) < n_cols * n_rows;) {
        const uint32_t t0 = i / n_cols * ENGINE_HEAD_ROWS, v0 = i % n_cols * ENGINE_HEAD_COLS;
        const uint32_t t_left = e->n_wanted - t0, v_left = n_vocab - v0;

        head_task(e, e->wanted, t0, t_left < ENGINE_HEAD_ROWS ? t_left : ENGINE_HEAD_ROWS, v0,
                  v0 + (v_left < ENGINE_HEAD_COLS ? v_left : ENGINE_HEAD_COLS),
                  e->locals[thread].logits);
    }
}

/* ---- All of it ---- */

static void layer_run(struct engine *e, uint32_t l, uint32_t thread)
{
    const struct model_layer *w = &e->model->layers[l];
    const struct product qkv[] = {{&w->wq, e->q}, {&w->wk, e->k}, {&w->wv, e->v}};
    const struct product out[] = {{&w->wo, e->y}};
    const struct product ffn[] = {{&w->w_gate, e->gate}, {&w->w_up, e->up}};
    const struct product down[] = {{&w->w_down, e->y}};

    products(e, qkv, 3, e->h);
    rows_phase(e, qkv_row, l);
    engine_attn_run(e, l, thread);
    rows_phase(e, attended_row, l);
    products(e, out, 1, e->att);
    rows_phase(e, ffn_row, l);
    products(e, ffn, 2, e->h);
    rows_phase(e, silu_row, l);
    products(e, down, 1, e->gate);
    rows_phase(e, l + 1 < e->model->params.n_layers ? next_row : last_row, l);
}

void engine_forward(void *arg, uint32_t thread)
{
    struct engine *e = arg;

    rows_phase(e, begin_row, 0);
    for (uint32_t l = 0; l < e->model->params.n_layers; l++)
        layer_run(e, l, thread);
    if (e->n_wanted > 0)
        head(e, thread);
}

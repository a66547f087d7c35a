#include "model/kern_tiles.h"

#include <assert.h>

static uint32_t ceil_div(uint32_t n, uint32_t by)
{
    return n / by + (n % by != 0);
}

static size_t group_bytes(const struct tile_quant *q, uint32_t lanes)
{
    return (size_t)lanes * 4 * (1 + q->group_blocks * q->n_vectors);
}

static size_t quant_tile_bytes(const struct tile_quant *q, uint32_t lanes, uint32_t n_cols)
{
    return ceil_div(n_cols / KERN_BLOCK, q->group_blocks) * group_bytes(q, lanes);
}

static size_t tile_bytes(const struct tile_type *type, uint32_t lanes, uint32_t n_cols)
{
    if (type->weight_bytes)
        return (size_t)n_cols * lanes * type->weight_bytes;
    return quant_tile_bytes(&type->quant, lanes, n_cols);
}

/* Block b of the row in lane r. */
static void pack_block(const struct tile_quant *q, uint32_t lanes, const unsigned char *src,
                       uint32_t b, uint32_t r, unsigned char *tile)
{
    const size_t vector = (size_t)lanes * 4;
    const uint32_t n_heads = 2 / q->group_blocks; /* halves of a block */
    const uint32_t place = b % q->group_blocks;
    unsigned char *group = tile + b / q->group_blocks * group_bytes(q, lanes);
    unsigned char *quants = group + vector * (1 + place * q->n_vectors);

    for (uint32_t h = 0; h < n_heads; h++)
        memcpy(group + (size_t)lanes * 2 * (place + h) + (size_t)r * 2, src + (size_t)h * 2, 2);
    for (uint32_t j = 0; j < q->n_vectors; j++) {
        uint32_t dword;

        memcpy(&dword, src + n_heads * 2 + (size_t)j * 4, 4);
        dword ^= q->flip;
        memcpy(quants + vector * j + (size_t)r * 4, &dword, 4);
    }
}

static void pack_quant(const struct tile_quant *q, uint32_t lanes, const struct kern_matrix *m,
                       unsigned char *dst)
{
    const uint32_t n_blocks = m->n_cols / KERN_BLOCK;
    const size_t bytes = quant_tile_bytes(q, lanes, m->n_cols);
    const unsigned char *src = m->data;

    for (uint32_t r = 0; r < m->n_rows; r++)
        for (uint32_t b = 0; b < n_blocks; b++, src += q->src_bytes)
            pack_block(q, lanes, src, b, r % lanes, dst + r / lanes * bytes);
}

static void pack_float(size_t weight_bytes, uint32_t lanes, const struct kern_matrix *m,
                       unsigned char *dst)
{
    const size_t step = lanes * weight_bytes;
    const unsigned char *src = m->data;

    for (uint32_t r = 0; r < m->n_rows; r++) {
        unsigned char *lane = dst + r / lanes * step * m->n_cols + r % lanes * weight_bytes;

        for (uint32_t k = 0; k < m->n_cols; k++, src += weight_bytes)
            memcpy(lane + k * step, src, weight_bytes);
    }
}

static const struct tile_type *find_type(const struct tile_set *set, enum gguf_type type)
{
    for (size_t i = 0; i < set->n_types; i++)
        if (set->types[i].type == type)
            return &set->types[i];
    return NULL;
}

size_t tile_pack_bytes(const struct tile_set *set, enum gguf_type type, uint32_t n_rows,
                       uint32_t n_cols)
{
    const struct tile_type *t = find_type(set, type);

    assert(t);
    return ceil_div(n_rows, set->lanes) * tile_bytes(t, set->lanes, n_cols);
}

void tile_pack(const struct tile_set *set, const struct kern_matrix *src, void *dst)
{
    const struct tile_type *t = find_type(set, src->type);

    assert(t);
    memset(dst, 0, tile_pack_bytes(set, src->type, src->n_rows, src->n_cols));
    if (t->weight_bytes)
        pack_float(t->weight_bytes, set->lanes, src, dst);
    else
        pack_quant(&t->quant, set->lanes, src, dst);
}

/* One call's tiles of rows against tokens [t0, t1): as few kernel calls as there can be, of equal
 * size within one. */
static void run_tokens(const struct tile_kernels *k, struct tile_job job, uint32_t t0, uint32_t t1,
                       size_t ahead)
{
    float *y = job.y;

    job.ahead = ahead;
    for (uint32_t n_calls = ceil_div(t1 - t0, k->max_tokens); n_calls > 0; n_calls--) {
        const uint32_t n = ceil_div(t1 - t0, n_calls);

        job.t = t0;
        job.y = y + (size_t)t0 * job.y_stride;
        k->kernel[n - 1](&job);
        t0 += n;
        job.ahead = 0;
    }
}

/* Tokens to pass over while a tile of weights is in cache. */
static uint32_t token_run(const struct tile_type *type, uint32_t n_cols)
{
    const size_t bytes = (size_t)type->act_bytes * ceil_div(n_cols, KERN_BLOCK);
    const size_t n = TILE_ACT_BYTES / (bytes ? bytes : 1);

    return n < 2 * TILE_MAX_TOKENS ? 2 * TILE_MAX_TOKENS : (uint32_t)n;
}

static uint32_t min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static size_t min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

void tile_gemm(const struct tile_set *set, const struct kern_matrix *w, uint32_t row0,
               uint32_t row1, const struct kern_acts *a, float *y, size_t y_stride)
{
    const struct tile_type *type = find_type(set, w->type);
    struct tile_job job = {.a = a, .y_stride = y_stride};
    uint32_t run;

    assert(type && row0 % KERN_ROW_TILE == 0 && row1 <= w->n_rows && a->n_cols == w->n_cols);
    job.tile_bytes = tile_bytes(type, set->lanes, w->n_cols);
    run = token_run(type, w->n_cols);
    for (uint32_t t0 = 0, t1; t0 < a->n_rows; t0 = t1) {
        const struct tile_kernels *many;

        t1 = t0 + min_u32(run, a->n_rows - t0);
        many = t1 - t0 == 1 ? &type->lone : &type->many;
        for (uint32_t r = row0; r < row1; r += job.n_rows) {
            const uint32_t n_left = ceil_div(row1 - r, set->lanes);
            const struct tile_kernels *k =
                many->n_tiles && n_left >= many->n_tiles ? many : &type->few;

            job.w = (const unsigned char *)w->data + r / set->lanes * job.tile_bytes;
            job.n_rows = min_u32(k->n_tiles * set->lanes, row1 - r);
            job.y = y + r;
            run_tokens(k, job, t0, t1, min_size(k->n_tiles * job.tile_bytes, TILE_AHEAD_MAX));
        }
    }
}

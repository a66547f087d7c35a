/* Attention of a step as tasks.
 *
 * A task is (query tile, KV head, part of its query heads): all segments ascending, merged as they
 * come.  Where there are few such tasks, as in the decoding of one long sequence, every segment is
 * a task of its own; its partials are kept, and whoever handles the row next merges them in the
 * same ascending order.  Both ways call the same kernels on the same segments. */
#include "model/engine_internal.h"

#include <assert.h>

static uint32_t n_segments_at(uint32_t pos)
{
    return pos / KERN_SEGMENT + 1;
}

static uint32_t head_parts(const struct engine *e)
{
    return (e->n_group + e->tile_heads - 1) / e->tile_heads;
}

static uint32_t n_tasks(const struct engine *e)
{
    return e->n_tiles * e->model->params.n_kv_heads * head_parts(e) *
           (e->split ? e->n_segments : 1);
}

void engine_attn_plan(struct engine *e)
{
    const size_t n_heads = e->model->params.n_heads;

    e->n_tiles = 0;
    e->n_segments = 0;
    for (uint32_t s = 0; s < e->n_seqs; s++) {
        const struct engine_seq *seq = &e->seqs[s];
        const uint32_t n = n_segments_at(e->rows[seq->row0 + seq->n_rows - 1].pos);

        for (uint32_t r = 0; r < seq->n_rows; r += e->tile_rows) {
            const uint32_t left = seq->n_rows - r;

            e->tiles[e->n_tiles++] =
                (struct engine_tile){s, seq->row0 + r, left < e->tile_rows ? left : e->tile_rows};
        }
        if (n > e->n_segments)
            e->n_segments = n;
    }
    e->split = false;
    e->split = e->n_threads > 1 && e->n_segments > 1 &&
               n_tasks(e) < ENGINE_SPLIT_TASKS * e->n_threads &&
               e->n_rows * n_heads * e->n_segments <= e->n_slots;
}

/* A task's query rows as the kernel wants them, and which (row, head) each is. */
struct task {
    struct kern_attn attn;
    const float *q[KERN_ATTN_ROWS];
    uint32_t n_kv[KERN_ATTN_ROWS];
    uint32_t row[KERN_ATTN_ROWS], head[KERN_ATTN_ROWS];
    uint32_t n_segments; /* of its last row */
};

static void task_init(struct task *task, const struct engine *e, uint32_t layer, uint32_t index)
{
    const struct model_params *p = &e->model->params;
    const struct engine_tile *tile = &e->tiles[index % e->n_tiles];
    const uint32_t part = index / e->n_tiles % head_parts(e);
    const uint32_t g = index / e->n_tiles / head_parts(e);
    const uint32_t h0 = g * e->n_group + part * e->tile_heads;
    const uint32_t h_end = (g + 1) * e->n_group;
    uint32_t n = 0;

    for (uint32_t r = tile->row0; r < tile->row0 + tile->n_rows; r++)
        for (uint32_t h = h0; h < h0 + e->tile_heads && h < h_end; h++, n++) {
            assert(n < KERN_ATTN_ROWS);
            task->q[n] = e->q + ((size_t)r * p->n_heads + h) * p->head_dim;
            task->n_kv[n] = e->rows[r].pos + 1;
            task->row[n] = r;
            task->head[n] = h;
        }
    task->n_segments = n_segments_at(e->rows[tile->row0 + tile->n_rows - 1].pos);
    task->attn = (struct kern_attn){
        .kv = e->layout,
        .pages = (const unsigned char *const *)e->seqs[tile->seq].pages,
        .layer = layer,
        .kv_head = g,
        .n_q = n,
        .q = task->q,
        .n_kv = task->n_kv,
    };
}

static float *att_of(const struct engine *e, uint32_t row, uint32_t head)
{
    const struct model_params *p = &e->model->params;

    return e->att + ((size_t)row * p->n_heads + head) * p->head_dim;
}

static void run_whole(struct engine *e, const struct task *task, float *o)
{
    const uint32_t dim = e->model->params.head_dim;
    struct kern_partial total[KERN_ATTN_ROWS], next[KERN_ATTN_ROWS];

    for (uint32_t i = 0; i < KERN_ATTN_ROWS; i++) {
        total[i].o = o + i * e->o_stride;
        next[i].o = o + (KERN_ATTN_ROWS + i) * e->o_stride;
    }
    e->kern->attn_segment(&task->attn, 0, total);
    for (uint32_t seg = 1; seg < task->n_segments; seg++) {
        e->kern->attn_segment(&task->attn, seg, next);
        for (uint32_t i = 0; i < task->attn.n_q; i++)
            if (kern_segment_positions(task->n_kv[i], seg) > 0)
                e->kern->attn_merge(&total[i], &next[i], dim);
    }
    for (uint32_t i = 0; i < task->attn.n_q; i++)
        e->kern->attn_finish(&total[i], dim, att_of(e, task->row[i], task->head[i]));
}

static size_t slot_of(const struct engine *e, uint32_t row, uint32_t head, uint32_t seg)
{
    return ((size_t)row * e->model->params.n_heads + head) * e->n_segments + seg;
}

static void run_segment(struct engine *e, const struct task *task, uint32_t seg)
{
    struct kern_partial part[KERN_ATTN_ROWS];

    for (uint32_t i = 0; i < task->attn.n_q; i++)
        part[i].o = e->slot_o + slot_of(e, task->row[i], task->head[i], seg) * e->o_stride;
    e->kern->attn_segment(&task->attn, seg, part);
    for (uint32_t i = 0; i < task->attn.n_q; i++)
        if (kern_segment_positions(task->n_kv[i], seg) > 0) {
            const size_t slot = slot_of(e, task->row[i], task->head[i], seg);

            e->slot_m[slot] = part[i].m;
            e->slot_l[slot] = part[i].l;
        }
}

void engine_attn_run(struct engine *e, uint32_t layer, uint32_t thread)
{
    const uint32_t n = n_tasks(e);
    const uint32_t per_task = e->split ? e->n_segments : 1;
    struct task task;

    for (uint32_t i; (i = engine_draw(e, n)) < n;) {
        task_init(&task, e, layer, i / per_task);
        if (!e->split)
            run_whole(e, &task, e->locals[thread].o);
        else if (i % per_task < task.n_segments)
            run_segment(e, &task, i % per_task);
    }
}

void engine_attn_merge(struct engine *e, uint32_t t)
{
    const struct model_params *p = &e->model->params;
    const uint32_t n = n_segments_at(e->rows[t].pos);

    for (uint32_t h = 0; h < p->n_heads; h++) {
        const size_t slot = slot_of(e, t, h, 0);
        struct kern_partial total = {e->slot_m[slot], e->slot_l[slot],
                                     e->slot_o + slot * e->o_stride};

        for (size_t i = slot + 1; i < slot + n; i++) {
            const struct kern_partial next = {e->slot_m[i], e->slot_l[i],
                                              e->slot_o + i * e->o_stride};

            e->kern->attn_merge(&total, &next, p->head_dim);
        }
        e->kern->attn_finish(&total, p->head_dim, att_of(e, t, h));
    }
}

/* What the files of the engine share: engine.c (opening, items of a step), engine_forward.c (the
 * pass itself), engine_attn.c (attention tasks), engine_rows.c (embedding and rope rows).  Private
 * to model/.
 *
 * One step is one engine_pool_run(): all threads walk the layers together and meet between phases.
 * A phase is either a list of tasks that the threads draw from one counter, or a function of one
 * row.  Tasks divide output rows, query tiles and whole attention segments, never a sum, so nothing
 * about threads or tasks shows in a result. */
#ifndef MODEL_ENGINE_INTERNAL_H
#define MODEL_ENGINE_INTERNAL_H

#include "model/engine_pool.h"
#include "model/kern_rows.h"
#include "model/model_internal.h"

/* Why a row's sequence fails. */
enum engine_fault {
    ENGINE_FAULT_NONE = 0,
    ENGINE_FAULT_VALUE,  /* a residual or an activation is not finite */
    ENGINE_FAULT_KV,     /* a K or V element overflows the cache's precision */
    ENGINE_FAULT_LOGITS, /* a logit is not finite */
};

/* One token of a step. */
struct engine_row {
    uint32_t seq;
    uint32_t id;
    uint32_t pos;
    uint32_t head;     /* index among the rows whose logits are wanted */
    float *logits;     /* NULL, or float [V], the caller's */
    const float *cs;   /* [rope_dims / 2][2] of its position */
    atomic_uint fault; /* enum engine_fault, relaxed; the first one stays */
    uint32_t fault_layer;
};

/* One sequence of a step: an item that has begun its append. */
struct engine_seq {
    struct engine_item *item;
    unsigned char **pages; /* [.], into engine.pages */
    uint32_t row0, n_rows;
};

/* Rows of one sequence that share the loads of K and V. */
struct engine_tile {
    uint32_t seq;
    uint32_t row0, n_rows;
};

struct engine {
    /* Set by engine_open(), read-only afterwards. */
    const struct model *model;
    const struct kernels *kern;
    struct kv_cache *cache;
    const struct kv_layout *layout;
    struct engine_pool *pool;
    uint32_t n_threads, max_rows, max_items;
    uint32_t n_group;    /* query heads on one KV head */
    uint32_t tile_heads; /* of them in one tile */
    uint32_t tile_rows;  /* tokens in one tile */
    uint32_t pages_per_seq;
    float q_scale;         /* 1 / sqrt(D) */
    double *rope_freq;     /* [rope_dims / 2] */
    float *rope_table;     /* [n_rope_table][rope_dims / 2][2] */
    uint32_t n_rope_table; /* positions in it; later ones are computed a step */
    bool head_quantized;
    struct engine_layer_plan *plans; /* [n_layers] */

    /* Scratch of a step; T = max_rows. */
    struct engine_row *rows;   /* [T] */
    struct engine_seq *seqs;   /* [max_items] */
    struct engine_tile *tiles; /* [T] */
    unsigned char **pages;     /* [max_items][pages_per_seq] */
    uint32_t *wanted;          /* [T] rows whose logits are wanted, ascending */
    uint32_t n_rows, n_seqs, n_tiles, n_wanted;
    float *x;         /* [T][C] residual */
    float *h;         /* [T][C] normed */
    float *q;         /* [T][H * D] */
    float *k, *v;     /* [T][G * D] */
    float *att;       /* [T][H * D] */
    float *gate, *up; /* [T][F] */
    float *y;         /* [T][C] what a block adds to the residual */
    float *cs;        /* [T][rope_dims] for positions past the table */
    int8_t *act_q;    /* of kern_acts, [T][K] for the widest K */
    float *act_d, *act_ds;
    int32_t *act_sum;
    struct engine_local *locals; /* [n_threads] */
    atomic_uint next_task;       /* relaxed: threads only draw from it; reset where they meet */

    /* Attention by segments: partial of (row, head, segment) at (row * H + head) * n_segments +
     * segment. */
    bool split;          /* this step */
    uint32_t n_segments; /* of the longest sequence of this step */
    size_t n_slots;
    float *slot_m, *slot_l; /* [n_slots] */
    float *slot_o;          /* [n_slots][o_stride] */
    size_t o_stride;

    unsigned char *arena; /* owned: all scratch above */
    size_t arena_bytes;
};

/* Which inputs of a layer must be quantized: those that some matrix with integer weights reads. */
struct engine_layer_plan {
    bool qkv, out, ffn, down;
};

/* Scratch of one thread. */
struct engine_local {
    float *o;      /* [2][KERN_ATTN_ROWS][o_stride] */
    float *logits; /* [ENGINE_HEAD_ROWS][ENGINE_HEAD_COLS] */
};

enum {
    /* With fewer attention tasks a thread than this, segments are tasks of their own. */
    ENGINE_SPLIT_TASKS = 4,
    /* Rope rows kept in memory; 16 MiB are 65,536 positions of 64 dimensions. */
    ENGINE_ROPE_TABLE_BYTES = 16 << 20,
    /* Partials for attention by segments; where a step needs more it is not divided. */
    ENGINE_SPLIT_BYTES = 64 << 20,
    /* A task of the output head: so many tokens by so many vocabulary rows. */
    ENGINE_HEAD_ROWS = 32,
    ENGINE_HEAD_COLS = 128,
};

/* ---- engine_forward.c ---- */

/* All layers and the head over e->rows; called on every thread. */
void engine_forward(void *e, uint32_t thread);
/* Mark the row's sequence as failed; the row itself goes on as zeros. */
void engine_row_fail(struct engine *e, uint32_t t, enum engine_fault fault, uint32_t layer);
/* The next index below n that no thread has drawn since the threads last met, or n. */
uint32_t engine_draw(struct engine *e, uint32_t n);

/* ---- engine_attn.c ---- */

/* Cut the step's rows into tiles and decide whether segments are tasks of their own. */
void engine_attn_plan(struct engine *e);
/* Draw attention tasks until none is left: e->att, or the partials where the step is split. */
void engine_attn_run(struct engine *e, uint32_t layer, uint32_t thread);
/* Merge row t's partials into e->att; only where the step is split. */
void engine_attn_merge(struct engine *e, uint32_t t);

/* ---- engine_rows.c ---- */

/* Whether engine_embed() reads tables of this type. */
bool engine_embed_has_type(enum gguf_type type);
/* Row `row` of the table widened to float [n_cols]: exact but for the one rounding of d * q + m. */
void engine_embed(const struct model_table *table, uint32_t row, float *out);
/* Angle per position of every pair: [rope_dims / 2]. */
void engine_rope_frequencies(const struct model *m, double *freq);
/* (cos, sin) of every pair at one position: [n_pairs][2]. */
void engine_rope_row(const double *freq, uint32_t n_pairs, uint32_t pos, float *cs);

#endif

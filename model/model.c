/* Opening a model: every tensor of the file is bound to its place by name, shape and type, then
 * packed for the kernel set into one arena.
 *
 * Two passes.  The first looks at names, shapes and types only, writes down a placement for each
 * tensor and adds up the arena; a file that does not fit is refused before any of its data is
 * read.  The second reads the data once: each tensor is checked finite and packed, copied, or left
 * where the file has it.  A tensor that has no place is refused by name, because leaving it out
 * would give another model. */
#include "model/model_internal.h"

#include "model/gguf_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* ---- What a layer holds ---- */

enum dim { DIM_EMBD, DIM_Q, DIM_KV, DIM_FF };

static uint32_t dim_of(const struct model_params *p, enum dim d)
{
    switch (d) {
    case DIM_EMBD:
        return p->n_embd;
    case DIM_Q:
        return p->n_heads * p->head_dim; /* bounded in model_internal.h, as are the others */
    case DIM_KV:
        return p->n_kv_heads * p->head_dim;
    case DIM_FF:
        return p->n_ff;
    }
    return 0;
}

static const struct {
    const char *suffix;
    size_t offset; /* in struct model_layer */
    enum dim rows, cols;
} layer_matrices[] = {
    {"attn_q", offsetof(struct model_layer, wq), DIM_Q, DIM_EMBD},
    {"attn_k", offsetof(struct model_layer, wk), DIM_KV, DIM_EMBD},
    {"attn_v", offsetof(struct model_layer, wv), DIM_KV, DIM_EMBD},
    {"attn_output", offsetof(struct model_layer, wo), DIM_EMBD, DIM_Q},
    {"ffn_gate", offsetof(struct model_layer, w_gate), DIM_FF, DIM_EMBD},
    {"ffn_up", offsetof(struct model_layer, w_up), DIM_FF, DIM_EMBD},
    {"ffn_down", offsetof(struct model_layer, w_down), DIM_EMBD, DIM_FF},
};

static const struct {
    const char *suffix;
    size_t offset;
} layer_norms[] = {
    {"attn_norm", offsetof(struct model_layer, attn_norm)},
    {"ffn_norm", offsetof(struct model_layer, ffn_norm)},
};

enum {
    N_LAYER_MATRICES = sizeof(layer_matrices) / sizeof(layer_matrices[0]),
    N_LAYER_NORMS = sizeof(layer_norms) / sizeof(layer_norms[0]),
    /* token_embd as table, output, output_norm, rope_freqs */
    N_GLOBAL = 4,
};

/* ---- First pass ---- */

/* Where a tensor goes: exactly one of the three is set. */
struct placement {
    const struct gguf_tensor *tensor;
    struct kern_matrix *matrix;
    struct model_table *table;
    const float **vector;
};

struct binder {
    const struct gguf *g;
    struct model *m;
    bool *used; /* [n_tensors] */
    struct placement *places;
    size_t n_places;
    size_t arena_bytes;
    struct kv_why *why;
};

static int check_shape(const struct binder *b, const struct gguf_tensor *t, uint32_t cols,
                       uint32_t rows)
{
    const uint64_t *d = t->dims;

    if (d[0] == cols && d[1] == rows && d[2] == 1 && d[3] == 1)
        return 0;
    return kv_fail(
        b->why, MODEL_ERR_FORMAT, "tensor %.*s is [%llu, %llu, %llu, %llu], must be [%u, %u, 1, 1]",
        (int)t->name.len, t->name.data, (unsigned long long)d[0], (unsigned long long)d[1],
        (unsigned long long)d[2], (unsigned long long)d[3], cols, rows);
}

static int take_tensor(struct binder *b, const char *name, uint32_t cols, uint32_t rows,
                       const struct gguf_tensor **out)
{
    const struct gguf_tensor *t = gguf_find_tensor(b->g, name);

    if (t == NULL)
        return kv_fail(b->why, MODEL_ERR_FORMAT, "tensor %s is missing", name);
    b->used[t - b->g->tensors] = true;
    *out = t;
    return check_shape(b, t, cols, rows);
}

/* Sizes add up from what lies in the file, packed at most a few times as large: no sum wraps. */
static void reserve(struct binder *b, size_t bytes)
{
    b->arena_bytes += (bytes + KERN_ALIGN - 1) & ~(size_t)(KERN_ALIGN - 1);
}

static void place(struct binder *b, struct placement p)
{
    b->places[b->n_places++] = p;
}

static bool misaligned(const struct gguf_tensor *t)
{
    return (uintptr_t)t->data % MODEL_ALIGN != 0;
}

static int check_type(const struct binder *b, const struct gguf_tensor *t)
{
    if (kern_has_type((enum gguf_type)t->type))
        return 0;
    return kv_fail(b->why, MODEL_ERR_UNSUPPORTED, "tensor %.*s: type %s is not supported",
                   (int)t->name.len, t->name.data, gguf_type_name(t->type));
}

static int bind_matrix(struct binder *b, const char *name, uint32_t rows, uint32_t cols,
                       struct kern_matrix *out)
{
    const struct gguf_tensor *t = NULL;
    size_t packed;
    int rc;

    rc = take_tensor(b, name, cols, rows, &t);
    if (rc < 0)
        return rc;
    rc = check_type(b, t);
    if (rc < 0)
        return rc;
    *out = (struct kern_matrix){.type = (enum gguf_type)t->type, .n_rows = rows, .n_cols = cols};
    packed = b->m->kern->pack_bytes(out->type, rows, cols);
    reserve(b, packed != 0 ? packed : misaligned(t) ? t->n_bytes : 0);
    place(b, (struct placement){.tensor = t, .matrix = out});
    return 0;
}

static int bind_table(struct binder *b, const char *name, uint32_t rows, uint32_t cols,
                      struct model_table *out)
{
    const struct gguf_tensor *t = NULL;
    int rc;

    rc = take_tensor(b, name, cols, rows, &t);
    if (rc < 0)
        return rc;
    rc = check_type(b, t);
    if (rc < 0)
        return rc;
    *out = (struct model_table){.type = (enum gguf_type)t->type,
                                .n_rows = rows,
                                .n_cols = cols,
                                .row_bytes = t->n_bytes / rows};
    reserve(b, misaligned(t) ? t->n_bytes : 0);
    place(b, (struct placement){.tensor = t, .table = out});
    return 0;
}

static int bind_vector(struct binder *b, const char *name, uint32_t n, const float **out)
{
    const struct gguf_tensor *t = NULL;
    int rc;

    rc = take_tensor(b, name, n, 1, &t);
    if (rc < 0)
        return rc;
    if (t->type != GGUF_F32)
        return kv_fail(b->why, MODEL_ERR_UNSUPPORTED, "tensor %s: type %s, must be F32", name,
                       gguf_type_name(t->type));
    reserve(b, t->n_bytes);
    place(b, (struct placement){.tensor = t, .vector = out});
    return 0;
}

static int bind_layer(struct binder *b, uint32_t index)
{
    struct model_layer *layer = &b->m->layers[index];
    const struct model_params *p = &b->m->params;
    char name[64];
    size_t i;
    int rc;

    for (i = 0; i < N_LAYER_MATRICES; i++) {
        snprintf(name, sizeof(name), "blk.%u.%s.weight", index, layer_matrices[i].suffix);
        rc = bind_matrix(b, name, dim_of(p, layer_matrices[i].rows),
                         dim_of(p, layer_matrices[i].cols),
                         (struct kern_matrix *)((char *)layer + layer_matrices[i].offset));
        if (rc < 0)
            return rc;
    }
    for (i = 0; i < N_LAYER_NORMS; i++) {
        snprintf(name, sizeof(name), "blk.%u.%s.weight", index, layer_norms[i].suffix);
        rc = bind_vector(b, name, p->n_embd,
                         (const float **)((char *)layer + layer_norms[i].offset));
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int check_all_used(const struct binder *b)
{
    uint64_t i;

    for (i = 0; i < b->g->n_tensors; i++) {
        const struct gguf_tensor *t = &b->g->tensors[i];

        if (!b->used[i])
            return kv_fail(b->why, MODEL_ERR_UNSUPPORTED,
                           "tensor %.*s is not supported for architecture %s", (int)t->name.len,
                           t->name.data, b->m->params.arch);
    }
    return 0;
}

static int bind_all(struct binder *b)
{
    struct model *m = b->m;
    const struct model_params *p = &m->params;
    uint32_t i;
    int rc;

    rc = bind_table(b, "token_embd.weight", p->n_vocab, p->n_embd, &m->token_embd);
    if (rc < 0)
        return rc;
    rc = bind_matrix(b, p->tied ? "token_embd.weight" : "output.weight", p->n_vocab, p->n_embd,
                     &m->output);
    if (rc < 0)
        return rc;
    rc = bind_vector(b, "output_norm.weight", p->n_embd, &m->output_norm);
    if (rc < 0)
        return rc;
    if (gguf_find_tensor(b->g, "rope_freqs.weight") != NULL) {
        rc = bind_vector(b, "rope_freqs.weight", p->rope_dims / 2, &m->rope_factors);
        if (rc < 0)
            return rc;
    }
    for (i = 0; i < p->n_layers; i++) {
        rc = bind_layer(b, i);
        if (rc < 0)
            return rc;
    }
    return check_all_used(b);
}

/* ---- Second pass ---- */

static int check_finite(const struct gguf_tensor *t, struct kv_why *why)
{
    uint32_t block = 1, block_bytes = 1;
    uint64_t n, at;

    gguf_type_block(t->type, &block, &block_bytes); /* known since gguf_open() */
    n = t->n_bytes / block_bytes;
    at = gguf_type_first_not_finite(t->type, t->data, n);
    if (at == n)
        return 0;
    return kv_fail(why, MODEL_ERR_FORMAT, "tensor %.*s: %s %llu is not finite", (int)t->name.len,
                   t->name.data, block == 1 ? "weight" : "scale of block", (unsigned long long)at);
}

/* The next n bytes of the arena. */
static unsigned char *arena_take(struct model *m, size_t *at, size_t n)
{
    unsigned char *p = m->arena + *at;

    *at += (n + KERN_ALIGN - 1) & ~(size_t)(KERN_ALIGN - 1);
    m->weight_bytes += n;
    return p;
}

/* The tensor's bytes, aligned: in place where the file has them so. */
static const unsigned char *keep(struct model *m, size_t *at, const struct gguf_tensor *t)
{
    unsigned char *copy;

    if (!misaligned(t)) {
        m->weight_bytes += t->n_bytes;
        return t->data;
    }
    copy = arena_take(m, at, t->n_bytes);
    memcpy(copy, t->data, t->n_bytes);
    return copy;
}

static void pack_matrix(struct model *m, size_t *at, const struct gguf_tensor *t,
                        struct kern_matrix *w)
{
    size_t packed = m->kern->pack_bytes(w->type, w->n_rows, w->n_cols);
    unsigned char *dst;

    if (packed == 0) {
        w->data = keep(m, at, t);
        return;
    }
    dst = arena_take(m, at, packed);
    m->kern->pack(w->type, w->n_rows, w->n_cols, t->data, dst);
    w->data = dst;
}

static int fill(struct model *m, size_t *at, const struct placement *p, struct kv_why *why)
{
    int rc = check_finite(p->tensor, why);
    unsigned char *copy;

    if (rc < 0)
        return rc;
    if (p->matrix != NULL) {
        pack_matrix(m, at, p->tensor, p->matrix);
    } else if (p->table != NULL) {
        p->table->data = keep(m, at, p->tensor);
    } else {
        copy = arena_take(m, at, p->tensor->n_bytes);
        memcpy(copy, p->tensor->data, p->tensor->n_bytes);
        *p->vector = (const float *)(const void *)copy;
    }
    return 0;
}

static int open_arena(struct model *m, size_t bytes, struct kv_why *why)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (p == MAP_FAILED)
        return kv_fail(why, MODEL_ERR_NOMEM, "no memory for %zu bytes of weights", bytes);
    m->arena = p;
    m->arena_bytes = bytes;
    /* A decode step streams all of it; where the kernel has no huge pages, small ones do. */
    madvise(p, bytes, MADV_HUGEPAGE);
    return 0;
}

static int check_rope_factors(const struct model *m, struct kv_why *why)
{
    uint32_t i;

    for (i = 0; m->rope_factors != NULL && i < m->params.rope_dims / 2; i++) {
        if (!(m->rope_factors[i] > 0))
            return kv_fail(why, MODEL_ERR_FORMAT, "tensor rope_freqs.weight: factor %u is %g", i,
                           (double)m->rope_factors[i]);
    }
    return 0;
}

static int fill_all(struct binder *b)
{
    size_t at = 0, i;
    int rc;

    rc = open_arena(b->m, b->arena_bytes, b->why); /* norms are copied, so it is never empty */
    if (rc < 0)
        return rc;
    for (i = 0; i < b->n_places; i++) {
        rc = fill(b->m, &at, &b->places[i], b->why);
        if (rc < 0)
            return rc;
    }
    /* A tied head that is read in place is the table itself. */
    if (b->m->output.data == b->m->token_embd.data)
        b->m->weight_bytes -= b->places[0].tensor->n_bytes;
    return check_rope_factors(b->m, b->why);
}

/* ---- Both ---- */

static int bind_model(const struct gguf *g, struct model *m, struct kv_why *why)
{
    struct binder b = {.g = g, .m = m, .why = why};
    size_t n_layers = m->params.n_layers;
    int rc = MODEL_ERR_NOMEM;

    b.used = calloc((size_t)g->n_tensors + 1, sizeof(*b.used));
    b.places = calloc(n_layers * (N_LAYER_MATRICES + N_LAYER_NORMS) + N_GLOBAL, sizeof(*b.places));
    m->layers = calloc(n_layers, sizeof(*m->layers));
    if (b.used == NULL || b.places == NULL || m->layers == NULL) {
        kv_fail(why, rc, "no memory for %zu layers", n_layers);
        goto out;
    }
    rc = bind_all(&b);
    if (rc < 0)
        goto out;
    rc = fill_all(&b);
out:
    free(b.used);
    free(b.places);
    return rc;
}

int model_open(const struct gguf *g, const char *kernels, struct model **out, struct kv_why *why)
{
    struct model *m = calloc(1, sizeof(*m));
    int rc;

    if (m == NULL)
        return kv_fail(why, MODEL_ERR_NOMEM, "no memory for a model");
    rc = model_read_params(g, &m->params, why);
    if (rc < 0)
        goto out;
    m->kern = kern_find(kernels);
    if (m->kern == NULL) {
        rc = kv_fail(why, MODEL_ERR_INVALID, "kernels \"%s\" are not built or cannot run here",
                     kernels);
        goto out;
    }
    rc = bind_model(g, m, why);
    if (rc < 0)
        goto out;
    rc = gguf_fingerprint(g, &m->fingerprint, why);
    if (rc < 0)
        goto out;
    rc = model_selftest(m, &m->numerics_id, why);
    if (rc < 0)
        goto out;
    *out = m;
    m = NULL; /* now the caller's */
out:
    model_close(m);
    return rc;
}

void model_close(struct model *m)
{
    if (m == NULL)
        return;
    if (m->arena != NULL)
        munmap(m->arena, m->arena_bytes);
    free(m->layers);
    free(m);
}

const struct model_params *model_params(const struct model *m)
{
    return &m->params;
}

const char *model_kernels(const struct model *m)
{
    return m->kern->name;
}

const struct kv_digest *model_fingerprint(const struct model *m)
{
    return &m->fingerprint;
}

const struct kv_digest *model_numerics_id(const struct model *m)
{
    return &m->numerics_id;
}

size_t model_weight_bytes(const struct model *m)
{
    return m->weight_bytes;
}

void model_geometry(const struct model *m, enum kv_precision precision, struct kv_geometry *out)
{
    *out = (struct kv_geometry){.n_layers = m->params.n_layers,
                                .n_kv_heads = m->params.n_kv_heads,
                                .head_dim = m->params.head_dim,
                                .precision = precision};
}

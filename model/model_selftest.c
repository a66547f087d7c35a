/* The numerics id: fixed inputs through every kernel that a model uses, digested.
 *
 * Two machines, builds or kernel sets with one id compute the same bits, as far as these inputs can
 * tell; a compiler or a library that does not keep the rules shows here before it shows in a
 * cache.  The rope table is digested itself because it comes from the C library's sin and cos. */
#include "model/engine_internal.h"

#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>

enum {
    N_OUT = 40,   /* matrix rows: two whole tiles of 16 and a half one */
    N_IN = 544,   /* columns: two segments of 256 and one block */
    N_TOKENS = 5, /* more than one tile of any set, and odd */
    N_EXP = 4096,
    N_POSITIONS = 700, /* three segments, the last one short */
    N_HEADS = 2,
    PAGE_TOKENS = 64,
    N_PAGES = (N_POSITIONS + PAGE_TOKENS - 1) / PAGE_TOKENS,
    N_QUERIES = 5,
    ROPE_POSITIONS = 8192,
    TYPES = 32, /* ids of weight types are below this */
};

struct selftest {
    const struct model *model;
    const struct kernels *kern;
    EVP_MD_CTX *md;
    uint64_t state; /* of the generator */
};

/* splitmix64 */
static uint64_t next_u64(struct selftest *s)
{
    uint64_t z = s->state += 0x9e3779b97f4a7c15u;

    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* In [-1, 1), a multiple of 2^-23. */
static float next_float(struct selftest *s)
{
    return (float)((int32_t)(next_u64(s) >> 40) - (1 << 23)) * 0x1p-23f;
}

static void fill(struct selftest *s, float *x, size_t n, float scale)
{
    for (size_t i = 0; i < n; i++)
        x[i] = next_float(s) * scale;
}

static int feed(struct selftest *s, const void *data, size_t len)
{
    return EVP_DigestUpdate(s->md, data, len) == 1 ? 0 : MODEL_ERR_NOMEM;
}

/* ---- Matrices ---- */

/* A weight of a float type, or a block with random quants and plain scales. */
static void fill_block(struct selftest *s, enum gguf_type type, unsigned char *p, size_t n)
{
    const float x = next_float(s) * 0.1f;
    const uint16_t half[2] = {kern_f16_from_f32(x), kern_f16_from_f32(next_float(s))};
    uint32_t bits;

    for (size_t i = 0; i < n; i++)
        p[i] = (unsigned char)next_u64(s);
    memcpy(&bits, &x, sizeof(bits));
    if (type == GGUF_F32)
        memcpy(p, &bits, 4);
    else if (type == GGUF_BF16)
        memcpy(p, (const uint16_t[]){(uint16_t)(bits >> 16)}, 2);
    else
        memcpy(p, half, type == GGUF_Q4_1 ? 4 : 2); /* the scale, and Q4_1's minimum, come first */
}

/* The file's bytes of a matrix. */
static unsigned char *make_weights(struct selftest *s, enum gguf_type type, size_t *len)
{
    uint32_t n_weights, n_bytes;
    unsigned char *src;

    if (!gguf_type_block(type, &n_weights, &n_bytes))
        return NULL;
    *len = (size_t)N_OUT * N_IN / n_weights * n_bytes;
    src = malloc(*len);
    for (size_t i = 0; src && i < *len; i += n_bytes)
        fill_block(s, type, src + i, n_bytes);
    return src;
}

struct matrix_scratch {
    float x[N_TOKENS * N_IN], y[N_TOKENS * N_OUT];
    int8_t q[N_TOKENS * N_IN];
    float d[N_TOKENS * N_IN / KERN_BLOCK], ds[N_TOKENS * N_IN / KERN_BLOCK];
    int32_t sum[N_TOKENS * N_IN / KERN_BLOCK];
};

static int run_matrix(struct selftest *s, const struct kern_matrix *w, struct matrix_scratch *m)
{
    struct kern_acts acts = {N_TOKENS, N_IN, m->x, m->q, m->d, m->ds, m->sum};
    int rc = 0;

    fill(s, m->x, N_TOKENS * N_IN, 3.0f);
    for (uint32_t t = 0; t < N_TOKENS; t++)
        if (s->kern->quantize(&acts, t) != 0)
            return MODEL_ERR_NUMERIC;
    s->kern->gemm(w, 0, N_OUT, &acts, m->y, N_OUT);
    rc = feed(s, m->q, sizeof(m->q));
    if (rc == 0)
        rc = feed(s, m->d, sizeof(m->d));
    if (rc == 0)
        rc = feed(s, m->ds, sizeof(m->ds));
    return rc == 0 ? feed(s, m->y, sizeof(m->y)) : rc;
}

static int test_matrix(struct selftest *s, enum gguf_type type)
{
    const size_t packed_bytes = s->kern->pack_bytes(type, N_OUT, N_IN);
    struct kern_matrix w = {type, N_OUT, N_IN, NULL};
    struct matrix_scratch *m = NULL;
    unsigned char *src = NULL;
    void *packed = NULL;
    size_t len;
    int rc = MODEL_ERR_NOMEM;

    src = make_weights(s, type, &len);
    m = malloc(sizeof(*m));
    if (!src || !m)
        goto out;
    w.data = src;
    if (packed_bytes > 0) {
        if (posix_memalign(&packed, KERN_ALIGN, packed_bytes) != 0) {
            packed = NULL;
            goto out;
        }
        s->kern->pack(type, N_OUT, N_IN, src, packed);
        w.data = packed;
    }
    rc = run_matrix(s, &w, m);
out:
    free(packed);
    free(m);
    free(src);
    return rc;
}

static void mark(bool *used, const struct kern_matrix *w)
{
    if ((unsigned)w->type < TYPES)
        used[w->type] = true;
}

static int test_matrices(struct selftest *s)
{
    const struct model *m = s->model;
    bool used[TYPES] = {false};
    int rc = 0;

    for (uint32_t l = 0; l < m->params.n_layers; l++) {
        const struct model_layer *w = &m->layers[l];
        const struct kern_matrix *all[] = {&w->wq,     &w->wk,   &w->wv,    &w->wo,
                                           &w->w_gate, &w->w_up, &w->w_down};

        for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
            mark(used, all[i]);
    }
    mark(used, &m->output);
    for (uint32_t t = 0; t < TYPES && rc == 0; t++)
        if (used[t])
            rc = test_matrix(s, (enum gguf_type)t);
    return rc;
}

/* ---- Rows ---- */

static int test_exp(struct selftest *s)
{
    static const float edges[] = {0.0f,  -0.0f,     1.0f,  -87.0f, -87.00001f,
                                  88.0f, 88.00001f, 1e30f, -1e30f, 0x1p-140f};
    float y[N_EXP];

    for (int i = 0; i < N_EXP; i++)
        y[i] = s->kern->exp((float)(i - N_EXP / 2) * 0.0437f);
    for (size_t i = 0; i < sizeof(edges) / sizeof(edges[0]); i++)
        y[i] = s->kern->exp(edges[i]);
    return feed(s, y, sizeof(y));
}

static int test_rows(struct selftest *s)
{
    float x[N_IN + 3], w[N_IN + 3], y[N_IN + 3], out[N_IN + 3];
    const uint32_t n = N_IN + 3; /* a tail after every width of vector */
    int rc;

    fill(s, x, n, 5.0f);
    fill(s, w, n, 2.0f);
    s->kern->rmsnorm(x, w, n, s->model->params.norm_eps, y);
    rc = feed(s, y, sizeof(y));
    fill(s, x, n, 40.0f);
    s->kern->silu_mul(x, w, n, out);
    s->kern->add(out, y, n);
    if (!s->kern->finite(out, n))
        return MODEL_ERR_NUMERIC;
    return rc == 0 ? feed(s, out, sizeof(out)) : rc;
}

/* The rope table, and one head turned by each of its rows. */
static int test_rope(struct selftest *s)
{
    const struct model_params *p = &s->model->params;
    const uint32_t n = p->n_ctx < ROPE_POSITIONS ? p->n_ctx : ROPE_POSITIONS;
    double *freq = malloc((p->rope_dims / 2 + 1) * sizeof(*freq));
    float *cs = malloc((p->rope_dims + 1) * sizeof(*cs));
    float *x = malloc(p->head_dim * sizeof(*x));
    int rc = freq && cs && x ? 0 : MODEL_ERR_NOMEM;

    if (rc == 0) {
        engine_rope_frequencies(s->model, freq);
        fill(s, x, p->head_dim, 1.0f);
    }
    for (uint32_t pos = 0; pos < n && rc == 0; pos++) {
        engine_rope_row(freq, p->rope_dims / 2, pos, cs);
        s->kern->rope(x, 1, p->head_dim, p->rope_dims, p->rope, cs);
        rc = feed(s, cs, p->rope_dims / 2 * 2 * sizeof(*cs));
    }
    if (rc == 0)
        rc = feed(s, x, p->head_dim * sizeof(*x));
    free(x);
    free(cs);
    free(freq);
    return rc;
}

/* ---- Attention ---- */

struct attn_scratch {
    struct kv_layout layout;
    unsigned char *pages[N_PAGES];
    float *k, *v;             /* [N_HEADS * D] */
    float *q[N_QUERIES];      /* [D] */
    float *o[2 * N_QUERIES];  /* [D] */
    float *floats;            /* owned: all of the above */
    unsigned char *page_data; /* owned */
};

static int attn_open(struct selftest *s, enum kv_precision precision, struct attn_scratch *a)
{
    const uint32_t dim = s->model->params.head_dim;
    const struct kv_geometry geometry = {1, N_HEADS, dim, precision};
    void *pages = NULL;

    if (kv_layout_init(&a->layout, &geometry, PAGE_TOKENS, NULL) != 0)
        return MODEL_ERR_INVALID;
    if (posix_memalign(&pages, 64, N_PAGES * a->layout.page_bytes) != 0)
        return MODEL_ERR_NOMEM;
    a->page_data = pages;
    memset(pages, 0, N_PAGES * a->layout.page_bytes);
    a->floats = calloc(2 * N_HEADS + 3 * N_QUERIES, dim * sizeof(float));
    if (!a->floats)
        return MODEL_ERR_NOMEM;
    a->k = a->floats;
    a->v = a->k + N_HEADS * dim;
    for (uint32_t i = 0; i < N_PAGES; i++)
        a->pages[i] = a->page_data + i * a->layout.page_bytes;
    for (uint32_t i = 0; i < N_QUERIES; i++)
        a->q[i] = a->v + (N_HEADS + i) * dim;
    for (uint32_t i = 0; i < 2 * N_QUERIES; i++)
        a->o[i] = a->q[N_QUERIES - 1] + (1 + i) * dim;
    return 0;
}

static int attn_put(struct selftest *s, struct attn_scratch *a)
{
    const uint32_t dim = s->model->params.head_dim;

    for (uint32_t pos = 0; pos < N_POSITIONS; pos++) {
        fill(s, a->k, N_HEADS * dim, 4.0f);
        fill(s, a->v, N_HEADS * dim, 1.0f);
        if (s->kern->kv_put(&a->layout, a->pages[pos / PAGE_TOKENS], 0, pos % PAGE_TOKENS, a->k,
                            a->v) != 0)
            return MODEL_ERR_NUMERIC;
    }
    return feed(s, a->page_data, N_PAGES * a->layout.page_bytes);
}

static int attn_run(struct selftest *s, struct attn_scratch *a, uint32_t head)
{
    static const uint32_t n_kv[N_QUERIES] = {N_POSITIONS, 16, 257, 511, N_POSITIONS - 1};
    const uint32_t dim = s->model->params.head_dim;
    const struct kern_attn attn = {.kv = &a->layout,
                                   .pages = (const unsigned char *const *)a->pages,
                                   .kv_head = head,
                                   .n_q = N_QUERIES,
                                   .q = (const float *const *)a->q,
                                   .n_kv = n_kv};
    struct kern_partial total[N_QUERIES], next[N_QUERIES];
    int rc = 0;

    for (uint32_t i = 0; i < N_QUERIES; i++) {
        fill(s, a->q[i], dim, 0.5f);
        total[i].o = a->o[i];
        next[i].o = a->o[N_QUERIES + i];
    }
    s->kern->attn_segment(&attn, 0, total);
    for (uint32_t seg = 1; seg * KERN_SEGMENT < N_POSITIONS; seg++) {
        s->kern->attn_segment(&attn, seg, next);
        for (uint32_t i = 0; i < N_QUERIES; i++)
            if (kern_segment_positions(n_kv[i], seg) > 0)
                s->kern->attn_merge(&total[i], &next[i], dim);
    }
    for (uint32_t i = 0; i < N_QUERIES && rc == 0; i++) {
        s->kern->attn_finish(&total[i], dim, a->o[N_QUERIES]);
        rc = feed(s, a->o[N_QUERIES], dim * sizeof(float));
    }
    return rc;
}

static int test_attention(struct selftest *s, enum kv_precision precision)
{
    struct attn_scratch a = {.floats = NULL};
    int rc = attn_open(s, precision, &a);

    if (rc == 0)
        rc = attn_put(s, &a);
    for (uint32_t head = 0; head < N_HEADS && rc == 0; head++)
        rc = attn_run(s, &a, head);
    free(a.floats);
    free(a.page_data);
    return rc;
}

static int run_all(struct selftest *s)
{
    static const char tag[] = "baton numerics 1";
    int rc = feed(s, tag, sizeof(tag));

    if (rc == 0)
        rc = test_matrices(s);
    if (rc == 0)
        rc = test_exp(s);
    if (rc == 0)
        rc = test_rows(s);
    if (rc == 0)
        rc = test_rope(s);
    if (rc == 0)
        rc = test_attention(s, KV_F32);
    if (rc == 0)
        rc = test_attention(s, KV_F16);
    if (rc == 0 && s->model->params.head_dim % KV_Q8_BLOCK == 0)
        rc = test_attention(s, KV_Q8);
    return rc;
}

int model_selftest(const struct model *m, struct kv_digest *out, struct kv_why *why)
{
    struct selftest s = {.model = m, .kern = m->kern, .md = EVP_MD_CTX_new(), .state = 1};
    const unsigned mode = engine_float_enter();
    struct kv_digest digest;
    int rc = MODEL_ERR_NOMEM;

    if (s.md && EVP_DigestInit_ex(s.md, EVP_sha256(), NULL) == 1)
        rc = run_all(&s);
    if (rc == 0 && EVP_DigestFinal_ex(s.md, digest.bytes, NULL) != 1)
        rc = MODEL_ERR_NOMEM;
    if (rc == 0)
        *out = digest;
    else
        kv_fail(why, rc, "the self-test of kernel set %s: %s", s.kern->name, model_strerror(rc));
    engine_float_leave(mode);
    EVP_MD_CTX_free(s.md);
    return rc;
}

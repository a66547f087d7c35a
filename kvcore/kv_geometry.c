#include "kvcore/kvcore.h"

#include <string.h>

static const char *const precision_names[] = {[KV_F32] = "f32", [KV_F16] = "f16", [KV_Q8] = "q8"};

const char *kv_precision_name(enum kv_precision precision)
{
    if ((unsigned)precision >= sizeof(precision_names) / sizeof(precision_names[0]))
        return NULL;
    return precision_names[precision];
}

int kv_precision_parse(const char *name)
{
    for (int i = 0; i <= KV_Q8; i++)
        if (strcmp(name, precision_names[i]) == 0)
            return i;
    return KV_ERR_INVALID;
}

static size_t element_bytes(enum kv_precision precision)
{
    return precision == KV_F32 ? 4 : precision == KV_F16 ? 2 : 1;
}

/* One head's K or V of a position, with its scales. */
static size_t vector_bytes(const struct kv_geometry *g)
{
    const size_t elements = element_bytes(g->precision) * g->head_dim;

    return g->precision == KV_Q8 ? elements + g->head_dim / KV_Q8_BLOCK * sizeof(uint16_t)
                                 : elements;
}

static size_t round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

/* Each product is bounded before the next factor comes in, so nothing can wrap. */
int kv_geometry_check(const struct kv_geometry *g, struct kv_why *why)
{
    const uint64_t limit = KV_MAX_POSITION_BYTES;
    uint64_t bytes;

    if (kv_precision_name(g->precision) == NULL)
        return kv_fail(why, KV_ERR_INVALID, "precision is %u: f32 is 0, f16 is 1, q8 is 2",
                       (unsigned)g->precision);
    if (g->n_layers == 0)
        return kv_fail(why, KV_ERR_INVALID, "n_layers is 0");
    if (g->n_kv_heads == 0)
        return kv_fail(why, KV_ERR_INVALID, "n_kv_heads is 0");
    if (g->head_dim == 0)
        return kv_fail(why, KV_ERR_INVALID, "head_dim is 0");
    if (g->head_dim > KV_MAX_HEAD_DIM)
        return kv_fail(why, KV_ERR_LIMIT, "head_dim is %u: at most %u", g->head_dim,
                       (unsigned)KV_MAX_HEAD_DIM);
    if (g->precision == KV_Q8 && g->head_dim % KV_Q8_BLOCK != 0)
        return kv_fail(why, KV_ERR_INVALID, "head_dim is %u: precision q8 needs a multiple of %u",
                       g->head_dim, (unsigned)KV_Q8_BLOCK);
    bytes = 2 * vector_bytes(g);
    if (g->n_kv_heads > limit / bytes)
        return kv_fail(why, KV_ERR_LIMIT, "n_kv_heads is %u: a position would be over %llu bytes",
                       g->n_kv_heads, (unsigned long long)limit);
    bytes *= g->n_kv_heads;
    if (g->n_layers > limit / bytes)
        return kv_fail(why, KV_ERR_LIMIT, "n_layers is %u: a position would be over %llu bytes",
                       g->n_layers, (unsigned long long)limit);
    return 0;
}

bool kv_geometry_equal(const struct kv_geometry *a, const struct kv_geometry *b)
{
    return a->n_layers == b->n_layers && a->n_kv_heads == b->n_kv_heads &&
           a->head_dim == b->head_dim && a->precision == b->precision;
}

size_t kv_position_bytes(const struct kv_geometry *g)
{
    return (size_t)g->n_layers * g->n_kv_heads * 2 * vector_bytes(g);
}

uint32_t kv_frame_positions(const struct kv_geometry *g)
{
    size_t bytes = kv_position_bytes(g);
    uint32_t n = 1;

    while (2 * n * bytes <= KV_FRAME_BYTES)
        n *= 2;
    return n;
}

int kv_layout_init(struct kv_layout *out, const struct kv_geometry *g, uint32_t page_tokens,
                   struct kv_why *why)
{
    struct kv_layout l = {.geometry = *g, .page_tokens = page_tokens};
    size_t scales_bytes;
    int rc = kv_geometry_check(g, why);

    if (rc < 0)
        return rc;
    if (page_tokens < KV_PAGE_TOKENS_MIN || page_tokens > KV_PAGE_TOKENS_MAX ||
        (page_tokens & (page_tokens - 1)) != 0)
        return kv_fail(why, KV_ERR_INVALID, "page_tokens is %u: a power of two from %u to %u",
                       page_tokens, (unsigned)KV_PAGE_TOKENS_MIN, (unsigned)KV_PAGE_TOKENS_MAX);
    l.element_bytes = element_bytes(g->precision);
    l.k_head_bytes = round_up(page_tokens * g->head_dim * l.element_bytes, KV_PAGE_ALIGN);
    if (g->precision == KV_Q8)
        l.scales_head_bytes =
            round_up(page_tokens * (g->head_dim / KV_Q8_BLOCK) * sizeof(uint16_t), KV_PAGE_ALIGN);
    scales_bytes = g->n_kv_heads * l.scales_head_bytes;
    l.v_offset = g->n_kv_heads * l.k_head_bytes + scales_bytes;
    l.v_row_bytes = g->n_kv_heads * g->head_dim * l.element_bytes;
    l.layer_bytes = round_up(l.v_offset + page_tokens * l.v_row_bytes, KV_PAGE_ALIGN);
    if (g->precision == KV_Q8) {
        l.ks_offset = l.v_offset - scales_bytes;
        l.vs_offset = l.layer_bytes;
        l.layer_bytes += scales_bytes;
    }
    l.ids_offset = g->n_layers * l.layer_bytes;
    l.page_bytes = round_up(l.ids_offset + page_tokens * sizeof(uint32_t), KV_PAGE_ALIGN);
    *out = l;
    return 0;
}

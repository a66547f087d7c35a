/* The only file that knows how rows stand in a page: clone, gather, scatter.
 *
 * K of one layer and head is [P / 16][D][16]: lane s of group g is position 16 g + s.  V of one
 * layer is [P][H][D].  A position outside memory is, for each layer, K [H][D] and then V [H][D].
 * In q8 the scales of K and of V stand as K does, with D / 32 for D, and follow K and V outside.
 *
 * Elements are moved, never looked at: 4 bytes, 2 or 1. */
#include "kvcore/kv_cache.h"

#include <assert.h>
#include <string.h>

/* Something of a layer that stands in groups of 16 positions, [H][P / 16][dim][16]. */
struct lanes {
    size_t offset;     /* from the layer's first byte */
    size_t head_bytes; /* from one head's to the next head's */
    size_t element_bytes;
    uint32_t dim;
};

static struct lanes k_lanes(const struct kv_layout *l)
{
    return (struct lanes){0, l->k_head_bytes, l->element_bytes, l->geometry.head_dim};
}

/* Scales of q8: of K or of V, as the offset says. */
static struct lanes scale_lanes(const struct kv_layout *l, size_t offset)
{
    return (struct lanes){offset, l->scales_head_bytes, sizeof(uint16_t),
                          l->geometry.head_dim / KV_Q8_BLOCK};
}

static size_t lane_offset(const struct lanes *a, uint32_t head, uint32_t slot)
{
    return a->offset + head * a->head_bytes +
           (slot / KV_LANES * (size_t)a->dim * KV_LANES + slot % KV_LANES) * a->element_bytes;
}

/* ---- Clone ---- */

/* One head's: whole groups as they are, the valid lanes of a group that is partly valid. */
static void clone_head(const struct lanes *a, unsigned char *dst, const unsigned char *src,
                       uint32_t n_valid)
{
    const size_t lanes_bytes = KV_LANES * a->element_bytes;
    const size_t group_bytes = a->dim * lanes_bytes;
    const size_t whole = n_valid / KV_LANES * group_bytes;
    const size_t valid_bytes = n_valid % KV_LANES * a->element_bytes;

    memcpy(dst, src, whole);
    memset(dst + whole, 0, a->head_bytes - whole);
    if (valid_bytes == 0)
        return;
    for (size_t at = whole; at < whole + group_bytes; at += lanes_bytes)
        memcpy(dst + at, src + at, valid_bytes);
}

static void clone_lanes(const struct lanes *a, uint32_t n_heads, unsigned char *dst,
                        const unsigned char *src, uint32_t n_valid)
{
    for (uint32_t h = 0; h < n_heads; h++)
        clone_head(a, dst + lane_offset(a, h, 0), src + lane_offset(a, h, 0), n_valid);
}

static void clone_layer(const struct kv_layout *l, unsigned char *dst, const unsigned char *src,
                        uint32_t n_valid)
{
    const uint32_t n_heads = l->geometry.n_kv_heads;
    const bool q8 = l->geometry.precision == KV_Q8;
    const size_t v_end = q8 ? l->vs_offset : l->layer_bytes;
    const size_t v_valid = n_valid * l->v_row_bytes;
    const struct lanes k = k_lanes(l), ks = scale_lanes(l, l->ks_offset),
                       vs = scale_lanes(l, l->vs_offset);

    clone_lanes(&k, n_heads, dst, src, n_valid);
    memcpy(dst + l->v_offset, src + l->v_offset, v_valid);
    memset(dst + l->v_offset + v_valid, 0, v_end - l->v_offset - v_valid);
    if (q8) {
        clone_lanes(&ks, n_heads, dst, src, n_valid);
        clone_lanes(&vs, n_heads, dst, src, n_valid);
    }
}

void kv_page_clone(const struct kv_layout *l, unsigned char *dst, const unsigned char *src,
                   uint32_t n_valid)
{
    const size_t ids_valid = n_valid * sizeof(uint32_t);

    for (uint32_t layer = 0; layer < l->geometry.n_layers; layer++)
        clone_layer(l, dst + layer * l->layer_bytes, src + layer * l->layer_bytes, n_valid);
    memcpy(dst + l->ids_offset, src + l->ids_offset, ids_valid);
    memset(dst + l->ids_offset + ids_valid, 0, l->page_bytes - l->ids_offset - ids_valid);
}

/* ---- One vector: `dim` elements, 16 apart in the page ---- */

static void lane_to_row(unsigned char *dst, const unsigned char *src, uint32_t dim, size_t element)
{
    if (element == 1) {
        for (uint32_t i = 0; i < dim; i++)
            dst[i] = src[i * (size_t)KV_LANES];
    } else if (element == 2) {
        const uint16_t *from = (const uint16_t *)(const void *)src;

        for (uint32_t i = 0; i < dim; i++)
            memcpy(dst + 2 * (size_t)i, &from[i * (size_t)KV_LANES], 2);
    } else {
        const uint32_t *from = (const uint32_t *)(const void *)src;

        for (uint32_t i = 0; i < dim; i++)
            memcpy(dst + 4 * (size_t)i, &from[i * (size_t)KV_LANES], 4);
    }
}

static void row_to_lane(unsigned char *dst, const unsigned char *src, uint32_t dim, size_t element)
{
    if (element == 1) {
        for (uint32_t i = 0; i < dim; i++)
            dst[i * (size_t)KV_LANES] = src[i];
    } else if (element == 2) {
        uint16_t *to = (uint16_t *)(void *)dst;

        for (uint32_t i = 0; i < dim; i++)
            memcpy(&to[i * (size_t)KV_LANES], src + 2 * (size_t)i, 2);
    } else {
        uint32_t *to = (uint32_t *)(void *)dst;

        for (uint32_t i = 0; i < dim; i++)
            memcpy(&to[i * (size_t)KV_LANES], src + 4 * (size_t)i, 4);
    }
}

static size_t v_offset(const struct kv_layout *l, uint32_t slot)
{
    return l->v_offset + slot * l->v_row_bytes;
}

/* ---- Gather ---- */

/* A run of `n` positions of one page from `slot` on, and where the first of them goes. */
struct run {
    uint32_t slot, n;
    unsigned char *dst;
    size_t position_bytes;
};

/* Head by head, so that a group is read whole while it is in cache; r->dst goes on past [H][dim].
 */
static void gather_lanes(const struct lanes *a, uint32_t n_heads, const unsigned char *layer,
                         struct run *r)
{
    for (uint32_t h = 0; h < n_heads; h++) {
        for (uint32_t i = 0; i < r->n; i++)
            lane_to_row(r->dst + i * r->position_bytes, layer + lane_offset(a, h, r->slot + i),
                        a->dim, a->element_bytes);
        r->dst += a->dim * a->element_bytes;
    }
}

static void gather_v(const struct kv_layout *l, const unsigned char *layer, struct run *r)
{
    for (uint32_t i = 0; i < r->n; i++)
        memcpy(r->dst + i * r->position_bytes, layer + v_offset(l, r->slot + i), l->v_row_bytes);
    r->dst += l->v_row_bytes;
}

/* All positions of one layer at a time. */
static void gather_page(const struct kv_layout *l, const unsigned char *page, struct run *r)
{
    const uint32_t n_heads = l->geometry.n_kv_heads;
    const bool q8 = l->geometry.precision == KV_Q8;
    const struct lanes k = k_lanes(l), ks = scale_lanes(l, l->ks_offset),
                       vs = scale_lanes(l, l->vs_offset);

    for (uint32_t layer = 0; layer < l->geometry.n_layers; layer++, page += l->layer_bytes) {
        gather_lanes(&k, n_heads, page, r);
        if (q8)
            gather_lanes(&ks, n_heads, page, r);
        gather_v(l, page, r);
        if (q8)
            gather_lanes(&vs, n_heads, page, r);
    }
}

int kv_context_gather(const struct kv_context *ctx, uint32_t first, uint32_t n, void *dst)
{
    const struct kv_layout *l = &ctx->cache->layout;
    const size_t position_bytes = kv_position_bytes(&l->geometry);
    unsigned char *out = dst;

    if (n > ctx->n || first > ctx->n - n)
        return KV_ERR_INVALID;
    while (n > 0) {
        const uint32_t slot = first % l->page_tokens;
        struct run run = {.slot = slot,
                          .n = l->page_tokens - slot < n ? l->page_tokens - slot : n,
                          .dst = out,
                          .position_bytes = position_bytes};

        gather_page(l, ctx->pages[first / l->page_tokens]->bytes, &run);
        out += run.n * position_bytes;
        first += run.n;
        n -= run.n;
    }
    return 0;
}

/* ---- Scatter ---- */

/* Reads on through pieces. */
struct source {
    const struct iovec *piece;
    size_t n_left; /* bytes of *piece that are not read yet */
};

static void next_piece(struct source *s)
{
    while (s->n_left == 0) {
        s->piece++;
        s->n_left = s->piece->iov_len;
    }
}

static const unsigned char *source_at(const struct source *s)
{
    return (const unsigned char *)s->piece->iov_base + (s->piece->iov_len - s->n_left);
}

static void source_read(struct source *s, unsigned char *dst, size_t n)
{
    while (n > 0) {
        size_t run;

        next_piece(s);
        run = s->n_left < n ? s->n_left : n;
        memcpy(dst, source_at(s), run);
        dst += run;
        n -= run;
        s->n_left -= run;
    }
}

/* A vector: straight from the piece, or through a small buffer where it straddles two. */
static void scatter_vector(const struct lanes *a, unsigned char *dst, struct source *s)
{
    const size_t bytes = a->dim * a->element_bytes;
    unsigned char straddling[KV_MAX_HEAD_DIM * 4];

    next_piece(s);
    if (s->n_left >= bytes) {
        row_to_lane(dst, source_at(s), a->dim, a->element_bytes);
        s->n_left -= bytes;
        return;
    }
    source_read(s, straddling, bytes);
    row_to_lane(dst, straddling, a->dim, a->element_bytes);
}

static void scatter_lanes(const struct lanes *a, uint32_t n_heads, unsigned char *layer,
                          uint32_t slot, struct source *s)
{
    for (uint32_t h = 0; h < n_heads; h++)
        scatter_vector(a, layer + lane_offset(a, h, slot), s);
}

static void scatter_position(const struct kv_layout *l, unsigned char *page, uint32_t slot,
                             struct source *s)
{
    const uint32_t n_heads = l->geometry.n_kv_heads;
    const bool q8 = l->geometry.precision == KV_Q8;
    const struct lanes k = k_lanes(l), ks = scale_lanes(l, l->ks_offset),
                       vs = scale_lanes(l, l->vs_offset);

    for (uint32_t layer = 0; layer < l->geometry.n_layers; layer++, page += l->layer_bytes) {
        scatter_lanes(&k, n_heads, page, slot, s);
        if (q8)
            scatter_lanes(&ks, n_heads, page, slot, s);
        source_read(s, page + v_offset(l, slot), l->v_row_bytes);
        if (q8)
            scatter_lanes(&vs, n_heads, page, slot, s);
    }
}

int kv_context_scatter(struct kv_context *ctx, uint32_t first, uint32_t n, const struct iovec *src,
                       size_t n_src)
{
    const struct kv_layout *l = &ctx->cache->layout;
    const uint32_t end = ctx->n + atomic_load(&ctx->open);
    struct source s = {.piece = src};
    size_t want = n * kv_position_bytes(&l->geometry);

    if (n > end || first < ctx->n || first > end - n)
        return KV_ERR_INVALID;
    for (size_t i = 0; i < n_src; i++) {
        if (src[i].iov_len > want)
            return KV_ERR_INVALID;
        want -= src[i].iov_len;
    }
    if (want > 0)
        return KV_ERR_INVALID;
    if (n > 0)
        s.n_left = src[0].iov_len;
    for (uint32_t p = first; p < first + n; p++)
        scatter_position(l, ctx->pages[p / l->page_tokens]->bytes, p % l->page_tokens, &s);
    return 0;
}

void kv_page_put(const struct kv_layout *l, unsigned char *page, uint32_t slot, const void *rows)
{
    const struct iovec piece = {.iov_base = (void *)(uintptr_t)rows,
                                .iov_len = kv_position_bytes(&l->geometry)};
    struct source s = {.piece = &piece, .n_left = piece.iov_len};

    scatter_position(l, page, slot, &s);
}

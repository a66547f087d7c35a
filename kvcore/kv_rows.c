/* The only file that knows how rows stand in a page: clone, gather, scatter.
 *
 * K of one layer and head is [P / 16][D][16]: lane s of group g is position 16 g + s.  V of one
 * layer is [P][H][D].  A position outside memory is, for each layer, K [H][D] and then V [H][D].
 *
 * Elements are moved, never looked at: 4 bytes or 2. */
#include "kvcore/kv_cache.h"

#include <assert.h>
#include <string.h>

/* ---- Clone ---- */

/* One head's K: whole groups as they are, the valid lanes of a group that is partly valid. */
static void clone_k(const struct kv_layout *l, unsigned char *dst, const unsigned char *src,
                    uint32_t n_valid)
{
    const size_t lanes_bytes = KV_LANES * l->element_bytes;
    const size_t group_bytes = l->geometry.head_dim * lanes_bytes;
    const size_t whole = n_valid / KV_LANES * group_bytes;
    const size_t valid_bytes = n_valid % KV_LANES * l->element_bytes;

    memcpy(dst, src, whole);
    memset(dst + whole, 0, l->k_head_bytes - whole);
    if (valid_bytes == 0)
        return;
    for (size_t at = whole; at < whole + group_bytes; at += lanes_bytes)
        memcpy(dst + at, src + at, valid_bytes);
}

void kv_page_clone(const struct kv_layout *l, unsigned char *dst, const unsigned char *src,
                   uint32_t n_valid)
{
    const size_t v_valid = n_valid * l->v_row_bytes;
    const size_t ids_valid = n_valid * sizeof(uint32_t);

    for (uint32_t layer = 0; layer < l->geometry.n_layers; layer++) {
        const size_t at = layer * l->layer_bytes;

        for (uint32_t h = 0; h < l->geometry.n_kv_heads; h++)
            clone_k(l, dst + at + h * l->k_head_bytes, src + at + h * l->k_head_bytes, n_valid);
        memcpy(dst + at + l->v_offset, src + at + l->v_offset, v_valid);
        memset(dst + at + l->v_offset + v_valid, 0, l->layer_bytes - l->v_offset - v_valid);
    }
    memcpy(dst + l->ids_offset, src + l->ids_offset, ids_valid);
    memset(dst + l->ids_offset + ids_valid, 0, l->page_bytes - l->ids_offset - ids_valid);
}

/* ---- One vector of K: D elements, 16 apart in the page ---- */

static void lane_to_row(unsigned char *dst, const unsigned char *src, uint32_t d, size_t element)
{
    if (element == 2) {
        const uint16_t *from = (const uint16_t *)(const void *)src;

        for (uint32_t i = 0; i < d; i++)
            memcpy(dst + 2 * (size_t)i, &from[i * (size_t)KV_LANES], 2);
    } else {
        const uint32_t *from = (const uint32_t *)(const void *)src;

        for (uint32_t i = 0; i < d; i++)
            memcpy(dst + 4 * (size_t)i, &from[i * (size_t)KV_LANES], 4);
    }
}

static void row_to_lane(unsigned char *dst, const unsigned char *src, uint32_t d, size_t element)
{
    if (element == 2) {
        uint16_t *to = (uint16_t *)(void *)dst;

        for (uint32_t i = 0; i < d; i++)
            memcpy(&to[i * (size_t)KV_LANES], src + 2 * (size_t)i, 2);
    } else {
        uint32_t *to = (uint32_t *)(void *)dst;

        for (uint32_t i = 0; i < d; i++)
            memcpy(&to[i * (size_t)KV_LANES], src + 4 * (size_t)i, 4);
    }
}

static size_t k_offset(const struct kv_layout *l, uint32_t layer, uint32_t head, uint32_t slot)
{
    return layer * l->layer_bytes + head * l->k_head_bytes +
           (slot / KV_LANES * (size_t)l->geometry.head_dim * KV_LANES + slot % KV_LANES) *
               l->element_bytes;
}

static size_t v_offset(const struct kv_layout *l, uint32_t layer, uint32_t slot)
{
    return layer * l->layer_bytes + l->v_offset + slot * l->v_row_bytes;
}

/* ---- Gather ---- */

/* `n` positions of one page from `slot` on, all of one layer at a time: a group's K block is read
 * whole while it is in cache. */
static void gather_page(const struct kv_layout *l, const unsigned char *page, uint32_t slot,
                        uint32_t n, unsigned char *dst)
{
    const struct kv_geometry *g = &l->geometry;
    const size_t position_bytes = kv_position_bytes(g);
    const size_t vector_bytes = g->head_dim * l->element_bytes;

    for (uint32_t layer = 0; layer < g->n_layers; layer++) {
        unsigned char *k = dst + layer * 2 * l->v_row_bytes, *v = k + l->v_row_bytes;

        for (uint32_t h = 0; h < g->n_kv_heads; h++)
            for (uint32_t i = 0; i < n; i++)
                lane_to_row(k + i * position_bytes + h * vector_bytes,
                            page + k_offset(l, layer, h, slot + i), g->head_dim, l->element_bytes);
        for (uint32_t i = 0; i < n; i++)
            memcpy(v + i * position_bytes, page + v_offset(l, layer, slot + i), l->v_row_bytes);
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
        const uint32_t run = l->page_tokens - slot < n ? l->page_tokens - slot : n;

        gather_page(l, ctx->pages[first / l->page_tokens]->bytes, slot, run, out);
        out += run * position_bytes;
        first += run;
        n -= run;
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

/* A vector of K: straight from the piece, or through a small buffer where it straddles two. */
static void scatter_k(const struct kv_layout *l, unsigned char *dst, struct source *s)
{
    const size_t bytes = l->geometry.head_dim * l->element_bytes;
    unsigned char straddling[KV_MAX_HEAD_DIM * 4];

    next_piece(s);
    if (s->n_left >= bytes) {
        row_to_lane(dst, source_at(s), l->geometry.head_dim, l->element_bytes);
        s->n_left -= bytes;
        return;
    }
    source_read(s, straddling, bytes);
    row_to_lane(dst, straddling, l->geometry.head_dim, l->element_bytes);
}

static void scatter_position(const struct kv_layout *l, unsigned char *page, uint32_t slot,
                             struct source *s)
{
    for (uint32_t layer = 0; layer < l->geometry.n_layers; layer++) {
        for (uint32_t h = 0; h < l->geometry.n_kv_heads; h++)
            scatter_k(l, page + k_offset(l, layer, h, slot), s);
        source_read(s, page + v_offset(l, layer, slot), l->v_row_bytes);
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

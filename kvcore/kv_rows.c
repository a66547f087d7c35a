/* The only file that knows how rows stand in a page: clone, gather, scatter.
 *
 * K of one layer and head is [P / 16][D][16]: lane s of group g is position 16 g + s.  V of one
 * layer is [P][H][D].  A position outside memory is, for each layer, K [H][D] and then V [H][D].
 * In q8 the scales of K and of V stand as K does, with D / 32 for D, and follow K and V outside.
 *
 * Elements are moved, never looked at: 4 bytes, 2 or 1.  Work goes by layers of SPAN positions: a
 * page is gone through from its first byte to its last, which is how a CPU reads ahead, and what
 * SPAN positions are outside memory stays in cache for whoever takes its CRC.  To fetch lines by
 * instructions before they are needed was tried and gained nothing. */
#include "kvcore/kv_cache.h"
#include "kvcore/kv_lanes.h"

#include <assert.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

/* Positions that are moved together: as many as a page has by default. */
enum { SPAN = 64 };

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

/* Work on lanes goes 16 bytes at a time, of which a row of lanes has 1, 2 or 4. */
typedef uint64_t vector __attribute__((vector_size(16)));

/* A page may be cloned onto itself: then only the rest is zeroed. */
static void copy(unsigned char *dst, const unsigned char *src, size_t n)
{
    if (dst != src)
        memcpy(dst, src, n);
}

/* Copy those bits of a group that the mask of a row of lanes has. */
static void clone_group(unsigned char *dst, const unsigned char *src, size_t group_bytes,
                        const vector *mask, size_t n_mask)
{
    for (size_t i = 0; i < group_bytes / sizeof(vector); i++) {
        vector v;

        memcpy(&v, src + i * sizeof(v), sizeof(v));
        v &= mask[i & (n_mask - 1)];
        memcpy(dst + i * sizeof(v), &v, sizeof(v));
    }
}

/* Of each head, whole groups as they are, and the valid lanes of a group that is partly valid. */
static void clone_lanes(const struct lanes *a, uint32_t n_heads, unsigned char *dst,
                        const unsigned char *src, uint32_t n_valid)
{
    const size_t group_bytes = a->dim * KV_LANES * a->element_bytes;
    const size_t whole = n_valid / KV_LANES * group_bytes;
    const size_t valid = whole + (n_valid % KV_LANES != 0 ? group_bytes : 0);
    vector mask[4] = {{0}};

    memset(mask, 0xff, n_valid % KV_LANES * a->element_bytes);
    dst += a->offset;
    src += a->offset;
    for (uint32_t h = 0; h < n_heads; h++, dst += a->head_bytes, src += a->head_bytes) {
        copy(dst, src, whole);
        clone_group(dst + whole, src + whole, valid - whole, mask, a->element_bytes);
        memset(dst + valid, 0, a->head_bytes - valid);
    }
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
    copy(dst + l->v_offset, src + l->v_offset, v_valid);
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
    copy(dst + l->ids_offset, src + l->ids_offset, ids_valid);
    memset(dst + l->ids_offset + ids_valid, 0, l->page_bytes - l->ids_offset - ids_valid);
}

/* Rows of V are a few lines each: copied here, they cost no call. */
static inline void copy_row(unsigned char *dst, const unsigned char *src, size_t n)
{
    enum { STEP = 64 };

    for (; n >= STEP; n -= STEP, dst += STEP, src += STEP)
        memcpy(dst, src, STEP);
    if (n > 0)
        memcpy(dst, src, n);
}

static size_t v_offset(const struct kv_layout *l, uint32_t slot)
{
    return l->v_offset + slot * l->v_row_bytes;
}

static uint32_t least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* Of n positions from `slot` on, those in its group. */
static uint32_t group_run(uint32_t slot, uint32_t n)
{
    return least(n, KV_LANES - slot % KV_LANES);
}

/* Of n positions from `slot` on, those to go on with: no more than SPAN, and up to the end of the
 * page or of a group. */
static uint32_t span_run(const struct kv_layout *l, uint32_t slot, uint32_t n)
{
    return least(n, least(l->page_tokens - slot, SPAN - slot % KV_LANES));
}

/* ---- Gather ---- */

/* `n` positions of a page from `slot` on, and where the first of them goes. */
struct run {
    uint32_t slot, n;
    unsigned char *dst;
    size_t position_bytes;
};

/* r->dst goes on past [H][dim]. */
static void gather_lanes(const struct lanes *a, uint32_t n_heads, const unsigned char *layer,
                         struct run *r)
{
    for (uint32_t h = 0; h < n_heads; h++) {
        for (uint32_t i = 0, n; i < r->n; i += n) {
            n = group_run(r->slot + i, r->n - i);
            kv_lanes_to_rows(r->dst + i * r->position_bytes, r->position_bytes,
                             layer + lane_offset(a, h, r->slot + i), n, a->dim, a->element_bytes);
        }
        r->dst += a->dim * a->element_bytes;
    }
}

static void gather_scales(const struct lanes *a, uint32_t n_heads, const unsigned char *layer,
                          struct run *r)
{
    const struct kv_scales scales = {a->head_bytes, n_heads, a->dim};

    for (uint32_t i = 0, n; i < r->n; i += n) {
        n = group_run(r->slot + i, r->n - i);
        kv_scales_to_rows(r->dst + i * r->position_bytes, r->position_bytes,
                          layer + lane_offset(a, 0, r->slot + i), n, &scales);
    }
    r->dst += n_heads * a->dim * a->element_bytes;
}

static void gather_v(const struct kv_layout *l, const unsigned char *layer, struct run *r)
{
    for (uint32_t i = 0; i < r->n; i++)
        copy_row(r->dst + i * r->position_bytes, layer + v_offset(l, r->slot + i), l->v_row_bytes);
    r->dst += l->v_row_bytes;
}

static void gather_layer(const struct kv_layout *l, const unsigned char *layer, struct run r)
{
    const uint32_t n_heads = l->geometry.n_kv_heads;
    const bool q8 = l->geometry.precision == KV_Q8;
    const struct lanes k = k_lanes(l), ks = scale_lanes(l, l->ks_offset),
                       vs = scale_lanes(l, l->vs_offset);

    gather_lanes(&k, n_heads, layer, &r);
    if (q8)
        gather_scales(&ks, n_heads, layer, &r);
    gather_v(l, layer, &r);
    if (q8)
        gather_scales(&vs, n_heads, layer, &r);
}

/* Positions that go through a layer side by side: whole groups, as many as the CPU's first cache
 * has room for.  The more there are, the longer the pieces in which a page is read. */
static uint32_t abreast(size_t layer_row_bytes)
{
    enum { NEAR = 32 * 1024 };
    const size_t groups = NEAR / (KV_LANES * layer_row_bytes);

    return groups > SPAN / KV_LANES ? SPAN : groups > 0 ? KV_LANES * (uint32_t)groups : KV_LANES;
}

/* n <= SPAN positions of a page from `slot` on, layer by layer. */
static void gather_span(const struct kv_layout *l, const unsigned char *page, uint32_t slot,
                        uint32_t n, unsigned char *dst)
{
    const size_t position_bytes = kv_position_bytes(&l->geometry);
    const size_t layer_row_bytes = position_bytes / l->geometry.n_layers;
    const uint32_t most = abreast(layer_row_bytes);

    for (uint32_t layer = 0; layer < l->geometry.n_layers; layer++) {
        for (uint32_t i = 0, run; i < n; i += run) {
            run = least(n - i, most - (slot + i) % KV_LANES);
            gather_layer(l, page,
                         (struct run){slot + i, run, dst + i * position_bytes, position_bytes});
        }
        page += l->layer_bytes;
        dst += layer_row_bytes;
    }
}

int kv_context_gather(const struct kv_context *ctx, uint32_t first, uint32_t n, void *dst)
{
    const struct kv_layout *l = &ctx->cache->layout;
    const size_t position_bytes = kv_position_bytes(&l->geometry);
    unsigned char *out = dst;

    if (n > ctx->n || first > ctx->n - n)
        return KV_ERR_INVALID;
    for (uint32_t run; n > 0; first += run, n -= run) {
        const uint32_t slot = first % l->page_tokens;

        run = span_run(l, slot, n);
        gather_span(l, ctx->pages[first / l->page_tokens]->bytes, slot, run, out);
        out += run * position_bytes;
    }
    return 0;
}

/* ---- Scatter ---- */

/* Copy past the CPU's caches: the lines are not fetched to be overwritten, and do not push out the
 * rows that come next.  For what is not read again soon; kv_context_stream() ends with a fence. */
static inline void stream_out(unsigned char *dst, const unsigned char *src, size_t n)
{
#if defined(__SSE2__)
    if (((uintptr_t)dst | n) % sizeof(__m128i) == 0) {
        for (size_t at = 0; at < n; at += sizeof(__m128i))
            _mm_stream_si128((__m128i *)(void *)(dst + at),
                             _mm_loadu_si128((const __m128i *)(const void *)(src + at)));
        return;
    }
#endif
    memcpy(dst, src, n);
}

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

/* Copy the next n bytes to dst, past the caches or not; or with NULL pass over them. */
static void source_read(struct source *s, unsigned char *dst, size_t n, bool stream)
{
    while (n > 0) {
        size_t run;

        next_piece(s);
        run = s->n_left < n ? s->n_left : n;
        if (dst != NULL) {
            if (stream)
                stream_out(dst, source_at(s), run);
            else
                memcpy(dst, source_at(s), run);
            dst += run;
        }
        n -= run;
        s->n_left -= run;
    }
}

/* The next n > 0 bytes where they are, or copied into `straddling` where they are in two pieces. */
static const unsigned char *source_take(struct source *s, size_t n, unsigned char *straddling)
{
    const unsigned char *at;

    next_piece(s);
    if (s->n_left < n) {
        source_read(s, straddling, n, false);
        return straddling;
    }
    at = source_at(s);
    s->n_left -= n;
    return at;
}

/* Bytes of n positions of one group, as many of each, wherever they are. */
enum { TILE = 4096 };
struct tile {
    const unsigned char *rows[KV_LANES];
    unsigned char straddling[KV_LANES][TILE];
};

static void tile_take(struct tile *t, uint32_t n, struct source *from, size_t bytes)
{
    for (uint32_t i = 0; i < n; i++)
        t->rows[i] = source_take(&from[i], bytes, t->straddling[i]);
}

/* Positions of a group that rows go to. */
struct target {
    unsigned char *layer;
    uint32_t slot, n;
    bool stream; /* a whole group, and nobody reads it soon */
};

/* n_elements of each of the tile's rows, from `offset` on, to the lanes at dst. */
static void put_lanes(const struct target *to, const struct tile *t, size_t offset,
                      unsigned char *dst, uint32_t n_elements, size_t element_bytes)
{
    unsigned char group[KV_LANES * TILE];

    if (!to->stream) {
        kv_rows_to_lanes(dst, t->rows, offset, to->n, n_elements, element_bytes);
        return;
    }
    kv_rows_to_lanes(group, t->rows, offset, to->n, n_elements, element_bytes);
    stream_out(dst, group, KV_LANES * n_elements * element_bytes);
}

/* What stands [H][dim] at `offset` of the tile's rows; returns the offset after it. */
static size_t scatter_lanes(const struct lanes *a, uint32_t n_heads, const struct target *to,
                            const struct tile *t, size_t offset)
{
    for (uint32_t h = 0; h < n_heads; h++, offset += a->dim * a->element_bytes)
        put_lanes(to, t, offset, to->layer + lane_offset(a, h, to->slot), a->dim, a->element_bytes);
    return offset;
}

static size_t scatter_scales(const struct lanes *a, uint32_t n_heads, const struct target *to,
                             const struct tile *t, size_t offset)
{
    const struct kv_scales scales = {a->head_bytes, n_heads, a->dim};

    kv_rows_to_scales(to->layer + lane_offset(a, 0, to->slot), t->rows, offset, to->n, &scales);
    return offset + n_heads * a->dim * a->element_bytes;
}

/* One layer that a tile has all of. */
static void scatter_layer(const struct kv_layout *l, const struct target *to, const struct tile *t)
{
    const uint32_t n_heads = l->geometry.n_kv_heads;
    const bool q8 = l->geometry.precision == KV_Q8;
    const struct lanes k = k_lanes(l), ks = scale_lanes(l, l->ks_offset),
                       vs = scale_lanes(l, l->vs_offset);
    size_t offset = scatter_lanes(&k, n_heads, to, t, 0);

    if (q8)
        offset = scatter_scales(&ks, n_heads, to, t, offset);
    for (uint32_t i = 0; i < to->n; i++) {
        unsigned char *dst = to->layer + v_offset(l, to->slot + i);

        if (to->stream)
            stream_out(dst, t->rows[i] + offset, l->v_row_bytes);
        else
            copy_row(dst, t->rows[i] + offset, l->v_row_bytes);
    }
    if (q8)
        scatter_scales(&vs, n_heads, to, t, offset + l->v_row_bytes);
}

/* [H][dim] that a tile may not have room for, head by head. */
static void scatter_long_lanes(const struct lanes *a, uint32_t n_heads, const struct target *to,
                               struct tile *t, struct source *from)
{
    const size_t vector_bytes = a->dim * a->element_bytes;

    for (uint32_t h = 0; h < n_heads; h++)
        for (size_t at = 0; at < vector_bytes; at += TILE) {
            const size_t bytes = vector_bytes - at < TILE ? vector_bytes - at : TILE;

            tile_take(t, to->n, from, bytes);
            put_lanes(to, t, 0, to->layer + lane_offset(a, h, to->slot) + at * KV_LANES,
                      (uint32_t)(bytes / a->element_bytes), a->element_bytes);
        }
}

static void scatter_long_layer(const struct kv_layout *l, const struct target *to, struct tile *t,
                               struct source *from)
{
    const uint32_t n_heads = l->geometry.n_kv_heads;
    const bool q8 = l->geometry.precision == KV_Q8;
    const struct lanes k = k_lanes(l), ks = scale_lanes(l, l->ks_offset),
                       vs = scale_lanes(l, l->vs_offset);

    scatter_long_lanes(&k, n_heads, to, t, from);
    if (q8)
        scatter_long_lanes(&ks, n_heads, to, t, from);
    for (uint32_t i = 0; i < to->n; i++)
        source_read(&from[i], to->layer + v_offset(l, to->slot + i), l->v_row_bytes, to->stream);
    if (q8)
        scatter_long_lanes(&vs, n_heads, to, t, from);
}

/* One layer of positions of one group. */
static void scatter_group(const struct kv_layout *l, const struct target *to, struct tile *t,
                          struct source *from)
{
    const size_t layer_row_bytes = kv_position_bytes(&l->geometry) / l->geometry.n_layers;

    if (layer_row_bytes <= TILE) {
        tile_take(t, to->n, from, layer_row_bytes);
        scatter_layer(l, to, t);
    } else {
        scatter_long_layer(l, to, t, from);
    }
}

/* n <= SPAN positions of a page from `slot` on, layer by layer; s goes on past them. */
static void scatter_span(const struct kv_layout *l, unsigned char *page, uint32_t slot, uint32_t n,
                         bool stream, struct source *s)
{
    const size_t position_bytes = kv_position_bytes(&l->geometry);
    struct source from[SPAN];
    struct tile t;

    for (uint32_t i = 0; i < n; i++) {
        from[i] = *s;
        source_read(s, NULL, position_bytes, false);
    }
    for (uint32_t layer = 0; layer < l->geometry.n_layers; layer++, page += l->layer_bytes)
        for (uint32_t i = 0, run; i < n; i += run) {
            struct target to = {.layer = page, .slot = slot + i};

            to.n = run = group_run(slot + i, n - i);
            to.stream = stream && run == KV_LANES;
            scatter_group(l, &to, &t, from + i);
        }
}

/* Do the pieces have `want` bytes in all? */
static bool adds_up(const struct iovec *src, size_t n_src, size_t want)
{
    for (size_t i = 0; i < n_src; i++) {
        if (src[i].iov_len > want)
            return false;
        want -= src[i].iov_len;
    }
    return want == 0;
}

static int scatter(struct kv_context *ctx, uint32_t first, uint32_t n, const struct iovec *src,
                   size_t n_src, bool stream)
{
    const struct kv_layout *l = &ctx->cache->layout;
    const uint32_t end = ctx->n + atomic_load(&ctx->open);
    struct source s = {.piece = src};

    if (n > end || first < ctx->n || first > end - n ||
        !adds_up(src, n_src, n * kv_position_bytes(&l->geometry)))
        return KV_ERR_INVALID;
    if (n > 0)
        s.n_left = src[0].iov_len;
    for (uint32_t run; n > 0; first += run, n -= run) {
        const uint32_t slot = first % l->page_tokens;

        run = span_run(l, slot, n);
        scatter_span(l, ctx->pages[first / l->page_tokens]->bytes, slot, run, stream, &s);
    }
    return 0;
}

int kv_context_scatter(struct kv_context *ctx, uint32_t first, uint32_t n, const struct iovec *src,
                       size_t n_src)
{
    return scatter(ctx, first, n, src, n_src, false);
}

int kv_context_stream(struct kv_context *ctx, uint32_t first, uint32_t n, const struct iovec *src,
                      size_t n_src)
{
    const int rc = scatter(ctx, first, n, src, n_src, true);

#if defined(__SSE2__)
    _mm_sfence(); /* before whatever shows the context to another thread */
#endif
    return rc;
}

void kv_page_put(const struct kv_layout *l, unsigned char *page, uint32_t slot, const void *rows)
{
    const struct iovec piece = {.iov_base = (void *)(uintptr_t)rows,
                                .iov_len = kv_position_bytes(&l->geometry)};
    struct source s = {.piece = &piece, .n_left = piece.iov_len};

    scatter_span(l, page, slot, 1, false, &s);
}

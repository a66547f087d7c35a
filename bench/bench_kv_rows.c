/* Rows of a frame (kv_frame_positions) out of a context's pages into one buffer, and back, as the
 * wire and the disk do it.  The raw line copies as many bytes of the same pages into the same
 * buffer, and back.  A context is larger than the caches near a core.
 *
 * No target where a frame has fewer than KV_LANES positions: then a call touches all lines of K in
 * its group for a part of each.  And none for the vectors that every CPU has, where this one has
 * better. */
#include "bench/bench_kvcore.h"

#include "kvcore/kv_lanes.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N_BYTES = 48 * 1024 * 1024 };

struct rig {
    struct kv_context *ctx;
    size_t position_bytes;
    uint32_t frame;
    uint32_t n;            /* positions: a whole number of frames and pages */
    unsigned char *buffer; /* [frame][position_bytes] */
    bool plain;
    bool crc;
    uint32_t sum;
};

/* Where a frame's bytes would stand if pages were position-major. */
static unsigned char *flat(const struct rig *r, uint32_t position)
{
    return kv_context_page(r->ctx, position / KV_PAGE_TOKENS_DEFAULT) +
           position % KV_PAGE_TOKENS_DEFAULT * r->position_bytes;
}

static void gather(void *arg, uint32_t n)
{
    struct rig *r = arg;
    const size_t bytes = r->frame * r->position_bytes;

    for (uint32_t i = 0; i < n; i++)
        for (uint32_t at = 0; at < r->n; at += r->frame) {
            bench_must(kv_context_gather(r->ctx, at, r->frame, r->buffer), "gather");
            if (r->crc)
                r->sum = kv_crc32c(r->sum, r->buffer, bytes);
        }
}

static void copy_out(void *arg, uint32_t n)
{
    struct rig *r = arg;
    const size_t bytes = r->frame * r->position_bytes;

    for (uint32_t i = 0; i < n; i++)
        for (uint32_t at = 0; at < r->n; at += r->frame) {
            memcpy(r->buffer, flat(r, at), bytes);
            r->sum += r->buffer[at % bytes];
        }
}

static void scatter(void *arg, uint32_t n)
{
    struct rig *r = arg;
    const struct iovec piece = {r->buffer, r->frame * r->position_bytes};

    for (uint32_t i = 0; i < n; i++)
        for (uint32_t at = 0; at < r->n; at += r->frame) {
            if (r->crc)
                r->sum = kv_crc32c(r->sum, r->buffer, piece.iov_len);
            bench_must(kv_context_scatter(r->ctx, at, r->frame, &piece, 1), "scatter");
        }
}

static void copy_in(void *arg, uint32_t n)
{
    struct rig *r = arg;
    const size_t bytes = r->frame * r->position_bytes;

    for (uint32_t i = 0; i < n; i++)
        for (uint32_t at = 0; at < r->n; at += r->frame)
            memcpy(flat(r, at), r->buffer, bytes);
}

static void line(struct rig *r, const char *name, const char *what, bool crc,
                 void (*ours)(void *, uint32_t), void (*raw)(void *, uint32_t))
{
    const double bytes = (double)r->n * (double)r->position_bytes;
    struct pair p;

    r->crc = crc;
    pair_run(&p, ours, raw, r, 1);
    printf("%-22s %-8s %-4s %8.2f %8.2f   %5.2f", name, what, crc ? "yes" : "no",
           1e-9 * bytes / pair_ours(&p), 1e-9 * bytes / pair_raw(&p), 1 / pair_ratio(&p, 0));
    if (r->frame < KV_LANES)
        printf("  frames of %u\n", r->frame);
    else if (r->plain)
        printf("  plain vectors\n");
    else
        printf("  >= 0.50  %s\n", pair_verdict(&p, 2, 0));
}

static void run(const char *name, const struct kv_geometry *g, bool plain)
{
    const struct kv_namespace ns = {.group = 0};
    struct rig r = {
        .position_bytes = kv_position_bytes(g), .frame = kv_frame_positions(g), .plain = plain};
    struct kv_cache_config config = {.geometry = *g, .arena = true};
    struct kv_cache *cache;
    uint32_t *ids;

    r.n = (uint32_t)(N_BYTES / r.position_bytes) / KV_PAGE_TOKENS_DEFAULT * KV_PAGE_TOKENS_DEFAULT;
    config.n_pages = r.n / KV_PAGE_TOKENS_DEFAULT;
    cache = bench_cache(&config);
    kv_lanes_plain(plain);
    ids = calloc(r.n, sizeof(*ids));
    r.buffer = aligned_alloc(4096, (r.frame * r.position_bytes + 4095) / 4096 * 4096);
    if (ids == NULL || r.buffer == NULL)
        bench_must(KV_ERR_NOMEM, "buffers");
    memset(r.buffer, 1, r.frame * r.position_bytes);
    bench_must(kv_context_open(cache, &ns, &r.ctx), "open");
    bench_must(kv_context_begin(r.ctx, ids, r.n), "begin");
    line(&r, name, "scatter", false, scatter, copy_in);
    line(&r, name, "scatter", true, scatter, copy_in);
    bench_must(kv_context_commit(r.ctx, r.n), "commit");
    line(&r, name, "gather", false, gather, copy_out);
    line(&r, name, "gather", true, gather, copy_out);
    kv_lanes_plain(false);
    kv_context_close(r.ctx);
    kv_cache_close(cache);
    free(ids);
    free(r.buffer);
}

void bench_rows(void)
{
    printf("rows, 10^9 bytes a second           crc     ours   memcpy   ratio\n");
    run("30 x 3 x 64, f16", &(struct kv_geometry){30, 3, 64, KV_F16}, false);
    run("30 x 3 x 64, f32", &(struct kv_geometry){30, 3, 64, KV_F32}, false);
    run("30 x 3 x 64, q8", &(struct kv_geometry){30, 3, 64, KV_Q8}, false);
    run("30 x 3 x 64, q8", &(struct kv_geometry){30, 3, 64, KV_Q8}, true);
    run("32 x 8 x 128, f16", &(struct kv_geometry){32, 8, 128, KV_F16}, false);
    run("32 x 8 x 128, f32", &(struct kv_geometry){32, 8, 128, KV_F32}, false);
    run("32 x 8 x 128, q8", &(struct kv_geometry){32, 8, 128, KV_Q8}, false);
}

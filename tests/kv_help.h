/* For the tests of kvcore: rows that are a function of the namespace and the ids up to them, as
 * real KV is, so that a context can be checked from its ids alone. */
#ifndef KV_HELP_H
#define KV_HELP_H

#include "kvcore/kvcore.h"

#include <check.h>
#include <stdlib.h>
#include <string.h>

/* The precision that a test's first argument names, if there is one, with a head that it can have;
 * main() returns 2 where this is false. */
static inline bool take_precision(struct kv_geometry *g, int argc, char **argv)
{
    const int precision = argc > 1 ? kv_precision_parse(argv[1]) : (int)g->precision;

    if (precision < 0)
        return false;
    g->precision = (enum kv_precision)precision;
    if (g->precision == KV_Q8)
        g->head_dim = KV_Q8_BLOCK;
    return kv_geometry_check(g, NULL) == 0;
}

/* One step of splitmix64. */
static inline uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static inline uint64_t row_start(const struct kv_namespace *ns)
{
    uint64_t h;

    memcpy(&h, ns->digest.bytes, sizeof(h));
    return mix(h);
}

static inline uint64_t row_next(uint64_t h, uint32_t id)
{
    return mix(h ^ id);
}

/* The rows of the position whose chain stands at h. */
static inline void row_bytes(uint64_t h, unsigned char *dst, size_t n)
{
    for (size_t i = 0; i < n; i += sizeof(h)) {
        const uint64_t word = mix(h + i);

        memcpy(dst + i, &word, n - i < sizeof(word) ? n - i : sizeof(word));
    }
}

/* Rows of positions [first, n) of these ids; the caller frees. */
static inline unsigned char *make_rows(const struct kv_geometry *g, const struct kv_namespace *ns,
                                       const uint32_t *ids, uint32_t first, uint32_t n)
{
    const size_t bytes = kv_position_bytes(g);
    unsigned char *rows = malloc((n - first) * bytes + 1);
    uint64_t h = row_start(ns);

    ck_assert_ptr_nonnull(rows);
    for (uint32_t p = 0; p < n; p++) {
        h = row_next(h, ids[p]);
        if (p >= first)
            row_bytes(h, rows + (p - first) * bytes, bytes);
    }
    return rows;
}

/* Begin, write and commit ids[length, n): the context's ids are then the first n of these. */
static inline int append_to(struct kv_context *ctx, const struct kv_geometry *g,
                            const struct kv_namespace *ns, const uint32_t *ids, uint32_t n)
{
    const uint32_t first = kv_context_length(ctx);
    unsigned char *rows = make_rows(g, ns, ids, first, n);
    struct iovec piece = {.iov_base = rows, .iov_len = (n - first) * kv_position_bytes(g)};
    int rc = kv_context_begin(ctx, ids + first, n - first);

    if (rc == 0)
        rc = kv_context_scatter(ctx, first, n - first, &piece, 1);
    if (rc == 0)
        rc = kv_context_commit(ctx, n - first);
    free(rows);
    return rc;
}

/* Does the context hold exactly these ids and their rows? */
static inline bool holds(struct kv_context *ctx, const struct kv_geometry *g,
                         const struct kv_namespace *ns, const uint32_t *ids, uint32_t n)
{
    const size_t bytes = n * kv_position_bytes(g);
    unsigned char *want = make_rows(g, ns, ids, 0, n), *got = malloc(bytes + 1);
    uint32_t *got_ids = malloc(n * sizeof(*ids) + 1);
    bool same = kv_context_length(ctx) == n;

    same =
        same && kv_context_ids(ctx, 0, n, got_ids) == 0 && kv_context_gather(ctx, 0, n, got) == 0;
    same = same && memcmp(got_ids, ids, n * sizeof(*ids)) == 0 && memcmp(got, want, bytes) == 0;
    free(want);
    free(got);
    free(got_ids);
    return same;
}

#endif

/* kvcore from another program: compute a prompt once, find it again, answer it twice side by side,
 * and carry one answer over to a second cache as records.
 *
 *   cc -o branches branches.c $(pkg-config --cflags --libs kvcore)
 *
 * Where a model would compute K and V of a position, this writes bytes that depend on the ids up to
 * there, so that it can tell what it reads back. */
#include <kvcore/kvcore.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct kv_geometry geometry = {
    .n_layers = 4, .n_kv_heads = 2, .head_dim = 32, .precision = KV_F16};

static int fail(const char *what, int rc)
{
    fprintf(stderr, "branches: %s: %s\n", what, kv_strerror(rc));
    return rc;
}

/* Stands in for a forward pass: the rows of positions [0, n). */
static void compute(unsigned char *rows, const uint32_t *ids, uint32_t n)
{
    const size_t bytes = kv_position_bytes(&geometry);
    uint32_t h = 1;

    for (uint32_t p = 0; p < n; p++) {
        h = (h ^ ids[p]) * 2654435761u;
        for (size_t i = 0; i < bytes; i++)
            rows[p * bytes + i] = (unsigned char)(h >> i % 24);
    }
}

/* Make ctx, which has the first positions of ids, have all n of them. */
static int extend(struct kv_context *ctx, const uint32_t *ids, uint32_t n)
{
    const uint32_t first = kv_context_length(ctx);
    const size_t bytes = kv_position_bytes(&geometry);
    unsigned char *rows = malloc(n * bytes);
    struct iovec piece;
    int rc = KV_ERR_NOMEM;

    if (rows == NULL)
        return rc;
    compute(rows, ids, n);
    piece = (struct iovec){.iov_base = rows + first * bytes, .iov_len = (n - first) * bytes};
    rc = kv_context_begin(ctx, ids + first, n - first);
    if (rc == 0)
        rc = kv_context_scatter(ctx, first, n - first, &piece, 1);
    if (rc == 0)
        rc = kv_context_commit(ctx, n - first);
    else
        kv_context_abort(ctx); /* refused where begin was; then it changes nothing */
    free(rows);
    return rc;
}

/* Does ctx read back what its ids say? */
static const char *verdict(const struct kv_context *ctx)
{
    const uint32_t n = kv_context_length(ctx);
    const size_t bytes = n * kv_position_bytes(&geometry);
    unsigned char *want = malloc(bytes), *got = malloc(bytes);
    uint32_t *ids = malloc(n * sizeof(*ids));
    const char *text = "other rows";

    if (want != NULL && got != NULL && ids != NULL && kv_context_ids(ctx, 0, n, ids) == 0 &&
        kv_context_gather(ctx, 0, n, got) == 0) {
        compute(want, ids, n);
        if (memcmp(want, got, bytes) == 0)
            text = "rows as written";
    }
    free(want);
    free(got);
    free(ids);
    return text;
}

/* One frame of `count` positions from `from` into `to`. */
static int carry_frame(struct kv_encoder *e, struct kv_decoder *d, const struct kv_context *from,
                       struct kv_context *to, uint32_t count)
{
    struct iovec record = {.iov_len = kv_encoder_frame_bytes(e, count)}, rows;
    struct kv_frame frame;
    int rc = KV_ERR_NOMEM;

    record.iov_base = malloc(record.iov_len);
    if (record.iov_base == NULL)
        return rc;
    rc = kv_encoder_frame(e, from, count, record.iov_base);
    if (rc == 0)
        rc = kv_decoder_frame(d, &record, 1, &frame, NULL);
    if (rc == 0)
        rc = kv_context_begin(to, frame.ids, frame.count);
    if (rc == 0) {
        kv_pieces(&record, 1, frame.rows_offset, frame.rows_bytes, &rows);
        rc = kv_context_scatter(to, frame.first, frame.count, &rows, 1);
        kv_context_commit(to, rc == 0 ? frame.count : 0);
    }
    free(record.iov_base);
    return rc;
}

/* All of `from` into `to` as a snapshot: header, frames, seal. */
static int carry(const struct kv_context *from, struct kv_context *to,
                 const struct kv_namespace *ns)
{
    const uint32_t n = kv_context_length(from);
    const struct kv_snapshot_header header = {.geometry = geometry,
                                              .ns = ns->digest,
                                              .frame_positions = kv_frame_positions(&geometry),
                                              .n_bound = n};
    struct kv_encoder *e = NULL;
    struct kv_decoder *d = NULL;
    struct iovec record = {0};
    struct kv_seal sent, got;
    int rc;

    rc = kv_encoder_open(&header, &e, NULL);
    if (rc == 0)
        rc = kv_decoder_open(&header, &d);
    if (rc < 0)
        goto out;
    record.iov_len = kv_encoder_header_bytes(e) + kv_encoder_seal_bytes();
    record.iov_base = malloc(record.iov_len);
    rc = record.iov_base != NULL ? 0 : KV_ERR_NOMEM;
    if (rc < 0)
        goto out;
    record.iov_len = kv_encoder_header_bytes(e);
    kv_encoder_header(e, record.iov_base);
    rc = kv_decoder_header(d, &record, 1, NULL);
    while (rc == 0 && kv_encoder_next(e) < n)
        rc = carry_frame(e, d, from, to, kv_encoder_frame_count(e, n, true));
    if (rc < 0)
        goto out;
    record.iov_len = kv_encoder_seal_bytes();
    kv_encoder_seal(e, record.iov_base, &sent);
    rc = kv_decoder_seal(d, &record, 1, &got, NULL);
out:
    free(record.iov_base);
    kv_encoder_close(e);
    kv_decoder_close(d);
    return rc;
}

/* The prompt is known already: match it, fork, and let both branches go on differently. */
static int answer_twice(struct kv_cache *cache, const struct kv_namespace *ns, uint32_t *ids,
                        uint32_t n, struct kv_context **one, struct kv_context **two)
{
    struct kv_match match;
    struct kv_stats before, after;
    int rc;

    kv_cache_stats(cache, &before);
    rc = kv_cache_match(cache, ns, ids, n, n + 8, NULL, 0, one, &match);
    if (rc < 0)
        return fail("match", rc);
    printf("matched %u of %u\n", match.n_matched, n);
    rc = extend(*one, ids, n);
    if (rc == 0)
        rc = kv_context_fork(*one, n, two);
    if (rc < 0)
        return fail("fork", rc);
    ids[n] = 1;
    rc = extend(*one, ids, n + 1);
    ids[n] = 2;
    if (rc == 0)
        rc = extend(*two, ids, n + 1);
    if (rc < 0)
        return fail("extend", rc);
    kv_cache_stats(cache, &after);
    printf("one: %u positions, %s\n", kv_context_length(*one), verdict(*one));
    printf("two: %u positions, %s\n", kv_context_length(*two), verdict(*two));
    printf("pages taken %u, copied %u\n", after.n_live - before.n_live,
           (unsigned)(after.n_clones - before.n_clones));
    return 0;
}

enum { PROMPT = 100 };

static int run(struct kv_cache *here, struct kv_cache *there, const struct kv_namespace *ns)
{
    uint32_t ids[PROMPT + 1];
    struct kv_context *ctx = NULL, *one = NULL, *two = NULL, *copy = NULL;
    int rc;

    for (uint32_t i = 0; i < PROMPT; i++)
        ids[i] = 7 * i % 50;
    rc = kv_context_open(here, ns, &ctx);
    if (rc == 0)
        rc = extend(ctx, ids, PROMPT);
    if (rc < 0)
        goto out;
    rc = kv_context_give_up(ctx, NULL, 0); /* into the prefix tree */
    ctx = NULL;
    if (rc == 0)
        rc = answer_twice(here, ns, ids, PROMPT, &one, &two);
    if (rc == 0)
        rc = kv_context_open(there, ns, &copy);
    if (rc == 0)
        rc = carry(two, copy, ns);
    if (rc == 0)
        printf("copy: %u positions, %s\n", kv_context_length(copy), verdict(copy));
out:
    kv_context_close(ctx);
    kv_context_close(one);
    kv_context_close(two);
    kv_context_close(copy);
    return rc;
}

int main(void)
{
    const struct kv_namespace_fields fields = {.tenant = "example", .precision = KV_F16};
    const struct kv_cache_config config = {.geometry = geometry, .n_pages = 16, .arena = true};
    struct kv_cache *here = NULL, *there = NULL;
    struct kv_namespace ns = {.group = 0};
    struct kv_why why = {""};
    int rc;

    kv_namespace_digest(&fields, &ns.digest);
    rc = kv_cache_open(&config, &here, &why);
    if (rc == 0)
        rc = kv_cache_open(&config, &there, &why);
    if (rc == 0)
        rc = run(here, there, &ns);
    if (rc == 0)
        rc = kv_cache_check(here, &why);
    if (rc < 0)
        fprintf(stderr, "branches: %s %s\n", kv_strerror(rc), why.text);
    else
        printf("audit passed\n");
    kv_cache_close(here);
    kv_cache_close(there);
    return rc < 0;
}

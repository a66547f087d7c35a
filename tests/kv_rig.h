/* For the tests of kvcore: a cache, and contexts whose keys are letters, one a position: "a20b3" is
 * twenty a and three b.  Rows are a function of the ids up to them (kv_help.h), so each context
 * says itself what it must read back. */
#ifndef KV_RIG_H
#define KV_RIG_H

#include "kv_help.h"
#include "kvcore/kv_cache.h"

#include <stdio.h>

enum { P = 16, MAX = 2048 };

static struct kv_geometry geometry = {
    .n_layers = 2, .n_kv_heads = 1, .head_dim = 6, .precision = KV_F16};
static const struct kv_namespace tenant_a = {.digest = {{7}}, .group = 0};
static const struct kv_namespace tenant_b = {.digest = {{9}}, .group = 1};
static struct kv_namespace ns;
static struct kv_cache *cache;

static inline void open_with(uint32_t n_pages, size_t bookkeeping, bool arena)
{
    const struct kv_cache_config config = {.geometry = geometry,
                                           .page_tokens = P,
                                           .n_pages = n_pages,
                                           .arena = arena,
                                           .bookkeeping_bytes = bookkeeping};

    ns = tenant_a;
    ck_assert_int_eq(kv_cache_open(&config, &cache, NULL), 0);
}

static inline void open_cache(uint32_t n_pages)
{
    open_with(n_pages, 0, true);
}

static inline struct kv_stats stats(void)
{
    struct kv_stats s;

    kv_cache_stats(cache, &s);
    return s;
}

static inline void check(void)
{
    struct kv_why why;
    const struct kv_stats s = stats();

    ck_assert_msg(kv_cache_check(cache, &why) == 0, "%s", why.text);
    ck_assert_uint_eq(s.n_free + s.n_live, s.n_pages);
}

/* All contexts are closed: what is not back stands in the tree and can be had. */
static inline void close_cache(void)
{
    struct kv_stats s;

    check();
    kv_cache_trim(cache, UINT32_MAX);
    check();
    s = stats();
    ck_assert_uint_eq(s.n_free, s.n_pages);
    ck_assert_uint_eq(s.n_reserved + s.n_contexts + s.n_nodes + s.n_entries, 0);
    ck_assert_uint_eq(s.bookkeeping_bytes, 0);
    kv_cache_close(cache);
}

static inline uint32_t key(const char *text, uint32_t *ids)
{
    uint32_t n = 0;

    while (*text != '\0') {
        const uint32_t letter = (unsigned char)*text++;
        char *end;
        const unsigned long count = strtoul(text, &end, 10);

        for (unsigned long i = 0; i < (end == text ? 1 : count); i++)
            ids[n++] = letter;
        text = end;
        ck_assert_uint_le(n, MAX);
    }
    return n;
}

static inline struct kv_context *empty(void)
{
    struct kv_context *ctx;

    ck_assert_int_eq(kv_context_open(cache, &ns, &ctx), 0);
    return ctx;
}

/* Make ctx, which holds a prefix of the key, hold all of it. */
static inline int grow(struct kv_context *ctx, const char *text)
{
    uint32_t ids[MAX];
    const uint32_t n = key(text, ids);

    return append_to(ctx, &geometry, &ns, ids, n);
}

static inline struct kv_context *context(const char *text)
{
    struct kv_context *ctx = empty();

    ck_assert_int_eq(grow(ctx, text), 0);
    return ctx;
}

static inline bool reads(struct kv_context *ctx, const char *text)
{
    uint32_t ids[MAX];
    const uint32_t n = key(text, ids);

    return holds(ctx, &geometry, &ns, ids, n);
}

static inline void put(const char *text)
{
    ck_assert_int_eq(kv_context_give_up(context(text), NULL, 0), 0);
    check();
}

static inline void put_logits(const char *text, float value)
{
    const float logits[2] = {value, value};

    ck_assert_int_eq(kv_context_give_up(context(text), logits, 2), 0);
    check();
}

static inline struct kv_context *fork_at(struct kv_context *ctx, uint32_t n)
{
    struct kv_context *child = NULL;

    ck_assert_int_eq(kv_context_fork(ctx, n, &child), 0);
    return child;
}

static inline int try_match(const char *text, uint32_t to, struct kv_context **out,
                            struct kv_match *m)
{
    uint32_t ids[MAX];
    const uint32_t n = key(text, ids);

    return kv_cache_match(cache, &ns, ids, n, to > n ? to : n, NULL, 0, out, m);
}

/* Match, see that `want` positions come and read back, and return them. */
static inline struct kv_context *match(const char *text, uint32_t to, uint32_t want)
{
    uint32_t ids[MAX];
    struct kv_context *ctx = NULL;
    struct kv_match m;

    key(text, ids);
    ck_assert_int_eq(try_match(text, to, &ctx, &m), 0);
    ck_assert_uint_eq(m.n_matched, want);
    ck_assert(holds(ctx, &geometry, &ns, ids, want));
    check();
    return ctx;
}

/* How much of the key the tree has: with one id more, peek counts all of it. */
static inline uint32_t reach(const char *text)
{
    uint32_t ids[MAX + 1], n = key(text, ids);

    ids[n] = UINT32_MAX;
    return kv_cache_peek(cache, &ns, ids, n + 1);
}

/* The keys of all entries, oldest first, as "a16 a16b4". */
static inline const char *entries(void)
{
    static char text[512];
    const struct kv_entry *e;
    size_t at = 0;

    text[0] = '\0';
    TAILQ_FOREACH(e, &cache->shards[0].tree.by_use, by_use)
    {
        const struct kv_key k = {.pages = e->pages, .layout = &cache->layout, .n = e->n};

        at += (size_t)snprintf(text + at, sizeof(text) - at, at > 0 ? " " : "");
        for (uint32_t i = 0, run, count; i < e->n; i += count) {
            const uint32_t id = *kv_key_run(&k, i, &run);

            for (count = 1; i + count < e->n && *kv_key_run(&k, i + count, &run) == id;)
                count++;
            at += (size_t)snprintf(text + at, sizeof(text) - at, "%c%u", (char)id, count);
        }
    }
    return text;
}

#define EXPECT_ENTRIES(want) ck_assert_str_eq(entries(), want)

static inline uint32_t refs(const struct kv_context *ctx, uint32_t i)
{
    return kv_page_refs(ctx->pages[i]);
}

static inline uint32_t tree_refs(const struct kv_context *ctx, uint32_t i)
{
    return kv_page_tree_refs(ctx->pages[i]);
}

/* An insert's need is counted as if the key stood alone, plus one node for a split. */
static inline size_t need_alone(uint32_t n, uint32_t n_logits)
{
    return kv_tree_root_bytes() + kv_tree_node_bytes(n) +
           kv_tree_entry_bytes((n + P - 1) / P, n_logits) + kv_tree_node_bytes(0);
}

#endif

/* Forks beside what a fork must do at least: copy n pointers and raise n counts, those of the same
 * page headers.  Cold: headers and lists are flushed out of every cache before each run.
 *
 * The first write after a fork beside memcpy of the valid rows and memset of the rest. */
#include "bench/bench_kvcore.h"
#include "kvcore/kv_cache.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_PARENTS = 64, LINE = 64, N_PAGES = 8 * 2048 };

static const struct kv_namespace ns = {.group = 0};

static uint32_t *some_ids(uint32_t n)
{
    uint32_t *ids = malloc(n * sizeof(*ids));

    if (ids == NULL)
        bench_must(KV_ERR_NOMEM, "ids");
    for (uint32_t i = 0; i < n; i++)
        ids[i] = i;
    return ids;
}

/* ---- Fork ---- */

struct forks {
    struct kv_context *parents[MAX_PARENTS];
    uint32_t n_parents;
    uint32_t n_pages; /* of each */
    bool cold;
    struct kv_context *children[MAX_PARENTS];
    uint32_t n_children;
    struct kv_page **lists[MAX_PARENTS]; /* of the raw line */
    uint32_t n_lists;
};

static void fork_all(void *arg, uint32_t n)
{
    struct forks *f = arg;

    for (; f->n_children < n; f->n_children++) {
        struct kv_context *parent = f->parents[f->n_children % f->n_parents];

        bench_must(kv_context_fork(parent, parent->n, &f->children[f->n_children]), "fork");
    }
}

static void copy_all(void *arg, uint32_t n)
{
    struct forks *f = arg;

    for (; f->n_lists < n; f->n_lists++) {
        struct kv_page **list = f->lists[f->n_lists];

        memcpy(list, f->parents[f->n_lists % f->n_parents]->pages, f->n_pages * sizeof(*list));
        for (uint32_t i = 0; i < f->n_pages; i++)
            atomic_fetch_add_explicit(&list[i]->counts, 1, memory_order_relaxed);
    }
}

static void flush(const void *p, size_t n)
{
#if defined(__x86_64__)
    for (size_t at = 0; at < n; at += LINE)
        __builtin_ia32_clflush((const char *)p + at);
    __builtin_ia32_mfence();
#else
    (void)p, (void)n;
#endif
}

/* Undo what the last run did, and flush. */
static void undo(void *arg)
{
    struct forks *f = arg;

    while (f->n_children > 0)
        kv_context_close(f->children[--f->n_children]);
    while (f->n_lists > 0) {
        struct kv_page **list = f->lists[--f->n_lists];

        for (uint32_t i = 0; i < f->n_pages; i++)
            atomic_fetch_sub_explicit(&list[i]->counts, 1, memory_order_relaxed);
    }
    for (uint32_t i = 0; f->cold && i < f->n_parents; i++) {
        struct kv_context *parent = f->parents[i];

        for (uint32_t j = 0; j < f->n_pages; j++)
            flush(parent->pages[j], sizeof(struct kv_page));
        flush(parent->pages, f->n_pages * sizeof(struct kv_page *));
    }
}

static void fork_line(struct kv_cache *cache, uint32_t n_pages, bool cold)
{
    const uint32_t page_tokens = kv_cache_layout(cache)->page_tokens, n = n_pages * page_tokens;
    const uint32_t n_forks = n_pages * MAX_PARENTS > N_PAGES ? N_PAGES / n_pages : MAX_PARENTS;
    struct forks f = {.n_parents = cold ? n_forks : 1, .n_pages = n_pages, .cold = cold};
    uint32_t *ids = some_ids(n);
    struct kv_stats before, after;
    struct pair p;

    for (uint32_t i = 0; i < f.n_parents; i++)
        f.parents[i] = bench_context(cache, &ns, ids, n);
    for (uint32_t i = 0; i < n_forks; i++)
        f.lists[i] = malloc(n_pages * sizeof(struct kv_page *));
    kv_cache_stats(cache, &before);
    pair_run_prepared(&p, undo, fork_all, copy_all, &f, n_forks);
    kv_cache_stats(cache, &after);
    undo(&f);
    printf("%5zu KiB  %5u  %-4s %10.0f %10.0f   %5u    %5.2f  <= 1.50  %s\n",
           kv_cache_layout(cache)->page_bytes / 1024, n_pages, cold ? "cold" : "hot",
           1e9 * pair_ours(&p), 1e9 * pair_raw(&p), after.n_live - before.n_live,
           pair_ratio(&p, 200), pair_verdict(&p, 1.5, 200));
    for (uint32_t i = 0; i < n_forks; i++)
        free(f.lists[i]);
    for (uint32_t i = 0; i < f.n_parents; i++)
        kv_context_close(f.parents[i]);
    free(ids);
}

void bench_fork(void)
{
    static const uint32_t sizes[] = {32, 512, 2048};
    static const uint32_t head_dims[] = {64, 512};

    printf("\nfork        pages          fork ns     raw ns   taken  (ours - 200 ns) / raw\n");
    for (size_t d = 0; d < sizeof(head_dims) / sizeof(head_dims[0]); d++) {
        const struct kv_cache_config config = {
            .geometry = {1, 1, head_dims[d], KV_F16},
            .n_pages = N_PAGES,
            .arena = false,
        };
        struct kv_cache *cache = bench_cache(&config);

        for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
            for (int cold = 0; cold < 2; cold++)
                fork_line(cache, sizes[i], cold);
        kv_cache_close(cache);
    }
}

/* ---- The first write after a fork ---- */

enum { N_CLONES = 8 };

struct clones {
    struct kv_context *parent;
    uint32_t n_valid;
    struct kv_context *children[N_CLONES];
    unsigned char *pages[N_CLONES]; /* of the raw line: pages of a cache of its own */
    const struct kv_layout *layout;
};

static void clone_prepare(void *arg)
{
    struct clones *c = arg;

    for (uint32_t i = 0; i < N_CLONES; i++) {
        kv_context_close(c->children[i]);
        bench_must(kv_context_fork(c->parent, c->n_valid, &c->children[i]), "fork");
        bench_must(kv_context_reserve(c->children[i], c->n_valid + 1), "reserve");
    }
}

static void first_write(void *arg, uint32_t n)
{
    struct clones *c = arg;
    const uint32_t id = 7;

    for (uint32_t i = 0; i < n; i++)
        bench_must(kv_context_begin(c->children[i], &id, 1), "begin");
}

static void raw_write(void *arg, uint32_t n)
{
    struct clones *c = arg;
    const size_t valid = c->n_valid * kv_position_bytes(&c->layout->geometry);

    for (uint32_t i = 0; i < n; i++) {
        memcpy(c->pages[i], kv_context_page(c->parent, 0), valid);
        memset(c->pages[i] + valid, 0, c->layout->page_bytes - valid);
    }
}

static void clone_line(const char *name, const struct kv_geometry *g, uint32_t n_valid)
{
    const struct kv_cache_config config = {.geometry = *g, .n_pages = N_CLONES + 1, .arena = true};
    struct kv_cache *cache = bench_cache(&config), *raw = bench_cache(&config);
    struct clones c = {.n_valid = n_valid, .layout = kv_cache_layout(cache)};
    uint32_t *ids = some_ids(N_CLONES * KV_PAGE_TOKENS_DEFAULT);
    struct kv_context *raw_ctx;
    struct kv_stats before, after;
    struct pair p;

    c.parent = bench_context(cache, &ns, ids, n_valid);
    raw_ctx = bench_context(raw, &ns, ids, N_CLONES * KV_PAGE_TOKENS_DEFAULT);
    for (uint32_t i = 0; i < N_CLONES; i++)
        c.pages[i] = kv_context_page(raw_ctx, i);
    kv_cache_stats(cache, &before);
    pair_run_prepared(&p, clone_prepare, first_write, raw_write, &c, N_CLONES);
    kv_cache_stats(cache, &after);
    printf("%-20s %3u valid %10.1f %10.1f   %6.2f    %5.2f  <= 1.20  %s\n", name, n_valid,
           1e6 * pair_ours(&p), 1e6 * pair_raw(&p),
           (double)(after.n_clones - before.n_clones) / (PAIR_REPEATS + 1) / N_CLONES,
           pair_ratio(&p, 0), pair_verdict(&p, 1.2, 0));
    for (uint32_t i = 0; i < N_CLONES; i++)
        kv_context_close(c.children[i]);
    kv_context_close(c.parent);
    kv_context_close(raw_ctx);
    kv_cache_close(cache);
    kv_cache_close(raw);
    free(ids);
}

void bench_clone(void)
{
    static const uint32_t valid[] = {1, 16, 33, 63};

    printf("\nfirst write                         us     raw us   clones    ratio\n");
    for (size_t i = 0; i < sizeof(valid) / sizeof(valid[0]); i++) {
        clone_line("30 x 3 x 64, f16", &(struct kv_geometry){30, 3, 64, KV_F16}, valid[i]);
        clone_line("30 x 3 x 64, f32", &(struct kv_geometry){30, 3, 64, KV_F32}, valid[i]);
        clone_line("30 x 3 x 64, q8", &(struct kv_geometry){30, 3, 64, KV_Q8}, valid[i]);
    }
}

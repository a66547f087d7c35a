/* Matches in trees of any number of entries, each of N ids, the first HEAD of them common to all.
 * The raw line is memcmp of the ids that match with a copy of the entry's ids, entries in the same
 * random order, so it too has to fetch them from memory.  A match is kv_cache_match() as a node
 * calls it: with the fork and a reservation for one position more. */
#include "bench/bench_kvcore.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N = 512, HEAD = 64, P = 512, N_CALLS = 1024 };

static const struct kv_namespace ns = {.group = 0};

struct matches {
    struct kv_cache *cache;
    uint32_t *entries; /* [n_entries][N] */
    uint32_t n_entries;
    uint32_t order[N_CALLS];
    uint32_t n_same;   /* how many ids the prompts have from their entry */
    uint32_t *prompts; /* [N_CALLS][N + 1] */
    struct kv_context *got[N_CALLS];
    uint32_t n_got;
    uint32_t n_wrong;
    int sum;
};

static void match_all(void *arg, uint32_t n)
{
    struct matches *m = arg;

    for (uint32_t i = 0; i < n; i++) {
        struct kv_match match;

        bench_must(kv_cache_match(m->cache, &ns, m->prompts + i * (N + 1), N + 1, N + 1, NULL, 0,
                                  &m->got[m->n_got++], &match),
                   "match");
        m->n_wrong += match.n_matched != m->n_same;
    }
}

static void compare_all(void *arg, uint32_t n)
{
    struct matches *m = arg;

    for (uint32_t i = 0; i < n; i++)
        m->sum += memcmp(m->prompts + i * (N + 1), m->entries + (size_t)m->order[i] * N,
                         m->n_same * sizeof(uint32_t));
}

static void close_all(void *arg)
{
    struct matches *m = arg;

    while (m->n_got > 0)
        kv_context_close(m->got[--m->n_got]);
}

static void line(struct matches *m, const char *what, uint32_t n_same)
{
    struct pair p;

    m->n_same = n_same;
    for (uint32_t i = 0; i < N_CALLS; i++) {
        uint32_t *prompt = m->prompts + i * (N + 1);

        memcpy(prompt, m->entries + (size_t)m->order[i] * N, N * sizeof(*prompt));
        for (uint32_t j = n_same; j < N + 1; j++)
            prompt[j] = UINT32_MAX - j;
    }
    pair_run_prepared(&p, close_all, match_all, compare_all, m, N_CALLS);
    close_all(m);
    printf("%7u  %-22s %5u %10.0f %10.0f    %5.2f  <= 4.00  %s%s\n", m->n_entries, what, n_same,
           1e9 * pair_ours(&p), 1e9 * pair_raw(&p), pair_ratio(&p, 300), pair_verdict(&p, 4, 300),
           m->n_wrong > 0 ? "  WRONG LENGTHS" : "");
}

static void run(uint32_t n_entries)
{
    const struct kv_cache_config config = {
        .geometry = {1, 1, 1, KV_F16},
        .page_tokens = P,
        .n_pages = n_entries + 2 * N_CALLS + 2,
        .arena = true,
        .bookkeeping_bytes = (size_t)n_entries * 4096 + (1 << 20),
    };
    struct matches m = {.cache = bench_cache(&config), .n_entries = n_entries};

    m.entries = malloc((size_t)n_entries * N * sizeof(uint32_t));
    m.prompts = malloc(N_CALLS * (N + 1) * sizeof(uint32_t));
    if (m.entries == NULL || m.prompts == NULL)
        bench_must(KV_ERR_NOMEM, "ids");
    for (uint32_t e = 0; e < n_entries; e++) {
        uint32_t *ids = m.entries + (size_t)e * N;

        for (uint32_t i = 0; i < N; i++)
            ids[i] = i < HEAD ? i : (uint32_t)bench_mix((uint64_t)e * N + i) % 50000;
        bench_must(kv_context_give_up(bench_context(m.cache, &ns, ids, N), NULL, 0), "give up");
    }
    for (uint32_t i = 0; i < N_CALLS; i++)
        m.order[i] = (uint32_t)(bench_mix(i) % n_entries);
    line(&m, "hit", N);
    line(&m, "mid-edge", 300);
    line(&m, "after a common head", HEAD);
    line(&m, "miss", 0);
    kv_cache_close(m.cache);
    free(m.entries);
    free(m.prompts);
}

void bench_match(void)
{
    printf(
        "\nmatch, entries               same ids   match ns     raw ns  (ours - 300 ns) / raw\n");
    run(1);
    run(10000);
    run(100000);
}

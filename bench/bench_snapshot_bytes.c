#include "bench/bench_snapshot.h"

#include <stdio.h>
#include <stdlib.h>

enum { PROMPT = 512, ANSWER = 128, BRANCHES = 8, TURN = 150, MAX_TURNS = 100 };

struct count {
    uint64_t written;   /* bytes of all files */
    uint64_t positions; /* new ones */
};

static struct kv_snapshot_info save(struct kv_store *store, struct kv_context *ctx,
                                    struct count *count)
{
    struct kv_context *fork;
    struct kv_snapshot_info info;
    struct kv_why why = {""};

    must(kv_context_fork(ctx, kv_context_length(ctx), &fork), NULL, "fork");
    must(kv_store_save(store, &(struct kv_save){.ctx = fork}, &info, &why), &why, "save");
    kv_context_close(fork);
    count->written += info.file_bytes;
    return info;
}

static void print_count(const char *what, const struct count *count, double most)
{
    const size_t row = kv_position_bytes(&default_geometry) + sizeof(uint32_t);
    const double factor = (double)count->written / (double)(count->positions * row);

    printf("| %s | %llu | %.1f | %.3f |", what, (unsigned long long)count->positions,
           1e-6 * (double)count->written, factor);
    if (most > 0)
        printf(" at most %.1f: %s |\n", most, target(factor <= most));
    else
        printf(" |\n");
    fflush(stdout);
}

static void remove_all(struct kv_store *store)
{
    static struct kv_snapshot_info all[4 * MAX_TURNS];
    uint32_t n;

    while ((n = kv_store_list(store, NULL, all, 4 * MAX_TURNS)) > 0)
        for (uint32_t i = 0; i < n; i++)
            must(kv_store_delete(store, &all[i].id, NULL), NULL, "delete");
}

/* A conversation that is saved after each turn; `compact`: the last one in full once more. */
static void run_turns(const struct bench_options *o, struct kv_cache *cache, const char *what,
                      uint32_t n_turns, uint32_t depth, bool compact, double most)
{
    struct kv_store *store = open_store(o->directory, &default_geometry, depth, KV_NONE);
    struct kv_context *ctx = NULL;
    struct kv_snapshot_info last;
    struct count count = {0};
    struct kv_why why = {""};

    for (uint32_t i = 0; i < n_turns; i++) {
        grow_context(cache, &ctx, (i + 1) * TURN, 1);
        last = save(store, ctx, &count);
    }
    if (compact) {
        must(kv_store_compact(store, &last.id, NULL, NULL, &why), &why, "compact");
        must(kv_store_find(store, &last.id, &last), NULL, "find");
        count.written += last.file_bytes;
    }
    count.positions = n_turns * TURN;
    print_count(what, &count, most);
    kv_context_close(ctx);
    remove_all(store);
    kv_store_close(store);
}

static void run_branches(const struct bench_options *o, struct kv_cache *cache)
{
    struct kv_store *store = open_store(o->directory, &default_geometry, 0, KV_NONE);
    struct kv_context *prompt = NULL, *branch;
    struct count count = {.positions = PROMPT + BRANCHES * ANSWER};

    grow_context(cache, &prompt, PROMPT, 1);
    save(store, prompt, &count);
    for (uint32_t i = 0; i < BRANCHES; i++) {
        must(kv_context_fork(prompt, PROMPT, &branch), NULL, "fork");
        grow_context(cache, &branch, PROMPT + ANSWER, 1000 * (i + 1));
        save(store, branch, &count);
        kv_context_close(branch);
    }
    print_count("best of 8: a prompt of 512 and answers of 128", &count, 1.1);
    kv_context_close(prompt);
    remove_all(store);
    kv_store_close(store);
}

void bench_bytes(const struct bench_options *o)
{
    struct kv_cache *cache = open_cache(&default_geometry, (MAX_TURNS + 2) * TURN);

    printf("New positions are %zu bytes each, with their ids; a turn is %d.\n\n",
           kv_position_bytes(&default_geometry) + sizeof(uint32_t), TURN);
    printf("| | new positions | MB written | of the new positions' | target |\n"
           "|---|---:|---:|---:|---|\n");
    run_turns(o, cache, "20 turns", 20, KV_STORE_DEPTH_MAX, false, 1.1);
    run_turns(o, cache, "20 turns, then compacted", 20, KV_STORE_DEPTH_MAX, true, 0);
    run_turns(o, cache, "100 turns", MAX_TURNS, KV_STORE_DEPTH_MAX, false, 1.1);
    run_turns(o, cache, "100 turns, chains of at most 32", MAX_TURNS, 32, false, 0);
    run_branches(o, cache);
    printf("\n");
    kv_cache_close(cache);
}

#include "bench/bench_snapshot.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

/* Seconds of each round, ours and raw; their ratio is taken round by round. */
struct line {
    double ours[SNAPSHOT_ROUNDS], raw[SNAPSHOT_ROUNDS], ratio[SNAPSHOT_ROUNDS];
    double cpu[SNAPSHOT_ROUNDS];
};

struct speed {
    struct kv_cache *cache;
    struct kv_store *store;
    struct kv_context *ctx;
    struct raw *raw;
    const char *directory;
    uint64_t bytes;
    bool is_saved;
    struct kv_snapshot_info saved;
    char path[PATH_MAX];
};

static void save(struct speed *s)
{
    const struct kv_save save = {.ctx = s->ctx, .full = true};
    struct kv_why why = {""};

    char id[KV_SNAPSHOT_ID_TEXT];

    must(kv_store_save(s->store, &save, &s->saved, &why), &why, "save");
    s->is_saved = true;
    kv_snapshot_id_print(&s->saved.id, id);
    snprintf(s->path, sizeof(s->path), "%s/%s.kv", s->directory, id);
}

static void restore(struct speed *s)
{
    const struct kv_restore restore = {.id = s->saved.id, .cache = s->cache, .ns = bench_ns};
    struct kv_restored restored;
    struct kv_why why = {""};

    must(kv_store_restore(s->store, &restore, &restored, &why), &why, "restore");
    kv_context_close(restored.ctx);
}

enum { MAX_REPEATS = 9 };

/* One of the three things that are measured. */
struct kind {
    const char *name;
    void (*prepare)(struct speed *s);
    void (*ours)(struct speed *s);
    void (*raw)(struct raw *r);
    double least;    /* of the raw line */
    double most_cpu; /* s per GB; 0: no target */
};

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double middle(double *values, int n)
{
    qsort(values, (size_t)n, sizeof(values[0]), compare);
    return values[n / 2];
}

static double time_raw(struct speed *s, const struct kind *k)
{
    const struct stopwatch t = stopwatch_start();

    k->raw(s->raw);
    return stopwatch_read(t).wall;
}

/* One round: ours and raw, whichever is first by turns.  What takes milliseconds is repeated within
 * the round, and its middle counts: others' work on the machine comes in such pieces. */
static void take(struct speed *s, struct line *line, int round, const struct kind *k)
{
    const int n = s->bytes < 64 << 20 ? MAX_REPEATS : 1;
    double ours[MAX_REPEATS], raw[MAX_REPEATS], cpu[MAX_REPEATS];

    for (int i = 0; i < n; i++) {
        const bool raw_first = (round + i) % 2 != 0;
        struct stopwatch t;

        k->prepare(s);
        if (raw_first)
            raw[i] = time_raw(s, k);
        t = stopwatch_start();
        k->ours(s);
        t = stopwatch_read(t);
        if (!raw_first)
            raw[i] = time_raw(s, k);
        ours[i] = t.wall;
        cpu[i] = t.cpu;
    }
    if (round < 0)
        return;
    line->ours[round] = middle(ours, n);
    line->raw[round] = middle(raw, n);
    line->ratio[round] = line->raw[round] / line->ours[round];
    line->cpu[round] = middle(cpu, n);
}

static void delete_saved(struct speed *s)
{
    struct kv_why why = {""};

    if (s->is_saved)
        must(kv_store_delete(s->store, &s->saved.id, &why), &why, "delete");
    s->is_saved = false;
}

static void prepare_save(struct speed *s)
{
    delete_saved(s);
    raw_forget(s->raw);
}

static void prepare_cold(struct speed *s)
{
    file_cool(s->path);
    file_cool(raw_path(s->raw));
}

static void prepare_hot(struct speed *s)
{
    file_warm(s->path);
    file_warm(raw_path(s->raw));
}

enum { N_KINDS = 3 };

static const struct kind kinds[N_KINDS] = {
    {"durable save", prepare_save, save, raw_write, 0.85, 0.4},
    {"cold restore", prepare_cold, restore, raw_read, 0.85, 0},
    {"hot restore", prepare_hot, restore, raw_pread, 0.5, 0},
};

static void print_line(const struct kind *k, uint64_t bytes, struct line *line)
{
    const double gb = 1e-9 * (double)bytes, ratio = rounds_median(line->ratio);
    const double cpu = rounds_median(line->cpu) / gb;

    printf("| %s | %.1f | %.2f (%.2f..%.2f) | %.2f | %.2f (%.2f..%.2f) | at least %.2f | %s | %.2f "
           "|",
           k->name, 1e-6 * (double)bytes, gb / rounds_median(line->ours),
           gb / rounds_high(line->ours), gb / rounds_low(line->ours), gb / rounds_median(line->raw),
           ratio, rounds_low(line->ratio), rounds_high(line->ratio), k->least,
           target(ratio >= k->least), cpu);
    if (k->most_cpu > 0)
        printf(" at most %.2f: %s |\n", k->most_cpu, target(cpu <= k->most_cpu));
    else
        printf(" |\n");
    fflush(stdout);
}

static void run_size(const struct bench_options *o, struct kv_store *store, uint64_t bytes)
{
    const uint32_t n = (uint32_t)(bytes / kv_position_bytes(&default_geometry));
    struct speed s = {.store = store, .directory = o->directory, .bytes = bytes};
    struct line lines[N_KINDS];

    s.cache = open_cache(&default_geometry, 2 * (n + KV_PAGE_TOKENS_DEFAULT));
    grow_context(s.cache, &s.ctx, n, 1);
    must(kv_context_freeze(s.ctx), NULL, "freeze");
    save(&s);
    s.raw = raw_open(o->directory, s.saved.file_bytes);
    for (int round = -1; round < SNAPSHOT_ROUNDS; round++)
        for (int k = 0; k < N_KINDS; k++)
            take(&s, &lines[k], round, &kinds[k]);
    for (int k = 0; k < N_KINDS; k++)
        print_line(&kinds[k], s.saved.file_bytes, &lines[k]);
    delete_saved(&s);
    raw_close(s.raw);
    kv_context_close(s.ctx);
    kv_cache_close(s.cache);
}

void bench_speed(const struct bench_options *o)
{
    static const uint64_t sizes[] = {(uint64_t)8 << 20, (uint64_t)256 << 20, (uint64_t)2 << 30};
    struct kv_store *store = open_store(o->directory, &default_geometry, 0, KV_DURABLE);

    printf("Disk: %s.  Raw: io_uring, O_DIRECT, %d registered buffers of %d KiB; hot: pread.\n\n",
           kv_store_describe(store), KV_IO_DEPTH, RAW_BLOCK / 1024);
    printf(
        "| | MB | GB/s (low..high) | raw GB/s | of raw (low..high) | target | | CPU s per GB | |\n"
        "|---|---:|---:|---:|---:|---:|---|---:|---|\n");
    for (size_t i = 0; i < (o->quick ? 2 : sizeof(sizes) / sizeof(sizes[0])); i++)
        run_size(o, store, sizes[i]);
    printf("\n");
    kv_store_close(store);
}

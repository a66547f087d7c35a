/* bench_snapshot [--directory DIR] [--model FILE] [--quick] [PART]...
 *
 * What snapshots cost, each figure beside a raw line that moves the same bytes without kvcore,
 * taken in turn with it.  Median of SNAPSHOT_ROUNDS rounds after one to warm up, with the lowest
 * and the highest; wall time, and CPU time of the process.  Tables are Markdown.
 *
 *     speed    durable saves and restores, cold and hot, of three sizes
 *     prefill  a restore beside computing the same positions again, with the fitted costs of both
 *     bytes    what a conversation that is saved each turn writes, and the branches of one prompt
 *
 * Files go into a new folder in DIR (default: the current one), which should be on the disk that
 * snapshots will be on; it needs 5 GB.  A line that misses its target says so, and the exit status
 * is 1. */
#include "bench/bench_snapshot.h"

#include <dirent.h>
#include <fcntl.h>
#include <getopt.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static int n_missed;

const struct kv_geometry default_geometry = {
    .n_layers = 30, .n_kv_heads = 3, .head_dim = 64, .precision = KV_F16};
const struct kv_namespace bench_ns = {.digest = {{1}}, .group = 0};

/* ---- Time ---- */

static double seconds(clockid_t clock)
{
    struct timespec t;

    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

struct stopwatch stopwatch_start(void)
{
    return (struct stopwatch){seconds(CLOCK_MONOTONIC), seconds(CLOCK_PROCESS_CPUTIME_ID)};
}

struct stopwatch stopwatch_read(struct stopwatch start)
{
    const struct stopwatch now = stopwatch_start();

    return (struct stopwatch){now.wall - start.wall, now.cpu - start.cpu};
}

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double sorted(double *values, int i)
{
    qsort(values, SNAPSHOT_ROUNDS, sizeof(values[0]), compare);
    return values[i];
}

double rounds_median(double *values)
{
    return sorted(values, SNAPSHOT_ROUNDS / 2);
}

double rounds_low(double *values)
{
    return sorted(values, 0);
}

double rounds_high(double *values)
{
    return sorted(values, SNAPSHOT_ROUNDS - 1);
}

/* ---- Errors ---- */

void must(int rc, const struct kv_why *why, const char *what)
{
    if (rc < 0) {
        fprintf(stderr, "bench_snapshot: %s: %s\n", what,
                why != NULL && why->text[0] != '\0' ? why->text : kv_strerror(rc));
        exit(2);
    }
}

void *must_have(void *p)
{
    must(p == NULL ? KV_ERR_NOMEM : 0, NULL, "allocation");
    return p;
}

const char *target(bool met)
{
    n_missed += !met;
    return met ? "ok" : "MISSED";
}

/* ---- Caches, contexts, stores ---- */

struct kv_cache *open_cache(const struct kv_geometry *g, uint32_t n_positions)
{
    const struct kv_cache_config config = {
        .geometry = *g, .n_pages = n_positions / KV_PAGE_TOKENS_DEFAULT + 2, .arena = true};
    struct kv_cache *cache;
    struct kv_why why = {""};

    must(kv_cache_open(&config, &cache, &why), &why, "cache");
    return cache;
}

/* xorshift, eight bytes a step */
static void fill(unsigned char *bytes, size_t len, uint64_t x)
{
    for (size_t i = 0; i + 8 <= len; i += 8) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        memcpy(bytes + i, &x, 8);
    }
}

void grow_context(struct kv_cache *cache, struct kv_context **ctx, uint32_t n, uint32_t seed)
{
    const struct kv_layout *layout = kv_cache_layout(cache);
    const size_t row = kv_position_bytes(&layout->geometry);
    unsigned char *rows;
    uint32_t *ids, length, more;

    if (*ctx == NULL)
        must(kv_context_open(cache, &bench_ns, ctx), NULL, "context");
    length = kv_context_length(*ctx);
    more = n - length;
    ids = must_have(malloc((more + 1) * sizeof(*ids)));
    rows = must_have(malloc(row));
    for (uint32_t i = 0; i < more; i++)
        ids[i] = seed + length + i;
    must(kv_context_begin(*ctx, ids, more), NULL, "append");
    for (uint32_t i = 0; i < more; i++) {
        const struct iovec piece = {rows, row};

        fill(rows, row, ((uint64_t)seed << 32 | (length + i)) * 2 + 1);
        must(kv_context_scatter(*ctx, length + i, 1, &piece, 1), NULL, "rows");
    }
    must(kv_context_commit(*ctx, more), NULL, "commit");
    free(rows);
    free(ids);
}

struct kv_store *open_store(const char *directory, const struct kv_geometry *g, uint32_t max_depth,
                            enum kv_durability durability)
{
    const struct kv_store_config config = {
        .directory = directory, .geometry = *g, .max_depth = max_depth, .durability = durability};
    struct kv_store *store;
    struct kv_why why = {""};

    must(kv_store_open(&config, &store, &why), &why, "store");
    return store;
}

/* ---- Files ---- */

static int open_file(const char *path)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC);

    must(fd < 0 ? KV_ERR_IO : 0, NULL, path);
    return fd;
}

void file_warm(const char *path)
{
    static unsigned char buffer[RAW_BLOCK];
    const int fd = open_file(path);

    while (read(fd, buffer, sizeof(buffer)) > 0)
        ;
    close(fd);
}

void file_cool(const char *path)
{
    const int fd = open_file(path);

    fsync(fd);
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    close(fd);
}

/* A folder of plain files, and it. */
static void remove_folder(const char *path)
{
    DIR *stream = opendir(path);
    const struct dirent *entry;

    if (stream == NULL)
        return;
    while ((entry = readdir(stream)) != NULL)
        if (entry->d_name[0] != '.')
            unlinkat(dirfd(stream), entry->d_name, 0);
    closedir(stream);
    rmdir(path);
}

/* ---- Main ---- */

struct part {
    const char *name;
    void (*run)(const struct bench_options *o);
};

static const struct part parts[] = {
    {"speed", bench_speed}, {"prefill", bench_prefill}, {"bytes", bench_bytes}};

static bool is_named(const struct part *part, char **names, int n)
{
    for (int i = 0; i < n; i++)
        if (strcmp(part->name, names[i]) == 0)
            return true;
    return n == 0;
}

static int usage(void)
{
    fprintf(stderr, "usage: bench_snapshot [--directory DIR] [--model FILE] [--quick] "
                    "[speed|prefill|bytes]...\n");
    return 2;
}

int main(int argc, char **argv)
{
    static const struct option longs[] = {{"directory", required_argument, NULL, 'd'},
                                          {"model", required_argument, NULL, 'm'},
                                          {"quick", no_argument, NULL, 'q'},
                                          {NULL, 0, NULL, 0}};
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME"), *parent = ".";
    const size_t n_parts = sizeof(parts) / sizeof(parts[0]);
    struct bench_options o = {.model = getenv("BATON_MODEL")};
    char model[PATH_MAX], directory[PATH_MAX];
    int c;

    snprintf(model, sizeof(model), "%s%s/baton/SmolLM2-135M-Instruct.Q4_1.gguf",
             cache  ? cache
             : home ? home
                    : "",
             cache ? "" : "/.cache");
    if (o.model == NULL)
        o.model = model;
    while ((c = getopt_long(argc, argv, "", longs, NULL)) != -1) {
        if (c == 'd')
            parent = optarg;
        else if (c == 'm')
            o.model = optarg;
        else if (c == 'q')
            o.quick = true;
        else
            return usage();
    }
    for (int i = optind; i < argc; i++) {
        bool known = false;

        for (size_t p = 0; p < n_parts; p++)
            known |= strcmp(argv[i], parts[p].name) == 0;
        if (!known)
            return usage();
    }
    snprintf(directory, sizeof(directory), "%s/bench-snapshot-XXXXXX", parent);
    must(mkdtemp(directory) == NULL ? KV_ERR_IO : 0, NULL, directory);
    o.directory = directory;
    for (size_t p = 0; p < n_parts; p++)
        if (is_named(&parts[p], argv + optind, argc - optind))
            parts[p].run(&o);
    remove_folder(directory);
    return n_missed > 0;
}

/* bench_engine [--model FILE] [--threads N[,N]] [--kernels SET] [--kv-precision NAME] [--quick]
 *              [--peer LLAMA_BENCH]
 *
 * Tokens a second of whole steps on a model (default: the one that scripts/get-model fetches), KV
 * in f16 unless named otherwise, as llama-bench counts them:
 *
 *   ppN      N ids in one sequence, in steps of 512
 *   tgN@D    N steps of one id each, after D positions
 *
 * Beside each figure, a share of what this machine did in the same run: of the bytes a second that
 * the same number of threads read (weights and KV of every step), and of their 32-bit fma peak
 * (weights and attention; integer kernels may pass it).  With --peer, llama.cpp's llama-bench runs
 * every test on the same file in turn with ours; the ratio is of the medians.  Wall time, median of
 * REPEATS rounds with the lowest and the highest. */
#include "bench/bench_raw.h"
#include "model/model_internal.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <pthread.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

enum {
    REPEATS = 5,
    CHUNK = 512,
    MAX_THREADS_LISTED = 8,
    PEER_OUTPUT = 64 * 1024,
    RAW_BYTES = 256 << 20,
};

struct options {
    const char *model;
    const char *kernels;
    const char *peer;
    int precision; /* enum kv_precision */
    bool quick;
    uint32_t threads[MAX_THREADS_LISTED];
    uint32_t n_threads;
};

/* n_prompt ids, or n_decode steps after depth positions. */
struct test {
    uint32_t n_prompt, n_decode, depth;
};

static const struct test all_tests[] = {{128, 0, 0}, {512, 0, 0},  {2048, 0, 0},
                                        {0, 64, 0},  {0, 64, 512}, {0, 64, 2048}};
static const struct test quick_tests[] = {{128, 0, 0}, {0, 16, 0}};

struct bench {
    const struct options *options;
    struct gguf *gguf;
    struct model *model;
    struct kv_cache *cache;
    struct engine *engine;
    uint32_t *ids; /* [n_ctx] */
    float *logits; /* [V] */
};

static double wall_seconds(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* ---- The machine ---- */

struct reader {
    const unsigned char *p;
    size_t n_bytes;
    double rate;
};

static void *read_part(void *arg)
{
    struct reader *r = arg;

    r->rate = bench_raw_read(r->p, r->n_bytes);
    return NULL;
}

/* 10^9 bytes a second of n threads, each reading its part; 0 without memory or threads. */
static double read_rate(uint32_t n)
{
    struct reader readers[ENGINE_MAX_THREADS];
    pthread_t threads[ENGINE_MAX_THREADS];
    unsigned char *p = malloc(RAW_BYTES);
    uint32_t started = 0;
    double sum = 0;

    if (!p)
        return 0;
    memset(p, 1, RAW_BYTES);
    for (; started < n; started++) {
        readers[started] = (struct reader){p + RAW_BYTES / n * started, RAW_BYTES / n, 0};
        if (pthread_create(&threads[started], NULL, read_part, &readers[started]) != 0)
            break;
    }
    for (uint32_t i = 0; i < started; i++) {
        pthread_join(threads[i], NULL);
        sum += readers[i].rate;
    }
    free(p);
    return started == n ? sum : 0;
}

/* ---- Ours ---- */

static int step(struct bench *b, struct kv_context *ctx, uint32_t at, uint32_t n, bool logits)
{
    struct engine_item item = {
        .ctx = ctx, .ids = b->ids + at, .n_ids = n, .logits = logits ? b->logits : NULL};
    const int rc = engine_step(b->engine, &item, 1);

    if (rc < 0 || item.rc < 0)
        fprintf(stderr, "bench_engine: %s\n", rc < 0 ? model_strerror(rc) : item.why.text);
    return rc < 0 ? rc : item.rc;
}

static int fill(struct bench *b, struct kv_context *ctx, uint32_t n)
{
    int rc = 0;

    for (uint32_t at = 0; at < n && rc == 0; at += CHUNK) {
        const uint32_t k = n - at < CHUNK ? n - at : CHUNK;

        rc = step(b, ctx, at, k, at + k == n);
    }
    return rc;
}

/* Tokens a second of one round; negative on an error. */
static double run_ours(struct bench *b, const struct test *t)
{
    const struct kv_namespace ns = {.group = 0};
    const uint32_t n = t->n_prompt + t->n_decode;
    struct kv_context *ctx;
    double start;
    int rc;

    if (kv_context_open(b->cache, &ns, &ctx) < 0)
        return -1;
    rc = kv_context_reserve(ctx, t->depth + n);
    if (rc == 0)
        rc = fill(b, ctx, t->depth);
    start = wall_seconds();
    if (rc == 0 && t->n_prompt)
        rc = fill(b, ctx, t->n_prompt);
    for (uint32_t i = 0; i < t->n_decode && rc == 0; i++)
        rc = step(b, ctx, t->depth + i, 1, true);
    start = wall_seconds() - start;
    kv_context_close(ctx);
    return rc == 0 ? n / start : -1;
}

/* ---- The peer ---- */

static void read_all(int fd, char *buffer, size_t size)
{
    size_t n = 0;

    for (;;) {
        const ssize_t got = read(fd, buffer + n, size - 1 - n);

        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            break;
        n += (size_t)got;
    }
    buffer[n] = '\0';
}

/* Run argv and collect its standard output.  0, or -1. */
static int run_program(char *const *argv, char *output, size_t size)
{
    posix_spawn_file_actions_t actions;
    int fds[2], status = -1;
    pid_t pid;

    if (pipe(fds) < 0)
        return -1;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, fds[1], STDOUT_FILENO);
    posix_spawn_file_actions_addclose(&actions, fds[0]);
    posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
    if (posix_spawn(&pid, argv[0], &actions, NULL, argv, environ) == 0) {
        close(fds[1]);
        fds[1] = -1;
        read_all(fds[0], output, size);
        while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
            ;
    }
    posix_spawn_file_actions_destroy(&actions);
    close(fds[0]);
    if (fds[1] >= 0)
        close(fds[1]);
    return status == 0 ? 0 : -1;
}

/* avg_ts of the last line of JSON that has one; negative where none has. */
static double parse_rate(char *output)
{
    double rate = -1;

    for (char *rest = NULL, *line = strtok_r(output, "\n", &rest); line;
         line = strtok_r(NULL, "\n", &rest)) {
        cJSON *json = cJSON_Parse(line);
        const cJSON *value = cJSON_GetObjectItemCaseSensitive(json, "avg_ts");

        if (cJSON_IsNumber(value))
            rate = value->valuedouble;
        cJSON_Delete(json);
    }
    return rate;
}

static double run_peer(const struct bench *b, const struct test *t, uint32_t n_threads)
{
    static char output[PEER_OUTPUT];
    char threads[16], prompt[16], decode[16], depth[16];
    char *argv[] = {(char *)(uintptr_t)b->options->peer,
                    "-m",
                    (char *)(uintptr_t)b->options->model,
                    "-t",
                    threads,
                    "-p",
                    prompt,
                    "-n",
                    decode,
                    "-d",
                    depth,
                    "-r",
                    "1",
                    "-o",
                    "jsonl",
                    NULL};

    snprintf(threads, sizeof(threads), "%u", n_threads);
    snprintf(prompt, sizeof(prompt), "%u", t->n_prompt);
    snprintf(decode, sizeof(decode), "%u", t->n_decode);
    snprintf(depth, sizeof(depth), "%u", t->depth);
    return run_program(argv, output, sizeof(output)) == 0 ? parse_rate(output) : -1;
}

/* ---- The table ---- */

/* Multiply-accumulates of a token in the layers, and per position that it attends to. */
static void count_work(const struct model_params *p, double *layers, double *per_position)
{
    const double q = (double)p->n_heads * p->head_dim, kv = (double)p->n_kv_heads * p->head_dim;

    *layers = p->n_layers * (p->n_embd * (2 * q + 2 * kv) + 3.0 * p->n_embd * p->n_ff);
    *per_position = 2 * q * p->n_layers;
}

/* Bytes of weights that a step reads: a packed head beside the file's own embedding table means
 * that the table is only looked up in. */
static double step_weight_bytes(const struct model *m)
{
    const size_t table = m->token_embd.row_bytes * m->token_embd.n_rows;

    return (double)(m->weight_bytes - (m->output.data == m->token_embd.data ? 0 : table));
}

struct machine {
    double read; /* 10^9 bytes a second, all threads */
    double fma;  /* 10^9 multiply-accumulates a second, all threads; 0 where not known */
};

static void print_shares(const struct bench *b, const struct test *t, const struct machine *m,
                         double rate)
{
    const struct model_params *p = model_params(b->model);
    const double length = t->n_prompt ? t->n_prompt / 2.0 : t->depth + t->n_decode / 2.0;
    const double head = t->n_prompt ? 0 : (double)p->n_embd * p->n_vocab;
    double layers, per_position, bytes;

    count_work(p, &layers, &per_position);
    bytes = step_weight_bytes(b->model) +
            length * (double)kv_position_bytes(&kv_cache_layout(b->cache)->geometry);
    if (t->n_prompt || m->read <= 0)
        printf("     -"); /* bound by arithmetic */
    else
        printf("  %3.0f%%", 100 * bytes * rate * 1e-9 / m->read);
    if (m->fma > 0)
        printf("  %3.0f%%", 100 * (layers + head + length * per_position) * rate * 1e-9 / m->fma);
    else
        printf("     -");
}

/* One row; negative where a run fails. */
static int run_test(struct bench *b, const struct test *t, const struct machine *m)
{
    const uint32_t n_threads = engine_n_threads(b->engine);
    double ours[REPEATS], peer[REPEATS];
    char name[32];

    for (int i = 0; i < REPEATS; i++) {
        ours[i] = run_ours(b, t);
        if (ours[i] < 0)
            return -1;
        peer[i] = b->options->peer ? run_peer(b, t, n_threads) : 0;
        if (peer[i] < 0) {
            fprintf(stderr, "bench_engine: %s failed, or gave no avg_ts\n", b->options->peer);
            return -1;
        }
    }
    qsort(ours, REPEATS, sizeof(ours[0]), compare);
    qsort(peer, REPEATS, sizeof(peer[0]), compare);
    if (t->n_prompt)
        snprintf(name, sizeof(name), "pp%u", t->n_prompt);
    else
        snprintf(name, sizeof(name), "tg%u@%u", t->n_decode, t->depth);
    printf("%-10s %3u %9.1f (%.1f..%.1f)", name, n_threads, ours[REPEATS / 2], ours[0],
           ours[REPEATS - 1]);
    print_shares(b, t, m, ours[REPEATS / 2]);
    if (b->options->peer)
        printf("  %9.1f  %5.2fx", peer[REPEATS / 2], ours[REPEATS / 2] / peer[REPEATS / 2]);
    printf("\n");
    fflush(stdout);
    return 0;
}

static int run_threads(struct bench *b, uint32_t n_threads)
{
    const struct engine_config config = {.model = b->model,
                                         .cache = b->cache,
                                         .n_threads = n_threads,
                                         .max_rows = CHUNK,
                                         .max_items = 1};
    const struct test *tests = b->options->quick ? quick_tests : all_tests;
    const size_t n_tests = b->options->quick ? sizeof(quick_tests) / sizeof(tests[0])
                                             : sizeof(all_tests) / sizeof(tests[0]);
    const uint32_t n_ctx = model_params(b->model)->n_ctx;
    struct machine m;
    struct kv_why why;
    int rc = engine_open(&config, &b->engine, &why);

    if (rc < 0) {
        fprintf(stderr, "bench_engine: %s\n", why.text);
        return rc;
    }
    m.read = read_rate(engine_n_threads(b->engine));
    m.fma = bench_raw_fma(model_kernels(b->model)) * engine_n_threads(b->engine);
    printf("# %u threads: this machine reads %.1f GB/s, its fma peak is %.0f GMAC/s\n",
           engine_n_threads(b->engine), m.read, m.fma);
    printf("%-10s %3s %9s %-18s %5s %5s%s\n", "# test", "thr", "tok/s", "(low..high)", "read",
           "fma", b->options->peer ? "   peer tok/s  ratio" : "");
    for (size_t i = 0; i < n_tests && rc == 0; i++)
        if (tests[i].n_prompt + tests[i].n_decode + tests[i].depth <= n_ctx)
            rc = run_test(b, &tests[i], &m);
    engine_close(b->engine);
    b->engine = NULL;
    return rc;
}

static int run_all(const struct options *o)
{
    struct bench b = {.options = o};
    struct kv_cache_config cache = {.page_tokens = KV_PAGE_TOKENS_DEFAULT, .arena = true};
    struct kv_why why = {"out of memory"};
    const struct model_params *p;
    int rc;

    rc = gguf_open(o->model, &b.gguf, &why);
    if (rc == 0)
        rc = model_open(b.gguf, o->kernels, &b.model, &why);
    if (rc < 0)
        goto out;
    p = model_params(b.model);
    model_geometry(b.model, (enum kv_precision)o->precision, &cache.geometry);
    cache.n_pages = p->n_ctx / cache.page_tokens + 2;
    if (cache.n_pages > 64)
        cache.n_pages = 64; /* 4096 positions: the deepest test needs 2112 */
    rc = kv_cache_open(&cache, &b.cache, &why);
    if (rc < 0)
        goto out;
    rc = MODEL_ERR_NOMEM;
    b.ids = calloc(p->n_ctx, sizeof(*b.ids));
    b.logits = malloc(p->n_vocab * sizeof(*b.logits));
    if (!b.ids || !b.logits)
        goto out;
    for (uint32_t i = 0; i < p->n_ctx; i++)
        b.ids[i] = (uint32_t)(((uint64_t)i * 2654435761u + 12345) % p->n_vocab);
    printf("# %s, kernels %s, KV %s, %.1f MB of weights in a step\n", o->model,
           model_kernels(b.model), kv_precision_name(cache.geometry.precision),
           1e-6 * step_weight_bytes(b.model));
    rc = 0;
    why.text[0] = '\0';
    for (uint32_t i = 0; i < o->n_threads && rc == 0; i++)
        rc = run_threads(&b, o->threads[i]);
out:
    if (rc < 0 && why.text[0])
        fprintf(stderr, "bench_engine: %s\n", why.text);
    free(b.logits);
    free(b.ids);
    kv_cache_close(b.cache);
    model_close(b.model);
    gguf_close(b.gguf);
    return rc;
}

static int parse_threads(struct options *o, const char *arg)
{
    char *end;

    for (o->n_threads = 0; o->n_threads < MAX_THREADS_LISTED; arg = end + 1) {
        const unsigned long n = strtoul(arg, &end, 10);

        if (n < 1 || n > ENGINE_MAX_THREADS || (*end != '\0' && *end != ','))
            return -1;
        o->threads[o->n_threads++] = (uint32_t)n;
        if (*end == '\0')
            return 0;
    }
    return -1;
}

static int usage(void)
{
    fprintf(stderr, "usage: bench_engine [--model FILE] [--threads N[,N]] [--kernels SET] "
                    "[--kv-precision NAME] [--quick] [--peer LLAMA_BENCH]\n");
    return 2;
}

int main(int argc, char **argv)
{
    static const struct option longs[] = {{"model", required_argument, NULL, 'm'},
                                          {"threads", required_argument, NULL, 't'},
                                          {"kernels", required_argument, NULL, 'k'},
                                          {"quick", no_argument, NULL, 'q'},
                                          {"peer", required_argument, NULL, 'p'},
                                          {"kv-precision", required_argument, NULL, 'v'},
                                          {NULL, 0, NULL, 0}};
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    struct options o = {.precision = KV_F16, .threads = {1, 2}, .n_threads = 2};
    char path[4096];
    int c;

    snprintf(path, sizeof(path), "%s%s/baton/SmolLM2-135M-Instruct.Q4_1.gguf",
             cache  ? cache
             : home ? home
                    : "",
             cache ? "" : "/.cache");
    o.model = getenv("BATON_MODEL") ? getenv("BATON_MODEL") : path;
    while ((c = getopt_long(argc, argv, "", longs, NULL)) != -1) {
        if (c == 'm')
            o.model = optarg;
        else if (c == 'k')
            o.kernels = optarg;
        else if (c == 'v')
            o.precision = kv_precision_parse(optarg);
        else if (c == 'q')
            o.quick = true;
        else if (c == 'p')
            o.peer = optarg;
        else if (c != 't' || parse_threads(&o, optarg) < 0)
            return usage();
    }
    if (optind < argc || o.precision < 0)
        return usage();
    return run_all(&o) == 0 ? 0 : 1;
}

/* Goal: engine_step() computes what the model file says, and a row's bits depend on the file, the
 * KV precision and the ids up to it alone.
 * Method: a small model of float weights is compared with golden tokens and with figures of a
 * float64 oracle (tests/tools/oracle_figures.py); tiny models of every weight type are run in every
 * way that must not matter, and digests of all logits are compared with one another and with
 * committed ones.  Sequences are made to fail beside others that must not notice. */
#include "engine_rig.h"
#include "model/kern_rows.h"
#include "model/model_internal.h"

#include <check.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { N = 300 /* positions of a run: over the border of 256 */ };

/* A tiny model and a precision.  q8 needs heads of whole 32s: of 32, 64 and 128. */
struct engine_case {
    const char *model;
    enum kv_precision precision;
};

static const struct engine_case cases[] = {
    {"f32", KV_F32},     {"f32", KV_F16},     {"f16", KV_F32},    {"f16", KV_F16},
    {"bf16", KV_F32},    {"bf16", KV_F16},    {"q8_0", KV_F32},   {"q8_0", KV_F16},
    {"q4_0", KV_F32},    {"q4_0", KV_F16},    {"q4_1", KV_F32},   {"q4_1", KV_F16},
    {"spm-f32", KV_F32}, {"spm-f32", KV_F16}, {"d32-f32", KV_Q8}, {"d64-q4_1", KV_Q8},
    {"wide", KV_Q8},
};
enum { N_CASES = sizeof(cases) / sizeof(cases[0]) };

/* Under a sanitizer the plain set is a hundred times slower than the vector sets, whose bits are
 * the same; there it runs on one case in seven.  ThreadSanitizer, which is to see threads and not
 * weight types, gets one type. */
#if defined(__SANITIZE_THREAD__)
enum { SANITIZED = 1, ONE_TYPE = 1 };
#elif defined(__SANITIZE_ADDRESS__)
enum { SANITIZED = 1, ONE_TYPE = 0 };
#elif defined(__has_feature)
enum {
    SANITIZED = __has_feature(address_sanitizer) || __has_feature(thread_sanitizer),
    ONE_TYPE = __has_feature(thread_sanitizer)
};
#else
enum { SANITIZED = 0, ONE_TYPE = 0 };
#endif

static bool left_out(const char *set, int i)
{
    return SANITIZED && i % 7 != 0 && strcmp(set, "plain") == 0 && set != model_kernel_sets()[0];
}

/* ---- Against others ---- */

static uint32_t argmax(const float *x, uint32_t n)
{
    uint32_t best = 0;

    for (uint32_t i = 1; i < n; i++)
        if (x[i] > x[best])
            best = i;
    return best;
}

/* The ids of a text file; how many. */
static uint32_t read_ids(const char *path, uint32_t *ids, uint32_t most)
{
    FILE *f = fopen(path, "r");
    uint32_t n = 0;

    ck_assert_ptr_nonnull(f);
    while (n < most && fscanf(f, "%u", &ids[n]) == 1)
        n++;
    fclose(f);
    return n;
}

enum { STORIES_VOCAB = 512, STORIES_IDS = 200 };

/* NULL, with a line that says so, where the reference data is not there. */
static const char *stories(uint32_t *ids, const char *name)
{
    const char *path = rig_reference("stories260K/stories260K.greedy200.ids");

    if (!path) {
        printf("SKIP %s: the reference data does not stand beside the checkout\n", name);
        return NULL;
    }
    ck_assert_uint_eq(read_ids(path, ids, STORIES_IDS), STORIES_IDS);
    path = rig_reference("stories260K/stories260K-f32.gguf");
    ck_assert_ptr_nonnull(path);
    return path;
}

START_TEST(stories260k_gives_the_golden_tokens)
{
    uint32_t ids[STORIES_IDS];
    const char *path = stories(ids, "stories260k_gives_the_golden_tokens");
    float logits[STORIES_VOCAB];

    if (!path)
        return;
    for (const char *const *set = model_kernel_sets(); *set; set++) {
        struct rig r;
        struct kv_context *ctx;

        if (left_out(*set, 1))
            continue;

        rig_open(&r, &(struct rig_config){.path = path, .kernels = *set, .precision = KV_F16});
        ctx = rig_context(&r);
        for (uint32_t i = 0; i + 1 < STORIES_IDS; i++) {
            rig_logits(&r, ctx, &ids[i], 1, logits);
            ck_assert_msg(argmax(logits, STORIES_VOCAB) == ids[i + 1], "%s: token %u", *set, i + 1);
        }
        kv_context_close(ctx);
        rig_close(&r);
    }
}
END_TEST

static double walsh(const float *x, uint32_t mask)
{
    double sum = 0;

    for (uint32_t i = 0; i < STORIES_VOCAB; i++)
        sum += __builtin_parity(i & mask) ? -(double)x[i] : (double)x[i];
    return sum;
}

/* One line of the oracle's figures against logits [.][V].  Returns what kind it was. */
static char check_line(FILE *f, const float *logits)
{
    static const uint32_t masks[] = {0x000, 0x0F3, 0x155, 0x1B6};
    char word[16];
    const float *row;
    uint32_t pos;
    double want;

    if (fscanf(f, " %15[^ \n] ", word) != 1)
        return 0;
    if (word[0] == '#') {
        ck_assert_int_eq(fscanf(f, "%*[^\n]"), 0);
        return '#';
    }
    ck_assert_int_eq(fscanf(f, "%u", &pos), 1);
    ck_assert_uint_lt(pos, STORIES_IDS);
    row = logits + (size_t)pos * STORIES_VOCAB;
    for (uint32_t i = 0; i < (word[0] == 's' ? 4 : STORIES_VOCAB); i++) {
        ck_assert_int_eq(fscanf(f, "%lf", &want), 1);
        if (word[0] == 's') /* 512 logits, each within 1e-5 */
            ck_assert_double_eq_tol(walsh(row, masks[i]), want, 5e-3);
        else
            ck_assert_double_eq_tol((double)row[i], want, 1e-4);
    }
    return word[0];
}

START_TEST(stories260k_has_the_logits_of_the_oracle)
{
    static float logits[STORIES_IDS * STORIES_VOCAB];
    uint32_t ids[STORIES_IDS], n_sums = 0, n_logits = 0;
    const char *path = stories(ids, "stories260k_has_the_logits_of_the_oracle");
    struct kv_context *ctx;
    struct rig r;
    FILE *f;

    if (!path)
        return;
    rig_open(&r, &(struct rig_config){.path = path, .precision = KV_F32});
    ctx = rig_context(&r);
    rig_logits(&r, ctx, ids, STORIES_IDS, logits);
    f = fopen(BATON_SOURCE_DIR "/tests/stories260K.oracle.txt", "r");
    ck_assert_ptr_nonnull(f);
    for (char kind; (kind = check_line(f, logits)) != 0;) {
        n_sums += kind == 's';
        n_logits += kind == 'l';
    }
    fclose(f);
    ck_assert_uint_eq(n_sums, STORIES_IDS);
    ck_assert_uint_eq(n_logits, 8);
    kv_context_close(ctx);
    rig_close(&r);
}
END_TEST

/* ---- One answer ---- */

static uint32_t ids[N];

static struct rig_config case_config(int i)
{
    const char *path = rig_tiny(cases[i].model);

    ck_assert_msg(path != NULL, "tiny-%s.gguf was not built", cases[i].model);
    return (struct rig_config){.path = path, .precision = cases[i].precision};
}

/* All digests of ids run in chunks from an empty context. */
static void run_new(const struct rig_config *config, uint32_t chunk, uint64_t *digests)
{
    struct kv_context *ctx;
    struct rig r;

    rig_open(&r, config);
    rig_ids(ids, N, r.params->n_vocab, 7);
    ctx = rig_context(&r);
    rig_run(&r, ctx, ids, N, chunk, digests);
    ck_assert_uint_eq(kv_context_length(ctx), N);
    kv_context_close(ctx);
    rig_close(&r);
}

static void same(const uint64_t *got, const uint64_t *want, uint32_t first, uint32_t n,
                 const char *what, uint32_t a, uint32_t b, uint32_t c)
{
    for (uint32_t i = 0; i < n; i++)
        ck_assert_msg(got[i] == want[i], "%s %u %u %u: position %u differs", what, a, b, c,
                      first + i);
}

START_TEST(all_logits_are_those_committed_in_every_kernel_set)
{
    const char *precision = kv_precision_name(cases[_i].precision);
    struct rig_config config = case_config(_i);
    FILE *f = fopen(BATON_SOURCE_DIR "/tests/logits_hashes.txt", "r");
    char line[128], model[32], kv[8];
    unsigned long long want = 0, hash;
    uint64_t digests[N];
    bool found = false;

    ck_assert_ptr_nonnull(f);
    while (!found && fgets(line, sizeof(line), f))
        found = sscanf(line, "tiny-%31s %7s %llx", model, kv, &want) == 3 &&
                strcmp(model, cases[_i].model) == 0 && strcmp(kv, precision) == 0;
    fclose(f);
    for (const char *const *set = model_kernel_sets(); *set; set++) {
        if (left_out(*set, _i))
            continue;
        config.kernels = *set;
        run_new(&config, N, digests);
        hash = logits_digest((const float *)digests, 2 * N);
        ck_assert_msg(found && hash == want, "%s: tiny-%s %s %016llx", *set, cases[_i].model,
                      precision, hash);
    }
}
END_TEST

/* ids in chunks, in an engine that is open. */
static void check_chunk(struct rig *r, uint32_t chunk, const uint64_t *want, uint32_t page_tokens)
{
    struct kv_context *ctx = rig_context(r);
    uint64_t got[N];

    rig_run(r, ctx, ids, N, chunk, got);
    same(got, want, 0, N, "chunk, page, threads", chunk, page_tokens, engine_n_threads(r->engine));
    kv_context_close(ctx);
}

START_TEST(chunks_pages_and_threads_do_not_show)
{
    static const uint32_t chunks[] = {1, 2, 7, 16, 64, N}, pages[] = {16, 64, 256};
    struct rig_config config = case_config(_i);
    uint64_t want[N];
    struct rig r;

    run_new(&config, N, want);
    for (uint32_t p = 0; p < 3; p++)
        for (config.n_threads = 1; config.n_threads <= 2; config.n_threads++) {
            config.page_tokens = pages[p];
            rig_open(&r, &config);
            for (uint32_t c = 0; c < 6; c++)
                if (!SANITIZED || (p + c + config.n_threads) % 3 == 0)
                    check_chunk(&r, chunks[c], want, pages[p]);
            rig_close(&r);
        }
}
END_TEST

START_TEST(a_cut_at_any_border_does_not_show)
{
    static const uint32_t cuts[] = {1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 257};
    struct rig_config config = case_config(_i);
    uint64_t want[N], got[N];
    struct kv_context *ctx;
    struct rig r;

    run_new(&config, N, want);
    config.n_threads = 2;
    config.page_tokens = 16;
    rig_open(&r, &config);
    for (size_t i = 0; i < sizeof(cuts) / sizeof(cuts[0]); i++) {
        ctx = rig_context(&r);
        rig_run(&r, ctx, ids, cuts[i], N, got);
        rig_run(&r, ctx, ids + cuts[i], N - cuts[i], N, got + cuts[i]);
        same(got, want, 0, N, "cut", cuts[i], 0, 0);
        kv_context_close(ctx);
    }
    rig_close(&r);
}
END_TEST

START_TEST(a_fork_at_any_position_does_not_show)
{
    enum { SHORT = 50 };
    struct rig_config config = case_config(_i);
    struct kv_context *ctx, *fork;
    uint64_t want[N], got[N], other[N];
    uint32_t strange[SHORT];
    struct rig r;

    config.page_tokens = 16;
    run_new(&config, N, want);
    rig_open(&r, &config);
    rig_ids(strange, SHORT, r.params->n_vocab, 99);
    ctx = rig_context(&r);
    rig_run(&r, ctx, ids, SHORT, N, got);
    for (uint32_t p = 1; p < SHORT; p++) {
        ck_assert_int_eq(kv_context_fork(ctx, p, &fork), 0);
        rig_run(&r, fork, strange, 3, 3, other); /* goes another way, on pages of its own */
        kv_context_close(fork);
        ck_assert_int_eq(kv_context_fork(ctx, p, &fork), 0);
        rig_run(&r, fork, ids + p, SHORT - p, N, got);
        same(got, want + p, p, SHORT - p, "fork", p, 0, 0);
        kv_context_close(fork);
    }
    rig_run(&r, ctx, ids + SHORT, N - SHORT, N, got);
    same(got, want + SHORT, SHORT, N - SHORT, "after forks", 0, 0, 0);
    kv_context_close(ctx);
    rig_close(&r);
}
END_TEST

/* One step of our sequence (k ids at *done) beside strangers that add 1..5 ids each. */
static void step_with(struct rig *r, struct kv_context **others, uint32_t n_others,
                      struct kv_context *ours, uint32_t done, uint32_t k, uint64_t *digests)
{
    const uint32_t n_vocab = r->params->n_vocab, at = n_others / 2;
    float *logits = malloc((size_t)(k + n_others) * n_vocab * sizeof(*logits));
    struct engine_item items[16] = {{0}};
    uint32_t strange[16][5];

    ck_assert_ptr_nonnull(logits);
    for (uint32_t i = 0; i <= n_others; i++) {
        const uint32_t s = i - (i > at);

        if (i == at) {
            items[i] = (struct engine_item){
                .ctx = ours, .ids = ids + done, .n_ids = k, .logits = logits, .all_logits = true};
            continue;
        }
        rig_ids(strange[i], 5, n_vocab, done * 31 + i);
        items[i] =
            (struct engine_item){.ctx = others[s], .ids = strange[i], .n_ids = 1 + (done + i) % 5};
        if (i % 3) /* some want logits, some do not */
            items[i].logits = logits + (size_t)(k + s) * n_vocab;
    }
    ck_assert_int_eq(engine_step(r->engine, items, n_others + 1), 0);
    for (uint32_t i = 0; i <= n_others; i++)
        ck_assert_msg(items[i].rc == 0, "%s", items[i].why.text);
    for (uint32_t j = 0; j < k; j++)
        digests[j] = logits_digest(logits + (size_t)j * n_vocab, n_vocab);
    free(logits);
}

START_TEST(strangers_in_the_batch_do_not_show)
{
    static const uint32_t crowds[] = {1, 7, 15}, steps[] = {1, 3, 17, 60};
    struct rig_config config = case_config(_i);
    struct kv_context *ours, *others[15];
    uint64_t want[N], got[N];
    struct rig r;

    run_new(&config, N, want);
    config.n_threads = 2;
    config.n_positions = 16 * 1024;
    rig_open(&r, &config);
    for (uint32_t c = 0; c < 3; c++) {
        ours = rig_context(&r);
        for (uint32_t i = 0; i < crowds[c]; i++)
            others[i] = rig_context(&r);
        for (uint32_t done = 0, k, turn = 0; done < N; done += k, turn++) {
            k = steps[turn % 4] < N - done ? steps[turn % 4] : N - done;
            step_with(&r, others, crowds[c], ours, done, k, got + done);
        }
        same(got, want, 0, N, "strangers", crowds[c], 0, 0);
        for (uint32_t i = 0; i < crowds[c]; i++)
            kv_context_close(others[i]);
        kv_context_close(ours);
    }
    rig_close(&r);
}
END_TEST

START_TEST(logits_of_the_last_token_alone_are_the_same)
{
    struct rig_config config = {.path = rig_tiny("q4_1"), .precision = KV_F16};
    uint64_t want[N];
    struct kv_context *ctx;
    struct rig r;

    run_new(&config, N, want);
    rig_open(&r, &config);
    ctx = rig_context(&r);
    float *logits = malloc(r.params->n_vocab * sizeof(*logits));
    struct engine_item item = {.ctx = ctx, .ids = ids, .n_ids = 100, .logits = NULL};

    ck_assert_int_eq(engine_step(r.engine, &item, 1), 0);
    ck_assert_int_eq(item.rc, 0);
    item = (struct engine_item){.ctx = ctx, .ids = ids + 100, .n_ids = N - 100, .logits = logits};
    ck_assert_int_eq(engine_step(r.engine, &item, 1), 0);
    ck_assert_int_eq(item.rc, 0);
    ck_assert_uint_eq(logits_digest(logits, r.params->n_vocab), want[N - 1]);
    free(logits);
    kv_context_close(ctx);
    rig_close(&r);
}
END_TEST

START_TEST(long_sequences_divided_by_segments_are_the_same)
{
    enum { LONG = 1000 };
    struct rig_config config = {.path = rig_tiny(_i == 0 ? "q8_0" : "d64-q4_1"),
                                .precision = _i == 0 ? KV_F16 : KV_Q8};
    uint64_t want[LONG], got[LONG];
    uint32_t long_ids[LONG];
    struct kv_context *ctx;
    struct rig r;

    for (config.n_threads = 1; config.n_threads <= 4; config.n_threads++) {
        rig_open(&r, &config);
        rig_ids(long_ids, LONG, r.params->n_vocab, 3);
        ctx = rig_context(&r);
        if (config.n_threads == 1) {
            rig_run(&r, ctx, long_ids, LONG, LONG, want);
        } else { /* one row, then a few, divided at every depth; then many */
            rig_run(&r, ctx, long_ids, 500, 500, got);
            rig_run(&r, ctx, long_ids + 500, 100, 1, got + 500);
            rig_run(&r, ctx, long_ids + 600, 200, 3, got + 600);
            rig_run(&r, ctx, long_ids + 800, 200, 200, got + 800);
            same(got, want, 0, LONG, "threads", config.n_threads, 0, 0);
        }
        kv_context_close(ctx);
        rig_close(&r);
    }
}
END_TEST

START_TEST(the_numerics_id_is_one_for_all_sets_and_not_for_all_models)
{
    struct kv_digest first = {{0}}, f32 = {{0}};
    struct rig r;

    for (const char *const *set = model_kernel_sets(); *set; set++) {
        rig_open(&r, &(struct rig_config){.path = rig_tiny("q4_1"), .kernels = *set});
        ck_assert_str_eq(model_kernels(r.model), *set);
        if (set == model_kernel_sets())
            first = *model_numerics_id(r.model);
        ck_assert_mem_eq(model_numerics_id(r.model), &first, sizeof(first));
        rig_close(&r);
    }
    rig_open(&r, &(struct rig_config){.path = rig_tiny("f32")});
    f32 = *model_numerics_id(r.model);
    rig_close(&r);
    ck_assert_mem_ne(&f32, &first, sizeof(first));
}
END_TEST

#if defined(__x86_64__)
START_TEST(a_caller_with_another_float_mode_gets_the_same_and_keeps_its_mode)
{
    struct rig_config config = {.path = rig_tiny("f32"), .precision = KV_F32, .n_threads = 2};
    uint64_t want[N], got[N];
    const unsigned before = _mm_getcsr();

    run_new(&config, N, want);
    _mm_setcsr(0xFFC0); /* subnormals are zero, rounding toward zero */
    run_new(&config, N, got);
    ck_assert_uint_eq(_mm_getcsr() & ~0x3fu, 0xFFC0u);
    _mm_setcsr(before);
    same(got, want, 0, N, "float mode", 0, 0, 0);
}
END_TEST
#endif

/* ---- Failures ---- */

START_TEST(bad_items_fail_by_name_and_leave_their_contexts_and_the_others_alone)
{
    struct rig_config config = {.path = rig_tiny("q4_1"), .precision = KV_F16};
    struct kv_context *good, *bad;
    uint64_t want[N];
    struct rig r;

    run_new(&config, N, want);
    config.n_positions = 1100;
    rig_open(&r, &config);
    const uint32_t n_vocab = r.params->n_vocab, n_ctx = r.params->n_ctx;
    const uint32_t bad_ids[3] = {1, n_vocab, 2};
    float *logits = malloc(n_vocab * sizeof(*logits));

    good = rig_context(&r);
    bad = rig_context(&r);
    struct engine_item items[2] = {
        {.ctx = bad, .ids = bad_ids, .n_ids = 3},
        {.ctx = good, .ids = ids, .n_ids = N, .logits = logits},
    };

    ck_assert_int_eq(engine_step(r.engine, items, 2), 0);
    ck_assert_int_eq(items[0].rc, MODEL_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(items[0].why.text, "token id"));
    ck_assert_uint_eq(kv_context_length(bad), 0);
    ck_assert_int_eq(items[1].rc, 0);
    ck_assert_uint_eq(logits_digest(logits, n_vocab), want[N - 1]);

    items[0].n_ids = 0;
    ck_assert_int_eq(engine_step(r.engine, items, 1), 0);
    ck_assert_int_eq(items[0].rc, MODEL_ERR_INVALID);
    /* one position more than the context */
    ck_assert_uint_eq(n_ctx, 1024);
    uint64_t *digests = calloc(n_ctx, sizeof(*digests));
    uint32_t *many = calloc(n_ctx, sizeof(*many));

    ck_assert(digests && many);
    rig_run(&r, bad, many, n_ctx - 1, 512, digests);
    items[0] = (struct engine_item){.ctx = bad, .ids = ids, .n_ids = 2};
    ck_assert_int_eq(engine_step(r.engine, items, 1), 0);
    ck_assert_int_eq(items[0].rc, MODEL_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(items[0].why.text, "1024"));
    ck_assert_uint_eq(kv_context_length(bad), n_ctx - 1);
    rig_run(&r, bad, ids, 1, 1, digests);
    free(many);
    free(digests);
    free(logits);
    kv_context_close(bad);
    kv_context_close(good);
    rig_close(&r);
}
END_TEST

START_TEST(a_full_cache_fails_the_item_that_meets_it)
{
    struct rig_config config = {.path = rig_tiny("q4_1"), .page_tokens = 16, .n_positions = 16};
    struct kv_context *a, *b;
    uint64_t digests[N];
    struct rig r;

    rig_open(&r, &config); /* 34 pages */
    rig_ids(ids, N, r.params->n_vocab, 7);
    a = rig_context(&r);
    b = rig_context(&r);
    rig_run(&r, a, ids, N, N, digests); /* 19 of them */
    struct engine_item items[2] = {{.ctx = b, .ids = ids, .n_ids = N},
                                   {.ctx = a, .ids = ids, .n_ids = 1}};

    ck_assert_int_eq(engine_step(r.engine, items, 2), 0);
    ck_assert_int_eq(items[0].rc, MODEL_ERR_KV);
    ck_assert_ptr_nonnull(strstr(items[0].why.text, "full"));
    ck_assert_uint_eq(kv_context_length(b), 0);
    ck_assert_int_eq(items[1].rc, 0);
    ck_assert_uint_eq(kv_context_length(a), N + 1);
    kv_context_close(a);
    kv_context_close(b);
    rig_close(&r);
}
END_TEST

/* A copy of a tiny f32 model whose embedding and one norm can be bent. */
struct bent {
    struct rig source;
    struct model model;
    float *embd; /* [V][C] */
    float *norm; /* [C], of layer 0 */
    struct rig rig;
};

static void bent_open(struct bent *b, enum kv_precision precision)
{
    rig_open(&b->source,
             &(struct rig_config){.path = rig_tiny(precision == KV_Q8 ? "d32-f32" : "f32")});
    b->model = *b->source.model;
    const struct model_params *p = &b->model.params;
    const size_t embd_bytes = (size_t)p->n_vocab * p->n_embd * sizeof(float);
    const size_t layer_bytes = p->n_layers * sizeof(*b->model.layers);

    b->embd = malloc(embd_bytes);
    b->norm = malloc(p->n_embd * sizeof(*b->norm));
    b->model.layers = malloc(layer_bytes);
    ck_assert(b->embd && b->norm && b->model.layers);
    memcpy(b->embd, b->source.model->token_embd.data, embd_bytes);
    memcpy(b->norm, b->source.model->layers[0].attn_norm, p->n_embd * sizeof(*b->norm));
    memcpy(b->model.layers, b->source.model->layers, layer_bytes);
    b->model.token_embd.data = (const unsigned char *)b->embd;
    b->model.layers[0].attn_norm = b->norm;
    rig_open(&b->rig,
             &(struct rig_config){.model = &b->model, .precision = precision, .n_threads = 2});
}

static void bent_close(struct bent *b)
{
    rig_close(&b->rig);
    rig_close(&b->source);
    free(b->model.layers);
    free(b->norm);
    free(b->embd);
}

enum { BENT_ID = 5 };

/* A sequence with BENT_ID in the middle fails with a text that holds `text`; one beside it is what
 * it is alone. */
static void check_fails(struct bent *b, const char *text)
{
    const uint32_t n_vocab = b->model.params.n_vocab;
    const uint32_t bad_ids[5] = {1, 2, BENT_ID, 3, 4}, good_ids[5] = {9, 8, 7, 6, 10};
    float *logits = malloc(3 * n_vocab * sizeof(*logits));
    struct kv_context *good = rig_context(&b->rig), *bad = rig_context(&b->rig);
    struct kv_context *alone = rig_context(&b->rig);
    struct engine_item items[3] = {
        {.ctx = alone, .ids = good_ids, .n_ids = 5, .logits = logits},
        {.ctx = bad, .ids = bad_ids, .n_ids = 5, .logits = logits + n_vocab},
        {.ctx = good, .ids = good_ids, .n_ids = 5, .logits = logits + 2 * n_vocab},
    };

    ck_assert_ptr_nonnull(logits);
    ck_assert_int_eq(engine_step(b->rig.engine, items, 1), 0);
    ck_assert_msg(items[0].rc == 0, "%s", items[0].why.text);
    ck_assert_int_eq(engine_step(b->rig.engine, items + 1, 2), 0);
    ck_assert_int_eq(items[1].rc, MODEL_ERR_NUMERIC);
    ck_assert_msg(strstr(items[1].why.text, text) != NULL, "%s", items[1].why.text);
    ck_assert_ptr_nonnull(strstr(items[1].why.text, "position 2"));
    ck_assert_uint_eq(kv_context_length(bad), 0);
    ck_assert_int_eq(items[2].rc, 0);
    ck_assert_mem_eq(logits, logits + 2 * n_vocab, n_vocab * sizeof(*logits));
    /* the context that failed goes on */
    items[1].ids = good_ids;
    ck_assert_int_eq(engine_step(b->rig.engine, items + 1, 1), 0);
    ck_assert_int_eq(items[1].rc, 0);
    ck_assert_mem_eq(logits, logits + n_vocab, n_vocab * sizeof(*logits));
    kv_context_close(alone);
    kv_context_close(good);
    kv_context_close(bad);
    free(logits);
}

START_TEST(a_value_that_is_not_finite_fails_its_sequence_alone)
{
    struct bent b;

    bent_open(&b, KV_F16);
    b.embd[BENT_ID * b.model.params.n_embd + 17] = NAN;
    check_fails(&b, "not finite");
    bent_close(&b);
}
END_TEST

/* Element 3 is zero in every token but one, and the norm makes it huge. */
static void bend_norm(struct bent *b, float scale)
{
    const uint32_t n = b->model.params.n_embd;

    for (uint32_t id = 0; id < b->model.params.n_vocab; id++)
        b->embd[id * n + 3] = id == BENT_ID ? 1.0f : 0.0f;
    b->norm[3] = scale;
}

START_TEST(k_or_v_that_overflows_the_precision_fails_its_sequence_alone)
{
    struct bent b;

    bent_open(&b, KV_F16);
    bend_norm(&b, 1e7f);
    check_fails(&b, "overflows f16");
    bent_close(&b);
    bent_open(&b, KV_Q8); /* the scale is what overflows, a 127th */
    bend_norm(&b, 1e9f);
    check_fails(&b, "overflows q8");
    bent_close(&b);
    /* f32 takes it */
    bent_open(&b, KV_F32);
    bend_norm(&b, 1e7f);
    const uint32_t one[1] = {BENT_ID};
    struct kv_context *ctx = rig_context(&b.rig);
    struct engine_item item = {.ctx = ctx, .ids = one, .n_ids = 1};

    ck_assert_int_eq(engine_step(b.rig.engine, &item, 1), 0);
    ck_assert_msg(item.rc == 0, "%s", item.why.text);
    kv_context_close(ctx);
    bent_close(&b);
}
END_TEST

START_TEST(heads_that_are_not_whole_32s_refuse_q8_by_name)
{
    struct kv_cache_config cache = {.n_pages = 2};
    struct kv_why why;
    struct rig r;

    rig_open(&r, &(struct rig_config){.path = rig_tiny("q4_1")});
    model_geometry(r.model, KV_Q8, &cache.geometry);
    ck_assert_int_eq(kv_cache_open(&cache, &(struct kv_cache *){NULL}, &why), KV_ERR_INVALID);
    ck_assert_msg(strstr(why.text, "head_dim is 16: precision q8") != NULL, "%s", why.text);
    rig_close(&r);
}
END_TEST

START_TEST(what_an_engine_cannot_be_opened_with_is_named)
{
    struct engine_config config = {.n_threads = 1, .max_rows = 8, .max_items = 2};
    struct kv_cache_config cache = {.n_pages = 2};
    struct engine *e = NULL;
    struct kv_why why;
    struct rig r;

    rig_open(&r, &(struct rig_config){.path = rig_tiny("q4_1"), .precision = KV_F16});
    config.model = r.model;
    config.cache = r.cache;
    config.max_rows = 0;
    ck_assert_int_eq(engine_open(&config, &e, &why), MODEL_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(why.text, "max_rows"));
    config.max_rows = ENGINE_MAX_ROWS + 1;
    ck_assert_int_eq(engine_open(&config, &e, &why), MODEL_ERR_INVALID);
    config.max_rows = 8;
    config.max_items = 0;
    ck_assert_int_eq(engine_open(&config, &e, &why), MODEL_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(why.text, "max_items"));
    config.max_items = 2;
    config.n_threads = ENGINE_MAX_THREADS + 1;
    ck_assert_int_eq(engine_open(&config, &e, &why), MODEL_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(why.text, "n_threads"));
    config.n_threads = 1;
    model_geometry(r.model, KV_F16, &cache.geometry);
    cache.geometry.n_layers++;
    ck_assert_int_eq(kv_cache_open(&cache, &config.cache, &why), 0);
    ck_assert_int_eq(engine_open(&config, &e, &why), MODEL_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(why.text, "layers"));
    ck_assert_ptr_null(e);
    kv_cache_close(config.cache);
    config.cache = r.cache;
    ck_assert_int_eq(engine_open(&config, &e, &why), 0);
    struct engine_item items[3] = {{.n_ids = 3}, {.n_ids = 3}, {.n_ids = 3}};

    ck_assert_int_eq(engine_step(e, items, 3), MODEL_ERR_INVALID); /* items */
    items[0].n_ids = 9;
    ck_assert_int_eq(engine_step(e, items, 1), MODEL_ERR_INVALID); /* rows */
    ck_assert_int_eq(engine_step(e, items, 0), 0);
    engine_close(e);
    rig_close(&r);
}
END_TEST

static Suite *suite(void)
{
    enum { FIRST = ONE_TYPE ? 10 : 0, LAST = ONE_TYPE ? 12 : N_CASES }; /* q4_1 */
    Suite *s = suite_create("engine");
    TCase *others = tcase_create("others"), *one = tcase_create("one"), *bad = tcase_create("bad");

    tcase_set_timeout(others, 60);
    tcase_add_test(others, stories260k_gives_the_golden_tokens);
    tcase_add_test(others, stories260k_has_the_logits_of_the_oracle);
    suite_add_tcase(s, others);
    tcase_set_timeout(one, 120);
    tcase_add_loop_test(one, all_logits_are_those_committed_in_every_kernel_set, FIRST, LAST);
    tcase_add_loop_test(one, chunks_pages_and_threads_do_not_show, FIRST, LAST);
    tcase_add_loop_test(one, a_cut_at_any_border_does_not_show, FIRST, LAST);
    tcase_add_loop_test(one, a_fork_at_any_position_does_not_show, FIRST, LAST);
    tcase_add_loop_test(one, strangers_in_the_batch_do_not_show, FIRST, LAST);
    tcase_add_test(one, logits_of_the_last_token_alone_are_the_same);
    tcase_add_loop_test(one, long_sequences_divided_by_segments_are_the_same, 0, 2);
    tcase_add_test(one, the_numerics_id_is_one_for_all_sets_and_not_for_all_models);
#if defined(__x86_64__)
    tcase_add_test(one, a_caller_with_another_float_mode_gets_the_same_and_keeps_its_mode);
#endif
    suite_add_tcase(s, one);
    tcase_set_timeout(bad, 60);
    tcase_add_test(bad, bad_items_fail_by_name_and_leave_their_contexts_and_the_others_alone);
    tcase_add_test(bad, a_full_cache_fails_the_item_that_meets_it);
    tcase_add_test(bad, a_value_that_is_not_finite_fails_its_sequence_alone);
    tcase_add_test(bad, k_or_v_that_overflows_the_precision_fails_its_sequence_alone);
    tcase_add_test(bad, heads_that_are_not_whole_32s_refuse_q8_by_name);
    tcase_add_test(bad, what_an_engine_cannot_be_opened_with_is_named);
    suite_add_tcase(s, bad);
    return s;
}

int main(void)
{
    SRunner *r = srunner_create(suite());
    int failed;

    srunner_run_all(r, CK_ENV);
    failed = srunner_ntests_failed(r);
    srunner_free(r);
    return failed ? 1 : 0;
}

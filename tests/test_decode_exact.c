/* P1 from outside: the same prompt gives the same bits, seen through logits digests, whoever
 * computes it.  A prompt is answered alone by a decode node of plain settings; then by pairs of a
 * prefill and a decode node whose chunk, page, threads and kernels differ, by both routes, many at
 * once.  All digests, ids and log-probabilities must be equal, bit for bit.
 *
 * The model's frames hold 128 or 64 positions, so lengths lie around borders of pages, frames and
 * kernels' tiles. */
#include "node_fixture.h"

#include "model/model.h"

#include <check.h>
#include <stdlib.h>
#include <string.h>

static const uint32_t lengths[] = {1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257};
enum { N_LENGTHS = sizeof(lengths) / sizeof(lengths[0]), N_SHORT = 5, N_TOKENS = 4, LONGEST = 257 };

static const char *const precisions[] = {"f16", "f32", "q8"};
enum { N_PRECISIONS = sizeof(precisions) / sizeof(precisions[0]) };
static struct answer reference[N_PRECISIONS][N_LENGTHS];
static uint32_t n_vocab;

struct setting {
    const char *chunk, *page, *threads;
};

/* A node's further arguments behind the common ones. */
static void start(struct fixture_node *node, const char *name, const struct setting *s,
                  const char *precision, const char *kernels, const char *prefill)
{
    const char *args[32] = {"--model",        fixture_tiny("tiny-wide"),
                            "--kv-bytes",     strcmp(s->page, "256") == 0 ? "192M" : "128M",
                            "--chunk",        s->chunk,
                            "--page",         s->page,
                            "--threads",      s->threads,
                            "--kv-precision", precision,
                            "--kernels",      kernels,
                            "--log-level",    "error"};
    size_t n = 16;

    if (prefill != NULL) {
        args[n++] = "--prefill";
        args[n++] = prefill;
        args[n++] = "--max-batch";
        args[n++] = "32";
    }
    args[n] = NULL;
    fixture_start(node, name, args);
}

static void prompt(uint32_t *ids, size_t i)
{
    fixture_ids(ids, lengths[i], (uint32_t)i + 7, n_vocab);
}

/* Each prompt alone, on a node without prefill, in a namespace of its own. */
static void make_reference(int p)
{
    static const struct setting plain = {"512", "64", "1"};
    struct fixture_node node;
    struct description d;
    struct question q;
    uint32_t ids[LONGEST];

    start(&node, "decode", &plain, precisions[p], "auto", NULL);
    describe(&node, &d);
    n_vocab = d.n_vocab;
    for (size_t i = 0; i < N_LENGTHS; i++) {
        uint8_t salt = (uint8_t)i;

        prompt(ids, i);
        question_ids(&q, ids, lengths[i], N_TOKENS, BATON__V1__ROUTE__ROUTE_LOCAL);
        q.q.salt.data = &salt;
        q.q.salt.len = 1;
        ask(&node, &q.q, &reference[p][i]);
        ck_assert_msg(reference[p][i].status == 0, "%s", reference[p][i].details);
        ck_assert_uint_eq(reference[p][i].n_digests, N_TOKENS);
    }
    ck_assert_int_eq(fixture_stop(&node), 0);
}

static void check_equal(const struct answer *a, const struct answer *b, size_t i, const char *what)
{
    ck_assert_msg(a->status == 0, "%s, %u positions: %s", what, lengths[i], a->details);
    ck_assert_uint_eq(a->n_ids, N_TOKENS);
    ck_assert_msg(memcmp(a->digests, b->digests, N_TOKENS * sizeof(a->digests[0])) == 0,
                  "%s, %u positions: digests differ", what, lengths[i]);
    ck_assert_msg(memcmp(a->ids, b->ids, N_TOKENS * sizeof(a->ids[0])) == 0, "%s, %u positions",
                  what, lengths[i]);
    ck_assert_msg(memcmp(a->logprobs, b->logprobs, N_TOKENS * sizeof(float)) == 0,
                  "%s, %u positions", what, lengths[i]);
}

/* All prompts at once by both routes; then once more, when the trees of both nodes are warm. */
static void ask_pair(const struct fixture_node *decode, int p, size_t n_lengths, const char *what)
{
    const size_t n = 2 * n_lengths;
    struct asking *a = calloc(n, sizeof(*a));
    struct question q;
    uint32_t ids[LONGEST];

    ck_assert_ptr_nonnull(a);
    for (int round = 0; round < 2; round++) {
        for (size_t i = 0; i < n; i++) {
            bool remote = i % 2 == 1;
            uint8_t salt = remote ? 'r' : 'l';

            prompt(ids, i / 2);
            question_ids(&q, ids, lengths[i / 2], N_TOKENS,
                         remote ? BATON__V1__ROUTE__ROUTE_PREFILL : BATON__V1__ROUTE__ROUTE_LOCAL);
            q.q.salt.data = &salt;
            q.q.salt.len = 1;
            asking_start(&a[i], decode, &q.q, 60000);
        }
        for (size_t i = 0; i < n; i++) {
            const Baton__V1__Usage *u = &a[i].answer.usage;

            asking_wait(&a[i]);
            check_equal(&a[i].answer, &reference[p][i / 2], i / 2, what);
            ck_assert_str_eq(a[i].answer.fallback, "");
            ck_assert_uint_eq(u->reused_tokens + u->received_tokens + u->local_tokens,
                              lengths[i / 2]);
            if (round == 0 && i % 2 == 1) /* the first of a namespace has nothing to reuse */
                ck_assert_uint_eq(u->local_tokens, 0);
            if (round == 1 &&
                lengths[i / 2] > 1) /* what was given up, but for one token that must run */
                ck_assert_uint_ge(u->reused_tokens, lengths[i / 2] - 1);
        }
    }
    free(a);
}

static void pair(const struct setting *prefill_s, const struct setting *decode_s, int p,
                 const char *prefill_kernels, const char *decode_kernels, size_t n_lengths)
{
    struct fixture_node prefill, decode;
    struct description d;
    char what[160];

    snprintf(what, sizeof(what), "prefill chunk %s page %s threads %s %s, decode %s %s %s %s, %s",
             prefill_s->chunk, prefill_s->page, prefill_s->threads, prefill_kernels,
             decode_s->chunk, decode_s->page, decode_s->threads, decode_kernels, precisions[p]);
    start(&prefill, "prefill", prefill_s, precisions[p], prefill_kernels, NULL);
    start(&decode, "decode", decode_s, precisions[p], decode_kernels, prefill.address);
    ck_assert(wait_serving(&decode, 1));
    ask_pair(&decode, p, n_lengths, what);
    ck_assert_msg(wait_idle(&decode, &d), "%s: pages did not come back", what);
    ck_assert_int_eq(fixture_stop(&decode), 0);
    ck_assert_int_eq(fixture_stop(&prefill), 0);
}

START_TEST(all_routes_and_settings_give_the_same_bits)
{
    static const struct setting settings[] = {
        {"1", "16", "1"},  {"7", "64", "2"},  {"64", "256", "1"}, {"512", "16", "2"},
        {"1", "64", "2"},  {"7", "256", "1"}, {"64", "16", "2"},  {"512", "64", "1"},
        {"1", "256", "2"}, {"7", "16", "1"},  {"64", "64", "2"},  {"512", "256", "1"},
    };
    enum { N = sizeof(settings) / sizeof(settings[0]) };
    const char *const *kernels = model_kernel_sets();
    size_t n_kernels = 0;

    /* The last is the plain one, which is too slow for all of this; its own pair is below. */
    while (kernels[n_kernels + 1] != NULL)
        n_kernels++;
    if (n_kernels == 0)
        n_kernels = 1;
    make_reference(_i);
    for (size_t i = 0; i < N; i++)
        pair(&settings[i], &settings[(i + 5) % N], _i, kernels[i % n_kernels],
             kernels[(i + i / n_kernels + 1) % n_kernels], N_LENGTHS);
    pair(&settings[3], &settings[0], _i, "plain", kernels[0], N_SHORT);
    pair(&settings[0], &settings[3], _i, kernels[0], "plain", N_SHORT);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("decode exact");
    TCase *c = tcase_create("pairs");
    SRunner *r;
    int failed;

    transport_start();
    tcase_set_timeout(c, 250);
    tcase_add_loop_test(c, all_routes_and_settings_give_the_same_bits, 0, N_PRECISIONS);
    suite_add_tcase(s, c);
    r = srunner_create(s);
    srunner_set_fork_status(r, CK_NOFORK);
    srunner_run_all(r, CK_NORMAL);
    failed = srunner_ntests_failed(r);
    srunner_free(r);
    transport_stop();
    return failed != 0;
}

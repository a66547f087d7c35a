/* The sampler: known vectors of its generator, its own exp and log against the C library's, draws
 * against a plain version that sorts everything, and counts against probabilities.  All seeds are
 * fixed, so nothing here passes by luck of the day. */
#include "model/fixed_math.h"
#include "model/model.h"
#include "model/sampler.h"

#include <check.h>
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { V = 49152 };

static struct sampler *sampler;
static float logits[V];
static uint64_t random_state;

static double random_unit(void)
{
    random_state = random_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (double)(random_state >> 11) * 0x1p-53;
}

static void open_sampler(uint32_t n_vocab)
{
    ck_assert_int_eq(sampler_open(n_vocab, &sampler), 0);
}

static void close_sampler(void)
{
    sampler_close(sampler);
    sampler = NULL;
}

/* Something like what a model gives: a bell and a few that stand out. */
static void fill_logits(uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        double sum = 0;
        for (int j = 0; j < 6; j++)
            sum += random_unit();
        logits[i] = (float)((sum - 3.0) * 4.0);
    }
    for (int j = 0; j < 20; j++)
        logits[(uint32_t)(random_unit() * n)] += (float)(random_unit() * 12.0);
}

/* ---- Parts ---- */

START_TEST(the_generator_gives_its_authors_known_answers)
{
    static const struct {
        uint32_t counter[4], key[2], want[4];
    } cases[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    uint32_t out[4];

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        philox4x32_10(cases[i].counter, cases[i].key, out);
        ck_assert_mem_eq(out, cases[i].want, sizeof out);
    }
    ck_assert_double_eq(sampler_uniform(0, 0, 0),
                        (double)(UINT64_C(0xe169c58d6627e8d5) >> 11) * 0x1p-53);
    /* each of the three, and each half of them, counts */
    ck_assert(sampler_uniform(1, 2, 3) != sampler_uniform(1, 3, 2));
    ck_assert(sampler_uniform(1, 0, UINT64_C(1) << 32) != sampler_uniform(1, 0, 1));
    ck_assert(sampler_uniform(UINT64_C(1) << 32, 0, 0) != sampler_uniform(0, 0, 0));
}
END_TEST

START_TEST(exp_and_log_are_within_1e_15_of_the_librarys)
{
    double worst_exp = 0, worst_log = 0;

    random_state = 3;
    for (int i = 0; i < 200000; i++) {
        double x = -random_unit() * (i & 1 ? 700.0 : 2.0), y = exp(random_unit() * 40.0 - 2.0);
        double e = fabs(fixed_exp(x) / exp(x) - 1.0);
        double l = fabs(fixed_log(y) - log(y)) / fmax(fabs(log(y)), 1e-3);
        worst_exp = fmax(worst_exp, e);
        worst_log = fmax(worst_log, l);
    }
    ck_assert_double_lt(worst_exp, 1e-15);
    ck_assert_double_lt(worst_log, 1e-15);
    ck_assert_double_eq(fixed_exp(0.0), 1.0);
    ck_assert_double_eq(fixed_exp(-701.0), 0.0);
    ck_assert_double_eq(fixed_exp(-(double)INFINITY), 0.0);
    ck_assert_double_gt(fixed_exp(-700.0), 0.0);
    ck_assert_double_eq(fixed_log(1.0), 0.0);
    /* These bits are the same on every machine. */
    ck_assert_double_eq(fixed_exp(-1.0), 0x1.78b56362cef38p-2);
    ck_assert_double_eq(fixed_exp(-33.25), 0x1.057322ef4a1c2p-48);
    ck_assert_double_eq(fixed_log(3.0), 0x1.193ea7aad030bp+0);
    ck_assert_double_eq(fixed_log(49152.0), 0x1.59af7ee709313p+3);
}
END_TEST

START_TEST(a_field_out_of_range_is_named_with_its_value)
{
    static const struct {
        float temperature, top_p, min_p;
        const char *part;
    } cases[] = {
        {-0.5f, 1, 0, "temperature is -0.5"},
        {NAN, 1, 0, "temperature is nan"},
        {INFINITY, 1, 0, "temperature is inf"},
        {1, -0.1f, 0, "top_p is -0.1"},
        {1, 1.5f, 0, "top_p is 1.5"},
        {1, NAN, 0, "top_p is nan"},
        {1, 1, -1, "min_p is -1"},
        {1, 1, 1.25f, "min_p is 1.25"},
    };
    struct sampler_params p;
    struct kv_why why = {""};

    sampler_defaults(&p);
    ck_assert_int_eq(sampler_check(&p, &why), 0);
    ck_assert_float_eq(p.temperature, 0.0f);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        p.temperature = cases[i].temperature;
        p.top_p = cases[i].top_p;
        p.min_p = cases[i].min_p;
        ck_assert_int_eq(sampler_check(&p, &why), MODEL_ERR_INVALID);
        ck_assert_msg(strstr(why.text, cases[i].part) != NULL, "%s", why.text);
    }
}
END_TEST

/* ---- Against the plain way ---- */

static int by_logit(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

    if (logits[x] != logits[y])
        return logits[x] > logits[y] ? -1 : 1;
    return x < y ? -1 : 1;
}

static double plain_total(const uint32_t *order, uint32_t n, uint32_t n_vocab, double t)
{
    double total = 0;

    for (uint32_t i = 0; i < n; i++)
        total +=
            fixed_exp(((double)logits[n == n_vocab ? i : order[i]] - (double)logits[order[0]]) / t);
    return total;
}

/* The definition on top of model/sampler.c, word for word. */
static uint32_t plain_draw(const struct sampler_params *p, uint32_t n_vocab, uint64_t position)
{
    static uint32_t order[V];
    uint32_t n = n_vocab, i;
    double total, sum = 0, top, u;

    for (i = 0; i < n_vocab; i++)
        order[i] = i;
    qsort(order, n_vocab, sizeof *order, by_logit);
    if (p->temperature == 0.0f)
        return order[0];
    top = (double)logits[order[0]];
    if (p->top_k > 0 && p->top_k < n)
        n = p->top_k;
    if (p->top_p < 1.0f) {
        total = plain_total(order, n, n_vocab, 1.0);
        for (i = 0, sum = 0; i < n && (i == 0 || sum < (double)p->top_p * total); i++)
            sum += fixed_exp(((double)logits[order[i]] - top));
        n = i;
    }
    if (p->min_p > 0.0f)
        for (i = 1; i < n; i++)
            if (fixed_exp((double)logits[order[i]] - top) < (double)p->min_p)
                n = i;
    total = plain_total(order, n, n_vocab, (double)p->temperature);
    u = sampler_uniform(p->seed, p->branch, position);
    for (i = 0, sum = 0; i < n; i++) {
        sum += fixed_exp(((double)logits[order[i]] - top) / (double)p->temperature);
        if (sum > u * total)
            return order[i];
    }
    return order[n - 1];
}

static void random_params(struct sampler_params *p)
{
    static const uint32_t top_k[] = {0, 0, 1, 2, 5, 40, 200, 3000, 100000};
    static const float top_p[] = {1, 1, 0.95f, 0.5f, 0.1f, 0, 0.999f};
    static const float min_p[] = {0, 0, 0.05f, 0.5f, 1, 1e-6f};
    static const float temperature[] = {0, 0.1f, 0.7f, 1, 1.5f, 10, 1e-30f};

    p->top_k = top_k[(int)(random_unit() * 9)];
    p->top_p = top_p[(int)(random_unit() * 7)];
    p->min_p = min_p[(int)(random_unit() * 6)];
    p->temperature = temperature[(int)(random_unit() * 7)];
    p->seed = (uint64_t)(random_unit() * 1e18);
    p->branch = (uint32_t)(random_unit() * 8);
}

static void compare_draws(uint32_t n_vocab, int n_draws)
{
    struct sampler_params p;
    uint32_t got, want;

    for (int i = 0; i < n_draws; i++) {
        random_params(&p);
        got = sampler_draw(sampler, &p, logits, (uint64_t)i, NULL);
        want = plain_draw(&p, n_vocab, (uint64_t)i);
        ck_assert_msg(got == want, "draw %d: %u, want %u (k %u p %g min %g t %g)", i, got, want,
                      p.top_k, (double)p.top_p, (double)p.min_p, (double)p.temperature);
    }
}

START_TEST(draws_equal_those_of_the_plain_version)
{
    static const uint32_t sizes[] = {1, 2, 7, 300, 5000, V};
    static const int n_draws[] = {20, 50, 500, 500, 100, 60};

    random_state = 5;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        open_sampler(sizes[i]);
        for (int round = 0; round < 4; round++) {
            fill_logits(sizes[i]);
            if (round == 1) /* many equals */
                for (uint32_t j = 0; j < sizes[i]; j++)
                    logits[j] = (float)(int)(logits[j] / 3.0f);
            if (round == 2) /* all equal */
                memset(logits, 0, sizes[i] * sizeof *logits);
            if (round == 3) { /* all in one bucket, and one far away */
                for (uint32_t j = 0; j < sizes[i]; j++)
                    logits[j] *= 1e-4f;
                logits[sizes[i] / 2] = -1e4f;
            }
            compare_draws(sizes[i], n_draws[i] / 4 + 1);
        }
        close_sampler();
    }
}
END_TEST

/* ---- What each setting does ---- */

START_TEST(greedy_takes_the_greatest_and_of_equals_the_lower_id)
{
    struct sampler_params p;
    float logprob;

    sampler_defaults(&p);
    open_sampler(5);
    memcpy(logits, (float[]){1, 3, 2, 3, -1}, 5 * sizeof(float));
    for (uint64_t position = 0; position < 50; position++)
        ck_assert_uint_eq(sampler_draw(sampler, &p, logits, position, &logprob), 1);
    ck_assert_double_eq_tol((double)logprob, 3 - log(exp(1) + 2 * exp(3) + exp(2) + exp(-1)), 1e-6);
    close_sampler();
}
END_TEST

/* Counts of n draws at positions 0..n over these probabilities. */
static double chi_square(const struct sampler_params *p, uint32_t n_vocab, const double *want,
                         uint32_t n_draws)
{
    uint32_t count[16] = {0};
    double sum = 0;

    for (uint32_t i = 0; i < n_draws; i++)
        count[sampler_draw(sampler, p, logits, i, NULL)]++;
    for (uint32_t i = 0; i < n_vocab; i++) {
        double expected = want[i] * n_draws;
        if (want[i] == 0.0)
            ck_assert_uint_eq(count[i], 0);
        else
            sum += (count[i] - expected) * (count[i] - expected) / expected;
    }
    return sum;
}

START_TEST(counts_follow_the_probabilities)
{
    /* 8 tokens of probability 2^-1 .. 2^-7, 2^-7, out of order */
    static const int power[8] = {3, 1, 7, 2, 5, 7, 4, 6};
    struct sampler_params p;
    double want[8], sum;

    sampler_defaults(&p);
    p.temperature = 1;
    open_sampler(8);
    for (int i = 0; i < 8; i++) {
        logits[i] = (float)(4.0 - power[i] * 0.6931471805599453);
        want[i] = pow(2, -power[i]);
    }
    /* 7 degrees of freedom: 24.3 is passed once in a thousand. */
    for (p.seed = 1; p.seed <= 8; p.seed++)
        ck_assert_double_lt(chi_square(&p, 8, want, 20000), 24.3);
    p.top_k = 3;
    want[0] = 1.0 / 7, want[1] = 4.0 / 7, want[3] = 2.0 / 7;
    want[2] = want[4] = want[5] = want[6] = want[7] = 0;
    ck_assert_double_lt(chi_square(&p, 8, want, 20000), 13.8);
    p.top_k = 0;
    p.top_p = 0.7f; /* 1/2 + 1/4 is the first sum past it */
    want[0] = 0, want[1] = 2.0 / 3, want[3] = 1.0 / 3;
    ck_assert_double_lt(chi_square(&p, 8, want, 20000), 10.8);
    p.top_p = 1;
    p.min_p = 0.3f; /* 1/4 is half of the first, 1/8 a quarter */
    ck_assert_double_lt(chi_square(&p, 8, want, 20000), 10.8);
    p.min_p = 0;
    p.temperature = 2; /* square roots */
    sum = 0;
    for (int i = 0; i < 8; i++)
        sum += pow(2, -power[i] / 2.0);
    for (int i = 0; i < 8; i++)
        want[i] = pow(2, -power[i] / 2.0) / sum;
    ck_assert_double_lt(chi_square(&p, 8, want, 20000), 24.3);
    close_sampler();
}
END_TEST

START_TEST(top_p_is_taken_of_what_top_k_kept_and_temperature_comes_last)
{
    struct sampler_params p;

    sampler_defaults(&p);
    open_sampler(4);
    /* 0.4 0.3 0.2 0.1: of the first two, 0.4 is 0.571, so 0.5 keeps one and 0.6 two */
    for (int i = 0; i < 4; i++)
        logits[i] = (float)log(0.4 - 0.1 * i);
    p.temperature = 100; /* flat: all that is kept comes up */
    for (int kept = 1; kept <= 2; kept++) {
        uint32_t seen = 0;
        p.top_k = 2;
        p.top_p = kept == 1 ? 0.5f : 0.6f;
        for (uint64_t position = 0; position < 200; position++)
            seen |= 1u << sampler_draw(sampler, &p, logits, position, NULL);
        ck_assert_uint_eq(seen, kept == 1 ? 1 : 3);
    }
    close_sampler();
}
END_TEST

START_TEST(a_draw_is_a_function_of_seed_branch_and_position_alone)
{
    struct sampler_params p, other;
    uint32_t first[64], n_same = 0;

    sampler_defaults(&p);
    p.temperature = 1;
    p.seed = 99;
    random_state = 8;
    open_sampler(1000);
    fill_logits(1000);
    memset(logits, 0, sizeof logits);
    for (uint32_t i = 0; i < 64; i++)
        first[i] = sampler_draw(sampler, &p, logits, 1000 + i, NULL);
    other = p;
    other.branch = 1;
    for (uint32_t i = 64; i-- > 0;) {
        n_same += first[i] == sampler_draw(sampler, &other, logits, 1000 + i, NULL);
        ck_assert_uint_eq(first[i], sampler_draw(sampler, &p, logits, 1000 + i, NULL));
    }
    ck_assert_uint_lt(n_same, 8);
    /* The same everywhere and for ever: a session may move in the middle. */
    ck_assert_uint_eq(first[0], 731);
    ck_assert_uint_eq(first[1], 390);
    ck_assert_uint_eq(first[63], 874);
    close_sampler();
}
END_TEST

START_TEST(what_is_not_finite_is_never_drawn_and_does_no_harm)
{
    struct sampler_params p;
    float logprob;

    sampler_defaults(&p);
    open_sampler(4);
    memcpy(logits, (float[]){NAN, 1, -INFINITY, 1}, 4 * sizeof(float));
    for (int t = 0; t < 3; t++) {
        p.temperature = (float)t;
        p.top_p = t == 2 ? 0.9f : 1.0f;
        for (uint64_t position = 0; position < 200; position++)
            ck_assert_uint_eq(sampler_draw(sampler, &p, logits, position, &logprob) & 1, 1);
        ck_assert_double_eq_tol((double)logprob, -log(2), 1e-6);
    }
    for (int i = 0; i < 4; i++)
        logits[i] = NAN;
    ck_assert_uint_lt(sampler_draw(sampler, &p, logits, 0, &logprob), 4);
    logits[2] = INFINITY;
    ck_assert_uint_eq(sampler_draw(sampler, &p, logits, 0, &logprob), 2);
    close_sampler();
    ck_assert_int_eq(sampler_open(0, &sampler), MODEL_ERR_INVALID);
}
END_TEST

START_TEST(logits_have_a_digest_that_is_the_same_everywhere)
{
    const float row[4] = {1.0f, -2.5f, 0.0f, 3e38f};
    float other[4];

    memcpy(other, row, sizeof row);
    ck_assert_uint_eq(logits_digest(row, 4), logits_digest(other, 4));
    other[2] = -0.0f;
    ck_assert_uint_ne(logits_digest(row, 4), logits_digest(other, 4));
    ck_assert_uint_ne(logits_digest(row, 4), logits_digest(row, 3));
    ck_assert_uint_eq(logits_digest(row, 4), UINT64_C(0xc65337f23a83d717));
}
END_TEST

static Suite *sampler_suite(void)
{
    Suite *s = suite_create("sampler");
    TCase *tc = tcase_create("sampler");

    tcase_set_timeout(tc, 120);
    tcase_add_test(tc, the_generator_gives_its_authors_known_answers);
    tcase_add_test(tc, exp_and_log_are_within_1e_15_of_the_librarys);
    tcase_add_test(tc, a_field_out_of_range_is_named_with_its_value);
    tcase_add_test(tc, draws_equal_those_of_the_plain_version);
    tcase_add_test(tc, greedy_takes_the_greatest_and_of_equals_the_lower_id);
    tcase_add_test(tc, counts_follow_the_probabilities);
    tcase_add_test(tc, top_p_is_taken_of_what_top_k_kept_and_temperature_comes_last);
    tcase_add_test(tc, a_draw_is_a_function_of_seed_branch_and_position_alone);
    tcase_add_test(tc, what_is_not_finite_is_never_drawn_and_does_no_harm);
    tcase_add_test(tc, logits_have_a_digest_that_is_the_same_everywhere);
    suite_add_tcase(s, tc);
    return s;
}

int main(void)
{
    SRunner *runner = srunner_create(sampler_suite());
    int failed;

    srunner_run_all(runner, CK_NORMAL);
    failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed == 0 ? 0 : 1;
}

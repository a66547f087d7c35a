/* A decode node whose prefill nodes are harmed in every way that a message stream can be, or
 * killed. After each: the answer that the decode node gives alone, or the status that is due; the
 * reason is named; and all pages are back.
 *
 * A prompt of 300 positions takes these messages: 0 accepted, 1 header, 2..4 frames (the borders
 * are at 128 and 256), 5 logits, 6 seal. */
#include "node_fixture.h"
#include "prefill_proxy.h"

#include <check.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct fixture_node prefill, decode;
static struct proxy proxy;
static struct answer *reference;

enum {
    PROMPT = 300,
    N_TOKENS = 4,
    N_MESSAGES = 7,
    SEAL = 6,
    AUTO = BATON__V1__ROUTE__ROUTE_AUTO,
    LOCAL = BATON__V1__ROUTE__ROUTE_LOCAL,
    PREFILL = BATON__V1__ROUTE__ROUTE_PREFILL,
};
static uint32_t ids[PROMPT];
static uint32_t salts; /* each question has a namespace of its own: nothing is reused */

static void start_prefill(struct fixture_node *node, const char *model, const char *precision,
                          const char *kernels, const char *chunk)
{
    const char *args[] = {"--model",
                          fixture_tiny(model),
                          "--kv-bytes",
                          "32M",
                          "--threads",
                          "1",
                          "--kv-precision",
                          precision,
                          "--chunk",
                          chunk,
                          "--kernels",
                          kernels,
                          "--log-level",
                          "error",
                          NULL};

    fixture_start(node, "prefill", args);
}

static void start_decode(struct fixture_node *node, const char *first, const char *second)
{
    const char *args[20] = {"--model",     fixture_tiny("tiny-wide"),
                            "--kv-bytes",  "32M",
                            "--threads",   "1",
                            "--log-level", "error",
                            "--prefill",   first};

    if (second != NULL) {
        args[10] = "--prefill";
        args[11] = second;
    }
    fixture_start(node, "decode", args);
}

static void ask_new(const struct fixture_node *node, int route, struct answer *out)
{
    struct question q;

    question_ids(&q, ids, PROMPT, N_TOKENS, route);
    salts++;
    q.q.salt.data = (uint8_t *)&salts;
    q.q.salt.len = sizeof(salts);
    ask(node, &q.q, out);
}

static void start_all(void)
{
    struct description d;

    start_prefill(&prefill, "tiny-wide", "f16", "auto", "64");
    proxy_open(&proxy, prefill.address);
    start_decode(&decode, proxy.address, NULL);
    ck_assert(wait_serving(&decode, 1));
    describe(&decode, &d);
    fixture_ids(ids, PROMPT, 11, d.n_vocab);
    reference = calloc(1, sizeof(*reference));
    ask_new(&decode, LOCAL, reference);
    ck_assert_msg(reference->status == 0, "%s", reference->details);
}

static void check_answer(const struct answer *a, const char *what)
{
    ck_assert_msg(a->status == 0, "%s: %s: %s", what, transport_status_name(a->status), a->details);
    ck_assert_uint_eq(a->n_ids, N_TOKENS);
    ck_assert_msg(memcmp(a->digests, reference->digests, N_TOKENS * sizeof(uint64_t)) == 0,
                  "%s: other logits", what);
    ck_assert_msg(memcmp(a->ids, reference->ids, N_TOKENS * sizeof(uint32_t)) == 0, "%s", what);
    ck_assert_uint_eq(a->n_started, 1);
    ck_assert_uint_eq(a->usage.reused_tokens + a->usage.received_tokens + a->usage.local_tokens,
                      PROMPT);
}

static void pages_are_back(const char *what)
{
    struct description d;

    ck_assert_msg(wait_idle(&decode, &d), "%s: running %u live %u reserved %u evictable %u of %u",
                  what, d.running, d.live, d.reserved, d.evictable, d.total);
    for (int i = 0; i < 500 && atomic_load(&proxy.n_open) > 0; i++)
        usleep(10000);
    ck_assert_msg(atomic_load(&proxy.n_open) == 0, "%s: a call to the prefill node is open", what);
}

START_TEST(an_unharmed_stream_gives_the_same_answer)
{
    struct answer *a = calloc(1, sizeof(*a));
    int before = atomic_load(&proxy.n_messages);

    proxy.fault = PROXY_NONE;
    ask_new(&decode, PREFILL, a);
    check_answer(a, "unharmed");
    ck_assert_str_eq(a->fallback, "");
    ck_assert_str_eq(a->prefill, proxy.address);
    ck_assert_uint_eq(a->usage.received_tokens, PROMPT);
    ck_assert_uint_eq(a->usage.frames, 3);
    ck_assert_uint_gt(a->usage.bytes, 3 * 100 * 8192);
    ck_assert_uint_gt(a->timings.prefill_ns, 0);
    ck_assert_uint_gt(a->timings.exposed_transfer_ns, 0);
    ck_assert_uint_eq(a->timings.local_prefill_ns, 0);
    ck_assert_int_eq(atomic_load(&proxy.n_messages) - before, N_MESSAGES);
    free(a);
    pages_are_back("unharmed");
}
END_TEST

/* Positions in the frames before message `at`. */
static uint32_t positions_before(int at)
{
    return at <= 2 ? 0 : at == 3 ? 128 : at == 4 ? 256 : PROMPT;
}

START_TEST(a_stream_that_breaks_leaves_its_verified_frames)
{
    struct answer *a = calloc(1, sizeof(*a));
    char what[64];

    proxy.fault = PROXY_BREAK;
    for (int route = AUTO; route <= PREFILL; route += PREFILL) {
        for (proxy.at = 1; proxy.at < N_MESSAGES; proxy.at++) {
            snprintf(what, sizeof(what), "broken at %d, route %d", proxy.at, route);
            ask_new(&decode, route, a);
            check_answer(a, what);
            ck_assert_msg(strstr(a->fallback, "UNAVAILABLE") != NULL, "%s: %s", what, a->fallback);
            ck_assert_uint_eq(a->usage.received_tokens,
                              positions_before(proxy.at) - (proxy.at > 4 ? 1 : 0));
            pages_are_back(what);
            ck_assert(wait_serving(&decode, 1)); /* it counts as failed until it was asked again */
        }
    }
    free(a);
}
END_TEST

/* Whatever is false, nothing of the call may be used: all is computed here. */
START_TEST(a_false_stream_leaves_nothing)
{
    static const enum proxy_fault faults[] = {PROXY_FLIP, PROXY_DROP,  PROXY_TWICE,
                                              PROXY_CUT,  PROXY_EMPTY, PROXY_END};
    struct answer *a = calloc(1, sizeof(*a));
    char what[64];

    for (size_t f = 0; f < sizeof(faults) / sizeof(faults[0]); f++) {
        proxy.fault = faults[f];
        for (proxy.at = 0; proxy.at < N_MESSAGES; proxy.at++) {
            if (proxy.fault == PROXY_FLIP && proxy.at == 0)
                continue; /* a bit of a hint, maybe */
            if (proxy.fault == PROXY_TWICE && proxy.at == SEAL)
                continue; /* behind the seal nothing counts */
            snprintf(what, sizeof(what), "fault %d at %d", (int)faults[f], proxy.at);
            ask_new(&decode, AUTO, a);
            check_answer(a, what);
            ck_assert_msg(strstr(a->fallback, proxy.address) != NULL, "%s: \"%s\"", what,
                          a->fallback);
            ck_assert_msg(a->usage.received_tokens == 0, "%s: %u received", what,
                          a->usage.received_tokens);
            ck_assert_uint_eq(a->usage.local_tokens, PROMPT);
            pages_are_back(what);
        }
    }
    free(a);
}
END_TEST

START_TEST(what_follows_a_seal_does_not_count)
{
    struct answer *a = calloc(1, sizeof(*a));

    proxy.fault = PROXY_TWICE;
    proxy.at = SEAL;
    ask_new(&decode, PREFILL, a);
    check_answer(a, "seal twice");
    ck_assert_uint_eq(a->usage.received_tokens, PROMPT);
    proxy.fault = PROXY_AFTER_END;
    proxy.at = 2;
    ask_new(&decode, PREFILL, a);
    check_answer(a, "frame behind the seal");
    ck_assert_uint_eq(a->usage.received_tokens, PROMPT);
    free(a);
    pages_are_back("behind the seal");
}
END_TEST

START_TEST(a_refusal_is_made_good_here_or_told)
{
    struct answer *a = calloc(1, sizeof(*a));

    proxy.fault = PROXY_REFUSE;
    ask_new(&decode, AUTO, a);
    check_answer(a, "refused");
    ck_assert_ptr_nonnull(strstr(a->fallback, "the proxy is full"));
    ask_new(&decode, PREFILL, a);
    ck_assert_int_eq(a->status, TRANSPORT_UNAVAILABLE);
    ck_assert_ptr_nonnull(strstr(a->details, "the proxy is full"));
    free(a);
    pages_are_back("refused");
}
END_TEST

START_TEST(a_cancel_while_frames_come_gives_pages_back_at_both_ends)
{
    struct asking *a = calloc(1, sizeof(*a));
    struct question q;

    proxy.fault = PROXY_STALL;
    for (proxy.at = 0; proxy.at < N_MESSAGES; proxy.at++) {
        int before = atomic_load(&proxy.n_messages);

        question_ids(&q, ids, PROMPT, N_TOKENS, PREFILL);
        salts++;
        q.q.salt.data = (uint8_t *)&salts;
        q.q.salt.len = sizeof(salts);
        asking_start(a, &decode, &q.q, 60000);
        for (int i = 0; i < 1000 && atomic_load(&proxy.n_messages) <= before + proxy.at; i++)
            usleep(2000);
        asking_cancel(a);
        asking_wait(a);
        ck_assert_int_eq(a->answer.status, TRANSPORT_CANCELLED);
        pages_are_back("cancelled");
    }
    free(a);
}
END_TEST

START_TEST(a_deadline_while_nothing_comes_ends_the_request)
{
    struct asking *a = calloc(1, sizeof(*a));
    struct question q;

    proxy.fault = PROXY_STALL;
    proxy.at = 3;
    question_ids(&q, ids, PROMPT, N_TOKENS, PREFILL);
    salts++;
    q.q.salt.data = (uint8_t *)&salts;
    q.q.salt.len = sizeof(salts);
    asking_start(a, &decode, &q.q, 300);
    asking_wait(a);
    ck_assert_int_eq(a->answer.status, TRANSPORT_DEADLINE_EXCEEDED);
    free(a);
    pages_are_back("deadline");
}
END_TEST

/* ---- Other pairs of nodes ---- */

START_TEST(a_wrong_model_or_precision_is_named_with_both_values)
{
    struct fixture_node wrong, asker;
    struct answer *a = calloc(1, sizeof(*a));
    const char *fingerprint;

    start_prefill(&wrong, "tiny-q8_0", "f16", "auto", "64");
    start_decode(&asker, wrong.address, NULL);
    ck_assert(wait_serving(&asker, 1));
    ask_new(&asker, PREFILL, a);
    ck_assert_int_eq(a->status, TRANSPORT_UNAVAILABLE);
    fingerprint = strstr(a->details, "hello.fingerprint: decode has ");
    ck_assert_msg(fingerprint != NULL, "%s", a->details);
    ck_assert_ptr_nonnull(strstr(fingerprint, ", this prefill node has "));
    ck_assert_uint_ge(strlen(fingerprint),
                      2 * 64 + strlen("hello.fingerprint: decode has , this prefill node has "));
    ask_new(&asker, AUTO, a);
    check_answer(a, "wrong model");
    ck_assert_ptr_nonnull(strstr(a->fallback, "hello.fingerprint"));
    ck_assert_int_eq(fixture_stop(&asker), 0);
    ck_assert_int_eq(fixture_stop(&wrong), 0);

    start_prefill(&wrong, "tiny-wide", "f32", "auto", "64");
    start_decode(&asker, wrong.address, NULL);
    ck_assert(wait_serving(&asker, 1));
    ask_new(&asker, AUTO, a);
    check_answer(a, "wrong precision");
    ck_assert_msg(strstr(a->fallback,
                         "hello.geometry.precision: decode has f16, this prefill node has f32") !=
                      NULL,
                  "%s", a->fallback);
    ck_assert_int_eq(fixture_stop(&asker), 0);
    ck_assert_int_eq(fixture_stop(&wrong), 0);
    free(a);
}
END_TEST

START_TEST(a_decode_node_in_a_prefill_nodes_place_is_named)
{
    struct fixture_node asker;
    struct answer *a = calloc(1, sizeof(*a));

    start_decode(&asker, decode.address, NULL);
    ask_new(&asker, PREFILL, a);
    ck_assert_int_eq(a->status, TRANSPORT_UNAVAILABLE);
    ck_assert_ptr_nonnull(strstr(a->details, decode.address));
    ck_assert_msg(strstr(a->details, "no prefill node is there (unknown method)") != NULL, "%s",
                  a->details);
    ck_assert_int_eq(fixture_stop(&asker), 0);
    free(a);
}
END_TEST

START_TEST(where_the_first_node_refuses_the_next_one_is_asked)
{
    struct fixture_node asker;
    struct answer *a = calloc(1, sizeof(*a));
    int before = atomic_load(&proxy.n_calls);

    proxy.fault = PROXY_REFUSE;
    start_decode(&asker, proxy.address, prefill.address);
    ck_assert(wait_serving(&asker, 2));
    ask_new(&asker, AUTO, a);
    check_answer(a, "second node");
    ck_assert_str_eq(a->fallback, "");
    ck_assert_uint_eq(a->usage.received_tokens, PROMPT);
    ck_assert_int_eq(atomic_load(&proxy.n_calls), before + 1);
    ck_assert_int_eq(fixture_stop(&asker), 0);
    free(a);
}
END_TEST

START_TEST(a_short_rest_stays_here_and_says_so)
{
    struct answer *a = calloc(1, sizeof(*a));
    struct question q;
    int before = atomic_load(&proxy.n_calls);

    proxy.fault = PROXY_NONE;
    question_ids(&q, ids, 15, N_TOKENS, AUTO);
    ask(&decode, &q.q, a);
    ck_assert_msg(a->status == 0, "%s", a->details);
    ck_assert_str_eq(a->prefill, "local");
    ck_assert_ptr_nonnull(strstr(a->fallback, "15 positions is under --remote-min 16"));
    question_ids(&q, ids, 15, N_TOKENS, PREFILL); /* by name all the same */
    q.q.salt.data = (uint8_t *)&salts;
    q.q.salt.len = sizeof(salts);
    ask(&decode, &q.q, a);
    ck_assert_msg(a->status == 0, "%s", a->details);
    ck_assert_str_eq(a->fallback, "");
    ck_assert_uint_eq(a->usage.received_tokens, 15);
    ck_assert_int_eq(atomic_load(&proxy.n_calls), before + 1);
    free(a);
    pages_are_back("short");
}
END_TEST

/* What was generated is here and not there: the second turn of a session has a short rest here and
 * a long one at the prefill node, which is asked, says so, and is not waited for. */
START_TEST(a_second_turn_behind_a_long_answer_is_computed_here)
{
    enum { ANSWER = 200, FIRST = 20, SECOND = 17 };
    uint32_t all[FIRST + ANSWER + SECOND], name_salt = UINT32_MAX, other_salt = UINT32_MAX - 1;
    struct answer *a = calloc(1, sizeof(*a)), *b = calloc(1, sizeof(*b));
    char session[] = "turns";
    struct question q;

    proxy.fault = PROXY_NONE;
    question_ids(&q, ids, FIRST, ANSWER, AUTO);
    q.q.session = session;
    q.q.salt.data = (uint8_t *)&name_salt;
    q.q.salt.len = sizeof(name_salt);
    ask(&decode, &q.q, a);
    ck_assert_msg(a->status == 0, "%s", a->details);
    ck_assert_str_eq(a->fallback, "");
    ck_assert_uint_eq(a->usage.received_tokens, FIRST);
    ck_assert_uint_eq(a->n_ids, ANSWER);
    memcpy(all, ids, FIRST * sizeof(*all));
    memcpy(all + FIRST, a->ids, ANSWER * sizeof(*all));
    memcpy(all + FIRST + ANSWER, ids + 100, SECOND * sizeof(*all));

    question_ids(&q, ids + 100, SECOND, N_TOKENS, AUTO);
    q.q.session = session;
    q.q.salt.data = (uint8_t *)&name_salt;
    q.q.salt.len = sizeof(name_salt);
    ask(&decode, &q.q, a);
    ck_assert_msg(a->status == 0, "%s", a->details);
    ck_assert_msg(strstr(a->fallback, "18 positions here are cheaper than ") != NULL, "\"%s\"",
                  a->fallback);
    ck_assert_ptr_nonnull(strstr(a->fallback, proxy.address));
    ck_assert_uint_eq(a->usage.reused_tokens, FIRST + ANSWER - 1);
    ck_assert_uint_eq(a->usage.local_tokens, SECOND + 1);
    ck_assert_uint_eq(a->usage.received_tokens, 0);
    ck_assert_uint_eq(a->usage.frames, 0);

    question_ids(&q, all, FIRST + ANSWER + SECOND, N_TOKENS, PREFILL);
    q.q.salt.data = (uint8_t *)&other_salt;
    q.q.salt.len = sizeof(other_salt);
    ask(&decode, &q.q, b);
    ck_assert_msg(b->status == 0, "%s", b->details);
    ck_assert_uint_eq(b->usage.received_tokens, FIRST + ANSWER + SECOND);
    ck_assert_uint_eq(a->n_digests, N_TOKENS);
    ck_assert_mem_eq(a->ids, b->ids, N_TOKENS * sizeof(uint32_t));
    ck_assert_mem_eq(a->digests, b->digests, N_TOKENS * sizeof(uint64_t));
    free(b);
    free(a);
    pages_are_back("second turn");
}
END_TEST

/* With one slow node in the middle of a prompt. */
START_TEST(a_killed_prefill_node_is_noticed_at_once)
{
    struct fixture_node slow, asker;
    struct asking *a = calloc(1, sizeof(*a));
    struct description d;
    struct question q;
    int64_t killed, alone = node_now_ns();

    ask_new(&decode, LOCAL, &a->answer);
    alone = node_now_ns() - alone;
    start_prefill(&slow, "tiny-wide", "f16", "plain", "8");
    start_decode(&asker, slow.address, NULL);
    ck_assert(wait_serving(&asker, 1));
    question_ids(&q, ids, PROMPT, N_TOKENS, AUTO);
    asking_start(a, &asker, &q.q, 60000);
    usleep(300000);
    kill(slow.pid, SIGKILL);
    killed = node_now_ns();
    asking_wait(a);
    check_answer(&a->answer, "killed");
    ck_assert_msg(a->answer.fallback[0] != '\0', "the plain kernels were done before the kill");
    /* A second to notice and begin; then it takes what a prompt takes here. */
    ck_assert_int_lt(node_now_ns() - killed, INT64_C(1000000000) + 4 * alone);
    fixture_kill(&slow);
    ck_assert(wait_serving(&asker, 0));
    ask_new(&asker, AUTO, &a->answer);
    check_answer(&a->answer, "after the kill");
    ck_assert_str_eq(a->answer.prefill, "local");
    ck_assert_str_eq(a->answer.fallback, "no prefill node serves");
    ask_new(&asker, PREFILL, &a->answer);
    ck_assert_int_eq(a->answer.status, TRANSPORT_UNAVAILABLE);
    ck_assert_ptr_nonnull(strstr(a->answer.details, slow.address));
    ck_assert(wait_idle(&asker, &d));
    ck_assert_int_eq(fixture_stop(&asker), 0);
    free(a);
}
END_TEST

/* Last: it takes the nodes down, prefill first, in the middle of a call. */
START_TEST(a_drained_prefill_node_finishes_its_calls)
{
    struct answer *a = calloc(1, sizeof(*a));

    proxy.fault = PROXY_NONE;
    ask_new(&decode, PREFILL, a);
    check_answer(a, "before the drain");
    ck_assert_int_eq(fixture_stop(&prefill), 0);
    ask_new(&decode, AUTO, a);
    check_answer(a, "after the drain");
    ck_assert_str_ne(a->fallback, "");
    pages_are_back("drained");
    ck_assert_int_eq(fixture_stop(&decode), 0);
    proxy_close(&proxy);
    free(a);
    free(reference);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("decode faults");
    TCase *c = tcase_create("faults");
    SRunner *r;
    int failed;

    transport_start();
    tcase_set_timeout(c, 120);
    tcase_add_unchecked_fixture(c, start_all, NULL);
    tcase_add_test(c, an_unharmed_stream_gives_the_same_answer);
    tcase_add_test(c, a_stream_that_breaks_leaves_its_verified_frames);
    tcase_add_test(c, a_false_stream_leaves_nothing);
    tcase_add_test(c, what_follows_a_seal_does_not_count);
    tcase_add_test(c, a_refusal_is_made_good_here_or_told);
    tcase_add_test(c, a_cancel_while_frames_come_gives_pages_back_at_both_ends);
    tcase_add_test(c, a_deadline_while_nothing_comes_ends_the_request);
    tcase_add_test(c, a_wrong_model_or_precision_is_named_with_both_values);
    tcase_add_test(c, a_decode_node_in_a_prefill_nodes_place_is_named);
    tcase_add_test(c, where_the_first_node_refuses_the_next_one_is_asked);
    tcase_add_test(c, a_short_rest_stays_here_and_says_so);
    tcase_add_test(c, a_second_turn_behind_a_long_answer_is_computed_here);
    tcase_add_test(c, a_killed_prefill_node_is_noticed_at_once);
    tcase_add_test(c, a_drained_prefill_node_finishes_its_calls);
    suite_add_tcase(s, c);
    r = srunner_create(s);
    srunner_set_fork_status(r, CK_NOFORK);
    srunner_run_all(r, CK_NORMAL);
    failed = srunner_ntests_failed(r);
    srunner_free(r);
    transport_stop();
    return failed != 0;
}

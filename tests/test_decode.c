/* The decode node alone: what it refuses and how it says so, sessions, stops, text, limits,
 * cancellation.  One node on a tiny model serves all tests; each ends with every page back. */
#include "node_fixture.h"

#include <check.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct fixture_node node;
static struct description about;

enum { LOCAL = BATON__V1__ROUTE__ROUTE_LOCAL, PROMPT = 40 };
static uint32_t prompt_ids[2048];

static void start_node(void)
{
    const char *args[] = {"--model",
                          fixture_tiny("tiny-q8_0"),
                          "--kv-bytes",
                          "4M",
                          "--page",
                          "16",
                          "--threads",
                          "1",
                          "--max-sessions",
                          "3",
                          "--max-tokens",
                          "8",
                          "--log-level",
                          "error",
                          NULL};

    fixture_start(&node, "decode", args);
    describe(&node, &about);
    fixture_ids(prompt_ids, 2048, 3, about.n_vocab);
}

static void pages_are_back(void)
{
    struct description d;

    ck_assert_msg(wait_idle(&node, &d),
                  "running %u queued %u free %u live %u reserved %u evictable %u of %u", d.running,
                  d.queued, d.free, d.live, d.reserved, d.evictable, d.total);
}

static char *borrowed(const char *s)
{
    char *p;

    memcpy(&p, &s, sizeof(p));
    return p;
}

/* ---- Refusals ---- */

static void refused(struct question *q, int status, const char *says)
{
    struct answer *a = calloc(1, sizeof(*a));

    ck_assert_ptr_nonnull(a);
    ask(&node, &q->q, a);
    ck_assert_msg(a->status == status, "%s: %s, not %s for %s", transport_status_name(a->status),
                  a->details, transport_status_name(status), says);
    ck_assert_msg(strstr(a->details, says) != NULL, "\"%s\" does not say \"%s\"", a->details, says);
    ck_assert(!a->started);
    free(a);
}

static void invalid(struct question *q, const char *says)
{
    refused(q, TRANSPORT_INVALID_ARGUMENT, says);
}

START_TEST(a_prompt_must_be_there)
{
    struct question q;

    question_text(&q, "x", 4, LOCAL);
    q.q.prompt_case = BATON__V1__GENERATE_REQUEST__PROMPT__NOT_SET;
    invalid(&q, "prompt");
    question_text(&q, "", 4, LOCAL);
    invalid(&q, "text: empty");
    question_ids(&q, prompt_ids, 0, 4, LOCAL);
    invalid(&q, "tokens.ids: empty");
    question_chat(&q, "hi", 4, LOCAL);
    q.chat.n_messages = 0;
    invalid(&q, "chat.messages: empty");
}
END_TEST

START_TEST(text_that_no_context_holds_is_refused_by_its_length)
{
    const size_t n = 3 << 20;
    char *text = malloc(n + 1);
    struct question q;

    ck_assert_ptr_nonnull(text);
    memset(text, 'a', n);
    text[n] = '\0';
    question_text(&q, text, 4, LOCAL);
    invalid(&q, "text: 3145728 bytes leave no room in the context");
    question_chat(&q, text, 4, LOCAL);
    invalid(&q, "chat: 3145728 bytes leave no room in the context");
    free(text);
}
END_TEST

START_TEST(a_prompt_must_fit_the_context_with_room_for_a_token)
{
    struct question q;
    struct answer *a = calloc(1, sizeof(*a));

    question_ids(&q, prompt_ids, about.n_ctx, 4, LOCAL);
    invalid(&q, "leave no room in the context");
    question_ids(&q, prompt_ids, about.n_ctx + 300, 4, LOCAL);
    invalid(&q, "leave no room in the context");
    question_ids(&q, prompt_ids, about.n_ctx - 1, 4, LOCAL);
    ask(&node, &q.q, a);
    ck_assert_msg(a->status == 0, "%s", a->details);
    ck_assert_uint_eq(a->n_ids, 1);
    ck_assert_int_eq(a->reason, BATON__V1__FINISH_REASON__FINISH_LENGTH);
    free(a);
    pages_are_back();
}
END_TEST

START_TEST(a_wrong_number_is_named_with_its_value)
{
    struct question q;

    question_text(&q, "the", 0, LOCAL);
    invalid(&q, "max_tokens: 0");
    question_text(&q, "the", 4, LOCAL);
    q.sampling.temperature = -1;
    invalid(&q, "temperature");
    q.sampling.temperature = NAN;
    invalid(&q, "temperature");
    q.sampling.temperature = INFINITY;
    invalid(&q, "temperature");
    q.sampling.temperature = 101;
    invalid(&q, "101");
    q.sampling.temperature = 1;
    q.sampling.optional_top_p_case = BATON__V1__SAMPLING__OPTIONAL_TOP_P_TOP_P;
    q.sampling.top_p = 0;
    invalid(&q, "top_p");
    q.sampling.top_p = 1.5f;
    invalid(&q, "top_p");
    q.sampling.top_p = 1;
    q.sampling.min_p = -0.5f;
    invalid(&q, "min_p");
    q.sampling.min_p = NAN;
    invalid(&q, "min_p");
    question_text(&q, "the", 4, 7);
    invalid(&q, "route: 7");
}
END_TEST

START_TEST(an_id_outside_the_vocabulary_is_named)
{
    struct question q;
    uint32_t ids[3] = {1, about.n_vocab, 2}, stop = about.n_vocab + 5;
    char says[64];

    question_ids(&q, ids, 3, 4, LOCAL);
    snprintf(says, sizeof(says), "tokens.ids[1]: %u", about.n_vocab);
    invalid(&q, says);
    ids[1] = UINT32_MAX;
    invalid(&q, "tokens.ids[1]: 4294967295");
    question_text(&q, "the", 4, LOCAL);
    q.q.n_stop_ids = 1;
    q.q.stop_ids = &stop;
    snprintf(says, sizeof(says), "stop_ids[0]: %u", stop);
    invalid(&q, says);
}
END_TEST

START_TEST(too_many_or_too_long_stops_are_refused)
{
    struct question q;
    char *stops[17], long_stop[1026], empty[] = "";
    uint32_t ids[65] = {0};

    memset(long_stop, 'a', sizeof(long_stop) - 1);
    long_stop[sizeof(long_stop) - 1] = '\0';
    for (int i = 0; i < 17; i++)
        stops[i] = borrowed("x");
    question_text(&q, "the", 4, LOCAL);
    q.q.stop = stops;
    q.q.n_stop = 17;
    invalid(&q, "stop: 17");
    q.q.n_stop = 1;
    stops[0] = long_stop;
    invalid(&q, "stop[0]: 1025 bytes");
    stops[0] = empty;
    invalid(&q, "stop[0]: 0 bytes");
    stops[0] = borrowed("a\xff");
    invalid(&q, "stop");
    q.q.n_stop = 0;
    q.q.stop_ids = ids;
    q.q.n_stop_ids = 65;
    invalid(&q, "stop_ids: 65");
}
END_TEST

START_TEST(invalid_utf8_is_refused_with_its_offset)
{
    struct question q;

    question_text(&q, "abc\xff", 4, LOCAL);
    invalid(&q, "text");
    invalid(&q, "3");
    question_text(&q, "ab\xc3", 4, LOCAL);
    invalid(&q, "2");
    question_text(&q, "\xed\xa0\x80", 4, LOCAL); /* half of a surrogate pair */
    invalid(&q, "0");
    question_chat(&q, "abcd\x80", 4, LOCAL);
    invalid(&q, "4");
}
END_TEST

START_TEST(an_unknown_role_and_a_long_salt_are_refused)
{
    struct question q;
    uint8_t salt[65] = {0};

    question_chat(&q, "hi", 4, LOCAL);
    q.message.role = borrowed("wizard");
    invalid(&q, "wizard");
    question_text(&q, "the", 4, LOCAL);
    q.q.salt.data = salt;
    q.q.salt.len = sizeof(salt);
    invalid(&q, "salt: 65");
}
END_TEST

START_TEST(a_bad_session_name_is_refused)
{
    struct question q;
    char name[130];

    memset(name, 'n', 129);
    name[129] = '\0';
    question_text(&q, "the", 4, LOCAL);
    q.q.session = name;
    invalid(&q, "session: a name of 129 bytes");
    q.q.session = borrowed("a b");
    invalid(&q, "session");
    q.q.session = borrowed("a/../b");
    invalid(&q, "session");
    q.q.session = borrowed("caf\xc3\xa9");
    invalid(&q, "session");
}
END_TEST

START_TEST(a_prefill_route_without_prefill_nodes_is_unavailable)
{
    struct question q;

    question_text(&q, "the", 4, BATON__V1__ROUTE__ROUTE_PREFILL);
    refused(&q, TRANSPORT_UNAVAILABLE, "route");
}
END_TEST

static int call_bytes(const char *path, const void *bytes, size_t n, char *details)
{
    struct transport_message *m = NULL;
    uint8_t *p;
    struct transport_out *out = transport_out_new(n, &p);
    int rc;

    memcpy(p, bytes, n);
    rc = transport_unary(node.channel, path, out, 10000, true, &m, details);
    transport_message_unref(m);
    return rc;
}

START_TEST(bytes_that_are_no_message_are_refused)
{
    char details[TRANSPORT_DETAIL_BYTES];
    uint8_t many[8192];

    ck_assert_int_eq(
        call_bytes("/baton.v1.Decode/Generate", "\x12\xff\xff\xff\xff\x7fxx", 8, details),
        TRANSPORT_INVALID_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(details, "GenerateRequest"));
    ck_assert_int_eq(call_bytes("/baton.v1.Decode/CloseSession", "\x0a\x7f", 2, details),
                     TRANSPORT_INVALID_ARGUMENT);
    /* A chat of thousands of empty messages: small on the wire, refused for what it is. */
    for (size_t i = 0; i < sizeof(many); i += 2)
        memcpy(many + i, "\x0a\x00", 2);
    ck_assert_int_eq(call_bytes("/baton.v1.Decode/Generate", many, sizeof(many), details),
                     TRANSPORT_INVALID_ARGUMENT);
    pages_are_back();
}
END_TEST

/* ---- Answers ---- */

START_TEST(the_same_request_gives_the_same_answer_warm_and_beside_others)
{
    enum { N = 12 };
    struct asking *a = calloc(N, sizeof(*a));
    struct question q;
    struct answer *alone = calloc(1, sizeof(*alone));

    for (uint32_t i = 0; i < N; i++) {
        question_ids(&q, prompt_ids + i % 4, PROMPT + i % 4, 24, LOCAL);
        q.sampling.temperature = i % 2 == 0 ? 0 : 1.5f;
        q.sampling.seed = i % 4;
        asking_start(&a[i], &node, &q.q, 60000);
    }
    for (uint32_t i = 0; i < N; i++) {
        asking_wait(&a[i]);
        ck_assert_msg(a[i].answer.status == 0, "%s", a[i].answer.details);
    }
    for (uint32_t i = 0; i < N; i++) {
        question_ids(&q, prompt_ids + i % 4, PROMPT + i % 4, 24, LOCAL);
        q.sampling.temperature = i % 2 == 0 ? 0 : 1.5f;
        q.sampling.seed = i % 4;
        ask(&node, &q.q, alone);
        ck_assert_uint_ge(alone->usage.reused_tokens, PROMPT - 1);
        ck_assert_uint_eq(alone->n_ids, 24);
        ck_assert_mem_eq(alone->ids, a[i].answer.ids, 24 * sizeof(uint32_t));
        ck_assert_mem_eq(alone->digests, a[i].answer.digests, 24 * sizeof(uint64_t));
    }
    free(alone);
    free(a);
    pages_are_back();
}
END_TEST

/* Prompts that push each other out of the pages, some cancelled, while the node is audited. */
START_TEST(the_node_can_be_audited_while_it_works)
{
    enum { N = 10, ROUNDS = 4 };
    struct asking *a = calloc(N, sizeof(*a));
    struct auditing auditing;
    struct question q;
    struct audit idle;

    auditing_start(&auditing, &node);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        for (uint32_t i = 0; i < N; i++) {
            question_ids(&q, prompt_ids + 100 * round + 10 * i, 200 + i, 12, LOCAL);
            asking_start(&a[i], &node, &q.q, 60000);
        }
        asking_wait_ids(&a[round], 1);
        asking_cancel(&a[round]);
        for (uint32_t i = 0; i < N; i++) {
            asking_wait(&a[i]);
            ck_assert_msg(a[i].answer.status == 0 || i == round, "%s", a[i].answer.details);
        }
    }
    ck_assert_uint_ge(auditing_stop(&auditing), ROUNDS);
    pages_are_back();
    audit(&node, &idle);
    ck_assert_uint_eq(idle.contexts, 0);
    ck_assert_uint_gt(idle.entries, 0);
    free(a);
}
END_TEST

START_TEST(an_answer_ends_at_max_tokens_or_where_the_context_is_full)
{
    struct question q;
    struct answer *a = calloc(1, sizeof(*a));

    question_ids(&q, prompt_ids, PROMPT, 5, LOCAL);
    ask(&node, &q.q, a);
    ck_assert_uint_eq(a->n_ids, 5);
    ck_assert_int_eq(a->reason, BATON__V1__FINISH_REASON__FINISH_LENGTH);
    ck_assert_uint_eq(a->usage.generated_tokens, 5);
    ck_assert_uint_eq(a->usage.prompt_tokens, PROMPT);

    q.q.optional_max_tokens_case = BATON__V1__GENERATE_REQUEST__OPTIONAL_MAX_TOKENS__NOT_SET;
    ask(&node, &q.q, a);
    ck_assert_uint_eq(a->n_ids, 8); /* the node's default */

    question_ids(&q, prompt_ids, about.n_ctx - 30, UINT32_MAX, LOCAL);
    ask(&node, &q.q, a);
    ck_assert_msg(a->status == 0, "%s", a->details);
    ck_assert_uint_eq(a->n_ids, 30);
    ck_assert_int_eq(a->reason, BATON__V1__FINISH_REASON__FINISH_LENGTH);
    free(a);
    pages_are_back();
}
END_TEST

START_TEST(a_stop_id_ends_the_answer)
{
    struct question q;
    struct answer *whole = calloc(1, sizeof(*whole)), *a = calloc(1, sizeof(*a));
    uint32_t stop;
    size_t at;

    question_ids(&q, prompt_ids, PROMPT, 20, LOCAL);
    ask(&node, &q.q, whole);
    stop = whole->ids[7];
    for (at = 0; whole->ids[at] != stop; at++)
        ;
    q.q.stop_ids = &stop;
    q.q.n_stop_ids = 1;
    ask(&node, &q.q, a);
    ck_assert_uint_eq(a->n_ids, at + 1);
    ck_assert_mem_eq(a->ids, whole->ids, (at + 1) * sizeof(uint32_t));
    ck_assert_int_eq(a->reason, BATON__V1__FINISH_REASON__FINISH_STOP);
    free(a);
    free(whole);
    pages_are_back();
}
END_TEST

/* Stop strings are cut out of an answer that is known, at every place and length where that gives a
 * string that occurs once: so they lie inside tokens and across them. */
START_TEST(a_stop_string_ends_the_answer_wherever_tokens_part)
{
    struct question q;
    struct answer *whole = calloc(1, sizeof(*whole)), *a = calloc(1, sizeof(*a));
    char stop[16], *stops[1] = {stop};
    int n_tried = 0;

    question_text(&q, "the quick brown fox", 24, LOCAL);
    ask(&node, &q.q, whole);
    ck_assert_msg(whole->status == 0, "%s", whole->details);
    q.q.stop = stops;
    q.q.n_stop = 1;
    for (size_t at = 1; at + 9 < whole->n_text && n_tried < 12; at += 3) {
        size_t len = 2 + at % 8;

        memcpy(stop, whole->text + at, len);
        stop[len] = '\0';
        if ((stop[0] & 0xc0) == 0x80 || (whole->text[at + len] & 0xc0) == 0x80)
            continue; /* inside a character */
        n_tried++;
        at = (size_t)(strstr(whole->text, stop) - whole->text);
        ask(&node, &q.q, a);
        ck_assert_msg(a->status == 0, "%s", a->details);
        ck_assert_int_eq(a->reason, BATON__V1__FINISH_REASON__FINISH_STOP);
        ck_assert_str_eq(a->stopped_by, stop);
        ck_assert_msg(a->n_text == at && memcmp(a->text, whole->text, at) == 0,
                      "stop \"%s\": \"%s\" is not \"%s\" up to %zu", stop, a->text, whole->text,
                      at);
        ck_assert_mem_eq(a->ids, whole->ids, a->n_ids * sizeof(uint32_t));
    }
    ck_assert_int_gt(n_tried, 3);
    free(a);
    free(whole);
    pages_are_back();
}
END_TEST

START_TEST(streamed_text_is_valid_utf8_whatever_is_sampled)
{
    struct question q;
    struct answer *a = calloc(1, sizeof(*a));

    for (uint64_t seed = 0; seed < 8; seed++) {
        question_text(&q, "caf\xc3\xa9 \xe2\x82\xac", 64, LOCAL);
        q.sampling.temperature = 3;
        q.sampling.seed = seed;
        ask(&node, &q.q, a);
        ck_assert_msg(a->status == 0, "%s", a->details);
        ck_assert(a->utf8);
        ck_assert_uint_eq(a->n_ids, 64);
        ck_assert_uint_eq(a->n_started, 1);
        ck_assert_uint_eq(a->n_finished, 1);
    }
    free(a);
    pages_are_back();
}
END_TEST

START_TEST(salts_share_no_pages)
{
    struct question q;
    struct answer *a = calloc(1, sizeof(*a));
    uint8_t salt = 's';

    fixture_ids(prompt_ids + 1500, PROMPT, 77, about.n_vocab);
    question_ids(&q, prompt_ids + 1500, PROMPT, 4, LOCAL);
    ask(&node, &q.q, a);
    ck_assert_uint_eq(a->usage.reused_tokens, 0);
    ask(&node, &q.q, a);
    ck_assert_uint_ge(a->usage.reused_tokens, PROMPT - 1);
    q.q.salt.data = &salt;
    q.q.salt.len = 1;
    ask(&node, &q.q, a);
    ck_assert_uint_eq(a->usage.reused_tokens, 0);
    free(a);
}
END_TEST

/* ---- Sessions ---- */

static int close_session(const char *name, char *details)
{
    Baton__V1__CloseSessionRequest q = BATON__V1__CLOSE_SESSION_REQUEST__INIT;
    struct transport_message *m = NULL;
    int rc;

    q.name = borrowed(name);
    rc = transport_unary(node.channel, "/baton.v1.Decode/CloseSession", node_message_pack(&q.base),
                         10000, true, &m, details);
    transport_message_unref(m);
    return rc;
}

static Baton__V1__ListSessionsReply *list_sessions(void)
{
    Baton__V1__ListSessionsRequest q = BATON__V1__LIST_SESSIONS_REQUEST__INIT;
    Baton__V1__ListSessionsReply *reply;
    struct transport_message *m = NULL;

    ck_assert_int_eq(transport_unary(node.channel, "/baton.v1.Decode/ListSessions",
                                     node_message_pack(&q.base), 10000, true, &m, NULL),
                     0);
    reply = baton__v1__list_sessions_reply__unpack(NULL, transport_message_bytes(m),
                                                   transport_message_flat(m));
    transport_message_unref(m);
    ck_assert_ptr_nonnull(reply);
    return reply;
}

/* The second turn's prompt is the first's prompt and answer and what is new, by id: the same ids
 * asked without a session, in another namespace, give the same logits. */
START_TEST(a_session_goes_on_by_its_ids)
{
    struct question q;
    struct answer *a = calloc(1, sizeof(*a)), *b = calloc(1, sizeof(*b)),
                  *c = calloc(1, sizeof(*c));
    Baton__V1__ListSessionsReply *list;
    uint32_t all[256];
    char details[TRANSPORT_DETAIL_BYTES];
    uint8_t salt = 'x';
    size_t n = 0;

    question_ids(&q, prompt_ids + 600, PROMPT, 10, LOCAL);
    q.q.session = borrowed("talk");
    ask(&node, &q.q, a);
    ck_assert_msg(a->status == 0, "%s", a->details);
    list = list_sessions();
    ck_assert_uint_eq(list->n_sessions, 1);
    ck_assert_str_eq(list->sessions[0]->name, "talk");
    ck_assert_uint_eq(list->sessions[0]->tokens, PROMPT + 10);
    ck_assert(!list->sessions[0]->busy);
    baton__v1__list_sessions_reply__free_unpacked(list, NULL);

    question_ids(&q, prompt_ids + 700, 7, 10, LOCAL);
    q.q.session = borrowed("talk");
    ask(&node, &q.q, b);
    ck_assert_msg(b->status == 0, "%s", b->details);
    ck_assert_uint_eq(b->usage.prompt_tokens, PROMPT + 10 + 7);
    ck_assert_uint_eq(b->usage.reused_tokens, PROMPT + 9); /* all but the pending token */

    memcpy(all, prompt_ids + 600, PROMPT * sizeof(*all));
    n = PROMPT;
    memcpy(all + n, a->ids, 10 * sizeof(*all));
    n += 10;
    memcpy(all + n, prompt_ids + 700, 7 * sizeof(*all));
    n += 7;
    question_ids(&q, all, n, 10, LOCAL);
    q.q.salt.data = &salt;
    q.q.salt.len = 1;
    ask(&node, &q.q, c);
    ck_assert_uint_eq(c->usage.reused_tokens, 0);
    ck_assert_mem_eq(b->ids, c->ids, 10 * sizeof(uint32_t));
    ck_assert_mem_eq(b->digests, c->digests, 10 * sizeof(uint64_t));

    ck_assert_int_eq(close_session("talk", details), TRANSPORT_OK);
    ck_assert_int_eq(close_session("talk", details), TRANSPORT_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(details, "talk"));
    ck_assert_int_eq(close_session("a b", details), TRANSPORT_INVALID_ARGUMENT);
    free(c);
    free(b);
    free(a);
    pages_are_back();
}
END_TEST

START_TEST(a_chat_goes_on_where_the_template_left_it)
{
    struct question q;
    struct answer *a = calloc(1, sizeof(*a));
    char details[TRANSPORT_DETAIL_BYTES];
    uint32_t first;

    question_chat(&q, "hello", 6, LOCAL);
    q.q.session = borrowed("chat");
    ask(&node, &q.q, a);
    ck_assert_msg(a->status == 0, "%s", a->details);
    first = a->usage.prompt_tokens;
    question_chat(&q, "and then?", 6, LOCAL);
    q.q.session = borrowed("chat");
    ask(&node, &q.q, a);
    ck_assert_msg(a->status == 0, "%s", a->details);
    ck_assert_uint_gt(a->usage.prompt_tokens, first + 6);
    ck_assert_uint_eq(a->usage.reused_tokens, first + 5);
    ck_assert_int_eq(close_session("chat", details), TRANSPORT_OK);
    free(a);
    pages_are_back();
}
END_TEST

/* A stop string may begin inside a token, which then is seen and kept: so several are tried, and
 * one of them at least has to cut a token off. */
START_TEST(a_stop_string_cuts_the_session_to_what_was_seen)
{
    struct question q;
    struct answer *whole = calloc(1, sizeof(*whole)), *a = calloc(1, sizeof(*a));
    char details[TRANSPORT_DETAIL_BYTES], stop[3] = "", *stops[1] = {stop};
    int n_cut = 0;

    question_text(&q, "the lazy dog", 24, LOCAL);
    ask(&node, &q.q, whole);
    for (size_t at = 0; at + 2 < whole->n_text; at++) {
        Baton__V1__ListSessionsReply *list;
        uint32_t n_kept;

        memcpy(stop, whole->text + at, 2);
        if ((stop[0] & 0x80) != 0 || (stop[1] & 0x80) != 0)
            continue;
        q.q.stop = stops;
        q.q.n_stop = 1;
        q.q.session = borrowed("cut");
        ask(&node, &q.q, a);
        ck_assert_int_eq(a->reason, BATON__V1__FINISH_REASON__FINISH_STOP);
        list = list_sessions();
        ck_assert_uint_eq(list->n_sessions, 1);
        n_kept = list->sessions[0]->tokens;
        baton__v1__list_sessions_reply__free_unpacked(list, NULL);
        ck_assert_uint_le(n_kept, a->usage.prompt_tokens + a->n_ids);
        n_cut += n_kept < a->usage.prompt_tokens + a->n_ids;

        question_ids(&q, prompt_ids, 5, 1, LOCAL);
        q.q.session = borrowed("cut");
        ask(&node, &q.q, a);
        ck_assert_uint_eq(a->usage.prompt_tokens, n_kept + 5);
        ck_assert_int_eq(close_session("cut", details), TRANSPORT_OK);
        question_text(&q, "the lazy dog", 24, LOCAL);
    }
    ck_assert_int_gt(n_cut, 0);
    free(a);
    free(whole);
    pages_are_back();
}
END_TEST

START_TEST(a_session_in_use_is_refused_and_a_cancelled_turn_leaves_it_as_it_was)
{
    struct asking *a = calloc(1, sizeof(*a));
    struct question q, other;
    Baton__V1__ListSessionsReply *list;
    char details[TRANSPORT_DETAIL_BYTES];

    question_ids(&q, prompt_ids, PROMPT, 4, LOCAL);
    q.q.session = borrowed("one");
    ask(&node, &q.q, &a->answer);
    question_ids(&q, prompt_ids, PROMPT, 900, LOCAL);
    q.q.session = borrowed("one");
    asking_start(a, &node, &q.q, 60000);
    asking_wait_ids(a, 2);
    question_text(&other, "x", 4, LOCAL);
    other.q.session = borrowed("one");
    refused(&other, TRANSPORT_FAILED_PRECONDITION, "session: one is in use");
    ck_assert_int_eq(close_session("one", details), TRANSPORT_FAILED_PRECONDITION);
    asking_cancel(a);
    asking_wait(a);
    ck_assert_int_eq(a->answer.status, TRANSPORT_CANCELLED);
    pages_are_back();
    list = list_sessions();
    ck_assert_uint_eq(list->sessions[0]->tokens, PROMPT + 4);
    baton__v1__list_sessions_reply__free_unpacked(list, NULL);
    ck_assert_int_eq(close_session("one", details), TRANSPORT_OK);
    free(a);
}
END_TEST

START_TEST(sessions_are_bounded_and_a_failed_first_turn_leaves_none)
{
    static const char *const names[] = {"s1", "s2", "s3"};
    struct question q;
    struct answer *a = calloc(1, sizeof(*a));
    struct description d;
    char details[TRANSPORT_DETAIL_BYTES];

    question_text(&q, "bad\xff", 4, LOCAL);
    q.q.session = borrowed("none");
    invalid(&q, "text");
    describe(&node, &d);
    ck_assert_uint_eq(d.sessions, 0);
    for (int i = 0; i < 3; i++) {
        question_text(&q, "the", 2, LOCAL);
        q.q.session = borrowed(names[i]);
        ask(&node, &q.q, a);
        ck_assert_int_eq(a->status, 0);
    }
    q.q.session = borrowed("s4");
    refused(&q, TRANSPORT_RESOURCE_EXHAUSTED, "session: 3 are open");
    for (int i = 0; i < 3; i++)
        ck_assert_int_eq(close_session(names[i], details), TRANSPORT_OK);
    free(a);
}
END_TEST

/* ---- Ends from outside ---- */

START_TEST(a_cancelled_request_gives_its_pages_back)
{
    struct asking *a = calloc(1, sizeof(*a));
    struct description d;
    struct question q;

    for (int i = 0; i < 10; i++) {
        question_ids(&q, prompt_ids, PROMPT + 50, 900, LOCAL);
        asking_start(a, &node, &q.q, 60000);
        asking_wait_ids(a, (size_t)(i % 3));
        asking_cancel(a);
        asking_wait(a);
        ck_assert_int_eq(a->answer.status, TRANSPORT_CANCELLED);
    }
    ck_assert(wait_idle(&node, &d));
    free(a);
}
END_TEST

START_TEST(a_deadline_ends_a_request)
{
    struct asking *a = calloc(1, sizeof(*a));
    struct question q;

    question_ids(&q, prompt_ids, PROMPT, 900, LOCAL);
    asking_start(a, &node, &q.q, 15);
    asking_wait(a);
    ck_assert_int_eq(a->answer.status, TRANSPORT_DEADLINE_EXCEEDED);
    free(a);
    pages_are_back();
}
END_TEST

/* More requests than pages for all of them at once: each waits for its turn and is answered. */
START_TEST(requests_beyond_the_pages_wait_and_are_answered)
{
    enum { N = 24 };
    struct asking *a = calloc(N, sizeof(*a));
    struct question q;

    for (uint32_t i = 0; i < N; i++) {
        question_ids(&q, prompt_ids + i, 400, 400, LOCAL);
        asking_start(&a[i], &node, &q.q, 60000);
    }
    for (uint32_t i = 0; i < N; i++) {
        asking_wait(&a[i]);
        ck_assert_msg(a[i].answer.status == 0, "%s", a[i].answer.details);
        ck_assert_uint_eq(a[i].answer.n_ids, 400);
    }
    free(a);
    pages_are_back();
}
END_TEST

/* The reader takes one message and no more.  gRPC's own windows take much of an answer of this
 * size, so what is to be seen is that another request goes on beside it, and that its pages are
 * back. */
START_TEST(a_reader_that_stops_stalls_only_itself)
{
    struct asking *slow = calloc(1, sizeof(*slow));
    struct answer *a = calloc(1, sizeof(*a));
    struct question q;

    question_ids(&q, prompt_ids, PROMPT, 900, LOCAL);
    slow->hold = true;
    asking_start(slow, &node, &q.q, 60000);
    for (int i = 0; i < 3; i++) {
        question_ids(&q, prompt_ids + 5, PROMPT, 20, LOCAL);
        ask(&node, &q.q, a);
        ck_assert_int_eq(a->status, 0);
    }
    asking_cancel(slow);
    asking_wait(slow);
    free(a);
    free(slow);
    pages_are_back();
}
END_TEST

/* On the plain kernels, where a prompt of 200 positions takes a second or more. */
START_TEST(a_prompt_computed_here_lets_running_streams_go_on)
{
    const char *args[] = {"--model",     fixture_tiny("tiny-wide"),
                          "--kv-bytes",  "16M",
                          "--threads",   "1",
                          "--kernels",   "plain",
                          "--log-level", "error",
                          NULL};
    struct asking *stream = calloc(1, sizeof(*stream)), *prompt = calloc(1, sizeof(*prompt));
    struct fixture_node slow;
    struct question q;
    size_t before;

    fixture_start(&slow, "decode", args);
    question_ids(&q, prompt_ids, 4, 300, LOCAL);
    asking_start(stream, &slow, &q.q, 60000);
    asking_wait_ids(stream, 2);
    pthread_mutex_lock(&stream->lock);
    before = stream->answer.n_ids;
    pthread_mutex_unlock(&stream->lock);
    question_ids(&q, prompt_ids, 200, 1, LOCAL);
    asking_start(prompt, &slow, &q.q, 60000);
    asking_wait_ids(prompt, 1);
    pthread_mutex_lock(&stream->lock);
    ck_assert_uint_ge(stream->answer.n_ids, before + 4);
    pthread_mutex_unlock(&stream->lock);
    asking_wait(prompt);
    asking_cancel(stream);
    asking_wait(stream);
    ck_assert_int_eq(fixture_stop(&slow), 0);
    free(prompt);
    free(stream);
}
END_TEST

/* ---- The program ---- */

/* What only the model or the machine can tell is the command line's fault all the same. */
START_TEST(a_value_that_this_model_or_machine_cannot_have_is_named)
{
    static const char *const wrong[][3] = {
        {"--page", "17", "--page 17: "},
        {"--kv-bytes", "1K", "--kv-bytes 1K: "},
        {"--kv-bytes", "999T", "--kv-bytes 999T: "},
        {"--pages", "4294967295", "--pages 4294967295: "},
        {"--max-context", "999999", "--max-context 999999: the model has "},
        {"--kernels", "abacus", "--kernels abacus: "},
    };
    char err[4096], model[512], expected[128];

    snprintf(model, sizeof(model), "%s", fixture_tiny("tiny-q8_0"));
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        const char *args[] = {"--model",   model,       "--log-level", "error",
                              wrong[i][0], wrong[i][1], NULL};

        for (int k = 0; k < 2; k++) {
            const char *name = k == 0 ? "decode" : "prefill";

            snprintf(expected, sizeof(expected), "baton-%s: %s", name, wrong[i][2]);
            ck_assert_msg(fixture_run(name, args, err, sizeof(err)) == NODE_EXIT_USAGE, "%s", err);
            ck_assert_msg(strncmp(err, expected, strlen(expected)) == 0, "%s: %s", expected, err);
        }
    }
}
END_TEST

START_TEST(wrong_options_and_a_port_in_use_are_named)
{
    char err[4096], listen[64];
    const char *model = fixture_tiny("tiny-q8_0");
    const char *none[] = {"--kv-bytes", "1M", NULL};
    const char *peer[] = {"--model", model, "--prefill", "nowhere", NULL};
    const char *file[] = {"--model", "no-such-file.gguf", NULL};
    const char *port[] = {"--model", model, "--kv-bytes", "4M", "--listen", listen, NULL};

    snprintf(listen, sizeof(listen), "127.0.0.1:%d", node.port);
    ck_assert_int_eq(fixture_run("decode", none, err, sizeof(err)), NODE_EXIT_USAGE);
    ck_assert_ptr_nonnull(strstr(err, "--model"));
    ck_assert_int_eq(fixture_run("decode", peer, err, sizeof(err)), NODE_EXIT_USAGE);
    ck_assert_ptr_nonnull(strstr(err, "nowhere"));
    ck_assert_int_eq(fixture_run("decode", file, err, sizeof(err)), NODE_EXIT_FAILED);
    ck_assert_ptr_nonnull(strstr(err, "no-such-file.gguf"));
    ck_assert_int_eq(fixture_run("decode", port, err, sizeof(err)), NODE_EXIT_UNAVAILABLE);
    ck_assert_ptr_nonnull(strstr(err, listen));
}
END_TEST

struct stopper {
    struct fixture_node *node;
    pthread_t thread;
    int rc;
};

static void *stop_node(void *arg)
{
    struct stopper *s = arg;

    s->rc = fixture_stop(s->node);
    return NULL;
}

/* On the plain kernels, where the answer takes seconds. */
START_TEST(a_draining_node_tells_who_asks_and_finishes_what_runs)
{
    const char *args[] = {"--model",     fixture_tiny("tiny-wide"),
                          "--kv-bytes",  "16M",
                          "--threads",   "1",
                          "--kernels",   "plain",
                          "--log-level", "error",
                          NULL};
    struct asking *a = calloc(1, sizeof(*a));
    struct answer *late = calloc(1, sizeof(*late));
    struct fixture_node slow, other;
    struct transport_channel_config config = {.max_message_bytes = 0};
    struct stopper stopper = {.node = &slow, .rc = -1};
    struct question q;
    struct description d;
    struct audit seen;

    fixture_start(&slow, "decode", args);
    other = slow;
    config.target = other.address;
    ck_assert_int_eq(transport_channel_open(&config, &other.channel, NULL), 0);
    question_ids(&q, prompt_ids, 4, 400, LOCAL);
    asking_start(a, &slow, &q.q, 60000);
    asking_wait_ids(a, 2);
    ck_assert_int_eq(pthread_create(&stopper.thread, NULL, stop_node, &stopper), 0);
    for (int i = 0; i < 200 && transport_health(other.channel, "", 5000) == 1; i++)
        usleep(5000);
    ck_assert_int_eq(transport_health(other.channel, "baton.v1.Decode", 5000), 0);
    for (int i = 0; i < 2; i++) {
        question_text(&q, "the", 4, LOCAL);
        ask(&other, &q.q, late);
        ck_assert_int_eq(late->status, TRANSPORT_UNAVAILABLE);
        ck_assert_str_eq(late->details, "draining");
    }
    describe(&other, &d);
    ck_assert_uint_eq(d.running, 1);
    audit(&other, &seen);
    ck_assert_uint_ge(seen.contexts, 1);
    pthread_join(stopper.thread, NULL);
    ck_assert_int_eq(stopper.rc, 0);
    asking_wait(a);
    ck_assert_msg(a->answer.status == 0, "%s", a->answer.details);
    ck_assert_uint_eq(a->answer.n_ids, 400);
    transport_channel_close(other.channel);
    free(late);
    free(a);
}
END_TEST

/* Last: the node ends. */
START_TEST(a_drained_node_finishes_what_runs)
{
    struct asking *a = calloc(1, sizeof(*a));
    struct question q;

    question_ids(&q, prompt_ids, PROMPT, 600, LOCAL);
    asking_start(a, &node, &q.q, 60000);
    asking_wait_ids(a, 1);
    ck_assert_int_eq(fixture_stop(&node), 0);
    asking_wait(a);
    ck_assert_msg(a->answer.status == 0, "%s", a->answer.details);
    ck_assert_uint_eq(a->answer.n_ids, 600);
    free(a);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("decode");
    TCase *c = tcase_create("decode");
    SRunner *r;
    int failed;

    transport_start();

    tcase_set_timeout(c, 120);
    tcase_add_unchecked_fixture(c, start_node, NULL);
    tcase_add_test(c, a_prompt_must_be_there);
    tcase_add_test(c, text_that_no_context_holds_is_refused_by_its_length);
    tcase_add_test(c, a_prompt_must_fit_the_context_with_room_for_a_token);
    tcase_add_test(c, a_wrong_number_is_named_with_its_value);
    tcase_add_test(c, an_id_outside_the_vocabulary_is_named);
    tcase_add_test(c, too_many_or_too_long_stops_are_refused);
    tcase_add_test(c, invalid_utf8_is_refused_with_its_offset);
    tcase_add_test(c, an_unknown_role_and_a_long_salt_are_refused);
    tcase_add_test(c, a_bad_session_name_is_refused);
    tcase_add_test(c, a_prefill_route_without_prefill_nodes_is_unavailable);
    tcase_add_test(c, bytes_that_are_no_message_are_refused);
    tcase_add_test(c, the_same_request_gives_the_same_answer_warm_and_beside_others);
    tcase_add_test(c, the_node_can_be_audited_while_it_works);
    tcase_add_test(c, an_answer_ends_at_max_tokens_or_where_the_context_is_full);
    tcase_add_test(c, a_stop_id_ends_the_answer);
    tcase_add_test(c, a_stop_string_ends_the_answer_wherever_tokens_part);
    tcase_add_test(c, streamed_text_is_valid_utf8_whatever_is_sampled);
    tcase_add_test(c, salts_share_no_pages);
    tcase_add_test(c, a_session_goes_on_by_its_ids);
    tcase_add_test(c, a_chat_goes_on_where_the_template_left_it);
    tcase_add_test(c, a_stop_string_cuts_the_session_to_what_was_seen);
    tcase_add_test(c, a_session_in_use_is_refused_and_a_cancelled_turn_leaves_it_as_it_was);
    tcase_add_test(c, sessions_are_bounded_and_a_failed_first_turn_leaves_none);
    tcase_add_test(c, a_cancelled_request_gives_its_pages_back);
    tcase_add_test(c, a_deadline_ends_a_request);
    tcase_add_test(c, requests_beyond_the_pages_wait_and_are_answered);
    tcase_add_test(c, a_reader_that_stops_stalls_only_itself);
    tcase_add_test(c, a_prompt_computed_here_lets_running_streams_go_on);
    tcase_add_test(c, a_value_that_this_model_or_machine_cannot_have_is_named);
    tcase_add_test(c, wrong_options_and_a_port_in_use_are_named);
    tcase_add_test(c, a_draining_node_tells_who_asks_and_finishes_what_runs);
    tcase_add_test(c, a_drained_node_finishes_what_runs);
    suite_add_tcase(s, c);
    r = srunner_create(s);
    srunner_set_fork_status(r, CK_NOFORK);
    srunner_run_all(r, CK_NORMAL);
    failed = srunner_ntests_failed(r);
    srunner_free(r);
    fixture_stop(&node);
    transport_stop();
    return failed != 0;
}

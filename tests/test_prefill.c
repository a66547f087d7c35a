/* The prefill node by itself: what it refuses and how it says so, what it streams, how many wait,
 * and that a slow or vanished receiver holds nothing. */
#include "node_fixture.h"

#include <check.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct fixture_node node, describer;
static struct node_identity identity;
static uint32_t n_vocab, n_ctx;
static uint32_t ids[2048];

/* ---- A call to Compute ---- */

enum { MAX_RECORDS = 64 };

struct computing {
    struct transport_request *request;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool hold; /* take one message and no more */
    bool over;
    int status;
    char details[TRANSPORT_DETAIL_BYTES];
    int n, records[MAX_RECORDS];
    size_t bytes[MAX_RECORDS];
    uint32_t accepted_matched, accepted_queued;
    uint32_t matched, computed;
};

static void on_message(void *user, struct transport_request *r, struct transport_message *m)
{
    struct computing *c = user;
    Baton__V1__ComputeReply *reply = baton__v1__compute_reply__unpack(
        NULL, transport_message_bytes(m), transport_message_flat(m));

    pthread_mutex_lock(&c->lock);
    if (c->n < MAX_RECORDS) {
        c->bytes[c->n] = transport_message_bytes(m);
        c->records[c->n++] = reply != NULL ? (int)reply->record_case : -1;
    }
    if (reply != NULL && reply->record_case == BATON__V1__COMPUTE_REPLY__RECORD_ACCEPTED) {
        c->accepted_matched = reply->accepted->matched;
        c->accepted_queued = reply->accepted->queued;
    }
    if (reply != NULL && reply->record_case == BATON__V1__COMPUTE_REPLY__RECORD_SEALED) {
        c->matched = reply->sealed->matched;
        c->computed = reply->sealed->computed;
    }
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
    baton__v1__compute_reply__free_unpacked(reply, NULL);
    if (!c->hold)
        transport_request_next(r);
}

static void on_end(void *user, struct transport_request *r, int code, const char *details)
{
    struct computing *c = user;

    (void)r;
    pthread_mutex_lock(&c->lock);
    c->status = code;
    snprintf(c->details, sizeof(c->details), "%s", details);
    c->over = true;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
}

struct call {
    Baton__V1__ComputeRequest q;
    Baton__V1__Hello hello;
    Baton__V1__Geometry geometry;
    char tenant[80];
};

static void call_init(struct call *c, size_t first, size_t n, uint32_t have)
{
    baton__v1__compute_request__init(&c->q);
    node_hello_fill(&identity, &c->hello, &c->geometry);
    strcpy(c->tenant, "default");
    c->q.hello = &c->hello;
    c->q.tenant = c->tenant;
    c->q.ids = ids + first;
    c->q.n_ids = n;
    c->q.have = have;
}

static void compute_start(struct computing *c, const struct call *call, int64_t deadline_ms)
{
    static const struct transport_request_events events = {.on_message = on_message,
                                                           .on_end = on_end};
    bool hold = c->hold;

    memset(c, 0, sizeof(*c));
    c->hold = hold;
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->changed, NULL);
    ck_assert_int_eq(transport_request_start(node.channel, "/baton.v1.Prefill/Compute",
                                             node_message_pack(&call->q.base), deadline_ms, true,
                                             &events, c, &c->request),
                     0);
}

static void compute_wait(struct computing *c)
{
    pthread_mutex_lock(&c->lock);
    while (!c->over)
        pthread_cond_wait(&c->changed, &c->lock);
    pthread_mutex_unlock(&c->lock);
    transport_request_unref(c->request);
}

static void compute_wait_records(struct computing *c, int n)
{
    pthread_mutex_lock(&c->lock);
    while (!c->over && c->n < n)
        pthread_cond_wait(&c->changed, &c->lock);
    pthread_mutex_unlock(&c->lock);
}

static void compute(const struct call *call, struct computing *out)
{
    out->hold = false;
    compute_start(out, call, 60000);
    compute_wait(out);
}

/* ---- Fixture: what the nodes' hello must say is asked from a decode node of the same model ----
 */

static void learn_identity(void)
{
    Baton__V1__DescribeRequest q = BATON__V1__DESCRIBE_REQUEST__INIT;
    Baton__V1__DescribeReply *r;
    struct transport_message *m = NULL;

    ck_assert_int_eq(transport_unary(describer.channel, "/baton.v1.Decode/Describe",
                                     node_message_pack(&q.base), 10000, true, &m, NULL),
                     0);
    r = baton__v1__describe_reply__unpack(NULL, transport_message_bytes(m),
                                          transport_message_flat(m));
    ck_assert_ptr_nonnull(r);
    node_random(identity.epoch, sizeof(identity.epoch));
    memcpy(identity.fingerprint.bytes, r->hello->fingerprint.data, KV_DIGEST_BYTES);
    memcpy(identity.numerics_id.bytes, r->hello->numerics_id.data, KV_DIGEST_BYTES);
    identity.geometry.n_layers = r->hello->geometry->n_layers;
    identity.geometry.n_kv_heads = r->hello->geometry->n_kv_heads;
    identity.geometry.head_dim = r->hello->geometry->head_dim;
    identity.geometry.precision = (enum kv_precision)r->hello->geometry->precision;
    n_vocab = r->n_vocab;
    n_ctx = r->n_ctx;
    baton__v1__describe_reply__free_unpacked(r, NULL);
    transport_message_unref(m);
}

static void start_nodes(void)
{
    const char *decode[] = {"--model",     fixture_tiny("tiny-wide"),
                            "--kv-bytes",  "16M",
                            "--threads",   "1",
                            "--log-level", "error",
                            NULL};
    /* 16 pages of 64 positions: one context of the model's 1,024. */
    const char *prefill[] = {"--model",     fixture_tiny("tiny-wide"),
                             "--pages",     "16",
                             "--threads",   "1",
                             "--log-level", "error",
                             "--queue",     "4",
                             "--chunk",     "64",
                             NULL};

    fixture_start(&describer, "decode", decode);
    learn_identity();
    fixture_ids(ids, 2048, 5, n_vocab);
    fixture_start(&node, "prefill", prefill);
}

static void refused(const struct call *call, int status, const char *says)
{
    struct computing c;

    compute(call, &c);
    ck_assert_msg(c.status == status, "%s: %s, not %s for %s", transport_status_name(c.status),
                  c.details, transport_status_name(status), says);
    ck_assert_msg(strstr(c.details, says) != NULL, "\"%s\" does not say \"%s\"", c.details, says);
    ck_assert_int_eq(c.n, 0);
}

/* ---- Tests ---- */

START_TEST(a_hello_that_differs_is_refused_with_field_and_both_values)
{
    uint8_t other[KV_DIGEST_BYTES] = {0xab};
    struct call c;

    call_init(&c, 0, 10, 0);
    c.hello.protocol = 7;
    refused(&c, TRANSPORT_FAILED_PRECONDITION,
            "hello.protocol: decode has 7, this prefill node has 1");
    call_init(&c, 0, 10, 0);
    c.hello.fingerprint.data = other;
    refused(&c, TRANSPORT_FAILED_PRECONDITION, "hello.fingerprint: decode has ab00");
    call_init(&c, 0, 10, 0);
    c.hello.fingerprint.len = 31;
    refused(&c, TRANSPORT_FAILED_PRECONDITION, "hello.fingerprint has 31 bytes");
    call_init(&c, 0, 10, 0);
    c.hello.numerics_id.data = other;
    refused(&c, TRANSPORT_FAILED_PRECONDITION, "hello.numerics_id: decode has ab00");
    call_init(&c, 0, 10, 0);
    c.geometry.n_layers = 99;
    refused(&c, TRANSPORT_FAILED_PRECONDITION,
            "hello.geometry.n_layers: decode has 99, this prefill node has 2");
    call_init(&c, 0, 10, 0);
    c.geometry.head_dim = 12;
    refused(&c, TRANSPORT_FAILED_PRECONDITION, "hello.geometry.head_dim: decode has 12");
    call_init(&c, 0, 10, 0);
    c.geometry.n_kv_heads = 3;
    refused(&c, TRANSPORT_FAILED_PRECONDITION, "hello.geometry.n_kv_heads: decode has 3");
    call_init(&c, 0, 10, 0);
    c.geometry.precision = BATON__V1__PRECISION__PRECISION_Q8;
    refused(&c, TRANSPORT_FAILED_PRECONDITION,
            "hello.geometry.precision: decode has q8, this prefill node has f16 (--kv-precision)");
    call_init(&c, 0, 10, 0);
    c.geometry.precision = (Baton__V1__Precision)77;
    refused(&c, TRANSPORT_FAILED_PRECONDITION, "precision: decode has an unknown one");
    call_init(&c, 0, 10, 0);
    c.hello.epoch.len = 3;
    refused(&c, TRANSPORT_FAILED_PRECONDITION, "hello.epoch has 3 bytes");
    call_init(&c, 0, 10, 0);
    c.hello.geometry = NULL;
    refused(&c, TRANSPORT_FAILED_PRECONDITION, "hello.geometry is absent");
    call_init(&c, 0, 10, 0);
    c.q.hello = NULL;
    refused(&c, TRANSPORT_FAILED_PRECONDITION, "hello is absent");
}
END_TEST

START_TEST(a_field_out_of_range_is_named_with_its_value)
{
    uint8_t salt[65] = {0};
    uint32_t bad[2] = {1, 0};
    char says[64];
    struct call c;

    call_init(&c, 0, 0, 0);
    refused(&c, TRANSPORT_INVALID_ARGUMENT, "ids: empty");
    call_init(&c, 0, n_ctx + 1, 0);
    refused(&c, TRANSPORT_INVALID_ARGUMENT, "more than the context");
    call_init(&c, 0, 10, 10);
    refused(&c, TRANSPORT_INVALID_ARGUMENT, "have: 10");
    call_init(&c, 0, 10, UINT32_MAX);
    refused(&c, TRANSPORT_INVALID_ARGUMENT, "have: 4294967295");
    call_init(&c, 0, 2, 0);
    bad[1] = n_vocab;
    c.q.ids = bad;
    snprintf(says, sizeof(says), "ids[1]: %u", n_vocab);
    refused(&c, TRANSPORT_INVALID_ARGUMENT, says);
    call_init(&c, 0, 10, 0);
    c.q.salt.data = salt;
    c.q.salt.len = sizeof(salt);
    refused(&c, TRANSPORT_INVALID_ARGUMENT, "salt: 65");
    call_init(&c, 0, 10, 0);
    c.tenant[0] = '\0';
    refused(&c, TRANSPORT_INVALID_ARGUMENT, "tenant: 0");
    memset(c.tenant, 't', 65);
    c.tenant[65] = '\0';
    refused(&c, TRANSPORT_INVALID_ARGUMENT, "tenant: 65");
}
END_TEST

START_TEST(bytes_that_are_no_message_are_refused)
{
    struct transport_message *m = NULL;
    char details[TRANSPORT_DETAIL_BYTES];
    uint8_t *bytes;
    struct transport_out *out = transport_out_new(3, &bytes);

    memcpy(bytes, "\x0a\x7f\x00", 3);
    ck_assert_int_eq(
        transport_unary(node.channel, "/baton.v1.Prefill/Compute", out, 10000, true, &m, details),
        TRANSPORT_INVALID_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(details, "ComputeRequest"));
    transport_message_unref(m);
}
END_TEST

/* 300 positions from 0: frames end at 128, 256, 300; from 130 on: 256, 300. */
START_TEST(records_come_in_order_and_frames_begin_at_have)
{
    static const int all[] = {1, 2, 15, 15, 15, 3, 4}, rest[] = {1, 2, 15, 15, 3, 4};
    struct computing c;
    struct call q;

    call_init(&q, 0, 300, 0);
    compute(&q, &c);
    ck_assert_msg(c.status == 0, "%s", c.details);
    ck_assert_int_eq(c.n, 7);
    ck_assert_mem_eq(c.records, all, sizeof(all));
    ck_assert_uint_eq(c.matched, 0);
    ck_assert_uint_eq(c.computed, 300);
    ck_assert_uint_gt(c.bytes[2], 128 * 8192);
    ck_assert_uint_lt(c.bytes[4], 64 * 8192);

    call_init(&q, 0, 300, 130);
    compute(&q, &c);
    ck_assert_msg(c.status == 0, "%s", c.details);
    ck_assert_int_eq(c.n, 6);
    ck_assert_mem_eq(c.records, rest, sizeof(rest));
    ck_assert_uint_eq(c.accepted_matched, 299); /* a hint, which knows of no logits */
    ck_assert_uint_eq(c.matched, 300);          /* its logits are kept with it: nothing runs */
    ck_assert_uint_eq(c.computed, 0);
    ck_assert_uint_gt(c.bytes[2], 126 * 8192);
    ck_assert_uint_lt(c.bytes[2], 127 * 8192);

    call_init(&q, 0, 350, 0);
    compute(&q, &c);
    ck_assert_uint_eq(c.matched, 300);
    ck_assert_uint_eq(c.computed, 50);
}
END_TEST

/* Each prompt needs all pages, so they run one after the other; the queue holds four. */
START_TEST(calls_wait_for_pages_and_too_many_are_refused)
{
    enum { N = 12 };
    struct computing c[N];
    struct call q;
    int n_ok = 0, n_full = 0;

    for (size_t i = 0; i < N; i++) {
        call_init(&q, i, n_ctx, 0);
        c[i].hold = false;
        compute_start(&c[i], &q, 60000);
    }
    for (size_t i = 0; i < N; i++) {
        compute_wait(&c[i]);
        n_ok += c[i].status == TRANSPORT_OK;
        n_full += c[i].status == TRANSPORT_RESOURCE_EXHAUSTED;
        if (c[i].status != TRANSPORT_OK)
            ck_assert_msg(strstr(c[i].details, "queue") != NULL, "%s", c[i].details);
    }
    ck_assert_int_eq(n_ok + n_full, N);
    ck_assert_int_ge(n_ok, 4);
    ck_assert_int_ge(n_full, 1);
}
END_TEST

START_TEST(a_cancelled_call_makes_room_for_the_next)
{
    struct computing c, next;
    struct call q;

    for (size_t i = 0; i < 20; i++) {
        call_init(&q, 20 + i, n_ctx, 0);
        c.hold = false;
        compute_start(&c, &q, 60000);
        compute_wait_records(&c, (int)(i % 5));
        transport_request_cancel(c.request);
        compute_wait(&c);
        ck_assert_int_eq(c.status, TRANSPORT_CANCELLED);
    }
    call_init(&q, 100, n_ctx, 0); /* all pages must be there again */
    compute(&q, &next);
    ck_assert_msg(next.status == 0, "%s", next.details);
    ck_assert_uint_eq(next.computed, n_ctx);
}
END_TEST

START_TEST(the_node_can_be_audited_while_it_works)
{
    enum { N = 4, ROUNDS = 5 };
    struct auditing auditing;
    struct computing c[N];
    struct call q;

    auditing_start(&auditing, &node);
    for (size_t round = 0; round < ROUNDS; round++) {
        for (size_t i = 0; i < N; i++) {
            call_init(&q, 40 * round + i, 300 + i, 0);
            c[i].hold = false;
            compute_start(&c[i], &q, 60000);
        }
        compute_wait_records(&c[round % N], 2);
        transport_request_cancel(c[round % N].request);
        for (size_t i = 0; i < N; i++) {
            compute_wait(&c[i]);
            ck_assert_msg(c[i].status == 0 || i == round % N, "%s", c[i].details);
        }
    }
    ck_assert_uint_ge(auditing_stop(&auditing), ROUNDS);
}
END_TEST

START_TEST(a_deadline_ends_a_call)
{
    struct computing c;
    struct call q;

    call_init(&q, 200, n_ctx, 0);
    c.hold = false;
    compute_start(&c, &q, 5);
    compute_wait(&c);
    ck_assert_int_eq(c.status, TRANSPORT_DEADLINE_EXCEEDED);
    call_init(&q, 0, 20, 0);
    compute(&q, &c);
    ck_assert_msg(c.status == 0, "%s", c.details);
}
END_TEST

/* The receiver takes `accepted` and no more.  8 MiB of frames are a whole prompt of this model, so
 * the node is done with it, and has its pages for another; the call itself ends by its name or is
 * cancelled. */
START_TEST(a_receiver_that_stops_holds_no_compute)
{
    struct computing slow, c;
    struct call q;

    call_init(&q, 300, 512, 0);
    slow.hold = true;
    compute_start(&slow, &q, 60000);
    compute_wait_records(&slow, 1);
    call_init(&q, 400, 400, 0);
    compute(&q, &c);
    ck_assert_msg(c.status == 0, "%s", c.details);
    transport_request_cancel(slow.request);
    compute_wait(&slow);
    ck_assert_int_eq(slow.status, TRANSPORT_CANCELLED);
}
END_TEST

/* 16 MiB of frames are more than the node stages (8 MiB) and gRPC's windows take (4 MiB): frames
 * stay in pages until the receiver has been given up. */
START_TEST(a_receiver_that_does_not_keep_up_is_ended_by_name)
{
    const char *args[] = {
        "--model", fixture_tiny("tiny-wide"), "--pages", "16",          "--threads",
        "1",       "--kv-precision",          "f32",     "--log-level", "error",
        NULL};
    struct fixture_node f16_node = node, wide;
    struct computing slow, c;
    struct call q;

    fixture_start(&wide, "prefill", args);
    node = wide;
    identity.geometry.precision = KV_F32;
    call_init(&q, 0, n_ctx, 0);
    slow.hold = true;
    compute_start(&slow, &q, 60000);
    compute_wait_records(&slow, 1);
    usleep(500000);
    /* It holds all pages now, so another waits for the end of it. */
    call_init(&q, 1, n_ctx, 0);
    compute(&q, &c);
    ck_assert_msg(c.status == 0, "%s", c.details);
    slow.hold = false;
    transport_request_next(slow.request);
    compute_wait(&slow);
    ck_assert_msg(slow.status == TRANSPORT_RESOURCE_EXHAUSTED, "%s: %s",
                  transport_status_name(slow.status), slow.details);
    ck_assert_ptr_nonnull(strstr(slow.details, "the receiver took nothing for 10000 ms"));
    ck_assert_int_eq(fixture_stop(&wide), 0);
    node = f16_node;
    identity.geometry.precision = KV_F16;
}
END_TEST

/* Last. */
START_TEST(a_drained_node_finishes_what_runs_and_takes_no_more)
{
    struct computing c;
    struct call q;

    call_init(&q, 500, n_ctx, 0);
    c.hold = false;
    compute_start(&c, &q, 60000);
    compute_wait_records(&c, 1);
    ck_assert_int_eq(fixture_stop(&node), 0);
    compute_wait(&c);
    ck_assert_msg(c.status == 0, "%s", c.details);
    ck_assert_int_eq(fixture_stop(&describer), 0);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("prefill");
    TCase *c = tcase_create("prefill");
    SRunner *r;
    int failed;

    transport_start();
    tcase_set_timeout(c, 120);
    tcase_add_unchecked_fixture(c, start_nodes, NULL);
    tcase_add_test(c, a_hello_that_differs_is_refused_with_field_and_both_values);
    tcase_add_test(c, a_field_out_of_range_is_named_with_its_value);
    tcase_add_test(c, bytes_that_are_no_message_are_refused);
    tcase_add_test(c, records_come_in_order_and_frames_begin_at_have);
    tcase_add_test(c, calls_wait_for_pages_and_too_many_are_refused);
    tcase_add_test(c, a_cancelled_call_makes_room_for_the_next);
    tcase_add_test(c, the_node_can_be_audited_while_it_works);
    tcase_add_test(c, a_deadline_ends_a_call);
    tcase_add_test(c, a_receiver_that_stops_holds_no_compute);
    tcase_add_test(c, a_receiver_that_does_not_keep_up_is_ended_by_name);
    tcase_add_test(c, a_drained_node_finishes_what_runs_and_takes_no_more);
    suite_add_tcase(s, c);
    r = srunner_create(s);
    srunner_set_fork_status(r, CK_NOFORK);
    srunner_run_all(r, CK_NORMAL);
    failed = srunner_ntests_failed(r);
    srunner_free(r);
    transport_stop();
    return failed != 0;
}

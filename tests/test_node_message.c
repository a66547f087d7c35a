/* What both nodes receive by: messages whose memory is bounded and whose strings keep their length,
 * and the inbox that a thread's work is left in.  Messages come from a real server, for that is the
 * only way to have one. */
#include "node/node.h"

#include "proto/proto.h"
#include "transport/transport.h"

#include <check.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static struct transport_server *server;
static struct transport_channel *channel;

/* Answers with the request's own bytes. */
static void echo(void *user, struct transport_call *call, struct transport_message *m)
{
    uint8_t *bytes;
    size_t n = transport_message_bytes(m);
    struct transport_out *out = transport_out_new(n, &bytes);

    (void)user;
    memcpy(bytes, transport_message_flat(m), n);
    transport_call_send(call, out);
    transport_call_finish(call, TRANSPORT_OK, NULL);
    transport_call_unref(call);
}

static void start(void)
{
    const struct transport_method methods[] = {{"/t.T/Echo", TRANSPORT_UNARY, echo, NULL}};
    const struct transport_server_config config = {
        .listen = "127.0.0.1:0", .methods = methods, .n_methods = 1};
    struct transport_channel_config to = {0};
    char target[32];

    ck_assert_int_eq(transport_server_open(&config, &server, NULL), 0);
    snprintf(target, sizeof(target), "127.0.0.1:%d", transport_server_port(server));
    to.target = target;
    ck_assert_int_eq(transport_channel_open(&to, &channel, NULL), 0);
}

static void stop(void)
{
    transport_channel_close(channel);
    transport_server_close(server, 0);
}

static struct transport_message *message(const void *bytes, size_t n)
{
    struct transport_message *m = NULL;
    uint8_t *p;
    struct transport_out *out = transport_out_new(n, &p);

    memcpy(p, bytes, n);
    ck_assert_int_eq(transport_unary(channel, "/t.T/Echo", out, 10000, true, &m, NULL), 0);
    return m;
}

START_TEST(strings_keep_their_length_with_nul_bytes_inside)
{
    static const char bytes[] = "\x0a\x02s1\x12\x05"
                                "a\0b\0c\x42\x00";
    struct transport_message *m = message(bytes, sizeof(bytes) - 1);
    struct node_message out = {0};
    const Baton__V1__GenerateRequest *q;
    struct kv_why why;

    ck_assert_int_eq(node_message_unpack(&baton__v1__generate_request__descriptor, m, &out, &why),
                     0);
    q = (const Baton__V1__GenerateRequest *)out.message;
    ck_assert_uint_eq(node_message_strlen(q->session), 2);
    ck_assert_uint_eq(node_message_strlen(q->text), 5);
    ck_assert_mem_eq(q->text, "a\0b\0c", 5);
    ck_assert_uint_eq(q->n_stop, 1);
    ck_assert_uint_eq(node_message_strlen(q->stop[0]), 0);
    ck_assert_uint_gt(out.used, 0);
    node_message_free(&out);
    ck_assert_ptr_null(out.message);
    node_message_free(&out); /* once more is fine */
    transport_message_unref(m);

    m = message("", 0);
    ck_assert_int_eq(node_message_unpack(&baton__v1__generate_request__descriptor, m, &out, &why),
                     0);
    q = (const Baton__V1__GenerateRequest *)out.message;
    ck_assert_uint_eq(node_message_strlen(q->session), 0);
    node_message_free(&out);
    transport_message_unref(m);
}
END_TEST

START_TEST(every_truncation_is_refused_or_read_and_nothing_leaks)
{
    static const char bytes[] =
        "\x0a\x02s1\x1a\x0c\x0a\x0a\x0a\x04user\x12\x02hi\x2a\x05\x0d\0\0\0?";
    struct node_message out = {0};
    struct kv_why why;
    int n_refused = 0;

    for (size_t n = 0; n < sizeof(bytes); n++) {
        struct transport_message *m = message(bytes, n);

        why.text[0] = '\0';
        if (node_message_unpack(&baton__v1__generate_request__descriptor, m, &out, &why) == 0) {
            node_message_free(&out);
        } else {
            n_refused++;
            ck_assert_ptr_nonnull(strstr(why.text, "GenerateRequest"));
        }
        transport_message_unref(m);
    }
    ck_assert_int_gt(n_refused, 10);
}
END_TEST

/* Empty messages take two bytes each on the wire and thirty times that in memory. */
START_TEST(a_message_that_grows_past_the_bound_is_refused)
{
    enum { N = 3 * 1024 * 1024 };
    char *bytes = malloc(N);
    struct node_message out = {0};
    struct transport_message *m;
    struct kv_why why;

    for (size_t i = 0; i < N; i += 2)
        memcpy(bytes + i, "\x0a\x00", 2);
    m = message(bytes, N);
    ck_assert_int_eq(node_message_unpack(&baton__v1__chat__descriptor, m, &out, &why), -1);
    ck_assert_ptr_nonnull(strstr(why.text, "Chat"));
    ck_assert_ptr_nonnull(strstr(why.text, "memory"));
    ck_assert_ptr_null(out.message);
    transport_message_unref(m);
    free(bytes);
}
END_TEST

static void identity(struct node_identity *id)
{
    memset(id, 0, sizeof(*id));
    node_random(id->epoch, sizeof(id->epoch));
    memset(&id->fingerprint, 0x11, sizeof(id->fingerprint));
    memset(&id->numerics_id, 0x22, sizeof(id->numerics_id));
    id->geometry =
        (struct kv_geometry){.n_layers = 3, .n_kv_heads = 2, .head_dim = 16, .precision = KV_F16};
}

START_TEST(a_hello_holds_for_its_like_alone)
{
    struct node_identity a, b;
    Baton__V1__Hello hello;
    Baton__V1__Geometry geometry;
    struct kv_why why;

    identity(&a);
    identity(&b); /* another epoch: another life of the same */
    node_hello_fill(&a, &hello, &geometry);
    ck_assert_int_eq(node_hello_check(&b, &hello, "the peer", "this", &why), 0);
    b.numerics_id.bytes[31] ^= 1;
    ck_assert_int_eq(node_hello_check(&b, &hello, "the peer", "this", &why), KV_ERR_MISMATCH);
    ck_assert_ptr_nonnull(strstr(why.text, "numerics_id: the peer has 2222"));
    ck_assert_ptr_nonnull(strstr(why.text, "2223"));
    ck_assert_int_eq(node_hello_check(&b, NULL, "the peer", "this", &why), KV_ERR_MISMATCH);
}
END_TEST

START_TEST(the_largest_record_fits_the_message_limit)
{
    struct kv_geometry g = {.n_layers = 30, .n_kv_heads = 3, .head_dim = 64, .precision = KV_F16};

    ck_assert_uint_eq(node_record_bytes(&g, 8192, 49152), TRANSPORT_MIN_MESSAGE_BYTES);
    ck_assert_uint_gt(node_record_bytes(&g, 8192, 2000000), 8000000);
    ck_assert_uint_gt(node_record_bytes(&g, 4000000, 1000), 16000000);
    g.n_layers = 200;
    g.n_kv_heads = 128;
    g.head_dim = 128; /* 12.5 MiB a position */
    ck_assert_uint_gt(node_record_bytes(&g, 100, 100), kv_position_bytes(&g));
}
END_TEST

struct item {
    struct node_link link;
    int n;
};

enum { N_PUTTERS = 4, N_ITEMS = 2000 };

struct putter {
    struct node_inbox *box;
    struct item items[N_ITEMS];
    pthread_t thread;
};

static void *put_all(void *arg)
{
    struct putter *p = arg;

    for (int i = 0; i < N_ITEMS; i++) {
        p->items[i].n = i;
        node_inbox_put(p->box, &p->items[i].link);
    }
    return NULL;
}

START_TEST(an_inbox_gives_each_item_once_and_each_thread_s_in_order)
{
    struct putter *p = calloc(N_PUTTERS, sizeof(*p));
    struct node_inbox box;
    int next[N_PUTTERS] = {0}, n = 0;

    ck_assert_int_eq(node_inbox_init(&box), 0);
    for (int i = 0; i < N_PUTTERS; i++) {
        p[i].box = &box;
        ck_assert_int_eq(pthread_create(&p[i].thread, NULL, put_all, &p[i]), 0);
    }
    while (n < N_PUTTERS * N_ITEMS) {
        struct node_link *link = node_inbox_take(&box, 10000);

        ck_assert_ptr_nonnull(link);
        for (; link != NULL; link = link->next, n++) {
            struct item *item = (struct item *)link;
            size_t who = 0;

            while (item < p[who].items || item >= p[who].items + N_ITEMS)
                who++;
            ck_assert_int_eq(item->n, next[who]++);
        }
    }
    for (int i = 0; i < N_PUTTERS; i++)
        pthread_join(p[i].thread, NULL);
    node_inbox_release(&box);
    free(p);
}
END_TEST

START_TEST(a_wake_is_not_lost_and_a_wait_ends_in_time)
{
    struct node_inbox box;
    int64_t start;

    ck_assert_int_eq(node_inbox_init(&box), 0);
    node_inbox_wake(&box);
    ck_assert_ptr_null(node_inbox_take(&box, -1)); /* would wait for ever */
    start = node_now_ns();
    ck_assert_ptr_null(node_inbox_take(&box, 30));
    ck_assert_int_ge(node_now_ns() - start, 29 * INT64_C(1000000));
    ck_assert_ptr_null(node_inbox_take(&box, 0));
    node_inbox_release(&box);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("node message");
    TCase *c = tcase_create("message");
    SRunner *r;
    int failed;

    transport_start();
    tcase_set_timeout(c, 60);
    tcase_add_unchecked_fixture(c, start, stop);
    tcase_add_test(c, strings_keep_their_length_with_nul_bytes_inside);
    tcase_add_test(c, every_truncation_is_refused_or_read_and_nothing_leaks);
    tcase_add_test(c, a_message_that_grows_past_the_bound_is_refused);
    tcase_add_test(c, a_hello_holds_for_its_like_alone);
    tcase_add_test(c, the_largest_record_fits_the_message_limit);
    tcase_add_test(c, an_inbox_gives_each_item_once_and_each_thread_s_in_order);
    tcase_add_test(c, a_wake_is_not_lost_and_a_wait_ends_in_time);
    suite_add_tcase(s, c);
    r = srunner_create(s);
    srunner_set_fork_status(r, CK_NOFORK);
    srunner_run_all(r, CK_NORMAL);
    failed = srunner_ntests_failed(r);
    srunner_free(r);
    transport_stop();
    return failed != 0;
}

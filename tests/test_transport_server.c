/* Goal: servers open, say why they cannot, and close in order, whoever still holds a call.  Method:
 * as test_transport, with servers and channels made by each test. */
#include "transport_fixture.h"

#include <arpa/inet.h>
#include <check.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static void setup(void)
{
    transport_start();
}

static void teardown(void)
{
    transport_stop();
}

static void sleep_ms(long ms)
{
    struct timespec t = {ms / 1000, ms % 1000 * 1000000};

    nanosleep(&t, NULL);
}

static void nothing(void *user, struct transport_call *call, struct transport_message *request)
{
    (void)user;
    (void)request;
    transport_call_unref(call);
}

/* ---- Opening ---- */

static int open_at(const char *listen, char *error)
{
    struct transport_server_config config = {.listen = listen};
    struct transport_server *s = NULL;
    int rc = transport_server_open(&config, &s, error);

    if (rc < 0)
        ck_assert_ptr_null(s);
    else
        ck_assert_str_eq(error, "");
    transport_server_close(s, 0);
    return rc;
}

START_TEST(a_port_in_use_is_named)
{
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t length = sizeof(address);
    char listen_at[64], error[TRANSPORT_DETAIL_BYTES], expected[128];
    struct transport_server *s = NULL;
    int fd = -1, port;

    if (_i == 0) { /* by another server of ours */
        s = fixture_server("127.0.0.1:0", 0, 0, 0, 0);
        port = transport_server_port(s);
    } else { /* by anybody's socket */
        fd = socket(AF_INET, SOCK_STREAM, 0);
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        ck_assert_int_eq(bind(fd, (struct sockaddr *)&address, sizeof(address)), 0);
        ck_assert_int_eq(listen(fd, 1), 0);
        ck_assert_int_eq(getsockname(fd, (struct sockaddr *)&address, &length), 0);
        port = ntohs(address.sin_port);
    }
    snprintf(listen_at, sizeof(listen_at), "127.0.0.1:%d", port);
    snprintf(expected, sizeof(expected), "cannot listen on 127.0.0.1:%d: the port is in use", port);
    ck_assert_int_eq(open_at(listen_at, error), TRANSPORT_ERR_ADDRESS);
    ck_assert_str_eq(error, expected);
    ck_assert_int_eq(transport_listen_check(listen_at, error), TRANSPORT_ERR_ADDRESS);
    ck_assert_str_eq(error, expected);
    /* A name that also has an address which is free is no way around it. */
    snprintf(listen_at, sizeof(listen_at), "localhost:%d", port);
    ck_assert_int_eq(open_at(listen_at, error), TRANSPORT_ERR_ADDRESS);
    ck_assert_str_eq(error, expected);
    transport_server_close(s, 0);
    if (fd >= 0)
        close(fd);
    snprintf(listen_at, sizeof(listen_at), "127.0.0.1:%d", port);
    ck_assert_int_eq(transport_listen_check(listen_at, error), 0);
    ck_assert_int_eq(open_at(listen_at, error), 0);
}
END_TEST

START_TEST(an_address_that_is_none_is_named)
{
    static const struct {
        const char *listen, *why;
    } cases[] = {
        {"", "not of the form HOST:PORT"},
        {"localhost", "not of the form HOST:PORT"},
        {":50051", "not of the form HOST:PORT"},
        {"localhost:", "not of the form HOST:PORT"},
        {"localhost:65536", "not of the form HOST:PORT"},
        {"localhost:-1", "not of the form HOST:PORT"},
        {"localhost:http", "not of the form HOST:PORT"},
        {"::1:50051", "not of the form HOST:PORT"},
        {"unix:/tmp/x:1", "not of the form HOST:PORT"},
        {"not a name:50051", "cannot resolve not a name"},
        {"192.0.2.1:0", "the address is not one of this machine's"},
    };
    struct transport_channel_config config = {.target = cases[_i].listen};
    struct transport_channel *ch = NULL;
    char error[TRANSPORT_DETAIL_BYTES];

    ck_assert_int_eq(open_at(cases[_i].listen, error), TRANSPORT_ERR_ADDRESS);
    ck_assert(strncmp(error, "cannot listen on ", 17) == 0);
    ck_assert_ptr_nonnull(strstr(error, cases[_i].listen));
    ck_assert_ptr_nonnull(strstr(error, cases[_i].why));
    if (_i < 9) {
        ck_assert_int_eq(transport_channel_open(&config, &ch, error), TRANSPORT_ERR_ADDRESS);
        ck_assert_ptr_nonnull(strstr(error, "not of the form HOST:PORT"));
        ck_assert_ptr_null(ch);
    }
}
END_TEST

START_TEST(a_server_listens_on_names_and_wildcards)
{
    static const char *const listens[] = {"localhost:0", "0.0.0.0:0", "127.0.0.1:0"};
    struct transport_server *s = fixture_server(listens[_i], 0, 0, 0, 0);
    struct transport_channel *ch = fixture_channel(s);

    ck_assert_int_gt(transport_server_port(s), 0);
    ck_assert_int_eq(transport_health(ch, "", 5000), 0);
    transport_channel_close(ch);
    transport_server_close(s, 0);
}
END_TEST

START_TEST(a_method_that_cannot_be_served_is_refused)
{
    static const struct transport_method cases[][2] = {
        {{"/a.B/C", TRANSPORT_UNARY, nothing, NULL}, {"/a.B/C", TRANSPORT_UNARY, nothing, NULL}},
        {{"/a.B/C", TRANSPORT_UNARY, nothing, NULL}, {"a.B/D", TRANSPORT_UNARY, nothing, NULL}},
        {{"/a.B/C", TRANSPORT_UNARY, nothing, NULL}, {"/a.B/D", TRANSPORT_UNARY, NULL, NULL}},
        {{"/a.B/C", TRANSPORT_UNARY, nothing, NULL},
         {"/grpc.health.v1.Health/Check", TRANSPORT_UNARY, nothing, NULL}},
    };
    struct transport_server_config config = {
        .listen = "127.0.0.1:0", .methods = cases[_i], .n_methods = 2};
    struct transport_server *s = NULL;
    char error[TRANSPORT_DETAIL_BYTES];

    ck_assert_int_eq(transport_server_open(&config, &s, error), TRANSPORT_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(error, "a method without a path"));
    ck_assert_ptr_null(s);
}
END_TEST

/* ---- Connections ---- */

START_TEST(nobody_there_is_unavailable_at_once)
{
    struct transport_server *s = fixture_server("127.0.0.1:0", 0, 0, 0, 0);
    int port = transport_server_port(s);
    struct transport_channel *ch;
    char details[TRANSPORT_DETAIL_BYTES];
    int64_t start = now_ms();

    transport_server_close(s, 0);
    ch = fixture_channel_port(port);
    ck_assert_int_eq(
        transport_unary(ch, "/t.T/Echo", fixture_text(""), 10000, false, NULL, details),
        TRANSPORT_UNAVAILABLE);
    ck_assert_int_lt(now_ms() - start, 2000);
    ck_assert_str_ne(details, "");
    start = now_ms();
    ck_assert_int_eq(transport_unary(ch, "/t.T/Echo", fixture_text(""), 200, true, NULL, details),
                     TRANSPORT_DEADLINE_EXCEEDED);
    ck_assert_int_ge(now_ms() - start, 199);
    transport_channel_close(ch);
}
END_TEST

static void *open_later(void *arg)
{
    char listen_at[64];

    sleep_ms(300);
    snprintf(listen_at, sizeof(listen_at), "127.0.0.1:%d", *(int *)arg);
    return fixture_server(listen_at, 0, 0, 0, 0);
}

START_TEST(wait_for_ready_waits_for_a_server_to_come)
{
    struct transport_server *s = fixture_server("127.0.0.1:0", 0, 0, 0, 0);
    int port = transport_server_port(s);
    struct transport_channel *ch = fixture_channel_port(port);
    int64_t start;
    pthread_t thread;
    void *later;

    ck_assert_int_eq(transport_unary(ch, "/t.T/Echo", fixture_text(""), 5000, false, NULL, NULL),
                     0);
    transport_server_close(s, 0);
    ck_assert_int_eq(pthread_create(&thread, NULL, open_later, &port), 0);
    start = now_ms();
    ck_assert_int_eq(transport_unary(ch, "/t.T/Echo", fixture_text(""), 20000, true, NULL, NULL),
                     0);
    /* 300 ms for the server, and a back-off of 2 s at most */
    ck_assert_int_lt(now_ms() - start, 4000);
    pthread_join(thread, &later);
    transport_channel_close(ch);
    transport_server_close(later, 0);
}
END_TEST

START_TEST(a_server_of_several_threads_serves_all)
{
    struct transport_server *s = fixture_server("127.0.0.1:0", 0, 0, 0, 3);
    struct transport_channel *ch[6];
    struct listener l[6];
    int i;

    for (i = 0; i < 6; i++) {
        ch[i] = fixture_channel(s);
        listener_init(&l[i]);
        ck_assert_int_eq(listener_start(&l[i], ch[i], "/t.T/Count", fixture_text("500"), 20000), 0);
    }
    for (i = 0; i < 6; i++) {
        ck_assert(listener_wait(&l[i], 20000));
        ck_assert_int_eq(l[i].code, TRANSPORT_OK);
        ck_assert_int_eq(l[i].n_messages, 500);
        ck_assert(l[i].in_order);
        listener_release(&l[i]);
        transport_channel_close(ch[i]);
    }
    transport_server_close(s, 1000);
}
END_TEST

/* ---- Closing ---- */

struct closer {
    struct transport_server *server;
    uint32_t grace_ms;
    int64_t took_ms;
    pthread_t thread;
};

static void *close_server(void *arg)
{
    struct closer *closer = arg;
    int64_t start = now_ms();

    transport_server_close(closer->server, closer->grace_ms);
    closer->took_ms = now_ms() - start;
    return NULL;
}

START_TEST(a_call_that_ends_within_the_grace_ends_well)
{
    struct closer closer = {.server = fixture_server("127.0.0.1:0", 0, 0, 0, 0), .grace_ms = 20000};
    struct transport_channel *ch = fixture_channel(closer.server);
    struct transport_channel *late = fixture_channel(closer.server);
    char details[TRANSPORT_DETAIL_BYTES];
    struct transport_call *call;
    struct listener l;

    listener_init(&l);
    ck_assert_int_eq(listener_start(&l, ch, "/t.T/Hold", fixture_text(""), 20000), 0);
    call = tally_take();
    ck_assert_int_eq(pthread_create(&closer.thread, NULL, close_server, &closer), 0);
    /* No new ones, on a new connection or on the old one; both are told why. */
    sleep_ms(100);
    ck_assert_int_eq(
        transport_unary(late, "/t.T/Echo", fixture_text(""), 5000, false, NULL, details),
        TRANSPORT_UNAVAILABLE);
    ck_assert_str_eq(details, "draining");
    ck_assert_int_eq(transport_unary(ch, "/t.T/Echo", fixture_text(""), 5000, false, NULL, details),
                     TRANSPORT_UNAVAILABLE);
    ck_assert_str_eq(details, "draining");
    ck_assert_int_eq(transport_health(late, "t.T", 5000), 0);
    ck_assert_int_eq(listener_get(&l, &l.n_ends), 0);
    ck_assert_int_eq(transport_call_send(call, fixture_text("last words")), 0);
    transport_call_finish(call, TRANSPORT_OK, NULL);
    transport_call_unref(call);
    pthread_join(closer.thread, NULL);
    ck_assert_int_lt(closer.took_ms, 5000);
    ck_assert(listener_wait(&l, 5000));
    ck_assert_int_eq(l.code, TRANSPORT_OK);
    ck_assert_int_eq(l.n_messages, 1);
    ck_assert_int_eq(tally.cancelled, 0);
    ck_assert_int_eq(tally.done, 1);
    listener_release(&l);
    transport_channel_close(ch);
    transport_channel_close(late);
}
END_TEST

START_TEST(a_call_past_the_grace_is_cancelled_and_waited_for)
{
    struct closer closer = {.server = fixture_server("127.0.0.1:0", 0, 0, 0, 0), .grace_ms = 200};
    struct transport_channel *ch = fixture_channel(closer.server);
    struct transport_call *call;
    int64_t start = now_ms();
    struct listener l;

    listener_init(&l);
    ck_assert_int_eq(listener_start(&l, ch, "/t.T/Hold", fixture_text(""), 20000), 0);
    call = tally_take();
    ck_assert_int_eq(pthread_create(&closer.thread, NULL, close_server, &closer), 0);
    ck_assert(listener_wait(&l, 5000));
    ck_assert_int_ge(now_ms() - start, 199);
    ck_assert_int_eq(l.code, TRANSPORT_UNAVAILABLE);
    ck_assert(tally_wait(&tally.cancelled, 1));
    /* An owner that is late, and does all it may, though the server has long been waiting. */
    sleep_ms(100);
    ck_assert_int_eq(transport_call_send(call, fixture_payload(0, 1000)), TRANSPORT_ERR_CLOSED);
    ck_assert(transport_call_cancelled(call));
    transport_call_finish(call, TRANSPORT_OK, NULL);
    ck_assert(tally_wait(&tally.done, 1));
    ck_assert_int_eq(transport_call_send(call, fixture_payload(0, 1000)), TRANSPORT_ERR_CLOSED);
    transport_call_abort(call, TRANSPORT_INTERNAL, "");
    ck_assert(strncmp(transport_call_peer(call), "ipv4:", 5) == 0);
    transport_call_unref(call);
    pthread_join(closer.thread, NULL);
    ck_assert_int_ge(closer.took_ms, 280);
    ck_assert_int_eq(tally_get(&tally.released), 2);
    listener_release(&l);
    transport_channel_close(ch);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("transport server");
    TCase *server = tcase_create("server");
    SRunner *runner;
    int failed;

    tcase_add_checked_fixture(server, setup, teardown);
    tcase_set_timeout(server, 120);
    tcase_add_loop_test(server, a_port_in_use_is_named, 0, 2);
    tcase_add_loop_test(server, an_address_that_is_none_is_named, 0, 11);
    tcase_add_loop_test(server, a_server_listens_on_names_and_wildcards, 0, 3);
    tcase_add_loop_test(server, a_method_that_cannot_be_served_is_refused, 0, 4);
    tcase_add_test(server, nobody_there_is_unavailable_at_once);
    tcase_add_test(server, wait_for_ready_waits_for_a_server_to_come);
    tcase_add_test(server, a_server_of_several_threads_serves_all);
    tcase_add_test(server, a_call_that_ends_within_the_grace_ends_well);
    tcase_add_test(server, a_call_past_the_grace_is_cancelled_and_waited_for);
    suite_add_tcase(suite, server);
    runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

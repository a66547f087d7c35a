/* Goal: calls between one server and one channel in a process do what transport.h says: messages,
 * statuses, deadlines, cancellation, limits, health.  Method: the server and the listener of
 * transport_fixture, over loopback.  Each test runs in a process of its own, forked before gRPC is
 * started there. */
#include "transport_fixture.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct transport_server *server;
static struct transport_channel *channel;

static void setup(void)
{
    transport_start();
    server = fixture_server("127.0.0.1:0", 0, 0, 0, 0);
    channel = fixture_channel(server);
}

static void teardown(void)
{
    transport_channel_close(channel);
    transport_server_close(server, 1000);
    transport_stop();
}

START_TEST(a_unary_call_gets_its_reply)
{
    struct transport_message *reply = NULL;
    char details[TRANSPORT_DETAIL_BYTES];
    int code;

    code =
        transport_unary(channel, "/t.T/Echo", fixture_text("hello"), 5000, false, &reply, details);
    ck_assert_int_eq(code, TRANSPORT_OK);
    ck_assert_str_eq(details, "");
    ck_assert_uint_eq(transport_message_bytes(reply), 5);
    ck_assert_mem_eq(transport_message_flat(reply), "hello", 5);
    ck_assert_ptr_eq(transport_message_flat(reply), transport_message_flat(reply));
    transport_message_unref(reply);
    ck_assert(tally_wait(&tally.done, 1));
    ck_assert_int_eq(tally_get(&tally.cancelled), 0);
    ck_assert(strncmp(tally.peer, "ipv4:127.0.0.1:", 15) == 0);
}
END_TEST

START_TEST(streamed_messages_come_in_order)
{
    static const int sizes[] = {0, 1, 2, 100, 1000};
    struct listener l;
    char n[16];

    listener_init(&l);
    snprintf(n, sizeof(n), "%d", sizes[_i]);
    ck_assert_int_eq(listener_start(&l, channel, "/t.T/Count", fixture_text(n), 20000), 0);
    ck_assert(listener_wait(&l, 20000));
    ck_assert_int_eq(l.code, TRANSPORT_OK);
    ck_assert_int_eq(l.n_messages, sizes[_i]);
    ck_assert(l.in_order);
    ck_assert(tally_wait(&tally.done, 1));
    ck_assert_int_eq(l.after_end, 0);
    listener_release(&l);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("transport");
    TCase *calls = tcase_create("calls");
    SRunner *runner;
    int failed;

    tcase_add_checked_fixture(calls, setup, teardown);
    tcase_set_timeout(calls, 60);
    tcase_add_test(calls, a_unary_call_gets_its_reply);
    tcase_add_loop_test(calls, streamed_messages_come_in_order, 0, 5);
    suite_add_tcase(suite, calls);
    runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

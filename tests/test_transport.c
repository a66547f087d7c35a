/* Goal: calls between one server and one channel in a process do what transport.h says: messages,
 * statuses, deadlines, cancellation, limits, health.  Method: the server and the listener of
 * transport_fixture, over loopback.  Each test runs in a process of its own, forked before gRPC is
 * started there. */
#include "transport_fixture.h"

#include <check.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static struct transport_server *server;
static struct transport_channel *channel;

static void start(uint32_t max_calls, uint32_t queue_bytes)
{
    transport_start();
    server = fixture_server("127.0.0.1:0", max_calls, 0, queue_bytes, 0);
    channel = fixture_channel(server);
}

static void setup(void)
{
    start(0, 0);
}

static void setup_narrow(void)
{
    start(4, 256 * 1024);
}

static void teardown(void)
{
    transport_channel_close(channel);
    transport_server_close(server, 1000);
    transport_stop();
}

static void sleep_ms(long ms)
{
    struct timespec t = {ms / 1000, ms % 1000 * 1000000};

    nanosleep(&t, NULL);
}

/* ---- Messages ---- */

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
    transport_message_unref(reply);
    ck_assert(tally_wait(&tally.done, 1));
    ck_assert_int_eq(tally_get(&tally.cancelled), 0);
    ck_assert(strncmp(tally.peer, "ipv4:127.0.0.1:", 15) == 0);
}
END_TEST

START_TEST(messages_of_any_size_come_whole)
{
    static const size_t sizes[] = {0, 1, 23, 24, 4095, 16384, 65537, 4 * 1024 * 1024};
    struct transport_message *reply = NULL;
    struct iovec pieces[2048];
    size_t size = sizes[_i], n, i, total = 0;
    uint8_t *bytes = malloc(size + 1);
    const uint8_t *flat;

    for (i = 0; i < size; i++)
        bytes[i] = (uint8_t)(i * 7 + i / 251);
    ck_assert_int_eq(
        transport_unary(channel, "/t.T/Echo", fixture_out(bytes, size), 5000, false, &reply, NULL),
        TRANSPORT_OK);
    ck_assert_uint_eq(transport_message_bytes(reply), size);
    n = transport_message_pieces(reply, pieces, 2048);
    ck_assert_uint_le(n, 2048);
    ck_assert_uint_eq(transport_message_pieces(reply, NULL, 0), n);
    for (i = 0; i < n; total += pieces[i++].iov_len)
        ck_assert(memcmp(pieces[i].iov_base, bytes + total, pieces[i].iov_len) == 0);
    ck_assert_uint_eq(total, size);
    transport_message_ref(reply);
    flat = transport_message_flat(reply);
    ck_assert(size == 0 || memcmp(flat, bytes, size) == 0);
    ck_assert_ptr_eq(transport_message_flat(reply), flat);
    transport_message_unref(reply);
    transport_message_unref(reply);
    free(bytes);
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

START_TEST(the_next_message_is_read_only_when_asked_for)
{
    struct listener l;
    int i;

    listener_init(&l);
    l.by_hand = true;
    ck_assert_int_eq(listener_start(&l, channel, "/t.T/Count", fixture_text("4"), 20000), 0);
    for (i = 1; i <= 4; i++) {
        ck_assert(listener_wait_messages(&l, i));
        sleep_ms(20);
        ck_assert_int_eq(listener_get(&l, &l.n_messages), i);
        transport_request_next(l.request);
    }
    ck_assert(listener_wait(&l, 5000));
    ck_assert_int_eq(l.code, TRANSPORT_OK);
    transport_request_next(l.request);
    transport_request_cancel(l.request);
    sleep_ms(20);
    ck_assert_int_eq(l.after_end, 0);
    listener_release(&l);
}
END_TEST

START_TEST(garbage_reaches_the_handler_unharmed)
{
    uint8_t garbage[64];
    struct listener l;
    size_t i;

    for (i = 0; i < sizeof(garbage); i++)
        garbage[i] = (uint8_t)(255 - i * 5);
    listener_init(&l);
    ck_assert_int_eq(listener_start(&l, channel, "/t.T/Drop", fixture_out(garbage, 64), 5000), 0);
    ck_assert(listener_wait(&l, 5000));
    pthread_mutex_lock(&tally.lock);
    ck_assert_uint_eq(tally.n_request, 64);
    ck_assert_mem_eq(tally.request, garbage, 64);
    pthread_mutex_unlock(&tally.lock);
    listener_release(&l);
}
END_TEST

/* ---- Payloads ---- */

START_TEST(payloads_come_unharmed_and_are_released_once)
{
    struct listener l;

    listener_init(&l);
    ck_assert_int_eq(listener_start(&l, channel, "/t.T/Payload", fixture_text("100"), 20000), 0);
    ck_assert(listener_wait(&l, 20000));
    ck_assert_int_eq(l.code, TRANSPORT_OK);
    ck_assert_int_eq(l.n_messages, 100);
    ck_assert(l.in_order && l.unharmed);
    ck_assert(tally_wait(&tally.released, 100));
    ck_assert(tally_wait(&tally.done, 1));
    listener_release(&l);
    transport_channel_close(channel);
    transport_server_close(server, 1000);
    ck_assert_int_eq(tally_get(&tally.released), 100);
    server = NULL;
    channel = NULL;
}
END_TEST

START_TEST(payloads_of_a_cancelled_call_are_released_once)
{
    struct listener l;

    listener_init(&l);
    l.by_hand = true;
    ck_assert_int_eq(listener_start(&l, channel, "/t.T/Payload", fixture_text("100"), 20000), 0);
    ck_assert(listener_wait_messages(&l, 1));
    transport_request_cancel(l.request);
    transport_request_cancel(l.request);
    ck_assert(listener_wait(&l, 5000));
    ck_assert_int_eq(l.code, TRANSPORT_CANCELLED);
    ck_assert(tally_wait(&tally.released, 100));
    ck_assert(tally_wait(&tally.done, 1));
    listener_release(&l);
    transport_channel_close(channel);
    transport_server_close(server, 1000);
    ck_assert_int_eq(tally_get(&tally.released), 100);
    server = NULL;
    channel = NULL;
}
END_TEST

START_TEST(an_unsent_payload_is_released_once)
{
    struct transport_out *out = fixture_payload(1, 1000);

    ck_assert_uint_eq(transport_out_bytes(out), 1004);
    transport_out_free(out);
    ck_assert_int_eq(tally.released, 1);
    transport_out_free(NULL);
}
END_TEST

static void count_release(void *owner)
{
    atomic_fetch_add((atomic_int *)owner, 1);
}

START_TEST(a_request_may_have_many_payloads)
{
    static uint8_t data[TRANSPORT_MAX_PAYLOADS];
    struct transport_out *out = fixture_text("head");
    struct transport_message *reply = NULL;
    atomic_int n_released = 0;
    int i;

    for (i = 0; i < TRANSPORT_MAX_PAYLOADS - 1; i++) {
        data[i] = (uint8_t)i;
        ck_assert_int_eq(transport_out_payload(out, &data[i], 1, count_release, &n_released), 0);
    }
    ck_assert_int_eq(transport_out_payload(out, data, 1, count_release, &n_released),
                     TRANSPORT_ERR_INVALID);
    ck_assert_int_eq(n_released, 0);
    ck_assert_int_eq(transport_unary(channel, "/t.T/Echo", out, 5000, false, &reply, NULL), 0);
    ck_assert_uint_eq(transport_message_bytes(reply), 4 + TRANSPORT_MAX_PAYLOADS - 1);
    ck_assert_mem_eq(transport_message_flat(reply) + 4, data, TRANSPORT_MAX_PAYLOADS - 1);
    transport_message_unref(reply);
    for (i = 0; i < 100 && n_released < TRANSPORT_MAX_PAYLOADS - 1; i++)
        sleep_ms(20); /* perhaps on another thread */
    transport_channel_close(channel);
    channel = NULL;
    ck_assert_int_eq(n_released, TRANSPORT_MAX_PAYLOADS - 1);
}
END_TEST

/* ---- Statuses ---- */

static void check_status(const char *request, int code, const char *details)
{
    struct listener l;

    listener_init(&l);
    ck_assert_int_eq(listener_start(&l, channel, "/t.T/Fail", fixture_text(request), 5000), 0);
    ck_assert(listener_wait(&l, 5000));
    ck_assert_int_eq(l.code, code);
    ck_assert_str_eq(l.details, details);
    ck_assert_int_eq(l.n_messages, 0);
    listener_release(&l);
}

START_TEST(a_status_comes_with_its_details)
{
    check_status("5 no such session", TRANSPORT_NOT_FOUND, "no such session");
    check_status("3 100 % \xc3\xbc\xe2\x82\xac\n", TRANSPORT_INVALID_ARGUMENT,
                 "100 % \xc3\xbc\xe2\x82\xac\n");
    check_status("16", TRANSPORT_UNAUTHENTICATED, "");
    check_status("99 no such code", TRANSPORT_UNKNOWN, "no such code");
    check_status("9 not\xff utf\xc3", TRANSPORT_FAILED_PRECONDITION, "not? utf?");
    ck_assert_str_eq(transport_status_name(TRANSPORT_UNAVAILABLE), "UNAVAILABLE");
    ck_assert_str_eq(transport_status_name(17), "?");
    ck_assert_str_eq(transport_status_name(-1), "?");
}
END_TEST

START_TEST(long_details_are_cut_at_a_character)
{
    char request[4096] = "8 x", details[TRANSPORT_DETAIL_BYTES] = "x";
    size_t i;

    for (i = 3; i + 2 < sizeof(request); i += 2)
        memcpy(request + i, "\xc3\xa4", 3);
    /* 1 + 2 * 511 = 1023 */
    for (i = 1; i + 2 < sizeof(details); i += 2)
        memcpy(details + i, "\xc3\xa4", 3);
    check_status(request, TRANSPORT_RESOURCE_EXHAUSTED, details);
    memmove(request + 2, request + 3, sizeof(request) - 3);
    details[0] = '\0';
    for (i = 0; i + 2 < sizeof(details); i += 2)
        memcpy(details + i, "\xc3\xa4", 3);
    check_status(request, TRANSPORT_RESOURCE_EXHAUSTED, details);
}
END_TEST

START_TEST(an_unknown_method_is_unimplemented)
{
    struct transport_message *reply = NULL;
    char details[TRANSPORT_DETAIL_BYTES];
    int i;

    for (i = 0; i < 20; i++) {
        ck_assert_int_eq(
            transport_unary(channel, "/t.T/None", fixture_text(""), 5000, false, &reply, details),
            TRANSPORT_UNIMPLEMENTED);
        ck_assert_str_eq(details, "unknown method /t.T/None");
        ck_assert_ptr_null(reply);
    }
}
END_TEST

START_TEST(a_call_dropped_or_without_a_reply_is_an_internal_error)
{
    struct transport_message *reply = NULL;
    char details[TRANSPORT_DETAIL_BYTES];

    ck_assert_int_eq(
        transport_unary(channel, "/t.T/Drop", fixture_text(""), 5000, false, &reply, details),
        TRANSPORT_INTERNAL);
    ck_assert_str_eq(details, "the call was dropped without a status");
    ck_assert_int_eq(
        transport_unary(channel, "/t.T/Silent", fixture_text(""), 5000, false, &reply, details),
        TRANSPORT_INTERNAL);
    ck_assert_str_eq(details, "the call was finished without a reply");
    ck_assert_int_eq(
        transport_unary(channel, "/t.T/Count", fixture_text("2"), 5000, false, &reply, details),
        TRANSPORT_INTERNAL);
    ck_assert_str_eq(details, "more than one reply");
    ck_assert_int_eq(
        transport_unary(channel, "/t.T/Count", fixture_text("0"), 5000, false, &reply, details),
        TRANSPORT_INTERNAL);
    ck_assert_str_eq(details, "no reply");
    ck_assert_ptr_null(reply);
}
END_TEST

START_TEST(a_message_over_the_limit_is_refused_by_either_side)
{
    size_t n = TRANSPORT_MIN_MESSAGE_BYTES + 1;
    uint8_t *bytes = calloc(1, n);
    struct transport_message *reply = NULL;
    struct transport_call *call;
    char details[TRANSPORT_DETAIL_BYTES];
    struct listener l;

    ck_assert_int_eq(
        transport_unary(channel, "/t.T/Echo", fixture_out(bytes, n), 5000, false, &reply, details),
        TRANSPORT_RESOURCE_EXHAUSTED);
    ck_assert_ptr_nonnull(strstr(details, "larger than max"));
    ck_assert_int_eq(tally_get(&tally.accepted), 0);

    listener_init(&l);
    ck_assert_int_eq(listener_start(&l, channel, "/t.T/Hold", fixture_text(""), 5000), 0);
    call = tally_take();
    ck_assert_int_eq(transport_call_send(call, fixture_out(bytes, n)), 0);
    ck_assert(listener_wait(&l, 5000));
    ck_assert_int_eq(l.code, TRANSPORT_RESOURCE_EXHAUSTED);
    ck_assert_ptr_nonnull(strstr(l.details, "larger than max"));
    ck_assert(tally_wait(&tally.cancelled, 1));
    transport_call_finish(call, TRANSPORT_OK, NULL);
    transport_call_unref(call);
    listener_release(&l);
    free(bytes);
}
END_TEST

START_TEST(a_second_reply_to_a_unary_call_is_invalid)
{
    struct transport_call *call;
    struct listener l;

    listener_init(&l);
    ck_assert_int_eq(listener_start(&l, channel, "/t.T/HoldUnary", fixture_text(""), 5000), 0);
    call = tally_take();
    ck_assert_int_eq(transport_call_send(call, fixture_text("one")), 0);
    ck_assert_int_eq(transport_call_send(call, fixture_text("two")), TRANSPORT_ERR_INVALID);
    transport_call_finish(call, TRANSPORT_OK, NULL);
    ck_assert_int_eq(transport_call_send(call, fixture_text("three")), TRANSPORT_ERR_CLOSED);
    transport_call_unref(call);
    ck_assert(listener_wait(&l, 5000));
    ck_assert_int_eq(l.code, TRANSPORT_OK);
    ck_assert_int_eq(l.n_messages, 1);
    ck_assert_mem_eq(l.last, "one", 3);
    listener_release(&l);
}
END_TEST

/* ---- Deadlines and cancellation ---- */

START_TEST(a_deadline_ends_both_sides)
{
    int64_t start_ms = now_ms();
    struct transport_call *call;
    struct listener l;

    listener_init(&l);
    ck_assert_int_eq(listener_start(&l, channel, "/t.T/Hold", fixture_text(""), 150), 0);
    call = tally_take();
    ck_assert_int_gt(transport_call_deadline(call) / 1000000, start_ms);
    /* gRPC rounds what is left up on its way. */
    ck_assert_int_le(transport_call_deadline(call) / 1000000, now_ms() + 200);
    ck_assert(listener_wait(&l, 5000));
    ck_assert_int_eq(l.code, TRANSPORT_DEADLINE_EXCEEDED);
    ck_assert_int_ge(now_ms() - start_ms, 149);
    ck_assert_int_lt(now_ms() - start_ms, 2000);
    ck_assert(tally_wait(&tally.cancelled, 1));
    ck_assert(transport_call_cancelled(call));
    ck_assert_int_eq(transport_call_send(call, fixture_text("late")), TRANSPORT_ERR_CLOSED);
    sleep_ms(20);
    ck_assert_int_eq(tally_get(&tally.done), 0); /* the owner has not finished it yet */
    transport_call_finish(call, TRANSPORT_OK, NULL);
    ck_assert(tally_wait(&tally.done, 1));
    transport_call_unref(call);
    listener_release(&l);
}
END_TEST

START_TEST(a_deadline_of_no_time_is_invalid)
{
    struct listener l;

    listener_init(&l);
    ck_assert_int_eq(listener_start(&l, channel, "/t.T/Hold", fixture_payload(0, 10), 0),
                     TRANSPORT_ERR_INVALID);
    ck_assert_int_eq(listener_start(&l, channel, "no-slash", fixture_payload(0, 10), 100),
                     TRANSPORT_ERR_INVALID);
    ck_assert_int_eq(tally_get(&tally.released), 2);
    ck_assert_ptr_null(l.request);
    ck_assert_int_eq(l.n_ends, 0);
    listener_release(&l);
}
END_TEST

START_TEST(a_client_s_cancel_reaches_the_owner)
{
    struct transport_call *call;
    struct listener l;

    listener_init(&l);
    ck_assert_int_eq(listener_start(&l, channel, "/t.T/Hold", fixture_text(""), 5000), 0);
    call = tally_take();
    transport_request_cancel(l.request);
    ck_assert(listener_wait(&l, 1000));
    ck_assert_int_eq(l.code, TRANSPORT_CANCELLED);
    ck_assert(tally_wait(&tally.cancelled, 1));
    transport_call_abort(call, TRANSPORT_INTERNAL, "nobody hears it");
    transport_call_finish(call, TRANSPORT_OK, NULL);
    transport_call_unref(call);
    ck_assert(tally_wait(&tally.done, 1));
    ck_assert_int_eq(tally_get(&tally.cancelled), 1);
    listener_release(&l);
}
END_TEST

static void *finish_soon(void *arg)
{
    struct transport_call *call = arg;

    transport_call_send(call, fixture_payload(0, 100));
    transport_call_finish(call, TRANSPORT_OK, NULL);
    transport_call_unref(call);
    return NULL;
}

START_TEST(a_finish_that_meets_a_cancel_ends_the_call_once)
{
    struct transport_call *call;
    struct listener l;
    pthread_t thread;
    int i;

    for (i = 0; i < 300; i++) {
        listener_init(&l);
        ck_assert_int_eq(listener_start(&l, channel, "/t.T/Hold", fixture_text(""), 20000), 0);
        call = tally_take();
        transport_call_ref(call);
        ck_assert_int_eq(pthread_create(&thread, NULL, finish_soon, call), 0);
        transport_request_cancel(l.request);
        if (i % 3 == 0)
            transport_call_abort(call, TRANSPORT_ABORTED, "");
        transport_call_unref(call);
        ck_assert(listener_wait(&l, 5000));
        ck_assert(l.code == TRANSPORT_OK || l.code == TRANSPORT_CANCELLED ||
                  l.code == TRANSPORT_ABORTED);
        pthread_join(thread, NULL);
        ck_assert(tally_wait(&tally.done, i + 1));
        ck_assert_int_eq(tally_get(&tally.done), i + 1);
        listener_release(&l);
    }
    ck_assert(tally_wait(&tally.released, 300));
}
END_TEST

START_TEST(a_cancel_before_the_call_is_out_ends_it)
{
    struct listener l;

    listener_init(&l);
    ck_assert_int_eq(listener_start(&l, channel, "/t.T/Count", fixture_text("10"), 5000), 0);
    transport_request_cancel(l.request);
    ck_assert(listener_wait(&l, 1000));
    ck_assert(l.code == TRANSPORT_CANCELLED || l.code == TRANSPORT_OK);
    listener_release(&l);
}
END_TEST

START_TEST(an_owner_may_finish_from_another_thread_after_queued_messages)
{
    struct transport_call *call;
    struct listener l;
    uint32_t i;

    listener_init(&l);
    ck_assert_int_eq(listener_start(&l, channel, "/t.T/Hold", fixture_text(""), 5000), 0);
    call = tally_take();
    for (i = 0; i < 50; i++)
        ck_assert_int_eq(transport_call_send(call, fixture_out(&i, sizeof(i))), 0);
    transport_call_finish(call, TRANSPORT_ABORTED, "after the fifty");
    transport_call_unref(call);
    ck_assert(listener_wait(&l, 5000));
    ck_assert_int_eq(l.code, TRANSPORT_ABORTED);
    ck_assert_str_eq(l.details, "after the fifty");
    ck_assert_int_eq(l.n_messages, 50);
    ck_assert(l.in_order);
    listener_release(&l);
}
END_TEST

START_TEST(closing_a_channel_ends_its_requests)
{
    struct transport_call *call;
    struct listener l[3];
    int i;

    for (i = 0; i < 3; i++) {
        listener_init(&l[i]);
        ck_assert_int_eq(listener_start(&l[i], channel, "/t.T/Hold", fixture_text(""), 60000), 0);
        call = tally_take();
        transport_call_unref(transport_call_ref(call));
        if (i == 2)
            transport_channel_close(channel);
        channel = i == 2 ? NULL : channel;
        if (i < 2)
            ck_assert_int_eq(listener_get(&l[i], &l[i].n_ends), 0);
        /* Kept till the close below waits for them: finished when cancelled. */
        if (i == 2)
            ck_assert(tally_wait(&tally.cancelled, 1));
        transport_call_unref(call);
        if (i == 2)
            ck_assert_int_eq(l[i].code, TRANSPORT_CANCELLED);
    }
    for (i = 0; i < 3; i++) {
        ck_assert_int_eq(l[i].n_ends, 1);
        transport_request_cancel(l[i].request); /* the channel is gone: nothing */
        transport_request_next(l[i].request);
        listener_release(&l[i]);
    }
}
END_TEST

/* ---- Back-pressure (a queue of 256 KiB) ---- */

enum { PIECE = 64 * 1024 };

/* Send until the queue is full and stays so: gRPC itself takes some megabytes.  How many were
 * taken; *n_refused: how many not. */
static uint32_t fill(struct transport_call *call, int *n_refused)
{
    int64_t until = now_ms() + 10000;
    int n_full = 0;
    uint32_t n = 0;

    *n_refused = 0;
    while (n_full < 4) {
        ck_assert_int_lt(now_ms(), until);
        if (transport_call_send(call, fixture_payload(n, PIECE)) == 0) {
            n++;
            n_full = 0;
        } else {
            n_full++;
            ++*n_refused;
            sleep_ms(20);
        }
    }
    return n;
}

/* From now on every message is read. */
static void read_on(struct listener *l)
{
    pthread_mutex_lock(&l->lock);
    l->by_hand = false;
    pthread_mutex_unlock(&l->lock);
    transport_request_next(l->request);
}

START_TEST(a_full_queue_says_so_and_on_sent_says_when_there_is_room)
{
    struct transport_call *call;
    struct listener l;
    int n_sent, n_refused;
    uint32_t n;

    listener_init(&l);
    l.by_hand = true;
    ck_assert_int_eq(listener_start(&l, channel, "/t.T/Hold", fixture_text(""), 20000), 0);
    call = tally_take();
    n = fill(call, &n_refused);
    ck_assert_uint_le(transport_call_queued(call), 256 * 1024);
    ck_assert_uint_gt(transport_call_queued(call), 256 * 1024 - 2 * PIECE);
    n_sent = tally_get(&tally.sent);
    ck_assert_int_lt(n_sent, (int)n);
    read_on(&l);
    ck_assert(tally_wait(&tally.sent, n_sent + 1));
    ck_assert_int_eq(transport_call_send(call, fixture_payload(n, PIECE)), 0);
    transport_call_finish(call, TRANSPORT_OK, NULL);
    transport_call_unref(call);
    ck_assert(listener_wait(&l, 10000));
    ck_assert_int_eq(l.code, TRANSPORT_OK);
    ck_assert_int_eq(l.n_messages, (int)n + 1);
    ck_assert(l.in_order && l.unharmed);
    listener_release(&l);
}
END_TEST

START_TEST(one_message_always_fits_an_empty_queue)
{
    struct transport_call *call;
    struct listener l;

    listener_init(&l);
    ck_assert_int_eq(listener_start(&l, channel, "/t.T/Hold", fixture_text(""), 20000), 0);
    call = tally_take();
    ck_assert_int_eq(transport_call_send(call, fixture_payload(0, 1024 * 1024)), 0);
    transport_call_finish(call, TRANSPORT_OK, NULL);
    transport_call_unref(call);
    ck_assert(listener_wait(&l, 5000));
    ck_assert_int_eq(l.code, TRANSPORT_OK);
    ck_assert_uint_eq(l.n_bytes, 4 + 1024 * 1024);
    listener_release(&l);
}
END_TEST

START_TEST(an_abort_overtakes_what_is_stuck)
{
    struct transport_call *call;
    struct listener l;
    int64_t start_ms;
    int n_refused;
    uint32_t n;

    listener_init(&l);
    l.by_hand = true;
    ck_assert_int_eq(listener_start(&l, channel, "/t.T/Hold", fixture_text(""), 20000), 0);
    call = tally_take();
    n = fill(call, &n_refused);
    start_ms = now_ms();
    if (_i == 1) /* a finish that waits is overtaken, too */
        transport_call_finish(call, TRANSPORT_OK, NULL);
    transport_call_abort(call, TRANSPORT_UNAVAILABLE, "no more \xe2\x82\xac");
    transport_call_abort(call, TRANSPORT_DATA_LOSS, "the second does nothing");
    ck_assert_int_eq(transport_call_send(call, fixture_payload(n, PIECE)), TRANSPORT_ERR_CLOSED);
    transport_call_unref(call);
    ck_assert(tally_wait(&tally.done, 1)); /* though nobody reads */
    read_on(&l);
    ck_assert(listener_wait(&l, 5000));
    ck_assert_int_lt(now_ms() - start_ms, 2000);
    ck_assert_int_le(l.n_messages, (int)n - 2); /* 3 were queued, 1 of them being written */
    ck_assert(l.in_order && l.unharmed);
    ck_assert_int_eq(l.code, TRANSPORT_UNAVAILABLE);
    ck_assert_str_eq(l.details, "no more \xe2\x82\xac");
    ck_assert_int_eq(tally_get(&tally.cancelled), 0);
    ck_assert(tally_wait(&tally.released, (int)n + n_refused + 1));
    listener_release(&l);
}
END_TEST

START_TEST(an_abort_with_nothing_queued_carries_its_status)
{
    struct transport_call *call;
    struct listener l;

    listener_init(&l);
    ck_assert_int_eq(listener_start(&l, channel, "/t.T/Hold", fixture_text(""), 20000), 0);
    call = tally_take();
    transport_call_abort(call, TRANSPORT_FAILED_PRECONDITION, "another model");
    transport_call_unref(call);
    ck_assert(listener_wait(&l, 5000));
    ck_assert_int_eq(l.code, TRANSPORT_FAILED_PRECONDITION);
    ck_assert_str_eq(l.details, "another model");
    listener_release(&l);
}
END_TEST

START_TEST(a_call_past_max_calls_is_refused_by_name)
{
    struct transport_call *calls[4];
    struct listener l[5];
    char details[TRANSPORT_DETAIL_BYTES];
    int i;

    for (i = 0; i < 4; i++) {
        listener_init(&l[i]);
        ck_assert_int_eq(listener_start(&l[i], channel, "/t.T/Hold", fixture_text(""), 20000), 0);
        calls[i] = tally_take();
    }
    ck_assert_uint_eq(transport_server_n_calls(server), 4);
    ck_assert_int_eq(
        transport_unary(channel, "/t.T/Echo", fixture_text(""), 5000, false, NULL, details),
        TRANSPORT_RESOURCE_EXHAUSTED);
    ck_assert_str_eq(details, "the server has as many calls as it takes");
    ck_assert_int_eq(transport_health(channel, "", 5000), 0); /* health answers all the same */
    transport_call_finish(calls[0], TRANSPORT_OK, NULL);
    transport_call_unref(calls[0]);
    ck_assert(tally_wait(&tally.done, 1));
    for (i = 0; i < 100 && transport_server_n_calls(server) > 3; i++)
        sleep_ms(10);
    ck_assert_int_eq(
        transport_unary(channel, "/t.T/Echo", fixture_text(""), 5000, false, NULL, details),
        TRANSPORT_OK);
    for (i = 1; i < 4; i++) {
        transport_call_finish(calls[i], TRANSPORT_OK, NULL);
        transport_call_unref(calls[i]);
    }
    for (i = 0; i < 4; i++) {
        ck_assert(listener_wait(&l[i], 5000));
        listener_release(&l[i]);
    }
}
END_TEST

/* ---- Health ---- */

START_TEST(health_says_what_was_set)
{
    char details[TRANSPORT_DETAIL_BYTES];

    ck_assert_int_eq(transport_health(channel, "", 5000), 0);
    transport_server_set_serving(server, true);
    ck_assert_int_eq(transport_health(channel, "", 5000), 1);
    ck_assert_int_eq(transport_health(channel, "t.T", 5000), 1);
    ck_assert_int_eq(transport_health(channel, "t.Other", 5000), -TRANSPORT_NOT_FOUND);
    transport_server_set_serving(server, false);
    ck_assert_int_eq(transport_health(channel, "t.T", 5000), 0);
    ck_assert_int_eq(transport_unary(channel, "/grpc.health.v1.Health/Check",
                                     fixture_text("\xff\xff"), 5000, false, NULL, details),
                     TRANSPORT_INVALID_ARGUMENT);
    ck_assert_int_eq(transport_unary(channel, "/grpc.health.v1.Health/Watch",
                                     fixture_text("\xff\xff"), 5000, false, NULL, details),
                     TRANSPORT_INVALID_ARGUMENT);
    ck_assert_uint_eq(transport_server_n_calls(server), 0);
}
END_TEST

START_TEST(a_watch_is_told_each_change)
{
    struct listener l, unknown;

    listener_init(&l);
    listener_init(&unknown);
    ck_assert_int_eq(listener_start(&l, channel, "/grpc.health.v1.Health/Watch",
                                    fixture_text("\x0a\x03t.T"), 20000),
                     0);
    ck_assert_int_eq(listener_start(&unknown, channel, "/grpc.health.v1.Health/Watch",
                                    fixture_text("\x0a\x01x"), 20000),
                     0);
    ck_assert(listener_wait_messages(&l, 1));
    ck_assert_mem_eq(l.last, "\x08\x02", 2);
    transport_server_set_serving(server, true);
    ck_assert(listener_wait_messages(&l, 2));
    ck_assert_mem_eq(l.last, "\x08\x01", 2);
    transport_server_set_serving(server, true); /* no change: no message */
    transport_server_set_serving(server, false);
    ck_assert(listener_wait_messages(&l, 3));
    ck_assert_mem_eq(l.last, "\x08\x02", 2);
    ck_assert(listener_wait_messages(&unknown, 1));
    ck_assert_mem_eq(unknown.last, "\x08\x03", 2);
    ck_assert_uint_eq(transport_server_n_calls(server), 0);
    transport_request_cancel(unknown.request);
    ck_assert(listener_wait(&unknown, 5000));
    ck_assert_int_eq(unknown.n_messages, 1);
    /* The last change, and the end, are told when the server closes. */
    transport_server_set_serving(server, true);
    ck_assert(listener_wait_messages(&l, 4));
    transport_server_close(server, 5000);
    server = NULL;
    ck_assert(listener_wait(&l, 5000));
    ck_assert_int_eq(l.code, TRANSPORT_UNAVAILABLE);
    ck_assert_int_eq(l.n_messages, 5);
    ck_assert_mem_eq(l.last, "\x08\x02", 2);
    listener_release(&l);
    listener_release(&unknown);
}
END_TEST

START_TEST(a_watch_too_many_is_refused)
{
    static struct listener l[65];
    int i;

    for (i = 0; i < 65; i++) {
        listener_init(&l[i]);
        ck_assert_int_eq(
            listener_start(&l[i], channel, "/grpc.health.v1.Health/Watch", fixture_text(""), 20000),
            0);
        ck_assert(i == 64 || listener_wait_messages(&l[i], 1));
    }
    ck_assert(listener_wait(&l[64], 5000));
    ck_assert_int_eq(l[64].code, TRANSPORT_RESOURCE_EXHAUSTED);
    ck_assert_str_eq(l[64].details, "too many watches");
    for (i = 0; i < 65; i++) {
        transport_request_cancel(l[i].request);
        ck_assert(listener_wait(&l[i], 5000));
        listener_release(&l[i]);
    }
}
END_TEST

/* ---- Many at once ---- */

enum { N_THREADS = 8, N_EACH = 25 };

static void *many(void *arg)
{
    static const char text[] = "100";
    struct transport_message *reply;
    struct listener streams[N_EACH];
    char words[32];
    int i, *bad = arg;

    for (i = 0; i < N_EACH; i++) {
        listener_init(&streams[i]);
        if (listener_start(&streams[i], channel, "/t.T/Count", fixture_text(text), 60000) < 0)
            ++*bad;
        snprintf(words, sizeof(words), "%p %d", arg, i);
        reply = NULL;
        if (transport_unary(channel, "/t.T/Echo", fixture_text(words), 60000, false, &reply,
                            NULL) != TRANSPORT_OK ||
            transport_message_bytes(reply) != strlen(words) ||
            memcmp(transport_message_flat(reply), words, strlen(words)) != 0)
            ++*bad;
        transport_message_unref(reply);
        if (i % 5 == 4)
            transport_request_cancel(streams[i].request);
    }
    for (i = 0; i < N_EACH; i++) {
        if (!listener_wait(&streams[i], 60000) || !streams[i].in_order ||
            (i % 5 != 4 && (streams[i].code != TRANSPORT_OK || streams[i].n_messages != 100)))
            ++*bad;
        listener_release(&streams[i]);
    }
    return NULL;
}

START_TEST(two_hundred_streams_from_eight_threads_all_end)
{
    pthread_t threads[N_THREADS];
    int bad[N_THREADS] = {0}, i;

    for (i = 0; i < N_THREADS; i++)
        ck_assert_int_eq(pthread_create(&threads[i], NULL, many, &bad[i]), 0);
    for (i = 0; i < N_THREADS; i++) {
        pthread_join(threads[i], NULL);
        ck_assert_int_eq(bad[i], 0);
    }
    ck_assert(tally_wait(&tally.done, tally_get(&tally.accepted)));
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("transport");
    TCase *calls = tcase_create("calls"), *narrow = tcase_create("narrow");
    SRunner *runner;
    int failed;

    tcase_add_checked_fixture(calls, setup, teardown);
    tcase_set_timeout(calls, 120);
    tcase_add_test(calls, a_unary_call_gets_its_reply);
    tcase_add_loop_test(calls, messages_of_any_size_come_whole, 0, 8);
    tcase_add_loop_test(calls, streamed_messages_come_in_order, 0, 5);
    tcase_add_test(calls, the_next_message_is_read_only_when_asked_for);
    tcase_add_test(calls, garbage_reaches_the_handler_unharmed);
    tcase_add_test(calls, payloads_come_unharmed_and_are_released_once);
    tcase_add_test(calls, payloads_of_a_cancelled_call_are_released_once);
    tcase_add_test(calls, an_unsent_payload_is_released_once);
    tcase_add_test(calls, a_request_may_have_many_payloads);
    tcase_add_test(calls, a_status_comes_with_its_details);
    tcase_add_test(calls, long_details_are_cut_at_a_character);
    tcase_add_test(calls, an_unknown_method_is_unimplemented);
    tcase_add_test(calls, a_call_dropped_or_without_a_reply_is_an_internal_error);
    tcase_add_test(calls, a_message_over_the_limit_is_refused_by_either_side);
    tcase_add_test(calls, a_second_reply_to_a_unary_call_is_invalid);
    tcase_add_test(calls, a_deadline_ends_both_sides);
    tcase_add_test(calls, a_deadline_of_no_time_is_invalid);
    tcase_add_test(calls, a_client_s_cancel_reaches_the_owner);
    tcase_add_test(calls, a_finish_that_meets_a_cancel_ends_the_call_once);
    tcase_add_test(calls, a_cancel_before_the_call_is_out_ends_it);
    tcase_add_test(calls, an_owner_may_finish_from_another_thread_after_queued_messages);
    tcase_add_test(calls, closing_a_channel_ends_its_requests);
    tcase_add_test(calls, health_says_what_was_set);
    tcase_add_test(calls, a_watch_is_told_each_change);
    tcase_add_test(calls, a_watch_too_many_is_refused);
    tcase_add_test(calls, two_hundred_streams_from_eight_threads_all_end);
    suite_add_tcase(suite, calls);
    tcase_add_checked_fixture(narrow, setup_narrow, teardown);
    tcase_set_timeout(narrow, 120);
    tcase_add_test(narrow, a_full_queue_says_so_and_on_sent_says_when_there_is_room);
    tcase_add_test(narrow, one_message_always_fits_an_empty_queue);
    tcase_add_loop_test(narrow, an_abort_overtakes_what_is_stuck, 0, 2);
    tcase_add_test(narrow, an_abort_with_nothing_queued_carries_its_status);
    tcase_add_test(narrow, a_call_past_max_calls_is_refused_by_name);
    suite_add_tcase(suite, narrow);
    runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

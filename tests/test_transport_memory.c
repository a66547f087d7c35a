/* Goal: without memory transport says so, and goes on when there is some again.  Method: malloc,
 * calloc and strdup are wrapped at link time, for our own code and not for gRPC's; one allocation
 * after the other fails, or every one from some point on. */
#include "transport/transport.h"

#include <check.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

void *__real_malloc(size_t n);
void *__real_calloc(size_t n, size_t size);
char *__real_strdup(const char *s);
void *__wrap_malloc(size_t n);
void *__wrap_calloc(size_t n, size_t size);
char *__wrap_strdup(const char *s);

static atomic_int countdown; /* the allocation that fails, counted down to 0; 0: none does */
static atomic_bool and_on;   /* and all after it */
static atomic_int n_failed;

static bool fails(void)
{
    int left = atomic_load(&countdown);

    while (left > 0) {
        if (left == 1 && atomic_load(&and_on))
            break;
        if (atomic_compare_exchange_weak(&countdown, &left, left - 1))
            break;
    }
    if (left != 1)
        return false;
    atomic_fetch_add(&n_failed, 1);
    return true;
}

void *__wrap_malloc(size_t n)
{
    return fails() ? NULL : __real_malloc(n);
}

void *__wrap_calloc(size_t n, size_t size)
{
    return fails() ? NULL : __real_calloc(n, size);
}

char *__wrap_strdup(const char *s)
{
    return fails() ? NULL : __real_strdup(s);
}

/* ---- A server that minds allocations ---- */

static void nothing(void *owner)
{
    (void)owner;
}

static void echo(void *user, struct transport_call *call, struct transport_message *request)
{
    static const uint8_t payload[1000];
    size_t n = transport_message_bytes(request);
    const uint8_t *bytes = transport_message_flat(request);
    struct transport_out *out;
    uint8_t *to;

    (void)user;
    out = bytes ? transport_out_new(n, &to) : NULL;
    if (out && n > 0)
        memcpy(to, bytes, n);
    if (out && transport_out_payload(out, payload, sizeof(payload), nothing, NULL) < 0) {
        transport_out_free(out);
        out = NULL;
    }
    if (out)
        transport_call_send(call, out);
    transport_call_finish(call, out ? TRANSPORT_OK : TRANSPORT_RESOURCE_EXHAUSTED,
                          out ? NULL : "no memory");
    transport_call_unref(call);
}

static const struct transport_method methods[] = {{"/t.T/Echo", TRANSPORT_UNARY, echo, NULL}};
static const char *const services[] = {"t.T", NULL};

static struct transport_server *server;
static struct transport_channel *channel;

/* Returns 0, or what an open returned. */
static int open_both(char *error)
{
    struct transport_server_config config = {
        .listen = "127.0.0.1:0", .methods = methods, .n_methods = 1, .services = services};
    struct transport_channel_config channel_config = {.max_message_bytes = 0};
    char target[32];
    int rc;

    server = NULL;
    channel = NULL;
    rc = transport_server_open(&config, &server, error);
    if (rc < 0)
        return rc;
    snprintf(target, sizeof(target), "127.0.0.1:%d", transport_server_port(server));
    channel_config.target = target;
    return transport_channel_open(&channel_config, &channel, error);
}

static void close_both(void)
{
    transport_channel_close(channel);
    transport_server_close(server, 1000);
}

static void watch_message(void *user, struct transport_request *r, struct transport_message *m)
{
    (void)user;
    (void)m;
    transport_request_cancel(r);
}

static void watch_ended(void *user, struct transport_request *r, int code, const char *details)
{
    (void)r;
    (void)details;
    atomic_store((atomic_int *)user, code);
}

/* A watch of health, cancelled at its first message; its code, or -1 if it could not be started. */
static int watch(void)
{
    static const struct transport_request_events events = {watch_message, watch_ended};
    struct timespec pause = {0, 100000};
    struct transport_request *r = NULL;
    struct transport_out *out;
    atomic_int code = -1;
    uint8_t *to;

    out = transport_out_new(0, &to);
    if (!out || transport_request_start(channel, "/grpc.health.v1.Health/Watch", out, 20000, false,
                                        &events, &code, &r) < 0)
        return -1;
    transport_request_unref(r);
    while (atomic_load(&code) == -1)
        nanosleep(&pause, NULL);
    return atomic_load(&code);
}

/* One of each.  Returns the code that is neither success nor says that there is no memory, or 0.
 * (An assertion of Check's would allocate.) */
static int try_calls(void)
{
    size_t n = 1004;
    struct transport_message *reply = NULL;
    struct transport_out *out;
    uint8_t *to;
    int code;

    out = transport_out_new(4, &to);
    if (out) {
        memcpy(to, "text", 4);
        code = transport_unary(channel, "/t.T/Echo", out, 20000, false, &reply, NULL);
        if (code == TRANSPORT_OK)
            n = transport_message_bytes(reply);
        transport_message_unref(reply);
        if (n != 1004 || (code != TRANSPORT_OK && code != TRANSPORT_RESOURCE_EXHAUSTED))
            return 1000 + code;
    }
    out = transport_out_new(0, &to);
    if (out) {
        code = transport_unary(channel, "/t.T/None", out, 20000, false, NULL, NULL);
        if (code != TRANSPORT_UNIMPLEMENTED && code != TRANSPORT_RESOURCE_EXHAUSTED)
            return 2000 + code;
    }
    code = watch();
    if (code != -1 && code != TRANSPORT_CANCELLED && code != TRANSPORT_RESOURCE_EXHAUSTED)
        return 3000 + code;
    code = transport_health(channel, "t.T", 20000);
    return code == 0 || code == -TRANSPORT_RESOURCE_EXHAUSTED ? 0 : 4000 - code;
}

static void all_is_well(void)
{
    struct transport_out *out;
    uint8_t *to;
    int i;

    for (i = 0; i < 20; i++) {
        out = transport_out_new(0, &to);
        ck_assert_int_eq(transport_unary(channel, "/t.T/Echo", out, 20000, false, NULL, NULL), 0);
        out = transport_out_new(0, &to);
        ck_assert_int_eq(transport_unary(channel, "/t.T/None", out, 20000, false, NULL, NULL),
                         TRANSPORT_UNIMPLEMENTED);
        ck_assert_int_eq(transport_health(channel, "t.T", 20000), 0);
        ck_assert_int_eq(watch(), TRANSPORT_CANCELLED);
    }
}

START_TEST(any_one_allocation_may_fail)
{
    char error[TRANSPORT_DETAIL_BYTES];
    int n, rc, code;

    transport_start();
    for (n = 1;; n++) {
        atomic_store(&n_failed, 0);
        atomic_store(&countdown, n);
        rc = open_both(error);
        code = rc == 0 ? try_calls() : 0;
        atomic_store(&countdown, 0);
        ck_assert_int_eq(code, 0);
        ck_assert(rc == 0 || rc == TRANSPORT_ERR_NOMEM);
        ck_assert((rc == 0) == (error[0] == '\0'));
        if (channel)
            all_is_well();
        close_both();
        if (atomic_load(&n_failed) == 0)
            break;
        ck_assert_int_eq(atomic_load(&n_failed), 1);
    }
    ck_assert_int_gt(n, 60);
    transport_stop();
}
END_TEST

START_TEST(a_server_recovers_when_memory_comes_back)
{
    char error[TRANSPORT_DETAIL_BYTES];
    int i, n, code = 0;

    transport_start();
    ck_assert_int_eq(open_both(error), 0);
    for (n = 1; n < 20; n++) {
        atomic_store(&and_on, true);
        for (i = 0; i < 20 && code == 0; i++) {
            atomic_store(&countdown, n);
            code = try_calls();
        }
        atomic_store(&countdown, 0);
        atomic_store(&and_on, false);
        ck_assert_int_eq(code, 0);
        all_is_well();
    }
    ck_assert_int_gt(atomic_load(&n_failed), 1000);
    close_both();
    transport_stop();
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("transport memory");
    TCase *memory = tcase_create("memory");
    SRunner *runner;
    int failed;

    tcase_set_timeout(memory, 200);
    tcase_add_test(memory, any_one_allocation_may_fail);
    tcase_add_test(memory, a_server_recovers_when_memory_comes_back);
    suite_add_tcase(suite, memory);
    runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

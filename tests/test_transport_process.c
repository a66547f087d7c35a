/* Goal: a peer that dies is noticed at once, by clients and by servers; clients that are not ours
 * are served.  Method: the other side is a process of its own, forked before gRPC is started here.
 */
#include "transport_fixture.h"

#include <check.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PYTHON "/usr/bin/python3" /* Debian's own, which has Debian's grpcio */

enum { NOTICE_MS = 1000 };

static void sleep_ms(long ms)
{
    struct timespec t = {ms / 1000, ms % 1000 * 1000000};

    nanosleep(&t, NULL);
}

static void send_number(int fd, int n)
{
    if (write(fd, &n, sizeof(n)) != sizeof(n))
        _exit(1);
}

static int receive_number(int fd)
{
    int n = 0;

    ck_assert_int_eq(read(fd, &n, sizeof(n)), sizeof(n));
    return n;
}

/* A process that runs body(in, out) between two pipes. */
struct process {
    pid_t pid;
    int to, from;
};

static void process_start(struct process *p, void (*body)(int in, int out))
{
    int to[2], from[2];

    ck_assert_int_eq(pipe(to), 0);
    ck_assert_int_eq(pipe(from), 0);
    p->pid = fork();
    ck_assert_int_ge(p->pid, 0);
    if (p->pid == 0) {
        close(to[1]);
        close(from[0]);
        body(to[0], from[1]);
        _exit(0);
    }
    close(to[0]);
    close(from[1]);
    p->to = to[1];
    p->from = from[0];
}

static int process_wait(struct process *p)
{
    int status = -1;

    waitpid(p->pid, &status, 0);
    close(p->to);
    close(p->from);
    return status;
}

/* ---- A server that dies ---- */

static void serve(int in, int out)
{
    struct transport_server *s;

    transport_start();
    s = fixture_server("127.0.0.1:0", 0, 0, 0, 0);
    send_number(out, transport_server_port(s));
    receive_number(in); /* until killed */
}

START_TEST(a_server_killed_in_mid_stream_is_noticed_at_once)
{
    struct transport_channel *ch;
    struct process server;
    struct listener l;
    int64_t start;

    process_start(&server, serve);
    transport_start();
    ch = fixture_channel_port(receive_number(server.from));
    listener_init(&l);
    l.by_hand = _i == 1; /* unread messages are no hindrance */
    ck_assert_int_eq(
        listener_start(&l, ch, _i == 0 ? "/t.T/Hold" : "/t.T/Payload", fixture_text("100"), 60000),
        0);
    if (_i == 1)
        ck_assert(listener_wait_messages(&l, 1));
    sleep_ms(200);
    ck_assert_int_eq(listener_get(&l, &l.n_ends), 0);
    start = now_ms();
    kill(server.pid, SIGKILL);
    ck_assert(listener_wait(&l, NOTICE_MS));
    ck_assert_int_lt(now_ms() - start, NOTICE_MS);
    ck_assert_int_eq(l.code, TRANSPORT_UNAVAILABLE);
    process_wait(&server);
    ck_assert_int_eq(transport_unary(ch, "/t.T/Echo", fixture_text(""), 5000, false, NULL, NULL),
                     TRANSPORT_UNAVAILABLE);
    listener_release(&l);
    transport_channel_close(ch);
    transport_stop();
}
END_TEST

/* ---- A client that dies ---- */

static void call_and_hang(int in, int out)
{
    struct transport_channel *ch;
    struct listener l;

    ch = (transport_start(), fixture_channel_port(receive_number(in)));
    listener_init(&l);
    if (listener_start(&l, ch, "/t.T/Hold", fixture_text(""), 60000) < 0)
        _exit(1);
    send_number(out, 0);
    receive_number(in); /* until killed */
}

START_TEST(a_client_killed_in_mid_stream_is_noticed_at_once)
{
    struct transport_server *s;
    struct transport_call *call;
    struct process client;
    int64_t start;

    process_start(&client, call_and_hang);
    transport_start();
    s = fixture_server("127.0.0.1:0", 0, 0, 0, 0);
    send_number(client.to, transport_server_port(s));
    receive_number(client.from);
    call = tally_take();
    ck_assert_ptr_nonnull(call);
    start = now_ms();
    kill(client.pid, SIGKILL);
    ck_assert(tally_wait(&tally.cancelled, 1));
    ck_assert_int_lt(now_ms() - start, NOTICE_MS);
    transport_call_finish(call, TRANSPORT_OK, NULL);
    transport_call_unref(call);
    ck_assert(tally_wait(&tally.done, 1));
    process_wait(&client);
    transport_server_close(s, 0);
    transport_stop();
}
END_TEST

/* ---- A client that is not ours ---- */

static void run_python(int in, int out)
{
    char port[16];

    snprintf(port, sizeof(port), "%d", receive_number(in));
    dup2(out, STDOUT_FILENO);
    /* What a sanitizer wants is not meant for it. */
    unsetenv("LD_PRELOAD");
    execl(PYTHON, PYTHON, BATON_SOURCE_DIR "/tests/transport_interop.py", port, (char *)NULL);
    _exit(127);
}

START_TEST(python_s_grpcio_is_served)
{
    struct transport_call *call;
    struct transport_server *s;
    struct process python;
    char said[8192];
    size_t n = 0;
    ssize_t got;
    int status;

    process_start(&python, run_python);
    transport_start();
    s = fixture_server("127.0.0.1:0", 0, 0, 0, 0);
    transport_server_set_serving(s, true);
    send_number(python.to, transport_server_port(s));
    while (n < sizeof(said) - 1 && (got = read(python.from, said + n, sizeof(said) - 1 - n)) > 0)
        n += (size_t)got;
    said[n] = '\0';
    status = process_wait(&python);
    ck_assert(WIFEXITED(status));
    if (WEXITSTATUS(status) == 77 || WEXITSTATUS(status) == 127) {
        printf("SKIP python_s_grpcio_is_served: %s has no grpcio\n", PYTHON);
        fflush(stdout);
    } else {
        ck_assert_msg(WEXITSTATUS(status) == 0, "%s", said);
        ck_assert_ptr_nonnull(strstr(said, "ok   a watch"));
        ck_assert(tally_wait(&tally.cancelled, 1)); /* its deadline passed */
        call = tally_take();
        transport_call_unref(call);
        ck_assert(tally_wait(&tally.done, tally_get(&tally.accepted)));
        /* Its first call was the one with metadata; later ones had none. */
        ck_assert_int_gt(tally.accepted, 5);
        ck_assert_str_eq(tally.first_metadata, "a value");
        ck_assert_str_eq(tally.metadata, "(none)");
    }
    transport_server_close(s, 0);
    transport_stop();
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("transport process");
    TCase *process = tcase_create("process");
    SRunner *runner;
    int failed;

    tcase_set_timeout(process, 120);
    tcase_add_loop_test(process, a_server_killed_in_mid_stream_is_noticed_at_once, 0, 2);
    tcase_add_test(process, a_client_killed_in_mid_stream_is_noticed_at_once);
    tcase_add_test(process, python_s_grpcio_is_served);
    suite_add_tcase(suite, process);
    runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

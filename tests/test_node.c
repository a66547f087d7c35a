/* node: options, parsing, log, queue, clocks and signals.  Output goes through a temporary file in
 * the place of stdout or stderr, and is compared as text. */
#include "node/node.h"

#include <check.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* ---- Catching what is printed ---- */

static FILE *caught;
static int caught_fd, saved_fd;

static void catch_start(int fd)
{
    fflush(NULL);
    caught = tmpfile();
    ck_assert_ptr_nonnull(caught);
    caught_fd = fd;
    saved_fd = dup(fd);
    ck_assert_int_ge(saved_fd, 0);
    ck_assert_int_ge(dup2(fileno(caught), fd), 0);
}

/* The caller frees it. */
static char *catch_end(void)
{
    char *text = calloc(1, 1 << 20);
    size_t n;

    ck_assert_ptr_nonnull(text);
    fflush(NULL);
    ck_assert_int_ge(dup2(saved_fd, caught_fd), 0);
    close(saved_fd);
    rewind(caught);
    n = fread(text, 1, (1 << 20) - 1, caught);
    text[n] = '\0';
    fclose(caught);
    return text;
}

static void assert_contains(const char *text, const char *part)
{
    ck_assert_msg(strstr(text, part) != NULL, "no \"%s\" in:\n%s", part, text);
}

/* ---- Parsing ---- */

START_TEST(a_number_is_the_whole_string_and_in_range)
{
    static const char *const bad[] = {"", " 1", "1 ", "+1", "-1", "1x", "0x10", "9", "65", "1.0"};
    uint32_t v = 7;

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        ck_assert_msg(!node_parse_u32(bad[i], 10, 64, &v), "\"%s\" was taken", bad[i]);
    ck_assert_uint_eq(v, 7);
    ck_assert(node_parse_u32("10", 10, 64, &v) && v == 10);
    ck_assert(node_parse_u32("64", 10, 64, &v) && v == 64);
    ck_assert(node_parse_u32("4294967295", 0, UINT32_MAX, &v) && v == UINT32_MAX);
    ck_assert(!node_parse_u32("4294967296", 0, UINT32_MAX, &v));
}
END_TEST

START_TEST(a_large_number_never_wraps)
{
    uint64_t v = 7;

    ck_assert(node_parse_u64("18446744073709551615", 0, UINT64_MAX, &v) && v == UINT64_MAX);
    ck_assert(!node_parse_u64("18446744073709551616", 0, UINT64_MAX, &v));
    ck_assert(!node_parse_bytes("18446744073709551615K", 0, UINT64_MAX, &v));
    ck_assert(!node_parse_bytes("16777216T", 0, UINT64_MAX, &v));
    ck_assert(node_parse_bytes("16777215T", 0, UINT64_MAX, &v) && v == 16777215ull << 40);
}
END_TEST

START_TEST(bytes_take_one_unit_of_1024)
{
    static const char *const bad[] = {"", "K", "1KK", "1KB", "1k", "1 K", "-1K", "1.5G", "1E"};
    uint64_t v = 7;

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        ck_assert_msg(!node_parse_bytes(bad[i], 0, UINT64_MAX, &v), "\"%s\" was taken", bad[i]);
    ck_assert(node_parse_bytes("65536", 0, UINT64_MAX, &v) && v == 65536);
    ck_assert(node_parse_bytes("3K", 0, UINT64_MAX, &v) && v == 3072);
    ck_assert(node_parse_bytes("512M", 0, UINT64_MAX, &v) && v == 512u << 20);
    ck_assert(node_parse_bytes("4G", 0, UINT64_MAX, &v) && v == 4ull << 30);
    ck_assert(!node_parse_bytes("4G", 0, (4ull << 30) - 1, &v));
    ck_assert(!node_parse_bytes("1K", 1025, UINT64_MAX, &v));
}
END_TEST

START_TEST(a_float_is_finite_and_in_range)
{
    static const char *const bad[] = {"", " 1", "1 ", "nan", "inf", "0x1p0", "1e99", "2.1"};
    float v = 7;

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        ck_assert_msg(!node_parse_float(bad[i], -2, 2, &v), "\"%s\" was taken", bad[i]);
    }
    ck_assert(node_parse_float("-2", -2, 2, &v) && v == -2.0f);
    ck_assert(node_parse_float("0.7", -2, 2, &v) && v == 0.7f);
    ck_assert(node_parse_float("15e-1", -2, 2, &v) && v == 1.5f);
}
END_TEST

START_TEST(an_address_is_a_host_and_a_port)
{
    static const char *const good[] = {"localhost:0", "10.0.0.1:5000", "a-b.c_d:65535", "[::1]:80",
                                       "[fe80::1%eth0]:80"};
    static const char *const bad[] = {
        "",       "localhost",   ":80",     "localhost:", "h:65536", "h:-1",
        "::1:80", "[::1]",       "[::1:80", "[]:80",      "[x]:80",  "h h:80",
        "h:80 ",  "http://h:80", "h/x:80",  "[::1%]:80"};

    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++)
        ck_assert_msg(node_parse_address(good[i]), "\"%s\" was refused", good[i]);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        ck_assert_msg(!node_parse_address(bad[i]), "\"%s\" was taken", bad[i]);
}
END_TEST

/* ---- Options ---- */

static const char *const fruits[] = {"apple", "pear", NULL};
static bool flag;
static uint32_t threads, limit; /* limit 0: none */
static uint64_t memory, seed;
static float heat;
static const char *name, *address, *fruit;
static struct node_strings stops;

static const struct node_option table[] = {
    {.name = "verbose", .letter = 'v', .type = NODE_OPT_FLAG, .value = &flag, .help = "say more"},
    {.name = "threads",
     .letter = 't',
     .type = NODE_OPT_U32,
     .value = &threads,
     .argument = "N",
     .help = "compute threads",
     .min = 1,
     .max = 64},
    {.name = "memory",
     .type = NODE_OPT_BYTES,
     .value = &memory,
     .argument = "BYTES",
     .help = "memory to take",
     .min = 1024},
    {.name = "limit",
     .type = NODE_OPT_U32,
     .value = &limit,
     .argument = "N",
     .help = "a limit",
     .min = 1},
    {.name = "seed", .type = NODE_OPT_U64, .value = &seed, .argument = "N", .help = "a seed"},
    {.name = "heat",
     .type = NODE_OPT_FLOAT,
     .value = &heat,
     .argument = "X",
     .help = "how hot",
     .max = 2},
    {.name = "name", .type = NODE_OPT_STRING, .value = &name, .argument = "S", .help = "a name"},
    {.name = "listen",
     .type = NODE_OPT_ADDRESS,
     .value = &address,
     .argument = "HOST:PORT",
     .help = "where to listen"},
    {.name = "fruit",
     .type = NODE_OPT_CHOICE,
     .value = &fruit,
     .argument = "F",
     .help = "a fruit",
     .choices = fruits},
    {.name = "stop",
     .type = NODE_OPT_LIST,
     .value = &stops,
     .argument = "S",
     .help = "may be repeated"},
};

static int first;
static bool done;

static void set_defaults(void)
{
    flag = false;
    threads = 2;
    memory = 512u << 20;
    seed = 0;
    heat = 0.5f;
    name = NULL;
    address = "localhost:0";
    fruit = "apple";
    stops.n = 0;
}

static char *parse_argv[128];

/* The command line is NULL-terminated. */
static int parse(const char *const *args)
{
    int argc = 1;

    parse_argv[0] = (char *)(uintptr_t) "tool";
    while (*args != NULL)
        parse_argv[argc++] = (char *)(uintptr_t)*args++;
    parse_argv[argc] = NULL;
    set_defaults();
    return node_options_parse(argc, parse_argv, table, sizeof(table) / sizeof(table[0]),
                              "tool run [option...] TEXT", "Does what a tool does.\n  as it does",
                              &first, &done);
}
#define PARSE(...) parse((const char *const[]){__VA_ARGS__, NULL})

START_TEST(every_type_of_option_reaches_its_place)
{
    ck_assert_int_eq(PARSE("-v", "-t", "7", "--memory=4G", "--seed", "18446744073709551615",
                           "--heat", "1.5", "--name", "", "--listen", "[::1]:9", "--fruit", "pear",
                           "--stop", "a", "--stop", "b", "text"),
                     NODE_EXIT_OK);
    ck_assert(!done);
    ck_assert_int_eq(first, 19);
    ck_assert_str_eq(parse_argv[first], "text");
    ck_assert(flag);
    ck_assert_uint_eq(threads, 7);
    ck_assert_uint_eq(memory, 4ull << 30);
    ck_assert_uint_eq(seed, UINT64_MAX);
    ck_assert(heat == 1.5f);
    ck_assert_str_eq(name, "");
    ck_assert_str_eq(address, "[::1]:9");
    ck_assert_str_eq(fruit, "pear");
    ck_assert_uint_eq(stops.n, 2);
    ck_assert_str_eq(stops.items[1], "b");
}
END_TEST

START_TEST(options_may_stand_behind_arguments_until_two_dashes)
{
    ck_assert_int_eq(PARSE("text", "-t", "3", "--", "-t"), NODE_EXIT_OK);
    ck_assert_uint_eq(threads, 3);
    ck_assert_str_eq(parse_argv[first], "text");
    ck_assert_str_eq(parse_argv[first + 1], "-t");
}
END_TEST

static const struct {
    const char *args[4];
    const char *says;
} refused[] = {
    {{"--threads", "0"}, "tool: --threads \"0\": must be a whole number from 1 to 64\n"},
    {{"-t", "x\ny"}, "tool: --threads \"x\\ny\": must be a whole number from 1 to 64\n"},
    {{"--memory", "1"}, "tool: --memory \"1\": must be a number of bytes from 1K to "},
    {{"--heat", "2.5"}, "tool: --heat \"2.5\": must be a number from 0 to 2\n"},
    {{"--listen", "here"}, "tool: --listen \"here\": must be HOST:PORT or [IPv6]:PORT\n"},
    {{"--fruit", "plum"}, "tool: --fruit \"plum\": must be one of apple, pear\n"},
    {{"--colour", "red"}, "tool: \"--colour\": no such option"},
    {{"--verbose=2"}, "tool: \"--verbose=2\": no such option, ambiguous, or takes no value"},
    {{"-x"}, "tool: \"-x\": no such option"},
    {{"--threads"}, "tool: \"--threads\": needs a value"},
};

START_TEST(a_wrong_option_is_named_with_its_value)
{
    char *text;
    int rc;

    catch_start(STDERR_FILENO);
    rc = parse(refused[_i].args);
    text = catch_end();
    ck_assert_int_eq(rc, NODE_EXIT_USAGE);
    ck_assert(done);
    ck_assert_msg(strncmp(text, refused[_i].says, strlen(refused[_i].says)) == 0, "said: %s", text);
    free(text);
}
END_TEST

START_TEST(a_list_past_its_bound_is_refused)
{
    const char *args[2 * NODE_MAX_OPTIONS + 3] = {NULL};
    char *text;
    int rc;

    for (size_t i = 0; i < NODE_MAX_OPTIONS; i++)
        args[i] = "--stop=x";
    ck_assert_int_eq(parse(args), NODE_EXIT_OK);
    ck_assert_uint_eq(stops.n, NODE_MAX_OPTIONS);
    args[NODE_MAX_OPTIONS] = "--stop=x";
    catch_start(STDERR_FILENO);
    rc = parse(args);
    text = catch_end();
    ck_assert_int_eq(rc, NODE_EXIT_USAGE);
    assert_contains(text, "must be given at most 64 times");
    free(text);
}
END_TEST

START_TEST(help_shows_every_option_with_its_default)
{
    char *text;
    int rc;

    catch_start(STDOUT_FILENO);
    rc = PARSE("--help");
    text = catch_end();
    ck_assert_int_eq(rc, NODE_EXIT_OK);
    ck_assert(done);
    assert_contains(text,
                    "usage: tool run [option...] TEXT\n\nDoes what a tool does.\n  as it does\n\n");
    assert_contains(text, "  -v, --verbose             say more\n");
    assert_contains(text, "  -t, --threads N           compute threads (default 2)\n");
    assert_contains(text, "      --memory BYTES        memory to take (default 512M)\n");
    assert_contains(text, "      --limit N             a limit\n");
    assert_contains(text, "      --heat X              how hot (default 0.5)\n");
    assert_contains(text, "      --name S              a name\n");
    assert_contains(text, "      --fruit F             a fruit: apple, pear (default apple)\n");
    assert_contains(text, "  -h, --help                show this text\n");
    assert_contains(text, "      --version             show the version\n");
    free(text);
}
END_TEST

START_TEST(version_names_the_program)
{
    char *text;
    int rc;

    catch_start(STDOUT_FILENO);
    rc = PARSE("--version");
    text = catch_end();
    ck_assert_int_eq(rc, NODE_EXIT_OK);
    ck_assert(done);
    ck_assert_str_eq(text, "tool " BATON_VERSION "\n");
    free(text);
}
END_TEST

/* ---- Log ---- */

/* Let the next second of the rate limit begin. */
static void next_second(void)
{
    int64_t rest_ns = 1000000000 - node_now_ns() % 1000000000;
    struct timespec t = {.tv_nsec = rest_ns % 1000000000, .tv_sec = rest_ns / 1000000000};

    nanosleep(&t, NULL);
}

static size_t count_lines(const char *text)
{
    size_t n = 0;

    for (; *text != '\0'; text++)
        n += *text == '\n';
    return n;
}

START_TEST(a_log_line_has_time_level_event_and_fields)
{
    char *text;
    int y, mo, d, h, mi, s, ms, end = 0;

    catch_start(STDERR_FILENO);
    node_log(NODE_WARN, "peer_lost", "peer=%s after_ms=%d", "ipv4:1.2.3.4:5", 17);
    node_log(NODE_INFO, "bare", NULL);
    text = catch_end();
    ck_assert_int_eq(
        sscanf(text, "%4d-%2d-%2dT%2d:%2d:%2d.%3dZ %n", &y, &mo, &d, &h, &mi, &s, &ms, &end), 7);
    ck_assert_ptr_eq(strstr(text + end, "warn peer_lost peer=ipv4:1.2.3.4:5 after_ms=17\n"),
                     text + end);
    assert_contains(text, " info bare\n");
    free(text);
}
END_TEST

START_TEST(a_level_below_the_least_is_not_logged)
{
    char *text;

    catch_start(STDERR_FILENO);
    node_log(NODE_DEBUG, "quiet", NULL);
    node_log_set_level(NODE_ERROR);
    node_log(NODE_WARN, "quiet", NULL);
    node_log_set_level((enum node_level)node_level_parse("debug"));
    node_log(NODE_DEBUG, "loud", NULL);
    node_log_set_level(NODE_INFO);
    text = catch_end();
    ck_assert_uint_eq(count_lines(text), 1);
    assert_contains(text, " debug loud\n");
    free(text);
    ck_assert_int_eq(node_level_parse("error"), NODE_ERROR);
    ck_assert_int_eq(node_level_parse("Error"), -1);
}
END_TEST

START_TEST(a_flood_is_held_back_and_counted)
{
    char *text, *after;

    next_second();
    catch_start(STDERR_FILENO);
    for (int i = 0; i < 1000; i++)
        node_log(NODE_INFO, "flood", "i=%d", i);
    text = catch_end();
    next_second();
    catch_start(STDERR_FILENO);
    node_log(NODE_INFO, "after", "x=1");
    after = catch_end();
    /* A second may have turned in between. */
    ck_assert_uint_ge(count_lines(text), 200);
    ck_assert_uint_le(count_lines(text), 400);
    if (count_lines(text) == 200)
        assert_contains(after, " info after held_back=800 x=1\n");
    else
        assert_contains(text, " held_back=");
    free(text);
    free(after);
    next_second();
}
END_TEST

START_TEST(a_line_that_is_too_long_is_cut_and_still_ends)
{
    char *text, *big = malloc(10000);

    ck_assert_ptr_nonnull(big);
    memset(big, 'x', 9999);
    big[9999] = '\0';
    catch_start(STDERR_FILENO);
    node_log(NODE_INFO, "big", "text=%s", big);
    text = catch_end();
    ck_assert_uint_eq(strlen(text), 4096);
    ck_assert_int_eq(text[4095], '\n');
    ck_assert_uint_eq(count_lines(text), 1);
    free(text);
    free(big);
}
END_TEST

START_TEST(quoting_leaves_nothing_that_a_terminal_obeys)
{
    char buf[64];

    ck_assert_str_eq(node_quote(buf, sizeof(buf), "plain"), "\"plain\"");
    ck_assert_str_eq(node_quote(buf, sizeof(buf), "a\"b\\c\nd\x1b[0m\x7f"),
                     "\"a\\\"b\\\\c\\nd\\x1b[0m\\x7f\"");
    ck_assert_str_eq(node_quote(buf, sizeof(buf), "gr\xc3\xbc\xc3\x9f \xf0\x9f\x98\x80"),
                     "\"gr\xc3\xbc\xc3\x9f \xf0\x9f\x98\x80\"");
    /* C1 controls, an overlong form, a surrogate, a lone and a cut-off byte. */
    ck_assert_str_eq(node_quote(buf, sizeof(buf), "\xc2\x9b"), "\"\\xc2\\x9b\"");
    ck_assert_str_eq(node_quote(buf, sizeof(buf), "\xc0\xaf"), "\"\\xc0\\xaf\"");
    ck_assert_str_eq(node_quote(buf, sizeof(buf), "\xed\xa0\x80"), "\"\\xed\\xa0\\x80\"");
    ck_assert_str_eq(node_quote(buf, sizeof(buf), "\xff"), "\"\\xff\"");
    ck_assert_str_eq(node_quote(buf, sizeof(buf), "\xe2\x82"), "\"\\xe2\\x82\"");
}
END_TEST

START_TEST(quoting_cuts_to_fit_between_characters)
{
    char buf[8];

    ck_assert_str_eq(node_quote(buf, 8, "12345"), "\"12345\"");
    ck_assert_str_eq(node_quote(buf, 8, "123456"), "\"12345\"");
    ck_assert_str_eq(node_quote(buf, 8, "1234\xc3\xbc"), "\"1234\"");
    ck_assert_str_eq(node_quote(buf, 8, "1234\n"), "\"1234\"");
    ck_assert_str_eq(node_quote(buf, 3, "1"), "\"\"");
    ck_assert_str_eq(node_quote(buf, 2, "1"), "");
}
END_TEST

/* ---- Clocks, ids, signals ---- */

START_TEST(the_monotonic_clock_does_not_go_back)
{
    int64_t last = node_now_ns();

    for (int i = 0; i < 10000; i++) {
        int64_t now = node_now_ns();

        ck_assert_int_ge(now, last);
        last = now;
    }
    ck_assert_int_le(llabs(node_wall_ns() / 1000000000 - (long long)time(NULL)), 1);
}
END_TEST

START_TEST(random_bytes_differ_and_fill_exactly)
{
    uint8_t a[33] = {0}, b[33] = {0};
    uint8_t seen = 0;

    for (int i = 0; i < 64; i++) {
        node_random(a, 32);
        seen |= a[31];
        ck_assert_uint_eq(a[32], 0);
    }
    ck_assert_uint_ne(seen, 0);
    node_random(b, 32);
    ck_assert_mem_ne(a, b, 32);
}
END_TEST

START_TEST(blocked_signals_are_waited_for)
{
    node_signals_block();
    kill(getpid(), SIGPIPE); /* nothing happens */
    kill(getpid(), SIGTERM);
    ck_assert_int_eq(node_signals_wait(), SIGTERM);
    kill(getpid(), SIGINT);
    ck_assert_int_eq(node_signals_wait(), SIGINT);
}
END_TEST

/* ---- Queue ---- */

START_TEST(a_queue_keeps_its_order_and_its_bound)
{
    struct node_queue q;
    int items[5];

    ck_assert_int_eq(node_queue_init(&q, 3), 0);
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < 3; i++)
            ck_assert(node_queue_push(&q, &items[i]));
        ck_assert(!node_queue_push(&q, &items[3]));
        ck_assert_uint_eq(node_queue_length(&q), 3);
        ck_assert_ptr_eq(node_queue_pop(&q, 0), &items[0]);
        ck_assert(node_queue_push(&q, &items[4]));
        ck_assert_ptr_eq(node_queue_pop(&q, -1), &items[1]);
        ck_assert_ptr_eq(node_queue_pop(&q, 0), &items[2]);
        ck_assert_ptr_eq(node_queue_pop(&q, 0), &items[4]);
        ck_assert_ptr_null(node_queue_pop(&q, 0));
    }
    node_queue_release(&q);
}
END_TEST

START_TEST(popping_from_an_empty_queue_waits_as_long_as_asked)
{
    struct node_queue q;
    int64_t start = node_now_ns(), took_ns;

    ck_assert_int_eq(node_queue_init(&q, 1), 0);
    ck_assert_ptr_null(node_queue_pop(&q, 50));
    took_ns = node_now_ns() - start;
    ck_assert_int_ge(took_ns, 50 * 1000000);
    ck_assert_int_lt(took_ns, (int64_t)5 * 1000000000);
    node_queue_release(&q);
}
END_TEST

START_TEST(a_closed_queue_gives_what_is_left_and_takes_nothing)
{
    struct node_queue q;
    int item;

    ck_assert_int_eq(node_queue_init(&q, 2), 0);
    ck_assert(node_queue_push(&q, &item));
    node_queue_close(&q);
    ck_assert(!node_queue_push(&q, &item));
    ck_assert_ptr_eq(node_queue_pop(&q, -1), &item);
    ck_assert_ptr_null(node_queue_pop(&q, -1));
    node_queue_release(&q);
}
END_TEST

enum { N_THREADS = 4, N_ITEMS = 5000 };

struct crossing {
    struct node_queue q;
    uint8_t items[N_THREADS * N_ITEMS]; /* how often each was popped */
};

struct pusher {
    struct crossing *x;
    size_t from;
};

static void *push_all(void *arg)
{
    struct pusher *p = arg;

    for (size_t i = 0; i < N_ITEMS; i++)
        while (!node_queue_push(&p->x->q, &p->x->items[p->from + i]))
            sched_yield();
    return NULL;
}

static void *pop_all(void *arg)
{
    struct crossing *x = arg;
    uint8_t *item;

    while ((item = node_queue_pop(&x->q, -1)) != NULL)
        (*item)++;
    return NULL;
}

START_TEST(many_threads_lose_and_double_nothing)
{
    struct crossing *x = calloc(1, sizeof(*x));
    pthread_t pushers[N_THREADS], poppers[N_THREADS];
    struct pusher jobs[N_THREADS];

    ck_assert_ptr_nonnull(x);
    ck_assert_int_eq(node_queue_init(&x->q, 16), 0);
    for (size_t i = 0; i < N_THREADS; i++) {
        jobs[i] = (struct pusher){x, i * N_ITEMS};
        ck_assert_int_eq(pthread_create(&pushers[i], NULL, push_all, &jobs[i]), 0);
        ck_assert_int_eq(pthread_create(&poppers[i], NULL, pop_all, x), 0);
    }
    for (size_t i = 0; i < N_THREADS; i++)
        pthread_join(pushers[i], NULL);
    node_queue_close(&x->q);
    for (size_t i = 0; i < N_THREADS; i++)
        pthread_join(poppers[i], NULL);
    for (size_t i = 0; i < sizeof(x->items); i++)
        ck_assert_uint_eq(x->items[i], 1);
    node_queue_release(&x->q);
    free(x);
}
END_TEST

static Suite *node_suite(void)
{
    Suite *s = suite_create("node");
    TCase *tc;

    tc = tcase_create("parsing");
    tcase_add_test(tc, a_number_is_the_whole_string_and_in_range);
    tcase_add_test(tc, a_large_number_never_wraps);
    tcase_add_test(tc, bytes_take_one_unit_of_1024);
    tcase_add_test(tc, a_float_is_finite_and_in_range);
    tcase_add_test(tc, an_address_is_a_host_and_a_port);
    suite_add_tcase(s, tc);

    tc = tcase_create("options");
    tcase_add_test(tc, every_type_of_option_reaches_its_place);
    tcase_add_test(tc, options_may_stand_behind_arguments_until_two_dashes);
    tcase_add_loop_test(tc, a_wrong_option_is_named_with_its_value, 0,
                        sizeof(refused) / sizeof(refused[0]));
    tcase_add_test(tc, a_list_past_its_bound_is_refused);
    tcase_add_test(tc, help_shows_every_option_with_its_default);
    tcase_add_test(tc, version_names_the_program);
    suite_add_tcase(s, tc);

    tc = tcase_create("log");
    tcase_set_timeout(tc, 20);
    tcase_add_test(tc, a_log_line_has_time_level_event_and_fields);
    tcase_add_test(tc, a_level_below_the_least_is_not_logged);
    tcase_add_test(tc, a_flood_is_held_back_and_counted);
    tcase_add_test(tc, a_line_that_is_too_long_is_cut_and_still_ends);
    tcase_add_test(tc, quoting_leaves_nothing_that_a_terminal_obeys);
    tcase_add_test(tc, quoting_cuts_to_fit_between_characters);
    suite_add_tcase(s, tc);

    tc = tcase_create("clocks and signals");
    tcase_add_test(tc, the_monotonic_clock_does_not_go_back);
    tcase_add_test(tc, random_bytes_differ_and_fill_exactly);
    tcase_add_test(tc, blocked_signals_are_waited_for);
    suite_add_tcase(s, tc);

    tc = tcase_create("queue");
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, a_queue_keeps_its_order_and_its_bound);
    tcase_add_test(tc, popping_from_an_empty_queue_waits_as_long_as_asked);
    tcase_add_test(tc, a_closed_queue_gives_what_is_left_and_takes_nothing);
    tcase_add_test(tc, many_threads_lose_and_double_nothing);
    suite_add_tcase(s, tc);
    return s;
}

int main(void)
{
    SRunner *runner = srunner_create(node_suite());
    int failed;

    srunner_run_all(runner, CK_NORMAL);
    failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed == 0 ? 0 : 1;
}

/* Stamps of use rise over all shards, whatever the clock does: it runs, it stands still, it begins
 * to stand still, it moves in steps that many uses fit into.
 *
 * The linker puts a clock of the test's own between kvcore and the C library. */
#include "kvcore/kv_clock.h"

#include "kv_help.h"

#include <pthread.h>
#include <time.h>

static uint64_t n_readings, steps_every = 1, stands_after = UINT64_MAX;

int __wrap_clock_gettime(clockid_t id, struct timespec *out);

int __wrap_clock_gettime(clockid_t id, struct timespec *out)
{
    const uint64_t n = n_readings < stands_after ? n_readings++ : stands_after;
    const uint64_t ns = 1000 + n / steps_every;

    (void)id;
    out->tv_sec = (time_t)(ns / 1000000000);
    out->tv_nsec = (long)(ns % 1000000000);
    return 0;
}

enum { N_SHARDS = 4, N_USES = 1000 };

static struct kv_clock stamps;

/* Uses of shards one after the other: each stamp is larger than all before it. */
static void check_rising(void)
{
    uint64_t last[N_SHARDS] = {0}, before = 0;

    for (uint32_t i = 0; i < N_USES; i++) {
        const uint32_t shard = (uint32_t)mix(i) % N_SHARDS;
        const uint64_t stamp = kv_clock_stamp(&stamps, last[shard]);

        ck_assert_uint_gt(stamp, before);
        last[shard] = before = stamp;
    }
}

START_TEST(a_clock_that_runs_is_read)
{
    kv_clock_open(&stamps);
    check_rising();
    ck_assert(!atomic_load(&stamps.counts));
    ck_assert_uint_eq(kv_clock_stamp(&stamps, 0), 1000 + n_readings - 1);
}
END_TEST

START_TEST(a_clock_that_stands_still_is_found_out_at_open)
{
    stands_after = 0;
    kv_clock_open(&stamps);
    ck_assert(atomic_load(&stamps.counts));
    check_rising();
}
END_TEST

START_TEST(a_clock_that_moves_in_steps_is_found_out_at_open)
{
    steps_every = 50;
    kv_clock_open(&stamps);
    ck_assert(atomic_load(&stamps.counts));
    check_rising();
}
END_TEST

/* What was stamped by reading stays before what is counted, in every shard. */
START_TEST(a_clock_that_stops_is_found_out_at_the_next_use)
{
    uint64_t here, there;

    kv_clock_open(&stamps);
    here = kv_clock_stamp(&stamps, 0);
    stands_after = n_readings - 1;
    ck_assert(!atomic_load(&stamps.counts));
    there = kv_clock_stamp(&stamps, 0);
    ck_assert(atomic_load(&stamps.counts));
    ck_assert_uint_gt(there, here);
    ck_assert_uint_gt(kv_clock_stamp(&stamps, here), there);
    check_rising();
}
END_TEST

/* By the shard, where each use is another thread's. */
static void *use_once(void *arg)
{
    uint64_t *last = arg;

    *last = kv_clock_stamp(&stamps, *last);
    return NULL;
}

START_TEST(a_clock_that_stops_is_found_out_at_the_next_use_of_a_shard_by_whatever_thread)
{
    uint64_t last = 0;

    kv_clock_open(&stamps);
    stands_after = n_readings;
    for (uint32_t i = 0; i < 3; i++) {
        const uint64_t before = last;
        pthread_t thread;

        ck_assert_int_eq(pthread_create(&thread, NULL, use_once, &last), 0);
        pthread_join(thread, NULL);
        ck_assert_uint_gt(last, before);
        ck_assert_int_eq(atomic_load(&stamps.counts), i > 0);
    }
}
END_TEST

/* ---- Counted by many threads ---- */

enum { N_THREADS = 4 };

static uint64_t got[N_THREADS * N_USES];

static void *use(void *arg)
{
    uint64_t *mine = arg;

    for (uint32_t i = 0; i < N_USES; i++)
        mine[i] = kv_clock_stamp(&stamps, i > 0 ? mine[i - 1] : 0);
    return NULL;
}

static int compare(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return (x > y) - (x < y);
}

START_TEST(no_two_stamps_that_are_counted_are_the_same)
{
    pthread_t threads[N_THREADS];

    stands_after = 0;
    kv_clock_open(&stamps);
    for (uint32_t t = 0; t < N_THREADS; t++)
        ck_assert_int_eq(pthread_create(&threads[t], NULL, use, got + t * N_USES), 0);
    for (uint32_t t = 0; t < N_THREADS; t++)
        pthread_join(threads[t], NULL);
    for (uint32_t i = 1; i < N_THREADS * N_USES; i++)
        ck_assert(i % N_USES == 0 || got[i] > got[i - 1]);
    qsort(got, N_THREADS * N_USES, sizeof(got[0]), compare);
    for (uint32_t i = 1; i < N_THREADS * N_USES; i++)
        ck_assert_uint_gt(got[i], got[i - 1]);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("kv_clock");
    TCase *tc = tcase_create("clock");
    SRunner *sr = srunner_create(s);
    int n_failed;

    suite_add_tcase(s, tc);
    tcase_add_test(tc, a_clock_that_runs_is_read);
    tcase_add_test(tc, a_clock_that_stands_still_is_found_out_at_open);
    tcase_add_test(tc, a_clock_that_moves_in_steps_is_found_out_at_open);
    tcase_add_test(tc, a_clock_that_stops_is_found_out_at_the_next_use);
    tcase_add_test(tc,
                   a_clock_that_stops_is_found_out_at_the_next_use_of_a_shard_by_whatever_thread);
    tcase_add_test(tc, no_two_stamps_that_are_counted_are_the_same);
    srunner_run_all(sr, CK_ENV);
    n_failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return n_failed != 0;
}

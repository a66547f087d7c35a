/* The simulated disk itself: it must lose what nobody asked it to keep, and keep what somebody did,
 * or the crash tests that stand on it prove nothing. */
#include "sim_disk.h"

#include <check.h>
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BLOCK = KV_IO_ALIGN, N_BUFFERS = 4, BUFFER = 4 * BLOCK, N_SEEDS = 200 };

static struct sim_disk *sim;
static struct kv_disk *disk;
static const struct kv_disk_ops *ops;
static struct kv_queue *q;

static void start(void)
{
    disk = sim_disk_open(sim);
    ops = disk->ops;
    ck_assert_int_eq(ops->queue_open(disk, N_BUFFERS, BUFFER, &q), 0);
}

static void stop(void)
{
    ops->queue_close(q);
    ops->close(disk);
}

static void setup(void)
{
    sim = sim_disk_new(1);
    start();
}

static void teardown(void)
{
    sim_disk_free(sim);
}

static struct kv_io_op an_op(enum kv_io_kind kind, int file, uint32_t buffer, uint32_t len,
                             uint64_t offset)
{
    return (struct kv_io_op){kind, file, buffer, 0, len, offset, q->next_tag++};
}

/* Do it and wait: its result. */
static int64_t io(enum kv_io_kind kind, int file, uint32_t len, uint64_t offset)
{
    const struct kv_io_op op = an_op(kind, file, 0, len, offset);
    struct kv_io_done done;
    int rc = ops->submit(q, &op);

    if (rc < 0)
        return rc;
    do
        ck_assert_int_eq(ops->wait(q, &done), 0);
    while (done.tag != op.tag);
    return done.result;
}

static int64_t write_letters(int file, char letter, uint32_t len, uint64_t offset)
{
    memset(q->buffers[0], letter, len);
    return io(KV_IO_WRITE, file, len, offset);
}

/* A file of n blocks of a letter; nothing is synced. */
static int write_file(const char *name, char letter, uint32_t n)
{
    int file = ops->open(disk, name, KV_DISK_CREATE);

    ck_assert_int_ge(file, 0);
    for (uint32_t i = 0; i < n; i++)
        ck_assert_int_eq(write_letters(file, letter, BLOCK, (uint64_t)i * BLOCK), BLOCK);
    return file;
}

static bool holds(struct sim_disk *s, const char *name, char letter, size_t blocks)
{
    size_t len;
    const unsigned char *bytes = sim_disk_bytes(s, name, &len);

    if (bytes == NULL || len != blocks * BLOCK)
        return false;
    for (size_t i = 0; i < len; i++)
        if (bytes[i] != (unsigned char)letter)
            return false;
    return true;
}

static bool exists(struct sim_disk *s, const char *name)
{
    size_t len;

    return sim_disk_bytes(s, name, &len) != NULL;
}

/* How often `sees` is true of the disk after a crash, of N_SEEDS. */
static int of_crashes(bool (*sees)(struct sim_disk *s))
{
    int n = 0;

    for (uint64_t seed = 2; seed < 2 + N_SEEDS; seed++) {
        struct sim_disk *crashed = sim_disk_clone(sim, seed);

        sim_disk_crash(crashed, seed);
        n += sees(crashed);
        sim_disk_free(crashed);
    }
    return n;
}

static bool has_a(struct sim_disk *s)
{
    return exists(s, "a");
}

static bool has_whole_a(struct sim_disk *s)
{
    return holds(s, "a", 'x', 4);
}

static bool has_b(struct sim_disk *s)
{
    return exists(s, "b");
}

static bool has_both(struct sim_disk *s)
{
    return has_a(s) && has_b(s);
}

static bool has_neither(struct sim_disk *s)
{
    return !has_a(s) && !has_b(s);
}

/* Some sectors of block 0 are new and others are not. */
static bool has_torn_block(struct sim_disk *s)
{
    size_t len;
    const unsigned char *bytes = sim_disk_bytes(s, "a", &len);
    bool old = false, new = false;

    for (size_t i = 0; bytes != NULL && i < BLOCK && i < len; i += 512) {
        old |= bytes[i] == 'x';
        new |= bytes[i] == 'y';
        ck_assert_int_eq(bytes[i], bytes[i + 511]);
    }
    return old && new;
}

static bool has_torn_blocks(struct sim_disk *s)
{
    size_t len;
    const unsigned char *bytes = sim_disk_bytes(s, "a", &len);

    return bytes != NULL && len == 4 * BLOCK && bytes[0] != bytes[BLOCK];
}

START_TEST(what_is_synced_with_its_name_is_kept)
{
    int file = write_file("a", 'x', 4);

    ck_assert_int_eq(ops->sync(disk, file), 0);
    ck_assert_int_eq(ops->sync_directory(disk), 0);
    ops->close_file(disk, file);
    stop();
    ck_assert_int_eq(of_crashes(has_whole_a), N_SEEDS);
    sim_disk_crash(sim, SIM_LOSE_ALL);
    ck_assert(holds(sim, "a", 'x', 4));
}
END_TEST

START_TEST(a_name_that_is_not_synced_may_be_lost)
{
    int file = write_file("a", 'x', 4), n;

    ck_assert_int_eq(ops->sync(disk, file), 0);
    ops->close_file(disk, file);
    stop();
    n = of_crashes(has_a);
    ck_assert_int_gt(n, 0);
    ck_assert_int_lt(n, N_SEEDS);
    ck_assert_int_eq(of_crashes(has_whole_a), n); /* where it is, it is whole */
}
END_TEST

START_TEST(bytes_that_are_not_synced_may_be_lost)
{
    struct sim_disk *kept;
    int file = write_file("a", 'x', 4), n;

    ops->close_file(disk, file);
    ck_assert_int_eq(ops->sync_directory(disk), 0);
    stop();
    ck_assert_int_eq(of_crashes(has_a), N_SEEDS);
    n = of_crashes(has_whole_a);
    ck_assert_int_gt(n, 0);
    ck_assert_int_lt(n, N_SEEDS / 2);
    kept = sim_disk_clone(sim, 1);
    sim_disk_crash(kept, SIM_KEEP_ALL);
    ck_assert(has_whole_a(kept));
    sim_disk_free(kept);
    sim_disk_crash(sim, SIM_LOSE_ALL);
    ck_assert(holds(sim, "a", 'x', 0));
}
END_TEST

START_TEST(writes_are_torn_at_sectors_and_at_blocks)
{
    int file = write_file("a", 'x', 4);

    ck_assert_int_eq(ops->sync(disk, file), 0);
    ck_assert_int_eq(ops->sync_directory(disk), 0);
    ck_assert_int_eq(write_letters(file, 'y', 4 * BLOCK, 0), 4 * BLOCK);
    ops->close_file(disk, file);
    stop();
    ck_assert_int_gt(of_crashes(has_torn_block), 0);
    ck_assert_int_gt(of_crashes(has_torn_blocks), of_crashes(has_torn_block));
}
END_TEST

START_TEST(renames_and_unlinks_may_be_lost_until_the_directory_is_synced)
{
    int file = write_file("a", 'x', 4), n;

    ck_assert_int_eq(ops->sync(disk, file), 0);
    ck_assert_int_eq(ops->sync_directory(disk), 0);
    ops->close_file(disk, file);
    ck_assert_int_eq(ops->rename(disk, "a", "b"), 0);
    ops->queue_close(q);
    ops->close(disk);
    n = of_crashes(has_b);
    ck_assert_int_gt(n, 0);
    ck_assert_int_lt(n, N_SEEDS);
    ck_assert_int_eq(of_crashes(has_a), N_SEEDS - n);
    ck_assert_int_eq(of_crashes(has_both), 0);
    start();
    ck_assert_int_eq(ops->sync_directory(disk), 0);
    ck_assert_int_eq(ops->unlink(disk, "b"), 0);
    stop();
    n = of_crashes(has_b);
    ck_assert_int_gt(n, 0);
    ck_assert_int_lt(n, N_SEEDS);
    ck_assert_int_eq(of_crashes(has_a), 0);
    start();
    ck_assert_int_eq(ops->sync_directory(disk), 0);
    stop();
    ck_assert_int_eq(of_crashes(has_neither), N_SEEDS);
}
END_TEST

START_TEST(changes_of_names_may_happen_out_of_order)
{
    int a = write_file("a", 'x', 1), b;

    ops->close_file(disk, a);
    ck_assert_int_eq(ops->sync_directory(disk), 0);
    b = write_file("b", 'y', 1);
    ops->close_file(disk, b);
    ck_assert_int_eq(ops->unlink(disk, "a"), 0);
    stop();
    ck_assert_int_gt(of_crashes(has_neither), 0); /* the later one alone */
    ck_assert_int_gt(of_crashes(has_both), 0);
}
END_TEST

START_TEST(what_a_failed_sync_lost_stays_lost)
{
    int file = write_file("a", 'x', 4), n;

    ck_assert_int_eq(ops->sync_directory(disk), 0);
    sim_disk_fail(sim, SIM_SYNC, 0, -EIO);
    ck_assert_int_eq(ops->sync(disk, file), -EIO);
    ck_assert(holds(sim, "a", 'x', 4)); /* the program does not see it */
    ck_assert_int_eq(ops->sync(disk, file), 0);
    ops->close_file(disk, file);
    stop();
    n = of_crashes(has_whole_a);
    ck_assert_int_eq(n, 0);
}
END_TEST

START_TEST(the_power_goes_at_the_change_that_was_named)
{
    int file;

    sim_disk_crash_at(sim, 2); /* create, write, then this write */
    file = ops->open(disk, "a", KV_DISK_CREATE);
    ck_assert_int_ge(file, 0);
    ck_assert_int_eq(write_letters(file, 'x', BLOCK, 0), BLOCK);
    ck_assert(!sim_disk_is_dead(sim));
    ck_assert_int_eq(write_letters(file, 'x', BLOCK, BLOCK), -EIO);
    ck_assert(sim_disk_is_dead(sim));
    ck_assert_int_eq(ops->sync(disk, file), -EIO);
    ck_assert_int_eq(ops->rename(disk, "a", "b"), -EIO);
    ops->close_file(disk, file);
    stop();
    sim_disk_crash(sim, SIM_KEEP_ALL);
    ck_assert(holds(sim, "a", 'x', 2)); /* the fatal one happened */
    ck_assert(!sim_disk_is_dead(sim));
    start();
    sim_disk_crash_at(sim, 0);
    ck_assert_int_eq(ops->unlink(disk, "a"), -EIO);
    stop();
    sim_disk_crash(sim, SIM_LOSE_ALL);
    ck_assert(exists(sim, "a")); /* and here it did not */
}
END_TEST

START_TEST(each_kind_of_operation_fails_when_told)
{
    struct kv_disk_stat st;
    struct kv_queue *other;
    char c;
    int file = write_file("a", 'x', 1), to_read;

    sim_disk_fail(sim, SIM_STAT, 1, -EIO);
    ck_assert_int_eq(ops->stat(disk, "a", &st), 0);
    ck_assert_int_eq(ops->stat(disk, "a", &st), -EIO);
    ck_assert_int_eq(ops->stat(disk, "a", &st), 0);
    sim_disk_fail(sim, SIM_OPEN, 0, -EMFILE);
    ck_assert_int_eq(ops->open(disk, "a", KV_DISK_READ), -EMFILE);
    sim_disk_fail(sim, SIM_CREATE, sim_disk_n(sim, SIM_CREATE), -EACCES);
    ck_assert_int_eq(ops->open(disk, "n", KV_DISK_CREATE), -EACCES);
    ck_assert(!exists(sim, "n"));
    sim_disk_fail(sim, SIM_ALLOCATE, 0, -ENOSPC);
    ck_assert_int_eq(ops->allocate(disk, file, BLOCK), -ENOSPC);
    sim_disk_fail(sim, SIM_TRUNCATE, 0, -EIO);
    ck_assert_int_eq(ops->truncate(disk, file, 5), -EIO);
    sim_disk_fail(sim, SIM_RENAME, 0, -EIO);
    ck_assert_int_eq(ops->rename(disk, "a", "b"), -EIO);
    sim_disk_fail(sim, SIM_UNLINK, 0, -EIO);
    ck_assert_int_eq(ops->unlink(disk, "a"), -EIO);
    sim_disk_fail(sim, SIM_TOUCH, 0, -EIO);
    ck_assert_int_eq(ops->touch(disk, "a", 5), -EIO);
    sim_disk_fail(sim, SIM_LIST, 0, -EIO);
    ck_assert_int_eq(ops->list(disk, NULL, NULL), -EIO);
    sim_disk_fail(sim, SIM_SYNC_DIRECTORY, 0, -EIO);
    ck_assert_int_eq(ops->sync_directory(disk), -EIO);
    sim_disk_fail(sim, SIM_QUEUE_OPEN, 1, -ENOMEM);
    ck_assert_int_eq(ops->queue_open(disk, 1, BLOCK, &other), -ENOMEM);
    sim_disk_fail(sim, SIM_SUBMIT, sim_disk_n(sim, SIM_SUBMIT), -EAGAIN);
    ck_assert_int_eq(write_letters(file, 'y', BLOCK, 0), -EAGAIN);
    sim_disk_fail_all(sim, SIM_WRITE, -ENOSPC);
    ck_assert_int_eq(write_letters(file, 'y', BLOCK, 0), -ENOSPC);
    ck_assert_int_eq(write_letters(file, 'y', BLOCK, 0), -ENOSPC);
    sim_disk_fail_all(sim, SIM_WRITE, 0);
    ck_assert(holds(sim, "a", 'x', 1));
    sim_disk_fail(sim, SIM_WRITE, sim_disk_n(sim, SIM_WRITE), SIM_SHORT);
    ck_assert_int_eq(write_letters(file, 'x', 2 * BLOCK, 0), BLOCK);
    to_read = ops->open(disk, "a", KV_DISK_READ);
    ck_assert_int_ge(to_read, 0);
    sim_disk_fail(sim, SIM_READ, 0, SIM_SHORT);
    ck_assert_int_eq(io(KV_IO_READ, to_read, BLOCK, 0), 512);
    sim_disk_fail(sim, SIM_READ, 1, -EINTR);
    ck_assert_int_eq(io(KV_IO_READ, to_read, BLOCK, 0), -EINTR);
    ck_assert_int_eq(io(KV_IO_READ, to_read, BLOCK, 0), BLOCK);
    ck_assert_int_eq(q->buffers[0][BLOCK - 1], 'x');
    ck_assert_int_eq(io(KV_IO_READ, to_read, BLOCK, 5 * BLOCK), 0);
    sim_disk_fail(sim, SIM_READ_CACHED, 1, -EIO);
    ck_assert_int_eq(ops->read_cached(disk, to_read, &c, 1, 0), -EAGAIN);
    ck_assert_int_eq(ops->read_cached(disk, to_read, &c, 1, 0), -EIO);
    ops->close_file(disk, file);
    ops->close_file(disk, to_read);
    stop();
}
END_TEST

START_TEST(a_full_disk_says_so_and_has_room_again)
{
    int a, b;

    sim_disk_behave(sim, (struct sim_behaviour){.capacity_bytes = 8 * BLOCK});
    a = write_file("a", 'x', 4);
    b = write_file("b", 'y', 1);
    ck_assert_int_eq(ops->allocate(disk, b, 5 * BLOCK), -ENOSPC);
    ck_assert_int_eq(ops->allocate(disk, b, 3 * BLOCK), 0);
    ck_assert_int_eq(write_letters(b, 'y', 4 * BLOCK, BLOCK), -ENOSPC);
    ck_assert_int_eq(write_letters(b, 'y', 3 * BLOCK, BLOCK), 3 * BLOCK);
    ck_assert_uint_eq(sim_disk_allocated(sim), 8 * BLOCK);
    ck_assert_int_eq(ops->unlink(disk, "a"), 0);
    ck_assert_int_eq(write_letters(b, 'y', BLOCK, 4 * BLOCK), -ENOSPC); /* a is open yet */
    ops->close_file(disk, a);
    ck_assert_int_eq(write_letters(b, 'y', BLOCK, 4 * BLOCK), BLOCK);
    ops->close_file(disk, b);
    ck_assert(holds(sim, "b", 'y', 5));
    stop();
}
END_TEST

/* Writes at full depth through all its ways, by a user who does as kv_io.h says; the log of it. */
static void write_through_behaviour(uint64_t seed, char **log, size_t *log_len)
{
    struct kv_io_op ops_under_way[N_BUFFERS];
    bool is_under_way[N_BUFFERS] = {false};
    uint32_t n_false = 0, n_out_of_order = 0, n_left = N_BUFFERS;
    uint64_t highest = 0;
    FILE *out = open_memstream(log, log_len);
    int file;

    sim = sim_disk_new(seed);
    start();
    sim_disk_behave(sim,
                    (struct sim_behaviour){
                        .any_order = true, .duplicates = true, .shorten = true, .interrupt = true});
    file = ops->open(disk, "a", KV_DISK_CREATE);
    for (uint32_t i = 0; i < N_BUFFERS; i++) {
        memset(q->buffers[i], 'x', BUFFER);
        ops_under_way[i] = an_op(KV_IO_WRITE, file, i, BUFFER, (uint64_t)i * BUFFER);
        is_under_way[i] = true;
        ck_assert_int_eq(ops->submit(q, &ops_under_way[i]), 0);
    }
    while (n_left > 0) {
        struct kv_io_done done;
        struct kv_io_op *op;
        uint32_t i = 0;

        ck_assert_int_eq(ops->wait(q, &done), 0);
        while (i < N_BUFFERS && !(is_under_way[i] && ops_under_way[i].tag == done.tag))
            i++;
        if (i == N_BUFFERS) {
            n_false++;
            continue;
        }
        op = &ops_under_way[i];
        n_out_of_order += done.tag < highest;
        highest = done.tag > highest ? done.tag : highest;
        if (done.result < 0) {
            ck_assert(done.result == -EINTR || done.result == -EAGAIN);
            done.result = 0;
        }
        op->at += (uint32_t)done.result;
        op->offset += (uint64_t)done.result;
        op->len -= (uint32_t)done.result;
        op->tag = q->next_tag++;
        is_under_way[i] = op->len > 0;
        n_left -= op->len == 0;
        if (op->len > 0)
            ck_assert_int_eq(ops->submit(q, op), 0);
    }
    ck_assert(holds(sim, "a", 'x', N_BUFFERS * BUFFER / BLOCK));
    ck_assert_uint_gt(q->next_tag, N_BUFFERS);
    ops->close_file(disk, file);
    sim_disk_print_log(sim, out);
    fprintf(out, "%u false, %u out of order\n", n_false, n_out_of_order);
    fclose(out);
    stop();
    sim_disk_free(sim);
}

START_TEST(completions_come_late_twice_and_short_and_the_same_by_seed)
{
    char *log[3];
    size_t len[3];

    write_through_behaviour(7, &log[0], &len[0]);
    write_through_behaviour(7, &log[1], &len[1]);
    write_through_behaviour(8, &log[2], &len[2]);
    ck_assert_str_eq(log[0], log[1]);
    ck_assert_str_ne(log[0], log[2]);
    ck_assert_ptr_null(strstr(log[0], "\n0 false"));
    ck_assert_ptr_null(strstr(log[0], " 0 out of order"));
    for (int i = 0; i < 3; i++)
        free(log[i]);
}
END_TEST

START_TEST(a_write_whose_buffer_changes_is_a_bug)
{
    int file = ops->open(disk, "a", KV_DISK_CREATE);
    const struct kv_io_op op = an_op(KV_IO_WRITE, file, 0, BLOCK, 0);
    struct kv_io_done done;

    ck_assert_int_eq(ops->submit(q, &op), 0);
    q->buffers[0][5] ^= 1;
    (void)!freopen("/dev/null", "w", stderr);
    ops->wait(q, &done);
}
END_TEST

START_TEST(a_sync_before_the_completions_is_a_bug)
{
    int file = ops->open(disk, "a", KV_DISK_CREATE);
    const struct kv_io_op op = an_op(KV_IO_WRITE, file, 0, BLOCK, 0);

    ck_assert_int_eq(ops->submit(q, &op), 0);
    (void)!freopen("/dev/null", "w", stderr);
    ops->sync(disk, file);
}
END_TEST

START_TEST(a_tag_used_twice_is_a_bug)
{
    int file = ops->open(disk, "a", KV_DISK_CREATE);
    const struct kv_io_op op = an_op(KV_IO_WRITE, file, 0, BLOCK, 0);
    struct kv_io_done done;

    ck_assert_int_eq(ops->submit(q, &op), 0);
    ck_assert_int_eq(ops->wait(q, &done), 0);
    (void)!freopen("/dev/null", "w", stderr);
    ops->submit(q, &op);
}
END_TEST

START_TEST(files_are_put_and_bent_without_the_table)
{
    size_t len;

    sim_disk_put(sim, "a", "hello", 5);
    sim_disk_flip(sim, "a", 1, 1);
    stop();
    sim_disk_crash(sim, SIM_LOSE_ALL);
    ck_assert_mem_eq(sim_disk_bytes(sim, "a", &len), "hdllo", 5);
    ck_assert_uint_eq(len, 5);
    ck_assert_str_eq(sim_disk_name(sim, 0), "a");
    ck_assert_ptr_null(sim_disk_name(sim, 1));
    ck_assert(sim_disk_remove(sim, "a"));
    ck_assert(!sim_disk_remove(sim, "a"));
}
END_TEST

int main(void)
{
    Suite *s = suite_create("sim_disk");
    TCase *tc = tcase_create("disk"), *ways = tcase_create("ways");
    SRunner *sr = srunner_create(s);
    int failed;

    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_test(tc, what_is_synced_with_its_name_is_kept);
    tcase_add_test(tc, a_name_that_is_not_synced_may_be_lost);
    tcase_add_test(tc, bytes_that_are_not_synced_may_be_lost);
    tcase_add_test(tc, writes_are_torn_at_sectors_and_at_blocks);
    tcase_add_test(tc, renames_and_unlinks_may_be_lost_until_the_directory_is_synced);
    tcase_add_test(tc, changes_of_names_may_happen_out_of_order);
    tcase_add_test(tc, what_a_failed_sync_lost_stays_lost);
    tcase_add_test(tc, the_power_goes_at_the_change_that_was_named);
    tcase_add_test(tc, each_kind_of_operation_fails_when_told);
    tcase_add_test(tc, a_full_disk_says_so_and_has_room_again);
    tcase_add_test(tc, files_are_put_and_bent_without_the_table);
    tcase_add_test_raise_signal(tc, a_write_whose_buffer_changes_is_a_bug, SIGABRT);
    tcase_add_test_raise_signal(tc, a_sync_before_the_completions_is_a_bug, SIGABRT);
    tcase_add_test_raise_signal(tc, a_tag_used_twice_is_a_bug, SIGABRT);
    tcase_add_test(ways, completions_come_late_twice_and_short_and_the_same_by_seed);
    suite_add_tcase(s, tc);
    suite_add_tcase(s, ways);
    srunner_run_all(sr, CK_ENV);
    failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return failed != 0;
}

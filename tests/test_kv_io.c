/* The machine's disk in each of its modes, in the build folder and, where there is one, in memory.
 */
#include "kvcore/kv_io.h"

#include <check.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

enum { BUFFER = 64 * 1024, N_BUFFERS = 4 };

static char root[PATH_MAX], other[PATH_MAX];

static void remove_directory(const char *path)
{
    char command[PATH_MAX + 16];

    snprintf(command, sizeof(command), "rm -rf '%s'", path);
    ck_assert_int_eq(system(command), 0);
}

static void setup(void)
{
    snprintf(root, sizeof(root), "%s/kv-io-XXXXXX", BATON_BINARY_DIR);
    ck_assert_ptr_nonnull(mkdtemp(root));
}

static void teardown(void)
{
    remove_directory(root);
}

static struct kv_disk *open_disk(const char *path, unsigned without)
{
    struct kv_disk *disk = NULL;
    struct kv_why why = {""};

    ck_assert_msg(kv_disk_open(path, without, &disk, &why) == 0, "%s", why.text);
    return disk;
}

static unsigned char pattern(uint64_t at)
{
    return (unsigned char)((at * 2654435761u) >> 13);
}

/* One completion that is what was asked for. */
static void expect(struct kv_queue *q, int64_t bytes)
{
    struct kv_io_done done;

    ck_assert_int_eq(q->disk->ops->wait(q, &done), 0);
    ck_assert_int_eq(done.result, bytes);
}

/* Write a file of n full buffers at full depth, cut it short by 1,000 bytes, read it back. */
static void write_and_read(struct kv_disk *disk, uint32_t n)
{
    const struct kv_disk_ops *ops = disk->ops;
    const uint64_t len = (uint64_t)n * BUFFER - 1000;
    struct kv_disk_stat st;
    struct kv_queue *q;
    uint32_t under_way = 0;
    int file = ops->open(disk, "a.kv", KV_DISK_CREATE);

    ck_assert_int_ge(file, 0);
    ck_assert_int_eq(ops->open(disk, "a.kv", KV_DISK_CREATE), -EEXIST);
    ck_assert_int_eq(ops->allocate(disk, file, (uint64_t)n * BUFFER), 0);
    ck_assert_int_eq(ops->queue_open(disk, N_BUFFERS, BUFFER, &q), 0);
    for (uint32_t i = 0; i < n; i++) {
        if (under_way == N_BUFFERS) {
            for (; under_way > 0; under_way--)
                expect(q, BUFFER);
        }
        for (uint32_t k = 0; k < BUFFER; k++)
            q->buffers[i % N_BUFFERS][k] = pattern((uint64_t)i * BUFFER + k);
        ck_assert_int_eq(ops->submit(q, &(struct kv_io_op){KV_IO_WRITE, file, i % N_BUFFERS, 0,
                                                           BUFFER, (uint64_t)i * BUFFER, i}),
                         0);
        under_way++;
    }
    for (; under_way > 0; under_way--)
        expect(q, BUFFER);
    ck_assert_int_eq(ops->truncate(disk, file, len), 0);
    ck_assert_int_eq(ops->sync(disk, file), 0);
    ops->close_file(disk, file);
    ck_assert_int_eq(ops->rename(disk, "a.kv", "b.kv"), 0);
    ck_assert_int_eq(ops->sync_directory(disk), 0);
    ck_assert_int_eq(ops->stat(disk, "a.kv", &st), -ENOENT);
    ck_assert_int_eq(ops->stat(disk, "b.kv", &st), 0);
    ck_assert_uint_eq(st.bytes, len);

    file = ops->open(disk, "b.kv", KV_DISK_READ);
    ck_assert_int_ge(file, 0);
    for (uint32_t i = 0; i < n; i++) {
        const int64_t want = i + 1 < n ? BUFFER : BUFFER - 1000;

        memset(q->buffers[1], 0, BUFFER);
        ck_assert_int_eq(ops->submit(q, &(struct kv_io_op){KV_IO_READ, file, 1, 0, BUFFER,
                                                           (uint64_t)i * BUFFER, 77}),
                         0);
        expect(q, want);
        for (uint32_t k = 0; k < want; k++)
            ck_assert_uint_eq(q->buffers[1][k], pattern((uint64_t)i * BUFFER + k));
    }
    ops->close_file(disk, file);
    ops->queue_close(q);
    ck_assert_int_eq(ops->unlink(disk, "b.kv"), 0);
    ck_assert_int_eq(ops->unlink(disk, "b.kv"), -ENOENT);
}

static const unsigned modes[] = {
    0,
    KV_WITHOUT_REGISTERED,
    KV_WITHOUT_RING,
    KV_WITHOUT_DIRECT,
    KV_WITHOUT_RING | KV_WITHOUT_DIRECT,
};

START_TEST(a_file_comes_back_in_every_mode)
{
    struct kv_disk *disk = open_disk(root, modes[_i]);

    write_and_read(disk, 11);
    disk->ops->close(disk);
}
END_TEST

START_TEST(a_file_in_memory_comes_back_in_every_mode)
{
    struct kv_disk *disk;

    snprintf(other, sizeof(other), "/dev/shm/kv-io-XXXXXX");
    if (mkdtemp(other) == NULL) {
        printf("SKIP a_file_in_memory_comes_back_in_every_mode: no /dev/shm\n");
        return;
    }
    disk = open_disk(other, modes[_i]);
    write_and_read(disk, 5);
    disk->ops->close(disk);
    remove_directory(other);
}
END_TEST

START_TEST(what_is_in_use_is_said)
{
    struct kv_disk *disk = open_disk(root, KV_WITHOUT_RING | KV_WITHOUT_DIRECT);

    ck_assert_str_eq(disk->ops->describe(disk), "pwrite, page cache");
    disk->ops->close(disk);
    disk = open_disk(root, KV_WITHOUT_REGISTERED);
    ck_assert_ptr_null(strstr(disk->ops->describe(disk), "registered"));
    disk->ops->close(disk);
}
END_TEST

START_TEST(without_locked_memory_a_queue_still_works)
{
    const struct rlimit none = {0, 0};
    struct kv_disk *disk;

    ck_assert_int_eq(setrlimit(RLIMIT_MEMLOCK, &none), 0);
    disk = open_disk(root, 0);
    write_and_read(disk, 3);
    disk->ops->close(disk);
}
END_TEST

START_TEST(names_that_lead_elsewhere_are_refused)
{
    static const char *const names[] = {"", ".", "..", "a/b", "/etc/passwd", "../x"};
    struct kv_disk *disk = open_disk(root, 0);
    struct kv_disk_stat st;

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        ck_assert_int_eq(disk->ops->open(disk, names[i], KV_DISK_READ), -EINVAL);
        ck_assert_int_eq(disk->ops->open(disk, names[i], KV_DISK_CREATE), -EINVAL);
        ck_assert_int_eq(disk->ops->stat(disk, names[i], &st), -EINVAL);
        ck_assert_int_eq(disk->ops->unlink(disk, names[i]), -EINVAL);
        ck_assert_int_eq(disk->ops->rename(disk, names[i], "x"), -EINVAL);
        ck_assert_int_eq(disk->ops->rename(disk, "x", names[i]), -EINVAL);
        ck_assert_int_eq(disk->ops->touch(disk, names[i], 0), -EINVAL);
    }
    disk->ops->close(disk);
}
END_TEST

START_TEST(only_plain_files_are_opened)
{
    struct kv_disk *disk = open_disk(root, 0);
    char path[PATH_MAX + 16];

    snprintf(path, sizeof(path), "%s/link", root);
    ck_assert_int_eq(symlink("/etc/passwd", path), 0);
    ck_assert_int_eq(disk->ops->open(disk, "link", KV_DISK_READ), -ELOOP);
    snprintf(path, sizeof(path), "%s/pipe", root);
    ck_assert_int_eq(mkfifo(path, 0600), 0);
    ck_assert_int_lt(disk->ops->open(disk, "pipe", KV_DISK_READ), 0);
    snprintf(path, sizeof(path), "%s/folder", root);
    ck_assert_int_eq(mkdir(path, 0700), 0);
    ck_assert_int_lt(disk->ops->open(disk, "folder", KV_DISK_READ), 0);
    disk->ops->close(disk);
}
END_TEST

START_TEST(a_directory_is_one_process_alone_and_private)
{
    struct kv_disk *disk, *second = NULL;
    struct kv_why why = {""};
    char path[PATH_MAX + 16];
    struct stat st;
    int file;

    snprintf(path, sizeof(path), "%s/new", root);
    disk = open_disk(path, 0);
    ck_assert_int_eq(stat(path, &st), 0);
    ck_assert_int_eq(st.st_mode & 0777, 0700);
    ck_assert_int_eq(kv_disk_open(path, 0, &second, &why), KV_ERR_BUSY);
    ck_assert_ptr_nonnull(strstr(why.text, path));
    file = disk->ops->open(disk, "f", KV_DISK_CREATE);
    ck_assert_int_ge(file, 0);
    disk->ops->close_file(disk, file);
    strcat(path, "/f");
    ck_assert_int_eq(stat(path, &st), 0);
    ck_assert_int_eq(st.st_mode & 0777, 0600);
    disk->ops->close(disk);
    ck_assert_int_eq(kv_disk_open("/nowhere/at/all", 0, &second, &why), KV_ERR_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(why.text, "/nowhere/at/all"));
}
END_TEST

static int count_name(void *arg, const char *name)
{
    ck_assert_ptr_nonnull(name);
    ++*(int *)arg;
    return 0;
}

static int stop_at_once(void *arg, const char *name)
{
    (void)arg, (void)name;
    return 42;
}

START_TEST(names_are_listed_and_times_kept)
{
    struct kv_disk *disk = open_disk(root, 0);
    struct kv_disk_stat st;
    int n = 0, file;

    for (int i = 0; i < 3; i++) {
        char name[16];

        snprintf(name, sizeof(name), "f%d", i);
        file = disk->ops->open(disk, name, KV_DISK_CREATE);
        ck_assert_int_ge(file, 0);
        disk->ops->close_file(disk, file);
    }
    ck_assert_int_eq(disk->ops->list(disk, count_name, &n), 0);
    ck_assert_int_eq(n, 3);
    ck_assert_int_eq(disk->ops->list(disk, stop_at_once, NULL), 42);
    ck_assert_int_eq(disk->ops->touch(disk, "f1", 1234567890123456789), 0);
    ck_assert_int_eq(disk->ops->stat(disk, "f1", &st), 0);
    ck_assert_int_eq(st.mtime_ns, 1234567890123456789);
    ck_assert_uint_gt(disk->ops->now_ns(disk), 1700000000000000000u);
    disk->ops->close(disk);
}
END_TEST

START_TEST(the_page_cache_is_read_without_the_disk)
{
    struct kv_disk *disk = open_disk(root, KV_WITHOUT_DIRECT);
    unsigned char bytes[1000];
    struct kv_queue *q;
    int64_t n;
    int file = disk->ops->open(disk, "f", KV_DISK_CREATE);

    ck_assert_int_eq(disk->ops->queue_open(disk, 1, BUFFER, &q), 0);
    for (uint32_t k = 0; k < BUFFER; k++)
        q->buffers[0][k] = pattern(k);
    ck_assert_int_eq(
        disk->ops->submit(q, &(struct kv_io_op){KV_IO_WRITE, file, 0, 0, BUFFER, 0, 1}), 0);
    expect(q, BUFFER);
    disk->ops->close_file(disk, file);
    file = disk->ops->open(disk, "f", KV_DISK_READ);
    /* Warm it, as a reader of the file would. */
    ck_assert_int_eq(disk->ops->submit(q, &(struct kv_io_op){KV_IO_READ, file, 0, 0, BUFFER, 0, 1}),
                     0);
    expect(q, BUFFER);
    n = disk->ops->read_cached(disk, file, bytes, sizeof(bytes), 777);
    if (n != -EAGAIN) { /* the kernel's to say */
        ck_assert_int_gt(n, 0);
        for (int64_t k = 0; k < n; k++)
            ck_assert_uint_eq(bytes[k], pattern((uint64_t)(777 + k)));
    }
    disk->ops->close_file(disk, file);
    disk->ops->queue_close(q);
    disk->ops->close(disk);
}
END_TEST

START_TEST(operations_out_of_range_are_refused)
{
    struct kv_disk *disk = open_disk(root, 0);
    struct kv_queue *q;
    struct kv_io_done done;
    int file = disk->ops->open(disk, "f", KV_DISK_CREATE);

    ck_assert_int_eq(disk->ops->queue_open(disk, 0, BUFFER, &q), -EINVAL);
    ck_assert_int_eq(disk->ops->queue_open(disk, 1, 100, &q), -EINVAL);
    ck_assert_int_eq(disk->ops->queue_open(disk, 2, BUFFER, &q), 0);
    ck_assert_int_eq(disk->ops->wait(q, &done), -ENOENT);
    ck_assert_int_eq(
        disk->ops->submit(q, &(struct kv_io_op){KV_IO_WRITE, file, 2, 0, BUFFER, 0, 1}), -EINVAL);
    ck_assert_int_eq(
        disk->ops->submit(q, &(struct kv_io_op){KV_IO_WRITE, file, 0, 4096, BUFFER, 0, 1}),
        -EINVAL);
    ck_assert_int_eq(disk->ops->submit(q, &(struct kv_io_op){KV_IO_WRITE, 99, 0, 0, BUFFER, 0, 1}),
                     -EBADF);
    for (uint64_t i = 0; i < 2; i++)
        ck_assert_int_eq(disk->ops->submit(q, &(struct kv_io_op){KV_IO_WRITE, file, (uint32_t)i, 0,
                                                                 BUFFER, i * BUFFER, i}),
                         0);
    ck_assert_int_eq(
        disk->ops->submit(q, &(struct kv_io_op){KV_IO_WRITE, file, 0, 0, BUFFER, 0, 3}), -EAGAIN);
    expect(q, BUFFER);
    expect(q, BUFFER);
    disk->ops->close_file(disk, file);
    disk->ops->queue_close(q);
    disk->ops->close(disk);
}
END_TEST

START_TEST(a_full_file_system_is_said_before_anything_is_written)
{
    struct kv_disk *disk;
    int file;

    if (mount("none", root, "tmpfs", 0, "size=1m") < 0) {
        printf("SKIP a_full_file_system_is_said_before_anything_is_written: cannot mount: %s\n",
               strerror(errno));
        return;
    }
    disk = open_disk(root, 0);
    file = disk->ops->open(disk, "f", KV_DISK_CREATE);
    ck_assert_int_ge(file, 0);
    ck_assert_int_eq(disk->ops->allocate(disk, file, (uint64_t)8 << 20), -ENOSPC);
    disk->ops->close_file(disk, file);
    disk->ops->close(disk);
    ck_assert_int_eq(umount2(root, MNT_DETACH), 0);
}
END_TEST

START_TEST(errors_say_what_was_done_to_which_name)
{
    struct kv_why why = {""};

    ck_assert_int_eq(kv_io_error(&why, -ENOSPC, "write", "x.tmp"), KV_ERR_FULL);
    ck_assert_str_eq(why.text, "write x.tmp: No space left on device");
    ck_assert_int_eq(kv_io_error(&why, EIO, "read", "x"), KV_ERR_IO);
    ck_assert_int_eq(kv_io_error(&why, EDQUOT, "read", "x"), KV_ERR_FULL);
    ck_assert_int_eq(kv_io_error(&why, -ENOMEM, "read", "x"), KV_ERR_NOMEM);
    ck_assert_int_eq(kv_io_error(NULL, -ENOENT, "read", "x"), KV_ERR_NOT_FOUND);
}
END_TEST

int main(void)
{
    const int n_modes = (int)(sizeof(modes) / sizeof(modes[0]));
    Suite *s = suite_create("kv_io");
    TCase *tc = tcase_create("disk");
    SRunner *sr = srunner_create(s);
    int failed;

    tcase_set_timeout(tc, 60);
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_loop_test(tc, a_file_comes_back_in_every_mode, 0, n_modes);
    tcase_add_loop_test(tc, a_file_in_memory_comes_back_in_every_mode, 0, n_modes);
    tcase_add_test(tc, what_is_in_use_is_said);
    tcase_add_test(tc, without_locked_memory_a_queue_still_works);
    tcase_add_test(tc, names_that_lead_elsewhere_are_refused);
    tcase_add_test(tc, only_plain_files_are_opened);
    tcase_add_test(tc, a_directory_is_one_process_alone_and_private);
    tcase_add_test(tc, names_are_listed_and_times_kept);
    tcase_add_test(tc, the_page_cache_is_read_without_the_disk);
    tcase_add_test(tc, operations_out_of_range_are_refused);
    tcase_add_test(tc, a_full_file_system_is_said_before_anything_is_written);
    tcase_add_test(tc, errors_say_what_was_done_to_which_name);
    suite_add_tcase(s, tc);
    srunner_run_all(sr, CK_ENV);
    failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return failed != 0;
}

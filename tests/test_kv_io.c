/* The machine's disk in each of its modes, in the build folder and, where there is one, in memory.
 */
#include "kvcore/kv_io.h"

#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
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

static void fill(unsigned char *bytes, size_t len, uint64_t at)
{
    for (size_t k = 0; k < len; k++)
        bytes[k] = pattern(at + k);
}

static bool is_filled(const unsigned char *bytes, size_t len, uint64_t at)
{
    for (size_t k = 0; k < len; k++)
        if (bytes[k] != pattern(at + k))
            return false;
    return true;
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
        fill(q->buffers[i % N_BUFFERS], BUFFER, (uint64_t)i * BUFFER);
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
        ck_assert(is_filled(q->buffers[1], (size_t)want, (uint64_t)i * BUFFER));
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

START_TEST(a_directory_in_use_is_looked_at_and_not_changed)
{
    struct kv_disk *owner = open_disk(root, 0), *view = NULL;
    struct kv_disk_stat st;
    struct kv_why why = {""};
    char nowhere[PATH_MAX + 16];
    int file = owner->ops->open(owner, "a", KV_DISK_CREATE);

    ck_assert_int_ge(file, 0);
    ck_assert_int_eq(owner->ops->allocate(owner, file, KV_IO_ALIGN), 0);
    ck_assert_int_eq(owner->ops->truncate(owner, file, KV_IO_ALIGN), 0);
    owner->ops->close_file(owner, file);
    ck_assert_msg(kv_disk_view(root, &view, &why) == 0, "%s", why.text);
    ck_assert_int_eq(view->ops->stat(view, "a", &st), 0);
    ck_assert_uint_eq(st.bytes, KV_IO_ALIGN);
    file = view->ops->open(view, "a", KV_DISK_READ);
    ck_assert_int_ge(file, 0);
    view->ops->close_file(view, file);
    ck_assert_int_eq(view->ops->open(view, "b", KV_DISK_CREATE), -EROFS);
    ck_assert_int_eq(view->ops->rename(view, "a", "b"), -EROFS);
    ck_assert_int_eq(view->ops->unlink(view, "a"), -EROFS);
    ck_assert_int_eq(view->ops->touch(view, "a", 0), -EROFS);
    view->ops->close(view);
    ck_assert_int_eq(owner->ops->stat(owner, "a", &st), 0);
    owner->ops->close(owner);

    snprintf(nowhere, sizeof(nowhere), "%s/nowhere", root);
    ck_assert_int_eq(kv_disk_view(nowhere, &view, &why), KV_ERR_NOT_FOUND);
    ck_assert_int_ne(access(nowhere, F_OK), 0);
}
END_TEST

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

/* A file of n buffers, closed. */
static void write_file(struct kv_disk *disk, const char *name, uint32_t n)
{
    const struct kv_disk_ops *ops = disk->ops;
    struct kv_queue *q;
    int file = ops->open(disk, name, KV_DISK_CREATE);

    ck_assert_int_ge(file, 0);
    ck_assert_int_eq(ops->queue_open(disk, 1, BUFFER, &q), 0);
    for (uint64_t i = 0; i < n; i++) {
        fill(q->buffers[0], BUFFER, i * BUFFER);
        ck_assert_int_eq(
            ops->submit(q, &(struct kv_io_op){KV_IO_WRITE, file, 0, 0, BUFFER, i * BUFFER, i}), 0);
        expect(q, BUFFER);
    }
    ck_assert_int_eq(ops->sync(disk, file), 0);
    ops->queue_close(q);
    ops->close_file(disk, file);
}

/* Bring part of the file into the page cache, or all of it out of there. */
static void warm(const char *name, size_t len)
{
    char path[PATH_MAX + 16];
    unsigned char *bytes = malloc(len + 1);
    int fd;

    ck_assert_ptr_nonnull(bytes);
    snprintf(path, sizeof(path), "%s/%s", root, name);
    fd = open(path, O_RDONLY);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
    ck_assert_int_eq(posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM), 0); /* nothing ahead */
    ck_assert_int_eq(pread(fd, bytes, len, 0), (ssize_t)len);
    close(fd);
    free(bytes);
}

START_TEST(the_page_cache_is_read_without_the_disk)
{
    struct kv_disk *disk = open_disk(root, _i == 0 ? 0 : KV_WITHOUT_DIRECT);
    unsigned char bytes[2 * BUFFER];
    int64_t n;
    int file;

    write_file(disk, "f", 2);
    warm("f", BUFFER);
    file = disk->ops->open(disk, "f", KV_DISK_READ);
    n = disk->ops->read_cached(disk, file, bytes, sizeof(bytes), 777);
    if (n == -EAGAIN) { /* the file system's to say */
        printf("SKIP the_page_cache_is_read_without_the_disk: not where the build folder is\n");
    } else {
        ck_assert_int_eq(n, BUFFER - 777);
        ck_assert(is_filled(bytes, (size_t)n, 777));
        n = disk->ops->read_cached(disk, file, bytes, 1000, BUFFER - 1000);
        ck_assert_int_eq(n, 1000);
        ck_assert(is_filled(bytes, 1000, BUFFER - 1000));
    }
    /* What is not there is not fetched either. */
    for (int i = 0; i < 3; i++) {
        ck_assert_int_eq(disk->ops->read_cached(disk, file, bytes, 1000, BUFFER), -EAGAIN);
        usleep(10000);
    }
    warm("f", 0);
    ck_assert_int_eq(disk->ops->read_cached(disk, file, bytes, 1000, 0), -EAGAIN);
    ck_assert_int_eq(disk->ops->read_cached(disk, file, bytes, 1, 2 * BUFFER), -EAGAIN);
    disk->ops->close_file(disk, file);
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

START_TEST(a_full_file_system_is_said)
{
    struct kv_io_done done;
    struct kv_disk *disk;
    struct kv_queue *q;
    uint64_t at = 0;
    int file;

    /* A mount of this process alone, so that it goes with it. */
    if (unshare(CLONE_NEWNS) < 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 ||
        mount("none", root, "tmpfs", 0, "size=1m") < 0) {
        printf("SKIP a_full_file_system_is_said: cannot mount: %s\n", strerror(errno));
        return;
    }
    disk = open_disk(root, modes[_i]);
    file = disk->ops->open(disk, "f", KV_DISK_CREATE);
    ck_assert_int_ge(file, 0);
    ck_assert_int_eq(disk->ops->allocate(disk, file, (uint64_t)8 << 20), -ENOSPC);
    /* And to who did not ask. */
    ck_assert_int_eq(disk->ops->queue_open(disk, 1, BUFFER, &q), 0);
    do {
        ck_assert_int_eq(
            disk->ops->submit(q, &(struct kv_io_op){KV_IO_WRITE, file, 0, 0, BUFFER, at, at}), 0);
        ck_assert_int_eq(disk->ops->wait(q, &done), 0);
        at += BUFFER;
    } while (done.result == BUFFER && at < (uint64_t)2 << 20);
    ck_assert(done.result == -ENOSPC || (done.result > 0 && done.result < BUFFER));
    disk->ops->queue_close(q);
    disk->ops->close_file(disk, file);
    ck_assert_int_eq(disk->ops->unlink(disk, "f"), 0);
    file = disk->ops->open(disk, "g", KV_DISK_CREATE);
    ck_assert_int_eq(disk->ops->allocate(disk, file, 512 * 1024), 0);
    disk->ops->close_file(disk, file);
    disk->ops->close(disk);
    ck_assert_int_eq(umount2(root, MNT_DETACH), 0);
}
END_TEST

/* From now on io_uring_setup says this, as where it is forbidden or not there. */
static bool forbid_rings(int error)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_setup, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const struct sock_fprog program = {sizeof(filter) / sizeof(filter[0]), filter};

    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

START_TEST(where_rings_are_forbidden_files_are_written_without)
{
    static const int errors[] = {ENOSYS, EPERM};
    struct kv_disk *disk;

    if (!forbid_rings(errors[_i])) {
        printf("SKIP where_rings_are_forbidden_files_are_written_without: no seccomp: %s\n",
               strerror(errno));
        return;
    }
    disk = open_disk(root, 0);
    ck_assert_int_eq(strncmp(disk->ops->describe(disk), "pwrite, ", 8), 0);
    write_and_read(disk, 7);
    disk->ops->close(disk);
}
END_TEST

static void *write_in_thread(void *arg)
{
    struct kv_disk *disk = ((void **)arg)[0];

    write_file(disk, ((void **)arg)[1], 20);
    return NULL;
}

START_TEST(two_queues_in_two_threads_do_not_meet)
{
    struct kv_disk *disk = open_disk(root, modes[_i]);
    void *args[2][2] = {{disk, "one"}, {disk, "two"}};
    unsigned char *bytes = malloc(20 * BUFFER);
    pthread_t threads[2];
    char path[PATH_MAX + 16];
    FILE *in;

    for (int i = 0; i < 2; i++)
        ck_assert_int_eq(pthread_create(&threads[i], NULL, write_in_thread, args[i]), 0);
    for (int i = 0; i < 2; i++)
        ck_assert_int_eq(pthread_join(threads[i], NULL), 0);
    disk->ops->close(disk);
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof(path), "%s/%s", root, (char *)args[i][1]);
        in = fopen(path, "r");
        ck_assert_ptr_nonnull(in);
        ck_assert_uint_eq(fread(bytes, 1, 20 * BUFFER, in), 20 * BUFFER);
        ck_assert(is_filled(bytes, 20 * BUFFER, 0));
        fclose(in);
    }
    free(bytes);
}
END_TEST

/* Two files at once on one queue, completions in whatever order: each tag says which it is. */
START_TEST(completions_carry_their_tags)
{
    struct kv_disk *disk = open_disk(root, modes[_i]);
    const struct kv_disk_ops *ops = disk->ops;
    bool seen[N_BUFFERS] = {false};
    struct kv_queue *q;
    struct kv_io_done done;
    int file;

    write_file(disk, "f", N_BUFFERS);
    file = ops->open(disk, "f", KV_DISK_READ);
    ck_assert_int_eq(ops->queue_open(disk, N_BUFFERS, BUFFER, &q), 0);
    for (uint32_t i = 0; i < N_BUFFERS; i++)
        ck_assert_int_eq(ops->submit(q, &(struct kv_io_op){KV_IO_READ, file, i, 0, BUFFER,
                                                           (uint64_t)i * BUFFER, 100 + i}),
                         0);
    for (uint32_t n = 0; n < N_BUFFERS; n++) {
        ck_assert_int_eq(ops->wait(q, &done), 0);
        ck_assert(done.tag >= 100 && done.tag < 100 + N_BUFFERS);
        ck_assert(!seen[done.tag - 100]);
        seen[done.tag - 100] = true;
        ck_assert_int_eq(done.result, BUFFER);
        ck_assert(is_filled(q->buffers[done.tag - 100], BUFFER, (done.tag - 100) * BUFFER));
    }
    ck_assert_int_eq(ops->wait(q, &done), -ENOENT);
    ops->queue_close(q);
    ops->close_file(disk, file);
    disk->ops->close(disk);
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
    tcase_add_test(tc, a_directory_in_use_is_looked_at_and_not_changed);
    tcase_add_test(tc, names_are_listed_and_times_kept);
    tcase_add_loop_test(tc, the_page_cache_is_read_without_the_disk, 0, 2);
    tcase_add_test(tc, operations_out_of_range_are_refused);
    tcase_add_loop_test(tc, a_full_file_system_is_said, 0, n_modes);
    tcase_add_loop_test(tc, where_rings_are_forbidden_files_are_written_without, 0, 2);
    tcase_add_loop_test(tc, two_queues_in_two_threads_do_not_meet, 0, n_modes);
    tcase_add_loop_test(tc, completions_carry_their_tags, 0, n_modes);
    tcase_add_test(tc, errors_say_what_was_done_to_which_name);
    suite_add_tcase(s, tc);
    srunner_run_all(sr, CK_ENV);
    failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return failed != 0;
}

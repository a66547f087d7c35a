#include "kvcore/kv_disk.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

int kv_io_error(struct kv_why *why, int error, const char *doing, const char *name)
{
    const int number = error < 0 ? -error : error;
    int rc = KV_ERR_IO;

    if (number == ENOSPC || number == EDQUOT)
        rc = KV_ERR_FULL;
    else if (number == ENOMEM)
        rc = KV_ERR_NOMEM;
    else if (number == ENOENT)
        rc = KV_ERR_NOT_FOUND;
    return kv_fail(why, rc, "%s %s: %s", doing, name, strerror(number));
}

/* ---- Names ---- */

/* A plain name: nothing that leads out of the directory. */
static bool is_plain(const char *name)
{
    return name[0] != '\0' && strchr(name, '/') == NULL && strcmp(name, ".") != 0 &&
           strcmp(name, "..") != 0;
}

static struct kv_machine_disk *machine(struct kv_disk *disk)
{
    return (struct kv_machine_disk *)disk;
}

static int result(int rc)
{
    return rc < 0 ? -errno : 0;
}

static int disk_list(struct kv_disk *disk, int (*each)(void *arg, const char *name), void *arg)
{
    /* A descriptor of its own: a stream's position is shared by duplicates. */
    const int fd = openat(machine(disk)->directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *stream = fd < 0 ? NULL : fdopendir(fd);
    const struct dirent *entry;
    int rc = 0;

    if (stream == NULL) {
        rc = -errno;
        if (fd >= 0)
            close(fd);
        return rc;
    }
    while (rc == 0 && (errno = 0, entry = readdir(stream)) != NULL)
        if (is_plain(entry->d_name))
            rc = each(arg, entry->d_name);
    if (rc == 0)
        rc = -errno;
    closedir(stream);
    return rc;
}

static int disk_stat(struct kv_disk *disk, const char *name, struct kv_disk_stat *out)
{
    struct stat st;

    if (!is_plain(name))
        return -EINVAL;
    if (fstatat(machine(disk)->directory, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return -errno;
    if (!S_ISREG(st.st_mode))
        return -EINVAL;
    out->bytes = (uint64_t)st.st_size;
    out->allocated = (uint64_t)st.st_blocks * 512;
    out->mtime_ns = (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec;
    return 0;
}

static int disk_touch(struct kv_disk *disk, const char *name, int64_t mtime_ns)
{
    const struct timespec times[2] = {
        {.tv_nsec = UTIME_OMIT},
        {.tv_sec = mtime_ns / 1000000000, .tv_nsec = mtime_ns % 1000000000},
    };

    if (!is_plain(name) || mtime_ns < 0)
        return -EINVAL;
    if (machine(disk)->view)
        return -EROFS;
    return result(utimensat(machine(disk)->directory, name, times, AT_SYMLINK_NOFOLLOW));
}

static int disk_rename(struct kv_disk *disk, const char *from, const char *to)
{
    const int directory = machine(disk)->directory;

    if (!is_plain(from) || !is_plain(to))
        return -EINVAL;
    if (machine(disk)->view)
        return -EROFS;
    return result(renameat(directory, from, directory, to));
}

static int disk_unlink(struct kv_disk *disk, const char *name)
{
    if (!is_plain(name))
        return -EINVAL;
    if (machine(disk)->view)
        return -EROFS;
    return result(unlinkat(machine(disk)->directory, name, 0));
}

static int disk_sync_directory(struct kv_disk *disk)
{
    return result(fsync(machine(disk)->directory));
}

/* ---- Files ---- */

static const struct kv_disk_file no_file = {.fd = -1, .cached = -1};

struct kv_disk_file kv_disk_file(struct kv_machine_disk *disk, int file)
{
    struct kv_disk_file found = no_file;

    pthread_mutex_lock(&disk->lock);
    if (file >= 0 && (uint32_t)file < disk->n_files)
        found = disk->files[file];
    pthread_mutex_unlock(&disk->lock);
    return found;
}

/* A number for the descriptors, or -ENOMEM. */
static int number_file(struct kv_machine_disk *disk, struct kv_disk_file f)
{
    uint32_t i = 0;
    int number = -ENOMEM;

    pthread_mutex_lock(&disk->lock);
    while (i < disk->n_files && disk->files[i].fd >= 0)
        i++;
    if (i == disk->n_files) {
        struct kv_disk_file *grown =
            realloc(disk->files, (disk->n_files + 1) * sizeof(*disk->files));

        if (grown != NULL) {
            disk->files = grown;
            disk->n_files++;
        }
    }
    if (i < disk->n_files) {
        disk->files[i] = f;
        number = (int)i;
    }
    pthread_mutex_unlock(&disk->lock);
    return number;
}

static void close_descriptors(struct kv_disk_file f)
{
    if (f.fd >= 0)
        close(f.fd);
    if (f.cached >= 0)
        close(f.cached);
    if (f.map != NULL)
        munmap(f.map, f.map_bytes);
}

static bool is_regular(int fd, struct stat *st)
{
    return fstat(fd, st) == 0 && S_ISREG(st->st_mode);
}

/* Without a mapping the page cache is not used. */
static void map_file(struct kv_disk_file *f, uint64_t bytes)
{
    void *map;

    if (bytes == 0 || bytes > SIZE_MAX)
        return;
    map = mmap(NULL, bytes, PROT_READ, MAP_SHARED, f->cached, 0);
    if (map == MAP_FAILED)
        return;
    f->map = map;
    f->map_bytes = bytes;
}

/* Open for reading, twice where direct: both of one file, also while a rename replaces it. */
static int open_to_read(struct kv_machine_disk *disk, const char *name, struct kv_disk_file *out)
{
    const int flags = O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
    struct stat first, second;

    do {
        close_descriptors(*out);
        *out = no_file;
        out->cached = openat(disk->directory, name, flags);
        if (out->cached < 0)
            return -errno;
        out->fd = openat(disk->directory, name, flags | (disk->direct ? O_DIRECT : 0));
        if (out->fd < 0)
            return -errno;
        if (!is_regular(out->fd, &first) || !is_regular(out->cached, &second))
            return -EINVAL;
    } while (first.st_ino != second.st_ino);
    map_file(out, (uint64_t)first.st_size);
    return 0;
}

static int disk_open(struct kv_disk *base, const char *name, enum kv_disk_open how)
{
    struct kv_machine_disk *disk = machine(base);
    struct kv_disk_file f = no_file;
    int rc = 0;

    if (!is_plain(name))
        return -EINVAL;
    if (how == KV_DISK_READ) {
        rc = open_to_read(disk, name, &f);
    } else if (disk->view) {
        rc = -EROFS;
    } else {
        f.fd = openat(disk->directory, name,
                      O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW |
                          (disk->direct ? O_DIRECT : 0),
                      0600);
        if (f.fd < 0)
            rc = -errno;
    }
    if (rc == 0)
        rc = number_file(disk, f);
    if (rc < 0)
        close_descriptors(f);
    return rc;
}

static void disk_close_file(struct kv_disk *base, int file)
{
    struct kv_machine_disk *disk = machine(base);
    struct kv_disk_file f = no_file;

    pthread_mutex_lock(&disk->lock);
    if (file >= 0 && (uint32_t)file < disk->n_files) {
        f = disk->files[file];
        disk->files[file] = no_file;
    }
    pthread_mutex_unlock(&disk->lock);
    close_descriptors(f);
}

static int disk_allocate(struct kv_disk *disk, int file, uint64_t bytes)
{
    const int fd = kv_disk_file(machine(disk), file).fd;
    int rc;

    if (bytes > INT64_MAX)
        return -EFBIG;
    do
        rc = fallocate(fd, 0, 0, (off_t)bytes);
    while (rc < 0 && errno == EINTR);
    if (rc < 0 && errno == EOPNOTSUPP)
        return 0; /* a file system that cannot: the writes will tell */
    return result(rc);
}

static int disk_truncate(struct kv_disk *disk, int file, uint64_t bytes)
{
    if (bytes > INT64_MAX)
        return -EFBIG;
    return result(ftruncate(kv_disk_file(machine(disk), file).fd, (off_t)bytes));
}

static int disk_sync(struct kv_disk *disk, int file)
{
    return result(fdatasync(kv_disk_file(machine(disk), file).fd));
}

/* Whether the page of a byte that the file has is in memory. */
static bool is_resident(const struct kv_disk_file *f, uint64_t offset)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    unsigned char in_memory;

    return mincore((char *)f->map + offset / page * page, 1, &in_memory) == 0 && (in_memory & 1);
}

/* How many of the first len bytes from the offset on are in memory; looks at 4 MiB or more of them.
 * Where the first and the last page are, so nearly always is what lies between: that is not asked
 * for page by page, which would take a twentieth of the time of reading it. */
static size_t resident(const struct kv_disk_file *f, size_t len, uint64_t offset)
{
    enum { N_PAGES = 1024 };
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t start = offset / page * page;
    unsigned char in_memory[N_PAGES];
    size_t span, known = 0;

    if (f->map == NULL || offset >= f->map_bytes || len == 0)
        return 0;
    len = f->map_bytes - offset < len ? f->map_bytes - offset : len;
    if (is_resident(f, offset) && is_resident(f, offset + len - 1))
        return len;
    span = offset - start + len < N_PAGES * page ? offset - start + len : N_PAGES * page;
    if (mincore((char *)f->map + start, span, in_memory) < 0)
        return 0;
    for (size_t i = 0; known < span && (in_memory[i] & 1); i++)
        known += page;
    known = known < span ? known : span;
    return known > offset - start ? known - (offset - start) : 0;
}

static int64_t disk_read_cached(struct kv_disk *disk, int file, void *dst, size_t len,
                                uint64_t offset)
{
    const struct kv_disk_file f = kv_disk_file(machine(disk), file);
    struct iovec into = {dst, 0};
    ssize_t n;

    if (offset > INT64_MAX)
        return -EINVAL;
    into.iov_len = resident(&f, len, offset);
    if (into.iov_len == 0)
        return -EAGAIN;
    do
        n = preadv2(f.cached, &into, 1, (off_t)offset, RWF_NOWAIT);
    while (n < 0 && errno == EINTR);
    if (n >= 0)
        return n;
    return errno == EOPNOTSUPP ? -EAGAIN : -errno;
}

/* ---- The disk ---- */

static const char *disk_describe(struct kv_disk *disk)
{
    return machine(disk)->text;
}

static uint64_t disk_now_ns(struct kv_disk *disk)
{
    struct timespec now;

    (void)disk;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static void disk_close(struct kv_disk *base)
{
    struct kv_machine_disk *disk = machine(base);

    if (disk->directory >= 0)
        close(disk->directory);
    pthread_mutex_destroy(&disk->lock);
    free(disk->files);
    free(disk);
}

static const struct kv_disk_ops machine_ops = {
    .close = disk_close,
    .describe = disk_describe,
    .now_ns = disk_now_ns,
    .list = disk_list,
    .stat = disk_stat,
    .touch = disk_touch,
    .rename = disk_rename,
    .unlink = disk_unlink,
    .sync_directory = disk_sync_directory,
    .open = disk_open,
    .allocate = disk_allocate,
    .truncate = disk_truncate,
    .sync = disk_sync,
    .close_file = disk_close_file,
    .read_cached = disk_read_cached,
    .queue_open = kv_machine_queue_open,
    .queue_close = kv_machine_queue_close,
    .submit = kv_machine_submit,
    .wait = kv_machine_wait,
};

/* The directory, ours alone until the descriptor is closed. */
static int open_directory(struct kv_machine_disk *disk, const char *path, struct kv_why *why)
{
    if (!disk->view && mkdir(path, 0700) < 0 && errno != EEXIST)
        return kv_io_error(why, errno, "make directory", path);
    disk->directory = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (disk->directory < 0)
        return kv_io_error(why, errno, "open directory", path);
    if (disk->view || flock(disk->directory, LOCK_EX | LOCK_NB) == 0)
        return 0;
    if (errno == EWOULDBLOCK)
        return kv_fail(why, KV_ERR_BUSY, "directory %s is in use by another process", path);
    return kv_io_error(why, errno, "lock directory", path);
}

/* Whether one block goes to a direct file and comes back: what a file system says of itself is not
 * always so.  A file system that cannot be written to is an error. */
static int probe_direct(struct kv_machine_disk *disk, const char *path, struct kv_why *why)
{
    static const char name[] = "probe.tmp";
    unsigned char *block = aligned_alloc(KV_IO_ALIGN, KV_IO_ALIGN);
    int fd, rc = 0;

    if (block == NULL)
        return kv_fail(why, KV_ERR_NOMEM, "no memory to probe directory %s", path);
    memset(block, 0, KV_IO_ALIGN);
    (void)unlinkat(disk->directory, name, 0); /* of a process that died here */
    fd = openat(disk->directory, name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0)
        rc = kv_io_error(why, errno, "write to directory", path);
    else
        disk->direct = fcntl(fd, F_SETFL, O_DIRECT) == 0 &&
                       pwrite(fd, block, KV_IO_ALIGN, 0) == KV_IO_ALIGN &&
                       pread(fd, block, KV_IO_ALIGN, 0) == KV_IO_ALIGN;
    if (fd >= 0) {
        close(fd);
        (void)unlinkat(disk->directory, name, 0);
    }
    free(block);
    return rc;
}

static void choose(struct kv_machine_disk *disk, unsigned without)
{
    if (without & KV_WITHOUT_DIRECT)
        disk->direct = false;
    disk->ring = disk->direct && !(without & KV_WITHOUT_RING) && kv_ring_works(&disk->registered);
    if (without & KV_WITHOUT_REGISTERED || !disk->ring)
        disk->registered = false;
    snprintf(disk->text, sizeof(disk->text), "%s, %s%s", disk->ring ? "io_uring" : "pwrite",
             disk->direct ? "O_DIRECT" : "page cache",
             disk->registered ? ", registered buffers" : "");
}

static int open_disk(const char *directory, bool view, unsigned without, struct kv_disk **out,
                     struct kv_why *why)
{
    struct kv_machine_disk *disk = calloc(1, sizeof(*disk));
    int rc;

    if (disk == NULL)
        return kv_fail(why, KV_ERR_NOMEM, "no memory for directory %s", directory);
    disk->base.ops = &machine_ops;
    disk->directory = -1;
    disk->view = view;
    pthread_mutex_init(&disk->lock, NULL);
    rc = open_directory(disk, directory, why);
    if (rc == 0 && !view)
        rc = probe_direct(disk, directory, why);
    if (rc < 0) {
        disk_close(&disk->base);
        return rc;
    }
    choose(disk, without);
    *out = &disk->base;
    return 0;
}

int kv_disk_open(const char *directory, unsigned without, struct kv_disk **out, struct kv_why *why)
{
    return open_disk(directory, false, without, out, why);
}

int kv_disk_view(const char *directory, struct kv_disk **out, struct kv_why *why)
{
    return open_disk(directory, true, 0, out, why);
}

#include "bench/bench_snapshot.h"

#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct raw {
    char directory[PATH_MAX - 16], path[PATH_MAX], temporary[PATH_MAX];
    uint64_t bytes;
    struct io_uring ring;
    unsigned char *buffers; /* [KV_IO_DEPTH][RAW_BLOCK] */
};

static void must_io(int rc, const char *what)
{
    if (rc < 0) {
        fprintf(stderr, "bench_snapshot: raw line: %s: %s\n", what,
                strerror(rc == -1 ? errno : -rc));
        exit(2);
    }
}

struct raw *raw_open(const char *directory, uint64_t bytes)
{
    struct raw *r = must_have(calloc(1, sizeof(*r)));
    struct iovec registered[KV_IO_DEPTH];

    snprintf(r->directory, sizeof(r->directory), "%s", directory);
    snprintf(r->path, sizeof(r->path), "%s/raw", r->directory);
    snprintf(r->temporary, sizeof(r->temporary), "%s/raw.tmp", r->directory);
    r->bytes = bytes;
    r->buffers = must_have(aligned_alloc(KV_IO_ALIGN, (size_t)KV_IO_DEPTH * RAW_BLOCK));
    memset(r->buffers, 0x5a, (size_t)KV_IO_DEPTH * RAW_BLOCK);
    for (int i = 0; i < KV_IO_DEPTH; i++)
        registered[i] = (struct iovec){r->buffers + (size_t)i * RAW_BLOCK, RAW_BLOCK};
    must_io(io_uring_queue_init(KV_IO_DEPTH, &r->ring, IORING_SETUP_COOP_TASKRUN), "ring");
    must_io(io_uring_register_buffers(&r->ring, registered, KV_IO_DEPTH), "register buffers");
    return r;
}

void raw_close(struct raw *r)
{
    io_uring_queue_exit(&r->ring);
    raw_forget(r);
    free(r->buffers);
    free(r);
}

void raw_forget(struct raw *r)
{
    unlink(r->path);
}

const char *raw_path(const struct raw *r)
{
    return r->path;
}

static void submit(struct raw *r, int fd, bool write, uint64_t offset, int buffer)
{
    struct io_uring_sqe *sqe = must_have(io_uring_get_sqe(&r->ring));
    unsigned char *bytes = r->buffers + (size_t)buffer * RAW_BLOCK;
    const uint64_t left = r->bytes - offset;
    const unsigned len = left < RAW_BLOCK ? (unsigned)left : RAW_BLOCK;

    if (write)
        io_uring_prep_write_fixed(sqe, fd, bytes, len, offset, buffer);
    else
        io_uring_prep_read_fixed(sqe, fd, bytes, len, offset, buffer);
    io_uring_sqe_set_data64(sqe, (uint64_t)buffer << 32 | len);
    must_io(io_uring_submit(&r->ring), "submit");
}

/* All of the file, KV_IO_DEPTH blocks at a time. */
static void move_all(struct raw *r, int fd, bool write)
{
    uint64_t begun = 0, done = 0;

    for (int i = 0; i < KV_IO_DEPTH && begun < r->bytes; i++, begun += RAW_BLOCK)
        submit(r, fd, write, begun, i);
    while (done < r->bytes) {
        struct io_uring_cqe *cqe;
        uint64_t data;
        int rc;

        do
            rc = io_uring_wait_cqe(&r->ring, &cqe);
        while (rc == -EINTR);
        must_io(rc, "wait");
        data = io_uring_cqe_get_data64(cqe);
        must_io(cqe->res, write ? "write" : "read");
        if ((uint32_t)cqe->res != (uint32_t)data)
            must_io(-EIO, "short operation");
        done += (uint32_t)data;
        io_uring_cqe_seen(&r->ring, cqe);
        if (begun < r->bytes) {
            submit(r, fd, write, begun, (int)(data >> 32));
            begun += RAW_BLOCK;
        }
    }
}

void raw_write(struct raw *r)
{
    const int fd = open(r->temporary, O_WRONLY | O_CREAT | O_TRUNC | O_DIRECT | O_CLOEXEC, 0600);
    const int directory = open(r->directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    must_io(fd, "create");
    must_io(directory, "open directory");
    must_io(fallocate(fd, 0, 0, (off_t)r->bytes), "fallocate");
    move_all(r, fd, true);
    must_io(fdatasync(fd), "fdatasync");
    must_io(rename(r->temporary, r->path), "rename");
    must_io(fsync(directory), "fsync of the directory");
    close(fd);
    close(directory);
}

void raw_read(struct raw *r)
{
    const int fd = open(r->path, O_RDONLY | O_DIRECT | O_CLOEXEC);

    must_io(fd, "open");
    move_all(r, fd, false);
    close(fd);
}

void raw_pread(struct raw *r)
{
    const int fd = open(r->path, O_RDONLY | O_CLOEXEC);

    must_io(fd, "open");
    for (uint64_t at = 0; at < r->bytes;) {
        const ssize_t n = pread(fd, r->buffers, RAW_BLOCK, (off_t)at);

        must_io(n > 0 ? 0 : -EIO, "pread");
        at += (uint64_t)n;
    }
    close(fd);
}

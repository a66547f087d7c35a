#include "kvcore/kv_disk.h"

#include <errno.h>
#include <liburing.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef RWF_DONTCACHE
#define RWF_DONTCACHE 0x80 /* since Linux 6.14: written through the page cache, and not kept */
#endif

/* Without a ring an operation is done when it is submitted, and its result waits here. */
struct machine_queue {
    struct kv_queue base;
    unsigned char *memory; /* of all buffers */
    size_t memory_bytes;
    bool has_ring;
    bool registered;
    bool dont_cache; /* until the kernel refuses it */
    struct io_uring ring;
    uint32_t n_under_way;
    struct kv_io_done *done; /* [n_buffers] without a ring; the first n_under_way are set */
};

static struct machine_queue *machine(struct kv_queue *queue)
{
    return (struct machine_queue *)queue;
}

static struct kv_machine_disk *disk_of(const struct machine_queue *q)
{
    return (struct kv_machine_disk *)q->base.disk;
}

/* ---- Rings ---- */

/* Completions are reaped by the thread that waits, so nothing needs to interrupt it; an older
 * kernel does not know the flag. */
static int ring_init(struct io_uring *ring, uint32_t depth)
{
    int rc = io_uring_queue_init(depth, ring, IORING_SETUP_COOP_TASKRUN);

    return rc == -EINVAL ? io_uring_queue_init(depth, ring, 0) : rc;
}

bool kv_ring_works(bool *registered)
{
    struct io_uring ring;
    unsigned char *page;
    struct iovec buffer;

    *registered = false;
    if (ring_init(&ring, 1) < 0)
        return false;
    page = aligned_alloc(KV_IO_ALIGN, KV_IO_ALIGN);
    buffer = (struct iovec){page, KV_IO_ALIGN};
    if (page != NULL)
        *registered = io_uring_register_buffers(&ring, &buffer, 1) == 0;
    io_uring_queue_exit(&ring);
    free(page);
    return true;
}

/* Registration pins the buffers, which the limit of locked memory may not allow: then each
 * operation pins its own. */
static bool ring_register(struct machine_queue *q)
{
    struct iovec *buffers = calloc(q->base.n_buffers, sizeof(*buffers));
    bool done;

    if (buffers == NULL)
        return false;
    for (uint32_t i = 0; i < q->base.n_buffers; i++)
        buffers[i] = (struct iovec){q->base.buffers[i], q->base.buffer_bytes};
    done = io_uring_register_buffers(&q->ring, buffers, q->base.n_buffers) == 0;
    free(buffers);
    return done;
}

/* ---- Open and close ---- */

static int allocate_buffers(struct machine_queue *q, uint32_t n_buffers, uint32_t buffer_bytes)
{
    const size_t bytes = (size_t)n_buffers * buffer_bytes;

    q->base.buffers = calloc(n_buffers, sizeof(*q->base.buffers));
    q->done = calloc(n_buffers, sizeof(*q->done));
    if (q->base.buffers == NULL || q->done == NULL)
        return -ENOMEM;
    q->memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (q->memory == MAP_FAILED) {
        q->memory = NULL;
        return -ENOMEM;
    }
    q->memory_bytes = bytes;
    /* Small pages: a huge one that is pinned in part cannot be split or moved. */
    (void)madvise(q->memory, bytes, MADV_NOHUGEPAGE);
    for (uint32_t i = 0; i < n_buffers; i++)
        q->base.buffers[i] = q->memory + (size_t)i * buffer_bytes;
    q->base.n_buffers = n_buffers;
    q->base.buffer_bytes = buffer_bytes;
    return 0;
}

int kv_machine_queue_open(struct kv_disk *base, uint32_t n_buffers, uint32_t buffer_bytes,
                          struct kv_queue **out)
{
    struct machine_queue *q;
    int rc;

    if (n_buffers == 0 || buffer_bytes == 0 || buffer_bytes % KV_IO_ALIGN != 0 ||
        buffer_bytes > INT_MAX)
        return -EINVAL;
    q = calloc(1, sizeof(*q));
    if (q == NULL)
        return -ENOMEM;
    q->base.disk = base;
    q->dont_cache = true;
    rc = allocate_buffers(q, n_buffers, buffer_bytes);
    if (rc < 0) {
        kv_machine_queue_close(&q->base);
        return rc;
    }
    q->has_ring = disk_of(q)->ring && ring_init(&q->ring, n_buffers) == 0;
    q->registered = q->has_ring && disk_of(q)->registered && ring_register(q);
    *out = &q->base;
    return 0;
}

void kv_machine_queue_close(struct kv_queue *queue)
{
    struct machine_queue *q = machine(queue);

    if (q == NULL)
        return;
    if (q->has_ring)
        io_uring_queue_exit(&q->ring);
    if (q->memory != NULL)
        munmap(q->memory, q->memory_bytes);
    free(q->base.buffers);
    free(q->done);
    free(q);
}

/* ---- Operations ---- */

static int64_t write_now(struct machine_queue *q, int fd, void *from, size_t len, off_t offset)
{
    struct iovec piece = {from, len};
    ssize_t n;

    if (!disk_of(q)->direct && q->dont_cache) {
        n = pwritev2(fd, &piece, 1, offset, RWF_DONTCACHE);
        if (n >= 0 || (errno != EOPNOTSUPP && errno != EINVAL))
            return n < 0 ? -errno : n;
        q->dont_cache = false;
    }
    n = pwrite(fd, from, len, offset);
    return n < 0 ? -errno : n;
}

static int64_t do_now(struct machine_queue *q, const struct kv_io_op *op, int fd)
{
    unsigned char *bytes = q->base.buffers[op->buffer] + op->at;
    ssize_t n;

    if (op->kind == KV_IO_WRITE)
        return write_now(q, fd, bytes, op->len, (off_t)op->offset);
    n = pread(fd, bytes, op->len, (off_t)op->offset);
    return n < 0 ? -errno : n;
}

static int submit_to_ring(struct machine_queue *q, const struct kv_io_op *op, int fd)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(&q->ring);
    unsigned char *bytes = q->base.buffers[op->buffer] + op->at;
    int rc;

    if (sqe == NULL)
        return -EAGAIN;
    if (op->kind == KV_IO_WRITE && q->registered)
        io_uring_prep_write_fixed(sqe, fd, bytes, op->len, op->offset, (int)op->buffer);
    else if (op->kind == KV_IO_WRITE)
        io_uring_prep_write(sqe, fd, bytes, op->len, op->offset);
    else if (q->registered)
        io_uring_prep_read_fixed(sqe, fd, bytes, op->len, op->offset, (int)op->buffer);
    else
        io_uring_prep_read(sqe, fd, bytes, op->len, op->offset);
    io_uring_sqe_set_data64(sqe, op->tag);
    do
        rc = io_uring_submit(&q->ring);
    while (rc == -EINTR);
    /* What was prepared cannot be taken back: it goes with the next submit, and wait() sees it. */
    return 0;
}

int kv_machine_submit(struct kv_queue *queue, const struct kv_io_op *op)
{
    struct machine_queue *q = machine(queue);
    const int fd = kv_disk_file(disk_of(q), op->file).fd;
    int rc = 0;

    if (fd < 0)
        return -EBADF;
    if (op->buffer >= q->base.n_buffers || op->at > q->base.buffer_bytes ||
        op->len > q->base.buffer_bytes - op->at || op->offset > (uint64_t)INT64_MAX - op->len)
        return -EINVAL;
    if (q->n_under_way == q->base.n_buffers)
        return -EAGAIN;
    if (q->has_ring)
        rc = submit_to_ring(q, op, fd);
    else
        q->done[q->n_under_way] = (struct kv_io_done){op->tag, do_now(q, op, fd)};
    if (rc == 0)
        q->n_under_way++;
    return rc;
}

static int wait_for_ring(struct machine_queue *q, struct kv_io_done *out)
{
    struct io_uring_cqe *cqe;
    int rc;

    do
        rc = io_uring_submit_and_wait(&q->ring, 1);
    while (rc == -EINTR || rc == -EAGAIN || rc == -EBUSY ||
           (rc >= 0 && io_uring_peek_cqe(&q->ring, &cqe) < 0));
    if (rc < 0)
        return rc;
    out->tag = io_uring_cqe_get_data64(cqe);
    out->result = cqe->res;
    io_uring_cqe_seen(&q->ring, cqe);
    return 0;
}

int kv_machine_wait(struct kv_queue *queue, struct kv_io_done *out)
{
    struct machine_queue *q = machine(queue);
    int rc = 0;

    if (q->n_under_way == 0)
        return -ENOENT;
    if (q->has_ring)
        rc = wait_for_ring(q, out);
    else
        *out = q->done[q->n_under_way - 1];
    if (rc == 0)
        q->n_under_way--;
    return rc;
}

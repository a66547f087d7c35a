/* All I/O of the snapshot store, behind one table, so that a simulated disk can stand in.
 *
 * A *disk* is one directory: names, whole-file operations, and the clock that its times are in.  A
 * *queue* is some staging buffers and the reads and writes between them and files that are under
 * way; it belongs to one thread at a time.  Errors are negative errno values; wait() reports those
 * of the operations themselves.  A name is a plain file name, never a path.
 *
 * What users of a queue owe it:
 * - From submit() until its completion an operation's bytes are the disk's: neither written to nor
 *   believed.  A file is not cut, synced or closed while an operation on it is under way.
 * - A tag is used once in a queue's life (next_tag counts).  Completions may come in any order,
 * twice, or for operations long given up: one whose tag is not under way is ignored.
 * - A result shorter than asked for, -EINTR and -EAGAIN say to submit the rest again (0 of a read:
 *   the file ends there; 0 of a write: an error).
 *
 * Of the machine's own disk there are kinds, the fastest that works is chosen when it is opened:
 * io_uring with O_DIRECT and registered buffers, without registration, without O_DIRECT; and where
 * io_uring is not allowed, pwrite and pread on the spot.  kv_disk_describe() says which. */
#ifndef KV_IO_H
#define KV_IO_H

#include "kvcore/kvcore.h"

enum {
    KV_IO_ALIGN = 4096, /* offsets, lengths and buffers of a direct file's operations */
    KV_IO_DEPTH = 8,    /* buffers of a queue, and so the most operations under way */
};

struct kv_disk;
struct kv_queue;

struct kv_disk_stat {
    uint64_t bytes;     /* length */
    uint64_t allocated; /* on disk */
    int64_t mtime_ns;
};

enum kv_disk_open { KV_DISK_READ, KV_DISK_CREATE /* must not exist; 0600, to write */ };

enum kv_io_kind { KV_IO_READ, KV_IO_WRITE };

/* One read or write: len bytes of buffer `buffer` from `at` on, to or from the file's `offset`.
 * len is at most INT_MAX, and for a direct file all three are multiples of KV_IO_ALIGN (a file's
 * last block is written whole, the file is cut to its length after). */
struct kv_io_op {
    enum kv_io_kind kind;
    int file;
    uint32_t buffer;
    uint32_t at;
    uint32_t len;
    uint64_t offset;
    uint64_t tag; /* comes back with the completion */
};

struct kv_io_done {
    uint64_t tag;
    int64_t result; /* bytes moved, perhaps fewer than asked for, or -errno */
};

struct kv_disk_ops {
    void (*close)(struct kv_disk *disk);
    const char *(*describe)(struct kv_disk *disk);
    uint64_t (*now_ns)(struct kv_disk *disk);
    /* Each name in the directory, in no order; stops at the first nonzero and returns it. */
    int (*list)(struct kv_disk *disk, int (*each)(void *arg, const char *name), void *arg);
    int (*stat)(struct kv_disk *disk, const char *name, struct kv_disk_stat *out);
    int (*touch)(struct kv_disk *disk, const char *name, int64_t mtime_ns);
    int (*rename)(struct kv_disk *disk, const char *from, const char *to); /* replaces */
    int (*unlink)(struct kv_disk *disk, const char *name);
    int (*sync_directory)(struct kv_disk *disk);

    /* A file number >= 0. */
    int (*open)(struct kv_disk *disk, const char *name, enum kv_disk_open how);
    /* Take the space: -ENOSPC before any write.  The length may become as much. */
    int (*allocate)(struct kv_disk *disk, int file, uint64_t bytes);
    int (*truncate)(struct kv_disk *disk, int file, uint64_t bytes);
    /* Data, and what is needed to find it in the file; the name is sync_directory()'s.  After an
     * error what was written is lost, whatever a later sync says. */
    int (*sync)(struct kv_disk *disk, int file);
    void (*close_file)(struct kv_disk *disk, int file);
    /* Read what the operating system has in memory, without touching the disk: bytes, perhaps
     * fewer than asked for; -EAGAIN where it has not; any alignment. */
    int64_t (*read_cached)(struct kv_disk *disk, int file, void *dst, size_t len, uint64_t offset);

    int (*queue_open)(struct kv_disk *disk, uint32_t n_buffers, uint32_t buffer_bytes,
                      struct kv_queue **out);
    /* Nothing may be under way. */
    void (*queue_close)(struct kv_queue *queue);
    /* Begin an operation.  -EAGAIN: n_buffers are under way. */
    int (*submit)(struct kv_queue *queue, const struct kv_io_op *op);
    /* One completion, in any order; blocks.  -ENOENT: nothing is under way. */
    int (*wait)(struct kv_queue *queue, struct kv_io_done *out);
};

/* Implementations begin with these. */
struct kv_disk {
    const struct kv_disk_ops *ops;
};

struct kv_queue {
    struct kv_disk *disk;
    unsigned char **buffers; /* [n_buffers], each KV_IO_ALIGN aligned, [buffer_bytes] */
    uint32_t n_buffers;
    uint32_t buffer_bytes; /* a multiple of KV_IO_ALIGN */
    uint64_t next_tag;     /* for its users, who take one for each operation; starts at 0 */
};

/* The machine's disk: a directory, made (0700) where it is not there, and locked against a second
 * process until it is closed.  KV_ERR_IO names the directory and the reason.  without: what not to
 * use although it works here, 0 for nothing. */
enum kv_disk_without {
    KV_WITHOUT_RING = 1,
    KV_WITHOUT_DIRECT = 2,
    KV_WITHOUT_REGISTERED = 4,
};
int kv_disk_open(const char *directory, unsigned without, struct kv_disk **out, struct kv_why *why);
/* To look at the files of a directory that others may be using: it is neither made, locked nor
 * written to; what would change it is -EROFS. */
int kv_disk_view(const char *directory, struct kv_disk **out, struct kv_why *why);

/* KV_ERR_FULL for ENOSPC and EDQUOT, KV_ERR_NOMEM for ENOMEM, KV_ERR_NOT_FOUND for ENOENT, else
 * KV_ERR_IO; the text says what was being done, to which name, and the reason. */
int kv_io_error(struct kv_why *why, int error, const char *doing, const char *name);

#endif

/* The machine's disk, as its two files see it: kv_disk.c (names and whole files) and kv_queue.c
 * (reads and writes). */
#ifndef KV_DISK_H
#define KV_DISK_H

#include "kvcore/kv_io.h"

#include <pthread.h>

/* An open file.  A file to read has a second descriptor without O_DIRECT, for what the page cache
 * has, and a mapping that is only asked what that is: a read that finds nothing there, RWF_NOWAIT
 * or not, starts to read ahead. */
struct kv_disk_file {
    int fd;           /* -1: this number is free */
    int cached;       /* -1: none */
    void *map;        /* NULL: none */
    size_t map_bytes; /* the file's when it was opened */
};

struct kv_machine_disk {
    struct kv_disk base;
    int directory;
    bool view;       /* nothing may be changed */
    bool direct;     /* files are opened with O_DIRECT */
    bool ring;       /* queues are rings; only with direct: buffered I/O is slower through one */
    bool registered; /* and their buffers are registered */
    char text[64];

    pthread_mutex_t lock;       /* of the files */
    struct kv_disk_file *files; /* [n_files] */
    uint32_t n_files;
};

/* The descriptors behind a file number. */
struct kv_disk_file kv_disk_file(struct kv_machine_disk *disk, int file);

int kv_machine_queue_open(struct kv_disk *disk, uint32_t n_buffers, uint32_t buffer_bytes,
                          struct kv_queue **out);
void kv_machine_queue_close(struct kv_queue *queue);
int kv_machine_submit(struct kv_queue *queue, const struct kv_io_op *op);
int kv_machine_wait(struct kv_queue *queue, struct kv_io_done *out);

/* Whether a ring can be had here, and whether it takes buffers to register. */
bool kv_ring_works(bool *registered);

#endif

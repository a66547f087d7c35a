/* Reads or writes of one file that are under way in a queue, at most one a buffer, each gone on
 * with until all of it has moved: what comes short is submitted again from a whole block on, what
 * was interrupted again as it is.  The first error is kept, and nothing is submitted after it. */
#ifndef KV_TRANSFER_H
#define KV_TRANSFER_H

#include "kvcore/kv_io.h"

/* In a buffer; len 0: nothing under way. */
struct kv_transfer {
    uint64_t tag;
    uint64_t offset;
    uint32_t at;
    uint32_t len;
    uint32_t n_stalls;
};

struct kv_transfers {
    struct kv_queue *queue;
    enum kv_io_kind kind;
    int file;
    struct kv_transfer *each; /* [n_buffers] */
    uint32_t n_under_way;
    int error; /* negative errno, or 0 */
};

/* KV_ERR_NOMEM. */
int kv_transfers_open(struct kv_transfers *t, struct kv_queue *queue, enum kv_io_kind kind,
                      int file);
/* Waits for what is under way. */
void kv_transfers_close(struct kv_transfers *t);

/* Move len bytes of the buffer from its beginning, to or from offset; nothing is under way in it.
 */
void kv_transfers_begin(struct kv_transfers *t, uint32_t buffer, uint64_t offset, uint32_t len);
/* Until nothing is under way in the buffer, or in any; returns the error. */
int kv_transfers_wait(struct kv_transfers *t, uint32_t buffer);
int kv_transfers_drain(struct kv_transfers *t);

#endif

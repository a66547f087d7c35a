#include "kvcore/kv_transfer.h"

#include <errno.h>
#include <stdlib.h>

enum { MAX_STALLS = 16 }; /* operations in a row that move nothing before it is an error */

static void set_error(struct kv_transfers *t, int error)
{
    if (t->error == 0)
        t->error = error;
}

int kv_transfers_open(struct kv_transfers *t, struct kv_queue *queue, enum kv_io_kind kind,
                      int file)
{
    *t = (struct kv_transfers){.queue = queue,
                               .kind = kind,
                               .file = file,
                               .each = calloc(queue->n_buffers, sizeof(*t->each))};
    return t->each != NULL ? 0 : KV_ERR_NOMEM;
}

void kv_transfers_close(struct kv_transfers *t)
{
    if (t->each != NULL)
        (void)kv_transfers_drain(t);
    free(t->each);
}

static void submit(struct kv_transfers *t, uint32_t buffer)
{
    struct kv_transfer *x = &t->each[buffer];
    const struct kv_io_op op = {.kind = t->kind,
                                .file = t->file,
                                .buffer = buffer,
                                .at = x->at,
                                .len = x->len,
                                .offset = x->offset,
                                .tag = ++t->queue->next_tag};
    const int rc = t->queue->disk->ops->submit(t->queue, &op);

    if (rc < 0) {
        x->len = 0;
        set_error(t, rc);
        return;
    }
    x->tag = op.tag;
    t->n_under_way++;
}

void kv_transfers_begin(struct kv_transfers *t, uint32_t buffer, uint64_t offset, uint32_t len)
{
    t->each[buffer] = (struct kv_transfer){.offset = offset, .len = len};
    submit(t, buffer);
}

static void go_on(struct kv_transfers *t, uint32_t buffer, int64_t result)
{
    struct kv_transfer *x = &t->each[buffer];
    const bool again = result == -EINTR || result == -EAGAIN;
    const uint32_t moved = result > 0 ? (uint32_t)result / KV_IO_ALIGN * KV_IO_ALIGN : 0;

    if (result >= 0 && (uint32_t)result >= x->len) {
        x->len = 0;
        return;
    }
    x->n_stalls = moved > 0 ? 0 : x->n_stalls + 1;
    if (result < 0 && !again)
        set_error(t, (int)result);
    else if (x->n_stalls > MAX_STALLS)
        set_error(t, result < 0 ? (int)result : -EIO);
    if (t->error != 0) {
        x->len = 0;
        return;
    }
    x->at += moved;
    x->offset += moved;
    x->len -= moved;
    submit(t, buffer);
}

/* Take one completion.  A tag that nothing here waits for is stale: not ours any more. */
static void reap(struct kv_transfers *t)
{
    struct kv_io_done done;
    const int rc = t->queue->disk->ops->wait(t->queue, &done);

    if (rc < 0) { /* the queue itself failed: nothing of it will come */
        set_error(t, rc);
        for (uint32_t i = 0; i < t->queue->n_buffers; i++)
            t->each[i].len = 0;
        t->n_under_way = 0;
        return;
    }
    for (uint32_t i = 0; i < t->queue->n_buffers; i++)
        if (t->each[i].len > 0 && t->each[i].tag == done.tag) {
            t->n_under_way--;
            go_on(t, i, done.result);
            return;
        }
}

int kv_transfers_wait(struct kv_transfers *t, uint32_t buffer)
{
    while (t->each[buffer].len > 0)
        reap(t);
    return t->error;
}

int kv_transfers_drain(struct kv_transfers *t)
{
    while (t->n_under_way > 0)
        reap(t);
    return t->error;
}

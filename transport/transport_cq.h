/* transport_cq: completion queues and the only way to them.  Everything that hands a tag to gRPC
 * and everything that takes one back goes through here, so that ThreadSanitizer, which cannot see
 * into the library, is told of the order between the two. */
#ifndef TRANSPORT_CQ_H
#define TRANSPORT_CQ_H

#include <grpc/grpc.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define TRANSPORT_TSAN 1
#endif
#elif defined(__SANITIZE_THREAD__)
#define TRANSPORT_TSAN 1
#endif

#ifdef TRANSPORT_TSAN
#include <sanitizer/tsan_interface.h>
#endif

/* What this thread did before give() is seen by the thread that calls take() with the same
 * address. */
static inline void transport_cq_give(void *address)
{
#ifdef TRANSPORT_TSAN
    __tsan_release(address);
#else
    (void)address;
#endif
}

static inline void transport_cq_take(void *address)
{
#ifdef TRANSPORT_TSAN
    __tsan_acquire(address);
#else
    (void)address;
#endif
}

/* Embedded in what it belongs to; fn is called on the queue's thread, once for each time that the
 * tag was given to gRPC. */
struct transport_tag {
    void (*fn)(struct transport_tag *tag, bool ok);
};

#define TRANSPORT_CONTAINER(tag, type, member) \
    ((type *)(void *)((char *)(tag)-offsetof(type, member)))

/* A queue and its one thread: a second thread on a queue only fights for the poller. */
struct transport_cq {
    grpc_completion_queue *cq;
    pthread_t thread;
};

int transport_cq_open(struct transport_cq *q);
/* Nothing may be started on it any more: gRPC aborts the process over it.  Waits for all tags. */
void transport_cq_close(struct transport_cq *q);

/* One more op in ops[*n], empty but for its type. */
static inline grpc_op *transport_cq_op(grpc_op *ops, size_t *n, grpc_op_type type)
{
    grpc_op *op = &ops[(*n)++];

    memset(op, 0, sizeof(*op));
    op->op = type;
    return op;
}

/* Calls on one call are in order by the caller's doing.  On false the tag will not come, and the
 * call is good for nothing but to be cancelled. */
static inline bool transport_cq_batch(grpc_call *call, const grpc_op *ops, size_t n_ops,
                                      struct transport_tag *tag)
{
    transport_cq_give(tag);
    return grpc_call_start_batch(call, ops, n_ops, tag, NULL) == GRPC_CALL_OK;
}

/* Have fn called with ok on the call's queue, soon. */
static inline bool transport_cq_post(grpc_call *call, struct transport_tag *tag)
{
    return transport_cq_batch(call, NULL, 0, tag);
}

#endif

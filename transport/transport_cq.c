#include "transport/transport_cq.h"

#include "transport/transport.h"

#include <signal.h>

static void *serve(void *arg)
{
    grpc_completion_queue *cq = arg;
    struct transport_tag *tag;
    grpc_event event;

    for (;;) {
        event = grpc_completion_queue_next(cq, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
        if (event.type == GRPC_QUEUE_SHUTDOWN)
            return NULL;
        if (event.type != GRPC_OP_COMPLETE)
            continue;
        tag = event.tag;
        transport_cq_take(tag);
        tag->fn(tag, event.success != 0);
    }
}

int transport_cq_open(struct transport_cq *q)
{
    sigset_t all, before;
    int rc;

    q->cq = grpc_completion_queue_create_for_next(NULL);
    /* Signals are for the program's own threads. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    rc = pthread_create(&q->thread, NULL, serve, q->cq);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc != 0) {
        grpc_completion_queue_shutdown(q->cq);
        grpc_completion_queue_destroy(q->cq);
        q->cq = NULL;
        return TRANSPORT_ERR_NOMEM;
    }
    pthread_setname_np(q->thread, "transport");
    return 0;
}

void transport_cq_close(struct transport_cq *q)
{
    if (!q->cq)
        return;
    grpc_completion_queue_shutdown(q->cq);
    pthread_join(q->thread, NULL);
    grpc_completion_queue_destroy(q->cq);
    q->cq = NULL;
}

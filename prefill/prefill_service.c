#include "prefill/prefill_node.h"

static void on_wake(void *user, struct transport_call *call)
{
    struct prefill_job *job = user;

    (void)call;
    node_inbox_wake(&job->node->inbox);
}

static void on_done(void *user, struct transport_call *call)
{
    (void)call;
    prefill_job_unref(user);
}

/* On a gRPC thread: nothing is looked at here. */
void prefill_service_compute(void *user, struct transport_call *call,
                             struct transport_message *request)
{
    static const struct transport_call_events events = {
        .on_cancel = on_wake, .on_sent = on_wake, .on_done = on_done};
    struct prefill_node *node = user;
    struct prefill_job *job = prefill_job_new(node, call, request);

    if (job == NULL) {
        transport_call_finish(call, TRANSPORT_RESOURCE_EXHAUSTED, "no memory for a call");
        transport_call_unref(call);
        return;
    }
    atomic_fetch_add(&job->refs, 1);
    transport_call_set_events(call, &events, job);
    if (!node_queue_push(&node->front, job)) {
        transport_call_finish(call, TRANSPORT_RESOURCE_EXHAUSTED, "too many calls wait");
        prefill_job_unref(job);
    }
}

static void refuse(struct prefill_job *job, int status, const char *details)
{
    prefill_job_log(job, status, details);
    transport_call_finish(job->call, status, details);
    prefill_job_unref(job);
}

static void front_job(struct prefill_node *node, struct prefill_job *job)
{
    struct kv_why why = {.text = ""};
    int status = prefill_job_check(job, &why);
    uint32_t n_queued;

    if (status != TRANSPORT_OK) {
        refuse(job, status, why.text);
        return;
    }
    n_queued = atomic_fetch_add(&node->n_queued, 1);
    if (n_queued >= node->options->queue) {
        atomic_fetch_sub(&node->n_queued, 1);
        kv_fail(&why, 0, "queue: %u requests wait already", n_queued);
        refuse(job, TRANSPORT_RESOURCE_EXHAUSTED, why.text);
        return;
    }
    status = prefill_job_send_accepted(job, n_queued);
    if (status != TRANSPORT_OK) {
        atomic_fetch_sub(&node->n_queued, 1);
        refuse(job, status, "no memory for a message");
        return;
    }
    node_inbox_put(&node->inbox, &job->link);
}

void *prefill_service_front(void *arg)
{
    struct prefill_node *node = arg;
    struct prefill_job *job;

    while ((job = node_queue_pop(&node->front, -1)) != NULL)
        front_job(node, job);
    return NULL;
}

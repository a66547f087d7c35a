#include "node/node.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <time.h>

/* Waits are on the monotonic clock: a step of the wall clock neither ends nor prolongs them. */
static int init_cond(pthread_cond_t *cond)
{
    pthread_condattr_t attr;
    int rc;

    if (pthread_condattr_init(&attr) != 0)
        return -1;
    rc = pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    if (rc == 0)
        rc = pthread_cond_init(cond, &attr);
    pthread_condattr_destroy(&attr);
    return rc == 0 ? 0 : -1;
}

int node_queue_init(struct node_queue *q, size_t cap)
{
    void **items;

    assert(cap > 0);
    items = calloc(cap, sizeof(*items));
    if (items == NULL)
        return -1;
    if (pthread_mutex_init(&q->lock, NULL) != 0)
        goto no_lock;
    if (init_cond(&q->not_empty) != 0)
        goto no_cond;
    q->items = items;
    q->cap = cap;
    q->head = 0;
    q->n = 0;
    q->closed = false;
    return 0;

no_cond:
    pthread_mutex_destroy(&q->lock);
no_lock:
    free(items);
    return -1;
}

void node_queue_release(struct node_queue *q)
{
    assert(q->n == 0);
    pthread_cond_destroy(&q->not_empty);
    pthread_mutex_destroy(&q->lock);
    free(q->items);
    q->items = NULL;
    q->cap = 0;
}

bool node_queue_push(struct node_queue *q, void *item)
{
    bool taken = false;

    assert(item != NULL);
    pthread_mutex_lock(&q->lock);
    if (!q->closed && q->n < q->cap) {
        q->items[(q->head + q->n) % q->cap] = item;
        q->n++;
        taken = true;
        pthread_cond_signal(&q->not_empty);
    }
    pthread_mutex_unlock(&q->lock);
    return taken;
}

static struct timespec deadline_after(int timeout_ms)
{
    int64_t at_ns = node_now_ns() + (int64_t)timeout_ms * 1000000;
    struct timespec t = {.tv_sec = at_ns / 1000000000, .tv_nsec = at_ns % 1000000000};

    return t;
}

void *node_queue_pop(struct node_queue *q, int timeout_ms)
{
    struct timespec deadline = deadline_after(timeout_ms < 0 ? 0 : timeout_ms);
    void *item = NULL;
    int rc = 0;

    pthread_mutex_lock(&q->lock);
    while (q->n == 0 && !q->closed && rc != ETIMEDOUT) {
        if (timeout_ms < 0)
            rc = pthread_cond_wait(&q->not_empty, &q->lock);
        else
            rc = pthread_cond_timedwait(&q->not_empty, &q->lock, &deadline);
    }
    if (q->n > 0) {
        item = q->items[q->head];
        q->head = (q->head + 1) % q->cap;
        q->n--;
    }
    pthread_mutex_unlock(&q->lock);
    return item;
}

void node_queue_close(struct node_queue *q)
{
    pthread_mutex_lock(&q->lock);
    q->closed = true;
    pthread_cond_broadcast(&q->not_empty);
    pthread_mutex_unlock(&q->lock);
}

size_t node_queue_length(struct node_queue *q)
{
    size_t n;

    pthread_mutex_lock(&q->lock);
    n = q->n;
    pthread_mutex_unlock(&q->lock);
    return n;
}

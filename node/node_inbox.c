#include "node/node.h"

#include <assert.h>
#include <time.h>

int node_inbox_init(struct node_inbox *b)
{
    pthread_condattr_t attr;
    int rc;

    if (pthread_condattr_init(&attr) != 0)
        return -1;
    rc = pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    if (rc == 0)
        rc = pthread_cond_init(&b->not_empty, &attr);
    pthread_condattr_destroy(&attr);
    if (rc != 0)
        return -1;
    if (pthread_mutex_init(&b->lock, NULL) != 0) {
        pthread_cond_destroy(&b->not_empty);
        return -1;
    }
    b->first = NULL;
    b->last = &b->first;
    b->woken = false;
    return 0;
}

void node_inbox_release(struct node_inbox *b)
{
    assert(b->first == NULL);
    pthread_cond_destroy(&b->not_empty);
    pthread_mutex_destroy(&b->lock);
}

void node_inbox_put(struct node_inbox *b, struct node_link *item)
{
    item->next = NULL;
    pthread_mutex_lock(&b->lock);
    *b->last = item;
    b->last = &item->next;
    pthread_cond_signal(&b->not_empty);
    pthread_mutex_unlock(&b->lock);
}

void node_inbox_wake(struct node_inbox *b)
{
    pthread_mutex_lock(&b->lock);
    b->woken = true;
    pthread_cond_signal(&b->not_empty);
    pthread_mutex_unlock(&b->lock);
}

static struct timespec after_ms(int timeout_ms)
{
    int64_t at_ns = node_now_ns() + (int64_t)timeout_ms * 1000000;
    struct timespec t = {.tv_sec = at_ns / 1000000000, .tv_nsec = at_ns % 1000000000};

    return t;
}

struct node_link *node_inbox_take(struct node_inbox *b, int timeout_ms)
{
    struct timespec until = after_ms(timeout_ms > 0 ? timeout_ms : 0);
    struct node_link *items;
    int rc = 0;

    pthread_mutex_lock(&b->lock);
    while (b->first == NULL && !b->woken && timeout_ms != 0 && rc == 0) {
        if (timeout_ms < 0)
            rc = pthread_cond_wait(&b->not_empty, &b->lock);
        else
            rc = pthread_cond_timedwait(&b->not_empty, &b->lock, &until);
    }
    items = b->first;
    b->first = NULL;
    b->last = &b->first;
    b->woken = false;
    pthread_mutex_unlock(&b->lock);
    return items;
}

#include "kvcore/kv_clock.h"

#include <time.h>

static uint64_t now_ns(void)
{
    struct timespec now = {0};

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* A use takes far longer than a reading, so a clock that tells readings in a row apart tells uses
 * apart. */
void kv_clock_open(struct kv_clock *clock)
{
    enum { READINGS = 100 };
    uint64_t last = now_ns();
    bool counts = false;

    for (int i = 0; i < READINGS && !counts; i++) {
        const uint64_t now = now_ns();

        counts = now <= last;
        last = now;
    }
    atomic_init(&clock->counts, counts);
    atomic_init(&clock->last, 0);
}

/* After every stamp so far: those that were counted are at most `last`, those that were read, now.
 */
static uint64_t count(struct kv_clock *clock)
{
    const uint64_t now = now_ns();
    uint64_t last = atomic_load_explicit(&clock->last, memory_order_relaxed), next;

    do
        next = (now > last ? now : last) + 1;
    while (!atomic_compare_exchange_weak_explicit(&clock->last, &last, next, memory_order_relaxed,
                                                  memory_order_relaxed));
    return next;
}

uint64_t kv_clock_stamp(struct kv_clock *clock, uint64_t last)
{
    static _Thread_local uint64_t mine; /* the last reading of this thread, for any cache */

    if (!atomic_load_explicit(&clock->counts, memory_order_relaxed)) {
        const uint64_t now = now_ns();

        if (now > last && now > mine)
            return mine = now;
        atomic_store_explicit(&clock->counts, true, memory_order_relaxed);
    }
    return count(clock);
}

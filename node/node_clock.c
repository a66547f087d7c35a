#include "node/node.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/random.h>
#include <time.h>

static int64_t read_clock(clockid_t clock)
{
    struct timespec t;

    clock_gettime(clock, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

int64_t node_now_ns(void)
{
    return read_clock(CLOCK_MONOTONIC);
}

int64_t node_wall_ns(void)
{
    return read_clock(CLOCK_REALTIME);
}

void node_random(void *buf, size_t n)
{
    uint8_t *p = buf;

    while (n > 0) {
        ssize_t got = getrandom(p, n, 0);

        if (got < 0 && errno == EINTR)
            continue;
        /* A kernel that refuses leaves no way on: two processes with one epoch would each believe
         * the other's claims. */
        if (got <= 0)
            abort();
        p += got;
        n -= (size_t)got;
    }
}

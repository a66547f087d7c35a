/* The order of use over all shards of a cache.
 *
 * A use is stamped with the time, so that shards need not share a counter that each of their calls
 * would write: that takes a quarter of what a second thread adds.  It is exact as long as the clock
 * tells readings in a row apart, since a use takes longer than a reading.  A clock that does not is
 * found out at open, or later, when one thread or one shard has the same reading twice; from then
 * on stamps are counted.
 *
 * Two uses at the very same time on two processors were in no order; that of their shards is as
 * good as any. */
#ifndef KV_CLOCK_H
#define KV_CLOCK_H

#include <stdalign.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct kv_clock {
    atomic_bool counts; /* relaxed: who used a shard before, or told of it, made it seen */
    /* The last stamp, once they are counted.  Its own two lines: it is written by all. */
    alignas(128) _Atomic uint64_t last;
};

void kv_clock_open(struct kv_clock *clock);

/* The stamp of a use in a shard whose last one was `last`: larger than that, and than that of every
 * use that was over before this one began.  Wants the shard's lock held. */
uint64_t kv_clock_stamp(struct kv_clock *clock, uint64_t last);

#endif

/* What the parts of bench_kvcore share: pairs of a call and its raw line, timed in turn. */
#ifndef BENCH_KVCORE_H
#define BENCH_KVCORE_H

#include "kvcore/kvcore.h"

enum { PAIR_REPEATS = 15 };

/* Runs that took turns: seconds of CPU time of one `ours` and of the `raw` beside it.  A machine's
 * speed changes by the minute, so what counts is the median of their ratios, not of themselves. */
struct pair {
    double ours[PAIR_REPEATS];
    double raw[PAIR_REPEATS];
};

/* Each function does its work n times. */
void pair_run(struct pair *p, void (*ours)(void *arg, uint32_t n),
              void (*raw)(void *arg, uint32_t n), void *arg, uint32_t n);
/* The same where something must be set up before each run and is not timed; NULL: nothing. */
void pair_run_prepared(struct pair *p, void (*prepare)(void *arg),
                       void (*ours)(void *arg, uint32_t n), void (*raw)(void *arg, uint32_t n),
                       void *arg, uint32_t n);

double pair_ours(const struct pair *p);
double pair_raw(const struct pair *p);
/* How many times its raw line a call costs beyond `ns` nanoseconds. */
double pair_ratio(const struct pair *p, double ns);
/* "ok", or "MISSED" which is counted: is that ratio at most `most`? */
const char *pair_verdict(const struct pair *p, double most, double ns);

/* The same where a target is met or not. */
const char *bench_verdict(bool met);

uint64_t bench_mix(uint64_t x);

/* A cache, or no return. */
struct kv_cache *bench_cache(const struct kv_cache_config *config);
/* A context of ids from, from + 1, ...; rows are not written. */
struct kv_context *bench_context(struct kv_cache *cache, const struct kv_namespace *ns,
                                 const uint32_t *ids, uint32_t n);
void bench_must(int rc, const char *what);

/* The parts; each prints its table. */
void bench_rows(void);
void bench_fork(void);
void bench_clone(void);
void bench_match(void);
void bench_tree(void);
void bench_publish(void);
void bench_memory(void);
void bench_threads(void);

#endif

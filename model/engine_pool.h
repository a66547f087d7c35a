/* The compute threads of an engine.
 *
 * engine_pool_run() runs one function on every thread at once, the caller's included; inside it the
 * threads meet at engine_pool_sync().  A thread that waits spins for some microseconds, then yields
 * its core for about as long as it takes to wake a sleeper, then parks in the kernel: an idle pool
 * uses no CPU.
 *
 * Every thread computes with MXCSR 0x1F80 (round to nearest, subnormals kept, nothing trapped),
 * whatever a library of the process has set; the caller gets its own back.  Private to model/. */
#ifndef MODEL_ENGINE_POOL_H
#define MODEL_ENGINE_POOL_H

#include <stdatomic.h>
#include <stdint.h>

struct engine_pool;

/* n_threads >= 1; n_threads - 1 are started.  0, or MODEL_ERR_NOMEM. */
int engine_pool_open(uint32_t n_threads, struct engine_pool **out);
/* Joins the threads.  Not while a run is in progress.  NULL is fine. */
void engine_pool_close(struct engine_pool *pool);
uint32_t engine_pool_n_threads(const struct engine_pool *pool);

/* Call work(arg, thread) for every thread index 0..n_threads-1, the caller being 0, and return when
 * all have returned.  One caller at a time. */
void engine_pool_run(struct engine_pool *pool, void (*work)(void *arg, uint32_t thread), void *arg);

/* Inside a run: wait for all threads.  The last to arrive calls serial(arg) (may be NULL) before
 * the others go on; what any thread wrote before is seen by all behind it. */
void engine_pool_sync(struct engine_pool *pool, void (*serial)(void *arg), void *arg);

/* Set the calling thread's floating-point mode to the one above; returns the mode before, for
 * engine_float_leave().  Threads of a pool are in it already. */
unsigned engine_float_enter(void);
void engine_float_leave(unsigned before);

#endif

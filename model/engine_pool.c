#include "model/engine_pool.h"

#include "model/model.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum {
    SPIN_NS = 10 * 1000,
    /* Then let others run: where there are more threads than cores, the one waited for may need
     * this core.  Alone a yield takes some 300 ns; a thread that has yielded so long, parks. */
    YIELDS = 100,
    CALIBRATE_PAUSES = 256,
};

/* A counter that threads wait on until it moves. */
struct gate {
    _Alignas(64) atomic_uint turn; /* released by whoever opens the gate, acquired by waiters */
    atomic_uint n_parked;          /* sequentially consistent with turn: see gate_wait() */
};

struct engine_pool {
    /* Set by engine_pool_open(), read-only afterwards. */
    uint32_t n_threads;
    uint32_t n_pauses;  /* of a spin */
    pthread_t *threads; /* [n_threads - 1] */

    /* Written by the caller of engine_pool_run() before the start gate opens. */
    void (*work)(void *arg, uint32_t thread);
    void *arg;
    bool quit;

    struct gate start; /* a run begins, or the pool closes */
    struct gate sync;
    _Alignas(64) atomic_uint n_arrived; /* at sync; the last one resets it before it opens */
    atomic_uint next_thread;            /* hands a started thread its index */
};

static void relax(void)
{
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void futex_wait(atomic_uint *word, unsigned expected)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, NULL, NULL, 0);
}

static void futex_wake_all(atomic_uint *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* Wait until g->turn is no longer `turn`.  No wake-up is lost: a waiter raises n_parked and then
 * looks at turn (in the kernel, under the futex's lock); the opener moves turn and then looks at
 * n_parked.  In the one order of all four, either the waiter sees the new turn or the opener sees
 * the waiter. */
static void gate_wait(struct gate *g, unsigned turn, uint32_t n_pauses)
{
    for (uint32_t i = 0; i < n_pauses; i++) {
        if (atomic_load_explicit(&g->turn, memory_order_acquire) != turn)
            return;
        relax();
    }
    for (int i = 0; i < YIELDS; i++) {
        if (atomic_load_explicit(&g->turn, memory_order_acquire) != turn)
            return;
        sched_yield();
    }
    atomic_fetch_add(&g->n_parked, 1);
    while (atomic_load(&g->turn) == turn)
        futex_wait(&g->turn, turn);
    atomic_fetch_sub(&g->n_parked, 1);
}

static void gate_open(struct gate *g)
{
    atomic_fetch_add(&g->turn, 1);
    if (atomic_load(&g->n_parked) > 0)
        futex_wake_all(&g->turn);
}

unsigned engine_float_enter(void)
{
#if defined(__x86_64__)
    const unsigned before = _mm_getcsr();

    _mm_setcsr(0x1F80);
    return before;
#else
    return 0; /* the default mode of this machine is the one wanted */
#endif
}

void engine_float_leave(unsigned before)
{
#if defined(__x86_64__)
    _mm_setcsr(before);
#else
    (void)before;
#endif
}

static void *worker(void *arg)
{
    struct engine_pool *pool = arg;
    const uint32_t index = 1 + atomic_fetch_add(&pool->next_thread, 1);
    unsigned turn = 0;

    engine_float_enter();
    for (;; turn++) {
        gate_wait(&pool->start, turn, pool->n_pauses);
        if (pool->quit)
            return NULL;
        pool->work(pool->arg, index);
        engine_pool_sync(pool, NULL, NULL);
    }
}

/* How many pauses fill SPIN_NS; they take from 10 to 150 cycles, depending on the machine. */
static uint32_t calibrate(void)
{
    struct timespec a, b;
    int64_t ns;

    clock_gettime(CLOCK_MONOTONIC, &a);
    for (int i = 0; i < CALIBRATE_PAUSES; i++)
        relax();
    clock_gettime(CLOCK_MONOTONIC, &b);
    ns = (b.tv_sec - a.tv_sec) * 1000000000 + (b.tv_nsec - a.tv_nsec);
    if (ns < CALIBRATE_PAUSES)
        ns = CALIBRATE_PAUSES;
    return (uint32_t)((int64_t)SPIN_NS * CALIBRATE_PAUSES / ns) + 1;
}

int engine_pool_open(uint32_t n_threads, struct engine_pool **out)
{
    struct engine_pool *pool = NULL;

    if (posix_memalign((void **)&pool, _Alignof(struct engine_pool), sizeof(*pool)) != 0)
        return MODEL_ERR_NOMEM;
    *pool = (struct engine_pool){.n_threads = 1, .n_pauses = calibrate()};
    pool->threads = calloc(n_threads, sizeof(*pool->threads));
    if (!pool->threads)
        goto fail;
    /* n_threads is read by workers only in a run, so it may count those that are there so far. */
    for (; pool->n_threads < n_threads; pool->n_threads++)
        if (pthread_create(&pool->threads[pool->n_threads - 1], NULL, worker, pool) != 0)
            goto fail;
    *out = pool;
    return 0;
fail:
    engine_pool_close(pool);
    return MODEL_ERR_NOMEM;
}

void engine_pool_close(struct engine_pool *pool)
{
    if (!pool)
        return;
    pool->quit = true;
    gate_open(&pool->start);
    for (uint32_t i = 0; i + 1 < pool->n_threads; i++)
        pthread_join(pool->threads[i], NULL);
    free(pool->threads);
    free(pool);
}

uint32_t engine_pool_n_threads(const struct engine_pool *pool)
{
    return pool->n_threads;
}

void engine_pool_run(struct engine_pool *pool, void (*work)(void *arg, uint32_t thread), void *arg)
{
    const unsigned before = engine_float_enter();

    pool->work = work;
    pool->arg = arg;
    if (pool->n_threads > 1)
        gate_open(&pool->start);
    work(arg, 0);
    engine_pool_sync(pool, NULL, NULL);
    engine_float_leave(before);
}

void engine_pool_sync(struct engine_pool *pool, void (*serial)(void *arg), void *arg)
{
    const unsigned turn = atomic_load_explicit(&pool->sync.turn, memory_order_relaxed);
    const unsigned n = pool->n_threads;

    /* The turn read above cannot move before this thread has arrived. */
    if (n > 1 && atomic_fetch_add_explicit(&pool->n_arrived, 1, memory_order_acq_rel) + 1 < n) {
        gate_wait(&pool->sync, turn, pool->n_pauses);
        return;
    }
    if (serial)
        serial(arg);
    if (n > 1) {
        atomic_store_explicit(&pool->n_arrived, 0, memory_order_relaxed);
        gate_open(&pool->sync);
    }
}

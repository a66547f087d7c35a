/* One cache of several shards, many threads: nothing is lost and nobody sees another's rows, while
 * one more thread audits the cache without end.  Run under the tsan preset this is also the check
 * that there is no race. */
#include "kv_acts.h"
#include "kv_help.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <unistd.h>

enum { P = 16, N_PAGES = 96, N_THREADS = 8, N_ROUNDS = 300, MAX = 160 };

static const struct kv_geometry geometry = {
    .n_layers = 1, .n_kv_heads = 2, .head_dim = 2, .precision = KV_F16};
static const struct kv_namespace namespaces[2] = {{{{1}}, 0}, {{{2}}, 1}};
static struct kv_cache *cache;
static struct kv_context *parent; /* frozen, of namespace 0 */
static uint32_t parent_ids[40];

static void open_all(void)
{
    const struct kv_cache_config config = {.geometry = geometry,
                                           .page_tokens = P,
                                           .n_pages = N_PAGES,
                                           .arena = true,
                                           .bookkeeping_bytes = 16384,
                                           .n_shards = 4};

    ck_assert_int_eq(kv_cache_open(&config, &cache, NULL), 0);
    ck_assert_int_eq(kv_cache_set_quota(cache, 1, N_PAGES / 2), 0);
    for (uint32_t i = 0; i < 40; i++)
        parent_ids[i] = 1 + i % 3;
    ck_assert_int_eq(kv_context_open(cache, &namespaces[0], &parent), 0);
    ck_assert_int_eq(append_to(parent, &geometry, &namespaces[0], parent_ids, 40), 0);
    ck_assert_int_eq(kv_context_freeze(parent), 0);
}

static void close_all(void)
{
    struct kv_stats s;
    struct kv_why why;

    kv_context_close(parent);
    ck_assert_msg(kv_cache_check(cache, &why) == 0, "%s", why.text);
    kv_cache_trim(cache, UINT32_MAX);
    kv_cache_stats(cache, &s);
    ck_assert_uint_eq(s.n_free, N_PAGES);
    ck_assert_uint_eq(s.n_reserved, 0);
    ck_assert_uint_eq(s.n_contexts, 0);
    kv_cache_close(cache);
}

/* Returns NULL, or what went wrong: Check's assertions are for the main thread. */
typedef const char *(*worker)(uint64_t seed);

struct job {
    worker work;
    uint64_t seed;
    const char *failure;
};

static void *run_job(void *arg)
{
    struct job *job = arg;

    job->failure = job->work(job->seed);
    return NULL;
}

static atomic_bool all_done;
static uint32_t n_audits;

/* Whatever the others are in the middle of, the audit holds. */
static const char *audit(uint64_t seed)
{
    static struct kv_why why;

    (void)seed;
    while (!atomic_load(&all_done)) {
        struct kv_stats s;

        if (kv_cache_check(cache, &why) != 0)
            return why.text;
        kv_cache_stats(cache, &s);
        if (s.n_free + s.n_live != N_PAGES || s.n_reserved > s.n_free)
            return "free and live pages are not all";
        n_audits++;
        usleep(100); /* or it would have the locks all the time */
    }
    return NULL;
}

static void run_on_threads(worker work)
{
    struct job jobs[N_THREADS], auditor = {.work = audit};
    pthread_t threads[N_THREADS], audits;

    n_audits = 0;
    atomic_store(&all_done, false);
    ck_assert_int_eq(pthread_create(&audits, NULL, run_job, &auditor), 0);
    for (uint32_t i = 0; i < N_THREADS; i++) {
        jobs[i] = (struct job){.work = work, .seed = i + 1};
        ck_assert_int_eq(pthread_create(&threads[i], NULL, run_job, &jobs[i]), 0);
    }
    for (uint32_t i = 0; i < N_THREADS; i++)
        pthread_join(threads[i], NULL);
    atomic_store(&all_done, true);
    pthread_join(audits, NULL);
    ck_assert_msg(auditor.failure == NULL, "audit: %s", auditor.failure);
    ck_assert_uint_gt(n_audits, 0);
    for (uint32_t i = 0; i < N_THREADS; i++)
        ck_assert_msg(jobs[i].failure == NULL, "thread %u: %s", i, jobs[i].failure);
}

static const char *fork_and_write(uint64_t seed)
{
    uint32_t ids[MAX];

    memcpy(ids, parent_ids, sizeof(parent_ids));
    for (uint32_t round = 0; round < N_ROUNDS; round++) {
        const uint32_t n = (uint32_t)(mix(seed * 1000 + round) % 41);
        struct kv_context *held = kv_context_ref(parent), *child;

        if (kv_context_fork(held, n, &child) != 0)
            return "fork";
        kv_context_close(held);
        ids[n] = (uint32_t)(seed * 1000 + round);
        if (append_to(child, &geometry, &namespaces[0], ids, n + 1) != 0)
            return "append";
        if (!holds(child, &geometry, &namespaces[0], ids, n + 1))
            return "a child does not hold what it wrote";
        ids[n] = n < 40 ? parent_ids[n] : 0;
        kv_context_close(child);
    }
    return NULL;
}

/* Match, grow in small steps, publish on the way, give up: as a decode node does. */
static const char *serve(uint64_t seed)
{
    for (uint32_t round = 0; round < N_ROUNDS; round++) {
        const uint64_t h = mix(seed * 7919 + round);
        const struct kv_namespace *ns = &namespaces[h & 1];
        const uint32_t n = 2 + (uint32_t)(h >> 8) % (MAX - 2);
        struct kv_context *ctx;
        struct kv_match m;
        uint32_t ids[MAX];
        int rc;

        for (uint32_t i = 0; i < MAX; i++) /* few keys, so that paths meet, in several shards */
            ids[i] = 1 + (uint32_t)(mix(i / 12 + (h >> 20) % 5 * 100) & 3);
        rc = kv_cache_match(cache, ns, ids, n, n, NULL, 0, &ctx, &m);
        if (rc == KV_ERR_FULL)
            continue;
        if (rc != 0 || !holds(ctx, &geometry, ns, ids, m.n_matched))
            return "a match does not hold what it should";
        for (uint32_t at = m.n_matched; at < n;) {
            at = at + 11 < n ? at + 11 : n;
            if (append_to(ctx, &geometry, ns, ids, at) != 0)
                return "an append within a reservation failed";
            if (at % 3 == 0 && kv_context_publish(ctx, NULL, 0) != 0)
                return "publish";
        }
        if (!holds(ctx, &geometry, ns, ids, n))
            return "a context does not hold what it wrote";
        if (round % 5 == 0)
            kv_context_close(ctx);
        else if (kv_context_give_up(ctx, NULL, 0) != 0)
            return "give up";
        if (round % 17 == 0)
            kv_cache_trim(cache, 3);
        if (round % 13 == 0)
            (void)kv_cache_peek(cache, ns, ids, n);
    }
    return NULL;
}

/* ---- Any call in any order, to be audited in the middle of it ---- */

static const char *do_anything(uint64_t seed)
{
    return act(cache, &geometry, &namespaces[seed & 1], seed, 20 * N_ROUNDS);
}

START_TEST(the_audit_holds_whatever_others_are_in_the_middle_of)
{
    run_on_threads(do_anything);
    ck_assert(holds(parent, &geometry, &namespaces[0], parent_ids, 40));
}
END_TEST

START_TEST(many_threads_fork_one_frozen_parent)
{
    run_on_threads(fork_and_write);
    ck_assert(holds(parent, &geometry, &namespaces[0], parent_ids, 40));
}
END_TEST

START_TEST(matches_publishes_and_evictions_race_without_harm)
{
    run_on_threads(serve);
    ck_assert(holds(parent, &geometry, &namespaces[0], parent_ids, 40));
}
END_TEST

int main(void)
{
    Suite *s = suite_create("kv_threads");
    TCase *tc = tcase_create("threads");
    SRunner *sr = srunner_create(s);
    int n_failed;

    suite_add_tcase(s, tc);
    tcase_set_timeout(tc, 120);
    tcase_add_checked_fixture(tc, open_all, close_all);
    tcase_add_test(tc, many_threads_fork_one_frozen_parent);
    tcase_add_test(tc, matches_publishes_and_evictions_race_without_harm);
    tcase_add_test(tc, the_audit_holds_whatever_others_are_in_the_middle_of);
    srunner_run_all(sr, CK_ENV);
    n_failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return n_failed != 0;
}

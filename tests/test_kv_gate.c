/* The audit may be called at any moment, whatever a context is in the middle of.
 *
 * Method: the linker puts functions of the test's own between kvcore and its locks.  Whenever no
 * lock is held, just before one is taken and just after the last was given back, the audit runs:
 * these are all the moments at which another thread could have run it. */
#include "kv_acts.h"
#include "kv_help.h"
#include "kvcore/kv_cache.h"

#include <pthread.h>

static struct kv_geometry geometry = {
    .n_layers = 1, .n_kv_heads = 1, .head_dim = 2, .precision = KV_F16};
static const struct kv_namespace namespaces[2] = {{{{1}}, 0}, {{{2}}, 1}};
static struct kv_cache *cache;

static uint32_t n_held, n_audits;
static bool auditing;
static struct kv_why why;

int __real_pthread_mutex_trylock(pthread_mutex_t *lock);
int __wrap_pthread_mutex_trylock(pthread_mutex_t *lock);
int __real_pthread_mutex_unlock(pthread_mutex_t *lock);
int __wrap_pthread_mutex_unlock(pthread_mutex_t *lock);

/* Check has locks too. */
static bool is_ours(const pthread_mutex_t *lock)
{
    for (uint32_t i = 0; cache != NULL && i < cache->n_shards; i++)
        if (lock == &cache->shards[i].lock)
            return !auditing;
    return false;
}

static void audit(void)
{
    if (n_held > 0 || why.text[0] != '\0')
        return;
    auditing = true;
    (void)kv_cache_check(cache, &why);
    auditing = false;
    n_audits++;
}

int __wrap_pthread_mutex_trylock(pthread_mutex_t *lock)
{
    int rc;

    if (!is_ours(lock))
        return __real_pthread_mutex_trylock(lock);
    audit();
    rc = __real_pthread_mutex_trylock(lock);
    n_held += rc == 0;
    return rc;
}

int __wrap_pthread_mutex_unlock(pthread_mutex_t *lock)
{
    const int rc = __real_pthread_mutex_unlock(lock);

    if (is_ours(lock)) {
        n_held--;
        audit();
    }
    return rc;
}

/* Few pages and little bookkeeping, so that calls often begin anew under all locks. */
START_TEST(the_audit_holds_at_every_moment_at_which_no_lock_is_held)
{
    static const uint32_t shards[] = {1, 4, 16};
    const struct kv_cache_config config = {.geometry = geometry,
                                           .page_tokens = 16,
                                           .n_pages = 64,
                                           .bookkeeping_bytes = 6000,
                                           .arena = true,
                                           .n_shards = shards[_i]};
    struct kv_cache *closing;
    struct kv_stats s;

    ck_assert_int_eq(kv_cache_open(&config, &cache, NULL), 0);
    for (uint64_t seed = 0; seed < 3; seed++) {
        const char *failure = act(cache, &geometry, &namespaces[seed & 1], seed, 600);

        ck_assert_msg(failure == NULL, "%s", failure);
        ck_assert_msg(why.text[0] == '\0', "audit %u: %s", n_audits, why.text);
    }
    ck_assert_uint_gt(n_audits, 1000);
    kv_cache_stats(cache, &s);
    ck_assert_uint_gt(s.n_evicted, 0);
    ck_assert_uint_gt(s.n_clones, 0);
    closing = cache;
    cache = NULL;
    kv_cache_close(closing);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("kv_gate");
    TCase *tc = tcase_create("gate");
    SRunner *sr = srunner_create(s);
    int n_failed;

    suite_add_tcase(s, tc);
    tcase_set_timeout(tc, 120);
    tcase_add_loop_test(tc, the_audit_holds_at_every_moment_at_which_no_lock_is_held, 0, 3);
    srunner_run_all(sr, CK_ENV);
    n_failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return n_failed != 0;
}

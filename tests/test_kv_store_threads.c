/* The store from several threads, on the machine's disk. */
#include "tests/kv_store_rig.h"

#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <unistd.h>

enum { N = 200 };

static char directory[PATH_MAX];
static struct store_rig rig;
static uint32_t ids[N];

static void must(int rc, const struct kv_why *why)
{
    ck_assert_msg(rc == 0, "%s: %s", kv_strerror(rc), why->text);
}

static void setup(void)
{
    static const struct kv_geometry geometry = {16, 8, 128, KV_F16}; /* 16 positions a frame */
    struct kv_why why = {""};

    snprintf(directory, sizeof(directory), "%s/kv-store-XXXXXX", BATON_BINARY_DIR);
    ck_assert_ptr_nonnull(mkdtemp(directory));
    rig_ids(ids, 0, N, N);
    rig = (struct store_rig){.config = {.directory = directory, .geometry = geometry}};
    rig.cache = rig_cache(&geometry, 16);
    must(kv_store_open(&rig.config, &rig.store, &why), &why);
}

static void teardown(void)
{
    char command[PATH_MAX + 16];
    struct kv_why why = {""};

    kv_store_close(rig.store);
    must(kv_cache_check(rig.cache, &why), &why);
    kv_cache_close(rig.cache);
    snprintf(command, sizeof(command), "rm -rf '%s'", directory);
    ck_assert_int_eq(system(command), 0);
}

struct worker {
    uint32_t me;
    struct kv_snapshot_id shared; /* that all restore */
    pthread_t thread;
};

static void *save_restore_delete(void *arg)
{
    struct worker *w = arg;
    struct kv_snapshot_info last, info;
    uint32_t mine[N];
    struct kv_why why = {""};

    rig_ids(mine, w->me + 1, 64, N);
    for (uint32_t round = 0; round < 5; round++) {
        const uint32_t n = 70 + 20 * round;

        must(rig_save(&rig, mine, n, "mine", round > 0 ? &last.id : NULL, &info, &why), &why);
        last = info;
        must(rig_restore(&rig, rig.cache, &info.id, mine, n, "mine", &why), &why);
        must(rig_restore(&rig, rig.cache, &w->shared, ids, 100, "shared", &why), &why);
        if (round == 3)
            must(kv_store_compact(rig.store, &info.id, NULL, NULL, &why), &why);
        must(kv_store_verify(rig.store, &info.id, NULL, NULL, &why), &why);
    }
    must(kv_store_delete(rig.store, &last.id, &why), &why);
    return NULL;
}

START_TEST(threads_save_restore_and_delete_at_once)
{
    struct kv_snapshot_info shared;
    struct worker workers[4];
    struct kv_store_stats stats;
    struct kv_why why = {""};

    must(rig_save(&rig, ids, 100, "shared", NULL, &shared, &why), &why);
    for (uint32_t i = 0; i < 4; i++) {
        workers[i] = (struct worker){.me = i, .shared = shared.id};
        ck_assert_int_eq(pthread_create(&workers[i].thread, NULL, save_restore_delete, &workers[i]),
                         0);
    }
    for (uint32_t i = 0; i < 4; i++)
        pthread_join(workers[i].thread, NULL);
    kv_store_stats(rig.store, &stats);
    ck_assert_uint_eq(stats.n_snapshots, 1);
    ck_assert_uint_eq(stats.n_retired, 0);
    ck_assert_uint_eq(stats.bytes, shared.file_bytes);
}
END_TEST

/* ---- A decode that goes on while it is saved ---- */

static atomic_bool stop;

/* The owner of a context whose prefix the saved forks share: it rewinds into the shared pages and
 * writes them anew, again and again. */
static void *rewrite(void *arg)
{
    struct kv_context *ctx = arg;
    uint32_t mine[N];

    for (uint32_t round = 1; !atomic_load(&stop); round++) {
        const uint32_t same = 5 + round % 60;

        rig_ids(mine, round, same, N);
        ck_assert_int_eq(kv_context_truncate(ctx, same), 0);
        ck_assert_int_eq(append_to(ctx, &rig.config.geometry, &rig.ns, mine, 70), 0);
        ck_assert(holds(ctx, &rig.config.geometry, &rig.ns, mine, 70));
        /* Back to what the forks hold. */
        ck_assert_int_eq(kv_context_truncate(ctx, same), 0);
        ck_assert_int_eq(append_to(ctx, &rig.config.geometry, &rig.ns, ids, 70), 0);
    }
    return NULL;
}

START_TEST(a_fork_is_saved_while_its_parent_rewrites_what_they_share)
{
    struct kv_context *parent = rig_context(&rig, ids, 70), *forks[8];
    struct kv_snapshot_info info;
    pthread_t thread;
    struct kv_why why = {""};

    for (uint32_t i = 0; i < 8; i++) {
        ck_assert_int_eq(kv_context_fork(parent, 63 + i, &forks[i]), 0);
        ck_assert_int_eq(kv_context_freeze(forks[i]), 0);
    }
    atomic_store(&stop, false);
    ck_assert_int_eq(pthread_create(&thread, NULL, rewrite, parent), 0);
    for (uint32_t i = 0; i < 8; i++) {
        const struct kv_save save = {.ctx = forks[i], .full = i % 2 == 0};

        must(kv_store_save(rig.store, &save, &info, &why), &why);
        kv_context_close(forks[i]);
        must(rig_restore(&rig, rig.cache, &info.id, ids, 63 + i, NULL, &why), &why);
    }
    atomic_store(&stop, true);
    pthread_join(thread, NULL);
    kv_context_close(parent);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("kv_store_threads");
    TCase *tc = tcase_create("threads");
    SRunner *sr = srunner_create(s);
    int failed;

    tcase_set_timeout(tc, 120);
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_test(tc, threads_save_restore_and_delete_at_once);
    tcase_add_test(tc, a_fork_is_saved_while_its_parent_rewrites_what_they_share);
    suite_add_tcase(s, tc);
    srunner_run_all(sr, CK_ENV);
    failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return failed != 0;
}

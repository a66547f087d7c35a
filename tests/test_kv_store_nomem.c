/* Each allocation of each call of the store fails once.  The call says so or does without, nothing
 * is left of it, and the store goes on. */
#include "tests/fail_alloc.h"
#include "tests/kv_store_rig.h"

enum { N = 150 };

static struct store_rig rig;
static uint32_t ids[N];
static struct kv_context *shorter, *longer;
static struct kv_snapshot_info base;

/* A call that is tried again and again, with a later allocation failing each time, until none
 * fails.  It cleans up after itself when it worked. */
typedef int tried(struct kv_why *why);

static void setup(void)
{
    static const struct kv_geometry geometry = {16, 8, 128, KV_F16}; /* 16 positions a frame */

    rig_open(&rig, &geometry);
    rig_ids(ids, 0, N, N);
    shorter = rig_context(&rig, ids, 100);
    longer = rig_context(&rig, ids, N);
    ck_assert_int_eq(kv_store_save(rig.store, &(struct kv_save){.ctx = shorter}, &base, NULL), 0);
}

static void teardown(void)
{
    kv_context_close(shorter);
    kv_context_close(longer);
    rig_close(&rig);
}

static uint32_t count_names(void)
{
    uint32_t n = 0;

    while (sim_disk_name(rig.sim, n) != NULL)
        n++;
    return n;
}

static void try_all(tried *call)
{
    const uint32_t n_names = count_names();
    struct kv_stats before, after;
    uint64_t n = 0;
    bool failed = true;

    for (; failed; n++) {
        struct kv_why why = {""};
        int rc;

        kv_cache_stats(rig.cache, &before);
        allocs_left = n;
        alloc_failed = false;
        alloc_fails_once = true;
        rc = call(&why);
        allocs_left = UINT64_MAX;
        failed = alloc_failed;
        ck_assert_msg(rc == 0 || (failed && rc == KV_ERR_NOMEM), "allocation %llu: %d %s",
                      (unsigned long long)n, rc, why.text);
        ck_assert(rc == 0 || why.text[0] != '\0');
        kv_cache_stats(rig.cache, &after);
        ck_assert_uint_eq(before.n_free, after.n_free);
        ck_assert_uint_eq(before.n_contexts, after.n_contexts);
        ck_assert_msg(count_names() == n_names, "allocation %llu: rc %d %s: %u",
                      (unsigned long long)n, rc, why.text, count_names());
        ck_assert_int_eq(kv_store_verify(rig.store, &base.id, NULL, NULL, &why), 0);
    }
    ck_assert_uint_gt(n, 3);
}

static int open_again(struct kv_why *why)
{
    int rc;

    kv_store_close(rig.store);
    rig.config.disk = sim_disk_open(rig.sim);
    rc = kv_store_open(&rig.config, &rig.store, why);
    if (rc < 0) {
        allocs_left = UINT64_MAX;
        rig_open_store(&rig);
    }
    return rc;
}

static int save_and_delete(struct kv_why *why)
{
    const struct kv_save save = {.ctx = longer, .session = "who", .session_len = 4};
    struct kv_snapshot_info info;
    int rc = kv_store_save(rig.store, &save, &info, why);

    if (rc == 0)
        rc = kv_store_delete(rig.store, &info.id, why);
    return rc;
}

static int restore(struct kv_why *why)
{
    const struct kv_restore from = {.id = base.id, .cache = rig.cache, .ns = rig.ns};
    struct kv_restored out;
    const int rc = kv_store_restore(rig.store, &from, &out, why);

    if (rc == 0) {
        free(out.session);
        kv_context_close(out.ctx);
    }
    return rc;
}

static int verify(struct kv_why *why)
{
    return kv_store_verify(rig.store, &base.id, NULL, NULL, why);
}

START_TEST(opening)
{
    try_all(open_again);
}
END_TEST

START_TEST(saving_a_delta)
{
    try_all(save_and_delete);
}
END_TEST

START_TEST(restoring)
{
    try_all(restore);
}
END_TEST

START_TEST(verifying)
{
    try_all(verify);
}
END_TEST

START_TEST(compacting)
{
    struct kv_snapshot_info delta, info;
    struct kv_why why = {""};
    bool failed = true;

    ck_assert_int_eq(kv_store_save(rig.store, &(struct kv_save){.ctx = longer}, &delta, NULL), 0);
    ck_assert_uint_eq(delta.base, 100);
    for (uint64_t n = 0; failed; n++) {
        int rc;

        allocs_left = n;
        alloc_failed = false;
        alloc_fails_once = true;
        rc = kv_store_compact(rig.store, &delta.id, NULL, NULL, &why);
        allocs_left = UINT64_MAX;
        failed = alloc_failed;
        ck_assert(rc == 0 || (failed && rc == KV_ERR_NOMEM));
        ck_assert_uint_eq(count_names(), 2);
        ck_assert_int_eq(rig_restore(&rig, rig.cache, &delta.id, ids, N, NULL, &why), 0);
    }
    ck_assert_int_eq(kv_store_find(rig.store, &delta.id, &info), 0);
    ck_assert_uint_eq(info.base, 0);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("kv_store_nomem");
    TCase *tc = tcase_create("nomem");
    SRunner *sr = srunner_create(s);
    int failed;

    tcase_set_timeout(tc, 120);
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_test(tc, opening);
    tcase_add_test(tc, saving_a_delta);
    tcase_add_test(tc, restoring);
    tcase_add_test(tc, verifying);
    tcase_add_test(tc, compacting);
    suite_add_tcase(s, tc);
    srunner_run_all(sr, CK_ENV);
    failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return failed != 0;
}

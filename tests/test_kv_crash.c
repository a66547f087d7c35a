/* The power goes at every change that the store makes to the disk, and each time the disk keeps
 * another part of what was not synced.  Afterwards the store opens, what was acknowledged is there
 * to the bit, all else is absent or whole, and nothing is left lying about. */
#include "tests/kv_store_rig.h"

#include <errno.h>
#include <stdio.h>

enum { N = 96, N_CONVERSATIONS = 3, MAX_SAVED = 16, N_SEEDS = 6, N_RECOVERIES = 3 };

static const struct kv_geometry geometry = {2, 2, 32, KV_F16};

/* What a run has asked for, and what it was told. */
struct saved {
    struct kv_snapshot_id id;
    uint32_t conversation;
    uint32_t n;
    bool deleting; /* it was asked to go, so it may be gone */
    char session[16];
};

struct story {
    struct store_rig rig;
    uint32_t ids[N_CONVERSATIONS][N];
    struct saved saved[MAX_SAVED];
    uint32_t n_saved;
};

static void begin(struct story *s)
{
    memset(s, 0, sizeof(*s));
    rig_open(&s->rig, &geometry);
    for (uint32_t c = 0; c < N_CONVERSATIONS; c++)
        rig_ids(s->ids[c], c, 40, N);
}

static void end(struct story *s)
{
    if (s->rig.store != NULL)
        kv_store_close(s->rig.store);
    kv_cache_close(s->rig.cache);
    sim_disk_free(s->rig.sim);
}

/* Each step goes on whatever the last one said: what it was told decides what it may expect. */
static struct saved *save(struct story *s, uint32_t conversation, uint32_t n,
                          struct saved *replaces)
{
    struct saved *now = &s->saved[s->n_saved];
    struct kv_snapshot_info info;

    ck_assert_uint_lt(s->n_saved, MAX_SAVED);
    *now = (struct saved){.conversation = conversation, .n = n};
    snprintf(now->session, sizeof(now->session), "%u-%u", conversation, n);
    if (replaces != NULL)
        replaces->deleting = true;
    if (rig_save(&s->rig, s->ids[conversation], n, now->session,
                 replaces != NULL ? &replaces->id : NULL, &info, NULL) < 0)
        return NULL;
    now->id = info.id;
    s->n_saved++;
    return now;
}

static void delete (struct story *s, struct saved *which)
{
    if (which == NULL)
        return;
    which->deleting = true;
    (void)kv_store_delete(s->rig.store, &which->id, NULL);
}

/* Full and delta saves, a fork, retiring, replacing, compaction and a sweep. */
static void tell(struct story *s)
{
    struct saved *a, *b, *c, *d;

    a = save(s, 0, 50, NULL);
    b = save(s, 0, 70, NULL);
    c = save(s, 1, 60, NULL);
    if (b != NULL)
        (void)kv_store_compact(s->rig.store, &b->id, NULL, NULL, NULL);
    delete (s, a);
    d = save(s, 1, 80, c);
    (void)save(s, 2, 90, NULL);
    delete (s, d);
    if (b != NULL)
        b = save(s, 0, 96, b);
}

/* The store opens, and what is in it is right. */
static void look(struct story *s, const char *what, uint64_t at, uint64_t seed)
{
    struct kv_snapshot_info list[2 * MAX_SAVED];
    struct kv_store_stats stats;
    struct kv_why why = {""};
    uint32_t n;

    s->rig.config.disk = sim_disk_open(s->rig.sim);
    ck_assert_msg(kv_store_open(&s->rig.config, &s->rig.store, &why) == 0, "%s %llu, seed %llu: %s",
                  what, (unsigned long long)at, (unsigned long long)seed, why.text);
    for (uint32_t i = 0; i < s->n_saved; i++) {
        const struct saved *is = &s->saved[i];
        const int rc = rig_restore(&s->rig, s->rig.cache, &is->id, s->ids[is->conversation], is->n,
                                   is->session, &why);

        ck_assert_msg(rc == 0 || (rc == KV_ERR_NOT_FOUND && is->deleting),
                      "%s %llu, seed %llu: snapshot %u: %s", what, (unsigned long long)at,
                      (unsigned long long)seed, i, why.text);
    }
    n = kv_store_list(s->rig.store, NULL, list, 2 * MAX_SAVED);
    for (uint32_t i = 0; i < n; i++) {
        struct kv_restore restore = {.id = list[i].id, .cache = s->rig.cache, .ns = s->rig.ns};
        struct kv_restored got;
        unsigned conversation, length;

        ck_assert_msg(kv_store_restore(s->rig.store, &restore, &got, &why) == 0,
                      "%s %llu, seed %llu: listed but: %s", what, (unsigned long long)at,
                      (unsigned long long)seed, why.text);
        ck_assert_int_eq(sscanf(got.session, "%u-%u", &conversation, &length), 2);
        ck_assert(holds(got.ctx, &geometry, &s->rig.ns, s->ids[conversation], length));
        free(got.session);
        kv_context_close(got.ctx);
    }
    kv_store_stats(s->rig.store, &stats);
    for (uint32_t i = 0; sim_disk_name(s->rig.sim, i) != NULL; i++)
        ck_assert_ptr_null(strstr(sim_disk_name(s->rig.sim, i), ".tmp"));
    ck_assert_msg(stats.n_unreadable == 0, "%s %llu, seed %llu: %u cannot be read", what,
                  (unsigned long long)at, (unsigned long long)seed, stats.n_unreadable);
    kv_store_close(s->rig.store);
    s->rig.store = NULL;
}

/* Look at what a crash by each seed leaves, the recovery crashed too at each of its own changes. */
static void crash_and_look(struct story *s, const char *what, uint64_t at)
{
    struct sim_disk *whole = s->rig.sim;

    for (uint64_t seed = 0; seed < N_SEEDS; seed++) {
        struct kv_store *store;
        uint64_t n_changes;

        s->rig.sim = sim_disk_clone(whole, seed);
        sim_disk_crash(s->rig.sim, seed);
        /* How many changes the recovery makes; then each of them is the last, once. */
        struct sim_disk *crashed = s->rig.sim;

        s->rig.sim = sim_disk_clone(crashed, seed);
        look(s, what, at, seed);
        n_changes = sim_disk_n_changes(s->rig.sim);
        sim_disk_free(s->rig.sim);
        for (uint64_t k = 0; k < n_changes && seed < N_RECOVERIES; k++) {
            s->rig.sim = sim_disk_clone(crashed, seed + k);
            sim_disk_crash_at(s->rig.sim, k);
            s->rig.config.disk = sim_disk_open(s->rig.sim);
            if (kv_store_open(&s->rig.config, &store, NULL) == 0)
                kv_store_close(store);
            sim_disk_crash(s->rig.sim, seed * 31 + k + 2);
            look(s, what, at, seed);
            sim_disk_free(s->rig.sim);
        }
        sim_disk_free(crashed);
    }
    s->rig.sim = whole;
}

START_TEST(no_power_cut_loses_what_was_acknowledged)
{
    uint64_t n_changes = 0;
    bool cut = true;

    for (uint64_t k = 0; cut; k++) {
        struct story s;

        begin(&s);
        sim_disk_crash_at(s.rig.sim, k);
        tell(&s);
        cut = sim_disk_is_dead(s.rig.sim);
        n_changes = k;
        kv_store_close(s.rig.store);
        s.rig.store = NULL;
        crash_and_look(&s, "cut at change", k);
        end(&s);
    }
    ck_assert_uint_gt(n_changes, 40);
}
END_TEST

/* A sync is not done but said to be: then what was acknowledged must be seen to be lost,
 * or the test above would see nothing either. */
static bool loses_something(struct sim_behaviour how)
{
    bool lost = false;

    for (uint64_t seed = 0; seed < 20 && !lost; seed++) {
        struct story s;
        struct kv_why why;

        begin(&s);
        sim_disk_behave(s.rig.sim, how);
        (void)save(&s, 0, 50, NULL);
        (void)save(&s, 1, 60, NULL);
        kv_store_close(s.rig.store);
        s.rig.store = NULL;
        sim_disk_crash(s.rig.sim, seed);
        s.rig.config.disk = sim_disk_open(s.rig.sim);
        if (kv_store_open(&s.rig.config, &s.rig.store, &why) < 0)
            lost = true;
        for (uint32_t i = 0; i < s.n_saved && !lost; i++)
            lost = rig_restore(&s.rig, s.rig.cache, &s.saved[i].id, s.ids[s.saved[i].conversation],
                               s.saved[i].n, s.saved[i].session, &why) < 0;
        end(&s);
    }
    return lost;
}

START_TEST(a_store_that_skips_a_sync_is_caught)
{
    ck_assert(!loses_something((struct sim_behaviour){.any_order = true}));
    ck_assert(loses_something((struct sim_behaviour){.ignore_sync = true}));
    ck_assert(loses_something((struct sim_behaviour){.ignore_sync_directory = true}));
}
END_TEST

START_TEST(any_operation_may_fail_once_and_nothing_is_left_of_it)
{
    static const struct {
        enum sim_kind kind;
        int error;
    } faults[] = {
        {SIM_CREATE, -ENOSPC}, {SIM_ALLOCATE, -ENOSPC},    {SIM_WRITE, -ENOSPC},  {SIM_WRITE, -EIO},
        {SIM_WRITE, -EINTR},   {SIM_WRITE, SIM_SHORT},     {SIM_SUBMIT, -EIO},    {SIM_SYNC, -EIO},
        {SIM_RENAME, -EIO},    {SIM_SYNC_DIRECTORY, -EIO}, {SIM_OPEN, -EIO},      {SIM_STAT, -EIO},
        {SIM_READ, -EIO},      {SIM_READ, -EINTR},         {SIM_READ, SIM_SHORT}, {SIM_TOUCH, -EIO},
        {SIM_UNLINK, -EIO},    {SIM_QUEUE_OPEN, -ENOMEM},  {SIM_CREATE, -EEXIST},
    };

    for (size_t f = 0; f < sizeof(faults) / sizeof(faults[0]); f++) {
        bool more = true;

        for (uint64_t nth = 0; more; nth++) {
            struct story s;
            uint64_t last;

            begin(&s);
            last = sim_disk_n(s.rig.sim, faults[f].kind) + nth;
            sim_disk_fail(s.rig.sim, faults[f].kind, last, faults[f].error);
            tell(&s);
            more = sim_disk_n(s.rig.sim, faults[f].kind) > last;
            if (faults[f].error == -EINTR || faults[f].error == SIM_SHORT)
                ck_assert_msg(s.n_saved == 6, "fault %zu at %llu: %u saved", f,
                              (unsigned long long)nth, s.n_saved);
            kv_store_close(s.rig.store);
            s.rig.store = NULL;
            sim_disk_crash(s.rig.sim, SIM_KEEP_ALL); /* what is set to fail does no more */
            look(&s, "fault at", nth, f);
            end(&s);
        }
    }
}
END_TEST

START_TEST(completions_may_come_in_any_way)
{
    for (unsigned how = 0; how < 48; how++) {
        struct story s;

        begin(&s);
        sim_disk_behave(s.rig.sim, (struct sim_behaviour){.any_order = how & 1,
                                                          .duplicates = how & 2,
                                                          .shorten = how & 4,
                                                          .interrupt = how & 8,
                                                          .cached = (enum sim_cached)(how / 16)});
        tell(&s);
        ck_assert_uint_eq(s.n_saved, 6);
        kv_store_close(s.rig.store);
        s.rig.store = NULL;
        look(&s, "completions", how, 0);
        end(&s);
    }
}
END_TEST

/* Without durability a damaged snapshot is refused, and a store that has one opens. */
START_TEST(without_durability_nothing_damaged_is_restored)
{
    for (int d = KV_PUBLISHED; d <= KV_NONE; d++)
        for (uint64_t seed = 0; seed < 40; seed++) {
            struct story s;
            struct kv_why why;

            begin(&s);
            kv_store_close(s.rig.store);
            s.rig.config.durability = (enum kv_durability)d;
            rig_open_store(&s.rig);
            tell(&s);
            kv_store_close(s.rig.store);
            s.rig.store = NULL;
            sim_disk_crash(s.rig.sim, seed);
            s.rig.config.disk = sim_disk_open(s.rig.sim);
            ck_assert_msg(kv_store_open(&s.rig.config, &s.rig.store, &why) == 0, "%s", why.text);
            for (uint32_t i = 0; i < s.n_saved; i++) {
                const int rc =
                    rig_restore(&s.rig, s.rig.cache, &s.saved[i].id, s.ids[s.saved[i].conversation],
                                s.saved[i].n, s.saved[i].session, &why); /* bit-exact if it is 0 */

                if (d == KV_PUBLISHED)
                    ck_assert_msg(rc == 0 || rc == KV_ERR_NOT_FOUND, "%s", why.text);
            }
            end(&s);
        }
}
END_TEST

int main(void)
{
    Suite *s = suite_create("kv_crash");
    TCase *tc = tcase_create("crash");
    SRunner *sr = srunner_create(s);
    int failed;

    tcase_set_timeout(tc, 280);
    tcase_add_test(tc, no_power_cut_loses_what_was_acknowledged);
    tcase_add_test(tc, a_store_that_skips_a_sync_is_caught);
    tcase_add_test(tc, any_operation_may_fail_once_and_nothing_is_left_of_it);
    tcase_add_test(tc, completions_may_come_in_any_way);
    tcase_add_test(tc, without_durability_nothing_damaged_is_restored);
    suite_add_tcase(s, tc);
    srunner_run_all(sr, CK_ENV);
    failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return failed != 0;
}

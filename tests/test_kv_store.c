#include "tests/kv_store_rig.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>

enum { N = 200 };

static struct store_rig rig;
static uint32_t ids[N];

static const struct kv_geometry geometries[] = {
    {2, 2, 32, KV_F32},
    {2, 2, 32, KV_F16},
    {2, 2, 32, KV_Q8},
    {16, 8, 128, KV_F16}, /* 16 positions a frame */
};

static void setup(void)
{
    rig_open(&rig, &geometries[3]);
    rig_ids(ids, 0, N, N);
}

static void setup_loop(int i)
{
    rig_close(&rig);
    rig_open(&rig, &geometries[i]);
}

static void teardown(void)
{
    struct kv_why why;

    ck_assert_msg(kv_cache_check(rig.cache, &why) == 0, "%s", why.text);
    rig_close(&rig);
}

static void must(int rc, const struct kv_why *why)
{
    ck_assert_msg(rc == 0, "%s: %s", kv_strerror(rc), why->text);
}

START_TEST(what_is_saved_is_restored_at_any_page_size)
{
    struct kv_snapshot_info info;
    struct kv_why why = {""};

    setup_loop(_i);
    for (uint32_t n = 1; n <= N; n += 1 + n / 3) {
        must(rig_save(&rig, ids, n, "who", NULL, &info, &why), &why);
        ck_assert_uint_eq(info.n_positions, n);
        for (uint32_t page = 16; page <= 256; page *= 4) {
            struct kv_cache *cache = rig_cache(&rig.config.geometry, page);

            must(rig_restore(&rig, cache, &info.id, ids, n, "who", &why), &why);
            must(rig_restore(&rig, cache, &info.id, ids, (n + 1) / 2, NULL, &why), &why);
            kv_cache_close(cache);
        }
    }
    rig_reopen(&rig);
    must(rig_restore(&rig, rig.cache, &info.id, ids, info.n_positions, "who", &why), &why);
    must(kv_store_verify(rig.store, &info.id, NULL, NULL, &why), &why);
}
END_TEST

START_TEST(logits_come_back_with_the_whole_only)
{
    float logits[7] = {1, 2, 3, 4, 5, 6, 7}, got[7] = {0};
    struct kv_context *ctx = rig_context(&rig, ids, 40);
    const struct kv_save save = {.ctx = ctx, .logits = logits, .n_logits = 7};
    struct kv_restore restore = {.cache = rig.cache, .ns = rig.ns, .logits = got, .n_logits = 7};
    struct kv_restored out;
    struct kv_snapshot_info info;
    struct kv_why why = {""};

    must(kv_store_save(rig.store, &save, &info, &why), &why);
    ck_assert_uint_eq(info.n_logits, 7);
    restore.id = info.id;
    must(kv_store_restore(rig.store, &restore, &out, &why), &why);
    ck_assert(out.has_logits);
    ck_assert_mem_eq(got, logits, sizeof(got));
    ck_assert_ptr_null(out.session);
    kv_context_close(out.ctx);
    restore.n_positions = 39;
    must(kv_store_restore(rig.store, &restore, &out, &why), &why);
    ck_assert(!out.has_logits);
    kv_context_close(out.ctx);
    restore.n_positions = 41;
    ck_assert_int_eq(kv_store_restore(rig.store, &restore, &out, &why), KV_ERR_INVALID);
    kv_context_close(ctx);
}
END_TEST

START_TEST(a_conversation_costs_its_new_positions)
{
    const size_t position = kv_position_bytes(&rig.config.geometry);
    struct kv_snapshot_info info = {.n_positions = 0};
    uint64_t written = 0;
    struct kv_why why = {""};

    for (uint32_t turn = 1; turn <= 20; turn++) {
        struct kv_snapshot_id last = info.id;

        must(rig_save(&rig, ids, 10 * turn, "who", turn > 1 ? &last : NULL, &info, &why), &why);
        ck_assert_uint_eq(info.base, 10 * (turn - 1) >= 16 ? 10 * (turn - 1) : 0);
        written += info.file_bytes;
        must(rig_restore(&rig, rig.cache, &info.id, ids, 10 * turn, "who", &why), &why);
        ck_assert_uint_eq(kv_store_list(rig.store, NULL, NULL, 0), 1);
    }
    /* The second turn is written in full: it shares too little.  64 KiB a position. */
    ck_assert_msg((double)written <= 1.1 * (double)(N + 10) * (double)position, "%f",
                  (double)written / (double)(N * position));
    rig_reopen(&rig);
    must(rig_restore(&rig, rig.cache, &info.id, ids, N, "who", &why), &why);
    must(kv_store_delete(rig.store, &info.id, &why), &why);
    ck_assert_ptr_null(sim_disk_name(rig.sim, 0));
}
END_TEST

START_TEST(forks_share_their_prefix_to_the_token)
{
    struct kv_snapshot_info info[8];
    uint32_t branch[8][N];
    struct kv_why why = {""};

    for (uint32_t b = 0; b < 8; b++) {
        rig_ids(branch[b], b, 75 + b % 3, 120);
        must(rig_save(&rig, branch[b], 120, "b", NULL, &info[b], &why), &why);
        if (b > 0)
            ck_assert_uint_eq(info[b].base, 75 + (b % 3 == 0 ? 0 : b % 3));
    }
    for (int again = 0; again < 2; again++) {
        for (uint32_t b = 0; b < 8; b++) {
            must(rig_restore(&rig, rig.cache, &info[b].id, branch[b], 120, "b", &why), &why);
            must(kv_store_verify(rig.store, &info[b].id, NULL, NULL, &why), &why);
        }
        rig_reopen(&rig);
    }
}
END_TEST

START_TEST(what_others_stand_on_is_retired_and_goes_with_the_last)
{
    struct kv_snapshot_info a, b, c, got;
    struct kv_store_stats stats;
    uint32_t other[N];
    struct kv_why why = {""};

    rig_ids(other, 1, 60, N);
    must(rig_save(&rig, ids, 100, "a", NULL, &a, &why), &why);
    must(rig_save(&rig, other, 100, "b", NULL, &b, &why), &why);
    must(rig_save(&rig, other, 150, "c", NULL, &c, &why), &why);
    ck_assert_uint_eq(b.base, 60);
    ck_assert_uint_eq(c.base, 100);
    ck_assert_uint_eq(c.depth, 3);
    must(kv_store_delete(rig.store, &a.id, &why), &why);
    ck_assert_int_eq(kv_store_delete(rig.store, &a.id, &why), KV_ERR_NOT_FOUND);
    ck_assert_int_eq(kv_store_find(rig.store, &a.id, &got), KV_ERR_NOT_FOUND);
    ck_assert_int_eq(rig_restore(&rig, rig.cache, &a.id, ids, 100, "a", &why), KV_ERR_NOT_FOUND);
    for (int again = 0; again < 2; again++) {
        kv_store_stats(rig.store, &stats);
        ck_assert_uint_eq(stats.n_retired, 1);
        ck_assert_uint_eq(stats.n_snapshots, 2);
        must(rig_restore(&rig, rig.cache, &c.id, other, 150, "c", &why), &why);
        rig_reopen(&rig);
    }
    must(kv_store_delete(rig.store, &b.id, &why), &why);
    kv_store_stats(rig.store, &stats);
    ck_assert_uint_eq(stats.n_retired, 2);
    must(rig_restore(&rig, rig.cache, &c.id, other, 150, "c", &why), &why);
    must(kv_store_delete(rig.store, &c.id, &why), &why);
    kv_store_stats(rig.store, &stats);
    ck_assert_uint_eq(stats.n_retired + stats.n_snapshots, 0);
    ck_assert_uint_eq(stats.bytes, 0);
    ck_assert_ptr_null(sim_disk_name(rig.sim, 0));
}
END_TEST

START_TEST(a_compacted_snapshot_keeps_its_id_and_children)
{
    struct kv_snapshot_info a, b, c, got;
    struct kv_why why = {""};

    must(rig_save(&rig, ids, 50, "a", NULL, &a, &why), &why);
    must(rig_save(&rig, ids, 100, "b", &a.id, &b, &why), &why);
    must(rig_save(&rig, ids, 150, "c", NULL, &c, &why), &why);
    ck_assert_uint_eq(c.depth, 3);
    must(kv_store_compact(rig.store, &b.id, NULL, NULL, &why), &why);
    ck_assert_int_eq(kv_store_find(rig.store, &b.id, &got), 0);
    ck_assert_uint_eq(got.base, 0);
    ck_assert_uint_eq(got.depth, 1);
    ck_assert_uint_eq(got.n_children, 1);
    for (int again = 0; again < 2; again++) {
        struct kv_store_stats stats;
        uint64_t on_disk = 0;

        must(rig_restore(&rig, rig.cache, &b.id, ids, 100, "b", &why), &why);
        must(rig_restore(&rig, rig.cache, &c.id, ids, 150, "c", &why), &why);
        kv_store_stats(rig.store, &stats);
        ck_assert_uint_eq(stats.n_retired, 0); /* a went with it */
        for (uint32_t i = 0; sim_disk_name(rig.sim, i) != NULL; i++) {
            size_t len;

            sim_disk_bytes(rig.sim, sim_disk_name(rig.sim, i), &len);
            on_disk += len;
        }
        ck_assert_uint_eq(stats.bytes, on_disk);
        rig_reopen(&rig);
    }
    must(kv_store_compact(rig.store, &b.id, NULL, NULL, &why), &why); /* is full already */
}
END_TEST

START_TEST(a_chain_is_no_deeper_than_its_bound)
{
    struct kv_snapshot_info info;
    struct kv_why why = {""};

    kv_store_close(rig.store);
    rig.config.max_depth = 3;
    rig_open_store(&rig);
    for (uint32_t n = 20; n <= N; n += 20) {
        must(rig_save(&rig, ids, n, "who", NULL, &info, &why), &why);
        ck_assert_uint_le(info.depth, 3);
        must(rig_restore(&rig, rig.cache, &info.id, ids, n, "who", &why), &why);
    }
}
END_TEST

/* What can be no parent for its depth does not make every later save repeat more and more. */
START_TEST(past_its_bound_a_chain_begins_anew)
{
    struct kv_snapshot_info info;
    uint32_t other[N], written = 0, n_full = 0;
    struct kv_why why = {""};

    kv_store_close(rig.store);
    rig.config.max_depth = 6;
    rig_open_store(&rig);
    for (uint32_t n = 20; n <= N; n += 10) {
        must(rig_save(&rig, ids, n, "who", NULL, &info, &why), &why);
        ck_assert_uint_le(info.depth, 6);
        written += n - info.base;
        n_full += info.depth == 1;
        if (info.depth < 6 || info.base < n - 10)
            continue;
        /* A few positions on top of the deepest are still a delta, to the one before. */
        rig_ids(other, 1, n, n + 4);
        must(rig_save(&rig, other, n + 4, "who", NULL, &info, &why), &why);
        ck_assert_uint_gt(info.base, 0);
        must(kv_store_delete(rig.store, &info.id, &why), &why);
    }
    ck_assert_uint_ge(n_full, 2);
    ck_assert_uint_le(written, 4 * N);
}
END_TEST

START_TEST(the_budget_is_asked_before_anything_is_written)
{
    struct kv_snapshot_info a, b;
    struct kv_store_stats stats;
    uint32_t other[N];
    uint64_t n_changes;
    struct kv_why why = {""};

    rig_ids(other, 1, 0, N);
    must(rig_save(&rig, ids, 100, "a", NULL, &a, &why), &why);
    kv_store_close(rig.store);
    rig.config.budget_bytes = a.file_bytes * 3 / 2;
    rig_open_store(&rig);
    n_changes = sim_disk_n_changes(rig.sim);
    ck_assert_int_eq(rig_save(&rig, other, 100, "b", NULL, &b, &why), KV_ERR_FULL);
    ck_assert_ptr_nonnull(strstr(why.text, "budget"));
    ck_assert_uint_eq(sim_disk_n_changes(rig.sim), n_changes);
    kv_store_stats(rig.store, &stats);
    ck_assert_uint_eq(stats.bytes, a.file_bytes);
    ck_assert_uint_eq(stats.n_failed, 1);
    must(rig_save(&rig, ids, 110, "a2", NULL, &b, &why), &why); /* a delta fits */
    must(kv_store_delete(rig.store, &b.id, &why), &why);
    must(kv_store_delete(rig.store, &a.id, &why), &why);
    must(rig_save(&rig, other, 100, "b", NULL, &b, &why), &why);
}
END_TEST

START_TEST(what_is_not_used_for_its_time_expires)
{
    struct kv_snapshot_info a, b, c;
    uint32_t other[N], third[N];
    struct kv_store_stats stats;
    struct kv_why why = {""};

    rig_ids(other, 1, 0, N);
    rig_ids(third, 2, 0, N);
    kv_store_close(rig.store);
    rig.config.ttl_ns = 1000000000;
    rig_open_store(&rig);
    must(rig_save(&rig, ids, 30, "a", NULL, &a, &why), &why);
    must(rig_save(&rig, other, 30, "b", NULL, &b, &why), &why);
    must(rig_save(&rig, third, 30, "c", NULL, &c, &why), &why);
    sim_disk_advance(rig.sim, 600000000);
    must(rig_restore(&rig, rig.cache, &b.id, other, 30, "b", &why), &why);
    ck_assert_uint_eq(kv_store_sweep(rig.store), 0);
    sim_disk_advance(rig.sim, 600000000);
    rig_reopen(&rig); /* which sweeps; b's use was kept */
    kv_store_stats(rig.store, &stats);
    ck_assert_uint_eq(stats.n_expired, 2);
    ck_assert_uint_eq(stats.n_snapshots, 1);
    must(rig_restore(&rig, rig.cache, &b.id, other, 30, "b", &why), &why);
    sim_disk_advance(rig.sim, 2000000000);
    ck_assert_uint_eq(kv_store_sweep(rig.store), 1);
}
END_TEST

START_TEST(namespaces_share_nothing_and_are_listed_apart)
{
    struct kv_snapshot_info a, b, list[2];
    struct kv_namespace mine = rig.ns;
    struct kv_why why = {""};

    must(rig_save(&rig, ids, 100, "a", NULL, &a, &why), &why);
    rig.ns.digest.bytes[0] ^= 1;
    must(rig_save(&rig, ids, 100, "b", NULL, &b, &why), &why);
    ck_assert_uint_eq(b.base, 0);
    ck_assert_int_eq(rig_restore(&rig, rig.cache, &a.id, ids, 100, "a", &why), KV_ERR_MISMATCH);
    ck_assert_ptr_nonnull(strstr(why.text, "namespace"));
    ck_assert_uint_eq(kv_store_list(rig.store, &mine.digest, list, 2), 1);
    ck_assert_mem_eq(&list[0].id, &a.id, sizeof(a.id));
    ck_assert_uint_eq(kv_store_list(rig.store, NULL, list, 2), 2);
}
END_TEST

START_TEST(another_model_or_precision_is_refused_naming_both)
{
    struct kv_geometry f32 = rig.config.geometry;
    struct kv_snapshot_info info;
    struct kv_cache *cache;
    struct kv_why why = {""};

    must(rig_save(&rig, ids, 100, "a", NULL, &info, &why), &why);
    f32.precision = KV_F32;
    cache = rig_cache(&f32, 16);
    ck_assert_int_eq(rig_restore(&rig, cache, &info.id, ids, 100, "a", &why), KV_ERR_MISMATCH);
    ck_assert_str_eq(why.text, "precision is f16, expected f32");
    kv_cache_close(cache);
    kv_store_close(rig.store);
    rig.config.fingerprint.bytes[3] ^= 1;
    rig_open_store(&rig);
    ck_assert_int_eq(rig_restore(&rig, rig.cache, &info.id, ids, 100, "a", &why), KV_ERR_MISMATCH);
    ck_assert_ptr_nonnull(strstr(why.text, "fingerprint"));
    kv_store_close(rig.store);
    rig.config.fingerprint.bytes[3] ^= 1;
    rig.config.numerics_id.bytes[3] ^= 1;
    rig_open_store(&rig);
    ck_assert_int_eq(rig_restore(&rig, rig.cache, &info.id, ids, 100, "a", &why), KV_ERR_MISMATCH);
    ck_assert_ptr_nonnull(strstr(why.text, "numerics_id"));
}
END_TEST

START_TEST(a_failed_restore_leaves_everything_as_it_was)
{
    struct kv_snapshot_info info;
    struct kv_stats before, after;
    char name[KV_SNAPSHOT_ID_TEXT + 8];
    size_t len;
    struct kv_why why = {""};

    must(rig_save(&rig, ids, N, "a", NULL, &info, &why), &why);
    kv_snapshot_id_print(&info.id, name);
    strcat(name, ".kv");
    sim_disk_bytes(rig.sim, name, &len);
    kv_cache_stats(rig.cache, &before);
    for (uint64_t at = 0; at < len; at += len / 97) {
        sim_disk_flip(rig.sim, name, at, 0x10);
        ck_assert_int_lt(rig_restore(&rig, rig.cache, &info.id, ids, N, "a", &why), 0);
        ck_assert_int_lt(kv_store_verify(rig.store, &info.id, NULL, NULL, &why), 0);
        sim_disk_flip(rig.sim, name, at, 0x10);
        kv_cache_stats(rig.cache, &after);
        ck_assert_mem_eq(&before, &after, sizeof(before));
    }
    must(rig_restore(&rig, rig.cache, &info.id, ids, N, "a", &why), &why);
}
END_TEST

START_TEST(too_few_pages_refuse_by_name)
{
    const struct kv_cache_config config = {
        .geometry = rig.config.geometry, .page_tokens = 16, .n_pages = 4};
    struct kv_snapshot_info info;
    struct kv_cache *cache;
    struct kv_stats stats;
    struct kv_why why = {""};

    must(rig_save(&rig, ids, N, "a", NULL, &info, &why), &why);
    ck_assert_int_eq(kv_cache_open(&config, &cache, NULL), 0);
    ck_assert_int_eq(rig_restore(&rig, cache, &info.id, ids, N, "a", &why), KV_ERR_FULL);
    kv_cache_stats(cache, &stats);
    ck_assert_uint_eq(stats.n_free, 4);
    ck_assert_uint_eq(stats.n_contexts, 0);
    kv_cache_close(cache);
}
END_TEST

START_TEST(files_that_are_not_snapshots_are_left_alone)
{
    static const char *const names[] = {"notes.txt", "00112233445566778899aabbccddeeff.kv",
                                        "00112233445566778899aabbccddeeff.base"};
    struct kv_snapshot_info a, b;
    struct kv_store_stats stats;
    char name[KV_SNAPSHOT_ID_TEXT + 8];
    struct kv_why why = {""};
    size_t len;

    must(rig_save(&rig, ids, 100, "a", NULL, &a, &why), &why);
    must(rig_save(&rig, ids, 150, "b", NULL, &b, &why), &why);
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        sim_disk_put(rig.sim, names[i], "rubbish", 7);
    sim_disk_put(rig.sim, "ffffffffffffffffffffffffffffffff.tmp", "half", 4);
    kv_snapshot_id_print(&a.id, name);
    strcat(name, ".kv");
    sim_disk_remove(rig.sim, name); /* so that b dangles */
    rig_reopen(&rig);
    kv_store_stats(rig.store, &stats);
    ck_assert_uint_eq(stats.n_unreadable, 3);
    ck_assert_uint_eq(stats.n_snapshots, 0);
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        ck_assert_ptr_nonnull(sim_disk_bytes(rig.sim, names[i], &len));
    ck_assert_ptr_null(sim_disk_bytes(rig.sim, "ffffffffffffffffffffffffffffffff.tmp", &len));
    ck_assert_int_eq(rig_restore(&rig, rig.cache, &b.id, ids, 150, "b", &why), KV_ERR_NOT_FOUND);
}
END_TEST

static int stop_at(void *arg, uint64_t done, uint64_t total)
{
    ck_assert_uint_le(done, total);
    return --*(int *)arg < 0;
}

START_TEST(a_cancelled_call_leaves_nothing)
{
    struct kv_context *ctx = rig_context(&rig, ids, N);
    int left;
    struct kv_save save = {.ctx = ctx, .progress = stop_at, .arg = &left};
    struct kv_restore restore = {
        .cache = rig.cache, .ns = rig.ns, .progress = stop_at, .arg = &left};
    struct kv_snapshot_info info;
    struct kv_restored out;
    struct kv_why why = {""};

    for (int i = 0; i < 5; i++) {
        left = i;
        ck_assert_int_eq(kv_store_save(rig.store, &save, &info, &why), KV_ERR_BUSY);
        ck_assert_ptr_null(sim_disk_name(rig.sim, 0));
    }
    left = INT_MAX;
    must(kv_store_save(rig.store, &save, &info, &why), &why);
    restore.id = info.id;
    left = 2;
    ck_assert_int_eq(kv_store_restore(rig.store, &restore, &out, &why), KV_ERR_BUSY);
    left = 2;
    ck_assert_int_eq(kv_store_verify(rig.store, &info.id, stop_at, &left, &why), KV_ERR_BUSY);
    kv_context_close(ctx);
}
END_TEST

START_TEST(a_tainted_context_is_saved_up_to_the_taint)
{
    struct kv_context *ctx = rig_context(&rig, ids, 100);
    const struct kv_save save = {.ctx = ctx};
    unsigned char *row = calloc(1, kv_position_bytes(&rig.config.geometry));
    struct kv_snapshot_info info;
    struct kv_why why = {""};

    ck_assert_int_eq(kv_context_overwrite(ctx, 70, row), 0);
    must(kv_store_save(rig.store, &save, &info, &why), &why);
    ck_assert_uint_eq(info.n_positions, 70);
    must(rig_restore(&rig, rig.cache, &info.id, ids, 70, NULL, &why), &why);
    ck_assert_int_eq(kv_context_truncate(ctx, 0), 0);
    ck_assert_int_eq(kv_store_save(rig.store, &save, &info, &why), KV_ERR_INVALID);
    kv_context_close(ctx);
    free(row);
}
END_TEST

START_TEST(ids_and_durabilities_are_read_and_printed)
{
    struct kv_snapshot_id id;
    char text[KV_SNAPSHOT_ID_TEXT];

    ck_assert_int_eq(kv_snapshot_id_parse("00112233445566778899aabbccddeeff", &id), 0);
    kv_snapshot_id_print(&id, text);
    ck_assert_str_eq(text, "00112233445566778899aabbccddeeff");
    ck_assert_int_lt(kv_snapshot_id_parse("00112233445566778899aabbccddeef", &id), 0);
    ck_assert_int_lt(kv_snapshot_id_parse("00112233445566778899aabbccddeefff", &id), 0);
    ck_assert_int_lt(kv_snapshot_id_parse("0011223344556677 899aabbccddeeff", &id), 0);
    for (int i = KV_DURABLE; i <= KV_NONE; i++)
        ck_assert_int_eq(kv_durability_parse(kv_durability_name((enum kv_durability)i)), i);
    ck_assert_int_lt(kv_durability_parse("often"), 0);
    ck_assert_ptr_null(kv_durability_name((enum kv_durability)7));
}
END_TEST

int main(void)
{
    Suite *s = suite_create("kv_store");
    TCase *tc = tcase_create("store");
    SRunner *sr = srunner_create(s);
    int failed;

    tcase_set_timeout(tc, 120);
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_loop_test(tc, what_is_saved_is_restored_at_any_page_size, 0, 4);
    tcase_add_test(tc, logits_come_back_with_the_whole_only);
    tcase_add_test(tc, a_conversation_costs_its_new_positions);
    tcase_add_test(tc, forks_share_their_prefix_to_the_token);
    tcase_add_test(tc, what_others_stand_on_is_retired_and_goes_with_the_last);
    tcase_add_test(tc, a_compacted_snapshot_keeps_its_id_and_children);
    tcase_add_test(tc, a_chain_is_no_deeper_than_its_bound);
    tcase_add_test(tc, past_its_bound_a_chain_begins_anew);
    tcase_add_test(tc, the_budget_is_asked_before_anything_is_written);
    tcase_add_test(tc, what_is_not_used_for_its_time_expires);
    tcase_add_test(tc, namespaces_share_nothing_and_are_listed_apart);
    tcase_add_test(tc, another_model_or_precision_is_refused_naming_both);
    tcase_add_test(tc, a_failed_restore_leaves_everything_as_it_was);
    tcase_add_test(tc, too_few_pages_refuse_by_name);
    tcase_add_test(tc, files_that_are_not_snapshots_are_left_alone);
    tcase_add_test(tc, a_cancelled_call_leaves_nothing);
    tcase_add_test(tc, a_tainted_context_is_saved_up_to_the_taint);
    tcase_add_test(tc, ids_and_durabilities_are_read_and_printed);
    suite_add_tcase(s, tc);
    srunner_run_all(sr, CK_ENV);
    failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return failed != 0;
}

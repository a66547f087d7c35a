/* Files of format version 1 that must be read for ever, and be written so for ever: tests/golden,
 * one full snapshot with both sections and a delta on it for each precision.  With an argument,
 * they are written into that folder; with "long" as a second one, instead two of the same positions
 * that are larger, so that they have several frames. */
#include "kvcore/kv_file.h"
#include "kvcore/kv_store.h"
#include "tests/kv_help.h"
#include "tests/sim_disk.h"

#include <stdio.h>

enum { N_FULL = 21, N_DELTA = 30, BASE = 17, N_LOGITS = 6, N_PRECISIONS = 3, LONG = N_PRECISIONS };

static const struct kv_geometry geometries[N_PRECISIONS + 1] = {
    {2, 1, 32, KV_F32}, {2, 1, 32, KV_F16}, {2, 1, 32, KV_Q8}, {16, 8, 128, KV_F16}};
static const float logits[N_LOGITS] = {0, 1, -2, 0.5F, 1e30F, -1e-30F};
static const char session[] = "golden";

static const char *folder; /* where they are written; NULL: they are read */
static bool writes_long;
static struct sim_disk *sim;
static uint32_t ids[N_DELTA];

static void setup(void)
{
    sim = sim_disk_new(1);
    for (uint32_t i = 0; i < N_DELTA; i++)
        ids[i] = 1000 + i * i;
}

static void teardown(void)
{
    sim_disk_free(sim);
}

/* Which file: the precision, and 0 full or 1 delta. */
static struct kv_snapshot_id id_of(int g, int delta)
{
    struct kv_snapshot_id id = {{0}};

    id.bytes[0] = (uint8_t)(0xb0 + g);
    id.bytes[15] = (uint8_t)delta;
    return id;
}

static void name_of(int g, int delta, char name[KV_SNAPSHOT_ID_TEXT + 4])
{
    const struct kv_snapshot_id id = id_of(g, delta);

    kv_snapshot_id_print(&id, name);
    strcat(name, ".kv");
}

static struct kv_namespace namespace_of(int g)
{
    const struct kv_namespace_fields fields = {.tenant = "golden",
                                               .fingerprint = {.bytes = {1}},
                                               .numerics_id = {.bytes = {2}},
                                               .precision = geometries[g].precision};
    struct kv_namespace ns = {.group = 0};

    kv_namespace_digest(&fields, &ns.digest);
    return ns;
}

static void write_golden(struct kv_disk *disk, int g, int delta)
{
    const struct kv_namespace ns = namespace_of(g);
    const struct kv_snapshot_id id = id_of(g, delta), parent = id_of(g, 0);
    const uint32_t base = delta ? BASE : 0, n = delta ? N_DELTA : N_FULL;
    struct kv_snapshot_header h = {.fingerprint = {.bytes = {1}},
                                   .ns = ns.digest,
                                   .numerics_id = {.bytes = {2}},
                                   .geometry = geometries[g],
                                   .frame_positions = kv_frame_positions(&geometries[g]),
                                   .base = base,
                                   .n_bound = n,
                                   .base_ids = ids};
    unsigned char *rows = make_rows(&geometries[g], &ns, ids, base, n);
    const struct iovec all = {rows, (n - base) * kv_position_bytes(&geometries[g])};
    struct kv_file_frame *frames;
    struct kv_file_writer *w;
    struct kv_file_info info;
    struct kv_queue *queue;
    char name[KV_SNAPSHOT_ID_TEXT + 4];

    memcpy(h.snapshot_id, id.bytes, sizeof(h.snapshot_id));
    if (delta)
        memcpy(h.parent_id, parent.bytes, sizeof(h.parent_id));
    name_of(g, delta, name);
    ck_assert_int_eq(kv_file_queue(disk, &geometries[g], &queue, NULL), 0);
    ck_assert_int_eq(kv_file_create(queue, name, 4096, &h, &w, NULL), 0);
    ck_assert_int_eq(kv_file_write_rows(w, ids + base, n - base, &all, 1, NULL), 0);
    if (!delta) {
        ck_assert_int_eq(kv_file_write_section(w, KV_SECTION_LOGITS, logits, sizeof(logits), NULL),
                         0);
        ck_assert_int_eq(
            kv_file_write_section(w, KV_SECTION_SESSION, session, sizeof(session), NULL), 0);
    }
    ck_assert_int_eq(kv_file_finish(w, true, &info, &frames, NULL), 0);
    free(frames);
    free(rows);
    disk->ops->queue_close(queue);
}

/* The committed bytes; the caller frees. */
static unsigned char *read_golden(const char *name, size_t *len)
{
    char path[4096];
    unsigned char *bytes = malloc(1 << 20);
    FILE *f;

    snprintf(path, sizeof(path), BATON_SOURCE_DIR "/tests/golden/%s", name);
    f = fopen(path, "rb");
    ck_assert_msg(f != NULL, "%s", path);
    *len = fread(bytes, 1, 1 << 20, f);
    fclose(f);
    return bytes;
}

START_TEST(the_same_inputs_make_the_same_files)
{
    struct kv_disk *disk = sim_disk_open(sim);

    for (int g = 0; g < N_PRECISIONS; g++)
        for (int delta = 0; delta < 2; delta++) {
            char name[KV_SNAPSHOT_ID_TEXT + 4];
            const unsigned char *is;
            unsigned char *want;
            size_t n_is, n_want;

            name_of(g, delta, name);
            write_golden(disk, g, delta);
            is = sim_disk_bytes(sim, name, &n_is);
            want = read_golden(name, &n_want);
            ck_assert_uint_eq(n_is, n_want);
            ck_assert_mem_eq(is, want, n_is);
            free(want);
        }
    disk->ops->close(disk);
}
END_TEST

static void restore(struct kv_store *store, int g, int delta, uint32_t page_tokens)
{
    const struct kv_cache_config config = {
        .geometry = geometries[g], .page_tokens = page_tokens, .n_pages = 4};
    float got[N_LOGITS];
    struct kv_cache *cache;
    struct kv_restore from = {
        .id = id_of(g, delta), .ns = namespace_of(g), .logits = got, .n_logits = N_LOGITS};
    struct kv_restored out;
    struct kv_why why = {""};

    ck_assert_int_eq(kv_cache_open(&config, &cache, NULL), 0);
    from.cache = cache;
    ck_assert_msg(kv_store_restore(store, &from, &out, &why) == 0, "%s", why.text);
    ck_assert(holds(out.ctx, &geometries[g], &from.ns, ids, delta ? N_DELTA : N_FULL));
    ck_assert(out.has_logits == !delta);
    if (!delta) {
        ck_assert_mem_eq(got, logits, sizeof(got));
        ck_assert_uint_eq(out.session_len, sizeof(session));
        ck_assert_mem_eq(out.session, session, sizeof(session));
    }
    free(out.session);
    kv_context_close(out.ctx);
    kv_cache_close(cache);
}

START_TEST(golden_files_are_restored)
{
    struct kv_store_config config = {
        .geometry = geometries[_i], .fingerprint = {.bytes = {1}}, .numerics_id = {.bytes = {2}}};
    struct kv_store *store;
    struct kv_why why = {""};

    for (int delta = 0; delta < 2; delta++) {
        char name[KV_SNAPSHOT_ID_TEXT + 4];
        unsigned char *bytes;
        size_t len;

        name_of(_i, delta, name);
        bytes = read_golden(name, &len);
        sim_disk_put(sim, name, bytes, len);
        free(bytes);
    }
    config.disk = sim_disk_open(sim);
    ck_assert_msg(kv_store_open(&config, &store, &why) == 0, "%s", why.text);
    for (uint32_t page = 16; page <= 64; page *= 2) {
        restore(store, _i, 0, page);
        restore(store, _i, 1, page);
    }
    kv_store_close(store);
}
END_TEST

START_TEST(golden_files_are_written)
{
    struct kv_disk *disk = sim_disk_open(sim);
    const int first = writes_long ? LONG : 0;

    for (int g = first; g < (writes_long ? LONG + 1 : N_PRECISIONS); g++)
        for (int delta = 0; delta < 2; delta++) {
            char name[KV_SNAPSHOT_ID_TEXT + 4], path[4096];
            const unsigned char *bytes;
            size_t len;
            FILE *f;

            name_of(g, delta, name);
            write_golden(disk, g, delta);
            bytes = sim_disk_bytes(sim, name, &len);
            snprintf(path, sizeof(path), "%s/%s", folder, name);
            f = fopen(path, "wb");
            ck_assert_ptr_nonnull(f);
            ck_assert_uint_eq(fwrite(bytes, 1, len, f), len);
            ck_assert_int_eq(fclose(f), 0);
        }
    disk->ops->close(disk);
}
END_TEST

int main(int argc, char **argv)
{
    Suite *s = suite_create("kv_golden");
    TCase *tc = tcase_create("golden");
    SRunner *sr = srunner_create(s);
    int failed;

    folder = argc > 1 ? argv[1] : NULL;
    writes_long = argc > 2 && strcmp(argv[2], "long") == 0;
    tcase_add_checked_fixture(tc, setup, teardown);
    if (folder != NULL) {
        tcase_add_test(tc, golden_files_are_written);
    } else {
        tcase_add_test(tc, the_same_inputs_make_the_same_files);
        tcase_add_loop_test(tc, golden_files_are_restored, 0, N_PRECISIONS);
    }
    suite_add_tcase(s, tc);
    srunner_run_all(sr, CK_ENV);
    failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return failed != 0;
}

/* f16 and q8 snapshot files as f32: every f16 there is, and every int8 under scales of all sizes,
 * against their values by definition; what stays and what does not; what is refused. */
#include "kvcore/kv_file.h"
#include "tests/sim_disk.h"

#include <check.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { POSITIONS = 1024, DIM = 32, ELEMENTS = 2 * DIM };

static struct kv_geometry geometry;
static struct sim_disk *sim;
static struct kv_disk *disk;
static struct kv_queue *queue, *wide_queue;
static uint32_t ids[POSITIONS];
static const struct kv_digest ns = {{1, 2}}, wide_ns = {{3, 4}};

static void setup(enum kv_precision precision)
{
    const struct kv_geometry wide = {1, 1, DIM, KV_F32};

    geometry = (struct kv_geometry){1, 1, DIM, precision};
    sim = sim_disk_new(1);
    disk = sim_disk_open(sim);
    ck_assert_int_eq(kv_file_queue(disk, &geometry, &queue, NULL), 0);
    ck_assert_int_eq(kv_file_queue(disk, &wide, &wide_queue, NULL), 0);
    for (uint32_t i = 0; i < POSITIONS; i++)
        ids[i] = i * 7;
}

static void teardown(void)
{
    disk->ops->queue_close(queue);
    disk->ops->queue_close(wide_queue);
    disk->ops->close(disk);
    sim_disk_free(sim);
}

static void write_file(const char *name, const unsigned char *rows, uint32_t base, uint32_t n)
{
    struct kv_snapshot_header header = {
        .snapshot_id = {9},
        .ns = ns,
        .geometry = geometry,
        .frame_positions = kv_frame_positions(&geometry),
        .base = base,
        .n_bound = n,
        .base_ids = ids,
    };
    const struct iovec piece = {.iov_base = (void *)(uintptr_t)rows,
                                .iov_len = (n - base) * kv_position_bytes(&geometry)};
    const float logits[2] = {1, 2};
    struct kv_file_writer *w;
    struct kv_file_frame *frames;
    struct kv_file_info info;

    if (base > 0)
        header.parent_id[0] = 1;
    ck_assert_int_eq(
        kv_file_create(queue, name, kv_file_bytes(&geometry, base, n, 8, 3), &header, &w, NULL), 0);
    ck_assert_int_eq(kv_file_write_rows(w, ids + base, n - base, &piece, 1, NULL), 0);
    ck_assert_int_eq(kv_file_write_section(w, KV_SECTION_LOGITS, logits, sizeof(logits), NULL), 0);
    ck_assert_int_eq(kv_file_write_section(w, KV_SECTION_SESSION, "abc", 3, NULL), 0);
    ck_assert_int_eq(kv_file_finish(w, true, &info, &frames, NULL), 0);
    free(frames);
}

static int widen(const char *from, const char *to, struct kv_why *why)
{
    const struct kv_widen w = {.from = queue, .to = wide_queue, .name = to, .ns = wide_ns};
    struct kv_file_info info;
    struct kv_file *file;
    int rc;

    ck_assert_int_eq(kv_file_open(queue, from, &file, NULL), 0);
    rc = kv_file_widen(file, &w, &info, why);
    kv_file_close(file);
    return rc;
}

/* By definition: sign, and fraction times a power of two. */
static double f16(uint16_t h)
{
    const int exponent = h >> 10 & 31, fraction = h & 1023;
    double v = exponent == 0    ? ldexp(fraction, -24)
               : exponent == 31 ? (fraction == 0 ? INFINITY : NAN)
                                : ldexp(1024 + fraction, exponent - 25);

    return h & 0x8000 ? -v : v;
}

struct rows {
    const unsigned char *narrow;
    uint32_t n_seen;
};

static double want_at(const unsigned char *position, uint32_t i)
{
    const unsigned char *half = position + (i < DIM ? 0 : DIM + 2);
    uint16_t h;

    if (geometry.precision == KV_F16) {
        memcpy(&h, position + 2 * i, sizeof(h));
        return f16(h);
    }
    memcpy(&h, half + DIM, sizeof(h));
    return (int8_t)half[i % DIM] * f16(h);
}

static int compare(void *arg, uint32_t first, uint32_t count, const uint32_t *got_ids,
                   const struct iovec *rows, size_t n_rows, struct kv_why *why)
{
    struct rows *r = arg;
    const size_t bytes = kv_position_bytes(&geometry);
    float *wide = malloc(count * ELEMENTS * sizeof(*wide));
    unsigned char *at = (unsigned char *)wide;

    (void)why;
    ck_assert_ptr_nonnull(wide);
    for (size_t i = 0; i < n_rows; i++) {
        memcpy(at, rows[i].iov_base, rows[i].iov_len);
        at += rows[i].iov_len;
    }
    ck_assert_mem_eq(got_ids, ids + first, count * sizeof(*ids));
    for (uint32_t i = 0; i < count * ELEMENTS; i++) {
        const unsigned char *position = r->narrow + (first + i / ELEMENTS) * bytes;
        const double want = want_at(position, i % ELEMENTS), got = (double)wide[i];

        ck_assert_msg(isnan(want) ? isnan(got) : want == got && signbit(want) == signbit(got),
                      "position %u, %u: %a, not %a", first + i / ELEMENTS, i % ELEMENTS, got, want);
    }
    r->n_seen += count;
    free(wide);
    return 0;
}

static void check_wide(const char *name, const unsigned char *narrow)
{
    struct rows r = {.narrow = narrow};
    struct kv_file *file;
    struct kv_why why;
    const struct kv_file_info *info;
    void *session;
    size_t len;

    ck_assert_msg(kv_file_open(wide_queue, name, &file, &why) == 0, "%s", why.text);
    info = kv_file_info(file);
    ck_assert_int_eq(info->header.geometry.precision, KV_F32);
    ck_assert_mem_eq(&info->header.ns, &wide_ns, sizeof(wide_ns));
    ck_assert_uint_ne(info->header.snapshot_id[0], 9);
    ck_assert_uint_eq(info->n_positions, POSITIONS);
    ck_assert_msg(kv_file_verify(file, wide_queue, &why) == 0, "%s", why.text);
    ck_assert_int_eq(kv_file_read(file, wide_queue, 0, POSITIONS, compare, &r, NULL), 0);
    ck_assert_uint_eq(r.n_seen, POSITIONS);
    ck_assert_int_eq(kv_file_section(file, wide_queue, KV_SECTION_SESSION, &session, &len, NULL),
                     0);
    ck_assert_uint_eq(len, 3);
    ck_assert_mem_eq(session, "abc", 3);
    free(session);
    ck_assert_int_eq(kv_file_section(file, wide_queue, KV_SECTION_LOGITS, &session, &len, NULL), 0);
    ck_assert_ptr_null(session);
    kv_file_close(file);
}

START_TEST(every_f16_is_its_value_in_f32)
{
    unsigned char *rows;
    struct kv_why why;

    setup(KV_F16);
    rows = malloc(POSITIONS * kv_position_bytes(&geometry));
    ck_assert_ptr_nonnull(rows);
    ck_assert_uint_eq(POSITIONS * ELEMENTS, 65536);
    for (uint32_t i = 0; i < 65536; i++) {
        const uint16_t h = (uint16_t)i;

        memcpy(rows + 2 * i, &h, sizeof(h));
    }
    write_file("narrow", rows, 0, POSITIONS);
    ck_assert_msg(widen("narrow", "wide", &why) == 0, "%s", why.text);
    check_wide("wide", rows);
    free(rows);
    teardown();
}
END_TEST

START_TEST(every_int8_times_its_scale_is_exact)
{
    unsigned char *rows;
    struct kv_why why;
    size_t bytes;

    setup(KV_Q8);
    bytes = kv_position_bytes(&geometry);
    ck_assert_uint_eq(bytes, 2 * (DIM + 2));
    rows = malloc(POSITIONS * bytes);
    ck_assert_ptr_nonnull(rows);
    for (uint32_t p = 0; p < POSITIONS; p++) {
        for (uint32_t half = 0; half < 2; half++) {
            unsigned char *at = rows + p * bytes + half * (DIM + 2);
            const uint16_t scale = (uint16_t)((2 * p + half) * 32); /* below infinity, both signs */

            for (uint32_t i = 0; i < DIM; i++)
                at[i] = (unsigned char)((p * DIM + i + half) & 255);
            memcpy(at + DIM, &scale, sizeof(scale));
        }
    }
    write_file("narrow", rows, 0, POSITIONS);
    ck_assert_msg(widen("narrow", "wide", &why) == 0, "%s", why.text);
    check_wide("wide", rows);
    free(rows);
    teardown();
}
END_TEST

static int exists(void *arg, const char *name)
{
    return strcmp(name, arg) == 0;
}

START_TEST(what_cannot_be_widened_leaves_nothing)
{
    unsigned char *rows = calloc(POSITIONS, ELEMENTS * 4);
    char wide[] = "wide";
    static const enum sim_kind kinds[] = {SIM_ALLOCATE, SIM_WRITE, SIM_SYNC};
    struct kv_why why;

    ck_assert_ptr_nonnull(rows);
    setup(KV_F16);
    write_file("delta", rows, 10, 20);
    ck_assert_int_eq(widen("delta", wide, &why), KV_ERR_INVALID);
    ck_assert_msg(strstr(why.text, "stands on another") != NULL, "%s", why.text);
    write_file("narrow", rows, 0, POSITIONS);
    for (size_t k = 0; k < sizeof(kinds) / sizeof(kinds[0]); k++) {
        sim_disk_fail(sim, kinds[k], sim_disk_n(sim, kinds[k]), -28);
        ck_assert_int_eq(widen("narrow", wide, &why), KV_ERR_FULL);
        ck_assert_int_eq(disk->ops->list(disk, exists, wide), 0);
    }
    ck_assert_int_eq(widen("narrow", "delta", &why), KV_ERR_INVALID);
    ck_assert_str_eq(why.text, "delta is there already");
    teardown();
    setup(KV_F32);
    write_file("f32", rows, 0, 20);
    ck_assert_int_eq(widen("f32", wide, &why), KV_ERR_INVALID);
    ck_assert_str_eq(why.text, "precision: it is f32 already");
    teardown();
    free(rows);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("kv widen");
    TCase *c = tcase_create("widen");
    SRunner *r;
    int failed;

    tcase_add_test(c, every_f16_is_its_value_in_f32);
    tcase_add_test(c, every_int8_times_its_scale_is_exact);
    tcase_add_test(c, what_cannot_be_widened_leaves_nothing);
    suite_add_tcase(s, c);
    r = srunner_create(s);
    srunner_run_all(r, CK_NORMAL);
    failed = srunner_ntests_failed(r);
    srunner_free(r);
    return failed != 0;
}

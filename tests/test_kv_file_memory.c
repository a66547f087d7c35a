/* The memory of snapshot files: each allocation failing, and how much a file can make its reader
 * ask for. */
#include "kvcore/kv_file.h"
#include "kvcore/kv_record.h"
#include "tests/fail_alloc.h"
#include "tests/kv_help.h"
#include "tests/sim_disk.h"

#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <unistd.h>

static const struct kv_namespace ns = {.digest = {.bytes = {1, 2, 3}}};
static const struct kv_geometry geometry = {2, 2, 32, KV_F16};
static const float logits[5] = {1, 2, 3, 4, 5};
static const char session[] = "who, what and when";

enum {
    BASE = 5,
    N = 12,
    /* That reading a file of so few positions may take: its last 64 KiB, the header and index, a
     * decoder's frame of ids, and a section. */
    CEILING = 256 * 1024,
};

static struct sim_disk *sim;
static struct kv_disk *disk;
static struct kv_queue *queue;
static uint32_t ids[N];
static unsigned char *rows; /* of [BASE, N) */

static void setup(void)
{
    sim = sim_disk_new(1);
    disk = sim_disk_open(sim);
    for (uint32_t i = 0; i < N; i++)
        ids[i] = (uint32_t)mix(i);
    rows = make_rows(&geometry, &ns, ids, BASE, N);
    ck_assert_int_eq(kv_file_queue(disk, &geometry, &queue, NULL), 0);
}

static void teardown(void)
{
    disk->ops->queue_close(queue);
    disk->ops->close(disk);
    sim_disk_free(sim);
    free(rows);
}

static int write_file(struct kv_why *why)
{
    const struct iovec piece = {rows, (N - BASE) * kv_position_bytes(&geometry)};
    const struct kv_snapshot_header h = {.ns = ns.digest,
                                         .geometry = geometry,
                                         .frame_positions = kv_frame_positions(&geometry),
                                         .base = BASE,
                                         .parent_id = {1},
                                         .n_bound = N,
                                         .base_ids = ids};
    struct kv_file_frame *frames = NULL;
    struct kv_file_writer *w;
    struct kv_file_info info;
    int rc = kv_file_create(queue, "a", 4096, &h, &w, why);

    if (rc < 0)
        return rc;
    rc = kv_file_write_rows(w, ids + BASE, N - BASE, &piece, 1, why);
    if (rc == 0)
        rc = kv_file_write_section(w, KV_SECTION_LOGITS, logits, sizeof(logits), why);
    if (rc == 0)
        rc = kv_file_write_section(w, KV_SECTION_SESSION, session, sizeof(session), why);
    if (rc == 0)
        rc = kv_file_finish(w, true, &info, &frames, why);
    else
        kv_file_discard(w);
    free(frames);
    return rc;
}

/* The asserts of Check allocate too, so what runs while allocations fail or are counted says here
 * whether the reader handed on anything but what was written. */
static bool wrong;

static int compare(void *arg, uint32_t first, uint32_t count, const uint32_t *got,
                   const struct iovec *pieces, size_t n_pieces, struct kv_why *why)
{
    const unsigned char *at = rows + (first - BASE) * kv_position_bytes(&geometry);

    (void)why;
    wrong |= memcmp(got, ids + first, count * sizeof(*got)) != 0;
    for (size_t i = 0; i < n_pieces; at += pieces[i++].iov_len)
        wrong |= memcmp(pieces[i].iov_base, at, pieces[i].iov_len) != 0;
    *(uint32_t *)arg += count;
    return 0;
}

static int read_file(struct kv_why *why)
{
    uint32_t got[N], n = 0;
    struct kv_file *file;
    void *data = NULL;
    size_t len;
    int rc = kv_file_open(queue, "a", &file, why);

    if (rc < 0)
        return rc;
    rc = kv_file_read(file, queue, BASE, N, compare, &n, why);
    wrong |= rc == 0 && n != N - BASE;
    if (rc == 0)
        rc = kv_file_frame_ids(file, queue, 0, got, why);
    if (rc == 0)
        rc = kv_file_section(file, queue, KV_SECTION_SESSION, &data, &len, why);
    free(data);
    if (rc == 0)
        rc = kv_file_verify(file, queue, why);
    kv_file_close(file);
    return rc;
}

/* Run with the first, the second, ... allocation failing, or with all from there on, until none
 * did; returns how many did. */
static uint32_t fail_each(int (*run)(struct kv_why *why), bool once, bool removes)
{
    for (uint32_t n = 0;; n++) {
        struct kv_why why = {""};
        int rc;

        alloc_failed = false;
        alloc_fails_once = once;
        allocs_left = n;
        rc = run(&why);
        allocs_left = UINT64_MAX;
        ck_assert(!wrong);
        if (!alloc_failed) {
            ck_assert_msg(rc == 0, "%s", why.text);
            return n;
        }
        ck_assert_msg(rc == KV_ERR_NOMEM, "allocation %u: %d %s", n, rc, why.text);
        ck_assert_msg(strstr(why.text, "no memory") != NULL, "allocation %u: %s", n, why.text);
        if (removes)
            sim_disk_remove(sim, "a");
    }
}

START_TEST(each_allocation_of_a_writer_may_fail)
{
    ck_assert_uint_ge(fail_each(write_file, _i, true), 8);
    ck_assert_int_eq(read_file(NULL), 0);
}
END_TEST

START_TEST(each_allocation_of_a_reader_may_fail)
{
    static const enum sim_cached cached[] = {SIM_CACHED_NONE, SIM_CACHED_ALL};

    ck_assert_int_eq(write_file(NULL), 0);
    for (int i = 0; i < 2; i++) {
        sim_disk_behave(sim, (struct sim_behaviour){.cached = cached[i]});
        ck_assert_uint_ge(fail_each(read_file, _i, false), 8);
    }
}
END_TEST

START_TEST(no_flip_makes_a_reader_ask_for_much)
{
    struct kv_why why = {""};
    size_t len;

    ck_assert_int_eq(write_file(NULL), 0);
    sim_disk_bytes(sim, "a", &len);
    for (size_t at = 0; at < len; at++)
        for (unsigned bits = 0x80; bits != 0; bits >>= 7) { /* the highest and the lowest */
            sim_disk_flip(sim, "a", at, (unsigned char)bits);
            alloc_bytes = 0;
            const int rc = read_file(&why);
            const size_t bytes = alloc_bytes;

            ck_assert_msg(rc < 0 && !wrong, "flip at %zu passed", at);
            ck_assert_msg(bytes > 0 && bytes <= CEILING, "flip at %zu: %zu bytes", at, bytes);
            sim_disk_flip(sim, "a", at, (unsigned char)bits);
        }
    ck_assert_int_eq(read_file(&why), 0);
}
END_TEST

/* ---- A file of 5 GiB with nothing between its first and its last block ---- */

static const uint64_t huge = 5ull << 30;

static int open_huge(const unsigned char *header, size_t header_len, const unsigned char *footer,
                     size_t *allocated, struct kv_why *why)
{
    char root[PATH_MAX], path[PATH_MAX + 16];
    struct kv_disk *real;
    struct kv_queue *real_queue;
    struct kv_file *file;
    int fd, rc;

    snprintf(root, sizeof(root), "%s/kv-file-XXXXXX", BATON_BINARY_DIR);
    ck_assert_ptr_nonnull(mkdtemp(root));
    ck_assert_int_eq(kv_disk_open(root, 0, &real, NULL), 0);
    ck_assert_int_eq(kv_file_queue(real, &geometry, &real_queue, NULL), 0);
    snprintf(path, sizeof(path), "%s/a", root);
    fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(ftruncate(fd, (off_t)huge), 0);
    ck_assert_int_eq(pwrite(fd, header, header_len, 0), (ssize_t)header_len);
    ck_assert_int_eq(pwrite(fd, footer, KV_FILE_BLOCK, (off_t)(huge - KV_FILE_BLOCK)),
                     KV_FILE_BLOCK);
    close(fd);
    alloc_bytes = 0;
    rc = kv_file_open(real_queue, "a", &file, why);
    *allocated = alloc_bytes;
    real->ops->queue_close(real_queue);
    ck_assert_int_eq(real->ops->unlink(real, "a"), 0);
    real->ops->close(real);
    snprintf(path, sizeof(path), "rm -rf '%s'", root);
    ck_assert_int_eq(system(path), 0);
    return rc;
}

START_TEST(a_huge_file_of_nothing_is_refused_at_once)
{
    const unsigned char zeros[KV_FILE_BLOCK] = {0};
    struct kv_why why = {""};
    size_t bytes;

    ck_assert_int_eq(open_huge(zeros, 0, zeros, &bytes, &why), KV_ERR_FORMAT);
    ck_assert_ptr_nonnull(strstr(why.text, "footer magic"));
    ck_assert_uint_le(bytes, CEILING);
}
END_TEST

/* Header and footer are right by their own CRCs, and agree on 16 Mi frames of a position each: an
 * index of 940 MB, which fits into the file, but not together with those frames. */
START_TEST(a_huge_file_cannot_claim_a_huge_index)
{
    const struct kv_geometry g = {64, 8, 256, KV_F32}; /* 1 MiB a position */
    const uint32_t n = KV_MAX_POSITIONS;
    const struct kv_snapshot_header h = {
        .ns = ns.digest, .geometry = g, .frame_positions = kv_frame_positions(&g), .n_bound = n};
    const uint64_t index_bytes = KV_INDEX_FRAMES + n * (uint64_t)KV_INDEX_STRIDE;
    const uint64_t index_room = kv_record_place(index_bytes, 0);
    unsigned char header[KV_HEADER_IDS], footer[KV_FILE_BLOCK] = {0};
    struct kv_encoder *e;
    struct kv_why why = {""};
    size_t bytes;

    ck_assert_uint_eq(h.frame_positions, 1);
    ck_assert_int_eq(kv_encoder_open(&h, &e, NULL), 0);
    kv_encoder_header(e, header);
    kv_encoder_close(e);
    memcpy(footer, KV_MAGIC_FOOTER, 4);
    kv_put_u32(footer, KV_FOOTER_POSITIONS, n);
    kv_put_u32(footer, KV_FOOTER_N_FRAMES, n);
    kv_put_u32(footer, KV_FOOTER_HEADER_BYTES, KV_HEADER_IDS);
    kv_put_u64(footer, KV_FOOTER_INDEX_OFFSET, huge - KV_FILE_BLOCK - index_room);
    kv_put_u64(footer, KV_FOOTER_INDEX_BYTES, index_bytes);
    kv_put_u64(footer, KV_FOOTER_FILE_BYTES, huge);
    kv_put_u32(footer, KV_RECORD_CRC,
               kv_crc32c(0, footer + KV_RECORD_BODY, sizeof(footer) - KV_RECORD_BODY));
    ck_assert_int_eq(open_huge(header, sizeof(header), footer, &bytes, &why), KV_ERR_FORMAT);
    ck_assert_ptr_nonnull(strstr(why.text, "footer: index offset"));
    ck_assert_uint_le(bytes, CEILING);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("kv_file_memory");
    TCase *tc = tcase_create("memory");
    SRunner *sr = srunner_create(s);
    int failed;

    tcase_set_timeout(tc, 120);
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_loop_test(tc, each_allocation_of_a_writer_may_fail, 0, 2);
    tcase_add_loop_test(tc, each_allocation_of_a_reader_may_fail, 0, 2);
    tcase_add_test(tc, no_flip_makes_a_reader_ask_for_much);
    tcase_add_test(tc, a_huge_file_of_nothing_is_refused_at_once);
    tcase_add_test(tc, a_huge_file_cannot_claim_a_huge_index);
    suite_add_tcase(s, tc);
    srunner_run_all(sr, CK_ENV);
    failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return failed != 0;
}

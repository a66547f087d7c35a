/* The committed corpus of fuzz_snapshot.c, run through it; and with an argument, the corpus written
 * anew: files and records that are whole, for a fuzzer to begin with. */
#include "kvcore/kv_file.h"
#include "tests/kv_help.h"
#include "tests/sim_disk.h"

#include <dirent.h>
#include <limits.h>
#include <stdio.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const struct kv_geometry geometries[] = {
    {1, 1, 32, KV_F32}, {1, 1, 32, KV_F16}, {2, 2, 32, KV_Q8}};
static const struct kv_namespace ns = {.digest = {.bytes = {1, 2, 3}}};

enum { N = 9 };

START_TEST(the_corpus_does_no_harm)
{
    DIR *corpus = opendir(BATON_SOURCE_DIR "/tests/corpus/snapshot");
    const struct dirent *entry;
    uint32_t n = 0;

    ck_assert_ptr_nonnull(corpus);
    while ((entry = readdir(corpus)) != NULL) {
        char path[PATH_MAX];
        unsigned char *bytes = malloc(1 << 20);
        size_t size;
        FILE *f;

        if (entry->d_name[0] == '.') {
            free(bytes);
            continue;
        }
        snprintf(path, sizeof(path), BATON_SOURCE_DIR "/tests/corpus/snapshot/%s", entry->d_name);
        f = fopen(path, "rb");
        ck_assert_ptr_nonnull(f);
        size = fread(bytes, 1, 1 << 20, f);
        fclose(f);
        for (unsigned repair = 0; repair < 16; repair++)
            for (size_t at = 2; at < size; at += 1 + size / 200) { /* each bent a little */
                bytes[1] = (unsigned char)repair;
                bytes[at] ^= (unsigned char)(1u << at % 8);
                ck_assert_int_eq(LLVMFuzzerTestOneInput(bytes, size), 0);
                bytes[at] ^= (unsigned char)(1u << at % 8);
            }
        ck_assert_int_eq(LLVMFuzzerTestOneInput(bytes, size), 0);
        free(bytes);
        n++;
    }
    closedir(corpus);
    ck_assert_uint_ge(n, 6);
}
END_TEST

static void write_seed(const char *to, const char *name, int g, unsigned char kind,
                       const void *bytes, size_t len)
{
    char path[PATH_MAX];
    FILE *f;

    snprintf(path, sizeof(path), "%s/%s-%s", to, name, kv_precision_name(geometries[g].precision));
    f = fopen(path, "wb");
    ck_assert(f != NULL);
    fputc(kind, f);
    fputc(15, f);
    fwrite(bytes, 1, len, f);
    ck_assert(fclose(f) == 0);
}

static struct kv_snapshot_header header_of(int g, uint32_t base, const uint32_t *ids)
{
    return (struct kv_snapshot_header){.ns = ns.digest,
                                       .geometry = geometries[g],
                                       .frame_positions = kv_frame_positions(&geometries[g]),
                                       .base = base,
                                       .parent_id = {base > 0},
                                       .n_bound = N,
                                       .base_ids = ids};
}

static void write_file_seed(const char *to, int g, uint32_t base, const uint32_t *ids,
                            const struct iovec *rows)
{
    const struct kv_snapshot_header h = header_of(g, base, ids);
    struct sim_disk *sim = sim_disk_new(1);
    struct kv_disk *disk = sim_disk_open(sim);
    struct kv_file_frame *frames;
    struct kv_file_writer *w;
    struct kv_file_info info;
    struct kv_queue *queue;
    const unsigned char *bytes;
    size_t len;

    ck_assert(kv_file_queue(disk, &geometries[g], &queue, NULL) == 0);
    ck_assert(kv_file_create(queue, "f", 4096, &h, &w, NULL) == 0);
    ck_assert(kv_file_write_rows(w, ids + base, N - base, rows, 1, NULL) == 0);
    ck_assert(kv_file_write_section(w, KV_SECTION_LOGITS, "12345678", 8, NULL) == 0);
    ck_assert(kv_file_write_section(w, KV_SECTION_SESSION, "who", 3, NULL) == 0);
    ck_assert(kv_file_finish(w, true, &info, &frames, NULL) == 0);
    free(frames);
    bytes = sim_disk_bytes(sim, "f", &len);
    write_seed(to, base > 0 ? "delta" : "file", g, 0, bytes, len);
    disk->ops->queue_close(queue);
    disk->ops->close(disk);
    sim_disk_free(sim);
}

/* A record behind its length; returns where the next one goes. */
static unsigned char *put_record(unsigned char *at, size_t len)
{
    const uint32_t n = (uint32_t)len;

    memcpy(at, &n, sizeof(n));
    return at + sizeof(n) + len;
}

static void write_wire_seed(const char *to, int g, const uint32_t *ids, const struct iovec *rows)
{
    const struct kv_snapshot_header h = header_of(g, 0, ids);
    unsigned char *bytes = calloc(1, 1 << 20), *at = bytes;
    struct kv_encoder *e;

    ck_assert(kv_encoder_open(&h, &e, NULL) == 0);
    kv_encoder_header(e, at + 4);
    at = put_record(at, kv_encoder_header_bytes(e));
    ck_assert(kv_encoder_frame_rows(e, ids, rows, 1, N, at + 4) == 0);
    at = put_record(at, kv_encoder_frame_bytes(e, N));
    ck_assert(kv_encoder_section(e, KV_SECTION_LOGITS, "12345678", 8, at + 4) == 0);
    at = put_record(at, kv_encoder_section_bytes(8));
    kv_encoder_seal(e, at + 4, NULL);
    at = put_record(at, kv_encoder_seal_bytes());
    kv_encoder_close(e);
    write_seed(to, "wire", g, 1, bytes, (size_t)(at - bytes));
    free(bytes);
}

static const char *folder; /* where the corpus goes; NULL: it is read */

START_TEST(the_corpus_is_written)
{
    uint32_t ids[N];

    for (uint32_t i = 0; i < N; i++)
        ids[i] = i * i;
    for (int g = 0; g < 3; g++) {
        unsigned char *rows = make_rows(&geometries[g], &ns, ids, 0, N);
        const size_t position = kv_position_bytes(&geometries[g]);
        const struct iovec all = {rows, N * position}, rest = {rows + 4 * position, 5 * position};

        write_file_seed(folder, g, 0, ids, &all);
        write_file_seed(folder, g, 4, ids, &rest);
        write_wire_seed(folder, g, ids, &all);
        free(rows);
    }
}
END_TEST

int main(int argc, char **argv)
{
    Suite *s;
    TCase *tc;
    SRunner *sr;
    int failed;

    folder = argc > 1 ? argv[1] : NULL;
    s = suite_create("fuzz_snapshot");
    tc = tcase_create("corpus");
    sr = srunner_create(s);
    tcase_set_timeout(tc, 120);
    if (folder != NULL)
        tcase_add_test(tc, the_corpus_is_written);
    else
        tcase_add_test(tc, the_corpus_does_no_harm);
    suite_add_tcase(s, tc);
    srunner_run_all(sr, CK_ENV);
    failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return failed != 0;
}

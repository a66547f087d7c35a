/* Snapshot files on a simulated disk: what is written comes back, and nothing else passes. */
#include "kvcore/kv_file.h"
#include "kvcore/kv_record.h"
#include "tests/kv_help.h"
#include "tests/sim_disk.h"

#include <errno.h>
#include <stdio.h>

static const struct kv_namespace ns = {.digest = {.bytes = {1, 2, 3}}};

static struct sim_disk *sim;
static struct kv_disk *disk;
static struct kv_queue *queue;
static struct kv_geometry geometry;
static uint32_t *ids;
static float logits[5] = {1, 2, 3, 4, 5};
static const char session[] = "who, what and when";

enum { N = 100 };

static const struct kv_geometry geometries[] = {
    {2, 2, 32, KV_F32},
    {2, 2, 32, KV_F16},
    {2, 2, 32, KV_Q8},
    {16, 8, 128, KV_F32}, /* 8 positions a frame: many frames */
};

static void setup(void)
{
    sim = sim_disk_new(1);
    disk = sim_disk_open(sim);
    ids = malloc(N * sizeof(*ids));
    for (uint32_t i = 0; i < N; i++)
        ids[i] = (uint32_t)mix(i);
}

static void use_geometry(int i)
{
    geometry = geometries[i];
    ck_assert_int_eq(kv_file_queue(disk, &geometry, &queue, NULL), 0);
}

static void teardown(void)
{
    disk->ops->queue_close(queue);
    disk->ops->close(disk);
    sim_disk_free(sim);
    free(ids);
}

static struct kv_snapshot_header header_of(uint32_t base, uint32_t n)
{
    struct kv_snapshot_header h = {.ns = ns.digest,
                                   .geometry = geometry,
                                   .frame_positions = kv_frame_positions(&geometry),
                                   .base = base,
                                   .n_bound = n,
                                   .base_ids = ids};

    memset(h.snapshot_id, 7, sizeof(h.snapshot_id));
    memset(h.fingerprint.bytes, 8, sizeof(h.fingerprint.bytes));
    if (base > 0)
        memset(h.parent_id, 9, sizeof(h.parent_id));
    return h;
}

/* Write positions [base, n) of ids, from memory in runs of `step`, with both sections or none. */
static int write_file(const char *name, uint32_t base, uint32_t n, uint32_t step, bool sections,
                      struct kv_file_info *info, struct kv_why *why)
{
    const struct kv_snapshot_header h = header_of(base, n);
    const size_t position = kv_position_bytes(&geometry);
    const uint64_t bytes = kv_file_bytes(&geometry, base, n, sections ? sizeof(logits) : 0,
                                         sections ? sizeof(session) : 0);
    unsigned char *rows = make_rows(&geometry, &ns, ids, base, n);
    struct kv_file_frame *frames;
    struct kv_file_writer *w = NULL;
    int rc = kv_file_create(queue, name, bytes, &h, &w, why);

    for (uint32_t p = base; p < n && rc == 0; p += step) {
        const uint32_t count = n - p < step ? n - p : step;
        struct iovec pieces[2] = {{rows + (p - base) * position, 1},
                                  {rows + (p - base) * position + 1, count * position - 1}};

        rc = kv_file_write_rows(w, ids + p, count, pieces, 2, why);
    }
    if (rc == 0 && sections)
        rc = kv_file_write_section(w, KV_SECTION_LOGITS, logits, sizeof(logits), why);
    if (rc == 0 && sections)
        rc = kv_file_write_section(w, KV_SECTION_SESSION, session, sizeof(session), why);
    if (rc == 0)
        rc = kv_file_finish(w, true, info, &frames, why);
    else if (w != NULL)
        kv_file_discard(w);
    if (rc == 0) {
        ck_assert_uint_eq(info->bytes, bytes);
        free(frames);
    }
    free(rows);
    return rc;
}

struct expected {
    uint32_t next;
    uint32_t n_calls;
};

static int compare(void *arg, uint32_t first, uint32_t count, const uint32_t *got_ids,
                   const struct iovec *rows, size_t n_rows, struct kv_why *why)
{
    struct expected *e = arg;
    unsigned char *want = make_rows(&geometry, &ns, ids, first, first + count), *at = want;

    (void)why;
    ck_assert_uint_eq(first, e->next);
    ck_assert_mem_eq(got_ids, ids + first, count * sizeof(*ids));
    for (size_t i = 0; i < n_rows; at += rows[i++].iov_len)
        ck_assert_mem_eq(rows[i].iov_base, at, rows[i].iov_len);
    ck_assert_uint_eq((size_t)(at - want), count * kv_position_bytes(&geometry));
    free(want);
    e->next = first + count;
    e->n_calls++;
    return 0;
}

/* Open, read all by a sink that compares, and verify. */
static int check_file(const char *name, struct kv_why *why)
{
    struct kv_file *file = NULL;
    int rc = kv_file_open(queue, name, &file, why);
    void *data = NULL;
    size_t len = 0;

    if (rc < 0)
        return rc;
    const struct kv_file_info *info = kv_file_info(file);
    struct expected e = {.next = info->header.base};

    rc = kv_file_read(file, queue, info->header.base, info->n_positions, compare, &e, why);
    if (rc == 0) {
        ck_assert_uint_eq(e.next, info->n_positions);
        rc = kv_file_section(file, queue, KV_SECTION_SESSION, &data, &len, why);
    }
    if (rc == 0 && data != NULL) {
        ck_assert_uint_eq(len, sizeof(session));
        ck_assert_mem_eq(data, session, len);
        free(data);
        rc = kv_file_section(file, queue, KV_SECTION_LOGITS, &data, &len, why);
        if (rc == 0)
            ck_assert_mem_eq(data, logits, sizeof(logits));
        if (rc == 0)
            free(data);
    }
    if (rc == 0)
        rc = kv_file_verify(file, queue, why);
    kv_file_close(file);
    return rc;
}

START_TEST(what_is_written_comes_back)
{
    static const uint32_t ends[] = {1, 2, 7, 8, 9, 33};
    struct kv_why why = {""};

    use_geometry(_i);
    for (size_t i = 0; i < sizeof(ends) / sizeof(ends[0]); i++)
        for (uint32_t base = 0; base <= ends[i]; base += 1 + base)
            for (int sections = 0; sections < 2; sections++) {
                struct kv_file_info info;

                ck_assert_msg(write_file("a", base, ends[i], 7, sections, &info, &why) == 0, "%s",
                              why.text);
                ck_assert_msg(check_file("a", &why) == 0, "%s", why.text);
                ck_assert_int_eq(disk->ops->unlink(disk, "a"), 0);
            }
}
END_TEST

START_TEST(a_context_and_its_rows_make_the_same_file)
{
    const struct kv_cache_config config = {
        .geometry = geometries[_i], .page_tokens = 16, .n_pages = 8, .arena = true};
    struct kv_file_writer *w;
    struct kv_file_info info, other;
    struct kv_file_frame *frames;
    struct kv_cache *cache;
    struct kv_context *ctx;
    struct kv_why why = {""};
    const unsigned char *a, *b;
    size_t n_a, n_b;

    use_geometry(_i);
    const struct kv_snapshot_header header = header_of(0, N);

    ck_assert_int_eq(kv_cache_open(&config, &cache, NULL), 0);
    ck_assert_int_eq(kv_context_open(cache, &ns, &ctx), 0);
    ck_assert_int_eq(append_to(ctx, &geometry, &ns, ids, N), 0);
    ck_assert_int_eq(
        kv_file_create(queue, "a", kv_file_bytes(&geometry, 0, N, 0, 0), &header, &w, &why), 0);
    ck_assert_int_eq(kv_file_write_context(w, ctx, N, &why), 0);
    ck_assert_int_eq(kv_file_finish(w, true, &info, &frames, &why), 0);
    free(frames);
    ck_assert_int_eq(write_file("b", 0, N, 13, false, &other, &why), 0);
    a = sim_disk_bytes(sim, "a", &n_a);
    b = sim_disk_bytes(sim, "b", &n_b);
    ck_assert_uint_eq(n_a, n_b);
    ck_assert_mem_eq(a, b, n_a);
    kv_context_close(ctx);
    kv_cache_close(cache);
}
END_TEST

START_TEST(any_range_is_read)
{
    struct kv_file_info info;
    struct kv_file *file;
    struct kv_why why = {""};

    use_geometry(_i);
    ck_assert_int_eq(write_file("a", 3, N, 7, true, &info, &why), 0);
    ck_assert_int_eq(kv_file_open(queue, "a", &file, &why), 0);
    for (uint32_t first = 3; first <= N; first += 13)
        for (uint32_t end = first; end <= N; end += 17) {
            struct expected e = {.next = first};

            ck_assert_msg(kv_file_read(file, queue, first, end, compare, &e, &why) == 0, "%s",
                          why.text);
            ck_assert_uint_eq(e.next, end);
        }
    ck_assert_int_eq(kv_file_read(file, queue, 2, 5, compare, NULL, &why), KV_ERR_INVALID);
    ck_assert_int_eq(kv_file_read(file, queue, 5, N + 1, compare, NULL, &why), KV_ERR_INVALID);
    for (uint32_t i = 0; i < kv_file_info(file)->n_frames; i++) {
        const struct kv_file_frame *f = &kv_file_info(file)->frames[i];
        uint32_t got[N];

        ck_assert_int_eq(kv_file_frame_ids(file, queue, i, got, &why), 0);
        ck_assert_mem_eq(got, ids + f->first, f->count * sizeof(*ids));
    }
    kv_file_close(file);
}
END_TEST

START_TEST(positions_of_many_MiB_are_written_and_read)
{
    static const struct kv_geometry large[] = {{64, 8, 1024, KV_F32}, {64, 16, 1024, KV_F32}};
    struct kv_file_info info;
    struct kv_why why = {""};

    geometry = large[_i]; /* 4 and 8 MiB each: a frame is one of them */
    ck_assert_int_eq(kv_file_queue(disk, &geometry, &queue, NULL), 0);
    ck_assert_uint_gt(queue->buffer_bytes, kv_position_bytes(&geometry));
    sim_disk_behave(sim, (struct sim_behaviour){.any_order = true, .shorten = true});
    ck_assert_msg(write_file("a", 1, 5, 3, true, &info, &why) == 0, "%s", why.text);
    ck_assert_uint_eq(info.n_frames, 4);
    ck_assert_msg(check_file("a", &why) == 0, "%s", why.text);
}
END_TEST

/* A file with so many bytes changed must be refused, whatever is asked of it. */
static void refused(const char *name, const unsigned char *bytes, uint64_t len, const char *what,
                    uint64_t at)
{
    struct kv_why why = {""};

    sim_disk_put(sim, name, bytes, len);
    ck_assert_msg(check_file(name, &why) < 0, "%s at %llu passed", what, (unsigned long long)at);
    ck_assert_msg(why.text[0] != '\0', "%s at %llu: no reason", what, (unsigned long long)at);
}

/* What the reason must name for a byte of the file: the record that it is of, or that the gap is
 * before. */
static const char *part_at(const struct kv_file_info *info, uint64_t at)
{
    const uint64_t index = info->bytes - 2 * KV_FILE_BLOCK; /* the file has few frames */
    const uint64_t frame_end =
        kv_file_frames_end(&geometry, info->header.base, info->n_positions, &(uint32_t){0});

    if (at < KV_HEADER_IDS + info->header.base * sizeof(uint32_t))
        /* The version stands before all else, and the base says how long the header is. */
        return at / 4 == KV_HEADER_VERSION / 4 ? "" : at / 4 == KV_HEADER_BASE / 4 ? "" : "header";
    if (at < frame_end)
        return "frame 0";
    for (uint32_t i = 0; i < info->n_sections; i++)
        if (at < info->sections[i].offset + KV_SECTION_DATA + info->sections[i].len)
            return info->sections[i].kind == KV_SECTION_LOGITS ? "section 1" : "section 2";
    return at < index + KV_INDEX_FRAMES + info->n_frames * KV_INDEX_STRIDE ? "index" : "footer";
}

START_TEST(every_flip_is_refused)
{
    struct kv_file_info info;
    struct kv_why why;
    size_t len;

    use_geometry(_i % 3);
    ck_assert_int_eq(write_file("a", _i < 3 ? 0 : 5, 12, 7, true, &info, &why), 0);
    sim_disk_bytes(sim, "a", &len);
    for (uint64_t at = 0; at < len; at++) {
        why.text[0] = '\0';
        sim_disk_flip(sim, "a", at, (unsigned char)(1u << at % 8));
        ck_assert_msg(check_file("a", &why) < 0, "flip at %llu passed", (unsigned long long)at);
        ck_assert_msg(strstr(why.text, part_at(&info, at)) != NULL, "flip at %llu of %s: %s",
                      (unsigned long long)at, part_at(&info, at), why.text);
        sim_disk_flip(sim, "a", at, (unsigned char)(1u << at % 8));
    }
    ck_assert_int_eq(check_file("a", &why), 0);
}
END_TEST

START_TEST(every_truncation_is_refused)
{
    struct kv_file_info info;
    struct kv_why why = {""};
    const unsigned char *copy;
    size_t len;

    use_geometry(_i % 3);
    ck_assert_int_eq(write_file("a", _i < 3 ? 0 : 5, 12, 7, true, &info, &why), 0);
    copy = sim_disk_bytes(sim, "a", &len);
    for (uint64_t n = 0; n < len; n++)
        refused("b", copy, n, "truncation", n);
    unsigned char *longer = calloc(1, len + 4096);

    memcpy(longer, copy, len);
    refused("b", longer, len + 4096, "a block more", 0);
    memmove(longer + 4096, copy, len);
    refused("b", longer, len + 4096, "a block before", 0);
    free(longer);
}
END_TEST

START_TEST(frames_of_other_files_and_places_are_refused)
{
    struct kv_file_info info;
    struct kv_file *file;
    struct kv_why why = {""};
    const unsigned char *a, *b;
    unsigned char *copy;
    size_t len, other;
    struct kv_file_frame f[2];

    use_geometry(3);
    ck_assert_int_eq(write_file("a", 0, N, 7, true, &info, &why), 0);
    ck_assert_int_eq(kv_file_open(queue, "a", &file, &why), 0);
    memcpy(f, kv_file_info(file)->frames, sizeof(f));
    kv_file_close(file);
    ids[50] ^= 1; /* so its later frames differ */
    ck_assert_int_eq(write_file("c", 0, N, 7, true, &info, &why), 0);
    ids[50] ^= 1;
    a = sim_disk_bytes(sim, "a", &len);
    b = sim_disk_bytes(sim, "c", &other);
    ck_assert_uint_eq(len, other);
    copy = malloc(len);

    /* Swapped. */
    const uint64_t bytes = f[1].offset - f[0].offset;
    memcpy(copy, a, len);
    memcpy(copy + f[0].offset, a + f[1].offset, bytes);
    memcpy(copy + f[1].offset, a + f[0].offset, bytes);
    refused("b", copy, len, "swapped frames", 0);
    /* The second half, index and footer of another: each half valid. */
    memcpy(copy, a, len / 2);
    memcpy(copy + len / 2, b + len / 2, len - len / 2);
    refused("b", copy, len, "spliced file", 0);
    /* A stale index and footer. */
    memcpy(copy, a, len);
    memcpy(copy + len - 8192, b + len - 8192, 8192);
    refused("b", copy, len, "stale index", 0);
    memcpy(copy, a, len);
    memcpy(copy + len - 4096, b + len - 4096, 4096);
    refused("b", copy, len, "stale footer", 0);
    free(copy);
}
END_TEST

/* Give the footer another value, with the right CRC: what it says is checked, not only who. */
static void lie(unsigned char *copy, uint64_t len, size_t at, uint64_t value, size_t width)
{
    unsigned char *footer = copy + len - 4096, kept[4096];

    memcpy(kept, footer, 4096);
    memcpy(footer + at, &value, width);
    kv_put_u32(footer, KV_RECORD_CRC, kv_crc32c(0, footer + 8, 4096 - 8));
    if (memcmp(kept, footer, 4096) != 0)
        refused("b", copy, len, "a lying footer", at);
    memcpy(footer, kept, 4096);
}

START_TEST(lying_lengths_are_refused)
{
    static const uint64_t lies[] = {0,          1,          2,          3,        100,
                                    4096,       0x7fffffff, 0xffffffff, 1u << 24, (1u << 24) + 1,
                                    1ull << 32, 1ull << 40, ~0ull};
    struct kv_file_info info;
    struct kv_why why = {""};
    const unsigned char *bytes;
    unsigned char *copy;
    size_t len;

    use_geometry(0);
    ck_assert_int_eq(write_file("a", 5, 12, 7, true, &info, &why), 0);
    bytes = sim_disk_bytes(sim, "a", &len);
    copy = malloc(len);
    memcpy(copy, bytes, len);
    for (size_t i = 0; i < sizeof(lies) / sizeof(lies[0]); i++)
        for (size_t at = 8; at < KV_FOOTER_END; at += 4) {
            lie(copy, len, at, lies[i], 4);
            if (at + 8 <= KV_FOOTER_END)
                lie(copy, len, at, lies[i], 8);
        }
    free(copy);
}
END_TEST

/* Make the checks over the index right: its own, the root and the footer's. */
static void repair(unsigned char *copy, const struct kv_file_info *info)
{
    unsigned char *footer = copy + info->bytes - KV_FILE_BLOCK, *index = footer - KV_FILE_BLOCK;
    struct kv_hash hash;
    struct kv_digest root;

    kv_hash_init(&hash);
    kv_hash_add_u32(&hash, info->header_crc);
    for (uint32_t i = 0; i < info->n_frames; i++) {
        const unsigned char *line = index + KV_INDEX_FRAMES + (size_t)i * KV_INDEX_STRIDE;
        struct kv_digest digest;

        memcpy(digest.bytes, line + KV_INDEX_DIGEST, sizeof(digest.bytes));
        kv_root_add_frame(&hash, kv_get_u32(line, KV_INDEX_FIRST),
                          kv_get_u32(line, KV_INDEX_LENGTH), &digest,
                          kv_get_u32(line, KV_INDEX_CRC));
    }
    for (uint32_t i = 0; i < info->n_sections; i++) {
        const unsigned char *line = footer + KV_FOOTER_SECTIONS + (size_t)i * KV_FOOTER_STRIDE;

        kv_root_add_section(&hash, kv_get_u32(line, KV_FOOTER_KIND),
                            kv_get_u32(line, KV_FOOTER_LENGTH), kv_get_u32(line, KV_FOOTER_CRC));
    }
    kv_hash_end(&hash, &root);
    memcpy(footer + KV_FOOTER_ROOT, root.bytes, sizeof(root.bytes));
    kv_put_u32(
        index, KV_RECORD_CRC,
        kv_crc32c(kv_record_seed(info->header.snapshot_id, info->n_positions),
                  index + KV_RECORD_BODY,
                  KV_INDEX_FRAMES + info->n_frames * (size_t)KV_INDEX_STRIDE - KV_RECORD_BODY));
    kv_put_u32(footer, KV_RECORD_CRC, kv_crc32c(0, footer + 8, 4096 - 8));
}

START_TEST(a_lying_index_with_every_check_right_is_refused)
{
    struct kv_file_info info;
    struct kv_why why = {""};
    const unsigned char *bytes;
    unsigned char *copy, *index, *table;
    size_t len;

    use_geometry(3);
    ck_assert_int_eq(write_file("a", 5, 20, 7, true, &info, &why), 0);
    ck_assert_uint_eq(info.n_frames, 3);
    bytes = sim_disk_bytes(sim, "a", &len);
    copy = malloc(len);
    memcpy(copy, bytes, len);
    repair(copy, &info);
    ck_assert_mem_eq(copy, bytes, len); /* or it repairs nothing */
    index = copy + len - 2 * KV_FILE_BLOCK;
    table = copy + len - KV_FILE_BLOCK + KV_FOOTER_SECTIONS;
    for (size_t at = KV_INDEX_COUNT; at < KV_INDEX_FRAMES + 3 * KV_INDEX_STRIDE; at++) {
        index[at] ^= 1;
        repair(copy, &info);
        refused("b", copy, len, "a lying index", at);
        index[at] ^= 1;
    }
    for (size_t at = 0; at < 2 * KV_FOOTER_STRIDE; at++) {
        table[at] ^= 1;
        repair(copy, &info);
        refused("b", copy, len, "a lying section table", at);
        table[at] ^= 1;
    }
    repair(copy, &info);
    ck_assert_mem_eq(copy, bytes, len);
    free(copy);
}
END_TEST

/* What no CRC and no root can tell, since all of them are right. */
START_TEST(records_that_lie_with_every_check_right_are_refused)
{
    struct kv_file_info info;
    struct kv_file *file;
    struct kv_why why = {""};
    const unsigned char *bytes;
    unsigned char *copy, *section;
    uint32_t got[N];
    size_t len;

    use_geometry(1);
    ck_assert_int_eq(write_file("a", 5, 20, 7, true, &info, &why), 0);
    bytes = sim_disk_bytes(sim, "a", &len);
    copy = malloc(len);

    /* A section that says it is of another kind, or length, than the footer says. */
    for (size_t at = KV_SECTION_KIND; at < KV_SECTION_DATA; at++) {
        memcpy(copy, bytes, len);
        section = copy + info.sections[1].offset;
        section[at] ^= 1;
        kv_put_u32(section, KV_RECORD_CRC,
                   kv_crc32c(kv_record_seed(info.header.snapshot_id, info.n_positions),
                             section + KV_RECORD_BODY,
                             KV_SECTION_DATA + info.sections[1].len - KV_RECORD_BODY));
        kv_put_u32(copy + len - KV_FILE_BLOCK + KV_FOOTER_SECTIONS + KV_FOOTER_STRIDE,
                   KV_FOOTER_CRC, kv_get_u32(section, KV_RECORD_CRC));
        repair(copy, &info);
        refused("b", copy, len, "a lying section", at);
    }

    /* A base digest, and a base id, that are not each other's. */
    for (size_t at = KV_HEADER_BASE_DIGEST; at <= KV_HEADER_IDS; at++) {
        struct kv_file_info other = info;
        const size_t header_bytes = KV_HEADER_IDS + info.header.base * sizeof(uint32_t);

        memcpy(copy, bytes, len);
        copy[at] ^= 1;
        other.header_crc = kv_crc32c(0, copy + KV_RECORD_BODY, header_bytes - KV_RECORD_BODY);
        kv_put_u32(copy, KV_RECORD_CRC, other.header_crc);
        repair(copy, &other);
        refused("b", copy, len, "a lying base", at);
        ck_assert_int_lt(kv_file_open(queue, "b", &file, &why), 0); /* not only once it is read */
    }

    /* Ids that are asked for alone have their digest only. */
    memcpy(copy, bytes, len);
    copy[kv_record_place(KV_HEADER_IDS + 5 * sizeof(uint32_t),
                         KV_FRAME_IDS + 15 * sizeof(uint32_t)) +
         KV_FRAME_IDS] ^= 1;
    sim_disk_put(sim, "b", copy, len);
    ck_assert_int_eq(kv_file_open(queue, "b", &file, &why), 0);
    ck_assert_int_eq(kv_file_frame_ids(file, queue, 0, got, &why), KV_ERR_CHECK);
    ck_assert_ptr_nonnull(strstr(why.text, "frame 0"));
    kv_file_close(file);
    free(copy);
}
END_TEST

/* Write and check with the nth operation of a kind failing; false: there is no nth. */
static bool try_fault(enum sim_kind kind, uint64_t nth, int error, int *rc, struct kv_why *why)
{
    struct kv_file_info info;

    sim_disk_remove(sim, "a");
    sim_disk_fail(sim, kind, sim_disk_n(sim, kind) + nth, error);
    const uint64_t last = sim_disk_n(sim, kind) + nth;

    *rc = write_file("a", 0, N, 7, true, &info, why);
    if (*rc == 0)
        *rc = check_file("a", why);
    return sim_disk_n(sim, kind) > last;
}

START_TEST(any_operation_may_fail)
{
    static const enum sim_kind kinds[] = {SIM_CREATE, SIM_ALLOCATE, SIM_WRITE, SIM_SUBMIT,
                                          SIM_SYNC,   SIM_OPEN,     SIM_STAT,  SIM_READ};
    struct kv_why why = {""};
    uint64_t n_tried = 0;
    int rc;

    use_geometry(3);
    for (size_t k = 0; k < sizeof(kinds) / sizeof(kinds[0]); k++)
        for (uint64_t nth = 0; try_fault(kinds[k], nth, -EIO, &rc, &why); nth++, n_tried++)
            ck_assert_msg(rc == KV_ERR_IO, "kind %zu, %llu: %d %s", k, (unsigned long long)nth, rc,
                          why.text);
    ck_assert_uint_gt(n_tried, 20);
    sim_disk_fail_all(sim, SIM_CREATE, 0);
}
END_TEST

START_TEST(no_space_is_said_as_such)
{
    struct kv_why why = {""};
    int rc;

    use_geometry(3);
    ck_assert(try_fault(SIM_ALLOCATE, 0, -ENOSPC, &rc, &why));
    ck_assert_int_eq(rc, KV_ERR_FULL);
    for (uint64_t nth = 0; try_fault(SIM_WRITE, nth, -ENOSPC, &rc, &why); nth++)
        ck_assert_int_eq(rc, KV_ERR_FULL);
    ck_assert_ptr_nonnull(strstr(why.text, "a"));
}
END_TEST

START_TEST(interruptions_and_short_operations_do_not_matter)
{
    static const int errors[] = {-EINTR, -EAGAIN, SIM_SHORT};
    struct kv_why why = {""};
    int rc;

    use_geometry(3);
    for (size_t k = 0; k < sizeof(errors) / sizeof(errors[0]); k++)
        for (int kind = SIM_READ; kind <= SIM_WRITE; kind++)
            for (uint64_t nth = 0; try_fault((enum sim_kind)kind, nth, errors[k], &rc, &why); nth++)
                ck_assert_msg(rc == 0, "%d: %s", errors[k], why.text);
}
END_TEST

/* It is asked first, and where it has nothing or fails, the disk itself is. */
START_TEST(the_page_cache_may_fail_at_any_read)
{
    static const int errors[] = {-EIO, -EAGAIN};
    struct kv_why why = {""};
    int rc;

    use_geometry(3);
    sim_disk_behave(sim, (struct sim_behaviour){.cached = SIM_CACHED_ALL});
    for (size_t k = 0; k < sizeof(errors) / sizeof(errors[0]); k++) {
        uint64_t nth = 0;

        for (; try_fault(SIM_READ_CACHED, nth, errors[k], &rc, &why); nth++)
            ck_assert_msg(rc == 0, "%d: %s", errors[k], why.text);
        ck_assert_uint_gt(nth, 20);
    }
}
END_TEST

START_TEST(completions_come_late_twice_or_unasked)
{
    struct kv_file_info info;
    struct kv_why why = {""};

    use_geometry(3);
    for (unsigned how = 0; how < 48; how++) {
        sim_disk_behave(sim, (struct sim_behaviour){.any_order = how & 1,
                                                    .duplicates = how & 2,
                                                    .shorten = how & 4,
                                                    .interrupt = how & 8,
                                                    .cached = (enum sim_cached)(how / 16)});
        ck_assert_msg(write_file("a", 0, N, 7, true, &info, &why) == 0, "%s", why.text);
        ck_assert_msg(check_file("a", &why) == 0, "%s", why.text);
        sim_disk_remove(sim, "a");
    }
}
END_TEST

START_TEST(what_cannot_be_written_is_refused)
{
    const struct iovec short_rows = {logits, sizeof(logits)};
    struct kv_snapshot_header h;
    struct kv_file_writer *w;
    struct kv_file_info info;
    struct kv_file_frame *frames;
    struct kv_queue *small;
    struct kv_file *file;
    struct kv_why why = {""};
    unsigned char *rows;

    use_geometry(0);
    h = header_of(0, N);
    rows = make_rows(&geometry, &ns, ids, 0, N);
    const struct iovec one = {rows, kv_position_bytes(&geometry)};

    ck_assert_int_eq(kv_file_create(queue, "a", 100, &h, &w, &why), 0);
    ck_assert_int_eq(kv_file_write_rows(w, ids, 1, &short_rows, 1, &why), KV_ERR_INVALID);
    kv_file_discard(w);
    ck_assert_int_eq(kv_file_create(queue, "b", 100, &h, &w, &why), 0);
    ck_assert_int_eq(kv_file_write_rows(w, ids, 1, &one, 1, &why), 0);
    ck_assert_int_eq(kv_file_write_section(w, KV_SECTION_SESSION, "x", 1, &why), 0);
    ck_assert_int_eq(kv_file_write_rows(w, ids + 1, 1, &one, 1, &why), KV_ERR_ORDER);
    ck_assert_int_eq(kv_file_finish(w, true, &info, &frames, &why), KV_ERR_ORDER);
    ck_assert_int_eq(kv_file_create(queue, "a", 100, &h, &w, &why), KV_ERR_IO); /* exists */
    ck_assert_int_eq(disk->ops->queue_open(disk, 2, 4096, &small), 0);
    ck_assert_int_eq(kv_file_create(small, "c", 100, &h, &w, &why), KV_ERR_INVALID);
    ck_assert_int_eq(kv_file_open(small, "a", &file, &why), KV_ERR_INVALID);
    disk->ops->queue_close(small);
    sim_disk_behave(sim, (struct sim_behaviour){.capacity_bytes = 1000});
    ck_assert_int_eq(kv_file_create(queue, "d", 4096, &h, &w, &why), KV_ERR_FULL);
    free(rows);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("kv_file");
    TCase *tc = tcase_create("file");
    SRunner *sr = srunner_create(s);
    int failed;

    tcase_set_timeout(tc, 120);
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_loop_test(tc, what_is_written_comes_back, 0, 4);
    tcase_add_loop_test(tc, a_context_and_its_rows_make_the_same_file, 0, 4);
    tcase_add_loop_test(tc, any_range_is_read, 0, 4);
    tcase_add_loop_test(tc, positions_of_many_MiB_are_written_and_read, 0, 2);
    tcase_add_loop_test(tc, every_flip_is_refused, 0, 6);
    tcase_add_loop_test(tc, every_truncation_is_refused, 0, 6);
    tcase_add_test(tc, frames_of_other_files_and_places_are_refused);
    tcase_add_test(tc, lying_lengths_are_refused);
    tcase_add_test(tc, a_lying_index_with_every_check_right_is_refused);
    tcase_add_test(tc, records_that_lie_with_every_check_right_are_refused);
    tcase_add_test(tc, any_operation_may_fail);
    tcase_add_test(tc, no_space_is_said_as_such);
    tcase_add_test(tc, interruptions_and_short_operations_do_not_matter);
    tcase_add_test(tc, the_page_cache_may_fail_at_any_read);
    tcase_add_test(tc, completions_come_late_twice_or_unasked);
    tcase_add_test(tc, what_cannot_be_written_is_refused);
    suite_add_tcase(s, tc);
    srunner_run_all(sr, CK_ENV);
    failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return failed != 0;
}

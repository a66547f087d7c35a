/* Bytes from outside, to whatever reads snapshots: the wire's decoder and the file reader.
 *
 *   byte 0          even: a file; odd: records of the wire
 *   byte 1          which checks to make right first, else nothing would get past them
 *   then            the file's bytes; or records, each behind 4 bytes that say how long it is
 *
 * What is read must be harmless whatever it is, what is refused must have a reason, and what is
 * taken must have been whole.  Built for libFuzzer by scripts/prove-fuzz; test_fuzz_snapshot runs
 * the corpus through the same function. */
#include "kvcore/kv_file.h"
#include "kvcore/kv_record.h"

#include <errno.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { REPAIR_FOOTER = 1, REPAIR_HEADER = 2, REPAIR_INDEX = 4, REPAIR_RECORDS = 8 };

static void check(bool holds)
{
    if (!holds)
        abort();
}

/* ---- A disk that is one file in memory ---- */

struct memory_disk {
    struct kv_disk base;
    unsigned char *bytes;
    size_t len;
};

static int memory_stat(struct kv_disk *disk, const char *name, struct kv_disk_stat *out)
{
    (void)name;
    *out = (struct kv_disk_stat){.bytes = ((struct memory_disk *)disk)->len};
    return 0;
}

static int memory_open(struct kv_disk *disk, const char *name, enum kv_disk_open how)
{
    (void)disk, (void)name, (void)how;
    return 0;
}

static void memory_close_file(struct kv_disk *disk, int file)
{
    (void)disk, (void)file;
}

static int64_t memory_read_cached(struct kv_disk *disk, int file, void *dst, size_t len,
                                  uint64_t offset)
{
    const struct memory_disk *d = (const struct memory_disk *)disk;

    (void)file;
    check(offset <= d->len && len <= d->len - offset); /* nothing is read past the end */
    memcpy(dst, d->bytes + offset, len);
    return (int64_t)len;
}

static int memory_submit(struct kv_queue *queue, const struct kv_io_op *op)
{
    (void)queue, (void)op;
    return -EIO;
}

static int memory_wait(struct kv_queue *queue, struct kv_io_done *out)
{
    (void)queue, (void)out;
    return -ENOENT;
}

static const struct kv_disk_ops memory_ops = {
    .stat = memory_stat,
    .open = memory_open,
    .close_file = memory_close_file,
    .read_cached = memory_read_cached,
    .submit = memory_submit,
    .wait = memory_wait,
};

/* ---- Files ---- */

static void repair_crc(unsigned char *record, size_t len, uint32_t seed)
{
    if (len > KV_RECORD_BODY)
        kv_put_u32(record, KV_RECORD_CRC,
                   kv_crc32c(seed, record + KV_RECORD_BODY, len - KV_RECORD_BODY));
}

/* The frames that the index names, and what it and the root say of them; then the sections. */
static void repair_records(unsigned char *bytes, size_t len, const struct kv_snapshot_header *h)
{
    unsigned char *footer = bytes + len - KV_FILE_BLOCK;
    const uint32_t n = kv_get_u32(footer, KV_FOOTER_POSITIONS);
    const uint64_t index = kv_get_u64(footer, KV_FOOTER_INDEX_OFFSET);
    const uint64_t index_bytes = kv_get_u64(footer, KV_FOOTER_INDEX_BYTES);
    const uint64_t position = sizeof(uint32_t) + kv_position_bytes(&h->geometry);
    struct kv_digest digest;
    struct kv_prefix prefix;
    struct kv_hash root;

    check(kv_prefix_init(&prefix, &h->ns, h->frame_positions) == 0);
    kv_prefix_feed(&prefix, h->base_ids, h->base);
    kv_hash_init(&root);
    kv_hash_add_u32(&root, kv_get_u32(bytes, KV_RECORD_CRC));
    for (uint64_t at = KV_INDEX_FRAMES; at + KV_INDEX_STRIDE <= index_bytes;
         at += KV_INDEX_STRIDE) {
        unsigned char *line = bytes + index + at;
        const uint64_t offset = kv_get_u64(line, KV_INDEX_OFFSET);
        const uint32_t first = kv_get_u32(line, KV_INDEX_FIRST);
        const uint32_t frame = kv_get_u32(line, KV_INDEX_LENGTH);
        const uint64_t size = KV_FRAME_IDS + frame * position;

        if (frame > h->frame_positions || size > len || offset > len - size)
            break;
        for (uint32_t i = 0; i < frame; i++) {
            const uint32_t id = kv_get_u32(bytes + offset, KV_FRAME_IDS + i * sizeof(id));

            kv_prefix_feed(&prefix, &id, 1);
        }
        kv_prefix_digest(&prefix, &digest);
        memcpy(bytes + offset + KV_FRAME_DIGEST, digest.bytes, sizeof(digest.bytes));
        memcpy(line + KV_INDEX_DIGEST, digest.bytes, sizeof(digest.bytes));
        repair_crc(bytes + offset, size, kv_record_seed(h->snapshot_id, first));
        kv_put_u32(line, KV_INDEX_CRC, kv_get_u32(bytes + offset, KV_RECORD_CRC));
        kv_root_add_frame(&root, first, frame, &digest, kv_get_u32(line, KV_INDEX_CRC));
    }
    for (uint32_t i = 0; i < KV_MAX_SECTIONS && i < kv_get_u32(footer, KV_FOOTER_N_SECTIONS); i++) {
        unsigned char *line = footer + KV_FOOTER_SECTIONS + (size_t)i * KV_FOOTER_STRIDE;
        const uint64_t offset = kv_get_u64(line, KV_FOOTER_OFFSET);
        const uint32_t data = kv_get_u32(line, KV_FOOTER_LENGTH);
        const uint64_t size = KV_SECTION_DATA + (uint64_t)data;

        if (size > len || offset > len - size)
            break;
        repair_crc(bytes + offset, size, kv_record_seed(h->snapshot_id, n));
        kv_put_u32(line, KV_FOOTER_CRC, kv_get_u32(bytes + offset, KV_RECORD_CRC));
        kv_root_add_section(&root, kv_get_u32(line, KV_FOOTER_KIND), data,
                            kv_get_u32(line, KV_FOOTER_CRC));
    }
    kv_hash_end(&root, &digest);
    memcpy(footer + KV_FOOTER_ROOT, digest.bytes, sizeof(digest.bytes));
    kv_prefix_release(&prefix);
}

static void repair_file(unsigned char *bytes, size_t len, unsigned repair)
{
    unsigned char *footer = bytes + len - KV_FILE_BLOCK;
    const uint32_t n = kv_get_u32(footer, KV_FOOTER_POSITIONS);
    const uint64_t header = kv_get_u32(footer, KV_FOOTER_HEADER_BYTES);
    const uint64_t index = kv_get_u64(footer, KV_FOOTER_INDEX_OFFSET);
    const uint64_t index_bytes = kv_get_u64(footer, KV_FOOTER_INDEX_BYTES);
    const bool has_index = index <= len && index_bytes <= len - index;
    struct kv_snapshot_header h;

    if (repair & REPAIR_HEADER && header <= len)
        repair_crc(bytes, header, 0);
    if (repair & REPAIR_RECORDS && has_index && header <= len &&
        kv_header_parse(bytes, header, &h, NULL) == 0)
        repair_records(bytes, len, &h);
    if (repair & REPAIR_INDEX && has_index)
        repair_crc(bytes + index, index_bytes, kv_record_seed(bytes + KV_HEADER_SNAPSHOT_ID, n));
    if (repair & REPAIR_FOOTER)
        repair_crc(footer, KV_FILE_BLOCK, 0);
}

static int count(void *arg, uint32_t first, uint32_t n, const uint32_t *ids,
                 const struct iovec *rows, size_t n_rows, struct kv_why *why)
{
    uint32_t *next = arg;
    uint64_t sum = 0;

    (void)why;
    check(first == *next && n > 0);
    for (uint32_t i = 0; i < n; i++)
        sum += ids[i];
    for (size_t i = 0; i < n_rows; i++)
        for (size_t k = 0; k < rows[i].iov_len; k++)
            sum += ((const unsigned char *)rows[i].iov_base)[k];
    *next = first + n + (sum == UINT64_MAX);
    return 0;
}

static void read_file(unsigned char *bytes, size_t len)
{
    static unsigned char *buffers[2];
    struct memory_disk disk = {.base = {&memory_ops}, .bytes = bytes, .len = len};
    struct kv_queue queue = {
        .disk = &disk.base, .buffers = buffers, .n_buffers = 2, .buffer_bytes = 2 * 1024 * 1024};
    struct kv_why why = {""};
    struct kv_file *file;

    for (int i = 0; i < 2; i++)
        if (buffers[i] == NULL)
            check((buffers[i] = aligned_alloc(KV_IO_ALIGN, queue.buffer_bytes)) != NULL);
    if (kv_file_open(&queue, "f", &file, &why) < 0) {
        check(why.text[0] != '\0');
        return;
    }
    const struct kv_file_info *info = kv_file_info(file);
    uint32_t next = info->header.base;
    int rc = kv_file_read(file, &queue, info->header.base, info->n_positions, count, &next, &why);

    check(rc < 0 || next == info->n_positions);
    if (info->n_frames > 0 && info->n_positions > info->header.base) {
        uint32_t *ids = malloc(info->frames[0].count * sizeof(*ids));

        check(ids != NULL);
        (void)kv_file_frame_ids(file, &queue, 0, ids, &why);
        next = info->n_positions - 1;
        (void)kv_file_read(file, &queue, next, info->n_positions, count, &next, &why);
        free(ids);
    }
    rc = kv_file_verify(file, &queue, &why);
    check(rc == 0 || why.text[0] != '\0');
    kv_file_close(file);
}

/* ---- The wire ---- */

/* Seeds as they would be for the record at this place. */
static void repair_record(const struct kv_decoder *d, unsigned char *record, size_t len)
{
    const struct kv_snapshot_header *h = kv_decoder_snapshot(d);

    if (len < KV_FRAME_COUNT)
        return;
    if (memcmp(record, KV_MAGIC_HEADER, 4) == 0)
        repair_crc(record, len, 0);
    else if (h != NULL)
        repair_crc(record, len, kv_record_seed(h->snapshot_id, kv_decoder_next(d)));
}

static void take_record(struct kv_decoder *d, const struct iovec *pieces, size_t n_pieces,
                        const unsigned char *record)
{
    const uint32_t before = kv_decoder_next(d);
    struct kv_why why = {""};
    enum kv_section kind;
    struct kv_frame frame;
    struct kv_seal seal;
    const void *data;
    size_t len;
    int rc;

    switch (record[3]) {
    case 'H':
        rc = kv_decoder_header(d, pieces, n_pieces, &why);
        break;
    case 'F':
        rc = kv_decoder_frame(d, pieces, n_pieces, &frame, &why);
        check(rc < 0 || (frame.first == before && kv_decoder_next(d) == before + frame.count));
        break;
    case 'S':
        rc = kv_decoder_section(d, pieces, n_pieces, &kind, &data, &len, &why);
        break;
    default:
        rc = kv_decoder_seal(d, pieces, n_pieces, &seal, &why);
        check(rc < 0 || seal.n_positions == kv_decoder_next(d));
        break;
    }
    check(rc == 0 || why.text[0] != '\0');
    check(rc == 0 || kv_decoder_next(d) == before);
}

static void read_wire(unsigned char *bytes, size_t len, unsigned repair)
{
    struct kv_snapshot_header expect = {.geometry = {2, 2, 32, KV_F16}, .n_bound = 4096};
    struct kv_decoder *d;

    /* Who it is from is not what is tried here. */
    if (len >= 4 + KV_HEADER_IDS && memcmp(bytes + 4, KV_MAGIC_HEADER, 4) == 0) {
        struct kv_snapshot_header h;

        if (repair & REPAIR_HEADER && kv_get_u32(bytes, 0) <= len - 4)
            repair_crc(bytes + 4, kv_get_u32(bytes, 0), 0);
        if (kv_get_u32(bytes, 0) <= len - 4 &&
            kv_header_parse(bytes + 4, kv_get_u32(bytes, 0), &h, NULL) == 0) {
            expect = h;
            expect.base_ids = NULL;
        }
    }
    if (kv_decoder_open(&expect, &d) < 0)
        return;
    while (len >= 4 + KV_RECORD_BODY) {
        size_t n = kv_get_u32(bytes, 0);
        struct iovec pieces[2];

        bytes += 4;
        len -= 4;
        if (n > len)
            n = len;
        if (n < KV_RECORD_BODY)
            break;
        if (repair & REPAIR_RECORDS)
            repair_record(d, bytes, n);
        /* In two pieces, as slices come. */
        pieces[0] = (struct iovec){bytes, n / 3};
        pieces[1] = (struct iovec){bytes + n / 3, n - n / 3};
        take_record(d, pieces, 2, bytes);
        bytes += n;
        len -= n;
    }
    kv_decoder_close(d);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    unsigned char *copy;
    unsigned repair;

    if (size < 2)
        return 0;
    copy = malloc(size);
    check(copy != NULL);
    repair = data[1];
    memcpy(copy, data + 2, size - 2);
    if (data[0] % 2 == 1)
        read_wire(copy, size - 2, repair);
    else if (size - 2 >= 3 * KV_FILE_BLOCK) {
        repair_file(copy, size - 2, repair);
        read_file(copy, size - 2);
    }
    free(copy);
    return 0;
}

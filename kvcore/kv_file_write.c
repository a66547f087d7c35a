/* Writes a snapshot file front to back.  Records are put together in the queue's buffers: one is
 * filled while the others are under way, and leaves as one write of whole blocks; the block that is
 * not full yet is carried over to the next. */
#include "kvcore/kv_file.h"
#include "kvcore/kv_pieces.h"
#include "kvcore/kv_record.h"
#include "kvcore/kv_transfer.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

enum { NAME_BYTES = 64 };

struct kv_file_writer {
    struct kv_queue *queue;
    char name[NAME_BYTES];
    int file;
    struct kv_encoder *encoder;
    struct kv_file_info info;
    struct kv_file_frame *frames; /* [info.n_frames], room for cap */
    uint32_t cap;

    uint32_t buffer; /* being filled */
    uint32_t used;   /* of it */
    uint64_t begin;  /* where in the file it begins, a multiple of a block */

    struct kv_transfers writes;

    uint32_t *ids;       /* [F], of the frame that is not full yet: n_held of them */
    unsigned char *rows; /* [F][position] */
    uint32_t n_held;
    bool partial; /* a frame ended before a border: it was the last */

    int failed; /* the first error; nothing is submitted after it */
    struct kv_why why;
};

/* ---- Writes ---- */

static int latch(struct kv_file_writer *w, int rc)
{
    if (w->failed == 0)
        w->failed = rc;
    return w->failed;
}

static int latch_error(struct kv_file_writer *w, int error, const char *doing)
{
    if (w->failed != 0)
        return w->failed;
    return latch(w, kv_io_error(&w->why, error, doing, w->name));
}

/* Send the whole blocks of the buffer, and go on in the next one, which begins with the rest. */
static int turn(struct kv_file_writer *w)
{
    const uint32_t next = (w->buffer + 1) % w->queue->n_buffers;
    const uint32_t whole = w->used / KV_IO_ALIGN * KV_IO_ALIGN, rest = w->used - whole;

    if (kv_transfers_wait(&w->writes, next) < 0)
        latch_error(w, w->writes.error, "write");
    if (w->failed != 0)
        return w->failed;
    memcpy(w->queue->buffers[next], w->queue->buffers[w->buffer] + whole, rest);
    if (whole > 0)
        kv_transfers_begin(&w->writes, w->buffer, w->begin, whole);
    w->begin += whole;
    w->buffer = next;
    w->used = rest;
    return w->failed;
}

/* ---- Bytes ---- */

static uint64_t end_of(const struct kv_file_writer *w)
{
    return w->begin + w->used;
}

static int put_bytes(struct kv_file_writer *w, const void *data, size_t len)
{
    const unsigned char *from = data;

    while (len > 0) {
        size_t n = w->queue->buffer_bytes - w->used;

        if (n == 0 && turn(w) < 0)
            return w->failed;
        if (n > len)
            n = len;
        memcpy(w->queue->buffers[w->buffer] + w->used, from, n);
        w->used += (uint32_t)n;
        from += n;
        len -= n;
    }
    return w->failed;
}

/* Zeros up to an offset of the file that is less than a block and a bit away. */
static int put_zeros(struct kv_file_writer *w, uint64_t to)
{
    static const unsigned char zeros[KV_FILE_BLOCK];

    return put_bytes(w, zeros, to - end_of(w));
}

/* ---- Life ---- */

static void release(struct kv_file_writer *w)
{
    kv_transfers_close(&w->writes);
    if (w->file >= 0)
        w->queue->disk->ops->close_file(w->queue->disk, w->file);
    kv_encoder_close(w->encoder);
    free(w->frames);
    free(w->ids);
    free(w->rows);
    free(w);
}

void kv_file_discard(struct kv_file_writer *w)
{
    if (w != NULL)
        release(w);
}

static int fail(struct kv_file_writer *w, int rc, struct kv_why *why)
{
    if (why != NULL && rc < 0 && w->failed == rc)
        *why = w->why;
    return rc;
}

static int write_header(struct kv_file_writer *w)
{
    const size_t len = kv_encoder_header_bytes(w->encoder);
    unsigned char *record = malloc(len);
    int rc;

    if (record == NULL)
        return latch(w, kv_fail(&w->why, KV_ERR_NOMEM, "no memory for a header of %zu bytes", len));
    kv_encoder_header(w->encoder, record);
    w->info.header_crc = kv_get_u32(record, KV_RECORD_CRC);
    memcpy(w->info.header.base_digest.bytes, record + KV_HEADER_BASE_DIGEST, KV_DIGEST_BYTES);
    rc = put_bytes(w, record, len);
    free(record);
    return rc;
}

static int create(struct kv_file_writer *w, uint64_t bytes)
{
    const struct kv_disk_ops *ops = w->queue->disk->ops;
    int rc = ops->open(w->queue->disk, w->name, KV_DISK_CREATE);

    if (rc == -ENOENT)
        return latch(w, kv_fail(&w->why, KV_ERR_IO, "create %s: the directory is gone", w->name));
    if (rc < 0)
        return latch_error(w, rc, "create");
    w->file = rc;
    if (kv_transfers_open(&w->writes, w->queue, KV_IO_WRITE, w->file) < 0)
        return latch(w, kv_fail(&w->why, KV_ERR_NOMEM, "no memory to write %s", w->name));
    rc = ops->allocate(w->queue->disk, w->file, bytes);
    if (rc < 0)
        return latch_error(w, rc, "allocate");
    return write_header(w);
}

int kv_file_create(struct kv_queue *queue, const char *name, uint64_t bytes,
                   const struct kv_snapshot_header *header, struct kv_file_writer **out,
                   struct kv_why *why)
{
    struct kv_file_writer *w;
    struct kv_encoder *encoder;
    int rc = kv_encoder_open(header, &encoder, why);

    if (rc < 0)
        return rc;
    rc = kv_file_check_queue(queue, kv_file_frame_room(&header->geometry), why);
    if (rc < 0) {
        kv_encoder_close(encoder);
        return rc;
    }
    w = calloc(1, sizeof(*w));
    if (w == NULL) {
        kv_encoder_close(encoder);
        return kv_fail(why, KV_ERR_NOMEM, "no memory to write %s", name);
    }
    w->queue = queue;
    w->file = -1;
    w->encoder = encoder;
    w->info.header = *header;
    snprintf(w->name, sizeof(w->name), "%s", name);
    rc = create(w, bytes);
    if (rc < 0) {
        fail(w, rc, why);
        release(w);
        return rc;
    }
    *out = w;
    return 0;
}

/* ---- Frames ---- */

/* Room for a frame record in one piece, its place in the file, and its line of the index. */
static int begin_frame(struct kv_file_writer *w, uint32_t count, unsigned char **record)
{
    const size_t before = KV_FRAME_IDS + count * sizeof(uint32_t);
    const uint64_t place = kv_record_place(end_of(w), before);
    const size_t len = kv_encoder_frame_bytes(w->encoder, count);

    if (w->info.n_frames == w->cap) {
        const uint32_t cap = w->cap > 0 ? 2 * w->cap : 16;
        struct kv_file_frame *grown = realloc(w->frames, cap * sizeof(*grown));

        if (grown == NULL)
            return latch(w, kv_fail(&w->why, KV_ERR_NOMEM, "no memory for %u frames", cap));
        w->frames = grown;
        w->cap = cap;
    }
    if (place + len - w->begin > w->queue->buffer_bytes && turn(w) < 0)
        return w->failed;
    if (put_zeros(w, place) < 0)
        return w->failed;
    w->frames[w->info.n_frames] = (struct kv_file_frame){
        .offset = place, .first = kv_encoder_next(w->encoder), .count = count};
    *record = w->queue->buffers[w->buffer] + w->used;
    return 0;
}

static int end_frame(struct kv_file_writer *w, int rc, const unsigned char *record)
{
    struct kv_file_frame *f = &w->frames[w->info.n_frames];

    if (rc < 0)
        return latch(w, kv_fail(&w->why, rc, "positions from %u cannot be written: %s", f->first,
                                kv_strerror(rc)));
    f->crc = kv_get_u32(record, KV_RECORD_CRC);
    memcpy(f->digest.bytes, record + KV_FRAME_DIGEST, sizeof(f->digest.bytes));
    w->used += (uint32_t)kv_encoder_frame_bytes(w->encoder, f->count);
    w->info.n_frames++;
    w->partial = (f->first + f->count) % w->info.header.frame_positions != 0;
    return 0;
}

static int check_order(struct kv_file_writer *w)
{
    if (w->failed == 0 && w->partial)
        latch(w, kv_fail(&w->why, KV_ERR_ORDER, "positions after %u, where a frame ended early",
                         kv_encoder_next(w->encoder)));
    return w->failed;
}

int kv_file_write_context(struct kv_file_writer *w, const struct kv_context *ctx, uint32_t end,
                          struct kv_why *why)
{
    uint32_t count;

    while (w->failed == 0 && w->n_held == 0 &&
           (count = kv_encoder_frame_count(w->encoder, end, true)) > 0) {
        unsigned char *record;

        if (check_order(w) == 0 && begin_frame(w, count, &record) == 0)
            end_frame(w, kv_encoder_frame(w->encoder, ctx, count, record), record);
    }
    if (w->failed == 0 && w->n_held > 0)
        latch(w, kv_fail(&w->why, KV_ERR_ORDER, "%u positions wait for the rest of their frame",
                         w->n_held));
    return fail(w, w->failed, why);
}

/* The frame of what is held. */
static int write_held(struct kv_file_writer *w)
{
    const struct iovec rows = {w->rows, w->n_held * kv_position_bytes(&w->info.header.geometry)};
    unsigned char *record;

    if (w->n_held == 0 || w->failed != 0)
        return w->failed;
    if (begin_frame(w, w->n_held, &record) == 0 &&
        end_frame(w, kv_encoder_frame_rows(w->encoder, w->ids, &rows, 1, w->n_held, record),
                  record) == 0)
        w->n_held = 0;
    return w->failed;
}

static int allocate_held(struct kv_file_writer *w)
{
    const struct kv_snapshot_header *h = &w->info.header;

    if (w->rows != NULL)
        return 0;
    w->ids = malloc(h->frame_positions * sizeof(*w->ids));
    w->rows = malloc(h->frame_positions * kv_position_bytes(&h->geometry));
    if (w->ids == NULL || w->rows == NULL)
        return latch(w, kv_fail(&w->why, KV_ERR_NOMEM, "no memory for a frame"));
    return 0;
}

int kv_file_write_rows(struct kv_file_writer *w, const uint32_t *ids, uint32_t count,
                       const struct iovec *rows, size_t n_rows, struct kv_why *why)
{
    const uint32_t f = w->info.header.frame_positions;
    const size_t position = kv_position_bytes(&w->info.header.geometry);
    struct kv_reader from = {.src = rows, .n_src = n_rows};

    if (check_order(w) == 0 && kv_pieces_bytes(rows, n_rows) < count * position)
        latch(w, kv_fail(&w->why, KV_ERR_INVALID, "rows end early"));
    if (w->failed == 0)
        allocate_held(w);
    while (count > 0 && w->failed == 0) {
        const uint32_t next = kv_encoder_next(w->encoder) + w->n_held, room = f - next % f;
        const uint32_t n = count < room ? count : room;

        kv_reader_read(&from, w->rows + w->n_held * position, n * position);
        memcpy(w->ids + w->n_held, ids, n * sizeof(*ids));
        w->n_held += n;
        ids += n;
        count -= n;
        if (n == room)
            write_held(w);
    }
    return fail(w, w->failed, why);
}

/* ---- What comes after ---- */

int kv_file_write_section(struct kv_file_writer *w, enum kv_section kind, const void *data,
                          size_t len, struct kv_why *why)
{
    const size_t bytes = kv_encoder_section_bytes(len);
    const struct kv_file_section section = {.kind = kind, .len = (uint32_t)len};
    unsigned char *record;
    int rc = write_held(w);

    if (rc == 0)
        rc = latch(w, kv_section_check(kind, len, &w->why));
    if (rc < 0)
        return fail(w, rc, why);
    record = malloc(bytes);
    if (record == NULL)
        return fail(w, latch(w, kv_fail(&w->why, KV_ERR_NOMEM, "no memory for a section")), why);
    rc = kv_encoder_section(w->encoder, kind, data, len, record);
    if (rc < 0) {
        latch(w, kv_fail(&w->why, rc, "section %u: %s", (unsigned)kind, kv_strerror(rc)));
    } else if (put_zeros(w, kv_record_place(end_of(w), KV_SECTION_DATA)) == 0) {
        struct kv_file_section *s = &w->info.sections[w->info.n_sections++];

        *s = section;
        s->offset = end_of(w);
        s->crc = kv_get_u32(record, KV_RECORD_CRC);
        put_bytes(w, record, bytes);
    }
    free(record);
    return fail(w, w->failed, why);
}

static int write_index(struct kv_file_writer *w, uint64_t *offset, uint64_t *bytes)
{
    const size_t len = KV_INDEX_FRAMES + (size_t)w->info.n_frames * KV_INDEX_STRIDE;
    unsigned char *record = calloc(1, len);

    if (record == NULL)
        return latch(w, kv_fail(&w->why, KV_ERR_NOMEM, "no memory for an index"));
    memcpy(record, KV_MAGIC_INDEX, 4);
    kv_put_u32(record, KV_INDEX_COUNT, w->info.n_frames);
    for (uint32_t i = 0; i < w->info.n_frames; i++) {
        const struct kv_file_frame *f = &w->frames[i];
        unsigned char *line = record + KV_INDEX_FRAMES + (size_t)i * KV_INDEX_STRIDE;

        kv_put_u64(line, KV_INDEX_OFFSET, f->offset);
        kv_put_u32(line, KV_INDEX_FIRST, f->first);
        kv_put_u32(line, KV_INDEX_LENGTH, f->count);
        kv_put_u32(line, KV_INDEX_CRC, f->crc);
        memcpy(line + KV_INDEX_DIGEST, f->digest.bytes, sizeof(f->digest.bytes));
    }
    kv_put_u32(record, KV_RECORD_CRC,
               kv_crc32c(kv_record_seed(w->info.header.snapshot_id, w->info.n_positions),
                         record + KV_RECORD_BODY, len - KV_RECORD_BODY));
    put_zeros(w, kv_record_place(end_of(w), 0));
    *offset = end_of(w);
    *bytes = len;
    put_bytes(w, record, len);
    put_zeros(w, kv_record_place(end_of(w), 0));
    free(record);
    return w->failed;
}

static int write_footer(struct kv_file_writer *w, uint64_t index_offset, uint64_t index_bytes)
{
    struct kv_file_info *info = &w->info;
    unsigned char footer[KV_FILE_BLOCK] = {0};

    info->bytes = end_of(w) + KV_FILE_BLOCK;
    memcpy(footer, KV_MAGIC_FOOTER, 4);
    kv_put_u32(footer, KV_FOOTER_POSITIONS, info->n_positions);
    kv_put_u32(footer, KV_FOOTER_N_FRAMES, info->n_frames);
    kv_put_u32(footer, KV_FOOTER_N_SECTIONS, info->n_sections);
    kv_put_u32(footer, KV_FOOTER_HEADER_BYTES, (uint32_t)kv_encoder_header_bytes(w->encoder));
    memcpy(footer + KV_FOOTER_ROOT, info->root.bytes, sizeof(info->root.bytes));
    memcpy(footer + KV_FOOTER_SNAPSHOT_ID, info->header.snapshot_id, KV_SNAPSHOT_ID_BYTES);
    kv_put_u64(footer, KV_FOOTER_INDEX_OFFSET, index_offset);
    kv_put_u64(footer, KV_FOOTER_INDEX_BYTES, index_bytes);
    kv_put_u64(footer, KV_FOOTER_FILE_BYTES, info->bytes);
    for (uint32_t i = 0; i < info->n_sections; i++) {
        unsigned char *line = footer + KV_FOOTER_SECTIONS + (size_t)i * KV_FOOTER_STRIDE;

        kv_put_u64(line, KV_FOOTER_OFFSET, info->sections[i].offset);
        kv_put_u32(line, KV_FOOTER_KIND, info->sections[i].kind);
        kv_put_u32(line, KV_FOOTER_LENGTH, info->sections[i].len);
        kv_put_u32(line, KV_FOOTER_CRC, info->sections[i].crc);
    }
    kv_put_u32(footer, KV_RECORD_CRC,
               kv_crc32c(0, footer + KV_RECORD_BODY, sizeof(footer) - KV_RECORD_BODY));
    return put_bytes(w, footer, sizeof(footer));
}

/* Send what is left, and wait for all. */
static int drain(struct kv_file_writer *w)
{
    if (w->failed == 0 && w->used > 0)
        turn(w);
    if (kv_transfers_drain(&w->writes) < 0)
        latch_error(w, w->writes.error, "write");
    return w->failed;
}

int kv_file_finish(struct kv_file_writer *w, bool sync, struct kv_file_info *info,
                   struct kv_file_frame **frames, struct kv_why *why)
{
    unsigned char seal_record[KV_SEAL_BYTES];
    struct kv_seal seal;
    uint64_t offset = 0, bytes = 0;
    int rc = write_held(w);

    if (rc == 0) {
        kv_encoder_seal(w->encoder, seal_record, &seal);
        w->info.n_positions = seal.n_positions;
        w->info.root = seal.root;
        rc = write_index(w, &offset, &bytes);
    }
    if (rc == 0)
        rc = write_footer(w, offset, bytes);
    if (rc == 0)
        rc = drain(w);
    if (rc == 0 && sync) {
        rc = w->queue->disk->ops->sync(w->queue->disk, w->file);
        if (rc < 0)
            rc = latch_error(w, rc, "sync");
    }
    if (rc == 0) {
        *info = w->info;
        info->header.base_ids = NULL;
        info->frames = *frames = w->frames;
        w->frames = NULL;
    }
    fail(w, rc, why);
    release(w);
    return rc;
}

/* Reads a snapshot file: the footer first, then the header and the index, and with the root checked
 * over all of that, frames and sections.
 *
 * A file has one valid form: where each record stands follows from the base, the number of
 * positions and the sections' lengths, and every byte between them is zero.  All of that is
 * checked. */
#include "kvcore/kv_file.h"
#include "kvcore/kv_pieces.h"
#include "kvcore/kv_record.h"
#include "kvcore/kv_transfer.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

enum {
    NAME_BYTES = 256,
    MAX_PIECES = 2 * KV_IO_DEPTH + 2, /* that a frame's record lies in */
    TAIL_BYTES = 64 * 1024,           /* read in one go when a file is opened */
};

struct kv_file {
    struct kv_disk *disk;
    int number;
    char name[NAME_BYTES];
    struct kv_file_info info;
    unsigned char *header; /* [header_bytes], info.header.base_ids point into it */
    size_t header_bytes;
    struct kv_file_frame *frames; /* [info.n_frames] */
    uint64_t index_offset;
    /* While it is opened: the file's first block and its last bytes, read at once, since what is
     * looked at stands there, and a disk takes as long for a block as for several; NULL: none. */
    unsigned char *tail;
    uint64_t tail_begin;
    size_t tail_bytes;
    unsigned char head[KV_FILE_BLOCK];
    size_t head_bytes;
};

/* ---- A run of the file, read ahead in the queue's buffers ---- */

/* Chunk i is [begin + i * buffer_bytes, ...) of the file and stands in buffer i % n_buffers. */
struct stream {
    struct kv_queue *queue;
    struct kv_file *file;
    uint64_t begin; /* a multiple of a block, as is end */
    uint64_t end;
    uint64_t next_chunk; /* to be read */
    struct kv_transfers reads;
};

static int stream_open(struct stream *s, struct kv_file *file, struct kv_queue *queue,
                       uint64_t begin, uint64_t end)
{
    *s = (struct stream){.queue = queue,
                         .file = file,
                         .begin = begin / KV_FILE_BLOCK * KV_FILE_BLOCK,
                         .end = kv_record_place(end, 0)};
    return kv_transfers_open(&s->reads, queue, KV_IO_READ, file->number);
}

static void stream_close(struct stream *s)
{
    kv_transfers_close(&s->reads);
}

static uint64_t chunk_begin(const struct stream *s, uint64_t chunk)
{
    return s->begin + chunk * s->queue->buffer_bytes;
}

/* Begin to read into a buffer: from the page cache if all of it is there, else from the disk. */
static void begin_read(struct stream *s, uint32_t buffer, uint64_t begin, uint32_t want)
{
    const struct kv_disk_ops *ops = s->queue->disk->ops;

    if (ops->read_cached(s->queue->disk, s->file->number, s->queue->buffers[buffer], want, begin) !=
        (int64_t)want)
        kv_transfers_begin(&s->reads, buffer, begin, want);
}

static void read_chunk(struct stream *s)
{
    const uint64_t begin = chunk_begin(s, s->next_chunk), left = s->end - begin;
    const uint32_t bytes = s->queue->buffer_bytes;

    begin_read(s, (uint32_t)(s->next_chunk % s->queue->n_buffers), begin,
               left < bytes ? (uint32_t)left : bytes);
    s->next_chunk++;
}

/* Have [from, to) of the file in the buffers, and say in which pieces.  What lies before `from` is
 * given up.  KV_ERR_IO and the like. */
static int stream_get(struct stream *s, uint64_t from, uint64_t to, struct iovec *pieces,
                      size_t *n_pieces, struct kv_why *why)
{
    const uint64_t bytes = s->queue->buffer_bytes;
    const uint64_t first_chunk = (from - s->begin) / bytes,
                   last_chunk = (to - 1 - s->begin) / bytes;

    *n_pieces = 0;
    while (s->reads.error == 0 && s->next_chunk < first_chunk + s->queue->n_buffers &&
           chunk_begin(s, s->next_chunk) < s->end)
        read_chunk(s);
    for (uint64_t c = first_chunk; c <= last_chunk; c++) {
        const uint64_t begin = chunk_begin(s, c);
        const uint64_t low = from > begin ? from - begin : 0;
        const uint64_t high = to < begin + bytes ? to - begin : bytes;
        const uint32_t buffer = (uint32_t)(c % s->queue->n_buffers);

        if (kv_transfers_wait(&s->reads, buffer) < 0)
            return kv_io_error(why, s->reads.error, "read", s->file->name);
        pieces[(*n_pieces)++] = (struct iovec){s->queue->buffers[buffer] + low, high - low};
    }
    return 0;
}

static bool is_in_tail(const struct kv_file *file, uint64_t offset, size_t len)
{
    return file->tail != NULL && offset >= file->tail_begin &&
           len <= file->tail_bytes - (offset - file->tail_begin);
}

/* Copy [offset, offset + len) of the file, which has them. */
static int read_range(struct kv_file *file, struct kv_queue *queue, uint64_t offset, size_t len,
                      unsigned char *dst, struct kv_why *why)
{
    struct stream s;
    int rc;

    if (is_in_tail(file, offset, len)) {
        memcpy(dst, file->tail + (offset - file->tail_begin), len);
        return 0;
    }
    if (offset + len <= file->head_bytes) {
        memcpy(dst, file->head + offset, len);
        return 0;
    }
    rc = stream_open(&s, file, queue, offset, offset + len);
    if (rc < 0)
        return kv_fail(why, rc, "no memory to read %s", file->name);
    while (len > 0 && rc == 0) {
        const size_t room = queue->buffer_bytes - (offset - s.begin) % queue->buffer_bytes;
        const size_t n = len < room ? len : room;
        struct iovec piece;
        size_t n_pieces;

        rc = stream_get(&s, offset, offset + n, &piece, &n_pieces, why);
        if (rc == 0)
            memcpy(dst, piece.iov_base, n);
        dst += n;
        offset += n;
        len -= n;
    }
    stream_close(&s);
    return rc;
}

static bool is_zero(const unsigned char *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (bytes[i] != 0)
            return false;
    return true;
}

/* Give the pieces' first n bytes up, which must be zero. */
static int skip_zeros(struct iovec *pieces, size_t n_pieces, size_t n, const char *before,
                      struct kv_why *why)
{
    for (size_t i = 0; i < n_pieces && n > 0; i++) {
        const size_t here = pieces[i].iov_len < n ? pieces[i].iov_len : n;

        if (!is_zero(pieces[i].iov_base, here))
            return kv_fail(why, KV_ERR_FORMAT, "the gap before %s is not zero", before);
        pieces[i].iov_base = (unsigned char *)pieces[i].iov_base + here;
        pieces[i].iov_len -= here;
        n -= here;
    }
    return 0;
}

/* ---- Open ---- */

static int format(struct kv_why *why, const char *field, uint64_t is, uint64_t want)
{
    return kv_fail(why, KV_ERR_FORMAT, "%s is %" PRIu64 ", expected %" PRIu64, field, is, want);
}

/* The footer: its own check, and that the lengths in it add up to the file's. */
static int parse_footer(struct kv_file *file, const unsigned char *footer, uint64_t file_bytes,
                        struct kv_why *why)
{
    struct kv_file_info *info = &file->info;
    const uint32_t crc = kv_crc32c(0, footer + KV_RECORD_BODY, KV_FILE_BLOCK - KV_RECORD_BODY);
    uint64_t index_bytes;

    if (memcmp(footer, KV_MAGIC_FOOTER, 4) != 0)
        return kv_fail(why, KV_ERR_FORMAT, "footer magic is %02x%02x%02x%02x, expected \"%s\"",
                       footer[0], footer[1], footer[2], footer[3], KV_MAGIC_FOOTER);
    if (crc != kv_get_u32(footer, KV_RECORD_CRC))
        return kv_fail(why, KV_ERR_CHECK, "footer CRC is %08x, computed %08x",
                       kv_get_u32(footer, KV_RECORD_CRC), crc);
    info->n_positions = kv_get_u32(footer, KV_FOOTER_POSITIONS);
    info->n_frames = kv_get_u32(footer, KV_FOOTER_N_FRAMES);
    info->n_sections = kv_get_u32(footer, KV_FOOTER_N_SECTIONS);
    info->bytes = kv_get_u64(footer, KV_FOOTER_FILE_BYTES);
    memcpy(info->root.bytes, footer + KV_FOOTER_ROOT, sizeof(info->root.bytes));
    file->header_bytes = kv_get_u32(footer, KV_FOOTER_HEADER_BYTES);
    file->index_offset = kv_get_u64(footer, KV_FOOTER_INDEX_OFFSET);
    index_bytes = kv_get_u64(footer, KV_FOOTER_INDEX_BYTES);
    if (info->bytes != file_bytes)
        return format(why, "footer: file length", info->bytes, file_bytes);
    if (info->n_positions > KV_MAX_POSITIONS)
        return kv_fail(why, KV_ERR_LIMIT, "footer: positions is %u: at most %u", info->n_positions,
                       (unsigned)KV_MAX_POSITIONS);
    if (info->n_sections > KV_MAX_SECTIONS)
        return kv_fail(why, KV_ERR_FORMAT, "footer: sections is %u: at most %u", info->n_sections,
                       (unsigned)KV_MAX_SECTIONS);
    if (!is_zero(footer + KV_FOOTER_SECTIONS + info->n_sections * KV_FOOTER_STRIDE,
                 KV_FILE_BLOCK - KV_FOOTER_SECTIONS - info->n_sections * KV_FOOTER_STRIDE))
        return kv_fail(why, KV_ERR_FORMAT, "footer: bytes after the section table are not zero");
    if (index_bytes != KV_INDEX_FRAMES + info->n_frames * (uint64_t)KV_INDEX_STRIDE)
        return format(why, "footer: index length", index_bytes,
                      KV_INDEX_FRAMES + info->n_frames * (uint64_t)KV_INDEX_STRIDE);
    if (file->index_offset % KV_FILE_BLOCK != 0 || file->index_offset > file_bytes ||
        kv_record_place(index_bytes, 0) + KV_FILE_BLOCK != file_bytes - file->index_offset)
        return kv_fail(why, KV_ERR_FORMAT,
                       "footer: index offset is %" PRIu64 ", in a file of %" PRIu64 " bytes",
                       file->index_offset, file_bytes);
    if (file->header_bytes < KV_HEADER_IDS || file->header_bytes > file->index_offset)
        return kv_fail(why, KV_ERR_FORMAT, "footer: header length is %zu", file->header_bytes);
    for (uint32_t i = 0; i < info->n_sections; i++) {
        const unsigned char *line = footer + KV_FOOTER_SECTIONS + (size_t)i * KV_FOOTER_STRIDE;

        info->sections[i] = (struct kv_file_section){
            .offset = kv_get_u64(line, KV_FOOTER_OFFSET),
            .kind = kv_get_u32(line, KV_FOOTER_KIND),
            .len = kv_get_u32(line, KV_FOOTER_LENGTH),
            .crc = kv_get_u32(line, KV_FOOTER_CRC),
        };
        if (kv_get_u32(line, KV_FOOTER_PAD) != 0)
            return kv_fail(why, KV_ERR_FORMAT, "footer: bytes in the section table are not zero");
    }
    return 0;
}

/* The first block and the last bytes, at once. */
static int read_ends(struct kv_file *file, struct kv_queue *queue, uint64_t file_bytes,
                     struct kv_why *why)
{
    const size_t bytes = file_bytes < TAIL_BYTES ? file_bytes : TAIL_BYTES;
    const bool apart = bytes < file_bytes;
    struct iovec piece;
    struct stream s;
    size_t n_pieces;
    int rc;

    file->tail = malloc(bytes);
    file->tail_begin = file_bytes - bytes;
    file->tail_bytes = bytes;
    if (file->tail == NULL || stream_open(&s, file, queue, file->tail_begin, file_bytes) < 0)
        return kv_fail(why, KV_ERR_NOMEM, "no memory to read %s", file->name);
    read_chunk(&s);
    if (apart)
        begin_read(&s, 1, 0, KV_FILE_BLOCK);
    rc = stream_get(&s, file->tail_begin, file_bytes, &piece, &n_pieces, why);
    if (rc == 0)
        memcpy(file->tail, piece.iov_base, bytes);
    if (rc == 0 && apart) {
        if (kv_transfers_wait(&s.reads, 1) < 0)
            rc = kv_io_error(why, s.reads.error, "read", file->name);
        memcpy(file->head, queue->buffers[1], KV_FILE_BLOCK);
        file->head_bytes = KV_FILE_BLOCK;
    }
    stream_close(&s);
    return rc;
}

static int open_footer(struct kv_file *file, struct kv_queue *queue, struct kv_why *why)
{
    const unsigned char *footer;
    struct kv_disk_stat st;
    int rc = file->disk->ops->stat(file->disk, file->name, &st);

    if (rc < 0)
        return kv_io_error(why, rc, "read", file->name);
    if (st.bytes % KV_FILE_BLOCK != 0 || st.bytes < 3 * KV_FILE_BLOCK)
        return kv_fail(why, KV_ERR_FORMAT,
                       "footer: the file is %" PRIu64 " bytes: blocks of %u, at least 3", st.bytes,
                       (unsigned)KV_FILE_BLOCK);
    rc = read_ends(file, queue, st.bytes, why);
    if (rc < 0)
        return rc;
    footer = file->tail + file->tail_bytes - KV_FILE_BLOCK;
    rc = parse_footer(file, footer, st.bytes, why);
    if (rc == 0) /* kept for the header to be compared with */
        memcpy(file->info.header.snapshot_id, footer + KV_FOOTER_SNAPSHOT_ID, KV_SNAPSHOT_ID_BYTES);
    return rc;
}

/* The base digest is checked by a decoder, as it is on the wire. */
static int check_base_digest(const struct kv_file *file, struct kv_why *why)
{
    const struct iovec piece = {file->header, file->header_bytes};
    struct kv_decoder *d;
    int rc =
        kv_decoder_open(&(struct kv_snapshot_header){.fingerprint = file->info.header.fingerprint,
                                                     .ns = file->info.header.ns,
                                                     .numerics_id = file->info.header.numerics_id,
                                                     .geometry = file->info.header.geometry,
                                                     .base = file->info.header.base,
                                                     .base_digest = file->info.header.base_digest,
                                                     .n_bound = KV_MAX_POSITIONS},
                        &d);

    if (rc < 0)
        return kv_fail(why, rc, "no memory to read %s", file->name);
    rc = kv_decoder_header(d, &piece, 1, why);
    kv_decoder_close(d);
    return rc;
}

static int open_header(struct kv_file *file, struct kv_queue *queue, struct kv_why *why)
{
    struct kv_file_info *info = &file->info;
    uint8_t id[KV_SNAPSHOT_ID_BYTES];
    int rc;

    memcpy(id, info->header.snapshot_id, sizeof(id));
    if (file->header_bytes > KV_HEADER_IDS + info->n_positions * sizeof(uint32_t))
        return kv_fail(why, KV_ERR_FORMAT, "footer: header length is %zu, for %u positions",
                       file->header_bytes, info->n_positions);
    file->header = malloc(file->header_bytes);
    if (file->header == NULL)
        return kv_fail(why, KV_ERR_NOMEM, "no memory for a header of %zu bytes",
                       file->header_bytes);
    rc = read_range(file, queue, 0, file->header_bytes, file->header, why);
    if (rc == 0)
        rc = kv_header_parse(file->header, file->header_bytes, &info->header, why);
    if (rc < 0)
        return rc;
    info->header_crc = kv_get_u32(file->header, KV_RECORD_CRC);
    if (memcmp(id, info->header.snapshot_id, sizeof(id)) != 0)
        return kv_fail(why, KV_ERR_CHECK, "footer: snapshot id is not the header's");
    if (info->n_positions < info->header.base || info->n_positions > info->header.n_bound)
        return kv_fail(why, KV_ERR_FORMAT, "footer: positions is %u, from base %u to bound %u",
                       info->n_positions, info->header.base, info->header.n_bound);
    return check_base_digest(file, why);
}

/* One line of the index against where the frame must stand; *end moves on past it. */
static int parse_frame(struct kv_file *file, uint32_t i, const unsigned char *line,
                       uint32_t *position, uint64_t *end, struct kv_why *why)
{
    const struct kv_file_info *info = &file->info;
    const uint32_t f = info->header.frame_positions, first = *position;
    const uint32_t left = info->n_positions - first, room = f - first % f;
    const uint32_t count = left < room ? left : room;
    const size_t before = KV_FRAME_IDS + count * sizeof(uint32_t);
    struct kv_file_frame *frame = &file->frames[i];
    char name[48];

    snprintf(name, sizeof(name), "index: frame %u", i);
    *frame = (struct kv_file_frame){.offset = kv_get_u64(line, KV_INDEX_OFFSET),
                                    .first = kv_get_u32(line, KV_INDEX_FIRST),
                                    .count = kv_get_u32(line, KV_INDEX_LENGTH),
                                    .crc = kv_get_u32(line, KV_INDEX_CRC)};
    memcpy(frame->digest.bytes, line + KV_INDEX_DIGEST, sizeof(frame->digest.bytes));
    if (kv_get_u32(line, KV_INDEX_PAD) != 0)
        return kv_fail(why, KV_ERR_FORMAT, "%s: padding is not zero", name);
    if (frame->first != first || count == 0 || frame->count != count)
        return kv_fail(why, KV_ERR_FORMAT, "%s is [%u, +%u), expected [%u, +%u)", name,
                       frame->first, frame->count, first, count);
    if (frame->offset != kv_record_place(*end, before))
        return format(why, name, frame->offset, kv_record_place(*end, before));
    *end = frame->offset + before + count * kv_position_bytes(&info->header.geometry);
    *position = first + count;
    return 0;
}

static int parse_index(struct kv_file *file, const unsigned char *index, size_t len,
                       struct kv_why *why)
{
    const struct kv_file_info *info = &file->info;
    const uint32_t crc = kv_crc32c(kv_record_seed(info->header.snapshot_id, info->n_positions),
                                   index + KV_RECORD_BODY, len - KV_RECORD_BODY);
    uint32_t position = info->header.base;
    uint64_t end = file->header_bytes;

    if (memcmp(index, KV_MAGIC_INDEX, 4) != 0)
        return kv_fail(why, KV_ERR_FORMAT, "index magic is %02x%02x%02x%02x, expected \"%s\"",
                       index[0], index[1], index[2], index[3], KV_MAGIC_INDEX);
    if (crc != kv_get_u32(index, KV_RECORD_CRC))
        return kv_fail(why, KV_ERR_CHECK, "index CRC is %08x, computed %08x",
                       kv_get_u32(index, KV_RECORD_CRC), crc);
    if (kv_get_u32(index, KV_INDEX_COUNT) != info->n_frames)
        return format(why, "index: frames", kv_get_u32(index, KV_INDEX_COUNT), info->n_frames);
    if (kv_get_u32(index, KV_INDEX_ZERO) != 0)
        return kv_fail(why, KV_ERR_FORMAT, "index: padding is not zero");
    for (uint32_t i = 0; i < info->n_frames; i++) {
        const int rc = parse_frame(file, i, index + KV_INDEX_FRAMES + (size_t)i * KV_INDEX_STRIDE,
                                   &position, &end, why);

        if (rc < 0)
            return rc;
    }
    return 0;
}

static int check_sections(const struct kv_file *file, uint64_t *end, struct kv_why *why)
{
    uint32_t last_kind = 0;

    for (uint32_t i = 0; i < file->info.n_sections; i++) {
        const struct kv_file_section *s = &file->info.sections[i];
        const uint64_t place = kv_record_place(*end, KV_SECTION_DATA);
        int rc = kv_section_check(s->kind, s->len, why);

        if (rc == KV_ERR_INVALID)
            rc = KV_ERR_FORMAT; /* it is not our caller's argument here */
        if (rc < 0)
            return rc;
        if (s->kind <= last_kind)
            return kv_fail(why, KV_ERR_FORMAT, "footer: section kind is %u after %u", s->kind,
                           last_kind);
        if (s->offset != place)
            return format(why, "footer: section offset", s->offset, place);
        last_kind = s->kind;
        *end = place + KV_SECTION_DATA + s->len;
    }
    return 0;
}

/* The bytes that no record owns, but for the gaps that a read of all records passes: after the last
 * record, and after the index. */
static int check_tail(struct kv_file *file, struct kv_queue *queue, uint64_t end, uint64_t next,
                      const char *before, struct kv_why *why)
{
    unsigned char gap[KV_FILE_BLOCK];
    const size_t n = next - end;
    int rc;

    if (n == 0)
        return 0;
    rc = read_range(file, queue, end, n, gap, why);
    if (rc == 0 && !is_zero(gap, n))
        rc = kv_fail(why, KV_ERR_FORMAT, "the gap before the %s is not zero", before);
    return rc;
}

static int check_root(const struct kv_file *file, struct kv_why *why)
{
    const struct kv_file_info *info = &file->info;
    struct kv_digest root;
    struct kv_hash hash;

    kv_hash_init(&hash);
    kv_hash_add_u32(&hash, info->header_crc);
    for (uint32_t i = 0; i < info->n_frames; i++)
        kv_root_add_frame(&hash, file->frames[i].first, file->frames[i].count,
                          &file->frames[i].digest, file->frames[i].crc);
    for (uint32_t i = 0; i < info->n_sections; i++)
        kv_root_add_section(&hash, info->sections[i].kind, info->sections[i].len,
                            info->sections[i].crc);
    kv_hash_end(&hash, &root);
    if (!kv_digest_equal(&root, &info->root))
        return kv_fail(why, KV_ERR_CHECK, "footer: root is not that of the records");
    return 0;
}

/* Where everything stands, from the positions and the section table alone: with a header that is
 * right, a short file cannot claim a long index. */
static int check_layout(const struct kv_file *file, uint64_t *records_end, struct kv_why *why)
{
    const struct kv_file_info *info = &file->info;
    uint32_t n_frames;
    uint64_t end =
        kv_file_frames_end(&info->header.geometry, info->header.base, info->n_positions, &n_frames);
    int rc;

    if (info->n_frames != n_frames)
        return format(why, "footer: frames", info->n_frames, n_frames);
    rc = check_sections(file, &end, why);
    if (rc < 0)
        return rc;
    if (kv_record_place(end, 0) != file->index_offset)
        return format(why, "footer: index offset", file->index_offset, kv_record_place(end, 0));
    *records_end = end;
    return 0;
}

static int open_index(struct kv_file *file, struct kv_queue *queue, struct kv_why *why)
{
    struct kv_file_info *info = &file->info;
    const size_t len = KV_INDEX_FRAMES + (size_t)info->n_frames * KV_INDEX_STRIDE;
    uint64_t end = 0;
    unsigned char *index;
    int rc = check_layout(file, &end, why);

    if (rc < 0)
        return rc;
    index = malloc(len);
    file->frames = calloc(info->n_frames > 0 ? info->n_frames : 1, sizeof(*file->frames));
    if (index == NULL || file->frames == NULL) {
        free(index);
        return kv_fail(why, KV_ERR_NOMEM, "no memory for an index of %u frames", info->n_frames);
    }
    info->frames = file->frames;
    rc = read_range(file, queue, file->index_offset, len, index, why);
    if (rc == 0)
        rc = parse_index(file, index, len, why);
    free(index);
    if (rc == 0)
        rc = check_root(file, why);
    if (rc == 0)
        rc = check_tail(file, queue, end, file->index_offset, "index", why);
    if (rc == 0)
        rc = check_tail(file, queue, file->index_offset + len, info->bytes - KV_FILE_BLOCK,
                        "footer", why);
    return rc;
}

int kv_file_open(struct kv_queue *queue, const char *name, struct kv_file **out, struct kv_why *why)
{
    struct kv_file *file;
    int rc;

    /* Both ends are read at once, each into one buffer. */
    rc = kv_file_check_queue(queue, TAIL_BYTES, why);
    if (rc < 0)
        return rc;
    file = calloc(1, sizeof(*file));
    if (file == NULL)
        return kv_fail(why, KV_ERR_NOMEM, "no memory to read %s", name);
    file->disk = queue->disk;
    snprintf(file->name, sizeof(file->name), "%s", name);
    file->number = file->disk->ops->open(file->disk, name, KV_DISK_READ);
    if (file->number < 0) {
        rc = kv_io_error(why, file->number, "open", name);
        free(file);
        return rc;
    }
    rc = open_footer(file, queue, why);
    if (rc == 0)
        rc = open_header(file, queue, why);
    if (rc == 0)
        rc = open_index(file, queue, why);
    free(file->tail);
    file->tail = NULL;
    file->head_bytes = 0;
    if (rc < 0) {
        kv_file_close(file);
        return rc;
    }
    *out = file;
    return 0;
}

void kv_file_close(struct kv_file *file)
{
    if (file == NULL)
        return;
    file->disk->ops->close_file(file->disk, file->number);
    free(file->header);
    free(file->frames);
    free(file);
}

const struct kv_file_info *kv_file_info(const struct kv_file *file)
{
    return &file->info;
}

const char *kv_file_name(const struct kv_file *file)
{
    return file->name;
}

/* ---- Frames ---- */

static uint64_t frame_bytes(const struct kv_file *file, const struct kv_file_frame *f)
{
    return KV_FRAME_IDS +
           f->count * (sizeof(uint32_t) + (uint64_t)kv_position_bytes(&file->info.header.geometry));
}

/* Where the record before frame i ends: the gap from there belongs to the frame. */
static uint64_t gap_begin(const struct kv_file *file, uint32_t i)
{
    if (i == 0)
        return file->header_bytes;
    return file->frames[i - 1].offset + frame_bytes(file, &file->frames[i - 1]);
}

/* The frame that position p is in; n_frames where it is past the last. */
static uint32_t frame_of(const struct kv_file_info *info, uint32_t p)
{
    uint32_t low = 0, high = info->n_frames;

    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;

        if (info->frames[middle].first + info->frames[middle].count <= p)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* A decoder that takes frame i next. */
static int decoder_at(const struct kv_file *file, uint32_t i, struct kv_decoder **out,
                      struct kv_why *why)
{
    const struct kv_file_info *info = &file->info;
    const struct iovec piece = {file->header, file->header_bytes};
    struct kv_snapshot_header expect = info->header;
    struct kv_decoder *d;
    int rc;

    expect.base_ids = NULL;
    rc = kv_decoder_open(&expect, &d);
    if (rc < 0)
        return kv_fail(why, rc, "no memory to read %s", file->name);
    rc = kv_decoder_header(d, &piece, 1, why);
    if (rc < 0) {
        kv_decoder_close(d);
        return rc;
    }
    if (i > 0)
        kv_decoder_skip(d, info->frames[i].first, &info->frames[i - 1].digest);
    *out = d;
    return 0;
}

/* Verify frame i, whose gap and record are in the pieces, and hand on its positions [first, end).
 */
static int take_frame(struct kv_file *file, struct kv_decoder *d, uint32_t i, struct iovec *pieces,
                      size_t n_pieces, uint32_t first, uint32_t end, kv_file_sink *sink, void *arg,
                      struct kv_why *why)
{
    const struct kv_file_frame *want = &file->frames[i];
    const size_t position = kv_position_bytes(&file->info.header.geometry);
    struct iovec rows[MAX_PIECES];
    struct kv_reader record;
    struct kv_frame frame;
    uint32_t crc, skip, count;
    size_t n_rows;
    char name[32];
    int rc;

    snprintf(name, sizeof(name), "frame %u", i);
    rc = skip_zeros(pieces, n_pieces, want->offset - gap_begin(file, i), name, why);
    if (rc < 0)
        return rc;
    rc = kv_decoder_frame(d, pieces, n_pieces, &frame, why);
    if (rc < 0)
        return kv_fail_in(why, rc, "frame %u", i);
    record = kv_reader_at(pieces, n_pieces, KV_RECORD_CRC);
    kv_reader_read(&record, &crc, sizeof(crc));
    if (crc != want->crc || !kv_digest_equal(&frame.digest, &want->digest))
        return kv_fail(why, KV_ERR_CHECK, "frame %u is not the one of the index", i);
    if (sink == NULL)
        return 0;
    skip = first > frame.first ? first - frame.first : 0;
    count = (end < frame.first + frame.count ? end - frame.first : frame.count) - skip;
    n_rows =
        kv_pieces(pieces, n_pieces, frame.rows_offset + skip * position, count * position, rows);
    return sink(arg, frame.first + skip, count, frame.ids + skip, rows, n_rows, why);
}

/* Frame i with the gap before it in one buffer, if the page cache has all of it.  Always the same
 * buffer, which then is in the CPU's caches for whoever takes the CRC and the rows. */
static bool frame_from_cache(struct kv_file *file, struct kv_queue *queue, uint32_t i,
                             struct iovec *piece)
{
    const uint64_t begin = gap_begin(file, i);
    const size_t len = gap_begin(file, i + 1) - begin;
    const struct kv_disk_ops *ops = queue->disk->ops;

    for (size_t at = 0; at < len;) {
        const int64_t n = ops->read_cached(queue->disk, file->number, queue->buffers[0] + at,
                                           len - at, begin + at);

        if (n <= 0)
            return false;
        at += (size_t)n;
    }
    *piece = (struct iovec){queue->buffers[0], len};
    return true;
}

/* Frames one by one: from the page cache as long as it has them, and from the first that it has not
 * through the stream, which reads ahead. */
struct frames {
    struct kv_file *file;
    struct kv_queue *queue;
    struct kv_decoder *decoder;
    uint32_t to;
    bool streaming;
    struct stream stream;
};

static int frames_get(struct frames *f, uint32_t i, struct iovec *pieces, size_t *n_pieces,
                      struct kv_why *why)
{
    const uint64_t begin = gap_begin(f->file, i);

    if (!f->streaming) {
        *n_pieces = 1;
        if (frame_from_cache(f->file, f->queue, i, pieces))
            return 0;
        if (stream_open(&f->stream, f->file, f->queue, begin, gap_begin(f->file, f->to)) < 0)
            return kv_fail(why, KV_ERR_NOMEM, "no memory to read %s", f->file->name);
        f->streaming = true;
    }
    return stream_get(&f->stream, begin, gap_begin(f->file, i + 1), pieces, n_pieces, why);
}

int kv_file_read(struct kv_file *file, struct kv_queue *queue, uint32_t first, uint32_t end,
                 kv_file_sink *sink, void *arg, struct kv_why *why)
{
    const struct kv_file_info *info = &file->info;
    struct frames f = {.file = file, .queue = queue};
    uint32_t from;
    int rc;

    if (first < info->header.base || end > info->n_positions || first > end)
        return kv_fail(why, KV_ERR_INVALID, "positions [%u, %u) of %s, which has [%u, %u)", first,
                       end, file->name, info->header.base, info->n_positions);
    rc = kv_file_check_queue(queue, kv_file_frame_room(&info->header.geometry), why);
    if (rc < 0)
        return rc;
    if (first == end)
        return 0;
    from = frame_of(info, first);
    f.to = frame_of(info, end - 1) + 1;
    rc = decoder_at(file, from, &f.decoder, why);
    for (uint32_t i = from; i < f.to && rc == 0; i++) {
        struct iovec pieces[MAX_PIECES];
        size_t n_pieces;

        rc = frames_get(&f, i, pieces, &n_pieces, why);
        if (rc == 0)
            rc = take_frame(file, f.decoder, i, pieces, n_pieces, first, end, sink, arg, why);
    }
    if (f.streaming)
        stream_close(&f.stream);
    kv_decoder_close(f.decoder);
    return rc;
}

int kv_file_frame_ids(struct kv_file *file, struct kv_queue *queue, uint32_t i, uint32_t *ids,
                      struct kv_why *why)
{
    const struct kv_file_info *info = &file->info;
    const struct kv_file_frame *f = &info->frames[i];
    const size_t bytes = f->count * sizeof(*ids);
    struct kv_digest digest;
    struct kv_prefix prefix;
    int rc = read_range(file, queue, f->offset + KV_FRAME_IDS, bytes, (unsigned char *)ids, why);

    if (rc < 0)
        return rc;
    if (kv_prefix_init(&prefix, &info->header.ns, info->header.frame_positions) < 0)
        return kv_fail(why, KV_ERR_NOMEM, "no memory to read %s", file->name);
    if (i == 0) {
        kv_prefix_feed(&prefix, info->header.base_ids, info->header.base);
    } else {
        prefix.border = info->frames[i - 1].digest;
        prefix.n = f->first;
    }
    kv_prefix_ahead(&prefix, ids, f->count, &digest);
    kv_prefix_release(&prefix);
    if (!kv_digest_equal(&digest, &f->digest))
        return kv_fail(why, KV_ERR_CHECK, "frame %u: ids are not those of its digest", i);
    return 0;
}

/* ---- Sections ---- */

static int section_crc(const struct kv_file *file, const struct kv_file_section *s,
                       const unsigned char *record, size_t len, struct kv_why *why)
{
    const uint32_t crc =
        kv_crc32c(kv_record_seed(file->info.header.snapshot_id, file->info.n_positions),
                  record + KV_RECORD_BODY, len - KV_RECORD_BODY);

    if (memcmp(record, KV_MAGIC_SECTION, 4) != 0)
        return kv_fail(why, KV_ERR_FORMAT, "section %u: magic is %02x%02x%02x%02x", s->kind,
                       record[0], record[1], record[2], record[3]);
    if (crc != s->crc || kv_get_u32(record, KV_RECORD_CRC) != s->crc)
        return kv_fail(why, KV_ERR_CHECK, "section %u: CRC is %08x, computed %08x, footer %08x",
                       s->kind, kv_get_u32(record, KV_RECORD_CRC), crc, s->crc);
    if (kv_get_u32(record, KV_SECTION_KIND) != s->kind ||
        kv_get_u32(record, KV_SECTION_LENGTH) != s->len)
        return kv_fail(why, KV_ERR_FORMAT, "section %u is not the one of the footer", s->kind);
    return 0;
}

static uint64_t section_gap(const struct kv_file *file, uint32_t i)
{
    if (i == 0)
        return gap_begin(file, file->info.n_frames);
    return file->info.sections[i - 1].offset + KV_SECTION_DATA + file->info.sections[i - 1].len;
}

/* The whole record, with the gap before it, checked. */
static int read_section(struct kv_file *file, struct kv_queue *queue, uint32_t i,
                        unsigned char **data, struct kv_why *why)
{
    const struct kv_file_section *s = &file->info.sections[i];
    const size_t gap = s->offset - section_gap(file, i), len = KV_SECTION_DATA + s->len;
    unsigned char *bytes = malloc(gap + len);
    int rc;

    if (bytes == NULL)
        return kv_fail(why, KV_ERR_NOMEM, "no memory for a section of %u bytes", s->len);
    rc = read_range(file, queue, s->offset - gap, gap + len, bytes, why);
    if (rc == 0 && !is_zero(bytes, gap))
        rc = kv_fail(why, KV_ERR_FORMAT, "the gap before section %u is not zero", s->kind);
    if (rc == 0)
        rc = section_crc(file, s, bytes + gap, len, why);
    if (rc < 0) {
        free(bytes);
        return rc;
    }
    memmove(bytes, bytes + gap + KV_SECTION_DATA, s->len);
    *data = bytes;
    return 0;
}

int kv_file_section(struct kv_file *file, struct kv_queue *queue, enum kv_section kind, void **data,
                    size_t *len, struct kv_why *why)
{
    for (uint32_t i = 0; i < file->info.n_sections; i++)
        if (file->info.sections[i].kind == (uint32_t)kind) {
            unsigned char *bytes;
            const int rc = read_section(file, queue, i, &bytes, why);

            if (rc < 0)
                return rc;
            *data = bytes;
            *len = file->info.sections[i].len;
            return 0;
        }
    *data = NULL;
    *len = 0;
    return 0;
}

int kv_file_verify(struct kv_file *file, struct kv_queue *queue, struct kv_why *why)
{
    int rc =
        kv_file_read(file, queue, file->info.header.base, file->info.n_positions, NULL, NULL, why);

    for (uint32_t i = 0; i < file->info.n_sections && rc == 0; i++) {
        unsigned char *data = NULL;

        rc = read_section(file, queue, i, &data, why);
        free(data);
    }
    return rc;
}

#include "kvcore/kv_file.h"
#include "kvcore/kv_record.h"

enum {
    BUFFER_BYTES = 2 * 1024 * 1024,           /* of a queue for ordinary geometries */
    QUEUE_BYTES = KV_IO_DEPTH * BUFFER_BYTES, /* bound of one for larger ones, but for: */
    MIN_BUFFERS = 2,
};

/* The longest frame record, with the gap before it and the block that it shares with the next. */
size_t kv_file_frame_room(const struct kv_geometry *g)
{
    const size_t f = kv_frame_positions(g);

    return kv_record_place(KV_FRAME_IDS + f * (sizeof(uint32_t) + kv_position_bytes(g)), 0) +
           2 * KV_FILE_BLOCK;
}

int kv_file_queue(struct kv_disk *disk, const struct kv_geometry *g, struct kv_queue **out,
                  struct kv_why *why)
{
    const size_t room = kv_file_frame_room(g);
    const size_t bytes = room > BUFFER_BYTES ? room : BUFFER_BYTES;
    size_t n = QUEUE_BYTES / bytes;
    int rc;

    if (n < MIN_BUFFERS)
        n = MIN_BUFFERS;
    rc = disk->ops->queue_open(disk, (uint32_t)n, (uint32_t)bytes, out);
    if (rc < 0)
        return kv_io_error(why, rc, "open", "a queue");
    return 0;
}

int kv_file_check_queue(const struct kv_queue *queue, size_t buffer_bytes, struct kv_why *why)
{
    if (queue->n_buffers < MIN_BUFFERS || queue->buffer_bytes < buffer_bytes)
        return kv_fail(why, KV_ERR_INVALID, "the queue has %u buffers of %u bytes: at least 2, %zu",
                       queue->n_buffers, queue->buffer_bytes, buffer_bytes);
    return 0;
}

uint64_t kv_file_frames_end(const struct kv_geometry *g, uint32_t base, uint32_t n,
                            uint32_t *n_frames)
{
    const uint32_t f = kv_frame_positions(g);
    const uint64_t position = kv_position_bytes(g);
    uint64_t end = KV_HEADER_IDS + base * (uint64_t)sizeof(uint32_t);
    uint32_t i = 0;

    for (uint32_t first = base; first < n; i++) {
        const uint32_t room = f - first % f, count = n - first < room ? n - first : room;
        const size_t before = KV_FRAME_IDS + count * sizeof(uint32_t);

        end = kv_record_place(end, before) + before + count * position;
        first += count;
    }
    *n_frames = i;
    return end;
}

static uint64_t section_end(uint64_t end, size_t len)
{
    return len == 0 ? end : kv_record_place(end, KV_SECTION_DATA) + KV_SECTION_DATA + len;
}

uint64_t kv_file_bytes(const struct kv_geometry *g, uint32_t base, uint32_t n, size_t logits_bytes,
                       size_t session_bytes)
{
    uint32_t n_frames;
    uint64_t end = kv_file_frames_end(g, base, n, &n_frames);

    end = section_end(section_end(end, logits_bytes), session_bytes);
    end = kv_record_place(end, 0) + KV_INDEX_FRAMES + n_frames * (uint64_t)KV_INDEX_STRIDE;
    return kv_record_place(end, 0) + KV_FILE_BLOCK;
}

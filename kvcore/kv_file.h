/* One snapshot file: docs/snapshot-format.md, "Files".  Written front to back, read from its end.
 *
 * Records are the codec's.  Each stands so that its payload (a frame's rows, a section's data)
 * begins at a multiple of KV_IO_ALIGN; the gaps before are zero.  Then come the index and, as the
 * last block, the footer, which holds what the seal says on the wire.
 *
 * Nothing here knows of names, deltas' parents, budgets or durability: kv_store.c does. */
#ifndef KV_FILE_H
#define KV_FILE_H

#include "kvcore/kv_io.h"

/* A frame as the index has it. */
struct kv_file_frame {
    uint64_t offset; /* of the record */
    uint32_t first;
    uint32_t count;
    uint32_t crc;
    struct kv_digest digest; /* D(first + count) */
};

struct kv_file_section {
    uint64_t offset; /* of the record */
    uint32_t kind;
    uint32_t len; /* of the data */
    uint32_t crc;
};

struct kv_file_info {
    struct kv_snapshot_header header; /* base_ids: of the file, as long as it is open */
    uint32_t header_crc;
    uint32_t n_positions;
    uint32_t n_frames;
    uint32_t n_sections;
    struct kv_file_section sections[2]; /* [n_sections] */
    const struct kv_file_frame *frames; /* [n_frames], of the file, as long as it is open */
    uint64_t bytes;                     /* exact length */
    struct kv_digest root;
};

/* A queue for files of this geometry: its buffers hold a whole frame each, and several small ones
 * (2 MiB).  Reading and writing want one at least as large (else KV_ERR_INVALID). */
int kv_file_queue(struct kv_disk *disk, const struct kv_geometry *g, struct kv_queue **out,
                  struct kv_why *why);

/* How long a buffer must be at least. */
size_t kv_file_frame_room(const struct kv_geometry *g);

/* KV_ERR_INVALID: fewer than two buffers, or shorter ones. */
int kv_file_check_queue(const struct kv_queue *queue, size_t buffer_bytes, struct kv_why *why);

/* Where the last of the frames [base, n) ends in a file, and how many there are. */
uint64_t kv_file_frames_end(const struct kv_geometry *g, uint32_t base, uint32_t n,
                            uint32_t *n_frames);

/* ---- Reading ---- */

struct kv_file;

/* Open and check all but the frames' and sections' bytes: the footer, the length, the header, the
 * index, and the root over what they say.  KV_ERR_FORMAT, KV_ERR_CHECK, KV_ERR_LIMIT name the part
 * ("footer", "header", "index", "frame 3", ...) and the value.  Nothing is allocated before its
 * length was checked: the header's against the file's, and the index's also against how many frames
 * a file of this length can hold. */
int kv_file_open(struct kv_queue *queue, const char *name, struct kv_file **out,
                 struct kv_why *why);
void kv_file_close(struct kv_file *file);
const struct kv_file_info *kv_file_info(const struct kv_file *file);
const char *kv_file_name(const struct kv_file *file);

/* A run of verified positions: ids [count], rows position-major in pieces.  Not 0: stop with it. */
typedef int kv_file_sink(void *arg, uint32_t first, uint32_t count, const uint32_t *ids,
                         const struct iovec *rows, size_t n_rows, struct kv_why *why);

/* Hand positions [first, end) to the sink, in order, each frame once all of it is verified (also
 * where only some of its positions are asked for, and the zero gap before it).  Reads of the next
 * frames are under way meanwhile.  first >= base. */
int kv_file_read(struct kv_file *file, struct kv_queue *queue, uint32_t first, uint32_t end,
                 kv_file_sink *sink, void *arg, struct kv_why *why);

/* The ids of frame i alone, checked by its digest; ids has room for its count. */
int kv_file_frame_ids(struct kv_file *file, struct kv_queue *queue, uint32_t i, uint32_t *ids,
                      struct kv_why *why);

/* The data of a section, to be freed by the caller; *len 0 and *data NULL where there is none. */
int kv_file_section(struct kv_file *file, struct kv_queue *queue, enum kv_section kind, void **data,
                    size_t *len, struct kv_why *why);

/* Read all of it: every byte is checked. */
int kv_file_verify(struct kv_file *file, struct kv_queue *queue, struct kv_why *why);

/* ---- Writing ---- */

struct kv_file_writer;

/* The exact length of a file with frames [base, n) and sections of these lengths (0: none). */
uint64_t kv_file_bytes(const struct kv_geometry *g, uint32_t base, uint32_t n, size_t logits_bytes,
                       size_t session_bytes);

/* Create the file and allocate `bytes`, then write the header.  KV_ERR_FULL: no space. */
int kv_file_create(struct kv_queue *queue, const char *name, uint64_t bytes,
                   const struct kv_snapshot_header *header, struct kv_file_writer **out,
                   struct kv_why *why);
/* The next positions, up to end, from a context that holds them; they must be committed and may
 * not change meanwhile (a fork, or frozen). */
int kv_file_write_context(struct kv_file_writer *w, const struct kv_context *ctx, uint32_t end,
                          struct kv_why *why);
/* The next count positions, from memory.  Frames end at multiples of F: what does not fill one yet
 * waits for the next call, or a section, or the end.  (After it nothing comes: KV_ERR_ORDER.) */
int kv_file_write_rows(struct kv_file_writer *w, const uint32_t *ids, uint32_t count,
                       const struct iovec *rows, size_t n_rows, struct kv_why *why);
/* After the last position, kinds in rising order. */
int kv_file_write_section(struct kv_file_writer *w, enum kv_section kind, const void *data,
                          size_t len, struct kv_why *why);
/* Index and footer; returns when all bytes are with the operating system.  `sync` also asks the
 * disk.  The file is closed and the writer freed in any case.  *info's base_ids are NULL, its
 * frames are *frames, which the caller frees. */
int kv_file_finish(struct kv_file_writer *w, bool sync, struct kv_file_info *info,
                   struct kv_file_frame **frames, struct kv_why *why);
/* Give up: waits for what is under way, closes, frees.  The file itself stays. */
void kv_file_discard(struct kv_file_writer *w);

/* ---- f16 and q8 as f32 ---- */

/* Nonzero cancels, as in kv_store.h. */
typedef int kv_progress(void *arg, uint64_t done, uint64_t total);

struct kv_widen {
    struct kv_queue *from; /* the queue to read with */
    struct kv_queue *to;   /* the queue to write with, of a queue for f32 */
    const char *name;      /* must not exist; gone after an error */
    struct kv_digest ns;   /* with the precision f32 */
    kv_progress *progress; /* or NULL */
    void *arg;
};

/* Write a full snapshot's positions, exact, and its session to a file of a new id, and sync it.
 * Its logits stay behind: f32 KV gives others.  *info as from kv_file_finish(), its frames NULL.
 * KV_ERR_INVALID: it is f32, or a delta, or the name is there already. */
int kv_file_widen(struct kv_file *from, const struct kv_widen *to, struct kv_file_info *info,
                  struct kv_why *why);

#endif

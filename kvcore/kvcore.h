/* kvcore: paged, copy-on-write KV state with a prefix tree, forks and snapshots.
 *
 * A *position* is the index of a token in its context, and the K and V rows of every layer that
 * were computed for it.  A *page* holds a fixed run of positions for all layers, together with
 * their token ids.  A *context* is a list of pages and a length; forking one copies the list and no
 * page.  The *prefix tree* keeps frozen contexts by their token ids, so that a new prompt starts
 * from the longest one already computed.  A *snapshot* is a context serialised position by
 * position.
 *
 * What a page looks like (P = page_tokens, H = n_kv_heads, D = head_dim), offsets in kv_layout:
 *
 *   for each layer:  K  [H][P / 16][D][16]     a vector of lanes is 16 positions
 *                    KS [H][P / 16][D / 32][16]  q8 only: f16 scales of K
 *                    V  [P][H][D]
 *                    VS [H][P / 16][D / 32][16]  q8 only: f16 scales of V
 *   ids              [P] uint32
 *
 * What one position looks like outside memory (disk, wire), kv_position_bytes() long:
 *
 *   for each layer:  K [H][D], V [H][D]        in the cache's precision; in q8
 *                    K [H][D], KS [H][D / 32], V [H][D], VS [H][D / 32]
 *
 * An element is an IEEE 754 number of 4 or 2 bytes (f32, f16), or in q8 an int8 that stands for
 * itself times the scale of its 32 neighbours along D.  Scales of V stand like those of K, so that
 * those of 16 positions are widened at once.
 *
 * Threads: a context belongs to one thread at a time; a frozen context may be read and forked from
 * any. Everything on struct kv_cache may be called from any thread.  kvcore starts no thread of its
 * own.
 *
 * Errors: functions that can fail return 0 or a negative enum kv_error, and write their
 * out-parameters on success only.  Where a `struct kv_why *` is taken it may be NULL; on an error
 * it names the field and the value. */
#ifndef KVCORE_H
#define KVCORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

enum kv_error {
    KV_OK = 0,
    KV_ERR_FULL = -1,     /* no page: all are pinned or reserved, or the group's quota is used up */
    KV_ERR_BUSY = -2,     /* an append is open, or the context is frozen */
    KV_ERR_NOMEM = -3,    /* the host has no memory for bookkeeping */
    KV_ERR_INVALID = -4,  /* an argument is out of range */
    KV_ERR_FORMAT = -5,   /* bytes from outside are not what they claim to be */
    KV_ERR_CHECK = -6,    /* a CRC or a digest does not hold */
    KV_ERR_MISMATCH = -7, /* well formed, but of another model, geometry, namespace or request */
    KV_ERR_ORDER = -8,    /* a frame leaves a gap, overlaps, or lies past the declared bound */
    KV_ERR_LIMIT = -9,    /* a declared length is over its limit */
    KV_ERR_IO = -10,      /* the disk or the file system failed */
    KV_ERR_NOT_FOUND = -11,
};

/* A short English name of rc ("full", "busy", ...).  Never NULL. */
const char *kv_strerror(int rc);

/* Why something was refused, for a person to read: the field and the value. */
struct kv_why {
    char text[256];
};

/* Write a message, printf-like.  why may be NULL.  Returns rc, so that `return kv_fail(why, rc,
 * ...)`. */
int kv_fail(struct kv_why *why, int rc, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* Say where, printf-like, before what the message says already.  Returns rc. */
int kv_fail_in(struct kv_why *why, int rc, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* ---- Bounds.  Each stands here and nowhere else; all are checked before anything is allocated.
 * ---- */
enum {
    KV_PAGE_TOKENS_MIN = 16,
    KV_PAGE_TOKENS_MAX = 1024,
    KV_PAGE_TOKENS_DEFAULT = 64,
    KV_LANES = 16,      /* positions in one K group */
    KV_PAGE_ALIGN = 64, /* a page and every part of it begins at a multiple */
    KV_Q8_BLOCK = 32,   /* elements under one scale; q8 needs a head_dim that is a multiple */
    KV_MAX_HEAD_DIM = 4096,
    KV_MAX_POSITIONS = 16 * 1024 * 1024, /* of one context or snapshot */
    KV_MAX_POSITION_BYTES = 64 * 1024 * 1024,
    KV_FRAME_BYTES = 1024 * 1024, /* a frame's rows are at most this, or one position */
    KV_DIGEST_BYTES = 32,
    KV_SNAPSHOT_ID_BYTES = 16,
    KV_MAX_LOGITS = 1024 * 1024,        /* floats in a next-token logits section */
    KV_MAX_SESSION_BYTES = 1024 * 1024, /* of a session section */
    KV_MAX_GROUPS = 1024,               /* accounting groups (tenants) of one cache */
    KV_MAX_SHARDS = 16,                 /* of one cache */
};

/* ---- Geometry ---- */

enum kv_precision { KV_F32 = 0, KV_F16 = 1, KV_Q8 = 2 };

/* "f32", "f16", "q8"; NULL for anything else. */
const char *kv_precision_name(enum kv_precision precision);
/* The precision of that name, or a negative error. */
int kv_precision_parse(const char *name);

struct kv_geometry {
    uint32_t n_layers;
    uint32_t n_kv_heads;
    uint32_t head_dim;
    enum kv_precision precision;
};

/* KV_ERR_INVALID or KV_ERR_LIMIT (more than KV_MAX_POSITION_BYTES), naming the field. */
int kv_geometry_check(const struct kv_geometry *g, struct kv_why *why);
bool kv_geometry_equal(const struct kv_geometry *a, const struct kv_geometry *b);
/* Bytes of one position's rows, all layers. */
size_t kv_position_bytes(const struct kv_geometry *g);
/* F: the largest power of two with F * kv_position_bytes() <= KV_FRAME_BYTES, at least 1. */
uint32_t kv_frame_positions(const struct kv_geometry *g);

/* Where things stand in a page's bytes.  All offsets are multiples of 64. */
struct kv_layout {
    struct kv_geometry geometry;
    uint32_t page_tokens;
    size_t element_bytes; /* 4, 2 or 1 */
    size_t layer_bytes;   /* from one layer's K to the next layer's K */
    size_t k_head_bytes;  /* from one KV head's K to the next head's, in a layer */
    size_t v_offset;      /* from a layer's K to its V */
    size_t v_row_bytes;   /* from one position's V to the next position's, in a layer */
    size_t ks_offset;     /* from a layer's K to the scales of K, and of V; q8 only, else 0 */
    size_t vs_offset;
    size_t scales_head_bytes; /* from one KV head's scales to the next head's, of K as of V */
    size_t ids_offset;
    size_t page_bytes;
};

/* Fill *out.  KV_ERR_INVALID where page_tokens is not a power of two within the bounds. */
int kv_layout_init(struct kv_layout *out, const struct kv_geometry *g, uint32_t page_tokens,
                   struct kv_why *why);

/* ---- Namespaces: everything that decides whether KV may be shared ---- */

struct kv_digest {
    uint8_t bytes[KV_DIGEST_BYTES];
};

struct kv_namespace_fields {
    const char *tenant; /* NUL-terminated */
    const void *salt;
    size_t salt_len;
    struct kv_digest fingerprint; /* of the model */
    struct kv_digest numerics_id;
    enum kv_precision precision;
};

/* SHA-256 over the fields, each tagged and length-prefixed: two different field tuples never encode
 * to the same bytes. */
void kv_namespace_digest(const struct kv_namespace_fields *fields, struct kv_digest *out);

/* A namespace as the cache wants it: its digest, and the accounting group that its pages count for.
 */
struct kv_namespace {
    struct kv_digest digest;
    uint32_t group; /* 0..KV_MAX_GROUPS-1 */
};

/* ---- Cache: pages, their accounting and the prefix tree ---- */

struct kv_cache;
struct kv_context;

struct kv_cache_config {
    struct kv_geometry geometry;
    uint32_t page_tokens; /* 0: KV_PAGE_TOKENS_DEFAULT */
    uint32_t n_pages;     /* the budget: no more pages are ever live or reserved */
    bool arena;           /* one allocation at open, pre-faulted; else pages come from the heap */
    size_t bookkeeping_bytes; /* bound of the tree's nodes, edges, page lists and logits; 0: a 16th
                                 of the pages' bytes, at least 1 MiB */
    uint32_t n_shards;        /* threads on prefixes that begin with different ids, or of different
                                 namespaces, meet in one of n_shards locks: a power of two up to
                                 KV_MAX_SHARDS; 0: one where pages are few, else the most */
};

/* Open an empty cache.  KV_ERR_INVALID names the field; KV_ERR_NOMEM when the arena cannot be had
 * (the text says how many bytes were asked for). */
int kv_cache_open(const struct kv_cache_config *config, struct kv_cache **out, struct kv_why *why);
/* Every context must be closed.  NULL is fine. */
void kv_cache_close(struct kv_cache *cache);

const struct kv_layout *kv_cache_layout(const struct kv_cache *cache);

/* At most n_pages of the group may be live or reserved.  The default is the whole budget. */
int kv_cache_set_quota(struct kv_cache *cache, uint32_t group, uint32_t n_pages);

struct kv_stats {
    uint32_t n_pages; /* total = free + live */
    uint32_t n_free;  /* reserved ones included */
    uint32_t n_reserved;
    uint32_t n_live;
    uint32_t n_evictable; /* live, and held by entries of the tree only */
    uint32_t n_entries;
    uint32_t n_nodes;
    uint32_t n_contexts;
    size_t bookkeeping_bytes;
    uint64_t n_clones;  /* pages copied by a first write after a fork, since open */
    uint64_t n_evicted; /* pages taken back from the tree, since open */
    uint64_t n_hits;    /* matches of at least one position, since open */
    uint64_t n_misses;
};

void kv_cache_stats(struct kv_cache *cache, struct kv_stats *out);

/* Free min(n_pages, evictable) pages, oldest entries first, and return that number.  An entry that
 * cannot be cut goes whole, so somewhat more may come free. */
uint32_t kv_cache_trim(struct kv_cache *cache, uint32_t n_pages);

/* Stop mutators at one gate, walk everything, recompute every counter and check the tree's form.
 * 0, KV_ERR_CHECK with what does not hold, or KV_ERR_NOMEM.  Others may be inside any call but open
 * and close of the cache; they wait as long as the walk takes, some 0.2 us a page, node and entry.
 */
int kv_cache_check(struct kv_cache *cache, struct kv_why *why);

/* ---- Match ---- */

struct kv_match {
    uint32_t n_matched; /* positions that *out starts with */
    bool has_logits;    /* logits were written: match, entry and prompt have one length */
};

/* Fork the longest prefix of ids[0..n_ids) that the namespace's tree holds, and reserve slots up to
 * position reserve_to (>= n_ids), in one step.  On a miss *out is an empty context.  logits, if not
 * NULL, is float [n_logits] and receives the next-token logits where the whole prompt is an entry
 * that carries n_logits of them; otherwise at most n_ids - 1 positions match, so that one token is
 * left to run.  match may be NULL.  Errors: KV_ERR_FULL (nothing changed), KV_ERR_NOMEM,
 * KV_ERR_INVALID. */
int kv_cache_match(struct kv_cache *cache, const struct kv_namespace *ns, const uint32_t *ids,
                   uint32_t n_ids, uint32_t reserve_to, float *logits, uint32_t n_logits,
                   struct kv_context **out, struct kv_match *match);

/* The length that kv_cache_match() without logits would find now; changes nothing, a hint only. */
uint32_t kv_cache_peek(struct kv_cache *cache, const struct kv_namespace *ns, const uint32_t *ids,
                       uint32_t n_ids);

/* ---- Contexts ---- */

/* An empty live context with no reservation. */
int kv_context_open(struct kv_cache *cache, const struct kv_namespace *ns, struct kv_context **out);

/* Give back one reference (a live context has one), aborting an open append; the last ends the
 * reservation and lets go of the pages.  NULL is fine. */
void kv_context_close(struct kv_context *ctx);

/* Hold slots so that the context can grow to n_positions in all.  A smaller n than before is a
 * no-op. KV_ERR_FULL changes nothing.  KV_ERR_BUSY: an append is open, or frozen. */
int kv_context_reserve(struct kv_context *ctx, uint32_t n_positions);

/* Begin an append of n positions with these ids: their pages are writable until commit or abort.
 * Reserves what is not reserved yet.  Between begin and its end every other mutating call is
 * KV_ERR_BUSY.  The rows' bytes are zero, or stale rows of an aborted append, until written. */
int kv_context_begin(struct kv_context *ctx, const uint32_t *ids, uint32_t n);
/* Keep the first k of the n positions; unused pages go back into the reservation. */
int kv_context_commit(struct kv_context *ctx, uint32_t k);
int kv_context_abort(struct kv_context *ctx);

/* Committed positions. */
uint32_t kv_context_length(const struct kv_context *ctx);
/* Copy ids [first, first + n) into out; the range must be committed. */
int kv_context_ids(const struct kv_context *ctx, uint32_t first, uint32_t n, uint32_t *out);

/* Pages that the context holds now, those of an open append included. */
uint32_t kv_context_n_pages(const struct kv_context *ctx);
/* The bytes of page i (kv_layout).  Valid until the context is next changed.  Only positions of an
 * open append may be written. */
unsigned char *kv_context_page(const struct kv_context *ctx, uint32_t i);

/* A new live context on the first n positions.  Takes no page.  The parent may be frozen (then from
 * any thread) or live (owner only). */
int kv_context_fork(struct kv_context *ctx, uint32_t n, struct kv_context **out);

/* One way: from now on the context never changes, and any thread may fork it or hold a reference.
 */
int kv_context_freeze(struct kv_context *ctx);
/* Another reference to a frozen context, to be given back by kv_context_close(). */
struct kv_context *kv_context_ref(struct kv_context *ctx);

/* Drop the positions from n on.  Ends the reservation. */
int kv_context_truncate(struct kv_context *ctx, uint32_t n);

/* Replace the rows of one committed position by others than its ids give: rows is position-major,
 * kv_position_bytes() long.  A page that others hold is cloned first, into a slot beside the
 * reservation (KV_ERR_FULL, KV_ERR_NOMEM: nothing changed).  From the first such position on the
 * context is tainted: publish, give-up and encoders stop before it, forks past it are tainted too,
 * and a truncation to it or below ends that.  KV_ERR_BUSY as for truncate. */
int kv_context_overwrite(struct kv_context *ctx, uint32_t position, const void *rows);

/* Enter the context into its namespace's tree and keep it: whole pages only while it is live, all
 * of it once frozen.  logits is float [n_logits], the next-token logits after the last position, or
 * NULL with 0; kept only where the entry's key is the whole context.  Returns 0 also where
 * bookkeeping has no room for the entry (nothing is entered then). */
int kv_context_publish(struct kv_context *ctx, const float *logits, uint32_t n_logits);
/* As publish, with the tail, and close: the pages move into the tree.  KV_ERR_BUSY and
 * KV_ERR_INVALID leave the context open; in every other case it is closed, also where KV_ERR_NOMEM
 * says that nothing was entered. */
int kv_context_give_up(struct kv_context *ctx, const float *logits, uint32_t n_logits);

/* Copy rows [first, first + n) position-major into dst, n * kv_position_bytes() bytes.  The range
 * must be committed. */
int kv_context_gather(const struct kv_context *ctx, uint32_t first, uint32_t n, void *dst);
/* The reverse, into positions of the open append.  The bytes come in pieces of any size whose
 * lengths add up to n * kv_position_bytes(); they are copied as they are. */
int kv_context_scatter(struct kv_context *ctx, uint32_t first, uint32_t n, const struct iovec *src,
                       size_t n_src);

/* ---- Snapshot codec: docs/snapshot-format.md.  Bytes to structs and back, nothing else. ---- */

/* D(0) = SHA-256(namespace), D(p) = SHA-256(D(last multiple of F below p), ids from there to p).
 * Feed ids in order; read the digest at any point. */
struct kv_prefix {
    struct kv_digest border; /* D at the last multiple of F at or below n */
    uint32_t frame_positions;
    uint32_t n;
    uint32_t *ids; /* ids since the border, [frame_positions]; owned */
};

int kv_prefix_init(struct kv_prefix *p, const struct kv_digest *ns, uint32_t frame_positions);
void kv_prefix_release(struct kv_prefix *p);
void kv_prefix_feed(struct kv_prefix *p, const uint32_t *ids, uint32_t n);
void kv_prefix_digest(const struct kv_prefix *p, struct kv_digest *out);

struct kv_snapshot_header {
    uint8_t snapshot_id[KV_SNAPSHOT_ID_BYTES]; /* random */
    struct kv_digest fingerprint;
    struct kv_digest ns;
    struct kv_digest numerics_id;
    struct kv_geometry geometry;
    uint32_t frame_positions; /* F; must be kv_frame_positions(&geometry) */
    uint32_t base;            /* first position that frames carry; 0: a full snapshot */
    uint8_t parent_id[KV_SNAPSHOT_ID_BYTES]; /* zero unless a delta on disk */
    struct kv_digest base_digest;            /* D(base); an encoder computes it */
    uint32_t n_bound;                        /* no position at or past this follows */
    const uint32_t *base_ids;                /* [base]; borrowed */
};

struct kv_seal {
    uint32_t n_positions; /* base + those of the frames */
    uint32_t n_frames;
    uint32_t n_sections;
    struct kv_digest root;
};

/* Section kinds. */
enum kv_section { KV_SECTION_LOGITS = 1, KV_SECTION_SESSION = 2 };

/* Writes the records of one snapshot in order: header, frames, sections, seal. */
struct kv_encoder;

/* ns etc. as in the header, which is copied.  KV_ERR_INVALID names the field. */
int kv_encoder_open(const struct kv_snapshot_header *header, struct kv_encoder **out,
                    struct kv_why *why);
void kv_encoder_close(struct kv_encoder *e);
size_t kv_encoder_header_bytes(const struct kv_encoder *e);
void kv_encoder_header(struct kv_encoder *e, void *dst);

/* The next frame goes from kv_encoder_next() to at most the next absolute multiple of F.  How many
 * positions it takes when the context has n committed ones: up to the border, or to n where `flush`
 * (a seal or a pause follows); 0 if the frame is not full yet. */
uint32_t kv_encoder_next(const struct kv_encoder *e);
uint32_t kv_encoder_frame_count(const struct kv_encoder *e, uint32_t n, bool flush);
size_t kv_encoder_frame_bytes(const struct kv_encoder *e, uint32_t count);
/* Gather `count` positions from ctx into the next frame record at dst.  KV_ERR_INVALID: more than
 * are committed or than the frame may take.  KV_ERR_MISMATCH: ctx has another geometry, namespace,
 * or other ids below the base.  KV_ERR_ORDER: after a section or the seal. */
int kv_encoder_frame(struct kv_encoder *e, const struct kv_context *ctx, uint32_t count, void *dst);
/* The same from memory: ids [count], rows position-major in pieces that add up to count positions
 * (else KV_ERR_INVALID).  Whose rows they are is the caller's to know. */
int kv_encoder_frame_rows(struct kv_encoder *e, const uint32_t *ids, const struct iovec *rows,
                          size_t n_rows, uint32_t count, void *dst);

size_t kv_encoder_section_bytes(size_t len);
/* After the last frame, each kind at most once and in rising order (else KV_ERR_ORDER). */
int kv_encoder_section(struct kv_encoder *e, enum kv_section kind, const void *data, size_t len,
                       void *dst);
size_t kv_encoder_seal_bytes(void);
void kv_encoder_seal(struct kv_encoder *e, void *dst, struct kv_seal *out);

/* Reads the records of one snapshot in order and verifies each before it shows anything of it. */
struct kv_decoder;

struct kv_frame {
    uint32_t first;
    uint32_t count;
    const uint32_t *ids; /* [count]; the decoder's, valid until its next call */
    size_t rows_offset;  /* of the rows in the record's bytes */
    size_t rows_bytes;
    struct kv_digest digest; /* D(first + count) */
};

/* What the receiver expects; a header that says otherwise is KV_ERR_MISMATCH naming field and both
 * values.  expect->snapshot_id and parent_id are not compared; n_bound is the most it may declare;
 * frame_positions follows from the geometry and is not read; base_digest is read only where base is
 * not 0 and base_ids is NULL. */
int kv_decoder_open(const struct kv_snapshot_header *expect, struct kv_decoder **out);
void kv_decoder_close(struct kv_decoder *d);
/* The header that came, its base_ids NULL; NULL before it. */
const struct kv_snapshot_header *kv_decoder_snapshot(const struct kv_decoder *d);
/* Positions that are verified so far, those below the base included: where the next frame begins.
 */
uint32_t kv_decoder_next(const struct kv_decoder *d);

/* Records come as pieces, in order, so that nothing is copied into one buffer first.  One that is
 * refused changes nothing: the decoder is where it was before. */
int kv_decoder_header(struct kv_decoder *d, const struct iovec *src, size_t n_src,
                      struct kv_why *why);
int kv_decoder_frame(struct kv_decoder *d, const struct iovec *src, size_t n_src,
                     struct kv_frame *out, struct kv_why *why);
/* *data points into a copy that the decoder owns, valid until the next call. */
int kv_decoder_section(struct kv_decoder *d, const struct iovec *src, size_t n_src,
                       enum kv_section *kind, const void **data, size_t *len, struct kv_why *why);
int kv_decoder_seal(struct kv_decoder *d, const struct iovec *src, size_t n_src,
                    struct kv_seal *out, struct kv_why *why);

/* The bytes [offset, offset + len) of pieces, as pieces: for kv_context_scatter() of a frame's
 * rows. dst has room for n_src; returns how many it takes, 0 where the range is empty or not there.
 */
size_t kv_pieces(const struct iovec *src, size_t n_src, size_t offset, size_t len,
                 struct iovec *dst);

/* CRC-32C (Castagnoli), as iSCSI uses it, continued from crc (0 to start). */
uint32_t kv_crc32c(uint32_t crc, const void *data, size_t len);

#endif

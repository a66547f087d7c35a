/* The snapshot store: a directory of snapshot files that refer to each other.
 *
 * A *snapshot* here is a file of its own, or a *delta*: the positions from a base on, with a parent
 * that has those below.  Saving finds by itself the stored snapshot that has the longest prefix of
 * the context, so a conversation that is saved each turn, or a fork of it, costs its new positions.
 * A chain is at most max_depth files deep; what would be deeper is written in full.
 *
 * A snapshot that is deleted while others stand on it is *retired*: not listed, not restored, and
 * gone with the last of them.
 *
 * Durability: NONE says nothing about a power cut but that a damaged snapshot is refused;
 * PUBLISHED, that a snapshot found under its name is whole; DURABLE, that after save returned it is
 * there.  A failed sync fails the save and is never tried again.
 *
 * Files: ID.kv, and ID.base once retired; ID.tmp while it is written; all 0600.  ID is the snapshot
 * id in hex.  mtime is the last use, which the time to live counts from.  The index is rebuilt from
 * the files when the store is opened; a file that cannot be read is reported and left alone.
 *
 * Threads: all calls from any thread; each waits for one of n_queues queues where it reads or
 * writes files, under no lock.  Only changes of names wait for each other.  A context that is saved
 * must not change meanwhile: give a fork. */
#ifndef KV_STORE_H
#define KV_STORE_H

#include "kvcore/kvcore.h"

struct kv_store;
struct kv_disk;

enum kv_durability { KV_DURABLE = 0, KV_PUBLISHED = 1, KV_NONE = 2 };

/* "durable", "published", "none"; NULL for anything else.  Parse: the value, or a negative error.
 */
const char *kv_durability_name(enum kv_durability d);
int kv_durability_parse(const char *name);

enum {
    KV_STORE_DEPTH_DEFAULT = 32, /* files in a chain */
    KV_STORE_DEPTH_MAX = 256,
    KV_STORE_MAX_SNAPSHOTS = 65536,
    KV_STORE_QUEUES_DEFAULT = 2,
};

struct kv_store_config {
    const char *directory;        /* made where it is not there */
    struct kv_geometry geometry;  /* of what is saved and restored */
    struct kv_digest fingerprint; /* of the model */
    struct kv_digest numerics_id;
    uint64_t budget_bytes; /* of all files, temporaries included; 0: no bound but the disk's */
    uint64_t ttl_ns;       /* since the last use; 0: for ever */
    uint32_t max_depth;    /* 0: the default */
    uint32_t n_queues;     /* 0: the default */
    enum kv_durability durability;
    struct kv_disk *disk; /* used instead of the directory, and closed with the store or where it
                             cannot be opened; NULL: none */
    /* Told of each file that is left alone when the store is opened, and why; or NULL. */
    void (*left_alone)(void *arg, const char *name, const char *why);
    void *arg;
};

/* Reads the headers, indexes and footers of all files, sweeps temporaries, retired files without
 * children and expired ones.  KV_ERR_IO, KV_ERR_INVALID name field and value. */
int kv_store_open(const struct kv_store_config *config, struct kv_store **out, struct kv_why *why);
/* No call may be under way. */
void kv_store_close(struct kv_store *store);
/* How it does I/O here, for the log: "io_uring, O_DIRECT, registered buffers", ... */
const char *kv_store_describe(const struct kv_store *store);

struct kv_snapshot_id {
    uint8_t bytes[KV_SNAPSHOT_ID_BYTES];
};

enum { KV_SNAPSHOT_ID_TEXT = 2 * KV_SNAPSHOT_ID_BYTES + 1 };
void kv_snapshot_id_print(const struct kv_snapshot_id *id, char text[KV_SNAPSHOT_ID_TEXT]);
int kv_snapshot_id_parse(const char *text, struct kv_snapshot_id *out);

struct kv_snapshot_info {
    struct kv_snapshot_id id;
    struct kv_snapshot_id parent; /* zero: none */
    struct kv_digest ns;
    struct kv_geometry geometry;
    uint32_t base;
    uint32_t n_positions;
    uint32_t depth;      /* 1: a full one */
    uint32_t n_children; /* deltas that stand on it */
    uint32_t n_logits;   /* floats; 0: none */
    uint32_t session_bytes;
    uint64_t file_bytes;
    uint64_t used_ns; /* last use, since 1970 */
};

/* How far a call got, in bytes; called on its thread, at most every frame.  Nonzero cancels. */
typedef int kv_progress(void *arg, uint64_t done, uint64_t total);

struct kv_save {
    struct kv_context *ctx; /* all committed positions, up to a taint; a fork or frozen */
    const float *logits;    /* [n_logits] after the last position, or NULL */
    uint32_t n_logits;
    const void *session; /* [session_len], or NULL */
    size_t session_len;
    bool full; /* no delta */
    /* Deleted (or retired) in the same step once this one stands; NULL: none. */
    const struct kv_snapshot_id *replaces;
    kv_progress *progress; /* or NULL */
    void *arg;
};

/* Save.  The exact length is reserved in the budget and allocated on disk first: KV_ERR_FULL names
 * what is missing.  KV_ERR_IO; KV_ERR_INVALID (no position, geometry of another kind); KV_ERR_BUSY:
 * cancelled.  After an error nothing is left of it. */
int kv_store_save(struct kv_store *store, const struct kv_save *save, struct kv_snapshot_info *out,
                  struct kv_why *why);

struct kv_restore {
    struct kv_snapshot_id id;
    struct kv_cache *cache;
    struct kv_namespace ns; /* must be the snapshot's */
    uint32_t n_positions;   /* the first so many; 0: all */
    uint32_t reserve_to;    /* as kv_cache_match(); 0: no more than what is restored */
    float *logits; /* [n_logits], or NULL; filled where all is restored and it has as many */
    uint32_t n_logits;
    kv_progress *progress;
    void *arg;
};

struct kv_restored {
    struct kv_context *ctx; /* live, the caller's; publish it to have it matched */
    bool has_logits;
    void *session; /* [session_len], to be freed by the caller; NULL: none */
    size_t session_len;
};

/* All verified, or nothing.  KV_ERR_NOT_FOUND; KV_ERR_MISMATCH names field and both values;
 * KV_ERR_FORMAT, KV_ERR_CHECK name the file's part; KV_ERR_FULL as for kv_context_reserve(). */
int kv_store_restore(struct kv_store *store, const struct kv_restore *restore,
                     struct kv_restored *out, struct kv_why *why);

/* The session section alone, to be freed by the caller; NULL with 0: it has none. */
int kv_store_session(struct kv_store *store, const struct kv_snapshot_id *id, void **session,
                     size_t *len, struct kv_why *why);

/* What is stored and not retired, in no order: up to n_out are written, returned is how many there
 * are.  ns NULL: of all namespaces. */
uint32_t kv_store_list(struct kv_store *store, const struct kv_digest *ns,
                       struct kv_snapshot_info *out, uint32_t n_out);
int kv_store_find(struct kv_store *store, const struct kv_snapshot_id *id,
                  struct kv_snapshot_info *out);

/* Delete, or retire where deltas stand on it. */
int kv_store_delete(struct kv_store *store, const struct kv_snapshot_id *id, struct kv_why *why);

/* Read and check every byte of the snapshot and of those that it stands on. */
int kv_store_verify(struct kv_store *store, const struct kv_snapshot_id *id, kv_progress *progress,
                    void *arg, struct kv_why *why);

/* Write the snapshot in full in place of the delta: it keeps its id and children.  One that is full
 * stays as it is. */
int kv_store_compact(struct kv_store *store, const struct kv_snapshot_id *id, kv_progress *progress,
                     void *arg, struct kv_why *why);

/* Delete what is past its time to live; returns how many. */
uint32_t kv_store_sweep(struct kv_store *store);

struct kv_store_stats {
    uint32_t n_snapshots;
    uint32_t n_retired;
    uint32_t n_unreadable; /* files that were left alone when the store was opened */
    uint64_t bytes;        /* of all files, reservations included */
    uint64_t budget_bytes;
    uint64_t n_saved, bytes_saved; /* since open */
    uint64_t n_restored, bytes_restored;
    uint64_t n_failed; /* saves and restores */
    uint64_t n_expired;
    enum kv_durability durability;
};

void kv_store_stats(struct kv_store *store, struct kv_store_stats *out);

#endif

/* The store as its files see it: kv_store.c (open, index, queues), kv_store_names.c (delete,
 * retire, sweep), kv_store_save.c, kv_store_chain.c (restore, verify, compact).
 *
 * Two locks.  `lock` guards what is in memory and is never held during I/O.  `names` is held while
 * names in the directory change, sync of the directory included, so that these happen one after the
 * other; it is taken before `lock`. */
#ifndef KV_STORE_INDEX_H
#define KV_STORE_INDEX_H

#include "kvcore/kv_file.h"
#include "kvcore/kv_store.h"

#include <pthread.h>

enum {
    KV_STORE_NAME_BYTES = KV_SNAPSHOT_ID_TEXT + 8,
    KV_STORE_MIN_SHARED = 16, /* positions: less is not worth a parent */
};

/* A file of the store.  Its frames' ends and digests are kept to find what a context shares. */
struct kv_stored {
    struct kv_snapshot_info info; /* depth and n_children are made up when asked for */
    struct kv_digest fingerprint;
    struct kv_digest numerics_id;
    struct kv_digest base_digest;
    struct kv_stored *parent; /* NULL: full */
    uint32_t n_children;      /* saves under way included */
    bool retired;
    bool dangling;                /* only while the index is built */
    struct kv_file_frame *frames; /* [n_frames] */
    uint32_t n_frames;
};

struct kv_store {
    struct kv_store_config config;
    struct kv_disk *disk;

    pthread_mutex_t names;
    pthread_mutex_t lock;
    pthread_cond_t queue_free;
    /* Guarded by lock. */
    struct kv_stored **files; /* [n_files] by id */
    uint32_t n_files;
    uint32_t cap;
    struct kv_queue **queues; /* [n_queues], those that nobody uses */
    uint32_t n_queues;
    uint32_t n_out; /* queues in use */
    struct kv_store_stats stats;
};

/* A file that is there, retired or not; NULL.  Wants the lock. */
struct kv_stored *kv_stored_find(const struct kv_store *store, const struct kv_snapshot_id *id);
uint32_t kv_stored_depth(const struct kv_stored *s);
void kv_stored_name(const struct kv_stored *s, char name[KV_STORE_NAME_BYTES]);
/* Fill from an open file; NULL: no memory. */
struct kv_stored *kv_stored_new(const struct kv_file_info *info, uint64_t used_ns);
void kv_stored_free(struct kv_stored *s);
struct kv_snapshot_info kv_stored_info(const struct kv_stored *s);
/* Room for one more, so that adding cannot fail.  Wants the lock. */
int kv_store_room(struct kv_store *store);
void kv_store_add(struct kv_store *store, struct kv_stored *s);
void kv_store_drop(struct kv_store *store, struct kv_stored *s);

/* A queue, waiting for one; given back by kv_store_leave(). */
int kv_store_enter(struct kv_store *store, struct kv_queue **out, struct kv_why *why);
void kv_store_leave(struct kv_store *store, struct kv_queue *queue);

/* Take bytes of the budget, after an expiry where they are not there; KV_ERR_FULL. */
int kv_store_take(struct kv_store *store, uint64_t bytes, struct kv_why *why);
void kv_store_give(struct kv_store *store, uint64_t bytes);

/* Under `names`: sync the directory where the durability asks for it. */
int kv_store_sync_names(struct kv_store *store, struct kv_why *why);
/* Under `names`: s has no children any more; remove it, and the retired ones that this leaves
 * without. */
int kv_store_remove(struct kv_store *store, struct kv_stored *s, struct kv_why *why);
/* Under `names`: the child went (or never came); a retired parent without children goes too. */
void kv_store_release_parent(struct kv_store *store, struct kv_stored *parent);

#endif

/* The I/O thread: it owns the snapshot store, and all that waits for the disk is left to it as
 * calls, worked off one at a time; those that a turn waits for come first.  While one is at work,
 * the others' deadlines and cancellations are still seen.
 *
 * A save (decode_save.c) takes the context from the prefix tree, as the next turn would, and holds
 * its pages until it is done; the session goes on meanwhile.  Where nothing of it is left in the
 * tree, its first position is computed again, since a snapshot has at least one; ids without KV are
 * in the session section.  A restore (decode_restore.c) fills a context of its own and then, in one
 * step each, publishes it to the tree and gives the ids to the session.
 *
 * By itself the thread saves sessions that were not used for a while, ends snapshots that are past
 * their time, and, where that was asked for, saves what is left when the node stops. */
#ifndef DECODE_STORE_H
#define DECODE_STORE_H

#include "decode/decode_request.h"

enum {
    /* Progress is told no more often. */
    DECODE_PROGRESS_MS = 100,
    /* What waits is looked at while another is at work. */
    DECODE_STORE_TICK_MS = 20,
    /* How often idle and expired ones are looked for. */
    DECODE_STORE_ROUND_MS = 500,
    /* A turn whose session finds no pages while others run is tried again. */
    DECODE_STORE_RETRY_MS = 50,
    DECODE_LIST_SNAPSHOTS = 1000,
    /* What is done now cannot be done yet; no transport_status. */
    DECODE_AGAIN = -1,
};

struct decode_store {
    struct decode_node *node;
    struct kv_store *kv;
    struct node_inbox inbox; /* of struct decode_mail: calls */
    atomic_bool stopping;

    /* The thread's. */
    struct node_link *waiting, **last;
    struct decode_request *at_work; /* NULL: what the thread does by itself */
    int64_t until_ns;               /* that has to be done by then */
    int64_t looked_ns, told_ns, round_ns, sweep_ns;
};

/* Open the directory, and make its sessions known by name.  0, or -1 with *why; *out is NULL where
 * the options name no directory. */
int decode_store_open(struct decode_node *node, struct decode_store **out, struct kv_why *why);
/* The thread must have ended.  NULL is fine. */
void decode_store_close(struct decode_store *s);
/* Leave a call to the thread.  A Generate comes back to the front queue, its session in memory. */
void decode_store_put(struct decode_store *s, struct decode_request *r);
void *decode_store_run(void *store); /* thread */
/* No call is left and none will come: save what is left, if so configured, and end. */
void decode_store_stop(struct decode_store *s);

/* ---- The service (decode_snapshots.c) ---- */

/* Front worker: check a call of the service, and leave it to the thread, or answer it. */
void decode_snapshots_front(struct decode_node *node, struct decode_request *r);
/* Whether a method answers with a stream of SnapshotReply. */
bool decode_snapshots_streams(enum decode_method method);

/* ---- For the files that do the work.  Statuses are transport's, or DECODE_AGAIN. ---- */

/* What came of a call. */
struct decode_stored {
    struct kv_snapshot_info info;
    char session[NODE_SESSION_NAME + 1];
    uint64_t bytes, ns;
};

void decode_reply_progress(struct decode_request *r, uint64_t done, uint64_t total);
/* The last reply, the status, and the end of the request. */
void decode_reply_stored(struct decode_request *r, const struct decode_stored *d);
/* A kv_progress: tells the caller of what is at work, looks at those who wait, and cancels. */
int decode_store_progress(void *store, uint64_t done, uint64_t total);
/* The status for a kv_error. */
int decode_store_status(const struct decode_store *s, int rc);
void decode_store_namespace(const struct decode_store *s, const struct node_salt *salt,
                            struct kv_namespace *out);

/* Save a session; where its snapshot is current, unless `full`, that is it. */
int decode_store_save(struct decode_store *s, const char *name, bool full, bool leave,
                      struct decode_stored *out, struct kv_why *why);

/* Read what a snapshot says of its session, which may be another model's; release it. */
int decode_store_read(struct decode_store *s, const struct kv_snapshot_info *info,
                      struct node_session *out, struct kv_why *why);
/* Restore what a snapshot holds into a busy session. */
int decode_store_restore(struct decode_store *s, const struct kv_snapshot_id *id,
                         struct decode_session *session, struct decode_stored *out,
                         struct kv_why *why);
/* The same, and begin or take the session: of the name that it was saved by where name is "". */
int decode_store_restore_as(struct decode_store *s, const struct kv_snapshot_id *id,
                            const char *name, struct decode_stored *out, struct kv_why *why);

#endif

/* Sessions: named conversations.  A session stores ids, never text, and no KV: between turns its
 * context is in the prefix tree, where the next turn finds it again, or, if it was evicted,
 * computes it again to the same bits.  The last id is pending: it was sampled and shown, its KV is
 * not computed; it runs first in the next turn, being the first id that does not match.
 *
 * A session is in memory, or on disk, or both:
 *
 *   in memory   ids and salt are here; with a snapshot, which is current where no turn has ended
 *               since it was written
 *   on disk     only the name and the snapshot's id are here; who takes it restores it first
 *
 * One owner: from take to give back a session is busy.  Its ids change with the lock held, and only
 * by its owner: so the owner may read them at any time, others with the lock held. */
#ifndef DECODE_SESSION_H
#define DECODE_SESSION_H

#include "kvcore/kv_store.h"
#include "model/model.h"
#include "node/node.h"

#include <pthread.h>

enum {
    DECODE_SESSION_BUCKETS = 4096,
    /* A session that could not be saved when it was idle is not tried again before. */
    DECODE_SAVE_AGAIN_MS = 30000,
};

struct decode_session {
    char name[NODE_SESSION_NAME + 1];
    struct token_list ids;
    struct node_salt salt; /* of the last turn: with the tenant it makes the namespace */
    /* Guarded by the table's lock. */
    struct decode_session *next; /* in its bucket */
    uint64_t serial;             /* no two sessions of a table have the same */
    bool busy;
    bool kept;     /* a turn has been stored */
    bool resident; /* in memory; it changes only while busy, or from true to false when it is not */
    bool stored;   /* on disk, as `snapshot` */
    struct kv_snapshot_id snapshot;
    uint64_t version, saved_version; /* equal: the snapshot is current */
    uint32_t n_ids;
    int64_t used_ns;
    int64_t try_ns; /* not to be saved for being idle before */
};

struct decode_sessions {
    pthread_mutex_t lock;
    /* Guarded by lock. */
    struct decode_session *buckets[DECODE_SESSION_BUCKETS];
    uint32_t n_resident, max; /* max: of those in memory */
    uint32_t n_disk_only;
    uint64_t last_serial;
    uint64_t last_version; /* no two turns of any sessions have the same */
};

int decode_sessions_init(struct decode_sessions *t, uint32_t max); /* 0 or -1 */
void decode_sessions_release(struct decode_sessions *t);

enum decode_take {
    DECODE_TAKE_OR_BEGIN, /* a new one where there is none of that name */
    DECODE_TAKE_KNOWN,    /* NOT_FOUND */
    DECODE_TAKE_ABSENT,   /* ALREADY_EXISTS where one of that name is in memory */
};
/* The session of that name, busy; where it is on disk alone, for decode_sessions_fill().
 * TRANSPORT_OK; FAILED_PRECONDITION: in use; RESOURCE_EXHAUSTED: the table is full (sessions that
 * are on disk as they are leave memory for new ones). */
int decode_sessions_take(struct decode_sessions *t, const char *name, enum decode_take how,
                         struct decode_session **out, struct kv_why *why);
/* Give it back.  With ids, a turn has ended: these are its ids from now on (*ids is emptied), and
 * salt the turn's; with NULL it is as it was before, and gone if there was nothing.  session may be
 * NULL. */
void decode_sessions_give_back(struct decode_sessions *t, struct decode_session *session,
                               struct token_list *ids, const void *salt, size_t salt_len);
/* A busy one that was not in memory is from now on: what was restored.  *ids is emptied. id: the
 * snapshot that is this session on disk, NULL where none is. */
void decode_sessions_fill(struct decode_sessions *t, struct decode_session *session,
                          struct token_list *ids, const struct node_salt *salt,
                          const struct kv_snapshot_id *id);
/* End a busy session; keep: what is on disk of it stays, and is the session from now on. */
void decode_sessions_drop(struct decode_sessions *t, struct decode_session *session, bool keep);

/* ---- Disk ---- */

/* A session on disk, when the node starts.  false: no memory, or there is one already. */
bool decode_sessions_add(struct decode_sessions *t, const char *name,
                         const struct kv_snapshot_id *id, uint32_t n_ids);

/* What a session was after its last turn. */
struct decode_session_copy {
    char name[NODE_SESSION_NAME + 1];
    struct token_list ids; /* the caller's to release; empty where current */
    struct node_salt salt;
    uint64_t serial, version;
    bool stored, current; /* current: its snapshot is all of it */
    struct kv_snapshot_id snapshot;
};
/* Busy or not.  TRANSPORT_OK; NOT_FOUND; FAILED_PRECONDITION: no turn has ended yet;
 * RESOURCE_EXHAUSTED: no memory. */
int decode_sessions_copy(struct decode_sessions *t, const char *name,
                         struct decode_session_copy *out, struct kv_why *why);
/* That version of it is on disk as id.  leave: it leaves memory if that is still all of it and
 * nobody uses it.  false: it has ended meanwhile, so nobody wants the snapshot. */
bool decode_sessions_saved(struct decode_sessions *t, const struct decode_session_copy *copy,
                           const struct kv_snapshot_id *id, bool leave);
/* The snapshot is gone: a session that is only there, too. */
void decode_sessions_unsaved(struct decode_sessions *t, const struct kv_snapshot_id *id);
/* A session to save now: unused since before idle_ns, and not named for DECODE_SAVE_AGAIN_MS; or,
 * where idle_ns is INT64_MAX, any that no snapshot has as it is, each once.  false: none. */
bool decode_sessions_idle(struct decode_sessions *t, int64_t idle_ns,
                          char name[NODE_SESSION_NAME + 1]);
/* Call each for every session that is on disk, with the lock held. */
void decode_sessions_stored(struct decode_sessions *t,
                            void (*each)(void *arg, const char *name,
                                         const struct kv_snapshot_id *id),
                            void *arg);

/* ---- For Describe and ListSessions ---- */

struct decode_session_info {
    char name[NODE_SESSION_NAME + 1];
    uint32_t n_ids;
    bool busy;
    bool saved; /* its snapshot is current */
    uint64_t idle_ns;
};

/* Copy at most max of those in memory into out; returns how many. */
uint32_t decode_sessions_list(struct decode_sessions *t, struct decode_session_info *out,
                              uint32_t max);
/* Those in memory that no snapshot has as they are. */
uint32_t decode_sessions_count_unsaved(struct decode_sessions *t);
void decode_sessions_count(struct decode_sessions *t, uint32_t *n_resident, uint32_t *n_disk_only);

#endif

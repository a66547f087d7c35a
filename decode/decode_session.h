/* Sessions: named conversations.  A session stores ids, never text, and no KV: between turns its
 * context is in the prefix tree, where the next turn finds it again, or, if it was evicted,
 * computes it again to the same bits.  The last id is pending: it was sampled and shown, its KV is
 * not computed; it runs first in the next turn, being the first id that does not match.
 *
 * One owner: from take to give back a session is busy, and its ids belong to who took it. */
#ifndef DECODE_SESSION_H
#define DECODE_SESSION_H

#include "model/model.h"

#include <pthread.h>

enum { DECODE_SESSION_NAME = 128 };

struct decode_session {
    char name[DECODE_SESSION_NAME + 1];
    struct token_list ids; /* the owner's while busy */
    /* Guarded by the table's lock. */
    bool busy;
    bool kept; /* a turn has been stored */
    uint32_t n_ids;
    int64_t used_ns;
};

struct decode_sessions {
    pthread_mutex_t lock;
    /* Guarded by lock. */
    struct decode_session **items; /* [max] */
    uint32_t n, max;
};

int decode_sessions_init(struct decode_sessions *t, uint32_t max); /* 0 or -1 */
void decode_sessions_release(struct decode_sessions *t);
/* Whether a name is one: 1 to 128 bytes of [A-Za-z0-9._-]. */
bool decode_session_name_ok(const char *name, size_t n);
/* The session of that name, or a new one, busy.  TRANSPORT_OK; FAILED_PRECONDITION: in use;
 * RESOURCE_EXHAUSTED: the table is full. */
int decode_sessions_take(struct decode_sessions *t, const char *name, struct decode_session **out,
                         struct kv_why *why);
/* Give it back.   With ids, these are its ids from now on (*ids is emptied);
 * with NULL it is as it was before, and gone if it had no turn yet.  session may be NULL. */
void decode_sessions_give_back(struct decode_sessions *t, struct decode_session *session,
                               struct token_list *ids);
/* TRANSPORT_OK, NOT_FOUND or FAILED_PRECONDITION (in use). */
int decode_sessions_close(struct decode_sessions *t, const char *name, struct kv_why *why);

struct decode_session_info {
    char name[DECODE_SESSION_NAME + 1];
    uint32_t n_ids;
    bool busy;
    uint64_t idle_ns;
};

/* Copy at most max into out; returns how many. */
uint32_t decode_sessions_list(struct decode_sessions *t, struct decode_session_info *out,
                              uint32_t max);
uint32_t decode_sessions_count(struct decode_sessions *t);

#endif

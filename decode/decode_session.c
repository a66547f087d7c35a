#include "decode/decode_session.h"

#include "transport/transport.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

int decode_sessions_init(struct decode_sessions *t, uint32_t max)
{
    memset(t, 0, sizeof(*t));
    t->max = max;
    return pthread_mutex_init(&t->lock, NULL) == 0 ? 0 : -1;
}

static void session_free(struct decode_session *s)
{
    token_list_release(&s->ids);
    free(s);
}

void decode_sessions_release(struct decode_sessions *t)
{
    for (size_t i = 0; i < DECODE_SESSION_BUCKETS; i++) {
        struct decode_session *s;

        while ((s = t->buckets[i]) != NULL) {
            assert(!s->busy);
            t->buckets[i] = s->next;
            session_free(s);
        }
    }
    pthread_mutex_destroy(&t->lock);
}

/* ---- The table.  With the lock held. ---- */

/* Where the session of that name is linked in, or would be. */
static struct decode_session **find(struct decode_sessions *t, const char *name)
{
    const uint32_t hash = kv_crc32c(0, name, strlen(name));
    struct decode_session **at = &t->buckets[hash % DECODE_SESSION_BUCKETS];

    while (*at != NULL && strcmp((*at)->name, name) != 0)
        at = &(*at)->next;
    return at;
}

/* Walk all: the next one after s, NULL to begin. */
static struct decode_session *next_session(const struct decode_sessions *t, size_t *bucket,
                                           struct decode_session *s)
{
    if (s != NULL && s->next != NULL)
        return s->next;
    for (*bucket = s == NULL ? 0 : *bucket + 1; *bucket < DECODE_SESSION_BUCKETS; ++*bucket) {
        if (t->buckets[*bucket] != NULL)
            return t->buckets[*bucket];
    }
    return NULL;
}

/* One that is being restored counts as in memory. */
static void count(struct decode_sessions *t, const struct decode_session *s, int by)
{
    uint32_t *n = s->resident || s->busy ? &t->n_resident : &t->n_disk_only;

    *n = (uint32_t)((int64_t)*n + by);
}

static void remove_session(struct decode_sessions *t, struct decode_session *s)
{
    struct decode_session **at = find(t, s->name);

    assert(*at == s);
    *at = s->next;
    count(t, s, -1);
    session_free(s);
}

static bool is_current(const struct decode_session *s)
{
    return s->stored && s->version == s->saved_version;
}

static void leave_memory(struct decode_sessions *t, struct decode_session *s)
{
    assert(is_current(s) && !s->busy && s->resident);
    count(t, s, -1);
    s->resident = false;
    count(t, s, 1);
    token_list_release(&s->ids);
    s->ids = (struct token_list){0};
}

/* Room for one more in memory: the one that was not used for longest, of those that lose nothing.
 */
static bool make_room(struct decode_sessions *t)
{
    struct decode_session *oldest = NULL, *s = NULL;
    size_t bucket;

    if (t->n_resident < t->max)
        return true;
    while ((s = next_session(t, &bucket, s)) != NULL) {
        if (s->resident && !s->busy && is_current(s) &&
            (oldest == NULL || s->used_ns < oldest->used_ns))
            oldest = s;
    }
    if (oldest != NULL)
        leave_memory(t, oldest);
    return oldest != NULL;
}

static struct decode_session *add(struct decode_sessions *t, const char *name, bool resident)
{
    struct decode_session *s = calloc(1, sizeof(*s));

    if (s == NULL)
        return NULL;
    strcpy(s->name, name);
    s->serial = ++t->last_serial;
    s->resident = resident;
    s->used_ns = node_now_ns();
    *find(t, name) = s;
    count(t, s, 1);
    return s;
}

/* ---- Owners ---- */

/* With the lock held. */
static void set_busy(struct decode_sessions *t, struct decode_session *s, bool busy)
{
    assert(s->busy != busy);
    count(t, s, -1);
    s->busy = busy;
    count(t, s, 1);
}

static int take(struct decode_sessions *t, const char *name, enum decode_take how,
                struct decode_session **out, struct kv_why *why)
{
    struct decode_session *s = *find(t, name);

    if (s == NULL && how == DECODE_TAKE_KNOWN)
        return kv_fail(why, TRANSPORT_NOT_FOUND, "name: there is no session %s", name);
    if (s != NULL && s->busy)
        return kv_fail(why, TRANSPORT_FAILED_PRECONDITION, "session: %s is in use", name);
    if (s != NULL && s->resident && how == DECODE_TAKE_ABSENT)
        return kv_fail(why, TRANSPORT_ALREADY_EXISTS, "session: %s is in memory already", name);
    if ((s == NULL || !s->resident) && how != DECODE_TAKE_KNOWN && !make_room(t))
        return kv_fail(why, TRANSPORT_RESOURCE_EXHAUSTED,
                       "session: %" PRIu32 " are open, the most there may be", t->n_resident);
    if (s == NULL)
        s = add(t, name, true);
    if (s == NULL)
        return kv_fail(why, TRANSPORT_RESOURCE_EXHAUSTED, "session: no memory");
    set_busy(t, s, true);
    *out = s;
    return TRANSPORT_OK;
}

int decode_sessions_take(struct decode_sessions *t, const char *name, enum decode_take how,
                         struct decode_session **out, struct kv_why *why)
{
    int rc;

    assert(strlen(name) <= NODE_SESSION_NAME);
    pthread_mutex_lock(&t->lock);
    rc = take(t, name, how, out, why);
    pthread_mutex_unlock(&t->lock);
    return rc;
}

/* With the lock held. */
static void set_ids(struct decode_session *s, struct token_list *ids)
{
    token_list_release(&s->ids);
    s->ids = *ids;
    *ids = (struct token_list){0};
    s->n_ids = (uint32_t)s->ids.n;
    s->kept = true;
}

void decode_sessions_give_back(struct decode_sessions *t, struct decode_session *session,
                               struct token_list *ids, const void *salt, size_t salt_len)
{
    if (session == NULL)
        return;
    pthread_mutex_lock(&t->lock);
    set_busy(t, session, false);
    session->used_ns = node_now_ns();
    if (ids != NULL) {
        assert(salt_len <= NODE_SALT_BYTES);
        set_ids(session, ids);
        if (salt_len > 0)
            memcpy(session->salt.bytes, salt, salt_len);
        session->salt.len = salt_len;
        session->version = ++t->last_version;
        session->try_ns = 0;
    }
    if (!(session->resident ? session->kept : session->stored))
        remove_session(t, session);
    pthread_mutex_unlock(&t->lock);
}

void decode_sessions_fill(struct decode_sessions *t, struct decode_session *session,
                          struct token_list *ids, const struct node_salt *salt,
                          const struct kv_snapshot_id *id)
{
    pthread_mutex_lock(&t->lock);
    assert(session->busy);
    session->resident = true;
    set_ids(session, ids);
    session->salt = *salt;
    session->version = ++t->last_version;
    session->stored = id != NULL;
    if (id != NULL) {
        session->snapshot = *id;
        session->saved_version = session->version;
    }
    pthread_mutex_unlock(&t->lock);
}

void decode_sessions_drop(struct decode_sessions *t, struct decode_session *session, bool keep)
{
    pthread_mutex_lock(&t->lock);
    set_busy(t, session, false);
    session->version = session->saved_version;
    if (!keep || !session->stored)
        remove_session(t, session);
    else if (session->resident)
        leave_memory(t, session);
    pthread_mutex_unlock(&t->lock);
}

/* ---- Disk ---- */

bool decode_sessions_add(struct decode_sessions *t, const char *name,
                         const struct kv_snapshot_id *id, uint32_t n_ids)
{
    struct decode_session *s = NULL;

    pthread_mutex_lock(&t->lock);
    if (*find(t, name) == NULL)
        s = add(t, name, false);
    if (s != NULL) {
        s->kept = true;
        s->stored = true;
        s->snapshot = *id;
        s->n_ids = n_ids;
    }
    pthread_mutex_unlock(&t->lock);
    return s != NULL;
}

static int copy_ids(const struct token_list *from, struct token_list *to)
{
    to->ids = malloc(from->n * sizeof(*to->ids));
    if (to->ids == NULL)
        return -1;
    memcpy(to->ids, from->ids, from->n * sizeof(*to->ids));
    to->n = to->cap = from->n;
    return 0;
}

static int copy(struct decode_sessions *t, const char *name, struct decode_session_copy *out,
                struct kv_why *why)
{
    struct decode_session *s = *find(t, name);

    if (s == NULL)
        return kv_fail(why, TRANSPORT_NOT_FOUND, "session: there is none of the name %s", name);
    if (!s->kept)
        return kv_fail(why, TRANSPORT_FAILED_PRECONDITION,
                       "session: no turn of %s has been finished yet", name);
    *out = (struct decode_session_copy){
        .salt = s->salt,
        .serial = s->serial,
        .version = s->version,
        .stored = s->stored,
        .current = is_current(s),
        .snapshot = s->snapshot,
    };
    strcpy(out->name, name);
    if (s->resident && copy_ids(&s->ids, &out->ids) < 0)
        return kv_fail(why, TRANSPORT_RESOURCE_EXHAUSTED, "session: no memory");
    return TRANSPORT_OK;
}

int decode_sessions_copy(struct decode_sessions *t, const char *name,
                         struct decode_session_copy *out, struct kv_why *why)
{
    int rc;

    pthread_mutex_lock(&t->lock);
    rc = copy(t, name, out, why);
    pthread_mutex_unlock(&t->lock);
    return rc;
}

bool decode_sessions_saved(struct decode_sessions *t, const struct decode_session_copy *of,
                           const struct kv_snapshot_id *id, bool leave)
{
    struct decode_session *s;

    pthread_mutex_lock(&t->lock);
    s = *find(t, of->name);
    if (s != NULL && s->serial != of->serial) /* another one of the name */
        s = NULL;
    if (s != NULL) {
        s->stored = true;
        s->snapshot = *id;
        s->saved_version = of->version;
        if (leave && s->resident && !s->busy && is_current(s))
            leave_memory(t, s);
    }
    pthread_mutex_unlock(&t->lock);
    return s != NULL;
}

void decode_sessions_unsaved(struct decode_sessions *t, const struct kv_snapshot_id *id)
{
    struct decode_session *s = NULL;
    size_t bucket;

    pthread_mutex_lock(&t->lock);
    do
        s = next_session(t, &bucket, s);
    while (s != NULL && !(s->stored && memcmp(&s->snapshot, id, sizeof(*id)) == 0));
    if (s != NULL) {
        s->stored = false;
        if (!s->resident && !s->busy)
            remove_session(t, s);
    }
    pthread_mutex_unlock(&t->lock);
}

bool decode_sessions_idle(struct decode_sessions *t, int64_t idle_ns,
                          char name[NODE_SESSION_NAME + 1])
{
    struct decode_session *s = NULL;
    const int64_t now = node_now_ns();
    size_t bucket;

    pthread_mutex_lock(&t->lock);
    while ((s = next_session(t, &bucket, s)) != NULL) {
        if (!s->resident || s->busy || !s->kept)
            continue;
        if (idle_ns == INT64_MAX ? !is_current(s) && s->try_ns < INT64_MAX
                                 : s->used_ns < idle_ns && s->try_ns <= now)
            break;
    }
    if (s != NULL) {
        strcpy(name, s->name);
        s->try_ns =
            idle_ns == INT64_MAX ? INT64_MAX : now + DECODE_SAVE_AGAIN_MS * INT64_C(1000000);
    }
    pthread_mutex_unlock(&t->lock);
    return s != NULL;
}

void decode_sessions_stored(struct decode_sessions *t,
                            void (*each)(void *arg, const char *name,
                                         const struct kv_snapshot_id *id),
                            void *arg)
{
    struct decode_session *s = NULL;
    size_t bucket;

    pthread_mutex_lock(&t->lock);
    while ((s = next_session(t, &bucket, s)) != NULL) {
        if (s->stored)
            each(arg, s->name, &s->snapshot);
    }
    pthread_mutex_unlock(&t->lock);
}

/* ---- For Describe and ListSessions ---- */

uint32_t decode_sessions_list(struct decode_sessions *t, struct decode_session_info *out,
                              uint32_t max)
{
    const int64_t now = node_now_ns();
    struct decode_session *s = NULL;
    uint32_t n = 0;
    size_t bucket;

    pthread_mutex_lock(&t->lock);
    while (n < max && (s = next_session(t, &bucket, s)) != NULL) {
        if (!s->resident)
            continue;
        strcpy(out[n].name, s->name);
        out[n].n_ids = s->n_ids;
        out[n].busy = s->busy;
        out[n].saved = is_current(s);
        out[n].idle_ns = s->busy || s->used_ns > now ? 0 : (uint64_t)(now - s->used_ns);
        n++;
    }
    pthread_mutex_unlock(&t->lock);
    return n;
}

uint32_t decode_sessions_count_unsaved(struct decode_sessions *t)
{
    struct decode_session *s = NULL;
    uint32_t n = 0;
    size_t bucket;

    pthread_mutex_lock(&t->lock);
    while ((s = next_session(t, &bucket, s)) != NULL)
        n += s->resident && s->kept && !is_current(s);
    pthread_mutex_unlock(&t->lock);
    return n;
}

void decode_sessions_count(struct decode_sessions *t, uint32_t *n_resident, uint32_t *n_disk_only)
{
    pthread_mutex_lock(&t->lock);
    *n_resident = t->n_resident;
    *n_disk_only = t->n_disk_only;
    pthread_mutex_unlock(&t->lock);
}

#include "decode/decode_session.h"

#include "node/node.h"
#include "transport/transport.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

int decode_sessions_init(struct decode_sessions *t, uint32_t max)
{
    t->items = calloc(max, sizeof(struct decode_session *));
    if (t->items == NULL)
        return -1;
    if (pthread_mutex_init(&t->lock, NULL) != 0) {
        free(t->items);
        return -1;
    }
    t->n = 0;
    t->max = max;
    return 0;
}

static void session_free(struct decode_session *s)
{
    token_list_release(&s->ids);
    free(s);
}

void decode_sessions_release(struct decode_sessions *t)
{
    for (uint32_t i = 0; i < t->n; i++) {
        assert(!t->items[i]->busy);
        session_free(t->items[i]);
    }
    free(t->items);
    pthread_mutex_destroy(&t->lock);
}

bool decode_session_name_ok(const char *name, size_t n)
{
    static const char letters[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";

    return n > 0 && n <= DECODE_SESSION_NAME && strlen(name) == n && strspn(name, letters) == n;
}

/* Index of that name, or t->n.  With the lock held. */
static uint32_t find(const struct decode_sessions *t, const char *name)
{
    uint32_t i = 0;

    while (i < t->n && strcmp(t->items[i]->name, name) != 0)
        i++;
    return i;
}

static void remove_at(struct decode_sessions *t, uint32_t i)
{
    session_free(t->items[i]);
    t->items[i] = t->items[--t->n];
}

/* With the lock held. */
static int take_new(struct decode_sessions *t, const char *name, struct decode_session **out,
                    struct kv_why *why)
{
    struct decode_session *s;

    if (t->n == t->max)
        return kv_fail(why, TRANSPORT_RESOURCE_EXHAUSTED,
                       "session: %" PRIu32 " are open, the most there may be", t->n);
    s = calloc(1, sizeof(*s));
    if (s == NULL)
        return kv_fail(why, TRANSPORT_RESOURCE_EXHAUSTED, "session: no memory");
    strcpy(s->name, name);
    t->items[t->n++] = s;
    *out = s;
    return TRANSPORT_OK;
}

int decode_sessions_take(struct decode_sessions *t, const char *name, struct decode_session **out,
                         struct kv_why *why)
{
    struct decode_session *s = NULL;
    int rc = TRANSPORT_OK;
    uint32_t i;

    assert(strlen(name) <= DECODE_SESSION_NAME);
    pthread_mutex_lock(&t->lock);
    i = find(t, name);
    if (i < t->n)
        s = t->items[i];
    else
        rc = take_new(t, name, &s, why);
    if (rc == TRANSPORT_OK && s->busy)
        rc = kv_fail(why, TRANSPORT_FAILED_PRECONDITION, "session: %s is in use", name);
    if (rc == TRANSPORT_OK) {
        s->busy = true;
        *out = s;
    }
    pthread_mutex_unlock(&t->lock);
    return rc;
}

void decode_sessions_give_back(struct decode_sessions *t, struct decode_session *session,
                               struct token_list *ids)
{
    if (session == NULL)
        return;
    if (ids != NULL) {
        token_list_release(&session->ids);
        session->ids = *ids;
        *ids = (struct token_list){0};
    }
    pthread_mutex_lock(&t->lock);
    assert(session->busy);
    session->busy = false;
    session->kept = session->kept || ids != NULL;
    session->n_ids = (uint32_t)session->ids.n;
    session->used_ns = node_now_ns();
    if (!session->kept)
        remove_at(t, find(t, session->name));
    pthread_mutex_unlock(&t->lock);
}

int decode_sessions_close(struct decode_sessions *t, const char *name, struct kv_why *why)
{
    int rc = TRANSPORT_OK;
    uint32_t i;

    pthread_mutex_lock(&t->lock);
    i = find(t, name);
    if (i == t->n)
        rc = kv_fail(why, TRANSPORT_NOT_FOUND, "name: there is no session %s", name);
    else if (t->items[i]->busy)
        rc = kv_fail(why, TRANSPORT_FAILED_PRECONDITION, "name: session %s is in use", name);
    else
        remove_at(t, i);
    pthread_mutex_unlock(&t->lock);
    return rc;
}

uint32_t decode_sessions_list(struct decode_sessions *t, struct decode_session_info *out,
                              uint32_t max)
{
    int64_t now = node_now_ns();
    uint32_t n;

    pthread_mutex_lock(&t->lock);
    n = t->n < max ? t->n : max;
    for (uint32_t i = 0; i < n; i++) {
        const struct decode_session *s = t->items[i];

        strcpy(out[i].name, s->name);
        out[i].n_ids = s->n_ids;
        out[i].busy = s->busy;
        out[i].idle_ns = s->busy || s->used_ns > now ? 0 : (uint64_t)(now - s->used_ns);
    }
    pthread_mutex_unlock(&t->lock);
    return n;
}

uint32_t decode_sessions_count(struct decode_sessions *t)
{
    uint32_t n;

    pthread_mutex_lock(&t->lock);
    n = t->n;
    pthread_mutex_unlock(&t->lock);
    return n;
}

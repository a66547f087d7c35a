#include "decode/decode_store.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* ---- Opening ---- */

/* A node that died between the save of a session and the removal of what that replaces leaves both:
 * the older one is what the newer one stands on. */
static void remove_replaced(struct decode_store *s, const char *name,
                            const struct kv_snapshot_info *older)
{
    struct decode_session_copy c;
    struct kv_snapshot_info newer;

    if (decode_sessions_copy(&s->node->sessions, name, &c, NULL) != TRANSPORT_OK)
        return;
    token_list_release(&c.ids);
    if (kv_store_find(s->kv, &c.snapshot, &newer) == 0 &&
        memcmp(&newer.parent, &older->id, sizeof(newer.parent)) == 0)
        kv_store_delete(s->kv, &older->id, NULL);
}

static void add_session(struct decode_store *s, const struct kv_snapshot_info *info)
{
    struct node_session snapshot;
    struct kv_why why = {.text = ""};
    char id[KV_SNAPSHOT_ID_TEXT], quoted[2 * sizeof(why.text)];
    int rc;

    if (info->session_bytes == 0)
        return;
    rc = decode_store_read(s, info, &snapshot, &why);
    if (rc == TRANSPORT_OK) {
        if (strcmp(snapshot.tenant, DECODE_TENANT) == 0 &&
            !decode_sessions_add(&s->node->sessions, snapshot.name, &info->id, snapshot.n_ids))
            remove_replaced(s, snapshot.name, info);
        node_session_release(&snapshot);
        return;
    }
    kv_snapshot_id_print(&info->id, id);
    node_log(NODE_WARN, "snapshot", "what=read id=%s status=%s why=%s", id,
             transport_status_name(rc), node_quote(quoted, sizeof(quoted), why.text));
}

/* Those that this node can restore first, and of one name the one that was used last. */
static int by_use(const void *a, const void *b)
{
    const struct kv_snapshot_info *x = a, *y = b;

    return x->used_ns < y->used_ns ? 1 : x->used_ns > y->used_ns ? -1 : 0;
}

static int find_sessions(struct decode_store *s, struct kv_why *why)
{
    const struct kv_geometry *ours = &s->node->identity.geometry;
    uint32_t n = kv_store_list(s->kv, NULL, NULL, 0);
    struct kv_snapshot_info *info = calloc((size_t)n + 1, sizeof(*info));

    if (info == NULL)
        return kv_fail(why, -1, "no memory for a list of %" PRIu32 " snapshots", n);
    n = kv_store_list(s->kv, NULL, info, n);
    qsort(info, n, sizeof(*info), by_use);
    for (int round = 0; round < 2; round++) {
        for (uint32_t i = 0; i < n; i++) {
            if ((memcmp(&info[i].geometry, ours, sizeof(*ours)) == 0) == (round == 0))
                add_session(s, &info[i]);
        }
    }
    free(info);
    return 0;
}

static void log_opened(const struct decode_store *s)
{
    const struct decode_options *o = s->node->options;
    struct kv_store_stats stats;
    uint32_t n_resident, n_disk_only;
    char directory[512], io[128];

    kv_store_stats(s->kv, &stats);
    decode_sessions_count(&s->node->sessions, &n_resident, &n_disk_only);
    node_log(NODE_INFO, "store",
             "directory=%s io=%s durability=%s snapshots=%" PRIu32 " sessions=%" PRIu32
             " retired=%" PRIu32 " unreadable=%" PRIu32 " expired=%" PRIu64 " bytes=%" PRIu64
             " budget=%" PRIu64 " ttl_s=%" PRIu32 " save_idle_s=%" PRIu32 " save_on_exit=%d",
             node_quote(directory, sizeof(directory), o->snapshots),
             node_quote(io, sizeof(io), kv_store_describe(s->kv)),
             kv_durability_name(stats.durability), stats.n_snapshots, n_disk_only, stats.n_retired,
             stats.n_unreadable, stats.n_expired, stats.bytes, stats.budget_bytes,
             o->snapshot_ttl_s, o->save_idle_s, o->save_on_exit ? 1 : 0);
}

static void log_left_alone(void *arg, const char *name, const char *why)
{
    char file[512], quoted[512];

    (void)arg;
    node_log(NODE_WARN, "store", "left_alone=%s why=%s", node_quote(file, sizeof(file), name),
             node_quote(quoted, sizeof(quoted), why));
}

int decode_store_open(struct decode_node *node, struct decode_store **out, struct kv_why *why)
{
    const struct decode_options *o = node->options;
    const struct kv_store_config config = {
        .directory = o->snapshots,
        .geometry = node->identity.geometry,
        .fingerprint = node->identity.fingerprint,
        .numerics_id = node->identity.numerics_id,
        .budget_bytes = o->snapshot_budget,
        .ttl_ns = o->snapshot_ttl_s * UINT64_C(1000000000),
        .durability = (enum kv_durability)kv_durability_parse(o->durability),
        .left_alone = log_left_alone,
    };
    struct decode_store *s;
    int rc;

    *out = NULL;
    if (o->snapshots == NULL)
        return 0;
    s = calloc(1, sizeof(*s));
    if (s == NULL || node_inbox_init(&s->inbox) < 0) {
        free(s);
        return kv_fail(why, -1, "no memory");
    }
    s->node = node;
    s->last = &s->waiting;
    rc = kv_store_open(&config, &s->kv, why);
    if (rc == 0)
        rc = find_sessions(s, why);
    if (rc < 0) {
        decode_store_close(s);
        return -1;
    }
    log_opened(s);
    *out = s;
    return 0;
}

void decode_store_close(struct decode_store *s)
{
    if (s == NULL)
        return;
    assert(s->waiting == NULL);
    if (s->kv != NULL)
        kv_store_close(s->kv);
    node_inbox_release(&s->inbox);
    free(s);
}

/* ---- Calls that wait ---- */

void decode_store_put(struct decode_store *s, struct decode_request *r)
{
    node_inbox_put(&s->inbox, &r->mail.link);
}

static struct decode_request *request_of(struct node_link *link)
{
    return ((struct decode_mail *)link)->item;
}

static void wait_at_end(struct decode_store *s, struct decode_request *r)
{
    r->mail.link.next = NULL;
    *s->last = &r->mail.link;
    s->last = &r->mail.link.next;
}

static struct decode_request *unlink_at(struct decode_store *s, struct node_link **at)
{
    struct node_link *link = *at;

    *at = link->next;
    if (s->last == &link->next)
        s->last = at;
    return request_of(link);
}

static void take_in(struct decode_store *s, int timeout_ms)
{
    struct node_link *link = node_inbox_take(&s->inbox, timeout_ms), *next;

    for (; link != NULL; link = next) {
        next = link->next;
        wait_at_end(s, request_of(link));
    }
}

/* Whether nobody waits for it any more; if so, *status says why. */
static bool is_over(const struct decode_request *r, int64_t now, int *status)
{
    *status = TRANSPORT_DEADLINE_EXCEEDED;
    if (now >= r->deadline_ns)
        return true;
    *status = TRANSPORT_CANCELLED;
    return transport_call_cancelled(r->call);
}

static const char *over_details(int status)
{
    return status == TRANSPORT_CANCELLED ? "the caller is gone" : "the deadline has passed";
}

static void look_around(struct decode_store *s, int64_t now)
{
    struct node_link **at = &s->waiting;
    int status;

    while (*at != NULL) {
        if (is_over(request_of(*at), now, &status))
            decode_request_refuse(unlink_at(s, at), status, over_details(status));
        else
            at = &(*at)->next;
    }
    s->looked_ns = now;
}

/* The next one that can be worked on now: first what a turn waits for.  NULL: none. */
static struct decode_request *next_call(struct decode_store *s, int64_t now)
{
    for (int round = 0; round < 2; round++) {
        for (struct node_link **at = &s->waiting; *at != NULL; at = &(*at)->next) {
            const struct decode_request *r = request_of(*at);

            if (now >= r->again_ns && (round == 1 || r->method == DECODE_GENERATE))
                return unlink_at(s, at);
        }
    }
    return NULL;
}

/* ---- While one is at work ---- */

static void tell_progress(struct decode_store *s, uint64_t done, uint64_t total, int64_t now)
{
    struct decode_request *r = s->at_work;

    if (now - s->told_ns < DECODE_PROGRESS_MS * INT64_C(1000000) ||
        transport_call_queued(r->call) > DECODE_PAUSE_BYTES)
        return;
    s->told_ns = now;
    decode_reply_progress(r, done, total);
}

int decode_store_progress(void *arg, uint64_t done, uint64_t total)
{
    struct decode_store *s = arg;
    const int64_t now = node_now_ns();
    int status;

    if (now - s->looked_ns >= DECODE_STORE_TICK_MS * INT64_C(1000000)) {
        take_in(s, 0);
        look_around(s, now);
    }
    if (s->at_work == NULL)
        return now >= s->until_ns;
    if (decode_snapshots_streams(s->at_work->method))
        tell_progress(s, done, total, now);
    return is_over(s->at_work, now, &status);
}

int decode_store_status(const struct decode_store *s, int rc)
{
    int status;

    switch (rc) {
    case KV_ERR_FULL:
    case KV_ERR_NOMEM:
        return TRANSPORT_RESOURCE_EXHAUSTED;
    case KV_ERR_NOT_FOUND:
        return TRANSPORT_NOT_FOUND;
    case KV_ERR_MISMATCH:
    case KV_ERR_INVALID:
        return TRANSPORT_FAILED_PRECONDITION;
    case KV_ERR_FORMAT:
    case KV_ERR_CHECK:
    case KV_ERR_LIMIT:
    case KV_ERR_ORDER:
        return TRANSPORT_DATA_LOSS;
    case KV_ERR_BUSY:
        if (s->at_work != NULL && is_over(s->at_work, node_now_ns(), &status))
            return status;
        return TRANSPORT_CANCELLED;
    default:
        return TRANSPORT_INTERNAL;
    }
}

void decode_store_namespace(const struct decode_store *s, const struct node_salt *salt,
                            struct kv_namespace *out)
{
    decode_node_namespace(s->node, salt->bytes, salt->len, out);
}

static void log_work(const char *what, int status, const struct decode_stored *d,
                     const char *details)
{
    const bool failed = status != TRANSPORT_OK;
    char id[KV_SNAPSHOT_ID_TEXT], session[2 * NODE_SESSION_NAME], why[512];

    kv_snapshot_id_print(&d->info.id, id);
    node_log(failed && status != TRANSPORT_CANCELLED ? NODE_WARN : NODE_INFO, "snapshot",
             "what=%s id=%s session=%s status=%s positions=%" PRIu32 " base=%" PRIu32
             " depth=%" PRIu32 " bytes=%" PRIu64 " ms=%.1f%s%s",
             what, id, node_quote(session, sizeof(session), d->session),
             transport_status_name(status), d->info.n_positions, d->info.base, d->info.depth,
             d->bytes, (double)d->ns / 1e6, failed ? " why=" : "",
             failed ? node_quote(why, sizeof(why), details) : "");
}

/* ---- The calls ---- */

static void id_of(const ProtobufCBinaryData *bytes, struct kv_snapshot_id *out)
{
    assert(bytes->len == sizeof(out->bytes)); /* the front worker has checked it */
    memcpy(out->bytes, bytes->data, sizeof(out->bytes));
}

static int work_generate(struct decode_store *s, struct decode_request *r,
                         struct decode_stored *out, struct kv_why *why)
{
    struct decode_session *session = r->session;

    /* Only this thread changes what a session is on disk. */
    if (!session->stored)
        return kv_fail(why, TRANSPORT_NOT_FOUND, "session: the snapshot of %s is gone",
                       session->name);
    return decode_store_restore(s, &session->snapshot, session, out, why);
}

static int work_save(struct decode_store *s, struct decode_request *r, struct decode_stored *out,
                     struct kv_why *why)
{
    const Baton__V1__SaveRequest *q = (const Baton__V1__SaveRequest *)r->message.message;

    return decode_store_save(s, q->session, q->full, q->leave, out, why);
}

static int restore_session(struct decode_store *s, const char *name, const char *as,
                           struct decode_stored *out, struct kv_why *why)
{
    struct decode_session_copy c;
    int rc = decode_sessions_copy(&s->node->sessions, name, &c, why);

    if (rc != TRANSPORT_OK)
        return rc;
    token_list_release(&c.ids);
    if (!c.stored)
        return kv_fail(why, TRANSPORT_NOT_FOUND, "session: %s is not on disk", name);
    return decode_store_restore_as(s, &c.snapshot, as[0] != '\0' ? as : name, out, why);
}

static int work_restore(struct decode_store *s, struct decode_request *r, struct decode_stored *out,
                        struct kv_why *why)
{
    const Baton__V1__RestoreRequest *q = (const Baton__V1__RestoreRequest *)r->message.message;
    struct kv_snapshot_id id;

    if (q->which_case == BATON__V1__RESTORE_REQUEST__WHICH_SESSION)
        return restore_session(s, q->session, q->as_session, out, why);
    id_of(&q->id, &id);
    return decode_store_restore_as(s, &id, q->as_session, out, why);
}

static int find(struct decode_store *s, const ProtobufCBinaryData *bytes, struct decode_stored *out,
                struct kv_why *why)
{
    struct kv_snapshot_id id;
    char text[KV_SNAPSHOT_ID_TEXT];

    id_of(bytes, &id);
    if (kv_store_find(s->kv, &id, &out->info) == 0)
        return TRANSPORT_OK;
    kv_snapshot_id_print(&id, text);
    return kv_fail(why, TRANSPORT_NOT_FOUND, "snapshot: there is none of the id %s", text);
}

static int work_delete(struct decode_store *s, struct decode_request *r, struct decode_stored *out,
                       struct kv_why *why)
{
    const Baton__V1__DeleteSnapshotRequest *q =
        (const Baton__V1__DeleteSnapshotRequest *)r->message.message;
    int rc = find(s, &q->id, out, why);

    if (rc != TRANSPORT_OK)
        return rc;
    rc = kv_store_delete(s->kv, &out->info.id, why);
    if (rc < 0)
        return decode_store_status(s, rc);
    decode_sessions_unsaved(&s->node->sessions, &out->info.id);
    return TRANSPORT_OK;
}

static int work_verify(struct decode_store *s, struct decode_request *r, struct decode_stored *out,
                       struct kv_why *why)
{
    const Baton__V1__VerifyRequest *q = (const Baton__V1__VerifyRequest *)r->message.message;
    int rc = find(s, &q->id, out, why);

    if (rc != TRANSPORT_OK)
        return rc;
    rc = kv_store_verify(s->kv, &out->info.id, decode_store_progress, s, why);
    out->bytes = (uint64_t)out->info.n_positions * kv_position_bytes(&out->info.geometry);
    return rc < 0 ? decode_store_status(s, rc) : TRANSPORT_OK;
}

static int work_compact(struct decode_store *s, struct decode_request *r, struct decode_stored *out,
                        struct kv_why *why)
{
    const Baton__V1__CompactRequest *q = (const Baton__V1__CompactRequest *)r->message.message;
    struct kv_snapshot_info before;
    int rc = find(s, &q->id, out, why);

    if (rc != TRANSPORT_OK)
        return rc;
    before = out->info;
    rc = kv_store_compact(s->kv, &before.id, decode_store_progress, s, why);
    if (rc < 0)
        return decode_store_status(s, rc);
    rc = find(s, &q->id, out, why);
    out->bytes = before.depth > 1 ? out->info.file_bytes : 0;
    return rc;
}

static int work_close(struct decode_store *s, struct decode_request *r, struct decode_stored *out,
                      struct kv_why *why)
{
    const Baton__V1__CloseSessionRequest *q =
        (const Baton__V1__CloseSessionRequest *)r->message.message;
    struct decode_session *session;
    int rc = decode_sessions_take(&s->node->sessions, q->name, DECODE_TAKE_KNOWN, &session, why);

    if (rc != TRANSPORT_OK)
        return rc;
    strcpy(out->session, q->name);
    if (session->stored && !q->keep_snapshot) {
        out->info.id = session->snapshot;
        rc = kv_store_delete(s->kv, &session->snapshot, why);
    }
    if (rc == 0 || rc == KV_ERR_NOT_FOUND) {
        decode_sessions_drop(&s->node->sessions, session, q->keep_snapshot);
        return TRANSPORT_OK;
    }
    decode_sessions_give_back(&s->node->sessions, session, NULL, NULL, 0);
    return decode_store_status(s, rc);
}

struct work {
    const char *name;
    int (*run)(struct decode_store *s, struct decode_request *r, struct decode_stored *out,
               struct kv_why *why);
};

static const struct work works[] = {
    [DECODE_GENERATE] = {"restore", work_generate},
    [DECODE_CLOSE_SESSION] = {"close", work_close},
    [DECODE_SAVE] = {"save", work_save},
    [DECODE_RESTORE] = {"restore", work_restore},
    [DECODE_DELETE_SNAPSHOT] = {"delete", work_delete},
    [DECODE_VERIFY] = {"verify", work_verify},
    [DECODE_COMPACT] = {"compact", work_compact},
};

/* It is done: a turn goes on, the others are answered. */
static void answer(struct decode_store *s, struct decode_request *r, const struct decode_stored *d)
{
    static const Baton__V1__CloseSessionReply closed = BATON__V1__CLOSE_SESSION_REPLY__INIT;
    static const Baton__V1__DeleteSnapshotReply deleted = BATON__V1__DELETE_SNAPSHOT_REPLY__INIT;

    switch (r->method) {
    case DECODE_GENERATE:
        if (!node_queue_push(&s->node->front, r))
            decode_request_refuse(r, TRANSPORT_RESOURCE_EXHAUSTED, "too many calls wait");
        return;
    case DECODE_CLOSE_SESSION:
        decode_request_answer(r, &closed.base);
        return;
    case DECODE_DELETE_SNAPSHOT:
        decode_request_answer(r, &deleted.base);
        return;
    default:
        decode_reply_stored(r, d);
    }
}

static void work_on(struct decode_store *s, struct decode_request *r)
{
    const struct work *w = &works[r->method];
    struct decode_stored d = {.bytes = 0};
    struct kv_why why = {.text = ""};
    const int64_t start = node_now_ns();
    int status;

    s->at_work = r;
    status = w->run(s, r, &d, &why);
    s->at_work = NULL;
    if (status == DECODE_AGAIN) {
        r->again_ns = node_now_ns() + DECODE_STORE_RETRY_MS * INT64_C(1000000);
        wait_at_end(s, r);
        return;
    }
    d.ns = (uint64_t)(node_now_ns() - start);
    log_work(w->name, status, &d, why.text);
    if (status == TRANSPORT_OK)
        answer(s, r, &d);
    else
        decode_request_refuse(r, status, why.text);
}

/* ---- What the thread does by itself ---- */

static bool save_one(struct decode_store *s, const char *what, const char *name, bool leave)
{
    struct decode_stored d = {.bytes = 0};
    struct kv_why why = {.text = ""};
    const int64_t start = node_now_ns();
    int status;

    strcpy(d.session, name);
    status = decode_store_save(s, name, false, leave, &d, &why);
    if (status == DECODE_AGAIN)
        status = kv_fail(&why, TRANSPORT_RESOURCE_EXHAUSTED, "no page to save it from");
    d.ns = (uint64_t)(node_now_ns() - start);
    log_work(what, status, &d, why.text);
    return status == TRANSPORT_OK;
}

static void save_idle(struct decode_store *s, int64_t now)
{
    const int64_t idle_ns = now - s->node->options->save_idle_s * INT64_C(1000000000);
    char name[NODE_SESSION_NAME + 1];

    s->until_ns = INT64_MAX;
    while (decode_sessions_idle(&s->node->sessions, idle_ns, name)) {
        save_one(s, "save_idle", name, true);
        take_in(s, 0);
        if (s->waiting != NULL || atomic_load(&s->stopping))
            return;
    }
}

struct ids {
    struct kv_snapshot_id *ids;
    uint32_t n, max;
};

static void add_id(void *arg, const char *name, const struct kv_snapshot_id *id)
{
    struct ids *list = arg;

    (void)name;
    if (list->n < list->max)
        list->ids[list->n++] = *id;
}

/* Sessions whose snapshot has expired. */
static void forget_expired(struct decode_store *s)
{
    struct ids list = {.max = KV_STORE_MAX_SNAPSHOTS};
    struct kv_snapshot_info info;

    list.ids = malloc(list.max * sizeof(*list.ids));
    if (list.ids == NULL)
        return;
    decode_sessions_stored(&s->node->sessions, add_id, &list);
    for (uint32_t i = 0; i < list.n; i++) {
        if (kv_store_find(s->kv, &list.ids[i], &info) < 0)
            decode_sessions_unsaved(&s->node->sessions, &list.ids[i]);
    }
    free(list.ids);
}

static void sweep(struct decode_store *s, int64_t now)
{
    const uint32_t ttl_s = s->node->options->snapshot_ttl_s;
    const uint32_t every_s = ttl_s / 8 < 1 ? 1 : ttl_s / 8 > 60 ? 60 : ttl_s / 8;
    uint32_t n;

    if (now - s->sweep_ns < every_s * INT64_C(1000000000))
        return;
    s->sweep_ns = now;
    n = kv_store_sweep(s->kv);
    if (n == 0)
        return;
    node_log(NODE_INFO, "snapshot", "what=sweep expired=%" PRIu32, n);
    forget_expired(s);
}

static void round_off(struct decode_store *s, int64_t now)
{
    if (now - s->round_ns < DECODE_STORE_ROUND_MS * INT64_C(1000000))
        return;
    s->round_ns = now;
    if (s->node->options->save_idle_s > 0)
        save_idle(s, now);
    if (s->node->options->snapshot_ttl_s > 0)
        sweep(s, now);
}

/* No turn is left; each gets one try, within the time that calls have at the end. */
static void save_rest(struct decode_store *s)
{
    char name[NODE_SESSION_NAME + 1];
    const int64_t start = node_now_ns();
    uint32_t n = 0, n_left;

    s->until_ns = start + s->node->options->serve.grace_ms * INT64_C(1000000);
    while (node_now_ns() < s->until_ns &&
           decode_sessions_idle(&s->node->sessions, INT64_MAX, name)) {
        if (save_one(s, "save_exit", name, false))
            n++;
    }
    n_left = decode_sessions_count_unsaved(&s->node->sessions);
    node_log(n_left > 0 ? NODE_WARN : NODE_INFO, "store",
             "saved=%" PRIu32 " not_saved=%" PRIu32 " ms=%.1f", n, n_left,
             (double)(node_now_ns() - start) / 1e6);
}

static int patience_ms(const struct decode_store *s)
{
    const struct decode_options *o = s->node->options;

    if (s->waiting != NULL)
        return DECODE_STORE_RETRY_MS;
    return o->save_idle_s > 0 || o->snapshot_ttl_s > 0 ? DECODE_STORE_ROUND_MS : -1;
}

void *decode_store_run(void *arg)
{
    struct decode_store *s = arg;
    struct decode_request *r = NULL;

    while (!atomic_load(&s->stopping)) {
        take_in(s, r != NULL ? 0 : patience_ms(s));
        look_around(s, node_now_ns());
        r = next_call(s, node_now_ns());
        if (r != NULL)
            work_on(s, r);
        round_off(s, node_now_ns());
    }
    if (s->node->options->save_on_exit)
        save_rest(s);
    return NULL;
}

void decode_store_stop(struct decode_store *s)
{
    atomic_store(&s->stopping, true);
    node_inbox_wake(&s->inbox);
}

/* Sessions on disk, by real nodes: what is saved by one is continued by another of other settings
 * to the same bits and with nothing computed again, whatever ended the first.  Then what may go
 * wrong: other precision, damage, no space, no pages, two nodes, and kill -9 while it saves. */
#include "node_fixture.h"

#include "kvcore/kv_store.h"

#include <check.h>
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PROMPT = 300, FIRST = 8, MORE = 5, SECOND = 16, SESSIONS = 4 };

static char directory[256]; /* of the test that runs; removed with it */
static uint32_t prompt_ids[PROMPT], more_ids[MORE];

static char *borrowed(const char *s)
{
    char *p;

    memcpy(&p, &s, sizeof(p));
    return p;
}

/* ---- The directory ---- */

static void make_directory(void)
{
    snprintf(directory, sizeof(directory), "%s/snapshots-XXXXXX", BATON_BINARY_DIR);
    ck_assert_ptr_nonnull(mkdtemp(directory));
    fixture_ids(prompt_ids, PROMPT, 3, 256);
    fixture_ids(more_ids, MORE, 4, 256);
}

/* Calls each for every file; returns how many. */
static uint32_t each_file(void (*each)(const char *path, const char *name))
{
    DIR *d = opendir(directory);
    const struct dirent *e;
    uint32_t n = 0;

    ck_assert_ptr_nonnull(d);
    while ((e = readdir(d)) != NULL) {
        char path[600];

        if (e->d_name[0] == '.')
            continue;
        n++;
        snprintf(path, sizeof(path), "%s/%s", directory, e->d_name);
        if (each != NULL)
            each(path, e->d_name);
    }
    closedir(d);
    return n;
}

static void remove_file(const char *path, const char *name)
{
    (void)name;
    unlink(path);
}

static void remove_directory(void)
{
    each_file(remove_file);
    rmdir(directory);
}

static void check_no_temporary(const char *path, const char *name)
{
    ck_assert_msg(strstr(name, ".tmp") == NULL, "%s is left", path);
}

static void check_mode(const char *path, const char *name)
{
    struct stat st;

    (void)name;
    ck_assert_int_eq(stat(path, &st), 0);
    ck_assert_uint_eq(st.st_mode & 0777, 0600);
}

/* ---- Nodes ---- */

struct setting {
    const char *page, *precision, *chunk;
};
static const struct setting plain = {"64", "f16", "512"};

/* With up to three further options and their values. */
static void start(struct fixture_node *node, const struct setting *s, const char *const *more)
{
    const char *args[40] = {"--model",        fixture_tiny("tiny-wide"),
                            "--threads",      "1",
                            "--kv-bytes",     "48M",
                            "--page",         s->page,
                            "--kv-precision", s->precision,
                            "--chunk",        s->chunk,
                            "--log-level",    "error"};
    size_t n = 14;

    for (; more != NULL && *more != NULL; more++)
        args[n++] = *more;
    args[n] = NULL;
    fixture_start(node, "decode", args);
}

static void start_here(struct fixture_node *node, const struct setting *s)
{
    const char *const more[] = {"--snapshots", directory, NULL};

    start(node, s, more);
}

static Baton__V1__DescribeReply *describe_all(const struct fixture_node *node)
{
    Baton__V1__DescribeRequest q = BATON__V1__DESCRIBE_REQUEST__INIT;
    struct transport_message *m = NULL;
    Baton__V1__DescribeReply *r;

    ck_assert_int_eq(transport_unary(node->channel, "/baton.v1.Decode/Describe",
                                     node_message_pack(&q.base), 10000, true, &m, NULL),
                     TRANSPORT_OK);
    r = baton__v1__describe_reply__unpack(NULL, transport_message_bytes(m),
                                          transport_message_flat(m));
    ck_assert_ptr_nonnull(r);
    transport_message_unref(m);
    return r;
}

struct on_disk {
    uint32_t resident, sessions, snapshots, unreadable;
    uint64_t bytes;
};

static struct on_disk on_disk(const struct fixture_node *node)
{
    Baton__V1__DescribeReply *r = describe_all(node);
    struct on_disk d = {.resident = r->sessions};

    ck_assert_ptr_nonnull(r->store);
    ck_assert_str_ne(r->store->io, "");
    d.sessions = r->store->sessions;
    d.snapshots = r->store->snapshots;
    d.unreadable = r->store->unreadable;
    d.bytes = r->store->bytes;
    baton__v1__describe_reply__free_unpacked(r, NULL);
    return d;
}

/* Wait until so many sessions are in memory, and so many on disk alone. */
static bool wait_sessions(const struct fixture_node *node, uint32_t resident, uint32_t sessions)
{
    for (int i = 0; i < 500; i++) {
        struct on_disk d = on_disk(node);

        if (d.resident == resident && d.sessions == sessions)
            return true;
        usleep(20000);
    }
    return false;
}

/* ---- Calls of the service ---- */

struct outcome {
    int status;
    char details[TRANSPORT_DETAIL_BYTES];
    bool done;
    struct kv_snapshot_id id;
    char session[130];
    uint32_t positions, base, depth, n_progress;
    uint64_t bytes;
};

struct calling {
    struct transport_request *request;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool over;
    struct outcome outcome;
};

static void on_message(void *user, struct transport_request *r, struct transport_message *m)
{
    struct calling *c = user;
    Baton__V1__SnapshotReply *reply = baton__v1__snapshot_reply__unpack(
        NULL, transport_message_bytes(m), transport_message_flat(m));
    struct outcome *o = &c->outcome;

    ck_assert_ptr_nonnull(reply);
    if (reply->event_case == BATON__V1__SNAPSHOT_REPLY__EVENT_PROGRESS) {
        o->n_progress++;
    } else {
        const Baton__V1__Snapshot *s = reply->done->snapshot;

        o->done = true;
        memcpy(o->id.bytes, s->id.data, sizeof(o->id.bytes));
        snprintf(o->session, sizeof(o->session), "%s", s->session);
        o->positions = s->positions;
        o->base = s->base_position;
        o->depth = s->depth;
        o->bytes = reply->done->bytes;
    }
    baton__v1__snapshot_reply__free_unpacked(reply, NULL);
    transport_request_next(r);
}

static void on_end(void *user, struct transport_request *r, int code, const char *details)
{
    struct calling *c = user;

    (void)r;
    pthread_mutex_lock(&c->lock);
    c->outcome.status = code;
    snprintf(c->outcome.details, sizeof(c->outcome.details), "%s", details);
    c->over = true;
    pthread_cond_signal(&c->changed);
    pthread_mutex_unlock(&c->lock);
}

static void call_start(struct calling *c, const struct fixture_node *node, const char *method,
                       const ProtobufCMessage *q, int64_t deadline_ms)
{
    static const struct transport_request_events events = {on_message, on_end};
    char path[64];

    memset(c, 0, sizeof(*c));
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->changed, NULL);
    snprintf(path, sizeof(path), "/baton.v1.Snapshots/%s", method);
    ck_assert_int_eq(transport_request_start(node->channel, path, node_message_pack(q), deadline_ms,
                                             false, &events, c, &c->request),
                     0);
}

static void call_wait(struct calling *c)
{
    pthread_mutex_lock(&c->lock);
    while (!c->over)
        pthread_cond_wait(&c->changed, &c->lock);
    pthread_mutex_unlock(&c->lock);
    transport_request_unref(c->request);
}

static struct outcome call(const struct fixture_node *node, const char *method,
                           const ProtobufCMessage *q)
{
    struct calling c;

    call_start(&c, node, method, q, 60000);
    call_wait(&c);
    return c.outcome;
}

static struct outcome save(const struct fixture_node *node, const char *session)
{
    Baton__V1__SaveRequest q = BATON__V1__SAVE_REQUEST__INIT;

    q.session = borrowed(session);
    return call(node, "Save", &q.base);
}

static struct outcome save_ok(const struct fixture_node *node, const char *session)
{
    struct outcome o = save(node, session);

    ck_assert_msg(o.status == TRANSPORT_OK, "%s: %s", transport_status_name(o.status), o.details);
    ck_assert(o.done);
    return o;
}

static struct outcome restore(const struct fixture_node *node, const char *session)
{
    Baton__V1__RestoreRequest q = BATON__V1__RESTORE_REQUEST__INIT;

    q.which_case = BATON__V1__RESTORE_REQUEST__WHICH_SESSION;
    q.session = borrowed(session);
    return call(node, "Restore", &q.base);
}

static struct outcome restore_id(const struct fixture_node *node, struct kv_snapshot_id *id,
                                 const char *as)
{
    Baton__V1__RestoreRequest q = BATON__V1__RESTORE_REQUEST__INIT;

    q.which_case = BATON__V1__RESTORE_REQUEST__WHICH_ID;
    q.id.data = id->bytes;
    q.id.len = sizeof(id->bytes);
    q.as_session = borrowed(as);
    return call(node, "Restore", &q.base);
}

static struct outcome verify(const struct fixture_node *node, struct kv_snapshot_id *id)
{
    Baton__V1__VerifyRequest q = BATON__V1__VERIFY_REQUEST__INIT;

    q.id.data = id->bytes;
    q.id.len = sizeof(id->bytes);
    return call(node, "Verify", &q.base);
}

static int unary(const struct fixture_node *node, const char *path, const ProtobufCMessage *q,
                 char *details)
{
    struct transport_message *m = NULL;
    int rc = transport_unary(node->channel, path, node_message_pack(q), 10000, false, &m, details);

    transport_message_unref(m);
    return rc;
}

static int delete_id(const struct fixture_node *node, struct kv_snapshot_id *id, char *details)
{
    Baton__V1__DeleteSnapshotRequest q = BATON__V1__DELETE_SNAPSHOT_REQUEST__INIT;

    q.id.data = id->bytes;
    q.id.len = sizeof(id->bytes);
    return unary(node, "/baton.v1.Snapshots/Delete", &q.base, details);
}

static int close_session(const struct fixture_node *node, const char *name, bool keep)
{
    Baton__V1__CloseSessionRequest q = BATON__V1__CLOSE_SESSION_REQUEST__INIT;
    char details[TRANSPORT_DETAIL_BYTES];

    q.name = borrowed(name);
    q.keep_snapshot = keep;
    return unary(node, "/baton.v1.Decode/CloseSession", &q.base, details);
}

static Baton__V1__ListSnapshotsReply *list(const struct fixture_node *node)
{
    Baton__V1__ListSnapshotsRequest q = BATON__V1__LIST_SNAPSHOTS_REQUEST__INIT;
    struct transport_message *m = NULL;
    Baton__V1__ListSnapshotsReply *r;

    ck_assert_int_eq(transport_unary(node->channel, "/baton.v1.Snapshots/List",
                                     node_message_pack(&q.base), 10000, false, &m, NULL),
                     TRANSPORT_OK);
    r = baton__v1__list_snapshots_reply__unpack(NULL, transport_message_bytes(m),
                                                transport_message_flat(m));
    ck_assert_ptr_nonnull(r);
    transport_message_unref(m);
    return r;
}

/* Every one that is listed holds in every byte. */
static uint32_t verify_all(const struct fixture_node *node)
{
    Baton__V1__ListSnapshotsReply *r = list(node);
    const uint32_t n = (uint32_t)r->n_snapshots;

    for (size_t i = 0; i < r->n_snapshots; i++) {
        struct kv_snapshot_id id;
        struct outcome o;

        memcpy(id.bytes, r->snapshots[i]->id.data, sizeof(id.bytes));
        o = verify(node, &id);
        ck_assert_msg(o.status == TRANSPORT_OK, "%s", o.details);
    }
    baton__v1__list_snapshots_reply__free_unpacked(r, NULL);
    return n;
}

/* ---- Turns ---- */

static void turn(const struct fixture_node *node, const char *session, uint32_t *ids, size_t n,
                 uint32_t max_tokens, struct answer *out)
{
    struct question q;

    question_ids(&q, ids, n, max_tokens, BATON__V1__ROUTE__ROUTE_LOCAL);
    q.q.session = borrowed(session);
    ask(node, &q.q, out);
}

static void first_turn(const struct fixture_node *node, const char *session)
{
    struct answer *a = calloc(1, sizeof(*a));

    ck_assert_ptr_nonnull(a);
    turn(node, session, prompt_ids, PROMPT, FIRST, a);
    ck_assert_msg(a->status == TRANSPORT_OK, "%s", a->details);
    free(a);
}

/* The second turn after the first one: nothing of it is computed again, and all bits are those of a
 * session that was never saved. */
static void check_second_turn(const struct fixture_node *node, const char *session,
                              const struct answer *reference)
{
    struct answer *a = calloc(1, sizeof(*a));

    ck_assert_ptr_nonnull(a);
    turn(node, session, more_ids, MORE, SECOND, a);
    ck_assert_msg(a->status == TRANSPORT_OK, "%s", a->details);
    ck_assert_uint_eq(a->usage.prompt_tokens, PROMPT + FIRST + MORE);
    /* More, where another session said the same before. */
    ck_assert_uint_ge(a->usage.reused_tokens, PROMPT + FIRST - 1);
    ck_assert_uint_le(a->usage.local_tokens, MORE + 1);
    ck_assert_uint_eq(a->n_ids, SECOND);
    ck_assert_mem_eq(a->ids, reference->ids, SECOND * sizeof(a->ids[0]));
    ck_assert_mem_eq(a->digests, reference->digests, SECOND * sizeof(a->digests[0]));
    ck_assert_mem_eq(a->logprobs, reference->logprobs, SECOND * sizeof(a->logprobs[0]));
    free(a);
}

/* The second turn of a session that was never saved, by a node that cannot save. */
static struct answer *make_reference(const char *precision)
{
    const struct setting s = {"64", precision, "512"};
    struct answer *a = calloc(1, sizeof(*a));
    struct fixture_node node;

    ck_assert_ptr_nonnull(a);
    start(&node, &s, NULL);
    first_turn(&node, "r");
    turn(&node, "r", more_ids, MORE, SECOND, a);
    ck_assert_int_eq(a->status, TRANSPORT_OK);
    ck_assert_int_eq(fixture_stop(&node), 0);
    return a;
}

static void check_pages(const struct fixture_node *node)
{
    struct description d;

    ck_assert(wait_idle(node, &d));
}

/* ---- Tests ---- */

static const char *const precisions[] = {"f16", "f32", "q8"};

START_TEST(a_saved_session_goes_on_elsewhere_to_the_same_bits)
{
    const struct setting here = {"64", precisions[_i], "512"}, there = {"16", precisions[_i], "7"},
                         back = {"256", precisions[_i], "64"};
    struct answer *reference = make_reference(precisions[_i]);
    struct fixture_node node;
    struct outcome o;

    start_here(&node, &here);
    first_turn(&node, "s");
    o = save_ok(&node, "s");
    ck_assert_uint_eq(o.positions, PROMPT + FIRST - 1);
    ck_assert_str_eq(o.session, "s");
    fixture_kill(&node);
    each_file(check_mode);

    /* On demand, with the turn. */
    start_here(&node, &there);
    ck_assert(wait_sessions(&node, 0, 1));
    check_second_turn(&node, "s", reference);
    ck_assert(wait_sessions(&node, 1, 0));
    check_pages(&node);
    fixture_kill(&node);

    /* When asked for, under its name and beside it under another. */
    start_here(&node, &back);
    o = restore(&node, "s");
    ck_assert_msg(o.status == TRANSPORT_OK, "%s", o.details);
    ck_assert_uint_eq(o.positions, PROMPT + FIRST - 1);
    ck_assert_int_eq(restore(&node, "s").status, TRANSPORT_ALREADY_EXISTS);
    o = restore_id(&node, &o.id, "twin");
    ck_assert_msg(o.status == TRANSPORT_OK, "%s", o.details);
    ck_assert_str_eq(o.session, "twin");
    check_second_turn(&node, "s", reference);
    check_second_turn(&node, "twin", reference);
    check_pages(&node);
    ck_assert_int_eq(fixture_stop(&node), 0);
    free(reference);
}
END_TEST

/* A turn of a chat, drawn by chance, in a namespace of its own. */
static void chat_turn(const struct fixture_node *node, const char *text, struct answer *out)
{
    uint8_t salt[3] = {0, 7, 255};
    struct question q;

    question_chat(&q, text, 12, BATON__V1__ROUTE__ROUTE_LOCAL);
    q.q.session = borrowed("chat");
    q.q.salt.data = salt;
    q.q.salt.len = sizeof(salt);
    q.sampling.temperature = 0.8f;
    q.sampling.seed = 7;
    ask(node, &q.q, out);
    ck_assert_msg(out->status == TRANSPORT_OK, "%s", out->details);
}

START_TEST(a_salted_chat_goes_on_where_the_template_left_it)
{
    struct answer *a = calloc(1, sizeof(*a)), *reference = calloc(1, sizeof(*reference));
    struct fixture_node node;
    struct outcome o;

    start(&node, &plain, NULL);
    chat_turn(&node, "One two three.", a);
    chat_turn(&node, "And then?", reference);
    ck_assert_int_eq(fixture_stop(&node), 0);

    start_here(&node, &plain);
    chat_turn(&node, "One two three.", a);
    o = save_ok(&node, "chat");
    fixture_kill(&node);
    start_here(&node, &plain);
    chat_turn(&node, "And then?", a);
    ck_assert_uint_eq(a->usage.prompt_tokens, reference->usage.prompt_tokens);
    ck_assert_uint_eq(a->usage.reused_tokens, o.positions);
    ck_assert_uint_eq(a->n_ids, reference->n_ids);
    ck_assert_mem_eq(a->ids, reference->ids, a->n_ids * sizeof(a->ids[0]));
    ck_assert_mem_eq(a->digests, reference->digests, a->n_ids * sizeof(a->digests[0]));
    ck_assert_str_eq(a->text, reference->text);
    ck_assert_int_eq(fixture_stop(&node), 0);
    free(a);
    free(reference);
}
END_TEST

START_TEST(saved_sessions_make_room_for_new_ones)
{
    const char *const two[] = {"--snapshots", directory, "--max-sessions", "2", NULL};
    struct answer *a = calloc(1, sizeof(*a)), *reference = make_reference("f16");
    struct fixture_node node;

    start(&node, &plain, two);
    first_turn(&node, "a");
    first_turn(&node, "b");
    turn(&node, "c", more_ids, MORE, 2, a);
    ck_assert_int_eq(a->status, TRANSPORT_RESOURCE_EXHAUSTED);
    save_ok(&node, "b");
    first_turn(&node, "c");
    ck_assert(wait_sessions(&node, 2, 1));
    turn(&node, "b", more_ids, MORE, 2, a); /* nor has it room to come back */
    ck_assert_int_eq(a->status, TRANSPORT_RESOURCE_EXHAUSTED);
    save_ok(&node, "c");
    check_second_turn(&node, "b", reference);
    ck_assert(wait_sessions(&node, 2, 1));
    ck_assert_int_eq(fixture_stop(&node), 0);
    free(a);
    free(reference);
}
END_TEST

/* Whenever its caller goes, the save is there or not: no half of it. */
START_TEST(a_save_that_is_cancelled_leaves_all_or_nothing)
{
    Baton__V1__SaveRequest q = BATON__V1__SAVE_REQUEST__INIT;
    struct fixture_node node;
    uint32_t n_cut = 0;

    start_here(&node, &plain);
    first_turn(&node, "s");
    q.session = borrowed("s");
    q.full = true;
    for (useconds_t us = 0; us < 6000; us += 300) {
        struct calling c;

        call_start(&c, &node, "Save", &q.base, 60000);
        usleep(us);
        transport_request_cancel(c.request);
        call_wait(&c);
        n_cut += c.outcome.status == TRANSPORT_CANCELLED;
        /* One at a time: this one is worked on when the other is over. */
        ck_assert_int_eq(restore(&node, "nobody").status, TRANSPORT_NOT_FOUND);
        each_file(check_no_temporary);
        ck_assert_uint_eq(each_file(NULL), on_disk(&node).snapshots);
        ck_assert_uint_le(verify_all(&node), 1);
    }
    ck_assert_uint_gt(n_cut, 0);
    check_pages(&node);
    ck_assert_int_eq(fixture_stop(&node), 0);
}
END_TEST

START_TEST(each_save_writes_what_is_new_and_replaces_the_last)
{
    struct fixture_node node;
    struct outcome one, again, two;
    struct answer *a = calloc(1, sizeof(*a));
    char details[TRANSPORT_DETAIL_BYTES];

    start_here(&node, &plain);
    first_turn(&node, "s");
    one = save_ok(&node, "s");
    ck_assert_uint_eq(one.base, 0);
    again = save_ok(&node, "s");
    ck_assert_mem_eq(&again.id, &one.id, sizeof(one.id));
    ck_assert_uint_eq(again.bytes, 0);
    turn(&node, "s", more_ids, MORE, SECOND, a);
    two = save_ok(&node, "s");
    ck_assert_uint_eq(two.base, PROMPT + FIRST - 1);
    ck_assert_uint_eq(two.positions, PROMPT + FIRST + MORE + SECOND - 1);
    ck_assert_uint_lt(two.bytes, one.bytes / 4);
    ck_assert_uint_eq(on_disk(&node).snapshots, 1); /* the first is retired */
    ck_assert_int_eq(verify(&node, &one.id).status, TRANSPORT_NOT_FOUND);
    ck_assert_int_eq(verify(&node, &two.id).status, TRANSPORT_OK);

    ck_assert_int_eq(delete_id(&node, &two.id, details), TRANSPORT_OK);
    ck_assert_int_eq(delete_id(&node, &two.id, details), TRANSPORT_NOT_FOUND);
    ck_assert_uint_eq(each_file(NULL), 0);
    ck_assert_int_eq(fixture_stop(&node), 0);
    free(a);
}
END_TEST

START_TEST(closing_forgets_the_snapshot_unless_it_is_to_stay)
{
    struct fixture_node node;
    struct answer *reference = make_reference("f16");

    start_here(&node, &plain);
    first_turn(&node, "s");
    save_ok(&node, "s");
    ck_assert_int_eq(close_session(&node, "s", true), TRANSPORT_OK);
    ck_assert(wait_sessions(&node, 0, 1));
    check_second_turn(&node, "s", reference);
    ck_assert_int_eq(close_session(&node, "s", false), TRANSPORT_OK);
    ck_assert(wait_sessions(&node, 0, 0));
    ck_assert_uint_eq(each_file(NULL), 0);
    ck_assert_int_eq(close_session(&node, "s", false), TRANSPORT_NOT_FOUND);
    ck_assert_int_eq(fixture_stop(&node), 0);
    free(reference);
}
END_TEST

START_TEST(another_precision_is_refused_naming_both)
{
    static const char want[] = "kv_precision: the snapshot has f16, this node f32";
    const struct setting other = {"64", "f32", "512"};
    struct answer *a = calloc(1, sizeof(*a)), *reference = make_reference("f16");
    struct fixture_node node;
    struct outcome o;

    start_here(&node, &plain);
    first_turn(&node, "s");
    save_ok(&node, "s");
    ck_assert_int_eq(fixture_stop(&node), 0);

    start_here(&node, &other);
    o = restore(&node, "s");
    ck_assert_int_eq(o.status, TRANSPORT_FAILED_PRECONDITION);
    ck_assert_str_eq(o.details, want);
    turn(&node, "s", more_ids, MORE, SECOND, a);
    ck_assert_int_eq(a->status, TRANSPORT_FAILED_PRECONDITION);
    ck_assert_str_eq(a->details, want);
    ck_assert(wait_sessions(&node, 0, 1));
    check_pages(&node);
    ck_assert_int_eq(fixture_stop(&node), 0);

    start_here(&node, &plain);
    check_second_turn(&node, "s", reference);
    ck_assert_int_eq(fixture_stop(&node), 0);
    free(a);
    free(reference);
}
END_TEST

START_TEST(an_idle_session_is_saved_and_leaves_memory)
{
    const char *const idle[] = {"--snapshots", directory, "--save-idle", "1", NULL};
    struct answer *reference = make_reference("f16");
    struct fixture_node node;

    start(&node, &plain, idle);
    first_turn(&node, "s");
    ck_assert(wait_sessions(&node, 0, 1));
    check_second_turn(&node, "s", reference);
    ck_assert(wait_sessions(&node, 0, 1));
    ck_assert_uint_eq(on_disk(&node).snapshots, 1);
    ck_assert_int_eq(fixture_stop(&node), 0);
    free(reference);
}
END_TEST

START_TEST(all_sessions_are_saved_when_the_node_stops)
{
    const char *const at_exit[] = {"--snapshots", directory, "--save-on-exit", NULL};
    struct answer *reference = make_reference("f16");
    struct fixture_node node;
    char name[16];

    start(&node, &plain, at_exit);
    for (int i = 0; i < SESSIONS; i++) {
        snprintf(name, sizeof(name), "s%d", i);
        first_turn(&node, name);
    }
    ck_assert_int_eq(fixture_stop(&node), 0);
    each_file(check_no_temporary);

    start(&node, &plain, at_exit);
    ck_assert(wait_sessions(&node, 0, SESSIONS));
    for (int i = 0; i < SESSIONS; i++) {
        snprintf(name, sizeof(name), "s%d", i);
        check_second_turn(&node, name, reference);
    }
    ck_assert_int_eq(fixture_stop(&node), 0);
    start(&node, &plain, at_exit);
    ck_assert(wait_sessions(&node, 0, SESSIONS));
    ck_assert_uint_eq(verify_all(&node), SESSIONS);
    ck_assert_int_eq(fixture_stop(&node), 0);
    free(reference);
}
END_TEST

START_TEST(what_has_expired_is_forgotten)
{
    const char *const ttl[] = {"--snapshots", directory, "--snapshot-ttl", "2", NULL};
    struct fixture_node node;

    start(&node, &plain, ttl);
    first_turn(&node, "s");
    save_ok(&node, "s");
    ck_assert_int_eq(close_session(&node, "s", true), TRANSPORT_OK);
    ck_assert(wait_sessions(&node, 0, 0));
    ck_assert_uint_eq(each_file(NULL), 0);
    ck_assert_int_eq(fixture_stop(&node), 0);
}
END_TEST

START_TEST(a_session_is_saved_as_it_was_before_the_turn_that_runs)
{
    struct asking *a = calloc(1, sizeof(*a));
    struct answer *reference = make_reference("f16");
    struct fixture_node node;
    struct question q;
    struct outcome o;

    start_here(&node, &plain);
    question_ids(&q, prompt_ids, PROMPT, 600, BATON__V1__ROUTE__ROUTE_LOCAL);
    q.q.session = borrowed("new");
    asking_start(a, &node, &q.q, 60000);
    asking_wait_ids(a, 2);
    o = save(&node, "new");
    ck_assert_int_eq(o.status, TRANSPORT_FAILED_PRECONDITION);
    ck_assert_str_eq(o.details, "session: no turn of new has been finished yet");
    asking_cancel(a);
    asking_wait(a);
    ck_assert_int_eq(save(&node, "nobody").status, TRANSPORT_NOT_FOUND);

    first_turn(&node, "s");
    question_ids(&q, more_ids, MORE, 600, BATON__V1__ROUTE__ROUTE_LOCAL);
    q.q.session = borrowed("s");
    asking_start(a, &node, &q.q, 60000);
    asking_wait_ids(a, 2);
    o = save_ok(&node, "s");
    ck_assert_uint_eq(o.positions, PROMPT + FIRST - 1);
    asking_wait_ids(a, SECOND);
    asking_cancel(a);
    asking_wait(a);
    ck_assert_mem_eq(a->answer.digests, reference->digests, SECOND * sizeof(reference->digests[0]));
    fixture_kill(&node);

    start_here(&node, &plain);
    check_second_turn(&node, "s", reference);
    ck_assert_int_eq(fixture_stop(&node), 0);
    free(a);
    free(reference);
}
END_TEST

START_TEST(what_was_evicted_is_saved_by_its_ids)
{
    const char *const small[] = {"--snapshots", directory, "--pages", "16", NULL};
    struct answer *a = calloc(1, sizeof(*a)), *reference = make_reference("f16");
    uint32_t others[900];
    struct fixture_node node;
    struct outcome o;

    start(&node, &plain, small);
    first_turn(&node, "s");
    fixture_ids(others, 900, 77, 256);
    turn(&node, "flood", others, 900, 8, a); /* takes nearly all pages */
    ck_assert_int_eq(a->status, TRANSPORT_OK);
    o = save_ok(&node, "s");
    ck_assert_uint_ge(o.positions, 1);
    ck_assert_uint_lt(o.positions, PROMPT);
    fixture_kill(&node);

    start_here(&node, &plain);
    turn(&node, "s", more_ids, MORE, SECOND, a);
    ck_assert_msg(a->status == TRANSPORT_OK, "%s", a->details);
    ck_assert_uint_eq(a->usage.prompt_tokens, PROMPT + FIRST + MORE);
    ck_assert_uint_eq(a->usage.reused_tokens, o.positions);
    ck_assert_mem_eq(a->digests, reference->digests, SECOND * sizeof(a->digests[0]));
    ck_assert_int_eq(fixture_stop(&node), 0);
    free(a);
    free(reference);
}
END_TEST

static bool wait_queued(const struct fixture_node *node)
{
    struct description d;

    for (int i = 0; i < 500; i++) {
        describe(node, &d);
        if (d.queued == 1)
            return true;
        usleep(10000);
    }
    return false;
}

/* All pages are with a request that runs: a restore changes nothing, a turn waits and is answered,
 * or ended by its deadline or cancel. */
START_TEST(a_restore_without_pages_changes_nothing_and_a_turn_waits)
{
    /* The plain kernels take seconds for it. */
    const char *const small[] = {"--snapshots", directory, "--pages", "15",
                                 "--kernels",   "plain",   NULL};
    struct asking *hog = calloc(1, sizeof(*hog)), *a = calloc(1, sizeof(*a));
    struct answer *reference = make_reference("f16");
    struct description before, after;
    struct fixture_node node;
    struct question q, waits;
    struct outcome o;

    start_here(&node, &plain);
    first_turn(&node, "s");
    save_ok(&node, "s");
    ck_assert_int_eq(fixture_stop(&node), 0);

    start(&node, &plain, small);
    question_ids(&q, prompt_ids, 1, 700, BATON__V1__ROUTE__ROUTE_LOCAL);
    asking_start(hog, &node, &q.q, 60000);
    asking_wait_ids(hog, 1);
    describe(&node, &before);
    o = restore(&node, "s");
    ck_assert_msg(o.status == TRANSPORT_RESOURCE_EXHAUSTED, "%s %s",
                  transport_status_name(o.status), o.details);
    describe(&node, &after);
    ck_assert_uint_eq(after.free - after.reserved, before.free - before.reserved);
    ck_assert_uint_eq(after.evictable, before.evictable);
    ck_assert(wait_sessions(&node, 0, 1));

    question_ids(&waits, more_ids, MORE, SECOND, BATON__V1__ROUTE__ROUTE_LOCAL);
    waits.q.session = borrowed("s");
    asking_start(a, &node, &waits.q, 300);
    asking_wait(a);
    ck_assert_int_eq(a->answer.status, TRANSPORT_DEADLINE_EXCEEDED);
    asking_start(a, &node, &waits.q, 60000);
    ck_assert(wait_queued(&node));
    asking_cancel(a);
    asking_wait(a);
    ck_assert(wait_sessions(&node, 0, 1));

    asking_start(a, &node, &waits.q, 60000);
    ck_assert(wait_queued(&node));
    asking_cancel(hog);
    asking_wait(hog);
    asking_wait(a);
    ck_assert_msg(a->answer.status == TRANSPORT_OK, "%s", a->answer.details);
    ck_assert_mem_eq(a->answer.digests, reference->digests, SECOND * sizeof(uint64_t));
    ck_assert_uint_eq(a->answer.usage.reused_tokens, PROMPT + FIRST - 1);
    check_pages(&node);
    ck_assert_int_eq(fixture_stop(&node), 0);
    free(hog);
    free(a);
    free(reference);
}
END_TEST

START_TEST(past_the_budget_nothing_is_written)
{
    const char *const tight[] = {"--snapshots", directory, "--snapshot-budget", "1M", NULL};
    struct answer *reference = make_reference("f16");
    struct fixture_node node;
    struct outcome o;

    start(&node, &plain, tight);
    first_turn(&node, "s");
    o = save(&node, "s");
    ck_assert_int_eq(o.status, TRANSPORT_RESOURCE_EXHAUSTED);
    ck_assert_msg(strstr(o.details, "budget") != NULL, "%s", o.details);
    ck_assert_uint_eq(each_file(NULL), 0);
    check_second_turn(&node, "s", reference);
    ck_assert_int_eq(fixture_stop(&node), 0);
    free(reference);
}
END_TEST

START_TEST(a_full_disk_refuses_the_save_and_costs_nothing_else)
{
    struct answer *reference;
    struct fixture_node node;
    struct outcome o;

    if (mount("tmpfs", directory, "tmpfs", 0, "size=4m") != 0) {
        puts("SKIP a_full_disk_refuses_the_save_and_costs_nothing_else: a file system of a size "
             "cannot be mounted (not root)");
        return;
    }
    reference = make_reference("f16");
    start_here(&node, &plain);
    first_turn(&node, "s");
    save_ok(&node, "s");
    prompt_ids[0] ^= 1; /* another conversation, which does not fit beside */
    first_turn(&node, "t");
    prompt_ids[0] ^= 1;
    o = save(&node, "t");
    ck_assert_msg(o.status == TRANSPORT_RESOURCE_EXHAUSTED, "%s %s",
                  transport_status_name(o.status), o.details);
    each_file(check_no_temporary);
    ck_assert_uint_eq(each_file(NULL), 1);
    check_second_turn(&node, "s", reference);
    check_pages(&node);
    ck_assert_int_eq(fixture_stop(&node), 0);
    ck_assert_int_eq(umount(directory), 0);
    free(reference);
}
END_TEST

START_TEST(a_directory_has_one_node)
{
    struct fixture_node node;
    const char *const second[] = {"--model",     fixture_tiny("tiny-wide"),
                                  "--listen",    "127.0.0.1:0",
                                  "--snapshots", directory,
                                  "--kv-bytes",  "16M",
                                  "--log-level", "error",
                                  NULL};
    char err[2048], want[400];

    start_here(&node, &plain);
    ck_assert_int_eq(fixture_run("decode", second, err, sizeof(err)), NODE_EXIT_FAILED);
    snprintf(want, sizeof(want), "--snapshots: directory %s is in use by another process",
             directory);
    ck_assert_msg(strstr(err, want) != NULL, "%s", err);
    ck_assert_int_eq(fixture_stop(&node), 0);
}
END_TEST

static void flip_in_frames(const char *path, const char *name)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);
    unsigned char byte;

    (void)name;
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(pread(fd, &byte, 1, 1300000), 1);
    byte ^= 16;
    ck_assert_int_eq(pwrite(fd, &byte, 1, 1300000), 1);
    close(fd);
}

static void cut_short(const char *path, const char *name)
{
    (void)name;
    ck_assert_int_eq(truncate(path, 100000), 0);
}

START_TEST(a_damaged_file_is_refused_naming_its_part)
{
    struct answer *a = calloc(1, sizeof(*a));
    struct fixture_node node;
    struct outcome o;

    start_here(&node, &plain);
    first_turn(&node, "s");
    save_ok(&node, "s");
    ck_assert_int_eq(fixture_stop(&node), 0);
    each_file(flip_in_frames);

    start_here(&node, &plain);
    turn(&node, "s", more_ids, MORE, SECOND, a);
    ck_assert_int_eq(a->status, TRANSPORT_DATA_LOSS);
    ck_assert_msg(strstr(a->details, "frame 1") != NULL, "%s", a->details);
    o = restore(&node, "s");
    ck_assert_int_eq(o.status, TRANSPORT_DATA_LOSS);
    ck_assert_msg(strstr(o.details, "frame 1") != NULL, "%s", o.details);
    ck_assert(wait_sessions(&node, 0, 1));
    check_pages(&node);
    ck_assert_int_eq(fixture_stop(&node), 0);

    each_file(cut_short);
    start_here(&node, &plain);
    ck_assert_uint_eq(on_disk(&node).unreadable, 1);
    ck_assert_uint_eq(on_disk(&node).sessions, 0);
    ck_assert_uint_eq(each_file(NULL), 1);
    ck_assert_int_eq(fixture_stop(&node), 0);
    free(a);
}
END_TEST

START_TEST(wrong_calls_are_named)
{
    Baton__V1__VerifyRequest v = BATON__V1__VERIFY_REQUEST__INIT;
    Baton__V1__RestoreRequest r = BATON__V1__RESTORE_REQUEST__INIT;
    uint8_t bytes[20] = {0};
    struct fixture_node node;
    struct outcome o;

    start_here(&node, &plain);
    v.id.data = bytes;
    v.id.len = 15;
    o = call(&node, "Verify", &v.base);
    ck_assert_int_eq(o.status, TRANSPORT_INVALID_ARGUMENT);
    ck_assert_str_eq(o.details, "id: 15 bytes, not 16");
    v.id.len = 16;
    o = call(&node, "Verify", &v.base);
    ck_assert_int_eq(o.status, TRANSPORT_NOT_FOUND);
    o = call(&node, "Restore", &r.base);
    ck_assert_int_eq(o.status, TRANSPORT_INVALID_ARGUMENT);
    ck_assert_str_eq(o.details, "which: neither id nor session is there");
    o = save(&node, "a/b");
    ck_assert_int_eq(o.status, TRANSPORT_INVALID_ARGUMENT);
    ck_assert_int_eq(fixture_stop(&node), 0);

    start(&node, &plain, NULL);
    first_turn(&node, "s");
    o = save(&node, "s");
    ck_assert_int_eq(o.status, TRANSPORT_FAILED_PRECONDITION);
    ck_assert_str_eq(o.details, "snapshots: the node was started without --snapshots");
    ck_assert_int_eq(fixture_stop(&node), 0);
}
END_TEST

START_TEST(options_that_need_a_directory_say_so)
{
    static const char *const lines[][3] = {{"--save-idle", "3", "--save-idle needs --snapshots"},
                                           {"--snapshot-ttl", "3", "--snapshot-ttl needs"},
                                           {"--snapshot-budget", "3", "--snapshot-budget needs"},
                                           {"--durability", "none", "--durability needs"},
                                           {"--durability", "most", "must be one of durable"},
                                           {"--snapshots", "", "must not be empty"}};
    char err[2048];

    for (size_t i = 0; i < sizeof(lines) / sizeof(lines[0]); i++) {
        const char *const args[] = {"--model", fixture_tiny("tiny-wide"), lines[i][0], lines[i][1],
                                    NULL};

        ck_assert_int_eq(fixture_run("decode", args, err, sizeof(err)), NODE_EXIT_USAGE);
        ck_assert_msg(strstr(err, lines[i][2]) != NULL, "%s", err);
    }
}
END_TEST

/* ---- Load, and death in the middle of it ---- */

struct worker {
    const struct fixture_node *node;
    char name[16];
    uint32_t n_acked; /* positions that a save said are on disk */
    atomic_uint n_saves;
    uint32_t seed;
    uint32_t turns; /* at most */
    pthread_t thread;
};

/* Turn, save, turn, save; until the turns are over, or the node is gone. */
static void *talk(void *arg)
{
    struct worker *w = arg;
    struct answer *a = calloc(1, sizeof(*a));
    uint32_t ids[20];

    for (uint32_t i = 0; a != NULL && i < w->turns; i++) {
        struct outcome o;

        fixture_ids(ids, 20, i + 100 * w->seed, 256);
        turn(w->node, w->name, ids, 20, 4, a);
        if (a->status != TRANSPORT_OK)
            break;
        o = save(w->node, w->name);
        if (o.status != TRANSPORT_OK)
            break;
        w->n_acked = o.positions;
        w->n_saves++;
    }
    free(a);
    return NULL;
}

static void start_workers(struct worker *w, const struct fixture_node *node, uint32_t turns)
{
    for (int i = 0; i < SESSIONS; i++) {
        w[i] = (struct worker){.node = node, .turns = turns, .seed = (uint32_t)i};
        snprintf(w[i].name, sizeof(w[i].name), "s%d", i);
        ck_assert_int_eq(pthread_create(&w[i].thread, NULL, talk, &w[i]), 0);
    }
}

static void join_workers(struct worker *w)
{
    for (int i = 0; i < SESSIONS; i++)
        pthread_join(w[i].thread, NULL);
}

START_TEST(sessions_are_saved_while_others_and_they_themselves_run)
{
    struct worker w[SESSIONS];
    struct fixture_node node;

    start_here(&node, &plain);
    start_workers(w, &node, 12);
    join_workers(w);
    for (int i = 0; i < SESSIONS; i++) {
        ck_assert_uint_eq(w[i].n_saves, 12);
        ck_assert_uint_eq(w[i].n_acked, 12 * 24 - 1);
    }
    ck_assert_uint_eq(verify_all(&node), SESSIONS);
    check_pages(&node);
    ck_assert_int_eq(fixture_stop(&node), 0);
}
END_TEST

START_TEST(after_kill_9_while_it_saves_what_was_acknowledged_is_there)
{
    enum { ROUNDS = 8 };
    struct fixture_node node;
    uint32_t n_acked = 0;

    for (int round = 0; round < ROUNDS; round++) {
        struct worker w[SESSIONS];

        start_here(&node, &plain);
        start_workers(w, &node, 40);
        while (round % 2 == 1 && atomic_load(&w[0].n_saves) == 0)
            usleep(1000);
        usleep(7000 + 23000 * (useconds_t)round);
        kill(node.pid, SIGKILL);
        join_workers(w);
        fixture_kill(&node);

        start_here(&node, &plain);
        each_file(check_no_temporary);
        ck_assert_uint_eq(on_disk(&node).unreadable, 0);
        verify_all(&node);
        for (int i = 0; i < SESSIONS; i++) {
            struct outcome o = {.positions = 0};

            if (w[i].n_acked > 0) {
                o = restore(&node, w[i].name);
                ck_assert_msg(o.status == TRANSPORT_OK, "round %d, %s: %s", round, w[i].name,
                              o.details);
            }
            ck_assert_uint_ge(o.positions, w[i].n_acked);
            n_acked += w[i].n_saves;
            close_session(&node, w[i].name, false);
        }
        ck_assert_uint_eq(each_file(NULL), 0);
        ck_assert_int_eq(fixture_stop(&node), 0);
    }
    ck_assert_uint_gt(n_acked, 0);
}
END_TEST

static TCase *add_case(Suite *s, const char *name)
{
    TCase *c = tcase_create(name);

    tcase_set_timeout(c, 200);
    tcase_add_checked_fixture(c, make_directory, remove_directory);
    suite_add_tcase(s, c);
    return c;
}

int main(void)
{
    Suite *s = suite_create("decode snapshot");
    SRunner *r;
    TCase *c;
    int failed;

    transport_start();
    c = add_case(s, "sessions");
    tcase_add_loop_test(c, a_saved_session_goes_on_elsewhere_to_the_same_bits, 0, 3);
    tcase_add_test(c, a_salted_chat_goes_on_where_the_template_left_it);
    tcase_add_test(c, saved_sessions_make_room_for_new_ones);
    tcase_add_test(c, a_save_that_is_cancelled_leaves_all_or_nothing);
    tcase_add_test(c, each_save_writes_what_is_new_and_replaces_the_last);
    tcase_add_test(c, closing_forgets_the_snapshot_unless_it_is_to_stay);
    tcase_add_test(c, an_idle_session_is_saved_and_leaves_memory);
    tcase_add_test(c, all_sessions_are_saved_when_the_node_stops);
    tcase_add_test(c, what_has_expired_is_forgotten);
    tcase_add_test(c, a_session_is_saved_as_it_was_before_the_turn_that_runs);
    tcase_add_test(c, what_was_evicted_is_saved_by_its_ids);
    c = add_case(s, "faults");
    tcase_add_test(c, another_precision_is_refused_naming_both);
    tcase_add_test(c, a_restore_without_pages_changes_nothing_and_a_turn_waits);
    tcase_add_test(c, past_the_budget_nothing_is_written);
    tcase_add_test(c, a_full_disk_refuses_the_save_and_costs_nothing_else);
    tcase_add_test(c, a_directory_has_one_node);
    tcase_add_test(c, a_damaged_file_is_refused_naming_its_part);
    tcase_add_test(c, wrong_calls_are_named);
    tcase_add_test(c, options_that_need_a_directory_say_so);
    c = add_case(s, "load");
    tcase_add_test(c, sessions_are_saved_while_others_and_they_themselves_run);
    tcase_add_test(c, after_kill_9_while_it_saves_what_was_acknowledged_is_there);
    r = srunner_create(s);
    srunner_set_fork_status(r, CK_NOFORK);
    srunner_run_all(r, CK_NORMAL);
    failed = srunner_ntests_failed(r);
    srunner_free(r);
    transport_stop();
    return failed != 0;
}

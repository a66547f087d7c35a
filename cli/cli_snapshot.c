/* baton snapshot: its commands, and those that ask a node. */
#include "cli/cli_snapshot.h"

#include <stdlib.h>
#include <string.h>

/* ---- Which command ---- */

struct command {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *help;
};

static const struct command commands[] = {
    {"save", cli_snapshot_save, "put a session on disk as it is now"},
    {"restore", cli_snapshot_restore, "take a session up again from disk"},
    {"list", cli_snapshot_list, "the snapshots of a node"},
    {"rm", cli_snapshot_rm, "delete snapshots"},
    {"verify", cli_snapshot_verify, "read and check every byte of snapshots"},
    {"compact", cli_snapshot_compact, "write a snapshot that stands on others in full"},
    {"inspect", cli_snapshot_inspect, "what is in a snapshot file; needs no node"},
    {"widen", cli_snapshot_widen, "make an f32 snapshot of an f16 or q8 file; needs no node"},
};
enum { N_COMMANDS = sizeof(commands) / sizeof(commands[0]) };

static int help(int argc, char **argv)
{
    char text[1024];
    size_t n;
    int first, rc;
    bool done;

    n = (size_t)snprintf(text, sizeof(text),
                         "Sessions on disk.\n\nCommands, each with its own --help:");
    for (size_t i = 0; i < N_COMMANDS; i++)
        n += (size_t)snprintf(text + n, sizeof(text) - n, "\n  %-10s %s", commands[i].name,
                              commands[i].help);
    rc = cli_options_parse(argc, argv, NULL, 0, "baton snapshot COMMAND [option...]", text, &first,
                           &done);
    if (done)
        return rc;
    if (first == argc)
        cli_say("snapshot: which command? (--help lists them)");
    else
        cli_say("snapshot: %s: no such command (--help lists them)", argv[first]);
    return NODE_EXIT_USAGE;
}

int cli_snapshot(int argc, char **argv)
{
    for (size_t i = 0; argc > 1 && i < N_COMMANDS; i++)
        if (strcmp(commands[i].name, argv[1]) == 0)
            return commands[i].run(argc - 1, argv + 1);
    return help(argc, argv);
}

/* ---- Ids ---- */

enum { ID_TEXT = KV_SNAPSHOT_ID_TEXT };

static const char *id_text(char buf[ID_TEXT], const ProtobufCBinaryData *id)
{
    return cli_hex(buf, id->data, id->len < KV_SNAPSHOT_ID_BYTES ? id->len : KV_SNAPSHOT_ID_BYTES);
}

int cli_snapshot_each(const struct cli_query *q,
                      bool (*each)(void *arg, const Baton__V1__Snapshot *s), void *arg)
{
    Baton__V1__ListSnapshotsRequest request = BATON__V1__LIST_SNAPSHOTS_REQUEST__INIT;
    uint8_t after[KV_SNAPSHOT_ID_BYTES];
    bool more = true;

    request.after.data = after;
    while (more) {
        const Baton__V1__ListSnapshotsReply *reply;
        struct node_message m;
        int rc = cli_query_ask(q, "/baton.v1.Snapshots/List", &request.base,
                               &baton__v1__list_snapshots_reply__descriptor, &m);

        if (rc != NODE_EXIT_OK)
            return rc;
        reply = (const Baton__V1__ListSnapshotsReply *)m.message;
        more = reply->more && reply->n_snapshots > 0;
        for (size_t i = 0; i < reply->n_snapshots; i++) {
            const Baton__V1__Snapshot *s = reply->snapshots[i];

            if (s->id.len != sizeof(after) || !each(arg, s)) {
                more = false;
                break;
            }
            memcpy(after, s->id.data, sizeof(after));
        }
        request.after.len = sizeof(after);
        node_message_free(&m);
    }
    return NODE_EXIT_OK;
}

struct search {
    const char *text;
    size_t n;
    uint32_t n_found;
    struct kv_snapshot_id id;
};

static bool search_one(void *arg, const Baton__V1__Snapshot *s)
{
    struct search *f = arg;
    char text[ID_TEXT];

    if (strncmp(id_text(text, &s->id), f->text, f->n) == 0) {
        memcpy(f->id.bytes, s->id.data, sizeof(f->id.bytes));
        f->n_found++;
    }
    return f->n_found < 2;
}

int cli_snapshot_find(const struct cli_query *q, const char *text, struct kv_snapshot_id *out)
{
    struct search f = {.text = text, .n = strlen(text)};
    char quoted[128];
    int rc;

    node_quote(quoted, sizeof(quoted), text);
    if (f.n < CLI_MIN_ID_DIGITS || f.n >= ID_TEXT || strspn(text, "0123456789abcdef") != f.n) {
        cli_say("snapshot: %s is no id: %d to %d digits of 0-9a-f", quoted, (int)CLI_MIN_ID_DIGITS,
                (int)ID_TEXT - 1);
        return NODE_EXIT_USAGE;
    }
    if (kv_snapshot_id_parse(text, out) == 0)
        return NODE_EXIT_OK;
    rc = cli_snapshot_each(q, search_one, &f);
    if (rc != NODE_EXIT_OK)
        return rc;
    *out = f.id;
    if (f.n_found == 1)
        return NODE_EXIT_OK;
    cli_say("snapshot: %s",
            f.n_found == 0 ? "no id of the node begins so" : "several ids of the node begin so");
    return NODE_EXIT_FAILED;
}

/* ---- Calls that stream ---- */

/* What a command was told. */
struct told {
    const char *to, *id, *as;
    float timeout_s;
    bool full, leave, all;
    struct cli_query query;
};

struct stream {
    struct cli_call *call;
    struct cli_bar bar;
    struct node_message done; /* kept */
};

static int take_reply(struct stream *s, struct transport_message *bytes)
{
    const Baton__V1__SnapshotReply *r;
    struct node_message m;
    struct kv_why why;
    int rc = node_message_unpack(&baton__v1__snapshot_reply__descriptor, bytes, &m, &why);

    transport_message_unref(bytes);
    if (rc < 0) {
        cli_say("the node's reply: %s", why.text);
        return NODE_EXIT_FAILED;
    }
    r = (const Baton__V1__SnapshotReply *)m.message;
    if (r->event_case == BATON__V1__SNAPSHOT_REPLY__EVENT_PROGRESS)
        cli_bar_move(&s->bar, r->progress->done, r->progress->total);
    if (r->event_case == BATON__V1__SNAPSHOT_REPLY__EVENT_DONE && s->done.message == NULL)
        s->done = m;
    else
        node_message_free(&m);
    return NODE_EXIT_OK;
}

/* Read it to its end.  0, or an exit code, said. */
static int read_stream(struct stream *s)
{
    struct transport_message *bytes;
    struct cli_interrupt interrupt;
    const char *details;
    int code, signal, rc = cli_interrupt_begin(&interrupt, s->call);

    if (rc != NODE_EXIT_OK)
        return rc;
    while (rc == NODE_EXIT_OK && (bytes = cli_call_next(s->call)) != NULL)
        rc = take_reply(s, bytes);
    signal = cli_interrupt_end(&interrupt);
    cli_bar_end(&s->bar);
    if (rc != NODE_EXIT_OK)
        return rc;
    code = cli_call_status(s->call, &details);
    if (code == TRANSPORT_OK && s->done.message != NULL)
        return NODE_EXIT_OK;
    if (signal != 0)
        return NODE_EXIT_INTERRUPTED;
    return code == TRANSPORT_OK ? cli_say_status(TRANSPORT_INTERNAL, "the stream ended too soon")
                                : cli_say_status(code, details);
}

/* One call; print() says what came of it.  0, or an exit code, said. */
static int stream(const struct told *t, const char *what, const char *path,
                  const ProtobufCMessage *request, void (*print)(const Baton__V1__SnapshotDone *d))
{
    struct stream s = {.call = NULL};
    struct transport_out *out = node_message_pack(request);
    const Baton__V1__SnapshotReply *r;
    int rc;

    if (out == NULL) {
        cli_say("no memory for the request");
        return NODE_EXIT_FAILED;
    }
    rc = cli_call_open(&s.call, t->to, path, out, cli_deadline_ms(t->timeout_s));
    if (rc != NODE_EXIT_OK)
        return rc;
    cli_bar_begin(&s.bar, what);
    rc = read_stream(&s);
    cli_call_close(s.call);
    if (rc == NODE_EXIT_OK) {
        r = (const Baton__V1__SnapshotReply *)s.done.message;
        if (r->done->snapshot != NULL)
            print(r->done);
    }
    node_message_free(&s.done);
    return rc;
}

static void print_done(const Baton__V1__SnapshotDone *d, const char *what, const char *moved)
{
    const Baton__V1__Snapshot *s = d->snapshot;
    char id[ID_TEXT], name[2 * 128 + 3], bytes[32], span[32], rate[32];

    printf("%s %s", what, id_text(id, &s->id));
    if (s->session[0] != '\0')
        printf(" %s", node_quote(name, sizeof(name), s->session));
    printf(": %u positions", s->positions);
    if (s->base_position > 0)
        printf(", %u of them in %u file%s below", s->base_position, s->depth - 1,
               s->depth > 2 ? "s" : "");
    if (d->bytes > 0)
        printf(", %s %s in %s, %s", cli_bytes(bytes, sizeof(bytes), (double)d->bytes), moved,
               cli_span(span, sizeof(span), d->ns), cli_rate(rate, sizeof(rate), d->bytes, d->ns));
    printf("\n");
}

static void print_saved(const Baton__V1__SnapshotDone *d)
{
    print_done(d, d->bytes > 0 ? "saved" : "saved already", "written");
}

static void print_restored(const Baton__V1__SnapshotDone *d)
{
    print_done(d, "restored", "read");
}

static void print_verified(const Baton__V1__SnapshotDone *d)
{
    print_done(d, "whole", "read");
}

static void print_compacted(const Baton__V1__SnapshotDone *d)
{
    print_done(d, d->bytes > 0 ? "compacted" : "stands alone already", "written");
}

/* ---- Command lines ---- */

#define OPTION_TO(t)                                                                   \
    {                                                                                  \
        "to", 0, NODE_OPT_ADDRESS, &(t).to, "HOST:PORT", "the decode node", 0, 0, NULL \
    }
#define OPTION_TIMEOUT(t)                                                                       \
    {                                                                                           \
        "timeout", 0, NODE_OPT_FLOAT, &(t).timeout_s, "SECONDS", "for each call", 0.001, 86400, \
            NULL                                                                                \
    }

/* After the options: --to is there, and between least and most arguments.  0, or an exit code. */
static int check_line(const struct told *t, const char *command, int n, int least, int most,
                      const char *none)
{
    if (t->to == NULL)
        cli_say("snapshot %s: --to HOST:PORT is needed, the address of a decode node", command);
    else if (n < least)
        cli_say("snapshot %s: %s (baton snapshot %s --help)", command, none, command);
    else if (n > most)
        cli_say("snapshot %s: %d argument%s too many (baton snapshot %s --help)", command, n - most,
                n - most > 1 ? "s" : "", command);
    else
        return NODE_EXIT_OK;
    return NODE_EXIT_USAGE;
}

static int begin(struct told *t)
{
    node_signals_block();
    return cli_query_open(&t->query, t->to, t->timeout_s);
}

int cli_snapshot_save(int argc, char **argv)
{
    struct told t = {.timeout_s = 600};
    Baton__V1__SaveRequest request = BATON__V1__SAVE_REQUEST__INIT;
    const struct node_option options[] = {
        OPTION_TO(t),
        {"full", 0, NODE_OPT_FLAG, &t.full, NULL,
         "write all of it, also what other snapshots have already", 0, 0, NULL},
        {"leave", 0, NODE_OPT_FLAG, &t.leave, NULL, "let the session leave memory then", 0, 0,
         NULL},
        OPTION_TIMEOUT(t),
    };
    int first, rc;
    bool done;

    rc = cli_options_parse(argc, argv, options, 4,
                           "baton snapshot save --to HOST:PORT [option...] NAME",
                           "Puts the session of this name on disk as it was after its last turn. "
                           "Only what its last snapshot lacks is written.",
                           &first, &done);
    if (done)
        return rc;
    rc = check_line(&t, "save", argc - first, 1, 1, "which session?");
    if (rc != NODE_EXIT_OK)
        return rc;
    rc = begin(&t);
    if (rc != NODE_EXIT_OK)
        return rc;
    request.session = argv[first];
    request.full = t.full;
    request.leave = t.leave;
    rc = stream(&t, "saving", "/baton.v1.Snapshots/Save", &request.base, print_saved);
    cli_query_close(&t.query);
    return rc;
}

static int restore(struct told *t, const char *name)
{
    Baton__V1__RestoreRequest request = BATON__V1__RESTORE_REQUEST__INIT;
    struct kv_snapshot_id id;
    int rc = NODE_EXIT_OK;

    if (t->id != NULL) {
        rc = cli_snapshot_find(&t->query, t->id, &id);
        request.which_case = BATON__V1__RESTORE_REQUEST__WHICH_ID;
        request.id.data = id.bytes;
        request.id.len = sizeof(id.bytes);
    } else {
        request.which_case = BATON__V1__RESTORE_REQUEST__WHICH_SESSION;
        request.session = (char *)(uintptr_t)name; /* borrowed: protobuf-c only packs it */
    }
    if (t->as != NULL)
        request.as_session = (char *)(uintptr_t)t->as;
    if (rc != NODE_EXIT_OK)
        return rc;
    return stream(t, "restoring", "/baton.v1.Snapshots/Restore", &request.base, print_restored);
}

int cli_snapshot_restore(int argc, char **argv)
{
    struct told t = {.timeout_s = 600};
    const struct node_option options[] = {
        OPTION_TO(t),
        {"id", 0, NODE_OPT_STRING, &t.id, "ID",
         "the snapshot of this id, instead of NAME; its first digits are enough", 0, 0, NULL},
        {"as", 0, NODE_OPT_STRING, &t.as, "NAME", "name of the session; else that which was saved",
         0, 0, NULL},
        OPTION_TIMEOUT(t),
    };
    int first, rc;
    bool done;

    rc = cli_options_parse(argc, argv, options, 4,
                           "baton snapshot restore --to HOST:PORT [option...] NAME",
                           "Takes the session of this name up again from disk, so that its next "
                           "turn computes nothing of it again. (A turn of a session that is only "
                           "on disk does so by itself.)",
                           &first, &done);
    if (done)
        return rc;
    rc = check_line(&t, "restore", argc - first, t.id == NULL ? 1 : 0, t.id == NULL ? 1 : 0,
                    "which session, or which --id?");
    if (rc == NODE_EXIT_OK)
        rc = begin(&t);
    if (rc != NODE_EXIT_OK)
        return rc;
    rc = restore(&t, argv[first]);
    cli_query_close(&t.query);
    return rc;
}

static bool print_listed(void *arg, const Baton__V1__Snapshot *s)
{
    static const char *const precisions[] = {"f32", "f16", "q8"};
    const uint32_t precision = s->geometry != NULL ? (uint32_t)s->geometry->precision : 3;
    const int64_t ago_ns = node_wall_ns() - (int64_t)s->used_unix_ns;
    char id[ID_TEXT], name[2 * 128 + 3], bytes[32], span[32];
    uint32_t *n = arg;

    if ((*n)++ == 0)
        printf("%-32s %9s %9s %5s %4s %-4s %9s  %s\n", "id", "positions", "from", "files", "used",
               "kv", "size", "used, session");
    printf("%-32s %9u %9u %5u %4u %-4s %9s  %s ago", id_text(id, &s->id), s->positions,
           s->base_position, s->depth, s->children, precision < 3 ? precisions[precision] : "?",
           cli_bytes(bytes, sizeof(bytes), (double)s->file_bytes),
           cli_span(span, sizeof(span), ago_ns > 0 ? (uint64_t)ago_ns : 0));
    if (s->session[0] != '\0')
        printf("  %s", node_quote(name, sizeof(name), s->session));
    printf("\n");
    return true;
}

int cli_snapshot_list(int argc, char **argv)
{
    struct told t = {.timeout_s = 30};
    const struct node_option options[] = {OPTION_TO(t), OPTION_TIMEOUT(t)};
    uint32_t n = 0;
    int first, rc;
    bool done;

    rc = cli_options_parse(
        argc, argv, options, 2, "baton snapshot list --to HOST:PORT [option...]",
        "Lists the snapshots of a node: id, positions, the first one in its own file, files in its "
        "chain, snapshots that stand on it, precision, size of its file, when it was last used, "
        "and the session whose latest it is.",
        &first, &done);
    if (done)
        return rc;
    rc = check_line(&t, "list", argc - first, 0, 0, "");
    if (rc == NODE_EXIT_OK)
        rc = begin(&t);
    if (rc != NODE_EXIT_OK)
        return rc;
    rc = cli_snapshot_each(&t.query, print_listed, &n);
    cli_query_close(&t.query);
    return rc;
}

/* ---- Commands on ids ---- */

static int remove_one(const struct told *t, struct kv_snapshot_id *id)
{
    Baton__V1__DeleteSnapshotRequest request = BATON__V1__DELETE_SNAPSHOT_REQUEST__INIT;
    struct node_message m;
    int rc;

    request.id.data = id->bytes;
    request.id.len = sizeof(id->bytes);
    rc = cli_query_ask(&t->query, "/baton.v1.Snapshots/Delete", &request.base,
                       &baton__v1__delete_snapshot_reply__descriptor, &m);
    if (rc == NODE_EXIT_OK)
        node_message_free(&m);
    return rc;
}

static int verify_one(const struct told *t, struct kv_snapshot_id *id)
{
    Baton__V1__VerifyRequest request = BATON__V1__VERIFY_REQUEST__INIT;

    request.id.data = id->bytes;
    request.id.len = sizeof(id->bytes);
    return stream(t, "verifying", "/baton.v1.Snapshots/Verify", &request.base, print_verified);
}

static int compact_one(const struct told *t, struct kv_snapshot_id *id)
{
    Baton__V1__CompactRequest request = BATON__V1__COMPACT_REQUEST__INIT;

    request.id.data = id->bytes;
    request.id.len = sizeof(id->bytes);
    return stream(t, "compacting", "/baton.v1.Snapshots/Compact", &request.base, print_compacted);
}

struct ids {
    struct kv_snapshot_id *ids;
    size_t n, cap;
    bool no_memory;
};

static bool add_id(void *arg, const Baton__V1__Snapshot *s)
{
    struct ids *list = arg;
    struct kv_snapshot_id *more;

    if (list->n == list->cap) {
        list->cap = list->cap == 0 ? 64 : 2 * list->cap;
        more = realloc(list->ids, list->cap * sizeof(*more));
        list->no_memory = more == NULL;
        if (more == NULL)
            return false;
        list->ids = more;
    }
    memcpy(list->ids[list->n++].bytes, s->id.data, KV_SNAPSHOT_ID_BYTES);
    return true;
}

/* All of the node; the worst of what each came to. */
static int on_all(const struct told *t, int (*one)(const struct told *t, struct kv_snapshot_id *id))
{
    struct ids list = {.ids = NULL};
    int rc = cli_snapshot_each(&t->query, add_id, &list), each;

    if (list.no_memory) {
        cli_say("no memory for the list of snapshots");
        rc = NODE_EXIT_FAILED;
    }
    for (size_t i = 0; i < list.n && (rc == NODE_EXIT_OK || rc == NODE_EXIT_FAILED); i++) {
        each = one(t, &list.ids[i]);
        rc = each != NODE_EXIT_OK ? each : rc;
    }
    free(list.ids);
    return rc;
}

/* The same for those that are named. */
static int on_named(const struct told *t, char **ids, int n,
                    int (*one)(const struct told *t, struct kv_snapshot_id *id))
{
    struct kv_snapshot_id id;
    int rc = NODE_EXIT_OK;

    for (int i = 0; i < n && rc == NODE_EXIT_OK; i++) {
        rc = cli_snapshot_find(&t->query, ids[i], &id);
        if (rc == NODE_EXIT_OK)
            rc = one(t, &id);
    }
    return rc;
}

struct id_command {
    const char *name, *usage, *text;
    int (*one)(const struct told *t, struct kv_snapshot_id *id);
};

static int run_on_ids(int argc, char **argv, const struct id_command *c)
{
    struct told t = {.timeout_s = 600};
    const struct node_option options[] = {
        OPTION_TO(t),
        {"all", 0, NODE_OPT_FLAG, &t.all, NULL, "all snapshots of the node", 0, 0, NULL},
        OPTION_TIMEOUT(t),
    };
    int first, rc;
    bool done;

    rc = cli_options_parse(argc, argv, options, 3, c->usage, c->text, &first, &done);
    if (done)
        return rc;
    rc = check_line(&t, c->name, argc - first, t.all ? 0 : 1, t.all ? 0 : NODE_MAX_OPTIONS,
                    "which ID?");
    if (rc == NODE_EXIT_OK)
        rc = begin(&t);
    if (rc != NODE_EXIT_OK)
        return rc;
    rc = t.all ? on_all(&t, c->one) : on_named(&t, argv + first, argc - first, c->one);
    cli_query_close(&t.query);
    return rc;
}

int cli_snapshot_rm(int argc, char **argv)
{
    static const struct id_command c = {
        "rm", "baton snapshot rm --to HOST:PORT [option...] ID...",
        "Deletes snapshots; the first digits of an ID are enough. A session that is only on disk "
        "is forgotten with its snapshot.",
        remove_one};

    return run_on_ids(argc, argv, &c);
}

int cli_snapshot_verify(int argc, char **argv)
{
    static const struct id_command c = {
        "verify", "baton snapshot verify --to HOST:PORT [option...] ID...",
        "Reads and checks every byte of snapshots, and of those that they stand on; the first "
        "digits of an ID are enough.",
        verify_one};

    return run_on_ids(argc, argv, &c);
}

int cli_snapshot_compact(int argc, char **argv)
{
    static const struct id_command c = {
        "compact", "baton snapshot compact --to HOST:PORT [option...] ID...",
        "Writes snapshots that stand on others in full, under the same ID, so that each is one "
        "file and what it stood on may go.",
        compact_one};

    return run_on_ids(argc, argv, &c);
}

/* node: what every Baton process needs once: options, log, bounded queues, clocks and signals. */
#ifndef NODE_H
#define NODE_H

#include "kvcore/kvcore.h"

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* ---- Exit codes of all programs ---- */
enum node_exit {
    NODE_EXIT_OK = 0,
    NODE_EXIT_FAILED = 1,        /* the work could not be done; the message says why */
    NODE_EXIT_USAGE = 2,         /* the command line is wrong */
    NODE_EXIT_UNAVAILABLE = 3,   /* a peer cannot be reached, or a port is in use */
    NODE_EXIT_INTERRUPTED = 130, /* by Ctrl-C or SIGTERM, as shells say it */
};

/* ---- Log: one line an event, `time level event key=value ...`, to stderr ---- */

enum node_level { NODE_DEBUG, NODE_INFO, NODE_WARN, NODE_ERROR };

void node_log_set_level(enum node_level level);
int node_level_parse(const char *name); /* or -1 */
/* fmt makes the key=value part; values with spaces are the caller's to quote with node_quote(). At
 * most 200 lines a second leave; how many were held back is said in the next line that does. */
void node_log(enum node_level level, const char *event, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* s in double quotes, control characters and quotes escaped, cut to fit; returns buf. */
const char *node_quote(char *buf, size_t n, const char *s);

/* ---- Clocks and ids ---- */

int64_t node_now_ns(void);  /* CLOCK_MONOTONIC */
int64_t node_wall_ns(void); /* CLOCK_REALTIME, since 1970 */
void node_random(void *buf, size_t n);

/* ---- Parsing of option values: the whole string, in range, or false ---- */

bool node_parse_u32(const char *s, uint32_t min, uint32_t max, uint32_t *out);
bool node_parse_u64(const char *s, uint64_t min, uint64_t max, uint64_t *out);
bool node_parse_float(const char *s, float min, float max, float *out); /* finite */
/* "512M", "4G", "65536"; units K, M, G, T of 1,024. */
bool node_parse_bytes(const char *s, uint64_t min, uint64_t max, uint64_t *out);
/* "HOST:PORT", "[v6]:PORT"; port 0..65535. */
bool node_parse_address(const char *s);

/* ---- Options: one table for parsing, --help and the settings printed at start ---- */

enum node_option_type {
    NODE_OPT_FLAG, /* bool */
    NODE_OPT_U32,  /* uint32_t, min..max */
    NODE_OPT_U64,
    NODE_OPT_BYTES,  /* uint64_t */
    NODE_OPT_FLOAT,  /* float, min..max */
    NODE_OPT_STRING, /* const char *, borrowed from argv */
    NODE_OPT_ADDRESS,
    NODE_OPT_CHOICE, /* const char *, one of choices */
    NODE_OPT_LIST,   /* struct node_strings, may be given several times */
};

enum { NODE_MAX_OPTIONS = 64 }; /* of a table, and of strings in a list */

struct node_strings {
    const char *items[NODE_MAX_OPTIONS];
    size_t n;
};

struct node_option {
    const char *name; /* long name without dashes */
    char letter;      /* or 0 */
    enum node_option_type type;
    void *value;          /* where it goes; holds the default before; a number below min: none */
    const char *argument; /* "FILE", for --help */
    const char *help;
    double min, max;            /* numbers; max 0: as large as the type goes (floats: both 0) */
    const char *const *choices; /* NULL-terminated */
};

/* Parse with getopt_long.  --help prints usage, the text and the options with their defaults and
 * exits by returning NODE_EXIT_OK with *done; --version likewise.  A wrong option or value is said
 * on stderr with its name and value, and NODE_EXIT_USAGE returned with *done.  Otherwise *first is
 * the index of the first argument that is no option; options may stand behind it and end at "--":
 * argv is reordered.  usage starts with the program's name ("baton generate [option...] TEXT"),
 * which all messages do too; text may be NULL.  Not thread-safe (getopt). */
int node_options_parse(int argc, char **argv, const struct node_option *options, size_t n_options,
                       const char *usage, const char *text, int *first, bool *done);

/* ---- Bounded queue of pointers, any number of threads at each end ---- */

struct node_queue {
    pthread_mutex_t lock;
    pthread_cond_t not_empty;
    /* Guarded by lock. */
    void **items;
    size_t cap, head, n;
    bool closed;
};

int node_queue_init(struct node_queue *q, size_t cap); /* 0 or -1 */
void node_queue_release(struct node_queue *q);         /* must be empty */
/* False: full or closed; the item stays the caller's. */
bool node_queue_push(struct node_queue *q, void *item);
/* Wait up to timeout_ms (-1: for ever) for an item.  NULL: none in time, or closed and empty. */
void *node_queue_pop(struct node_queue *q, int timeout_ms);
/* Nothing more can be pushed; poppers get what is left, then NULL. */
void node_queue_close(struct node_queue *q);
size_t node_queue_length(struct node_queue *q);

/* ---- Signals ---- */

/* Block SIGINT, SIGTERM and SIGPIPE in this and all later threads.  Before any thread is started.
 */
void node_signals_block(void);
/* Wait for SIGINT or SIGTERM; returns which. */
int node_signals_wait(void);

/* ---- Inbox: where other threads leave things for the one thread that owns them ---- */

/* Embedded in what is left there, which is in one inbox at most once at a time; so an inbox is
 * never full, and bounded by the number of those things. */
struct node_link {
    struct node_link *next;
};

struct node_inbox {
    pthread_mutex_t lock;
    pthread_cond_t not_empty;
    /* Guarded by lock. */
    struct node_link *first, **last;
    bool woken;
};

int node_inbox_init(struct node_inbox *b); /* 0 or -1 */
void node_inbox_release(struct node_inbox *b);
void node_inbox_put(struct node_inbox *b, struct node_link *item);
/* Let the owner look around although nothing is left for it. */
void node_inbox_wake(struct node_inbox *b);
/* Take all that is there, oldest first, linked by next.  Where there is nothing, wait up to
 * timeout_ms (-1: for ever, 0: not at all) for something or for a wake; then NULL. */
struct node_link *node_inbox_take(struct node_inbox *b, int timeout_ms);

/* ---- Protobuf messages: bounded, and with the lengths of their strings ---- */

struct ProtobufCMessage;
struct ProtobufCMessageDescriptor;
struct transport_message;
struct transport_out;

/* Most memory that one unpacked message may take, whatever its bytes ask for: small repeated
 * messages grow thirty-fold. */
enum { NODE_MESSAGE_BYTES = 64 * 1024 * 1024 };

/* An unpacked message.  Release with node_message_free(). */
struct node_message {
    struct ProtobufCMessage *message; /* of the type asked for */
    size_t used;                      /* bytes taken for it */
};

/* Unpack a received message.  0; -1: not of that type, over the bound, or no memory: *why says. */
int node_message_unpack(const struct ProtobufCMessageDescriptor *type, struct transport_message *m,
                        struct node_message *out, struct kv_why *why);
void node_message_free(struct node_message *m);
/* The length of a string field of an unpacked message, NUL bytes inside it included (its C string
 * ends at the first one). */
size_t node_message_strlen(const char *field);
/* A message as one to send; NULL: no memory. */
struct transport_out *node_message_pack(const struct ProtobufCMessage *m);

/* ---- Hello: who is speaking, and what must be equal at both ends ---- */

enum { NODE_PROTOCOL = 1, NODE_EPOCH_BYTES = 16 };

struct node_identity {
    uint8_t epoch[NODE_EPOCH_BYTES]; /* drawn at start */
    struct kv_digest fingerprint;
    struct kv_digest numerics_id;
    struct kv_geometry geometry;
};

struct Baton__V1__Hello;
struct Baton__V1__Geometry;

/* Fill a hello whose bytes point into *id.  *geometry is where hello->geometry will point. */
void node_hello_fill(struct node_identity *id, struct Baton__V1__Hello *hello,
                     struct Baton__V1__Geometry *geometry);
/* Compare what a peer said with ourselves.  0, or KV_ERR_MISMATCH naming the field, both sides and
 * their values.  peer and self are what to call them ("decode", "this prefill node"); hello may be
 * NULL (absent). */
int node_hello_check(const struct node_identity *id, const struct Baton__V1__Hello *hello,
                     const char *peer, const char *self, struct kv_why *why);

/* Bytes of the largest record of a snapshot stream: a frame, a header with n_ctx ids, or n_logits
 * logits; at least the transport's minimum. */
uint32_t node_record_bytes(const struct kv_geometry *g, uint32_t n_ctx, uint32_t n_logits);

/* ---- What operators call, on either node: baton.v1.Operator ---- */

struct Baton__V1__Pages;
struct kv_cache;
struct transport_method;

/* A thread that does what handlers must not wait for. */
struct node_operator;

enum {
    NODE_OPERATOR_METHODS = 1,
    NODE_OPERATOR_WAITING = 4, /* calls that may wait; more are refused */
};

/* The cache must live until it is closed.  0, or -1: no memory, or no thread. */
int node_operator_open(struct kv_cache *cache, struct node_operator **out);
/* The methods, for a server, NODE_OPERATOR_METHODS of them; `op` is theirs. */
void node_operator_methods(struct node_operator *op, struct transport_method *out);
/* When the server is closed.  NULL is fine. */
void node_operator_close(struct node_operator *op);

/* The page accounts of a cache's statistics, as messages have them. */
void node_pages_fill(const struct kv_stats *stats, struct Baton__V1__Pages *out);

/* ---- The session section of a snapshot (docs/snapshot-format.md, "Session"): what a session is
 * beside the ids of its context and their KV.  Bytes to struct and back, and nothing else. ---- */

enum {
    NODE_SESSION_NAME = 128, /* bytes of a name, at most */
    NODE_TENANT_BYTES = 128,
    NODE_SALT_BYTES = 64,
};

struct node_salt {
    uint8_t bytes[NODE_SALT_BYTES];
    size_t len;
};

struct node_session {
    char name[NODE_SESSION_NAME + 1];
    char tenant[NODE_TENANT_BYTES + 1];
    struct node_salt salt; /* of the last turn */
    uint32_t n_ids;        /* of the session: the snapshot's positions and the tail */
    const uint32_t *tail;  /* [n_tail], most often the pending one; borrowed in encode, and in
                              decode the caller's to free with node_session_release() */
    uint32_t n_tail;
};

/* Whether a name is one: 1 to 128 bytes of [A-Za-z0-9._-]. */
bool node_session_name_ok(const char *name, size_t n);
/* *out is the caller's to free.  KV_ERR_INVALID names the field; KV_ERR_LIMIT: longer than a
 * section may be; KV_ERR_NOMEM. */
int node_session_encode(const struct node_session *s, void **out, size_t *len, struct kv_why *why);
/* Of a snapshot with n_positions.  KV_ERR_FORMAT, KV_ERR_CHECK and KV_ERR_LIMIT name the field;
 * KV_ERR_NOMEM.  Whether the ids are in a vocabulary is for others to say. */
int node_session_decode(const void *data, size_t len, uint32_t n_positions,
                        struct node_session *out, struct kv_why *why);
void node_session_release(struct node_session *s);

/* ---- What the two nodes' command lines have in common ---- */

struct node_serve {
    const char *listen;
    const char *port_file;
    const char *model;
    uint64_t kv_bytes; /* 0 after parsing: node_default_kv_bytes() is meant */
    uint32_t n_pages;
    uint32_t page_tokens;
    const char *precision;
    uint32_t chunk; /* 0: from measured speed */
    uint32_t threads;
    const char *kernels;
    uint32_t queue;
    uint32_t max_context;
    uint32_t grace_ms;
    const char *log_level;
};

enum { NODE_SERVE_OPTIONS = 14 };

/* Set the defaults, and write NODE_SERVE_OPTIONS options that point into *s to out. */
void node_serve_options(struct node_serve *s, struct node_option *out);
/* A quarter of the memory that is available now, at most 2 GiB, at least 64 MiB. */
uint64_t node_default_kv_bytes(void);
/* Before the model is opened, which takes seconds: check that the address can be listened on, and
 * log that the model comes next.  0, or an exit code and a message on stderr. */
int node_serve_begin(const struct node_serve *s, const char *program);
/* Say on stdout and in the port file, where one is asked for, that the node listens there.  0 or -1
 * (the port file cannot be written). */
int node_serve_ready(const struct node_serve *s, const char *program, int port);

#endif

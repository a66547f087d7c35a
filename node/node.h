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
    NODE_EXIT_FAILED = 1,      /* the work could not be done; the message says why */
    NODE_EXIT_USAGE = 2,       /* the command line is wrong */
    NODE_EXIT_UNAVAILABLE = 3, /* a peer cannot be reached, or a port is in use */
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
    void *value;          /* where it goes; holds the default before */
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

/* Log all values as they stand, in one line: event `options`, `name=value ...`. */
void node_options_log(const struct node_option *options, size_t n_options);

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

#endif

/* cli: the `baton` program.  Private to it: what its commands share. */
#ifndef CLI_H
#define CLI_H

#include "node/node.h"
#include "proto/proto.h"
#include "transport/transport.h"

#include <cjson/cJSON.h>
#include <stdatomic.h>

/* Each command is main's argv from its own name on, and returns an exit code. */
int cli_generate(int argc, char **argv);
int cli_tokenize(int argc, char **argv);
int cli_model(int argc, char **argv);
int cli_status(int argc, char **argv);
int cli_audit(int argc, char **argv);
int cli_close(int argc, char **argv);
int cli_snapshot(int argc, char **argv);

/* node_options_parse(), after a look for text that begins with "-" where an option may stand. */
int cli_options_parse(int argc, char **argv, const struct node_option *options, size_t n_options,
                      const char *usage, const char *text, int *first, bool *done);
/* Say on stderr, in one line after "baton: ". */
void cli_say(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* The same for a call that ended with this status; returns the exit code for it. */
int cli_say_status(int code, const char *details);
/* The same for a file; the path is said once, where why begins with it too. */
int cli_say_file(const char *path, const struct kv_why *why);
/* False, and says so: there must be exactly one argument.  `none` and `many` say what is wrong. */
bool cli_one_argument(int argc, int first, const char *command, const char *none, const char *many);
/* s as node_quote() escapes it, without the quotes; returns a place in buf. */
const char *cli_plain(char *buf, size_t n, const char *s);

enum {
    CLI_EXIT_NO_READER = 141, /* stdout is a pipe that nobody reads any more: not worth a word */
};

/* ---- Input ---- */

enum {
    CLI_MAX_TEXT_BYTES = 64 * 1024 * 1024,
    CLI_MAX_IDS = 16 * 1024 * 1024,
};

/* The argument, or where it is "-" all of stdin, less one newline at its end.  The caller frees
 * *text, which ends in a NUL that *len does not count.  0, or an exit code, said. */
int cli_read_text(const char *arg, char **text, size_t *len);
/* Token ids, with a comma or white space between them.  The caller frees *ids.  0, or an exit code,
 * said. */
int cli_parse_ids(const char *text, uint32_t **ids, size_t *n);

/* ---- A server-streaming call, read in the caller's own time ---- */

struct cli_call;

/* Connect to target and start the call.  `request` is given away.  0, or an exit code, said. */
int cli_call_open(struct cli_call **out, const char *target, const char *path,
                  struct transport_out *request, int64_t deadline_ms);
/* The next message (the caller's reference), or NULL: the call is over. */
struct transport_message *cli_call_next(struct cli_call *c);
/* From any thread; the call then ends CANCELLED, unless it has ended already. */
void cli_call_cancel(struct cli_call *c);
/* Once it is over: its status and, in *details, a string that lives as long as the call. */
int cli_call_status(const struct cli_call *c, const char **details);
/* Cancels it where it is not over. */
void cli_call_close(struct cli_call *c);

/* Ctrl-C and SIGTERM cancel a call from begin to end.  Signals are blocked (node_signals_block). */
struct cli_interrupt {
    struct cli_call *call;
    pthread_t thread;
    atomic_int signal; /* that came; 0: none */
    atomic_bool over;
};

/* 0, or an exit code, said. */
int cli_interrupt_begin(struct cli_interrupt *i, struct cli_call *call);
/* The signal that came, or 0. */
int cli_interrupt_end(struct cli_interrupt *i);

/* ---- Unary calls ---- */

struct cli_query {
    struct transport_channel *channel;
    int64_t deadline_ms;
};

/* Starts the transport and connects.  0, or an exit code, said. */
int cli_query_open(struct cli_query *q, const char *target, float timeout_s);
/* 0, or an exit code, said. */
int cli_query_ask(const struct cli_query *q, const char *path, const ProtobufCMessage *request,
                  const ProtobufCMessageDescriptor *type, struct node_message *reply);
void cli_query_close(struct cli_query *q);
/* What --timeout allows, as a deadline; at least 1. */
int64_t cli_deadline_ms(float timeout_s);

/* ---- Numbers for people; each returns buf ---- */

const char *cli_bytes(char *buf, size_t n, double bytes); /* "2.5 MiB" */
const char *cli_rate(char *buf, size_t n, uint64_t bytes, uint64_t ns);
const char *cli_span(char *buf, size_t n, uint64_t ns); /* "7.6 ms", "3 days" */

/* One line on stderr that moves, where that is a terminal; else nothing. */
struct cli_bar {
    const char *what;
    int64_t start_ns;
    bool terminal, drawn;
};
void cli_bar_begin(struct cli_bar *bar, const char *what);
void cli_bar_move(struct cli_bar *bar, uint64_t done, uint64_t total);
void cli_bar_end(struct cli_bar *bar);

/* ---- Reports ---- */

/* What a reply holds, as one JSON object; NULL: no memory. */
cJSON *cli_json_reply(const Baton__V1__GenerateReply *reply);
/* Print and free an object as one line on stdout, now.  False: stdout is gone or no memory. */
bool cli_json_line(cJSON *object);
/* The table of --stats, on stderr. */
void cli_print_stats(const Baton__V1__Started *started, const Baton__V1__Finished *finished);
/* n bytes in hexadecimal; buf is 2 * n + 1. */
const char *cli_hex(char *buf, const uint8_t *bytes, size_t n);

#endif

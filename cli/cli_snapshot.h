/* baton snapshot: what its commands share. */
#ifndef CLI_SNAPSHOT_H
#define CLI_SNAPSHOT_H

#include "cli/cli.h"
#include "kvcore/kv_file.h"
#include "kvcore/kv_store.h"

/* main's argv from the command's own name on. */
int cli_snapshot_save(int argc, char **argv);
int cli_snapshot_restore(int argc, char **argv);
int cli_snapshot_list(int argc, char **argv);
int cli_snapshot_rm(int argc, char **argv);
int cli_snapshot_verify(int argc, char **argv);
int cli_snapshot_compact(int argc, char **argv);
int cli_snapshot_inspect(int argc, char **argv);
int cli_snapshot_widen(int argc, char **argv);

enum {
    CLI_MIN_ID_DIGITS = 4, /* of an id that is abbreviated */
};

/* The snapshot whose id begins with these hexadecimal digits.  0, or an exit code, said. */
int cli_snapshot_find(const struct cli_query *q, const char *text, struct kv_snapshot_id *out);
/* Every snapshot of the node, in the order of ids: each is called for, until it returns false.  0,
 * or an exit code, said. */
int cli_snapshot_each(const struct cli_query *q,
                      bool (*each)(void *arg, const Baton__V1__Snapshot *s), void *arg);

/* A snapshot file that is looked at. */
struct cli_file {
    struct kv_disk *disk;
    struct kv_queue *queue;
    struct kv_file *file;
};

/* A path as the directory, which may be ".", and the name in it. */
int cli_split_path(const char *path, char *directory, size_t n, const char **name,
                   struct kv_why *why);
int cli_file_open(const char *path, struct cli_file *out, struct kv_why *why);
void cli_file_close(struct cli_file *f);
/* What its session section says.  1 there is one (to be released), 0 none, negative: *why. */
int cli_file_session(struct cli_file *f, struct node_session *out, struct kv_why *why);

#endif

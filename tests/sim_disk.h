/* A simulated disk behind kv_io.h, to crash, to fill up and to break.
 *
 * It keeps what a program sees (each file's bytes, the names) apart from what a power cut would
 * leave.  Every change is *pending* first:
 *   - a write, a cut or an allocation of a file, until sync() of the file returned;
 *   - a create, rename or unlink, until sync_directory() returned.  sync() of a file does not keep
 *     its name, and sync_directory() does not keep its bytes.
 * A power cut (sim_disk_crash()) decides on each pending change by a seed: it happened, or not, or,
 * for a write, some of its 512 or 4,096 byte sectors did; a sector that did not holds what was
 * there before, and where nothing was, zeros or junk.  A file's length is any that it had since the
 * sync. Of the names either the first so many pending changes happened, as a journal would keep
 * them, or any subset did.
 *
 * A crash test is:
 *
 *     run the steps once;  n = sim_disk_n_changes(sim);
 *     for k in 0..n-1: on a new disk (or a sim_disk_clone()), sim_disk_crash_at(sim, k);
 *         run the steps: the k-th change may have happened or not, it and all after it say -EIO;
 *         close what stands on the disk;
 *         for several seeds: crash a clone by it, open it again, look.
 *
 * Recovery is crashed in the same way: sim_disk_crash_at() after sim_disk_crash().
 *
 * The same seed and the same calls give the same results; with calls from several threads it is
 * safe, but in the order that the threads happen to have.  What users of a queue owe it (kv_io.h)
 * is checked: who breaks it ends in abort() with a line on stderr.  Its own memory does not come
 * from malloc, calloc or realloc, so that tests which fail those fail nothing here. */
#ifndef SIM_DISK_H
#define SIM_DISK_H

#include "kvcore/kv_io.h"

#include <stdio.h>

struct sim_disk;

/* An empty disk.  Its seed decides all that is not decided by a crash. */
struct sim_disk *sim_disk_new(uint64_t seed);
/* Nothing may be open. */
void sim_disk_free(struct sim_disk *sim);
/* The same contents, what is pending included.  Nothing may be open; faults, behaviour, counts and
 * the log are not taken over. */
struct sim_disk *sim_disk_clone(const struct sim_disk *sim, uint64_t seed);

/* The directory, as kv_disk_open() would give it.  Its close() leaves the contents, and another
 * open may follow; only one at a time. */
struct kv_disk *sim_disk_open(struct sim_disk *sim);

/* ---- Crashes ---- */

/* The next changes are numbered from 0: create, allocate, truncate, sync, rename, unlink, touch,
 * sync_directory, and each submitted write. */
uint64_t sim_disk_n_changes(const struct sim_disk *sim);
/* The power goes at change k, counted from the beginning (or the last crash), UINT64_MAX: never. */
void sim_disk_crash_at(struct sim_disk *sim, uint64_t k);
/* Whether it went. */
bool sim_disk_is_dead(const struct sim_disk *sim);

enum { SIM_LOSE_ALL = 0, SIM_KEEP_ALL = 1 }; /* seeds; the others choose at random */

/* Cut the power if that was not yet done, and start again with what the disk held.  Nothing may be
 * open.  Counts start again, nothing is set to fail, the log goes on. */
void sim_disk_crash(struct sim_disk *sim, uint64_t seed);

/* ---- Errors ---- */

enum sim_kind {
    SIM_LIST,
    SIM_STAT,
    SIM_TOUCH,
    SIM_RENAME,
    SIM_UNLINK,
    SIM_SYNC_DIRECTORY,
    SIM_OPEN, /* to read */
    SIM_CREATE,
    SIM_ALLOCATE,
    SIM_TRUNCATE,
    SIM_SYNC,
    SIM_READ_CACHED,
    SIM_QUEUE_OPEN,
    SIM_READ,   /* counted when submitted; the completion fails */
    SIM_WRITE,  /* likewise */
    SIM_SUBMIT, /* both again: submit() itself fails */
    SIM_N_KINDS,
};

enum {
    SIM_SHORT = 1
}; /* in place of an error: less than was asked for is moved, of reads and writes */

/* How many of a kind there were, since the beginning or the last crash. */
uint64_t sim_disk_n(const struct sim_disk *sim, enum sim_kind kind);
/* The nth operation of a kind, counted as sim_disk_n() does from 0, fails with `error` (negative
 * errno, or SIM_SHORT), and only that one.  Up to 16 may be set at a time.
 *   - What fails did not happen, but a write: any of its sectors may have.
 *   - A sync or sync_directory that fails is over for all that was pending: each change is decided
 *     on, as by a crash, the program goes on to see all of it, and later syncs say 0. */
void sim_disk_fail(struct sim_disk *sim, enum sim_kind kind, uint64_t nth, int error);
/* Every operation of a kind from now on; 0: none any more. */
void sim_disk_fail_all(struct sim_disk *sim, enum sim_kind kind, int error);

/* ---- Behaviour ---- */

enum sim_cached {
    SIM_CACHED_NONE, /* read_cached() has nothing */
    SIM_CACHED_ALL,
    SIM_CACHED_SOME, /* nothing, part or all, by the seed */
};

/* All zero at first. */
struct sim_behaviour {
    bool any_order;  /* completions come in any order, some only when nothing else is left */
    bool duplicates; /* some come twice, and some for operations that ended long ago */
    bool shorten;    /* reads and writes often move less than was asked for */
    bool interrupt;  /* and often end in -EINTR or -EAGAIN */
    enum sim_cached cached;
    /* For controls: the call says that it did, and did nothing. */
    bool ignore_sync;
    bool ignore_sync_directory;
    uint64_t capacity_bytes; /* what files may take; 0: no bound */
};

void sim_disk_behave(struct sim_disk *sim, struct sim_behaviour how);

/* ---- Looking and meddling: past the table, at once durable, and counted nowhere ---- */

/* A file's bytes, valid until the next operation; NULL: no such file. */
const unsigned char *sim_disk_bytes(struct sim_disk *sim, const char *name, size_t *len);
/* Make or replace a file. */
void sim_disk_put(struct sim_disk *sim, const char *name, const void *bytes, size_t len);
/* Invert bits of one byte. */
void sim_disk_flip(struct sim_disk *sim, const char *name, uint64_t offset, unsigned char bits);
bool sim_disk_remove(struct sim_disk *sim, const char *name);
/* Names, and one of them by number, NULL: no more. */
const char *sim_disk_name(struct sim_disk *sim, uint32_t i);
/* Bytes that files take now, as the budget of a disk counts. */
uint64_t sim_disk_allocated(struct sim_disk *sim);
/* now_ns() starts at 1,000,000,000 s and each operation takes a microsecond. */
void sim_disk_advance(struct sim_disk *sim, uint64_t ns);
/* Every operation since the beginning, a line each: number, kind, name, offset, length, result. */
void sim_disk_print_log(const struct sim_disk *sim, FILE *out);

#endif

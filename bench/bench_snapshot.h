/* What the parts of bench_snapshot share: a store in a folder, contexts to save, and raw lines. */
#ifndef BENCH_SNAPSHOT_H
#define BENCH_SNAPSHOT_H

#include "kvcore/kv_io.h"
#include "kvcore/kv_store.h"

enum { SNAPSHOT_ROUNDS = 5 };

struct bench_options {
    const char *directory; /* where the store's and the raw files are made */
    const char *model;
    bool quick;
};

/* Wall time and CPU time of this process, kernel's included. */
struct stopwatch {
    double wall, cpu;
};

struct stopwatch stopwatch_start(void);
/* Since the start. */
struct stopwatch stopwatch_read(struct stopwatch start);

/* SNAPSHOT_ROUNDS values; sorted by these calls. */
double rounds_median(double *values);
double rounds_low(double *values);
double rounds_high(double *values);

/* No return on an error: a benchmark has nothing better to do. */
void must(int rc, const struct kv_why *why, const char *what);
void *must_have(void *p);

/* "ok", or "MISSED", which the exit status counts. */
const char *target(bool met);

/* 30 layers x 3 heads x 64 in f16: the model that scripts/get-model fetches. */
extern const struct kv_geometry default_geometry;
extern const struct kv_namespace bench_ns;

struct kv_cache *open_cache(const struct kv_geometry *g, uint32_t n_positions);
/* A context grown to n positions, whose rows nobody can compress; *ctx NULL: a new one. */
void grow_context(struct kv_cache *cache, struct kv_context **ctx, uint32_t n, uint32_t seed);
struct kv_store *open_store(const char *directory, const struct kv_geometry *g, uint32_t max_depth,
                            enum kv_durability durability);

/* Bring a file wholly into the page cache, or out of it. */
void file_warm(const char *path);
void file_cool(const char *path);

/* ---- The raw lines: one file of `bytes`, through a ring of KV_IO_DEPTH registered buffers of
 * RAW_BLOCK bytes, O_DIRECT. ---- */

enum { RAW_BLOCK = 2 * 1024 * 1024 };

struct raw;

struct raw *raw_open(const char *directory, uint64_t bytes);
void raw_close(struct raw *r); /* the file goes too */
const char *raw_path(const struct raw *r);
void raw_forget(struct raw *r); /* the file goes: replacing one would cost the write extra */
void raw_write(struct raw *r); /* temporary, fallocate, write, fdatasync, rename, directory fsync */
void raw_read(struct raw *r);
void raw_pread(struct raw *r); /* through the page cache, into one buffer */

/* ---- The parts; each prints its table. ---- */

void bench_speed(const struct bench_options *o);
void bench_prefill(const struct bench_options *o);
void bench_bytes(const struct bench_options *o);

#endif

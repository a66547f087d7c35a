/* What the machine can do at most: the raw lines that benchmarks print beside their figures, and
 * how they take time. */
#ifndef BENCH_RAW_H
#define BENCH_RAW_H

#include <stddef.h>

enum { BENCH_REPEATS = 7 };

/* Seconds of CPU time of this thread: pre-emption on a shared machine does not count. */
double bench_cpu_seconds(void);

/* Run fn(arg) BENCH_REPEATS times after once to warm up; the median of seconds a run. */
double bench_median(void (*fn)(void *arg), void *arg);

/* Multiply-accumulates a second of one thread, in 10^9, with a kernel set's instructions: 32-bit
 * float fma, and the integer dot of bytes.  0 where the set has none. */
double bench_raw_fma(const char *set);
double bench_raw_int8(const char *set);

/* 10^9 bytes a second of one thread reading a buffer from end to end. */
double bench_raw_read(const void *p, size_t n_bytes);

#endif

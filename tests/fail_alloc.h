/* The n-th allocation fails.  For tests linked with --wrap of malloc, calloc and realloc: it
 * reaches the project's own calls, not those inside libraries. */
#ifndef TESTS_FAIL_ALLOC_H
#define TESTS_FAIL_ALLOC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

void *__real_malloc(size_t n);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *p, size_t n);
void *__wrap_malloc(size_t n);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *p, size_t n);

/* Allocations that still succeed. */
static uint64_t allocs_left = UINT64_MAX;
static bool alloc_failed;
/* Only the one that comes when none is left fails, and those after it succeed again. */
static bool alloc_fails_once;
/* Bytes asked for since this was last set to 0. */
static size_t alloc_bytes;

static inline bool alloc_fails(size_t bytes)
{
    alloc_bytes += bytes;
    if (allocs_left == UINT64_MAX || allocs_left-- > 0)
        return false;
    allocs_left = alloc_fails_once ? UINT64_MAX : 0;
    alloc_failed = true;
    return true;
}

void *__wrap_malloc(size_t n)
{
    return alloc_fails(n) ? NULL : __real_malloc(n);
}

void *__wrap_calloc(size_t n, size_t size)
{
    return alloc_fails(n * size) ? NULL : __real_calloc(n, size);
}

void *__wrap_realloc(void *p, size_t n)
{
    return alloc_fails(n) ? NULL : __real_realloc(p, n);
}

#endif

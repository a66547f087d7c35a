/* K of one head in a page is [P / 16][D][16], outside it [P][D]: a transposition of 16 lanes by D
 * elements of 1, 2 or 4 bytes, which are copied and never looked at.  Nothing here is aligned. */
#ifndef KV_LANES_H
#define KV_LANES_H

#include "kvcore/kvcore.h"

/* Lanes of a group [d][KV_LANES] to rows of d elements.  src is the first lane's first element,
 * n <= KV_LANES lanes from there are copied; the i-th goes to dst + i * stride. */
void kv_lanes_to_rows(unsigned char *dst, size_t stride, const unsigned char *src, uint32_t n,
                      uint32_t d, size_t element);
/* The reverse: the i-th lane comes from rows[i] + offset. */
void kv_rows_to_lanes(unsigned char *dst, const unsigned char *const *rows, size_t offset,
                      uint32_t n, uint32_t d, size_t element);

/* q8's scales of all heads, of 2 bytes each: [H] times, head_bytes apart, [d][KV_LANES]; outside
 * [H][d].  As above for the rest. */
struct kv_scales {
    size_t head_bytes;
    uint32_t n_heads, d;
};
void kv_scales_to_rows(unsigned char *dst, size_t stride, const unsigned char *src, uint32_t n,
                       const struct kv_scales *s);
void kv_rows_to_scales(unsigned char *dst, const unsigned char *const *rows, size_t offset,
                       uint32_t n, const struct kv_scales *s);

/* From now on, without AVX2 or with it where the CPU has it, as it is at first.  For tests and
 * benchmarks: the bytes are the same. */
void kv_lanes_plain(bool plain);

/* Lanes in a block, which is a vector of each: its elements' squares fill 8 registers, or 4. */
static inline size_t kv_block_lanes(size_t element)
{
    return element == 4 ? 4 : 8;
}

/* The first two of the above for CPUs with AVX2, of whole blocks: `row` is the bytes of a row. */
enum { KV_AVX2_VECTOR = 32 };
void kv_avx2_to_rows(unsigned char *dst, size_t stride, const unsigned char *src, size_t n,
                     size_t row, size_t element);
void kv_avx2_to_lanes(unsigned char *dst, const unsigned char *const *rows, size_t offset, size_t n,
                      size_t row, size_t element);

#endif

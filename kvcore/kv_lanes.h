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

#endif

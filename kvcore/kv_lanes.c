/* Transpositions in registers of 16 bytes, which every CPU that we build for has; written with the
 * compilers' own vectors, so that the same code serves them all.
 *
 * A block is 16 bytes of 8 rows (4 of elements of 4 bytes).  They go in the order in which lines of
 * the destination are filled one after the other.  To rows that means a line of a few rows before
 * the next rows: those of neighbouring positions often lie a multiple of 4 KiB apart, where a cache
 * has room for 8 lines but not for 16. */
#include "kvcore/kv_lanes.h"

#include <string.h>

enum { VECTOR = 16, LINE = 64 };

typedef uint8_t v16u8 __attribute__((vector_size(VECTOR)));
typedef uint16_t v8u16 __attribute__((vector_size(VECTOR)));
typedef uint32_t v4u32 __attribute__((vector_size(VECTOR)));

/* The lower and the upper halves of two vectors, an element of each in turn. */
#define LOW_8(a, b) \
    __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define HIGH_8(a, b) \
    __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#define LOW_16(a, b) __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define HIGH_16(a, b) __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#define LOW_32(a, b) __builtin_shufflevector(a, b, 0, 4, 1, 5)
#define HIGH_32(a, b) __builtin_shufflevector(a, b, 2, 6, 3, 7)

/* Deal the vectors out like two halves of a pack of cards.  That turns the bits of an element's
 * place, those of its vector above those of its place in it, round by one; so as many rounds as
 * there are bits of the one exchange the two. */
#define DEFINE_DEAL(name, vector, n, LOW, HIGH)                \
    static inline void name(vector v[n], int rounds)           \
    {                                                          \
        for (int round = 0; round < rounds; round++) {         \
            vector dealt[n];                                   \
                                                               \
            for (int i = 0; i < (n) / 2; i++) {                \
                dealt[2 * i] = LOW(v[i], v[i + (n) / 2]);      \
                dealt[2 * i + 1] = HIGH(v[i], v[i + (n) / 2]); \
            }                                                  \
            memcpy(v, dealt, sizeof(dealt));                   \
        }                                                      \
    }

DEFINE_DEAL(deal_8, v16u8, 8, LOW_8, HIGH_8)
DEFINE_DEAL(deal_16, v8u16, 8, LOW_16, HIGH_16)
DEFINE_DEAL(deal_32, v4u32, 4, LOW_32, HIGH_32)

/* ---- One block each way: rows at row[i] + at, lanes at group + i * KV_LANES elements ---- */

/* Lanes are 8 bytes here: a vector is those of two elements. */
static inline void to_rows_8(unsigned char *dst, size_t stride, const unsigned char *group)
{
    v16u8 v[8];

    for (size_t i = 0; i < 8; i++) {
        memcpy(&v[i], group + 2 * i * KV_LANES, VECTOR / 2);
        memcpy((unsigned char *)&v[i] + VECTOR / 2, group + (2 * i + 1) * KV_LANES, VECTOR / 2);
    }
    deal_8(v, 4);
    for (size_t i = 0; i < 8; i++)
        memcpy(dst + i * stride, &v[i], VECTOR);
}

static inline void to_lanes_8(unsigned char *group, const unsigned char *const *row, size_t at)
{
    v16u8 v[8];

    for (size_t i = 0; i < 8; i++)
        memcpy(&v[i], row[i] + at, VECTOR);
    deal_8(v, 3);
    for (size_t i = 0; i < 8; i++) {
        memcpy(group + 2 * i * KV_LANES, &v[i], VECTOR / 2);
        memcpy(group + (2 * i + 1) * KV_LANES, (unsigned char *)&v[i] + VECTOR / 2, VECTOR / 2);
    }
}

#define DEFINE_BLOCK(bits, vector, n, rounds)                                                 \
    static inline void to_rows_##bits(unsigned char *dst, size_t stride,                      \
                                      const unsigned char *group)                             \
    {                                                                                         \
        vector v[n];                                                                          \
                                                                                              \
        for (size_t i = 0; i < (n); i++)                                                      \
            memcpy(&v[i], group + i * KV_LANES * ((bits) / 8), VECTOR);                       \
        deal_##bits(v, rounds);                                                               \
        for (size_t i = 0; i < (n); i++)                                                      \
            memcpy(dst + i * stride, &v[i], VECTOR);                                          \
    }                                                                                         \
    static inline void to_lanes_##bits(unsigned char *group, const unsigned char *const *row, \
                                       size_t at)                                             \
    {                                                                                         \
        vector v[n];                                                                          \
                                                                                              \
        for (size_t i = 0; i < (n); i++)                                                      \
            memcpy(&v[i], row[i] + at, VECTOR);                                               \
        deal_##bits(v, rounds);                                                               \
        for (size_t i = 0; i < (n); i++)                                                      \
            memcpy(group + i * KV_LANES * ((bits) / 8), &v[i], VECTOR);                       \
    }

DEFINE_BLOCK(16, v8u16, 8, 3)
DEFINE_BLOCK(32, v4u32, 4, 2)

/* ---- What blocks leave over, element by element: bytes [from, row) of lanes [first, n) ---- */

#define REST(element, to, from)                        \
    for (size_t at = begin; at < row; at += (element)) \
        for (size_t lane = first; lane < n; lane++)    \
    memcpy(to, from, element)

/* Two neighbours of 2 bytes as one of 4: most of what is left over are a few scales of q8. */
static void pairs_to_rows(unsigned char *dst, size_t stride, const unsigned char *group,
                          size_t first, size_t n, size_t begin, size_t end)
{
    for (size_t at = begin; at < end; at += 4)
        for (size_t lane = first; lane < n; lane++) {
            unsigned char pair[4];

            memcpy(pair, group + at * KV_LANES + lane * 2, 2);
            memcpy(pair + 2, group + (at + 2) * KV_LANES + lane * 2, 2);
            memcpy(dst + lane * stride + at, pair, 4);
        }
}

static void rest_to_rows(unsigned char *dst, size_t stride, const unsigned char *group,
                         size_t first, size_t n, size_t begin, size_t row, size_t element)
{
    if (element == 1)
        REST(1, dst + lane * stride + at, group + at * KV_LANES + lane);
    else if (element == 2 && (row - begin) % 4 == 0)
        pairs_to_rows(dst, stride, group, first, n, begin, row);
    else if (element == 2)
        REST(2, dst + lane * stride + at, group + at * KV_LANES + lane * 2);
    else
        REST(4, dst + lane * stride + at, group + at * KV_LANES + lane * 4);
}

static void rest_to_lanes(unsigned char *group, const unsigned char *const *rows, size_t offset,
                          size_t first, size_t n, size_t begin, size_t row, size_t element)
{
    if (element == 1)
        REST(1, group + at * KV_LANES + lane, rows[lane] + offset + at);
    else if (element == 2)
        REST(2, group + at * KV_LANES + lane * 2, rows[lane] + offset + at);
    else
        REST(4, group + at * KV_LANES + lane * 4, rows[lane] + offset + at);
}

/* ---- Any number of lanes ---- */

static size_t block_lanes(size_t element)
{
    return element == 4 ? 4 : 8;
}

void kv_lanes_to_rows(unsigned char *dst, size_t stride, const unsigned char *src, uint32_t n,
                      uint32_t d, size_t element)
{
    const size_t block = block_lanes(element), row = d * element;
    const size_t whole = row / VECTOR * VECTOR, n_whole = n / block * block;

    for (size_t line = 0; line < whole; line += LINE)
        for (size_t lane = 0; lane < n_whole; lane += block)
            for (size_t at = line; at < whole && at < line + LINE; at += VECTOR) {
                unsigned char *to = dst + lane * stride + at;
                const unsigned char *from = src + at * KV_LANES + lane * element;

                if (element == 1)
                    to_rows_8(to, stride, from);
                else if (element == 2)
                    to_rows_16(to, stride, from);
                else
                    to_rows_32(to, stride, from);
            }
    rest_to_rows(dst, stride, src, 0, n_whole, whole, row, element);
    rest_to_rows(dst, stride, src, n_whole, n, 0, row, element);
}

void kv_rows_to_lanes(unsigned char *dst, const unsigned char *const *rows, size_t offset,
                      uint32_t n, uint32_t d, size_t element)
{
    const size_t block = block_lanes(element), row = d * element;
    const size_t whole = row / VECTOR * VECTOR, n_whole = n / block * block;

    for (size_t at = 0; at < whole; at += VECTOR)
        for (size_t lane = 0; lane < n_whole; lane += block) {
            unsigned char *to = dst + at * KV_LANES + lane * element;

            if (element == 1)
                to_lanes_8(to, rows + lane, offset + at);
            else if (element == 2)
                to_lanes_16(to, rows + lane, offset + at);
            else
                to_lanes_32(to, rows + lane, offset + at);
        }
    rest_to_lanes(dst, rows, offset, 0, n_whole, whole, row, element);
    rest_to_lanes(dst, rows, offset, n_whole, n, 0, row, element);
}

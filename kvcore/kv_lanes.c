/* Transpositions in registers of 16 bytes, which every CPU that we build for has; written with the
 * compilers' own vectors, so that the same code serves them all.  Where there are registers of 32
 * bytes, kv_lanes_avx2.c does what they hold.
 *
 * A block is 16 bytes of 8 rows (4 of elements of 4 bytes).  They go in the order in which lines of
 * the destination are filled one after the other.  To rows that means a line of a few rows before
 * the next rows: those of neighbouring positions often lie a multiple of 4 KiB apart, where a cache
 * has room for 8 lines but not for 16. */
#include "kvcore/kv_lanes.h"

#include <stdatomic.h>
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

static void rest_to_rows(unsigned char *dst, size_t stride, const unsigned char *group,
                         size_t first, size_t n, size_t begin, size_t row, size_t element)
{
    if (element == 1)
        REST(1, dst + lane * stride + at, group + at * KV_LANES + lane);
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

static atomic_bool plain_only; /* relaxed: both ways give the same bytes */

void kv_lanes_plain(bool plain)
{
    atomic_store_explicit(&plain_only, plain, memory_order_relaxed);
}

#if defined(__x86_64__)
static bool have_avx2(void)
{
    return __builtin_cpu_supports("avx2") &&
           !atomic_load_explicit(&plain_only, memory_order_relaxed);
}
#endif

static void blocks_to_rows(unsigned char *dst, size_t stride, const unsigned char *src, size_t n,
                           size_t row, size_t element)
{
    const size_t block = kv_block_lanes(element);

    for (size_t line = 0; line < row; line += LINE)
        for (size_t lane = 0; lane < n; lane += block)
            for (size_t at = line; at < row && at < line + LINE; at += VECTOR) {
                unsigned char *to = dst + lane * stride + at;
                const unsigned char *from = src + at * KV_LANES + lane * element;

                if (element == 1)
                    to_rows_8(to, stride, from);
                else if (element == 2)
                    to_rows_16(to, stride, from);
                else
                    to_rows_32(to, stride, from);
            }
}

void kv_lanes_to_rows(unsigned char *dst, size_t stride, const unsigned char *src, uint32_t n,
                      uint32_t d, size_t element)
{
    const size_t row = d * element, whole = row / VECTOR * VECTOR;
    const size_t n_whole = n - n % kv_block_lanes(element);
    size_t done = 0;

#if defined(__x86_64__)
    if (have_avx2()) {
        done = row / KV_AVX2_VECTOR * KV_AVX2_VECTOR;
        kv_avx2_to_rows(dst, stride, src, n_whole, done, element);
    }
#endif
    blocks_to_rows(dst + done, stride, src + done * KV_LANES, n_whole, whole - done, element);
    rest_to_rows(dst, stride, src, 0, n_whole, whole, row, element);
    rest_to_rows(dst, stride, src, n_whole, n, 0, row, element);
}

static void blocks_to_lanes(unsigned char *dst, const unsigned char *const *rows, size_t offset,
                            size_t n, size_t row, size_t element)
{
    const size_t block = kv_block_lanes(element);

    for (size_t at = 0; at < row; at += VECTOR)
        for (size_t lane = 0; lane < n; lane += block) {
            unsigned char *to = dst + at * KV_LANES + lane * element;

            if (element == 1)
                to_lanes_8(to, rows + lane, offset + at);
            else if (element == 2)
                to_lanes_16(to, rows + lane, offset + at);
            else
                to_lanes_32(to, rows + lane, offset + at);
        }
}

void kv_rows_to_lanes(unsigned char *dst, const unsigned char *const *rows, size_t offset,
                      uint32_t n, uint32_t d, size_t element)
{
    const size_t row = d * element, whole = row / VECTOR * VECTOR;
    const size_t n_whole = n - n % kv_block_lanes(element);
    size_t done = 0;

#if defined(__x86_64__)
    if (have_avx2()) {
        done = row / KV_AVX2_VECTOR * KV_AVX2_VECTOR;
        kv_avx2_to_lanes(dst, rows, offset, n_whole, done, element);
    }
#endif
    blocks_to_lanes(dst + done * KV_LANES, rows, offset + done, n_whole, whole - done, element);
    rest_to_lanes(dst, rows, offset, 0, n_whole, whole, row, element);
    rest_to_lanes(dst, rows, offset, n_whole, n, 0, row, element);
}

/* ---- Scales ---- */

enum { SCALE = sizeof(uint16_t), BLOCK = 8 };

/* Elements of [H][d] in their order: where their lanes are from the first one's. */
struct walk {
    const struct kv_scales *scales;
    size_t head; /* its lanes */
    uint32_t i;  /* of its d */
};

/* The next 8; where there are fewer, the first of them again. */
static size_t walk_on(struct walk *w, size_t left, size_t at[BLOCK])
{
    const size_t n = left < BLOCK ? left : BLOCK;

    for (size_t k = 0; k < n; k++) {
        at[k] = w->head + w->i * (size_t)(KV_LANES * SCALE);
        if (++w->i == w->scales->d) {
            w->i = 0;
            w->head += w->scales->head_bytes;
        }
    }
    for (size_t k = n; k < BLOCK; k++)
        at[k] = at[0];
    return n;
}

/* The first bytes of vectors, an even number of them. */
static inline void put_parts(unsigned char *dst, size_t stride, const v8u16 v[BLOCK], size_t bytes)
{
    for (size_t i = 0; i < BLOCK; i++, dst += stride) {
        size_t at = 0;

        if (bytes == VECTOR) {
            memcpy(dst, &v[i], VECTOR);
            continue;
        }
        for (size_t step = VECTOR / 2; step >= SCALE; step /= 2) {
            if ((bytes & step) == 0)
                continue;
            memcpy(dst + at, (const unsigned char *)&v[i] + at, step);
            at += step;
        }
    }
}

static inline v8u16 get_part(const unsigned char *src, size_t bytes)
{
    typedef uint64_t v2u64 __attribute__((vector_size(VECTOR)));
    uint64_t whole = 0, rest = 0;
    uint32_t four = 0;
    uint16_t two = 0;

    if ((bytes & 8) != 0)
        memcpy(&whole, src, 8);
    src += bytes & 8;
    if ((bytes & 4) != 0)
        memcpy(&four, src, 4);
    src += bytes & 4;
    if ((bytes & 2) != 0)
        memcpy(&two, src, 2);
    rest = four | (uint64_t)two << ((bytes & 4) * 8);
    return (v8u16)((bytes & 8) != 0 ? (v2u64){whole, rest} : (v2u64){rest, 0});
}

void kv_scales_to_rows(unsigned char *dst, size_t stride, const unsigned char *src, uint32_t n,
                       const struct kv_scales *s)
{
    struct walk w = {.scales = s};
    size_t at[BLOCK], n_at;

    for (size_t left = (size_t)s->n_heads * s->d; left > 0; left -= n_at) {
        size_t lane = 0;

        n_at = walk_on(&w, left, at);
        for (; lane + BLOCK <= n; lane += BLOCK) {
            v8u16 v[BLOCK];

            for (size_t k = 0; k < BLOCK; k++)
                memcpy(&v[k], src + at[k] + lane * SCALE, VECTOR);
            deal_16(v, 3);
            put_parts(dst + lane * stride, stride, v, n_at * SCALE);
        }
        for (; lane < n; lane++)
            for (size_t k = 0; k < n_at; k++)
                memcpy(dst + lane * stride + k * SCALE, src + at[k] + lane * SCALE, SCALE);
        dst += n_at * SCALE;
    }
}

void kv_rows_to_scales(unsigned char *dst, const unsigned char *const *rows, size_t offset,
                       uint32_t n, const struct kv_scales *s)
{
    struct walk w = {.scales = s};
    size_t at[BLOCK], n_at;

    for (size_t left = (size_t)s->n_heads * s->d; left > 0; left -= n_at) {
        size_t lane = 0;

        n_at = walk_on(&w, left, at);
        for (; lane + BLOCK <= n; lane += BLOCK) {
            v8u16 v[BLOCK];

            for (size_t i = 0; i < BLOCK; i++)
                if (n_at == BLOCK)
                    memcpy(&v[i], rows[lane + i] + offset, VECTOR);
                else
                    v[i] = get_part(rows[lane + i] + offset, n_at * SCALE);
            deal_16(v, 3);
            for (size_t k = 0; k < n_at; k++)
                memcpy(dst + at[k] + lane * SCALE, &v[k], VECTOR);
        }
        for (; lane < n; lane++)
            for (size_t k = 0; k < n_at; k++)
                memcpy(dst + at[k] + lane * SCALE, rows[lane] + offset + k * SCALE, SCALE);
        offset += n_at * SCALE;
    }
}

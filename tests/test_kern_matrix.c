/* Goal: a matrix product has the bits that kern_plain.c's top defines, in every kernel set.
 *
 * Method: an independent evaluation in integers and long double, written here from the file
 * formats, is compared with every output of every set this machine can run; wider shapes then
 * compare the sets with the plain one.  Everything is generated from fixed seeds.  Not-a-number
 * results only have to be so in every set. */
#include "model/kern.h"

#include <check.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

static const enum gguf_type all_types[] = {GGUF_F32,  GGUF_F16,  GGUF_BF16,
                                           GGUF_Q8_0, GGUF_Q4_0, GGUF_Q4_1};
static const char *const set_names[] = {"plain", "avx2", "avx512"};

/* -- the material -- */

enum weights {
    WEIGHTS_NORMAL,  /* scales such as models have */
    WEIGHTS_BITS,    /* any bits but non-finite ones */
    WEIGHTS_EXTREME, /* largest magnitudes: w = -128, nibbles 0 and 15, zero and tiny scales */
    WEIGHTS_INF,     /* some scales or weights are infinite */
};

static uint64_t random_state;

static uint32_t random_u32(void)
{
    uint64_t z = random_state += 0x9E3779B97F4A7C15u;

    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return (uint32_t)(z >> 32);
}

/* Even in [-1, 1). */
static float random_float(void)
{
    return (float)((int32_t)random_u32() >> 8) * 0x1p-23f;
}

static bool is_float(enum gguf_type type)
{
    return type == GGUF_F32 || type == GGUF_F16 || type == GGUF_BF16;
}

static size_t row_bytes(enum gguf_type type, uint32_t n_cols)
{
    switch (type) {
    case GGUF_F32:
        return (size_t)n_cols * 4;
    case GGUF_Q8_0:
        return (size_t)n_cols / 32 * 34;
    case GGUF_Q4_0:
        return (size_t)n_cols / 32 * 18;
    case GGUF_Q4_1:
        return (size_t)n_cols / 32 * 20;
    default:
        return (size_t)n_cols * 2;
    }
}

static uint16_t random_half(enum weights kind)
{
    static const uint16_t extreme[] = {0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0xFBFF, 0x3C00};

    switch (kind) {
    case WEIGHTS_NORMAL: /* 2^-9 .. 2^-5 of either sign */
        return (uint16_t)((random_u32() & 0x8FFF) + 0x1800);
    case WEIGHTS_BITS:
        for (;;) {
            const uint16_t h = (uint16_t)random_u32();

            if ((h & 0x7C00) != 0x7C00)
                return h;
        }
    case WEIGHTS_EXTREME:
        return extreme[random_u32() % COUNT(extreme)];
    default:
        return random_u32() % 16 ? 0x3800 : 0xFC00;
    }
}

static void put_u16(unsigned char *p, uint16_t v)
{
    memcpy(p, &v, 2);
}

static void fill_float(enum gguf_type type, enum weights kind, unsigned char *p)
{
    const float narrow = random_float();
    uint32_t bits;

    if (type == GGUF_F16) {
        put_u16(p, random_half(kind));
        return;
    }
    memcpy(&bits, &narrow, 4);
    if (kind == WEIGHTS_BITS) /* 2^-63 .. 2^64 */
        bits = (random_u32() & 0xBFFFFFFFu) + 0x20000000u;
    else if (kind == WEIGHTS_EXTREME)
        bits = random_u32() & (random_u32() % 2 ? 0x807FFFFFu : 0x80000000u); /* denormal, zero */
    else if (kind == WEIGHTS_INF && random_u32() % 64 == 0)
        bits = 0x7F800000u;
    if (type == GGUF_F32)
        memcpy(p, &bits, 4);
    else
        put_u16(p, (uint16_t)(bits >> 16));
}

static void fill_block(enum gguf_type type, enum weights kind, unsigned char *p)
{
    static const unsigned char extreme8[] = {0x80, 0x7F, 0x00, 0xFF}; /* -128, 127, 0, -1 */
    static const unsigned char extreme4[] = {0x00, 0xFF, 0xF0, 0x0F};
    const size_t n_heads = type == GGUF_Q4_1 ? 2 : 1;
    const size_t n_bytes = row_bytes(type, 32);

    for (size_t h = 0; h < n_heads; h++)
        put_u16(p + h * 2, random_half(kind));
    for (size_t i = n_heads * 2; i < n_bytes; i++) {
        p[i] = (unsigned char)random_u32();
        if (kind == WEIGHTS_EXTREME)
            p[i] = type == GGUF_Q8_0 ? extreme8[p[i] % 4] : extreme4[p[i] % 4];
    }
    if (kind == WEIGHTS_EXTREME && random_u32() % 2) /* all of one: the largest sums there are */
        memset(p + n_heads * 2, type == GGUF_Q8_0 ? 0x80 : 0xFF, n_bytes - n_heads * 2);
}

/* The bytes of a matrix as a file has them, at an odd address; free(bytes - 1). */
static unsigned char *make_weights(enum gguf_type type, enum weights kind, uint32_t n_rows,
                                   uint32_t n_cols)
{
    const size_t bytes = row_bytes(type, n_cols);
    const size_t step = is_float(type) ? bytes / n_cols : row_bytes(type, 32);
    unsigned char *p = malloc(n_rows * bytes + 1);

    ck_assert_ptr_nonnull(p);
    for (size_t at = 0; at < n_rows * bytes; at += step) {
        if (is_float(type))
            fill_float(type, kind, p + 1 + at);
        else
            fill_block(type, kind, p + 1 + at);
    }
    return p + 1;
}

static void acts_open(struct kern_acts *a, uint32_t n_rows, uint32_t n_cols)
{
    const size_t n = (size_t)n_rows * n_cols, n_blocks = (size_t)n_rows * (n_cols / 32);
    float *x = malloc(n * sizeof(float));

    memset(a, 0, sizeof(*a));
    a->n_rows = n_rows;
    a->n_cols = n_cols;
    a->x = x;
    a->q = malloc(n);
    a->d = malloc(n_blocks * sizeof(float) + 1);
    a->ds = malloc(n_blocks * sizeof(float) + 1);
    a->sum = malloc(n_blocks * sizeof(int32_t) + 1);
    ck_assert(x && a->q && a->d && a->ds && a->sum);
    for (size_t i = 0; i < n; i++)
        x[i] = random_float() * (i % 7 ? 1.0f : 8.0f);
}

static void acts_close(struct kern_acts *a)
{
    free((void *)(uintptr_t)a->x);
    free(a->q);
    free(a->d);
    free(a->ds);
    free(a->sum);
}

/* Every q is 127 or -127, in blocks of one sign and of both; some blocks are zero. */
static void acts_extreme(struct kern_acts *a)
{
    float *x = (float *)(uintptr_t)a->x;

    for (size_t i = 0; i < (size_t)a->n_rows * a->n_cols; i++) {
        const size_t block = i / 32;
        const float magnitude = block % 5 == 4 ? 0.0f : block % 5 == 3 ? 0x1p-90f : 3.5f;

        x[i] = block % 3 == 0     ? magnitude
               : block % 3 == 1   ? -magnitude
               : random_u32() % 2 ? magnitude
                                  : -magnitude;
    }
}

static void acts_quantize(const struct kernels *k, struct kern_acts *a)
{
    for (uint32_t t = 0; t < a->n_rows; t++)
        ck_assert_int_eq(k->quantize(a, t), 0);
}

/* -- the independent evaluation -- */

static float ref_half(const unsigned char *p)
{
    const unsigned bits = p[0] | (unsigned)p[1] << 8;
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const double magnitude = exponent == 31  ? (mantissa ? (double)NAN : (double)INFINITY)
                             : exponent == 0 ? ldexp(mantissa, -24)
                                             : ldexp(1024 + mantissa, exponent - 25);

    return (float)(bits >> 15 ? -magnitude : magnitude);
}

static float ref_weight(enum gguf_type type, const unsigned char *row, uint32_t k)
{
    unsigned char four[4] = {0};
    float v;

    if (type == GGUF_F16)
        return ref_half(row + (size_t)k * 2);
    if (type == GGUF_F32)
        memcpy(four, row + (size_t)k * 4, 4);
    else
        memcpy(four + 2, row + (size_t)k * 2, 2);
    memcpy(&v, four, 4);
    return v;
}

/* Weight i of a block, as an integer with its offset taken off. */
static int64_t ref_quant(enum gguf_type type, const unsigned char *block, int i)
{
    const unsigned char *quants = block + (type == GGUF_Q4_1 ? 4 : 2);
    const int nibble = i < 16 ? quants[i % 16] % 16 : quants[i % 16] / 16;

    if (type == GGUF_Q8_0)
        return quants[i] < 128 ? quants[i] : quants[i] - 256;
    return type == GGUF_Q4_0 ? nibble - 8 : nibble;
}

/* a * b + c rounded once: the product of two floats is exact in a long double, the sum is rounded
 * there 2^40 times finer than in a float. */
static float ref_fma(float a, float b, float c)
{
    return (float)((long double)a * b + c);
}

static float ref_product(enum gguf_type type, const unsigned char *row, const struct kern_acts *a,
                         uint32_t t)
{
    const uint32_t n_cols = a->n_cols, step = is_float(type) ? 1 : 32;
    float total = 0.0f;

    for (uint32_t k0 = 0; k0 < n_cols; k0 += 256) {
        float acc = 0.0f;

        for (uint32_t k = k0; k < n_cols && k < k0 + 256; k += step) {
            const size_t at = (size_t)t * (n_cols / 32) + k / 32;
            const unsigned char *block = row + row_bytes(type, k);
            int64_t dot = 0;

            if (is_float(type)) {
                acc = ref_fma(ref_weight(type, row, k), a->x[(size_t)t * n_cols + k], acc);
                continue;
            }
            for (int i = 0; i < 32; i++)
                dot += ref_quant(type, block, i) * a->q[at * 32 + (size_t)i];
            ck_assert_int_lt(llabs(dot), 1 << 24);
            acc = ref_fma((float)dot, (float)((double)ref_half(block) * a->d[at]), acc);
            if (type == GGUF_Q4_1)
                acc = ref_fma(ref_half(block + 2), a->ds[at], acc);
        }
        total += acc;
    }
    return total;
}

/* -- running a set -- */

/* y [T][n_rows] of w times a, with the rows handed out in ranges of `share`; free() it.  Fails if
 * anything outside is written. */
static float *run_gemm(const struct kernels *k, enum gguf_type type, const unsigned char *src,
                       uint32_t n_rows, const struct kern_acts *a, uint32_t share)
{
    const size_t bytes = k->pack_bytes(type, n_rows, a->n_cols), stride = n_rows + 3;
    void *packed = NULL;
    struct kern_matrix w = {type, n_rows, a->n_cols, src};
    float *y = malloc(a->n_rows * stride * sizeof(float));
    float *out = malloc((size_t)a->n_rows * n_rows * sizeof(float));

    ck_assert(y && out);
    for (size_t i = 0; i < a->n_rows * stride; i++)
        y[i] = 12345.0f;
    if (bytes) {
        /* Exactly so many bytes that a sanitizer sees the one too many. */
        ck_assert_int_eq(posix_memalign(&packed, KERN_ALIGN, bytes), 0);
        k->pack(type, n_rows, a->n_cols, src, packed);
        w.data = packed;
    }
    for (uint32_t r = 0; r < n_rows; r += share)
        k->gemm(&w, r, r + share < n_rows ? r + share : n_rows, a, y, stride);
    for (uint32_t t = 0; t < a->n_rows; t++) {
        memcpy(out + (size_t)t * n_rows, y + t * stride, n_rows * sizeof(float));
        for (size_t r = n_rows; r < stride; r++)
            ck_assert_float_eq(y[t * stride + r], 12345.0f);
    }
    free(packed);
    free(y);
    return out;
}

static bool same(float a, float b)
{
    return memcmp(&a, &b, sizeof(a)) == 0 || (isnan(a) && isnan(b));
}

static void check_same(const struct kernels *k, enum gguf_type type, uint32_t n_rows,
                       const struct kern_acts *a, const float *want, const float *got)
{
    for (size_t i = 0; i < (size_t)a->n_rows * n_rows; i++)
        ck_assert_msg(same(want[i], got[i]),
                      "%s, type %d, %u x %u, %u tokens: row %zu token %zu is %a, not %a", k->name,
                      (int)type, n_rows, a->n_cols, a->n_rows, i % n_rows, i / n_rows,
                      (double)got[i], (double)want[i]);
}

/* -- products -- */

static void check_exact(const struct kernels *k, enum gguf_type type, enum weights kind,
                        uint32_t n_rows, uint32_t n_cols, uint32_t n_tokens)
{
    unsigned char *src = make_weights(type, kind, n_rows, n_cols);
    float *want = malloc((size_t)n_tokens * n_rows * sizeof(float)), *got;
    struct kern_acts a;

    ck_assert_ptr_nonnull(want);
    acts_open(&a, n_tokens, n_cols);
    if (kind == WEIGHTS_EXTREME)
        acts_extreme(&a);
    if (!is_float(type))
        acts_quantize(&kern_plain, &a);
    for (uint32_t t = 0; t < n_tokens; t++)
        for (uint32_t r = 0; r < n_rows; r++)
            want[(size_t)t * n_rows + r] =
                ref_product(type, src + r * row_bytes(type, n_cols), &a, t);
    got = run_gemm(k, type, src, n_rows, &a, n_rows);
    check_same(k, type, n_rows, &a, want, got);
    acts_close(&a);
    free(got);
    free(want);
    free(src - 1);
}

START_TEST(every_set_equals_exact_arithmetic)
{
    static const uint32_t cols[] = {32, 64, 96, 256, 288, 576};
    static const uint32_t odd_cols[] = {1, 8, 172, 255, 257, 576};
    const struct kernels *k = kern_find(set_names[_i]);

    random_state = 1;
    for (size_t y = 0; k && y < COUNT(all_types); y++)
        for (size_t c = 0; c < COUNT(cols); c++)
            for (int kind = WEIGHTS_NORMAL; kind <= WEIGHTS_INF; kind++)
                check_exact(k, all_types[y], (enum weights)kind, 19,
                            is_float(all_types[y]) ? odd_cols[c] : cols[c], 3);
}
END_TEST

START_TEST(every_set_has_the_bits_of_the_plain_one_at_any_shape)
{
    static const uint32_t rows[] = {1, 7, 8, 9, 15, 16, 17, 31, 48, 64, 81, 128};
    static const uint32_t cols[] = {32, 64, 256, 288, 576};
    static const uint32_t odd_cols[] = {1, 32, 172, 288, 576};
    const struct kernels *k = kern_find(set_names[_i]);

    random_state = 2;
    for (size_t y = 0; k && y < COUNT(all_types); y++)
        for (size_t r = 0; r < COUNT(rows); r++)
            for (uint32_t n = 1; n <= 17; n += 1 + (uint32_t)r % 3) {
                const enum gguf_type type = all_types[y];
                const size_t c = (r + n) % COUNT(cols);
                const uint32_t n_cols = is_float(type) ? odd_cols[c] : cols[c];
                unsigned char *src =
                    make_weights(type, (enum weights)((r + n) % 3), rows[r], n_cols);
                struct kern_acts a;
                float *want, *got;

                acts_open(&a, n, n_cols);
                if (!is_float(type))
                    acts_quantize(&kern_plain, &a);
                want = run_gemm(&kern_plain, type, src, rows[r], &a, rows[r]);
                got = run_gemm(k, type, src, rows[r], &a, rows[r]);
                check_same(k, type, rows[r], &a, want, got);
                free(got);
                got = run_gemm(k, type, src, rows[r], &a, KERN_ROW_TILE);
                check_same(k, type, rows[r], &a, want, got);
                free(got);
                free(want);
                acts_close(&a);
                free(src - 1);
            }
}
END_TEST

/* A row's outputs among 70 tokens, over several runs of tokens, are those of that row alone. */
START_TEST(a_token_alone_has_the_bits_it_has_in_a_crowd)
{
    const struct kernels *k = kern_find(set_names[_i]);
    const uint32_t n_rows = 40, n_cols = 8192, n_tokens = 70;

    random_state = 3;
    for (size_t y = 0; k && y < COUNT(all_types); y++) {
        const enum gguf_type type = all_types[y];
        unsigned char *src = make_weights(type, WEIGHTS_NORMAL, n_rows, n_cols);
        struct kern_acts a, one;
        float *crowd, *alone;

        if (k == &kern_plain && is_float(type)) { /* one fma after the other: too slow to repeat */
            free(src - 1);
            continue;
        }
        acts_open(&a, n_tokens, n_cols);
        acts_quantize(k, &a);
        crowd = run_gemm(k, type, src, n_rows, &a, n_rows);
        for (uint32_t t = 0; t < n_tokens; t += 23) {
            const size_t at = (size_t)t * n_cols;

            one = a;
            one.n_rows = 1;
            one.x += at;
            one.q += at;
            one.d += at / 32;
            one.ds += at / 32;
            one.sum += at / 32;
            alone = run_gemm(k, type, src, n_rows, &one, n_rows);
            check_same(k, type, n_rows, &one, crowd + (size_t)t * n_rows, alone);
            free(alone);
        }
        free(crowd);
        acts_close(&a);
        free(src - 1);
    }
}
END_TEST

/* -- activations -- */

static void check_quantize(const struct kernels *k, const struct kern_acts *a, uint32_t t)
{
    const uint32_t n_blocks = a->n_cols / 32;

    for (uint32_t b = 0; b < n_blocks; b++) {
        const size_t at = (size_t)t * n_blocks + b;
        const float *x = a->x + at * 32;
        float amax = 0.0f, d = 0.0f;
        int sum = 0;

        for (int i = 0; i < 32; i++)
            amax = fmaxf(amax, fabsf(x[i]));
        if (amax >= ldexpf(1.0f, -100))
            d = amax / 127.0f;
        for (int i = 0; i < 32; i++) {
            const float v = d > 0.0f ? x[i] * (1.0f / d) : 0.0f;

            ck_assert_msg(a->q[at * 32 + (size_t)i] == (int)nearbyintf(v), "%s: %a is %d", k->name,
                          (double)v, a->q[at * 32 + (size_t)i]);
            ck_assert_int_le(abs(a->q[at * 32 + (size_t)i]), 127);
            sum += a->q[at * 32 + (size_t)i];
        }
        ck_assert_int_eq(a->sum[at], sum);
        ck_assert(same(a->d[at], d));
        ck_assert(same(a->ds[at], (float)((double)d * sum)));
    }
}

START_TEST(activations_round_half_to_even_in_every_set)
{
    const struct kernels *k = kern_find(set_names[_i]);
    struct kern_acts a;
    float *x;

    if (!k)
        return;
    random_state = 4;
    acts_open(&a, 9, 160);
    x = (float *)(uintptr_t)a.x;
    for (size_t i = 0; i < 160; i++) { /* d = 1: ties at every half */
        x[i] = (float)(int)(i % 32) - 15.5f;
        x[160 + i] =
            i % 32 ? (float)(int)(random_u32() % 255) - 127.0f + 0.5f * (float)(i % 2) : 127.0f;
        x[160 + i] = fminf(x[160 + i], 127.0f);
        x[320 + i] = random_float() * 0x1p127f;                                  /* huge */
        x[480 + i] = random_float() * 0x1p-126f;                                 /* denormal */
        x[640 + i] = i < 32 ? 0.0f : i < 64 ? -0.0f : random_float() * 0x1p-99f; /* at the border */
        x[800 + i] = i % 32 ? 0.0f : i / 32 % 2 ? 0x1p-100f : nextafterf(0x1p-100f, 0.0f);
    }
    x[0] = 127.0f;
    acts_quantize(k, &a);
    for (uint32_t t = 0; t < a.n_rows; t++)
        check_quantize(k, &a, t);
    ck_assert_int_eq(a.q[1], -14); /* -14.5 */
    ck_assert_int_eq(a.q[2], -14); /* -13.5 */
    ck_assert(a.d[25] == 0.0f && a.d[26] > 0.0f);
    acts_close(&a);
}
END_TEST

START_TEST(a_value_that_is_not_finite_is_refused_by_every_set)
{
    static const float bad[] = {INFINITY, -INFINITY, NAN, -NAN};
    const struct kernels *k = kern_find(set_names[_i]);
    struct kern_acts a;

    if (!k)
        return;
    random_state = 5;
    acts_open(&a, 2, 96);
    for (size_t i = 96; i < 192; i++) {
        float *x = (float *)(uintptr_t)&a.x[i];
        const float good = *x;

        *x = bad[i % COUNT(bad)];
        ck_assert_int_eq(k->quantize(&a, 1), -1);
        ck_assert_int_eq(k->quantize(&a, 0), 0);
        *x = good;
    }
    ck_assert_int_eq(k->quantize(&a, 1), 0);
    acts_close(&a);
}
END_TEST

/* -- build and choice -- */

START_TEST(a_product_and_a_sum_are_not_fused)
{
    volatile float a = 1.0f + 0x1p-12f, c = -1.0f - 0x1p-11f;
    const float x = a, z = c;

    ck_assert(x * x + z == 0.0f); /* the square rounds to 1 + 2^-11, ties to even */
    ck_assert(fmaf(x, x, z) == 0x1p-24f);
}
END_TEST

START_TEST(sets_are_found_by_name_and_auto_is_the_fastest)
{
    const struct kernels *fastest = NULL;

    ck_assert_ptr_eq(kern_find("plain"), &kern_plain);
    ck_assert_ptr_null(kern_find("avx"));
    ck_assert_ptr_null(kern_find(""));
    ck_assert_ptr_eq(kern_find(NULL), kern_find("auto"));
    for (size_t i = 0; i < COUNT(set_names); i++) /* slowest first */
        if (kern_find(set_names[i])) {
            ck_assert_str_eq(kern_find(set_names[i])->name, set_names[i]);
            fastest = kern_find(set_names[i]);
        }
    ck_assert_ptr_eq(kern_find("auto"), fastest);
}
END_TEST

START_TEST(types_without_kernels_are_known_as_such)
{
    for (size_t y = 0; y < COUNT(all_types); y++)
        ck_assert(kern_has_type(all_types[y]));
    ck_assert(!kern_has_type(GGUF_Q2_K));
    ck_assert(!kern_has_type((enum gguf_type)4));
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("kern_matrix");
    TCase *tc = tcase_create("kern_matrix");
    SRunner *runner;
    int n_failed;

    for (size_t i = 0; i < COUNT(set_names); i++)
        if (!kern_find(set_names[i]))
            printf("SKIP kern_matrix_%s: this machine cannot run the set\n", set_names[i]);
    tcase_set_timeout(tc, 120);
    tcase_add_loop_test(tc, every_set_equals_exact_arithmetic, 0, (int)COUNT(set_names));
    tcase_add_loop_test(tc, every_set_has_the_bits_of_the_plain_one_at_any_shape, 0,
                        (int)COUNT(set_names));
    tcase_add_loop_test(tc, a_token_alone_has_the_bits_it_has_in_a_crowd, 0, (int)COUNT(set_names));
    tcase_add_loop_test(tc, activations_round_half_to_even_in_every_set, 0, (int)COUNT(set_names));
    tcase_add_loop_test(tc, a_value_that_is_not_finite_is_refused_by_every_set, 0,
                        (int)COUNT(set_names));
    tcase_add_test(tc, a_product_and_a_sum_are_not_fused);
    tcase_add_test(tc, sets_are_found_by_name_and_auto_is_the_fastest);
    tcase_add_test(tc, types_without_kernels_are_known_as_such);
    suite_add_tcase(suite, tc);
    runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    n_failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return n_failed ? 1 : 0;
}

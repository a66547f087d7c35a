/* Goal: every set's row kernels give the bits of kern_plain_rows.c for any input, and that file
 * does what the rules say. Method: each function runs on the same pseudo-random inputs in all sets
 * that this machine can run, over sizes around every vector width, and the bytes are compared.  exp
 * and the f16 conversion are also compared with the C library and with exact arithmetic. */
#include "model/kern_matrix.h"
#include "model/kern_rows.h"

#include <check.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct kernels plain = {.name = "plain", KERN_ROWS_MEMBERS(plain)};

#if defined(__x86_64__)
static const struct kernels avx2 = {.name = "avx2", KERN_ROWS_MEMBERS(avx2)};
static const struct kernels avx512 = {.name = "avx512", KERN_ROWS_MEMBERS(avx512)};
static const struct kernels *const vector_sets[] = {&avx2, &avx512};
enum { N_SETS = 2 };
#else
static const struct kernels *const vector_sets[] = {&plain};
enum { N_SETS = 1 };
#endif

static bool can_run(const struct kernels *k)
{
    for (const char *const *name = model_kernel_sets(); *name; name++)
        if (strcmp(*name, k->name) == 0)
            return true;
    return false;
}

/* for (each vector set that this machine runs) */
#define FOR_SETS(k)                                \
    for (uint32_t set_ = 0; set_ < N_SETS; set_++) \
        for (const struct kernels *k = vector_sets[set_]; k && can_run(k); k = NULL)

static uint64_t state;

static uint32_t next_u32(void)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 32);
}

/* In [-scale, scale); now and then a zero of either sign, or something tiny. */
static float next_float(float scale)
{
    const uint32_t u = next_u32();

    switch (u % 61) {
    case 0:
        return 0.0f;
    case 1:
        return -0.0f;
    case 2:
        return 0x1p-140f;
    default:
        return ((float)u * 0x1p-31f - 1.0f) * scale;
    }
}

static void fill(float *x, uint32_t n, float scale)
{
    for (uint32_t i = 0; i < n; i++)
        x[i] = next_float(scale);
}

static void setup(void)
{
    state = 1;
}

static const uint32_t sizes[] = {1,  2,  3,  7,  8,  9,  15, 16,  17,  31,  32,  33, 47,
                                 48, 63, 64, 65, 80, 96, 99, 127, 128, 172, 255, 576};
enum { N_SIZES = sizeof(sizes) / sizeof(sizes[0]), LARGEST = 576, GUARD = 16 };

static void same(const char *set, const char *what, uint32_t n, const void *a, const void *b,
                 size_t len)
{
    ck_assert_msg(memcmp(a, b, len) == 0, "%s %s: size %u differs from plain", set, what, n);
}

/* ---- exp ---- */

static float of_bits(uint32_t u)
{
    float x;

    memcpy(&x, &u, sizeof(x));
    return x;
}

static uint32_t to_bits(float x)
{
    uint32_t u;

    memcpy(&u, &x, sizeof(u));
    return u;
}

START_TEST(exp_is_within_one_ulp_of_the_real_one)
{
    for (float x = -87.0f; x <= 88.0f; x += 0.00371f) {
        const double want = exp((double)x);
        const double ulp = ldexp(1.0, ilogb(want) - 23);

        ck_assert_double_lt(fabs((double)kern_plain_exp(x) - want), ulp);
    }
    ck_assert_float_eq(kern_plain_exp(0.0f), 1.0f);
    ck_assert_float_eq(kern_plain_exp(-0.0f), 1.0f);
}
END_TEST

START_TEST(exp_has_the_edges_that_the_rules_name)
{
    ck_assert_uint_eq(to_bits(kern_plain_exp(nextafterf(-87.0f, -100.0f))), 0);
    ck_assert_float_gt(kern_plain_exp(-87.0f), 0.0f);
    ck_assert_float_ge(kern_plain_exp(-87.0f), 0x1p-126f);
    ck_assert_uint_eq(to_bits(kern_plain_exp(-INFINITY)), 0);
    ck_assert(isinf(kern_plain_exp(nextafterf(88.0f, 100.0f))));
    ck_assert(isfinite(kern_plain_exp(88.0f)));
    ck_assert(isinf(kern_plain_exp(INFINITY)));
    ck_assert_uint_eq(to_bits(kern_plain_exp(of_bits(0xffc12345u))), 0x7fc00000u);
}
END_TEST

START_TEST(exp_is_the_same_in_every_set)
{
    static const uint32_t edges[] = {0x00000000u, 0x80000000u, 0x7f800000u, 0xff800000u,
                                     0x7fc00000u, 0xff812345u, 0xc2ae0000u, 0xc2ae0001u,
                                     0x42b00000u, 0x42b00001u, 0x00000001u, 0x80000001u,
                                     0x7f7fffffu, 0xff7fffffu, 0x33800000u, 0x3eb17218u};

    FOR_SETS(k)
    {
        for (size_t i = 0; i < sizeof(edges) / sizeof(edges[0]); i++)
            ck_assert_uint_eq(to_bits(k->exp(of_bits(edges[i]))),
                              to_bits(kern_plain_exp(of_bits(edges[i]))));
        for (uint32_t i = 0; i < 200000; i++) {
            const float x = of_bits(next_u32());

            ck_assert_uint_eq(to_bits(k->exp(x)), to_bits(kern_plain_exp(x)));
        }
        for (float x = -88.0f; x < 89.0f; x += 0.0037f)
            ck_assert_uint_eq(to_bits(k->exp(x)), to_bits(kern_plain_exp(x)));
    }
}
END_TEST

/* ---- Rows ---- */

START_TEST(rmsnorm_is_the_same_in_every_set)
{
    float x[LARGEST], w[LARGEST], want[LARGEST + GUARD], got[LARGEST + GUARD];

    for (uint32_t i = 0; i < N_SIZES; i++) {
        const uint32_t n = sizes[i];

        fill(x, n, 7.0f);
        fill(w, n, 2.0f);
        memset(want, 0x55, sizeof(want));
        plain.rmsnorm(x, w, n, 1e-5f, want);
        FOR_SETS(k)
        {
            memset(got, 0x55, sizeof(got));
            k->rmsnorm(x, w, n, 1e-5f, got);
            same(k->name, "rmsnorm", n, got, want, sizeof(want));
        }
    }
}
END_TEST

START_TEST(rmsnorm_is_near_the_exact_one)
{
    float x[LARGEST], w[LARGEST], y[LARGEST];
    double sum = 0;

    fill(x, LARGEST, 7.0f);
    fill(w, LARGEST, 2.0f);
    plain.rmsnorm(x, w, LARGEST, 1e-5f, y);
    for (uint32_t i = 0; i < LARGEST; i++)
        sum += (double)x[i] * (double)x[i];
    for (uint32_t i = 0; i < LARGEST; i++)
        ck_assert_double_eq_tol((double)y[i],
                                (double)x[i] / sqrt(sum / LARGEST + 1e-5) * (double)w[i], 1e-6);
}
END_TEST

START_TEST(rope_is_the_same_in_every_set)
{
    static const uint32_t dims[][2] = {{8, 8},   {16, 16},  {24, 20},   {32, 32}, {40, 34},
                                       {64, 64}, {80, 66},  {128, 128}, {64, 32}, {2, 2},
                                       {96, 0},  {128, 96}, {48, 48}};
    enum { HEADS = 3, DIM = 128 };
    float x[HEADS * DIM], cs[DIM], want[HEADS * DIM], got[HEADS * DIM];

    for (size_t i = 0; i < sizeof(dims) / sizeof(dims[0]); i++)
        for (int kind = MODEL_ROPE_NORM; kind <= MODEL_ROPE_NEOX; kind++) {
            const uint32_t dim = dims[i][0], rope_dims = dims[i][1];

            fill(x, HEADS * DIM, 3.0f);
            fill(cs, DIM, 1.0f);
            memcpy(want, x, sizeof(x));
            plain.rope(want, HEADS, dim, rope_dims, (enum model_rope)kind, cs);
            FOR_SETS(k)
            {
                memcpy(got, x, sizeof(x));
                k->rope(got, HEADS, dim, rope_dims, (enum model_rope)kind, cs);
                same(k->name, kind ? "rope neox" : "rope norm", dim, got, want, sizeof(want));
            }
        }
}
END_TEST

START_TEST(products_of_rope_are_rounded_before_they_meet)
{
    /* (1 + 2^-12)^2 - (1 + 2^-11): fused, the 2^-24 of the square would survive. */
    float x[2] = {0x1.001p0f, 0x1.002p0f};
    const float cs[2] = {0x1.001p0f, 1.0f};

    plain.rope(x, 1, 2, 2, MODEL_ROPE_NORM, cs);
    ck_assert_float_eq(x[0], 0.0f);
}
END_TEST

START_TEST(silu_and_add_are_the_same_in_every_set)
{
    float gate[LARGEST], up[LARGEST], want[LARGEST + GUARD], got[LARGEST + GUARD];

    for (uint32_t i = 0; i < N_SIZES; i++) {
        const uint32_t n = sizes[i];

        fill(gate, n, 100.0f);
        fill(up, n, 3.0f);
        memset(want, 0x55, sizeof(want));
        plain.silu_mul(gate, up, n, want);
        plain.add(want, up, n);
        FOR_SETS(k)
        {
            memset(got, 0x55, sizeof(got));
            k->silu_mul(gate, up, n, got);
            k->add(got, up, n);
            same(k->name, "silu_mul, add", n, got, want, sizeof(want));
        }
    }
}
END_TEST

START_TEST(a_value_that_is_not_finite_is_seen_at_every_place)
{
    static const uint32_t bad[] = {0x7f800000u, 0xff800000u, 0x7fc00000u, 0xff800001u};
    float x[80];

    for (uint32_t n = 1; n <= 80; n++) {
        fill(x, n, 1.0f);
        x[n / 2] = 0x1.fffffep127f;
        ck_assert(plain.finite(x, n));
        FOR_SETS(k) ck_assert(k->finite(x, n));
        for (uint32_t i = 0; i < n; i++) {
            const float before = x[i];

            x[i] = of_bits(bad[i % 4]);
            ck_assert(!plain.finite(x, n));
            FOR_SETS(k) ck_assert(!k->finite(x, n));
            x[i] = before;
        }
    }
}
END_TEST

/* ---- KV rows ---- */

START_TEST(f16_rounds_to_nearest_even_over_all_halves)
{
    for (uint32_t h = 0; h < 0x7c00u; h++) {
        const float x = kern_half((uint16_t)h);
        const float above = h + 1 == 0x7c00u ? 65536.0f : kern_half((uint16_t)(h + 1));
        const float middle = (float)(((double)x + (double)above) / 2);
        const uint16_t even = (uint16_t)(h % 2 == 0 ? h : h + 1);

        ck_assert_uint_eq(kern_f16_from_f32(x), h);
        ck_assert_uint_eq(kern_f16_from_f32(-x), h | 0x8000u);
        ck_assert_uint_eq(kern_f16_from_f32(middle), even);
        ck_assert_uint_eq(kern_f16_from_f32(nextafterf(middle, 0.0f)), h);
        ck_assert_uint_eq(kern_f16_from_f32(nextafterf(middle, INFINITY)), h + 1);
    }
    ck_assert_uint_eq(kern_f16_from_f32(INFINITY), 0x7c00u);
    ck_assert_uint_eq(kern_f16_from_f32(3e38f), 0x7c00u);
    ck_assert_uint_eq(kern_f16_from_f32(NAN) & 0x7c00u, 0x7c00u);
    ck_assert_uint_ne(kern_f16_from_f32(NAN) & 0x3ffu, 0);
}
END_TEST

static void layout_of(struct kv_layout *out, uint32_t dim, enum kv_precision precision,
                      uint32_t page_tokens)
{
    const struct kv_geometry g = {2, 2, dim, precision};

    ck_assert_int_eq(kv_layout_init(out, &g, page_tokens, NULL), 0);
}

static unsigned char *pages_alloc(const struct kv_layout *kv, uint32_t n)
{
    void *p = NULL;

    ck_assert_int_eq(posix_memalign(&p, 64, n * kv->page_bytes), 0);
    memset(p, 0x3a, n * kv->page_bytes); /* stale rows: finite, and not zero */
    return p;
}

static const uint32_t head_dims[] = {8, 16, 24, 32, 40, 64, 80, 128};
enum { N_DIMS = sizeof(head_dims) / sizeof(head_dims[0]), MAX_DIM = 128 };

/* Cases of a loop: head size and precision. */
enum { N_PRECISIONS = KV_Q8 + 1, N_CASES = N_DIMS * N_PRECISIONS };

static enum kv_precision case_precision(uint32_t i)
{
    return (enum kv_precision)(i % N_PRECISIONS);
}

/* q8 has no head size that is not a multiple of 32. */
static bool case_exists(uint32_t i)
{
    return case_precision(i) != KV_Q8 || head_dims[i / N_PRECISIONS] % KV_Q8_BLOCK == 0;
}

START_TEST(kv_put_is_the_same_in_every_set)
{
    float k[2 * MAX_DIM], v[2 * MAX_DIM];
    struct kv_layout kv;

    for (uint32_t i = 0; i < N_CASES; i++) {
        const uint32_t dim = head_dims[i / N_PRECISIONS];

        if (!case_exists(i))
            continue;
        layout_of(&kv, dim, case_precision(i), 64);
        unsigned char *want = pages_alloc(&kv, 1), *got = pages_alloc(&kv, 1);

        FOR_SETS(set)
        {
            for (uint32_t slot = 0; slot < 64; slot += 7) {
                fill(k, 2 * MAX_DIM, 60000.0f);
                fill(v, 2 * MAX_DIM, 1e-6f);
                ck_assert_int_eq(plain.kv_put(&kv, want, 1, slot, k, v), 0);
                ck_assert_int_eq(set->kv_put(&kv, got, 1, slot, k, v), 0);
            }
            same(set->name, "kv_put", dim, got, want, kv.page_bytes);
        }
        free(want);
        free(got);
    }
}
END_TEST

/* -1 exactly where element i of K or V does not fit. */
static void check_overflow(const struct kernels *set, const struct kv_layout *kv,
                           unsigned char *page, float fits, float not )
{
    const uint32_t n = 2 * kv->geometry.head_dim;
    float k[2 * MAX_DIM] = {0}, v[2 * MAX_DIM] = {0};

    for (uint32_t i = 0; i < n; i++) {
        float *x = i % 2 ? k : v;

        x[i] = fits;
        ck_assert_int_eq(set->kv_put(kv, page, 0, i % 16, k, v), 0);
        x[i] = -not ;
        ck_assert_int_eq(set->kv_put(kv, page, 0, i % 16, k, v), -1);
        x[i] = NAN;
        ck_assert_int_eq(set->kv_put(kv, page, 0, i % 16, k, v), -1);
        x[i] = 0.0f;
    }
}

START_TEST(an_element_that_overflows_the_precision_is_refused)
{
    struct kv_layout kv;

    /* From 65520 on f16 is infinite; in q8 that is the scale, a 127th. */
    static const float overflows[] = {
        [KV_F32] = INFINITY, [KV_F16] = 65520.0f, [KV_Q8] = 127 * 65520.0f};

    for (int precision = KV_F32; precision <= KV_Q8; precision++) {
        const float not = overflows[precision], fits = nextafterf(not, 0.0f);

        layout_of(&kv, precision == KV_Q8 ? 64 : 24, (enum kv_precision)precision, 16);
        unsigned char *page = pages_alloc(&kv, 1);

        check_overflow(&plain, &kv, page, fits, not );
        FOR_SETS(set) check_overflow(set, &kv, page, fits, not );
        free(page);
    }
}
END_TEST

/* Position `slot` of layer 0, head 1. */
static uint16_t scale_at(const struct kv_layout *kv, const unsigned char *page, size_t offset,
                         uint32_t slot, uint32_t block)
{
    const size_t n = kv->geometry.head_dim / 32;

    return kern_load_u16(page + offset + kv->scales_head_bytes +
                         ((slot / 16 * n + block) * 16 + slot % 16) * 2);
}

static int8_t k_at(const struct kv_layout *kv, const unsigned char *page, uint32_t slot, uint32_t d)
{
    return (
        int8_t)page[kv->k_head_bytes + (slot / 16 * kv->geometry.head_dim + d) * 16 + slot % 16];
}

static int8_t v_at(const struct kv_layout *kv, const unsigned char *page, uint32_t slot, uint32_t d)
{
    return (int8_t)page[kv->v_offset + slot * kv->v_row_bytes + kv->geometry.head_dim + d];
}

/* One block against the rule, with the C library's rounding. */
static void check_block(const float *x, uint16_t scale, const int8_t *q)
{
    float amax = 0.0f, d;

    for (uint32_t i = 0; i < 32; i++)
        amax = fmaxf(amax, fabsf(x[i]));
    ck_assert_uint_eq(scale, kern_f16_from_f32(amax / 127.0f));
    d = kern_half(scale);
    for (uint32_t i = 0; i < 32; i++) {
        const float at = d > 0.0f ? x[i] * (1.0f / d) : 0.0f;

        ck_assert_int_eq(q[i], (int)fmaxf(-127.0f, fminf(127.0f, rintf(at))));
        if (d >= 0x1p-14f) /* no subnormal: half a step, and what rounding d may cut off */
            ck_assert_double_le(fabs((double)q[i] * (double)d - (double)x[i]),
                                (double)d * (0.5 + 127.0 / 2048));
    }
}

START_TEST(q8_rounds_blocks_as_the_rule_says)
{
    static const float scales[] = {1.0f,           0.01f, 3e-5f, 1e-6f, 127 * 0x1.1p-25f,
                                   127 * 0x1p-25f, 0.0f,  8e6f,  300.0f};
    float k[2 * 64], v[2 * 64];
    struct kv_layout kv;

    layout_of(&kv, 64, KV_Q8, 32);
    for (uint32_t c = 0; c < sizeof(scales) / sizeof(scales[0]); c++) {
        unsigned char *page = pages_alloc(&kv, 1);
        const uint32_t slot = (c * 7 + 3) % 32;

        fill(k, 2 * 64, scales[c]);
        fill(v, 2 * 64, scales[c]);
        k[64 + 5] = v[64 + 63] = scales[c];
        ck_assert_int_eq(plain.kv_put(&kv, page, 0, slot, k, v), 0);
        for (uint32_t block = 0; block < 2; block++) {
            int8_t kq[32], vq[32];

            for (uint32_t i = 0; i < 32; i++) {
                kq[i] = k_at(&kv, page, slot, block * 32 + i);
                vq[i] = v_at(&kv, page, slot, block * 32 + i);
            }
            check_block(k + 64 + block * 32, scale_at(&kv, page, kv.ks_offset, slot, block), kq);
            check_block(v + 64 + block * 32, scale_at(&kv, page, kv.vs_offset, slot, block), vq);
        }
        free(page);
    }
}
END_TEST

/* ---- Attention ---- */

enum { MAX_POSITIONS = 800, QUERIES = KERN_ATTN_ROWS };

/* A sequence of MAX_POSITIONS positions, the same values whatever the page size. */
struct sequence {
    struct kv_layout kv;
    unsigned char *bytes;
    const unsigned char **pages;
    float q[QUERIES][MAX_DIM];
    const float *q_rows[QUERIES];
};

static void sequence_open(struct sequence *s, uint32_t dim, enum kv_precision precision,
                          uint32_t page_tokens)
{
    const uint32_t n_pages = (MAX_POSITIONS + page_tokens - 1) / page_tokens;
    float k[2 * MAX_DIM], v[2 * MAX_DIM];

    setup();
    layout_of(&s->kv, dim, precision, page_tokens);
    s->bytes = pages_alloc(&s->kv, n_pages);
    s->pages = calloc(n_pages, sizeof(*s->pages));
    ck_assert_ptr_nonnull(s->pages);
    for (uint32_t i = 0; i < n_pages; i++) /* scattered: backwards */
        s->pages[i] = s->bytes + (n_pages - 1 - i) * s->kv.page_bytes;
    for (uint32_t pos = 0; pos < MAX_POSITIONS; pos++) {
        fill(k, 2 * dim, 4.0f);
        fill(v, 2 * dim, 1.0f);
        ck_assert_int_eq(plain.kv_put(&s->kv,
                                      (unsigned char *)(uintptr_t)s->pages[pos / page_tokens], 1,
                                      pos % page_tokens, k, v),
                         0);
    }
    for (uint32_t i = 0; i < QUERIES; i++) {
        fill(s->q[i], dim, 1.0f);
        s->q_rows[i] = s->q[i];
    }
}

static void sequence_close(struct sequence *s)
{
    free(s->pages);
    free(s->bytes);
}

/* Attention of query rows [first, first + n) with their n_kv, into y [n][MAX_DIM]. */
static void attend(const struct kernels *set, const struct sequence *s, uint32_t first, uint32_t n,
                   const uint32_t *n_kv, float (*y)[MAX_DIM])
{
    const uint32_t dim = s->kv.geometry.head_dim;
    const struct kern_attn a = {
        .kv = &s->kv,
        .pages = s->pages,
        .layer = 1,
        .kv_head = 1,
        .n_q = n,
        .q = s->q_rows + first,
        .n_kv = n_kv,
    };
    static float o[2 * QUERIES][MAX_DIM];
    struct kern_partial total[QUERIES], next[QUERIES];

    for (uint32_t i = 0; i < n; i++) {
        total[i].o = o[i];
        next[i].o = o[QUERIES + i];
    }
    set->attn_segment(&a, 0, total);
    for (uint32_t seg = 1; seg * KERN_SEGMENT < MAX_POSITIONS; seg++) {
        set->attn_segment(&a, seg, next);
        for (uint32_t i = 0; i < n; i++)
            if (kern_segment_positions(n_kv[i], seg) > 0)
                set->attn_merge(&total[i], &next[i], dim);
    }
    for (uint32_t i = 0; i < n; i++)
        set->attn_finish(&total[i], dim, y[i]);
}

static const uint32_t lengths[] = {1,   2,   15,  16,  17,  31,  32,  33,  63,  64,  65,  127,
                                   128, 129, 239, 240, 241, 255, 256, 257, 271, 272, 273, 300,
                                   511, 512, 513, 528, 529, 640, 767, 768, 769, 799};
enum { N_LENGTHS = sizeof(lengths) / sizeof(lengths[0]) };

/* y[i]: the row's answer computed alone, by the definition. */
static void attend_alone(const struct sequence *s, uint32_t first, uint32_t n, const uint32_t *n_kv,
                         float (*y)[MAX_DIM])
{
    for (uint32_t i = 0; i < n; i++)
        attend(&plain, s, first + i, 1, &n_kv[i], &y[i]);
}

/* A tile of n rows from position `last` backwards, as prefill has them, in every set. */
static void check_tile(const struct sequence *s, uint32_t n, uint32_t heads, uint32_t last)
{
    const uint32_t dim = s->kv.geometry.head_dim;
    float want[QUERIES][MAX_DIM], got[QUERIES][MAX_DIM];
    uint32_t n_kv[QUERIES] = {0};

    for (uint32_t i = 0; i < n; i++) {
        const uint32_t back = (n - 1 - i) / heads;

        n_kv[i] = last > back ? last - back : 1;
    }
    attend_alone(s, QUERIES - n, n, n_kv, want);
    attend(&plain, s, QUERIES - n, n, n_kv, got);
    for (uint32_t i = 0; i < n; i++)
        same("plain", "attention tile", last, got[i], want[i], dim * sizeof(float));
    FOR_SETS(k)
    {
        attend(k, s, QUERIES - n, n, n_kv, got);
        for (uint32_t i = 0; i < n; i++)
            same(k->name, "attention tile", last, got[i], want[i], dim * sizeof(float));
    }
}

START_TEST(attention_is_the_same_in_every_set_and_tile)
{
    struct sequence s;

    if (!case_exists((uint32_t)_i))
        return;
    sequence_open(&s, head_dims[_i / N_PRECISIONS], case_precision((uint32_t)_i), 64);
    for (uint32_t i = 0; i < N_LENGTHS; i++) {
        const uint32_t n = 1 + (i * 5 + (uint32_t)_i) % QUERIES;

        check_tile(&s, n, 1 + i % 3, lengths[i]);
    }
    sequence_close(&s);
}
END_TEST

START_TEST(every_height_of_tile_gives_the_same)
{
    struct sequence s;

    for (int precision = KV_F32; precision <= KV_Q8; precision++) {
        sequence_open(&s, 64, (enum kv_precision)precision, 64);
        for (uint32_t n = 1; n <= QUERIES; n++) {
            check_tile(&s, n, 3, 258);
            check_tile(&s, n, 1, 250);
        }
        sequence_close(&s);
    }
}
END_TEST

START_TEST(rows_that_see_nothing_of_a_segment_are_left_alone)
{
    static const uint32_t n_kv[4] = {700, 3, 257, 256};
    float want[QUERIES][MAX_DIM], got[QUERIES][MAX_DIM];
    struct sequence s;

    sequence_open(&s, 64, KV_F16, 64);
    attend_alone(&s, 0, 4, n_kv, want);
    FOR_SETS(k)
    {
        attend(k, &s, 0, 4, n_kv, got);
        for (uint32_t i = 0; i < 4; i++)
            same(k->name, "mixed tile", i, got[i], want[i], 64 * sizeof(float));
    }
    sequence_close(&s);
}
END_TEST

START_TEST(attention_does_not_see_the_page_size)
{
    static const uint32_t page_tokens[] = {16, 64, 256};
    const enum kv_precision precision = (enum kv_precision)_i;
    const uint32_t dim = precision == KV_Q8 ? 96 : 40;
    float want[N_LENGTHS][MAX_DIM], got[1][MAX_DIM];
    struct sequence s;

    for (uint32_t p = 0; p < 3; p++) {
        sequence_open(&s, dim, precision, page_tokens[p]);
        for (uint32_t i = 0; i < N_LENGTHS; i++) {
            attend(&plain, &s, 0, 1, &lengths[i], got);
            if (p == 0)
                memcpy(want[i], got[0], sizeof(want[i]));
            same("plain", "page size", lengths[i], got[0], want[i], dim * sizeof(float));
            FOR_SETS(k)
            {
                attend(k, &s, 0, 1, &lengths[i], got);
                same(k->name, "page size", lengths[i], got[0], want[i], dim * sizeof(float));
            }
        }
        sequence_close(&s);
    }
}
END_TEST

/* Scores of huge spread, and of zeros of both signs: maxima, underflows to p = 0. */
START_TEST(attention_at_the_ends_of_the_range_is_the_same_in_every_set)
{
    static const float scales[] = {0.0f, -0.0f, 1e-30f, 300.0f, 3e30f};
    float want[QUERIES][MAX_DIM], got[QUERIES][MAX_DIM];
    static const uint32_t n_kv[3] = {513, 300, 40};
    struct sequence s;

    sequence_open(&s, 64, KV_F32, 16);
    for (uint32_t c = 0; c < 5; c++) {
        for (uint32_t i = 0; i < 3; i++)
            for (uint32_t d = 0; d < 64; d++)
                s.q[i][d] = scales[c] * (d % 2 ? 1.0f : -1.0f);
        attend_alone(&s, 0, 3, n_kv, want);
        FOR_SETS(k)
        {
            attend(k, &s, 0, 3, n_kv, got);
            for (uint32_t i = 0; i < 3; i++)
                same(k->name, "range", c, got[i], want[i], 64 * sizeof(float));
        }
    }
    sequence_close(&s);
}
END_TEST

/* K or V of head 1, layer 1, as the layout says, in the sequence's precision. */
static double k_value(const struct sequence *s, uint32_t pos, uint32_t d)
{
    const unsigned char *layer = s->pages[pos / 64] + s->kv.layer_bytes;
    const uint32_t slot = pos % 64;
    const size_t at = (size_t)(slot / 16 * 64 + d) * 16 + slot % 16;

    if (s->kv.geometry.precision == KV_F32)
        return (double)kern_load_f32(layer + s->kv.k_head_bytes + at * 4);
    return (double)k_at(&s->kv, layer, slot, d) *
           (double)kern_half(scale_at(&s->kv, layer, s->kv.ks_offset, slot, d / 32));
}

static double v_value(const struct sequence *s, uint32_t pos, uint32_t d)
{
    const unsigned char *layer = s->pages[pos / 64] + s->kv.layer_bytes;
    const uint32_t slot = pos % 64;

    if (s->kv.geometry.precision == KV_F32)
        return (double)kern_load_f32(layer + s->kv.v_offset + slot * s->kv.v_row_bytes +
                                     (64 + d) * sizeof(float));
    return (double)v_at(&s->kv, layer, slot, d) *
           (double)kern_half(scale_at(&s->kv, layer, s->kv.vs_offset, slot, d / 32));
}

START_TEST(attention_is_near_the_exact_one)
{
    static const uint32_t n_kv[1] = {777};
    float y[1][MAX_DIM];
    double p[777], sum = 0;
    struct sequence s;

    sequence_open(&s, 64, _i == 0 ? KV_F32 : KV_Q8, 64);
    attend(&plain, &s, 0, 1, n_kv, y);
    for (uint32_t pos = 0; pos < 777; pos++) {
        double score = 0;

        for (uint32_t d = 0; d < 64; d++)
            score += (double)s.q[0][d] * k_value(&s, pos, d);
        p[pos] = exp(score);
        sum += p[pos];
    }
    for (uint32_t d = 0; d < 64; d++) {
        double want = 0;

        for (uint32_t pos = 0; pos < 777; pos++)
            want += p[pos] / sum * v_value(&s, pos, d);
        ck_assert_double_eq_tol((double)y[0][d], want, 1e-5);
    }
    sequence_close(&s);
}
END_TEST

static Suite *suite(void)
{
    Suite *s = suite_create("kern_rows");
    TCase *rows = tcase_create("rows"), *kv = tcase_create("kv"), *attn = tcase_create("attention");

    tcase_add_checked_fixture(rows, setup, NULL);
    tcase_add_test(rows, exp_is_within_one_ulp_of_the_real_one);
    tcase_add_test(rows, exp_has_the_edges_that_the_rules_name);
    tcase_add_test(rows, exp_is_the_same_in_every_set);
    tcase_add_test(rows, rmsnorm_is_the_same_in_every_set);
    tcase_add_test(rows, rmsnorm_is_near_the_exact_one);
    tcase_add_test(rows, rope_is_the_same_in_every_set);
    tcase_add_test(rows, products_of_rope_are_rounded_before_they_meet);
    tcase_add_test(rows, silu_and_add_are_the_same_in_every_set);
    tcase_add_test(rows, a_value_that_is_not_finite_is_seen_at_every_place);
    suite_add_tcase(s, rows);
    tcase_add_checked_fixture(kv, setup, NULL);
    tcase_add_test(kv, f16_rounds_to_nearest_even_over_all_halves);
    tcase_add_test(kv, kv_put_is_the_same_in_every_set);
    tcase_add_test(kv, an_element_that_overflows_the_precision_is_refused);
    tcase_add_test(kv, q8_rounds_blocks_as_the_rule_says);
    suite_add_tcase(s, kv);
    tcase_set_timeout(attn, 120);
    tcase_add_checked_fixture(attn, setup, NULL);
    tcase_add_loop_test(attn, attention_is_the_same_in_every_set_and_tile, 0, N_CASES);
    tcase_add_test(attn, every_height_of_tile_gives_the_same);
    tcase_add_test(attn, rows_that_see_nothing_of_a_segment_are_left_alone);
    tcase_add_loop_test(attn, attention_does_not_see_the_page_size, 0, N_PRECISIONS);
    tcase_add_test(attn, attention_at_the_ends_of_the_range_is_the_same_in_every_set);
    tcase_add_loop_test(attn, attention_is_near_the_exact_one, 0, 2);
    suite_add_tcase(s, attn);
    return s;
}

int main(void)
{
    SRunner *r = srunner_create(suite());
    int failed;

#if defined(__x86_64__)
    for (uint32_t i = 0; i < N_SETS; i++)
        if (!can_run(vector_sets[i]))
            printf("SKIP kern_rows_%s: this machine cannot run the set\n", vector_sets[i]->name);
#endif
    srunner_run_all(r, CK_ENV);
    failed = srunner_ntests_failed(r);
    srunner_free(r);
    return failed ? 1 : 0;
}

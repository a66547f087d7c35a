/* Lanes and rows: every run of lanes, lengths with and without a remainder, each width; both ways,
 * against the definition of a transposition, with the vectors that this CPU has and with those that
 * all have.  No byte is zero, so that what was not written shows. */
#include "kv_help.h"

#include "kvcore/kv_lanes.h"

static size_t n_set(const unsigned char *bytes, size_t n)
{
    size_t set = 0;

    for (size_t i = 0; i < n; i++)
        set += bytes[i] != 0;
    return set;
}

enum { D = 87, STRIDE = 4 * D + 5 };

/* Lanes [first, first + n) of a group without a zero byte, there and back. */
static void check_lanes(const unsigned char *group, uint32_t d, uint32_t first, uint32_t n,
                        size_t e)
{
    static unsigned char back[D * KV_LANES * 4], buffer[1 + KV_LANES * STRIDE];
    unsigned char *row = buffer + 1;
    const unsigned char *list[KV_LANES];
    bool same = true;

    memset(buffer, 0, sizeof(buffer));
    kv_lanes_to_rows(row, STRIDE, group + first * e, n, d, e);
    for (size_t s = 0; s < n; s++) {
        for (size_t i = 0; i < d; i++)
            same = same &&
                   memcmp(row + s * STRIDE + i * e, group + (i * KV_LANES + first + s) * e, e) == 0;
        list[s] = row + s * STRIDE - 1; /* and an offset of 1 */
    }
    ck_assert(same);
    ck_assert_uint_eq(n_set(buffer, sizeof(buffer)), n * d * e);
    memset(back, 0, sizeof(back));
    kv_rows_to_lanes(back + first * e, list, 1, n, d, e);
    for (size_t i = 0; i < sizeof(back); i++)
        same = same && (back[i] == 0 || back[i] == group[i]);
    ck_assert(same);
    ck_assert_uint_eq(n_set(back, sizeof(back)), n * d * e);
}

/* Any run of lanes of a group, at widths of 1, 2 and 4 bytes. */
START_TEST(lanes_and_rows_are_transposes_of_each_other)
{
    static const uint32_t lengths[] = {0, 1, 3, 4, 8, 15, 16, 17, 33, 64, D};
    static unsigned char group[D * KV_LANES * 4];

    for (size_t i = 0; i < sizeof(group); i++)
        group[i] = (unsigned char)(1 + mix(i) % 255);
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++)
        for (uint32_t first = 0; first < KV_LANES; first++)
            for (uint32_t n = 1; n <= KV_LANES - first; n++)
                check_lanes(group, lengths[i], first, n, (size_t)1 << _i);
}
END_TEST

enum { SCALES = 40, HEAD = SCALES * KV_LANES * 2 + 64 };

/* As check_lanes, of [n_heads][d] scales. */
static void check_scales(const unsigned char *group, const struct kv_scales *scales, uint32_t first,
                         uint32_t n)
{
    static unsigned char back[8 * HEAD], buffer[1 + KV_LANES * STRIDE];
    const size_t e = sizeof(uint16_t), row = scales->n_heads * scales->d * e;
    const unsigned char *list[KV_LANES];
    bool same = true;

    memset(buffer, 0, sizeof(buffer));
    kv_scales_to_rows(buffer + 1, STRIDE, group + first * e, n, scales);
    for (size_t s = 0; s < n; s++) {
        for (size_t i = 0; i < row / e; i++)
            same = same && memcmp(buffer + 1 + s * STRIDE + i * e,
                                  group + i / scales->d * scales->head_bytes +
                                      (i % scales->d * KV_LANES + first + s) * e,
                                  e) == 0;
        list[s] = buffer + s * STRIDE; /* and an offset of 1 */
    }
    ck_assert(same);
    ck_assert_uint_eq(n_set(buffer, sizeof(buffer)), n * row);
    memset(back, 0, sizeof(back));
    kv_rows_to_scales(back + first * e, list, 1, n, scales);
    for (size_t i = 0; i < sizeof(back); i++)
        same = same && (back[i] == 0 || back[i] == group[i]);
    ck_assert(same);
    ck_assert_uint_eq(n_set(back, sizeof(back)), n * row);
}

START_TEST(scales_of_all_heads_are_transposed_together)
{
    static const struct kv_scales shapes[] = {{HEAD, 1, 1}, {HEAD, 3, 1}, {HEAD, 3, 2},
                                              {HEAD, 2, 3}, {HEAD, 7, 1}, {HEAD, 1, 4},
                                              {HEAD, 5, 3}, {HEAD, 8, 4}, {HEAD, 1, SCALES}};
    static unsigned char group[8 * HEAD];

    for (size_t i = 0; i < sizeof(group); i++)
        group[i] = (unsigned char)(1 + mix(i) % 255);
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++)
        for (uint32_t first = 0; first < KV_LANES; first++)
            for (uint32_t n = 1; n <= KV_LANES - first; n++)
                check_scales(group, &shapes[i], first, n);
}
END_TEST

static void use_plain(void)
{
    kv_lanes_plain(true);
}

static void use_best(void)
{
    kv_lanes_plain(false);
}

int main(void)
{
    Suite *s = suite_create("kv_lanes");
    TCase *best = tcase_create("lanes"), *plain = tcase_create("lanes, plain vectors");
    SRunner *sr = srunner_create(s);
    int n_failed;

    suite_add_tcase(s, best);
    tcase_set_timeout(best, 60);
    tcase_add_loop_test(best, lanes_and_rows_are_transposes_of_each_other, 0, 3);
    tcase_add_test(best, scales_of_all_heads_are_transposed_together);
    suite_add_tcase(s, plain);
    tcase_set_timeout(plain, 60);
    tcase_add_checked_fixture(plain, use_plain, use_best);
    tcase_add_loop_test(plain, lanes_and_rows_are_transposes_of_each_other, 0, 3);
    srunner_run_all(sr, CK_ENV);
    n_failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return n_failed != 0;
}

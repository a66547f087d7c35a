/* Lanes and rows: every run of lanes, lengths with and without a remainder, each width; both ways,
 * against the definition of a transposition.  No byte is zero, so that what was not written shows.
 */
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

int main(void)
{
    Suite *s = suite_create("kv_lanes");
    TCase *tc = tcase_create("lanes");
    SRunner *sr = srunner_create(s);
    int n_failed;

    suite_add_tcase(s, tc);
    tcase_set_timeout(tc, 60);
    tcase_add_loop_test(tc, lanes_and_rows_are_transposes_of_each_other, 0, 3);
    srunner_run_all(sr, CK_ENV);
    n_failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return n_failed != 0;
}

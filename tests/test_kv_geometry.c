/* What geometries and layouts are taken, and where things stand in a page. */
#include "kvcore/kvcore.h"

#include <check.h>
#include <string.h>

static const struct kv_geometry smollm = {
    .n_layers = 30, .n_kv_heads = 3, .head_dim = 64, .precision = KV_F16};

START_TEST(precisions_have_names)
{
    ck_assert_str_eq(kv_precision_name(KV_F16), "f16");
    ck_assert_ptr_null(kv_precision_name((enum kv_precision)3));
    ck_assert_int_eq(kv_precision_parse("f32"), KV_F32);
    ck_assert_int_eq(kv_precision_parse("q8"), KV_Q8);
    ck_assert_int_eq(kv_precision_parse("f64"), KV_ERR_INVALID);
    ck_assert_int_eq(kv_precision_parse(""), KV_ERR_INVALID);
}
END_TEST

START_TEST(a_frame_is_the_largest_power_of_two_within_a_mebibyte)
{
    struct kv_geometry g = smollm;

    ck_assert_uint_eq(kv_position_bytes(&g), 23040);
    ck_assert_uint_eq(kv_frame_positions(&g), 32);
    g.precision = KV_F32;
    ck_assert_uint_eq(kv_frame_positions(&g), 16);
    g.precision = KV_Q8; /* 64 bytes and 2 scales a head */
    ck_assert_uint_eq(kv_position_bytes(&g), 30 * 2 * 3 * (64 + 4));
    ck_assert_uint_eq(kv_frame_positions(&g), 64);
    g = (struct kv_geometry){1, 1, 1, KV_F16};
    ck_assert_uint_eq(kv_frame_positions(&g), 262144);
    g = (struct kv_geometry){64, 128, 1024, KV_F32};
    ck_assert_uint_eq(kv_position_bytes(&g), KV_MAX_POSITION_BYTES);
    ck_assert_int_eq(kv_geometry_check(&g, NULL), 0);
    ck_assert_uint_eq(kv_frame_positions(&g), 1);
}
END_TEST

START_TEST(a_geometry_out_of_range_is_refused_by_field)
{
    static const struct {
        struct kv_geometry g;
        int rc;
        const char *field;
    } cases[] = {
        {{0, 1, 1, KV_F16}, KV_ERR_INVALID, "n_layers"},
        {{1, 0, 1, KV_F16}, KV_ERR_INVALID, "n_kv_heads"},
        {{1, 1, 0, KV_F16}, KV_ERR_INVALID, "head_dim"},
        {{1, 1, 4097, KV_F16}, KV_ERR_LIMIT, "head_dim"},
        {{1, UINT32_MAX, 4096, KV_F32}, KV_ERR_LIMIT, "n_kv_heads"},
        {{UINT32_MAX, 1, 4096, KV_F32}, KV_ERR_LIMIT, "n_layers"},
        {{65, 128, 1024, KV_F32}, KV_ERR_LIMIT, "n_layers"},
        {{1, 1, 48, KV_Q8}, KV_ERR_INVALID, "head_dim is 48: precision q8 needs a multiple of 32"},
        {{1, 1, 1, KV_Q8}, KV_ERR_INVALID, "head_dim is 1"},
        {{1, 1, 4128, KV_Q8}, KV_ERR_LIMIT, "head_dim"},
        {{1, UINT32_MAX, 32, KV_Q8}, KV_ERR_LIMIT, "n_kv_heads"},
        {{241, 128, 1024, KV_Q8}, KV_ERR_LIMIT, "n_layers"},
        {{1, 1, 32, (enum kv_precision)77}, KV_ERR_INVALID, "precision is 77"},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct kv_why why = {{0}};

        ck_assert_int_eq(kv_geometry_check(&cases[i].g, &why), cases[i].rc);
        ck_assert_msg(strstr(why.text, cases[i].field) != NULL, "%s", why.text);
        ck_assert_int_eq(kv_geometry_check(&cases[i].g, NULL), cases[i].rc);
    }
}
END_TEST

/* Those of K between K and V, those of V behind V. */
static void check_scales(const struct kv_layout *l)
{
    const struct kv_geometry *g = &l->geometry;
    const size_t bytes = g->n_kv_heads * l->scales_head_bytes;

    if (g->precision != KV_Q8) {
        ck_assert_uint_eq(l->ks_offset + l->vs_offset + l->scales_head_bytes, 0);
        return;
    }
    ck_assert_uint_ge(l->scales_head_bytes, l->page_tokens * (g->head_dim / 32) * 2);
    ck_assert_uint_ge(l->ks_offset, g->n_kv_heads * l->k_head_bytes);
    ck_assert_uint_ge(l->v_offset, l->ks_offset + bytes);
    ck_assert_uint_ge(l->vs_offset, l->v_offset + l->page_tokens * l->v_row_bytes);
    ck_assert_uint_ge(l->layer_bytes, l->vs_offset + bytes);
    ck_assert_uint_eq((l->scales_head_bytes | l->ks_offset | l->vs_offset) % KV_PAGE_ALIGN, 0);
}

START_TEST(a_page_is_laid_out_without_overlap_and_aligned)
{
    static const struct kv_geometry geometries[] = {
        {30, 3, 64, KV_F16}, {1, 1, 1, KV_F16}, {3, 5, 7, KV_F32}, {2, 2, 6, KV_F16},
        {30, 3, 64, KV_Q8},  {1, 1, 32, KV_Q8}, {3, 5, 96, KV_Q8}};

    for (size_t i = 0; i < sizeof(geometries) / sizeof(geometries[0]); i++)
        for (uint32_t p = KV_PAGE_TOKENS_MIN; p <= KV_PAGE_TOKENS_MAX; p *= 2) {
            const struct kv_geometry *g = &geometries[i];
            struct kv_layout l;

            ck_assert_int_eq(kv_layout_init(&l, g, p, NULL), 0);
            ck_assert_uint_ge(l.k_head_bytes, p * g->head_dim * l.element_bytes);
            ck_assert_uint_ge(l.v_offset, g->n_kv_heads * l.k_head_bytes);
            ck_assert_uint_eq(l.v_row_bytes, g->n_kv_heads * g->head_dim * l.element_bytes);
            ck_assert_uint_ge(l.layer_bytes, l.v_offset + p * l.v_row_bytes);
            check_scales(&l);
            ck_assert_uint_ge(l.ids_offset, g->n_layers * l.layer_bytes);
            ck_assert_uint_ge(l.page_bytes, l.ids_offset + p * 4);
            ck_assert_uint_eq(
                (l.k_head_bytes | l.v_offset | l.layer_bytes | l.ids_offset | l.page_bytes) %
                    KV_PAGE_ALIGN,
                0);
        }
}
END_TEST

START_TEST(page_sizes_are_powers_of_two_within_bounds)
{
    static const uint32_t wrong[] = {0, 1, 8, 15, 17, 48, 2048, UINT32_MAX};
    struct kv_layout l = {.page_tokens = 5};
    struct kv_why why;

    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        ck_assert_int_eq(kv_layout_init(&l, &smollm, wrong[i], &why), KV_ERR_INVALID);
        ck_assert_ptr_nonnull(strstr(why.text, "page_tokens"));
        ck_assert_uint_eq(l.page_tokens, 5);
    }
}
END_TEST

START_TEST(a_budget_that_cannot_be_had_is_refused_by_name)
{
    struct kv_cache_config config = {.geometry = smollm, .n_pages = 0, .arena = true};
    struct kv_cache *cache = NULL;
    struct kv_why why;

    ck_assert_int_eq(kv_cache_open(&config, &cache, &why), KV_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(why.text, "n_pages"));
    config.n_pages = 1u << 28;
    ck_assert_int_eq(kv_cache_open(&config, &cache, &why), KV_ERR_NOMEM);
    ck_assert_ptr_nonnull(strstr(why.text, "bytes"));
    config.n_pages = 1;
    config.page_tokens = 20;
    ck_assert_int_eq(kv_cache_open(&config, &cache, &why), KV_ERR_INVALID);
    ck_assert_ptr_null(cache);
    kv_cache_close(NULL);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("kv_geometry");
    TCase *tc = tcase_create("geometry");
    SRunner *sr = srunner_create(s);
    int n_failed;

    suite_add_tcase(s, tc);
    tcase_add_test(tc, precisions_have_names);
    tcase_add_test(tc, a_frame_is_the_largest_power_of_two_within_a_mebibyte);
    tcase_add_test(tc, a_geometry_out_of_range_is_refused_by_field);
    tcase_add_test(tc, a_page_is_laid_out_without_overlap_and_aligned);
    tcase_add_test(tc, page_sizes_are_powers_of_two_within_bounds);
    tcase_add_test(tc, a_budget_that_cannot_be_had_is_refused_by_name);
    srunner_run_all(sr, CK_ENV);
    n_failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return n_failed != 0;
}

/* The index of a tree's nodes: all of them are found while it grows and shrinks, no call does much,
 * its memory follows the number of nodes, and without memory it goes on with longer chains. */
#include "kvcore/kv_index.h"

#include "fail_alloc.h"
#include "kv_help.h"
#include "kvcore/kv_tree.h"

enum { N = 20000, N_PARENTS = 7, N_FEW = 4 };

static struct kv_node nodes[N], parents[N_PARENTS];
static bool is_in[N];
static struct kv_index idx;

static void set_up(void)
{
    memset(is_in, 0, sizeof(is_in));
    memset(nodes, 0, sizeof(nodes));
    for (uint32_t i = 0; i < N; i++) {
        nodes[i].up = &parents[i % N_PARENTS];
        nodes[i].first_id = i / N_PARENTS;
    }
    ck_assert_int_eq(kv_index_open(&idx), 0);
}

static void tear_down(void)
{
    kv_index_release(&idx);
}

static void put(uint32_t i)
{
    kv_index_add(&idx, &nodes[i]);
    is_in[i] = true;
}

static void take(uint32_t i)
{
    kv_index_remove(&idx, &nodes[i]);
    is_in[i] = false;
}

static void check_found(uint32_t i)
{
    ck_assert_ptr_eq(kv_index_find(&idx, nodes[i].up, nodes[i].first_id),
                     is_in[i] ? &nodes[i] : NULL);
}

static void check_all_found(void)
{
    for (uint32_t i = 0; i < N; i++)
        check_found(i);
}

/* Chains and segments as the header has them. */
static void check_form(void)
{
    ck_assert_uint_ge(idx.n_chains, 2 * idx.n_nodes);
    ck_assert(idx.n_chains <= 3 * idx.n_nodes || idx.n_chains == KV_INDEX_LEAST);
    ck_assert_uint_le(idx.n_chains, (uint64_t)idx.mask + 1);
    ck_assert_uint_gt(idx.n_chains, idx.mask >> 1);
    ck_assert_uint_eq(idx.n_segments, (idx.n_chains + KV_INDEX_SEGMENT - 1) / KV_INDEX_SEGMENT);
}

START_TEST(every_node_is_found_while_the_index_grows_and_shrinks)
{
    for (uint32_t i = 0; i < N; i++) {
        const uint32_t before = idx.n_chains;

        put(i);
        check_form();
        ck_assert_uint_le(idx.n_chains - before, N_FEW);
        check_found((uint32_t)(mix(i) % N));
    }
    check_all_found();
    for (uint32_t i = 0; i < N; i++) {
        const uint32_t before = idx.n_chains, at = (uint32_t)((uint64_t)i * 7919 % N);

        take(at);
        check_form();
        ck_assert_uint_le(before - idx.n_chains, N_FEW);
        check_found((uint32_t)(mix(i) % N));
    }
    ck_assert_uint_eq(idx.n_chains, KV_INDEX_LEAST);
    ck_assert_uint_eq(idx.n_segments, 1);
}
END_TEST

START_TEST(nodes_come_and_go_in_any_order)
{
    for (uint32_t step = 0; step < 8 * N; step++) {
        const uint64_t h = mix(step);
        /* Waves: more come than go, then more go than come. */
        const bool more = step / N % 2 == 0;
        const uint32_t i = (uint32_t)h % N;

        if (is_in[i] && (!more || h >> 62 == 0))
            take(i);
        else if (!is_in[i] && (more || h >> 62 == 0))
            put(i);
        check_form();
        check_found(i);
    }
    check_all_found();
}
END_TEST

/* Chains of nodes that have not much in common are short. */
START_TEST(a_chain_has_few_nodes)
{
    uint32_t longest = 0;

    for (uint32_t i = 0; i < N; i++)
        put(i);
    for (uint32_t i = 0; i < N; i++) {
        uint32_t length = 0;

        for (const struct kv_node *n = &nodes[i]; n != NULL; n = n->next)
            length++;
        longest = length > longest ? length : longest;
    }
    ck_assert_uint_le(longest, 10);
}
END_TEST

START_TEST(without_memory_chains_grow_longer_until_there_is_some)
{
    for (uint32_t i = 0; i < KV_INDEX_SEGMENT / 2; i++)
        put(i);
    ck_assert_uint_eq(idx.n_chains, KV_INDEX_SEGMENT);
    allocs_left = 0;
    for (uint32_t i = KV_INDEX_SEGMENT / 2; i < 2 * KV_INDEX_SEGMENT; i++)
        put(i);
    allocs_left = UINT64_MAX;
    ck_assert(alloc_failed);
    ck_assert_uint_eq(idx.n_chains, KV_INDEX_SEGMENT);
    check_all_found();
    for (uint32_t i = 0; i < KV_INDEX_SEGMENT; i++)
        take(i);
    check_all_found();
    for (uint32_t i = 0; i < KV_INDEX_SEGMENT; i++)
        put(i);
    check_all_found();
    check_form();
}
END_TEST

/* Each allocation of a growing index fails once, in turn. */
START_TEST(an_allocation_that_fails_once_does_no_harm)
{
    bool failed = true;

    alloc_fails_once = true;
    for (uint64_t nth = 0; failed; nth++) {
        struct kv_index other;
        int rc;

        ck_assert_uint_lt(nth, 100);
        alloc_failed = false;
        allocs_left = nth;
        rc = kv_index_open(&other);
        for (uint32_t i = 0; i < N && rc == 0; i++)
            kv_index_add(&other, &nodes[i]);
        allocs_left = UINT64_MAX;
        failed = alloc_failed;
        ck_assert_int_eq(rc, failed && nth < 2 ? KV_ERR_NOMEM : 0);
        if (rc < 0)
            continue;
        ck_assert_uint_ge(other.n_chains, 2 * N);
        for (uint32_t i = 0; i < N; i++)
            ck_assert_ptr_eq(kv_index_find(&other, nodes[i].up, nodes[i].first_id), &nodes[i]);
        for (uint32_t i = 0; i < N; i++)
            kv_index_remove(&other, &nodes[i]);
        kv_index_release(&other);
    }
}
END_TEST

int main(void)
{
    Suite *s = suite_create("kv_index");
    TCase *tc = tcase_create("index");
    SRunner *sr = srunner_create(s);
    int n_failed;

    suite_add_tcase(s, tc);
    tcase_set_timeout(tc, 120);
    tcase_add_checked_fixture(tc, set_up, tear_down);
    tcase_add_test(tc, every_node_is_found_while_the_index_grows_and_shrinks);
    tcase_add_test(tc, nodes_come_and_go_in_any_order);
    tcase_add_test(tc, a_chain_has_few_nodes);
    tcase_add_test(tc, without_memory_chains_grow_longer_until_there_is_some);
    tcase_add_test(tc, an_allocation_that_fails_once_does_no_harm);
    srunner_run_all(sr, CK_ENV);
    n_failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return n_failed != 0;
}

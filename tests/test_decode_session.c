/* The table of sessions: what happens to a session in memory and on disk when a save, a close, a
 * delete or another session of its name comes in between. */
#include "decode/decode_session.h"
#include "transport/transport.h"

#include <check.h>
#include <stdlib.h>
#include <string.h>

static struct decode_sessions table;
static const struct kv_snapshot_id one = {{1}}, two = {{2}};

static void setup(void)
{
    ck_assert_int_eq(decode_sessions_init(&table, 2), 0);
}

static void teardown(void)
{
    decode_sessions_release(&table);
}

static struct decode_session *take(const char *name)
{
    struct decode_session *s;

    ck_assert_int_eq(decode_sessions_take(&table, name, DECODE_TAKE_OR_BEGIN, &s, NULL),
                     TRANSPORT_OK);
    return s;
}

static void end_turn(struct decode_session *s, uint32_t n_ids)
{
    struct token_list ids = {0};

    for (uint32_t i = 0; i < n_ids; i++)
        ck_assert_int_eq(token_list_add(&ids, i), 0);
    decode_sessions_give_back(&table, s, &ids, "ab", 2);
    ck_assert_ptr_null(ids.ids);
}

static struct decode_session_copy copy(const char *name)
{
    struct decode_session_copy c;

    ck_assert_int_eq(decode_sessions_copy(&table, name, &c, NULL), TRANSPORT_OK);
    return c;
}

static void expect_counts(uint32_t resident, uint32_t disk_only)
{
    uint32_t n, d;

    decode_sessions_count(&table, &n, &d);
    ck_assert_uint_eq(n, resident);
    ck_assert_uint_eq(d, disk_only);
}

START_TEST(a_session_without_a_turn_is_gone_when_it_is_given_back)
{
    struct decode_session *s = take("a");
    struct decode_session_copy c;

    ck_assert_int_eq(decode_sessions_copy(&table, "a", &c, NULL), TRANSPORT_FAILED_PRECONDITION);
    expect_counts(1, 0);
    decode_sessions_give_back(&table, s, NULL, NULL, 0);
    expect_counts(0, 0);
    ck_assert_int_eq(decode_sessions_copy(&table, "a", &c, NULL), TRANSPORT_NOT_FOUND);
}
END_TEST

START_TEST(what_is_saved_leaves_memory_unless_it_went_on_or_is_in_use)
{
    struct decode_session *s;
    struct decode_session_copy c;

    end_turn(take("a"), 5);
    c = copy("a");
    ck_assert_uint_eq(c.ids.n, 5);
    ck_assert_uint_eq(c.salt.len, 2);
    end_turn(take("a"), 6); /* it went on while that was written */
    ck_assert(decode_sessions_saved(&table, &c, &one, true));
    token_list_release(&c.ids);
    expect_counts(1, 0);
    c = copy("a");
    ck_assert(c.stored && !c.current);

    s = take("a");
    ck_assert(decode_sessions_saved(&table, &c, &two, true)); /* all of it, but in use */
    token_list_release(&c.ids);
    expect_counts(1, 0);
    decode_sessions_give_back(&table, s, NULL, NULL, 0);
    c = copy("a");
    ck_assert(c.current && memcmp(&c.snapshot, &two, sizeof(two)) == 0);
    ck_assert(decode_sessions_saved(&table, &c, &two, true));
    token_list_release(&c.ids);
    expect_counts(0, 1);

    s = take("a");
    ck_assert(!s->resident);
    expect_counts(1, 0);
    decode_sessions_give_back(&table, s, NULL, NULL, 0);
    expect_counts(0, 1);
}
END_TEST

START_TEST(a_snapshot_of_a_session_that_ended_is_not_the_next_ones)
{
    struct decode_session_copy c;
    struct decode_session *s;

    end_turn(take("a"), 5);
    c = copy("a");
    ck_assert_int_eq(decode_sessions_take(&table, "a", DECODE_TAKE_KNOWN, &s, NULL), TRANSPORT_OK);
    decode_sessions_drop(&table, s, false);
    ck_assert(!decode_sessions_saved(&table, &c, &one, true));
    end_turn(take("a"), 7);
    ck_assert(!decode_sessions_saved(&table, &c, &one, true));
    token_list_release(&c.ids);
    c = copy("a");
    ck_assert(!c.stored);
    token_list_release(&c.ids);
}
END_TEST

START_TEST(a_session_goes_with_its_snapshot_where_it_is_only_there)
{
    struct decode_session *s;

    ck_assert(decode_sessions_add(&table, "disk", &one, 9));
    ck_assert(!decode_sessions_add(&table, "disk", &two, 9));
    expect_counts(0, 1);
    s = take("disk"); /* its turn waits for it */
    decode_sessions_unsaved(&table, &one);
    ck_assert(!s->stored);
    expect_counts(1, 0);
    decode_sessions_give_back(&table, s, NULL, NULL, 0);
    expect_counts(0, 0);

    ck_assert(decode_sessions_add(&table, "disk", &one, 9));
    decode_sessions_unsaved(&table, &two);
    expect_counts(0, 1);
    decode_sessions_unsaved(&table, &one);
    expect_counts(0, 0);
}
END_TEST

START_TEST(a_restored_session_is_in_memory_and_current)
{
    const struct node_salt salt = {.bytes = {7}, .len = 1};
    struct token_list ids = {0};
    struct decode_session_copy c;
    struct decode_session *s;

    ck_assert(decode_sessions_add(&table, "disk", &one, 2));
    ck_assert_int_eq(decode_sessions_take(&table, "disk", DECODE_TAKE_ABSENT, &s, NULL),
                     TRANSPORT_OK);
    ck_assert_int_eq(decode_sessions_take(&table, "disk", DECODE_TAKE_OR_BEGIN, &s, NULL),
                     TRANSPORT_FAILED_PRECONDITION);
    ck_assert_int_eq(token_list_add(&ids, 3), 0);
    decode_sessions_fill(&table, s, &ids, &salt, &one);
    decode_sessions_give_back(&table, s, NULL, NULL, 0);
    expect_counts(1, 0);
    c = copy("disk");
    ck_assert(c.current);
    ck_assert_uint_eq(c.ids.n, 1);
    ck_assert_uint_eq(c.salt.len, 1);
    token_list_release(&c.ids);
    ck_assert_int_eq(decode_sessions_take(&table, "disk", DECODE_TAKE_ABSENT, &s, NULL),
                     TRANSPORT_ALREADY_EXISTS);

    ck_assert_int_eq(decode_sessions_take(&table, "disk", DECODE_TAKE_KNOWN, &s, NULL),
                     TRANSPORT_OK);
    decode_sessions_drop(&table, s, true);
    expect_counts(0, 1);
}
END_TEST

START_TEST(the_oldest_that_loses_nothing_makes_room)
{
    struct decode_session_copy c;
    struct decode_session *s;

    end_turn(take("a"), 5);
    end_turn(take("b"), 5);
    ck_assert_int_eq(decode_sessions_take(&table, "c", DECODE_TAKE_OR_BEGIN, &s, NULL),
                     TRANSPORT_RESOURCE_EXHAUSTED);
    c = copy("b");
    ck_assert(decode_sessions_saved(&table, &c, &two, false));
    token_list_release(&c.ids);
    c = copy("a");
    ck_assert(decode_sessions_saved(&table, &c, &one, false));
    token_list_release(&c.ids);
    end_turn(take("c"), 5);
    expect_counts(2, 1);
    c = copy("a"); /* the oldest */
    ck_assert_ptr_null(c.ids.ids);
    s = take("c");
    ck_assert(s->resident);
    decode_sessions_give_back(&table, s, NULL, NULL, 0);
}
END_TEST

START_TEST(an_idle_session_is_named_once_in_a_while_and_each_at_the_end)
{
    char name[NODE_SESSION_NAME + 1];
    struct decode_session_copy c;

    end_turn(take("a"), 5);
    ck_assert(!decode_sessions_idle(&table, node_now_ns() - 1000000000, name));
    ck_assert(decode_sessions_idle(&table, node_now_ns(), name));
    ck_assert_str_eq(name, "a");
    ck_assert(!decode_sessions_idle(&table, node_now_ns(), name)); /* it could not be saved */
    end_turn(take("a"), 6);
    ck_assert(decode_sessions_idle(&table, node_now_ns(), name));

    ck_assert_uint_eq(decode_sessions_count_unsaved(&table), 1);
    ck_assert(decode_sessions_idle(&table, INT64_MAX, name));
    ck_assert(!decode_sessions_idle(&table, INT64_MAX, name));
    c = copy("a");
    ck_assert(decode_sessions_saved(&table, &c, &one, false));
    token_list_release(&c.ids);
    ck_assert_uint_eq(decode_sessions_count_unsaved(&table), 0);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("decode session");
    TCase *c = tcase_create("table");
    SRunner *r;
    int failed;

    tcase_add_checked_fixture(c, setup, teardown);
    tcase_add_test(c, a_session_without_a_turn_is_gone_when_it_is_given_back);
    tcase_add_test(c, what_is_saved_leaves_memory_unless_it_went_on_or_is_in_use);
    tcase_add_test(c, a_snapshot_of_a_session_that_ended_is_not_the_next_ones);
    tcase_add_test(c, a_session_goes_with_its_snapshot_where_it_is_only_there);
    tcase_add_test(c, a_restored_session_is_in_memory_and_current);
    tcase_add_test(c, the_oldest_that_loses_nothing_makes_room);
    tcase_add_test(c, an_idle_session_is_named_once_in_a_while_and_each_at_the_end);
    suite_add_tcase(s, c);
    r = srunner_create(s);
    srunner_run_all(r, CK_NORMAL);
    failed = srunner_ntests_failed(r);
    srunner_free(r);
    return failed != 0;
}

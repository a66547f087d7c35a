/* baton.v1.Operator without a node: a cache, its operator, a server and a client in one process.
 * The linker puts an audit of the test's own in front of the cache's, which can find a fault, have
 * no memory, or take its time. */
#include "kv_help.h"
#include "node/node.h"
#include "proto/proto.h"
#include "transport/transport.h"

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

static struct kv_cache *cache;
static struct node_operator *op;
static struct transport_server *server;
static struct transport_channel *channel;

static int audit_rc;
static atomic_bool audit_waits;
static atomic_uint n_audits;

int __real_kv_cache_check(struct kv_cache *c, struct kv_why *why);
int __wrap_kv_cache_check(struct kv_cache *c, struct kv_why *why);

int __wrap_kv_cache_check(struct kv_cache *c, struct kv_why *why)
{
    atomic_fetch_add(&n_audits, 1);
    while (atomic_load(&audit_waits))
        usleep(1000);
    return audit_rc == 0 ? __real_kv_cache_check(c, why) : kv_fail(why, audit_rc, "page 7 is odd");
}

static void set_up(void)
{
    const struct kv_cache_config config = {.geometry = {1, 1, 2, KV_F16}, .n_pages = 32};
    static const char *const services[] = {"baton.v1.Operator", NULL};
    struct transport_method methods[NODE_OPERATOR_METHODS];
    const struct transport_server_config server_config = {.listen = "127.0.0.1:0",
                                                          .methods = methods,
                                                          .n_methods = NODE_OPERATOR_METHODS,
                                                          .services = services};
    struct transport_channel_config channel_config = {.target = NULL};
    char target[32];

    transport_start();
    ck_assert_int_eq(kv_cache_open(&config, &cache, NULL), 0);
    ck_assert_int_eq(node_operator_open(cache, &op), 0);
    node_operator_methods(op, methods);
    ck_assert_int_eq(transport_server_open(&server_config, &server, NULL), 0);
    transport_server_set_serving(server, true);
    snprintf(target, sizeof(target), "127.0.0.1:%d", transport_server_port(server));
    channel_config.target = target;
    ck_assert_int_eq(transport_channel_open(&channel_config, &channel, NULL), 0);
}

static void tear_down(void)
{
    transport_channel_close(channel);
    transport_server_close(server, 0);
    node_operator_close(op);
    kv_cache_close(cache);
    transport_stop();
}

struct reply {
    int status;
    char details[TRANSPORT_DETAIL_BYTES];
    struct node_message message;
    const Baton__V1__AuditReply *audit;
};

static void ask(struct reply *r)
{
    Baton__V1__AuditRequest q = BATON__V1__AUDIT_REQUEST__INIT;
    struct transport_message *m = NULL;
    struct kv_why why;

    memset(r, 0, sizeof(*r));
    r->status = transport_unary(channel, "/baton.v1.Operator/Audit", node_message_pack(&q.base),
                                30000, true, &m, r->details);
    if (r->status == TRANSPORT_OK &&
        node_message_unpack(&baton__v1__audit_reply__descriptor, m, &r->message, &why) == 0)
        r->audit = (const Baton__V1__AuditReply *)r->message.message;
    transport_message_unref(m);
}

START_TEST(an_audit_of_what_holds_answers_the_counts)
{
    const struct kv_namespace ns = {.group = 0};
    const struct kv_geometry g = kv_cache_layout(cache)->geometry;
    uint32_t ids[100] = {5};
    struct kv_context *kept, *open;
    struct reply r;

    ck_assert_int_eq(kv_context_open(cache, &ns, &kept), 0);
    ck_assert_int_eq(append_to(kept, &g, &ns, ids, 100), 0);
    ck_assert_int_eq(kv_context_give_up(kept, NULL, 0), 0);
    ck_assert_int_eq(kv_context_open(cache, &ns, &open), 0);
    ck_assert_int_eq(kv_context_reserve(open, 300), 0);
    ck_assert_int_eq(kv_context_begin(open, ids, 70), 0);
    ask(&r);
    ck_assert_msg(r.status == TRANSPORT_OK, "%s", r.details);
    ck_assert_ptr_nonnull(r.audit);
    ck_assert_str_eq(r.audit->fault, "");
    ck_assert_uint_eq(r.audit->pages->total, 32);
    ck_assert_uint_eq(r.audit->pages->live, 4);
    ck_assert_uint_eq(r.audit->pages->free, 28);
    ck_assert_uint_eq(r.audit->pages->evictable, 2);
    ck_assert_uint_eq(r.audit->pages->reserved, 3);
    ck_assert_uint_eq(r.audit->contexts, 1);
    ck_assert_uint_eq(r.audit->entries, 1);
    ck_assert_uint_eq(r.audit->nodes, 1);
    ck_assert_uint_gt(r.audit->bookkeeping_bytes, 0);
    ck_assert_uint_gt(r.audit->took_ns, 0);
    node_message_free(&r.message);
    kv_context_close(open);
}
END_TEST

START_TEST(what_does_not_hold_is_in_the_answer)
{
    struct reply r;

    audit_rc = KV_ERR_CHECK;
    ask(&r);
    ck_assert_int_eq(r.status, TRANSPORT_OK);
    ck_assert_str_eq(r.audit->fault, "page 7 is odd");
    ck_assert_uint_eq(r.audit->pages->total, 32);
    node_message_free(&r.message);
}
END_TEST

START_TEST(an_audit_without_memory_is_refused)
{
    struct reply r;

    audit_rc = KV_ERR_NOMEM;
    ask(&r);
    ck_assert_int_eq(r.status, TRANSPORT_RESOURCE_EXHAUSTED);
    ck_assert_str_eq(r.details, "page 7 is odd");
}
END_TEST

static void *ask_on(void *arg)
{
    ask(arg);
    return NULL;
}

/* One runs, as many wait as may, and the rest are told at once. */
START_TEST(audits_run_one_at_a_time_and_too_many_are_refused)
{
    enum { N = 1 + NODE_OPERATOR_WAITING + 3 };
    static struct reply r[N];
    pthread_t threads[N];
    uint32_t n_ok = 0, n_full = 0;

    atomic_store(&audit_waits, true);
    for (uint32_t i = 0; i < N; i++) {
        ck_assert_int_eq(pthread_create(&threads[i], NULL, ask_on, &r[i]), 0);
        while (i == 0 && atomic_load(&n_audits) == 0)
            usleep(1000);
    }
    usleep(200000);
    ck_assert_uint_eq(atomic_load(&n_audits), 1);
    atomic_store(&audit_waits, false);
    for (uint32_t i = 0; i < N; i++) {
        pthread_join(threads[i], NULL);
        n_ok += r[i].status == TRANSPORT_OK;
        if (r[i].status == TRANSPORT_RESOURCE_EXHAUSTED) {
            n_full++;
            ck_assert_str_eq(r[i].details, "too many audits wait");
        }
        node_message_free(&r[i].message);
    }
    ck_assert_uint_eq(n_ok, 1 + NODE_OPERATOR_WAITING);
    ck_assert_uint_eq(n_full, N - n_ok);
    ck_assert_uint_eq(atomic_load(&n_audits), n_ok);
}
END_TEST

static void on_end(void *user, struct transport_request *r, int code, const char *details)
{
    (void)r;
    (void)details;
    atomic_store((atomic_int *)user, code);
}

START_TEST(a_call_that_is_cancelled_while_it_waits_is_not_audited)
{
    static const struct transport_request_events events = {.on_end = on_end};
    Baton__V1__AuditRequest q = BATON__V1__AUDIT_REQUEST__INIT;
    struct transport_request *waiting;
    static struct reply first;
    atomic_int code = -1;
    pthread_t thread;
    struct reply r;

    atomic_store(&audit_waits, true);
    ck_assert_int_eq(pthread_create(&thread, NULL, ask_on, &first), 0);
    while (atomic_load(&n_audits) == 0)
        usleep(1000);
    ck_assert_int_eq(transport_request_start(channel, "/baton.v1.Operator/Audit",
                                             node_message_pack(&q.base), 30000, true, &events,
                                             &code, &waiting),
                     0);
    for (int i = 0; i < 5000 && transport_server_n_calls(server) < 2; i++)
        usleep(1000);
    transport_request_cancel(waiting);
    for (int i = 0; i < 5000 && atomic_load(&code) < 0; i++)
        usleep(1000);
    ck_assert_int_eq(atomic_load(&code), TRANSPORT_CANCELLED);
    usleep(50000); /* until the server has heard of it */
    atomic_store(&audit_waits, false);
    pthread_join(thread, NULL);
    ask(&r);
    ck_assert_int_eq(first.status, TRANSPORT_OK);
    ck_assert_int_eq(r.status, TRANSPORT_OK);
    ck_assert_uint_eq(atomic_load(&n_audits), 2);
    node_message_free(&first.message);
    node_message_free(&r.message);
    transport_request_unref(waiting);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("operator");
    TCase *tc = tcase_create("operator");
    SRunner *sr = srunner_create(s);
    int n_failed;

    suite_add_tcase(s, tc);
    tcase_set_timeout(tc, 60);
    tcase_add_checked_fixture(tc, set_up, tear_down);
    tcase_add_test(tc, an_audit_of_what_holds_answers_the_counts);
    tcase_add_test(tc, what_does_not_hold_is_in_the_answer);
    tcase_add_test(tc, an_audit_without_memory_is_refused);
    tcase_add_test(tc, audits_run_one_at_a_time_and_too_many_are_refused);
    tcase_add_test(tc, a_call_that_is_cancelled_while_it_waits_is_not_audited);
    srunner_run_all(sr, CK_ENV);
    n_failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return n_failed != 0;
}

/* The races that a cache of shared pages must win, each staged: sixteen forks of one parent,
 * eviction against reservation, match against insert, split and eviction, close against fork,
 * publish against decode, overwrite against the last other reader of a page; and the audit against
 * the first of these, in one shard and over several.
 *
 * Method: threads with fixed parts run a fixed number of rounds on a cache that is too small for
 * them.  Rows depend on ids, so whoever reads a page that is not his any more sees it; a granted
 * reservation must be kept; when all is closed the audit holds and every page is back.  Under the
 * tsan preset this is also the check that there is no data race. */
#include "kv_help.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <unistd.h>

enum { P = 16, MAX = 128, MAX_THREADS = 16, TIMES = 8 };

static struct kv_geometry geometry = {
    .n_layers = 1, .n_kv_heads = 2, .head_dim = 2, .precision = KV_F16};
static const struct kv_namespace namespaces[2] = {{{{1}}, 0}, {{{2}}, 1}};
static struct kv_cache *cache;

/* With one shard all meet in its lock; with several, threads are in different ones, and meet where
 * a call needs all. */
static const uint32_t shards[] = {1, 4};
enum { N_SHARDS = sizeof(shards) / sizeof(shards[0]) };

static void open_shards(uint32_t n_pages, uint32_t n_shards)
{
    const struct kv_cache_config config = {.geometry = geometry,
                                           .page_tokens = P,
                                           .n_pages = n_pages,
                                           .arena = true,
                                           .bookkeeping_bytes = 64 * 1024,
                                           .n_shards = n_shards};

    ck_assert_int_eq(kv_cache_open(&config, &cache, NULL), 0);
}

static void open_cache(uint32_t n_pages)
{
    open_shards(n_pages, 1);
}

static struct kv_stats stats(void)
{
    struct kv_stats s;

    kv_cache_stats(cache, &s);
    return s;
}

static void close_cache(void)
{
    struct kv_stats s;
    struct kv_why why;

    ck_assert_msg(kv_cache_check(cache, &why) == 0, "%s", why.text);
    kv_cache_trim(cache, UINT32_MAX);
    s = stats();
    ck_assert_uint_eq(s.n_free, s.n_pages);
    ck_assert_uint_eq(s.n_reserved + s.n_contexts + s.n_entries + s.n_nodes, 0);
    kv_cache_close(cache);
}

/* ---- Threads with parts; Check's assertions are for the main thread ---- */

typedef const char *(*part)(uint32_t me); /* NULL, or what went wrong */

struct role {
    part play;
    uint32_t me;
    const char *failure;
    pthread_t thread;
};

static pthread_barrier_t start;

static void *play(void *arg)
{
    struct role *role = arg;

    pthread_barrier_wait(&start);
    role->failure = role->play(role->me);
    return NULL;
}

static void stage(const part *parts, uint32_t n)
{
    struct role roles[MAX_THREADS];

    ck_assert_uint_le(n, MAX_THREADS);
    ck_assert_int_eq(pthread_barrier_init(&start, NULL, n), 0);
    for (uint32_t i = 0; i < n; i++) {
        roles[i] = (struct role){.play = parts[i], .me = i};
        ck_assert_int_eq(pthread_create(&roles[i].thread, NULL, play, &roles[i]), 0);
    }
    for (uint32_t i = 0; i < n; i++)
        pthread_join(roles[i].thread, NULL);
    for (uint32_t i = 0; i < n; i++)
        ck_assert_msg(roles[i].failure == NULL, "thread %u: %s", i, roles[i].failure);
    pthread_barrier_destroy(&start);
}

static uint64_t draw(uint32_t me, uint32_t round)
{
    return mix(mix(me + 1) ^ round);
}

/* One of few keys, which have their beginnings in common up to every offset, in several shards. */
static void key_of(uint64_t h, uint32_t *ids)
{
    const uint32_t at = (uint32_t)(h >> 10) % 48, family = (uint32_t)(h >> 36) % 3 * 100;

    for (uint32_t i = 0; i < MAX; i++)
        ids[i] = family + (i < at ? 1 + i / 20 : 2 + (uint32_t)(h >> 20) % 3 + i / 30);
}

/* Audits beside what the others do. */
static const char *audit(uint32_t me)
{
    static struct kv_why why;

    (void)me;
    for (uint32_t round = 0; round < 20 * TIMES; round++) {
        if (kv_cache_check(cache, &why) != 0)
            return why.text;
        usleep(100);
    }
    return NULL;
}

static int append(struct kv_context *ctx, const struct kv_namespace *ns, const uint32_t *ids,
                  uint32_t n)
{
    return append_to(ctx, &geometry, ns, ids, n);
}

static bool reads(struct kv_context *ctx, const struct kv_namespace *ns, const uint32_t *ids,
                  uint32_t n)
{
    return holds(ctx, &geometry, ns, ids, n);
}

/* ---- Sixteen forks of one parent ---- */

static struct kv_context *parent;
static uint32_t parent_ids[MAX];

static void make_parent(uint32_t n)
{
    for (uint32_t i = 0; i < MAX; i++)
        parent_ids[i] = 100 + i;
    ck_assert_int_eq(kv_context_open(cache, &namespaces[0], &parent), 0);
    ck_assert_int_eq(append(parent, &namespaces[0], parent_ids, n), 0);
    ck_assert_int_eq(kv_context_freeze(parent), 0);
}

static const char *fork_and_write(uint32_t me)
{
    uint32_t ids[MAX];

    memcpy(ids, parent_ids, sizeof(ids));
    for (uint32_t round = 0; round < 150 * TIMES; round++) {
        const uint32_t n = (uint32_t)(draw(me, round) % 41);
        struct kv_context *child;

        if (kv_context_fork(parent, n, &child) != 0)
            return "fork";
        ids[n] = me * 1000 + round;
        if (append(child, &namespaces[0], ids, n + 1) != 0)
            return "append";
        if (!reads(child, &namespaces[0], ids, n + 1))
            return "a child does not read what it wrote";
        ids[n] = parent_ids[n];
        kv_context_close(child);
    }
    return NULL;
}

START_TEST(sixteen_threads_fork_one_frozen_parent)
{
    part parts[16] = {NULL};

    open_cache(3 + 16);
    make_parent(40);
    for (int i = 0; i < 16; i++)
        parts[i] = fork_and_write;
    stage(parts, 16);
    ck_assert(reads(parent, &namespaces[0], parent_ids, 40));
    kv_context_close(parent);
    close_cache();
}
END_TEST

/* ---- Eviction against reservation ---- */

static atomic_uint n_granted, n_refused;

/* What is granted is kept, whoever asks in between. */
static const char *reserve_and_use(uint32_t me)
{
    const struct kv_namespace *ns = &namespaces[me % 2];
    uint32_t ids[MAX];

    for (uint32_t round = 0; round < 200 * TIMES; round++) {
        const uint64_t h = draw(me, round);
        const uint32_t n = P + (uint32_t)h % (MAX - P);
        struct kv_context *ctx;
        int rc;

        key_of(h, ids);
        if (kv_context_open(cache, ns, &ctx) != 0)
            return "open";
        rc = kv_context_reserve(ctx, n);
        if (rc == 0) {
            atomic_fetch_add(&n_granted, 1);
            for (uint32_t at = 7; rc == 0 && at <= n; at += 7)
                rc = append(ctx, ns, ids, at);
            if (rc != 0 || !reads(ctx, ns, ids, n / 7 * 7))
                return "a granted reservation was not kept";
        } else if (rc == KV_ERR_FULL) {
            atomic_fetch_add(&n_refused, 1);
        } else {
            return "reserve";
        }
        if (h >> 60 > 4)
            rc = kv_context_give_up(ctx, NULL, 0);
        else
            kv_context_close(ctx);
        if (rc != 0 && rc != KV_ERR_FULL)
            return "give up";
    }
    return NULL;
}

static const char *trim(uint32_t me)
{
    for (uint32_t round = 0; round < 600 * TIMES; round++) {
        const struct kv_stats s = stats();

        if (s.n_free + s.n_live != s.n_pages || s.n_reserved > s.n_free || s.n_evictable > s.n_live)
            return "counters that cannot be";
        kv_cache_trim(cache, (uint32_t)draw(me, round) % 4);
    }
    return NULL;
}

START_TEST(an_eviction_against_a_reservation_breaks_no_promise)
{
    static const part parts[] = {reserve_and_use,
                                 reserve_and_use,
                                 reserve_and_use,
                                 reserve_and_use,
                                 reserve_and_use,
                                 trim,
                                 audit};

    open_shards(16, shards[_i]);
    ck_assert_int_eq(kv_cache_set_quota(cache, 1, 9), 0);
    stage(parts, 7);
    ck_assert_uint_gt(atomic_load(&n_granted), 100);
    ck_assert_uint_gt(stats().n_evicted, 100);
    close_cache();
}
END_TEST

/* ---- Match against insert, split and eviction ---- */

static const char *match_keys(uint32_t me)
{
    uint32_t ids[MAX];

    for (uint32_t round = 0; round < 400 * TIMES; round++) {
        const uint64_t h = draw(me, round);
        const struct kv_namespace *ns = &namespaces[h & 1];
        struct kv_context *ctx;
        struct kv_match m;
        int rc;

        key_of(h, ids);
        rc = kv_cache_match(cache, ns, ids, MAX / 2, MAX / 2, NULL, 0, &ctx, &m);
        if (rc == KV_ERR_FULL)
            continue;
        if (rc != 0)
            return "match";
        if (!reads(ctx, ns, ids, m.n_matched))
            return "a match reads other rows";
        if (h >> 40 & 1 && append(ctx, ns, ids, MAX / 2) != 0)
            return "a match's reservation was not kept";
        if (!reads(ctx, ns, ids, kv_context_length(ctx)))
            return "a matched context changed under its owner";
        kv_context_close(ctx);
        (void)kv_cache_peek(cache, ns, ids, MAX);
    }
    return NULL;
}

static const char *insert_keys(uint32_t me)
{
    uint32_t ids[MAX];
    float logits[2] = {1, 2};

    for (uint32_t round = 0; round < 300 * TIMES; round++) {
        const uint64_t h = draw(me, round);
        const struct kv_namespace *ns = &namespaces[h & 1];
        const uint32_t n = 1 + (uint32_t)(h >> 30) % (MAX / 2);
        struct kv_context *ctx;
        int rc;

        key_of(h, ids);
        rc = kv_cache_match(cache, ns, ids, n, n, NULL, 0, &ctx, NULL);
        if (rc == KV_ERR_FULL)
            continue;
        if (rc != 0)
            return "match";
        if (append(ctx, ns, ids, n) != 0)
            return "append";
        rc = h >> 50 & 1 ? kv_context_give_up(ctx, logits, 2) : kv_context_give_up(ctx, NULL, 0);
        if (rc != 0)
            return "give up";
    }
    return NULL;
}

START_TEST(a_match_against_insert_split_and_eviction_reads_its_own_rows)
{
    static const part parts[] = {match_keys,  match_keys,  match_keys, match_keys,
                                 insert_keys, insert_keys, trim,       audit};

    open_shards(40, shards[_i]);
    stage(parts, 8);
    ck_assert_uint_gt(stats().n_hits, 100);
    ck_assert_uint_gt(stats().n_evicted, 20);
    close_cache();
}
END_TEST

/* ---- Close against fork ---- */

enum { N_CLOSERS = 4, N_LIVES = 150 * TIMES };

static struct kv_context *lives[N_LIVES][N_CLOSERS]; /* one reference for each thread */

/* The last of four threads that lets go frees it; the others may be forking just then. */
static const char *fork_then_close(uint32_t me)
{
    for (uint32_t i = 0; i < N_LIVES; i++) {
        struct kv_context *ctx = lives[i][me], *child = NULL;
        const uint32_t n = (uint32_t)(draw(me, i) % 31);

        if (draw(me, i) >> 50 & 1 && kv_context_fork(ctx, n, &child) != 0)
            return "fork";
        if (draw(me, i) >> 51 & 1)
            kv_context_close(kv_context_ref(ctx));
        if (draw(me, i) >> 52 & 1)
            kv_context_close(ctx);
        else if (kv_context_give_up(ctx, NULL, 0) != 0)
            return "give up";
        if (child != NULL && !reads(child, &namespaces[0], parent_ids, n))
            return "a fork lost its rows when others closed the parent";
        kv_context_close(child);
    }
    return NULL;
}

START_TEST(a_close_against_a_fork_keeps_what_was_forked)
{
    static const part parts[N_CLOSERS + 1] = {fork_then_close, fork_then_close, fork_then_close,
                                              fork_then_close, trim};

    open_cache(2 * N_LIVES);
    for (int i = 0; i < N_LIVES; i++) {
        make_parent(30);
        lives[i][0] = parent;
        for (int j = 1; j < N_CLOSERS; j++)
            lives[i][j] = kv_context_ref(parent);
    }
    stage(parts, N_CLOSERS + 1);
    close_cache();
}
END_TEST

/* ---- Publish against decode ---- */

static struct kv_context *published; /* frozen, and entered again and again */

/* Token by token, entering what is complete, as a node does that answers. */
static const char *decode(uint32_t me)
{
    for (uint32_t round = 0; round < 25 * TIMES; round++) {
        const struct kv_namespace *ns = &namespaces[me % 2];
        const uint64_t h = draw(me % 4, round); /* two threads at a time have the same keys */
        struct kv_context *ctx, *side = NULL;
        uint32_t ids[MAX], n;
        int rc;

        key_of(h, ids);
        rc = kv_cache_match(cache, ns, ids, P + 1, MAX, NULL, 0, &ctx, NULL);
        if (rc == KV_ERR_FULL)
            continue;
        if (rc != 0)
            return "match";
        for (n = kv_context_length(ctx) + 1; n <= MAX / 2; n++) {
            if (append(ctx, ns, ids, n) != 0)
                return "append";
            if (n % 5 == 0 && kv_context_publish(ctx, NULL, 0) != 0)
                return "publish";
            if (n % 23 == 0) {
                kv_context_close(side);
                side = NULL;
                rc = kv_context_fork(ctx, n, &side); /* FULL: the parent's promise goes first */
                if (rc != 0 && rc != KV_ERR_FULL)
                    return "fork";
            }
        }
        if (!reads(ctx, ns, ids, MAX / 2))
            return "an answer is not what was written";
        kv_context_close(side);
        if (kv_context_give_up(ctx, NULL, 0) != 0)
            return "give up";
    }
    return NULL;
}

static const char *publish_again(uint32_t me)
{
    for (uint32_t round = 0; round < 200 * TIMES; round++) {
        if (kv_context_publish(published, NULL, 0) != 0)
            return "publish of a frozen context";
        if (round % 8 == me % 8 && !reads(published, &namespaces[0], parent_ids, 40))
            return "a published context changed";
    }
    return NULL;
}

START_TEST(a_publish_against_decoding_changes_no_row)
{
    static const part parts[] = {decode,        decode,        decode, decode,
                                 publish_again, publish_again, trim};

    open_cache(48);
    make_parent(40);
    published = parent;
    stage(parts, 7);
    kv_context_close(published);
    close_cache();
}
END_TEST

/* ---- Overwrite against the last other reader ---- */

enum { N_HANDED = 200 * TIMES };

static struct kv_context *_Atomic handed[N_HANDED];
static struct kv_context *owner;
static atomic_uint n_read; /* relaxed: it must not order what the page's count has to */

static void fill(unsigned char *rows, uint32_t round)
{
    memset(rows, (int)(round % 251), kv_position_bytes(&geometry));
}

/* Overwrites in place where the reader has let go by then, else into a clone. */
static const char *overwrite(uint32_t me)
{
    unsigned char rows[256];

    (void)me;
    for (uint32_t round = 0; round < N_HANDED; round++) {
        struct kv_context *child;
        int rc;

        if (kv_context_fork(owner, 20, &child) != 0)
            return "fork";
        atomic_store_explicit(&handed[round], child, memory_order_release);
        for (uint32_t i = 0; i < round % 64; i++)
            if (atomic_load_explicit(&n_read, memory_order_relaxed) <= round)
                sched_yield();
        fill(rows, round + 1);
        do
            rc = kv_context_overwrite(owner, 3, rows);
        while (rc == KV_ERR_FULL);
        if (rc != 0)
            return "overwrite";
    }
    return NULL;
}

static const char *read_handed(uint32_t me)
{
    unsigned char rows[256], got[256];

    (void)me;
    for (uint32_t round = 0; round < N_HANDED; round++) {
        struct kv_context *child;

        while ((child = atomic_load_explicit(&handed[round], memory_order_acquire)) == NULL)
            sched_yield();
        fill(rows, round);
        if (kv_context_gather(child, 3, 1, got) != 0 ||
            memcmp(rows, got, kv_position_bytes(&geometry)) != 0)
            return "a fork sees what was overwritten after it";
        kv_context_close(child);
        atomic_fetch_add_explicit(&n_read, 1, memory_order_relaxed);
    }
    return NULL;
}

START_TEST(an_overwrite_in_place_comes_after_the_last_other_reader)
{
    static const part parts[] = {overwrite, read_handed};
    unsigned char rows[256];

    ck_assert_uint_le(kv_position_bytes(&geometry), sizeof(rows));
    open_cache(12);
    make_parent(20);
    ck_assert_int_eq(kv_context_fork(parent, 20, &owner), 0);
    kv_context_close(parent);
    fill(rows, 0);
    ck_assert_int_eq(kv_context_overwrite(owner, 3, rows), 0);
    stage(parts, 2);
    ck_assert_uint_gt(stats().n_clones, 0);
    ck_assert_uint_lt(stats().n_clones, N_HANDED);
    kv_context_close(owner);
    close_cache();
}
END_TEST

int main(int argc, char **argv)
{
    Suite *s = suite_create("kv_races");
    TCase *tc = tcase_create("races");
    SRunner *sr = srunner_create(s);
    int n_failed;

    if (!take_precision(&geometry, argc, argv))
        return 2;
    suite_add_tcase(s, tc);
    tcase_set_timeout(tc, 240);
    tcase_add_test(tc, sixteen_threads_fork_one_frozen_parent);
    tcase_add_loop_test(tc, an_eviction_against_a_reservation_breaks_no_promise, 0, N_SHARDS);
    tcase_add_loop_test(tc, a_match_against_insert_split_and_eviction_reads_its_own_rows, 0,
                        N_SHARDS);
    tcase_add_test(tc, a_close_against_a_fork_keeps_what_was_forked);
    tcase_add_test(tc, a_publish_against_decoding_changes_no_row);
    tcase_add_test(tc, an_overwrite_in_place_comes_after_the_last_other_reader);
    srunner_run_all(sr, CK_ENV);
    n_failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return n_failed != 0;
}

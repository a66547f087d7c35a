/* The n-th allocation of a public call fails, for every n until none does.
 *
 * After each: the call says KV_ERR_NOMEM and wrote no out-parameter, the audit holds, everything is
 * as it was, the same call now succeeds, and when all is closed nothing is left allocated.  What a
 * call can do without (an edge that is not shortened, a node that is not merged) may fail unseen.
 * Calls that must work when there is no memory at all are run without any.
 *
 * The linker puts the functions below between kvcore and the allocator; Check's own allocations
 * come by them too, so they fail only where a call of kvcore is armed. */
#include "kv_rig.h"

#include <malloc.h>
#include <search.h>
#include <sys/mman.h>

static uint64_t n_allocs, fail_at; /* the fail_at-th that is armed fails; 0: none */
static bool fail_all, armed, fired;
static int armed_rc;

/* Run a call of kvcore whose allocations may fail. */
#define ARMED(call) (armed = true, armed_rc = (call), armed = false, armed_rc)
#define ARMED_VOID(call) \
    do {                 \
        armed = true;    \
        (call);          \
        armed = false;   \
    } while (0)

static bool fails(void)
{
    const bool now = armed && (fail_all || (fail_at > 0 && ++n_allocs == fail_at));

    fired = fired || now;
    return now;
}

/* What is allocated and not freed yet.  A set, because some of what is freed here was allocated
 * inside a library. */
static void *held_set;
static long n_held;

static int compare_held(const void *a, const void *b)
{
    return (a > b) - (a < b);
}

static void *held(void *p)
{
    if (p != NULL && tsearch(p, &held_set, compare_held) != NULL)
        n_held++;
    return p;
}

static void not_held(void *p)
{
    if (p != NULL && tdelete(p, &held_set, compare_held) != NULL)
        n_held--;
}

void *__real_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__real_calloc(size_t n, size_t bytes);
void *__wrap_calloc(size_t n, size_t bytes);
void *__real_realloc(void *p, size_t bytes);
void *__wrap_realloc(void *p, size_t bytes);
void *__real_aligned_alloc(size_t align, size_t bytes);
void *__wrap_aligned_alloc(size_t align, size_t bytes);
void __real_free(void *p);
void __wrap_free(void *p);
void *__real_mmap(void *at, size_t bytes, int prot, int flags, int fd, off_t offset);
void *__wrap_mmap(void *at, size_t bytes, int prot, int flags, int fd, off_t offset);
int __real_munmap(void *at, size_t bytes);
int __wrap_munmap(void *at, size_t bytes);

void *__wrap_malloc(size_t bytes)
{
    return fails() ? NULL : held(__real_malloc(bytes));
}

void *__wrap_calloc(size_t n, size_t bytes)
{
    return fails() ? NULL : held(__real_calloc(n, bytes));
}

void *__wrap_realloc(void *p, size_t bytes)
{
    void *moved = fails() ? NULL : __real_realloc(p, bytes);

    if (moved != NULL) {
        not_held(p);
        held(moved);
    }
    return moved;
}

void *__wrap_aligned_alloc(size_t align, size_t bytes)
{
    return fails() ? NULL : held(__real_aligned_alloc(align, bytes));
}

void __wrap_free(void *p)
{
    not_held(p);
    __real_free(p);
}

void *__wrap_mmap(void *at, size_t bytes, int prot, int flags, int fd, off_t offset)
{
    return fails() ? MAP_FAILED : held(__real_mmap(at, bytes, prot, flags, fd, offset));
}

int __wrap_munmap(void *at, size_t bytes)
{
    not_held(at);
    return __real_munmap(at, bytes);
}

/* ---- What a call is tried on ---- */

enum { MAX_OUT = 64 * 1024, BOOKKEEPING = 1 << 20 };

/* The contexts of a scene, all with something in common with the entries "a20b20" and "c40". */
struct scene {
    struct kv_context *ctx; /* "a20", live */
    struct kv_context *out; /* what the call makes */
    struct kv_context *other;
    struct kv_encoder *encoder;
    struct kv_decoder *decoder;
    struct kv_prefix prefix;
    unsigned char record[MAX_OUT];
    size_t n_record;
};

static struct kv_snapshot_header header_of(uint32_t base, const uint32_t *base_ids)
{
    return (struct kv_snapshot_header){.geometry = geometry,
                                       .ns = tenant_a.digest,
                                       .frame_positions = kv_frame_positions(&geometry),
                                       .base = base,
                                       .base_ids = base_ids,
                                       .n_bound = 64};
}

/* Everything that a failed call must leave as it is; `entries_only` after a give-up, which closes
 * its context in any case. */
static uint32_t state(const struct scene *s, bool entries_only)
{
    const struct kv_entry *e;
    struct kv_stats st = stats();
    uint32_t crc = 0;

    TAILQ_FOREACH(e, &cache->shards[0].tree.by_use, by_use)
    {
        crc = kv_crc32c(crc, &e->serial, sizeof(e->serial));
        crc = kv_crc32c(crc, &e->n_logits, sizeof(e->n_logits));
        crc = kv_crc32c(crc, e->pages, e->n_pages * sizeof(struct kv_page *));
        for (uint32_t i = 0; i < e->n_pages; i++)
            crc = kv_crc32c(crc, e->pages[i]->bytes, cache->layout.page_bytes);
    }
    crc = kv_crc32c(crc, entries(), strlen(entries()));
    if (entries_only)
        return kv_crc32c(crc, &st.bookkeeping_bytes, sizeof(st.bookkeeping_bytes));
    crc = kv_crc32c(crc, &st, sizeof(st));
    if (s->ctx == NULL)
        return crc;
    crc = kv_crc32c(crc, s->ctx->pages, s->ctx->n_pages * sizeof(struct kv_page *));
    crc = kv_crc32c(crc, &s->ctx->n, sizeof(s->ctx->n));
    crc = kv_crc32c(crc, &s->ctx->held, sizeof(s->ctx->held));
    crc = kv_crc32c(crc, &s->ctx->bound, sizeof(s->ctx->bound));
    for (uint32_t i = 0; i < s->ctx->n_pages; i++)
        crc = kv_crc32c(crc, s->ctx->pages[i]->bytes, cache->layout.page_bytes);
    return crc;
}

struct trial {
    const char *name;
    int (*call)(struct scene *s);
    void (*prepare)(struct scene *s); /* or NULL */
    uint32_t n_pages;                 /* of the cache; 0: plenty */
    uint32_t at_least; /* allocations that the call cannot do without, with an arena */
    bool closes;       /* s->ctx, also when it fails */
    bool evicts;       /* what it evicted for is gone when it fails */
};

static void open_scene(struct scene *s, const struct trial *t, bool arena)
{
    memset(s, 0, sizeof(*s));
    open_with(t->n_pages > 0 ? t->n_pages : 64, BOOKKEEPING, arena);
    put("a20b20");
    put("c40");
    s->ctx = context("a20");
    if (t->prepare != NULL)
        t->prepare(s);
    check();
}

static void close_scene(struct scene *s)
{
    kv_context_close(s->ctx);
    kv_context_close(s->out);
    kv_context_close(s->other);
    kv_encoder_close(s->encoder);
    kv_decoder_close(s->decoder);
    kv_prefix_release(&s->prefix);
    close_cache();
}

/* Fail the n-th; false where the call makes fewer. */
static bool try_nth(const struct trial *t, bool arena, uint64_t n)
{
    static struct scene s;
    const long before = n_held;
    uint32_t was;
    int rc;

    open_scene(&s, t, arena);
    was = state(&s, t->closes);
    fired = false;
    n_allocs = 0;
    fail_at = n;
    rc = t->call(&s);
    fail_at = 0;
    if (t->closes)
        s.ctx = NULL;
    check();
    ck_assert_msg(rc == 0 ? !fired || n > t->at_least : fired && rc == KV_ERR_NOMEM,
                  "%s: %d at allocation %d", t->name, rc, (int)n);
    if (rc < 0) {
        ck_assert_msg(s.out == NULL && s.encoder == NULL, "%s wrote its out-parameter", t->name);
        ck_assert_msg(t->evicts || was == state(&s, t->closes), "%s left a trace at %d", t->name,
                      (int)n);
        if (t->closes)
            s.ctx = context("a20");
        ck_assert_msg(t->call(&s) == 0, "%s fails again after allocation %d", t->name, (int)n);
        if (t->closes)
            s.ctx = NULL;
        check();
    }
    close_scene(&s);
    ck_assert_msg(n_held == before, "%s leaks at allocation %d", t->name, (int)n);
    return fired;
}

/* ---- The calls ---- */

static int do_open(struct scene *s)
{
    return ARMED(kv_context_open(cache, &ns, &s->out));
}

static int match_key(struct scene *s, const char *text, uint32_t to)
{
    uint32_t ids[MAX];
    const uint32_t n = key(text, ids);

    return ARMED(kv_cache_match(cache, &ns, ids, n, to, NULL, 0, &s->out, NULL));
}

static int do_match_miss(struct scene *s)
{
    return match_key(s, "z20", 40);
}

static int do_match_hit(struct scene *s)
{
    return match_key(s, "a20b10x5", 60);
}

static void freeze(struct scene *s)
{
    ck_assert_int_eq(kv_context_freeze(s->ctx), 0);
}

static int do_fork(struct scene *s)
{
    return ARMED(kv_context_fork(s->ctx, 17, &s->out));
}

static int begin_ids(struct scene *s, uint32_t n)
{
    uint32_t ids[MAX];
    int rc;

    key("x200", ids);
    rc = ARMED(kv_context_begin(s->ctx, ids, n));
    return rc == 0 ? kv_context_abort(s->ctx) : rc;
}

static int do_begin(struct scene *s)
{
    return begin_ids(s, 100);
}

static void share(struct scene *s)
{
    s->other = fork_at(s->ctx, 20);
}

static int do_overwrite(struct scene *s)
{
    static const unsigned char rows[256];

    return ARMED(kv_context_overwrite(s->ctx, 18, rows));
}

static int do_publish(struct scene *s)
{
    return ARMED(kv_context_publish(s->ctx, NULL, 0));
}

static int do_publish_logits(struct scene *s)
{
    static const float logits[2] = {1, 2};

    return ARMED(kv_context_publish(s->ctx, logits, 2));
}

/* So many that all other entries must go for them: the call begins anew under all locks. */
static int do_publish_many_logits(struct scene *s)
{
    enum { BYTES = BOOKKEEPING - 1024 };
    static float logits[BYTES / sizeof(float)];

    return ARMED(kv_context_publish(s->ctx, logits, BYTES / sizeof(float)));
}

/* The key of an entry that has no logits. */
static void grow_to_equal(struct scene *s)
{
    ck_assert_int_eq(grow(s->ctx, "a20b20"), 0);
    freeze(s);
}

/* A key that goes on where an entry ends, which is extended then. */
static void grow_beyond(struct scene *s)
{
    ck_assert_int_eq(grow(s->ctx, "a20b20c40"), 0);
    freeze(s);
}

/* The first of its namespace. */
static void move_to_another_tenant(struct scene *s)
{
    kv_context_close(s->ctx);
    ns = tenant_b;
    s->ctx = context("a20");
    freeze(s);
}

/* A key that leaves the tree in the middle of an edge. */
static void diverge(struct scene *s)
{
    ck_assert_int_eq(grow(s->ctx, "a20b6d10"), 0);
    freeze(s);
}

static int do_give_up(struct scene *s)
{
    static const float logits[2] = {1, 2};

    return ARMED(kv_context_give_up(s->ctx, logits, 2));
}

/* Its only page goes: the parent is left with one child and merged. */
static int do_trim(struct scene *s)
{
    (void)s;
    ARMED_VOID(kv_cache_trim(cache, 4));
    return 0;
}

static void branch(struct scene *s)
{
    (void)s;
    put("a20b5e11");
    put("c40d8");
    kv_context_close(match("c40d8x1", 0, 48));
}

static int do_reserve(struct scene *s)
{
    return ARMED(kv_context_reserve(s->ctx, 9 * P));
}

static int do_check(struct scene *s)
{
    struct kv_why why;

    (void)s;
    return ARMED(kv_cache_check(cache, &why));
}

static int do_cache_open(struct scene *s)
{
    const struct kv_cache_config config = {
        .geometry = geometry, .page_tokens = P, .n_pages = 4, .arena = true};
    struct kv_cache *other = NULL;
    int rc = ARMED(kv_cache_open(&config, &other, NULL));

    (void)s;
    ck_assert((rc == 0) == (other != NULL));
    kv_cache_close(other);
    return rc;
}

static int do_encoder_open(struct scene *s)
{
    const uint32_t base_ids[3] = {'a', 'a', 'a'};
    const struct kv_snapshot_header h = header_of(3, base_ids);

    return ARMED(kv_encoder_open(&h, &s->encoder, NULL));
}

static int do_decoder_open(struct scene *s)
{
    const struct kv_snapshot_header h = header_of(0, NULL);

    return ARMED(kv_decoder_open(&h, &s->decoder));
}

static int do_prefix(struct scene *s)
{
    return ARMED(kv_prefix_init(&s->prefix, &ns.digest, kv_frame_positions(&geometry)));
}

/* A decoder that has the header, and the next record of a snapshot of ctx; `stage` is which. */
static void make_record(struct scene *s, int stage)
{
    const struct kv_snapshot_header h = header_of(0, NULL);
    const float logits[4] = {1, 2, 3, 4};
    struct kv_encoder *e;
    struct iovec piece = {.iov_base = s->record};
    struct kv_frame frame;

    ck_assert_int_eq(kv_encoder_open(&h, &e, NULL), 0);
    ck_assert_int_eq(kv_decoder_open(&h, &s->decoder), 0);
    for (int i = 0; i <= stage; i++) {
        if (i == 0) {
            s->n_record = kv_encoder_header_bytes(e);
            kv_encoder_header(e, s->record);
        } else if (i == 1) {
            s->n_record = kv_encoder_frame_bytes(e, 20);
            ck_assert_uint_le(s->n_record, sizeof(s->record));
            ck_assert_int_eq(kv_encoder_frame(e, s->ctx, 20, s->record), 0);
        } else {
            s->n_record = kv_encoder_section_bytes(sizeof(logits));
            ck_assert_int_eq(
                kv_encoder_section(e, KV_SECTION_LOGITS, logits, sizeof(logits), s->record), 0);
        }
        piece.iov_len = s->n_record;
        if (i == 0 && stage > 0)
            ck_assert_int_eq(kv_decoder_header(s->decoder, &piece, 1, NULL), 0);
        if (i == 1 && stage > 1)
            ck_assert_int_eq(kv_decoder_frame(s->decoder, &piece, 1, &frame, NULL), 0);
    }
    kv_encoder_close(e);
}

static void make_header(struct scene *s)
{
    make_record(s, 0);
}

static void make_frame(struct scene *s)
{
    make_record(s, 1);
}

static void make_section(struct scene *s)
{
    make_record(s, 2);
}

static int do_header(struct scene *s)
{
    const struct iovec piece = {.iov_base = s->record, .iov_len = s->n_record};

    return ARMED(kv_decoder_header(s->decoder, &piece, 1, NULL));
}

static int do_frame(struct scene *s)
{
    const struct iovec piece = {.iov_base = s->record, .iov_len = s->n_record};
    struct kv_frame frame;

    return ARMED(kv_decoder_frame(s->decoder, &piece, 1, &frame, NULL));
}

static int do_section(struct scene *s)
{
    const struct iovec piece = {.iov_base = s->record, .iov_len = s->n_record};
    enum kv_section kind;
    const void *data;
    size_t len;

    return ARMED(kv_decoder_section(s->decoder, &piece, 1, &kind, &data, &len, NULL));
}

static const struct trial trials[] = {
    {.name = "open a cache", .call = do_cache_open, .at_least = 5},
    {.name = "open a context", .call = do_open, .at_least = 1},
    {.name = "match, a miss", .call = do_match_miss, .at_least = 2},
    {.name = "match, a hit", .call = do_match_hit, .at_least = 2},
    {.name = "match that evicts", .call = do_match_hit, .n_pages = 9, .at_least = 2},
    {.name = "fork", .call = do_fork, .at_least = 2},
    {.name = "fork of a frozen one", .call = do_fork, .prepare = freeze, .at_least = 2},
    {.name = "begin", .call = do_begin, .at_least = 1},
    {.name = "begin with a clone", .call = do_begin, .prepare = share, .at_least = 1},
    {.name = "begin that evicts", .call = do_begin, .n_pages = 10, .at_least = 1, .evicts = true},
    {.name = "overwrite", .call = do_overwrite, .prepare = share},
    {.name = "reserve that evicts", .call = do_reserve, .prepare = branch, .n_pages = 15},
    {.name = "publish, an extension", .call = do_publish_logits, .prepare = freeze, .at_least = 5},
    {.name = "publish, a split", .call = do_publish, .prepare = diverge, .at_least = 6},
    {.name = "publish, in place", .call = do_publish_logits, .prepare = grow_beyond, .at_least = 3},
    {.name = "give up, in place",
     .call = do_give_up,
     .prepare = grow_beyond,
     .at_least = 2,
     .closes = true},
    {.name = "publish, logits", .call = do_publish_logits, .prepare = grow_to_equal, .at_least = 1},
    {.name = "publish, logits that evict",
     .call = do_publish_many_logits,
     .prepare = grow_to_equal,
     .at_least = 1},
    {.name = "publish, a new namespace",
     .call = do_publish,
     .prepare = move_to_another_tenant,
     .at_least = 5},
    {.name = "give up", .call = do_give_up, .at_least = 5, .closes = true},
    {.name = "trim", .call = do_trim, .prepare = branch},
    {.name = "audit", .call = do_check, .at_least = 3},
    {.name = "open an encoder", .call = do_encoder_open, .at_least = 4},
    {.name = "open a decoder", .call = do_decoder_open, .at_least = 1},
    {.name = "prefix", .call = do_prefix, .at_least = 1},
    {.name = "decode a header", .call = do_header, .prepare = make_header, .at_least = 1},
    {.name = "decode a frame", .call = do_frame, .prepare = make_frame},
    {.name = "decode a section", .call = do_section, .prepare = make_section, .at_least = 1},
};

enum { N_TRIALS = sizeof(trials) / sizeof(trials[0]) };

static void fail_each(const struct trial *t, bool arena)
{
    uint64_t n = 1;

    while (try_nth(t, arena, n))
        n++;
    ck_assert_msg(n > t->at_least, "%s makes %d allocations, not %u", t->name, (int)n - 1,
                  t->at_least);
}

START_TEST(each_failing_allocation_is_an_error_that_changes_and_leaks_nothing_with_an_arena)
{
    fail_each(&trials[_i], true);
}
END_TEST

START_TEST(each_failing_allocation_is_an_error_that_changes_and_leaks_nothing_on_the_heap)
{
    fail_each(&trials[_i], false);
}
END_TEST

/* Giving back must not depend on memory. */
START_TEST(calls_that_give_back_need_no_memory)
{
    struct kv_context *ctx, *fork, *other;
    uint32_t ids[MAX];

    open_cache(24);
    put("a20b20");
    put("a20c20");
    put("d40");
    ctx = context("e40");
    fork = fork_at(ctx, 35);
    other = match("a20b20x1", 60, 40);
    key("e35f10", ids);
    ck_assert_int_eq(kv_context_begin(fork, ids + 35, 10), 0);
    fail_all = true;
    ck_assert_int_eq(ARMED(kv_context_commit(fork, 5)), 0);
    ck_assert_int_eq(ARMED(kv_context_abort(fork)), KV_ERR_INVALID);
    ck_assert_int_eq(ARMED(kv_context_truncate(fork, 33)), 0);
    ck_assert_int_eq(ARMED(kv_context_reserve(other, 50)), 0);
    ck_assert_int_eq(ARMED(kv_context_freeze(ctx)), 0);
    ARMED_VOID(kv_context_close(kv_context_ref(ctx)));
    ck_assert_int_eq(ARMED((int)kv_cache_peek(cache, &ns, ids, 10)), 0);
    ARMED_VOID(kv_cache_trim(cache, 4));
    ck_assert_int_eq(ARMED(kv_cache_set_quota(cache, 0, 20)), 0);
    ARMED_VOID(kv_context_close(ctx));
    ARMED_VOID(kv_context_close(fork));
    ARMED_VOID(kv_context_close(other));
    fail_all = false;
    check();
    kv_context_close(match("a20b20x1", 0, 40));
    fail_all = true;
    ARMED_VOID(kv_cache_trim(cache, UINT32_MAX));
    fail_all = false;
    ck_assert_uint_eq(stats().n_live, 0);
    close_cache();
}
END_TEST

/* Nodes that could not be merged are passed through, and tidied when there is memory again. */
START_TEST(a_node_that_could_not_be_merged_does_no_harm)
{
    open_cache(24);
    put("a20c20");
    put("a20b20");
    ck_assert_uint_eq(stats().n_nodes, 3);
    fail_all = true;
    ARMED_VOID(kv_cache_trim(cache, 3));
    fail_all = false;
    check();
    EXPECT_ENTRIES("a20b20");
    ck_assert_uint_eq(stats().n_nodes, 2);
    kv_context_close(match("a20b20x1", 0, 40));
    kv_context_close(match("a10x1", 0, 10));
    put("a20d20");
    put("a10e20");
    check();
    ck_assert_uint_eq(stats().n_nodes, 5);
    ck_assert_uint_eq(reach("a20b20"), 40);
    close_cache();
}
END_TEST

/* ---- What is counted ---- */

static size_t n_bytes;

static void add_bytes(const void *at, VISIT which, int depth)
{
    (void)depth;
    if (which == postorder || which == leaf)
        n_bytes += malloc_usable_size(*(void *const *)at) + sizeof(size_t);
}

/* All that is allocated but for pages. */
static size_t bytes_beside_pages(void)
{
    n_bytes = 0;
    twalk(held_set, add_bytes);
    for (uint32_t i = 0; i < cache->slots.n_pages; i++)
        if (cache->slots.pages[i].bytes != NULL)
            n_bytes -= malloc_usable_size(cache->slots.pages[i].bytes) + sizeof(size_t);
    return n_bytes;
}

/* Short keys, so that what a node costs besides its ids counts most. */
START_TEST(what_the_tree_allocates_is_within_what_it_counts)
{
    enum { N_ENTRIES = 8000, N = 25 };
    uint32_t ids[N] = {1};
    size_t before;

    open_with(2 * N_ENTRIES, (size_t)16 << 20, false);
    before = bytes_beside_pages();
    for (ids[1] = 0; ids[1] < N_ENTRIES; ids[1]++) {
        struct kv_context *ctx = empty();

        ck_assert_int_eq(append_to(ctx, &geometry, &ns, ids, N), 0);
        ck_assert_int_eq(kv_context_give_up(ctx, NULL, 0), 0);
    }
    ck_assert_uint_eq(stats().n_entries, N_ENTRIES);
    ck_assert_uint_le(bytes_beside_pages() - before, stats().bookkeeping_bytes);
    kv_cache_trim(cache, UINT32_MAX);
    ck_assert_uint_eq(stats().n_entries, 0);
    ck_assert_uint_le(bytes_beside_pages(), before + 1024); /* a directory of segments stays */
    close_cache();
}
END_TEST

int main(int argc, char **argv)
{
    Suite *s = suite_create("kv_nomem");
    TCase *tc = tcase_create("nomem");
    SRunner *sr = srunner_create(s);
    int n_failed;

    if (!take_precision(&geometry, argc, argv))
        return 2;
    suite_add_tcase(s, tc);
    tcase_set_timeout(tc, 120);
    tcase_add_loop_test(
        tc, each_failing_allocation_is_an_error_that_changes_and_leaks_nothing_with_an_arena, 0,
        N_TRIALS);
    tcase_add_loop_test(
        tc, each_failing_allocation_is_an_error_that_changes_and_leaks_nothing_on_the_heap, 0,
        N_TRIALS);
    tcase_add_test(tc, calls_that_give_back_need_no_memory);
    tcase_add_test(tc, a_node_that_could_not_be_merged_does_no_harm);
    tcase_add_test(tc, what_the_tree_allocates_is_within_what_it_counts);
    srunner_run_all(sr, CK_ENV);
    n_failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return n_failed != 0;
}

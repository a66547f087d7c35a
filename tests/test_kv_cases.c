/* Faults that engines of this kind have had, here and elsewhere, and contexts that share pages in
 * every way that is easy to get wrong.
 *
 * Method: small caches and keys of letters (kv_rig.h); the audit runs in check().  What a call
 * allocates is known by its largest piece: the linker puts the functions below in between. */
#include "kv_rig.h"
#include "kvcore/kv_record.h"

static size_t largest_alloc;

void *__real_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__real_calloc(size_t n, size_t bytes);
void *__wrap_calloc(size_t n, size_t bytes);

static void note_alloc(size_t bytes)
{
    largest_alloc = bytes > largest_alloc ? bytes : largest_alloc;
}

void *__wrap_malloc(size_t bytes)
{
    note_alloc(bytes);
    return __real_malloc(bytes);
}

void *__wrap_calloc(size_t n, size_t bytes)
{
    note_alloc(n * bytes);
    return __real_calloc(n, bytes);
}

/* ---- Faults that an engine of this design had ---- */

/* Its second way to release pages forgot the arena: the counters were right, only slots leaked. */
START_TEST(forty_retains_against_room_for_four_leave_as_many_slots_out_as_pages_live)
{
    char text[32];

    open_with(24, need_alone(40, 0) + 3 * (need_alone(40, 0) - kv_tree_root_bytes()), true);
    for (uint32_t i = 0; i < 40; i++) {
        snprintf(text, sizeof(text), "%c%u%c20", 'a' + (int)(i % 20), 1 + i % 20, 'A' + (int)i % 7);
        put(text);
        ck_assert_uint_le(stats().n_entries, 5);
        ck_assert_uint_eq(cache->slots.n_pages - cache->shards[0].pool.n_free, stats().n_live);
        ck_assert_uint_eq(stats().n_live, stats().n_evictable);
    }
    ck_assert_uint_ge(stats().n_entries, 4);
    close_cache();
}
END_TEST

/* The records and the pages of a context made of recycled pages, of clones and cuts. */
static uint32_t crc_of_a_life(bool arena)
{
    struct kv_snapshot_header header = {.geometry = geometry, .ns = tenant_a.digest, .n_bound = 64};
    struct kv_context *ctx, *fork;
    struct kv_encoder *e;
    unsigned char *record;
    uint32_t crc = 0;

    open_with(5, 0, arena);
    for (char c = 'a'; c < 'h'; c++)
        put((const char[]){c, '4', '5', '\0'});
    ctx = context("a24");
    fork = fork_at(ctx, 21);
    ck_assert_int_eq(grow(fork, "a21z20"), 0);
    ck_assert_int_eq(kv_context_truncate(fork, 35), 0);
    kv_context_close(ctx);
    for (uint32_t i = 0; i < kv_context_n_pages(fork); i++)
        crc = kv_crc32c(crc, kv_context_page(fork, i), kv_cache_layout(cache)->page_bytes);
    header.frame_positions = kv_frame_positions(&geometry);
    ck_assert_int_eq(kv_encoder_open(&header, &e, NULL), 0);
    record = malloc(kv_encoder_frame_bytes(e, 35));
    ck_assert_int_eq(kv_encoder_frame(e, fork, 35, record), 0);
    crc = kv_crc32c(crc, record, kv_encoder_frame_bytes(e, 35));
    free(record);
    kv_encoder_close(e);
    kv_context_close(fork);
    close_cache();
    return crc;
}

START_TEST(the_same_program_gives_the_same_bytes_with_and_without_an_arena)
{
    ck_assert_uint_eq(crc_of_a_life(true), crc_of_a_life(false));
}
END_TEST

START_TEST(a_recycled_slot_is_issued_without_a_trace_of_its_last_owner)
{
    struct kv_context *ctx;
    uint32_t ids[MAX];
    const unsigned char *page;
    const struct kv_layout *l;

    open_cache(1);
    kv_context_close(context("a16"));
    ns = tenant_b;
    ctx = empty();
    key("b1", ids);
    ck_assert_int_eq(kv_context_begin(ctx, ids, 1), 0);
    page = kv_context_page(ctx, 0);
    l = kv_cache_layout(cache);
    for (size_t i = 0; i < l->page_bytes; i++)
        ck_assert_uint_eq(page[i], i == l->ids_offset ? 'b' : 0);
    kv_context_close(ctx);
    close_cache();
}
END_TEST

START_TEST(five_hundred_inserts_against_room_for_four_leave_no_node_standing)
{
    const size_t bound = need_alone(12, 0) + 3 * (need_alone(12, 0) - kv_tree_root_bytes());
    uint32_t ids[12], n_most = 0;

    open_with(16, bound, true);
    for (uint32_t i = 0; i < 500; i++) {
        struct kv_context *ctx = empty();
        struct kv_stats s;

        for (uint32_t j = 0; j < 12; j++)
            ids[j] = (uint32_t)(mix(i * 12 + j) % 3);
        ck_assert_int_eq(append_to(ctx, &geometry, &ns, ids, 12), 0);
        ck_assert_int_eq(kv_context_give_up(ctx, NULL, 0), 0);
        check(); /* no node has one child and no entry; bytes are what nodes and edges take */
        s = stats();
        ck_assert_uint_le(s.bookkeeping_bytes, bound);
        ck_assert_uint_lt(s.n_nodes, 2 * s.n_entries);
        ck_assert_uint_eq(s.n_live, s.n_entries);
        n_most = s.n_entries > n_most ? s.n_entries : n_most;
    }
    ck_assert_uint_ge(n_most, 4);
    ck_assert_uint_le(n_most, 6);
    close_cache();
}
END_TEST

/* Headers of a few bytes, their CRC right, that declare the most there may be; a frame that does; a
 * prompt that wants the longest context from a cache of two pages. */
START_TEST(a_declared_length_is_checked_before_anything_is_allocated_for_it)
{
    static const size_t lengths[] = {
        KV_HEADER_LENGTH, KV_HEADER_LAYERS,          KV_HEADER_KV_HEADS, KV_HEADER_HEAD_DIM,
        KV_HEADER_BOUND,  KV_HEADER_FRAME_POSITIONS, KV_HEADER_BASE};
    struct kv_snapshot_header expect = {.geometry = geometry, .n_bound = 64};
    struct kv_context *ctx = NULL;
    struct kv_encoder *e;
    struct kv_decoder *d;
    struct kv_frame frame;
    struct iovec piece = {0};
    unsigned char *record, least[KV_FRAME_IDS] = KV_MAGIC_FRAME;

    open_cache(2);
    expect.frame_positions = kv_frame_positions(&geometry);
    ck_assert_int_eq(kv_encoder_open(&expect, &e, NULL), 0);
    ck_assert_int_eq(kv_decoder_open(&expect, &d), 0);
    piece.iov_len = kv_encoder_header_bytes(e);
    piece.iov_base = record = malloc(piece.iov_len);
    largest_alloc = 0;
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
        kv_encoder_header(e, record);
        kv_put_u32(record, lengths[i], UINT32_MAX);
        kv_put_u32(record, KV_RECORD_CRC,
                   kv_crc32c(0, record + KV_RECORD_BODY, piece.iov_len - KV_RECORD_BODY));
        ck_assert_int_lt(kv_decoder_header(d, &piece, 1, NULL), 0);
    }
    kv_encoder_header(e, record);
    ck_assert_int_eq(kv_decoder_header(d, &piece, 1, NULL), 0);
    kv_put_u32(least, KV_FRAME_COUNT, UINT32_MAX);
    piece = (struct iovec){.iov_base = least, .iov_len = sizeof(least)};
    ck_assert_int_lt(kv_decoder_frame(d, &piece, 1, &frame, NULL), 0);
    ck_assert_int_eq(try_match("a4", KV_MAX_POSITIONS, &ctx, NULL), KV_ERR_FULL);
    /* The ids of one frame are the most that a decoder sets aside. */
    ck_assert_uint_le(largest_alloc, kv_frame_positions(&geometry) * sizeof(uint32_t));
    free(record);
    kv_encoder_close(e);
    kv_decoder_close(d);
    close_cache();
}
END_TEST

/* ---- Contexts that share ---- */

START_TEST(forks_at_a_page_border_and_one_position_either_side_stay_apart)
{
    for (uint32_t at = 2 * P - 1; at <= 2 * P + 1; at++) {
        struct kv_context *parent, *one, *two;
        char left[32], right[32];

        open_cache(12);
        parent = context("a40");
        one = fork_at(parent, at);
        two = fork_at(parent, at);
        snprintf(left, sizeof(left), "a%ub20", at);
        snprintf(right, sizeof(right), "a%uc20", at);
        ck_assert_int_eq(grow(one, left), 0);
        ck_assert_int_eq(grow(two, right), 0);
        ck_assert_uint_eq(stats().n_clones, at % P == 0 ? 0 : 2);
        ck_assert(reads(parent, "a40") && reads(one, left) && reads(two, right));
        check();
        kv_context_close(parent);
        ck_assert(reads(one, left) && reads(two, right));
        kv_context_close(one);
        kv_context_close(two);
        close_cache();
    }
}
END_TEST

enum { DEEP = 12 };

/* Each branch forks from one that was forked and written before, a position further on. */
START_TEST(twelve_deep_forks_of_branches_already_forked_and_written_stay_apart)
{
    struct kv_context *at[DEEP + 1];
    char text[DEEP + 1][128];

    open_cache(64);
    snprintf(text[0], sizeof(text[0]), "a13");
    at[0] = context(text[0]);
    for (int i = 1; i <= DEEP; i++) {
        memcpy(text[i], text[i - 1], sizeof(text[i]));
        snprintf(text[i] + strlen(text[i]), 8, "%c3", 'a' + i);
        at[i] = fork_at(at[i - 1], kv_context_length(at[i - 1]));
        ck_assert_int_eq(grow(at[i], text[i]), 0);
        snprintf(text[i - 1] + strlen(text[i - 1]), 8, "%c2", 'A' + i);
        ck_assert_int_eq(grow(at[i - 1], text[i - 1]), 0); /* and the parent goes elsewhere */
        check();
    }
    for (int i = 0; i <= DEEP; i++)
        ck_assert_msg(reads(at[i], text[i]), "branch %d", i);
    for (int i = 0; i <= DEEP; i += 2)
        kv_context_close(at[i]);
    for (int i = 1; i <= DEEP; i += 2)
        ck_assert_msg(reads(at[i], text[i]), "branch %d", i);
    for (int i = 1; i <= DEEP; i += 2)
        kv_context_close(at[i]);
    close_cache();
}
END_TEST

START_TEST(every_truncation_point_of_a_shared_context_leaves_the_others_alone)
{
    for (uint32_t cut = 0; cut <= 50; cut++) {
        struct kv_context *parent, *fork;
        char text[32];

        open_cache(12);
        parent = context("a50");
        put("a50b1");
        fork = fork_at(parent, 50);
        ck_assert_int_eq(kv_context_truncate(fork, cut), 0);
        check();
        snprintf(text, sizeof(text), cut > 0 ? "a%uz7" : "z7", cut);
        ck_assert_int_eq(grow(fork, text), 0);
        ck_assert(reads(parent, "a50") && reads(fork, text));
        kv_context_close(match("a50b1c1", 0, 51));
        kv_context_close(parent);
        kv_context_close(fork);
        close_cache();
    }
}
END_TEST

/* ---- What other systems got wrong ---- */

START_TEST(two_writers_of_one_partly_filled_page_do_not_see_each_other)
{
    struct kv_context *base, *one, *two;
    char left[16], right[16];

    open_cache(16);
    base = context("a20");
    ck_assert_int_eq(kv_context_freeze(base), 0);
    one = fork_at(base, 20);
    two = fork_at(base, 20);
    for (uint32_t i = 1; i <= 30; i++) { /* in turn, as two streams of one batch do */
        snprintf(left, sizeof(left), "a20b%u", i);
        snprintf(right, sizeof(right), "a20c%u", i);
        ck_assert_int_eq(grow(one, left), 0);
        ck_assert_int_eq(grow(two, right), 0);
        ck_assert(reads(one, left) && reads(two, right));
    }
    kv_context_close(base);
    kv_context_close(one);
    kv_context_close(two);
    close_cache();
}
END_TEST

START_TEST(a_pinned_leaf_survives_evicting_everything_and_goes_when_it_is_unpinned)
{
    struct kv_context *pin;

    open_cache(8);
    put("a20b20");
    put("a20c20");
    pin = match("a20b20x1", 0, 40);
    kv_cache_trim(cache, UINT32_MAX);
    EXPECT_ENTRIES("a20b20");
    ck_assert(reads(pin, "a20b20"));
    kv_context_close(pin);
    ck_assert_uint_eq(kv_cache_trim(cache, UINT32_MAX), 3);
    EXPECT_ENTRIES("");
    close_cache();
}
END_TEST

START_TEST(a_context_whose_prefix_is_entered_already_keeps_its_own_pages)
{
    struct kv_context *ctx;

    open_cache(8);
    put("a32");
    ctx = context("a32");
    ck_assert_int_eq(kv_context_publish(ctx, NULL, 0), 0);
    ck_assert_uint_eq(stats().n_evictable, 2); /* the old pages stay in the tree */
    for (char c = 'b'; c < 'm'; c++)
        put((const char[]){c, '6', '4', '\0'});
    ck_assert(reads(ctx, "a32"));
    kv_context_close(ctx);
    close_cache();
}
END_TEST

START_TEST(a_page_that_several_entries_share_is_counted_once)
{
    struct kv_context *base, *fork;
    char text[16];

    open_cache(16);
    base = context("a32");
    for (char c = 'b'; c < 'h'; c++) {
        fork = fork_at(base, 32);
        snprintf(text, sizeof(text), "a32%c8", c);
        ck_assert_int_eq(grow(fork, text), 0);
        ck_assert_int_eq(kv_context_give_up(fork, NULL, 0), 0);
        check();
    }
    ck_assert_uint_eq(stats().n_live, 2 + 6);
    ck_assert_uint_eq(stats().n_evictable, 6);
    kv_context_close(base);
    ck_assert_uint_eq(stats().n_evictable, 8);
    ck_assert_uint_eq(kv_cache_trim(cache, UINT32_MAX), 8);
    close_cache();
}
END_TEST

START_TEST(keys_around_a_page_are_entered_and_found_in_tokens)
{
    static const uint32_t lengths[] = {1, P - 1, P, P + 1, 2 * P};

    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
        char text[16];

        open_cache(4);
        snprintf(text, sizeof(text), "a%u", lengths[i]);
        put(text);
        ck_assert_uint_eq(stats().n_entries, 1);
        ck_assert_uint_eq(stats().n_live, (lengths[i] + P - 1) / P);
        ck_assert_uint_eq(reach(text), lengths[i]);
        close_cache();
    }
    open_cache(4);
    ck_assert_uint_eq(reach(""), 0);
    kv_context_close(match("", 0, 0));
    close_cache();
}
END_TEST

START_TEST(eviction_stops_where_everything_is_pinned_or_shared_or_too_little)
{
    struct kv_context *a, *b, *ctx;

    open_cache(4);
    a = context("a32");
    ck_assert_int_eq(kv_context_publish(a, NULL, 0), 0);
    b = fork_at(a, 32);
    ck_assert_int_eq(kv_context_publish(b, NULL, 0), 0);
    ctx = empty();
    ck_assert_uint_eq(kv_cache_trim(cache, 1), 0);
    ck_assert_int_eq(kv_context_reserve(ctx, 3 * P), KV_ERR_FULL);
    kv_context_close(a);
    ck_assert_int_eq(kv_context_reserve(ctx, 3 * P), KV_ERR_FULL); /* still shared with b */
    EXPECT_ENTRIES("a32");
    ck_assert_int_eq(kv_context_reserve(ctx, 1000 * P), KV_ERR_FULL); /* more than there is */
    kv_context_close(b);
    ck_assert_int_eq(kv_context_reserve(ctx, 3 * P), 0);
    EXPECT_ENTRIES("a16");
    kv_context_close(ctx);
    close_cache();
}
END_TEST

START_TEST(an_abort_at_each_chunk_border_leaves_nothing_to_be_matched)
{
    uint32_t ids[MAX], n = key("a16b16c16", ids);

    for (uint32_t at = 8; at < n; at += 8) {
        struct kv_context *ctx;

        open_cache(8);
        ctx = empty();
        ck_assert_int_eq(append_to(ctx, &geometry, &ns, ids, at), 0);
        ck_assert_int_eq(kv_context_begin(ctx, ids + at, 8), 0); /* rows never written */
        ck_assert_int_eq(kv_context_abort(ctx), 0);
        ck_assert_int_eq(kv_context_publish(ctx, NULL, 0), 0);
        kv_context_close(ctx);
        kv_context_close(match("a16b16c16", 0, at - at % P));
        close_cache();
    }
}
END_TEST

START_TEST(pages_of_a_context_that_ends_before_it_is_published_go_to_free)
{
    struct kv_context *ctx;
    uint32_t ids[MAX];

    open_cache(4);
    ctx = context("a20");
    key("a40", ids);
    ck_assert_int_eq(kv_context_begin(ctx, ids + 20, 20), 0);
    kv_context_close(ctx);
    ck_assert_uint_eq(stats().n_free, 4);
    kv_context_close(match("a40", 0, 0));
    close_cache();
}
END_TEST

/* Two tenants thrash a small cache and cancel at random; each context reads what it would alone. */
START_TEST(a_storm_of_cancels_between_two_tenants_changes_nobodys_rows)
{
    enum { N = 5 };
    struct kv_context *at[N] = {NULL};
    uint32_t ids[N][80], n_hits;

    open_cache(12);
    for (uint64_t turn = 0, h = 1; turn < 3000; turn++, h = mix(h)) {
        const uint32_t i = (uint32_t)(h % N);

        ns = i % 2 ? tenant_b : tenant_a;
        if (at[i] == NULL) {
            for (uint32_t j = 0; j < 80; j++)
                ids[i][j] = j < 20 + (h >> 8) % 40 ? 1 + j / 24 : (uint32_t)(mix(h + j) % 3);
            if (kv_cache_match(cache, &ns, ids[i], 80, 80, NULL, 0, &at[i], NULL) < 0)
                at[i] = NULL;
            continue;
        }
        ck_assert(holds(at[i], &geometry, &ns, ids[i], kv_context_length(at[i])));
        if (h >> 20 & 3) {
            const uint32_t n = kv_context_length(at[i]) + 1 + (uint32_t)(h >> 30) % 20;

            ck_assert_int_eq(append_to(at[i], &geometry, &ns, ids[i], n < 80 ? n : 80), 0);
            if (kv_context_length(at[i]) < 80)
                continue;
        }
        if (h >> 22 & 1)
            ck_assert_int_eq(kv_context_give_up(at[i], NULL, 0), 0);
        else
            kv_context_close(at[i]);
        at[i] = NULL;
        check();
    }
    n_hits = (uint32_t)stats().n_hits;
    ck_assert_uint_gt(n_hits, 50);
    for (int i = 0; i < N; i++)
        kv_context_close(at[i]);
    close_cache();
}
END_TEST

/* Also where the digests are equal in the bytes that place them, and where only the group differs:
 * what is equal decides, a hash only narrows. */
START_TEST(two_tenants_with_one_prompt_never_meet)
{
    open_cache(16);
    put("a32");
    for (uint32_t i = 4; i < KV_DIGEST_BYTES; i++) {
        ns = tenant_a;
        ns.digest.bytes[i] ^= 1;
        kv_context_close(match("a32b1", 0, 0));
    }
    ns = tenant_a;
    ns.group = 3;
    kv_context_close(match("a32b1", 0, 0));
    put("a32");
    ck_assert_uint_eq(stats().n_live, 4);
    ck_assert_uint_eq(stats().n_hits, 0);
    close_cache();
}
END_TEST

/* The longest strings from a small set, so that joined without lengths many would be equal. */
START_TEST(different_namespace_fields_never_have_one_digest)
{
    static const char *const parts[] = {"", "a", "b", "ab", "ba", "aba"};
    enum { N = 6, ALL = N * N * 2 };
    struct kv_digest seen[ALL];

    for (uint32_t i = 0; i < ALL; i++) {
        const char *salt = parts[i / N % N];
        const struct kv_namespace_fields fields = {.tenant = parts[i % N],
                                                   .salt = salt,
                                                   .salt_len = strlen(salt),
                                                   .precision = i >= N * N ? KV_F32 : KV_F16};

        kv_namespace_digest(&fields, &seen[i]);
        for (uint32_t j = 0; j < i; j++)
            ck_assert_mem_ne(&seen[i], &seen[j], sizeof(seen[i]));
    }
}
END_TEST

/* What a save reads is a fork of its own: the session goes on and back meanwhile. */
START_TEST(a_snapshot_of_a_frozen_fork_is_not_moved_by_its_session)
{
    struct kv_context *session, *saved;

    open_cache(12);
    session = context("a30");
    saved = fork_at(session, 30);
    ck_assert_int_eq(kv_context_freeze(saved), 0);
    ck_assert_int_eq(grow(session, "a30b10"), 0);
    ck_assert_int_eq(kv_context_truncate(session, 5), 0);
    ck_assert_int_eq(grow(session, "a5c50"), 0);
    kv_context_close(session);
    for (char c = 'd'; c < 'k'; c++) /* its pages are not to be had, however full it gets */
        put((const char[]){c, '9', '0', '\0'});
    ck_assert(reads(saved, "a30"));
    kv_context_close(saved);
    close_cache();
}
END_TEST

START_TEST(a_match_of_a_disjoint_prompt_is_an_empty_context)
{
    struct kv_context *ctx;

    open_cache(8);
    put("a40");
    ctx = match("b40", 40, 0);
    ck_assert_uint_eq(kv_context_length(ctx), 0);
    ck_assert_uint_eq(kv_context_n_pages(ctx), 0);
    ck_assert_int_eq(grow(ctx, "b40"), 0);
    ck_assert(reads(ctx, "b40"));
    kv_context_close(ctx);
    close_cache();
}
END_TEST

START_TEST(a_warm_prompt_has_the_rows_of_a_cold_one_at_every_length_of_the_hit)
{
    for (uint32_t n = 1; n <= 40; n++) {
        struct kv_context *ctx;
        char text[16];

        open_cache(8);
        put("a40");
        snprintf(text, sizeof(text), "a%ub8", n);
        ctx = match(text, n + 8, n);
        ck_assert_uint_eq(stats().n_hits, 1);
        ck_assert_int_eq(grow(ctx, text), 0);
        ck_assert(reads(ctx, text));
        kv_context_close(ctx);
        close_cache();
    }
}
END_TEST

/* A hit destroys nothing, and giving up never evicts the prefix that it came from. */
START_TEST(a_hit_and_what_grows_from_it_leave_the_prefix_in_place)
{
    struct kv_context *ctx;

    open_cache(8);
    put_logits("a32", 1);
    for (char c = 'b'; c < 'z'; c++) {
        char text[16];

        snprintf(text, sizeof(text), "a32%c16", c);
        ctx = match(text, 48, 32);
        ck_assert_int_eq(grow(ctx, text), 0);
        ck_assert_int_eq(kv_context_give_up(ctx, NULL, 0), 0);
        check();
        ck_assert_uint_eq(reach(text), 48);
    }
    ck_assert_uint_eq(stats().n_hits, 'z' - 'b');
    close_cache();
}
END_TEST

int main(int argc, char **argv)
{
    Suite *s = suite_create("kv_cases");
    TCase *tc = tcase_create("cases");
    SRunner *sr = srunner_create(s);
    int n_failed;

    if (!take_precision(&geometry, argc, argv))
        return 2;
    suite_add_tcase(s, tc);
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, forty_retains_against_room_for_four_leave_as_many_slots_out_as_pages_live);
    tcase_add_test(tc, the_same_program_gives_the_same_bytes_with_and_without_an_arena);
    tcase_add_test(tc, a_recycled_slot_is_issued_without_a_trace_of_its_last_owner);
    tcase_add_test(tc, five_hundred_inserts_against_room_for_four_leave_no_node_standing);
    tcase_add_test(tc, a_declared_length_is_checked_before_anything_is_allocated_for_it);
    tcase_add_test(tc, forks_at_a_page_border_and_one_position_either_side_stay_apart);
    tcase_add_test(tc, twelve_deep_forks_of_branches_already_forked_and_written_stay_apart);
    tcase_add_test(tc, every_truncation_point_of_a_shared_context_leaves_the_others_alone);
    tcase_add_test(tc, two_writers_of_one_partly_filled_page_do_not_see_each_other);
    tcase_add_test(tc, a_pinned_leaf_survives_evicting_everything_and_goes_when_it_is_unpinned);
    tcase_add_test(tc, a_context_whose_prefix_is_entered_already_keeps_its_own_pages);
    tcase_add_test(tc, a_page_that_several_entries_share_is_counted_once);
    tcase_add_test(tc, keys_around_a_page_are_entered_and_found_in_tokens);
    tcase_add_test(tc, eviction_stops_where_everything_is_pinned_or_shared_or_too_little);
    tcase_add_test(tc, an_abort_at_each_chunk_border_leaves_nothing_to_be_matched);
    tcase_add_test(tc, pages_of_a_context_that_ends_before_it_is_published_go_to_free);
    tcase_add_test(tc, a_storm_of_cancels_between_two_tenants_changes_nobodys_rows);
    tcase_add_test(tc, two_tenants_with_one_prompt_never_meet);
    tcase_add_test(tc, different_namespace_fields_never_have_one_digest);
    tcase_add_test(tc, a_snapshot_of_a_frozen_fork_is_not_moved_by_its_session);
    tcase_add_test(tc, a_match_of_a_disjoint_prompt_is_an_empty_context);
    tcase_add_test(tc, a_warm_prompt_has_the_rows_of_a_cold_one_at_every_length_of_the_hit);
    tcase_add_test(tc, a_hit_and_what_grows_from_it_leave_the_prefix_in_place);
    srunner_run_all(sr, CK_ENV);
    n_failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return n_failed != 0;
}

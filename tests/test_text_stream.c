/* Streaming text: characters and stop strings that come in pieces.
 *
 * Method: hand-made cases on a small vocabulary of letters and single bytes of characters; then
 * random tokens and stop strings, fed one by one and compared after each with a plain version that
 * looks at the whole text every time. */
#include "model/model.h"
#include "model/utf8.h"
#include "tests/vocab_file.h"

/* "e2" and the like: tokens of single bytes, in the files' alphabet. */
static const char *const tokens[] = {
    "a",
    "b",
    "c",
    "ab",
    "cab",
    "bcab",
    "\xc3\xa2", /* e2 */
    "\xc4\xa4", /* 82 */
    "\xc2\xac", /* ac */
    "\xc3\xb0", /* f0 */
    "\xc5\x81", /* 9f */
    "\xc4\xba", /* 98 */
    "\xc4\xa2", /* 80 */
    "\xc3\xbf", /* ff */
    "<|end|>",
    "b\xc3\xa2" /* b e2 */,
    "\304\244\302\254c" /* 82 ac c */,
};
enum {
    N_TOKENS = sizeof tokens / sizeof tokens[0],
    A = 0,
    B,
    C,
    AB,
    CAB,
    BCAB,
    E2,
    H82,
    AC,
    F0,
    H9F,
    H98,
    H80,
    FF,
    END,
    B_E2,
    H82_AC_C
};
static const int32_t types[N_TOKENS] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 3, 1, 1};

static struct gguf *file;
static struct tokenizer *tok;
static struct text_stream *stream;

static void open_vocabulary(void)
{
    static struct vocab_file f;
    static const char *const merges[] = {"a b"};
    struct kv_why why = {"ok"};

    vf_begin(&f);
    vf_text(&f, "tokenizer.ggml.model", "gpt2");
    vf_text(&f, "tokenizer.ggml.pre", "gpt-2");
    vf_texts(&f, "tokenizer.ggml.tokens", tokens, N_TOKENS);
    vf_array(&f, "tokenizer.ggml.token_type", GGUF_VALUE_I32, N_TOKENS);
    vf_put(&f, types, sizeof types);
    vf_texts(&f, "tokenizer.ggml.merges", merges, 1);
    file = vf_open(&f);
    ck_assert_msg(tokenizer_open(file, &tok, &why) == 0, "%s", why.text);
}

static void close_vocabulary(void)
{
    tokenizer_close(tok);
    gguf_close(file);
}

static void open_stream(const char *const *stops, size_t n)
{
    struct kv_why why = {"ok"};

    ck_assert_msg(text_open(tok, stops, n, &stream, &why) == 0, "%s", why.text);
}

/* Feed a token: this text comes out, with so many tokens. */
static void feeds(uint32_t id, const char *text, uint32_t n_tokens)
{
    struct text_piece piece;

    ck_assert_int_eq(text_feed(stream, id, &piece), 0);
    ck_assert_msg(piece.len == strlen(text) && memcmp(piece.data, text, piece.len) == 0,
                  "token %u: \"%.*s\" in place of \"%s\"", id, (int)piece.len, piece.data, text);
    ck_assert_uint_eq(piece.n_tokens, n_tokens);
    ck_assert(!piece.stopped);
    ck_assert_uint_eq(piece.n_keep, 0);
}

static void stops_with(uint32_t id, const char *text, uint32_t n_tokens, uint32_t n_keep)
{
    struct text_piece piece;

    ck_assert_int_eq(text_feed(stream, id, &piece), 0);
    ck_assert(piece.stopped);
    ck_assert_msg(piece.len == strlen(text) && memcmp(piece.data, text, piece.len) == 0,
                  "token %u: \"%.*s\" in place of \"%s\"", id, (int)piece.len, piece.data, text);
    ck_assert_uint_eq(piece.n_tokens, n_tokens);
    ck_assert_uint_eq(piece.n_keep, n_keep);
    for (int i = 0; i < 3; i++) { /* and nothing more */
        ck_assert_int_eq(i == 1 ? text_flush(stream, &piece) : text_feed(stream, A, &piece), 0);
        ck_assert(piece.stopped);
        ck_assert_uint_eq(piece.len, 0);
        ck_assert_uint_eq(piece.n_tokens, 0);
        ck_assert_uint_eq(piece.n_keep, n_keep);
    }
    text_close(stream);
}

static void flushes(const char *text, uint32_t n_tokens)
{
    struct text_piece piece;

    ck_assert_int_eq(text_flush(stream, &piece), 0);
    ck_assert_msg(piece.len == strlen(text) && memcmp(piece.data, text, piece.len) == 0,
                  "flush: \"%.*s\" in place of \"%s\"", (int)piece.len, piece.data, text);
    ck_assert_uint_eq(piece.n_tokens, n_tokens);
    ck_assert(!piece.stopped);
    text_close(stream);
}

/* ---- Characters ---- */

START_TEST(a_character_in_pieces_leaves_whole)
{
    open_stream(NULL, 0);
    feeds(A, "a", 1);
    feeds(E2, "", 0);
    feeds(H82, "", 0);
    feeds(AC, "\xe2\x82\xac", 3);
    feeds(B_E2, "b", 0); /* the token is not all out */
    feeds(H82_AC_C, "\342\202\254c", 2);
    flushes("", 0);
}
END_TEST

START_TEST(bytes_that_cannot_become_a_character_are_replaced)
{
    open_stream(NULL, 0);
    feeds(FF, "\xef\xbf\xbd", 1);
    feeds(H82, "\xef\xbf\xbd", 1); /* nothing to continue */
    feeds(E2, "", 0);
    feeds(A, "\357\277\275a", 2);
    feeds(F0, "", 0);
    feeds(H9F, "", 0);
    feeds(H98, "", 0);
    feeds(F0, "\xef\xbf\xbd", 3); /* one for the longest part that could have become one */
    feeds(H80, "\xef\xbf\xbd\xef\xbf\xbd", 2); /* f0 80 never: one each */
    feeds(F0, "", 0);
    flushes("\xef\xbf\xbd", 1);
}
END_TEST

START_TEST(control_tokens_have_no_text)
{
    open_stream(NULL, 0);
    feeds(END, "", 1);
    feeds(E2, "", 0);
    feeds(END, "", 0); /* waits for its turn */
    feeds(H82, "", 0);
    feeds(AC, "\xe2\x82\xac", 4);
    flushes("", 0);
}
END_TEST

/* ---- Stop strings ---- */

START_TEST(what_may_begin_a_stop_string_is_held_back)
{
    static const char *const stops[] = {"abcabd"};

    open_stream(stops, 1);
    feeds(C, "c", 1);
    feeds(A, "", 0);
    feeds(BCAB, "", 0);
    feeds(C, "abc", 1); /* "abc" may still begin it; BCAB is not all out */
    feeds(E2, "", 0);   /* nothing is known of this yet */
    feeds(A, "abc\xef\xbf\xbd", 3);
    flushes("a", 1);
}
END_TEST

START_TEST(a_stop_string_ends_the_stream_before_it)
{
    static const char *const stops[] = {"xyz", "bc"}, *const one[] = {"b"};

    open_stream(stops, 2);
    feeds(A, "a", 1);
    feeds(A, "a", 1);
    feeds(AB, "a", 0);
    stops_with(CAB, "", 1, 3); /* AB holds a visible a; CAB nothing */
    open_stream(stops, 2);
    feeds(A, "a", 1);
    feeds(B, "", 0);
    stops_with(C, "", 0, 1);
    open_stream(stops, 2); /* all in one token, which is kept nowhere */
    feeds(END, "", 1);
    stops_with(BCAB, "", 0, 0);
    open_stream(one, 1); /* what is visible stands before it in the very token */
    stops_with(AB, "a", 1, 1);
}
END_TEST

START_TEST(of_stop_strings_completed_together_the_longest_counts)
{
    static const char *const stops[] = {"c", "bc", "abc"};

    open_stream(stops, 3);
    feeds(A, "", 0);
    feeds(A, "a", 1);
    stops_with(BCAB, "", 0, 1);
}
END_TEST

START_TEST(tokens_without_text_are_kept_only_before_a_visible_one)
{
    static const char *const stops[] = {"ab"};

    open_stream(stops, 1);
    feeds(C, "c", 1);
    feeds(END, "", 1);
    feeds(C, "c", 1);
    feeds(END, "", 1);
    feeds(A, "", 0);
    feeds(END, "", 0);
    stops_with(B, "", 0, 3);
}
END_TEST

START_TEST(a_stop_string_may_be_completed_by_a_character_in_pieces)
{
    static const char *const stops[] = {"b\xe2\x82\xac", "\357\277\275a"};

    open_stream(stops, 2);
    feeds(A, "a", 1);
    feeds(B_E2, "", 0);
    feeds(H82, "", 0);
    stops_with(AC, "", 0, 1);
    open_stream(stops, 2);
    feeds(E2, "", 0);
    stops_with(A, "", 0, 0); /* a replacement is text like any other */
    open_stream(stops, 2);
    feeds(B_E2, "", 0);
    feeds(END, "", 0);
    flushes("b\xef\xbf\xbd", 2);
}
END_TEST

START_TEST(bad_stop_strings_and_ids_are_refused)
{
    static char long_stop[TEXT_MAX_STOP_BYTES + 2];
    const char *stops[TEXT_MAX_STOPS + 1] = {"a", ""};
    struct text_stream *none = NULL;
    struct text_piece piece;
    struct kv_why why = {""};

    ck_assert_int_eq(text_open(tok, stops, 2, &none, &why), MODEL_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(why.text, "stop[1] is empty"));
    stops[1] = "a\xff";
    ck_assert_int_eq(text_open(tok, stops, 2, &none, &why), MODEL_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(why.text, "stop[1] is not UTF-8 at byte 1"));
    memset(long_stop, 'a', TEXT_MAX_STOP_BYTES + 1);
    stops[1] = long_stop;
    ck_assert_int_eq(text_open(tok, stops, 2, &none, &why), MODEL_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(why.text, "stop[1] has more than 1024 bytes"));
    ck_assert_int_eq(text_open(tok, stops, TEXT_MAX_STOPS + 1, &none, &why), MODEL_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(why.text, "stop has 17 strings"));
    ck_assert_ptr_null(none);
    long_stop[TEXT_MAX_STOP_BYTES] = '\0';
    open_stream(stops, 2);
    ck_assert_int_eq(text_feed(stream, N_TOKENS, &piece), MODEL_ERR_INVALID);
    ck_assert_int_eq(text_follow(stream, N_TOKENS), MODEL_ERR_INVALID);
    text_close(stream);
}
END_TEST

/* ---- Against the plain way ---- */

static uint64_t random_state;

static uint32_t random_below(uint32_t n)
{
    random_state = random_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)((random_state >> 33) % n);
}

enum { MAX_FED = 64, MAX_TEXT = 4 * MAX_FED * 4 };

/* The whole text of tokens, as far as its characters are whole; `all`: open ones replaced. */
static size_t plain_text(const uint32_t *ids, size_t n, bool all, char *out)
{
    struct utf8_assembler a = {0};
    size_t len = 0;
    bool again;

    for (size_t i = 0; i < n; i++) {
        struct gguf_string piece = tokenizer_piece(tok, ids[i], false);
        for (size_t j = 0; j < piece.len; j++)
            do
                len += utf8_push(&a, (unsigned char)piece.data[j], out + len, &again);
            while (again);
    }
    return all ? len + utf8_finish(&a, out + len) : len;
}

/* Where the first completed stop string begins, or -1. */
static long plain_stop(const char *text, size_t len, const char *const *stops, size_t n_stops)
{
    for (size_t end = 1; end <= len; end++) {
        size_t best = 0;
        for (size_t i = 0; i < n_stops; i++) {
            size_t n = strlen(stops[i]);
            if (n <= end && n > best && memcmp(text + end - n, stops[i], n) == 0)
                best = n;
        }
        if (best > 0)
            return (long)(end - best);
    }
    return -1;
}

static size_t plain_held(const char *text, size_t len, const char *const *stops, size_t n_stops)
{
    size_t held = 0;

    for (size_t i = 0; i < n_stops; i++)
        for (size_t n = strlen(stops[i]) - 1; n > held; n--)
            if (n <= len && memcmp(text + len - n, stops[i], n) == 0)
                held = n;
    return held;
}

/* Tokens up to the last one that, taken away with all behind it, makes less text than `cut`: the
 * others had nothing visible. */
static uint32_t plain_keep(const uint32_t *ids, size_t n, size_t cut)
{
    char text[MAX_TEXT];

    for (; n > 0; n--)
        if (tokenizer_piece(tok, ids[n - 1], false).len > 0 &&
            plain_text(ids, n - 1, false, text) < cut)
            return (uint32_t)n;
    return 0;
}

static void check_random_stream(const char *const *stops, size_t n_stops)
{
    uint32_t ids[MAX_FED], n_out = 0;
    char seen[MAX_TEXT], text[MAX_TEXT];
    size_t n_seen = 0, len, n;
    struct text_piece piece;
    long cut;

    open_stream(stops, n_stops);
    for (n = 0; n < MAX_FED;) {
        ids[n] = random_below(N_TOKENS);
        ck_assert_int_eq(text_feed(stream, ids[n++], &piece), 0);
        ck_assert_uint_le(n_seen + piece.len, sizeof seen);
        memcpy(seen + n_seen, piece.data, piece.len);
        n_seen += piece.len;
        n_out += piece.n_tokens;
        ck_assert_uint_eq(utf8_valid_prefix(piece.data, piece.len), piece.len);
        len = plain_text(ids, n, false, text);
        cut = plain_stop(text, len, stops, n_stops);
        ck_assert_int_eq(piece.stopped, cut >= 0);
        if (cut >= 0) {
            ck_assert_uint_eq(n_seen, (size_t)cut);
            ck_assert_mem_eq(seen, text, n_seen);
            ck_assert_uint_eq(piece.n_keep, plain_keep(ids, n, n_seen));
            ck_assert_uint_ge(n_out, piece.n_keep);
            break;
        }
        ck_assert_uint_eq(n_seen, len - plain_held(text, len, stops, n_stops));
        ck_assert_mem_eq(seen, text, n_seen);
        ck_assert_uint_le(n_out, n);
    }
    if (n == MAX_FED && !piece.stopped) {
        ck_assert_int_eq(text_flush(stream, &piece), 0);
        memcpy(seen + n_seen, piece.data, piece.len);
        n_seen += piece.len;
        len = plain_text(ids, n, true, text);
        cut = plain_stop(text, len, stops, n_stops);
        ck_assert_uint_eq(n_seen, cut >= 0 ? (size_t)cut : len);
        ck_assert_mem_eq(seen, text, n_seen);
        if (cut < 0)
            ck_assert_uint_eq(n_out + piece.n_tokens, n);
    }
    text_close(stream);
}

START_TEST(random_streams_are_as_the_whole_text_says)
{
    static const char *const pool[] = {"abcabcab",
                                       "bcc",
                                       "aaaa",
                                       "cabb",
                                       "\xe2\x82\xac",
                                       "c\xef\xbf\xbd",
                                       "bb\342\202\254a",
                                       "abab",
                                       "ccc",
                                       "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"};
    const char *stops[3];

    random_state = 21;
    for (int i = 0; i < 1500; i++) {
        size_t n_stops = random_below(4);
        for (size_t j = 0; j < n_stops; j++)
            stops[j] = pool[random_below(sizeof pool / sizeof pool[0])];
        check_random_stream(stops, n_stops);
    }
}
END_TEST

/* ---- SentencePiece ---- */

START_TEST(the_space_prefix_goes_only_behind_a_control_token)
{
    static const char *const spm_tokens[] = {"<unk>", "<s>", "\342\226\201a", "b"};
    static const int32_t spm_types[] = {2, 3, 1, 1};
    static const float scores[] = {0, 0, -1, -2};
    static struct vocab_file f;
    struct gguf *g;
    struct tokenizer *t = NULL, *old = tok;
    struct kv_why why = {"ok"};

    vf_begin(&f);
    vf_text(&f, "tokenizer.ggml.model", "llama");
    vf_texts(&f, "tokenizer.ggml.tokens", spm_tokens, 4);
    vf_array(&f, "tokenizer.ggml.token_type", GGUF_VALUE_I32, 4);
    vf_put(&f, spm_types, sizeof spm_types);
    vf_array(&f, "tokenizer.ggml.scores", GGUF_VALUE_F32, 4);
    vf_put(&f, scores, sizeof scores);
    vf_u32(&f, "tokenizer.ggml.bos_token_id", 1);
    g = vf_open(&f);
    ck_assert_msg(tokenizer_open(g, &t, &why) == 0, "%s", why.text);
    tok = t;
    open_stream(NULL, 0);
    feeds(2, " a", 1); /* the answer goes on from other text */
    feeds(1, "", 1);
    feeds(2, "a", 1);
    feeds(2, " a", 1);
    flushes("", 0);
    open_stream(NULL, 0);
    ck_assert_int_eq(text_follow(stream, 1), 0);
    feeds(2, "a", 1);
    flushes("", 0);
    open_stream(NULL, 0);
    ck_assert_int_eq(text_follow(stream, 3), 0);
    feeds(2, " a", 1);
    flushes("", 0);
    tok = old;
    tokenizer_close(t);
    gguf_close(g);
}
END_TEST

static Suite *text_suite(void)
{
    Suite *s = suite_create("text stream");
    TCase *tc = tcase_create("text stream");

    tcase_set_timeout(tc, 120);
    tcase_add_checked_fixture(tc, open_vocabulary, close_vocabulary);
    tcase_add_test(tc, a_character_in_pieces_leaves_whole);
    tcase_add_test(tc, bytes_that_cannot_become_a_character_are_replaced);
    tcase_add_test(tc, control_tokens_have_no_text);
    tcase_add_test(tc, what_may_begin_a_stop_string_is_held_back);
    tcase_add_test(tc, a_stop_string_ends_the_stream_before_it);
    tcase_add_test(tc, of_stop_strings_completed_together_the_longest_counts);
    tcase_add_test(tc, tokens_without_text_are_kept_only_before_a_visible_one);
    tcase_add_test(tc, a_stop_string_may_be_completed_by_a_character_in_pieces);
    tcase_add_test(tc, bad_stop_strings_and_ids_are_refused);
    tcase_add_test(tc, random_streams_are_as_the_whole_text_says);
    tcase_add_test(tc, the_space_prefix_goes_only_behind_a_control_token);
    suite_add_tcase(s, tc);
    return s;
}

int main(void)
{
    SRunner *runner = srunner_create(text_suite());
    int failed;

    srunner_run_all(runner, CK_NORMAL);
    failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed == 0 ? 0 : 1;
}

/* Tokenizers against the answers of other programs, and against what must hold of any text.
 *
 * Method: every text of the reference vectors both ways; small vocabularies written here whose
 * every field is broken in turn; random texts; a plain quadratic merge as the model of the fast
 * one; and texts of a million bytes without a place to cut, with the time that they may take. */
#include "model/model.h"
#include "tests/fail_alloc.h"
#include "tests/vocab_file.h"

#include <cjson/cJSON.h>
#include <time.h>

/* ---- Helpers ---- */

static struct gguf *file;
static struct tokenizer *tok;

static void open_tokenizer(const char *path)
{
    struct kv_why why = {"ok"};

    ck_assert_msg(gguf_open(path, &file, &why) == 0, "%s: %s", path, why.text);
    ck_assert_msg(tokenizer_open(file, &tok, &why) == 0, "%s: %s", path, why.text);
}

static void close_tokenizer(void)
{
    tokenizer_close(tok);
    gguf_close(file);
    tok = NULL;
    file = NULL;
}

static void encode(const char *text, size_t len, unsigned flags, struct token_list *ids,
                   size_t *n_dropped)
{
    struct kv_why why = {"ok"};
    int rc = tokenizer_encode(tok, text, len, flags, ids, n_dropped, &why);

    ck_assert_msg(rc == 0, "%s", why.text);
}

/* Compare, and name the text and the first place where they part. */
static void assert_ids(const struct token_list *ids, const uint32_t *want, size_t n_want,
                       const char *text)
{
    size_t i, n = ids->n < n_want ? ids->n : n_want;

    for (i = 0; i < n; i++)
        ck_assert_msg(ids->ids[i] == want[i], "\"%s\": id %zu is %u, want %u", text, i, ids->ids[i],
                      want[i]);
    ck_assert_msg(ids->n == n_want, "\"%s\": %zu ids, want %zu", text, ids->n, n_want);
}

static void assert_decodes(const struct token_list *ids, bool special, const char *text, size_t len)
{
    char *back = NULL;
    size_t n = 0;

    ck_assert_int_eq(tokenizer_decode(tok, ids->ids, ids->n, special, &back, &n), 0);
    ck_assert_msg(n == len && memcmp(back, text, len) == 0, "\"%s\" comes back as \"%s\"", text,
                  back);
    free(back);
}

static uint64_t random_state;

static uint32_t random_below(uint32_t n)
{
    random_state = random_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)((random_state >> 33) % n);
}

/* Any character of Unicode, plain ones more often. */
static size_t random_char(char *out)
{
    static const char plain[] = "aeinrst  \n\t'.,<|>_0123AZ\xc2\xa0";
    uint32_t c;

    switch (random_below(6)) {
    case 0:
        c = random_below(0x80);
        break;
    case 1:
        c = random_below(0x800);
        break;
    case 2:
        do
            c = random_below(0x110000);
        while (c >= 0xd800 && c < 0xe000);
        break;
    case 3:
        c = 0x2000 + random_below(0x90);
        break;
    default:
        c = (unsigned char)plain[random_below(sizeof plain - 3)];
        break;
    }
    if (c < 0x80) {
        out[0] = (char)c;
        return 1;
    }
    if (c < 0x800) {
        out[0] = (char)(0xc0 | c >> 6);
        out[1] = (char)(0x80 | (c & 0x3f));
        return 2;
    }
    if (c < 0x10000) {
        out[0] = (char)(0xe0 | c >> 12);
        out[1] = (char)(0x80 | (c >> 6 & 0x3f));
        out[2] = (char)(0x80 | (c & 0x3f));
        return 3;
    }
    out[0] = (char)(0xf0 | c >> 18);
    out[1] = (char)(0x80 | (c >> 12 & 0x3f));
    out[2] = (char)(0x80 | (c >> 6 & 0x3f));
    out[3] = (char)(0x80 | (c & 0x3f));
    return 4;
}

static size_t random_text(char *out, size_t max)
{
    size_t n = 0, want = random_below((uint32_t)max);

    while (n + 4 < want)
        n += random_char(out + n);
    out[n] = '\0';
    return n;
}

/* ---- Answers of other programs ---- */

static size_t json_ids(const cJSON *array, uint32_t *out, size_t max)
{
    const cJSON *item;
    size_t n = 0;

    cJSON_ArrayForEach(item, array)
    {
        ck_assert_uint_lt(n, max);
        out[n++] = (uint32_t)item->valuedouble;
    }
    return n;
}

static void check_text_line(const cJSON *line)
{
    const char *text = cJSON_GetObjectItem(line, "text")->valuestring;
    size_t len = strlen(text), n, n_dropped, n_special_dropped, i, n_lacking = 0;
    uint32_t want[4096];
    struct token_list ids = {0};
    char kept[4096];

    for (i = 0; i < len; i++)
        if (text[i] == '\x04' || text[i] == '\x13' || (unsigned char)text[i] == 0xf1)
            n_lacking++;
        else
            kept[i - n_lacking] = text[i];
    encode(text, len, 0, &ids, &n_dropped);
    n = json_ids(cJSON_GetObjectItem(line, "ids"), want, 4096);
    assert_ids(&ids, want, n, text);
    ck_assert_uint_eq(n_dropped, n_lacking);
    assert_decodes(&ids, false, kept, len - n_lacking);
    ids.n = 0;
    encode(text, len, TOKENIZE_SPECIAL | TOKENIZE_BOS, &ids, &n_special_dropped);
    n = json_ids(cJSON_GetObjectItem(line, "ids_special"), want, 4096);
    assert_ids(&ids, want, n, text);
    ck_assert_uint_eq(n_special_dropped, n_lacking);
    assert_decodes(&ids, true, kept, len - n_lacking);
    token_list_release(&ids);
}

START_TEST(every_text_of_the_default_model_has_the_reference_ids_both_ways)
{
    const char *path = REFERENCE "smollm2/tokens.jsonl";
    char *lines, *line, *save;
    size_t len, n = 0;

    if (skip_without("every_text_of_the_default_model_has_the_reference_ids_both_ways",
                     default_model()) ||
        skip_without("every_text_of_the_default_model_has_the_reference_ids_both_ways", path))
        return;
    open_tokenizer(default_model());
    ck_assert_str_eq(tokenizer_model(tok), "gpt2");
    ck_assert_str_eq(tokenizer_pre(tok), "smollm");
    ck_assert_uint_eq(tokenizer_n_vocab(tok), 49152);
    lines = read_whole(path, &len);
    for (line = strtok_r(lines, "\n", &save); line != NULL; line = strtok_r(NULL, "\n", &save)) {
        cJSON *json = cJSON_Parse(line);
        ck_assert_ptr_nonnull(json);
        check_text_line(json);
        cJSON_Delete(json);
        n++;
    }
    ck_assert_uint_eq(n, 75);
    free(lines);
    close_tokenizer();
}
END_TEST

/* One line of ids. */
static size_t line_ids(const char *line, uint32_t *out, size_t max)
{
    size_t n = 0;
    char *end;

    for (;; line = end) {
        unsigned long id = strtoul(line, &end, 10);
        if (end == line)
            return n;
        ck_assert_uint_lt(n, max);
        out[n++] = (uint32_t)id;
    }
}

static const struct vocabulary {
    const char *name, *model, *pre;
} vocabularies[] = {
    {"gpt-2", "gpt2", "gpt-2"},    {"starcoder", "gpt2", "starcoder"},
    {"refact", "gpt2", "refact"},  {"llama-spm", "llama", "default"},
    {"phi-3", "llama", "default"},
};

/* Texts stand between separator lines, their ids one line each. */
static size_t check_vocabulary(char *texts, char *answers)
{
    static const char separator[] = "\n__ggml_vocab_test__\n";
    char *text = texts, *line = answers, *end, *line_end;
    uint32_t want[4096];
    size_t n = 0, n_dropped;

    for (; (end = strstr(text, separator)) != NULL; text = end + sizeof separator - 1, n++) {
        struct token_list ids = {0};
        *end = '\0';
        line_end = strchr(line, '\n');
        ck_assert_ptr_nonnull(line_end);
        *line_end = '\0';
        encode(text, (size_t)(end - text), 0, &ids, &n_dropped);
        assert_ids(&ids, want, line_ids(line, want, 4096), text);
        ck_assert_uint_eq(n_dropped, 0);
        assert_decodes(&ids, false, text, (size_t)(end - text));
        token_list_release(&ids);
        line = line_end + 1;
    }
    return n;
}

START_TEST(every_reference_vocabulary_gives_the_recorded_ids_both_ways)
{
    const struct vocabulary *v = &vocabularies[_i];
    char path[3][512], *texts, *answers;
    size_t len;

    for (int i = 0; i < 3; i++)
        snprintf(path[i], sizeof path[i], REFERENCE "tokenizer/ggml-vocab-%s.gguf%s", v->name,
                 i == 0   ? ""
                 : i == 1 ? ".inp"
                          : ".out");
    if (skip_without("every_reference_vocabulary_gives_the_recorded_ids_both_ways", path[0]))
        return;
    open_tokenizer(path[0]);
    ck_assert_str_eq(tokenizer_model(tok), v->model);
    ck_assert_str_eq(tokenizer_pre(tok), v->pre);
    texts = read_whole(path[1], &len);
    answers = read_whole(path[2], &len);
    ck_assert_uint_eq(check_vocabulary(texts, answers), 46);
    free(texts);
    free(answers);
    close_tokenizer();
}
END_TEST

START_TEST(a_pre_tokenizer_that_is_not_there_is_refused_by_name)
{
    const char *path = REFERENCE "tokenizer/ggml-vocab-deepseek-coder.gguf";
    struct kv_why why = {""};

    if (skip_without("a_pre_tokenizer_that_is_not_there_is_refused_by_name", path))
        return;
    ck_assert_int_eq(gguf_open(path, &file, &why), 0);
    ck_assert_int_eq(tokenizer_open(file, &tok, &why), MODEL_ERR_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(why.text, "tokenizer.ggml.pre"));
    ck_assert_ptr_nonnull(strstr(why.text, "deepseek-coder"));
    ck_assert_ptr_null(tok);
    gguf_close(file);
}
END_TEST

START_TEST(the_golden_story_decodes_from_its_ids)
{
    char *text, *line, *story;
    uint32_t ids[256];
    struct token_list list = {.ids = ids};
    size_t len, n_story;

    if (skip_without("the_golden_story_decodes_from_its_ids",
                     REFERENCE "stories260K/stories260K-f32.gguf"))
        return;
    open_tokenizer(REFERENCE "stories260K/stories260K-f32.gguf");
    text = read_whole(REFERENCE "stories260K/stories260K.greedy200.txt", &len);
    line = read_whole(REFERENCE "stories260K/stories260K.greedy200.ids", &len);
    list.n = line_ids(line, ids, 256);
    ck_assert_uint_ge(list.n, 200);
    ck_assert_int_eq(tokenizer_decode(tok, list.ids, list.n, false, &story, &n_story), 0);
    /* The recorded text may go on for a token more. */
    ck_assert_uint_gt(n_story, strlen(text) - 8);
    ck_assert_int_eq(strncmp(text, story, n_story), 0);
    free(story);
    free(text);
    free(line);
    close_tokenizer();
}
END_TEST

/* ---- What holds of any text ---- */

/* Encoding and decoding give the text without the bytes that were counted as lacking. */
static void check_round_trips(unsigned n_texts, unsigned max)
{
    char *text = malloc(max + 8), *back;
    struct token_list ids = {0};
    size_t len, n_back, n_dropped, at, j;

    for (unsigned i = 0; i < n_texts; i++) {
        len = random_text(text, max);
        ids.n = 0;
        encode(text, len, 0, &ids, &n_dropped);
        for (j = 0; j < ids.n; j++)
            ck_assert(!tokenizer_is_control(tok, ids.ids[j]));
        ck_assert_int_eq(tokenizer_decode(tok, ids.ids, ids.n, false, &back, &n_back), 0);
        ck_assert_uint_eq(n_back + n_dropped, len);
        for (j = 0, at = 0; j < len && at < n_back; j++)
            at += text[j] == back[at];
        ck_assert_msg(at == n_back, "text %u of seed 7 comes back changed", i);
        free(back);
    }
    token_list_release(&ids);
    free(text);
}

START_TEST(any_text_survives_but_for_the_bytes_that_are_counted)
{
    const char *path = default_model();
    char vocab[512];

    random_state = 7;
    if (!skip_without("any_text_survives_but_for_the_bytes_that_are_counted", path)) {
        open_tokenizer(path);
        check_round_trips(1500, 200);
        close_tokenizer();
    }
    for (size_t i = 0; i < sizeof vocabularies / sizeof vocabularies[0]; i++) {
        snprintf(vocab, sizeof vocab, REFERENCE "tokenizer/ggml-vocab-%s.gguf",
                 vocabularies[i].name);
        if (skip_without("any_text_survives_but_for_the_bytes_that_are_counted", vocab))
            continue;
        open_tokenizer(vocab);
        check_round_trips(500, 200);
        close_tokenizer();
    }
}
END_TEST

START_TEST(a_million_bytes_without_a_place_to_cut_take_no_more_than_their_share)
{
    static const char *const units[] = {"a", "ab", "the", " ", "\n ", "'", "<|", "\xe4\xb8\x80"};
    const size_t max = 1 << 20;
    const char *path = _i == 0 ? default_model() : REFERENCE "tokenizer/ggml-vocab-llama-spm.gguf";
    char *text = malloc(max + 8);
    struct token_list ids = {0};
    size_t n, at, len, n_dropped;

    if (skip_without("a_million_bytes_without_a_place_to_cut_take_no_more_than_their_share",
                     path)) {
        free(text);
        return;
    }
    open_tokenizer(path);
    /* Half a second each; quadratic merging takes minutes and ends at the case's time limit. */
    for (size_t i = 0; i < sizeof units / sizeof units[0]; i++) {
        n = strlen(units[i]);
        len = i == 0 ? max : max / 8; /* sanitizers are slow */
        for (at = 0; at + n <= len; at += n)
            memcpy(text + at, units[i], n);
        text[at++] = 'x';
        ids.n = 0;
        encode(text, at, i & 1 ? TOKENIZE_SPECIAL : 0, &ids, &n_dropped);
        text[at] = '\0';
        assert_decodes(&ids, true, text, at);
    }
    token_list_release(&ids);
    free(text);
    close_tokenizer();
}
END_TEST

/* ---- Small vocabularies, field by field ---- */

/* "a" "b" "c" "ab" "abc" "bc" " " and two markers; rules as the tests want them. */
static const char *const bpe_tokens[] = {
    "a", "b", "c", "ab", "abc", "bc", "\xc4\xa0", "<|im_start|>", "<|x|>", "'", "s", "\xc3\xa9"};
enum { N_BPE = sizeof bpe_tokens / sizeof bpe_tokens[0] };
static const int32_t bpe_types[N_BPE] = {1, 1, 1, 1, 1, 1, 1, 3, 4, 1, 1, 1};
static const char *const bpe_merges[] = {"b c", "a bc", "a b"};

struct bpe_spec {
    const char *model, *pre;
    const char *const *tokens;
    const int32_t *types;
    size_t n_types;
    const char *const *merges;
    size_t n_merges;
    int64_t bos, eos;
    int add_bos;
};

static const struct bpe_spec good_bpe = {.model = "gpt2",
                                         .pre = "gpt-2",
                                         .tokens = bpe_tokens,
                                         .types = bpe_types,
                                         .n_types = N_BPE,
                                         .merges = bpe_merges,
                                         .n_merges = 3,
                                         .bos = 7,
                                         .eos = -1,
                                         .add_bos = -1};

static struct gguf *write_bpe(const struct bpe_spec *spec)
{
    static struct vocab_file f;

    vf_begin(&f);
    if (spec->model != NULL)
        vf_text(&f, "tokenizer.ggml.model", spec->model);
    if (spec->pre != NULL)
        vf_text(&f, "tokenizer.ggml.pre", spec->pre);
    if (spec->tokens != NULL)
        vf_texts(&f, "tokenizer.ggml.tokens", spec->tokens, N_BPE);
    if (spec->types != NULL) {
        vf_array(&f, "tokenizer.ggml.token_type", GGUF_VALUE_I32, spec->n_types);
        vf_put(&f, spec->types, spec->n_types * 4);
    }
    if (spec->merges != NULL)
        vf_texts(&f, "tokenizer.ggml.merges", spec->merges, spec->n_merges);
    if (spec->bos >= 0)
        vf_u32(&f, "tokenizer.ggml.bos_token_id", (uint32_t)spec->bos);
    if (spec->eos >= 0)
        vf_u32(&f, "tokenizer.ggml.eos_token_id", (uint32_t)spec->eos);
    if (spec->add_bos >= 0)
        vf_bool(&f, "tokenizer.ggml.add_bos_token", (unsigned char)spec->add_bos);
    return vf_open(&f);
}

static void open_bpe(const struct bpe_spec *spec)
{
    struct kv_why why = {"ok"};

    file = write_bpe(spec);
    ck_assert_msg(tokenizer_open(file, &tok, &why) == 0, "%s", why.text);
}

static void assert_refused(const struct bpe_spec *spec, int want, const char *part)
{
    struct gguf *g = write_bpe(spec);
    struct tokenizer *none = NULL;
    struct kv_why why = {""};
    int rc = tokenizer_open(g, &none, &why);

    ck_assert_msg(rc == want, "%d in place of %d for %s: %s", rc, want, part, why.text);
    ck_assert_msg(strstr(why.text, part) != NULL, "no \"%s\" in \"%s\"", part, why.text);
    ck_assert_ptr_null(none);
    gguf_close(g);
}

START_TEST(a_vocabulary_with_a_broken_field_is_refused_with_the_key)
{
    static const char *const unknown[] = {"b c", "a x"};
    static const char *const makes_none[] = {"c b"};
    static const char *const no_space[] = {"bc"}, *const no_left[] = {" b"},
                             *const no_right[] = {"b "};
    static const char *const twice[] = {"a b", "b c", "a b"};
    static const char *const of_control[] = {"<|im_ start|>"};
    int32_t types[N_BPE];
    const char *tokens[N_BPE];
    struct bpe_spec spec;

#define REFUSED(change, rc, part)        \
    do {                                 \
        spec = good_bpe;                 \
        change;                          \
        assert_refused(&spec, rc, part); \
    } while (0)
    REFUSED(spec.model = NULL, MODEL_ERR_FORMAT, "tokenizer.ggml.model is missing");
    REFUSED(spec.model = "bert", MODEL_ERR_UNSUPPORTED, "tokenizer.ggml.model is \"bert\"");
    REFUSED(spec.pre = NULL, MODEL_ERR_UNSUPPORTED, "tokenizer.ggml.pre is missing");
    REFUSED(spec.pre = "qwen9", MODEL_ERR_UNSUPPORTED, "tokenizer.ggml.pre is \"qwen9\"");
    REFUSED(spec.tokens = NULL, MODEL_ERR_FORMAT, "tokenizer.ggml.tokens is missing");
    REFUSED(spec.n_types = N_BPE - 1, MODEL_ERR_FORMAT, "tokenizer.ggml.token_type has 11 items");
    REFUSED(spec.merges = NULL, MODEL_ERR_FORMAT, "tokenizer.ggml.merges is missing");
    REFUSED((spec.merges = unknown, spec.n_merges = 2), MODEL_ERR_FORMAT,
            "tokenizer.ggml.merges[1]");
    REFUSED((spec.merges = makes_none, spec.n_merges = 1), MODEL_ERR_FORMAT,
            "tokenizer.ggml.merges[0]");
    REFUSED((spec.merges = no_space, spec.n_merges = 1), MODEL_ERR_FORMAT,
            "tokenizer.ggml.merges[0]");
    REFUSED((spec.merges = no_left, spec.n_merges = 1), MODEL_ERR_FORMAT,
            "tokenizer.ggml.merges[0]");
    REFUSED((spec.merges = no_right, spec.n_merges = 1), MODEL_ERR_FORMAT,
            "tokenizer.ggml.merges[0]");
    REFUSED((spec.merges = twice, spec.n_merges = 3), MODEL_ERR_FORMAT,
            "tokenizer.ggml.merges[2] is the same rule as merges[0]");
    REFUSED((spec.merges = of_control, spec.n_merges = 1), MODEL_ERR_FORMAT,
            "tokenizer.ggml.merges[0]");
    REFUSED(spec.bos = N_BPE, MODEL_ERR_FORMAT, "tokenizer.ggml.bos_token_id is 12");
    REFUSED(spec.eos = UINT32_MAX, MODEL_ERR_FORMAT, "tokenizer.ggml.eos_token_id is 4294967295");
    REFUSED((spec.bos = -1, spec.add_bos = 1), MODEL_ERR_FORMAT, "tokenizer.ggml.bos_token_id");

    memcpy(types, bpe_types, sizeof types);
    types[3] = 7;
    REFUSED(spec.types = types, MODEL_ERR_FORMAT, "tokenizer.ggml.token_type[3] is 7");
    types[3] = -1;
    REFUSED(spec.types = types, MODEL_ERR_FORMAT, "tokenizer.ggml.token_type[3] is -1");
    types[3] = 6;
    REFUSED(spec.types = types, MODEL_ERR_FORMAT, "tokenizer.ggml.token_type[3] is 6");
    memcpy(tokens, bpe_tokens, sizeof tokens);
    tokens[5] = "b";
    REFUSED(spec.tokens = tokens, MODEL_ERR_FORMAT,
            "tokenizer.ggml.tokens[5] is the same text as tokens[1]");
    tokens[5] = "";
    REFUSED(spec.tokens = tokens, MODEL_ERR_FORMAT, "tokenizer.ggml.tokens[5] is empty");
    tokens[5] = "b c";
    REFUSED(spec.tokens = tokens, MODEL_ERR_FORMAT, "tokenizer.ggml.tokens[5]");
    tokens[5] = "\xc5\x84";
    REFUSED(spec.tokens = tokens, MODEL_ERR_FORMAT, "tokenizer.ggml.tokens[5]");
#undef REFUSED
}
END_TEST

START_TEST(a_token_of_too_many_bytes_is_refused)
{
    const char *tokens[N_BPE];
    struct bpe_spec spec = good_bpe;
    char *text = calloc(1, 1026);

    memset(text, 'q', 1025);
    memcpy(tokens, bpe_tokens, sizeof tokens);
    tokens[8] = text;
    spec.tokens = tokens;
    assert_refused(&spec, MODEL_ERR_FORMAT, "tokenizer.ggml.tokens[8] has 1025 bytes");
    text[1024] = '\0';
    open_bpe(&spec);
    close_tokenizer();
    free(text);
}
END_TEST

static void assert_encodes(const char *text, unsigned flags, const char *want)
{
    struct token_list ids = {0};
    uint32_t list[64];

    encode(text, strlen(text), flags, &ids, NULL);
    assert_ids(&ids, list, line_ids(want, list, 64), text);
    token_list_release(&ids);
}

START_TEST(the_earliest_rule_is_applied_first_and_words_are_apart)
{
    open_bpe(&good_bpe);
    assert_encodes("", 0, "");
    assert_encodes("abc", 0, "4"); /* b c before a b */
    assert_encodes("ab", 0, "3");
    assert_encodes("ababc", 0, "3 4");
    assert_encodes("a bc", 0, "0 6 5"); /* nothing merges over a space */
    assert_encodes("ab's", 0, "3 9 10");
    close_tokenizer();
}
END_TEST

START_TEST(a_byte_that_the_vocabulary_lacks_is_left_out_and_counted)
{
    struct token_list ids = {0};
    size_t n_dropped = 9;
    uint32_t want[8];

    open_bpe(&good_bpe);
    encode("azb", 3, 0, &ids, &n_dropped); /* one word: what is left merges */
    assert_ids(&ids, want, line_ids("3", want, 8), "azb");
    ck_assert_uint_eq(n_dropped, 1);
    ids.n = 0;
    encode("\xc3\xa9z", 3, 0, &ids, &n_dropped); /* U+00E9 stands for the byte e9, not for c3 a9 */
    ck_assert_uint_eq(ids.n, 0);
    ck_assert_uint_eq(n_dropped, 3);
    token_list_release(&ids);
    close_tokenizer();
}
END_TEST

START_TEST(markers_are_tokens_only_where_asked_for_and_the_longest_wins)
{
    const char *tokens[N_BPE];
    struct bpe_spec spec = good_bpe;
    struct token_list ids = {0};
    size_t n_dropped;

    memcpy(tokens, bpe_tokens, sizeof tokens);
    tokens[8] = "<|im_start|>a";
    spec.tokens = tokens;
    open_bpe(&spec);
    encode("<|im_start|>", 12, 0, &ids, &n_dropped);
    for (size_t i = 0; i < ids.n; i++)
        ck_assert(ids.ids[i] != 7 && ids.ids[i] != 8);
    ck_assert_uint_eq(n_dropped + ids.n, 12);
    token_list_release(&ids);
    assert_encodes("<|im_start|>b", TOKENIZE_SPECIAL, "7 1");
    assert_encodes("b<|im_start|>ab", TOKENIZE_SPECIAL, "1 8 1");
    assert_encodes("a<|im_start|>b<|im_start|>", TOKENIZE_SPECIAL, "0 7 1 7");
    ck_assert_int_eq(tokenizer_find(tok, "<|im_start|>"), 7);
    ck_assert_int_eq(tokenizer_find(tok, "<|im_start|>a"), 8);
    ck_assert_int_eq(tokenizer_find(tok, "<|im_start"), -1);
    ck_assert_int_eq(tokenizer_find(tok, "<|im_start|>ab"), -1);
    ck_assert_int_eq(tokenizer_find(tok, "ab"), -1);
    ck_assert(tokenizer_is_control(tok, 7) && !tokenizer_is_control(tok, 8));
    ck_assert_uint_eq(tokenizer_piece(tok, 7, false).len, 0);
    ck_assert_uint_eq(tokenizer_piece(tok, 7, true).len, 12);
    ck_assert_uint_eq(tokenizer_piece(tok, 8, false).len, 13);
    close_tokenizer();
}
END_TEST

START_TEST(the_begin_token_comes_where_file_and_caller_ask_for_it)
{
    struct bpe_spec spec = good_bpe;

    open_bpe(&spec);
    assert_encodes("a", TOKENIZE_BOS, "0");
    close_tokenizer();
    spec.add_bos = 1;
    open_bpe(&spec);
    assert_encodes("a", TOKENIZE_BOS, "7 0");
    assert_encodes("", TOKENIZE_BOS, "7");
    assert_encodes("a", 0, "0");
    close_tokenizer();
}
END_TEST

START_TEST(end_tokens_are_those_named_by_key_and_the_well_known_markers)
{
    const char *tokens[N_BPE];
    struct bpe_spec spec = good_bpe;

    memcpy(tokens, bpe_tokens, sizeof tokens);
    tokens[7] = "<|stop|>";
    tokens[8] = "<|im_end|>"; /* user-defined in this file */
    spec.tokens = tokens;
    spec.eos = 7;
    open_bpe(&spec);
    for (uint32_t id = 0; id < N_BPE; id++)
        ck_assert_int_eq(tokenizer_is_end(tok, id), id == 7 || id == 8);
    ck_assert(tokenizer_is_control(tok, 8));
    close_tokenizer();
}
END_TEST

START_TEST(invalid_text_is_refused_with_its_offset_and_the_list_stays)
{
    static const struct {
        const char *text;
        size_t len, bad;
    } cases[] = {
        {"\xff", 1, 0},
        {"a\x80", 2, 1},
        {"ab\xc3", 3, 2},
        {"\xc0\xaf", 2, 0},
        {"a\xe0\x80\x80", 4, 1},
        {"\xed\xa0\x80", 3, 0},
        {"\xc3\xa9\xf4\x90\x80\x80", 6, 2},
        {"\xf5\x80\x80\x80", 4, 0},
        {"abc\xe2\x82", 5, 3},
        {"\xf0\x9f\x98z", 4, 0},
    };
    struct token_list ids = {0};
    struct kv_why why;
    char want[32];
    size_t n_dropped = 5;

    open_bpe(&good_bpe);
    ck_assert_int_eq(token_list_add(&ids, 2), 0);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ck_assert_int_eq(
            tokenizer_encode(tok, cases[i].text, cases[i].len, 0, &ids, &n_dropped, &why),
            MODEL_ERR_UTF8);
        snprintf(want, sizeof want, "at byte %zu ", cases[i].bad);
        ck_assert_msg(strstr(why.text, want) != NULL, "case %zu: %s", i, why.text);
        ck_assert_uint_eq(ids.n, 1);
        ck_assert_uint_eq(n_dropped, 5);
    }
    token_list_release(&ids);
    close_tokenizer();
}
END_TEST

START_TEST(a_text_of_more_than_the_limit_is_refused_before_it_is_read)
{
    struct token_list ids = {0};
    struct kv_why why = {""};

    open_bpe(&good_bpe);
    ck_assert_int_eq(
        tokenizer_encode(tok, "a", (size_t)TOKENIZE_MAX_BYTES + 1, 0, &ids, NULL, &why),
        MODEL_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(why.text, "4194305"));
    close_tokenizer();
}
END_TEST

START_TEST(an_id_past_the_vocabulary_is_refused)
{
    const uint32_t ids[] = {0, N_BPE};
    char *text = NULL;
    size_t len;

    open_bpe(&good_bpe);
    ck_assert_int_eq(tokenizer_decode(tok, ids, 2, false, &text, &len), MODEL_ERR_INVALID);
    ck_assert_ptr_null(text);
    close_tokenizer();
}
END_TEST

/* ---- SentencePiece of a small vocabulary ---- */

static const char *const spm_tokens[] = {
    "<unk>", "<s>", "</s>",          "\xe2\x96\x81", "a",      "b",  "ab",
    "ba",    "aa",  "\342\226\201a", "<0x0A>",       "<0xC3>", "<x>"};
enum { N_SPM = sizeof spm_tokens / sizeof spm_tokens[0] };
static const int32_t spm_types[N_SPM] = {2, 3, 3, 1, 1, 1, 1, 1, 1, 1, 6, 6, 4};
static const float spm_scores[N_SPM] = {0, 0, 0, -9, -9, -9, -1, -1, -2, -0.5f, 0, 0, 0};

struct spm_spec {
    const float *scores;
    size_t n_scores;
    const char *const *tokens;
    int space_prefix, trims;
};

static const struct spm_spec good_spm = {
    .scores = spm_scores, .n_scores = N_SPM, .tokens = spm_tokens, .space_prefix = -1, .trims = -1};

static struct gguf *write_spm(const struct spm_spec *spec)
{
    static struct vocab_file f;

    vf_begin(&f);
    vf_text(&f, "tokenizer.ggml.model", "llama");
    vf_texts(&f, "tokenizer.ggml.tokens", spec->tokens, N_SPM);
    vf_array(&f, "tokenizer.ggml.token_type", GGUF_VALUE_I32, N_SPM);
    vf_put(&f, spm_types, sizeof spm_types);
    if (spec->scores != NULL) {
        vf_array(&f, "tokenizer.ggml.scores", GGUF_VALUE_F32, spec->n_scores);
        vf_put(&f, spec->scores, spec->n_scores * 4);
    }
    vf_u32(&f, "tokenizer.ggml.bos_token_id", 1);
    if (spec->space_prefix >= 0)
        vf_bool(&f, "tokenizer.ggml.add_space_prefix", (unsigned char)spec->space_prefix);
    if (spec->trims >= 0)
        vf_bool(&f, "tokenizer.ggml.remove_extra_whitespaces", (unsigned char)spec->trims);
    return vf_open(&f);
}

static void open_spm(const struct spm_spec *spec)
{
    struct kv_why why = {"ok"};

    file = write_spm(spec);
    ck_assert_msg(tokenizer_open(file, &tok, &why) == 0, "%s", why.text);
}

static void assert_spm_refused(const struct spm_spec *spec, int want, const char *part)
{
    struct gguf *g = write_spm(spec);
    struct tokenizer *none = NULL;
    struct kv_why why = {""};

    ck_assert_int_eq(tokenizer_open(g, &none, &why), want);
    ck_assert_msg(strstr(why.text, part) != NULL, "no \"%s\" in \"%s\"", part, why.text);
    gguf_close(g);
}

START_TEST(the_best_score_is_merged_first_and_the_leftmost_of_equals)
{
    struct spm_spec spec = good_spm;

    spec.space_prefix = 0;
    open_spm(&spec);
    ck_assert_str_eq(tokenizer_pre(tok), "");
    assert_encodes("aba", 0, "6 4"); /* ab and ba score the same */
    assert_encodes("bab", 0, "7 5");
    assert_encodes("aab", 0, "4 6");
    assert_encodes("aaa", 0, "8 4");
    assert_encodes(" ab", 0, "9 5"); /* the space takes the a first */
    assert_encodes("a\n", 0, "4 10");
    close_tokenizer();
}
END_TEST

START_TEST(the_space_prefix_goes_on_at_the_start_and_behind_markers_and_comes_off_again)
{
    struct token_list ids = {0};
    uint32_t want[16];

    open_spm(&good_spm);
    assert_encodes("", 0, "");
    assert_encodes("a", 0, "9");
    assert_encodes("a", TOKENIZE_BOS, "1 9");
    assert_encodes(" a", 0, "3 9");
    encode("a</s> b<x>a", 11, TOKENIZE_SPECIAL, &ids, NULL);
    assert_ids(&ids, want, line_ids("9 2 3 3 5 12 9", want, 16), "markers");
    assert_decodes(&ids, true, "a</s> b<x>a", 11);
    assert_decodes(&ids, false, "a b<x>a", 7);
    token_list_release(&ids);
    close_tokenizer();
}
END_TEST

START_TEST(what_no_token_covers_becomes_bytes_and_then_is_counted)
{
    struct token_list ids = {0};
    size_t n_dropped;
    uint32_t want[8];
    struct spm_spec spec = good_spm;

    spec.space_prefix = 0;
    open_spm(&spec);
    encode("a\xc3\xa9", 3, 0, &ids, &n_dropped); /* <0xC3> is there, <0xA9> is not */
    assert_ids(&ids, want, line_ids("4 11", want, 8), "a U+00E9");
    ck_assert_uint_eq(n_dropped, 1);
    ids.n = 0;
    encode("<x></s>", 7, 0, &ids, &n_dropped); /* markers are no text's business */
    ck_assert_uint_eq(ids.n, 0);
    ck_assert_uint_eq(n_dropped, 7);
    token_list_release(&ids);
    close_tokenizer();
}
END_TEST

START_TEST(a_broken_sentencepiece_field_is_refused_with_the_key)
{
    float scores[N_SPM];
    const char *tokens[N_SPM];
    struct spm_spec spec = good_spm;

    spec.scores = NULL;
    assert_spm_refused(&spec, MODEL_ERR_FORMAT, "tokenizer.ggml.scores is missing");
    spec = good_spm;
    spec.n_scores = N_SPM - 1;
    assert_spm_refused(&spec, MODEL_ERR_FORMAT, "tokenizer.ggml.scores has 12 items");
    memcpy(scores, spm_scores, sizeof scores);
    scores[4] = __builtin_nanf("");
    spec = good_spm;
    spec.scores = scores;
    assert_spm_refused(&spec, MODEL_ERR_FORMAT, "tokenizer.ggml.scores[4]");
    memcpy(tokens, spm_tokens, sizeof tokens);
    tokens[10] = "<0xG0>";
    spec = good_spm;
    spec.tokens = tokens;
    assert_spm_refused(&spec, MODEL_ERR_FORMAT, "tokenizer.ggml.tokens[10]");
    spec = good_spm;
    spec.trims = 1;
    assert_spm_refused(&spec, MODEL_ERR_UNSUPPORTED, "tokenizer.ggml.remove_extra_whitespaces");
}
END_TEST

/* ---- Against the plain way ---- */

/* Merge the best pair of the whole list again and again, by the texts of the tokens alone. */
static size_t plain_spm(const char *text, size_t len, uint32_t *ids)
{
    size_t n = len, i, best, j;
    float best_score;
    uint32_t id, best_id;
    struct {
        const char *at;
        size_t len;
    } part[64];

    for (i = 0; i < n; i++) {
        part[i].at = text + i;
        part[i].len = 1;
    }
    for (;;) {
        best = n;
        best_score = -1e30f;
        best_id = 0;
        for (i = 0; i + 1 < n; i++)
            for (id = 3; id < 10; id++) {
                struct gguf_string piece = tokenizer_piece(tok, id, false);
                if (piece.len == part[i].len + part[i + 1].len &&
                    memcmp(piece.data, part[i].at, piece.len) == 0 && spm_scores[id] > best_score) {
                    best = i;
                    best_score = spm_scores[id];
                    best_id = id;
                }
            }
        if (best == n)
            break;
        (void)best_id;
        part[best].len += part[best + 1].len;
        for (j = best + 1; j + 1 < n; j++)
            part[j] = part[j + 1];
        n--;
    }
    for (i = 0; i < n; i++)
        for (id = 3; id < 10; id++) {
            struct gguf_string piece = tokenizer_piece(tok, id, false);
            if (piece.len == part[i].len && memcmp(piece.data, part[i].at, piece.len) == 0)
                ids[i] = id;
        }
    return n;
}

START_TEST(the_heap_merges_as_the_plain_search_does)
{
    const char *crossing[N_SPM];
    struct spm_spec spec = good_spm;
    struct token_list ids = {0};
    char text[64];
    uint32_t want[64];
    size_t len;

    /* "ba" becomes "b ": then a token goes over the border of words */
    if (_i == 1) {
        memcpy(crossing, spm_tokens, sizeof crossing);
        crossing[7] = "b\342\226\201";
        spec.tokens = crossing;
    }
    spec.space_prefix = 0;
    open_spm(&spec);
    random_state = 11;
    for (int i = 0; i < 3000; i++) {
        len = 1 + random_below(40);
        for (size_t j = 0; j < len; j++)
            text[j] = "ab "[random_below(3)];
        text[len] = '\0';
        ids.n = 0;
        encode(text, len, 0, &ids, NULL);
        assert_ids(&ids, want, plain_spm(text, len, want), text);
    }
    token_list_release(&ids);
    close_tokenizer();
}
END_TEST

/* ---- No memory ---- */

/* Everything that allocates, in one go. */
static int use_all(const struct gguf *g)
{
    static const char *const stops[] = {"ab", "c"};
    struct token_list ids = {0};
    struct tokenizer *t = NULL;
    struct text_stream *text = NULL;
    struct sampler *sampler = NULL;
    char *back = NULL;
    size_t len;
    int rc;

    rc = tokenizer_open(g, &t, NULL);
    if (rc == 0)
        rc = tokenizer_encode(t, "ab <x>abcab", 11, TOKENIZE_SPECIAL | TOKENIZE_BOS, &ids, NULL,
                              NULL);
    if (rc < 0 && ids.n > 0)
        rc = 1; /* the list was to stay empty */
    if (rc == 0)
        rc = tokenizer_decode(t, ids.ids, ids.n, true, &back, &len);
    if (rc == 0)
        rc = text_open(t, stops, 2, &text, NULL);
    if (rc == 0)
        rc = sampler_open(tokenizer_n_vocab(t), &sampler);
    sampler_close(sampler);
    text_close(text);
    free(back);
    token_list_release(&ids);
    tokenizer_close(t);
    return rc;
}

START_TEST(the_nth_allocation_fails_and_everything_is_given_back)
{
    struct gguf *g = _i == 0 ? write_bpe(&good_bpe) : write_spm(&good_spm);
    uint64_t n = 0;
    int rc;

    do {
        alloc_failed = false;
        allocs_left = n++;
        rc = use_all(g);
        allocs_left = UINT64_MAX;
        ck_assert_int_eq(rc, alloc_failed ? MODEL_ERR_NOMEM : 0);
    } while (alloc_failed);
    ck_assert_uint_gt(n, 15);
    gguf_close(g);
}
END_TEST

static Suite *tokenizer_suite(void)
{
    Suite *s = suite_create("tokenizer");
    TCase *tc;

    tc = tcase_create("reference");
    tcase_set_timeout(tc, 120);
    tcase_add_test(tc, every_text_of_the_default_model_has_the_reference_ids_both_ways);
    tcase_add_loop_test(tc, every_reference_vocabulary_gives_the_recorded_ids_both_ways, 0,
                        (int)(sizeof vocabularies / sizeof vocabularies[0]));
    tcase_add_test(tc, a_pre_tokenizer_that_is_not_there_is_refused_by_name);
    tcase_add_test(tc, the_golden_story_decodes_from_its_ids);
    suite_add_tcase(s, tc);

    tc = tcase_create("any text");
    tcase_set_timeout(tc, 240);
    tcase_add_test(tc, any_text_survives_but_for_the_bytes_that_are_counted);
    tcase_add_loop_test(tc, a_million_bytes_without_a_place_to_cut_take_no_more_than_their_share, 0,
                        2);
    tcase_add_loop_test(tc, the_heap_merges_as_the_plain_search_does, 0, 2);
    suite_add_tcase(s, tc);

    tc = tcase_create("byte-level");
    tcase_add_test(tc, a_vocabulary_with_a_broken_field_is_refused_with_the_key);
    tcase_add_test(tc, a_token_of_too_many_bytes_is_refused);
    tcase_add_test(tc, the_earliest_rule_is_applied_first_and_words_are_apart);
    tcase_add_test(tc, a_byte_that_the_vocabulary_lacks_is_left_out_and_counted);
    tcase_add_test(tc, markers_are_tokens_only_where_asked_for_and_the_longest_wins);
    tcase_add_test(tc, the_begin_token_comes_where_file_and_caller_ask_for_it);
    tcase_add_test(tc, end_tokens_are_those_named_by_key_and_the_well_known_markers);
    tcase_add_test(tc, invalid_text_is_refused_with_its_offset_and_the_list_stays);
    tcase_add_test(tc, a_text_of_more_than_the_limit_is_refused_before_it_is_read);
    tcase_add_test(tc, an_id_past_the_vocabulary_is_refused);
    suite_add_tcase(s, tc);

    tc = tcase_create("no memory");
    tcase_add_loop_test(tc, the_nth_allocation_fails_and_everything_is_given_back, 0, 2);
    suite_add_tcase(s, tc);

    tc = tcase_create("sentencepiece");
    tcase_add_test(tc, the_best_score_is_merged_first_and_the_leftmost_of_equals);
    tcase_add_test(tc,
                   the_space_prefix_goes_on_at_the_start_and_behind_markers_and_comes_off_again);
    tcase_add_test(tc, what_no_token_covers_becomes_bytes_and_then_is_counted);
    tcase_add_test(tc, a_broken_sentencepiece_field_is_refused_with_the_key);
    suite_add_tcase(s, tc);
    return s;
}

int main(void)
{
    SRunner *runner = srunner_create(tokenizer_suite());
    int failed;

    srunner_run_all(runner, CK_NORMAL);
    failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed == 0 ? 0 : 1;
}

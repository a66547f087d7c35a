/* Chat templates: recognised whole or refused, and conversations to text and ids.
 *
 * Method: the recorded conversations of the default model; small vocabularies with templates that
 * mean the same in other spelling, and templates that differ in one place. */
#include "model/model.h"
#include "tests/fail_alloc.h"
#include "tests/vocab_file.h"

#include <cjson/cJSON.h>

static struct gguf *file;
static struct tokenizer *tok;
static struct chat *chat;

static void close_all(void)
{
    chat_close(chat);
    tokenizer_close(tok);
    gguf_close(file);
    chat = NULL;
    tok = NULL;
    file = NULL;
}

static void open_default(void)
{
    struct kv_why why = {"ok"};

    ck_assert_msg(gguf_open(default_model(), &file, &why) == 0, "%s", why.text);
    ck_assert_msg(tokenizer_open(file, &tok, &why) == 0, "%s", why.text);
    ck_assert_msg(chat_open(file, tok, &chat, &why) == 0, "%s", why.text);
}

static struct chat_message message(const char *role, const char *content)
{
    return (struct chat_message){.role = role, .content = content, .content_len = strlen(content)};
}

/* ---- Recorded conversations ---- */

static void assert_ids(const struct token_list *ids, const cJSON *want, const char *text)
{
    const cJSON *item;
    size_t i = 0;

    ck_assert_msg(ids->n == (size_t)cJSON_GetArraySize(want), "%s: %zu ids, want %d", text, ids->n,
                  cJSON_GetArraySize(want));
    cJSON_ArrayForEach(item, want)
    {
        ck_assert_msg(ids->ids[i] == (uint32_t)item->valuedouble, "%s: id %zu is %u, want %.0f",
                      text, i, ids->ids[i], item->valuedouble);
        i++;
    }
}

static void check_conversation(const cJSON *line)
{
    const char *want = cJSON_GetObjectItem(line, "text")->valuestring;
    struct chat_message messages[8];
    struct token_list ids = {0};
    struct kv_why why = {"ok"};
    const cJSON *item;
    size_t n = 0, len, n_dropped = 1;
    char *text;

    cJSON_ArrayForEach(item, cJSON_GetObjectItem(line, "messages"))
    {
        ck_assert_uint_lt(n, 8);
        messages[n++] = message(cJSON_GetObjectItem(item, "role")->valuestring,
                                cJSON_GetObjectItem(item, "content")->valuestring);
    }
    ck_assert_int_eq(chat_render(chat, messages, n, CHAT_GENERATE, &text, &len, &why), 0);
    ck_assert_str_eq(text, want);
    ck_assert_uint_eq(len, strlen(want));
    free(text);
    ck_assert_int_eq(chat_encode(chat, messages, n, CHAT_GENERATE, &ids, &n_dropped, &why), 0);
    assert_ids(&ids, cJSON_GetObjectItem(line, "ids_safe"), want);
    ck_assert_uint_eq(n_dropped, 0);
    ids.n = 0;
    ck_assert_int_eq(
        chat_encode(chat, messages, n, CHAT_GENERATE | CHAT_SPECIAL, &ids, &n_dropped, &why), 0);
    assert_ids(&ids, cJSON_GetObjectItem(line, "ids"), want);
    token_list_release(&ids);
}

START_TEST(recorded_conversations_have_their_text_and_ids)
{
    const char *path = REFERENCE "smollm2/chats.jsonl";
    char *lines, *line, *save;
    size_t len, n = 0;

    if (skip_without("recorded_conversations_have_their_text_and_ids", default_model()) ||
        skip_without("recorded_conversations_have_their_text_and_ids", path))
        return;
    open_default();
    ck_assert_str_eq(chat_name(chat), "chatml");
    lines = read_whole(path, &len);
    for (line = strtok_r(lines, "\n", &save); line != NULL; line = strtok_r(NULL, "\n", &save)) {
        cJSON *json = cJSON_Parse(line);
        ck_assert_ptr_nonnull(json);
        check_conversation(json);
        cJSON_Delete(json);
        n++;
    }
    ck_assert_uint_eq(n, 10);
    free(lines);
    close_all();
}
END_TEST

/* A conversation turn by turn is the conversation at once: what the session keeps between turns is
 * the answer's ids, with or without the end token. */
START_TEST(a_conversation_continued_has_the_ids_of_the_whole)
{
    struct chat_message all[] = {message("user", "My name is Ada."),
                                 message("assistant", "Nice to meet you, Ada."),
                                 message("user", "What is my name?")};
    struct token_list whole = {0}, turns = {0};
    struct kv_why why;
    size_t i;

    if (skip_without("a_conversation_continued_has_the_ids_of_the_whole", default_model()))
        return;
    open_default();
    ck_assert_int_eq(chat_encode(chat, all, 3, CHAT_GENERATE, &whole, NULL, &why), 0);
    for (int closed = 0; closed < 2; closed++) {
        turns.n = 0;
        ck_assert_int_eq(chat_encode(chat, all, 1, CHAT_GENERATE, &turns, NULL, &why), 0);
        /* The recorded ids of the answer as they stand in the whole: it begins behind
         * "assistant\n", which tokenizes as one run with it. */
        while (turns.n < whole.n && whole.ids[turns.n] != 2)
            ck_assert_int_eq(token_list_add(&turns, whole.ids[turns.n]), 0);
        if (closed)
            ck_assert_int_eq(token_list_add(&turns, 2), 0);
        ck_assert_int_eq(
            chat_encode(chat, all + 2, 1, CHAT_GENERATE | CHAT_CONTINUE, &turns, NULL, &why), 0);
        ck_assert_uint_eq(turns.n, whole.n);
        for (i = 0; i < whole.n; i++)
            ck_assert_uint_eq(turns.ids[i], whole.ids[i]);
    }
    token_list_release(&whole);
    token_list_release(&turns);
    close_all();
}
END_TEST

/* ---- Templates ---- */

static const char *const tokens[] = {"a",          "b", "\xc4\x8a", "<|im_start|>",
                                     "<|im_end|>", "s", "u",        "ab"};
enum { N_TOKENS = sizeof tokens / sizeof tokens[0] };
static const int32_t types[N_TOKENS] = {1, 1, 1, 3, 3, 1, 1, 1};
static const char *const merges[] = {"a b"};

/* chat_open() on a small vocabulary with this template; NULL: without. */
static int open_template(const char *template, const char *const *texts, struct kv_why *why)
{
    static struct vocab_file f;
    int rc;

    vf_begin(&f);
    vf_text(&f, "tokenizer.ggml.model", "gpt2");
    vf_text(&f, "tokenizer.ggml.pre", "smollm");
    vf_texts(&f, "tokenizer.ggml.tokens", texts, N_TOKENS);
    vf_array(&f, "tokenizer.ggml.token_type", GGUF_VALUE_I32, N_TOKENS);
    vf_put(&f, types, sizeof types);
    vf_texts(&f, "tokenizer.ggml.merges", merges, 1);
    if (template != NULL)
        vf_text(&f, "tokenizer.chat_template", template);
    file = vf_open(&f);
    rc = tokenizer_open(file, &tok, why);
    ck_assert_msg(rc == 0, "%s", why->text);
    return chat_open(file, tok, &chat, why);
}

#define FOR "{% for message in messages %}"
#define BODY \
    "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
#define GENERATE "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
#define SYSTEM                                                \
    "{% if loop.first and messages[0]['role'] != 'system' %}" \
    "{{ '<|im_start|>system\\nBe \\'kind\\'.\\\\<|im_end|>\\n' }}{% endif %}"

static const struct spelling {
    const char *template;
    const char *system; /* what it puts first, or NULL */
} spellings[] = {
    {FOR BODY "{% endfor %}" GENERATE, NULL},
    {FOR SYSTEM BODY "{% endfor %}" GENERATE, "Be 'kind'.\\"},
    {"{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}"
     "{% endif %}" FOR BODY "{% endfor %}" GENERATE,
     NULL},
    /* as text between tags */
    {"{%- for message in messages -%}\n"
     "    {{- \"<|im_start|>\" + message.role -}} {{- '\\n' + message.content }}<|im_end|>\n"
     "    {% endfor %}\n"
     "  {% if add_generation_prompt %}\n"
     "{{- '<|im_start|>assistant\\n' -}}\n"
     "{%- endif -%}\n",
     NULL},
    {"{% for message in messages %}\n<|im_start|>{{ message[\"role\"] }}\n"
     "{{ message['content'] }}<|im_end|>\n\n{% endfor %}\n"
     "{% if add_generation_prompt %}\n<|im_start|>assistant\n{% endif %}\n",
     NULL},
    /* a line break inside the quotes is one as well */
    {FOR "{% if loop.first and messages[0].role != 'system' %}"
         "{{ '<|im_start|>system\n<|im_end|>\n' }}{% endif %}" BODY "{% endfor %}" GENERATE,
     ""},
};

START_TEST(a_template_is_recognised_in_any_spelling_with_the_same_meaning)
{
    struct chat_message user = message("user", "ab");
    struct kv_why why = {"ok"};
    char want[128], *text;
    size_t len;
    int rc = open_template(spellings[_i].template, tokens, &why);

    if (_i == 4) { /* one line break more than ChatML has */
        ck_assert_int_eq(rc, MODEL_ERR_UNSUPPORTED);
        close_all();
        return;
    }
    ck_assert_msg(rc == 0, "%s", why.text);
    ck_assert_int_eq(chat_render(chat, &user, 1, CHAT_GENERATE, &text, &len, &why), 0);
    snprintf(want, sizeof want, "%s%s%s<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n",
             spellings[_i].system == NULL ? "" : "<|im_start|>system\n",
             spellings[_i].system == NULL ? "" : spellings[_i].system,
             spellings[_i].system == NULL ? "" : "<|im_end|>\n");
    ck_assert_str_eq(text, want);
    free(text);
    close_all();
}
END_TEST

static const struct refusal {
    const char *template, *part;
} refusals[] = {
    {"", "\"\" is not known"},
    {"{{ messages }}\n", "\"{{ messages }} \" is not known"},
    {FOR BODY "{% endfor %}", "chatml with rules of its own"},
    {FOR BODY "{% endfor %}" GENERATE "x", "chatml with rules of its own"},
    {FOR "{{ bos_token }}" BODY "{% endfor %}" GENERATE, "chatml with rules of its own"},
    {FOR "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + "
         "'\\n'}}{% endfor %}" GENERATE,
     "chatml with rules of its own"},
    {FOR BODY "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>user\\n' }}{% endif %}",
     "chatml with rules of its own"},
    {FOR
     "{% if loop.first and messages[0]['role'] != 'system' %}"
     "{{ '<|im_start|>system\\na<|im_end|>\\n<|im_start|>user\\nb<|im_end|>\\n' }}{% endif %}" BODY
     "{% endfor %}" GENERATE,
     "chatml with rules of its own"},
    {FOR SYSTEM SYSTEM BODY "{% endfor %}" GENERATE, "chatml with rules of its own"},
    {FOR BODY "{# note #}{% endfor %}" GENERATE, "chatml with rules of its own"},
    {FOR BODY "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif",
     "chatml with rules of its own"},
    {FOR "{{'<|im_start|>' + message['role'] + '\\x0a", "chatml with rules of its own"},
    {"{{ '<|start_header_id|>' }}", "llama-3"},
    {"{{ '[INST]' }}", "mistral"},
};

START_TEST(a_template_that_is_not_known_is_refused_by_name)
{
    struct kv_why why = {""};

    ck_assert_int_eq(open_template(refusals[_i].template, tokens, &why), MODEL_ERR_UNSUPPORTED);
    ck_assert_msg(strstr(why.text, refusals[_i].part) != NULL, "%s", why.text);
    ck_assert_ptr_nonnull(strstr(why.text, "tokenizer.chat_template"));
    ck_assert_ptr_null(chat);
    close_all();
}
END_TEST

static const struct {
    const char *file, *part;
} families[] = {
    {"HuggingFaceTB-SmolLM3-3B", "chatml with rules"},
    {"Qwen-Qwen2.5-7B-Instruct", "chatml with rules"},
    {"Qwen-Qwen3-0.6B", "chatml with rules"},
    {"google-gemma-2-2b-it", "gemma"},
    {"meta-llama-Llama-3.1-8B-Instruct", "llama-3"},
    {"meta-llama-Llama-3.2-3B-Instruct", "llama-3"},
    {"microsoft-Phi-3.5-mini-instruct", "phi-3"},
    {"mistralai-Mistral-Nemo-Instruct-2407", "mistral"},
};

START_TEST(templates_of_other_models_are_refused_by_family)
{
    struct kv_why why = {""};
    char path[512], *text;
    size_t len;

    snprintf(path, sizeof path, REFERENCE "templates/%s.jinja", families[_i].file);
    if (skip_without("templates_of_other_models_are_refused_by_family", path))
        return;
    text = read_whole(path, &len);
    ck_assert_int_eq(open_template(text, tokens, &why), MODEL_ERR_UNSUPPORTED);
    ck_assert_msg(strstr(why.text, families[_i].part) != NULL, "%s", why.text);
    free(text);
    close_all();
}
END_TEST

START_TEST(a_file_without_template_or_markers_is_malformed)
{
    const char *texts[N_TOKENS];
    struct kv_why why = {""};

    ck_assert_int_eq(open_template(NULL, tokens, &why), MODEL_ERR_FORMAT);
    ck_assert_ptr_nonnull(strstr(why.text, "tokenizer.chat_template is missing"));
    close_all();
    memcpy(texts, tokens, sizeof texts);
    texts[3] = "<|start|>";
    ck_assert_int_eq(open_template(FOR BODY "{% endfor %}" GENERATE, texts, &why),
                     MODEL_ERR_FORMAT);
    ck_assert_ptr_nonnull(strstr(why.text, "<|im_start|>"));
    close_all();
}
END_TEST

/* ---- Conversations on the small vocabulary ---- */

static void open_plain(void)
{
    struct kv_why why = {"ok"};

    ck_assert_msg(open_template(FOR SYSTEM BODY "{% endfor %}" GENERATE, tokens, &why) == 0, "%s",
                  why.text);
}

START_TEST(text_in_a_message_is_no_marker_unless_asked)
{
    struct chat_message m = message("user", "ab<|im_end|><|im_start|>ab");
    struct token_list ids = {0};
    struct kv_why why;
    size_t n_markers = 0, n_special = 0, i;

    open_plain();
    ck_assert_int_eq(chat_encode(chat, &m, 1, CHAT_CONTINUE, &ids, NULL, &why), MODEL_ERR_INVALID);
    ck_assert_int_eq(token_list_add(&ids, 4), 0);
    ck_assert_int_eq(chat_encode(chat, &m, 1, CHAT_CONTINUE, &ids, NULL, &why), 0);
    for (i = 0; i < ids.n; i++)
        n_markers += ids.ids[i] == 3 || ids.ids[i] == 4;
    ck_assert_uint_eq(n_markers, 3); /* the one there before, and two around the message */
    ids.n = 1;
    ck_assert_int_eq(chat_encode(chat, &m, 1, CHAT_CONTINUE | CHAT_SPECIAL, &ids, NULL, &why), 0);
    for (i = 0; i < ids.n; i++)
        n_special += ids.ids[i] == 3 || ids.ids[i] == 4;
    ck_assert_uint_eq(n_special, 5);
    token_list_release(&ids);
    close_all();
}
END_TEST

START_TEST(a_bad_message_is_named_and_the_list_stays)
{
    struct chat_message bad[] = {message("user", "ab"), message("tool", "ab")};
    struct token_list ids = {0};
    struct kv_why why = {""};
    size_t n_dropped = 77, len;
    char *text = NULL;

    open_plain();
    ck_assert_int_eq(token_list_add(&ids, 1), 0);
    ck_assert_int_eq(chat_encode(chat, bad, 2, 0, &ids, &n_dropped, &why), MODEL_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(why.text, "messages[1].role is \"tool\""));
    bad[1].role = NULL;
    ck_assert_int_eq(chat_render(chat, bad, 2, 0, &text, &len, &why), MODEL_ERR_INVALID);
    ck_assert_ptr_null(text);
    bad[1] = message("assistant", "ab\xff");
    ck_assert_int_eq(chat_encode(chat, bad, 2, 0, &ids, &n_dropped, &why), MODEL_ERR_UTF8);
    ck_assert_ptr_nonnull(strstr(why.text, "messages[1].content is not UTF-8 at byte 2"));
    bad[1].content_len = (size_t)TOKENIZE_MAX_BYTES + 1;
    ck_assert_int_eq(chat_encode(chat, bad, 2, 0, &ids, &n_dropped, &why), MODEL_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(why.text, "messages[1].content has 4194305 bytes"));
    ck_assert_uint_eq(ids.n, 1);
    ck_assert_uint_eq(n_dropped, 77);
    token_list_release(&ids);
    close_all();
}
END_TEST

START_TEST(no_message_is_the_opening_alone_and_lacking_bytes_are_counted)
{
    struct chat_message m = message("system", "abz");
    struct token_list ids = {0};
    struct kv_why why;
    size_t n_dropped;
    /* of "system" the vocabulary has twice the s */
    const uint32_t want[] = {3, 5, 5, 2, 7, 4, 2};

    open_plain();
    ck_assert_int_eq(chat_encode(chat, NULL, 0, 0, &ids, &n_dropped, &why), 0);
    ck_assert_uint_eq(ids.n, 0);
    ck_assert_int_eq(chat_encode(chat, &m, 1, 0, &ids, &n_dropped, &why), 0);
    ck_assert_uint_eq(ids.n, 7);
    ck_assert_mem_eq(ids.ids, want, sizeof want);
    ck_assert_uint_eq(n_dropped, 4 + 1); /* y t e m, and z */
    token_list_release(&ids);
    close_all();
}
END_TEST

/* ---- Broken templates, no memory ---- */

/* One byte of a known template changed, left out or doubled: read without harm, and what is still
 * recognised still renders the message inside its markers. */
START_TEST(a_template_with_a_byte_changed_is_read_without_harm)
{
    static const char source[] = FOR SYSTEM BODY "{% endfor %}\n{%- if add_generation_prompt -%} "
                                                 "{{ '<|im_start|>assistant\\n' }}{% endif %}\n";
    static const char bytes[] = "{}%#-'\"\\[]. n|\n\xff";
    struct chat_message m = message("user", "ab");
    struct kv_why why;
    char changed[sizeof source + 1], *text;
    size_t at, len, n_taken = 0;
    int rc;

    for (at = 0; at < sizeof source - 1; at++)
        for (size_t b = 0; b < sizeof bytes; b++) { /* the last one takes a byte out */
            memcpy(changed, source, sizeof source);
            if (bytes[b] != '\0')
                changed[at] = bytes[b];
            else
                memmove(changed + at, changed + at + 1, sizeof source - at - 1);
            rc = open_template(changed, tokens, &why);
            ck_assert(rc == 0 || rc == MODEL_ERR_UNSUPPORTED || rc == MODEL_ERR_FORMAT);
            if (rc == 0) {
                ck_assert_int_eq(chat_render(chat, &m, 1, CHAT_CONTINUE, &text, &len, &why), 0);
                ck_assert_str_eq(text, "<|im_start|>user\nab<|im_end|>\n");
                free(text);
                n_taken++;
            }
            close_all();
        }
    ck_assert_uint_gt(n_taken, 20); /* blanks, and the default message */
}
END_TEST

START_TEST(the_nth_allocation_fails_and_the_list_stays)
{
    struct chat_message all[] = {message("user", "ab"), message("assistant", "ab")};
    struct token_list ids = {0};
    uint64_t n = 0;
    char *text;
    size_t len;
    int rc;

    open_plain();
    chat_close(chat);
    do {
        chat = NULL;
        text = NULL;
        alloc_failed = false;
        allocs_left = n++;
        rc = chat_open(file, tok, &chat, NULL);
        if (rc == 0)
            rc = chat_encode(chat, all, 2, CHAT_GENERATE, &ids, NULL, NULL);
        if (rc < 0 && ids.n > 0)
            rc = 1; /* the list was to stay empty */
        if (rc == 0)
            rc = chat_encode(chat, all, 1, CHAT_CONTINUE | CHAT_SPECIAL, &ids, NULL, NULL);
        if (rc == 0)
            rc = chat_render(chat, all, 2, 0, &text, &len, NULL);
        allocs_left = UINT64_MAX;
        ck_assert_int_eq(rc, alloc_failed ? MODEL_ERR_NOMEM : 0);
        free(text);
        token_list_release(&ids);
        chat_close(chat);
    } while (alloc_failed);
    chat = NULL;
    ck_assert_uint_gt(n, 20);
    close_all();
}
END_TEST

static Suite *chat_suite(void)
{
    Suite *s = suite_create("chat");
    TCase *tc;

    tc = tcase_create("reference");
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, recorded_conversations_have_their_text_and_ids);
    tcase_add_test(tc, a_conversation_continued_has_the_ids_of_the_whole);
    suite_add_tcase(s, tc);

    tc = tcase_create("templates");
    tcase_add_loop_test(tc, a_template_is_recognised_in_any_spelling_with_the_same_meaning, 0,
                        (int)(sizeof spellings / sizeof spellings[0]));
    tcase_add_loop_test(tc, a_template_that_is_not_known_is_refused_by_name, 0,
                        (int)(sizeof refusals / sizeof refusals[0]));
    tcase_add_loop_test(tc, templates_of_other_models_are_refused_by_family, 0,
                        (int)(sizeof families / sizeof families[0]));
    tcase_add_test(tc, a_file_without_template_or_markers_is_malformed);
    suite_add_tcase(s, tc);

    tc = tcase_create("broken");
    tcase_set_timeout(tc, 120);
    tcase_add_test(tc, a_template_with_a_byte_changed_is_read_without_harm);
    tcase_add_test(tc, the_nth_allocation_fails_and_the_list_stays);
    suite_add_tcase(s, tc);

    tc = tcase_create("conversations");
    tcase_add_test(tc, text_in_a_message_is_no_marker_unless_asked);
    tcase_add_test(tc, a_bad_message_is_named_and_the_list_stays);
    tcase_add_test(tc, no_message_is_the_opening_alone_and_lacking_bytes_are_counted);
    suite_add_tcase(s, tc);
    return s;
}

int main(void)
{
    SRunner *runner = srunner_create(chat_suite());
    int failed;

    srunner_run_all(runner, CK_NORMAL);
    failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed == 0 ? 0 : 1;
}

/* Goal: a GGUF file that is right is read as it stands, and one that is wrong in any structural
 * field is refused by a message that names the field.
 *
 * Method: the tiny models of make_tiny_gguf.py are read and then bent, field by field from a table,
 * cut at every byte of their metadata, and damaged at random (fixed seed; the sanitizer presets
 * watch).  Every allocation of the reader fails once. */
#include "fail_alloc.h"
#include "gguf_image.h"
#include "model/gguf_internal.h"
#include "vocab_file.h"

#include <check.h>
#include <fcntl.h>
#include <glob.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* ---- Good files ---- */

static struct gguf *open_tiny(const char *name)
{
    struct image im = image_tiny(name);
    struct gguf *g = NULL;
    struct kv_why why = {""};

    ck_assert_msg(image_open(&im, &g, &why) == 0, "%s: %s", name, why.text);
    image_release(&im);
    return g;
}

static bool is(struct gguf_string s, const char *text)
{
    return s.len == strlen(text) && memcmp(s.data, text, s.len) == 0;
}

START_TEST(a_good_file_is_read_whole)
{
    struct gguf *g = open_tiny("tiny-q4_1");
    const struct gguf_tensor *t;
    uint64_t i, bytes = 0;

    ck_assert_uint_eq(gguf_version(g), 3);
    ck_assert_uint_eq(gguf_n_kv(g), 27);
    ck_assert_uint_eq(gguf_n_tensors(g), 2 + 3 * 9);
    ck_assert(is(gguf_kv_at(g, 0)->key, "general.architecture"));
    ck_assert_ptr_null(gguf_kv_at(g, 27));
    ck_assert_ptr_null(gguf_tensor_at(g, 29));
    t = gguf_find_tensor(g, "blk.2.ffn_down.weight");
    ck_assert_ptr_nonnull(t);
    ck_assert_uint_eq(t->n_dims, 2);
    ck_assert_uint_eq(t->dims[0], 160);
    ck_assert_uint_eq(t->dims[1], 96);
    ck_assert_uint_eq(t->dims[2], 1);
    ck_assert_uint_eq(t->dims[3], 1);
    ck_assert_uint_eq(t->type, GGUF_Q4_1);
    ck_assert_uint_eq(t->n_bytes, 160 * 96 / 32 * 20);
    for (i = 0; i < gguf_n_tensors(g); i++) {
        t = gguf_tensor_at(g, i);
        ck_assert_uint_eq((uintptr_t)t->data % 32, 0);
        ck_assert_ptr_eq(gguf_find_tensor(g, (char[]){0}), NULL);
        bytes += (t->n_bytes + 31) / 32 * 32;
    }
    t = gguf_tensor_at(g, 0);
    ck_assert_uint_eq((size_t)(t->data - g->base) + bytes, gguf_file_bytes(g));
    gguf_close(g);
}
END_TEST

START_TEST(version_2_and_another_alignment_are_read_alike)
{
    struct gguf *g = open_tiny("tiny-spm-f32");
    const struct gguf_tensor *t = gguf_find_tensor(g, "rope_freqs.weight");
    float first, last;

    ck_assert_uint_eq(gguf_version(g), 2);
    ck_assert_uint_eq(g->alignment, 8);
    ck_assert_ptr_nonnull(t);
    ck_assert_uint_eq(t->n_dims, 1);
    ck_assert_uint_eq(t->dims[0], 12);
    memcpy(&first, t->data, sizeof(first));
    memcpy(&last, t->data + 11 * sizeof(last), sizeof(last));
    ck_assert_float_eq(first, 1.0f);
    ck_assert_float_eq(last, (float)(1.0 + 11.0 / 12.0));
    gguf_close(g);
}
END_TEST

START_TEST(every_key_and_tensor_is_found_by_its_name)
{
    struct gguf *g = open_tiny("tiny-f32");
    char name[300];
    uint64_t i;

    for (i = 0; i < gguf_n_kv(g); i++) {
        const struct gguf_kv *kv = gguf_kv_at(g, i);

        snprintf(name, sizeof(name), "%.*s", (int)kv->key.len, kv->key.data);
        ck_assert_ptr_eq(gguf_find(g, name), kv);
        name[kv->key.len - 1] = '\0';
        ck_assert_ptr_ne(gguf_find(g, name), kv);
    }
    for (i = 0; i < gguf_n_tensors(g); i++) {
        const struct gguf_tensor *t = gguf_tensor_at(g, i);

        snprintf(name, sizeof(name), "%.*s", (int)t->name.len, t->name.data);
        ck_assert_ptr_eq(gguf_find_tensor(g, name), t);
        strcat(name, "x");
        ck_assert_ptr_null(gguf_find_tensor(g, name));
    }
    gguf_close(g);
}
END_TEST

START_TEST(a_file_without_keys_and_tensors_is_a_file)
{
    unsigned char bytes[24] = "GGUF\3";
    struct image im = {.bytes = bytes, .len = sizeof(bytes)};
    struct gguf *g = NULL;
    struct kv_digest d;

    ck_assert_int_eq(image_open(&im, &g, NULL), 0);
    ck_assert_uint_eq(gguf_n_kv(g), 0);
    ck_assert_ptr_null(gguf_find(g, "general.architecture"));
    ck_assert_ptr_null(gguf_find_tensor(g, "token_embd.weight"));
    ck_assert_int_eq(gguf_fingerprint(g, &d, NULL), 0);
    gguf_close(g);
}
END_TEST

/* ---- Typed reads ---- */

START_TEST(an_integer_is_read_from_every_integer_type_that_holds_it)
{
    static const struct {
        uint32_t type;
        size_t bytes;
        int64_t value;
        int rc;
    } cases[] = {
        {GGUF_VALUE_U8, 1, 255, 0},
        {GGUF_VALUE_I8, 1, 127, 0},
        {GGUF_VALUE_I8, 1, -1, MODEL_ERR_FORMAT},
        {GGUF_VALUE_U16, 2, 65535, 0},
        {GGUF_VALUE_I16, 2, -32768, MODEL_ERR_FORMAT},
        {GGUF_VALUE_U32, 4, UINT32_MAX, 0},
        {GGUF_VALUE_I32, 4, INT32_MAX, 0},
        {GGUF_VALUE_I32, 4, INT32_MIN, MODEL_ERR_FORMAT},
        {GGUF_VALUE_U64, 8, UINT32_MAX, 0},
        {GGUF_VALUE_U64, 8, (int64_t)UINT32_MAX + 1, MODEL_ERR_FORMAT},
        {GGUF_VALUE_U64, 8, -1, MODEL_ERR_FORMAT},
        {GGUF_VALUE_I64, 8, 7, 0},
        {GGUF_VALUE_I64, 8, INT64_MIN, MODEL_ERR_FORMAT},
        {GGUF_VALUE_F32, 4, 1, MODEL_ERR_FORMAT},
        {GGUF_VALUE_F64, 8, 1, MODEL_ERR_FORMAT},
        {GGUF_VALUE_BOOL, 1, 1, MODEL_ERR_FORMAT},
    };
    size_t i;

    for (i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct image im = image_tiny("tiny-q4_1");
        struct gguf *g = NULL;
        struct kv_why why = {""};
        uint32_t out = 42;

        image_add(&im, "test.number", cases[i].type, &cases[i].value, cases[i].bytes);
        ck_assert_int_eq(image_open(&im, &g, NULL), 0);
        ck_assert_int_eq(gguf_get_u32(g, "test.number", &out, &why), cases[i].rc);
        if (cases[i].rc == 0) {
            ck_assert_uint_eq(out, (uint32_t)cases[i].value);
        } else {
            ck_assert_uint_eq(out, 42);
            ck_assert_ptr_nonnull(strstr(why.text, "test.number"));
        }
        gguf_close(g);
        image_release(&im);
    }
}
END_TEST

START_TEST(a_read_of_another_type_names_key_and_type_and_leaves_out_alone)
{
    struct gguf *g = open_tiny("tiny-q4_1");
    struct gguf_string s = {.data = NULL, .len = 9};
    const struct gguf_kv *array = NULL;
    struct kv_why why = {""};
    float f = 9;
    bool b = true;

    ck_assert_int_eq(gguf_get_f32(g, "llama.block_count", &f, &why), MODEL_ERR_FORMAT);
    ck_assert_str_eq(why.text, "llama.block_count is of type u32, must be f32");
    ck_assert_int_eq(gguf_get_bool(g, "llama.block_count", &b, &why), MODEL_ERR_FORMAT);
    ck_assert_int_eq(gguf_get_string(g, "tokenizer.ggml.tokens", &s, &why), MODEL_ERR_FORMAT);
    ck_assert_str_eq(why.text, "tokenizer.ggml.tokens is of type array, must be string");
    ck_assert_int_eq(gguf_get_array(g, "tokenizer.ggml.tokens", GGUF_VALUE_I32, &array, &why),
                     MODEL_ERR_FORMAT);
    ck_assert_str_eq(why.text, "tokenizer.ggml.tokens is an array of string, must be of i32");
    ck_assert_int_eq(gguf_get_array(g, "general.name", GGUF_VALUE_I32, &array, &why),
                     MODEL_ERR_FORMAT);
    ck_assert_float_eq(f, 9);
    ck_assert(b);
    ck_assert_uint_eq(s.len, 9);
    ck_assert_ptr_null(array);
    gguf_close(g);
}
END_TEST

START_TEST(an_absent_key_is_one_and_leaves_out_alone)
{
    struct gguf *g = open_tiny("tiny-q4_1");
    struct gguf_string s = {.data = NULL, .len = 9};
    const struct gguf_kv *array = NULL;
    uint32_t u = 9;
    float f = 9;
    bool b = true;

    ck_assert_int_eq(gguf_get_u32(g, "no.such", &u, NULL), 1);
    ck_assert_int_eq(gguf_get_f32(g, "no.such", &f, NULL), 1);
    ck_assert_int_eq(gguf_get_bool(g, "no.such", &b, NULL), 1);
    ck_assert_int_eq(gguf_get_string(g, "no.such", &s, NULL), 1);
    ck_assert_int_eq(gguf_get_array(g, "no.such", GGUF_VALUE_I32, &array, NULL), 1);
    ck_assert(u == 9 && f == 9 && b && s.len == 9 && array == NULL);
    gguf_close(g);
}
END_TEST

START_TEST(items_of_arrays_are_read_by_index_and_empty_past_the_end)
{
    struct gguf *g = open_tiny("tiny-spm-f32");
    const struct gguf_kv *tokens = NULL, *scores = NULL, *types = NULL;

    ck_assert_int_eq(gguf_get_array(g, "tokenizer.ggml.tokens", GGUF_VALUE_STRING, &tokens, NULL),
                     0);
    ck_assert_int_eq(gguf_get_array(g, "tokenizer.ggml.scores", GGUF_VALUE_F32, &scores, NULL), 0);
    ck_assert_int_eq(gguf_get_array(g, "tokenizer.ggml.token_type", GGUF_VALUE_I32, &types, NULL),
                     0);
    ck_assert(is(gguf_array_string(g, tokens, 0), "<unk>"));
    ck_assert(is(gguf_array_string(g, tokens, 258), "<0xFF>"));
    ck_assert(is(gguf_array_string(g, tokens, tokens->n_items), ""));
    ck_assert(is(gguf_array_string(g, tokens, UINT64_MAX), ""));
    ck_assert(is(gguf_array_string(g, scores, 0), ""));
    ck_assert_float_eq(gguf_array_f32(scores, 260), -1);
    ck_assert_float_eq(gguf_array_f32(scores, scores->n_items), 0);
    ck_assert_float_eq(gguf_array_f32(types, 1), 0);
    ck_assert_int_eq(gguf_array_i32(types, 1), 3);
    ck_assert_int_eq(gguf_array_i32(types, types->n_items), 0);
    ck_assert_int_eq(gguf_array_i32(tokens, 0), 0);
    gguf_close(g);
}
END_TEST

/* ---- Text of values ---- */

static void expect_text(uint32_t type, const void *value, size_t len, const char *expected)
{
    struct image im = image_tiny("tiny-q4_1");
    struct gguf *g = NULL;
    char buf[64];

    image_add(&im, "test.value", type, value, len);
    ck_assert_int_eq(image_open(&im, &g, NULL), 0);
    ck_assert_uint_eq(gguf_value_text(gguf_find(g, "test.value"), buf, sizeof(buf)),
                      strlen(expected));
    ck_assert_str_eq(buf, expected);
    gguf_close(g);
    image_release(&im);
}

START_TEST(a_value_of_every_type_has_a_text)
{
    expect_text(GGUF_VALUE_U8, "\xff", 1, "255");
    expect_text(GGUF_VALUE_I8, "\x80", 1, "-128");
    expect_text(GGUF_VALUE_U16, "\xff\xff", 2, "65535");
    expect_text(GGUF_VALUE_I16, "\xff\xff", 2, "-1");
    expect_text(GGUF_VALUE_U32, "\xff\xff\xff\xff", 4, "4294967295");
    expect_text(GGUF_VALUE_I32, "\x00\x00\x00\x80", 4, "-2147483648");
    expect_text(GGUF_VALUE_F32, "\x00\x00\x80\x3f", 4, "1");
    expect_text(GGUF_VALUE_BOOL, "\x01", 1, "true");
    expect_text(GGUF_VALUE_U64, "\xff\xff\xff\xff\xff\xff\xff\xff", 8, "18446744073709551615");
    expect_text(GGUF_VALUE_I64, "\x00\x00\x00\x00\x00\x00\x00\x80", 8, "-9223372036854775808");
    expect_text(GGUF_VALUE_F64, "\x00\x00\x00\x00\x00\x00\xe0\x3f", 8, "0.5");
    expect_text(GGUF_VALUE_STRING, "\x07\0\0\0\0\0\0\0a\n\"\\\x1b\xc3\xa9", 15,
                "\"a\\n\\\"\\\\\\x1b\\xc3\\xa9\"");
    expect_text(GGUF_VALUE_ARRAY, "\x02\0\0\0\x02\0\0\0\0\0\0\0\x01\x00\x02\x00", 16,
                "u16[2] 1, 2");
    expect_text(GGUF_VALUE_ARRAY, "\x08\0\0\0\0\0\0\0\0\0\0\0", 12, "string[0]");
}
END_TEST

START_TEST(a_long_value_is_cut_to_the_buffer)
{
    struct gguf *g = open_tiny("tiny-q4_1");
    const struct gguf_kv *kv = gguf_find(g, "tokenizer.ggml.tokens");
    char buf[80];
    size_t n;

    for (n = 1; n < sizeof(buf); n++) {
        memset(buf, '#', sizeof(buf));
        ck_assert_uint_eq(gguf_value_text(kv, buf, n), strlen(buf));
        ck_assert_uint_lt(strlen(buf), n);
        ck_assert_int_eq(buf[n], '#');
        if (n > 3)
            ck_assert_str_eq(buf + strlen(buf) - 3, "...");
    }
    ck_assert_int_eq(strncmp(buf, "string[309] \"<|endoftext|>\", ", 29), 0);
    gguf_close(g);
}
END_TEST

/* ---- Types ---- */

START_TEST(types_have_names_and_blocks_and_removed_ones_have_none)
{
    static const uint32_t removed[] = {4, 5, 31, 32, 33, 36, 37, 38, 40, 1000, UINT32_MAX};
    uint32_t weights = 0, bytes = 0;
    size_t i;

    ck_assert_str_eq(gguf_type_name(GGUF_Q4_1), "Q4_1");
    ck_assert(gguf_type_block(GGUF_Q4_1, &weights, &bytes));
    ck_assert(weights == 32 && bytes == 20);
    ck_assert(gguf_type_block(GGUF_Q6_K, &weights, &bytes));
    ck_assert(weights == 256 && bytes == 210);
    for (i = 0; i < sizeof(removed) / sizeof(removed[0]); i++) {
        ck_assert_ptr_null(gguf_type_name(removed[i]));
        ck_assert(!gguf_type_block(removed[i], &weights, &bytes));
    }
}
END_TEST

/* ---- Wrong fields ---- */

/* Where a field stands, counted from the end of a key or a tensor's name. */
enum {
    NAME_LENGTH = -1, /* the length before the name */
    NAME = -2,        /* the name's first byte */
    VALUE_TYPE = 0,
    VALUE = 4,
    ITEM_TYPE = 4,
    N_ITEMS = 8,
    FIRST_ITEM = 16,
    N_DIMS = 0,
    DIM_0 = 4,
    DIM_1 = 12,
    TENSOR_TYPE = 20, /* of a tensor with two dimensions */
    OFFSET = 24,
};

#define TENSOR "blk.0.attn_q.weight"
#define TOKENS "tokenizer.ggml.tokens"
#define HUGE_COUNT UINT64_C(0x8000000000000000)

static const struct {
    const char *name; /* NULL: `at` counts from the file's first byte */
    int at;
    unsigned width;
    uint64_t value;
    int rc;
    const char *text;
} wrong_fields[] = {
    {NULL, 0, 4, 0x46554747 + 1, MODEL_ERR_FORMAT, "magic is 48 47 55 46"},
    {NULL, 3, 1, 'f', MODEL_ERR_FORMAT, "magic"},
    {NULL, 4, 4, 0, MODEL_ERR_UNSUPPORTED, "version is 0"},
    {NULL, 4, 4, 1, MODEL_ERR_UNSUPPORTED, "version is 1"},
    {NULL, 4, 4, 4, MODEL_ERR_UNSUPPORTED, "version is 4"},
    {NULL, 4, 4, 0x03000000, MODEL_ERR_UNSUPPORTED, "big-endian"},
    {NULL, 4, 4, 0x02000000, MODEL_ERR_UNSUPPORTED, "big-endian"},
    {NULL, 4, 4, UINT32_MAX, MODEL_ERR_UNSUPPORTED, "version is 4294967295"},
    {NULL, 8, 8, 30, MODEL_ERR_FORMAT, "tensor name"},
    {NULL, 8, 8, 28, MODEL_ERR_FORMAT, "n_tensors is 28, but "},
    {NULL, 8, 8, 0, MODEL_ERR_FORMAT, "n_tensors is 0, but "},
    {NULL, 8, 8, 100000, MODEL_ERR_FORMAT, "n_tensors is 100000"},
    {NULL, 8, 8, HUGE_COUNT, MODEL_ERR_FORMAT, "n_tensors is 9223372036854775808"},
    {NULL, 8, 8, UINT64_MAX, MODEL_ERR_FORMAT, "n_tensors is 18446744073709551615"},
    {NULL, 16, 8, 28, MODEL_ERR_FORMAT, "tensor name at byte"},
    {NULL, 16, 8, 26, MODEL_ERR_FORMAT, "tensor "},
    {NULL, 16, 8, 100000, MODEL_ERR_FORMAT, "n_kv is 100000"},
    {NULL, 16, 8, HUGE_COUNT, MODEL_ERR_FORMAT, "n_kv is 9223372036854775808"},
    {NULL, 16, 8, UINT64_MAX, MODEL_ERR_FORMAT, "n_kv is 18446744073709551615"},

    {"general.type", NAME_LENGTH, 8, 0, MODEL_ERR_FORMAT, "key at byte 69: length 0"},
    {"general.type", NAME_LENGTH, 8, 256, MODEL_ERR_FORMAT, "key at byte 69: length 256"},
    {"general.type", NAME_LENGTH, 8, HUGE_COUNT, MODEL_ERR_FORMAT,
     "key at byte 69: length 9223372036854775808"},
    {"general.type", NAME_LENGTH, 8, UINT64_MAX, MODEL_ERR_FORMAT,
     "key at byte 69: length 18446744073709551615"},
    {"general.type", NAME, 1, 0, MODEL_ERR_FORMAT, "byte 0x00 at 0"},
    {"general.type", NAME, 1, 0x1b, MODEL_ERR_FORMAT, "byte 0x1b at 0"},
    {"general.type", NAME, 1, 0xc3, MODEL_ERR_FORMAT, "byte 0xc3 at 0"},
    {"general.type", VALUE_TYPE, 4, 13, MODEL_ERR_FORMAT, "general.type: value type 13"},
    {"general.type", VALUE_TYPE, 4, UINT32_MAX, MODEL_ERR_FORMAT,
     "general.type: value type 4294967295"},
    {"general.type", VALUE, 8, HUGE_COUNT, MODEL_ERR_FORMAT,
     "general.type: string value at byte 93"},
    {"general.type", VALUE, 8, UINT64_MAX, MODEL_ERR_FORMAT,
     "general.type: string value at byte 93: length 18446744073709551615"},
    {"tokenizer.ggml.add_bos_token", VALUE, 1, 2, MODEL_ERR_FORMAT,
     "tokenizer.ggml.add_bos_token: bool is 2"},

    {TOKENS, ITEM_TYPE, 4, GGUF_VALUE_ARRAY, MODEL_ERR_UNSUPPORTED, TOKENS ": arrays of arrays"},
    {TOKENS, ITEM_TYPE, 4, 13, MODEL_ERR_FORMAT, TOKENS ": array item type 13"},
    {TOKENS, ITEM_TYPE, 4, UINT32_MAX, MODEL_ERR_FORMAT, TOKENS ": array item type 4294967295"},
    {TOKENS, ITEM_TYPE, 4, GGUF_VALUE_BOOL, MODEL_ERR_FORMAT, TOKENS ": bool is 13"},
    {TOKENS, N_ITEMS, 8, 100000, MODEL_ERR_FORMAT, TOKENS ": array count 100000"},
    {TOKENS, N_ITEMS, 8, UINT64_C(0x2000000000000001), MODEL_ERR_FORMAT,
     TOKENS ": array count 2305843009213693953"},
    {TOKENS, N_ITEMS, 8, UINT64_MAX, MODEL_ERR_FORMAT, TOKENS ": array count 18446744073709551615"},
    {TOKENS, N_ITEMS, 8, 310, MODEL_ERR_FORMAT, "key at byte"},
    {TOKENS, FIRST_ITEM, 8, HUGE_COUNT, MODEL_ERR_FORMAT, TOKENS ": string of an array at byte"},
    {TOKENS, FIRST_ITEM, 8, UINT64_MAX, MODEL_ERR_FORMAT, TOKENS ": string of an array at byte"},
    {"tokenizer.ggml.token_type", N_ITEMS, 8, UINT64_C(0x4000000000000001), MODEL_ERR_FORMAT,
     "tokenizer.ggml.token_type: array count 4611686018427387905"},

    {TENSOR, NAME_LENGTH, 8, 0, MODEL_ERR_FORMAT, "tensor name at byte"},
    {TENSOR, NAME_LENGTH, 8, 64, MODEL_ERR_FORMAT, "length 64, must be 1..63"},
    {TENSOR, NAME_LENGTH, 8, HUGE_COUNT, MODEL_ERR_FORMAT, "tensor name at byte"},
    {TENSOR, NAME, 1, 0, MODEL_ERR_FORMAT, "tensor name at byte"},
    {TENSOR, N_DIMS, 4, 0, MODEL_ERR_FORMAT, "tensor " TENSOR ": n_dims 0"},
    {TENSOR, N_DIMS, 4, 5, MODEL_ERR_FORMAT, "tensor " TENSOR ": n_dims 5"},
    {TENSOR, N_DIMS, 4, UINT32_MAX, MODEL_ERR_FORMAT, "tensor " TENSOR ": n_dims 4294967295"},
    {TENSOR, DIM_0, 8, 0, MODEL_ERR_FORMAT, "tensor " TENSOR ": dimension 0 is 0"},
    {TENSOR, DIM_0, 8, 95, MODEL_ERR_FORMAT,
     "tensor " TENSOR ": dimension 0 is 95, not a multiple of Q4_1's block of 32"},
    {TENSOR, DIM_1, 8, 0, MODEL_ERR_FORMAT, "tensor " TENSOR ": dimension 1 is 0"},
    {TENSOR, DIM_1, 8, UINT64_C(1) << 60, MODEL_ERR_FORMAT,
     "tensor " TENSOR ": dimension 1 is 1152921504606846976, the product"},
    /* 96 x this wraps to a small number */
    {TENSOR, DIM_1, 8, UINT64_C(0x0aaaaaaaaaaaaaab), MODEL_ERR_FORMAT, "the product"},
    /* the product is under 2^64, the bytes after it in file order are not there */
    {TENSOR, DIM_1, 8, UINT64_C(1) << 56, MODEL_ERR_FORMAT, "tensor " TENSOR ": bytes "},
    {TENSOR, DIM_1, 8, 1000000, MODEL_ERR_FORMAT, "tensor " TENSOR ": bytes "},
    {TENSOR, DIM_1, 8, 97, MODEL_ERR_FORMAT, "tensor blk.0.attn_k.weight: offset"},
    {TENSOR, DIM_1, 8, 95, MODEL_ERR_FORMAT, "tensor blk.0.attn_k.weight: offset"},
    {TENSOR, TENSOR_TYPE, 4, 4, MODEL_ERR_UNSUPPORTED, "tensor " TENSOR ": type 4"},
    {TENSOR, TENSOR_TYPE, 4, 31, MODEL_ERR_UNSUPPORTED, "tensor " TENSOR ": type 31"},
    {TENSOR, TENSOR_TYPE, 4, 40, MODEL_ERR_UNSUPPORTED, "tensor " TENSOR ": type 40"},
    {TENSOR, TENSOR_TYPE, 4, HUGE_COUNT >> 32, MODEL_ERR_UNSUPPORTED,
     "tensor " TENSOR ": type 2147483648"},
    {TENSOR, TENSOR_TYPE, 4, UINT32_MAX, MODEL_ERR_UNSUPPORTED,
     "tensor " TENSOR ": type 4294967295"},
    {TENSOR, TENSOR_TYPE, 4, GGUF_Q6_K, MODEL_ERR_FORMAT, "not a multiple of Q6_K's block of 256"},
    {TENSOR, OFFSET, 8, 0, MODEL_ERR_FORMAT, "tensor " TENSOR ": offset 0, expected"},
    {TENSOR, OFFSET, 8, 1, MODEL_ERR_FORMAT, "tensor " TENSOR ": offset 1, expected"},
    {TENSOR, OFFSET, 8, 1 << 30, MODEL_ERR_FORMAT, "tensor " TENSOR ": offset 1073741824"},
    {TENSOR, OFFSET, 8, UINT64_MAX - 31, MODEL_ERR_FORMAT, "tensor " TENSOR ": offset 1844674"},
    {"token_embd.weight", OFFSET, 8, 32, MODEL_ERR_FORMAT, "token_embd.weight: offset 32"},
    {"token_embd.weight", DIM_1, 8, UINT64_C(0x0155555555555555), MODEL_ERR_FORMAT,
     "tensor token_embd.weight: 9223372036854775776 weights are over 63 bits"},
};

START_TEST(a_wrong_field_is_refused_by_name)
{
    struct image im = image_tiny("tiny-q4_1");
    size_t at = 0;

    if (wrong_fields[_i].name != NULL) {
        at = image_find(&im, wrong_fields[_i].name);
        if (wrong_fields[_i].at == NAME_LENGTH)
            at -= 8;
        else if (wrong_fields[_i].at != NAME)
            at += strlen(wrong_fields[_i].name);
    }
    if (wrong_fields[_i].at > 0)
        at += (size_t)wrong_fields[_i].at;
    image_put(&im, at, wrong_fields[_i].width, wrong_fields[_i].value);
    image_refused(&im, wrong_fields[_i].rc, wrong_fields[_i].text);
    image_release(&im);
}
END_TEST

START_TEST(a_key_or_a_tensor_twice_is_refused_by_name)
{
    struct image im = image_tiny("tiny-q4_1");

    image_rename(&im, "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id");
    image_refused(&im, MODEL_ERR_FORMAT, "key tokenizer.ggml.eos_token_id is there twice");
    image_release(&im);
    im = image_tiny("tiny-q4_1");
    image_rename(&im, TENSOR, "blk.2.attn_k.weight");
    image_refused(&im, MODEL_ERR_FORMAT, "tensor blk.2.attn_k.weight is there twice");
    image_release(&im);
}
END_TEST

static void refuse_alignment(uint32_t type, const void *value, size_t len, const char *text)
{
    struct image im = image_tiny("tiny-q4_1");

    image_add(&im, "general.alignment", type, value, len);
    image_refused(&im, MODEL_ERR_FORMAT, text);
    image_release(&im);
}

START_TEST(an_alignment_that_is_none_is_refused)
{
    static const uint32_t wrong[] = {0, 1, 3, 4, 24, 33, 1u << 21, 1u << 30, 1u << 31, UINT32_MAX};
    uint64_t wide = 32;
    char text[64];
    size_t i;

    for (i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        snprintf(text, sizeof(text), "general.alignment is %u, must be a power of two", wrong[i]);
        refuse_alignment(GGUF_VALUE_U32, &wrong[i], 4, text);
    }
    refuse_alignment(GGUF_VALUE_U64, &wide, 8, "general.alignment is of type u64, must be u32");
    refuse_alignment(GGUF_VALUE_I32, &wide, 4, "general.alignment is of type i32, must be u32");
    refuse_alignment(GGUF_VALUE_STRING, "\0\0\0\0\0\0\0\0", 8, "general.alignment is of type");
}
END_TEST

START_TEST(a_split_file_is_refused_by_name)
{
    struct image im = image_tiny("tiny-q4_1");
    struct gguf *g = NULL;
    uint16_t one = 1, three = 3;

    image_add(&im, "split.count", GGUF_VALUE_U16, &one, sizeof(one));
    ck_assert_int_eq(image_open(&im, &g, NULL), 0);
    gguf_close(g);
    image_release(&im);
    im = image_tiny("tiny-q4_1");
    image_add(&im, "split.count", GGUF_VALUE_U16, &three, sizeof(three));
    image_refused(&im, MODEL_ERR_UNSUPPORTED, "split.count is 3");
    image_release(&im);
}
END_TEST

START_TEST(metadata_has_a_bound)
{
    /* One string of 64 MiB, most of it a hole in the file. */
    struct image im = image_tiny("tiny-q4_1");
    size_t at = image_find(&im, "general.type") + strlen("general.type") + 4;
    struct gguf *g = NULL;
    struct kv_why why = {""};
    char path[64];
    int fd;

    image_put(&im, at, 8, GGUF_MAX_META_BYTES);
    fd = image_file(&im, path);
    ck_assert_int_eq(ftruncate(fd, 2L * GGUF_MAX_META_BYTES), 0);
    ck_assert_int_eq(gguf_open(path, &g, &why), MODEL_ERR_FORMAT);
    ck_assert_msg(strstr(why.text, "metadata is over 67108864 bytes") != NULL, "%s", why.text);
    close(fd);
    image_release(&im);
}
END_TEST

/* ---- Damage without a plan ---- */

START_TEST(a_file_cut_anywhere_is_refused)
{
    struct image im = image_tiny("tiny-q4_1");
    struct gguf *g = NULL;
    struct kv_why why;
    char path[64];
    size_t end = im.data + 32, n;
    int fd = image_file(&im, path);

    /* The last 31 bytes may be padding, which nobody reads. */
    for (n = im.len - 32; n > end; n -= n - end > 4096 ? 4096 : n - end) {
        ck_assert_int_eq(ftruncate(fd, (off_t)n), 0);
        why.text[0] = '\0';
        ck_assert_int_eq(gguf_open(path, &g, &why), MODEL_ERR_FORMAT);
        ck_assert_msg(strstr(why.text, "tensor ") != NULL, "cut to %zu: %s", n, why.text);
    }
    for (n = end; n-- > 0;) {
        ck_assert_int_eq(ftruncate(fd, (off_t)n), 0);
        why.text[0] = '\0';
        ck_assert_int_eq(gguf_open(path, &g, &why), MODEL_ERR_FORMAT);
        ck_assert_msg(why.text[0] != '\0', "cut to %zu", n);
    }
    ck_assert_ptr_null(g);
    close(fd);
    image_release(&im);
}
END_TEST

/* xorshift64* */
static uint64_t next_random(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * UINT64_C(0x2545f4914f6cdd1d);
}

/* Look at everything that a file says. */
static void read_all(const struct gguf *g)
{
    unsigned sum = 0;
    char text[128];
    uint64_t i, j;

    for (i = 0; i < gguf_n_kv(g); i++) {
        const struct gguf_kv *kv = gguf_kv_at(g, i);

        ck_assert_uint_lt(gguf_value_text(kv, text, sizeof(text)), sizeof(text));
        for (j = 0; kv->type == GGUF_VALUE_ARRAY && j < kv->n_items; j++) {
            struct gguf_string s = gguf_array_string(g, kv, j);

            sum += s.len > 0 ? (unsigned char)s.data[s.len - 1] : 0u;
            sum += (unsigned)gguf_array_i32(kv, j);
        }
    }
    for (i = 0; i < gguf_n_tensors(g); i++) {
        const struct gguf_tensor *t = gguf_tensor_at(g, i);

        sum += t->data[0] + t->data[t->n_bytes - 1];
    }
    ck_assert_uint_le(sum, UINT32_MAX); /* so that nothing is optimised away */
}

START_TEST(a_damaged_file_is_refused_or_read_within_its_bounds)
{
    enum { ROUNDS = 4000 };
    struct image im = image_tiny("tiny-q4_1");
    unsigned char *bad = malloc(im.data);
    uint64_t state = 20240607;
    unsigned accepted = 0, refused = 0, i, k;
    char path[64];
    int fd = image_file(&im, path);

    ck_assert_ptr_nonnull(bad);
    for (i = 0; i < ROUNDS; i++) {
        struct gguf *g = NULL;
        struct kv_why why = {""};
        unsigned n = 1 + (unsigned)(next_random(&state) % 4);

        memcpy(bad, im.bytes, im.data);
        for (k = 0; k < n; k++)
            bad[next_random(&state) % im.data] ^= (unsigned char)(1 + next_random(&state) % 255);
        ck_assert_int_eq(pwrite(fd, bad, im.data, 0), (ssize_t)im.data);
        if (gguf_open(path, &g, &why) == 0) {
            accepted++;
            read_all(g);
            gguf_close(g);
        } else {
            refused++;
            ck_assert_int_ne(why.text[0], '\0');
        }
    }
    ck_assert_uint_gt(accepted, ROUNDS / 10);
    ck_assert_uint_gt(refused, ROUNDS / 10);
    close(fd);
    free(bad);
    image_release(&im);
}
END_TEST

START_TEST(every_allocation_that_fails_is_an_error)
{
    struct image im = image_tiny("tiny-q4_1");
    struct gguf *g = NULL;
    struct kv_why why = {""};
    char path[64];
    int fd = image_file(&im, path), rc = MODEL_ERR_NOMEM;
    uint64_t n;

    alloc_fails_once = true;
    for (n = 0; rc != 0; n++) {
        ck_assert_uint_lt(n, 100);
        allocs_left = n;
        rc = gguf_open(path, &g, &why);
        if (rc != 0) {
            ck_assert_int_eq(rc, MODEL_ERR_NOMEM);
            ck_assert_ptr_nonnull(strstr(why.text, "no memory"));
            ck_assert_ptr_null(g);
        }
    }
    allocs_left = UINT64_MAX;
    ck_assert_uint_gt(n, 8);
    gguf_close(g);
    close(fd);
    image_release(&im);
}
END_TEST

/* ---- Not a file ---- */

static void refuse_path(const char *path, int rc, const char *text)
{
    struct gguf *g = NULL;
    struct kv_why why = {""};

    ck_assert_int_eq(gguf_open(path, &g, &why), rc);
    ck_assert_msg(strstr(why.text, text) != NULL, "%s", why.text);
    ck_assert_ptr_null(g);
    ck_assert_int_eq(gguf_open(path, &g, NULL), rc); /* nobody asks why */
}

START_TEST(what_is_no_file_is_refused_and_not_waited_for)
{
    struct image im = {.bytes = (unsigned char *)"GGUF", .len = 4};
    char fifo[128], path[64];
    int fd;

    refuse_path("/no/such/file.gguf", MODEL_ERR_IO, "/no/such/file.gguf: No such file");
    refuse_path(BATON_SOURCE_DIR, MODEL_ERR_IO, "not a regular file");
    refuse_path("/dev/null", MODEL_ERR_IO, "not a regular file");
    snprintf(fifo, sizeof(fifo), "%s/tests/fifo-%d", BATON_BINARY_DIR, (int)getpid());
    ck_assert_int_eq(mkfifo(fifo, 0600), 0);
    refuse_path(fifo, MODEL_ERR_IO, "not a regular file");
    unlink(fifo);
    fd = image_file(&im, path);
    refuse_path(path, MODEL_ERR_FORMAT, "not a GGUF file: 4 bytes");
    close(fd);
    image_refused(&(struct image){0}, MODEL_ERR_FORMAT, "not a GGUF file: 0 bytes");
}
END_TEST

/* ---- Fingerprint ---- */

static struct kv_digest fingerprint_of(const struct image *im)
{
    struct gguf *g = NULL;
    struct kv_digest d;

    ck_assert_int_eq(image_open(im, &g, NULL), 0);
    ck_assert_int_eq(gguf_fingerprint(g, &d, NULL), 0);
    gguf_close(g);
    return d;
}

static bool same(struct kv_digest a, struct kv_digest b)
{
    return memcmp(&a, &b, sizeof(a)) == 0;
}

START_TEST(the_fingerprint_changes_with_metadata_and_with_any_tensor)
{
    struct image im = image_tiny("tiny-q4_1");
    struct kv_digest first = fingerprint_of(&im);
    size_t at;

    ck_assert(same(first, fingerprint_of(&im)));
    at = image_find(&im, "general.name") + strlen("general.name") + 4 + 8;
    im.bytes[at] ^= 1;
    ck_assert(!same(first, fingerprint_of(&im)));
    im.bytes[at] ^= 1;
    im.bytes[im.data] ^= 1;
    ck_assert(!same(first, fingerprint_of(&im)));
    im.bytes[im.data] ^= 1;
    im.bytes[im.len - 1] ^= 1; /* of output_norm.weight, which ends without padding */
    ck_assert(!same(first, fingerprint_of(&im)));
    im.bytes[im.len - 1] ^= 1;
    ck_assert(same(first, fingerprint_of(&im)));
    image_release(&im);
}
END_TEST

/* A cache folder of our own with a model that is large and old enough to be cached. */
struct cache {
    char folder[512];
    char model[600];
};

static void set_age(const char *path, int seconds)
{
    struct timespec times[2];

    clock_gettime(CLOCK_REALTIME, &times[0]);
    times[0].tv_sec -= seconds;
    times[1] = times[0];
    ck_assert_int_eq(utimensat(AT_FDCWD, path, times, 0), 0);
}

static void write_model(const struct cache *c, unsigned char last)
{
    struct image im = image_tiny("tiny-q4_1");
    FILE *f = fopen(c->model, "wb");

    image_add_tensor(&im, "test.large", GGUF_F32, 1024, 1500, 1024 * 1500 * 4);
    im.bytes[im.len - 1] = last;
    ck_assert_ptr_nonnull(f);
    ck_assert_uint_eq(fwrite(im.bytes, 1, im.len, f), im.len);
    ck_assert_int_eq(fclose(f), 0);
    image_release(&im);
}

static struct cache cache_open(void)
{
    struct cache c;

    snprintf(c.folder, sizeof(c.folder), "%s/tests/cache-XXXXXX", BATON_BINARY_DIR);
    ck_assert_ptr_nonnull(mkdtemp(c.folder));
    snprintf(c.model, sizeof(c.model), "%s/model.gguf", c.folder);
    setenv("XDG_CACHE_HOME", c.folder, 1);
    write_model(&c, 0);
    set_age(c.model, 100);
    return c;
}

static void cache_close(struct cache *c)
{
    char command[600];

    snprintf(command, sizeof(command), "rm -rf '%s'", c->folder);
    ck_assert_int_eq(system(command), 0);
}

static struct kv_digest fingerprint_at(const struct cache *c)
{
    struct gguf *g = NULL;
    struct kv_digest d;
    struct kv_why why = {""};

    ck_assert_msg(gguf_open(c->model, &g, &why) == 0, "%s", why.text);
    ck_assert_msg(gguf_fingerprint(g, &d, &why) == 0, "%s", why.text);
    gguf_close(g);
    return d;
}

/* The only file in the cache, into path; false where there is none. */
static bool cached_file(const struct cache *c, char path[1024])
{
    char pattern[600];
    glob_t found;
    bool any;

    snprintf(pattern, sizeof(pattern), "%s/baton/fingerprints/*", c->folder);
    any = glob(pattern, 0, NULL, &found) == 0;
    if (any) {
        ck_assert_uint_eq(found.gl_pathc, 1);
        snprintf(path, 1024, "%s", found.gl_pathv[0]);
    }
    globfree(&found);
    return any;
}

/* Its text, changed by the caller, is written back. */
static size_t read_text(const char *path, char text[512])
{
    FILE *f = fopen(path, "rb");
    size_t n;

    ck_assert_ptr_nonnull(f);
    n = fread(text, 1, 511, f);
    text[n] = '\0';
    fclose(f);
    return n;
}

static void write_text(const char *path, const char *text, size_t n)
{
    FILE *f = fopen(path, "wb");

    ck_assert_ptr_nonnull(f);
    ck_assert_uint_eq(fwrite(text, 1, n, f), n);
    fclose(f);
}

START_TEST(a_fingerprint_is_cached_in_the_users_folder)
{
    struct cache c = cache_open();
    char path[1024], before[512], after[512];
    struct kv_digest first;
    struct stat st;
    size_t n;

    ck_assert(!cached_file(&c, path));
    first = fingerprint_at(&c);
    ck_assert(cached_file(&c, path));
    ck_assert_int_eq(stat(path, &st), 0);
    ck_assert_uint_eq(st.st_mode & 0777, 0600);
    n = read_text(path, before);
    ck_assert(same(first, fingerprint_at(&c)));
    ck_assert_uint_eq(read_text(path, after), n);
    ck_assert_str_eq(before, after);
    cache_close(&c);
}
END_TEST

START_TEST(a_cached_fingerprint_is_used_and_not_computed_again)
{
    /* The content is changed behind the cache's back, with size and mtime as they were. */
    struct cache c = cache_open();
    struct kv_digest first = fingerprint_at(&c);
    struct stat st;

    ck_assert_int_eq(stat(c.model, &st), 0);
    write_model(&c, 1);
    ck_assert_int_eq(utimensat(AT_FDCWD, c.model, (struct timespec[]){st.st_mtim, st.st_mtim}, 0),
                     0);
    ck_assert(same(first, fingerprint_at(&c)));
    set_age(c.model, 50);
    ck_assert(!same(first, fingerprint_at(&c)));
    cache_close(&c);
}
END_TEST

START_TEST(a_damaged_cache_file_is_ignored_and_replaced)
{
    struct cache c = cache_open();
    struct kv_digest first = fingerprint_at(&c);
    char path[1024], good[512], bad[512];
    size_t n, i;

    ck_assert(cached_file(&c, path));
    n = read_text(path, good);
    for (i = 0; i < n; i += 7) {
        memcpy(bad, good, n);
        bad[i] = bad[i] == '1' ? '2' : '1';
        write_text(path, bad, n);
        ck_assert(same(first, fingerprint_at(&c)));
        read_text(path, bad);
        ck_assert_str_eq(bad, good);
    }
    for (i = 0; i < n; i += 31) {
        write_text(path, good, i);
        ck_assert(same(first, fingerprint_at(&c)));
    }
    memset(bad, 'a', sizeof(bad));
    write_text(path, bad, sizeof(bad));
    ck_assert(same(first, fingerprint_at(&c)));
    read_text(path, bad);
    ck_assert_str_eq(bad, good);
    cache_close(&c);
}
END_TEST

START_TEST(without_a_usable_cache_folder_the_fingerprint_is_computed)
{
    struct cache c = cache_open();
    struct kv_digest first = fingerprint_at(&c);

    setenv("XDG_CACHE_HOME", "/proc/no/such/folder", 1);
    ck_assert(same(first, fingerprint_at(&c)));
    setenv("XDG_CACHE_HOME", c.model, 1); /* a file */
    ck_assert(same(first, fingerprint_at(&c)));
    unsetenv("XDG_CACHE_HOME");
    unsetenv("HOME");
    ck_assert(same(first, fingerprint_at(&c)));
    cache_close(&c);
}
END_TEST

START_TEST(a_young_or_small_file_is_not_cached)
{
    struct cache c = cache_open();
    struct image im = image_tiny("tiny-q4_1");
    char path[1024];

    set_age(c.model, 0);
    fingerprint_at(&c);
    ck_assert(!cached_file(&c, path));
    write_text(c.model, (const char *)im.bytes, im.len);
    set_age(c.model, 100);
    fingerprint_at(&c);
    ck_assert(!cached_file(&c, path));
    image_release(&im);
    cache_close(&c);
}
END_TEST

START_TEST(a_file_changed_while_open_has_no_fingerprint)
{
    struct cache c = cache_open();
    struct gguf *g = NULL;
    struct kv_digest d;
    struct kv_why why = {""};

    ck_assert_int_eq(gguf_open(c.model, &g, NULL), 0);
    set_age(c.model, 10);
    ck_assert_int_eq(gguf_fingerprint(g, &d, &why), MODEL_ERR_IO);
    ck_assert_ptr_nonnull(strstr(why.text, "changed"));
    gguf_close(g);
    cache_close(&c);
}
END_TEST

/* ---- Files of others ---- */

START_TEST(files_of_other_programs_are_read)
{
    const char *name = "files_of_other_programs_are_read";
    glob_t found;
    size_t i;

    if (skip_without(name, REFERENCE "tokenizer") || skip_without(name, REFERENCE "stories260K"))
        return;
    ck_assert_int_eq(glob(REFERENCE "tokenizer/*.gguf", 0, NULL, &found), 0);
    ck_assert_int_eq(glob(REFERENCE "stories260K/*.gguf", GLOB_APPEND, NULL, &found), 0);
    for (i = 0; i < found.gl_pathc; i++) {
        struct gguf *g = NULL;
        struct kv_why why = {""};

        ck_assert_msg(gguf_open(found.gl_pathv[i], &g, &why) == 0, "%s: %s", found.gl_pathv[i],
                      why.text);
        ck_assert_ptr_nonnull(gguf_find(g, "tokenizer.ggml.tokens"));
        read_all(g);
        gguf_close(g);
    }
    globfree(&found);
}
END_TEST

static Suite *gguf_suite(void)
{
    Suite *s = suite_create("gguf");
    TCase *good = tcase_create("good files"), *bad = tcase_create("wrong files");
    TCase *print = tcase_create("fingerprint");

    tcase_set_timeout(good, 60);
    tcase_add_test(good, a_good_file_is_read_whole);
    tcase_add_test(good, version_2_and_another_alignment_are_read_alike);
    tcase_add_test(good, every_key_and_tensor_is_found_by_its_name);
    tcase_add_test(good, a_file_without_keys_and_tensors_is_a_file);
    tcase_add_test(good, an_integer_is_read_from_every_integer_type_that_holds_it);
    tcase_add_test(good, a_read_of_another_type_names_key_and_type_and_leaves_out_alone);
    tcase_add_test(good, an_absent_key_is_one_and_leaves_out_alone);
    tcase_add_test(good, items_of_arrays_are_read_by_index_and_empty_past_the_end);
    tcase_add_test(good, a_value_of_every_type_has_a_text);
    tcase_add_test(good, a_long_value_is_cut_to_the_buffer);
    tcase_add_test(good, types_have_names_and_blocks_and_removed_ones_have_none);
    tcase_add_test(good, files_of_other_programs_are_read);
    suite_add_tcase(s, good);

    tcase_set_timeout(bad, 120);
    tcase_add_loop_test(bad, a_wrong_field_is_refused_by_name, 0,
                        (int)(sizeof(wrong_fields) / sizeof(wrong_fields[0])));
    tcase_add_test(bad, a_key_or_a_tensor_twice_is_refused_by_name);
    tcase_add_test(bad, an_alignment_that_is_none_is_refused);
    tcase_add_test(bad, a_split_file_is_refused_by_name);
    tcase_add_test(bad, metadata_has_a_bound);
    tcase_add_test(bad, a_file_cut_anywhere_is_refused);
    tcase_add_test(bad, a_damaged_file_is_refused_or_read_within_its_bounds);
    tcase_add_test(bad, every_allocation_that_fails_is_an_error);
    tcase_add_test(bad, what_is_no_file_is_refused_and_not_waited_for);
    suite_add_tcase(s, bad);

    tcase_set_timeout(print, 60);
    tcase_add_test(print, the_fingerprint_changes_with_metadata_and_with_any_tensor);
    tcase_add_test(print, a_fingerprint_is_cached_in_the_users_folder);
    tcase_add_test(print, a_cached_fingerprint_is_used_and_not_computed_again);
    tcase_add_test(print, a_damaged_cache_file_is_ignored_and_replaced);
    tcase_add_test(print, without_a_usable_cache_folder_the_fingerprint_is_computed);
    tcase_add_test(print, a_young_or_small_file_is_not_cached);
    tcase_add_test(print, a_file_changed_while_open_has_no_fingerprint);
    suite_add_tcase(s, print);
    return s;
}

int main(void)
{
    SRunner *r = srunner_create(gguf_suite());
    int failed;

    srunner_run_all(r, CK_NORMAL);
    failed = srunner_ntests_failed(r);
    srunner_free(r);
    return failed == 0 ? 0 : 1;
}

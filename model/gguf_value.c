/* Values of metadata: typed reads, and their text. */
#include "model/gguf_internal.h"

#include <stdio.h>
#include <string.h>

/* ---- Typed reads ---- */

static int wrong_type(const struct gguf_kv *kv, const char *wanted, struct kv_why *why)
{
    return kv_fail(why, MODEL_ERR_FORMAT, "%.*s is of type %s, must be %s", (int)kv->key.len,
                   kv->key.data, gguf_value_type_name(kv->type), wanted);
}

/* An integer of any type, as magnitude and sign; false for other types. */
static bool load_integer(uint32_t type, const unsigned char *p, uint64_t *magnitude, bool *negative)
{
    size_t size = gguf_value_size(type);
    bool is_signed = false;
    uint64_t v = 0;

    switch (type) {
    case GGUF_VALUE_I8:
    case GGUF_VALUE_I16:
    case GGUF_VALUE_I32:
    case GGUF_VALUE_I64:
        is_signed = true;
        break;
    case GGUF_VALUE_U8:
    case GGUF_VALUE_U16:
    case GGUF_VALUE_U32:
    case GGUF_VALUE_U64:
        break;
    default:
        return false;
    }
    memcpy(&v, p, size);
    *negative = is_signed && (v >> (8 * size - 1)) != 0;
    if (*negative) {
        v = ~v + 1;
        if (size < sizeof(v))
            v &= ((uint64_t)1 << (8 * size)) - 1;
    }
    *magnitude = v;
    return true;
}

int gguf_get_u32(const struct gguf *g, const char *key, uint32_t *out, struct kv_why *why)
{
    const struct gguf_kv *kv = gguf_find(g, key);
    bool negative;
    uint64_t v;

    if (kv == NULL)
        return 1;
    if (!load_integer(kv->type, kv->value, &v, &negative))
        return wrong_type(kv, "an integer", why);
    if (negative || v > UINT32_MAX)
        return kv_fail(why, MODEL_ERR_FORMAT, "%s is %s%llu, must be 0..%u", key,
                       negative ? "-" : "", (unsigned long long)v, UINT32_MAX);
    *out = (uint32_t)v;
    return 0;
}

int gguf_get_f32(const struct gguf *g, const char *key, float *out, struct kv_why *why)
{
    const struct gguf_kv *kv = gguf_find(g, key);

    if (kv == NULL)
        return 1;
    if (kv->type != GGUF_VALUE_F32)
        return wrong_type(kv, "f32", why);
    memcpy(out, kv->value, sizeof(*out));
    return 0;
}

int gguf_get_bool(const struct gguf *g, const char *key, bool *out, struct kv_why *why)
{
    const struct gguf_kv *kv = gguf_find(g, key);

    if (kv == NULL)
        return 1;
    if (kv->type != GGUF_VALUE_BOOL)
        return wrong_type(kv, "bool", why);
    *out = kv->value[0] != 0;
    return 0;
}

int gguf_get_string(const struct gguf *g, const char *key, struct gguf_string *out,
                    struct kv_why *why)
{
    const struct gguf_kv *kv = gguf_find(g, key);

    if (kv == NULL)
        return 1;
    if (kv->type != GGUF_VALUE_STRING)
        return wrong_type(kv, "string", why);
    out->data = (const char *)kv->value;
    out->len = kv->value_bytes;
    return 0;
}

int gguf_get_array(const struct gguf *g, const char *key, enum gguf_value_type item_type,
                   const struct gguf_kv **out, struct kv_why *why)
{
    const struct gguf_kv *kv = gguf_find(g, key);

    if (kv == NULL)
        return 1;
    if (kv->type != GGUF_VALUE_ARRAY)
        return wrong_type(kv, "array", why);
    if (kv->item_type != item_type)
        return kv_fail(why, MODEL_ERR_FORMAT, "%s is an array of %s, must be of %s", key,
                       gguf_value_type_name(kv->item_type), gguf_value_type_name(item_type));
    *out = kv;
    return 0;
}

float gguf_array_f32(const struct gguf_kv *array, uint64_t i)
{
    float v = 0;

    if (i < array->n_items && array->item_type == GGUF_VALUE_F32)
        memcpy(&v, array->value + i * sizeof(v), sizeof(v));
    return v;
}

int32_t gguf_array_i32(const struct gguf_kv *array, uint64_t i)
{
    int32_t v = 0;

    if (i < array->n_items && gguf_value_size(array->item_type) == sizeof(v))
        memcpy(&v, array->value + i * sizeof(v), sizeof(v));
    return v;
}

/* ---- Text ---- */

/* A line that grows in a buffer and stops, cut, where it is full. */
struct line {
    char *buf;
    size_t len, cap; /* cap: what may be written, the NUL not counted */
    bool cut;
};

static void line_add(struct line *l, const char *text, size_t len)
{
    if (l->cut || len > l->cap - l->len) {
        l->cut = true;
        return;
    }
    memcpy(l->buf + l->len, text, len);
    l->len += len;
}

static void line_add_text(struct line *l, const char *text)
{
    line_add(l, text, strlen(text));
}

static void line_add_escaped(struct line *l, const unsigned char *p, size_t len)
{
    char esc[8];
    size_t i;

    for (i = 0; i < len && !l->cut; i++) {
        if (p[i] == '\n')
            line_add(l, "\\n", 2);
        else if (p[i] == '"' || p[i] == '\\')
            line_add(l, (char[]){'\\', (char)p[i]}, 2);
        else if (p[i] >= 0x20 && p[i] < 0x7f)
            line_add(l, (const char *)&p[i], 1);
        else
            line_add(l, esc, (size_t)snprintf(esc, sizeof(esc), "\\x%02x", p[i]));
    }
}

/* End the line: the NUL, and where it was cut three dots over its last characters. */
static size_t line_end(struct line *l)
{
    if (l->cut) {
        size_t at = l->len + 3 <= l->cap ? l->len : l->cap - (l->cap < 3 ? l->cap : 3);

        l->len = at + (l->cap - at < 3 ? l->cap - at : 3);
        memset(l->buf + at, '.', l->len - at);
    }
    l->buf[l->len] = '\0';
    return l->len;
}

static void line_add_scalar(struct line *l, uint32_t type, const unsigned char *p)
{
    char text[40];
    bool negative;
    uint64_t v;
    double d;
    float f;

    if (load_integer(type, p, &v, &negative)) {
        snprintf(text, sizeof(text), "%s%llu", negative ? "-" : "", (unsigned long long)v);
    } else if (type == GGUF_VALUE_BOOL) {
        snprintf(text, sizeof(text), "%s", p[0] ? "true" : "false");
    } else if (type == GGUF_VALUE_F32) {
        memcpy(&f, p, sizeof(f));
        snprintf(text, sizeof(text), "%.9g", (double)f);
    } else {
        memcpy(&d, p, sizeof(d));
        snprintf(text, sizeof(text), "%.17g", d);
    }
    line_add_text(l, text);
}

static void line_add_string(struct line *l, const unsigned char *p, size_t len)
{
    line_add_text(l, "\"");
    line_add_escaped(l, p, len);
    line_add_text(l, "\"");
}

static void line_add_array(struct line *l, const struct gguf_kv *kv)
{
    const unsigned char *p = kv->value;
    char text[64];
    uint64_t i;

    snprintf(text, sizeof(text), "%s[%llu]", gguf_value_type_name(kv->item_type),
             (unsigned long long)kv->n_items);
    line_add_text(l, text);
    for (i = 0; i < kv->n_items && !l->cut; i++) {
        line_add_text(l, i == 0 ? " " : ", ");
        if (kv->item_type == GGUF_VALUE_STRING) {
            uint64_t len;

            memcpy(&len, p, sizeof(len));
            p += sizeof(len);
            line_add_string(l, p, (size_t)len);
            p += len;
        } else {
            line_add_scalar(l, kv->item_type, p);
            p += gguf_value_size(kv->item_type);
        }
    }
}

size_t gguf_value_text(const struct gguf_kv *kv, char *buf, size_t n)
{
    struct line l = {.buf = buf, .cap = n - 1};

    if (n == 0)
        return 0;
    if (kv->type == GGUF_VALUE_ARRAY)
        line_add_array(&l, kv);
    else if (kv->type == GGUF_VALUE_STRING)
        line_add_string(&l, kv->value, kv->value_bytes);
    else
        line_add_scalar(&l, kv->type, kv->value);
    return line_end(&l);
}

const char *gguf_escape(const void *data, size_t len, char *buf, size_t n)
{
    struct line l = {.buf = buf, .cap = n - 1};

    line_add_escaped(&l, data, len);
    line_end(&l);
    return buf;
}

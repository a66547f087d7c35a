/* Reading GGUF: the file is mapped, walked once by a cursor that checks every length before it is
 * used, and described in two tables.  The layout stands in gguf_internal.h.
 *
 * The walk trusts nothing: counts are compared with the bytes that are left before memory is taken
 * for them, all sums and products are checked for overflow, names are printable ASCII (they end up
 * in messages), keys and names are unique, and tensor data lies in file order without gaps, so that
 * no two tensors share a byte. */
#include "model/gguf_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- Cursor ---- */

struct cursor {
    const unsigned char *base;
    size_t pos;
    size_t end;            /* of the file, or of what metadata may take */
    bool cut;              /* end is the bound, not the file's */
    struct gguf_string of; /* the key or tensor that is read, for messages */
    struct kv_why *why;
};

/* "general.name: value at byte 100: ..." */
static int cursor_fail(const struct cursor *c, const char *what, size_t at, const char *text)
{
    return kv_fail(c->why, MODEL_ERR_FORMAT, "%.*s%s%s at byte %zu: %s", (int)c->of.len, c->of.data,
                   c->of.len > 0 ? ": " : "", what, at, text);
}

static int cursor_short(const struct cursor *c, const char *what)
{
    char text[64];

    if (c->cut)
        snprintf(text, sizeof(text), "metadata is over %d bytes", GGUF_MAX_META_BYTES);
    else
        snprintf(text, sizeof(text), "the file ends at byte %zu", c->end);
    return cursor_fail(c, what, c->pos, text);
}

static size_t cursor_left(const struct cursor *c)
{
    return c->end - c->pos;
}

/* Step over n bytes. */
static int cursor_skip(struct cursor *c, uint64_t n, const char *what)
{
    if (n > cursor_left(c))
        return cursor_short(c, what);
    c->pos += (size_t)n;
    return 0;
}

static int cursor_read(struct cursor *c, void *out, size_t n, const char *what)
{
    if (n > cursor_left(c))
        return cursor_short(c, what);
    memcpy(out, c->base + c->pos, n);
    c->pos += n;
    return 0;
}

static int cursor_string(struct cursor *c, struct gguf_string *out, const char *what)
{
    size_t at = c->pos;
    uint64_t len = 0;
    int rc;

    rc = cursor_read(c, &len, sizeof(len), what);
    if (rc < 0)
        return rc;
    if (len > cursor_left(c)) {
        char text[80];

        if (c->cut)
            return cursor_short(c, what);
        snprintf(text, sizeof(text), "length %llu, but %zu bytes are left", (unsigned long long)len,
                 cursor_left(c));
        return cursor_fail(c, what, at, text);
    }
    out->data = (const char *)c->base + c->pos;
    out->len = (size_t)len;
    c->pos += (size_t)len;
    return 0;
}

/* A key or a tensor's name: 1..max printable characters. */
static int cursor_name(struct cursor *c, size_t max, struct gguf_string *out, const char *what)
{
    size_t at = c->pos, i;
    int rc;

    c->of = (struct gguf_string){.data = "", .len = 0};
    rc = cursor_string(c, out, what);
    if (rc < 0)
        return rc;
    if (out->len == 0 || out->len > max)
        return kv_fail(c->why, MODEL_ERR_FORMAT, "%s at byte %zu: length %zu, must be 1..%zu", what,
                       at, out->len, max);
    for (i = 0; i < out->len; i++) {
        if (out->data[i] < 0x21 || out->data[i] > 0x7e)
            return kv_fail(c->why, MODEL_ERR_FORMAT,
                           "%s at byte %zu: byte 0x%02x at %zu is not a printable character", what,
                           at, (unsigned char)out->data[i], i);
    }
    c->of = *out;
    return 0;
}

/* ---- Values ---- */

size_t gguf_value_size(uint32_t type)
{
    switch (type) {
    case GGUF_VALUE_U8:
    case GGUF_VALUE_I8:
    case GGUF_VALUE_BOOL:
        return 1;
    case GGUF_VALUE_U16:
    case GGUF_VALUE_I16:
        return 2;
    case GGUF_VALUE_U32:
    case GGUF_VALUE_I32:
    case GGUF_VALUE_F32:
        return 4;
    case GGUF_VALUE_U64:
    case GGUF_VALUE_I64:
    case GGUF_VALUE_F64:
        return 8;
    default:
        return 0;
    }
}

const char *gguf_value_type_name(uint32_t type)
{
    static const char *const names[] = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                        "bool", "string", "array", "u64", "i64", "f64"};

    return type < sizeof(names) / sizeof(names[0]) ? names[type] : "unknown";
}

static int check_bools(const struct cursor *c, const struct gguf_kv *kv, size_t n)
{
    size_t i;

    for (i = 0; i < n; i++) {
        if (kv->value[i] > 1)
            return kv_fail(c->why, MODEL_ERR_FORMAT, "%.*s: bool is %u, must be 0 or 1",
                           (int)kv->key.len, kv->key.data, kv->value[i]);
    }
    return 0;
}

/* n_items strings, whose offsets are remembered in *offsets. */
static int read_strings(struct cursor *c, struct gguf_kv *kv, uint32_t **offsets)
{
    size_t first = c->pos;
    struct gguf_string s;
    uint64_t i;
    int rc;

    /* One for an empty array, so that NULL means "no strings". */
    *offsets = malloc((size_t)(kv->n_items + 1) * sizeof(**offsets));
    if (*offsets == NULL)
        return kv_fail(c->why, MODEL_ERR_NOMEM, "no memory for %llu strings",
                       (unsigned long long)kv->n_items);
    for (i = 0; i < kv->n_items; i++) {
        (*offsets)[i] = (uint32_t)(c->pos - first); /* under GGUF_MAX_META_BYTES */
        rc = cursor_string(c, &s, "string of an array");
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int read_array(struct cursor *c, struct gguf_kv *kv, uint32_t **offsets)
{
    uint32_t item_type = 0;
    size_t size;
    int rc;

    rc = cursor_read(c, &item_type, sizeof(item_type), "array item type");
    if (rc < 0)
        return rc;
    rc = cursor_read(c, &kv->n_items, sizeof(kv->n_items), "array count");
    if (rc < 0)
        return rc;
    if (item_type == GGUF_VALUE_ARRAY)
        return kv_fail(c->why, MODEL_ERR_UNSUPPORTED, "%.*s: arrays of arrays are not supported",
                       (int)kv->key.len, kv->key.data);
    size = item_type == GGUF_VALUE_STRING ? sizeof(uint64_t) : gguf_value_size(item_type);
    if (size == 0)
        return kv_fail(c->why, MODEL_ERR_FORMAT, "%.*s: array item type %u is unknown",
                       (int)kv->key.len, kv->key.data, item_type);
    if (kv->n_items > cursor_left(c) / size)
        return kv_fail(
            c->why, MODEL_ERR_FORMAT, "%.*s: array count %llu, but %zu bytes of metadata are left",
            (int)kv->key.len, kv->key.data, (unsigned long long)kv->n_items, cursor_left(c));
    kv->item_type = (enum gguf_value_type)item_type;
    kv->value = c->base + c->pos;
    if (item_type == GGUF_VALUE_STRING)
        return read_strings(c, kv, offsets);
    c->pos += (size_t)kv->n_items * size;
    return item_type == GGUF_VALUE_BOOL ? check_bools(c, kv, (size_t)kv->n_items) : 0;
}

static int read_value(struct cursor *c, struct gguf_kv *kv, uint32_t **offsets)
{
    size_t size = gguf_value_size(kv->type);
    struct gguf_string s;
    int rc;

    if (kv->type == GGUF_VALUE_ARRAY)
        return read_array(c, kv, offsets);
    kv->value = c->base + c->pos;
    if (kv->type == GGUF_VALUE_STRING) {
        rc = cursor_string(c, &s, "string value");
        kv->value = (const unsigned char *)(rc < 0 ? NULL : s.data);
        return rc;
    }
    rc = cursor_skip(c, size, "value");
    if (rc < 0)
        return rc;
    return kv->type == GGUF_VALUE_BOOL ? check_bools(c, kv, 1) : 0;
}

static int read_kv(struct cursor *c, struct gguf_kv *kv, uint32_t **offsets)
{
    uint32_t type = 0;
    int rc;

    rc = cursor_name(c, GGUF_MAX_KEY_BYTES, &kv->key, "key");
    if (rc < 0)
        return rc;
    rc = cursor_read(c, &type, sizeof(type), "value type");
    if (rc < 0)
        return rc;
    if (type > GGUF_VALUE_F64)
        return kv_fail(c->why, MODEL_ERR_FORMAT, "%.*s: value type %u is unknown", (int)kv->key.len,
                       kv->key.data, type);
    kv->type = (enum gguf_value_type)type;
    rc = read_value(c, kv, offsets);
    if (rc < 0)
        return rc;
    kv->value_bytes = (size_t)(c->base + c->pos - kv->value);
    return 0;
}

/* ---- Tables ---- */

static int compare_strings(struct gguf_string a, struct gguf_string b)
{
    int d = memcmp(a.data, b.data, a.len < b.len ? a.len : b.len);

    if (d != 0)
        return d;
    return (a.len > b.len) - (a.len < b.len);
}

/* A struct gguf_kv and a struct gguf_tensor both begin with their name, so one table of pointers to
 * names serves both. */
_Static_assert(offsetof(struct gguf_kv, key) == 0, "found by its first member");
_Static_assert(offsetof(struct gguf_tensor, name) == 0, "found by its first member");

static int compare_entries(const void *a, const void *b)
{
    const struct gguf_string *const *x = a, *const *y = b;

    return compare_strings(**x, **y);
}

/* Sort pointers to the n entries of stride bytes at table.  *twice: a name that two of them have.
 */
static int sort_entries(const void *table, size_t n, size_t stride, void *out,
                        struct gguf_string *twice)
{
    const struct gguf_string **sorted = malloc((n + 1) * sizeof(*sorted));
    size_t i;

    if (sorted == NULL)
        return MODEL_ERR_NOMEM;
    for (i = 0; i < n; i++)
        sorted[i] = (const struct gguf_string *)((const char *)table + i * stride);
    qsort(sorted, n, sizeof(*sorted), compare_entries);
    memcpy(out, &sorted, sizeof(sorted)); /* a table of either kind */
    for (i = 1; i < n; i++) {
        if (compare_strings(*sorted[i - 1], *sorted[i]) == 0) {
            *twice = *sorted[i];
            return MODEL_ERR_FORMAT;
        }
    }
    return 0;
}

static const void *find_entry(const void *sorted, size_t n, const char *name)
{
    struct gguf_string s = {.data = name, .len = strlen(name)};
    const struct gguf_string *key = &s, *const * found;

    found = bsearch(&key, sorted, n, sizeof(key), compare_entries);
    return found ? *found : NULL;
}

static int sort_kv(struct gguf *g, struct kv_why *why)
{
    struct gguf_string twice = {0};
    int rc = sort_entries(g->kv, (size_t)g->n_kv, sizeof(*g->kv), &g->kv_sorted, &twice);

    if (rc == MODEL_ERR_FORMAT)
        return kv_fail(why, rc, "key %.*s is there twice", (int)twice.len, twice.data);
    return rc < 0 ? kv_fail(why, rc, "no memory for an index of keys") : 0;
}

static int sort_tensors(struct gguf *g, struct kv_why *why)
{
    struct gguf_string twice = {0};
    int rc = sort_entries(g->tensors, (size_t)g->n_tensors, sizeof(*g->tensors), &g->tensors_sorted,
                          &twice);

    if (rc == MODEL_ERR_FORMAT)
        return kv_fail(why, rc, "tensor %.*s is there twice", (int)twice.len, twice.data);
    return rc < 0 ? kv_fail(why, rc, "no memory for an index of tensors") : 0;
}

/* ---- Tensors ---- */

static int read_dims(struct cursor *c, struct gguf_tensor *t, uint64_t *n_weights)
{
    uint32_t i;
    int rc;

    rc = cursor_read(c, &t->n_dims, sizeof(t->n_dims), "n_dims");
    if (rc < 0)
        return rc;
    if (t->n_dims == 0 || t->n_dims > GGUF_MAX_DIMS)
        return kv_fail(c->why, MODEL_ERR_FORMAT, "tensor %.*s: n_dims %u, must be 1..%d",
                       (int)t->name.len, t->name.data, t->n_dims, GGUF_MAX_DIMS);
    *n_weights = 1;
    for (i = 0; i < GGUF_MAX_DIMS; i++) {
        t->dims[i] = 1;
        if (i >= t->n_dims)
            continue;
        rc = cursor_read(c, &t->dims[i], sizeof(t->dims[i]), "dimension");
        if (rc < 0)
            return rc;
        if (t->dims[i] == 0 || __builtin_mul_overflow(*n_weights, t->dims[i], n_weights))
            return kv_fail(c->why, MODEL_ERR_FORMAT, "tensor %.*s: dimension %u is %llu%s",
                           (int)t->name.len, t->name.data, i, (unsigned long long)t->dims[i],
                           t->dims[i] ? ", the product of all is over 64 bits" : "");
    }
    return 0;
}

/* From type and dimensions. */
static int tensor_bytes(struct gguf_tensor *t, uint64_t n_weights, struct kv_why *why)
{
    uint32_t block, block_bytes;
    uint64_t bytes;

    if (!gguf_type_block(t->type, &block, &block_bytes))
        return kv_fail(why, MODEL_ERR_UNSUPPORTED, "tensor %.*s: type %u is unknown or was removed",
                       (int)t->name.len, t->name.data, t->type);
    if (t->dims[0] % block != 0)
        return kv_fail(why, MODEL_ERR_FORMAT,
                       "tensor %.*s: dimension 0 is %llu, not a multiple of %s's block of %u",
                       (int)t->name.len, t->name.data, (unsigned long long)t->dims[0],
                       gguf_type_name(t->type), block);
    if (__builtin_mul_overflow(n_weights / block, block_bytes, &bytes) || bytes > SIZE_MAX / 2)
        return kv_fail(why, MODEL_ERR_FORMAT, "tensor %.*s: %llu weights are over 63 bits of bytes",
                       (int)t->name.len, t->name.data, (unsigned long long)n_weights);
    t->n_bytes = (size_t)bytes;
    return 0;
}

/* One tensor info; *offset is where its data begins in the data section. */
static int read_tensor(struct cursor *c, struct gguf_tensor *t, uint64_t *offset)
{
    uint64_t n_weights = 0;
    int rc;

    rc = cursor_name(c, GGUF_MAX_NAME_BYTES, &t->name, "tensor name");
    if (rc < 0)
        return rc;
    rc = read_dims(c, t, &n_weights);
    if (rc < 0)
        return rc;
    rc = cursor_read(c, &t->type, sizeof(t->type), "tensor type");
    if (rc < 0)
        return rc;
    rc = tensor_bytes(t, n_weights, c->why);
    if (rc < 0)
        return rc;
    return cursor_read(c, offset, sizeof(*offset), "tensor offset");
}

static int align_up(uint64_t value, uint64_t alignment, uint64_t *out)
{
    if (__builtin_add_overflow(value, alignment - 1, out))
        return -1;
    *out &= ~(alignment - 1);
    return 0;
}

/* Past the last tensor there is padding at most.  More of it means that something was not read: a
 * tensor, say, of a count that is too small, and then all the others would stand wrong as well. */
static int check_end(const struct gguf *g, uint64_t padded_end, struct kv_why *why)
{
    if (g->size <= padded_end)
        return 0;
    return kv_fail(why, MODEL_ERR_FORMAT,
                   "n_tensors is %llu, but %llu bytes of the file are after the last tensor",
                   (unsigned long long)g->n_tensors, (unsigned long long)(g->size - padded_end));
}

/* Give every tensor its bytes.  offsets are the file's; data must follow data without a gap. */
static int place_tensors(struct gguf *g, const uint64_t *offsets, struct kv_why *why)
{
    uint64_t expected = 0, data, start, i;

    if (align_up(g->meta_bytes, g->alignment, &data) < 0)
        return kv_fail(why, MODEL_ERR_FORMAT, "metadata of %zu bytes", g->meta_bytes);
    for (i = 0; i < g->n_tensors; i++) {
        struct gguf_tensor *t = &g->tensors[i];

        if (offsets[i] != expected)
            return kv_fail(why, MODEL_ERR_FORMAT, "tensor %.*s: offset %llu, expected %llu",
                           (int)t->name.len, t->name.data, (unsigned long long)offsets[i],
                           (unsigned long long)expected);
        /* start <= size and n_bytes < 2^63 from here on, so no sum below wraps. */
        start = data + offsets[i];
        if (start > g->size || t->n_bytes > g->size - start)
            return kv_fail(why, MODEL_ERR_FORMAT,
                           "tensor %.*s: bytes %llu..%llu, but the file ends at %zu",
                           (int)t->name.len, t->name.data, (unsigned long long)start,
                           (unsigned long long)start + t->n_bytes, g->size);
        t->data = g->base + start;
        if (align_up(offsets[i] + t->n_bytes, g->alignment, &expected) < 0)
            return kv_fail(why, MODEL_ERR_FORMAT, "tensor %.*s: end is over 64 bits",
                           (int)t->name.len, t->name.data);
    }
    return check_end(g, data + expected, why);
}

/* ---- The walk ---- */

static int check_version(struct gguf *g, uint32_t version, struct kv_why *why)
{
    if (version == __builtin_bswap32(2) || version == __builtin_bswap32(3))
        return kv_fail(why, MODEL_ERR_UNSUPPORTED,
                       "the file is big-endian (version reads 0x%08x), only little-endian is "
                       "supported",
                       version);
    if (version != 2 && version != 3)
        return kv_fail(why, MODEL_ERR_UNSUPPORTED, "GGUF version is %u, 2 and 3 are supported",
                       version);
    g->version = version;
    return 0;
}

/* A count of things that are at least `least` bytes each in the file. */
static int check_count(const struct cursor *c, const char *what, uint64_t n, size_t least,
                       uint64_t max)
{
    if (n > cursor_left(c) / least)
        return kv_fail(c->why, MODEL_ERR_FORMAT, "%s is %llu, but %zu bytes are left", what,
                       (unsigned long long)n, cursor_left(c));
    if (n > max)
        return kv_fail(c->why, MODEL_ERR_UNSUPPORTED, "%s is %llu, at most %llu are supported",
                       what, (unsigned long long)n, (unsigned long long)max);
    return 0;
}

static int read_header(struct gguf *g, struct cursor *c)
{
    char magic[4];
    uint32_t version = 0;
    int rc;

    rc = cursor_read(c, magic, sizeof(magic), "magic");
    if (rc < 0)
        return rc;
    if (memcmp(magic, "GGUF", 4) != 0)
        return kv_fail(c->why, MODEL_ERR_FORMAT,
                       "not a GGUF file: magic is %02x %02x %02x %02x, not \"GGUF\"",
                       (unsigned char)magic[0], (unsigned char)magic[1], (unsigned char)magic[2],
                       (unsigned char)magic[3]);
    rc = cursor_read(c, &version, sizeof(version), "version");
    if (rc < 0)
        return rc;
    rc = check_version(g, version, c->why);
    if (rc < 0)
        return rc;
    rc = cursor_read(c, &g->n_tensors, sizeof(g->n_tensors), "n_tensors");
    if (rc < 0)
        return rc;
    rc = cursor_read(c, &g->n_kv, sizeof(g->n_kv), "n_kv");
    if (rc < 0)
        return rc;
    rc = check_count(c, "n_kv", g->n_kv, GGUF_MIN_KV_BYTES, GGUF_MAX_KV);
    if (rc < 0)
        return rc;
    return check_count(c, "n_tensors", g->n_tensors, GGUF_MIN_TENSOR_BYTES, GGUF_MAX_TENSORS);
}

static int read_metadata(struct gguf *g, struct cursor *c)
{
    uint64_t i;
    int rc;

    g->kv = calloc((size_t)g->n_kv + 1, sizeof(*g->kv));
    g->item_offsets = calloc((size_t)g->n_kv + 1, sizeof(*g->item_offsets));
    if (g->kv == NULL || g->item_offsets == NULL)
        return kv_fail(c->why, MODEL_ERR_NOMEM, "no memory for %llu keys",
                       (unsigned long long)g->n_kv);
    for (i = 0; i < g->n_kv; i++) {
        rc = read_kv(c, &g->kv[i], &g->item_offsets[i]);
        if (rc < 0)
            return rc;
    }
    return sort_kv(g, c->why);
}

static int read_alignment(struct gguf *g, struct kv_why *why)
{
    const struct gguf_kv *kv = gguf_find(g, "general.alignment");
    uint32_t a;

    g->alignment = GGUF_DEFAULT_ALIGNMENT;
    if (kv == NULL)
        return 0;
    if (kv->type != GGUF_VALUE_U32)
        return kv_fail(why, MODEL_ERR_FORMAT, "general.alignment is of type %s, must be u32",
                       gguf_value_type_name(kv->type));
    memcpy(&a, kv->value, sizeof(a));
    if (a < GGUF_MIN_ALIGNMENT || a > GGUF_MAX_ALIGNMENT || (a & (a - 1)) != 0)
        return kv_fail(why, MODEL_ERR_FORMAT,
                       "general.alignment is %u, must be a power of two in %d..%d", a,
                       GGUF_MIN_ALIGNMENT, GGUF_MAX_ALIGNMENT);
    g->alignment = a;
    return 0;
}

static int check_split(const struct gguf *g, struct kv_why *why)
{
    uint32_t n = 0;
    int rc = gguf_get_u32(g, "split.count", &n, why);

    if (rc < 0)
        return rc;
    if (n > 1)
        return kv_fail(why, MODEL_ERR_UNSUPPORTED,
                       "split.count is %u: split files are not supported, merge them into one", n);
    return 0;
}

static int read_tensors(struct gguf *g, struct cursor *c)
{
    uint64_t *offsets = NULL, i;
    int rc;

    rc = check_count(c, "n_tensors", g->n_tensors, GGUF_MIN_TENSOR_BYTES, GGUF_MAX_TENSORS);
    if (rc < 0)
        return rc;
    g->tensors = calloc((size_t)g->n_tensors + 1, sizeof(*g->tensors));
    offsets = calloc((size_t)g->n_tensors + 1, sizeof(*offsets));
    if (g->tensors == NULL || offsets == NULL) {
        rc = kv_fail(c->why, MODEL_ERR_NOMEM, "no memory for %llu tensors",
                     (unsigned long long)g->n_tensors);
        goto out;
    }
    for (i = 0; i < g->n_tensors; i++) {
        rc = read_tensor(c, &g->tensors[i], &offsets[i]);
        if (rc < 0)
            goto out;
    }
    rc = sort_tensors(g, c->why);
    if (rc < 0)
        goto out;
    g->meta_bytes = c->pos;
    rc = place_tensors(g, offsets, c->why);
out:
    free(offsets);
    return rc;
}

static int walk(struct gguf *g, struct kv_why *why)
{
    struct cursor c = {.base = g->base, .end = g->size, .of = {.data = ""}, .why = why};
    int rc;

    if (c.end > GGUF_MAX_META_BYTES) {
        c.end = GGUF_MAX_META_BYTES;
        c.cut = true;
    }
    rc = read_header(g, &c);
    if (rc < 0)
        return rc;
    rc = read_metadata(g, &c);
    if (rc < 0)
        return rc;
    rc = read_alignment(g, why);
    if (rc < 0)
        return rc;
    rc = check_split(g, why);
    if (rc < 0)
        return rc;
    return read_tensors(g, &c);
}

static int map_file(struct gguf *g, const char *path, struct kv_why *why)
{
    void *base;

    /* Not blocking: a FIFO is refused below, not waited for. */
    g->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (g->fd < 0 || fstat(g->fd, &g->st) < 0)
        return kv_fail(why, MODEL_ERR_IO, "%s: %s", path, strerror(errno));
    if (!S_ISREG(g->st.st_mode))
        return kv_fail(why, MODEL_ERR_IO, "%s: not a regular file", path);
    if (g->st.st_size < GGUF_HEADER_BYTES)
        return kv_fail(why, MODEL_ERR_FORMAT, "not a GGUF file: %lld bytes, a header has %d",
                       (long long)g->st.st_size, GGUF_HEADER_BYTES);
    if ((uint64_t)g->st.st_size > SIZE_MAX / 2)
        return kv_fail(why, MODEL_ERR_UNSUPPORTED, "%s: %lld bytes cannot be mapped", path,
                       (long long)g->st.st_size);
    base = mmap(NULL, (size_t)g->st.st_size, PROT_READ, MAP_PRIVATE, g->fd, 0);
    if (base == MAP_FAILED)
        return kv_fail(why, MODEL_ERR_IO, "%s: cannot be mapped: %s", path, strerror(errno));
    g->base = base;
    g->size = (size_t)g->st.st_size;
    return 0;
}

int gguf_open(const char *path, struct gguf **out, struct kv_why *why)
{
    struct gguf *g = calloc(1, sizeof(*g));
    int rc;

    if (g == NULL)
        return kv_fail(why, MODEL_ERR_NOMEM, "no memory for a file's tables");
    g->fd = -1;
    rc = map_file(g, path, why);
    if (rc < 0)
        goto out;
    rc = walk(g, why);
    if (rc < 0)
        goto out;
    *out = g;
    g = NULL; /* now the caller's */
out:
    gguf_close(g);
    return rc;
}

void gguf_close(struct gguf *g)
{
    uint64_t i;

    if (g == NULL)
        return;
    for (i = 0; g->item_offsets != NULL && i < g->n_kv; i++)
        free(g->item_offsets[i]);
    free(g->item_offsets);
    free(g->kv);
    free(g->kv_sorted);
    free(g->tensors);
    free(g->tensors_sorted);
    if (g->base != NULL)
        munmap((void *)(uintptr_t)g->base, g->size);
    if (g->fd >= 0)
        close(g->fd);
    free(g);
}

uint32_t gguf_version(const struct gguf *g)
{
    return g->version;
}

size_t gguf_file_bytes(const struct gguf *g)
{
    return g->size;
}

uint64_t gguf_n_kv(const struct gguf *g)
{
    return g->n_kv;
}

const struct gguf_kv *gguf_kv_at(const struct gguf *g, uint64_t i)
{
    return i < g->n_kv ? &g->kv[i] : NULL;
}

uint64_t gguf_n_tensors(const struct gguf *g)
{
    return g->n_tensors;
}

const struct gguf_tensor *gguf_tensor_at(const struct gguf *g, uint64_t i)
{
    return i < g->n_tensors ? &g->tensors[i] : NULL;
}

const struct gguf_kv *gguf_find(const struct gguf *g, const char *key)
{
    return find_entry(g->kv_sorted, (size_t)g->n_kv, key);
}

const struct gguf_tensor *gguf_find_tensor(const struct gguf *g, const char *name)
{
    return find_entry(g->tensors_sorted, (size_t)g->n_tensors, name);
}

struct gguf_string gguf_array_string(const struct gguf *g, const struct gguf_kv *array, uint64_t i)
{
    struct gguf_string s = {.data = "", .len = 0};
    const uint32_t *offsets = g->item_offsets[array - g->kv];
    uint64_t len = 0;

    if (offsets == NULL || i >= array->n_items)
        return s;
    memcpy(&len, array->value + offsets[i], sizeof(len));
    s.data = (const char *)array->value + offsets[i] + sizeof(len);
    s.len = (size_t)len;
    return s;
}

#include "gguf_image.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ALIGNMENT = 32 };

static size_t padding(size_t n)
{
    return (ALIGNMENT - n % ALIGNMENT) % ALIGNMENT;
}

static uint64_t get(const unsigned char *p, unsigned width)
{
    uint64_t v = 0;

    memcpy(&v, p, width);
    return v;
}

/* ---- Layout, by a walk of its own ---- */

static size_t scalar_bytes(uint32_t type)
{
    static const size_t bytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

    return bytes[type];
}

static size_t value_end(const unsigned char *b, size_t at, uint32_t type)
{
    if (type == GGUF_VALUE_STRING)
        return at + 8 + get(b + at, 8);
    if (type != GGUF_VALUE_ARRAY)
        return at + scalar_bytes(type);
    uint32_t item = (uint32_t)get(b + at, 4);
    uint64_t n = get(b + at + 4, 8);

    at += 12;
    if (item != GGUF_VALUE_STRING)
        return at + n * scalar_bytes(item);
    while (n-- > 0)
        at += 8 + get(b + at, 8);
    return at;
}

static size_t kv_end(const unsigned char *b, size_t at)
{
    at += 8 + get(b + at, 8);
    return value_end(b, at + 4, (uint32_t)get(b + at, 4));
}

static size_t tensor_end(const unsigned char *b, size_t at)
{
    at += 8 + get(b + at, 8);
    return at + 4 + 8 * get(b + at, 4) + 4 + 8;
}

static size_t kvs_end(const struct image *im)
{
    uint64_t i, n = get(im->bytes + 16, 8);
    size_t at = 24;

    for (i = 0; i < n; i++)
        at = kv_end(im->bytes, at);
    return at;
}

static void measure(struct image *im)
{
    uint64_t i, n = get(im->bytes + 8, 8);
    size_t at = kvs_end(im);

    for (i = 0; i < n; i++)
        at = tensor_end(im->bytes, at);
    im->meta = at;
    im->data = at + padding(at);
}

struct image image_load(const char *path)
{
    struct image im = {0};
    FILE *f = fopen(path, "rb");
    long len;

    ck_assert_msg(f != NULL, "%s cannot be read", path);
    ck_assert_int_eq(fseek(f, 0, SEEK_END), 0);
    len = ftell(f);
    ck_assert_int_gt(len, 24);
    rewind(f);
    im.len = (size_t)len;
    im.bytes = malloc(im.len);
    ck_assert_ptr_nonnull(im.bytes);
    ck_assert_uint_eq(fread(im.bytes, 1, im.len, f), im.len);
    fclose(f);
    measure(&im);
    return im;
}

struct image image_tiny(const char *name)
{
    char path[512];

    snprintf(path, sizeof(path), "%s/tests/tiny/%s.gguf", BATON_BINARY_DIR, name);
    return image_load(path);
}

void image_release(struct image *im)
{
    free(im->bytes);
    memset(im, 0, sizeof(*im));
}

/* ---- Edits ---- */

size_t image_find(const struct image *im, const char *name)
{
    size_t len = strlen(name), at;

    for (at = 24; at + 8 + len <= im->meta; at++) {
        if (get(im->bytes + at, 8) == len && memcmp(im->bytes + at + 8, name, len) == 0)
            return at + 8;
    }
    ck_abort_msg("%s is not in the file", name);
}

size_t image_tensor(const struct image *im, const char *name)
{
    size_t at = image_find(im, name) + strlen(name);

    return im->data + get(im->bytes + at + 4 + 8 * get(im->bytes + at, 4) + 4, 8);
}

void image_rename(struct image *im, const char *name, const char *to)
{
    ck_assert_uint_eq(strlen(name), strlen(to));
    memcpy(im->bytes + image_find(im, name), to, strlen(to));
}

void image_put(struct image *im, size_t at, unsigned width, uint64_t value)
{
    ck_assert_uint_le(at + width, im->len);
    memcpy(im->bytes + at, &value, width);
}

void image_set(struct image *im, const char *key, unsigned width, uint64_t value)
{
    image_put(im, image_find(im, key) + strlen(key) + 4, width, value);
}

/* Replace n_old bytes of metadata at `at` with n_new ones, and move the data to where it belongs.
 */
static void splice(struct image *im, size_t at, size_t n_old, const void *new, size_t n_new)
{
    size_t meta = im->meta - n_old + n_new, data = meta + padding(meta);
    unsigned char *b = calloc(1, data + im->len - im->data);

    ck_assert_ptr_nonnull(b);
    memcpy(b, im->bytes, at);
    if (n_new > 0)
        memcpy(b + at, new, n_new);
    memcpy(b + at + n_new, im->bytes + at + n_old, im->meta - at - n_old);
    memcpy(b + data, im->bytes + im->data, im->len - im->data);
    free(im->bytes);
    im->len = data + im->len - im->data;
    im->bytes = b;
    im->meta = meta;
    im->data = data;
}

void image_add(struct image *im, const char *key, uint32_t type, const void *value, size_t len)
{
    size_t key_len = strlen(key), n = 8 + key_len + 4 + len;
    unsigned char *kv = calloc(1, n);

    ck_assert_ptr_nonnull(kv);
    memcpy(kv, &key_len, 8);
    memcpy(kv + 8, key, key_len);
    memcpy(kv + 8 + key_len, &type, 4);
    memcpy(kv + 12 + key_len, value, len);
    splice(im, 24, 0, kv, n);
    free(kv);
    image_put(im, 16, 8, get(im->bytes + 16, 8) + 1);
}

void image_add_u32(struct image *im, const char *key, uint32_t value)
{
    image_add(im, key, GGUF_VALUE_U32, &value, sizeof(value));
}

void image_add_f32(struct image *im, const char *key, float value)
{
    image_add(im, key, GGUF_VALUE_F32, &value, sizeof(value));
}

void image_add_string(struct image *im, const char *key, const char *value)
{
    unsigned char bytes[256];
    uint64_t len = strlen(value);

    ck_assert_uint_lt(len, sizeof(bytes) - 8);
    memcpy(bytes, &len, 8);
    memcpy(bytes + 8, value, len);
    image_add(im, key, GGUF_VALUE_STRING, bytes, 8 + len);
}

void image_remove(struct image *im, const char *key)
{
    size_t at = image_find(im, key) - 8;

    splice(im, at, kv_end(im->bytes, at) - at, NULL, 0);
    image_put(im, 16, 8, get(im->bytes + 16, 8) - 1);
}

void image_add_tensor(struct image *im, const char *name, uint32_t type, uint64_t cols,
                      uint64_t rows, size_t n_bytes)
{
    size_t name_len = strlen(name), data_len = im->len - im->data;
    uint32_t n_dims = 2;
    unsigned char info[128], *b;
    uint64_t offset = data_len + padding(data_len);

    ck_assert_uint_lt(name_len, 64);
    memcpy(info, &name_len, 8);
    memcpy(info + 8, name, name_len);
    memcpy(info + 8 + name_len, &n_dims, 4);
    memcpy(info + 12 + name_len, &cols, 8);
    memcpy(info + 20 + name_len, &rows, 8);
    memcpy(info + 28 + name_len, &type, 4);
    memcpy(info + 32 + name_len, &offset, 8);
    splice(im, im->meta, 0, info, 40 + name_len);
    b = calloc(1, im->data + offset + n_bytes);
    ck_assert_ptr_nonnull(b);
    memcpy(b, im->bytes, im->len);
    free(im->bytes);
    im->bytes = b;
    im->len = im->data + offset + n_bytes;
    image_put(im, 8, 8, get(im->bytes + 8, 8) + 1);
}

/* ---- Opening ---- */

static int file_of(const struct image *im, size_t n_bytes, char path[64])
{
    int fd = memfd_create("image", MFD_CLOEXEC);

    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(write(fd, im->bytes, n_bytes), (ssize_t)n_bytes);
    snprintf(path, 64, "/proc/self/fd/%d", fd);
    return fd;
}

int image_file(const struct image *im, char path[64])
{
    return file_of(im, im->len, path);
}

int image_open_part(const struct image *im, size_t n_bytes, struct gguf **out, struct kv_why *why)
{
    char path[64];
    int fd = file_of(im, n_bytes, path), rc;

    rc = gguf_open(path, out, why);
    close(fd);
    return rc;
}

int image_open(const struct image *im, struct gguf **out, struct kv_why *why)
{
    return image_open_part(im, im->len, out, why);
}

void image_refused(const struct image *im, int rc, const char *text)
{
    struct gguf *g = NULL;
    struct kv_why why = {""};
    int got = image_open(im, &g, &why);

    ck_assert_msg(got < 0, "a file is accepted that must be refused with \"%s\"", text);
    ck_assert_ptr_null(g);
    ck_assert_msg(got == rc && strstr(why.text, text) != NULL,
                  "refused with %d \"%s\", must be %d \"%s\"", got, why.text, rc, text);
}

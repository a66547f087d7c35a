/* A GGUF file in memory that tests bend: fields are found by the name before them and overwritten,
 * keys and tensors are added, and the result is opened through a file without a name.
 *
 * Finding and editing know the format by themselves and trust the file, which is a good one of
 * make_tiny_gguf.py: nothing here uses the reader under test. */
#ifndef TESTS_GGUF_IMAGE_H
#define TESTS_GGUF_IMAGE_H

#include "model/model.h"

struct image {
    unsigned char *bytes;
    size_t len;
    size_t meta; /* bytes up to the end of the tensor infos */
    size_t data; /* where the data section begins */
};

/* The bytes of a file, or of build/.../tests/tiny/NAME.gguf.  Fails the test where it cannot. */
struct image image_load(const char *path);
struct image image_tiny(const char *name);
void image_release(struct image *im);

/* Offset of the first byte of a key or tensor name in the metadata; its length stands 8 before. */
size_t image_find(const struct image *im, const char *name);
/* Offset of the first byte of a tensor's data. */
size_t image_tensor(const struct image *im, const char *name);
/* Give a key or a tensor another name of the same length. */
void image_rename(struct image *im, const char *name, const char *to);
/* Overwrite width bytes at a place with a little-endian value. */
void image_put(struct image *im, size_t at, unsigned width, uint64_t value);
/* Overwrite the value of a scalar key. */
void image_set(struct image *im, const char *key, unsigned width, uint64_t value);

/* Add a key with the value's bytes as they stand in a file. */
void image_add(struct image *im, const char *key, uint32_t type, const void *value, size_t len);
void image_add_u32(struct image *im, const char *key, uint32_t value);
void image_add_f32(struct image *im, const char *key, float value);
void image_add_string(struct image *im, const char *key, const char *value);
/* Take out a key and its value. */
void image_remove(struct image *im, const char *key);
/* Add a tensor of zeros behind the others. */
void image_add_tensor(struct image *im, const char *name, uint32_t type, uint64_t cols,
                      uint64_t rows, size_t n_bytes);

/* gguf_open() of the bytes; n_bytes of them in image_open_part(). */
int image_open(const struct image *im, struct gguf **out, struct kv_why *why);
int image_open_part(const struct image *im, size_t n_bytes, struct gguf **out, struct kv_why *why);

/* Open, expecting rc and a message that holds text. */
void image_refused(const struct image *im, int rc, const char *text);

/* A file without a name that holds the bytes, and its path while fd is open. */
int image_file(const struct image *im, char path[64]);

#endif

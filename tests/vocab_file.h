/* Files for the tokenizer's tests: those beside the checkout, the default model, and small ones
 * written here key by key. */
#ifndef TESTS_VOCAB_FILE_H
#define TESTS_VOCAB_FILE_H

#include "model/model.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The folder of reference data beside the checkout. */
#define REFERENCE BATON_SOURCE_DIR "/../shared/reference/"

/* Print that a case is left out; true where the file is absent. */
static inline bool skip_without(const char *name, const char *path)
{
    if (path != NULL && access(path, R_OK) == 0)
        return false;
    printf("SKIP %s: %s is not there\n", name, path == NULL ? "the default model" : path);
    fflush(stdout);
    return true;
}

/* The default model's path in a static buffer. */
static inline const char *default_model(void)
{
    static char path[4096];
    const char *model = getenv("BATON_MODEL"), *cache = getenv("XDG_CACHE_HOME");
    const char *home = getenv("HOME");

    if (model != NULL && *model != '\0')
        snprintf(path, sizeof path, "%s", model);
    else if (cache != NULL && *cache != '\0')
        snprintf(path, sizeof path, "%s/baton/SmolLM2-135M-Instruct.Q4_1.gguf", cache);
    else
        snprintf(path, sizeof path, "%s/.cache/baton/SmolLM2-135M-Instruct.Q4_1.gguf",
                 home == NULL ? "" : home);
    return path;
}

/* A whole file, NUL behind it; the caller frees it. */
static inline char *read_whole(const char *path, size_t *len)
{
    FILE *f = fopen(path, "rb");
    size_t cap = 1 << 22;
    char *text = malloc(cap);

    ck_assert_msg(f != NULL && text != NULL, "%s", path);
    *len = fread(text, 1, cap - 1, f);
    ck_assert_uint_lt(*len, cap - 1);
    text[*len] = '\0';
    fclose(f);
    return text;
}

/* ---- Writing a GGUF of metadata alone ---- */

struct vocab_file {
    unsigned char bytes[256 * 1024];
    size_t n;
    uint64_t n_kv;
};

static inline void vf_put(struct vocab_file *f, const void *bytes, size_t n)
{
    ck_assert_uint_le(f->n + n, sizeof f->bytes);
    memcpy(f->bytes + f->n, bytes, n);
    f->n += n;
}

static inline void vf_string(struct vocab_file *f, const char *text)
{
    uint64_t len = strlen(text);

    vf_put(f, &len, 8);
    vf_put(f, text, len);
}

static inline void vf_begin(struct vocab_file *f)
{
    static const unsigned char head[24] = {'G', 'G', 'U', 'F', 3};

    f->n = 0;
    f->n_kv = 0;
    vf_put(f, head, sizeof head);
}

static inline void vf_key(struct vocab_file *f, const char *key, uint32_t type)
{
    f->n_kv++;
    vf_string(f, key);
    vf_put(f, &type, 4);
}

static inline void vf_text(struct vocab_file *f, const char *key, const char *value)
{
    vf_key(f, key, GGUF_VALUE_STRING);
    vf_string(f, value);
}

static inline void vf_u32(struct vocab_file *f, const char *key, uint32_t value)
{
    vf_key(f, key, GGUF_VALUE_U32);
    vf_put(f, &value, 4);
}

static inline void vf_bool(struct vocab_file *f, const char *key, unsigned char value)
{
    vf_key(f, key, GGUF_VALUE_BOOL);
    vf_put(f, &value, 1);
}

static inline void vf_array(struct vocab_file *f, const char *key, uint32_t item, uint64_t n)
{
    vf_key(f, key, GGUF_VALUE_ARRAY);
    vf_put(f, &item, 4);
    vf_put(f, &n, 8);
}

static inline void vf_texts(struct vocab_file *f, const char *key, const char *const *texts,
                            size_t n)
{
    vf_array(f, key, GGUF_VALUE_STRING, n);
    for (size_t i = 0; i < n; i++)
        vf_string(f, texts[i]);
}

/* Write the file and open it. */
static inline struct gguf *vf_open(struct vocab_file *f)
{
    char path[] = "/tmp/baton-test-XXXXXX";
    struct gguf *g = NULL;
    struct kv_why why = {"ok"};
    int fd = mkstemp(path), rc;

    ck_assert_int_ge(fd, 0);
    memcpy(f->bytes + 16, &f->n_kv, 8);
    ck_assert_int_eq(write(fd, f->bytes, f->n), (ssize_t)f->n);
    close(fd);
    rc = gguf_open(path, &g, &why);
    unlink(path);
    ck_assert_msg(rc == 0, "%s", why.text);
    return g;
}

#endif

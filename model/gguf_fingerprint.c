/* SHA-256 over a file's metadata and tensor data, and the cache that makes it a one-time cost.
 *
 * The cache is a folder of small files, each one line:
 *
 *   baton-fingerprint-1 DEVICE INODE SIZE MTIME_S MTIME_NS SHA256 CHECK
 *
 * CHECK is the beginning of the SHA-256 of everything before it.  A line that does not hold, or is
 * of another file, is as good as none.  A file's slot is a hash of its identity, so the folder
 * never holds more than N_SLOTS files; two models that meet in one slot take turns. */
#include "model/gguf_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    N_SLOTS = 256,
    /* Below this a digest takes milliseconds, and files made in passing leave no trace. */
    CACHE_MIN_BYTES = 4 * 1024 * 1024,
    /* A file changed again within the clock's grain keeps its mtime, so that a file this young is
     * not cached: its identity does not yet settle its content. */
    CACHE_MIN_AGE_S = 2,
    CHECK_HEX = 16,
    SHA256_HEX = 2 * KV_DIGEST_BYTES,
    LINE_MAX_BYTES = 256,
};

/* ---- Digest ---- */

static bool digest_file(EVP_MD_CTX *ctx, const struct gguf *g, struct kv_digest *out)
{
    uint64_t i;

    if (!EVP_DigestInit_ex(ctx, EVP_sha256(), NULL) ||
        !EVP_DigestUpdate(ctx, g->base, g->meta_bytes))
        return false;
    for (i = 0; i < g->n_tensors; i++) {
        if (!EVP_DigestUpdate(ctx, g->tensors[i].data, g->tensors[i].n_bytes))
            return false;
    }
    return EVP_DigestFinal_ex(ctx, out->bytes, NULL) != 0;
}

int gguf_fingerprint_compute(const struct gguf *g, struct kv_digest *out, struct kv_why *why)
{
    EVP_MD_CTX *ctx = EVP_MD_CTX_new();
    struct kv_digest digest;
    bool ok = ctx != NULL && digest_file(ctx, g, &digest);

    EVP_MD_CTX_free(ctx);
    if (!ok)
        return kv_fail(why, MODEL_ERR_NOMEM, "SHA-256 of the file failed");
    *out = digest;
    return 0;
}

static void to_hex(const uint8_t *bytes, size_t n, char *out)
{
    static const char digits[] = "0123456789abcdef";
    size_t i;

    for (i = 0; i < n; i++) {
        out[2 * i] = digits[bytes[i] >> 4];
        out[2 * i + 1] = digits[bytes[i] & 15];
    }
    out[2 * n] = '\0';
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static bool from_hex(const char *hex, size_t n, uint8_t *out)
{
    size_t i;

    for (i = 0; i < n; i++) {
        int high = hex_digit(hex[2 * i]), low = high < 0 ? -1 : hex_digit(hex[2 * i + 1]);

        if (low < 0)
            return false;
        out[i] = (uint8_t)(high << 4 | low);
    }
    return true;
}

/* ---- Cache ---- */

/* The part of a line that says which file it is of; ends in a space. */
static int format_identity(const struct stat *st, char *out, size_t n)
{
    return snprintf(out, n, "baton-fingerprint-1 %llu %llu %lld %lld %ld ",
                    (unsigned long long)st->st_dev, (unsigned long long)st->st_ino,
                    (long long)st->st_size, (long long)st->st_mtim.tv_sec, st->st_mtim.tv_nsec);
}

static bool text_digest(const char *text, size_t len, uint8_t out[KV_DIGEST_BYTES])
{
    return EVP_Digest(text, len, out, NULL, EVP_sha256(), NULL) != 0;
}

/* The whole line for a digest; its length, or -1. */
static int format_line(const struct stat *st, const struct kv_digest *digest, char *out, size_t n)
{
    uint8_t check[KV_DIGEST_BYTES];
    char hex[SHA256_HEX + 1];
    int len = format_identity(st, out, n);

    if (len < 0 || (size_t)len + SHA256_HEX + 1 + CHECK_HEX + 2 > n)
        return -1;
    to_hex(digest->bytes, KV_DIGEST_BYTES, hex);
    len += snprintf(out + len, n - (size_t)len, "%s ", hex);
    if (!text_digest(out, (size_t)len, check))
        return -1;
    to_hex(check, CHECK_HEX / 2, hex);
    return len + snprintf(out + len, n - (size_t)len, "%s\n", hex);
}

/* The cache folder with its slot of this file, into path.  False where the user has no home. */
static bool slot_path(const struct stat *st, char *path, size_t n)
{
    const char *base = getenv("XDG_CACHE_HOME"), *below = "";
    uint8_t digest[KV_DIGEST_BYTES];
    char line[LINE_MAX_BYTES];
    int len;

    if (base == NULL || base[0] != '/') {
        base = getenv("HOME");
        below = "/.cache";
    }
    if (base == NULL || base[0] != '/')
        return false;
    len = format_identity(st, line, sizeof(line));
    if (len < 0 || !text_digest(line, (size_t)len, digest))
        return false;
    len = snprintf(path, n, "%s%s/baton/fingerprints/%02x", base, below, digest[0] % N_SLOTS);
    return len > 0 && (size_t)len < n;
}

static bool cache_read(const struct stat *st, struct kv_digest *out)
{
    char path[4096], line[LINE_MAX_BYTES], expected[LINE_MAX_BYTES];
    int fd, id_len = format_identity(st, line, sizeof(line)), expected_len;
    struct kv_digest digest;
    ssize_t len;

    if (!slot_path(st, path, sizeof(path)))
        return false;
    fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return false;
    len = read(fd, line, sizeof(line));
    close(fd);
    /* What it says is believed only where it is exactly the line that would be written for it. */
    if (len < id_len + SHA256_HEX || !from_hex(line + id_len, KV_DIGEST_BYTES, digest.bytes))
        return false;
    expected_len = format_line(st, &digest, expected, sizeof(expected));
    if (expected_len != len || memcmp(line, expected, (size_t)len) != 0)
        return false;
    *out = digest;
    return true;
}

/* mkdir -p of everything before the last slash. */
static bool make_folders(char *path)
{
    char *slash;

    for (slash = strchr(path + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        if (mkdir(path, 0700) < 0 && errno != EEXIST)
            return false;
        *slash = '/';
    }
    return true;
}

static void cache_write(const struct stat *st, const struct kv_digest *digest)
{
    char path[4096], temp[4096 + 16], line[LINE_MAX_BYTES];
    int fd, len = format_line(st, digest, line, sizeof(line));
    bool ok;

    if (len < 0 || !slot_path(st, path, sizeof(path)) || !make_folders(path))
        return;
    snprintf(temp, sizeof(temp), "%s.XXXXXX", path);
    fd = mkostemp(temp, O_CLOEXEC); /* mode 0600 */
    if (fd < 0)
        return;
    ok = write(fd, line, (size_t)len) == len;
    ok = close(fd) == 0 && ok;
    if (!ok || rename(temp, path) < 0)
        unlink(temp);
}

/* ---- Both ---- */

static bool same_file(const struct stat *a, const struct stat *b)
{
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino && a->st_size == b->st_size &&
           a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

static bool old_enough(const struct stat *st)
{
    struct timespec now;

    return clock_gettime(CLOCK_REALTIME, &now) == 0 &&
           now.tv_sec - st->st_mtim.tv_sec > CACHE_MIN_AGE_S;
}

int gguf_fingerprint(const struct gguf *g, struct kv_digest *out, struct kv_why *why)
{
    bool cached = g->size >= CACHE_MIN_BYTES && old_enough(&g->st);
    struct kv_digest digest;
    struct stat now;
    int rc;

    /* The tables were read when the file was as g->st says; the data is read now. */
    if (fstat(g->fd, &now) < 0 || !same_file(&now, &g->st))
        return kv_fail(why, MODEL_ERR_IO, "the file was changed since it was opened");
    if (cached && cache_read(&g->st, out))
        return 0;
    rc = gguf_fingerprint_compute(g, &digest, why);
    if (rc < 0)
        return rc;
    if (fstat(g->fd, &now) < 0 || !same_file(&now, &g->st))
        return kv_fail(why, MODEL_ERR_IO, "the file was changed while it was read");
    if (cached)
        cache_write(&g->st, &digest);
    *out = digest;
    return 0;
}

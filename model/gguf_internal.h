/* An open GGUF file.  Private to model/.
 *
 * The file, little-endian, all lengths u64 (strings are a length and bytes):
 *
 *   0   "GGUF"
 *   4   u32 version (2 and 3 are laid out alike; 1 had 32-bit lengths)
 *   8   u64 n_tensors
 *   16  u64 n_kv
 *   24  n_kv times: string key, u32 value type, value
 *         (array: u32 item type, u64 n_items, items)
 *       n_tensors times: string name, u32 n_dims, u64 dims[n_dims], u32 type, u64 offset
 *       padding to general.alignment: the data section, in which offsets count
 *
 * Nothing in struct gguf points anywhere that has not been checked to lie inside the file. */
#ifndef MODEL_GGUF_INTERNAL_H
#define MODEL_GGUF_INTERNAL_H

#include "model/model.h"

#include <sys/stat.h>

enum {
    /* Bounds of what a file may declare, checked before anything is allocated for it.  The largest
     * vocabularies in use need about 20 MB of metadata. */
    GGUF_MAX_META_BYTES = 64 * 1024 * 1024,
    GGUF_MAX_KV = 64 * 1024,
    GGUF_MAX_TENSORS = 128 * 1024,
    GGUF_MAX_KEY_BYTES = 255,
    GGUF_MAX_NAME_BYTES = 63,
    GGUF_MAX_DIMS = 4,
    GGUF_MIN_ALIGNMENT = 8,
    GGUF_MAX_ALIGNMENT = 1024 * 1024,
    GGUF_DEFAULT_ALIGNMENT = 32,
    GGUF_HEADER_BYTES = 24,
    GGUF_MIN_KV_BYTES = 8 + 1 + 4 + 1,
    GGUF_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8,
};

struct gguf {
    int fd;
    struct stat st; /* when it was opened */
    const unsigned char *base;
    size_t size;

    uint32_t version;
    uint32_t alignment;
    size_t meta_bytes; /* header, metadata and tensor infos, without the padding */

    uint64_t n_kv;
    struct gguf_kv *kv;               /* in file order */
    const struct gguf_kv **kv_sorted; /* by key */
    uint32_t **item_offsets; /* [n_kv]: of a string array, each item's offset from value; or NULL */

    uint64_t n_tensors;
    struct gguf_tensor *tensors; /* in file order */
    const struct gguf_tensor **tensors_sorted;
};

/* Bytes of one value of a scalar type; 0 for strings, arrays and unknown types. */
size_t gguf_value_size(uint32_t type);
/* "u32", "string", ...; "unknown" for anything else. */
const char *gguf_value_type_name(uint32_t type);

/* Write the bytes as printable ASCII, everything else as \xNN, cut with "..." where it does not
 * fit.  buf is NUL-terminated.  Returns buf. */
const char *gguf_escape(const void *data, size_t len, char *buf, size_t n);

/* SHA-256 without the cache. */
int gguf_fingerprint_compute(const struct gguf *g, struct kv_digest *out, struct kv_why *why);

#endif

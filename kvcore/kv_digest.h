/* SHA-256 fed in parts. */
#ifndef KV_DIGEST_H
#define KV_DIGEST_H

#include "kvcore/kvcore.h"

/* OpenSSL 3 would have every hash go through EVP, which allocates and may fail.  These calls work
 * in the caller's memory and cannot, so a digest has no error path. */
#define OPENSSL_SUPPRESS_DEPRECATED
#include <openssl/sha.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "ids and rows are hashed and written as they stand in memory: little-endian");

struct kv_hash {
    SHA256_CTX ctx;
};

void kv_hash_init(struct kv_hash *h);
void kv_hash_add(struct kv_hash *h, const void *data, size_t len);
void kv_hash_add_u32(struct kv_hash *h, uint32_t value);
void kv_hash_end(struct kv_hash *h, struct kv_digest *out);

bool kv_digest_equal(const struct kv_digest *a, const struct kv_digest *b);

/* D(p->n + n) without feeding: the n ids must not go past the next border. */
void kv_prefix_ahead(const struct kv_prefix *p, const uint32_t *ids, uint32_t n,
                     struct kv_digest *out);

#endif

/* Bytes that stand in pieces, read in order. */
#ifndef KV_PIECES_H
#define KV_PIECES_H

#include "kvcore/kvcore.h"

struct kv_reader {
    const struct iovec *src;
    size_t n_src;
    size_t at; /* in src[0] */
};

/* All bytes of the pieces; SIZE_MAX where they do not add up in 64 bits. */
size_t kv_pieces_bytes(const struct iovec *src, size_t n_src);

struct kv_reader kv_reader_at(const struct iovec *src, size_t n_src, size_t offset);

/* The next bytes that stand in one piece, at most n and at least 1; there are n. */
const unsigned char *kv_reader_run(struct kv_reader *r, size_t n, size_t *n_run);

/* The next n bytes; there are so many. */
void kv_reader_read(struct kv_reader *r, void *dst, size_t n);

#endif

/* A received message holds gRPC's byte buffer, and its pieces are the buffer's slices where they
 * stand: peeked, not copied, so they die with the buffer. */
#include "transport/transport_message.h"

#include <grpc/byte_buffer_reader.h>
#include <grpc/slice.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

struct transport_message {
    /* Set when it is made, read-only afterwards. */
    grpc_byte_buffer *buffer;
    size_t bytes;

    atomic_uint refs;
    _Atomic(uint8_t *) flat; /* release/acquire: the bytes that it points to */
};

struct transport_message *transport_message_new(grpc_byte_buffer *buffer)
{
    struct transport_message *m = calloc(1, sizeof(*m));

    if (!m) {
        grpc_byte_buffer_destroy(buffer);
        return NULL;
    }
    m->buffer = buffer;
    m->bytes = grpc_byte_buffer_length(buffer);
    atomic_init(&m->refs, 1);
    return m;
}

size_t transport_message_bytes(const struct transport_message *m)
{
    return m->bytes;
}

size_t transport_message_pieces(const struct transport_message *m, struct iovec *out, size_t max)
{
    grpc_byte_buffer_reader reader;
    grpc_slice *slice;
    size_t n = 0;

    if (!grpc_byte_buffer_reader_init(&reader, m->buffer))
        return 0;
    while (grpc_byte_buffer_reader_peek(&reader, &slice)) {
        if (GRPC_SLICE_LENGTH(*slice) == 0)
            continue;
        if (n < max) {
            out[n].iov_base = GRPC_SLICE_START_PTR(*slice);
            out[n].iov_len = GRPC_SLICE_LENGTH(*slice);
        }
        n++;
    }
    grpc_byte_buffer_reader_destroy(&reader);
    return n;
}

static void copy_all(const struct transport_message *m, uint8_t *to)
{
    grpc_byte_buffer_reader reader;
    grpc_slice *slice;

    if (!grpc_byte_buffer_reader_init(&reader, m->buffer))
        return;
    while (grpc_byte_buffer_reader_peek(&reader, &slice)) {
        memcpy(to, GRPC_SLICE_START_PTR(*slice), GRPC_SLICE_LENGTH(*slice));
        to += GRPC_SLICE_LENGTH(*slice);
    }
    grpc_byte_buffer_reader_destroy(&reader);
}

const uint8_t *transport_message_flat(struct transport_message *m)
{
    static const uint8_t nothing;
    struct iovec piece;
    uint8_t *flat, *first = NULL;

    flat = atomic_load_explicit(&m->flat, memory_order_acquire);
    if (flat)
        return flat;
    if (m->bytes == 0)
        return &nothing;
    if (transport_message_pieces(m, &piece, 1) == 1)
        return piece.iov_base;
    flat = malloc(m->bytes);
    if (!flat)
        return NULL;
    copy_all(m, flat);
    /* Two threads may both have copied; the first to get here wins. */
    if (!atomic_compare_exchange_strong(&m->flat, &first, flat)) {
        free(flat);
        return first;
    }
    return flat;
}

struct transport_message *transport_message_ref(struct transport_message *m)
{
    atomic_fetch_add_explicit(&m->refs, 1, memory_order_relaxed);
    return m;
}

void transport_message_unref(struct transport_message *m)
{
    if (!m || atomic_fetch_sub_explicit(&m->refs, 1, memory_order_acq_rel) != 1)
        return;
    grpc_byte_buffer_destroy(m->buffer);
    free(atomic_load_explicit(&m->flat, memory_order_relaxed));
    free(m);
}

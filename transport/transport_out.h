/* transport_out: the inner side of messages to send. */
#ifndef TRANSPORT_OUT_H
#define TRANSPORT_OUT_H

#include "transport/transport.h"

#include <grpc/grpc.h>

struct transport_out {
    struct transport_out *next; /* in a send queue */
    size_t bytes;
    size_t n_slices, max_slices;
    grpc_slice *slices; /* few, or memory of their own once there are more than a few */
    grpc_slice few[2];
};

/* Makes a byte buffer of the message and frees the rest of it. */
grpc_byte_buffer *transport_out_buffer(struct transport_out *out);

/* Free a whole queue of them. */
void transport_out_free_all(struct transport_out *first);

#endif

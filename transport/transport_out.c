/* A message to send is a list of slices: the head, written by the caller, then payloads that gRPC
 * reads where they stand.  A slice's memory is let go when gRPC drops its last reference to it, on
 * whatever thread that is, perhaps long after the call is gone: so nothing here hangs on a call. */
#include "transport/transport_out.h"

#include "transport/transport_cq.h"

#include <grpc/slice.h>
#include <stdlib.h>
#include <string.h>

struct payload {
    void (*release)(void *owner);
    void *owner;
};

static void release_payload(void *arg)
{
    struct payload *payload = arg;

    transport_cq_take(payload);
    payload->release(payload->owner);
    free(payload);
}

static void release_head(void *bytes)
{
    transport_cq_take(bytes);
    free(bytes);
}

struct transport_out *transport_out_new(size_t n, uint8_t **bytes)
{
    struct transport_out *out;
    uint8_t *head;

    if (n > UINT32_MAX) /* gRPC frames a message with 32 bits of length */
        return NULL;
    out = calloc(1, sizeof(*out));
    head = malloc(n ? n : 1);
    if (!out || !head) {
        free(head);
        free(out);
        return NULL;
    }
    out->slices = out->few;
    out->max_slices = sizeof(out->few) / sizeof(out->few[0]);
    out->slices[out->n_slices++] = grpc_slice_new(head, n, release_head);
    out->bytes = n;
    *bytes = head;
    return out;
}

static int reserve_slice(struct transport_out *out)
{
    size_t max = out->max_slices * 2;
    grpc_slice *slices;

    if (out->n_slices < out->max_slices)
        return 0;
    if (max > TRANSPORT_MAX_PAYLOADS)
        max = TRANSPORT_MAX_PAYLOADS;
    if (out->n_slices >= max)
        return TRANSPORT_ERR_INVALID;
    slices = malloc(max * sizeof(*slices));
    if (!slices)
        return TRANSPORT_ERR_NOMEM;
    memcpy(slices, out->slices, out->n_slices * sizeof(*slices));
    if (out->slices != out->few)
        free(out->slices);
    out->slices = slices;
    out->max_slices = max;
    return 0;
}

int transport_out_payload(struct transport_out *out, const void *data, size_t n,
                          void (*release)(void *owner), void *owner)
{
    struct payload *payload;
    void *unchanging; /* gRPC never writes to it */
    int rc;

    if (n > UINT32_MAX - out->bytes)
        return TRANSPORT_ERR_INVALID;
    rc = reserve_slice(out);
    if (rc < 0)
        return rc;
    payload = malloc(sizeof(*payload));
    if (!payload)
        return TRANSPORT_ERR_NOMEM;
    payload->release = release;
    payload->owner = owner;
    memcpy(&unchanging, &data, sizeof(unchanging));
    out->slices[out->n_slices++] =
        grpc_slice_new_with_user_data(unchanging, n, release_payload, payload);
    out->bytes += n;
    transport_cq_give(payload);
    return 0;
}

size_t transport_out_bytes(const struct transport_out *out)
{
    return out->bytes;
}

void transport_out_free(struct transport_out *out)
{
    size_t i;

    if (!out)
        return;
    for (i = 0; i < out->n_slices; i++)
        grpc_slice_unref(out->slices[i]);
    if (out->slices != out->few)
        free(out->slices);
    free(out);
}

void transport_out_free_all(struct transport_out *first)
{
    struct transport_out *next;

    for (; first; first = next) {
        next = first->next;
        transport_out_free(first);
    }
}

grpc_byte_buffer *transport_out_buffer(struct transport_out *out)
{
    grpc_byte_buffer *buffer;

    transport_cq_give(GRPC_SLICE_START_PTR(out->slices[0]));
    buffer = grpc_raw_byte_buffer_create(out->slices, out->n_slices);
    transport_out_free(out);
    return buffer;
}

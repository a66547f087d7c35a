/* Protobuf messages from outside.
 *
 * protobuf-c copies every string and keeps no length of it, and lets a message of many small parts
 * grow thirty-fold in memory.  Both are mended by the allocator that it is given: it counts what
 * one message takes against a bound, and keeps each block's size in front of it, which for a string
 * is its length and one. */
#include "node/node.h"

#include "proto/proto.h"
#include "transport/transport.h"

#include <stdalign.h>
#include <stdlib.h>

struct block {
    alignas(max_align_t) size_t n;
};

struct account {
    size_t used;
    bool over;
};

static void *account_alloc(void *data, size_t n)
{
    struct account *a = data;
    struct block *b;

    if (n > NODE_MESSAGE_BYTES || a->used > NODE_MESSAGE_BYTES - n) {
        a->over = true;
        return NULL;
    }
    b = malloc(sizeof(*b) + n);
    if (b == NULL)
        return NULL;
    b->n = n;
    a->used += n;
    return b + 1;
}

static void account_free(void *data, void *p)
{
    struct account *a = data;
    struct block *b = p;

    if (b == NULL)
        return;
    b--;
    a->used -= b->n;
    free(b);
}

int node_message_unpack(const struct ProtobufCMessageDescriptor *type, struct transport_message *m,
                        struct node_message *out, struct kv_why *why)
{
    struct account a = {0};
    ProtobufCAllocator allocator = {
        .alloc = account_alloc, .free = account_free, .allocator_data = &a};
    const uint8_t *bytes = transport_message_flat(m);
    size_t n = transport_message_bytes(m);
    struct ProtobufCMessage *message;

    if (bytes == NULL && n > 0)
        return kv_fail(why, -1, "no memory for a message of %zu bytes", n);
    message = protobuf_c_message_unpack(type, &allocator, n, bytes);
    if (message == NULL && a.over)
        return kv_fail(why, -1, "%s: takes more than %d bytes in memory", type->short_name,
                       (int)NODE_MESSAGE_BYTES);
    if (message == NULL)
        return kv_fail(why, -1, "%zu bytes are not a %s message", n, type->short_name);
    out->message = message;
    out->used = a.used;
    return 0;
}

void node_message_free(struct node_message *m)
{
    struct account a = {.used = m->used};
    ProtobufCAllocator allocator = {
        .alloc = account_alloc, .free = account_free, .allocator_data = &a};

    if (m->message == NULL)
        return;
    protobuf_c_message_free_unpacked(m->message, &allocator);
    m->message = NULL;
    m->used = 0;
}

size_t node_message_strlen(const char *field)
{
    const struct block *b;

    /* An absent field points to the library's own constant, which no block stands before. */
    if (field == NULL || field == (const char *)protobuf_c_empty_string)
        return 0;
    b = (const struct block *)(const void *)field - 1;
    return b->n - 1;
}

struct transport_out *node_message_pack(const struct ProtobufCMessage *m)
{
    size_t n = protobuf_c_message_get_packed_size(m);
    uint8_t *bytes;
    struct transport_out *out = transport_out_new(n, &bytes);

    if (out != NULL)
        protobuf_c_message_pack(m, bytes);
    return out;
}

#include "node/node.h"

#include "proto/proto.h"
#include "transport/transport.h"

#include <inttypes.h>
#include <string.h>

void node_hello_fill(struct node_identity *id, struct Baton__V1__Hello *hello,
                     struct Baton__V1__Geometry *geometry)
{
    baton__v1__geometry__init(geometry);
    geometry->n_layers = id->geometry.n_layers;
    geometry->n_kv_heads = id->geometry.n_kv_heads;
    geometry->head_dim = id->geometry.head_dim;
    geometry->precision = (Baton__V1__Precision)id->geometry.precision;

    baton__v1__hello__init(hello);
    hello->protocol = NODE_PROTOCOL;
    hello->epoch.data = id->epoch;
    hello->epoch.len = sizeof(id->epoch);
    hello->fingerprint.data = id->fingerprint.bytes;
    hello->fingerprint.len = KV_DIGEST_BYTES;
    hello->numerics_id.data = id->numerics_id.bytes;
    hello->numerics_id.len = KV_DIGEST_BYTES;
    hello->geometry = geometry;
}

/* Who is compared, by name. */
struct sides {
    const char *peer, *self;
};

/* option: what to make equal, " (--model)", or "". */
static int differ(const struct sides *s, const char *field, const char *theirs, const char *ours,
                  const char *option, struct kv_why *why)
{
    return kv_fail(why, KV_ERR_MISMATCH, "hello.%s: %s has %s, %s has %s%s", field, s->peer, theirs,
                   s->self, ours, option);
}

static int check_number(const struct sides *s, const char *field, uint32_t theirs, uint32_t ours,
                        struct kv_why *why)
{
    char a[16], b[16];

    if (theirs == ours)
        return 0;
    snprintf(a, sizeof(a), "%" PRIu32, theirs);
    snprintf(b, sizeof(b), "%" PRIu32, ours);
    return differ(s, field, a, b, "", why);
}

static void hex(char *out, const uint8_t *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        snprintf(out + 2 * i, 3, "%02x", bytes[i]);
}

static int check_digest(const struct sides *s, const char *field, const ProtobufCBinaryData *theirs,
                        const struct kv_digest *ours, const char *option, struct kv_why *why)
{
    char a[2 * KV_DIGEST_BYTES + 1], b[2 * KV_DIGEST_BYTES + 1];

    if (theirs->len != KV_DIGEST_BYTES)
        return kv_fail(why, KV_ERR_MISMATCH, "hello.%s has %zu bytes, not %d", field, theirs->len,
                       (int)KV_DIGEST_BYTES);
    if (memcmp(theirs->data, ours->bytes, KV_DIGEST_BYTES) == 0)
        return 0;
    hex(a, theirs->data, KV_DIGEST_BYTES);
    hex(b, ours->bytes, KV_DIGEST_BYTES);
    return differ(s, field, a, b, option, why);
}

static int check_geometry(const struct sides *s, const struct kv_geometry *ours,
                          const Baton__V1__Geometry *theirs, struct kv_why *why)
{
    const char *name;

    if (theirs == NULL)
        return kv_fail(why, KV_ERR_MISMATCH, "hello.geometry is absent");
    if (check_number(s, "geometry.n_layers", theirs->n_layers, ours->n_layers, why) < 0 ||
        check_number(s, "geometry.n_kv_heads", theirs->n_kv_heads, ours->n_kv_heads, why) < 0 ||
        check_number(s, "geometry.head_dim", theirs->head_dim, ours->head_dim, why) < 0)
        return KV_ERR_MISMATCH;
    if ((int)theirs->precision == (int)ours->precision)
        return 0;
    name = kv_precision_name((enum kv_precision)theirs->precision);
    return differ(s, "geometry.precision", name != NULL ? name : "an unknown one",
                  kv_precision_name(ours->precision), " (--kv-precision)", why);
}

int node_hello_check(const struct node_identity *id, const struct Baton__V1__Hello *hello,
                     const char *peer, const char *self, struct kv_why *why)
{
    const struct sides s = {.peer = peer, .self = self};

    if (hello == NULL)
        return kv_fail(why, KV_ERR_MISMATCH, "hello is absent");
    if (check_number(&s, "protocol", hello->protocol, NODE_PROTOCOL, why) < 0)
        return KV_ERR_MISMATCH;
    if (hello->epoch.len != NODE_EPOCH_BYTES)
        return kv_fail(why, KV_ERR_MISMATCH, "hello.epoch has %zu bytes, not %d", hello->epoch.len,
                       (int)NODE_EPOCH_BYTES);
    if (check_digest(&s, "fingerprint", &hello->fingerprint, &id->fingerprint, " (--model)", why) <
            0 ||
        check_digest(&s, "numerics_id", &hello->numerics_id, &id->numerics_id, "", why) < 0)
        return KV_ERR_MISMATCH;
    return check_geometry(&s, &id->geometry, hello->geometry, why);
}

static uint64_t larger(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

uint32_t node_record_bytes(const struct kv_geometry *g, uint32_t n_ctx, uint32_t n_logits)
{
    /* Fixed fields of a record and of the message around it; both are far below. */
    const uint64_t fixed = 4096;
    uint64_t f = kv_frame_positions(g);
    uint64_t n = larger(f * kv_position_bytes(g) + f * sizeof(uint32_t),
                        larger((uint64_t)n_ctx, n_logits) * 4) +
                 fixed;

    n = larger(n, TRANSPORT_MIN_MESSAGE_BYTES);
    return n > INT32_MAX ? INT32_MAX : (uint32_t)n;
}

#include "kvcore/kv_digest.h"

#include <assert.h>
#include <isa-l/crc.h>
#include <stdlib.h>
#include <string.h>

void kv_hash_init(struct kv_hash *h)
{
    SHA256_Init(&h->ctx);
}

void kv_hash_add(struct kv_hash *h, const void *data, size_t len)
{
    if (len > 0)
        SHA256_Update(&h->ctx, data, len);
}

void kv_hash_add_u32(struct kv_hash *h, uint32_t value)
{
    kv_hash_add(h, &value, sizeof(value));
}

void kv_hash_end(struct kv_hash *h, struct kv_digest *out)
{
    SHA256_Final(out->bytes, &h->ctx);
}

bool kv_digest_equal(const struct kv_digest *a, const struct kv_digest *b)
{
    return memcmp(a->bytes, b->bytes, sizeof(a->bytes)) == 0;
}

/* ISA-L leaves the inversions before and after to its caller, and its length is an int. */
uint32_t kv_crc32c(uint32_t crc, const void *data, size_t len)
{
    enum { STEP = 1 << 30 };
    unsigned char *at = (unsigned char *)(uintptr_t)data; /* it takes no const and writes nothing */

    crc = ~crc;
    while (len > 0) {
        const int n = len < STEP ? (int)len : STEP;

        crc = crc32_iscsi(at, n, crc);
        at += n;
        len -= (size_t)n;
    }
    return ~crc;
}

/* ---- Namespaces ---- */

enum tag { TENANT = 1, SALT = 2, FINGERPRINT = 3, NUMERICS = 4, PRECISION = 5 };

static void add_field(struct kv_hash *h, enum tag tag, const void *data, size_t len)
{
    const uint64_t n = len;

    kv_hash_add_u32(h, tag);
    kv_hash_add(h, &n, sizeof(n));
    kv_hash_add(h, data, len);
}

void kv_namespace_digest(const struct kv_namespace_fields *f, struct kv_digest *out)
{
    static const char label[] = "baton namespace 1";
    const uint32_t precision = f->precision;
    struct kv_hash h;

    kv_hash_init(&h);
    kv_hash_add(&h, label, sizeof(label));
    add_field(&h, TENANT, f->tenant, strlen(f->tenant));
    add_field(&h, SALT, f->salt, f->salt_len);
    add_field(&h, FINGERPRINT, f->fingerprint.bytes, sizeof(f->fingerprint.bytes));
    add_field(&h, NUMERICS, f->numerics_id.bytes, sizeof(f->numerics_id.bytes));
    add_field(&h, PRECISION, &precision, sizeof(precision));
    kv_hash_end(&h, out);
}

/* ---- Prefix digests ---- */

static uint32_t since_border(const struct kv_prefix *p)
{
    return p->n % p->frame_positions;
}

int kv_prefix_init(struct kv_prefix *p, const struct kv_digest *ns, uint32_t frame_positions)
{
    struct kv_hash h;

    if (frame_positions == 0 || frame_positions > KV_FRAME_BYTES)
        return KV_ERR_INVALID;
    *p = (struct kv_prefix){.frame_positions = frame_positions};
    p->ids = malloc(frame_positions * sizeof(*p->ids));
    if (p->ids == NULL)
        return KV_ERR_NOMEM;
    kv_hash_init(&h);
    kv_hash_add(&h, ns->bytes, sizeof(ns->bytes));
    kv_hash_end(&h, &p->border);
    return 0;
}

void kv_prefix_release(struct kv_prefix *p)
{
    free(p->ids);
    p->ids = NULL;
}

void kv_prefix_ahead(const struct kv_prefix *p, const uint32_t *ids, uint32_t n,
                     struct kv_digest *out)
{
    const uint32_t had = since_border(p);
    struct kv_hash h;

    assert(n <= p->frame_positions - had);
    if (had + n == 0) {
        *out = p->border;
        return;
    }
    kv_hash_init(&h);
    kv_hash_add(&h, p->border.bytes, sizeof(p->border.bytes));
    kv_hash_add(&h, p->ids, had * sizeof(*ids));
    kv_hash_add(&h, ids, n * sizeof(*ids));
    kv_hash_end(&h, out);
}

void kv_prefix_feed(struct kv_prefix *p, const uint32_t *ids, uint32_t n)
{
    while (n > 0) {
        const uint32_t had = since_border(p), room = p->frame_positions - had;
        const uint32_t run = room < n ? room : n;

        if (run == room)
            kv_prefix_ahead(p, ids, run, &p->border);
        else
            memcpy(p->ids + had, ids, run * sizeof(*ids));
        p->n += run;
        ids += run;
        n -= run;
    }
}

void kv_prefix_digest(const struct kv_prefix *p, struct kv_digest *out)
{
    kv_prefix_ahead(p, NULL, 0, out);
}

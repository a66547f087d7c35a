/* Little-endian:
 *
 *   offset                bytes
 *        0                    4  magic "BSES"
 *        4                    4  CRC-32C of all that follows
 *        8                    4  version: 1
 *       12                    4  number of ids of the session
 *       16                    4  number of ids of the tail, T
 *       20                    4  length of the name, N: 1 to 128
 *       24                    4  length of the tenant, E: 1 to 128
 *       28                    4  length of the salt, S: 0 to 64
 *       32                4 * T  the tail
 *       32 + 4 T              N  name, then tenant and salt, with nothing between and behind */
#include "node/node.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum {
    AT_CRC = 4,
    AT_BODY = 8,
    AT_VERSION = 8,
    AT_IDS = 12,
    AT_TAIL = 16,
    AT_NAME = 20,
    AT_TENANT = 24,
    AT_SALT = 28,
    FIXED = 32,
    VERSION = 1,
};

static const char magic[4] = {'B', 'S', 'E', 'S'};

bool node_session_name_ok(const char *name, size_t n)
{
    static const char letters[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";

    return n > 0 && n <= NODE_SESSION_NAME && strlen(name) == n && strspn(name, letters) == n;
}

static void put(unsigned char *p, size_t at, size_t value)
{
    const uint32_t v = (uint32_t)value;

    memcpy(p + at, &v, sizeof(v));
}

static uint32_t get(const unsigned char *p, size_t at)
{
    uint32_t v;

    memcpy(&v, p + at, sizeof(v));
    return v;
}

int node_session_encode(const struct node_session *s, void **out, size_t *len, struct kv_why *why)
{
    const size_t n_name = strlen(s->name), n_tenant = strlen(s->tenant);
    const size_t tail_bytes = s->n_tail * sizeof(*s->tail);
    const size_t n = FIXED + tail_bytes + n_name + n_tenant + s->salt.len;
    unsigned char *p, *at;

    if (!node_session_name_ok(s->name, n_name))
        return kv_fail(why, KV_ERR_INVALID, "session: name of %zu bytes", n_name);
    if (n_tenant == 0 || n_tenant > NODE_TENANT_BYTES || s->n_tail > s->n_ids)
        return kv_fail(why, KV_ERR_INVALID, "session: tail of %" PRIu32 " ids, tenant of %zu bytes",
                       s->n_tail, n_tenant);
    if (n > KV_MAX_SESSION_BYTES)
        return kv_fail(why, KV_ERR_LIMIT, "session: %zu bytes are more than %d", n,
                       (int)KV_MAX_SESSION_BYTES);
    p = malloc(n);
    if (p == NULL)
        return kv_fail(why, KV_ERR_NOMEM, "session: no memory for %zu bytes", n);
    memcpy(p, magic, sizeof(magic));
    put(p, AT_VERSION, VERSION);
    put(p, AT_IDS, s->n_ids);
    put(p, AT_TAIL, s->n_tail);
    put(p, AT_NAME, n_name);
    put(p, AT_TENANT, n_tenant);
    put(p, AT_SALT, s->salt.len);
    at = p + FIXED;
    if (tail_bytes > 0)
        memcpy(at, s->tail, tail_bytes);
    at += tail_bytes;
    memcpy(at, s->name, n_name);
    at += n_name;
    memcpy(at, s->tenant, n_tenant);
    at += n_tenant;
    memcpy(at, s->salt.bytes, s->salt.len);
    put(p, AT_CRC, kv_crc32c(0, p + AT_BODY, n - AT_BODY));
    *out = p;
    *len = n;
    return 0;
}

/* Lengths first: after it, each part lies within the data. */
static int check_lengths(const unsigned char *p, size_t len, struct kv_why *why)
{
    uint64_t want;

    if (len < FIXED || memcmp(p, magic, sizeof(magic)) != 0)
        return kv_fail(why, KV_ERR_FORMAT, "session: %zu bytes are none", len);
    if (get(p, AT_VERSION) != VERSION)
        return kv_fail(why, KV_ERR_FORMAT, "session: version %" PRIu32 ", not %d",
                       get(p, AT_VERSION), (int)VERSION);
    if (get(p, AT_NAME) > NODE_SESSION_NAME || get(p, AT_TENANT) > NODE_TENANT_BYTES ||
        get(p, AT_SALT) > NODE_SALT_BYTES)
        return kv_fail(why, KV_ERR_LIMIT,
                       "session: name of %" PRIu32 ", tenant of %" PRIu32 ", salt of %" PRIu32
                       " bytes",
                       get(p, AT_NAME), get(p, AT_TENANT), get(p, AT_SALT));
    want = FIXED + (uint64_t)get(p, AT_TAIL) * sizeof(uint32_t) + get(p, AT_NAME) +
           get(p, AT_TENANT) + get(p, AT_SALT);
    if (want != len)
        return kv_fail(why, KV_ERR_FORMAT, "session: %zu bytes, not the %" PRIu64 " it declares",
                       len, want);
    if (kv_crc32c(0, p + AT_BODY, len - AT_BODY) != get(p, AT_CRC))
        return kv_fail(why, KV_ERR_CHECK, "session: its CRC does not hold");
    return 0;
}

static int check_ids(const unsigned char *p, uint32_t n_positions, struct kv_why *why)
{
    const uint32_t n_ids = get(p, AT_IDS), n_tail = get(p, AT_TAIL);

    if (n_ids > 0 && n_ids <= KV_MAX_POSITIONS && (uint64_t)n_positions + n_tail == n_ids)
        return 0;
    return kv_fail(why, KV_ERR_FORMAT,
                   "session: %" PRIu32 " ids are not the %" PRIu32 " positions and %" PRIu32
                   " more",
                   n_ids, n_positions, n_tail);
}

int node_session_decode(const void *data, size_t len, uint32_t n_positions,
                        struct node_session *out, struct kv_why *why)
{
    const unsigned char *p = data, *at;
    struct node_session s = {0};
    uint32_t *tail;
    size_t bytes;
    int rc = check_lengths(p, len, why);

    if (rc == 0)
        rc = check_ids(p, n_positions, why);
    if (rc < 0)
        return rc;
    s.n_ids = get(p, AT_IDS);
    s.n_tail = get(p, AT_TAIL);
    s.salt.len = get(p, AT_SALT);
    bytes = s.n_tail * sizeof(*tail);
    at = p + FIXED + bytes;
    memcpy(s.name, at, get(p, AT_NAME));
    if (!node_session_name_ok(s.name, get(p, AT_NAME)))
        return kv_fail(why, KV_ERR_FORMAT, "session: its name is none");
    at += get(p, AT_NAME);
    memcpy(s.tenant, at, get(p, AT_TENANT));
    if (s.tenant[0] == '\0' || strlen(s.tenant) != get(p, AT_TENANT))
        return kv_fail(why, KV_ERR_FORMAT, "session: its tenant is none");
    at += get(p, AT_TENANT);
    memcpy(s.salt.bytes, at, s.salt.len);
    tail = malloc(bytes + sizeof(*tail)); /* never of nothing */
    if (tail == NULL)
        return kv_fail(why, KV_ERR_NOMEM, "session: no memory for %" PRIu32 " ids", s.n_tail);
    memcpy(tail, p + FIXED, bytes);
    s.tail = tail;
    *out = s;
    return 0;
}

void node_session_release(struct node_session *s)
{
    free((void *)(uintptr_t)s->tail);
    s->tail = NULL;
}

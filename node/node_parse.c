#include "node/node.h"

#include <arpa/inet.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Digits at s, up to *end.  strtoull alone would take spaces, a sign and wrap "-1" round. */
static bool read_digits(const char *s, uint64_t *out, char **end)
{
    unsigned long long v;

    if (*s < '0' || *s > '9')
        return false;
    errno = 0;
    v = strtoull(s, end, 10);
    if (errno != 0)
        return false;
    *out = v;
    return true;
}

bool node_parse_u64(const char *s, uint64_t min, uint64_t max, uint64_t *out)
{
    uint64_t v;
    char *end;

    if (!read_digits(s, &v, &end) || *end != '\0' || v < min || v > max)
        return false;
    *out = v;
    return true;
}

bool node_parse_u32(const char *s, uint32_t min, uint32_t max, uint32_t *out)
{
    uint64_t v;

    if (!node_parse_u64(s, min, max, &v))
        return false;
    *out = (uint32_t)v;
    return true;
}

bool node_parse_float(const char *s, float min, float max, float *out)
{
    float v;
    char *end;

    /* No spaces, hexadecimal, "inf" or "nan". */
    if (s[0] == '\0' || s[strspn(s, "0123456789.eE+-")] != '\0')
        return false;
    v = strtof(s, &end);
    if (*end != '\0' || !isfinite(v) || v < min || v > max)
        return false;
    *out = v;
    return true;
}

bool node_parse_bytes(const char *s, uint64_t min, uint64_t max, uint64_t *out)
{
    static const char units[] = "KMGT";
    const char *unit;
    unsigned shift = 0;
    uint64_t v;
    char *end;

    if (!read_digits(s, &v, &end))
        return false;
    if (*end != '\0') {
        unit = strchr(units, *end);
        if (unit == NULL || end[1] != '\0')
            return false;
        shift = 10 * (unsigned)(unit - units + 1);
    }
    if (v > UINT64_MAX >> shift)
        return false;
    v <<= shift;
    if (v < min || v > max)
        return false;
    *out = v;
    return true;
}

static bool is_host_name(const char *s, size_t n)
{
    if (n == 0 || n > 253)
        return false;
    for (size_t i = 0; i < n; i++) {
        char c = s[i];

        if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
              c == '.' || c == '-' || c == '_'))
            return false;
    }
    return true;
}

/* n characters of an IPv6 address, which may end in "%interface". */
static bool is_v6(const char *s, size_t n)
{
    const char *scope = memchr(s, '%', n);
    struct in6_addr addr;
    char text[64];

    if (scope != NULL) {
        size_t n_scope = (size_t)(s + n - scope) - 1;

        if (!is_host_name(scope + 1, n_scope))
            return false;
        n = (size_t)(scope - s);
    }
    if (n >= sizeof(text))
        return false;
    memcpy(text, s, n);
    text[n] = '\0';
    return inet_pton(AF_INET6, text, &addr) == 1;
}

bool node_parse_address(const char *s)
{
    const char *colon = strrchr(s, ':');
    uint32_t port;
    size_t n;

    if (colon == NULL || !node_parse_u32(colon + 1, 0, 65535, &port))
        return false;
    n = (size_t)(colon - s);
    if (s[0] == '[')
        return n >= 2 && s[n - 1] == ']' && is_v6(s + 1, n - 2);
    return is_host_name(s, n);
}

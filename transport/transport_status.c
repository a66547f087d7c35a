#include "transport/transport_status.h"

#include "transport/transport.h"

#include <stdint.h>
#include <string.h>

const char *transport_status_name(int code)
{
    static const char *const names[] = {
        "OK",
        "CANCELLED",
        "UNKNOWN",
        "INVALID_ARGUMENT",
        "DEADLINE_EXCEEDED",
        "NOT_FOUND",
        "ALREADY_EXISTS",
        "PERMISSION_DENIED",
        "RESOURCE_EXHAUSTED",
        "FAILED_PRECONDITION",
        "ABORTED",
        "OUT_OF_RANGE",
        "UNIMPLEMENTED",
        "INTERNAL",
        "UNAVAILABLE",
        "DATA_LOSS",
        "UNAUTHENTICATED",
    };

    if (code < 0 || (size_t)code >= sizeof(names) / sizeof(names[0]))
        return "?";
    return names[code];
}

int transport_status_code(int code)
{
    return code < TRANSPORT_OK || code > TRANSPORT_UNAUTHENTICATED ? TRANSPORT_UNKNOWN : code;
}

/* The length of the UTF-8 character at p of n > 0 bytes; 0 if it is none. */
static size_t character(const uint8_t *p, size_t n)
{
    size_t length, i;
    uint32_t lowest, value;

    if (p[0] < 0x80)
        return 1;
    if (p[0] >= 0xc2 && p[0] < 0xe0)
        length = 2, lowest = 0x80, value = p[0] & 0x1fu;
    else if (p[0] >= 0xe0 && p[0] < 0xf0)
        length = 3, lowest = 0x800, value = p[0] & 0x0fu;
    else if (p[0] >= 0xf0 && p[0] < 0xf5)
        length = 4, lowest = 0x10000, value = p[0] & 0x07u;
    else
        return 0;
    if (n < length)
        return 0;
    for (i = 1; i < length; i++) {
        if ((p[i] & 0xc0) != 0x80)
            return 0;
        value = value << 6 | (p[i] & 0x3fu);
    }
    if (value < lowest || value > 0x10ffff || (value >= 0xd800 && value < 0xe000))
        return 0;
    return length;
}

size_t transport_status_text(char *out, const char *text, size_t n)
{
    const uint8_t *p = (const uint8_t *)text;
    size_t used = 0, i = 0, length;

    while (i < n && p[i] != 0) {
        length = character(p + i, n - i);
        if (used + (length ? length : 1) > TRANSPORT_DETAIL_BYTES - 1)
            break;
        if (length == 0) {
            out[used++] = '?';
            i++;
            continue;
        }
        memcpy(out + used, p + i, length);
        used += length;
        i += length;
    }
    out[used] = '\0';
    return used;
}

#include "transport/transport_address.h"

#include "transport/transport.h"

#include <stdio.h>
#include <string.h>

static int parse_port(uint16_t *out, const char *text)
{
    uint32_t port = 0;

    if (!*text)
        return TRANSPORT_ERR_ADDRESS;
    for (; *text; text++) {
        if (*text < '0' || *text > '9')
            return TRANSPORT_ERR_ADDRESS;
        port = port * 10 + (uint32_t)(*text - '0');
        if (port > UINT16_MAX)
            return TRANSPORT_ERR_ADDRESS;
    }
    *out = (uint16_t)port;
    return 0;
}

int transport_address_parse(struct transport_address *out, const char *text)
{
    const char *colon, *host;
    size_t n;

    colon = text ? strrchr(text, ':') : NULL;
    if (!colon)
        return TRANSPORT_ERR_ADDRESS;
    host = text;
    n = (size_t)(colon - text);
    if (n >= 2 && host[0] == '[' && host[n - 1] == ']') {
        host++;
        n -= 2;
    } else if (memchr(host, ':', n) || memchr(host, '[', n)) {
        return TRANSPORT_ERR_ADDRESS;
    }
    if (n == 0 || n >= sizeof(out->host) || memchr(host, '/', n))
        return TRANSPORT_ERR_ADDRESS;
    memcpy(out->host, host, n);
    out->host[n] = '\0';
    return parse_port(&out->port, colon + 1);
}

void transport_address_print(char *out, const char *host, uint16_t port)
{
    const char *form = strchr(host, ':') ? "[%s]:%u" : "%s:%u";

    snprintf(out, TRANSPORT_ADDRESS_TEXT, form, host, (unsigned)port);
}

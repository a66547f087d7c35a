/* transport_address: "HOST:PORT" and "[IPV6]:PORT", taken apart. */
#ifndef TRANSPORT_ADDRESS_H
#define TRANSPORT_ADDRESS_H

#include <stdint.h>

struct transport_address {
    char host[256]; /* without brackets */
    uint16_t port;
};

/* Returns 0, or TRANSPORT_ERR_ADDRESS. */
int transport_address_parse(struct transport_address *out, const char *text);

/* "HOST:PORT", an IPv6 host in brackets.  out: at least TRANSPORT_ADDRESS_TEXT. */
enum { TRANSPORT_ADDRESS_TEXT = 272 };
void transport_address_print(char *out, const char *host, uint16_t port);

#endif

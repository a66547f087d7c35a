/* transport_status: a status's code and text, as they come from callers and from peers. */
#ifndef TRANSPORT_STATUS_H
#define TRANSPORT_STATUS_H

#include <stddef.h>

/* Copy n bytes of text that need not be UTF-8: cut at a whole character to fit
 * out[TRANSPORT_DETAIL_BYTES], cut at a NUL, each byte that is not UTF-8 turned into '?'.  Returns
 * the length. */
size_t transport_status_text(char *out, const char *text, size_t n);

/* The code if it is one of gRPC's, TRANSPORT_UNKNOWN otherwise. */
int transport_status_code(int code);

#endif

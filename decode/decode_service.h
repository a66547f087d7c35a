/* Handlers of baton.v1.Decode and baton.v1.Snapshots, and the front worker that they leave calls
 * to. */
#ifndef DECODE_SERVICE_H
#define DECODE_SERVICE_H

#include "decode/decode_request.h"

/* The methods, for a server; `node` is theirs. */
void decode_service_methods(struct decode_node *node, struct transport_method out[DECODE_METHODS]);
void *decode_service_front(void *node); /* thread */

#endif

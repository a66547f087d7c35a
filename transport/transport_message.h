/* transport_message: the inner side of received messages. */
#ifndef TRANSPORT_MESSAGE_H
#define TRANSPORT_MESSAGE_H

#include "transport/transport.h"

#include <grpc/grpc.h>

/* Takes the buffer, also on failure.  One reference.  NULL: no memory. */
struct transport_message *transport_message_new(grpc_byte_buffer *buffer);

#endif

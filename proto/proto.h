/* proto: the messages of all services, as protobuf-c structs generated from the .proto files beside
 * this header.  The comments on fields stand there. */
#ifndef PROTO_H
#define PROTO_H

#include "baton/v1/common.pb-c.h"
#include "baton/v1/decode.pb-c.h"
#include "baton/v1/operator.pb-c.h"
#include "baton/v1/prefill.pb-c.h"
#include "baton/v1/snapshot.pb-c.h"
#include "grpc/health/v1/health.pb-c.h"

#endif

/* prefill: the node that computes prompts and streams their KV (proto/baton/v1/prefill.proto).
 *
 *   gRPC threads        handler: a job with its bytes into the front queue, or RESOURCE_EXHAUSTED
 *   front worker        unpacks, checks, answers `accepted`, leaves the job in the scheduler's
 * inbox scheduler           owns engine and contexts: admits, computes by chunks, streams, seals
 *
 * A call's life is the life of its job and of the pages it holds. */
#ifndef PREFILL_H
#define PREFILL_H

#include "node/node.h"

/* Serve until SIGINT or SIGTERM, then drain.  node_signals_block() and transport_start() have been
 * called.  Returns an enum node_exit; what went wrong is on stderr. */
int prefill_serve(const struct node_serve *options);

#endif

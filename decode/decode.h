/* decode: the node that clients speak to (proto/baton/v1/decode.proto, snapshot.proto).  It
 * generates, lets prefill nodes compute prompts where there are any, and keeps sessions on disk
 * where it has a directory.
 *
 *   gRPC threads      handler: a request with its bytes into the front queue, or a refusal;
 *                     messages of prefill nodes into the receive inbox
 *   front worker      unpacks, checks every field, tokenizes, answers what needs no disk, leaves
 *                     the rest in the inbox of the scheduler or of the I/O thread
 *   receive worker    verifies snapshot records and scatters them into the context that the stream
 *                     holds; at the end the stream goes to the scheduler's inbox
 *   peer watcher      asks prefill nodes for their health
 *   I/O thread        owns the snapshot store: saves and restores sessions (decode_store.h)
 *   scheduler         owns engine and live contexts: admits, steps, samples, streams
 */
#ifndef DECODE_H
#define DECODE_H

#include "node/node.h"

struct decode_options {
    struct node_serve serve;
    struct node_strings prefill; /* HOST:PORT of prefill nodes, in the order of preference */
    uint32_t max_batch; /* requests that hold a context: running, or their prompt computed */
    uint32_t max_sessions;
    uint32_t max_tokens;      /* of an answer, where the request says nothing */
    uint32_t remote_min;      /* shorter rests of prompts are computed here */
    const char *snapshots;    /* directory; NULL: none, and the rest means nothing */
    uint64_t snapshot_budget; /* bytes; 0: no bound */
    uint32_t snapshot_ttl_s;  /* 0: for ever */
    const char *durability;
    uint32_t save_idle_s; /* 0: never */
    bool save_on_exit;
};

/* Serve until SIGINT or SIGTERM, then drain.  node_signals_block() and transport_start() have been
 * called.  Returns an enum node_exit; what went wrong is on stderr. */
int decode_serve(const struct decode_options *options);

#endif

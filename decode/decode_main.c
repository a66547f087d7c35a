#include "decode/decode.h"
#include "decode/decode_peer.h"

#include <stdio.h>
#include <string.h>

static const char *const durabilities[] = {"durable", "published", "none", NULL};

enum { OWN_OPTIONS = 11, N_OPTIONS = NODE_SERVE_OPTIONS + OWN_OPTIONS };

static void set_options(struct decode_options *o, struct node_option *out)
{
    const struct node_option own[OWN_OPTIONS] = {
        {"prefill", 'p', NODE_OPT_LIST, &o->prefill, "HOST:PORT",
         "a prefill node; may be given several times, the first that serves is used", 0, 0, NULL},
        {"max-batch", 0, NODE_OPT_U32, &o->max_batch, "N", "requests that are worked on at once", 1,
         1024, NULL},
        {"max-sessions", 0, NODE_OPT_U32, &o->max_sessions, "N", "open sessions, at most", 1, 65536,
         NULL},
        {"max-tokens", 0, NODE_OPT_U32, &o->max_tokens, "N",
         "tokens of an answer where the request says nothing", 1, KV_MAX_POSITIONS, NULL},
        {"remote-min", 0, NODE_OPT_U32, &o->remote_min, "N",
         "fewer positions than this are computed here, not by a prefill node", 1, KV_MAX_POSITIONS,
         NULL},
        {"snapshots", 0, NODE_OPT_STRING, &o->snapshots, "DIR",
         "keep sessions on disk there; made where it is not there", 0, 0, NULL},
        {"snapshot-budget", 0, NODE_OPT_BYTES, &o->snapshot_budget, "BYTES",
         "of all snapshots together; 0: as much as the disk has", 0, 1ull << 60, NULL},
        {"snapshot-ttl", 0, NODE_OPT_U32, &o->snapshot_ttl_s, "SECONDS",
         "snapshots that were not used for so long are deleted; 0: never", 0, UINT32_MAX, NULL},
        {"durability", 0, NODE_OPT_CHOICE, &o->durability, "NAME",
         "what a saved session survives: a power cut; that it is whole or not there after one; or "
         "nothing but the end of the node",
         0, 0, durabilities},
        {"save-idle", 0, NODE_OPT_U32, &o->save_idle_s, "SECONDS",
         "save a session that was not used for so long, and let it leave memory; 0: never", 0,
         UINT32_MAX, NULL},
        {"save-on-exit", 0, NODE_OPT_FLAG, &o->save_on_exit, NULL,
         "save all sessions when the node is stopped, within --grace after the last call", 0, 0,
         NULL},
    };

    o->durability = "durable";
    o->max_batch = 16;
    o->max_sessions = 1024;
    o->max_tokens = 256;
    o->remote_min = 16;
    node_serve_options(&o->serve, out);
    memcpy(out + NODE_SERVE_OPTIONS, own, sizeof(own));
}

/* An option that says something about snapshots, or NULL. */
static const char *needs_store(const struct decode_options *o)
{
    return o->snapshot_budget != 0                 ? "snapshot-budget"
           : o->snapshot_ttl_s != 0                ? "snapshot-ttl"
           : o->save_idle_s != 0                   ? "save-idle"
           : o->save_on_exit                       ? "save-on-exit"
           : strcmp(o->durability, "durable") != 0 ? "durability"
                                                   : NULL;
}

/* 0, or NODE_EXIT_USAGE with a message. */
static int check_options(const struct decode_options *o)
{
    if (o->serve.model == NULL) {
        fprintf(stderr, "baton-decode: --model is missing\n");
        return NODE_EXIT_USAGE;
    }
    for (size_t i = 0; i < o->prefill.n; i++) {
        if (!node_parse_address(o->prefill.items[i])) {
            fprintf(stderr, "baton-decode: --prefill: %s is not HOST:PORT\n", o->prefill.items[i]);
            return NODE_EXIT_USAGE;
        }
    }
    if (o->snapshots == NULL && needs_store(o) != NULL) {
        fprintf(stderr, "baton-decode: --%s needs --snapshots\n", needs_store(o));
        return NODE_EXIT_USAGE;
    }
    if (o->snapshots != NULL && o->snapshots[0] == '\0') {
        fprintf(stderr, "baton-decode: --snapshots \"\": must not be empty\n");
        return NODE_EXIT_USAGE;
    }
    return 0;
}

int main(int argc, char **argv)
{
    static const char usage[] = "baton-decode --model FILE [--prefill HOST:PORT] [option...]";
    static const char text[] = "Answer prompts, token by token; prompts are computed by prefill "
                               "nodes where there are any. "
                               "SIGTERM drains.";
    struct decode_options o = {0};
    struct node_option options[N_OPTIONS];
    bool done = false;
    int first, rc;

    set_options(&o, options);
    rc = node_options_parse(argc, argv, options, N_OPTIONS, usage, text, &first, &done);
    if (done)
        return rc;
    if (first < argc) {
        fprintf(stderr, "baton-decode: unexpected argument: %s\n", argv[first]);
        return NODE_EXIT_USAGE;
    }
    rc = check_options(&o);
    if (rc != 0)
        return rc;
    node_log_set_level((enum node_level)node_level_parse(o.serve.log_level));
    node_signals_block();
    transport_start();
    rc = decode_serve(&o);
    transport_stop();
    return rc;
}

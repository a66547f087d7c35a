#include "prefill/prefill.h"

#include "transport/transport.h"

int main(int argc, char **argv)
{
    static const char usage[] = "baton-prefill --model FILE [option...]";
    static const char text[] =
        "Compute prompts and stream their KV to decode nodes.  SIGTERM drains.";
    struct node_serve serve = {0};
    struct node_option options[NODE_SERVE_OPTIONS];
    bool done = false;
    int first, rc;

    node_serve_options(&serve, options);
    rc = node_options_parse(argc, argv, options, NODE_SERVE_OPTIONS, usage, text, &first, &done);
    if (done)
        return rc;
    if (first < argc) {
        fprintf(stderr, "baton-prefill: unexpected argument: %s\n", argv[first]);
        return NODE_EXIT_USAGE;
    }
    if (serve.model == NULL) {
        fprintf(stderr, "baton-prefill: --model is missing\n");
        return NODE_EXIT_USAGE;
    }
    node_log_set_level((enum node_level)node_level_parse(serve.log_level));
    node_signals_block();
    transport_start();
    rc = prefill_serve(&serve);
    transport_stop();
    return rc;
}

#include "cli/cli.h"

static int close_session(const struct cli_query *q, const char *name)
{
    Baton__V1__CloseSessionRequest request = BATON__V1__CLOSE_SESSION_REQUEST__INIT;
    struct node_message reply;
    int rc;

    request.name = (char *)(uintptr_t)name; /* borrowed: protobuf-c only packs it */
    rc = cli_query_ask(q, "/baton.v1.Decode/CloseSession", &request.base,
                       &baton__v1__close_session_reply__descriptor, &reply);
    if (rc == NODE_EXIT_OK)
        node_message_free(&reply);
    return rc;
}

int cli_close(int argc, char **argv)
{
    struct cli_query q;
    const char *to = NULL;
    float timeout_s = 5;
    const struct node_option options[] = {
        {"to", 0, NODE_OPT_ADDRESS, &to, "HOST:PORT", "the decode node", 0, 0, NULL},
        {"timeout", 0, NODE_OPT_FLOAT, &timeout_s, "SECONDS", "for the answer", 0.001, 3600, NULL},
    };
    int first, rc;
    bool done;

    rc = cli_options_parse(argc, argv, options, 2, "baton close --to HOST:PORT [option...] NAME",
                           "Ends the session of this name, so that its memory can be used. "
                           "baton status lists the sessions.",
                           &first, &done);
    if (done)
        return rc;
    if (to == NULL) {
        cli_say("close: --to HOST:PORT is needed, the address of a decode node");
        return NODE_EXIT_USAGE;
    }
    if (!cli_one_argument(argc, first, "close", "which session?", "one NAME at most"))
        return NODE_EXIT_USAGE;
    rc = cli_query_open(&q, to, timeout_s);
    if (rc != NODE_EXIT_OK)
        return rc;
    rc = close_session(&q, argv[first]);
    cli_query_close(&q);
    return rc;
}

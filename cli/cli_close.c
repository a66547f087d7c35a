#include "cli/cli.h"

static int close_session(const struct cli_query *q, const char *name, bool keep_snapshot)
{
    Baton__V1__CloseSessionRequest request = BATON__V1__CLOSE_SESSION_REQUEST__INIT;
    struct node_message reply;
    int rc;

    request.name = (char *)(uintptr_t)name; /* borrowed: protobuf-c only packs it */
    request.keep_snapshot = keep_snapshot;
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
    bool keep_snapshot = false;
    const struct node_option options[] = {
        {"to", 0, NODE_OPT_ADDRESS, &to, "HOST:PORT", "the decode node", 0, 0, NULL},
        {"keep-snapshot", 0, NODE_OPT_FLAG, &keep_snapshot, NULL,
         "what is on disk of it stays, and its next turn goes on from there", 0, 0, NULL},
        {"timeout", 0, NODE_OPT_FLOAT, &timeout_s, "SECONDS", "for the answer", 0.001, 3600, NULL},
    };
    int first, rc;
    bool done;

    rc =
        cli_options_parse(argc, argv, options, 3, "baton close --to HOST:PORT [option...] NAME",
                          "Ends the session of this name, and deletes its snapshot, so that memory "
                          "and disk can be used. "
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
    rc = close_session(&q, argv[first], keep_snapshot);
    cli_query_close(&q);
    return rc;
}

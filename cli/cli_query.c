#include "cli/cli.h"

#include <math.h>

int64_t cli_deadline_ms(float timeout_s)
{
    return (int64_t)ceil((double)timeout_s * 1000);
}

int cli_query_open(struct cli_query *q, const char *target, float timeout_s)
{
    const struct transport_channel_config config = {.target = target};
    char error[TRANSPORT_DETAIL_BYTES] = "";
    int rc;

    q->deadline_ms = cli_deadline_ms(timeout_s);
    transport_start();
    rc = transport_channel_open(&config, &q->channel, error);
    if (rc == 0)
        return NODE_EXIT_OK;
    transport_stop();
    cli_say("%s: %s", target, error[0] != '\0' ? error : "no memory");
    return rc == TRANSPORT_ERR_ADDRESS ? NODE_EXIT_UNAVAILABLE : NODE_EXIT_FAILED;
}

int cli_query_ask(const struct cli_query *q, const char *path, const ProtobufCMessage *request,
                  const ProtobufCMessageDescriptor *type, struct node_message *reply)
{
    char details[TRANSPORT_DETAIL_BYTES] = "";
    struct transport_message *bytes = NULL;
    struct transport_out *out = node_message_pack(request);
    struct kv_why why;
    int code, rc;

    if (out == NULL) {
        cli_say("no memory for the request");
        return NODE_EXIT_FAILED;
    }
    code = transport_unary(q->channel, path, out, q->deadline_ms, false, &bytes, details);
    if (code != TRANSPORT_OK)
        return cli_say_status(code, details);
    rc = node_message_unpack(type, bytes, reply, &why);
    transport_message_unref(bytes);
    if (rc == 0)
        return NODE_EXIT_OK;
    cli_say("the node's reply: %s", why.text);
    return NODE_EXIT_FAILED;
}

void cli_query_close(struct cli_query *q)
{
    transport_channel_close(q->channel);
    transport_stop();
}

#include "cli/cli.h"

#include <inttypes.h>

static void print_bytes(const char *label, const ProtobufCBinaryData *b)
{
    char hex[2 * 64 + 1];

    printf("%-14s %s\n", label, cli_hex(hex, b->data, b->len < 64 ? b->len : 64));
}

static void print_hello(const Baton__V1__Hello *h)
{
    static const char *const precisions[] = {"f32", "f16", "q8"};
    const Baton__V1__Geometry *g = h->geometry;

    printf("%-14s %u\n", "protocol", h->protocol);
    print_bytes("epoch", &h->epoch);
    print_bytes("fingerprint", &h->fingerprint);
    print_bytes("numerics id", &h->numerics_id);
    if (g != NULL)
        printf("%-14s %u layers, %u heads of %u, %s\n", "kv", g->n_layers, g->n_kv_heads,
               g->head_dim, (unsigned)g->precision < 3 ? precisions[g->precision] : "?");
}

static void print_store(const Baton__V1__Store *s)
{
    char bytes[32], budget[32], io[300];

    printf("%-14s %u snapshots, %u sessions that are not in memory, %s", "on disk", s->snapshots,
           s->sessions, cli_bytes(bytes, sizeof(bytes), (double)s->bytes));
    if (s->budget_bytes > 0)
        printf(" of %s", cli_bytes(budget, sizeof(budget), (double)s->budget_bytes));
    if (s->retired > 0)
        printf(", %u deleted that others stand on", s->retired);
    if (s->unreadable > 0)
        printf(", %u unreadable files", s->unreadable);
    printf("\n%-14s %s", "durability", node_quote(io, sizeof(io), s->durability));
    printf(", %s\n", node_quote(io, sizeof(io), s->io));
}

static void print_describe(const Baton__V1__DescribeReply *r)
{
    char quoted[300];

    printf("%-14s %s", "model", node_quote(quoted, sizeof(quoted), r->model_name));
    printf(", architecture %s\n", node_quote(quoted, sizeof(quoted), r->architecture));
    printf("%-14s %u positions, %u tokens\n", "context", r->n_ctx, r->n_vocab);
    printf("%-14s %s, %u threads\n", "kernels", node_quote(quoted, sizeof(quoted), r->kernels),
           r->threads);
    if (r->hello != NULL)
        print_hello(r->hello);
    if (r->pages != NULL)
        printf("%-14s %u of %u positions: %u free, %u live (%u evictable), %u reserved\n", "pages",
               r->pages->total, r->page_tokens, r->pages->free, r->pages->live, r->pages->evictable,
               r->pages->reserved);
    printf("%-14s %u running, %u queued\n", "requests", r->running, r->queued);
    if (r->store != NULL)
        print_store(r->store);
}

static void print_sessions(const Baton__V1__ListSessionsReply *r)
{
    char quoted[300];

    printf("%-14s %zu\n", "sessions", r->n_sessions);
    for (size_t i = 0; i < r->n_sessions; i++) {
        const Baton__V1__SessionInfo *s = r->sessions[i];

        printf("  %-30s %8u tokens  ", node_quote(quoted, sizeof(quoted), s->name), s->tokens);
        if (s->busy)
            printf("busy\n");
        else
            printf("idle for %.0f s%s\n", (double)s->idle_ns / 1e9, s->saved ? ", saved" : "");
    }
}

static int describe(const struct cli_query *q)
{
    Baton__V1__DescribeRequest about = BATON__V1__DESCRIBE_REQUEST__INIT;
    Baton__V1__ListSessionsRequest list = BATON__V1__LIST_SESSIONS_REQUEST__INIT;
    struct node_message m;
    int rc;

    rc = cli_query_ask(q, "/baton.v1.Decode/Describe", &about.base,
                       &baton__v1__describe_reply__descriptor, &m);
    if (rc != NODE_EXIT_OK)
        return rc;
    print_describe((const Baton__V1__DescribeReply *)m.message);
    node_message_free(&m);
    rc = cli_query_ask(q, "/baton.v1.Decode/ListSessions", &list.base,
                       &baton__v1__list_sessions_reply__descriptor, &m);
    if (rc != NODE_EXIT_OK)
        return rc;
    print_sessions((const Baton__V1__ListSessionsReply *)m.message);
    node_message_free(&m);
    return NODE_EXIT_OK;
}

static int run(const struct cli_query *q)
{
    int serving = transport_health(q->channel, "", q->deadline_ms);

    if (serving < 0)
        return cli_say_status(TRANSPORT_UNAVAILABLE, "the node does not answer");
    printf("%-14s %s\n", "health", serving == 1 ? "serving" : "not serving");
    /* Only decode nodes describe themselves; others do not know the service. */
    if (transport_health(q->channel, "baton.v1.Decode", q->deadline_ms) >= 0) {
        printf("%-14s %s\n", "role", "decode");
        return describe(q);
    }
    if (transport_health(q->channel, "baton.v1.Prefill", q->deadline_ms) >= 0)
        printf("%-14s %s\n", "role", "prefill");
    return NODE_EXIT_OK;
}

int cli_status(int argc, char **argv)
{
    struct cli_query q;
    const char *to = NULL;
    float timeout_s = 5;
    const struct node_option options[] = {
        {"to", 0, NODE_OPT_ADDRESS, &to, "HOST:PORT", "the node", 0, 0, NULL},
        {"timeout", 0, NODE_OPT_FLOAT, &timeout_s, "SECONDS", "for each answer", 0.001, 3600, NULL},
    };
    int first, rc;
    bool done;

    rc =
        cli_options_parse(argc, argv, options, 2, "baton status --to HOST:PORT [option...]",
                          "Prints what a node serves, how it is, and its sessions.", &first, &done);
    if (done)
        return rc;
    if (to == NULL || first != argc) {
        cli_say("status: %s",
                to == NULL ? "--to HOST:PORT is needed" : "takes no argument beside its options");
        return NODE_EXIT_USAGE;
    }
    rc = cli_query_open(&q, to, timeout_s);
    if (rc != NODE_EXIT_OK)
        return rc;
    rc = run(&q);
    cli_query_close(&q);
    return rc;
}

#include "cli/cli.h"

#include <inttypes.h>

static void print_counts(const Baton__V1__AuditReply *r)
{
    const Baton__V1__Pages *p = r->pages;

    printf("%-14s %s\n", "audit", r->fault[0] == '\0' ? "all accounts hold" : "FAULT");
    if (p != NULL)
        printf("%-14s %u: %u free, %u live (%u evictable), %u reserved\n", "pages", p->total,
               p->free, p->live, p->evictable, p->reserved);
    printf("%-14s %u in use, %u kept for reuse\n", "contexts", r->contexts, r->entries);
    printf("%-14s %u nodes, %" PRIu64 " bytes\n", "prefix tree", r->nodes, r->bookkeeping_bytes);
    printf("%-14s %.3f ms\n", "took", (double)r->took_ns / 1e6);
}

static int audit(const struct cli_query *q)
{
    Baton__V1__AuditRequest request = BATON__V1__AUDIT_REQUEST__INIT;
    const Baton__V1__AuditReply *r;
    struct node_message m;
    char text[1024];
    int rc;

    rc = cli_query_ask(q, "/baton.v1.Operator/Audit", &request.base,
                       &baton__v1__audit_reply__descriptor, &m);
    if (rc != NODE_EXIT_OK)
        return rc;
    r = (const Baton__V1__AuditReply *)m.message;
    print_counts(r);
    if (r->fault[0] != '\0') {
        cli_say("audit: %s", cli_plain(text, sizeof(text), r->fault));
        rc = NODE_EXIT_FAILED;
    }
    node_message_free(&m);
    return rc;
}

int cli_audit(int argc, char **argv)
{
    struct cli_query q;
    const char *to = NULL;
    float timeout_s = 60;
    const struct node_option options[] = {
        {"to", 0, NODE_OPT_ADDRESS, &to, "HOST:PORT", "the node, prefill or decode", 0, 0, NULL},
        {"timeout", 0, NODE_OPT_FLOAT, &timeout_s, "SECONDS", "for the answer", 0.001, 3600, NULL},
    };
    int first, rc;
    bool done;

    rc = cli_options_parse(argc, argv, options, 2, "baton audit --to HOST:PORT [option...]",
                           "Has a node walk all its KV, count everything anew and compare. Work "
                           "that needs KV waits meanwhile. Exits 1 where something does not hold, "
                           "and says what.",
                           &first, &done);
    if (done)
        return rc;
    if (to == NULL || first != argc) {
        cli_say("audit: %s",
                to == NULL ? "--to HOST:PORT is needed" : "takes no argument beside its options");
        return NODE_EXIT_USAGE;
    }
    rc = cli_query_open(&q, to, timeout_s);
    if (rc != NODE_EXIT_OK)
        return rc;
    rc = audit(&q);
    cli_query_close(&q);
    return rc;
}

#include "decode/decode_request.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>

struct decode_request *decode_request_new(struct decode_node *node, enum decode_method method,
                                          struct transport_call *call,
                                          struct transport_message *bytes)
{
    struct decode_request *r = calloc(1, sizeof(*r));

    if (r == NULL)
        return NULL;
    r->mail.kind = DECODE_MAIL_REQUEST;
    r->mail.item = r;
    atomic_init(&r->refs, 1);
    r->node = node;
    r->method = method;
    r->call = call;
    r->bytes = transport_message_ref(bytes);
    r->arrived_ns = node_now_ns();
    r->deadline_ns = r->arrived_ns + DECODE_MAX_REQUEST_MS * INT64_C(1000000);
    if (transport_call_deadline(call) < r->deadline_ns)
        r->deadline_ns = transport_call_deadline(call);
    return r;
}

void decode_request_unref(struct decode_request *r)
{
    if (atomic_fetch_sub(&r->refs, 1) != 1)
        return;
    assert(r->ctx == NULL && r->flight == NULL && r->session == NULL);
    transport_message_unref(r->bytes);
    node_message_free(&r->message);
    text_close(r->text);
    token_list_release(&r->ids);
    transport_call_unref(r->call);
    free(r);
}

void decode_request_refuse(struct decode_request *r, int status, const char *details)
{
    if (r->method == DECODE_GENERATE)
        decode_request_log(r, status, details);
    if (r->waits)
        atomic_fetch_sub(&r->node->n_waiting, 1);
    decode_sessions_give_back(&r->node->sessions, r->session, NULL, NULL, 0);
    r->session = NULL;
    transport_call_finish(r->call, status, details);
    decode_request_unref(r);
}

void decode_request_answer(struct decode_request *r, const ProtobufCMessage *reply)
{
    struct transport_out *out = node_message_pack(reply);

    if (out == NULL) {
        decode_request_refuse(r, TRANSPORT_RESOURCE_EXHAUSTED, "no memory for a reply");
        return;
    }
    transport_call_send(r->call, out);
    transport_call_finish(r->call, TRANSPORT_OK, NULL);
    decode_request_unref(r);
}

static double ms(int64_t from, int64_t to)
{
    return from != 0 && to > from ? (double)(to - from) / 1e6 : 0;
}

void decode_request_log(const struct decode_request *r, int status, const char *details)
{
    const struct decode_usage *u = &r->usage;
    const struct decode_timings *t = &r->timings;
    char peer[128], session[2 * NODE_SESSION_NAME], fallback[2 * DECODE_WHY_BYTES], why[512];

    node_log(
        status == TRANSPORT_OK || status == TRANSPORT_CANCELLED ? NODE_INFO : NODE_WARN, "generate",
        "peer=%s status=%s session=%s prompt=%" PRIu32 " reused=%" PRIu32 " prefill_reused=%" PRIu32
        " received=%" PRIu32 " local=%" PRIu32 " generated=%" PRIu32 " frames=%" PRIu32
        " bytes=%" PRIu64
        " queue_ms=%.1f prefill_ms=%.1f exposed_ms=%.1f local_ms=%.1f first_ms=%.1f "
        "total_ms=%.1f%s%s%s%s",
        node_quote(peer, sizeof(peer), transport_call_peer(r->call)), transport_status_name(status),
        node_quote(session, sizeof(session), r->session != NULL ? r->session->name : ""),
        r->n_prompt, u->reused, u->prefill_reused, u->received, u->local, u->generated, u->frames,
        u->bytes, ms(r->arrived_ns, t->admitted_ns), (double)t->prefill_ns / 1e6,
        (double)t->exposed_transfer_ns / 1e6, (double)t->local_prefill_ns / 1e6,
        ms(r->arrived_ns, t->first_token_ns), ms(r->arrived_ns, node_now_ns()),
        r->fallback[0] != '\0' ? " fallback=" : "",
        r->fallback[0] != '\0' ? node_quote(fallback, sizeof(fallback), r->fallback) : "",
        details != NULL ? " why=" : "",
        details != NULL ? node_quote(why, sizeof(why), details) : "");
}

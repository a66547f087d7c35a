#include "transport/transport_channel.h"

#include "transport/transport_address.h"
#include "transport/transport_status.h"

#include <grpc/grpc_security.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Its requests ---- */

static void unlist(struct channel_entry *entry)
{
    if (!entry->at)
        return;
    *entry->at = entry->next;
    if (entry->next)
        entry->next->at = entry->at;
    entry->at = NULL;
}

int channel_request_begins(struct transport_channel *ch, struct channel_entry *entry)
{
    int rc = TRANSPORT_ERR_CLOSED;

    pthread_mutex_lock(&ch->lock);
    if (!ch->closing) {
        entry->next = ch->open;
        entry->at = &ch->open;
        if (entry->next)
            entry->next->at = &entry->next;
        ch->open = entry;
        ch->n_live++;
        rc = 0;
    }
    pthread_mutex_unlock(&ch->lock);
    return rc;
}

void channel_request_ended(struct transport_channel *ch, struct channel_entry *entry)
{
    pthread_mutex_lock(&ch->lock);
    unlist(entry);
    ch->n_live--;
    pthread_cond_broadcast(&ch->changed);
    pthread_mutex_unlock(&ch->lock);
}

/* ---- Opening and closing ---- */

static grpc_arg integer(const char *key, int64_t value)
{
    grpc_arg arg;

    arg.type = GRPC_ARG_INTEGER;
    arg.key = (char *)(uintptr_t)key; /* gRPC does not write to it */
    arg.value.integer = value > INT32_MAX ? INT32_MAX : (int)value;
    return arg;
}

static grpc_channel *create_grpc(const struct transport_address *address, uint32_t max_bytes)
{
    grpc_arg args[] = {
        integer(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH,
                max_bytes ? max_bytes : TRANSPORT_MIN_MESSAGE_BYTES),
        /* A peer that is gone without a word is found in 15 s; one whose process died, at once. */
        integer(GRPC_ARG_KEEPALIVE_TIME_MS, TRANSPORT_KEEPALIVE_MS),
        integer(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, TRANSPORT_KEEPALIVE_TIMEOUT_MS),
        integer(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0),
        integer(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, CHANNEL_BACKOFF_FIRST_MS),
        integer(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, CHANNEL_CONNECT_MS),
        integer(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, CHANNEL_BACKOFF_MAX_MS),
        integer(GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS, CHANNEL_BACKOFF_MAX_MS),
        /* Each channel has a connection, and a back-off, of its own. */
        integer(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1),
        /* Nodes talk to each other directly, whatever http_proxy says. */
        integer(GRPC_ARG_ENABLE_HTTP_PROXY, 0),
        integer(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1),
        /* As on the server: nothing is to be unpacked. */
        integer(GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET, 1),
    };
    grpc_channel_args list = {sizeof(args) / sizeof(args[0]), args};
    grpc_channel_credentials *insecure = grpc_insecure_credentials_create();
    char target[TRANSPORT_ADDRESS_TEXT + 8] = "dns:///";
    grpc_channel *channel;

    transport_address_print(target + strlen(target), address->host, address->port);
    channel = grpc_channel_create(target, insecure, &list);
    grpc_channel_credentials_release(insecure);
    return channel;
}

int transport_channel_open(const struct transport_channel_config *config,
                           struct transport_channel **out, char *error)
{
    struct transport_address address;
    struct transport_channel *ch;
    char text[512];
    int n, rc;

    if (transport_address_parse(&address, config->target) < 0 || address.port == 0) {
        n = snprintf(text, sizeof(text), "cannot connect to %s: not of the form HOST:PORT",
                     config->target ? config->target : "(nothing)");
        if (error)
            transport_status_text(error, text,
                                  n < (int)sizeof(text) ? (size_t)n : sizeof(text) - 1);
        return TRANSPORT_ERR_ADDRESS;
    }
    ch = calloc(1, sizeof(*ch));
    rc = ch ? transport_cq_open(&ch->cq) : TRANSPORT_ERR_NOMEM;
    if (rc < 0) {
        if (error)
            strcpy(error, "no memory, or no thread");
        free(ch);
        return rc;
    }
    pthread_mutex_init(&ch->lock, NULL);
    pthread_cond_init(&ch->changed, NULL);
    ch->grpc = create_grpc(&address, config->max_message_bytes);
    if (error)
        error[0] = '\0';
    *out = ch;
    return 0;
}

void transport_channel_close(struct transport_channel *ch)
{
    struct transport_request *r;

    if (!ch)
        return;
    pthread_mutex_lock(&ch->lock);
    ch->closing = true;
    while (ch->open) {
        r = transport_request_ref(channel_entry_request(ch->open));
        unlist(ch->open);
        pthread_mutex_unlock(&ch->lock);
        transport_request_cancel(r);
        transport_request_unref(r);
        pthread_mutex_lock(&ch->lock);
    }
    while (ch->n_live > 0)
        pthread_cond_wait(&ch->changed, &ch->lock);
    pthread_mutex_unlock(&ch->lock);
    grpc_channel_destroy(ch->grpc);
    transport_cq_close(&ch->cq);
    pthread_cond_destroy(&ch->changed);
    pthread_mutex_destroy(&ch->lock);
    free(ch);
}

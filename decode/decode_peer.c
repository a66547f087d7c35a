#include "decode/decode_peer.h"

static const char service[] = "baton.v1.Prefill";

int decode_peers_open(struct decode_peers *p, const struct node_strings *addresses,
                      uint32_t max_message_bytes, char *error)
{
    if (node_inbox_init(&p->watch) < 0)
        return -1;
    for (size_t i = 0; i < addresses->n; i++) {
        struct decode_peer *peer = &p->items[i];
        const struct transport_channel_config config = {.target = addresses->items[i],
                                                        .max_message_bytes = max_message_bytes};

        peer->address = addresses->items[i];
        if (transport_channel_open(&config, &peer->channel, error) < 0) {
            decode_peers_close(p);
            return -1;
        }
        p->n++;
    }
    return 0;
}

void decode_peers_close(struct decode_peers *p)
{
    for (uint32_t i = 0; i < p->n; i++)
        transport_channel_close(p->items[i].channel);
    p->n = 0;
    node_inbox_release(&p->watch);
}

static void ask(struct decode_peer *peer)
{
    bool serving = transport_health(peer->channel, service, DECODE_HEALTH_MS) == 1;

    if (atomic_exchange(&peer->serving, serving) != serving) {
        if (serving)
            atomic_store(&peer->told_unfit, false);
        node_log(serving ? NODE_INFO : NODE_WARN, "peer", "prefill=%s serving=%d", peer->address,
                 serving);
    }
}

void *decode_peers_watch(void *arg)
{
    struct decode_peers *p = arg;
    bool all;

    while (!atomic_load(&p->stopping)) {
        all = true;
        for (uint32_t i = 0; i < p->n && !atomic_load(&p->stopping); i++) {
            ask(&p->items[i]);
            all = all && atomic_load(&p->items[i].serving);
        }
        node_inbox_take(&p->watch, all ? DECODE_HEALTH_EVERY_MS : DECODE_HEALTH_RETRY_MS);
    }
    return NULL;
}

void decode_peers_stop(struct decode_peers *p)
{
    atomic_store(&p->stopping, true);
    node_inbox_wake(&p->watch);
}

void decode_peers_failed(struct decode_peers *p, struct decode_peer *peer)
{
    if (!atomic_exchange(&peer->serving, false))
        return;
    node_log(NODE_WARN, "peer", "prefill=%s serving=0 why=call", peer->address);
    node_inbox_wake(&p->watch);
}

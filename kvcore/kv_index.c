#include "kvcore/kv_index.h"

#include "kvcore/kv_tree.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* ---- Chains ---- */

static uint32_t hash(const struct kv_node *up, uint32_t first_id)
{
    uint64_t h = (uint64_t)(uintptr_t)up / 16 + first_id * 0x9e3779b97f4a7c15u;

    h = (h ^ h >> 32) * 0xd6e8feb86659fd93u;
    return (uint32_t)(h >> 32);
}

static struct kv_node **head(const struct kv_index *index, uint32_t chain)
{
    return &index->segments[chain / KV_INDEX_SEGMENT][chain % KV_INDEX_SEGMENT];
}

/* Where nodes of that hash are.  Chains from n_chains to the mask do not exist yet: their nodes are
 * in those that they will be split from. */
static struct kv_node **chain_of(const struct kv_index *index, uint32_t h)
{
    uint32_t chain = h & index->mask;

    if (chain >= index->n_chains)
        chain &= index->mask >> 1;
    return head(index, chain);
}

/* ---- Growing and shrinking by one chain ---- */

static int reserve_segment(struct kv_index *index)
{
    const uint32_t cap = index->cap > 0 ? 2 * index->cap : 4;
    struct kv_node **segment, ***segments;

    if (index->n_segments == index->cap) {
        segments = realloc(index->segments, cap * sizeof(*segments));
        if (segments == NULL)
            return KV_ERR_NOMEM;
        index->segments = segments;
        index->cap = cap;
    }
    segment = malloc(KV_INDEX_SEGMENT * sizeof(struct kv_node *));
    if (segment == NULL)
        return KV_ERR_NOMEM;
    index->segments[index->n_segments++] = segment;
    return 0;
}

/* Split the chain that the next one is made from: nodes of one more bit of hash go there.  Without
 * memory for its segment nothing happens. */
static void grow(struct kv_index *index)
{
    const uint32_t chain = index->n_chains;
    const uint32_t mask = chain > index->mask ? 2 * index->mask + 1 : index->mask;
    struct kv_node **link, **to;

    if (chain == index->n_segments * KV_INDEX_SEGMENT && reserve_segment(index) < 0)
        return;
    index->mask = mask;
    index->n_chains++;
    link = head(index, chain & mask >> 1);
    to = head(index, chain);
    while (*link != NULL) {
        struct kv_node *node = *link;

        if ((hash(node->up, node->first_id) & mask) == chain) {
            *link = node->next;
            *to = node;
            to = &node->next;
        } else {
            link = &node->next;
        }
    }
    *to = NULL;
}

/* Put the last chain at the end of the one that it was split from. */
static void shrink(struct kv_index *index)
{
    const uint32_t chain = --index->n_chains;
    struct kv_node **link = head(index, chain & index->mask >> 1);

    while (*link != NULL)
        link = &(*link)->next;
    *link = *head(index, chain);
    if (chain == (index->mask >> 1) + 1)
        index->mask >>= 1;
    if (chain % KV_INDEX_SEGMENT == 0)
        free(index->segments[--index->n_segments]);
}

/* A node more or less is two chains or three; a step beyond that makes up for chains that there was
 * no memory for. */
static void adjust(struct kv_index *index)
{
    enum { STEPS = 4 };

    for (int i = 0; i < STEPS; i++) {
        if (index->n_chains < 2 * index->n_nodes)
            grow(index);
        else if (index->n_chains > KV_INDEX_LEAST && index->n_chains > 3 * index->n_nodes)
            shrink(index);
    }
}

/* ---- What the tree calls ---- */

int kv_index_open(struct kv_index *index)
{
    memset(index, 0, sizeof(*index));
    if (reserve_segment(index) < 0) {
        free(index->segments);
        return KV_ERR_NOMEM;
    }
    index->n_chains = KV_INDEX_LEAST;
    index->mask = KV_INDEX_LEAST - 1;
    memset(index->segments[0], 0, KV_INDEX_LEAST * sizeof(struct kv_node *));
    return 0;
}

void kv_index_release(struct kv_index *index)
{
    for (uint32_t i = 0; i < index->n_segments; i++)
        free(index->segments[i]);
    free(index->segments);
}

void kv_index_add(struct kv_index *index, struct kv_node *node)
{
    struct kv_node **chain = chain_of(index, hash(node->up, node->first_id));

    node->next = *chain;
    *chain = node;
    index->n_nodes++;
    adjust(index);
}

void kv_index_remove(struct kv_index *index, struct kv_node *node)
{
    struct kv_node **link = chain_of(index, hash(node->up, node->first_id));

    while (*link != node) {
        assert(*link != NULL);
        link = &(*link)->next;
    }
    *link = node->next;
    index->n_nodes--;
    adjust(index);
}

struct kv_node *kv_index_find(const struct kv_index *index, const struct kv_node *up,
                              uint32_t first_id)
{
    struct kv_node *node = *chain_of(index, hash(up, first_id));

    while (node != NULL && (node->up != up || node->first_id != first_id))
        node = node->next;
    return node;
}

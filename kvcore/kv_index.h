/* All nodes of a tree but its roots', found by parent and first id.
 *
 * A hash table that grows and shrinks with its nodes by linear hashing: a few chains at a time are
 * split, or merged with those they were split from, so that no single call pays for all.  The heads
 * of chains stand in segments of one size, which a small directory lists; nothing but that is ever
 * moved.
 *
 *   2 n_nodes <= n_chains <= 3 n_nodes, or KV_INDEX_LEAST chains
 *
 * Where there is no memory for a segment, chains are fewer and longer until there is. With half as
 * many, a match among 100,000 entries took a sixth longer: a second node in a chain is a wait for
 * memory.
 *
 * All functions want the lock of the tree's shard held. */
#ifndef KV_INDEX_H
#define KV_INDEX_H

#include <stddef.h>
#include <stdint.h>

struct kv_node;

enum {
    KV_INDEX_LEAST = 16,     /* chains that are always there */
    KV_INDEX_SEGMENT = 2048, /* chains of a segment; a tree has one at least */
    KV_INDEX_NODE_BYTES = 3 * sizeof(struct kv_node *), /* what a node costs here, at most */
};

struct kv_index {
    struct kv_node ***segments; /* [n_segments], room for cap: each [KV_INDEX_SEGMENT] heads */
    uint32_t n_segments;
    uint32_t cap;
    uint32_t n_chains;
    uint32_t mask; /* one less than the power of two at or above n_chains */
    uint32_t n_nodes;
};

/* An empty index.  KV_ERR_NOMEM. */
int kv_index_open(struct kv_index *index);
/* Forgets all nodes. */
void kv_index_release(struct kv_index *index);

/* The node is where its `up` and `first_id` say until it is removed: they must not change. */
void kv_index_add(struct kv_index *index, struct kv_node *node);
void kv_index_remove(struct kv_index *index, struct kv_node *node);

/* NULL: there is none. */
struct kv_node *kv_index_find(const struct kv_index *index, const struct kv_node *up,
                              uint32_t first_id);

#endif

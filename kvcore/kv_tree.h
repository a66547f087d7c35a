/* The prefix tree: a radix tree over token ids for each namespace, with entries at nodes.
 *
 *   root (namespace) --"2 7 7"--> node --"4"-----> node  entry A, key 2 7 7 4
 *                                   \---"9 1 1"--> node  entry B, key 2 7 7 9 1 1
 *
 * An *entry* is a frozen context: a page list of its own, each page held once, and perhaps the
 * logits after its last position.  A node without one is a fork in the road: it has two children
 * or more and holds no page.  Edges keep their own ids, so a split moves no page and reads none.
 *
 * Children of a node are a treap by first id: no array to grow, so taking one out needs no memory;
 * the priority is a hash of the id, so the same set has the same shape.  That is for their order; a
 * walk down finds a child by its parent and first id in one index of all nodes, however many
 * siblings it has.
 *
 * An entry without logits has none below it: an insert below extends it instead, in place, and so a
 * context that is published as it grows has one entry, to which each time only what is new is
 * added.  Edges and page lists that grow so have up to an eighth of room to spare, which is not
 * counted.
 *
 * Each node knows the first entry of its subtree (a prefix before its extensions, then by id).
 * Insert and remove mend that by one walk up, so that a match never walks down.
 *
 * Entries stand in a list by use, oldest first, over all and in each group; `serial` grows along
 * it, and over the trees of all shards (kv_clock.h).  A match or a publish moves its entry to the
 * end, a cut leaves it in place.
 *
 * Everything here is counted in bytes against one bound: nodes, edges, entries, page lists, logits
 * and roots, with what the allocator adds.  The pool's counters follow each change of a page's
 * holders at once.
 *
 * A tree belongs to a shard; all functions want its lock held. */
#ifndef KV_TREE_H
#define KV_TREE_H

#include "kvcore/kv_index.h"
#include "kvcore/kv_pool.h"
#include "kvcore/kvcore.h"

#include <sys/queue.h>

struct kv_shard;

/* Ids of a prompt (flat), or of the first n positions of a page list. */
struct kv_key {
    const uint32_t *ids;          /* [n], or NULL: */
    struct kv_page *const *pages; /* [ceil(n / page_tokens)] */
    const struct kv_layout *layout;
    uint32_t n;
};

/* The ids from position `at` < n on that stand in one piece; *n_run says how many, at least 1. */
const uint32_t *kv_key_run(const struct kv_key *key, uint32_t at, uint32_t *n_run);

/* What a refresh touches comes first, to be in one line of cache. */
struct kv_entry {
    TAILQ_ENTRY(kv_entry) by_use;
    TAILQ_ENTRY(kv_entry) in_group;
    uint64_t serial;
    struct kv_root *root;
    struct kv_page **pages; /* [n_pages], room for cap */
    struct kv_node *node;   /* NULL: removed, and only marks know it yet */
    float *logits;          /* [n_logits], or NULL */
    uint32_t n_pages;
    uint32_t cap;
    uint32_t n_logits;
    uint32_t n;       /* positions: the length of the key */
    uint32_t changes; /* of what the entry had: it was cut, or holds other pages */
    uint32_t n_marks;
};

TAILQ_HEAD(kv_entry_list, kv_entry);

/* What a match touches comes first, to be in few lines of cache. */
struct kv_node {
    struct kv_node *up;     /* NULL: a root's node */
    struct kv_node *next;   /* in the index */
    uint32_t *edge;         /* [n_edge], from up to here, room for cap */
    uint32_t n_edge;        /* 0 only at a root */
    uint32_t first_id;      /* edge[0] */
    struct kv_entry *first; /* of the subtree */
    struct kv_entry *entry;
    struct kv_node *kids;         /* treap by first id */
    struct kv_node *left, *right; /* in the parent's treap */
    uint32_t cap;
    bool unmerged; /* one child and no entry: there was no memory to merge the edges */
};

struct kv_root {
    struct kv_tree *tree;
    struct kv_digest ns;
    uint32_t group;
    struct kv_node node;
    struct kv_root *next; /* in the bucket */
};

/* Where a context was published last, so that the next time goes on from there: its first n ids are
 * those that the entry had then, its first n_same pages the entry's.  It keeps the entry's head
 * from being freed, and is out of date where the entry's `changes` are others, or it is removed. */
struct kv_mark {
    struct kv_entry *entry; /* NULL: nowhere */
    uint32_t changes;
    uint32_t n;
    uint32_t n_same;
};

struct kv_tree {
    struct kv_shard *shard;
    struct kv_pool *pool; /* the shard's */
    const struct kv_layout *layout;
    struct kv_root **buckets; /* [n_buckets], a power of two */
    uint32_t n_buckets;
    struct kv_index index; /* all nodes but roots' */
    struct kv_entry_list by_use;
    struct kv_entry_list in_group[KV_MAX_GROUPS];
    uint64_t serial;
    uint32_t n_entries;
    uint32_t n_nodes; /* roots not included */
    size_t bytes;
    size_t bound;       /* the shard's share */
    uint64_t n_evicted; /* pages */
};

/* The shard's tree, with a share of the cache's bound; `bound` is what its tables are sized for. */
int kv_tree_open(struct kv_shard *shard, size_t share, size_t bound);
/* Removes every entry first. */
void kv_tree_release(struct kv_tree *tree);

/* How far the namespace's tree goes along with the key, and the entry to use for that: the one at
 * that point or below it that comes first.  0 and *entry NULL: nothing in common. */
uint32_t kv_tree_match(const struct kv_tree *tree, const struct kv_namespace *ns,
                       const struct kv_key *key, struct kv_entry **entry);

/* An entry was used: it is the youngest now. */
void kv_tree_refresh(struct kv_tree *tree, struct kv_entry *entry);

struct kv_admission {
    struct kv_namespace ns;
    struct kv_key key;   /* by pages */
    const float *logits; /* [n_logits] or NULL */
    uint32_t n_logits;
    bool move; /* the caller's own references go to the tree, or are dropped: used up in any case */
    struct kv_mark *mark; /* of the context whose key this is; set anew.  NULL: none */
    bool all;             /* all locks are held */
};

/* Forget where; needs the lock. */
void kv_mark_clear(struct kv_mark *mark);

/* Enter a key with its pages.  0: entered, or covered by what is there, or there is no room within
 * the bound.  KV_ERR_NOMEM: nothing entered.  KV_AGAIN: nothing done, and nothing used up. */
int kv_tree_admit(struct kv_tree *tree, const struct kv_admission *a);

/* Take an entry out with its pages, prune and merge.  Returns how many pages came free. */
uint32_t kv_tree_remove(struct kv_tree *tree, struct kv_entry *entry);
/* Take the last n_pages pages off a leaf entry, in place; where nothing of its own edge would be
 * left, or entries stand below it, remove it whole.  Returns how many pages came free. */
uint32_t kv_tree_cut(struct kv_tree *tree, struct kv_entry *entry, uint32_t n_pages);

/* What the parts cost, for the tree and for the audit. */
size_t kv_tree_node_bytes(uint32_t n_edge);
size_t kv_tree_entry_bytes(uint32_t n_pages, uint32_t n_logits);
size_t kv_tree_root_bytes(void);

/* The child that comes first; the next one after first_id. */
struct kv_node *kv_node_first_child(const struct kv_node *node);
struct kv_node *kv_node_child_after(const struct kv_node *node, uint32_t first_id);

#endif

#include "kvcore/kv_tree.h"

#include "kvcore/kv_cache.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* What glibc adds to an allocation, rounded up: the bound is on memory, not on payload. */
enum { ALLOC_BYTES = 16 };

size_t kv_tree_node_bytes(uint32_t n_edge)
{
    return sizeof(struct kv_node) + n_edge * sizeof(uint32_t) + 2 * ALLOC_BYTES +
           KV_INDEX_NODE_BYTES;
}

size_t kv_tree_entry_bytes(uint32_t n_pages, uint32_t n_logits)
{
    size_t bytes = sizeof(struct kv_entry) + n_pages * sizeof(struct kv_page *) + 2 * ALLOC_BYTES;

    if (n_logits > 0)
        bytes += n_logits * sizeof(float) + ALLOC_BYTES;
    return bytes;
}

size_t kv_tree_root_bytes(void)
{
    return sizeof(struct kv_root) + ALLOC_BYTES;
}

/* ---- Keys ---- */

const uint32_t *kv_key_run(const struct kv_key *key, uint32_t at, uint32_t *n_run)
{
    uint32_t slot, run;

    assert(at < key->n);
    if (key->ids != NULL) {
        *n_run = key->n - at;
        return key->ids + at;
    }
    slot = at % key->layout->page_tokens;
    run = key->layout->page_tokens - slot;
    *n_run = run < key->n - at ? run : key->n - at;
    return kv_page_ids(key->layout, key->pages[at / key->layout->page_tokens]) + slot;
}

/* How many ids from the front are the same: by large steps, and in the step that differs by words.
 */
static uint32_t common_ids(const uint32_t *a, const uint32_t *b, uint32_t n)
{
    enum { LARGE = 256, SMALL = 16 };
    uint32_t i = 0;

    while (n - i >= LARGE && memcmp(a + i, b + i, LARGE * sizeof(*a)) == 0)
        i += LARGE;
    while (n - i >= SMALL && memcmp(a + i, b + i, SMALL * sizeof(*a)) == 0)
        i += SMALL;
    while (i < n && a[i] == b[i])
        i++;
    return i;
}

/* How far along an edge the key goes, that has its first i ids and goes on at position `at`. */
static uint32_t common_edge(const struct kv_key *key, uint32_t at, const struct kv_node *node,
                            uint32_t i)
{
    const uint32_t start = at - i; /* the key's position at the edge's begin */

    while (i < node->n_edge && start + i < key->n) {
        uint32_t run, same;
        const uint32_t *ids = kv_key_run(key, start + i, &run);

        run = run < node->n_edge - i ? run : node->n_edge - i;
        same = common_ids(ids, node->edge + i, run);
        i += same;
        if (same < run)
            break;
    }
    return i;
}

static void copy_ids(uint32_t *dst, const struct kv_key *key, uint32_t at)
{
    while (at < key->n) {
        uint32_t run;
        const uint32_t *ids = kv_key_run(key, at, &run);

        memcpy(dst, ids, run * sizeof(*dst));
        dst += run;
        at += run;
    }
}

/* ---- Children: a treap by first id, the highest priority on top ---- */

/* An id's bits well mixed (the finisher of MurmurHash3). */
static uint32_t priority(const struct kv_node *node)
{
    uint32_t h = node->first_id;

    h = (h ^ h >> 16) * 0x85ebca6bu;
    h = (h ^ h >> 13) * 0xc2b2ae35u;
    return h ^ h >> 16;
}

struct kv_node *kv_node_first_child(const struct kv_node *node)
{
    struct kv_node *kid = node->kids;

    while (kid != NULL && kid->left != NULL)
        kid = kid->left;
    return kid;
}

struct kv_node *kv_node_child_after(const struct kv_node *node, uint32_t first_id)
{
    struct kv_node *kid = node->kids, *best = NULL;

    while (kid != NULL) {
        if (kid->first_id > first_id) {
            best = kid;
            kid = kid->left;
        } else {
            kid = kid->right;
        }
    }
    return best;
}

/* Where the child with that first id hangs, or would. */
static struct kv_node **child_link(struct kv_node *node, uint32_t first_id)
{
    struct kv_node **link = &node->kids;

    while (*link != NULL && (*link)->first_id != first_id)
        link = first_id < (*link)->first_id ? &(*link)->left : &(*link)->right;
    return link;
}

static void add_child(struct kv_tree *tree, struct kv_node *node, struct kv_node *kid)
{
    struct kv_node **link = &node->kids, **left = &kid->left, **right = &kid->right, *rest;
    const uint32_t mine = priority(kid);

    while (*link != NULL && priority(*link) >= mine)
        link = kid->first_id < (*link)->first_id ? &(*link)->left : &(*link)->right;
    rest = *link;
    *link = kid;
    while (rest != NULL) { /* split what stood there into smaller and larger ids */
        if (rest->first_id < kid->first_id) {
            *left = rest;
            left = &rest->right;
            rest = rest->right;
        } else {
            *right = rest;
            right = &rest->left;
            rest = rest->left;
        }
    }
    *left = *right = NULL;
    kid->up = node;
    node->unmerged = false;
    kv_index_add(&tree->index, kid);
}

static void remove_child(struct kv_tree *tree, struct kv_node *node, struct kv_node *kid)
{
    struct kv_node **link = child_link(node, kid->first_id), *a = kid->left, *b = kid->right;

    assert(*link == kid);
    kv_index_remove(&tree->index, kid);
    while (a != NULL && b != NULL) {
        if (priority(a) >= priority(b)) {
            *link = a;
            link = &a->right;
            a = a->right;
        } else {
            *link = b;
            link = &b->left;
            b = b->left;
        }
    }
    *link = a != NULL ? a : b;
    kid->left = kid->right = NULL;
}

/* Put `with`, which begins with the same id, where `kid` hangs. */
static void replace_child(struct kv_tree *tree, struct kv_node *node, struct kv_node *kid,
                          struct kv_node *with)
{
    struct kv_node **link = child_link(node, kid->first_id);

    assert(*link == kid && with->first_id == kid->first_id);
    kv_index_remove(&tree->index, kid);
    with->left = kid->left;
    with->right = kid->right;
    with->up = node;
    *link = with;
    kid->left = kid->right = NULL;
    kv_index_add(&tree->index, with);
}

/* ---- Nodes ---- */

static struct kv_node *node_alloc(uint32_t n_edge)
{
    struct kv_node *node = calloc(1, sizeof(*node));

    if (node == NULL)
        return NULL;
    node->edge = malloc(n_edge * sizeof(*node->edge));
    node->n_edge = node->cap = n_edge;
    if (node->edge == NULL) {
        free(node);
        return NULL;
    }
    return node;
}

static void node_free(struct kv_node *node)
{
    if (node == NULL)
        return;
    free(node->edge);
    free(node);
}

/* Keep the first n ids of an edge, and give the memory of the rest back where the allocator can. */
static void shorten_edge(struct kv_node *node, uint32_t n)
{
    uint32_t *edge = realloc(node->edge, n * sizeof(*edge));

    if (edge != NULL) {
        node->edge = edge;
        node->cap = n;
    }
    node->n_edge = n;
}

/* The first entry of each subtree from the node up, as far as it changes. */
static void mend_first(struct kv_node *node)
{
    for (; node != NULL; node = node->up) {
        struct kv_entry *first = node->entry;

        if (first == NULL && node->kids != NULL)
            first = kv_node_first_child(node)->first;
        if (first == node->first)
            break;
        node->first = first;
    }
}

/* Put `upper`, with room for i ids, between a node and its parent. */
static void split(struct kv_tree *tree, struct kv_node *node, uint32_t i, struct kv_node *upper)
{
    assert(i > 0 && i < node->n_edge && upper->n_edge == i);
    memcpy(upper->edge, node->edge, i * sizeof(*upper->edge));
    upper->first_id = upper->edge[0];
    replace_child(tree, node->up, node, upper);
    memmove(node->edge, node->edge + i, (node->n_edge - i) * sizeof(*node->edge));
    shorten_edge(node, node->n_edge - i);
    node->first_id = node->edge[0];
    add_child(tree, upper, node);
    upper->first = node->first;
    tree->n_nodes++;
    tree->bytes += kv_tree_node_bytes(0);
}

/* A node without an entry and with one child gives its edge to the child and goes.  Without memory
 * for that it stays, marked, which is untidy and does no harm: a match passes through it. */
static void merge(struct kv_tree *tree, struct kv_node *node)
{
    struct kv_node *kid = node->kids;
    uint32_t *edge = realloc(kid->edge, (node->n_edge + kid->n_edge) * sizeof(*edge));

    assert(kid->left == NULL && kid->right == NULL && node->entry == NULL);
    node->unmerged = edge == NULL;
    if (edge == NULL)
        return;
    memmove(edge + node->n_edge, edge, kid->n_edge * sizeof(*edge));
    memcpy(edge, node->edge, node->n_edge * sizeof(*edge));
    kv_index_remove(&tree->index, kid);
    kid->edge = edge;
    kid->n_edge += node->n_edge;
    kid->cap = kid->n_edge;
    kid->first_id = edge[0];
    replace_child(tree, node->up, node, kid);
    node_free(node);
    tree->n_nodes--;
    tree->bytes -= kv_tree_node_bytes(0);
}

/* Does exactly one child hang below? */
static bool has_one_child(const struct kv_node *node)
{
    return node->kids != NULL && node->kids->left == NULL && node->kids->right == NULL;
}

/* ---- Roots ---- */

static struct kv_root **root_link(const struct kv_tree *tree, const struct kv_digest *ns,
                                  uint32_t group)
{
    struct kv_root **link;
    uint32_t hash;

    memcpy(&hash, ns->bytes, sizeof(hash)); /* a digest is as good a hash as any */
    link = &tree->buckets[hash & (tree->n_buckets - 1)];
    while (*link != NULL && ((*link)->group != group || memcmp(&(*link)->ns, ns, sizeof(*ns)) != 0))
        link = &(*link)->next;
    return link;
}

static struct kv_root *root_get(struct kv_tree *tree, const struct kv_namespace *ns)
{
    struct kv_root **link = root_link(tree, &ns->digest, ns->group), *root = *link;

    if (root != NULL)
        return root;
    root = calloc(1, sizeof(*root));
    if (root == NULL)
        return NULL;
    root->tree = tree;
    root->ns = ns->digest;
    root->group = ns->group;
    *link = root;
    tree->bytes += kv_tree_root_bytes();
    return root;
}

static void root_drop(struct kv_tree *tree, struct kv_root *root)
{
    struct kv_root **link = root_link(tree, &root->ns, root->group);

    assert(*link == root && root->node.kids == NULL);
    *link = root->next;
    free(root);
    tree->bytes -= kv_tree_root_bytes();
}

int kv_tree_open(struct kv_shard *shard, size_t share, size_t bound)
{
    struct kv_tree *tree = &shard->tree;

    memset(tree, 0, sizeof(*tree));
    tree->shard = shard;
    tree->pool = &shard->pool;
    tree->layout = &shard->cache->layout;
    tree->bound = share;
    TAILQ_INIT(&tree->by_use);
    for (uint32_t i = 0; i < KV_MAX_GROUPS; i++)
        TAILQ_INIT(&tree->in_group[i]);
    /* One bucket for every 4 KiB of bookkeeping: short chains even if each root has one entry. */
    tree->n_buckets = 64;
    while (tree->n_buckets < 65536 && tree->n_buckets < bound / 4096)
        tree->n_buckets *= 2;
    tree->buckets = calloc(tree->n_buckets, sizeof(struct kv_root *));
    if (tree->buckets == NULL)
        return KV_ERR_NOMEM;
    if (kv_index_open(&tree->index) < 0) {
        free(tree->buckets);
        return KV_ERR_NOMEM;
    }
    return 0;
}

void kv_tree_release(struct kv_tree *tree)
{
    while (!TAILQ_EMPTY(&tree->by_use))
        kv_tree_remove(tree, TAILQ_FIRST(&tree->by_use));
    assert(tree->bytes == 0 && tree->n_nodes == 0);
    free(tree->buckets);
    kv_index_release(&tree->index);
}

/* ---- Looking up ---- */

/* Where a key leaves the tree: `depth` of its ids match, the last `in_edge` of them on the edge of
 * `node`. */
struct spot {
    struct kv_node *node;
    uint32_t depth;
    uint32_t in_edge;
};

static struct spot walk_on(const struct kv_tree *tree, struct spot at, const struct kv_key *key)
{
    for (;;) {
        const uint32_t in_edge = common_edge(key, at.depth, at.node, at.in_edge);
        uint32_t run;
        struct kv_node *kid;

        at.depth += in_edge - at.in_edge;
        at.in_edge = in_edge;
        if (in_edge < at.node->n_edge || at.depth == key->n)
            break;
        kid = kv_index_find(&tree->index, at.node, *kv_key_run(key, at.depth, &run));
        if (kid == NULL)
            break;
        __builtin_prefetch(kid->first->pages); /* while ids are compared */
        at.node = kid;
        at.in_edge = 0;
    }
    return at;
}

static struct spot walk(const struct kv_tree *tree, struct kv_root *root, const struct kv_key *key)
{
    return walk_on(tree, (struct spot){.node = &root->node}, key);
}

uint32_t kv_tree_match(const struct kv_tree *tree, const struct kv_namespace *ns,
                       const struct kv_key *key, struct kv_entry **entry)
{
    struct kv_root *root = *root_link(tree, &ns->digest, ns->group);
    struct spot at;

    *entry = NULL;
    if (root == NULL)
        return 0;
    at = walk(tree, root, key);
    if (at.depth == 0)
        return 0;
    *entry = at.node->first;
    __builtin_prefetch((*entry)->pages[0]);
    __builtin_prefetch(TAILQ_NEXT(*entry, by_use));
    __builtin_prefetch((*entry)->by_use.tqe_prev);
    return at.depth;
}

static uint64_t next_serial(struct kv_tree *tree)
{
    tree->serial = kv_clock_stamp(&tree->shard->cache->clock, tree->serial);
    return tree->serial;
}

void kv_tree_refresh(struct kv_tree *tree, struct kv_entry *entry)
{
    const uint32_t group = entry->root->group;

    entry->serial = next_serial(tree);
    TAILQ_REMOVE(&tree->by_use, entry, by_use);
    TAILQ_INSERT_TAIL(&tree->by_use, entry, by_use);
    TAILQ_REMOVE(&tree->in_group[group], entry, in_group);
    TAILQ_INSERT_TAIL(&tree->in_group[group], entry, in_group);
}

/* ---- Marks ---- */

/* The head of an entry goes when it is out of the tree and no mark is at it. */
static void entry_free_head(struct kv_entry *entry)
{
    if (entry->node == NULL && entry->n_marks == 0)
        free(entry);
}

void kv_mark_clear(struct kv_mark *mark)
{
    if (mark->entry != NULL) {
        mark->entry->n_marks--;
        entry_free_head(mark->entry);
    }
    *mark = (struct kv_mark){0};
}

static void mark_set(struct kv_mark *mark, struct kv_entry *entry, uint32_t n, uint32_t n_same)
{
    if (mark == NULL)
        return;
    entry->n_marks++;
    kv_mark_clear(mark);
    *mark = (struct kv_mark){entry, entry->changes, n, n_same};
}

/* May a walk with the key begin at the mark? */
static bool mark_holds(const struct kv_mark *mark, const struct kv_key *key)
{
    return mark != NULL && mark->entry != NULL && mark->entry->node != NULL &&
           mark->entry->changes == mark->changes && mark->n <= key->n;
}

/* Where position mark->n is now: on the edge of the entry's node, or further up. */
static struct spot mark_spot(const struct kv_mark *mark)
{
    struct kv_node *node = mark->entry->node;
    uint32_t start = mark->entry->n - node->n_edge;

    while (start >= mark->n) {
        node = node->up;
        start -= node->n_edge;
    }
    return (struct spot){.node = node, .depth = mark->n, .in_edge = mark->n - start};
}

/* ---- Taking out ---- */

/* A leaf without an entry goes, and so upwards; then a node left with one child is merged with it.
 */
static void prune(struct kv_tree *tree, struct kv_root *root, struct kv_node *node)
{
    while (node->up != NULL && node->entry == NULL && node->kids == NULL) {
        struct kv_node *up = node->up;

        remove_child(tree, up, node);
        tree->n_nodes--;
        tree->bytes -= kv_tree_node_bytes(node->n_edge);
        node_free(node);
        node = up;
    }
    if (node->up == NULL && node->kids == NULL) {
        root_drop(tree, root);
        return;
    }
    mend_first(node);
    if (node->up != NULL && node->entry == NULL && has_one_child(node))
        merge(tree, node);
}

/* Out of the tree and its lists; the pages are the caller's business. */
static void unlink_entry(struct kv_tree *tree, struct kv_entry *entry)
{
    entry->node->entry = NULL;
    TAILQ_REMOVE(&tree->by_use, entry, by_use);
    TAILQ_REMOVE(&tree->in_group[entry->root->group], entry, in_group);
    tree->n_entries--;
    tree->bytes -= kv_tree_entry_bytes(entry->n_pages, entry->n_logits);
    prune(tree, entry->root, entry->node);
}

static void entry_free(struct kv_entry *entry)
{
    free(entry->pages);
    free(entry->logits);
    entry->node = NULL;
    entry_free_head(entry);
}

/* Let go of pages [from, n_pages) as a holder in the tree. */
static uint32_t let_go(struct kv_tree *tree, struct kv_entry *entry, uint32_t from)
{
    const uint32_t n_free = tree->pool->n_free;

    for (uint32_t i = entry->n_pages; i-- > from;)
        kv_pool_count(tree->pool, entry->pages[i], -1, -1);
    tree->n_evicted += tree->pool->n_free - n_free;
    return tree->pool->n_free - n_free;
}

uint32_t kv_tree_remove(struct kv_tree *tree, struct kv_entry *entry)
{
    const uint32_t freed = let_go(tree, entry, 0);

    unlink_entry(tree, entry);
    entry_free(entry);
    return freed;
}

static void drop_logits(struct kv_tree *tree, struct kv_entry *entry)
{
    tree->bytes -= kv_tree_entry_bytes(entry->n_pages, entry->n_logits) -
                   kv_tree_entry_bytes(entry->n_pages, 0);
    free(entry->logits);
    entry->logits = NULL;
    entry->n_logits = 0;
}

uint32_t kv_tree_cut(struct kv_tree *tree, struct kv_entry *entry, uint32_t n_pages)
{
    struct kv_node *node = entry->node;
    const uint32_t left = entry->n_pages - n_pages;
    const uint32_t n = left * tree->layout->page_tokens; /* positions that stay */
    const uint32_t parent = entry->n - node->n_edge;
    uint32_t freed;

    if (node->kids != NULL || n <= parent)
        return kv_tree_remove(tree, entry);
    if (entry->logits != NULL)
        drop_logits(tree, entry);
    freed = let_go(tree, entry, left);
    tree->bytes -= kv_tree_entry_bytes(entry->n_pages, 0) - kv_tree_entry_bytes(left, 0);
    tree->bytes -= kv_tree_node_bytes(node->n_edge) - kv_tree_node_bytes(n - parent);
    entry->n_pages = left;
    entry->n = n;
    entry->changes++;
    shorten_edge(node, n - parent);
    return freed;
}

/* ---- Entering ---- */

/* What an entry costs when it stands alone in its namespace. */
static size_t alone_bytes(uint32_t n, uint32_t n_pages, uint32_t n_logits)
{
    return kv_tree_root_bytes() + kv_tree_node_bytes(n) + kv_tree_entry_bytes(n_pages, n_logits);
}

/* The node at the key's end, made where it is missing: by a leaf, a split, or both. */
static int node_at(struct kv_tree *tree, struct spot at, const struct kv_key *key,
                   struct kv_node **out)
{
    struct kv_node *node = at.node, *upper = NULL, *leaf = NULL;
    const bool mid_edge = at.in_edge < node->n_edge;

    if (mid_edge)
        upper = node_alloc(at.in_edge);
    if (at.depth < key->n)
        leaf = node_alloc(key->n - at.depth);
    if ((mid_edge && upper == NULL) || (at.depth < key->n && leaf == NULL)) {
        node_free(upper);
        node_free(leaf);
        return KV_ERR_NOMEM;
    }
    if (mid_edge) {
        split(tree, node, at.in_edge, upper);
        node = upper;
    }
    if (leaf != NULL) {
        copy_ids(leaf->edge, key, at.depth);
        leaf->first_id = leaf->edge[0];
        add_child(tree, node, leaf);
        tree->n_nodes++;
        tree->bytes += kv_tree_node_bytes(leaf->n_edge);
        node = leaf;
    }
    *out = node;
    return 0;
}

static struct kv_entry *entry_alloc(const struct kv_admission *a, uint32_t n_pages)
{
    struct kv_entry *entry = calloc(1, sizeof(*entry));

    if (entry == NULL)
        return NULL;
    entry->pages = malloc(n_pages * sizeof(*entry->pages));
    entry->cap = n_pages;
    if (a->n_logits > 0)
        entry->logits = malloc(a->n_logits * sizeof(*entry->logits));
    if (entry->pages == NULL || (a->n_logits > 0 && entry->logits == NULL)) {
        entry_free(entry);
        return NULL;
    }
    memcpy(entry->pages, a->key.pages, n_pages * sizeof(*entry->pages));
    if (a->n_logits > 0)
        memcpy(entry->logits, a->logits, a->n_logits * sizeof(*entry->logits));
    entry->n_pages = n_pages;
    entry->n_logits = a->n_logits;
    entry->n = a->key.n;
    return entry;
}

static void link_entry(struct kv_tree *tree, struct kv_root *root, struct kv_node *node,
                       struct kv_entry *entry)
{
    assert(node->entry == NULL);
    entry->root = root;
    entry->node = node;
    entry->serial = next_serial(tree);
    node->entry = entry;
    node->unmerged = false;
    TAILQ_INSERT_TAIL(&tree->by_use, entry, by_use);
    TAILQ_INSERT_TAIL(&tree->in_group[root->group], entry, in_group);
    tree->n_entries++;
    tree->bytes += kv_tree_entry_bytes(entry->n_pages, entry->n_logits);
    mend_first(node);
}

/* With `move`, drop the giver's references to pages [from, to). */
static void drop_moved(struct kv_tree *tree, const struct kv_admission *a, uint32_t from,
                       uint32_t to)
{
    for (uint32_t i = to; a->move && i-- > from;)
        kv_pool_count(tree->pool, a->key.pages[i], -1, 0);
}

/* The key's entry takes the logits that it lacks, if they fit.  It is the youngest before room is
 * made, so that it is not what goes; and not refreshed where the call is to begin anew, or fails.
 */
static int adopt_logits(struct kv_tree *tree, const struct kv_admission *a, struct kv_entry *entry)
{
    const size_t bytes = kv_tree_entry_bytes(0, a->n_logits) - kv_tree_entry_bytes(0, 0);
    const size_t alone = alone_bytes(entry->n, entry->n_pages, 0);
    float *logits;

    if (!a->all && kv_evict_bytes(tree->shard, bytes, alone, false) == KV_AGAIN)
        return KV_AGAIN;
    logits = malloc(a->n_logits * sizeof(*logits));
    if (logits == NULL)
        return KV_ERR_NOMEM;
    kv_tree_refresh(tree, entry);
    mark_set(a->mark, entry, a->key.n, 0);
    if (a->all && kv_evict_bytes(tree->shard, bytes, alone, true) < 0) {
        free(logits);
        return 0;
    }
    memcpy(logits, a->logits, a->n_logits * sizeof(*logits));
    entry->logits = logits;
    entry->n_logits = a->n_logits;
    tree->bytes += bytes;
    return 0;
}

/* The key is there already, or more: the pages that are there stay. */
static int admit_again(struct kv_tree *tree, const struct kv_admission *a, struct kv_entry *entry)
{
    if (a->n_logits > 0 && entry->logits == NULL)
        return adopt_logits(tree, a, entry);
    kv_tree_refresh(tree, entry);
    mark_set(a->mark, entry, a->key.n, 0);
    return 0;
}

static int admit_new(struct kv_tree *tree, const struct kv_admission *a, struct spot at,
                     uint32_t n_pages)
{
    struct kv_entry *entry = entry_alloc(a, n_pages);
    struct kv_root *root = NULL;
    struct kv_node *node;

    if (entry != NULL)
        root = root_get(tree, &a->ns);
    if (root != NULL && at.node == NULL)
        at = (struct spot){.node = &root->node};
    if (root == NULL || node_at(tree, at, &a->key, &node) < 0) {
        if (root != NULL && root->node.kids == NULL)
            root_drop(tree, root);
        if (entry != NULL)
            entry_free(entry);
        drop_moved(tree, a, 0, n_pages);
        return KV_ERR_NOMEM;
    }
    link_entry(tree, root, node, entry);
    for (uint32_t i = 0; i < n_pages; i++)
        kv_pool_count(tree->pool, entry->pages[i], a->move ? 0 : 1, 1);
    mark_set(a->mark, entry, a->key.n, a->key.n / tree->layout->page_tokens);
    return 0;
}

/* Room for n ids on an edge, or n pages in a list, with an eighth to spare where it grows. */
static uint32_t grown(uint32_t n)
{
    return n + n / 8;
}

static int reserve_edge(struct kv_node *node, uint32_t n)
{
    uint32_t *edge;

    if (n <= node->cap)
        return 0;
    edge = realloc(node->edge, grown(n) * sizeof(*edge));
    if (edge == NULL)
        return KV_ERR_NOMEM;
    node->edge = edge;
    node->cap = grown(n);
    return 0;
}

static int reserve_pages(struct kv_entry *entry, uint32_t n)
{
    struct kv_page **pages;

    if (n <= entry->cap)
        return 0;
    pages = realloc(entry->pages, grown(n) * sizeof(*pages));
    if (pages == NULL)
        return KV_ERR_NOMEM;
    entry->pages = pages;
    entry->cap = grown(n);
    return 0;
}

/* Make the entry's pages those of the key.  The first that are the same already pass over: nobody's
 * count changes, or with `move` the giver's reference is dropped. */
static void pass_pages(struct kv_tree *tree, const struct kv_admission *a, struct kv_entry *entry,
                       uint32_t n_pages)
{
    uint32_t same = mark_holds(a->mark, &a->key) && a->mark->entry == entry ? a->mark->n_same : 0;

    while (same < entry->n_pages && entry->pages[same] == a->key.pages[same])
        same++;
    for (uint32_t i = same; i < n_pages; i++)
        kv_pool_count(tree->pool, a->key.pages[i], a->move ? 0 : 1, 1);
    drop_moved(tree, a, 0, same);
    if (same < entry->n_pages) {
        let_go(tree, entry, same);
        entry->changes++;
    }
    memcpy(entry->pages + same, a->key.pages + same, (n_pages - same) * sizeof(*entry->pages));
    entry->n_pages = n_pages;
}

/* The key goes on where an entry without logits ends: that becomes the entry of the key. */
static int extend(struct kv_tree *tree, const struct kv_admission *a, struct kv_entry *entry,
                  uint32_t n_pages)
{
    struct kv_node *node = entry->node;
    const uint32_t n_more = a->key.n - entry->n;
    float *logits = NULL;

    assert(node->kids == NULL && entry->logits == NULL);
    if (a->n_logits > 0 && (logits = malloc(a->n_logits * sizeof(*logits))) == NULL)
        goto nomem;
    if (reserve_edge(node, node->n_edge + n_more) < 0 || reserve_pages(entry, n_pages) < 0)
        goto nomem;
    if (a->n_logits > 0)
        memcpy(logits, a->logits, a->n_logits * sizeof(*logits));
    copy_ids(node->edge + node->n_edge, &a->key, entry->n);
    tree->bytes -= kv_tree_node_bytes(node->n_edge);
    tree->bytes -= kv_tree_entry_bytes(entry->n_pages, 0);
    node->n_edge += n_more;
    pass_pages(tree, a, entry, n_pages);
    entry->n = a->key.n;
    entry->logits = logits;
    entry->n_logits = a->n_logits;
    tree->bytes += kv_tree_node_bytes(node->n_edge);
    tree->bytes += kv_tree_entry_bytes(n_pages, a->n_logits);
    kv_tree_refresh(tree, entry);
    mark_set(a->mark, entry, a->key.n, a->key.n / tree->layout->page_tokens);
    return 0;
nomem:
    free(logits);
    drop_moved(tree, a, 0, n_pages);
    return KV_ERR_NOMEM;
}

/* Where the key leaves the tree; node NULL where its namespace has none. */
static struct spot find_spot(const struct kv_tree *tree, const struct kv_admission *a)
{
    struct kv_root *root;

    if (mark_holds(a->mark, &a->key))
        return walk_on(tree, mark_spot(a->mark), &a->key);
    root = *root_link(tree, &a->ns.digest, a->ns.group);
    return root != NULL ? walk(tree, root, &a->key) : (struct spot){0};
}

static int admit_more(struct kv_tree *tree, const struct kv_admission *a, uint32_t n_pages)
{
    const struct spot at = find_spot(tree, a); /* anew: making room may have changed it */
    struct kv_entry *entry = at.node != NULL ? at.node->entry : NULL;
    int rc;

    if (entry != NULL && entry->logits == NULL && at.in_edge == at.node->n_edge)
        rc = extend(tree, a, entry, n_pages);
    else
        rc = admit_new(tree, a, at, n_pages);
    assert(tree->bytes <= tree->bound);
    return rc;
}

/* Does the key end where the tree has it, or more: is there nothing to enter? */
static struct kv_entry *covering(const struct kv_admission *a, struct spot at)
{
    if (at.node == NULL || at.depth < a->key.n)
        return NULL;
    if (at.in_edge == at.node->n_edge && at.node->entry != NULL)
        return at.node->entry;
    return a->n_logits == 0 ? at.node->first : NULL;
}

int kv_tree_admit(struct kv_tree *tree, const struct kv_admission *a)
{
    const uint32_t page_tokens = tree->layout->page_tokens;
    const uint32_t n_pages = (a->key.n + page_tokens - 1) / page_tokens;
    const size_t need = alone_bytes(a->key.n, n_pages, a->n_logits) + kv_tree_node_bytes(0);
    struct kv_entry *entry = covering(a, find_spot(tree, a));
    int rc;

    assert(a->key.n > 0 && (a->logits == NULL) == (a->n_logits == 0));
    if (entry != NULL) {
        rc = admit_again(tree, a, entry);
        if (rc != KV_AGAIN)
            drop_moved(tree, a, 0, n_pages);
        return rc;
    }
    rc = kv_evict_bytes(tree->shard, need, 0, a->all);
    if (rc == 0)
        return admit_more(tree, a, n_pages);
    if (rc == KV_ERR_FULL)
        drop_moved(tree, a, 0, n_pages);
    return rc == KV_ERR_FULL ? 0 : rc;
}

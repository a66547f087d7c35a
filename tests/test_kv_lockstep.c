/* kvcore in lockstep with a model that shares nothing.
 *
 * Method: random operations go to a real cache and to a model in which every context is a private
 * copy of its ids, the tree a flat list in order of use, the longest prefix found by scanning, and
 * bookkeeping counted from the sorted keys.  The model predicts the entry set, its order, the
 * length and the entry of each match, each grant and each refusal.  Which victims an eviction takes
 * and where the last is cut is worked out from page holders as they were before the step, by sets
 * and not by counters.  After each step the audit runs, entries are compared, and every context
 * must read back its ids and their rows.
 *
 * The same program is run on an arena and on the heap: all bytes of all pages must be the same.
 *
 * test_kv_lockstep [seed [steps]] runs one long sequence; a failure prints the step. */
#include "kv_help.h"

#include "kvcore/kv_cache.h"

#include <stdio.h>

enum { MAX_LEN = 120, MAX_CTX = 7, MAX_PAGES = 64, MAX_ENTRIES = 64, N_NS = 3, N_LOGITS = 3 };

struct setting {
    struct kv_geometry geometry;
    uint32_t page_tokens;
    uint32_t n_pages;
    uint32_t alphabet;
    size_t bookkeeping;
};

static const struct setting settings[] = {
    {{1, 1, 2, KV_F16}, 16, 20, 2, 1 << 20}, {{2, 2, 3, KV_F32}, 16, 26, 3, 1 << 20},
    {{1, 2, 5, KV_F16}, 32, 11, 2, 1 << 20}, {{1, 1, 32, KV_Q8}, 16, 20, 2, 1 << 20},
    {{2, 1, 2, KV_F32}, 16, 30, 2, 2600}, /* bookkeeping is what runs out */
};

/* Two namespaces of one tenant, one of another. */
static const struct kv_namespace namespaces[N_NS] = {{{{1}}, 0}, {{{2}}, 0}, {{{3}}, 5}};

struct ids {
    uint32_t at[MAX_LEN];
    uint32_t n;
};

struct model_context {
    struct kv_context *real; /* NULL: unused */
    int ns;
    struct ids ids;
    struct ids open; /* what is being appended; n 0: nothing */
    uint32_t bound;
    uint32_t refs;
    bool frozen;
};

struct model_entry {
    int ns;
    struct ids ids;
    bool logits;
    uint32_t pages[MAX_PAGES]; /* as the real entry held them before the step */
    uint32_t n_pages;
};

struct world {
    const struct setting *set;
    struct kv_cache *cache;
    uint64_t random;
    uint32_t step;
    struct model_context ctx[MAX_CTX];
    struct model_entry entries[MAX_ENTRIES]; /* oldest first */
    uint32_t n_entries;
    uint32_t quota[2]; /* of groups 0 and 5 */
    bool pinned[MAX_PAGES];
    uint32_t crc; /* of everything seen, to compare two runs */
    uint32_t n_full, n_evicted, n_cut, n_hits, n_bk;
};

#define EXPECT(w, cond, ...)                         \
    do {                                             \
        if (!(cond)) {                               \
            fprintf(stderr, "step %u: ", (w)->step); \
            fprintf(stderr, __VA_ARGS__);            \
            fprintf(stderr, "\n");                   \
            ck_abort_msg("lockstep: %s", #cond);     \
        }                                            \
    } while (0)

static uint32_t draw(struct world *w, uint32_t n)
{
    w->random = mix(w->random);
    return (uint32_t)(w->random >> 33) % n;
}

static uint32_t pages_for(const struct world *w, uint32_t n)
{
    return (n + w->set->page_tokens - 1) / w->set->page_tokens;
}

static uint32_t common(const struct ids *a, const struct ids *b)
{
    uint32_t n = 0;

    while (n < a->n && n < b->n && a->at[n] == b->at[n])
        n++;
    return n;
}

static int compare(const struct ids *a, const struct ids *b)
{
    const uint32_t n = common(a, b);

    if (n == a->n || n == b->n)
        return (a->n > b->n) - (a->n < b->n);
    return a->at[n] < b->at[n] ? -1 : 1;
}

static void logits_of(const struct ids *ids, float *out)
{
    for (uint32_t i = 0; i < N_LOGITS; i++)
        out[i] = (float)(ids->n * 10 + i + ids->at[ids->n - 1]);
}

/* ---- Holders, as they are before a step ---- */

static uint32_t page_id(const struct world *w, const struct kv_page *page)
{
    return (uint32_t)(page - w->cache->pool.pages);
}

static void note_holders(struct world *w)
{
    const struct kv_entry *e;
    uint32_t n = 0;

    memset(w->pinned, 0, sizeof(w->pinned));
    for (int i = 0; i < MAX_CTX; i++)
        for (uint32_t j = 0; w->ctx[i].real != NULL && j < w->ctx[i].real->n_pages; j++)
            w->pinned[page_id(w, w->ctx[i].real->pages[j])] = true;
    TAILQ_FOREACH(e, &w->cache->tree.by_use, by_use)
    {
        struct model_entry *m = &w->entries[n++];

        m->n_pages = e->n_pages;
        for (uint32_t i = 0; i < e->n_pages; i++)
            m->pages[i] = page_id(w, e->pages[i]);
    }
}

/* Pages that something holds, of one group or (-1) of all. */
static uint32_t count_live(const struct world *w, int group, bool with_entries)
{
    bool live[MAX_PAGES] = {false};
    uint32_t n = 0;

    for (int i = 0; i < MAX_CTX; i++) {
        const struct model_context *c = &w->ctx[i];

        if (c->real != NULL && (group < 0 || namespaces[c->ns].group == (uint32_t)group))
            for (uint32_t j = 0; j < c->real->n_pages; j++)
                live[page_id(w, c->real->pages[j])] = true;
    }
    for (uint32_t i = 0; with_entries && i < w->n_entries; i++) {
        const struct model_entry *e = &w->entries[i];

        if (group < 0 || namespaces[e->ns].group == (uint32_t)group)
            for (uint32_t j = 0; j < e->n_pages; j++)
                live[e->pages[j]] = true;
    }
    for (uint32_t i = 0; i < MAX_PAGES; i++)
        n += live[i] || (group < 0 && with_entries && w->pinned[i]);
    return n;
}

static uint32_t count_reserved(const struct world *w, int group)
{
    uint32_t n = 0;

    for (int i = 0; i < MAX_CTX; i++)
        if (w->ctx[i].real != NULL &&
            (group < 0 || namespaces[w->ctx[i].ns].group == (uint32_t)group))
            n += w->ctx[i].real->held;
    return n;
}

static bool tail_shared(const struct world *w, const struct model_context *c, bool forked)
{
    uint32_t holders = forked, tail;

    if (c->ids.n % w->set->page_tokens == 0)
        return false;
    tail = page_id(w, c->real->pages[c->ids.n / w->set->page_tokens]);
    for (int i = 0; i < MAX_CTX; i++)
        for (uint32_t j = 0; w->ctx[i].real != NULL && j < w->ctx[i].real->n_pages; j++)
            holders += page_id(w, w->ctx[i].real->pages[j]) == tail;
    for (uint32_t i = 0; i < w->n_entries; i++)
        for (uint32_t j = 0; j < w->entries[i].n_pages; j++)
            holders += w->entries[i].pages[j] == tail;
    return holders > 1;
}

/* Slots that a grant up to `to` takes beyond those held. */
static uint32_t missing(const struct world *w, const struct model_context *c, uint32_t to,
                        bool forked)
{
    uint32_t need;

    to = to > c->bound ? to : c->bound;
    if (to <= c->ids.n)
        return 0;
    need = pages_for(w, to) - pages_for(w, c->ids.n) + tail_shared(w, c, forked);
    return need > c->real->held ? need - c->real->held : 0;
}

/* ---- The list of entries ---- */

static void entry_remove(struct world *w, uint32_t i)
{
    memmove(&w->entries[i], &w->entries[i + 1], (--w->n_entries - i) * sizeof(w->entries[0]));
}

static void entry_refresh(struct world *w, uint32_t i)
{
    const struct model_entry e = w->entries[i];

    entry_remove(w, i);
    w->entries[w->n_entries++] = e;
}

/* Longest common prefix, and the first entry in order of ids that has it; -1: none. */
static uint32_t look_up(const struct world *w, int ns, const struct ids *ids, int *entry)
{
    uint32_t best = 0;

    *entry = -1;
    for (uint32_t i = 0; i < w->n_entries; i++) {
        const struct model_entry *e = &w->entries[i];
        const uint32_t n = e->ns == ns ? common(&e->ids, ids) : 0;

        if (n > best || (n > 0 && n == best && compare(&e->ids, &w->entries[*entry].ids) < 0)) {
            best = n;
            *entry = (int)i;
        }
    }
    return best;
}

/* What the entries cost as a tree: from the sorted keys of each namespace. */
static size_t bookkeeping(const struct world *w)
{
    size_t bytes = 0;

    for (int ns = 0; ns < N_NS; ns++) {
        const struct ids *keys[MAX_ENTRIES];
        struct ids forks[MAX_ENTRIES];
        uint32_t n = 0, n_forks = 0;

        for (uint32_t i = 0; i < w->n_entries; i++) {
            const struct model_entry *e = &w->entries[i];
            uint32_t at = n;

            if (e->ns != ns)
                continue;
            bytes += kv_tree_entry_bytes(pages_for(w, e->ids.n), e->logits ? N_LOGITS : 0);
            for (; at > 0 && compare(&e->ids, keys[at - 1]) < 0; at--)
                keys[at] = keys[at - 1];
            keys[at] = &e->ids;
            n++;
        }
        for (uint32_t i = 0; i < n; i++) {
            const uint32_t c = i > 0 ? common(keys[i - 1], keys[i]) : 0;
            struct ids fork = *keys[i];
            bool is_new = c > 0;

            bytes += (keys[i]->n - c) * sizeof(uint32_t) + kv_tree_node_bytes(0);
            fork.n = c;
            for (uint32_t j = 0; j < n; j++)
                is_new = is_new && compare(keys[j], &fork) != 0;
            for (uint32_t j = 0; j < n_forks; j++)
                is_new = is_new && compare(&forks[j], &fork) != 0;
            if (is_new) {
                forks[n_forks++] = fork;
                bytes += kv_tree_node_bytes(0);
            }
        }
        bytes += n > 0 ? kv_tree_root_bytes() : 0;
    }
    return bytes;
}

/* Make bookkeeping fit, never removing *keep (an index that follows its entry; -1: none). */
static bool make_room(struct world *w, size_t bytes, size_t least, int *keep)
{
    if (bookkeeping(w) + bytes <= w->set->bookkeeping)
        return true;
    if (least + bytes > w->set->bookkeeping)
        return false;
    while (bookkeeping(w) + bytes > w->set->bookkeeping) {
        entry_remove(w, *keep == 0 ? 1 : 0);
        *keep -= *keep > 0;
        w->n_bk++;
    }
    return true;
}

static size_t alone(const struct world *w, uint32_t n, uint32_t n_logits)
{
    return kv_tree_root_bytes() + kv_tree_node_bytes(n) +
           kv_tree_entry_bytes(pages_for(w, n), n_logits);
}

static void admit(struct world *w, int ns, const struct ids *key, bool logits)
{
    int at = -1, none = -1;
    uint32_t n;

    for (uint32_t i = 0; i < w->n_entries; i++)
        if (w->entries[i].ns == ns && compare(&w->entries[i].ids, key) == 0)
            at = (int)i;
    if (at >= 0) {
        entry_refresh(w, (uint32_t)at);
        at = (int)w->n_entries - 1;
        if (logits && !w->entries[at].logits &&
            make_room(w, kv_tree_entry_bytes(0, N_LOGITS) - kv_tree_entry_bytes(0, 0),
                      alone(w, key->n, 0), &at))
            w->entries[at].logits = true;
        return;
    }
    n = look_up(w, ns, key, &at);
    if (!logits && n == key->n) {
        entry_refresh(w, (uint32_t)at);
        return;
    }
    if (!make_room(w, alone(w, key->n, logits ? N_LOGITS : 0) + kv_tree_node_bytes(0), 0, &none))
        return;
    for (uint32_t i = w->n_entries; i-- > 0;) {
        const struct model_entry *e = &w->entries[i];

        if (e->ns == ns && !e->logits && common(&e->ids, key) == e->ids.n)
            entry_remove(w, i);
    }
    EXPECT(w, w->n_entries < MAX_ENTRIES, "the test has no room for more entries");
    w->entries[w->n_entries++] = (struct model_entry){.ns = ns, .ids = *key, .logits = logits};
}

/* ---- Eviction, by sets of holders ---- */

static bool all_pinned(const struct world *w, const struct model_entry *e)
{
    for (uint32_t i = 0; i < e->n_pages; i++)
        if (!w->pinned[e->pages[i]])
            return false;
    return true;
}

/* Take pages off the end of entry i until `live` minus what is held then is `goal`. */
static void cut(struct world *w, uint32_t i, uint32_t live, uint32_t goal)
{
    struct model_entry *e = &w->entries[i];
    uint32_t n, deepest = 0;

    while (live - count_live(w, -1, true) < goal)
        e->n_pages--;
    n = e->n_pages * w->set->page_tokens;
    for (uint32_t j = 0; j < w->n_entries; j++)
        if (j != i && w->entries[j].ns == e->ns) {
            const uint32_t c = common(&w->entries[j].ids, &e->ids);

            deepest = c > deepest ? c : deepest;
        }
    w->n_cut++;
    if (n == 0 || n <= deepest) {
        entry_remove(w, i);
        return;
    }
    e->ids.n = n;
    e->logits = false;
}

/* group -1: all. */
static void evict(struct world *w, int group, uint32_t goal)
{
    const uint32_t live = count_live(w, -1, true);

    while (live - count_live(w, -1, true) < goal) {
        struct model_entry saved;
        uint32_t i = 0;

        while (group >= 0 && i < w->n_entries &&
               namespaces[w->entries[i].ns].group != (uint32_t)group)
            i++;
        EXPECT(w, i < w->n_entries, "the model has nothing left to evict");
        if (all_pinned(w, &w->entries[i])) {
            entry_refresh(w, i);
            continue;
        }
        saved = w->entries[i];
        w->entries[i].n_pages = 0;
        w->n_evicted++;
        if (live - count_live(w, -1, true) < goal) {
            entry_remove(w, i);
            continue;
        }
        w->entries[i] = saved;
        cut(w, i, live, goal);
    }
}

/* Can the group have k more slots?  What must stay is what contexts hold and have reserved. */
static bool fits(const struct world *w, int ns, uint32_t k)
{
    const int group = (int)namespaces[ns].group;
    uint32_t n_pinned = 0;

    if (k == 0)
        return true;
    for (uint32_t i = 0; i < MAX_PAGES; i++)
        n_pinned += w->pinned[i];
    if (n_pinned + count_reserved(w, -1) + k > w->set->n_pages)
        return false;
    return count_live(w, group, false) + count_reserved(w, group) + k <= w->quota[group != 0];
}

/* Evict for k slots; `more` pages are live in the group besides what its holders say (pins). */
static void evict_for(struct world *w, int ns, uint32_t k)
{
    const int group = (int)namespaces[ns].group;
    const uint32_t used = count_live(w, group, true) + count_reserved(w, group) + k;
    const uint32_t quota = w->quota[group != 0];
    uint32_t needed;

    if (k == 0)
        return;
    if (used > quota)
        evict(w, group, used - quota);
    needed = count_live(w, -1, true) + count_reserved(w, -1) + k;
    if (needed > w->set->n_pages)
        evict(w, -1, needed - w->set->n_pages);
}

/* ---- Comparing ---- */

static void check_entries(struct world *w)
{
    const struct kv_entry *e;
    uint32_t n = 0;

    TAILQ_FOREACH(e, &w->cache->tree.by_use, by_use)
    {
        const struct model_entry *m = &w->entries[n];
        const struct kv_key key = {.pages = e->pages, .layout = &w->cache->layout, .n = e->n};

        EXPECT(w, n < w->n_entries, "%u entries expected, there are more", w->n_entries);
        EXPECT(w, e->n == m->ids.n, "entry %u has %u positions, expected %u", n, e->n, m->ids.n);
        EXPECT(w, memcmp(&e->root->ns, &namespaces[m->ns].digest, sizeof(e->root->ns)) == 0,
               "entry %u is of another namespace", n);
        EXPECT(w, (e->logits != NULL) == m->logits, "entry %u: logits expected %d", n, m->logits);
        for (uint32_t at = 0, run; at < e->n; at += run) {
            const uint32_t *ids = kv_key_run(&key, at, &run);

            EXPECT(w, memcmp(ids, m->ids.at + at, run * sizeof(*ids)) == 0,
                   "entry %u has other ids from %u on", n, at);
        }
        n++;
    }
    EXPECT(w, n == w->n_entries, "%u entries, expected %u", n, w->n_entries);
    EXPECT(w, bookkeeping(w) == w->cache->tree.bytes, "bookkeeping is %zu, expected %zu",
           w->cache->tree.bytes, bookkeeping(w));
}

static void check_contexts(struct world *w)
{
    for (int i = 0; i < MAX_CTX; i++) {
        struct model_context *c = &w->ctx[i];

        if (c->real == NULL)
            continue;
        EXPECT(w, holds(c->real, &w->set->geometry, &namespaces[c->ns], c->ids.at, c->ids.n),
               "context %d does not read back its %u positions", i, c->ids.n);
        for (uint32_t p = 0; p < kv_context_n_pages(c->real); p++)
            w->crc = kv_crc32c(w->crc, kv_context_page(c->real, p), w->cache->layout.page_bytes);
    }
}

static void check_world(struct world *w)
{
    struct kv_stats s;
    struct kv_why why;

    EXPECT(w, kv_cache_check(w->cache, &why) == 0, "%s", why.text);
    check_entries(w);
    check_contexts(w);
    kv_cache_stats(w->cache, &s);
    EXPECT(w, s.n_free + s.n_live == s.n_pages, "free %u, live %u", s.n_free, s.n_live);
    w->crc = kv_crc32c(w->crc, &s, sizeof(s));
}

/* ---- Operations ---- */

static struct model_context *unused(struct world *w)
{
    for (int i = 0; i < MAX_CTX; i++)
        if (w->ctx[i].real == NULL)
            return &w->ctx[i];
    return NULL;
}

static struct model_context *any(struct world *w)
{
    struct model_context *c = &w->ctx[draw(w, MAX_CTX)];

    return c->real != NULL ? c : NULL;
}

static bool busy(const struct model_context *c)
{
    return c->open.n > 0 || c->frozen;
}

/* Ids after what is there: random, or what an entry of the namespace has, so that paths meet. */
static void extend(struct world *w, int ns, struct ids *ids, uint32_t n)
{
    const struct model_entry *e =
        w->n_entries > 0 && draw(w, 4) > 0 ? &w->entries[draw(w, w->n_entries)] : NULL;
    uint32_t like = e != NULL && e->ns == ns ? e->ids.n : 0;

    if (like > 0 && draw(w, 3) == 0)
        like = draw(w, like) + 1;
    while (n-- > 0 && ids->n < MAX_LEN) {
        ids->at[ids->n] = ids->n < like ? e->ids.at[ids->n] : 1 + draw(w, w->set->alphabet);
        ids->n++;
    }
}

static void forget(struct model_context *c)
{
    memset(c, 0, sizeof(*c));
}

static void op_match(struct world *w)
{
    struct model_context *c = unused(w);
    const int ns = (int)draw(w, N_NS);
    struct ids ids = {.n = 0};
    float logits[N_LOGITS], want[N_LOGITS];
    bool take = draw(w, 2), has = false, granted = false;
    struct kv_match match;
    struct kv_context *real = NULL;
    uint32_t n, to, need = 0;
    int e, rc;

    if (c == NULL)
        return;
    if (w->n_entries > 0 && draw(w, 3) == 0) {
        const struct model_entry *exact = &w->entries[draw(w, w->n_entries)];

        ids = exact->ids;
    } else {
        extend(w, ns, &ids, 1 + draw(w, draw(w, 2) ? MAX_LEN - 1 : 40));
    }
    to = ids.n + draw(w, 2 * w->set->page_tokens);
    to = to < MAX_LEN ? to : ids.n;
    n = look_up(w, ns, &ids, &e);
    if (n == ids.n && take && w->entries[e].ids.n == n && w->entries[e].logits)
        has = true;
    else if (n == ids.n)
        n--;
    for (int attempt = 0; attempt < 2 && !granted; attempt++) {
        const uint32_t k = pages_for(w, n);
        bool pinned[MAX_PAGES];

        memcpy(pinned, w->pinned, sizeof(pinned));
        /* A slot for each page up to `to`, and one for the clone of a tail that the entry shares.
         */
        need = to > n ? pages_for(w, to) - k + (n % w->set->page_tokens != 0) : 0;
        *c = (struct model_context){.ns = ns};
        for (uint32_t i = 0; i < k && n > 0; i++)
            w->pinned[w->entries[e].pages[i]] = true;
        granted = fits(w, ns, need);
        if (granted && need > 0) { /* the pins of this namespace count against its quota too */
            const int group = (int)namespaces[ns].group;
            uint32_t held = count_live(w, group, false) + count_reserved(w, group) + need;

            for (uint32_t i = 0; i < k && n > 0; i++)
                held += w->pinned[w->entries[e].pages[i]] && !pinned[w->entries[e].pages[i]];
            granted = held <= w->quota[group != 0];
        }
        if (granted)
            break;
        memcpy(w->pinned, pinned, sizeof(pinned));
        if (n % w->set->page_tokens == 0)
            break;
        n -= n % w->set->page_tokens;
        has = false;
    }
    rc = kv_cache_match(w->cache, &namespaces[ns], ids.at, ids.n, to, take ? logits : NULL,
                        take ? N_LOGITS : 0, &real, &match);
    EXPECT(w, rc == (granted ? 0 : KV_ERR_FULL), "match: %d, granted %d", rc, granted);
    w->n_full += !granted;
    if (!granted)
        return;
    EXPECT(w, match.n_matched == n && match.has_logits == has, "match: %u, expected %u (%d, %d)",
           match.n_matched, n, match.has_logits, has);
    if (has) {
        logits_of(&ids, want);
        EXPECT(w, memcmp(logits, want, sizeof(want)) == 0, "other logits");
    }
    w->n_hits += n > 0;
    if (n > 0)
        entry_refresh(w, (uint32_t)e);
    evict_for(w, ns, need);
    ids.n = n;
    *c = (struct model_context){.real = real, .ns = ns, .ids = ids, .bound = to, .refs = 1};
}

static void op_open(struct world *w)
{
    struct model_context *c = unused(w);
    const int ns = (int)draw(w, N_NS);

    if (c == NULL)
        return;
    *c = (struct model_context){.ns = ns, .refs = 1};
    EXPECT(w, kv_context_open(w->cache, &namespaces[ns], &c->real) == 0, "open");
}

/* What the call on c must return when it needs slots up to `to`; evicts in the model for a grant.
 */
static int expect_hold(struct world *w, struct model_context *c, uint32_t to, bool forked)
{
    const uint32_t k = missing(w, c, to, forked);

    if (!fits(w, c->ns, k)) {
        w->n_full++;
        return KV_ERR_FULL;
    }
    evict_for(w, c->ns, k);
    c->bound = to > c->bound ? to : c->bound;
    return 0;
}

static void op_reserve(struct world *w)
{
    struct model_context *c = any(w);
    const uint32_t to = draw(w, MAX_LEN);
    int want;

    if (c == NULL)
        return;
    want = busy(c) ? KV_ERR_BUSY : expect_hold(w, c, to, false);
    EXPECT(w, kv_context_reserve(c->real, to) == want, "reserve, expected %d", want);
}

static void finish(struct world *w, struct model_context *c)
{
    uint32_t k = c->open.n - c->ids.n;

    if (draw(w, 4) == 0)
        k = draw(w, k + 1);
    if (k == 0)
        EXPECT(w, kv_context_abort(c->real) == 0, "abort");
    else
        EXPECT(w, kv_context_commit(c->real, k) == 0, "commit");
    c->open.n = c->ids.n + k;
    c->ids = c->open;
    c->open.n = 0;
}

static void op_begin(struct world *w)
{
    struct model_context *c = any(w);
    unsigned char *rows;
    struct iovec pieces[2];
    struct ids ids;
    size_t bytes, cut_at;
    uint32_t n;
    int want;

    if (c == NULL || c->ids.n == MAX_LEN)
        return;
    ids = c->ids;
    extend(w, c->ns, &ids, 1 + draw(w, draw(w, 2) ? 40 : 3));
    n = ids.n - c->ids.n;
    want = busy(c) ? KV_ERR_BUSY : expect_hold(w, c, ids.n, false);
    EXPECT(w, kv_context_begin(c->real, ids.at + c->ids.n, n) == want, "begin, expected %d", want);
    if (want < 0)
        return;
    rows = make_rows(&w->set->geometry, &namespaces[c->ns], ids.at, c->ids.n, ids.n);
    bytes = n * kv_position_bytes(&w->set->geometry);
    cut_at = draw(w, (uint32_t)bytes + 1);
    pieces[0] = (struct iovec){.iov_base = rows, .iov_len = cut_at};
    pieces[1] = (struct iovec){.iov_base = rows + cut_at, .iov_len = bytes - cut_at};
    EXPECT(w, kv_context_scatter(c->real, c->ids.n, n, pieces, 2) == 0, "scatter");
    free(rows);
    c->open = ids;
    if (draw(w, 4) > 0)
        finish(w, c);
}

static void op_commit(struct world *w)
{
    struct model_context *c = any(w);

    if (c != NULL && c->open.n > 0)
        finish(w, c);
    else if (c != NULL)
        EXPECT(w, kv_context_commit(c->real, 0) == KV_ERR_INVALID, "commit of nothing");
}

static void op_fork(struct world *w)
{
    struct model_context *c = any(w), *child = unused(w);
    struct kv_context *real = NULL;
    bool tail;
    uint32_t n;
    int want = 0;

    if (c == NULL || child == NULL)
        return;
    n = draw(w, c->ids.n + 1);
    if (draw(w, 3) == 0)
        n = c->ids.n;
    tail = pages_for(w, n) == pages_for(w, c->ids.n);
    if (c->open.n > 0)
        want = KV_ERR_BUSY;
    else if (!c->frozen && c->bound > c->ids.n)
        want = expect_hold(w, c, 0, tail);
    EXPECT(w, kv_context_fork(c->real, n, &real) == want, "fork, expected %d", want);
    if (want < 0)
        return;
    *child = (struct model_context){.real = real, .ns = c->ns, .ids = c->ids, .refs = 1};
    child->ids.n = n;
}

static void op_truncate(struct world *w)
{
    struct model_context *c = any(w);
    const int want = c != NULL && busy(c) ? KV_ERR_BUSY : 0;
    uint32_t n;

    if (c == NULL)
        return;
    n = draw(w, c->ids.n + 1);
    EXPECT(w, kv_context_truncate(c->real, n) == want, "truncate, expected %d", want);
    if (want < 0)
        return;
    c->ids.n = n;
    c->bound = 0;
}

static void op_freeze(struct world *w)
{
    struct model_context *c = any(w);
    const int want = c != NULL && busy(c) ? KV_ERR_BUSY : 0;

    if (c == NULL)
        return;
    EXPECT(w, kv_context_freeze(c->real) == want, "freeze, expected %d", want);
    if (want < 0)
        return;
    c->frozen = true;
    c->bound = 0;
}

static void op_ref(struct world *w)
{
    struct model_context *c = any(w);

    if (c == NULL || !c->frozen)
        return;
    EXPECT(w, kv_context_ref(c->real) == c->real, "ref");
    c->refs++;
}

static void op_close(struct world *w)
{
    struct model_context *c = any(w);

    if (c == NULL)
        return;
    kv_context_close(c->real);
    if (--c->refs == 0)
        forget(c);
}

/* The key that publish enters, and whether logits come along. */
static void expect_publish(struct world *w, struct model_context *c, bool whole, bool logits)
{
    struct ids key = c->ids;

    if (!whole)
        key.n -= key.n % w->set->page_tokens;
    if (key.n > 0)
        admit(w, c->ns, &key, logits && key.n == c->ids.n);
}

static void op_publish(struct world *w)
{
    struct model_context *c = any(w);
    const bool take = draw(w, 2);
    float logits[N_LOGITS];
    int want = 0;

    if (c == NULL || c->ids.n == 0)
        return;
    logits_of(&c->ids, logits);
    if (c->open.n > 0)
        want = KV_ERR_BUSY;
    else
        expect_publish(w, c, c->frozen, take);
    EXPECT(w, kv_context_publish(c->real, take ? logits : NULL, take ? N_LOGITS : 0) == want,
           "publish, expected %d", want);
}

static void op_give_up(struct world *w)
{
    struct model_context *c = any(w);
    const bool take = draw(w, 2);
    float logits[N_LOGITS] = {0};
    int want = 0;

    if (c == NULL)
        return;
    if (c->ids.n > 0)
        logits_of(&c->ids, logits);
    if (c->open.n > 0)
        want = KV_ERR_BUSY;
    else
        expect_publish(w, c, true, take);
    EXPECT(w, kv_context_give_up(c->real, take ? logits : NULL, take ? N_LOGITS : 0) == want,
           "give up, expected %d", want);
    if (want == 0 && --c->refs == 0)
        forget(c);
}

static void op_trim(struct world *w)
{
    const uint32_t n = draw(w, 4);
    uint32_t n_evictable = count_live(w, -1, true), freed;

    for (uint32_t i = 0; i < MAX_PAGES; i++)
        n_evictable -= w->pinned[i];
    freed = n < n_evictable ? n : n_evictable;
    evict(w, -1, freed);
    EXPECT(w, kv_cache_trim(w->cache, n) == freed, "trim %u, expected %u", n, freed);
}

static void op_quota(struct world *w)
{
    const uint32_t which = draw(w, 2);
    const uint32_t n = w->set->n_pages - draw(w, w->set->n_pages / 2);

    w->quota[which] = n;
    EXPECT(w, kv_cache_set_quota(w->cache, which == 0 ? 0 : 5, n) == 0, "quota");
}

/* A context through records into another one, in two frames. */
static void op_copy(struct world *w)
{
    struct model_context *c = any(w), *copy = unused(w);
    struct kv_snapshot_header header = {.geometry = w->set->geometry};
    struct kv_encoder *e;
    struct kv_decoder *d;
    int want;

    if (c == NULL || copy == NULL || c->ids.n == 0)
        return;
    *copy = (struct model_context){.ns = c->ns, .refs = 1};
    EXPECT(w, kv_context_open(w->cache, &namespaces[c->ns], &copy->real) == 0, "open");
    want = expect_hold(w, copy, c->ids.n, false);
    EXPECT(w, kv_context_reserve(copy->real, c->ids.n) == want, "reserve, expected %d", want);
    if (want < 0)
        return;
    header.ns = namespaces[c->ns].digest;
    header.frame_positions = kv_frame_positions(&header.geometry);
    header.n_bound = c->ids.n;
    EXPECT(w, kv_encoder_open(&header, &e, NULL) == 0, "encoder");
    EXPECT(w, kv_decoder_open(&header, &d) == 0, "decoder");
    for (uint32_t part = 0, count; part < 3; part++) {
        const uint32_t pause = part == 0 ? draw(w, c->ids.n + 1) : c->ids.n;
        struct iovec record = {.iov_base = malloc(1 << 16), .iov_len = kv_encoder_header_bytes(e)};
        struct kv_frame frame;
        struct iovec rows;

        if (kv_encoder_next(e) == 0 && kv_decoder_snapshot(d) == NULL) {
            kv_encoder_header(e, record.iov_base);
            EXPECT(w, kv_decoder_header(d, &record, 1, NULL) == 0, "header");
        }
        count = kv_encoder_frame_count(e, pause, true);
        if (count > 0) {
            record.iov_len = kv_encoder_frame_bytes(e, count);
            EXPECT(w, record.iov_len <= 1 << 16, "the test has no room for a frame");
            EXPECT(w, kv_encoder_frame(e, c->real, count, record.iov_base) == 0, "frame out");
            EXPECT(w, kv_decoder_frame(d, &record, 1, &frame, NULL) == 0, "frame in");
            EXPECT(w, kv_pieces(&record, 1, frame.rows_offset, frame.rows_bytes, &rows) == 1,
                   "pieces");
            EXPECT(w, kv_context_begin(copy->real, frame.ids, frame.count) == 0, "begin");
            EXPECT(w, kv_context_scatter(copy->real, frame.first, frame.count, &rows, 1) == 0,
                   "scatter");
            EXPECT(w, kv_context_commit(copy->real, frame.count) == 0, "commit");
        }
        free(record.iov_base);
    }
    kv_encoder_close(e);
    kv_decoder_close(d);
    copy->ids = c->ids;
}

static void step(struct world *w)
{
    static void (*const ops[])(struct world *) = {
        op_match,   op_match,   op_match,   op_match,   op_match,   op_match,    op_match,
        op_match,   op_begin,   op_begin,   op_begin,   op_begin,   op_begin,    op_commit,
        op_commit,  op_fork,    op_fork,    op_open,    op_reserve, op_publish,  op_publish,
        op_give_up, op_give_up, op_give_up, op_give_up, op_close,   op_truncate, op_freeze,
        op_ref,     op_trim,    op_quota,   op_copy,
    };

    note_holders(w);
    if (unused(w) == NULL) { /* keep things moving: nothing matches while every context is taken */
        (draw(w, 3) > 0 ? op_give_up : op_close)(w);
        note_holders(w);
    }
    ops[draw(w, sizeof(ops) / sizeof(ops[0]))](w);
    check_world(w);
}

/* Run and return the CRC over all that was seen. */
static uint32_t run(const struct setting *set, uint64_t seed, uint32_t n_steps, bool arena)
{
    const struct kv_cache_config config = {.geometry = set->geometry,
                                           .page_tokens = set->page_tokens,
                                           .n_pages = set->n_pages,
                                           .arena = arena,
                                           .bookkeeping_bytes = set->bookkeeping};
    struct world *w = calloc(1, sizeof(*w));
    struct kv_stats s;
    uint32_t crc;

    w->set = set;
    w->random = seed;
    w->quota[0] = w->quota[1] = set->n_pages;
    ck_assert_int_eq(kv_cache_open(&config, &w->cache, NULL), 0);
    for (w->step = 0; w->step < n_steps; w->step++)
        step(w);
    for (int i = 0; i < MAX_CTX; i++)
        for (; w->ctx[i].refs > 0; w->ctx[i].refs--)
            kv_context_close(w->ctx[i].real);
    kv_cache_trim(w->cache, UINT32_MAX);
    kv_cache_stats(w->cache, &s);
    EXPECT(w, s.n_free == s.n_pages && s.n_reserved == 0 && s.n_nodes == 0 && s.n_entries == 0,
           "free %u, reserved %u, nodes %u at the end", s.n_free, s.n_reserved, s.n_nodes);
    if (getenv("KV_LOCKSTEP_VERBOSE") != NULL)
        printf("seed %llu: %u hits, %u full, %u victims, %u cut, %u out of bookkeeping\n",
               (unsigned long long)seed, w->n_hits, w->n_full, w->n_evicted, w->n_cut, w->n_bk);
    kv_cache_close(w->cache);
    crc = w->crc;
    free(w);
    return crc;
}

static uint64_t first_seed = 1;
static uint32_t n_seeds = 4, steps = 1000;

START_TEST(the_cache_does_what_the_model_does_and_arena_and_heap_agree)
{
    for (uint64_t seed = first_seed; seed < first_seed + n_seeds; seed++) {
        const uint32_t heap = run(&settings[_i], seed, steps, false);
        const uint32_t arena = run(&settings[_i], seed, steps, true);

        ck_assert_msg(heap == arena, "seed %llu: other bytes with an arena",
                      (unsigned long long)seed);
    }
}
END_TEST

int main(int argc, char **argv)
{
    Suite *s = suite_create("kv_lockstep");
    TCase *tc = tcase_create("lockstep");
    SRunner *sr = srunner_create(s);
    int n_failed;

    if (argc > 1) {
        first_seed = strtoull(argv[1], NULL, 10);
        n_seeds = 1;
    }
    if (argc > 2)
        steps = (uint32_t)strtoul(argv[2], NULL, 10);
    suite_add_tcase(s, tc);
    tcase_set_timeout(tc, 0);
    tcase_add_loop_test(tc, the_cache_does_what_the_model_does_and_arena_and_heap_agree, 0,
                        sizeof(settings) / sizeof(settings[0]));
    srunner_run_all(sr, CK_ENV);
    n_failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return n_failed != 0;
}

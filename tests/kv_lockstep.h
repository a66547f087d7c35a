/* The model that test_kv_lockstep.c holds kvcore against.  It shares nothing with it: a context is
 * a private copy of its ids and of what was written over its rows, the tree a flat list in order of
 * use, the longest prefix is found by scanning, bookkeeping is counted from the sorted keys.
 *
 * Which victims an eviction takes and where the last is cut is worked out from the page lists of
 * contexts and entries as note_holders() found them before a call, by sets and not by counters. */
#ifndef KV_LOCKSTEP_H
#define KV_LOCKSTEP_H

#include "kv_help.h"

#include "kvcore/kv_cache.h"

#include <stdarg.h>
#include <stdio.h>

enum { MAX_LEN = 200, MAX_CTX = 7, MAX_PAGES = 64, MAX_ENTRIES = 64, N_NS = 3, N_LOGITS = 3 };

struct setting {
    struct kv_geometry geometry;
    uint32_t page_tokens;
    uint32_t n_pages;
    uint32_t max_len; /* of a context */
    uint32_t alphabet;
    uint32_t n_shards;
    size_t bookkeeping;
};

static const struct setting settings[] = {
    {{2, 2, 3, KV_F32}, 16, 26, 120, 3, 4, 1 << 20},
    {{1, 1, 5, KV_F32}, 32, 12, 120, 2, 1, 1 << 20},
    {{1, 2, 2, KV_F32}, 64, 9, 200, 2, 2, 1 << 20},
    {{1, 1, 2, KV_F16}, 16, 20, 120, 2, 1, 1 << 20},
    {{1, 2, 5, KV_F16}, 32, 11, 120, 2, 16, 1 << 20},
    {{2, 1, 3, KV_F16}, 64, 10, 200, 2, 4, 1 << 20},
    {{1, 1, 32, KV_Q8}, 16, 24, 120, 3, 1, 1 << 20},
    {{1, 1, 64, KV_Q8}, 32, 14, 150, 2, 2, 1 << 20},
    {{1, 2, 32, KV_Q8}, 64, 11, 200, 2, 1, 1 << 20},
    {{2, 1, 2, KV_F32}, 16, 30, 120, 2, 1, 2600}, /* bookkeeping is what runs out */
    {{1, 1, 2, KV_F16}, 16, 40, 120, 6, 8, 3400},
};

enum { N_SETTINGS = sizeof(settings) / sizeof(settings[0]) };

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
    struct ids open;        /* what is being appended; n 0: nothing */
    uint64_t over[MAX_LEN]; /* what a position's rows were overwritten from; 0: they are its own */
    uint32_t bound;
    uint32_t refs;
    bool frozen;
    bool forked;
    uint32_t pages[MAX_PAGES]; /* as the real one held them before the call */
    uint32_t n_pages;
    uint32_t held;
};

struct model_entry {
    int ns;
    struct ids ids;
    bool logits;
    uint32_t pages[MAX_PAGES]; /* as the real entry held them before the call */
    uint32_t n_pages;
};

/* What a run came to, for its summary. */
struct tally {
    uint32_t n_done, n_skipped, n_full, n_victims, n_cut, n_hits, n_out_of_bookkeeping, n_nomem;
};

struct world {
    const struct setting *set;
    struct kv_cache *cache;
    uint64_t random; /* of the operation */
    uint32_t index;  /* of the operation */
    bool tell;       /* say each operation */
    bool wrong;      /* the model is to be wrong: see op_truncate() */
    struct model_context ctx[MAX_CTX];
    struct model_entry entries[MAX_ENTRIES]; /* oldest first */
    uint32_t n_entries;
    uint32_t quota[2]; /* of groups 0 and 5 */
    bool pinned[MAX_PAGES];
    uint32_t crc; /* of everything seen, to compare two runs */
    struct tally tally;
};

/* Pages that stand on the heap, as the allocator counts them. */
static uint32_t n_heap_pages;

/* Say what differs and end the process: each sequence runs in one of its own. */
static void differs(const struct world *w, const char *fmt, ...)
    __attribute__((format(printf, 2, 3), noreturn));

#define EXPECT(w, cond, ...)         \
    do {                             \
        if (!(cond))                 \
            differs(w, __VA_ARGS__); \
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
    return (uint32_t)(page - w->cache->slots.pages);
}

/* The entry used last, of all shards; NULL: there is none. */
static inline const struct kv_entry *youngest(const struct world *w)
{
    const struct kv_entry *best = NULL;

    for (uint32_t i = 0; i < w->cache->n_shards; i++) {
        const struct kv_entry *e = TAILQ_LAST(&w->cache->shards[i].tree.by_use, kv_entry_list);

        best = best == NULL || (e != NULL && e->serial > best->serial) ? e : best;
    }
    return best;
}

/* The entry used next after prev, of all shards; NULL: the oldest, or none. */
static const struct kv_entry *next_used(const struct world *w, const struct kv_entry *prev)
{
    const struct kv_entry *e, *best = NULL;

    for (uint32_t i = 0; i < w->cache->n_shards; i++)
        TAILQ_FOREACH(e, &w->cache->shards[i].tree.by_use, by_use)
    if ((prev == NULL || e->serial > prev->serial) && (best == NULL || e->serial < best->serial))
        best = e;
    return best;
}

static void note_holders(struct world *w)
{
    const struct kv_entry *e;
    uint32_t n = 0;

    memset(w->pinned, 0, sizeof(w->pinned));
    for (int i = 0; i < MAX_CTX; i++) {
        struct model_context *c = &w->ctx[i];

        c->n_pages = c->real != NULL ? c->real->n_pages : 0;
        c->held = c->real != NULL ? c->real->held : 0;
        for (uint32_t j = 0; j < c->n_pages; j++) {
            c->pages[j] = page_id(w, c->real->pages[j]);
            w->pinned[c->pages[j]] = true;
        }
    }
    for (e = next_used(w, NULL); e != NULL; e = next_used(w, e)) {
        struct model_entry *m = &w->entries[n];

        EXPECT(w, n++ < w->n_entries, "%u entries expected, there are more", w->n_entries);
        EXPECT(w, m->n_pages == 0 || m->n_pages == e->n_pages, "an entry has %u pages, expected %u",
               e->n_pages, m->n_pages);
        for (uint32_t i = 0; i < m->n_pages; i++)
            EXPECT(w, m->pages[i] == page_id(w, e->pages[i]), "an entry has another page %u", i);
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
            for (uint32_t j = 0; j < c->n_pages; j++)
                live[c->pages[j]] = true;
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
            n += w->ctx[i].held;
    return n;
}

static uint32_t count_holders(const struct world *w, uint32_t page)
{
    uint32_t n = 0;

    for (int i = 0; i < MAX_CTX; i++)
        for (uint32_t j = 0; j < w->ctx[i].n_pages; j++)
            n += w->ctx[i].pages[j] == page;
    for (uint32_t i = 0; i < w->n_entries; i++)
        for (uint32_t j = 0; j < w->entries[i].n_pages; j++)
            n += w->entries[i].pages[j] == page;
    return n;
}

static bool tail_shared(const struct world *w, const struct model_context *c, bool forked)
{
    const uint32_t tail = c->ids.n / w->set->page_tokens;

    return c->ids.n % w->set->page_tokens != 0 && count_holders(w, c->pages[tail]) + forked > 1;
}

/* Slots that growing to `to` positions takes. */
static uint32_t needed(const struct world *w, const struct model_context *c, uint32_t to,
                       bool forked)
{
    if (to <= c->ids.n)
        return 0;
    return pages_for(w, to) - pages_for(w, c->ids.n) + tail_shared(w, c, forked);
}

/* Slots that a grant up to `to` takes beyond those held. */
static uint32_t missing(const struct world *w, const struct model_context *c, uint32_t to,
                        bool forked)
{
    const uint32_t need = needed(w, c, to > c->bound ? to : c->bound, forked);

    return need > c->held ? need - c->held : 0;
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

/* In how many shards keys of a namespace are: each has a root of it. */
static uint32_t count_roots(const struct world *w, int ns, const struct ids *const *keys,
                            uint32_t n)
{
    const struct kv_shard *seen[MAX_ENTRIES];
    uint32_t n_seen = 0;

    for (uint32_t i = 0; i < n; i++) {
        uint32_t j = 0;

        seen[n_seen] = kv_shard_of(w->cache, &namespaces[ns], keys[i]->at[0]);
        while (seen[j] != seen[n_seen])
            j++;
        n_seen += j == n_seen;
    }
    return n_seen;
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
        bytes += count_roots(w, ns, keys, n) * kv_tree_root_bytes();
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
        w->tally.n_out_of_bookkeeping++;
    }
    return true;
}

static size_t alone(const struct world *w, uint32_t n, uint32_t n_logits)
{
    return kv_tree_root_bytes() + kv_tree_node_bytes(n) +
           kv_tree_entry_bytes(pages_for(w, n), n_logits);
}

/* nomem: an allocation failed on the way.  For a new key room was made before it, and stays made.
 * True: there is a new entry, the youngest. */
static bool admit(struct world *w, int ns, const struct ids *key, bool logits, bool nomem)
{
    int at = -1, none = -1;
    uint32_t n;

    for (uint32_t i = 0; i < w->n_entries; i++)
        if (w->entries[i].ns == ns && compare(&w->entries[i].ids, key) == 0)
            at = (int)i;
    if (at >= 0 && nomem) {
        EXPECT(w, logits && !w->entries[at].logits, "nothing to allocate for an equal key");
        return false;
    }
    if (at >= 0) {
        entry_refresh(w, (uint32_t)at);
        at = (int)w->n_entries - 1;
        if (logits && !w->entries[at].logits &&
            make_room(w, kv_tree_entry_bytes(0, N_LOGITS) - kv_tree_entry_bytes(0, 0),
                      alone(w, key->n, 0), &at))
            w->entries[at].logits = true;
        return false;
    }
    n = look_up(w, ns, key, &at);
    if (!logits && n == key->n) {
        EXPECT(w, !nomem, "nothing to allocate for a key that is covered");
        entry_refresh(w, (uint32_t)at);
        return false;
    }
    if (!make_room(w, alone(w, key->n, logits ? N_LOGITS : 0) + kv_tree_node_bytes(0), 0, &none) ||
        nomem)
        return false;
    for (uint32_t i = w->n_entries; i-- > 0;) {
        const struct model_entry *e = &w->entries[i];

        if (e->ns == ns && !e->logits && common(&e->ids, key) == e->ids.n)
            entry_remove(w, i);
    }
    EXPECT(w, w->n_entries < MAX_ENTRIES, "the test has no room for more entries");
    w->entries[w->n_entries++] = (struct model_entry){.ns = ns, .ids = *key, .logits = logits};
    return true;
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
    w->tally.n_cut++;
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
        w->tally.n_victims++;
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

/* The real thing's ids and rows are the model's; over: NULL, or what rows were overwritten from. */
static bool reads_back(const struct world *w, const struct kv_context *real, int ns,
                       const struct ids *ids, const uint64_t *over)
{
    const struct kv_geometry *g = &w->set->geometry;
    const size_t bytes = kv_position_bytes(g);
    unsigned char *want = make_rows(g, &namespaces[ns], ids->at, 0, ids->n);
    unsigned char *got = malloc(ids->n * bytes + 1);
    uint32_t got_ids[MAX_LEN];
    bool same = kv_context_length(real) == ids->n;

    for (uint32_t p = 0; over != NULL && p < ids->n; p++)
        if (over[p] != 0)
            row_bytes(over[p], want + p * bytes, bytes);
    same = same && kv_context_ids(real, 0, ids->n, got_ids) == 0 &&
           memcmp(got_ids, ids->at, ids->n * sizeof(*got_ids)) == 0;
    same = same && kv_context_gather(real, 0, ids->n, got) == 0 &&
           memcmp(got, want, ids->n * bytes) == 0;
    free(want);
    free(got);
    return same;
}

/* Entries are what they were entered as, whatever became of the context since. */
static void check_entries(struct world *w)
{
    const struct kv_entry *e;
    struct kv_stats s;
    uint32_t n = 0;

    for (e = next_used(w, NULL); e != NULL; e = next_used(w, e)) {
        const struct model_entry *m = &w->entries[n];
        const struct kv_context view = {
            .cache = w->cache, .pages = e->pages, .n_pages = e->n_pages, .n = e->n};
        float logits[N_LOGITS];

        EXPECT(w, n < w->n_entries, "%u entries expected, there are more", w->n_entries);
        EXPECT(w, e->n == m->ids.n, "entry %u has %u positions, expected %u", n, e->n, m->ids.n);
        EXPECT(w, memcmp(&e->root->ns, &namespaces[m->ns].digest, sizeof(e->root->ns)) == 0,
               "entry %u is of another namespace", n);
        EXPECT(w, (e->logits != NULL) == m->logits, "entry %u: logits expected %d", n, m->logits);
        logits_of(&m->ids, logits);
        EXPECT(w, !m->logits || memcmp(e->logits, logits, sizeof(logits)) == 0,
               "entry %u has other logits", n);
        EXPECT(w, reads_back(w, &view, m->ns, &m->ids, NULL),
               "entry %u has other ids or rows than what was published", n);
        n++;
    }
    EXPECT(w, n == w->n_entries, "%u entries, expected %u", n, w->n_entries);
    kv_cache_stats(w->cache, &s);
    EXPECT(w, bookkeeping(w) == s.bookkeeping_bytes, "bookkeeping is %zu, expected %zu",
           s.bookkeeping_bytes, bookkeeping(w));
}

static void check_contexts(struct world *w)
{
    for (int i = 0; i < MAX_CTX; i++) {
        struct model_context *c = &w->ctx[i];

        if (c->real == NULL)
            continue;
        EXPECT(w, reads_back(w, c->real, c->ns, &c->ids, c->over),
               "context %d does not read back its %u positions", i, c->ids.n);
        EXPECT(w, c->open.n > 0 || missing(w, c, 0, false) == 0,
               "context %d was promised %u positions, and has %u slots for them", i, c->bound,
               c->held);
    }
}

static const struct kv_page *page_at(const struct world *w, uint32_t i)
{
    return &w->cache->slots.pages[i];
}

/* Where a page's bytes must stand: its place in the arena, or on the heap while it is live. */
static bool is_in_place(const struct world *w, uint32_t i, bool live)
{
    const struct kv_slots *slots = &w->cache->slots;

    return slots->arena != NULL ? page_at(w, i)->bytes == slots->arena + i * slots->page_bytes
                                : (page_at(w, i)->bytes != NULL) == live;
}

/* Each page has as many references as lists have it; what nobody holds is free. */
static void check_pages(const struct world *w, const struct kv_stats *s)
{
    uint32_t n_live = 0, n_evictable = 0;

    for (uint32_t i = 0; i < w->set->n_pages; i++) {
        const uint32_t n = count_holders(w, i);
        uint32_t n_tree = n;

        for (int c = 0; c < MAX_CTX; c++)
            for (uint32_t j = 0; j < w->ctx[c].n_pages; j++)
                n_tree -= w->ctx[c].pages[j] == i;
        EXPECT(w, kv_page_refs(page_at(w, i)) == n && kv_page_tree_refs(page_at(w, i)) == n_tree,
               "page %u counts %u references and %u of the tree, expected %u and %u", i,
               kv_page_refs(page_at(w, i)), kv_page_tree_refs(page_at(w, i)), n, n_tree);
        EXPECT(w, is_in_place(w, i, n > 0), "page %u, %u holders: bytes out of place", i, n);
        n_live += n > 0;
        n_evictable += n > 0 && n == n_tree;
    }
    EXPECT(w, s->n_live == n_live && s->n_free == w->set->n_pages - n_live,
           "live %u, free %u, expected %u live", s->n_live, s->n_free, n_live);
    EXPECT(w, s->n_evictable == n_evictable, "evictable %u, expected %u", s->n_evictable,
           n_evictable);
    EXPECT(w, s->n_reserved == count_reserved(w, -1), "reserved %u, expected %u", s->n_reserved,
           count_reserved(w, -1));
    EXPECT(w, w->cache->slots.arena != NULL || n_heap_pages == n_live,
           "%u pages on the heap, expected %u", n_heap_pages, n_live);
}

/* Notes the holders on the way. */
static void check_world(struct world *w)
{
    struct kv_stats s;
    struct kv_why why;

    EXPECT(w, kv_cache_check(w->cache, &why) == 0, "%s", why.text);
    check_entries(w);
    note_holders(w);
    check_contexts(w);
    kv_cache_stats(w->cache, &s);
    check_pages(w, &s);
}

/* All bytes of all pages that can be reached, and all counters. */
static void fold_world(struct world *w)
{
    struct kv_stats s;

    for (uint32_t i = 0; i < w->set->n_pages; i++)
        if (kv_page_refs(page_at(w, i)) > 0)
            w->crc = kv_crc32c(w->crc, page_at(w, i)->bytes, w->cache->layout.page_bytes);
    kv_cache_stats(w->cache, &s);
    w->crc = kv_crc32c(w->crc, &s, sizeof(s));
}

#endif

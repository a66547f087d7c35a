/* kvcore in lockstep with a model that shares nothing (kv_lockstep.h).
 *
 * Method: a seed gives a list of operations, as data.  They go to a real cache and to the model,
 * which predicts the entry set, its order, the length and the entry of each match, each grant and
 * each refusal.  After each the audit runs, every page is counted, entries are compared, and every
 * context and entry must read back its ids and their rows.  In some operations the n-th allocation
 * fails: the call must say so, everything must be as the model has it without that call, and the
 * same call again must do what it should have done.
 *
 * The same list is run on an arena and on the heap: all bytes of all pages must be the same.
 *
 * An operation draws its operands from a seed of its own and from what is there, and is passed over
 * where there is nothing for it, so any part of a list can be run.  Each run is a process.  When
 * one fails, operations are taken out of its list for as long as what is left fails too, and what
 * is left is printed.
 *
 *   test_kv_lockstep [SEED [STEPS [wrong]]]
 *
 * runs one list in each configuration and says what it came to.  With `wrong` the model has a fault
 * (op_truncate), to see what a failure looks like. */
#include "kv_lockstep.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* ---- Allocations that fail ---- */

/* Pages come after whatever a call evicts, everything else before, so the two are counted apart;
 * and with an arena there are none of the former.  What kvcore can do without (an edge that is
 * moved) does not fail here: test_kv_nomem.c has that. */
static struct {
    uint32_t countdown; /* to the allocation that fails; 0: none does */
    bool of_pages;
    bool armed; /* within a call of kvcore */
    bool fired;
    const void *pages[MAX_PAGES];
} fault;

static bool fails(bool page)
{
    const bool now =
        fault.armed && fault.countdown > 0 && page == fault.of_pages && --fault.countdown == 0;

    fault.fired = fault.fired || now;
    return now;
}

void *__real_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__real_calloc(size_t n, size_t bytes);
void *__wrap_calloc(size_t n, size_t bytes);
void *__real_aligned_alloc(size_t align, size_t bytes);
void *__wrap_aligned_alloc(size_t align, size_t bytes);
void __real_free(void *p);
void __wrap_free(void *p);

void *__wrap_malloc(size_t bytes)
{
    return fails(false) ? NULL : __real_malloc(bytes);
}

void *__wrap_calloc(size_t n, size_t bytes)
{
    return fails(false) ? NULL : __real_calloc(n, bytes);
}

void *__wrap_aligned_alloc(size_t align, size_t bytes)
{
    void *page = fails(true) ? NULL : __real_aligned_alloc(align, bytes);

    for (int i = 0; i < MAX_PAGES && page != NULL; i++)
        if (fault.pages[i] == NULL) {
            fault.pages[i] = page;
            n_heap_pages++;
            break;
        }
    return page;
}

void __wrap_free(void *p)
{
    for (int i = 0; i < MAX_PAGES && p != NULL && n_heap_pages > 0; i++)
        if (fault.pages[i] == p) {
            fault.pages[i] = NULL;
            n_heap_pages--;
        }
    __real_free(p);
}

/* The clock runs by a step a reading, and from time to time stands still: stamps of use are read
 * first and counted later in each run. */
static uint64_t n_readings;

int __wrap_clock_gettime(clockid_t id, struct timespec *out);

int __wrap_clock_gettime(clockid_t id, struct timespec *out)
{
    enum { RUNS = 400, STANDS = 50 };
    const uint64_t n = n_readings++;

    (void)id;
    out->tv_sec = (time_t)(n / (RUNS + STANDS));
    out->tv_nsec = (long)(n % (RUNS + STANDS) < RUNS ? n % (RUNS + STANDS) : RUNS);
    return 0;
}

/* Run a call of kvcore whose allocations may fail. */
#define CALL(call) (fault.armed = true, call_rc = (call), fault.armed = false, call_rc)
static int call_rc;

/* Did the allocation fail?  Then the call must have said so, and nobody else may. */
static bool out_of_memory(struct world *w, int rc)
{
    EXPECT(w, (rc == KV_ERR_NOMEM) == fault.fired, "%d from a call in which %s allocation failed",
           rc, fault.fired ? "an" : "no");
    w->tally.n_nomem += fault.fired;
    return fault.fired;
}

/* Out of memory, and the model has what little the call may have done: all must be so. */
static void check_failed(struct world *w)
{
    fault.fired = false;
    check_world(w);
}

/* For a call that does nothing if it fails: was it so, and is it to be called again? */
static bool again(struct world *w, int rc)
{
    if (!out_of_memory(w, rc))
        return false;
    check_failed(w);
    return true;
}

/* ---- Operations: false where there is nothing for it to work on ---- */

static void say(const struct world *w, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

static void say(const struct world *w, const char *fmt, ...)
{
    va_list ap;

    if (!w->tell)
        return;
    fprintf(stderr, "  %5u  ", w->index);
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    if (fault.countdown > 0)
        fprintf(stderr, ", failing allocation %u%s", fault.countdown,
                fault.of_pages ? " of pages" : "");
    fputc('\n', stderr);
}

static struct model_context *any(struct world *w)
{
    struct model_context *c = &w->ctx[draw(w, MAX_CTX)];

    return c->real != NULL ? c : NULL;
}

static int number(const struct world *w, const struct model_context *c)
{
    return (int)(c - w->ctx);
}

static bool busy(const struct model_context *c)
{
    return c->open.n > 0 || c->frozen;
}

/* Positions before the first that was overwritten. */
static uint32_t settled(const struct model_context *c)
{
    uint32_t n = 0;

    while (n < c->ids.n && c->over[n] == 0)
        n++;
    return n;
}

/* Ids after what is there: random, or what an entry of the namespace has, so that paths meet. */
static void extend(struct world *w, int ns, struct ids *ids, uint32_t n)
{
    const struct model_entry *e =
        w->n_entries > 0 && draw(w, 4) > 0 ? &w->entries[draw(w, w->n_entries)] : NULL;
    uint32_t like = e != NULL && e->ns == ns ? e->ids.n : 0;

    if (like > 0 && draw(w, 3) == 0)
        like = draw(w, like) + 1;
    while (n-- > 0 && ids->n < w->set->max_len) {
        ids->at[ids->n] = ids->n < like ? e->ids.at[ids->n] : 1 + draw(w, w->set->alphabet);
        ids->n++;
    }
}

static void forget(struct model_context *c)
{
    memset(c, 0, sizeof(*c));
}

/* A new entry is the context as it is: its pages, and not others' of the same ids. */
static void check_entered(const struct world *w, const struct model_context *c, uint32_t n)
{
    const struct kv_entry *e = youngest(w);

    EXPECT(w, e != NULL && e->n == n && e->n_pages == pages_for(w, n),
           "the youngest entry is not the one of %u positions that was published", n);
    for (uint32_t i = 0; i < e->n_pages; i++)
        EXPECT(w, page_id(w, e->pages[i]) == c->pages[i], "page %u of the entry is another's", i);
}

/* The key that publish enters, and whether logits come along. */
static void expect_publish(struct world *w, struct model_context *c, bool whole, bool logits,
                           bool nomem)
{
    struct ids key = c->ids;

    key.n = settled(c);
    if (!whole)
        key.n -= key.n % w->set->page_tokens;
    EXPECT(w, key.n > 0 || !nomem, "nothing to allocate for an empty key");
    if (key.n > 0 && admit(w, c->ns, &key, logits && key.n == c->ids.n, nomem))
        check_entered(w, c, key.n);
}

/* It closes the context whether or not there was memory for an entry. */
static void give_up(struct world *w, struct model_context *c, bool take)
{
    const int want = c->open.n > 0 ? KV_ERR_BUSY : 0;
    float logits[N_LOGITS] = {0};
    bool nomem;
    int rc;

    if (c->ids.n > 0)
        logits_of(&c->ids, logits);
    rc = CALL(kv_context_give_up(c->real, take ? logits : NULL, take ? N_LOGITS : 0));
    nomem = out_of_memory(w, rc);
    fault.fired = false;
    EXPECT(w, nomem || rc == want, "give up: %d, expected %d", rc, want);
    if (rc == KV_ERR_BUSY)
        return;
    expect_publish(w, c, true, take, nomem);
    if (--c->refs == 0)
        forget(c);
}

static void close_context(struct world *w, struct model_context *c)
{
    fault.armed = true;
    kv_context_close(c->real);
    fault.armed = false;
    EXPECT(w, !fault.fired, "close needs memory");
    if (--c->refs == 0)
        forget(c);
}

/* An unused place for a new context, always the same one for an operation, so that it does not
 * depend on others that are left out: who is there goes, mostly into the tree.  NULL: it is where
 * `source` is. */
static struct model_context *place(struct world *w, const struct model_context *source)
{
    struct model_context *c = &w->ctx[draw(w, MAX_CTX)];
    const bool keep = draw(w, 3) > 0;
    const uint32_t countdown = fault.countdown;

    if (c == source)
        return NULL;
    fault.countdown = 0; /* meant for what comes now */
    while (c->real != NULL) {
        say(w, "  first %s %d, %u positions", keep ? "give up" : "close", number(w, c), c->ids.n);
        if (keep && c->open.n == 0)
            give_up(w, c, false);
        else
            close_context(w, c);
    }
    note_holders(w);
    fault.countdown = countdown;
    return c;
}

/* What a match is to give: n positions of entry e, the logits, and `need` slots. */
struct expected {
    bool granted, logits;
    uint32_t n, need;
    int e;
};

/* Pins what is found, in the model too, as long as the answer is granted. */
static struct expected expect_match(struct world *w, int ns, const struct ids *ids, uint32_t to,
                                    bool take)
{
    struct expected x = {.granted = false};

    x.n = look_up(w, ns, ids, &x.e);
    if (x.n == ids->n && take && w->entries[x.e].ids.n == x.n && w->entries[x.e].logits)
        x.logits = true;
    else if (x.n == ids->n)
        x.n--;
    for (int attempt = 0; attempt < 2; attempt++) {
        const uint32_t k = pages_for(w, x.n);
        const int group = (int)namespaces[ns].group;
        uint32_t held = count_live(w, group, false) + count_reserved(w, group);
        bool pinned[MAX_PAGES];

        memcpy(pinned, w->pinned, sizeof(pinned));
        /* A slot for each page up to `to`, and one for the clone of a tail that the entry shares.
         */
        x.need = to > x.n ? pages_for(w, to) - k + (x.n % w->set->page_tokens != 0) : 0;
        for (uint32_t i = 0; i < k; i++) { /* these pins count against the quota too */
            held += !w->pinned[w->entries[x.e].pages[i]];
            w->pinned[w->entries[x.e].pages[i]] = true;
        }
        x.granted = x.need == 0 || (fits(w, ns, x.need) && held + x.need <= w->quota[group != 0]);
        if (x.granted)
            break;
        memcpy(w->pinned, pinned, sizeof(pinned));
        if (x.n % w->set->page_tokens == 0)
            break;
        x.n -= x.n % w->set->page_tokens;
        x.logits = false;
    }
    return x;
}

static bool op_match(struct world *w)
{
    struct model_context *c = place(w, NULL);
    int ns = (int)draw(w, N_NS);
    const bool take = draw(w, 2);
    struct ids ids = {.n = 0};
    float logits[N_LOGITS], want[N_LOGITS];
    struct kv_context *real = NULL;
    struct kv_match match;
    struct expected x;
    uint32_t to;
    int rc;

    if (w->n_entries > 0 && draw(w, 3) == 0) {
        const struct model_entry *exact = &w->entries[draw(w, w->n_entries)];

        ids = exact->ids;
        ns = exact->ns;
    } else {
        extend(w, ns, &ids, 1 + draw(w, draw(w, 2) ? w->set->max_len - 1 : 40));
    }
    to = ids.n + draw(w, 2 * w->set->page_tokens);
    to = to < w->set->max_len ? to : ids.n;
    say(w, "match %u ids in namespace %d for %u positions, logits %d -> %d", ids.n, ns, to, take,
        number(w, c));
    do {
        rc = CALL(kv_cache_match(w->cache, &namespaces[ns], ids.at, ids.n, to, take ? logits : NULL,
                                 take ? N_LOGITS : 0, &real, &match));
    } while (again(w, rc));
    x = expect_match(w, ns, &ids, to, take);
    EXPECT(w, rc == (x.granted ? 0 : KV_ERR_FULL), "match: %d, granted %d", rc, x.granted);
    w->tally.n_full += !x.granted;
    if (!x.granted)
        return true;
    EXPECT(w, match.n_matched == x.n && match.has_logits == x.logits,
           "match: %u, expected %u (%d, %d)", match.n_matched, x.n, match.has_logits, x.logits);
    if (x.logits) {
        logits_of(&ids, want);
        EXPECT(w, memcmp(logits, want, sizeof(want)) == 0, "other logits");
    }
    w->tally.n_hits += x.n > 0;
    if (x.n > 0)
        entry_refresh(w, (uint32_t)x.e);
    evict_for(w, ns, x.need);
    ids.n = x.n;
    *c = (struct model_context){.real = real, .ns = ns, .ids = ids, .bound = to, .refs = 1};
    return true;
}

static bool op_peek(struct world *w)
{
    const int ns = (int)draw(w, N_NS);
    struct ids ids = {.n = 0};
    uint32_t n;
    int e;

    extend(w, ns, &ids, 1 + draw(w, w->set->max_len - 1));
    say(w, "peek at %u ids in namespace %d", ids.n, ns);
    n = look_up(w, ns, &ids, &e);
    n -= n == ids.n;
    EXPECT(w, kv_cache_peek(w->cache, &namespaces[ns], ids.at, ids.n) == n, "peek, expected %u", n);
    return true;
}

static void open_context(struct world *w, struct model_context *c, int ns)
{
    struct kv_context *real = NULL;
    int rc;

    do {
        rc = CALL(kv_context_open(w->cache, &namespaces[ns], &real));
    } while (again(w, rc));
    EXPECT(w, rc == 0, "open: %d", rc);
    *c = (struct model_context){.real = real, .ns = ns, .refs = 1};
}

static bool op_open(struct world *w)
{
    struct model_context *c = place(w, NULL);
    const int ns = (int)draw(w, N_NS);

    say(w, "open in namespace %d -> %d", ns, number(w, c));
    open_context(w, c, ns);
    return true;
}

/* Evict in the model for k slots of the namespace, or say that they cannot be had. */
static int expect_slots(struct world *w, int ns, uint32_t k)
{
    if (!fits(w, ns, k)) {
        w->tally.n_full++;
        return KV_ERR_FULL;
    }
    evict_for(w, ns, k);
    return 0;
}

/* What a call on c must return when it needs slots up to `to`. */
static int expect_hold(struct world *w, struct model_context *c, uint32_t to, bool forked)
{
    const int rc = expect_slots(w, c->ns, missing(w, c, to, forked));

    if (rc == 0)
        c->bound = to > c->bound ? to : c->bound;
    return rc;
}

static int reserve(struct world *w, struct model_context *c, uint32_t to)
{
    const int want = busy(c) ? KV_ERR_BUSY : expect_hold(w, c, to, false);
    const int rc = CALL(kv_context_reserve(c->real, to));

    EXPECT(w, !out_of_memory(w, rc) && rc == want, "reserve: %d, expected %d", rc, want);
    return rc;
}

static bool op_reserve(struct world *w)
{
    struct model_context *c = any(w);
    const uint32_t to = draw(w, w->set->max_len);

    if (c == NULL)
        return false;
    say(w, "reserve %u positions for %d", to, number(w, c));
    reserve(w, c, to);
    return true;
}

static void commit(struct world *w, struct model_context *c, uint32_t k)
{
    const int rc = CALL(k > 0 ? kv_context_commit(c->real, k) : kv_context_abort(c->real));

    EXPECT(w, !out_of_memory(w, rc) && rc == 0, "commit of %u: %d", k, rc);
    c->open.n = c->ids.n + k;
    c->ids = c->open;
    c->open.n = 0;
}

static void finish(struct world *w, struct model_context *c)
{
    uint32_t k = c->open.n - c->ids.n;

    if (draw(w, 4) == 0)
        k = draw(w, k + 1);
    say(w, "  commit %u positions of %d", k, number(w, c));
    commit(w, c, k);
}

/* Begin an append that makes the ids these. */
static int begin(struct world *w, struct model_context *c, const struct ids *ids)
{
    const uint32_t n = ids->n - c->ids.n, bound = c->bound;
    int rc, want;

    while (rc = CALL(kv_context_begin(c->real, ids->at + c->ids.n, n)), out_of_memory(w, rc)) {
        if (fault.of_pages) { /* what was evicted for them has gone */
            EXPECT(w, expect_hold(w, c, ids->n, false) == 0, "pages taken where there are none");
            c->bound = bound;
        }
        check_failed(w);
    }
    want = busy(c) ? KV_ERR_BUSY : expect_hold(w, c, ids->n, false);
    EXPECT(w, rc == want, "begin: %d, expected %d", rc, want);
    if (rc == 0)
        c->open = *ids;
    return rc;
}

/* Write the rows [first, first + n) of the open append, in two pieces. */
static void scatter(struct world *w, struct model_context *c, uint32_t first, uint32_t n,
                    unsigned char *rows)
{
    const size_t bytes = n * kv_position_bytes(&w->set->geometry);
    const size_t at = draw(w, (uint32_t)bytes + 1);
    const struct iovec pieces[2] = {{.iov_base = rows, .iov_len = at},
                                    {.iov_base = rows + at, .iov_len = bytes - at}};

    EXPECT(w, kv_context_scatter(c->real, first, n, pieces, 2) == 0, "scatter");
}

static bool op_begin(struct world *w)
{
    struct model_context *c = any(w);
    unsigned char *rows;
    struct ids ids;

    if (c == NULL || c->ids.n == w->set->max_len)
        return false;
    ids = c->ids;
    extend(w, c->ns, &ids, 1 + draw(w, draw(w, 2) ? 40 : 3));
    say(w, "append to %d, from %u to %u", number(w, c), c->ids.n, ids.n);
    if (begin(w, c, &ids) < 0)
        return true;
    rows = make_rows(&w->set->geometry, &namespaces[c->ns], ids.at, c->ids.n, ids.n);
    scatter(w, c, c->ids.n, ids.n - c->ids.n, rows);
    free(rows);
    if (draw(w, 4) > 0)
        finish(w, c);
    return true;
}

static bool op_commit(struct world *w)
{
    struct model_context *c = any(w);

    if (c == NULL)
        return false;
    if (c->open.n > 0)
        finish(w, c);
    else
        EXPECT(w, kv_context_commit(c->real, 0) == KV_ERR_INVALID, "commit of nothing");
    return true;
}

/* c's first n positions into child. */
static int fork_into(struct world *w, struct model_context *c, uint32_t n,
                     struct model_context *child)
{
    const bool tail = pages_for(w, n) == pages_for(w, c->ids.n);
    struct kv_context *real = NULL;
    int rc, want = 0;

    do {
        rc = CALL(kv_context_fork(c->real, n, &real));
    } while (again(w, rc));
    if (c->open.n > 0)
        want = KV_ERR_BUSY;
    else if (!c->frozen && c->bound > c->ids.n)
        want = expect_hold(w, c, 0, tail);
    EXPECT(w, rc == want, "fork: %d, expected %d", rc, want);
    if (rc < 0)
        return rc;
    *child =
        (struct model_context){.real = real, .ns = c->ns, .ids = c->ids, .refs = 1, .forked = true};
    child->ids.n = n;
    memcpy(child->over, c->over, n * sizeof(*c->over));
    return 0;
}

static bool op_fork(struct world *w)
{
    struct model_context *c = any(w), *child = c != NULL ? place(w, c) : NULL;
    uint32_t n;

    if (child == NULL)
        return false;
    n = draw(w, 3) == 0 ? c->ids.n : draw(w, c->ids.n + 1);
    say(w, "fork %d at %u -> %d", number(w, c), n, number(w, child));
    fork_into(w, c, n, child);
    return true;
}

/* Where the model is to be wrong, it leaves a fork as long as it was. */
static bool op_truncate(struct world *w)
{
    struct model_context *c = any(w);
    const int want = c != NULL && busy(c) ? KV_ERR_BUSY : 0;
    uint32_t n;
    int rc;

    if (c == NULL)
        return false;
    n = draw(w, c->ids.n + 1);
    say(w, "truncate %d from %u to %u", number(w, c), c->ids.n, n);
    rc = CALL(kv_context_truncate(c->real, n));
    EXPECT(w, !out_of_memory(w, rc) && rc == want, "truncate: %d, expected %d", rc, want);
    if (rc < 0 || (w->wrong && c->forked))
        return true;
    c->ids.n = n;
    memset(c->over + n, 0, (MAX_LEN - n) * sizeof(*c->over));
    c->bound = 0;
    return true;
}

static bool op_overwrite(struct world *w)
{
    struct model_context *c = any(w);
    const uint32_t page_tokens = w->set->page_tokens;
    const size_t bytes = kv_position_bytes(&w->set->geometry);
    unsigned char rows[4096];
    uint64_t from;
    uint32_t p, page;
    bool cloned;
    int rc, want = 0;

    if (c == NULL || c->ids.n == 0)
        return false;
    p = draw(w, c->ids.n);
    p = draw(w, 2) ? p : p - p % page_tokens + draw(w, page_tokens);
    p = p < c->ids.n ? p : c->ids.n - 1;
    from = mix(w->random) | 1;
    EXPECT(w, bytes <= sizeof(rows), "the test has no room for a position");
    row_bytes(from, rows, bytes);
    say(w, "overwrite position %u of %d", p, number(w, c));
    page = c->pages[p / page_tokens];
    cloned = count_holders(w, page) > 1;
    while (rc = CALL(kv_context_overwrite(c->real, p, rows)), out_of_memory(w, rc)) {
        EXPECT(w, expect_slots(w, c->ns, 1) == 0, "a page taken where there is none");
        check_failed(w);
    }
    if (busy(c))
        want = KV_ERR_BUSY;
    else if (cloned)
        want = expect_slots(w, c->ns, 1);
    EXPECT(w, rc == want, "overwrite: %d, expected %d", rc, want);
    if (rc < 0)
        return true;
    c->over[p] = from;
    note_holders(w);
    EXPECT(w, !cloned || c->held <= needed(w, c, c->bound, false),
           "%u slots are held for a clone that has been made", c->held);
    return true;
}

static bool op_freeze(struct world *w)
{
    struct model_context *c = any(w);
    const int want = c != NULL && busy(c) ? KV_ERR_BUSY : 0;
    int rc;

    if (c == NULL)
        return false;
    say(w, "freeze %d", number(w, c));
    rc = CALL(kv_context_freeze(c->real));
    EXPECT(w, !out_of_memory(w, rc) && rc == want, "freeze: %d, expected %d", rc, want);
    if (rc < 0)
        return true;
    c->frozen = true;
    c->bound = 0;
    return true;
}

static bool op_ref(struct world *w)
{
    struct model_context *c = any(w);

    if (c == NULL || !c->frozen)
        return false;
    say(w, "reference %d", number(w, c));
    EXPECT(w, kv_context_ref(c->real) == c->real, "ref");
    c->refs++;
    return true;
}

static bool op_close(struct world *w)
{
    struct model_context *c = any(w);

    if (c == NULL)
        return false;
    say(w, "close %d", number(w, c));
    close_context(w, c);
    return true;
}

static bool op_publish(struct world *w)
{
    struct model_context *c = any(w);
    const bool take = draw(w, 2);
    const int want = c != NULL && c->open.n > 0 ? KV_ERR_BUSY : 0;
    float logits[N_LOGITS];
    int rc;

    if (c == NULL || c->ids.n == 0)
        return false;
    logits_of(&c->ids, logits);
    say(w, "publish %d, %u positions, logits %d", number(w, c), c->ids.n, take);
    while (rc = CALL(kv_context_publish(c->real, take ? logits : NULL, take ? N_LOGITS : 0)),
           out_of_memory(w, rc)) {
        expect_publish(w, c, c->frozen, take, true);
        check_failed(w);
    }
    EXPECT(w, rc == want, "publish: %d, expected %d", rc, want);
    if (rc == 0)
        expect_publish(w, c, c->frozen, take, false);
    return true;
}

static bool op_give_up(struct world *w)
{
    struct model_context *c = any(w);
    const bool take = draw(w, 2);

    if (c == NULL)
        return false;
    say(w, "give up %d, %u positions, logits %d", number(w, c), c->ids.n, take);
    give_up(w, c, take);
    return true;
}

static bool op_trim(struct world *w)
{
    const uint32_t n = draw(w, 16) == 0 ? UINT32_MAX : draw(w, 4);
    uint32_t n_evictable = count_live(w, -1, true), freed, got;

    for (uint32_t i = 0; i < MAX_PAGES; i++)
        n_evictable -= w->pinned[i];
    freed = n < n_evictable ? n : n_evictable;
    say(w, "trim %u pages", n);
    evict(w, -1, freed);
    got = (uint32_t)CALL((int)kv_cache_trim(w->cache, n));
    EXPECT(w, !fault.fired, "trim needs memory");
    EXPECT(w, got == freed, "trim %u: %u, expected %u", n, got, freed);
    return true;
}

static bool op_quota(struct world *w)
{
    const uint32_t which = draw(w, 2), all = w->set->n_pages;
    const uint32_t n = all - draw(w, draw(w, 12) == 0 ? all + 1 : all / 3);

    say(w, "quota of group %u: %u pages", namespaces[which == 0 ? 0 : 2].group, n);
    w->quota[which] = n;
    EXPECT(w, kv_cache_set_quota(w->cache, which == 0 ? 0 : 5, n) == 0, "quota");
    return true;
}

/* A new context of c's first `base` positions, with room for n.  False: no room, and it is gone. */
static bool open_copy(struct world *w, struct model_context *c, uint32_t base, uint32_t n,
                      struct model_context *copy)
{
    if (base == 0)
        open_context(w, copy, c->ns);
    else if (fork_into(w, c, base, copy) < 0)
        return false;
    note_holders(w);
    if (reserve(w, copy, n) == 0) {
        note_holders(w);
        return true;
    }
    close_context(w, copy);
    return false;
}

/* Rows out of one context into another, position-major. */
static bool op_gather(struct world *w)
{
    struct model_context *c = any(w), *copy;
    const size_t bytes = kv_position_bytes(&w->set->geometry);
    unsigned char *rows;
    struct ids ids;
    uint32_t first, n;

    if (c == NULL || settled(c) == 0 || c->open.n > 0 || (copy = place(w, c)) == NULL)
        return false;
    ids = c->ids;
    ids.n = settled(c);
    first = draw(w, ids.n);
    n = draw(w, ids.n - first + 1);
    say(w, "gather %u positions of %d from %u on, scatter -> %d", ids.n - first, number(w, c),
        first, number(w, copy));
    if (!open_copy(w, c, first, ids.n, copy) || begin(w, copy, &ids) < 0)
        return true;
    rows = malloc((ids.n - first) * bytes);
    EXPECT(w, kv_context_gather(c->real, first, ids.n - first, rows) == 0, "gather");
    scatter(w, copy, first + n, ids.n - first - n, rows + n * bytes);
    scatter(w, copy, first, n, rows);
    free(rows);
    commit(w, copy, ids.n - first);
    return true;
}

/* A snapshot under way: both ends of it. */
struct passage {
    struct kv_snapshot_header header;
    struct kv_encoder *encoder;
    struct kv_decoder *decoder;
    struct iovec record;
};

static void open_passage(struct world *w, struct passage *p)
{
    int rc;

    do {
        rc = CALL(kv_encoder_open(&p->header, &p->encoder, NULL));
    } while (again(w, rc));
    EXPECT(w, rc == 0, "encoder: %d", rc);
    do {
        rc = CALL(kv_decoder_open(&p->header, &p->decoder));
    } while (again(w, rc));
    EXPECT(w, rc == 0, "decoder: %d", rc);
    p->record.iov_len = kv_encoder_header_bytes(p->encoder);
    p->record.iov_base = malloc(p->record.iov_len);
    kv_encoder_header(p->encoder, p->record.iov_base);
    do {
        rc = CALL(kv_decoder_header(p->decoder, &p->record, 1, NULL));
    } while (again(w, rc));
    EXPECT(w, rc == 0, "header: %d", rc);
    free(p->record.iov_base);
}

/* One frame of c, up to position n, read into copy. */
static void pass_frame(struct world *w, struct passage *p, const struct model_context *c,
                       struct model_context *copy, uint32_t n)
{
    const uint32_t count = kv_encoder_frame_count(p->encoder, n, true);
    struct ids ids = c->ids;
    struct kv_frame frame;
    struct iovec rows;

    if (count == 0)
        return;
    p->record.iov_len = kv_encoder_frame_bytes(p->encoder, count);
    p->record.iov_base = malloc(p->record.iov_len);
    EXPECT(w, kv_encoder_frame(p->encoder, c->real, count, p->record.iov_base) == 0, "frame out");
    EXPECT(w, kv_decoder_frame(p->decoder, &p->record, 1, &frame, NULL) == 0, "frame in");
    EXPECT(w, frame.first == copy->ids.n && frame.count == count, "a frame of %u from %u on",
           frame.count, frame.first);
    EXPECT(w, memcmp(frame.ids, c->ids.at + frame.first, count * sizeof(*frame.ids)) == 0,
           "a frame of other ids");
    EXPECT(w, kv_pieces(&p->record, 1, frame.rows_offset, frame.rows_bytes, &rows) == 1, "pieces");
    ids.n = frame.first + count;
    EXPECT(w, begin(w, copy, &ids) == 0, "no room for a frame that was reserved for");
    EXPECT(w, kv_context_scatter(copy->real, frame.first, count, &rows, 1) == 0, "scatter");
    commit(w, copy, count);
    note_holders(w);
    free(p->record.iov_base);
}

/* The logits of n positions, and the seal. */
static void pass_end(struct world *w, struct passage *p, const struct ids *ids)
{
    float logits[N_LOGITS];
    unsigned char out[512];
    struct iovec record = {.iov_base = out, .iov_len = kv_encoder_section_bytes(sizeof(logits))};
    struct kv_seal sent, seal;
    enum kv_section kind;
    const void *data = NULL;
    size_t len = 0;
    int rc;

    logits_of(ids, logits);
    EXPECT(w, record.iov_len <= sizeof(out) && kv_encoder_seal_bytes() <= sizeof(out), "room");
    EXPECT(w, kv_encoder_section(p->encoder, KV_SECTION_LOGITS, logits, sizeof(logits), out) == 0,
           "section out");
    do {
        rc = CALL(kv_decoder_section(p->decoder, &record, 1, &kind, &data, &len, NULL));
    } while (again(w, rc));
    EXPECT(w,
           rc == 0 && kind == KV_SECTION_LOGITS && len == sizeof(logits) &&
               memcmp(data, logits, len) == 0,
           "section in: %d", rc);
    kv_encoder_seal(p->encoder, out, &sent);
    record.iov_len = kv_encoder_seal_bytes();
    EXPECT(w, kv_decoder_seal(p->decoder, &record, 1, &seal, NULL) == 0, "seal in");
    EXPECT(w, seal.n_positions == ids->n && memcmp(&seal.root, &sent.root, sizeof(seal.root)) == 0,
           "a seal over %u positions, expected %u", seal.n_positions, ids->n);
}

/* A context through a snapshot into another one, all of it or what comes after a fork. */
static bool op_restore(struct world *w)
{
    struct model_context *c = any(w), *copy;
    struct passage p = {.header = {.geometry = w->set->geometry}};
    struct ids ids;

    if (c == NULL || settled(c) == 0 || c->open.n > 0 || (copy = place(w, c)) == NULL)
        return false;
    ids = c->ids;
    ids.n = settled(c);
    p.header.ns = namespaces[c->ns].digest;
    p.header.frame_positions = kv_frame_positions(&p.header.geometry);
    p.header.base = draw(w, 2) ? draw(w, ids.n) : 0;
    p.header.base_ids = ids.at;
    p.header.n_bound = c->ids.n;
    say(w, "snapshot %u positions of %d from %u on, restore -> %d", ids.n - p.header.base,
        number(w, c), p.header.base, number(w, copy));
    if (!open_copy(w, c, p.header.base, ids.n, copy))
        return true;
    open_passage(w, &p);
    if (c->ids.n > ids.n) {
        const uint32_t past = ids.n - p.header.base + 1;
        unsigned char *out = malloc(kv_encoder_frame_bytes(p.encoder, past));

        EXPECT(w, kv_encoder_frame(p.encoder, c->real, past, out) == KV_ERR_INVALID,
               "an overwritten position goes out");
        free(out);
    }
    pass_frame(w, &p, c, copy, p.header.base + draw(w, ids.n - p.header.base + 1));
    while (kv_encoder_next(p.encoder) < ids.n)
        pass_frame(w, &p, c, copy, ids.n);
    pass_end(w, &p, &ids);
    kv_encoder_close(p.encoder);
    kv_decoder_close(p.decoder);
    return true;
}

/* ---- Sequences ---- */

struct op {
    uint32_t index; /* in the list that the seed gives */
    uint32_t kind;
    uint64_t seed;     /* of its operands */
    uint32_t fault_at; /* the allocation that fails, 0: none */
    bool fault_of_pages;
};

/* As often as they are wanted. */
static bool (*const kinds[])(struct world *) = {
    op_match,     op_match,     op_match,   op_match,   op_match,   op_match,    op_match,
    op_match,     op_begin,     op_begin,   op_begin,   op_begin,   op_begin,    op_begin,
    op_commit,    op_commit,    op_fork,    op_fork,    op_fork,    op_open,     op_reserve,
    op_publish,   op_publish,   op_publish, op_publish, op_give_up, op_give_up,  op_give_up,
    op_give_up,   op_close,     op_freeze,  op_ref,     op_trim,    op_truncate, op_truncate,
    op_overwrite, op_overwrite, op_quota,   op_restore, op_restore, op_gather,   op_peek,
};

static void make_ops(uint64_t seed, struct op *ops, uint32_t n)
{
    struct world dice = {.random = seed};

    for (uint32_t i = 0; i < n; i++) {
        ops[i] = (struct op){.index = i, .kind = draw(&dice, sizeof(kinds) / sizeof(kinds[0]))};
        ops[i].seed = mix(dice.random);
        ops[i].fault_at = draw(&dice, 3) == 0 ? 1 + draw(&dice, 5) : 0;
        ops[i].fault_of_pages = draw(&dice, 3) == 0;
    }
}

/* For one that waits for ever, and for one that does not end: no operation takes a second of CPU.
 */
enum { RUN_SECONDS = 120, STEP_CPU_SECONDS = 2 };

static void run_op(struct world *w, const struct op *op)
{
    const struct itimerval limit = {.it_value.tv_sec = STEP_CPU_SECONDS};
    bool done;

    setitimer(ITIMER_VIRTUAL, &limit, NULL);
    w->index = op->index;
    w->random = op->seed;
    fault.countdown = op->fault_at;
    fault.of_pages = op->fault_of_pages;
    done = kinds[op->kind](w);
    fault.countdown = 0;
    w->tally.n_done += done;
    w->tally.n_skipped += !done;
    if (!done)
        return;
    check_world(w);
    fold_world(w);
}

struct job {
    const struct setting *set;
    bool wrong;
};

/* What a run says to the process that waits for it. */
struct outcome {
    struct tally tally;
    uint32_t crc;
    uint32_t index; /* of the operation that it is at */
    char text[256]; /* what differs */
};

static struct outcome *outcome; /* shared with the runs */

static void differs(const struct world *w, const char *fmt, ...)
{
    va_list ap;

    outcome->index = w->index;
    va_start(ap, fmt);
    vsnprintf(outcome->text, sizeof(outcome->text), fmt, ap);
    va_end(ap);
    _exit(1);
}

static void close_world(struct world *w)
{
    struct kv_stats s;

    for (int i = 0; i < MAX_CTX; i++)
        while (w->ctx[i].refs > 0)
            close_context(w, &w->ctx[i]);
    kv_cache_trim(w->cache, UINT32_MAX);
    kv_cache_stats(w->cache, &s);
    EXPECT(w, s.n_free == s.n_pages && s.n_reserved == 0 && s.n_nodes == 0 && s.n_entries == 0,
           "free %u, reserved %u, nodes %u at the end", s.n_free, s.n_reserved, s.n_nodes);
    EXPECT(w, s.bookkeeping_bytes == 0 && s.n_contexts == 0 && n_heap_pages == 0,
           "%zu bytes of bookkeeping, %u contexts, %u pages on the heap at the end",
           s.bookkeeping_bytes, s.n_contexts, n_heap_pages);
    kv_cache_close(w->cache);
}

static void run(const struct job *job, const struct op *ops, uint32_t n, bool arena, bool tell)
{
    const struct setting *set = job->set;
    const struct kv_cache_config config = {.geometry = set->geometry,
                                           .page_tokens = set->page_tokens,
                                           .n_pages = set->n_pages,
                                           .arena = arena,
                                           .bookkeeping_bytes = set->bookkeeping,
                                           .n_shards = set->n_shards};
    struct world *w = calloc(1, sizeof(*w));

    w->set = set;
    w->tell = tell;
    w->wrong = job->wrong;
    w->quota[0] = w->quota[1] = set->n_pages;
    n_readings = 0;
    EXPECT(w, kv_cache_open(&config, &w->cache, NULL) == 0, "no cache");
    memset(fault.pages, 0, sizeof(fault.pages)); /* what it has allocated for itself is no page */
    n_heap_pages = 0;
    for (uint32_t i = 0; i < n; i++) {
        outcome->index = ops[i].index;
        run_op(w, &ops[i]);
    }
    close_world(w);
    outcome->crc = w->crc;
    outcome->tally = w->tally;
    free(w);
}

/* In a process of its own, so that a crash is a result too.  True: it came to its end. */
static bool ran(const struct job *job, const struct op *ops, uint32_t n, bool arena, bool tell)
{
    int status;
    pid_t pid;

    memset(outcome, 0, sizeof(*outcome));
    fflush(NULL);
    pid = fork();
    ck_assert_int_ge(pid, 0);
    if (pid == 0) {
        alarm(RUN_SECONDS);
        if (!tell)
            ck_assert_ptr_nonnull(freopen("/dev/null", "w", stderr));
        run(job, ops, n, arena, tell);
        _exit(0);
    }
    ck_assert_int_eq(waitpid(pid, &status, 0), pid);
    if (status != 0 && outcome->text[0] == '\0')
        snprintf(outcome->text, sizeof(outcome->text), "the process ended with %s %d",
                 WIFSIGNALED(status) ? "signal" : "status",
                 WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
    return status == 0;
}

/* On the heap and in an arena; false where either fails or they differ, *outcome says why. */
static bool holds_up(const struct job *job, const struct op *ops, uint32_t n, bool tell)
{
    uint32_t crc;

    if (!ran(job, ops, n, false, tell))
        return false;
    crc = outcome->crc;
    if (tell)
        fprintf(stderr, "in an arena:\n");
    if (!ran(job, ops, n, true, tell))
        return false;
    if (outcome->crc == crc)
        return true;
    snprintf(outcome->text, sizeof(outcome->text), "other bytes with an arena than on the heap");
    return false;
}

/* ---- Shrinking ---- */

enum { MAX_TRIES = 2000 };

/* Take operations out for as long as what is left fails, in runs of half the list, of a quarter,
 * and at last one by one until none can go.  Returns how many are left. */
static uint32_t shrink(const struct job *job, struct op *ops, uint32_t n)
{
    struct op *rest = malloc(n * sizeof(*ops));
    uint32_t n_tries = 0;
    bool gone = true;

    for (uint32_t width = n / 2 > 0 ? n / 2 : 1; width > 1 || gone;) {
        gone = false;
        for (uint32_t at = 0; at < n && n_tries < MAX_TRIES;) {
            const uint32_t out = width < n - at ? width : n - at;

            memcpy(rest, ops, at * sizeof(*ops));
            memcpy(rest + at, ops + at + out, (n - at - out) * sizeof(*ops));
            n_tries++;
            if (holds_up(job, rest, n - out, false)) {
                at += out;
                continue;
            }
            n -= out;
            memcpy(ops, rest, n * sizeof(*ops));
            gone = true;
        }
        width = width > 1 ? width / 2 : 1;
    }
    free(rest);
    return n;
}

/* What comes after the operation that failed is not needed, if it was not the end that failed. */
static uint32_t cut_after(const struct job *job, const struct op *ops, uint32_t n)
{
    uint32_t k = 0;

    while (k < n && ops[k].index <= outcome->index)
        k++;
    return !holds_up(job, ops, k, false) ? k : n;
}

static const char *describe(const struct setting *set)
{
    static char text[128];

    snprintf(text, sizeof(text),
             "%s, layers %u, heads %u of %u, pages %u of %u, shards %u, bookkeeping %zu",
             kv_precision_name(set->geometry.precision), set->geometry.n_layers,
             set->geometry.n_kv_heads, set->geometry.head_dim, set->n_pages, set->page_tokens,
             set->n_shards, set->bookkeeping);
    return text;
}

static void report(const struct job *job, uint64_t seed, struct op *ops, uint32_t n)
{
    const uint32_t n_all = n;

    fprintf(stderr, "seed %llu, %s, step %u: %s\n", (unsigned long long)seed, describe(job->set),
            outcome->index, outcome->text);
    n = shrink(job, ops, cut_after(job, ops, n));
    fprintf(stderr, "%u of %u operations do it:\n", n, n_all);
    holds_up(job, ops, n, true);
    fprintf(stderr, "  at step %u: %s\n", outcome->index, outcome->text);
}

/* ---- Tests ---- */

static uint64_t first_seed = 1;
static uint32_t n_seeds = LOCKSTEP_SEEDS, n_steps = 1500;
static bool wrong, talkative;

static void summarise(const struct setting *set)
{
    const struct tally *t = &outcome->tally;

    printf("%s: %u operations, %u without operands; %u hits, %u refused, %u victims, %u cut, "
           "%u out of bookkeeping, %u failed allocations: no difference\n",
           describe(set), t->n_done, t->n_skipped, t->n_hits, t->n_full, t->n_victims, t->n_cut,
           t->n_out_of_bookkeeping, t->n_nomem);
}

/* What the runs of a configuration came across, over all seeds. */
static void add_up(struct tally *sum, const struct tally *t)
{
    sum->n_hits += t->n_hits;
    sum->n_full += t->n_full;
    sum->n_victims += t->n_victims;
    sum->n_cut += t->n_cut;
    sum->n_nomem += t->n_nomem;
}

START_TEST(the_cache_does_what_the_model_does_and_arena_and_heap_agree)
{
    const struct job job = {.set = &settings[_i], .wrong = wrong};
    struct op *ops = malloc(n_steps * sizeof(*ops));
    struct tally t = {0};

    for (uint64_t seed = first_seed; seed < first_seed + n_seeds; seed++) {
        make_ops(seed, ops, n_steps);
        if (!holds_up(&job, ops, n_steps, false)) {
            report(&job, seed, ops, n_steps);
            ck_abort_msg("seed %llu: step %u: %s", (unsigned long long)seed, outcome->index,
                         outcome->text);
        }
        add_up(&t, &outcome->tally);
    }
    if (talkative)
        summarise(job.set);
    else
        ck_assert_msg(t.n_hits > 0 && t.n_full > 0 && t.n_cut > 0 && t.n_victims > t.n_cut &&
                          t.n_nomem > 0,
                      "runs that meet nothing prove nothing");
    free(ops);
}
END_TEST

/* One configuration of each precision.  It takes a context, an append, a fork, a truncation,
 * or a longer way to the same. */
START_TEST(a_failing_sequence_is_shrunk_until_no_operation_can_go)
{
    const struct job job = {.set = &settings[3 * _i], .wrong = true};
    const struct job right = {.set = &settings[3 * _i]};
    struct op ops[400], rest[400];
    uint32_t n = 400;
    uint64_t seed = 0;

    do {
        make_ops(++seed, ops, n);
        ck_assert_msg(holds_up(&right, ops, n, false), "%s", outcome->text);
        ck_assert_uint_lt(seed, 50);
    } while (holds_up(&job, ops, n, false));
    n = shrink(&job, ops, cut_after(&job, ops, n));
    ck_assert_uint_ge(n, 3);
    ck_assert_uint_le(n, 8);
    ck_assert(!holds_up(&job, ops, n, false));
    ck_assert(kinds[ops[n - 1].kind] == op_truncate);
    ck_assert(holds_up(&right, ops, n, false));
    for (uint32_t i = 0; i < n; i++) {
        memcpy(rest, ops, i * sizeof(*ops));
        memcpy(rest + i, ops + i + 1, (n - i - 1) * sizeof(*ops));
        ck_assert_msg(holds_up(&job, rest, n - 1, false), "operation %u of %u is not needed", i + 1,
                      n);
    }
}
END_TEST

int main(int argc, char **argv)
{
    Suite *s = suite_create("kv_lockstep");
    TCase *tc = tcase_create("lockstep");
    SRunner *sr = srunner_create(s);
    int n_failed;

    outcome =
        mmap(NULL, sizeof(*outcome), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (outcome == MAP_FAILED)
        return 1;
    if (argc > 1) {
        first_seed = strtoull(argv[1], NULL, 10);
        n_seeds = 1;
        talkative = true;
    }
    if (argc > 2)
        n_steps = (uint32_t)strtoul(argv[2], NULL, 10);
    wrong = argc > 3 && strcmp(argv[3], "wrong") == 0;
    suite_add_tcase(s, tc);
    tcase_set_timeout(tc, 0);
    tcase_add_loop_test(tc, the_cache_does_what_the_model_does_and_arena_and_heap_agree, 0,
                        N_SETTINGS);
    if (argc == 1)
        tcase_add_loop_test(tc, a_failing_sequence_is_shrunk_until_no_operation_can_go, 0, 3);
    srunner_run_all(sr, CK_ENV);
    n_failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return n_failed != 0;
}

/* A heap of candidates that is allowed to be out of date: an entry says "the pair that begins at
 * this symbol has this rank", and is checked against the pair that stands there now when it comes
 * up.  Rank and place together are the order of merging, so an old entry that happens to fit the
 * pair of today is as good as the one pushed for it.
 *
 * Heap bound: n - 1 entries at first; each merge takes one away and adds at most two; there are at
 * most n - 1 merges.  So there are never more than 2n. */
#include "model/tok_merge.h"

#include <assert.h>
#include <stdlib.h>

int tok_work_reserve(struct tok_work *w, size_t n_symbols)
{
    size_t cap = w->cap < 64 ? 64 : w->cap;
    struct tok_symbol *symbols;
    uint64_t *heap;

    if (n_symbols <= w->cap)
        return 0;
    while (cap < n_symbols)
        cap *= 2;
    free(w->symbols);
    free(w->heap);
    w->cap = 0;
    w->symbols = symbols = malloc(cap * sizeof *symbols);
    w->heap = heap = malloc(2 * cap * sizeof *heap);
    if (symbols == NULL || heap == NULL)
        return MODEL_ERR_NOMEM;
    w->cap = cap;
    return 0;
}

void tok_work_release(struct tok_work *w)
{
    free(w->symbols);
    free(w->heap);
    *w = (struct tok_work){0};
}

static void heap_push(struct tok_work *w, uint64_t key)
{
    size_t at = w->n_heap++;

    assert(w->n_heap <= 2 * w->cap);
    while (at > 0 && w->heap[(at - 1) / 2] > key) {
        w->heap[at] = w->heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    w->heap[at] = key;
}

static uint64_t heap_pop(struct tok_work *w)
{
    uint64_t top = w->heap[0], last = w->heap[--w->n_heap];
    size_t at = 0, child;

    while ((child = 2 * at + 1) < w->n_heap) {
        if (child + 1 < w->n_heap && w->heap[child + 1] < w->heap[child])
            child++;
        if (w->heap[child] >= last)
            break;
        w->heap[at] = w->heap[child];
        at = child;
    }
    w->heap[at] = last;
    return top;
}

struct merge {
    struct tok_work *work;
    tok_rank_fn *rank;
    const void *vocab;
    const char *text;
};

/* The rank of the pair that begins at a symbol. */
static uint32_t pair_rank(const struct merge *m, uint32_t left, uint32_t *id)
{
    const struct tok_symbol *symbols = m->work->symbols;
    uint32_t right = symbols[left].next;

    if (symbols[left].len == 0 || right == TOK_NO_SYMBOL)
        return TOK_NO_RANK;
    return m->rank(m->vocab, m->text, &symbols[left], &symbols[right], id);
}

static void push_pair(const struct merge *m, uint32_t left)
{
    uint32_t id, rank = pair_rank(m, left, &id);

    if (rank != TOK_NO_RANK)
        heap_push(m->work, (uint64_t)rank << 32 | left);
}

static void join(struct tok_symbol *symbols, uint32_t left, uint32_t id)
{
    struct tok_symbol *l = &symbols[left], *r = &symbols[l->next];

    l->id = id;
    l->len += r->len;
    l->next = r->next;
    if (r->next != TOK_NO_SYMBOL)
        symbols[r->next].prev = left;
    r->len = 0;
}

void tok_merge(struct tok_work *w, size_t n, tok_rank_fn *rank, const void *vocab, const char *text)
{
    const struct merge m = {.work = w, .rank = rank, .vocab = vocab, .text = text};
    uint32_t left, id;
    uint64_t top;

    assert(n >= 1 && n <= w->cap);
    w->n_heap = 0;
    for (left = 0; left + 1 < n; left++)
        push_pair(&m, left);
    while (w->n_heap > 0) {
        top = heap_pop(w);
        left = (uint32_t)top;
        if (pair_rank(&m, left, &id) != top >> 32)
            continue;
        join(w->symbols, left, id);
        push_pair(&m, left);
        if (w->symbols[left].prev != TOK_NO_SYMBOL)
            push_pair(&m, w->symbols[left].prev);
    }
}

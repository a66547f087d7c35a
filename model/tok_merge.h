/* Merging of adjacent symbols, best rank first: what byte-pair encoding and SentencePiece share. */
#ifndef MODEL_TOK_MERGE_H
#define MODEL_TOK_MERGE_H

#include "model/model.h"

enum { TOK_NO_RANK = UINT32_MAX, TOK_NO_SYMBOL = UINT32_MAX };

/* A run of the text's bytes.  Live symbols are a list from symbols[0]. */
struct tok_symbol {
    uint32_t id;      /* token, where the vocabulary works by ids */
    uint32_t at, len; /* bytes of the text; len 0: merged away */
    uint32_t prev, next;
};

/* Scratch of one tokenizer_encode(); zeroed is empty. */
struct tok_work {
    struct tok_symbol *symbols; /* [cap] */
    uint64_t *heap;             /* [2 * cap], rank << 32 | symbol: the least is merged next */
    size_t cap;
    size_t n_heap;
    void *match; /* of the pre-tokenizer */
};

int tok_work_reserve(struct tok_work *w, size_t n_symbols);
void tok_work_release(struct tok_work *w);

/* The rank of merging two neighbours, less is sooner, or TOK_NO_RANK; *id is the token made. */
typedef uint32_t tok_rank_fn(const void *vocab, const char *text, const struct tok_symbol *left,
                             const struct tok_symbol *right, uint32_t *id);

/* Merge symbols[0..n) (n >= 1, linked in order) until no neighbours have a rank.  Of equal ranks
 * the leftmost goes first.  O(n log n). */
void tok_merge(struct tok_work *w, size_t n, tok_rank_fn *rank, const void *vocab,
               const char *text);

#endif

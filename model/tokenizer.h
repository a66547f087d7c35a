/* What the tokenizers share: the vocabulary as read from the file.  Private to model/. */
#ifndef MODEL_TOKENIZER_H
#define MODEL_TOKENIZER_H

#include "model/model.h"
#include "model/tok_merge.h"

/* tokenizer.ggml.token_type */
enum token_type {
    TOKEN_NORMAL = 1,
    TOKEN_UNKNOWN = 2,
    TOKEN_CONTROL = 3,
    TOKEN_USER = 4,
    TOKEN_UNUSED = 5,
    TOKEN_BYTE = 6,
};

enum {
    TOKENIZER_MAX_VOCAB = 4 * 1024 * 1024,
    TOKENIZER_MAX_PIECE = 1024, /* bytes of one token's text */
    TOKENIZER_MAX_ENDS = 32,
};

enum tokenizer_kind { TOKENIZER_BPE, TOKENIZER_SPM };

struct tok_bpe;
struct tok_spm;

struct tokenizer {
    enum tokenizer_kind kind;
    char pre[32];
    uint32_t n_vocab;
    unsigned char *types; /* [n_vocab] enum token_type */
    /* What each token stands for in a text: raw bytes, spaces as spaces. */
    char *bytes;
    uint32_t *offsets; /* [n_vocab + 1] into bytes */
    size_t max_piece;

    uint32_t *specials; /* control and user-defined tokens in the order of their bytes */
    uint32_t n_specials;
    bool special_lead[256]; /* bytes that one of them begins with */

    int64_t bos; /* -1: none */
    bool add_bos;
    bool space_prefix;
    uint32_t ends[TOKENIZER_MAX_ENDS];
    uint32_t n_ends;

    struct tok_bpe *bpe; /* one of the two */
    struct tok_spm *spm;
};

/* The bytes of any token. */
static inline struct gguf_string token_bytes(const struct tokenizer *t, uint32_t id)
{
    return (struct gguf_string){.data = t->bytes + t->offsets[id],
                                .len = t->offsets[id + 1] - t->offsets[id]};
}

/* tokenizer_piece() without the space prefix of SentencePiece.  *first: nothing but special tokens
 * stand directly before; true at the start of a text, kept for the next call. */
struct gguf_string tokenizer_piece_after(const struct tokenizer *t, uint32_t id, bool special,
                                         bool *first);

/* One call's way through the text. */
struct tok_run {
    struct tok_work work;
    struct token_list *out;
    size_t n_dropped;
    struct kv_why *why;
};

/* Byte-level BPE.  `map` holds the file's own token texts and is needed during the call only. */
struct token_map;
int tok_bpe_open(const struct gguf *g, const struct tokenizer *t, const struct token_map *map,
                 struct tok_bpe **out, struct kv_why *why);
void tok_bpe_close(struct tok_bpe *b);
/* Whether this build has a pre-tokenizer of that name. */
bool tok_bpe_knows(struct gguf_string pre);
/* A normal token's text to bytes; dst holds text.len.  Returns the bytes written, or -1. */
int64_t tok_bpe_piece(struct gguf_string text, char *dst);
/* Append the ids of valid UTF-8 without special tokens. */
int tok_bpe_encode(const struct tok_bpe *b, const char *text, size_t len, struct tok_run *run);
void tok_bpe_run_release(struct tok_run *run);

/* SentencePiece. */
int tok_spm_open(const struct gguf *g, const struct tokenizer *t, struct tok_spm **out,
                 struct kv_why *why);
void tok_spm_close(struct tok_spm *s);
int64_t tok_spm_piece(struct gguf_string text, char *dst);
/* The byte that "<0x0A>" stands for, or -1. */
int tok_spm_byte(struct gguf_string text);
/* The text stands at the start or behind a special token: it gets the space prefix. */
int tok_spm_encode(const struct tok_spm *s, const char *text, size_t len, struct tok_run *run);

#endif

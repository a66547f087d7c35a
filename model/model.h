/* model: GGUF files, tokenizers, chat templates, the forward pass over paged KV, and the sampler.
 *
 * From a file to an answer:
 *
 *   gguf_open -> model_open -> engine_open         the weights, repacked for a kernel set
 *        \----> tokenizer_open, chat_open          text to ids
 *   engine_step(contexts, ids) -> logits           rows of any mix of sequences in one step
 *   sampler_draw(logits) -> id -> text_feed(id)    ids to valid UTF-8, stop strings held back
 *
 * Exactness (P1): a row's KV and logits are a function of the model file, the KV precision and the
 * ids up to it alone.  How is written down in kern.h and kern_plain.c; every kernel set gives the
 * same bits.
 *
 * Letters in shapes: T rows (tokens) of a step, C n_embd, H n_heads, G n_kv_heads, D head_dim, F
 * n_ff, V n_vocab.  All files are untrusted: every length and offset is checked before use.
 *
 * Functions that can fail return 0 or a negative enum model_error and fill *why (may be NULL) with
 * the field and the value; out-parameters are written on success only. */
#ifndef MODEL_H
#define MODEL_H

#include "kvcore/kvcore.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum model_error {
    MODEL_OK = 0,
    MODEL_ERR_IO = -101,          /* the file cannot be opened or mapped */
    MODEL_ERR_FORMAT = -102,      /* the file is not what it claims to be */
    MODEL_ERR_UNSUPPORTED = -103, /* well formed, but this build does not do it */
    MODEL_ERR_NOMEM = -104,
    MODEL_ERR_INVALID = -105, /* an argument is out of range */
    MODEL_ERR_NUMERIC = -106, /* a value is not finite, or overflows the KV precision */
    MODEL_ERR_UTF8 = -107,    /* text is not valid UTF-8 */
    MODEL_ERR_KV = -108,      /* kvcore refused; the text says why */
    MODEL_ERR_OPTION = -109,  /* a setting cannot be had; the text names option and value */
};

const char *model_strerror(int rc);

/* ---- GGUF ---- */

enum gguf_type {
    GGUF_F32 = 0,
    GGUF_F16 = 1,
    GGUF_Q4_0 = 2,
    GGUF_Q4_1 = 3,
    GGUF_Q5_0 = 6,
    GGUF_Q5_1 = 7,
    GGUF_Q8_0 = 8,
    GGUF_Q2_K = 10,
    GGUF_Q3_K = 11,
    GGUF_Q4_K = 12,
    GGUF_Q5_K = 13,
    GGUF_Q6_K = 14,
    GGUF_IQ4_NL = 20,
    GGUF_BF16 = 30,
};

/* "Q4_1"; NULL for a type this build does not know the block size of. */
const char *gguf_type_name(uint32_t type);
/* Weights in a block and bytes of a block; false for an unknown type. */
bool gguf_type_block(uint32_t type, uint32_t *n_weights, uint32_t *n_bytes);

enum gguf_value_type {
    GGUF_VALUE_U8 = 0,
    GGUF_VALUE_I8,
    GGUF_VALUE_U16,
    GGUF_VALUE_I16,
    GGUF_VALUE_U32,
    GGUF_VALUE_I32,
    GGUF_VALUE_F32,
    GGUF_VALUE_BOOL,
    GGUF_VALUE_STRING,
    GGUF_VALUE_ARRAY,
    GGUF_VALUE_U64,
    GGUF_VALUE_I64,
    GGUF_VALUE_F64,
};

/* Bytes of the file, not NUL-terminated; valid while the gguf is open. */
struct gguf_string {
    const char *data;
    size_t len;
};

struct gguf_kv {
    struct gguf_string key;
    enum gguf_value_type type;
    enum gguf_value_type item_type; /* of an array */
    uint64_t n_items;               /* of an array */
    const unsigned char *value;     /* first byte of the value, or of the first item; unaligned */
    size_t value_bytes;
};

struct gguf_tensor {
    struct gguf_string name;
    uint32_t n_dims;
    uint64_t dims[4]; /* dims[0] is contiguous; unused ones are 1 */
    uint32_t type;    /* enum gguf_type or another id of the file */
    const unsigned char *data;
    size_t n_bytes;
};

struct gguf; /* an open file, mapped read-only; safe for any thread */

int gguf_open(const char *path, struct gguf **out, struct kv_why *why);
void gguf_close(struct gguf *g);
uint32_t gguf_version(const struct gguf *g);
size_t gguf_file_bytes(const struct gguf *g);
uint64_t gguf_n_kv(const struct gguf *g);
const struct gguf_kv *gguf_kv_at(const struct gguf *g, uint64_t i);
uint64_t gguf_n_tensors(const struct gguf *g);
const struct gguf_tensor *gguf_tensor_at(const struct gguf *g, uint64_t i);
/* NULL where absent. */
const struct gguf_kv *gguf_find(const struct gguf *g, const char *key);
const struct gguf_tensor *gguf_find_tensor(const struct gguf *g, const char *name);

/* Typed reads.  1: absent (*out untouched), 0: read, MODEL_ERR_FORMAT: there, but of another type
 * or out of range, with the key named.  The unsigned one takes any integer type whose value fits.
 */
int gguf_get_u32(const struct gguf *g, const char *key, uint32_t *out, struct kv_why *why);
int gguf_get_f32(const struct gguf *g, const char *key, float *out, struct kv_why *why);
int gguf_get_bool(const struct gguf *g, const char *key, bool *out, struct kv_why *why);
int gguf_get_string(const struct gguf *g, const char *key, struct gguf_string *out,
                    struct kv_why *why);
/* The array under key with items of item_type. */
int gguf_get_array(const struct gguf *g, const char *key, enum gguf_value_type item_type,
                   const struct gguf_kv **out, struct kv_why *why);
/* Item i of a string array of g; empty past its end.  gguf_open() has indexed every string array,
 * so this is O(1).  The numeric ones are 0 past the end or on another item type; i32 also reads
 * u32. */
struct gguf_string gguf_array_string(const struct gguf *g, const struct gguf_kv *array, uint64_t i);
float gguf_array_f32(const struct gguf_kv *array, uint64_t i);
int32_t gguf_array_i32(const struct gguf_kv *array, uint64_t i);

/* The value as one line of printable ASCII: strings quoted and escaped, an array as its item type,
 * count and first items.  At most n - 1 characters and a NUL, cut with "..."; n >= 1.  Returns its
 * length. */
size_t gguf_value_text(const struct gguf_kv *kv, char *buf, size_t n);

/* SHA-256 over the metadata and the tensor data in file order.  Kept in the user's cache folder by
 * (device, inode, size, mtime) so that it is computed once; a cache that cannot be read or written
 * is no error. */
int gguf_fingerprint(const struct gguf *g, struct kv_digest *out, struct kv_why *why);

/* ---- Model ---- */

enum model_rope { MODEL_ROPE_NORM = 0, MODEL_ROPE_NEOX = 1 }; /* adjacent pairs, halves */

struct model_params {
    char arch[32];
    char name[96];
    uint32_t n_layers, n_embd, n_heads, n_kv_heads, head_dim, n_ff, n_vocab;
    uint32_t n_ctx; /* the file's training context: the most positions a context may have */
    uint32_t rope_dims;
    enum model_rope rope;
    float rope_base, rope_scale; /* angle = position * rope_scale / base^(2i / rope_dims) */
    float norm_eps;
    bool tied; /* the output head is token_embd.weight */
    uint64_t n_params;
};

struct model; /* read-only once open; safe for any thread */

/* Names of the kernel sets that this build has and this machine can run, fastest first, NULL last:
 * "avx512", "avx2", "plain". */
const char *const *model_kernel_sets(void);

/* Read the hyper-parameters only; what this build cannot do is MODEL_ERR_UNSUPPORTED by name. */
int model_read_params(const struct gguf *g, struct model_params *out, struct kv_why *why);

/* Bind every tensor and repack the weights for a kernel set (NULL or "auto": the first of
 * model_kernel_sets()).  The gguf must stay open as long as the model. */
int model_open(const struct gguf *g, const char *kernels, struct model **out, struct kv_why *why);
void model_close(struct model *m);
const struct model_params *model_params(const struct model *m);
const char *model_kernels(const struct model *m); /* the set in use */
const struct kv_digest *model_fingerprint(const struct model *m);
/* Digest of a self-test that runs fixed inputs through every kernel in use, the rope table and exp.
 */
const struct kv_digest *model_numerics_id(const struct model *m);
size_t model_weight_bytes(const struct model *m); /* as repacked */
void model_geometry(const struct model *m, enum kv_precision precision, struct kv_geometry *out);

/* ---- Engine ---- */

enum {
    ENGINE_MAX_THREADS = 256,
    ENGINE_MAX_ITEMS = 1024,    /* sequences in one step */
    ENGINE_MAX_ROWS = 16 * 1024 /* rows in one step */
};

struct engine_config {
    const struct model *model;
    struct kv_cache *cache; /* of the model's geometry */
    uint32_t n_threads;     /* compute threads, the caller's included; 0: one a core */
    uint32_t max_rows;      /* rows in one step; scratch is sized by it */
    uint32_t max_items;
};

struct engine;

int engine_open(const struct engine_config *config, struct engine **out, struct kv_why *why);
void engine_close(struct engine *e);
uint32_t engine_n_threads(const struct engine *e);

/* One sequence's part of a step: n_ids tokens are appended to ctx, whose reservation must cover
 * them (begin and commit happen inside). */
struct engine_item {
    struct kv_context *ctx;
    const uint32_t *ids;
    uint32_t n_ids; /* >= 1 */
    float *logits;  /* NULL, or float [V]: of the last token; with all_logits float [n_ids][V] */
    bool all_logits;
    int rc; /* out: 0, or why this sequence failed; its context is then as before the step */
    struct kv_why why;
};

/* Run one step over all items.  Items fail one by one (item->rc); a negative return means that the
 * step did not run at all.  One thread at a time; contexts must differ. */
int engine_step(struct engine *e, struct engine_item *items, uint32_t n_items);

/* A 64-bit hash of one row of logits' bytes (XXH3). */
uint64_t logits_digest(const float *logits, uint32_t n_vocab);

/* ---- Tokenizer ---- */

struct tokenizer; /* read-only once open; safe for any thread */

int tokenizer_open(const struct gguf *g, struct tokenizer **out, struct kv_why *why);
void tokenizer_close(struct tokenizer *t);
uint32_t tokenizer_n_vocab(const struct tokenizer *t);
/* No token stands for more bytes of text than this. */
size_t tokenizer_max_piece(const struct tokenizer *t);
const char *tokenizer_model(const struct tokenizer *t); /* "gpt2", "llama" */
const char *tokenizer_pre(const struct tokenizer *t);   /* "smollm", ...; "" where there is none */

/* A growing list of ids.  Zeroed is empty. */
struct token_list {
    uint32_t *ids;
    size_t n, cap;
};
void token_list_release(struct token_list *l);
int token_list_add(struct token_list *l, uint32_t id);

enum { TOKENIZE_MAX_BYTES = 4 * 1024 * 1024 }; /* of one text; more is MODEL_ERR_INVALID */

enum {
    TOKENIZE_SPECIAL = 1, /* marker strings in the text become control or user-defined tokens; no
                             other way leads to one */
    TOKENIZE_BOS = 2,     /* add the begin token where the file asks for it */
};

/* Append the ids of text.  Bytes that the vocabulary lacks are left out and counted in *n_dropped
 * (may be NULL).  MODEL_ERR_UTF8 names the offset of the first invalid byte; the list is then
 * unchanged. */
int tokenizer_encode(const struct tokenizer *t, const char *text, size_t len, unsigned flags,
                     struct token_list *out, size_t *n_dropped, struct kv_why *why);

/* The bytes of a token (not NUL-terminated; may be a part of a character; empty for control tokens
 * unless `special`).  Valid while the tokenizer is open.  id < tokenizer_n_vocab(). */
struct gguf_string tokenizer_piece(const struct tokenizer *t, uint32_t id, bool special);
/* Append the bytes of ids as tokenizer_encode() would have had them; the space prefix of
 * SentencePiece is taken off again.  The caller frees *out. */
int tokenizer_decode(const struct tokenizer *t, const uint32_t *ids, size_t n, bool special,
                     char **out, size_t *len);
bool tokenizer_is_control(const struct tokenizer *t, uint32_t id);
/* Ends a generation: eos, eot and the well-known end markers that the vocabulary has. */
bool tokenizer_is_end(const struct tokenizer *t, uint32_t id);
/* The id of a control token by its text, or -1. */
int64_t tokenizer_find(const struct tokenizer *t, const char *text);

/* ---- Chat templates ---- */

struct chat_message {
    const char *role; /* "system", "user", "assistant" */
    const char *content;
    size_t content_len;
};

struct chat; /* the template that a file carries; read-only */

/* MODEL_ERR_UNSUPPORTED names a template that is not recognised, MODEL_ERR_FORMAT a file without.
 */
int chat_open(const struct gguf *g, const struct tokenizer *t, struct chat **out,
              struct kv_why *why);
void chat_close(struct chat *c);
const char *chat_name(const struct chat *c); /* "chatml" */

enum {
    CHAT_SPECIAL = 1,  /* markers inside message content become control tokens */
    CHAT_GENERATE = 2, /* end with the opening of an assistant message */
    CHAT_CONTINUE = 4, /* messages follow an assistant turn in `out`: close it first where it is
                          open (no end token yet), and add no default system message.  Only the
                          last id of `out` is looked at; MODEL_ERR_INVALID where there is none */
};

/* Append the ids of a conversation.  Text inside a message never becomes a control token unless
 * CHAT_SPECIAL.  No begin token is added: a template that wants one has it.  MODEL_ERR_INVALID
 * names an unknown role, MODEL_ERR_UTF8 the message and the offset; `out` is then unchanged. */
int chat_encode(const struct chat *c, const struct chat_message *messages, size_t n, unsigned flags,
                struct token_list *out, size_t *n_dropped, struct kv_why *why);
/* The text that the template renders; the caller frees *out.  With CHAT_CONTINUE the text of the
 * messages alone, without what closes the turn before them. */
int chat_render(const struct chat *c, const struct chat_message *messages, size_t n, unsigned flags,
                char **out, size_t *len, struct kv_why *why);

/* ---- Sampler ---- */

struct sampler_params {
    float temperature; /* 0: greedy */
    uint32_t top_k;    /* 0: off */
    float top_p;       /* 1: off */
    float min_p;       /* 0: off */
    uint64_t seed;
    uint32_t branch; /* which of n answers to one prompt */
};

/* Greedy; a caller changes what it wants. */
void sampler_defaults(struct sampler_params *p);
/* MODEL_ERR_INVALID names the field and the value. */
int sampler_check(const struct sampler_params *p, struct kv_why *why);

struct sampler; /* scratch of one thread */
int sampler_open(uint32_t n_vocab, struct sampler **out);
void sampler_close(struct sampler *s);
/* Draw the token for absolute position `position`: top-k, top-p, min-p, temperature, draw, in this
 * order; ties go to the lower id.  Randomness is a function of (seed, branch, position) alone.
 * *logprob (may be NULL): log-probability of the token in the raw logits. */
uint32_t sampler_draw(struct sampler *s, const struct sampler_params *p, const float *logits,
                      uint64_t position, float *logprob);

/* ---- Streaming text ---- */

enum { TEXT_MAX_STOPS = 16, TEXT_MAX_STOP_BYTES = 1024 };

/* Turns tokens into text as they come: only whole UTF-8 characters leave, bytes that cannot become
 * one are U+FFFD, and text that may be the beginning of a stop string is held back. */
struct text_stream;

/* stops are copied.  MODEL_ERR_INVALID: too many, too long, empty or not UTF-8. */
int text_open(const struct tokenizer *t, const char *const *stops, size_t n_stops,
              struct text_stream **out, struct kv_why *why);
void text_close(struct text_stream *s);
/* Say, before the first token is fed, what the last token of the prompt was: behind a control token
 * the space prefix of SentencePiece is taken off.  Without it the text goes on from other text.
 * MODEL_ERR_INVALID: no such token. */
int text_follow(struct text_stream *s, uint32_t id);

struct text_piece {
    const char *data; /* valid until the next call on the stream */
    size_t len;
    uint32_t n_tokens; /* tokens whose text is all out with this piece, counted from the last one;
                          when stopped, those up to n_keep that were not yet counted */
    bool stopped;      /* a stop string was completed; nothing after it comes out */
    uint32_t n_keep;   /* when stopped: tokens of all fed so far that hold visible text (the last
                          visible token, and those before it) */
};

/* Control tokens have no text.  The stop string that is completed first counts, of several
 * completed at once the longest.  After a stop every call gives an empty piece, stopped, with the
 * same n_keep. MODEL_ERR_INVALID: no such token. */
int text_feed(struct text_stream *s, uint32_t id, struct text_piece *out);
/* Nothing more comes: what was held back leaves. */
int text_flush(struct text_stream *s, struct text_piece *out);
/* The stop string that was completed, NUL-terminated, as long as the stream is open; "" while there
 * is none. */
const char *text_stopped_by(const struct text_stream *s);

/* ---- Runtime: a model file opened for serving ---- */

enum {
    RUNTIME_MAX_CHUNK = 512, /* rows of a prompt in one step where the speed decides */
    RUNTIME_STEP_MS = 100,   /* how long such a step may take: work stops within it */
};

struct runtime_config {
    const char *path;
    const char *kernels; /* as model_open() */
    enum kv_precision precision;
    uint32_t page_tokens; /* 0: KV_PAGE_TOKENS_DEFAULT */
    uint32_t n_pages;     /* 0: as many as kv_bytes hold */
    uint64_t kv_bytes;
    uint32_t n_threads;
    uint32_t chunk;       /* rows of a prompt in one step; 0: by measured speed */
    uint32_t max_items;   /* sequences in one step */
    uint32_t max_context; /* 0: the model's */
};

/* Read-only but for the functions below. */
struct runtime {
    struct gguf *gguf;
    struct model *model;
    struct kv_cache *cache;
    struct engine *engine;
    struct kv_geometry geometry;
    uint32_t n_pages;
    uint32_t page_tokens;
    uint32_t n_ctx; /* most positions of a context: model, max_context and all pages allow it */
    uint32_t fixed_chunk;        /* config's; 0: by speed */
    uint32_t overhead_rows;      /* of a prompt that a step's fixed cost is worth */
    _Atomic uint32_t rows_per_s; /* of a prompt, measured, those included */
};

/* Open file, model, cache and engine, and measure the speed of a prompt.  On an error nothing stays
 * open.  A setting that is wrong, or wrong for this model or machine, is MODEL_ERR_OPTION, and *why
 * calls it by the nodes' option. */
int runtime_open(const struct runtime_config *config, struct runtime *out, struct kv_why *why);
/* No context may be open.  A zeroed runtime is fine. */
void runtime_close(struct runtime *r);
/* Rows of a prompt for the next step, so that it takes about budget_ms; the configured chunk where
 * there is one.  At least 1. */
uint32_t runtime_chunk(const struct runtime *r, uint32_t budget_ms);
/* Tell what a step of a prompt took.  By the thread that owns the engine. */
void runtime_took(struct runtime *r, uint32_t n_rows, int64_t ns);

#endif

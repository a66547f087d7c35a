/* Text to token id.  Filled once when a tokenizer is opened, read-only afterwards. */
#ifndef MODEL_TOKEN_MAP_H
#define MODEL_TOKEN_MAP_H

#include "model/model.h"

struct token_map {
    struct token_map_slot *slots; /* open addressing, at most half full */
    uint32_t mask;
};

/* Room for n texts.  0 or MODEL_ERR_NOMEM. */
int token_map_init(struct token_map *m, uint32_t n);
void token_map_release(struct token_map *m);
/* The text is borrowed, not copied.  Returns -1, or the id that has this text already (and nothing
 * changes).  No more than the n of token_map_init() may be put. */
int64_t token_map_put(struct token_map *m, struct gguf_string text, uint32_t id);
/* The id of a text, or -1. */
int64_t token_map_get(const struct token_map *m, const char *text, size_t len);

#endif

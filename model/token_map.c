#include "model/token_map.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

struct token_map_slot {
    const char *text; /* NULL: free */
    uint32_t len;
    uint32_t id;
};

int token_map_init(struct token_map *m, uint32_t n)
{
    size_t n_slots = 16;

    while (n_slots < 2 * (size_t)n)
        n_slots *= 2;
    m->slots = calloc(n_slots, sizeof *m->slots);
    if (m->slots == NULL)
        return MODEL_ERR_NOMEM;
    m->mask = (uint32_t)(n_slots - 1);
    return 0;
}

void token_map_release(struct token_map *m)
{
    free(m->slots);
    *m = (struct token_map){0};
}

/* The slot that holds text, or the free one where it would go. */
static struct token_map_slot *find_slot(const struct token_map *m, const char *text, size_t len)
{
    uint32_t at = (uint32_t)XXH3_64bits(text, len) & m->mask;

    while (m->slots[at].text != NULL &&
           (m->slots[at].len != len || memcmp(m->slots[at].text, text, len) != 0))
        at = (at + 1) & m->mask;
    return &m->slots[at];
}

int64_t token_map_put(struct token_map *m, struct gguf_string text, uint32_t id)
{
    struct token_map_slot *slot = find_slot(m, text.data, text.len);

    if (slot->text != NULL)
        return slot->id;
    *slot = (struct token_map_slot){.text = text.data, .len = (uint32_t)text.len, .id = id};
    return -1;
}

int64_t token_map_get(const struct token_map *m, const char *text, size_t len)
{
    const struct token_map_slot *slot = find_slot(m, text, len);

    return slot->text == NULL ? -1 : (int64_t)slot->id;
}

#include "model/model.h"

#include <stdlib.h>

void token_list_release(struct token_list *l)
{
    free(l->ids);
    *l = (struct token_list){0};
}

int token_list_add(struct token_list *l, uint32_t id)
{
    if (l->n == l->cap) {
        size_t cap = l->cap < 32 ? 64 : l->cap * 2;
        uint32_t *ids = cap > SIZE_MAX / sizeof *ids ? NULL : realloc(l->ids, cap * sizeof *ids);
        if (ids == NULL)
            return MODEL_ERR_NOMEM;
        l->ids = ids;
        l->cap = cap;
    }
    l->ids[l->n++] = id;
    return 0;
}

/* The sets, and which of them this machine can run. */
#include "model/kern_matrix.h"
#include "model/kern_rows.h"

#include <string.h>

#define MATRIX_OF(set)                                                \
    .pack_bytes = kern_##set##_pack_bytes, .pack = kern_##set##_pack, \
    .quantize = kern_##set##_quantize, .gemm = kern_##set##_gemm

const struct kernels kern_plain = {.name = "plain", MATRIX_OF(plain), KERN_ROWS_MEMBERS(plain)};

/* Fastest first. */
static const struct kernels *const sets[] = {
    &kern_plain,
};

static bool can_run(const struct kernels *k)
{
    return k == &kern_plain;
}

const struct kernels *kern_find(const char *name)
{
    const bool any = name == NULL || strcmp(name, "auto") == 0;

    for (size_t i = 0; i < sizeof(sets) / sizeof(sets[0]); i++)
        if ((any || strcmp(name, sets[i]->name) == 0) && can_run(sets[i]))
            return sets[i];
    return NULL;
}

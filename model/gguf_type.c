/* Tensor types: names, block sizes, and the check that what scales a block is finite. */
#include "model/gguf_internal.h"
#include "model/model_internal.h"

#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "GGUF data is used in place, so the machine has to be little-endian"
#endif

struct type_info {
    const char *name; /* NULL: never given out, or taken out of the format again */
    uint16_t n_weights;
    uint16_t n_bytes;
};

/* By id.  Types that no kernel reads are here so that they are refused by their name. */
static const struct type_info types[] = {
    [GGUF_F32] = {"F32", 1, 4},
    [GGUF_F16] = {"F16", 1, 2},
    [GGUF_Q4_0] = {"Q4_0", 32, 18},
    [GGUF_Q4_1] = {"Q4_1", 32, 20},
    [GGUF_Q5_0] = {"Q5_0", 32, 22},
    [GGUF_Q5_1] = {"Q5_1", 32, 24},
    [GGUF_Q8_0] = {"Q8_0", 32, 34},
    [9] = {"Q8_1", 32, 36},
    [GGUF_Q2_K] = {"Q2_K", 256, 84},
    [GGUF_Q3_K] = {"Q3_K", 256, 110},
    [GGUF_Q4_K] = {"Q4_K", 256, 144},
    [GGUF_Q5_K] = {"Q5_K", 256, 176},
    [GGUF_Q6_K] = {"Q6_K", 256, 210},
    [15] = {"Q8_K", 256, 292},
    [16] = {"IQ2_XXS", 256, 66},
    [17] = {"IQ2_XS", 256, 74},
    [18] = {"IQ3_XXS", 256, 98},
    [19] = {"IQ1_S", 256, 50},
    [GGUF_IQ4_NL] = {"IQ4_NL", 32, 18},
    [21] = {"IQ3_S", 256, 110},
    [22] = {"IQ2_S", 256, 82},
    [23] = {"IQ4_XS", 256, 136},
    [24] = {"I8", 1, 1},
    [25] = {"I16", 1, 2},
    [26] = {"I32", 1, 4},
    [27] = {"I64", 1, 8},
    [28] = {"F64", 1, 8},
    [29] = {"IQ1_M", 256, 56},
    [GGUF_BF16] = {"BF16", 1, 2},
    [34] = {"TQ1_0", 256, 54},
    [35] = {"TQ2_0", 256, 66},
    [39] = {"MXFP4", 32, 17},
};

static const struct type_info *type_info(uint32_t type)
{
    if (type >= sizeof(types) / sizeof(types[0]) || types[type].name == NULL)
        return NULL;
    return &types[type];
}

const char *gguf_type_name(uint32_t type)
{
    const struct type_info *info = type_info(type);

    return info ? info->name : NULL;
}

bool gguf_type_block(uint32_t type, uint32_t *n_weights, uint32_t *n_bytes)
{
    const struct type_info *info = type_info(type);

    if (info == NULL)
        return false;
    *n_weights = info->n_weights;
    *n_bytes = info->n_bytes;
    return true;
}

/* Where the exponents stand: a float, scale or minimum is finite unless all bits of its mask are
 * set in the half word that holds its exponent. */
struct exponent {
    uint16_t offset; /* in the block */
    uint16_t mask;   /* 0: none */
};

enum { F16_EXPONENT = 0x7c00, F32_EXPONENT = 0x7f80 /* of the upper half word */ };

static void type_exponents(uint32_t type, struct exponent out[2])
{
    memset(out, 0, 2 * sizeof(*out));
    switch (type) {
    case GGUF_F32:
        out[0] = (struct exponent){2, F32_EXPONENT};
        break;
    case GGUF_BF16:
        out[0] = (struct exponent){0, F32_EXPONENT};
        break;
    case GGUF_Q4_1:
        out[1] = (struct exponent){2, F16_EXPONENT};
        /* fall through */
    case GGUF_F16:
    case GGUF_Q4_0:
    case GGUF_Q8_0:
        out[0] = (struct exponent){0, F16_EXPONENT};
        break;
    default:
        break;
    }
}

static bool all_set(const unsigned char *p, uint16_t mask)
{
    uint16_t v;

    memcpy(&v, p, sizeof(v));
    return (v & mask) == mask;
}

static uint64_t first_all_set(const unsigned char *data, uint64_t n_blocks, size_t stride,
                              struct exponent e)
{
    enum { RUN = 1024 }; /* blocks looked at without a branch */
    uint64_t i, j;

    for (i = 0; i < n_blocks; i = j) {
        uint64_t end = n_blocks - i < RUN ? n_blocks : i + RUN;
        bool any = false;

        for (j = i; j < end; j++)
            any |= all_set(data + j * stride + e.offset, e.mask);
        if (!any)
            continue;
        while (!all_set(data + i * stride + e.offset, e.mask))
            i++;
        return i;
    }
    return n_blocks;
}

uint64_t gguf_type_first_not_finite(uint32_t type, const unsigned char *data, uint64_t n_blocks)
{
    uint64_t first = n_blocks;
    struct exponent e[2];
    size_t i;

    type_exponents(type, e);
    for (i = 0; i < 2 && e[i].mask != 0; i++) {
        uint64_t at = first_all_set(data, n_blocks, types[type].n_bytes, e[i]);

        if (at < first)
            first = at;
    }
    return first;
}

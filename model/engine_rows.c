#include "model/engine_internal.h"
#include "model/kern_matrix.h"

#include <math.h>

static void embed_f32(const unsigned char *p, uint32_t n, float *out)
{
    for (uint32_t i = 0; i < n; i++)
        out[i] = kern_load_f32(p + (size_t)i * 4);
}

static void embed_f16(const unsigned char *p, uint32_t n, float *out)
{
    for (uint32_t i = 0; i < n; i++)
        out[i] = kern_half(kern_load_u16(p + (size_t)i * 2));
}

static void embed_bf16(const unsigned char *p, uint32_t n, float *out)
{
    for (uint32_t i = 0; i < n; i++)
        out[i] = kern_bfloat(kern_load_u16(p + (size_t)i * 2));
}

/* 16 bytes: low nibble of byte i is weight i, high nibble weight i + 16. */
static void nibbles(const unsigned char *p, float d, float m, int offset, float *out)
{
    for (uint32_t i = 0; i < 16; i++) {
        out[i] = d * (float)((p[i] & 15) - offset) + m;
        out[i + 16] = d * (float)((p[i] >> 4) - offset) + m;
    }
}

static void embed_q4_0(const unsigned char *p, uint32_t n, float *out)
{
    for (; n > 0; n -= 32, p += 18, out += 32)
        nibbles(p + 2, kern_half(kern_load_u16(p)), 0.0f, 8, out);
}

static void embed_q4_1(const unsigned char *p, uint32_t n, float *out)
{
    for (; n > 0; n -= 32, p += 20, out += 32)
        nibbles(p + 4, kern_half(kern_load_u16(p)), kern_half(kern_load_u16(p + 2)), 0, out);
}

static void embed_q8_0(const unsigned char *p, uint32_t n, float *out)
{
    for (; n > 0; n -= 32, p += 34, out += 32) {
        const float d = kern_half(kern_load_u16(p));
        const int8_t *q = (const int8_t *)(p + 2);

        for (uint32_t i = 0; i < 32; i++)
            out[i] = d * (float)q[i];
    }
}

typedef void embed_function(const unsigned char *p, uint32_t n, float *out);

static embed_function *embed_of(enum gguf_type type)
{
    switch (type) {
    case GGUF_F32:
        return embed_f32;
    case GGUF_F16:
        return embed_f16;
    case GGUF_BF16:
        return embed_bf16;
    case GGUF_Q4_0:
        return embed_q4_0;
    case GGUF_Q4_1:
        return embed_q4_1;
    case GGUF_Q8_0:
        return embed_q8_0;
    default:
        return NULL;
    }
}

bool engine_embed_has_type(enum gguf_type type)
{
    return embed_of(type) != NULL;
}

void engine_embed(const struct model_table *table, uint32_t row, float *out)
{
    embed_of(table->type)(table->data + (size_t)row * table->row_bytes, table->n_cols, out);
}

void engine_rope_frequencies(const struct model *m, double *freq)
{
    const struct model_params *p = &m->params;

    for (uint32_t i = 0; i < p->rope_dims / 2; i++) {
        freq[i] = (double)p->rope_scale * pow((double)p->rope_base, -2.0 * i / p->rope_dims);
        if (m->rope_factors)
            freq[i] /= (double)m->rope_factors[i];
    }
}

void engine_rope_row(const double *freq, uint32_t n_pairs, uint32_t pos, float *cs)
{
    for (uint32_t i = 0; i < n_pairs; i++) {
        const double angle = pos * freq[i];

        cs[2 * i] = (float)cos(angle);
        cs[2 * i + 1] = (float)sin(angle);
    }
}

#include "model/utf8.h"

#include <string.h>

struct lead {
    unsigned need;        /* bytes that follow */
    unsigned char lo, hi; /* the range of the first of them; the others are 80..BF */
};

/* false: no character begins with this byte.  Table 3-7 of the Unicode standard. */
static bool read_lead(unsigned char byte, struct lead *out)
{
    out->lo = 0x80;
    out->hi = 0xbf;
    if (byte < 0x80)
        out->need = 0;
    else if (byte < 0xc2)
        return false;
    else if (byte < 0xe0)
        out->need = 1;
    else if (byte < 0xf0)
        out->need = 2;
    else if (byte < 0xf5)
        out->need = 3;
    else
        return false;
    if (byte == 0xe0)
        out->lo = 0xa0;
    else if (byte == 0xed)
        out->hi = 0x9f;
    else if (byte == 0xf0)
        out->lo = 0x90;
    else if (byte == 0xf4)
        out->hi = 0x8f;
    return true;
}

/* Bytes of the whole character at text, or 0. */
static size_t read_char(const unsigned char *text, size_t len)
{
    struct lead lead;
    unsigned i;

    if (!read_lead(text[0], &lead) || lead.need >= len)
        return 0;
    if (lead.need > 0 && (text[1] < lead.lo || text[1] > lead.hi))
        return 0;
    for (i = 2; i <= lead.need; i++)
        if ((text[i] & 0xc0) != 0x80)
            return 0;
    return lead.need + 1;
}

size_t utf8_valid_prefix(const char *text, size_t len)
{
    const unsigned char *bytes = (const unsigned char *)text;
    size_t at = 0, n;

    while (at < len) {
        n = bytes[at] < 0x80 ? 1 : read_char(bytes + at, len - at);
        if (n == 0)
            break;
        at += n;
    }
    return at;
}

unsigned utf8_char_bytes(unsigned char lead)
{
    return lead < 0x80 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
}

static unsigned put_replacement(struct utf8_assembler *a, char out[UTF8_MAX])
{
    a->n = 0;
    memcpy(out, "\xef\xbf\xbd", 3);
    return 3;
}

unsigned utf8_push(struct utf8_assembler *a, unsigned char byte, char out[UTF8_MAX], bool *again)
{
    struct lead lead;
    unsigned n;

    *again = false;
    if (a->n > 0 && (byte < a->lo || byte > a->hi)) {
        *again = true;
        return put_replacement(a, out);
    }
    if (a->n == 0) {
        if (!read_lead(byte, &lead))
            return put_replacement(a, out);
        a->need = lead.need;
        a->lo = lead.lo;
        a->hi = lead.hi;
    } else {
        a->need--;
        a->lo = 0x80;
        a->hi = 0xbf;
    }
    a->bytes[a->n++] = byte;
    if (a->need > 0)
        return 0;
    n = a->n;
    a->n = 0;
    memcpy(out, a->bytes, n);
    return n;
}

unsigned utf8_finish(struct utf8_assembler *a, char out[UTF8_MAX])
{
    return a->n == 0 ? 0 : put_replacement(a, out);
}

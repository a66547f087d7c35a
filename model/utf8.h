/* UTF-8 as the Unicode standard has it: no surrogates, no overlong forms, nothing past U+10FFFF. */
#ifndef MODEL_UTF8_H
#define MODEL_UTF8_H

#include <stdbool.h>
#include <stddef.h>

/* Bytes of text before the first one that belongs to no whole character; len where all do. */
size_t utf8_valid_prefix(const char *text, size_t len);

/* Bytes of the character that begins with `lead`; of valid text only. */
unsigned utf8_char_bytes(unsigned char lead);

/* Puts characters together that come byte by byte.  Zeroed is empty. */
struct utf8_assembler {
    unsigned char bytes[4];
    unsigned n;           /* bytes of the open character, 0: none is open */
    unsigned need;        /* bytes that it still lacks */
    unsigned char lo, hi; /* the range of its next byte */
};

enum { UTF8_MAX = 4 };

/* Take one byte.  Returns the bytes written to out: a whole character, U+FFFD for bytes that cannot
 * become one (one for each maximal subpart), or 0 while a character is open.  *again: the byte did
 * not fit the open character, which is now out as U+FFFD; push the byte once more. */
unsigned utf8_push(struct utf8_assembler *a, unsigned char byte, char out[UTF8_MAX], bool *again);

/* No more bytes come: an open character leaves as U+FFFD.  Returns the bytes written. */
unsigned utf8_finish(struct utf8_assembler *a, char out[UTF8_MAX]);

#endif

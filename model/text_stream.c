/* Tokens to text, as it becomes certain.
 *
 *   fed bytes --> assembler --> text [ out | held ]
 *
 * The assembler lets whole characters through (utf8.h).  Of the text, what may be the beginning of
 * a stop string is held: for each stop, how much of it the text ends with (Knuth, Morris, Pratt);
 * the longest of these is what stays.  The first stop string to be completed ends the stream, of
 * several completed by the same byte the longest.
 *
 * Places in the text are counted from the stream's start.  For each token fed whose text is not all
 * out a mark says where its text begins and ends, so that tokens are reported when they are out and
 * a stop string cuts between them.  A token that ends inside a character has no end until the
 * character is whole. */
#include "model/tokenizer.h"
#include "model/utf8.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define OPEN_END UINT64_MAX

/* Tokens one after the other with the same end; only such without text share a mark. */
struct mark {
    uint64_t begin, end;
    uint32_t n_tokens;
};

struct stop {
    char *text;
    uint16_t len;
    uint16_t *fall; /* [len] where to go on after a mismatch behind i + 1 bytes */
    uint16_t at;    /* bytes that the text ends with now */
};

struct text_stream {
    const struct tokenizer *tok;
    struct stop stops[TEXT_MAX_STOPS];
    size_t n_stops;
    struct utf8_assembler assembler;
    bool first; /* for tokenizer_piece_after() */

    /* The text not yet given out, behind what the last piece points to. */
    char *text;
    size_t cap;
    size_t n_out;  /* bytes of text[] in the last piece; dropped by the next call */
    size_t n_text; /* bytes of text[] */
    uint64_t base; /* place of text[0] */

    struct mark *marks; /* a ring */
    size_t marks_cap, first_mark, n_marks;

    uint32_t n_popped;  /* tokens fed that are all out */
    uint32_t n_visible; /* 1 + index of the last popped one that had text */
    bool stopped;
    uint32_t n_keep;
};

/* ---- Life ---- */

static void build_fall(struct stop *stop)
{
    uint16_t i, k = 0;

    stop->fall[0] = 0;
    for (i = 1; i < stop->len; i++) {
        while (k > 0 && stop->text[i] != stop->text[k])
            k = stop->fall[k - 1];
        if (stop->text[i] == stop->text[k])
            k++;
        stop->fall[i] = k;
    }
}

static int add_stop(struct text_stream *s, const char *text, struct kv_why *why)
{
    struct stop *stop = &s->stops[s->n_stops];
    size_t len = text == NULL ? 0 : strnlen(text, TEXT_MAX_STOP_BYTES + 1);

    if (len == 0)
        return kv_fail(why, MODEL_ERR_INVALID, "stop[%zu] is empty", s->n_stops);
    if (len > TEXT_MAX_STOP_BYTES)
        return kv_fail(why, MODEL_ERR_INVALID, "stop[%zu] has more than %d bytes", s->n_stops,
                       TEXT_MAX_STOP_BYTES);
    if (utf8_valid_prefix(text, len) < len)
        return kv_fail(why, MODEL_ERR_INVALID, "stop[%zu] is not UTF-8 at byte %zu", s->n_stops,
                       utf8_valid_prefix(text, len));
    s->n_stops++; /* text_close() frees what there is of it */
    stop->text = malloc(len + 1);
    stop->fall = malloc(len * sizeof *stop->fall);
    if (stop->text == NULL || stop->fall == NULL)
        return kv_fail(why, MODEL_ERR_NOMEM, "no memory for stop strings");
    memcpy(stop->text, text, len);
    stop->text[len] = '\0';
    stop->len = (uint16_t)len;
    build_fall(stop);
    return 0;
}

/* Held text is shorter than the longest stop string; a token adds at most three bytes for each of
 * its own, and what an open character becomes.  A mark is a token with text, which holds at least a
 * byte, or the tokens without text between two of those. */
static int alloc_buffers(struct text_stream *s)
{
    size_t held = TEXT_MAX_STOP_BYTES + 2 * UTF8_MAX;

    s->cap = 2 * held + 3 * s->tok->max_piece;
    s->marks_cap = 2 * held + 2;
    s->text = malloc(s->cap);
    s->marks = malloc(s->marks_cap * sizeof *s->marks);
    return s->text == NULL || s->marks == NULL ? MODEL_ERR_NOMEM : 0;
}

int text_open(const struct tokenizer *t, const char *const *stops, size_t n_stops,
              struct text_stream **out, struct kv_why *why)
{
    struct text_stream *s;
    size_t i;
    int rc;

    if (n_stops > TEXT_MAX_STOPS)
        return kv_fail(why, MODEL_ERR_INVALID, "stop has %zu strings, the most is %d", n_stops,
                       TEXT_MAX_STOPS);
    s = calloc(1, sizeof *s);
    if (s == NULL)
        return kv_fail(why, MODEL_ERR_NOMEM, "no memory for a text stream");
    s->tok = t;
    rc = alloc_buffers(s);
    if (rc < 0)
        kv_fail(why, rc, "no memory for a text stream");
    for (i = 0; i < n_stops && rc == 0; i++)
        rc = add_stop(s, stops[i], why);
    if (rc < 0) {
        text_close(s);
        return rc;
    }
    *out = s;
    return 0;
}

void text_close(struct text_stream *s)
{
    size_t i;

    if (s == NULL)
        return;
    for (i = 0; i < s->n_stops; i++) {
        free(s->stops[i].text);
        free(s->stops[i].fall);
    }
    free(s->marks);
    free(s->text);
    free(s);
}

int text_follow(struct text_stream *s, uint32_t id)
{
    if (id >= s->tok->n_vocab)
        return MODEL_ERR_INVALID;
    (void)tokenizer_piece_after(s->tok, id, false, &s->first);
    return 0;
}

/* ---- Marks ---- */

static struct mark *mark_at(struct text_stream *s, size_t i)
{
    return &s->marks[(s->first_mark + i) % s->marks_cap];
}

static void push_mark(struct text_stream *s, uint64_t begin, uint64_t end)
{
    struct mark *last = s->n_marks > 0 ? mark_at(s, s->n_marks - 1) : NULL;

    if (last != NULL && begin == end && last->begin == begin && last->end == end) {
        last->n_tokens++;
        return;
    }
    assert(s->n_marks < s->marks_cap);
    *mark_at(s, s->n_marks++) = (struct mark){.begin = begin, .end = end, .n_tokens = 1};
}

/* The character that these tokens end in ends here. */
static void close_marks(struct text_stream *s, uint64_t end)
{
    size_t i;

    for (i = s->n_marks; i > 0; i--) {
        struct mark *m = mark_at(s, i - 1);
        if (m->end == OPEN_END)
            m->end = end;
        else if (m->begin < m->end)
            break;
    }
}

/* Take off the tokens whose text ends at or before `end`. */
static uint32_t pop_marks(struct text_stream *s, uint64_t end)
{
    uint32_t n = 0;

    while (s->n_marks > 0 && mark_at(s, 0)->end <= end) {
        struct mark *m = mark_at(s, 0);
        n += m->n_tokens;
        s->n_popped += m->n_tokens;
        if (m->begin < m->end)
            s->n_visible = s->n_popped;
        s->first_mark = (s->first_mark + 1) % s->marks_cap;
        s->n_marks--;
    }
    return n;
}

/* Tokens up to the last one with text before `end`. */
static uint32_t count_visible(struct text_stream *s, uint64_t end)
{
    uint32_t n = s->n_popped, n_visible = s->n_visible;
    size_t i;

    for (i = 0; i < s->n_marks; i++) {
        struct mark *m = mark_at(s, i);
        n += m->n_tokens;
        if (m->begin < m->end && m->begin < end)
            n_visible = n;
    }
    return n_visible;
}

/* ---- Text ---- */

static uint64_t text_end(const struct text_stream *s)
{
    return s->base + s->n_text;
}

/* Bytes of the longest stop string that this byte completes, or 0. */
static size_t match_byte(struct text_stream *s, char byte)
{
    size_t i, best = 0;

    for (i = 0; i < s->n_stops; i++) {
        struct stop *stop = &s->stops[i];
        assert(stop->at < stop->len);
        while (stop->at > 0 && stop->text[stop->at] != byte)
            stop->at = stop->fall[stop->at - 1];
        if (stop->text[stop->at] == byte)
            stop->at++;
        if (stop->at == stop->len && stop->len > best)
            best = stop->len;
    }
    return best;
}

/* Append a character. A stop string that it completes is cut off, and all is over. */
static void add_text(struct text_stream *s, const char *bytes, unsigned n)
{
    size_t matched = 0;
    unsigned i;

    assert(s->n_text + n <= s->cap);
    for (i = 0; i < n && matched == 0; i++) {
        s->text[s->n_text++] = bytes[i];
        matched = match_byte(s, bytes[i]);
    }
    if (matched == 0)
        return;
    s->n_text -= matched;
    s->stopped = true;
}

static size_t held_bytes(const struct text_stream *s)
{
    size_t i, held = 0;

    for (i = 0; i < s->n_stops; i++)
        if (s->stops[i].at > held)
            held = s->stops[i].at;
    return held;
}

/* Forget what the last call gave out. */
static void drop_out(struct text_stream *s)
{
    memmove(s->text, s->text + s->n_out, s->n_text - s->n_out);
    s->base += s->n_out;
    s->n_text -= s->n_out;
    s->n_out = 0;
}

static void give_out(struct text_stream *s, size_t n, struct text_piece *out)
{
    s->n_out = n;
    *out = (struct text_piece){.data = s->text, .len = n, .stopped = s->stopped};
    out->n_tokens = pop_marks(s, s->base + n);
}

static void give_stopped(struct text_stream *s, struct text_piece *out)
{
    uint32_t n_reported = s->n_popped;

    s->n_keep = count_visible(s, text_end(s));
    give_out(s, s->n_text, out);
    out->n_tokens = s->n_keep > n_reported ? s->n_keep - n_reported : 0;
    out->n_keep = s->n_keep;
    s->n_marks = 0;
}

static void give_over(struct text_stream *s, struct text_piece *out)
{
    *out = (struct text_piece){.data = s->text, .stopped = true, .n_keep = s->n_keep};
}

static void push_byte(struct text_stream *s, unsigned char byte)
{
    char bytes[UTF8_MAX];
    bool again = true;
    unsigned n;

    while (again && !s->stopped) {
        n = utf8_push(&s->assembler, byte, bytes, &again);
        if (n == 0)
            continue;
        add_text(s, bytes, n);
        if (!s->stopped)
            close_marks(s, text_end(s));
    }
}

int text_feed(struct text_stream *s, uint32_t id, struct text_piece *out)
{
    struct gguf_string piece;
    uint64_t begin;
    size_t i;

    if (id >= s->tok->n_vocab)
        return MODEL_ERR_INVALID;
    drop_out(s);
    if (s->stopped) {
        give_over(s, out);
        return 0;
    }
    piece = tokenizer_piece_after(s->tok, id, false, &s->first);
    begin = text_end(s);
    for (i = 0; i < piece.len && !s->stopped; i++)
        push_byte(s, (unsigned char)piece.data[i]);
    if (s->stopped || piece.len == 0)
        push_mark(s, begin, text_end(s) > begin ? text_end(s) : begin);
    else
        push_mark(s, begin, s->assembler.n > 0 ? OPEN_END : text_end(s));
    if (s->stopped)
        give_stopped(s, out);
    else
        give_out(s, s->n_text - held_bytes(s), out);
    return 0;
}

int text_flush(struct text_stream *s, struct text_piece *out)
{
    char bytes[UTF8_MAX];
    unsigned n;

    drop_out(s);
    if (s->stopped) {
        give_over(s, out);
        return 0;
    }
    n = utf8_finish(&s->assembler, bytes);
    if (n > 0)
        add_text(s, bytes, n);
    if (s->stopped) {
        give_stopped(s, out);
        return 0;
    }
    close_marks(s, text_end(s));
    give_out(s, s->n_text, out);
    return 0;
}

const char *text_stopped_by(const struct text_stream *s)
{
    const char *text = "";
    size_t i, best = 0;

    /* Nothing is fed behind a stop, so only a stop leaves one matched in full. */
    for (i = 0; i < s->n_stops; i++) {
        if (s->stops[i].at == s->stops[i].len && s->stops[i].len > best) {
            text = s->stops[i].text;
            best = s->stops[i].len;
        }
    }
    return text;
}

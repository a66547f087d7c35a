/* The log: one line an event to stderr, written in one call, so that lines of several threads and
 * processes never mix.
 *
 * What a peer can cause often must not fill a disk or stall a thread on a slow terminal, so a
 * second takes LINES_PER_S lines; what is past it is counted and the count stands as
 * `held_back=` in the next line that leaves. */
#include "node/node.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    LINE_BYTES = 4096, /* longer lines are cut */
    LINES_PER_S = 200,
};

static atomic_int min_level = NODE_INFO; /* relaxed: orders nothing */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* Guarded by lock. */
static int64_t window; /* the second of CLOCK_MONOTONIC that n_lines counts */
static unsigned n_lines;
static unsigned long long n_held;

static const char *const level_names[] = {"debug", "info", "warn", "error"};

void node_log_set_level(enum node_level level)
{
    atomic_store_explicit(&min_level, (int)level, memory_order_relaxed);
}

int node_level_parse(const char *name)
{
    for (int i = 0; i < (int)(sizeof(level_names) / sizeof(level_names[0])); i++)
        if (strcmp(name, level_names[i]) == 0)
            return i;
    return -1;
}

/* True: a line may leave now, and *held were held back before it. */
static bool admit(unsigned long long *held)
{
    int64_t second = node_now_ns() / 1000000000;
    bool ok;

    pthread_mutex_lock(&lock);
    if (second != window) {
        window = second;
        n_lines = 0;
    }
    ok = n_lines < LINES_PER_S;
    if (ok) {
        n_lines++;
        *held = n_held;
        n_held = 0;
    } else {
        n_held++;
    }
    pthread_mutex_unlock(&lock);
    return ok;
}

/* At most LINE_BYTES; a line that was cut still ends in a newline. */
struct line {
    char text[LINE_BYTES];
    size_t n;
};

static void add_v(struct line *l, const char *fmt, va_list ap)
{
    size_t room = sizeof(l->text) - l->n;
    int n = vsnprintf(l->text + l->n, room, fmt, ap);

    if (n > 0)
        l->n += (size_t)n < room ? (size_t)n : room - 1;
}

static void __attribute__((format(printf, 2, 3))) add(struct line *l, const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    add_v(l, fmt, ap);
    va_end(ap);
}

static void add_time(struct line *l)
{
    int64_t ns = node_wall_ns();
    time_t s = ns / 1000000000;
    struct tm tm;

    gmtime_r(&s, &tm);
    l->n += strftime(l->text + l->n, sizeof(l->text) - l->n, "%Y-%m-%dT%H:%M:%S", &tm);
    add(l, ".%03dZ", (int)(ns / 1000000 % 1000));
}

static void write_all(const char *p, size_t n)
{
    while (n > 0) {
        ssize_t done = write(STDERR_FILENO, p, n);

        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            return; /* nobody reads the log; there is nowhere to say so */
        p += done;
        n -= (size_t)done;
    }
}

void node_log(enum node_level level, const char *event, const char *fmt, ...)
{
    unsigned long long held = 0;
    int saved_errno = errno;
    struct line l;
    va_list ap;

    if ((int)level < atomic_load_explicit(&min_level, memory_order_relaxed) || !admit(&held))
        return;
    l.n = 0;
    add_time(&l);
    add(&l, " %s %s", level_names[level], event);
    if (held > 0)
        add(&l, " held_back=%llu", held);
    if (fmt != NULL && fmt[0] != '\0') {
        add(&l, " ");
        errno = saved_errno; /* for %m */
        va_start(ap, fmt);
        add_v(&l, fmt, ap);
        va_end(ap);
    }
    l.text[l.n++] = '\n'; /* in the place of vsnprintf's last zero */
    write_all(l.text, l.n);
    errno = saved_errno;
}

/* Length of the well-formed UTF-8 character at s, or 0.  Control characters count as ill-formed,
 * U+0080..U+009F among them: terminals obey those too. */
static size_t printable(const unsigned char *s)
{
    static const uint32_t least[] = {0, 0, 0xa0, 0x800, 0x10000};
    uint32_t c = s[0];
    size_t n;

    if (c < 0x80)
        return c >= 0x20 && c != 0x7f ? 1 : 0;
    n = c >= 0xf0 ? 4 : c >= 0xe0 ? 3 : 2;
    if (c < 0xc0 || c > 0xf7)
        return 0;
    c &= 0x7fu >> n;
    for (size_t i = 1; i < n; i++) {
        if ((s[i] & 0xc0) != 0x80)
            return 0;
        c = c << 6 | (s[i] & 0x3fu);
    }
    return c >= least[n] && c <= 0x10ffff && (c < 0xd800 || c > 0xdfff) ? n : 0;
}

const char *node_quote(char *buf, size_t n, const char *s)
{
    const unsigned char *p = (const unsigned char *)s;
    size_t used = 0;

    if (n < 3) {
        if (n > 0)
            buf[0] = '\0';
        return buf;
    }
    buf[used++] = '"';
    while (*p != '\0') {
        char piece[8];
        size_t k = printable(p), take = k > 0 ? k : 1;

        if (*p == '"' || *p == '\\')
            k = (size_t)snprintf(piece, sizeof(piece), "\\%c", *p);
        else if (*p == '\n')
            k = (size_t)snprintf(piece, sizeof(piece), "\\n");
        else if (k == 0)
            k = (size_t)snprintf(piece, sizeof(piece), "\\x%02x", *p);
        else
            memcpy(piece, p, k);
        if (used + k + 2 > n)
            break;
        memcpy(buf + used, piece, k);
        used += k;
        p += take;
    }
    buf[used++] = '"';
    buf[used] = '\0';
    return buf;
}

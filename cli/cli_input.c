#include "cli/cli.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static int read_stdin(char **text, size_t *len)
{
    size_t cap = 64 * 1024, n = 0;
    char *buf = malloc(cap + 1), *more;

    while (buf != NULL) {
        n += fread(buf + n, 1, cap - n, stdin);
        if (n < cap)
            break;
        if (cap >= CLI_MAX_TEXT_BYTES) {
            cli_say("stdin: more than %d bytes", (int)CLI_MAX_TEXT_BYTES);
            free(buf);
            return NODE_EXIT_FAILED;
        }
        cap *= 2;
        more = realloc(buf, cap + 1);
        if (more == NULL)
            free(buf);
        buf = more;
    }
    if (buf == NULL) {
        cli_say("no memory for the text");
        return NODE_EXIT_FAILED;
    }
    if (ferror(stdin)) {
        cli_say("stdin: %s",
                errno == EBADF ? "cannot be read from: it is closed" : strerror(errno));
        free(buf);
        return NODE_EXIT_FAILED;
    }
    /* What echo and editors add. */
    if (n > 0 && buf[n - 1] == '\n')
        n--;
    buf[n] = '\0';
    *text = buf;
    *len = n;
    return NODE_EXIT_OK;
}

int cli_read_text(const char *arg, char **text, size_t *len)
{
    char *copy;

    if (strcmp(arg, "-") == 0)
        return read_stdin(text, len);
    copy = strdup(arg);
    if (copy == NULL) {
        cli_say("no memory for the text");
        return NODE_EXIT_FAILED;
    }
    *text = copy;
    *len = strlen(copy);
    return NODE_EXIT_OK;
}

static int add_id(uint32_t **ids, size_t *n, size_t *cap, uint32_t id)
{
    uint32_t *more;

    if (*n == CLI_MAX_IDS)
        return -1;
    if (*n == *cap) {
        *cap = *cap == 0 ? 64 : 2 * *cap;
        more = realloc(*ids, *cap * sizeof(**ids));
        if (more == NULL)
            return -1;
        *ids = more;
    }
    (*ids)[(*n)++] = id;
    return 0;
}

static const char space[] = " \t\r\n";

/* Past what may stand between two ids: white space with at most one comma in it.  *more: there was
 * one, so an id must follow. */
static const char *skip_between(const char *s, bool *more)
{
    s += strspn(s, space);
    *more = *s == ',';
    if (!*more)
        return s;
    s++;
    return s + strspn(s, space);
}

int cli_parse_ids(const char *text, uint32_t **out, size_t *n_out)
{
    const char *s = text + strspn(text, space);
    uint32_t *ids = NULL, id;
    size_t n = 0, cap = 0, len;
    char word[16], quoted[64];
    bool more = false;

    while (*s != '\0' || more) {
        len = strcspn(s, ", \t\r\n");
        snprintf(word, sizeof(word), "%.*s", (int)(len < sizeof(word) ? len : sizeof(word)), s);
        if (!node_parse_u32(word, 0, UINT32_MAX, &id)) {
            cli_say("%s is not a token id, at offset %zu of the list",
                    node_quote(quoted, sizeof(quoted), word), (size_t)(s - text));
            free(ids);
            return NODE_EXIT_USAGE;
        }
        if (add_id(&ids, &n, &cap, id) < 0) {
            cli_say("no memory for the ids, or more than %d", (int)CLI_MAX_IDS);
            free(ids);
            return NODE_EXIT_FAILED;
        }
        s = skip_between(s + len, &more);
    }
    *out = ids;
    *n_out = n;
    return NODE_EXIT_OK;
}

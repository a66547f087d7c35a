#include "node/node.h"

#include <assert.h>
#include <float.h>
#include <getopt.h>
#include <math.h>
#include <string.h>

enum {
    HELP_COLUMN = 28,
    HELP_WIDTH = 88,
    VALUE_BYTES = 256,
    /* Results of getopt_long that are no letter. */
    GOT_HELP = 1000,
    GOT_VERSION,
    GOT_OPTION, /* + index in the table */
};

static const char *const unit_names[] = {"", "K", "M", "G", "T"};

/* ---- Values as text ---- */

static void print_bytes(char *buf, size_t n, uint64_t v)
{
    size_t unit = 0;

    while (v != 0 && v % 1024 == 0 && unit < 4) {
        v /= 1024;
        unit++;
    }
    snprintf(buf, n, "%llu%s", (unsigned long long)v, unit_names[unit]);
}

/* The value that stands for a missing option; "" where there is none. */
static void print_value(char *buf, size_t n, const struct node_option *o)
{
    const char *s;

    buf[0] = '\0';
    switch (o->type) {
    case NODE_OPT_U32:
        snprintf(buf, n, "%u", *(const uint32_t *)o->value);
        break;
    case NODE_OPT_U64:
        snprintf(buf, n, "%llu", (unsigned long long)*(const uint64_t *)o->value);
        break;
    case NODE_OPT_BYTES:
        print_bytes(buf, n, *(const uint64_t *)o->value);
        break;
    case NODE_OPT_FLOAT:
        snprintf(buf, n, "%g", (double)*(const float *)o->value);
        break;
    case NODE_OPT_STRING:
    case NODE_OPT_ADDRESS:
    case NODE_OPT_CHOICE:
        s = *(const char *const *)o->value;
        snprintf(buf, n, "%s", s != NULL ? s : "");
        break;
    case NODE_OPT_FLAG:
    case NODE_OPT_LIST:
        break; /* both begin empty */
    }
}

/* ---- --help ---- */

/* Words of s between column `left` and HELP_WIDTH, where the cursor stands at `left`.  Spaces at
 * the beginning of a line stay. */
static void print_wrapped(const char *s, size_t left)
{
    size_t at = left;
    bool fresh = true;

    while (*s != '\0') {
        size_t spaces = strspn(s, " "), n = strcspn(s + spaces, " \n");

        if (!fresh && at + spaces + n > HELP_WIDTH) {
            printf("\n%*s", (int)left, "");
            at = left;
            spaces = 0;
        }
        printf("%*s%.*s", (int)spaces, "", (int)n, s + strspn(s, " "));
        at += spaces + n;
        s += strspn(s, " ") + n;
        fresh = *s == '\n';
        if (fresh) {
            printf("\n%*s", (int)left, "");
            at = left;
            s++;
        }
    }
    putchar('\n');
}

/* A value out of the option's own range stands for "not given". */
static bool is_given(const struct node_option *o)
{
    switch (o->type) {
    case NODE_OPT_FLAG:
        return false;
    case NODE_OPT_U32:
        return (double)*(const uint32_t *)o->value >= o->min;
    case NODE_OPT_U64:
    case NODE_OPT_BYTES:
        return (double)*(const uint64_t *)o->value >= o->min;
    default:
        return true;
    }
}

static void print_option(const struct node_option *o)
{
    char help[1024], value[VALUE_BYTES] = "";
    size_t used, at;
    int n;

    n = o->letter != 0 ? printf("  -%c, --%s", o->letter, o->name) : printf("      --%s", o->name);
    at = (size_t)n;
    if (o->type != NODE_OPT_FLAG)
        at += (size_t)printf(" %s", o->argument);
    if (at + 2 > HELP_COLUMN) {
        putchar('\n');
        at = 0;
    }
    printf("%*s", (int)(HELP_COLUMN - at), "");

    used = (size_t)snprintf(help, sizeof(help), "%s", o->help);
    if (o->type == NODE_OPT_CHOICE) {
        for (size_t i = 0; o->choices[i] != NULL && used < sizeof(help); i++)
            used += (size_t)snprintf(help + used, sizeof(help) - used, "%s%s", i > 0 ? ", " : ": ",
                                     o->choices[i]);
    }
    if (is_given(o))
        print_value(value, sizeof(value), o);
    if (value[0] != '\0' && used < sizeof(help))
        snprintf(help + used, sizeof(help) - used, " (default %s)", value);
    print_wrapped(help, HELP_COLUMN);
}

static void print_help(const struct node_option *options, size_t n_options, const char *usage,
                       const char *text)
{
    printf("usage: %s\n\n", usage);
    if (text != NULL && text[0] != '\0') {
        print_wrapped(text, 0);
        putchar('\n');
    }
    printf("Options:\n");
    for (size_t i = 0; i < n_options; i++)
        print_option(&options[i]);
    printf("  -h, --help%*sshow this text\n", HELP_COLUMN - 12, "");
    printf("      --version%*sshow the version\n", HELP_COLUMN - 15, "");
}

/* ---- Parsing ---- */

/* A bound of the table as an integer: doubles hold every one that we use exactly. */
static uint64_t whole(double bound, uint64_t none)
{
    return bound == 0 ? none : bound >= 0x1p64 ? UINT64_MAX : (uint64_t)bound;
}

static bool is_choice(const struct node_option *o, const char *s)
{
    for (size_t i = 0; o->choices[i] != NULL; i++)
        if (strcmp(o->choices[i], s) == 0)
            return true;
    return false;
}

static bool add_string(struct node_strings *list, const char *s)
{
    if (list->n == sizeof(list->items) / sizeof(list->items[0]))
        return false;
    list->items[list->n++] = s;
    return true;
}

static bool take_value(const struct node_option *o, const char *s)
{
    bool unbounded = o->min == 0 && o->max == 0;

    switch (o->type) {
    case NODE_OPT_FLAG:
        *(bool *)o->value = true;
        return true;
    case NODE_OPT_U32:
        return node_parse_u32(s, (uint32_t)whole(o->min, 0), (uint32_t)whole(o->max, UINT32_MAX),
                              o->value);
    case NODE_OPT_U64:
        return node_parse_u64(s, whole(o->min, 0), whole(o->max, UINT64_MAX), o->value);
    case NODE_OPT_BYTES:
        return node_parse_bytes(s, whole(o->min, 0), whole(o->max, UINT64_MAX), o->value);
    case NODE_OPT_FLOAT:
        return node_parse_float(s, unbounded ? -FLT_MAX : (float)o->min,
                                unbounded ? FLT_MAX : (float)o->max, o->value);
    case NODE_OPT_LIST:
        return add_string(o->value, s);
    case NODE_OPT_ADDRESS:
        if (!node_parse_address(s))
            return false;
        break;
    case NODE_OPT_CHOICE:
        if (!is_choice(o, s))
            return false;
        break;
    case NODE_OPT_STRING:
        break;
    }
    *(const char **)o->value = s;
    return true;
}

/* What a value of the option must be, for the message that refuses one. */
static void print_expected(char *buf, size_t n, const struct node_option *o)
{
    char min[32], max[32];
    size_t used;

    switch (o->type) {
    case NODE_OPT_U32:
    case NODE_OPT_U64:
        snprintf(
            buf, n, "a whole number from %llu to %llu", (unsigned long long)whole(o->min, 0),
            (unsigned long long)whole(o->max, o->type == NODE_OPT_U32 ? UINT32_MAX : UINT64_MAX));
        break;
    case NODE_OPT_BYTES:
        print_bytes(min, sizeof(min), whole(o->min, 0));
        print_bytes(max, sizeof(max), whole(o->max, UINT64_MAX));
        snprintf(buf, n, "a number of bytes from %s to %s, with K, M, G or T behind it or none",
                 min, max);
        break;
    case NODE_OPT_FLOAT:
        if (o->min == 0 && o->max == 0)
            snprintf(buf, n, "a number");
        else
            snprintf(buf, n, "a number from %g to %g", o->min, o->max);
        break;
    case NODE_OPT_ADDRESS:
        snprintf(buf, n, "HOST:PORT or [IPv6]:PORT");
        break;
    case NODE_OPT_CHOICE:
        used = (size_t)snprintf(buf, n, "one of");
        for (size_t i = 0; o->choices[i] != NULL && used < n; i++)
            used +=
                (size_t)snprintf(buf + used, n - used, "%s %s", i > 0 ? "," : "", o->choices[i]);
        break;
    case NODE_OPT_LIST:
        snprintf(buf, n, "given at most %zu times",
                 sizeof(((struct node_strings *)0)->items) / sizeof(char *));
        break;
    case NODE_OPT_FLAG:
    case NODE_OPT_STRING:
        snprintf(buf, n, "a string");
        break;
    }
}

/* The program is the first word of its usage. */
static int program_width(const char *usage)
{
    return (int)strcspn(usage, " ");
}

static int refuse_value(const char *usage, const struct node_option *o, const char *s)
{
    char expected[512], quoted[VALUE_BYTES];

    print_expected(expected, sizeof(expected), o);
    fprintf(stderr, "%.*s: --%s %s: must be %s\n", program_width(usage), usage, o->name,
            node_quote(quoted, sizeof(quoted), s), expected);
    return NODE_EXIT_USAGE;
}

/* got is getopt's ':' (no argument) or '?' (anything else that it refuses). */
static int refuse_option(const char *usage, int got, const char *arg)
{
    char quoted[VALUE_BYTES];

    fprintf(stderr, "%.*s: %s: %s (--help lists the options)\n", program_width(usage), usage,
            node_quote(quoted, sizeof(quoted), arg),
            got == ':' ? "needs a value" : "no such option, ambiguous, or takes no value");
    return NODE_EXIT_USAGE;
}

/* Tables for getopt_long. */
static void fill_tables(const struct node_option *options, size_t n_options, struct option *longs,
                        char *letters)
{
    *letters++ = ':'; /* tell a missing argument from an unknown option */
    *letters++ = 'h';
    for (size_t i = 0; i < n_options; i++) {
        const struct node_option *o = &options[i];

        longs[i] = (struct option){
            .name = o->name,
            .has_arg = o->type == NODE_OPT_FLAG ? no_argument : required_argument,
            .val = GOT_OPTION + (int)i,
        };
        if (o->letter != 0) {
            *letters++ = o->letter;
            if (o->type != NODE_OPT_FLAG)
                *letters++ = ':';
        }
    }
    *letters = '\0';
    longs[n_options] = (struct option){.name = "help", .val = GOT_HELP};
    longs[n_options + 1] = (struct option){.name = "version", .val = GOT_VERSION};
    longs[n_options + 2] = (struct option){0};
}

static const struct node_option *find_option(const struct node_option *options, size_t n_options,
                                             int got)
{
    if (got >= GOT_OPTION)
        return &options[got - GOT_OPTION];
    for (size_t i = 0; i < n_options; i++)
        if (options[i].letter == got)
            return &options[i];
    return NULL;
}

int node_options_parse(int argc, char **argv, const struct node_option *options, size_t n_options,
                       const char *usage, const char *text, int *first, bool *done)
{
    struct option longs[NODE_MAX_OPTIONS + 3];
    char letters[2 * NODE_MAX_OPTIONS + 3];
    const struct node_option *o;
    int got;

    assert(n_options <= NODE_MAX_OPTIONS);
    fill_tables(options, n_options, longs, letters);
    *done = true;
    opterr = 0;
    optind = 0; /* glibc: start afresh, as for the second command line of a process */
    while ((got = getopt_long(argc, argv, letters, longs, NULL)) != -1) {
        if (got == GOT_HELP || got == 'h') {
            print_help(options, n_options, usage, text);
            return NODE_EXIT_OK;
        }
        if (got == GOT_VERSION) {
            printf("%.*s " BATON_VERSION "\n", program_width(usage), usage);
            return NODE_EXIT_OK;
        }
        if (got == '?' || got == ':')
            return refuse_option(usage, got, argv[optind - 1]);
        o = find_option(options, n_options, got);
        assert(o != NULL);
        if (!take_value(o, optarg))
            return refuse_value(usage, o, optarg);
    }
    *first = optind;
    *done = false;
    return NODE_EXIT_OK;
}

/* baton: the command line.  Its commands stand in a file each. */
#include "cli/cli.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <unistd.h>

struct command {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *help;
};

static const struct command commands[] = {
    {"generate", cli_generate, "answer a prompt through a decode node, token by token"},
    {"status", cli_status, "what a node serves, how it is, and its sessions"},
    {"audit", cli_audit, "count a node's KV anew and see whether its accounts hold"},
    {"close", cli_close, "end a session of a decode node"},
    {"snapshot", cli_snapshot, "sessions on disk: save, restore, list, verify, look into files"},
    {"tokenize", cli_tokenize, "text to token ids and back, by a model file"},
    {"model", cli_model, "what is in a model file"},
};
enum { N_COMMANDS = sizeof(commands) / sizeof(commands[0]) };

void cli_say(const char *fmt, ...)
{
    va_list ap;

    fflush(stdout);
    flockfile(stderr);
    fputs("baton: ", stderr);
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fputc('\n', stderr);
    funlockfile(stderr);
}

const char *cli_plain(char *buf, size_t n, const char *s)
{
    node_quote(buf, n, s);
    buf[strlen(buf) - 1] = '\0';
    return buf + 1;
}

/* What a newcomer may have done to be told this. */
static const char *hint(int code)
{
    switch (code) {
    case TRANSPORT_DEADLINE_EXCEEDED:
        return " (--timeout SECONDS sets how long)";
    case TRANSPORT_UNIMPLEMENTED:
        return " (is that a prefill node? --to wants a decode node)";
    default:
        return "";
    }
}

int cli_say_status(int code, const char *details)
{
    char text[TRANSPORT_DETAIL_BYTES * 4 + 3];

    /* What a server says is not for a terminal to obey; but quotes would only be noise here. */
    cli_say("%s: %s%s", transport_status_name(code), cli_plain(text, sizeof(text), details),
            hint(code));
    return code == TRANSPORT_UNAVAILABLE ? NODE_EXIT_UNAVAILABLE : NODE_EXIT_FAILED;
}

int cli_say_file(const char *path, const struct kv_why *why)
{
    size_t n = strlen(path);

    if (strncmp(why->text, path, n) == 0 && why->text[n] == ':')
        cli_say("%s", why->text);
    else
        cli_say("%s: %s", path, why->text);
    return NODE_EXIT_FAILED;
}

bool cli_one_argument(int argc, int first, const char *command, const char *none, const char *many)
{
    if (argc - first == 1)
        return true;
    cli_say("%s: %s (baton %s --help)", command, argc == first ? none : many, command);
    return false;
}

/* ---- Options ---- */

static const struct node_option *find_letter(const struct node_option *options, size_t n, char c)
{
    for (size_t i = 0; i < n; i++)
        if (options[i].letter == c)
            return &options[i];
    return NULL;
}

/* Whether "--name" stands alone and takes its value from the next argument; an abbreviation does
 * where any option that it may mean does. */
static bool long_takes_next(const struct node_option *options, size_t n, const char *arg)
{
    for (size_t i = 0; i < n; i++)
        if (strncmp(options[i].name, arg + 2, strlen(arg + 2)) == 0)
            return options[i].type != NODE_OPT_FLAG;
    return false;
}

enum token { TOKEN_ALONE, TOKEN_TAKES_NEXT, TOKEN_HELP, TOKEN_WRONG };

/* What getopt would see in an argument that begins with "-". */
static enum token classify(const struct node_option *options, size_t n, const char *arg)
{
    const struct node_option *o;

    if (arg[1] == '-') {
        if (strcspn(arg, " \t\n") < strcspn(arg, "="))
            return TOKEN_WRONG;
        if (strcmp(arg, "--help") == 0)
            return TOKEN_HELP;
        return strchr(arg, '=') == NULL && long_takes_next(options, n, arg) ? TOKEN_TAKES_NEXT
                                                                            : TOKEN_ALONE;
    }
    for (const char *c = arg + 1; *c != '\0'; c++) {
        if (*c == 'h')
            return TOKEN_HELP;
        o = find_letter(options, n, *c);
        if (o == NULL)
            return TOKEN_WRONG;
        if (o->type != NODE_OPT_FLAG)
            return c[1] == '\0' ? TOKEN_TAKES_NEXT : TOKEN_ALONE;
    }
    return TOKEN_ALONE;
}

/* The first argument that begins with "-" and cannot be an option, or NULL. */
static const char *find_wrong(int argc, char **argv, const struct node_option *options, size_t n)
{
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++) {
        if (argv[i][0] != '-' || argv[i][1] == '\0')
            continue;
        switch (classify(options, n, argv[i])) {
        case TOKEN_WRONG:
            return argv[i];
        case TOKEN_HELP:
            return NULL;
        case TOKEN_TAKES_NEXT:
            i++;
            break;
        case TOKEN_ALONE:
            break;
        }
    }
    return NULL;
}

int cli_options_parse(int argc, char **argv, const struct node_option *options, size_t n_options,
                      const char *usage, const char *text, int *first, bool *done)
{
    const char *wrong = find_wrong(argc, argv, options, n_options);
    char quoted[256];

    if (wrong == NULL)
        return node_options_parse(argc, argv, options, n_options, usage, text, first, done);
    *done = true;
    cli_say("%s: no such option (--help lists them); text that begins with \"-\" stands behind "
            "\"--\"",
            node_quote(quoted, sizeof(quoted), wrong));
    return NODE_EXIT_USAGE;
}

/* ---- The program ---- */

static const struct command *find_command(const char *name)
{
    for (size_t i = 0; i < N_COMMANDS; i++)
        if (strcmp(commands[i].name, name) == 0)
            return &commands[i];
    return NULL;
}

static int run_command(int argc, char **argv);

/* baton help [COMMAND]: the same as --help. */
static int help_on(int argc, char **argv)
{
    static char option[] = "--help";
    char *to_command[] = {argv[0], argc > 1 ? argv[1] : option, argc > 1 ? option : NULL, NULL};

    if (argc > 2 || (argc == 2 && find_command(argv[1]) == NULL)) {
        cli_say("help: %s",
                argc > 2 ? "one command at most" : "no such command (--help lists them)");
        return NODE_EXIT_USAGE;
    }
    return run_command(argc + 1, to_command);
}

static int help(int argc, char **argv)
{
    static char text[1024];
    size_t n = 0;
    int first, rc;
    bool done;

    n += (size_t)snprintf(text, sizeof(text),
                          "Talks to Baton's nodes, and looks into model files.\n\nCommands, each "
                          "with its own --help (or: baton help COMMAND):");
    for (size_t i = 0; i < N_COMMANDS; i++)
        n += (size_t)snprintf(text + n, sizeof(text) - n, "\n  %-10s %s", commands[i].name,
                              commands[i].help);
    rc = cli_options_parse(argc, argv, NULL, 0, "baton COMMAND [option...]", text, &first, &done);
    if (done)
        return rc;
    if (first == argc)
        cli_say("which command? (--help lists them)");
    else
        cli_say("%s: no such command (--help lists them)", argv[first]);
    return NODE_EXIT_USAGE;
}

static int run_command(int argc, char **argv)
{
    const struct command *c;

    if (argc > 1 && strcmp(argv[1], "help") == 0)
        return help_on(argc - 1, argv + 1);
    c = argc > 1 ? find_command(argv[1]) : NULL;
    return c != NULL ? c->run(argc - 1, argv + 1) : help(argc, argv);
}

/* A file or socket that is opened later must not become stdin, stdout or stderr.  What takes the
 * place of a closed one cannot be used either, so that its use is still an error. */
static void keep_closed_streams_closed(int argc, char **argv, char **env)
{
    (void)argc;
    (void)argv;
    (void)env;
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0 && errno == EBADF)
            (void)!open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY);
}

/* Before the constructors of libraries, some of which open descriptors. */
__attribute__((section(".preinit_array"),
               used)) static void (*const before_libraries)(int, char **,
                                                            char **) = keep_closed_streams_closed;

int main(int argc, char **argv)
{
    int rc;

    rc = run_command(argc, argv);
    errno = 0;
    if (fflush(stdout) == 0 && !ferror(stdout))
        return rc;
    if (errno == EPIPE || rc == CLI_EXIT_NO_READER)
        return CLI_EXIT_NO_READER;
    cli_say("stdout: cannot be written to");
    return rc == NODE_EXIT_OK ? NODE_EXIT_FAILED : rc;
}

/* baton: the command line.  Its commands stand in a file each. */
#include "cli/cli.h"

#include <stdarg.h>
#include <string.h>

struct command {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *help;
};

static const struct command commands[] = {
    {"generate", cli_generate, "answer a prompt through a decode node, token by token"},
    {"status", cli_status, "what a node serves and how it is"},
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

int cli_say_status(int code, const char *details)
{
    char text[TRANSPORT_DETAIL_BYTES * 4 + 3];
    size_t n;

    /* What a server says is not for a terminal to obey; but quotes would only be noise here. */
    node_quote(text, sizeof(text), details);
    n = strlen(text);
    text[n - 1] = '\0';
    cli_say("%s: %s", transport_status_name(code), text + 1);
    return code == TRANSPORT_UNAVAILABLE ? NODE_EXIT_UNAVAILABLE : NODE_EXIT_FAILED;
}

bool cli_one_argument(int argc, int first, const char *command, const char *what)
{
    if (argc - first == 1)
        return true;
    cli_say("%s: %s (baton %s --help)", command,
            argc == first ? what : "one argument at most; put text with spaces in quotes", command);
    return false;
}

static int help(int argc, char **argv)
{
    static char text[1024];
    size_t n = 0;
    int first, rc;
    bool done;

    n += (size_t)snprintf(text, sizeof(text),
                          "Talks to Baton's nodes, and looks into model files.\n\nCommands, each "
                          "with its own --help:");
    for (size_t i = 0; i < N_COMMANDS; i++)
        n += (size_t)snprintf(text + n, sizeof(text) - n, "\n  %-10s %s", commands[i].name,
                              commands[i].help);
    rc = node_options_parse(argc, argv, NULL, 0, "baton COMMAND [option...]", text, &first, &done);
    if (done)
        return rc;
    if (first == argc)
        cli_say("which command? (--help lists them)");
    else
        cli_say("%s: no such command (--help lists them)", argv[first]);
    return NODE_EXIT_USAGE;
}

int main(int argc, char **argv)
{
    for (size_t i = 0; argc > 1 && i < N_COMMANDS; i++)
        if (strcmp(argv[1], commands[i].name) == 0)
            return commands[i].run(argc - 1, argv + 1);
    return help(argc, argv);
}

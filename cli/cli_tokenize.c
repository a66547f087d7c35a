#include "cli/cli.h"
#include "model/model.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct settings {
    const char *model;
    bool special, bos, ids, decode;
};

static int parse(int argc, char **argv, struct settings *s, int *first, bool *done)
{
    const struct node_option options[] = {
        {"model", 'm', NODE_OPT_STRING, &s->model, "FILE", "the model, a GGUF file", 0, 0, NULL},
        {"special", 0, NODE_OPT_FLAG, &s->special, NULL,
         "marker strings in TEXT become control tokens; with --decode they are printed", 0, 0,
         NULL},
        {"bos", 0, NODE_OPT_FLAG, &s->bos, NULL,
         "add the begin token where the model asks for one, as generate does", 0, 0, NULL},
        {"ids", 0, NODE_OPT_FLAG, &s->ids, NULL, "print ids alone, with commas between", 0, 0,
         NULL},
        {"decode", 'd', NODE_OPT_FLAG, &s->decode, NULL,
         "the other way: TEXT is ids with commas or white space between", 0, 0, NULL},
    };

    return cli_options_parse(
        argc, argv, options, sizeof(options) / sizeof(options[0]),
        "baton tokenize --model FILE [option...] TEXT",
        "Prints the tokens of TEXT, one a line: its id and its bytes. TEXT \"-\" is what stdin "
        "holds, less one newline at its end; TEXT that begins with \"-\" stands behind \"--\".",
        first, done);
}

/* A token's bytes in quotes; longer ones than anybody reads are cut. */
static void print_piece(const struct tokenizer *t, uint32_t id)
{
    struct gguf_string piece = tokenizer_piece(t, id, true);
    char bytes[512], quoted[2048];
    size_t n = piece.len < sizeof(bytes) - 1 ? piece.len : sizeof(bytes) - 1;

    if (n > 0)
        memcpy(bytes, piece.data, n);
    bytes[n] = '\0';
    printf("%8u  %s\n", id, node_quote(quoted, sizeof(quoted), bytes));
}

static int encode(const struct tokenizer *t, const struct settings *s, const char *text, size_t len)
{
    unsigned flags = (s->special ? TOKENIZE_SPECIAL : 0) | (s->bos ? TOKENIZE_BOS : 0);
    struct token_list ids = {0};
    struct kv_why why;
    size_t n_dropped = 0;

    if (tokenizer_encode(t, text, len, flags, &ids, &n_dropped, &why) < 0) {
        token_list_release(&ids);
        return cli_say_file("text", &why);
    }
    for (size_t i = 0; i < ids.n; i++) {
        if (s->ids)
            printf("%s%u", i > 0 ? "," : "", ids.ids[i]);
        else
            print_piece(t, ids.ids[i]);
    }
    if (s->ids)
        printf("\n");
    token_list_release(&ids);
    if (n_dropped > 0)
        cli_say("%zu bytes left out: the vocabulary has no token for them", n_dropped);
    return NODE_EXIT_OK;
}

/* On a terminal the text ends in a newline, its own or one more; elsewhere it is as it is. */
static void print_text(const char *text, size_t len)
{
    fwrite(text, 1, len, stdout);
    if (len > 0 && text[len - 1] != '\n' && isatty(STDOUT_FILENO))
        putchar('\n');
}

/* A list of nothing but control tokens would print nothing, and not say why. */
static void note_left_out(const struct tokenizer *t, const uint32_t *ids, size_t n)
{
    size_t n_left_out = 0;

    for (size_t i = 0; i < n; i++)
        n_left_out +=
            tokenizer_piece(t, ids[i], false).len == 0 && tokenizer_piece(t, ids[i], true).len > 0;
    if (n_left_out > 0)
        cli_say("note: %zu control token%s left out; --special prints them", n_left_out,
                n_left_out == 1 ? "" : "s");
}

static int decode(const struct tokenizer *t, const struct settings *s, const char *text)
{
    uint32_t *ids = NULL;
    char *out = NULL;
    size_t n, len;
    int rc;

    rc = cli_parse_ids(text, &ids, &n);
    if (rc != NODE_EXIT_OK)
        return rc;
    for (size_t i = 0; i < n; i++) {
        if (ids[i] >= tokenizer_n_vocab(t)) {
            cli_say("token id %u: the vocabulary has %u", ids[i], tokenizer_n_vocab(t));
            free(ids);
            return NODE_EXIT_FAILED;
        }
    }
    if (tokenizer_decode(t, ids, n, s->special, &out, &len) < 0) {
        cli_say("no memory for the text");
        free(ids);
        return NODE_EXIT_FAILED;
    }
    print_text(out, len);
    if (!s->special)
        note_left_out(t, ids, n);
    free(out);
    free(ids);
    return NODE_EXIT_OK;
}

static int run(const struct settings *s, const char *text, size_t len)
{
    struct gguf *g = NULL;
    struct tokenizer *t = NULL;
    struct kv_why why;
    int rc;

    if (gguf_open(s->model, &g, &why) < 0)
        return cli_say_file(s->model, &why);
    if (tokenizer_open(g, &t, &why) < 0) {
        gguf_close(g);
        return cli_say_file(s->model, &why);
    }
    rc = s->decode ? decode(t, s, text) : encode(t, s, text, len);
    tokenizer_close(t);
    gguf_close(g);
    return rc;
}

int cli_tokenize(int argc, char **argv)
{
    struct settings s = {0};
    char *text;
    size_t len;
    int first, rc;
    bool done;

    rc = parse(argc, argv, &s, &first, &done);
    if (done)
        return rc;
    if (s.model == NULL) {
        cli_say("tokenize: --model FILE is needed");
        return NODE_EXIT_USAGE;
    }
    if (!cli_one_argument(argc, first, "tokenize", "which text?",
                          "one TEXT at most: put it in quotes"))
        return NODE_EXIT_USAGE;
    rc = cli_read_text(argv[first], &text, &len);
    if (rc != NODE_EXIT_OK)
        return rc;
    rc = run(&s, text, len);
    free(text);
    return rc;
}

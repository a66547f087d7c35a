#include "cli/cli.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const char *const routes[] = {"auto", "local", "prefill", NULL}; /* by Baton__V1__Route */

enum { MAX_STOPS = 16 }; /* of the protocol */

struct settings {
    const char *to;
    bool chat, ids, special;
    const char *system;
    const char *session;
    uint32_t max_tokens; /* 0: the node's default */
    float temperature, top_p, min_p;
    uint32_t top_k;
    uint64_t seed;
    struct node_strings stop;
    bool ignore_end;
    const char *route;
    bool logits_digest, json, stats;
    float timeout_s;
};

static int parse(int argc, char **argv, struct settings *s, int *first, bool *done)
{
    const struct node_option options[] = {
        {"to", 0, NODE_OPT_ADDRESS, &s->to, "HOST:PORT", "the decode node", 0, 0, NULL},
        {"chat", 'c', NODE_OPT_FLAG, &s->chat, NULL,
         "TEXT is a user's message, put through the model's chat template", 0, 0, NULL},
        {"system", 0, NODE_OPT_STRING, &s->system, "TEXT",
         "the system message of the conversation; implies --chat", 0, 0, NULL},
        {"session", 's', NODE_OPT_STRING, &s->session, "NAME",
         "continue the session of this name, or begin it; with --chat or without, as it was begun. "
         "It stays until baton close ends it or the node stops, or on disk where the node keeps "
         "snapshots; a turn that does not finish leaves it as it was",
         0, 0, NULL},
        {"max-tokens", 'n', NODE_OPT_U32, &s->max_tokens, "N",
         "tokens to generate at most; without it, the node's own limit", 1, 0, NULL},
        {"temperature", 't', NODE_OPT_FLOAT, &s->temperature, "X",
         "0: the most likely token always, and --top-k, --top-p, --min-p and --seed have no "
         "effect; up to 100",
         0, 100, NULL},
        {"top-k", 0, NODE_OPT_U32, &s->top_k, "K", "draw from the K most likely tokens; 0: all", 0,
         0, NULL},
        {"top-p", 0, NODE_OPT_FLOAT, &s->top_p, "P",
         "draw from the most likely tokens that reach probability P together", 0, 1, NULL},
        {"min-p", 0, NODE_OPT_FLOAT, &s->min_p, "P",
         "draw from tokens at least P times as likely as the most likely one", 0, 1, NULL},
        {"seed", 0, NODE_OPT_U64, &s->seed, "N", "same seed, same answer", 0, 0, NULL},
        {"stop", 0, NODE_OPT_LIST, &s->stop, "TEXT",
         "end the answer before this text; may be given 16 times", 0, 0, NULL},
        {"ignore-end", 0, NODE_OPT_FLAG, &s->ignore_end, NULL, "go on after the model's end tokens",
         0, 0, NULL},
        {"route", 0, NODE_OPT_CHOICE, &s->route, "NAME", "who computes the prompt", 0, 0, routes},
        {"ids", 0, NODE_OPT_FLAG, &s->ids, NULL,
         "TEXT is token ids with commas or white space between", 0, 0, NULL},
        {"special", 0, NODE_OPT_FLAG, &s->special, NULL,
         "marker strings in TEXT become control tokens", 0, 0, NULL},
        {"timeout", 0, NODE_OPT_FLOAT, &s->timeout_s, "SECONDS", "for the whole answer", 0.001,
         86400, NULL},
        {"stats", 0, NODE_OPT_FLAG, &s->stats, NULL,
         "print what it took, on stderr, when the answer is complete", 0, 0, NULL},
        {"json", 0, NODE_OPT_FLAG, &s->json, NULL,
         "print one JSON object a line: started, delta, ..., finished; or error", 0, 0, NULL},
        {"logits-digest", 0, NODE_OPT_FLAG, &s->logits_digest, NULL,
         "with --json: a hash of the logits that each token was drawn from", 0, 0, NULL},
    };

    return cli_options_parse(
        argc, argv, options, sizeof(options) / sizeof(options[0]),
        "baton generate --to HOST:PORT [option...] TEXT",
        "Answers TEXT on stdout as it is generated. Ctrl-C ends the call. TEXT \"-\" is what stdin "
        "holds, less one newline at its end; TEXT that begins with \"-\" stands behind \"--\".",
        first, done);
}

/* Flags that make no sense together.  NULL: none. */
static const char *contradiction(const struct settings *s)
{
    if (s->to == NULL)
        return "--to HOST:PORT is needed, the address of a decode node";
    if (s->ids && s->chat)
        return "--ids and --chat (or --system) exclude each other";
    if (s->logits_digest && !s->json)
        return "--logits-digest needs --json, which prints them";
    if (s->stop.n > MAX_STOPS)
        return "--stop may be given 16 times";
    for (size_t i = 0; i < s->stop.n; i++)
        if (s->stop.items[i][0] == '\0')
            return "--stop \"\": must not be empty";
    return NULL;
}

/* Not wrong, but perhaps not meant. */
static void note_no_effect(const struct settings *s)
{
    const char *name = s->seed != 0    ? "--seed"
                       : s->top_k != 0 ? "--top-k"
                       : s->top_p < 1  ? "--top-p"
                       : s->min_p > 0  ? "--min-p"
                                       : NULL;

    if (name != NULL && s->temperature <= 0)
        cli_say("note: %s has no effect without --temperature", name);
}

/* ---- The request ---- */

static Baton__V1__Route route_of(const char *name)
{
    int i = 0;

    while (strcmp(routes[i], name) != 0)
        i++;
    return (Baton__V1__Route)i;
}

/* The prompt of a request in the form that the settings ask for.  The text is borrowed; protobuf-c
 * writes to no string of a message that it only packs. */
struct prompt {
    Baton__V1__ChatMessage system, user;
    Baton__V1__ChatMessage *messages[2];
    Baton__V1__Chat chat;
    Baton__V1__TokenIds tokens; /* ids are owned */
};

static void init_message(Baton__V1__ChatMessage *m, const char *role, const char *content)
{
    baton__v1__chat_message__init(m);
    m->role = (char *)(uintptr_t)role;
    m->content = (char *)(uintptr_t)content;
}

/* 0, or an exit code, said. */
static int prompt_init(struct prompt *p, const struct settings *s, const char *text)
{
    baton__v1__chat__init(&p->chat);
    baton__v1__token_ids__init(&p->tokens);
    if (s->ids)
        return cli_parse_ids(text, &p->tokens.ids, &p->tokens.n_ids);
    init_message(&p->system, "system", s->system);
    init_message(&p->user, "user", text);
    p->messages[0] = &p->system;
    p->messages[1] = &p->user;
    p->chat.messages = s->system != NULL ? p->messages : p->messages + 1;
    p->chat.n_messages = s->system != NULL ? 2 : 1;
    return NODE_EXIT_OK;
}

static void prompt_release(struct prompt *p)
{
    free(p->tokens.ids);
}

static void set_sampling(const struct settings *s, Baton__V1__Sampling *sampling)
{
    baton__v1__sampling__init(sampling);
    sampling->temperature = s->temperature;
    sampling->top_k = s->top_k;
    sampling->optional_top_p_case = BATON__V1__SAMPLING__OPTIONAL_TOP_P_TOP_P;
    sampling->top_p = s->top_p;
    sampling->min_p = s->min_p;
    sampling->seed = s->seed;
}

static int make_request(const struct settings *s, const char *text, struct transport_out **out)
{
    Baton__V1__GenerateRequest r = BATON__V1__GENERATE_REQUEST__INIT;
    Baton__V1__Sampling sampling;
    struct prompt prompt;
    int rc;

    rc = prompt_init(&prompt, s, text);
    if (rc != NODE_EXIT_OK)
        return rc;
    if (s->chat) {
        r.prompt_case = BATON__V1__GENERATE_REQUEST__PROMPT_CHAT;
        r.chat = &prompt.chat;
    } else if (s->ids) {
        r.prompt_case = BATON__V1__GENERATE_REQUEST__PROMPT_TOKENS;
        r.tokens = &prompt.tokens;
    } else {
        r.prompt_case = BATON__V1__GENERATE_REQUEST__PROMPT_TEXT;
        r.text = (char *)(uintptr_t)text;
    }
    set_sampling(s, &sampling);
    r.sampling = &sampling;
    if (s->session != NULL)
        r.session = (char *)(uintptr_t)s->session;
    r.parse_special = s->special;
    if (s->max_tokens > 0) {
        r.optional_max_tokens_case = BATON__V1__GENERATE_REQUEST__OPTIONAL_MAX_TOKENS_MAX_TOKENS;
        r.max_tokens = s->max_tokens;
    }
    r.stop = (char **)(uintptr_t)s->stop.items;
    r.n_stop = s->stop.n;
    r.ignore_end = s->ignore_end;
    r.logits_digest = s->logits_digest;
    r.route = route_of(s->route);
    *out = node_message_pack(&r.base);
    prompt_release(&prompt);
    if (*out != NULL)
        return NODE_EXIT_OK;
    cli_say("no memory for the request");
    return NODE_EXIT_FAILED;
}

/* ---- The answer ---- */

struct answer {
    const struct settings *settings;
    struct cli_call *call;
    struct node_message started, finished; /* kept for --stats */
    bool output_failed;                    /* stdout is gone; main says so */
    bool no_reader;                        /* because its reader has what it wanted */
    bool line_open;                        /* the last character was no newline */
    int interrupted;                       /* by which signal; 0: none */
};

static bool write_text(struct answer *a, const char *text, size_t n)
{
    if (n == 0)
        return true;
    a->line_open = text[n - 1] != '\n';
    return fwrite(text, 1, n, stdout) == n && fflush(stdout) == 0;
}

static void take_reply(struct answer *a, struct node_message *m)
{
    const Baton__V1__GenerateReply *r = (const Baton__V1__GenerateReply *)m->message;
    bool ok = true;

    if (a->settings->json)
        ok = cli_json_line(cli_json_reply(r));
    else if (r->event_case == BATON__V1__GENERATE_REPLY__EVENT_DELTA)
        ok = write_text(a, r->delta->text, node_message_strlen(r->delta->text));
    if (!ok && !a->output_failed) {
        a->no_reader = errno == EPIPE;
        a->output_failed = true;
        cli_call_cancel(a->call);
    }
    if (r->event_case == BATON__V1__GENERATE_REPLY__EVENT_STARTED && a->started.message == NULL) {
        a->started = *m;
        m->message = NULL;
    } else if (r->event_case == BATON__V1__GENERATE_REPLY__EVENT_FINISHED &&
               a->finished.message == NULL) {
        a->finished = *m;
        m->message = NULL;
    }
}

/* Read the stream to its end.  0, or an exit code, said. */
static int read_replies(struct answer *a)
{
    struct transport_message *bytes;
    struct node_message m;
    struct kv_why why;
    int rc;

    while ((bytes = cli_call_next(a->call)) != NULL) {
        rc = node_message_unpack(&baton__v1__generate_reply__descriptor, bytes, &m, &why);
        transport_message_unref(bytes);
        if (rc < 0) {
            cli_say("the node's reply: %s", why.text);
            return NODE_EXIT_FAILED;
        }
        take_reply(a, &m);
        node_message_free(&m);
    }
    return NODE_EXIT_OK;
}

static int say_end(struct answer *a)
{
    const char *details;
    int code = cli_call_status(a->call, &details);
    cJSON *error;

    if (a->output_failed)
        return a->no_reader ? CLI_EXIT_NO_READER : NODE_EXIT_FAILED;
    if (code == TRANSPORT_OK && a->finished.message != NULL)
        return NODE_EXIT_OK;
    if (code == TRANSPORT_OK) {
        code = TRANSPORT_INTERNAL;
        details = "the stream ended without `finished`";
    }
    if (a->settings->json) {
        error = cJSON_CreateObject();
        cJSON_AddStringToObject(error, "event", "error");
        cJSON_AddStringToObject(error, "code", transport_status_name(code));
        cJSON_AddStringToObject(error, "message", details);
        cli_json_line(error);
    }
    if (a->interrupted != 0)
        return NODE_EXIT_INTERRUPTED;
    return cli_say_status(code, details);
}

static int read_answer(struct answer *a)
{
    const Baton__V1__GenerateReply *started, *finished;
    struct cli_interrupt interrupt;
    int rc = cli_interrupt_begin(&interrupt, a->call);

    if (rc != NODE_EXIT_OK)
        return rc;
    rc = read_replies(a);
    a->interrupted = cli_interrupt_end(&interrupt);
    if (a->line_open && !a->settings->json && !a->output_failed)
        write_text(a, "\n", 1);
    if (rc == NODE_EXIT_OK)
        rc = say_end(a);
    started = (const Baton__V1__GenerateReply *)a->started.message;
    finished = (const Baton__V1__GenerateReply *)a->finished.message;
    if (a->settings->stats && finished != NULL)
        cli_print_stats(started != NULL ? started->started : NULL, finished->finished);
    return rc;
}

static int run(const struct settings *s, struct transport_out *request)
{
    struct answer a = {.settings = s};
    int rc;

    rc = cli_call_open(&a.call, s->to, "/baton.v1.Decode/Generate", request,
                       cli_deadline_ms(s->timeout_s));
    if (rc != NODE_EXIT_OK)
        return rc;
    rc = read_answer(&a);
    cli_call_close(a.call);
    node_message_free(&a.started);
    node_message_free(&a.finished);
    return rc;
}

int cli_generate(int argc, char **argv)
{
    struct settings s = {.route = routes[0], .top_p = 1, .timeout_s = 600};
    struct transport_out *request = NULL;
    const char *wrong;
    char *text = NULL;
    int first, rc;
    size_t len;
    bool done;

    rc = parse(argc, argv, &s, &first, &done);
    if (done)
        return rc;
    s.chat = s.chat || s.system != NULL;
    wrong = contradiction(&s);
    if (wrong != NULL) {
        cli_say("generate: %s", wrong);
        return NODE_EXIT_USAGE;
    }
    if (!cli_one_argument(argc, first, "generate", "which text?",
                          "one TEXT at most: put it in quotes"))
        return NODE_EXIT_USAGE;
    /* Before signals are blocked: Ctrl-C must end a wait for stdin. */
    rc = cli_read_text(argv[first], &text, &len);
    if (rc != NODE_EXIT_OK)
        return rc;
    if (strlen(text) != len) {
        cli_say(
            "the text has a NUL byte at offset %zu; send it as token ids (baton tokenize --ids, "
            "baton generate --ids)",
            strlen(text));
        free(text);
        return NODE_EXIT_FAILED;
    }
    if (s.chat && len == 0) {
        cli_say("generate: TEXT is empty; a user's message must not be");
        free(text);
        return NODE_EXIT_USAGE;
    }
    note_no_effect(&s);
    node_signals_block();
    transport_start();
    rc = make_request(&s, text, &request);
    if (rc == NODE_EXIT_OK)
        rc = run(&s, request);
    transport_stop();
    free(text);
    return rc;
}

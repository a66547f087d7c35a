#include "cli/cli.h"

#include <inttypes.h>
#include <stdarg.h>
#include <string.h>

const char *cli_hex(char *buf, const uint8_t *bytes, size_t n)
{
    buf[0] = '\0';
    for (size_t i = 0; i < n; i++)
        snprintf(buf + 2 * i, 3, "%02x", bytes[i]);
    return buf;
}

/* ---- JSON ---- */

static cJSON *event(const char *name)
{
    cJSON *o = cJSON_CreateObject();

    cJSON_AddStringToObject(o, "event", name);
    return o;
}

static cJSON *started_json(const Baton__V1__Started *s)
{
    cJSON *o = event("started");

    cJSON_AddNumberToObject(o, "prompt_tokens", s->prompt_tokens);
    cJSON_AddNumberToObject(o, "reused_tokens", s->reused_tokens);
    cJSON_AddNumberToObject(o, "dropped_bytes", s->dropped_bytes);
    cJSON_AddStringToObject(o, "prefill", s->prefill);
    return o;
}

static cJSON *delta_json(const Baton__V1__Delta *d)
{
    cJSON *o = event("delta"), *list;
    char hex[17];

    cJSON_AddStringToObject(o, "text", d->text);
    list = cJSON_AddArrayToObject(o, "ids");
    for (size_t i = 0; i < d->n_ids; i++)
        cJSON_AddItemToArray(list, cJSON_CreateNumber(d->ids[i]));
    list = cJSON_AddArrayToObject(o, "logprobs");
    for (size_t i = 0; i < d->n_logprobs; i++)
        cJSON_AddItemToArray(list, cJSON_CreateNumber((double)d->logprobs[i]));
    if (d->n_logits_digests == 0)
        return o;
    /* As text: a JSON number keeps 53 bits. */
    list = cJSON_AddArrayToObject(o, "logits_digests");
    for (size_t i = 0; i < d->n_logits_digests; i++) {
        snprintf(hex, sizeof(hex), "%016" PRIx64, d->logits_digests[i]);
        cJSON_AddItemToArray(list, cJSON_CreateString(hex));
    }
    return o;
}

static void add_usage(cJSON *parent, const Baton__V1__Usage *u)
{
    cJSON *o = cJSON_AddObjectToObject(parent, "usage");

    cJSON_AddNumberToObject(o, "prompt_tokens", u->prompt_tokens);
    cJSON_AddNumberToObject(o, "reused_tokens", u->reused_tokens);
    cJSON_AddNumberToObject(o, "prefill_reused_tokens", u->prefill_reused_tokens);
    cJSON_AddNumberToObject(o, "received_tokens", u->received_tokens);
    cJSON_AddNumberToObject(o, "local_tokens", u->local_tokens);
    cJSON_AddNumberToObject(o, "generated_tokens", u->generated_tokens);
    cJSON_AddNumberToObject(o, "dropped_bytes", u->dropped_bytes);
    cJSON_AddNumberToObject(o, "frames", u->frames);
    cJSON_AddNumberToObject(o, "bytes", (double)u->bytes);
}

static void add_timings(cJSON *parent, const Baton__V1__Timings *t)
{
    cJSON *o = cJSON_AddObjectToObject(parent, "timings");

    cJSON_AddNumberToObject(o, "queue_ns", (double)t->queue_ns);
    cJSON_AddNumberToObject(o, "prefill_queue_ns", (double)t->prefill_queue_ns);
    cJSON_AddNumberToObject(o, "prefill_ns", (double)t->prefill_ns);
    cJSON_AddNumberToObject(o, "local_prefill_ns", (double)t->local_prefill_ns);
    cJSON_AddNumberToObject(o, "exposed_transfer_ns", (double)t->exposed_transfer_ns);
    cJSON_AddNumberToObject(o, "first_token_ns", (double)t->first_token_ns);
    cJSON_AddNumberToObject(o, "decode_ns", (double)t->decode_ns);
}

static const char *reason_name(Baton__V1__FinishReason reason)
{
    switch (reason) {
    case BATON__V1__FINISH_REASON__FINISH_STOP:
        return "stop";
    case BATON__V1__FINISH_REASON__FINISH_LENGTH:
        return "length";
    default:
        return "unspecified";
    }
}

static cJSON *finished_json(const Baton__V1__Finished *f)
{
    cJSON *o = event("finished");

    cJSON_AddStringToObject(o, "reason", reason_name(f->reason));
    cJSON_AddStringToObject(o, "stopped_by", f->stopped_by);
    cJSON_AddStringToObject(o, "fallback", f->fallback);
    if (f->usage != NULL)
        add_usage(o, f->usage);
    if (f->timings != NULL)
        add_timings(o, f->timings);
    return o;
}

cJSON *cli_json_reply(const Baton__V1__GenerateReply *reply)
{
    switch (reply->event_case) {
    case BATON__V1__GENERATE_REPLY__EVENT_STARTED:
        return started_json(reply->started);
    case BATON__V1__GENERATE_REPLY__EVENT_DELTA:
        return delta_json(reply->delta);
    case BATON__V1__GENERATE_REPLY__EVENT_FINISHED:
        return finished_json(reply->finished);
    default:
        return event("unknown");
    }
}

bool cli_json_line(cJSON *object)
{
    char *text = cJSON_PrintUnformatted(object);
    bool ok;

    cJSON_Delete(object);
    if (text == NULL)
        return false;
    ok = printf("%s\n", text) > 0 && fflush(stdout) == 0;
    cJSON_free(text);
    return ok;
}

/* ---- The table ---- */

enum { LABEL_WIDTH = 18, NUMBER_WIDTH = 12 };

static void __attribute__((format(printf, 3, 4)))
row(const char *label, const char *number, const char *fmt, ...)
{
    char text[768];
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    fprintf(stderr, "  %-*s %*s%s%s\n", LABEL_WIDTH, label, NUMBER_WIDTH, number,
            text[0] != '\0' ? " " : "", text);
}

static const char *count(char *buf, size_t n, uint64_t v)
{
    snprintf(buf, n, "%" PRIu64, v);
    return buf;
}

static const char *ms(char *buf, size_t n, uint64_t ns)
{
    snprintf(buf, n, "%.1f", (double)ns / 1e6);
    return buf;
}

static double per_second(uint64_t n, uint64_t ns)
{
    return ns == 0 ? 0 : (double)n * 1e9 / (double)ns;
}

/* "" for one, else "s". */
static const char *plural(uint64_t n)
{
    return n == 1 ? "" : "s";
}

/* Whether the reason to compute a prompt here is how nodes divide work, and no failure. */
static bool is_policy(const char *fallback)
{
    return strncmp(fallback, "a rest of ", 10) == 0;
}

static void print_prompt(const Baton__V1__Started *started, const Baton__V1__Finished *f)
{
    const Baton__V1__Usage *u = f->usage;
    char b[32], plain[512];

    row("prompt tokens", count(b, sizeof(b), u->prompt_tokens), "%s", "");
    if (started != NULL)
        row("prefill by",
            strcmp(started->prefill, "local") == 0
                ? "decode"
                : cli_plain(plain, sizeof(plain), started->prefill),
            "%s", "");
    row("reused", count(b, sizeof(b), u->reused_tokens),
        "from the prefix tree of decode, %u more from that of prefill", u->prefill_reused_tokens);
    row("received", count(b, sizeof(b), u->received_tokens), "from prefill");
    if (is_policy(f->fallback))
        row("computed here", count(b, sizeof(b), u->local_tokens), "because %s",
            cli_plain(plain, sizeof(plain), f->fallback));
    else
        row("computed here", count(b, sizeof(b), u->local_tokens), "by decode");
    if (u->dropped_bytes > 0)
        row("left out", count(b, sizeof(b), u->dropped_bytes), "byte%s that the vocabulary lacks",
            plural(u->dropped_bytes));
    row("bytes moved", count(b, sizeof(b), u->bytes), "in %u frame%s", u->frames,
        plural(u->frames));
}

/* Positions computed in the time that prefill took, on both nodes; 0: not known.  Where decode
 * reused some and prefill none, prefill had to compute those too, or some of them. */
static uint64_t n_computed(const Baton__V1__Usage *u, const Baton__V1__Timings *t)
{
    uint64_t n = t->local_prefill_ns > 0 ? u->local_tokens : 0;

    if (t->prefill_ns == 0)
        return n;
    if (u->reused_tokens > 0 && u->prefill_reused_tokens == 0)
        return 0;
    if (u->received_tokens > u->prefill_reused_tokens)
        n += u->received_tokens - u->prefill_reused_tokens;
    return n;
}

static void print_times(const Baton__V1__Usage *u, const Baton__V1__Timings *t)
{
    uint64_t prefill_ns = t->prefill_ns + t->local_prefill_ns, computed = n_computed(u, t);
    char b[32];

    if (computed > 0)
        row("prefill", ms(b, sizeof(b), prefill_ns), "ms, %.0f tokens/s",
            per_second(computed, prefill_ns));
    else
        row("prefill", ms(b, sizeof(b), prefill_ns), "ms");
    if (t->exposed_transfer_ns > 0)
        row("exposed transfer", ms(b, sizeof(b), t->exposed_transfer_ns), "ms, %.1f %% of prefill",
            100 * per_second(t->exposed_transfer_ns, t->prefill_ns) / 1e9);
    row("first token", ms(b, sizeof(b), t->first_token_ns), "ms after arrival");
    if (u->generated_tokens > 1)
        row("generated", count(b, sizeof(b), u->generated_tokens), "tokens, %.1f tokens/s",
            per_second(u->generated_tokens - 1, t->decode_ns));
    else
        row("generated", count(b, sizeof(b), u->generated_tokens), "token%s",
            plural(u->generated_tokens));
}

void cli_print_stats(const Baton__V1__Started *started, const Baton__V1__Finished *f)
{
    char quoted[512];

    fflush(stdout);
    if (f->usage != NULL)
        print_prompt(started, f);
    if (f->usage != NULL && f->timings != NULL)
        print_times(f->usage, f->timings);
    row("ended by", reason_name(f->reason), "%s",
        f->stopped_by[0] != '\0' ? node_quote(quoted, sizeof(quoted), f->stopped_by) : "");
    if (f->fallback[0] != '\0' && !is_policy(f->fallback))
        row("fallback", "", "%s", node_quote(quoted, sizeof(quoted), f->fallback));
}

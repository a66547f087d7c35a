#include "node_fixture.h"

#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

enum { MAX_ARGS = 48, START_MS = 60000, STOP_MS = 60000, LINE_BYTES = 512 };

/* ---- Processes ---- */

/* Nodes that run; a test that fails leaves them, and they must not outlive it. */
enum { MAX_NODES = 64 };
static pid_t running[MAX_NODES];

static void kill_running(void)
{
    for (int i = 0; i < MAX_NODES; i++) {
        if (running[i] != 0)
            kill(running[i], SIGKILL);
    }
}

static void note_started(pid_t pid)
{
    static bool registered;

    if (!registered)
        registered = atexit(kill_running) == 0;
    for (int i = 0; i < MAX_NODES; i++) {
        if (running[i] == 0) {
            running[i] = pid;
            return;
        }
    }
    ck_abort_msg("more than %d nodes", (int)MAX_NODES);
}

static void note_ended(pid_t pid)
{
    for (int i = 0; i < MAX_NODES; i++) {
        if (running[i] == pid)
            running[i] = 0;
    }
}

static void program_path(char *out, size_t n, const char *name)
{
    snprintf(out, n, "%s/%s/baton-%s", BATON_BINARY_DIR, name, name);
}

/* Start it with fd `from` of the child at *pipe_out. */
static pid_t spawn(const char *name, const char *const *args, bool listen, int from, int *pipe_out)
{
    char path[512];
    char *argv[MAX_ARGS];
    char listen_option[] = "--listen", listen_value[] = "127.0.0.1:0";
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attr;
    sigset_t none;
    int fds[2], n = 0;
    pid_t pid;

    program_path(path, sizeof(path), name);
    argv[n++] = path;
    if (listen) {
        argv[n++] = listen_option;
        argv[n++] = listen_value;
    }
    for (; *args != NULL && n < MAX_ARGS - 1; args++)
        argv[n++] = strdup(*args);
    argv[n] = NULL;
    ck_assert_int_eq(pipe2(fds, O_CLOEXEC), 0);
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, fds[1], from);
    /* The nodes block their signals themselves; nothing of ours is to be inherited. */
    posix_spawnattr_init(&attr);
    sigemptyset(&none);
    posix_spawnattr_setsigmask(&attr, &none);
    posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSIGMASK);
    ck_assert_msg(posix_spawn(&pid, path, &actions, &attr, argv, environ) == 0, "%s: %s", path,
                  strerror(errno));
    posix_spawnattr_destroy(&attr);
    posix_spawn_file_actions_destroy(&actions);
    note_started(pid);
    close(fds[1]);
    for (int i = listen ? 3 : 1; i < n; i++)
        free(argv[i]);
    *pipe_out = fds[0];
    return pid;
}

static void read_line(int fd, char *out, size_t n)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};
    size_t got = 0;

    out[0] = '\0';
    while (got + 1 < n && poll(&p, 1, START_MS) == 1) {
        if (read(fd, out + got, 1) != 1)
            break;
        out[++got] = '\0';
        if (out[got - 1] == '\n')
            break;
    }
}

void fixture_start(struct fixture_node *node, const char *name, const char *const *args)
{
    struct transport_channel_config config = {.target = node->address};
    char line[LINE_BYTES], service[64];
    const char *colon;
    int fd;

    memset(node, 0, sizeof(*node));
    node->pid = spawn(name, args, true, STDOUT_FILENO, &fd);
    read_line(fd, line, sizeof(line));
    close(fd);
    colon = strrchr(line, ':');
    ck_assert_msg(colon != NULL && strstr(line, "listening on") != NULL, "%s said: %s", name, line);
    node->port = atoi(colon + 1);
    snprintf(node->address, sizeof(node->address), "127.0.0.1:%d", node->port);
    ck_assert_int_eq(transport_channel_open(&config, &node->channel, NULL), 0);
    snprintf(service, sizeof(service), "baton.v1.%s",
             strcmp(name, "prefill") == 0 ? "Prefill" : "Decode");
    for (int i = 0; i < 200 && transport_health(node->channel, service, 5000) != 1; i++)
        usleep(20000);
    ck_assert_int_eq(transport_health(node->channel, service, 5000), 1);
}

static int wait_exit(pid_t pid)
{
    int status = 0;

    for (int ms = 0; ms < STOP_MS; ms += 10) {
        if (waitpid(pid, &status, WNOHANG) == pid) {
            note_ended(pid);
            return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
        }
        usleep(10000);
    }
    kill(pid, SIGKILL);
    waitpid(pid, &status, 0);
    note_ended(pid);
    return -1;
}

int fixture_stop(struct fixture_node *node)
{
    int rc;

    if (node->pid == 0)
        return 0;
    kill(node->pid, SIGTERM);
    rc = wait_exit(node->pid);
    node->pid = 0;
    transport_channel_close(node->channel);
    return rc;
}

void fixture_kill(struct fixture_node *node)
{
    kill(node->pid, SIGKILL);
    wait_exit(node->pid);
    node->pid = 0;
    transport_channel_close(node->channel);
}

int fixture_run(const char *name, const char *const *args, char *err, size_t n)
{
    size_t got = 0;
    int fd;
    pid_t pid = spawn(name, args, false, STDERR_FILENO, &fd);
    struct pollfd p = {.fd = fd, .events = POLLIN};

    while (got + 1 < n && poll(&p, 1, START_MS) == 1) {
        ssize_t k = read(fd, err + got, n - 1 - got);
        if (k <= 0)
            break;
        got += (size_t)k;
    }
    err[got] = '\0';
    close(fd);
    return wait_exit(pid);
}

const char *fixture_tiny(const char *name)
{
    static char path[512];

    snprintf(path, sizeof(path), "%s/tests/tiny/%s.gguf", BATON_BINARY_DIR, name);
    return path;
}

/* ---- Answers ---- */

static bool valid_utf8(const char *s)
{
    const unsigned char *p = (const unsigned char *)s;

    while (*p != '\0') {
        int n = *p < 0x80 ? 0 : (*p >> 5) == 6 ? 1 : (*p >> 4) == 14 ? 2 : (*p >> 3) == 30 ? 3 : -1;
        if (n < 0)
            return false;
        for (p++; n > 0; n--, p++) {
            if ((*p & 0xc0) != 0x80)
                return false;
        }
    }
    return true;
}

static void take_started(struct answer *a, const Baton__V1__Started *s)
{
    a->started = true;
    a->n_started++;
    snprintf(a->prefill, sizeof(a->prefill), "%s", s->prefill);
}

static void take_delta(struct answer *a, const Baton__V1__Delta *d)
{
    size_t n = strlen(d->text);

    a->n_deltas++;
    a->utf8 = a->utf8 && valid_utf8(d->text);
    if (a->n_text + n < sizeof(a->text)) {
        memcpy(a->text + a->n_text, d->text, n + 1);
        a->n_text += n;
    }
    for (size_t i = 0; i < d->n_ids && a->n_ids < ANSWER_IDS; i++) {
        a->logprobs[a->n_ids] = i < d->n_logprobs ? d->logprobs[i] : 0;
        a->ids[a->n_ids++] = d->ids[i];
    }
    for (size_t i = 0; i < d->n_logits_digests && a->n_digests < ANSWER_IDS; i++)
        a->digests[a->n_digests++] = d->logits_digests[i];
}

static void take_finished(struct answer *a, const Baton__V1__Finished *f)
{
    a->finished = true;
    a->n_finished++;
    a->reason = (int)f->reason;
    snprintf(a->stopped_by, sizeof(a->stopped_by), "%s", f->stopped_by);
    snprintf(a->fallback, sizeof(a->fallback), "%s", f->fallback);
    a->usage = *f->usage;
    a->timings = *f->timings;
}

static void on_message(void *user, struct transport_request *r, struct transport_message *m)
{
    struct asking *a = user;
    Baton__V1__GenerateReply *reply = baton__v1__generate_reply__unpack(
        NULL, transport_message_bytes(m), transport_message_flat(m));

    pthread_mutex_lock(&a->lock);
    if (reply != NULL && reply->event_case == BATON__V1__GENERATE_REPLY__EVENT_STARTED)
        take_started(&a->answer, reply->started);
    else if (reply != NULL && reply->event_case == BATON__V1__GENERATE_REPLY__EVENT_DELTA)
        take_delta(&a->answer, reply->delta);
    else if (reply != NULL && reply->event_case == BATON__V1__GENERATE_REPLY__EVENT_FINISHED)
        take_finished(&a->answer, reply->finished);
    pthread_cond_broadcast(&a->changed);
    pthread_mutex_unlock(&a->lock);
    if (reply != NULL)
        baton__v1__generate_reply__free_unpacked(reply, NULL);
    if (!a->hold)
        transport_request_next(r);
}

static void on_end(void *user, struct transport_request *r, int code, const char *details)
{
    struct asking *a = user;

    (void)r;
    pthread_mutex_lock(&a->lock);
    a->answer.status = code;
    snprintf(a->answer.details, sizeof(a->answer.details), "%s", details);
    a->over = true;
    pthread_cond_broadcast(&a->changed);
    pthread_mutex_unlock(&a->lock);
}

void asking_start(struct asking *a, const struct fixture_node *node,
                  const Baton__V1__GenerateRequest *q, int64_t deadline_ms)
{
    static const struct transport_request_events events = {.on_message = on_message,
                                                           .on_end = on_end};
    bool hold = a->hold;
    struct transport_out *out = node_message_pack(&q->base);

    memset(a, 0, sizeof(*a));
    a->hold = hold;
    a->answer.utf8 = true;
    pthread_mutex_init(&a->lock, NULL);
    pthread_cond_init(&a->changed, NULL);
    ck_assert_ptr_nonnull(out);
    ck_assert_int_eq(transport_request_start(node->channel, "/baton.v1.Decode/Generate", out,
                                             deadline_ms, true, &events, a, &a->request),
                     0);
}

void asking_wait(struct asking *a)
{
    pthread_mutex_lock(&a->lock);
    while (!a->over)
        pthread_cond_wait(&a->changed, &a->lock);
    pthread_mutex_unlock(&a->lock);
    transport_request_unref(a->request);
    a->request = NULL;
}

void asking_wait_ids(struct asking *a, size_t n)
{
    pthread_mutex_lock(&a->lock);
    while (!a->over && a->answer.n_ids < n)
        pthread_cond_wait(&a->changed, &a->lock);
    pthread_mutex_unlock(&a->lock);
}

void asking_cancel(struct asking *a)
{
    transport_request_cancel(a->request);
}

void ask(const struct fixture_node *node, const Baton__V1__GenerateRequest *q, struct answer *out)
{
    struct asking *a = calloc(1, sizeof(*a));

    ck_assert_ptr_nonnull(a);
    asking_start(a, node, q, 60000);
    asking_wait(a);
    *out = a->answer;
    free(a);
}

/* ---- Questions ---- */

static void question_init(struct question *q, uint32_t max_tokens, int route)
{
    baton__v1__generate_request__init(&q->q);
    baton__v1__sampling__init(&q->sampling);
    q->q.sampling = &q->sampling;
    q->q.optional_max_tokens_case = BATON__V1__GENERATE_REQUEST__OPTIONAL_MAX_TOKENS_MAX_TOKENS;
    q->q.max_tokens = max_tokens;
    q->q.logits_digest = true;
    q->q.ignore_end = true;
    q->q.route = (Baton__V1__Route)route;
}

void question_ids(struct question *q, uint32_t *ids, size_t n, uint32_t max_tokens, int route)
{
    question_init(q, max_tokens, route);
    baton__v1__token_ids__init(&q->tokens);
    q->tokens.ids = ids;
    q->tokens.n_ids = n;
    q->q.prompt_case = BATON__V1__GENERATE_REQUEST__PROMPT_TOKENS;
    q->q.tokens = &q->tokens;
}

/* protobuf-c takes strings that it only reads without const. */
static char *borrowed(const char *s)
{
    char *p;

    memcpy(&p, &s, sizeof(p));
    return p;
}

void question_text(struct question *q, const char *text, uint32_t max_tokens, int route)
{
    question_init(q, max_tokens, route);
    q->q.prompt_case = BATON__V1__GENERATE_REQUEST__PROMPT_TEXT;
    q->q.text = borrowed(text);
}

void question_chat(struct question *q, const char *text, uint32_t max_tokens, int route)
{
    static char user[] = "user";

    question_init(q, max_tokens, route);
    baton__v1__chat_message__init(&q->message);
    q->message.role = user;
    q->message.content = borrowed(text);
    q->messages[0] = &q->message;
    baton__v1__chat__init(&q->chat);
    q->chat.n_messages = 1;
    q->chat.messages = q->messages;
    q->q.prompt_case = BATON__V1__GENERATE_REQUEST__PROMPT_CHAT;
    q->q.chat = &q->chat;
}

void fixture_ids(uint32_t *ids, size_t n, uint32_t seed, uint32_t n_vocab)
{
    uint32_t x = seed * 2654435761u + 12345u;

    for (size_t i = 0; i < n; i++) {
        x = x * 1664525u + 1013904223u;
        ids[i] = (x >> 8) % n_vocab;
    }
}

/* ---- Describe ---- */

void describe(const struct fixture_node *node, struct description *out)
{
    Baton__V1__DescribeRequest q = BATON__V1__DESCRIBE_REQUEST__INIT;
    struct transport_message *m = NULL;
    Baton__V1__DescribeReply *r;
    char details[TRANSPORT_DETAIL_BYTES];
    int rc = transport_unary(node->channel, "/baton.v1.Decode/Describe", node_message_pack(&q.base),
                             10000, true, &m, details);

    ck_assert_msg(rc == TRANSPORT_OK, "Describe: %s: %s", transport_status_name(rc), details);
    r = baton__v1__describe_reply__unpack(NULL, transport_message_bytes(m),
                                          transport_message_flat(m));
    ck_assert_ptr_nonnull(r);
    *out = (struct description){.n_ctx = r->n_ctx,
                                .n_vocab = r->n_vocab,
                                .running = r->running,
                                .queued = r->queued,
                                .sessions = r->sessions,
                                .n_serving = (uint32_t)r->n_prefill_serving,
                                .total = r->pages->total,
                                .free = r->pages->free,
                                .live = r->pages->live,
                                .reserved = r->pages->reserved,
                                .evictable = r->pages->evictable};
    baton__v1__describe_reply__free_unpacked(r, NULL);
    transport_message_unref(m);
}

bool wait_idle(const struct fixture_node *node, struct description *out)
{
    for (int i = 0; i < 500; i++) {
        describe(node, out);
        if (out->running == 0 && out->queued == 0 && out->reserved == 0 &&
            out->live == out->evictable && out->free + out->live == out->total)
            return true;
        usleep(20000);
    }
    return false;
}

bool wait_serving(const struct fixture_node *node, uint32_t n)
{
    struct description d;

    for (int i = 0; i < 500; i++) {
        describe(node, &d);
        if (d.n_serving == n)
            return true;
        usleep(20000);
    }
    return false;
}

/* ---- Audits ---- */

static void ask_audit(const struct fixture_node *node, struct audit *out)
{
    Baton__V1__AuditRequest q = BATON__V1__AUDIT_REQUEST__INIT;
    struct transport_message *m = NULL;
    Baton__V1__AuditReply *r;

    memset(out, 0, sizeof(*out));
    out->status = transport_unary(node->channel, "/baton.v1.Operator/Audit",
                                  node_message_pack(&q.base), 30000, true, &m, out->details);
    if (out->status != TRANSPORT_OK)
        return;
    r = baton__v1__audit_reply__unpack(NULL, transport_message_bytes(m), transport_message_flat(m));
    if (r != NULL && r->pages != NULL) {
        snprintf(out->fault, sizeof(out->fault), "%s", r->fault);
        out->total = r->pages->total;
        out->free = r->pages->free;
        out->live = r->pages->live;
        out->contexts = r->contexts;
        out->entries = r->entries;
    } else {
        snprintf(out->fault, sizeof(out->fault), "the reply is no AuditReply");
    }
    baton__v1__audit_reply__free_unpacked(r, NULL);
    transport_message_unref(m);
}

static bool held(const struct audit *a)
{
    return a->status == TRANSPORT_OK && a->fault[0] == '\0' && a->free + a->live == a->total;
}

static void must_hold(const struct audit *a)
{
    ck_assert_msg(held(a), "audit: %s %s%s, %u free and %u live of %u",
                  transport_status_name(a->status), a->details, a->fault, a->free, a->live,
                  a->total);
}

void audit(const struct fixture_node *node, struct audit *out)
{
    ask_audit(node, out);
    must_hold(out);
}

static void *audit_on(void *arg)
{
    struct auditing *a = arg;

    do {
        ask_audit(a->node, &a->last);
        a->n++;
    } while (held(&a->last) && !atomic_load(&a->enough));
    return NULL;
}

void auditing_start(struct auditing *a, const struct fixture_node *node)
{
    memset(a, 0, sizeof(*a));
    a->node = node;
    ck_assert_int_eq(pthread_create(&a->thread, NULL, audit_on, a), 0);
}

uint32_t auditing_stop(struct auditing *a)
{
    atomic_store(&a->enough, true);
    pthread_join(a->thread, NULL);
    must_hold(&a->last);
    return a->n;
}

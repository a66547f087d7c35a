/* Rounds of the scheduler.  Each takes in what was left in the inbox, ends requests whose caller is
 * gone or does not keep up, admits from the front of those that wait, and runs one step: one row of
 * every request that runs and whose reader keeps up, and one chunk of one prompt, sized so that the
 * others keep their pace.
 *
 * Pages: a request reserves its prompt and its whole answer when it is admitted, so a step cannot
 * fail for want of them, and nobody who holds pages waits for more. */
#include "decode/decode_scheduler.h"

#include "decode/decode_flight.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

int decode_scheduler_open(struct decode_node *node, struct decode_scheduler **out)
{
    struct decode_scheduler *s = calloc(1, sizeof(*s));

    if (s == NULL)
        return -1;
    s->node = node;
    s->n_vocab = model_params(node->runtime.model)->n_vocab;
    s->n_slots = node->options->max_batch;
    s->items = calloc(s->n_slots, sizeof(*s->items));
    s->owners = calloc(s->n_slots, sizeof(*s->owners));
    s->taken = calloc(s->n_slots, sizeof(*s->taken));
    s->logits = calloc((size_t)s->n_slots * s->n_vocab, sizeof(*s->logits));
    s->requests = calloc(node->max_requests, sizeof(*s->requests));
    if (s->items == NULL || s->owners == NULL || s->taken == NULL || s->logits == NULL ||
        s->requests == NULL || sampler_open(s->n_vocab, &s->sampler) < 0) {
        decode_scheduler_close(s);
        return -1;
    }
    *out = s;
    return 0;
}

void decode_scheduler_close(struct decode_scheduler *s)
{
    if (s == NULL)
        return;
    assert(s->n_requests == 0);
    sampler_close(s->sampler);
    free(s->items);
    free(s->owners);
    free(s->taken);
    free(s->logits);
    free(s->requests);
    free(s);
}

/* ---- Ends ---- */

static bool has_slot(const struct decode_request *r)
{
    return r->state == DECODE_RECEIVING || r->state == DECODE_PREFILLING ||
           r->state == DECODE_RUNNING;
}

static void free_slot(struct decode_scheduler *s, struct decode_request *r)
{
    assert(s->taken[r->slot]);
    s->taken[r->slot] = false;
    atomic_fetch_sub(&s->node->n_running, 1);
}

void decode_scheduler_drop(struct decode_scheduler *s, struct decode_request *r, bool keep)
{
    struct decode_landing landing;

    if (r->flight != NULL) {
        decode_flight_take(r->flight, &landing);
        r->flight = NULL;
        r->ctx = landing.ctx;
    }
    if (keep && r->ctx != NULL)
        kv_context_give_up(r->ctx, NULL, 0);
    else
        kv_context_close(r->ctx);
    r->ctx = NULL;
    free_slot(s, r);
}

/* Its place in the table is emptied; the round goes on over it. */
static void forget(struct decode_scheduler *s, struct decode_request *r)
{
    for (uint32_t i = 0; i < s->n_requests; i++) {
        if (s->requests[i] == r)
            s->requests[i] = NULL;
    }
    decode_request_unref(r);
}

void decode_scheduler_fail(struct decode_scheduler *s, struct decode_request *r, int status,
                           const char *details)
{
    if (r->state == DECODE_WAITING)
        atomic_fetch_sub(&s->node->n_waiting, 1);
    if (r->state != DECODE_DRAINING)
        decode_request_log(r, status, details);
    if (has_slot(r))
        decode_scheduler_drop(s, r, false);
    decode_sessions_give_back(&s->node->sessions, r->session, NULL, NULL, 0);
    r->session = NULL;
    transport_call_abort(r->call, status, details);
    forget(s, r);
}

void decode_scheduler_finish(struct decode_scheduler *s, struct decode_request *r, size_t keep_ids)
{
    uint32_t length = kv_context_length(r->ctx);

    decode_request_log(r, TRANSPORT_OK, NULL);
    if (length > keep_ids)
        kv_context_truncate(r->ctx, (uint32_t)keep_ids);
    decode_scheduler_drop(s, r, true);
    r->ids.n = keep_ids;
    decode_sessions_give_back(&s->node->sessions, r->session, &r->ids, r->q->salt.data,
                              r->q->salt.len);
    r->session = NULL;
    r->state = DECODE_DRAINING;
    r->blocked_ns = node_now_ns();
    transport_call_finish(r->call, TRANSPORT_OK, NULL);
}

/* ---- What comes from outside ---- */

static bool has_room(const struct decode_request *r)
{
    return transport_call_queued(r->call) <= DECODE_PAUSE_BYTES;
}

static void stalled(struct decode_scheduler *s, struct decode_request *r)
{
    struct kv_why why;

    kv_fail(&why, 0, "the reader took nothing for %d ms; %" PRIu32 " tokens were generated",
            (int)DECODE_STALL_MS, r->usage.generated);
    decode_scheduler_fail(s, r, TRANSPORT_RESOURCE_EXHAUSTED, why.text);
}

static void look_at(struct decode_scheduler *s, struct decode_request *r, int64_t now)
{
    if (r->state == DECODE_DRAINING && transport_call_queued(r->call) == 0) {
        forget(s, r);
        return;
    }
    if (now >= r->deadline_ns) {
        decode_scheduler_fail(s, r, TRANSPORT_DEADLINE_EXCEEDED, "the deadline has passed");
        return;
    }
    if (transport_call_cancelled(r->call)) {
        decode_scheduler_fail(s, r, TRANSPORT_CANCELLED, "the caller is gone");
        return;
    }
    if (r->state != DECODE_DRAINING) {
        if (has_room(r))
            r->blocked_ns = 0;
        else if (r->blocked_ns == 0)
            r->blocked_ns = now;
    }
    if (r->blocked_ns != 0 && now - r->blocked_ns > DECODE_STALL_MS * INT64_C(1000000))
        stalled(s, r);
}

static void sweep(struct decode_scheduler *s)
{
    int64_t now = node_now_ns();

    for (uint32_t i = 0; i < s->n_requests; i++) {
        if (s->requests[i] != NULL)
            look_at(s, s->requests[i], now);
    }
}

static void compact(struct decode_scheduler *s)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < s->n_requests; i++) {
        if (s->requests[i] != NULL)
            s->requests[n++] = s->requests[i];
    }
    s->n_requests = n;
}

static void take_request(struct decode_scheduler *s, struct decode_request *r)
{
    r->state = DECODE_WAITING;
    if (s->n_requests < s->node->max_requests)
        s->requests[s->n_requests++] = r;
    else
        decode_scheduler_fail(s, r, TRANSPORT_RESOURCE_EXHAUSTED, "too many calls");
}

/* Between two steps: the few milliseconds of one more row. */
static void compute_seed(struct decode_scheduler *s, struct decode_seed *seed)
{
    struct engine_item item = {.ctx = seed->ctx, .ids = &seed->id, .n_ids = 1};

    seed->rc = engine_step(s->node->runtime.engine, &item, 1);
    if (seed->rc == 0)
        seed->rc = item.rc;
    node_inbox_put(seed->back, &seed->done);
}

static void take_in(struct decode_scheduler *s, int timeout_ms)
{
    struct node_link *link = node_inbox_take(&s->node->inbox, timeout_ms), *next;

    for (; link != NULL; link = next) {
        struct decode_mail *mail = (struct decode_mail *)link;
        struct decode_request *r = mail->item;

        next = link->next;
        if (mail->kind == DECODE_MAIL_REQUEST) {
            take_request(s, r);
            continue;
        }
        if (mail->kind == DECODE_MAIL_SEED) {
            compute_seed(s, mail->item);
            continue;
        }
        r = decode_flight_arrived(mail->item);
        if (r != NULL)
            decode_route_landed(s, r);
    }
}

/* In order: nobody passes a request that waits for pages. */
static void admit(struct decode_scheduler *s)
{
    for (uint32_t i = 0; i < s->n_requests; i++) {
        struct decode_request *r = s->requests[i];

        if (r != NULL && r->state == DECODE_WAITING && !decode_route_admit(s, r))
            return;
    }
}

/* ---- A step ---- */

static bool runs(const struct decode_request *r)
{
    return r != NULL && r->state == DECODE_RUNNING && r->blocked_ns == 0;
}

static uint32_t rows_left(const struct decode_request *r)
{
    return r->n_prompt - kv_context_length(r->ctx);
}

/* The prompt whose turn it is: the one with the fewest rows left, less those that were computed for
 * others since its last chunk. */
static struct decode_request *prompt_turn(const struct decode_scheduler *s)
{
    struct decode_request *best = NULL;
    int64_t best_key = 0;

    for (uint32_t i = 0; i < s->n_requests; i++) {
        struct decode_request *r = s->requests[i];
        int64_t key;

        if (r == NULL || r->state != DECODE_PREFILLING)
            continue;
        key = (int64_t)rows_left(r) - (int64_t)r->waited_rows;
        if (best == NULL || key < best_key) {
            best = r;
            best_key = key;
        }
    }
    return best;
}

static void add_item(struct decode_scheduler *s, uint32_t *n, struct decode_request *r,
                     uint32_t n_ids, bool logits)
{
    uint32_t length = kv_context_length(r->ctx);

    s->items[*n] = (struct engine_item){
        .ctx = r->ctx,
        .ids = r->ids.ids + length,
        .n_ids = n_ids,
        .logits = logits ? decode_slot_logits(s, r) : NULL,
    };
    s->owners[*n] = r;
    ++*n;
}

static uint32_t gather_step(struct decode_scheduler *s)
{
    struct decode_request *prompt = prompt_turn(s);
    uint32_t n = 0, chunk;

    for (uint32_t i = 0; i < s->n_requests; i++) {
        if (runs(s->requests[i])) {
            assert(kv_context_length(s->requests[i]->ctx) + 1 == s->requests[i]->ids.n);
            add_item(s, &n, s->requests[i], 1, true);
        }
    }
    if (prompt == NULL)
        return n;
    chunk = runtime_chunk(&s->node->runtime, n > 0 ? DECODE_SHARED_STEP_MS : RUNTIME_STEP_MS);
    if (chunk > rows_left(prompt))
        chunk = rows_left(prompt);
    add_item(s, &n, prompt, chunk, chunk == rows_left(prompt));
    return n;
}

static void after_chunk(struct decode_scheduler *s, struct decode_request *r, uint32_t n_rows)
{
    r->usage.local += n_rows;
    r->waited_rows = 0;
    for (uint32_t i = 0; i < s->n_requests; i++) {
        struct decode_request *other = s->requests[i];

        if (other != NULL && other != r && other->state == DECODE_PREFILLING)
            other->waited_rows += n_rows;
    }
    if (rows_left(r) == 0)
        decode_token_first(s, r);
}

static void after_item(struct decode_scheduler *s, const struct engine_item *item,
                       struct decode_request *r)
{
    if (item->rc < 0)
        decode_scheduler_fail(s, r, TRANSPORT_INTERNAL, item->why.text);
    else if (r->state == DECODE_PREFILLING)
        after_chunk(s, r, item->n_ids);
    else
        decode_token_next(s, r);
}

/* A chunk of a prompt alone says how fast prompts go; beside others the step is theirs as well. */
static void note_speed(struct decode_scheduler *s, uint32_t n, int64_t ns)
{
    if (n == 1 && s->owners[0]->state == DECODE_PREFILLING)
        runtime_took(&s->node->runtime, s->items[0].n_ids, ns);
}

static void step(struct decode_scheduler *s)
{
    uint32_t n = gather_step(s);
    int64_t start = node_now_ns();
    int rc;

    if (n == 0)
        return;
    rc = engine_step(s->node->runtime.engine, s->items, n);
    if (rc == 0)
        note_speed(s, n, node_now_ns() - start);
    for (uint32_t i = 0; i < n; i++) {
        if (rc < 0)
            decode_scheduler_fail(s, s->owners[i], TRANSPORT_INTERNAL, model_strerror(rc));
        else
            after_item(s, &s->items[i], s->owners[i]);
    }
}

/* 0 where there is something to compute. */
static int patience_ms(const struct decode_scheduler *s)
{
    if (prompt_turn(s) != NULL)
        return 0;
    for (uint32_t i = 0; i < s->n_requests; i++) {
        if (runs(s->requests[i]))
            return 0;
    }
    return s->n_requests > 0 ? DECODE_TICK_MS : -1;
}

void *decode_scheduler_run(void *arg)
{
    struct decode_scheduler *s = arg;

    while (!atomic_load(&s->node->stopping) || s->n_requests > 0) {
        take_in(s, patience_ms(s));
        sweep(s);
        admit(s);
        step(s);
        compact(s);
    }
    return NULL;
}

/* The scheduler: one thread that owns the engine and all live contexts.
 *
 * Each round it takes in new jobs, ends those whose caller is gone or does not keep up, admits from
 * the front of the queue (match and reservation of the whole prompt in one step, so that a job that
 * runs can always finish), computes one chunk of one job, and sends what is ready to be sent.
 *
 * Whose turn it is: the job with the fewest rows left, less the rows that were computed for others
 * since its last turn.  So a short prompt passes a long one, and a long one is not passed for ever.
 *
 * Chunks: as many rows as take RUNTIME_STEP_MS, but the last ones become smaller (64, then 32), so
 * that little is left to send when the last kernel ends.  Exactness (P1) makes that free of effect.
 */
#include "prefill/prefill_node.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { LAST_ROWS = 32, BEFORE_LAST_ROWS = 64 };

struct scheduler {
    struct prefill_node *node;
    struct prefill_job **jobs; /* the node's, in order of arrival */
    uint32_t n_jobs;
};

/* ---- Ends ---- */

/* The job is out of the table after this. */
static void end_job(struct prefill_job *job, int status, const char *details)
{
    if (job->state == PREFILL_QUEUED)
        atomic_fetch_sub(&job->node->n_queued, 1);
    prefill_job_drop(job);
    prefill_job_log(job, status, details);
    if (status == TRANSPORT_OK)
        transport_call_finish(job->call, status, NULL);
    else
        transport_call_abort(job->call, status, details);
    prefill_job_unref(job);
}

/* Whether the job is over for a reason outside of it. */
static bool end_if_over(struct prefill_job *job, int64_t now)
{
    struct kv_why why;

    if (job->state == PREFILL_DRAINING && transport_call_queued(job->call) == 0) {
        end_job(job, TRANSPORT_OK, NULL);
        return true;
    }
    if (now >= job->deadline_ns) {
        end_job(job, TRANSPORT_DEADLINE_EXCEEDED, "the deadline has passed");
        return true;
    }
    if (transport_call_cancelled(job->call)) {
        end_job(job, TRANSPORT_CANCELLED, "the caller is gone");
        return true;
    }
    if (job->blocked_ns != 0 && now - job->blocked_ns > PREFILL_STALL_MS * INT64_C(1000000)) {
        kv_fail(&why, 0, "the receiver took nothing for %d ms", (int)PREFILL_STALL_MS);
        end_job(job, TRANSPORT_RESOURCE_EXHAUSTED, why.text);
        return true;
    }
    return false;
}

static void sweep(struct scheduler *s)
{
    int64_t now = node_now_ns();
    uint32_t n = 0;

    for (uint32_t i = 0; i < s->n_jobs; i++) {
        if (!end_if_over(s->jobs[i], now))
            s->jobs[n++] = s->jobs[i];
    }
    s->n_jobs = n;
}

static void remove_at(struct scheduler *s, uint32_t i)
{
    s->n_jobs--;
    memmove(&s->jobs[i], &s->jobs[i + 1], (s->n_jobs - i) * sizeof(*s->jobs));
}

static void fail_at(struct scheduler *s, uint32_t i, int status, const char *details)
{
    struct prefill_job *job = s->jobs[i];

    remove_at(s, i);
    end_job(job, status, details);
}

/* ---- Admission ---- */

/* The whole prompt is computed: from here on the context only leaves, and others may start from it.
 */
static void to_sending(struct prefill_job *job)
{
    uint32_t n_vocab = model_params(job->node->runtime.model)->n_vocab;
    int rc;

    job->compute_end_ns = node_now_ns();
    job->compute_end_wall_ns = node_wall_ns();
    job->state = PREFILL_SENDING;
    rc = kv_context_freeze(job->ctx);
    if (rc == 0)
        rc = kv_context_publish(job->ctx, job->logits, n_vocab);
    if (rc < 0)
        node_log(NODE_WARN, "publish", "error=\"%s\" positions=%" PRIu32, kv_strerror(rc),
                 kv_context_length(job->ctx));
}

/* 0 or a kv_error. */
static int match(struct prefill_job *job, struct kv_match *out)
{
    struct runtime *rt = &job->node->runtime;
    uint32_t n_ids = (uint32_t)job->request->n_ids;
    uint32_t n_vocab = model_params(rt->model)->n_vocab;
    int rc;

    job->logits = malloc(n_vocab * sizeof(float));
    if (job->logits == NULL)
        return KV_ERR_NOMEM;
    rc = kv_cache_match(rt->cache, &job->ns, job->request->ids, n_ids, n_ids, job->logits, n_vocab,
                        &job->ctx, out);
    if (rc < 0) {
        free(job->logits);
        job->logits = NULL;
    }
    return rc;
}

/* TRANSPORT_OK, or a status to end the job with; 1 where it has to wait for pages. */
static int admit_job(struct scheduler *s, struct prefill_job *job, struct kv_why *why)
{
    struct kv_match m;
    bool alone = true;
    int rc;

    for (uint32_t i = 0; i < s->n_jobs; i++)
        alone = alone && s->jobs[i]->ctx == NULL;
    rc = match(job, &m);
    if (rc == KV_ERR_FULL && !alone)
        return -1;
    if (rc < 0)
        return kv_fail(why, TRANSPORT_RESOURCE_EXHAUSTED, "pages for %zu positions: %s",
                       job->request->n_ids, kv_strerror(rc));
    atomic_fetch_sub(&s->node->n_queued, 1);
    job->admitted_ns = node_now_ns();
    job->n_matched = m.n_matched;
    job->state = PREFILL_COMPUTING;
    rc = prefill_job_begin_stream(job, why);
    if (rc == TRANSPORT_OK && m.n_matched == job->request->n_ids)
        to_sending(job);
    return rc;
}

static void admit(struct scheduler *s)
{
    struct kv_why why = {.text = ""};

    for (uint32_t i = 0; i < s->n_jobs;) {
        int rc = 0;

        if (s->jobs[i]->state == PREFILL_QUEUED)
            rc = admit_job(s, s->jobs[i], &why);
        if (rc < 0)
            return; /* in order: nobody passes a job that waits for pages */
        if (rc > 0)
            fail_at(s, i, rc, why.text);
        else
            i++;
    }
}

/* ---- Compute ---- */

static uint32_t rows_left(const struct prefill_job *job)
{
    return (uint32_t)job->request->n_ids - kv_context_length(job->ctx);
}

static struct prefill_job *whose_turn(const struct scheduler *s)
{
    struct prefill_job *best = NULL;
    int64_t best_key = 0;

    for (uint32_t i = 0; i < s->n_jobs; i++) {
        struct prefill_job *job = s->jobs[i];
        int64_t key;

        if (job->state != PREFILL_COMPUTING)
            continue;
        key = (int64_t)rows_left(job) - (int64_t)job->waited_rows;
        if (best == NULL || key < best_key) {
            best = job;
            best_key = key;
        }
    }
    return best;
}

static uint32_t chunk_rows(const struct prefill_job *job)
{
    uint32_t left = rows_left(job), most = runtime_chunk(&job->node->runtime, RUNTIME_STEP_MS);
    uint32_t n;

    if (left <= LAST_ROWS)
        n = left;
    else if (left <= LAST_ROWS + BEFORE_LAST_ROWS)
        n = left - LAST_ROWS;
    else
        n = left - LAST_ROWS - BEFORE_LAST_ROWS;
    /* Not a sliver in front of the last two. */
    if (n < LAST_ROWS && n < left)
        n = left < BEFORE_LAST_ROWS ? left : BEFORE_LAST_ROWS;
    return n < most ? n : most;
}

static int compute_chunk(struct scheduler *s, struct prefill_job *job, struct kv_why *why)
{
    struct runtime *rt = &s->node->runtime;
    uint32_t n = chunk_rows(job);
    struct engine_item item = {
        .ctx = job->ctx,
        .ids = job->request->ids + kv_context_length(job->ctx),
        .n_ids = n,
        .logits = n == rows_left(job) ? job->logits : NULL,
    };
    int64_t start = node_now_ns();
    int rc;

    if (job->compute_start_ns == 0)
        job->compute_start_ns = start;
    rc = engine_step(rt->engine, &item, 1);
    if (rc < 0)
        return kv_fail(why, TRANSPORT_INTERNAL, "a step of %" PRIu32 " rows: %s", n,
                       model_strerror(rc));
    if (item.rc < 0)
        return kv_fail(why, TRANSPORT_INTERNAL, "%s", item.why.text);
    runtime_took(rt, n, node_now_ns() - start);
    job->n_computed += n;
    job->waited_rows = 0;
    for (uint32_t i = 0; i < s->n_jobs; i++) {
        if (s->jobs[i] != job && s->jobs[i]->state == PREFILL_COMPUTING)
            s->jobs[i]->waited_rows += n;
    }
    if (rows_left(job) == 0)
        to_sending(job);
    return TRANSPORT_OK;
}

static void compute(struct scheduler *s)
{
    struct prefill_job *job = whose_turn(s);
    struct kv_why why = {.text = ""};
    int rc;

    if (job == NULL)
        return;
    rc = compute_chunk(s, job, &why);
    for (uint32_t i = 0; rc != TRANSPORT_OK && i < s->n_jobs; i++) {
        if (s->jobs[i] == job) {
            fail_at(s, i, rc, why.text);
            break;
        }
    }
}

/* ---- Rounds ---- */

static void pump(struct scheduler *s)
{
    struct kv_why why = {.text = ""};

    for (uint32_t i = 0; i < s->n_jobs;) {
        struct prefill_job *job = s->jobs[i];
        int rc = TRANSPORT_OK;

        if (job->state == PREFILL_COMPUTING || job->state == PREFILL_SENDING)
            rc = prefill_job_pump(job, &why);
        if (rc == TRANSPORT_OK)
            i++;
        else
            fail_at(s, i, rc, why.text);
    }
}

static void take_in(struct scheduler *s, int timeout_ms)
{
    struct node_link *link = node_inbox_take(&s->node->inbox, timeout_ms), *next;

    for (; link != NULL; link = next) {
        struct prefill_job *job = (struct prefill_job *)link;

        next = link->next;
        if (s->n_jobs < s->node->max_jobs)
            s->jobs[s->n_jobs++] = job;
        else
            end_job(job, TRANSPORT_RESOURCE_EXHAUSTED, "too many calls");
    }
}

static int patience_ms(const struct scheduler *s)
{
    if (whose_turn(s) != NULL)
        return 0;
    return s->n_jobs > 0 ? PREFILL_TICK_MS : -1;
}

void *prefill_scheduler_run(void *arg)
{
    struct prefill_node *node = arg;
    struct scheduler s = {.node = node, .jobs = node->jobs};

    while (!atomic_load(&node->stopping) || s.n_jobs > 0) {
        take_in(&s, patience_ms(&s));
        sweep(&s);
        admit(&s);
        compute(&s);
        pump(&s);
    }
    return NULL;
}

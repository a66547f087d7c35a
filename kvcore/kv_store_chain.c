/* What reads a snapshot with all that it stands on: restore, verify, compact. */
#include "kvcore/kv_cache.h"
#include "kvcore/kv_record.h"
#include "kvcore/kv_store_index.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

enum { MAX_TRIES = 16 };

/* The files of a snapshot, open, the full one first; `ends` is how far each is needed. */
struct chain {
    struct kv_store *store;
    struct kv_queue *queue;
    struct kv_file **files; /* [n] */
    uint32_t *ends;         /* [n] */
    uint32_t n;
    uint64_t total; /* bytes of all */
};

static void close_files(struct chain *c)
{
    for (uint32_t i = 0; i < c->n; i++)
        kv_file_close(c->files[i]);
    free(c->files);
    free(c->ends);
    c->files = NULL;
    c->ends = NULL;
    c->n = 0;
}

/* The names of the chain, and how many; KV_ERR_NOT_FOUND. */
static int list_names(struct kv_store *store, const struct kv_snapshot_id *id,
                      char (*names)[KV_STORE_NAME_BYTES], uint32_t *n, struct kv_why *why)
{
    const struct kv_stored *s;

    pthread_mutex_lock(&store->lock);
    s = kv_stored_find(store, id);
    if (s != NULL && s->retired)
        s = NULL;
    for (*n = 0; s != NULL && *n < KV_STORE_DEPTH_MAX + 1; s = s->parent)
        kv_stored_name(s, names[(*n)++]);
    pthread_mutex_unlock(&store->lock);
    if (*n == 0) {
        char text[KV_SNAPSHOT_ID_TEXT];

        kv_snapshot_id_print(id, text);
        return kv_fail(why, KV_ERR_NOT_FOUND, "no snapshot %s", text);
    }
    return 0;
}

/* Open what is named now, newest first in names, down to a full one: a delta may have been
 * compacted since its name was looked up. */
static int open_names(struct chain *c, char (*names)[KV_STORE_NAME_BYTES], uint32_t n,
                      struct kv_why *why)
{
    int rc = 0;

    c->files = calloc(n, sizeof(struct kv_file *));
    c->ends = calloc(n, sizeof(*c->ends));
    if (c->files == NULL || c->ends == NULL)
        return kv_fail(why, KV_ERR_NOMEM, "no memory for a chain of %u", n);
    c->total = 0;
    while (c->n < n && rc == 0 &&
           (c->n == 0 || kv_file_info(c->files[c->n - 1])->header.base > 0)) {
        const char *name = names[c->n];

        rc = kv_file_open(c->queue, name, &c->files[c->n], why);
        if (rc == 0)
            c->total += kv_file_info(c->files[c->n++])->bytes;
        else if (rc != KV_ERR_NOT_FOUND)
            rc = kv_fail_in(why, rc, "%s", name);
    }
    for (uint32_t i = 0; i < c->n / 2; i++) {
        struct kv_file *file = c->files[i];

        c->files[i] = c->files[c->n - 1 - i];
        c->files[c->n - 1 - i] = file;
    }
    for (uint32_t i = 0; i < c->n; i++)
        c->ends[i] = i + 1 < c->n ? kv_file_info(c->files[i + 1])->header.base
                                  : kv_file_info(c->files[i])->n_positions;
    return rc;
}

/* A name may change between being looked up and being opened (a parent is retired): then look
 * again. */
static int open_chain(struct chain *c, struct kv_store *store, const struct kv_snapshot_id *id,
                      struct kv_why *why)
{
    char(*names)[KV_STORE_NAME_BYTES] = malloc((KV_STORE_DEPTH_MAX + 1) * sizeof(*names));
    uint32_t n;
    int rc = KV_ERR_NOT_FOUND;

    *c = (struct chain){.store = store};
    if (names == NULL)
        return kv_fail(why, KV_ERR_NOMEM, "no memory for a chain");
    rc = kv_store_enter(store, &c->queue, why);
    if (rc < 0) {
        free(names);
        return rc;
    }
    for (uint32_t i = 0; i < MAX_TRIES; i++) {
        rc = list_names(store, id, names, &n, why);
        if (rc == 0)
            rc = open_names(c, names, n, why);
        if (rc == 0 || n == 0 || rc != KV_ERR_NOT_FOUND)
            break;
        close_files(c);
    }
    free(names);
    if (rc < 0) {
        close_files(c);
        kv_store_leave(store, c->queue);
    }
    return rc;
}

static void close_chain(struct chain *c)
{
    close_files(c);
    kv_store_leave(c->store, c->queue);
}

static const struct kv_file_info *top(const struct chain *c)
{
    return kv_file_info(c->files[c->n - 1]);
}

/* ---- Reading the positions of a chain ---- */

/* What becomes of them. */
struct reading {
    struct chain *chain;
    bool whole;              /* also what the next file goes on from earlier */
    struct kv_prefix prefix; /* of the ids so far */
    uint32_t end;            /* of what counts in the file at hand */
    kv_file_sink *sink;      /* NULL: only verified */
    void *arg;
    kv_progress *progress;
    void *progress_arg;
    uint64_t done; /* bytes of rows */
    uint64_t total;
};

static int take(void *arg, uint32_t first, uint32_t count, const uint32_t *ids,
                const struct iovec *rows, size_t n_rows, struct kv_why *why)
{
    struct reading *r = arg;

    if (first < r->end)
        kv_prefix_feed(&r->prefix, ids, count < r->end - first ? count : r->end - first);
    for (size_t i = 0; i < n_rows; i++)
        r->done += rows[i].iov_len;
    if (r->progress != NULL && r->progress(r->progress_arg, r->done, r->total) != 0)
        return kv_fail(why, KV_ERR_BUSY, "cancelled");
    return r->sink != NULL ? r->sink(r->arg, first, count, ids, rows, n_rows, why) : 0;
}

/* A delta says which ids it stands on; its parents must have had them. */
static int check_base(const struct reading *r, const struct kv_file_info *info, struct kv_why *why)
{
    struct kv_digest digest;

    kv_prefix_digest(&r->prefix, &digest);
    if (r->prefix.n == info->header.base && kv_digest_equal(&digest, &info->header.base_digest))
        return 0;
    return kv_fail(why, KV_ERR_CHECK, "base_digest is not that of the %u positions below",
                   info->header.base);
}

/* Positions [0, n) of the chain, in order.  (With `whole` and n all there are, every position of
 * every file.) */
static int read_chain(struct reading *r, uint32_t n, struct kv_why *why)
{
    const struct chain *c = r->chain;
    const struct kv_snapshot_header *h = &top(c)->header;
    int rc = kv_prefix_init(&r->prefix, &h->ns, h->frame_positions);

    if (rc < 0)
        return kv_fail(why, rc, "no memory to read a snapshot");
    r->total = r->whole ? c->total : n * (uint64_t)kv_position_bytes(&h->geometry);
    for (uint32_t i = 0; i < c->n && rc == 0; i++) {
        const struct kv_file_info *info = kv_file_info(c->files[i]);

        if (info->header.base >= n && i > 0)
            break;
        if (i > 0)
            rc = check_base(r, info, why);
        r->end = c->ends[i] < n ? c->ends[i] : n;
        if (rc == 0)
            rc = kv_file_read(c->files[i], c->queue, info->header.base,
                              r->whole ? info->n_positions : r->end, take, r, why);
        if (rc == KV_ERR_CHECK || rc == KV_ERR_FORMAT)
            rc = kv_fail_in(why, rc, "%s", kv_file_name(c->files[i]));
    }
    kv_prefix_release(&r->prefix);
    return rc;
}

/* ---- Restore ---- */

static int compare(const struct kv_snapshot_header *is, const struct kv_restore *restore,
                   const struct kv_store_config *config, struct kv_why *why)
{
    const struct kv_geometry *want = &kv_cache_layout(restore->cache)->geometry;
    const struct {
        const char *field;
        uint32_t is, want;
    } numbers[] = {
        {"n_layers", is->geometry.n_layers, want->n_layers},
        {"n_kv_heads", is->geometry.n_kv_heads, want->n_kv_heads},
        {"head_dim", is->geometry.head_dim, want->head_dim},
    };

    if (is->geometry.precision != want->precision)
        return kv_fail(why, KV_ERR_MISMATCH, "precision is %s, expected %s",
                       kv_precision_name(is->geometry.precision),
                       kv_precision_name(want->precision));
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++)
        if (numbers[i].is != numbers[i].want)
            return kv_fail(why, KV_ERR_MISMATCH, "%s is %u, expected %u", numbers[i].field,
                           numbers[i].is, numbers[i].want);
    return kv_header_compare_digests(
        is,
        &(struct kv_snapshot_header){.fingerprint = config->fingerprint,
                                     .numerics_id = config->numerics_id,
                                     .ns = restore->ns.digest},
        why);
}

/* Rows go straight from the buffers that were read into the pages. */
static int append(void *arg, uint32_t first, uint32_t count, const uint32_t *ids,
                  const struct iovec *rows, size_t n_rows, struct kv_why *why)
{
    const int rc = kv_context_load(arg, ids, count, rows, n_rows);

    return rc < 0 ? kv_fail(why, rc, "positions from %u: %s", first, kv_strerror(rc)) : 0;
}

static int read_sections(struct chain *c, const struct kv_restore *restore, struct kv_restored *out,
                         struct kv_why *why)
{
    struct kv_file *file = c->files[c->n - 1];
    void *logits = NULL;
    size_t len = 0;
    int rc =
        kv_file_section(file, c->queue, KV_SECTION_SESSION, &out->session, &out->session_len, why);

    if (rc == 0)
        rc = kv_file_section(file, c->queue, KV_SECTION_LOGITS, &logits, &len, why);
    if (rc == 0 && restore->logits != NULL && len > 0 && len == restore->n_logits * sizeof(float)) {
        memcpy(restore->logits, logits, len);
        out->has_logits = true;
    }
    free(logits);
    return rc;
}

static int restore_chain(struct chain *c, const struct kv_restore *restore, struct kv_restored *out,
                         struct kv_why *why)
{
    const uint32_t all = top(c)->n_positions;
    const uint32_t n = restore->n_positions > 0 ? restore->n_positions : all;
    struct reading r = {
        .chain = c, .sink = append, .progress = restore->progress, .progress_arg = restore->arg};
    int rc = compare(&top(c)->header, restore, &c->store->config, why);

    if (rc == 0 && n > all)
        rc = kv_fail(why, KV_ERR_INVALID, "n_positions is %u, the snapshot has %u", n, all);
    if (rc == 0 && n == all)
        rc = read_sections(c, restore, out, why);
    if (rc == 0) {
        rc = kv_context_open(restore->cache, &restore->ns, &out->ctx);
        if (rc == 0)
            rc = kv_context_reserve(out->ctx, restore->reserve_to > n ? restore->reserve_to : n);
        if (rc < 0)
            kv_fail(why, rc, "no room for %u positions: %s",
                    restore->reserve_to > n ? restore->reserve_to : n, kv_strerror(rc));
    }
    r.arg = out->ctx;
    if (rc == 0)
        rc = read_chain(&r, n, why);
    if (rc == 0)
        kv_context_loaded(out->ctx);
    return rc;
}

/* The last use is when it was restored, also after a restart. */
static void touch(struct kv_store *store, const struct kv_snapshot_id *id, uint64_t bytes)
{
    const uint64_t now = store->disk->ops->now_ns(store->disk);
    char name[KV_STORE_NAME_BYTES];
    struct kv_stored *s;

    pthread_mutex_lock(&store->lock);
    store->stats.n_restored++;
    store->stats.bytes_restored += bytes;
    s = kv_stored_find(store, id);
    if (s != NULL) {
        s->info.used_ns = now;
        kv_stored_name(s, name);
    }
    pthread_mutex_unlock(&store->lock);
    if (s != NULL)
        (void)store->disk->ops->touch(store->disk, name, (int64_t)now);
}

int kv_store_restore(struct kv_store *store, const struct kv_restore *restore,
                     struct kv_restored *out, struct kv_why *why)
{
    struct kv_restored got = {0};
    struct chain c;
    uint64_t bytes = 0;
    int rc = open_chain(&c, store, &restore->id, why);

    if (rc == 0) {
        rc = restore_chain(&c, restore, &got, why);
        bytes = c.total;
        close_chain(&c);
    }
    if (rc < 0) {
        kv_context_close(got.ctx);
        free(got.session);
        pthread_mutex_lock(&store->lock);
        store->stats.n_failed++;
        pthread_mutex_unlock(&store->lock);
        return rc;
    }
    touch(store, &restore->id, bytes);
    *out = got;
    return 0;
}

int kv_store_session(struct kv_store *store, const struct kv_snapshot_id *id, void **session,
                     size_t *len, struct kv_why *why)
{
    struct chain c;
    int rc = open_chain(&c, store, id, why);

    if (rc < 0)
        return rc;
    rc = kv_file_section(c.files[c.n - 1], c.queue, KV_SECTION_SESSION, session, len, why);
    close_chain(&c);
    return rc;
}

/* ---- Verify ---- */

static int verify_sections(struct chain *c, struct kv_file *file, struct kv_why *why)
{
    int rc = 0;

    for (int kind = KV_SECTION_LOGITS; kind <= KV_SECTION_SESSION && rc == 0; kind++) {
        void *data = NULL;
        size_t len;

        rc = kv_file_section(file, c->queue, (enum kv_section)kind, &data, &len, why);
        free(data);
    }
    if (rc == KV_ERR_CHECK || rc == KV_ERR_FORMAT)
        rc = kv_fail_in(why, rc, "%s", kv_file_name(file));
    return rc;
}

int kv_store_verify(struct kv_store *store, const struct kv_snapshot_id *id, kv_progress *progress,
                    void *arg, struct kv_why *why)
{
    struct chain c;
    struct reading r = {.chain = &c, .whole = true, .progress = progress, .progress_arg = arg};
    int rc = open_chain(&c, store, id, why);

    if (rc < 0)
        return rc;
    rc = read_chain(&r, top(&c)->n_positions, why);
    for (uint32_t i = 0; i < c.n && rc == 0; i++)
        rc = verify_sections(&c, c.files[i], why);
    close_chain(&c);
    return rc;
}

/* ---- Compact ---- */

static int copy(void *arg, uint32_t first, uint32_t count, const uint32_t *ids,
                const struct iovec *rows, size_t n_rows, struct kv_why *why)
{
    (void)first;
    return kv_file_write_rows(arg, ids, count, rows, n_rows, why);
}

static int copy_sections(struct chain *c, struct kv_file_writer *w, struct kv_why *why)
{
    const struct kv_file_info *info = top(c);
    int rc = 0;

    for (uint32_t i = 0; i < info->n_sections && rc == 0; i++) {
        const enum kv_section kind = (enum kv_section)info->sections[i].kind;
        void *data = NULL;
        size_t len = 0;

        rc = kv_file_section(c->files[c->n - 1], c->queue, kind, &data, &len, why);
        if (rc == 0)
            rc = kv_file_write_section(w, kind, data, len, why);
        free(data);
    }
    return rc;
}

/* Write all of the chain into one file, by a queue of its own: the chain's is busy reading.  It is
 * synced whatever the durability: what it replaces may have been. */
static int write_full(struct chain *c, struct kv_queue *queue, const char *name, uint64_t bytes,
                      kv_progress *progress, void *arg, struct kv_stored **out, struct kv_why *why)
{
    const struct kv_file_info *info = top(c);
    struct kv_snapshot_header h = info->header;
    struct kv_file_frame *frames;
    struct kv_file_info written;
    struct kv_file_writer *writer;
    struct reading r = {.chain = c, .sink = copy, .progress = progress, .progress_arg = arg};
    int rc;

    h.base = 0;
    h.base_ids = NULL;
    memset(h.parent_id, 0, sizeof(h.parent_id));
    rc = kv_file_create(queue, name, bytes, &h, &writer, why);
    if (rc < 0)
        return rc;
    r.arg = writer;
    rc = read_chain(&r, info->n_positions, why);
    if (rc == 0)
        rc = copy_sections(c, writer, why);
    if (rc < 0) {
        kv_file_discard(writer);
        return rc;
    }
    rc = kv_file_finish(writer, true, &written, &frames, why);
    if (rc < 0)
        return rc;
    *out = kv_stored_new(&written, 0);
    free(frames);
    return *out != NULL ? 0 : kv_fail(why, KV_ERR_NOMEM, "no memory for the index");
}

/* The index after a rename: s is what `full` says, which gets what was there instead. */
static struct kv_stored *become_full(struct kv_store *store, struct kv_stored *s,
                                     struct kv_stored *full)
{
    struct kv_stored *parent;
    struct kv_file_frame *frames;

    pthread_mutex_lock(&store->lock);
    parent = s->parent;
    frames = s->frames;
    store->stats.bytes -= s->info.file_bytes;
    s->parent = NULL;
    s->frames = full->frames;
    s->n_frames = full->n_frames;
    s->base_digest = full->base_digest;
    s->info.base = 0;
    s->info.file_bytes = full->info.file_bytes;
    memset(&s->info.parent, 0, sizeof(s->info.parent));
    full->frames = frames;
    pthread_mutex_unlock(&store->lock);
    return parent;
}

/* Put the full file in the delta's place: the same id, so that its children still find it.  What it
 * stood on may go once the new name is sure to stay. */
static int replace(struct kv_store *store, const struct kv_snapshot_id *id, const char *temporary,
                   struct kv_stored *full, bool *renamed, struct kv_why *why)
{
    char name[KV_STORE_NAME_BYTES];
    struct kv_stored *s;
    int rc = 0;

    pthread_mutex_lock(&store->names);
    pthread_mutex_lock(&store->lock);
    s = kv_stored_find(store, id);
    if (s != NULL)
        kv_stored_name(s, name);
    pthread_mutex_unlock(&store->lock);
    if (s == NULL) {
        rc = kv_fail(why, KV_ERR_NOT_FOUND, "the snapshot was deleted meanwhile");
    } else {
        rc = store->disk->ops->rename(store->disk, temporary, name);
        *renamed = rc == 0;
        if (rc < 0)
            rc = kv_io_error(why, rc, "rename", temporary);
    }
    if (*renamed) {
        struct kv_stored *parent = become_full(store, s, full);

        rc = store->disk->ops->sync_directory(store->disk);
        if (rc < 0)
            rc = kv_io_error(why, rc, "sync", "the directory");
        else
            kv_store_release_parent(store, parent);
    }
    pthread_mutex_unlock(&store->names);
    return rc;
}

static int compact_chain(struct chain *c, const struct kv_snapshot_id *id, kv_progress *progress,
                         void *arg, struct kv_why *why)
{
    const struct kv_file_info *info = top(c);
    char name[KV_STORE_NAME_BYTES];
    struct kv_stored *full = NULL;
    struct kv_queue *queue;
    size_t logits = 0, session = 0;
    bool renamed = false;
    uint64_t bytes;
    int rc;

    for (uint32_t i = 0; i < info->n_sections; i++)
        *(info->sections[i].kind == KV_SECTION_LOGITS ? &logits : &session) = info->sections[i].len;
    bytes = kv_file_bytes(&info->header.geometry, 0, info->n_positions, logits, session);
    rc = kv_store_take(c->store, bytes, why);
    if (rc < 0)
        return rc;
    kv_snapshot_id_print(id, name);
    strcat(name, ".tmp");
    rc = kv_file_queue(c->store->disk, &info->header.geometry, &queue, why);
    if (rc == 0) {
        rc = write_full(c, queue, name, bytes, progress, arg, &full, why);
        c->store->disk->ops->queue_close(queue);
    }
    if (rc == 0)
        rc = replace(c->store, id, name, full, &renamed, why);
    kv_stored_free(full);
    if (!renamed) {
        (void)c->store->disk->ops->unlink(c->store->disk, name);
        kv_store_give(c->store, bytes);
    }
    return rc;
}

int kv_store_compact(struct kv_store *store, const struct kv_snapshot_id *id, kv_progress *progress,
                     void *arg, struct kv_why *why)
{
    struct chain c;
    int rc = open_chain(&c, store, id, why);

    if (rc < 0)
        return rc;
    if (c.n > 1)
        rc = compact_chain(&c, id, progress, arg, why);
    close_chain(&c);
    return rc;
}

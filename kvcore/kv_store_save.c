/* Saving: find what is stored already, reserve, write a temporary file, give it its name. */
#include "kvcore/kv_cache.h"
#include "kvcore/kv_record.h"
#include "kvcore/kv_store_index.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>

enum { MAX_CANDIDATES = 8 };

/* A save under way. */
struct saving {
    struct kv_store *store;
    const struct kv_save *save;
    struct kv_queue *queue;
    uint32_t n;                /* positions */
    uint32_t *ids;             /* [n] */
    struct kv_digest *borders; /* [n / F]: D(F), D(2F), ... */
    uint32_t too_deep;         /* how much a file shares that cannot be a parent for its depth */
    struct kv_stored *parent;  /* counts this save as a child; NULL: in full */
    struct kv_snapshot_header header;
    uint64_t bytes; /* taken of the budget; 0: none */
    char name[KV_STORE_NAME_BYTES];
    bool created; /* the temporary is there */
};

/* ---- What is stored already ---- */

/* A file whose first `common` positions are the context's, of which `frame` may hold more. */
struct candidate {
    struct kv_snapshot_id id;
    uint32_t common;
    uint32_t frame; /* index; n_frames: no further one */
    uint32_t bound; /* `common` can grow to this with that frame's ids */
    uint32_t depth;
};

/* How many of the file's frames are the context's: digests chain, so all before are too. */
static uint32_t count_frames(const struct saving *s, const struct kv_stored *file)
{
    const uint32_t f = s->header.frame_positions;
    uint32_t low = 0, high = file->n_frames;

    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        const struct kv_file_frame *frame = &file->frames[middle];
        const uint32_t end = frame->first + frame->count;

        if (end % f == 0 && end <= s->n &&
            kv_digest_equal(&frame->digest, &s->borders[end / f - 1]))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Whether the file's base is on the context's path: its base digest is D(base) of the context. */
static bool base_fits(const struct saving *s, const struct kv_stored *file)
{
    const uint32_t f = s->header.frame_positions, base = file->info.base;
    struct kv_prefix prefix;
    struct kv_digest digest;

    if (base > s->n)
        return false;
    if (base == 0)
        return true;
    if (kv_prefix_init(&prefix, &s->header.ns, f) < 0)
        return false;
    if (base >= f) {
        prefix.border = s->borders[base / f - 1];
        prefix.n = base / f * f;
    }
    kv_prefix_feed(&prefix, s->ids + prefix.n, base - prefix.n);
    kv_prefix_digest(&prefix, &digest);
    kv_prefix_release(&prefix);
    return kv_digest_equal(&digest, &file->base_digest);
}

static bool is_of_model(const struct kv_stored *file, const struct kv_snapshot_header *h)
{
    return kv_digest_equal(&file->info.ns, &h->ns) &&
           kv_digest_equal(&file->fingerprint, &h->fingerprint) &&
           kv_digest_equal(&file->numerics_id, &h->numerics_id) &&
           kv_geometry_equal(&file->info.geometry, &h->geometry);
}

static void consider(struct saving *s, const struct kv_stored *file, struct candidate *best,
                     uint32_t *n_best)
{
    struct candidate c = {.id = file->info.id, .depth = kv_stored_depth(file)};
    uint32_t at = *n_best;

    c.frame = count_frames(s, file);
    c.common = c.frame == 0 ? file->info.base
                            : file->frames[c.frame - 1].first + file->frames[c.frame - 1].count;
    c.bound = c.common;
    if (c.frame < file->n_frames)
        c.bound = file->frames[c.frame].first + file->frames[c.frame].count;
    if (c.bound > s->n)
        c.bound = s->n;
    if (c.bound < KV_STORE_MIN_SHARED ||
        (c.frame == 0 && (c.bound == c.common || !base_fits(s, file))))
        return;
    if (c.depth >= s->store->config.max_depth) {
        s->too_deep = c.bound > s->too_deep ? c.bound : s->too_deep;
        return;
    }
    /* By how far they may reach, then the shallower first. */
    while (at > 0 && (best[at - 1].bound < c.bound ||
                      (best[at - 1].bound == c.bound && best[at - 1].depth > c.depth)))
        at--;
    if (at == MAX_CANDIDATES)
        return;
    if (*n_best < MAX_CANDIDATES)
        ++*n_best;
    memmove(&best[at + 1], &best[at], (*n_best - at - 1) * sizeof(*best));
    best[at] = c;
}

/* Compare the next frame's ids, which are read from the file.  A file that cannot be read shares no
 * more than its frames. */
static void extend(struct saving *s, struct candidate *c)
{
    char name[KV_STORE_NAME_BYTES];
    const struct kv_stored *stored;
    struct kv_file *file;
    uint32_t *ids;

    pthread_mutex_lock(&s->store->lock);
    stored = kv_stored_find(s->store, &c->id);
    if (stored != NULL)
        kv_stored_name(stored, name);
    pthread_mutex_unlock(&s->store->lock);
    if (stored == NULL || kv_file_open(s->queue, name, &file, NULL) < 0) {
        c->bound = c->common;
        return;
    }
    const struct kv_file_info *info = kv_file_info(file);

    ids = malloc(s->header.frame_positions * sizeof(*ids));
    if (ids != NULL && c->frame < info->n_frames && info->frames[c->frame].first == c->common &&
        kv_file_frame_ids(file, s->queue, c->frame, ids, NULL) == 0) {
        const uint32_t count = info->frames[c->frame].count;

        for (uint32_t i = 0; i < count && c->common < s->n && s->ids[c->common] == ids[i]; i++)
            c->common++;
    }
    c->bound = c->common;
    free(ids);
    kv_file_close(file);
}

/* Count this save as a child of the candidate, if that is still there: from now on it cannot go. */
static bool adopt_parent(struct saving *s, const struct candidate *c)
{
    struct kv_stored *file;

    pthread_mutex_lock(&s->store->names);
    pthread_mutex_lock(&s->store->lock);
    file = kv_stored_find(s->store, &c->id);
    /* What ends at a file's base is its parent's. */
    if (file != NULL && c->common == file->info.base)
        file = file->parent;
    if (file != NULL && file->info.n_positions >= c->common &&
        kv_stored_depth(file) < s->store->config.max_depth) {
        file->n_children++;
        s->parent = file;
        s->header.base = c->common;
        memcpy(s->header.parent_id, file->info.id.bytes, sizeof(s->header.parent_id));
    }
    pthread_mutex_unlock(&s->store->lock);
    pthread_mutex_unlock(&s->store->names);
    return s->parent != NULL;
}

/* Where what shares most is at the end of a chain, a delta to something before it repeats
 * positions, and so would each that follows, ever more of them.  A few are cheaper than all
 * (answers to one prompt that is that deep); past two files' worth of a chain as long as it may be,
 * it is better to begin a new chain. */
static bool begins_chain(const struct saving *s, uint32_t shared)
{
    return s->too_deep > shared && s->n - shared > 2 * (uint64_t)s->n / s->store->config.max_depth;
}

/* The stored snapshot that shares most with the context becomes the parent. */
static void find_parent(struct saving *s)
{
    struct candidate best[MAX_CANDIDATES + 1];
    const struct candidate *chosen = NULL;
    uint32_t n = 0, most = 0;

    pthread_mutex_lock(&s->store->lock);
    for (uint32_t i = 0; i < s->store->n_files; i++)
        if (is_of_model(s->store->files[i], &s->header))
            consider(s, s->store->files[i], best, &n);
    pthread_mutex_unlock(&s->store->lock);
    for (uint32_t i = 0; i < n && best[i].bound > most; i++) {
        if (best[i].bound > best[i].common)
            extend(s, &best[i]);
        if (best[i].common > most) {
            most = best[i].common;
            chosen = &best[i];
        }
    }
    if (chosen != NULL && most >= KV_STORE_MIN_SHARED && !begins_chain(s, most))
        adopt_parent(s, chosen);
}

/* ---- Preparing ---- */

static int read_ids(struct saving *s, struct kv_why *why)
{
    const uint32_t f = s->header.frame_positions;
    struct kv_prefix prefix;
    int rc;

    s->ids = malloc(s->n * sizeof(*s->ids));
    s->borders = malloc((s->n / f + 1) * sizeof(*s->borders));
    if (s->ids == NULL || s->borders == NULL)
        return kv_fail(why, KV_ERR_NOMEM, "no memory for %u ids", s->n);
    rc = kv_context_ids(s->save->ctx, 0, s->n, s->ids);
    if (rc == 0)
        rc = kv_prefix_init(&prefix, &s->header.ns, f);
    if (rc < 0)
        return kv_fail(why, rc, "ids: %s", kv_strerror(rc));
    for (uint32_t i = 0; i < s->n / f; i++) {
        kv_prefix_feed(&prefix, s->ids + i * f, f);
        kv_prefix_digest(&prefix, &s->borders[i]);
    }
    kv_prefix_release(&prefix);
    return 0;
}

static int check_save(const struct kv_store *store, const struct kv_save *save, struct kv_why *why)
{
    const struct kv_geometry *is = &save->ctx->cache->layout.geometry,
                             *want = &store->config.geometry;
    int rc = 0;

    if (!kv_geometry_equal(is, want))
        return kv_fail(
            why, KV_ERR_INVALID, "the context is %u x %u x %u in %s, the store %u x %u x %u in %s",
            is->n_layers, is->n_kv_heads, is->head_dim, kv_precision_name(is->precision),
            want->n_layers, want->n_kv_heads, want->head_dim, kv_precision_name(want->precision));
    if (kv_context_settled(save->ctx) == 0)
        return kv_fail(why, KV_ERR_INVALID, "the context has no position to save");
    if (save->logits != NULL)
        rc = kv_section_check(KV_SECTION_LOGITS, save->n_logits * sizeof(float), why);
    if (rc == 0 && save->session_len > 0)
        rc = kv_section_check(KV_SECTION_SESSION, save->session_len, why);
    return rc;
}

static int draw_id(struct kv_snapshot_header *h, struct kv_why *why)
{
    if (getrandom(h->snapshot_id, sizeof(h->snapshot_id), 0) != sizeof(h->snapshot_id))
        return kv_fail(why, KV_ERR_IO, "no random bytes for a snapshot id");
    return 0;
}

static int prepare(struct saving *s, struct kv_why *why)
{
    const struct kv_store_config *config = &s->store->config;
    int rc;

    s->n = kv_context_settled(s->save->ctx);
    s->header = (struct kv_snapshot_header){
        .fingerprint = config->fingerprint,
        .ns = s->save->ctx->ns.digest,
        .numerics_id = config->numerics_id,
        .geometry = config->geometry,
        .frame_positions = kv_frame_positions(&config->geometry),
        .n_bound = s->n,
    };
    rc = draw_id(&s->header, why);
    if (rc == 0)
        rc = read_ids(s, why);
    if (rc < 0)
        return rc;
    s->header.base_ids = s->ids;
    if (!s->save->full)
        find_parent(s);
    s->bytes = kv_file_bytes(&config->geometry, s->header.base, s->n,
                             s->save->logits != NULL ? s->save->n_logits * sizeof(float) : 0,
                             s->save->session_len);
    rc = kv_store_take(s->store, s->bytes, why);
    if (rc < 0)
        s->bytes = 0;
    return rc;
}

/* ---- Writing ---- */

static int progress(const struct saving *s, uint32_t at, struct kv_why *why)
{
    const uint64_t total = s->bytes;
    const uint64_t done =
        s->n > s->header.base ? total * (at - s->header.base) / (s->n - s->header.base) : total;

    if (s->save->progress != NULL && s->save->progress(s->save->arg, done, total) != 0)
        return kv_fail(why, KV_ERR_BUSY, "cancelled");
    return 0;
}

static int write_frames(struct saving *s, struct kv_file_writer *w, struct kv_why *why)
{
    const uint32_t f = s->header.frame_positions;
    uint32_t at = s->header.base;
    int rc = progress(s, at, why);

    while (at < s->n && rc == 0) {
        const uint32_t border = (at / f + 1) * f, end = border < s->n ? border : s->n;

        rc = kv_file_write_context(w, s->save->ctx, end, why);
        at = end;
        if (rc == 0)
            rc = progress(s, at, why);
    }
    return rc;
}

/* Write the temporary file, and what the index will have of it. */
static int write_temporary(struct saving *s, struct kv_stored **out, struct kv_why *why)
{
    const struct kv_save *save = s->save;
    struct kv_file_frame *frames;
    struct kv_file_info info;
    struct kv_file_writer *w;
    int rc;

    s->created = true; /* a file that could not be allocated is there, too */
    rc = kv_file_create(s->queue, s->name, s->bytes, &s->header, &w, why);
    if (rc < 0)
        return rc;
    rc = write_frames(s, w, why);
    if (rc == 0 && save->logits != NULL)
        rc = kv_file_write_section(w, KV_SECTION_LOGITS, save->logits,
                                   save->n_logits * sizeof(float), why);
    if (rc == 0 && save->session_len > 0)
        rc = kv_file_write_section(w, KV_SECTION_SESSION, save->session, save->session_len, why);
    if (rc < 0) {
        kv_file_discard(w);
        return rc;
    }
    rc = kv_file_finish(w, s->store->config.durability != KV_NONE, &info, &frames, why);
    if (rc < 0)
        return rc;
    *out = kv_stored_new(&info, s->store->disk->ops->now_ns(s->store->disk));
    free(frames);
    return *out != NULL ? 0 : kv_fail(why, KV_ERR_NOMEM, "no memory for the index");
}

/* Give the temporary its name, and enter it.  From here it is a snapshot. */
static int publish(struct saving *s, struct kv_stored *stored, struct kv_snapshot_info *out,
                   struct kv_why *why)
{
    const struct kv_disk_ops *ops = s->store->disk->ops;
    char name[KV_STORE_NAME_BYTES];
    int rc;

    kv_stored_name(stored, name);
    pthread_mutex_lock(&s->store->names);
    rc = ops->rename(s->store->disk, s->name, name);
    if (rc < 0) {
        rc = kv_io_error(why, rc, "rename", s->name);
    } else {
        s->created = false;
        rc = kv_store_sync_names(s->store, why);
        if (rc < 0) /* not acknowledged: it must not be found either */
            (void)ops->unlink(s->store->disk, name);
    }
    if (rc == 0) {
        pthread_mutex_lock(&s->store->lock);
        if (s->store->n_files >= KV_STORE_MAX_SNAPSHOTS)
            rc = kv_fail(why, KV_ERR_FULL, "the store has %u snapshots", s->store->n_files);
        else if (kv_store_room(s->store) < 0)
            rc = kv_fail(why, KV_ERR_NOMEM, "no memory for the index");
        if (rc == 0) {
            stored->parent = s->parent;
            kv_store_add(s->store, stored);
            s->store->stats.n_saved++;
            s->store->stats.bytes_saved += s->bytes;
            *out = kv_stored_info(stored);
        }
        pthread_mutex_unlock(&s->store->lock);
        if (rc < 0)
            (void)ops->unlink(s->store->disk, name);
    }
    pthread_mutex_unlock(&s->store->names);
    return rc;
}

/* Nothing is left of a save that failed. */
static void undo(struct saving *s)
{
    if (s->created)
        (void)s->store->disk->ops->unlink(s->store->disk, s->name);
    if (s->bytes > 0)
        kv_store_give(s->store, s->bytes);
    if (s->parent != NULL) {
        pthread_mutex_lock(&s->store->names);
        kv_store_release_parent(s->store, s->parent);
        pthread_mutex_unlock(&s->store->names);
    }
    pthread_mutex_lock(&s->store->lock);
    s->store->stats.n_failed++;
    pthread_mutex_unlock(&s->store->lock);
}

static int run(struct saving *s, struct kv_snapshot_info *out, struct kv_why *why)
{
    struct kv_stored *stored = NULL;
    int rc = prepare(s, why);

    if (rc == 0) {
        kv_snapshot_id_print((const struct kv_snapshot_id *)(const void *)s->header.snapshot_id,
                             s->name);
        strcat(s->name, ".tmp");
        rc = write_temporary(s, &stored, why);
    }
    if (rc == 0)
        rc = publish(s, stored, out, why);
    if (rc < 0) {
        kv_stored_free(stored);
        undo(s);
    }
    return rc;
}

int kv_store_save(struct kv_store *store, const struct kv_save *save, struct kv_snapshot_info *out,
                  struct kv_why *why)
{
    struct saving s = {.store = store, .save = save};
    int rc = check_save(store, save, why);

    if (rc < 0)
        return rc;
    rc = kv_store_enter(store, &s.queue, why);
    if (rc < 0)
        return rc;
    rc = run(&s, out, why);
    kv_store_leave(store, s.queue);
    free(s.ids);
    free(s.borders);
    /* The new one stands; that the old one is still there too is no failure of it. */
    if (rc == 0 && save->replaces != NULL)
        (void)kv_store_delete(store, save->replaces, NULL);
    return rc;
}

#include "kvcore/kv_record.h"
#include "kvcore/kv_store_index.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- Names ---- */

static const char *const durabilities[] = {
    [KV_DURABLE] = "durable", [KV_PUBLISHED] = "published", [KV_NONE] = "none"};

const char *kv_durability_name(enum kv_durability d)
{
    return (unsigned)d < sizeof(durabilities) / sizeof(durabilities[0]) ? durabilities[d] : NULL;
}

int kv_durability_parse(const char *name)
{
    for (int i = KV_DURABLE; i <= KV_NONE; i++)
        if (strcmp(name, durabilities[i]) == 0)
            return i;
    return KV_ERR_INVALID;
}

void kv_snapshot_id_print(const struct kv_snapshot_id *id, char text[KV_SNAPSHOT_ID_TEXT])
{
    for (size_t i = 0; i < sizeof(id->bytes); i++)
        snprintf(text + 2 * i, 3, "%02x", id->bytes[i]);
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* The id that begins the text; the text may go on. */
static int parse_id(const char *text, struct kv_snapshot_id *out)
{
    struct kv_snapshot_id id = {{0}};

    for (size_t i = 0; i < sizeof(id.bytes); i++) {
        const int high = hex_digit(text[2 * i]), low = high < 0 ? -1 : hex_digit(text[2 * i + 1]);

        if (low < 0)
            return KV_ERR_INVALID;
        id.bytes[i] = (uint8_t)(high << 4 | low);
    }
    *out = id;
    return 0;
}

int kv_snapshot_id_parse(const char *text, struct kv_snapshot_id *out)
{
    if (strlen(text) != KV_SNAPSHOT_ID_TEXT - 1)
        return KV_ERR_INVALID;
    return parse_id(text, out);
}

void kv_stored_name(const struct kv_stored *s, char name[KV_STORE_NAME_BYTES])
{
    kv_snapshot_id_print(&s->info.id, name);
    strcat(name, s->retired ? ".base" : ".kv");
}

/* ---- The index ---- */

static int compare_ids(const struct kv_snapshot_id *a, const struct kv_snapshot_id *b)
{
    return memcmp(a->bytes, b->bytes, sizeof(a->bytes));
}

/* Where the id is, or would be. */
static uint32_t place_of(const struct kv_store *store, const struct kv_snapshot_id *id)
{
    uint32_t low = 0, high = store->n_files;

    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;

        if (compare_ids(&store->files[middle]->info.id, id) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

struct kv_stored *kv_stored_find(const struct kv_store *store, const struct kv_snapshot_id *id)
{
    const uint32_t i = place_of(store, id);

    return i < store->n_files && compare_ids(&store->files[i]->info.id, id) == 0 ? store->files[i]
                                                                                 : NULL;
}

int kv_store_room(struct kv_store *store)
{
    const uint32_t cap = store->cap > 0 ? 2 * store->cap : 64;
    struct kv_stored **grown;

    if (store->n_files < store->cap)
        return 0;
    grown = realloc(store->files, cap * sizeof(struct kv_stored *));
    if (grown == NULL)
        return KV_ERR_NOMEM;
    store->files = grown;
    store->cap = cap;
    return 0;
}

void kv_store_add(struct kv_store *store, struct kv_stored *s)
{
    const uint32_t i = place_of(store, &s->info.id);

    memmove(&store->files[i + 1], &store->files[i],
            (store->n_files - i) * sizeof(struct kv_stored *));
    store->files[i] = s;
    store->n_files++;
}

void kv_store_drop(struct kv_store *store, struct kv_stored *s)
{
    const uint32_t i = place_of(store, &s->info.id);

    store->n_files--;
    memmove(&store->files[i], &store->files[i + 1],
            (store->n_files - i) * sizeof(struct kv_stored *));
    kv_stored_free(s);
}

uint32_t kv_stored_depth(const struct kv_stored *s)
{
    uint32_t depth = 0;

    for (; s != NULL && depth <= KV_STORE_DEPTH_MAX; s = s->parent)
        depth++;
    return depth;
}

struct kv_stored *kv_stored_new(const struct kv_file_info *info, uint64_t used_ns)
{
    const struct kv_snapshot_header *h = &info->header;
    struct kv_stored *s = calloc(1, sizeof(*s));

    if (s == NULL)
        return NULL;
    s->n_frames = info->n_frames;
    s->frames = calloc(info->n_frames > 0 ? info->n_frames : 1, sizeof(*s->frames));
    if (s->frames == NULL) {
        free(s);
        return NULL;
    }
    if (info->n_frames > 0)
        memcpy(s->frames, info->frames, info->n_frames * sizeof(*s->frames));
    memcpy(s->info.id.bytes, h->snapshot_id, sizeof(s->info.id.bytes));
    memcpy(s->info.parent.bytes, h->parent_id, sizeof(s->info.parent.bytes));
    s->info.ns = h->ns;
    s->info.geometry = h->geometry;
    s->info.base = h->base;
    s->info.n_positions = info->n_positions;
    s->info.file_bytes = info->bytes;
    s->info.used_ns = used_ns;
    s->fingerprint = h->fingerprint;
    s->numerics_id = h->numerics_id;
    s->base_digest = h->base_digest;
    for (uint32_t i = 0; i < info->n_sections; i++) {
        if (info->sections[i].kind == KV_SECTION_LOGITS)
            s->info.n_logits = info->sections[i].len / (uint32_t)sizeof(float);
        else
            s->info.session_bytes = info->sections[i].len;
    }
    return s;
}

void kv_stored_free(struct kv_stored *s)
{
    if (s == NULL)
        return;
    free(s->frames);
    free(s);
}

struct kv_snapshot_info kv_stored_info(const struct kv_stored *s)
{
    struct kv_snapshot_info info = s->info;

    info.depth = kv_stored_depth(s);
    info.n_children = s->n_children;
    return info;
}

/* ---- Queues ---- */

int kv_store_enter(struct kv_store *store, struct kv_queue **out, struct kv_why *why)
{
    int rc = 0;

    pthread_mutex_lock(&store->lock);
    while (store->n_queues == 0 && store->n_out == store->config.n_queues)
        pthread_cond_wait(&store->queue_free, &store->lock);
    store->n_out++;
    *out = store->n_queues > 0 ? store->queues[--store->n_queues] : NULL;
    pthread_mutex_unlock(&store->lock);
    if (*out == NULL)
        rc = kv_file_queue(store->disk, &store->config.geometry, out, why);
    if (rc < 0) {
        pthread_mutex_lock(&store->lock);
        store->n_out--;
        pthread_cond_signal(&store->queue_free);
        pthread_mutex_unlock(&store->lock);
    }
    return rc;
}

void kv_store_leave(struct kv_store *store, struct kv_queue *queue)
{
    pthread_mutex_lock(&store->lock);
    store->queues[store->n_queues++] = queue;
    store->n_out--;
    pthread_cond_signal(&store->queue_free);
    pthread_mutex_unlock(&store->lock);
}

/* ---- The budget ---- */

static bool try_take(struct kv_store *store, uint64_t bytes, uint64_t *used)
{
    const uint64_t budget = store->config.budget_bytes;
    bool fits;

    pthread_mutex_lock(&store->lock);
    *used = store->stats.bytes;
    fits = budget == 0 || (*used <= budget && bytes <= budget - *used);
    if (fits)
        store->stats.bytes += bytes;
    pthread_mutex_unlock(&store->lock);
    return fits;
}

int kv_store_take(struct kv_store *store, uint64_t bytes, struct kv_why *why)
{
    uint64_t used;

    if (try_take(store, bytes, &used))
        return 0;
    if (kv_store_sweep(store) > 0 && try_take(store, bytes, &used))
        return 0;
    return kv_fail(why, KV_ERR_FULL,
                   "the snapshot is %llu bytes: %llu of the budget of %llu are used",
                   (unsigned long long)bytes, (unsigned long long)used,
                   (unsigned long long)store->config.budget_bytes);
}

void kv_store_give(struct kv_store *store, uint64_t bytes)
{
    pthread_mutex_lock(&store->lock);
    store->stats.bytes -= bytes;
    pthread_mutex_unlock(&store->lock);
}

/* ---- Open ---- */

/* Names are gathered first: the directory changes while files are swept. */
struct names {
    char (*names)[KV_STORE_NAME_BYTES];
    uint32_t n;
    uint32_t cap;
};

static const char *suffix_of(const char *name)
{
    struct kv_snapshot_id id;

    if (strlen(name) >= KV_STORE_NAME_BYTES || strlen(name) < KV_SNAPSHOT_ID_TEXT ||
        parse_id(name, &id) < 0)
        return "";
    return name + KV_SNAPSHOT_ID_TEXT - 1;
}

/* Ours are those that begin with an id; a probe of a disk that died ends in .tmp as well. */
static int gather_name(void *arg, const char *name)
{
    struct names *names = arg;
    const char *suffix = suffix_of(name);

    if (strcmp(suffix, ".kv") != 0 && strcmp(suffix, ".base") != 0 && strcmp(suffix, ".tmp") != 0)
        return 0;
    if (names->n == names->cap) {
        const uint32_t cap = names->cap > 0 ? 2 * names->cap : 64;
        void *grown = realloc(names->names, cap * sizeof(*names->names));

        if (grown == NULL)
            return -ENOMEM;
        names->names = grown;
        names->cap = cap;
    }
    strcpy(names->names[names->n++], name);
    return 0;
}

static void leave_alone(struct kv_store *store, const char *name, const char *why)
{
    store->stats.n_unreadable++;
    if (store->config.left_alone != NULL)
        store->config.left_alone(store->config.arg, name, why);
}

/* Read one file's head into the index; one that cannot be read is counted and left alone. */
static int index_file(struct kv_store *store, struct kv_queue *queue, const char *name,
                      struct kv_why *why)
{
    struct kv_disk_stat st;
    struct kv_snapshot_id id;
    struct kv_stored *s = NULL;
    struct kv_file *file;
    struct kv_why inner = {""};
    int rc = store->disk->ops->stat(store->disk, name, &st);

    if (rc < 0)
        return kv_io_error(why, rc, "read", name);
    store->stats.bytes += st.bytes;
    rc = kv_file_open(queue, name, &file, &inner);
    if (rc == KV_ERR_IO || rc == KV_ERR_NOMEM)
        return kv_fail(why, rc, "%s", inner.text);
    if (rc == 0) {
        s = kv_stored_new(kv_file_info(file), st.mtime_ns > 0 ? (uint64_t)st.mtime_ns : 0);
        kv_file_close(file);
        if (s == NULL || kv_store_room(store) < 0) {
            kv_stored_free(s);
            return kv_fail(why, KV_ERR_NOMEM, "no memory for the index");
        }
        s->retired = strcmp(suffix_of(name), ".base") == 0;
    }
    if (s == NULL || parse_id(name, &id) < 0 || compare_ids(&id, &s->info.id) != 0 ||
        kv_stored_find(store, &id) != NULL) {
        leave_alone(store, name, s == NULL ? inner.text : "its name is not its id, or twice there");
        kv_stored_free(s);
        return 0;
    }
    kv_store_add(store, s);
    return 0;
}

static bool is_parent(const struct kv_stored *p, const struct kv_stored *s)
{
    return p != NULL && p != s && kv_digest_equal(&p->info.ns, &s->info.ns) &&
           s->info.base >= p->info.base && s->info.base <= p->info.n_positions;
}

/* Mark what stands on a file that is not there, and what is deeper than any chain that was ever
 * written (or runs in a circle); returns how many. */
static uint32_t mark_dangling(struct kv_store *store)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < store->n_files; i++) {
        struct kv_stored *s = store->files[i];

        s->parent = s->info.base > 0 ? kv_stored_find(store, &s->info.parent) : NULL;
    }
    for (uint32_t i = 0; i < store->n_files; i++) {
        struct kv_stored *s = store->files[i];

        s->dangling = s->info.base > 0 &&
                      (!is_parent(s->parent, s) || kv_stored_depth(s) > KV_STORE_DEPTH_MAX);
        n += s->dangling;
    }
    return n;
}

/* Take them out of the index, again and again, since others may stand on those. */
static void drop_dangling(struct kv_store *store)
{
    char name[KV_STORE_NAME_BYTES];

    while (mark_dangling(store) > 0)
        for (uint32_t i = store->n_files; i-- > 0;)
            if (store->files[i]->dangling) {
                kv_stored_name(store->files[i], name);
                leave_alone(store, name, "what it stands on is not there");
                kv_store_drop(store, store->files[i]);
            }
    for (uint32_t i = 0; i < store->n_files; i++)
        if (store->files[i]->parent != NULL)
            store->files[i]->parent->n_children++;
}

static int remove_abandoned(struct kv_store *store, struct kv_why *why)
{
    for (uint32_t i = 0; i < store->n_files;) {
        struct kv_stored *s = store->files[i];
        int rc;

        if (!s->retired || s->n_children > 0) {
            i++;
            continue;
        }
        rc = kv_store_remove(store, s, why);
        if (rc < 0)
            return rc;
        i = 0; /* others may have gone with it */
    }
    return 0;
}

static int rebuild(struct kv_store *store, struct kv_queue *queue, struct kv_why *why)
{
    struct names names = {0};
    int rc = store->disk->ops->list(store->disk, gather_name, &names);

    if (rc < 0)
        rc = kv_io_error(why, rc, "list", "the directory");
    if (names.n > KV_STORE_MAX_SNAPSHOTS)
        rc = kv_fail(why, KV_ERR_LIMIT, "the directory has %u snapshots: at most %u", names.n,
                     (unsigned)KV_STORE_MAX_SNAPSHOTS);
    for (uint32_t i = 0; i < names.n && rc == 0; i++) {
        const char *name = names.names[i];

        if (strcmp(suffix_of(name), ".tmp") == 0) {
            rc = store->disk->ops->unlink(store->disk, name);
            if (rc < 0)
                rc = kv_io_error(why, rc, "remove", name);
        } else {
            rc = index_file(store, queue, name, why);
        }
    }
    free(names.names);
    if (rc < 0)
        return rc;
    drop_dangling(store);
    return remove_abandoned(store, why);
}

static int check_config(const struct kv_store_config *c, struct kv_why *why)
{
    int rc = kv_geometry_check(&c->geometry, why);

    if (rc < 0)
        return rc;
    if (c->max_depth > KV_STORE_DEPTH_MAX)
        return kv_fail(why, KV_ERR_INVALID, "max_depth is %u: at most %u", c->max_depth,
                       (unsigned)KV_STORE_DEPTH_MAX);
    if (kv_durability_name(c->durability) == NULL)
        return kv_fail(why, KV_ERR_INVALID, "durability is %u", (unsigned)c->durability);
    if (c->disk == NULL && (c->directory == NULL || c->directory[0] == '\0'))
        return kv_fail(why, KV_ERR_INVALID, "directory is empty");
    return 0;
}

static void free_store(struct kv_store *store)
{
    for (uint32_t i = 0; i < store->n_queues; i++)
        store->disk->ops->queue_close(store->queues[i]);
    for (uint32_t i = 0; i < store->n_files; i++)
        kv_stored_free(store->files[i]);
    store->disk->ops->close(store->disk);
    pthread_cond_destroy(&store->queue_free);
    pthread_mutex_destroy(&store->lock);
    pthread_mutex_destroy(&store->names);
    free(store->files);
    free(store->queues);
    free(store);
}

/* The store as the config says, with nothing in it yet.  NULL: no memory. */
static struct kv_store *new_store(const struct kv_store_config *config)
{
    struct kv_store *store = calloc(1, sizeof(*store));

    if (store == NULL)
        return NULL;
    store->config = *config;
    store->config.directory = NULL;
    if (store->config.max_depth == 0)
        store->config.max_depth = KV_STORE_DEPTH_DEFAULT;
    if (store->config.n_queues == 0)
        store->config.n_queues = KV_STORE_QUEUES_DEFAULT;
    store->queues = calloc(store->config.n_queues, sizeof(struct kv_queue *));
    if (store->queues == NULL) {
        free(store);
        return NULL;
    }
    pthread_mutex_init(&store->names, NULL);
    pthread_mutex_init(&store->lock, NULL);
    pthread_cond_init(&store->queue_free, NULL);
    return store;
}

static int fill_store(struct kv_store *store, struct kv_why *why)
{
    struct kv_queue *queue;
    int rc = kv_store_enter(store, &queue, why);

    if (rc < 0)
        return rc;
    rc = rebuild(store, queue, why);
    kv_store_leave(store, queue);
    return rc;
}

int kv_store_open(const struct kv_store_config *config, struct kv_store **out, struct kv_why *why)
{
    struct kv_disk *disk = config->disk;
    struct kv_store *store;
    int rc = check_config(config, why);

    if (rc == 0 && disk == NULL)
        rc = kv_disk_open(config->directory, 0, &disk, why);
    store = rc == 0 ? new_store(config) : NULL;
    if (rc == 0 && store == NULL)
        rc = kv_fail(why, KV_ERR_NOMEM, "no memory for a store");
    if (store == NULL) {
        if (disk != NULL)
            disk->ops->close(disk);
        return rc;
    }
    store->disk = disk;
    rc = fill_store(store, why);
    if (rc < 0) {
        free_store(store);
        return rc;
    }
    kv_store_sweep(store);
    *out = store;
    return 0;
}

void kv_store_close(struct kv_store *store)
{
    if (store != NULL)
        free_store(store);
}

const char *kv_store_describe(const struct kv_store *store)
{
    return store->disk->ops->describe(store->disk);
}

/* ---- What is there ---- */

uint32_t kv_store_list(struct kv_store *store, const struct kv_digest *ns,
                       struct kv_snapshot_info *out, uint32_t n_out)
{
    uint32_t n = 0;

    pthread_mutex_lock(&store->lock);
    for (uint32_t i = 0; i < store->n_files; i++) {
        const struct kv_stored *s = store->files[i];

        if (s->retired || (ns != NULL && !kv_digest_equal(ns, &s->info.ns)))
            continue;
        if (n < n_out)
            out[n] = kv_stored_info(s);
        n++;
    }
    pthread_mutex_unlock(&store->lock);
    return n;
}

int kv_store_find(struct kv_store *store, const struct kv_snapshot_id *id,
                  struct kv_snapshot_info *out)
{
    const struct kv_stored *s;
    int rc = KV_ERR_NOT_FOUND;

    pthread_mutex_lock(&store->lock);
    s = kv_stored_find(store, id);
    if (s != NULL && !s->retired) {
        *out = kv_stored_info(s);
        rc = 0;
    }
    pthread_mutex_unlock(&store->lock);
    return rc;
}

void kv_store_stats(struct kv_store *store, struct kv_store_stats *out)
{
    pthread_mutex_lock(&store->lock);
    *out = store->stats;
    out->n_snapshots = out->n_retired = 0;
    for (uint32_t i = 0; i < store->n_files; i++)
        ++*(store->files[i]->retired ? &out->n_retired : &out->n_snapshots);
    out->budget_bytes = store->config.budget_bytes;
    out->durability = store->config.durability;
    pthread_mutex_unlock(&store->lock);
}

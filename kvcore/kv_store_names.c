/* How files leave the store.  A file that others stand on is renamed, not removed; what nobody
 * stands on any more goes, and the directory is synced before what it stood on may go too, so that
 * no power cut leaves a file without its parent. */
#include "kvcore/kv_store_index.h"

#include <stdlib.h>

int kv_store_sync_names(struct kv_store *store, struct kv_why *why)
{
    int rc = 0;

    if (store->config.durability == KV_DURABLE)
        rc = store->disk->ops->sync_directory(store->disk);
    return rc < 0 ? kv_io_error(why, rc, "sync", "the directory") : 0;
}

/* Unlink and forget one file that has no children. */
static int remove_one(struct kv_store *store, struct kv_stored *s, struct kv_why *why)
{
    char name[KV_STORE_NAME_BYTES];
    int rc;

    kv_stored_name(s, name);
    rc = store->disk->ops->unlink(store->disk, name);
    if (rc < 0)
        return kv_io_error(why, rc, "remove", name);
    pthread_mutex_lock(&store->lock);
    store->stats.bytes -= s->info.file_bytes;
    kv_store_drop(store, s);
    pthread_mutex_unlock(&store->lock);
    return 0;
}

/* One child less; whether the parent has to go. */
static bool is_abandoned(struct kv_store *store, struct kv_stored *parent)
{
    bool abandoned;

    pthread_mutex_lock(&store->lock);
    abandoned = --parent->n_children == 0 && parent->retired;
    pthread_mutex_unlock(&store->lock);
    return abandoned;
}

void kv_store_release_parent(struct kv_store *store, struct kv_stored *parent)
{
    while (parent != NULL && is_abandoned(store, parent)) {
        struct kv_stored *next = parent->parent;

        /* What cannot be removed now is swept at the next open. */
        if (store->disk->ops->sync_directory(store->disk) < 0 ||
            remove_one(store, parent, NULL) < 0)
            return;
        parent = next;
    }
}

int kv_store_remove(struct kv_store *store, struct kv_stored *s, struct kv_why *why)
{
    struct kv_stored *parent = s->parent;
    const int rc = remove_one(store, s, why);

    if (rc == 0)
        kv_store_release_parent(store, parent);
    return rc;
}

/* Not listed any more; its children need it. */
static int retire(struct kv_store *store, struct kv_stored *s, struct kv_why *why)
{
    char from[KV_STORE_NAME_BYTES], to[KV_STORE_NAME_BYTES];
    struct kv_stored as = {.info = s->info, .retired = true};
    int rc;

    kv_stored_name(s, from);
    kv_stored_name(&as, to);
    rc = store->disk->ops->rename(store->disk, from, to);
    if (rc < 0)
        return kv_io_error(why, rc, "rename", from);
    pthread_mutex_lock(&store->lock);
    s->retired = true;
    pthread_mutex_unlock(&store->lock);
    return 0;
}

int kv_store_delete(struct kv_store *store, const struct kv_snapshot_id *id, struct kv_why *why)
{
    struct kv_stored *s;
    bool has_children;
    int rc;

    pthread_mutex_lock(&store->names);
    pthread_mutex_lock(&store->lock);
    s = kv_stored_find(store, id);
    has_children = s != NULL && s->n_children > 0;
    pthread_mutex_unlock(&store->lock);
    if (s == NULL || s->retired) {
        char text[KV_SNAPSHOT_ID_TEXT];

        kv_snapshot_id_print(id, text);
        rc = kv_fail(why, KV_ERR_NOT_FOUND, "no snapshot %s", text);
    } else {
        rc = has_children ? retire(store, s, why) : kv_store_remove(store, s, why);
        if (rc == 0)
            rc = kv_store_sync_names(store, why);
    }
    pthread_mutex_unlock(&store->names);
    return rc;
}

/* The first that is past its time; false: none. */
static bool find_expired(struct kv_store *store, uint64_t now, struct kv_snapshot_id *out)
{
    bool found = false;

    pthread_mutex_lock(&store->lock);
    for (uint32_t i = 0; i < store->n_files && !found; i++) {
        const struct kv_stored *s = store->files[i];

        found =
            !s->retired && s->info.used_ns < now && now - s->info.used_ns >= store->config.ttl_ns;
        if (found)
            *out = s->info.id;
    }
    pthread_mutex_unlock(&store->lock);
    return found;
}

uint32_t kv_store_sweep(struct kv_store *store)
{
    const uint64_t now = store->disk->ops->now_ns(store->disk);
    struct kv_snapshot_id id;
    uint32_t n = 0;

    if (store->config.ttl_ns == 0)
        return 0;
    while (find_expired(store, now, &id) && kv_store_delete(store, &id, NULL) == 0)
        n++;
    pthread_mutex_lock(&store->lock);
    store->stats.n_expired += n;
    pthread_mutex_unlock(&store->lock);
    return n;
}

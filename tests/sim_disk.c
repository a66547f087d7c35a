#include "sim_disk.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

enum {
    NAME_BYTES = 64,
    SECTOR = 512,
    N_FAULTS = 16,
    N_PAST = 64,  /* completions that are remembered, to come again */
    UNREAD = 0xa5 /* what a buffer holds until its read is complete */
};

/* A list that grows: items[n], room for more. */
#define GROW(list, n, room)                                               \
    do {                                                                  \
        if ((n) == (room)) {                                              \
            (room) = (room) == 0 ? 8 : 2 * (room);                        \
            (list) = must(reallocarray((list), (room), sizeof(*(list)))); \
        }                                                                 \
    } while (0)

struct bytes {
    unsigned char *p; /* [len] */
    size_t len, room;
};

/* A pending change of a file. */
struct change {
    unsigned char *data; /* [len] to `offset`; NULL: the length became `offset` */
    uint64_t offset;
    size_t len;
};

struct inode {
    struct bytes seen, kept; /* by the program; by the disk whatever happens */
    struct change *changes;  /* in order */
    uint32_t n_changes, room;
    int64_t mtime, kept_mtime;
    uint64_t allocated;
    bool used; /* scratch of collect() */
};

struct entry {
    char name[NAME_BYTES];
    struct inode *inode;
};

struct names {
    struct entry *list;
    uint32_t n, room;
};

/* A pending change of the directory: `from` goes ("": nothing), `to` becomes the inode (NULL:
 * nothing does). */
struct turn {
    char from[NAME_BYTES], to[NAME_BYTES];
    struct inode *inode;
};

struct file {
    struct inode *inode; /* NULL: this number is free */
    char name[NAME_BYTES];
    bool to_write;
    uint32_t n_under_way;
};

struct fault {
    enum sim_kind kind;
    uint64_t nth;
    int error; /* 0: none here */
};

struct record {
    enum sim_kind kind;
    char name[NAME_BYTES];
    uint64_t offset, len;
    int64_t result;
};

struct sim_disk {
    struct kv_disk base;
    pthread_mutex_t lock; /* of all below */
    bool is_open;
    uint32_t n_queues;
    uint64_t random; /* state of next_random() */
    uint64_t now_ns;
    struct sim_behaviour how;

    struct inode **inodes;
    uint32_t n_inodes, inodes_room;
    struct names seen, kept;
    struct turn *turns;
    uint32_t n_turns, turns_room;
    struct file *files;
    uint32_t n_files, files_room;

    uint64_t counts[SIM_N_KINDS];
    struct fault faults[N_FAULTS];
    int fail_all[SIM_N_KINDS];
    uint64_t n_changes, crash_at;
    bool crashing; /* the operation under way is the one */
    bool dead;

    struct record *log;
    size_t n_log, log_room;
};

/* An operation under way. */
struct sim_op {
    struct kv_io_op op;
    unsigned char *copy; /* of a write: what the buffer held */
    uint32_t moves;      /* how many bytes */
    int fault;
    bool late;
};

struct sim_queue {
    struct kv_queue base;
    unsigned char *memory;
    struct sim_op *ops; /* [n_ops] under way, oldest first */
    uint32_t n_ops;
    struct kv_io_done past[N_PAST];
    uint32_t n_past;
};

/* ---- Small things ---- */

static void *must(void *p)
{
    if (p == NULL) {
        fprintf(stderr, "sim_disk: no memory\n");
        abort();
    }
    return p;
}

static void *zeroed(size_t size)
{
    void *p = NULL;

    if (posix_memalign(&p, 64, size) != 0)
        p = NULL;
    return memset(must(p), 0, size);
}

__attribute__((format(printf, 1, 2), noreturn)) static void broken(const char *fmt, ...)
{
    va_list args;

    va_start(args, fmt);
    fprintf(stderr, "sim_disk: ");
    vfprintf(stderr, fmt, args);
    fputc('\n', stderr);
    va_end(args);
    abort();
}

/* splitmix64 */
static uint64_t next_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static bool one_in(uint64_t *random, uint64_t n)
{
    return next_random(random) % n == 0;
}

static struct sim_disk *sim_of(struct kv_disk *disk)
{
    return (struct sim_disk *)disk;
}

static void copy_name(char to[NAME_BYTES], const char *name)
{
    if (strlen(name) >= NAME_BYTES)
        broken("name %s is too long", name);
    strcpy(to, name);
}

static bool is_plain(const char *name)
{
    return name[0] != '\0' && strchr(name, '/') == NULL && strcmp(name, ".") != 0 &&
           strcmp(name, "..") != 0;
}

/* ---- Bytes ---- */

static void bytes_resize(struct bytes *b, size_t len)
{
    if (len > b->room) {
        b->room = len < 2 * b->room ? 2 * b->room : len;
        b->p = must(reallocarray(b->p, b->room, 1));
    }
    if (len > b->len)
        memset(b->p + b->len, 0, len - b->len);
    b->len = len;
}

static void bytes_write(struct bytes *b, uint64_t offset, const void *data, size_t len)
{
    if (len == 0)
        return;
    if (offset + len > b->len)
        bytes_resize(b, offset + len);
    memcpy(b->p + offset, data, len);
}

static void bytes_copy(struct bytes *to, const struct bytes *from)
{
    bytes_resize(to, 0);
    bytes_write(to, 0, from->p, from->len);
}

/* ---- Changes of a file ---- */

static struct change *add_change(struct inode *inode)
{
    struct change *c;

    GROW(inode->changes, inode->n_changes, inode->room);
    c = &inode->changes[inode->n_changes++];
    *c = (struct change){0};
    return c;
}

static void drop_changes(struct inode *inode)
{
    for (uint32_t i = 0; i < inode->n_changes; i++)
        free(inode->changes[i].data);
    inode->n_changes = 0;
}

static uint64_t length_after(const struct change *c, uint64_t len)
{
    if (c->data == NULL)
        return c->offset;
    return c->offset + c->len > len ? c->offset + c->len : len;
}

static void apply(struct bytes *b, const struct change *c)
{
    if (c->data == NULL)
        bytes_resize(b, c->offset);
    else
        bytes_write(b, c->offset, c->data, c->len);
}

static void set_allocated(struct inode *inode, uint64_t len)
{
    const uint64_t blocks = (len + KV_IO_ALIGN - 1) / KV_IO_ALIGN * KV_IO_ALIGN;

    if (blocks > inode->allocated)
        inode->allocated = blocks;
}

static void set_length(struct inode *inode, uint64_t len)
{
    struct change *c = add_change(inode);

    c->offset = len;
    apply(&inode->seen, c);
}

static void add_write(struct inode *inode, uint64_t offset, const void *data, size_t len)
{
    struct change *c = add_change(inode);

    c->offset = offset;
    c->len = len;
    c->data = memcpy(zeroed(len + 1), data, len);
    apply(&inode->seen, c);
    set_allocated(inode, inode->seen.len);
}

/* What sync() promises. */
static void keep_changes(struct inode *inode)
{
    for (uint32_t i = 0; i < inode->n_changes; i++)
        apply(&inode->kept, &inode->changes[i]);
    drop_changes(inode);
    inode->kept_mtime = inode->mtime;
}

/* Sectors of a write that happened: none (grain 0), all (UINT64_MAX), or each by chance. */
static void tear(struct bytes *to, const struct change *c, uint64_t grain, uint64_t *random)
{
    if (grain == 0)
        return;
    for (uint64_t at = c->offset, end = c->offset + c->len; at < end;) {
        uint64_t next = grain == UINT64_MAX ? end : (at / grain + 1) * grain;

        next = next < end ? next : end;
        if (grain == UINT64_MAX || one_in(random, 2))
            bytes_write(to, at, c->data + (at - c->offset), next - at);
        at = next;
    }
}

/* One of the lengths that a file had since its sync; the room for all of them in *most. */
static uint64_t choose_length(const struct inode *inode, uint64_t *most, uint64_t *random)
{
    const uint64_t choice = next_random(random) % (inode->n_changes + 1);
    const bool last = one_in(random, 2);
    uint64_t len = inode->kept.len, chosen = len;

    *most = len;
    for (uint32_t i = 0; i < inode->n_changes; i++) {
        len = length_after(&inode->changes[i], len);
        if (last || i < choice)
            chosen = len;
        if (len > *most)
            *most = len;
    }
    return chosen;
}

/* Decide on every pending change: kept becomes one of the states that the disk might be in.  Each
 * by chance, or all but one, or none but one: a single loss is what most often shows a mistake. */
static void decide_changes(struct inode *inode, uint64_t *random)
{
    static const uint64_t grains[] = {0, UINT64_MAX, SECTOR, KV_IO_ALIGN};
    enum { BY_CHANCE, ALL_BUT_ONE, ONE } mood = (unsigned)(next_random(random) % 3);
    const uint64_t one = next_random(random) % (inode->n_changes + 1);
    const size_t was = inode->kept.len;
    uint64_t most;
    const uint64_t len = choose_length(inode, &most, random);

    bytes_resize(&inode->kept, most);
    if (one_in(random, 4))
        for (size_t i = was; i < most; i++)
            inode->kept.p[i] = (unsigned char)next_random(random); /* junk */
    for (uint32_t i = 0; i < inode->n_changes; i++) {
        const uint64_t others = mood == ALL_BUT_ONE ? UINT64_MAX : 0;
        const bool by_chance = mood == BY_CHANCE || i == one;
        const uint64_t grain = by_chance ? grains[next_random(random) % 4] : others;

        if (inode->changes[i].data != NULL)
            tear(&inode->kept, &inode->changes[i], grain, random);
    }
    bytes_resize(&inode->kept, len);
    if (one_in(random, 2))
        inode->kept_mtime = inode->mtime;
    drop_changes(inode);
}

/* ---- Names ---- */

static struct entry *find(const struct names *names, const char *name)
{
    for (uint32_t i = 0; i < names->n; i++)
        if (strcmp(names->list[i].name, name) == 0)
            return &names->list[i];
    return NULL;
}

static void turn_names(struct names *names, const struct turn *t)
{
    struct entry *e = find(names, t->from);

    if (e != NULL)
        *e = names->list[--names->n];
    if (t->inode == NULL)
        return;
    e = find(names, t->to);
    if (e == NULL) {
        GROW(names->list, names->n, names->room);
        e = &names->list[names->n++];
        copy_name(e->name, t->to);
    }
    e->inode = t->inode;
}

static void add_turn(struct sim_disk *sim, const char *from, const char *to, struct inode *inode)
{
    struct turn *t;

    GROW(sim->turns, sim->n_turns, sim->turns_room);
    t = &sim->turns[sim->n_turns++];
    copy_name(t->from, from);
    copy_name(t->to, to);
    t->inode = inode;
    turn_names(&sim->seen, t);
}

static void keep_turns(struct sim_disk *sim)
{
    for (uint32_t i = 0; i < sim->n_turns; i++)
        turn_names(&sim->kept, &sim->turns[i]);
    sim->n_turns = 0;
}

static void decide_turns(struct sim_disk *sim, uint64_t *random)
{
    const bool in_order = one_in(random, 2);
    const uint64_t first = next_random(random) % (sim->n_turns + 1);

    for (uint32_t i = 0; i < sim->n_turns; i++)
        if (in_order ? i < first : one_in(random, 2))
            turn_names(&sim->kept, &sim->turns[i]);
    sim->n_turns = 0;
}

/* ---- Inodes ---- */

static struct inode *add_inode(struct sim_disk *sim)
{
    struct inode *inode = zeroed(sizeof(*inode));

    GROW(sim->inodes, sim->n_inodes, sim->inodes_room);
    sim->inodes[sim->n_inodes++] = inode;
    inode->mtime = inode->kept_mtime = (int64_t)sim->now_ns;
    return inode;
}

static void free_inode(struct inode *inode)
{
    drop_changes(inode);
    free(inode->changes);
    free(inode->seen.p);
    free(inode->kept.p);
    free(inode);
}

static void mark(struct names *names)
{
    for (uint32_t i = 0; i < names->n; i++)
        names->list[i].inode->used = true;
}

/* Free the inodes that nothing leads to. */
static void collect(struct sim_disk *sim)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < sim->n_inodes; i++)
        sim->inodes[i]->used = false;
    mark(&sim->seen);
    mark(&sim->kept);
    for (uint32_t i = 0; i < sim->n_turns; i++)
        if (sim->turns[i].inode != NULL)
            sim->turns[i].inode->used = true;
    for (uint32_t i = 0; i < sim->n_files; i++)
        if (sim->files[i].inode != NULL)
            sim->files[i].inode->used = true;
    for (uint32_t i = 0; i < sim->n_inodes; i++) {
        if (sim->inodes[i]->used)
            sim->inodes[n++] = sim->inodes[i];
        else
            free_inode(sim->inodes[i]);
    }
    sim->n_inodes = n;
}

/* What the program can still reach. */
static uint64_t allocated(struct sim_disk *sim)
{
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < sim->n_inodes; i++)
        sim->inodes[i]->used = false;
    mark(&sim->seen);
    for (uint32_t i = 0; i < sim->n_files; i++)
        if (sim->files[i].inode != NULL)
            sim->files[i].inode->used = true;
    for (uint32_t i = 0; i < sim->n_inodes; i++)
        if (sim->inodes[i]->used)
            bytes += sim->inodes[i]->allocated;
    return bytes;
}

static bool fits(struct sim_disk *sim, const struct inode *inode, uint64_t len)
{
    const uint64_t blocks = (len + KV_IO_ALIGN - 1) / KV_IO_ALIGN * KV_IO_ALIGN;

    return sim->how.capacity_bytes == 0 || blocks <= inode->allocated ||
           allocated(sim) - inode->allocated + blocks <= sim->how.capacity_bytes;
}

/* ---- Operations: their beginning and end ---- */

static bool is_change(enum sim_kind kind)
{
    switch (kind) {
    case SIM_LIST:
    case SIM_STAT:
    case SIM_OPEN:
    case SIM_READ_CACHED:
    case SIM_QUEUE_OPEN:
    case SIM_READ:
    case SIM_SUBMIT:
    case SIM_N_KINDS:
        return false;
    case SIM_TOUCH:
    case SIM_RENAME:
    case SIM_UNLINK:
    case SIM_SYNC_DIRECTORY:
    case SIM_CREATE:
    case SIM_ALLOCATE:
    case SIM_TRUNCATE:
    case SIM_SYNC:
    case SIM_WRITE:
        break;
    }
    return true;
}

static int take_fault(struct sim_disk *sim, enum sim_kind kind)
{
    const uint64_t n = sim->counts[kind]++;

    for (uint32_t i = 0; i < N_FAULTS; i++) {
        struct fault *f = &sim->faults[i];
        const int error = f->error;

        if (error != 0 && f->kind == kind && f->nth == n) {
            f->error = 0;
            return error;
        }
    }
    return sim->fail_all[kind];
}

static int begin(struct sim_disk *sim, enum sim_kind kind, const char *name, uint64_t offset,
                 uint64_t len)
{
    struct record *r;

    GROW(sim->log, sim->n_log, sim->log_room);
    r = &sim->log[sim->n_log++];
    *r = (struct record){.kind = kind, .offset = offset, .len = len};
    snprintf(r->name, sizeof(r->name), "%s", name);
    sim->now_ns += 1000;
    sim->crashing = false;
    if (sim->dead)
        return -EIO;
    if (is_change(kind))
        sim->crashing = sim->n_changes++ == sim->crash_at;
    return take_fault(sim, kind);
}

/* Takes the lock.  0, a fault, or -EIO of a disk that is dead. */
static int enter(struct sim_disk *sim, enum sim_kind kind, const char *name, uint64_t offset,
                 uint64_t len)
{
    pthread_mutex_lock(&sim->lock);
    return begin(sim, kind, name, offset, len);
}

static struct file *file_of(struct sim_disk *sim, int number)
{
    if (number < 0 || (uint32_t)number >= sim->n_files || sim->files[number].inode == NULL)
        return NULL;
    return &sim->files[number];
}

static int enter_file(struct sim_disk *sim, enum sim_kind kind, int number, uint64_t offset,
                      uint64_t len)
{
    const struct file *f;

    pthread_mutex_lock(&sim->lock);
    f = file_of(sim, number);
    return begin(sim, kind, f == NULL ? "?" : f->name, offset, len);
}

/* Gives the lock back.  The operation at which the power went says nothing of what it did. */
static int64_t leave(struct sim_disk *sim, int64_t result)
{
    if (sim->crashing) {
        sim->dead = true;
        result = -EIO;
    }
    sim->crashing = false;
    sim->log[sim->n_log - 1].result = result;
    pthread_mutex_unlock(&sim->lock);
    return result;
}

/* ---- The table: names ---- */

static const char *disk_describe(struct kv_disk *disk)
{
    (void)disk;
    return "simulated";
}

static uint64_t disk_now_ns(struct kv_disk *disk)
{
    struct sim_disk *sim = sim_of(disk);
    uint64_t now;

    pthread_mutex_lock(&sim->lock);
    now = sim->now_ns;
    pthread_mutex_unlock(&sim->lock);
    return now;
}

static int disk_list(struct kv_disk *disk, int (*each)(void *arg, const char *name), void *arg)
{
    struct sim_disk *sim = sim_of(disk);
    struct names copy = {0};
    int rc = enter(sim, SIM_LIST, "", 0, 0);

    /* Of a copy, and unlocked: `each` may well unlink. */
    for (uint32_t i = 0; rc == 0 && i < sim->seen.n; i++) {
        GROW(copy.list, copy.n, copy.room);
        copy.list[copy.n++] = sim->seen.list[i];
    }
    rc = (int)leave(sim, rc);
    for (uint32_t i = 0; rc == 0 && i < copy.n; i++)
        rc = each(arg, copy.list[i].name);
    free(copy.list);
    return rc;
}

/* The inode of a name in *out, or an error. */
static int look_up(struct sim_disk *sim, const char *name, struct inode **out)
{
    struct entry *e;

    if (!is_plain(name))
        return -EINVAL;
    e = find(&sim->seen, name);
    if (e == NULL)
        return -ENOENT;
    *out = e->inode;
    return 0;
}

static int disk_stat(struct kv_disk *disk, const char *name, struct kv_disk_stat *out)
{
    struct sim_disk *sim = sim_of(disk);
    struct inode *inode;
    int rc = enter(sim, SIM_STAT, name, 0, 0);

    if (rc == 0)
        rc = look_up(sim, name, &inode);
    if (rc == 0)
        *out = (struct kv_disk_stat){inode->seen.len, inode->allocated, inode->mtime};
    return (int)leave(sim, rc);
}

static int disk_touch(struct kv_disk *disk, const char *name, int64_t mtime_ns)
{
    struct sim_disk *sim = sim_of(disk);
    struct inode *inode;
    int rc = enter(sim, SIM_TOUCH, name, (uint64_t)mtime_ns, 0);

    if (rc == 0)
        rc = look_up(sim, name, &inode);
    if (rc == 0)
        inode->mtime = mtime_ns;
    return (int)leave(sim, rc);
}

static int disk_rename(struct kv_disk *disk, const char *from, const char *to)
{
    struct sim_disk *sim = sim_of(disk);
    struct inode *inode;
    int rc = enter(sim, SIM_RENAME, from, 0, 0);

    if (rc == 0)
        rc = is_plain(to) ? look_up(sim, from, &inode) : -EINVAL;
    if (rc == 0)
        add_turn(sim, from, to, inode);
    return (int)leave(sim, rc);
}

static int disk_unlink(struct kv_disk *disk, const char *name)
{
    struct sim_disk *sim = sim_of(disk);
    struct inode *inode;
    int rc = enter(sim, SIM_UNLINK, name, 0, 0);

    if (rc == 0)
        rc = look_up(sim, name, &inode);
    if (rc == 0)
        add_turn(sim, name, "", NULL);
    return (int)leave(sim, rc);
}

static int disk_sync_directory(struct kv_disk *disk)
{
    struct sim_disk *sim = sim_of(disk);
    int rc = enter(sim, SIM_SYNC_DIRECTORY, "", 0, 0);

    if (rc < 0 && !sim->dead)
        decide_turns(sim, &sim->random);
    else if (rc == 0 && !sim->crashing && !sim->how.ignore_sync_directory)
        keep_turns(sim);
    collect(sim);
    return (int)leave(sim, rc);
}

/* ---- The table: files ---- */

static int number_file(struct sim_disk *sim, const char *name, struct inode *inode, bool to_write)
{
    uint32_t i = 0;

    while (i < sim->n_files && sim->files[i].inode != NULL)
        i++;
    if (i == sim->n_files) {
        GROW(sim->files, sim->n_files, sim->files_room);
        sim->n_files++;
    }
    sim->files[i] = (struct file){.inode = inode, .to_write = to_write};
    copy_name(sim->files[i].name, name);
    return (int)i;
}

static int disk_open(struct kv_disk *disk, const char *name, enum kv_disk_open how)
{
    struct sim_disk *sim = sim_of(disk);
    const bool create = how == KV_DISK_CREATE;
    struct inode *inode = NULL;
    int rc = enter(sim, create ? SIM_CREATE : SIM_OPEN, name, 0, 0);

    if (rc < 0)
        return (int)leave(sim, rc);
    rc = look_up(sim, name, &inode);
    if (create && rc == 0)
        rc = -EEXIST;
    if (create && rc == -ENOENT) {
        inode = add_inode(sim);
        add_turn(sim, "", name, inode);
        rc = 0;
    }
    if (rc == 0 && !sim->crashing)
        rc = number_file(sim, name, inode, create);
    return (int)leave(sim, rc);
}

/* A file for an operation that changes all of it. */
static int to_change(struct sim_disk *sim, int number, const char *doing, struct file **out)
{
    struct file *f = file_of(sim, number);

    if (f == NULL || !f->to_write)
        return -EBADF;
    if (f->n_under_way > 0)
        broken("%s of %s while %u operations on it are under way", doing, f->name, f->n_under_way);
    *out = f;
    return 0;
}

static int disk_allocate(struct kv_disk *disk, int number, uint64_t bytes)
{
    struct sim_disk *sim = sim_of(disk);
    struct file *f;
    int rc = enter_file(sim, SIM_ALLOCATE, number, 0, bytes);

    if (rc == 0)
        rc = to_change(sim, number, "allocate", &f);
    if (rc == 0 && !fits(sim, f->inode, bytes))
        rc = -ENOSPC;
    if (rc == 0) {
        set_allocated(f->inode, bytes);
        if (bytes > f->inode->seen.len)
            set_length(f->inode, bytes);
    }
    return (int)leave(sim, rc);
}

static int disk_truncate(struct kv_disk *disk, int number, uint64_t bytes)
{
    struct sim_disk *sim = sim_of(disk);
    struct file *f;
    int rc = enter_file(sim, SIM_TRUNCATE, number, 0, bytes);

    if (rc == 0)
        rc = to_change(sim, number, "truncate", &f);
    if (rc == 0) {
        set_length(f->inode, bytes);
        f->inode->allocated = 0;
        set_allocated(f->inode, bytes);
    }
    return (int)leave(sim, rc);
}

static int disk_sync(struct kv_disk *disk, int number)
{
    struct sim_disk *sim = sim_of(disk);
    struct file *f = NULL;
    int rc = enter_file(sim, SIM_SYNC, number, 0, 0);
    const int found = to_change(sim, number, "sync", &f);

    if (found < 0)
        rc = found;
    else if (rc < 0 && !sim->dead)
        decide_changes(f->inode, &sim->random);
    else if (rc == 0 && !sim->crashing && !sim->how.ignore_sync)
        keep_changes(f->inode);
    return (int)leave(sim, rc);
}

static void disk_close_file(struct kv_disk *disk, int number)
{
    struct sim_disk *sim = sim_of(disk);
    struct file *f;

    pthread_mutex_lock(&sim->lock);
    f = file_of(sim, number);
    if (f == NULL)
        broken("file %d is closed but not open", number);
    if (f->n_under_way > 0)
        broken("close of %s while %u operations on it are under way", f->name, f->n_under_way);
    f->inode = NULL;
    collect(sim);
    pthread_mutex_unlock(&sim->lock);
}

static size_t bytes_read(const struct bytes *from, void *dst, uint64_t len, uint64_t offset)
{
    if (offset >= from->len)
        return 0;
    if (len > from->len - offset)
        len = from->len - offset;
    memcpy(dst, from->p + offset, len);
    return len;
}

static int64_t disk_read_cached(struct kv_disk *disk, int number, void *dst, size_t len,
                                uint64_t offset)
{
    struct sim_disk *sim = sim_of(disk);
    int64_t rc = enter_file(sim, SIM_READ_CACHED, number, offset, len);
    const struct file *f = file_of(sim, number);

    if (f == NULL)
        rc = -EBADF;
    if (rc == 0 && sim->how.cached == SIM_CACHED_NONE)
        rc = -EAGAIN;
    if (rc == 0 && sim->how.cached == SIM_CACHED_SOME) {
        if (one_in(&sim->random, 3))
            rc = -EAGAIN;
        else if (len > 1 && one_in(&sim->random, 2))
            len = 1 + next_random(&sim->random) % (len - 1);
    }
    if (rc == 0)
        rc = (int64_t)bytes_read(&f->inode->seen, dst, len, offset);
    return leave(sim, rc);
}

/* ---- The table: queues ---- */

static int queue_open(struct kv_disk *disk, uint32_t n_buffers, uint32_t buffer_bytes,
                      struct kv_queue **out)
{
    struct sim_disk *sim = sim_of(disk);
    struct sim_queue *q;
    void *memory = NULL;
    int rc = enter(sim, SIM_QUEUE_OPEN, "", n_buffers, buffer_bytes);

    if (n_buffers == 0 || buffer_bytes == 0 || buffer_bytes % KV_IO_ALIGN != 0)
        rc = -EINVAL;
    if (rc < 0)
        return (int)leave(sim, rc);
    q = zeroed(sizeof(*q));
    if (posix_memalign(&memory, KV_IO_ALIGN, (size_t)n_buffers * buffer_bytes) != 0)
        memory = NULL;
    q->memory = must(memory);
    memset(q->memory, 0, (size_t)n_buffers * buffer_bytes);
    q->ops = zeroed(n_buffers * sizeof(*q->ops));
    q->base.disk = disk;
    q->base.buffers = zeroed(n_buffers * sizeof(*q->base.buffers));
    for (uint32_t i = 0; i < n_buffers; i++)
        q->base.buffers[i] = q->memory + (size_t)i * buffer_bytes;
    q->base.n_buffers = n_buffers;
    q->base.buffer_bytes = buffer_bytes;
    sim->n_queues++;
    *out = &q->base;
    return (int)leave(sim, 0);
}

static void queue_close(struct kv_queue *queue)
{
    struct sim_queue *q = (struct sim_queue *)queue;

    if (q == NULL)
        return;
    if (q->n_ops > 0)
        broken("queue is closed while %u operations are under way", q->n_ops);
    pthread_mutex_lock(&sim_of(queue->disk)->lock);
    sim_of(queue->disk)->n_queues--;
    pthread_mutex_unlock(&sim_of(queue->disk)->lock);
    free(q->memory);
    free(q->ops);
    free(q->base.buffers);
    free(q);
}

static int check_op(struct sim_disk *sim, const struct sim_queue *q, const struct kv_io_op *op)
{
    const struct file *f = file_of(sim, op->file);

    if (f == NULL || f->to_write != (op->kind == KV_IO_WRITE))
        return -EBADF;
    if (op->buffer >= q->base.n_buffers || op->at > q->base.buffer_bytes || op->len == 0 ||
        op->len > q->base.buffer_bytes - op->at)
        return -EINVAL;
    if (op->at % KV_IO_ALIGN != 0 || op->len % KV_IO_ALIGN != 0 || op->offset % KV_IO_ALIGN != 0)
        return -EINVAL;
    for (uint32_t i = 0; i < q->n_ops; i++)
        if (q->ops[i].op.tag == op->tag)
            broken("tag %" PRIu64 " is under way already", op->tag);
    for (uint32_t i = 0; i < q->n_past; i++)
        if (q->past[i].tag == op->tag)
            broken("tag %" PRIu64 " is used a second time", op->tag);
    return q->n_ops == q->base.n_buffers ? -EAGAIN : 0;
}

/* How the operation will go: a fault that was asked for, or one of the disk's ways. */
static int choose_fault(struct sim_disk *sim, int fault, uint32_t len)
{
    if (fault != 0)
        return fault;
    if (sim->how.interrupt && one_in(&sim->random, 4))
        return one_in(&sim->random, 2) ? -EINTR : -EAGAIN;
    if (sim->how.shorten && len > KV_IO_ALIGN && one_in(&sim->random, 3))
        return SIM_SHORT;
    return 0;
}

/* How much of len is moved in place of all: whole blocks where there are several. */
static uint32_t shortened(struct sim_disk *sim, uint32_t len)
{
    const uint32_t blocks = len / KV_IO_ALIGN;

    if (blocks < 2)
        return SECTOR;
    return KV_IO_ALIGN * (1 + (uint32_t)(next_random(&sim->random) % (blocks - 1)));
}

static void begin_write(struct sim_disk *sim, struct sim_op *o, const unsigned char *bytes)
{
    struct inode *inode = file_of(sim, o->op.file)->inode;
    uint32_t len = o->moves;

    o->copy = memcpy(zeroed(o->op.len), bytes, o->op.len);
    if (o->fault >= 0 && !fits(sim, inode, o->op.offset + len))
        o->fault = -ENOSPC;
    if (o->fault == -EIO)
        len = SECTOR * (uint32_t)(next_random(&sim->random) % (len / SECTOR));
    else if (o->fault < 0)
        len = 0;
    add_write(inode, o->op.offset, bytes, len);
}

static int queue_submit(struct kv_queue *queue, const struct kv_io_op *op)
{
    struct sim_queue *q = (struct sim_queue *)queue;
    struct sim_disk *sim = sim_of(queue->disk);
    const bool is_write = op->kind == KV_IO_WRITE;
    const int fault =
        enter_file(sim, is_write ? SIM_WRITE : SIM_READ, op->file, op->offset, op->len);
    int rc = sim->dead ? -EIO : take_fault(sim, SIM_SUBMIT);
    struct sim_op *o;
    unsigned char *bytes;

    if (rc == 0)
        rc = check_op(sim, q, op);
    if (rc < 0)
        return (int)leave(sim, rc);
    o = &q->ops[q->n_ops++];
    *o = (struct sim_op){.op = *op, .fault = choose_fault(sim, fault, op->len)};
    o->moves = o->fault == SIM_SHORT ? shortened(sim, op->len) : op->len;
    o->late = sim->how.any_order && one_in(&sim->random, 4);
    bytes = queue->buffers[op->buffer] + op->at;
    if (is_write)
        begin_write(sim, o, bytes);
    else
        memset(bytes, UNREAD, op->len);
    file_of(sim, op->file)->n_under_way++;
    /* It was taken, also where the power goes meanwhile: wait() will say so. */
    sim->log[sim->n_log - 1].result = o->fault < 0 ? o->fault : (int64_t)o->moves;
    sim->dead = sim->dead || sim->crashing;
    sim->crashing = false;
    pthread_mutex_unlock(&sim->lock);
    return 0;
}

/* Which of those under way ends now: the oldest, or any that is not late. */
static uint32_t choose_op(struct sim_disk *sim, const struct sim_queue *q)
{
    uint32_t in_time[INT8_MAX], n = 0;

    if (!sim->how.any_order)
        return 0;
    for (uint32_t i = 0; i < q->n_ops && n < INT8_MAX; i++)
        if (!q->ops[i].late)
            in_time[n++] = i;
    if (n == 0)
        return (uint32_t)(next_random(&sim->random) % q->n_ops);
    return in_time[next_random(&sim->random) % n];
}

static int64_t end_write(const struct sim_op *o, const unsigned char *bytes)
{
    if (memcmp(bytes, o->copy, o->op.len) != 0)
        broken("buffer %u was changed while its write was under way", o->op.buffer);
    free(o->copy);
    return o->fault < 0 ? o->fault : (int64_t)o->moves;
}

static int64_t end_read(struct sim_disk *sim, const struct sim_op *o, unsigned char *bytes)
{
    for (uint32_t i = 0; i < o->op.len; i++)
        if (bytes[i] != UNREAD)
            broken("buffer %u was changed while its read was under way", o->op.buffer);
    if (o->fault < 0)
        return o->fault;
    return (int64_t)bytes_read(&file_of(sim, o->op.file)->inode->seen, bytes, o->moves,
                               o->op.offset);
}

/* A completion that nobody waits for: one of the past, or of a tag that never was. */
static bool add_false_one(struct sim_disk *sim, const struct sim_queue *q, struct kv_io_done *out)
{
    if (!sim->how.duplicates || !one_in(&sim->random, 3))
        return false;
    if (q->n_past == 0 || one_in(&sim->random, 4))
        *out = (struct kv_io_done){UINT64_MAX - next_random(&sim->random) % 1000, KV_IO_ALIGN};
    else
        *out = q->past[next_random(&sim->random) % q->n_past];
    return true;
}

static void remember(struct sim_queue *q, const struct kv_io_done *done)
{
    if (q->n_past == N_PAST)
        memmove(q->past, q->past + 1, --q->n_past * sizeof(q->past[0]));
    q->past[q->n_past++] = *done;
}

static int queue_wait(struct kv_queue *queue, struct kv_io_done *out)
{
    struct sim_queue *q = (struct sim_queue *)queue;
    struct sim_disk *sim = sim_of(queue->disk);
    unsigned char *bytes;
    struct sim_op o;
    uint32_t i;

    if (q->n_ops == 0)
        return -ENOENT;
    pthread_mutex_lock(&sim->lock);
    if (!add_false_one(sim, q, out)) {
        i = choose_op(sim, q);
        o = q->ops[i];
        memmove(q->ops + i, q->ops + i + 1, (--q->n_ops - i) * sizeof(o));
        bytes = queue->buffers[o.op.buffer] + o.op.at;
        out->tag = o.op.tag;
        out->result = o.op.kind == KV_IO_WRITE ? end_write(&o, bytes) : end_read(sim, &o, bytes);
        if (sim->dead)
            out->result = -EIO;
        file_of(sim, o.op.file)->n_under_way--;
        remember(q, out);
    }
    pthread_mutex_unlock(&sim->lock);
    return 0;
}

/* ---- The disk ---- */

static void disk_close(struct kv_disk *disk)
{
    struct sim_disk *sim = sim_of(disk);

    pthread_mutex_lock(&sim->lock);
    for (uint32_t i = 0; i < sim->n_files; i++)
        if (sim->files[i].inode != NULL)
            broken("the disk is closed while %s is open", sim->files[i].name);
    if (sim->n_queues > 0)
        broken("the disk is closed while %u queues are open", sim->n_queues);
    sim->is_open = false;
    pthread_mutex_unlock(&sim->lock);
}

static const struct kv_disk_ops sim_ops = {
    .close = disk_close,
    .describe = disk_describe,
    .now_ns = disk_now_ns,
    .list = disk_list,
    .stat = disk_stat,
    .touch = disk_touch,
    .rename = disk_rename,
    .unlink = disk_unlink,
    .sync_directory = disk_sync_directory,
    .open = disk_open,
    .allocate = disk_allocate,
    .truncate = disk_truncate,
    .sync = disk_sync,
    .close_file = disk_close_file,
    .read_cached = disk_read_cached,
    .queue_open = queue_open,
    .queue_close = queue_close,
    .submit = queue_submit,
    .wait = queue_wait,
};

struct sim_disk *sim_disk_new(uint64_t seed)
{
    struct sim_disk *sim = zeroed(sizeof(*sim));

    sim->base.ops = &sim_ops;
    pthread_mutex_init(&sim->lock, NULL);
    sim->random = seed;
    sim->now_ns = (uint64_t)1000000000 * 1000000000;
    sim->crash_at = UINT64_MAX;
    return sim;
}

static void must_be_closed(const struct sim_disk *sim)
{
    if (sim->is_open)
        broken("the disk is open");
}

void sim_disk_free(struct sim_disk *sim)
{
    if (sim == NULL)
        return;
    must_be_closed(sim);
    for (uint32_t i = 0; i < sim->n_inodes; i++)
        free_inode(sim->inodes[i]);
    free(sim->inodes);
    free(sim->seen.list);
    free(sim->kept.list);
    free(sim->turns);
    free(sim->files);
    free(sim->log);
    pthread_mutex_destroy(&sim->lock);
    free(sim);
}

/* The inode of the clone that stands where this one does. */
static struct inode *twin(const struct sim_disk *of, const struct sim_disk *to,
                          const struct inode *inode)
{
    for (uint32_t i = 0; i < of->n_inodes; i++)
        if (of->inodes[i] == inode)
            return to->inodes[i];
    return NULL;
}

static void clone_inode(struct sim_disk *to, const struct inode *from)
{
    struct inode *inode = add_inode(to);

    bytes_copy(&inode->seen, &from->seen);
    bytes_copy(&inode->kept, &from->kept);
    inode->mtime = from->mtime;
    inode->kept_mtime = from->kept_mtime;
    inode->allocated = from->allocated;
    for (uint32_t i = 0; i < from->n_changes; i++) {
        struct change *c = add_change(inode);

        *c = from->changes[i];
        if (c->data != NULL)
            c->data = memcpy(zeroed(c->len + 1), from->changes[i].data, c->len);
    }
}

static void clone_names(const struct sim_disk *of, struct sim_disk *to, const struct names *from,
                        struct names *names)
{
    for (uint32_t i = 0; i < from->n; i++) {
        GROW(names->list, names->n, names->room);
        names->list[names->n] = from->list[i];
        names->list[names->n++].inode = twin(of, to, from->list[i].inode);
    }
}

struct sim_disk *sim_disk_clone(const struct sim_disk *sim, uint64_t seed)
{
    struct sim_disk *to = sim_disk_new(seed);

    must_be_closed(sim);
    for (uint32_t i = 0; i < sim->n_inodes; i++)
        clone_inode(to, sim->inodes[i]);
    clone_names(sim, to, &sim->seen, &to->seen);
    clone_names(sim, to, &sim->kept, &to->kept);
    for (uint32_t i = 0; i < sim->n_turns; i++) {
        GROW(to->turns, to->n_turns, to->turns_room);
        to->turns[to->n_turns] = sim->turns[i];
        to->turns[to->n_turns++].inode = twin(sim, to, sim->turns[i].inode);
    }
    to->now_ns = sim->now_ns;
    return to;
}

struct kv_disk *sim_disk_open(struct sim_disk *sim)
{
    must_be_closed(sim);
    sim->is_open = true;
    return &sim->base;
}

/* ---- Crashes and errors ---- */

uint64_t sim_disk_n_changes(const struct sim_disk *sim)
{
    return sim->n_changes;
}

void sim_disk_crash_at(struct sim_disk *sim, uint64_t k)
{
    sim->crash_at = k;
}

bool sim_disk_is_dead(const struct sim_disk *sim)
{
    return sim->dead;
}

void sim_disk_crash(struct sim_disk *sim, uint64_t seed)
{
    uint64_t random = seed;

    must_be_closed(sim);
    for (uint32_t i = 0; i < sim->n_inodes; i++) {
        struct inode *inode = sim->inodes[i];

        if (seed == SIM_KEEP_ALL)
            keep_changes(inode);
        else if (seed == SIM_LOSE_ALL)
            drop_changes(inode);
        else
            decide_changes(inode, &random);
        bytes_copy(&inode->seen, &inode->kept);
        inode->mtime = inode->kept_mtime;
        inode->allocated = 0;
        set_allocated(inode, inode->kept.len);
    }
    if (seed == SIM_KEEP_ALL)
        keep_turns(sim);
    else if (seed != SIM_LOSE_ALL)
        decide_turns(sim, &random);
    sim->n_turns = 0;
    sim->seen.n = 0;
    for (uint32_t i = 0; i < sim->kept.n; i++) {
        GROW(sim->seen.list, sim->seen.n, sim->seen.room);
        sim->seen.list[sim->seen.n++] = sim->kept.list[i];
    }
    collect(sim);
    memset(sim->counts, 0, sizeof(sim->counts));
    memset(sim->faults, 0, sizeof(sim->faults));
    memset(sim->fail_all, 0, sizeof(sim->fail_all));
    sim->n_changes = 0;
    sim->crash_at = UINT64_MAX;
    sim->dead = false;
}

uint64_t sim_disk_n(const struct sim_disk *sim, enum sim_kind kind)
{
    return sim->counts[kind];
}

void sim_disk_fail(struct sim_disk *sim, enum sim_kind kind, uint64_t nth, int error)
{
    for (uint32_t i = 0; i < N_FAULTS; i++) {
        if (sim->faults[i].error == 0) {
            sim->faults[i] = (struct fault){kind, nth, error};
            return;
        }
    }
    broken("more than %d faults are set", N_FAULTS);
}

void sim_disk_fail_all(struct sim_disk *sim, enum sim_kind kind, int error)
{
    sim->fail_all[kind] = error;
}

void sim_disk_behave(struct sim_disk *sim, struct sim_behaviour how)
{
    sim->how = how;
}

/* ---- Looking and meddling ---- */

const unsigned char *sim_disk_bytes(struct sim_disk *sim, const char *name, size_t *len)
{
    const struct entry *e = find(&sim->seen, name);

    if (e == NULL)
        return NULL;
    *len = e->inode->seen.len;
    return e->inode->seen.p;
}

void sim_disk_put(struct sim_disk *sim, const char *name, const void *bytes, size_t len)
{
    struct turn t = {.inode = add_inode(sim)};

    copy_name(t.to, name);
    bytes_write(&t.inode->seen, 0, bytes, len);
    bytes_write(&t.inode->kept, 0, bytes, len);
    set_allocated(t.inode, len);
    turn_names(&sim->seen, &t);
    turn_names(&sim->kept, &t);
}

void sim_disk_flip(struct sim_disk *sim, const char *name, uint64_t offset, unsigned char bits)
{
    struct entry *e = find(&sim->seen, name);

    if (e == NULL || offset >= e->inode->seen.len)
        broken("no byte %" PRIu64 " in %s", offset, name);
    e->inode->seen.p[offset] ^= bits;
    if (offset < e->inode->kept.len)
        e->inode->kept.p[offset] ^= bits;
}

bool sim_disk_remove(struct sim_disk *sim, const char *name)
{
    struct turn t = {.inode = NULL};
    const bool found = find(&sim->seen, name) != NULL;

    copy_name(t.from, name);
    turn_names(&sim->seen, &t);
    turn_names(&sim->kept, &t);
    collect(sim);
    return found;
}

const char *sim_disk_name(struct sim_disk *sim, uint32_t i)
{
    return i < sim->seen.n ? sim->seen.list[i].name : NULL;
}

uint64_t sim_disk_allocated(struct sim_disk *sim)
{
    return allocated(sim);
}

void sim_disk_advance(struct sim_disk *sim, uint64_t ns)
{
    pthread_mutex_lock(&sim->lock);
    sim->now_ns += ns;
    pthread_mutex_unlock(&sim->lock);
}

void sim_disk_print_log(const struct sim_disk *sim, FILE *out)
{
    static const char *const kinds[SIM_N_KINDS] = {
        "list",       "stat",   "touch",    "rename",   "unlink", "sync_directory",
        "open",       "create", "allocate", "truncate", "sync",   "read_cached",
        "queue_open", "read",   "write",    "submit",
    };

    for (size_t i = 0; i < sim->n_log; i++) {
        const struct record *r = &sim->log[i];

        fprintf(out, "%4zu %-14s %-40s %10" PRIu64 " %8" PRIu64 " %6" PRId64 "\n", i,
                kinds[r->kind], r->name, r->offset, r->len, r->result);
    }
}

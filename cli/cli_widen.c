/* baton snapshot widen: f16 or q8 to f32, without a node. */
#include "cli/cli_snapshot.h"

#include <inttypes.h>
#include <string.h>

struct settings {
    const char *tenant, *salt; /* NULL: as the session in the file says */
};

static int hex_digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static bool parse_salt(const char *text, struct node_salt *out)
{
    const size_t n = strlen(text);

    if (n % 2 != 0 || n / 2 > NODE_SALT_BYTES)
        return false;
    for (size_t i = 0; i < n; i += 2) {
        const int high = hex_digit(text[i]), low = hex_digit(text[i + 1]);

        if (high < 0 || low < 0)
            return false;
        out->bytes[i / 2] = (uint8_t)(high << 4 | low);
    }
    out->len = n / 2;
    return true;
}

/* The file's namespace must be the one of these, so that the new one is, too. */
static int derive(const struct kv_snapshot_header *h, const char *tenant,
                  const struct node_salt *salt, struct kv_digest *out, struct kv_why *why)
{
    struct kv_namespace_fields fields = {
        .tenant = tenant,
        .salt = salt->bytes,
        .salt_len = salt->len,
        .fingerprint = h->fingerprint,
        .numerics_id = h->numerics_id,
        .precision = h->geometry.precision,
    };

    kv_namespace_digest(&fields, out);
    if (memcmp(out, &h->ns, sizeof(*out)) != 0)
        return kv_fail(why, KV_ERR_MISMATCH,
                       "namespace: not that of tenant \"%s\" and a salt of %zu bytes (--tenant, "
                       "--salt)",
                       tenant, salt->len);
    fields.precision = KV_F32;
    kv_namespace_digest(&fields, out);
    return 0;
}

static int find_namespace(struct cli_file *f, const struct settings *s, struct kv_digest *out,
                          struct kv_why *why)
{
    const struct kv_snapshot_header *h = &kv_file_info(f->file)->header;
    struct node_session session = {.tenant = ""};
    struct node_salt salt = {.len = 0};
    int rc = cli_file_session(f, &session, why);

    if (rc < 0)
        return rc;
    if (rc == 0 && s->tenant == NULL)
        return kv_fail(why, KV_ERR_INVALID, "it holds no session: --tenant is needed");
    if (s->salt != NULL && !parse_salt(s->salt, &salt))
        rc = kv_fail(why, KV_ERR_INVALID, "--salt: up to %d bytes as digits of 0-9a-f",
                     (int)NODE_SALT_BYTES);
    else
        rc = derive(h, s->tenant != NULL ? s->tenant : session.tenant,
                    s->salt != NULL ? &salt : &session.salt, out, why);
    node_session_release(&session);
    return rc;
}

static int move_bar(void *arg, uint64_t done, uint64_t total)
{
    cli_bar_move(arg, done, total);
    return 0;
}

static void print_widened(const char *path, const struct kv_file_info *info)
{
    char id[KV_SNAPSHOT_ID_TEXT], bytes[32];

    printf("%s: %s, %" PRIu32 " positions, %s\n", path,
           cli_hex(id, info->header.snapshot_id, KV_SNAPSHOT_ID_BYTES), info->n_positions,
           cli_bytes(bytes, sizeof(bytes), (double)info->bytes));
}

/* `to` is a file that is not there yet, in a directory that no node is using. */
static int widen(struct cli_file *f, const struct settings *s, const char *to, struct kv_why *why)
{
    struct kv_geometry wide = kv_file_info(f->file)->header.geometry;
    struct kv_file_info info;
    struct cli_bar bar;
    struct kv_widen w = {.from = f->queue, .progress = move_bar, .arg = &bar};
    struct kv_disk *disk = NULL;
    char directory[4096];
    int rc;

    wide.precision = KV_F32;
    rc = find_namespace(f, s, &w.ns, why);
    if (rc == 0)
        rc = cli_split_path(to, directory, sizeof(directory), &w.name, why);
    if (rc == 0)
        rc = kv_disk_open(directory, 0, &disk, why);
    if (rc == 0)
        rc = kv_file_queue(disk, &wide, &w.to, why);
    if (rc == 0) {
        cli_bar_begin(&bar, "widening");
        rc = kv_file_widen(f->file, &w, &info, why);
        cli_bar_end(&bar);
    }
    if (rc == 0)
        print_widened(to, &info);
    if (w.to != NULL)
        disk->ops->queue_close(w.to);
    if (disk != NULL)
        disk->ops->close(disk);
    return rc;
}

int cli_snapshot_widen(int argc, char **argv)
{
    struct settings s = {.tenant = NULL};
    const struct node_option options[] = {
        {"tenant", 0, NODE_OPT_STRING, &s.tenant, "NAME",
         "whose snapshot it is; else as the session in it says", 0, 0, NULL},
        {"salt", 0, NODE_OPT_STRING, &s.salt, "HEX", "its salt; else as the session in it says", 0,
         0, NULL},
    };
    struct kv_why why = {.text = ""};
    struct cli_file f;
    int first, rc;
    bool done;

    rc = cli_options_parse(
        argc, argv, options, 2, "baton snapshot widen [option...] FILE OUT",
        "Writes the positions and the session of an f16 or q8 snapshot FILE as f32 to the new file "
        "OUT, exactly. What a node computes on from there is what f32 gives, so it is another "
        "snapshot in another namespace. For a node to find it, OUT is named ID.kv by the id that "
        "is printed, in a directory that no node is using meanwhile. A snapshot that stands on "
        "others is compacted first.",
        &first, &done);
    if (done)
        return rc;
    if (argc - first != 2) {
        cli_say("snapshot widen: FILE and OUT are needed (baton snapshot widen --help)");
        return NODE_EXIT_USAGE;
    }
    if (cli_file_open(argv[first], &f, &why) < 0)
        return cli_say_file(argv[first], &why);
    rc = widen(&f, &s, argv[first + 1], &why);
    cli_file_close(&f);
    return rc < 0 ? cli_say_file(argv[first], &why) : NODE_EXIT_OK;
}

/* baton snapshot inspect: a file, without a node. */
#include "cli/cli_snapshot.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

int cli_split_path(const char *path, char *directory, size_t n, const char **name,
                   struct kv_why *why)
{
    const char *slash = strrchr(path, '/');
    const int head = slash != NULL ? (int)(slash - path) : 0;
    const int used = snprintf(directory, n, "%.*s%s", head, path,
                              slash == NULL   ? "."
                              : slash == path ? "/"
                                              : "");

    *name = slash != NULL ? slash + 1 : path;
    if (used >= 0 && (size_t)used < n)
        return 0;
    return kv_fail(why, KV_ERR_INVALID, "the path is too long");
}

int cli_file_open(const char *path, struct cli_file *out, struct kv_why *why)
{
    static const struct kv_geometry any = {1, 1, 1, KV_F32};
    char directory[4096];
    const char *name;
    int rc = cli_split_path(path, directory, sizeof(directory), &name, why);

    memset(out, 0, sizeof(*out));
    if (rc == 0)
        rc = kv_disk_view(directory, &out->disk, why);
    /* Of which geometry it is, the file itself has to say first. */
    if (rc == 0)
        rc = kv_file_queue(out->disk, &any, &out->queue, why);
    if (rc == 0)
        rc = kv_file_open(out->queue, name, &out->file, why);
    if (rc == 0 &&
        out->queue->buffer_bytes < kv_file_frame_room(&kv_file_info(out->file)->header.geometry)) {
        out->disk->ops->queue_close(out->queue);
        out->queue = NULL;
        rc = kv_file_queue(out->disk, &kv_file_info(out->file)->header.geometry, &out->queue, why);
    }
    if (rc < 0)
        cli_file_close(out);
    return rc;
}

void cli_file_close(struct cli_file *f)
{
    if (f->file != NULL)
        kv_file_close(f->file);
    if (f->queue != NULL)
        f->disk->ops->queue_close(f->queue);
    if (f->disk != NULL)
        f->disk->ops->close(f->disk);
    memset(f, 0, sizeof(*f));
}

int cli_file_session(struct cli_file *f, struct node_session *out, struct kv_why *why)
{
    void *data = NULL;
    size_t len = 0;
    int rc = kv_file_section(f->file, f->queue, KV_SECTION_SESSION, &data, &len, why);

    if (rc == 0 && len > 0) {
        rc = node_session_decode(data, len, kv_file_info(f->file)->n_positions, out, why);
        rc = rc < 0 ? rc : 1;
    }
    free(data);
    return rc;
}

static void print_hex(const char *label, const uint8_t *bytes, size_t n)
{
    char hex[2 * KV_DIGEST_BYTES + 1];

    printf("%-14s %s\n", label, cli_hex(hex, bytes, n));
}

static void print_header(const struct kv_snapshot_header *h)
{
    const struct kv_geometry *g = &h->geometry;
    char bytes[32];

    print_hex("id", h->snapshot_id, sizeof(h->snapshot_id));
    print_hex("fingerprint", h->fingerprint.bytes, KV_DIGEST_BYTES);
    print_hex("namespace", h->ns.bytes, KV_DIGEST_BYTES);
    print_hex("numerics id", h->numerics_id.bytes, KV_DIGEST_BYTES);
    printf("%-14s %" PRIu32 " layers, %" PRIu32 " heads of %" PRIu32 ", %s: %s a position\n", "kv",
           g->n_layers, g->n_kv_heads, g->head_dim, kv_precision_name(g->precision),
           cli_bytes(bytes, sizeof(bytes), (double)kv_position_bytes(g)));
    if (h->base > 0) {
        print_hex("parent", h->parent_id, sizeof(h->parent_id));
        print_hex("base digest", h->base_digest.bytes, KV_DIGEST_BYTES);
    }
}

static void print_frames(const struct kv_file_info *info)
{
    char hex[2 * KV_DIGEST_BYTES + 1];

    printf("\n%10s %10s %8s %14s  %-8s  digest at its end\n", "frame", "first", "count", "offset",
           "crc");
    for (uint32_t i = 0; i < info->n_frames; i++) {
        const struct kv_file_frame *f = &info->frames[i];

        printf("%10" PRIu32 " %10" PRIu32 " %8" PRIu32 " %14" PRIu64 "  %08" PRIx32 "  %s\n", i,
               f->first, f->count, f->offset, f->crc,
               cli_hex(hex, f->digest.bytes, KV_DIGEST_BYTES));
    }
}

/* 0, or an exit code: a section that does not hold is not shown. */
static int print_session(struct cli_file *f, const char *path)
{
    struct node_session s;
    struct kv_why why = {.text = ""};
    char quoted[2 * NODE_SESSION_NAME + 3], hex[2 * NODE_SALT_BYTES + 1];
    int rc = cli_file_session(f, &s, &why);

    if (rc < 0)
        return cli_say_file(path, &why);
    if (rc == 0)
        return NODE_EXIT_OK;
    printf("%-14s %s", "session", node_quote(quoted, sizeof(quoted), s.name));
    printf(" of tenant %s: %" PRIu32 " ids, %" PRIu32 " of them without KV",
           node_quote(quoted, sizeof(quoted), s.tenant), s.n_ids, s.n_tail);
    if (s.salt.len > 0)
        printf(", salt %s", cli_hex(hex, s.salt.bytes, s.salt.len));
    printf("\n");
    node_session_release(&s);
    return NODE_EXIT_OK;
}

static int print_file(struct cli_file *f, const char *path, bool frames)
{
    const struct kv_file_info *info = kv_file_info(f->file);
    char bytes[32];
    int rc;

    printf("%s: snapshot file, %s (%" PRIu64 " bytes)\n", path,
           cli_bytes(bytes, sizeof(bytes), (double)info->bytes), info->bytes);
    print_header(&info->header);
    printf("%-14s %" PRIu32, "positions", info->n_positions);
    if (info->header.base > 0)
        printf(", from %" PRIu32 " on in this file", info->header.base);
    printf("\n%-14s %" PRIu32 " of up to %" PRIu32 " positions\n", "frames", info->n_frames,
           info->header.frame_positions);
    for (uint32_t i = 0; i < info->n_sections; i++)
        printf("%-14s %s, %" PRIu32 " bytes at %" PRIu64 "\n", "section",
               info->sections[i].kind == KV_SECTION_LOGITS ? "logits" : "session",
               info->sections[i].len, info->sections[i].offset);
    print_hex("root", info->root.bytes, KV_DIGEST_BYTES);
    rc = print_session(f, path);
    if (frames)
        print_frames(info);
    return rc;
}

static int verify(struct cli_file *f, const char *path)
{
    const int64_t start = node_now_ns();
    struct kv_why why = {.text = ""};
    char span[32], rate[32];
    const uint64_t bytes = kv_file_info(f->file)->bytes;
    uint64_t ns;

    if (kv_file_verify(f->file, f->queue, &why) < 0)
        return cli_say_file(path, &why);
    ns = (uint64_t)(node_now_ns() - start);
    printf("%-14s every byte holds, read in %s, %s%s\n", "verified",
           cli_span(span, sizeof(span), ns), cli_rate(rate, sizeof(rate), bytes, ns),
           kv_file_info(f->file)->header.base > 0 ? "; its parent is another file" : "");
    return NODE_EXIT_OK;
}

int cli_snapshot_inspect(int argc, char **argv)
{
    bool frames = false, all = false, done;
    const struct node_option options[] = {
        {"frames", 0, NODE_OPT_FLAG, &frames, NULL, "list every frame", 0, 0, NULL},
        {"verify", 0, NODE_OPT_FLAG, &all, NULL, "read and check every byte", 0, 0, NULL},
    };
    struct kv_why why = {.text = ""};
    struct cli_file f;
    int first, rc;

    rc = cli_options_parse(argc, argv, options, 2, "baton snapshot inspect [option...] FILE",
                           "Prints what is in a snapshot file. Its header, index and footer are "
                           "checked always, its positions with --verify. No node is needed; one "
                           "that has the file in its directory is not disturbed.",
                           &first, &done);
    if (done)
        return rc;
    if (!cli_one_argument(argc, first, "snapshot inspect", "which file?", "one FILE at most"))
        return NODE_EXIT_USAGE;
    if (cli_file_open(argv[first], &f, &why) < 0)
        return cli_say_file(argv[first], &why);
    rc = print_file(&f, argv[first], frames);
    if (rc == NODE_EXIT_OK && all)
        rc = verify(&f, argv[first]);
    cli_file_close(&f);
    return rc;
}

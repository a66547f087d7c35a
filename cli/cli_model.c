#include "cli/cli.h"
#include "model/model.h"

#include <inttypes.h>
#include <string.h>

/* A string of the file, safe to print; longer ones are cut. */
static const char *printable(char *buf, size_t n, struct gguf_string s)
{
    char copy[256];
    size_t len = s.len < sizeof(copy) - 1 ? s.len : sizeof(copy) - 1;

    if (len > 0)
        memcpy(copy, s.data, len);
    copy[len] = '\0';
    return cli_plain(buf, n, copy);
}

static void print_metadata(const struct gguf *g)
{
    char key[1024], value[160];

    printf("\nmetadata\n");
    for (uint64_t i = 0; i < gguf_n_kv(g); i++) {
        const struct gguf_kv *kv = gguf_kv_at(g, i);

        gguf_value_text(kv, value, sizeof(value));
        printf("  %-44s %s\n", printable(key, sizeof(key), kv->key), value);
    }
}

static void print_params(const struct gguf *g)
{
    struct model_params p;
    struct kv_why why;
    char quoted[256];

    if (model_read_params(g, &p, &why) < 0) {
        printf("\nnot served by this build: %s\n", why.text);
        return;
    }
    printf("\nparameters\n");
    printf("  %-44s %s\n", "name", node_quote(quoted, sizeof(quoted), p.name));
    printf("  %-44s %s\n", "architecture", p.arch);
    printf("  %-44s %.1f M\n", "weights", (double)p.n_params / 1e6);
    printf("  %-44s %u\n", "layers", p.n_layers);
    printf("  %-44s %u\n", "embedding", p.n_embd);
    printf("  %-44s %u of %u, %u for keys and values\n", "heads", p.n_heads, p.head_dim,
           p.n_kv_heads);
    printf("  %-44s %u\n", "feed-forward", p.n_ff);
    printf("  %-44s %u%s\n", "vocabulary", p.n_vocab, p.tied ? ", tied to the output" : "");
    printf("  %-44s %u\n", "context", p.n_ctx);
    printf("  %-44s base %g over %u of %u dimensions, %s\n", "rope", (double)p.rope_base,
           p.rope_dims, p.head_dim, p.rope == MODEL_ROPE_NORM ? "adjacent pairs" : "halves");
}

static const char *type_name(char *buf, size_t n, uint32_t type)
{
    const char *name = gguf_type_name(type);

    if (name != NULL)
        return name;
    snprintf(buf, n, "type %u", type);
    return buf;
}

static uint64_t n_weights(const struct gguf_tensor *t)
{
    return t->dims[0] * t->dims[1] * t->dims[2] * t->dims[3];
}

/* One line for each type that occurs, in the order of first use. */
static void print_summary(const struct gguf *g)
{
    char name[32];

    printf("\ntensors (%" PRIu64 ")\n", gguf_n_tensors(g));
    for (uint64_t i = 0; i < gguf_n_tensors(g); i++) {
        uint32_t type = gguf_tensor_at(g, i)->type;
        uint64_t n = 0, weights = 0, bytes = 0, j = 0;

        while (j < i && gguf_tensor_at(g, j)->type != type)
            j++;
        if (j < i)
            continue;
        for (; j < gguf_n_tensors(g); j++) {
            const struct gguf_tensor *t = gguf_tensor_at(g, j);

            if (t->type != type)
                continue;
            n++;
            weights += n_weights(t);
            bytes += t->n_bytes;
        }
        printf("  %-8s %6" PRIu64 " tensors  %10.2f M weights  %10.2f MB\n",
               type_name(name, sizeof(name), type), n, (double)weights / 1e6, (double)bytes / 1e6);
    }
}

static void print_tensors(const struct gguf *g)
{
    char name[1024], type[32];

    printf("\n");
    for (uint64_t i = 0; i < gguf_n_tensors(g); i++) {
        const struct gguf_tensor *t = gguf_tensor_at(g, i);

        printf("  %-40s %-6s [", printable(name, sizeof(name), t->name),
               type_name(type, sizeof(type), t->type));
        for (uint32_t d = 0; d < t->n_dims; d++)
            printf("%s%" PRIu64, d > 0 ? ", " : "", t->dims[d]);
        printf("] %zu bytes\n", t->n_bytes);
    }
}

int cli_model(int argc, char **argv)
{
    bool tensors = false, done;
    const struct node_option options[] = {
        {"tensors", 0, NODE_OPT_FLAG, &tensors, NULL, "list every tensor", 0, 0, NULL},
    };
    struct gguf *g = NULL;
    struct kv_why why;
    int first, rc;

    rc = cli_options_parse(argc, argv, options, 1, "baton model [option...] FILE",
                           "Prints what is in a GGUF file.", &first, &done);
    if (done)
        return rc;
    if (!cli_one_argument(argc, first, "model", "which file?", "one FILE at most"))
        return NODE_EXIT_USAGE;
    if (gguf_open(argv[first], &g, &why) < 0)
        return cli_say_file(argv[first], &why);
    printf("%s: GGUF version %u, %.2f MB\n", argv[first], gguf_version(g),
           (double)gguf_file_bytes(g) / 1e6);
    print_metadata(g);
    print_params(g);
    print_summary(g);
    if (tensors)
        print_tensors(g);
    gguf_close(g);
    return NODE_EXIT_OK;
}

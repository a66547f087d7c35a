/* The part of the command line that the prefill and the decode node share. */
#include "node/node.h"

#include "transport/transport.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *const precisions[] = {"f16", "f32", "q8", NULL};
static const char *const levels[] = {"debug", "info", "warn", "error", NULL};

enum {
    KV_BYTES_FLOOR = 64 * 1024 * 1024,
};
static const uint64_t kv_bytes_ceiling = 2ull << 30;

void node_serve_options(struct node_serve *s, struct node_option *out)
{
    const struct node_option options[NODE_SERVE_OPTIONS] = {
        {"listen", 'l', NODE_OPT_ADDRESS, &s->listen, "HOST:PORT",
         "where to listen; port 0: any free one", 0, 0, NULL},
        {"port-file", 0, NODE_OPT_STRING, &s->port_file, "FILE",
         "write the port to FILE once the node is ready", 0, 0, NULL},
        {"model", 'm', NODE_OPT_STRING, &s->model, "FILE", "the model, a GGUF file", 0, 0, NULL},
        {"kv-bytes", 0, NODE_OPT_BYTES, &s->kv_bytes, "BYTES",
         "memory for KV pages; 0: a quarter of what is available, at most 2G", 0, 1ull << 50, NULL},
        {"pages", 0, NODE_OPT_U32, &s->n_pages, "N", "KV pages, instead of --kv-bytes; 0: by bytes",
         0, UINT32_MAX, NULL},
        {"page", 0, NODE_OPT_U32, &s->page_tokens, "N",
         "positions in a page, a power of two from 16 to 1024", KV_PAGE_TOKENS_MIN,
         KV_PAGE_TOKENS_MAX, NULL},
        {"kv-precision", 0, NODE_OPT_CHOICE, &s->precision, "NAME", "how KV is kept", 0, 0,
         precisions},
        {"chunk", 0, NODE_OPT_U32, &s->chunk, "N",
         "most positions of a prompt in one step; 0: what takes 100 ms by measured speed, at most "
         "512",
         0, 4096, NULL},
        {"threads", 't', NODE_OPT_U32, &s->threads, "N", "compute threads; 0: one a core", 0, 256,
         NULL},
        {"kernels", 0, NODE_OPT_STRING, &s->kernels, "NAME",
         "kernel set: auto, plain, avx2, avx512", 0, 0, NULL},
        {"queue", 0, NODE_OPT_U32, &s->queue, "N", "requests that may wait; more are refused", 1,
         4096, NULL},
        {"max-context", 0, NODE_OPT_U32, &s->max_context, "N",
         "most positions of a context; 0: the model's", 0, KV_MAX_POSITIONS, NULL},
        {"grace", 0, NODE_OPT_U32, &s->grace_ms, "MS",
         "how long open calls may go on after SIGTERM", 0, 3600000, NULL},
        {"log-level", 0, NODE_OPT_CHOICE, &s->log_level, "NAME", "what to log", 0, 0, levels},
    };

    s->listen = "127.0.0.1:0";
    s->page_tokens = KV_PAGE_TOKENS_DEFAULT;
    s->precision = "f16";
    s->kernels = "auto";
    s->queue = 64;
    s->grace_ms = 30000;
    s->log_level = "info";
    memcpy(out, options, sizeof(options));
}

/* Bytes that the kernel would give to a new program without swapping, or 0. */
static uint64_t available_bytes(void)
{
    FILE *f = fopen("/proc/meminfo", "re");
    char line[128];
    uint64_t kib = 0;

    if (f == NULL)
        return 0;
    while (fgets(line, sizeof(line), f) != NULL) {
        if (sscanf(line, "MemAvailable: %" SCNu64, &kib) == 1)
            break;
    }
    fclose(f);
    return kib * 1024;
}

uint64_t node_default_kv_bytes(void)
{
    uint64_t n = available_bytes() / 4;

    if (n > kv_bytes_ceiling)
        n = kv_bytes_ceiling;
    return n < KV_BYTES_FLOOR ? KV_BYTES_FLOOR : n;
}

int node_serve_begin(const struct node_serve *s, const char *program)
{
    char error[TRANSPORT_DETAIL_BYTES] = "", model[4096];

    if (transport_listen_check(s->listen, error) < 0) {
        fprintf(stderr, "%s: %s\n", program, error);
        return NODE_EXIT_UNAVAILABLE;
    }
    node_log(NODE_INFO, "loading", "model=%s", node_quote(model, sizeof(model), s->model));
    return NODE_EXIT_OK;
}

/* Beside the name and then renamed, so that who waits for the file never reads half a number. */
static int write_port_file(const char *path, int port)
{
    char beside[4096];
    struct stat there;
    FILE *f;
    int n = snprintf(beside, sizeof(beside), "%s.%d", path, (int)getpid());

    if (n < 0 || (size_t)n >= sizeof(beside)) {
        errno = ENAMETOOLONG;
        return -1;
    }
    /* A rename over a device or a pipe would put a file in its place. */
    if (lstat(path, &there) == 0 && !S_ISREG(there.st_mode)) {
        errno = EEXIST;
        return -1;
    }
    f = fopen(beside, "we");
    if (f == NULL)
        return -1;
    fprintf(f, "%d\n", port);
    if (fclose(f) != 0 || rename(beside, path) != 0) {
        unlink(beside);
        return -1;
    }
    return 0;
}

int node_serve_ready(const struct node_serve *s, const char *program, int port)
{
    const char *colon = strrchr(s->listen, ':');
    int host = colon != NULL ? (int)(colon - s->listen) : 0;

    if (s->port_file != NULL && write_port_file(s->port_file, port) < 0) {
        fprintf(stderr, "%s: cannot write %s: %s\n", program, s->port_file, strerror(errno));
        return -1;
    }
    printf("%s: listening on %.*s:%d\n", program, host, s->listen, port);
    fflush(stdout);
    return 0;
}

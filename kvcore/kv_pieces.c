#include "kvcore/kv_pieces.h"

#include <assert.h>
#include <string.h>

const unsigned char *kv_reader_run(struct kv_reader *r, size_t n, size_t *n_run)
{
    const unsigned char *run;

    while (r->at == r->src->iov_len) {
        r->src++;
        r->n_src--;
        r->at = 0;
    }
    assert(r->n_src > 0);
    run = (const unsigned char *)r->src->iov_base + r->at;
    *n_run = r->src->iov_len - r->at < n ? r->src->iov_len - r->at : n;
    r->at += *n_run;
    return run;
}

void kv_reader_read(struct kv_reader *r, void *dst, size_t n)
{
    unsigned char *out = dst;

    while (n > 0) {
        size_t n_run;
        const unsigned char *run = kv_reader_run(r, n, &n_run);

        memcpy(out, run, n_run);
        out += n_run;
        n -= n_run;
    }
}

struct kv_reader kv_reader_at(const struct iovec *src, size_t n_src, size_t offset)
{
    struct kv_reader r = {.src = src, .n_src = n_src};

    while (offset > 0) {
        size_t n_run;

        kv_reader_run(&r, offset, &n_run);
        offset -= n_run;
    }
    return r;
}

size_t kv_pieces_bytes(const struct iovec *src, size_t n_src)
{
    size_t total = 0;

    for (size_t i = 0; i < n_src; i++)
        if (__builtin_add_overflow(total, src[i].iov_len, &total))
            return SIZE_MAX;
    return total;
}

size_t kv_pieces(const struct iovec *src, size_t n_src, size_t offset, size_t len,
                 struct iovec *dst)
{
    const size_t total = kv_pieces_bytes(src, n_src);
    struct kv_reader r;
    size_t n = 0;

    if (total == SIZE_MAX || len > total || offset > total - len)
        return 0;
    r = kv_reader_at(src, n_src, offset);
    while (len > 0) {
        size_t n_run;
        const unsigned char *run = kv_reader_run(&r, len, &n_run);

        dst[n++] = (struct iovec){.iov_base = (void *)(uintptr_t)run, .iov_len = n_run};
        len -= n_run;
    }
    return n;
}

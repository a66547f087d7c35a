/* A snapshot file in f32, from one in f16 or q8.  Every f16 is an f32, and so is an int8 times an
 * f16, so nothing is rounded; what is computed from here on is another thing, which the namespace
 * says. */
#include "kvcore/kv_file.h"
#include "kvcore/kv_pieces.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

static float f16_value(const unsigned char *p)
{
    uint16_t h;
    uint32_t sign, exponent, fraction, bits;
    float value;

    memcpy(&h, p, sizeof(h));
    sign = (uint32_t)(h & 0x8000) << 16;
    exponent = h >> 10 & 0x1f;
    fraction = h & 0x3ff;
    if (exponent == 0) { /* zero or below the normal ones: so many times 2^-24 */
        value = (float)fraction * 0x1p-24f;
        memcpy(&bits, &value, sizeof(bits));
    } else {
        bits = (exponent == 0x1f ? 0xffu : exponent + 112) << 23 | fraction << 13;
    }
    bits |= sign;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* One layer's K or V of one position: n elements; returns what follows it. */
static const unsigned char *widen_f16(const unsigned char *from, size_t n, float *to)
{
    for (size_t i = 0; i < n; i++)
        to[i] = f16_value(from + 2 * i);
    return from + 2 * n;
}

static const unsigned char *widen_q8(const unsigned char *from, size_t n, float *to)
{
    const unsigned char *scales = from + n;

    for (size_t i = 0; i < n; i++)
        to[i] = (float)(int8_t)from[i] * f16_value(scales + i / KV_Q8_BLOCK * 2);
    return scales + n / KV_Q8_BLOCK * 2;
}

struct widen {
    const struct kv_geometry *from;
    struct kv_file_writer *writer;
    unsigned char *narrow; /* one position */
    float *wide;
    kv_progress *progress;
    void *arg;
    uint64_t done, total; /* bytes read */
};

static void widen_position(struct widen *w)
{
    const size_t n = (size_t)w->from->n_kv_heads * w->from->head_dim;
    const unsigned char *from = w->narrow;

    for (size_t i = 0; i < 2 * (size_t)w->from->n_layers; i++)
        from = w->from->precision == KV_Q8 ? widen_q8(from, n, w->wide + i * n)
                                           : widen_f16(from, n, w->wide + i * n);
}

static int widen_rows(void *arg, uint32_t first, uint32_t count, const uint32_t *ids,
                      const struct iovec *rows, size_t n_rows, struct kv_why *why)
{
    struct widen *w = arg;
    const size_t bytes = kv_position_bytes(w->from);
    const size_t n = 2 * (size_t)w->from->n_layers * w->from->n_kv_heads * w->from->head_dim;
    const struct iovec wide = {.iov_base = w->wide, .iov_len = n * sizeof(*w->wide)};
    struct kv_reader from = {.src = rows, .n_src = n_rows};
    int rc = 0;

    (void)first;
    for (uint32_t i = 0; i < count && rc == 0; i++) {
        kv_reader_read(&from, w->narrow, bytes);
        widen_position(w);
        rc = kv_file_write_rows(w->writer, ids + i, 1, &wide, 1, why);
    }
    w->done += count * (uint64_t)bytes;
    if (rc == 0 && w->progress != NULL && w->progress(w->arg, w->done, w->total) != 0)
        rc = kv_fail(why, KV_ERR_BUSY, "cancelled");
    return rc;
}

static int make_header(const struct kv_file_info *from, const struct kv_digest *ns,
                       struct kv_snapshot_header *out, struct kv_why *why)
{
    *out = (struct kv_snapshot_header){
        .fingerprint = from->header.fingerprint,
        .ns = *ns,
        .numerics_id = from->header.numerics_id,
        .geometry = from->header.geometry,
        .n_bound = from->n_positions,
    };
    if (from->header.geometry.precision == KV_F32)
        return kv_fail(why, KV_ERR_INVALID, "precision: it is f32 already");
    if (from->header.base != 0)
        return kv_fail(why, KV_ERR_INVALID,
                       "base: it stands on another snapshot up to position %u; compact it first",
                       from->header.base);
    out->geometry.precision = KV_F32;
    out->frame_positions = kv_frame_positions(&out->geometry);
    if (getrandom(out->snapshot_id, sizeof(out->snapshot_id), 0) != sizeof(out->snapshot_id))
        return kv_fail(why, KV_ERR_IO, "no random bytes for an id");
    return kv_geometry_check(&out->geometry, why);
}

static int widen_file(struct kv_file *from, const struct kv_widen *to,
                      const struct kv_snapshot_header *header, const void *session,
                      size_t session_len, struct kv_file_info *out, struct kv_why *why)
{
    const struct kv_file_info *info = kv_file_info(from);
    const size_t bytes = kv_position_bytes(&info->header.geometry);
    struct widen w = {.from = &info->header.geometry,
                      .progress = to->progress,
                      .arg = to->arg,
                      .total = info->n_positions * (uint64_t)bytes};
    struct kv_file_frame *frames = NULL;
    int rc;

    rc = kv_file_create(to->to, to->name,
                        kv_file_bytes(&header->geometry, 0, info->n_positions, 0, session_len),
                        header, &w.writer, why);
    if (rc < 0) {
        (void)to->to->disk->ops->unlink(to->to->disk, to->name);
        return rc;
    }
    w.narrow = malloc(bytes);
    w.wide = malloc(kv_position_bytes(&header->geometry));
    if (w.narrow == NULL || w.wide == NULL)
        rc = kv_fail(why, KV_ERR_NOMEM, "no memory for a position");
    if (rc == 0)
        rc = kv_file_read(from, to->from, 0, info->n_positions, widen_rows, &w, why);
    if (rc == 0 && session_len > 0)
        rc = kv_file_write_section(w.writer, KV_SECTION_SESSION, session, session_len, why);
    if (rc == 0)
        rc = kv_file_finish(w.writer, true, out, &frames, why);
    else
        kv_file_discard(w.writer);
    if (rc < 0)
        (void)to->to->disk->ops->unlink(to->to->disk, to->name);
    else
        rc = to->to->disk->ops->sync_directory(to->to->disk) < 0
                 ? kv_fail(why, KV_ERR_IO, "the directory cannot be synced")
                 : 0;
    if (rc == 0)
        out->frames = NULL;
    free(frames);
    free(w.narrow);
    free(w.wide);
    return rc;
}

int kv_file_widen(struct kv_file *from, const struct kv_widen *to, struct kv_file_info *out,
                  struct kv_why *why)
{
    struct kv_snapshot_header header;
    void *session = NULL;
    size_t len = 0;
    struct kv_disk_stat there;
    int rc = make_header(kv_file_info(from), &to->ns, &header, why);

    if (rc == 0 && to->to->disk->ops->stat(to->to->disk, to->name, &there) != -ENOENT)
        rc = kv_fail(why, KV_ERR_INVALID, "%s is there already", to->name);
    if (rc == 0)
        rc = kv_file_section(from, to->from, KV_SECTION_SESSION, &session, &len, why);
    if (rc == 0)
        rc = widen_file(from, to, &header, session, len, out, why);
    free(session);
    return rc;
}

/* Drawing a token.
 *
 * Tokens are in one order: the greater logit first, of equals the lower id.  Every filter keeps a
 * beginning of that order, and they apply one after the other:
 *
 *   top-k        the first k
 *   top-p        the fewest with at least top_p of the probability of what top-k kept
 *   min-p        those with at least min_p of the first one's probability
 *   temperature  weights exp((logit - greatest) / temperature) of what is left
 *   draw         the first token at which the running sum of weights passes uniform * sum
 *
 * Sums go in double by ascending id where all tokens take part, else in the order; exp and log are
 * fixed_math.h; so a draw is the same on every machine.
 *
 * The order is made as far as it is needed.  Tokens are dealt into buckets by their distance from
 * the greatest logit, in one pass; a bucket is sorted when the first of its tokens is asked for.
 * With trained weights the first few hundred tokens stand in buckets of a few each.  What is more
 * than 32 below the greatest, less than 1e-14 of its probability, shares the last bucket.
 *
 * A logit that is not a number, or -inf, counts as the least finite one: the engine lets none
 * through, and the sampler must not go astray over one. */
#include "model/sampler.h"
#include "model/fixed_math.h"
#include "model/model.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

enum { N_BUCKETS = 1024 };
#define BUCKET_RANGE 32.0f

struct sampler {
    uint32_t n_vocab;
    float *logits;     /* [n_vocab] finite */
    double *weights;   /* [n_vocab] by place in the order, or by id in total_weight() */
    uint32_t *order;   /* [n_vocab] ids; right up to n_ready */
    uint16_t *buckets; /* [n_vocab] by id */
    uint32_t begins[N_BUCKETS + 1];
    uint32_t n_ready;  /* places in order that are sorted */
    uint32_t n_sorted; /* buckets */
    float top, least;
};

/* ---- Parameters ---- */

void sampler_defaults(struct sampler_params *p)
{
    *p = (struct sampler_params){.top_p = 1.0f};
}

int sampler_check(const struct sampler_params *p, struct kv_why *why)
{
    if (!(p->temperature >= 0.0f) || !isfinite(p->temperature))
        return kv_fail(why, MODEL_ERR_INVALID, "temperature is %g: 0 or more, and finite",
                       (double)p->temperature);
    if (!(p->top_p >= 0.0f && p->top_p <= 1.0f))
        return kv_fail(why, MODEL_ERR_INVALID, "top_p is %g: 0 to 1", (double)p->top_p);
    if (!(p->min_p >= 0.0f && p->min_p <= 1.0f))
        return kv_fail(why, MODEL_ERR_INVALID, "min_p is %g: 0 to 1", (double)p->min_p);
    return 0;
}

/* ---- Randomness ---- */

void philox4x32_10(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    int round;

    for (round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)c0 * UINT32_C(0xd2511f53);
        uint64_t p1 = (uint64_t)c2 * UINT32_C(0xcd9e8d57);
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += UINT32_C(0x9e3779b9);
        k1 += UINT32_C(0xbb67ae85);
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

double sampler_uniform(uint64_t seed, uint32_t branch, uint64_t position)
{
    const uint32_t counter[4] = {(uint32_t)position, (uint32_t)(position >> 32), branch, 0};
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t out[4];

    philox4x32_10(counter, key, out);
    return (double)(((uint64_t)out[1] << 32 | out[0]) >> 11) * 0x1p-53;
}

/* ---- Life ---- */

int sampler_open(uint32_t n_vocab, struct sampler **out)
{
    struct sampler *s;

    if (n_vocab == 0)
        return MODEL_ERR_INVALID;
    s = calloc(1, sizeof *s);
    if (s == NULL)
        return MODEL_ERR_NOMEM;
    s->n_vocab = n_vocab;
    s->logits = malloc((size_t)n_vocab * sizeof *s->logits);
    s->weights = malloc((size_t)n_vocab * sizeof *s->weights);
    s->order = malloc((size_t)n_vocab * sizeof *s->order);
    s->buckets = malloc((size_t)n_vocab * sizeof *s->buckets);
    if (s->logits == NULL || s->weights == NULL || s->order == NULL || s->buckets == NULL) {
        sampler_close(s);
        return MODEL_ERR_NOMEM;
    }
    *out = s;
    return 0;
}

void sampler_close(struct sampler *s)
{
    if (s == NULL)
        return;
    free(s->logits);
    free(s->weights);
    free(s->order);
    free(s->buckets);
    free(s);
}

/* ---- The order ---- */

static float made_finite(float v)
{
    v = v >= -FLT_MAX ? v : -FLT_MAX; /* also what is not a number */
    return v <= FLT_MAX ? v : FLT_MAX;
}

static void take_logits(struct sampler *s, const float *logits)
{
    /* lanes side by side, for the compiler to put in one register */
    enum { LANES = 16 };
    float top[LANES], least[LANES];
    uint32_t i, j;

    for (i = 0; i < s->n_vocab; i++)
        s->logits[i] = made_finite(logits[i]);
    for (j = 0; j < LANES; j++)
        top[j] = least[j] = s->logits[0];
    for (i = 0; i + LANES <= s->n_vocab; i += LANES)
        for (j = 0; j < LANES; j++) {
            float v = s->logits[i + j];
            top[j] = v > top[j] ? v : top[j];
            least[j] = v < least[j] ? v : least[j];
        }
    for (j = 0; i < s->n_vocab; i++, j++) {
        top[j] = s->logits[i] > top[j] ? s->logits[i] : top[j];
        least[j] = s->logits[i] < least[j] ? s->logits[i] : least[j];
    }
    s->top = top[0];
    s->least = least[0];
    for (j = 1; j < LANES; j++) {
        s->top = top[j] > s->top ? top[j] : s->top;
        s->least = least[j] < s->least ? least[j] : s->least;
    }
}

static uint32_t greatest(const struct sampler *s)
{
    uint32_t i = 0;

    while (s->logits[i] != s->top)
        i++;
    return i;
}

static void deal(struct sampler *s)
{
    float top = s->top, range = top - s->least, scale;
    uint32_t i, b, n, at[N_BUCKETS];

    /* a range of 0 puts all into the first bucket, in order of their ids, which is sorted */
    range = range < BUCKET_RANGE ? range : BUCKET_RANGE;
    scale = range > 0.0f ? (float)(N_BUCKETS - 1) / range : 0.0f;
    memset(at, 0, sizeof at);
    for (i = 0; i < s->n_vocab; i++) {
        float place = (top - s->logits[i]) * scale;
        s->buckets[i] = (uint16_t)(int)(place < (float)(N_BUCKETS - 1) ? place : N_BUCKETS - 1);
    }
    for (i = 0; i < s->n_vocab; i++)
        at[s->buckets[i]]++;
    for (b = 0, n = 0; b < N_BUCKETS; b++) {
        s->begins[b] = n;
        n += at[b];
        at[b] = s->begins[b];
    }
    s->begins[N_BUCKETS] = n;
    for (i = 0; i < s->n_vocab; i++)
        s->order[at[s->buckets[i]]++] = i;
    s->n_ready = 0;
    s->n_sorted = 0;
}

/* Whether a stands before b. */
static bool before(const struct sampler *s, uint32_t a, uint32_t b)
{
    return s->logits[a] > s->logits[b] || (s->logits[a] == s->logits[b] && a < b);
}

static void sift(const struct sampler *s, uint32_t *ids, uint32_t at, uint32_t n)
{
    uint32_t id = ids[at], child;

    while ((child = 2 * at + 1) < n) {
        if (child + 1 < n && before(s, ids[child], ids[child + 1]))
            child++;
        if (!before(s, id, ids[child]))
            break;
        ids[at] = ids[child];
        at = child;
    }
    ids[at] = id;
}

/* Insertion for what is short or nearly sorted, a heap for the rest. */
static void sort_ids(const struct sampler *s, uint32_t *ids, uint32_t n)
{
    uint32_t i, j, id, n_moves = 0;

    for (i = 1; i < n && n_moves < 8 * n + 64; i++) {
        id = ids[i];
        for (j = i; j > 0 && before(s, id, ids[j - 1]); j--)
            ids[j] = ids[j - 1];
        ids[j] = id;
        n_moves += i - j;
    }
    if (i >= n)
        return;
    for (i = n / 2; i > 0; i--)
        sift(s, ids, i - 1, n);
    for (i = n - 1; i > 0; i--) {
        id = ids[0];
        ids[0] = ids[i];
        ids[i] = id;
        sift(s, ids, 0, i);
    }
}

/* The token at a place of the order. */
static uint32_t token_at(struct sampler *s, uint32_t place)
{
    while (place >= s->n_ready) {
        uint32_t begin = s->begins[s->n_sorted], end = s->begins[s->n_sorted + 1];
        sort_ids(s, s->order + begin, end - begin);
        s->n_ready = end;
        s->n_sorted++;
    }
    return s->order[place];
}

/* ---- Filters and draw ---- */

static double weight(const struct sampler *s, uint32_t id, double temperature)
{
    return fixed_exp(((double)s->logits[id] - (double)s->top) / temperature);
}

/* The sum of all weights, by ascending id. */
static double total_weight(struct sampler *s, double temperature)
{
    double total = 0.0;
    uint32_t i;

    for (i = 0; i < s->n_vocab; i++)
        s->weights[i] = weight(s, i, temperature);
    for (i = 0; i < s->n_vocab; i++)
        total += s->weights[i];
    return total;
}

/* Weights of the first n in the order to s->weights; returns their sum. */
static double prefix_weight(struct sampler *s, uint32_t n, double temperature)
{
    double total = 0.0;
    uint32_t i;

    for (i = 0; i < n; i++) {
        s->weights[i] = weight(s, token_at(s, i), temperature);
        total += s->weights[i];
    }
    return total;
}

static uint32_t keep_top_p(struct sampler *s, uint32_t n, float top_p)
{
    double total, sum = 0.0;
    uint32_t i;

    if (top_p >= 1.0f)
        return n;
    total = n == s->n_vocab ? total_weight(s, 1.0) : prefix_weight(s, n, 1.0);
    for (i = 0; i + 1 < n; i++) {
        sum += weight(s, token_at(s, i), 1.0);
        if (sum >= (double)top_p * total)
            break;
    }
    return i + 1;
}

static uint32_t keep_min_p(struct sampler *s, uint32_t n, float min_p)
{
    uint32_t i;

    if (min_p <= 0.0f)
        return n;
    for (i = 1; i < n && weight(s, token_at(s, i), 1.0) >= (double)min_p; i++)
        ;
    return i;
}

static uint32_t draw(struct sampler *s, uint32_t n, double temperature, double uniform)
{
    double total, sum = 0.0;
    uint32_t i;

    total = n == s->n_vocab ? total_weight(s, temperature) : prefix_weight(s, n, temperature);
    for (i = 0; i + 1 < n; i++) {
        sum += weight(s, token_at(s, i), temperature);
        if (sum > uniform * total)
            break;
    }
    return token_at(s, i);
}

static uint32_t draw_filtered(struct sampler *s, const struct sampler_params *p, uint64_t position)
{
    uint32_t n = p->top_k > 0 && p->top_k < s->n_vocab ? p->top_k : s->n_vocab;

    deal(s);
    n = keep_top_p(s, n, p->top_p);
    n = keep_min_p(s, n, p->min_p);
    return draw(s, n, (double)p->temperature, sampler_uniform(p->seed, p->branch, position));
}

uint32_t sampler_draw(struct sampler *s, const struct sampler_params *p, const float *logits,
                      uint64_t position, float *logprob)
{
    uint32_t id;

    take_logits(s, logits);
    id = p->temperature <= 0.0f ? greatest(s) : draw_filtered(s, p, position);
    if (logprob != NULL)
        *logprob =
            (float)((double)s->logits[id] - (double)s->top - fixed_log(total_weight(s, 1.0)));
    return id;
}

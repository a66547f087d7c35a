/* A model, a cache and an engine for tests, and ways to run ids through them. */
#ifndef TESTS_ENGINE_RIG_H
#define TESTS_ENGINE_RIG_H

#include "model/model.h"

struct rig {
    struct gguf *gguf;
    struct model *model;
    const struct model_params *params;
    struct kv_cache *cache;
    struct engine *engine;
};

struct rig_config {
    const char *path;
    const char *kernels; /* NULL: the fastest */
    enum kv_precision precision;
    uint32_t page_tokens;      /* 0: the default */
    uint32_t n_threads;        /* 0: 1 */
    uint32_t n_positions;      /* that the cache has room for; 0: 2048 */
    const struct model *model; /* run this one instead of opening path */
};

/* Check's assertions stand for errors. */
void rig_open(struct rig *r, const struct rig_config *config);
void rig_close(struct rig *r);

struct kv_context *rig_context(struct rig *r);

/* Append ids in steps of at most `chunk`; digests [n]: of each position's logits. */
void rig_run(struct rig *r, struct kv_context *ctx, const uint32_t *ids, uint32_t n, uint32_t chunk,
             uint64_t *digests);
/* Append ids in one step; logits [n][V]. */
void rig_logits(struct rig *r, struct kv_context *ctx, const uint32_t *ids, uint32_t n,
                float *logits);

/* Paths: static buffers, NULL where the file is not there. */
const char *rig_tiny(const char *type);      /* "q4_1" */
const char *rig_reference(const char *name); /* of the reference data beside the checkout */
const char *rig_default_model(void);

/* ids[i] below n_vocab, from a fixed generator. */
void rig_ids(uint32_t *ids, uint32_t n, uint32_t n_vocab, uint32_t seed);

#endif

/* What the vector sets share: how packed weights lie in memory and the loops over them.
 *
 * With L float lanes a vector has 4 * L bytes (AVX2: L = 8, AVX-512: L = 16), and L rows of weights
 * are a tile, one row a lane, so that one broadcast dword of activations serves L outputs and no
 * sum ever crosses lanes.  Rows that a last tile lacks are zero bits.  Tiles follow one another:
 *
 *     float types       k = 0, 1, ...: L weights as they stand in the file
 *     quantized types   groups of one vector of halves and the quants of its blocks:
 *
 *         with a minimum   | d x L | m x L | quants of block b     |
 *         without          | d x L | d x L | quants of blocks b, b + 1 |
 *
 *         Thus every vector is aligned, and all is read in address order.  A vector of quants holds
 *         4 bytes of each row: dword r of vector j are bytes 4j..4j+3 of row r's block in the file.
 *         With nibbles (4 vectors a block) that is weights 4j..4j+3 low and 16+4j..16+4j+3 high. */
#ifndef MODEL_KERN_TILES_H
#define MODEL_KERN_TILES_H

#include "model/kern_matrix.h"

enum {
    TILE_MAX_TOKENS = 8, /* that a kernel of any set takes at once */
    /* Activation bytes to be passed over again and again while weights stream by: they and a tile
     * of weights fit the smallest L2 there is (512 KiB).  Runs that fit L1 were no faster. */
    TILE_ACT_BYTES = 256 * 1024,
    /* How far ahead weights are fetched at most; else it is what one call reads, so that each line
     * is asked for once.  Without it a stream ran at 9 GB/s where memory gives 25. */
    TILE_AHEAD_MAX = 8 * 1024,
};

/* How a quantized type is packed. */
struct tile_quant {
    uint32_t src_bytes;    /* of a block in the file */
    uint32_t n_vectors;    /* of quants a block */
    uint32_t group_blocks; /* under one vector of halves */
    uint32_t flip;         /* exclusive or on every dword of quants */
};

/* One call of a kernel: some tiles of rows against a few tokens. */
struct tile_job {
    const unsigned char *w; /* first tile */
    size_t tile_bytes;
    const struct kern_acts *a;
    uint32_t t;      /* first token */
    uint32_t n_rows; /* outputs to write, from the first row on; at most all rows of the tiles */
    size_t ahead;    /* how far before its use to fetch w, in bytes; 0 where it is in cache */
    float *y;        /* of the first row and token */
    size_t y_stride;
};

typedef void tile_kernel(const struct tile_job *job);

/* The kernels of one type: kernel[n - 1] takes n tokens. */
struct tile_kernels {
    uint32_t n_tiles;    /* of rows, that one call takes */
    uint32_t max_tokens; /* 1..TILE_MAX_TOKENS */
    tile_kernel *kernel[TILE_MAX_TOKENS];
};

/* Everything that a set knows of a type. */
struct tile_type {
    enum gguf_type type;
    uint32_t act_bytes;       /* of activations that 32 weights meet */
    uint32_t weight_bytes;    /* float types; 0: quantized */
    struct tile_quant quant;  /* quantized types */
    struct tile_kernels few;  /* one tile a call */
    struct tile_kernels many; /* several tiles a call; n_tiles 0: none */
    struct tile_kernels lone; /* several tiles a call for a single token; n_tiles 0: none */
};

/* A set's types, and its lanes. */
struct tile_set {
    uint32_t lanes;
    const struct tile_type *types;
    size_t n_types;
};

size_t tile_pack_bytes(const struct tile_set *set, enum gguf_type type, uint32_t n_rows,
                       uint32_t n_cols);
void tile_pack(const struct tile_set *set, const struct kern_matrix *src, void *dst);
void tile_gemm(const struct tile_set *set, const struct kern_matrix *w, uint32_t row0,
               uint32_t row1, const struct kern_acts *a, float *y, size_t y_stride);

#endif

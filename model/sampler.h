/* The sampler's source of randomness, apart so that its vectors can be tested.  Private to model/.
 */
#ifndef MODEL_SAMPLER_H
#define MODEL_SAMPLER_H

#include <stdint.h>

/* Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011):
 * out is a function of counter and key alone. */
void philox4x32_10(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

/* Uniform in [0, 1), a multiple of 2^-53.  The key is the seed (low word first), the counter
 * (position low, position high, branch, 0); the first 53 of out[1] << 32 | out[0], from the top. */
double sampler_uniform(uint64_t seed, uint32_t branch, uint64_t position);

#endif

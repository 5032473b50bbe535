/* The types of queries and of the cache, and the running softmax, for all attention.
 *
 * The compiler sets Q_BITS and KV_BITS, 32 for float32 and 16 for bfloat16; KV_BITS 8 for int8, with KV_FP8 for e4m3.
 */

#ifndef ORCA_SOFTMAX_H
#define ORCA_SOFTMAX_H

#include "vectors.h"

#ifndef Q_BITS
#define Q_BITS 32
#endif
#ifndef KV_BITS
#define KV_BITS 32
#endif

typedef ELEMENT(Q_BITS) q_type;
#ifdef KV_FP8
typedef fp8 kv_type;
#define KV_UNIT FP8_UNIT /* of loaded keys and values */
#else
typedef ELEMENT(KV_BITS) kv_type;
#define KV_UNIT 1.0f
#endif

static const float NOTHING = -1e30f; /* the score of a key that a query does not see */

/* Turns a query's `n` scores, filled up to whole vectors, into weights, and updates its greatest score `top` and the
 * sum of its weights `total`. Returns the factor for the values summed so far. */
INLINE float as_weights(float *scores, int n, float *top, float *total) {
  vec tops = all(*top);
  for (int i = 0; i < n; i += LANES) tops = larger(load(scores + i), tops);
  float new_top = *top;
  for (int i = 0; i < LANES; i++) new_top = tops[i] > new_top ? tops[i] : new_top;
  vec sums = all(0);
  for (int i = 0; i < n; i += LANES) {
    const vec weight = exponential(load(scores + i) - all(new_top));
    store(scores + i, weight);
    sums += weight;
  }
  const float shrink = exponential(all(*top - new_top))[0];
  *total = *total * shrink + sum(sums);
  *top = new_top;
  return shrink;
}

#endif

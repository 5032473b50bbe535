/* A matrix product's dtypes and arguments, and the number of a sum's terms that a lane takes at once.
 *
 * X_BITS and WEIGHT_BITS are 32 for float32 and 16 for bfloat16; y has x's dtype. Products and sums are float32.
 * bfloat16 is widened as it is read, unless both are bfloat16 and the processor has AVX512-BF16: then a lane takes
 * PAIRS of terms, which halves the instructions and the columns. Subnormal numbers count as zero, as in XLA's threads.
 */

#ifndef ORCA_PRODUCT_FORM_H
#define ORCA_PRODUCT_FORM_H

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.h"

#ifndef X_BITS
#define X_BITS 32
#endif
#ifndef WEIGHT_BITS
#define WEIGHT_BITS 32
#endif

typedef ELEMENT(X_BITS) x_type;
typedef ELEMENT(WEIGHT_BITS) weight_type;

/* Whether lanes take pairs of terms. Tests set it to 0. */
#ifndef PAIRS
#if X_BITS == 16 && WEIGHT_BITS == 16 && LANES == 16 && defined(__AVX512BF16__)
#define PAIRS 1
#else
#define PAIRS 0
#endif
#endif

/* Whether panels are computed in tiles of AMX. Tests set it to 0. */
#ifndef TILES
#if PAIRS && defined(__AMX_BF16__) && defined(__linux__)
#define TILES 1
#else
#define TILES 0
#endif
#endif

/* The factors that a lane takes at once, in 32 bits. */
#if PAIRS
#define TERMS 2
typedef bfloat16 factor_type;
#else
#define TERMS 1
typedef float factor_type;
#endif

#define LINE (64 / sizeof(weight_type)) /* weights of a cache line */

typedef struct {
  const x_type *x;
  const factor_type *few_x; /* x of the few tokens, widened unless lanes take pairs */
  const weight_type *weight;
  x_type *y;
  size_t n_tokens, n_in, n_out;
  size_t n_few;              /* the last tokens, which are not in panels */
  size_t n_panels, n_chunks; /* panels of tokens, chunks of outputs */
  size_t at_once;            /* panels in an item */
  unsigned long number;      /* identifies this product */
} Product;

static inline size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* The next TERMS * LANES terms; if fewer are `left`, they are filled up with zeros. */
#if PAIRS
INLINE vec terms_at(const bfloat16 *from, size_t left) {
  return (vec)_mm512_maskz_loadu_epi32(left < TERMS * LANES ? 0xff : 0xffff, from); /* at least 16 are left */
}
#else
#define terms_at(from, left) load(from)
#endif

INLINE vec add_products(vec sums, vec a, vec b) {
#if PAIRS
  return (vec)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
#else
  return sums + a * b;
#endif
}

#endif

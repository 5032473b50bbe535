/* A product's panel of tokens: vectors run across the tokens, and each weight is multiplied by all tokens of the panel
 * at once. Each thread transposes the panel's x for itself.
 */

#ifndef ORCA_TOKEN_PANEL_H
#define ORCA_TOKEN_PANEL_H

#include "product_form.h"

#define MOST_VECTORS 3 /* vectors of tokens in a panel */

/* ROWS: outputs whose sums for MOST_VECTORS fill the registers, 32 or 16, together with the factors. PANELS: the most
 * panels of an item, which take each strip of weights in turn. */
#if LANES == 16
#define ROWS 8
#define PANELS (TILES ? 4 : 1)
#else
#define ROWS 4
#define PANELS 2
#endif

/* The number of sums over which an output's terms are spread in a panel of one vector. With one sum each, ROWS sums
 * are too few to hide an addition's latency. */
#ifndef TURNS
#define TURNS (ROWS < 8 ? 2 : 1)
#endif

#define STRIP LANES /* outputs that are stored together */
#define DEPTH 256   /* terms in a partial sum: shorter sums have smaller rounding errors */

/* Bytes after the last term in a panel's columns: with pairs, the last tile may be half full. */
#define UNUSED ((TERMS - 1) * MOST_VECTORS * LANES * LANES / 2 * sizeof(float))

/* A panel's x as a thread has transposed it. The thread keeps the memory for later products. */
typedef struct {
  float *columns;
  size_t size;
  unsigned long number;
  size_t panel;
} Packed;

static _Thread_local Packed packed[PANELS];

/* One lane's terms, in all lanes. */
INLINE vec all_of(const factor_type *from) {
  float word;
  memcpy(&word, from, sizeof word);
  return all(word);
}

/* The number of tokens in panels. */
static inline size_t n_paneled(const Product *l) { return l->n_tokens - l->n_few; }

/* A panel's first vector of tokens. Each panel has MOST_VECTORS vectors, or one less. */
static inline size_t panel_start(const Product *l, size_t panel) {
  return (n_paneled(l) + LANES - 1) / LANES * panel / l->n_panels;
}

/* A panel's x, transposed by this thread unless it has it already: [I / TERMS][tokens] of TERMS, with zeros after the
 * last token. NULL if memory runs out. */
static const float *columns_of(const Product *l, size_t panel) {
  Packed *cached = &packed[panel % PANELS];
  if (cached->number == l->number && cached->panel == panel) return cached->columns;
  const size_t first = panel_start(l, panel) * LANES, width = panel_start(l, panel + 1) * LANES - first;
  if (cached->size < width * l->n_in) {
    free(cached->columns);
    cached->columns = aligned_alloc(64, width * l->n_in * sizeof(factor_type) + UNUSED);
    cached->size = cached->columns ? width * l->n_in : 0;
    if (!cached->columns) return NULL;
  }
  cached->number = l->number;
  cached->panel = panel;
  for (size_t at = 0; at < width; at += LANES)
    for (size_t k = 0; k < l->n_in; k += TERMS * LANES) {
      vec tile[LANES];
      UNROLL for (int i = 0; i < LANES; i++) {
        const size_t token = first + at + i;
        tile[i] = token < n_paneled(l) ? terms_at(l->x + token * l->n_in + k, l->n_in - k) : all(0);
      }
      transpose(tile);
      UNROLL for (int i = 0; i < LANES; i++) store(cached->columns + (k / TERMS + i) * width + at, tile[i]);
    }
  return cached->columns;
}

/* Adds `n_terms` terms for `rows` outputs and `vectors` of tokens, both constants to the compiler. Rows of weights w
 * are `stride` apart; rows of `ahead`, which are prefetched, are n_in apart. Without `more`, sums [rows][vectors] are
 * new. */
INLINE void add_terms(const factor_type *w, size_t stride, const weight_type *ahead, size_t n_in, size_t n_terms,
                      const float *columns, bool more, vec *sums, const int rows, const int vectors) {
  const int n_turns = vectors == 1 ? TURNS : 1;
  vec terms[TURNS][ROWS][MOST_VECTORS];
  UNROLL for (int turn = 0; turn < n_turns; turn++)
    UNROLL for (int i = 0; i < rows; i++)
      UNROLL for (int g = 0; g < vectors; g++) terms[turn][i][g] = all(0);
  for (size_t k = 0; k < n_terms; k += LANES) {
    if (LINE <= LANES || k % LINE == 0)
      UNROLL for (int i = 0; i < rows; i++) __builtin_prefetch(ahead + i * n_in + k, 0, 2);
    UNROLL for (int at = 0; at < LANES; at += TERMS) {
      vec(*into)[MOST_VECTORS] = terms[at / TERMS % n_turns];
      vec xs[MOST_VECTORS];
      UNROLL for (int g = 0; g < vectors; g++) xs[g] = kept(load(columns + ((k + at) / TERMS * vectors + g) * LANES));
      UNROLL for (int i = 0; i < rows; i++) {
        const vec weight = all_of(w + i * stride + k + at);
        UNROLL for (int g = 0; g < vectors; g++) into[i][g] = add_products(into[i][g], weight, xs[g]);
      }
    }
  }
  UNROLL for (int i = 0; i < rows; i++)
    UNROLL for (int g = 0; g < vectors; g++) {
      vec *to = sums + i * vectors + g, sum = terms[0][i][g];
      UNROLL for (int turn = 1; turn < n_turns; turn++) sum += terms[turn][i][g];
      *to = more ? *to + sum : sum;
    }
}

/* Not inlined, because the compiler would keep `sums` in registers that the terms need. */
#define ADD_TERMS(VECTORS)                                                                                   \
  static __attribute__((noinline)) void add_terms_##VECTORS(const factor_type *w, size_t stride,             \
                                                            const weight_type *ahead, size_t n_in,           \
                                                            size_t n_terms, const float *columns, bool more, \
                                                            vec *sums) {                                     \
    add_terms(w, stride, ahead, n_in, n_terms, columns, more, sums, ROWS, VECTORS);                          \
  }
ADD_TERMS(1)
ADD_TERMS(2)
ADD_TERMS(3)

static void (*const add_terms_of[])(const factor_type *, size_t, const weight_type *, size_t, size_t,
                                    const float *, bool, vec *) = {NULL, add_terms_1, add_terms_2, add_terms_3};

/* Stores sums [STRIP][vectors] of a panel's tokens, from `first` on. */
static inline void store_strip(const Product *l, size_t out, size_t first, size_t vectors, const vec *sums) {
  const size_t n = least(vectors * LANES, n_paneled(l) - first);
  x_type *y = l->y + first * l->n_out + out;
  for (size_t g = 0; g < vectors; g++) {
    vec tile[LANES];
    UNROLL for (int i = 0; i < STRIP; i++) tile[i] = sums[i * vectors + g];
    transpose(tile);
    for (size_t i = g * LANES; i < least(n, (g + 1) * LANES); i++) store(y + i * l->n_out, tile[i % LANES]);
  }
}

/* Computes STRIP outputs of a panel's tokens. */
static void strip(const Product *l, size_t out, size_t panel, const float *columns) {
  const size_t n_in = l->n_in, n_out = l->n_out;
  const size_t first = panel_start(l, panel) * LANES, vectors = panel_start(l, panel + 1) - first / LANES;
  const size_t n = least(vectors * LANES, n_paneled(l) - first);
  x_type *y = l->y + first * n_out + out;
  vec sums[STRIP * MOST_VECTORS];
  for (size_t row = 0; row < STRIP; row += ROWS) {
    const weight_type *w = l->weight + (out + row) * n_in;
    const weight_type *ahead = out + row + 2 * ROWS <= n_out ? w + ROWS * n_in : w;
    for (size_t i = row ? n / 2 : 0; i < (row ? n : n / 2); i++) __builtin_prefetch(y + i * n_out, 1, 3);
    for (size_t k = 0; k < n_in; k += DEPTH) {
      const size_t n_terms = least(DEPTH, n_in - k);
#if WEIGHT_BITS == 32 || PAIRS
      const factor_type *factors = w + k;
      const size_t stride = n_in;
#else
      float factors[ROWS * DEPTH];
      const size_t stride = DEPTH;
      for (int i = 0; i < ROWS; i++)
        for (size_t at = 0; at < n_terms; at += LANES) store(factors + i * DEPTH + at, load(w + i * n_in + k + at));
#endif
      add_terms_of[vectors](factors, stride, ahead + k, n_in, n_terms, columns + k / TERMS * vectors * LANES, k > 0,
                            sums + row * vectors);
    }
  }
  store_strip(l, out, first, vectors, sums);
}

#endif

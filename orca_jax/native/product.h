/* A matrix product y [T, O] = x [T, I] times weight [O, I], cut into items for threads (product_form.h).
 *
 * Up to FEW tokens take the form of few_tokens.h, more take that of token_panel.h. If up to REST tokens remain that
 * would not fill a panel's last vector, these last tokens take the form for few again. A token's result depends on its
 * form, and on nothing else in the batch. With tiles (tile_panel.h) there is one form.
 *
 * I is a multiple of 16, and O is at least 16.
 */

#ifndef ORCA_PRODUCT_H
#define ORCA_PRODUCT_H

#include "few_tokens.h"
#include "tile_panel.h"
#include "token_panel.h"
#include "xla_call.h"

#define CHUNK 96 /* the least outputs of an item, in whole strips */

/* An item has several panels only if their columns are at most this many bytes, and stay in the second cache. */
#define BYTES_OF_PANELS (TILES ? 1 << 20 : 1 << 18)

/* Items per thread, so that no thread waits long for another. */
#define ITEMS 8

/* Work below which another thread costs more than it saves: bytes of weights, and multiply-adds. */
#define BYTES_WORTH_A_THREAD (1 << 18)
#define PRODUCTS_WORTH_A_THREAD (1 << 20)

static atomic_ulong n_products;

/* An item's work: outputs [start, end), for some panels of tokens and, with the last panel, the few tokens. */
typedef struct {
  size_t start, end, panel, n_panels, first_token, end_token;
} Part;

static inline Part part_of(const Product *l, size_t item) {
  const size_t chunk = item % l->n_chunks, n_strips = l->n_out / STRIP, panel = item / l->n_chunks * l->at_once;
  const size_t n_panels = least(l->at_once, l->n_panels - panel);
  const bool is_last = panel + n_panels == l->n_panels;
  return (Part){.start = n_strips * chunk / l->n_chunks * STRIP,
                .end = chunk + 1 < l->n_chunks ? n_strips * (chunk + 1) / l->n_chunks * STRIP : l->n_out,
                .panel = panel,
                .n_panels = n_panels,
                .first_token = panel ? panel_start(l, panel) * LANES : 0,
                .end_token = is_last ? l->n_tokens : panel_start(l, panel + n_panels) * LANES};
}

/* Computes an item; false if memory runs out. The last strip starts early enough to be whole, so that some outputs
 * are computed twice, to the same bits. */
static bool do_part(const Product *l, size_t item) {
  const Part part = part_of(l, item);
  const size_t n_few = part.end_token == l->n_tokens ? l->n_few : 0; /* 0 with tiles */
  const float *columns[PANELS];
  for (size_t i = 0; i < part.n_panels; i++) {
    columns[i] = columns_of(l, part.panel + i);
    if (!columns[i]) return false;
  }
  if (!part.n_panels) {
    for (size_t out = part.start; out < part.end; out += FEW_BLOCK)
      few(l, least(out, part.end - FEW_OUTPUTS), least(out + FEW_BLOCK, part.end), true);
    return true;
  }
#if TILES
  if (has_tiles) {
    take_tiles();
    for (size_t out = part.start, n_strips; out < part.end; out += n_strips * STRIP) {
      n_strips = part.end - out < 2 * STRIP ? 1 : 2;
      const size_t here = least(out, part.end - n_strips * STRIP);
      for (size_t i = 0; i < part.n_panels; i++) tile_strips(l, here, n_strips, part.panel + i, columns[i]);
    }
    release_tiles();
    return true;
  }
#endif
  for (size_t out = part.start; out < part.end; out += STRIP) {
    const size_t here = least(out, part.end - STRIP);
    for (size_t i = 0; i < part.n_panels; i++) strip(l, here, part.panel + i, columns[i]);
    if (n_few) few(l, here, here + STRIP, false);
  }
  return true;
}

/* Elements that `take_x` needs in `widened`: the few tokens as float32. */
static inline size_t n_widened(size_t n_tokens, size_t n_in) {
  return X_BITS == 16 && !PAIRS ? few_of(n_tokens) * n_in : 0;
}

/* A number of chunks near `wanted`, at most `most`, with which the items of all groups are a multiple of `n_threads`:
 * otherwise threads would wait for the last item. `wanted` if there is none. */
static inline size_t whole_rounds(size_t n_groups, size_t wanted, size_t most, size_t n_threads) {
  for (size_t i = 0; i < n_threads; i++) {
    if (wanted + i <= most && n_groups * (wanted + i) % n_threads == 0) return wanted + i;
    if (wanted > i && n_groups * (wanted - i) % n_threads == 0) return wanted - i;
  }
  return wanted;
}

/* Cuts a product, whose sizes are set, into about `n_wanted` items for `n_threads`. Returns the number of items. */
static inline size_t cut(Product *l, size_t n_wanted, size_t n_threads) {
  l->number = atomic_fetch_add(&n_products, 1) + 1;
  l->n_few = few_of(l->n_tokens);
  l->n_panels = ((n_paneled(l) + LANES - 1) / LANES + MOST_VECTORS - 1) / MOST_VECTORS;
  l->at_once = PANELS * MOST_VECTORS * LANES * l->n_in * sizeof(factor_type) <= BYTES_OF_PANELS ? PANELS : 1;
  const size_t n_groups = l->n_panels ? (l->n_panels + l->at_once - 1) / l->at_once : 1;
  const size_t most = l->n_out < CHUNK ? 1 : l->n_out / CHUNK;
  l->n_chunks = whole_rounds(n_groups, least(most, (n_wanted + n_groups - 1) / n_groups), most, n_threads);
  return n_groups * l->n_chunks;
}

/* Widens the few tokens of x. Called once x is complete, before the first item. */
static inline void take_x(Product *l, float *widened) {
  const x_type *x = l->x + n_paneled(l) * l->n_in;
#if X_BITS == 32 || PAIRS
  l->few_x = x;
#else
  l->few_x = widened;
  for (size_t i = 0; i < l->n_few * l->n_in; i += LANES) store(widened + i, load(x + i));
#endif
}

/* The number of threads that the product is worth. */
static inline double threads_worth(const Product *l) {
  const double n_weights = (double)l->n_in * l->n_out;
  const double by_bytes = n_weights * sizeof(weight_type) / BYTES_WORTH_A_THREAD;
  const double by_products = n_weights * l->n_tokens / PRODUCTS_WORTH_A_THREAD;
  return by_bytes > by_products ? by_bytes : by_products;
}

#endif

/* A matrix product, cut into items for threads (product_form.h).
 *
 * FEW tokens or less are a few (few_tokens.h), more are in panels (token_panel.h). The last REST tokens or less, which
 * would fill no vector of a panel, are again few. A token's result depends on whether it is one of a few, and on nothing
 * else of its batch.
 *
 * I is a multiple of 16, and O is at least 16.
 */

#ifndef ORCA_PRODUCT_H
#define ORCA_PRODUCT_H

#include "few_tokens.h"
#include "token_panel.h"
#include "xla_call.h"

#define CHUNK 96 /* outputs of an item, at least: whole strips */

/* Bytes of the columns of an item's panels, at most, if there are several: the second cache keeps them. */
#define BYTES_OF_PANELS (1 << 18)

/* Items for each thread, so that none waits long for another. */
#define ITEMS 8

/* What a core does in the time that starting a thread takes: bytes of weights read, multiplications. */
#define BYTES_WORTH_A_THREAD (1 << 18)
#define PRODUCTS_WORTH_A_THREAD (1 << 20)

static atomic_ulong n_products;

/* What an item computes: outputs from `start` to before `end`, of the tokens of panels and, with the last of
 * these, of the few. */
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

/* Computes an item. The last strip starts early enough to be whole, and so computes some outputs twice. False if
 * memory runs out. */
static bool do_part(const Product *l, size_t item) {
  const Part part = part_of(l, item);
  const size_t n_few = part.end_token == l->n_tokens ? l->n_few : 0;
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
  for (size_t out = part.start; out < part.end; out += STRIP) {
    const size_t here = least(out, part.end - STRIP);
    for (size_t i = 0; i < part.n_panels; i++) strip(l, here, part.panel + i, columns[i]);
    if (n_few) few(l, here, here + STRIP, false);
  }
  return true;
}

/* Elements of `widened` that `take_x` needs: room for the few tokens as float32. */
static inline size_t n_widened(size_t n_tokens, size_t n_in) {
  return X_BITS == 16 && !PAIRS ? few_of(n_tokens) * n_in : 0;
}

/* About `wanted` chunks, at most `most`, so that all groups' are a multiple of `n_threads`: else threads would wait for
 * the last one. `wanted` if that cannot be. */
static inline size_t whole_rounds(size_t n_groups, size_t wanted, size_t most, size_t n_threads) {
  for (size_t i = 0; i < n_threads; i++) {
    if (wanted + i <= most && n_groups * (wanted + i) % n_threads == 0) return wanted + i;
    if (wanted > i && n_groups * (wanted - i) % n_threads == 0) return wanted - i;
  }
  return wanted;
}

/* Cuts a product whose sizes are set into about `n_wanted` items for `n_threads`. Returns their number. */
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

/* Takes the x that is there now, before the first item. */
static inline void take_x(Product *l, float *widened) {
  const x_type *x = l->x + n_paneled(l) * l->n_in;
#if X_BITS == 32 || PAIRS
  l->few_x = x;
#else
  l->few_x = widened;
  for (size_t i = 0; i < l->n_few * l->n_in; i += LANES) store(widened + i, load(x + i));
#endif
}

/* How many threads it is worth. */
static inline double threads_worth(const Product *l) {
  const double n_weights = (double)l->n_in * l->n_out;
  const double by_bytes = n_weights * sizeof(weight_type) / BYTES_WORTH_A_THREAD;
  const double by_products = n_weights * l->n_tokens / PRODUCTS_WORTH_A_THREAD;
  return by_bytes > by_products ? by_bytes : by_products;
}

#endif

/* The product y [T, O] = x [T, I] times a packed weight [O, I] (packed_panel.h).
 *
 * LANES outputs at a time, one a lane, the weight is unpacked to a panel in the first cache, by which all tokens of an
 * item are multiplied: in integers, with x rounded to int8 (packed_integers.h), or FP8 in bfloat16 where the processor
 * can (packed_pairs.h), else in float32 (packed_floats.h). Sums have one order, but with FP8 and BY_ROWS one token alone
 * another; so a token's result depends on nothing else in the batch, and on no thread.
 *
 * I is a multiple of RUN, or of SUPER with super scales, and O is at least LANES.
 */

#ifndef ORCA_PACKED_PRODUCT_H
#define ORCA_PACKED_PRODUCT_H

#include "packed_panel.h"
#include "xla_call.h"

#ifndef X_BITS
#define X_BITS 32
#endif
typedef ELEMENT(X_BITS) x_type;

INLINE ivec larger_ints(ivec a, ivec b) {
#if LANES == 16
  return (ivec)_mm512_max_epi32((__m512i)a, (__m512i)b);
#else
  return (ivec)_mm256_max_epi32((__m256i)a, (__m256i)b);
#endif
}

/* The greatest magnitude of n numbers, a multiple of LANES. By their bits, so that a NaN is greater than all. */
INLINE float greatest(const x_type *x, size_t n) {
  ivec most = all_ints(0);
  for (size_t i = 0; i < n; i += LANES) most = larger_ints(most, (ivec)load(x + i) & INT32_MAX);
  int32_t lanes[LANES], top = 0;
  memcpy(lanes, &most, sizeof lanes);
  for (int i = 0; i < LANES; i++) top = lanes[i] > top ? lanes[i] : top;
  float value;
  memcpy(&value, &top, sizeof value);
  return value;
}

#if PAIRS
#include "packed_pairs.h"
#elif FLOATS
#include "packed_floats.h"
#else
#include "packed_integers.h"
#endif

#define WIDTH (STRIPS * LANES) /* outputs that are computed together */

/* The most tokens of an item, a multiple of AT_ONCE, so that their sums, or with FP8 their x, stay in a cache. */
#ifndef ITEM_TOKENS
#define ITEM_TOKENS (FLOATS ? 192 : 264)
#endif

#define CHUNK 64 /* the least outputs of an item */
#define ITEMS 8  /* items per thread, so that no thread waits long for another */

/* Work below which another thread costs more than it saves: bytes of codes, and multiply-adds. */
#define BYTES_WORTH_A_THREAD (1 << 17)
#define PRODUCTS_WORTH_A_THREAD (1 << 21)

typedef struct {
  const x_type *x;
  Planes weight;
  x_type *y;
  Run *runs; /* [T / AT_ONCE][I / RUN][AT_ONCE]; the last group has the tokens that are left */
  size_t n_tokens, n_in, n_out;
  size_t n_chunks; /* items that share a group of tokens */
  size_t item_tokens; /* of an item, but the last of a chunk; a multiple of AT_ONCE */
  size_t n_taking; /* the first items, which take x */
  atomic_size_t taken; /* how many of them are done */
} Product;

static inline size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* The planes of a weight with n_in inputs, which are arguments from number *next on. */
static inline Planes planes_of(const XLA_FFI_CallFrame *frame, int *next, size_t n_in) {
  Planes planes = {.n_in = n_in};
  planes.codes = argument(frame, (*next)++)->data;
  if (HIGH) planes.high = argument(frame, (*next)++)->data;
  const XLA_FFI_Buffer *scales = argument(frame, (*next)++);
  planes.scales = scales->data;
  planes.n_scales = scales->dims[scales->rank - 1];
  if (SCALE == SIX_BITS || SCALE == Q6_K) planes.super_scales = argument(frame, (*next)++)->data;
  if (SCALE == SIX_BITS) planes.super_mins = argument(frame, (*next)++)->data;
  else if (MINIMA == MINS) planes.mins = argument(frame, (*next)++)->data;
  if (MINIMA == ZEROS) planes.zeros = argument(frame, (*next)++)->data;
  return planes;
}

/* The planes of weight `i` of several, each with n_out rows. */
static inline Planes nth_weight(const Planes *all, size_t i, size_t n_out) {
  const size_t first = i * n_out, n_in = all->n_in, n_super = n_in / SUPER;
  const size_t of_scales = SCALE == SIX_BITS ? n_super * 12 : SCALE == Q6_K ? n_in / 16 : all->n_scales * SCALE_BYTES;
  Planes one = *all;
  one.codes += first * (n_in * CODE / 8);
  one.scales += first * of_scales;
  if (HIGH) one.high += first * (n_in * HIGH / 8);
  if (one.super_scales) one.super_scales += first * n_super * 2;
  if (one.super_mins) one.super_mins += first * n_super * 2;
  if (one.mins) one.mins += first * of_scales;
  if (one.zeros) one.zeros += first * all->n_scales;
  return one;
}

/* ---- x ---- */

static inline Run *runs_of(const Product *p, size_t token) {
  return p->runs + token / AT_ONCE * AT_ONCE * (p->n_in / RUN);
}

/* Takes x of the tokens of a group of AT_ONCE. */
static void take_group(const Product *p, size_t group) {
  const size_t first = group * AT_ONCE, n = least(AT_ONCE, p->n_tokens - first);
  for (size_t t = 0; t < n; t++)
    take_token(p->x + (first + t) * p->n_in, p->n_in / RUN, n, p->n_tokens == 1, runs_of(p, first) + t);
}

/* ---- products ---- */

#define MULTIPLY(N)                                                                                              \
  static __attribute__((noinline)) void multiply_##N(const Panel *panel, const Run *runs, size_t n, vec *sums) { \
    multiply(panel, runs, n, sums, N);                                                                           \
  }
MULTIPLY(1) MULTIPLY(2) MULTIPLY(3) MULTIPLY(4)
#if AT_ONCE > 4
MULTIPLY(5) MULTIPLY(6)
#endif
#if AT_ONCE > 6
MULTIPLY(7) MULTIPLY(8) MULTIPLY(9) MULTIPLY(10) MULTIPLY(11) MULTIPLY(12)
#endif

static void (*const multiply_by[])(const Panel *, const Run *, size_t, vec *) = {
    NULL, multiply_1, multiply_2, multiply_3, multiply_4,
#if AT_ONCE > 4
    multiply_5, multiply_6,
#endif
#if AT_ONCE > 6
    multiply_7, multiply_8, multiply_9, multiply_10, multiply_11, multiply_12,
#endif
};

/* Computes outputs [out, out + WIDTH) of tokens [first, end); `first` starts a group. A vector of outputs that would
 * end after the last starts earlier, so that some are computed twice, to the same bits. */
static void strip(const Product *p, size_t out, size_t first, size_t end) {
  const size_t n_runs = p->n_in / RUN;
  vec sums[ITEM_TOKENS * STRIPS] __attribute__((aligned(64)));
  Panel panels[STRIPS];
  size_t outs[STRIPS];
  for (int i = 0; i < STRIPS; i++) outs[i] = least(out + i * LANES, p->n_out - LANES);
  const bool by_rows = BY_ROWS && p->n_tokens == 1;
  memset(sums, 0, (end - first) * STRIPS * sizeof *sums);
  for (size_t k = 0, n; k < p->n_in; k += n) {
    n = least(FLOATS && !by_rows ? FLOAT_INPUTS : PANEL_INPUTS, p->n_in - k);
    for (int i = 0; i < STRIPS; i++) unpack_scales(&p->weight, outs[i], k, n, panels + i);
#if BY_ROWS
    if (by_rows) {
      for (int i = 0; i < STRIPS; i++)
        multiply_rows(&p->weight, outs[i], k, n, panels + i, p->runs + k / RUN, sums + i);
      continue;
    }
#endif
    for (int i = 0; i < STRIPS; i++) unpack_codes(&p->weight, outs[i], k, n, panels + i);
    for (size_t token = first, some; token < end; token += some) {
      some = least(AT_ONCE, end - token);
      if (k + n == p->n_in) /* y is in no near cache, and stores would wait for it */
        for (size_t t = token; t < token + some; t++)
          for (int i = 0; i < STRIPS; i++) __builtin_prefetch(p->y + t * p->n_out + outs[i], 1, 2);
      multiply_by[some](panels, p->runs + token * n_runs + k / RUN * some, n / RUN, sums + (token - first) * STRIPS);
    }
  }
  for (size_t token = first, some; token < end; token += some) {
    some = least(AT_ONCE, end - token);
    for (size_t t = 0; t < some; t++)
      for (int i = 0; i < STRIPS; i++)
        store(p->y + (token + t) * p->n_out + outs[i],
              finished(sums[(token + t - first) * STRIPS + i], panels + i, p->runs + token * n_runs + t));
  }
}

/* ---- items ---- */

static inline size_t n_groups(size_t n_tokens) { return (n_tokens + AT_ONCE - 1) / AT_ONCE; }

/* Cuts a product, whose sizes are set, into about `n_wanted` items. Returns their number. */
static inline size_t cut(Product *p, size_t n_wanted) {
  const size_t n_equal = (p->n_tokens + ITEM_TOKENS - 1) / ITEM_TOKENS;
  p->item_tokens = n_groups((p->n_tokens + n_equal - 1) / n_equal) * AT_ONCE;
  const size_t n_items = (p->n_tokens + p->item_tokens - 1) / p->item_tokens;
  const size_t most = p->n_out < CHUNK ? 1 : p->n_out / CHUNK;
  p->n_chunks = least(most, (n_wanted + n_items - 1) / n_items);
  p->n_taking = n_groups(p->n_tokens);
  atomic_init(&p->taken, 0);
  return p->n_taking + n_items * p->n_chunks;
}

static void multiply_part(const Product *p, size_t item) {
  const size_t chunk = item % p->n_chunks, group = item / p->n_chunks, n_strips = p->n_out / WIDTH;
  const size_t start = n_strips * chunk / p->n_chunks * WIDTH;
  const size_t end = chunk + 1 < p->n_chunks ? n_strips * (chunk + 1) / p->n_chunks * WIDTH : p->n_out;
  for (size_t out = start; out < end; out += WIDTH)
    strip(p, out, group * p->item_tokens, least(p->n_tokens, (group + 1) * p->item_tokens));
}

static void do_part(Product *p, size_t item) {
  if (item < p->n_taking) {
    take_group(p, item);
    atomic_fetch_add(&p->taken, 1);
    return;
  }
  while (atomic_load(&p->taken) < p->n_taking) sched_yield(); /* other threads take the last groups */
#if FLOATS
  const unsigned mode = _mm_getcsr(); /* in XLA's threads subnormal numbers count as zero, which FP8's must not */
  _mm_setcsr(mode & ~(_MM_DENORMALS_ZERO_MASK | _MM_FLUSH_ZERO_MASK));
#endif
  multiply_part(p, item - p->n_taking);
#if FLOATS
  _mm_setcsr(mode);
#endif
}

/* The number of threads that the product is worth. */
static inline double threads_worth(const Product *p) {
  const double n_weights = (double)p->n_in * p->n_out;
  const double by_bytes = n_weights * (CODE + HIGH) / 8 / BYTES_WORTH_A_THREAD;
  const double by_products = n_weights * p->n_tokens / PRODUCTS_WORTH_A_THREAD;
  return by_bytes > by_products ? by_bytes : by_products;
}

#endif

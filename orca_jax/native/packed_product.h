/* The product y [T, O] = x [T, I] times a packed weight [O, I], in integers (packed_panel.h).
 *
 * Each run of 32 of a token's x is rounded to int8 with a scale of its own. LANES outputs at a time, one a lane, the
 * weight is unpacked to a panel in the first cache, which all tokens of an item are multiplied by. Integer products of
 * a run are exact; scaled, they are added up in float32, in the order of inputs. Every token takes this form, so its
 * result depends on nothing else in the batch, and on no thread.
 *
 * I is a multiple of RUN, or of SUPER with super scales, and O is at least LANES.
 */

#ifndef ORCA_PACKED_PRODUCT_H
#define ORCA_PACKED_PRODUCT_H

#include <float.h>

#include "packed_panel.h"
#include "xla_call.h"

#ifndef X_BITS
#define X_BITS 32
#endif
typedef ELEMENT(X_BITS) x_type;

/* Tokens whose sums stay in registers, with as many integer sums and the factors. */
#define AT_ONCE (LANES == 16 ? 12 : 4)

#ifndef ITEM_TOKENS
#define ITEM_TOKENS 252 /* the most tokens of an item, whose sums for LANES outputs stay in the first cache */
#endif

#define CHUNK 64 /* the least outputs of an item */
#define ITEMS 8  /* items per thread, so that no thread waits long for another */

/* Work below which another thread costs more than it saves: bytes of codes, and multiply-adds. */
#define BYTES_WORTH_A_THREAD (1 << 17)
#define PRODUCTS_WORTH_A_THREAD (1 << 21)

/* A token's run, rounded. `excess` is what the integer products of its halves have too much. */
typedef struct {
  int8_t rounded[RUN];
  float scale, sum;
  int32_t excess[2];
} Run;

typedef struct {
  const x_type *x;
  Planes weight;
  x_type *y;
  Run *runs; /* [T / AT_ONCE][I / RUN][AT_ONCE]; the last group has the tokens that are left */
  size_t n_tokens, n_in, n_out;
  size_t n_chunks; /* items that share a group of tokens */
  size_t n_groups;
  size_t n_rounding; /* the first items, which round x */
  atomic_size_t rounded; /* how many of them are done */
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

INLINE ivec larger_ints(ivec a, ivec b) {
#if LANES == 16
  return (ivec)_mm512_max_epi32((__m512i)a, (__m512i)b);
#else
  return (ivec)_mm256_max_epi32((__m256i)a, (__m256i)b);
#endif
}

INLINE float largest_lane(ivec v) {
  int32_t lanes[LANES], most = 0;
  memcpy(lanes, &v, sizeof lanes);
  for (int i = 0; i < LANES; i++) most = lanes[i] > most ? lanes[i] : most;
  float value;
  memcpy(&value, &most, sizeof value);
  return value;
}

/* Rounds to the nearest, ties to even. */
INLINE ivec rounded_ints(vec v) {
#if LANES == 16
  return (ivec)_mm512_cvtps_epi32((__m512)v);
#else
  return (ivec)_mm256_cvtps_epi32((__m256)v);
#endif
}

INLINE void store_bytes(int8_t *to, ivec v) {
#if LANES == 16
  _mm_storeu_si128((void *)to, _mm512_cvtsepi32_epi8((__m512i)v));
#else
  for (int i = 0; i < LANES; i++) to[i] = v[i];
#endif
}

INLINE int32_t sum_of_ints(ivec v) {
  int32_t lanes[LANES], total = 0;
  memcpy(lanes, &v, sizeof lanes);
  for (int i = 0; i < LANES; i++) total += lanes[i];
  return total;
}

/* Numbers as large as NaN or infinity give a scale that is neither, and so no token a wrong result without one. */
static void round_run(const x_type *x, Run *run) {
  const int n_parts = RUN / LANES;
  vec parts[RUN / LANES];
  ivec most = all_ints(0); /* as bits, where NaN is larger than all numbers */
  UNROLL for (int i = 0; i < n_parts; i++) {
    parts[i] = load(x + i * LANES);
    most = larger_ints(most, (ivec)parts[i] & INT32_MAX);
  }
  const float scale = largest_lane(most) / 127;
  const vec inverse = all(scale >= FLT_MIN ? 1 / scale : 0);
  run->scale = scale < FLT_MIN ? 0 : scale;
  int32_t sums[2] = {0, 0};
  UNROLL for (int i = 0; i < n_parts; i++) {
    const ivec ints = rounded_ints(parts[i] * inverse);
    store_bytes(run->rounded + i * LANES, ints);
    sums[i * 2 / n_parts] += sum_of_ints(ints);
  }
  run->sum = run->scale * (sums[0] + sums[1]);
  run->excess[0] = SCALED == RUN ? EXCESS * (sums[0] + sums[1]) : EXCESS * sums[0];
  run->excess[1] = EXCESS * sums[1];
}

/* Rounds x of the tokens of a group of AT_ONCE. */
static void round_group(const Product *p, size_t group) {
  const size_t first = group * AT_ONCE, n = least(AT_ONCE, p->n_tokens - first);
  for (size_t t = 0; t < n; t++) {
    Run *to = runs_of(p, first) + t;
    for (size_t run = 0; run < p->n_in / RUN; run++) round_run(p->x + (first + t) * p->n_in + run * RUN, to + run * n);
  }
}

/* ---- products ---- */

/* The sums of four products each of `codes` and x. */
INLINE ivec add_fours(ivec sums, ivec codes, ivec x) {
#if VNNI && LANES == 16
  return (ivec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, (__m512i)x);
#elif VNNI
  return (ivec)_mm256_dpbusd_epi32((__m256i)sums, (__m256i)codes, (__m256i)x);
#elif LANES == 16
  const __m512i pairs = SIGNED
      ? _mm512_maddubs_epi16(_mm512_abs_epi8((__m512i)codes),
                             _mm512_mask_sub_epi8((__m512i)x, _mm512_movepi8_mask((__m512i)codes),
                                                  _mm512_setzero_si512(), (__m512i)x))
      : _mm512_maddubs_epi16((__m512i)codes, (__m512i)x);
  return sums + (ivec)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#else
  const __m256i pairs = SIGNED ? _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)codes),
                                                      _mm256_sign_epi8((__m256i)x, (__m256i)codes))
                               : _mm256_maddubs_epi16((__m256i)codes, (__m256i)x);
  return sums + (ivec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
}

/* Adds a panel's n_runs runs to the sums of n tokens, a constant to the compiler. */
INLINE void multiply(const Panel *panel, const Run *runs, size_t n_runs, vec *sums, const int n) {
  vec totals[AT_ONCE];
  UNROLL for (int t = 0; t < n; t++) totals[t] = sums[t];
  for (size_t run = 0; run < n_runs; run++, runs += n) {
    UNROLL for (int part = 0; part < RUN / SCALED; part++) {
      const ivec *codes = panel->codes + (run * (RUN / SCALED) + part) * (SCALED / 4);
      ivec ints[AT_ONCE];
      UNROLL for (int t = 0; t < n; t++) ints[t] = all_ints(EXCESS ? -runs[t].excess[part] : 0);
      UNROLL for (int i = 0; i < SCALED / 4; i++) {
        const ivec four = codes[i];
        UNROLL for (int t = 0; t < n; t++) {
          int32_t x;
          memcpy(&x, runs[t].rounded + part * SCALED + 4 * i, sizeof x);
          ints[t] = add_fours(ints[t], four, all_ints(x));
        }
      }
      const vec scale = panel->scales[run * (RUN / SCALED) + part];
      UNROLL for (int t = 0; t < n; t++) totals[t] += as_floats(ints[t]) * (scale * all(runs[t].scale));
    }
#if HAS_MINS
    const vec mins = panel->mins[run];
    UNROLL for (int t = 0; t < n; t++) totals[t] += mins * all(runs[t].sum);
#endif
  }
  UNROLL for (int t = 0; t < n; t++) sums[t] = totals[t];
}

#define MULTIPLY(N)                                                                                              \
  static __attribute__((noinline)) void multiply_##N(const Panel *panel, const Run *runs, size_t n, vec *sums) { \
    multiply(panel, runs, n, sums, N);                                                                           \
  }
MULTIPLY(1) MULTIPLY(2) MULTIPLY(3) MULTIPLY(4)
#if AT_ONCE > 4
MULTIPLY(5) MULTIPLY(6) MULTIPLY(7) MULTIPLY(8) MULTIPLY(9) MULTIPLY(10) MULTIPLY(11) MULTIPLY(12)
#endif

static void (*const multiply_by[])(const Panel *, const Run *, size_t, vec *) = {
    NULL, multiply_1, multiply_2, multiply_3, multiply_4,
#if AT_ONCE > 4
    multiply_5, multiply_6, multiply_7, multiply_8, multiply_9, multiply_10, multiply_11, multiply_12,
#endif
};

/* Computes outputs [out, out + LANES) of tokens [first, end); `first` starts a group. */
static void strip(const Product *p, size_t out, size_t first, size_t end) {
  const size_t n_runs = p->n_in / RUN;
  vec sums[ITEM_TOKENS] __attribute__((aligned(64)));
  Panel panel;
  memset(sums, 0, (end - first) * sizeof *sums);
  for (size_t k = 0, n; k < p->n_in; k += n) {
    n = least(PANEL_INPUTS, p->n_in - k);
    unpack(&p->weight, out, k, n, &panel);
    for (size_t token = first, some; token < end; token += some) {
      some = least(AT_ONCE, end - token);
      multiply_by[some](&panel, p->runs + token * n_runs + k / RUN * some, n / RUN, sums + (token - first));
    }
  }
  for (size_t token = first; token < end; token++) store(p->y + token * p->n_out + out, sums[token - first]);
}

/* ---- items ---- */

static inline size_t n_groups(size_t n_tokens) { return (n_tokens + AT_ONCE - 1) / AT_ONCE; }

/* Cuts a product, whose sizes are set, into about `n_wanted` items. Returns their number. */
static inline size_t cut(Product *p, size_t n_wanted) {
  p->n_groups = (p->n_tokens + ITEM_TOKENS - 1) / ITEM_TOKENS;
  const size_t most = p->n_out < CHUNK ? 1 : p->n_out / CHUNK;
  p->n_chunks = least(most, (n_wanted + p->n_groups - 1) / p->n_groups);
  p->n_rounding = n_groups(p->n_tokens);
  atomic_init(&p->rounded, 0);
  return p->n_rounding + p->n_groups * p->n_chunks;
}

/* The last strip starts early enough to be whole, so that some outputs are computed twice, to the same bits. */
static void do_part(Product *p, size_t item) {
  if (item < p->n_rounding) {
    round_group(p, item);
    atomic_fetch_add(&p->rounded, 1);
    return;
  }
  item -= p->n_rounding;
  while (atomic_load(&p->rounded) < p->n_rounding) sched_yield(); /* other threads round the last groups */
  const size_t chunk = item % p->n_chunks, group = item / p->n_chunks, n_strips = p->n_out / LANES;
  const size_t start = n_strips * chunk / p->n_chunks * LANES;
  const size_t end = chunk + 1 < p->n_chunks ? n_strips * (chunk + 1) / p->n_chunks * LANES : p->n_out;
  for (size_t out = start; out < end; out += LANES)
    strip(p, least(out, end - LANES), group * ITEM_TOKENS, least(p->n_tokens, (group + 1) * ITEM_TOKENS));
}

/* The number of threads that the product is worth. */
static inline double threads_worth(const Product *p) {
  const double n_weights = (double)p->n_in * p->n_out;
  const double by_bytes = n_weights * (CODE + HIGH) / 8 / BYTES_WORTH_A_THREAD;
  const double by_products = n_weights * p->n_tokens / PRODUCTS_WORTH_A_THREAD;
  return by_bytes > by_products ? by_bytes : by_products;
}

#endif

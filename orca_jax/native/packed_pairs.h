/* The products of panels (packed_panel.h) of FP8 weights, e4m3, with x rounded to bfloat16, which holds each FP8 number
 * exactly. A NaN counts as 480.
 *
 * A lane takes two products at once. Of every four inputs the first and third are a pair, and the second and fourth, as
 * they lie in 32 bits. The products of runs that share a scale are added up first; scaled, they are added to the sums.
 *
 * One token alone takes codes from their rows, in which lanes have other inputs, so its sums have another order.
 */

#ifndef ORCA_PACKED_PAIRS_H
#define ORCA_PACKED_PAIRS_H

#include "packed_panel.h"

/* Tokens whose sums for STRIPS vectors of outputs stay in registers. */
#define AT_ONCE 12

/* Whether one token alone takes codes from their rows (multiply_rows): another order of sums, and no panel. */
#ifndef BY_ROWS
#define BY_ROWS 1
#endif

/* A token's run: the inputs of first pairs, then those of second pairs. */
typedef struct {
  bfloat16 x[RUN];
} Run;

INLINE __m512i bfloat16s_of(const float *x) {
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + LANES), _mm512_loadu_ps(x));
}
INLINE __m512i bfloat16s_in(const bfloat16 *x) { return _mm512_loadu_si512(x); }

/* Rounds a token's n_runs runs, and stores each `stride` runs after the one before it. */
static void take_token(const x_type *x, size_t n_runs, size_t stride, bool is_alone, Run *to) {
  (void)is_alone;
  const __m512i dwords_of_pairs = _mm512_set_epi32(0x1f001d, 0x1b0019, 0x170015, 0x130011, 0xf000d, 0xb0009, 0x70005,
                                                   0x30001, 0x1e001c, 0x1a0018, 0x160014, 0x120010, 0xe000c, 0xa0008,
                                                   0x60004, 0x20000);
  for (size_t run = 0; run < n_runs; run++, x += RUN, to += stride) {
    const __m512i in_order = _Generic(x, const float *: bfloat16s_of, const bfloat16 *: bfloat16s_in)(x);
    _mm512_storeu_si512(to->x, _mm512_permutexvar_epi16(dwords_of_pairs, in_order));
  }
}

INLINE vec add_pairs(vec sums, ivec weights, ivec x) {
  return (vec)_mm512_dpbf16_ps((__m512)sums, (__m512bh)weights, (__m512bh)x);
}

/* Pair i of a token's run, in all lanes. */
INLINE ivec pair_of(const Run *run, int i) {
  int32_t pair;
  memcpy(&pair, run->x + 2 * i, sizeof pair);
  return all_ints(pair);
}

/* Adds the first or second pairs of `runs` [n_runs][n] to the parts [n][STRIPS] of n tokens. */
INLINE void add_pairs_of_run(const Panel *panels, size_t run, const Run *x, int second, vec *parts, const int n) {
  _Pragma("GCC unroll 8") for (int i = 0; i < RUN / 4; i++) {
    ivec weights[STRIPS];
    UNROLL for (int s = 0; s < STRIPS; s++) weights[s] = panels[s].pairs[run * (RUN / 2) + 2 * i + second];
    UNROLL for (int t = 0; t < n; t++) {
      const ivec pair = pair_of(x + t, second * (RUN / 4) + i);
      UNROLL for (int s = 0; s < STRIPS; s++) parts[t * STRIPS + s] = add_pairs(parts[t * STRIPS + s], weights[s], pair);
    }
  }
}

/* Adds panels' n_runs runs to the sums of n tokens, a constant to the compiler: of the runs that share a scale first the
 * first pairs, then the second ones. Up to three tokens take both at once, since one sum's additions wait for one
 * another. */
INLINE void multiply(const Panel *panels, const Run *runs, size_t n_runs, vec *sums, const int n) {
  const int some = n <= 3 ? 2 : 1;
  for (size_t run = 0, end; run < n_runs; run = end) {
    end = n_runs - run > panels->runs_of_scale ? run + panels->runs_of_scale : n_runs;
    for (int second = 0; second < 2; second += some) {
      vec parts[AT_ONCE * STRIPS];
      UNROLL for (int i = 0; i < some * n * STRIPS; i++) parts[i] = all(0);
      for (size_t at = run; at < end; at++)
        UNROLL for (int r = 0; r < some; r++)
          add_pairs_of_run(panels, at, runs + at * n, second + r, parts + r * n * STRIPS, n);
      UNROLL for (int r = 0; r < some; r++)
        UNROLL for (int i = 0; i < n * STRIPS; i++) sums[i] += parts[r * n * STRIPS + i] * panels[i % STRIPS].scales[run];
    }
  }
}

#if BY_ROWS

#define ROWS 8 /* rows whose sums stay in registers: a vector has a run of one of them, and of the fourth after it */

/* Adds a run of ROWS rows, `stride` apart, to their parts of first and of second pairs. */
INLINE void add_run_of_rows(const uint8_t *codes, size_t stride, const Run *x, vec parts[ROWS / 2][2]) {
  const ivec first = (ivec)_mm512_broadcast_i64x4(_mm256_loadu_si256((const void *)x->x));
  const ivec second = (ivec)_mm512_broadcast_i64x4(_mm256_loadu_si256((const void *)(x->x + RUN / 2)));
  UNROLL for (int row = 0; row < ROWS / 2; row++) {
    const __m256i low = _mm256_loadu_si256((const void *)(codes + row * stride));
    const __m256i high = _mm256_loadu_si256((const void *)(codes + (row + ROWS / 2) * stride));
    ivec pairs[2];
    pairs_of((ivec)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1), pairs);
    parts[row][0] = add_pairs(parts[row][0], pairs[0], first);
    parts[row][1] = add_pairs(parts[row][1], pairs[1], second);
  }
}

/* Adds to one token's sums the products with inputs [k, k + n) of LANES rows. Of the panel only scales are there. */
static void multiply_rows(const Planes *from, size_t out, size_t k, size_t n, const Panel *panel, const Run *runs,
                          vec *sums) {
  const size_t n_runs = n / RUN;
  for (size_t row = 0; row < LANES; row += ROWS) {
    const uint8_t *codes = from->codes + (out + row) * from->n_in + k;
    vec8 totals[ROWS] = {{0}};
    for (size_t run = 0, end; run < n_runs; run = end) {
      const float *scales = (const float *)(panel->scales + run) + row;
      end = n_runs - run > panel->runs_of_scale ? run + panel->runs_of_scale : n_runs;
      vec parts[ROWS / 2][2] = {{{0}}};
      for (; run < end; run++) {
        if (run % 2 == 0)
          UNROLL for (int i = 0; i < ROWS; i++) __builtin_prefetch(codes + run * RUN + (ROWS + i) * from->n_in, 0, 2);
        add_run_of_rows(codes + run * RUN, from->n_in, runs + run, parts);
      }
      UNROLL for (int i = 0; i < ROWS / 2; i++) {
        const vec part = parts[i][0] + parts[i][1];
        vec8 halves[2];
        memcpy(halves, &part, sizeof halves);
        totals[i] += halves[0] * (vec8)_mm256_broadcast_ss(scales + i);
        totals[i + ROWS / 2] += halves[1] * (vec8)_mm256_broadcast_ss(scales + i + ROWS / 2);
      }
    }
    UNROLL for (int i = 0; i < ROWS; i += 4) *(vec4 *)((float *)sums + row + i) += sums_of_rows(totals + i);
  }
}

#endif

INLINE vec finished(vec sums, const Panel *panel, const Run *token) {
  (void)panel, (void)token;
  return sums;
}

#endif

/* The products of panels (packed_panel.h) of FP8 weights, e4m3, with x, in float32. A NaN counts as 480.
 *
 * A panel has scaled numbers. The products of its even runs of 32 are added up, then those of its odd runs, both in the
 * order of inputs, and then the panels.
 *
 * One token alone takes codes from their rows: first the products of every eighth four inputs are added up, then,
 * scaled, the runs. A code's bits, moved to where a float has them, are its number times 2^-120: a subnormal float, if
 * it is a subnormal number of FP8. So that no product is too small for a float, x is multiplied by a power of two.
 */

#ifndef ORCA_PACKED_FLOATS_H
#define ORCA_PACKED_FLOATS_H

#include "packed_panel.h"

/* Tokens whose sums for STRIPS vectors of outputs stay in registers. */
#define AT_ONCE (LANES == 16 ? 12 : 6)

/* Whether one token alone takes codes from their rows (multiply_rows): another order of sums, and no panel. */
#ifndef BY_ROWS
#define BY_ROWS 1
#endif

/* A token's run of x. For multiply_rows it is times 2^MOVED / `power`, a power of two that is near its greatest number,
 * and the first of every four numbers stand first, then the second. */
typedef struct {
  float x[RUN];
  float power;
} Run;

/* A power of two, from a float's biased exponent. */
INLINE float power_of_two(uint32_t exponent) {
  const uint32_t bits = exponent << 23;
  float power;
  memcpy(&power, &bits, sizeof power);
  return power;
}

/* Widens a token's n_runs runs, and stores each `stride` runs after the one before it. */
static void take_token(const x_type *x, size_t n_runs, size_t stride, bool is_alone, Run *to) {
  if (!BY_ROWS || !is_alone) {
    for (size_t run = 0; run < n_runs; run++, x += RUN, to += stride) {
      UNROLL for (int i = 0; i < RUN; i += LANES) store(to->x + i, load(x + i));
      to->power = 1;
    }
    return;
  }
  const float most = greatest(x, n_runs * RUN);
  uint32_t exponent;
  memcpy(&exponent, &most, sizeof exponent);
  exponent >>= 23;
  exponent = exponent < MOVED ? MOVED : exponent > 254 ? 254 : exponent; /* both powers are normal numbers */
  const float power = power_of_two(exponent), factor = power_of_two(2 * 127 + MOVED - exponent);
  for (size_t run = 0; run < n_runs; run++, x += RUN, to += stride) {
    float numbers[RUN];
    UNROLL for (int i = 0; i < RUN; i += LANES) store(numbers + i, load(x + i) * all(factor));
    for (int i = 0; i < RUN; i++) to->x[i % 4 * (RUN / 4) + i / 4] = numbers[i];
    to->power = power;
  }
}

/* Adds `some` runs of panels to the parts [some][n][STRIPS] of n tokens; both are constants to the compiler. */
INLINE void add_runs(const Panel *panels, size_t run, const Run *runs, vec *parts, const int some, const int n) {
  _Pragma("GCC unroll 4") for (int i = 0; i < RUN; i++) {
    UNROLL for (int r = 0; r < some; r++) {
      vec numbers[STRIPS];
      UNROLL for (int s = 0; s < STRIPS; s++) numbers[s] = kept(panels[s].numbers[(run + r) * RUN + i]);
      UNROLL for (int t = 0; t < n; t++) {
        const vec x = kept(all(runs[r * n + t].x[i]));
        UNROLL for (int s = 0; s < STRIPS; s++) parts[(r * n + t) * STRIPS + s] += numbers[s] * x;
      }
    }
  }
}

/* Adds panels' n_runs runs to the sums of n tokens, a constant to the compiler. Up to three tokens take an even and an
 * odd run at once, since one sum's additions wait for one another. */
INLINE void multiply(const Panel *panels, const Run *runs, size_t n_runs, vec *sums, const int n) {
  const int some = n <= 3 ? 2 : 1;
  for (int half = 0; half < 2; half += some) {
    vec parts[AT_ONCE * STRIPS];
    UNROLL for (int i = 0; i < some * n * STRIPS; i++) parts[i] = all(0);
    size_t run = half;
    for (; run + some <= n_runs; run += 2) add_runs(panels, run, runs + run * n, parts, some, n);
    if (some == 2 && run < n_runs) add_runs(panels, run, runs + run * n, parts, 1, n);
    UNROLL for (int r = 0; r < some; r++)
      UNROLL for (int i = 0; i < n * STRIPS; i++) sums[i] += parts[r * n * STRIPS + i];
  }
}

#if BY_ROWS

#define ROWS 4 /* rows whose sums stay in registers, with x of a run */

/* Adds a run of ROWS rows, `stride` apart, to their sums of lanes. A row's scale is LANES scales after that of the run
 * before it. */
INLINE void add_run_of_rows(const uint8_t *codes, size_t stride, const float *scales, const Run *x, vec8 *totals) {
  vec8 numbers[4];
  UNROLL for (int j = 0; j < 4; j++) numbers[j] = *(const vec8 *)(x->x + j * (RUN / 4));
  UNROLL for (int row = 0; row < ROWS; row++) {
    const __m256i run = _mm256_loadu_si256((const void *)(codes + row * stride));
    vec8 sum = {0};
    UNROLL for (int j = 0; j < 4; j++) {
      const __m256i moved = _mm256_srai_epi32(_mm256_slli_epi32(run, 24 - 8 * j), 4);
      sum += (vec8)_mm256_and_si256(moved, _mm256_set1_epi32((int32_t)0x87f00000)) * numbers[j];
    }
    totals[row] += sum * (vec8)_mm256_broadcast_ss(scales + row);
  }
}

/* Adds to one token's sums the products with inputs [k, k + n) of LANES rows. Of the panel only scales are there. */
static void multiply_rows(const Planes *from, size_t out, size_t k, size_t n, const Panel *panel, const Run *runs,
                          vec *sums) {
  for (size_t row = 0; row < LANES; row += ROWS) {
    const uint8_t *codes = from->codes + (out + row) * from->n_in + k;
    vec8 totals[ROWS] = {{0}};
    for (size_t run = 0; run < n / RUN; run++) {
      if (run % 2 == 0)
        UNROLL for (int i = 0; i < ROWS; i++) __builtin_prefetch(codes + run * RUN + (ROWS + i) * from->n_in, 0, 2);
      add_run_of_rows(codes + run * RUN, from->n_in, (const float *)(panel->scales + run) + row, runs + run, totals);
    }
    *(vec4 *)((float *)sums + row) += sums_of_rows(totals);
  }
}

#endif

INLINE vec finished(vec sums, const Panel *panel, const Run *token) {
  (void)panel;
  return sums * all(token->power);
}

#endif

/* The products of panels (packed_panel.h) of FP8 codes, e4m3, with x, in float32.
 *
 * A code's bits, moved to where a float has them, are its number times 2^-120: a subnormal float, if it is a subnormal
 * number of FP8. So that no product is too small for a float, x is multiplied by a power of two for each token. The
 * products of a run of 32 are added up, then, scaled, the runs, both in the order of inputs. A NaN counts as 480.
 */

#ifndef ORCA_PACKED_FLOATS_H
#define ORCA_PACKED_FLOATS_H

#include "packed_panel.h"

/* Vectors of outputs that are computed together, and tokens whose sums for them stay in registers. */
#define STRIPS (LANES == 16 ? 1 : 2)
#define AT_ONCE (12 / STRIPS)
#define BY_ROWS 0

#define MOVED 120 /* a code's bits are those of its number times 2^-MOVED */

/* A token's run of x, times 2^MOVED / `power`, a power of two that is near its greatest number. */
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
static void round_token(const x_type *x, size_t n_runs, size_t stride, Run *to) {
  const float most = greatest(x, n_runs * RUN);
  uint32_t exponent;
  memcpy(&exponent, &most, sizeof exponent);
  exponent >>= 23;
  exponent = exponent < MOVED ? MOVED : exponent > 254 ? 254 : exponent; /* both powers are normal numbers */
  const float power = power_of_two(exponent), factor = power_of_two(2 * 127 + MOVED - exponent);
  for (size_t run = 0; run < n_runs; run++, x += RUN, to += stride) {
    UNROLL for (int i = 0; i < RUN; i += LANES) store(to->x + i, load(x + i) * all(factor));
    to->power = power;
  }
}

/* Number j of four codes, times 2^-MOVED. */
INLINE vec number_of(ivec codes, int j) {
  return (vec)((codes << (24 - 8 * j)) >> 4 & (int32_t)0x87f00000);
}

/* Adds `some` runs of panels to the totals of n tokens; both are constants to the compiler. */
INLINE void add_runs(const Panel *panels, size_t run, const Run *runs, vec *totals, const int some, const int n) {
  vec parts[12];
  UNROLL for (int i = 0; i < some * n * STRIPS; i++) parts[i] = all(0);
  for (int i = 0; i < RUN / 4; i++) {
    UNROLL for (int r = 0; r < some; r++) {
      UNROLL for (int j = 0; j < 4; j++) {
        vec numbers[STRIPS];
        UNROLL for (int s = 0; s < STRIPS; s++) numbers[s] = number_of(panels[s].codes[(run + r) * (RUN / 4) + i], j);
        UNROLL for (int t = 0; t < n; t++) {
          const vec x = kept(all(runs[r * n + t].x[4 * i + j]));
          UNROLL for (int s = 0; s < STRIPS; s++) parts[(r * n + t) * STRIPS + s] += numbers[s] * x;
        }
      }
    }
  }
  UNROLL for (int r = 0; r < some; r++)
    UNROLL for (int t = 0; t < n; t++)
      UNROLL for (int s = 0; s < STRIPS; s++)
        totals[t * STRIPS + s] += parts[(r * n + t) * STRIPS + s] * panels[s].scales[run + r];
}

/* Adds panels' n_runs runs to the sums of n tokens, a constant to the compiler. Few tokens take several runs at once,
 * since one sum's additions wait for one another. */
INLINE void multiply(const Panel *panels, const Run *runs, size_t n_runs, vec *sums, const int n) {
  const int some = 4 / STRIPS / n > 1 ? 4 / STRIPS / n : 1;
  vec totals[12];
  UNROLL for (int i = 0; i < n * STRIPS; i++) totals[i] = sums[i];
  size_t run = 0;
  for (; run + some <= n_runs; run += some) add_runs(panels, run, runs + run * n, totals, some, n);
  if (some > 1)
    for (; run < n_runs; run++) add_runs(panels, run, runs + run * n, totals, 1, n);
  UNROLL for (int i = 0; i < n * STRIPS; i++) sums[i] = totals[i];
}

INLINE vec finished(vec sums, const Run *token) { return sums * all(token->power); }

#endif

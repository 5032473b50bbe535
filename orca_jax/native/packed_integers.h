/* The integer products of a panel (packed_panel.h) with x, of which each run of 32 is rounded to int8.
 *
 * A scale belongs to a run. Integer products of a run are exact; scaled, they are added up in float32, in the order of
 * inputs. With TOKEN_SCALE a scale belongs to all runs of a token, and a weight's to all inputs of a row: then the
 * integers of all runs are added up, and scaled once.
 */

#ifndef ORCA_PACKED_INTEGERS_H
#define ORCA_PACKED_INTEGERS_H

#include <float.h>

#include "packed_panel.h"

/* Tokens whose sums stay in registers, with as many integer sums and the factors. */
#define AT_ONCE (LANES == 16 ? 12 : 4)

/* Whether one token alone takes codes from their rows (multiply_rows). Codes of four or five bits gain nothing. */
#define BY_ROWS (CODE == 8 || HIGH == 2)

/* A token's run, rounded. `excess` is what the integer products of its halves have too much, or with TOKEN_SCALE in a
 * token's first run those of the whole token. */
typedef struct {
  int8_t rounded[RUN];
  float scale, sum;
  int32_t excess[2];
} Run;

/* ---- x ---- */

/* Rounds to the nearest, ties to even. */
INLINE ivec rounded_ints(vec v) {
#if LANES == 16
  return (ivec)_mm512_cvtps_epi32((__m512)v);
#else
  return (ivec)_mm256_cvtps_epi32((__m256)v);
#endif
}

/* Stores a run as bytes, and the sums of its halves. */
#if LANES == 16
INLINE void store_ints(int8_t *to, const ivec ints[2], int32_t sums[2]) {
  UNROLL for (int half = 0; half < 2; half++) {
    _mm_storeu_si128((void *)(to + half * LANES), _mm512_cvtsepi32_epi8((__m512i)ints[half]));
    int32_t lanes[LANES];
    memcpy(lanes, ints + half, sizeof lanes);
    sums[half] = 0;
    for (int i = 0; i < LANES; i++) sums[half] += lanes[i];
  }
}
#else
INLINE void store_ints(int8_t *to, const ivec ints[4], int32_t sums[2]) {
  const __m256i first = _mm256_packs_epi32((__m256i)ints[0], (__m256i)ints[1]);
  const __m256i second = _mm256_packs_epi32((__m256i)ints[2], (__m256i)ints[3]);
  const __m256i bytes = _mm256_packs_epi16(first, second);
  _mm256_storeu_si256((void *)to, _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
  const __m256i pairs = _mm256_hadd_epi32((__m256i)(ints[0] + ints[1]), (__m256i)(ints[2] + ints[3]));
  const __m128i fours = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
  const __m128i both = _mm_hadd_epi32(fours, fours);
  sums[0] = _mm_cvtsi128_si32(both);
  sums[1] = _mm_extract_epi32(both, 1);
}
#endif

/* Rounds a run whose scale is given. */
INLINE void round_run(const x_type *x, float scale, Run *run) {
  const vec inverse = all(scale >= FLT_MIN ? 1 / scale : 0);
  run->scale = scale < FLT_MIN ? 0 : scale;
  ivec ints[RUN / LANES];
  int32_t sums[2];
  UNROLL for (int i = 0; i < RUN / LANES; i++) ints[i] = rounded_ints(load(x + i * LANES) * inverse);
  store_ints(run->rounded, ints, sums);
  run->sum = run->scale * (sums[0] + sums[1]);
  run->excess[0] = SCALED == RUN ? EXCESS * (sums[0] + sums[1]) : EXCESS * sums[0];
  run->excess[1] = EXCESS * sums[1];
}

/* Rounds a token's n_runs runs, and stores each `stride` runs after the one before it. Numbers as large as NaN or
 * infinity give a scale that is neither, and so no token a wrong result without one. */
static void take_token(const x_type *x, size_t n_runs, size_t stride, bool is_alone, Run *to) {
  (void)is_alone;
  const float scale = TOKEN_SCALE ? greatest(x, n_runs * RUN) / 127 : 0;
  for (size_t run = 0; run < n_runs; run++, x += RUN, to += stride)
    round_run(x, TOKEN_SCALE ? scale : greatest(x, RUN) / 127, to);
#if TOKEN_SCALE
  Run *first = to - n_runs * stride;
  for (size_t run = 1; run < n_runs; run++) first->excess[0] += first[run * stride].excess[0];
#endif
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

#if TOKEN_SCALE

_Static_assert(!HAS_MINS && SCALED == RUN, "one scale a row");

/* Adds panels' n_runs runs to the sums [n][STRIPS] of n tokens, which are integers; n is a constant to the compiler. */
INLINE void multiply(const Panel *panels, const Run *runs, size_t n_runs, vec *sums, const int n) {
  ivec ints[AT_ONCE * STRIPS];
  UNROLL for (int i = 0; i < n * STRIPS; i++) ints[i] = (ivec)sums[i];
  for (size_t run = 0; run < n_runs; run++, runs += n)
    UNROLL for (int i = 0; i < RUN / 4; i++) {
      ivec fours[STRIPS];
      UNROLL for (int s = 0; s < STRIPS; s++) fours[s] = panels[s].codes[run * (RUN / 4) + i];
      UNROLL for (int t = 0; t < n; t++) {
        int32_t x;
        memcpy(&x, runs[t].rounded + 4 * i, sizeof x);
        UNROLL for (int s = 0; s < STRIPS; s++) {
          ivec *to = ints + t * STRIPS + s;
          *to = add_fours(*to, fours[s], all_ints(x));
        }
      }
    }
  UNROLL for (int i = 0; i < n * STRIPS; i++) sums[i] = (vec)ints[i];
}

/* Adds what a token's run gives, of which `ints` are the integer products, to the token's total. */
INLINE vec add_run(vec total, const Panel *panel, size_t run, const Run *x, const ivec *ints) {
  (void)panel, (void)run, (void)x;
  return (vec)((ivec)total + ints[0]);
}

/* The results of a token, whose first run is `token`, for LANES rows with the panel's scales. */
INLINE vec finished(vec sums, const Panel *panel, const Run *token) {
  return as_floats((ivec)sums - token->excess[0]) * (panel->scales[0] * all(token->scale));
}

#else

/* Adds what a token's run gives, of which `ints` are the integer products of its parts, to the token's total. */
INLINE vec add_run(vec total, const Panel *panel, size_t run, const Run *x, ivec *ints) {
  if (EXCESS) UNROLL for (int part = 0; part < RUN / SCALED; part++) ints[part] -= x->excess[part];
  UNROLL for (int part = 0; part < RUN / SCALED; part++)
    total += as_floats(ints[part]) * (panel->scales[run * (RUN / SCALED) + part] * all(x->scale));
#if HAS_MINS
  total += panel->mins[run] * all(x->sum);
#endif
  return total;
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

INLINE vec finished(vec sums, const Panel *panel, const Run *token) {
  (void)panel, (void)token;
  return sums;
}

#endif

/* ---- one token: codes are multiplied in their rows, and only the sums of a run change to lanes ---- */

#if BY_ROWS

/* The codes of a row's run: 32 bytes. */
#if CODE == 8
INLINE __m256i run_of_row(const uint8_t *codes, const uint8_t *high) {
  (void)high;
  const __m256i bytes = _mm256_loadu_si256((const void *)codes);
  return VNNI ? _mm256_xor_si256(bytes, _mm256_set1_epi8(-128)) : bytes;
}
#else
INLINE __m256i run_of_row(const uint8_t *codes, const uint8_t *high) {
  const __m128i nibbles = _mm_loadu_si128((const void *)codes);
  int64_t bits;
  memcpy(&bits, high, sizeof bits);
  const __m256i four = _mm256_set_m128i(_mm_srli_epi16(nibbles, 4), nibbles);
  const __m256i two = _mm256_srlv_epi64(_mm256_set1_epi64x(bits), _mm256_setr_epi64x(0, 2, 4, 6));
  return _mm256_or_si256(_mm256_and_si256(four, _mm256_set1_epi8(15)),
                         _mm256_slli_epi16(_mm256_and_si256(two, _mm256_set1_epi8(3)), 4));
}
#endif

#if LANES == 16
#define LOW_PAIRS _mm512_unpacklo_epi32
#define HIGH_PAIRS _mm512_unpackhi_epi32
#define LOW_FOURS _mm512_unpacklo_epi64
#define HIGH_FOURS _mm512_unpackhi_epi64
typedef __m512i wide;
#else
#define LOW_PAIRS _mm256_unpacklo_epi32
#define HIGH_PAIRS _mm256_unpackhi_epi32
#define LOW_FOURS _mm256_unpacklo_epi64
#define HIGH_FOURS _mm256_unpackhi_epi64
typedef __m256i wide;
#endif

/* Within each quarter or half of 128 bits: the sums of the four lanes of each of four vectors. */
INLINE wide sums_of_four(const ivec v[4]) {
  const wide a = (wide)v[0], b = (wide)v[1], c = (wide)v[2], d = (wide)v[3];
  const wide ab = (wide)((ivec)LOW_PAIRS(a, b) + (ivec)HIGH_PAIRS(a, b));
  const wide cd = (wide)((ivec)LOW_PAIRS(c, d) + (ivec)HIGH_PAIRS(c, d));
  return (wide)((ivec)LOW_FOURS(ab, cd) + (ivec)HIGH_FOURS(ab, cd));
}

/* The integer products of a run and LANES rows, one a lane, of the run's first half and of its second. */
INLINE void products_of_rows(const Planes *from, size_t out, size_t k, const Run *x, ivec halves[2]) {
  const size_t stride = from->n_in * CODE / 8, high_stride = from->n_in * HIGH / 8;
  const uint8_t *row = from->codes + out * stride + k * CODE / 8;
  const uint8_t *high = HIGH ? from->high + out * high_stride + k * HIGH / 8 : NULL;
  const bool is_line = k * CODE / 8 % 64 == 0, is_high_line = HIGH && k * HIGH / 8 % 64 == 0;
  const __m256i rounded = _mm256_loadu_si256((const void *)x->rounded);
  ivec sums[8];
  __m256i codes[LANES];
  UNROLL for (int i = 0; i < LANES; i++) {
    if (is_line) __builtin_prefetch(row + LANES * stride, 0, 2);
    if (is_high_line) __builtin_prefetch(high + LANES * high_stride, 0, 2);
    codes[i] = run_of_row(row, high);
#if LANES == 8
    sums[i] = add_fours(all_ints(0), (ivec)codes[i], (ivec)rounded);
#endif
    row = next_row(row, stride);
    if (HIGH) high = next_row(high, high_stride);
  }
#if LANES == 16
  /* Row i and row i + 4 in a vector. */
  UNROLL for (int i = 0; i < 8; i++) {
    const int at = i % 4 + i / 4 * 8;
    const __m512i two = _mm512_inserti64x4(_mm512_castsi256_si512(codes[at]), codes[at + 4], 1);
    sums[i] = add_fours(all_ints(0), (ivec)two, (ivec)_mm512_broadcast_i64x4(rounded));
  }
  const __m512i a = sums_of_four(sums), b = sums_of_four(sums + 4);
  halves[0] = (ivec)_mm512_shuffle_i32x4(a, b, 0x88);
  halves[1] = (ivec)_mm512_shuffle_i32x4(a, b, 0xdd);
#else
  const __m256i a = sums_of_four(sums), b = sums_of_four(sums + 4);
  halves[0] = (ivec)_mm256_permute2x128_si256(a, b, 0x20);
  halves[1] = (ivec)_mm256_permute2x128_si256(a, b, 0x31);
#endif
}

/* Adds to one token's sums what `multiply` would add for inputs [k, k + n), to the bit. Of the panel only scales and
 * minima are there. */
static void multiply_rows(const Planes *from, size_t out, size_t k, size_t n, const Panel *panel, const Run *runs,
                          vec *sums) {
  vec total = sums[0];
  for (size_t run = 0; run < n / RUN; run++) {
    ivec halves[2];
    products_of_rows(from, out, k + run * RUN, runs + run, halves);
    if (SCALED == RUN) halves[0] += halves[1];
    total = add_run(total, panel, run, runs + run, halves);
  }
  sums[0] = total;
}

#endif

#endif

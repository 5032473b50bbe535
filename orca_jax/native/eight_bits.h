/* Rounds a vector of floats to codes of eight bits with one scale, as in_eight_bits of model/kv_cache.py does, to the bit.
 *
 * The compiler sets CODE, INT8 or FP8 (e4m3). x_type is the elements' type, float or bfloat16.
 */

#ifndef ORCA_EIGHT_BITS_H
#define ORCA_EIGHT_BITS_H

#include "vectors.h"

#define INT8 1
#define FP8 2

#if CODE == FP8
typedef fp8 code_type;
#define GREATEST 448 /* the greatest number of a code */
#else
typedef int8 code_type;
#define GREATEST 127
#endif

#define LEAST_SCALE 0x1p-100f /* below it, elements count as 0: their scale's inverse would overflow */

/* Rounds to whole numbers, ties to even. Adding 1.5 * 2^23 would do, if the compiler did not fuse it with a product. */
INLINE ivec nearest(vec v) {
#if LANES == 16 && defined(__AVX512F__)
  return (ivec)_mm512_cvtps_epi32((__m512)v);
#elif LANES == 8
  return (ivec)_mm256_cvtps_epi32((__m256)v);
#else
  __m256 parts[2];
  memcpy(parts, &v, sizeof parts);
  const __m256i rounded[2] = {_mm256_cvtps_epi32(parts[0]), _mm256_cvtps_epi32(parts[1])};
  ivec whole;
  memcpy(&whole, rounded, sizeof whole);
  return whole;
#endif
}

/* Codes, in the low bits, of numbers up to GREATEST; of a NaN any. */
INLINE ivec coded(vec v) {
#if CODE == FP8
  const ivec bits = (ivec)v, magnitude = bits & INT32_MAX;
  /* Down to 2^-6 the exponent's bias changes from 127 to 7, and 20 bits of mantissa are rounded off; numbers below are
   * multiples of 2^-9. */
  const ivec normal = ((magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20) - (120 << 3);
  const ivec small = nearest((vec)magnitude * all(512));
  const ivec is_small = (vec)magnitude < all(0x1p-6f);
  return (small & is_small) | (normal & ~is_small) | ((bits >> 24) & 0x80);
#else
  return nearest(v);
#endif
}

/* Rounds `size` elements, a multiple of LANES, and returns their scale. */
static inline float round_to_eight_bits(const x_type *from, size_t size, code_type *to) {
  ivec most = (ivec)all(0); /* the greatest magnitude, by its bits, so that a NaN is the greatest of all */
  for (size_t i = 0; i < size; i += LANES) {
    const ivec magnitude = (ivec)load(from + i) & INT32_MAX, is_larger = magnitude > most;
    most = (magnitude & is_larger) | (most & ~is_larger);
  }
  int32_t top = 0;
  for (int i = 0; i < LANES; i++) top = most[i] > top ? most[i] : top;
  float scale;
  memcpy(&scale, &top, sizeof scale);
  scale *= (float)(1.0 / GREATEST);
  const vec inverse = all(scale >= LEAST_SCALE ? 1 / scale : 0);
  for (size_t i = 0; i < size; i += LANES)
    *(bvec *)(to + i) = __builtin_convertvector(coded(load(from + i) * inverse), bvec);
  return scale;
}

#endif

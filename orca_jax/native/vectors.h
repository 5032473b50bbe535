/* Vectors of LANES floats, as GCC and clang write them. */

#ifndef ORCA_VECTORS_H
#define ORCA_VECTORS_H

#ifndef __AVX512F__
#error "there is a form for AVX-512 only" /* what compilers make of vectors wider than registers is slower than XLA */
#endif

#include <stdint.h>
#include <string.h>

#define LANES 16

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef float vec8 __attribute__((vector_size(32), aligned(4)));
typedef float vec4 __attribute__((vector_size(16), aligned(4)));

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

/* Lanes of two vectors by number, the second's from LANES on. */
#if defined(__clang__) || __GNUC__ >= 12
#define LANES_OF(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define LANES_OF(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif

INLINE vec load(const float *from) { return *(const vec *)from; }
INLINE void store(float *to, vec v) { *(vec *)to = v; }

INLINE vec all(float x) { return (vec){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

INLINE void store4(float *to, vec4 v) { *(vec4 *)to = v; }

/* The sum of sixteen lanes, by halves. */
INLINE vec4 folded(vec v) {
  vec8 eight[2];
  memcpy(eight, &v, sizeof eight);
  eight[0] += eight[1];
  vec4 four[2];
  memcpy(four, eight, sizeof four);
  return four[0] + four[1];
}

INLINE float sum(vec v) {
  const vec4 four = folded(v);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

/* The sums of four vectors: within each quarter first, two lanes at a time. */
INLINE vec4 sum4(vec a, vec b, vec c, vec d) {
  const vec ab = LANES_OF(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
                 LANES_OF(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  const vec cd = LANES_OF(c, d, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
                 LANES_OF(c, d, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  return folded(LANES_OF(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                LANES_OF(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
}

/* Rows become columns. */
INLINE void transpose(vec tile[LANES]) {
  UNROLL for (int round = 0; round < 4; round++) { /* each puts rows i and i + 8 together */
    vec mixed[LANES];
    UNROLL for (int i = 0; i < LANES / 2; i++) {
      vec a = tile[i], b = tile[i + LANES / 2];
      mixed[2 * i] = LANES_OF(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      mixed[2 * i + 1] = LANES_OF(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
    UNROLL for (int i = 0; i < LANES; i++) tile[i] = mixed[i];
  }
}

#endif

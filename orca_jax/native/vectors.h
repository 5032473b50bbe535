/* Vectors of LANES floats, in the vector extensions of GCC and clang.
 *
 * LANES fits the registers: 16 with AVX-512, 8 with AVX2. Setting another LANES gives the same results, so that
 * either form can be tested on either processor, but vectors wider than the registers are far slower than XLA.
 */

#ifndef ORCA_VECTORS_H
#define ORCA_VECTORS_H

#if !defined(__AVX512F__) && !(defined(__AVX2__) && defined(__FMA__))
#error "the native code needs a processor with AVX-512, or with AVX2 and FMA"
#endif

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#ifndef LANES
#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#endif

typedef uint16_t bfloat16; /* the upper half of a float */
typedef int8_t int8;
typedef uint8_t fp8; /* e4m3: a sign, 4 bits of exponent, 3 of mantissa */

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef bfloat16 hvec __attribute__((vector_size(2 * LANES), aligned(2)));
typedef int8 bvec __attribute__((vector_size(LANES), aligned(1)));
typedef float vec8 __attribute__((vector_size(32), aligned(4)));
typedef float vec4 __attribute__((vector_size(16), aligned(4)));

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

/* The element type of 8, 16 or 32 bits. */
#define ELEMENT(bits) ELEMENT_OF(bits)
#define ELEMENT_OF(bits) ELEMENT_##bits
#define ELEMENT_8 int8
#define ELEMENT_16 bfloat16
#define ELEMENT_32 float

/* Lanes of two vectors by number; the second vector's start at LANES. */
#if defined(__clang__) || __GNUC__ >= 12
#define LANES_OF(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define LANES_OF(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif

INLINE vec all(float x) {
#if LANES == 16
  return (vec){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
#else
  return (vec){x, x, x, x, x, x, x, x};
#endif
}

/* 0, 1, 2, ... */
INLINE vec counted(void) {
#if LANES == 16
  return (vec){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
  return (vec){0, 1, 2, 3, 4, 5, 6, 7};
#endif
}

INLINE vec choose(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }

/* The larger of a and b; b if either is NaN. */
INLINE vec larger(vec a, vec b) {
#if LANES == 16 && defined(__AVX512F__)
  return (vec)_mm512_max_ps((__m512)a, (__m512)b); /* one instruction, which GCC does not find by itself */
#elif LANES == 8
  return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return choose(a > b, a, b);
#endif
}

/* ---- loads and stores: bfloat16 is widened exactly, and rounded to nearest, ties to even ---- */

INLINE vec load_float(const float *from) { return *(const vec *)from; }
INLINE vec load_bfloat16(const bfloat16 *from) {
#if LANES == 16 && defined(__AVX512F__)
  const uvec wide = (uvec)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)from));
#elif LANES == 8
  const uvec wide = (uvec)_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)from));
#else
  const uvec wide = __builtin_convertvector(*(const hvec *)from, uvec);
#endif
  return (vec)(wide << 16);
}

INLINE vec load_int8(const int8 *from) {
#if LANES == 16 && defined(__AVX512F__)
  return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)from)));
#elif LANES == 8
  return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)from)));
#else
  return __builtin_convertvector(*(const bvec *)from, vec);
#endif
}

/* 1 / FP8_UNIT of the numbers: a code's bits, with the sign apart, are those of a half float with a larger bias. */
#define FP8_UNIT 256.0f
INLINE vec load_fp8(const fp8 *from) {
#if LANES == 16
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)from));
  const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((short)0xbfff));
#ifdef __AVX512F__
  return (vec)_mm512_cvtph_ps(halves);
#else
  const __m256 parts[2] = {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
                           _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
  vec v;
  memcpy(&v, parts, sizeof v);
  return v;
#endif
#else
  const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const void *)from));
  return (vec)_mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16((short)0xbfff)));
#endif
}

INLINE bfloat16 narrowed(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
}

INLINE void store_float(float *to, vec v) { *(vec *)to = v; }
INLINE void store_bfloat16(bfloat16 *to, vec v) {
#if LANES == 16 && defined(__AVX512BF16__)
  _mm256_storeu_si256((void *)to, (__m256i)_mm512_cvtneps_pbh((__m512)v)); /* as below, but for subnormal numbers: 0 */
#else
  const uvec bits = (uvec)v, nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const uvec is_number = (uvec)(v == v);
  *(hvec *)to = __builtin_convertvector((nearest & is_number) | (0x7fc0 & ~is_number), hvec);
#endif
}

INLINE void store4_float(float *to, vec4 v) { *(vec4 *)to = v; }
INLINE void store4_bfloat16(bfloat16 *to, vec4 v) {
  for (int i = 0; i < 4; i++) to[i] = narrowed(v[i]);
}

#define load(from) \
  _Generic(*(from), float: load_float, bfloat16: load_bfloat16, int8: load_int8, fp8: load_fp8)(from)
#define store(to, v) _Generic(*(to), float: store_float, bfloat16: store_bfloat16)(to, v)
#define store4(to, v) _Generic(*(to), float: store4_float, bfloat16: store4_bfloat16)(to, v)

INLINE vec reversed(vec v) {
#if LANES == 16
  return LANES_OF(v, v, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
#else
  return LANES_OF(v, v, 7, 6, 5, 4, 3, 2, 1, 0);
#endif
}

/* v, kept in a register. Short of registers, GCC would otherwise load v again at each use, and loads limit AVX2,
 * whose multiply-adds cannot broadcast from memory. */
INLINE vec kept(vec v) {
#if LANES == 8
  __asm__("" : "+x"(v));
#endif
  return v;
}

/* ---- sums of lanes ---- */

/* Sums of the lanes that are a multiple of 4 apart: halves are added until 4 lanes are left. */
INLINE vec4 folded(vec v) {
#if LANES == 16
  vec8 halves[2], eight;
  memcpy(halves, &v, sizeof halves);
  eight = halves[0] + halves[1];
#else
  const vec8 eight = v;
#endif
  vec4 four[2];
  memcpy(four, &eight, sizeof four);
  return four[0] + four[1];
}

INLINE float sum(vec v) {
  const vec4 four = folded(v);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

/* The sums of four vectors. Lanes are added within quarters first, in pairs. */
INLINE vec4 sum4(vec a, vec b, vec c, vec d) {
#if LANES == 16
  const vec ab = LANES_OF(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
                 LANES_OF(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  const vec cd = LANES_OF(c, d, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
                 LANES_OF(c, d, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  return folded(LANES_OF(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                LANES_OF(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
#else
  const vec ab = LANES_OF(a, b, 0, 8, 1, 9, 4, 12, 5, 13) + LANES_OF(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
  const vec cd = LANES_OF(c, d, 0, 8, 1, 9, 4, 12, 5, 13) + LANES_OF(c, d, 2, 10, 3, 11, 6, 14, 7, 15);
  return folded(LANES_OF(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) + LANES_OF(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15));
#endif
}

#if LANES == 16 && defined(__AVX512F__)
/* Transposes a square of lanes: squares of 4 within quarters, then the quarters. These instructions need no table of
 * lanes in a register. */
INLINE void transpose(vec tile[LANES]) {
  __m512 pairs[LANES], fours[LANES];
  UNROLL for (int i = 0; i < LANES; i += 2) {
    pairs[i] = _mm512_unpacklo_ps((__m512)tile[i], (__m512)tile[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_ps((__m512)tile[i], (__m512)tile[i + 1]);
  }
  UNROLL for (int i = 0; i < LANES; i += 4)
    UNROLL for (int half = 0; half < 2; half++) {
      const __m512d a = (__m512d)pairs[i + half], b = (__m512d)pairs[i + 2 + half];
      fours[i + 2 * half] = (__m512)_mm512_unpacklo_pd(a, b);
      fours[i + 2 * half + 1] = (__m512)_mm512_unpackhi_pd(a, b);
    }
  UNROLL for (int i = 0; i < 4; i++) { /* fours[4 * r + i] has lanes i, 4 + i, 8 + i and 12 + i of rows 4 r to 4 r + 3 */
    const __m512 even[2] = {_mm512_shuffle_f32x4(fours[i], fours[4 + i], 0x88),
                            _mm512_shuffle_f32x4(fours[8 + i], fours[12 + i], 0x88)};
    const __m512 odd[2] = {_mm512_shuffle_f32x4(fours[i], fours[4 + i], 0xdd),
                           _mm512_shuffle_f32x4(fours[8 + i], fours[12 + i], 0xdd)};
    tile[i] = (vec)_mm512_shuffle_f32x4(even[0], even[1], 0x88);
    tile[4 + i] = (vec)_mm512_shuffle_f32x4(odd[0], odd[1], 0x88);
    tile[8 + i] = (vec)_mm512_shuffle_f32x4(even[0], even[1], 0xdd);
    tile[12 + i] = (vec)_mm512_shuffle_f32x4(odd[0], odd[1], 0xdd);
  }
}
#elif LANES == 8
/* Transposes a square of lanes: squares of 4 within halves, then the halves. */
INLINE void transpose(vec tile[LANES]) {
  __m256 pairs[LANES], fours[LANES];
  UNROLL for (int i = 0; i < LANES; i += 2) {
    pairs[i] = _mm256_unpacklo_ps((__m256)tile[i], (__m256)tile[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps((__m256)tile[i], (__m256)tile[i + 1]);
  }
  UNROLL for (int i = 0; i < LANES; i += 4)
    UNROLL for (int half = 0; half < 2; half++) {
      const __m256d a = (__m256d)pairs[i + half], b = (__m256d)pairs[i + 2 + half];
      fours[i + 2 * half] = (__m256)_mm256_unpacklo_pd(a, b);
      fours[i + 2 * half + 1] = (__m256)_mm256_unpackhi_pd(a, b);
    }
  UNROLL for (int i = 0; i < 4; i++) { /* fours[4 * r + i] has lanes i and 4 + i of rows 4 r to 4 r + 3 */
    tile[i] = (vec)_mm256_permute2f128_ps(fours[i], fours[4 + i], 0x20);
    tile[4 + i] = (vec)_mm256_permute2f128_ps(fours[i], fours[4 + i], 0x31);
  }
}
#else
/* Transposes a square of lanes. Each round interleaves rows i and i + LANES / 2. */
INLINE void transpose(vec tile[LANES]) {
  UNROLL for (int rows = 1; rows < LANES; rows *= 2) {
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

/* ---- functions ---- */

/* e^x for x <= 0, to about one unit in the last place; 0 where the result would be subnormal. */
INLINE vec exponential(vec x) {
  const vec least = all(-87.0f), shift = all(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
  const ivec kept = x > least;
  x = larger(x, least);
  const vec rounded = x * all(1.44269504f) + shift, n = rounded - shift;
  /* r = x - n ln 2, with ln 2 in two parts so that the difference is exact; then the Taylor series up to r^6. */
  const vec r = (x - n * all(0.693359375f)) + n * all(2.12194440e-4f);
  vec p = all(1.0f / 720);
  p = p * r + all(1.0f / 120);
  p = p * r + all(1.0f / 24);
  p = p * r + all(1.0f / 6);
  p = p * r + all(0.5f);
  p = p * r + all(1.0f);
  p = p * r + all(1.0f);
  const ivec exponent = ((ivec)rounded - (ivec)shift + 127) << 23;
  return choose(kept, p * (vec)exponent, all(0));
}

/* tanh x, with an error of about 1e-7. */
INLINE vec hyperbolic_tangent(vec x) {
  const ivec sign = (ivec)x & INT32_MIN;
  const vec e = exponential((vec)((ivec)(x + x) | INT32_MIN)); /* e^-2|x| */
  return (vec)((ivec)((all(1) - e) / (all(1) + e)) | sign);
}

#endif

/* A product's panel of tokens in tiles of AMX, where token_panel.h has vectors: a tile of 16 outputs and 32 terms of
 * each, read from the weight in place, times tiles of 32 terms of 16 tokens. A panel's columns, in which a lane has a
 * pair of terms, are such tiles as they are. All tokens are in panels, and a token's result depends on it alone.
 *
 * A process must ask Linux for the tiles' registers. If it may not have them, the product takes token_panel.h's form.
 */

#ifndef ORCA_TILE_PANEL_H
#define ORCA_TILE_PANEL_H

#include "token_panel.h"

#if TILES

#include <sys/syscall.h>

long syscall(long number, ...); /* of unistd.h, which standard C hides */

#define ASK_FOR_STATE 0x1023 /* arch_prctl's ARCH_REQ_XCOMP_PERM */
#ifndef STATE_OF_TILES       /* tests ask for a state that no process gets */
#define STATE_OF_TILES 18    /* XFEATURE_XTILEDATA */
#endif
#define TILE_TERMS 32 /* terms of a tile, in 64 bytes */

static bool has_tiles;

static __attribute__((constructor)) void ask_for_tiles(void) {
  has_tiles = !syscall(SYS_arch_prctl, ASK_FOR_STATE, STATE_OF_TILES);
}

/* GCC's instructions for tiles do not say which memory they read. */
#define WRITTEN(address) __asm__ volatile("" ::"r"(address) : "memory")

/* All eight tiles have 16 rows of 64 bytes. Until `release_tiles` this thread has more state to be saved. */
static inline void take_tiles(void) {
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } form = {.palette = 1};
  for (int i = 0; i < 8; i++) form.row_bytes[i] = 64, form.rows[i] = 16;
  WRITTEN(&form);
  _tile_loadconfig(&form);
}

static inline void release_tiles(void) { _tile_release(); }

/* Tiles 0 to 5 have sums, VECTOR of the first strip and SECOND of the second; tile 6 has weights, tile 7 tokens, which
 * are read once for both strips. Instructions take the numbers as constants. */
#define ADD_TILES(VECTOR, SECOND)                                       \
  if (vectors > VECTOR) {                                               \
    _tile_loadd(7, columns + VECTOR * LANES, vectors * 64);             \
    _tile_loadd(6, w, stride);                                          \
    _tile_dpbf16ps(VECTOR, 6, 7);                                       \
    if (strips > 1) {                                                   \
      _tile_loadd(6, (const char *)w + STRIP * stride, stride);         \
      _tile_dpbf16ps(SECOND, 6, 7);                                     \
    }                                                                   \
  }
#define STORE_TILES(VECTOR, SECOND)                                                                     \
  if (vectors > VECTOR) {                                                                               \
    _tile_stored(VECTOR, sums + VECTOR * LANES, vectors * 64);                                          \
    if (strips > 1) _tile_stored(SECOND, sums + (STRIP * vectors + VECTOR) * LANES, vectors * 64);      \
  }

/* Adds a tile's terms; rows of weights are `stride` bytes apart. `strips` and `vectors` are constants to the compiler. */
INLINE void add_tiles(const bfloat16 *w, size_t stride, const float *columns, const int strips, const int vectors) {
  ADD_TILES(0, 3)
  ADD_TILES(1, 4)
  ADD_TILES(2, 5)
}

/* Sums [strips * STRIP][vectors][LANES] of all terms. */
INLINE void sum_tiles(const Product *l, size_t out, const float *columns, float *sums, const int strips,
                      const int vectors) {
  const size_t n_in = l->n_in, whole = n_in / TILE_TERMS * TILE_TERMS;
  const bfloat16 *w = l->weight + out * n_in;
  const size_t next = out + (strips + 1) * STRIP <= l->n_out ? strips * STRIP * n_in : 0; /* prefetched, or a repetition */
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  WRITTEN(columns);
  for (size_t k = 0; k < whole; k += TILE_TERMS) {
    UNROLL for (int i = 0; i < STRIP; i++) __builtin_prefetch(w + next + i * n_in + k, 0, 2);
    add_tiles(w + k, n_in * sizeof *w, columns + k / TERMS * vectors * LANES, strips, vectors);
  }
  if (whole < n_in) { /* 16 terms are left: reading 32 would read the next row */
    bfloat16 last[2 * STRIP][TILE_TERMS] = {0};
    for (int i = 0; i < strips * STRIP; i++) memcpy(last[i], w + i * n_in + whole, sizeof last[i] / 2);
    WRITTEN(last);
    add_tiles(*last, sizeof *last, columns + whole / TERMS * vectors * LANES, strips, vectors);
  }
  STORE_TILES(0, 3)
  STORE_TILES(1, 4)
  STORE_TILES(2, 5)
  WRITTEN(sums);
}

/* Not inlined, so that its loop has its registers. */
#define SUM_TILES(STRIPS, VECTORS)                                                                                 \
  static __attribute__((noinline)) void sum_tiles_##STRIPS##_##VECTORS(const Product *l, size_t out,               \
                                                                       const float *columns, float *sums) {        \
    sum_tiles(l, out, columns, sums, STRIPS, VECTORS);                                                             \
  }
SUM_TILES(1, 1)
SUM_TILES(1, 2)
SUM_TILES(1, 3)
SUM_TILES(2, 1)
SUM_TILES(2, 2)
SUM_TILES(2, 3)

static void (*const sum_tiles_of[2][MOST_VECTORS])(const Product *, size_t, const float *, float *) = {
    {sum_tiles_1_1, sum_tiles_1_2, sum_tiles_1_3}, {sum_tiles_2_1, sum_tiles_2_2, sum_tiles_2_3}};

/* Computes `strips` times STRIP outputs, 1 or 2, of a panel's tokens. */
static void tile_strips(const Product *l, size_t out, size_t strips, size_t panel, const float *columns) {
  const size_t first = panel_start(l, panel) * LANES, vectors = panel_start(l, panel + 1) - first / LANES;
  vec sums[2 * STRIP * MOST_VECTORS] __attribute__((aligned(64)));
  sum_tiles_of[strips - 1][vectors - 1](l, out, columns, (float *)sums);
  for (size_t i = 0; i < strips; i++) store_strip(l, out + i * STRIP, first, vectors, sums + i * STRIP * vectors);
}

#endif
#endif

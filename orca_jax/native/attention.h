/* The arguments of split attention, and where its keys, values and queries lie. */

#ifndef ORCA_ATTENTION_H
#define ORCA_ATTENTION_H

#include "softmax.h"
#include "xla_call.h"

#ifndef VALUE_SIZE
#define VALUE_SIZE HEAD_SIZE
#endif

#define CHUNK 64 /* keys */
#define PARTS (HEAD_SIZE / LANES)
#define VALUE_PARTS (VALUE_SIZE / LANES)

typedef struct {
  int row, start, n; /* the row, the tile's first query in it, number of queries */
} Tile;

typedef struct {
  Work work;
  const q_type *q;
  const kv_type *keys, *values;
  const float *slopes; /* [G, K] ALiBi's, or NULL */
  const float *key_scales, *value_scales; /* [n_blocks, K, B] of keys and values of eight bits */
  const float *sinks;  /* [G, K] one more score in each head's softmax sum, or NULL */
  float *relative;     /* [K][2 M + 1 + 2 LANES] the relative bias by key position - query position, or NULL */
  const int32_t *block_table, *row_start, *kv_length;
  q_type *out;
  float scale, soft_cap; /* soft_cap 0: none */
  int window;            /* keys that a query sees, including its own */
  int chunked;           /* whether windows stand still: a query sees the keys of its own chunk of that size */
  int causal;            /* whether a query sees no later key */
  int furthest;          /* M: keys further away have this distance's relative bias */
  int n_slices, group, n_heads, max_blocks; /* n, G, K */
  int n_many, heads_at_once; /* tiles for attend_many, which come first; heads in an item of attend_one */
  Tile tiles[];
} Attention;

static inline int lesser(int a, int b) { return a < b ? a : b; }
static inline int greater(int a, int b) { return a > b ? a : b; }

/* The first key that a query at position `last` sees. */
static inline int first_key(const Attention *a, int last) {
  return a->chunked ? last - last % a->window : greater(0, last - a->window + 1);
}

/* The place, in slots of a head, of a row's key and value at `position`. */
static inline size_t place_of(const Attention *a, const int32_t *table, int head, unsigned position) {
  const size_t block = (size_t)table[position / BLOCK_SIZE] * a->n_heads + head;
  return block * BLOCK_SIZE + position % BLOCK_SIZE;
}

/* A row's key at `position`, or its value, which may be the beginning of a key (VALUE_SIZE). */
static inline const kv_type *slot(const Attention *a, const kv_type *pool, const int32_t *table, int head,
                                  unsigned position) {
  return pool + place_of(a, table, head, position) * HEAD_SIZE;
}

/* Finds the slots of `n` positions from `base` on, and fills [CHUNK] up with the last one. */
static inline void find(const Attention *a, const kv_type *pool, const int32_t *table, int head, int base, int n,
                        const kv_type **slots) {
  for (int c = 0; c < n; c++) slots[c] = slot(a, pool, table, head, base + c);
  for (int c = n; c < CHUNK; c++) slots[c] = slots[n - 1];
}

/* Reads the scales of `n` positions from `base` on, and fills [CHUNK] up with 0. */
static inline void find_scales(const Attention *a, const float *pool, const int32_t *table, int head, int base, int n,
                               float *scales) {
  for (int c = 0; c < n; c++) scales[c] = pool[place_of(a, table, head, base + c)] * KV_UNIT;
  for (int c = n; c < CHUNK; c++) scales[c] = 0;
}

/* Prefetches a slot into the second-level cache. The next block may be anywhere, so the processor does not prefetch it
 * by itself, and the second level can have more reads under way than the first. */
static inline void fetch(const kv_type *slot) {
  for (int i = 0; i < (int)(HEAD_SIZE * sizeof *slot); i += 64) __builtin_prefetch((const char *)slot + i, 0, 2);
}

static inline const q_type *query(const Attention *a, int token, int g, int head) {
  return a->q + (((size_t)token * a->n_slices + g) * a->n_heads + head) * HEAD_SIZE;
}

static inline q_type *result_of(const Attention *a, int token, int g, int head) {
  return a->out + (((size_t)token * a->group + g) * a->n_heads + head) * VALUE_SIZE;
}

static inline float slope(const Attention *a, int g, int head) {
  return a->slopes ? a->slopes[g * a->n_heads + head] : 0;
}

/* The initial state of a query's softmax: returns its greatest score and sets `total`, the sum of its weights. */
static inline float first_score(const Attention *a, int g, int head, float *total) {
  *total = a->sinks != NULL;
  return a->sinks ? a->sinks[g * a->n_heads + head] : NOTHING;
}

static inline const float *relative_of(const Attention *a, int head) {
  return a->relative ? a->relative + (size_t)head * (2 * (a->furthest + LANES) + 1) : NULL;
}

/* A head's relative bias at LANES distances from `distance` on. */
static inline vec relative_bias(const float *of_head, int furthest, int distance) {
  return load(of_head + greater(0, lesser(distance, furthest) + furthest + LANES));
}

static inline vec capped(vec scores, float cap) { return all(cap) * hyperbolic_tangent(scores * all(1 / cap)); }

#endif

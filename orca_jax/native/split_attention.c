/* Split attention of one layer on a CPU, in float32: an XLA custom call (ORCA 3.2 and 5).
 *
 * HEAD_SIZE (D) and BLOCK_SIZE (B) are given when it is compiled: D a multiple of 16, B of 8. Arguments as in
 * split_attention.py: q [T, N, D]; keys, values [n_blocks, N, B, D]; block_table [R, max_blocks], row_start
 * [R + 1], kv_length [R] int32; the result [T, N, D].
 *
 * The work is cut into items: a tile of one row's query tokens, and a head. A row of the increment phase is a
 * tile of one query; a row of the initiation phase is cut into tiles of TILE, from its own first token on, so
 * that no row's result depends on its neighbours. An item walks over its keys a chunk at a time with a running
 * softmax and reads keys and values where they lie. XLA's threads take items in turn.
 */

#include "vectors.h"
#include "xla_call.h"

#define TILE 32  /* query tokens: two vectors */
#define CHUNK 64 /* keys */
#define STRIP 8  /* keys whose scores are computed side by side; all of one block */
#define PANEL 4  /* query tokens whose sums are */
#define HEADS_AT_ONCE 4 /* of a query */
#define ROWS_ENOUGH 8   /* of the increment phase, for all threads to be busy with so many heads at once */
#define GROUPS (TILE / LANES)
#define PARTS (HEAD_SIZE / LANES)

/* Seconds of a thread's start against bytes of keys and values that a core reads meanwhile. */
#define WORTH_A_THREAD (1 << 18)

_Static_assert(HEAD_SIZE % LANES == 0 && BLOCK_SIZE % STRIP == 0, "what native_split_attention refuses");

static inline vec choose(ivec mask, vec yes, vec no) {
  return (vec)((mask & (ivec)yes) | (~mask & (ivec)no));
}

static inline vec larger(vec a, vec b) { return choose(a > b, a, b); }

/* e^x for x <= 0, to about one unit in the last place; 0 where it would be below what float32 has normally. */
static inline vec exponential(vec x) {
  const vec least = all(-87.0f), shift = all(12582912.0f); /* 1.5 * 2^23: adding it rounds to whole numbers */
  const ivec kept = x > least;
  x = larger(x, least);
  vec rounded = x * all(1.44269504f) + shift;
  vec n = rounded - shift;
  /* x - n ln 2, with ln 2 in two parts, so that the difference is exact; then Taylor up to r^6. */
  vec r = (x - n * all(0.693359375f)) + n * all(2.12194440e-4f);
  vec p = all(1.0f / 720);
  p = p * r + all(1.0f / 120);
  p = p * r + all(1.0f / 24);
  p = p * r + all(1.0f / 6);
  p = p * r + all(0.5f);
  p = p * r + all(1.0f);
  p = p * r + all(1.0f);
  ivec exponent = ((ivec)rounded - (ivec)shift + 127) << 23;
  return choose(kept, p * (vec)exponent, all(0));
}

typedef struct {
  int row, start, n; /* the row, the index of its first token, tokens */
} Tile;

typedef struct {
  Work work;
  const float *q, *keys, *values;
  const int32_t *block_table, *row_start, *kv_length;
  float *out;
  int n_heads, max_blocks;
  int n_many, heads_at_once; /* tiles of several queries, which come first; heads that an item of one has */
  Tile tiles[];
} Attention;

static const float NOTHING = -1e30f; /* the score of a key that is not seen */

/* Where a row's key (or value) at `position` lies. */
static inline const float *slot(const Attention *a, const float *pool, const int32_t *table, int head, int position) {
  size_t block = (size_t)table[position / BLOCK_SIZE] * a->n_heads + head;
  return pool + (block * BLOCK_SIZE + position % BLOCK_SIZE) * HEAD_SIZE;
}

/* Blocks lie anywhere, so the machine cannot guess the next one. Into the second cache, which waits for more
 * memory at a time than the first. */
static inline void fetch(const float *slot) {
  for (int i = 0; i < (int)(HEAD_SIZE * sizeof(float)); i += 64) __builtin_prefetch((const char *)slot + i, 0, 2);
}

/* A query's softmax as far as its chunks are seen. */
typedef struct {
  vec q[PARTS], out[PARTS];
  float top, total;
} Running;

/* A chunk of a head's keys and values, `n` from `base` on. Its values are fetched while its keys are worked on;
 * meanwhile those fetch the keys of what comes next: `n_next` from `next` on, of another head perhaps. */
static inline void attend_chunk(const Attention *a, const int32_t *table, int head, int base, int n, Running *running,
                                int next_head, int next, int n_next) {
  float weights[CHUNK]; /* scores first */
  for (int c = n; c < CHUNK; c++) weights[c] = NOTHING;
  for (int c = 0; c < n; c++) {
    const float *key = slot(a, a->keys, table, head, base + c);
    fetch(slot(a, a->values, table, head, base + c));
    vec products = running->q[0] * load(key);
    for (int i = 1; i < PARTS; i++) products += running->q[i] * load(key + i * LANES);
    weights[c] = sum(products);
  }
  const float top = running->top;
  float new_top = top;
  for (int c = 0; c < n; c++) new_top = weights[c] > new_top ? weights[c] : new_top;
  vec sums = all(0);
  for (int c = 0; c < CHUNK; c += LANES) {
    vec weight = exponential(load(weights + c) - all(new_top));
    store(weights + c, weight);
    sums += weight;
  }
  const float shrink = exponential(all(top - new_top))[0];
  running->top = new_top;
  running->total = running->total * shrink + sum(sums);
  vec out[PARTS];
  for (int i = 0; i < PARTS; i++) out[i] = running->out[i] * all(shrink);
  for (int c = 0; c < n; c++) {
    const float *value = slot(a, a->values, table, head, base + c);
    if (c < n_next) fetch(slot(a, a->keys, table, next_head, next + c));
    for (int i = 0; i < PARTS; i++) out[i] += all(weights[c]) * load(value + i * LANES);
  }
  for (int i = 0; i < PARTS; i++) running->out[i] = out[i];
}

/* A tile of one query, and some heads, in turn at each chunk. */
static void attend_one(const Attention *a, Tile tile, int first, int n_heads) {
  const int length = a->kv_length[tile.row];
  const int32_t *table = a->block_table + (size_t)tile.row * a->max_blocks;
  const size_t at = ((size_t)tile.start * a->n_heads + first) * HEAD_SIZE;
  Running heads[HEADS_AT_ONCE];
  for (int h = 0; h < n_heads; h++) {
    heads[h].top = NOTHING;
    heads[h].total = 0;
    for (int i = 0; i < PARTS; i++) {
      heads[h].q[i] = load(a->q + at + h * HEAD_SIZE + i * LANES) * all(1.0f / __builtin_sqrtf(HEAD_SIZE));
      heads[h].out[i] = all(0);
    }
  }
  for (int base = 0; base < length; base += CHUNK) {
    const int n = length - base < CHUNK ? length - base : CHUNK, behind = length - base - n;
    for (int h = 0; h < n_heads; h++) {
      const int last = h + 1 == n_heads;
      attend_chunk(a, table, first + h, base, n, &heads[h], last ? first : first + h + 1, last ? base + n : base,
                   last ? behind : n);
    }
  }
  for (int h = 0; h < n_heads; h++)
    for (int i = 0; i < PARTS; i++)
      store(a->out + at + h * HEAD_SIZE + i * LANES, heads[h].out[i] * all(1 / heads[h].total));
}

/* A tile of several queries: its vectors go across the queries for the scores, along the head for the sums. */
static void attend_many(const Attention *a, Tile tile, int head) {
  const int end = a->row_start[tile.row + 1], length = a->kv_length[tile.row];
  const int32_t *table = a->block_table + (size_t)tile.row * a->max_blocks;
  float q[HEAD_SIZE][TILE], weights[CHUNK][TILE], out[TILE][HEAD_SIZE], shrink[TILE], totals[TILE];
  int32_t last[TILE]; /* the last key that each query sees: its own position */
  for (int m = 0; m < TILE; m++) {
    const int index = tile.start + (m < tile.n ? m : tile.n - 1);
    const float *from = a->q + ((size_t)index * a->n_heads + head) * HEAD_SIZE;
    last[m] = length - end + index;
    for (int d = 0; d < HEAD_SIZE; d++) q[d][m] = from[d] * (1.0f / __builtin_sqrtf(HEAD_SIZE));
  }
  memset(out, 0, sizeof out);
  vec top[GROUPS], total[GROUPS];
  for (int g = 0; g < GROUPS; g++) {
    top[g] = all(NOTHING);
    total[g] = all(0);
  }
  const int n_any = last[tile.n - 1] + 1, n_all = last[0] + 1; /* keys that any query sees, that all see */
  for (int base = 0; base < n_any; base += CHUNK) {
    const int n = n_any - base < CHUNK ? n_any - base : CHUNK;
    const int n_whole = (n + STRIP - 1) / STRIP * STRIP; /* a block holds whole strips */
    for (int c = 0; c < n_whole; c += STRIP) {
      const float *key = slot(a, a->keys, table, head, base + c);
      vec scores[STRIP][GROUPS];
#pragma GCC unroll 8
      for (int i = 0; i < STRIP; i++)
#pragma GCC unroll 4
        for (int g = 0; g < GROUPS; g++) scores[i][g] = all(0);
      for (int d = 0; d < HEAD_SIZE; d++) {
#pragma GCC unroll 8
        for (int i = 0; i < STRIP; i++)
#pragma GCC unroll 4
          for (int g = 0; g < GROUPS; g++) scores[i][g] += all(key[i * HEAD_SIZE + d]) * load(&q[d][g * LANES]);
      }
#pragma GCC unroll 8
      for (int i = 0; i < STRIP; i++)
#pragma GCC unroll 4
        for (int g = 0; g < GROUPS; g++) {
          const int position = base + c + i;
          vec score = scores[i][g];
          /* What others left in slots behind the row's own may be NaN: it is not computed with. */
          if (position >= n_all) score = choose(*(const ivec *)&last[g * LANES] >= position, score, all(NOTHING));
          store(&weights[c + i][g * LANES], score);
        }
    }
    for (int g = 0; g < GROUPS; g++) {
      vec new_top = top[g], sums = all(0);
      for (int c = 0; c < n; c++) new_top = larger(new_top, load(&weights[c][g * LANES]));
      for (int c = 0; c < n; c++) {
        vec weight = exponential(load(&weights[c][g * LANES]) - new_top);
        store(&weights[c][g * LANES], weight);
        sums += weight;
      }
      const vec shrunk = exponential(top[g] - new_top);
      store(&shrink[g * LANES], shrunk);
      total[g] = total[g] * shrunk + sums;
      top[g] = new_top;
    }
    for (int m = 0; m < tile.n; m += PANEL) {
      vec sums[PANEL][PARTS];
#pragma GCC unroll 4
      for (int i = 0; i < PANEL; i++)
#pragma GCC unroll 16
        for (int d = 0; d < PARTS; d++) sums[i][d] = load(&out[m + i][d * LANES]) * all(shrink[m + i]);
      for (int c = 0; c < n; c++) {
        const float *value = slot(a, a->values, table, head, base + c);
#pragma GCC unroll 4
        for (int i = 0; i < PANEL; i++)
#pragma GCC unroll 16
          for (int d = 0; d < PARTS; d++) sums[i][d] += all(weights[c][m + i]) * load(value + d * LANES);
      }
#pragma GCC unroll 4
      for (int i = 0; i < PANEL; i++)
#pragma GCC unroll 16
        for (int d = 0; d < PARTS; d++) store(&out[m + i][d * LANES], sums[i][d]);
    }
  }
  for (int g = 0; g < GROUPS; g++) store(&totals[g * LANES], total[g]);
  for (int m = 0; m < tile.n; m++) {
    float *to = a->out + ((size_t)(tile.start + m) * a->n_heads + head) * HEAD_SIZE;
    for (int d = 0; d < PARTS; d++) store(to + d * LANES, load(&out[m][d * LANES]) * all(1 / totals[m]));
  }
}

static void do_item(Work *work, int item) {
  const Attention *a = (Attention *)work;
  const int n_many = a->n_many * a->n_heads;
  if (item < n_many) {
    attend_many(a, a->tiles[item / a->n_heads], item % a->n_heads);
    return;
  }
  const int n_groups = (a->n_heads + a->heads_at_once - 1) / a->heads_at_once;
  const int first = (item - n_many) % n_groups * a->heads_at_once, left = a->n_heads - first;
  attend_one(a, a->tiles[a->n_many + (item - n_many) / n_groups], first,
             left < a->heads_at_once ? left : a->heads_at_once);
}

/* Initiations first, the increments fill up behind them; returns the bytes of keys and values that are read. */
static double cut(Attention *a, int n_rows) {
  double n_bytes = 0;
  int n_tiles = 0;
  for (int increments = 0; increments < 2; increments++) {
    for (int row = 0; row < n_rows; row++) {
      const int start = a->row_start[row], end = a->row_start[row + 1];
      if (end == start || (end - start == 1) != increments) continue;
      for (int at = start; at < end; at += TILE) {
        a->tiles[n_tiles++] = (Tile){row, at, end - at < TILE ? end - at : TILE};
        n_bytes += 8.0 * a->kv_length[row] * a->n_heads * HEAD_SIZE;
      }
    }
    if (!increments) a->n_many = n_tiles;
  }
  const int n_ones = n_tiles - a->n_many;
  a->heads_at_once = n_ones < ROWS_ENOUGH ? 1 : HEADS_AT_ONCE;
  a->work.n_items = a->n_many * a->n_heads + n_ones * ((a->n_heads + a->heads_at_once - 1) / a->heads_at_once);
  return n_bytes;
}

XLA_FFI_Error *split_attention(XLA_FFI_CallFrame *frame) {
  if (asked_what_it_is(frame)) return NULL;
  const XLA_FFI_Buffer *q = argument(frame, 0), *block_table = argument(frame, 3), *kv_length = argument(frame, 5);
  const int n_tokens = q->dims[0], n_rows = kv_length->dims[0];
  Attention *a = malloc(sizeof *a + sizeof(Tile) * (n_tokens / TILE + n_rows));
  if (!a) return no_memory(frame);
  a->work.do_item = do_item;
  a->q = q->data;
  a->keys = argument(frame, 1)->data;
  a->values = argument(frame, 2)->data;
  a->block_table = block_table->data;
  a->row_start = argument(frame, 4)->data;
  a->kv_length = kv_length->data;
  a->out = result(frame, 0)->data;
  a->n_heads = q->dims[1];
  a->max_blocks = block_table->dims[1];
  const size_t token = (size_t)a->n_heads * HEAD_SIZE, n_real = a->row_start[n_rows];
  memset(a->out + n_real * token, 0, sizeof(float) * (n_tokens - n_real) * token); /* padding */
  const double n_bytes = cut(a, n_rows);
  const double worth = n_bytes / WORTH_A_THREAD;
  const int n_threads = count_threads(frame);
  return do_all(&a->work, frame, worth < n_threads ? worth : n_threads);
}

/* Split attention of one layer on a CPU, as an XLA custom call (ORCA 3.2 and 5).
 *
 * The compiler sets HEAD_SIZE (D), a multiple of 16; BLOCK_SIZE (B), a multiple of 8; Q_BITS and KV_BITS, 32 for
 * float32 and 16 for bfloat16, KV_BITS 8 for int8 and with KV_FP8 for e4m3; and where values are the first elements of
 * the keys VALUE_SIZE, a multiple of 16. All arithmetic is float32. The arguments are those of split_attention.py: q [T, n, K, D], whose first G slices are the
 * queries; keys, values [n_blocks, K, B, D]; block_table [R, max_blocks],
 * row_start [R + 1], kv_length [R] int32; slopes [G, K], relative [2 M + 1, K] and sinks [G, K] float32, or empty; with
 * eight bits the scales of keys and of values [n_blocks, K, B] float32, which multiply scores and weights. The
 * result is [T, G, K, D], or VALUE_SIZE in place of D. Query heads [0..G, k] form a group: all attend to key/value
 * head k.
 *
 * The work is cut into items: a tile of one row's queries, and a key/value head (attend_many), or a row of one
 * token and a few key/value heads (attend_one). Within a row, queries are numbered token by token and by group
 * within a token; tiles are cut from the row's first query on, so no row's result depends on its neighbours. An
 * item reads keys and values in place, a chunk at a time, with a running softmax; all its queries share each read.
 * XLA's threads take items one after the other.
 */

#include "one_token.h"
#include "query_tile.h"

#define ROWS_ENOUGH 8 /* from so many rows on, items of HEADS_AT_ONCE heads keep all threads busy */

/* Bytes of keys and values below which another thread costs more than it saves. */
#define WORTH_A_THREAD (1 << 18)

static void do_item(Work *work, int item) {
  const Attention *a = (const Attention *)work;
  const int n_many = a->n_many * a->n_heads;
  if (item < n_many) {
    const Tile tile = a->tiles[item / a->n_heads];
    attend_many[(tile.n + LANES - 1) / LANES](a, tile, item % a->n_heads);
    return;
  }
  const int n_groups = (a->n_heads + a->heads_at_once - 1) / a->heads_at_once;
  const int first = (item - n_many) % n_groups * a->heads_at_once;
  attend_one(a, a->tiles[a->n_many + (item - n_many) / n_groups].row, first,
             lesser(a->n_heads - first, a->heads_at_once));
}

/* Lays the relative bias [2 M + 1, K] out by head, with LANES more copies of the first and of the last. */
static void lay_out(Attention *a, const float *relative) {
  const int m = a->furthest, n = 2 * (m + LANES) + 1;
  for (int head = 0; head < a->n_heads; head++)
    for (int i = 0; i < n; i++)
      a->relative[(size_t)head * n + i] = relative[(size_t)lesser(greater(i - LANES, 0), 2 * m) * a->n_heads + head];
}

/* Cuts the rows into tiles. Those for attend_many come first, so that the short items of attend_one even out the
 * threads at the end. Rows without a key get zeros. Returns the bytes of keys and values to read. */
static double cut(Attention *a, int n_rows) {
  double n_keys = 0;
  int n_tiles = 0;
  for (int ones = 0; ones < 2; ones++) {
    for (int row = 0; row < n_rows; row++) {
      const int n_tokens = a->row_start[row + 1] - a->row_start[row], n = n_tokens * a->group;
      if (!n || (n_tokens == 1 && a->group <= MOST_SHARING) != ones) continue;
      if (!a->kv_length[row]) {
        const size_t token = (size_t)a->group * a->n_heads * VALUE_SIZE;
        memset(a->out + a->row_start[row] * token, 0, sizeof *a->out * n_tokens * token);
        continue;
      }
      for (int at = 0; at < n; at += ones ? n : TILE) {
        a->tiles[n_tiles++] = (Tile){row, at, lesser(n - at, TILE)};
        n_keys += a->kv_length[row] < a->window ? a->kv_length[row] : a->window;
      }
    }
    if (!ones) a->n_many = n_tiles;
  }
  const int n_ones = n_tiles - a->n_many;
  a->heads_at_once = n_ones < ROWS_ENOUGH ? 1 : HEADS_AT_ONCE;
  a->work.n_items = a->n_many * a->n_heads + n_ones * ((a->n_heads + a->heads_at_once - 1) / a->heads_at_once);
  return n_keys * a->n_heads * HEAD_SIZE * 2 * sizeof(kv_type);
}

XLA_FFI_Error *split_attention(XLA_FFI_CallFrame *frame) {
  if (asked_what_it_is(frame)) return NULL;
  const XLA_FFI_Buffer *q = argument(frame, 0), *block_table = argument(frame, 3), *kv_length = argument(frame, 5);
  const XLA_FFI_Buffer *slopes = argument(frame, 6), *relative = argument(frame, 7), *sinks = argument(frame, 8);
  const XLA_FFI_Buffer *out = result(frame, 0);
  const int n_tokens = out->dims[0], group = out->dims[1], n_rows = kv_length->dims[0], n_distances = relative->dims[0];
  const size_t n_tiles = (size_t)n_tokens * group / TILE + n_rows;
  const size_t n_relative = n_distances ? out->dims[2] * (n_distances + 2 * (size_t)LANES) : 0;
  Attention *a = malloc(sizeof *a + sizeof(Tile) * n_tiles + sizeof *a->relative * n_relative);
  if (!a) return no_memory(frame);
  a->work.do_item = do_item;
  a->q = q->data;
  a->keys = argument(frame, 1)->data;
  a->values = argument(frame, 2)->data;
  a->block_table = block_table->data;
  a->row_start = argument(frame, 4)->data;
  a->kv_length = kv_length->data;
  a->slopes = slopes->dims[0] ? slopes->data : NULL;
  a->sinks = sinks->dims[0] ? sinks->data : NULL;
#if KV_BITS == 8
  a->key_scales = argument(frame, 9)->data;
  a->value_scales = argument(frame, 10)->data;
#endif
  a->out = out->data;
  a->scale = *(const float *)attribute(frame, "scale");
  a->soft_cap = *(const float *)attribute(frame, "soft_cap");
  a->window = *(const int32_t *)attribute(frame, "window");
  a->chunked = *(const int32_t *)attribute(frame, "chunked");
  a->causal = *(const int32_t *)attribute(frame, "causal");
  a->n_slices = q->dims[1];
  a->group = group;
  a->n_heads = out->dims[2];
  a->max_blocks = block_table->dims[1];
  a->furthest = n_distances / 2;
  a->relative = n_distances ? (float *)(a->tiles + n_tiles) : NULL;
  if (a->relative) lay_out(a, relative->data);
  const size_t token = (size_t)group * a->n_heads * VALUE_SIZE, n_real = a->row_start[n_rows];
  memset(a->out + n_real * token, 0, sizeof *a->out * (n_tokens - n_real) * token); /* padding */
  const double worth = cut(a, n_rows) / WORTH_A_THREAD;
  const int n_threads = count_threads(frame);
  return do_all(&a->work, frame, worth < n_threads ? worth : n_threads);
}

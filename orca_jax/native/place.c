/* Writes an iteration's keys and values to the cache and rotates queries and keys, as an XLA custom call on a CPU.
 *
 * XLA would write the cache element by element, on one thread, and compute cosine and sine again for each head of each
 * layer. The compiler sets X_BITS, 32 for float32 and 16 for bfloat16, and for a cache of eight bits CODE
 * (eight_bits.h). The arguments are those of place.py: heads [T, n, K, D]; values [T, m, K, D], whose last slice is
 * used; slot_of_token [T] int32; cos and sin [T, size / 2] float32 or [T, 0]; and the layer's keys and values
 * [n_blocks, K, B, D], with CODE followed by their scales [n_blocks, K, B] float32, all of which are changed in place.
 * The result is the queries, [T, G, K, D].
 *
 * D is a multiple of 16 and 256 at most.
 */

#include "vectors.h"
#include "xla_call.h"

#ifndef X_BITS
#define X_BITS 32
#endif
typedef ELEMENT(X_BITS) x_type;

#ifdef CODE
#include "eight_bits.h"
#else
typedef x_type code_type;
#endif

#define MOST_ELEMENTS 256 /* in a head */
#define ITEMS 4           /* per thread */

/* Bytes moved below which another thread costs more than it saves. */
#define WORTH_A_THREAD (1 << 18)

typedef struct {
  Work work;
  const x_type *heads, *values;
  const float *cos, *sin;
  const int32_t *slots;
  x_type *queries;
  code_type *to_keys, *to_values;
  float *key_scales, *value_scales; /* with CODE */
  size_t n_tokens, n_slices, n_value_slices, n_queries; /* T, n, m, G */
  size_t key;                                           /* the slice of heads with the keys */
  size_t n_heads, head_size, block_size, n_slots;       /* K, D, B, slots of the cache */
  size_t n_pairs;                                       /* pairs of a head's elements that are rotated */
  int interleaved;
} Place;

/* Rotates a head of a token. */
static void rotate(const Place *p, size_t token, const x_type *from, x_type *to) {
  float head[MOST_ELEMENTS];
  const float *cos = p->cos + token * p->n_pairs, *sin = p->sin + token * p->n_pairs;
  for (size_t i = 0; i < p->head_size; i += LANES) store(head + i, load(from + i));
  const size_t step = p->interleaved ? 2 : 1, apart = p->interleaved ? 1 : p->n_pairs;
  for (size_t i = 0; i < p->n_pairs; i++) {
    float *first = head + i * step, *second = first + apart;
    const float a = *first, b = *second;
    *first = a * cos[i] - b * sin[i];
    *second = b * cos[i] + a * sin[i];
  }
  for (size_t i = 0; i < p->head_size; i += LANES) store(to + i, load(head + i));
}

/* Writes a head's key or value to slot `to` of a pool, with the scale if the cache is of eight bits. */
INLINE void put(const Place *p, const x_type *head, code_type *pool, float *scales, size_t to) {
#ifdef CODE
  scales[to] = round_to_eight_bits(head, p->head_size, pool + to * p->head_size);
#else
  memcpy(pool + to * p->head_size, head, p->head_size * sizeof *head);
#endif
}

static void do_item(Work *work, int item) {
  const Place *p = (const Place *)work;
  const size_t size = p->head_size;
  x_type rotated[MOST_ELEMENTS];
  const size_t end = p->n_tokens * (item + 1) / work->n_items;
  for (size_t token = p->n_tokens * item / work->n_items; token < end; token++) {
    const x_type *heads = p->heads + token * p->n_slices * p->n_heads * size;
    for (size_t i = 0; i < p->n_queries * p->n_heads; i++)
      rotate(p, token, heads + i * size, p->queries + (token * p->n_queries * p->n_heads + i) * size);
    const size_t slot = (size_t)p->slots[token]; /* a negative one is out of range too */
    if (slot >= p->n_slots) continue;
    const x_type *keys = heads + p->key * p->n_heads * size;
    const x_type *values = p->values + ((token + 1) * p->n_value_slices - 1) * p->n_heads * size;
    for (size_t i = 0; i < p->n_heads; i++) {
      const size_t to = (slot / p->block_size * p->n_heads + i) * p->block_size + slot % p->block_size;
      if (p->n_pairs) rotate(p, token, keys + i * size, rotated);
      put(p, p->n_pairs ? rotated : keys + i * size, p->to_keys, p->key_scales, to);
      put(p, values + i * size, p->to_values, p->value_scales, to);
    }
  }
}

XLA_FFI_Error *place(XLA_FFI_CallFrame *frame) {
  if (asked_what_it_is(frame)) return NULL;
  const XLA_FFI_Buffer *heads = argument(frame, 0), *values = argument(frame, 1), *cos = argument(frame, 3);
  const XLA_FFI_Buffer *queries = result(frame, 0), *keys = result(frame, 1);
  Place *p = malloc(sizeof *p);
  if (!p) return no_memory(frame);
  *p = (Place){.work = {.do_item = do_item},
               .heads = heads->data,
               .values = values->data,
               .slots = argument(frame, 2)->data,
               .cos = cos->data,
               .sin = argument(frame, 4)->data,
               .queries = queries->data,
               .to_keys = keys->data,
               .to_values = result(frame, 2)->data,
#ifdef CODE
               .key_scales = result(frame, 3)->data,
               .value_scales = result(frame, 4)->data,
#endif
               .n_tokens = heads->dims[0],
               .n_slices = heads->dims[1],
               .n_value_slices = values->dims[1],
               .n_queries = queries->dims[1],
               .key = *(const int32_t *)attribute(frame, "key"),
               .n_heads = keys->dims[1],
               .head_size = keys->dims[3],
               .block_size = keys->dims[2],
               .n_slots = keys->dims[0] * keys->dims[2],
               .n_pairs = cos->dims[1],
               .interleaved = *(const int32_t *)attribute(frame, "interleaved")};
  const size_t n_threads = count_threads(frame), most = ITEMS * n_threads;
  p->work.n_items = p->n_tokens < most ? p->n_tokens : most;
  const size_t moved = (p->n_queries + 2) * p->n_heads * p->head_size * 2 * sizeof(x_type);
  const double worth = (double)p->n_tokens * moved / WORTH_A_THREAD;
  return do_all(&p->work, frame, worth < n_threads ? worth : n_threads);
}

/* The matrix product of a linear layer on a CPU, as an XLA custom call (ORCA 3.2: all tokens at once).
 *
 * y [T, O] = x [T, I] times weight [O, I] for the first n_tokens [1] int32 tokens; the rest of y is zero.
 *
 * In decode a product has few tokens, and reading the weight takes most of its time. XLA's library first copies the
 * weight into packed panels, for every call; this code reads it in place, once, as fast as memory delivers it. Two
 * forms do that (product.h chooses by the number of tokens):
 *
 *   - few_tokens.h: x stays in the L1 cache, and vectors run along the summed axis. Each row of the weight is used for
 *     all tokens as it is read.
 *   - token_panel.h: vectors run across tokens. Each thread transposes a panel of x once, and every weight is
 *     multiplied by the whole panel. tile_panel.h does the same with AMX, for any number of tokens in bfloat16.
 *
 * XLA's threads take items, which are ranges of outputs. No item adds to another's sums, and a sum's order depends on
 * the form alone, not on threads or items: the result is the same to the bit however the work is cut. A token's
 * result depends on its form, though, and so on the number of tokens, unless the operation is compiled `steady`
 * (operations.py).
 */

#include "product.h"

typedef struct {
  Work work;
  Product product;
  float widened[];
} Linear;

static void do_item(Work *work, int item) {
  if (!do_part(&((Linear *)work)->product, item)) work->failed = true;
}

XLA_FFI_Error *linear(XLA_FFI_CallFrame *frame) {
  if (asked_what_it_is(frame)) return NULL;
  const XLA_FFI_Buffer *x = argument(frame, 0), *weight = argument(frame, 1);
  const size_t most_tokens = x->dims[0], n_out = weight->dims[0], n_real = *(const int32_t *)argument(frame, 2)->data;
  const size_t n_tokens = least(n_real, most_tokens), n_in = x->dims[1];
  x_type *y = result(frame, 0)->data;
  memset(y + n_tokens * n_out, 0, (most_tokens - n_tokens) * n_out * sizeof *y);
  if (!n_tokens) return NULL;
  Linear *l = malloc(sizeof *l + n_widened(n_tokens, n_in) * sizeof(float));
  if (!l) return no_memory(frame);
  l->work.do_item = do_item;
  l->product = (Product){.x = x->data, .weight = weight->data, .y = y, .n_tokens = n_tokens, .n_in = n_in, .n_out = n_out};
  const size_t n_threads = count_threads(frame);
  l->work.n_items = cut(&l->product, ITEMS * n_threads, n_threads);
  take_x(&l->product, l->widened);
  const double worth = threads_worth(&l->product);
  return do_all(&l->work, frame, worth < n_threads ? worth : n_threads);
}

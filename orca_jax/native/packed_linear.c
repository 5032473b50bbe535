/* The product of a linear layer with a packed weight on a CPU, as an XLA custom call (packed_product.h).
 *
 * y [T, O] = x [T, I] times a weight [O, I], whose planes follow x, for the first n_tokens [1] int32 tokens; the rest
 * of y is zero. XLA's threads take items: first groups of tokens, whose x is taken, then ranges of outputs.
 */

#include "packed_product.h"

typedef struct {
  Work work;
  Product product;
  Run runs[];
} Linear;

static void do_item(Work *work, int item) { do_part(&((Linear *)work)->product, item); }

XLA_FFI_Error *packed_linear(XLA_FFI_CallFrame *frame) {
  if (asked_what_it_is(frame)) return NULL;
  const XLA_FFI_Buffer *x = argument(frame, 0), *y = result(frame, 0);
  const size_t most_tokens = x->dims[0], n_in = x->dims[1], n_out = y->dims[1];
  int next = 1;
  Planes weight = planes_of(frame, &next, n_in);
  const size_t n_tokens = least(*(const int32_t *)argument(frame, next)->data, most_tokens);
  memset((x_type *)y->data + n_tokens * n_out, 0, (most_tokens - n_tokens) * n_out * sizeof(x_type));
  if (!n_tokens) return NULL;
  Linear *l = malloc(sizeof *l + n_tokens * (n_in / RUN) * sizeof(Run));
  if (!l) return no_memory(frame);
  l->work.do_item = do_item;
  l->product = (Product){.x = x->data,
                         .weight = weight,
                         .y = y->data,
                         .runs = l->runs,
                         .n_tokens = n_tokens,
                         .n_in = n_in,
                         .n_out = n_out};
  const size_t n_threads = count_threads(frame);
  l->work.n_items = cut(&l->product, ITEMS * n_threads);
  const double worth = threads_worth(&l->product);
  return do_all(&l->work, frame, worth < n_threads ? worth : n_threads);
}

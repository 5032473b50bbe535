/* The matrix product of experts with packed weights on a CPU, as an XLA custom call: each group of tokens times the
 * group's weight (packed_product.h).
 *
 * y [T, O] = x [T, I] by the planes of a weight [X, O, I], which follow x. Group i is the next sizes[i] rows of x,
 * sizes [X] int32; rows after the last group give zeros. A group without tokens does not read its weight.
 */

#include "packed_product.h" /* before groups.h, which takes Product */

#include "groups.h"

static void do_item(Work *work, int item) {
  Group *group = group_of((Grouped *)work, item);
  do_part(&group->product, item - group->first_item);
}

XLA_FFI_Error *packed_grouped(XLA_FFI_CallFrame *frame) {
  if (asked_what_it_is(frame)) return NULL;
  const XLA_FFI_Buffer *x = argument(frame, 0), *y = result(frame, 0);
  const size_t most_tokens = x->dims[0], n_in = x->dims[1], n_out = y->dims[1];
  int next = 1;
  const Planes weights = planes_of(frame, &next, n_in);
  const int32_t *sizes = argument(frame, next)->data;
  const size_t n_experts = argument(frame, next)->dims[0];
  size_t n_groups = 0, n_tokens = 0;
  for (size_t i = 0; i < n_experts; i++) {
    const size_t size = group_size(sizes, i, most_tokens - n_tokens);
    n_groups += size > 0;
    n_tokens += size;
  }
  memset((x_type *)y->data + n_tokens * n_out, 0, (most_tokens - n_tokens) * n_out * sizeof(x_type));
  if (!n_tokens) return NULL;
  Grouped *all = malloc(sizeof *all + n_groups * sizeof(Group) + n_tokens * (n_in / RUN) * sizeof(Run));
  if (!all) return no_memory(frame);
  all->work.do_item = do_item;
  all->n_groups = n_groups;
  const size_t n_threads = count_threads(frame), n_wanted = (ITEMS * n_threads + n_groups - 1) / n_groups;
  Run *runs = (Run *)(all->groups + n_groups);
  Group *group = all->groups;
  size_t n_items = 0, token = 0;
  double worth = 0;
  for (size_t i = 0; i < n_experts; i++) {
    const size_t size = group_size(sizes, i, most_tokens - token);
    if (!size) continue;
    group->first_item = n_items;
    group->product = (Product){.x = (const x_type *)x->data + token * n_in,
                               .weight = nth_weight(&weights, i, n_out),
                               .y = (x_type *)y->data + token * n_out,
                               .runs = runs + token * (n_in / RUN),
                               .n_tokens = size,
                               .n_in = n_in,
                               .n_out = n_out};
    n_items += cut(&group->product, n_wanted);
    worth += threads_worth(&group->product);
    token += size;
    group++;
  }
  all->work.n_items = n_items;
  return do_all(&all->work, frame, worth < n_threads ? worth : n_threads);
}

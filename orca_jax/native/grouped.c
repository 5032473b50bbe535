/* The matrix product of experts on a CPU, as an XLA custom call: each group of tokens times the group's weight.
 *
 * y [T, O] = x [T, I] by weight [X, O, I]. Group i is the next sizes[i] rows of x, sizes [X] int32; rows after the
 * last group give zeros. A group without tokens does not read its weight, and one with up to a panel's tokens reads it
 * once. A token's result is that of linear.c for its group.
 */

#include "product.h" /* before groups.h, which takes Product */

#include "groups.h"

static void do_item(Work *work, int item) {
  Group *group = group_of((Grouped *)work, item);
  if (!do_part(&group->product, item - group->first_item)) work->failed = true;
}

XLA_FFI_Error *grouped(XLA_FFI_CallFrame *frame) {
  if (asked_what_it_is(frame)) return NULL;
  const XLA_FFI_Buffer *x = argument(frame, 0), *weight = argument(frame, 1);
  const int32_t *sizes = argument(frame, 2)->data;
  const size_t most_tokens = x->dims[0], n_in = x->dims[1], n_experts = weight->dims[0], n_out = weight->dims[1];
  size_t n_groups = 0, n_tokens = 0, n_wide = 0;
  for (size_t i = 0; i < n_experts; i++) {
    const size_t size = group_size(sizes, i, most_tokens - n_tokens);
    n_groups += size > 0;
    n_tokens += size;
    n_wide += n_widened(size, n_in);
  }
  x_type *y = result(frame, 0)->data;
  memset(y + n_tokens * n_out, 0, (most_tokens - n_tokens) * n_out * sizeof *y);
  if (!n_tokens) return NULL;
  Grouped *all = malloc(sizeof *all + n_groups * sizeof(Group) + n_wide * sizeof(float));
  if (!all) return no_memory(frame);
  all->work.do_item = do_item;
  all->n_groups = n_groups;
  const size_t n_threads = count_threads(frame), n_wanted = (ITEMS * n_threads + n_groups - 1) / n_groups;
  float *widened = (float *)(all->groups + n_groups);
  Group *group = all->groups;
  size_t n_items = 0, token = 0;
  double worth = 0;
  for (size_t i = 0; i < n_experts; i++) {
    const size_t size = group_size(sizes, i, most_tokens - token);
    if (!size) continue;
    group->first_item = n_items;
    group->product = (Product){.x = (const x_type *)x->data + token * n_in,
                               .weight = (const weight_type *)weight->data + i * n_out * n_in,
                               .y = y + token * n_out,
                               .n_tokens = size,
                               .n_in = n_in,
                               .n_out = n_out};
    n_items += cut(&group->product, n_wanted, 1);
    take_x(&group->product, widened);
    worth += threads_worth(&group->product);
    widened += n_widened(size, n_in);
    token += size;
    group++;
  }
  all->work.n_items = n_items;
  return do_all(&all->work, frame, worth < n_threads ? worth : n_threads);
}

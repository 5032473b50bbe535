/* The experts of a mixture on a CPU, as an XLA custom call: everything after the router's choice.
 *
 * A token's y [T, H] is the sum over its k experts of the expert's weight times down (silu(gate) * up); gate and up
 * are the halves of the expert's first product. x [T, H]; weights [T, k] float32; chosen [T, k] int32, where numbers
 * outside 0 to X - 1 add nothing; up [X, 2 F, H]; down [X, H, F]. The further results are memory to work in: rows
 * [T k, H], inner [2, T k, F], outer [T k, H].
 *
 * Rows are the choices sorted by expert; an expert's rows are a group. A group's inner products wait for its x, its
 * outer products for all its inner ones, and the sums for all outer ones. Threads take items in this order, so
 * whatever an item waits for is done or under way. A row's products are those of grouped.c, to the bit.
 */

#include "product.h"

typedef struct {
  Product gate, up, down;
  size_t first_row, first_inner, first_outer; /* the group's first row and items */
  size_t n_inner;                             /* items of gate and up */
  float *widened;                             /* x of gate and up, then of down */
  atomic_int inner_done;
  atomic_bool is_gathered, has_inner;
} Group;

typedef struct {
  Work work;
  const x_type *x;
  const float *weights;
  x_type *rows, *outer, *y;
  size_t n_tokens, top_k, hidden;
  size_t n_groups, n_inner, n_outer, n_sums; /* items */
  int32_t *token_of;                         /* each row's token */
  int32_t *row_of;                           /* each choice's row, or -1 */
  atomic_int outer_done;
  Group groups[]; /* groups with rows; the two arrays and widened x follow */
} Mixture;

/* The group of a phase's item; `first` is the offset in Group of the phase's first item. */
static Group *group_of(Mixture *m, size_t item, size_t first) {
  size_t low = 0, high = m->n_groups;
  while (high - low > 1) {
    const size_t middle = (low + high) / 2;
    if (*(const size_t *)((const char *)(m->groups + middle) + first) <= item) low = middle;
    else high = middle;
  }
  return m->groups + low;
}

static void gather(const Mixture *m, Group *group) {
  Product *gate = &group->gate;
  for (size_t i = 0; i < gate->n_tokens; i++) {
    const size_t row = group->first_row + i;
    memcpy(m->rows + row * m->hidden, m->x + m->token_of[row] * m->hidden, m->hidden * sizeof(x_type));
  }
  take_x(gate, group->widened);
  group->up.few_x = gate->few_x;
  atomic_store(&group->is_gathered, true);
}

/* Replaces gate by silu(gate) * up. */
static void activate(const Group *group, size_t item) {
  const Product *gate = &group->gate;
  const Part part = part_of(gate, item);
  for (size_t token = part.first_token; token < part.end_token; token++)
    for (size_t out = part.start; out < part.end; out += LANES) {
      x_type *at = gate->y + token * gate->n_out + out;
      const vec x = load(at), e = exponential((vec)((ivec)x | INT32_MIN)); /* e^-|x| */
      const vec sigmoid = choose(x < all(0), e, all(1)) / (all(1) + e);
      store(at, x * sigmoid * load(group->up.y + token * gate->n_out + out));
    }
}

/* Sums the experts' results for some tokens. */
static void add_up(const Mixture *m, size_t item) {
  const size_t end = m->n_tokens * (item + 1) / m->n_sums;
  for (size_t token = m->n_tokens * item / m->n_sums; token < end; token++)
    for (size_t at = 0; at < m->hidden; at += LANES) {
      vec sum = all(0);
      for (size_t i = token * m->top_k; i < (token + 1) * m->top_k; i++)
        if (m->row_of[i] >= 0) sum += all(m->weights[i]) * load(m->outer + m->row_of[i] * m->hidden + at);
      store(m->y + token * m->hidden + at, sum);
    }
}

static void do_item(Work *work, int number) {
  Mixture *m = (Mixture *)work;
  size_t item = number;
  if (item < m->n_groups) {
    gather(m, m->groups + item);
    return;
  }
  item -= m->n_groups;
  if (item < m->n_inner) {
    Group *group = group_of(m, item, offsetof(Group, first_inner));
    item -= group->first_inner;
    while (!atomic_load(&group->is_gathered)) sched_yield();
    if (do_part(&group->gate, item) && do_part(&group->up, item)) activate(group, item);
    else work->failed = true;
    if (atomic_fetch_add(&group->inner_done, 1) + 1 < (int)group->n_inner) return;
    take_x(&group->down, group->widened + n_widened(group->down.n_tokens, m->hidden));
    atomic_store(&group->has_inner, true);
    return;
  }
  item -= m->n_inner;
  if (item < m->n_outer) {
    Group *group = group_of(m, item, offsetof(Group, first_outer));
    while (!atomic_load(&group->has_inner)) sched_yield();
    if (!do_part(&group->down, item - group->first_outer)) work->failed = true;
    atomic_fetch_add(&m->outer_done, 1);
    return;
  }
  while (atomic_load(&m->outer_done) < (int)m->n_outer) sched_yield();
  add_up(m, item - m->n_outer);
}

/* Sorts the choices by expert. `rows` has each expert's number of rows, and afterwards the end of its rows. */
static void sort(Mixture *m, const int32_t *chosen, size_t *rows, size_t n_experts) {
  const size_t n_choices = m->n_tokens * m->top_k;
  for (size_t expert = 0, first = 0; expert < n_experts; expert++) {
    const size_t size = rows[expert];
    rows[expert] = first;
    first += size;
  }
  for (size_t i = 0; i < n_choices; i++) {
    const bool is_here = (uint32_t)chosen[i] < n_experts;
    m->row_of[i] = is_here ? (int32_t)rows[chosen[i]]++ : -1;
    if (is_here) m->token_of[m->row_of[i]] = i / m->top_k;
  }
}

XLA_FFI_Error *mixture(XLA_FFI_CallFrame *frame) {
  if (asked_what_it_is(frame)) return NULL;
  const XLA_FFI_Buffer *x = argument(frame, 0), *up = argument(frame, 3), *down = argument(frame, 4);
  const int32_t *chosen = argument(frame, 2)->data;
  const size_t n_tokens = x->dims[0], top_k = argument(frame, 2)->dims[1], n_choices = n_tokens * top_k;
  const size_t n_experts = down->dims[0], hidden = down->dims[1], size = down->dims[2];
  size_t *rows_of = calloc(n_experts, sizeof *rows_of);
  if (!rows_of) return no_memory(frame);
  for (size_t i = 0; i < n_choices; i++)
    if ((uint32_t)chosen[i] < n_experts) rows_of[chosen[i]]++;
  size_t n_groups = 0, n_wide = 0;
  for (size_t i = 0; i < n_experts; i++) {
    n_groups += rows_of[i] > 0;
    n_wide += n_widened(rows_of[i], hidden + size);
  }
  const size_t n_bytes = sizeof(Mixture) + n_groups * sizeof(Group) + 2 * n_choices * sizeof(int32_t);
  Mixture *m = malloc(n_bytes + n_wide * sizeof(float));
  if (!m) {
    free(rows_of);
    return no_memory(frame);
  }
  *m = (Mixture){.work = {.do_item = do_item}, .x = x->data, .weights = argument(frame, 1)->data,
                 .y = result(frame, 0)->data, .rows = result(frame, 1)->data, .outer = result(frame, 3)->data,
                 .n_tokens = n_tokens, .top_k = top_k, .hidden = hidden, .n_groups = n_groups};
  m->token_of = (int32_t *)(m->groups + n_groups);
  m->row_of = m->token_of + n_choices;
  const size_t n_threads = count_threads(frame), n_wanted = (ITEMS * n_threads + n_groups - 1) / (n_groups + !n_groups);
  x_type *inner = result(frame, 2)->data;
  float *widened = (float *)(m->row_of + n_choices);
  double worth = 0;
  Group *group = m->groups;
  for (size_t i = 0, row = 0; i < n_experts; row += rows_of[i++]) {
    if (!rows_of[i]) continue;
    const weight_type *first = (const weight_type *)up->data + i * 2 * size * hidden;
    *group = (Group){.gate = {.x = m->rows + row * hidden, .weight = first, .y = inner + row * size,
                              .n_tokens = rows_of[i], .n_in = hidden, .n_out = size},
                     .down = {.x = inner + row * size, .weight = (const weight_type *)down->data + i * hidden * size,
                              .y = m->outer + row * hidden, .n_tokens = rows_of[i], .n_in = size, .n_out = hidden},
                     .first_row = row, .first_inner = m->n_inner, .first_outer = m->n_outer, .widened = widened};
    group->n_inner = cut(&group->gate, n_wanted, 1);
    group->up = group->gate; /* the same number, so that a thread transposes x once for both */
    group->up.weight += size * hidden;
    group->up.y += n_choices * size;
    m->n_inner += group->n_inner;
    m->n_outer += cut(&group->down, n_wanted, 1);
    worth += 2 * threads_worth(&group->gate) + threads_worth(&group->down);
    widened += n_widened(rows_of[i], hidden + size);
    group++;
  }
  sort(m, chosen, rows_of, n_experts);
  free(rows_of);
  m->n_sums = least(n_tokens, ITEMS * n_threads);
  m->work.n_items = m->n_groups + m->n_inner + m->n_outer + m->n_sums;
  return do_all(&m->work, frame, worth < n_threads ? worth : n_threads);
}

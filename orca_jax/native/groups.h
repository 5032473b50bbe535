/* Consecutive groups of rows of x, each with a product of its own. The header that defines Product comes first.
 *
 * Group i has sizes[i] rows, sizes [X] int32, as far as there are rows; only groups with rows are kept.
 */

#ifndef ORCA_GROUPS_H
#define ORCA_GROUPS_H

typedef struct {
  size_t first_item;
  Product product;
} Group;

typedef struct {
  Work work;
  size_t n_groups;
  Group groups[]; /* what the products work with follows */
} Grouped;

/* The rows of group i, if `left` rows have no group yet. */
static inline size_t group_size(const int32_t *sizes, size_t i, size_t left) {
  return least(sizes[i] < 0 ? 0 : sizes[i], left);
}

/* The group that an item belongs to. */
static inline Group *group_of(Grouped *all, size_t item) {
  size_t low = 0, high = all->n_groups; /* it is in [low, high) */
  while (high - low > 1) {
    const size_t middle = (low + high) / 2;
    if (all->groups[middle].first_item <= item) low = middle;
    else high = middle;
  }
  return all->groups + low;
}

#endif

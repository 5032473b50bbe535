// The times that the charts and shares are made of: when each stage computed, and of which times the page has no data.

const WORDS = { unseen: "not connected", skipped: "skipped by the server" };
const MOMENT = 1e-9; // seconds

/** The parts { from, to, why } of [from, to] without data, in order. Time that was lost with a worker has data: the engine spent it. */
export function unknownTimes(model, from, to) {
  const { iterations, counts, gaps } = model;
  const oldest = counts.forgotten ? iterations.at(0).issued : -Infinity;
  const known = Math.max(model.knownFrom ?? -Infinity, oldest);
  const before = model.source === "file" ? "not in this file" : "before this page opened";
  const parts = [];
  const put = (begin, end, why) => {
    const part = { from: Math.max(from, begin), to: Math.min(to, end), why };
    if (part.to > part.from) parts.push(part);
  };
  put(-Infinity, known, known === oldest ? "no longer kept" : before);
  for (const gap of gaps.from((one) => one.to > from)) {
    if (gap.from >= to) break;
    if (WORDS[gap.why]) put(Math.max(known, gap.from), gap.to, WORDS[gap.why]);
  }
  return parts;
}

/** Why there is no data of a moment, or null. */
export function unknownAt(model, time) {
  return unknownTimes(model, time, time + MOMENT).at(0)?.why ?? null;
}

/** What is left of `parts`, pairs of beginning and end in order, outside the `unknown` times. */
export function* outside(parts, unknown) {
  for (const [begin, to] of parts) {
    let from = begin;
    for (const hole of unknown) {
      if (hole.to <= from) continue;
      if (hole.from >= to) break;
      if (hole.from > from) yield [from, hole.from];
      from = hole.to;
    }
    if (to > from) yield [from, to];
  }
}

/** The seconds of pairs of beginning and end. */
export function sum(parts) {
  let seconds = 0;
  for (const [from, to] of parts) seconds += to - from;
  return seconds;
}

/**
 * The times { number, stage, from, to } in which stages computed, in order; those of one stage do not overlap. Worker
 * processes report them. An engine in one process has one stage, whose times are those of the iterations.
 */
export function* stageSpans(model, from = -Infinity, to = Infinity) {
  if (!model.stages.length) {
    const { iterations } = model;
    for (let i = iterations.search((one) => one.returned >= from); i < iterations.length; i++) {
      const one = iterations.at(i);
      if (one.issued > to) return;
      yield { number: one.number, stage: 0, from: beginning(iterations, i), to: one.returned };
    }
    return;
  }
  const free = new Map(); // an iteration that is received early waits for the one before it
  for (const one of model.stages) {
    const begin = Math.max(one.from, free.get(one.stage) ?? -Infinity);
    const end = one.to ?? returnOf(model, one.number, begin);
    if (end === null) continue;
    free.set(one.stage, end);
    if (end >= from && begin <= to) yield { number: one.number, stage: one.stage, from: begin, to: end };
  }
}

/** When iteration `i` began to compute: with several in flight, when the one before it returned. */
export function beginning(iterations, i) {
  return Math.max(iterations.at(i).issued, i > 0 ? iterations.at(i - 1).returned : -Infinity);
}

// The last stage reports no end: it sends the tokens, and with them the iteration returns.
function returnOf({ iterations }, number, begin) {
  const isIt = number === null ? (one) => one.returned > begin : (one) => one.number >= number;
  const one = iterations.at(iterations.search(isIt));
  return one && (number === null || one.number === number) ? one.returned : null;
}

/** The number of stages. */
export function nStages(model) {
  return model.stages.length ? (model.sizes.n_workers ?? 1) : 1;
}

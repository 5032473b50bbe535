// The times of which the page has no data: they are neither work nor bubbles, and count in no share.

const WORDS = { unseen: "not connected", skipped: "skipped by the server" };
const MOMENT = 1e-9; // seconds

/** The parts { from, to, why } of [from, to] without data, in order. Lost iterations are no such part: their time is the engine's. */
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
  for (let i = gaps.search((gap) => gap.to > from); i < gaps.length && gaps.at(i).from < to; i++) {
    const gap = gaps.at(i);
    if (WORDS[gap.why]) put(Math.max(known, gap.from), gap.to, WORDS[gap.why]);
  }
  return parts;
}

/** Why there is no data of a moment, or null. */
export function unknownAt(model, time) {
  return unknownTimes(model, time, time + MOMENT).at(0)?.why ?? null;
}

/** What is left of `parts`, pairs of a beginning and an end in order, without the `unknown` ones. */
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

/** The seconds of such pairs. */
export function sum(parts) {
  let seconds = 0;
  for (const [from, to] of parts) seconds += to - from;
  return seconds;
}

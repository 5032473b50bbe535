// When each stage computed, from the reports of worker processes; in one process, from the iterations.

/** The spans { number, stage, from, to } in order of time, of one stage after the other where they overlap. */
export function* stageSpans(model, from = -Infinity, to = Infinity) {
  if (model.stages.length) {
    const free = new Map(); // an iteration that is received early waits for the one before it
    for (let i = 0; i < model.stages.length; i++) {
      const one = model.stages.at(i);
      const begin = Math.max(one.from, free.get(one.stage) ?? -Infinity);
      const end = one.to ?? returnOf(model, one.number, begin);
      if (end === null) continue;
      free.set(one.stage, end);
      if (end >= from && begin <= to) yield { number: one.number, stage: one.stage, from: begin, to: end };
    }
    return;
  }
  const { iterations } = model;
  for (let i = iterations.search((one) => one.returned >= from); i < iterations.length; i++) {
    const one = iterations.at(i);
    if (one.issued > to) return;
    const before = i > 0 ? iterations.at(i - 1).returned : -Infinity;
    yield { number: one.number, stage: 0, from: Math.max(one.issued, before), to: one.returned };
  }
}

// The last stage reports no end of its own: it sends the tokens, with which the iteration returns.
function returnOf({ iterations }, number, begin) {
  const isIt = number === null ? (one) => one.returned > begin : (one) => one.number >= number;
  const one = iterations.at(iterations.search(isIt));
  return one && (number === null || one.number === number) ? one.returned : null;
}

/** How many stages there are. */
export function nStages(model) {
  return model.stages.length ? (model.sizes.n_workers ?? 1) : 1;
}

// `window.orcaLive`: copies of what the page shows, to read from the console or a test.

import { savedLines } from "./file.js";
import { PHASES } from "./model.js";
import { traceOf } from "./perfetto.js";
import { unknownTimes } from "./times.js";
import { inFull, inShort, waitReasons, whyNow } from "./why.js";

export function publish({ model, view, frames }) {
  const published = {
    status: () => ({ ...model.status, source: model.source }),
    sizes: () => structuredClone(model.sizes),
    counts: () => ({ ...model.counts }),
    nFrames: () => frames.count,
    view: () => ({ from: view.from, to: view.to, follows: view.follows }),
    iterations: () => [...model.iterations].map(iteration),
    requests: () => [...model.requests.values()].map((one) => request(model, one)),
    stages: () => structuredClone([...model.stages]),
    holds: () => structuredClone([...model.holds]),
    unknown: () => unknownTimes(model, view.from, view.to),
    trace: () => traceOf(model),
    saved: () => [...savedLines(model)],
  };
  Object.defineProperty(window, "orcaLive", { value: Object.freeze(published), writable: false });
}

function iteration({ number, issued, returned, bucket, requests, tokens, phases, slots, waiting, held }) {
  const cells = requests.map((one, i) => ({ request: one, tokens: tokens[i], phase: PHASES[phases[i]] }));
  return { number, issued, returned, bucket, cells, slots, waiting, held };
}

function request(model, one) {
  const why = whyNow(model, one);
  const { number, id, arrived, nInput, maxTokens, priority, nCached, nOutput, nPreempted } = one;
  const { scheduled, firstToken, finished, reason, state } = one;
  return {
    ...{ number, id, arrived, nInput, maxTokens, priority, nCached, nOutput, nPreempted },
    ...{ scheduled, firstToken, finished, reason, state },
    waits: one.waits.map(([from, to]) => ({ from, to, reasons: waitReasons(model, one, from, to ?? model.last) })),
    why: why && { short: inShort(model, one, why), full: inFull(model, one, why) },
    iterations: [...one.rows].map((row) => row.number),
  };
}

// The reasons for which a request waits, in words, and the parts of its time that each of them took.

import { unknownTimes } from "./times.js";

export const WHY = {
  batch: ["batch full", "the batch has no row left"],
  slots: ["slots", "too few slots are free for its keys and values"],
  tokens: ["tokens", "the iteration has no room for its tokens"],
  prefix: ["shared prefix", "another request is computing the beginning of its prompt, which it will share"],
  gate: ["paused", "the operator has stopped admission, or is bringing the engine to rest"],
  alone: ["one runs alone", "a request that may have made a worker die runs alone"],
  transfer: ["transfer", "its prompt is on its way from the server that computed it"],
  disk: ["disk", "the beginning of its prompt is being read from the disk"],
  adapter: ["adapter", "its LoRA adapter is on its way to the devices"],
  phase: ["other phase", "a deterministic engine alternates between prefill and decode"],
  next: ["next iteration", "it arrived after the last batch was chosen"],
  loading: ["loading", "the model is still loading"],
  recovering: ["worker lost", "a worker was lost, and the engine is restarting"],
  paused: ["paused", "the engine's operator has paused it"],
  asleep: ["asleep", "the engine is asleep and has released its memory"],
  failed: ["failed", "the engine has failed"],
  unseen: ["not known", "the page has no data for that time"],
};
const ALL = -1;
const OTHERS = "others";

/**
 * The parts of a request's wait in [from, to] with their reasons: { from, to, why, first }; `first` is the request at
 * the head.
 */
function reasons(model, request, from, to) {
  const unknown = unknownTimes(model, from, to);
  const borders = unknown.flatMap((part) => [part.from, part.to]).filter((time) => time > from && time < to);
  const times = [from, ...borders, ...between(model.held, from, to), ...between(model.moments, from, to)];
  times.push(...between(model.adapters, from, to));
  times.sort((a, b) => a - b);
  const parts = [];
  times.forEach((time, i) => {
    const isUnknown = unknown.some((part) => time >= part.from && time < part.to);
    const why = isUnknown ? { why: "unseen", first: null } : at(model, request, time);
    const part = { ...why, from: time, to: times[i + 1] ?? to };
    const last = parts.at(-1);
    if (last && last.why === part.why && last.first === part.first) last.to = part.to;
    else parts.push(part);
  });
  return parts;
}

/** The same for one waiting request; `first` is null where it is itself at the head. */
export function waitReasons(model, request, from, to) {
  return reasons(model, request, from, to).map((part) => (part.first === request.number ? { ...part, first: null } : part));
}

/**
 * The same with one part for each time after other requests in the queue: `why` is the reason that took longest, and
 * `first` is OTHERS if the head changed.
 */
export function summedReasons(model, request, from, to) {
  const parts = [];
  let shares = null; // seconds by reason of the part that is still growing
  for (const part of waitReasons(model, request, from, to)) {
    const last = parts.at(-1);
    const goesOn = shares !== null && part.first !== null;
    if (goesOn) {
      if (part.first !== last.first) last.first = OTHERS;
      last.to = part.to;
    } else {
      parts.push({ ...part });
      shares = part.first === null ? null : new Map();
    }
    if (!shares) continue;
    shares.set(part.why, (shares.get(part.why) ?? 0) + part.to - part.from);
    parts.at(-1).why = [...shares].reduce((most, one) => (one[1] > most[1] ? one : most))[0];
  }
  return parts;
}

/** Why a request waits now, or null. */
export function whyNow(model, request) {
  if (!request.isWaiting) return null;
  const wait = request.waits.at(-1);
  return waitReasons(model, request, Math.max(wait[0], model.last), model.last).at(-1);
}

/** A reason in a few words, for a bar. */
export function inShort(model, request, { why, first }) {
  const short = WHY[why]?.[0] ?? why;
  if (first === null) return short;
  if (first === OTHERS) return `behind others: ${short}`;
  return `${goesByPriority(model, request, first) ? "priority, " : ""}behind #${first}: ${short}`;
}

/** A reason as a sentence. */
export function inFull(model, request, { why, first }) {
  const full = WHY[why]?.[1] ?? why;
  if (first === null) return full;
  if (first === OTHERS) return `the requests before it wait, most of the time because ${full}`;
  const reason = goesByPriority(model, request, first) ? "has a higher priority" : "is before it";
  return `request #${first} ${reason} and waits: ${full}`;
}

function goesByPriority(model, request, first) {
  return model.sizes.scheduling_policy === "priority" && model.requests.get(first)?.priority < request.priority;
}

function at(model, request, time) {
  const moment = latest(model.moments, time);
  if (moment && WHY[moment.phase]) return { why: moment.phase, first: null };
  if (latest(model.adapters, time)?.waiting.includes(request.number)) return { why: "adapter", first: null };
  const held = latest(model.held, time)?.held ?? null;
  if (held === null) return { why: "next", first: null };
  const [first, why] = held;
  return { why, first: first === ALL ? null : first };
}

function latest(queue, time) {
  return queue.at(queue.search((entry) => entry.time > time) - 1);
}

function between(queue, from, to) {
  const times = [];
  for (let i = queue.search((entry) => entry.time > from); i < queue.length && queue.at(i).time < to; i++)
    times.push(queue.at(i).time);
  return times;
}

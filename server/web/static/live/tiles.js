// The numbers over the charts, of the part of the time that is in view.

import { count, duration, percent } from "./format.js";
import { DECODE } from "./request.js";
import { outside, sum, unknownTimes } from "./unknown.js";

export class Tiles {
  constructor({ place, model, view }) {
    Object.assign(this, { model, view });
    this.values = new Map([...place.querySelectorAll("[data-tile]")].map((tile) => [tile.dataset.tile, tile]));
  }

  update() {
    const { running, waiting, tokens, iterations, batch, padding, first } = numbersOf(this.model, this.view);
    this.#show("running", count(running));
    this.#show("waiting", count(waiting));
    this.#show("tokens", tokens);
    this.#show("iterations", iterations);
    this.#show("batch", batch);
    this.#show("padding", padding);
    this.#show("first", first);
  }

  #show(name, text) {
    const tile = this.values.get(name);
    if (tile.textContent !== text) tile.textContent = text;
  }
}

/** What is live now, and rates and shares of the iterations in view. */
export function numbersOf(model, view) {
  let [running, waiting, nTokens, nRows, nBucket, n, nGiven] = [0, 0, 0, 0, 0, 0, 0];
  const firsts = [];
  for (const request of model.requests.values()) {
    if (request.isWaiting) waiting += 1;
    else if (request.isLive) running += 1;
    if (request.firstToken >= view.from && request.firstToken <= view.to && request.firstToken !== null)
      firsts.push(request.firstToken - request.arrived);
  }
  const { iterations } = model;
  let to = view.from;
  const begin = iterations.search((one) => one.returned > view.from);
  for (let i = begin; i < iterations.length && iterations.at(i).returned <= view.to; i++) {
    const one = iterations.at(i);
    n += 1;
    nTokens += one.nTokens;
    nBucket += one.bucket;
    nRows += one.requests.length;
    for (let j = 0; j < one.phases.length; j++)
      nGiven += one.phases[j] === DECODE ? one.tokens[j] : one.partial.includes(j) ? 0 : 1;
    to = one.returned;
  }
  const from = Math.max(view.from, iterations.at(0)?.issued ?? view.from);
  const end = view.follows ? to : Math.min(view.to, model.last);
  const seconds = sum(outside([[from, end]], unknownTimes(model, from, end)));
  firsts.sort((a, b) => a - b);
  const rate = (value) => (n && seconds > 0 ? count(Math.round(value / seconds)) : "–");
  return {
    running,
    waiting,
    tokens: rate(nGiven),
    iterations: rate(n),
    batch: n ? (nRows / n).toFixed(1) + (model.sizes.max_batch_size ? ` / ${model.sizes.max_batch_size}` : "") : "–",
    padding: percent(nBucket - nTokens, nBucket),
    first: firsts.length ? duration(firsts[firsts.length >> 1]) : "–",
  };
}

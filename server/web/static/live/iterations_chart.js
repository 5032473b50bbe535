// A column for each iteration, a cell for each of its requests, and the padding up to the bucket.

import { Chart } from "./chart.js";
import { count, duration } from "./format.js";
import { CHUNK, DECODE, PREFILL } from "./request.js";

const COLOURS = { [PREFILL]: "prefill", [CHUNK]: "chunk", [DECODE]: "decode" };
const ON = { [PREFILL]: "onPrefill", [CHUNK]: "onChunk", [DECODE]: "onDecode" };
const WORDS = { [PREFILL]: "prefill", [CHUNK]: "later chunk of the prompt", [DECODE]: "decode" };
const TOP = 8;
const BOTTOM = 6; // the strip of the chosen request
const CELLS = 2.5; // pixels of a column from which on it shows its cells
const LABEL = 13; // pixels that a number needs in a cell

export class IterationsChart extends Chart {
  isLinear = false;
  namesUnknown = true;

  #inView = [];
  #isDimmed = false;

  prepare() {
    const { number } = this.choice;
    this.#inView = this.#shown();
    this.#isDimmed = number !== null && this.#inView.some((one) => one.requests.includes(number));
    this.most = this.#inView.reduce((most, one) => Math.max(most, one.bucket), 8);
  }

  paint(context) {
    const shown = this.#inView;
    if (this.perPixel * CELLS > this.#meanWidth(shown)) this.#paintSums(context, shown);
    else for (const one of shown) this.#paintCells(context, one);
  }

  levels() {
    let last = Infinity;
    for (const level of this.#powers()) {
      const y = this.#y(level);
      if (Math.abs(last - y) < 15) continue;
      this.level(y, count(level));
      last = y;
    }
  }

  at(x, y) {
    const one = this.#iterationAt(this.time(x));
    if (!one) return this.noData(x);
    const nPadding = one.bucket - one.nTokens;
    const lines = [
      `${duration(one.returned - one.issued)} from issue to return`,
      `${one.requests.length} of ${count(this.model.sizes.max_batch_size ?? one.requests.length)} requests`,
      `${count(one.nTokens)} tokens, bucket of ${count(one.bucket)}${nPadding ? `, ${count(nPadding)} padding` : ""}`,
    ];
    if (one.waiting) lines.push(`${one.waiting} waiting`);
    const found = { title: `Iteration ${count(one.number)}`, lines, request: null };
    let below = 0;
    one.requests.forEach((number, i) => {
      const isHere = y <= this.#y(below) && y > this.#y(below + one.tokens[i]);
      below += one.tokens[i];
      if (!isHere) return;
      found.request = number;
      lines.unshift(`#${number} ${WORDS[one.phases[i]]}: ${count(one.tokens[i])} ${one.tokens[i] === 1 ? "token" : "tokens"}`);
    });
    return found;
  }

  #paintCells(context, one) {
    const [x, width] = this.#column(one);
    const wide = width > 5 ? width - 1 : width;
    const chosen = this.choice.number;
    const dim = this.#isDimmed ? 0.3 : 1;
    let below = 0;
    for (let i = 0; i < one.requests.length; i++) {
      const bottom = Math.round(this.#y(below));
      const top = Math.round(this.#y((below += one.tokens[i])));
      const high = Math.max(1, bottom - top - (bottom - top > 2 ? 1 : 0));
      const isChosen = one.requests[i] === chosen;
      context.globalAlpha = isChosen ? 1 : dim;
      context.fillStyle = this.colours[COLOURS[one.phases[i]]];
      context.fillRect(x, top, wide, high);
      if (one.phases[i] === CHUNK && wide > 4) {
        context.fillStyle = this.colours.hatch(context, "onChunk", 6);
        context.globalAlpha *= 0.35;
        context.fillRect(x, top, wide, high);
      }
      if (high >= LABEL && wide > 8 + 6.5 * (1 + String(one.requests[i]).length)) {
        context.globalAlpha = isChosen ? 1 : Math.max(dim, 0.6);
        context.fillStyle = this.colours[ON[one.phases[i]]];
        context.textAlign = "center";
        context.fillText(`#${one.requests[i]}`, x + wide / 2, top + high / 2 + 0.5);
      }
      if (isChosen) this.#strip(context, x, wide);
    }
    context.globalAlpha = Math.max(dim, 0.5);
    if (one.bucket > one.nTokens) this.#padding(context, x, wide, one.nTokens, one.bucket);
    context.globalAlpha = 1;
  }

  // Too narrow for cells: for each pixel the largest iteration, its tokens by phase.
  #paintSums(context, shown) {
    let largest = null;
    let isChosen = false;
    let at = -1;
    let end = -1;
    const put = () => {
      if (!largest) return;
      const width = Math.max(1, Math.round(end) - at); // nothing is left open before the next column
      const sums = [0, 0, 0];
      largest.phases.forEach((phase, i) => (sums[phase] += largest.tokens[i]));
      let below = 0;
      for (const phase of [DECODE, PREFILL, CHUNK]) {
        if (!sums[phase]) continue;
        const bottom = Math.round(this.#y(below));
        const top = Math.round(this.#y((below += sums[phase])));
        context.fillStyle = this.colours[COLOURS[phase]];
        context.fillRect(at, top, width, Math.max(1, bottom - top));
      }
      this.#padding(context, at, width, largest.nTokens, largest.bucket);
      if (isChosen) this.#strip(context, at, width);
    };
    const own = this.choice.number;
    for (const one of shown) {
      const x = Math.round(this.x(one.from));
      if (x !== at) {
        put();
        [largest, at, isChosen] = [one, x, false];
      } else if (one.bucket > largest.bucket) largest = one;
      end = this.x(one.returned);
      isChosen ||= own !== null && one.requests.includes(own);
    }
    put();
  }

  #padding(context, x, width, from, to) {
    const top = Math.round(this.#y(to));
    context.fillStyle = this.colours.padding;
    context.fillRect(x, top, width, Math.round(this.#y(from)) - top);
  }

  #strip(context, x, width) {
    context.fillStyle = this.colours.accent;
    context.globalAlpha = 1;
    context.fillRect(x, this.height - 4, Math.max(1, width), 3);
  }

  // With one batch in flight more than workers, an iteration begins to compute when the one before it returns.
  #start(one, before) {
    return before ? Math.max(one.issued, before.returned) : one.issued;
  }

  #column(one) {
    const x = Math.round(this.x(one.from));
    return [x, Math.max(1, Math.round(this.x(one.returned)) - x)];
  }

  #shown() {
    const { iterations } = this.model;
    const shown = [];
    for (let i = iterations.search((one) => one.returned >= this.view.from); i < iterations.length; i++) {
      const one = iterations.at(i);
      one.from ??= this.#start(one, iterations.at(i - 1));
      if (one.from > this.view.to) break;
      shown.push(one);
    }
    return shown;
  }

  #iterationAt(time) {
    const { iterations } = this.model;
    const one = iterations.at(iterations.search((other) => other.returned >= time));
    return one && (one.from ?? one.issued) <= time + 2 * this.perPixel ? one : null;
  }

  #meanWidth(shown) {
    if (!shown.length) return 1;
    return shown.reduce((sum, one) => sum + one.returned - one.from, 0) / shown.length;
  }

  #y(tokens) {
    const share = tokens / this.most;
    return this.height - BOTTOM - (this.isLinear ? share : Math.sqrt(share)) * (this.height - BOTTOM - TOP);
  }

  #powers() {
    const powers = [];
    for (let level = 1; level < this.most; level *= 2) powers.unshift(level);
    if (this.isLinear) return [this.most, this.most / 2, 0].map(Math.round);
    return [this.most, ...powers];
  }
}

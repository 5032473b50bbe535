// A column for each iteration, a cell for each of its requests, and the padding up to the bucket.

import { Chart } from "./chart.js";
import { count, duration, plural } from "./format.js";
import { CHUNK, DECODE, PHASES, PHASE_WORDS, PREFILL, outputs } from "./model.js";
import { beginning } from "./times.js";

const ON = ["onPrefill", "onChunk", "onDecode"]; // the colours of numbers in cells
const TOP = 8;
const BOTTOM = 6; // for the strip of the chosen request
const CELLS = 2.5; // pixels: wider columns show their cells
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
    for (const level of this.#levels()) {
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
      const kept = one.kept?.get(i);
      const drafted = kept === undefined ? "" : `, ${count(kept)} kept`;
      lines.unshift(`#${number} ${PHASE_WORDS[one.phases[i]]}: ${plural(one.tokens[i], "token")}${drafted}`);
    });
    return found;
  }

  #paintCells(context, one) {
    const x = Math.round(this.x(one.from));
    const width = Math.max(1, Math.round(this.x(one.returned)) - x);
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
      const phase = one.phases[i];
      this.fill(this.colours[PHASES[phase]], x, top, wide, high);
      if (phase === CHUNK && wide > 4) {
        context.globalAlpha *= 0.35;
        this.fill(this.colours.hatch(context, "onChunk", 6), x, top, wide, high);
      }
      const wasted = phase === DECODE ? Math.round(high * (1 - outputs(one, i) / one.tokens[i])) : 0;
      if (wasted > 0) this.fill(this.colours.wasted, x, top, wide, wasted);
      const label = `#${one.requests[i]}`;
      if (high >= LABEL && wide > 8 + 6.5 * label.length) {
        context.globalAlpha = isChosen ? 1 : Math.max(dim, 0.6);
        this.write(label, x + wide / 2, top + high / 2 + 0.5, this.colours[ON[phase]], "center");
      }
      if (isChosen) this.#strip(context, x, wide);
    }
    context.globalAlpha = Math.max(dim, 0.5);
    if (one.bucket > one.nTokens) this.#padding(x, wide, one);
    context.globalAlpha = 1;
  }

  // Columns are too narrow for cells: draw the largest iteration of each pixel, its tokens summed by phase.
  #paintSums(context, shown) {
    let largest = null;
    let isChosen = false;
    let at = -1;
    let end = -1;
    const put = () => {
      if (!largest) return;
      const width = Math.max(1, Math.round(end) - at); // up to the next column
      const sums = [0, 0, 0];
      largest.phases.forEach((phase, i) => (sums[phase] += largest.tokens[i]));
      let below = 0;
      for (const phase of [DECODE, PREFILL, CHUNK]) {
        if (!sums[phase]) continue;
        const bottom = Math.round(this.#y(below));
        const top = Math.round(this.#y((below += sums[phase])));
        this.fill(this.colours[PHASES[phase]], at, top, width, Math.max(1, bottom - top));
      }
      this.#padding(at, width, largest);
      if (isChosen) this.#strip(context, at, width);
    };
    const chosen = this.choice.number;
    for (const one of shown) {
      const x = Math.round(this.x(one.from));
      if (x !== at) {
        put();
        [largest, at, isChosen] = [one, x, false];
      } else if (one.bucket > largest.bucket) largest = one;
      end = this.x(one.returned);
      isChosen ||= chosen !== null && one.requests.includes(chosen);
    }
    put();
  }

  #padding(x, width, { nTokens, bucket }) {
    const top = Math.round(this.#y(bucket));
    this.fill(this.colours.padding, x, top, width, Math.round(this.#y(nTokens)) - top);
  }

  #strip(context, x, width) {
    context.globalAlpha = 1;
    this.fill(this.colours.accent, x, this.height - 4, Math.max(1, width), 3);
  }

  #shown() {
    const { iterations } = this.model;
    const shown = [];
    for (let i = iterations.search((one) => one.returned >= this.view.from); i < iterations.length; i++) {
      const one = iterations.at(i);
      one.from ??= beginning(iterations, i);
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

  // The levels of the axis, the highest first.
  #levels() {
    if (this.isLinear) return [this.most, this.most / 2, 0].map(Math.round);
    const powers = [];
    for (let level = 1; level < this.most; level *= 2) powers.unshift(level);
    return [this.most, ...powers];
  }
}

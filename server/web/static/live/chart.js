// What all charts have: a canvas of the screen's density, an axis of time, gaps, and what is under the pointer.

import { niceStep } from "./format.js";
import { unknownAt, unknownTimes } from "./unknown.js";

export const AXIS = 46; // pixels for numbers at the left
const RIGHT = 10;
const TICK = 90; // pixels between two ticks of time, at least

export class Chart {
  namesUnknown = false; // whether it says why there is no data
  #said = "";

  /** `parts` has the page's model, view, colours and choice. */
  constructor(canvas, parts) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    Object.assign(this, parts);
    this.width = this.height = 0;
    new ResizeObserver(() => this.#resize()).observe(canvas);
    this.#resize();
  }

  get left() {
    return AXIS;
  }

  get right() {
    return this.width - RIGHT;
  }

  x(time) {
    return this.left + ((time - this.view.from) / this.view.span) * (this.right - this.left);
  }

  time(x) {
    return this.view.from + ((x - this.left) / (this.right - this.left)) * this.view.span;
  }

  /** The seconds of a pixel. */
  get perPixel() {
    return this.view.span / Math.max(1, this.right - this.left);
  }

  /** The ticks of time, as { step, times } since the model's origin. */
  ticks() {
    const step = niceStep(TICK * this.perPixel);
    const origin = this.model.origin ?? 0;
    const times = [];
    for (let n = Math.ceil((this.view.from - origin) / step); origin + n * step <= this.view.to; n++)
      if (n >= 0) times.push(n * step);
    return { step, times };
  }

  draw() {
    const { context } = this;
    if (!this.width) return;
    context.clearRect(0, 0, this.width, this.height);
    context.font = `11px ${getComputedStyle(this.canvas).fontFamily}`;
    context.textBaseline = "middle";
    this.prepare();
    this.grid();
    this.levels();
    context.save();
    context.beginPath();
    context.rect(this.left, 0, this.right - this.left, this.height);
    context.clip();
    this.#drawUnknown();
    this.#drawLost();
    this.paint(context);
    context.restore();
    this.frame(context);
    this.#drawPointer();
  }

  /** Lines under the chart. */
  grid() {
    const { context } = this;
    const origin = this.model.origin ?? 0;
    context.fillStyle = this.colours.line;
    for (const time of this.ticks().times) context.fillRect(Math.round(this.x(origin + time)), 0, 1, this.height);
  }

  /** The chart in words. */
  describe(text) {
    if (text !== this.#said) this.canvas.setAttribute("aria-label", text);
    this.#said = text;
  }

  /** What the parts below need to know. */
  prepare() {}

  /** The vertical axis. */
  levels() {}

  paint() {}

  /** What is drawn over the chart and beside it. */
  frame() {}

  /** What is at a point: { title, lines, request }, or null. */
  at() {
    return null;
  }

  /** What `at` says where there is no data; null where there is. */
  noData(x) {
    const why = unknownAt(this.model, this.time(x));
    return why && { title: "No data", lines: [why], request: null };
  }

  /** A number of the vertical axis with its line. */
  level(y, text) {
    const { context } = this;
    context.fillStyle = this.colours.line;
    context.fillRect(this.left, Math.round(y), this.right - this.left, 1);
    context.fillStyle = this.colours.quiet;
    context.textAlign = "right";
    context.fillText(text, this.left - 6, Math.min(this.height - 6, Math.max(6, Math.round(y))));
  }

  #drawUnknown() {
    const { context, model, view } = this;
    for (const { from, to, why } of unknownTimes(model, view.from, view.to)) {
      const x = Math.floor(this.x(from));
      const width = Math.max(2, Math.ceil(this.x(to)) - x);
      context.fillStyle = this.colours.unknown;
      context.fillRect(x, 0, width, this.height);
      if (!this.namesUnknown) continue;
      const fits = (text) => context.measureText(text).width + 16 <= width;
      const text = [`no data: ${why}`, "no data"].find(fits);
      if (!text) continue;
      context.fillStyle = this.colours.quiet;
      context.textAlign = "center";
      context.fillText(text, x + width / 2, this.height / 2);
    }
  }

  #drawLost() {
    const { context, model, view } = this;
    for (let i = model.gaps.search((gap) => gap.to >= view.from); i < model.gaps.length; i++) {
      const gap = model.gaps.at(i);
      if (gap.from > view.to) break;
      if (gap.why !== "lost") continue;
      const x = Math.floor(this.x(gap.from));
      context.fillStyle = this.colours.hatch(context, "gap", 5);
      context.fillRect(x, 0, Math.max(2, Math.ceil(this.x(gap.to)) - x), this.height);
    }
  }

  #drawPointer() {
    const { context, pointer } = this;
    if (pointer.time === null) return;
    const x = Math.round(this.x(pointer.time));
    if (x < this.left || x > this.right) return;
    context.fillStyle = this.colours.strongLine;
    context.globalAlpha = 0.7;
    context.fillRect(x, 0, 1, this.height);
    context.globalAlpha = 1;
  }

  #resize() {
    const { clientWidth, clientHeight } = this.canvas;
    const density = devicePixelRatio || 1;
    this.width = clientWidth;
    this.height = clientHeight;
    this.canvas.width = Math.round(clientWidth * density);
    this.canvas.height = Math.round(clientHeight * density);
    this.context.setTransform(density, 0, 0, density, 0, 0);
    this.changed();
  }
}

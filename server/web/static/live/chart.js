// The base of all charts: a canvas of the screen's density, the axis of time, the times without data, and the pointer; the
// ruler above them; and the frames in which all of them are drawn.

import { duration, moment, niceStep } from "./format.js";
import { unknownAt, unknownTimes } from "./times.js";

const AXIS = 46; // pixels for numbers at the left
const RIGHT = 10;
const TICK = 90; // pixels between two ticks of time, at least
const MARK = 5; // pixels: the height of a hold on the ruler, and its least width
const TEXT = 200; // milliseconds between two changes of the texts

export class Chart {
  namesUnknown = false; // whether it says why there is no data
  #described = "";

  /** `parts` has the page's model, view, colours, choice and pointer, and `changed`. */
  constructor(canvas, parts) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    Object.assign(this, parts);
    this.left = AXIS;
    this.width = this.height = 0;
    new ResizeObserver(() => this.#resize()).observe(canvas);
    this.#resize();
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

  /** The ticks of time, as { step, times }; the times count from the model's origin, and x(origin + time) is their place. */
  ticks() {
    const step = niceStep(TICK * this.perPixel);
    const origin = this.model.origin ?? 0;
    const times = [];
    for (let n = Math.ceil((this.view.from - origin) / step); origin + n * step <= this.view.to; n++)
      if (n >= 0) times.push(n * step);
    return { step, times, origin };
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

  /** Draw vertical lines at the ticks of time, `height` pixels from the bottom. */
  grid(height = this.height, colour = this.colours.line) {
    const { times, origin } = this.ticks();
    for (const time of times) this.fill(colour, Math.round(this.x(origin + time)), this.height - height, 1, height);
  }

  /** Describe the chart to a screen reader. */
  describe(text) {
    if (text !== this.#described) this.canvas.setAttribute("aria-label", text);
    this.#described = text;
  }

  /** Compute what the methods below need. */
  prepare() {}

  /** Draw the vertical axis. */
  levels() {}

  paint() {}

  /** Draw the labels, over the chart or in its margin. */
  frame() {}

  /** Describe a point: { title, lines, request }, or null. */
  at() {
    return null;
  }

  /** Describe a point without data; null where there is data. */
  noData(x) {
    const why = unknownAt(this.model, this.time(x));
    return why && { title: "No data", lines: [why], request: null };
  }

  fill(colour, x, y, width, height) {
    this.context.fillStyle = colour;
    this.context.fillRect(x, y, width, height);
  }

  write(text, x, y, colour, align) {
    this.context.fillStyle = colour;
    this.context.textAlign = align;
    this.context.fillText(text, x, y);
  }

  /** Draw a number of the vertical axis with its line. */
  level(y, text) {
    this.fill(this.colours.line, this.left, Math.round(y), this.right - this.left, 1);
    const at = Math.min(this.height - 6, Math.max(6, Math.round(y)));
    this.write(text, this.left - 6, at, this.colours.quiet, "right");
  }

  // Where times without data lie: the left pixel and the width.
  #span({ from, to }) {
    const x = Math.floor(this.x(from));
    return [x, Math.max(2, Math.ceil(this.x(to)) - x)];
  }

  #drawUnknown() {
    for (const part of unknownTimes(this.model, this.view.from, this.view.to)) {
      const [x, width] = this.#span(part);
      this.fill(this.colours.unknown, x, 0, width, this.height);
      if (!this.namesUnknown) continue;
      const fits = (text) => this.context.measureText(text).width + 16 <= width;
      const text = [`no data: ${part.why}`, "no data"].find(fits);
      if (text) this.write(text, x + width / 2, this.height / 2, this.colours.quiet, "center");
    }
  }

  #drawLost() {
    for (const gap of this.model.gaps.from((one) => one.to >= this.view.from)) {
      if (gap.from > this.view.to) break;
      if (gap.why !== "lost") continue;
      const [x, width] = this.#span(gap);
      this.fill(this.colours.hatch(this.context, "gap", 5), x, 0, width, this.height);
    }
  }

  #drawPointer() {
    if (this.pointer.time === null) return;
    const x = Math.round(this.x(this.pointer.time));
    if (x < this.left || x > this.right) return;
    this.context.globalAlpha = 0.7;
    this.fill(this.colours.strongLine, x, 0, 1, this.height);
    this.context.globalAlpha = 1;
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

/** The axis of time above the charts, with marks where the server's event loop or GIL was held. */
export class RulerChart extends Chart {
  paint(context) {
    context.fillStyle = this.colours.bad;
    for (const { from, to } of this.#holds(this.view.from, this.view.to)) {
      const x = Math.floor(this.x(from));
      context.fillRect(x, 0, Math.max(MARK, Math.ceil(this.x(to)) - x), MARK);
    }
  }

  at(x) {
    const [hold] = this.#holds(this.time(x - MARK), this.time(x));
    if (!hold) return null;
    const what = hold.what === "gil" ? "The GIL" : "The event loop";
    const lines = ["no client was answered meanwhile; the server's log has the call"];
    return { title: `${what} was held for ${duration(hold.to - hold.from)}`, lines, request: null };
  }

  *#holds(from, to) {
    const { holds } = this.model;
    for (let i = holds.search((hold) => hold.to >= from); i < holds.length; i++)
      if (holds.at(i).from <= to) yield holds.at(i);
  }

  frame() {
    const { step, times, origin } = this.ticks();
    for (const time of times) {
      const x = Math.round(this.x(origin + time)) + 5;
      const text = moment(time, step);
      const fits = x + this.context.measureText(text).width < this.right;
      if (fits) this.write(text, x, this.height / 2, this.colours.quiet, "left");
    }
  }

  grid() {
    super.grid(7, this.colours.strongLine);
  }
}

/** Draws after a change, at most once a frame, and never while the page is hidden. Texts change less often, so that people can read them. */
export class Frames {
  #draw;
  #describe;
  #isAsked = false;
  #isHurried = false;
  #described = -Infinity;
  #later = null;
  count = 0; // frames that were drawn

  constructor(draw, describe) {
    this.#draw = draw;
    this.#describe = describe;
    document.addEventListener("visibilitychange", () => document.hidden || this.changed(true));
  }

  /** Draw soon, after a change; with `isHurried` the texts follow at once. */
  changed(isHurried = false) {
    this.#isHurried ||= isHurried;
    if (this.#isAsked || document.hidden) return;
    this.#isAsked = true;
    requestAnimationFrame(() => this.#frame());
  }

  #frame() {
    const now = performance.now();
    if (this.#isHurried || now - this.#described >= TEXT) {
      this.#described = now;
      this.#isHurried = false;
      this.#describe();
    } else {
      this.#later ??= setTimeout(() => {
        this.#later = null;
        this.changed();
      }, TEXT);
    }
    this.#draw();
    this.count += 1;
    this.#isAsked = false; // after drawing, which moves the view
  }
}

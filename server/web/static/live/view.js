// The part of the time that the charts show.

const LEAST = 1e-4; // seconds across a chart
const MOST = 86400;
const AHEAD = 0.02; // of the span, to the right of the newest iteration while following
const FIRST_SPAN = 4;

export class View {
  #changed;

  constructor(changed) {
    this.#changed = changed;
    this.follows = true;
    this.isChosen = false; // the user has chosen the span
    this.from = 0;
    this.to = FIRST_SPAN;
  }

  get span() {
    return this.to - this.from;
  }

  /** While following: move so that the newest time is at the right. */
  keepUp(model) {
    if (!this.follows || model.origin === null) return;
    const span = this.span;
    const to = Math.max(model.last + AHEAD * span, model.origin + span);
    if (to === this.to) return;
    this.#set(to - span, to);
  }

  follow(isOn) {
    this.follows = isOn;
    this.#changed();
  }

  /** Make the span `factor` times as long around a time; while following, around the newest. */
  zoom(factor, around = this.follows ? this.to : (this.from + this.to) / 2) {
    const span = Math.min(MOST, Math.max(LEAST, this.span * factor));
    const share = (around - this.from) / this.span;
    this.isChosen = true;
    this.#set(around - share * span, around + (1 - share) * span);
  }

  /** Move by a part of the span. */
  pan(share) {
    this.follows = false;
    this.#set(this.from + share * this.span, this.to + share * this.span);
  }

  /** Show some of [from, to], in the middle if none of it is in view. */
  reveal(from, to) {
    if (to >= this.from && from <= this.to) return;
    this.follows = false;
    const middle = (from + Math.min(to, from + this.span)) / 2;
    this.#set(middle - this.span / 2, middle + this.span / 2);
  }

  /** Show everything that a model has. */
  fit(model) {
    if (model.origin === null) return;
    const from = model.counts.forgotten ? model.iterations.at(0).issued : model.origin;
    const margin = Math.max(LEAST, (model.last - from) * 0.02);
    this.follows = false;
    this.isChosen = true;
    this.#set(from - margin, model.last + margin);
  }

  /** Until the user chooses a span: choose one in which an iteration is some pixels wide. */
  suit(model) {
    if (this.isChosen || model.iterations.length < 20) return;
    const n = Math.min(200, model.iterations.length);
    const first = model.iterations.at(model.iterations.length - n);
    const each = (model.last - first.issued) / n;
    const span = Math.min(20, Math.max(0.5, 140 * each));
    if (span > this.span * 1.5 || span < this.span / 1.5) this.#set(this.to - span, this.to);
  }

  #set(from, to) {
    this.from = from;
    this.to = to;
    this.#changed();
  }
}

// Draws at most once a frame, only after a change, and never while the page is hidden.

const TEXT = 200; // milliseconds between two changes of the texts

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

  /** Something is different; with `isHurried` the texts follow at once. */
  changed(isHurried = false) {
    this.#isHurried ||= isHurried;
    if (this.#isAsked || document.hidden) return;
    this.#isAsked = true;
    requestAnimationFrame(() => this.#frame());
  }

  #frame() {
    const now = performance.now();
    const isDue = this.#isHurried || now - this.#described >= TEXT;
    if (isDue) {
      this.#described = now;
      this.#isHurried = false;
      this.#describe();
    } else this.#later ??= setTimeout(() => this.#catchUp(), TEXT);
    this.#draw();
    this.count += 1;
    this.#isAsked = false; // after drawing, which moves the view
  }

  #catchUp() {
    this.#later = null;
    this.changed();
  }
}

// The pointer on a chart: numbers under it, a drag that moves the time, a wheel that zooms, a click that chooses.

import { element, replace } from "../dom.js";

const CLICK = 4; // pixels that a click may move
const WHEEL = 0.0022; // how much a step of the wheel zooms
const EDGE = 14;

export class Pointer {
  time = null; // under the pointer, for a line over all charts
  #over = null; // { chart, x, y, clientX, clientY }

  constructor({ tooltip, view, holder, changed, choose }) {
    Object.assign(this, { tooltip, view, holder, changed, choose });
  }

  attach(chart) {
    const { canvas } = chart;
    let drag = null;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      drag = { x: event.clientX, at: event.clientX, hasMoved: false };
      if (event.pointerType !== "touch") canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (drag && (drag.hasMoved || Math.abs(event.clientX - drag.x) > CLICK)) {
        drag.hasMoved = true;
        canvas.classList.add("is-dragged");
        this.view.pan((drag.at - event.clientX) / (chart.right - chart.left));
        drag.at = event.clientX;
      }
      this.#move(chart, event);
    });
    canvas.addEventListener("pointerup", (event) => {
      if (drag && !drag.hasMoved) this.#click(chart, event);
      drag = null;
      canvas.classList.remove("is-dragged");
    });
    for (const name of ["pointerleave", "pointercancel"])
      canvas.addEventListener(name, () => {
        drag = null;
        canvas.classList.remove("is-dragged");
        this.#leave();
      });
    canvas.addEventListener("wheel", (event) => this.#wheel(chart, event), { passive: false });
  }

  /** Show what is under the pointer now, after a chart has been drawn again. */
  update() {
    if (!this.#over) return;
    const { chart, x, y } = this.#over;
    this.time = x >= chart.left && x <= chart.right ? chart.time(x) : null;
    this.#tell(chart.at(x, y));
  }

  #move(chart, event) {
    this.#over = { chart, x: event.offsetX, y: event.offsetY, clientX: event.clientX, clientY: event.clientY };
    this.update();
    this.changed();
  }

  #leave() {
    this.#over = null;
    this.time = null;
    this.tooltip.hidden = true;
    this.changed();
  }

  #click(chart, event) {
    this.choose(chart.at(event.offsetX, event.offsetY)?.request ?? null);
  }

  // The page scrolls with the wheel, so it zooms only with Ctrl, or once somebody is at work in the charts.
  #wheel(chart, event) {
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      const delta = event.deltaX || event.deltaY;
      this.view.pan(delta / (chart.right - chart.left));
    } else if (event.ctrlKey || event.metaKey || document.activeElement === this.holder) {
      event.preventDefault();
      const lines = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 16 : 1;
      this.view.zoom(Math.exp(event.deltaY * lines * WHEEL), this.view.follows ? undefined : chart.time(event.offsetX));
    }
  }

  #tell(found) {
    this.tooltip.hidden = !found;
    if (!found) return;
    const lines = found.lines.map((line) => element("div", {}, line));
    replace(this.tooltip, element("strong", {}, found.title), ...lines);
    const { clientX, clientY } = this.#over;
    const { offsetWidth: width, offsetHeight: height } = this.tooltip;
    const left = clientX + EDGE + width > innerWidth ? clientX - EDGE - width : clientX + EDGE;
    const top = clientY + EDGE + height > innerHeight ? clientY - EDGE - height : clientY + EDGE;
    this.tooltip.style.left = `${Math.max(4, left)}px`;
    this.tooltip.style.top = `${Math.max(4, top)}px`;
  }
}

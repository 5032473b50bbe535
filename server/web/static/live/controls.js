// What the user does: buttons and keys, files that are opened or dropped, and the pointer on the charts.

import { element, replace } from "../dom.js";

const ZOOM = 1.5;
const STEP = 0.15; // of the span, for an arrow
const CLICK = 4; // pixels by which the pointer may move in a click
const WHEEL = 0.0022; // zoom for each step of the wheel
const EDGE = 14; // pixels between the pointer and the tooltip

/** Connect the page's controls with `act`, an object of functions by name; `get(id)` finds an element. */
export function connectControls(get, act, view) {
  const clicks = {
    pause: act.pause,
    follow: () => act.follow(!view.follows),
    "zoom-in": () => view.zoom(1 / ZOOM),
    "zoom-out": () => view.zoom(ZOOM),
    fit: act.fit,
    open: () => get("file").click(),
    save: act.save,
    perfetto: act.perfetto,
    scale: act.scale,
  };
  for (const [id, click] of Object.entries(clicks)) get(id).addEventListener("click", click);
  get("file").addEventListener("change", (event) => {
    const [file] = event.target.files;
    event.target.value = ""; // so that the same file may be opened again
    if (file) act.open(file);
  });
  get("filter").addEventListener("change", (event) => act.filter(event.target.value));
  addEventListener("keydown", (event) => key(event, get("charts"), act, view));
  connectDrops(get("charts"), act);
}

function key(event, charts, act, view) {
  const isInCharts = charts.contains(event.target);
  const isOurs = isInCharts || event.target === document.body || event.target.id === "main";
  if (event.key === "Escape" && !event.defaultPrevented) return act.choose(null);
  if (!isOurs || event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("button, select, input, a, summary")) return;
  const keys = {
    ArrowLeft: () => view.pan(-STEP),
    ArrowRight: () => view.pan(STEP),
    "+": () => view.zoom(1 / ZOOM),
    "=": () => view.zoom(1 / ZOOM),
    "-": () => view.zoom(ZOOM),
    0: act.fit,
    f: () => act.follow(!view.follows),
    " ": act.pause,
    ArrowUp: () => act.neighbour(event),
    ArrowDown: () => act.neighbour(event),
  };
  // The page scrolls with these keys unless the focus is in the charts.
  const isScroll = ["ArrowUp", "ArrowDown", " "].includes(event.key) && !isInCharts;
  if (!Object.hasOwn(keys, event.key) || isScroll) return;
  event.preventDefault();
  keys[event.key]();
}

function connectDrops(charts, act) {
  const mark = (isOn) => charts.classList.toggle("is-target", isOn);
  addEventListener("dragover", (event) => {
    event.preventDefault();
    mark(true);
  });
  addEventListener("dragleave", () => mark(false));
  addEventListener("drop", (event) => {
    event.preventDefault();
    mark(false);
    const [file] = event.dataTransfer.files;
    if (file) act.open(file);
  });
}

/** The pointer on the charts: a tooltip under it, a drag moves the time, the wheel zooms, a click chooses a request. */
export class Pointer {
  time = null; // the time under the pointer, where all charts draw a line
  #over = null; // { chart, x, y, clientX, clientY }

  constructor({ tooltip, view, holder, changed, choose }) {
    Object.assign(this, { tooltip, view, holder, changed, choose });
  }

  attach(chart) {
    const { canvas } = chart;
    let drag = null;
    const drop = () => {
      drag = null;
      canvas.classList.remove("is-dragged");
    };
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
      this.#over = { chart, x: event.offsetX, y: event.offsetY, clientX: event.clientX, clientY: event.clientY };
      this.update();
      this.changed();
    });
    canvas.addEventListener("pointerup", (event) => {
      if (drag && !drag.hasMoved) this.choose(chart.at(event.offsetX, event.offsetY)?.request ?? null);
      drop();
    });
    for (const name of ["pointerleave", "pointercancel"])
      canvas.addEventListener(name, () => {
        drop();
        this.#over = this.time = null;
        this.tooltip.hidden = true;
        this.changed();
      });
    canvas.addEventListener("wheel", (event) => this.#wheel(chart, event), { passive: false });
  }

  /** Show what is under the pointer now that a chart has been drawn again. */
  update() {
    if (!this.#over) return;
    const { chart, x, y } = this.#over;
    this.time = x >= chart.left && x <= chart.right ? chart.time(x) : null;
    this.#show(chart.at(x, y));
  }

  // The page scrolls with the wheel, so it zooms only with Ctrl or while the charts have the focus.
  #wheel(chart, event) {
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      this.view.pan((event.deltaX || event.deltaY) / (chart.right - chart.left));
    } else if (event.ctrlKey || event.metaKey || document.activeElement === this.holder) {
      event.preventDefault();
      const lines = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 16 : 1;
      this.view.zoom(Math.exp(event.deltaY * lines * WHEEL), this.view.follows ? undefined : chart.time(event.offsetX));
    }
  }

  #show(found) {
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

// Elements are made here. Text is always text: no function takes HTML.

/** An element. `properties` are attributes; functions are listeners, true and false set and leave out. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  setAll(made, properties);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** An icon of the page's own set, hidden from screen readers: its button has a label. */
export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  svg.setAttribute("viewBox", "0 0 16 16");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** An element with `text`, in which what stands between backticks is code. */
export function withCode(tag, text, properties = {}) {
  const parts = text.split("`").map((part, i) => (i % 2 ? element("code", {}, part) : part));
  return element(tag, properties, ...parts);
}

let nIds = 0;

/** An id that no other element has. */
export function newId() {
  return `e${++nIds}`;
}

/** Forget what `parent` holds and put `children` there. */
export function replace(parent, ...children) {
  parent.replaceChildren(...children.filter((child) => child !== null && child !== undefined));
}

function setAll(made, properties) {
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
}

// Drawn with a line of 1.5 on a grid of 16.
const ICONS = {
  add: "M8 3.5v9M3.5 8h9",
  close: "M4 4l8 8M12 4l-8 8",
  copy: "M5.5 5.5v-2h7v7h-2M3.5 5.5h7v7h-7z",
  down: "M4 6.5l4 4 4-4",
  edit: "M3.5 12.5v-2.2l6.8-6.8 2.2 2.2-6.8 6.8zM9 4.8l2.2 2.2",
  key: "M6.2 9.8l6.3-6.3M10.4 5.6l1.8 1.8M8 8l1.5 1.5M6.6 11.4a2 2 0 1 1-4 0 2 2 0 0 1 4 0z",
  moon: "M12.8 9.6A5.3 5.3 0 0 1 6.4 3.2a5.3 5.3 0 1 0 6.4 6.4z",
  play: "M5 3.5l7.5 4.5L5 12.5z",
  redo: "M12.5 8a4.5 4.5 0 1 1-1.4-3.3M12.5 2.5v2.7H9.8",
  stop: "M4.5 4.5h7v7h-7z",
  sun: "M10.7 8a2.7 2.7 0 1 1-5.4 0 2.7 2.7 0 0 1 5.4 0zM8 1.5v1.4M8 13.1v1.4M1.5 8h1.4M13.1 8h1.4M3.4 3.4l1 1M11.6 11.6l1 1M3.4 12.6l1-1M11.6 4.4l1-1",
  sliders: "M2.5 5h5M10.5 5h3M2.5 11h3M8.5 11h5M10.5 5a1.5 1.5 0 1 1-3 0 1.5 1.5 0 0 1 3 0zM8.5 11a1.5 1.5 0 1 1-3 0 1.5 1.5 0 0 1 3 0z",
};

// Makes and changes the page's elements. Text is always text: no function takes HTML.

const COPIED_MS = 2000;

/**
 * Make an element. `properties` are attributes by name: a function is a listener, true an attribute without a value, and
 * false, null or undefined no attribute. Children that are null or undefined are left out.
 */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  replace(made, ...children);
  return made;
}

/** Make an icon, hidden from screen readers: its button has a label. */
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

/** Make an element with `text`, in which parts between backticks become code. */
export function withCode(tag, text, properties = {}) {
  const parts = text.split("`").map((part, i) => (i % 2 ? element("code", {}, part) : part));
  return element(tag, properties, ...parts);
}

let nIds = 0;

/** Make an id that no other element has. */
export function newId() {
  return `e${++nIds}`;
}

/** Replace the children of `parent`. */
export function replace(parent, ...children) {
  parent.replaceChildren(...children.filter((child) => child !== null && child !== undefined));
}

/** Change an element's text if it is another one, so that selections and screen readers are not disturbed. */
export function setText(place, text) {
  if (place.textContent !== text) place.textContent = text;
}

/** Make a button that shows an icon and is called `label`. */
export function iconButton(name, label, click) {
  const button = element("button", { type: "button", class: "icon-button", click }, icon(name));
  setLabel(button, label);
  return button;
}

/** Change what a button is called. */
export function setLabel(button, label) {
  button.setAttribute("aria-label", label);
  button.title = label;
}

/**
 * Make a button that copies the text which `write` returns. It shows `word` and is called `label`; `refuse` gets the
 * message of an error.
 */
export function copyButton(word, label, write, refuse = announce) {
  const text = document.createTextNode(word);
  async function copy() {
    try {
      await toClipboard(write());
    } catch (error) {
      refuse(error.message);
      return;
    }
    text.data = "Copied";
    announce(`${label}: copied`);
    setTimeout(() => (text.data = word), COPIED_MS);
  }
  const properties = { type: "button", class: "button plain", "aria-label": label, title: label, click: copy };
  return element("button", properties, icon("copy"), text);
}

// Browsers offer navigator.clipboard only to pages that came over TLS or from this machine.
async function toClipboard(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = element("textarea", { class: "unseen", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  if (!copied) throw new Error("the browser allows no copying on a page without TLS");
}

const voice = element("div", { role: "status", class: "unseen" });
document.body.append(voice);

/** Tell screen readers a text; they finish what they are saying first. */
export function announce(text) {
  voice.textContent = text;
}

// Paths on a grid of 16, drawn with a line of 1.5.
const ICONS = {
  close: "M4 4l8 8M12 4l-8 8",
  copy: "M5.5 5.5v-2h7v7h-2M3.5 5.5h7v7h-7z",
  edit: "M3.5 12.5v-2.2l6.8-6.8 2.2 2.2-6.8 6.8zM9 4.8l2.2 2.2",
  key: "M6.2 9.8l6.3-6.3M10.4 5.6l1.8 1.8M8 8l1.5 1.5M6.6 11.4a2 2 0 1 1-4 0 2 2 0 0 1 4 0z",
  moon: "M12.8 9.6A5.3 5.3 0 0 1 6.4 3.2a5.3 5.3 0 1 0 6.4 6.4z",
  play: "M5 3.5l7.5 4.5L5 12.5z",
  redo: "M12.5 8a4.5 4.5 0 1 1-1.4-3.3M12.5 2.5v2.7H9.8",
  stop: "M4.5 4.5h7v7h-7z",
  sun: "M10.7 8a2.7 2.7 0 1 1-5.4 0 2.7 2.7 0 0 1 5.4 0zM8 1.5v1.4M8 13.1v1.4M1.5 8h1.4M13.1 8h1.4M3.4 3.4l1 1M11.6 11.6l1 1M3.4 12.6l1-1M11.6 4.4l1-1",
};

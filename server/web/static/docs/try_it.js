// Sends a request to a route and shows the answer as it comes.

import { request } from "../api.js";
import { element, icon, newId } from "../dom.js";
import { announce } from "../shell.js";
import { exampleBody } from "./example.js";

const MOST_SHOWN = 100_000; // characters of an answer; /live/events has no end

/** The form of a route { path, method }. */
export function tryIt(document, { path, method, operation }) {
  const example = exampleBody(document, path, method);
  const values = (operation.parameters ?? []).map((parameter) => parameterInput(parameter));
  const body = example && bodyInput(example);
  const answer = element("pre", { class: "code answer", tabindex: "0", "aria-label": "Answer", hidden: true });
  const state = element("span", { class: "quiet small" });
  const send = element("button", { class: "button primary" }, icon("play"), "Send");
  const stop = element("button", { type: "button", class: "button", hidden: true, click: () => abort.abort() }, icon("stop"), "Stop");
  let abort = null;

  async function run() {
    abort = new AbortController();
    send.hidden = true;
    stop.hidden = false;
    stop.focus();
    answer.hidden = false;
    answer.textContent = "";
    state.textContent = "sent";
    const start = performance.now();
    let said;
    try {
      const response = await request(filled(path, values), {
        method: method.toUpperCase(),
        ...(body && { headers: { "Content-Type": "application/json" }, body: body.value }),
        signal: abort.signal,
      });
      state.textContent = `${response.status} ${response.statusText}`;
      const whole = await show(response, answer);
      said = `${response.status} ${response.statusText} after ${Math.round(performance.now() - start)} ms${whole}`;
    } catch (error) {
      said = error.name === "AbortError" ? "stopped" : error.message;
    }
    state.textContent = said;
    announce(`${method} ${path}: ${said}`);
    const focused = globalThis.document.activeElement === stop;
    stop.hidden = true;
    send.hidden = false;
    if (focused) send.focus();
  }

  const form = element(
    "form",
    { class: "stack try-form", novalidate: true },
    ...values.map(({ row }) => row),
    body?.row ?? null,
    element("div", { class: "row" }, send, stop, state),
    answer,
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!send.hidden) run();
  });
  return element("details", { class: "try" }, element("summary", {}, "Try it"), form);
}

function parameterInput({ name }) {
  const id = newId();
  const input = element("input", { id, class: "mono", spellcheck: "false", autocomplete: "off" });
  return { name, input, row: element("div", { class: "field" }, element("label", { for: id }, name), input) };
}

function bodyInput(example) {
  const id = newId();
  const text = JSON.stringify(example, null, 2);
  const area = element("textarea", { id, class: "mono", rows: String(text.split("\n").length), spellcheck: "false" });
  area.value = text;
  return {
    get value() {
      return area.value;
    },
    row: element("div", { class: "field" }, element("label", { for: id }, "Body"), area),
  };
}

function filled(path, values) {
  return path.replaceAll(/\{(\w+)[^}]*\}/g, (_, name) => {
    const found = values.find((value) => value.name === name);
    return encodeURIComponent(found?.input.value ?? "");
  });
}

// Pretty JSON at the end, other text as it comes. Returns what is to be said about its end.
async function show(response, answer) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    text += value;
    answer.append(value);
    if (text.length > MOST_SHOWN) {
      reader.cancel();
      return `; only the first ${MOST_SHOWN.toLocaleString("en")} characters are shown`;
    }
  }
  if (response.headers.get("content-type")?.startsWith("application/json")) {
    answer.textContent = JSON.stringify(JSON.parse(text), null, 2);
  }
  return "";
}

// Sends a request to a route and shows the answer as it comes.

import { request } from "../api.js";
import { announce, element, icon, newId } from "../dom.js";
import { alternatives, bodySchema, fieldsOf } from "../schema.js";

const MOST_SHOWN = 100_000; // characters of an answer; /live/events has no end
// Examples by the field's name, which says more than its type.
const KNOWN = {
  prompt: "In the beginning",
  messages: [{ role: "user", content: "In the beginning" }],
  input: "In the beginning",
  tokens: [73, 110],
  max_tokens: 16,
  temperature: 0.7,
  seed: 1,
};
const WELCOME = ["max_tokens", "temperature", "seed"]; // shown although they are not required

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

// Shows a response as it comes, and JSON indented at the end. Returns a remark about the end.
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

// An example of a body from its schema: the required fields, and a few that make the answer quick and readable. Null for a route
// without a body.
function exampleBody(document, path, method) {
  const schema = bodySchema(document, path, method);
  if (!schema) return null;
  const required = new Set([...(schema.required ?? []), ...(schema.oneOf?.[0]?.required ?? [])]);
  const names = fieldsOf(document, schema).map(({ name }) => name);
  const shown = names.filter((name) => required.has(name) || WELCOME.includes(name));
  shown.sort((one, other) => required.has(other) - required.has(one));
  return Object.fromEntries(shown.map((name) => [name, exampleOf(document, name, schema.properties[name])]));
}

function exampleOf(document, name, property) {
  if (name in KNOWN) return KNOWN[name];
  const [schema] = alternatives(document, property);
  if (property.default !== undefined) return property.default;
  if (schema.enum) return schema.enum[0];
  switch (schema.type) {
    case "integer":
    case "number":
      return property.minimum ?? schema.minimum ?? 1;
    case "boolean":
      return true;
    case "array":
      return [exampleOf(document, "", schema.items ?? {})];
    case "object":
      return Object.fromEntries((schema.required ?? []).map((key) => [key, exampleOf(document, key, schema.properties[key])]));
    default:
      return "text";
  }
}

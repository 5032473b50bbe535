// The form for a request's parameters. It is made from the server's schema, so that it shows a new parameter without a change.

import { element, newId } from "../dom.js";
import { bodySchema, fieldsOf, range } from "../schema.js";
import { parseNumber } from "./request_text.js";

// Fields that the page fills in, or shows elsewhere.
const ELSEWHERE = new Set("prompt messages model stream stream_options seed logprobs top_logprobs".split(" "));
// Fields for several answers, of which a conversation has one.
const NOT_IN_CHAT = new Set(["n", "best_of", "use_beam_search", "length_penalty", "early_stopping"]);
const FIRST = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "stop"];

/** A value that cannot be sent; the message says which one. */
export class BadValue extends Error {}

/** The parameters of one route. `texts` has the initial contents of the fields, by name. */
export class Settings {
  #inputs = new Map();

  constructor(document, path, texts = {}) {
    const schema = bodySchema(document, path);
    const isChat = Boolean(schema.properties.messages);
    const all = fieldsOf(document, schema).filter(
      ({ name }) => !ELSEWHERE.has(name) && !(isChat && NOT_IN_CHAT.has(name)),
    );
    const first = FIRST.map((name) => all.find((field) => field.name === name)).filter(Boolean);
    const rest = all.filter((field) => !first.includes(field));
    this.element = element(
      "div",
      { class: "settings-form" },
      ...first.map((field) => this.#row(field, texts[field.name])),
      element(
        "details",
        { class: "more" },
        element("summary", {}, `${rest.length} more parameters`),
        element("div", { class: "settings-form" }, ...rest.map((field) => this.#row(field, texts[field.name]))),
      ),
    );
  }

  /** The contents of the fields, by name; another form made with them is like this one. */
  get texts() {
    const filled = [...this.#inputs].map(([name, { field, input }]) => [name, textOf(field, input)]);
    return Object.fromEntries(filled);
  }

  /** The parameters that are filled in. Throws BadValue. */
  values() {
    const body = {};
    for (const [name, { field, input }] of this.#inputs) {
      const value = valueOf(field, input);
      input.toggleAttribute("data-set", value !== undefined);
      if (value !== undefined) body[name] = value;
    }
    return body;
  }

  #row(field, text) {
    const id = newId();
    const input = inputOf(field, id, text);
    this.#inputs.set(field.name, { field, input });
    const label = element("label", { for: id }, element("code", {}, field.name));
    const bounds = element("span", { class: "range" }, range(field));
    const isSwitch = field.kind === "boolean";
    return element(
      "div",
      { class: "setting", "data-name": field.name },
      element("div", { class: "setting-head" }, label, isSwitch ? input : bounds),
      isSwitch ? null : input,
      element("p", { id: `${id}-about`, class: "about" }, field.description),
    );
  }
}

function inputOf(field, id, text = "") {
  const common = { id, "aria-describedby": `${id}-about` };
  if (field.kind === "boolean") {
    const on = (text || String(field.initial)) === "true";
    return element("input", { ...common, type: "checkbox", role: "switch", class: "switch", checked: on });
  }
  if (field.kind === "choice") {
    const options = ["", ...field.choices].map((choice) => element("option", { value: choice }, choice || "default"));
    const select = element("select", common, ...options);
    select.value = field.choices.includes(text) ? text : "";
    return select;
  }
  if (field.kind === "integer" || field.kind === "number") {
    return element("input", {
      ...common,
      type: "number",
      min: field.minimum,
      max: field.maximum,
      step: field.kind === "integer" ? "1" : "any",
      placeholder: field.initial ?? "",
      value: text,
    });
  }
  const rows = field.kind === "json" && !field.mayBeText ? "2" : "1";
  const placeholder = { json: field.mayBeText ? "text or JSON" : "JSON", text: "" }[field.kind];
  const area = element("textarea", { ...common, rows, class: "mono", spellcheck: "false", placeholder });
  area.value = text;
  return area;
}

function textOf(field, input) {
  return field.kind === "boolean" ? String(input.checked) : input.value;
}

function valueOf(field, input) {
  if (field.kind === "boolean") {
    const isInitial = input.checked === (String(field.initial) === "true");
    return isInitial ? undefined : input.checked;
  }
  if (input.validity?.badInput) throw new BadValue(`${field.name} is not a number`);
  if (input.value === "") return undefined;
  if (field.kind === "integer" || field.kind === "number") return parseNumber(input.value);
  return field.kind === "json" ? jsonOf(field, input.value) : input.value;
}

// The value of a text that is JSON of a type which the field takes, or the text itself where the field takes texts.
function jsonOf(field, text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    if (field.mayBeText) return text;
    throw new BadValue(`${field.name} is not JSON: ${error.message}`);
  }
  const type = Array.isArray(value) ? "array" : typeof value;
  const allowed = field.jsonTypes.some((one) => one === type || (type === "number" && one === "integer"));
  return field.mayBeText && !allowed ? text : value;
}

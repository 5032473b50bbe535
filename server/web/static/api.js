// Requests to the server with this tab's API key, and the server-sent events of a response. After a 401 a dialog asks for a
// key and the request is sent again.

import { element } from "./dom.js";

const KEY = "orca-api-key";

/** The key that the user has entered in this tab, or "". */
export function apiKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

/** Keep a key for this tab; "" forgets it. */
export function keepApiKey(key) {
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch {
    // No storage: the key is asked for again.
  }
  dispatchEvent(new Event("orca-key"));
}

/** `fetch` with the key. After a 401 the user may enter another key; if not, the 401 is returned. */
export async function request(path, options = {}) {
  for (;;) {
    const used = apiKey();
    const response = await fetch(path, withKey(options, used));
    if (response.status !== 401) return response;
    if (apiKey() !== used) continue; // the user has entered a key for another request
    const key = await askForKey(await errorOf(response.clone()), options.signal);
    if (key === null) return response;
    keepApiKey(key);
  }
}

/** The JSON that a GET returns. Throws an Error with the server's message. */
export async function getJson(path) {
  const response = await request(path);
  if (!response.ok) throw new Error(await errorOf(response));
  return response.json();
}

/** The server's message in a response that failed. */
export async function errorOf(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    if (typeof error.message === "string") return error.message;
  } catch {
    // Not from our server: a proxy's page, or nothing.
  }
  return `${response.status} ${response.statusText}`.trim() + (text ? `: ${text.slice(0, 500)}` : "");
}

function withKey(options, key) {
  if (!key) return options;
  return { ...options, headers: { ...options.headers, Authorization: `Bearer ${key}` } };
}

let open = null;

/** Ask the user for a key: null if they give none. `reason` tells them why. All that ask at once share one dialog. */
export function askForKey(reason, signal) {
  open ??= ask(reason).finally(() => {
    open = null;
  });
  if (!signal) return open;
  return new Promise((resolve, reject) => {
    signal.addEventListener("abort", () => reject(signal.reason), { once: true });
    open.then(resolve, reject);
  });
}

function ask(reason) {
  const input = element("input", {
    id: "api-key",
    type: "password",
    autocomplete: "off",
    spellcheck: "false",
    "aria-describedby": "api-key-reason",
  });
  const cancel = element("button", { type: "button", class: "button" }, "Cancel");
  const form = element(
    "form",
    { method: "dialog", class: "stack" },
    element("h2", { id: "api-key-title" }, "API key"),
    element("p", { id: "api-key-reason", class: "quiet" }, reason),
    element("div", { class: "field" }, element("label", { for: "api-key" }, "Key"), input),
    element("p", { class: "quiet small" }, "The key stays in this tab and is sent only to this server. Leave the field empty to forget the key."),
    element("div", { class: "row end" }, cancel, element("button", { class: "button primary" }, "Use key")),
  );
  const dialog = element("dialog", { class: "dialog", "aria-labelledby": "api-key-title" }, form);
  document.body.append(dialog);
  return new Promise((resolve) => {
    let key = null;
    form.addEventListener("submit", (event) => {
      event.preventDefault(); // the policy allows no form to be sent, not even to a dialog
      key = input.value.trim();
      dialog.close();
    });
    cancel.addEventListener("click", () => dialog.close());
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(key);
    });
    dialog.showModal();
    input.focus();
  });
}

/** The events { event, data } of a response, for requests that EventSource cannot make. A truncated last event is dropped. */
export async function* events(response) {
  let event = "message";
  let data = [];
  for await (const line of lines(response)) {
    if (line === "") {
      if (data.length) yield { event, data: data.join("\n") };
      event = "message";
      data = [];
    } else if (!line.startsWith(":")) {
      const [name, value] = field(line);
      if (name === "event") event = value;
      if (name === "data") data.push(value);
    }
  }
}

function field(line) {
  const colon = line.indexOf(":");
  if (colon < 0) return [line, ""];
  const value = line.slice(colon + 1);
  return [line.slice(0, colon), value.startsWith(" ") ? value.slice(1) : value];
}

// Lines end with \n, \r\n or \r; a \r at the end of a chunk may be half of a \r\n.
async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = parts.pop();
      yield* parts;
    }
  } finally {
    reader.cancel().catch(() => {}); // where the caller has left the loop, this stops the request
  }
}

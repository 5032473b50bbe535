// The dialog that asks for an API key. However many requests ask, there is one.

import { element } from "./dom.js";

let open = null;

/** The key, or null if the user wants to give none; `reason` says why it is asked for. */
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
    element("p", { class: "quiet small" }, "It is kept in this tab and sent only to this server. Leave it empty to forget it."),
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

// Buttons that copy a text.

import { element, icon, replace } from "./dom.js";
import { announce } from "./shell.js";

const SHOWN_MS = 2000;

/**
 * A button that copies what `write` returns. `word` is what it shows, `label` its name; `refuse` gets the message
 * of an error.
 */
export function copyButton(word, label, write, refuse = announce) {
  const text = document.createTextNode(word);
  const button = element("button", { type: "button", class: "button plain", "aria-label": label, title: label, click: copy });
  replace(button, icon("copy"), text);
  async function copy() {
    try {
      await toClipboard(write());
    } catch (error) {
      refuse(error.message);
      return;
    }
    text.data = "Copied";
    announce(`${label}: copied`);
    setTimeout(() => (text.data = word), SHOWN_MS);
  }
  return button;
}

/** The clipboard has an API only where the page came over TLS or from this machine. */
async function toClipboard(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = element("textarea", { class: "unseen", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  if (!copied) throw new Error("the browser does not let a page without TLS copy");
}

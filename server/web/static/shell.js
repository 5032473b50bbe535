// What every page has: the header with its navigation, the theme, the API key, and a voice for screen readers.
//
//     <body data-page="playground"><main id="main">...</main></body>
//     import { announce } from "./shell.js";

import { apiKey, keepApiKey } from "./api.js";
import { element, icon, replace } from "./dom.js";
import { askForKey } from "./key_dialog.js";

const PAGES = [
  ["playground", "/", "Playground"],
  ["live", "/live", "Live"],
  ["docs", "/docs", "API"],
];
const STATUS_SECONDS = 10;

const voice = element("div", { role: "status", class: "unseen" });

/** Say something to screen readers, when they are done with what they are saying. */
export function announce(text) {
  voice.textContent = text;
}

function header() {
  const here = document.body.dataset.page;
  const links = PAGES.map(([page, href, name]) =>
    element("a", { href, "aria-current": page === here ? "page" : null }, name),
  );
  return element(
    "header",
    { class: "header" },
    element(
      "a",
      { href: "/", class: "brand", "aria-label": "orca_jax, playground" },
      element("img", { src: "/static/icon.svg", alt: "", width: "22", height: "22" }),
      element("span", {}, "orca_jax"),
    ),
    element("nav", { "aria-label": "Pages", class: "nav" }, ...links),
    element("div", { class: "tools" }, serverStatus(), keyButton(), themeButton()),
  );
}

// The server's phase, from /ready, which needs no key.
function serverStatus() {
  const dot = element("span", { class: "dot", "aria-hidden": "true" });
  const word = element("span", { class: "status-word" }, "…");
  const status = element("span", { class: "server-status", title: "" }, dot, word);
  async function look() {
    const { phase, reason } = await readiness();
    dot.dataset.phase = phase;
    word.textContent = phase;
    status.title = reason ?? `the server is ${phase}`;
  }
  look();
  setInterval(() => document.hidden || look(), STATUS_SECONDS * 1000);
  document.addEventListener("visibilitychange", () => document.hidden || look());
  return status;
}

async function readiness() {
  try {
    const { status, reason } = await (await fetch("/ready")).json();
    return { phase: status, reason };
  } catch (error) {
    return { phase: "unreachable", reason: error.message };
  }
}

function keyButton() {
  const button = element("button", { type: "button", class: "icon-button", click: ask }, icon("key"));
  function show() {
    const label = apiKey() ? "API key: given in this tab" : "API key: none";
    button.setAttribute("aria-label", label);
    button.title = label;
    button.toggleAttribute("data-on", Boolean(apiKey()));
  }
  async function ask() {
    const key = await askForKey("Needed if the server runs with API keys.");
    if (key !== null) keepApiKey(key);
    button.focus();
  }
  addEventListener("orca-key", show);
  show();
  return button;
}

function themeButton() {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const button = element("button", { type: "button", class: "icon-button", click: toggle });
  function show() {
    const label = isDark() ? "Use the light theme" : "Use the dark theme";
    button.setAttribute("aria-label", label);
    button.title = label;
    replace(button, icon(isDark() ? "sun" : "moon"));
  }
  function toggle() {
    root.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("orca-theme", root.dataset.theme);
    } catch {
      // No storage: for as long as the page is open.
    }
    show();
    dispatchEvent(new Event("orca-theme")); // for what is drawn rather than styled
  }
  system.addEventListener("change", show);
  show();
  return button;
}

document.body.prepend(element("a", { href: "#main", class: "skip" }, "Skip to the content"), header());
document.body.append(voice);

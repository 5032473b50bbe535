// The header of every page: its navigation, the server's phase, the API key and the theme. A page names itself:
//
//     <body data-page="playground"><main id="main">...</main></body>

import { apiKey, askForKey, keepApiKey } from "./api.js";
import { element, icon, iconButton, replace, setLabel } from "./dom.js";

const PAGES = [
  ["playground", "/", "Playground"],
  ["live", "/live", "Live"],
  ["docs", "/docs", "API"],
];
const STATUS_SECONDS = 10;

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

// /ready needs no key.
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
  const button = iconButton("key", "", ask);
  function show() {
    setLabel(button, apiKey() ? "API key: given in this tab" : "API key: none");
    button.toggleAttribute("data-on", Boolean(apiKey()));
  }
  async function ask() {
    const key = await askForKey("The server needs a key only if it runs with API keys.");
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
  const button = iconButton("sun", "", toggle);
  function show() {
    setLabel(button, isDark() ? "Use the light theme" : "Use the dark theme");
    replace(button, icon(isDark() ? "sun" : "moon"));
  }
  function toggle() {
    root.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("orca-theme", root.dataset.theme);
    } catch {
      // No storage: the theme lasts as long as the page is open.
    }
    show();
    dispatchEvent(new Event("orca-theme")); // canvases must be drawn again
  }
  system.addEventListener("change", show);
  show();
  return button;
}

document.body.prepend(element("a", { href: "#main", class: "skip" }, "Skip to the content"), header());

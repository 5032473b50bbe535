// The API's documentation: the server's own /openapi.json, route by route.

import { element, replace } from "../dom.js";
import { openapi } from "../schema.js";
import { routeSection } from "./route.js";

const METHODS = ["get", "post", "put", "patch", "delete"];
const at = (id) => document.getElementById(id);

async function start() {
  let document_;
  try {
    document_ = await openapi();
  } catch (error) {
    replace(at("routes"), element("div", { class: "problem", role: "alert" }, error.message));
    return;
  }
  const { info } = document_;
  replace(
    at("about"),
    element("p", {}, info.description ?? ""),
    element(
      "p",
      { class: "quiet small" },
      `Version ${info.version} · `,
      element("a", { href: "/openapi.json" }, "openapi.json"),
    ),
  );
  const groups = byTag(document_);
  replace(at("navigation"), ...[...groups].map(([tag, routes]) => navigation(tag, routes)));
  replace(at("routes"), ...[...groups].map(([tag, routes]) => group(document_, tag, routes)));
  if (location.hash) at(location.hash.slice(1))?.scrollIntoView();
}

function byTag(document_) {
  const groups = new Map();
  for (const [path, item] of Object.entries(document_.paths)) {
    for (const method of METHODS.filter((one) => item[one])) {
      const tag = item[method].tags?.[0] ?? "other";
      if (!groups.has(tag)) groups.set(tag, []);
      groups.get(tag).push({ path, method, operation: item[method], id: `${method}${path.replaceAll(/[^a-z0-9]+/gi, "-")}` });
    }
  }
  return groups;
}

function navigation(tag, routes) {
  const links = routes.map(({ path, method, id }) =>
    element(
      "li",
      {},
      element("a", { href: `#${id}` }, element("span", { class: "method", "data-method": method }, method), element("span", {}, path)),
    ),
  );
  return element("div", {}, element("h2", { class: "label" }, tag), element("ul", {}, ...links));
}

function group(document_, tag, routes) {
  return element(
    "section",
    { class: "group", "aria-label": tag },
    element("h2", { class: "group-title" }, tag),
    ...routes.map((route) => routeSection(document_, route)),
  );
}

start();

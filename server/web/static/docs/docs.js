// The API's documentation: the server's /openapi.json, route by route.

import { element, replace, withCode } from "../dom.js";
import { openapi, resolved } from "../schema.js";
import { schemaTree } from "./schema_tree.js";
import { tryIt } from "./try_it.js";

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

// The section of a route { path, method, operation, id }: what it does, takes and answers.
function routeSection(document_, route) {
  const { path, method, operation, id } = route;
  const description = (operation.description ?? operation.summary ?? "").split("\n\n");
  return element(
    "article",
    { class: "card route", id },
    element(
      "h3",
      { class: "route-title" },
      element("span", { class: "method", "data-method": method }, method),
      element("code", {}, path),
      operation.security ? element("span", { class: "tag" }, "needs a key") : null,
    ),
    ...description.map((paragraph) => withCode("p", paragraph)),
    tryIt(document_, route),
    parameters(document_, operation),
    requestBody(document_, operation),
    responses(document_, operation),
  );
}

function parameters(document_, operation) {
  if (!operation.parameters?.length) return null;
  const rows = operation.parameters.map(({ name, in: place, required, schema, description }) =>
    element(
      "li",
      { class: "property" },
      element(
        "div",
        { class: "property-head" },
        element("code", { class: "property-name" }, name),
        element("span", { class: "quiet small" }, `${resolved(document_, schema ?? {}).schema.type ?? "any"}, in the ${place}`),
        required ? element("span", { class: "tag accent" }, "required") : null,
      ),
      description ? withCode("p", description, { class: "quiet small" }) : null,
    ),
  );
  return part("Parameters", element("ul", { class: "properties" }, ...rows));
}

function requestBody(document_, operation) {
  const schema = operation.requestBody?.content?.["application/json"]?.schema;
  return schema ? part("Body", schemaTree(document_, schema)) : null;
}

function responses(document_, operation) {
  const rows = Object.entries(operation.responses ?? {}).map(([status, response]) => response_(document_, status, response));
  return part("Responses", element("div", { class: "responses" }, ...rows));
}

function response_(document_, status, { description, content }) {
  const head = [
    element("span", { class: "status", "data-kind": status[0] }, status),
    element("span", {}, description ?? ""),
  ];
  const bodies = Object.entries(content ?? {}).filter(([, body]) => body.schema || body.itemSchema);
  if (!bodies.length) return element("div", { class: "response" }, ...head);
  const trees = bodies.map(([type, body]) => {
    const kind = body.itemSchema ? `${type}: a stream of events, each with these fields` : type;
    return element("div", {}, element("p", { class: "quiet small" }, kind), schemaTree(document_, body.schema ?? body.itemSchema));
  });
  return element("details", { class: "response" }, element("summary", {}, ...head), ...trees);
}

function part(title, content) {
  return element("section", { class: "part" }, element("h4", { class: "label" }, title), content);
}

start();

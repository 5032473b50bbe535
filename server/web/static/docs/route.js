// One route: what it does, takes and answers.

import { element, withCode } from "../dom.js";
import { resolved } from "../schema.js";
import { schemaTree } from "./schema_tree.js";
import { tryIt } from "./try_it.js";

/** The section of a route { path, method, operation, id }. */
export function routeSection(document, route) {
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
    tryIt(document, route),
    parameters(document, operation),
    requestBody(document, operation),
    responses(document, operation),
  );
}

function parameters(document, operation) {
  if (!operation.parameters?.length) return null;
  const rows = operation.parameters.map(({ name, in: place, required, schema, description }) =>
    element(
      "li",
      { class: "property" },
      element(
        "div",
        { class: "property-head" },
        element("code", { class: "property-name" }, name),
        element("span", { class: "quiet small" }, `${resolved(document, schema ?? {}).schema.type ?? "any"}, in the ${place}`),
        required ? element("span", { class: "tag accent" }, "required") : null,
      ),
      description ? withCode("p", description, { class: "quiet small" }) : null,
    ),
  );
  return part("Parameters", element("ul", { class: "properties" }, ...rows));
}

function requestBody(document, operation) {
  const schema = operation.requestBody?.content?.["application/json"]?.schema;
  return schema ? part("Body", schemaTree(document, schema)) : null;
}

function responses(document, operation) {
  const rows = Object.entries(operation.responses ?? {}).map(([status, response]) => response_(document, status, response));
  return part("Responses", element("div", { class: "responses" }, ...rows));
}

function response_(document, status, { description, content }) {
  const head = [
    element("span", { class: "status", "data-kind": status[0] }, status),
    element("span", {}, description ?? ""),
  ];
  const bodies = Object.entries(content ?? {}).filter(([, body]) => body.schema || body.itemSchema);
  if (!bodies.length) return element("div", { class: "response" }, ...head);
  const trees = bodies.map(([type, body]) => {
    const events = body.itemSchema ? "a stream of events; each has " : "";
    return element("div", {}, element("p", { class: "quiet small" }, `${type}${events ? `: ${events}` : ""}`), schemaTree(document, body.schema ?? body.itemSchema));
  });
  return element("details", { class: "response" }, element("summary", {}, ...head), ...trees);
}

function part(title, content) {
  return element("section", { class: "part" }, element("h4", { class: "label" }, title), content);
}

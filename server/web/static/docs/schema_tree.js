// Shows a schema as a list of properties. Nested schemas open on demand, so that a schema may refer to itself.

import { element, withCode } from "../dom.js";
import { isBuilt, range, resolved } from "../schema.js";

/** The properties of `schema`, or for one without properties a line with its type. */
export function schemaTree(document, schema) {
  const { schema: object } = resolved(document, schema);
  const isRequired = ([name]) => object.required?.includes(name) ?? false;
  const properties = Object.entries(object.properties ?? {}).sort((one, other) => isRequired(other) - isRequired(one));
  if (!properties.length) return element("p", { class: "quiet small" }, typeName(document, schema));
  const built = properties.filter(([, property]) => isBuilt(property));
  const refused = properties.filter(([, property]) => !isBuilt(property));
  const rows = ([name, property]) => propertyRow(document, name, property, isRequired([name]));
  const list = element("ul", { class: "properties" }, ...built.map(rows));
  if (!refused.length) return list;
  const rest = element("ul", { class: "properties" }, ...refused.map(rows));
  return element("div", {}, list, element("details", { class: "refused" }, element("summary", {}, `${refused.length} fields that the server refuses: they are not built yet`), rest));
}

function propertyRow(document, name, property, required) {
  const row = element(
    "li",
    { class: "property" },
    element(
      "div",
      { class: "property-head" },
      element("code", { class: "property-name" }, name),
      element("span", { class: "quiet small" }, typeName(document, property)),
      required ? element("span", { class: "tag accent" }, "required") : null,
      ...limits(property).map((limit) => element("span", { class: "tag" }, limit)),
    ),
    property.description ? withCode("p", property.description, { class: "quiet small" }) : null,
  );
  for (const [label, schema] of nested(document, property)) row.append(expandable(document, label, schema));
  return row;
}

// Details whose contents are made when they are opened.
function expandable(document, label, schema) {
  const details = element("details", { class: "nested" }, element("summary", {}, label));
  details.addEventListener("toggle", () => details.append(schemaTree(document, schema)), { once: true });
  return details;
}

// The objects in a property's value, as pairs of a name and a schema.
function nested(document, property) {
  const found = [];
  for (const one of property.anyOf ?? property.oneOf ?? [property]) {
    const { schema, name } = resolved(document, one);
    if (schema.properties) found.push([name ?? schema.title ?? "object", schema]);
    if (schema.items) found.push(...nested(document, schema.items));
  }
  return found;
}

// A type in words: "integer", "list of text or text", a schema's name.
function typeName(document, property) {
  const { schema, name } = resolved(document, property);
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (name) return name;
  if (schema.anyOf || schema.oneOf) {
    const parts = (schema.anyOf ?? schema.oneOf).filter((one) => one.type !== "null");
    return parts.map((one) => typeName(document, one)).join(" or ") || "null";
  }
  if (schema.type === "array") return `list of ${typeName(document, schema.items ?? {})}`;
  return { string: "text", undefined: "any JSON" }[schema.type] ?? schema.type;
}

function limits(property) {
  const said = [range(property), within(property.minLength, property.maxLength, "characters"), within(property.minItems, property.maxItems, "items")];
  if (property.default !== undefined && property.default !== null) said.push(`default ${JSON.stringify(property.default)}`);
  return said.filter(Boolean);
}

function within(least, most, what) {
  if (most === undefined) return least ? `at least ${least} ${what}` : "";
  return least ? `${least} to ${most} ${what}` : `at most ${most} ${what}`;
}

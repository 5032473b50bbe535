// An example of a body, from its schema: what is required, and a little that makes it quick and readable.

import { alternatives, bodySchema, fieldsOf } from "../schema.js";

// By the field's name, which says more than its type.
const KNOWN = {
  prompt: "In the beginning",
  messages: [{ role: "user", content: "In the beginning" }],
  input: "In the beginning",
  tokens: [73, 110],
  max_tokens: 16,
  temperature: 0.7,
  seed: 1,
};
const WELCOME = ["max_tokens", "temperature", "seed"]; // shown though they are not required

/** The body as an object, or null for a route without one. */
export function exampleBody(document, path, method) {
  const schema = bodySchema(document, path, method);
  if (!schema) return null;
  const required = new Set([...(schema.required ?? []), ...(schema.oneOf?.[0]?.required ?? [])]);
  const names = fieldsOf(document, schema).map(({ name }) => name);
  const shown = names.filter((name) => required.has(name) || WELCOME.includes(name));
  shown.sort((one, other) => required.has(other) - required.has(one));
  return Object.fromEntries(shown.map((name) => [name, exampleOf(document, name, schema.properties[name])]));
}

function exampleOf(document, name, property) {
  if (name in KNOWN) return KNOWN[name];
  const [schema] = alternatives(document, property);
  if (property.default !== undefined) return property.default;
  if (schema.enum) return schema.enum[0];
  switch (schema.type) {
    case "integer":
    case "number":
      return property.minimum ?? schema.minimum ?? 1;
    case "boolean":
      return true;
    case "array":
      return [exampleOf(document, "", schema.items ?? {})];
    case "object":
      return Object.fromEntries((schema.required ?? []).map((key) => [key, exampleOf(document, key, schema.properties[key])]));
    default:
      return "text";
  }
}

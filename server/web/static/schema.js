// Reads the server's /openapi.json: what its routes take and answer.

const NOT_BUILT = "Not built yet"; // begins the description of a field that the server refuses

const LIMITLESS = 2 ** 30; // a bound that only keeps numbers from overflowing

/** The document. Throws an Error with the server's message. */
export async function openapi() {
  const response = await fetch("/openapi.json");
  if (!response.ok) throw new Error(`/openapi.json: ${response.status} ${response.statusText}`);
  return response.json();
}

/** A schema without its reference, and the reference's name if it was one. */
export function resolved(document, schema) {
  const name = schema.$ref?.split("/").pop();
  return name ? { schema: document.components.schemas[name] ?? {}, name } : { schema, name: null };
}

/** The schema of the JSON body that a route takes, or null. */
export function bodySchema(document, path, method = "post") {
  const schema = document.paths[path]?.[method]?.requestBody?.content?.["application/json"]?.schema;
  return schema ? resolved(document, schema).schema : null;
}

/** Whether the server accepts a property; it declares some of OpenAI's only to refuse them by name. */
export function isBuilt(property) {
  return !property.description?.startsWith(NOT_BUILT);
}

/** The fields of an object's schema that the server accepts, in its order. */
export function fieldsOf(document, schema) {
  return Object.entries(schema.properties ?? {})
    .filter(([, property]) => isBuilt(property))
    .map(([name, property]) => fieldOf(document, name, property, schema.required?.includes(name) ?? false));
}

/** The types that a value may have, each a schema without a reference; null is left out. */
export function alternatives(document, schema) {
  const all = schema.anyOf ?? schema.oneOf ?? [schema];
  return all.map((one) => resolved(document, one).schema).filter((one) => one.type !== "null");
}

/** The bounds of a number in words; "" without bounds worth showing. */
export function range({ minimum, maximum }) {
  const [low, high] = [minimum, maximum].map((bound) => (Math.abs(bound) < LIMITLESS ? String(bound).replace(/^-/, "−") : ""));
  if (low && high) return `${low} – ${high}`;
  return low ? `from ${low}` : high && `to ${high}`;
}

// A field: the kind of its input, and the texts that describe it.
function fieldOf(document, name, property, required) {
  const types = alternatives(document, property);
  const [only] = types;
  const description = property.description ?? "";
  const bound = (key) => property[key] ?? (types.length === 1 ? only[key] : undefined);
  return {
    name,
    required,
    description,
    kind: types.length === 1 ? kindOf(only) : "json",
    choices: types.length === 1 ? only.enum : undefined,
    minimum: bound("minimum"),
    maximum: bound("maximum"),
    initial: property.default ?? initialOf(description),
    mayBeText: types.some((one) => one.type === "string"),
    jsonTypes: types.map((one) => one.type),
  };
}

function kindOf(schema) {
  if (schema.enum) return "choice";
  if (schema.type === "integer" || schema.type === "number" || schema.type === "boolean") return schema.type;
  return schema.type === "string" ? "text" : "json";
}

// The server's descriptions have the defaults: "default 16", "default: the model's, or 1", "default true".
function initialOf(description) {
  return description.match(/\bdefault:? ([^;]+?)(?:; .*|$|, and | or -1.*|: .*)/)?.[1];
}

// JSON and Python literals of values in which whole numbers may be BigInts: seeds have up to 63 bits.

/** The value of a JSON text whose whole numbers are exact. Throws a SyntaxError. */
export function parseNumber(text) {
  const number = Number(text);
  return /^\s*[-+]?\d+\s*$/.test(text) && !Number.isSafeInteger(number) ? BigInt(text) : number;
}

/** As JSON; `indent` is a number of spaces. */
export function toJson(value, indent = 0) {
  return written(value, JSON.stringify, { true: "true", false: "false", null: "null" }, indent, "");
}

/** As a Python literal: JSON's escapes are Python's too. */
export function toPython(value, indent = 0, margin = "") {
  return written(value, JSON.stringify, { true: "True", false: "False", null: "None" }, indent, margin);
}

function written(value, quote, words, indent, margin) {
  if (typeof value === "string") return quote(value);
  if (typeof value === "number" || typeof value === "bigint") return String(value);
  if (value === null || typeof value === "boolean") return words[value];
  const inner = margin + " ".repeat(indent);
  const nested = (one) => written(one, quote, words, indent, inner);
  if (Array.isArray(value)) return enclosed("[", value.map(nested), "]", indent, margin, inner);
  const entries = Object.entries(value).filter(([, one]) => one !== undefined);
  return enclosed("{", entries.map(([name, one]) => `${quote(name)}: ${nested(one)}`), "}", indent, margin, inner);
}

function enclosed(open, parts, close, indent, margin, inner) {
  if (!indent || !parts.length) return open + parts.join(", ") + close;
  return `${open}\n${parts.map((part) => inner + part).join(",\n")}\n${margin}${close}`;
}

// A request as text: its JSON, a command for a shell, and a Python program. Whole numbers may be BigInts, because seeds have
// up to 63 bits. A key never leaves the page: the command and the program read ORCA_API_KEY.

const JSON_WORDS = { true: "true", false: "false", null: "null" };
const PYTHON_WORDS = { true: "True", false: "False", null: "None" };

// What OpenAI's client takes as arguments; the rest is sent in extra_body.
const ARGUMENTS = new Set(
  (
    "model prompt messages best_of echo frequency_penalty logit_bias logprobs max_completion_tokens max_tokens n " +
    "presence_penalty response_format seed stop stream stream_options temperature tools top_logprobs top_p user"
  ).split(" "),
);

/** The value of a JSON number, exact if it is a whole one. Throws a SyntaxError. */
export function parseNumber(text) {
  const number = Number(text);
  return /^\s*[-+]?\d+\s*$/.test(text) && !Number.isSafeInteger(number) ? BigInt(text) : number;
}

/** Write a value as JSON, indented by a number of spaces. */
export function toJson(value, indent = 0) {
  return written(value, JSON_WORDS, indent, "");
}

// JSON's escapes of strings are Python's too.
function toPython(value, indent = 0, margin = "") {
  return written(value, PYTHON_WORDS, indent, margin);
}

/** Write a request as a command for bash and every other POSIX shell. */
export function curl(origin, path, body, hasKey) {
  const key = hasKey ? ` \\\n  -H "Authorization: Bearer $ORCA_API_KEY"` : "";
  const json = toJson(body, 2).replaceAll("'", `'\\''`);
  return `curl ${origin}${path}${key} \\\n  -H 'Content-Type: application/json' \\\n  -d '${json}'\n`;
}

/** Write a request as a program with OpenAI's client. */
export function python(origin, path, body, hasKey) {
  const isChat = path.endsWith("/chat/completions");
  const known = Object.entries(body).filter(([name]) => ARGUMENTS.has(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !ARGUMENTS.has(name)));
  if (Object.keys(extra).length) known.push(["extra_body", extra]);
  const lines = known.map(([name, value]) => `    ${name}=${toPython(value, 4, "    ")},\n`).join("");
  const imports = hasKey ? "import os\n\nfrom openai import OpenAI" : "from openai import OpenAI";
  const key = hasKey ? 'os.environ["ORCA_API_KEY"]' : '"none"';
  const call = isChat ? "client.chat.completions.create" : "client.completions.create";
  const text = isChat ? "completion.choices[0].message.content" : "completion.choices[0].text";
  return (
    `${imports}\n\nclient = OpenAI(base_url=${toPython(`${origin}/v1`)}, api_key=${key})\n` +
    `completion = ${call}(\n${lines})\nprint(${text})\n`
  );
}

function written(value, words, indent, margin) {
  if (typeof value === "string") return JSON.stringify(value);
  if (typeof value === "number" || typeof value === "bigint") return String(value);
  if (value === null || typeof value === "boolean") return words[value];
  const inner = margin + " ".repeat(indent);
  const nested = (one) => written(one, words, indent, inner);
  if (Array.isArray(value)) return enclosed("[", value.map(nested), "]", indent, margin, inner);
  const entries = Object.entries(value).filter(([, one]) => one !== undefined);
  return enclosed("{", entries.map(([name, one]) => `${JSON.stringify(name)}: ${nested(one)}`), "}", indent, margin, inner);
}

function enclosed(open, parts, close, indent, margin, inner) {
  if (!indent || !parts.length) return open + parts.join(", ") + close;
  return `${open}\n${parts.map((part) => inner + part).join(",\n")}\n${margin}${close}`;
}

// A request as a command for a shell and as a Python program, to copy. A key never leaves the page: both read
// ORCA_API_KEY.

import { toJson, toPython } from "./json.js";

// What OpenAI's client takes as arguments; the rest is sent in extra_body.
const ARGUMENTS = new Set(
  (
    "model prompt messages best_of echo frequency_penalty logit_bias logprobs max_completion_tokens max_tokens n " +
    "presence_penalty response_format seed stop stream stream_options temperature tools top_logprobs top_p user"
  ).split(" "),
);

/** For bash and every other POSIX shell. */
export function curl(origin, path, body, { keyed }) {
  const key = keyed ? ` \\\n  -H "Authorization: Bearer $ORCA_API_KEY"` : "";
  const json = toJson(body, 2).replaceAll("'", `'\\''`);
  return `curl ${origin}${path}${key} \\\n  -H 'Content-Type: application/json' \\\n  -d '${json}'\n`;
}

/** With OpenAI's client. */
export function python(origin, path, body, { keyed }) {
  const chat = path.endsWith("/chat/completions");
  const known = Object.entries(body).filter(([name]) => ARGUMENTS.has(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !ARGUMENTS.has(name)));
  if (Object.keys(extra).length) known.push(["extra_body", extra]);
  const lines = known.map(([name, value]) => `    ${name}=${toPython(value, 4, "    ")},\n`).join("");
  const imports = keyed ? "import os\n\nfrom openai import OpenAI" : "from openai import OpenAI";
  const key = keyed ? 'os.environ["ORCA_API_KEY"]' : '"none"';
  const call = chat ? "client.chat.completions.create" : "client.completions.create";
  const text = chat ? "completion.choices[0].message.content" : "completion.choices[0].text";
  return (
    `${imports}\n\nclient = OpenAI(base_url=${toPython(`${origin}/v1`)}, api_key=${key})\n` +
    `completion = ${call}(\n${lines})\nprint(${text})\n`
  );
}

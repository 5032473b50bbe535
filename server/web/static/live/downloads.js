// Files that the page gives to its user.

import { savedLines } from "./file.js";
import { traceOf } from "./perfetto.js";

const KEEP = 60000; // milliseconds until the browser has surely read it

export function savePerfetto(model) {
  save("orca-trace.json", "application/json", [JSON.stringify(traceOf(model))]);
}

export function saveLines(model) {
  const parts = [];
  for (const line of savedLines(model)) parts.push(`${JSON.stringify(line)}\n`);
  save("orca-live.jsonl", "application/jsonl", parts);
}

function save(name, type, parts) {
  const url = URL.createObjectURL(new Blob(parts, { type }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), KEEP);
}

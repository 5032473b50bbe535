// Requests to the server, with the API key of this tab. A 401 asks for a key and tries again.

import { askForKey } from "./key_dialog.js";

const KEY = "orca-api-key";

/** The key that was given in this tab, or "". */
export function apiKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

/** Keep a key for this tab; "" forgets it. */
export function keepApiKey(key) {
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch {
    // No storage: the key is asked for again.
  }
  dispatchEvent(new Event("orca-key"));
}

/** `fetch` with the key. After a 401 the user may give another; without one the 401 is returned. */
export async function request(path, options = {}) {
  for (;;) {
    const used = apiKey();
    const response = await fetch(path, withKey(options, used));
    if (response.status !== 401) return response;
    if (apiKey() !== used) continue; // another request has got a new key meanwhile
    const key = await askForKey(await errorOf(response.clone()), options.signal);
    if (key === null) return response;
    keepApiKey(key);
  }
}

/** The JSON of a GET. Throws an Error with the server's own message. */
export async function getJson(path) {
  const response = await request(path);
  if (!response.ok) throw new Error(await errorOf(response));
  return response.json();
}

/** The server's message of a response that failed. */
export async function errorOf(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    if (typeof error.message === "string") return error.message;
  } catch {
    // Not the server's own form: a proxy's page, or nothing.
  }
  return `${response.status} ${response.statusText}`.trim() + (text ? `: ${text.slice(0, 500)}` : "");
}

function withKey(options, key) {
  if (!key) return options;
  return { ...options, headers: { ...options.headers, Authorization: `Bearer ${key}` } };
}

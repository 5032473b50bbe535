// Sends one request for text, and reads the answer's pieces in one form for completions and chat.

import { errorOf, events, request } from "../api.js";
import { toJson } from "./request_text.js";

export const COMPLETIONS = "/v1/completions";
export const CHAT = "/v1/chat/completions";

/** The server refused the request or failed, with the server's message. */
export class Refused extends Error {}

/**
 * The pieces { index, text, reasoning, calls, tokens, finish } and { usage } of an answer. Throws Refused, and what
 * `fetch` throws. `signal` ends the request: the server then stops generating.
 */
export async function* generate(path, body, signal) {
  const streams = !body.use_beam_search; // a beam search has no text until its end
  const sent = streams ? { ...body, stream: true, stream_options: { include_usage: true } } : body;
  const response = await request(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: toJson(sent),
    signal,
  });
  if (!response.ok) throw new Refused(await errorOf(response));
  if (!streams) {
    yield* pieces(await response.json());
    return;
  }
  let ended = false;
  for await (const { data } of events(response)) {
    if (data === "[DONE]") ended = true;
    else yield* pieces(JSON.parse(data));
  }
  if (!ended) throw new Refused("the connection ended before the answer did");
}

function* pieces(answer) {
  if (answer.error) throw new Refused(answer.error.message);
  for (const choice of answer.choices ?? []) yield piece(choice);
  if (answer.usage) yield { usage: answer.usage };
}

function piece(choice) {
  const message = choice.delta ?? choice.message ?? { content: choice.text };
  return {
    index: choice.index,
    text: message.content ?? "",
    reasoning: message.reasoning_content ?? "",
    calls: message.tool_calls ?? [],
    tokens: tokensOf(choice.logprobs),
    finish: choice.finish_reason ?? null,
  };
}

// Tokens { text, logprob, top: [{ text, logprob }] }; `top` begins with the most likely.
function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map((one) => ({
      text: one.token,
      logprob: one.logprob,
      top: byLikelihood(one.top_logprobs.map(({ token, logprob }) => ({ text: token, logprob }))),
    }));
  }
  return logprobs.tokens.map((text, i) => ({
    text,
    logprob: logprobs.token_logprobs[i],
    top: byLikelihood(
      Object.entries(logprobs.top_logprobs[i] ?? {}).map(([token, logprob]) => ({ text: token, logprob })),
    ),
  }));
}

function byLikelihood(tokens) {
  return tokens.sort((one, other) => other.logprob - one.logprob);
}

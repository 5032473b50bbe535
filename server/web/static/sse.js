// Server-sent events of a response, for requests that EventSource cannot make: with a body or a key.

/** The events as { event, data }, in order. The response's end ends them; an event that is cut off is none. */
export async function* events(response) {
  let event = "message";
  let data = [];
  for await (const line of lines(response)) {
    if (line === "") {
      if (data.length) yield { event, data: data.join("\n") };
      event = "message";
      data = [];
    } else if (!line.startsWith(":")) {
      const [name, value] = field(line);
      if (name === "event") event = value;
      if (name === "data") data.push(value);
    }
  }
}

function field(line) {
  const colon = line.indexOf(":");
  if (colon < 0) return [line, ""];
  const value = line.slice(colon + 1);
  return [line.slice(0, colon), value.startsWith(" ") ? value.slice(1) : value];
}

// Lines end with \n, \r\n or \r; a \r at the end of a part may be half of a \r\n.
async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = parts.pop();
      yield* parts;
    }
  } finally {
    reader.cancel().catch(() => {}); // the user has left the loop: stop the request
  }
}

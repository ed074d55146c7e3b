// The server's OpenAI-compatible interface: which model there is, and an answer as a stream of chunks.

export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** The first model that the server offers. */
export async function fetchModel(key) {
  const response = await request("v1/models", { headers: headers(key) });
  const model = (await response.json()).data?.[0];
  if (!model) throw new ApiError("The server offers no model.");
  return model;
}

/** What the server tells of its engine: {device, dtype, mode, ...}; throws ApiError while it is not ready. */
export async function fetchReady(key) {
  return (await request("ready", { headers: headers(key) })).json();
}

/** The chunks of an answer as they come; throws ApiError, or AbortError when the signal stops it. */
export async function* streamCompletion(body, key, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers(key) },
    body: JSON.stringify(body),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(oneLine(chunk.error.message ?? chunk.error));
    yield chunk;
  }
  throw new ApiError("The connection was lost in the middle of the answer.");
}

/** The data of each server-sent event. */
export async function* events(stream) {
  let rest = "";
  for await (const text of texts(stream)) {
    const parts = (rest + text).split(/\r?\n\r?\n/);
    rest = parts.pop();
    for (const part of parts) {
      const lines = part.split(/\r?\n/).filter(line => line.startsWith("data:"));
      if (lines.length) yield lines.map(line => line.slice(5).replace(/^ /, "")).join("\n");
    }
  }
}

async function* texts(stream) { // not every browser can iterate over a stream
  const reader = stream.getReader(), decoder = new TextDecoder();
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(error => { throw explained(error); });
      if (done) return;
      yield decoder.decode(value, { stream: true });
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function request(path, options) {
  const response = await fetch(path, options).catch(error => { throw explained(error); });
  if (response.ok) return response;
  const message = await response.json().then(body => body.error?.message ?? body.detail, () => null);
  const pause = response.headers.get("Retry-After");
  const what = oneLine(message) || `The server answered ${response.status} ${response.statusText}.`;
  throw new ApiError(pause ? `${what} Try again in ${pause} s.` : what, response.status);
}

function explained(error) {
  return error.name === "AbortError" ? error : new ApiError("The server cannot be reached.");
}

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** A message as a sentence on one line. */
function oneLine(message) {
  const words = typeof message === "string" ? message : message ? JSON.stringify(message) : "";
  const line = words.replace(/\s+/g, " ").trim();
  return line && line[0].toUpperCase() + line.slice(1) + (/[.!?]$/.test(line) ? "" : ".");
}

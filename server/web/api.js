// The way to the server: requests with the key, errors as one type, event streams as frames.

const KEY = "mlxcel.key";

// What the server answered in place of what was asked for. `status` 0: it could not be reached.
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export const theKey = () => sessionStorage.getItem(KEY) ?? "";

// Keeps the key until the tab is closed; an empty one is forgotten.
export function keepKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

// The answer to a request; raises ApiError for anything that is none, and says so to the page where a key is missing.
export async function ask(path, { body, signal } = {}) {
  const headers = {};
  if (theKey()) headers.authorization = `Bearer ${theKey()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST", headers, signal, cache: "no-store",
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (fault) {
    if (fault.name === "AbortError") throw fault;
    throw new ApiError("The server cannot be reached.", 0);
  }
  if (response.ok) return response;
  if (response.status === 401) document.dispatchEvent(new CustomEvent("key-needed"));
  throw new ApiError(await messageOf(response), response.status);
}

async function messageOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

export const json = async (path) => (await ask(path)).json();

// The frames of an event stream: `{comment}` or `{data}`, until it ends or its signal aborts it.
export async function* frames(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const whole = (held + value).split("\n\n");
      held = whole.pop();
      for (const text of whole) yield frame(text);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function frame(text) {
  if (text.startsWith(":")) return { comment: text.slice(1).trim() };
  const data = text.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
  return { data: data.join("\n") };
}

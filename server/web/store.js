// Conversations, kept in this browser: a bounded number, and where it has no more room the oldest go.

const INDEX = "mlxcel.conversations", ONE = "mlxcel.conversation.", LAST = "mlxcel.settings";
const MAX_CONVERSATIONS = 100;

function read(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

// What the list shows: `{id, title, changed}`, the last changed first.
export const listed = () => read(INDEX, []);

// A new one, with the settings of the last.
export function fresh() {
  const id = `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`;
  return { id, title: "", turns: [], settings: read(LAST, {}) };
}

export const load = (id) => read(ONE + id, null);

// Keeps `conversation`; false where the browser has no room for it alone.
export function keep(conversation) {
  const others = listed().filter((one) => one.id !== conversation.id);
  const entry = { id: conversation.id, title: titleOf(conversation), changed: Date.now() };
  let index = [entry, ...others];
  for (const gone of index.splice(MAX_CONVERSATIONS)) localStorage.removeItem(ONE + gone.id);
  for (;;) {
    try {
      localStorage.setItem(ONE + conversation.id, JSON.stringify(conversation));
      localStorage.setItem(LAST, JSON.stringify(conversation.settings));
      localStorage.setItem(INDEX, JSON.stringify(index));
      return true;
    } catch {
      if (index.length < 2) return false;
      localStorage.removeItem(ONE + index.pop().id);
    }
  }
}

export function forget(id) {
  localStorage.removeItem(ONE + id);
  localStorage.setItem(INDEX, JSON.stringify(listed().filter((one) => one.id !== id)));
}

// Its name, or else the beginning of what was first asked.
export function titleOf(conversation) {
  const first = conversation.turns.find((turn) => turn.role === "user")?.content ?? "";
  return conversation.title || first.replace(/\s+/g, " ").trim().slice(0, 60) || "New conversation";
}

// The conversation as a file: OpenAI's messages with the settings beside them, or Markdown.
export function exported(conversation, kind) {
  if (kind === "json") {
    const { system, tools, ...sampling } = conversation.settings;
    return JSON.stringify({ title: titleOf(conversation), messages: messages(conversation), tools, sampling }, null, 2);
  }
  const said = conversation.turns.map((turn) => {
    const calls = (turn.calls ?? []).map((call) => `\n\n\`\`\`json\n${call.name}(${call.arguments})\n\`\`\``).join("");
    const name = { user: "You", assistant: "Answer", tool: "Result" }[turn.role];
    return `## ${name}\n\n${turn.content}${calls}\n`;
  });
  return `# ${titleOf(conversation)}\n\n${said.join("\n")}`;
}

// The conversation as the server takes it. An answer that never began is left out.
export function messages(conversation) {
  const system = conversation.settings.system ? [{ role: "system", content: conversation.settings.system }] : [];
  return [...system, ...conversation.turns.filter(isSaid).map(message)];
}

const isSaid = (turn) => turn.role !== "assistant" || turn.content || turn.calls?.length;

function message(turn) {
  if (turn.role === "tool") return { role: "tool", tool_call_id: turn.call, content: turn.content };
  const said = { role: turn.role, content: turn.content };
  if (turn.calls?.length) {
    said.tool_calls = turn.calls.map((call) => (
      { id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
  }
  return said;
}

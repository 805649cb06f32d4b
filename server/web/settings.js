// How a conversation is asked: the system prompt, sampling and tools, in a dialog.

import { byId, el } from "./dom.js";

const SAMPLING = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: "any" },
  { name: "top_p", label: "Top-p", min: 0, max: 1, step: "any" },
  { name: "top_k", label: "Top-k", min: 0, step: 1 },
  { name: "min_p", label: "Min-p", min: 0, max: 1, step: "any" },
  { name: "max_tokens", label: "Most tokens", min: 1, step: 1, unset: "no bound" },
  { name: "seed", label: "Seed", min: 0, step: 1, unset: "random" },
];

// The fields of a request that are set.
export const samplingOf = (settings) =>
  Object.fromEntries(SAMPLING.filter(({ name }) => settings[name] !== undefined).map(({ name }) => [name, settings[name]]));

// What is set, in a line.
function summary(settings) {
  const said = SAMPLING.filter(({ name }) => settings[name] !== undefined).map(({ name, label }) => `${label.toLowerCase()} ${settings[name]}`);
  if (settings.system) said.unshift("system prompt");
  if (settings.tools) said.push(`tools: ${JSON.parse(settings.tools).map((tool) => tool.function?.name).join(", ")}`);
  return said.join(" · ");
}

// Why `text` is no list of tools, or an empty text.
function fault(text) {
  try {
    const tools = JSON.parse(text);
    if (!Array.isArray(tools)) return "A JSON list is wanted.";
    const bad = tools.findIndex((tool) => tool?.type !== "function" || !tool.function?.name);
    return bad < 0 ? "" : `Tool ${bad + 1} needs "type": "function" and "function" with a "name".`;
  } catch (wrong) {
    return `Not JSON: ${wrong.message}`;
  }
}

export class Settings {
  // `current` gives the conversation, `changed` is called when its settings were.
  constructor(current, changed) {
    this.current = current;
    this.changed = changed;
    this.dialog = byId("settings");
    this.inputs = SAMPLING.map(({ name, label, unset, ...bounds }) => {
      const input = el("input", { id: `set-${name}`, name, type: "number", inputmode: "decimal", ...bounds });
      byId("sampling").append(el("div", {}, el("label", { for: input.id }, label), input));
      return input;
    });
    byId("settings-button").onclick = () => this.#open();
    byId("settings-cancel").onclick = () => this.dialog.close();
    this.dialog.querySelector("form").addEventListener("submit", (event) => this.#keep(event));
  }

  // Shows the server's own values where none is set.
  serverSays(params) {
    SAMPLING.forEach(({ name, unset }, i) => {
      const value = params[name];
      this.inputs[i].placeholder = value === -1 ? unset ?? "" : String(Number(value?.toFixed(4)));
    });
  }

  refresh() {
    const said = summary(this.current().settings);
    byId("settings-summary").textContent = byId("settings-summary").title = said;
    byId("composer-help").hidden = said !== "";
  }

  #open() {
    const { settings } = this.current();
    byId("system").value = settings.system ?? "";
    byId("tools").value = settings.tools ?? "";
    byId("tools-error").hidden = true;
    for (const input of this.inputs) input.value = settings[input.name] ?? "";
    this.dialog.showModal();
  }

  #keep(event) {
    const tools = byId("tools").value.trim(), wrong = tools ? fault(tools) : "";
    byId("tools-error").textContent = wrong;
    byId("tools-error").hidden = !wrong;
    if (wrong) {
      event.preventDefault();
      byId("tools").focus();
      return;
    }
    const set = { system: byId("system").value.trim() || undefined, tools: tools || undefined };
    for (const input of this.inputs) set[input.name] = input.value === "" ? undefined : Number(input.value);
    this.current().settings = JSON.parse(JSON.stringify(set));
    this.changed();
  }
}

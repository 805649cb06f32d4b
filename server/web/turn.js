// One turn of a conversation as it is shown, and brought up to date while it is written.

import { button, copy, el } from "./dom.js";
import { Rendered } from "./markdown.js";

const NAMES = { user: "You", assistant: "Answer", tool: "Result of a call" };
const ENDS = {
  length: "cut: the bound on its tokens, or the end of the context",
  stopped: "stopped",
};

// The numbers under an answer.
function statistics(turn) {
  const { usage, timings, firstMs } = turn.stats ?? {};
  const said = [];
  if (usage) {
    said.push(`${usage.completion_tokens} token${usage.completion_tokens === 1 ? "" : "s"}`);
    if (timings?.predicted_per_second && usage.completion_tokens > 1) said.push(`${timings.predicted_per_second.toFixed(1)} tok/s`);
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    said.push(`prompt ${usage.prompt_tokens}${cached ? `, ${cached} of them cached` : ""}`);
  }
  if (firstMs !== undefined) said.push(`first token after ${(firstMs / 1000).toFixed(2)} s`);
  if (ENDS[turn.finish]) said.push(ENDS[turn.finish]);
  return said;
}

// `acts`: what may be done with the turn: `edit(text)`, `again()`, each a function or missing.
export class TurnView {
  constructor(turn, number, acts) {
    this.turn = turn;
    this.acts = acts;
    const id = `turn-${number}`;
    this.text = el("div", { class: "text" });
    this.acted = el("div", { class: "acts" });
    this.node = el("article", { class: `turn ${turn.role}`, "aria-labelledby": id },
      el("h2", { id, class: "who" }, NAMES[turn.role]), this.text, this.acted);
    if (turn.role === "assistant") this.#answer();
    else this.text.append(turn.content);
    this.update();
  }

  #answer() {
    this.rendered = new Rendered(this.text);
    this.thought = el("div", { class: "thought" });
    this.summary = el("summary", {}, "");
    this.reasoning = el("details", { class: "reasoning", hidden: true }, this.summary, this.thought);
    this.calls = el("div", { class: "calls" });
    this.progress = el("p", { class: "progress muted" });
    this.error = el("p", { class: "error" });
    this.stats = el("p", { class: "stats muted small" });
    this.text.before(this.reasoning);
    this.text.after(this.calls, this.progress, this.error, this.stats);
  }

  // Shows what the turn is by now. While it `runs`, `progress` says what is waited for before its first token.
  update({ runs = false, progress = "" } = {}) {
    if (this.turn.role === "assistant") this.#updateAnswer(runs, progress);
    if (runs !== this.runs) this.#offer(runs);
    this.runs = runs;
  }

  #updateAnswer(runs, progress) {
    const turn = this.turn, isEmpty = !turn.content && !turn.reasoning && !turn.calls.length;
    this.rendered.update(turn.content);
    this.reasoning.hidden = !turn.reasoning;
    const num = turn.stats?.usage?.completion_tokens_details?.reasoning_tokens;
    this.summary.textContent = runs && !turn.content ? "Thinking …" : num ? `Thought in ${num} tokens` : "Thought";
    if (this.thought.textContent !== turn.reasoning) this.thought.textContent = turn.reasoning;
    this.#updateCalls();
    this.progress.textContent = runs && isEmpty ? progress || "Waiting for the first token" : "";
    this.progress.hidden = !this.progress.textContent;
    this.error.textContent = turn.error ?? "";
    this.error.hidden = !turn.error;
    const said = isEmpty && !turn.error && turn.finish !== "stopped" ? ["an empty answer"] : [];
    this.stats.textContent = runs ? "" : [...said, ...statistics(turn)].join(" · ");
    this.node.setAttribute("aria-busy", String(runs));
  }

  #updateCalls() {
    const { calls } = this.turn;
    while (this.calls.children.length < calls.length) {
      const call = calls[this.calls.children.length];
      this.calls.append(el("div", { class: "code" },
        el("div", { class: "code-head" }, el("span", {}, "Calls ", el("strong", {}, call.name))),
        el("pre", { tabindex: 0, role: "group", "aria-label": `Arguments of ${call.name}` }, el("code"))));
    }
    calls.forEach((call, i) => {
      const code = this.calls.children[i].querySelector("code");
      if (code.textContent !== call.arguments) code.textContent = call.arguments;
    });
  }

  #offer(runs) {
    const { edit, again } = this.acts, copied = button("Copy", () => copy(this.turn.content, copied), { class: "quiet small" });
    const offered = runs ? [] : [
      this.turn.content && copied,
      edit && button("Edit", () => this.#edit(edit), { class: "quiet small" }),
      again && button(this.turn.error ? "Try again" : "Regenerate", again, { class: "quiet small" }),
    ];
    this.acted.replaceChildren(...offered.filter(Boolean));
  }

  #edit(edit) {
    const area = el("textarea", { "aria-label": "Your message, edited", rows: Math.min(this.turn.content.split("\n").length + 1, 12) });
    area.value = this.turn.content;
    const back = () => {
      form.replaceWith(this.text);
      this.acted.hidden = false;
      this.acted.querySelector("button")?.focus();
    };
    const form = el("form", { class: "edit" }, area, el("div", { class: "row end" },
      button("Cancel", back, { class: "quiet" }), el("button", { type: "submit", class: "primary" }, "Send again")));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (area.value.trim()) edit(area.value.trim());
    });
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); back(); }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
    });
    this.text.replaceWith(form);
    this.acted.hidden = true;
    area.focus();
  }
}

// The form for what the calls of the last answer gave; `send` gets a text for each.
export function resultsForm(calls, send) {
  const areas = calls.map((call) => el("textarea", { rows: 2, "aria-label": `Result of ${call.name}` }));
  const form = el("form", { class: "turn results" }, el("h2", { class: "who" }, "What the calls gave"),
    ...calls.map((call, i) => el("div", {}, el("p", { class: "small" }, el("code", {}, call.name)), areas[i])),
    el("div", { class: "row end" }, el("button", { type: "submit", class: "primary" }, calls.length > 1 ? "Send the results" : "Send the result")));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(areas.map((area) => area.value));
  });
  return form;
}

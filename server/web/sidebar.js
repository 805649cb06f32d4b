// The conversations of this browser: choose one, name it, take it along as a file, let it go.

import { ask, button, byId, el } from "./dom.js";
import { exported, forget, keep, listed, load, titleOf } from "./store.js";

export class Sidebar {
  // `open` gets an id, or null for a new one; `gone` the id of one that is no more; `current` gives the shown one.
  constructor({ open, gone, current }) {
    Object.assign(this, { open, gone, current });
    this.list = byId("list");
    byId("new-button").onclick = () => this.#choose(null);
    byId("list-button").onclick = () => this.#unfold(!this.list.classList.contains("open"));
    byId("chat-view").addEventListener("pointerdown", () => this.#unfold(false));
    this.list.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.list.classList.contains("open")) {
        this.#unfold(false);
        byId("list-button").focus();
      }
    });
  }

  // Shows what is kept.
  refresh() {
    const shown = this.current().id, held = document.activeElement?.closest?.("#conversations li")?.dataset.id;
    byId("conversations").replaceChildren(...listed().map((one) => this.#entry(one, shown)));
    if (held) byId("conversations").querySelector(`[data-id="${held}"] button`)?.focus();
  }

  #entry({ id, title }, shown) {
    const isShown = id === shown;
    const choose = button(title, () => this.#choose(id), { class: "choose", "aria-current": isShown ? "true" : null });
    const more = isShown ? [el("div", { class: "row", role: "group", "aria-label": `What to do with ${title}` },
      button("Rename", () => this.#rename(id), { class: "quiet small" }),
      button("Export", () => this.#export(id, "md"), { class: "quiet small", "aria-label": "Export as Markdown" }),
      button("JSON", () => this.#export(id, "json"), { class: "quiet small", "aria-label": "Export as JSON" }),
      button("Delete", () => this.#delete(id, title), { class: "quiet small danger" }))] : [];
    return el("li", { class: isShown ? "shown" : null, "data-id": id }, choose, ...more);
  }

  #choose(id) {
    this.#unfold(false);
    this.open(id);
  }

  #unfold(isOpen) {
    this.list.classList.toggle("open", isOpen);
    byId("list-button").setAttribute("aria-expanded", String(isOpen));
    if (isOpen) byId("new-button").focus();
  }

  async #rename(id) {
    const conversation = this.#one(id), title = await ask("Rename the conversation", "Rename", titleOf(conversation));
    if (title === null) return;
    conversation.title = title;
    keep(conversation);
    this.refresh();
  }

  async #delete(id, title) {
    if (!(await ask(`Delete “${title}”?`, "Delete"))) return;
    this.gone(id);
    forget(id);
    this.open(listed()[0]?.id ?? null);
    byId("new-button").focus();
  }

  #export(id, kind) {
    const conversation = this.#one(id), type = kind === "json" ? "application/json" : "text/markdown";
    const url = URL.createObjectURL(new Blob([exported(conversation, kind)], { type }));
    const name = titleOf(conversation).replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40) || "conversation";
    el("a", { href: url, download: `${name}.${kind}` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  }

  // The one that is shown is the same object everywhere.
  #one(id) {
    const shown = this.current();
    return shown.id === id ? shown : load(id);
  }
}

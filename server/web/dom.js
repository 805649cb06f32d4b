// Elements without markup in strings: what is text stays text, whoever wrote it.

const SVG = "http://www.w3.org/2000/svg";

// The element of the page with this id.
export const byId = (id) => document.getElementById(id);

function filled(node, said, children) {
  for (const [name, value] of Object.entries(said)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// An element with attributes, listeners (`onclick`) and children, which are nodes or text.
export const el = (tag, said = {}, ...children) => filled(document.createElement(tag), said, children);

// The same, of SVG.
export const svg = (tag, said = {}, ...children) => filled(document.createElementNS(SVG, tag), said, children);

// A button that does `act`. `more` are its further attributes.
export const button = (text, act, more = {}) => el("button", { type: "button", onclick: act, ...more }, text);

// Copies `text`, and has the button say so for a moment. Without a secure context the old way is the only one.
export async function copy(text, said) {
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = el("textarea", { class: "unseen" });
    area.value = text;
    document.body.append(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
    said.focus();
  }
  const before = said.textContent;
  if (before === "Copied") return;
  said.textContent = done ? "Copied" : "Not copied";
  setTimeout(() => { said.textContent = before; }, 1500);
}

// Asks in a dialog: for a text where `value` is one, else for a yes. Resolves with the text, true or null.
export function ask(title, yes, value = null) {
  const dialog = byId("ask"), input = byId("ask-text");
  byId("ask-title").textContent = title;
  byId("ask-yes").textContent = yes;
  byId("ask-field").hidden = value === null;
  input.value = value ?? "";
  return new Promise((resolve) => {
    dialog.returnValue = "";
    byId("ask-yes").value = "yes";
    byId("ask-cancel").onclick = () => dialog.close("");
    dialog.onclose = () => resolve(dialog.returnValue === "yes" ? (value === null ? true : input.value.trim()) : null);
    dialog.showModal();
    if (value !== null) input.select();
  });
}

// Markdown as nodes, built one by one: no markup of an answer's ever reaches the page, and no address but the web's.
//
// A text is cut into blocks, and of a text that grows only the blocks that changed are built anew.

import { button, copy, el } from "./dom.js";

const MAX_DEPTH = 12, MAX_LABEL = 1000;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s(.*))?$/;
const RULE = /^ {0,3}(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)/;
const QUOTE = /^ {0,3}> ?/;
const DELIMITER = /^:?-+:?$/;

// The blocks of `text`. `outline` are the headings around, so that levels follow each other without a gap.
export function blocks(text, outline = [], depth = 0) {
  const lines = text.split("\n"), found = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) { at += 1; continue; }
    const [block, stop] = depth < MAX_DEPTH ? blockAt(lines, at, outline, depth) : paragraph(lines, at, true);
    block.raw = lines.slice(at, stop).join("\n") + (block.level ?? "");
    found.push(block);
    at = stop;
  }
  return found;
}

function blockAt(lines, at, outline, depth) {
  const line = lines[at];
  if (FENCE.test(line)) return fenced(lines, at);
  const heading = HEADING.exec(line);
  if (heading) {
    while (outline.length && outline.at(-1) >= heading[1].length) outline.pop();
    outline.push(heading[1].length);
    const level = Math.min(outline.length + 2, 6);
    return [{ kind: "heading", level, size: heading[1].length, text: withoutClosing(heading[2] ?? "") }, at + 1];
  }
  if (RULE.test(line)) return [{ kind: "rule" }, at + 1];
  if (QUOTE.test(line)) return quoted(lines, at, outline, depth);
  if (ITEM.test(line)) return listing(lines, at, outline, depth);
  if (isTable(lines, at)) return table(lines, at);
  return paragraph(lines, at, false);
}

const begins = (lines, at) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((kind) => kind.test(lines[at])) || isTable(lines, at);

// A heading may be closed by as many # as one likes. Found from the end: what a model writes may be long.
function withoutClosing(text) {
  const whole = text.trim();
  let end = whole.length;
  while (end && whole[end - 1] === "#") end -= 1;
  return !end || /\s/.test(whole[end - 1]) ? whole.slice(0, end).trim() : whole;
}

function paragraph(lines, at, isPlain) {
  let stop = at + 1;
  while (stop < lines.length && lines[stop].trim() && (isPlain || !begins(lines, stop))) stop += 1;
  return [{ kind: "paragraph", text: lines.slice(at, stop).map((line) => line.trimStart()).join("\n") }, stop];
}

function fenced(lines, at) {
  const [, fence, said] = FENCE.exec(lines[at]);
  const end = new RegExp(`^ {0,3}\\${fence[0]}{${fence.length},}\\s*$`);
  let stop = at + 1;
  while (stop < lines.length && !end.test(lines[stop])) stop += 1;
  const text = lines.slice(at + 1, stop).join("\n");
  return [{ kind: "code", language: said.trim().split(/\s/)[0], text }, Math.min(stop + 1, lines.length)];
}

function quoted(lines, at, outline, depth) {
  let stop = at;
  while (stop < lines.length && QUOTE.test(lines[stop])) stop += 1;
  const inner = lines.slice(at, stop).map((line) => line.replace(QUOTE, "")).join("\n");
  return [{ kind: "quote", blocks: blocks(inner, outline, depth + 1) }, stop];
}

function listing(lines, at, outline, depth) {
  const [, indent, marker] = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(marker), items = [];
  let stop = at;
  while (stop < lines.length) {
    const item = ITEM.exec(lines[stop]);
    if (!item || /\d/.test(item[2]) !== isOrdered || item[1].length < indent.length || RULE.test(lines[stop])) break;
    const width = item[0].length, own = [lines[stop].slice(width)];
    stop += 1;
    while (stop < lines.length && continues(lines, stop, indent.length)) {
      own.push(lines[stop].replace(new RegExp(`^ {0,${width}}`), ""));
      stop += 1;
    }
    items.push(blocks(own.join("\n").trimEnd(), outline, depth + 1));
  }
  return [{ kind: "list", isOrdered, start: parseInt(marker, 10) || 0, items }, stop];
}

// Whether a line goes on with the item of a list that is so far indented.
function continues(lines, at, indent) {
  const line = lines[at], deep = /^ */.exec(line)[0].length;
  if (line.trim()) return deep > indent + 1 || (!begins(lines, at) && lines[at - 1].trim() !== "");
  const next = lines.slice(at).find((one) => one.trim());
  return next !== undefined && /^ */.exec(next)[0].length > indent + 1;
}

const isTable = (lines, at) =>
  lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") &&
  cells(lines[at + 1]).every((cell) => DELIMITER.test(cell)) && cells(lines[at]).length === cells(lines[at + 1]).length;

const cells = (line) =>
  line.trim().replace(/^\|/, "").replace(/\|$/, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));

function table(lines, at) {
  let stop = at + 2;
  while (stop < lines.length && lines[stop].includes("|")) stop += 1;
  const sides = cells(lines[at + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "end") : "start"));
  return [{ kind: "table", head: cells(lines[at]), rows: lines.slice(at + 2, stop).map(cells), sides }, stop];
}

function built(block) {
  switch (block.kind) {
    case "code": return codeBlock(block);
    case "heading": return el(`h${block.level}`, { class: `size-${block.size}` }, ...inline(block.text));
    case "rule": return el("hr");
    case "quote": return el("blockquote", {}, ...block.blocks.map(built));
    case "list": return listNode(block);
    case "table": return tableNode(block);
    default: return el("p", {}, ...inline(block.text));
  }
}

function listNode(block) {
  const items = block.items.map((own) => {
    const [first, ...rest] = own;
    return el("li", {}, ...(first?.kind === "paragraph" ? inline(first.text) : first ? [built(first)] : []), ...rest.map(built));
  });
  return el(block.isOrdered ? "ol" : "ul", block.isOrdered && block.start !== 1 ? { start: block.start } : {}, ...items);
}

function tableNode(block) {
  const row = (tag, texts) =>
    el("tr", {}, ...block.head.map((_, i) => el(tag, { class: block.sides[i], scope: tag === "th" ? "col" : null }, ...inline(texts[i] ?? ""))));
  const body = el("tbody", {}, ...block.rows.map((texts) => row("td", texts)));
  return el("div", { class: "scrolls", tabindex: 0, role: "group", "aria-label": "Table" }, el("table", {}, el("thead", {}, row("th", block.head)), body));
}

function codeBlock(block) {
  const code = el("code", {}, document.createTextNode(block.text)), name = block.language || "text";
  const copied = button("Copy", () => copy(code.textContent, copied), { class: "quiet small" });
  const pre = el("pre", { tabindex: 0, role: "group", "aria-label": `Code, ${name}` }, code);
  return el("div", { class: "code" }, el("div", { class: "code-head" }, el("span", {}, name), copied), pre);
}

// An address that may be a link's: of the web or of mail, and nothing that runs.
function address(text) {
  try {
    const url = new URL(text);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

const link = (url, children) => el("a", { href: url, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);

// The nodes of a paragraph's text.
export function inline(text, depth = 0) {
  const nodes = [], missing = new Set();
  let plain = "", at = 0;
  const put = (node, length) => {
    if (plain) nodes.push(document.createTextNode(plain));
    plain = "";
    nodes.push(node);
    at += length;
  };
  while (at < text.length) {
    const found = depth < MAX_DEPTH ? spanAt(text, at, depth, missing) : null;
    if (found) put(...found);
    else if (text[at] === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) { plain += text[at + 1]; at += 2; }
    else { plain += text[at]; at += 1; }
  }
  if (plain) nodes.push(document.createTextNode(plain));
  return nodes;
}

// The span that begins at `at`, and its length, or null. `missing` are the marks that have no end further on.
function spanAt(text, at, depth, missing) {
  switch (text[at]) {
    case "\n": return [el("br"), 1];
    case "`": return codeSpan(text, at, missing);
    case "!": return text[at + 1] === "[" ? linkSpan(text, at + 1, depth, 1) : null;
    case "[": return linkSpan(text, at, depth, 0);
    case "<": return bracketed(text, at);
    case "*": case "_": case "~": return emphasis(text, at, depth, missing);
    case "h": return bare(text, at);
    default: return null;
  }
}

function codeSpan(text, at, missing) {
  const mark = /^`+/.exec(text.slice(at, at + 64))[0];
  if (missing.has(mark)) return null;
  const end = new RegExp(`(?<!\`)${mark}(?!\`)`, "g");
  end.lastIndex = at + mark.length;
  const found = end.exec(text);
  if (!found) { missing.add(mark); return [document.createTextNode(mark), mark.length]; }
  const inner = text.slice(at + mark.length, found.index).replaceAll("\n", " ");
  return [el("code", {}, inner.trim() ? inner.replace(/^ (.*) $/, "$1") : inner), found.index + mark.length - at];
}

function linkSpan(text, at, depth, before) {
  let open = 0, end = at;
  for (const last = Math.min(text.length, at + MAX_LABEL); end < last; end += 1) {
    if (text[end] === "\\") end += 1;
    else if (text[end] === "[") open += 1;
    else if (text[end] === "]" && --open === 0) break;
  }
  if (text[end] !== "]") return null;
  const target = /^\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+["'][^"']*["'])?\s*\)/.exec(text.slice(end + 1, end + 1 + 2 * MAX_LABEL));
  const url = target && address(target[1]);
  if (!url) return null;
  const label = inline(text.slice(at + 1, end), depth + 1);
  return [link(url, label.length ? label : [url]), end + 1 + target[0].length - at + before];
}

function bracketed(text, at) {
  const found = /^<((?:https?:\/\/|mailto:)[^\s<>]+)>/.exec(text.slice(at, at + 2 * MAX_LABEL));
  const url = found && address(found[1]);
  return url ? [link(url, [found[1]]), found[0].length] : null;
}

function bare(text, at) {
  if (!text.startsWith("http", at) || /\w/.test(text[at - 1] ?? "")) return null;
  const found = /^https?:\/\/[^\s<>"'`*]*[^\s<>"'`*.,;:!?)\]}]/.exec(text.slice(at, at + 2 * MAX_LABEL));
  const url = found && address(found[0]);
  return url ? [link(url, [found[0]]), found[0].length] : null;
}

function emphasis(text, at, depth, missing) {
  const one = text[at], mark = text[at + 1] === one ? one + one : one;
  const inner = at + mark.length;
  if (mark === "~" || missing.has(mark) || !(text[inner] ?? " ").trim()) return null;
  if (one === "_" && /\w/.test(text[at - 1] ?? "")) return null;
  for (let end = text.indexOf(mark, inner + 1); end !== -1; end = text.indexOf(mark, end + 1)) {
    const isDouble = mark.length === 1 && (text[end + 1] === one || text[end - 1] === one);
    if (!text[end - 1].trim() || text[end - 1] === "\\" || isDouble || (one === "_" && /\w/.test(text[end + mark.length] ?? ""))) continue;
    const stop = mark.length === 2 && text[end + 2] === one ? end + 1 : end;
    const tag = one === "~" ? "del" : mark.length === 2 ? "strong" : "em";
    return [el(tag, {}, ...inline(text.slice(inner, stop), depth + 1)), stop + mark.length - at];
  }
  missing.add(mark);
  return null;
}

// A text that grows, as nodes in `root`.
export class Rendered {
  constructor(root) {
    this.root = root;
    this.shown = [];
  }

  update(text) {
    const now = blocks(text);
    let same = 0;
    while (same < now.length && now[same].raw === this.shown[same]?.raw && now[same].kind === this.shown[same].kind) same += 1;
    const last = this.shown[same];
    if (same === this.shown.length - 1 && last.kind === "code" && now[same]?.kind === "code" && last.language === now[same].language && now[same].text.startsWith(last.text)) {
      this.root.children[same].querySelector("code").firstChild.appendData(now[same].text.slice(last.text.length));
      same += 1;
    }
    while (this.root.children.length > same) this.root.lastChild.remove();
    this.root.append(...now.slice(same).map(built));
    this.shown = now;
  }
}

// The table: only the lines that are seen exist, and only pages that were looked at are asked for.

import { ask, make, oneLine, problem, query, short, state, write } from "./state.js";

const LINE = 24, PAGE = 100, MAX_HEIGHT = 8e6, EXTRA = 4, MAX_PAGES = 40;
const WIDE = ["prompt", "answer", "error", "reason"];
export const DEFAULT = ["status", "step", "group", "run", "reward", "length", "prompt", "answer", "finish", "version_max", "error"];
const $ = (id) => document.getElementById(id);

let columns = [], pages = new Map(), total = 0, looked = 1, loaded = false, generation = 0, open = () => {};

export function begin(onOpen) {
  open = onOpen;
  $("scroll").addEventListener("scroll", () => { state.at = first(); write(); paint(); });
  new ResizeObserver(paint).observe($("scroll"));
}

export const shown = () => (state.columns.length ? state.columns : DEFAULT);
export const count = () => total;
export const complete = () => looked >= 1;

// Nothing is shown until it is known what there is.
export function forget() {
  generation += 1;
  [pages, total, loaded] = [new Map(), 0, false];
  paint();
}

// What is known of other rows, or of these rows before, is forgotten.
export async function reload() {
  generation += 1;
  pages = new Map();
  const mine = generation;
  try {
    await load(Math.floor(first(state.at) / PAGE), true);
    problem(null);
  } catch (error) {
    problem(error);
  }
  if (mine !== generation) return;
  scrollTo(state.at);
  paint();
}

export function head(known) {
  columns = [...known, { name: "prompt", kind: "excerpt" }, { name: "answer", kind: "excerpt" }];
  if (state.since !== null) columns.push({ name: "change", kind: "number" });
  $("head").replaceChildren(...visibleColumns().map((column) => {
    const sorted = state.sort === column.name ? (state.down ? " ▼" : " ▲") : "";
    const button = make("button", { type: "button", text: oneLine(column.name) + sorted, title: `sort by ${oneLine(column.name)}` });
    button.disabled = column.kind === "excerpt";
    button.addEventListener("click", () => sort(column.name));
    const cell = make("div", { cls: classOf(column) }, [button]);
    if (column.kind !== "excerpt" && column.name !== "change") cell.append(filter(column));
    return cell;
  }));
  $("scroll").style.minWidth = `${$("head").scrollWidth}px`;
}

function filter(column) {
  const hint = column.kind === "text" ? "part, =all of it, !not, none, any" : "0.5, >0.5, 0.2..0.8, !=1, none, any";
  const input = make("input", { type: "text", value: state.where[column.name] ?? "", title: hint, name: column.name });
  input.setAttribute("aria-label", `filter ${oneLine(column.name)}: ${hint}`);
  input.addEventListener("change", async () => {
    const before = { ...state.where };
    state.where[column.name] = input.value.trim();
    state.at = 0;
    input.setCustomValidity("");
    try {
      await ask("rows", { query: query(), from: 0, count: 1 });
      write();
      await reload();
    } catch (error) {
      input.setCustomValidity(error.message);
      problem(error);
      state.where = before;
    }
  });
  return input;
}

function sort(name) {
  // down, up, as it lies
  if (state.sort !== name) Object.assign(state, { sort: name, down: true });
  else if (state.down) state.down = false;
  else state.sort = "";
  state.at = 0;
  write();
  head(columns.filter((column) => !["prompt", "answer", "change"].includes(column.name)));
  reload();
}

const visibleColumns = () => [...shown(), "change"].map((name) => columns.find((column) => column.name === name)).filter((column) => column);
const classOf = (column) => `cell ${WIDE.includes(column.name) ? "wide" : ""} ${["number", "whole"].includes(column.kind) ? "number" : ""}`;

async function load(page, replaces = false) {
  const mine = generation;
  const told = await ask("rows", { query: query(), from: page * PAGE, count: PAGE }, { replaces });
  if (mine !== generation) return;
  ({ total, looked } = told);
  loaded = true;
  while (pages.size >= MAX_PAGES) pages.delete(pages.keys().next().value);
  pages.set(page, told.rows);
  $("spacer").style.height = `${Math.min(total * LINE, MAX_HEIGHT)}px`;
  describe();
}

export function describe(state_ = null) {
  if (state_) describe.state = state_;
  const known = describe.state ?? { rows: 0, left: 0, files: 0, errors: [] };
  const parts = [`${total.toLocaleString("en")} of ${known.rows.toLocaleString("en")} rows`];
  if (known.left) parts.push(`${known.files - known.left} of ${known.files} files read`);
  if (looked < 1) parts.push(`${Math.floor(looked * 100)} % looked at`);
  if (known.errors.length) parts.push(`${known.errors.length} files cannot be read`);
  $("count").textContent = parts.join(" · ");
  $("count").title = known.errors.join("\n");
}

// A million lines are higher than a browser can scroll: then a pixel is more than a pixel.
const lines = () => Math.max(Math.floor($("scroll").clientHeight / LINE), 1);
const height = () => Math.max(Math.min(total * LINE, MAX_HEIGHT) - $("scroll").clientHeight, 1);
const first = (at = null) => {
  if (at !== null) return at;
  const last = Math.max(total - lines(), 0);
  return Math.min(Math.round(($("scroll").scrollTop / height()) * last), last);
};

export function scrollTo(place) {
  const last = Math.max(total - lines(), 0);
  state.at = Math.min(Math.max(place, 0), last);
  $("scroll").scrollTop = last ? (state.at / last) * height() : 0;
}

let due = null;
export function paint() {
  const from = Math.max(state.at - EXTRA, 0), until = Math.min(state.at + lines() + EXTRA, total);
  const wanted = visibleColumns(), missing = new Set(), found = [];
  for (let place = from; place < until; place += 1) {
    const row = pages.get(Math.floor(place / PAGE))?.[place % PAGE];
    if (row === undefined) missing.add(Math.floor(place / PAGE));
    found.push(line(place, row, wanted));
  }
  const visible = $("visible");
  visible.style.top = `${$("scroll").scrollTop - (state.at - from) * LINE}px`;
  visible.replaceChildren(...found);
  clearTimeout(due);
  if (missing.size) due = setTimeout(() => fill([...missing]), 15);
  document.body.dataset.shown = missing.size || !loaded ? "" : `${state.at}/${total}`;
}

async function fill(wanted) {
  try {
    for (const [i, page] of wanted.entries()) await load(page, i === 0);
    paint();
  } catch (error) {
    problem(error);
  }
}

function line(place, row, wanted) {
  const cells = wanted.map((column) => {
    const value = row?.[column.name];
    const text = value === undefined ? "" : typeof value === "string" ? oneLine(value) : short(value);
    return make("div", { cls: classOf(column), text });
  });
  const found = make("div", { cls: `line ${row?.status ?? ""} ${row && row.key === state.row ? "chosen" : ""}` }, cells);
  if (row) found.addEventListener("click", () => open(row.key, place));
  return found;
}

export const rowAt = async (place) => {
  if (place < 0 || place >= total) return null;
  const page = Math.floor(place / PAGE);
  if (!pages.has(page)) await load(page);
  return pages.get(page)?.[place % PAGE] ?? null;
};

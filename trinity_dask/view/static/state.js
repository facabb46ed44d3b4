// What is looked at, as it stands in the address: whoever opens the address sees the same.

const WHERE = "w.";

export const state = {
  job: null, run: null, where: {}, text: "", since: null, sort: "", down: false,
  same: null, at: 0, row: null, panes: [], pins: [], colour: "logprob", columns: [],
};

export function read() {
  const told = new URLSearchParams(location.hash.slice(1));
  const number = (name) => (/^\d+$/.test(told.get(name) ?? "") ? Number(told.get(name)) : null);
  Object.assign(state, {
    job: told.get("job"), run: number("run"), text: told.get("text") ?? "", since: number("since"),
    sort: told.get("sort") ?? "", down: told.get("down") === "1", at: number("at") ?? 0,
    row: told.get("row"), panes: told.getAll("pane"), pins: told.getAll("pin"),
    colour: told.get("colour") ?? "logprob", columns: told.getAll("column"), where: {},
  });
  for (const [name, value] of told) if (name.startsWith(WHERE)) state.where[name.slice(WHERE.length)] = value;
}

export function write() {
  const told = new URLSearchParams();
  for (const name of ["job", "text", "sort", "same", "row"]) if (state[name]) told.set(name, state[name]);
  if (state.run !== null && !state.job) told.set("run", state.run);
  if (state.since !== null) told.set("since", state.since);
  if (state.down) told.set("down", "1");
  if (state.at) told.set("at", state.at);
  if (state.colour !== "logprob") told.set("colour", state.colour);
  for (const [name, value] of Object.entries(state.where)) if (value) told.set(WHERE + name, value);
  for (const [name, key] of [["pane", "panes"], ["pin", "pins"], ["column", "columns"]])
    for (const value of state[key]) told.append(name, value);
  history.replaceState(null, "", `#${told}`);
}

export const query = () => ({
  where: state.where, text: state.text, since: state.since, sort: state.sort, down: state.down,
  same: state.same ? JSON.parse(state.same) : null,
});

let waiting = null; // the last question for rows: one that is not wanted any more is given up

export async function ask(call, asked = {}, { replaces = false } = {}) {
  if (replaces) {
    waiting?.abort();
    waiting = new AbortController();
  }
  const q = encodeURIComponent(JSON.stringify({ job: state.job, ...asked }));
  const options = replaces ? { signal: waiting.signal } : {};
  const answer = await fetch(`rollouts/api/${call}?q=${q}`, options);
  const told = await answer.json();
  if (!answer.ok) throw new Error(told.error);
  return told;
}

export async function jobs() {
  const answer = await fetch("rollouts/api/jobs");
  return (await answer.json()).jobs;
}

export function problem(error) {
  if (error?.name === "AbortError") return;
  const place = document.getElementById("problem");
  place.textContent = error ? error.message || String(error) : "";
  place.hidden = !error;
}

// An element with a class, text and children. Text is never markup.
export function make(tag, { cls = "", text = null, ...rest } = {}, children = []) {
  const found = document.createElement(tag);
  if (cls) found.className = cls;
  if (text !== null) found.textContent = text;
  for (const [name, value] of Object.entries(rest)) found[name] = value;
  found.append(...children);
  return found;
}

// What cannot be seen (control and format characters, halves of characters) is written out.
const UNSEEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu;
export const visible = (text) => text.replace(UNSEEN, (c) =>
  c === "\n" || c === "\t" ? c : `⟨U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
export const oneLine = (text) => visible(text).replace(/\n/g, "⏎").replace(/\t/g, "⇥");
export const short = (value) => typeof value !== "number" || Number.isInteger(value) ? String(value)
  : Math.abs(value) >= 1e-3 && Math.abs(value) < 1e5 ? String(Number(value.toPrecision(4))) : value.toExponential(2);

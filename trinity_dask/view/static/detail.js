// Rows in full, one or several side by side.

import { ask, make, oneLine, problem, short, state, visible } from "./state.js";
import { strip } from "./tokens.js";

const $ = (id) => document.getElementById(id);
const SHOWN = ["key", "prompt", "answer", "messages", "tools", "info", "parts", "traceback", "earlier", "source", "tokens", "numbers", "slices", "differs", "job"];
let rows = [], asked = 0;

// Show what the state says: the panes, or the row.
export async function show() {
  asked += 1;
  const mine = asked;
  const several = state.panes.length > 0;
  $("side").hidden = !several && !state.row;
  if ($("side").hidden) {
    rows = [];
    document.body.dataset.open = "";
    return;
  }
  try {
    const found = several ? await together(state.panes) : [{ ...(await ask("row", { row: state.row })), job: state.job }];
    if (mine !== asked) return;
    rows = found;
    paint();
    document.body.dataset.open = found.map((row) => row.key).join(" ");
  } catch (error) {
    problem(error);
  }
}

// Of one job or of several: what differs is told within a job; the first of each is its measure.
async function together(panes) {
  const known = panes.map((pane) => JSON.parse(pane)), found = new Map();
  for (const job of new Set(known.map(([job]) => job))) {
    const names = known.filter(([of]) => of === job).map(([, name]) => name);
    const told = await ask("panes", { job, rows: names });
    told.panes.forEach((row) => found.set(`${job}\n${row.key}`, { ...row, job }));
  }
  return known.map(([job, name]) => found.get(`${job}\n${name}`)).filter((row) => row);
}

export async function group() {
  const told = await ask("panes", { row: state.row });
  return told.panes.map((row) => JSON.stringify([state.job, row.key]));
}

export function paint() {
  const names = new Set(rows.flatMap((row) => row.numbers));
  const options = [...names].map((name) => make("option", { value: name, text: name }));
  $("colour").replaceChildren(make("option", { value: "none", text: "none" }), ...options);
  $("colour").value = names.has(state.colour) ? state.colour : "none";
  $("panes").replaceChildren(...rows.map((row, i) => pane(row, i === 0)));
  $("token").textContent = rows.some((row) => row.tokens) ? "point at a token, or walk with the arrow keys" : "";
}

function pane(row, first) {
  const title = [row.group, row.run !== undefined ? `run ${row.run}` : null, row.status, row.reward !== undefined ? `reward ${short(row.reward)}` : null];
  const found = [make("h2", { text: title.filter((s) => s).map(oneLine).join(" · ") })];
  if (row.error) found.push(make("pre", { text: visible(row.error) }));
  if (row.traceback) found.push(folded("traceback", [make("pre", { text: visible(row.traceback) })]));
  if (row.earlier.length) found.push(folded("earlier attempts", row.earlier.map((text) => make("pre", { text: visible(text) }))));
  found.push(...strip(row, first));
  if (row.messages) found.push(folded(`conversation: ${row.messages.length} messages`, row.messages.flatMap(message), !row.tokens));
  else found.push(...texts(row));
  for (const name of ["tools", "parts", "info"])
    if (row[name] !== null && Object.keys(row[name]).length) found.push(folded(name, [make("pre", { text: visible(JSON.stringify(row[name], null, 1)) })]));
  found.push(folded("everything of this row", [facts(row)], !row.tokens));
  return make("article", { cls: "pane" }, found);
}

const folded = (title, children, open = false) => make("details", { open }, [make("summary", { text: title }), ...children]);

function texts(row) {
  const parts = [["prompt", row.prompt], ["answer", row.answer]].filter(([, text]) => text);
  return parts.length ? [folded("as text", parts.flatMap(([role, text]) => [make("div", { cls: "role", text: role }), make("div", { cls: "text", text: visible(text) })]), !row.tokens)] : [];
}

function message(told) {
  const name = told.name ? `${told.role} (${told.name})` : told.role;
  const found = [make("div", { cls: "role", text: oneLine(name) })];
  const body = told.text ? [make("div", { cls: "text", text: visible(told.text) })] : [];
  if (told.reasoning) found.push(folded("reasoning", [make("div", { cls: "text", text: visible(told.reasoning) })]));
  if (told.role === "tool") found.push(folded("result", body));
  else found.push(...body);
  for (const call of told.calls) found.push(folded(`calls ${oneLine(call.name)}`, [make("pre", { text: visible(call.arguments) })]));
  return found;
}

function facts(row) {
  const named = Object.entries(row).filter(([name]) => !SHOWN.includes(name));
  if (row.source) named.push(["source", row.source]);
  named.push(["row", row.key]);
  return make("dl", {}, named.flatMap(([name, value]) => [make("dt", { text: oneLine(name) }), make("dd", { text: typeof value === "string" ? visible(value) : short(value) })]));
}

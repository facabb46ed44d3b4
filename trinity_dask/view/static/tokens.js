// One answer token by token: its colour by a number, all numbers at a token under the pointer.

import { ask, make, oneLine, problem, short, state, visible } from "./state.js";

const EXACT = { version: 6 };
export const DIVERGING = ["difference", "advantage", "train_advantage", "reward"];

// The class of a value; most: the largest of its kind in the row.
export function colourOf(name, value, most) {
  if (value === null || value === undefined) return "";
  if (name === "mask" || name === "train_mask") return value ? "v0" : "v1";
  if (name in EXACT) return `v${((value % EXACT[name]) + EXACT[name]) % EXACT[name]}`;
  if (DIVERGING.includes(name)) {
    const size = Math.abs(value) / (most || 1);
    return size < 1e-9 ? "" : `${value < 0 ? "b" : "a"}${size < 0.1 ? 1 : size < 0.5 ? 2 : 3}`;
  }
  if (name === "entropy") return `q${5 - Math.min(Math.floor((value / (most || 1)) * 5), 5)}`;
  return `q${Math.min(Math.floor(Math.exp(value) * 6), 5)}`; // a log-prob
}

export function strip(row, alone) {
  const { prompt_length: length, slices } = row;
  const [prompt, answer] = slices;
  const found = [];
  if (row.tokens === 0) return found;
  if (answer.without) found.push(make("p", { cls: "note", text: answer.without }));
  if (prompt && length)
    found.push(make("details", { open: alone && length <= 200 }, [make("summary", { text: `prompt: ${length} tokens` }), part(row, prompt, [])]));
  found.push(make("h3", { text: `answer: ${row.tokens - (length ?? 0)} tokens` }), part(row, answer, row.differs ?? []));
  return found;
}

function part(row, slice, differs) {
  const place = make("div", { cls: "tokens", tabIndex: 0 });
  place.append(...spans(row, slice, differs));
  place.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
    const all = [...place.querySelectorAll("span[data-at]")], now = all.findIndex((one) => one.classList.contains("at"));
    const next = all[now + (event.key === "ArrowRight" ? 1 : -1)] ?? all[0];
    if (next) show(row, next);
    event.preventDefault();
  });
  place.addEventListener("pointerover", (event) => event.target.dataset?.at && show(row, event.target));
  const end = slice === row.slices[0] ? row.prompt_length : slice.total;
  if (slice.stop < end) place.append(more(row, place, slice.stop, end, differs));
  if (slice === row.slices[0] && slice.start > 0)
    place.prepend(make("span", { cls: "note", text: `[${slice.start} earlier tokens] ` }));
  return place;
}

function more(row, place, from, to, differs) {
  const button = make("button", { type: "button", text: `${to - from} more tokens` });
  button.addEventListener("click", async () => {
    try {
      const slice = await ask("tokens", { row: row.key, from, to, job: row.job ?? state.job });
      button.remove();
      row.slices.push(slice);
      place.append(...spans(row, slice, differs));
      if (slice.stop < to) place.append(more(row, place, slice.stop, to, differs));
    } catch (error) {
      problem(error);
    }
  });
  return button;
}

// A piece of text, with what cannot be seen in elements of its own.
function written(text) {
  const shown = visible(text.replace(/\r\n/g, "\n"));
  return shown.split(/(⟨U\+[0-9A-F]{4,6}⟩)/).filter((s) => s !== "").map((s, i) =>
    i % 2 && /^⟨U\+/.test(s) && text !== s ? make("span", { cls: "control", text: s }) : s);
}

function spans(row, slice, differs) {
  const first = Math.max(slice.start - slice.prompt_length, 0), numbers = slice.numbers;
  const values = numbers[state.colour] ?? [];
  const most = Math.max(...values.map((v) => Math.abs(v ?? 0)), 0);
  return slice.ids.map((id, i) => {
    const at = slice.start + i - slice.prompt_length; // in the answer; below 0 in the prompt
    const text = slice.pieces === null ? `⟪${id}⟫` : slice.pieces[i];
    const span = make("span", {}, slice.pieces === null ? [text] : written(text));
    span.dataset.at = at;
    const n = at - first;
    if (at >= 0) {
      const colour = colourOf(state.colour, values[n], most);
      if (colour) span.classList.add(colour);
      if (numbers.mask?.[n] === false) span.classList.add("masked");
      if (differs.some(([from, to]) => at >= from && at < to)) span.classList.add("differs");
    } else span.classList.add("unseen");
    span._told = { id, text, numbers: Object.fromEntries(Object.entries(numbers).map(([k, v]) => [k, at >= 0 ? v[n] : undefined])) };
    return span;
  });
}

function show(row, span) {
  document.querySelectorAll(".tokens .at").forEach((one) => one.classList.remove("at"));
  const owner = span.closest("span[data-at]");
  owner.classList.add("at");
  const { id, text, numbers } = owner._told;
  const told = Object.entries(numbers).filter(([, v]) => v !== undefined && v !== null).map(([k, v]) => `${k} ${short(v)}`);
  const at = Number(owner.dataset.at);
  const where = at < 0 ? `prompt token ${at + (row.prompt_length ?? 0) + 1}` : `token ${at + 1} of the answer`;
  document.getElementById("token").textContent = [where, `id ${id}`, `“${oneLine(text)}”`, ...told].join(" · ");
}

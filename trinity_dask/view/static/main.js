// The page: what is looked at is in the address, and what is new is asked for while it is seen.

import * as detail from "./detail.js";
import { ask, jobs, make, oneLine, problem, query, read, state, write } from "./state.js";
import * as table from "./table.js";

const BUSY_MS = 300, IDLE_MS = 3000;
const $ = (id) => document.getElementById(id);
let version = -1, names = "", timer = null;

async function begin() {
  read();
  let known = [];
  try {
    known = await jobs();
  } catch (error) {
    problem(error);
  }
  $("job").replaceChildren(...known.map(({ job, name }) => make("option", { value: job, text: oneLine(name), title: job })));
  const named = known.find(({ job }) => job === state.job) ?? known.find(({ runs }) => runs.includes(state.run)) ?? (state.job ? null : known[0]);
  if (!named) {
    problem(new Error(state.job ? `this page knows no job ${state.job}` : "no run is known here yet"));
    if (!known.length) setTimeout(begin, IDLE_MS);
    return;
  }
  state.job = named.job;
  write();
  await all();
}

async function all() {
  $("job").value = state.job;
  $("text").value = state.text;
  $("since").value = state.since ?? "";
  $("compare").hidden = state.pins.length < 2;
  $("compare").textContent = `compare ${state.pins.length}`;
  version = -1;
  names = "";
  table.forget();
  await look();
  await detail.show();
}

// Ask for what is new; nothing is asked while the page is not seen.
async function look() {
  clearTimeout(timer);
  let busy = false;
  if (!document.hidden) {
    try {
      const now = await ask("state");
      const listed = JSON.stringify([now.columns, state.since !== null]);
      if (listed !== names) {
        names = listed;
        table.head(now.columns);
        choose(now.columns);
      }
      const changed = now.version !== version;
      version = now.version;
      table.describe(now);
      if (changed) await table.reload();
      busy = now.left > 0 || !table.complete();
    } catch (error) {
      problem(error);
    }
  }
  clearTimeout(timer);
  timer = setTimeout(look, busy ? BUSY_MS : IDLE_MS);
}

function choose(known) {
  const offered = [...known.map(({ name }) => name), "prompt", "answer"];
  $("columns").replaceChildren(...offered.map((name) => {
    const box = make("input", { type: "checkbox", checked: table.shown().includes(name), name });
    box.addEventListener("change", () => {
      state.columns = offered.filter((one) => (one === name ? box.checked : table.shown().includes(one)));
      write();
      table.head(known);
      table.paint();
    });
    return make("label", {}, [box, ` ${oneLine(name)}`]);
  }));
}

async function open(row, place = null) {
  Object.assign(state, { row, panes: [] });
  if (place !== null) state.place = place;
  write();
  table.paint();
  await detail.show();
}

async function step(by) {
  if (!state.row) return;
  const told = state.place ?? (await ask("place", { query: query(), row: state.row })).place;
  const next = told === null ? null : await table.rowAt(told + by);
  if (!next) return;
  if (Math.abs(told + by - state.at) > 5) table.scrollTo(told + by - 3);
  await open(next.key, told + by);
}

function close() {
  Object.assign(state, { row: null, panes: [], place: null });
  write();
  table.paint();
  detail.show();
}

async function show(panes) {
  state.panes = panes;
  write();
  await detail.show();
}

function onChange(id, set) {
  $(id).addEventListener("change", () => {
    set($(id).value);
    Object.assign(state, { at: 0, place: null });
    write();
    all();
  });
}

const guarded = (work) => (...args) => Promise.resolve(work(...args)).catch(problem);

onChange("job", (value) => Object.assign(state, { job: value, row: null, panes: [] }));
onChange("text", (value) => { state.text = value; });
onChange("since", (value) => { state.since = /^\d+$/.test(value) ? Number(value) : null; });
$("jump").addEventListener("change", () => {
  if ($("jump").value) table.scrollTo(Number($("jump").value) - 1);
  write();
  table.paint();
});
$("clear").addEventListener("click", () => {
  Object.assign(state, { where: {}, text: "", since: null, sort: "", down: false, at: 0, same: null, place: null });
  write();
  all();
});
$("previous").addEventListener("click", guarded(() => step(-1)));
$("next").addEventListener("click", guarded(() => step(1)));
$("close").addEventListener("click", close);
$("group").addEventListener("click", guarded(async () => show(await detail.group())));
$("same").addEventListener("click", guarded(async () => {
  Object.assign(state, { same: JSON.stringify([state.job, state.row]), at: 0, place: null });
  write();
  await all();
}));
$("pin").addEventListener("click", () => {
  const mine = JSON.stringify([state.job, state.row]);
  state.pins = state.pins.includes(mine) ? state.pins.filter((pin) => pin !== mine) : [...state.pins, mine];
  write();
  $("compare").hidden = state.pins.length < 2;
  $("compare").textContent = `compare ${state.pins.length}`;
});
$("compare").addEventListener("click", guarded(() => show(state.pins)));
$("colour").addEventListener("change", () => {
  state.colour = $("colour").value;
  write();
  detail.paint();
});
document.addEventListener("keydown", (event) => {
  if (["INPUT", "SELECT"].includes(event.target.tagName)) return;
  if (event.key === "Escape") close();
  if (event.key === "j" || event.key === "k") guarded(step)(event.key === "j" ? 1 : -1);
});
document.addEventListener("visibilitychange", () => !document.hidden && look());
addEventListener("hashchange", () => { read(); begin(); });
table.begin(guarded(open));
begin();

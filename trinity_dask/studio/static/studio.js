// The page paints what the server says a field may be, and sends each change. It decides nothing:
// values, limits, problems, the YAML and the command line come from the server.
"use strict";
const token = new URLSearchParams(location.search).get("token");
const $ = (id) => document.getElementById(id);
let fields = [], mode = "beginner", section = null, problems = [], serial = 0, timer = 0;

async function call(name, args = {}) {
  const response = await fetch(name, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Studio-Token": token },
    body: JSON.stringify(args),
  });
  const answer = await response.json();
  if (answer.error) throw new Error(answer.error);
  return answer;
}

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

const identity = (field) => `${field.mode}/${field.section}/${field.label}`;
const isText = (field) => ["list", "mapping"].includes(field.kind);
const written = (field) =>
  field.value === null || field.value === undefined ? "" : isText(field) ? JSON.stringify(field.value) : String(field.value);

// the value of an input, as JSON; a number that is none stays the text that was typed
function read(field, input) {
  if (field.kind === "switch") return input.checked;
  const text = input.value.trim();
  if (text === "") return field.kind === "text" && typeof field.value === "string" && input.dataset.null !== "1" ? "" : null;
  if (field.kind === "whole" || field.kind === "number") {
    const number = Number(text);
    return Number.isNaN(number) ? text : number;
  }
  if (isText(field)) {
    try { return JSON.parse(text); } catch { return text; }
  }
  return input.value;
}

function paintField(field) {
  const id = identity(field).replace(/[^\w-]/g, "_");
  let input;
  if (field.kind === "note") input = element("span", {}, field.help);
  else if (field.kind === "switch") input = element("input", { id, type: "checkbox" });
  else if (isText(field)) input = element("textarea", { id, rows: 2, spellcheck: "false" });
  else input = element("input", { id, list: field.choices.length ? `${id}-choices` : null });
  if (field.kind === "switch") input.checked = field.value === true;
  else if (field.kind !== "note") input.value = written(field);
  const box = element("div", { class: "field", "data-key": field.key, "data-id": identity(field) });
  box.append(element("label", { for: id, title: field.key }, field.label), input);
  if (field.choices.length) {
    box.append(element("datalist", { id: `${id}-choices` }, ...field.choices.map((c) => element("option", { value: c }))));
  }
  const about = [field.label === field.key ? "" : field.key, field.range, field.choices.join(" | "), field.kind === "note" ? "" : field.help];
  box.append(element("small", {}, about.filter(Boolean).join(" · ")));
  const own = problems.find((line) => line.startsWith(`${field.key}=`) || line.startsWith(`${field.key}:`) || line.startsWith(`${field.key} `));
  const problem = field.problem || own;
  if (problem) {
    box.append(element("span", { class: "problem", id: `${id}-problem` }, problem));
    input.setAttribute("aria-invalid", "true");
    input.setAttribute("aria-describedby", `${id}-problem`);
  }
  input.addEventListener("change", () => change(field.key, read(field, input)));
  return box;
}

function paint() {
  const active = document.activeElement && document.activeElement.id;
  const wanted = $("search").value.toLowerCase();
  const shown = fields.filter((f) => f.mode === mode && f.visible);
  const sections = [...new Set(shown.map((f) => f.section))];
  if (!sections.includes(section)) section = sections[0];
  const here = shown.filter((f) =>
    wanted ? `${f.key} ${f.label} ${f.help}`.toLowerCase().includes(wanted) : mode === "beginner" || f.section === section);
  $("tabs").replaceChildren(...(mode === "expert" && !wanted ? sections : []).map((name) => {
    const button = element("button", { "aria-current": name === section ? "true" : "false", "data-tab": name }, name);
    button.addEventListener("click", () => { section = name; paint(); });
    return button;
  }));
  $("form").replaceChildren(...[...new Set(here.map((f) => f.section))].map((name) =>
    element("fieldset", {}, element("legend", {}, name), ...here.filter((f) => f.section === name).map(paintField))));
  for (const name of ["beginner", "expert"]) $(name).setAttribute("aria-pressed", String(name === mode));
  if (active && $(active)) $(active).focus();
}

function show(answer) {
  if (answer.fields) {
    fields = answer.fields;
    const option = (name) => element("option", { value: name }, name);
    for (const group of ["experiment", "engine"]) {
      const word = answer.words.find((w) => w.replace("+", "").startsWith(`${group}=`));
      $(group).replaceChildren(option(""), ...answer.presets[group].map(option));
      $(group).value = word ? word.split("=")[1] : "";
    }
  }
  for (const field of answer.changed || []) {
    const index = fields.findIndex((each) => identity(each) === identity(field));
    if (index >= 0) fields[index] = field;
  }
  if (answer.yaml !== undefined) $("yaml").textContent = answer.yaml;
  if (answer.command !== undefined) $("command").textContent = answer.command;
  paint();
}

async function act(name, args) {
  clearTimeout(timer); // what it would check is about to change
  serial += 1;
  document.body.dataset.state = "busy";
  $("message").textContent = "";
  try {
    const answer = await call(name, args);
    if (answer.problems) tell(answer.problems);
    else show(answer);
  } catch (error) {
    $("message").textContent = error.message;
  }
  check();
}

const change = (key, value) => act("set", { key, value });

function tell(found) {
  problems = found;
  $("verdict").textContent = found.length ? `${found.length} problem${found.length > 1 ? "s" : ""}` : "sound";
  $("problems").replaceChildren(...found.map((line) => element("li", {}, line)));
  for (const name of ["generate", "save", "run"]) {
    $(name).disabled = found.length > 0;
    $(name).title = found.join("\n");
  }
  paint();
}

// the validation of the command line, once typing has paused
function check() {
  const mine = ++serial;
  clearTimeout(timer);
  document.body.dataset.state = "checking";
  timer = setTimeout(async () => {
    const answer = await call("validate");
    if (mine !== serial) return;
    tell(answer.problems);
    document.body.dataset.state = answer.problems.length ? "problems" : "sound";
  }, 250);
}

async function press(name, args, after) {
  try {
    const answer = await call(name, args);
    if (answer.problems) tell(answer.problems);
    else after(answer);
  } catch (error) {
    $("message").textContent = error.message;
  }
}

function lines(text) {
  $("lines").hidden = false;
  $("lines").textContent = text;
}

async function watch() {
  const status = await call("status");
  $("state").textContent = status.state;
  $("log").textContent = status.log;
  $("log").scrollTop = $("log").scrollHeight;
  $("link").hidden = !status.link;
  if (status.link) $("link").href = status.link;
  document.body.dataset.run = status.state;
  if (status.state === "running") setTimeout(watch, 1000);
}

const presets = () => ["experiment", "engine"].filter((g) => $(g).value).map((g) => `${g === "experiment" ? "+" : ""}${g}=${$(g).value}`);

addEventListener("DOMContentLoaded", () => {
  for (const name of ["beginner", "expert"]) $(name).addEventListener("click", () => { mode = name; paint(); });
  for (const name of ["experiment", "engine"]) $(name).addEventListener("change", () => act("preset", { words: presets() }));
  $("form").addEventListener("submit", (event) => event.preventDefault());
  $("search").addEventListener("input", paint);
  $("undo").addEventListener("click", () => act("undo"));
  $("reset").addEventListener("click", () => act("reset"));
  $("save").addEventListener("click", () => press("save", { name: $("name").value }, (answer) => {
    $("message").textContent = `saved ${answer.path}; run it: ${answer.command}`;
  }));
  $("generate").addEventListener("click", () => {
    const url = URL.createObjectURL(new Blob([$("yaml").textContent], { type: "text/yaml" }));
    element("a", { href: url, download: `${$("name").value}.yaml` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  });
  $("diff").addEventListener("click", () => press("diff", { words: presets() }, (answer) => lines(answer.lines.join("\n") || "as the preset")));
  $("load").addEventListener("change", async () => act("load", { yaml: await $("load").files[0].text() }));
  $("run").addEventListener("click", () => press("run", {}, watch));
  $("stop").addEventListener("click", () => press("stop", {}, watch));
  addEventListener("keydown", (event) => {
    const typing = ["INPUT", "TEXTAREA"].includes(event.target.tagName);
    if (event.key === "z" && (event.ctrlKey || event.metaKey) && !typing) { event.preventDefault(); act("undo"); }
    if (event.key === "/" && !typing) { event.preventDefault(); $("search").focus(); }
  });
  act("page").then(watch);
});

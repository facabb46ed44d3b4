"""The configuration page in a browser: seen, changed, refused, saved, run."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from trinity_dask.cli import main
from trinity_dask.manager.config_registry import State, from_yaml
from trinity_dask.manager.config_registry.state import keys

TINY = "+experiment=sort_digits_tiny"
SOUND = "body[data-state=sound]"

# sets every field of the open tab as a user does, one after the other; returns key -> text
FILL = """async (wanted) => {
  const idle = async () => {
    while (document.body.dataset.state === "busy") await new Promise((go) => setTimeout(go, 5));
  };
  const failed = [];
  for (const [key, text] of Object.entries(wanted)) {
    const input = document.querySelector(`[data-key="${key}"] :is(input, textarea)`);
    if (!input) { failed.push(key); continue; }
    if (input.type === "checkbox") input.checked = text === "true";
    else input.value = text;
    input.dispatchEvent(new Event("change"));
    await idle();
  }
  return failed;
}"""


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory):
    """Link and directory of a page that begins with the smallest preset."""
    directory = tmp_path_factory.mktemp("studio")
    command = [sys.executable, "-m", "trinity_dask", "studio", TINY, "-d", str(directory)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.stdout.readline().split()[1], directory
    process.terminate()
    process.wait(30)


@pytest.fixture
def form(page, studio):
    """The page, begun anew and found sound."""
    page.goto(studio[0])
    page.wait_for_selector(".field")
    page.click("#reset")
    page.wait_for_selector(SOUND)
    return page


def field(page, label):
    return page.locator(f'[data-id$="/{label}"] :is(input, textarea)').first


def change(page, label, value, state=SOUND):
    field(page, label).fill(value)
    field(page, label).dispatch_event("change")
    page.wait_for_selector("body:not([data-state=sound])")
    page.wait_for_selector(state)


def test_the_page_is_small_and_there_at_once(page, studio):
    sizes = []
    page.on("requestfinished", lambda request: sizes.append(request.sizes()["responseBodySize"]))
    page.goto(studio[0])
    page.wait_for_selector("[data-id='beginner/Model/model_path']")
    painted = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    assert painted < 1000, f"first paint after {painted} ms"
    page.wait_for_selector(SOUND)
    assert 3000 < sum(sizes) < 70_000
    assert page.locator(".field").count() >= 20


def test_a_change_is_in_the_yaml_and_can_be_undone(form):
    change(form, "exp_name", "mine")
    assert yaml.safe_load(form.inner_text("#yaml"))["name"] == "mine"
    assert "name='mine'" in form.inner_text("#command")
    form.click("#undo")
    form.wait_for_selector(SOUND)
    assert "name:" not in form.inner_text("#yaml")


def test_what_cannot_be_is_told_at_its_field_and_not_generated(form):
    change(form, "save_interval", "-1", "body[data-state=problems]")
    told = form.inner_text("[data-id='beginner/Job/save_interval'] .problem")
    assert "trainer.save_interval=-1 is out of range" in told
    assert "trainer.save_interval=-1" in form.inner_text("#problems")
    for name in ("generate", "save", "run"):
        assert form.is_disabled(f"#{name}")
    form.click("#undo")
    form.wait_for_selector(SOUND)
    assert form.is_enabled("#generate")
    assert form.locator(".problem").count() == 0


def test_another_algorithm_changes_what_is_asked(form):
    form.select_option("#experiment", "")
    form.wait_for_selector("body[data-state=problems]")
    assert form.locator("[data-id='beginner/Data/experience_buffer_path']").count() == 0
    change_to = "body[data-state=problems]"
    field(form, "algorithm_type").fill("sft")
    field(form, "algorithm_type").dispatch_event("change")
    form.wait_for_selector("[data-id='beginner/Data/experience_buffer_path']")
    form.wait_for_selector(change_to)
    assert form.locator("[data-id='beginner/Data/taskset_path']").count() == 0
    assert yaml.safe_load(form.inner_text("#yaml"))["mode"] == "train"


def test_what_is_saved_passes_validation_and_is_loaded_again(form, studio, capsys):
    change(form, "exp_name", "saved")
    form.fill("#name", "it")
    form.click("#save")
    form.locator("#message", has_text="saved").wait_for()
    path = studio[1] / "experiment" / "it.yaml"
    assert path.read_text() == form.text_content("#yaml")
    assert main(["validate", "--config-dir", str(studio[1]), "+experiment=it"]) == 0
    form.click("#reset")
    form.wait_for_selector(SOUND)
    form.set_input_files("#load", str(path))
    form.locator("#yaml", has_text="name: saved").wait_for()
    form.click("#diff")
    form.locator("#lines", has_text="-> saved").wait_for()


def example(key):
    """A value of this key other than the preset's, and the text of it."""
    kind, value = keys()[key], State((TINY,)).get(key)
    text = str(kind.annotation)
    if kind.choices:
        new = next(choice for choice in kind.choices if choice != value)
        return new, new
    if "bool" in text:
        return (not value), str(not value).lower()
    if "list" in text:
        return ([0.5], "[0.5]") if "float" in text else (["a"], '["a"]')
    if kind.is_open:
        return {"a": "b"}, '{"a": "b"}'
    if "int" in text or "float" in text:
        tries = [n for n in (3, 1, 2, 0, 1 << 21, 0.25) if n != value]
        new = next(n for n in tries if kind.range is None or kind.range.contains(n))
        return new, str(new)
    return "a 'b'", "a 'b'"


def test_every_field_can_be_set(form):
    form.click("#expert")
    wanted = {k: example(k) for k in keys() if keys()[k].item is None and k != "stages"}
    # what depends on another field is set after it
    first = ["algorithm.algorithm_type", "algorithm.policy_loss_fn", "algorithm.advantage_fn"]
    wanted = {k: wanted[k] for k in [*first, *(k for k in wanted if k not in first)]}
    for tab in [t.get_attribute("data-tab") for t in form.locator("#tabs button").all()]:
        form.click(f"[data-tab='{tab}']")
        own = [k for k in wanted if (k.partition(".")[0] if "." in k else "job") == tab]
        assert form.evaluate(FILL, {k: wanted[k][1] for k in own}) == []
    state = from_yaml(form.text_content("#yaml"))
    wrong = {k: state.get(k) for k, (value, _) in wanted.items() if state.get(k) != value}
    assert wrong == {}


def test_the_page_is_used_by_keys_alone(form):
    form.keyboard.press("/")
    assert form.evaluate("document.activeElement.id") == "search"
    form.focus("#expert")
    form.keyboard.press("Enter")
    form.focus("#search")
    form.keyboard.type("seed")
    assert form.locator(".field").count() >= 3
    form.focus("[data-key='seed'] input")
    form.keyboard.press("Control+a")
    form.keyboard.type("11")
    form.keyboard.press("Tab")
    form.locator("#yaml", has_text="seed: 11").wait_for()


def test_text_of_a_file_is_text(form, tmp_path):
    path = tmp_path / "evil.yaml"
    path.write_text('name: "<img src=x onerror=document.body.dataset.owned=1>"\n')
    form.set_input_files("#load", str(path))
    form.locator("#yaml", has_text="onerror").wait_for()
    assert form.locator("img").count() == 0
    assert form.evaluate("document.body.dataset.owned") is None


@pytest.mark.parametrize("mode", ["beginner", "expert"])
def test_a_run_is_started_and_ends_done(form, studio, mode):
    form.click(f"#{mode}")
    if mode == "expert":
        form.click("[data-tab='job']")
    place = "checkpoint_root_dir"
    change(form, place, str(studio[1] / "runs" / mode))
    form.click("#run")
    form.wait_for_selector("body[data-run=running]")
    begun = time.monotonic()
    form.wait_for_selector("body[data-run=done], body[data-run^=failed]", timeout=280_000)
    log = form.inner_text("#log")
    assert form.get_attribute("body", "data-run") == "done", log
    assert re.search(r"accounts: ", log), (log, time.monotonic() - begun)
    done = list(Path(studio[1] / "runs" / mode).rglob("metrics.jsonl"))
    assert len(done) == 2

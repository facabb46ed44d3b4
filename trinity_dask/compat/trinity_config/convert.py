"""One configuration of theirs into one of ours, and what there is to say about it.

Invariant: every key that the file has is in exactly one note; the tree has only keys that exist
here. A key that the file does not have counts as their default where ours is another.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

from trinity_dask.compat.trinity_config.keys import Key
from trinity_dask.compat.trinity_config.keys_run import KEYS
from trinity_dask.compat.trinity_config.values import HOW, SKIP, Lost, Sizes, Theirs
from trinity_dask.config import modes
from trinity_dask.config.fields import all_keys
from trinity_dask.config.schema import STAGE_KEYS, Config

_TASKS, _INPUT = "buffer.explorer_input", "buffer.trainer_input"
_BYPASS = "algorithm.bypass_old_logprobs"
# sections that are there only where the file has them
_OPTIONAL = (f"{_TASKS}.taskset", f"{_INPUT}.experience_buffer")
# what a stage of theirs may replace
_STAGE_SECTIONS = ("algorithm", "buffer", "data_processor", "explorer", "trainer")
# how: needs more than the key itself, see _Converter
_BY_HAND = ("stages", "lora", "operators", "auxiliary", "eval_workflow", "sizes")


@dataclass(frozen=True)
class Note:
    """What became of one key: ``kind`` is mapped, changed, default, none, lost or unknown."""

    kind: str
    key: str
    value: Any
    ours: str = ""
    text: str = ""

    @property
    def is_loss(self) -> bool:
        return self.kind in ("lost", "unknown")

    def __str__(self) -> str:
        target = f" -> {self.ours}" if self.ours and self.ours != self.key else ""
        return f"{self.key}={self.value}{target}" + (f": {self.text}" if self.text else "")


@dataclass
class Conversion:
    """``tree`` is ours, nested as in a YAML file."""

    tree: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    @property
    def losses(self) -> list[Note]:
        """What mattered and is not there any more."""
        return [note for note in self.notes if note.is_loss]

    def put(self, key: str, value: Any) -> None:
        """Set a dotted key; a number is an index, and lists grow as needed."""
        node: Any = self.tree
        parts = key.split(".")
        last = parts[-1]
        for part, following in itertools.pairwise(parts):
            empty: Any = [] if following.isdigit() else {}
            if isinstance(node, list):
                node.extend({} for _ in range(int(part) + 1 - len(node)))
                node = node[int(part)]
            else:
                node = node.setdefault(part, empty)
        if isinstance(node.get(last), dict) and isinstance(value, Mapping):
            node[last].update(value)
        else:
            node[last] = copy.deepcopy(value)

    def get(self, key: str) -> Any:
        """The value at a dotted key, or None."""
        node: Any = self.tree
        for part in key.split("."):
            if isinstance(node, list):
                node = node[int(part)] if int(part) < len(node) else None
            else:
                node = node.get(part) if isinstance(node, Mapping) else None
        return node


def convert(tree: Mapping[str, Any]) -> Conversion:
    """Convert a configuration of Trinity-RFT 0.5-0.6, as its YAML file holds it.

    Interpolations are kept as they are. The result is not validated.
    """
    return _Converter(_without_dots(tree), bool(tree.get("stages"))).run()


def _without_dots(tree: Mapping[str, Any]) -> dict[str, Any]:
    """``{"a.b": 1}`` as ``{"a": {"b": 1}}``, at any depth of ``trainer.trainer_config``."""
    result = copy.deepcopy(dict(tree))
    trainer = result.get("trainer")
    free = trainer.get("trainer_config") if isinstance(trainer, Mapping) else None
    if not isinstance(free, Mapping):
        return result
    nested: dict[str, Any] = {}

    def spread(node: Mapping[str, Any], into: dict[str, Any]) -> None:
        for name, value in node.items():
            *path, last = str(name).split(".")
            below = into
            for part in path:
                below = below.setdefault(part, {})
            if isinstance(value, Mapping):
                spread(value, below.setdefault(last, {}))
            else:
                below[last] = value

    spread(free, nested)
    result["trainer"]["trainer_config"] = nested
    return result


def _tree_of_keys() -> dict[str, Any]:
    """The table by the parts of the keys; ``""`` holds the row that ends there."""
    root: dict[str, Any] = {}
    for key in KEYS:
        node = root
        for part in key.theirs.split("."):
            node = node.setdefault(part, {})
        node[""] = key
    return root


class _Converter:
    def __init__(self, tree: dict[str, Any], staged: bool, ranks: Optional[int] = None) -> None:
        self.tree, self.theirs, self.done = tree, Theirs(tree, ranks), Conversion()
        self.staged = staged  # of several stages one may have the part that another lacks

    def run(self) -> Conversion:
        found = list(self._found(self.tree, _tree_of_keys()))
        # their own keys hold over those of verl
        for each in sorted(
            found, key=lambda item: not item[0].startswith("trainer.trainer_config.")
        ):
            self._one(*each)
        if self.theirs.mode == "colocate":
            self.done.put("mode", "colocate")
        self._defaults()
        self._sizes()
        self._parts()
        self._agreement()
        self._stages()
        return self.done

    # keys that the file has -------------------------------------------------------------
    def _found(
        self,
        tree: Any,
        known: Mapping[str, Any],
        path: tuple[str, ...] = (),
        names: tuple[str, ...] = (),
        above: Optional[Key] = None,
    ) -> Iterator[tuple[str, tuple[str, ...], Any, Any]]:
        """(dotted key, what stands for each ``*``, its row or None, value) of every key."""
        items = enumerate(tree) if isinstance(tree, list) else tree.items()
        for name, value in items:
            below, starred = known.get(str(name)), names
            if below is None and "*" in known:
                below, starred = known["*"], (*names, str(name))
            here = (*path, str(name))
            # a section without counterpart answers for what no row of its own does
            dotted, row = ".".join(here), above if below is None else below.get("")
            deeper = below is not None and len(below) > ("" in below)
            by_hand = row is not None and row.how in _BY_HAND
            if below and deeper and isinstance(value, Mapping | list) and not by_hand:
                yield from self._found(value, below, here, starred, row)
            elif value is not None:
                yield dotted, starred, row, value

    def _one(self, path: str, names: tuple[str, ...], key: Any, value: Any) -> None:
        if key is None:
            free = path.startswith("trainer.trainer_config.")
            text = "a key of verl that has nothing here" if free else "not a key of Trinity-RFT"
            self._note("unknown", path, value, text=text)
        elif key.how in _BY_HAND:
            return
        elif key.ours is None:
            matters = key.matters and value != key.default and value not in ({}, [], "")
            self._note("lost" if matters else "none", path, value, text=key.note)
        else:
            self._write(path, names, key, value)

    def _write(self, path: str, names: tuple[str, ...], key: Key, value: Any) -> None:
        ours, kind, text = self._place(key, names), key.kind, key.note
        try:
            # an interpolation is resolved later, by whoever reads the file
            known = not (isinstance(value, str) and "${" in value)
            made = HOW[key.how](value, self.theirs) if key.how and known else value
        except Lost as lost:
            made, kind, text = (SKIP if lost.instead is None else lost.instead), "lost", str(lost)
        if made is not SKIP:
            self.done.put(ours, made)
        self._note(kind, path, value, ours if made is not SKIP else "", text)

    def _place(self, key: Key, names: tuple[str, ...]) -> str:
        """Our key with the entries' numbers; named buffers become a list."""
        ours = str(key.ours)
        for name in names:
            if not name.isdigit():
                name = str(list(self.theirs.get(f"{_INPUT}.auxiliary_buffers", {})).index(name))
            ours = ours.replace("*", name, 1)
        return ours

    def _note(self, kind: str, key: str, value: Any, ours: str = "", text: str = "") -> None:
        self.done.notes.append(Note(kind, key, value, ours, text))

    # keys that it does not have ---------------------------------------------------------
    def _defaults(self) -> None:
        """Their defaults where ours are others."""
        for key in KEYS:
            if not key.carry or not self._concerns(key.theirs):
                continue
            for place, names in self._places(key.theirs):
                section, _, leaf = place.rpartition(".")
                if self._entry(section).get(leaf) is not None or self._is_set(key, names):
                    continue
                before = len(self.done.notes)
                self._write(place, names, key, key.default)
                note = self.done.notes.pop()
                assert len(self.done.notes) == before
                if note.ours:
                    self._note("default", place, key.default, note.ours, "their default")

    def _is_set(self, key: Key, names: tuple[str, ...]) -> bool:
        return self.done.get(self._place(key, names)) is not None

    def _entry(self, section: str) -> Mapping[str, Any]:
        node: Any = self.tree
        for part in section.split(".") if section else []:
            node = node[int(part)] if isinstance(node, list) else (node or {}).get(part, {})
        return node or {}

    def _places(self, key: str) -> Iterator[tuple[str, tuple[str, ...]]]:
        """The key itself, or one for each entry of its list or mapping."""
        if "*" not in key:
            if not any(key.startswith(f"{o}.") and not self.theirs.get(o) for o in _OPTIONAL):
                yield key, ()
            return
        section, _, leaf = key.partition(".*.")
        entries = self.theirs.get(section, [])
        for name in entries if isinstance(entries, Mapping) else map(str, range(len(entries))):
            yield f"{section}.{name}.{leaf}", (name,)

    def _concerns(self, key: str) -> bool:
        """Whether this run has the part that the key is about."""
        part, mode = key.partition(".")[0], self.theirs.mode
        if key.startswith(f"{_INPUT}.experience_buffer."):
            return self.theirs.offline
        if self.staged:
            return True
        if part == "explorer" and not key.endswith(".dtype"):
            return modes.samples(mode)
        return modes.trains(mode) if part in ("trainer", "algorithm") else True

    # what needs more than one key -------------------------------------------------------
    def _sizes(self) -> None:
        sizes, put = Sizes.of(self.theirs), self.done.put
        gpus = 1 if self.theirs.gpus else 0
        if modes.samples(self.theirs.mode) or self.staged:
            put("cluster.rollout.n_workers", sizes.engines)
            put("cluster.rollout.gpus_per_worker", sizes.gpus_per_engine)
            put("explorer.rollout_model.tensor_parallel_size", sizes.gpus_per_engine)
        if modes.trains(self.theirs.mode):
            put("cluster.trainer.n_workers", max(sizes.ranks, 1))
            put("cluster.trainer.gpus_per_worker", 1)
        engine = "explorer.rollout_model"
        keys = ("cluster.node_num", "cluster.gpu_per_node", f"{engine}.engine_num")
        for key in (*keys, f"{engine}.tensor_parallel_size"):
            if (value := self.theirs.get(key)) is not None:
                text = (
                    f"{sizes.engines} rollout workers with {sizes.gpus_per_engine} GPUs each, "
                    f"{sizes.ranks} trainer workers with one each"
                )
                self._note("changed", key, value, "cluster", text)
        if not gpus:
            text = "not told there, so one trainer worker; set cluster.trainer.n_workers"
            self._note("changed", "cluster.gpu_per_node", 0, "cluster.trainer.n_workers", text)
        if sizes.ranks < 1 and modes.trains(self.theirs.mode):
            text = "the engines leave no GPU to the trainer"
            self._note("lost", "cluster.node_num", self.theirs.get("cluster.node_num"), text=text)

    def _parts(self) -> None:
        """Adapters, operators, the teacher, buffers by name, evaluation's workflow."""
        adapters = self.theirs.get("model.lora_configs", [])
        names = {"lora_rank": "rank", "lora_alpha": "alpha", "path": "path"}
        lists = ("target_modules", "exclude_modules")
        for adapter in adapters[:1]:
            given = {"lora_rank": 32, "lora_alpha": 32} | dict(adapter)
            made: dict[str, Any] = {
                ours: given[key] for key, ours in names.items() if given.get(key)
            }
            for key in (key for key in lists if given.get(key)):
                made[key] = given[key] if isinstance(given[key], list) else [given[key]]
            self.done.put("model.lora", made)
            self._note("changed", "model.lora_configs", adapters, "model.lora", "one adapter")
        if len(adapters) > 1:
            self._note("lost", "model.lora_configs.1", adapters[1], text="there is one adapter")
        operators, key = [], "data_processor.experience_pipeline.operators"
        for index, operator in enumerate(self.theirs.get(key, [])):
            if operator.get("name") == "data_juicer":
                text = "there is no Data-Juicer service here"
                self._note("lost", f"{key}.{index}", operator, text=text)
                continue
            operators.append({"name": operator["name"], "args": dict(operator.get("args") or {})})
            self._note("mapped", f"{key}.{index}", operator, "buffer.operators")
        if operators:
            self.done.put("buffer.operators", operators)
        for index, name in enumerate(self.theirs.get(f"{_INPUT}.auxiliary_buffers", {})):
            self.done.put(f"{_INPUT}.auxiliary_buffers.{index}.name", name)
            self.done.put(f"{_INPUT}.auxiliary_buffers.{index}.storage_type", "file")
            path = self.theirs.get(f"{_INPUT}.auxiliary_buffers.{name}.path")
            self.done.put(f"{_INPUT}.auxiliary_buffers.{index}.path", path)
        if self.theirs.offline:
            self.done.put(f"{_INPUT}.experience_buffer.storage_type", "file")
        self._auxiliary_models()
        key = f"{_TASKS}.default_eval_workflow_type"
        if (workflow := self.theirs.get(key)) is not None:
            for index, taskset in enumerate(self.theirs.get(f"{_TASKS}.eval_tasksets", [])):
                if not taskset.get("default_workflow_type"):
                    self.done.put(f"{_TASKS}.eval_tasksets.{index}.workflow", workflow)
            text = "written into the eval tasksets that name none"
            self._note("changed", key, workflow, f"{_TASKS}.eval_tasksets.*.workflow", text)

    def _auxiliary_models(self) -> None:
        key = "explorer.auxiliary_models"
        for index, model in enumerate(self.theirs.get(key, [])):
            teaches = self.theirs.has_teacher and index == 0
            if teaches:
                self.done.put("model.teacher_model_path", model.get("model_path"))
                text = "the trainer runs the teacher, with no engine of its own"
                self._note("changed", f"{key}.0", model, "model.teacher_model_path", text)
            else:
                text = "a judge is called by your workflow or reward function"
                self._note("lost", f"{key}.{index}", model, text=text)

    def _agreement(self) -> None:
        """What is checked here and was not there."""
        get, put = self.done.get, self.done.put
        temperatures, sources = [], [f"{_TASKS}.taskset"]
        sources += [f"{_TASKS}.tasksets.{i}" for i in range(len(get(f"{_TASKS}.tasksets") or []))]
        for section in [source for source in sources if get(source)]:
            get(section).pop("repeat_times", None)  # of training: algorithm.repeat_times
            args = get(section).get("rollout_args", {})
            temperatures += [args.pop("temperature")] if "temperature" in args else []
            for name in ("top_p", "top_k"):
                if name in args:
                    put(f"model.{name}", args.pop(name))
            if not args:
                get(section).pop("rollout_args", None)
        if temperatures and temperatures[0] != get("model.temperature"):
            put("model.temperature", temperatures[0])
            text = "the temperature of training is the model's"
            key = f"{_TASKS}.taskset.rollout_args.temperature"
            self._note("changed", key, temperatures[0], "model.temperature", text)
        for other in temperatures[1:]:
            if other != temperatures[0]:
                key = f"{_TASKS}.tasksets.*.rollout_args.temperature"
                self._note("lost", key, other, text="training has one temperature")
        narrow = get("model.top_p") not in (None, 1, 1.0) or get("model.top_k") not in (None, -1)
        if get(_BYPASS) and (narrow or get("algorithm.rollout_correction")):
            put(_BYPASS, False)
            text = "the trainer computes them, since the sampler's are corrected or of fewer tokens"
            self._note("changed", _BYPASS, True, _BYPASS, text)

    def _stages(self) -> None:
        """A section of a stage replaces the base's there; here the difference is written."""
        stages, ranks = self.theirs.get("stages", []), Sizes.of(self.theirs).ranks
        base, made = copy.deepcopy(self.done.tree), []
        for index, stage in enumerate(stages):
            whole = {name: value for name, value in self.tree.items() if name != "stages"}
            given = {k: v for k, v in stage.items() if v is not None}
            whole |= {k: given[k] for k in ("mode", *_STAGE_SECTIONS) if k in given}
            converted = _Converter(whole, True, ranks).run()
            keys = {name for name in STAGE_KEYS if name in converted.tree or name in base}
            entry = {"stage_name": given.get("stage_name", f"stage_{index}")}
            for name in [name for name in STAGE_KEYS if name in keys]:
                ours, new = base.get(name), converted.tree.get(name)
                if (change := _difference(ours, new, name)) is not None:
                    entry[name] = change
            made.append(entry)
            prefixes = [*(f"{k}." for k in _STAGE_SECTIONS if k in given), "mode."]
            self.done.notes += [
                Note(note.kind, f"stages.{index}.{note.key}", note.value, note.ours, note.text)
                for note in converted.notes
                if f"{note.key}.".startswith(tuple(prefixes)) and note.kind != "default"
            ]
        if made:
            self.done.tree["stages"] = made
            text = "merged key by key; what theirs resets is written out"
            self._note("changed", "stages", len(made), "stages", text)


def _difference(old: Any, new: Any, key: str) -> Any:
    """What to merge over ``old`` to get ``new``; None: nothing. A key that is gone is reset."""
    if old == new:
        return None
    if not isinstance(old, Mapping | None) or not isinstance(new, Mapping | None):
        return new if new is not None else _our_default(key)
    change = {}
    for name in [*(old or {}), *(name for name in new or {} if name not in (old or {}))]:
        before, after = (old or {}).get(name), (new or {}).get(name)
        if before != after:
            found = _difference(before, after, f"{key}.{name}")
            if found is not None or after is None:
                change[name] = found
    return change


def _our_default(key: str) -> Any:
    """The default of one of our keys; None for one that is free."""
    kinds = dict(all_keys(Config))
    node: Any = Config()
    for part in key.split("."):
        node = getattr(node, part, None)
    return node if key in kinds else None

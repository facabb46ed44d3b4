"""Where records lie and what is in them: one Arrow file per batch, evaluation or train step.

Invariant: a file appears under its name whole or not at all. Rows that operators dropped and runs
that failed count when the manifest of their batch names their file, so they exist exactly as
often as the batch; the file of an evaluation or a train step has a name of its own and is
replaced when that is done again.

Layout, below the root (:func:`records_url`)::

    filtered/<batch>-<uuid>.arrow             rows of SCHEMA, operator, reason
    failed/<batch>-<uuid>.arrow               FAILED: one row per failed run
    eval/<step>.<version>.<explorer>.<name>.arrow   rows of SCHEMA
    trainer/<step>.<rank>of<ranks>.arrow      TRAINER: one row per trained row of that rank
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pyarrow as pa

from trinity_dask.buffer.store.experience_store import (
    ExperienceStore,
    FileInfo,
    FsspecFiles,
    LocalFiles,
    open_files,
)
from trinity_dask.buffer.store.manifest import Manifest
from trinity_dask.config import from_yaml
from trinity_dask.config.schema import Config
from trinity_dask.experience.schema import SCHEMA

KEPT, FILTERED, FAILED, EVAL, TRAINER = "kept", "filtered", "failed", "eval", "trainer"
RECORDS_KEY = "records"  # in the meta of a manifest: kind -> Entry as a dict
META_KEY = b"trinity_dask.record"  # JSON in the schema of every file
EID_COLUMNS = SCHEMA.names[:7]

FILTERED_SCHEMA = pa.schema([*SCHEMA, ("operator", pa.string()), ("reason", pa.string())])
FAILED_SCHEMA = pa.schema(
    [
        *(SCHEMA.field(n) for n in ("batch", "batch_is_int", "task", "task_is_int")),
        ("run", pa.int64()),  # null where nobody knows which of several runs it was
        ("attempts", pa.int32()),
        ("error", pa.string()),  # type: message, of the last attempt
        ("traceback", pa.string()),  # the end of it
        ("earlier", pa.list_(pa.string())),  # the errors of the attempts before
        ("prompt_text", pa.string()),  # what the task asks, where it has a prompt
        ("source", pa.string()),  # file and row of the task
    ]
)
_FLOATS = pa.list_(pa.float32())
TRAINER_COLUMNS = {
    "train_logprobs": _FLOATS,  # of the policy at the start of the step
    "train_entropy": _FLOATS,
    "train_advantages": _FLOATS,
    "train_mask": pa.list_(pa.bool_()),
}
TRAINER_SCHEMA = pa.schema(
    [*(SCHEMA.field(n) for n in EID_COLUMNS), *(pa.field(n, t) for n, t in TRAINER_COLUMNS.items())]
)


def records_url(cfg: Config) -> str:
    """Where a stage's records go: beside its store where that is a URL, else in its directory.

    A trainer alone may train from another job's store; its records are its own.
    """
    store = cfg.buffer.trainer_input.experience_buffer
    alone = cfg.mode == "train" and not cfg.synchronizer.peer_timeout_s
    if store.storage_type == "store" and "://" in (store.path or "") and not alone:
        return f"{str(store.path).rstrip('/')}/records"
    return f"{cfg.job_dir}/buffer/records"


def storage_options(cfg: Config) -> dict[str, Any]:
    """Of the file system of :func:`records_url`."""
    url = "://" in records_url(cfg)
    return dict(cfg.buffer.trainer_input.experience_buffer.storage_options) if url else {}


@dataclass(frozen=True)
class Part:
    """One file of rows that are alike. ``version`` tells two contents of one path apart.

    ``step`` is the explorer's for kept, filtered and failed rows, that of the evaluation, or the
    train step; ``left_out`` counts rows that were beyond a bound.
    """

    kind: str
    stage: str
    step: int
    path: str
    batch: int | str = ""
    rows: int | None = None
    left_out: int = 0
    name: str = ""  # of the eval taskset
    model_version: int | None = None
    version: float = 0.0
    meta: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass
class Source:
    """The rows of one stage: its store, and the records beside it. Safe to keep: new files are
    found by the next call of :meth:`parts`."""

    stage: str
    store_url: str | None
    records: str
    store_options: dict[str, Any] = field(default_factory=dict)
    record_options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, cfg: Config) -> Source:
        store = cfg.buffer.trainer_input.experience_buffer
        url = store.path if store.storage_type == "store" else None
        stage, options = cfg.stage_name or cfg.name, dict(store.storage_options)
        return cls(stage, url, records_url(cfg), options, storage_options(cfg))

    @cached_property
    def store(self) -> ExperienceStore | None:
        return ExperienceStore(self.store_url, self.store_options) if self.store_url else None

    @cached_property
    def files(self) -> LocalFiles | FsspecFiles:
        return open_files(self.records, self.record_options)

    @cached_property
    def _store_files(self) -> LocalFiles | FsspecFiles:
        assert self.store_url is not None
        return open_files(self.store_url, self.store_options)

    def parts(self) -> list[Part]:
        """Every file there is now: batches in their order, then evaluations, then train steps."""
        found: list[Part] = []
        for manifest in self.store.manifests() if self.store is not None else []:
            found += self._of_batch(manifest)
        for path, info in sorted(self.files.list(EVAL).items()):
            if (part := _eval_part(self.stage, path, info)) is not None:
                found.append(part)
        return [*found, *self._train_parts()]

    def _of_batch(self, manifest: Manifest) -> list[Part]:
        meta, batch = manifest.meta, manifest.batch_id
        number = str(batch).partition("@")[0]
        step = int(meta.get("step", number if number.isdecimal() else manifest.order))
        common: dict[str, Any] = {"stage": self.stage, "step": step, "batch": batch, "meta": meta}
        found = [Part(KEPT, path=manifest.path, rows=manifest.rows, **common)]
        for kind, entry in meta.get(RECORDS_KEY, {}).items():
            if entry.get("path"):
                left_out, rows = int(entry.get("left_out", 0)), int(entry["rows"])
                path = entry["path"]
                found.append(Part(kind, path=path, rows=rows, left_out=left_out, **common))
        return found

    def _train_parts(self) -> list[Part]:
        """Of each train step the files of the ranks that did it last."""
        steps: dict[int, dict[str, list[Part]]] = {}
        for path, info in self.files.list(TRAINER).items():
            step, _, ranks = Path(path).name.removesuffix(".arrow").partition(".")
            rank, of, world = ranks.partition("of")
            if info.staged or not (step.isdecimal() and of and rank.isdecimal()):
                continue
            part = Part(TRAINER, self.stage, int(step), path, version=info.modified)
            steps.setdefault(int(step), {}).setdefault(world, []).append(part)
        found: list[Part] = []
        for _, worlds in sorted(steps.items()):
            found += max(worlds.values(), key=lambda parts: max(p.version for p in parts))
        return found

    def read(self, part: Part, columns: list[str] | None = None) -> pa.Table:
        """A part's rows, or some of its columns (those it has, in its order); memory-mapped,
        without a copy, on a local disk. The schema's metadata holds ``META_KEY``.

        Raises:
            OSError, ValueError: the file is gone, cut short or not Arrow.
        """
        files = self._store_files if part.kind == KEPT else self.files
        with files.open(part.path) as opened:
            if columns is None:
                return pa.ipc.open_file(opened).read_all()
            names = pa.ipc.open_file(opened).schema.names
            chosen = [i for i, name in enumerate(names) if name in columns]
            options = pa.ipc.IpcReadOptions(included_fields=chosen)
            return pa.ipc.open_file(opened, options=options).read_all()


def _eval_part(stage: str, path: str, info: FileInfo) -> Part | None:
    step, _, rest = Path(path).name.removesuffix(".arrow").partition(".")
    version, _, rest = rest.partition(".")
    explorer, _, name = rest.partition(".")
    numbers = step.isdecimal() and version.removeprefix("-").isdecimal()
    if info.staged or not numbers:
        return None
    return Part(
        EVAL,
        stage,
        int(step),
        path,
        name=unquote(name),
        model_version=int(version),
        version=info.modified,
        meta={"explorer": unquote(explorer)},
    )


def eval_path(step: int, model_version: int, explorer: str, name: str) -> str:
    """The file of an evaluation; each explorer of a job evaluates for itself."""
    who = quote(explorer, safe="").replace(".", "%2E")
    return f"{EVAL}/{step}.{model_version}.{who}.{quote(name, safe='')}.arrow"


def meta_of(table: pa.Table) -> dict[str, Any]:
    """What the writer of a file said of it: ``total``, ``left_out``, and of its kind."""
    return json.loads((table.schema.metadata or {}).get(META_KEY, b"{}"))


def saved_stages(job_dir: str | Path) -> list[Config]:
    """The saved configurations of the stages that have begun, in their order.

    ``job_dir`` is a job's directory or that of one stage; where it was moved, so are the paths.

    Raises:
        LookupError: there is no run in it.
    """
    root = Path(job_dir)
    own, found = root / "config.yaml", list[Config]()
    files = [own] if own.is_file() else list(root.glob("[!.]*/config.yaml"))
    if not files:
        raise LookupError(f"{root} holds no run: no config.yaml in it or directly below it")
    for path in sorted(files, key=lambda path: path.stat().st_mtime):
        config = from_yaml(path, lenient=True)
        before, config.job_dir = str(config.job_dir), str(path.parent)
        store = config.buffer.trainer_input.experience_buffer
        if store.path is not None and store.path.startswith(before):
            store.path = config.job_dir + store.path[len(before) :]
        found.append(config)
    return found

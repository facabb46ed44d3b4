"""Where a data set's files are: a path or URL, a pattern, a directory, a name on the hub.

Invariant: the files of a data set come in one order, whichever file system they are on; what
cannot be found says where it was looked for. Nothing is read here but directories, and the
README and state files in which a directory says which of its files belong to a split.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import yaml

from trinity_dask.buffer.errors import DataError

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd", ".bz2": "bz2", ".xz": "xz"}
FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonlines": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
# the words by which the hub tells the splits of a data set apart
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
# files of a hub's or a saved data set that tell of the data
ABOUT_DATA = {"dataset_infos.json", "dataset_info.json", "config.json", "state.json"}
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class Source:
    """One file; ``name`` is for messages, ``compression`` None where there is none."""

    fs: Any
    path: str
    format: str
    compression: str | None
    name: str

    @property
    def is_local(self) -> bool:
        return _is_local(self.fs)


def find_sources(
    path: str,
    split: str = "train",
    subset: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> list[Source]:
    """The data files behind ``path``, in order.

    ``path`` is a file, a pattern (``data/*.jsonl.gz``), a directory, any of them as a URL
    that fsspec knows, or the name of a data set of the Hugging Face hub.

    Raises:
        DataError: nothing is there, or nothing of the split; says what was looked for.
    """
    try:
        fs, root = fsspec.core.url_to_fs(os.path.expanduser(path), **(storage_options or {}))
        is_url = "://" in path
        # a web server need not answer more than reads; elsewhere a folder may be named x.parquet
        is_file = is_url and ("http" in fs.protocol or not fs.isdir(root))
        if kind_of(root)[0] and is_file and not glob.has_magic(root):
            return [_source(fs, root)]
        if glob.has_magic(root) and not fs.exists(root):
            found = [_source(fs, each) for each in _matching(fs, root)]
            if not found:
                raise DataError(f"no data file matches {path!r}; {_known()}")
            return found
        if kind_of(root)[0] and fs.isfile(root):  # its own name has a star or a question mark
            return [_source(fs, root)]
        if fs.isdir(root):
            return [_source(fs, each) for each in _of_directory(fs, root, split, subset)]
        if fs.exists(root):
            raise DataError(f"{path}: {_known()}")
        if not is_url and not kind_of(path)[0] and HUB_NAME.fullmatch(path):
            return _of_hub(path, split, subset)
    except (OSError, ImportError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} cannot be opened: {type(error).__name__}: {error}") from error
    raise DataError(f"no file or directory {path!r}")


def kind_of(path: str) -> tuple[str | None, str | None]:
    """Format and compression by the suffixes, whatever their case; None for unknown ones."""
    path = path.split("?", 1)[0] if "://" in path else path
    stem, suffix = os.path.splitext(path.lower())
    compression = COMPRESSIONS.get(suffix)
    if compression:
        suffix = os.path.splitext(stem)[1]
    return FORMATS.get(suffix), compression


def _source(fs: Any, path: str) -> Source:
    format_, compression = kind_of(path)
    if format_ is None:  # a file of a saved data set or of a README's choice
        raise DataError(f"{path}: {_known()}")
    name = path if _is_local(fs) else fs.unstrip_protocol(path)
    return Source(fs, path, format_, compression, name)


def _known() -> str:
    return f"known formats are {', '.join(FORMATS)}, each also as {', '.join(COMPRESSIONS)}"


# -- directories ----------------------------------------------------------------------------
def _of_directory(fs: Any, root: str, split: str, subset: str | None) -> list[str]:
    root = root.rstrip("/")
    for directory in (f"{root}/{split}", root):
        state = f"{directory}/state.json"  # written by datasets.Dataset.save_to_disk
        if fs.isfile(state):
            return [f"{directory}/{name}" for name in _saved_files(state, fs.cat_file(state))]
    files = sorted(path for path in _below(fs, root) if kind_of(path)[0])
    # hidden files are caches and the like, as on the hub
    files = [f for f in files if not re.search(r"(^|/)[._]", f[len(root) :].lstrip("/"))]
    files = [f for f in files if f.rpartition("/")[2] not in ABOUT_DATA]
    chosen = _of_readme(fs, root, files, split, subset)
    if chosen is None and subset:
        files = [file for file in files if f"/{subset}/" in file[len(root) :]]
    if chosen is None:
        chosen = _by_name(root, files, split)
    if not chosen:
        there = ", ".join(f[len(root) + 1 :] for f in files[:5]) or "no data file"
        raise DataError(
            f"{root} has no files of split {split!r} ({there} found); expected "
            f"{split}.jsonl, {split}-*.parquet, a folder {split}/, or a saved data set"
        )
    return chosen


def _saved_files(state: str, text: bytes) -> list[str]:
    """The files that a saved data set's ``state.json`` names. Raises DataError: it is none."""
    try:
        return [str(file["filename"]) for file in json.loads(text)["_data_files"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"{state} is not what datasets.Dataset.save_to_disk writes: no list _data_files of "
            f"file names ({type(error).__name__}: {error}); save the data set anew, move this "
            "file elsewhere, or give the data files as path"
        ) from error


def _below(fs: Any, root: str) -> list[str]:
    """All files below ``root``; a folder that is a link is read like any other."""
    if not _is_local(fs):
        return fs.find(root)
    found: list[str] = []
    above = {root: frozenset[str]()}
    for folder, folders, names in os.walk(root, followlinks=True):
        real, parents = os.path.realpath(folder), above.pop(folder)
        if real in parents:  # a link to what it lies in
            folders.clear()
            continue
        above |= {os.path.join(folder, each): parents | {real} for each in folders}
        found += [os.path.join(folder, name) for name in names]
    return found


def _matching(fs: Any, pattern: str) -> list[str]:
    """The data files that ``pattern`` matches, in order; links are followed."""
    if _is_local(fs):
        found = glob.glob(pattern, recursive=True, include_hidden=True)
        found = [each for each in found if os.path.isfile(each)]
    else:
        about = fs.glob(pattern, detail=True)
        found = [each for each in about if about[each]["type"] == "file"]
    return sorted(each for each in found if kind_of(each)[0])


def _is_local(fs: Any) -> bool:
    return isinstance(fs, fsspec.implementations.local.LocalFileSystem)


def _by_name(root: str, files: list[str], split: str) -> list[str]:
    """Files called after the split, as this project and as the hub reads names."""
    named = []
    for file in files:
        folder, name = file[len(root) + 1 :].rpartition("/")[::2]
        stem = name.split(".", 1)[0]
        called = stem == split or stem.startswith((f"{split}-", f"{split}_"))
        if (called and folder in ("", "data")) or folder == split:
            named.append(file)
    if named:
        return named
    words = {word: key for key, several in SPLIT_WORDS.items() for word in several}
    wanted = words.get(split, split)

    def split_of(file: str) -> str | None:
        """By the last word that is a split's: of the file's name first, then of its folders."""
        for part in reversed(file[len(root) + 1 :].lower().split("/")):
            for word in reversed(re.split(r"[-._ 0-9]+", part)):
                if word in words or word == split:
                    return words.get(word, word)
        return None

    splits = {file: split_of(file) for file in files}
    if not any(splits.values()) and wanted == "train":
        return files  # without the name of any split everything is to be trained on
    return [file for file in files if splits[file] == wanted]


def _of_readme(
    fs: Any, root: str, files: list[str], split: str, subset: str | None
) -> list[str] | None:
    """The files that the README of a hub data set lists; None when it lists none.

    Raises:
        DataError: there are several subsets and none is named, or no such subset.
    """
    if not fs.isfile(f"{root}/README.md"):
        return None
    text = fs.cat_file(f"{root}/README.md").decode("utf-8-sig").replace("\r\n", "\n")
    front = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    try:
        card = yaml.safe_load(front[1]) if front else None
    except yaml.YAMLError:
        return None  # it is prose; the names decide
    listed = card.get("configs") if isinstance(card, dict) else None
    several = [c for c in listed if isinstance(c, dict)] if isinstance(listed, list) else []
    configs = {str(c.get("config_name", "default")): c for c in several}
    if not any(c.get("data_files") or c.get("data_dir") for c in several):
        return None
    chosen = [n for n, c in configs.items() if n == "default" or c.get("default") is True]
    name = subset or (chosen[0] if len(chosen) == 1 else next(iter(configs)))
    if name not in configs or (not subset and len(configs) > 1 and len(chosen) != 1):
        raise DataError(
            f"{root} has the subsets {', '.join(configs)} (subset_name is {subset}); set "
            "subset_name to one of them"
        )
    given = configs[name].get("data_files")
    folder = str(configs[name].get("data_dir") or "").removeprefix("./").strip("/")
    root = f"{root}/{folder}" if folder else root
    inside = [file for file in files if file.startswith(f"{root}/")]
    if not given:
        return _by_name(root, inside, split)
    entries = given if isinstance(given, list) else [given]
    patterns: list[str] = []
    for entry in entries:
        if isinstance(entry, dict):
            if entry.get("split", "train") == split:
                paths = entry.get("path", [])
                patterns += paths if isinstance(paths, list) else [paths]
        elif split == "train":
            patterns.append(entry)
    return [file for p in patterns for file in _picked(fs, root, inside, str(p))]


def _picked(fs: Any, root: str, files: list[str], pattern: str) -> list[str]:
    """The data files of a README's pattern: a name, a pattern of names, or folders of them."""
    path = f"{root}/{pattern.removeprefix('./').rstrip('/')}"
    if path in files:
        return [path]
    found = _matching(fs, path)
    if found or not pattern.strip("./"):
        return found
    folders = glob.glob(path, recursive=True) if _is_local(fs) else fs.glob(path)
    return [file for file in files if any(file.startswith(f"{folder}/") for folder in folders)]


# -- the hub --------------------------------------------------------------------------------
def _of_hub(name: str, split: str, subset: str | None) -> list[Source]:
    """A data set's files: in the caches of this machine, else on the hub.

    Raises:
        DataError: it is in no cache, and the hub is off or has none of this name.
    """
    import huggingface_hub as hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    local = fsspec.filesystem("file")
    prepared = _prepared(name, split, subset)
    if prepared:
        return [_source(local, file) for file in prepared]
    try:
        root = hub.snapshot_download(name, repo_type="dataset", local_files_only=True)
        return [_source(local, file) for file in _of_directory(local, root, split, subset)]
    except (LocalEntryNotFoundError, hub.errors.HFValidationError):
        missing = (
            f"no file or directory {name!r}, and no data set of this name in the cache of the "
            "Hugging Face hub"
        )
    if hub.constants.HF_HUB_OFFLINE:
        raise DataError(f"{missing} (HF_HUB_OFFLINE is set)")
    try:
        fs = fsspec.filesystem("hf")
        files = _of_directory(fs, f"datasets/{name}", split, subset)
        return [_source(fs, file) for file in files]
    except DataError:
        raise
    except Exception as error:  # the network's errors are those of the hub's client
        raise DataError(f"{missing}; the hub says: {type(error).__name__}: {error}") from error


def _prepared(name: str, split: str, subset: str | None) -> list[str]:
    """The Arrow files that ``datasets.load_dataset`` left in its cache, the newest ones."""
    home = os.environ.get("HF_HOME", os.path.expanduser("~/.cache/huggingface"))
    cache = Path(os.environ.get("HF_DATASETS_CACHE", f"{home}/datasets"))
    for folder in (name.replace("/", "___"), name.replace("/", "___").lower()):
        pattern = f"{glob.escape(subset) if subset else '*'}/*/*"
        versions = sorted((cache / folder).glob(pattern), key=lambda path: path.stat().st_mtime)
        subsets = {version.parents[1].name for version in versions}
        if len(subsets) > 1:
            raise DataError(
                f"{cache / folder} has the subsets {', '.join(sorted(subsets))}; set subset_name"
            )
        for version in reversed(versions):
            files = sorted(map(str, version.glob(f"*-{split}*.arrow")))
            files = [f for f in files if re.search(rf"-{re.escape(split)}(-\d+-of-\d+)?\.arrow", f)]
            if files:
                return files
    return []

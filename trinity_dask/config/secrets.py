"""What must not be seen of a configuration: values of the environment, and secrets by their names.

Invariant: a configuration is written and shown through :func:`shown`, :func:`shown_override` and
:func:`shown_text` only. What came from the environment is shown as its interpolation, so that a
saved configuration says where the value is; a text that is named like a secret, or holds one, is
masked. The value itself stays with those who use it: a :class:`Veiled` text is a text, whose
``repr`` (in error messages and in the logs of Dask) is what may be seen.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Optional

MASK = "***"

_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:\s*([^\s,}]+)\s*(,[^{}]*)?\}")
_NODE = re.compile(r"\$\{\s*(\.*)([A-Za-z_][\w.\[\]-]*)\s*\}")
_INTERPOLATION = re.compile(r"(\$\{[^{}]*\})+")

_WORDS = {
    *("token", "secret", "secrets", "password", "passwd", "pwd", "passphrase", "credential"),
    *("credentials", "apikey", "accesskey", "secretkey", "privatekey", "authorization", "bearer"),
    *("dsn", "cookie"),
}
_BEFORE_KEY = {"api", "access", "secret", "private", "account", "auth", "encryption", "signing"}
# tokens of a text, not of a door
_OF_TEXT = {
    *("eos", "bos", "pad", "unk", "sep", "cls", "mask", "stop", "special", "end", "start", "image"),
    *("think", "per", "logprob", "logprobs", "max", "min"),
}
_IN_TEXT = (
    (re.compile(r"([a-z][\w+.-]*://[^/\s:@'\"]*):[^/\s@'\"]+@", re.I), rf"\1:{MASK}@"),
    (re.compile(r"(https?://)[^/\s:@'\"]+@", re.I), rf"\1{MASK}@"),
    (re.compile(r"(\bBearer\s+)[\w.~+/=-]{8,}", re.I), rf"\1{MASK}"),
    # as the well-known services begin theirs
    (
        re.compile(
            r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}"
            r"|glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,}|A[KS]IA[A-Z0-9]{16})"
        ),
        MASK,
    ),
)
_PAIR = re.compile(r"([A-Za-z_][\w.-]*)=((?:\"[^\"]*\"|'[^']*'|\$\{[^{}]*\}|[^\s,&}\]\)])+)")
_ENTRY = re.compile(r"([A-Za-z_][\w.-]*)(['\"]?\s*:\s*)(\"[^\"]*\"|'[^']*'|[^,{}\[\]]+)")
_FOUND_IN_TEXT = re.compile(r"(?=.*\d)[^\s/\\]{8,}")  # what is looked for without a name

_known: dict[str, str] = {}  # the veiled values of this process: what is shown for each


class Veiled(str):
    """A text that is shown as another: as the interpolation it came from, or masked."""

    shown: str
    _find: bool

    def __new__(cls, value: str, shown: str = MASK, find: bool = False) -> Veiled:
        """``find``: the value is replaced wherever it stands in a line of a log or an error."""
        self = super().__new__(cls, value)
        self.shown, self._find = shown, find
        if find:
            _known[str.__str__(self)] = shown
        return self

    def __str__(self) -> str:
        return self  # a text made of it without a change is veiled as well

    def __repr__(self) -> str:
        return repr(self.shown)

    def __reduce__(self) -> tuple[Any, ...]:
        return Veiled, (str.__str__(self), self.shown, self._find)

    def with_value(self, value: str) -> Veiled:
        """Another value, shown in the same way."""
        return Veiled(value, self.shown, self._find)


def is_secret(names: Sequence[str]) -> bool:
    """Whether a key (its parts, from the outermost) is named like a secret, or lies below one."""
    return any(_secret_name(name) for name in names) or (
        bool(names) and names[-1] == "key" and "storage_options" in names
    )


def _secret_name(name: str) -> bool:
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    words = [word for word in re.split(r"[^a-z0-9]+", snake.lower()) if word]
    for before, word in zip(["", *words], words, strict=False):
        if word in _WORDS and not (word == "token" and (before in _OF_TEXT or words[-1] != word)):
            return True
        if word in ("key", "keys") and before in _BEFORE_KEY:
            return True
    return False


# of a configuration --------------------------------------------------------------------
def veil(config: Any, written: Any, names: tuple[str, ...] = (), root: Any = None) -> Any:
    """``config`` with its secrets veiled, in place where it is a section.

    ``written``: the same as it was written, interpolations as they are.
    """
    root = written if root is None else root
    if dataclasses.is_dataclass(config):
        for field in dataclasses.fields(config):
            value, name = getattr(config, field.name), field.name
            setattr(config, name, veil(value, _below(written, name), (*names, name), root))
        return config
    if isinstance(config, dict):
        return {k: veil(v, _below(written, k), (*names, str(k)), root) for k, v in config.items()}
    if isinstance(config, list):
        return [veil(v, _below(written, i), (*names, str(i)), root) for i, v in enumerate(config)]
    if not isinstance(config, str) or not config or isinstance(config, Veiled):
        return config
    source = _expanded(written, names, root) if isinstance(written, str) else ""
    variables, secret = _ENVIRONMENT.findall(source), is_secret(names)
    if variables:
        if secret:  # nor its default
            source = _ENVIRONMENT.sub(
                lambda m: f"${{oc.env:{m[1]}{(m[2] and ',' + MASK) or ''}}}", source
            )
        telling = secret or any(_secret_name(name) for name, _ in variables)
        return Veiled(config, source, telling or bool(_FOUND_IN_TEXT.fullmatch(config)))
    masked = MASK if secret else _masked(config)
    return config if masked == config else Veiled(config, masked, secret and len(config) > 5)


def _below(written: Any, key: Any) -> Any:
    if isinstance(written, Mapping):
        return written.get(key)
    inside = isinstance(written, list) and isinstance(key, int) and key < len(written)
    return written[key] if inside else None


def _expanded(text: str, names: Sequence[str], root: Any, depth: int = 8) -> str:
    """``text`` with the texts of the keys that it names, as far as they name a variable."""

    def put(match: re.Match[str]) -> str:
        dots, key = match.groups()
        base = list(names[: len(names) - len(dots)]) if dots else []
        parts = [*base, *key.replace("[", ".").replace("]", "").split(".")]
        value = root
        for part in parts:
            value = _below(value, int(part) if isinstance(value, list) else part)
        if not isinstance(value, str) or not depth:
            return match[0]
        return _expanded(value, parts, root, depth - 1)

    found = _NODE.sub(put, text) if "${" in text else text
    return found if _ENVIRONMENT.search(found) else text


def missing_variables(text: str) -> list[str]:
    """The variables that an interpolated text needs and this environment does not have."""
    found = _ENVIRONMENT.findall(text)
    return [name for name, default in found if not default and name not in os.environ]


def shown(value: Any, names: tuple[str, ...] = ()) -> Any:
    """Plain containers of ``value`` (a section or containers) in which no secret is left."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {f.name: shown(getattr(value, f.name), (*names, f.name)) for f in fields}
    if isinstance(value, Mapping):
        return {key: shown(each, (*names, str(key))) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [shown(each, (*names, str(index))) for index, each in enumerate(value)]
    if isinstance(value, Veiled):
        return value.shown
    if value is None or value == "" or isinstance(value, bool):
        return value
    if is_secret(names):
        is_written = isinstance(value, str) and _INTERPOLATION.fullmatch(value)
        return value if is_written and not _has_default(value) else MASK
    return _masked(value) if isinstance(value, str) else value


def _has_default(text: str) -> bool:
    return any(default and default[1:].strip() != MASK for _, default in _ENVIRONMENT.findall(text))


def masked_keys(value: Any, names: tuple[str, ...] = ()) -> Iterator[str]:
    """The dotted keys of plain containers whose value was masked when they were written."""
    if isinstance(value, Mapping | list):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, each in items:
            yield from masked_keys(each, (*names, str(key)))
    elif value == MASK or (isinstance(value, str) and f":{MASK}@" in value):
        yield ".".join(names)


# of text -------------------------------------------------------------------------------
def shown_override(override: str) -> str:
    """``key=value`` of a command line without its secrets."""
    key, equals, value = override.partition("=")
    parts = tuple(key.lstrip("+~").replace("[", ".").replace("]", "").split("."))
    if equals and is_secret(parts):
        return f"{key}={shown(value, parts)}"
    return key + equals + _ENTRY.sub(_masked_entry, _masked(value))


def shown_text(text: str) -> str:
    """A line of a log or of an error without the secrets that can be recognised in it."""
    for value, instead in sorted(_known.items(), key=lambda item: -len(item[0])):
        if value in text:
            text = text.replace(value, instead)
    return _PAIR.sub(_masked_pair, _masked(text))


def _masked(text: str) -> str:
    for pattern, instead in _IN_TEXT:
        text = pattern.sub(instead, text)
    if "?" in text and "://" in text:
        text = _PAIR.sub(_masked_pair, text)
    return text


def _masked_pair(match: re.Match[str]) -> str:
    name, value = match.groups()
    return f"{name}={shown(value, tuple(name.split('.')))}"


def _masked_entry(match: re.Match[str]) -> str:
    name, colon, value = match.groups()
    return f"{name}{colon}{shown(value.strip(), tuple(name.split('.')))}"


def veiled_like(value: Optional[str], new: str) -> str:
    """``new``, made of ``value``: veiled where that is."""
    return value.with_value(new) if isinstance(value, Veiled) else new

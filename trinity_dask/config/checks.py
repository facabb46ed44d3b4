"""Relations between values.

Invariant: each check is a generator of problems over one resolved configuration with
sound single values; a check that does not concern the mode yields nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from trinity_dask.config.limits import SINKS
from trinity_dask.config.nearest import hint
from trinity_dask.config.schema import Config, GroupConfig, TasksetConfig

_ENGINE = "explorer.rollout_model"
_STORE = "buffer.trainer_input.experience_buffer"
_TASKS = "buffer.explorer_input"
_MEMORY = re.compile(r"0|auto|\d+(\.\d+)?\s*([kKMGT]i?)?B?|0?\.\d+")
_ADDRESS = re.compile(r"([a-z]+://)?[^\s/]+:\d+")
_CALLABLE = re.compile(r"[\w./-]+(:\w+|\.\w+)")


def explores(config: Config) -> bool:
    return config.mode in ("both", "explore")


def trains(config: Config) -> bool:
    return config.mode in ("both", "train")


def names(config: Config) -> Iterator[str]:
    """Names become directories below the root."""
    for key in ("project", "group", "name"):
        value: str = getattr(config, key)
        if value.startswith("/") or ".." in value.split("/") or "\n" in value:
            yield f"{key}={value!r} must be a relative path without '..': it names a directory"
    for key in ("name", "checkpoint_root_dir"):
        if not getattr(config, key).strip():
            yield f"{key} is empty: set it, as {key}={'demo' if key == 'name' else './runs'}"


def root(config: Config) -> Iterator[str]:
    if "://" in config.checkpoint_root_dir:
        yield (
            f"checkpoint_root_dir={config.checkpoint_root_dir!r} must be a directory; experiences "
            "alone can be in an object store, by buffer=s3"
        )


def prepare(config: Config) -> Iterator[str]:
    if config.prepare is not None and not _CALLABLE.fullmatch(config.prepare):
        yield (
            f"prepare={config.prepare!r} is not a function: write package.module:function or "
            "path/to/file.py:function"
        )


def cluster(config: Config) -> Iterator[str]:
    section = config.cluster
    if section.type == "address" and not _ADDRESS.fullmatch(section.address or ""):
        yield (
            f"cluster.address={section.address!r} is not a scheduler address; write "
            "cluster=address cluster.address=tcp://host:8786"
        )
    if section.type == "local" and section.address is not None:
        yield (
            f"cluster.address={section.address!r} has no effect with cluster.type=local; write "
            "cluster=address to join that scheduler, or leave the address out"
        )
    if section.control.n_workers != 1:
        yield (
            f"cluster.control.n_workers={section.control.n_workers}: there is exactly one control "
            "worker; set it to 1"
        )
    for name in ("control", "rollout", "trainer", "runner"):
        yield from _group(name, getattr(section, name))


def _group(name: str, group: GroupConfig) -> Iterator[str]:
    if not _MEMORY.fullmatch(group.memory_limit):
        yield (
            f"cluster.{name}.memory_limit={group.memory_limit!r} is not a size; write 0 for no "
            "limit, auto, or a size as 8GB"
        )


def monitor(config: Config) -> Iterator[str]:
    """A sink is one of ours or a dotted path to a class."""
    for name in config.monitor.sinks:
        if name not in SINKS and not _CALLABLE.fullmatch(name):
            yield f"monitor.sinks has no {name!r}; {hint(name, SINKS)}"
    known = (*SINKS, *config.monitor.sinks)
    for name in config.monitor.sink_args:
        if name not in known:
            yield f"monitor.sink_args.{name}: there is no such sink; {hint(name, known)}"


def model(config: Config) -> Iterator[str]:
    if not config.model.model_path:
        yield (
            "model.model_path is empty: set model.model_path=<directory>, or start from a preset, "
            "as +experiment=sort_digits"
        )


def lengths(config: Config) -> Iterator[str]:
    """No silent default length: answers cut by one look like a model that cannot learn."""
    section = config.model
    total, prompt, response = (
        section.max_model_len,
        section.max_prompt_tokens,
        section.max_response_tokens,
    )
    if not explores(config):
        return
    if total is None or prompt is None or response is None:
        yield (
            "model.max_model_len is not set and cannot be derived: set it, or both "
            "model.max_prompt_tokens and model.max_response_tokens"
        )
        return
    if prompt < 1 or response < 1 or prompt + response > total:
        yield (
            f"model.max_prompt_tokens={prompt} + model.max_response_tokens={response} must be at "
            f"most model.max_model_len={total} and each at least 1; raise model.max_model_len"
        )
    if section.min_response_tokens >= response:
        yield (
            f"model.min_response_tokens={section.min_response_tokens} must be below "
            f"model.max_response_tokens={response}"
        )


def algorithm(config: Config) -> Iterator[str]:
    section, store = config.algorithm, config.buffer.trainer_input.experience_buffer
    if section.algorithm_type == "sft":
        if config.mode != "train":
            yield f"mode={config.mode} cannot run algorithm_type=sft: set mode=train"
        elif store.storage_type != "file":
            yield (
                f"{_STORE}.storage_type={store.storage_type}: sft reads the rows of a file; set "
                f"{_STORE}.storage_type=file and {_STORE}.path=<rows.jsonl>"
            )
    elif store.storage_type == "file":
        yield (
            f"{_STORE}.storage_type=file holds SFT rows, which {section.algorithm_type} cannot "
            "train on: set it to store, or algorithm.algorithm_type=sft"
        )
    if section.algorithm_type == "grpo" and explores(config):
        yield from _group_size(config)


def _group_size(config: Config) -> Iterator[str]:
    """The group is the taskset's repeat_times, by default the algorithm's."""
    for key, size in (
        ("algorithm.repeat_times", config.algorithm.repeat_times),
        (f"{_TASKS}.taskset.repeat_times", config.buffer.explorer_input.taskset.repeat_times),
    ):
        if size is not None and size < 2:
            yield (
                f"{key}={size}: grpo compares the answers of a group, so with fewer than 2 every "
                f"advantage is zero; set {key} to 2 or more, as 8"
            )
            return


def correction(config: Config) -> Iterator[str]:
    if config.algorithm.bypass_old_logprobs and config.algorithm.rollout_correction.mode != "none":
        yield (
            f"algorithm.rollout_correction.mode={config.algorithm.rollout_correction.mode} with "
            "algorithm.bypass_old_logprobs=true corrects twice: the ratio already is to the "
            "sampler; set one of them to its default (none, false)"
        )


def _restricted(config: Config) -> list[str]:
    """Sampling of the train taskset that leaves tokens out (top-p, top-k)."""
    args = config.buffer.explorer_input.taskset.rollout_args
    found = [f"top_p={args.top_p}"] if args.top_p not in (None, 1.0) else []
    return found + ([f"top_k={args.top_k}"] if args.top_k not in (None, -1) else [])


def support(config: Config) -> Iterator[str]:
    """The trainer's softmax is over all tokens; a ratio to a narrower sampler is not 1 at lag 0."""
    section = config.algorithm
    uses_ratio = section.bypass_old_logprobs or section.rollout_correction.mode != "none"
    if trains(config) and explores(config) and uses_ratio:
        for setting in _restricted(config):
            name = setting.partition("=")[0]
            off = "1.0" if name == "top_p" else "-1"
            yield (
                f"model.{setting} narrows the sampler's distribution, and the importance ratio of "
                f"the trainer would be wrong; set model.{name}={off} (evaluation may set its own "
                f"rollout_args.{name}), or use neither bypass_old_logprobs nor rollout_correction"
            )


def temperature(config: Config) -> Iterator[str]:
    """Sampler and trainer must mean the same distribution."""
    if not explores(config):
        return
    value = config.buffer.explorer_input.taskset.rollout_args.temperature
    if value == 0:
        yield (
            "model.temperature=0 is greedy: all answers of a group would be equal; set "
            "model.temperature=1.0 (evaluation may set rollout_args.temperature=0)"
        )
    elif value != config.model.temperature:
        yield (
            f"{_TASKS}.taskset.rollout_args.temperature={value} differs from "
            f"model.temperature={config.model.temperature}, at which the trainer computes "
            "log-probs: set model.temperature only"
        )


def tasksets(config: Config) -> Iterator[str]:
    if not explores(config):
        return
    source = config.buffer.explorer_input
    yield from _taskset(f"{_TASKS}.taskset", source.taskset)
    seen: set[str] = set()
    for index, taskset in enumerate(source.eval_tasksets):
        key = f"{_TASKS}.eval_tasksets.{index}"
        yield from _taskset(key, taskset)
        if taskset.name in seen:
            yield f"{key}.name={taskset.name!r} is taken by an earlier one; give it another name"
        seen.add(taskset.name or "")


def _taskset(key: str, taskset: TasksetConfig) -> Iterator[str]:
    if not taskset.path:
        yield f"{key}.path is empty: set it to a file of tasks, as {key}.path=tasks.jsonl"
    if not taskset.workflow:
        yield f"{key}.workflow is empty: name a workflow, as {key}.workflow=simple_workflow"


def engine(config: Config) -> Iterator[str]:
    if not explores(config):
        return
    section, group = config.explorer.rollout_model, config.cluster.rollout
    size, gpus = section.tensor_parallel_size, group.gpus_per_worker
    key = f"{_ENGINE}.tensor_parallel_size={size}"
    if size > 1 and section.engine_type != "vllm":
        yield f"{key}: engine {section.engine_type} is one process; set it to 1, or engine=vllm"
    elif size > 1 and gpus == 0:
        yield (
            f"{key}: without GPUs an engine is one process; set it to 1 and "
            "cluster.rollout.n_workers for more engines"
        )
    elif section.engine_type == "vllm" and gpus not in (0, size):
        yield (f"cluster.rollout.gpus_per_worker={gpus} must equal {key}: one engine per worker")


def workers(config: Config) -> Iterator[str]:
    for group, needed in (("rollout", explores(config)), ("trainer", trains(config))):
        if needed and getattr(config.cluster, group).n_workers < 1:
            yield (
                f"cluster.{group}.n_workers=0: mode={config.mode} needs at least one {group} "
                f"worker; set cluster.{group}.n_workers=1"
            )


def train_rows(config: Config) -> Iterator[str]:
    if not trains(config):
        return
    rows, store = config.buffer.train_batch_size, config.buffer.trainer_input.experience_buffer
    if store.storage_type == "file":
        if not store.path:
            yield f"{_STORE}.path is empty: set it to a file of rows, as {_STORE}.path=rows.jsonl"
        if rows is None:
            yield "buffer.train_batch_size is not set: a file needs the rows per train step, as 64"
    ranks, minis = config.cluster.trainer.n_workers, config.trainer.mini_batches
    if rows is not None and rows < ranks * minis:
        yield (
            f"buffer.train_batch_size={rows} is fewer than cluster.trainer.n_workers={ranks} x "
            f"trainer.mini_batches={minis}: each rank needs a row of each mini-batch"
        )


def store(config: Config) -> Iterator[str]:
    """An object store needs at least a bucket."""
    path = config.buffer.trainer_input.experience_buffer.path or ""
    if re.fullmatch(r"[\w+.-]+:/*", path):
        yield f"{_STORE}.path={path} names no place: write {_STORE}.path={path}bucket/prefix"


def timeouts(config: Config) -> Iterator[str]:
    section = config.explorer
    if section.batch_timeout_s is not None and section.batch_timeout_s < section.max_timeout_s:
        yield (
            f"explorer.batch_timeout_s={section.batch_timeout_s} is below "
            f"explorer.max_timeout_s={section.max_timeout_s}: a batch takes at least one attempt"
        )


def warnings(config: Config) -> Iterator[str]:
    """What runs, but probably not as meant."""
    if trains(config) and explores(config) and not list(support(config)):
        for setting in _restricted(config):
            yield (
                f"model.{setting}: the policy is sampled from a narrower distribution than the one "
                "that is trained"
            )
    if explores(config) and not config.buffer.explorer_input.taskset.reward_fn:
        yield f"{_TASKS}.taskset.reward_fn is not set: the workflow itself must give rewards"


Check = Callable[[Config], Iterator[str]]
RUN_CHECKS: tuple[Check, ...] = (names, root, prepare, cluster, monitor)
STAGE_CHECKS: tuple[Check, ...] = (
    model,
    lengths,
    algorithm,
    correction,
    temperature,
    support,
    tasksets,
    engine,
    workers,
    train_rows,
    store,
    timeouts,
)

"""Relations between values.

Invariant: each check is a generator of problems over one resolved configuration with
sound single values; a check that does not concern the mode yields nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from trinity_dask.config import modes
from trinity_dask.config.algorithms import GROUP_TYPES, OFFLINE_TYPES
from trinity_dask.config.limits import SINKS
from trinity_dask.config.name_checks import part_names
from trinity_dask.config.nearest import hint
from trinity_dask.config.schema import Config, GroupConfig
from trinity_dask.config.sync_checks import synchronizer
from trinity_dask.config.taskset_checks import tasksets, train_tasksets
from trinity_dask.config.trainer_checks import lora, parallel, schedule, short_for_warmup

_ENGINE = "explorer.rollout_model"
_STORE = "buffer.trainer_input.experience_buffer"
_TASKS = "buffer.explorer_input"
_MEMORY = re.compile(r"0|auto|\d+(\.\d+)?\s*([kKMGT]i?)?B?|0?\.\d+")
_ADDRESS = re.compile(r"([a-z]+://)?[^\s/]+:\d+")
_CALLABLE = re.compile(r"[\w./-]+(:\w+|\.\w+)")


def explores(config: Config) -> bool:
    return modes.explores(config.mode)


def trains(config: Config) -> bool:
    return modes.trains(config.mode)


def samples(config: Config) -> bool:
    return modes.samples(config.mode)


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
    if not samples(config):
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
    kind = section.algorithm_type
    if kind in OFFLINE_TYPES:
        if explores(config):
            yield f"mode={config.mode} cannot run algorithm_type={kind}: set mode=train"
        elif store.storage_type != "file":
            yield (
                f"{_STORE}.storage_type={store.storage_type}: {kind} reads the rows of a file; set "
                f"{_STORE}.storage_type=file and {_STORE}.path=<rows.jsonl>"
            )
    elif store.storage_type == "file":
        yield (
            f"{_STORE}.storage_type=file holds SFT rows, which {kind} cannot "
            "train on: set it to store, or algorithm.algorithm_type=sft"
        )
    if kind in GROUP_TYPES and section.advantage_fn is None and explores(config):
        yield from _group_size(config)


def _group_size(config: Config) -> Iterator[str]:
    """The group is the taskset's repeat_times, by default the algorithm's."""
    for key, size in (
        ("algorithm.repeat_times", config.algorithm.repeat_times),
        *((f"{key}.repeat_times", taskset.repeat_times) for key, taskset in train_tasksets(config)),
    ):
        if size is not None and size < 2:
            yield (
                f"{key}={size}: {config.algorithm.algorithm_type} compares the answers of a group, "
                f"so with fewer than 2 every advantage is zero; set {key} to 2 or more, as 8"
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
    found: list[str] = []
    for taskset in config.buffer.explorer_input.train_tasksets:
        args = taskset.rollout_args
        found += [f"top_p={args.top_p}"] if args.top_p not in (None, 1.0) else []
        found += [f"top_k={args.top_k}"] if args.top_k not in (None, -1) else []
    return list(dict.fromkeys(found))


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
    for key, taskset in train_tasksets(config):
        value = taskset.rollout_args.temperature
        if value == 0:
            yield (
                "model.temperature=0 is greedy: all answers of a group would be equal; set "
                "model.temperature=1.0 (evaluation may set rollout_args.temperature=0)"
            )
        elif value != config.model.temperature:
            yield (
                f"{key}.rollout_args.temperature={value} differs from "
                f"model.temperature={config.model.temperature}, at which the trainer computes "
                "log-probs: set model.temperature only"
            )


def engine(config: Config) -> Iterator[str]:
    if not samples(config):
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
    for group, needed in (("rollout", samples(config)), ("trainer", trains(config))):
        if needed and getattr(config.cluster, group).n_workers < 1:
            yield (
                f"cluster.{group}.n_workers=0: mode={config.mode} needs at least one {group} "
                f"worker; set cluster.{group}.n_workers=1"
            )
    on_runners = samples(config) and config.explorer.run_on == "runner"
    if on_runners and config.cluster.runner.n_workers < 1:
        yield (
            "explorer.run_on=runner: there is no runner worker; set "
            "cluster.runner.n_workers=1, or explorer.run_on=auto"
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
    yield from short_for_warmup(config)
    if trains(config) and explores(config) and not list(support(config)):
        for setting in _restricted(config):
            yield (
                f"model.{setting}: the policy is sampled from a narrower distribution than the one "
                "that is trained"
            )
    if explores(config):
        for key, taskset in train_tasksets(config):
            if not taskset.reward_fn:
                yield f"{key}.reward_fn is not set: the workflow itself must give rewards"


def mode(config: Config) -> Iterator[str]:
    if config.mode == "serve":
        yield "mode=serve is not there yet; use both, explore, train, bench or colocate"
    elif config.mode == "colocate":
        yield from _colocated(config)
    elif config.mode == "bench" and not config.buffer.explorer_input.eval_tasksets:
        yield (
            f"{_TASKS}.eval_tasksets is empty: mode=bench evaluates checkpoints on them; name at "
            "least one"
        )


def _colocated(config: Config) -> Iterator[str]:
    """Trainer and engine in two processes on one device, or on none."""
    groups = {"rollout": config.cluster.rollout, "trainer": config.cluster.trainer}
    for name, group in groups.items():
        if group.n_workers != 1 or group.gpus_per_worker > 1:
            yield (
                f"mode=colocate shares one device: set cluster.{name}.n_workers=1 and "
                f"cluster.{name}.gpus_per_worker to 0 or 1 (got {group.n_workers} and "
                f"{group.gpus_per_worker}), or mode=both"
            )
    if groups["rollout"].gpus_per_worker != groups["trainer"].gpus_per_worker:
        yield (
            "mode=colocate: cluster.rollout.gpus_per_worker and cluster.trainer.gpus_per_worker "
            "must be equal, both 1 (they share that GPU) or both 0"
        )
    share = config.explorer.rollout_model.gpu_memory_utilization
    if groups["rollout"].gpus_per_worker and share is not None and share > 0.5:
        yield (
            f"{_ENGINE}.gpu_memory_utilization={share} leaves the trainer on the same GPU too "
            "little; set it to 0.5 or less, as 0.25"
        )


def meeting(config: Config) -> Iterator[str]:
    """Two runs find each other by the job directory, so both must choose the same one."""
    if not modes.meets(config.mode) or not config.synchronizer.peer_timeout_s:
        return
    if not config.continue_from_checkpoint or config.rerun_finished:
        yield (
            f"mode={config.mode} on a shared scheduler finds the other side by the run's name, "
            "which continue_from_checkpoint=false and rerun_finished=true may change: leave both "
            "out and set another name= on both sides (synchronizer.peer_timeout_s=0 runs alone)"
        )


Check = Callable[[Config], Iterator[str]]
RUN_CHECKS: tuple[Check, ...] = (names, root, prepare, cluster, monitor)
STAGE_CHECKS: tuple[Check, ...] = (
    mode,
    part_names,
    synchronizer,
    meeting,
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
    schedule,
    parallel,
    lora,
    store,
    timeouts,
)

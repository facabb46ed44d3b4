"""Relations between values.

Invariant: each check is a generator of problems over one resolved configuration with
sound single values; a check that does not concern the mode yields nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from trinity_dask.config import modes
from trinity_dask.config.algorithms import GROUP_TYPES, OFFLINE_TYPES
from trinity_dask.config.errors import hint
from trinity_dask.config.schema import DEFAULT_THREADS, SINKS, Config, TasksetConfig

_ENGINE = "explorer.rollout_model"
_STORE = "buffer.trainer_input.experience_buffer"
_TASKS = "buffer.explorer_input"
_MEMORY = re.compile(r"0|auto|\d+(\.\d+)?\s*([kKMGT]i?)?B?|0?\.\d+")
_ADDRESS = re.compile(r"([a-z]+://)?[^\s/]+:\d+")
# names of parts are parts of file names: <name>_meta.json, <name>_config.yaml and <name>.lock of
# the reserved ones are something else's
_COMPONENT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
_RESERVED = ("bench", "benchmark", "run", "stage", "synchronizer")
_ALLOWED = "letters, digits, '_', '-' and '.' (not first)"
_CALLABLE = re.compile(r"[\w./-]+(:\w+|\.\w+)")


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
    if section.type != "address" and section.address is not None:
        yield (
            f"cluster.address={section.address!r} has no effect with cluster.type={section.type}; "
            "write cluster=address to join that scheduler, or leave the address out"
        )
    if section.control.n_workers != 1:
        yield (
            f"cluster.control.n_workers={section.control.n_workers}: there is exactly one control "
            "worker; set it to 1"
        )
    for name in DEFAULT_THREADS:
        limit = getattr(section, name).memory_limit
        if not _MEMORY.fullmatch(limit):
            yield (
                f"cluster.{name}.memory_limit={limit!r} is not a size; write 0 for no "
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
    if not modes.samples(config.mode):
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
        if modes.explores(config.mode):
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
    if kind in GROUP_TYPES and section.advantage_fn is None and modes.explores(config.mode):
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
    if modes.trains(config.mode) and modes.explores(config.mode) and uses_ratio:
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
    if not modes.explores(config.mode):
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
    if not modes.samples(config.mode):
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
    for group, needed in (
        ("rollout", modes.samples(config.mode)),
        ("trainer", modes.trains(config.mode)),
    ):
        if needed and getattr(config.cluster, group).n_workers < 1:
            yield (
                f"cluster.{group}.n_workers=0: mode={config.mode} needs at least one {group} "
                f"worker; set cluster.{group}.n_workers=1"
            )
    on_runners = modes.samples(config.mode) and config.explorer.run_on == "runner"
    if on_runners and config.cluster.runner.n_workers < 1:
        yield (
            "explorer.run_on=runner: there is no runner worker; set "
            "cluster.runner.n_workers=1, or explorer.run_on=auto"
        )


def train_rows(config: Config) -> Iterator[str]:
    if not modes.trains(config.mode):
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


def patience(config: Config) -> Iterator[str]:
    """Waits that are shorter than what is waited for may take."""
    sync, store = config.synchronizer, config.buffer.trainer_input.experience_buffer
    attempt, step = config.explorer.max_timeout_s, config.trainer.step_timeout_s
    waits = {"synchronizer.meet_timeout_s": sync.meet_timeout_s}
    waits[f"{_STORE}.max_read_timeout_s"] = store.max_read_timeout_s
    for wait, limit in waits.items():
        for key, needed in (
            ("explorer.max_timeout_s", attempt),
            ("trainer.step_timeout_s", step),
        ):
            if limit is not None and limit < needed:
                yield (
                    f"{wait}={limit:g} is below {key}={needed:g}: one that is slow and well would "
                    "end the run; leave it out, or lower the other"
                )


def warnings(config: Config) -> Iterator[str]:
    """What runs, but probably not as meant."""
    yield from short_for_warmup(config)
    yield from patience(config)
    if modes.trains(config.mode) and modes.explores(config.mode) and not list(support(config)):
        for setting in _restricted(config):
            yield (
                f"model.{setting}: the policy is sampled from a narrower distribution than the one "
                "that is trained"
            )
    if modes.explores(config.mode):
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


def part_names(config: Config) -> Iterator[str]:
    """Of the explorer, the trainer and the experience buffer."""
    explorer, trainer = config.explorer.name, config.trainer.name
    buffer = config.buffer.trainer_input.experience_buffer.name
    yield from _name_problems("explorer.name", explorer, (*_RESERVED, "trainer"), "explorer1")
    yield from _name_problems("trainer.name", trainer, _RESERVED, "trainer")
    yield from _name_problems(f"{_STORE}.name", buffer, (), "experience")
    if explorer == trainer and explorer != "trainer":  # that one is told already
        yield (
            f"explorer.name={explorer!r} is trainer.name too, and both write files of that name; "
            "give one of them another name"
        )


def _name_problems(key: str, value: str, reserved: tuple[str, ...], example: str) -> Iterator[str]:
    if not _COMPONENT.fullmatch(value):
        yield (
            f"{key}={value!r} is not a name: it becomes part of file names, so it is made of "
            f"{_ALLOWED}, as {key}={example}"
        )
    elif value in reserved:
        yield (
            f"{key}={value!r} is reserved, as are {', '.join(reserved)}: files of that name are "
            f"written by another part; choose another one of {_ALLOWED}, as {key}={example}"
        )


def weight_path(config: Config) -> Iterator[str]:
    """Only method ``checkpoint`` has a place of its own choice, and its scheme must be known."""
    sync = config.synchronizer
    if sync.path is None:
        return
    if sync.sync_method != "checkpoint":
        yield (
            f"synchronizer.path={sync.path!r} has no meaning with synchronizer.sync_method="
            f"{sync.sync_method}; set sync_method=checkpoint, or leave it out"
        )
    scheme, separator, _ = sync.path.partition("://")
    if not separator:
        return
    import fsspec

    try:
        fsspec.get_filesystem_class(scheme)
    except (ValueError, ImportError) as error:
        yield (
            f"synchronizer.path={sync.path!r}: {error}; use a directory, or a scheme whose fsspec "
            "package is installed (s3:// needs s3fs)"
        )


def synchronizer(config: Config) -> Iterator[str]:
    yield from weight_path(config)
    if not (modes.explores(config.mode) and modes.trains(config.mode)):
        return
    sync = config.synchronizer
    capacity = config.buffer.trainer_input.experience_buffer.capacity_batches
    ahead = sync.sync_interval + sync.sync_offset
    if sync.sync_style == "fixed" and capacity < ahead:
        yield (
            f"{_STORE}.capacity_batches={capacity} is below "
            f"synchronizer.sync_interval={sync.sync_interval} + "
            f"synchronizer.sync_offset={sync.sync_offset}: in style fixed the explorer commits "
            f"that many batches before the trainer may go on; set it to {ahead} or more"
        )
    least = ahead - 1
    if sync.max_staleness is not None and sync.max_staleness < least:
        yield (
            f"synchronizer.max_staleness={sync.max_staleness} cannot be kept: weights move every "
            f"synchronizer.sync_interval={sync.sync_interval} steps"
            + (f", {sync.sync_offset} batches late" if sync.sync_offset else "")
            + f"; set it to {least} or more, or lower the interval"
        )
    if sync.sync_offset and sync.sync_style == "fully_async":
        yield (
            f"synchronizer.sync_offset={sync.sync_offset} has no meaning in style fully_async, "
            "which has no boundaries; leave it out"
        )
    if sync.in_flight == "wait" and sync.in_flight_timeout_s >= sync.sync_timeout_s:
        yield (
            f"synchronizer.in_flight_timeout_s={sync.in_flight_timeout_s:g} must be below "
            f"synchronizer.sync_timeout_s={sync.sync_timeout_s:g}: an update that waits for its "
            "requests has to end before the transfer is given up"
        )


def tasksets(config: Config) -> Iterator[str]:
    if not modes.samples(config.mode):
        return
    source = config.buffer.explorer_input
    if modes.explores(config.mode):
        yield from _train_tasksets(config)
    seen: set[str] = set()
    for index, taskset in enumerate(source.eval_tasksets):
        key = f"{_TASKS}.eval_tasksets.{index}"
        yield from _taskset(key, taskset)
        if taskset.name in seen:
            yield f"{key}.name={taskset.name!r} is taken by an earlier one; give it another name"
        seen.add(taskset.name or "")


def train_tasksets(config: Config) -> Iterator[tuple[str, TasksetConfig]]:
    """The train tasksets with their keys."""
    source = config.buffer.explorer_input
    if not source.tasksets:
        yield f"{_TASKS}.taskset", source.taskset
    for index, taskset in enumerate(source.tasksets):
        yield f"{_TASKS}.tasksets.{index}", taskset


def _train_tasksets(config: Config) -> Iterator[str]:
    source = config.buffer.explorer_input
    if source.tasksets and source.taskset.path:
        yield (
            f"{_TASKS}.taskset.path={source.taskset.path} and {_TASKS}.tasksets are both set; put "
            "all train tasksets into tasksets, or leave tasksets empty"
        )
    learns = False
    for key, taskset in train_tasksets(config):
        yield from _taskset(key, taskset)
        selector = taskset.data_selector
        learns = learns or selector.selector_type == "difficulty_based"
        wanted = {"difficulty_based": 2, "offline_easy2hard": 1}.get(selector.selector_type, 0)
        if len(selector.feature_keys) < wanted:
            yield (
                f"{key}.data_selector.feature_keys={selector.feature_keys}: selector_type="
                f"{selector.selector_type} needs {wanted} number columns of the file"
            )
    if learns and not any(o.name == "pass_rate_calculator" for o in config.buffer.operators):
        yield (
            f"{_TASKS}: selector_type=difficulty_based learns from pass rates: add the operator "
            "pass_rate_calculator to buffer.operators, before those that drop rows"
        )


def _taskset(key: str, taskset: TasksetConfig) -> Iterator[str]:
    if not taskset.path:
        yield f"{key}.path is empty: set it to a file of tasks, as {key}.path=tasks.jsonl"
    if not taskset.workflow:
        yield f"{key}.workflow is empty: name a workflow, as {key}.workflow=simple_workflow"


def schedule(config: Config) -> Iterator[str]:
    """A schedule that decays has to know its last step."""
    total = config.trainer.total_steps or config.buffer.total_steps
    if not modes.trains(config.mode) or total is not None:
        return
    for key, optimizer in (
        ("algorithm.optimizer", config.algorithm.optimizer),
        ("critic.optimizer", config.critic.optimizer),
    ):
        if optimizer.lr_scheduler_type != "constant":
            yield (
                f"{key}.lr_scheduler_type={optimizer.lr_scheduler_type} ends at a step that is not "
                "known: set trainer.total_steps (or buffer.total_steps), or constant"
            )


def short_for_warmup(config: Config) -> Iterator[str]:
    """Runs all the same: a few steps of a longer recipe are a fair trial of it."""
    steps = config.algorithm.optimizer.lr_warmup_steps
    total = config.trainer.total_steps or config.buffer.total_steps
    if modes.trains(config.mode) and total is not None and steps > total:
        yield (
            f"algorithm.optimizer.lr_warmup_steps={steps} is more than the {total} steps of the "
            "run: the learning rate never reaches algorithm.optimizer.lr"
        )


def parallel(config: Config) -> Iterator[str]:
    """What shards cannot do."""
    if not modes.trains(config.mode):
        return
    own = config.trainer.parallel.strategy
    strategies = {
        "trainer.parallel.strategy": own,
        "trainer.frozen_strategy": config.trainer.frozen_strategy,
        "critic.strategy": config.critic.strategy,
    }
    sharded = [key for key, strategy in strategies.items() if strategy == "fsdp2"]
    if sharded and config.cluster.trainer.n_workers < 2:
        yield (
            f"{sharded[0]}=fsdp2 with cluster.trainer.n_workers="
            f"{config.cluster.trainer.n_workers} has nothing to share: raise n_workers, or use ddp"
        )
    for key, strategy, optimizer in (
        ("algorithm", own, config.algorithm.optimizer),
        ("critic", config.critic.strategy or own, config.critic.optimizer),
    ):
        if strategy == "fsdp2" and optimizer.optimizer_type == "adamw8bit":
            yield (
                f"{key}.optimizer.optimizer_type=adamw8bit cannot hold shards: set it to adamw, or "
                "the model's strategy to ddp"
            )


def lora(config: Config) -> Iterator[str]:
    """An adapter needs something to sit on, and engines that can hold it."""
    section = config.model.lora
    if section.rank == 0:
        if section.path is not None:
            yield (
                f"model.lora.path={section.path} has no effect with model.lora.rank=0: set the "
                "adapter's rank, or leave the path out"
            )
        return
    if not section.target_modules:
        yield "model.lora.target_modules is empty: name linear layers, or write [all-linear]"
    if config.explorer.rollout_model.engine_type == "vllm" and section.rank > 512:
        yield f"model.lora.rank={section.rank} is more than vLLM serves: 512 or less"


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

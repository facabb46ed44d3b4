"""The rows of :mod:`.keys` about explorer, trainer, synchronizer and monitor; the whole table.

Invariant: the same as that of :mod:`.keys`.
"""

from __future__ import annotations

from trinity_dask.compat.trinity_config.keys import (
    ALGORITHM,
    BUFFER,
    CHAT,
    CLUSTER,
    DATA_PROCESSOR,
    FILLED,
    MEGATRON,
    MODEL,
    OF_RAY,
    ROPE,
    SERVER,
    TEMPLATE,
    TOP,
    Key,
    differs,
    gone,
    many,
    moved,
    same,
    to,
)
from trinity_dask.compat.trinity_config.keys_verl import VERL

_ONE_ENGINE = "an engine is one worker; more of them: cluster.rollout.n_workers"
_OWN = "engines take it from model, as the trainer does"

ENGINE = (
    gone("model_path", FILLED, matters=False),
    gone("name", "engines are numbered", matters=False),
    gone("trust_remote_code", "model.trust_remote_code holds for all", False, False),
    differs(
        "engine_type",
        "engine_type",
        "vllm, torch, or your own; SGLang, Tinker and outside services are not there",
        "vllm",
        how="engine",
    ),
    differs("engine_num", "../../cluster.rollout.n_workers", "one engine per worker", 1, "sizes"),
    differs(
        "tensor_parallel_size",
        "tensor_parallel_size",
        "and as many GPUs per rollout worker",
        1,
        how="sizes",
    ),
    gone("data_parallel_size", _ONE_ENGINE, 1),
    gone("pipeline_parallel_size", _ONE_ENGINE, 1),
    to("enable_expert_parallel", "extra_engine_args.enable_expert_parallel", False),
    gone("gpu_per_engine", FILLED, matters=False),
    same("extra_engine_args", {}),
    gone("use_v1", "vLLM has no other engine any more", True, False),
    same("enforce_eager", False, carry=True),
    same("enable_prefix_caching", True),
    to("enable_chunked_prefill", "extra_engine_args.enable_chunked_prefill", True),
    differs(
        "gpu_memory_utilization",
        "gpu_memory_utilization",
        "colocate: at most 0.25, as there",
        0.9,
        how="memory",
    ),
    differs(
        "dtype",
        "../../model.dtype",
        "float32 or bfloat16, of the trainer's forward pass too",
        "bfloat16",
        how="dtype",
        carry=True,
    ),
    same("seed", 42),
    *many("", "temperature top_p top_k logprobs", FILLED, False),
    *many("", "max_model_len max_prompt_tokens max_response_tokens", _OWN),
    *many("", "min_response_tokens enable_prompt_truncation repetition_penalty", _OWN),
    gone("ignore_eos", "an answer ends where the model ends it", False),
    gone("enable_multimodal", "prompts are text", False),
    gone("chat_template", TEMPLATE),
    gone("enable_thinking", CHAT),
    same("enable_history", False),
    gone("enable_openai_api", SERVER, False),
    gone("enable_log_requests", "trinity-dask samples shows what was asked", False, False),
    gone("base_port", "no port is opened", matters=False),
    gone("api_key", "no port is opened", "EMPTY", False),
    gone("enable_auto_tool_choice", SERVER, False),
    gone("tool_call_parser", "the tokenizer's response_template reads calls, or <tool_call>"),
    gone("reasoning_parser", SERVER),
    gone("external_model_config", "engines are local"),
    differs(
        "weight_sync_buffer_size", "../../synchronizer.bucket_mb", "at most 2047 MB", 1024, "bucket"
    ),
    gone("rope_scaling", ROPE),
    gone("rope_theta", ROPE),
    *many(
        "", "nnodes node_rank engine_id bundle_indices ray_namespace ray_actor_name", FILLED, False
    ),
    *many("", "sync_method checkpoint_job_dir cuda_visible_devices enable_lora", FILLED, False),
    *many("", "lora_modules lora_kwargs enable_return_routed_experts", FILLED, False),
)

EXPLORER = (
    same("explorer.name", "explorer"),
    differs(
        "explorer.runner_per_model",
        "cluster.rollout.nthreads",
        "what a worker runs at once; async workflows cost no process, so more is usual",
        8,
    ),
    gone("explorer.runner_prepare_concurrency", "runners are threads and start at once", 8, False),
    gone("explorer.runner_prepare_max_retries", "runners are threads", 2, False),
    gone("explorer.runner_num", "of no effect there either; see runner_per_model", matters=False),
    differs(
        "explorer.max_timeout",
        "explorer.max_timeout_s",
        "of one attempt of a sub-task; a whole batch has explorer.batch_timeout_s",
        1800,
    ),
    same("explorer.max_retry_times", 2),
    differs(
        "explorer.env_vars",
        "cluster.rollout.env",
        "of the engine's process, where workflows run",
        {},
        how="texts",
    ),
    same("explorer.concurrent_mode", "sequential", carry=True),
    same("explorer.max_repeat_times_per_runner"),
    *(
        Key(
            f"explorer.rollout_model.{key.theirs}",
            None
            if key.ours is None
            else (f"explorer.rollout_model.{key.ours}").replace(
                "explorer.rollout_model.../../", ""
            ),
            key.default,
            key.note,
            key.how,
            key.carry,
            key.matters,
        )
        for key in ENGINE
    ),
    gone(
        "explorer.auxiliary_models",
        "a teacher of on_policy_distill or jsd is model.teacher_model_path; a judge is called by "
        "your workflow or reward function",
        [],
        how="auxiliary",
    ),
    same("explorer.eval_interval", 100, carry=True),
    same("explorer.eval_on_startup", True),
    same("explorer.bench_on_latest_checkpoint", False),
    to("explorer.eval_on_latest_checkpoint", "explorer.bench_on_latest_checkpoint", False),
    *many("explorer.", "proxy_port listen_address service_status_check_interval", SERVER, False),
    gone("explorer.min_running_model_num", SERVER, 1, False),
    gone("explorer.db_url", SERVER, matters=False),
    same("explorer.over_rollout.ratio", 0.0),
    to("explorer.over_rollout.wait_after_min", "explorer.over_rollout.wait_after_min_s", 30.0),
    same("explorer.over_rollout.return_partial_tasks", False, carry=True),
    same("explorer.dynamic_timeout.enable", False),
    same("explorer.dynamic_timeout.warmup_min_steps", 1),
    same("explorer.dynamic_timeout.ratio", 3.0),
    differs(
        "explorer.runner_state_report_interval",
        "explorer.runner_state_report_interval_s",
        "their default is 0, ours 5",
        0,
    ),
    same("explorer.max_inflight_batches", 2),
)

TRAINER = (
    same("trainer.name", "trainer"),
    gone("trainer.trainer_type", "the trainer is ours; its options are in docs/trainer.md", "verl"),
    differs(
        "trainer.trainer_strategy",
        "trainer.parallel.strategy",
        "fsdp2 with more than one rank, else ddp",
        "fsdp2",
        how="strategy",
        carry=True,
    ),
    same("trainer.save_interval", 0, carry=True),
    gone("trainer.enable_preview", "trinity-dask samples shows answers", False, False),
    same("trainer.total_steps"),
    same("trainer.save_hf_checkpoint", "last"),
    same("trainer.grad_clip", 1.0),
    gone("trainer.use_dynamic_bsz", "micro-batches are always made by tokens", True, False),
    gone("trainer.use_remove_padding", "rows of like length go together", True, False),
    gone("trainer.balance_batch", "ranks always get equal work", True, False),
    to("trainer.critic_warmup", "critic.warmup_steps", 0),
    differs(
        "trainer.max_token_len_per_gpu",
        "trainer.micro_batch_tokens",
        "padded tokens of one forward pass; left out, 65536",
    ),
    gone("trainer.ulysses_sequence_parallel_size", "a sequence is on one rank", 1),
    gone("trainer.fix_actor_microbatch_loss_scale", "the loss is always counted so", False, False),
    differs(
        "trainer.param_offload", "trainer.offload", "weights and optimizer state", False, "switch"
    ),
    differs(
        "trainer.optimizer_offload",
        "trainer.offload",
        "weights and optimizer state",
        False,
        "switch",
    ),
    gone("trainer.grad_offload", MEGATRON, False),
    differs("trainer.offload_policy", "trainer.offload", "between train steps", False, "switch"),
    gone(
        "trainer.save_strategy", "checkpoints of all ranks are one directory", "unrestricted", False
    ),
    same("trainer.max_checkpoints_to_keep", 0, carry=True),
    *many(
        "trainer.megatron.",
        "tensor_model_parallel_size pipeline_model_parallel_size "
        "virtual_pipeline_model_parallel_size expert_model_parallel_size "
        "expert_tensor_parallel_size context_parallel_size sequence_parallel",
        MEGATRON,
        False,  # only with trainer_strategy megatron, which is told
    ),
    *many(
        "trainer.megatron.", "tensor pipeline virtual expert expert_tensor context", MEGATRON, False
    ),
    gone("trainer.trainer_config_path", "deprecated there; put its keys into trainer_config"),
    differs("trainer.actor_grad_clip", "trainer.grad_clip", "an older spelling"),
    *moved(VERL, "trainer.trainer_config.", ""),
)

SYNCHRONIZER = (
    differs(
        "synchronizer.sync_method",
        "synchronizer.sync_method",
        "nccl works on CPUs too and with adapters, and any number of explorers may follow",
        "nccl",
        how="method",
    ),
    differs("synchronizer.sync_style", "synchronizer.sync_style", "", "fixed", how="style"),
    same("synchronizer.sync_interval", 1),
    differs(
        "synchronizer.explorer_sync_interval",
        "synchronizer.sync_interval",
        "one interval for both sides",
        how="interval",
    ),
    differs(
        "synchronizer.trainer_sync_interval",
        "synchronizer.sync_interval",
        "one interval for both sides",
        how="interval",
    ),
    same("synchronizer.sync_offset", 0),
    differs(
        "synchronizer.sync_timeout",
        "synchronizer.sync_timeout_s",
        "longest wait for the other side or for one transfer; a death is noticed in a second",
        3600,
        carry=True,
    ),
    gone("synchronizer.group_name", OF_RAY, "rollout_weight_sync", False),
    gone(
        "synchronizer.wait_for_checkpoint", "a checkpoint appears whole or not at all", False, False
    ),
    gone("synchronizer.explorer_world_size", FILLED, matters=False),
)

OTHERS = (
    differs(
        "monitor.monitor_type",
        "monitor.sinks",
        "beside console and jsonl; there is no SwanLab",
        "tensorboard",
        how="monitor",
    ),
    differs(
        "monitor.monitor_args", "monitor.sink_args", "below the sink's name", how="monitor_args"
    ),
    same("monitor.detailed_stats", False),
    gone("monitor.enable_ray_timeline", "Dask's dashboard shows tasks", False, False),
    gone("monitor.cache_dir", FILLED, matters=False),
    gone("monitor.cache_root_dir", FILLED, matters=False),
    *many("service.data_juicer.", "server_url auto_start port", "no Data-Juicer service", False),
    gone("log.level", "logs have every line; choose when reading", "INFO", False),
    gone("log.group_by_node", "one file per process", False, False),
    gone("log.save_dir", FILLED, matters=False),
)

KEYS: tuple[Key, ...] = (
    *TOP,
    *ALGORITHM,
    *MODEL,
    *CLUSTER,
    *BUFFER,
    *DATA_PROCESSOR,
    *EXPLORER,
    *TRAINER,
    *SYNCHRONIZER,
    *OTHERS,
)

"""vLLM's options that Tandem does not have: flags of ``vllm serve`` and arguments of ``vllm.LLM``, as of vLLM 0.33.

As with the fields of requests, an option that cannot change a text is accepted, and a line says that it has no effect.
One that would change what is served is refused, unless its value asks for what Tandem does anyway.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from specdec.errors import InvalidRequest, quote
from specdec.flags import flag_of

#: Values that ask for nothing, as text.
_NOTHING: Final = frozenset({"None", "False", "", "()", "[]", "{}", "null"})

#: Reason → options without effect. A name that ends with "?" is a switch, one with "+" takes several values.
_IGNORED: Final[Mapping[str, str]] = {
    "how calls of tools and thoughts are read follows from the chat template, or from --response-template": """
        enable_auto_tool_choice? tool_call_parser reasoning_parser""",
    "tools are left out of the prompt with tool_choice none": "exclude_tools_when_tool_choice_none?",
    "prompts are always fed in chunks of --max-num-batched-tokens": """
        enable_chunked_prefill? long_prefill_token_threshold long_prefill_token_threshold_adaptive?
        max_num_scheduled_tokens max_num_partial_prefills max_long_partial_prefills prefill_schedule_interval""",
    "prompts are compared token by token, block by block": """
        prefix_caching_hash_algo prefix_cache_retention_interval prefix_match_unit""",
    "--log-level, --log-format and --log-requests choose what is logged, and texts never are": """
        aggregate_engine_logging? disable_access_log_for_endpoints disable_log_requests? disable_log_stats?
        disable_uvicorn_access_log? enable_log_deltas? enable_log_outputs? enable_logging_iteration_details?
        jit_monitor_mode jit_monitor_verbose? log_config_file log_error_stack? logging_config max_log_len
        use_tqdm_on_load? uvicorn_log_level""",
    "GET /metrics and the metrics of each answer are always the same": """
        collect_detailed_traces+ cudagraph_metrics? custom_histogram_buckets enable_layerwise_nvtx_tracing?
        enable_mfu_metrics? enable_mm_processor_stats? enable_per_request_metrics? enable_server_load_tracking?
        kv_cache_metrics? kv_cache_metrics_sample per_request_spec_decode_metrics show_hidden_metrics_for_version""",
    "answers always have it": """
        enable_prompt_tokens_details? enable_request_id_headers? enable_tokenizer_info_endpoint?""",
    "answers have no system_fingerprint": "fingerprint_mode fingerprint_value",
    "prompts are text only": """
        allowed_local_media_path allowed_media_domains+ disable_chunked_mm_input? disable_mm_preprocessor_cache?
        enable_mm_embeds? interleave_mm_strings? language_model_only? limit_mm_per_prompt media_io_kwargs
        mm_device_do_normalize? mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
        mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_only? mm_encoder_tp_mode
        mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type mm_processor_device
        mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc skip_mm_profiling? trust_request_mm_kwargs?
        video_pruning_method video_pruning_rate""",
    "no adapters are served": """
        default_mm_loras enable_mixed_moe_lora_format? enable_moe_shared_loras? enable_tower_connector_lora?
        fully_sharded_loras? lora_dtype lora_extra_vocab_size lora_target_modules+ max_cpu_loras max_lora_cls_labels
        max_lora_rank max_loras specialize_active_lora?""",
    "grammars are compiled by llguidance": "guided_decoding_backend",
    "limits of requests are the options --max-…": "h11_max_header_count h11_max_incomplete_event_size",
    "open requests get --drain-s seconds to finish": "shutdown_timeout",
    "a rank waits --tensor-parallel-timeout-s seconds": """
        cpu_distributed_timeout_seconds distributed_timeout_seconds""",
    "the model runs on one machine": """
        all2all_backend data_parallel_address data_parallel_backend data_parallel_rpc_port
        data_parallel_supervisor_port dcp_comm_backend dcp_q_replicate? dcp_kv_cache_interleave_size
        cp_kv_cache_interleave_size disable_nccl_for_dp_synchronization? dp_supervisor_probe_failure_threshold
        dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s dp_sync_interval elastic_ep_max_dp_size
        enable_ep_weight_filter? eplb_config expert_placement_strategy fault_tolerance_config master_addr master_port
        ray_workers_use_nsight?""",
    "it tunes vLLM's engine; Tandem measures its own kernels (--autotune)": """
        api_server_count async_scheduling? attention_backend attention_config compilation_config
        cudagraph_capture_sizes+ dbo_decode_token_threshold dbo_prefill_token_threshold disable_async_output_proc?
        disable_cascade_attn? disable_custom_all_reduce? disable_hybrid_kv_cache_manager?
        enable_batch_sharded_sampling? enable_cumem_allocator? enable_dbo? enable_flashinfer_autotune? enable_hc_sp?
        enable_mamba_shared_prefix_checkpoint? enable_nccl_comm_suspend? enable_shm_tensor_arena? engram_config
        fail_on_environ_validation? gdn_prefill_backend ir_op_priority kda_decode_backend kda_prefill_backend
        kernel_config kv_sharing_fast_prefill? linear_backend mamba_backend mamba_block_size mamba_cache_mode
        mamba_config mamba_ssu_algorithm max_cudagraph_capture_size max_parallel_loading_workers
        max_seq_len_to_capture moe_backend monokernel? num_lookahead_slots num_scheduler_steps numa_bind?
        numa_bind_cpus+ numa_bind_nodes+ offload_backend offload_group_size offload_num_in_group
        offload_prefetch_step optimization_level performance_mode preemption_mode pt_load_map_location
        renderer_num_workers replayssm_buffer_len safetensors_load_strategy safetensors_prefetch_block_size
        safetensors_prefetch_num_threads scheduler_delay_factor scheduler_reserve_full_isl? sparse_indexer_topk_backend
        stream_interval swa_bounded_replay? swap_space ubatch_size use_replayssm?
        use_v2_block_manager? watchdog_config watermark enable_fault_tolerance? enable_flash_late_interaction?""",
    "there is no endpoint of Cohere": "cohere_format cohere_is_reasoning_model?",
    "thinking is switched by chat_template_kwargs": "anthropic_disabled_thinking_effort",
    "the pages of the server are its own": "enable_offline_docs?",
}

#: Remedy → refused options; after "=" the values that are taken, since they ask for what is done anyway.
_REFUSED: Final[Mapping[str, str]] = {
    "download that revision (hf download NAME --revision …) and give its folder as the model": """
        revision=main code_revision=main tokenizer_revision=main""",
    "the folder is chosen with the environment variable HF_HOME": "download_dir",
    "set the environment variable HF_TOKEN": "hf_token=True",
    "weights are read from files in Hugging Face format: safetensors, else .bin": """
        load_format=auto,hf,safetensors config_format=auto,hf tokenizer_mode=auto,hf model_impl=auto,vllm,transformers
        model_loader_extra_config ignore_patterns=original/**/* allow_deprecated_quantization? quantization_config
        model_weights skip_tokenizer_init? model_class_overrides""",
    "change the config.json of the checkpoint": """
        hf_overrides hf_config_path rope_scaling rope_theta disable_sliding_window?""",
    "this engine generates text": """
        runner=auto,generate task=auto,generate convert=auto,none pooler_config diffusion_config""",
    "the KV cache has the type of the activations: choose --dtype": """
        kv_cache_dtype=auto kv_cache_dtype_skip_layers+ calculate_kv_scales? mamba_cache_dtype=auto
        mamba_ssm_cache_dtype=auto""",
    "--kv-cache-memory-bytes sets the size of the KV cache": "num_gpu_blocks_override",
    "weights and KV cache are not offloaded; use --quantization, or --tensor-parallel-size": """
        cpu_offload_gb=0,0.0 cpu_offload_params+ offload_params+
        kv_offloading_size=0,0.0 kv_offloading_backend=native""",
    "start a target for each replica and `tandem gateway --targets a,b`": """
        data_parallel_size=1 data_parallel_size_local=1 data_parallel_rank=0 data_parallel_start_rank=0
        data_parallel_hybrid_lb? data_parallel_external_lb? data_parallel_multi_port_external_lb? headless?
        enable_scale_out? enable_elastic_ep?""",
    "a model is split with --tensor-parallel-size alone": """
        pipeline_parallel_size=1 decode_context_parallel_size=1 prefill_context_parallel_size=1 nnodes=1 node_rank=0
        enable_expert_parallel? enable_eplb? distributed_executor_backend=mp,uni
        worker_cls=auto worker_extension_cls""",
    "choose GPUs with CUDA_VISIBLE_DEVICES": "device_ids+",
    "limits are --max-waiting, --max-queued-requests and --max-concurrent-sequences": """
        max_num_queued_reqs max_num_queued_tokens max_num_active_seqs""",
    "the queue is fair by client": "scheduling_policy=fcfs scheduler_cls",
    "sampling parameters are those of the request, and defaults of generation_config.json are not read": """
        generation_config=vllm override_generation_config""",
    "up to 20 raw log-probabilities are reported per position": "max_logprobs=20 logprobs_mode=raw_logprobs",
    "requests ask for it themselves": """
        return_tokens_as_token_ids? enable_force_include_usage? structured_outputs_config
        default_chat_template_kwargs reasoning_effort_map reasoning_config""",
    "content is given to the chat template as text, of the role assistant": """
        chat_template_content_format=auto,string response_role=assistant trust_request_chat_template?
        enable_prompt_embeds?""",
    "--response-template describes a format that is not known": """
        tool_parser_plugin reasoning_parser_plugin tool_strict_level""",
    "code of others is not loaded": "logits_processors+ io_processor_plugin middleware+",
    "tools run in the client": "tool_server",
    "only the base model is served: merge the adapter into it": "enable_lora? lora_modules+",
    "a process serves until it is stopped": """
        enable_sleep_mode? sleep_mode_backend=cumem sleep_mode_offload_cudagraph? sleep_preserve_parameter_names+
        weight_transfer_config""",
    "caches stay within one target": "kv_transfer_config kv_events_config ec_transfer_config ec_manager_config",
    "leave it out": """
        enable_return_routed_experts? return_sampling_mask? use_fp64_gumbel? enable_trace_replay? aux_output_config
        watermark_config additional_config profiler_config tokens_only? enable_mamba_cache_stochastic_rounding?
        mamba_cache_philox_rounds=0 sse_keep_alive_interval=0""",
    "give the flags themselves": "config",
    "the gateway serves REST and gRPC at once, on --port and --grpc-port": "grpc? uds",
    "with --ssl-ca-certs every client needs a certificate": "ssl_cert_reqs=0,2",
    "put a proxy in front that does it": "enable_ssl_refresh? ssl_ciphers root_path disable_fastapi_docs?",
}
_SHORT: Final = {"pipeline_parallel_size": "-pp", "data_parallel_size": "-dp", "enable_expert_parallel": "-ep"}


@dataclass(frozen=True, slots=True)
class VllmOption:
    """One of them."""

    name: str
    #: Why it has no effect, or what to do where it is refused.
    reason: str
    #: Whether any value is taken.
    is_ignored: bool
    #: Else the values that are, as text.
    same: tuple[str, ...] = ()
    is_switch: bool = False
    is_list: bool = False


def _read(groups: Mapping[str, str], *, is_ignored: bool) -> Iterator[VllmOption]:
    for reason, entries in groups.items():
        for entry in entries.split():
            name, _, same = entry.partition("=")
            yield VllmOption(
                name.rstrip("?+"),
                reason,
                is_ignored,
                tuple(same.split(",")) if same else (),
                is_switch=name.endswith("?"),
                is_list=name.endswith("+"),
            )


#: All of them by name.
VLLM_OPTIONS: Final[Mapping[str, VllmOption]] = {
    each.name: each for each in (*_read(_IGNORED, is_ignored=True), *_read(_REFUSED, is_ignored=False))
}


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Take the flags, which help texts do not list."""
    for each in VLLM_OPTIONS.values():
        flags = [flag_of(each.name), *([_SHORT[each.name]] if each.name in _SHORT else [])]
        if each.is_switch:
            parser.add_argument(*flags, action=argparse.BooleanOptionalAction, help=argparse.SUPPRESS)
        else:
            parser.add_argument(*flags, nargs="+" if each.is_list else None, help=argparse.SUPPRESS)


def as_flag(name: str, value: Any) -> str:
    """An option as a command line has it."""
    if isinstance(value, bool):
        return flag_of(name if value else f"no_{name}")
    return f"{flag_of(name)} {' '.join(value) if isinstance(value, list) else value}"


def as_argument(name: str, value: Any) -> str:
    """An option as a call has it."""
    return f"{name}={quote(value)}"


def notes_on(given: Mapping[str, Any], spell: Callable[[str, Any], str]) -> Iterator[tuple[bool, str]]:
    """Pairs (is_ignored, line) for the given options that change nothing; a line names the options and the reason.

    ``is_ignored`` is False where Tandem does what the options ask for anyway. An option that is None is left out.

    Raises:
        InvalidRequest: a value asks for something that is not done here.
    """
    lines: dict[tuple[bool, str], list[str]] = {}
    for name, value in given.items():
        if value is None:
            continue
        each, written = VLLM_OPTIONS[name], spell(name, value)
        if each.is_ignored:
            lines.setdefault((True, f"no effect here: {each.reason}"), []).append(written)
        elif str(value) in _NOTHING or str(value) in each.same:
            lines.setdefault((False, "that is so here anyway"), []).append(written)
        else:
            taken = f" (only {' or '.join(each.same)})" if each.same else ""
            raise InvalidRequest(f"{written} is not supported{taken}; {each.reason}", param=name)
    return ((ignored, f"{', '.join(names)}: {text}") for (ignored, text), names in lines.items())

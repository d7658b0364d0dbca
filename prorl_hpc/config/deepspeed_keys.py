"""Which keys DeepSpeed's JSON has in its sections, so that a typo is found where no DeepSpeed is loaded. Section names are dotted.

``STRICT`` is what DeepSpeed's own classes accept, which refuse the rest; tests/config/test_deepspeed_keys.py compares it with those of
the installed DeepSpeed. In ``LENIENT`` sections DeepSpeed ignores what it does not know.
"""

from __future__ import annotations

RECORDED = (0, 19)
"""Version of the DeepSpeed whose keys these are. A newer one may know more."""


def _keys(words: str) -> frozenset[str]:
    return frozenset(words.split())


STRICT = {
    "bf16": _keys(
        "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states"
    ),
    "comms_logger": _keys("enabled prof_all prof_ops verbose debug"),
    "zero_optimization": _keys("""
        stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions
        allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights elastic_checkpoint offload_param
        offload_optimizer zenflow sub_group_size cpu_offload_param cpu_offload_use_pin_memory cpu_offload
        stage3_prefetch_bucket_size prefetch_bucket_size stage3_param_persistence_threshold param_persistence_threshold
        stage3_model_persistence_threshold model_persistence_threshold stage3_max_live_parameters max_live_parameters
        stage3_max_reuse_distance max_reuse_distance stage3_gather_16bit_weights_on_model_save
        gather_16bit_weights_on_model_save stage3_module_granularity_threshold module_granularity_threshold
        stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params stage3_allgather_sequential
        allgather_sequential stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1
        round_robin_gradients parameter_alignment zero_hpz_partition_size zero_quantized_weights
        zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear pipeline_loading_checkpoint
        override_module_apply log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module
        """),
    "zero_optimization.leaf_module": _keys("classes names name_suffixes"),
    "zero_optimization.offload_optimizer": _keys("""
        device nvme_path buffer_count pin_memory pipeline_read pipeline_write fast_init ratio cpuadam_cores_perc
        super_offload
        """),
    "zero_optimization.offload_param": _keys("device nvme_path buffer_count buffer_size max_in_cpu pin_memory"),
    "zero_optimization.zenflow": _keys("""
        topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio full_warm_up_rounds
        pt_reserved_cores_perc steps_per_epoch
        """),
}
LENIENT = {
    "aio": _keys("block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds"),
    "data_types": _keys("grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules"),
    "flops_profiler": _keys("enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file"),
    "optimizer": _keys("type params"),
}

"""Which tests `make test` leaves to `make test-long`.

`make test` holds what matters for a change: scripts, list decoders, the scheduler and its state
machine, traps, tables of configs, and three gate cases. A file whose entry is None is not even
imported then; else the entry is a regular expression for the names of the tests that are long.
`pytest tests/FILE` runs every test of a file. Paths are relative to tests/.
"""

# Files whose tests run by case (`name`) of tests/contract/cases.py, and the cases of `make test`.
CASE_FILES = {
    "engine/test_engine_edges.py",
    "runner/test_engine_device.py",
    "runner/test_engine_faults.py",
    "runner/test_no_copies.py",
    "strategies/test_contract.py",
}
GATE = {"multi_bd_shifted", "d2f_whole_full", "ar"}

LONG: dict[str, str | None] = {
    "api/test_dflash_drafts.py": None,
    "api/test_generate.py": "alone_and_in_a_batch|max_tokens_without_stops|jit_and_vmap",
    "api/test_infill.py": None,
    "api/test_snapshot.py": None,
    "api/test_threads.py": None,
    "bench/test_bench.py": None,
    "bench/test_bench_profile.py": None,
    "bench/test_bench_step.py": None,
    "cli/test_builtin.py": None,
    "cli/test_cli_bench.py": None,
    "cli/test_cli_chat.py": None,
    "cli/test_cli_drafts.py": None,
    "cli/test_cli_generate.py": "signal|users_settings|prompt_file",
    "cli/test_cli_verbs.py": "users_settings",
    "cli/test_interrupt.py": None,
    "convert/test_convert_memory.py": None,
    "kernels/test_expert_ffn.py": "any_routing|published",
    "kernels/test_layer_mosaic.py": "many_rows",
    "kernels/test_layer_mosaic_rotate.py": None,
    "kernels/test_layer_ops.py": None,
    "kernels/test_paged_attention.py": "published|window",
    "kernels/test_paged_attention_mosaic.py": None,
    "kernels/test_token_readout.py": "decoding_reads|no_logits",
    "kernels/test_token_readout_mosaic.py": None,
    "loading/test_async_dispatch.py": None,
    "loading/test_hub.py": "ctrl_c",
    "models/test_canvas_model.py": "single_passes|bfloat16|commit",
    "models/test_draft_model.py": None,
    "models/test_draft_traps.py": None,
    "models/test_family_decode.py": None,
    "models/test_family_defaults.py": "token_by_token",
    "models/test_family_logits.py": "bfloat16|reference",
    "models/test_family_routing.py": None,
    "benchmarks/test_compile_h200.py": None,
    "benchmarks/test_dflash_gpu.py": None,
    "benchmarks/test_run_gpu.py": None,
    "benchmarks/test_soak.py": None,
    "benchmarks/test_start_gpu.py": None,
    "mutants/test_mutants.py": None,
    "project/test_docs.py": "python_blocks",
    "project/test_examples.py": "command_line",
    "project/test_packaging.py": "wheel|foreign_packages",
    "runner/test_engine_device.py": "every_status|prefill_chunkings|buckets_change|fill_a_bucket"
    "|near_tie|outlives_requests",
    "runner/test_engine_faults.py": None,
    "runner/test_many_rows.py": None,
    "runner/test_no_copies.py": "bfloat16|widths|equals_the_dense_run",
    "runner/test_warm_up.py": None,
    "serve/test_http.py": None,
    "serve/test_server.py": None,
    "strategies/test_credit_decoding.py": None,
    "strategies/test_d2f.py": "adapter",
    "strategies/test_diffusion_gemma_golden.py": None,
    "strategies/test_dflash_costs.py": None,
    "strategies/test_dflash_counts.py": None,
    "strategies/test_dflash_rejection.py": None,
    "strategies/test_dflash_widths.py": None,
    "strategies/test_invariants.py": "broken_rule",
    "strategies/test_recording.py": None,
    "strategies/test_short_prompts.py": None,
    "strategies/test_strategy_batch.py": None,
    "tasks/test_evaluate.py": None,
    "trace/test_page.py": "command_puts",
    "training/test_training_answers.py": None,
    "training/test_training_draft.py": None,
    "training/test_training_kinds.py": None,
    "training/test_training_loop.py": None,
    "training/test_training_objective.py": None,
    "training/test_training_tokenizer.py": None,
}

# What depends on the version of JAX: the only tests that CI runs under its older Python too.
VERSIONS = (
    "api/test_generate.py",
    "convert/test_convert.py",
    "kernels",
    "loading/test_async_dispatch.py",
    "loading/test_jax_settings.py",
    "loading/test_load.py",
    "models/test_family_logits.py",
    "models/test_logits_golden.py",
    "runner/test_engine_device.py",
    "runner/test_engine_faults.py",
    "runner/test_many_rows.py",
    "runner/test_no_copies.py",
    "strategies/test_by_class.py",
    "strategies/test_contract.py",
    "training/test_training_loop.py",
)
# Of the gate's cases, those that differ between versions.
VERSION_CASES = {
    "multi_bd",
    "multi_bd_shifted",
    "d2f_whole_full",
    "block_cache",
    "canvas",
    "dflash",
}

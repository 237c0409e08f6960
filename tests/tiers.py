"""Which tests `make test` leaves to `make test-long`, and which both leave to `make test-all`.

`make test` holds what matters for a change: scripts, list decoders, the scheduler and its state
machine, traps, tables of configs, and two gate cases. A file whose entry is None is not even
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
GATE = {"multi_bd_shifted", "d2f_whole_full"}

LONG: dict[str, str | None] = {
    "api/test_decide.py": "of_the_logits|programs_are_few|bit_for_bit|one_forward",
    "api/test_dflash_drafts.py": None,
    "api/test_generate.py": "alone_and_in_a_batch|max_tokens_without_stops|jit_and_vmap"
    r"|last_position|compiles_once",
    "api/test_infill.py": None,
    "api/test_snapshot.py": None,
    "api/test_threads.py": None,
    "bench/test_bench.py": None,
    "bench/test_bench_profile.py": None,
    "bench/test_bench_serving.py": "real_server",
    "bench/test_bench_step.py": None,
    "cli/test_builtin.py": None,
    "cli/test_cli_bench.py": None,
    "cli/test_cli_chat.py": None,
    "cli/test_cli_drafts.py": None,
    "cli/test_cli_generate.py": "text_and_figures|signal|termination|prompt_file",
    "cli/test_cli_verbs.py": r"users_settings|closed_pipe|under_xdg",
    "cli/test_interrupt.py": None,
    "convert/test_convert_memory.py": None,
    "kernels/test_canvas_layer.py": None,
    "kernels/test_expert_ffn.py": "any_routing|published|may_be_gelus",
    "kernels/test_expert_ffn_mosaic.py": "ragged|every_row|no_expert|published|8_bits|dense_half"
    r"|all_rows_take_goes",
    "kernels/test_grammar_path.py": r"bit|half|by_classes|many_rows|lowers",
    "kernels/test_layer_mosaic.py": None,
    "kernels/test_layer_mosaic_rotate.py": None,
    "kernels/test_layer_ops.py": None,
    "kernels/test_paged_attention.py": "published|window",
    "kernels/test_paged_attention_mosaic.py": None,
    "kernels/test_token_readout.py": "decoding_reads|no_logits",
    "kernels/test_token_readout_mosaic.py": None,
    "loading/test_async_dispatch.py": None,
    "loading/test_hub.py": "ctrl_c",
    "loading/test_likelihood.py": r"a_family|covers|tokenised|over_all_orders|sums_to_one",
    "loading/test_quantization.py": "same_request|built_in|experts_and|logits_are_near",
    "models/test_canvas_model.py": "single_passes|few_bits|strong_net|commit|notices|whole_logits"
    r"|within_reach|factors_of",
    "models/test_draft_model.py": None,
    "models/test_draft_traps.py": None,
    "models/test_family_decode.py": None,
    "models/test_kv_cache.py": "same_request|take_a_byte|scale_allows",
    "models/test_family_defaults.py": "token_by_token|no_tokens_behind",
    "models/test_family_logits.py": "bfloat16|reference",
    "models/test_family_routing.py": None,
    "models/test_sharding.py": "drafter|leaf_by_leaf|same_logits|rounded|last_bit|zeros_behind"
    "|device_by_device",
    "benchmarks/test_compile_h200.py": None,
    "benchmarks/test_dflash_gpu.py": None,
    "benchmarks/test_fp8_gpu.py": "every_part",
    "benchmarks/test_routing_script.py": "counted|forgotten",
    "benchmarks/test_run_gpu.py": None,
    "benchmarks/test_soak.py": None,
    "benchmarks/test_start_gpu.py": None,
    "mutants/test_mutants.py": None,
    "project/test_docs.py": "python_blocks",
    "project/test_examples.py": "command_line",
    "project/test_packaging.py": "wheel|foreign_packages|top_level|same_name",
    "project/test_readme.py": None,
    "project/test_wrong_usages.py": None,
    "runner/test_background.py": "constraints_compiled|no_other_request|failed_compil|process_ends",
    "runner/test_engine_device.py": "every_status|compiles.*(shifted|whole)|alone.*whole"
    "|prefill_chunkings"
    "|buckets_change|fill_a_bucket"
    "|near_tie|outlives_requests"
    "|llm_gives_the_tokens"
    "|other_slots.*(d2f_whole|ar.)",
    "runner/test_engine_faults.py": None,
    "runner/test_hosts.py": "two_processes",
    "runner/test_many_rows.py": None,
    "runner/test_several_devices.py": "-4|-8|canvases|strategy|builtin|users_mesh|vmap|trajectory"
    "|command|plain|letter",
    "runner/test_no_copies.py": r"bfloat16|widths|equals_the_dense_run|several_shapes|engine_work",
    "runner/test_warm_up.py": None,
    "serve/test_decisions.py": None,
    "serve/test_hostile.py": None,
    "serve/test_http.py": None,
    "serve/test_page_browser.py": None,
    "serve/test_server.py": None,
    "serve/test_client_traps.py": None,
    "structured/test_compile.py": "explodes",
    "structured/test_draws.py": None,
    "structured/test_plan.py": "best_of_all",
    "structured/test_conform.py": "vandal|block_diffusion|d2f|dmax|fast_dllm|full_sequence",
    "structured/test_constrained_llm.py": None,
    "structured/test_holes.py": "fill_holes|never_change|across_given|as_long_as|refused_in_one",
    "strategies/test_credit_decoding.py": None,
    "strategies/test_canvas_engine.py": None,
    "strategies/test_d2f.py": r"adapter|on_a_shifted|every_row_of",
    "strategies/test_diffusion_gemma_golden.py": None,
    "strategies/test_dflash_costs.py": None,
    "strategies/test_dflash_counts.py": None,
    "strategies/test_dflash_rejection.py": None,
    "strategies/test_dflash_widths.py": None,
    "strategies/test_invariants.py": "broken_rule",
    "strategies/test_recording.py": None,
    "strategies/test_short_prompts.py": None,
    "strategies/test_strategy_batch.py": None,
    "strategies/test_shards.py": None,
    "strategies/test_stuck.py": "every_loop|many_forwards|waits_longer|begins_anew",
    "tasks/test_race.py": r"command_writes|95_of_100|doubts|cannot_be_raced",
    "tasks/test_evaluate.py": None,
    "trace/test_page.py": "command_puts|takes_fields",
    "training/test_training_answers.py": None,
    "training/test_training_canvas.py": None,
    "training/test_training_draft.py": None,
    "training/test_training_kinds.py": None,
    "training/test_training_loop.py": None,
    "training/test_training_objective.py": None,
    "training/test_training_stop.py": "real_process|one_family",
    "training/test_training_tokenizer.py": None,
    "strategies/test_dflash.py": None,
    "strategies/test_diffusion_gemma.py": "does_not_depend",
    "structured/test_constrained_engine.py": "after_preemption|devices_that_share|keeps_its_text"
    "|write_the_same"
    r"|neighbours|fifty",
    "strategies/test_by_class.py": "adopted",
    "strategies/test_contract.py": "drafter_sees|scripted_drafts|while_another"
    "|first_cells.(3|8)|moving_every|change_after",
    "strategies/test_traces.py": "knobs[235].*run_script",
    "runner/test_timing.py": "times_nothing",
    "runner/test_expectation.py": "frequencies|running_sum|own_temperature|head_in_8_bits",
    "strategies/test_edit.py": "never_drawn|penalty_is_on|end_with_their_budget"
    "|never_adds|timed_out",
    "strategies/test_edit_indel.py": "list_decoder|so_many|without_a_budget|wants_its_share",
    "strategies/test_fast_dllm_v2.py": "each_forward_runs|list_decoder.4-[12]|list_decoder.8-4"
    "|script-whole",
    "strategies/test_dmax.py": r"other_forms|buffer_that_never|agree_with.*diffulex|each_slot"
    "|run_script-diffulex",
    "loading/test_load.py": r"only_norms_are_ones|long_to_import",
    "strategies/test_strategy_fuzz.py": "list_decoder.(entropy|random|4-3)",
    "engine/test_engine_edges.py": "run_of_equal",
    "kernels/test_fp8.py": None,
    "strategies/test_author_errors.py": "plain",
    "cli/test_cli_errors.py": "executed_once|device_that_fails",
    "trace/test_trace.py": "writes_each_form",
    "strategies/test_full_sequence.py": "on_pages|loops.margin",
    "api/test_lm_eval.py": r"perplexity_is",
    "convert/test_convert.py": r"killed|inverse_of_reading",
    "convert/test_convert_families.py": r"dropped_renamed|filled_once|dry_run|restores_bit",
    "serve/test_front.py": r"another_asgi",
    "api/test_llm.py": r"told_apart|functional_form",
}

# What neither runs, as a test of less work says the same or few changes touch it, and `make
# test-all` does. Those of kernels/ count as long where pallas_kernels/ changed.
SLOW = {
    "api/test_decide.py": r"one_forward.False"
    r"|of_the_logits.llada\]"
    r"|of_the_logits\[(?!sdar\]|llada\])|one_forward.True",
    "api/test_dflash_drafts.py": "target_in_8_bits",
    "api/test_generate.py": r"without_stops\[(entropy|dynamic|static)|in_a_batch\[(random|ar)"
    r"|stops\[(ra|se)",
    "bench/test_bench_serving.py": "real_server",
    "bench/test_bench_step.py": "several_devices|proved_profiled",
    "benchmarks/test_fp8_gpu.py": "every_part",
    "benchmarks/test_routing_script.py": "counted",
    "cli/test_cli_bench.py": "fixed_canvases|throughput_of_fixed|models_own|latency_runs",
    "cli/test_cli_generate.py": r"termination"
    r"|prompt_file|between_two_forwards_of|middle_of|process_compiles",
    "cli/test_cli_verbs.py": r"under_xdg"
    r"|users_settings",
    "convert/test_convert_families.py": r"dry_run.*(30B|2\.1)",
    "convert/test_convert_memory.py": "peak_is",
    "engine/test_engine_edges.py": r"multiple.*(d2f_whole|canvas|block_c)|as_the_truth"
    r"|ends_a_text|outgrows.*canvas",
    "kernels/test_expert_ffn.py": r"8_bits.*grouped"
    r"|triton_is_chosen|gelus"
    r"|numpy.*shape[12]|goes_nowhere.*float32|never_holds.*(bf|fp8)|no_order",
    "kernels/test_expert_ffn_mosaic.py": r"every_row|no_expert|ragged|in_8_bits|published.*True"
    r"|alike|dense_half.*20|all_rows_take_goes",
    "kernels/test_fp8.py": "in_8_bits_are_exact|rows2"
    r"|is_exact\[rows1|numpy.shape1|gated_|each_other",
    "kernels/test_canvas_layer.py": r"one_launch_each|rows1|from_8_bits.*(True|gelu)|product_of_8",
    "kernels/test_grammar_path.py": r"bit|half|they_say\[1|many_rows",
    "kernels/test_layer_ops.py": "trunk|rounds_the_sum",
    "kernels/test_paged_attention.py": "published|window"
    r"|numpy\[triton, (one|split)|numpy\[triton.*-5-|(8|stand_for|vmap)\[triton, (one|sp)",
    "kernels/test_paged_attention_mosaic.py": r"tilings_match|lowers_for|race.None",
    "kernels/test_token_readout.py": "decoding_reads|no_logits"
    r"|ties.*mosaic|stands_for.triton|gigabyte",
    "kernels/test_token_readout_mosaic.py": r"tiles_in_turn|published|references.129",
    "loading/test_likelihood.py": r"sums_to_one"
    r"|over_all_orders"
    r"|without_a_cache\[(?!sdar|dream.d2f)"
    r"|dream|covers",
    "loading/test_quantization.py": "built_in|canvas_model|same_request",
    "models/test_canvas_model.py": "single_passes|few_bits|strong_net|a band a row|one more"
    r"|head's size"
    r"|whole_logits",
    "models/test_kv_cache.py": "same_request",
    "models/test_family_decode.py": "llada2_2",
    "models/test_family_logits.py": "bfloat16",
    "models/test_family_defaults.py": "token_by_token",
    "runner/test_warm_up.py": r"without_a_state|twice",
    "models/test_sharding.py": r"onto_devices.with experts"
    r"|llada2-4|dream-8|leaf_by_leaf"
    r"|last_bit_alone"
    r"|part_by_part",
    "project/test_packaging.py": "source_distribution|top_level_names|same_name|foreign_pack",
    "runner/test_engine_device.py": r"requests_alone.*\[ar\]"
    r"|ask_for_no_draws|alone.*d2f_whole"
    r"|chunkings.*(whole|block_cache)|order.*block_cache|again_finds.*d2f"
    r"|every_fetch.*shifted"
    r"|page.d2f_grid|alone.*full_seq"
    r"|chunkings.*speculate|nothing_compiles.*shifted"
    r"|every_status|near_tie|same_keys.(greedy|few)"
    r"|buckets_change|order.*\[(block_diff|full_seq)"
    r"|every_fetch.*\[d2f_grid|chunk_length.*full_seq"
    r"|order.*\[(ar|d2f_w)|left_alone.multi",
    "engine/test_inbox_interrupts.py": r"without_an_owner\[(5|8|21)",
    "loading/test_tokenizers.py": "goes_through_the_familys",
    "strategies/test_sampling_rules.py": r"fused_with.*shape[013]",
    "strategies/test_shards.py": "773-8-mixed|17-8-greedy|1000-2-greedy",
    "structured/test_draws.py": r"shares\[[345]",
    "runner/test_hosts.py": "two_processes",
    "runner/test_many_rows.py": "tokens_of_few",
    "runner/test_no_copies.py": r"dense_run.canvas|bfloat16.multi"
    r"|bfloat16\[speculate|choice_among_widths|place.speculate"
    r"|several_shapes|dense_run\[(?!canvas|block_c)"
    r"|engine_work.*block_cache"
    r"|dense_run.block_c",
    "runner/test_several_devices.py": r"users_mesh|vmap|canvases"
    r"|of_one\[(experts-4|plain-2)|trajectory|of_one_device\[(with_bias|experts|plain-8|in_8)"
    r"|soft_parallel|dmax|d2f_whole|letter|no_pool.in_8|device\[(edit|full_sequence)\]"
    r"|takes_tp",
    "serve/test_hostile.py": "bodies.*chat",
    "serve/test_client_traps.py": r"twin|causal_model",
    "serve/test_decisions.py": "in_process",
    "serve/test_http.py": r"death_of_the_engine"
    r"|states_while"
    r"|over_the_limit|an_error.101"
    r"|\[104|\[2-130|\[15-0|death_of_the_front|named_origins",
    "serve/test_server.py": r"generate\[(nucleus|n|stop ids|past|forwards|threshold|short)"
    r"|any bytes|infilling|line\[flags[023]",
    "strategies/test_canvas_engine.py": r"every_step_of"
    r"|infill|snapshot|temporaries",
    "strategies/test_full_sequence.py": "on_pages",
    "strategies/test_diffusion_gemma.py": "does_not_depend",
    "strategies/test_dflash.py": "lengths1|random_requests",
    "strategies/test_fast_dllm_v2.py": r"say.whole|8-4|decoder.4-2",
    "strategies/test_contract.py": r"cache_holds.*diffusion_gemma\]"
    r"|equals_the_dense_run\[ar\]"
    r"|right\[0-4"
    r"|cache_holds.*\[(?!multi_bd_shifted|d2f_w|ar\]|dflash"
    r"|diffusion_gemma\])"
    r"|dense_run\[(?!multi_bd_shifted|d2f_whole_full\]|ar\])"
    r"|stop_ids.*\[(?!multi_bd_shifted|d2f_whole_full\]|ar\])"
    r"|first_cells\[(8|3)|moving.*\[(?!multi_bd_sh|d2f_whole_full\]|dflash|canvas)"
    r"|(neighbours|writes_past).*\[(?!multi_bd_shifted|d2f_whole_full\]|ar\]|canvas)",
    "strategies/test_dflash_counts.py": r"counts_add|commit.ar",
    "strategies/test_dflash_widths.py": "stretches_of_one_width|from_step_to_step",
    "strategies/test_diffusion_gemma_golden.py": r"transformers\[(?!ragged-1)"
    r"|preempted",
    "strategies/test_stuck.py": "every_loop",
    "tasks/test_evaluate.py": r"held_out"
    r"|counts_are|sweep_is|swept_and_drawn|rows0|writing_fails|rows1",
    "tasks/test_race.py": "command_writes|doubts|95_of_100",
    "trace/test_page.py": "takes_fields|command_puts",
    "training/test_training_stop.py": r"real_process|one_family",
    "training/test_training_tokenizer.py": "again_gives",
    "training/test_training_canvas.py": "model_learns|interrupted|exported|causal_model|gradient"
    r"|muon|noised_canvas",
    "structured/test_conform.py": r"full_seq"
    r"|\[(block_diffusion|dmax|fast_dllm)|\[(edit|multi)|\[d2f",
    "structured/test_constrained_engine.py": r"automata\[|one_pass|keeps_its_text",
    "structured/test_constrained_llm.py": r"says_nothing"
    r"|every_strategy_holds_to_constraints\["
    r"|drafts|compiles_nothing|of_a_plan|of_one_prompt|batch|a_marker"
    r"|changes_nothing|a_seed",
    "structured/test_holes.py": "blocks_fill|they_need|across_given",
    "project/test_readme.py": "other_commands",
    "project/test_layering.py": "",  # `make check` does
    "project/test_docs.py": r"blocks_run\[docs/(serving|structured|quickstart)"
    r"|run\[docs/(trace|like)",
    "cli/test_builtin.py": "drafted_texts",
    "api/test_threads.py": "spawned_child",
    "project/test_examples.py": "command_line",
    "kernels/test_layer_mosaic.py": r"many_rows"
    r"|exact\[rows[023]|no_more.rows1|gates_of|every_tile|each_o",
    "kernels/test_kv_write.py": r"many_arrays|10-float32",
    "strategies/test_strategy_fuzz.py": r"bd.*\[(2-[124]|4-[134])|(sequ.*|static)-2|dynamic-(2|4-N)"
    r"|adds.*4",
    "strategies/test_d2f.py": r"list_decoder\[(True-[42]-[23]|False-4)|shifted_model.True",
    "mutants/test_mutants.py": r"unbroken",
    "bench/test_bench.py": r"as_its_books_say"
    r"|not_read_out|surest.*\[(8-24|5-30|3-17|1-40)",
    "api/test_snapshot.py": r"does_not_say_all",
    "runner/test_engine_faults.py": r"everything_with_error.(speculate|canvas)"
    r"|nan_in.*(dflash|block_c|full_seq)|no_token.block_c",
    "strategies/test_recording.py": r"has_the_tokens_of_generate"
    r"|does_not_know",
    "api/test_infill.py": r"example_fills",
    "strategies/test_dmax.py": r"decoder.4-3-paper"
    r"|never_adds.*diffulex",
    "strategies/test_credit_decoding.py": r"decoder.shape0|without_credits",
    "models/test_draft_traps.py": r"mask_of_the_drafter"
    r"|to_the_host",
    "strategies/test_author_errors.py": r"rules_take",
    "runner/test_timing.py": r"times_nothing",
    "cli/test_interrupt.py": r"status\[0\.[58]",
    "strategies/test_edit.py": r"decoder.4-3-0"
    r"|decoder.4-2-3",
    "api/test_llm.py": r"functional_form",
    "strategies/test_short_prompts.py": r"each_alone.ar",
    "loading/test_async_dispatch.py": r"a_verb",
    "cli/test_cli_errors.py": r"device_that_fails",
}

# What depends on the version of JAX: how kernels are lowered, what is compiled, copied and donated,
# random numbers, caches of programs, and one decoding of each kind. These tests alone run under
# CI's older Python too; "" is every test of a file but its long ones, which VERSIONS_LONG names.
VERSIONS = {
    "kernels/test_expert_ffn.py": "ffn_matches_numpy|gradient|under_vmap|fastest",
    "kernels/test_kv_write.py": "",
    "kernels/test_paged_attention.py": "matches_numpy|under_vmap|8_bits",
    "kernels/test_token_readout.py": "matches_numpy|lowers|alone$|8_bits",
    "loading/test_jax_settings.py": "",
    "loading/test_load.py": "random|drawn_in|traces?_|loads_whole|no_program",
    "models/test_logits_golden.py": "agree",
    "runner/test_engine_device.py": "as_the_truth|bit_for_bit|compiles",
    "runner/test_no_copies.py": "",
    "runner/test_several_devices.py": "",
    "strategies/test_by_class.py": "",
    "strategies/test_contract.py": "dense_run|scripted|one_shot|store_writes|narrow",
    "strategies/test_shards.py": "",
}
VERSIONS_LONG = {
    "runner/test_no_copies.py": "engine_work",
    "runner/test_several_devices.py": "reductions",
    "strategies/test_shards.py": "",
}
# Of the gate's cases, those that differ between versions.
VERSION_CASES = {"multi_bd_shifted", "canvas", "dflash"}

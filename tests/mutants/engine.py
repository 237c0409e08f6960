"""Wrong versions of the host loop, one rule broken in each.

`killer` is a test that takes `host`, or "machine": the seeded runs of test_engine_machine.py.

Left out as equivalent:
* `_enter` without `epoch += 1`: `_vacate` counted the end of the stay before.
* `_run_pass` marking the last piece of a sequence that is restored: `restore` sets `finish`.
* `_report` without its second look into `_requests`: each request is in `_moved` once.
* `_num_deadlines` never counted down: the engine then looks for deadlines in vain.
* `_recover` without `_rounds.clear()`: no sequence is active then, and the next step clears them.
* `limits` without its first refusal: the rule after it refuses the same, in other words.
* `_fits` without `max(sequence.start, ...)`: what is written never ends before `start`.
"""

from tests.mutation import broken

PAGES = [
    *broken(
        "test_pages.test_a_shared_page_is_held_until_its_last_owner_goes",
        "pages.py",
        page_freed_with_an_owner_left=(
            "            if self._owners[page] == 0:\n                if page",
            "            if self._owners[page] <= 1:\n                if page",
        ),
        released_page_is_lost=("self._free.append(page)", "pass"),
    ),
    *broken(
        "test_pages.test_unknown_pages_go_before_known_ones_and_those_in_order_of_release",
        "pages.py",
        beginning_of_a_text_goes_first=("for page in reversed(pages):", "for page in pages:"),
        last_released_goes_first=("popitem(last=False)", "popitem(last=True)"),
        known_pages_go_before_free_ones=(
            "            if self._free:",
            "            if not self._idle:",
        ),
    ),
    *broken(
        "test_pages.test_an_evicted_page_is_forgotten",
        "pages.py",
        evicted_page_is_still_known=("                self._forget(page)\n", ""),
        payload_outlives_its_page=("self._payload.pop(page, None)", "pass"),
    ),
    *broken(
        "test_pages.test_a_known_page_is_found_when_nobody_holds_it",
        "pages.py",
        shared_page_stays_idle=("del self._idle[page]", "pass"),
        find_goes_on_after_a_miss=(
            "                break\n            self.hits",
            "                continue\n            self.hits",
        ),
    ),
    *broken(
        "test_pages.test_the_first_page_under_a_key_stays_and_a_page_keeps_its_key",
        "pages.py",
        later_page_takes_the_key=(
            "if key not in self._page_of and page not in self._key_of:",
            "if page not in self._key_of:",
        ),
        page_has_two_keys=(
            "if key not in self._page_of and page not in self._key_of:",
            "if key not in self._page_of:",
        ),
    ),
    *broken(
        "test_pages.test_pages_are_taken_once_and_come_back",
        "pages.py",
        last_page_is_never_given=(
            "if count > self.num_available:",
            "if count >= self.num_available:",
        ),
    ),
    *broken(
        "test_pages.test_too_many_pages_take_nothing",
        "pages.py",
        too_many_pages_take_some=("if count > self.num_available:", "if not self.num_available:"),
    ),
    *broken(
        "test_pages.test_equal_pages_at_different_places_have_different_keys",
        "pages.py",
        hash_without_its_predecessor=(
            "            running.update(data[end - width : end])\n",
            "            running = blake2b(data[end - width : end], digest_size=_DIGEST_BYTES)\n",
        ),
    ),
    *broken(
        "test_pages.test_keys_depend_on_the_salt",
        "pages.py",
        salt_dropped_from_pages=("(len(salt), salt)", '(len(salt), b"")'),
    ),
    *broken(
        "test_scheduler.test_prefixes_are_found_under_their_own_salt_alone",
        "pages.py",
        salt_dropped_from_prompts=("self._salt(sequence) + array(", "array("),
    ),
    *broken(
        "test_pages.test_a_part_of_a_unit_has_no_key",
        "pages.py",
        part_of_a_unit_has_a_key=("len(data) + 1, width", "len(data) + width, width"),
    ),
    *broken(
        "test_pages.test_the_pages_of_a_unit_have_keys_of_their_own",
        "pages.py",
        pages_of_a_unit_have_one_key=("keys = [(key, part) for", "keys = [(key, 0) for"),
    ),
]

QUEUE = [
    *broken(
        "test_scheduler.test_a_text_ends_at_its_tokens_the_model_or_the_pool",
        "active.py",
        limit_ignores_the_pool=("layout.max_model_len, room)", "layout.max_model_len)"),
        last_block_is_not_reserved=(
            "beyond = layout.block_size + total",
            "beyond = total",
        ),
    ),
    *broken(
        "test_scheduler.test_a_window_holds_prompt_text_and_suffix",
        "active.py",
        more_is_written_than_the_table_holds=(
            "min(limit + beyond, layout.page_buckets[-1] * layout.page_size)",
            "limit + beyond",
        ),
    ),
    *broken(
        "machine",
        "active.py",
        prompt_without_room_is_taken=("if limit <= prompt_len:", "if limit < prompt_len:"),
    ),
    *broken(
        "machine",
        "scheduler.py",
        last_come_first_served=(
            "((priority, sequence.turn, arrival), sequence)",
            "((priority, -sequence.turn, -arrival), sequence)",
        ),
        live_ones_not_in_order=(
            'bisect.insort(self.live, sequence, key=operator.attrgetter("rank"))',
            "self.live.append(sequence)",
        ),
    ),
    *broken(
        "test_scheduler.test_a3_clients_of_one_priority_take_turns",
        "scheduler.py",
        clients_take_no_turns=("sequence.turn = max(", "sequence.turn = 0 * max("),
        turns_of_the_past_count=("self._rounds.get(priority, 0), self._turns", "0, self._turns"),
    ),
    *broken(
        "test_scheduler.test_no_request_passes_one_that_does_not_fit",
        "scheduler.py",
        short_ones_pass=(
            "                passed.append(entry)\n                break\n",
            "                passed.append(entry)\n",
        ),
    ),
    *broken(
        "test_scheduler.test_a_sequence_that_is_not_ready_waits_and_others_pass_it",
        "scheduler.py",
        what_is_not_ready_is_placed=(" or not is_ready(sequence):", ":"),
        nobody_passes_what_is_not_ready=(
            " or not is_ready(sequence):\n                passed.append(entry)\n",
            " or not is_ready(sequence):\n                passed.append(entry)\n"
            "                break\n",
        ),
    ),
    *broken(
        "test_scheduler.test_sequences_of_a_request_wait_for_the_prompt_of_the_first",
        "scheduler.py",
        sequences_do_not_wait_for_the_prompt=("if self._waits_for_leader(sequence) or", "if"),
        waits_for_the_end_of_the_first=(
            "leader.stage != DONE and not leader.prompt_published",
            "leader.stage != DONE",
        ),
    ),
    *broken(
        "test_scheduler.test_without_the_cache_sequences_share_with_their_own_request_only",
        "pages.py",
        strangers_share_without_the_cache=("leader.rank[1])", "0)"),
    ),
    *broken(
        "test_scheduler.test_a_sequence_whose_first_one_failed_computes_the_prompt_itself",
        "scheduler.py",
        waits_for_one_that_failed=(
            "leader.stage != DONE and not leader.prompt_published",
            "not leader.prompt_published",
        ),
    ),
    *broken(
        "test_scheduler.test_each_neighbour_keeps_a_page_to_grow_into",
        "scheduler.py",
        neighbours_keep_no_page=("wanted + idle + len(self.live) <=", "wanted + idle <="),
        neighbours_keep_one_page_too_many=(
            "wanted + idle + len(self.live) <= pool",
            "wanted + idle + len(self.live) < pool",
        ),
        first_steps_are_not_reserved=("max(sequence.start, first_steps)", "sequence.start"),
    ),
    *broken(
        "machine",
        "scheduler.py",
        idle_hits_counted_as_free=("return wanted + idle + len", "return wanted + len"),
        copied_page_is_used_itself=(
            "shared = hits[:-1] if copied else hits",
            "shared = hits[:-1] + hits[-1:] if copied else hits",
        ),
        copied_page_is_kept=("            pool.release(hits[-1:])\n", ""),
        old_row_of_the_table_shows=("        row[:] = -1\n", ""),
    ),
    *broken(
        "test_scheduler.test_a_full_pool_admits_a_known_prompt_that_ends_within_a_page",
        "scheduler.py",
        copy_that_does_not_fit_waits_for_ever=(
            "if not (copied and self._fits(sequence, [], False)):",
            "if True:",
        ),
    ),
]

PREFIXES = [
    *broken(
        "test_scheduler.test_a_prompt_that_sees_itself_whole_is_shared_as_a_whole_only",
        "scheduler.py",
        boundary_of_a_known_prompt_forgotten=("= pool.payload(hits[-1])", "= None"),
    ),
    *broken(
        "test_scheduler.test_a_hit_leaves_something_to_compute_where_the_strategy_needs_it",
        "pages.py",
        hit_leaves_nothing_to_compute=("else start - layout.compute_at_least", "else start"),
    ),
    *broken(
        "test_scheduler.test_pages_and_blocks_that_do_not_divide_each_other_are_shared_together",
        "pages.py",
        part_of_a_unit_is_a_hit=(
            "return hits[: len(hits) // self._unit_pages * self._unit_pages]",
            "return hits",
        ),
    ),
    *broken(
        "test_scheduler.test_pages_and_blocks_that_do_not_divide_each_other_are_shared_together",
        "layout.py",
        unit_is_a_page=(
            "size = math.lcm(self.page_size, self.block_size if self.is_grid else 1)",
            "size = self.page_size",
        ),
    ),
    *broken(
        "machine",
        "pages.py",
        part_of_a_whole_prompt_is_a_hit=(
            "return hits if len(hits) == len(keys) else []",
            "return hits",
        ),
        whole_prompt_keyed_by_what_is_stored=(
            'array("I", sequence.prompt)',
            'array("I", sequence.prompt[: sequence.prefix_len])',
        ),
        text_is_published_before_it_is_stored=(
            "if is_prompt else sequence.start)",
            "if is_prompt else len(sequence.prompt) + len(sequence.tokens))",
        ),
    ),
    *broken(
        "machine",
        "sequence.py",
        recomputed_text_is_one_off=(
            "self.tokens[max(first - split, 0) : max(end - split, 0)]",
            "self.tokens[max(first - split - 1, 0) : max(end - split, 0)]",
        ),
    ),
    *broken(
        "test_scheduler.test_a_stop_id_in_the_cache_is_not_taken_for_text",
        "pages.py",
        unsaid_text_is_published=(
            "chain.extend(sequence.text_ids(chain.length, end))",
            "chain.extend([*sequence.text_ids(chain.length, end), *[0] * 9])",
        ),
    ),
    *broken(
        "test_scheduler.test_text_of_soft_commits_is_not_shared_but_the_prompt_is",
        "pages.py",
        text_of_soft_commits_is_shared=("= layout.soft_commits or", "="),
    ),
    *broken(
        "test_scheduler.test_a_second_turn_finds_the_first_ones_text",
        "scheduler.py",
        text_is_never_published=(
            "        if sequence.is_sound:\n            self.prefixes.publish(sequence)\n",
            "",
        ),
    ),
    *broken(
        "test_scheduler.test_nothing_is_known_before_a_fetch_says_it_is_sound",
        "scheduler.py",
        pages_published_unseen=("        if sequence.is_sound:\n", "        if True:\n"),
    ),
    *broken(
        "machine",
        "texts.py",
        broken_prompt_is_published=("if finish != ERROR_CODE and not", "if not"),
    ),
    *broken(
        "machine",
        "engine.py",
        published_before_it_is_written=(
            "        self.runner.admit(sequence.slot, sequence.placement)\n",
            "        self.runner.admit(sequence.slot, sequence.placement)\n"
            "        self.scheduler.prefixes.publish(sequence)\n",
        ),
        copy_is_not_dispatched=("self.runner.copy_page(source, target)", "pass"),
        boundary_is_not_handed_on=(
            "self.runner.begin(sequence.slot, sequence.boundary)",
            "self.runner.begin(sequence.slot)",
        ),
        prompt_is_cut_at_what_is_stored=(
            "sequence.text_ids(piece.first, piece.live_end),",
            "sequence.text_ids(piece.first, piece.end),",
        ),
    ),
]

GROWTH = [
    *broken(
        "test_scheduler.test_growth_covers_the_steps_in_flight_and_the_next",
        "scheduler.py",
        growth_for_the_next_steps_only=(
            "min((in_flight + steps) * layout.window",
            "min(steps * layout.window",
        ),
        growth_for_the_steps_in_flight_only=(
            "min((in_flight + steps) * layout.window",
            "min(in_flight * layout.window",
        ),
    ),
    *broken(
        "test_scheduler.test_growth_is_bounded_by_what_chunks_may_emit",
        "scheduler.py",
        growth_for_one_chunk=("chunks = 2 if in_flight else 1", "chunks = 1"),
        growth_for_every_step=(
            "return min((in_flight + steps) * layout.window, emitted)",
            "return (in_flight + steps) * layout.window",
        ),
        committed_text_is_not_ahead=("+ 2 * layout.window\n", "+ layout.window\n"),
    ),
    *broken(
        "machine",
        "scheduler.py",
        growth_that_just_fits_is_skipped=(
            "if end > len(sequence.pages) * page_size:",
            "if end > (len(sequence.pages) + 1) * page_size:",
        ),
        text_past_its_capacity=(
            "if end > sequence.capacity:",
            "if False:",
        ),
        page_bucket_too_small=(
            "len(one.pages))] for",
            "len(one.pages) - 1)] for",
        ),
        pages_not_in_the_table=(
            "held + count] = sequence.pages[held:]",
            "held + count] = -1",
        ),
    ),
    *broken(
        "test_scheduler.test_fewer_steps_come_before_a_preemption",
        "scheduler.py",
        steps_are_not_reduced=(
            "if wanted and steps > 1 and",
            "if False and",
        ),
    ),
    *broken(
        "test_scheduler.test_only_the_worst_ranked_request_is_preempted",
        "scheduler.py",
        best_ranked_gives_way=("self.preempt(self.live[-1])", "self.preempt(self.live[0])"),
        the_short_one_gives_way=("self.preempt(self.live[-1])", "self.preempt(sequence)"),
        preempted_one_keeps_its_pages=(
            "sequence.pages)\n        sequence.pages = []\n",
            "[])\n",
        ),
    ),
    *broken(
        "test_scheduler.test_a_request_that_cannot_be_resumed_starts_over",
        "scheduler.py",
        hidden_state_is_taken_up=("if self.layout.starts_over or", "if"),
        lost_fetch_is_taken_up=("sequence.saved[0].hold()", "True"),
        start_is_not_reset=("= None, sequence.prefix_len", "= None, sequence.start"),
    ),
    *broken(
        "test_scheduler.test_a_preempted_request_resumes_from_its_last_fetch",
        "scheduler.py",
        fetch_is_thrown_away=("if self.layout.starts_over or", "if True or"),
    ),
    *broken(
        "machine",
        "scheduler.py",
        released_pages_are_not_returned=("        self.pool.release(sequence.pages)\n", ""),
        stay_does_not_end=(
            "sequence.slot, sequence.in_flight = -1, 0\n        sequence.epoch += 1\n",
            "sequence.slot, sequence.in_flight = -1, 0\n",
        ),
        slot_is_not_returned=("        self._free_slots.append(sequence.slot)\n", ""),
        lost_pages_are_still_known=(
            "            self.preempt(sequence)\n        self.pool.reset()\n",
            "            self.preempt(sequence)\n",
        ),
        rows_are_not_distinct=("if slot not in taken]", "if True]"),
    ),
]

ROUNDS = [
    *broken(
        "test_scheduler.test_a_budget_is_spent_best_first_and_always_gets_on",
        "rounds.py",
        prefix_may_wait_for_ever=("if fits or (forced and indivisible):", "if fits:"),
        tokens_are_not_spent=("                self._tokens -= piece.size\n", ""),
    ),
    *broken(
        "test_scheduler.test_a_budget_beside_decoding_is_what_its_steps_take",
        "rounds.py",
        seconds_are_not_spent=("self._seconds -= price", "pass"),
        price_is_forgotten=("price <= self._seconds", "True"),
    ),
    *broken(
        "test_scheduler.test_each_waiting_prompt_has_a_budget_where_nobody_watches_or_few_decode",
        "rounds.py",
        prompts_share_one_budget=("len(scheduler.live) - len(decoding)", "1"),
        watchers_wait_for_every_prompt=(
            "if any(request.stream or request.denoise for request in requests):",
            "if False:",
        ),
        tokens_a_round_are_not_bounded=(
            "if layout.max_num_batched_tokens is not None:",
            "if False:",
        ),
    ),
    *broken(
        "test_scheduler.test_chunks_last_a_while_and_less_where_somebody_waits",
        "rounds.py",
        denoising_in_long_chunks=("if denoised or not step_s:", "if not step_s:"),
        nobody_is_waited_for=("if scheduler.has_waiting or has_prefix:", "if has_prefix:"),
        nobody_is_expected=("watched or (is_open and scheduler.has_room)", "watched"),
        expected_without_a_slot=("(is_open and scheduler.has_room)", "is_open"),
    ),
    *broken(
        "test_scheduler.test_texts_that_must_end_in_flight_are_not_dispatched_again",
        "rounds.py",
        steps_left_forget_those_made=("placement.max_nfe - sequence.nfe", "placement.max_nfe"),
        a_stop_id_ends_all=(
            "sequence.placement.stop_ids\n        or sequence.placement.max_run < NO_LIMIT\n"
            "        or _steps_left",
            "_steps_left",
        ),
        the_first_text_ends_all=("len(chunk.sequences) == 1 or not", "True or not"),
    ),
    *broken(
        "test_engine_machine.test_nothing_is_dispatched_behind_a_chunk_that_ends_all",
        "engine.py",
        dispatched_behind_the_end=("or all_end(self.layout, in_flight, decoding):", "or False:"),
    ),
    *broken(
        "test_scheduler.test_rows_are_grouped_by_the_width_of_their_page_tables",
        "rounds.py",
        merged_rows_in_the_narrow_table=(
            "merged[-1] = (before + rows, columns)",
            "merged[-1] = (before + rows, narrow)",
        ),
        merged_whatever_it_costs=("        if together <= step_s", "        if together > step_s"),
    ),
    *broken(
        "test_engine_machine.test_one_chunk_runs_while_another_is_read",
        "engine.py",
        chunk_is_read_at_once=("len(self._rounds) > 1 or", "self._rounds or"),
    ),
    *broken(
        "test_engine_machine.test_idle_time_belongs_to_no_step",
        "engine.py",
        idle_time_is_a_steps_time=("if not self.scheduler.live:", "if False:"),
    ),
    *broken(
        "machine",
        "engine.py",
        steps_in_flight_not_counted=("sequence.in_flight += count", "pass"),
        restored_with_fewer_tokens=(
            "sequence.placement, saved, sequence.tokens)",
            "sequence.placement, saved, [])",
        ),
        begins_without_what_was_saved=(
            "        if sequence.saved is not None:\n            fetch, row = sequence.saved\n"
            "            saved = ",
            "        if False:\n            fetch, row = sequence.saved\n            saved = ",
        ),
        first_failure_is_the_last=("[s for s in lost if s.nfe <= s.failed_at]", "lost"),
        lost_state_is_gone_on_with=("        self.scheduler.lose_everything()\n", ""),
    ),
    *broken(
        "machine",
        "texts.py",
        epoch_is_not_checked=("if sequence.epoch != epoch:", "if False:"),
        steps_read_are_still_in_flight=("            sequence.in_flight -= chunk.steps\n", ""),
        stream_takes_tokens_back=("sequence.tokens[before:length] =", "sequence.tokens[before:] ="),
        start_is_not_read=("                sequence.start = start\n", ""),
        stop_string_is_kept=("        del sequence.tokens[sequence.stream.stopped :]\n", ""),
        ends_twice=("        if sequence.stage == DONE:\n            return\n", ""),
        deadline_never_comes=("now >= active.deadline_s", "now >= active.deadline_s + 1e9"),
        deadline_comes_at_once=("now >= active.deadline_s", "now >= active.added_s"),
        half_a_request_is_reported_as_ended=(
            "done = all(sequence.stage == DONE for",
            "done = any(sequence.stage == DONE for",
        ),
    ),
    *broken(
        "test_engine_machine.test_a_device_that_keeps_failing_ends_its_requests",
        "engine.py",
        never_gives_up=("[s for s in lost if s.nfe <= s.failed_at]", "[]"),
        failures_are_not_remembered=("sequence.failed_at = sequence.nfe", "pass"),
    ),
]

ADMISSION = [
    *broken(
        "machine",
        "active.py",
        sequences_share_a_key=("number + index if params.seed is None else index", "index"),
        own_stop_ids_are_kept=(
            "() if params.ignore_eos else layout.stop_token_ids)\n    if params.stop",
            "layout.stop_token_ids)\n    if params.stop",
        ),
        deadline_on_the_clock=("else now + request.deadline_s", "else request.deadline_s"),
        tail_is_cut=("prompt[first : first + layout.window]", "prompt[first : first + 1]"),
        overrides_are_forgotten=(
            "{**layout.knob_values, **params.strategy_overrides}",
            "{**layout.knob_values}",
        ),
    ),
    *broken(
        "machine",
        "rules.py",
        hole_of_the_suffix_is_not_text=(
            "enumerate(suffix, 1) if token == HOLE",
            "enumerate(suffix[:0], 1) if token == HOLE",
        ),
        stop_string_among_what_is_given=("params.stop and any(", "False and any("),
    ),
    *broken(
        "machine",
        "layout.py",
        given_ids_count_as_written=("length - len(given) + given.count(HOLE)", "length"),
    ),
    *broken(
        "test_scheduler.test_a_text_with_a_suffix_is_not_cut_short",
        "active.py",
        text_with_a_suffix_is_cut=(
            "if suffix and (limit < prompt_len + text_len or",
            "if suffix and (",
        ),
        suffix_may_lie_past_the_model=("or total > layout.max_model_len)", ")"),
    ),
    *broken(
        "test_scheduler.test_priority_then_arrival_decide",
        "active.py",
        high_priority_is_a_high_number=("rank=(request.priority,", "rank=(-request.priority,"),
    ),
    *broken(
        "test_scheduler.test_bounds_belong_to_their_ranges",
        "rules.py",
        bounds_are_outside=("if not low <= value <= high:", "if not low < value < high:"),
        one_stop_id_too_few=("len(stop_ids) > STOP_WIDTH", "len(stop_ids) >= STOP_WIDTH"),
    ),
    *broken(
        "test_scheduler.test_ids_of_the_vocabulary_are_taken",
        "rules.py",
        first_id_is_refused=("if not 0 <= token <", "if not 0 < token <"),
    ),
    *broken(
        "test_scheduler.test_ids_outside_the_vocabulary_are_refused",
        "rules.py",
        id_past_the_last_is_taken=("if not 0 <= token <", "if not 0 <= token <="),
        largest_id_is_not_looked_at=(
            "(min(ids, default=0), max(ids, default=0))",
            "(min(ids, default=0),)",
        ),
        smallest_id_is_not_looked_at=(
            "(min(ids, default=0), max(ids, default=0))",
            "(max(ids, default=0),)",
        ),
    ),
]

MUTANTS = PAGES + QUEUE + PREFIXES + GROWTH + ROUNDS + ADMISSION

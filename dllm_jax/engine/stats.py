"""Counts of an engine."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts since the engine was made; the first five are current values.

    Programs are those compiled so far (`num_compiled`) and those still to come; a late compilation
    is one for which a request had to wait.
    Draft counts are of texts that ended, as in `requests.DraftMetrics`.
    """

    num_running: int
    num_waiting: int
    num_pages: int
    num_pages_held: int
    num_chunks_in_flight: int
    num_requests: int
    num_finished: int
    num_steps: int
    num_preemptions: int
    num_failures: int
    num_faults: int
    num_late_compiles: int
    num_programs: int
    num_compiled: int
    prompt_tokens: int
    generated_tokens: int
    nfe: int
    prefix_queries: int
    prefix_hits: int
    prefix_evictions: int
    draft_rounds: int
    draft_tokens_proposed: int
    draft_tokens_accepted: int

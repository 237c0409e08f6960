"""Counts of an engine."""

import dataclasses


@dataclasses.dataclass
class Stats:
    """Counts since the engine was made; the first five are current values.

    Programs are those compiled so far (`num_compiled`) and those still to come; a late compilation
    is one for which a request had to wait.
    Draft counts are of texts that ended, as in `requests.DraftMetrics`.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_pages_held: int = 0
    num_chunks_in_flight: int = 0
    num_requests: int = 0
    num_finished: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_failures: int = 0
    num_faults: int = 0
    num_late_compiles: int = 0
    num_programs: int = 0
    num_compiled: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    nfe: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_evictions: int = 0
    draft_rounds: int = 0
    draft_tokens_proposed: int = 0
    draft_tokens_accepted: int = 0

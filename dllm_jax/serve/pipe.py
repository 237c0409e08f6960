"""Messages between the two processes as values; `framing` turns them into bytes and back.

Nothing here knows HTTP or the engine.
"""

from collections.abc import Sequence
from typing import Any

import msgspec


class Message(msgspec.Struct, array_like=True, tag=True):
    """Anything that is sent."""


# --- to the engine ------------------------------------------------------------------------------


class Launch(Message):
    """The first message: which engine to make.

    Attributes:
        factory: `module:function` that makes it from `settings`.
        grace_s: Seconds that the process gets to end on its own; it has to tell others.
    """

    factory: str
    settings: dict[str, Any]
    grace_s: float = 0.0


class Prompt(msgspec.Struct, array_like=True):
    """One prompt of an `Add`; `suffix` is None where nothing is to be filled in."""

    ids: list[int]
    suffix: list[int] | None = None


class Add(Message):
    """Prompts that are accepted together or not at all; `params` are fields of `SamplingParams`.

    Attributes:
        client: Identity of the client, for fair scheduling among clients.
        ids: Also send the ids of each piece.
        cache_salt: As of `engine.requests.Request`.
    """

    id: int
    prompts: list[Prompt]
    params: dict[str, Any]
    stream: bool = False
    denoise: bool = False
    deadline_s: float | None = None
    priority: int = 0
    client: str = ""
    ids: bool = False
    cache_salt: str = ""


class Ask(Message):
    """Texts to read in one forward; `reads` are fields of `api.questions.Read`, in their order."""

    id: int
    reads: list[tuple[list[int], int, list[int], list[list[int]]]]
    client: str = ""


class Command(Message):
    """A command of an administrator, by its name in `Served.commands`."""

    id: int
    name: str
    fields: dict[str, Any]


class Abort(Message):
    """End a request; nothing more is said of it."""

    id: int


# --- from the engine ----------------------------------------------------------------------------


class Progress(Message):
    """Programs compiled while the engine starts."""

    done: int
    of: int


class Phase(Message):
    """A part of the start that has ended.

    Attributes:
        fields: What the log says of it.
    """

    name: str
    seconds: float
    fields: dict[str, Any]


class Facts(msgspec.Struct):
    """Facts on model and engine for the front.

    Attributes:
        chat_template: In the place of the tokenizer's; None: its own.
        tokenizer_folder: Where the tokenizer's files are; None for a model without one.
        thresholds: Knobs of the strategy: value, and lowest, highest, whole, up to which other.
        infill: `suffix` can be filled in.
        causal: Decoded token by token: no forward is a denoising step.
        sampling: Of requests that name none.
        tool_format: How tools stand in texts, for a template without tools.
        attention, shift, answer_end, routing_block: How questions are laid out
            (`api.questions.Reading`).
    """

    source: str
    family: str
    strategy: str
    block_size: int
    window: int
    thresholds: dict[str, tuple[float, tuple[float, float, bool, str | None]]]
    max_model_len: int
    vocab_size: int
    mask_token_id: int
    num_slots: int
    dtype: str
    jax: str
    tokenizer_folder: str | None = None
    chat_template: str | None = None
    infill: bool = False
    causal: bool = False
    drafts: bool = False
    sampling: dict[str, float] = {}
    attention: str = "block_causal"
    shift: bool = False
    answer_end: int | None = None
    routing_block: int = 1
    tool_format: str | None = None


class Ready(Message):
    """The engine takes requests."""

    facts: Facts


class Accepted(Message):
    """Every prompt of a streamed `Add` is queued: its answer may begin."""

    id: int


class Refused(Message):
    """The engine ends a request, or does not begin it, and is as before; nothing more is said.

    Attributes:
        status: As HTTP has it. With 500 the message is for the log alone.
    """

    id: int
    message: str
    param: str | None = None
    code: str = "invalid_value"
    status: int = 400


class Told(Message):
    """Log-probabilities of each text, row and label of an `Ask`, and the forwards it took."""

    id: int
    log_probabilities: list[list[list[float]]]
    nfe: int


class Carried(Message):
    """The result of a `Command`."""

    id: int
    fields: dict[str, Any]


class Usage(msgspec.Struct, array_like=True):
    """Counts of one prompt, sent with its last delta.

    Attributes:
        notes: On its constraint.
    """

    prompt_tokens: int
    cached_tokens: int
    nfe: int
    prefill_nfe: int
    num_preemptions: int
    written: int
    queue_s: float | None
    ttfb_s: float | None
    e2e_s: float
    notes: list[str] = []


def total(usages: Sequence[Usage]) -> Usage:
    """Of all prompts of a request: sums of counts, the longest times."""
    if len(usages) == 1:
        return usages[0]
    names = Usage.__struct_fields__[:-1]
    columns = [[getattr(usage, name) or 0 for usage in usages] for name in names]
    return Usage(
        **{
            name: max(column) if name.endswith("_s") else sum(column)
            for name, column in zip(names, columns, strict=True)
        },
        notes=usages[0].notes,
    )


class Frame(msgspec.Struct, array_like=True):
    """The provisional window after `at` settled tokens; None for a hole.

    Attributes:
        probs: Probabilities of the cells, where they were asked for.
    """

    at: int
    nfe: int
    cells: list[str | None]
    probs: list[float | None] = []


class Delta(msgspec.Struct, array_like=True):
    """New output of one text; waiting deltas of one text are merged.

    Attributes:
        choice: `prompt * n + sample`.
        num_tokens: Settled tokens in all.
        usage: On the last delta of a prompt.
        ids: The tokens that are new, where they were asked for.
        logprobs: Of the tokens that are new, where they were asked for, in the form of
            `/v1/chat/completions`; None for a token that is no text.
        forced: At the end of a text whose window was shown: the places of its tokens for which a
            call's grammar left no choice.
    """

    id: int
    choice: int
    text: str
    num_tokens: int
    finish: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    frame: Frame | None = None
    usage: Usage | None = None
    ids: list[int] = []
    logprobs: list[dict[str, Any] | None] = []
    forced: list[int] = []

    def merge(self, later: "Delta") -> None:
        """Become what a reader of both would know."""
        self.text += later.text
        self.ids = self.ids + later.ids
        self.logprobs = self.logprobs + later.logprobs
        self.num_tokens = later.num_tokens
        self.finish = later.finish or self.finish
        self.stop_reason = self.stop_reason if later.stop_reason is None else later.stop_reason
        self.error = later.error or self.error
        self.frame = later.frame or self.frame
        self.usage = later.usage or self.usage
        self.forced = later.forced or self.forced


class Counts(msgspec.Struct):
    """Counts of the engine: the first four of this moment, the others since it was made.

    Attributes:
        steps: Decode steps and the seconds they took, since the last counts.
        compiled: Client, seconds and states of each constraint since the last counts; no states:
            it was refused.
        weight_version: Of the weights that are served, 0 at the start.
        devices: Bytes in use and the limit of each device that counts them.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_pages_held: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    nfe: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_preemptions: int = 0
    num_failures: int = 0
    num_faults: int = 0
    num_late_compiles: int = 0
    draft_rounds: int = 0
    draft_tokens_proposed: int = 0
    draft_tokens_accepted: int = 0
    steps: list[tuple[int, float]] = []
    devices: list[tuple[int, int]] = []
    weight_version: int = 0
    grammar_queries: int = 0
    grammar_hits: int = 0
    grammar_stages: int = 0
    compiled: list[tuple[str, float, int]] = []


class Moved(Message):
    """Deltas, and the engine's counts."""

    deltas: list[Delta]
    counts: Counts


class Failed(Message):
    """The engine cannot go on, or could not be made.

    Attributes:
        usage: The command line asks for what does not exist.
    """

    message: str
    usage: bool = False


ToEngine = Launch | Add | Ask | Abort | Command
FromEngine = Progress | Phase | Ready | Accepted | Refused | Told | Carried | Moved | Failed

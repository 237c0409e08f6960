"""From a request's constraint to the automaton that its text keeps to, compiled once.

Data flow: `SamplingParams.constraint` -> refused here by name, or a token automaton closed with the
request's stop ids -> the arrays of the device (`runner.grammars`) -> `Request.grammar`. A server
compiles in a process of its own (`structured.worker`).
"""

import contextlib
import dataclasses
import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from dllm_jax import structured
from dllm_jax.engine import checks
from dllm_jax.engine.checks import Refused
from dllm_jax.engine.requests import Request, SamplingParams
from dllm_jax.loading.model import Model
from dllm_jax.runner import grammars
from dllm_jax.structured.limits import UNREACHABLE, too_large
from dllm_jax.structured.worker import Worker

MOST_KEPT = 128  # automata; one of a large schema has a few megabytes
MOST_REFUSALS = 64  # kept apart: refusals drop no automaton


@dataclasses.dataclass(frozen=True)
class ConstraintReport:
    """The cost of a constraint.

    Attributes:
        states, classes: Sizes of its automaton; every state treats the tokens of a class alike.
        device_bytes: Size of its arrays, for each slot.
        fewest_tokens: Tokens of the shortest text; `max_tokens` must not be below it.
        compile_s: Seconds that its compilation took.
        notes: Keywords and formats of a schema that no draft knows, by their paths: nothing is held
            to them.
    """

    states: int
    classes: int
    device_bytes: int
    fewest_tokens: int
    compile_s: float
    notes: tuple[str, ...] = ()


class Constraints:
    """The compiled automata of an engine; the least recently used are dropped.

    Args:
        strategy: As `bind_strategy` returns it for this model.

    Attributes:
        max_model_len: Of the engine.
    """

    def __init__(self, model: Model, strategy: Any, max_model_len: int = UNREACHABLE):
        self._model, self._strategy = model, strategy
        self.max_model_len = max_model_len
        self._is_apart = False
        self._kept: OrderedDict[Any, tuple[grammars.Ready, ConstraintReport]] = OrderedDict()
        self._refusals: OrderedDict[Any, str] = OrderedDict()
        self._lock = threading.Lock()

    def compile_apart(self) -> None:
        """Compile in a process of its own from now on, one at a time.

        It has the vocabulary when this returns: reading it takes half a second for 150,000 tokens,
        of which the loop that serves other requests would wait for a part.
        """
        self._is_apart = True
        with contextlib.suppress(ValueError, OSError):  # the request that needs it is refused
            self._worker.start()

    def __call__(self, request: Request) -> Request:
        """The request with its automaton.

        Raises:
            Refused: The constraint cannot be compiled, or this model or strategy takes none.
        """
        params, grammar = request.params, self.whole(request)
        if grammar is None:
            return request
        if params.constraint_confidence == "plan":
            given = grammar.arrays | {"by_mass": np.asarray(True)}
            grammar = dataclasses.replace(grammar, arrays=given)
        if (part := self.first_part(request)) is not None:
            assert grammar.leave is not None
            far = np.where(grammar.distance < UNREACHABLE, grammar.leave, UNREACHABLE)
            given = grammar.arrays | {"distance": far}
            grammar = dataclasses.replace(grammar, distance=far, arrays=given)
            params = dataclasses.replace(params, max_tokens=part)
        return dataclasses.replace(request, grammar=grammar, params=params)

    def first_part(self, request: Request) -> int | None:
        """Tokens of a text's first part, at the end of which its thoughts have ended.

        Within it a state is as far from the end as from the end of the thoughts. What follows
        (`calls.next_stage`) has room for the longest way to the end. None: the text is one part.
        """
        tools = request.params.constraint
        if not isinstance(tools, structured.Tools) or tools.budget is None or tools.at is not None:
            return None
        grammar = self.whole(request)
        if grammar is None or grammar.leave is None:
            return None
        given, room = request.params.max_tokens, self.max_model_len - len(request.prompt_token_ids)
        most = max(tools.budget, int(grammar.leave[grammar.start]), 1)
        tail = int(grammar.distance[grammar.distance < UNREACHABLE].max())
        return most if most + tail <= (room if given is None else min(given, room)) else None

    def whole(self, request: Request) -> grammars.Ready | None:
        """A request's automaton, without regard to a budget of thoughts; None: there is none.

        Raises:
            Refused: As of a call.
        """
        if (key := self._wanted(request)) is None:
            return None
        grammar, _ = self._compiled(*key)
        at = getattr(request.params.constraint, "at", None)
        return grammar if at is None else dataclasses.replace(grammar, start=at)

    def _wanted(self, request: Request) -> tuple[Any, tuple[int, ...]] | None:
        """The constraint and the stop ids of the automaton that a request needs; None: it has none.

        A strategy without constraints may leave out what bans the marks of calls.
        """
        constraint = request.params.constraint
        if constraint is None:
            return None
        if isinstance(constraint, structured.Tools):
            is_prose = constraint.choice == "none" and constraint.answer is None
            is_held = getattr(self._strategy, "holds_constraints", True)
            if is_prose and constraint.budget is None and not is_held:
                return None
            # Budgets of any size have the same automaton.
            budget = None if constraint.budget is None else 0
            constraint = dataclasses.replace(constraint, budget=budget, at=None)
        return constraint, self._stops(request.params)

    def missing(self, request: Request) -> tuple[Hashable, Callable[[], Any]] | None:
        """The key of a request's automaton that is not kept, and what compiles it in any thread."""
        if (key := self._wanted(request)) is None:
            return None
        with self._lock:
            if key in self._kept or key in self._refusals:
                return None
        return key, functools.partial(self._compiled, *key)

    def _stops(self, params: SamplingParams) -> tuple[int, ...]:
        own = () if params.ignore_eos else self._model.defaults.stop_token_ids
        return tuple(sorted({*params.stop_token_ids, *own}))

    def report(self, constraint: Any) -> ConstraintReport:
        """See `LLM.constraint_report`."""
        return self._compiled(constraint, self._stops(SamplingParams()))[1]

    def _compiled(
        self, constraint: Any, stops: tuple[int, ...]
    ) -> tuple[grammars.Ready, ConstraintReport]:
        self._check(constraint)
        known = structured.Constraint | structured.After | structured.Tools | structured.Tokens
        if not isinstance(constraint, known):
            raise Refused(
                f"constraint={checks.short_repr(constraint)} has type "
                f"{type(constraint).__name__}; give "
                "a Regex, a Choice or a JsonSchema of dllm_jax, one of them within After, or "
                "Tokens",
                "constraint",
            )
        key = constraint, stops
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            if key in self._refusals:
                self._refusals.move_to_end(key)
                raise Refused(self._refusals[key], "constraint")
        began = time.perf_counter()
        try:
            automaton, grammar = self._made(constraint, stops)
        except (ValueError, RecursionError, MemoryError, OverflowError) as error:
            said = str(error) if isinstance(error, ValueError) else too_large(error)
            self._keep(self._refusals, key, said, MOST_REFUSALS)
            raise Refused(said, "constraint") from error
        sizes = grammars.sizes(grammar.arrays)
        report = ConstraintReport(
            states=sizes.states,
            classes=sizes.classes,
            device_bytes=grammars.num_bytes(grammar),
            fewest_tokens=int(grammar.distance[grammar.start]),
            compile_s=time.perf_counter() - began,
            notes=automaton.notes,
        )
        found = grammar, report
        self._keep(self._kept, key, found, MOST_KEPT)
        return found

    def _keep(self, kept: OrderedDict[Any, Any], key: Any, found: Any, most: int) -> None:
        with self._lock:
            kept[key] = found
            while len(kept) > most:
                kept.popitem(last=False)

    def _made(
        self, constraint: Any, stops: tuple[int, ...]
    ) -> tuple[structured.TokenAutomaton, grammars.Ready]:
        """The automaton, and as the device takes it; of tools that are too many, the first stage's.

        Raises:
            ValueError: It cannot be compiled.
        """
        of_tools = isinstance(constraint, structured.Tools) and constraint.stage == "whole"
        by_names = dataclasses.replace(constraint, stage="names") if of_tools else constraint
        first = by_names if of_tools and constraint.is_large else constraint
        try:
            automaton = self._automaton(first, stops)
            return automaton, grammars.ready(automaton, self._model.config.vocab_size)
        except ValueError as error:
            if first is by_names or str(error).startswith("tools["):
                raise
        automaton = self._automaton(by_names, stops)
        return automaton, grammars.ready(automaton, self._model.config.vocab_size)

    def _automaton(self, constraint: Any, stops: tuple[int, ...]) -> structured.TokenAutomaton:
        never, most_states = self._never(), grammars.BUCKETS[-1].states
        if isinstance(constraint, structured.Tokens):
            return constraint.automaton(self._model.config.vocab_size, stops, never)
        if not isinstance(constraint, structured.After):
            if self._is_apart:
                return self._worker.compile(constraint, stops)
            return structured.compile(constraint, self._words, stops, never, most_states)
        tokenizer, text = self._model.tokenizer, constraint.marker
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) != 1 or ids[0] in stops or ids[0] in never or ids[0] == tokenizer.unk_token_id:
            raise ValueError(
                f"marker {checks.short_repr(text)} of After is not one token that the model may "
                f"write (ids {ids[:8]}); give another"
            )
        words = dataclasses.replace(self._words, first=None)  # the marker is
        behind = structured.compile(constraint.constraint, words, stops, never, most_states - 1)
        return structured.behind_marker(behind, ids[0], stops, never)

    @functools.cached_property
    def spelt(self) -> list[bytes | None]:
        """Bytes by id, read once."""
        return structured.token_bytes(self._model.tokenizer)

    @functools.cached_property
    def _words(self) -> structured.Spellings:
        """The vocabulary, read once: half a second for 150,000 tokens."""
        tokenizer, spelt = self._model.tokenizer, self.spelt
        words = structured.spellings(spelt, structured.first_bytes(tokenizer, spelt))
        return dataclasses.replace(words, marks=structured.mark_ids(tokenizer.get_added_vocab()))

    @functools.cached_property
    def _worker(self) -> Worker:
        return Worker(self._words, self._never(), grammars.BUCKETS[-1].states)

    def _never(self) -> np.ndarray:
        """Ids that the model is never read for."""
        ids = np.arange(self._model.config.vocab_size)
        return np.flatnonzero(self._model.forbidden(ids))

    def _check(self, constraint: Any) -> None:
        """Refuse a model or a strategy that takes no constraint."""
        strategy = self._strategy
        if not getattr(strategy, "holds_constraints", True):
            why = (
                f"{strategy.name} with these fields takes no constraint, because it keeps drafts "
                'at random or moves text; use acceptance="match", or another strategy'
            )
            if isinstance(constraint, structured.Tools):
                raise Refused(f"tools: {why}", "tools", "tools_unsupported")
            raise _unsupported(why)
        if self._model.tokenizer is None:
            raise _unsupported(
                f"model {self._model.source!r} has no tokenizer, and a constraint is about text; "
                "load one with the model"
            )


def _unsupported(message: str) -> Refused:
    return Refused(f"constraint: {message}", "constraint", "unsupported_parameter")

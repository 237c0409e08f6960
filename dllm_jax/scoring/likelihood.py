"""Log-likelihoods of completions: exact left to right, or the bound that papers report.

Data flow: pairs of prompt and completion -> groups that share a prompt -> keys and values of the
prompt, once a group -> keys and values of the completions' earlier blocks -> rows, each one block
with some of its cells hidden -> log-probabilities of the tokens there -> sums.

A block model is read as it decodes. Blocks lie on the absolute grid, a block sees the text before
it, and the prompt's rest stands in the first block. What follows the completion in its last block
is hidden. A full-sequence model has one block, the completion. An autoregressive model reads each
token after the tokens before it. Nothing here uses the engine's paged cache.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from dllm_jax.scoring import forwards, mask_strata
from dllm_jax.scoring.forwards import Rows

Method = Literal["chain", "elbo"]
Ids = Sequence[int]
BUDGET = 128  # hidden sets of a block, as in LLaDA's harness
MOST_ROWS = 32  # of a forward
MOST_SCORES = 2**22  # of one head of a forward: rows x cells x keys


@dataclasses.dataclass(frozen=True)
class LogLikelihood:
    """The log-probability of a completion after its prompt.

    Attributes:
        value: Nats: log p of the completion by "chain", an estimate of its ELBO by "elbo".
        error: Standard error of `value` in nats, 0 where it is exact.
        ci95: The 95 % interval of `value`, Student's: a little wider than twice 1.96 errors.
        tokens: Nats of each token after those before it; empty by "elbo".
        is_greedy: Each token is the likeliest after those before it; None by "elbo".
        rows: Blocks that were read for it, the prompt's not counted.
    """

    value: float
    error: float
    ci95: tuple[float, float]
    tokens: tuple[float, ...]
    is_greedy: bool | None
    rows: int


class _Text(NamedTuple):
    """A prompt and its completion."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompt + self.completion


class _Row(NamedTuple):
    """One block with cells hidden.

    Attributes:
        text: Number of the text in its group.
        start: Position of the block's first cell.
        ids: Its tokens, hidden ones included; for "causal", the completion.
        hidden: Cells that show the mask.
        reads: Cells whose token is asked for.
    """

    text: int
    start: int
    ids: np.ndarray
    hidden: np.ndarray
    reads: np.ndarray


def log_likelihood(
    model: Any,
    prompts: str | Ids | Sequence[str | Ids],
    completions: str | Ids | Sequence[str | Ids],
    *,
    method: Method,
    budget: int,
    block_size: int | None,
    seed: int,
    encode: Callable[[str, bool], list[int]],
) -> LogLikelihood | list[LogLikelihood]:
    """See `Model.log_likelihood`.

    Args:
        model: A `loading.model.Model`.
        encode: Ids of a text, with special tokens or without, for a model with a tokenizer.
    """
    size = model.defaults.block_size if block_size is None else block_size
    _check(model, method, size, budget)
    is_one = _is_text(completions)
    after: Any = [completions] if is_one else list(completions)
    is_shared = len(prompts) == 0 or _is_text(prompts)
    before: Any = [prompts] * len(after) if is_shared else list(prompts)
    if len(before) != len(after):
        raise ValueError(
            f"{len(before)} prompts and {len(after)} completions; give one prompt, or one each"
        )
    texts = [
        _text(model, prompt, completion, number, encode)
        for number, (prompt, completion) in enumerate(zip(before, after, strict=True))
    ]
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, text in enumerate(texts):
        groups.setdefault(text.prompt, []).append(number)
    found: dict[int, LogLikelihood] = {}
    for members in groups.values():
        group = _Group(model, size, [texts[number] for number in members])
        each = group.chains() if method == "chain" else group.elbos(budget, seed)
        found.update(zip(members, each, strict=True))
    every = [found[number] for number in range(len(texts))]
    return every[0] if is_one else every


def _is_text(value: Any) -> bool:
    """A text, or the ids of one; not several."""
    return isinstance(value, str) or (
        len(value) > 0 and all(isinstance(one, int | np.integer) for one in value)
    )


def _check(model: Any, method: str, block_size: int, budget: int) -> None:
    family, kind = model.defaults.family, model.defaults.attention
    if model.arch.condition is not None:
        raise ValueError(
            f"{family} denoises a canvas of random tokens, which hides none: it has no "
            "log-likelihood; ask a model of another family"
        )
    if method not in ("chain", "elbo"):
        raise ValueError(f'{method=} is unknown; use "chain" or "elbo"')
    if method == "elbo" and kind == "causal":
        raise ValueError(f'{method=}: {family} hides no tokens; "chain" is its exact likelihood')
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 2:
        raise ValueError(f"{budget=} must be a whole number of at least 2; use {BUDGET}")
    if block_size < 1 or block_size % model.routing_block:
        raise ValueError(
            f"{block_size=} must be a positive multiple of {model.routing_block}; leave it out"
        )


def _text(
    model: Any,
    prompt: Any,
    completion: Any,
    number: int,
    encode: Callable[[str, bool], list[int]],
) -> _Text:
    """Ids of a pair.

    Raises:
        ValueError: One is no text of the model, or together they are too long.
    """
    found = []
    for name, value, special in (("prompt", prompt, True), ("completion", completion, False)):
        if isinstance(value, str):
            if model.tokenizer is None:
                raise ValueError(f"{model.source!r} has no tokenizer; give {name}s as token ids")
            value = encode(value, special)
        ids = np.asarray(value, np.int64).reshape(-1)
        wrong = ids[(ids < 0) | (ids >= model.config.vocab_size)]
        if name == "completion":
            wrong = ids[np.asarray(model.forbidden(ids)) | (ids < 0)]
        if wrong.size:
            raise ValueError(
                f"{name} {number} holds the id {wrong[0]}, which the model never writes; take it "
                "out"
            )
        found.append(tuple(ids.tolist()))
    text = _Text(*found)
    if not text.completion:
        raise ValueError(f"completion {number} is empty; give at least one token")
    if model.config.shift and not text.prompt:
        raise ValueError(
            f"prompt {number} is empty, and {model.defaults.family} predicts a token from the one "
            "before it; give at least one token"
        )
    if len(text.ids) > model.config.max_position:
        raise ValueError(
            f"pair {number} has {len(text.ids)} tokens, the model takes "
            f"{model.config.max_position}; shorten the prompt"
        )
    return text


class _Group:
    """Completions of one prompt: the rows that are read of them, and what is read."""

    def __init__(self, model: Any, block_size: int, texts: list[_Text]):
        self.model, self.texts = model, texts
        self.kind, self.prompt = model.defaults.attention, texts[0].prompt
        P = len(self.prompt)
        self.size = block_size
        if self.kind == "full":
            self.first, self.window = 0, _rounded(max(len(text.ids) for text in texts))
        elif self.kind == "causal":
            self.first, self.window = P, _rounded(max(len(text.completion) for text in texts), 8)
        else:
            self.first, self.window = P // block_size * block_size, block_size

    def chains(self) -> Iterator[LogLikelihood]:
        """Exact values."""
        rows = [list(self._chain_rows(number)) for number in range(len(self.texts))]
        for of_text, read in zip(rows, self._read(rows), strict=True):
            values = np.concatenate([one[0] for one in read])
            surest = np.concatenate([one[1] for one in read])
            value = float(values.sum())
            yield LogLikelihood(
                value=value,
                error=0.0,
                ci95=(value, value),
                tokens=tuple(values.tolist()),
                is_greedy=bool(surest.all()),
                rows=len(of_text),
            )

    def elbos(self, budget: int, seed: int) -> Iterator[LogLikelihood]:
        """Estimates."""
        plans = [list(self._plan(number, budget, seed)) for number in range(len(self.texts))]
        rows = [
            [row for _, of_block in plan for of_stratum in of_block for row in of_stratum]
            for plan in plans
        ]
        for plan, of_text, read in zip(plans, rows, self._read(rows), strict=True):
            means = iter([one[0].mean() for one in read])
            value, error, half = mask_strata.combined(
                stratum.total(np.array([next(means) for _ in of_stratum]))
                for strata, of_block in plan
                for stratum, of_stratum in zip(strata, of_block, strict=True)
            )
            yield LogLikelihood(value, error, (value - half, value + half), (), None, len(of_text))

    def _blocks(self, number: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Start, tokens and cells of the completion, of each block that holds some of it."""
        text = self.texts[number]
        ids, P = np.array(text.ids, np.int32), len(text.prompt)
        first, size = (0, len(ids)) if self.kind == "full" else (self.first, self.size)
        for start in range(first, len(ids), size):
            block = ids[start : start + size]
            yield start, block, np.arange(max(P - start, 0), len(block))

    def _chain_rows(self, number: int) -> Iterator[_Row]:
        if self.kind == "causal":
            ids = np.array(self.texts[number].completion, np.int32)
            nothing = np.zeros(len(ids), bool)
            yield _Row(number, self.first, ids, nothing, np.arange(len(ids)))
            return
        for start, ids, cells in self._blocks(number):
            for cell in cells:
                yield _Row(number, start, ids, np.arange(len(ids)) >= cell, np.array([cell]))

    def _plan(
        self, number: int, budget: int, seed: int
    ) -> Iterator[tuple[list[mask_strata.Stratum], list[list[_Row]]]]:
        """For each block: its strata, and the rows of each stratum."""
        for start, ids, cells in self._blocks(number):
            # The same block is hidden in the same ways wherever it is asked for.
            rng = np.random.default_rng([seed, start, *ids.tolist()])
            strata = mask_strata.strata(len(cells), budget, rng)
            rows = []
            for stratum in strata:
                hidden = np.zeros((len(stratum.hidden), len(ids)), bool)
                hidden[:, cells] = stratum.hidden
                rows.append([_Row(number, start, ids, one, np.flatnonzero(one)) for one in hidden])
            yield strata, rows

    def _read(self, rows: list[list[_Row]]) -> Iterator[list[tuple[np.ndarray, np.ndarray]]]:
        """Of each text, of each of its rows: nats of the cells read, and whether each is surest."""
        prompt = self._prompt_cache()
        for first in range(0, len(self.texts), MOST_ROWS):
            chunk = range(first, min(first + MOST_ROWS, len(self.texts)))
            own, span = self._own_cache(prompt, chunk)
            every = [row._replace(text=row.text - first) for n in chunk for row in rows[n]]
            found = self._forwards(prompt, own, span, every)
            for number in chunk:
                yield [next(found) for _ in rows[number]]

    def _prompt_cache(self) -> Any:
        """Keys and values of the prompt; of positions past `first` only rows that may see them."""
        size = 0 if self.kind == "full" or not self.prompt else _rounded(len(self.prompt))
        ids = np.zeros((1, size), np.int32)
        ids[0, : len(self.prompt)] = self.prompt[:size]
        kind = "full" if self.kind == "d2f" else self.kind
        lengths = np.array([len(self.prompt)], np.int32)
        zeros = np.zeros(1, np.int32)
        return forwards.keys(self.model, None, ids, zeros, lengths, kind=kind, block_size=self.size)

    def _own_cache(self, prompt: Any, chunk: range) -> tuple[Any, int]:
        """Keys and values of completions from `first` on, and for how many positions."""
        last = max(len(self.texts[n].ids) - 1 for n in chunk)
        span = 0 if self.kind in ("full", "causal") else last // self.size * self.size - self.first
        if not span:
            return [], 0
        span, count = _rounded(span, self.size), _power(len(chunk))
        ids = np.zeros((count, span), np.int32)
        for row, number in enumerate(chunk):
            cut = self.texts[number].ids[self.first : self.first + span]
            ids[row, : len(cut)] = cut
        starts = np.full(count, self.first, np.int32)
        lengths = np.full(count, span, np.int32)
        own = forwards.keys(
            self.model, prompt, ids, starts, lengths, kind="block_causal", block_size=self.size
        )
        return own, span

    def _forwards(
        self, prompt: Any, own: Any, span: int, rows: list[_Row]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """What is read of each row."""
        lead = int(self.model.config.shift and self.kind != "full")  # the row before predicts
        cells = self.window + lead
        keys = cells + span + (prompt[0][0].shape[1] if prompt else 0)
        most = max(1, min(MOST_ROWS, _power(MOST_SCORES // (cells * keys) + 1) // 2))
        count = min(most, _power(len(rows)))
        reads = max(len(row.reads) for row in rows)
        reads = 1 if reads == 1 else self.window
        for at in range(0, len(rows), count):
            part = rows[at : at + count]
            asked = _rows_of(self, part, count, cells, reads, lead)
            out = forwards.forward(self.model, prompt, own, asked, kind=self.kind, lead=lead)
            values, surest = jax.device_get(out)
            for i, row in enumerate(part):
                n = len(row.reads)
                if not np.isfinite(values[i, :n]).all():
                    raise ValueError("the model gave a value that is not finite; check its weights")
                yield values[i, :n].astype(np.float64), surest[i, :n]


def _rows_of(
    group: _Group, rows: list[_Row], count: int, cells: int, reads: int, lead: int
) -> Rows:
    model, first, P = group.model, group.first, len(group.prompt)
    mask = max(model.config.mask_token_id, 0)
    ids = np.full((count, cells), mask, np.int32)
    positions = np.broadcast_to(np.arange(cells, dtype=np.int32), (count, cells)).copy()
    live = np.zeros((count, cells), bool)
    text = np.zeros(count, np.int32)
    seen = np.zeros((count, cells, 2), np.int32)
    where = np.zeros((count, reads), np.int32)
    targets = np.zeros((count, reads), np.int32)
    for i, row in enumerate(rows):
        n = len(row.ids)
        ids[i, lead : lead + n] = np.where(row.hidden, mask, row.ids)
        # Of a block model the whole block is present, past the text's end too.
        live[i, lead : lead + (n if group.kind in ("full", "causal") else group.size)] = True
        positions[i] += row.start - lead
        text[i] = row.text
        seen[i] = min(row.start, first), max(row.start - first, 0)
        if lead:
            ids[i, 0] = group.texts[row.text].ids[row.start - 1]
            if group.kind == "d2f" and row.start == first:
                seen[i, 0, 0] = P  # a row of the prompt saw all of it
        # Row i - 1 predicts cell i of a shifted model.
        before = lead - int(model.config.shift)
        where[i, : len(row.reads)] = row.reads + before
        targets[i, : len(row.reads)] = row.ids[row.reads]
    return Rows(ids, positions, live, text, seen, where, targets)


def _rounded(length: int, least: int = 64) -> int:
    """`least` times a power of two: few lengths, so few programs."""
    while least < length:
        least *= 2
    return least


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << max(number - 1, 0).bit_length()

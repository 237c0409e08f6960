"""The training data of a drafter: prompts and the target's answers, stored in a file.

Data flow: prompts -> the target answers them as in serving -> rows of `prompt answer`. A share is
greedy, the rest is drawn at temperature 1. Each part is stored when it is complete, and the next
call continues after the last part.
"""

import contextlib
import functools
import json
import pathlib
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import tokenizers

from dllm_jax.api import generate
from dllm_jax.loading import chat, tokenizer
from dllm_jax.loading.model import Model
from dllm_jax.strategies.core.state import FINISH_REASONS
from dllm_jax.tasks import problems
from dllm_jax.training import stream

if TYPE_CHECKING:
    from dllm_jax.training import dflash

STORED = "responses.npz"


def regenerate(
    target: Model,
    prompts: Iterator[list[list[int]]],
    folder: pathlib.Path,
    config: "dflash.TrainConfig",
    *,
    max_seconds: float | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, np.ndarray] | None:
    """The target's answers, stored under `folder`; stored ones are not decoded again.

    Args:
        prompts: Batches of `response_batch` prompts, starting with the first that is not stored.
        config: Greedy rows of a batch, its `greedy_share`, come first. After `response_seconds` the
            answers so far are taken.
        max_seconds: Stop after this time; the next call continues with the next batch.

    Returns:
        `tokens` [N row_tokens] i32 (0 past the end), `prompt_len` and `length` i32, including the
        end of sequence. None if `max_seconds` passed before all answers were decoded.

    Raises:
        ValueError: No prompt leaves room for an answer.
    """
    stored = folder / STORED
    if stored.exists():
        with np.load(stored) as kept:
            return dict(kept)
    began = time.monotonic()
    batch_size, row_len = config.response_batch, config.row_tokens
    num_batches = max(1, -(-config.num_responses // batch_size))
    done = len(list(folder.glob("responses-*.npz")))
    temperature = np.where(np.arange(batch_size) < config.greedy_share * batch_size, 0.0, 1.0)
    stop = (target.defaults.stop_token_ids or (0,))[0]
    waiting: tuple[int, np.ndarray, np.ndarray, Any] | None = None

    def keep(index: int, padded: np.ndarray, lengths: np.ndarray, out: Any) -> None:
        out = jax.device_get(out)
        rows = _rows(padded, lengths, out.tokens, out.length, out.finish, stop, row_len)
        _store(folder / f"responses-{index:05d}.npz", rows)
        say(f"responses {(index + 1) * batch_size}, {time.monotonic() - began:.0f} s")

    for index in range(done, num_batches):
        padded, lengths = pad(next(prompts), batch_size)
        out = decode(
            target, padded, lengths, temperature.astype(np.float32),
            jax.random.fold_in(jax.random.key(config.seed), index),
            max_tokens=config.response_tokens,
        )  # fmt: skip
        if waiting is not None:  # while the device decodes the next batch
            keep(*waiting)
        waiting = (index, padded, lengths, out)
        spent = time.monotonic() - began
        if config.response_seconds is not None and spent > config.response_seconds:
            break
        if max_seconds is not None and spent > max_seconds and index + 1 < num_batches:
            keep(*waiting)
            return None
    if waiting is not None:
        keep(*waiting)
    parts = sorted(folder.glob("responses-*.npz"))
    loaded = [dict(np.load(part)) for part in parts]
    rows = {name: np.concatenate([part[name] for part in loaded]) for name in loaded[0]}
    some = rows["length"] - rows["prompt_len"] >= 2  # an anchor and a token after it
    if not some.any():
        raise ValueError(
            f"no answer of {len(some)} has two tokens within {row_len=}; use longer rows, or "
            "prompts that leave room"
        )
    rows = {name: values[some] for name, values in rows.items()}
    _store(stored, rows)
    for part in parts:
        part.unlink()
    return rows


@functools.partial(jax.jit, static_argnames="max_tokens")
def decode(
    target: Model, prompts: Any, prompt_len: Any, temperature: Any, key: Any, *, max_tokens: int
) -> generate.GenerateOutput:
    """`generate` as one program for many batches of one shape, without checks of the prompts.

    Args:
        prompts: Ids [B T], right-padded.
        temperature: Temperature of each row.
    """
    return generate.generate(
        target,
        prompts,
        "ar",
        max_tokens=max_tokens,
        prompt_len=prompt_len,
        temperature=temperature,
        key=key,
    )


def pad(prompts: Sequence[Sequence[int]], num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts [num_rows T], T a multiple of 64, and lengths; spare rows repeat the first."""
    lengths = np.array([len(ids) for ids in prompts], np.int32)
    padded = np.zeros((num_rows, -(-int(lengths.max()) // 64) * 64), np.int32)
    for i, ids in enumerate(prompts):
        padded[i, : len(ids)] = ids
    padded[len(prompts) :] = padded[0]
    spare = np.full(num_rows - len(prompts), lengths[0], np.int32)
    return padded, np.concatenate([lengths, spare])


def _store(path: pathlib.Path, rows: dict[str, np.ndarray]) -> None:
    """Write rows atomically."""
    partial = path.with_name(f".{path.stem}.partial.npz")
    np.savez(partial, tokens=rows["tokens"], prompt_len=rows["prompt_len"], length=rows["length"])
    partial.rename(path)


def _rows(
    padded: np.ndarray,
    lengths: np.ndarray,
    output: np.ndarray,
    output_len: np.ndarray,
    finish: np.ndarray,
    stop: int,
    row_len: int,
) -> dict[str, np.ndarray]:
    """Prompt and answer, with the end of sequence if the model produced it, cut to `row_len`."""
    tokens = np.zeros((len(padded), row_len), np.int32)
    total = np.zeros(len(padded), np.int32)
    for i, (given, count, made) in enumerate(zip(lengths, output_len, output, strict=True)):
        end = [stop] if FINISH_REASONS[int(finish[i])] == "stop" else []
        row = np.concatenate([padded[i, :given], made[:count], np.array(end, np.int32)])[:row_len]
        tokens[i, : len(row)], total[i] = row, len(row)
    return {"tokens": tokens, "prompt_len": lengths.astype(np.int32), "length": total}


def problem_tokenizer(target: Model) -> tokenizers.Tokenizer | None:
    """The tokenizer of a target that reads problems in the format of `stream`, else None."""
    text = problems.problem("plain", 0, 0).question
    if target.tokenizer_source is None or _formatted(target, text) != stream.conversation(text):
        return None
    return tokenizers.Tokenizer.from_file(str(target.tokenizer_source.folder / "tokenizer.json"))


def problem_prompts(
    target: Model, batch_size: int, seed: int, first: int, num_workers: int
) -> Generator[list[list[int]], None, None]:
    """Endless word problems of both halves in this target's format, from batch `first` on."""
    own = problem_tokenizer(target)
    if own is not None:  # whole rows come ready from worker processes
        cfg = stream.StreamConfig(
            seed=seed, batch_size=batch_size, lengths=(208, 208), room=1, hard_share=0.5,
            example_share=0.0,
        )  # fmt: skip
        with contextlib.closing(stream.batches(cfg, own, first, num_workers)) as feed:
            for batch in feed:
                rows = zip(batch["tokens"], batch["prompt_len"], strict=True)
                yield [ids[:n].tolist() for ids, n in rows]
    index = first * batch_size
    while True:
        drawn = [
            problems.problem(("plain", "hard")[i % 2], seed, i)
            for i in range(index, index + batch_size)
        ]
        yield [_encode(target, one.question) for one in drawn]
        index += batch_size


def read_prompts(target: Model, path: str | pathlib.Path, most: int) -> list[list[int]]:
    """Prompts of a file, one a line or as JSON lines with "prompt", in this target's format.

    Args:
        most: Tokens of the longest prompt that is used.

    Raises:
        ValueError: The file cannot be read or has no prompt, or a JSON line has no "prompt".
    """
    name, texts = str(path), []
    for number, line in enumerate(_text(name).split("\n"), 1):
        if not line.strip():
            continue
        if name.endswith(".jsonl"):
            try:
                entry = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{name!r} line {number} is no JSON ({error.msg} at column {error.colno}); "
                    'write {"prompt": "..."}, one a line'
                ) from error
            if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
                raise ValueError(f'{name!r} line {number} has no text "prompt"; add it')
            line = entry["prompt"]
        texts.append(line)
    encoded = [ids for ids in (_encode(target, text) for text in texts) if 0 < len(ids) <= most]
    if not encoded:
        raise ValueError(
            f"{name!r} holds no prompt of at most {most} tokens; write one a line, or raise "
            "--row-tokens"
        )
    return encoded


def in_turn(
    prompts: list[list[int]], batch_size: int, first: int
) -> Generator[list[list[int]], None, None]:
    """Endless batches of prompts, cyclic, from batch `first` on."""
    at = first * batch_size
    while True:
        yield [prompts[i % len(prompts)] for i in range(at, at + batch_size)]
        at += batch_size


def _text(name: str) -> str:
    """The content of a file of prompts."""
    try:
        return pathlib.Path(name).read_text(encoding="utf-8-sig")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(
            f"file of prompts {name!r} cannot be read: {reason}; check the path"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"file of prompts {name!r} is not UTF-8 at byte {error.start}; save it as UTF-8"
        ) from error


def _formatted(target: Model, text: str) -> str:
    """A question in the target's chat format, unchanged if it has none."""
    if chat.template_of(target) is None:
        return text
    return chat.render(target, [{"role": "user", "content": text}])


def _encode(target: Model, text: str) -> list[int]:
    return tokenizer.encode(target.tokenizer, _formatted(target, text), special=False)

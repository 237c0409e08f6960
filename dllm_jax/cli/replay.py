"""`dllm-jax replay PATH`: decode a text of a snapshot again, forward by forward.

Data flow: snapshot -> model -> an engine with that one text (`resume`) ->
`engine.follow` -> a line, a frame or a JSON object a forward, then the text.
"""

import argparse
import json
from typing import Any

from dllm_jax.cli import flags
from dllm_jax.cli.errors import UsageError
from dllm_jax.cli.flags import Group, flag, whole
from dllm_jax.cli.interrupt import ALL, Interrupt
from dllm_jax.cli.text import count, shown

STATUS = ("-", "active", "to cache")  # of a block, by `dllm_jax.strategies.core.state`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the verb."""
    parser.epilog = (
        "A line a forward: the window (· is a hole), what settled, and what its blocks are. The "
        "prefix is computed again first, so the tokens are those the request would have had."
    )
    flags.add(
        parser,
        Group(
            "",
            flag("path PATH", "the folder that the error message named"),
            flag("--sample I", "which text (default: 0)", whole(0), 0),
            flag("--steps N", "forwards at most (default: no limit)", whole(1)),
            flag("--model SRC", "where the model is now (default: as then)"),
            flag("--draft SRC", "where its draft is now (default: as then)"),
            flag(
                "--strategy S",
                "a strategy from outside dllm-jax, file.py:name or module:name; a snapshot that "
                "names one runs no code by itself (default: as then)",
            ),
            *flags.SOURCE,
            flags.ATTENTION,
            flags.DEVICES,
        ),
        Group(
            "output",
            flags.as_json("one JSON object a forward"),
            flags.WATCH,
            flags.WATCH_DELAY,
            watch_delay=flags.WATCH_DELAY_S,
        ),
    )


def run(args: argparse.Namespace, stop: Interrupt) -> int:
    """Load, resume, and print each forward."""
    stop.forced = ALL
    if args.watch and args.json:
        raise UsageError("--watch and --json are two forms of output; give one")

    from dllm_jax.api import snapshot as snapshots
    from dllm_jax.api.resume import resume
    from dllm_jax.cli.engine import follow
    from dllm_jax.cli.sources import load_model

    snapshot = snapshots.load_snapshot(args.path)
    if args.sample >= len(snapshot.texts):
        raise UsageError(
            f"--sample {args.sample}: the snapshot holds {count(len(snapshot.texts), 'text')}, the "
            "first is 0"
        )
    if args.draft is not None and snapshot.draft is None:
        raise UsageError(f"--draft {args.draft!r}: nothing drafted in this snapshot; leave it out")
    args.model = args.model or snapshot.model["source"]
    args.dtype = snapshot.model["dtype"]
    args.quantization = snapshot.model.get("quantization") or "none"
    args.kv_cache_dtype = snapshot.model.get("kv_cache_dtype") or "auto"
    args.quantize_head = bool(snapshot.model.get("quantized_head"))
    args.tokenizer = None  # a snapshot keeps ids, and does not name another's tokenizer
    model = load_model(args)
    engine, request_id = resume(
        snapshot, args.sample, model, args.attention_implementation, args.draft, args.strategy
    )
    steps = _Steps(args, model, engine, request_id, snapshot.texts[args.sample])
    steps.begin(len(snapshot.texts))
    stop.tell = lambda: f"interrupted after {count(steps.num_steps, 'forward')}"
    for output in follow(engine, [request_id], stop):
        steps.show(output)
        if args.watch and not output.finished:
            stop.sleep(args.watch_delay)
        if steps.is_enough:
            break
    steps.end()
    return 0


class _Steps:
    """Prints what each forward did."""

    def __init__(
        self, args: argparse.Namespace, model: Any, engine: Any, request_id: str, text: Any
    ):
        from dllm_jax.cli.watch import Watch

        self._args, self._model, self._engine = args, model, engine
        (self._sequence,) = engine.sequences(request_id)
        self._request_id, self._text = request_id, text
        self._watch = Watch()
        self._settled = 0 if self._sequence.saved is None else len(text.tokens)
        self._output: Any = None
        self.num_steps = 0

    @property
    def is_enough(self) -> bool:
        """Whether --steps forwards are done."""
        return self.num_steps == self._args.steps

    def begin(self, num_texts: int) -> None:
        """Print how far the text was."""
        if self._args.json:
            return
        text = self._text
        print(
            f"text {self._args.sample} of {num_texts} (request {text.request_id}, sample "
            f"{text.index}): {count(len(text.prompt), 'prompt token')}, {len(text.tokens)} settled "
            f"after {count(text.nfe, 'forward')}"
        )
        if text.tokens and not self._settled:
            print("it starts over: its slot does not say all of it")

    def show(self, output: Any) -> None:
        """Print one forward."""
        from dllm_jax.cli.watch import cell_texts, frame

        self._output, one = output, output.outputs[0]
        new = one.token_ids[self._settled :]
        self._settled = len(one.token_ids)
        self.num_steps += 1
        if self._args.watch:
            if not output.finished:
                self._watch.show(frame(self._model, output, self._sequence))
            return
        status = self._status()
        if self._args.json:
            facts = {
                "nfe": output.metrics.nfe,
                "new_token_ids": new,
                "window": list(one.window),
                "blocks": status,
                "finish_reason": one.finish_reason,
            }
            print(json.dumps(facts), flush=True)
            return
        window = "".join(
            "·" if cell is None else cell for cell in cell_texts(self._model, one.window)
        )
        settled = "".join(str(cell) for cell in cell_texts(self._model, new))
        state = one.finish_reason or ", ".join(status)
        print(
            f"forward {output.metrics.nfe:>3} |{shown(window)}| +{len(new)} {settled!r} {state}",
            flush=True,
        )

    def end(self) -> None:
        """Print the text.

        Raises:
            ValueError: The text ended with an error again.
        """
        self._watch.clear()
        if self._output.error is not None:
            raise ValueError(self._output.error)
        one = self._output.outputs[0]
        if self._args.json:
            facts = {"text": one.text, "token_ids": one.token_ids}
            print(json.dumps(facts | {"finish_reason": one.finish_reason}), flush=True)
        else:
            print(
                f"\n{shown(one.text)}\n\n{count(len(one.token_ids), 'token')}, "
                f"{one.finish_reason or 'running'}"
            )

    def _status(self) -> list[str]:
        """The states of the blocks in the window; empty for a finished text."""
        if self._sequence.saved is None:
            return []
        fetch, row = self._sequence.saved
        slot = self._engine.runner.unpack(fetch.saved(row))
        return [STATUS[int(status)] for status in slot["buffer"].status]

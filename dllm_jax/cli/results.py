"""The output of `generate`: one text as it grows, its window, or a line or paragraph a prompt.

Each form takes outputs as they come (`show`), then `end`. `cut_short` prints the text so far
instead; the watching thread may call it while the engine is stuck.
"""

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from dllm_jax.cli.text import count, shown
from dllm_jax.engine.requests import DraftMetrics, RequestOutput


class OneText(contextlib.AbstractContextManager):
    """One text, printed as it settles, then the figures.

    Args:
        problem: The word problem it should solve, None for a prompt of the user.
    """

    def __init__(self, llm: Any, clock: Any, problem: Any):
        self._llm, self._clock, self._problem = llm, clock, problem
        self._began = clock()
        self._output: RequestOutput | None = None
        self._printed = ""

    def __exit__(self, *_: Any) -> None:
        pass

    def show(self, output: RequestOutput) -> None:
        """Print what is new."""
        self._output = output
        self._print(output.outputs[0].text)

    def end(self) -> None:
        """Print the figures.

        Raises:
            ValueError: It ended with an error.
        """
        self._close()
        assert self._output is not None
        if self._output.error is not None:
            raise ValueError(self._output.error)
        if self._problem:
            print(_verdict(self._problem, self._output.outputs[0].text))
        self._figures()

    def cut_short(self) -> str:
        """Print the text so far; return the error line."""
        self._output = _whole(self._llm, next(iter(self._llm.engine.outputs()), self._output))
        if self._output is None:
            return "interrupted before the first forward; run it again"
        self._print(self._output.outputs[0].text)
        self._close()
        self._figures()
        return (
            f"interrupted after {count(self._output.metrics.nfe, 'forward')}; what was generated "
            "so far is shown; run it again to finish"
        )

    def _print(self, text: str) -> None:
        print(shown(text[len(self._printed) :]), end="", flush=True)
        self._printed = text

    def _close(self) -> None:
        print("\n", flush=True)

    def _figures(self) -> None:
        outputs = [] if self._output is None else [self._output]
        print(figures(outputs, self._clock() - self._began, self._clock.compile_s), flush=True)


class Watched(OneText):
    """One text whose window is drawn; the finished text replaces the last drawing."""

    def __init__(self, llm: Any, clock: Any, problem: Any):
        from dllm_jax.cli.watch import Watch

        super().__init__(llm, clock, problem)
        self._watch, self._text = Watch(), ""

    def show(self, output: RequestOutput) -> None:
        """Draw the window."""
        from dllm_jax.cli.watch import frame

        super().show(output)
        if not output.finished:
            (sequence,) = self._llm.engine.sequences(output.request_id)
            self._watch.show(frame(self._llm.model, output, sequence))

    def _print(self, text: str) -> None:
        self._text = text

    def _close(self) -> None:
        self._watch.clear()
        print(shown(f"{self._text}\n"), flush=True)

    def _figures(self) -> None:
        # No rate: the device works on while a frame is shown.
        outputs = [] if self._output is None else [self._output]
        print(figures(outputs, None, self._clock.compile_s), flush=True)


class Rows(contextlib.AbstractContextManager):
    """Several texts, printed in the order of their prompts."""

    def __init__(
        self,
        llm: Any,
        clock: Any,
        prompts: Sequence[str],
        as_json: bool,
        suffix: str | None = None,
    ):
        from tqdm import tqdm

        self._suffix = suffix
        self._llm, self._clock, self._prompts, self._json = llm, clock, prompts, as_json
        self._began = clock()
        self._done: dict[int, RequestOutput] = {}
        self._next = 0  # the first one not printed
        self._bar = tqdm(total=len(prompts), unit="prompt", leave=False, disable=None)

    def __exit__(self, *_: Any) -> None:
        self._bar.close()

    def show(self, output: RequestOutput) -> None:
        """Keep a text; print those whose predecessors are printed."""
        self._done[int(output.request_id)] = output
        self._bar.update()
        while self._next in self._done:
            self._print(self._done[self._next])
            self._next += 1

    def end(self) -> None:
        """Print the figures.

        Raises:
            ValueError: Some ended with an error.
        """
        self._bar.close()
        self._total()
        errors = [output.error for _, output in sorted(self._done.items()) if output.error]
        if errors:
            raise ValueError(
                errors[0]
                if len(self._prompts) == 1
                else f"{len(errors)} of {len(self._prompts)} prompts failed, the first: {errors[0]}"
            )

    def cut_short(self) -> str:
        """Print the text so far; return the error line."""
        self._bar.close()
        finished = len(self._done)
        for output in self._llm.engine.outputs():
            if any(one.token_ids for one in output.outputs):
                self._done.setdefault(int(output.request_id), output)
        for place, output in sorted(self._done.items()):
            if place >= self._next:
                self._print(_whole(self._llm, output))
        self._total()
        return (
            f"interrupted after {finished} of {count(len(self._prompts), 'prompt')}; what was "
            "generated so far is shown; run it again to finish"
        )

    def _print(self, output: RequestOutput) -> None:
        one = output.outputs[0]
        if self._json:
            metrics = output.metrics
            facts = {
                "prompt": output.prompt,
                **({} if self._suffix is None else {"suffix": self._suffix}),
                "text": one.text,
                "token_ids": one.token_ids,
                "finish_reason": one.finish_reason or "abort",
                "metrics": {
                    "nfe": metrics.nfe,
                    "prefill_nfe": metrics.prefill_nfe,
                    "cached_tokens": metrics.cached_tokens,
                    "num_preemptions": metrics.num_preemptions,
                    "tokens_per_forward": metrics.tokens_per_forward,
                    "ttfb_s": metrics.ttfb_s,
                    "e2e_s": metrics.e2e_s,
                    "compile_s": self._clock.compile_s,
                    **({} if metrics.draft is None else {"draft": metrics.draft.figures()}),
                },
            }
            if output.error is not None:
                facts["error"] = output.error
            self._write(json.dumps(facts, ensure_ascii=False))
        else:
            failed = f"\n[failed: {output.error}]" if output.error else ""
            self._write(shown(f"> {output.prompt}\n{one.text}{failed}\n"))

    def _write(self, text: str) -> None:
        with self._bar.external_write_mode():
            print(text, flush=True)

    def _total(self) -> None:
        if not self._json and self._done:
            seconds = self._clock() - self._began
            print(figures(list(self._done.values()), seconds, self._clock.compile_s), flush=True)


def figures(outputs: Sequence[RequestOutput], seconds: float | None, compile_s: float) -> str:
    """The line of figures over one or several texts.

    Args:
        seconds: Of work, compiling left out; None: they mean nothing.
    """
    tokens = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    nfe = sum(output.metrics.nfe for output in outputs)
    # Given text between holes was not written by a forward.
    written = sum(output.metrics.tokens_per_forward * output.metrics.nfe for output in outputs)
    firsts = [output.metrics.ttfb_s for output in outputs if output.metrics.ttfb_s is not None]
    parts = [
        count(tokens, "token"),
        count(nfe, "forward"),
        f"{written / max(nfe, 1):.2f} tokens per forward",
    ]
    drafted = DraftMetrics.together(output.metrics.draft for output in outputs)
    if drafted is not None and drafted.rounds:
        parts.append(f"mean accepted length {drafted.mean_accepted_length:.2f}")
    if seconds is not None:
        parts.append(f"{tokens / max(seconds, 1e-9):.0f} tok/s with prefill")
        if len(outputs) == 1 and firsts:
            parts.append(f"first block after {firsts[0]:.2f} s")
    return f"{', '.join(parts)} (compiling, not counted: {compile_s:.1f} s)"


def _whole(llm: Any, output: RequestOutput | None) -> Any:
    """An output with the text of all its ids, also those that a running request withholds."""
    if output is None or all(one.finish_reason for one in output.outputs):
        return output
    decode = llm.model.tokenizer.decode
    outputs = [
        dataclasses.replace(one, text=decode(one.token_ids, skip_special_tokens=True))
        for one in output.outputs
    ]
    return dataclasses.replace(output, outputs=outputs)


def _verdict(problem: Any, text: str) -> str:
    from dllm_jax.tasks.problems import extract_answer, is_correct

    if is_correct(text, problem):
        return f"right: the answer is {problem.answer}"
    answer = extract_answer(text)
    found = "no answer was given" if answer is None else f"not {answer}"
    return f"wrong: the answer is {problem.answer}, {found}"

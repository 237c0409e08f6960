"""`LLM`: a model, a strategy and an engine behind four calls: generate, chat, stream, engine.

The wiring is here and nowhere else; requests are made of what users write, and outputs put back in
their order. Nothing here schedules or touches arrays.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from dllm_jax import sizing
from dllm_jax.compile_cache import enable_compile_cache
from dllm_jax.engine import Engine
from dllm_jax.facts import EngineConfig
from dllm_jax.generation import bind_draft, check_fit, family_strategy, resolve_strategy
from dllm_jax.loading import load
from dllm_jax.memory import MemoryPlan
from dllm_jax.model import Model
from dllm_jax.requests import (
    MAX_SEED,
    CompletionOutput,
    Metrics,
    Request,
    RequestOutput,
    SamplingParams,
    StreamEvent,
)
from dllm_jax.snapshot import snapshot_saver
from dllm_jax.startup import start

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, str]]


class LLM:
    """A model that answers many requests at once.

    Args:
        model: What `dj.load` takes, or a `Model`.
        strategy: A name, `"pkg.mod:Name"`, a value or a step function; None: the family's.
        block_size, buffer_size: Of a strategy given by name or None.
        dtype: As in `dj.load`.
        max_num_seqs: Texts decoded at once.
        max_model_len: Most tokens of prompt and text together; None: the model's positions.
        page_size: Tokens of a page of the cache.
        memory_utilization: Share of the device's memory to use, weights included.
        num_pages: Pages of the cache; None: what memory holds.
        enable_prefix_caching: Reuse what equal prefixes have in the cache.
        tensor_parallel_size: 1; more is not supported yet.
        attention_implementation: Back end of attention, None for the best.
        draft: The model a speculative strategy drafts with.
        seed: Of requests without one.
        max_num_batched_tokens: Most prefill tokens between two decode steps.
        warm_up: Compile everything now; otherwise each size when it is first met.
        calibrate: Time the programs too, to plan rounds by; None: on an accelerator.
        config: Further sizes; the arguments above it are then taken from it.
        progress: Show a line while compiling (on a terminal).
        clock: Seconds; of deadlines and metrics.

    Raises:
        ValueError: Arguments that do not fit the model, or each other.
    """

    def __init__(
        self,
        model: Model | str = "builtin:tiny-sdar",
        strategy: Any = None,
        block_size: int | None = None,
        buffer_size: int | None = None,
        dtype: str = "auto",
        max_num_seqs: int = 8,
        max_model_len: int | None = None,
        page_size: int = 64,
        memory_utilization: float = 0.9,
        num_pages: int | None = None,
        enable_prefix_caching: bool = True,
        tensor_parallel_size: int = 1,
        attention_implementation: str | None = None,
        draft: Model | str | None = None,
        seed: int = 0,
        *,
        max_num_batched_tokens: int | None = None,
        warm_up: bool = True,
        calibrate: bool | None = None,
        config: EngineConfig | None = None,
        progress: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ):
        if tensor_parallel_size != 1:
            raise ValueError(f"{tensor_parallel_size=} is not supported yet; use 1")
        if not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
            raise ValueError(f"{seed=} must be a whole number in [0, {MAX_SEED}]; choose one")
        if config is None:
            config = EngineConfig(
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                page_size=page_size,
                num_pages=num_pages,
                memory_utilization=memory_utilization,
                enable_prefix_caching=enable_prefix_caching,
                max_num_batched_tokens=max_num_batched_tokens,
            )
        enable_compile_cache()
        self.model = load(model, dtype=dtype) if isinstance(model, str) else model
        self.strategy = _strategy(self.model, strategy, block_size, buffer_size)
        check_fit(self.model, self.strategy)
        aux = bind_draft(self.strategy, draft)
        self.config = config
        device = start(
            self.model,
            self.strategy,
            aux,
            config,
            attention_implementation,
            warm_up=warm_up,
            calibrate=calibrate,
            progress=sizing.progress_line() if progress and warm_up else None,
        )
        self.engine = Engine(
            device,
            self.model.tokenizer,
            seed=seed,
            clock=clock,
            save_snapshot=snapshot_saver(self.model, self.strategy, config),
        )

    @property
    def memory(self) -> MemoryPlan:
        """What the engine holds on its device, and the peak that was predicted."""
        return self.engine.device.memory

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Texts for prompts, in their order.

        A prompt that is refused or fails ends with "error" (`RequestOutput.error` says why) and
        the others go on.

        Args:
            prompts: A text, or a list of texts and of lists of token ids.
            params: One for all or one a prompt.
            use_tqdm: A progress bar, on a terminal.

        Raises:
            ValueError: Every prompt is refused; the reason is the first one's.
        """
        prompts = _prompt_list(prompts)
        every = _params_list(params, len(prompts))
        return self._run([self._encoder(prompt) for prompt in prompts], prompts, every, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers to conversations, through the tokenizer's chat template.

        Args:
            messages: One conversation, a list of {"role", "content"}, or a list of them.
        """
        if messages and isinstance(messages[0], Mapping):
            messages = [messages]  # type: ignore[list-item]
        texts = [self.apply_template(conversation) for conversation in messages]  # type: ignore
        every = _params_list(params, len(texts))
        encoders = [lambda text=text: self._encode(text, special=False) for text in texts]
        return self._run(encoders, texts, every, use_tqdm)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        events: Literal["commit", "denoise"] = "commit",
    ) -> Iterator[StreamEvent]:
        """Pieces of a text as they settle; leaving the loop ends the request.

        Args:
            events: "denoise" adds an event for each forward, with the provisional window.
        """
        if events not in ("commit", "denoise"):
            raise ValueError(f'{events=} is neither "commit" nor "denoise"')
        request = Request(
            prompt_token_ids=self._encoder(prompt)(),
            params=params or SamplingParams(),
            prompt=prompt if isinstance(prompt, str) else None,
            stream=True,
            denoise=events == "denoise",
        )
        return self._events(self.engine.add(request))

    def apply_template(self, conversation: Messages) -> str:
        """A conversation as the text the model reads, up to where it answers.

        Raises:
            ValueError: The model has no tokenizer or no template.
        """
        tokenizer = self.model.tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            raise ValueError(
                f"model {self.model.source!r} has no chat template; use generate with a prompt"
            )
        return tokenizer.apply_chat_template(
            list(conversation), tokenize=False, add_generation_prompt=True
        )

    # --- from here on: how ----------------------------------------------------------------------

    def _encoder(self, prompt: Prompt) -> Any:
        if isinstance(prompt, str):
            return lambda: self._encode(prompt, special=True)
        return lambda: list(prompt)

    def _encode(self, text: str, special: bool) -> list[int]:
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            raise ValueError(
                f"model {self.model.source!r} has no tokenizer to read text with; "
                "give lists of token ids"
            )
        return tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]

    def _run(
        self,
        encoders: Sequence[Any],
        prompts: Sequence[Prompt],
        every: Sequence[SamplingParams],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        from tqdm import tqdm

        outputs: list[RequestOutput | None] = [None] * len(prompts)
        where: dict[str, int] = {}
        refusals: list[Exception] = []
        try:
            for i, (encode, prompt, params) in enumerate(
                zip(encoders, prompts, every, strict=True)
            ):
                text = prompt if isinstance(prompt, str) else None
                try:
                    request = Request(prompt_token_ids=encode(), params=params, prompt=text)
                    where[self.engine.add(request)] = i
                except Exception as error:  # a tokenizer may raise anything
                    refusals.append(error)
                    outputs[i] = _refused(text, params, error)
            if refusals and not where:
                raise refusals[0]
            bar = tqdm(
                total=len(prompts), unit="prompt", leave=False, disable=None if use_tqdm else True
            )
            with bar:
                bar.update(len(refusals))
                while where:
                    for output in self.engine.step():
                        place = where.pop(output.request_id, None)
                        if place is not None:
                            outputs[place] = output
                            bar.update()
        finally:
            for request_id in where:
                self.engine.abort(request_id)
        return outputs  # type: ignore[return-value]

    def _events(self, request_id: str) -> Iterator[StreamEvent]:
        shown: dict[int, tuple[int, int]] = {}
        ended: set[int] = set()
        try:
            while True:
                for output in self.engine.step():
                    if output.request_id != request_id:
                        continue
                    for one in output.outputs:
                        if one.index in ended:
                            continue
                        text, ids = shown.get(one.index, (0, 0))
                        shown[one.index] = len(one.text), len(one.token_ids)
                        if one.finish_reason:
                            ended.add(one.index)
                        yield StreamEvent(
                            request_id=request_id,
                            index=one.index,
                            text=one.text[text:],
                            token_ids=one.token_ids[ids:],
                            finish_reason=one.finish_reason,
                            window=one.window,
                            metrics=output.metrics,
                        )
                    if output.finished:
                        return
        finally:
            self.engine.abort(request_id)


def _strategy(model: Model, strategy: Any, block_size: int | None, buffer_size: int | None) -> Any:
    sizes = {"block_size": block_size, "buffer_size": buffer_size}
    given = {name: size for name, size in sizes.items() if size is not None}
    if not given:
        return resolve_strategy(model, strategy)
    if strategy is None:
        strategy = model.defaults.strategy
    if not isinstance(strategy, str) or ":" in strategy:
        raise ValueError(
            f"{', '.join(given)} go with a strategy given by name; set them on the strategy value"
        )
    return resolve_strategy(model, family_strategy(model, strategy, **given))


def _prompt_list(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    prompts = list(prompts)
    if not prompts:
        raise ValueError("prompts is empty; give at least one")
    if all(isinstance(one, int) for one in prompts):
        raise ValueError("prompts is a flat list of token ids; wrap a single prompt in a list")
    return prompts


def _params_list(params: Any, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    every = list(params)
    if len(every) != count:
        raise ValueError(f"{len(every)} params for {count} prompts; give one, or one a prompt")
    return every


def _refused(prompt: str | None, params: SamplingParams, error: Exception) -> RequestOutput:
    empty = [CompletionOutput(i, "", [], "error") for i in range(params.n)]
    zero = Metrics(0, 0, 0, 0, 0.0, None, 0.0)
    said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return RequestOutput("", prompt, [], empty, True, zero, said)

"""`LLM`: a model, a strategy and an engine behind a few calls: generate, chat, stream, infill.

The wiring is here and nowhere else; requests are made of what users write, and outputs put back in
their order. Nothing here schedules or touches arrays.
"""

import dataclasses
import functools
import os
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from dllm_jax.api.defaults import default_params, family_strategy, resolve_strategy, usual_strategy
from dllm_jax.api.generate import bind_draft, check_fit
from dllm_jax.api.infilling import check_infills, holed_text
from dllm_jax.api.snapshot import snapshot_saver
from dllm_jax.engine.inbox import News, SharedEngine, TextEvents
from dllm_jax.engine.layout import EngineConfig
from dllm_jax.engine.requests import (
    MAX_SEED,
    CompletionOutput,
    Metrics,
    Request,
    RequestOutput,
    SamplingParams,
    StreamEvent,
    token_ids,
    whole_number,
)
from dllm_jax.loading import chat
from dllm_jax.loading.chat import Messages
from dllm_jax.loading.compile_cache import enable_compile_cache
from dllm_jax.loading.load import load
from dllm_jax.loading.model import Model
from dllm_jax.loading.tokenizer import encode
from dllm_jax.runner import buckets
from dllm_jax.runner.memory import MemoryPlan
from dllm_jax.runner.start import start

Prompt = str | Sequence[int]


class _Ends(NamedTuple):
    """What stands before and behind a hole."""

    prefix: Prompt
    suffix: Prompt | None


class LLM:
    """A model that answers many requests at once.

    Args:
        model: What `dj.load` takes, or a `Model`.
        strategy: A name, `"pkg.mod:Name"`, a value or a step function; None: the family's, and
            `dflash` for a model of `ar` with a draft.
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
        revision, lora: As in `dj.load`.
        warm_up: Compile everything now; otherwise each size when it is first met.
        calibrate: Time the programs too, to plan rounds by; None: on an accelerator.
        config: Further sizes, in the place of the arguments that are its fields.
        progress: Show a line while compiling (on a terminal).
        clock: Seconds; of deadlines and metrics.

    Raises:
        ValueError: Arguments that do not fit the model, or each other.
    """

    def __init__(
        self,
        model: Model | str | os.PathLike[str] = "builtin:tiny-sdar",
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
        draft: Model | str | os.PathLike[str] | None = None,
        seed: int = 0,
        *,
        revision: str | None = None,
        lora: str | os.PathLike[str] | None = None,
        max_num_batched_tokens: int | None = None,
        warm_up: bool = True,
        calibrate: bool | None = None,
        config: EngineConfig | None = None,
        progress: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ):
        if tensor_parallel_size != 1:
            raise ValueError(f"{tensor_parallel_size=} is not supported yet; use 1")
        seed = whole_number("seed", seed, 0, MAX_SEED)
        config = _config(
            config,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            page_size=page_size,
            num_pages=num_pages,
            memory_utilization=memory_utilization,
            enable_prefix_caching=enable_prefix_caching,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        enable_compile_cache()
        self.model = _model(model, dtype=dtype, revision=revision, lora=lora)
        wanted = _strategy(self.model, strategy, block_size, buffer_size, draft)
        self.strategy, aux = bind_draft(wanted, draft, self.model)
        check_fit(self.model, self.strategy)
        self.config = config
        device = start(
            self.model,
            self.strategy,
            aux,
            config,
            attention_implementation,
            warm_up=warm_up,
            calibrate=calibrate,
            progress=buckets.progress_line() if progress and warm_up else None,
        )
        self.engine = SharedEngine(
            device,
            self.model.tokenizer,
            seed=seed,
            clock=clock,
            save_snapshot=snapshot_saver(
                self.model, self.strategy, config, draft=next(iter(aux.values()), None)
            ),
        )

    @property
    def default_params(self) -> SamplingParams:
        """Of calls without any: with the family's temperature and top-p under its own strategy."""
        return default_params(self.model, self.strategy)

    @property
    def memory(self) -> MemoryPlan:
        """What the engine holds on its device, and the peak that was predicted."""
        return self.engine.runner.memory

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        trajectory: bool = False,
    ) -> list[RequestOutput]:
        """Texts for prompts, in their order.

        A prompt that is refused or fails ends with "error" (`RequestOutput.error` says why) and
        the others go on. An interrupt ends those that run and leaves the engine as it was.

        Args:
            prompts: A text, or a list of texts and of lists of token ids.
            params: One for all or one a prompt; None: `default_params`.
            use_tqdm: A progress bar, on a terminal.
            trajectory: Keep what every forward wrote in `metrics.trajectory`; slower, for each
                forward is then read by itself.

        Raises:
            ValueError: Every prompt is refused; the reason is the first one's.
        """
        make = functools.partial(self._request, stream=trajectory, denoise=trajectory)
        return self._run(make, _prompt_list(prompts), params, use_tqdm, trajectory)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answers to conversations, through the model's chat template; else as `generate`.

        Args:
            messages: One conversation, a list of {"role", "content"}, or a list of them.
            template_kwargs: As of `apply_template`, for every conversation.
        """
        make = functools.partial(self._chat_request, template_kwargs=template_kwargs)
        return self._run(make, _conversations(messages), params, use_tqdm)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        events: Literal["commit", "denoise"] = "commit",
    ) -> TextEvents:
        """Pieces of a text as they settle; leaving the loop ends the request.

        It is queued at once and runs while anything runs on this engine: streams may be read in
        turns, and `generate` be called in between.

        Args:
            events: "denoise" adds an event for each forward, with the provisional window.

        Raises:
            ValueError: The request can never run.
        """
        if events not in ("commit", "denoise"):
            raise ValueError(f'{events=} is not known; use "commit" or "denoise"')
        denoise = events == "denoise"
        request = self._request(prompt, params or self.default_params, stream=True, denoise=denoise)
        inbox = self.engine.inbox()
        inbox.add(request)
        return TextEvents(inbox, every=denoise)

    def infill(
        self,
        prefix: Prompt | Sequence[Prompt],
        suffix: Prompt | Sequence[Prompt] | None = None,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """What stands between two texts, or in the holes of one; else as `generate`.

        With a suffix `max_tokens` tokens are written between the two. A mask token in either, its
        text or its id, is one token to be written too; without a suffix these are all, and
        `max_tokens` is not looked at. What was given stays as it is.

        `outputs[0].text` goes from the first hole to the last one, and holds what was given between
        them: the whole text is what stands before the first hole, that, and what stands behind the
        last. It ends early at a stop id that was written, as every text does; `ignore_eos=True`
        fills the holes behind it as well.

        Args:
            prefix: A text or a list of token ids, or a list of such.
            suffix: Likewise, one for all or one a prefix.
            params: One for all or one a prefix; None: `default_params`.

        Raises:
            ValueError: The strategy does not see what follows a hole, or every text is refused: it
                has no hole, say, or does not fit the window.

        Example:
            >>> (output,) = llm.infill("The capital of ", " is Paris.", params)
            >>> (output,) = llm.infill("Ann has <|mask|><|mask|> pens and <|mask|> books.")
        """
        check_infills(self.strategy)
        prefixes = _texts(prefix)
        suffixes: list[Prompt | None] = [None] if suffix is None else [*_texts(suffix)]
        if len(suffixes) == 1:
            suffixes *= len(prefixes)
        if len(suffixes) != len(prefixes):
            raise ValueError(
                f"{len(suffixes)} suffixes for {len(prefixes)} prefixes; give one, or one a prefix"
            )
        asked = [_Ends(*ends) for ends in zip(prefixes, suffixes, strict=True)]
        return self._run(self._infill_request, asked, params, use_tqdm)

    def apply_template(self, conversation: Messages, **template_kwargs: Any) -> str:
        """A conversation as the text the model reads, up to where it answers.

        A folder without a chat template is read with its family's, and a warning names it.

        Args:
            template_kwargs: What the template reads beside the messages, as `enable_thinking=False`
                or `tools=[...]`; one that it does not read is refused. `chat_template` (Jinja, or
                the name of one of several) takes the place of the model's.

        Raises:
            ValueError: The model has no tokenizer or no template, or this is no conversation, or
                not one that the template takes.
        """
        text = chat.render(self.model, conversation, **template_kwargs)
        if "chat_template" not in template_kwargs and (told := chat.note(self.model)):
            warnings.warn(told, stacklevel=2)
        return text

    # --- from here on: how ----------------------------------------------------------------------

    def _request(self, prompt: Prompt, params: SamplingParams, **fields: Any) -> Request:
        text = prompt if isinstance(prompt, str) else None
        ids = self._ids(prompt, special=True)
        return Request(prompt_token_ids=ids, params=params, prompt=text, **fields)

    def _chat_request(
        self, conversation: Messages, params: SamplingParams, template_kwargs: Mapping[str, Any]
    ) -> Request:
        # The text holds the special tokens by name.
        text = self.apply_template(conversation, **template_kwargs)
        ids = self._ids(text, special=False)
        return Request(prompt_token_ids=ids, params=params, prompt=text)

    def _infill_request(self, ends: _Ends, params: SamplingParams) -> Request:
        prefix, suffix = ends
        text = holed_text(
            self.model,
            self.strategy,
            self._ids(prefix, special=True),
            0 if suffix is None else params.max_tokens,
            [] if suffix is None else self._ids(suffix, special=False),
        )
        return Request(
            prompt_token_ids=text.prompt,
            params=dataclasses.replace(params, max_tokens=text.num_holes),
            prompt=prefix if isinstance(prefix, str) else None,
            suffix_token_ids=text.suffix,
        )

    def _ids(self, prompt: Prompt, special: bool) -> list[int]:
        if not isinstance(prompt, str):
            return token_ids("the prompt", prompt)
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            raise ValueError(
                f"model {self.model.source!r} has no tokenizer to read text with; "
                "give lists of token ids"
            )
        return encode(tokenizer, prompt, special)

    def _run(
        self,
        make: Callable[[Any, SamplingParams], Request],
        asked: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        trajectory: bool = False,
    ) -> list[RequestOutput]:
        from tqdm import tqdm

        outputs: list[RequestOutput | None] = [None] * len(asked)
        where: dict[str, int] = {}
        refusals: list[Exception] = []
        with self.engine.inbox() as inbox:
            every = _params_list(self.default_params if params is None else params, len(asked))
            pairs = zip(asked, every, strict=True)
            for i, (prompt, one) in enumerate(pairs):
                try:
                    where[inbox.add(make(prompt, one))] = i
                except Exception as error:  # a tokenizer may raise anything
                    refusals.append(error)
                    outputs[i] = _refused(prompt, one, error)
            if not where:
                raise refusals[0]
            hidden = None if use_tqdm else True  # None: shown on a terminal
            with tqdm(total=len(asked), unit="prompt", leave=False, disable=hidden) as bar:
                bar.update(len(refusals))
                for output in _with_trajectories(inbox) if trajectory else inbox:
                    outputs[where[output.request_id]] = output
                    bar.update()
        return outputs  # type: ignore[return-value]


def _with_trajectories(inbox: Iterable[RequestOutput]) -> Iterator[RequestOutput]:
    """The last output of each request; what came before becomes its trajectory."""
    news: dict[str, News] = defaultdict(lambda: News(every=True))
    events: dict[str, list[StreamEvent]] = defaultdict(list)
    for output in inbox:
        request_id = output.request_id
        events[request_id] += news[request_id].of(output)
        if output.finished:
            metrics = dataclasses.replace(output.metrics, trajectory=tuple(events[request_id]))
            yield dataclasses.replace(output, metrics=metrics)


def _config(config: EngineConfig | None, **sizes: Any) -> EngineConfig:
    sizes = {name: size.item() if hasattr(size, "item") else size for name, size in sizes.items()}
    if config is None:
        return EngineConfig(**sizes)
    usual = EngineConfig()
    beside = [name for name, size in sizes.items() if size != getattr(usual, name)]
    if beside:
        raise ValueError(
            f"{', '.join(beside)} beside config, which has these sizes; set them there"
        )
    return config


def _model(model: Any, **how: Any) -> Model:
    if isinstance(model, str | os.PathLike):
        return load(model, **how)
    if not isinstance(model, Model):
        raise ValueError(
            f"model is a {type(model).__name__}; give what dj.load takes, or what it returns"
        )
    for name, value in how.items():
        if value not in ("auto", None):
            raise ValueError(
                f"{name}={value!r} is for a model that is loaded here; "
                f"use dj.load(..., {name}={value!r})"
            )
    return model


def _strategy(
    model: Model, strategy: Any, block_size: int | None, buffer_size: int | None, draft: Any
) -> Any:
    sizes = {"block_size": block_size, "buffer_size": buffer_size}
    given = {name: size for name, size in sizes.items() if size is not None}
    if not given:
        return resolve_strategy(model, strategy, draft)
    if strategy is None:
        strategy = usual_strategy(model, draft)
    if not isinstance(strategy, str) or ":" in strategy:
        raise ValueError(
            f"{', '.join(given)} go with a strategy given by name; set them on the strategy value"
        )
    return resolve_strategy(model, family_strategy(model, strategy, **given))


def _texts(given: Any) -> list[Prompt]:
    """One text, or one list of token ids, or several."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        return [given]
    return list(given) if any(not hasattr(one, "__index__") for one in given) else [given]


def _prompt_list(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not hasattr(prompts, "__iter__") or isinstance(prompts, bytes | Mapping):
        raise ValueError(
            f"prompts is a {type(prompts).__name__}; give a text, or a list of texts and of lists "
            "of token ids"
        )
    prompts = list(prompts)
    if not prompts:
        raise ValueError("prompts is empty; give at least one")
    if all(hasattr(one, "__index__") and not getattr(one, "ndim", 0) for one in prompts):
        raise ValueError("prompts is a flat list of token ids; wrap a single prompt in a list")
    return prompts


def _conversations(messages: Any) -> list[Messages]:
    if isinstance(messages, str | Mapping) or not hasattr(messages, "__iter__"):
        raise ValueError(
            f"messages is a {type(messages).__name__}; give a list of "
            '{"role": "user", "content": "..."}, or a list of such lists'
        )
    messages = list(messages)
    if not messages:
        raise ValueError("messages is empty; give at least one message")
    return [messages] if isinstance(messages[0], Mapping) else messages


def _params_list(params: Any, count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    every = list(params) if isinstance(params, Sequence) else [params]
    for one in every:
        if not isinstance(one, SamplingParams):
            raise ValueError(f"params holds a {type(one).__name__}; give SamplingParams")
    if len(every) != count:
        raise ValueError(f"{len(every)} params for {count} prompts; give one, or one a prompt")
    return every


def _refused(prompt: Any, params: SamplingParams, error: Exception) -> RequestOutput:
    empty = [CompletionOutput(i, "", [], "error") for i in range(params.n)]
    zero = Metrics(0, 0, 0, 0, 0.0, None, 0.0)
    said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    prompt = prompt.prefix if isinstance(prompt, _Ends) else prompt
    text = prompt if isinstance(prompt, str) else None
    return RequestOutput("", text, [], empty, True, zero, said)

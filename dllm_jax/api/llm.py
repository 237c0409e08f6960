"""`LLM`: a model, a strategy and an engine behind a few calls: generate, chat, stream, infill.

Data flow: what the user writes -> `Request`s -> an inbox of the engine -> outputs in the order of
the prompts.
"""

import contextlib
import dataclasses
import functools
import os
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeGuard

from dllm_jax.api.constraints import ConstraintReport, Constraints
from dllm_jax.api.questions import Answer, Question
from dllm_jax.api.snapshot import snapshot_saver
from dllm_jax.api.strategy import Source, bind_strategy, default_params
from dllm_jax.engine import checks
from dllm_jax.engine.inbox import News, SharedEngine, TextEvents
from dllm_jax.engine.layout import HOLE, EngineConfig
from dllm_jax.engine.requests import (
    MAX_SEED,
    CompletionOutput,
    Metrics,
    Request,
    RequestOutput,
    SamplingParams,
    StreamEvent,
)
from dllm_jax.loading import chat
from dllm_jax.loading.chat import Messages
from dllm_jax.loading.jax_settings import enable_compile_cache
from dllm_jax.loading.load import load, place, with_kv_cache
from dllm_jax.loading.model import Model
from dllm_jax.loading.tokenizer import encode
from dllm_jax.models.family_table import Family
from dllm_jax.models.kv_cache import KVCacheDType
from dllm_jax.models.quantization import Quantization
from dllm_jax.models.sharding import Split, over_devices
from dllm_jax.runner import buckets
from dllm_jax.runner.memory import MemoryPlan
from dllm_jax.runner.start import start
from dllm_jax.runner.worker import check_process
from dllm_jax.structured import Hole, Template

# A text, token ids, a conversation, or {"prompt": text} and {"prompt_token_ids": ids}.
Prompt = str | Sequence[int] | Messages | Mapping[str, Any]


class _Ends(NamedTuple):
    """The texts before and behind the tokens to write."""

    prefix: Prompt
    suffix: Prompt | None


@checks.known_fields(
    enforce_eager="warm_up",
    max_seq_len="max_model_len",
    num_gpu_blocks_override="num_pages",
    speculative_config="draft",
)
class LLM:
    """A model that answers many requests at once.

    Args:
        model: What `dj.load` takes, or a `Model`.
        strategy: A name, `"pkg.mod:Name"`, a value or a step function; None: the family's, and
            `dflash` for a model of `ar` with a draft.
        block_size, buffer_size: Of a strategy given by name or None.
        dtype, revision, lora, quantization, kv_cache_dtype, quantize_head, tokenizer, family: As in
            `dj.load`.
        max_num_seqs, max_model_len, page_size, memory_utilization, num_pages: As in `EngineConfig`.
        enable_prefix_caching, max_num_batched_tokens, batch_invariant: As in `EngineConfig`.
        tensor_parallel_size: Devices that share the model; a `Model` that was loaded onto a mesh
            stays there. After `jax.distributed.initialize` they are all devices of all processes:
            every process makes the same `LLM`, only process 0 returns from it, and the others work
            for it and exit with it (SystemExit).
        attention_implementation: Back end of attention, None for the best.
        draft: The model a speculative strategy drafts with.
        seed: The seed of requests that bring none.
        warm_up: Compile every program now; False: each when it is first needed.
        warm_up_constraints: Compile the programs of structured output now as well; None: on an
            accelerator. Otherwise the first request with a constraint waits while a thread compiles
            them; no other request does.
        calibrate: Time the programs, to plan rounds by the times; None: on an accelerator only.
        config: All sizes at once, instead of the arguments that are its fields.
        progress: Show a line while compiling (on a terminal), or a function of a program's name,
            programs compiled and programs in all.
        clock: The current time in seconds, for deadlines and metrics.
        gpu_memory_utilization: The same as `memory_utilization`.

    Raises:
        ValueError: Arguments that do not fit the model, or each other.
    """

    def __init__(
        self,
        model: Source = "builtin:tiny-sdar",
        strategy: Any = None,
        block_size: int | None = None,
        buffer_size: int | None = None,
        dtype: str = "auto",
        max_num_seqs: int = EngineConfig.max_num_seqs,
        max_model_len: int | None = EngineConfig.max_model_len,
        page_size: int = EngineConfig.page_size,
        memory_utilization: float = EngineConfig.memory_utilization,
        num_pages: int | None = EngineConfig.num_pages,
        enable_prefix_caching: bool = EngineConfig.enable_prefix_caching,
        tensor_parallel_size: int = 1,
        attention_implementation: str | None = None,
        draft: Source | None = None,
        seed: int = 0,
        *,
        revision: str | None = None,
        lora: str | os.PathLike[str] | None = None,
        quantization: Quantization | None = None,
        kv_cache_dtype: KVCacheDType = "auto",
        quantize_head: bool = False,
        tokenizer: str | os.PathLike[str] | None = None,
        family: Family | str | None = None,
        max_num_batched_tokens: int | None = EngineConfig.max_num_batched_tokens,
        batch_invariant: bool = EngineConfig.batch_invariant,
        warm_up: bool = True,
        warm_up_constraints: bool | None = False,
        calibrate: bool | None = None,
        config: EngineConfig | None = None,
        progress: bool | Callable[[str, int, int], None] = True,
        clock: Callable[[], float] = time.perf_counter,
        gpu_memory_utilization: float | None = None,
    ):
        check_process()
        if gpu_memory_utilization is not None:
            memory_utilization = gpu_memory_utilization
        fields = {field.name for field in dataclasses.fields(EngineConfig)}
        sizes = {name: value for name, value in locals().items() if name in fields}
        split = _split(tensor_parallel_size)
        seed = checks.whole_number("seed", seed, 0, MAX_SEED)
        if not isinstance(warm_up, bool):
            raise ValueError(f"warm_up={checks.short_repr(warm_up)} must be True or False")
        if not isinstance(warm_up_constraints, bool | None):
            said = checks.short_repr(warm_up_constraints)
            raise ValueError(f"warm_up_constraints={said} must be True, False or None")
        self.config = _config(config, sizes)
        self._is_advised = False
        enable_compile_cache()
        how = {"dtype": dtype, "revision": revision, "lora": lora, "quantization": quantization}
        how |= {"quantize_head": quantize_head, "tokenizer": tokenizer, "family": family}
        self.model = _model(model, split, kv_cache_dtype, **how)
        bound = bind_strategy(
            self.model, strategy, draft, block_size=block_size, buffer_size=buffer_size
        )
        self.strategy = bound.strategy
        device = start(
            self.model,
            self.strategy,
            bound.aux,
            self.config,
            attention_implementation,
            warm_up=warm_up,
            calibrate=calibrate,
            progress=_progress(progress) if warm_up else None,
            with_constraints=warm_up_constraints,
        )
        self.constraints = Constraints(self.model, self.strategy)
        self.engine = SharedEngine(
            device,
            self.model.tokenizer,
            seed=seed,
            clock=clock,
            prepare=self.constraints,
            save_snapshot=snapshot_saver(self.model, self.strategy, self.config, draft=bound.draft),
        )

    def __repr__(self) -> str:
        layout, strategy = self.engine.layout, self.strategy
        return (
            f"LLM({self.model.source!r}, {type(strategy).__name__}(block_size="
            f"{strategy.block_size}, buffer_size={strategy.buffer_size}), "
            f"max_num_seqs={layout.num_slots}, max_model_len={layout.max_model_len})"
        )

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """End running requests with "abort" and free the engine's memory on the device.

        Later calls raise RuntimeError. The weights stay until nothing refers to the model.
        """
        self.engine.close()

    @property
    def tokenizer(self) -> Any:
        """The model's transformers tokenizer; None for a model without one."""
        return self.model.tokenizer

    def get_tokenizer(self) -> Any:
        """`tokenizer`, as vLLM calls it."""
        return self.tokenizer

    @property
    def default_params(self) -> SamplingParams:
        """Sampling parameters of calls without any, see `api.strategy.default_params`."""
        return default_params(self.model, self.strategy)

    @property
    def memory(self) -> MemoryPlan:
        """The engine's memory on its device, and the predicted peak."""
        return self.engine.runner.memory

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        trajectory: bool = False,
    ) -> list[RequestOutput]:
        """Texts for prompts, in their order.

        A prompt that is refused or fails ends with "error" (`RequestOutput.error` says why) and
        the others continue. An interrupt aborts the running requests; the engine stays usable.

        Args:
            prompts: One or a list of: a text, {"prompt": text}, {"prompt_token_ids": ids}, a
                conversation as in `chat`; in a list also token ids. A text is sent as it is,
                without the chat template; `chat` or a conversation applies it.
            params: One for all or one a prompt; None: `default_params`. Also `sampling_params`.
            use_tqdm: A progress bar, on a terminal.
            trajectory: Keep what every forward wrote in `metrics.trajectory`; slower, because each
                forward is read by itself.

        Raises:
            ValueError: Every prompt is refused; the reason is the first one's.
        """
        make = functools.partial(self._request, stream=trajectory, denoise=trajectory)
        every = _prompt_list(prompts)
        self._advise(every)
        return self._run(make, every, _either(params, sampling_params), use_tqdm, trajectory)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answers to conversations, through the model's chat template; else as `generate`.

        Args:
            messages: One conversation, a list of {"role", "content"}, or a list of them.
            template_kwargs: As of `apply_template`, for every conversation.
        """
        make = functools.partial(self._chat_request, template_kwargs=template_kwargs)
        params = _either(params, sampling_params)
        return self._run(make, _conversations(messages), params, use_tqdm)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        events: Literal["commit", "denoise"] = "commit",
        sampling_params: SamplingParams | None = None,
    ) -> TextEvents:
        """Pieces of a text as they settle; leaving the loop ends the request.

        The request is queued at once and runs whenever the engine runs. Streams may be read in
        turns, with calls of `generate` in between.

        Args:
            events: "denoise" adds an event for each forward, with the provisional window.

        Raises:
            ValueError: The request can never run.
        """
        if events not in ("commit", "denoise"):
            raise ValueError(
                f'events={checks.short_repr(events)} is not known; use "commit" or "denoise"'
            )
        denoise = events == "denoise"
        self._advise([prompt])
        chosen = _either(params, sampling_params) or self.default_params
        request = self._request(prompt, chosen, stream=True, denoise=denoise)
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
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Write the text between two texts, or in the holes of one; otherwise as `generate`.

        With a suffix, `max_tokens` tokens are written between prefix and suffix. Each mask token in
        either, as text or as id, is one more token to write. Without a suffix these are all the
        holes, and `max_tokens` is ignored. Given tokens stay as they are.

        A prefix may also be a list of parts with `Hole`s among them: texts, and before the first
        text messages, which become a prompt. `Hole(n)` is n tokens. `Hole(constraint)` is any text
        that the constraint allows, of any length; parts and holes then form one constraint on the
        text from the first hole on, which every strategy that takes constraints keeps.

        `full_sequence` sees all that is given. Strategies of blocks see a cell's own block and
        those before it, and take what is given within their first window; a strategy of canvases
        within its first canvas.

        `outputs[0].text` spans the first hole to the last, given tokens included. It ends early at
        a stop id that was written; `ignore_eos=True` fills the holes behind it as well.

        Args:
            prefix: A text, a list of token ids, a conversation or a list of parts, or a list of
                such.
            suffix: Likewise, one for all or one a prefix.
            params: One for all or one a prefix; None: `default_params`.

        Raises:
            ValueError: The strategy does not see the text behind a hole, or every text is refused,
                for example because it has no hole or does not fit the window.

        Example:
            >>> (output,) = llm.infill("The capital of ", " is Paris.", params)
            >>> (output,) = llm.infill("Ann has <|mask|><|mask|> pens and <|mask|> books.")
            >>> (output,) = llm.infill(["Ann has ", Hole(Regex("[0-9]+")), " pens."])
        """
        prefixes = _texts(prefix)
        is_fixed = not all(_is_parts(one) and _is_template(one) for one in prefixes)
        if is_fixed and not self.strategy.needs.takes_given:
            raise ValueError(
                f"{type(self.strategy).__name__} does not see what stands behind a hole; use "
                'strategy="full_sequence", or holes of constraints'
            )
        suffixes: list[Prompt | None] = [None] if suffix is None else [*_texts(suffix)]
        if len(suffixes) == 1:
            suffixes *= len(prefixes)
        if len(suffixes) != len(prefixes):
            raise ValueError(
                f"{len(suffixes)} suffixes for {len(prefixes)} prefixes; give one, or one a prefix"
            )
        ends = [_Ends(*pair) for pair in zip(prefixes, suffixes, strict=True)]
        return self._run(self._infill_request, ends, _either(params, sampling_params), use_tqdm)

    def decide(
        self, context: str, questions: Sequence[Question], *, joint: bool = False
    ) -> list[Answer]:
        """Probabilities of the options of questions about a text, in one forward, without a cache.

        Args:
            questions: `Question.predicate`, `.choice` or `.score` of `dllm_jax.api.questions`; at
                most 64.
            joint: Ask all questions in one text, where each answer sees the other questions; else
                each is a text of its own, in one batch.

        Raises:
            ValueError: The model cannot answer them, or they are too long.

        Example:
            >>> (dup,) = llm.decide("I was charged twice.", [Question.predicate("Twice?")])
            >>> dup.value  # the probability of yes
        """
        from dllm_jax.api.decide import decide

        self.engine.check_process()
        run = self.engine.runner.read_labels
        return decide(self.model, context, questions, joint=joint, run=run)

    def constraint_report(self, constraint: Any) -> ConstraintReport:
        """What a constraint of `SamplingParams` costs; it is compiled and kept.

        Raises:
            ValueError: It cannot be compiled, or this model or strategy takes no constraint.
        """
        return self.constraints.report(constraint)

    def apply_template(self, conversation: Messages, **template_kwargs: Any) -> str:
        """A conversation as the text the model reads, up to where its answer begins.

        A folder without a chat template uses its family's, and a warning names it.

        Args:
            template_kwargs: Variables of the template, such as `enable_thinking=False` or
                `tools=[...]`; one that the template does not read is refused. `chat_template`
                (Jinja, or the name of one of several) replaces the model's.

        Raises:
            ValueError: The model has no tokenizer or no template, or the template does not take
                this conversation.
        """
        text = chat.render(self.model, conversation, **template_kwargs)
        self._note_template(template_kwargs)
        return text

    def _note_template(self, template_kwargs: Mapping[str, Any]) -> None:
        if "chat_template" not in template_kwargs and (note := chat.note(self.model)):
            warnings.warn(note, stacklevel=3)

    # --- requests -------------------------------------------------------------------------------

    def _request(self, prompt: Prompt, params: SamplingParams, **fields: Any) -> Request:
        if _is_conversation(prompt):
            text = self.apply_template(prompt)
            ids = self._ids(text, special=False)  # the text holds them by name
        else:
            given, text = _parts(prompt)
            ids = self._ids(given, special=True)
        return Request(prompt_token_ids=ids, params=params, prompt=text, **fields)

    def _chat_request(
        self, conversation: Messages, params: SamplingParams, template_kwargs: Mapping[str, Any]
    ) -> Request:
        encode = functools.partial(self._ids, special=False)  # the text holds them by name
        text, ids = chat.prompt(self.model, conversation, encode, **template_kwargs)
        self._note_template(template_kwargs)
        return Request(prompt_token_ids=ids, params=params, prompt=text)

    def _infill_request(self, ends: _Ends, params: SamplingParams) -> Request:
        prefix, suffix = ends
        if _is_parts(prefix):
            if suffix is not None:
                raise ValueError("a suffix beside a list of parts; make it the last part")
            return self._parts_request(prefix, params)
        request = self._request(prefix, params)
        gap = 0 if suffix is None else params.max_tokens
        if gap is None:
            raise ValueError("max_tokens=None beside a suffix; give the number of tokens to write")
        ids = [] if suffix is None else self._ids(suffix, special=False)
        return infill_request(self.model, self.strategy, request, gap, ids)

    def _parts_request(self, parts: Sequence[Any], params: SamplingParams) -> Request:
        """The request of a text in parts, some of which are holes."""
        first = next(i for i, one in enumerate(parts) if isinstance(one, str | Hole))
        messages, parts = [*parts[:first]], parts[first:]
        for one in parts:
            if not isinstance(one, str | Hole):
                raise ValueError(
                    f"a part is {checks.short_repr(one)}; give texts and Holes, and messages "
                    "before them"
                )
        head = next(i for i, one in enumerate(parts) if isinstance(one, Hole))
        before = self.apply_template(messages) if messages else ""
        prompt, behind = before + "".join(parts[:head]), parts[head:]
        ids = self._ids(prompt, special=not messages)  # a template writes them by name
        request = Request(prompt_token_ids=ids, params=params, prompt=prompt)
        if _is_template(behind):
            if params.constraint is not None:
                raise ValueError("a constraint beside holes of constraints; give it to a hole")
            each: list[Any] = [one.of if isinstance(one, Hole) else one for one in behind]
            held = dataclasses.replace(params, constraint=Template(tuple(each)))
            return dataclasses.replace(request, params=held)
        cells: list[int] = []
        for one in behind:
            if isinstance(one, str):
                cells += self._ids(one, special=False)
            elif isinstance(one.of, int):
                cells += [HOLE] * one.of
            else:
                raise ValueError(
                    "holes of so many tokens beside holes of constraints; use one kind in a text"
                )
        return infill_request(self.model, self.strategy, request, 0, cells)

    def _ids(self, prompt: Prompt, special: bool) -> list[int]:
        if not isinstance(prompt, str):
            return checks.token_ids("the prompt", prompt)
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            raise ValueError(
                f"model {self.model.source!r} has no tokenizer to read text with; "
                "give lists of token ids"
            )
        return encode(tokenizer, prompt, special)

    def _advise(self, prompts: Sequence[Any]) -> None:
        """Warn once of texts that a chat model gets without its template."""
        tokenizer = self.model.tokenizer
        texts = [one.get("prompt") if isinstance(one, Mapping) else one for one in prompts]
        texts = [text for text in texts if isinstance(text, str)]
        if self._is_advised or tokenizer is None or not texts:
            return
        if not (tokenizer.chat_template or chat.template_of(self.model)):
            return
        special = [token for token in tokenizer.get_added_vocab() if token.strip()]
        if all(any(token in text for token in special) for text in texts):
            return
        self._is_advised = True
        warnings.warn(
            f"{self.model.source} is a chat model, and a text goes to it as it is, without the "
            "chat template; use llm.chat, give messages, or llm.apply_template(messages)",
            stacklevel=3,
        )

    def _run(
        self,
        make: Callable[[Any, SamplingParams], Request],
        prompts: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        trajectory: bool = False,
    ) -> list[RequestOutput]:
        outputs: list[RequestOutput | None] = [None] * len(prompts)
        where: dict[str, int] = {}
        refusals: list[BaseException] = []
        with self.engine.inbox() as inbox:
            every = _params_list(self.default_params if params is None else params, len(prompts))
            for i, (prompt, one) in enumerate(zip(prompts, every, strict=True)):
                try:
                    where[inbox.add(make(prompt, one))] = i
                except BaseException as error:  # a tokenizer may raise anything
                    checks.raise_exit(error)
                    refusals.append(error)
                    outputs[i] = _refused(prompt, one, error)
            if refusals and not where:
                raise refusals[0]
            with _progress_bar(len(prompts)) if use_tqdm else contextlib.nullcontext() as bar:
                if bar is not None:
                    bar.update(len(refusals))
                for output in _with_trajectories(inbox) if trajectory else inbox:
                    outputs[where[output.request_id]] = output
                    if bar is not None:
                        bar.update()
        return outputs  # type: ignore[return-value]


def _progress_bar(count: int) -> Any:
    """A bar of prompts that are done, on a terminal."""
    from tqdm import tqdm

    return tqdm(total=count, unit="prompt", leave=False, disable=None)


def _with_trajectories(inbox: Iterable[RequestOutput]) -> Iterator[RequestOutput]:
    """The last output of each request, with the earlier ones as its trajectory."""
    news: dict[str, News] = defaultdict(lambda: News(every=True))
    events: dict[str, list[StreamEvent]] = defaultdict(list)
    for output in inbox:
        request_id = output.request_id
        events[request_id] += news[request_id].of(output)
        if output.finished:
            metrics = dataclasses.replace(output.metrics, trajectory=tuple(events[request_id]))
            yield dataclasses.replace(output, metrics=metrics)


def infill_request(
    model: Model, strategy: Any, request: Request, gap: int, suffix: Sequence[int]
) -> Request:
    """The request whose prompt is followed by `gap` holes and a suffix.

    A mask token in the prompt or the suffix is a hole as well. The new prompt ends at the first
    hole, `max_tokens` counts the holes there, and the suffix is the rest.

    Raises:
        ValueError: There is no hole, or the text does not fit the model or the strategy's window.
    """
    mask, most = model.config.mask_token_id, model.config.max_position
    text = [*request.prompt_token_ids, *[mask] * gap, *suffix]
    total, window = len(text), strategy.block_size * strategy.buffer_size
    in_window = strategy.needs.prompt.in_window  # else the engine checks what is behind the prompt
    if total > most:
        raise ValueError(
            f"prefix, holes and suffix are {total} tokens, {model.source} takes {most}; "
            "shorten them or lower max_tokens"
        )
    if in_window and total > window:
        raise ValueError(
            f"prefix, holes and suffix are {total} tokens, the window has {window}; "
            f"use buffer_size={-(-total // strategy.block_size)} or lower max_tokens"
        )
    cells = [HOLE if token in (mask, HOLE) else token for token in text]
    if HOLE not in cells:
        raise ValueError(f"the text has no hole; {_how_to_ask(model)}")
    first = cells.index(HOLE)
    end = next((i for i in range(first, total) if cells[i] != HOLE), total)
    return dataclasses.replace(
        request,
        prompt_token_ids=cells[:first],
        params=dataclasses.replace(request.params, max_tokens=end - first),
        suffix_token_ids=cells[end:],
    )


def _how_to_ask(model: Model) -> str:
    """The remedy for a text without a hole."""
    mask, tokenizer = model.config.mask_token_id, model.tokenizer
    if mask < 0:
        return "the model has no mask token, so give a suffix"
    text = None if tokenizer is None else tokenizer.decode([mask])
    if text and encode(tokenizer, text, special=False) == [mask]:
        return f"write {text} for each token to fill in, or give a suffix"
    why = "" if tokenizer is None else "its tokenizer has no mask token: "
    return f"{why}give token ids with {mask} as holes, or a suffix"


# --- arguments ---------------------------------------------------------------------------------


def _progress(
    progress: bool | Callable[[str, int, int], None],
) -> Callable[[str, int, int], None] | None:
    if callable(progress):
        return progress
    return buckets.progress_line() if progress else None


def _config(config: EngineConfig | None, sizes: Mapping[str, Any]) -> EngineConfig:
    sizes = {name: size.item() if hasattr(size, "item") else size for name, size in sizes.items()}
    if config is None:
        return EngineConfig(**sizes)
    if not isinstance(config, EngineConfig):
        raise ValueError(f"config has type {type(config).__name__}; give an EngineConfig")
    usual = EngineConfig()
    beside = [name for name, size in sizes.items() if size != getattr(usual, name)]
    if beside:
        raise ValueError(
            f"{', '.join(beside)} beside config, which has these sizes; set them there"
        )
    return config


def _split(count: Any) -> Split | None:
    count = checks.whole_number("tensor_parallel_size", count)
    return None if count == 1 else over_devices(count)


def _model(model: Any, split: Split | None, kv_cache_dtype: KVCacheDType, **how: Any) -> Model:
    if isinstance(model, str | os.PathLike):
        return load(model, **how, mesh=split, kv_cache_dtype=kv_cache_dtype)
    if not isinstance(model, Model):
        raise ValueError(
            f"model has type {type(model).__name__}; give what dj.load takes, or what it returns"
        )
    for name, value in how.items():
        if value not in ("auto", None, False):
            raise ValueError(
                f"{name}={checks.short_repr(value)} is for a model that is loaded here; "
                "give it to dj.load"
            )
    if model.split is not None and model.split.batch:
        raise ValueError(
            f"the model's mesh splits rows along {model.split.batch!r}, an engine does not; load "
            "it without batch=, and start a process for each replica"
        )
    return with_kv_cache(model if split is None else place(model, split), kv_cache_dtype)


def _is_conversation(given: Any) -> TypeGuard[Messages]:
    """Whether it is a list of messages."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        return False
    return bool(given) and all(isinstance(one, Mapping) and "role" in one for one in given)


def _is_parts(given: Any) -> TypeGuard[Sequence[Any]]:
    """Whether it is a text in parts, with holes among them."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        return False
    return any(isinstance(one, Hole) for one in given)


def _is_template(parts: Sequence[Any]) -> bool:
    """Whether all holes of a text in parts are constraints."""
    return not any(isinstance(one, Hole) and isinstance(one.of, int) for one in parts)


def _parts(prompt: Any) -> tuple[Any, str | None]:
    """What a prompt is made of, and its text if it has one."""
    if not isinstance(prompt, Mapping):
        return prompt, prompt if isinstance(prompt, str) else None
    for name in prompt.keys() - {"prompt", "prompt_token_ids"}:
        raise ValueError(
            f"a prompt has no field {checks.short_repr(name)}; give prompt or prompt_token_ids"
        )
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is None and ids is None:
        raise ValueError(
            f"the prompt is {checks.short_repr(dict(prompt))}; give it prompt or prompt_token_ids"
        )
    return text if ids is None else ids, text


def _either(params: Any, sampling_params: Any) -> Any:
    if params is not None and sampling_params is not None:
        raise TypeError("params and sampling_params are the same; give one of them")
    return params if sampling_params is None else sampling_params


def _texts(given: Any) -> list[Prompt]:
    """A list of prompts, from one or several."""
    if _is_conversation(given) or isinstance(given, str) or not isinstance(given, Sequence):
        return [given]
    if _is_parts(given):
        return [given]
    return list(given) if any(not hasattr(one, "__index__") for one in given) else [given]


def _prompt_list(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str | Mapping) or _is_conversation(prompts):
        return [prompts]
    if not hasattr(prompts, "__iter__") or isinstance(prompts, bytes):
        raise ValueError(
            f"prompts has type {type(prompts).__name__}; give a text, or a list of texts and of "
            "lists of token ids"
        )
    prompts = list(prompts)
    if prompts and all(
        hasattr(one, "__index__") and not getattr(one, "ndim", 0) for one in prompts
    ):
        raise ValueError("prompts is a flat list of token ids; wrap a single prompt in a list")
    return prompts


def _conversations(messages: Any) -> list[Messages]:
    if isinstance(messages, str | Mapping) or not hasattr(messages, "__iter__"):
        raise ValueError(
            f"messages has type {type(messages).__name__}; give a list of "
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
            raise ValueError(
                f"params holds a value of type {type(one).__name__}; give SamplingParams"
            )
    if len(every) != count:
        raise ValueError(f"{len(every)} params for {count} prompts; give one, or one a prompt")
    return every


def _refused(prompt: Any, params: SamplingParams, error: BaseException) -> RequestOutput:
    empty = [CompletionOutput(i, "", [], "error") for i in range(params.n)]
    zero = Metrics(0, 0, 0, 0, 0.0, None, 0.0)
    reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    prompt = prompt.prefix if isinstance(prompt, _Ends) else prompt
    prompt = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    text = prompt if isinstance(prompt, str) else None
    return RequestOutput("", text, [], empty, True, zero, reason)

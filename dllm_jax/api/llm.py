"""`LLM`: a model, a strategy and an engine in a few calls: generate, chat, stream, infill.

Data flow: what the user writes -> `Request`s (`prompts`, `infill`) -> the engine -> outputs.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from dllm_jax.api import infill
from dllm_jax.api.arguments import (
    OF_CONFIG,
    OF_LOAD,
    Progress,
    engine_config,
    model_of,
    progress_of,
)
from dllm_jax.api.calls import turns_of
from dllm_jax.api.constraints import ConstraintReport, Constraints
from dllm_jax.api.decide import decide
from dllm_jax.api.drafts import Source
from dllm_jax.api.prompts import (
    Prompt,
    advised,
    each_conversation,
    each_prompt,
    either,
    rendered,
    request_of,
    run,
)
from dllm_jax.api.questions import Answer, Question
from dllm_jax.api.snapshot import snapshot_saver
from dllm_jax.api.strategy import bind_strategy, default_params
from dllm_jax.compile.start import start
from dllm_jax.engine import checks
from dllm_jax.engine.inbox import SharedEngine, TextEvents
from dllm_jax.engine.layout import EngineConfig
from dllm_jax.engine.requests import RequestOutput, SamplingParams
from dllm_jax.engine.rules import NUMBERS
from dllm_jax.loading.chat import Messages
from dllm_jax.loading.jax_settings import enable_compile_cache
from dllm_jax.runner.memory import MemoryPlan
from dllm_jax.runner.worker import check_process
from dllm_jax.scoring.one_rounding import Rounding, rounding_of


@checks.known_fields(
    *OF_LOAD.values(),
    *OF_CONFIG.values(),
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
        enable_prefix_caching, max_num_batched_tokens, batch_invariant, logprobs: As there.
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
        warm_up: bool = True,
        warm_up_constraints: bool | None = False,
        calibrate: bool | None = None,
        config: EngineConfig | None = None,
        progress: bool | Progress = True,
        clock: Callable[[], float] = time.perf_counter,
        gpu_memory_utilization: float | None = None,
        **passed_on: Any,
    ):
        check_process()
        if gpu_memory_utilization is not None:
            memory_utilization = gpu_memory_utilization
        sizes = {
            "max_num_seqs": max_num_seqs,
            "max_model_len": max_model_len,
            "page_size": page_size,
            "memory_utilization": memory_utilization,
            "num_pages": num_pages,
            "enable_prefix_caching": enable_prefix_caching,
            **{name: passed_on.pop(name) for name in OF_CONFIG if name in passed_on},
        }
        seed = NUMBERS["seed"].check("seed", seed)
        checks.boolean("warm_up", warm_up)
        if not isinstance(warm_up_constraints, bool | None):
            said = checks.short_repr(warm_up_constraints)
            raise ValueError(f"warm_up_constraints={said} must be True, False or None")
        self.config = engine_config(config, sizes)
        self._is_advised = False
        enable_compile_cache()
        self.model = model_of(model, tensor_parallel_size, dtype=dtype, **passed_on)
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
            progress=progress_of(progress) if warm_up else None,
            with_constraints=warm_up_constraints,
        )
        self.constraints = Constraints(self.model, self.strategy, device.layout.max_model_len)
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

    @property
    def rounding(self) -> Rounding:
        """How the engine divides its sums, for `Model.logits`; ValueError if in no fixed way."""
        return rounding_of(self.engine.layout)

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
                forward is read on its own.

        Raises:
            ValueError: Every prompt is refused; the reason is the first one's.
        """
        every = each_prompt(prompts)
        self._is_advised = self._is_advised or advised(self.model, every)
        make = functools.partial(request_of, self.model, stream=trajectory, denoise=trajectory)
        return run(self, make, every, either(params, sampling_params), use_tqdm, trajectory)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        tools: Sequence[Any] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
        tool_format: str | None = None,
        thinking_token_budget: int | None = None,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answers to conversations, through the model's chat template; else as `generate`.

        With tools, `outputs[0].message` holds the calls, each held to the schema of its tool.

        Args:
            messages: One conversation, a list of {"role", "content"}, or a list of them.
            tools: Functions with types and docstrings, or in OpenAI's form (docs/agents.md).
            tool_choice: "auto" (None), "required", "none", or the one to call, in OpenAI's form.
            parallel_tool_calls: Whether several calls may follow one another; None: True.
            tool_format: A form (docs/agents.md) for a model whose template has no tools, as
                "hermes": they stand in its texts.
            thinking_token_budget: Tokens by which an answer's thoughts have ended.
            template_kwargs: As of `apply_template`, for every conversation.
        """
        params, every = either(params, sampling_params), each_conversation(messages)
        asked = tools, tool_choice, parallel_tool_calls, tool_format, template_kwargs
        if (turns := turns_of(self, *asked, thinking_token_budget)) is not None:
            return turns.run(every, params, use_tqdm)
        make = functools.partial(request_of, self.model, template_kwargs=template_kwargs)
        return run(self, make, every, params, use_tqdm)

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
            said = checks.short_repr(events)
            raise ValueError(f'events={said} is not known; use "commit" or "denoise"')
        denoise = events == "denoise"
        self._is_advised = self._is_advised or advised(self.model, [prompt])
        chosen = either(params, sampling_params) or self.default_params
        inbox = self.engine.inbox()
        inbox.add(request_of(self.model, prompt, chosen, stream=True, denoise=denoise))
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
        a stop id that was written; `ignore_eos=True` fills the holes after it as well.

        Args:
            prefix: A text, token ids, a conversation or a list of parts, or a list of such.
            suffix: Likewise, one for all or one a prefix.
            params: One for all or one a prefix; None: `default_params`.

        Raises:
            ValueError: The strategy does not see the text after a hole, or every text is refused,
                for example because it has no hole or does not fit the window.

        Example:
            >>> (output,) = llm.infill("The capital of ", " is Paris.", params)
            >>> (output,) = llm.infill("Ann has <|mask|><|mask|> pens and <|mask|> books.")
            >>> (output,) = llm.infill(["Ann has ", Hole(Regex("[0-9]+")), " pens."])
        """
        ends = infill.pairs(self.strategy, prefix, suffix)
        make = functools.partial(infill.request_of, self.model, self.strategy)
        return run(self, make, ends, either(params, sampling_params), use_tqdm)

    def decide(
        self, context: str, questions: Sequence[Question], *, joint: bool = False
    ) -> list[Answer]:
        """Probabilities of the options of questions about a text, in one forward, without a cache.

        Args:
            questions: At most 64 `Question.predicate`, `.choice` or `.score` of `api.questions`.
            joint: Ask all questions in one text, where each answer sees the other questions; else
                each is a text of its own, in one batch.

        Raises:
            ValueError: The model cannot answer them, or they are too long.

        Example:
            >>> (dup,) = llm.decide("I was charged twice.", [Question.predicate("Twice?")])
            >>> dup.value  # the probability of yes
        """
        self.engine.check_process()
        run = self.engine.runner.read_labels
        return decide(self.model, context, questions, joint=joint, run=run)

    def constraint_report(self, constraint: Any) -> ConstraintReport:
        """The cost of a constraint of `SamplingParams`, which is compiled and kept.

        Raises:
            ValueError: It cannot be compiled, or this model or strategy takes no constraint.
        """
        return self.constraints.report(constraint)

    def apply_template(self, conversation: Messages, **template_kwargs: Any) -> str:
        """A conversation as the text the model reads, up to where its answer begins.

        A folder without a chat template uses its family's, and a warning names it.

        Args:
            template_kwargs: Variables of the template, such as `enable_thinking=False`; one that it
                does not read is refused. `chat_template` (Jinja, or a name) replaces the model's.

        Raises:
            ValueError: No tokenizer, no template, or one that does not take this conversation.
        """
        return rendered(self.model, conversation, **template_kwargs)

"""`python -m dllm_jax.lm_eval`: the command of lm-evaluation-harness with `dj.LLM` as a model.

The released harness finds models in a table of its own and reads no entry points, so this module
registers the model `dllm-jax` and then hands the command line on. Tasks that generate go through
the engine, all requests at once; likelihoods are those of `Model.log_likelihood`.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from dllm_jax.api.llm import LLM
from dllm_jax.cli.errors import fitted, one_line
from dllm_jax.engine.layout import SamplingNumbers
from dllm_jax.engine.requests import SamplingParams
from dllm_jax.loading.tokenizer import encode
from dllm_jax.scoring.likelihood import BUDGET, LogLikelihood, Method

try:
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError(
        f"dllm_jax.lm_eval needs lm-evaluation-harness ({error}); pip install 'lm-eval>=0.4.9'"
    ) from error

NAME = "dllm-jax"
MOST_TOKENS = 256  # of an answer, where the task does not say
_SAMPLING = (*SamplingNumbers._fields, "seed")
# Arguments of other engines at the values that ask for nothing.
_NEUTRAL = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "n", "best_of"), 1),
    **dict.fromkeys(("length_penalty", "repetition_penalty", "typical_p"), 1),
    **dict.fromkeys(("encoder_repetition_penalty", "spaces_between_special_tokens"), 1),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_p"), 0),
    **dict.fromkeys(("diversity_penalty", "presence_penalty", "frequency_penalty"), 0),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "penalty_alpha", "early_stopping"), 0),
    **dict.fromkeys(("min_length", "min_new_tokens", "min_tokens", "ignore_eos"), 0),
    **dict.fromkeys(("use_cache", "skip_special_tokens"), 1),
}


@register_model(NAME)
class DllmLM(TemplateLM):
    """A model of the harness that `dj.LLM` answers for.

    Args:
        model: As `dj.LLM` takes it; `pretrained` is the same.
        batch_size, max_batch_size, device: Ignored. The harness always sends some; the engine fills
            its slots (`max_num_seqs`) itself, and JAX chooses the device.
        enable_thinking: Of the chat template, where it reads that; None: its default.
        chat_template_args: What else the chat template reads besides the messages.
        likelihood, budget: `method` and `budget` of `Model.log_likelihood`, for tasks that choose
            among answers or measure perplexity. By "elbo" no answer counts as greedy.
        sizes: All else that `dj.LLM` takes, such as `strategy` or `max_num_seqs`.
    """

    def __init__(
        self,
        model: str | None = None,
        pretrained: str | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: str | None = None,
        likelihood: Method = "chain",
        budget: int = BUDGET,
        enable_thinking: bool | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        **sizes: Any,
    ):
        super().__init__()
        if model is not None and pretrained is not None:
            raise ValueError("model and pretrained are the same; give one of them")
        del batch_size, max_batch_size, device
        self.llm = LLM(model or pretrained or "builtin:tiny-sdar", **sizes)
        if self.llm.tokenizer is None:
            raise ValueError(
                f"model {self.llm.model.source!r} has no tokenizer; give a folder that holds its "
                "tokenizer.json"
            )
        self.tokenizer = self.llm.tokenizer
        self._how: Any = {"method": likelihood, "budget": budget}
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._template: dict[str, Any] = {**(chat_template_args or {}), **thinking}
        self._is_chat = False  # the prompts come from a chat template, with its special tokens

    @property
    def eot_token_id(self) -> int:
        """The first id that ends a text."""
        return self.llm.model.defaults.stop_token_ids[0]

    @property
    def tokenizer_name(self) -> str:
        """Keeps the harness's stored requests of different models apart."""
        return self.llm.model.source.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Ids of a text."""
        special = not self._is_chat if add_special_tokens is None else add_special_tokens
        return encode(self.tokenizer, string, special)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as the text the model reads.

        Without `add_generation_prompt` its last message is the beginning of the answer, the task's
        `gen_prefix`, and the text ends there.
        """
        self._is_chat = True
        goes_on = {} if add_generation_prompt else {"continue_final_message": True}
        return self.llm.apply_template(chat_history, **goes_on, **self._template)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts up to each request's stop strings, in the order of the requests.

        A prompt that leaves no room for its answer loses its beginning, as in the harness's models.
        """
        params = [sampling_params(request.args[1]) for request in requests]
        most = self.llm.engine.layout.max_model_len
        prompts = []
        for request, one in zip(requests, params, strict=True):
            room = most - (one.max_tokens or 0)
            if room < 1:
                raise ValueError(
                    f"max_gen_toks={one.max_tokens} leaves no room for a prompt within "
                    f"max_model_len={most}; lower it with --gen_kwargs"
                )
            prompts.append({"prompt_token_ids": self.tok_encode(request.args[0])[-room:]})
        outputs = self.llm.generate(prompts, params, use_tqdm=not disable_tqdm)
        texts = []
        for request, output in zip(requests, outputs, strict=True):
            if output.error is not None:
                raise RuntimeError(f"request {output.request_id} failed: {output.error}")
            texts.append(output.outputs[0].text)
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-probability of each whole text, in nats, as perplexity tasks ask.

        A text is cut into pieces of the most tokens that the model takes. Each piece is read after
        the last token of the one before it, the first after the end token.
        """
        pieces = []
        size = self.llm.model.config.max_position - 1
        for request in requests:
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            before = [self.prefix_token_id, *ids]
            pieces.append([([before[at]], ids[at : at + size]) for at in range(0, len(ids), size)])
        flat = [pair for of_text in pieces for pair in of_text]
        values = iter([one.value for one in self._likelihoods(flat, disable_tqdm)])
        found = [sum(next(values) for _ in of_text) for of_text in pieces]
        for request, value in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Nats of each continuation after its context, and whether it is the greedy one.

        A context that leaves no room loses its beginning.
        """
        del kwargs
        most = self.llm.model.config.max_position
        pairs = [(before[-max(most - len(after), 1) :], after) for _, before, after in requests]
        found = []
        for request, one in zip(requests, self._likelihoods(pairs, disable_tqdm), strict=True):
            found.append((one.value, bool(one.is_greedy)))
            self.cache_hook.add_partial("loglikelihood", request[0], found[-1])
        return found

    def _likelihoods(
        self, pairs: Sequence[tuple[list[int], list[int]]], is_quiet: bool
    ) -> list[LogLikelihood]:
        """By `Model.log_likelihood`, the pairs of one context together."""
        from tqdm import tqdm

        members: dict[tuple[int, ...], list[int]] = {}
        for number, (before, _) in enumerate(pairs):
            members.setdefault(tuple(before), []).append(number)
        found: dict[int, LogLikelihood] = {}
        with tqdm(total=len(pairs), desc="likelihoods", disable=is_quiet or None) as bar:
            for before, numbers in members.items():
                after = [pairs[number][1] for number in numbers]
                values = self.llm.model.log_likelihood(before, after, **self._how)
                found |= zip(numbers, values, strict=True)
                bar.update(len(numbers))
        return [found[number] for number in range(len(pairs))]


def sampling_params(given: Mapping[str, Any]) -> SamplingParams:
    """The harness's settings of one generation as `SamplingParams`; greedy unless it samples.

    Raises:
        ValueError: A setting has no equivalent here.
    """
    left = dict(given)
    until = left.pop("until", None) or ()
    fields: dict[str, Any] = {"stop": (until,) if isinstance(until, str) else tuple(until)}
    lengths = [left.pop(name, None) for name in ("max_gen_toks", "max_new_tokens", "max_tokens")]
    fields["max_tokens"] = next((n for n in lengths if n is not None), MOST_TOKENS)
    samples = left.pop("do_sample", "temperature" in left)
    fields |= {name: left.pop(name) for name in _SAMPLING if left.get(name) is not None}
    if not samples:
        fields["temperature"] = 0.0
    elif "temperature" not in fields:
        fields["temperature"] = 1.0
    if unknown := [
        name for name, value in left.items() if value is not None and value != _NEUTRAL.get(name)
    ]:
        raise ValueError(
            f"generation argument {unknown[0]!r} is not supported; use until, max_gen_toks, "
            f"do_sample, {', '.join(_SAMPLING)}"
        )
    fields["stop"] = tuple(text for text in fields["stop"] if text)
    return SamplingParams(**fields)


def main(argv: Sequence[str]) -> None:
    """The harness's command line, with our model where none is named."""
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

    words = [*argv]
    if words[:1] == ["run"]:
        words = words[1:]
    is_named = any(word.split("=")[0] in ("--model", "-M") for word in words)
    if words and words[0] not in ("ls", "validate", "-h", "--help"):
        words = ["run", *([] if is_named else ["--model", NAME]), *words]
    sys.argv = ["lm_eval", *words]
    try:
        cli_evaluate()
    except (ValueError, OSError, NotImplementedError, RuntimeError) as error:
        sys.exit(f"error: {fitted(one_line(error))}")


if __name__ == "__main__":
    main(sys.argv[1:])

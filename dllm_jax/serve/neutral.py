"""Fields that are taken and change nothing, and what is said of those that are not supported."""

from typing import Any


class Anything:
    """A field that changes nothing, whatever its value."""


ANY = Anything()
Neutral = tuple[Any, ...] | Anything

# Fields that are not read, and the values at which they would change nothing; null always is one.
NEUTRAL: dict[str, Neutral] = {
    "best_of": (1,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "echo": (False,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "bad_words": ([],),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": ANY,
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "include_reasoning": (True,),
    "return_hidden_states": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "watermarking": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "chat_template": (),
    "documents": (),
    "reasoning_effort": (),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "truncate_prompt_tokens": (),
    "thinking": (),
    "prompt_embeds": (),
    "lora_path": (),
    "kv_transfer_params": (),
}
# What the tokenizer puts around a prompt: a text gets it, a rendered conversation holds it already.
SPECIAL_TOKENS = "add_special_tokens"
# Said by clients for their own sake; never read.
IGNORED = frozenset(
    {
        *("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
        *("prompt_cache_options", "session_id", "request_id", "verbosity"),
        *("cache_control", "cache_salt"),
    }
)
_GUIDED = "use structured_outputs: {{{}: ...}}"
_TOOLS = "tools are called in /v1/chat/completions alone; leave it out"
_FUNCTIONS = "use tools"
_PENALTY = (
    "a penalty is of the tokens before, and here the tokens of a window are drawn together; leave "
    "it out (max_repetition_run ends a run)"
)
# Remedies where "leave it out" is not all there is to say.
REMEDIES = {
    "guided_json": _GUIDED.format("json"),
    "guided_regex": _GUIDED.format("regex"),
    "guided_choice": _GUIDED.format("choice"),
    "guided_grammar": "grammars are not supported; use structured_outputs with a regex or a schema",
    "tools": _TOOLS,
    "functions": _FUNCTIONS,
    "tool_choice": _TOOLS,
    "function_call": _FUNCTIONS,
    "top_logprobs": "give logprobs as the number of likeliest tokens",
    "prompt_logprobs": "the prompt has no log-probabilities; leave it out",
    "echo": "the prompt is not repeated and has no log-probabilities here; leave it out",
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": _PENALTY,
    "min_p": "thresholds are of the law without it; use top_p or top_k",
    "bad_words": "only ids are banned; give logit_bias with -100 for them",
    "best_of": "candidates are not ranked; use n",
    "chat_template": "a caller's template is not run; the model's own is used",
    "thinking": "give what the chat template reads as chat_template_kwargs",
    "truncate_prompt_tokens": "prompts are not cut; shorten the prompt",
    "continue_final_message": "answers start anew; leave it out",
}
# Of a message and of its parts. Clients echo an answer with all of its fields, and proxies add
# hints for caches.
_HINTS: dict[str, Neutral] = {"id": ANY, "annotations": ANY, "cache_control": ANY}
TURN_NEUTRAL: dict[str, Neutral] = {
    **_HINTS,
    "refusal": ("",),
    "function_call": (),
    "audio": (),
    "reasoning_details": ANY,
    "provider_specific_fields": ANY,
    "type": ("message",),  # of an input item of /v1/decisions
    "status": ("completed",),
}
PART_NEUTRAL: dict[str, Neutral] = {**_HINTS, "logprobs": ([],)}
PART_ONLY = "only text parts are read; nothing is fetched or decoded"


def changes_nothing(value: Any, neutral: Neutral) -> bool:
    """Whether a value of a field that is not read asks for nothing."""
    if isinstance(neutral, Anything):
        return True
    return any(isinstance(value, bool) is isinstance(one, bool) and value == one for one in neutral)

"""Are all calls of tools valid, and is prose the same with tools as without?

    python benchmarks/tools_held.py drawn --sets 500 --output held.json
    python benchmarks/tools_held.py calls --sets 96 --output held.json
    python benchmarks/tools_held.py prose --problems 2048 --output held.json

`drawn`: random tools, one call a text, in every form of a template; the texts are drawn from the
grammar without a model, half of them where marks are tokens. `jsonschema` judges the arguments.
`calls`: the same, written by each strategy at three temperatures. The twin goes on from the same
begun call without a grammar.
`prose`: word problems with tools offered under `auto`, and the same prompts without a grammar; how
many have the same tokens and the same number of forwards. Each strategy writes with the built-in
model that it fits, or with a small one of its family with random weights. A row of an earlier run
with the same strategy, form and seed is replaced in the file.
"""

import argparse
import dataclasses
import json
import random
import time
from pathlib import Path

TEMPERATURES = (0.0, 0.7, 1.5)
ROOM = 256  # tokens of a text
TINY, QWEN = "builtin:tiny-sdar", "builtin:tiny-qwen3"
STRATEGIES = {  # with their models
    **dict.fromkeys(("multi_bd", "block_diffusion", "d2f", "dmax", "edit"), TINY),
    **dict.fromkeys(("full_sequence", "entropy_blocks"), TINY),
    **dict.fromkeys(("ar", "dflash"), QWEN),
    "fast_dllm_v2": "Efficient-Large-Model/Fast_dLLM_v2_1.5B",
    "diffusion_gemma": "google/diffusiongemma-26B-A4B-it",
}
SMALL = {  # fields of a published config, made small
    **{"vocab_size": 768, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16},
    **{"num_global_key_value_heads": 2, "num_experts": 4, "top_k_experts": 2},
    **{"moe_intermediate_size": 32, "mask_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    **{"bos_token_id": 2, "max_position_embeddings": 512, "canvas_length": 128},
    **{"boi_token_id": 9, "eoi_token_id": 9, "image_token_id": 9},
}
VALUES = (
    {"type": "string", "maxLength": 12},
    {"type": "string", "pattern": "^[a-z]{2,8}$"},
    {"type": "string"},
    {"type": "integer", "minimum": -3, "maximum": 400},
    {"type": "number"},
    {"type": "boolean"},
    {"enum": ["red", 'qu"ote', 7, None]},
    {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    {"type": ["string", "null"], "maxLength": 8},
    {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "A": {"type": "string", "maxLength": 4}},
        "required": ["x"],
        "additionalProperties": False,
    },
)


def random_tools(draw: random.Random) -> tuple:
    """One tool or two whose names begin alike."""
    from dllm_jax.structured import Tool

    made = []
    for i in range(draw.choice((1, 2))):
        names = [f"{draw.choice(('id', 'é', 'a-b', 'Key'))}{j}" for j in range(draw.randint(0, 2))]
        schema = {
            "type": "object",
            "properties": {name: draw.choice(VALUES) for name in names},
            "required": [name for name in names if draw.random() < 0.6],
            "additionalProperties": False,
        }
        made.append(Tool("tool" + "_x" * i, json.dumps(schema)))
    return tuple(made)


def small(name: str):
    """A small model of a published family, with random weights and the built-in tokenizer."""
    import dllm_jax as dj
    from dllm_jax.models.published import PUBLISHED

    def shrunk(fields: dict) -> dict:
        made = {key: SMALL.get(key, value) for key, value in fields.items()}
        if "text_config" in fields:
            made["text_config"] = shrunk(fields["text_config"])
            kinds = ["sliding_attention", "full_attention"]
            made["text_config"]["layer_types"] = kinds
        return made

    config = shrunk(PUBLISHED[name])
    if "text_config" not in config:
        config["mask_token_id"] = SMALL["mask_token_id"]
    PUBLISHED["small"] = config
    return dj.load("random:small", tokenizer=TINY)


def open_llm(strategy: str, slots: int):
    """The engine of a strategy."""
    import dllm_jax as dj

    source = STRATEGIES[strategy]
    model = source if source.startswith("builtin:") else small(source)
    draft = {"draft": "builtin:tiny-qwen3-dflash"} if strategy == "dflash" else {}
    config = dj.EngineConfig(max_num_seqs=slots, max_model_len=512, slot_buckets=(slots,))
    return dj.LLM(model, strategy, config=config, warm_up=False, progress=False, **draft)


def ends_of(llm) -> tuple[list, dict]:
    """Bytes by id, and ids of marks: what a turn is read with."""
    from dllm_jax import structured

    marks = structured.mark_ids(llm.tokenizer.get_added_vocab())
    return structured.token_bytes(llm.tokenizer), marks


def judged(known: tuple, pieces: list) -> str:
    """Whether a text's only call is "valid", or what it is."""
    import jsonschema

    from dllm_jax.api.calls import message_of

    calls = message_of(pieces, str).get("tool_calls", [])
    if len(calls) != 1:
        return f"{len(calls)} calls"
    said = calls[0]["function"]
    schema = next((json.loads(one.schema) for one in known if one.name == said["name"]), None)
    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(said["arguments"]))
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    return "valid"


def drawn(form: str, args: argparse.Namespace) -> dict:
    """A row of texts that are drawn from the grammars of random tools."""
    from dllm_jax.structured import Tools
    from dllm_jax.structured.forms import MARKS
    from tests.structured.test_forms import automaton_of, drawn_text, read

    draw, found = random.Random(f"{args.seed} {form}"), []
    for i in range(args.sets):
        tools, marks = Tools(random_tools(draw), "required", False, form), MARKS if i % 2 else ()
        letters = drawn_text(automaton_of(tools, marks), draw)
        found.append(judged(tools.tools, read(tools, letters, marks, draw)))
    bad = [f"set {i}: {one}" for i, one in enumerate(found) if one != "valid"]
    return {"sets": len(found), "valid": found.count("valid"), "not_valid": bad[:8]}


def calls(llm, form: str, args: argparse.Namespace) -> dict:
    """A row of random tools."""
    import dllm_jax as dj
    from dllm_jax.structured import Tools, Turn
    from dllm_jax.structured.forms import FORMS

    draw, shape = random.Random(f"{args.seed} {form}"), FORMS[form]
    spelt = ends_of(llm)
    sets = [random_tools(draw) for _ in range(args.sets)]
    held = [Tools(one, "required", False, form) for one in sets]
    prompts = [list(ids) for ids in prompts_of(llm, args.sets)]
    temperatures = [TEMPERATURES[i % 3] for i in range(args.sets)]
    how = [
        dj.SamplingParams(max_tokens=ROOM, temperature=at, seed=i, constraint=one)
        for i, (at, one) in enumerate(zip(temperatures, held, strict=True))
    ]
    outputs = llm.generate(prompts, how, use_tqdm=False)
    found = []
    for tools, output in zip(held, outputs, strict=True):
        text = output.outputs[0]
        if output.error is not None or text.finish_reason != "stop":
            found.append(f"{text.finish_reason}: {output.error}"[:120])
            continue
        found.append(judged(tools.tools, Turn(tools, *spelt).feed(text.token_ids, last=True)))
    begun = [
        shape.opens + shape.before_name + one[0].name + shape.behind_name for one in sets
    ]  # the twin's call has the first tool's name
    heads = [llm.tokenizer(text, add_special_tokens=False)["input_ids"] for text in begun]
    ids = [prompt + head for prompt, head in zip(prompts, heads, strict=True)]
    free = [dataclasses.replace(one, constraint=None, max_tokens=ROOM // 2) for one in how]
    twins = []
    for tools, head, output in zip(
        held, heads, llm.generate(ids, free, use_tqdm=False), strict=True
    ):
        tokens = [*head, *output.outputs[0].token_ids]
        twins.append(judged(tools.tools, Turn(tools, *spelt).feed(tokens, last=True)))
    bad = [f"set {i}, temperature {temperatures[i]}: {one}" for i, one in enumerate(found)]
    return {
        "valid": {
            str(at): [
                sum(one == "valid" for one in found[i::3]),
                len(found[i::3]),
            ]
            for i, at in enumerate(TEMPERATURES)
        },
        "twin_valid": [twins.count("valid"), len(twins)],
        "not_valid": [one for one in bad if not one.endswith(": valid")][:8],
    }


def prompts_of(llm, count: int):
    """Token ids of word problems."""
    from dllm_jax.tasks.evaluate import encode, held_out

    return encode(llm.model, held_out("plain", count, 0))


def prose(llm, form: str, args: argparse.Namespace, free: dict) -> dict:
    """A row of word problems; `free` keeps the texts without a grammar."""
    import dllm_jax as dj
    from dllm_jax.structured import Tools

    prompts = [list(ids) for ids in prompts_of(llm, args.problems)]
    params = dj.SamplingParams(max_tokens=ROOM - 32)

    def ends(how: dj.SamplingParams) -> list[tuple[list[int], int]]:
        outputs = llm.generate(prompts, how, use_tqdm=False)
        return [(one.outputs[0].token_ids, one.metrics.nfe) for one in outputs]

    if "plain" not in free:
        free["plain"] = ends(params)
    held = Tools(random_tools(random.Random(1)), form=form)
    texts = ends(dataclasses.replace(params, constraint=held))
    pairs = list(zip(free["plain"], texts, strict=True))
    other = [i for i, (a, b) in enumerate(pairs) if a[0] != b[0]]
    return {
        "problems": len(pairs),
        "same_tokens": len(pairs) - len(other),
        "same_forwards": sum(a[1] == b[1] for a, b in pairs),
        "tokens": sum(len(a[0]) for a, _ in pairs),
        "differing": other[:8],
    }


def main() -> None:
    """Run the strategies and forms that are asked for; write a row of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("drawn", "calls", "prose"))
    parser.add_argument("--strategies", type=lambda text: text.split(","), default=[*STRATEGIES])
    parser.add_argument("--forms", type=lambda text: text.split(","))
    parser.add_argument("--sets", type=int, default=48)
    parser.add_argument("--problems", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    import jax

    from dllm_jax.structured.forms import FORMS

    facts = {"device": jax.devices()[0].device_kind}
    if args.output is not None and args.output.exists():
        facts = json.loads(args.output.read_text(encoding="utf-8"))

    def keep(strategy: str, form: str, work) -> None:
        began = time.process_time()
        row = {"strategy": strategy, "form": form, "seed": args.seed, **work()}
        row["cpu_seconds"] = round(time.process_time() - began, 1)
        print(json.dumps(row), flush=True)
        rows = facts.setdefault(args.what, [])
        same = ("strategy", "form", "seed")
        rows[:] = [one for one in rows if any(one.get(key, 0) != row[key] for key in same)]
        rows.append(row)
        if args.output is not None:
            args.output.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")

    forms = args.forms or [*FORMS]
    if args.what == "drawn":
        for form in forms:
            keep("none", form, lambda form=form: drawn(form, args))
        return
    for strategy in args.strategies:
        free: dict = {}
        with open_llm(strategy, args.slots) as llm:
            for form in forms:
                if args.what == "calls":
                    keep(strategy, form, lambda form=form: calls(llm, form, args))
                else:
                    keep(strategy, form, lambda form=form, free=free: prose(llm, form, args, free))


if __name__ == "__main__":
    main()

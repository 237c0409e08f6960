"""The same text in a fraction of the steps: a small model guesses, the model itself judges.

    python examples/drafting.py

`ar` writes a token a step; with a draft the same engine judges a block of guesses in each, and what
it writes is what `ar` writes, at a temperature too. docs/dflash.md says when that is so.
"""

import dllm_jax as dj

QUESTION = (
    "A factory has 5 machines. Each machine makes 9 cups an hour. They run for 8 hours. "
    "Of these cups, 50 are bad. How many good ones are there?"
)


def main(target: dj.Model, draft: dj.Model, max_tokens: int = 96):
    chat = [{"role": "user", "content": QUESTION}]
    params = dj.SamplingParams(max_tokens=max_tokens, temperature=0.3, seed=1)
    sizes = {"max_num_seqs": 1, "max_model_len": 256, "warm_up": False}

    (plain,) = dj.LLM(target, **sizes).chat(chat, params)
    (drafted,) = dj.LLM(target, draft=draft, **sizes).chat(chat, params)
    print(drafted.outputs[0].text)

    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    print(f"{drafted.metrics.nfe} forwards where ar takes {plain.metrics.nfe}")
    if stats := drafted.metrics.draft:
        print(f"{stats.mean_accepted_length:.1f} tokens a round, the model's own one counted")


if __name__ == "__main__":
    main(dj.load("builtin:tiny-qwen3"), dj.load("builtin:tiny-qwen3-dflash"))

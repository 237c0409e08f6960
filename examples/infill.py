"""What stands between two texts, and in the holes of one.

    python examples/infill.py

`full_sequence` keeps the whole text in its window, so a hole is filled with a view of both sides.
The built-in model was trained to write from left to right, block by block: it fills holes in
solutions like those it learned from, and little else. Models of full attention (LLaDA, Dream,
DiffuCoder) are made for it.
"""

import dllm_jax as dj

QUESTION = (
    "<|user|>Ben earns 37 dollars a day and spends 29 dollars of it. Ben does this for 5 days. "
    "How many dollars does Ben have then?<|assistant|>"
)


def main(llm: dj.LLM):
    # 14 tokens between what was asked and how the answer ends.
    prefix = f"{QUESTION} On each of the days"
    suffix = " In all of the days together that makes 8 * 5 = 40 dollars. The answer is 40."
    (output,) = llm.infill(prefix, suffix, dj.SamplingParams(max_tokens=14))
    print(f"{prefix}[{output.outputs[0].text}]{suffix}")

    # Holes are single tokens; what stands between them comes back with them.
    hole = llm.model.tokenizer.mask_token
    text = (
        f"{QUESTION} On each of the days Ben keeps 37 - 29 = {hole} dollars. "
        f"In all of the days together that makes {hole} * 5 = {hole}{hole} dollars."
    )
    (output,) = llm.infill(text)
    first, *_, last = text.split(hole)
    print(f"{first}[{output.outputs[0].text}]{last}")
    print(f"{output.metrics.tokens_per_forward:.2f} tokens per forward")


if __name__ == "__main__":
    main(dj.LLM("builtin:tiny-sdar", "full_sequence", buffer_size=4, max_num_seqs=1, warm_up=False))

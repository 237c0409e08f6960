"""Requests that come while others run, and one that is read as it is written.

    python examples/continuous_batching.py

A request takes a slot as soon as one is free and leaves it when it ends; nobody waits for the
slowest of a batch. What `engine.step()` brings are the requests added to the engine; a stream's
pieces come to whoever reads the stream, though both run on the same engine.
"""

import dllm_jax as dj

QUESTION = (
    "<|user|>{} earns {} dollars a day and spends {} dollars of it. {} does this for {} days."
)
QUESTION += " How many dollars are there in the end?<|assistant|>"
PEOPLE = [("Ben", 37, 29, 5), ("Hana", 41, 33, 3), ("Fay", 49, 8, 9), ("Ivan", 93, 38, 5)]


def main(llm: dj.LLM):
    prompts = [QUESTION.format(name, *rest[:2], name, rest[2]) for name, *rest in PEOPLE]
    params = dj.SamplingParams(max_tokens=64)
    engine = llm.engine

    arriving = [llm.model.tokenizer(prompt)["input_ids"] for prompt in prompts[1:]]

    def somebody_comes():
        if arriving:
            request = dj.Request(prompt_token_ids=arriving.pop(0), params=params)
            print(f"in  {engine.add(request)}")

    pieces = []
    for event in llm.stream(prompts[0], params):
        pieces.append(event.text)
        somebody_comes()
    print(f"streamed{'|'.join(pieces)}")

    while arriving or engine.has_work:
        somebody_comes()
        for output in engine.step():  # who ended while the stream was read comes first
            text, forwards = output.outputs[0].text, output.metrics.nfe
            print(f"out {output.request_id}{text} ({forwards} forwards)")
    stats = engine.stats()
    print(
        f"{stats.generated_tokens} tokens of {stats.num_finished} texts in {stats.num_steps} steps"
    )


if __name__ == "__main__":
    main(dj.LLM("builtin:tiny-sdar", max_num_seqs=2, warm_up=False))

"""One of two processes of two CPU devices each that share a toy model; see `test_hosts.py`.

    python -m tests.cluster.one_of_several RANK PORT FOLDER [all]

Rank 0 prints a JSON line a part, and waits for a line before the last one. Snapshots go to FOLDER.
With `all` automata and labels are among the parts.
"""

import json
import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = " ".join(
    (os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=2")
)

import jax


def main(rank, port, folder, *every):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)

    import pytest

    import dllm_jax as dj
    from dllm_jax.api import snapshot as snapshots
    from dllm_jax.loading.load import place
    from dllm_jax.models.sharding import over_devices
    from tests.api.test_snapshot import break_device
    from tests.cluster.test_hosts import CONFIG, STRATEGY, labels, requests, texts
    from tests.contract import models

    model = place(models.plain(), over_devices(4))
    llm = dj.LLM(model, STRATEGY, config=CONFIG, warm_up=False, progress=False)
    found = {"texts": texts(llm, bool(every)), "labels": labels(llm) if every else None}
    print(json.dumps(found), flush=True)

    prompts, params = requests()
    saver = snapshots.snapshot_saver(model, llm.strategy, CONFIG, Path(folder))
    llm.engine.save_snapshot = saver
    with pytest.MonkeyPatch.context() as patch:
        break_device(llm, 3, patch)
        llm.generate([prompts[1]], params[1], use_tqdm=False)

    stream = llm.stream(prompts[0], params[0])
    pieces = [token for event in stream for token in event.token_ids]
    left = llm.stream(prompts[1], params[1])
    next(iter(left))
    left.close()
    stats = llm.engine.stats()
    print(json.dumps({"stream": pieces, "preemptions": stats.num_preemptions}), flush=True)

    sys.stdin.readline()  # the other one is dead now
    errors = [output.error for output in llm.generate(prompts, params, use_tqdm=False)]
    print(json.dumps({"errors": errors}), flush=True)
    llm.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])

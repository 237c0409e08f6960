"""Two CPU replicas of examples/ray_serve.py, one of them killed under eight clients.

    python benchmarks/clients/ray_replicas.py --out benchmarks/results/ray_cpu.json

Run in an environment with dllm_jax, its extra `server` and `ray[serve]`. Exit status 1 where a
request was lost that was not on the killed replica, or a cut one looked whole.
"""

import argparse
import asyncio
import collections
import json
import os
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import ray  # noqa: E402
import ray_serve  # noqa: E402
from ray import serve  # noqa: E402

from dllm_jax.bench.client import Client  # noqa: E402

PORT, MODEL, CLIENTS = 8791, "builtin:tiny-sdar", 8
CHAT = "/v1/chat/completions"
QUESTION = "Ann has 3 pens and buys 4 more. How many pens has she?"
FLAGS = ["--max-num-seqs", "4", "--max-model-len", "256", "--log-format", "none"]


def body(most=64, **fields):
    """A streamed request."""
    measured = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "stream": True}
    return measured | {"max_tokens": most, "temperature": 0, **fields}


def replica_ids():
    """Process ids of the live replicas by actor name."""
    from ray.util.state import list_actors

    rows = list_actors(filters=[("state", "=", "ALIVE")], detail=True)
    return {row.name: row.pid for row in rows if "Replica" in (row.name or "")}


async def asked(session):
    """Status and text of an answer, whether it is whole, and what an error event said."""
    client = Client(f"http://127.0.0.1:{PORT}", {ray_serve.SESSION_HEADER: session})
    try:
        answer = await client.post(CHAT, body())
    finally:
        client.close()
    chunks = [json.loads(data) for _, data in answer.events]
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c.get("choices"))
    error = next((chunk["error"]["message"] for chunk in chunks if chunk.get("error")), None)
    return answer.status, text, answer.is_done and error is None, error


async def under_load(seconds, kill_after):
    """Clients without a pause; after a while one replica is killed. What each of them got."""
    until, seen, killed = time.monotonic() + seconds, [], {}

    async def one(number):
        while time.monotonic() < until:
            began = time.monotonic()
            try:
                status, text, whole, error = await asked(f"session-{number}")
            except OSError as problem:
                status, text, whole, error = 0, "", False, str(problem)[:120]
            seen.append((number, began, time.monotonic(), status, text, whole, error))
            if not whole:
                await asyncio.sleep(0.2)

    async def kill():
        await asyncio.sleep(kill_after)
        name, pid = sorted((await asyncio.to_thread(replica_ids)).items())[0]
        killed.update(name=name, pid=pid, at=time.monotonic())
        os.kill(pid, signal.SIGKILL)
        while True:  # until there are two again
            await asyncio.sleep(0.5)
            live = await asyncio.to_thread(replica_ids)
            measured = serve.status().applications["dllm"].deployments["Replica"]
            running = measured.replica_states.get("RUNNING", 0)
            if len(live) >= 2 and name not in live and running >= 2:
                killed["back_after_s"] = time.monotonic() - killed["at"]
                return
            if time.monotonic() > killed["at"] + 150:
                return

    await asyncio.gather(kill(), *map(one, range(CLIENTS)))
    return seen, killed


async def sticky():
    """Whether each session stays on one replica, by the replicas' own counters."""
    pages = collections.Counter()
    for session in range(4):
        client = Client(f"http://127.0.0.1:{PORT}", {ray_serve.SESSION_HEADER: f"s{session}"})
        found = set()
        for _ in range(3):
            before = await served(client)
            await client.post(CHAT, body(8))
            after = await served(client)
            found.add(after - before)
        client.close()
        pages[f"s{session}"] = found == {1}
    return all(pages.values())


async def served(client):
    """Requests that the replica of this session has finished."""
    _, data = await client.get("/metrics")
    lines = [line for line in data.decode().splitlines() if "request_success_total{" in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


async def flood(count):
    """Statuses of many requests at once."""
    client = Client(f"http://127.0.0.1:{PORT}")
    answers = await asyncio.gather(
        *[client.post(CHAT, body(200, ignore_eos=True, seed=i)) for i in range(count)]
    )
    client.close()
    return dict(collections.Counter(str(answer.status) for answer in answers))


async def leaves(stream):
    """Whether a client that leaves ends its request in the replica."""
    headers = {ray_serve.SESSION_HEADER: "leaving"}
    client = Client(f"http://127.0.0.1:{PORT}", headers)
    name = "dllm_disconnects_total"

    async def counted():
        _, data = await client.get("/metrics")
        lines = [line for line in data.decode().splitlines() if line.split("{")[0] == name]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    before = await counted()
    asked = body(200, ignore_eos=True, stream=stream)
    task = asyncio.create_task(client.post(CHAT, asked))
    await asyncio.sleep(0.3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    for _ in range(30):
        await asyncio.sleep(0.1)
        if await counted() > before:
            break
    after = await counted()
    client.close()
    return after > before


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=40)
    args = parser.parse_args()
    began = time.monotonic()
    paths = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    ray.init(
        num_cpus=4,
        dashboard_port=8792,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    measured = {"ray": ray.__version__, "python": sys.version.split()[0], "model": MODEL}
    measured["ray_init_s"] = time.monotonic() - began
    try:
        ray_serve.deploy([MODEL, *FLAGS], 2, running=6, waiting=4, port=PORT, cpus=0.5)
        measured["start_s"] = time.monotonic() - began
        measured["replicas"] = len(replica_ids())
        measured["a_session_stays_on_its_replica"] = asyncio.run(sticky())
        measured["a_client_that_leaves_is_aborted"] = all(
            asyncio.run(leaves(stream)) for stream in (True, False)
        )
        measured["statuses_of_32_at_once"] = asyncio.run(flood(32))
        seen, killed = asyncio.run(under_load(args.seconds, args.seconds / 4))
    finally:
        serve.shutdown()
        ray.shutdown()
    whole = [one for one in seen if one[5]]
    # With one replica left some are refused; a client may send those again.
    refused = [one for one in seen if one[3] == 429]
    bad = [one for one in seen if not one[5] and one[3] != 429]
    texts = {one[4] for one in whole}
    # A request that had ended before the kill, or began after the router knew, was not on it.
    there = [one for one in bad if one[1] <= killed["at"] + 5 and one[2] >= killed["at"]]
    sessions = {one[0] for one in there}
    measured |= {
        "killed": killed["name"],
        "back_after_s": killed.get("back_after_s"),
        "whole": len(whole),
        "distinct_texts": len(texts),
        "refused_429": len(refused),
        "not_whole": len(bad),
        "not_whole_elsewhere": len(bad) - len(there),
        "sessions_hit": len(sessions),
        "errors": dict(collections.Counter(f"{one[3]} {one[6] or 'cut'}"[:160] for one in bad)),
        "short_texts_seen_as_whole": sum(one[4] != max(texts, key=len) for one in whole),
    }
    args.out.write_text(json.dumps(measured, indent=1) + "\n")
    print(json.dumps(measured, indent=1))
    good = measured["not_whole_elsewhere"] == measured["short_texts_seen_as_whole"] == 0
    good &= 0 < len(sessions) < CLIENTS and len(texts) == 1 and measured["back_after_s"] is not None
    good &= (
        measured["a_session_stays_on_its_replica"] and measured["a_client_that_leaves_is_aborted"]
    )
    return 0 if good and measured["statuses_of_32_at_once"].get("429") else 1


if __name__ == "__main__":
    sys.exit(main())

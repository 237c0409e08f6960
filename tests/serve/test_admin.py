"""Proves the administrator's routes (issue 50, item 6): off by default, with a key of their own,
and on the built-in model: weights replaced and put back, sleep and wake, pause, drain.
"""

import asyncio
import shutil
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dllm_jax.loading.sources import BUILTIN
from dllm_jax.serve import admin
from dllm_jax.serve.logs import Log
from dllm_jax.serve.pipe import Launch
from dllm_jax.serve.refusals import Refusal
from dllm_jax.serve.service import Config, Service
from tests.serve.driving import Server, scripted, within

KEY = {"authorization": "Bearer admin", "content-type": "application/json"}
UPDATE = "/update_weights_from_disk"
QUESTION = "A shop has 365 plates. People bring 132 back. How many plates are there?"


def test_without_a_key_of_theirs_the_routes_do_not_exist(tmp_path):
    with scripted(tmp_path) as server:
        for path in ("/flush_cache", "/drain", UPDATE):
            assert server.post(path, {}, KEY)[0] == 404


def test_keys_are_of_one_group_each_and_a_pause_holds_requests_back(tmp_path):
    keys = {"api_keys": ["user"], "admin_keys": ["admin"]}
    user = {"authorization": "Bearer user", "content-type": "application/json"}
    with scripted(tmp_path, **keys) as server:
        assert server.post("/pause_generation", {}, user)[0] == 401
        assert server.post("/tokenize", {"prompt": "a"}, KEY)[0] == 401
        assert server.post("/pause_generation", {"mode": "retract"}, KEY)[0] == 400
        assert server.post("/pause_generation", {}, KEY)[0] == 200
        assert server.get("/health")[1] == {"status": "paused"}
        status, said, _ = server.post("/tokenize", {"prompt": "a"}, user)
        assert (status, said["error"]["code"]) == (503, "paused")
        assert server.post("/continue_generation", {}, KEY)[0] == 200
        assert server.post("/continue_generation", {}, KEY)[0] == 409
        assert server.post("/tokenize", {"prompt": "a"}, user)[0] == 200
        assert server.post(UPDATE, {"model_path": "a"}, KEY)[0] == 404  # there is no root
        assert server.post("/flush_cache", {}, KEY)[0] == 400  # the scripted engine takes none
        assert server.get("/health")[0] == 200
        assert server.post("/drain", {}, KEY)[0] == 200
        assert server.ended() == 0
        assert server.lines("exit")[-1]["reason"] == "drain"


def folders(root):
    """Folders of weights: the model's own, others, and those that must be refused."""
    own = BUILTIN / "tiny-sdar"
    for name in ("own", "other", "cut", "nan"):
        shutil.copytree(own, root / name)
    tensors = load_file(own / "model.safetensors")
    embed = next(name for name in tensors if "embed" in name)
    other = tensors[embed].copy()
    other[:, ::2] *= -0.5
    save_file(tensors | {embed: other}, root / "other" / "model.safetensors")
    spoilt = tensors[embed].copy()
    spoilt[7, 3] = np.nan
    save_file(tensors | {embed: spoilt}, root / "nan" / "model.safetensors")
    whole = (own / "model.safetensors").read_bytes()
    (root / "cut" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    (root / "out").symlink_to(BUILTIN / "tiny-sdar")
    (root / "file").write_bytes(b"\x80\x04.")  # a pickle


@pytest.mark.long
def test_weights_are_replaced_put_back_and_sleep(tmp_path):
    (tmp_path / "root").mkdir()
    folders(tmp_path / "root")
    flags = ["--max-num-seqs", "4", "--page-size", "32", "--no-warm-up", "--port", "0"]
    flags += ["--weights-root", str(tmp_path / "root"), "--log-format", "json"]
    words = ["-m", "dllm_jax.cli", "serve", "builtin:tiny-sdar", *flags]
    server = Server(words, tmp_path / "log", env={"DLLM_ADMIN_KEY": "admin"}).wait_ready()

    def answer():
        status, told, _ = server.chat(QUESTION, max_tokens=48)
        assert status == 200
        return told["choices"][0]["message"]["content"], told["weight_version"]

    def update(path, **fields):
        return server.post(UPDATE, {"model_path": path, **fields}, KEY)[:2]

    try:
        text, number = answer()
        assert (text.endswith("The answer is 497."), number) == (True, 0)
        compiled = server.metric("dllm_recompiles_total")
        for path, status in (
            ("../root2", 400),
            ("..", 403),
            (str(BUILTIN / "tiny-sdar"), 403),
            ("out", 403),
            ("file", 400),
            ("none", 400),
            ("cut", 400),
            ("nan", 400),
        ):
            assert update(path)[0] == status, path
            assert answer() == (text, 0)
        assert update("own", flush_cache=False)[0] == 400
        status, told = update("other")
        assert (status, told["success"], told["weight_version"]) == (200, True, 1)
        changed, number = answer()
        assert (changed != text, number) == (True, 1)
        assert update("own", weight_version=7)[1]["weight_version"] == 7
        assert answer() == (text, 7)
        assert server.request("GET", "/get_weight_version", headers=KEY)[1] == {"weight_version": 7}
        assert within(lambda: server.metric("dllm_weight_version") == 7)
        assert server.post("/flush_cache", {}, KEY)[1]["pages"] > 0
        for _ in range(2):
            assert server.post("/release_memory_occupation", {}, KEY)[0] == 200
        assert server.get("/health")[1] == {"status": "asleep"}
        assert server.chat(QUESTION)[1]["error"]["code"] == "asleep"
        assert server.post("/resume_memory_occupation", {}, KEY)[0] == 200
        assert answer() == (text, 7)
        assert server.metric("dllm_recompiles_total") == compiled
        assert within(lambda: server.lines("weights"))
        assert server.stop() == 0
    finally:
        server.process.kill()


class Asked:
    """The engine as the front sees it."""

    def __init__(self):
        self.held, self.num_open, self.has_open = None, 0, True
        self.done, self.is_asleep = [], False

    @property
    def state(self):
        return self.held or "ready"

    async def command(self, name, **fields):
        assert not self.has_open, name
        self.done.append(name)
        await asyncio.sleep(0.01)
        self.is_asleep = {"sleep": True, "wake": False}.get(name, self.is_asleep)
        return {}


def test_commands_are_one_at_a_time_and_wait_for_what_runs():
    """A pause that still waits for texts lets no other command pass."""

    async def run():
        service = Service(Config(model="m", launch=Launch("x", {}), version="0"), Log("none"))
        engine: Any = Asked()
        service.engine = engine
        call: Any = SimpleNamespace(body=lambda: asyncio.sleep(0, b"{}"))

        async def status(one):
            try:
                return (await one(service, call)).status
            except Refusal as error:
                return error.status

        pausing = asyncio.create_task(status(admin.pause))
        await asyncio.sleep(0.01)
        others = [admin.sleep, admin.flush_cache, admin.sleep, admin.wake]
        tasks = [asyncio.create_task(status(one)) for one in others]
        await asyncio.sleep(0.05)
        assert engine.done == []
        engine.has_open = False
        found = [await one for one in (pausing, *tasks)]
        return found, [await status(one) for one in (admin.sleep, admin.wake, admin.wake)], engine

    first, then, engine = asyncio.run(run())
    assert first == [200, 200, 409, 409, 409]
    assert then == [200, 200, 200]
    assert engine.done == ["sleep", "sleep", "wake"]
    assert (engine.is_asleep, engine.state) == (False, "ready")

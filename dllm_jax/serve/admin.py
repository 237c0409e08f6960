"""Routes of an administrator, with a key of their own; without one they do not exist (404).

Names and bodies are SGLang's. What touches the device is a `pipe.Command`, which the engine's loop
carries out between two requests. The front holds new requests back meanwhile: state "paused", or
"asleep".
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

from dllm_jax.serve.exchange import Call, Json
from dllm_jax.serve.refusals import Refusal, shown
from dllm_jax.serve.service import Service
from dllm_jax.serve.wire import Struct

POLL_S = 0.02


class Pause(Struct, forbid_unknown_fields=True):
    """`POST /pause_generation`."""

    mode: Literal["drain", "abort"] = "drain"


class Update(Struct, forbid_unknown_fields=True):
    """`POST /update_weights_from_disk`."""

    model_path: str
    weight_version: int | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True


async def flush_cache(service: Service, call: Call) -> Any:
    """`POST /flush_cache`: forget every cached prefix, once the requests that run have ended."""
    async with _alone(service), _held(service, "drain"):
        return Json({"success": True, **await service.engine.command("flush")})


async def pause(service: Service, call: Call) -> Any:
    """`POST /pause_generation`: refuse requests, and let running ones end, or end them."""
    body = await service.read(call, Pause)
    service.check_state()
    num = service.engine.num_open
    await _hold(service, body.mode)
    return Json({"success": True, "num_paused_requests": num})


async def resume(service: Service, call: Call) -> Any:
    """`POST /continue_generation`."""
    _must_be(service, "paused")
    service.engine.held = None
    return Json({"success": True})


async def update(service: Service, call: Call) -> Any:
    """`POST /update_weights_from_disk`: read and check a folder, then serve its weights.

    A folder that does not fit is 400, and the old weights serve on.
    """
    body = await service.read(call, Update)
    if service.engine.state != "paused":
        service.check_state()
    if not body.flush_cache:
        raise Refusal(
            "flush_cache=false: cached prefixes are of the old weights; leave it out",
            param="flush_cache",
        )
    if body.weight_version is not None and body.weight_version < 0:
        raise Refusal("weight_version must be 0 or more", param="weight_version")
    path = _allowed(service.config.weights_root, body.model_path)
    async with _alone(service):
        await service.engine.command("stage", path=str(path))
        num = service.engine.num_open
        try:
            async with _held(service, "abort" if body.abort_all_requests else "drain"):
                done = await service.engine.command("replace", version=body.weight_version)
        except asyncio.CancelledError:  # the client left
            service.engine.order("drop")
            raise
    service.log.line("weights", path=str(path), **done)
    said = f"serving the weights of {path.name}"
    return Json({"success": True, "message": said, "num_paused_requests": num, **done})


async def version(service: Service, call: Call) -> Any:
    """`GET /get_weight_version`."""
    return Json({"weight_version": service.engine.counts.weight_version})


async def sleep(service: Service, call: Call) -> Any:
    """`POST /release_memory_occupation`: weights to the host, no cache, until `wake`."""
    async with _alone(service), _held(service, "drain"):
        await service.engine.command("sleep")
        service.engine.held = "asleep"
    return Json({"success": True})


async def wake(service: Service, call: Call) -> Any:
    """`POST /resume_memory_occupation`."""
    async with _alone(service):
        if service.engine.state == "asleep":
            await service.engine.command("wake")
            service.engine.held = None
        else:
            service.check_state()
    return Json({"success": True})


async def drain(service: Service, call: Call) -> Any:
    """`POST /drain`: as SIGTERM: running requests end, then the server does."""
    service.drain.set()
    return Json({"success": True, "num_open": service.engine.num_open})


ROUTES = (
    ("/flush_cache", "POST", flush_cache),
    ("/pause_generation", "POST", pause),
    ("/continue_generation", "POST", resume),
    ("/get_weight_version", "GET", version),
    ("/release_memory_occupation", "POST", sleep),
    ("/resume_memory_occupation", "POST", wake),
    ("/drain", "POST", drain),
)
OF_WEIGHTS = ("/update_weights_from_disk", "POST", update)
PATHS = {path for path, *_ in (*ROUTES, OF_WEIGHTS)}


def routes(admin_keys: Any, weights_root: str | None) -> tuple[Any, ...]:
    """The routes that these settings open."""
    if not admin_keys:
        return ()
    return (*ROUTES, *([OF_WEIGHTS] if weights_root else []))


@contextlib.asynccontextmanager
async def _alone(service: Service) -> AsyncIterator[None]:
    """No other command is under way: one may wait long for the requests that run."""
    if service.commands.locked():
        raise Refusal(
            "another command is under way; try again when it has ended", code="conflict", status=409
        )
    async with service.commands:
        yield


@contextlib.asynccontextmanager
async def _held(service: Service, mode: str) -> AsyncIterator[None]:
    """No request runs or comes; what was held before stays so. For one command at a time."""
    engine = service.engine
    if (before := engine.held) is None:
        service.check_state()
    if before != "asleep":
        await _hold(service, mode)
    try:
        yield
    finally:
        if before is None and engine.held == "paused":
            engine.held = None


async def _hold(service: Service, mode: str) -> None:
    engine = service.engine
    before, engine.held = engine.held, "paused"
    try:
        if mode == "abort":
            engine.fail_all("an administrator has ended every request; ask again")
        while engine.has_open:  # each ends by its own time limit
            await asyncio.sleep(POLL_S)
    except BaseException:
        engine.held = before
        raise


def _must_be(service: Service, state: str) -> None:
    now = service.engine.state
    if now != state:
        raise Refusal(f"the server is {now}, not {state}", code="conflict", status=409)


def _allowed(root: str | None, path: str) -> Path:
    """The folder that is meant, within `root` once links are followed, as are its files."""
    assert root is not None
    allowed = Path(root).resolve()
    try:
        found = (allowed / path).resolve(strict=True)
        inside = [found, *(file.resolve() for file in found.iterdir())]
    except (OSError, ValueError, RuntimeError):
        raise Refusal(
            f"model_path={shown(path)} is no folder within --weights-root", param="model_path"
        ) from None
    if not all(one.is_relative_to(allowed) for one in inside):
        raise Refusal(
            f"model_path={shown(path)} leads out of --weights-root; copy the folder into it",
            param="model_path",
            code="forbidden_path",
            status=403,
        )
    return found

"""Figures from a server's own counters, read before a load and after it."""

from collections.abc import Mapping
from typing import Any

from dllm_jax.bench.client import Client

# Counters of a server's /metrics that are reported as differences, under our names.
COUNTERS = {
    "prompt_tokens": "dllm_prompt_tokens_total",
    "visible_tokens": "dllm_generation_tokens_total",
    "nfe": "dllm_nfe_total",
    "prefix_hits": "dllm_prefix_cache_hits_total",
    "prefix_queries": "dllm_prefix_cache_queries_total",
    "preemptions": "dllm_num_preemptions_total",
    "late_compiles": "dllm_recompiles_total",
}
# Counters from which vLLM's client derives its diffusion figures.
_STEPS, _POSITIONS, _COMMITTED = (
    f"vllm:diffusion_num_{name}_total"
    for name in ("denoising_steps", "canvas_positions", "committed_tokens")
)


def server_figures(
    found: Mapping[str, Any],
    before: Mapping[str, float] | None,
    after: Mapping[str, float] | None,
) -> dict[str, Any] | None:
    """Figures from the server's own counters over the same time; None without counters.

    Raises:
        ValueError: The answers claim more tokens than the server counted.
    """
    if before is None or after is None:
        return None

    def more(name: str) -> float | None:
        return after[name] - before.get(name, 0.0) if name in after else None

    increases = {ours: more(name) for ours, name in COUNTERS.items()}
    counted = {name: int(value) for name, value in increases.items() if value is not None}
    visible = counted.get("visible_tokens")
    if visible is not None and visible < found["visible_tokens"]:
        raise ValueError(
            f"the answers claim {found['visible_tokens']} tokens, /metrics counted {visible}; was "
            "the server restarted meanwhile? The run does not count"
        )
    if counted:
        counted["is_alone"] = visible == found["visible_tokens"]
    steps, positions, committed = map(more, (_STEPS, _POSITIONS, _COMMITTED))
    diffusion = vllm_diffusion(steps, positions, committed, found["wall_s"])
    return counted | ({} if diffusion is None else {"vllm_diffusion": diffusion}) or None


def vllm_diffusion(
    steps: float | None, positions: float | None, committed: float | None, wall_s: float
) -> dict[str, float] | None:
    """The diffusion figures that vLLM's client would print for these differences."""
    if not steps or not positions or not committed:
        return None
    canvases = committed / (positions / steps)
    denoising = steps - canvases
    return {
        "committed_throughput": committed / wall_s,
        "steps_per_canvas": denoising / canvases,
        "committed_per_step": committed / denoising,
    }


async def scrape(client: Client) -> dict[str, float] | None:
    """Counters of `/metrics`, summed over labels; None if the server has none."""
    try:
        status, data = await client.get("/metrics")
    except OSError:
        return None
    if status != 200:
        return None
    totals: dict[str, float] = {}
    for line in data.decode(errors="replace").splitlines():
        name, _, value = line.rpartition(" ")
        name = name.partition("{")[0]
        if name.endswith("_total") and not line.startswith("#"):
            try:
                totals[name] = totals.get(name, 0.0) + float(value)
            except ValueError:
                continue
    return totals

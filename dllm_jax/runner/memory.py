"""Where the memory of an engine goes: how many pages it holds, what it peaks at, what to lower.

A program needs the weights, every slot, the pools and its temporaries at once; pools are donated
and never copied, so the temporaries do not depend on them. Bytes are as counted by the
device's allocator.
"""

import ctypes
import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import jax

GIB = 2**30
MOST_HOST_BYTES = 4 * GIB  # of a pool on the CPU, unless num_pages is given
MOST_ELEMENTS = 2**31 - 1  # of one array: kernels count in 32 bits
RESERVE = 0.02  # of the device, for temporaries, until the programs are compiled
_KEPT_BITS = 7  # of a number of pages: a second start has the same one, and its programs are cached
_SMALLER = "take a smaller model, a narrower dtype or a larger device"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The memory of an engine on its device, in bytes.

    Attributes:
        limit_bytes: Bytes that this process may use.
        in_use_bytes: In use without the engine: the weights, and what is not ours.
        is_counted: The device has an allocator of its own, which counts; the CPU has not.
        weights_bytes: Of the model and of those used with it.
        slot_bytes: Of every slot together.
        page_bytes: Of one page in every pool.
        temp_bytes: Most that one program needs besides what it is given; 0 until they are compiled.
        utilization: Share of the limit the engine may use.
        num_slots, num_pages, page_size: Of the engine.
        needed_tokens: What the pool must hold: one text.
    """

    limit_bytes: int
    in_use_bytes: int
    is_counted: bool
    weights_bytes: int
    slot_bytes: int
    page_bytes: int
    temp_bytes: int = 0
    utilization: float
    num_slots: int
    num_pages: int
    page_size: int
    needed_tokens: int

    @property
    def pool_bytes(self) -> int:
        """Of all pages."""
        return self.num_pages * self.page_bytes

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the bytes in use."""
        return self.in_use_bytes + self.slot_bytes + self.pool_bytes + self.temp_bytes

    def pages_within(self, num_bytes: float) -> int:
        """Number of pages that fit if all memory together takes `num_bytes`."""
        left = num_bytes - self.in_use_bytes - self.slot_bytes - self.temp_bytes
        return max(0, int(left // self.page_bytes))

    def slots_within(self, num_bytes: float) -> int:
        """Number of slots that fit with the pages, if temporaries shrink with the slots."""
        left = num_bytes - self.in_use_bytes - self.pool_bytes
        each = (self.slot_bytes + self.temp_bytes) / self.num_slots
        return max(0, int(left // max(1.0, each)))

    def check(self) -> None:
        """Raise ValueError, with what to lower and to what, where it is more than there is."""
        if self.peak_bytes <= self.limit_bytes:
            return
        raise ValueError(
            f"num_pages={self.num_pages} needs {self}; {_lower(self._remedies(self.limit_bytes))}"
        )

    def __str__(self) -> str:
        others = self.in_use_bytes - self.weights_bytes
        return (
            f"{_bytes(self.peak_bytes)} of {_bytes(self.limit_bytes)} (weights "
            f"{_bytes(self.weights_bytes)}, {self.num_pages} pages {_bytes(self.pool_bytes)}, "
            f"{self.num_slots} slots {_bytes(self.slot_bytes)}, temporaries "
            f"{_bytes(self.temp_bytes)}, others {_bytes(others)})"
        )

    def _remedies(self, num_bytes: float) -> list[str]:
        """Settings to lower, with their new values, so that everything fits in `num_bytes`."""
        remedies = []
        pages = rounded(self.pages_within(num_bytes))
        if 0 < pages < self.num_pages:
            remedies.append(f"num_pages from {self.num_pages} to {pages}")
        slots = self.slots_within(num_bytes)
        if 0 < slots < self.num_slots:
            remedies.append(f"max_num_seqs from {self.num_slots} to {slots}")
        return remedies


def measure(
    device: Any, weights: Any, slots: Any, page: Any, utilization: float, **sizes: int
) -> MemoryPlan:
    """The memory that an engine would take on a device in its present state.

    Args:
        device: A `jax.Device`.
        weights: A tree of the arrays of the models; they are on the device already.
        slots, page: Trees of arrays or their shapes: all slots, one page of every pool.
        sizes: num_slots, num_pages, page_size, needed_tokens.
    """
    weights_bytes = num_bytes(weights)
    stats = device.memory_stats() or {}
    if limit := stats.get("bytes_limit"):
        in_use = stats["bytes_in_use"]
        limit = min(limit, in_use + _free_bytes(device, stats))
    else:
        in_use = weights_bytes
        limit = host_bytes_available() + in_use
    return MemoryPlan(
        limit_bytes=limit,
        in_use_bytes=in_use,
        is_counted=bool(stats.get("bytes_limit")),
        weights_bytes=weights_bytes,
        slot_bytes=num_bytes(slots),
        page_bytes=num_bytes(page),
        utilization=utilization,
        **sizes,
    )


def num_bytes(tree: Any) -> int:
    """Bytes that a device holds of the arrays of a tree, or of shapes of arrays."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(own_shape(leaf)) * leaf.dtype.itemsize for leaf in leaves)


def own_shape(leaf: Any) -> tuple[int, ...]:
    """Shape of a device's part of an array."""
    sharding = getattr(leaf, "sharding", None)
    return leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)


def host_bytes_available() -> int:
    """Memory the system can still give without swapping; 4 GiB where it does not say."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        found = None
    return int(found[1]) * 1024 if found else MOST_HOST_BYTES


def _free_bytes(device: Any, stats: dict[str, int]) -> int:
    """Bytes that can still be allocated: free ones of the allocator, and those left to the driver.

    By default JAX holds its whole share from the start. Without preallocation, other processes
    may have taken a part of it.
    """
    limit, in_use = stats["bytes_limit"], stats["bytes_in_use"]
    held = stats.get("pool_bytes", limit)
    driver = None if held >= limit else _driver_free_bytes(device.local_hardware_id)
    return limit - in_use if driver is None else held - in_use + driver


def _driver_free_bytes(ordinal: int) -> int | None:
    """Free memory of a CUDA device as its driver says; None where it does not say."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, context = ctypes.c_int(), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), ordinal):
        return None
    if cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        return None
    try:
        if cuda.cuCtxPushCurrent_v2(context):
            return None
        failed = cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        cuda.cuCtxPopCurrent_v2(ctypes.byref(context))
    finally:
        cuda.cuDevicePrimaryCtxRelease_v2(device)
    return None if failed else free.value


def fill(plan: MemoryPlan, enough: int, elements_per_page: int) -> MemoryPlan:
    """The plan with the pages that its share of the device holds.

    On an accelerator all of it: spare pages cache prefixes. On the CPU, whose memory is shared,
    `enough`, and no more than 4 GiB. While `temp_bytes` is unknown, an accelerator keeps a reserve.

    Args:
        enough: Pages beyond which more are of little use.
        elements_per_page: Of the largest array of a pool.

    Raises:
        ValueError: Not even one text fits.
    """
    share = plan.utilization * plan.limit_bytes
    most = MOST_ELEMENTS // elements_per_page
    if plan.is_counted:
        share -= 0 if plan.temp_bytes else RESERVE * plan.limit_bytes
    else:
        most = min(most, enough, MOST_HOST_BYTES // plan.page_bytes)
    pages = plan.pages_within(share)
    filled = dataclasses.replace(plan, num_pages=most if pages >= most else rounded(pages))
    if filled.num_pages * plan.page_size >= plan.needed_tokens:
        return filled
    raise ValueError(
        f"memory_utilization={plan.utilization:g} leaves pages for "
        f"{filled.num_pages * plan.page_size} tokens, one text takes {plan.needed_tokens}; it is "
        f"{filled}: {_room(filled, share)}"
    )


def _room(plan: MemoryPlan, share: float) -> str:
    """Settings to change, with their new values, if the share holds no text."""
    remedies = []
    if plan.num_pages:
        remedies.append(f"max_model_len to {plan.num_pages * plan.page_size}")
    needed = dataclasses.replace(plan, num_pages=-(-plan.needed_tokens // plan.page_size))
    slots = needed.slots_within(share)
    if 0 < slots < plan.num_slots:
        remedies.append(f"max_num_seqs from {plan.num_slots} to {slots}")
    short = needed.peak_bytes - plan.peak_bytes
    # Rounding the pages down may have cost a 64th, and the reserve is a part of the share.
    wanted = plan.utilization + 1.02 * short / plan.limit_bytes
    wanted = math.ceil(100 * wanted) / 100
    if wanted <= 1.0:
        raised = f"raise memory_utilization to {wanted:g}"
        return f"{_lower(remedies)}, or {raised}" if remedies else raised
    return _lower(remedies)


def rounded(count: int) -> int:
    """A number of pages a little below, that a few bytes more or less do not change."""
    step = 1 << max(0, count.bit_length() - _KEPT_BITS)
    return count // step * step


# --- when it did not fit ------------------------------------------------------------------------

# What XLA says: "... request for 2.99GiB (3206250496B)", "... allocate 4770354232 bytes",
# "Out of memory allocating 4096 bytes", "... allocate 3.37GiB".
_REQUESTED = re.compile(
    r"allocat\w*(?: request for)? (?:[\d.]+[KMGT]iB \((\d+)B\)|(\d+) bytes|([\d.]+)([KMGT])iB)"
)
_SCALE = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
LEAST_CUT = 0.05  # of the device, when it ran out: other processes hold memory of the plan


def is_out_of_memory(error_text: str) -> bool:
    """Whether a failure of JAX is one of memory."""
    return bool(re.search(r"RESOURCE_EXHAUSTED|Resource exhausted|out of memory", error_text, re.I))


def explain(error_text: str, plan: MemoryPlan | None) -> str:
    """A failure in one line; where memory ran out, with what to lower and to what."""
    lines = error_text.strip().splitlines()
    first = lines[0].strip() if lines else "no message"
    if not is_out_of_memory(error_text):
        return first
    if plan is None:
        return f"{first.rstrip('.')}; lower num_pages, max_num_seqs or max_model_len"
    requested = _requested_bytes(error_text)
    wanted = plan.peak_bytes - max(requested, LEAST_CUT * plan.limit_bytes)
    remedies = plan._remedies(wanted)
    share = math.floor(100 * wanted / plan.limit_bytes) / 100
    if 0 < share < plan.utilization:
        remedies.append(f"memory_utilization from {plan.utilization:g} to {share:g}")
    size = f", asked for {_bytes(requested)} more" if requested else ""
    return f"the device ran out of memory{size}; engine memory: {plan}; {_lower(remedies)}"


def _requested_bytes(error_text: str) -> int:
    found = _REQUESTED.search(error_text)
    if found is None:
        return 0
    exact, plain, number, scale = found.groups()
    return int(exact or plain or 0) or int(float(number) * _SCALE[scale])


def _lower(remedies: list[str]) -> str:
    return "lower " + ", or ".join(remedies) if remedies else _SMALLER


def _bytes(count: float) -> str:
    """Bytes for people."""
    for unit, size in (("GiB", GIB), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 2**10:.1f} KiB"

"""Weights on several devices, and programs over their parts.

Data flow: parameters -> `split_axes.fitted_leaf` (axes that do not divide are repeated or padded)
-> `Split.place`. Every device then runs the whole program over its parts (`Split.run`) and adds
partial sums (`total`).
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32

from dllm_jax.kernels.layer import reduces, reduction
from dllm_jax.models.split_axes import fitted_leaf, is_split_by_row, name_of, split_axis

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Split:
    """The devices that share a model.

    Attributes:
        mesh: The devices.
        axis: The axis of the mesh that heads, experts and the vocabulary are split along.
        batch: The axis that the rows of `dj.generate` are split along; None: every device
            computes all rows.
    """

    mesh: Mesh
    axis: str = "tp"
    batch: str | None = None

    def __post_init__(self):
        names = self.mesh.axis_names
        for field in ("axis", "batch"):
            name = getattr(self, field)
            if name not in names and not (name is None and field == "batch"):
                raise ValueError(f"{field}={name!r} is no axis of the mesh; it has {names}")
        if self.batch == self.axis:
            raise ValueError(
                f"batch={self.batch!r} is the axis that splits the weights; rows need another"
            )

    @property
    def num_parts(self) -> int:
        """Parts of a split axis."""
        return self.mesh.shape[self.axis]

    @property
    def num_batches(self) -> int:
        """Groups of devices that decode separate rows."""
        return 1 if self.batch is None else self.mesh.shape[self.batch]

    @property
    def spans_processes(self) -> bool:
        """Whether the devices belong to several processes."""
        return len({device.process_index for device in self.mesh.devices.flat}) > 1

    def specs(self, tree: Any) -> Any:
        """A tree of parameters, or a `Model`, with the `PartitionSpec` of each leaf."""
        return jax.tree_util.tree_map_with_path(lambda path, _: self._spec(path), tree)

    def _spec(self, path: Any) -> PartitionSpec:
        axis = split_axis(path)
        return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, self.axis)

    def sharding(self, *axes: str | None) -> NamedSharding:
        """The placement of an array by the mesh's axes; none: whole on every device."""
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def place(self, params: Any, cfg: Any) -> Any:
        """Parameters on the devices; each device receives only its parts.

        Args:
            params: The network's tree, on the host or on a device.
            cfg: Its config.
        """
        leaves, tree = jax.tree_util.tree_flatten_with_path(params)
        placed = [jax.block_until_ready(self.put(path, leaf, cfg)) for path, leaf in leaves]
        return jax.tree.unflatten(tree, placed)

    def put(self, path: Any, leaf: Any, cfg: Any) -> Array:
        """The leaf at a key path on the devices; returns before the copy is done."""
        whole = fitted_leaf(path, leaf, cfg, self.num_parts)
        sharding = NamedSharding(self.mesh, self._spec(path))
        if not sharding.is_fully_addressable:
            whole = np.asarray(whole)
        if not isinstance(whole, np.ndarray):
            return jax.device_put(whole, sharding)
        # A CPU device would share the memory of a NumPy array.
        keeps = self.mesh.devices.flat[0].platform == "cpu"

        def part(index: Any) -> Any:
            return np.array(whole[index]) if keeps else whole[index]

        return jax.make_array_from_callback(whole.shape, sharding, part)

    def rows(self, path: Any, shape: tuple[int, ...]) -> list[tuple[int, int]] | None:
        """The rows [first, end) of each device's part of experts or ids; None for other leaves."""
        name = name_of(path)[0]
        if not is_split_by_row(name) or self.mesh.size != self.num_parts:
            return None
        each = -(-shape[0] // self.num_parts)
        starts = range(0, each * self.num_parts, each)
        return [(min(first, shape[0]), min(first + each, shape[0])) for first in starts]

    def put_rows(self, path: Any, parts: Iterable[np.ndarray]) -> Array:
        """A leaf on the devices from their `rows`.

        The host holds at most two parts: one that is being copied and one that is being read. It
        returns before the last copy is done.
        """
        placed: list[Array] = []
        each, sharding = 0, NamedSharding(self.mesh, self._spec(path))
        devices = iter(self.mesh.devices.flat)  # `zip` would hold a part while the next is read
        for part in parts:
            device = next(devices)
            each = max(each, len(part))
            if device.process_index == jax.process_index():
                # A CPU device would share the memory of a NumPy array.
                own = np.array(part) if device.platform == "cpu" else part
                behind = [(0, each - len(part)), *[(0, 0)] * (part.ndim - 1)]
                own = np.pad(own, behind) if len(part) < each else own
                jax.block_until_ready(placed[-1:])
                placed.append(jax.device_put(own, device))
                del own
            del part
        shape = each * self.num_parts, *placed[0].shape[1:]
        return jax.make_array_from_single_device_arrays(shape, sharding, placed)

    def everywhere(self, tree: Any) -> Any:
        """Arrays of the host, or whole ones of the devices, whole on every device."""
        sharding = self.sharding()
        if sharding.is_fully_addressable:
            return jax.device_put(tree, sharding)

        # To devices of other processes `device_put` compares all copies first.
        def put(leaf: Any) -> Array:
            if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
                return leaf
            leaf = np.asarray(leaf)
            return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

        return jax.tree.map(put, tree)

    def laid(self, shapes: Any, specs: Any) -> Any:
        """Shapes with the sharding of their arrays.

        Args:
            specs: A tree of `PartitionSpec`, or a prefix of one.
        """
        return jax.tree.map(
            lambda shape, spec: jax.ShapeDtypeStruct(
                shape.shape, shape.dtype, sharding=NamedSharding(self.mesh, spec)
            ),
            shapes,
            jax.tree.broadcast(specs, shapes),
        )

    def misplaced(self, params: Any) -> list[str]:
        """Names of leaves that are placed against the rules; every call would move them."""
        leaves, _ = jax.tree_util.tree_flatten_with_path(params)
        return [
            jax.tree_util.keystr(path)
            for path, leaf in leaves
            if not leaf.sharding.is_equivalent_to(
                NamedSharding(self.mesh, self._spec(path)), leaf.ndim
            )
        ]

    def run(self, body: Callable[..., Any], args: Any, in_specs: Any, out_specs: Any) -> Any:
        """`body(*args)` on every device, over its parts of the arguments; call it inside jit.

        On CPU devices JAX's types also check that replicated results are equal on all devices.

        Args:
            in_specs, out_specs: Trees of `PartitionSpec`, or prefixes of them, for the arguments
                and the result.
        """
        leaves, tree = jax.tree.flatten(args)
        specs = jax.tree.leaves(jax.tree.broadcast(in_specs, args))
        if AxisType.Explicit in self.mesh.axis_types:
            leaves = [
                jax.sharding.reshard(leaf, NamedSharding(self.mesh, spec))
                for leaf, spec in zip(leaves, specs, strict=True)
            ]
        # jaxlib 0.11.2 crashes on arguments without elements, so they are created inside.
        whole = [bool(math.prod(leaf.shape)) for leaf in leaves]
        shapes = [
            NamedSharding(self.mesh, spec).shard_shape(leaf.shape)
            for leaf, spec in zip(leaves, specs, strict=True)
        ]

        def inside(given: list[Array]) -> Any:
            rest = iter(given)
            filled = [
                next(rest) if is_whole else jnp.zeros(shape, leaf.dtype)
                for leaf, shape, is_whole in zip(leaves, shapes, whole, strict=True)
            ]
            return body(*jax.tree.unflatten(tree, filled))

        def chosen(values: list[Any]) -> list[Any]:
            return [value for value, is_whole in zip(values, whole, strict=True) if is_whole]

        is_proved = self.mesh.devices.flat[0].platform == "cpu" and self.batch is None
        return jax.shard_map(
            inside,
            mesh=self.mesh,
            in_specs=(chosen(specs),),
            out_specs=out_specs,
            check_vma=is_proved,
        )(chosen(leaves))


def partitioned(split: Split | None, body: Callable[..., _T], params: Any, *args: Any) -> _T:
    """`body(params, *args)` by XLA's partitioning, for code outside the engine's programs.

    The result is whole on every device. Explicit mesh axes are automatic inside.
    """
    if split is None or AxisType.Explicit not in split.mesh.axis_types:
        return body(params, *args)
    whole = split.sharding()
    args = jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, whole), args)
    automatic: Any = jax.sharding.auto_axes(body, out_sharding=whole)
    return automatic(params, *args)


def over_devices(count: int) -> Split:
    """A model split over the first `count` devices.

    Raises:
        ValueError: Fewer devices exist.
    """
    devices = jax.devices()
    if not 1 <= count <= len(devices):
        raise ValueError(
            f"tensor_parallel_size={count} needs {count} devices, this process sees "
            f"{len(devices)} ({devices[0].platform}); choose a number in [1, {len(devices)}]"
        )
    if jax.process_count() > 1 and count != len(devices):
        raise ValueError(
            f"tensor_parallel_size={count}: {jax.process_count()} processes share a model over "
            f"all of their {len(devices)} devices; give {len(devices)}"
        )
    return Split(Mesh(np.array(devices[:count]), ("tp",)))


def as_split(mesh: Mesh | Split) -> Split:
    """A mesh of one axis as a `Split` along it.

    Raises:
        ValueError: It has several axes, of which one must be named.
    """
    if isinstance(mesh, Split):
        return mesh
    if len(mesh.axis_names) != 1:
        raise ValueError(
            f"mesh has the axes {mesh.axis_names}; name the one that splits the weights: "
            f"mesh=dj.Split(mesh, axis={mesh.axis_names[-1]!r}, batch={mesh.axis_names[0]!r})"
        )
    return Split(mesh, axis=mesh.axis_names[0])


class Exchange(NamedTuple):
    """Peer memory through which kernels all-reduce on one host.

    Attributes:
        peers: Addresses of the inboxes of all devices, for kernels.
        inbox: Data from the other devices; only kernels read and write it.
    """

    peers: Int32[Array, "devices words"]
    inbox: Int32[Array, "devices size"]


def total(
    y: Array, rows: Float[Array, "*M D"], axis: str | None, peers: Array | None = None
) -> Array:
    """The sum of `y` over the devices; without an axis, `y` unchanged.

    Args:
        y: Rows like `rows`, or partial sums of them from `split_matmul`, which are added first.
        peers: `peers` of an `Exchange`; None: XLA computes the sum.
    """
    if axis is None:
        return y
    if peers is not None and reduces(rows):
        return reduction(y, rows, peers)
    y = jnp.sum(y, axis=0) if y.ndim > rows.ndim else y
    return jax.lax.psum(y.astype(rows.dtype), axis)


def once(bias: Array, axis: str | None) -> Array:
    """A bias for a partial sum: zero on all devices but one."""
    if axis is None:
        return bias
    return jnp.where(jax.lax.axis_index(axis) == 0, bias, jnp.zeros_like(bias))


def first_of(num_local: int, axis: str | None) -> Array | int:
    """The number of the first of the `num_local` experts or ids on this device."""
    return 0 if axis is None else jax.lax.axis_index(axis) * num_local

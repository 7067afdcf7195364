"""Known faults of JAX, XLA and the drivers below them: which versions have them, what they touch, and what helps.

Those of XLA:CPU were reproduced with jaxlib 0.10.2 and 0.12.0.1 on x86, except that of `arctan`, which needs another
processor. The others are what their threads say; those of TPUs do not show on a CPU, where the same programs are right.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr, Var

from lowering.cost import inner_jaxprs
from lowering.rewriting.graph import RESHAPES, Level, Node, Value, backward, equations

_WITHOUT_YNN = "XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type="
_JAX, _XLA = "https://github.com/jax-ml/jax/issues", "https://github.com/openxla/xla/issues"
_ROWS, _SMALL = 2**14, 8
_SMALL_UPDATE_BYTES, _MANY_STEPS = 256, 10_000
_SUMS_OF_ROWS = ("scatter-add", "scatter_add", "embedding_dense_backward")


@dataclasses.dataclass(frozen=True)
class Fault:
    """A published fault.

    Attributes:
      what: what goes wrong, and with what, in a sentence.
      thread: where it was reported.
      since: the first jaxlib that has it.
      until: the first jaxlib without it; empty if none is known.
      platforms: where it happens: "cpu", "cuda", "tpu".
      helps: the version, the flag or the function that avoids it.
      find: yields the nodes of a graph that it may touch.
      avoided_by: XLA_FLAGS that match have avoided it already.
      caused_by: it happens under XLA_FLAGS that match; empty if always.
    """

    what: str
    thread: str
    since: str
    until: str
    platforms: frozenset[str]
    helps: str
    find: Callable[[Level], Iterable[Node]]
    avoided_by: str = ""
    caused_by: str = ""

    @property
    def name(self) -> str:
        """Repository and number, such as "jax#39103"."""
        *_, repository, _, number = self.thread.split("/")
        return f"{repository}#{number}"

    def is_in(self, jaxlib: str, platform: str, xla_flags: str) -> bool:
        """Tells whether this jaxlib has it on this platform under these flags."""
        version = release(jaxlib)
        has_it = release(self.since) <= version and not (self.until and version >= release(self.until))
        is_avoided = bool(self.avoided_by) and re.search(self.avoided_by, xla_flags) is not None
        is_caused = not self.caused_by or re.search(self.caused_by, xla_flags) is not None
        return has_it and platform in self.platforms and is_caused and not is_avoided


def release(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version, such as (0, 12, 0) of "0.12.0.dev20260920"."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _sums_of_small_products(level: Level) -> Iterator[Node]:
    """Finds sums over the few rows of a product of matrices with very many columns."""
    for node in level.named("reduce_sum"):
        x, axes = node.inputs[0], node.params["axes"]
        is_narrow = len(axes) == 1 and axes[0] < len(x.shape) - 1 and _known(x.shape[axes[0]]) < _SMALL
        if is_narrow and _known(x.symbolic_size) >= _ROWS * _known(x.shape[axes[0]]):
            sources = backward(x, lambda step, value: _is_elementwise(step))
            if any(y.producer is not None and y.producer.name == "dot_general" for y in sources):
                yield node


def _sums_of_products_of_high_rank(level: Level) -> Iterator[Node]:
    for node in level.named("reduce_sum"):
        x = node.inputs[0]
        if (
            len(x.shape) >= 7
            and _is_float32(x)
            and x.producer is not None
            and x.producer.name in ("mul", "dot_general")
        ):
            yield node


def _windows_of_one_in_dilated_operands(level: Level) -> Iterator[Node]:
    for node in level.nodes:
        if node.name.startswith("reduce_window"):
            params = node.params
            along = zip(
                params["window_dimensions"], params["window_strides"], params.get("base_dilation") or (), strict=False
            )
            if any(window == 1 and stride == 1 and dilation > 1 for window, stride, dilation in along):
                yield node


def _updates_by_slices_of_themselves(level: Level) -> Iterator[Node]:
    """Finds arrays that are updated by a shifted slice of themselves, and reshaped."""
    for node in level.named("dynamic_update_slice", "scatter"):
        base, update = node.inputs[0], node.inputs[2 if node.name == "scatter" else 1]
        sources = backward(update, lambda step, value: _is_elementwise(step) or step.name in ("slice", "dynamic_slice"))
        is_sliced = any(x.producer is not None and "slice" in x.producer.name for x in sources)
        if base in sources and is_sliced and any(user.name == "reshape" for user in node.outputs[0].users):
            yield node


def _composites(level: Level) -> Iterator[Node]:
    yield from level.named("composite")


def _partitionings(level: Level) -> Iterator[Node]:
    yield from level.named("custom_partitioning")


def _arctangents(level: Level) -> Iterator[Node]:
    return (x for x in level.named("atan") if _is_float32(x.inputs[0]) and _known(x.inputs[0].symbolic_size) >= 50)


def _kernels_with_several_grids(level: Level) -> Iterator[Node]:
    """Finds kernels that one function describes for several grids."""
    grids: dict[str, set[Any]] = {}
    for node in level.named("pallas_call"):
        seen = grids.setdefault(node.params["jaxpr"].debug_info.func_src_info, set())
        seen.add(node.params["grid_mapping"].grid)
        if len(seen) == 2:
            yield node


def _sums_into_few_rows(level: Level) -> Iterator[Node]:
    """Finds float32 sums of more numbers than there are places for."""
    for node in _scatters(level):
        numbers, shape = node.params["dimension_numbers"], node.inputs[0].shape
        places = math.prod(shape[i] for i in (*numbers.scatter_dims_to_operand_dims, *numbers.operand_batching_dims))
        if _is_float32(node.inputs[0]) and math.prod(node.inputs[1].shape[:-1]) > places:
            yield node


def _scatters(level: Level) -> Iterator[Node]:
    """Finds those of more than one slice."""
    nodes = level.named("scatter-add", "scatter_add")
    return (node for node in nodes if math.prod(node.inputs[1].shape[:-1]) > 1)


def _strided_scatters(level: Level) -> Iterator[Node]:
    """Finds sums into rows that are not the leading axis, as of a vmapped segment_sum."""
    for node in _scatters(level):
        numbers = node.params["dimension_numbers"]
        is_strided = 0 in numbers.update_window_dims and 0 not in numbers.scatter_dims_to_operand_dims
        users = node.outputs[0].users
        if is_strided and not (users and all(user.name == "transpose" for user in users)):
            yield node


def _pooling_gradients(level: Level) -> Iterator[Node]:
    yield from level.named("select_and_scatter_add")


def _small_writes_in_loops(level: Level) -> Iterator[Node]:
    """Finds loops that write a few bytes of a large array at each turn."""
    for node in level.named("scan", "while"):
        writes = (write for body in inner_jaxprs(node) for write in _writes(node, body))
        if any(_is_small_part(whole, part) for whole, part in writes):
            yield node


def _kernels_with_unread_operands(level: Level) -> Iterator[Node]:
    """Finds kernels that copy, and never read an operand which the program computes."""
    for node in level.named("pallas_call"):
        body = node.params["jaxpr"]
        read = {x for equation in body.eqns for x in equation.invars if isinstance(x, Var)}
        operands = zip(node.inputs, body.invars, strict=False)  # then come results and scratch
        has_unread = any(x.producer is not None and ref not in read for x, ref in operands)
        if has_unread and any(equation.primitive.name == "dma_start" for equation in equations(body)):
            yield node


def _kernels_that_copy_four_bytes(level: Level) -> Iterator[Node]:
    for node in level.named("pallas_call"):
        copies = (each for each in equations(node.params["jaxpr"]) if each.primitive.name == "dma_start")
        if any(_bytes_of(x.aval) == 4 for each in copies for x in each.invars):
            yield node


def _scatters_summed_in_loops(level: Level) -> Iterator[Node]:
    """Finds loops that carry an array of the shape of a scatter-add within them: gradients of microbatches."""
    for node in level.named("scan", "while"):
        carried = {x.shape for x in node.outputs}
        within = (each for body in inner_jaxprs(node) for each in equations(body))
        sums = (each for each in within if each.primitive.name in _SUMS_OF_ROWS)
        if any(each.outvars[0].aval.shape in carried for each in sums):
            yield node


def _bytes_of(aval: Any) -> int:
    """Returns the size of an array or of what a reference refers to; 0 for semaphores."""
    is_data = jnp.issubdtype(aval.dtype, jnp.number) or aval.dtype == jnp.bool_
    return math.prod(map(_known, aval.shape)) * aval.dtype.itemsize if is_data else 0


def _writes(node: Node, body: Jaxpr) -> Iterator[tuple[Any, Any]]:
    """Yields the types of arrays and of what a turn of a loop writes to them."""
    if node.name == "scan":
        results: Iterable[Any] = zip(node.outputs, body.outvars, strict=True)
        yield from ((x.aval, y.aval) for x, y in results if x.aval.shape != y.aval.shape)  # stacked; others are carried
    for equation in body.eqns:
        if equation.primitive.name in ("dynamic_update_slice", "scatter"):
            yield equation.invars[0].aval, equation.invars[2 if equation.primitive.name == "scatter" else 1].aval


def _is_small_part(whole: Any, part: Any) -> bool:
    size, part_size = (math.prod(map(_known, x.shape)) for x in (whole, part))
    return part_size * whole.dtype.itemsize < _SMALL_UPDATE_BYTES and size >= _MANY_STEPS * max(part_size, 1)


def _is_elementwise(node: Node) -> bool:
    name = node.name
    return name in RESHAPES or (
        name not in ("dot_general", "scatter", "gather", "dynamic_update_slice")
        and any(x.shape == node.outputs[0].shape for x in node.inputs)
    )


def _is_float32(value: Value) -> bool:
    return bool(value.aval.dtype == jnp.float32)


def _known(size: Any) -> int:
    """Returns a size; a symbolic one may be large."""
    return size if isinstance(size, int) else 2**30


_CPU, _GPU, _TPU = frozenset({"cpu"}), frozenset({"cuda"}), frozenset({"tpu"})
_YNN_IS_OFF = r"--xla_cpu_experimental_ynn_fusion_type=(-reduce|\s|$)"

FAULTS = (
    Fault(
        "XLA silently sums wrongly over the rows of a product that has few rows and very many columns.",
        f"{_JAX}/39103",
        "0.10.2",
        "0.11.0",
        _CPU,
        f"jaxlib 0.11.0 or newer, or {_WITHOUT_YNN}",
        _sums_of_small_products,
        avoided_by=_YNN_IS_OFF,
    ),
    Fault(
        "XLA crashes or hangs in a float32 sum of products of rank 7 or more.",
        f"{_JAX}/39257",
        "0.10.2",
        "0.12.0",
        _CPU,
        f"jaxlib 0.12.0 or newer, or {_WITHOUT_YNN}",
        _sums_of_products_of_high_rank,
        avoided_by=_YNN_IS_OFF,
    ),
    Fault(
        "A reduce_window is silently wrong along axes with base dilation where window and stride are 1.",
        f"{_XLA}/48714",
        "0.10.2",
        "",
        _CPU,
        _WITHOUT_YNN,
        _windows_of_one_in_dilated_operands,
        avoided_by=_YNN_IS_OFF,
    ),
    Fault(
        "Results are silently wrong where an array is updated by a slice of itself and then reshaped.",
        f"{_XLA}/49176",
        "0.10.2",
        "",
        _CPU,
        "XLA_FLAGS=--xla_disable_hlo_passes=algsimp",
        _updates_by_slices_of_themselves,
        avoided_by=r"--xla_disable_hlo_passes=\S*algsimp",
    ),
    Fault(
        "On some processors the arctan of 50 elements or more is silently wrong.",
        f"{_JAX}/39352",
        "0.10.2",
        "",
        _CPU,
        "compare with NumPy on this machine",
        _arctangents,
    ),
    Fault(
        "A loop that writes less than 256 bytes of a large array at each turn takes time quadratic in its length.",
        f"{_JAX}/40101",
        "0.11.1",
        "0.12.0",
        _CPU,
        "jaxlib 0.11.0, or 0.12.0 and newer",
        _small_writes_in_loops,
    ),
    Fault(
        "A lax.composite cannot be exported for several platforms or with symbolic sizes.",
        f"{_JAX}/40486",
        "0.10.2",
        "0.12.0",
        _CPU | _GPU | _TPU,
        "jax 0.12.0 or newer",
        _composites,
    ),
    Fault(
        "Where one kernel function is used with several grids, pl.num_programs is that of another grid.",
        f"{_JAX}/40847",
        "0.11.0",
        "0.12.0.1",
        _CPU | _GPU | _TPU,
        "jax 0.12.0.1 or newer, or a new functools.partial of the kernel for each grid",
        _kernels_with_several_grids,
    ),
    Fault(
        "A float32 scatter-add into few rows takes up to 2000 times as long as it should.",
        f"{_JAX}/38806",
        "0.10.2",
        "0.11.1",
        _GPU,
        "jaxlib 0.11.1 or newer",
        _sums_into_few_rows,
    ),
    Fault(
        "A vmapped segment_sum or scatter-add writes with a stride, which takes 3 to 6 times as long.",
        f"{_JAX}/39959",
        "0.9.2",
        "",
        _GPU,
        "out_axes=1 in the vmap",
        _strided_scatters,
    ),
    Fault(
        "XLA refuses the gradient of a max pooling under deterministic operations.",
        "https://github.com/google/flax/issues/4233",
        "0.4.0",
        "",
        _GPU,
        "jaxops.max_pool, whose gradient is deterministic",
        _pooling_gradients,
        caused_by=r"--xla_gpu_(deterministic_ops|exclude_nondeterministic_ops)(=true|=1|\s|$)",
    ),
    Fault(
        "A scatter-add is very slow under deterministic operations.",
        f"{_JAX}/17844",
        "0.4.0",
        "",
        _GPU,
        "sums of sorted rows; jaxops.embedding for the gradient of a table",
        _scatters,
        caused_by=r"--xla_gpu_deterministic_ops(=true|=1|\s|$)",
    ),
    Fault(
        "A function with custom_partitioning does not compile.",
        f"{_JAX}/38196",
        "0.4.0",
        "",
        _TPU,
        "jax.shard_map",
        _partitionings,
    ),
    Fault(
        "A Pallas kernel's copy from HBM silently gives zeros if the program computes an operand that the kernel never "
        "reads.",
        f"{_JAX}/39744",
        "0.10.2",
        "",
        _TPU,
        "a kernel without the operand, or one that reads it; libtpu 0.0.41 was right",
        _kernels_with_unread_operands,
    ),
    Fault(
        "A Pallas kernel that copies 4 bytes between HBM and VMEM silently gives zeros.",
        f"{_JAX}/39505",
        "0.10.2",
        "",
        _TPU,
        "copies of 8 bytes or more, or scalars in SMEM",
        _kernels_that_copy_four_bytes,
    ),
    Fault(
        "The sum of an embedding's gradients over the steps of a loop is silently wrong on a mesh that splits the "
        "vocabulary.",
        f"{_XLA}/49143",
        "0.10.2",
        "",
        _TPU,
        "XLA_FLAGS=--xla_disable_hlo_passes=while-loop-all-reduce-code-motion",
        _scatters_summed_in_loops,
        avoided_by=r"--xla_disable_hlo_passes=\S*while-loop-all-reduce-code-motion",
    ),
)

"""Tiles of a linear layer's logits on TPU: blocks that need not divide the arrays, and how much VMEM they may take.

Every block consists of whole (8, 128) tiles and may reach beyond its array, where its values are undefined. Along an
axis that a matrix product or a sum contracts, they are masked. Along any other axis they only reach results that are
not stored.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.kernel import Config

# The positions of the stacked vectors over classes.
BIAS, TARGET = range(2)
LANES = 128
SUBLANES = 8
_DTYPES = ("float32", "bfloat16")
_MIB = 2**20
_SMALLEST_VMEM_BYTES = 64 * _MIB  # of all TPUs that can be targets: v5p's and TPU7x's
_DEFAULT_LIMIT_BYTES = 16 * _MIB  # what XLA grants a kernel that asks for nothing
_MOST_CONFIGS = 6
# Classes of a product. With fewer, a matrix unit of v6e or TPU7x, which keeps 256 x 256 values of the other operand,
# waits for these; with more, a chunk's logits do not leave the registers in time for the next.
CHUNK = 256
# The most multiplications for a block. Filling the matrix unit and draining it costs some hundred cycles for each, but
# a block's code grows with it, and the time to compile that.
_MOST_PRODUCTS = 3 * 2**30
# The most elements of x in a block, which the compiler holds in VMEM once more, arranged for the matrix unit.
_MOST_OF_X = 2**22
# The most logits of a block: the exponentials of two blocks are in VMEM, one while the other is stored.
_MOST_LOGITS = 2**21
_MOST_CLASSES = 2**24  # float32 represents integers exactly up to this number


def block_size(size: int, wanted: int) -> int:
    """Returns the size of a block along an axis: as wanted, but at most the axis rounded up to whole tiles."""
    return min(wanted, round_up(size, LANES))


def round_up(size: int, multiple: int) -> int:
    """Returns the smallest multiple that is not below `size`."""
    return pl.cdiv(size, multiple) * multiple


def at_edge(body: Callable[[int | None], None], index: Any, size: int, block: int) -> None:
    """Calls body(None) if block `index` lies within the array, else body(the number of valid positions)."""
    # Only the last block can be cut, so all others run a body without masks.
    valid = size % block
    if not valid:
        body(None)
    elif size < block:
        body(valid)
    else:
        pl.when(index < size // block)(lambda: body(None))
        pl.when(index == size // block)(lambda: body(valid))


def for_chunks(fold: Callable[[Any, Any, Any], None], block_vocab: int, vocab_index: Any, valid_classes: Any) -> None:
    """Calls fold(classes of the block, the first of them, how many are valid or None) for every chunk of a block."""
    chunk, first_class = math.gcd(block_vocab, CHUNK), vocab_index * block_vocab

    def fold_cut(index: Any, _: None) -> None:
        start = pl.multiple_of(index * chunk, chunk)
        fold(pl.ds(start, chunk), first_class + start, valid_classes - start)

    if valid_classes is None:
        for start in range(0, block_vocab, chunk):
            fold(pl.ds(start, chunk), first_class + start, None)
    else:
        # The last block is one of many, and runs through a loop instead of more long code.
        jax.lax.fori_loop(0, pl.cdiv(valid_classes, chunk), fold_cut, None)


def masked(values: jax.Array, axis: int, valid: int | None, fill: float = 0) -> jax.Array:
    """Returns `values`, with `fill` from position `valid` on."""
    if valid is None:
        return values
    position = jax.lax.broadcasted_iota(jnp.int32, values.shape, axis)
    return jnp.where(position < valid, values, jnp.asarray(fill, values.dtype))


def dot(lhs: jax.Array, rhs: jax.Array, *, contract: tuple[int, int]) -> jax.Array:
    """Computes a matrix product, accumulated in float32.

    A product of float32 operands takes one pass on the matrix units. If `jax_default_matmul_precision` asks for more,
    it takes as many as keep all bits, since not every JAX offers the precisions in between.
    """
    asked: str | None = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined] # added when JAX starts
    exact = lhs.dtype == jnp.float32 and asked not in (None, "default", "bfloat16")
    return jax.lax.dot_general(
        lhs,
        rhs,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def scratch_of_tile(dtype: Any, grid: tuple[int, ...], blocks: tuple[int, ...]) -> list[Any]:
    """Returns what `logits_by_chunk` holds from one step to the next: one array, or none."""
    from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

    block_rows, block_vocab, block_hidden = blocks
    if grid[2] > 1:
        return [pltpu.VMEM((block_vocab, block_rows), jnp.float32)]
    if grid[1] > 1 and dtype == jnp.bfloat16:
        return [pltpu.VMEM((block_rows // 2, block_hidden), jnp.uint32)]
    return []


def logits_by_chunk(
    x_ref: Any, weight_ref: Any, held: Sequence[Any], indices: tuple[Any, Any], features: int, is_live: Any = True
) -> Callable[[], Callable[[Any], jax.Array]]:
    """Adds up a tile's logits over its blocks of features; `indices` are those of the classes and of the features.

    To be called in the last step, the result loads x and returns logits_of(classes of the block) -> (classes, rows).
    What is `held` from step to step (`scratch_of_tile`) is the sum of the products so far if there are several, and
    otherwise x.
    """
    from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

    (vocab_index, hidden_index), hidden_blocks = indices, pl.cdiv(features, x_ref.shape[1])
    # Beyond the arrays' edges a block holds anything, NaN included, so features are masked before the product. Rows and
    # classes need no mask there: they only reach their own logits.
    valid_features = features % x_ref.shape[1] or None

    if hidden_blocks > 1:
        (sum_ref,) = held

        @pl.when(is_live & (hidden_index == 0))
        def _assign() -> None:
            sum_ref[...] = dot(weight_ref[...], x_ref[...], contract=(1, 1))

        @pl.when(is_live & (hidden_index > 0) & (hidden_index < hidden_blocks - 1))
        def _add() -> None:
            sum_ref[...] += dot(weight_ref[...], x_ref[...], contract=(1, 1))

    elif held:
        # Half of a register of 16 rows of bfloat16 is in one tile of x, and half in the next. Left to each block of
        # classes, joining them makes the matrix units of v6e and TPU7x wait; as words they stay joined.
        @pl.when(is_live & (vocab_index == 0))
        def _join() -> None:
            held[0][...] = pltpu.bitcast(masked(x_ref[...], 1, valid_features), jnp.uint32)

    def last_step() -> Callable[[Any], jax.Array]:
        # With one load of x for all products, the compiler arranges it for the matrix unit once.
        if hidden_blocks == 1 and held:
            x = pltpu.bitcast(held[0][...], x_ref.dtype)
        else:
            x = masked(x_ref[...], 1, valid_features)

        def logits_of(here: Any) -> jax.Array:
            logits = dot(masked(weight_ref[here, :], 1, valid_features), x, contract=(1, 1))
            return logits if hidden_blocks == 1 else logits + held[0][here, :]

        return logits_of

    return last_step


def class_or_none(labels: jax.Array, classes: int) -> jax.Array:
    """Returns labels as int32; -1 if they are not in [0, classes)."""
    labels = labels if labels.dtype.itemsize == 8 else labels.astype(jnp.int32)
    return jnp.where((labels >= 0) & (labels < classes), labels, -jnp.ones_like(labels)).astype(jnp.int32)


def whole_tile(matrix: jax.Array) -> jax.Array:
    """Pads a matrix to the rows of a tile: Mosaic cannot read the layout that XLA gives to fewer rows of bfloat16."""
    return jnp.pad(matrix, ((0, max(0, SUBLANES - matrix.shape[0])), (0, 0)))


def streamed(matrix: jax.Array, interpret: Any) -> jax.Array:
    """Pads a matrix to `whole_tile` and keeps it in HBM, where a kernel reads it a block at a time.

    Left to itself, XLA copies a matrix that fits into VMEM there before the kernel starts, and nothing is computed
    meanwhile.
    """
    from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

    matrix = whole_tile(matrix)
    return matrix if interpret else pltpu.with_memory_space_constraint(matrix, pltpu.HBM)


def live_blocks(is_live: jax.Array, block_rows: int) -> jax.Array:
    """Returns 1 for each block with a live row, 0 for a block that can be skipped."""
    missing = -is_live.size % block_rows
    return jnp.any(jnp.pad(is_live, (0, missing)).reshape(-1, block_rows), axis=1).astype(jnp.int32)


def stacked(rows: Iterable[jax.Array]) -> jax.Array:
    """Stacks vectors of one size as rows of a float32 array, padded to eight, which a kernel can transpose."""
    rows = [row.astype(jnp.float32) for row in rows]
    return jnp.stack([*rows, *[jnp.zeros_like(rows[0])] * (SUBLANES - len(rows))])


def class_vectors(bias: jax.Array | None, target: jax.Array | None, classes: int) -> jax.Array | None:
    """Stacks the vectors over classes in the order of `BIAS` and `TARGET`; None if both are absent."""
    if bias is None and target is None:
        return None
    return stacked(jnp.zeros((classes,), jnp.float32) if vector is None else vector for vector in (bias, target))


def block_bytes(itemsize: int, elements: int) -> int:
    """Returns the VMEM of an operand's block."""
    # Two buffers, and for float32 the bfloat16 parts that a product at full precision splits it into: 8 bytes are room
    # for four.
    return elements * (2 * itemsize + (8 if itemsize == 4 else 0))


def vmem_limit_bytes(estimated_bytes: int) -> int:
    """Returns the VMEM to ask XLA for: the estimate, and a quarter more for Mosaic's own needs beside the blocks."""
    return max(_DEFAULT_LIMIT_BYTES, math.ceil(1.25 * estimated_bytes))


def affordable(
    hardware: Any, configs: Iterable[Config], vmem_bytes: Callable[..., int], hbm_bytes: Callable[..., float]
) -> list[Config]:
    """Lists the configurations that fit into VMEM, the least traffic to HBM first."""
    on_chip_bytes = getattr(hardware, "on_chip_bytes", None) or _SMALLEST_VMEM_BYTES
    unique = {tuple(config.items()): config for config in configs}.values()
    fitting = [config for config in unique if vmem_limit_bytes(vmem_bytes(**config)) <= 0.9 * on_chip_bytes]
    return sorted(fitting, key=lambda config: hbm_bytes(**config))[:_MOST_CONFIGS]


def dtype_refusal(**operands: Any) -> str | None:
    """Says why Mosaic TPU cannot multiply operands of these dtypes."""
    for name, operand in operands.items():
        if jnp.dtype(operand.dtype).name not in _DTYPES:
            return f"Mosaic TPU multiplies {' and '.join(_DTYPES)}; {name} is {jnp.dtype(operand.dtype).name}"
    return None


def size_refusal(x: Any, weight: Any) -> str | None:
    """Says why an operand is empty for a kernel, or has too many classes to count."""
    if 0 in (*x.shape, *weight.shape):
        return f"a kernel needs rows, features and classes; x is {list(x.shape)}, weight {list(weight.shape)}"
    if weight.shape[0] > _MOST_CLASSES:
        return f"the kernel counts classes in float32, up to {_MOST_CLASSES}; weight has {weight.shape[0]}"
    return None


def blocks_of(rows: int, classes: int, features: int, config: Config) -> tuple[int, ...]:
    """Returns the block sizes of a configuration, cut down to the operands."""
    wanted = config["block_rows"], config["block_vocab"], config["block_hidden"]
    return tuple(map(block_size, (rows, round_up(classes, CHUNK), features), wanted))


def block_choices(rows: int, classes: int, features: int, most_rows: int = 2048) -> Iterator[Config]:
    """Yields block sizes worth trying for a kernel that computes a block's logits in chunks of classes."""
    names = ("block_rows", "block_vocab", "block_hidden")
    # Of two sizes with the same traffic, the one that leaves no block of classes cut comes first.
    vocab_sizes = sorted((1024, 768, 512, 256), key=lambda size: size < 768 or classes % size > 0)
    row_sizes = [size for size in (4096, 2048, 1024, 512, 256) if size <= most_rows]
    wanted = itertools.product(row_sizes, vocab_sizes, (round_up(features, LANES), 2048, 1024, 512))
    for sizes in wanted:
        block_rows, block_vocab, block_hidden = blocks_of(rows, classes, features, dict(zip(names, sizes, strict=True)))
        of_x = block_rows * block_hidden
        is_short = of_x <= _MOST_OF_X and of_x * block_vocab <= _MOST_PRODUCTS  # the code for a block
        if is_short and block_rows * block_vocab <= _MOST_LOGITS:
            yield dict(zip(names, (block_rows, block_vocab, block_hidden), strict=True))


def operand_bytes(
    itemsize: int, shape: tuple[int, int], classes: int, block_rows: int, block_vocab: int, block_hidden: int
) -> int:
    """Estimates the traffic of operands: the weight once a block of rows, x once, or once a block of classes if cut."""
    # A block of x that spans all features keeps its index while classes pass, so it is copied only once.
    rows, features = shape
    reads_of_x = 1 if block_hidden >= features else pl.cdiv(classes, block_vocab)
    return itemsize * features * (rows * reads_of_x + classes * pl.cdiv(rows, block_rows))

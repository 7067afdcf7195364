r"""Times of this library's operators on TPUs that are not here, by the schedules that their compiler makes.

python benchmarks/tpu_schedules.py --output benchmarks/results/tpu_schedules.json --tuned lowering/tuned

Nothing runs: docs/schedule.md says how far such times are to be trusted. It needs `jaxops targets --install tpu`.
"""

import dataclasses
import functools
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np

import jaxops
import lowering
from jaxops import aclnn
from jaxops.linear_cross_entropy import chunk_sizes
from lowering.operators import registered
from lowering.schedule.chips import CHIPS, bytes_per_cycle
from lowering.targets import named
from pallas_kernels.tpu import embedding

F32, BF16, I32 = jnp.float32, jnp.bfloat16, jnp.int32
TARGETS = ("tpu-v5e", "tpu-v6e", "tpu-v7x")
# Kernels by XLA: between these, a replay cannot tell which is faster.
TIE = (0.87, 1.15)
# What data decides in the kernels: all rows are live. After 12 binary digits, a turn of dropout's draws the others for
# two of the 16 words at each of 1024 places; a word is undecided with p = 1 - (1 - 2**-12)**32, so somewhere there are
# more than two, for another turn, with probability 0.24 (0.45 with 20 words). XLA draws 24 digits in six steps.
ALL_ROWS = {"linear_cross_entropy": 1, "linear_cross_entropy_weight_grad": 1, "linear_cross_entropy_x_grad": 1}
TRIP_COUNTS, XLA_DROPOUT_STEPS = {**ALL_ROWS, "dropout": 0.24}, 6
DROPOUT_RATE = 0.1


@dataclasses.dataclass(frozen=True)
class Case:
    """Something to replay.

    Attributes:
      name: what the results call it.
      fn: a function.
      args: its operands.
      scalars: what operands of its kernels hold, as for `lowering.compile`.
      counts: what data decides in XLA's program, in the order in which it is asked for: how often a branch is
        taken or a loop turns.
      again: what has to be read once more when the gradient of a result is known.
      unread: what of the operands is not needed: a lookup reads some rows of its table.
      is_ranked: whether configurations of its kernels ship with the library.
      has_kernel: False for operators that have none on TPUs.
    """

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    scalars: Mapping[str, Mapping[int, Any]] | None = None
    counts: tuple[float, ...] = ()
    again: jax.ShapeDtypeStruct | None = None
    unread: jax.ShapeDtypeStruct | None = None
    is_ranked: bool = True
    has_kernel: bool = True


def shape(*sizes: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def cases() -> Iterator[Case]:
    """Name, function and operands."""
    for sizes, dtype in (((16384, 4096), F32), ((4096, 32000), F32), ((65536, 1024), BF16)):
        x = shape(*sizes, dtype=dtype)
        yield Case(f"softmax {text(x)}", jaxops.softmax, (x,))
        yield Case(f"softmax {text(x)}, with gradient", with_gradient(jaxops.softmax), (x, x), again=x)
    for x in (shape(128, 96, 55, 55), shape(128, 256, 27, 27), shape(64, 64, 112, 112, dtype=BF16)):
        yield Case(
            f"local_response_norm {text(x)}", functools.partial(jaxops.local_response_norm, n=5, layout="NCHW"), (x,)
        )
    for x, layout in (
        (shape(128, 96, 27, 27), "NCHW"),
        (shape(32, 56, 56, 128), "NHWC"),
        (shape(128, 112, 112, 64), "NHWC"),
    ):
        norm = functools.partial(jaxops.divisive_norm, n=5, layout=layout)
        yield Case(f"divisive_norm {text(x)} {layout}, with gradient", with_gradient(norm), (x, x), again=x)
        name, twice = f"divisive_norm {text(x)} {layout}, means, with gradients", shape(2, *x.shape)
        yield Case(name, with_all_gradients(norm), (x,) * 3, again=twice)
    for leaf in (shape(65536, 1024), shape(4096, 14336), shape(32000, 4096, dtype=BF16)):
        leaves = (leaf,) * 5
        donating = jax.jit(adam_step, donate_argnums=(1, 2, 3, 4))
        yield Case(f"ema_adam {text(leaf)}", adam_step, (*leaves, shape(dtype=I32)))
        yield Case(f"ema_adam {text(leaf)}, donated", donating, (*leaves, shape(dtype=I32)))
    for x in (shape(16384, 4096, dtype=BF16), shape(16384, 4096), shape(8192, 14336, dtype=BF16)):
        key = shape(2, dtype=jnp.uint32)
        threshold = {"dropout": {0: np.int32(np.float32(1 - DROPOUT_RATE) * 2**24)}}
        drop = functools.partial(dropped, rate=DROPOUT_RATE)
        yield Case(f"dropout {text(x)}, rate {DROPOUT_RATE}", drop, (x, key), threshold)
    for layout, x in (
        ("NHWC", shape(256, 112, 112, 64, dtype=BF16)),
        ("NHWC", shape(256, 56, 56, 64, dtype=BF16)),
        ("NHWC", shape(256, 28, 28, 256, dtype=BF16)),
        ("NHWC", shape(256, 14, 14, 1024, dtype=BF16)),
        ("NCHW", shape(256, 64, 56, 56)),
    ):
        channels = (shape(x.shape[layout.index("C")]),) * 4
        forward = functools.partial(normalized, layout=layout)
        yield Case(f"batch_norm {text(x)} {layout}", forward, (x, *channels))
        both = with_gradients_of_y(forward)
        yield Case(f"batch_norm {text(x)} {layout}, with gradients", both, (x, x, *channels), again=x)
    for layout, window, x in (
        ("NHWC", 3, shape(256, 112, 112, 64, dtype=BF16)),
        ("NCHW", 3, shape(256, 64, 112, 112)),
        ("NHWC", 2, shape(256, 56, 56, 128, dtype=BF16)),
        ("NCHW", 2, shape(64, 128, 56, 56)),
    ):
        pool = functools.partial(pooled, layout=layout, window=window)
        out = jax.eval_shape(pool, x)
        name = f"max_pool {text(x)} {layout} {window}x{window}/2, with gradient"
        yield Case(name, with_gradient(pool), (x, out), again=x)
    for images in (shape(16, 64, 56, 56), shape(16, 256, 28, 28)):
        points = shape(images.shape[0], *images.shape[2:], 2)
        yield Case(f"grid_sample {text(images)}", jaxops.grid_sample, (images, points))
        yield Case(
            f"grid_sample {text(images)}, with gradients",
            with_all_gradients(jaxops.grid_sample),
            (images, images, points),
        )
    for ids in ("uniform", "Zipf"):
        yield embedding_gradient(ids, num_weights=32000, width=1024, positions=8192)
    for rows, features, classes in ((4096, 1024, 32768), (8192, 2048, 50304), (16384, 4096, 128256)):
        operands = shape(rows, features, dtype=BF16), shape(classes, features, dtype=BF16), shape(rows, dtype=I32)
        name = f"linear_cross_entropy bf16 {rows}x{features}x{classes}"
        # Where a block of classes is cut, its size depends on which blocks of rows are live: all.
        live = {kernel: {0: 1} for kernel in ALL_ROWS} if rows > 4096 else None
        is_ranked = live is None  # the others take hours
        yield Case(
            name, jaxops.linear_cross_entropy, operands, live, counts=(8,), is_ranked=is_ranked
        )  # chunks of rows
        both = jax.value_and_grad(jaxops.linear_cross_entropy, (0, 1))
        counts = chunks_of_gradients(rows, features, classes)
        yield Case(f"{name}, with gradients", both, operands, live, counts, is_ranked=is_ranked)
        if rows == 4096:
            loss = functools.partial(jaxops.linear_cross_entropy, return_aux=True)
            both = jax.value_and_grad(loss, (0, 1), has_aux=True)
            yield Case(f"{name}, with gradients and aux", both, operands, counts=(0,))
    yield from without_kernels()
    operands = shape(4096, 1024, dtype=BF16), shape(32768, 1024, dtype=BF16), shape(4096, dtype=I32)
    scoring = functools.partial(jaxops.linear_log_probs, temperature=0.7)
    yield Case("linear_log_probs bf16 4096x1024x32768, temperature 0.7", scoring, operands, counts=(8,))


def without_kernels() -> Iterator[Case]:
    """Yields cases of operators that have no kernel on TPUs."""
    x = shape(256, 56, 56, 64, dtype=BF16)
    for mode in ("relu", "swish"):
        activate = with_gradient(functools.partial(jaxops.activation, mode=mode))
        yield Case(f"activation {mode} {text(x)}, with gradient", activate, (x, x), has_kernel=False)
    pool = with_gradient(functools.partial(jaxops.avg_pool, window=3, stride=2, padding=1, layout="NHWC"))
    out = shape(256, 28, 28, 64, dtype=BF16)
    yield Case(f"avg_pool {text(x)} NHWC 3x3/2, with gradient", pool, (x, out), has_kernel=False)
    infer = functools.partial(jaxops.batch_norm_inference, layout="NHWC")
    yield Case(f"batch_norm_inference {text(x)} NHWC", infer, (x, *(shape(64),) * 4), has_kernel=False)
    log_probs, labels = shape(8192, 32000), shape(8192, dtype=I32)
    loss = jax.value_and_grad(jaxops.nll_loss)
    name, picked = f"nll_loss {text(log_probs)}, with gradient", (log_probs, labels)
    yield Case(name, loss, picked, unread=shape(8192, 31999), has_kernel=False)
    theta, grid = shape(64, 2, 3), shape(64, 224, 224, 2)
    grids = with_gradient(lambda theta: jaxops.affine_grid(theta, (64, 3, 224, 224)))
    yield Case(f"affine_grid {text(grid)}, with gradient", grids, (theta, grid), has_kernel=False)
    table, ids, places = shape(32000, 1024), shape(8, 1024, dtype=I32), shape(1024, 1024)
    name = f"embedding {text(table)}, 8192 ids, plus positions"
    yield Case(name, with_positions, (table, ids, places), unread=shape(32000 - 8192, 1024), has_kernel=False)


def chunks_of_gradients(rows: int, features: int, classes: int) -> tuple[float, ...]:
    """Returns what data decides: no row overflows, how many chunks there are, and no row moves."""
    chunks = math.ceil(rows / chunk_sizes.rows_of_exponentials(classes, features))
    return (0,) if chunks == 1 else (0, chunks, 0)


def embedding_gradient(kind: str, *, num_weights: int, width: int, positions: int) -> Case:
    """The gradient of a table for ids that are drawn here: they decide what the kernel does."""
    draws = np.random.default_rng(0)
    drawn = draws.integers(0, num_weights, positions) if kind == "uniform" else draws.zipf(1.3, positions) % num_weights

    def run(indices: jax.Array, grad: jax.Array) -> tuple[jax.Array, ...]:
        table = jnp.zeros((num_weights, width))
        return jax.vjp(lambda table: jaxops.embedding(table, indices), table)[1](grad)

    config = embedding.KERNEL.configs(named("tpu-v5e"), shape(positions, width), drawn, num_weights=num_weights)[0]
    scalars = embedding.scalar_operands(jnp.asarray(drawn), num_weights, width, F32, config)
    return Case(
        f"embedding float32 {num_weights}x{width}, {positions} {kind} ids, gradient",
        run,
        (shape(positions, dtype=I32), shape(positions, width)),
        {"embedding_dense_backward": dict(enumerate(map(np.asarray, scalars)))},
    )


def text(x: jax.ShapeDtypeStruct) -> str:
    return f"{jnp.dtype(x.dtype).name} {'x'.join(map(str, x.shape))}"


def with_gradient(fn: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    def run(x: jax.Array, grad: jax.Array) -> tuple[jax.Array, ...]:
        y, vjp = jax.vjp(fn, x)
        return y, *vjp(grad)

    return run


def with_gradients_of_y(fn: Callable[..., tuple[jax.Array, ...]]) -> Callable[..., Any]:
    def run(grad: jax.Array, *args: jax.Array) -> Any:
        def y_and_statistics(*differentiated: jax.Array) -> tuple[jax.Array, Any]:
            y, *statistics = fn(*differentiated, *args[3:])
            return y, statistics

        y, vjp, statistics = jax.vjp(y_and_statistics, *args[:3], has_aux=True)
        return y, statistics, vjp(grad)

    return run


def with_all_gradients(fn: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, ...]]:
    def run(grad: jax.Array, *operands: jax.Array) -> tuple[jax.Array, ...]:
        y, vjp = jax.vjp(fn, *operands)
        return y, *vjp(grad)

    return run


def adam_step(*args: jax.Array) -> tuple[jax.Array, ...]:
    return aclnn.apply_fused_ema_adam(
        *args, lr=1e-3, ema_decay=0.999, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01
    )


def normalized(x: jax.Array, *parameters: jax.Array, layout: str) -> tuple[jax.Array, ...]:
    out = jaxops.batch_norm(x, *parameters, momentum=0.1, epsilon=1e-5, layout=layout)
    return out.y, out.running_mean, out.running_var


def dropped(x: jax.Array, key: jax.Array, *, rate: float) -> jax.Array:
    return jaxops.dropout(key, x, rate)


def with_positions(table: jax.Array, ids: jax.Array, places: jax.Array) -> jax.Array:
    return jaxops.embedding(table, ids) + places


def pooled(x: jax.Array, *, layout: str, window: int) -> jax.Array:
    return jaxops.max_pool(x, window, stride=2, padding=window // 2 if window % 2 else 0, layout=layout)


def replayed(case: Case, target: str, implementation: str) -> dict[str, Any]:
    """The time and what binds the kernel that takes longest, or why there is none; "xla" runs no kernel of ours."""
    forms = {op.name: form.name for op in registered() for form in reversed(op.forms) if "tpu" in form.platforms}
    trip_counts: dict[str, float] = dict(TRIP_COUNTS) if implementation == "pallas" else {}
    options = {"target": target, "schedule": True, "trip_counts": trip_counts, "scalars": case.scalars}
    left = list(case.counts)
    while True:
        try:
            with lowering.use("reference", **forms) if implementation == "xla" else lowering.use(implementation):
                schedule = lowering.compile(case.fn, *case.args, **options).schedule
            break
        except (lowering.CompileError, lowering.NotSupportedError) as error:
            asked = re.search(r"\{'([^']+)': 1\}", str(error))
            if asked is None or not left:
                return {"refused": str(error).partition("\n")[0]}
            trip_counts[asked[1]] = left.pop(0)
    assert schedule is not None
    record = {"us": round(schedule.total_us, 1), "roofline_us": round(schedule.roofline_us, 1)}
    return record | {"bound": schedule.kernels[0].bound, **({"unknown": schedule.unknown} if schedule.unknown else {})}


def both_replayed(case: Case, target: str, tuned: Path | None) -> dict[str, Any]:
    """XLA's program and the kernels, with their best configurations if `tuned` is a folder to rank them in."""
    found = {"xla": replayed(case, target, "xla")}
    if not case.has_kernel:
        return found
    if tuned is None or not case.is_ranked:
        return found | {"pallas": replayed(case, target, "pallas")}
    # By itself the operator reads its rate from memory, so its reference draws in as many steps as data say.
    counts = {**TRIP_COUNTS, **({"program": XLA_DROPOUT_STEPS} if case.name.startswith("dropout") else {})}
    options = {"by": "schedule", "budget_seconds": 3600.0, "trip_counts": counts, "scalars": case.scalars}
    with lowering.tune(case.fn, *case.args, target=target, path=tuned / f"{target}.replayed.json", **options):
        return found | {"pallas": replayed(case, target, "pallas")}


def again_us(case: Case, target: str) -> float:
    """The time to read once more what the gradient needs, less that of what nobody needs."""
    hardware, chip = named(target), CHIPS[target]
    bytes_per_us = bytes_per_cycle(chip, hardware) * (hardware.cores or 1) * chip.hz / 1e6
    again, unread = (0 if x is None else x.size * x.dtype.itemsize for x in (case.again, case.unread))
    return (again - unread) / bytes_per_us


def ratio(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Returns a ratio of times as text, or a bound if one of them may be longer; "-" if nothing follows."""
    if "us" not in a or "us" not in b or ("unknown" in a and "unknown" in b):
        return "-"
    bound = "≥ " if "unknown" in a else "≤ " if "unknown" in b else ""
    return f"{bound}{a['us'] / b['us']:.2f}"


def compared(kernels: Mapping[str, Any], xla: Mapping[str, Any]) -> str:
    """Returns the kernels' time by XLA's as text, with a word where it is too near to 1 for a replay to tell."""
    text = ratio(kernels, xla)
    is_near = text[0].isdigit() and TIE[0] <= kernels["us"] / xla["us"] <= TIE[1]
    return f"{text} tie" if is_near else text


def number(row: Mapping[str, Any]) -> str:
    """Returns a time as text."""
    if "us" not in row:
        return "refused" if row else "-"
    return f"{row['us']:,.1f}{'+' if 'unknown' in row else ''}"


def page(results: dict[str, Any]) -> str:
    """The results as a page of documentation."""
    versions = results["environment"]["versions"]
    lines = [
        "# Replays of this library's operators",
        "",
        "Microseconds by libtpu's schedules, replayed; no chip ran anything ([how far to trust them](schedule.md)).",
        "Times and rooflines are at the clock and the bandwidth that chips reach. Beside them stands the roofline at",
        "those of the data sheet, which no chip reaches.",
        "The roofline counts each argument and result once, or the program's matrix products if they take longer;",
        "with a gradient, also what is read once more for it: y of softmax, x of norms and max-pool. Of a table or of",
        "log-probabilities it counts what is looked up.",
        "A time with a + may be longer: not all of the program was understood, such as what it leaves to other cores.",
        "Then a ratio is a bound. Replayed ratios are right within 6 % in the mean and 18 % at worst, so kernels that",
        f"take {TIE[0]} to {TIE[1]} of XLA's time are a tie: no chip may tell them from XLA. XLA's time is that of",
        "the form that runs by default without kernels.",
        f"Written by [`benchmarks/tpu_schedules.py`](../benchmarks/tpu_schedules.py) with JAX {versions['jax']}, "
        f"{results['environment']['date']}.",
        "",
        "| operator and operands | target | XLA | kernels | roofline | by data sheet | XLA by roofline "
        "| kernels by roofline | kernels by XLA |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for case in results["cases"]:
        name, _, target = case["name"].rpartition(" on ")
        found = case["candidates"]
        rows = [found["xla"], found.get("pallas", {})]
        once, bound = min(((row["roofline_us"], row["bound"]) for row in rows if "us" in row), default=(None, ""))
        roofline = None if once is None else once + case["again_us"]
        reached = CHIPS[target].clock_efficiency if bound == "MXU" else CHIPS[target].hbm_efficiency
        least = {} if roofline is None else {"us": roofline}
        ratios = [*(ratio(row, least) for row in rows), compared(rows[1], rows[0])]
        shown = [number(row) for row in rows]
        shown += ["-", "-"] if roofline is None else [f"{roofline:,.1f}", f"{roofline * reached:,.1f}"]
        lines.append(f"| {' | '.join([name, target, *shown, *ratios])} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = harness.parser(__doc__.partition("\n")[0])
    parser.add_argument(
        "--tuned", type=Path, help="a folder of tuning results: rank configurations first, keep them there"
    )
    parser.add_argument(
        "--only", default="", help="replay the cases whose names hold this, and keep the others' results"
    )
    parser.add_argument("--page", type=Path, help="where to write the results as a page of documentation")
    options = parser.parse_args()
    # What this process computes on does not matter, and a chip that is here is left alone.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    is_begun = options.only and options.output is not None and options.output.is_file()
    held = json.loads(options.output.read_text())["cases"] if is_begun else []
    by_name = {record["name"]: record for record in held}
    names = []
    for case in list(cases())[: 1 if options.quick else None]:
        for target in TARGETS[:1] if options.quick else TARGETS:
            names.append(name := f"{case.name} on {target}")
            if options.only in name:
                found = both_replayed(case, target, options.tuned)
                by_name[name] = {"name": name, "again_us": round(again_us(case, target), 1), "candidates": found}
                print(name, flush=True)
    results = harness.report("tpu_schedules", [by_name[name] for name in names if name in by_name], options.output)
    if options.page is not None:
        options.page.write_text(page(results))


if __name__ == "__main__":
    main()

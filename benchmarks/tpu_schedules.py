r"""Times of this library's operators on TPUs that are not here, by the schedules that their compiler makes.

python benchmarks/tpu_schedules.py --output benchmarks/results/tpu_schedules.json

Nothing runs: docs/schedule.md says how far such times are to be trusted. It needs `jaxops targets --install tpu`.
"""

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import harness
import jax
import jax.numpy as jnp

import jaxops
import lowering
from jaxops import aclnn

F32, BF16, I32 = jnp.float32, jnp.bfloat16, jnp.int32
TARGETS = ("tpu-v5e", "tpu-v6e", "tpu-v7x")
# All rows are live, and every chunk of them is computed.
ALL_ROWS = {"linear_cross_entropy": 1, "linear_cross_entropy_weight_grad": 1, "linear_cross_entropy_x_grad": 1}

Case = tuple[str, Callable[..., Any], tuple[Any, ...]]


def shape(*sizes: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def cases(quick: bool) -> Iterator[Case]:
    """Name, function and operands, as docs/schedule.md lists them."""
    x = shape(128, 256) if quick else shape(16384, 4096)
    yield "softmax f32", jaxops.softmax, (x,)
    if quick:
        return
    yield "softmax f32 forward and gradient", gradient_of(jaxops.softmax), (x, x)
    yield (
        "local_response_norm f32 128x96x55x55",
        functools.partial(jaxops.local_response_norm, n=5),
        (shape(128, 96, 55, 55),),
    )
    parameters = (shape(65536, 1024),) * 5
    yield "ema_adam f32 64 Mi", adam_step, (*parameters, shape(dtype=I32))
    yield (
        "ema_adam f32 64 Mi, donated",
        jax.jit(adam_step, donate_argnums=(1, 2, 3, 4)),
        (*parameters, shape(dtype=I32)),
    )
    yield (
        "dropout bf16",
        lambda x, key: jaxops.dropout(key, x, 0.1),
        (
            shape(16384, 4096, dtype=BF16),
            shape(2, dtype=jnp.uint32),
        ),
    )
    for layout, sizes, dtype in (
        ("NHWC", (256, 56, 56, 64), BF16),
        ("NHWC", (256, 28, 28, 256), BF16),
        ("NCHW", (256, 64, 56, 56), F32),
    ):
        channels = (shape(sizes[layout.index("C")]),) * 4
        name = f"batch_norm {jnp.dtype(dtype).name} {layout} {'x'.join(map(str, sizes))}"
        yield name, functools.partial(normalized, layout=layout), (shape(*sizes, dtype=dtype), *channels)
    operands = shape(4096, 1024, dtype=BF16), shape(32768, 1024, dtype=BF16), shape(4096, dtype=I32)
    yield "linear_cross_entropy bf16 4096x1024x32768", jaxops.linear_cross_entropy, operands
    both = jax.value_and_grad(jaxops.linear_cross_entropy, (0, 1))
    yield "linear_cross_entropy bf16 4096x1024x32768, value and gradients", both, operands


def gradient_of(fn: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return lambda x, grad: jax.vjp(fn, x)[1](grad)[0]


def adam_step(*args: jax.Array) -> tuple[jax.Array, ...]:
    return aclnn.apply_fused_ema_adam(
        *args, lr=1e-3, ema_decay=0.999, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01
    )


def normalized(x: jax.Array, *parameters: jax.Array, layout: str) -> tuple[jax.Array, ...]:
    out = jaxops.batch_norm(x, *parameters, momentum=0.1, epsilon=1e-5, layout=layout)
    return out.y, out.running_mean, out.running_var


def replayed(case: Case, target: str, implementation: str) -> dict[str, Any]:
    """The time and what binds the kernel that takes longest, or why there is none."""
    name, fn, args = case
    trip_counts = ALL_ROWS if implementation == "pallas" else None
    try:
        with lowering.use(implementation):
            schedule = lowering.compile(fn, *args, target=target, schedule=True, trip_counts=trip_counts).schedule
    except (lowering.CompileError, lowering.NotSupportedError) as error:
        return {"refused": str(error).partition("\n")[0]}
    assert schedule is not None
    record = {"us": round(schedule.total_us, 1), "roofline_us": round(schedule.roofline_us, 1)}
    return record | {"bound": schedule.kernels[0].bound, **({"unknown": schedule.unknown} if schedule.unknown else {})}


def main() -> None:
    options = harness.parser(__doc__.partition("\n")[0]).parse_args()
    # What this process computes on does not matter, and a chip that is here is left alone.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    records = []
    for case in cases(options.quick):
        for target in TARGETS[:1] if options.quick else TARGETS:
            candidates = {name: replayed(case, target, name) for name in ("reference", "pallas")}
            records.append({"name": f"{case[0]} on {target}", "candidates": candidates})
    harness.report("tpu_schedules", records, options.output)


if __name__ == "__main__":
    main()

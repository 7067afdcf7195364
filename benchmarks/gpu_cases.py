"""What `gpu.py` measures, each in a process of its own: one way to compute one thing, by the device's clock.

As a program it reads one request from standard input and tells one record.
"""

import csv
import functools
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ema_adam as adam
import harness
import jax
import jax.numpy as jnp
import linear_cross_entropy_peers as loss_peers
import optax
import rewriting
from gpu_timing import ANSWERS, ROUNDS, locked, measured

import lowering
from jaxops._suite import SUITE
from jaxops.linear_cross_entropy import linear_cross_entropy, linear_log_probs
from jaxops.linear_cross_entropy.operands import Columns, Rows
from lowering.targets import device_name, here, named
from pallas_kernels.gpu.linear_cross_entropy import exponentials
from pallas_kernels.gpu.linear_cross_entropy import statistics as row_statistics


class NotHereError(Exception):
    """What a case needs is not installed."""


def peak(torch: Any = None) -> dict[str, float]:
    """The most memory that this process has held at once, arguments and results too."""
    if torch is not None:
        return {"peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 3)} if torch.cuda.is_available() else {}
    statistics_of_device = jax.devices()[0].memory_stats() or {}
    most = statistics_of_device.get("peak_bytes_in_use")
    return {} if most is None else {"peak_gb": round(most / 1e9, 3)}


def installed(module: str) -> Any:
    """The module, for peers that few have."""
    if not importlib.util.find_spec(module):
        raise NotHereError(f"{module} is not installed")
    return importlib.import_module(module)


def probe(copied_mb: int, size: int) -> dict[str, Any]:
    """Versions, clocks, and the rates that everything else is a part of."""
    x = jnp.ones(copied_mb * 10**6 // 4, jnp.float32)
    copied = measured([functools.partial(jax.jit(lambda x: x + 1), x)])
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    product = measured([functools.partial(jax.jit(jnp.matmul), a, a)])
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader"]
    on_gpu = here().platform == "cuda"
    return {
        "target": device_name(here()),
        "environment": harness.environment(),
        "clocks": subprocess.run(query, capture_output=True, text=True).stdout.strip() if on_gpu else "",
        "copy_gb_per_s": round(2 * x.nbytes / copied["median_ms"] / 1e6, 1),
        "product_tflop_per_s": round(2 * size**3 / product["median_ms"] / 1e9, 1),
    }


@functools.partial(jax.jit, static_argnums=(0, 1, 2))  # so that nothing is kept in float32
def _loss_operands(rows: int, hidden: int, classes: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (rows, hidden), jnp.bfloat16)
    weight = (jax.random.normal(keys[1], (classes, hidden)) / hidden**0.5).astype(jnp.bfloat16)
    return x, weight, jax.random.randint(keys[2], (rows,), 0, classes)


def loss(candidate: str, rows: int, hidden: int, classes: int) -> dict[str, Any]:
    """The mean cross entropy of a linear layer with the gradients of x and weight."""
    name, _, detail = candidate.partition(":")
    detail, _, chunk_rows = detail.partition("@")
    strategy, _, implementation = detail.partition("+")
    if name in ("torch", "torch.compile", "liger", "cut"):
        return _torch_loss(name, rows, hidden, classes)
    losses: dict[str, Callable[..., Any]] = {
        "jaxops": functools.partial(
            linear_cross_entropy, strategy=strategy, chunk_rows=int(chunk_rows) if chunk_rows else None
        ),
        "optax": loss_peers.with_logits,
    }
    if name == "tokamax":
        installed("tokamax")
        losses = {f"tokamax {detail}": loss_peers.jax_peers()[f"tokamax {detail}"]}
        name = f"tokamax {detail}"
    x, weight, labels = _loss_operands(rows, hidden, classes)
    with lowering.use(implementation or "auto"):
        compiled = jax.jit(jax.value_and_grad(losses[name], (0, 1))).lower(x, weight, labels).compile()
    found = measured([functools.partial(compiled, x, weight, labels)])
    return {**found, **peak(), "temporary_gb": round(compiled.memory_analysis().temp_size_in_bytes / 1e9, 3)}


def agreement(candidate: str, rows: int, hidden: int, classes: int) -> dict[str, Any]:
    """Compares the loss's results with those of XLA: the largest difference over the largest value."""
    operands = _loss_operands(rows, hidden, classes)

    def results(implementation: str) -> Any:
        with lowering.use(implementation):
            return jax.jit(jax.value_and_grad(linear_cross_entropy, (0, 1)))(*operands)

    @jax.jit
    def difference(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.max(jnp.abs(x.astype(jnp.float32) - y)) / jnp.max(jnp.abs(y.astype(jnp.float32)))

    pairs = zip(*(jax.tree.leaves(results(name)) for name in (candidate, "xla_by_rows")), strict=True)
    return {"differences": [float(f"{difference(*pair):.3g}") for pair in pairs]}


def product(rows: int, hidden: int, classes: int) -> dict[str, Any]:
    """The logits as one product of 16-bit operands, with a 16-bit result."""
    x, weight, _ = _loss_operands(rows, hidden, classes)
    found = measured([functools.partial(jax.jit(lambda x, weight: x @ weight.T), x, weight)])
    return {**found, **_rate(found, rows, hidden, classes)}


def _rate(found: dict[str, Any], rows: int, hidden: int, classes: int) -> dict[str, float]:
    return {"tflop_per_s": round(2 * rows * hidden * classes / found["median_ms"] / 1e9, 1)}


def logits_kernel(kernel: str, config: dict[str, int], rows: int, hidden: int, classes: int) -> dict[str, Any]:
    """One of the kernels that compute logits in registers, with one of its configurations."""
    run = launcher(kernel, config, rows, hidden, classes)
    found = measured([run], rounds=ROUNDS if here().platform == "cuda" else 1)
    return {**found, **_rate(found, rows, hidden, classes)}


def launcher(kernel: str, config: dict[str, int], rows: int, hidden: int, classes: int) -> Callable[[], Any]:
    """Launches such a kernel, on operands that are drawn here."""
    return functools.partial(jax.jit(kernel_function(kernel, config)), *kernel_operands(kernel, rows, hidden, classes))


def kernel_configs(kernel: str, rows: int, hidden: int, classes: int) -> Any:
    """The configurations of such a kernel: tiles, row groups, store slots."""
    if kernel == "exponentials":
        x, weight = (jax.ShapeDtypeStruct((size, hidden), jnp.bfloat16) for size in (rows, classes))
        return exponentials.configs(named("cuda-h100"), x, weight, rows)
    return row_statistics.launch_configs(named("cuda-h100"), rows, classes, hidden)


def kernel_function(kernel: str, config: dict[str, int]) -> Callable[..., Any]:
    """Such a kernel as a function of arrays."""
    interpret = here().platform != "cuda"
    if kernel == "exponentials":
        options: dict[str, Any] = {"softcap": None, "most_excess": 60.0, "config": config, "interpret": interpret}
        return functools.partial(exponentials.exponentials, **options)
    options = {"softcap": None, "metrics": False, "config": config, "interpret": interpret}
    return functools.partial(row_statistics.run, **options)


def kernel_operands(kernel: str, rows: int, hidden: int, classes: int) -> tuple[Any, ...]:
    """Operands of such a kernel."""
    x, weight, labels = _loss_operands(rows, hidden, classes)
    if kernel == "exponentials":
        return x, weight, None, None, labels, jnp.zeros(rows)
    return Rows(x, labels), Columns(weight)


def repeated(repeats: int, **kernel: Any) -> dict[str, Any]:
    """How many of several launches differ from the first bit by bit: what a race changes, it seldom changes twice."""
    run = launcher(**kernel)

    @jax.jit
    def is_same(results: Any, others: Any) -> jax.Array:
        pairs = zip(jax.tree.leaves(results), jax.tree.leaves(others), strict=True)
        return jnp.all(jnp.stack([jnp.all(bits(x) == bits(y)) for x, y in pairs]))

    first = jax.block_until_ready(run())
    different = 0
    for _ in range(repeats):
        ANSWERS.tell({"runs": True})
        different += not is_same(first, run())
    return {"repeats": repeats, "different": different}


def bits(x: jax.Array) -> jax.Array:
    """The bits of an array of floats as integers, which say of NaN too whether it is the same."""
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def scoring(candidate: str, rows: int, hidden: int, classes: int) -> dict[str, Any]:
    """Log-probabilities and entropies of labels, without gradients."""
    score = functools.partial(linear_log_probs, temperature=0.7, return_entropy=True)
    operands = _loss_operands(rows, hidden, classes)
    with lowering.use(candidate):
        compiled = jax.jit(score).lower(*operands).compile()
    return {**measured([functools.partial(compiled, *operands)]), **peak()}


def profiled(**kernel: Any) -> dict[str, Any]:
    """What Nsight Compute says of one launch of such a kernel, by the names of its metrics; clocks stay as they are."""
    tool = shutil.which("ncu")
    if tool is None:
        raise NotHereError("ncu is not installed")
    program = f"import jax, gpu_cases; jax.block_until_ready(gpu_cases.launcher(**{kernel!r})())"
    options = ["--clock-control", "none", "--set", "basic", "--launch-count", "1", "--csv"]
    options += ["--kernel-name", "regex:linear_cross_entropy"]
    command = [tool, *options, sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    _, header, table = done.stdout.partition('"ID"')  # after what ncu says of itself
    rows = csv.DictReader((header + table).splitlines())
    return {f"{row['Metric Name']} ({row['Metric Unit']})": row["Metric Value"] for row in rows if row["Metric Name"]}


def _torch_loss(name: str, rows: int, hidden: int, classes: int) -> dict[str, Any]:
    torch = installed("torch")
    functional = torch.nn.functional
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(rows, hidden, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(classes, hidden, device=device, dtype=torch.bfloat16) / hidden**0.5).requires_grad_()
    labels = torch.randint(0, classes, (rows,), device=device)

    def plain(x: Any, weight: Any, labels: Any) -> Any:
        return functional.cross_entropy(functional.linear(x, weight).float(), labels)

    if name == "liger":
        fn = installed("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
    elif name == "cut":
        fn = installed("cut_cross_entropy").linear_cross_entropy
    else:
        fn = torch.compile(plain) if name == "torch.compile" else plain

    def run() -> None:
        x.grad = weight.grad = None
        fn(x, weight, labels).backward()

    return {**measured([run], torch=torch), **peak(torch)}


def step(candidate: str, layers: int, width: int, classes: int, length: int) -> dict[str, Any]:
    """A training step of a 16-bit GPT that knows nothing of this library, on 8 sequences: as it is, and rewritten."""
    model = rewriting.GPT(classes, width, layers, jnp.bfloat16)
    loss = rewriting.loss_of(model)
    fn = rewriting.step_of(lowering.rewrite(loss) if candidate == "rewritten loss" else loss)
    tokens = jax.random.randint(jax.random.key(1), (8, length + 1), 0, classes)
    params = jax.jit(model.init)(jax.random.key(0), tokens[:, :-1])
    state = optax.adamw(1e-3).init(params)
    fn = lowering.rewrite(fn) if candidate == "rewritten step" else fn
    compiled = jax.jit(fn, donate_argnums=(0, 1)).lower(params, state, tokens).compile()

    def run() -> jax.Array:
        nonlocal params, state
        params, state, value = compiled(params, state, tokens)
        return value

    facts = {"loss": float(run()), "temporary_gb": round(compiled.memory_analysis().temp_size_in_bytes / 1e9, 3)}
    return {**measured([run]), **peak(), **facts}


def optimizer(candidate: str, layers: int, dtype: str) -> dict[str, Any]:
    """A step of AdamW with an average of the parameters; with no layers, of one array of 100 million."""
    shapes = adam.transformer_shapes(layers) if layers else [(10**8,)]
    if candidate.startswith("torch"):
        torch = installed("torch")
        run, _ = adam.torch_candidate(shapes, dtype)
        return {**measured([run], torch=torch), **peak(torch)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    params = [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]
    grads = [0.1 * x for x in params]
    if candidate == "optax":
        run, facts = adam.optax_candidate(params, grads, of_optax=False)
    else:
        with lowering.use("pallas" if candidate.endswith("+pallas") else "reference"):
            run, facts = adam.our_candidate(params, grads, fused=True)
    return {**measured([run]), **peak(), **facts}


def operator(candidate: str, case: str, size: list[Any]) -> dict[str, Any]:
    """A case of the library's own suite as a whole, under one implementation, or the same in PyTorch."""
    if candidate.startswith("torch"):
        return _torch_operator(candidate, case, size)
    found = next(each for each in SUITE if each.name == case)
    args = found.arguments(*size)
    with lowering.use(candidate):
        compiled = jax.jit(found.fn).lower(*args).compile()
    copies = [jax.tree.map(lambda x: jnp.array(x, copy=True), args) for _ in range(3)]
    return measured([functools.partial(compiled, *each) for each in (args, *copies)])


def _torch_operator(candidate: str, case: str, size: list[Any]) -> dict[str, Any]:
    torch = installed("torch")
    functional = torch.nn.functional
    *shape, dtype = size
    forms: dict[str, Callable[[Any], Any]] = {
        "softmax of rows": lambda x: torch.softmax(x, -1),
        "softmax of channels": lambda x: torch.log_softmax(x, 1),
        "batch norm": lambda x: functional.batch_norm(x, None, None, training=True),
        "batch norm, relu": lambda x: functional.relu(functional.batch_norm(x, None, None, training=True)),
        "local response norm": lambda x: functional.local_response_norm(x, 5, k=2.0),
        "max pool": lambda x: functional.max_pool2d(x.permute(0, 3, 1, 2), 2),
        "dropout": lambda x: functional.dropout(x, 0.1),
    }
    if case not in forms:
        raise NotHereError(f"PyTorch has no single call for {case}")
    fn = torch.compile(forms[case]) if candidate == "torch.compile" else forms[case]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    operands = [torch.randn(*shape, device=device, dtype=getattr(torch, dtype)).requires_grad_() for _ in range(4)]

    def run(x: Any) -> None:
        x.grad = None
        y = fn(x)
        y.backward(torch.cos(3 * y.detach()))

    return measured([functools.partial(run, x) for x in operands], torch=torch)


CASES = {
    "probe": probe,
    "loss": loss,
    "agreement": agreement,
    "product": product,
    "logits_kernel": logits_kernel,
    "repeated": repeated,
    "scoring": scoring,
    "profiled": profiled,
    "optimizer": optimizer,
    "operator": operator,
    "step": step,
}


def main() -> None:
    ANSWERS.stream = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # where compilers print
    request = json.loads(sys.stdin.readline())
    sys.argv = sys.argv[:1]  # some peers parse it
    jax.devices()  # takes a while, and the device nothing
    try:
        with locked(Path(request["lock"])):
            record = CASES[request["function"]](**request["arguments"])
    except NotHereError as error:
        record = {"skipped": str(error)}
    except Exception as error:  # a case that fails, as where memory does not suffice, costs no other
        record = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"[:300]}
    ANSWERS.tell({"record": record})
    ANSWERS.tell({"ended": "done"})


if __name__ == "__main__":
    main()

"""What others offer for the loss of a linear layer, as candidates of `linear_cross_entropy.py`, where installed."""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


def jax_peers() -> dict[str, Callable[..., Any]]:
    """Losses of (x, weight, labels) in JAX."""
    losses: dict[str, Callable[..., Any]] = {"logits, optax loss": with_logits}
    if importlib.util.find_spec("tokamax"):
        # Else tokamax parses this program's command line as its own.
        importlib.import_module("absl.flags").FLAGS.mark_as_parsed()
        name = "tokamax._src.ops.linear_softmax_cross_entropy_loss.api"
        for implementation in importlib.import_module(name).IMPLEMENTATIONS:
            if not implementation.startswith("mosaic"):
                losses[f"tokamax {implementation}"] = functools.partial(with_tokamax, implementation=implementation)
    return losses


def with_logits(x: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    """What one writes without a library."""
    logits = jnp.einsum("nh,vh->nv", x, weight, preferred_element_type=jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def with_tokamax(x: jax.Array, weight: jax.Array, labels: jax.Array, *, implementation: str) -> jax.Array:
    """Its weight is (H, V)."""
    tokamax = importlib.import_module("tokamax")
    return tokamax.linear_softmax_cross_entropy_loss(
        x, labels, weight.T, reduction="mean", implementation=implementation
    )


def torch_peers(operands: tuple[jax.Array, ...]) -> dict[str, tuple[Callable[[], None], dict[str, Any]]]:
    """Loss and gradients in PyTorch, on the same kind of device as JAX."""
    if not importlib.util.find_spec("torch"):
        return {}
    torch = importlib.import_module("torch")
    functional = torch.nn.functional
    on_gpu = jax.devices()[0].platform == "gpu" and torch.cuda.is_available()
    losses = {
        "torch linear, cross_entropy": lambda x, weight, labels: functional.cross_entropy(
            functional.linear(x, weight).float(), labels
        )
    }
    if hasattr(functional, "linear_cross_entropy"):
        options = torch.nn.LinearCrossEntropyOptions()
        losses["torch linear_cross_entropy"] = functools.partial(functional.linear_cross_entropy, options=options)
    if on_gpu and importlib.util.find_spec("liger_kernel"):
        losses["liger"] = importlib.import_module(
            "liger_kernel.transformers.functional"
        ).liger_fused_linear_cross_entropy
    if on_gpu and importlib.util.find_spec("cut_cross_entropy"):
        losses["cut cross entropy"] = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    x, weight, labels = (_in_torch(torch, operand, "cuda" if on_gpu else "cpu") for operand in operands)
    arguments = (x.requires_grad_(), weight.requires_grad_(), labels.long())
    return {name: _torch_candidate(torch, loss, arguments, on_gpu) for name, loss in losses.items()}


def _in_torch(torch: Any, operand: jax.Array, device: str) -> Any:
    dtype = getattr(torch, operand.dtype.name)
    wide = operand.astype(jnp.float32) if jnp.issubdtype(operand.dtype, jnp.floating) else operand
    return torch.from_numpy(np.array(wide)).to(device, dtype)


def _torch_candidate(torch: Any, loss: Callable[..., Any], arguments: tuple[Any, ...], on_gpu: bool) -> Any:
    x, weight, _ = arguments

    def run() -> None:
        x.grad = weight.grad = None
        loss(*arguments).backward()
        if on_gpu:
            torch.cuda.synchronize()

    if not on_gpu:
        return run, {}  # PyTorch does not say how much memory it takes there.
    run()
    torch.cuda.reset_peak_memory_stats()
    allocated_bytes = torch.cuda.memory_allocated()  # with the gradients, which are results
    run()
    temporary_bytes = torch.cuda.max_memory_allocated() - allocated_bytes
    x.grad = weight.grad = None
    return run, {"temporary_mb": round(temporary_bytes / 1e6, 3)}

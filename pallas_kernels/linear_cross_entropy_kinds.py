"""Kinds of kernels on a linear layer's logits: what of their operands makes cases alike, on every platform."""

import math
from typing import Any

from pallas_kernels.kernel import Kind, dtype_names


def kind(hardware: Any, rows: Any, columns: Any, *, softcap: Any, metrics: bool, **_: Any) -> Kind:
    """Returns what makes cases of row statistics alike; see `pallas_kernels.kernel.Kernel.kind`."""
    return kind_of_layer(rows, columns, softcap, ["metrics"] * metrics)


def kind_of_sum(hardware: Any, rows: Any, columns: Any, *_: Any, softcap: Any, needs: Any, **__: Any) -> Kind:
    """Returns what makes cases of the sum with gradients alike; which terms a row's loss has changes only a number."""
    gradients = [f"gradient of {name}" for name, is_needed in needs._asdict().items() if is_needed]
    return kind_of_layer(rows, columns, softcap, gradients)


def kind_of_layer(rows: Any, columns: Any, softcap: Any, options: list[str]) -> Kind:
    """Returns the kind of a kernel on a linear layer's logits: the sizes are rows, features and classes."""
    fields = (*rows._asdict().items(), *columns._asdict().items())
    # Names of fields that nobody writes in a call.
    spoken = {"class_targets": "label_smoothing", "probabilities": "labels as probabilities"}
    optional = (name for name, value in fields if value is not None and name not in ("x", "labels", "weight"))
    present = [spoken.get(name, name) for name in optional]
    words = dtype_names(rows.x, columns.weight), *present, *["softcap"] * (softcap is not None), *options
    return Kind(", ".join(words), (math.prod(rows.x.shape[:-1]), rows.x.shape[-1], columns.weight.shape[0]))

"""Kinds of kernels on a linear layer's logits: what of their operands makes cases alike, on every platform."""

import math

from pallas_kernels.kernel import Kind, dtype_names


def kind(hardware, rows, columns, *, softcap, metrics, **_) -> Kind:
    """Returns what makes cases of row statistics alike; see `pallas_kernels.kernel.Kernel.kind`."""
    return kind_of_layer(rows, columns, softcap, ["metrics"] * metrics)


def kind_of_layer(rows, columns, softcap, options) -> Kind:
    """Returns the kind of a kernel on a linear layer's logits: the sizes are rows, features and classes."""
    fields = (*rows._asdict().items(), *columns._asdict().items())
    present = [name for name, value in fields if value is not None and name not in ("x", "labels", "weight")]
    words = dtype_names(rows.x, columns.weight), *present, *["softcap"] * (softcap is not None), *options
    return Kind(", ".join(words), (math.prod(rows.x.shape[:-1]), rows.x.shape[-1], columns.weight.shape[0]))

"""RMS normalization in plain JAX, which `lowering.explain` finds in users' programs."""

from collections.abc import Iterator

from lowering.patterns import RESHAPES, Finding, Graph, Pattern, backward, describe, forward

# Measured: XLA for CPUs fuses it as well, and keeps no more than this operator does.
_OBSTACLE = "XLA fuses it as well; on a TPU, time its kernel"
_MEAN = RESHAPES | {"reduce_sum", "div", "mul", "add", "square", "integer_pow"}


def _find(graph: Graph) -> Iterator[Finding]:
    """An rsqrt of a mean of squares of x, which multiplies x."""
    for root in graph.named("rsqrt"):
        inputs = backward(root.inputs[0], lambda operation, _: operation.name in _MEAN)
        squared = [
            x.producer for x in inputs if x.producer is not None and x.producer.name in ("square", "integer_pow")
        ]
        squared += [
            x.producer
            for x in inputs
            if x.producer is not None and x.producer.name == "mul" and x.producer.inputs[0] is x.producer.inputs[1]
        ]
        scales = forward(root.outputs, lambda operation, _: operation.name in RESHAPES)
        scaled = {x for scale in scales for user in scale.users if user.name == "mul" for x in user.inputs}
        for square in squared:
            if square.inputs[0] in scaled:
                yield Finding(root, f"RMS normalization of {describe(square.inputs[0])}", None, _OBSTACLE)
                break


RMS_NORM_IN_JNP = Pattern("RMS normalization", "jaxops_rms_norm.rms_norm", _find)

"""RMS normalization in plain JAX, which `lowering.explain` finds in users' programs."""

from collections.abc import Iterator

from lowering.rewriting.graph import RESHAPES, Level, Node, backward, described, forward
from lowering.rewriting.rules import Rule, Suggestion

# Measured: XLA for CPUs fuses it as well, and keeps no more than this operator does.
_OBSTACLE = "XLA fuses it as well; on a TPU, time its kernel"
_MEAN = RESHAPES | {"reduce_sum", "div", "mul", "add", "square", "integer_pow"}


def _suggest(level: Level) -> Iterator[Suggestion]:
    """An rsqrt of a mean of squares of x, which multiplies x."""
    for root in level.named("rsqrt"):
        made_of = backward(root.inputs[0], lambda node, _: node.name in _MEAN)
        squared = {x.producer.inputs[0] for x in made_of if x.producer is not None and _is_square(x.producer)}
        scales = forward(root.outputs, lambda node, _: node.name in RESHAPES)
        scaled = {x for scale in scales for user in scale.users if user.name == "mul" for x in user.inputs}
        for x in squared & scaled:
            yield Suggestion(root, f"RMS normalization of {described(x)}", None, _OBSTACLE)


def _is_square(node: Node) -> bool:
    is_product = node.name == "mul" and node.inputs[0] is node.inputs[1]
    return is_product or node.name in ("square", "integer_pow")


RMS_NORM_IN_JNP = Rule("rms_norm", frozenset({"rsqrt"}), suggest=_suggest, replacement="jaxops_rms_norm.rms_norm")

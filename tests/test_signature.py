"""Signatures: what they say of ranks and of layouts over a mesh."""

import pytest
from jax.sharding import PartitionSpec as P

from jaxops._signature import Axes, Signature


def test_parse_reads_batch_axes_and_names():
    signature = Signature.parse("... c, ..., c -> ..., c")
    assert signature.operands == (Axes(True, ("c",)), Axes(True, ()), Axes(False, ("c",)))
    assert signature.results == (Axes(True, ()), Axes(False, ("c",)))
    assert str(signature) == "... c, ..., c -> ..., c"


@pytest.mark.parametrize(
    ("text", "specs", "ranks", "expected"),
    [
        ("... h, v h -> ...", [P("data", None, None), P(None, None)], [2], [P("data", None)]),
        ("... h, v h -> ...", [P(None, None), P("data", None)], [1], [P(None)]),
        ("... v, ... h -> v h", [P("data", "model"), P("data", None)], [2], [P("model", None)]),
        ("v d, ... -> ... d", [P(None, "data"), P("data")], [2], [P("data", None)]),
        ("v d, ... -> ... d", [P(None, "model"), P(("a", "b"))], [2], [P(("a", "b"), "model")]),
        ("..., k -> ..., ...", [P(), P(None)], [0, 0], [P(), P()]),
    ],
)
def test_result_specs_keep_batch_axes_and_names_and_use_a_mesh_axis_once(text, specs, ranks, expected):
    assert list(Signature.parse(text).result_specs(tuple(specs), tuple(ranks))) == expected

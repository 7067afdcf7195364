"""Signatures: what they say of ranks and of layouts over a mesh."""

import pytest
from jax.sharding import PartitionSpec as P

from jaxops._primitive.signature import Axes, Signature


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


@pytest.mark.parametrize(
    ("text", "specs", "expected"),
    [
        # The residual lies as x does, and the scale is not split over what splits the batch.
        ("... n c, ... c, ... n c ->", [P("b", None), P("b"), P(None, "b")], [P("b", None), P(None), P(None, None)]),
        ("..., ... ->", [P("a", None), P("b", "a")], [P("a", None), P("a", None)]),
        ("..., ... ->", [P(None, None), P("b", "a")], [P(None, None), P("b", "a")]),
        # What has more axes decides.
        ("..., ... h ->", [P("b", None), P("a", None, "b")], [P("a", None), P("a", None, "b")]),
        # Axes that are never beside each other may be split over the same mesh axis.
        ("... h, ... v ->", [P("b", "a"), P("b", "a")], [P("b", "a"), P("b", "a")]),
        # Operands without batch axes are the operator's own affair.
        ("... h, v h ->", [P("b", None), P(None, "b")], [P("b", None), P(None, "b")]),
        ("... h, ... ->", [P(None, "b"), P(("b", "a"))], [P(None, "b"), P("a")]),
    ],
)
def test_agreed_specs_let_no_two_operands_split_an_axis_differently(text, specs, expected):
    assert list(Signature.parse(text).agreed_specs(tuple(specs))) == expected

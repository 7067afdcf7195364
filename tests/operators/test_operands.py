"""The door for operands and the checks of attributes: what they take, what they refuse, and in which words."""

import decimal
import fractions
import re
import unittest.mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxops import BadParamError, RowGradients, ema_adam, fused_apply
from jaxops._checks.arguments import (
    BAD_PARAM,
    as_array,
    as_arrays,
    as_key,
    as_optional,
    as_shape,
    require_axis_names,
    require_bool,
    require_choice,
    require_floating_dtype,
    require_integer,
    require_real,
)


class Wrapped:
    """What frameworks on JAX have: an array in something else."""

    def __jax_array__(self):
        return jnp.arange(2.0)


class ForeignTensor:
    """What other frameworks have, which NumPy could read."""

    shape, dtype = (2,), "foreign.float32"

    def __array__(self, dtype=None, copy=None):
        return np.zeros(2, dtype)


def refusal(check, *arguments, **attributes):
    with pytest.raises(BadParamError) as refused:
        check("op", "x", *arguments, **attributes)
    return refused.value


ARRAYS = {
    "jax": (jnp.arange(3), "int32", (3,)),
    "numpy": (np.ones((2, 0), np.float16), "float16", (2, 0)),
    "bfloat16": (np.ones(2, ml_dtypes.bfloat16), "bfloat16", (2,)),
    "int4": (np.ones(2, ml_dtypes.int4), "int4", (2,)),
    "numpy-scalar": (np.float32(1), "float32", ()),
    "float": (1.5, "float32", ()),
    "bool": (True, "bool", ()),
    "list": ([[1, 2], (3, 4)], "int32", (2, 2)),
    "list-of-arrays": ([jnp.float32(1), jnp.float32(2)], "float32", (2,)),
    "wrapped": (Wrapped(), "float32", (2,)),
    "int64": (np.array([2**31 - 1, -(2**31)]), "int32", (2,)),
    "uint64": (np.array([2**32 - 1], np.uint64), "uint32", (1,)),
}
REFUSED = {
    "str": ("abc", "'abc'"),
    "bytes": (b"abc", "b'abc'"),
    "dict": ({"a": 1}, "{'a': 1}"),
    "set": ({1}, "{1}"),
    "function": (refusal, "<function refusal>"),
    "class": (dict, "<class 'dict'>"),
    "generator": ((i for i in range(2)), "<generator object <genexpr>>"),
    "ragged": ([[1, 2], [3]], "[[1, 2], [3]]"),
    "strings": (["a"], "['a']"),
    "nothing": ([None], "[None]"),
    "decimal": (decimal.Decimal(1), "Decimal('1')"),
    "fraction": (fractions.Fraction(1, 2), "Fraction(1, 2)"),
    "object": (np.array([None, 1]), "object[2]"),
    "structured": (np.zeros(2, "f4,i4"), "[('f0', '<f4'), ('f1', '<i4')][2]"),
    "dates": (np.zeros(1, "M8[s]"), "datetime64[s][1]"),
    "text": (np.array(["ab"]), "<U2[1]"),
    "float0": (np.zeros(2, jax.dtypes.float0), "[('float0', 'V')][2]"),
    "longdouble": (np.zeros(2, np.longdouble), "float128[2]"),
    "masked": (np.ma.array([1.0], mask=[True]), "float64[1]"),
    "masked-in-list": ([1.0, np.ma.masked], "[1.0, float64[]]"),
    "named-tuple": (RowGradients(1.0, 2.0), "RowGradients(rows=1.0, values=2.0)"),
    "abstract": (jax.ShapeDtypeStruct((2,), jnp.float32), "ShapeDtypeStruct float32[2]"),
    "foreign": (ForeignTensor(), "ForeignTensor foreign.float32[2]"),
    "foreign-in-list": ([ForeignTensor(), "a"], "[foreign.float32[2], 'a']"),
    "huge": (10**400, "an integer of 1329 bits"),
}


@pytest.mark.parametrize(("value", "dtype", "shape"), ARRAYS.values(), ids=ARRAYS)
def test_arrays_are_taken(value, dtype, shape):
    array = as_array("op", "x", value)
    assert isinstance(array, jax.Array)
    assert (array.dtype.name, array.shape) == (dtype, shape)


@pytest.mark.parametrize(("value", "shown"), REFUSED.values(), ids=REFUSED)
def test_anything_else_is_refused_in_one_sentence(value, shown):
    refused = refusal(as_array, value, status=BAD_PARAM)
    assert str(refused) == f"op: x must be an array of JAX or NumPy, or numbers; got {shown}"
    assert refused.status == BAD_PARAM


def test_missing_operand_has_the_status_of_its_vendor():
    assert [refusal(as_array, None, status=status).status for status in (161002, BAD_PARAM)] == [161001, BAD_PARAM]
    assert as_optional("op", "x", None) is None
    with pytest.raises(BadParamError, match=r"^op: y must be given; got None$"):
        as_arrays("op", {"x": "no array", "y": None})


def test_traced_arrays_are_taken_and_never_shown():
    def traced(x):
        assert as_array("op", "x", x) is x
        assert as_array("op", "x", [x, x]).shape == (2,)
        return str(refusal(as_array, {"a": [x]}))

    messages = []
    jax.jit(lambda x: messages.append(traced(x)))(1.0)
    assert messages == ["op: x must be an array of JAX or NumPy, or numbers; got {'a': [float32[]]}"]


@pytest.mark.parametrize("value", [np.array([0, 2**32 + 1]), [2**32 + 1], 2**31, np.array(2**32, np.uint64)])
def test_ids_that_32_bits_would_cut_are_refused(value):
    words = r"op: x must hold integers that fit u?int32, as jax_enable_x64 is off; got \d+"
    assert re.fullmatch(words, str(refusal(as_array, value)))
    with jax.enable_x64(True):
        np.testing.assert_array_equal(as_array("op", "x", value), value)


@pytest.mark.parametrize("value", [1e39, -3.5e38, [1.0, 1e39], np.float64(1e39), np.array([1e39]), 1e39 + 0j])
def test_numbers_that_float32_cannot_hold_are_refused(value):
    """Also while tracing, where JAX leaves the cast of a Python number to whatever comes next."""
    messages = [str(refusal(as_array, value))]
    jax.eval_shape(lambda: messages.append(str(refusal(as_array, value))))
    for message in messages:
        assert message.startswith("op: x must hold numbers that fit float32, as jax_enable_x64 is off; got ")
    assert np.isinf(as_array("op", "x", [np.inf])).all()
    with jax.enable_x64(True):
        np.testing.assert_array_equal(as_array("op", "x", value), value)


def test_trees_of_one_pass_hold_whatever_is_an_array():
    """The first step of Adam moves a parameter by the learning rate against the sign of its gradient."""
    transform, params = ema_adam(0.5, ema_decay=0.0), {"w": Wrapped()}
    new_params, _ = fused_apply(transform, {"w": Wrapped()}, transform.init(params), params)
    np.testing.assert_allclose(new_params["w"], [0.0, 0.5], rtol=1e-6)


def test_shapes_need_no_values():
    abstract = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    assert as_shape("op", "x", abstract) is abstract
    assert as_shape("op", "x", np.ones((2, 3), np.float32)) == abstract
    for value in ("abc", 5, [1.0], ForeignTensor()):
        assert "must be an array" in str(refusal(as_shape, value))


def test_keys_are_typed_or_raw():
    typed = jax.random.key(7)
    words = jax.random.key_data(typed)
    for key in (typed, words, np.asarray(words)):
        np.testing.assert_array_equal(as_key("op", "key", key), words)
    long = jax.random.key(7, impl="rbg")
    for key in (long, jax.random.key_data(long)):
        np.testing.assert_array_equal(as_key("op", "key", key), jax.random.key_data(long))
    for key in (jnp.ones(2), jax.random.split(typed), words[:1], np.arange(3, dtype=np.uint32)):
        assert "be one key of jax.random" in str(refusal(as_key, key))


def test_numbers_are_finite_in_float32():
    for value, number in ((1, 1.0), (np.float32(0.5), 0.5), (ml_dtypes.bfloat16(2), 2.0), (np.int64(-3), -3.0)):
        assert require_real("op", "x", value) == number
    assert require_real("op", "x", fractions.Fraction(1, 4)) == 0.25
    huge = (1e39, -1e39, 10**400, float("inf"), float("nan"), np.longdouble("1e4000"))
    no_numbers = (True, np.True_, "1", None, 1j, np.complex64(1), decimal.Decimal(1), np.ones(()), jnp.ones(()), [1.0])
    for value in (*huge, *no_numbers):
        refusal(require_real, value)


def test_numbers_keep_to_their_range():
    assert require_real("op", "x", 0, least=0, most=1) == 0.0
    for value, bounds in ((-1e-9, {"least": 0}), (1.1, {"most": 1}), (1, {"below": 1}), (0, {"above": 0})):
        refusal(require_real, value, **bounds)
    assert (
        str(refusal(require_real, 1e-50, "be a positive number", above=0))
        == "op: x must be a positive number; got 1e-50"
    )


def test_scalars_may_be_arrays_where_a_check_says_so():
    scalar = jnp.float32(2)
    assert require_real("op", "x", scalar, traced=True) is scalar
    assert require_real("op", "x", np.array(2), traced=True) == 2.0
    assert require_integer("op", "x", np.array(2), traced=True) == 2
    assert require_integer("op", "x", jnp.int32(2), traced=True) == 2
    for value in (jnp.ones(1), jnp.ones((), bool), jnp.ones((), jnp.complex64), np.array(np.inf), "a"):
        refusal(require_real, value, traced=True)
    for value in (jnp.ones(1, int), jnp.ones(()), np.array(True), "a"):
        refusal(require_integer, value, traced=True)


def test_integers_are_no_bools():
    assert require_integer("op", "x", np.int64(3), least=0, most=3) == 3
    for value in (True, np.True_, 1.0, "1", None, 4, -1, 10**400, np.array(1), jnp.int32(1), [1]):
        refusal(require_integer, value, least=0, most=3)


def test_bools_are_no_integers_but_in_calls_of_c():
    assert require_bool("op", "x", np.True_) is True
    assert require_bool("op", "x", 0, or_int=True) is False
    for value in (0, 1, "no", None, 1.0, [True], jnp.array(True), np.array(True)):
        refusal(require_bool, value)
    for value in (2, 1.0, "no", None):
        refusal(require_bool, value, or_int=True)


def test_choices_are_strings_of_the_set():
    assert require_choice("op", "x", "a", ("a", "b")) == "a"
    for value in ("c", "", 0, None, b"a", ["a"], np.array("a"), np.ones(3)):
        assert str(refusal(require_choice, value, ("a", "b"))).startswith("op: x must be one of a, b; got ")


def test_axis_names_are_different_strings():
    assert require_axis_names("op", "x", "a") == ("a",)
    assert require_axis_names("op", "x", ("a", "b")) == ("a", "b")
    for value in (3, True, {}, np.ones(2), ["a"], (["a"],), ("a", "a"), ("a", None)):
        refusal(require_axis_names, value)


def test_dtypes_are_floating():
    assert require_floating_dtype("op", "x", "bfloat16") == jnp.bfloat16
    assert require_floating_dtype("op", "x", jnp.float16) == jnp.float16
    for value in ("junk", int, dict, "f4,i4", "float128", 3, True, np.ones(2), jnp.ones(2), {}, [], object()):
        refusal(require_floating_dtype, value)


@pytest.mark.parametrize("value", [jnp, np, unittest.mock.Mock()], ids=["jnp", "np", "mock"])
def test_what_only_has_the_attributes_of_an_array_is_refused_in_one_sentence(value):
    assert re.fullmatch(r"op: x must be an array of JAX or NumPy, or numbers; got <.*>", str(refusal(as_array, value)))
    assert str(refusal(require_integer, value)).startswith("op: x must be")


@pytest.mark.parametrize("shape", [(2**40,), (2**16, 2**16)])
def test_views_that_repeat_their_elements_too_often_are_refused(shape):
    """JAX would write all of them to memory."""
    words = r"op: x must be an array of JAX or NumPy, or numbers; got int32\[.*\], a view that repeats its elements"
    assert re.fullmatch(words, str(refusal(as_array, np.broadcast_to(np.int32(0), shape))))
    assert as_array("op", "x", np.broadcast_to(np.int32(0), (2**10,))).shape == (2**10,)


def test_lists_that_contain_themselves_are_refused():
    loop = [1.0]
    loop.append(loop)
    assert str(refusal(as_array, loop)).startswith("op: x must be an array of JAX or NumPy, or numbers; got [1.0, [1.0")

"""Mistakes of those who write operators: each gets one sentence with operator, argument, rule and value."""

import jax
import jax.numpy as jnp
import pytest

import lowering
from jaxops import Derivative, Operator
from lowering.operators import EVERYWHERE, Form, registered
from pallas_kernels.kernel import Kernel

X = jax.ShapeDtypeStruct((4, 8), jnp.float32)
NOTATION = 'signature must be like "... c, c -> ... c", of names and leading dots; got'


def twice(x, **launch):
    return 2 * x


def toy(name="toy_mistaken", signature="... c -> ... c", reference=twice, **fields):
    return Operator(name, signature, None, reference, **fields)


def kernel(**fields):
    return Kernel(**{"name": "mine", "platform": "cpu", "run": twice, "refuses": lambda *_: None, **fields})


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"signature": "foo"}, f"{NOTATION} 'foo'"),
        ({"signature": "c ... -> c"}, f"{NOTATION} 'c ... -> c'"),
        ({"derivative": Derivative(lambda *_: (), residuals="... 2c")}, f"{NOTATION} '... 2c ->'"),
        ({"derivative": print}, "derivative must be a Derivative or None; got <built-in function print>"),
        ({"kernels": kernel()}, "kernels must be a tuple of Kernel records; got Kernel(name='mine'"),
        (
            {"kernels": (kernel(platform="tpus"),)},
            "platform of mine must be one of cpu, cuda, tpu; got 'tpus', did you",
        ),
        ({"kernels": (kernel(measured_on=["tpu-v4e"]),)}, "measured_on of mine must be one of cpu, tpu-v5e, "),
        ({"forms": (Form("xla_toy", "gpu", twice),)}, "platforms of xla_toy must be one of cpu, cuda, tpu; got 'gpu'"),
        ({"kernels": (kernel(run=lambda x: x),)}, "run of mine must take config and interpret by name; got (x)"),
        (
            {"forms": (Form("xla_toy", EVERYWHERE, lambda x: x),)},
            "run of xla_toy must take place by name; got (x)",
        ),
        ({"kernels": (kernel(run=None),)}, "run of mine must be a function; got None"),
        ({"kernels": (kernel(refuses=None),)}, "refuses of mine must be a function; got None"),
        ({"kernels": (kernel(configs=({},)),)}, "configs of mine must be a function; got ({},)"),
        ({"kernels": (kernel(), kernel())}, "name of a kernel or form must be its own on a platform; got mine twice"),
        ({"name": "softmax"}, "name must not be taken; got that of an operator of jaxops.softmax"),
    ],
    ids=[
        "signature",
        "dots",
        "residuals",
        "derivative",
        "kernels",
        "platform",
        "target",
        "form",
        "run",
        "place",
        "no run",
        "no refuses",
        "no configs",
        "twice",
        "name",
    ],
)
def test_record_is_refused_when_it_is_made(fields, sentence):
    before = registered()
    with pytest.raises((TypeError, ValueError)) as refusal:
        toy(**fields)
    assert str(refusal.value).startswith(f"{fields.get('name', 'toy_mistaken')}: {sentence}")
    assert registered() == before


def test_operator_that_is_defined_again_replaces_the_first():
    """As in a cell of a notebook that is run twice."""
    first, second = toy("toy_again"), toy("toy_again")
    assert {first, second} <= set(registered())


def test_kernel_that_is_added_needs_a_platform_that_exists():
    with pytest.raises(ValueError, match=r"^toy_added: platform of mine must be one of .*'tpus', did you mean tpu\?"):
        lowering.add_kernel(toy("toy_added"), kernel(platform="tpus"))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"run": lambda x, **launch: x.astype(jnp.bfloat16)},
            "mine must return float32[4,8], as the reference does; got bfloat16[4,8]",
        ),
        ({"run": lambda x, **launch: x[:2]}, "mine must return float32[4,8], as the reference does; got float32[2,8]"),
        (
            {"run": lambda x, **launch: (x, 1)},
            "mine must return float32[4,8], as the reference does; got float32[4,8], int32[]",
        ),
        ({"run": lambda x, **launch: None}, "mine must return float32[4,8], as the reference does; got nothing"),
        (
            {"refuses": lambda *_, **params: True},
            "refuses of mine must return None or the reason in words; got True",
        ),
        (
            {"configs": lambda *_: ()},
            "configs of mine must offer one at least for what it does not refuse; got none for float32[4,8]",
        ),
        ({"configs": lambda *_: {"block": 8}}, "configs of mine must return a sequence of dicts; got {'block': 8}"),
        ({"configs": lambda *_: [8, 16]}, "configs of mine must return a sequence of dicts; got [8, 16]"),
    ],
    ids=["dtype", "shape", "number", "nothing", "refuses", "configs", "one config", "numbers"],
)
def test_kernel_is_refused_when_it_is_lowered(fields, sentence):
    operator = toy("toy_kernel", kernels=(kernel(**fields),))
    with pytest.raises((TypeError, ValueError)) as refusal, lowering.use("pallas"):
        jax.jit(operator).lower(X)
    assert str(refusal.value) == f"toy_kernel: {sentence}"


def test_check_must_return_none():
    operator = Operator("toy_swapped", "... c -> ... c", twice, lambda x: None)
    with pytest.raises(TypeError, match=r"^toy_swapped: check must return None, or raise; got float32\[4, 8\]$"):
        operator(jnp.ones((4, 8)))


def test_operand_must_be_an_array():
    with pytest.raises(TypeError, match=r"^toy_list: operand 0 must be an array or a NamedTuple of arrays; got \[1, 2"):
        toy("toy_list")([1, 2])


def test_form_must_return_what_the_reference_does():
    operator = toy("toy_form", forms=(Form("xla_toy", EVERYWHERE, lambda x, place: x[0]),))
    with pytest.raises(TypeError, match=r"^toy_form: xla_toy must return float32\[4,8\].*; got float32\[8\]"):
        jax.jit(operator).lower(X)


@pytest.mark.parametrize(
    ("reference", "fault"),
    [
        (lambda x: x.sum(-1), "... of [4] in operand 0 and of [] in result 0"),
        (lambda x: x[..., :3], "c of 8 in operand 0 and of 3 in result 0"),
        (lambda x: x.sum(), 'result 0 of shape [] for "... c"'),
    ],
    ids=["batch axes", "named axis", "rank"],
)
def test_reference_must_be_as_the_signature_says(reference, fault):
    operator = toy("toy_reference", reference=reference)
    for fn in (operator, jax.vmap(operator)):
        with pytest.raises(TypeError) as refusal:
            jax.eval_shape(fn, X)
        rule = 'shapes of operands and results must be as in its signature, "... c -> ... c"'
        assert str(refusal.value).startswith(f"toy_reference: {rule}; got ")
    with pytest.raises(TypeError) as refusal:
        jax.eval_shape(operator, X)
    assert str(refusal.value).endswith(f"; got {fault}")
    with pytest.raises(TypeError, match="results must be as many as in its signature, 1; got 0"):
        jax.eval_shape(toy("toy_reference", reference=lambda x: None), X)


@pytest.mark.parametrize(
    ("gradient", "got"), [(lambda x: x[0], r"float32\[8\]"), (lambda x: None, "None")], ids=["shape", "None"]
)
def test_gradient_must_have_the_shape_of_its_operand(gradient, got):
    operator = toy("toy_vjp", derivative=Derivative(lambda _, cotangent, active: (gradient(cotangent),)))
    with pytest.raises(TypeError, match=rf"^toy_vjp: vjp must return a gradient of shape \[4, 8\] .*; got {got}"):
        jax.make_jaxpr(jax.grad(lambda x: operator(x).sum()))(X)


def checked(x, y, *, beta):
    if x.shape != y.shape:
        raise ValueError("toy_called: y must have x's shape")


ONES = jnp.ones(3)
CALLS = {
    "none": ((None, ONES), {"beta": 1.0}, "operand 0 must be an array; got None"),
    "text": ((ONES, "s"), {"beta": 1.0}, "operand 1 must be an array; got 's'"),
    "missing": ((ONES, ONES), {}, "beta must be given, as it is an attribute without a default; got none"),
    "unknown": ((ONES, ONES), {"beta": 1.0, "z": 2}, "z must be one of the operator's attributes, beta; got z=2"),
    "array": ((ONES, ONES), {"beta": ONES}, "beta must be hashable, as it is a part of the program; got float32[3]"),
    "list": ((ONES, ONES), {"beta": [1]}, "beta must be hashable, as it is a part of the program; got [1]"),
}


@pytest.mark.parametrize("check", [checked, None], ids=["check", "no-check"])
@pytest.mark.parametrize(("operands", "attributes", "sentence"), CALLS.values(), ids=CALLS)
def test_call_is_refused_by_operand_and_attribute(operands, attributes, sentence, check):
    operator = Operator("toy_called", "..., ... -> ...", check, lambda x, y, *, beta: beta * x * y)
    with pytest.raises(TypeError) as refusal:
        operator(*operands, **attributes)
    assert str(refusal.value) == f"toy_called: {sentence}"


def test_number_is_refused_where_a_check_asks_for_its_shape():
    operator = Operator("toy_called", "..., ... -> ...", checked, lambda x, y, *, beta: beta * x * y)
    with pytest.raises(TypeError, match=r"^toy_called: operand 1 must be an array; got 3\.0$"):
        operator(ONES, 3.0, beta=1.0)


def test_error_of_a_check_is_left_as_it_is_where_the_call_is_sound():
    def check(x):
        raise TypeError("the check's own")

    with pytest.raises(TypeError, match=r"^the check's own$"):
        Operator("toy_called", "... c -> ... c", check, twice)(ONES)

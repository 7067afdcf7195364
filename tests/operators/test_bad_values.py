"""Every argument of every public function, given what it cannot take: one sentence, unless the table says otherwise.

Whatever stands in a signature is tried, also what the valid call leaves out. Calls run under `eval_shape`: neither
refusals nor what is accepted compiles anything.
"""

import datetime
import decimal
import enum
import fractions
import importlib
import importlib.util
import inspect
import math
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from public_calls import CALLS, PARAMS

import jaxops
from jaxops import aclnn, mcdnn
from jaxops._checks.arguments import OperatorError


class ForeignTensor:
    """What other frameworks have, which NumPy could read."""

    shape, dtype, ndim = (2, 3), "foreign.float32", 2

    def __array__(self, dtype=None, copy=None):
        return np.ones((2, 3), np.float32)


class Unfinished:
    """What cannot show itself, as its `__init__` failed."""

    def __repr__(self):
        return self.name


class Color(enum.Enum):
    """An enumeration of somebody else's."""

    RED = 0


# No function takes these for anything.
NOTHINGS: dict[str, Any] = {
    "empty-text": "",
    "text": "zzz",
    "digits": "1",
    "two-lines": "a\nb",
    "numpy-text": np.str_("zzz"),
    "bytes": b"zzz",
    "bytearray": bytearray(b"zz"),
    "memoryview": memoryview(b"zz"),
    "set": {1, 2},
    "frozenset": frozenset((1, 2)),
    "range": range(3),
    "ragged": [[1.0, 2.0], [3.0]],
    "texts": ["zzz", "zzz"],
    "nones": [None, None],
    "dicts": [{}, {}],
    "nested": ((1, (2, 3)), [4]),
    "ellipsis": ...,
    "slice": slice(3),
    "object": object(),
    "module": math,
    "path": pathlib.Path("zzz"),
    "date": datetime.date(2026, 1, 1),
    "duration": np.timedelta64(1, "s"),
    "pattern": re.compile("z"),
    "error": ValueError("zzz"),
    "enum": Color.RED,
    "unfinished": Unfinished(),
    "generator-of-numbers": np.random.default_rng(0),
    "decimal": decimal.Decimal("0.5"),
    "complex": 1j,
    "complex64": np.complex64(1),
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "beyond-float32": 1e39,
    "numpy-inf": np.float32(np.inf),
    "huge": 10**400,
    "more-than-huge": 10**5000,
    "-huge": -(10**400),
    "objects": np.array([None, 1]),
    "structured": np.zeros(2, "f4,i4"),
    "text-array": np.array(["zzz"]),
    "dates": np.zeros(2, "M8[s]"),
    "void": np.void(b"zz"),
    "float0": np.zeros((2, 3), jax.dtypes.float0),
    "longdouble": np.zeros((2, 3), np.longdouble),
    "masked": np.ma.array(np.ones((2, 3), np.float32), mask=True),
    "masked-constant": np.ma.masked,
    "masked-integer": np.ma.array(1, mask=True),
    "complex-array": np.ones((2, 3), np.complex64),
    "bools-of-rank-6": np.ones((1,) * 6, bool),
    "numbers-of-rank-9": np.ones((1,) * 9, np.float32),
    "foreign": ForeignTensor(),
    "foreign-in-list": [ForeignTensor()],
    "axis-of-lists": (["a"],),
    "mesh-axis": ("a", "b"),
    "state": optax.sgd(0.1, momentum=0.9).init(PARAMS),
    "transform": optax.sgd(0.1),
    "reversed-dtype": np.dtype(">f4"),
    "reversed-bytes": np.ones((2, 3), ">f4"),
}
# Some functions take these.
SOMETHINGS: dict[str, Any] = {
    "none": None,
    "true": True,
    "numpy-true": np.True_,
    "0": 0,
    "1": 1,
    "-1": -1,
    "2": 2,
    "half": 0.5,
    "-half": -0.5,
    "third": fractions.Fraction(1, 3),
    "numpy-half": np.float16(0.5),
    "numpy-int": np.int64(1),
    "tiny": 1e-50,
    "2**31": 2**31,
    "2**40": 2**40,
    "2**63": 2**63,
    "2**64": 2**64,
    "-2**70": -(2**70),
    "empty-tuple": (),
    "empty-list": [],
    "empty-dict": {},
    "dict": {"a": 1.0},
    "numbers": [1.0, 2.0],
    "integers": (2, 2),
    "one-integer": (1,),
    "function": lambda *_: None,
    "function-of-rows": lambda *_: np.ones(2, np.float32),
    "builtin": callable,
    "class": dict,
    "float-class": float,
    "jax-class": jnp.float32,
    "numpy-0d": np.array(0.5, np.float32),
    "jax-0d": np.float32(0.5) * jnp.ones((), jnp.float32),
    "jax-0d-bool": jnp.ones((), bool),
    "rows": np.ones((2, 3), np.float32),
    "half-rows": np.ones((2, 3), np.float16),
    "column": np.ones(5, np.float32),
    "ids": np.array([0, 1]),
    "cut-ids": np.array([0, 2**32 + 1]),
    "unsigned-ids": np.array([0, 2**40], np.uint64),
    "no-elements": np.ones((0,), np.float32),
    "key": jax.random.key(1),
    "keys": jax.random.split(jax.random.key(1)),
    "abstract": jax.ShapeDtypeStruct((2, 3), jnp.float32),
    "abstract-image": jax.ShapeDtypeStruct((2, 3, 4, 4), jnp.float32),
    "aval": jax.typeof(jnp.ones((2, 3))),
    "tree": {"w": np.ones(3, np.float32)},
    "row-gradients": jaxops.RowGradients(np.zeros(1, np.int32), np.ones((1, 3), np.float32)),
}
if importlib.util.find_spec("torch"):
    NOTHINGS["torch"] = importlib.import_module("torch").ones(2, 3)
VALUES = NOTHINGS | SOMETHINGS

INTEGERS = {"0", "1", "-1", "2", "numpy-int", "2**31", "2**40", "2**63", "2**64", "-2**70"}
ANY_INTEGER = INTEGERS | {"huge", "-huge", "more-than-huge"}
NUMBERS = INTEGERS | {"half", "-half", "third", "numpy-half", "tiny"}
SCALARS = NUMBERS | {"numpy-0d", "jax-0d"}
BOOLS = {"true", "numpy-true"}
# Values of data are nobody's business; shapes and dtypes are each operator's own, and tested there.
ARRAYS = {"nan", "inf", "-inf", "numpy-inf", "numbers-of-rank-9", "bools-of-rank-6", "jax-0d-bool"}
ARRAYS |= {"half", "-half", "numpy-half", "tiny", "0", "1", "-1", "2", "numpy-int", "true", "numpy-true", "numpy-0d"}
ARRAYS |= {"jax-0d", "rows", "half-rows", "column", "ids", "no-elements", "empty-tuple", "empty-list", "numbers"}
ARRAYS |= {"integers", "one-integer"}
ABSTRACT = {"abstract", "abstract-image", "aval"}
TREES = (
    ARRAYS
    | ABSTRACT
    | {"none", "nones", "dict", "dicts", "empty-dict", "nested", "tree", "row-gradients", "state", "ragged"}
)
# What arguments may take of these values, by their names; all others are arrays, or take none. None is tried too, and
# may be accepted where it is the default.
ACCEPTED: dict[str, set[str]] = {
    **dict.fromkeys(("k", "epsilon", "label_smoothing", "swish_beta", "softcap"), NUMBERS),
    **dict.fromkeys(("alpha", "beta", "momentum", "rate", "dropout", "exponential_average_factor"), SCALARS),
    **dict.fromkeys(("alpha_data_diff", "beta_data_diff", "alpha_param_diff", "beta_param_diff"), SCALARS),
    **dict.fromkeys(("alpha_dgrid", "beta_dgrid"), SCALARS),
    **{
        f"{name} {argument}": NUMBERS
        for name in ("local_response_norm", "divisive_norm", "mcdnn.LRNDescriptor")
        for argument in ("alpha", "beta")
    },
    **dict.fromkeys(("lr", "beta1", "beta2", "b1", "b2", "eps", "weight_decay", "z_loss", "margin"), SCALARS),
    **dict.fromkeys(("learning_rate", "ema_decay"), SCALARS),
    "temperature": SCALARS | {"numbers"},  # one for each of two rows
    "coef": NUMBERS,
    **dict.fromkeys(("ignore_index", "vocab_start_index", "vocab_end_index"), ANY_INTEGER),
    **{key: {"1", "2", "numpy-int"} for key in ("n", "group_cnt", "num_weights", "chunk_rows")},
    "axis": {"0", "1", "-1", "numpy-int", "empty-tuple", "empty-list", "one-integer"},
    "padding_idx": {"0", "1", "-1", "2", "numpy-int"},
    **{key: {"empty-tuple"} for key in ("axis_name", "vocab_axis")},
    **{key: {"0", "1", "2", "numpy-int", "integers"} for key in ("window", "stride", "padding")},
    **dict.fromkeys(("bias_correction", "count_include_pad", "return_aux", "transpose_weight"), BOOLS),
    **dict.fromkeys(("scale_grad_by_freq", "return_entropy", "return_logits", "strict"), BOOLS),
    **{key: {"float-class", "jax-class"} for key in ("mu_dtype", "nu_dtype", "ema_dtype")},
    "weight_grad_dtype": {"jax-class"},  # float32, which is the default
    "mask": BOOLS | {"jax-0d-bool", "builtin"},  # the last is a function that returns a bool
    "key": {"key"},
    "implementation": {"none"},
    # An enumeration or a descriptor is none of these values, and neither is a shape, a layout or the name of a mode.
    **{key: set() for key in ("activation", "algo", "algorithm", "bn_ops", "desc", "dims", "layout", "mode")},
    **{key: set() for key in ("nan_propagation", "norm_ops", "one_pass", "operation", "operator", "opt_state")},
    **{key: set() for key in ("reduction", "sampler", "size", "state", "strategy", "transform", "x_shape")},
    "params": set(),
    "grads": {"none"},
    "ema_adam.init params": TREES | {"complex", "complex64", "complex-array"},
    "fused_apply transform": {"transform"},  # which has no state of its own
    "mcdnn.PoolingDescriptor padding": INTEGERS | {"integers"},
    "mcdnn.divisive_normalization_backward means": ARRAYS | {"none"},
    **{f"batch_norm_inference {argument}": ARRAYS | {"none"} for argument in ("scale", "bias")},
    "mcdnn.dropout_get_reserve_space_size x": ARRAYS | ABSTRACT | {"complex64", "complex-array", "key", "keys"},
    "aclnn.embedding_dense_backward padding_idx": ANY_INTEGER,
    **{
        f"mcdnn.get_{kind}_workspace_size {argument}": {"none", "abstract-image"}
        for kind in ("batch_normalization_backward_ex", "normalization_backward")
        for argument in ("y", "dz")
    },
}
# C has neither bools nor enumerations.
OF_C = ("strict", "return_logits", "scale_grad_by_freq", "bias_correction", "mode", "algo", "algorithm", "bn_ops")
OF_C += ("norm_ops", "nan_propagation", "sampler", "reduction")
SENTENCE = re.compile(r"[\w.]+: [\w.]+ must [^\n]+; got [^\n]+")
NO_CALLS = {"operators", "ops_train_version_check", "tune_device"}  # they take no arrays
QUICK = 3


def arguments_of(name):
    """What the signature has, and what the valid call gives."""
    call, valid = CALLS[name]
    public = jaxops if "." not in name else {"aclnn": aclnn, "mcdnn": mcdnn}.get(name.split(".")[0])
    function = getattr(public, name.split(".")[-1].split("-")[0], call)
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    optional = {one.name for one in parameters if one.default is None}
    return dict.fromkeys([*valid, *(one.name for one in parameters if one.kind in kinds)]), optional


def accepted(name, argument, optional):
    """The labels that an argument may take."""
    of_operands = ARRAYS | ABSTRACT if ".get_" in name or "_get_" in name else ARRAYS
    labels = ACCEPTED.get(f"{name} {argument}", ACCEPTED.get(argument, of_operands))
    if name.startswith(("aclnn.", "mcdnn.")) and argument in OF_C:
        labels = labels | {"0", "1", "2", "numpy-int"}
    return labels | {"none"} if argument in optional else labels


def outcome(call, arguments):
    """None where the call is accepted, else the message of its refusal; nothing is compiled."""
    refusals = []

    def traced():
        # Caught in here: JAX would take longer to shorten the traceback than everything else takes.
        try:
            call(**arguments)
        except ValueError as refusal:
            # `use` is lowering's, whose errors have no status.
            if not isinstance(refusal, OperatorError) and not str(refusal).startswith("use: "):
                raise
            refusals.append(str(refusal))

    jax.eval_shape(traced)
    return refusals[0] if refusals else None


def check(name, argument, label, optional):
    call, valid = CALLS[name]
    where = f"{name}({argument}={label})"
    try:
        message = outcome(call, {**valid, argument: VALUES[label]})
    except Exception as error:
        return f"{where}: {type(error).__name__}: {str(error)[:200]}"
    if message is None:
        return None if label in accepted(name, argument, optional) else f"{where} was accepted"
    is_sentence = (
        SENTENCE.fullmatch(message) and len(message) < 500 and not re.search("Traced|Tracer|PyTreeDef", message)
    )
    return None if is_sentence else f"{where}: {message}"


def failures(name, labels_of):
    arguments, optional = arguments_of(name)
    found = (
        check(name, argument, label, optional)
        for i, argument in enumerate(arguments)
        for label in labels_of(i)
        if argument != "self"
    )
    return "\n".join(failure for failure in found if failure is not None)


def test_table_has_every_public_function():
    public = {
        f"{prefix}{name}": getattr(module, name)
        for prefix, module in (("", jaxops), ("aclnn.", aclnn), ("mcdnn.", mcdnn))
        for name in module.__all__
        if name not in NO_CALLS
    }
    functions = {name for name, value in public.items() if inspect.isfunction(value) or name.endswith("Descriptor")}
    assert functions <= {name.split("-")[0] for name in CALLS}


@pytest.mark.parametrize("name", CALLS)
def test_valid_call_is_accepted(name):
    call, valid = CALLS[name]
    assert outcome(call, valid) is None


@pytest.mark.parametrize("name", CALLS)
def test_bad_values_are_refused_in_one_sentence(name):
    """A few values for each argument, others for each function; the slow test has all."""
    labels, start = list(VALUES), 5 * list(CALLS).index(name)
    step = len(labels) // QUICK
    assert failures(name, lambda i: [labels[(start + 3 * i + step * k) % len(labels)] for k in range(QUICK)]) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_all_bad_values_are_refused_in_one_sentence(name):
    assert failures(name, lambda _: VALUES) == ""


def test_sizes_that_ids_and_counters_cannot_number_are_refused():
    """Each would need terabytes, but shapes may be asked about before anybody has them."""
    ids, tall = jnp.zeros(2, jnp.int32), jax.ShapeDtypeStruct((2**31 + 1, 3), jnp.float32)
    wide, long = jax.ShapeDtypeStruct((2, 2**31 + 1), jnp.float32), jax.ShapeDtypeStruct((2**30, 256), jnp.float32)
    for call, x, words in (
        (lambda x: jaxops.embedding(x, ids), tall, "embedding: table must have at most 2147483647 rows"),
        (lambda x: jaxops.nll_loss(x, ids), wide, "nll_loss: log_probs must have at most 2147483647 rows"),
        (lambda x: jaxops.dropout(jax.random.key(0), x, 0.5), long, "dropout: x must have at most 137438953472 elem"),
        (
            lambda weight: jaxops.linear_cross_entropy(jnp.zeros((2, 3)), weight, ids),
            tall,
            "linear_cross_entropy: weight must have at most 2147483647 classes",
        ),
    ):
        with pytest.raises(jaxops.BadParamError, match=f"^{words}"):
            jax.eval_shape(call, x)


@pytest.mark.parametrize("dtype", ["float8_e8m0fnu", "float4_e2m1fn"])
def test_dtypes_in_which_nothing_can_be_computed_are_refused(dtype):
    x = jnp.ones((2, 3), dtype)
    rule = "have a dtype that holds 0" if dtype == "float8_e8m0fnu" else "have a dtype of at least 8 bits"
    with pytest.raises(jaxops.BadParamError, match=f"^linear_cross_entropy: x must {rule}; got {dtype}"):
        jaxops.linear_cross_entropy(x, x, jnp.zeros(2, jnp.int32))


class Lazy:
    """An array that is made when it is needed, and cannot be."""

    def __jax_array__(self):
        raise RuntimeError("not yet\n...")


def test_arrays_that_cannot_be_made_are_refused():
    with pytest.raises(jaxops.BadParamError, match=r"^softmax: x must be an array; got one .* RuntimeError: not yet$"):
        jaxops.softmax(Lazy())

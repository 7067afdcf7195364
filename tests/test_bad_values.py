"""Every argument of every public function, given what it cannot take: one sentence of the library, or a named exception.

Whatever stands in a signature is tried, also what the valid call leaves out. Calls run under `eval_shape`: neither
refusals nor what is accepted compiles anything.
"""

import datetime
import decimal
import enum
import fractions
import functools
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
from jaxops._errors import OperatorError


class ForeignTensor:
    """What other frameworks have, which NumPy could read."""

    shape, dtype, ndim = (2, 3), "foreign.float32", 2

    def __array__(self, dtype=None, copy=None):
        return np.ones((2, 3), np.float32)


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
    "pattern": re.compile("z"),
    "error": ValueError("zzz"),
    "enum": Color.RED,
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
    "complex-array": np.ones((2, 3), np.complex64),
    "bools-of-rank-6": np.ones((1,) * 6, bool),
    "numbers-of-rank-9": np.ones((1,) * 9, np.float32),
    "foreign": ForeignTensor(),
    "foreign-in-list": [ForeignTensor()],
    "axis-of-lists": (["a"],),
    "mesh-axis": ("a", "b"),
    "state": optax.sgd(0.1, momentum=0.9).init(PARAMS),
    "transform": optax.sgd(0.1),
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
    "function": lambda *_: None,
    "function-of-rows": lambda *_: np.ones(2, np.float32),
    "builtin": len,
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


def arguments_of(name):
    """What the signature has, and what the valid call gives."""
    call, valid = CALLS[name]
    public = jaxops if "." not in name else {"aclnn": aclnn, "mcdnn": mcdnn}.get(name.split(".")[0])
    function = getattr(public, name.split(".")[-1].split("-")[0], call)
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return [*valid, *(one.name for one in parameters if one.kind in kinds and one.name not in valid)]


def run(call, arguments):
    """The call, without compiling what JAX would run."""

    def traced():
        call(**arguments)

    jax.eval_shape(traced)

"""A suite of toys for campaigns: kernels for the CPU that are right, wrong, unsteady, endless or deadly."""

import itertools
import os
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._primitive.operator import Operator
from lowering.campaign.suite import Case
from pallas_kernels.kernel import Kernel

SHIFTS = itertools.count()


def doubled(x, *, config, interpret):
    return (2 * x,)


def wrong(x, *, config, interpret):
    return (2 * x if x.size < 10 else 2 * x + 1,)


def running(function, x):
    """What a function of the host makes of x when the program runs."""
    return (jax.pure_callback(function, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential"),)


def unsteady(x, *, config, interpret):
    return running(lambda x: np.asarray(2 * x + 1e-6 * next(SHIFTS), np.float32), x)


def endless(x, *, config, interpret):
    return running(lambda x: time.sleep(3600), x)


def deadly(x, *, config, interpret):
    return running(lambda x: os._exit(3), x)


def failing(x, *, config, interpret):
    raise RuntimeError("no such instruction\nand more")


def kernel(run, reason=None):
    return Kernel(run.__name__, "cpu", run, lambda hardware, x: reason)


def make(name, *kernels):
    """An operator that doubles; its cotangents need no kernels."""
    return Operator(name, "... -> ...", lambda x: None, lambda x: (x + x,), kernels=kernels)


toy_double = make("toy_double", kernel(wrong), kernel(unsteady), kernel(doubled), kernel(failing))
toy_refused = make("toy_refused", kernel(doubled, "takes nothing"))
toy_endless = make("toy_endless", kernel(endless), kernel(deadly), kernel(doubled))


def array(count):
    return (jnp.arange(count, dtype=jnp.float32),)


def doubles(x):
    """The second operand is what the first operator has made."""
    return jax.jit(lambda x: toy_double(toy_double(x + 1)[0]))(x)[0]


SIZES = ((3,), (12,)), ((12,),), ((12,),)
DOUBLE = Case("double", doubles, array, *SIZES)
REFUSED = Case("refused", lambda x: toy_refused(x)[0], array, *SIZES)
BROKEN = Case("broken", lambda x: x + "text", array, *SIZES)
ENDLESS = Case("endless", lambda x: toy_endless(x)[0], array, *SIZES)
SUITE = (DOUBLE, REFUSED, BROKEN, ENDLESS)

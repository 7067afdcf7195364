"""`linear_cross_entropy` keeps the promises of every operator, in each of its strategies."""

import contract
import numpy as np
import pytest

from jaxops import linear_cross_entropy


def draw(*, probabilities=False):
    def operands(rng):
        x, weight = rng.normal(size=(16, 3)), rng.normal(size=(6, 3))
        labels = rng.dirichlet(np.ones(6), size=16) if probabilities else rng.integers(-1, 6, size=16).astype(np.int32)
        vector = rng.uniform(0.5, 2, size=6)
        return tuple(v if v.dtype == np.int32 else v.astype(np.float32) for v in (x, weight, labels, vector))

    return operands


def of_probabilities(x, weight, probabilities, class_weight):
    options = {"softcap": 3.0, "reduction": "sum", "strategy": "recompute"}
    return linear_cross_entropy(x, weight, probabilities, class_weight=class_weight, **options)


def chunks_by_row(x, weight, labels, bias):
    options = {"reduction": "none", "strategy": "recompute", "chunk_rows": 6}
    return linear_cross_entropy(x, weight, labels, bias=bias, ignore_index=-1, **options)


def chunks_to_scalar(x, weight, labels, class_weight):
    smooth = {"class_weight": class_weight, "label_smoothing": 0.2, "z_loss": 0.05}
    return linear_cross_entropy(x, weight, labels, ignore_index=-1, strategy="grad_in_forward", chunk_rows=8, **smooth)


def chunks_to_scalar_with_aux(x, weight, labels, bias):
    options = {"softcap": 3.0, "strategy": "grad_in_forward", "chunk_rows": 6, "return_aux": True}
    loss, aux = linear_cross_entropy(x, weight, labels, bias=bias, ignore_index=-1, **options)
    return loss, aux.prediction, aux.accuracy


def chunks_with_margin(x, weight, labels, margin):
    options = {"margin": margin, "strategy": "recompute", "reduction": "none"}
    return linear_cross_entropy(x, weight, labels, ignore_index=-1, **options)


CASES = [
    contract.Case(
        name=fn.__name__,
        fn=fn,
        operands=draw(probabilities=2 in differentiable),
        differentiable=differentiable,
        batched=(0, None, 0, None),
        operator=operator,
        backward=backward,
    )
    for fn, differentiable, operator, backward in (
        (of_probabilities, (0, 1, 2, 3), "linear_cross_entropy", "linear_cross_entropy_backward"),
        (chunks_with_margin, (0, 1), "linear_cross_entropy", "linear_cross_entropy_backward"),
        (chunks_by_row, (0, 1, 3), "linear_cross_entropy", "linear_cross_entropy_backward"),
        (chunks_to_scalar, (0, 1, 3), "linear_cross_entropy", "linear_cross_entropy_sum_with_gradients"),
        (chunks_to_scalar_with_aux, (0, 1, 3), "linear_cross_entropy", "linear_cross_entropy_sum_with_gradients"),
    )
]


@pytest.mark.parametrize("promise", contract.PROMISES, ids=contract.promise_name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_linear_cross_entropy_keeps_promise(case, promise):
    promise(case)

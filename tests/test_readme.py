"""What the README shows is what happens."""

import functools
import re
from pathlib import Path
from typing import Any

import jax
import pytest

import jaxops

README = Path(__file__).parent.parent / "README.md"

# The four documents of CANN, with their companions, and the one of mcDNN.
DOCUMENTED = {
    *("aclnn" + name for name in ("EmbeddingDenseBackward", "ApplyFusedEmaAdam")),
    *("aclnnNLLLoss" + suffix for suffix in ("", "Backward", "2d", "2dBackward")),
    *(
        "aclnnFused" + name
        for name in ("LinearOnlineMaxSum", "CrossEntropyLossWithMaxSum", "LinearCrossEntropyLossGrad")
    ),
    *("mcdnnBatchNormalization" + name for name in ("Backward", "BackwardEx", "ForwardTraining", "ForwardTrainingEx")),
    *("mcdnnNormalization" + name for name in ("Backward", "ForwardTraining")),
    *("mcdnnGetBatchNormalization" + name for name in ("BackwardExWorkspaceSize", "ForwardTrainingExWorkspaceSize")),
    "mcdnnGetBatchNormalizationTrainingExReserveSpaceSize",
    *("mcdnnGetNormalization" + name for name in ("BackwardWorkspaceSize", "ForwardTrainingWorkspaceSize")),
    "mcdnnGetNormalizationTrainingReserveSpaceSize",
    *("mcdnn" + name + "Backward" for name in ("Activation", "Softmax", "Pooling", "LRNCrossChannel", "Dropout")),
    *("mcdnn" + name + "Backward" for name in ("DivisiveNormalization", "SpatialTfGridGenerator", "SpatialTfSampler")),
    "mcdnnOpsTrainVersionCheck",
}


def test_readme_examples_run_as_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    first, explained = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    (shown,) = re.findall(r"^```\n(tpu-v5e: .*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    namespace: dict[str, Any] = {}
    # What users have; optax's schedules, for one, divide an integer count by floats.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(first, namespace)
        exec(explained, namespace)
    assert 8 < float(namespace["loss"]) < 10
    printed = "".join(f"{line.rstrip()}\n" for line in capsys.readouterr().out.splitlines())
    assert printed == shown


def test_conformance_table_says_what_there_is() -> None:
    """Every documented function has a row; functions and operators exist, and have kernels where the table says."""
    table = README.read_text().split("| documented function |", 1)[1].split("\n\n", 1)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert sorted(name for row in rows for name in named(row[0])) == sorted(DOCUMENTED)
    operators = {operator.name: operator for operator in jaxops.operators()}
    for _, functions, references, tpu, gpu, derivative, statuses in rows:
        assert statuses
        for name in named(functions):
            assert callable(functools.reduce(getattr, name.split("."), jaxops))
        assert set(named(derivative)) <= set(operators)
        for column, platform in ((tpu, "tpu"), (gpu, "cuda")):
            names = [name for name in named(references) if any(k.platform == platform for k in operators[name].kernels)]
            every = names == named(references) and names
            assert column == ("opt-in" if every else ", ".join(f"`{name}`" for name in names) or "no")


def named(cell: str) -> list[str]:
    return re.findall(r"`([\w.]+)`", cell)

"""What "auto" concludes from evidence on kernels: at known sizes, between them, beyond them, and on unknown chips."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest
from typer.testing import CliRunner

import jaxops
import lowering
from jaxops_command.app import app
from lowering import evidence, measurements, tuning_store
from lowering.evidence import Case, Grid, neighbours, verdict
from lowering.measurements import Entry, Key, Measurement
from lowering.targets import here, named
from pallas_kernels.hardware import Hardware
from pallas_kernels.kernel import Kernel, Kind
from pallas_kernels.softmax_groups import Groups
from pallas_kernels.tpu import batch_norm, dropout, embedding, softmax

MIB = 2**20
ROOT = Path(__file__).parents[2]


def case(time: float, *sizes: int, temporaries: tuple[int, int] = (0, 0)) -> Case:
    return Case("op", "mosaic_tpu", "float32", sizes, time, 100.0, temporaries)


GRID = [case(0.5, rows, columns) for rows in (64, 256, 1024) for columns in (128, 1024, 8192)]


def kernel_of(*sizes: int, text: str = "float32") -> Kernel:
    return Kernel(
        "mosaic_tpu", "tpu", lambda x: x, refuses=lambda *_, **__: None, kind=lambda *_, **__: Kind(text, sizes)
    )


def decided(monkeypatch, cases, kernel, *, hardware: Hardware | str = "tpu-v5e", executed=True, targets=("tpu-v5e",)):
    by_kind: dict[tuple[str, str, str], tuple[Case, ...]] = {}
    for one in cases:
        by_kind[one[:3]] = (*by_kind.get(one[:3], ()), one)
    grid = Grid({}, by_kind, {key: [1] for key in by_kind} if executed else {})
    monkeypatch.setattr(evidence, "shipped", lambda target: grid if target in targets else None)
    chip = named(hardware) if isinstance(hardware, str) else hardware
    return verdict("op", kernel, chip, [], {})


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((256, 1024), [(256, 1024)]),
        ((300, 1024), [(256, 1024), (1024, 1024)]),
        ((300, 5000), [(256, 8192), (1024, 8192), (256, 1024), (1024, 1024)]),
        ((63, 1024), [(64, 1024), (256, 1024)]),
        ((300, 8193), [(256, 8192), (1024, 8192)]),
        ((15, 1024), [(64, 1024), (64, 128)]),
        ((10, 1024), []),
    ],
    ids=["known", "between two", "between four", "little less", "little more", "far", "too far"],
)
def test_sizes_are_decided_by_the_nearest_and_by_those_in_each_direction(sizes, expected):
    assert [one.sizes for one in neighbours(GRID, sizes)] == expected


def test_a_nearer_case_takes_the_place_of_others():
    nearer = [*GRID, case(0.9, 280, 1500)]
    found = [one.sizes for one in neighbours(nearer, (300, 5000))]
    assert found == [(256, 8192), (280, 1500), (1024, 1024), (1024, 8192)]


def test_nothing_is_known_of_empty_operands():
    assert neighbours(GRID, (0, 1024)) == ()


def test_sizes_that_are_far_from_known_ones_are_not_decided():
    assert neighbours([case(0.5, 16), case(0.5, 4096)], (256,)) == ()


def test_one_case_alone_decides_its_own_sizes():
    assert len(neighbours(GRID[:1], GRID[0].sizes)) == 1
    assert neighbours(GRID[:1], (100, 500)) == ()


def test_what_was_measured_last_is_known_of_sizes():
    assert neighbours([case(0.5, 64), case(0.7, 64)], (64,)) == (case(0.7, 64),)


@pytest.mark.parametrize(
    ("cases", "is_taken", "words"),
    [
        (
            [case(0.5, 64), case(0.62, 256)],
            True,
            "replayed on tpu-v5e at 0.50 to 0.62 of the reference's time, executed",
        ),
        ([case(0.85, 64), case(0.85, 256)], True, "at 0.85 of"),
        ([case(0.5, 64), case(0.86, 256)], False, "at 0.50 to 0.86 of the reference's time, too close to call"),
        ([case(0.5, 64), case(1.7, 256)], False, "at 0.50 to 1.70 of the reference's time"),
        ([case(1.02, n, temporaries=(100 * MIB, 60 * MIB)) for n in (64, 256)], True, "with less memory, executed"),
        ([case(1.02, n, temporaries=(100 * MIB, 90 * MIB)) for n in (64, 256)], False, "too close to call"),
        ([case(1.02, n, temporaries=(MIB, 0)) for n in (64, 256)], False, "too close to call"),
        ([case(1.04, n, temporaries=(100 * MIB, 0)) for n in (64, 256)], False, "at 1.04 of"),
        ([case(0.5, 160)], False, "no evidence near these sizes"),
        ([case(0.5, 160), case(0.7, 1024)], True, "at 0.50 to 0.70 of the reference's time, executed"),
        ([case(0.5, 800), case(0.5, 1024)], False, "no evidence near these sizes"),
        ([case(0.5, 160), case(0.7, 200), case(1.02, 64)], True, "at 0.50 to 1.02 of the reference's time, executed"),
        ([case(0.5, 160), case(0.7, 200), case(1.04, 64)], False, "at 0.50 to 1.04 of the reference's time"),
        ([case(0.5, 160), case(0.7, 200), case(1.7, 1024)], True, "at 0.50 to 0.70 of the reference's time, executed"),
    ],
    ids=[
        "faster",
        "at the limit",
        "one is close",
        "one loses",
        "memory",
        "little memory",
        "few bytes",
        "slower",
        "one alone",
        "smaller",
        "much smaller",
        "as fast in the other direction",
        "slower in the other direction",
        "slower behind nearer ones",
    ],
)
def test_the_nearest_cases_must_say_that_a_kernel_is_better(monkeypatch, cases, is_taken, words):
    found = decided(monkeypatch, cases, kernel_of(128))
    assert found.is_taken is is_taken
    assert words in found.reason


def test_a_kernel_that_was_not_executed_is_not_taken(monkeypatch):
    found = decided(monkeypatch, [case(0.5, 64), case(0.5, 256)], kernel_of(128), executed=False)
    assert (found.is_taken, found.reason.rpartition(", ")[2]) == (False, "but its compiled code was not executed")


def test_another_kind_is_no_evidence(monkeypatch):
    found = decided(monkeypatch, [case(0.5, 64), case(0.5, 256)], kernel_of(128, text="bfloat16"))
    assert found.reason == "no evidence for bfloat16"


def test_nothing_is_said_of_chips_without_evidence_and_kernels_without_kind(monkeypatch):
    cases = [case(0.5, 64), case(0.5, 256)]
    assert decided(monkeypatch, cases, kernel_of(128), hardware="tpu-v5p") is None
    plain = Kernel("mosaic_tpu", "tpu", lambda x: x, refuses=lambda *_, **__: None)
    assert decided(monkeypatch, cases, plain) is None


@pytest.mark.parametrize(("time", "executed"), [(0.5, True), (0.9, True), (0.5, False)])
def test_a_kernel_is_favoured_if_it_is_taken_anywhere(monkeypatch, time, executed):
    decided(monkeypatch, [case(time, 64), case(1.7, 256)], kernel_of(128), executed=executed)
    is_taken = time == 0.5 and executed
    assert evidence.favours("op", "mosaic_tpu", named("tpu-v5e")) is is_taken
    assert evidence.favours("op", "mosaic_tpu", Hardware("tpu", "tpu")) is is_taken
    assert not evidence.favours("op", "mosaic_tpu", named("tpu-v6e"))
    assert not evidence.favours("op", "another", named("tpu-v5e"))


def test_on_an_unknown_chip_all_known_ones_must_agree(monkeypatch):
    cases, unknown = [case(0.5, 64), case(0.5, 256)], Hardware("tpu", "tpu")
    both = {"targets": ("tpu-v5e", "tpu-v6e"), "hardware": unknown}
    assert decided(monkeypatch, cases, kernel_of(128), **both).is_taken

    def kind(hardware, *_, **__):
        return Kind("float32" if hardware.name == "tpu-v5e" else "another", (128,))

    differs = Kernel("mosaic_tpu", "tpu", lambda x: x, refuses=lambda *_, **__: None, kind=kind)
    found = decided(monkeypatch, cases, differs, **both)
    assert (found.is_taken, found.reason) == (False, "no evidence for another")


@pytest.mark.parametrize(("time", "implementation"), [(90.0, "mine"), (98.0, "reference")])
def test_what_was_measured_on_the_device_decides_at_like_operands(monkeypatch, tmp_path, time, implementation):
    monkeypatch.setenv("JAXOPS_TUNED", str(tmp_path))
    operator = next(one for one in jaxops.operators() if one.name == "softmax")
    kernel = Kernel(
        "mine", "cpu", lambda x, **_: (x,), lambda *_, **__: None, kind=lambda hardware, x, **_: Kind("k", x.shape)
    )
    entries = [
        Entry(
            Key.of("softmax", here(), [jax.ShapeDtypeStruct((rows, 128), jnp.float32)], {}),
            (Measurement("reference", (), 100.0), Measurement("mine", (), time)),
            repeats=3,
            kinds=(("mine", Kind("k", (rows, 128))),),
        )
        for rows in (64, 256)
    ]
    assert [Entry.from_record(entry.to_record()).kinds for entry in entries] == [entry.kinds for entry in entries]
    tuning_store.append(
        tuning_store.file_of(entries[0].key.target), [{"entry": entry.to_record()} for entry in entries]
    )
    tuning_store.reread()
    lowering.add_kernel(operator, kernel)
    try:
        row, beyond = (
            lowering.explain(jaxops.softmax, jax.ShapeDtypeStruct((rows, 128), jnp.float32)).rows[0]
            for rows in (100, 2000)
        )
        text = f"measured on this device at {time / 100:.2f} of the reference's time, at like operands"
        assert row.implementation == implementation
        assert text in (row.evidence, *(refusal.reason.removeprefix("opt-in: ") for refusal in row.refusals))
        assert beyond.implementation == "reference"
    finally:
        lowering.remove_kernel(operator, kernel)
        tuning_store.reread()


@pytest.mark.parametrize("target", ["tpu-v5e", "tpu-v6e", "tpu-v7x", "cuda-h100"])
def test_the_shipped_evidence_is_of_the_kernels_as_they_are(target, monkeypatch):
    """Else run `evidence.py --target TARGET` or, for GPUs, `gpu_evidence.py`: both leave out what no longer holds."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import evidence as maker

    grid = evidence.shipped(target)
    assert grid.header["code"] == maker.header(target)["code"]
    assert set(grid.executed) <= set(grid.cases)
    assert all(f"{operator}/{kernel}" in grid.header["code"] for operator, kernel, _ in grid.cases)


def test_what_was_measured_on_a_target_needs_no_verification_there_but_with_other_versions(monkeypatch):
    """And it says nothing of other chips."""
    cases, kernel = [case(0.5, 64), case(0.5, 256)], kernel_of(128)
    for versions, kind in ((dict(measurements.versions()), ""), ({"jax": "0.1"}, "float32")):
        header = {"how": "measured", "versions": versions}
        grid = Grid(header, {("op", "mosaic_tpu", "float32"): tuple(cases)}, {("op", "mosaic_tpu", "float32"): (8,)})
        monkeypatch.setattr(evidence, "shipped", lambda target, grid=grid: grid if target == "tpu-v5e" else None)
        found = verdict("op", kernel, named("tpu-v5e"), (), {})
        assert (found.is_taken, found.reason) == (True, "measured on tpu-v5e at 0.50 of the reference's time")
        assert found.kind == kind
        assert verdict("op", kernel, Hardware("tpu", "tpu"), (), {}) is None


@pytest.mark.slow
def test_the_evidence_of_the_h100_is_what_its_benchmark_measured(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_evidence

    results = json.loads((ROOT / "benchmarks" / "results" / "gpu_cuda-h100.json").read_text())
    lines = (ROOT / "lowering" / "tuned" / "cuda-h100.evidence.jsonl").read_text().splitlines()
    assert [json.dumps(record) for record in gpu_evidence.records(results)] == lines
    # Nothing is concluded of a kernel whose code has changed since, or that was not right throughout.
    name = "max_pool_backward/mosaic_gpu"
    changed = gpu_evidence.records(results | {"code": results["code"] | {name: "another"}})
    assert {record[0] for record in changed if isinstance(record, tuple)} == {
        json.loads(line)[0] for line in lines if line.startswith("[")
    } - {"max_pool_backward"}
    wrong = gpu_evidence.records(results | {"verified": results["verified"] | {f"{name}: hangs": 1}})
    executed = {record["executed"][0] for record in wrong if isinstance(record, dict) and "executed" in record}
    assert "softmax" in executed
    assert "max_pool_backward" not in executed


def test_the_plainest_loss_takes_its_kernel_on_an_h100():
    loss = jax.value_and_grad(jaxops.linear_cross_entropy, (0, 1))
    shapes = ((16384, 2048), "bfloat16"), ((50304, 2048), "bfloat16"), ((16384,), "int32")
    (row,) = lowering.explain(loss, *(jax.ShapeDtypeStruct(*each) for each in shapes), target="cuda-h100").rows
    assert row.implementation == "mosaic_gpu"
    assert row.evidence.startswith("measured on cuda-h100 at ")


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_kernels_are_taken_at_drawn_sizes_only_where_they_are_faster(chip, monkeypatch):
    """By replays of sizes that the evidence does not hold."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import evidence_page

    known = evidence_page.judged(ROOT / "benchmarks" / "results" / f"evidence_draws_{chip}.json")
    far_better = [is_taken for time, is_taken in known if time < 0.8]
    assert max(time for time, is_taken in known if is_taken) <= 1.02
    assert sum(far_better) > 0.9 * len(far_better)


def test_cases_that_are_left_out_are_decided_rightly_by_the_others():
    """On all TPUs' files, whose drawn sizes were added because they were hard to decide."""
    far_better, taken, times = 0, 0, []
    for chip in ("v5e", "v6e", "v7x"):
        grid = evidence.read(ROOT / "lowering" / "tuned" / f"tpu-{chip}.evidence.jsonl")
        for cases in grid.cases.values():
            for one in cases:
                near = neighbours([case for case in cases if case.sizes != one.sizes], one.sizes)
                is_taken = bool(near) and evidence.are_better(near)
                far_better += one.time < 0.8
                taken += is_taken and one.time < 0.8
                times += [one.time] if is_taken else []
    assert taken / far_better > 0.85
    assert sum(time > 1.02 for time in times) < len(times) / 150


def test_the_page_shows_the_evidence_that_ships(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import evidence_page

    assert evidence_page.page() == (ROOT / "docs" / "what-runs-where.md").read_text()


def test_cases_are_alike_only_where_xla_keeps_and_copies_the_same():
    def words(kernel, target, *operands, **attributes):
        return kernel.kind(named(target), *operands, **attributes).text.split(", ")

    grads = jax.ShapeDtypeStruct((13000, 2048), jnp.float32)  # 101 MiB
    assert "mask in HBM" not in words(dropout.KERNEL, "tpu-v5e", None, grads, None)
    assert "mask in HBM" in words(dropout.BACKWARD_KERNEL, "tpu-v6e", grads, None, None)
    options = {"num_weights": 50257, "padding_idx": None, "scale_grad_by_freq": False}
    for width, is_copied in ((768, False), (1000, True)):
        rows, indices = (jax.ShapeDtypeStruct((4096, *shape), jnp.float32) for shape in ((width,), ()))
        assert ("copied" in words(embedding.KERNEL, "tpu-v5e", rows, indices, **options)) == is_copied
    # With fewer positions the kernel leaves XLA the VMEM to hold the table.
    for positions, is_copied in ((12108, True), (1210, False)):
        rows, indices = (jax.ShapeDtypeStruct((positions, *shape), jnp.float32) for shape in ((917,), ()))
        found = words(embedding.KERNEL, "tpu-v5e", rows, indices, **options | {"num_weights": 18340})
        assert ("copied" in found) == is_copied
    # Of these two, XLA needs as long as the kernel for the first by replay, and 1.7 times as long for the second.
    for positions, width, num_weights, is_small in ((4010, 450, 9281, True), (4877, 739, 10509, False)):
        rows, indices = (jax.ShapeDtypeStruct((positions, *shape), jnp.float32) for shape in ((width,), ()))
        found = words(embedding.KERNEL, "tpu-v6e", rows, indices, **options | {"num_weights": num_weights})
        assert ("small table" in found) == is_small
    for columns, is_short in ((120, True), (200, False)):
        x = jax.ShapeDtypeStruct((32768, columns), jnp.float32)
        found = words(softmax.KERNEL, "tpu-v5e", x, log=False, groups=Groups.along(x.shape, (1,)))
        assert ("along sublanes" in found, "short" in found) == (True, is_short)
    for side, is_padded in ((56, False), (50, True)):
        images = SimpleNamespace(x=jax.ShapeDtypeStruct((33, side * side, 256, 1), jnp.bfloat16), residual=None)
        found = words(batch_norm.KERNEL, "tpu-v5e", images, activation=SimpleNamespace(mode="identity"))
        assert ("stored as nsc" in found, "padded rows" in found) == (True, is_padded)


def test_a_chip_that_cannot_take_the_operands_speaks_against_a_kernel(monkeypatch):
    def refuses(hardware, *_, **__):
        return "too small" if hardware.name == "tpu-v6e" else None

    kernel = Kernel("mosaic_tpu", "tpu", lambda x: x, refuses, kind=lambda *_, **__: Kind("float32", (128,)))
    cases = [case(0.5, 64), case(0.5, 256)]
    found = decided(monkeypatch, cases, kernel, hardware=Hardware("tpu", "tpu"), targets=("tpu-v5e", "tpu-v6e"))
    assert (found.is_taken, found.reason) == (False, "tpu-v6e cannot take these operands")


def test_explain_can_require_kernels():
    taken, left = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4096, 4096), (8, 256)))
    (row,) = lowering.explain(jaxops.softmax, taken, target="tpu-v5e", require="kernel").rows
    assert row.implementation == "mosaic_tpu"
    reason = r"on tpu-v5e; got softmax\(f32\[8,256\]\) \(mosaic_tpu: opt-in: no evidence near these sizes\)"
    with pytest.raises(lowering.NotSupportedError, match=reason):
        lowering.explain(jaxops.softmax, left, target="tpu-v5e", require="kernel")
    assert lowering.explain(jaxops.softmax, left, target="cpu", require="kernel").rows  # which has no kernels
    with pytest.raises(lowering.NotSupportedError, match="must take a kernel on tpu-v5e; the function has none"):
        lowering.explain(jnp.sin, left, target="tpu-v5e", require="kernel")
    with pytest.raises(ValueError, match='require must be None or "kernel"; got'):
        lowering.explain(jaxops.softmax, left, require="kernels")


def test_the_command_requires_kernels_and_lists_the_evidence(tmp_path):
    file = tmp_path / "model.py"
    file.write_text(
        "import jax, jaxops\ndef probs(x): return jaxops.softmax(x)\n"
        "probs_args = (jax.ShapeDtypeStruct((8, 256), 'float32'),)\n"
    )
    require = ["explain", f"{file}:probs", "--target", "tpu-v5e", "--require"]
    kernel, typo = (CliRunner().invoke(app, [*require, what]) for what in ("kernel", "kernels"))
    assert kernel.exit_code == typo.exit_code == 2
    assert "must take a kernel on tpu-v5e; got softmax(f32[8,256])" in kernel.stderr
    assert "--require must be kernel; got 'kernels'" in typo.stderr
    listed = CliRunner().invoke(app, ["ops", "--target", "tpu-v5e", "--json"])
    known = sum(record["known"] for record in json.loads(listed.stdout))
    assert known == sum(map(len, evidence.shipped("tpu-v5e").cases.values()))
    kinds = CliRunner().invoke(app, ["ops", "softmax", "--target", "tpu-v5e", "--json"])
    assert {record["operator"] for record in json.loads(kinds.stdout)} == {"softmax"}
    short, long = (CliRunner().invoke(app, ["ops", *more, "--target", "tpu-v5e"]).stdout for more in ((), ("softmax",)))
    assert f"{sum(record['known'] for record in json.loads(kinds.stdout))} sizes" in short
    assert all(record["kind"] in long for record in json.loads(kinds.stdout))
    alone = CliRunner().invoke(app, ["ops", "softmax"])
    assert "... c -> ... c" in alone.stdout
    assert "max_pool" not in alone.stdout
    for more in ((), ("--target", "tpu-v5e")):
        unknown = CliRunner().invoke(app, ["ops", "softmx", *more])
        assert unknown.exit_code == 2
        assert unknown.stderr.endswith("names; got 'softmx', did you mean softmax?\n")
    nothing = CliRunner().invoke(app, ["ops", "--target", "cpu"])
    assert "no evidence on its kernels ships with the library" in nothing.stdout


def test_a_loss_takes_its_kernel_whatever_terms_its_rows_have():
    def by_optax(x, weight, labels):
        return optax.softmax_cross_entropy_with_integer_labels((x @ weight.T).astype(jnp.float32), labels).mean()

    shapes = ((4096, 1024), jnp.bfloat16), ((32768, 1024), jnp.bfloat16), ((4096,), jnp.int32)
    operands = [jax.ShapeDtypeStruct(*each) for each in shapes]
    for loss in (
        lowering.rewrite(by_optax),
        functools.partial(jaxops.linear_cross_entropy, z_loss=1e-4),
        jaxops.linear_cross_entropy,
    ):
        with jax.numpy_dtype_promotion("standard"):
            explanation = lowering.explain(jax.value_and_grad(loss, (0, 1)), *operands, target="cuda-h100")
        assert [row.implementation for row in explanation.rows] == ["mosaic_gpu"]


@pytest.mark.parametrize("is_compared", [True, False])
def test_what_was_timed_and_not_compared_is_verified_before_its_first_use(monkeypatch, is_compared):
    """That is enough where it was timed on the target. A replay runs nothing, so there the kernel is not taken."""
    case = evidence.Case("op", "kernel", "bfloat16", (64,), 0.5, 100.0, (0, 0))
    header = {"how": "measured", "versions": dict(evidence.measured_versions())}
    executed = {case[:3]: (8,)} if is_compared else {}
    grid = evidence.Grid(header, {case[:3]: (case,)}, executed)
    monkeypatch.setattr(evidence, "shipped", lambda target: grid)
    found = evidence.shipped_verdict("op", "kernel", "cuda-h100", Kind("bfloat16", (64,)))
    assert found.is_taken
    assert found.kind == ("" if is_compared else "bfloat16")
    replayed = grid._replace(header={"how": "replayed"})
    monkeypatch.setattr(evidence, "shipped", lambda target: replayed)
    assert evidence.shipped_verdict("op", "kernel", "tpu-v5e", Kind("bfloat16", (64,))).is_taken == is_compared


@pytest.mark.parametrize(("how", "is_taken"), [("replayed", False), ("measured", True)])
def test_one_win_among_many_ties_is_taken_for_the_replay_s_error(monkeypatch, how, is_taken):
    times = [0.8, *[0.98] * 7]
    cases = tuple(evidence.Case("op", "k", "bf16", (64 * 8**i,), time, 9.0, (0, 0)) for i, time in enumerate(times))
    key = cases[0][:3]
    grid = evidence.Grid({"how": how, "versions": {}}, {key: cases}, {key: (8,)})
    monkeypatch.setattr(evidence, "shipped", lambda target: grid)
    assert (grid.taken == [key]) == is_taken
    found = evidence.shipped_verdict("op", "k", "tpu-v5e", Kind("bf16", (64,)))
    assert found.is_taken == is_taken
    assert is_taken or found.reason.endswith("the only one of 8 sizes at which it is better")


def test_what_is_known_of_a_kernel_is_said_where_it_was_asked_for():
    x, weight = (jax.ShapeDtypeStruct((size, 512), jnp.bfloat16) for size in (1024, 8192))
    biased = functools.partial(jaxops.linear_cross_entropy, labels=jnp.zeros(1024, jnp.int32), bias=jnp.zeros(8192))
    with jaxops.use("pallas"):
        (known,) = lowering.explain(jaxops.softmax, weight, target="tpu-v5e").rows
        (asked,) = lowering.explain(biased, x, weight, target="tpu-v5e").rows
    assert known.evidence.startswith("replayed on tpu-v5e at 0.")
    assert asked.evidence == "as asked; no evidence for bfloat16, bias"

"""`jaxops doctor`: each known fault is found where it is and not beside it, by version, platform, flags and program."""

import json
import re
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.pallas import tpu as pltpu
from typer.testing import CliRunner, Result

import jaxops
from jaxops_command import examination, touched
from jaxops_command.app import app
from jaxops_command.known_faults import FAULTS, release
from jaxops_command.options import CommandError
from jaxops_command.user_function import run_user_code
from lowering import tuning_store
from lowering.register import installed_packages

BY_NAME = {fault.name: fault for fault in FAULTS}


def array(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def squares(m: jax.Array, x: jax.Array) -> jax.Array:
    return jax.vmap(lambda row: jnp.sum((m @ row) ** 2))(x)


def windows(x: jax.Array, dilation: tuple[int, int]) -> jax.Array:
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 1), (2, 1), ((0, 0), (0, 0)), base_dilation=dilation)


def shifted(x: jax.Array) -> jax.Array:
    base = x + 1
    return base.at[1:].set(base[:-1]).reshape(1, *x.shape)


def moved(x: jax.Array) -> jax.Array:
    base = x + 1
    return base.at[1:].set(base[:-1])


def written(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda carry, _: (carry * 0.9, carry), x, length=100_000)[1]


def summed(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda carry, _: (carry * 0.9, None), x, length=100_000)[0]


def _grid_size(y_ref: Any) -> None:
    y_ref[...] = jnp.full(y_ref.shape, pl.num_programs(0), jnp.int32)


def sizes(*grids: int) -> list[jax.Array]:
    return [pl.pallas_call(_grid_size, out_shape=array(8, dtype="int32"), grid=(grid,))() for grid in grids]


def sums(values: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.zeros(4, values.dtype).at[ids].add(values)


def pooled(x: jax.Array) -> jax.Array:
    return jnp.sum(jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2,), (2,), "VALID"))


def first_row(source: jax.Array, unread: jax.Array, *, interpret: Any = False) -> jax.Array:
    """A copy of a part of an operand in HBM, beside an operand that the kernel never reads."""

    def kernel(source_ref: Any, unread_ref: Any, y_ref: Any, staging_ref: Any) -> None:
        pltpu.sync_copy(source_ref.at[pl.ds(0, 1), :], staging_ref)
        pltpu.sync_copy(staging_ref, y_ref)

    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    y = array(1, source.shape[1])
    scratch = [pltpu.VMEM(y.shape, y.dtype)]
    specs = {"in_specs": [hbm, hbm], "out_specs": hbm, "scratch_shapes": scratch}
    return pl.pallas_call(kernel, out_shape=y, interpret=interpret, **specs)(source, unread)


def copied(x: jax.Array, *, interpret: Any = False) -> jax.Array:
    def kernel(x_ref: Any, y_ref: Any, staging_ref: Any) -> None:
        pltpu.sync_copy(x_ref, staging_ref)
        pltpu.sync_copy(staging_ref, y_ref)

    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    specs = {"in_specs": [hbm], "out_specs": hbm, "scratch_shapes": [pltpu.VMEM(x.shape, x.dtype)]}
    return pl.pallas_call(kernel, out_shape=array(*x.shape, dtype=x.dtype.name), interpret=interpret, **specs)(x)


def row_gradients(take: Callable[..., Any], rows: int) -> Callable[..., Any]:
    """Gradients of an embedding, added up over microbatches."""

    def total(ids: jax.Array, cotangents: jax.Array) -> jax.Array:
        table = jnp.zeros((rows, cotangents.shape[-1]))

        def step(sums: jax.Array, batch: Any) -> tuple[jax.Array, None]:
            return sums + jax.vjp(lambda table: take(table, batch[0]), table)[1](batch[1])[0], None

        return jax.lax.scan(step, table, (ids, cotangents))[0]

    return total


def taken(table: jax.Array, ids: jax.Array) -> jax.Array:
    return table[ids]


partitioned = custom_partitioning(lambda x: x * 2)
partitioned.def_partition(partition=None, sharding_rule="i -> i")
IDS = array(8, dtype="int32")
# By the name of a fault: what it touches, and what is like it but is not touched.
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Callable[..., Any], tuple[Any, ...]]] = {
    "jax#39103": (squares, (array(3, 3), array(40000, 3)), squares, (array(64, 64), array(40000, 64))),
    "jax#39257": (
        lambda a: jnp.sum(a * a, axis=3),
        (array(3, 1, 2, 2, 8, 8, 8),),
        lambda a: jnp.sum(a * a, axis=3),
        (array(3, 2, 2, 8, 8, 8),),
    ),
    "xla#48714": (lambda x: windows(x, (1, 2)), (array(64, 128),), lambda x: windows(x, (2, 1)), (array(64, 128),)),
    "xla#49176": (shifted, (array(8, 16),), moved, (array(8, 16),)),
    "jax#39352": (jnp.arctan, (array(50),), jnp.tanh, (array(50),)),
    "jax#40101": (written, (array(),), summed, (array(),)),
    "jax#40486": (jax.lax.composite(lambda x: x * x, name="tests.square"), (array(4),), jnp.square, (array(4),)),
    "jax#40847": (lambda: sizes(2, 5), (), lambda: sizes(3, 3), ()),
    "jax#38806": (sums, (array(8), IDS), sums, (array(8, dtype="bfloat16"), IDS)),
    "jax#39959": (
        jax.vmap(sums, (0, None)),
        (array(3, 8), IDS),
        jax.vmap(sums, (1, None), out_axes=1),
        (array(8, 3), IDS),
    ),
    "flax#4233": (jax.grad(pooled), (array(8),), pooled, (array(8),)),
    "jax#17844": (sums, (array(8), IDS), lambda v, i: v.at[i].get(), (array(8), IDS)),
    "jax#38196": (partitioned, (array(8),), jnp.square, (array(8),)),
    "jax#39744": (
        lambda x: first_row(x, jnp.ones((16, 128))),
        (array(2, 256),),
        first_row,  # what the program is given does no harm
        (array(2, 256), array(16, 128)),
    ),
    "jax#39505": (copied, (array(1, dtype="int32"),), copied, (array(2, dtype="int32"),)),
    "xla#49143": (
        row_gradients(taken, 96),
        (array(2, 8, dtype="int32"), array(2, 8, 4)),
        lambda ids, x: jax.lax.scan(lambda total, each: (total + each.sum(), sums(each[:, 0], ids)), 0.0, x),
        (IDS, array(2, 8, 4)),
    ),
}


def test_every_fault_is_tried() -> None:
    assert list(PROGRAMS) == [fault.name for fault in FAULTS]


@pytest.mark.parametrize("name", PROGRAMS)
def test_fault_is_found_where_it_is(name: str) -> None:
    fn, args, clean, clean_args = PROGRAMS[name]
    fault = BY_NAME[name]
    (platform, *_) = fault.platforms
    assert len(touched.lines(fn, args, fault, platform)) == 1
    assert touched.lines(clean, clean_args, fault, platform) == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_says_where_it_is_and_what_helps(fault: Any) -> None:
    assert re.fullmatch(r"https://github\.com/[\w-]+/[\w-]+/issues/\d+", fault.thread)
    assert fault.platforms <= {"cpu", "cuda", "tpu"}
    assert not fault.until or release(fault.since) < release(fault.until)
    assert re.fullmatch(r"[A-Z]\w*[^.]* [\w .#]+\.", fault.what)
    assert fault.helps


def test_page_lists_the_faults() -> None:
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    assert re.findall(r"^\| \[(\S+)\]\((\S+)\)", page, re.MULTILINE) == [(each.name, each.thread) for each in FAULTS]


def test_versions_platforms_and_flags_decide() -> None:
    wrong_sums, deterministic = BY_NAME["jax#39103"], BY_NAME["flax#4233"]
    without = "--xla_force_host_platform_device_count=8 --xla_cpu_experimental_ynn_fusion_type="
    assert wrong_sums.is_in("0.10.2", "cpu", "")
    assert [wrong_sums.is_in(version, "cpu", "") for version in ("0.10.1", "0.11.0", "0.12.0.1")] == [False] * 3
    assert not wrong_sums.is_in("0.10.2", "cuda", "")
    assert [wrong_sums.is_in("0.10.2", "cpu", flags) for flags in (without, f"{without} --x")] == [False, False]
    assert wrong_sums.is_in("0.10.2", "cpu", f"{without}dot")
    assert not deterministic.is_in("0.12.0", "cuda", "")
    assert deterministic.is_in("0.12.0", "cuda", "--xla_gpu_deterministic_ops=true")
    assert not deterministic.is_in("0.12.0", "cuda", "--xla_gpu_deterministic_ops=false")
    assert (release("0.12.0.dev20260920"), release("0.12.0.1"), release("?")) == ((0, 12, 0), (0, 12, 0, 1), ())


def test_faults_that_can_be_tried_are_as_the_table_says() -> None:
    jaxlib = metadata.version("jaxlib")
    found = np.asarray(jax.jit(shifted)(np.arange(128, dtype=np.int32).reshape(8, 16)))
    expected = np.asarray(moved(jnp.arange(128).reshape(8, 16)))
    assert (found[0] != expected).any() == BY_NAME["xla#49176"].is_in(jaxlib, "cpu", "")
    composite = jax.jit(PROGRAMS["jax#40486"][0])
    try:
        jax.export.export(composite, platforms=["cpu", "tpu"])(array(4))
        fails = False
    except ValueError:
        fails = True
    assert fails == BY_NAME["jax#40486"].is_in(jaxlib, "cpu", "")


def test_faults_of_tpus_do_not_show_on_a_cpu() -> None:
    """The programs that their threads name, against NumPy: kernels in the interpreter, and a mesh of four devices."""
    rng = np.random.default_rng(0)
    x, interpret = rng.normal(size=(2, 256)).astype(np.float32), pltpu.InterpretParams()
    np.testing.assert_array_equal(jax.jit(lambda x: first_row(x, jnp.ones((16, 128)), interpret=interpret))(x), x[:1])
    assert copied(jnp.full(1, 42), interpret=interpret).tolist() == [42]
    mesh = jax.make_mesh((4,), ("rows",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.NamedSharding(mesh, jax.P("rows"))
    ids = rng.integers(0, 96, (2, 16, 8), dtype=np.int32)
    cotangents = rng.integers(-8, 8, (*ids.shape, 4)).astype(np.float32) / 16
    batches = [jax.device_put(each, jax.NamedSharding(mesh, jax.P(None, "rows"))) for each in (ids, cotangents)]
    found = jax.jit(row_gradients(taken, 96), out_shardings=split)(*batches)
    expected = np.zeros((96, 4), np.float32)
    np.add.at(expected, ids, cotangents)
    np.testing.assert_array_equal(found, expected)


def test_sums_of_our_own_gradients_in_loops_count_too() -> None:
    args = (array(2, 8, dtype="int32"), array(2, 8, 4))
    assert len(touched.lines(row_gradients(jaxops.embedding, 96), args, BY_NAME["xla#49143"], "tpu")) == 1


def test_fault_is_found_inside_an_operator_of_this_library() -> None:
    """The gradient of a table scatters where devices share the work, and on GPUs it does not."""

    def gradient(table: jax.Array, ids: jax.Array) -> jax.Array:
        return jax.grad(lambda table: jnp.sum(jaxops.embedding(table, ids)))(table)

    fault = BY_NAME["jax#17844"]
    args = (array(64, 128), IDS)
    assert touched.lines(gradient, args, fault, "cuda") == []
    (line,) = touched.lines(gradient, args, fault, "tpu")
    assert line.endswith("in embedding_dense_backward")
    assert "test_doctor.py" in line


@pytest.mark.slow
def test_this_library_avoids_what_it_can() -> None:
    silent = [fault for fault in FAULTS if "silently" in fault.what or "crashes" in fault.what]
    assert len(silent) == 8
    found = {(fault.name, name): touched.of_library(fault, name) for fault in silent for name in fault.platforms}
    assert {fault: names for fault, names in found.items() if names} == {}
    assert touched.of_library(BY_NAME["jax#38806"], "cuda") == []


def test_scatters_of_labels_are_no_sums_into_few_rows() -> None:
    def loss(x: jax.Array, labels: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(x, labels).mean()

    for name in ("jax#38806", "jax#39959"):
        args = array(4, 8, 32), array(4, 8, dtype="int32")
        assert touched.lines(jax.grad(loss), args, BY_NAME[name], "cuda") == []


USER_FILE = """
import jax, jax.numpy as jnp

def shifted(x):
    base = x + 1
    return base.at[1:].set(base[:-1]).reshape(1, *x.shape)

def sound(x):
    return jnp.tanh(x)

def broken(x):
    raise RuntimeError("no")
"""


@pytest.fixture
def user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(USER_FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("XLA_FLAGS", "")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments])


@pytest.mark.usefixtures("user_file")
def test_command_names_the_line_the_thread_and_what_helps() -> None:
    result = run("mine.py:shifted", "--arg", "f32[8,16]")
    assert result.exit_code == 1
    words = " ".join(result.stdout.split())
    assert "https://github.com/openxla/xla/issues/49176" in words
    assert "mine.py:6" in words
    assert len(result.stdout.splitlines()) <= 40
    record = json.loads(run("mine.py:shifted", "--arg", "f32[8,16]", "--json").stdout)
    assert not record["healthy"]
    assert [fault["fault"] for fault in record["faults"] if fault["touches"]] == ["xla#49176"]
    assert record["faults"][0]["touches"] == ["mine.py:6 (shifted)"]
    assert record["faults"][0]["helps"] == "XLA_FLAGS=--xla_disable_hlo_passes=algsimp"


@pytest.mark.usefixtures("user_file")
def test_command_finds_nothing_in_what_is_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("mine.py:sound", "--arg", "f32[8,16]")
    assert result.exit_code == 0
    said = result.stdout.splitlines()
    listed = said[said.index("other known faults of these versions, which do not touch mine.py:sound:") + 1 :]
    here = touched.faults_here(metadata.version("jaxlib"), "cpu", "")
    assert listed == [f"  {fault.name}: {fault.what} {fault.thread}" for fault in here]
    monkeypatch.setenv("XLA_FLAGS", "--xla_disable_hlo_passes=algsimp")
    assert run("mine.py:shifted", "--arg", "f32[8,16]").exit_code == 0
    assert run("mine.py:shifted", "--arg", "f32[8,16]", "--target", "cuda-h100").exit_code == 0


@pytest.mark.usefixtures("user_file")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("mine.py:broken", "--arg", "f32[2]"),
            "mine.py:broken must be traceable with these arguments; got RuntimeError",
        ),
        (("yours.py:loss",), "FILE.py:FUNCTION must name an existing Python file; got 'yours.py:loss'"),
        (("--target", "abacus"), "target must be one of cpu, tpu-v5e,"),
    ],
    ids=["broken", "no file", "target"],
)
def test_command_refuses_in_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr


def troubles() -> dict[str, str]:
    return {part.name: part.trouble for part in examination._environment() if part.trouble}


def test_environment_without_trouble() -> None:
    parts = {part.name: part.found for part in examination._environment()}
    assert troubles() == {}
    assert parts["JAX"] == f"jax {jax.__version__}, jaxlib {metadata.version('jaxlib')}"
    assert parts["devices"] == "8 x cpu"


def test_environment_with_trouble(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 14, 0))
    monkeypatch.setenv(tuning_store.VARIABLE, str(tmp_path))
    (tmp_path / "cpu.jsonl").write_text('{"case": "x"}\n{half')
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.9.0" if name == "jaxlib" else real(name))
    found = troubles()
    assert found["Python"] == "it must be 3.11, 3.12 or 3.13"
    assert found["JAX"] == f"they should be of one release: pip install jaxlib=={jax.__version__}"
    assert found["tuned"] == f"{tmp_path / 'cpu.jsonl'} has damaged lines: 2"


def test_environment_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[Any]:
        raise AssertionError

    monkeypatch.setattr(jax, "devices", fail)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    result = run("--json")
    assert result.exit_code == 1
    record = json.loads(result.stdout)
    (devices,) = (part for part in record["environment"] if part["name"] == "devices")
    assert devices["found"] == "none"
    assert devices["trouble"].startswith("JAX finds no device with JAX_PLATFORMS=cuda, AssertionError")
    assert "what is installed" in run().stdout
    # Commands that trace say the same, instead of what JAX fails with on the way.
    with pytest.raises(CommandError, match="JAX finds no device with JAX_PLATFORMS=cuda"):
        run_user_code("model.py:loss", "be traceable", fail)


@pytest.mark.long
def test_packages_with_operators_are_found_before_anybody_imports_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    information = tmp_path / "their_operators-0.3.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: their-operators\nVersion: 0.3\n")
    (information / "entry_points.txt").write_text("[lowering.operators]\ntheirs = their_operators\n")
    (tmp_path / "their_operators.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    installed_packages.cache_clear()
    request.addfinalizer(installed_packages.cache_clear)
    assert CliRunner().invoke(app, ["ops"]).exit_code == 0
    assert "their_operators" in sys.modules
    assert "their-operators 0.3" in CliRunner().invoke(app, ["doctor"]).stdout
    (tmp_path / "their_operators.py").write_text("import nothing_of_this_name")
    monkeypatch.delitem(sys.modules, "their_operators")
    words = "installed packages with operators must be importable; got ModuleNotFoundError: No module named"
    assert words in CliRunner().invoke(app, ["ops"]).stderr

"""What is published: built, installed without the repository, imported, type-checked and run."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import jaxops

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(*command: object, folder: Path) -> str:
    """What a command prints, run where nothing of the repository is in sight, and optimized."""
    unwanted = ("PYTHONPATH", "JAX_DISABLE_MOST_OPTIMIZATIONS")
    outside = {name: value for name, value in os.environ.items() if name not in unwanted}
    result = subprocess.run([str(each) for each in command], cwd=folder, env=outside, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("distributions")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, folder=folder)
    return folder


@pytest.fixture(scope="module")
def installed(distributions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel. What it depends on is found here, without this environment's editable install."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, symlinks=True)
    (wheel,) = distributions.glob("*.whl")
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "--disable-pip-version-check")
    run(*pip, "install", "--quiet", "--no-deps", wheel, folder=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(str(Path(pytest.__file__).parents[1]))
    return folder


@pytest.mark.slow
def test_wheel_holds_the_packages_and_their_data_and_nothing_else(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    packages = ("jaxops", "jaxops_command", "lowering", "pallas_kernels")
    here = {
        str(path.relative_to(ROOT))
        for package in packages
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {f"{package}/py.typed" for package in packages} | {"lowering/tuned/tpu-v5e.replayed.json"} <= here
    assert {name for name in held if ".dist-info/" not in name} == here


@pytest.mark.slow
def test_sdist_holds_what_its_tests_need(distributions: Path) -> None:
    (sdist,) = distributions.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "Makefile", "pyproject.toml", "tests/conftest.py"}
    assert needed | {"benchmarks/results/softmax_cpu.json", "docs/operators.md", "notebooks/vision.ipynb"} <= held
    assert {name for name in held if name.startswith((".", "build/")) or "__pycache__" in name} <= {".gitignore"}


@pytest.mark.slow
def test_installed_packages_are_imported_from_where_they_are_installed(installed: Path) -> None:
    program = "import jaxops, lowering, pallas_kernels as p; print(jaxops.__file__, lowering.__file__, p.__file__)"
    found = run(installed / "bin" / "python", "-c", program, folder=installed).split()
    assert all(path.startswith(str(installed)) for path in found)
    assert run(installed / "bin" / "jaxops", "--version", folder=installed).startswith(f"jaxops {PROJECT['version']},")


@pytest.mark.slow
def test_installed_demo_runs(installed: Path, tmp_path: Path) -> None:
    said = run(installed / "bin" / "jaxops", "demo", "--steps", "2", folder=tmp_path)
    assert "validation loss" in said
    assert (tmp_path / "demo_output" / "loss.png").stat().st_size > 10_000
    page = (tmp_path / "demo_output" / "index.html").read_text()
    assert all(words in page for words in ("plain JAX and optax", "50,257", "apply_fused_ema_adam", "import os"))


@pytest.mark.slow
def test_installed_packages_give_their_types(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import jax\nimport jaxops\nreveal_type(jaxops.softmax(jax.numpy.ones(3)))\nreveal_type(jaxops.__version__)\n"
    )
    flags = ("--config-file=", "--follow-imports=silent", "--python-executable", installed / "bin" / "python")
    said = run(sys.executable, "-m", "mypy", *flags, "program.py", folder=tmp_path)
    assert re.findall(r'Revealed type is ".*?(\w+)"', said) == ["Array", "str"]


def test_version_comes_from_one_place() -> None:
    assert jaxops.__version__ == PROJECT["version"]
    quoted = f'"{PROJECT["version"]}"'
    packages = ("jaxops", "jaxops_command", "lowering", "pallas_kernels")
    assert [p for name in packages for p in (ROOT / name).rglob("*.py") if quoted in p.read_text()] == []
    assert "version:" not in (ROOT / "CITATION.cff").read_text().replace("cff-version:", "")


def test_supported_versions_are_stated_and_tested_at_both_ends() -> None:
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    oldest, beyond = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups()
    supported = [f"3.{minor}" for minor in range(int(oldest), int(beyond))]
    stated = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if "Python ::" in name]
    assert stated == re.findall(r'python: "([\d.]+)", jax', workflow) == supported
    (oldest_jax,) = (name.removeprefix("jax>=") for name in PROJECT["dependencies"] if name.startswith("jax>="))
    assert f'{{python: "{supported[0]}", jax: "jax=={oldest_jax} ' in workflow
    assert f"JAX {oldest_jax}" in (ROOT / "README.md").read_text()

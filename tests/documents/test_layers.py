"""Imports, calls and reading point one way: tests -> jaxops_command -> jaxops -> lowering -> pallas_kernels -> jax."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAY_IMPORT = {
    "jaxops_command": ("jaxops_command", "jaxops", "lowering"),
    "jaxops": ("jaxops", "lowering", "pallas_kernels"),
    "lowering": ("lowering", "pallas_kernels.kernel", "pallas_kernels.hardware"),
    "pallas_kernels": ("pallas_kernels",),
}
# A replay needs what the compiler wrote, and facts about chips; of the rest only what describes and prints.
REPLAY = "lowering.schedule"
A_REPLAY_MAY_IMPORT = (
    REPLAY,
    "lowering.tpu_core",
    "lowering.describe",
    "lowering.errors",
    "lowering.operators",
    "lowering.source_lines",
    "lowering.tables",
    "pallas_kernels.hardware",
)
# These compile.
COMPARE_REPLAYS = ("lowering.schedule.compare", "lowering.schedule.changes")
DECIDE = ("lowering.campaign", "lowering.measuring", "lowering.planning", "lowering.tuning")
MAY_NOT_IMPORT = {"pallas_kernels.tpu": "pallas_kernels.gpu", "pallas_kernels.gpu": "pallas_kernels.tpu"}
ABOVE = {
    "tests",
    "contract",
    "conftest",
    "typed_user_program",
    "flax_classifier",
    "optimizers",
    "patterns_clean",
    "patterns_planted",
    "public_calls",
    "benchmarks",
    "notebooks",
}
# `python -m jaxops` is the command.
COMMAND = ("jaxops_command", "jaxops.__main__")
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in MAY_IMPORT
    for path in sorted((ROOT / package).rglob("*.py"))
}

# What a function may import when it is called, because importing it costs every user time, or an extra that few have
# installed. Of our own modules only what a subcommand does, which its options and help do without: elsewhere that would
# hide a cycle.
DEFERRED = {
    "jax.experimental.pallas.mosaic_gpu": "0.2 to 0.3 s, mostly MLIR dialects; only lowering a GPU kernel needs it",
    "jax.experimental.pallas.tpu": "0.1 to 0.2 s; only lowering a TPU kernel needs it",
    "jax._src.pallas.mosaic_gpu.interpret.params": "the same, where its interpreter was still private (JAX 0.10)",
    "flax": "in an extra; the demo's model",
    "matplotlib": "in an extra; the demo's plot",
    "orbax": "in an extra; the demo's checkpoints",
    "tokenizers": "in an extra; the demo's vocabulary",
}
# Each is for users of one framework, who import it by name.
FOR_FRAMEWORKS = {"jaxops.equinox": "equinox", "jaxops.linen": "flax", "jaxops.nnx": "flax"}
# What `import jaxops` must not load: the above, unless JAX does, and what only the command and the tests need.
NOT_LOADED = {*DEFERRED, *FOR_FRAMEWORKS, *FOR_FRAMEWORKS.values()} - {"jax._src.pallas.mosaic_gpu.interpret.params"}
NOT_LOADED |= {"hypothesis", "optax", "pytest", "sklearn", "typer"}


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIRED = {re.match(r"[\w-]+", requirement).group() for requirement in PROJECT["dependencies"]}
LIGHT = {"jaxops_command", "jaxops_command.app", "jaxops_command.functions", "jaxops_command.options"}


@functools.cache
def _tree(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text(), filename=str(FILES[module]))


@functools.cache
def _nodes(module: str) -> list[ast.AST]:
    return list(ast.walk(_tree(module)))


def _imported(node: ast.AST) -> list[str]:
    """The modules and names that an import statement brings in, by their full names."""
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom():
            assert node.level == 0, "imports are absolute"
            return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


@functools.cache
def _imports(module: str) -> list[str]:
    return [name for node in _nodes(module) for name in _imported(node)]


def _within(name: str, *prefixes: str) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def _third_party(module: str) -> set[str]:
    """The distributions that a module may import when it is itself imported: those that its users have."""
    if _within(module, "pallas_kernels"):
        return {"jax"}
    return REQUIRED | {FOR_FRAMEWORKS[module]} if module in FOR_FRAMEWORKS else REQUIRED


def _run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that importing a module evaluates: everything but the bodies of functions."""
    yield node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        children = [*node.decorator_list, *node.args.defaults, *node.args.kw_defaults]
    elif isinstance(node, ast.Lambda):
        children = [*node.args.defaults, *node.args.kw_defaults]
    else:
        children = list(ast.iter_child_nodes(node))
    for child in filter(None, children):
        yield from _run_at_import(child)


def _imports_point_down(module: str) -> None:
    for name in _imports(module):
        top = name.split(".")[0]
        assert top not in ABOVE, f"{module} imports {name}"
        if top in MAY_IMPORT:
            package = "jaxops_command" if _within(module, *COMMAND) else module.split(".")[0]
            assert _within(name, *MAY_IMPORT[package]), f"{module} imports {name}"
    for importer, imported in MAY_NOT_IMPORT.items():
        if _within(module, importer):
            assert [name for name in _imports(module) if _within(name, imported)] == []


def _imports_need_no_extra(module: str) -> None:
    allowed = _third_party(module) | set(MAY_IMPORT) | sys.stdlib_module_names
    at_import = [name for node in _run_at_import(_tree(module)) for name in _imported(node)]
    assert {name.split(".")[0] for name in at_import} <= allowed


def _nothing_imports_the_modules_for_a_framework(module: str) -> None:
    assert [name for name in _imports(module) if _within(name, *FOR_FRAMEWORKS)] == []


def _imports_stand_at_the_top(module: str) -> None:
    at_import = set(_run_at_import(_tree(module)))
    late = [name for node in _nodes(module) if node not in at_import for name in _imported(node)]
    deferred = (*DEFERRED, "jaxops_command") if module in LIGHT else DEFERRED
    assert [name for name in late if not _within(name, *deferred)] == []


def _imports_are_not_guarded(module: str) -> None:
    handlers = [node.type for node in _nodes(module) if isinstance(node, ast.ExceptHandler) and node.type]
    caught = {name.id for handler in handlers for name in ast.walk(handler) if isinstance(name, ast.Name)}
    assert caught.isdisjoint({"ImportError", "ModuleNotFoundError"})


def _environment_is_not_read_at_import(module: str) -> None:
    reads = {"environ", "environb", "getenv", "getenvb"}
    for node in _run_at_import(_tree(module)):
        names = {node.attr} if isinstance(node, ast.Attribute) else {name.split(".")[-1] for name in _imported(node)}
        assert names.isdisjoint(reads), f"{module}:{node.lineno}"


def _private_jax_is_used_in_one_file(module: str) -> None:
    if module.split(".")[-1] == "_jax_private":
        return
    assert [name for name in _imports(module) if _within(name, "jax._src")] == []
    private = [node for node in _nodes(module) if isinstance(node, ast.Attribute) and node.attr == "_src"]
    assert [chain for chain in map(ast.unparse, private) if chain == "jax._src"] == []


RULES = (
    _imports_point_down,
    _imports_need_no_extra,
    _nothing_imports_the_modules_for_a_framework,
    _imports_stand_at_the_top,
    _imports_are_not_guarded,
    _environment_is_not_read_at_import,
    _private_jax_is_used_in_one_file,
)


@pytest.mark.parametrize("module", FILES)
def test_module_keeps_its_layer(module: str) -> None:
    for rule in RULES:
        rule(module)


@pytest.mark.parametrize(
    "module", [module for module in FILES if _within(module, REPLAY, "lowering.tpu_core", "lowering.emulation")]
)
def test_replays_and_emulation_decide_nothing(module: str) -> None:
    ours = [name for name in _imports(module) if name.split(".")[0] in MAY_IMPORT]
    assert [name for name in ours if _within(name, *DECIDE)] == []
    if _within(module, REPLAY, "lowering.tpu_core") and module not in COMPARE_REPLAYS:
        assert [name for name in ours if not _within(name, *A_REPLAY_MAY_IMPORT)] == []
        assert [name for name in ours if _within(name, *COMPARE_REPLAYS)] == []


@pytest.mark.long
@pytest.mark.parametrize("framework", sorted({*FOR_FRAMEWORKS.values()}))
def test_import_without_a_framework_names_it(framework: str) -> None:
    modules = [module for module, needed in FOR_FRAMEWORKS.items() if needed == framework]
    code = f"""
import importlib, sys
sys.modules["{framework}"] = None  # as if it were not installed
import jaxops
for module in {modules}:
    try:
        importlib.import_module(module)
    except ImportError as error:
        print(error.name)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {name.split(".")[0] for name in result.stdout.split()} == {framework}
    assert len(result.stdout.split()) == len(modules)


@pytest.mark.parametrize("module", sorted(LIGHT))
def test_options_and_help_need_only_typer(module: str) -> None:
    at_import = [name for node in _run_at_import(_tree(module)) for name in _imported(node)]
    allowed = {"typer", *sys.stdlib_module_names}
    assert [
        n for n in at_import if n.split(".")[0] not in allowed and not _within(n, *LIGHT - {"jaxops_command"})
    ] == []


@pytest.mark.parametrize("module", [module for module in FILES if _within(module, "lowering")])
def test_lowering_names_no_kernel(module: str) -> None:
    kernels = {other.split(".")[2] for other in FILES if re.fullmatch(r"pallas_kernels\.(tpu|gpu)\.\w+", other)}
    for node in _nodes(module):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Constant(value=str(name)):
                assert name not in kernels, f"{module}:{node.lineno}"


def test_import_loads_only_what_it_needs() -> None:
    code = f"import jaxops, sys; print(*sorted({NOT_LOADED} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize(
    "statements",
    [
        ("import jaxops.aclnn", "import jaxops.mcdnn"),
        ("import jaxops.mcdnn", "import jaxops", "import lowering", "from jaxops import aclnn, ema_adam"),
    ],
    ids=len,
)
def test_threads_can_import_at_once(statements: tuple[str, ...]) -> None:
    """CPython lets a thread use a package that another one is still importing, and refuses circles of waiting."""
    code = f"""
import sys, threading
statements = {statements}
barrier = threading.Barrier(len(statements))
sys.setswitchinterval(1e-5)
def run(statement):
    barrier.wait()
    exec(statement)
threads = [threading.Thread(target=run, args=(statement,)) for statement in statements]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
    for _ in range(2):
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert result.stderr == ""


@pytest.mark.long
def test_package_can_be_reloaded() -> None:
    """As notebooks do; also before anyone has asked for what is imported later."""
    code = "import importlib, jaxops; importlib.reload(jaxops); print(callable(jaxops.ema_adam))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["True"]

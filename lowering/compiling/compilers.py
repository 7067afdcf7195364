"""The compilers for absent chips: where each is installed, and how to install it in an environment of its own.

A compiler may share its caller's environment (an extra installs it there) or have its own in the user's cache folder,
which `install` makes. Its own is preferred: JAX loads every plugin in its environment, and the plugin of a compiler
complains in every process on a machine without the chip.
"""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping
from pathlib import Path

import jax
import platformdirs

from lowering.describe import show


@dataclasses.dataclass(frozen=True)
class _Compiler:
    """Requirements of a platform's compiler.

    Attributes:
      module: can be found if the compiler is installed.
      extra: the extra of this library that lists the packages.
      quiet: environment variables that keep JAX from complaining about the missing chip.
    """

    module: str
    extra: str
    quiet: dict[str, str]


_COMPILERS = {
    "tpu": _Compiler(
        "libtpu", "tpu-compile", {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-4"}
    ),
    "cuda": _Compiler("jax_cuda13_plugin", "cuda-compile", {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}),
}
PLATFORMS = tuple(_COMPILERS)
QUIET = {name: value for compiler in _COMPILERS.values() for name, value in compiler.quiet.items()}


class InstallError(RuntimeError):
    """A compiler's environment cannot be made."""


def interpreter(platform: str) -> str | None:
    """Returns the Python with a platform's compiler: in its own environment, else this one; None if neither has it."""
    own = _python(environment(platform))
    if own.exists():
        return str(own)
    return sys.executable if _is_here(platform) else None


def environment(platform: str) -> Path:
    """Returns the folder for the compiler's own environment, for this JAX and this Python, whether or not it exists."""
    _require_platform(platform)
    version = ".".join(map(str, sys.version_info[:2]))
    return platformdirs.user_cache_path("jaxops") / "compilers" / f"{platform}-jax{jax.__version__}-python{version}"


def command(platform: str) -> str:
    """Returns the command that installs the platform's compiler."""
    _require_platform(platform)
    return f"jaxops targets --install {platform}"


def install(platform: str) -> Path:
    """Makes the environment of a platform's compiler, with the versions that this JAX pins, unless it exists.

    Packages of the caller's environment are used from there, so only the compiler itself is downloaded.

    Returns:
      The folder of the environment.

    Raises:
      InstallError: if the packages cannot be installed; nothing is left behind.
    """
    folder = environment(platform)
    if _python(folder).exists():
        return folder
    requirements = _requirements(_COMPILERS[platform].extra)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Built next to its final place and moved when complete, so an environment found there is never a partial one.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{platform}-") as name:
        made = Path(name) / "environment"
        venv.create(made, with_pip=True)
        pip = [str(_python(made)), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar=off"]
        done = subprocess.run([*pip, *requirements], env=with_this_path(os.environ), capture_output=True, text=True)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise InstallError(f"pip cannot install {' '.join(requirements)}: {' '.join(errors[-1:]) or done.stderr}")
        with contextlib.suppress(OSError):  # another process was faster; its environment is as good
            made.rename(folder)
    return folder


def with_this_path(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns environment variables for a process that finds the same modules as this one."""
    return {**variables, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def keep_quiet_without_chips() -> None:
    """Keeps JAX from complaining about missing chips if their compilers share this environment.

    JAX reads these variables when it first needs a device. They stay as they are if the chip is there, or if the user
    has set them.
    """
    # JAX sets this variable on import if it finds no TPU.
    missing = {"tpu": os.environ.get("TPU_SKIP_MDS_QUERY") == "1", "cuda": not Path("/dev/nvidiactl").exists()}
    for platform, compiler in _COMPILERS.items():
        if missing[platform] and _is_here(platform):
            for name, value in compiler.quiet.items():
                os.environ.setdefault(name, value)


def _require_platform(platform: str) -> None:
    if not isinstance(platform, str) or platform not in _COMPILERS:
        raise ValueError(f"compilers: platform must be one of {', '.join(PLATFORMS)}; got {show(platform)}")


def _is_here(platform: str) -> bool:
    return importlib.util.find_spec(_COMPILERS[platform].module) is not None


def _python(environment: Path) -> Path:
    return environment / "bin" / "python"


def _requirements(extra: str) -> list[str]:
    """Returns the packages of an extra of this library, JAX's own pinned to the running version."""
    try:
        listed = importlib.metadata.requires("jaxops") or []
    except importlib.metadata.PackageNotFoundError:
        raise InstallError("jaxops must itself be installed by pip, which records the packages of its extras") from None
    names = [line.partition(";")[0].strip() for line in listed if re.search(rf"extra == ['\"]{extra}['\"]", line)]
    return [f"{name}=={jax.__version__}" if name.startswith("jax[") else name for name in names]

"""Brings operators to a backend: targets, selection, registration, explanation, compilation, export and tuning."""

from lowering import verification as _verification  # noqa: F401  # lets operators verify kernels
from lowering.compiling import compilers as compilers
from lowering.compiling.compile import CompileError as CompileError
from lowering.compiling.compile import availability as availability
from lowering.compiling.compile import compile as compile
from lowering.compiling.report import CompiledReport as CompiledReport
from lowering.emulation.api import emulate as emulate
from lowering.emulation.faults import EmulationError as EmulationError
from lowering.emulation.report import Emulation as Emulation
from lowering.errors import ArtifactError as ArtifactError
from lowering.errors import NotSupportedError as NotSupportedError
from lowering.errors import ScheduleError as ScheduleError
from lowering.errors import TuningError as TuningError
from lowering.explain import Explanation as Explanation
from lowering.explain import explain as explain
from lowering.export import Artifact as Artifact
from lowering.export import export as export
from lowering.export import load as load
from lowering.measuring.tune import tune as tune
from lowering.operators import note as note
from lowering.planning.api import plan as plan
from lowering.planning.cases import PlanError as PlanError
from lowering.planning.report import Plan as Plan
from lowering.register import add_kernel as add_kernel
from lowering.register import register as register
from lowering.register import remove_kernel as remove_kernel
from lowering.rewriting.api import rewrite as rewrite
from lowering.rewriting.report import Rewrites as Rewrites
from lowering.schedule.compare import Comparison as Comparison
from lowering.schedule.compare import compare as compare
from lowering.schedule.report import Schedule as Schedule
from lowering.select import current_selection as current_selection
from lowering.select import use as use
from lowering.select import using as using
from lowering.targets import targets as targets
from lowering.tuning import TuningResult as TuningResult
from pallas_kernels.hardware import Hardware as Target

__all__ = [
    "Artifact",
    "ArtifactError",
    "Comparison",
    "CompileError",
    "CompiledReport",
    "Emulation",
    "EmulationError",
    "Explanation",
    "NotSupportedError",
    "Plan",
    "PlanError",
    "Rewrites",
    "Schedule",
    "ScheduleError",
    "Target",
    "TuningError",
    "TuningResult",
    "add_kernel",
    "availability",
    "compare",
    "compile",
    "compilers",
    "current_selection",
    "emulate",
    "explain",
    "export",
    "load",
    "note",
    "plan",
    "register",
    "remove_kernel",
    "rewrite",
    "targets",
    "tune",
    "use",
    "using",
]

# JAX reads the environment when it first needs a device, so this has to come before.
compilers.keep_quiet_without_chips()

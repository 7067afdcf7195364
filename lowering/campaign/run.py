"""A campaign: every case in a process of its own, stage by stage, and each result kept as it comes."""

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.progress import TaskID

from lowering import measurements, tuning_store
from lowering.campaign.channel import verdict_record
from lowering.campaign.process import PATIENCE, Ending, converse
from lowering.campaign.report import Campaign
from lowering.campaign.suite import Case, load
from lowering.describe import show
from lowering.errors import TuningError
from lowering.measurements import HANGS, REFERENCE, WRONG, Key, Measurement, config_items
from lowering.measuring import timing

STAGES = ("verify", "time", "tune")
# A recorded loop replays its launches; what a kernel was told of its operands' places must still hold then.
_WITHOUT_RECORDING = "--xla_gpu_enable_command_buffer="
# The interpreter of GPU kernels runs programs within programs, which wait for each other where threads are few.
_MORE_THREADS = "--xla_force_host_platform_device_count=8"
_REHEARSED_LIMIT_SECONDS = 300.0
UNFINISHED = "unfinished"  # for this campaign; the next one tries again
_SPOILING = ("wrong", "fails", "hangs", UNFINISHED)
# Autotuning takes minutes of what a campaign has, and cuBLAS's products are as fast.
_WITHOUT_AUTOTUNING = "--xla_gpu_enable_triton_gemm=false"


@dataclasses.dataclass(frozen=True)
class _Task:
    """One stage of the cases that share a process, under further flags for XLA."""

    stage: str
    cases: tuple[str, ...]
    flags: str = ""

    def has(self, record: Mapping[str, Any]) -> bool:
        """Tells whether a record comes from this task."""
        return (record.get("stage"), record.get("flags")) == (self.stage, self.flags) and record["case"] in self.cases


def run(
    suite: str,
    *,
    stages: Sequence[str] = STAGES,
    only: Collection[str] = (),
    budget_seconds: float = 1800.0,
    limit_seconds: float = 60.0,
    folder: Path | None = None,
    rehearse: bool = False,
    again: bool = False,
    progress: bool | None = None,
) -> Campaign:
    """Verifies, times and tunes the cases of a suite on the device of this machine.

    This process leaves the device alone, because a TPU serves one process at a time.

    Args:
      suite: "module:NAME" of a sequence of `Case`.
      stages: of "verify", "time" and "tune", in this order.
      only: names of cases; all if empty.
      budget_seconds: when to stop.
      limit_seconds: how long a kernel may run before it counts as hanging; compiling it may take five times as long.
      folder: where results are kept, one file for each kind of device; by default, where "auto" finds them.
      rehearse: whether to interpret kernels on the CPU at small sizes. What a rehearsal finds is kept apart.
      again: whether to forget first what was found before.
      progress: whether to show a progress bar on stderr; by default, if stderr is a terminal.

    Raises:
      TuningError: if a stage or case is unknown, or the folder cannot be written to; raised before anything runs.
    """
    cases = _chosen(load(suite), only)
    _require_stages(stages)
    return _Run(suite, budget_seconds, limit_seconds, folder, rehearse).through(cases, stages, again, progress)


def _chosen(cases: Sequence[Case], only: Collection[str]) -> list[Case]:
    names = [case.name for case in cases]
    for name in only:
        if name not in names:
            raise TuningError(f"tune: case must be one of {', '.join(names)}; got {show(name)}")
    return [case for case in cases if not only or case.name in only]


def _require_stages(stages: Sequence[str]) -> None:
    for stage in stages:
        if stage not in STAGES:
            raise TuningError(f"tune: stage must be one of {', '.join(STAGES)}; got {show(stage)}")


class _Run:
    """One campaign while it runs."""

    def __init__(
        self, suite: str, budget_seconds: float, limit_seconds: float, folder: Path | None, rehearse: bool
    ) -> None:
        self._suite = suite
        self._deadline = timing.clock() + budget_seconds
        # An interpreter does not hang. It may take minutes, where other programs take the processor.
        self._limit_seconds = max(limit_seconds, _REHEARSED_LIMIT_SECONDS) if rehearse else limit_seconds
        self._rehearse = rehearse
        self._folder = (folder or tuning_store.folder()) / "rehearsed" if rehearse else folder or tuning_store.folder()
        self._records: list[dict[str, Any]] = []
        self._path = Path()
        self._device: dict[str, Any] = {}
        self._found_before = 0
        self._bar = timing.progress_bar(0, is_shown=False)

    def through(self, cases: Sequence[Case], stages: Sequence[str], again: bool, progress: bool | None) -> Campaign:
        """Takes every case through every stage, as far as time allows."""
        tuning_store.require_writable(self._folder)
        self._device = self._probe()
        self._path = tuning_store.file_of(self._device["target"], self._folder)
        if again:
            tuning_store.forget(self._path)
        self._records += tuning_store.read(self._path).records
        self._found_before = len(self._records)
        tasks = [task for stage in stages for task in self._tasks(stage, cases)]
        with timing.progress_bar(sum(len(task.cases) for task in tasks), progress) as self._bar:
            stopped = timing.why_stopped(lambda: all(map(self._finish, tasks)))
        tuning_store.reread()
        return Campaign(self._device["target"], tuple(filter(self._is_of_these_versions, self._records)), stopped)

    def _tasks(self, stage: str, cases: Sequence[Case]) -> list[_Task]:
        """Makes a task for each case. Interpreters neither hang nor spoil a device, but start slowly: all share one."""
        if self._rehearse:
            return [_Task(stage, tuple(case.name for case in cases))]
        recorded = stage == "verify" and self._device["target"].startswith("cuda")
        flags = {case.name: ("", _WITHOUT_RECORDING) if recorded and case.loops else ("",) for case in cases}
        return [_Task(stage, (name,), each) for name in flags for each in flags[name]]

    def _probe(self) -> dict[str, Any]:
        """Asks a process for the device's name and the versions, and lets it end."""
        found: list[dict[str, Any]] = []
        ending = self._ask(_Task("probe", ()), found.append)
        if not found:
            raise TuningError(f"tune: the device must answer a new process; got {self._reason(ending)}")
        return found[0]

    def _finish(self, task: _Task) -> bool:
        """Finishes a task, in as many processes as its kernels bring down; returns whether time was enough."""
        done = self._done(task)
        self._bar.advance(TaskID(0), len(done))
        while done != set(task.cases):
            if timing.clock() >= self._deadline:
                return False
            self._bar.update(TaskID(0), description=f"{task.stage} {', '.join(task.cases)[:60]}")
            ending = self._ask(task, lambda record: self._keep(task, record))
            if ending.how == "budget":
                return False
            if ending.how in ("hangs", "died"):
                is_kernel = ending.begun is not None and ending.begun["kernel"] != REFERENCE
                failed = {"done": True, "outcome": "failed", "reason": self._reason(ending)}
                case = ending.case or next(name for name in task.cases if name not in done)
                self._keep(task, {"case": case, **(self._blamed(ending) if is_kernel else failed)})
            done = self._done(task)
        return True

    def _done(self, task: _Task) -> set[str]:
        """Returns the cases of a task that need nothing more; what failed in an earlier campaign is tried again."""
        mine = filter(task.has, filter(self._is_of_these_versions, self._records))
        return {
            record["case"]
            for record in mine
            if record.get("done") and (not record.get("outcome") or record in self._records[self._found_before :])
        }

    def _reason(self, ending: Ending) -> str:
        if ending.how == "hangs" and ending.ran:
            return f"{HANGS}no result within {self._limit_seconds:g} seconds"
        if ending.how == "hangs":
            return f"nothing was heard for {PATIENCE * self._limit_seconds:g} seconds"
        return f"its process ended: {ending.last_words}"

    def _blamed(self, ending: Ending) -> dict[str, Any]:
        """Returns the verdict on the kernel that a process ran when it hung or died: one that lasts, if it ran."""
        begun = ending.begun
        assert begun is not None
        attributes = (begun["operator"], tuple(begun["operands"]), begun["attributes"])
        key = Key(self._device["target"], *attributes, tuple(sorted(self._device["versions"].items())))
        way = Measurement(begun["kernel"], config_items(begun["config"]))
        if not ending.ran:  # The compiler's fault, or it was only slow.
            return verdict_record(key, way, UNFINISHED, f"while it was compiled, {self._reason(ending)}")
        if ending.how == "hangs":
            return verdict_record(key, way, "hangs", self._reason(ending))
        return verdict_record(key, way, "wrong", f"{WRONG}{self._reason(ending)}")

    def _ask(self, task: _Task, on_record: Callable[[dict[str, Any]], None]) -> Ending:
        mine = [
            record
            for number, record in enumerate(self._records)
            if task.has(record)
            and self._is_of_these_versions(record)
            and (record.get("outcome") != UNFINISHED or number >= self._found_before)
        ]
        faults = measurements.faults(tuning_store.Found(tuple(self._records)).entries, self._device.get("target", ""))
        for record in mine:
            if record.get("outcome") == UNFINISHED:
                faults.setdefault(record["operator"], {}).setdefault(record["kernel"], record["reason"])
        done = self._done(task)
        request = {
            "stage": task.stage,
            "cases": [name for name in task.cases if name not in done],
            "suite": self._suite,
            "rehearse": self._rehearse,
            "decided": [f"{record['case']}: {record['step']}" for record in mine if "step" in record],
            "spoilt": [[each["operator"], each["kernel"]] for each in mine if each.get("outcome") in _SPOILING],
            "faults": faults,
            "only_loops": task.flags == _WITHOUT_RECORDING,
            "seconds": self._deadline - timing.clock(),
        }
        return converse(
            request,
            self._environment(task.flags),
            on_record,
            limit_seconds=self._limit_seconds,
            deadline=self._deadline,
        )

    def _environment(self, flags: str) -> dict[str, str]:
        asked = os.environ.get("JAX_PLATFORMS", "")
        platforms = "cpu" if self._rehearse else f"{asked},cpu" if asked and "cpu" not in asked else asked
        on_gpu = self._device.get("target", "").startswith("cuda")
        ours = (_MORE_THREADS,) if self._rehearse else (_WITHOUT_AUTOTUNING,) if on_gpu else ()
        return {
            # The truth is computed on the host, so JAX needs the processor beside the device.
            **({"JAX_PLATFORMS": platforms} if platforms else {}),
            "XLA_FLAGS": " ".join(filter(None, (*ours, os.environ.get("XLA_FLAGS", ""), flags))),
            "XLA_PYTHON_CLIENT_PREALLOCATE": os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "false"),
            **({"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} if self._rehearse else {}),
        }

    def _keep(self, task: _Task, record: dict[str, Any]) -> None:
        """Adds a record to the file, with what it is of."""
        labelled = {"stage": task.stage, "flags": task.flags, "versions": self._device["versions"], **record}
        self._records.append(labelled)
        tuning_store.append(self._path, [labelled])
        if record.get("done"):
            self._bar.advance(TaskID(0))

    def _is_of_these_versions(self, record: Mapping[str, Any]) -> bool:
        return record.get("versions") == self._device.get("versions")

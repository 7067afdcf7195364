"""Options that the subcommands of `jaxops` share, and refusals of what can be told from the words alone."""

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

# What the library says too, but not without JAX. `tests/lowering/test_command.py` compares them.
CHIPS = (
    "cpu",
    "tpu-v5e",
    "tpu-v5p",
    "tpu-v6e",
    "tpu-v7x",
    "cuda-h100",
    "cuda-h200",
    "cuda-b200",
    "cuda-a100",
)
PLATFORMS = ("cpu", "cuda", "tpu")
EMULATED = ("tpu-v5e", "tpu-v6e", "tpu-v7x")
COMPILERS = ("tpu", "cuda")
STAGES = ("verify", "time", "tune")
PROCESS_COUNTS = (1, 2, 4)
STEPS, SEED = 150, 0

IMPLEMENTATIONS = ("auto", "reference", "pallas")
# By their own names, and as jaxprs print them.
DTYPES = {
    "bool": "bool",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    **{f"{kind}{bits}": f"float{bits}" for kind in ("float", "f") for bits in (16, 32, 64)},
    **{f"{kind}{bits}": f"int{bits}" for kind in ("int", "i") for bits in (8, 16, 32, 64)},
    **{f"{kind}{bits}": f"uint{bits}" for kind in ("uint", "u") for bits in (8, 16, 32, 64)},
    **{f"{kind}{bits}": f"complex{bits}" for kind in ("complex", "c") for bits in (64, 128)},
}
_TOPOLOGY = re.compile(r"[1-9]\d{0,5}(x[1-9]\d{0,5}){0,2}")
_MOST_SHOWN = 160  # characters of a word in a message; a longer one is cut in the middle
_LAST_SHOWN = 40
_LEAST_LIKENESS = 0.7
_NUMBERED = re.compile(r"[a-z]*\d+[a-z]*")

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Function = Annotated[str, typer.Argument(metavar="FILE.py:FUNCTION", help="The function to trace.")]
Implementation = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME or OPERATOR=NAME",
        help="How operators are implemented, auto, reference or pallas; and exceptions, such as dropout=reference. "
        "With commas between, or once for each.",
    ),
]
Arguments = Annotated[
    list[str] | None,
    typer.Option(
        metavar="DTYPE[SHAPE]", help="An argument of the function, such as float32[128,64] or i32[]; once for each."
    ),
]
TripCounts = Annotated[
    list[str] | None, typer.Option(help="For schedules: NAME=NUMBER, how often what data decides is run.")
]
Scalars = Annotated[
    list[str] | None,
    typer.Option(
        help="For schedules: KERNEL:POSITION=1,2,3 or =FILE.npy, what an operand holds, one number all of it."
    ),
]
Rewrite = Annotated[
    bool, typer.Option("--rewrite", help="First replace plain JAX by operators, as `lowering.rewrite` does.")
]
Tuned = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        readable=True,
        help="A file that `jaxops tune` has written, by which to choose implementations.",
    ),
]


@dataclasses.dataclass(frozen=True)
class ScheduleFiles:
    """Files of `jaxops compile --schedule`.

    Attributes:
      save: to write the schedule to.
      against: a saved schedule to compare with.
      slower_than: by how many percent the program or a kernel may take longer than there; None for any number.
      perfetto: to write a trace to.
    """

    save: Path | None = None
    against: Path | None = None
    slower_than: float | None = None
    perfetto: Path | None = None


class CommandError(Exception):
    """The reason why a command cannot do what was asked, in one sentence."""


def shortened(text: str) -> str:
    """Returns a text on one line; cut in its middle if it is long."""
    text = " ".join(text.split())
    is_long = len(text) > _MOST_SHOWN
    return f"{text[: _MOST_SHOWN - _LAST_SHOWN]}...{text[-_LAST_SHOWN:]}" if is_long else text


def require(condition: bool, subject: str, rule: str, got: str, asked: str = "") -> None:
    """Refuses an option with `"<subject> must <rule>; got <got><asked>"` unless the condition holds."""
    if not condition:
        raise CommandError(f"{subject} must {rule}; got {shortened(got)}{asked}")


def require_one_of(names: Iterable[Any], subject: str, got: Any) -> None:
    """Refuses what is not one of these names."""
    names = tuple(names)
    known = [*map(str, names)]
    require(got in names, subject, f"be one of {', '.join(known)}", repr(got), meant(str(got), known))


def meant(word: str, known: Sequence[str]) -> str:
    """Asks, after a comma, whether the known names nearest to an unknown one were meant; empty if none is near."""
    # As `lowering.describe.meant` does, whose import takes JAX's seconds before a mistyped option is refused.
    word = word.lower() if len(word) <= _MOST_SHOWN else ""
    likeness = {one: _likeness(word, one.lower()) for one in known}
    best = max(likeness.values(), default=0.0)
    near = [one for one, value in likeness.items() if value == best]
    return f", did you mean {' or '.join(near)}?" if best >= _LEAST_LIKENESS else ""


def _likeness(word: str, name: str) -> float:
    """Returns how alike two names are, up to 1. Another number makes another name, as of chips."""
    if word and name.endswith(f"-{word}"):
        return 1.0
    numbers = [_NUMBERED.findall(each) for each in (word, name)]
    is_same = len(numbers[0]) == len(numbers[1]) and all(a in b or b in a for a, b in zip(*numbers, strict=True))
    return difflib.SequenceMatcher(None, name, word).ratio() if is_same else 0.0


def file_and_name(location: str) -> tuple[Path, str]:
    """Parses FILE.py:FUNCTION; refuses a file that does not exist."""
    file, separator, name = location.rpartition(":")
    if not separator or not name:
        rule = f"name a function after the file, as in {shortened(location.removesuffix(':'))}:step"
        require(False, "FILE.py:FUNCTION", rule, repr(location))
    # Unlike `Path.is_file()`, which raises for names that are too long.
    is_file = file.endswith(".py") and os.path.isfile(file)
    require(is_file, "FILE.py:FUNCTION", "name an existing Python file", repr(location))
    return Path(file), name


def dtype_and_shape(argument: str) -> tuple[str, tuple[int, ...]]:
    """Parses DTYPE[SHAPE]."""
    match = re.fullmatch(r"(\w+)\[((?:\d+(?:,\d+)*)?)\]", argument)
    dtype, sizes = match.groups() if match else ("", "")
    require(match is not None, "--arg", "be DTYPE[SHAPE], such as float32[128,64] or i32[]", repr(argument))
    require(
        dtype in DTYPES, "--arg", "have a dtype such as float32, bf16 or i32", repr(argument), meant(dtype, [*DTYPES])
    )
    shape = tuple(int(size) for size in sizes.split(",") if size)
    require(math.prod(shape) < 2**63, "--arg", "have fewer than 2**63 elements", repr(argument))
    return DTYPES[dtype], shape


def require_location(location: str, arguments: Sequence[str] | None) -> None:
    """Refuses a function or arguments that cannot be read."""
    file_and_name(location)
    for argument in arguments or ():
        dtype_and_shape(argument)


def require_target(target: str | None) -> None:
    """Refuses what is neither a chip or a platform nor a slice of chips with its topology."""
    if target is None:
        return
    name, _, topology = target.partition(":")
    require_one_of(dict.fromkeys((*CHIPS, *PLATFORMS)), "target", name)
    is_topology = not topology or _TOPOLOGY.fullmatch(topology) is not None
    require(is_topology, "target", "have a topology such as 16x16 or 8", repr(topology))


def implementations_of(given: Sequence[str] | None) -> tuple[list[str], dict[str, str]]:
    """Returns the implementations that --implementation names, and those of single operators by OPERATOR=NAME."""
    names, by_operator = [], {}
    for word in (word.strip() for text in given or () for word in text.split(",")):
        operator, equals, name = word.rpartition("=")
        rule = f"be one of {', '.join(IMPLEMENTATIONS)}, or an exception such as dropout=reference"
        is_known = name in IMPLEMENTATIONS and bool(operator) == bool(equals)
        require(is_known, "--implementation", rule, repr(word), "" if is_known else meant(name, IMPLEMENTATIONS))
        if operator:
            by_operator[operator] = name
        else:
            names.append(name)
    return names, by_operator


def one_implementation_of(given: Sequence[str] | None) -> tuple[str, dict[str, str]]:
    """Returns a single implementation, by default "auto", and those of single operators."""
    names, by_operator = implementations_of(given)
    rule = "name one implementation, and exceptions such as dropout=reference"
    require(len(names) <= 1, "--implementation", rule, repr(",".join(names)))
    return (*names, "auto")[0], by_operator


def trip_counts_of(given: Sequence[str]) -> dict[str, float]:
    """Parses NAME=NUMBER options into a dictionary."""
    counts = {}
    for text in given:
        name, _, number = text.rpartition("=")
        is_number = re.fullmatch(r"\d+(\.\d*)?", number) is not None
        require(bool(name) and is_number, "--trip-count", "be NAME=NUMBER", repr(text))
        counts[name] = float(number)
    return counts


def scalar_words(text: str) -> tuple[str, int, str]:
    """Parses KERNEL:POSITION=1,2,3 or KERNEL:POSITION=FILE.npy into kernel, position, and numbers or a file."""
    found = re.fullmatch(r"(.+):(\d+)=(.+)", text)
    require(found is not None, "--scalars", "be KERNEL:POSITION=1,2,3 or KERNEL:POSITION=FILE.npy", repr(text))
    assert found is not None
    return found[1], int(found[2]), found[3]


def require_folder(path: Path) -> None:
    """Creates the folder now, because a run that cannot save its results is useless."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        writable = os.access(path, os.W_OK)
    except OSError:
        writable = False
    require(writable, "--output", "be a folder that can be written to", repr(str(path)))


def schedule_files(
    schedule: bool, save: Path | None, against: Path | None, slower_than: str | None, perfetto: Path | None
) -> ScheduleFiles:
    """Checks the files of --schedule, and parses the percentage."""
    given = {"--save": save, "--against": against, "--slower-than": slower_than, "--perfetto": perfetto}
    for option, value in given.items():
        require(schedule or value is None, option, "be given with --schedule", repr(str(value)))
    require_file(save, "--save")
    require_file(perfetto, "--perfetto")
    if slower_than is None:
        return ScheduleFiles(save, against, None, perfetto)
    is_percentage = re.fullmatch(r"\d{1,9}(\.\d*)?%?", slower_than) is not None
    require(is_percentage, "--slower-than", "be a percentage, such as 3%", repr(slower_than))
    require(against is not None, "--slower-than", "be given with --against", repr(slower_than))
    return ScheduleFiles(save, against, float(slower_than.rstrip("%")), perfetto)


def require_file(path: Path | None, option: str = "--output") -> None:
    """Refuses a file that cannot be written, before any work is done."""
    if path is not None:
        writable = path.parent.is_dir() and os.access(path.parent, os.W_OK) and not path.is_dir()
        require(writable, option, "be a file that can be written", repr(str(path)))

"""Compares the library with what was recorded of it: `python -m benchmarks.nets check`, or `record` to write that.

Refactorings are held to it: values and gradients, memory, explanations, programs, replayed times. A change that is
meant is recorded again, in the commit that makes it.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

# JAX reads the environment when it starts. What was tuned on this machine does not count, and no chip is asked.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAXOPS_TUNED"] = os.path.join(os.path.dirname(__file__), "no-results")
sys.path.extend(str(path) for path in Path(__file__).parents[2].glob("tests/**/"))
sys.path.append(str(Path(__file__).parents[1]))

import jax

from benchmarks.nets import compiled, programs, rooms, values
from benchmarks.nets.net import RECORDED, Net, OffError, at_most, equal, equal_texts

NETS = {
    "values": Net(values.cases, values.compare, "values.npz"),
    "memory": Net(compiled.temporaries, at_most(0.02), "memory.json"),
    "explain": Net(programs.explanations, equal_texts, "explain.txt"),
    "lowered": Net(programs.digests, equal, "lowered.json"),
    "peaks": Net(compiled.peaks, at_most(0.02), "peaks.json"),
    "replays": Net(compiled.replays, at_most(0.01), "replays.json"),
    "rooms": Net(rooms.counts, equal, "rooms.json", must_agree=False),
}
VERSIONS = RECORDED / "versions.json"


def result_of(find):
    """What a case finds, or its error as a text."""
    try:
        return find()
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]


def record(name: str, net: Net, wanted: str) -> bool:
    """Writes what a net finds; keeps what was recorded of cases that are not wanted and that there are still."""
    results = net.read() if wanted else {}
    results = {case: find() if wanted in case else results[case] for case, find in net.cases()}
    net.write(results)
    print(f"{name}: {len(results)} cases in {net.file}, {(RECORDED / net.file).stat().st_size:,} bytes", flush=True)
    return True


def check(name: str, net: Net, wanted: str) -> bool:
    """Compares what a net finds with what was recorded; returns whether all is well."""
    start, recorded, count, off, remarks = time.monotonic(), net.read(), 0, [], []
    left = {case for case in recorded if wanted in case}
    for case, find in net.cases():
        if wanted not in case:
            continue
        left.discard(case)
        count += 1
        found = result_of(find)
        try:
            if case not in recorded:
                raise OffError(f"not recorded, found {found if isinstance(found, int | float) else 'a new case'}")
            remark = net.compare(recorded[case], found)
            remarks += [] if remark is None else [f"{name}: {case}: {remark}"]
        except OffError as error:
            off.append(f"{name}: {case}: {error}")
    off += [f"{name}: {case}: recorded, found no such case" for case in sorted(left)]
    for line in (*remarks, *off):
        print(line)
    state = (
        f"{len(off)} of {count} cases {'are off' if net.must_agree else 'differ'}" if off else f"{count} cases agree"
    )
    print(f"{name}: {state}, {time.monotonic() - start:.0f} s", flush=True)
    return not off or not net.must_agree


def main() -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.nets", description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=("check", "record"))
    parser.add_argument("--only", nargs="+", choices=NETS, default=[*NETS], help="these nets")
    parser.add_argument("--case", default="", help="cases whose names hold this")
    parser.add_argument("--show", type=Path, help="a folder for the lowered texts, to compare two of them")
    options = parser.parse_args()
    programs.SHOWN_IN = options.show
    made_with = json.loads(VERSIONS.read_text())["jax"] if VERSIONS.exists() else None
    is_whole = options.action == "record" and options.only == [*NETS] and not options.case
    if made_with not in (jax.__version__, None) and not is_whole:
        print(f"nets: JAX must be {made_with}, with which the nets were recorded; got {jax.__version__}")
        return 1
    if options.action == "record":
        RECORDED.mkdir(exist_ok=True)
        VERSIONS.write_text(json.dumps({"jax": jax.__version__}) + "\n")
    act = record if options.action == "record" else check
    are_well = [act(name, NETS[name], options.case) for name in options.only]
    return int(not all(are_well))


if __name__ == "__main__":
    sys.exit(main())

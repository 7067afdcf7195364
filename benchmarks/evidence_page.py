"""Writes docs/what-runs-where.md from the evidence that ships, for `evidence.py --page`."""

import json
from pathlib import Path

from evidence_cases import OPERATORS

from lowering import evidence
from lowering.targets import TARGETS

_ROOT = Path(__file__).parents[1]
PAGE = """# What runs where

On CPUs every operator runs its forms in jnp, which XLA compiles. On NVIDIA GPUs kernels are opt-in until `jaxops tune`
has measured them. On TPUs kernels are the default at the sizes that this page counts, and at sizes between them:

* Cases of a kernel are alike if dtypes, options and the way in which arrays are stored agree. Their sizes may differ.
* At each size of a grid, and at drawn sizes that the grid does not decide, the kernel and the program that XLA makes
  without it are compiled for the chip, and their schedules replayed ([how far to trust that](schedule.md)). A kernel is
  better if it takes 0.85 of the time or less, or as long with a fifth less memory.
* A small case of each kind is executed as it is compiled ([how](emulation.md)) and compared with float64.
* Other sizes must lie between known ones, at most a factor of 4 from one of them in each. The known sizes around them
  decide, and all must agree. Beyond the known sizes there is no evidence, and XLA's program runs.

`lowering.explain` says for your operands which evidence decided, and `jaxops ops --target tpu-v5e` lists every kind.
On a chip that is here, a kernel is verified before its first use, and what was measured there comes first: [on your
device](on-your-device.md). Where a program is lowered for TPUs of any kind, all chips below must agree. On automatic
and explicit meshes kernels see parts of arrays, whose sizes are not known, and are opt-in.

In the table: at how many of the known sizes the kernel is taken; its time there by that of XLA's program, the smallest
and the largest at all of them.
"""


def drawn(path: Path) -> str:
    """Returns what the results of a draw say."""
    rows = [row for case in json.loads(path.read_text())["cases"] for row in case["candidates"].values()]
    known = [row for row in rows if "time" in row]
    faster = [row["taken"] for row in known if row["time"] < 0.8]
    slower = [row["taken"] for row in known if row["time"] > 1.02]
    longest = max(row["time"] for row in known if row["taken"])
    return (
        f"{len(known)} cases. In {len(faster)} the kernel needs less than 0.8 of the time of XLA's program, and it is "
        f"the default in {sum(faster)} of these. In {len(slower)} it needs more than 1.02, and it is the default in "
        f"{sum(slower) or 'none'} of these. Where it is the default, it needs {longest:.2f} at most"
    )


def page() -> str:
    """Returns the evidence that ships as a page of documentation."""
    shipped = {target: grid for target in TARGETS if (grid := evidence.shipped(target)) is not None}
    lines = ["", f"| operator | {' | '.join(shipped)} |", f"| --- |{' --- |' * len(shipped)}"]
    for operator in sorted(OPERATORS):
        cells = []
        for target in shipped:
            found = [one for one in evidence.summaries(target) if one.operator == operator]
            count = f"{sum(one.taken for one in found)} of {sum(one.known for one in found)}"
            times = [time for one in found for time in (one.least, one.most)]
            cells.append(f"{count}; {min(times):.2f} to {max(times):.2f}" if found else "-")
        lines.append(f"| `{operator}` | {' | '.join(cells)} |")
    made = "; ".join(
        f"{target} on {grid.header['date']} with JAX {grid.header['versions']['jax']}"
        for target, grid in shipped.items()
    )
    lines += ["", "Draws of sizes that these files do not hold show what the rule is worth, by replays again:", ""]
    for target in shipped:
        name = f"benchmarks/results/evidence_draws_{target.removeprefix('tpu-')}.json"
        if (_ROOT / name).is_file():
            lines.append(f"* {target}: {drawn(_ROOT / name)} (`{name}`).")
    lines += [
        "",
        f"Written by [`benchmarks/evidence.py`](../benchmarks/evidence.py) from `lowering/tuned/`: {made}.",
        "",
    ]
    return PAGE + "\n".join(lines)

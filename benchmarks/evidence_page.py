"""Writes docs/what-runs-where.md from the evidence that ships, for `evidence.py --page`."""

import json
from pathlib import Path

from evidence_cases import OPERATORS

from lowering import evidence
from lowering.targets import TARGETS
from pallas_kernels.kernel import Kind

_ROOT = Path(__file__).parents[1]
PAGE = """# What runs where

| on | an operator runs |
| --- | --- |
| a CPU | `jax.numpy`, compiled by XLA |
| an NVIDIA GPU | the same; a kernel once [`jaxops tune`](on-your-device.md) has measured it |
| an H100 | a kernel at the sizes where measurements favour it; elsewhere `jax.numpy` |
| a TPU | a kernel at the sizes where replays favour it; elsewhere `jax.numpy` |

`lowering.explain` says which evidence decided for your operands. `jaxops ops --target tpu-v5e` counts what is
known, and `jaxops ops softmax --target tpu-v5e` lists that of an operator.

## The evidence for the H100

All kernels ran on one (80 GB HBM3): against float64 at several sizes and in all configurations, over memory that holds
NaN, three times bit by bit; and fifty times where blocks of a cluster share memory. Then each was timed beside XLA's
program, in turn, on operands that no cache holds. A kernel is the default where it took 0.85 of the time or less, as
XLA may fuse more with its own program than with a kernel; for sizes near these, see below. With other versions of JAX
than were measured, it is verified on your GPU before its first use, and so are options that were timed, and compared
with float64 only together with others. Batch norm's kernels stay opt-in, as XLA fuses what
follows with its own; those of softmax over other axes than the last were not timed alone.
`benchmarks/results/gpu_cuda-h100.json` has everything, also what lost.

Of the loss, these options have been timed there, in bfloat16:

| options | gradients, on an H100 | value and log-probabilities |
| --- | --- | --- |
| none, `z_loss`, `class_weight`, `row_weight` | a kernel where it is faster | a kernel where it is faster |
| entropies, `return_aux` | no kernel | a kernel where it is faster |
| `softcap` | opt-in | a kernel near the sizes that were timed |
| a temperature | no kernel | a kernel near the sizes that were timed |
| `bias`, `label_smoothing` | opt-in | opt-in |
| `margin`, probabilities as labels, float32 | no kernel | no kernel |

Opt-in means `jaxops.use("pallas")`: the kernel is as right, and nobody has timed it with these options.

## The evidence for TPUs

Nobody has timed these kernels on a TPU yet. This is how a kernel becomes the default:

* **Replays.** The kernel and the program that XLA makes without it are both compiled for the chip, at many sizes. Their
  schedules are replayed ([how far to trust that](schedule.md)). The kernel is better if it takes 0.85 of the time or
  less, or as long with a fifth less memory. For v5e and v6e this was done at the clock and the bandwidth of the data
  sheet: at those that these chips reach, the ratios of the programs on [the page of replays](replays.md) differ by 0.01
  at most, but for two losses whose XLA form has changed since.
* **Execution.** A small case of each kind is executed as it is compiled ([how](emulation.md)), and compared with
  float64.
* **Sizes near known ones.** One known case must be within a factor of 6 in each size. At the two nearest the kernel
  must be better, and at the nearest in each direction not slower. Elsewhere XLA's program runs. Dtypes, options and
  layouts must be the same, and so must what XLA does around the kernel or without it, where that depends on sizes:
  whether it copies arrays, and keeps them in VMEM. One better size among eight or more counts as the replay's error.

A kernel is verified on your chip before its first use. What you have measured there comes first: [on your
device](on-your-device.md). A program that is lowered for TPUs of any kind needs all chips below to agree. On automatic
and explicit meshes kernels are opt-in, because the sizes of a device's part are not known.

The table shows at how many of the replayed sizes, or of those measured on the H100, the kernel is the default, and its
time by that of XLA's program: the smallest and the largest ratio at all of these sizes. A training loss is
`linear_cross_entropy_sum_with_gradients`; `linear_cross_entropy` is its value alone, and log-probabilities.
"""


def judged(path: Path) -> list[tuple[float, bool]]:
    """Returns the time of each kernel that was drawn, and what "auto" concludes from the evidence as it ships now."""
    found = []
    for case in json.loads(path.read_text())["cases"]:
        operator, target = case["name"].split()[0], case["name"].split()[-1]
        for kernel, row in case["candidates"].items():
            if "time" in row:
                kind = Kind(row["kind"], tuple(row["sizes"]))
                verdict = evidence.shipped_verdict(operator, kernel, target, kind)
                found.append((row["time"], verdict is not None and verdict.is_taken))
    return found


def drawn(path: Path) -> str:
    """Returns what the results of a draw say."""
    known = judged(path)
    faster = [is_taken for time, is_taken in known if time < 0.8]
    slower = [is_taken for time, is_taken in known if time > 1.02]
    longest = max(time for time, is_taken in known if is_taken)
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

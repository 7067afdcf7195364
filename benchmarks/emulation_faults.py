"""Plants faults into executed bundles of compiled TPU kernels, and counts how many show in their results.

Each fault changes one instruction that the case executes: a mask, an address, a transfer, a wait, an operand. It is
seen if the kernel then stops, or if its results are further from its own than rounding. What is missed is listed.
Addresses that only the compiler's own checks read are left as they are.
"""

import collections
import dataclasses
import json
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
from tpu_published import libtpu_version

import jaxops
from lowering.emulation.emulator import Emulator
from lowering.emulation.kernels import Execution, Kernel, execute
from lowering.emulation.memory import Transfers
from lowering.targets import named
from lowering.tpu_core.bundles import Instruction
from lowering.tpu_core.faults import MachineFaultError, UnknownFormError

SEED, FAULTS_OF_A_KIND, SECONDS = 20261125, 2, 20
TOLERANCE = 3e-5  # of the largest result
RNG = np.random.default_rng(SEED)


def normal(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), dtype)


def with_ties(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    """Draws numbers, many of them equal and some of them 0."""
    return jnp.asarray(np.round(2 * RNG.normal(size=shape)) / 2, dtype)


def labels(classes: int, *shape: int) -> jax.Array:
    return jnp.asarray(RNG.integers(0, classes, shape), jnp.int32)


def gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of a function's first argument, for the cotangent that comes last."""
    return lambda x, *args: jax.vjp(lambda x: fn(x, *args[:-1]), x)[1](args[-1])[0]


def pooled(x: jax.Array) -> jax.Array:
    return jaxops.max_pool(x, window=(3, 3), stride=(2, 2), padding=1, layout="NHWC")


def normalized(x: jax.Array, scale: jax.Array, bias: jax.Array) -> Any:
    return jaxops.batch_norm(x, scale, bias, layout="NHWC")[0]


def responses(x: jax.Array) -> jax.Array:
    return jaxops.local_response_norm(x, layout="NCHW")


def losses(x: jax.Array, weight: jax.Array, y: jax.Array) -> jax.Array:
    return jaxops.linear_cross_entropy(x, weight, y, reduction="none")


def mean_loss(x: jax.Array, weight: jax.Array, y: jax.Array) -> Any:
    return jaxops.linear_cross_entropy(x, weight, y)


def dropped(x: jax.Array) -> list[jax.Array]:
    """Drops at several rates, as each takes the kernel another way."""
    return [jaxops.dropout(jax.random.key(0), x, rate) for rate in (0.1, 0.3, 0.5)]


def updated(grads: jax.Array, params: jax.Array) -> Any:
    adam = jaxops.ema_adam(1e-3)
    return adam.update(grads, adam.init(params), params)


BF16 = jnp.bfloat16
CASES: dict[str, tuple[str, Callable[..., Any], tuple[Any, ...]]] = {
    "softmax of long rows": ("tpu-v5e", jaxops.softmax, (60 * normal(24, 9100),)),
    "softmax, bfloat16": ("tpu-v6e", jaxops.softmax, (60 * normal(48, 1000, dtype=BF16),)),
    "gradient of softmax": ("tpu-v5e", gradient(jaxops.softmax), (normal(40, 300), normal(40, 300))),
    "softmax of channels": ("tpu-v7x", lambda x: jaxops.softmax(x, axis=1), (60 * normal(30, 70, 40),)),
    "dropout": ("tpu-v5e", dropped, (normal(64, 1024),)),
    "dropout, bfloat16": ("tpu-v7x", dropped, (normal(128, 1024, dtype=BF16),)),
    "local response norm": ("tpu-v5e", responses, (normal(2, 32, 5, 60),)),
    "gradient of local response norm": ("tpu-v6e", gradient(responses), (normal(2, 32, 5, 60), normal(2, 32, 5, 60))),
    "gradient of max pooling": ("tpu-v5e", gradient(pooled), (with_ties(4, 12, 16, 128), normal(4, 6, 8, 128))),
    "gradient of max pooling, bfloat16": (
        "tpu-v7x",
        gradient(pooled),
        (with_ties(4, 12, 16, 128, dtype=BF16), normal(4, 6, 8, 128, dtype=BF16)),
    ),
    "gradient of an embedding": (
        "tpu-v6e",
        gradient(jaxops.embedding),
        (normal(50, 128), labels(50, 60), normal(60, 128)),
    ),
    "batch norm": ("tpu-v5e", normalized, (normal(4, 6, 8, 24), normal(24), normal(24))),
    "gradient of batch norm, bfloat16": (
        "tpu-v6e",
        gradient(normalized),
        (normal(4, 6, 8, 256, dtype=BF16), normal(256), normal(256), normal(4, 6, 8, 256, dtype=BF16)),
    ),
    "cross entropy": ("tpu-v5e", losses, (normal(128, 256), normal(1000, 256), labels(1000, 128))),
    "gradients of cross entropy, bfloat16": (
        "tpu-v6e",
        jax.grad(lambda *args: losses(*args).sum(), argnums=(0, 1)),
        (normal(128, 256, dtype=BF16), normal(1000, 256, dtype=BF16), labels(1000, 128)),
    ),
    "exponentials of cross entropy, bfloat16": (
        "tpu-v7x",
        jax.grad(mean_loss, argnums=(0, 1)),
        (normal(640, 256, dtype=BF16), normal(1000, 256, dtype=BF16), labels(1000, 640)),
    ),
    "Adam with an average": ("tpu-v5e", updated, (normal(96, 1000), normal(96, 1000))),
}


class Recorder(Emulator):
    """A chip that remembers the calls of its kernels."""

    def __init__(self, target: str) -> None:
        super().__init__(named(target), checks=False)
        self.calls: list[tuple[Kernel, list[np.ndarray], Any]] = []

    def executed(self, called: Any, like: Any, *arrays: Any) -> Any:
        self.calls.append((called.kernel, list(map(np.asarray, arrays)), like))
        return super().executed(called, like, *arrays)


def changed(pattern: str, change: Callable[[re.Match[str]], str]) -> Callable[[str], str]:
    """Returns what changes the first number of this form in an operand, where there is one."""
    return lambda text: re.sub(pattern, change, text, count=1)


def operand(at: int, change: Callable[[str], str]) -> Callable[[Instruction], Instruction | None]:
    def mutant(one: Instruction) -> Instruction | None:
        if len(one.operands) <= at:
            return None
        after = change(one.operands[at])
        operands = (*one.operands[:at], after, *one.operands[at + 1 :])
        return None if after == one.operands[at] else dataclasses.replace(one, operands=operands)

    return mutant


def exchanged(a: int, b: int) -> Callable[[Instruction], Instruction | None]:
    """Exchanges two operands, which keep their labels."""

    def mutant(one: Instruction) -> Instruction | None:
        operands = list(one.operands)
        labels, values = zip(
            *(re.fullmatch(r"(\w+=)?(.*)", operands[at], re.DOTALL).groups() for at in (a, b)), strict=True
        )
        operands[a], operands[b] = ((labels[0] or "") + values[1], (labels[1] or "") + values[0])
        return None if values[0] == values[1] else dataclasses.replace(one, operands=tuple(operands))

    return mutant


def renamed(before: str, after: str) -> Callable[[Instruction], Instruction | None]:
    return lambda one: dataclasses.replace(one, opcode=one.opcode.replace(before, after, 1))


def left_out(one: Instruction) -> Instruction:
    return Instruction("snop", operands=("0",))


def turned(one: Instruction) -> Instruction | None:
    if one.predicate is None:
        return None
    return dataclasses.replace(one, predicate=one.predicate._replace(negated=not one.predicate.negated))


def one_lane_less(text: str) -> str:
    bits = int(text, 0)
    return str(bits - (1 << 13)) if bits >> 13 & 127 else text


# By kind: the opcodes, and what becomes of an instruction.
KINDS: dict[str, tuple[str, Callable[[Instruction], Instruction | None]]] = {
    "a mask of one lane less": (r"vcmask", operand(0, one_lane_less)),
    "a load or store of one sublane less": (
        r"vld|vst|vst\.msk",
        operand(0, changed(r"sm:\$0x(\w+)", lambda m: f"sm:$0x{int(m[1], 16) >> 1:x}" if int(m[1], 16) > 1 else m[0])),
    ),
    "a load eight rows further": (r"vld", operand(0, changed(r"vmem:\[([^\]]*)\]", lambda m: f"vmem:[{m[1]} + $0x8]"))),
    "a store left out": (r"vst|vst\.msk", left_out),
    "a transfer of 512 bytes less": (
        r"dma\.\w+_to_\w+",
        operand(1, changed(r"=(\d+)$", lambda m: f"={int(m[1]) - 16}" if int(m[1]) > 16 else m[0])),
    ),
    "a wait left out": (r"dma\.done\.wait", left_out),
    "a transfer's predicate turned": (r"dma\.\w+_to_\w+", turned),
    "an address eight rows further": (
        r"scalar_lea\.vmem",
        operand(1, changed(r"^(\d+)", lambda m: str(int(m[1]) + 8))),
    ),
    "a rotation by one more": (r"vrot\.slane", operand(1, changed(r"^(\d+)$", lambda m: str((int(m[1]) + 1) % 8)))),
    "another row": (r"vperm\.slane", operand(1, changed(r"^(\d+)$", lambda m: str((int(m[1]) + 1) % 8)))),
    "a difference the other way": (r"vsub\.(f32|s32|bf16)", exchanged(0, 1)),
    "a sum for a difference": (r"vsub\.(f32|s32|bf16)", renamed("vsub", "vadd")),
    "a minimum for a maximum": (r"vmax\.(f32|bf16|xlane.*)", renamed("vmax", "vmin")),
    "a selection the other way": (r"vsel", exchanged(1, 2)),
    "a comparison that differs for equals": (r"vcmp\.lt\..*", renamed(".lt.", ".le.")),
    "halves of a pack exchanged": (r"vpack\..*", exchanged(0, 1)),
    "the other half": (r"vunpack\..\.l\..*", renamed(".l.", ".h.")),
    "another shift": (r"vsh\w+\.\w+", operand(1, changed(r"^(\d+)$", lambda m: str(int(m[1]) + 1)))),
    "another function": (r"vpow2\.f32|vexp2\.f32", lambda one: dataclasses.replace(one, opcode="vrcp.f32")),
}


def mutants(kernel: Kernel, issues: tuple[int, ...]) -> Iterator[tuple[str, int, int, Instruction]]:
    """Yields each fault in an executed bundle: its kind, the bundle, the slot, and the instruction in its place."""
    readers = collections.defaultdict(set)
    for instruction in (one for bundle in kernel.bundles for one in bundle.instructions):
        for text in instruction.operands:
            for value in re.findall(r"%([a-z]*\d+)_", text):
                readers[value].add(instruction.opcode.partition(".")[0])
    for bundle in kernel.bundles:
        for slot, instruction in enumerate(bundle.instructions):
            if readers[instruction.value] == {"scmp"}:  # a check of the compiler
                continue
            for kind, (opcodes, mutate) in KINDS.items():
                if issues[bundle.number] and re.fullmatch(opcodes, instruction.opcode):
                    mutant = mutate(instruction)
                    if mutant is not None:
                        yield kind, bundle.number, slot, mutant


def with_mutant(kernel: Kernel, number: int, slot: int, mutant: Instruction) -> Kernel:
    bundle = kernel.bundles[number]
    instructions = (*bundle.instructions[:slot], mutant, *bundle.instructions[slot + 1 :])
    bundles = list(kernel.bundles)
    bundles[number] = dataclasses.replace(bundle, instructions=instructions)
    return dataclasses.replace(kernel, bundles=tuple(bundles))


class SlowError(Exception):
    """A changed kernel that exceeded its time limit."""


def stop(*_: Any) -> None:
    raise SlowError


def differs(found: Execution, own: Execution) -> bool:
    """Whether results differ by more than rounding."""
    for a, b in zip(found.results, own.results, strict=True):
        if a.dtype.kind in "iub":
            if a.tobytes() != b.tobytes():
                return True
            continue
        x, y = a.astype(np.float64), b.astype(np.float64)
        with np.errstate(all="ignore"):
            is_near = (np.abs(x - y) <= TOLERANCE * np.max(np.abs(y), where=np.isfinite(y), initial=0)) | (x == y)
        if not np.all(is_near | (np.isnan(x) & np.isnan(y))):
            return True
    return bool(found.left_over)


def is_seen(kernel: Kernel, operands: list[np.ndarray], like: Any, own: Execution) -> bool:
    """Whether a kernel with a fault stops, or has other results, with transfers in either of two orders."""
    for order in Transfers.ORDERS[:2]:
        signal.alarm(SECONDS)
        try:
            if differs(execute(kernel, operands, like, order=order), own):
                return True
        except (MachineFaultError, UnknownFormError, SlowError):
            return True
        finally:
            signal.alarm(0)
    return False


def main() -> None:
    parser = harness.parser(__doc__.partition("\n")[0])
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    signal.signal(signal.SIGALRM, stop)
    cases = []
    missed: list[str] = []
    by_kind: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for name, (target, fn, args) in list(CASES.items())[: 2 if options.quick else None]:
        recorder = Recorder(target)
        with jaxops.use("pallas"):
            jax.block_until_ready(jax.jit(recorder.emulated(fn))(*args))
        kernel, _, like = recorder.calls[-1]
        calls = [(operands, execute(kernel, operands, like)) for one, operands, _ in recorder.calls if one is kernel]
        issues = tuple(map(sum, zip(*(own.issues for _, own in calls), strict=True)))
        draw = random.Random(f"{SEED} {name}")
        found = collections.defaultdict(list)
        for mutant in mutants(kernel, issues):
            found[mutant[0]].append(mutant)
        planted = seen = 0
        for kind, faults in found.items():
            for _, number, slot, mutant in draw.sample(faults, min(FAULTS_OF_A_KIND, len(faults))):
                faulty = with_mutant(kernel, number, slot, mutant)
                shows = any(is_seen(faulty, operands, like, own) for operands, own in calls)
                planted, seen = planted + 1, seen + shows
                by_kind[kind][0] += 1
                by_kind[kind][1] += shows
                if not shows:
                    missed.append(
                        f"{name}, {target}, {number:#x}: {kind}: {mutant.opcode} {', '.join(mutant.operands)}"
                    )
        covered = sum(map(bool, issues)) / len(issues)
        row = {"kernel": kernel.name.partition(".")[0], "planted": planted, "seen": seen, "coverage": round(covered, 3)}
        cases.append({"name": f"{name}, {target}", "candidates": {"emulated": row}})
    record = harness.report("emulation_faults", cases, None)
    record["environment"]["versions"]["libtpu"] = libtpu_version()
    totals = [sum(counts[at] for counts in by_kind.values()) for at in (0, 1)]
    record |= {"seed": SEED, "planted": totals[0], "seen": totals[1], "missed": missed}
    record["kinds"] = {kind: {"planted": planted, "seen": seen} for kind, (planted, seen) in by_kind.items()}
    print(f"{totals[1]} of {totals[0]} seen", *missed, sep="\n")
    if options.output is not None:
        options.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()

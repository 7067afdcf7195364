"""Names of opcodes: what a version of libtpu calls by another name than the one under which its meaning is kept."""

import functools
import re

# Names that later versions of libtpu give, to those that earlier ones gave.
_RENAMED = [
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^vexp2\.", "vpow2."),
        (r"^vpow\.bf16", "vpow2.bf16"),
        (r"^vclamps-f32", "vclamps.f32"),
        (r"^vlaneseq\.b32", "vlaneseq"),
        (r"^(vpack\.[ci])\.f32\.bf16", r"\1.bf16"),
        (r"^vpack\.([ci])\.b16\.b8", r"vpack.\1.b8"),
        (r"^vpack\.([ci])\.b32\.b16", r"vpack.\1.b16"),
        (r"^(vunpack\.[ci])\.u\.", r"\1.h."),
        (r"^(vunpack\..*)\.bf16\.f32", r"\1.bf16"),
        (r"^(vunpack\..*)\.s8\.s32", r"\1.s8"),
        (r"^(vunpack\..*)\.s4\.s8", r"\1.s4"),
        (r"^(vunpack\..*)\.b16\.b32", r"\1.b16"),
        (r"^vperm\.lane\.", "vperm."),
        (r"^vnez$", "vnez.u8"),
        (r"^(vunpack\..*|vcvt\.f32)\.if8(\.f32)?$", r"\1.f8e4m3b11"),
        (r"^(vunpack\..*)\.e4m3\.(f32|bf16)$", r"\1.f8e4m3fn"),
        (r"^(vunpack\..*)\.e5m2\.(f32|bf16)$", r"\1.bf8"),
        (r"^vcvt\.f32\.e5m2$", "vcvt.f32.f8e5m2"),
        (r"^vpack\.c\.bf16\.e4m3$", "vpack.c.e4m3fn"),
        (r"^vpack\.c\.bf16\.e5m2$", "vpack.c.e5m2"),
        (r"^vpack\.c\.b8\.b4$", "vpack.c.b4"),
        # XLA's fusions say of the same operations less, or which numbers result.
        (r"^(vunpack\.[ci]\.[lh]\.s16)$", r"\1.s32"),
        (r"^vshra\.s32\.s(8|16)", "vshra.s32"),
        (r"^vand\.u32\.u8", "vand.u32"),
    )
]


@functools.cache
def known_name(opcode: str) -> str:
    """Returns the name under which an opcode's meaning is kept."""
    for pattern, name in _RENAMED:
        opcode = pattern.sub(name, opcode)
    return opcode

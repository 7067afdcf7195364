"""Reasons why a compiled program cannot be executed, or what it does that no program may."""


class UnknownFormError(Exception):
    """An opcode, or a form of an operand, whose meaning nobody has settled; the message names it."""


class MachineFaultError(Exception):
    """Something that no program may do, such as to wait for what nobody sends; the message names it."""


class EmulationError(RuntimeError):
    """A kernel cannot be executed, or does what no program may; the message names the kernel, the bundle and why."""


class KernelFaultError(EmulationError):
    """A kernel does what no program may."""

"""Reasons why the emulation of a function stops."""


class EmulationError(RuntimeError):
    """A kernel cannot be executed, or does what no program may; the message names the kernel, the bundle and why."""


class KernelFaultError(EmulationError):
    """A kernel does what no program may."""

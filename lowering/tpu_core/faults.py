"""Reasons why a program cannot be followed, or what it does that no program may."""


class UnknownFormError(Exception):
    """An opcode, or a form of an operand, whose meaning nobody has settled; the message names it."""


class MachineFaultError(Exception):
    """Something that no program may do, such as to wait for what nobody sends; the message names it."""

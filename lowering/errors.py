"""Errors that more than one module raises."""

from typing import Any


class OperatorError(ValueError):
    """An operator refuses a call.

    Attributes:
      status: the name or number that a vendor documents for the refusal; None for operators that no vendor documents.
    """

    def __init__(self, message: str, status: int | str | None = None) -> None:
        """Takes the sentence that the user reads, and the vendor's status if there is one."""
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the status too; by default only `Exception.args` are kept."""
        return type(self), (str(self), self.status)


class NotSupportedError(OperatorError):
    """The call is well formed, but this operator, platform or kernel does not support it."""


class ArtifactError(RuntimeError):
    """A file is not a readable artifact, or an artifact does not accept these arguments."""


class ScheduleError(RuntimeError):
    """A file is not a saved schedule, or a schedule cannot be written or compared like this."""


class TuningError(RuntimeError):
    """A file is not a readable tuning result, or nothing can be tuned like this."""


class UsageError(TypeError):
    """A tool is given something that is not a traceable function, or arguments that are not pytrees."""

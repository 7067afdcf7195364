"""What is raised in more than one module: errors with the status that a vendor documents, and those of artifacts."""

from typing import Any


class OperatorError(ValueError):
    """A call that an operator refuses; `status` is the documented name or number of the refusal."""

    def __init__(self, message: str, status: int | str) -> None:
        """Args are the sentence that the user reads and the status."""
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[Any, ...]:
        """Exceptions are pickled by their arguments, of which the status is none."""
        return type(self), (str(self), self.status)


class NotSupportedError(OperatorError):
    """The call is well formed, but this operator, platform or kernel does not offer it."""


class ArtifactError(RuntimeError):
    """A file cannot be read as an artifact, or an artifact cannot be called like this."""

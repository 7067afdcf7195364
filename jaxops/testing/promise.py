"""The list of promises, and how one is checked."""

from collections.abc import Callable
from typing import NamedTuple

from jaxops.testing.report import Broken, Skipped
from jaxops.testing.trial import FoundError, SkipError, Trial, during


class Promise(NamedTuple):
    """A promise that functions may keep.

    Attributes:
      name: what users call it.
      check: raises FoundError if a function breaks it, or SkipError if that cannot be told.
    """

    name: str
    check: Callable[[Trial], None]

    def outcome(self, trial: Trial) -> Broken | Skipped | None:
        """Returns what was found, why it could not be checked, or None if the promise is kept."""
        try:
            with during("while this is checked"):
                self.check(trial)
        except FoundError as found:
            return Broken(self.name, str(found))
        except SkipError as reason:
            return Skipped(self.name, str(reason))
        return None

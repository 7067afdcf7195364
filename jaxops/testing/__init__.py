"""Checks the promises that this library's operators keep, for anybody's operator or loss."""

from jaxops.testing.api import PROMISES as PROMISES
from jaxops.testing.api import check_operator as check_operator
from jaxops.testing.report import Broken as Broken
from jaxops.testing.report import Report as Report
from jaxops.testing.report import Skipped as Skipped

__all__ = ["PROMISES", "Broken", "Report", "Skipped", "check_operator"]

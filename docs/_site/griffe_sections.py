"""Sections of this library's docstrings, by the names that griffe knows, which reads them for mkdocstrings."""

import re
from typing import Any

import griffe

KNOWN = {
    "Example:": "Examples:",
    "Shared arguments:": "Args:",
    "Shared errors, unless a function says otherwise:": "Raises:",
}


class Sections(griffe.Extension):
    """Renames them."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Reads one docstring."""
        if obj.docstring is not None:
            pattern = f"^({'|'.join(KNOWN)})$"
            obj.docstring.value = re.sub(
                pattern, lambda found: KNOWN[found[1]], obj.docstring.value, flags=re.MULTILINE
            )

"""Docstrings say "Example:" where griffe, which reads them for mkdocstrings, knows a section "Examples:"."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Gives griffe the name that it knows."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Reads one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)

"""Tables that never break a name in the middle, however narrow the console."""

import functools
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from io import StringIO

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

_WIDTH = 140  # characters, if stdout is not a terminal
_WIDTH_IN_NOTEBOOK = 88  # what is shown without scrolling, as on a page of 1440 pixels
_BORDERS_AND_PADDING = 3  # characters per column, plus one for the table
_INDENT = 2


def fitted(table: RenderableType, console: Console) -> RenderableType:
    """Fits a table's columns to at least their longest words; if the console is too narrow, shows rows as lists."""
    if not isinstance(table, Table):
        return table
    sizes = [_sizes(table, index, console) for index in range(len(table.columns))]
    spare = console.width - sum(least for least, _ in sizes) - _BORDERS_AND_PADDING * len(sizes) - 1
    if spare < 0:
        return _as_lists(table)
    if sum(most - least for least, most in sizes) > spare:
        for column, width in zip(table.columns, _widths(sizes, spare), strict=True):
            column.width = width
    return table


def text(table: RenderableType, remarks: Sequence[str] = ()) -> str:
    """Returns the text that `print` shows: as wide as the terminal, the notebook, or COLUMNS in the environment says.

    Args:
      table: what is laid out.
      remarks: the lines below it. A terminal wraps them by itself, and so does whoever reads a file; a notebook's page
        does not.
    """
    is_notebook = type(sys.stdout).__module__.startswith("ipykernel.")
    is_terminal = getattr(sys.stdout, "isatty", bool)()
    width = _WIDTH_IN_NOTEBOOK if is_notebook else _WIDTH
    if is_terminal or os.environ.get("COLUMNS"):
        width = shutil.get_terminal_size().columns
    file = StringIO()
    console = Console(file=file, width=width, no_color=True, force_terminal=False, force_jupyter=False)
    console.print(fitted(table, console))
    lines = [line.rstrip() for line in file.getvalue().rstrip().splitlines()]
    wrap = functools.partial(textwrap.wrap, width=width, break_long_words=False, break_on_hyphens=False)
    return "\n".join([*lines, *(line for one in remarks for line in (wrap(one) if is_notebook else [one]))])


def _widths(sizes: list[Measurement], spare: int) -> list[int]:
    """Returns the least widths, plus the spare characters one by one for the narrowest column that wants more."""
    widths = [least for least, _ in sizes]
    for _ in range(spare):
        wanting = [(width, index) for index, width in enumerate(widths) if width < sizes[index].maximum]
        widths[min(wanting)[1]] += 1
    return widths


def _sizes(table: Table, index: int, console: Console) -> Measurement:
    """Returns the widths of a column's longest word and longest line."""
    column = table.columns[index]
    footers = [column.footer] if table.show_footer else []
    cells = [column.header, *column.cells, *footers]
    found = [Measurement.get(console, console.options.update(width=10_000), cell) for cell in cells]
    most = max(size.maximum for size in found)
    return Measurement(most if column.no_wrap else max(size.minimum for size in found), most)


def _as_lists(table: Table) -> Group:
    """Shows each row as its first cell, the other words below it by their headers, and its numbers together."""
    lines: list[RenderableType] = [] if table.title is None else [table.title]
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    if table.show_footer:
        rows.append(tuple(column.footer for column in table.columns))
    for name, *values in rows:
        cells = [(column, _plain(value)) for column, value in zip(table.columns[1:], values, strict=True) if value]
        texts = [Text.assemble(_header(column), ": ", text) for column, text in cells if column.justify != "right"]
        numbers = [(column, text.plain.split()) for column, text in cells if column.justify == "right"]
        texts.append(Text(", ".join(" ".join((_header(column), *number)) for column, number in numbers)))
        lines += _indented(_plain(name), 0)
        for text in texts:
            lines += _indented(text, _INDENT)
    return Group(*lines)


def _indented(text: Text, by: int) -> Iterator[Padding]:
    """Yields the lines of a text, whose wrapped parts begin where the line does."""
    for line in text.split():
        spaces = len(line.plain) - len(line.plain.lstrip())
        yield Padding(line[spaces:], (0, 0, 0, by + spaces), expand=False)


def _header(column: Column) -> str:
    return " ".join(str(column.header).split())


def _plain(cell: RenderableType) -> Text:
    return cell if isinstance(cell, Text) else Text(str(cell))

"""Tables that never break a name in the middle, however narrow the console."""

import shutil
import sys
from io import StringIO

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_WIDTH = 140  # characters, if stdout is not a terminal
_BORDERS_AND_PADDING = 3  # characters per column, plus one for the table


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


def text(table: RenderableType) -> str:
    """Returns the text that `print` shows: as wide as the terminal, and the same wherever stdout is none."""
    is_terminal = getattr(sys.stdout, "isatty", bool)()
    width = shutil.get_terminal_size().columns if is_terminal else _WIDTH
    file = StringIO()
    console = Console(file=file, width=width, no_color=True, force_terminal=False, force_jupyter=False)
    console.print(fitted(table, console))
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


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
    """Shows each row as its first cell, the other words below it, and its numbers on one line."""
    lines: list[RenderableType] = [] if table.title is None else [table.title]
    for name, *values in zip(*(column.cells for column in table.columns), strict=True):
        cells = list(zip(table.columns[1:], values, strict=True))
        words = [value for column, value in cells if column.justify != "right"]
        lines += [_plain(name), *(Text.assemble("  ", _plain(word)) for word in words)]
        lines += _numbers([(column.header, value) for column, value in cells if column.justify == "right"])
    if table.show_footer:
        lines += [_plain(table.columns[0].footer)]
        lines += _numbers([(column.header, column.footer) for column in table.columns[1:]])
    return Group(*(line for line in lines if str(line).strip()))


def _numbers(cells: list[tuple[RenderableType, RenderableType]]) -> list[RenderableType]:
    """Writes all numbers on one line."""
    named = [f"{' '.join(str(header).split())} {' '.join(str(value).split())}" for header, value in cells if value]
    return [f"  {', '.join(named)}"] if named else []


def _plain(cell: RenderableType) -> Text:
    return cell if isinstance(cell, Text) else Text(str(cell))

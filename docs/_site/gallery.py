"""The notebooks as pages with the outputs that are stored in them, and the gallery that shows a picture of each."""

import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
from latex2mathml.converter import convert
from nbconvert import MarkdownExporter

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
_MATH = re.compile(r"\$\$(?P<block>.+?)\$\$|\$(?P<inline>[^$\n]+)\$", re.DOTALL)
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def pages() -> Iterator[tuple[str, str | bytes]]:
    """Paths and contents of the notebooks, of the pictures in them, and of the gallery."""
    cards = []
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = _MATH.sub(_mathml, cell.source)
        text, resources = MarkdownExporter().from_notebook_node(
            notebook, resources={"output_files_dir": path.stem, "unique_key": path.stem}
        )
        yield f"notebooks/{path.stem}.md", _ANSI.sub("", text)
        pictures = {f"notebooks/{name}": data for name, data in resources["outputs"].items()}
        yield from pictures.items()
        title, _, rest = notebook.cells[0].source.removeprefix("# ").partition("\n")
        picture = next(reversed(pictures), None)
        sentence = re.split(r"\.\s", rest.strip())[0]  # a name may have dots
        cards.append(_card(path.stem, title, " ".join(sentence.split()), picture))
    head = "# Gallery\n\nNotebooks that run in CI; what they print and draw is stored with them.\n"
    yield "gallery.md", "\n".join([head, '<div class="grid cards" markdown>\n', *cards, "</div>\n"])


def _mathml(found: re.Match[str]) -> str:
    """A formula as browsers show it by themselves."""
    if found["block"]:
        formula = found["block"].strip().replace("{aligned}", "{align*}")  # the one of the two that the converter knows
        return f'<div class="formula">{convert(formula, display="block")}</div>'
    return convert(found["inline"])


def _card(name: str, title: str, sentence: str, picture: str | None) -> str:
    shown = f"    ![{title}]({picture}){{ .thumbnail loading=lazy }}\n\n" if picture else ""
    return f"-   **[{title}](notebooks/{name}.md)**\n\n{shown}    {sentence}.\n"

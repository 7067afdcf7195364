"""The notebooks as pages with the outputs that are stored in them, and the gallery that shows a picture of each."""

import base64
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
from latex2mathml.converter import convert
from nbconvert import MarkdownExporter

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
_MATH = re.compile(r"\$([^$\n]+)\$")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def pages() -> Iterator[tuple[str, str | bytes]]:
    """Paths and contents of the notebooks, of the pictures in them, and of the gallery."""
    cards = []
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = _MATH.sub(lambda found: convert(found[1]), cell.source)
        text, resources = MarkdownExporter().from_notebook_node(
            notebook, resources={"output_files_dir": path.stem, "unique_key": path.stem}
        )
        yield f"notebooks/{path.stem}.md", _ANSI.sub("", text)
        pictures = {f"notebooks/{name}": data for name, data in resources["outputs"].items()}
        yield from pictures.items()
        title, _, rest = notebook.cells[0].source.removeprefix("# ").partition("\n")
        picture = next(reversed(pictures), None)
        cards.append(_card(path.stem, title, " ".join(rest.split(".")[0].split()), picture))
    head = "# Gallery\n\nNotebooks that run in CI; what they print and draw is stored with them.\n"
    yield "gallery.md", "\n".join([head, '<div class="grid cards" markdown>\n', *cards, "</div>\n"])


def picture_sizes() -> dict[str, int]:
    """The bytes of all pictures that each notebook has stored."""
    sizes = {}
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        outputs = [output for cell in nbformat.read(path, as_version=4).cells for output in cell.get("outputs", ())]
        pictures = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
        sizes[path.stem] = sum(len(base64.b64decode(picture)) for picture in pictures)
    return sizes


def _card(name: str, title: str, sentence: str, picture: str | None) -> str:
    shown = f"    ![{title}]({picture}){{ .thumbnail loading=lazy }}\n\n" if picture else ""
    return f"-   **[{title}](notebooks/{name}.md)**\n\n{shown}    {sentence}.\n"

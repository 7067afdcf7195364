"""What MkDocs calls to make the site: the generated pages, links as the repository has them, and the last check."""

import os
import re
import sys
import zlib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.append(str(Path(__file__).parent))

import families  # these stand beside this file, which MkDocs loads by its path
import figures
import gallery

import jaxops
import lowering
from jaxops import linen, mcdnn
from lowering.rewriting.graph import RESHAPES
from lowering.rewriting.rules import rules

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FROM_ROOT = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
# What operators are made of, beside `jaxops.Operator` and `jaxops.Derivative`: by file, what the page of these shows.
RECORDS = {
    "jaxops/_primitive/signature.py": ("Signature",),
    "pallas_kernels/kernel.py": ("Kernel",),
    "lowering/operators.py": ("Form", "Place"),
    "lowering/rewriting/rules.py": ("Rule", "Suggestion"),
    "lowering/rewriting/graph.py": ("Level", "Node", "Value", "forward", "backward", "unshaped", "described"),
}
FOR_FRAMEWORKS = ("jaxops.nnx", "jaxops.linen", "jaxops.equinox")
PUBLIC = ("jaxops", "jaxops.aclnn", "jaxops.mcdnn", *FOR_FRAMEWORKS, "jaxops.testing", "lowering")
_LINK = re.compile(r"(\]\()([^)#\s]+)")
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the pages of operators, and what `mkdocs.yml` does not place, so that it is not lost, to the compiler's."""
    (operators,) = (section["Operators"] for section in config.nav if "Operators" in section)
    at = operators.index("frameworks.md")
    operators[at:at] = [f"operators/{family}.md" for family in families.functions()]
    (compiler,) = (section["Compiler"] for section in config.nav if "Compiler" in section)
    placed = str(config.nav)
    compiler += [page.name for page in sorted(DOCS.glob("*.md")) if f"'{page.name}'" not in placed]
    (pictures,) = (section["Gallery"] for section in config.nav if "Gallery" in section)
    pictures += [f"notebooks/{path.stem}.md" for path in sorted(gallery.NOTEBOOKS.glob("*.ipynb"))]
    return config


@event_priority(100)
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages."""
    for path, content in _generated():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turns links to the repository's files into links to the pages that show them."""
    uri = page.file.src_uri
    origins = {shown: name for name, shown in FROM_ROOT.items()}
    folder = os.path.dirname(origins.get(uri, uri if uri.startswith("notebooks/") else f"docs/{uri}"))

    def shown(found: re.Match[str]) -> str:
        if "://" in found[2]:
            return found[0]
        path = os.path.normpath(os.path.join(folder, found[2]))
        return found[1] + os.path.relpath(_uri(path), os.path.dirname(uri) or ".")

    # Code may contain what looks like a link.
    return "".join(part if part.startswith("`") else _LINK.sub(shown, part) for part in _CODE.split(markdown))


def on_post_build(config: MkDocsConfig) -> None:
    """Refuses a site that lacks a public name."""
    data = (Path(config.site_dir) / "objects.inv").read_bytes()
    listed = {line.split()[0] for line in zlib.decompress(data.split(b"\n", 4)[4]).decode().splitlines()}
    missing = sorted(
        f"{module.__name__}.{name}"
        for module in map(import_module, PUBLIC)
        for name in module.__all__
        if not isinstance(getattr(module, name), ModuleType) and not _places(module, name) & listed
    )
    if missing:
        raise PluginError(f"every public name must have a docstring on a page; missing: {', '.join(missing)}")


def _places(module: ModuleType, name: str) -> set[str]:
    thing = getattr(module, name)
    return {f"{module.__name__}.{name}", f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', '')}"}


def _uri(path: str) -> str:
    """Where the site shows a file of the repository."""
    if path in FROM_ROOT:
        return FROM_ROOT[path]
    if path in RECORDS:
        return "reference/records.md"
    family = path.removeprefix("jaxops/").removesuffix(".py").partition("/")[0]
    if path.startswith("jaxops/") and family in families.functions():
        return f"operators/{family}.md"
    if path == "notebooks":
        return "gallery.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.endswith(".ipynb"):
        return f"{path.removesuffix('.ipynb')}.md"
    return f"source/{path.removesuffix('.py')}.md" if path.endswith(".py") else path


def _generated() -> Iterator[tuple[str, str | bytes]]:
    for name, shown in FROM_ROOT.items():
        yield shown, (ROOT / name).read_text()
    yield from families.pages()
    yield from gallery.pages()
    for module in map(import_module, PUBLIC):
        yield f"{_page_of(module.__name__)}.md", _reference(module)
    yield "reference/records.md", _records()
    yield "kernels.md", _kernels()
    examples = (ROOT / "examples").glob("*.py"), (ROOT / "examples").glob("*/*/*/*.py")
    for path in sorted([*(ROOT / "benchmarks").glob("*.py"), *examples[0], *examples[1]]):
        name = path.relative_to(ROOT)
        yield f"source/{name.with_suffix('.md')}", f"# {name}\n\n```python\n{path.read_text()}```\n"


def _page_of(module: str) -> str:
    return {"jaxops.aclnn": "aclnn", "jaxops.mcdnn": "mcdnn"}.get(module, f"reference/{module.rpartition('.')[2]}")


def _reference(module: ModuleType) -> str:
    """All public names of a module that no operator's page shows."""
    shown = {name for names in families.functions().values() for name in names} if module is jaxops else set()
    names = [name for name in module.__all__ if name not in shown]
    names = [name for name in names if not isinstance(getattr(module, name), ModuleType)]
    if module.__name__ == "jaxops.nnx":  # whose docstring says so
        names = [name for name in names if getattr(module, name) is not getattr(linen, name, None)]
    text = _docstring(module)
    lent = [name for name in names if module is jaxops and getattr(module, name) is getattr(lowering, name, None)]
    if lent:
        text += f"{' and '.join(f'`{name}`' for name in lent)} are those of [`lowering`](lowering.md).\n\n"
    if module is mcdnn:
        text += f"## Normalizations\n\n{_docstring(mcdnn.norm)}"
    text += _conformance(module.__name__.rpartition(".")[2])
    shown_here = (families.reference(module.__name__, name) for name in names if name not in lent)
    return f"# `{module.__name__}`\n\n{text}\n\n" + "".join(shown_here)


def _records() -> str:
    """The records that the page on adding an operator uses."""
    text = (
        "# Records of an operator\n\n[Adding an operator](../adding-an-operator.md) uses these, with "
        "[`jaxops.Operator` and `jaxops.Derivative`](jaxops.md).\n\n"
    )
    for path, names in RECORDS.items():
        module = import_module(path.removesuffix(".py").replace("/", "."))
        text += "".join(families.reference(module.__name__, name) for name in names)
    reshapes = ", ".join(f"`{name}`" for name in sorted(RESHAPES))
    return f"{text}## lowering.rewriting.graph.RESHAPES\n\nThe primitives that change only a shape: {reshapes}.\n"


def _docstring(module: ModuleType) -> str:
    """What mkdocstrings replaces by the docstring of a module."""
    return f"::: {module.__name__}\n    options:\n      show_root_heading: false\n      show_root_toc_entry: false\n\n"


def _conformance(vendor: str) -> str:
    """The rows of the table of conformance that are one vendor's; empty for other modules."""
    table = (DOCS / "operators.md").read_text().partition("| documented function |")
    head, rule, *rows = (table[1] + table[2].partition("\n\n")[0]).splitlines()
    kept = [row for row in rows if row.startswith(f"| `{vendor}")]
    return "## Conformance\n\n" + "\n".join([head, rule, *kept, "\n"]) if kept else ""


def _kernels() -> str:
    operators = list(jaxops.operators())
    suggested = [(f"`{rule.name}`", f"`{rule.replacement}`") for rule in rules() if rule.suggest]
    rewrites = [(f"`{rule.name}`", "on request" if rule.asked else "yes", rule.remark) for rule in rules() if rule.find]
    return (
        "# Kernels\n\nEvery operator, and which platforms have a kernel of it. Each operator's page says what its "
        f"kernels do and when they refuse.\n\n{families.kernels_table(operators)}\n"
        "![kernels and XLA's code by roofline](figures/kernels_by_roofline.svg)\n\n"
        "*By the compiler's schedules, which [no chip ran](schedule.md).*\n\n"
        "![ours by PyTorch's](figures/ours_by_pytorch.svg)\n\n"
        "*Measured on a CPU: [numbers](numbers.md).*\n\n## Plain JAX that operators replace\n\n"
        f"[`lowering.explain`](compiler.md) finds these:\n\n"
        f"{figures.markdown_table(('rule', 'operator'), suggested)}\n"
        "[`lowering.rewrite`](rewriting.md) replaces these:\n\n"
        f"{figures.markdown_table(('rule', 'by default', 'remark'), rewrites)}"
    )

"""A page for each family of operators: its functions, what they are made of, their kernels and their figures."""

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import figures
from latex2mathml.converter import convert

import jaxops
from jaxops import aclnn, mcdnn
from lowering.evidence import favours
from lowering.targets import TARGETS
from pallas_kernels.kernel import Kernel

KERNELS = (
    '"By evidence": a kernel is the default at [the sizes where evidence favours it]({root}what-runs-where.md), of '
    'GPUs on an H100. "Opt-in": only where [`jaxops tune`]({root}on-your-device.md) has measured it. '
    '`jaxops.use("pallas")` asks for either. Where XLA needs no kernel, the reason stands in its place, and '
    "[replays]({root}replays.md) show it.\n\n"
)

# What a family computes, before anything else on its page; others have it in the docstrings of their functions.
FORMULAS = {
    "activation": r"y = f(x), \quad f \in \{\sigma, \mathrm{relu}, \tanh, \mathrm{elu}, \mathrm{swish}, \ldots\}",
    "affine_grid": r"g_{nhw} = \theta_n (x_w, y_h, 1)^T",
    "batch_norm": r"y = f\left(\gamma \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta + r\right)",
    "divisive_norm": r"y_i = x_i \left(k + \frac{\alpha}{n^d} \sum_{j \in W(i)} (x_j - \mu_j)^2\right)^{-\beta}",
    "dropout": r"y_i = \frac{m_i x_i}{1 - r}, \quad P(m_i = 1) = 1 - r",
    "ema_adam": r"\theta_t = \theta_{t-1} - \eta \frac{\hat\mu_t}{\sqrt{\hat\nu_t} + \epsilon}, "
    r"\quad \bar\theta_t = \delta \bar\theta_{t-1} + (1 - \delta) \theta_t",
    "embedding": r"y_r = T_{i_r}, \quad "
    r"\frac{\partial L}{\partial T_w} = \sum_{r: i_r = w} \frac{\partial L}{\partial y_r}",
    "grid_sample": r"y = \sum_{p} x_p \max(0, 1 - |p_x - g_x|) \max(0, 1 - |p_y - g_y|)",
    "linear_cross_entropy": r"L = \sum_i w_i \left(\log \sum_c e^{z_{ic}} - z_{i y_i}\right), \quad z = x W^T + b",
    "local_response_norm": r"y_c = x_c \left(k + \frac{\alpha}{n} \sum_{j \in W(c)} x_j^2\right)^{-\beta}",
    "nll_loss": r"l_i = -w_{y_i} \log p_{i y_i}",
    "pooling": r"y_o = \max_{k} x_{o s + k - p} \quad \text{or} \quad \frac{1}{n_o} \sum_k x_{o s + k - p}",
    "softmax": r"y_i = \frac{e^{x_i}}{\sum_j e^{x_j}}",
}
PICTURES = {
    "linear_cross_entropy": (
        "![temporaries against the vocabulary](../vocabulary_memory.svg)\n\n"
        "*Temporaries of a float32 loss and its gradients, 2048 rows of 512, as XLA reports them for a CPU.*\n\n"
        "![time against the number of rows](../figures/time_against_rows.svg)\n\n"
        "*Time of a float32 loss and its gradients on a CPU, 768 features and 50257 classes: medians and quartiles.*\n"
    ),
}
TITLES = {"ema_adam": "EMA-Adam", "nll_loss": "NLL loss"}
NOTEBOOKS = {
    "linear_cross_entropy": ("linear_cross_entropy", "policy_gradient"),
    "ema_adam": ("ema_adam",),
    "batch_norm": ("vision",),
    "affine_grid": ("vision",),
    "grid_sample": ("vision",),
    "pooling": ("rewrite",),
}


def family_of(thing: Any) -> str:
    """The folder or file in `jaxops/` that a function or an operator is defined in."""
    fn = thing.reference if isinstance(thing, jaxops.Operator) else thing
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn.__module__.split(".")[1]


def functions() -> dict[str, list[str]]:
    """The public functions and results of each family that has operators."""
    families = {family_of(operator) for operator in jaxops.operators()}
    found: dict[str, list[str]] = {family: [] for family in sorted(families)}
    for name in jaxops.__all__:
        thing = getattr(jaxops, name)
        if not isinstance(thing, ModuleType) and family_of(thing) in families:
            found[family_of(thing)].append(name)
    return {family: sorted(names, key=_results_last) for family, names in found.items() if names}


def pages() -> Iterator[tuple[str, str]]:
    """Paths and Markdown of all pages."""
    for family, names in functions().items():
        yield f"operators/{family}.md", _page(family, names)


def reference(module: str, name: str, level: int = 2) -> str:
    """What mkdocstrings replaces by the signature and the docstring of a public name."""
    thing = getattr(sys.modules[module], name)
    heading = f"{module}.{name}"
    if callable(thing) and not thing.__doc__:
        raise ValueError(f"{heading} must have a docstring; got none")
    where = f"{thing.__module__}.{thing.__qualname__}" if hasattr(thing, "__qualname__") else heading
    options = f'heading: "{heading}"\n  toc_label: "{name}"\n  heading_level: {level}'
    return f"::: {where}\n    options:\n{textwrap.indent(options.replace('  ', ''), ' ' * 6)}\n\n"


def kernels_table(operators: list[jaxops.Operator], root: str = "") -> str:
    """When each operator's kernels run by default, or why it has none; links start from a path to the site's root."""
    rows = [(f"`{operator.name}`", *(_default(operator, on) for on in ("tpu", "cuda"))) for operator in operators]
    return KERNELS.format(root=root) + figures.markdown_table(("operator", "kernel for TPUs", "for NVIDIA GPUs"), rows)


def _default(operator: jaxops.Operator, platform: str) -> str:
    kernel = _kernel(operator, platform)
    if kernel is None:
        return operator.no_kernel or "none yet"
    chips = [chip for chip in TARGETS.values() if chip.platform == platform]
    return "by evidence" if any(favours(operator.name, kernel.name, chip) for chip in chips) else "opt-in"


def _page(family: str, names: list[str]) -> str:
    operators = [operator for operator in jaxops.operators() if family_of(operator) == family]
    text = [f"# {TITLES.get(family, family.replace('_', ' ').capitalize())}\n"]
    if family in FORMULAS:
        text.append(f'<div class="formula">{convert(FORMULAS[family], display="block")}</div>\n')
    if family in NOTEBOOKS:
        links = (f"[`{name}`]({_notebook(name)})" for name in NOTEBOOKS[family])
        text.append(f"In use, in a notebook: {', '.join(links)}.\n")
    text += [reference("jaxops", name) for name in names]
    vendors = [
        f"[`{vendor.__name__}.{name}`](../{vendor.__name__.split('.')[1]}.md)"
        for vendor in (aclnn, mcdnn)
        for name in vendor.__all__
        if isinstance(getattr(vendor, name), FunctionType) and _belongs(getattr(vendor, name), family, operators)
    ]
    if vendors:
        text.append(f"## Documented calls\n\n{', '.join(vendors)}\n")
    text.append(f"## Operators and kernels\n\n{kernels_table(operators, '../')}")
    text += list(_kernel_sections(operators))
    measured, replayed = (of([family, *names]) for of in (figures.measured, figures.replayed))
    if measured:
        text.append(f"## Measured\n\n{PICTURES.get(family, '')}\n{measured}")
    if replayed:
        text.append(
            f"## Replayed\n\nBy the compiler's schedules; [no chip ran anything](../schedule.md).\n\n{replayed}"
        )
    return "\n".join(text)


def _kernel_sections(operators: list[jaxops.Operator]) -> Iterator[str]:
    """What each kernel does and when it refuses, once for the operators that share it."""
    seen: set[str] = set()
    for platform, label in (("tpu", "TPU"), ("cuda", "NVIDIA GPU")):
        for operator in operators:
            kernel = _kernel(operator, platform)
            run: Any = kernel and kernel.run
            while isinstance(run, functools.partial):
                run = run.func
            if kernel is None or run.__module__ in seen or not run.__module__.startswith("pallas_kernels."):
                continue
            seen.add(run.__module__)
            yield f"### On {label}: `{operator.name}`\n\n{inspect.getdoc(sys.modules[run.__module__])}\n"
            refusals = list(dict.fromkeys(sentences(kernel.refuses)))
            if refusals:
                yield "It refuses, and the reference runs:\n\n" + "".join(f"* {each}\n" for each in refusals)


def sentences(refuses: Callable[..., Any]) -> Iterator[str]:
    """The sentences that a kernel's `refuses` may return, with "..." for what depends on the operands."""
    names = vars(sys.modules[refuses.__module__])
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(refuses)))):
        if isinstance(node, ast.Return) and node.value is not None:
            yield from _texts(node.value, names)
        called = names.get(node.func.id) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None
        if isinstance(called, FunctionType) and "refus" in called.__name__ and called is not refuses:
            yield from sentences(called)


def _texts(value: ast.expr, names: dict[str, Any]) -> Iterator[str]:
    for node in [value, *((value.body, value.orelse) if isinstance(value, ast.IfExp) else ())]:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(_part(part, names) for part in node.values)


def _part(part: ast.expr, names: dict[str, Any]) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    assert isinstance(part, ast.FormattedValue)
    try:
        return str(eval(ast.unparse(part.value), names))
    except NameError:
        return "..."


def _kernel(operator: jaxops.Operator, platform: str) -> Kernel | None:
    return next((kernel for kernel in operator.kernels if kernel.platform == platform), None)


def _belongs(call: FunctionType, family: str, operators: list[jaxops.Operator]) -> bool:
    module = call.__module__.rpartition(".")[2]
    normalizations = ("batch_normalization", "normalization", "sizes")
    places = {"spatial_transformer": ("affine_grid", "grid_sample")} | dict.fromkeys(normalizations, ("batch_norm",))
    return family in places.get(module, (module,))


def _notebook(name: str) -> str:
    return f"../notebooks/{name}.md"


def _results_last(name: str) -> tuple[bool, str]:
    return name[0].isupper(), name

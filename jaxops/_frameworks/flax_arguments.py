"""Arguments of Flax's modules: which values are refused, and which of several is meant."""

from collections.abc import Callable
from typing import Any, TypeVar

from jaxops._checks.arguments import BadParamError, NotSupportedError, require

T = TypeVar("T")
Constructor = TypeVar("Constructor", bound=Callable[..., None])


def check_batch_norm(name: str, *, axis: Any, axis_index_groups: Any) -> None:
    """Refuses arguments of the constructor of a batch norm."""
    require(axis == -1, name, "axis", "be -1", axis, error=NotSupportedError)
    rule = "be None, as statistics are shared over whole mesh axes"
    require(axis_index_groups is None, name, "axis_index_groups", rule, axis_index_groups, error=NotSupportedError)


def check_dropout(name: str, broadcast_dims: Any) -> None:
    """Refuses masks that repeat along axes."""
    rule = "be empty, as each element is drawn by itself"
    require(len(broadcast_dims) == 0, name, "broadcast_dims", rule, broadcast_dims, error=NotSupportedError)


def check_product(name: str, argument: str, product: Any, default: Any) -> None:
    """Refuses a layer's own product, which the loss would leave out."""
    rule = "be the default, as the loss has products of its own"
    require(product is default, name, argument, rule, product, error=NotSupportedError)


def with_signature_of(constructor: Callable[..., None]) -> Callable[[Constructor], Constructor]:
    """Lets a constructor that passes its arguments on show the signature of the one that takes them."""

    def marked(fn: Constructor) -> Constructor:
        vars(fn)["__wrapped__"] = constructor  # where `inspect.signature` looks
        return fn

    return marked


def first_present(name: str, argument: str, *values: T | None) -> T:
    """Returns the first value that is not None: that of the call, or else of the constructor."""
    for value in values:
        if value is not None:
            return value
    raise BadParamError(f"{name}: {argument} must be given to the constructor or in the call; got None")

"""Operators that chip vendors document, as JAX primitives: for models, optimizers and code ported from those chips."""

import importlib
from importlib import metadata
from typing import TYPE_CHECKING, Any

# First as a whole: threads that import two packages at once would each wait for modules that the other is importing.
import lowering  # noqa: F401
from jaxops._checks.arguments import BadParamError as BadParamError
from jaxops._checks.arguments import NotSupportedError as NotSupportedError
from jaxops._checks.arguments import VersionMismatchError as VersionMismatchError
from jaxops._primitive.derivative import Derivative as Derivative
from jaxops._primitive.operator import Operator as Operator
from jaxops._primitive.operator import operators as operators
from jaxops.activation import activation as activation
from jaxops.affine_grid import affine_grid as affine_grid
from jaxops.batch_norm import BatchNormOutput as BatchNormOutput
from jaxops.batch_norm import batch_norm as batch_norm
from jaxops.batch_norm import batch_norm_inference as batch_norm_inference
from jaxops.divisive_norm import divisive_norm as divisive_norm
from jaxops.dropout import dropout as dropout
from jaxops.dropout.rewrites import DROPOUT_MASKS
from jaxops.ema_adam.operator import APPLY_FUSED_EMA_ADAM  # noqa: F401  registered with the others, without optax
from jaxops.embedding import RowGradients as RowGradients
from jaxops.embedding import embedding as embedding
from jaxops.embedding import embedding_row_gradients as embedding_row_gradients
from jaxops.embedding.rewrites import EMBEDDING_LOOKUP
from jaxops.grid_sample import grid_sample as grid_sample
from jaxops.linear_cross_entropy import LinearCrossEntropyAux as LinearCrossEntropyAux
from jaxops.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from jaxops.linear_cross_entropy import linear_log_probs as linear_log_probs
from jaxops.linear_cross_entropy.rewrites import CROSS_ENTROPY, CROSS_ENTROPY_SUM, ROW_CONE, ROW_CONE_SUM
from jaxops.local_response_norm import local_response_norm as local_response_norm
from jaxops.nll_loss import nll_loss as nll_loss
from jaxops.pooling import avg_pool as avg_pool
from jaxops.pooling import max_pool as max_pool
from jaxops.pooling.rewrites import WINDOW_MAXIMA
from jaxops.softmax import softmax as softmax
from jaxops.tune_device import tune_device as tune_device
from lowering import use as use
from lowering.rewriting.rules import add_rules

if TYPE_CHECKING:
    from jaxops import aclnn as aclnn
    from jaxops import mcdnn as mcdnn
    from jaxops import testing as testing
    from jaxops.ema_adam.api import ema_adam as ema_adam
    from jaxops.ema_adam.api import ema_params as ema_params
    from jaxops.ema_adam.ema_adam_rows import ema_adam_rows as ema_adam_rows
    from jaxops.ema_adam.fused_apply import fused_apply as fused_apply

    __version__: str

__all__ = [
    "BadParamError",
    "BatchNormOutput",
    "Derivative",
    "LinearCrossEntropyAux",
    "NotSupportedError",
    "Operator",
    "RowGradients",
    "VersionMismatchError",
    "aclnn",
    "activation",
    "affine_grid",
    "avg_pool",
    "batch_norm",
    "batch_norm_inference",
    "divisive_norm",
    "dropout",
    "ema_adam",
    "ema_adam_rows",
    "ema_params",
    "embedding",
    "embedding_row_gradients",
    "fused_apply",
    "grid_sample",
    "linear_cross_entropy",
    "linear_log_probs",
    "local_response_norm",
    "max_pool",
    "mcdnn",
    "nll_loss",
    "operators",
    "softmax",
    "testing",
    "tune_device",
    "use",
]

# Imported when they are first asked for: optax alone takes 0.1 s, and few programs need both vendors' calls. Those for
# Flax and Equinox are not in `__all__`, because `from jaxops import *` would need these packages.
_IMPORTED_LATER = {
    "aclnn": "jaxops.aclnn",
    "ema_adam": "jaxops.ema_adam.api",
    "ema_adam_rows": "jaxops.ema_adam.ema_adam_rows",
    "ema_params": "jaxops.ema_adam.api",
    "equinox": "jaxops.equinox",
    "fused_apply": "jaxops.ema_adam.fused_apply",
    "linen": "jaxops.linen",
    "mcdnn": "jaxops.mcdnn",
    "nnx": "jaxops.nnx",
    "testing": "jaxops.testing",
}
add_rules((CROSS_ENTROPY_SUM, ROW_CONE_SUM, CROSS_ENTROPY, ROW_CONE, WINDOW_MAXIMA, EMBEDDING_LOOKUP, DROPOUT_MASKS))

# The import of its operator has bound this name to the package, which would keep the function of that name hidden.
globals().pop("ema_adam", None)


def __getattr__(name: str) -> Any:
    if name == "__version__":  # pyproject.toml says it, and nothing else does
        return metadata.version("jaxops")
    if name not in _IMPORTED_LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_IMPORTED_LATER[name])
    value = getattr(module, name, module)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

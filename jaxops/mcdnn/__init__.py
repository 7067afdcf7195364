"""The training calls of mcDNN: documented checks and statuses, computed by JAX operators.

Names are mcDNN's in snake case, without its prefix and the handle. What the calls share is described here; each
function describes the rest. `jaxops.mcdnn.norm` does the same for batch normalization and normalization.

Shared arguments:
  desc: the descriptor, such as a `PoolingDescriptor`. Backward calls take that of the forward call.
  x: the data; float16, bfloat16, float32 or float64.
  y: in forward calls the prior: what the output held before, with the output's shape and dtype. In backward calls the
    stored result of the forward call.
  dy: the gradient of y, with its shape and dtype.
  dx: in backward calls the prior, with the shape and dtype of x.
  alpha: the factor of the result: a Python or NumPy number, or a traced scalar.
  beta: the factor of the prior, likewise. At 0 the prior is not read; a traced beta always needs one.
  layout: "NCHW", "NHWC", "NCDHW" or "NDHWC"; None means channels first, by the rank of x.
  strict: in the calls that have it, whether to refuse what they support but the documents do not.

An enumeration is given as a member, its name or its number: `SoftmaxMode.CHANNEL`, "CHANNEL", 1, or as in C,
"MCDNN_SOFTMAX_MODE_CHANNEL". Descriptors are not arrays: under jit, build them inside the function, or mark them as
static arguments. Inside `jax.shard_map`, statistics are those of the device's own part; `jaxops.batch_norm` shares
them, with `axis_name`.

Shared errors, unless a function says otherwise:
  BadParamError: status MCDNN_STATUS_BAD_PARAM. A required argument, or a prior that beta needs, is None; a prior
    differs from its output in shape or dtype; an enumeration does not have the member; the layout is unknown or does
    not fit the rank of x.
  NotSupportedError: status MCDNN_STATUS_NOT_SUPPORTED. The dtype is not listed above, or the layout is vectorised.

Numerics: results are computed and blended in float32 (float64 for float64) and rounded once.

These documented errors cannot arise: a missing handle, output or scratch memory (there are no handles, outputs are
returned, and XLA allocates); strides that differ (JAX's arrays are packed); calls in place (a result never lies in an
operand; to reuse a buffer, donate it to jit).
"""

import jaxops  # noqa: F401  waits until another thread has imported it
from jaxops._checks.arguments import VersionMismatchError
from jaxops.mcdnn.activation import activation_backward as activation_backward
from jaxops.mcdnn.activation import activation_forward as activation_forward
from jaxops.mcdnn.descriptors import ActivationDescriptor as ActivationDescriptor
from jaxops.mcdnn.descriptors import DropoutDescriptor as DropoutDescriptor
from jaxops.mcdnn.descriptors import LRNDescriptor as LRNDescriptor
from jaxops.mcdnn.descriptors import PoolingDescriptor as PoolingDescriptor
from jaxops.mcdnn.descriptors import SpatialTransformerDescriptor as SpatialTransformerDescriptor
from jaxops.mcdnn.divisive_norm import (
    divisive_normalization_backward as divisive_normalization_backward,
)
from jaxops.mcdnn.divisive_norm import (
    divisive_normalization_forward as divisive_normalization_forward,
)
from jaxops.mcdnn.dropout import dropout_backward as dropout_backward
from jaxops.mcdnn.dropout import dropout_forward as dropout_forward
from jaxops.mcdnn.dropout import dropout_get_reserve_space_size as dropout_get_reserve_space_size
from jaxops.mcdnn.enums import ActivationMode as ActivationMode
from jaxops.mcdnn.enums import BatchNormMode as BatchNormMode
from jaxops.mcdnn.enums import BatchNormOps as BatchNormOps
from jaxops.mcdnn.enums import DivNormMode as DivNormMode
from jaxops.mcdnn.enums import LRNMode as LRNMode
from jaxops.mcdnn.enums import NanPropagation as NanPropagation
from jaxops.mcdnn.enums import NormAlgo as NormAlgo
from jaxops.mcdnn.enums import NormMode as NormMode
from jaxops.mcdnn.enums import NormOps as NormOps
from jaxops.mcdnn.enums import PoolingMode as PoolingMode
from jaxops.mcdnn.enums import SamplerType as SamplerType
from jaxops.mcdnn.enums import SoftmaxAlgorithm as SoftmaxAlgorithm
from jaxops.mcdnn.enums import SoftmaxMode as SoftmaxMode
from jaxops.mcdnn.local_response_norm import lrn_cross_channel_backward as lrn_cross_channel_backward
from jaxops.mcdnn.local_response_norm import lrn_cross_channel_forward as lrn_cross_channel_forward
from jaxops.mcdnn.norm.batch_normalization import BatchNormTraining as BatchNormTraining
from jaxops.mcdnn.norm.batch_normalization import batch_normalization_backward as batch_normalization_backward
from jaxops.mcdnn.norm.batch_normalization import batch_normalization_backward_ex as batch_normalization_backward_ex
from jaxops.mcdnn.norm.batch_normalization import (
    batch_normalization_forward_inference as batch_normalization_forward_inference,
)
from jaxops.mcdnn.norm.batch_normalization import (
    batch_normalization_forward_training as batch_normalization_forward_training,
)
from jaxops.mcdnn.norm.batch_normalization import (
    batch_normalization_forward_training_ex as batch_normalization_forward_training_ex,
)
from jaxops.mcdnn.norm.calls import BatchNormTrainingEx as BatchNormTrainingEx
from jaxops.mcdnn.norm.checks import BN_MIN_EPSILON as BN_MIN_EPSILON
from jaxops.mcdnn.norm.normalization import normalization_backward as normalization_backward
from jaxops.mcdnn.norm.normalization import normalization_forward_inference as normalization_forward_inference
from jaxops.mcdnn.norm.normalization import normalization_forward_training as normalization_forward_training
from jaxops.mcdnn.norm.sizes import (
    get_batch_normalization_backward_ex_workspace_size as get_batch_normalization_backward_ex_workspace_size,
)
from jaxops.mcdnn.norm.sizes import (
    get_batch_normalization_forward_training_ex_workspace_size,
)
from jaxops.mcdnn.norm.sizes import (
    get_batch_normalization_training_ex_reserve_space_size as get_batch_normalization_training_ex_reserve_space_size,
)
from jaxops.mcdnn.norm.sizes import (
    get_normalization_backward_workspace_size as get_normalization_backward_workspace_size,
)
from jaxops.mcdnn.norm.sizes import (
    get_normalization_forward_training_workspace_size as get_normalization_forward_training_workspace_size,
)
from jaxops.mcdnn.norm.sizes import (
    get_normalization_training_reserve_space_size as get_normalization_training_reserve_space_size,
)
from jaxops.mcdnn.pooling import pooling_backward as pooling_backward
from jaxops.mcdnn.pooling import pooling_forward as pooling_forward
from jaxops.mcdnn.softmax import softmax_backward as softmax_backward
from jaxops.mcdnn.softmax import softmax_forward as softmax_forward
from jaxops.mcdnn.spatial_transformer import (
    spatial_tf_grid_generator_backward as spatial_tf_grid_generator_backward,
)
from jaxops.mcdnn.spatial_transformer import (
    spatial_tf_grid_generator_forward as spatial_tf_grid_generator_forward,
)
from jaxops.mcdnn.spatial_transformer import spatial_tf_sampler_backward as spatial_tf_sampler_backward
from jaxops.mcdnn.spatial_transformer import spatial_tf_sampler_forward as spatial_tf_sampler_forward

__all__ = [
    "BN_MIN_EPSILON",
    "OPS_INFER_VERSION",
    "OPS_TRAIN_VERSION",
    "ActivationDescriptor",
    "ActivationMode",
    "BatchNormMode",
    "BatchNormOps",
    "BatchNormTraining",
    "BatchNormTrainingEx",
    "DivNormMode",
    "DropoutDescriptor",
    "LRNDescriptor",
    "LRNMode",
    "NanPropagation",
    "NormAlgo",
    "NormMode",
    "NormOps",
    "PoolingDescriptor",
    "PoolingMode",
    "SamplerType",
    "SoftmaxAlgorithm",
    "SoftmaxMode",
    "SpatialTransformerDescriptor",
    "activation_backward",
    "activation_forward",
    "batch_normalization_backward",
    "batch_normalization_backward_ex",
    "batch_normalization_forward_inference",
    "batch_normalization_forward_training",
    "batch_normalization_forward_training_ex",
    "divisive_normalization_backward",
    "divisive_normalization_forward",
    "dropout_backward",
    "dropout_forward",
    "dropout_get_reserve_space_size",
    "get_batch_normalization_backward_ex_workspace_size",
    "get_batch_normalization_forward_training_ex_workspace_size",
    "get_batch_normalization_training_ex_reserve_space_size",
    "get_normalization_backward_workspace_size",
    "get_normalization_forward_training_workspace_size",
    "get_normalization_training_reserve_space_size",
    "lrn_cross_channel_backward",
    "lrn_cross_channel_forward",
    "normalization_backward",
    "normalization_forward_inference",
    "normalization_forward_training",
    "ops_train_version_check",
    "pooling_backward",
    "pooling_forward",
    "softmax_backward",
    "softmax_forward",
    "spatial_tf_grid_generator_backward",
    "spatial_tf_grid_generator_forward",
    "spatial_tf_sampler_backward",
    "spatial_tf_sampler_forward",
]

# The versions of the two halves of the documented library, major * 1000 + minor * 100 + patch. They are one here; a
# program that replaces a half changes its number.
OPS_INFER_VERSION = 100
OPS_TRAIN_VERSION = 100


def ops_train_version_check() -> None:
    """Checks that the training half and the inference half have the same version.

    Raises:
      VersionMismatchError: status MCDNN_STATUS_VERSION_MISMATCH if OPS_TRAIN_VERSION differs from OPS_INFER_VERSION.

    Example:
      >>> jaxops.mcdnn.ops_train_version_check()
      >>> jaxops.mcdnn.OPS_TRAIN_VERSION
      100

    Source: mcDNN `mcdnnOpsTrainVersionCheck`.
    """
    if OPS_TRAIN_VERSION != OPS_INFER_VERSION:
        raise VersionMismatchError(
            f"ops_train_version_check: OPS_TRAIN_VERSION must be OPS_INFER_VERSION, {OPS_INFER_VERSION!r}; "
            f"got {OPS_TRAIN_VERSION!r}",
            "MCDNN_STATUS_VERSION_MISMATCH",
        )

"""The CANN `aclnn` calls under their own names, with their documented checks and statuses."""

import jaxops  # noqa: F401  waits until another thread has imported it
from jaxops.aclnn.ema_adam import apply_fused_ema_adam as apply_fused_ema_adam
from jaxops.aclnn.embedding import embedding_dense_backward as embedding_dense_backward
from jaxops.aclnn.linear_cross_entropy import OnlineMaxSum as OnlineMaxSum
from jaxops.aclnn.linear_cross_entropy import (
    fused_cross_entropy_loss_with_max_sum as fused_cross_entropy_loss_with_max_sum,
)
from jaxops.aclnn.linear_cross_entropy import (
    fused_linear_cross_entropy_loss_grad as fused_linear_cross_entropy_loss_grad,
)
from jaxops.aclnn.linear_cross_entropy import fused_linear_online_max_sum as fused_linear_online_max_sum
from jaxops.aclnn.nll_loss import nll_loss as nll_loss
from jaxops.aclnn.nll_loss import nll_loss2d as nll_loss2d
from jaxops.aclnn.nll_loss import nll_loss2d_backward as nll_loss2d_backward
from jaxops.aclnn.nll_loss import nll_loss_backward as nll_loss_backward
from jaxops.aclnn.workspace import get_workspace_size as get_workspace_size

__all__ = [
    "OnlineMaxSum",
    "apply_fused_ema_adam",
    "embedding_dense_backward",
    "fused_cross_entropy_loss_with_max_sum",
    "fused_linear_cross_entropy_loss_grad",
    "fused_linear_online_max_sum",
    "get_workspace_size",
    "nll_loss",
    "nll_loss2d",
    "nll_loss2d_backward",
    "nll_loss_backward",
]

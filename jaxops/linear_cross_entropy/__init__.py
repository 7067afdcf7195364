"""Linear cross entropy: a loss straight from hidden states, and the documented operators for a split vocabulary."""

from jaxops.linear_cross_entropy.api import LinearCrossEntropyAux as LinearCrossEntropyAux
from jaxops.linear_cross_entropy.api import linear_cross_entropy as linear_cross_entropy
from jaxops.linear_cross_entropy.linear_log_probs import linear_log_probs as linear_log_probs
from jaxops.linear_cross_entropy.vocab_parallel import OnlineMaxSum as OnlineMaxSum
from jaxops.linear_cross_entropy.vocab_parallel import (
    fused_cross_entropy_loss_with_max_sum as fused_cross_entropy_loss_with_max_sum,
)
from jaxops.linear_cross_entropy.vocab_parallel import (
    fused_linear_cross_entropy_loss_grad as fused_linear_cross_entropy_loss_grad,
)
from jaxops.linear_cross_entropy.vocab_parallel import fused_linear_online_max_sum as fused_linear_online_max_sum

"""Linear cross entropy: a loss straight from hidden states; `jaxops.aclnn` has the calls for a split vocabulary."""

from jaxops.linear_cross_entropy.api import LinearCrossEntropyAux as LinearCrossEntropyAux
from jaxops.linear_cross_entropy.api import linear_cross_entropy as linear_cross_entropy
from jaxops.linear_cross_entropy.linear_log_probs import linear_log_probs as linear_log_probs

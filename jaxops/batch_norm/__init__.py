"""Batch normalization: zero mean and unit variance over a batch, with an optional activation and residual."""

from jaxops.batch_norm.api import BatchNormOutput as BatchNormOutput
from jaxops.batch_norm.api import batch_norm as batch_norm
from jaxops.batch_norm.api import batch_norm_inference as batch_norm_inference
from jaxops.batch_norm.backward import BATCH_NORM_BACKWARD as BATCH_NORM_BACKWARD
from jaxops.batch_norm.operator import BATCH_NORM as BATCH_NORM
from jaxops.batch_norm.operator import BATCH_NORM_INFERENCE as BATCH_NORM_INFERENCE

"""Pooling: maxima and averages of windows over images, with their documented gradients."""

from jaxops.pooling.avg_pool import AVG_POOL as AVG_POOL
from jaxops.pooling.avg_pool import AVG_POOL_BACKWARD as AVG_POOL_BACKWARD
from jaxops.pooling.avg_pool import avg_pool as avg_pool
from jaxops.pooling.max_pool import MAX_POOL as MAX_POOL
from jaxops.pooling.max_pool import MAX_POOL_AT as MAX_POOL_AT
from jaxops.pooling.max_pool import MAX_POOL_BACKWARD as MAX_POOL_BACKWARD
from jaxops.pooling.max_pool import max_pool as max_pool

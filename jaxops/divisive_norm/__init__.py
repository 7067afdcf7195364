"""Divisive normalization: divides images by a power of their deviations from given means, around each pixel."""

from jaxops.divisive_norm.api import divisive_norm as divisive_norm
from jaxops.divisive_norm.operator import DIVISIVE_NORM as DIVISIVE_NORM
from jaxops.divisive_norm.operator import DIVISIVE_NORM_BACKWARD as DIVISIVE_NORM_BACKWARD
from jaxops.divisive_norm.operator import Images as Images
from jaxops.divisive_norm.operator import window_of as window_of

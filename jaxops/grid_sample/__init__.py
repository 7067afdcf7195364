"""Grid sampling: images and volumes interpolated between their pixels, and the gradients of both operands."""

from jaxops.grid_sample.api import grid_sample as grid_sample
from jaxops.grid_sample.operator import GRID_SAMPLE as GRID_SAMPLE
from jaxops.grid_sample.operator import GRID_SAMPLE_3D as GRID_SAMPLE_3D
from jaxops.grid_sample.operator import GRID_SAMPLE_3D_BACKWARD as GRID_SAMPLE_3D_BACKWARD
from jaxops.grid_sample.operator import GRID_SAMPLE_BACKWARD as GRID_SAMPLE_BACKWARD
from pallas_kernels.grid_sample_points import Sampling as Sampling

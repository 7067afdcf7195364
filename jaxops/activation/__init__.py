"""Elementwise activations and their documented gradients."""

from jaxops.activation.api import activation as activation
from jaxops.activation.operator import ACTIVATION as ACTIVATION
from jaxops.activation.operator import ACTIVATION_BACKWARD as ACTIVATION_BACKWARD

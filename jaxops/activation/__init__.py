"""Activations: functions of one element, and the gradients that are documented for them."""

from jaxops.activation.api import activation as activation
from jaxops.activation.operator import ACTIVATION as ACTIVATION
from jaxops.activation.operator import ACTIVATION_BACKWARD as ACTIVATION_BACKWARD

"""RMS normalization: an operator of its own, with a kernel for TPUs."""

from jaxops_rms_norm.operator import RMS_NORM as RMS_NORM
from jaxops_rms_norm.operator import RMS_NORM_BACKWARD as RMS_NORM_BACKWARD
from jaxops_rms_norm.operator import rms_norm as rms_norm
from jaxops_rms_norm.rule import RMS_NORM_IN_JNP
from lowering.rewriting.rules import add_rules

__all__ = ["RMS_NORM", "RMS_NORM_BACKWARD", "rms_norm"]

add_rules((RMS_NORM_IN_JNP,))

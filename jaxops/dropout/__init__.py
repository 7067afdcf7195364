"""Dropout with a mask of one bit per element."""

from jaxops.dropout.api import dropout as dropout
from jaxops.dropout.operator import DROPOUT as DROPOUT
from jaxops.dropout.operator import DROPOUT_BACKWARD as DROPOUT_BACKWARD

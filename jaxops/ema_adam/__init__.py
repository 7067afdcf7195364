"""EMA-Adam, which averages parameters while it updates them: the operator, optax transforms, and one-pass steps."""

from jaxops.ema_adam.api import EmaParamsState as EmaParamsState
from jaxops.ema_adam.api import ema_adam as ema_adam
from jaxops.ema_adam.api import ema_params as ema_params
from jaxops.ema_adam.ema_adam_rows import ema_adam_rows as ema_adam_rows
from jaxops.ema_adam.fused_apply import fused_apply as fused_apply
from jaxops.ema_adam.operator import APPLY_FUSED_EMA_ADAM as APPLY_FUSED_EMA_ADAM

"""Arrays that are a part of a compiled program, as the program's text says what they hold."""

import re

import jax.numpy as jnp
import numpy as np

from lowering.tpu_core.dumps import Dumps
from lowering.tpu_core.faults import UnknownFormError
from lowering.tpu_core.layouts import places_of

_LITERAL = re.compile(r"#(allocation\d+) \[shape = '([^']*)', space=hbm, [^\n]*tag = 'constant literal'")
_CALL = re.compile(r"inlined_call ([^/\n]*?) /\* %[\w.\-]+ = [\w\-]+\(([^)]*)\)")
_VALUES = re.compile(r" constant\((.*?)\)(?=,|$)", re.DOTALL)
_NUMBER = re.compile(r"-?(?:inf|nan|\d[\d.]*(?:e[-+]?\d+)?)|true|false")
_TRUTH = {"true": 1, "false": 0}
_DTYPES = {
    **{"f32": np.float32, "bf16": jnp.bfloat16, "s32": np.int32, "u32": np.uint32, "s16": np.int16, "u16": np.uint16},
    **{"s8": np.int8, "u8": np.uint8, "pred": np.bool_},
}


def literals_of(dumps: Dumps, allocated: str) -> dict[str, tuple[str, np.ndarray]]:
    """Returns the type and the values of each array that lies in HBM before a program starts, by allocation.

    Raises:
      UnknownFormError: if it cannot be read; or if several have one type, and no call says which of them it takes.
    """
    constants = {name: one for name, one in dumps.instructions.items() if one.opcode == "constant"}
    named = {
        argument.strip("[#]"): operand.strip("%")
        for arguments, operands in _CALL.findall(allocated)
        for argument, operand in zip(arguments.split(", "), operands.split(", "), strict=False)  # results follow
    }
    found = {}
    for name, array_type in _LITERAL.findall(allocated):
        own = constants.get(named.get(name, ""))
        texts = {one.text for one in ([own] if own is not None else constants.values()) if one.type == array_type}
        if len(texts) != 1:
            raise UnknownFormError(f"nobody says what an array of the program of type {array_type} holds")
        found[name] = array_type, _array(texts.pop(), array_type)
    return found


def _array(text: str, array_type: str) -> np.ndarray:
    values = _VALUES.search(re.sub(r"/\*.*?\*/", "", text))
    dtype, shape = _DTYPES.get(array_type.partition("[")[0]), places_of(array_type)[1]
    numbers = [float(_TRUTH.get(one, one)) for one in _NUMBER.findall(values[1])] if values is not None else []
    if dtype is None or values is None or len(numbers) != np.prod(shape):
        raise UnknownFormError(f"an array of the program of type {array_type} cannot be read")
    return np.array(numbers).astype(dtype).reshape(shape)

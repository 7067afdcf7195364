"""Arrays that are a part of a compiled program, as the program's text says what they hold."""

import re

import jax.numpy as jnp
import numpy as np

from lowering.emulation.faults import UnknownFormError
from lowering.schedule.dumps import Dumps
from lowering.schedule.layouts import places_of

_LITERAL = re.compile(r"#(allocation\d+) \[shape = '([^']*)', space=hbm, [^\n]*tag = 'constant literal'")
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
      UnknownFormError: if it cannot be read, or if several have one type, as no dump says which of them is which.
    """
    found = {}
    for name, array_type in _LITERAL.findall(allocated):
        texts = [one.text for one in dumps.instructions.values() if one.opcode == "constant" and one.type == array_type]
        values = _VALUES.search(re.sub(r"/\*.*?\*/", "", texts[0])) if len(texts) == 1 else None
        dtype, shape = _DTYPES.get(array_type.partition("[")[0]), places_of(array_type)[1]
        numbers = [float(_TRUTH.get(one, one)) for one in _NUMBER.findall(values[1])] if values is not None else []
        if dtype is None or values is None or len(numbers) != np.prod(shape):
            which = f"{'one of several arrays' if len(texts) > 1 else 'an array'} of type {array_type}"
            raise UnknownFormError(f"nobody says what is in {which} that fn closes over")
        found[name] = array_type, np.array(numbers).astype(dtype).reshape(shape)
    return found

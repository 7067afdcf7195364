"""Names an operator and its operands in the metadata of what it is lowered to, where schedules and profiles show it."""

import itertools
import re
from collections.abc import Sequence

from lowering import registry


def scope(operator: str, operands: Sequence[str]) -> str:
    """Names an operator at these operands, as `measurements.type_text` writes them: "softmax(f32[8,128])"."""
    return f"{operator}({brief(operands)})"


def operator_in(op_name: str) -> str:
    """Returns the outermost operator in an instruction's `op_name`, as `scope` has named it; "" for none."""
    operators = {operator.name for operator in registry.operators()}
    parts = op_name.split("/")
    return next((part for part in parts if "(" in part and part.partition("(")[0] in operators), "")


def brief(operands: Sequence[str]) -> str:
    """Returns operands as jaxprs write them, equal neighbours once; leaves out those of size 0: they are absent."""
    short = (re.sub(r"^(bf|f|u|i)(?:loat|int|nt)(?=\d)", r"\1", operand) for operand in operands)
    present = (operand for operand in short if not re.search(r"\b0\b", operand))
    groups = ((operand, len(list(group))) for operand, group in itertools.groupby(present))
    return ", ".join(operand if number == 1 else f"{number} x {operand}" for operand, number in groups)

"""Activations and their documented slopes in NumPy float64."""

import numpy as np

# Between the corners, on them, far out, and beyond everything; a corner of "clipped_relu" is at its coefficient, 0.75.
POINTS = np.array(
    [-np.inf, -1e4, -100, -30.25, -2.5, -0.75, -1e-3, -0.0, 0.0, 1e-3, 0.5, 0.75, 2.5, 30.25, 100, 1e4, np.inf]
)
COEFFICIENTS = {"clipped_relu": 0.75, "elu": 0.625, "swish": 1.25}
MODES = ("sigmoid", "relu", "tanh", "clipped_relu", "elu", "identity", "swish")


def value(mode, x, coef):
    """The formulas of the document, and their limits at infinities."""
    with np.errstate(over="ignore", invalid="ignore"):
        match mode:
            case "sigmoid":
                return 1 / (1 + np.exp(-x))
            case "relu":
                return np.where(np.isnan(x), x, np.where(x > 0, x, 0))
            case "tanh":
                return np.tanh(x)
            case "clipped_relu":
                return np.where(np.isnan(x), x, np.minimum(np.where(x > 0, x, 0), coef))
            case "elu":
                return np.where(x > 0, x, coef * (np.exp(np.where(x > 0, 0, x)) - 1))
            case "identity":
                return x
            case "swish":
                return np.where(x == -np.inf, 0, x / (1 + np.exp(-coef * x)))


def slope(mode, x, coef):
    """The derivative, at corners what the document says."""
    y = value(mode, x, coef)
    with np.errstate(over="ignore", invalid="ignore"):
        match mode:
            case "sigmoid" | "relu" | "tanh" | "elu":
                return slope_of_result(mode, y, coef)
            case "clipped_relu":
                return ((x > 0) & (x < coef)).astype(float)
            case "identity":
                return np.ones_like(x)
            case "swish":
                s = 1 / (1 + np.exp(-coef * x))
                return np.where(np.isinf(x), s, s + coef * x * s * (1 - s))


def slope_of_result(mode, y, coef):
    """The same from the activation's result, as the document has it."""
    match mode:
        case "sigmoid":
            return y * (1 - y)
        case "relu":
            return (y > 0).astype(float)
        case "tanh":
            return 1 - y**2
        case "elu":
            return np.where(y > 0, 1, y + coef)

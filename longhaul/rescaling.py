"""R2D2's rescaling of values: h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x, and its inverse.

Source: "Recurrent Experience Replay in Distributed Reinforcement Learning" (Kapturowski et al. 2019), section 2.3, from
"Observe and Look Further" (Pohlen et al. 2018), proposition A.2. Both are written so that nothing cancels near zero in
float32, and with arithmetic alone, so that they take a float, a numpy array or a jax array alike.
"""

from typing import Any

EPSILON = 1e-3


def rescale(x: Any) -> Any:
    """Returns h(x), elementwise: sign(x) (sqrt(|x| + 1) - 1) is x / (sqrt(|x| + 1) + 1)."""
    return x / ((abs(x) + 1.0) ** 0.5 + 1.0) + EPSILON * x


def unscale(x: Any) -> Any:
    """Returns h^-1(x), elementwise.

    The source's sign(x) (y^2 - 1), with y = (s - 1) / (2 epsilon) and s = sqrt(1 + 4 epsilon (|x| + 1 + epsilon)): here
    (y - 1) / |x| and y + 1 are multiplied, each free of differences of near numbers.
    """
    size = abs(x)
    s = (1.0 + 4.0 * EPSILON * (size + (1.0 + EPSILON))) ** 0.5
    y_plus_1 = 2.0 * (size + (1.0 + EPSILON)) / (s + 1.0) + 1.0
    y_minus_1_over_size = (2.0 - 4.0 * EPSILON / (s + (1.0 + 2.0 * EPSILON))) / (s + 1.0)
    return x * y_plus_1 * y_minus_1_over_size

"""How each ZeRO stage cuts a model into rank files: pure arithmetic, one file a layout.

A layout is given integers (shapes, lengths, world size) and answers where each parameter lies, in
elements. It knows neither files nor element types.
"""

from __future__ import annotations


class LayoutError(Exception):
    """The numbers in a checkpoint contradict its layout.

    Attributes:
        problem: what does not fit, without a full stop.
        found, expected: the two numbers (or lists of numbers) that differ.
    """

    def __init__(self, problem: str, found: object, expected: object) -> None:
        super().__init__(problem)
        self.problem = problem
        self.found = found
        self.expected = expected

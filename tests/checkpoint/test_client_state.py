"""Tables that the training's own code saved are looked through for weights of its names."""

from __future__ import annotations

from zexport.checkpoint.client_state import _tables


def test_a_table_that_many_lead_to_is_looked_into_once() -> None:
    shared: dict[str, object] = {}
    for _ in range(3):
        shared = {str(number): shared for number in range(300)}
    paths = [path for path, _ in _tables({"callbacks": shared}, 3, set())]
    assert paths == ["callbacks", "callbacks.0", "callbacks.0.0"]

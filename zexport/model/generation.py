"""The generation config by itself: tokens that it forbids, and values that nothing is made with."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from zexport.facts.model import Fact
from zexport.facts.statements import Statement
from zexport.filenames import GENERATION_CONFIG
from zexport.model.sidecars import Files
from zexport.model.special_tokens import numbers_in
from zexport.model.tokenizer import table_of
from zexport.store.json import JsonObject, as_list

_SAMPLING = {"temperature": (0, 1), "top_p": (1,), "top_k": (0, 50)}
"""Settings that only sampling goes by, with the values that say nothing."""

_LEAST_SAMPLED = {"temperature": "above 0", "typical_p": "above 0", "top_p": "0 or more"}
_LEAST_SAMPLED |= dict.fromkeys(("top_k", "min_p"), "0 or more")
_LEAST = {"repetition_penalty": "above 0", "max_new_tokens": "above 0", "num_beams": "above 0"}
"""Settings, where texts are sampled and always, with the numbers that they may be.

Source: transformers 5.23, ``generation/logits_process.py`` and ``configuration_utils.py``.
"""


def generation_statements(files: Files) -> Iterator[Statement]:
    """What a generation config says of tokens that it forbids, and of settings.

    Source: transformers 5.23, ``generation/configuration_utils.py`` (``validate``).
    """
    table = table_of(files, GENERATION_CONFIG)
    ends, words = numbers_in(table.get("eos_token_id")), as_list(table.get("bad_words_ids"))
    alone = [word for word in words if len(numbers_in(word)) == 1]
    forbidden = {*numbers_in(table.get("suppress_tokens")), *chain(*map(numbers_in, alone))}
    if ends and forbidden.issuperset(ends):
        yield Statement(Fact.END_FORBIDDEN, ends, "eos_token_id")
        yield Statement(Fact.END_FORBIDDEN, "none of these", "what may be made")
    if ends and (forced := numbers_in(table.get("forced_eos_token_id"))):
        yield Statement(Fact.END_FORCED, ends, "eos_token_id")
        yield Statement(Fact.END_FORCED, forced, "forced_eos_token_id")
    for key, neutral in _SAMPLING.items() if table.get("do_sample") is False else ():
        if (value := table.get(key)) not in (None, *neutral):
            yield Statement(Fact.UNUSED_SETTING, "not sampled", "do_sample", key)
            yield Statement(Fact.UNUSED_SETTING, value, key, key)
    yield from _impossible(table)


def _impossible(table: JsonObject) -> Iterator[Statement]:
    """Settings with which generating ends in an error."""
    least = {**_LEAST, **(_LEAST_SAMPLED if table.get("do_sample") is True else {})}
    for key, allowed in least.items():
        value = table.get(key)
        if isinstance(value, int | float) and (value < 0 or (value == 0 and "above" in allowed)):
            yield Statement(Fact.SETTING_RANGE, value, GENERATION_CONFIG, key)
            yield Statement(Fact.SETTING_RANGE, allowed, "what can be generated with", key)

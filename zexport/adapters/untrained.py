"""Whether an adapter changes anything: until its first step, one of its two factors is zero."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from zexport.adapters.peft_names import read_name
from zexport.checkpoint.contents import StoredTensor
from zexport.facts.adapters import AdapterFact
from zexport.facts.statements import Statement
from zexport.ranges.reader import ReadableFile, SourceReader
from zexport.weights.named import Weights

_SECOND = ("lora_B.weight", "lora_embedding_B")
"""What peft begins with zeros (0.19, ``tuners/lora/layer.py``, ``reset_lora_parameters``)."""

_CHUNK_NBYTES = 1 << 16


def effect_statements(
    adapter: str, stored: Weights, files: Iterable[ReadableFile]
) -> Iterator[Statement]:
    """What an adapter's second factors are; of a trained one, little more than one is read."""
    named = ((read_name(name), tensor) for name, tensor in stored.every_tensor.items())
    factors = [
        t for part, t in named if part.adapter == adapter and t.name.endswith(_ends(adapter))
    ]
    with SourceReader(files) as reader:
        if factors and all(_is_zero(reader, one) for one in factors):
            yield Statement(AdapterFact.ADAPTER_EFFECT, "zero", f"every lora_B of {adapter!r}")
            yield Statement(
                AdapterFact.ADAPTER_EFFECT, "other values", "an adapter that was trained"
            )


def _ends(adapter: str) -> tuple[str, ...]:
    """How the names of second factors end in memory."""
    parts = (one.partition(".") for one in _SECOND)
    return tuple(".".join(filter(None, (name, adapter, rest))) for name, _, rest in parts)


def _is_zero(reader: SourceReader, tensor: StoredTensor) -> bool:
    if tensor.source is None:
        return False
    buffer = memoryview(bytearray(_CHUNK_NBYTES))
    for start in range(0, tensor.source.nbytes, _CHUNK_NBYTES):
        part = buffer[: min(_CHUNK_NBYTES, tensor.source.nbytes - start)]
        reader.read_into(tensor.source, start, part)
        if any(part):
            return False
    return True

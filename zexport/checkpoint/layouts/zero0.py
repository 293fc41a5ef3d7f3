"""ZeRO-0: everything in one model file, the fp32 masters unnamed inside its optimizer.

Which values are exported:

1. fp32 masters, where the optimizer holds some, under the names that shape and order allow
   (``master_matching``): by shape alone where that leaves one possibility, else by shape and
   by samples of the values, rounded. Where the order does not fit at all, a master is still the
   weight's that it alone is like; one that is like none, while weights of its shape are left over,
   is a contradiction.
2. The module's own values for buffers and for weights that no master belongs to (frozen ones), and
   for all weights where the optimizer holds no masters.
3. The module's own values, and a note that names them, for weights whose master cannot be told from
   others. A checkpoint none of whose masters is a weight's beyond doubt is refused.

Every master is to be compared with the module's weight, by
``zexport.ranges.replicas``, when it is exported: opening reads no values but the
samples, and those only where shapes do not tell.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from zexport.checkpoint.contents import Inventory, Role, StoredTensor
from zexport.checkpoint.layouts.master_matching import Master, Masters, Weight
from zexport.checkpoint.layouts.unnamed_masters import find_masters
from zexport.checkpoint.layouts.zero import stored_buffers
from zexport.checkpoint.model_states import ModelStates
from zexport.checkpoint.module_names import same_views
from zexport.errors import DamagedCheckpointError
from zexport.findings import FindingKind
from zexport.formats.inert import TensorRef
from zexport.formats.torch_file import TorchFile
from zexport.printable import some
from zexport.ranges.dtypes import DType
from zexport.ranges.reader import SourceReader
from zexport.ranges.replicas import CastReplica, fingerprint


def take_zero0_inventory(model: ModelStates, *, unmastered: Collection[str] = ()) -> Inventory:
    """The tensors of a ZeRO-0 model file; see the module's docstring for which values are taken."""
    distinct, aliases = _distinct(model)
    weights = weights_of(model, distinct)
    masters = find_masters(model.file, weights)
    if unmastered:
        kept = {name: one for name, one in masters.found.items() if name not in unmastered}
        doubt = masters.doubt or "another tensor rank's part has no master"
        masters = replace(masters, found=kept, doubt=doubt)
    return replace(
        inventory_of(model, weights, masters),
        aliases=aliases,
        replicas=tuple(casts(weights, masters.found, model.file)),
        problems=tuple(contradictions(masters, model.file)),
    )


def inventory_of(
    model: ModelStates,
    weights: Sequence[Weight],
    masters: Masters,
    experts: Iterable[StoredTensor] = (),
) -> Inventory:
    """The tensors of a model file, and experts' buffers; nothing yet of what is to be compared."""
    buffers = list(stored_buffers(model))
    rounded = {
        one.name: one.dtype
        for one in weights
        if one.name not in masters.found and one.numel and one.dtype in (DType.BF16, DType.F16)
    }
    return Inventory(
        tensors=(*stored_weights(weights, masters), *buffers, *experts),
        aliases={},
        left_out=tuple(name for name in model.buffer_names if name not in model.module),
        warnings=tuple(_warnings(rounded, masters)),
        notes=tuple(_notes(weights, rounded, masters)),
    )


def lacking_masters(inventory: Inventory) -> set[str]:
    """The trainable weights that have the module's values although others have masters."""
    mastered = {replica.name for replica in inventory.replicas}
    return {
        tensor.name
        for tensor in inventory.tensors
        if mastered and tensor.role is Role.TRAINABLE and tensor.name not in mastered
    }


def weights_of(model: ModelStates, tensors: Mapping[str, TensorRef]) -> list[Weight]:
    """Tensors of the model file as weights."""
    return [
        Weight(name, tensor.shape, tensor.dtype, model.file.source(tensor), tensor)
        for name, tensor in tensors.items()
    ]


def contradictions(masters: Masters, file: TorchFile) -> Iterable[DamagedCheckpointError]:
    """What the masters in ``file`` say against the weights; if allowed, these have their values."""
    if masters.unlike:
        yield DamagedCheckpointError(
            "holds fp32 masters that no weight of the module is, rounded",
            path=file.path,
            found=f"no master like {some(masters.unlike, 8)}",
            expected="each weight to be its master, rounded",
            hint="The files of the weights and this one seem to be of different saves. Copy all "
            "files of one save again",
            finding=FindingKind.CAST_MISMATCH,
        )


def stored_weights(weights: Iterable[Weight], masters: Masters) -> list[StoredTensor]:
    """The masters that were found, then the weights that have none, as the module keeps them.

    Where there is a doubt or no master at all, nothing says which weights were frozen, and none may
    be left out as such.
    """
    role = Role.FROZEN if masters.found and not masters.doubt else Role.TRAINABLE
    found, rest = [], []
    for one in weights:
        if master := masters.found.get(one.name):
            trained = Role.TRAINABLE
            found.append(StoredTensor(one.name, one.shape, master.dtype, trained, master.source))
        else:
            rest.append(StoredTensor(one.name, one.shape, one.dtype, role, one.source))
    return [*found, *rest]


def casts(
    weights: Iterable[Weight], masters: Mapping[str, Master], file: TorchFile
) -> Iterable[CastReplica]:
    """What is to be compared: every master of ``file`` with its weight."""
    for weight in weights:
        master = masters.get(weight.name)
        if master is not None:
            yield CastReplica(
                name=weight.name,
                path=file.path,
                kept=master.source,
                kept_dtype=master.dtype,
                other=weight.source,
                other_dtype=weight.dtype,
            )


def _warnings(rounded: Mapping[str, DType], masters: Masters) -> Iterator[str]:
    """Which values are the module's, and so rounded."""
    if masters.doubt and rounded:
        yield rounded_note(masters.doubt, rounded)
    elif rounded and not masters.found:
        types = "/".join(sorted({dtype.torch_name for dtype in rounded.values()}))
        yield f"ZeRO-0: there are no fp32 masters; the weights are the module's, in {types}"


def _notes(
    weights: Sequence[Weight], rounded: Mapping[str, DType], masters: Masters
) -> Iterator[str]:
    """How many values are the masters'."""
    if (count := len(masters.found)) and not (masters.doubt and rounded):
        rest = sum(weight.name not in masters.found for weight in weights)
        of_module = f"; {rest} frozen weights have the module's values" if rest else ""
        yield f"ZeRO-0: {count} weights have their fp32 masters' values{of_module}"


def rounded_note(doubt: str, weights: Mapping[str, DType]) -> str:
    """That these have rounded values, and why; their element types by name."""
    types = "/".join(sorted({dtype.torch_name for dtype in weights.values()}))
    return (
        f"ZeRO-0: {len(weights)} weights have the module's values, rounded to {types}, because "
        f"{doubt}: {', '.join(weights)}"
    )


def _distinct(model: ModelStates) -> tuple[dict[str, TensorRef], dict[str, str]]:
    """The module's weights, each once under its first name, and the further names of tied ones.

    ZeRO-0 fills no ``shared_params``; tied tensors are the same view of the same storage. Of a
    buffer with two names, ``buffer_names`` has the first.
    """
    buffers = dict.fromkeys(model.buffer_names)
    aliases = same_views(model.module, {**buffers, **model.module})
    others = {name: one for name, one in model.module.items() if name not in aliases}
    return {name: one for name, one in others.items() if name not in buffers}, aliases


def tied_by_values(
    weights: Sequence[Weight], found: Mapping[str, Master], file: TorchFile
) -> tuple[dict[str, str], list[str]]:
    """Matrices without a master of their own that are another one with a master, by all samples.

    Tied weights share no storage here: the save of a model with experts clones every tensor, and
    ZeRO-0 fills no ``shared_params``. All their elements are compared when they are exported. The
    second ones are those that may as well be frozen copies (a reference model beside the policy),
    which may differ from the masters by less than 16 bits show.
    """
    lacking = [one for one in weights if one.name not in found]
    kinds = {(one.shape, one.dtype) for one in lacking}
    kinds = {(shape, dtype) for shape, dtype in kinds if dtype.is_floating and len(shape) > 1}
    alike = [one for one in weights if (one.shape, one.dtype) in kinds]
    if not found or len(alike) < 2:  # noqa: PLR2004 - a pair
        return {}, []
    with SourceReader([file]) as reader:
        prints = {w.name: fingerprint(reader.read_into, w.source, w.dtype, w.dtype) for w in alike}
    owners = {(one.shape, prints[one.name]): one.name for one in alike if one.name in found}
    tied = {
        one.name: owners[one.shape, prints[one.name]]
        for one in alike
        if one.name not in found and (one.shape, prints[one.name]) in owners
    }
    frozen = _frozen_modules(weights, found)
    twins = [name for name in tied if any(name.startswith(module) for module in frozen)]
    return {name: owner for name, owner in tied.items() if name not in twins}, twins


def _frozen_modules(weights: Iterable[Weight], found: Mapping[str, Master]) -> set[str]:
    """The modules with several weights, none of which has a master; each with its full stop."""
    held: dict[str, list[bool]] = {}
    for weight in weights:
        parts = weight.name.split(".")
        for depth in range(1, len(parts)):
            module = ".".join(parts[:depth]) + "."
            held.setdefault(module, []).append(weight.name in found)
    return {module for module, any_of in held.items() if len(any_of) > 1 and not any(any_of)}

"""Second copies of what is exported: they must be equal, or one of the two is wrong.

The gravest kind of damage looks whole: rank files of another step, or exchanged ones, whose lengths
all fit. What shows it is that the checkpoint holds most weights twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from zexport.checkpoint.opening import raise_all
from zexport.errors import DamagedCheckpointError
from zexport.findings import Finding, FindingKind
from zexport.options import CheckMode
from zexport.plan.plan import ExportPlan
from zexport.printable import some
from zexport.ranges.copies import CastReplica, Difference, Replica, compare_casts
from zexport.ranges.equality import Equality
from zexport.ranges.extents import paths_of
from zexport.ranges.reader import SourceReader


def compare_replicas(plan: ExportPlan, sources: SourceReader) -> tuple[Finding, ...]:
    """Hold the second copies of a plan against the first, piece by piece.

    Samples are read apart from ``sources``, so that a file of which nothing else is needed is not
    read whole for the sake of its CRC-32.

    Returns:
        What differs and was allowed or is only told, a finding for each tensor.

    Raises:
        DamagedCheckpointError: the copies of some tensors differ; all of them were compared.
        CheckpointError: a file cannot be read.
    """
    casts = [one for one in plan.replicas if isinstance(one, CastReplica)]
    unnamed = [one for one in casts if one.names_it]
    if differences := compare_casts(unnamed, sources, full=True):
        raise _other_weight(differences)
    named = [one for one in casts if not one.names_it]
    full = plan.check is CheckMode.FULL
    with SourceReader(replace(file, members=()) for file in plan.sources) as samples:
        differences = compare_casts(named, sources if full else samples, full=full)
        gathered = compare_casts(plan.gathered, samples, full=full)
    unequal = _unequal([one for one in plan.replicas if isinstance(one, Replica)], sources)
    problems = [_not_the_masters(differences, named)] if differences else []
    problems += [_diverged(unequal)] if unequal else []
    refused = [problem for problem in problems if problem.finding not in plan.allow]
    if refused:
        raise_all(refused, refused[0].path)
    names = {tensor.stored_name: tensor.name for shard in plan.shards for tensor in shard.tensors}
    return (
        *(_cast_finding(FindingKind.CAST_MISMATCH, one, names, plan) for one in differences),
        *(_cast_finding(FindingKind.GATHERED_MISMATCH, one, names, plan) for one in gathered),
        *(
            Finding(FindingKind.REPLICA_MISMATCH, names.get(name, name), 0, accepted=True)
            for name in dict.fromkeys(one.name for one in unequal)
        ),
    )


def _cast_finding(
    kind: FindingKind, difference: Difference, names: Mapping[str, str], plan: ExportPlan
) -> Finding:
    stored = difference.replica.name
    detail = f"of {difference.compared} compared with {difference.replica.path.name}"
    name = names.get(stored, stored)
    return Finding(kind, name, difference.count, detail, accepted=kind in plan.allow)


def _other_weight(differences: Sequence[Difference]) -> DamagedCheckpointError:
    """Masters that have no names, and were taken for weights that they are not."""
    first = differences[0]
    dtype = first.replica.other_dtype.torch_name
    return DamagedCheckpointError(
        f"the fp32 master of {first.replica.name!r} does not belong to the module's weight",
        path=first.replica.path,
        found=f"element {first.first} is another when rounded to {dtype}"
        + (f"; {len(differences) - 1} more weights differ" if len(differences) > 1 else ""),
        expected="the module's weight to be the master, rounded",
        hint="Parameters may have been given to the optimizer in another order than the model's, "
        "or weights changed after the last step: load the file's 'module' instead",
    )


def _not_the_masters(
    differences: Sequence[Difference], compared: Sequence[CastReplica]
) -> DamagedCheckpointError:
    """Masters that are not those of the weights that the module was saved with."""
    files = sorted({one.path.name for one in differences})
    every = {path.name for path in paths_of(one.kept for one in compared)}
    dtypes = sorted({one.replica.other_dtype.torch_name for one in differences})
    return DamagedCheckpointError(
        "holds other weights than the masters in the optimizer files, rounded",
        path=differences[0].replica.path,
        found=f"{len(differences)} of {len(compared)} weights differ, in what "
        f"{some(files, 8)} hold{'s' if len(files) == 1 else ''}: "
        f"{some([_told(one) for one in differences], 8)}",
        expected=f"each weight to be its master as {' or '.join(dtypes)}",
        hint=_diagnosis(differences, is_everywhere=len(every) > 1 and set(files) == every),
        finding=FindingKind.CAST_MISMATCH,
    )


def _told(difference: Difference) -> str:
    return f"{difference.replica.name} ({difference.count} of {difference.compared} compared)"


def _diagnosis(differences: Sequence[Difference], *, is_everywhere: bool) -> str:
    """What such differences come from, and what to do."""
    if max(one.largest for one in differences) == 1:
        cause = "The values differ in the last place alone, as if rounded in another way"
    elif is_everywhere:
        cause = "The model file and the optimizer files seem to be of different steps or runs"
    else:
        cause = "The files named may be of another step, or exchanged among ranks"
    return f"{cause}. {differences[0].replica.advice}"


def _unequal(replicas: Iterable[Replica], files: SourceReader) -> list[Replica]:
    equality = Equality(files)
    return [one for one in replicas if not equality.holds(one.kept, one.other)]


def _diverged(differing: Sequence[Replica]) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        "holds other values than the rank whose copy would be exported",
        path=_path_of(differing[0]),
        found=f"{some(list(dict.fromkeys(replica.name for replica in differing)), 8)} differ",
        expected="equal copies on every rank",
        hint="Copy the rank files of one save again; if they are whole, the ranks had diverged",
        finding=FindingKind.REPLICA_MISMATCH,
    )


def _path_of(replica: Replica) -> Path:
    return next(iter(replica.other.extents(0, 1))).path

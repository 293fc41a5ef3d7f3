"""Second copies of what is exported: they must be equal, or one of the two is wrong."""

from __future__ import annotations

from collections.abc import Iterable

from zexport.checkpoint.assembly.cast_check import check_cast
from zexport.checkpoint.contents import CastReplica, Replica
from zexport.errors import DamagedCheckpointError
from zexport.streams.reader import SourceReader

_CHUNK_NBYTES = 1 << 20


def compare_replicas(replicas: Iterable[Replica | CastReplica], files: SourceReader) -> None:
    """Read both copies of every replica, piece by piece, and hold one against the other.

    Raises:
        DamagedCheckpointError: the copies of some tensors differ; of equal copies all that differ
            are named, of rounded ones the first.
        CheckpointError: a file cannot be read.
    """
    one, other = (memoryview(bytearray(_CHUNK_NBYTES)) for _ in range(2))
    differing = []
    for replica in replicas:
        if isinstance(replica, CastReplica):
            check_cast(replica, files)
        elif not _equal(replica, files, one, other):
            differing.append(replica)
    if differing:
        where = next(differing[0].other.extents(0, 1)).path
        raise DamagedCheckpointError(
            "holds other values than the rank whose copy would be exported",
            path=where,
            found=f"{', '.join(replica.name for replica in differing)} differ",
            expected="equal copies on every rank",
            hint="Copy the rank files of one save again; if they are whole, the ranks had diverged",
        )


def _equal(replica: Replica, files: SourceReader, one: memoryview, other: memoryview) -> bool:
    if replica.kept.nbytes != replica.other.nbytes:
        return False
    for start in range(0, replica.kept.nbytes, _CHUNK_NBYTES):
        count = min(_CHUNK_NBYTES, replica.kept.nbytes - start)
        files.read_into(replica.kept, start, one[:count])
        files.read_into(replica.other, start, other[:count])
        if one[:count] != other[:count]:
            return False
    return True

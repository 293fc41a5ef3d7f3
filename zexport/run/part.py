"""A part of an export: some of its files, written and proved, each with a receipt.

It works from the plan and the folder that was begun alone, so parts may run one after another, or
side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from zexport.plan.plan import FilePlan
from zexport.run.pieces import TensorReader
from zexport.run.receipts import Receipt
from zexport.run.workplace import Workplace
from zexport.run.writer import write_files


def write_part(work: Workplace, files: Sequence[FilePlan], reader: TensorReader) -> None:
    """Write some files of a plan: on return each is on the disk, read again, and has a receipt."""
    work.receipts.check_plan()
    proofs: dict[str, list[Future[None]]] = {}
    notes: list[Future[None]] = []
    # The clerk stops before the checks do: what is finished when the rest fails is noted.
    with work.checks() as checks, ThreadPoolExecutor(1) as clerk:

        def on_written(file: FilePlan, receipt: Receipt) -> None:
            proofs[file.filename] = checks.add(file, receipt)

        def note(file: FilePlan, receipt: Receipt) -> None:
            for proof in proofs.pop(file.filename):
                proof.result()
            work.receipts.add(file, receipt)

        write_files(
            files,
            work.folder,
            reader,
            jobs=work.plan.jobs,
            chunk_nbytes=work.plan.chunk_nbytes,
            on_bytes=work.meter.written,
            on_written=on_written,
            on_disk=lambda file, receipt: notes.append(clerk.submit(note, file, receipt)),
        )
        checks.wait()
        for noted in notes:
            noted.result()

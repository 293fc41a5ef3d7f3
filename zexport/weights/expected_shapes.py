"""The checkpoint's shapes against those that the config gives the model.

Only they show two dimensions recorded in the wrong order, where the product, and so every length,
is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from zexport.errors import DamagedCheckpointError
from zexport.findings import Finding, FindingKind
from zexport.model.fit import ModelNames, best_fit
from zexport.model.names import NamesUnknown
from zexport.options import ExportOptions
from zexport.printable import some
from zexport.weights.named import NamedTensors


def check_shapes(
    stored: NamedTensors,
    names: ModelNames | NamesUnknown,
    options: ExportOptions,
    tag_dir: Path,
) -> tuple[Finding, ...]:
    """What has another shape than the model, where that was allowed: a finding for each.

    Args:
        stored: the checkpoint's tensors, renamed.
        names: the model's, for a config whose vocabulary and classes are the checkpoint's.
        options: the choices; ``allow`` among them.
        tag_dir: the checkpoint, for messages.

    Raises:
        DamagedCheckpointError: shapes differ, and that was not allowed.
    """
    if isinstance(names, NamesUnknown):
        return ()
    differing = dict(_differing(stored, names))
    if differing and FindingKind.SHAPE_MISMATCH not in options.allow:
        told = [f"{name} {details}" for name, details in differing.items()]
        raise DamagedCheckpointError(
            f"holds weights of other shapes than {names.architecture} has for its config",
            path=tag_dir,
            found=some(told, 8),
            expected="the config's shapes",
            hint="Put the config.json beside it that the model was trained with, or give a model "
            "folder with --base",
            finding=FindingKind.SHAPE_MISMATCH,
        )
    return tuple(
        Finding(FindingKind.SHAPE_MISMATCH, name, 0, details, accepted=True)
        for name, details in differing.items()
    )


def _differing(stored: NamedTensors, names: ModelNames) -> Iterator[tuple[str, str]]:
    """Names that both have, in different shapes, and these.

    The model is taken in the form that the checkpoint has: a module of an older transformers may be
    what the hub's files are today, with other shapes under the same names.
    """
    fit = best_fit(names, stored.known_shapes)
    for name, found in stored.shapes.items():
        expected = fit.names.shapes.get(name.removeprefix(fit.prefix), found)
        if found != expected:
            yield name, f"{list(found)} for {list(expected)}"

"""The JSON Schemas of what commands print, made from the types and docstrings of results."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from zexport.diff.diff import DiffReport
from zexport.export.decide import Provenance
from zexport.export.manifest import SCHEMA as MANIFEST_SCHEMA
from zexport.export.manifest import Manifest
from zexport.export.report import ExportReport, PartReport
from zexport.export.summary import PlanSummary
from zexport.export.verify import VerifyReport
from zexport.monitor.events import WatchEvent
from zexport.monitor.prune import PruneReport
from zexport.report.failure import Failure
from zexport.resharding.plan import ReshardProvenance
from zexport.storage.json import SCHEMA
from zexport.train.options import TrainSummary

_FORMS: dict[str, tuple[str, int, tuple[type, ...]]] = {
    "diff": ("What `zexport diff --json` prints", SCHEMA, (DiffReport,)),
    "error": ("What every command prints with `--json` when it fails", SCHEMA, (Failure,)),
    "export": ("What `zexport consolidate --json` prints", SCHEMA, (ExportReport, Provenance)),
    "manifest": ("`zexport_manifest.json`", MANIFEST_SCHEMA, (Manifest, Provenance)),
    "finish": ("What `zexport finish --json` prints", SCHEMA, (ExportReport,)),
    "part": (
        "What `zexport consolidate --part --json` and `zexport reshard --part --json` print while "
        "other parts are to come",
        SCHEMA,
        (PartReport,),
    ),
    "plan": (
        "What `zexport consolidate --dry-run --json` prints",
        SCHEMA,
        (PlanSummary, Provenance),
    ),
    "prune": ("What `zexport prune --json` prints", SCHEMA, (PruneReport,)),
    "reshard": ("What `zexport reshard --json` prints", SCHEMA, (ExportReport, ReshardProvenance)),
    "reshard_manifest": (
        "`zexport_manifest.json` of a resharded checkpoint",
        MANIFEST_SCHEMA,
        (Manifest, ReshardProvenance),
    ),
    "reshard_plan": (
        "What `zexport reshard --dry-run --json` prints",
        SCHEMA,
        (PlanSummary, ReshardProvenance),
    ),
    "train": ("What `zexport train --json` prints", SCHEMA, (TrainSummary,)),
    "verify": (
        "What `zexport verify --json` prints, whether all is well (exit code 0) or not (7)",
        SCHEMA,
        (VerifyReport,),
    ),
    "watch": ("What `zexport watch --json` prints, a line for each event", SCHEMA, (WatchEvent,)),
}
"""By name: its title, its number, and the types whose fields stand beside each other."""

_NUMBER = "Number of this form; it grows when a key changes its meaning or goes."
_DIGEST = "BLAKE3 digest of the file less the line that this stands in."
_SOMETIMES = ("nbytes_compared", "base")
"""Keys that stand only where there is something to tell."""

_ENTRY = re.compile(r"^ {8}(\w[\w, ]*): (.*(?:\n {12}.*)*)", re.M)


def schemas() -> dict[str, dict[str, Any]]:
    """Every schema, by name."""
    made = {name: _schema(*form) for name, form in _FORMS.items()}
    for name in ("manifest", "reshard_manifest"):
        manifest = made[name]["properties"]
        manifest["blake3"] = {"description": _DIGEST, "type": "string"}
        del manifest["provenance"]  # the keys of which stand beside the others
    for name, schema in made.items():
        sometimes = (*_SOMETIMES, *(["warnings"] if "manifest" in name else []))
        schema["required"] = [key for key in schema["properties"] if key not in sometimes]
    return made


def _schema(title: str, number: int, types: Iterable[type]) -> dict[str, Any]:
    roots, known = msgspec.json.schema_components(types, schema_hook=lambda _: {"type": "string"})
    properties: dict[str, Any] = {"schema": {"description": _NUMBER, "const": number}}
    for root in roots:
        own = _whole(root, known)["properties"]
        properties |= {key: one for key, one in own.items() if key not in properties}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        "type": "object",
        "properties": properties,
    }


def _whole(node: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a schema with what it refers to in it, and descriptions from docstrings."""
    if "$ref" in node:
        node = known[node["$ref"].rpartition("/")[2]]
    if "anyOf" in node:
        kinds = [_whole(kind, known) for kind in node["anyOf"]]
        first = next(kind for kind in kinds if kind["type"] != "null")
        if "enum" in first:
            first = {**first, "enum": [*first["enum"], None]}
        return {**first, "type": [first["type"], "null"]}
    docstring = node.get("description", "")
    whole = {key: value for key, value in node.items() if key not in _SAID_OTHERWISE}
    if "enum" in node:
        whole = {"type": "string", **whole}
    if "properties" in node:
        texts = dict(descriptions(docstring))
        whole["properties"] = {
            name: {"description": texts[name], **_whole(value, known)}
            for name, value in node["properties"].items()
        }
        whole["required"] = list(whole["properties"])
    for inner in ("items", "additionalProperties"):
        if isinstance(node.get(inner), dict):
            whole[inner] = _whole(node[inner], known)
    if "prefixItems" in node:  # pairs of equal types
        whole["items"] = _whole(whole.pop("prefixItems")[0], known)
    return whole


_SAID_OTHERWISE = frozenset({"title", "description", "default", "uniqueItems"})


def descriptions(docstring: str) -> Iterator[tuple[str, str]]:
    """Field and what its docstring says of it, as a sentence in Markdown."""
    for names, text in _ENTRY.findall(docstring):
        said = " ".join(text.split()).replace("``None``", "null").replace("``", "`")
        for name in names.split(", "):
            yield name, said[0].upper() + said[1:]

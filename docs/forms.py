"""JSON Schemas of what commands print with ``--json``, from result types and their docstrings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from zexport import DiffReport, ExportReport, PartReport, PruneReport, VerifyReport, WatchEvent
from zexport.export.manifest import SCHEMA as MANIFEST_SCHEMA
from zexport.export.manifest import Manifest
from zexport.export.plan import PlanSummary
from zexport.export.planner import Provenance
from zexport.report.diff import SCHEMA as DIFF_SCHEMA
from zexport.report.json import Failure
from zexport.resharding.plan import ReshardProvenance
from zexport.storage.json import SCHEMA
from zexport.train.options import TrainSummary

FORMS: Mapping[str, tuple[str, int, tuple[type, ...]]] = {
    "export": ("`zexport consolidate --json`", SCHEMA, (ExportReport, Provenance)),
    "plan": ("`zexport consolidate --dry-run --json`", SCHEMA, (PlanSummary, Provenance)),
    "reshard": ("`zexport reshard --json`", SCHEMA, (ExportReport, ReshardProvenance)),
    "reshard_plan": (
        "`zexport reshard --dry-run --json`",
        SCHEMA,
        (PlanSummary, ReshardProvenance),
    ),
    "part": ("`--part --json`, while other parts are missing", SCHEMA, (PartReport,)),
    "finish": ("`zexport finish --json`", SCHEMA, (ExportReport,)),
    "verify": ("`zexport verify --json`", SCHEMA, (VerifyReport,)),
    "diff": ("`zexport diff --json`", DIFF_SCHEMA, (DiffReport,)),
    "watch": ("`zexport watch --json`, one object per event", SCHEMA, (WatchEvent,)),
    "prune": ("`zexport prune --json`", SCHEMA, (PruneReport,)),
    "train": ("`zexport train --json`", SCHEMA, (TrainSummary,)),
    "error": ("any command with `--json` that fails", SCHEMA, (Failure,)),
    "manifest": ("`zexport_manifest.json` of an export", MANIFEST_SCHEMA, (Manifest, Provenance)),
    "reshard_manifest": (
        "`zexport_manifest.json` of a resharded checkpoint",
        MANIFEST_SCHEMA,
        (Manifest, ReshardProvenance),
    ),
}
"""By name: title, schema number, and the types whose fields make up the object."""

_OPTIONAL = ("nbytes_compared", "base")
"""Keys that are omitted if they have no value."""

_ENTRY = re.compile(r"^ {8}(\w[\w, ]*): (.*(?:\n {12}.*)*)", re.M)
_REPLACED = frozenset({"title", "description", "default", "uniqueItems"})


def schemas() -> dict[str, dict[str, Any]]:
    """Return every schema by name; ``inspect.json`` is written by hand."""
    made = {name: _schema(*form) for name, form in FORMS.items()}
    for name in ("manifest", "reshard_manifest"):
        properties = made[name]["properties"]
        properties["blake3"] = {
            "description": "BLAKE3 digest of the file without this line.",
            "type": "string",
        }
        del properties["provenance"]  # its keys are at the top level
    for name, schema in made.items():
        optional = (*_OPTIONAL, *(["warnings"] if "manifest" in name else []))
        schema["required"] = [key for key in schema["properties"] if key not in optional]
    return made


def _schema(title: str, number: int, types: Iterable[type]) -> dict[str, Any]:
    roots, known = msgspec.json.schema_components(types, schema_hook=lambda _: {"type": "string"})
    number_text = "Schema number; it rises if a key is removed or changes its meaning."
    properties: dict[str, Any] = {"schema": {"description": number_text, "const": number}}
    for root in roots:
        properties = _resolved(root, known)["properties"] | properties
    order = ["schema", *(key for root in roots for key in _resolved(root, known)["properties"])]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Output of {title}" if "manifest" not in title else title,
        "type": "object",
        "properties": {key: properties[key] for key in dict.fromkeys(order)},
    }


def _resolved(node: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return a node with references inlined and descriptions taken from docstrings."""
    if "$ref" in node:
        node = known[node["$ref"].rpartition("/")[2]]
    if "anyOf" in node:
        kinds = [_resolved(kind, known) for kind in node["anyOf"]]
        first = next(kind for kind in kinds if kind["type"] != "null")
        if "enum" in first:
            first = {**first, "enum": [*first["enum"], None]}
        return {**first, "type": [first["type"], "null"]}
    made = {key: value for key, value in node.items() if key not in _REPLACED}
    if "enum" in node:
        made = {"type": "string", **made}
    if "properties" in node:
        texts = dict(descriptions(node.get("description", "")))
        made["properties"] = {
            name: {"description": texts[name], **_resolved(value, known)}
            for name, value in node["properties"].items()
        }
        made["required"] = list(made["properties"])
    for inner in ("items", "additionalProperties"):
        if isinstance(node.get(inner), dict):
            made[inner] = _resolved(node[inner], known)
    if "prefixItems" in node:  # pairs of equal types
        made["items"] = _resolved(made.pop("prefixItems")[0], known)
    return made


def descriptions(docstring: str) -> Iterator[tuple[str, str]]:
    """Yield each field in the ``Attributes:`` section with its description in Markdown."""
    for names, text in _ENTRY.findall(docstring):
        sentence = " ".join(text.split()).replace("``None``", "null").replace("``", "`")
        for name in names.split(", "):
            yield name, sentence[0].upper() + sentence[1:]

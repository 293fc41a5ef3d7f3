"""A folder that is a Hugging Face model, as ``save_pretrained`` of transformers writes it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from zexport.checkpoint.state import Role, StoredTensor
from zexport.collected import Collected
from zexport.errors import NamesMismatchError, ZexportError
from zexport.facts.model import OF_BASE, Fact
from zexport.facts.statements import Statement, disagreements
from zexport.filenames import CONFIG, README
from zexport.findings import FindingKind
from zexport.model.card import model_card, paragraphs_of
from zexport.model.config import ConfigFile
from zexport.model.fit import Fit
from zexport.model.hub_cache import GivenBase
from zexport.model.token_numbers import (
    ADDED_TOKENS,
    config_numbers,
    embedding_rows,
    stated_rows,
    token_statements,
)
from zexport.options import AdapterMode, ExportDType
from zexport.plan.plan import (
    DTYPES,
    INDEX_FILE,
    SINGLE_FILE,
    WEIGHTS_ONLY,
    FilePlan,
    SideFile,
    plan_file,
)
from zexport.printable import shown, some
from zexport.ranges.dtypes import DType
from zexport.weights.hub_names import check_shapes, settle_names
from zexport.weights.model_class import is_value_head
from zexport.weights.named import Selection
from zexport.weights.select import select_tensors, with_frozen_counted
from zexport.weights.ties import settle_ties, tie_statements

HEAD_FILE = "value_head.safetensors"
OTHER_FILE = "other_weights.safetensors"
FILES_APART = (HEAD_FILE, OTHER_FILE)
"""Where weights lie that the model's class does not know: beside the model and not in its index.

The first name is the one that LLaMA-Factory writes and looks for (``extras/constants.py``), so
nothing but a value head gets it. Neither begins as the files do that llama.cpp's converter takes
for the model's.
"""


class HubModel(Struct, frozen=True):
    """A model's folder: its tensors by the names it has for them, and the files beside them."""

    collected: Collected

    def select(self) -> Selection:
        """The weights under the names of the model's files, whole."""
        try:
            return self._selection()
        except ZexportError as error:
            is_misfit = error.finding is FindingKind.SHAPE_MISMATCH
            is_misfit = is_misfit or isinstance(error, NamesMismatchError)
            if is_misfit and CONFIG in self.collected.files_of_base:
                error.hint = shown(
                    f"config.json came from --base {self.collected.options.base} and is probably "
                    "another model's. Give the base of this run, or its own config.json"
                )
            raise

    def _selection(self) -> Selection:
        found = self.collected
        checkpoint, options = found.checkpoint, found.options
        tag_dir = checkpoint.location.tag_dir
        findings = check_shapes(found.fit, found.weights, options, tag_dir)
        settled = settle_names(found.weights, found.fit, found.base.shapes, options, tag_dir)
        tied = tuple(tie_statements(settled))
        settled = settle_ties(settled, found.ties)
        if options.exclude_frozen:
            settled = with_frozen_counted(settled, checkpoint)
        selection = select_tensors(checkpoint, settled, found.base, options)
        config = _for_written(found.sidecars.config, selection)
        if config is not None and selection.untied:
            untied = f"tie_word_embeddings is false, since {some(sorted(selection.untied))} differs"
            config = replace(config, mended=(*config.mended, untied))
        return replace(
            selection,
            heads=found.heads,
            config=config,
            findings=findings,
            warnings=(*self._warnings(), *selection.warnings),
            notes=(*_mended(config), *selection.notes),
            statements=(*selection.statements, *self._tokens(selection, config), *tied),
        )

    def _tokens(self, selection: Selection, config: ConfigFile | None) -> Iterator[Statement]:
        """The embedding's rows, and the tokens that need one.

        Where the embedding is the base's, an adapter was trained with another if tokens were added
        that the base's own tokenizer does not have.
        """
        found, options = self.collected, self.collected.options
        shapes = {name: tensor.shape for name, tensor in selection.weights.tensors.items()}
        own = {name: shape for name, shape in shapes.items() if name not in selection.from_base}
        rows = max(embedding_rows(shapes).values(), default=stated_rows(config))
        is_own = embedding_rows(own) or any(len(s) > 1 and s[0] == rows for s in own.values())
        fact, by = Fact.TOKENS, "the rows of the embedding"
        added = [one for one in found.tokens if one.about == ADDED_TOKENS]
        if found.mode is AdapterMode.MERGE and options.base and not options.exclude_frozen:
            last = max((t.number for t in found.base_tokens if t.about == ADDED_TOKENS), default=-1)
            if not is_own and (rows is None or last < rows):
                fact, by = Fact.RESIZED_EMBEDDING, "the rows of --base's embedding"
        yield from token_statements(fact, rows, by, added)
        others = [one for one in found.tokens if one.about != ADDED_TOKENS]
        others += config_numbers(config)
        yield from token_statements(Fact.TOKENS, rows, "the rows of the embedding", others)

    def files(self, selection: Selection) -> tuple[FilePlan, ...]:
        """The files of the model, and those of the weights that it does not know."""
        tensors, heads, target = selection.weights.tensors, selection.heads, self._target
        shards = _shards(tensors, target, self.collected.options.max_shard_nbytes)
        return (*_planned(shards, tensors, target), *_planned(files_apart(heads), heads, target))

    def side_files(self, selection: Selection, files: Sequence[FilePlan]) -> Iterator[SideFile]:
        """What is copied, and what is new: card, config, index.

        There is an index wherever there is a head: without one, vLLM and SGLang read every
        safetensors file of a folder as the model's.
        """
        sidecars = replace(self.collected.sidecars, config=selection.config)
        for name, path in sorted(sidecars.copied.items()):
            yield SideFile(name, origin=path)
        target, architecture = self._target, selection.architecture
        if README not in sidecars.copied:
            apart = files_apart(selection.heads)
            checkpoint = self.collected.checkpoint
            card = model_card(
                checkpoint,
                target,
                sidecars,
                architecture,
                apart,
                origin=tuple(self._origin(selection)),
                trained_on=self._trained_on,
            )
            yield SideFile(README, card)
        if sidecars.config is not None:
            tie_word_embeddings = False if selection.untied else None
            content = sidecars.config.edited(
                target, architecture, tie_word_embeddings=tie_word_embeddings
            )
            yield SideFile(CONFIG, content)
        shards = [file for file in files if file.filename not in FILES_APART]
        if selection.heads or [shard.filename for shard in shards] != [SINGLE_FILE]:
            yield SideFile(INDEX_FILE, _index_file(shards, selection.weights.tensors))

    @property
    def _target(self) -> DType:
        """The element type of the output's parameters."""
        options, checkpoint = self.collected.options, self.collected.checkpoint
        if options.dtype is ExportDType.AUTO:
            return checkpoint.module_dtype or DType.F32
        return DTYPES[options.dtype]

    @property
    def _trained_on(self) -> str | None:
        """What the merged adapter calls its base, unless something says that it is another."""
        found = self.collected
        differing = {one.fact for one in disagreements(found.statements)}
        if Fact.NAMED_BASE in differing:
            return None
        if found.mode is not AdapterMode.MERGE or differing & OF_BASE:
            return ""
        told = (one.config.text("base_model_name_or_path") for one in found.adapters)
        return next(told, "")

    def _origin(self, selection: Selection) -> Iterator[str]:
        """What the card says of what is not from training, and of what was allowed."""
        found, every = self.collected, selection.written
        base = found.sidecars.base
        of = "" if base is None else f" ({GivenBase.of(base)})"
        if found.mode is AdapterMode.MERGE:
            names = " and ".join(one.name for one in found.adapters)
            count = sum(tensor.role is Role.FROZEN for tensor in every)
            yield (
                f"The adapter {names} is merged into its base model{of}: of {len(every)} tensors, "
                f"{count} are the base model's, as training had them."
            )
        elif selection.from_base:
            yield (
                f"Of {len(every)} tensors, {len(selection.from_base)} come from the base "
                f"model{of}: they were not trained, and not in the checkpoint."
            )
        if files := found.files_of_base:
            yield f"These files are the base model's{of}: {', '.join(files)}."
        for one in selection.findings:
            if one.accepted:
                yield f"Exported although {one.kind} was found: {one.detail or one.tensor}."
        if later := found.options.allow - {one.kind for one in selection.findings}:
            yield (
                f"Allowed was also {', '.join(sorted(later))}: findings in zexport_manifest.json "
                "tell whether there was any."
            )
        yield from paragraphs_of((*found.checkpoint.warnings, *selection.warnings))

    def _warnings(self) -> Iterator[str]:
        """What is missing beside the weights, will not be read, or stands apart."""
        found = self.collected
        if found.sidecars.missing:
            only = f"{WEIGHTS_ONLY}; " if found.sidecars.config is None else ""
            yield (
                f"{only}not with the checkpoint: {', '.join(found.sidecars.missing)}. Give the "
                "model that training began from with --base"
            )
        for name in found.spoilt:
            yield f"{name} is copied as it is, but is not whole JSON: what reads it will fail"
        what = {HEAD_FILE: "a head of its own, which lies in"}
        for file, names in files_apart(found.heads).items():
            known = found.fit.model.architecture if isinstance(found.fit, Fit) else None
            where = what.get(file, "weights beside it, which nothing loads by itself, in")
            yield f"{known} does not know {some(names)}: {where} {file}"


def _mended(config: ConfigFile | None) -> Iterator[str]:
    """What of the config is not as it was found."""
    return (f"config.json is mended: {one}" for one in (() if config is None else config.mended))


def _for_written(config: ConfigFile | None, selection: Selection) -> ConfigFile | None:
    """A config that tells of no packing, unless packed weights are what is written."""
    weights = (t for t in selection.weights.tensors.values() if t.role is not Role.BUFFER)
    if config is None or not all(tensor.dtype.is_floating for tensor in weights):
        return config
    return config.without_quantization()


def _shards(
    tensors: Mapping[str, StoredTensor], target: DType, nbytes_max: int
) -> dict[str, list[str]]:
    """The names in each file of a model, as huggingface_hub splits it (its import takes 30 ms).

    Source: huggingface_hub 1.0, ``serialization/_base.py``: in the order given, and what is beyond
    the limit by itself goes into a shard of its own, before the one that is being filled.
    """
    shards: list[list[str]] = []
    current: list[str] = []
    used = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel * tensor.output_dtype(target).itemsize
        if nbytes > nbytes_max:
            shards.append([name])
            continue
        if used + nbytes > nbytes_max:
            shards.append(current)
            current, used = [], 0
        current.append(name)
        used += nbytes
    shards += [current] if current else []
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    ending = f"-of-{len(shards):05d}.safetensors"
    return {f"model-{number:05d}{ending}": names for number, names in enumerate(shards, 1)}


def files_apart(names: Iterable[str]) -> dict[str, list[str]]:
    """File to those of the weights in it that the model's class does not know."""
    files: dict[str, list[str]] = {}
    for name in names:
        files.setdefault(HEAD_FILE if is_value_head(name) else OTHER_FILE, []).append(name)
    return files


def _planned(
    files: Mapping[str, Sequence[str]], tensors: Mapping[str, StoredTensor], target: DType
) -> tuple[FilePlan, ...]:
    """Files of these tensors, each by its name."""
    dtypes = {name: tensor.output_dtype(target) for name, tensor in tensors.items()}
    return tuple(
        plan_file(file, {name: tensors[name] for name in names}, dtypes)
        for file, names in files.items()
    )


def _index_file(shards: Sequence[FilePlan], tensors: Mapping[str, StoredTensor]) -> bytes:
    """The index as transformers 5 writes it: sorted, two spaces, a newline at the end."""
    planned = [(tensor, shard) for shard in shards for tensor in shard.tensors]
    parameters = [t for t, _ in planned if tensors[t.name].role is not Role.BUFFER]
    content = {
        "metadata": {
            "total_parameters": sum(tensor.numel for tensor in parameters),
            "total_size": sum(tensor.nbytes for tensor, _ in planned),
        },
        "weight_map": {tensor.name: shard.filename for tensor, shard in planned},
    }
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()

"""A folder that is a peft adapter, or several, as peft's ``save_pretrained`` writes it.

Embeddings that an adapter updates are saved whole beside it, wherever they are: after a vocabulary
was resized they are the only copy of the new rows. Source: peft 0.21, ``utils/save_and_load.py``
(``get_peft_model_state_dict``, ``save_embedding_layers``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from msgspec import Struct

from zexport.adapters.find import Adapter, check_whole, not_just_tensors
from zexport.adapters.peft_format import EMBEDDINGS, AdapterConfig
from zexport.adapters.peft_names import inner_name, of_adapter, read_name
from zexport.adapters.stated import kept_statements
from zexport.checkpoint.state import Role, StoredTensor
from zexport.collected import Collected
from zexport.errors import UnsupportedError
from zexport.facts.adapters import AdapterFact
from zexport.facts.statements import Statement
from zexport.filenames import ADAPTER_CONFIG, ADAPTER_FILE, GENERATION_CONFIG, README
from zexport.model.card import model_card, paragraphs_of
from zexport.model.fit import NamesUnknown
from zexport.model.token_numbers import embedding_rows, stated_rows, token_statements
from zexport.plan.plan import DTYPES, FilePlan, SideFile, plan_file, qualified
from zexport.printable import some
from zexport.weights.base_model import check_plain
from zexport.weights.named import PEFT_PREFIX, Selection, Weights

_FACTORS = (".lora_embedding_A", ".lora_A.weight")


class PeftAdapters(Struct, frozen=True):
    """Adapters kept as they are, each in the folder that peft gives it."""

    collected: Collected

    def select(self) -> Selection:
        """What peft saves of the adapters, by the names in their files."""
        found = self.collected
        tensors: dict[str, StoredTensor] = {}
        from_base, warnings, stated = list[str](), list[str](), list[Statement]()
        given = found.base.tensors
        for adapter in found.adapters:
            kept = self._kept(adapter)
            lacking = _lacking_embeddings(adapter.config, kept)
            filled = {name: given[inner] for name, inner in lacking.items() if inner in given}
            check_plain(filled.values(), found.base, NamesUnknown("not asked"))
            module_dtype = found.checkpoint.cast_dtype
            kept |= {n: replace(t, module_dtype=module_dtype) for n, t in filled.items()}
            warnings += [
                f"without {name}, which peft saves too: give --base"
                for name in lacking
                if name not in filled
            ]
            stated += [*self._tokens(kept), *kept_statements(adapter)]
            from_base += [qualified(_file_of(adapter), name) for name in filled]
            tensors |= {qualified(_file_of(adapter), name): one for name, one in kept.items()}
        words = "adapter" if len(found.adapters) == 1 else "adapters"
        names = ", ".join(repr(adapter.name) for adapter in found.adapters)
        is_excluded = found.options.exclude_frozen
        excluded = ("--exclude-frozen left out 0 weights of the adapter",) if is_excluded else ()
        frozen = (n for n, t in found.weights.tensors.items() if t.role is Role.FROZEN and t.source)
        has_base = bool(given) or any(not read_name(name).adapter for name in frozen)
        merge = "--adapter merge" if has_base else "--base MODEL"
        what = f"this is the {words} {names} for peft, not a model; {merge} makes one"
        return Selection(
            Weights(tensors, {}),
            NamesUnknown("not asked"),
            from_base=tuple(from_base),
            loadable=True,
            warnings=(*(one for s in found.saved.values() for one in s.warnings), *warnings),
            notes=(what, *excluded, *(one for s in found.saved.values() for one in s.notes)),
            statements=tuple(stated),
        )

    def files(self, selection: Selection) -> tuple[FilePlan, ...]:
        """One file for each adapter.

        Each tensor has the element type that was asked for, or its own in the module: peft saves
        what the module holds, which under ZeRO-3 may differ from tensor to tensor.
        """
        target = DTYPES.get(self.collected.options.dtype)
        folders = [adapter.folder for adapter in self.collected.adapters if adapter.folder]
        by_folder: dict[str, dict[str, StoredTensor]] = {}
        for name, tensor in selection.weights.tensors.items():
            folder = next((one for one in folders if name.startswith(one)), "")
            by_folder.setdefault(folder, {})[name.removeprefix(folder)] = tensor
        return tuple(
            plan_file(
                _file_of(adapter),
                kept := by_folder.get(adapter.folder, {}),
                {
                    name: tensor.output_dtype(target or tensor.module_dtype or tensor.dtype)
                    for name, tensor in kept.items()
                },
            )
            for adapter in self.collected.adapters
        )

    def side_files(self, selection: Selection, files: Sequence[FilePlan]) -> Iterator[SideFile]:
        """The adapters' configurations, and what is not the model's own."""
        for adapter in self.collected.adapters:
            name, config = f"{adapter.folder}{ADAPTER_CONFIG}", adapter.config
            if config.switch("inference_mode"):
                yield SideFile(name, origin=config.path)
            else:
                content = {**config.content, "inference_mode": True}  # peft loads it untrained
                yield SideFile(name, content=json.dumps(content, indent=2, sort_keys=True).encode())
        for name, path in sorted(self.collected.copied.items()):
            if name == README and self.collected.is_card_unfilled:
                yield SideFile(name, content=self._card(files, selection.warnings))
            else:
                yield SideFile(name, origin=path)

    def _card(self, files: Sequence[FilePlan], warnings: Sequence[str]) -> bytes:
        """A card in place of peft's, which leaves everything to be filled in."""
        found = self.collected
        bases = {one.config.text("base_model_name_or_path") for one in found.adapters}
        return model_card(
            found.checkpoint,
            files[0].tensors[0].dtype,
            found.sidecars,
            origin=paragraphs_of((*found.checkpoint.warnings, *warnings)),
            trained_on=bases.pop() if len(bases) == 1 else "",
            is_adapter=True,
        )

    def _kept(self, adapter: Adapter) -> dict[str, StoredTensor]:
        """What peft saves of an adapter, by the names it has in the file."""
        if not adapter.config.is_kept_by_name:
            raise not_just_tensors(adapter.config)
        stored, saved = self.collected.weights, self.collected.saved.get(adapter.name)
        every = stored.every_tensor
        parts = of_adapter(every, adapter.name)
        kept = {part.on_disk: every[name] for name, part in parts.items()}
        check_whole(self.collected.checkpoint, stored, adapter, kept)
        kept |= dict(_kept_of_base(every, adapter.config))
        if saved is not None and saved.is_of_step:
            kept |= {**saved.held, **saved.lacking}
        self._check_trained(kept.values())
        return kept

    def _check_trained(self, kept: Iterable[StoredTensor]) -> None:
        """Refuse weights that were trained beside the adapter, and that its file has no place for.

        Of several adapters each has its own part of what was trained.
        """
        held = {tensor.name for tensor in kept}
        lost = [
            name
            for name, tensor in self.collected.weights.tensors.items()
            if tensor.role is Role.TRAINABLE
            and tensor.name not in held
            and not read_name(name).adapter
        ]
        if lost:
            raise UnsupportedError(
                "has weights trained beside the adapter, which no adapter's file holds",
                path=self.collected.checkpoint.location.tag_dir,
                found=some(lost, 8),
                expected="none but those that adapter_config.json tells of",
                hint="Take them along with --adapter merge --base MODEL, or write the tensors as "
                "they are with --layout memory --exclude-frozen",
            )

    def _tokens(self, kept: Mapping[str, StoredTensor]) -> Iterator[Statement]:
        """The rows of the embedding that is kept, or of the base's, and the tokenizer's tokens."""
        found = self.collected
        rows = embedding_rows({name: t.shape for name, t in kept.items()})
        rows = rows or embedding_rows({n: shape for n, shape in found.base.shapes.items() if shape})
        known = max(rows.values(), default=stated_rows(found.sidecars.config))
        tokens = [one for one in found.tokens if one.by != GENERATION_CONFIG]
        yield from token_statements(AdapterFact.KEPT_EMBEDDING, known, "its rows", tokens)


def _file_of(adapter: Adapter) -> str:
    return f"{adapter.folder}{ADAPTER_FILE}"


def _kept_of_base(
    every: Mapping[str, StoredTensor], config: AdapterConfig
) -> Iterator[tuple[str, StoredTensor]]:
    """Weights of the base model that peft saves too: trained biases, and targeted embeddings."""
    bias = config.text("bias")
    for name, tensor in every.items():
        if read_name(name).adapter:
            continue
        inner = inner_name(name)
        *_, wrapper, last = ("", *inner.split("."))
        is_bias = last == "bias" and (
            bias == "all" or (bias.endswith("_only") and wrapper == "base_layer")
        )
        is_embedding = config.is_embedding_targeted and any(
            f".{module}.base_layer." in f".{inner}" for module in EMBEDDINGS
        )
        if is_bias or is_embedding:
            yield PEFT_PREFIX + inner, tensor


def _lacking_embeddings(config: AdapterConfig, kept: Iterable[str]) -> dict[str, str]:
    """Embeddings that peft would have saved too: name in its file to name in the base model."""
    names = set(kept) if config.is_embedding_targeted else set[str]()
    modules = {name.removesuffix(end) for name in names for end in _FACTORS if name.endswith(end)}
    embeddings = (module for module in modules if module.rpartition(".")[2] in EMBEDDINGS)
    lacking = {f"{module}.base_layer.weight" for module in embeddings} - names
    return {name: read_name(name).of_base for name in sorted(lacking)}

"""Collecting: all that an export reads before it is planned, and what transformers answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from msgspec import structs

from zexport.adapters.find import (
    Adapter,
    adapter_mode,
    adapters_in,
    check_renamed,
    choose_adapters,
    places_told,
)
from zexport.adapters.merging import (
    as_in_training,
    merge_adapter,
    only_adapter,
    shapes_of_base,
    weights_of_base,
    with_saved,
)
from zexport.adapters.saved_beside import adapter_copies, saved_beside
from zexport.adapters.stated import (
    adapter_statements,
    base_form_statements,
    class_statements,
    effect_statements,
)
from zexport.adapters.updates import BaseModel
from zexport.checkpoint.state import TrainingState, raise_problems
from zexport.checkpoint.trainer_state import checkpoint_before
from zexport.collected import Collected
from zexport.errors import raise_all
from zexport.facts.model import OF_BASE, Fact
from zexport.facts.rows import AnyFact
from zexport.facts.statements import judge
from zexport.filenames import ADAPTER_CONFIG, CONFIG, GENERATION_CONFIG, README, TOKENIZER
from zexport.model.card import is_unfilled
from zexport.model.config_facts import config_statements, layers_of
from zexport.model.fit import Fit, ModelNames, NamesUnknown
from zexport.model.hub_cache import model_folder
from zexport.model.names import Learner
from zexport.model.names_client import NamesClient
from zexport.model.sidecars import find_sidecars, spoilt_files
from zexport.model.small_files import choice_notes, repeated_statements
from zexport.model.stated import file_facts, model_facts, named_bases
from zexport.model.token_numbers import TokenNumber, token_numbers
from zexport.options import AdapterMode, ExportOptions, NameLayout
from zexport.plan.plan import DTYPES, SourceFile
from zexport.plan.summary import share_memory
from zexport.printable import some
from zexport.store.files import reading
from zexport.weights.autoep_experts import with_hub_experts
from zexport.weights.base_model import (
    base_of,
    gathered_copies,
    read_base,
    read_gathered,
    source_files,
    under_names_of,
)
from zexport.weights.hub_names import in_form, is_adapted
from zexport.weights.model_class import identify, task_statements
from zexport.weights.named import Weights
from zexport.weights.rope_buffers import rope_buffer_statements
from zexport.weights.same_base import BaseName, compare_base
from zexport.weights.ties import Ties, compare_ties, under_tied_sources, without_ties


def collect(checkpoint: TrainingState, options: ExportOptions | None = None) -> Collected:
    """Read all that the plan of an export depends on."""
    with reading(checkpoint.location.root, hint="Check its permissions"):
        return _collect(checkpoint, options or ExportOptions())


def _collect(checkpoint: TrainingState, options: ExportOptions) -> Collected:
    if options.base is not None:
        options = replace(options, base=model_folder(options.base))
    findings = raise_problems(checkpoint, options.allow)
    share_memory(options)
    location = checkpoint.location
    parts = ((one.root, one.boundary) for one in checkpoint.parts)
    before = checkpoint_before(location)
    sidecars = find_sidecars(location.root, options.base, location.boundary, parts, before)
    with NamesClient(are_needed=options.layout is NameLayout.HUB) as transformers:
        learner = Learner(sidecars.source, transformers)
        spoilt = spoilt_files(sidecars.copied)
        part, told = Weights.of(checkpoint).only(options.only)
        weights = with_hub_experts(part, sidecars.config, learner, options)
        headers = read_base(options.base, follow_symlinks=location.boundary.follow)
        beside = read_gathered(checkpoint)
        found = Collected(
            checkpoint,
            options,
            weights.renamed(options.renames),
            sidecars,
            base=base_of(options.base, headers),
            files=(*map(SourceFile.of, checkpoint.torch_files), *source_files((*headers, *beside))),
            findings=findings,
            gathered=gathered_copies(checkpoint, beside),
            spoilt=tuple(spoilt),
            is_card_unfilled=README in sidecars.copied and is_unfilled(sidecars.copied[README]),
            tokens=token_numbers(sidecars.copied),
            statements=tuple(weights.rename_statements(options.renames)),
            warnings=told,
            notes=(*_unknown_code(checkpoint), *_differing_buffers(checkpoint)),
        )
        found = _stated_by_configs(_stated_by_files(_with_adapters(found, part)))
        if found.mode is AdapterMode.KEEP:
            adapter, unknown = found.adapters[0], NamesUnknown("not asked")
            stored = weights_of_base(found.weights)
            return _held_against_base(found, unknown, stored, _named_by_adapter(adapter))
        task = ""
        if found.mode is AdapterMode.MERGE:
            adapter = only_adapter(found.adapters, options)
            found, task = _merged(found, adapter, learner), adapter.config.text("task_type")
        found = _with_model(found, learner, task)
        stated = task_statements(task, found.sidecars.config)
        found = structs.replace(found, statements=(*found.statements, *stated))
        if not transformers.lacked:
            return found
        unasked = f"config.json was not held against the weights ({transformers.lacked})"
        return structs.replace(found, warnings=(*found.warnings, unasked))


def _unknown_code(checkpoint: TrainingState) -> Iterator[str]:
    """Tells of code that programs which run pickles would run; `zexport inspect` has the files."""
    named = {str(one): None for file in checkpoint.files for one in file.unknown_globals}
    if named:
        yield f"the checkpoint's files name unknown code, which was not run: {some([*named], 8)}"


def _differing_buffers(checkpoint: TrainingState) -> Iterator[str]:
    """Yield a note on buffers that ranks of a ZeRO-3 run saved differently."""
    names: list[str] = []
    for ranks in (one for one in checkpoint.zero.values() if one.is_zero3 and one.model):
        for name in ranks.first.buffers:
            saved = [(m.file, m.module[name]) for m in ranks.model.values() if name in m.module]
            contents = {(ref.shape, ref.dtype, f.checksum(ref.storage)) for f, ref in saved}
            names += [name] if len(contents) > 1 and name not in names else []
    if names:
        yield f"buffers differ between ranks: the export has those of rank 0 ({some(names, 8)})"


def _stated_by_files(found: Collected) -> Collected:
    """The same with what the files state that the export has, and those of other folders."""
    sidecars = found.sidecars
    named = {
        f"{one.folder}{ADAPTER_CONFIG}": one.config.text("base_model_name_or_path")
        for one in found.adapters
    }
    named |= named_bases(sidecars, is_adapter=bool(found.adapters))
    not_written = {AdapterMode.KEEP: GENERATION_CONFIG, AdapterMode.MERGE: README, None: ""}
    left = not_written.get(found.mode)
    copied = {name: path for name, path in sidecars.copied.items() if name != left}
    sidecars = structs.replace(sidecars, copied=copied)
    if found.mode is AdapterMode.KEEP:  # whose folder has nothing of the model itself
        sidecars = structs.replace(sidecars, config=None)
    adapters = {f"{one.folder}{ADAPTER_CONFIG}": one.config.path for one in found.adapters}
    stated = (*file_facts(sidecars, named), *repeated_statements(adapters))
    return structs.replace(
        found,
        statements=(*found.statements, *stated),
        notes=(*found.notes, *choice_notes(found.copied, sidecars.folders)),
    )


def _stated_by_configs(found: Collected) -> Collected:
    """The same with what the config beside the checkpoint and the base's both say, if both are.

    What else than the model's build they say matters where one of them is written.
    """
    own, base = found.sidecars.config, found.sidecars.base_config
    if own is None or base is None or own.path == base.path:
        return found
    is_written = found.mode is not AdapterMode.KEEP
    stated = [s for s in config_statements(own, base) if is_written or s.fact in OF_BASE]
    return structs.replace(found, statements=(*found.statements, *stated))


def _with_adapters(found: Collected, part: Weights) -> Collected:
    """The same with what is to become of adapters, and what peft saved beside them.

    ``part`` are the weights by the names of the training, which tell what modules were targeted.
    """
    checkpoint, options = found.checkpoint, found.options
    has_config = found.sidecars.config is not None
    mode = adapter_mode(checkpoint, found.weights, options, has_config=has_config)
    if mode is not None:
        check_renamed(part, found.weights)
    is_known = has_config or found.sidecars.source
    if options.layout is NameLayout.HUB and (mode or is_known):
        weights, parts = found.weights.without_inner_wrappers()
        told = (f"{part!r}, which a wrapper put into names, was left out of them" for part in parts)
        found = structs.replace(found, weights=weights, notes=(*found.notes, *told))
    if mode is None:
        return found
    adapters = choose_adapters(checkpoint, found.weights, options)
    saved = saved_beside(checkpoint, found.weights, adapters, options.check)
    copies = adapter_copies(checkpoint, found.weights, adapters)
    headers = (*(one.header for one in saved.values()), *(header for header, _ in copies))
    is_merged = mode is AdapterMode.MERGE
    named = part.without_inner_wrappers()[0] if is_merged else found.weights
    base = found.base.tensors
    layers = layers_of(found.sidecars.base_config)
    stated = [s for adapter in adapters for s in adapter_statements(adapter, named, base, layers)]
    for one in adapters:
        stated += effect_statements(one.name, found.weights, found.files)
    chosen = {adapter.name for adapter in adapters}
    rest = [repr(name) for name in adapters_in(found.weights) if name not in chosen]
    left = [f"other adapters of the checkpoint are left out: {', '.join(rest)}"] if rest else []
    for one in adapters:
        left += places_told(one, checkpoint, options)
    return structs.replace(
        found,
        mode=mode,
        adapters=adapters,
        saved=saved,
        statements=(*found.statements, *stated),
        files=(*found.files, *source_files(headers)),
        gathered=(*found.gathered, *(copy for _, one in copies for copy in one)),
        notes=(*found.notes, *left),
        nbytes_compared=sum(one.nbytes_read for one in saved.values()),
    )


def _merged(found: Collected, adapter: Adapter, learner: Learner) -> Collected:
    """The same, as if the base model itself had been trained, and no adapter."""
    checkpoint, options, config = found.checkpoint, found.options, found.sidecars.config
    dtype = DTYPES.get(options.base_dtype, checkpoint.cast_dtype)
    names = learner.names(config, shapes_of_base(found.weights, found.base))
    stored = weights_of_base(found.weights)
    found = _held_against_base(found, names, stored, _named_by_adapter(adapter))
    tag_dir = checkpoint.location.tag_dir
    judged = judge(found.statements, tag_dir, chosen=found.base.path, allow=options.allow)
    raise_all(judged.refused, tag_dir)
    base = as_in_training(found.base, names, found.weights, adapter, dtype)
    ties = compare_ties(names, stored, base.tensors, found.files)
    known = without_ties(names, ties.differing) if isinstance(names, ModelNames) else None
    model_type = "" if config is None else str(config.content.get("model_type") or "")
    saved = found.saved.get(adapter.name)
    whole = with_saved(found.weights, saved, base.tensors, options)
    merged = merge_adapter(checkpoint, whole, adapter, BaseModel({}, base, known, {}, model_type))
    lacking = base.tensors.keys() - merged.shapes.keys()
    rounded = (
        f", which training had in {dtype.torch_name}" if dtype is not None and base.tensors else ""
    )
    note = f"the adapter {adapter.name!r} is merged into the base model{rounded}"
    copied = {name: path for name, path in found.sidecars.copied.items() if name != README}
    return structs.replace(
        found,
        checkpoint=replace(
            checkpoint,
            frozen_left_out=bool(lacking) if base.tensors else checkpoint.frozen_left_out,
        ),
        weights=merged,
        sidecars=structs.replace(found.sidecars, copied=copied),
        base=base,
        base_tokens=_tokens_of_base(found),
        statements=(
            *found.statements,
            *class_statements(adapter, config),
            *base_form_statements(dtype, checkpoint.cast_dtype, config if base.tensors else None),
        ),
        warnings=(*found.warnings, *(saved.warnings if saved is not None else ())),
        notes=(*found.notes, note, *(saved.notes if saved is not None else ())),
        nbytes_compared=found.nbytes_compared + ties.nbytes_read,
    )


def _tokens_of_base(found: Collected) -> tuple[TokenNumber, ...]:
    path = found.options.base and found.options.base / TOKENIZER
    if path is None or path == found.sidecars.copied.get(TOKENIZER):
        return found.tokens if path else ()
    return token_numbers({TOKENIZER: path})


def _held_against_base(
    found: Collected, names: ModelNames | NamesUnknown, stored: Weights, named: BaseName | None
) -> Collected:
    """The same with what names and weights tell of the base that was given."""
    same = compare_base(
        stored.tensors,
        under_names_of(names, found.base),
        found.files,
        named=named,
        location=found.checkpoint.location,
    )
    facts: dict[AnyFact, Fact] = {Fact.BASE_ROPE: Fact.LONGER_TEXTS} if same.agrees else {}
    stated = (structs.replace(s, fact=facts.get(s.fact, s.fact)) for s in found.statements)
    return structs.replace(
        found,
        statements=(*stated, *same.statements),
        nbytes_compared=found.nbytes_compared + same.nbytes_read,
    )


def _named_by_adapter(adapter: Adapter) -> BaseName:
    name, revision = map(adapter.config.text, ("base_model_name_or_path", "revision"))
    return BaseName(name, revision or "main")


def _named_by_config(found: Collected) -> BaseName | None:
    """What the checkpoint's own config calls the model that training began from.

    None where the checkpoint has all weights: then none is the base's.
    """
    fills_in = found.checkpoint.may_lack_weights and not found.options.exclude_frozen
    if not fills_in or not found.base.tensors.keys() - found.weights.shapes.keys():
        return None
    own, base = found.sidecars.config, found.sidecars.base_config
    is_own = own is not None and (base is None or own.path != base.path)
    name = own.content.get("_name_or_path") if own is not None and is_own else None
    return BaseName(str(name or ""), by=CONFIG)


def _with_model(found: Collected, learner: Learner, task: str) -> Collected:
    """The same with the model that the weights are of, and what its ties and files tell."""
    checkpoint, options = found.checkpoint, found.options
    model = identify(
        found.weights,
        found.sidecars.config,
        learner,
        options,
        may_lack_weights=checkpoint.may_lack_weights,
        task=task,
    )
    names = model.fit.model if isinstance(model.fit, Fit) else model.fit
    found = structs.replace(
        found,
        weights=model.weights,
        sidecars=structs.replace(found.sidecars, config=model.config),
        base=under_tied_sources(names, under_names_of(names, found.base)),
        fit=model.fit,
        heads=model.heads,
    )
    if found.mode is None:
        found = _held_against_base(found, names, model.weights, _named_by_config(found))
    stated = (
        *model_facts(found.sidecars, model.config, names),
        *rope_buffer_statements(model.weights, model.config),
    )
    ties = _compared_ties(found)
    return structs.replace(
        found,
        ties=ties,
        statements=(*found.statements, *stated),
        nbytes_compared=found.nbytes_compared + ties.nbytes_read,
    )


def _compared_ties(found: Collected) -> Ties:
    """What the values say of the ties; only what names of the hub make of them is compared."""
    checkpoint, options = found.checkpoint, found.options
    is_for_hub = options.layout is NameLayout.HUB
    if is_for_hub and is_adapted(found.weights):
        return Ties()
    names, stored = in_form(found.weights, found.fit, options)
    fills_in = checkpoint.may_lack_weights and not options.exclude_frozen
    given = found.base.tensors if fills_in else {}
    return compare_ties(names, stored, given, found.files, stored_twice=is_for_hub)

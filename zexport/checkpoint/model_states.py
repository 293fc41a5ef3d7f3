"""What each kind of ``*_model_states.pt`` holds, as a typed record: model states, or module parts.

Source of the model states' keys: DeepSpeed 0.10 to 0.19, ``runtime/engine.py``
(``_save_checkpoint``). ``client_state`` is merged into its top level, so unknown keys are ignored
there and known keys are checked before they are believed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from zexport.checkpoint.rank_files import RankFile, RankFileKind, read_rank_file
from zexport.checkpoint.untrusted import Value
from zexport.errors import DamagedCheckpointError
from zexport.formats.inert import TensorRef
from zexport.formats.torch_file import TorchFile
from zexport.ranges.dtypes import DType, Shape

ZERO3 = 3
"""The stage that stripes parameters over the ranks."""

MAX_DEGREE = 65536
"""More ranks of one kind of model parallelism than any run has."""


_CASTS = {"bf16": DType.BF16, "bfloat16": DType.BF16, "fp16": DType.F16}
"""Sections of the configuration that switch a cast of the module on; the second is an older name
of the first."""


class Grid(Struct, frozen=True):
    """Degrees of model parallelism; index ``s * tensor + t`` is tensor rank ``t`` of stage ``s``.

    Source: DeepSpeed 0.19.8, ``runtime/pipe/topology.py`` (``ds_model_rank``: ranks of a replica in
    the order of the axes pipe, model).
    """

    stages: int
    tensor: int

    def index(self, stage: int, tensor_rank: int) -> int:
        """The model-parallel index that rank files carry."""
        return stage * self.tensor + tensor_rank


class ModelStates(Struct, frozen=True):
    """What a ``*_model_states.pt`` says.

    Attributes:
        module: the module's state dict; under ZeRO-3 its parameters are empty placeholders.
        param_shapes: one dict per flat group, name to shape, in the order of the flat data.
        frozen_shapes: shapes of the frozen parameters; ``None`` where the key holds ``None``:
            frozen parameters are not recorded as such (ZeRO-1) or were left out (ZeRO-2, 3).
        frozen_fragments: the frozen parameters: whole (ZeRO-2) or this rank's stripe (ZeRO-3).
        shared_params: alias to stored name; only rank 0's is filled.
        skipped_steps: how many steps the optimizer did not take, for an overflow.
        has_experts: whether expert parameters live elsewhere (MoE, AutoEP).
    """

    file: TorchFile
    module: Mapping[str, TensorRef]
    buffer_names: tuple[str, ...]
    param_shapes: tuple[Mapping[str, Shape], ...]
    frozen_shapes: Mapping[str, Shape] | None
    frozen_fragments: Mapping[str, TensorRef]
    shared_params: Mapping[str, str]
    global_steps: int | None
    skipped_steps: int
    dp_world_size: int | None
    ds_version: str | None
    ds_config: Mapping[str, object]
    lr_step: int | None
    has_experts: bool
    tensor_parallel: int

    @property
    def is_round_robin(self) -> bool:
        """Whether ``param_slice_mappings`` are of another order than the data's.

        Source: DeepSpeed 0.10 to 0.19, ``runtime/zero/stage_1_and_2.py``.
        """
        return bool(self.zero_options.get("round_robin_gradients"))

    @property
    def zero_options(self) -> Mapping[object, object]:
        """The section of the configuration that ZeRO has."""
        options = self.ds_config.get("zero_optimization")
        return options if isinstance(options, dict) else {}

    @property
    def cast_dtype(self) -> DType | None:
        """The element type that the configuration has DeepSpeed cast the module to, if any.

        Source: DeepSpeed 0.10 to 0.19, ``runtime/engine.py`` (``_configure_distributed_model``).
        """
        for key, dtype in _CASTS.items():
            section = self.ds_config.get(key)
            if isinstance(section, dict) and section.get("enabled") is True:
                return dtype
        return None

    # What few layouts ask for is read when it is asked for, so that damage there harms no other.

    @property
    def grid(self) -> Grid | None:
        """The degrees of model parallelism, where they are recorded (DeepSpeed 0.19 and later)."""
        degrees = self._at("checkpoint_parallel_dimensions").mapping_or_empty()
        stages, tensor = degrees.get("pp_degree"), degrees.get("tp_degree")
        if type(stages) is not int or type(tensor) is not int:
            return None
        if not (0 < stages <= MAX_DEGREE and 0 < tensor <= MAX_DEGREE):
            raise DamagedCheckpointError(
                "records impossible degrees of parallelism",
                path=self.file.path,
                found=f"{stages} pipeline stages, {tensor} tensor ranks",
                expected=f"1 to {MAX_DEGREE} of each",
            )
        return Grid(stages, tensor)

    @property
    def num_experts(self) -> tuple[int, ...]:
        """The number of experts of every layer that has some, in the module's order."""
        return tuple(item.number() for item in self._at("num_experts").items_or_self())

    @property
    def autoep_layers(self) -> list[Value]:
        """What AutoEP records of each layer that it replaced; the key has an older name."""
        root = Value(self.file.path, "model states", self.file.value)
        key = "ds_autoep_layers" if root.has("ds_autoep_layers") else "autoep_layers"
        return root.get(key).items()

    @property
    def splits_experts(self) -> bool:
        """Whether experts and tensor ranks share their processes (AutoEP with AutoTP).

        Source: DeepSpeed 0.19, ``checkpoint/constants.py`` (``FOLDING_METADATA_KEY``).
        """
        return not self._at("folding").is_none

    @property
    def tensor_splits(self) -> Value:
        """The record of how tensors are split over tensor ranks (``universal_checkpoint_info``)."""
        return self._at("universal_checkpoint_info")

    @property
    def extra_state(self) -> list[str]:
        """The entries of the module's state dict that are no tensors."""
        entries = self._at("module").mapping_or_empty().items()
        return [name for name, one in entries if not isinstance(one, TensorRef)]

    @property
    def optimizer(self) -> Value:
        """The optimizer's state, which lies in the model file without ZeRO."""
        return self._at("optimizer")

    def _at(self, key: str) -> Value:
        return Value(self.file.path, "model states", self.file.value).get(key)


def read_model_states(file: TorchFile) -> ModelStates:
    """The typed record of a model states file."""
    root = Value(file.path, "model states", file.value)
    frozen = root.get("frozen_param_shapes")
    module = root.get("module")
    return ModelStates(
        file=file,
        module={} if module.is_none else module.tensors(),
        buffer_names=tuple(item.text() for item in root.get("buffer_names").items()),
        param_shapes=()
        if _saved_without_masters(root)
        else tuple(group.shapes() for group in root.get("param_shapes").items()),
        frozen_shapes=None
        if frozen.is_none and root.has("frozen_param_shapes")
        else frozen.shapes(),
        frozen_fragments=root.get("frozen_param_fragments").tensors(),
        shared_params={alias: name.text() for alias, name in root.get("shared_params").entries()},
        global_steps=root.get("global_steps").number_or_none(),
        skipped_steps=root.get("skipped_steps").number_or_none() or 0,
        dp_world_size=root.get("dp_world_size").number_or_none(),
        ds_version=root.get("ds_version").text_or_none(),
        ds_config=root.get("ds_config").mapping_or_empty(),
        lr_step=root.get("lr_scheduler").lr_step(),
        has_experts=not (
            root.get("ds_autoep_layers").is_empty and root.get("num_experts").is_empty
        ),
        tensor_parallel=root.get("mp_world_size").number_or_none() or 1,
    )


def _saved_without_masters(root: Value) -> bool:
    """Whether the run kept its masters out of every file, although ``param_shapes`` names them.

    That is so for bf16 without ZeRO in DeepSpeed 0.17 (``runtime/engine.py``: with DDP_BFLOAT16
    ``_save_checkpoint`` leaves the optimizer to optimizer files, which ``_configure_checkpointing``
    has no rank write). BF16_Optimizer, which has such files, needs fp32 gradients or a pipeline.
    """
    config = Value(root.path, "ds_config", root.get("ds_config").mapping_or_empty())
    stage = config.get("zero_optimization").mapping_or_empty().get("stage", 0)
    gradients = config.get("data_types").mapping_or_empty().get("grad_accum_dtype")
    version = root.get("ds_version").text_or_none() or ""
    return (
        version.startswith(("0.17.", "0.18."))
        and config.get("bf16").mapping_or_empty().get("enabled") is True
        and stage == 0
        and gradients in (None, "bf16", "bfloat16")
        and root.get("optimizer").is_none
        and not root.get("module").is_none
        and root.get("num_experts").is_empty
    )


class ModuleFile(Struct, frozen=True):
    """The weights and buffers of one layer of a pipeline, or one expert; numbers are its name's.

    Names are relative to a pipeline's layer, and whole for an expert. Source: DeepSpeed 0.10 to
    0.19, ``runtime/pipe/module.py`` (``save_state_dict``: every layer that has a state dict; a
    second use of a tied layer through a function of its own has none) and ``runtime/engine.py``
    (``_save_moe_checkpoint``).
    """

    file: TorchFile
    layer: int
    expert: int
    tensor_rank: int
    tensors: Mapping[str, TensorRef]


def read_module_files(files: Iterable[RankFile]) -> tuple[ModuleFile, ...]:
    """The contents of ``files``, by tensor rank, layer and expert."""
    read: dict[tuple[int, int, int], ModuleFile] = {}
    for file in files:
        torch_file = read_rank_file(file)
        key = file.tensor_rank, file.layer, file.expert
        if key in read:
            raise DamagedCheckpointError(
                f"is a second file of the same {file.kind.value}",
                path=file.path,
                found=f"{read[key].file.path.name} beside it",
                hint="Remove the files of the other run",
            )
        read[key] = module_file(file, torch_file)
    return tuple(read[key] for key in sorted(read))


def module_file(name: RankFile, file: TorchFile) -> ModuleFile:
    """The content of a file that is read already."""
    where = "expert states" if name.kind is RankFileKind.EXPERT else "layer states"
    tensors = Value(file.path, where, file.value).tensors()
    return ModuleFile(file, name.layer, name.expert, name.tensor_rank, tensors)

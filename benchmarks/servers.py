"""Do vLLM and SGLang take every tensor of an exported folder, and find every one they look for?

``python -m benchmarks.servers {vllm,sglang} FOLDER...`` has the server's own code read the config,
build its model class on the CPU and load the folder. All parameters are filled with NaN before:
what is NaN afterwards was not in the folder, and a tensor whose values are nowhere in the model
was left out. Meant for small folders with random values. Neither server is a dependency of zexport;
``docs/clients.md`` says with which versions this was run.
"""

from __future__ import annotations

import importlib.abc
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import load_file

_Load = Callable[[], object]
_KERNELS = "sgl_kernel"
_ACTIVATIONS = ("gelu_new", "gelu_fast", "gelu_quick", "silu_and_mul", "gelu_and_mul")
"""Kernels that vLLM's models take hold of when they are built; a wheel for CUDA has none here."""


@dataclass(frozen=True)
class Loaded:
    """What became of a folder.

    Attributes:
        model: the server's class.
        error: what ended the loading; empty where nothing did.
        unset: parameters that the folder did not fill.
        skipped: tensors of the folder that are nowhere in the model.
    """

    model: str
    error: str
    unset: Sequence[str]
    skipped: Sequence[str]

    def __str__(self) -> str:
        """``complete``, or what is wrong, on a line."""
        wrong = [f"error: {self.error}"] if self.error else []
        wrong += [f"{len(self.unset)} unset: {', '.join(self.unset[:3])}"] if self.unset else []
        wrong += [f"{len(self.skipped)} skipped: {', '.join(self.skipped[:3])}"][
            : len(self.skipped)
        ]
        return f"{self.model}: {'; '.join(wrong) or 'complete'}"


class _Absent(ModuleType):
    """A module whose functions are all missing, which shows when one is called."""

    __path__: list[str]
    __version__ = "0.4.10"

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _no_kernel


def _no_kernel(*_: object, **__: object) -> None:
    raise RuntimeError("there are no kernels here")


class _AbsentKernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Replace SGLang's compiled package, which only loads on a GPU, by empty modules."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """A place for the package and all in it."""
        inside = name.partition(".")[0] == _KERNELS and name != f"{_KERNELS}.scalar_type"
        return ModuleSpec(name, self, is_package=True) if inside else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module; what is plain Python in the package is read from it."""
        module = _Absent(spec.name)
        module.__path__ = [str(Path(folder) / _KERNELS) for folder in sys.path]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: there is no code."""


def vllm(folder: Path) -> tuple[torch.nn.Module, _Load]:
    """The model that vLLM builds for a folder, and the call that loads it."""
    os.environ.update(VLLM_TARGET_DEVICE="cpu", VLLM_CPU_KVCACHE_SPACE="1")
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    kernels = torch.library.Library("_C", "FRAGMENT")
    for name in _ACTIVATIONS:
        if not hasattr(torch.ops._C, name):
            kernels.define(f"{name}(Tensor! out, Tensor input) -> ()")
    config = EngineArgs(
        model=str(folder),
        dtype="float32",
        enforce_eager=True,
        load_format="safetensors",
        max_model_len=32,
        max_num_batched_tokens=64,
        skip_tokenizer_init=True,
    ).create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(torch.float32):
        meeting = f"file://{tempfile.mkdtemp()}/meeting"
        parallel_state.init_distributed_environment(1, 0, meeting, 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
        model = initialize_model(vllm_config=config)

    def load() -> None:
        with set_current_vllm_config(config):
            loader = DefaultModelLoader(config.load_config)
            loader.load_weights(model, config.model_config)

    return model, load


def sglang(folder: Path) -> tuple[torch.nn.Module, _Load]:
    """The model that SGLang builds for a folder, and the call that loads it."""
    os.environ.update(SGLANG_USE_CPU_ENGINE="1")
    sys.meta_path.insert(0, _AbsentKernels())
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.model_loader.loader import DefaultModelLoader, _initialize_model
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(
        model_path=str(folder),
        attention_backend="triton",
        context_length=32,
        device="cpu",
        disable_cuda_graph=True,
        dtype="float32",
        load_format="safetensors",
        mem_fraction_static=0.1,
        skip_tokenizer_init=True,
    )
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0))
    meeting = f"file://{tempfile.mkdtemp()}/meeting"
    parallel_state.init_distributed_environment(1, 0, meeting, 0, "gloo")
    parallel_state.initialize_model_parallel(backend="gloo")
    initialize_dp_attention(arguments)
    config, how = ModelConfig.from_server_args(arguments), LoadConfig(load_format="safetensors")
    torch.set_default_dtype(torch.float32)
    model = _initialize_model(config, how, None)
    loader = DefaultModelLoader(how)
    return model, lambda: model.load_weights(loader._get_all_weights(config, model))


def examine(folder: Path, server: Callable[[Path], tuple[torch.nn.Module, _Load]]) -> Loaded:
    """What ``server`` makes of a folder."""
    model, load = server(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    error = ""
    try:
        load()
    except (AssertionError, KeyError, RuntimeError, ValueError) as failure:
        error = f"{type(failure).__name__}: {str(failure)[:200]}"
    unset = [name for name, value in model.named_parameters() if value.isnan().any()]
    held = torch.cat(
        [t.detach().float().flatten() for t in (*model.parameters(), *model.buffers())]
    )
    tensors = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    skipped = [name for name, value in tensors.items() if not _is_in(value.float(), held)]
    return Loaded(type(model).__name__, error, unset, skipped)


def _is_in(value: torch.Tensor, held: torch.Tensor) -> bool:
    """Whether a model has a tensor's values: as they are, in 16 bits, or (Mamba's A) as -exp."""
    forms = (value, value.bfloat16().float(), -value.exp())
    return any(bool(torch.isin(form, held).all()) for form in forms)


def main() -> None:
    """Examine each folder in a process of its own; exit with 1 where one is not complete."""
    server = {"vllm": vllm, "sglang": sglang}[sys.argv[1]]
    os.environ["HF_HUB_OFFLINE"] = "1"
    wrong = False
    for folder in map(Path, sys.argv[2:]):
        child = os.fork()
        if not child:
            outcome = str(examine(folder.resolve(), server))
            print(f"{folder}: {outcome}", flush=True)
            os._exit(not outcome.endswith(": complete"))
        wrong |= os.waitpid(child, 0)[1] != 0
    sys.exit(wrong)


if __name__ == "__main__":
    main()

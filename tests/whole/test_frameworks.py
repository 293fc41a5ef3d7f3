"""Commands of pages for newcomers, typed; checkpoints of real frameworks, exported and resumed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from tests.support.framework_runs import FrameworkRun, train
from tests.support.hf_models import load
from tests.support.oracles import differences
from tests.support.raw_states import raw_states
from tests.support.sharded_runs import run_ranks
from tests.support.training_run import make_base
from zexport import ReshardOptions, ResumeFormat, open_checkpoint, reshard

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
TRAINED = REPOSITORY / "fixtures" / "z3_w2_bf16"
LIMIT_S = 300

Tensors = dict[str, torch.Tensor]


def typed(page: str, folder: Path) -> None:
    """Run every zexport command of a page in a shell; all must succeed."""
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    lines = [line for line in "".join(blocks).splitlines() if line.startswith("zexport ")]
    assert lines
    run(folder, "bash", "-euxc", "\n".join(lines))


def run(folder: Path, *words: str) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    pythonpath = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    offline = {"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=folder,
        env=os.environ | offline | {"PATH": path, "PYTHONPATH": pythonpath, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def write_checkpoint(folder: Path, *, with_config: bool = True) -> None:
    """Write a checkpoint without zexport's own files, as other trainers write it."""
    names = ("zexport_*", "*.jsonl", *(() if with_config else ("*.json",)))
    shutil.copytree(TRAINED / "ckpt", folder, ignore=shutil.ignore_patterns(*names))


def write_base(folder: Path) -> None:
    """Write config and tokenizer of the base model."""
    ignored = shutil.ignore_patterns("global_*", "latest")
    shutil.copytree(TRAINED / "ckpt", folder / "base", ignore=ignored)


def assert_loads(model: Path) -> None:
    """Check that transformers finds every weight and no other."""
    _, loading = load(model)
    assert not any(loading.values())


def weights(model: Path) -> Tensors:
    (file,) = model.glob("*.safetensors")
    return load_file(file)


def rounded(truth: Tensors) -> Tensors:
    return {name: value.bfloat16() for name, value in truth.items()}


# --- checkpoints in folders that frameworks use ---


FOLDERS = {
    "from/axolotl.md": ["outputs/out/checkpoint-2"],
    "from/llama-factory.md": ["saves/llama3-8b/full/sft/checkpoint-2"],
    "from/openrlhf.md": [
        f"ckpt/{name}"
        for name in ("checkpoints_sft", "checkpoints_ppo_ray/_actor", "checkpoints_ppo_ray/_critic")
    ],
}
MODELS = {"from/openrlhf.md": ("model", "model-1", "actor")}


@pytest.mark.parametrize("page", FOLDERS)
def test_commands_of_a_framework_page_export_the_trained_weights(page: str, tmp_path: Path) -> None:
    for folder in FOLDERS[page]:
        write_checkpoint(tmp_path / folder, with_config=page != "from/openrlhf.md")
    if page == "from/openrlhf.md":  # two tags, and the config only in the base model
        write_base(tmp_path)
        sft = tmp_path / "ckpt/checkpoints_sft"
        shutil.copytree(sft / "global_step2", sft / "global_step1")
    typed(page, tmp_path)
    truth = load_file(TRAINED / "truth.safetensors")
    for model in MODELS.get(page, ("model",)):
        assert differences(weights(tmp_path / model), rounded(truth)) == []


def save_dcp(truth: Tensors, folder: Path) -> None:
    dcp.save({"model": truth}, checkpoint_id=folder / "run/checkpoint-9/pytorch_model_fsdp_0")


def save_as_verl(truth: Tensors, folder: Path) -> None:
    actor = folder / "checkpoints/global_step_3/actor"
    shutil.copytree(folder / "base", actor / "huggingface")
    torch.save(truth, actor / "model_world_size_1_rank_0.pt")
    (folder / "checkpoints/latest_checkpointed_iteration.txt").write_text("3")


FSDP = {"from/fsdp.md": save_dcp, "from/verl.md": save_as_verl}


@pytest.mark.parametrize("page", FSDP)
def test_commands_of_fsdp_pages_export_the_saved_weights(page: str, tmp_path: Path) -> None:
    truth = load_file(TRAINED / "truth.safetensors")
    write_base(tmp_path)
    FSDP[page](truth, tmp_path)
    typed(page, tmp_path)
    assert differences(weights(tmp_path / "model"), truth) == []
    assert_loads(tmp_path / "model")


@pytest.mark.parametrize("page", ["index.md", "faq.md", "watch.md"])
def test_commands_of_general_pages_export_a_model_that_loads(page: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "run/checkpoint-100")
    (tmp_path / "run/checkpoint-100/trainer_state.json").write_text("{}")
    write_base(tmp_path)
    shutil.copy(TRAINED / "truth.safetensors", tmp_path / "base/model.safetensors")
    typed(page, tmp_path)
    assert_loads(tmp_path / ("models/checkpoint-100" if page == "watch.md" else "model"))


# --- real runs ---


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run of each framework."""
    folder = tmp_path_factory.mktemp("live")
    make_base(folder / "base")
    runs = [first_run(folder, framework) for framework in LIVE]
    run_ranks(2, partial(train, runs=runs), folder / "ranks")
    return folder


def first_run(live: Path, framework: str) -> FrameworkRun:
    return FrameworkRun(framework, live / "base", live / framework)


def of_lightning(truth: Tensors) -> Tensors:
    return rounded({name.removeprefix("model."): value for name, value in truth.items()})


def of_peft(truth: Tensors) -> Tensors:
    trained = {name: value for name, value in truth.items() if ".lora_" in name}
    return rounded({name.replace(".default.", "."): value for name, value in trained.items()})


LIVE: Mapping[str, tuple[str, Callable[[Tensors], Tensors]]] = {
    "accelerate": ("model", rounded),
    "trainer": ("model", rounded),
    "trl": ("adapter", of_peft),
    "lightning": ("model", of_lightning),
    "deepspeed": ("model", rounded),
}
"""Pages, the bf16 folder that each writes, and how in-memory names become Hub names."""


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("page", LIVE)
def test_commands_of_a_framework_page_export_the_weights_of_the_live_engine(
    page: str, live: Path, tmp_path: Path
) -> None:
    shutil.copytree(live / page, tmp_path / "out")
    shutil.copytree(live / "base", tmp_path / "base")
    typed(f"from/{page}.md", tmp_path)
    made, expected = LIVE[page]
    truth = load_file(live / f"{page}.truth.safetensors")
    assert differences(weights(tmp_path / made), expected(truth)) == []
    for model in {"model", "merged"} & {path.name for path in tmp_path.iterdir()}:
        assert_loads(tmp_path / model)


@pytest.mark.slow
@pytest.mark.deepspeed
def test_lightning_callback_exported_the_checkpoint(live: Path) -> None:
    truth = load_file(live / "lightning.truth.safetensors")
    assert differences(weights(live / "lightning.models" / "epoch=0-step=2.ckpt"), truth) == []


@dataclass(frozen=True)
class Resumed:
    """A framework's checkpoint after its first update, resumed on three ranks."""

    framework: str
    saved: str
    stage: int
    is_universal: bool = False
    counts_updates_per_rank: tuple[str, ...] = ()


RESUMED = [
    Resumed("accelerate", "accelerate/step_1", 2, True, ("scheduler.bin", "scheduler_1.bin")),
    Resumed("trainer", "trainer/checkpoint-1", 2),
    Resumed("trl", "trl/checkpoint-1", 3),
    Resumed("lightning", "lightning.ckpt", 2, True),
]


@pytest.fixture(scope="module")
def resumed(live: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, FrameworkRun]:
    """Return a run of each framework on three ranks, from what its first run saved."""
    root, runs = tmp_path_factory.mktemp("resumed"), {}
    for one in RESUMED:
        source = root / one.framework / Path(one.saved).name
        form = ResumeFormat.UNIVERSAL if one.is_universal else ResumeFormat.NATIVE
        options = ReshardOptions(world_size=3, stage=one.stage, format=form)
        warnings = reshard(live / one.saved, source, options).warnings
        counting = [text.split()[0] for text in warnings if "counts ranks x updates" in text]
        assert counting == [*one.counts_updates_per_rank]
        out = root / one.framework / "out"
        runs[one.framework] = FrameworkRun(
            one.framework, live / "base", out, 3, one.stage, source, one.is_universal
        )
    run_ranks(3, partial(train, runs=[*runs.values()]), root / "ranks")
    return runs


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.parametrize("one", RESUMED, ids=lambda one: one.framework)
def test_framework_resumes_on_other_ranks(
    one: Resumed, live: Path, resumed: dict[str, FrameworkRun]
) -> None:
    run = resumed[one.framework]
    saved, again = (
        raw_states(open_checkpoint(it).location.tag_dir)
        for it in (live / one.saved, run.beside("again"))
    )
    assert differences(again, saved) == []
    if one.framework != "lightning":  # which restarts its data in the middle of an epoch
        assert run.losses[-1] == pytest.approx(first_run(live, one.framework).losses[1], rel=2e-3)


def test_every_framework_page_is_run() -> None:
    pages = {f"from/{path.name}" for path in (DOCS / "from").glob("*.md")}
    assert pages == {*FOLDERS, *FSDP, *(f"from/{page}.md" for page in LIVE)}

"""The commands of pages for newcomers, run in a folder like the one on the page."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.hf_models import load
from tests.support.oracles import differences

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
    """Return a folder with a checkpoint of each framework, from a short run."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("live")
    write_base(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "base"))
    model.save_pretrained(folder / "base")
    script = REPOSITORY / "tests" / "support" / "framework_runs.py"
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script))
    run(folder, sys.executable, *launch, str(folder / "base"), str(folder), *LIVE)
    return folder


def of_lightning(truth: Tensors) -> Tensors:
    return rounded({name.removeprefix("model."): value for name, value in truth.items()})


def of_peft(truth: Tensors) -> Tensors:
    trained = {name: value for name, value in truth.items() if ".lora_" in name}
    return rounded({name.replace(".default.", "."): value for name, value in trained.items()})


LIVE: Mapping[str, tuple[str, Callable[[Tensors], Tensors]]] = {
    "trainer": ("model", rounded),
    "trl": ("adapter", of_peft),
    "accelerate": ("model", rounded),
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
    (model,) = (live / "lightning.models").glob("*.ckpt")
    truth = load_file(live / "lightning.truth.safetensors")
    assert differences(weights(model), truth) == []


def test_every_framework_page_is_run() -> None:
    pages = {f"from/{path.name}" for path in (DOCS / "from").glob("*.md")}
    assert pages == {*FOLDERS, *(f"from/{page}.md" for page in LIVE)}

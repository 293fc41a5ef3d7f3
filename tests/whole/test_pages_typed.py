"""The commands of the pages for newcomers, typed in a folder like the one that the page shows."""

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
from safetensors.torch import load_file, save_file

from tests.support.hf_models import load
from tests.support.oracles import differences

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
TRAINED = REPOSITORY / "fixtures" / "z3_w2_bf16"
LIMIT_S = 300

Tensors = dict[str, torch.Tensor]


def typed(page: str, folder: Path) -> None:
    """Every line of a page's blocks that is a command of ours, in a shell, all to a good end."""
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    lines = [line for line in "".join(blocks).splitlines() if line.startswith("zexport ")]
    assert lines
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    pythonpath = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        ["bash", "-euxc", "\n".join(lines)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=folder,
        env=os.environ | {"PATH": path, "PYTHONPATH": pythonpath, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def run_of(folder: Path, *, with_config: bool) -> Path:
    """A checkpoint as other trainers leave it: nothing in it says that zexport made it."""
    shutil.copytree(TRAINED / "ckpt", folder, ignore=shutil.ignore_patterns("zexport_*", "*.jsonl"))
    if not with_config:
        for file in folder.glob("*.json"):
            file.unlink()
    return folder


def base_in(folder: Path) -> None:
    """The model that training began from: its config and tokenizer."""
    shutil.copytree(
        TRAINED / "ckpt", folder / "base", ignore=shutil.ignore_patterns("global_*", "latest")
    )


# --- folders of the same form ---


def axolotl(folder: Path) -> None:
    run_of(folder / "outputs/out/checkpoint-2", with_config=True)


def llama_factory(folder: Path) -> None:
    run_of(folder / "saves/llama3-8b/full/sft/checkpoint-2", with_config=True)


def openrlhf(folder: Path) -> None:
    base_in(folder)
    for name in ("checkpoints_sft", "checkpoints_ppo_ray/_actor", "checkpoints_ppo_ray/_critic"):
        run = run_of(folder / "ckpt" / name, with_config=False)
    sft = folder / "ckpt" / "checkpoints_sft"
    shutil.copytree(run / "global_step2", sft / "global_step1")


FORMS: Mapping[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "from/axolotl.md": (axolotl, ("model",)),
    "from/llama-factory.md": (llama_factory, ("model",)),
    "from/openrlhf.md": (openrlhf, ("model", "model-1", "actor")),
}


@pytest.mark.parametrize("page", FORMS)
def test_what_a_page_says_gives_the_weights_that_were_trained(page: str, tmp_path: Path) -> None:
    prepare, models = FORMS[page]
    prepare(tmp_path)
    typed(page, tmp_path)
    truth = load_file(TRAINED / "truth.safetensors")
    for model in models:
        assert differences(weights(tmp_path / model), rounded(truth)) == []


def test_what_the_page_about_a_training_says_exports_its_checkpoint(tmp_path: Path) -> None:
    run_of(tmp_path / "run/checkpoint-100", with_config=True)
    (tmp_path / "run/checkpoint-100/trainer_state.json").write_text("{}")
    typed("watch.md", tmp_path)
    assert_loads(tmp_path / "models/checkpoint-100")


@pytest.mark.parametrize("page", ["index.md", "faq.md"])
def test_what_the_pages_for_all_say_ends_well(page: str, tmp_path: Path) -> None:
    run_of(tmp_path / "run/checkpoint-100", with_config=True)
    base_in(tmp_path)
    save_file(load_file(TRAINED / "truth.safetensors"), tmp_path / "base/model.safetensors")
    typed(page, tmp_path)
    assert_loads(tmp_path / "model")


def assert_loads(model: Path) -> None:
    """transformers finds every weight, and no other."""
    _, loading = load(model)
    assert not any(loading.values())


def weights(model: Path) -> Tensors:
    (file,) = model.glob("*.safetensors")
    return load_file(file)


def rounded(truth: Tensors) -> Tensors:
    return {name: value.bfloat16() for name, value in truth.items()}


# --- live runs ---


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What each framework left of a short training of its own, in a folder of its name."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("live")
    base_in(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "base"))
    model.save_pretrained(folder / "base")
    script = REPOSITORY / "tests" / "support" / "framework_runs.py"
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    environment = {
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *ranks, str(script), str(folder / "base"), str(folder), *LIVE],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=folder,
        env=os.environ | environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
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
"""Pages, and the bf16 folder that each of them makes; how the engine's names become the hub's."""


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("page", LIVE)
def test_what_a_page_says_gives_the_weights_of_the_running_engine(
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
def test_lightnings_callback_has_exported_what_it_saved(live: Path) -> None:
    """Its export has no config beside the checkpoint, and keeps the names."""
    (model,) = (live / "lightning.models").glob("*.ckpt")
    truth = load_file(live / "lightning.truth.safetensors")
    assert differences(weights(model), truth) == []


def test_every_page_about_a_framework_is_typed() -> None:
    pages = {f"from/{path.name}" for path in (DOCS / "from").glob("*.md")}
    assert pages == {*FORMS, *(f"from/{page}.md" for page in LIVE)}

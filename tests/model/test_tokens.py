"""Token ids without a row in the embedding cause a warning."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE, Model, Unigram, WordLevel, WordPiece

from tests.support import checkpoints
from tests.support.checkpoints import Run, save
from tests.support.exports import export

ROWS = 12
MODELS: dict[str, Callable[[int], Model]] = {
    "WordLevel": lambda n: WordLevel({f"w{number}": number for number in range(n)}),
    "BPE": lambda n: BPE({f'"w{number}:': number for number in range(n)}, []),
    "Unigram": lambda n: Unigram([(f'\\"{number}', -1.5) for number in range(n)]),
    "WordPiece": lambda n: WordPiece({f"\\{number}\\": number for number in range(n)}),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkpoint of an embedding, whose config has another number of rows."""
    tensors = {"model.embed_tokens.weight": torch.ones(ROWS, 4), "out.weight": torch.ones(50, 4)}
    root = save(checkpoints.Model([tensors]), Run(), tmp_path / "run")
    write(root, "config.json", {"model_type": "no_such_model", "vocab_size": 50})
    return root


def write(root: Path, name: str, content: object) -> None:
    (root / name).write_text(content if isinstance(content, str) else json.dumps(content))


def check_warning(root: Path, name: str, highest: int) -> None:
    """There is one warning with the file and the id, if there is no row for it."""
    warnings = export(root, root.parent / "out")["warnings"]
    found = [one for one in warnings if name in one and str(ROWS) in one]
    assert len(found) == (highest >= ROWS)
    assert all(str(highest) in one for one in found)


@pytest.mark.parametrize("highest", [ROWS - 1, ROWS])
@pytest.mark.parametrize("pretty", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_vocabulary(kind: str, pretty: bool, highest: int, root: Path) -> None:
    Tokenizer(MODELS[kind](highest + 1)).save(str(root / "tokenizer.json"), pretty=pretty)
    check_warning(root, "tokenizer.json", highest)


@pytest.mark.parametrize("highest", [ROWS - 1, ROWS])
def test_added_tokens(highest: int, root: Path) -> None:
    tokenizer = Tokenizer(MODELS["BPE"](10))
    tokenizer.add_tokens([AddedToken(f"<{n}>", special=True) for n in range(highest - 9)])
    tokenizer.save(str(root / "tokenizer.json"))
    check_warning(root, "tokenizer.json", highest)


@pytest.mark.parametrize("highest", [ROWS - 1, ROWS])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("vocab.json", {"a": 0, "b": "#"}),
        ("generation_config.json", {"eos_token_id": "#"}),
        ("generation_config.json", {"pad_token_id": [3, "#"]}),
        ("config.json", {"model_type": "no_such_model", "vocab_size": 50, "eos_token_id": "#"}),
        ("config.json", {"model_type": "x", "text_config": {"bos_token_id": "#"}}),
    ],
    ids=str,
)
def test_ids_in_other_files(name: str, content: object, highest: int, root: Path) -> None:
    write(root, name, json.dumps(content).replace('"#"', str(highest)))
    check_warning(root, name, highest)

"""The training loop: one step, the log of all steps, and how a stopped run is taken up again."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zexport.errors import CheckpointError, UsageError
from zexport.storage.files import write_durably
from zexport.storage.local import open_log
from zexport.train.collectives import Ranks
from zexport.train.options import TrainOptions, TrainSummary
from zexport.train.save import GATHERED, Saver, tag_of, tags_in

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from zexport.train.text import Corpus

LOG_FILE = "training_log.jsonl"


@dataclass(slots=True)
class Place:
    """Where the training stands: optimizer steps done, and windows drawn by all ranks together."""

    step: int = 0
    position: int = 0


_LINES_SAID = 20
"""Steps that are spoken of, however many are trained; the log has them all."""


def train_steps(
    saver: Saver, corpus: Corpus, place: Place, say: Callable[[str], None]
) -> TrainSummary:
    """Trains from ``place`` to ``--steps``, saving on the way and at the end. A collective call."""
    options, losses, failure = saver.options, [], ""
    log = _StepLog(options.out / LOG_FILE, enabled=saver.ranks.is_first)
    log.cut(place.step)
    every = -(-options.steps // _LINES_SAID)
    while place.step < options.steps:
        lr = saver.engine.get_lr()[0]
        losses.append(_step(saver, corpus, place))
        log.add(place.step, losses[-1], lr)
        is_last = place.step == options.steps
        if len(losses) == 1 or place.step % every == 0 or is_last:
            say(f"step {place.step}/{options.steps} loss {losses[-1]:.4f} lr {lr:.3g}")
        if is_last or (options.save_every > 0 and place.step % options.save_every == 0):
            tag = tag_of(place.step)
            failure = saver.save(tag, _client_state(place, corpus, saver.ranks))
            goes_on = "" if is_last else ", training goes on"
            say(f"{tag} not saved{goes_on}: {failure}" if failure else f"saved {tag}")
    checkpoints = tags_in(options.out if options.partitioned else options.out / GATHERED)
    return TrainSummary(
        out=options.out,
        tag=checkpoints[-1] if checkpoints else "",
        steps=place.step,
        first_loss=losses[0],
        last_loss=losses[-1],
        checkpoints=checkpoints,
        world_size=options.world_size,
        stage=options.stage,
        partitioned=options.partitioned,
        save_error=failure,
    )


def _step(saver: Saver, corpus: Corpus, place: Place) -> float:
    """One optimizer step on the next windows; the loss is the mean over ranks."""
    engine, ranks = saver.engine, saver.ranks
    rows = engine.train_micro_batch_size_per_gpu()
    rounds = engine.gradient_accumulation_steps()
    total = 0.0
    for _ in range(rounds):
        tokens = corpus.draw(place.position + ranks.rank * rows, rows).to(ranks.device)
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        total += float(loss.detach())
        place.position += ranks.world_size * rows
    place.step += 1
    return ranks.mean(total / rounds)


def _client_state(place: Place, corpus: Corpus, ranks: Ranks) -> dict[str, Any]:
    """What a resumed run needs beside weights, optimizer and schedule.

    A collective call: every rank's dice are in every file, since ZeRO 1 and 2 write the model file
    on rank 0 alone.
    """
    return {
        "step": place.step,
        "epoch": corpus.epoch(place.position),
        "data_position": place.position,
        "rng_states": ranks.gather(_rng_state(ranks.device)),
    }


def _rng_state(device: torch.device) -> dict[str, Any]:
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def resumed_place(engine: DeepSpeedEngine, ranks: Ranks, options: TrainOptions) -> Place:
    """Where the run stood when ``latest`` was saved, with the engine and the dice as they were."""
    tag = (options.out / "latest").read_text(encoding="utf-8").strip()
    _, client_state = engine.load_checkpoint(str(options.out), tag=tag)
    if not client_state or "data_position" not in client_state:
        raise CheckpointError("holds no place to resume from", path=options.out / tag)
    place = Place(client_state["step"], client_state["data_position"])
    if place.step >= options.steps:
        raise UsageError(
            "the run has already come this far",
            path=options.out,
            found=f"step {place.step}",
            expected=f"fewer than --steps {options.steps}",
            hint="Ask for more --steps",
        )
    dice = client_state["rng_states"]
    if ranks.rank < len(dice):  # a rank that the run did not have keeps the dice of its own seed
        _set_rng_state(dice[ranks.rank], ranks.device)
    return place


def _set_rng_state(dice: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(dice["torch"])
    random.setstate(dice["python"])
    if "cuda" in dice and device.type == "cuda":
        torch.cuda.set_rng_state(dice["cuda"], device)


@dataclass(frozen=True, slots=True)
class _StepLog:
    """``training_log.jsonl``, written by rank 0.

    That it cannot be written is no reason to stop: the disk that is full for the log is full for
    the checkpoint, and that is reported.
    """

    path: Path
    enabled: bool

    def cut(self, step: int) -> None:
        """Forget the steps after ``step``, which are about to be taken again."""
        if not self.enabled or not self.path.is_file():
            return
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        write_durably(self.path, "".join(kept).encode())

    def add(self, step: int, loss: float, lr: float) -> None:
        """One line for one step."""
        if not self.enabled:
            return
        line = json.dumps({"step": step, "loss": loss, "lr": lr})
        try:
            with open_log(self.path) as file:
                file.write(line + "\n")
        except OSError:
            return

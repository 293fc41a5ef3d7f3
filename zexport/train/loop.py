"""The training loop, its log, and how a run is resumed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from zexport.errors import UsageError
from zexport.storage.files import write_durably
from zexport.storage.local import open_log
from zexport.train.options import TrainOptions, TrainSummary
from zexport.train.save import GATHERED, Saver, tag_of, tags_in

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from zexport.train.model import Corpus
    from zexport.train.worker import Ranks


_LOG_FILE = "training_log.jsonl"


@dataclass(slots=True)
class Place:
    """Optimizer steps done, and windows drawn by all ranks together."""

    step: int = 0
    position: int = 0


def train_steps(
    saver: Saver, corpus: Corpus, place: Place, report: Callable[[str], None]
) -> TrainSummary:
    """Train from ``place`` to ``--steps``, and save on the way and at the end. Collective."""
    options, losses, failure = saver.options, [], ""
    if saver.ranks.is_first:
        _cut_log(options, place.step)
    every = -(-options.steps // 20)  # the log has all steps
    while place.step < options.steps:
        lr = saver.engine.get_lr()[0]
        losses.append(_step(saver, corpus, place))
        if saver.ranks.is_first:
            _log(options, {"step": place.step, "loss": losses[-1], "lr": lr})
        is_last = place.step == options.steps
        if len(losses) == 1 or place.step % every == 0 or is_last:
            report(f"step {place.step}/{options.steps} loss {losses[-1]:.4f} lr {lr:.3g}")
        if is_last or (options.save_every > 0 and place.step % options.save_every == 0):
            tag = tag_of(place.step)
            failure = saver.save(tag, _client_state(place, corpus, saver.ranks))
            continues = "" if is_last else ", training continues"
            report(f"{tag} not saved{continues}: {failure}" if failure else f"saved {tag}")
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
    """Return the loss of one optimizer step on the next windows, averaged over the ranks."""
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
    """Return the client state. Collective.

    Every rank's random states are in every file, because ZeRO-1/2 writes rank 0's only.
    """
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if ranks.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(ranks.device)
    return {
        "step": place.step,
        "epoch": corpus.epoch(place.position),
        "data_position": place.position,
        "rng_states": ranks.gather(state),
    }


def resume_from_latest(engine: DeepSpeedEngine, ranks: Ranks, options: TrainOptions) -> Place:
    """Load engine and random states from ``latest``, and return the place of the run."""
    tag = (options.out / "latest").read_text(encoding="utf-8").strip()
    _, client_state = engine.load_checkpoint(str(options.out), tag=tag)
    place = Place(client_state["step"], client_state["data_position"])
    if place.step >= options.steps:
        raise UsageError(
            "the run has already reached this step",
            path=options.out,
            found=f"step {place.step}",
            expected=f"fewer than --steps {options.steps}",
            hint="Pass more --steps",
        )
    states = client_state["rng_states"]
    if ranks.rank < len(states):  # a new rank keeps the states of its own seed
        own = states[ranks.rank]
        torch.set_rng_state(own["torch"])
        random.setstate(own["python"])
        if "cuda" in own and ranks.device.type == "cuda":
            torch.cuda.set_rng_state(own["cuda"], ranks.device)
    return place


def _cut_log(options: TrainOptions, step: int) -> None:
    """Remove the steps after ``step``, which are repeated."""
    path = options.out / _LOG_FILE
    if path.is_file():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        write_durably(path, "".join(kept).encode())


def _log(options: TrainOptions, line: dict[str, object]) -> None:
    # If the disk is full, the next save reports it.
    with suppress(OSError), open_log(options.out / _LOG_FILE) as file:
        file.write(json.dumps(line) + "\n")

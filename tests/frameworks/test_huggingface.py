"""`protect` on transformers' own Trainer: killed, restarted, and compared with an undisturbed run."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.scripts import run

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

SCRIPT = """
import copy, hashlib, os, random, signal, sys, tempfile, warnings
os.environ["HOLDFAST_EVERY"] = "1"
warnings.filterwarnings("ignore")
import numpy, torch
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from holdfast import StateMismatch
from holdfast.integrations.huggingface import protect

torch.set_num_threads(1)
stop, kind, ends, protected = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4] == "protected"
torch.manual_seed(0)
generator = torch.Generator().manual_seed(1)
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 31, (30, 9), generator=generator)]
model = GPT2LMHeadModel(GPT2Config(vocab_size=31, n_positions=16, n_embd=16, n_layer=2, n_head=2,
                                   bos_token_id=0, eos_token_id=0))

class Counting(torch.utils.data.Dataset):
    asked = 0
    def __len__(self): return len(data)
    def __getitem__(self, i):
        self.asked += 1
        return {name: row.roll(self.asked) for name, row in data[i].items()}

class Told(TrainerCallback):
    def on_epoch_end(self, args, state, control, **_):
        if protected and ends == "late" and state.global_step == stop:
            raise ZeroDivisionError
    def on_step_end(self, args, state, control, **_):
        if ends == "asked" and state.global_step == stop:
            control.should_training_stop = True

class Average(TrainerCallback):
    def __init__(self): self.average = copy.deepcopy(model)
    def on_step_end(self, args, state, control, **_):
        with torch.no_grad():
            for mine, theirs in zip(self.average.parameters(), model.parameters()): mine.lerp_(theirs, 0.2)
    def swap(self):
        for mine, theirs in zip(self.average.parameters(), model.parameters()):
            kept = mine.data.clone(); mine.data.copy_(theirs.data); theirs.data.copy_(kept)

average = Average() if kind == "average" else None

def masked(samples):  # draws, as collators for masked language models do
    ids = torch.stack([sample["input_ids"] for sample in samples])
    return {"input_ids": torch.where(torch.rand(ids.shape) < 0.3, 30, ids), "labels": ids}

class Watched(Trainer):
    kept = None
    def training_step(self, model, inputs, *args, **kwargs):
        if kind == "keeps":  # trains three times on what was drawn, as TRL's trainers do
            if self.state.global_step % 3 == 0 or self.kept is None:
                self.kept = [{name: value.roll(int(torch.randint(9, ())), 1) for name, value in inputs.items()}]
            inputs = dict(self.kept[0])
        return super().training_step(model, inputs, *args, **kwargs)
    def evaluate(self, *args, **kwargs):
        if average is None:
            return super().evaluate(*args, **kwargs)
        average.swap()
        result = super().evaluate(*args, **kwargs)
        average.swap()
        return result
    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        step = self.state.global_step
        if not model.training:
            torch.rand(1)
            if step == stop and ends == "evaluation":
                os.kill(os.getpid(), signal.SIGKILL)
            return loss
        if protected and kept.snapshot is not None and stop - 3 <= step <= stop:
            kept.snapshot.drain(60)  # such short steps are skipped while snapshots are being sealed
        if step == stop and ends == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == stop and ends == "raise":
            raise ZeroDivisionError
        rows = sum(inputs["input_ids"].flatten().tolist())
        print(step, self.state.epoch, rows, loss.item().hex(), self._get_learning_rate().hex(), flush=True)
        return loss

with tempfile.TemporaryDirectory() as folder:
    more = {
        "accumulate": {"gradient_accumulation_steps": 4},
        "masked by workers": {"dataloader_num_workers": 1},
        "masked by workers that live on": {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
        "evaluated before it began": {"eval_on_start": True},
        "files": {"save_strategy": "steps", "save_steps": 4},
        "unseeded": {"accelerator_config": {"use_seedable_sampler": False}, "dataloader_num_workers": 1},
    }.get(kind, {})
    args = TrainingArguments(
        sys.argv[4] if kind == "files" else folder, num_train_epochs=3, per_device_train_batch_size=3,
        learning_rate=1e-2, use_cpu=True, report_to=[],
        disable_tqdm=True, logging_steps=3, eval_strategy="epoch", warmup_steps=5, seed=3,
        metric_for_best_model="loss", **{"save_strategy": "no", **more},
    )
    stopping = EarlyStoppingCallback(*((1, 1e9) if ends == "gain" else (30,)))
    trainer = Watched(
        model, args, train_dataset=Counting() if kind == "own state" else data, eval_dataset=data[:6],
        data_collator=masked if "masked" in kind else None,
        callbacks=[stopping, Told(), *([average] if average else [])],
    )
    kept = protect(trainer) if protected else None
    try:
        result = trainer.train(resume_from_checkpoint=bool(kind == "files" and os.listdir(sys.argv[4])))
    except ZeroDivisionError:
        sys.exit(3)
    except StateMismatch as error:
        sys.exit(f"end {error}")
sha = hashlib.sha256()
held = [v for parameter in model.parameters() for v in trainer.optimizer.state[parameter].values()]
if average is not None:
    held += average.average.parameters()
for tensor in [*model.state_dict().values(), *held]:
    sha.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
state = trainer.state
skip = ("runtime", "per_second")
history = [{k: v for k, v in entry.items() if not any(s in k for s in skip)} for entry in state.log_history]
print("end", sha.hexdigest(), torch.rand(1).item().hex(), random.random(), numpy.random.random(), state.global_step,
      state.epoch, state.best_metric, state.total_flos, result.training_loss, history,
      *(part.state() for part in trainer.callback_handler.callbacks if isinstance(part, EarlyStoppingCallback)))
"""


train = partial(run, SCRIPT)


@pytest.mark.parametrize(
    ("kind", "stops"),
    [
        pytest.param("plain", [4, 10, 17], marks=pytest.mark.slow),
        pytest.param("accumulate", [4, 6], marks=pytest.mark.slow),
        pytest.param("unseeded", [13], marks=pytest.mark.slow),
        pytest.param("evaluated before it began", [10], marks=pytest.mark.slow),
        pytest.param("files", [10], marks=pytest.mark.slow),  # the restart loads one, too, and memory takes precedence
        pytest.param("average", [10, 17], marks=pytest.mark.slow),
        pytest.param("masked", [10, 11, 17], marks=pytest.mark.slow),
        pytest.param("masked by workers", [4, 13], marks=pytest.mark.slow),
        pytest.param("keeps", [4, 11], marks=pytest.mark.slow),
    ],
)
@pytest.mark.proves("hugging-face")
def test_a_killed_run_goes_on_bit_for_bit(
    arena: Path, kind: str, stops: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("alone", "protected"):
        Path(folder).mkdir()
    undisturbed = train(-1, kind, protected=False)
    lines: list[str] = []
    for stop in stops:
        before = train(stop, kind)
        lines += before
    after = train(-1, kind)
    assert lines + after == undisturbed
    assert not (arena / "test").exists()


@pytest.mark.slow
def test_persistent_workers_begin_each_epoch_anew(arena: Path) -> None:
    """So what they draw is other than without holdfast, but the same after a restart."""
    kind = "masked by workers that live on"
    undisturbed = train(-1, kind)
    before = train(13, kind)
    after = train(-1, kind)
    assert [*before, *after][:-1] == undisturbed[:-1]
    weights, expected = (lines[-1].split()[:2] for lines in (after, undisturbed))
    assert weights == expected


@pytest.mark.slow
def test_a_restart_that_is_given_other_batches_is_refused(arena: Path) -> None:
    """The data set counts what it gives, which nobody restores."""
    train(13, "own state")
    with pytest.raises(AssertionError, match="data"):
        train(-1, "own state")
    assert (arena / "test").exists()


@pytest.mark.slow
def test_a_snapshot_that_does_not_fit_is_refused_with_the_reason(arena: Path) -> None:
    train(4, "plain")
    with pytest.raises(AssertionError, match="end tracked"):
        train(-1, "average")


@pytest.mark.slow
@pytest.mark.parametrize(("ends", "stop", "first"), [("raise", 13, 13), ("late", 10, 9), ("evaluation", 10, 9)])
def test_an_exception_or_a_kill_in_an_evaluation_loses_one_step_at_most(
    arena: Path, ends: str, stop: int, first: int
) -> None:
    undisturbed = train(-1, "plain", protected=False)
    train(stop, "plain", ends)
    assert (arena / "test").exists()
    after = train(-1, "plain")
    assert after == undisturbed[first:]


@pytest.mark.slow
def test_a_run_that_is_asked_to_stop_goes_on_in_its_epoch(arena: Path) -> None:
    undisturbed = train(-1, "plain", protected=False)
    before = train(13, "plain", "asked")
    assert before[:-1] == undisturbed[:13]
    assert (arena / "test").exists()
    after = train(-1, "plain")
    assert after == undisturbed[12:]
    assert not (arena / "test").exists()


@pytest.mark.slow
def test_a_run_that_gains_nothing_any_more_is_over(arena: Path) -> None:
    lines = train(-1, "plain", "gain")
    assert len(lines) == 20 + 1
    assert not (arena / "test").exists()

"""Small data sets, tokenizers and models with random weights, from fixed seeds, in the formats that the scripts read.

Things that a script would download from a hub by name are in its working folder under that name. Each function gets
that folder, and the interpreter that runs the script.
"""

from __future__ import annotations

import csv
import json
import pickle
import random
import subprocess
from pathlib import Path

import numpy as np

MADE_S = 300.0

WORDS = ("the", "of", "and", "to", "in", "is", "it", "on", "God", "O", "was", "as", "be", "by", "at", "or", "an", "we")


def text(words: int, seed: int = 1) -> str:
    """Lines of words, drawn so that each word helps to predict the next."""
    drawn = random.Random(seed)
    at, said = 0, []
    for number in range(words):
        at = (at * 5 + drawn.choice((1, 1, 1, 2, 7))) % len(WORDS)
        said.append(WORDS[at] + ("!\n" if number % 12 == 11 else ", " if number % 7 == 5 else " "))
    return "".join(said)


def words(folder: Path, python: Path) -> None:
    """Write ``text.txt`` and ``held.txt``, a tokenizer in ``tok`` and a metric ``accuracy``."""
    (folder / "text.txt").write_text(text(6000))
    (folder / "held.txt").write_text(text(700, seed=2))
    _tokenizer(folder / "tok", "PreTrainedTokenizerFast", special="<|endoftext|>")
    _metric(folder / "accuracy", "accuracy", "(p == r).mean()")


def characters(folder: Path, python: Path) -> None:
    """Write ``input.txt``, which minGPT reads."""
    (folder / "input.txt").write_text(text(4000))


def binaries(folder: Path, python: Path) -> None:
    """Write ``data/words``, which nanoGPT reads."""
    home = folder / "data" / "words"
    home.mkdir(parents=True)
    for name, seed in (("train", 1), ("val", 2)):
        letters = np.frombuffer(text(6000, seed).encode(), np.uint8)
        (letters % 64).astype(np.uint16).tofile(home / f"{name}.bin")
    (home / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 64}))


def wikitext(folder: Path, python: Path) -> None:
    """Write ``data/wikitext-2.txt``, which Lightning's demos read."""
    (folder / "data").mkdir()
    (folder / "data" / "wikitext-2.txt").write_text(text(20_000))


def wikitext_2(folder: Path, python: Path) -> None:
    """Write ``data/wikitext-2``, which word_language_model reads."""
    home = folder / "data" / "wikitext-2"
    home.mkdir(parents=True)
    for name, count in (("train", 2000), ("valid", 400), ("test", 400)):
        (home / f"{name}.txt").write_text(text(count, seed=count))


def shards(folder: Path, python: Path) -> None:
    """Write ``train.bin`` and ``val.bin``, which llm.c reads: a header of 256 numbers, then tokens."""
    for name, seed in (("train", 1), ("val", 2)):
        tokens = np.frombuffer(text(6000, seed).encode(), np.uint8).astype(np.uint16)
        header = np.zeros(256, np.int32)
        header[:3] = 20240520, 1, len(tokens)
        (folder / f"{name}.bin").write_bytes(header.tobytes() + tokens.tobytes())


def digits(folder: Path, python: Path) -> None:
    """Write small pictures of noise beside the working folder, in ``data``, where examples look for MNIST."""
    home = folder.parent / "data" / "MNIST" / "raw"
    home.mkdir(parents=True)
    drawn = np.random.RandomState(5)
    for name, count in (("train", 200), ("t10k", 40)):
        pictures = drawn.randint(0, 256, (count, 28, 28)).astype(np.uint8)
        sizes = np.array([0x803, count, 28, 28], ">i4")  # the format's number, then the sizes
        (home / f"{name}-images-idx3-ubyte").write_bytes(sizes.tobytes() + pictures.tobytes())
        sizes = np.array([0x801, count], ">i4")
        labels = np.arange(count).astype(np.uint8) % 10
        (home / f"{name}-labels-idx1-ubyte").write_bytes(sizes.tobytes() + labels.tobytes())


def pictures(folder: Path, python: Path) -> None:
    """Write ``images``, folders of small pictures by class, which timm reads."""
    subprocess.run([python, "-c", _PICTURES], cwd=folder, check=True, capture_output=True, timeout=MADE_S)


def waves(folder: Path, python: Path) -> None:
    """Write ``traindata.npy``, short waves as those of time_sequence_prediction."""
    shifts = np.random.RandomState(2).randint(-80, 80, 12)
    np.save(folder / "traindata.npy", np.sin((np.arange(60) + shifts[:, None]) / 20.0))


def pairs(folder: Path, python: Path) -> None:
    """Write pairs of sentences, a tiny BERT and a metric where accelerate's examples look for MRPC, BERT and GLUE."""
    home = folder / "tests" / "test_samples" / "MRPC"
    home.mkdir(parents=True)
    drawn = random.Random(3)
    for name, count in (("train", 96), ("dev", 16)):
        with (home / f"{name}.csv").open("w", newline="") as out:
            rows = csv.writer(out)
            rows.writerow(["label", "sentence1", "sentence2"])
            for number in range(count):
                same = number % 2
                one = [drawn.choice(WORDS) for _ in range(6)]
                other = one if same else [drawn.choice(WORDS) for _ in range(6)]
                rows.writerow([("not_equivalent", "equivalent")[same], " ".join(one), " ".join(other)])
    bert = folder / "bert-base-cased"
    _tokenizer(bert, "BertTokenizerFast", special="[PAD]", most=16)
    subprocess.run([python, "-c", _BERT], cwd=bert, check=True, capture_output=True, timeout=MADE_S)
    _metric(folder / "glue", "glue", "(p == r).mean()")


def _tokenizer(home: Path, kind: str, special: str, most: int = 128) -> None:
    """Write a tokenizer with one token per word."""
    home.mkdir()
    tokens = [special, "[UNK]", "[CLS]", "[SEP]", "[MASK]", "!", ",", *WORDS]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    described = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
    }
    (home / "tokenizer.json").write_text(json.dumps(described))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "pad_token": special}
    names |= {"eos_token": special, "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    (home / "tokenizer_config.json").write_text(json.dumps({**names, "model_max_length": most}))


_BERT = """
import torch, transformers
torch.manual_seed(4)
shape = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=64)
shaped = transformers.BertConfig(max_position_embeddings=32, **shape)
transformers.BertForSequenceClassification(shaped).save_pretrained(".")
"""

_PICTURES = """
import numpy, os, PIL.Image
drawn = numpy.random.RandomState(6)
for part, count in (("train", 20), ("val", 4)):
    for kind in ("noise", "stripes"):
        home = f"images/{part}/{kind}"
        os.makedirs(home)
        for number in range(count):
            pixels = drawn.randint(0, 256, (72, 72, 3))
            pixels = pixels if kind == "noise" else pixels[:1] + numpy.zeros_like(pixels)
            PIL.Image.fromarray(pixels.astype("uint8")).save(f"{home}/{number}.png")
"""

_METRIC = """
import datasets
import evaluate
import numpy as np
class Metric(evaluate.Metric):
    def _info(self):
        numbers = {{"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}}
        return evaluate.MetricInfo(description="", citation="", features=datasets.Features(numbers))
    def _compute(self, predictions, references):
        p, r = np.asarray(predictions), np.asarray(references)
        return {{"{name}": float({value})}}
"""


def _metric(home: Path, name: str, value: str) -> None:
    """Write a metric that ``evaluate.load(name)`` finds in the working folder."""
    home.mkdir()
    (home / f"{name}.py").write_text(_METRIC.format(name=name, value=value))

"""Real text that every machine has: the source of Python's own standard library, as token ids."""

import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

VOCABULARY_SIZE = 8192
CORPUS_CHARACTERS = 6_000_000
VALIDATION_SHARE = 0.1
FILE_START = "<|file|>"
# Installed packages, tests, generated tables and applications: what is left reads like a library.
SKIPPED_FOLDERS = {
    *("site-packages", "dist-packages", "test", "tests"),
    *("encodings", "pydoc_data", "ensurepip", "idlelib", "lib2to3", "turtledemo"),
}


class Corpus(NamedTuple):
    """Token ids of the training and validation files, where they are from, and what turns text into ids and back."""

    train: np.ndarray
    validation: np.ndarray
    vocabulary_size: int
    files: int
    characters: int
    tokenizer: Any


def standard_library() -> Corpus:
    """Reads the standard library, trains a byte-level BPE vocabulary on nine tenths of it, and encodes both parts.

    Whole files are held out, and the vocabulary never sees them. The same interpreter always gives the same corpus.

    Raises:
      FileNotFoundError: if the standard library's source is not installed as files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    texts = _read(_source_files(root))
    if not texts:
        raise FileNotFoundError(f"the Python standard library must be installed as .py files; found none in {root}")
    train, validation = _hold_out(texts)
    tokenizer = _byte_pair_encoding(train)
    return Corpus(
        train=_encode(tokenizer, train),
        validation=_encode(tokenizer, validation),
        vocabulary_size=tokenizer.get_vocab_size(),
        files=len(texts),
        characters=sum(map(len, texts)),
        tokenizer=tokenizer,
    )


def windows(tokens: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """Cuts out the runs of `length` tokens that begin at `starts`: int32 (len(starts), length)."""
    return tokens[starts[:, None] + np.arange(length)]


def _source_files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*.py") if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts))


def _read(paths: Iterable[Path]) -> list[str]:
    """Reads the text of files, in order, up to the size of the corpus."""
    texts: list[str] = []
    characters = 0
    for path in paths:
        text = path.read_text("utf-8", errors="replace")
        characters += len(text)
        if characters > CORPUS_CHARACTERS:
            break
        texts.append(text)
    return texts


def _hold_out(texts: Iterable[str]) -> tuple[list[str], list[str]]:
    """Sends a file to the validation part whenever that has less than its share of the text so far."""
    train: list[str] = []
    validation: list[str] = []
    seen = held_out = 0
    for text in texts:
        seen += len(text)
        if held_out + len(text) <= VALIDATION_SHARE * seen:
            held_out += len(text)
            validation.append(text)
        else:
            train.append(text)
    return train, validation


def _byte_pair_encoding(texts: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[FILE_START],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _encode(tokenizer: Any, texts: list[str]) -> np.ndarray:
    file_start = [tokenizer.token_to_id(FILE_START)]
    encodings = tokenizer.encode_batch(texts)
    return np.concatenate([part for encoding in encodings for part in (file_start, encoding.ids)]).astype(np.int32)

"""The text that the embedded models learn from, as token windows.

A corpus folder holds ``*.txt`` story files and ``*.jsonl`` files of ``question`` / ``answer`` records. Files whose
name starts with ``valid`` and the last 2 % of each ``.jsonl`` are for validation only.
"""

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

BEGIN, END = "<|begin|>", "<|end|>"
VOCABULARY_SIZE = 4096
STORY_MARK = "<|endoftext|>"
CALCULATOR_MARK = re.compile(r"<<[^>]*>>")
OPENING = re.compile(r"(Once upon a time|Once there was|Once, there|There once was|Long ago|One (sunny )?day)\b")
HELD_OUT_QUESTIONS = 0.02
# Formats a question like the maths documents, so that `messages` and `turns` work with these models too.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'assistant' %} {{ message.content | trim }}\n\n"
    "{% elif message.role == 'system' %}{{ message.content | trim }}\n\n"
    "{% else %}Question: {{ message.content | trim }}\nAnswer:{% endif %}"
    "{% endfor %}"
)


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents by domain: whole stories, and (question, answer) pairs."""

    stories: list[str]
    questions: list[tuple[str, str]]
    valid_stories: list[str]
    valid_questions: list[tuple[str, str]]

    def training_documents(self) -> list[str]:
        return self.stories + [question_document(*pair) for pair in self.questions]


def question_prompt(question: str) -> str:
    return f"Question: {question.strip()}\nAnswer:"


def question_document(question: str, answer: str) -> str:
    return f"{question_prompt(question)} {answer.strip()}"


def read_corpus(folder: Path) -> Corpus:
    """Read a corpus folder; raises FileNotFoundError when it lacks stories or questions."""
    corpus = Corpus([], [], [], [])
    for path in sorted(folder.glob("*.txt")):
        stories = split_stories(path.read_text(encoding="utf-8"))
        (corpus.valid_stories if path.name.startswith("valid") else corpus.stories).extend(stories)
    for path in sorted(folder.glob("*.jsonl")):
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        pairs = [(r["question"].strip(), CALCULATOR_MARK.sub("", r["answer"]).strip()) for r in records]
        first_held_out = round(len(pairs) * (1 - HELD_OUT_QUESTIONS))
        corpus.questions.extend(pairs[:first_held_out])
        corpus.valid_questions.extend(pairs[first_held_out:])
    if not (corpus.stories and corpus.questions and corpus.valid_stories):
        raise FileNotFoundError(f"{folder} needs *.txt stories, valid*.txt stories and *.jsonl questions")
    return corpus


def split_stories(text: str) -> list[str]:
    """Split at the end marks, or, in a file that has none, before paragraphs that open a story."""
    text = text.replace("\r\n", "\n")
    if STORY_MARK in text:
        return [story.strip() for story in text.split(STORY_MARK) if len(story.strip()) > 100]
    stories: list[list[str]] = []
    for paragraph in re.split(r"\n\s*\n", text):
        opens = OPENING.match(paragraph.strip())
        # "One day" also continues a story, so it opens one only after a story's worth of text.
        unlikely = opens and opens.group(1).startswith("One") and bool(stories) and sum(map(len, stories[-1])) < 600
        if not stories or (opens and not unlikely):
            stories.append([])
        stories[-1].append(paragraph.strip())
    return [story for story in map("\n\n".join, stories) if len(story) > 100]


def train_tokenizer(documents: Sequence[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 4,096 entries; every digit is a token, so that a number has only one spelling."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 0)])
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token=BEGIN, eos_token=END, pad_token=END, model_max_length=1024
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def encode_documents(tokenizer: PreTrainedTokenizerBase, documents: Sequence[str]) -> list[torch.Tensor]:
    """Each document as int64 ids, begin and end tokens included."""
    end = tokenizer.convert_tokens_to_ids(END)
    return [torch.tensor([*ids, end]) for ids in tokenizer(list(documents))["input_ids"]]


def windows(documents: Sequence[torch.Tensor], length: int, seed: int) -> torch.Tensor:
    """The windows of one epoch: documents in a seeded order, packed and cut into ``(N, length + 1)`` int64 ids.

    Neighbouring windows share one token, so that every token is predicted once.
    """
    order = random.Random(seed).sample(range(len(documents)), len(documents))
    stream = torch.cat([documents[i] for i in order])
    count = (len(stream) - 1) // length
    starts = torch.arange(count) * length
    return stream[starts[:, None] + torch.arange(length + 1)]  # (N, length + 1)


def batches(
    documents: Sequence[torch.Tensor], length: int, tokens_per_batch: int, seed: int, skip: int = 0
) -> Iterator[torch.Tensor]:
    """Endless batches ``(B, length + 1)`` over seeded epochs; the first ``skip`` batches are left out."""
    size, epoch, seen = max(1, tokens_per_batch // length), 0, 0
    while True:
        epoch_windows = windows(documents, length, seed + epoch)
        shuffle = torch.Generator().manual_seed(seed + epoch)
        epoch_windows = epoch_windows[torch.randperm(len(epoch_windows), generator=shuffle)]
        for start in range(0, len(epoch_windows) - size + 1, size):
            seen += 1
            if seen > skip:
                yield epoch_windows[start : start + size]
        epoch += 1

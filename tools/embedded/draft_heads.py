"""Train the draft heads of the embedded target from text: ``python -m tools.embedded.draft_heads --corpus DIR``.

Each stage is skipped if its result is in the work folder, and resumed from its last checkpoint:

1. answers: the target continues training prompts, greedily and sampled, and some validation prompts for evaluation;
2. training: a head learns from these texts, prompts included, and from text of the corpus. The corpus costs a pass of
   the target, whereas answers cost one for each token;
3. evaluation against the embedded draft, on unseen stories and questions;
4. export: bfloat16 safetensors in the layout that `train-draft` writes, and a card.

Deterministic given ``--seed`` on one machine and one number of threads.
"""

import argparse
import hashlib
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from specctl.decoding.sampling import Sampling
from specctl.models.draft_heads.block import BlockHead
from specctl.models.draft_heads.chain import ChainHead
from specctl.models.draft_heads.checkpoint import draft_head
from specctl.models.draft_heads.file_layout import Verifier, write_head
from specctl.models.draft_heads.kinds import HEAD_KINDS, Recipe
from specctl.models.draft_heads.training import Teacher, new_head
from specctl.models.files.checkpoint import Checkpoint
from specctl.profile.schema import model_path
from specctl.reporting.table import as_markdown
from specctl.training.draft_heads import (
    Acceptance,
    Answer,
    DraftLearner,
    acceptance_in_rounds,
    drafts_of_head,
    drafts_of_model,
    result_tables,
)
from specctl.training.epochs import Schedule, Training
from specctl.training.lessons import Lessons
from tools.embedded.corpus import Corpus, encode_documents, question_prompt, read_corpus
from tools.embedded.recipe import finished
from tools.embedded.teacher import continue_prompts

MASK = 1
"""The end token, behind which nothing is drafted, stands for what a block head is to draft."""
DEPTH = 7
"""Tokens of the rounds that are evaluated."""
HEADS = {
    "eagle3": Recipe("eagle3", steps=5, rounds=0.25, optimizer="muon"),
    "glide": Recipe("glide", steps=5, optimizer="muon"),
    "dspark": Recipe("dspark", depth=2, steps=7, anchors=40, gamma=4.0, markov_rank=64, optimizer="muon"),
}


@dataclass(frozen=True, slots=True)
class Course:
    """Everything that decides a head's weights, besides its `Recipe`. Lengths in tokens.

    Attributes:
        seed: of texts, weights and order.
        prompts: stories, and as many questions, that the target answers.
        greedy_share: of them answered greedily, the others at temperature 1.
        passes: how often each answer is read.
        corpus_documents: texts of the corpus, read once.
        longest: a text is cut there.
        batch_size: texts in a step.
        lr: highest learning rate, of Muon for matrices and AdamW for all other weights.
        held_out: validation prompts of each domain for evaluation.
        begin: the folder of an earlier head of the kind, whose weights it begins with; empty for weights of its own.
    """

    seed: int = 0
    prompts: int = 1800
    greedy_share: float = 0.6
    passes: int = 2
    corpus_documents: int = 3600
    longest: int = 420
    batch_size: int = 8
    lr: float = 3e-3
    held_out: int = 48
    begin: str = ""


Answered = dict[str, list[tuple[bool, int, torch.Tensor]]]
"""By domain: whether greedy, the length of the prompt, and prompt and answer ``(N,)``."""


def answered(
    course: Course,
    corpus: Corpus,
    target: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    *,
    dev: bool,
) -> Answered:
    """The target's answers to training prompts or, of fewer, to validation prompts."""
    if path.exists():
        loaded: Answered = torch.load(path, weights_only=True)
        return loaded
    chooser = random.Random(f"{course.seed}/{dev}")
    torch.manual_seed(chooser.getrandbits(63))
    count = course.held_out if dev else course.prompts
    stories, questions = (corpus.valid_stories, corpus.valid_questions) if dev else (corpus.stories, corpus.questions)

    def encoded(text: str) -> torch.Tensor:
        return torch.tensor(tokenizer(text)["input_ids"])

    # Openings, and the longer beginnings of stories that are well under way.
    lengths = [chooser.randint(4, 40) if chooser.random() < 0.6 else chooser.randint(40, 110) for _ in range(count)]
    prompts = {
        "stories": [encoded(s)[:n] for s, n in zip(chooser.sample(stories, count), lengths, strict=True)],
        "maths": [encoded(question_prompt(question)) for question, _ in chooser.sample(questions, count)],
    }
    found: Answered = {}
    for (domain, some), limit in zip(prompts.items(), (224, 170), strict=True):
        split = round(len(some) * course.greedy_share)
        found[domain] = []
        for greedy, part in ((True, some[:split]), (False, some[split:])):
            texts = continue_prompts(target, part, not greedy, limit, f"{domain}, {'greedy' if greedy else 'sampled'}")
            found[domain] += [(greedy, len(p), text) for p, text in zip(sorted(part, key=len), texts, strict=True)]
    torch.save(found, path)
    return found


def lessons(course: Course, answers: Answered, documents: list[torch.Tensor]) -> list[Answer]:
    """All texts to learn from, as answers to the begin token."""
    texts = [text for domain in answers.values() for _, _, text in domain] * course.passes
    texts += random.Random(course.seed).sample(documents, min(course.corpus_documents, len(documents)))
    cut = [text[: course.longest].int() for text in texts]
    return [Answer(number, True, text[:1], text[1:]) for number, text in enumerate(cut)]


def compare(
    head: ChainHead | BlockHead, kind: str, target: LlamaForCausalLM, draft: LlamaForCausalLM, unseen: Answered
) -> list[Acceptance]:
    """The head beside the draft, by domain and way of answering."""
    depth = min(DEPTH, head.longest or DEPTH)
    drafts = {HEAD_KINDS[kind].title: drafts_of_head(head, depth), "embedded:draft": drafts_of_model(draft, depth)}
    teacher, results = Teacher(target, head.layers), []
    for domain, texts in unseen.items():
        for greedy in (True, False):
            some = [
                Answer(0, greedy, text[:size], text[size:]) for likeliest, size, text in texts if likeliest == greedy
            ]
            found = acceptance_in_rounds(teacher, drafts, some, Sampling(0.0 if greedy else 1.0), depth)
            results += [replace(each, answers=f"{domain}, {each.answers}") for each in found]
    return results


def card(results: list[Acceptance], recipe: Recipe, course: Course, tokens: int, steps: int, sha256: str) -> str:
    """The head's card, in Markdown."""
    name = HEAD_KINDS[recipe.kind].title
    settings = {**asdict(recipe), **asdict(course)}
    own = ", ".join(f"{key} {value}" for key, value in settings.items() if key != "kind" and value not in (0, ""))
    tables = "\n".join(f"## {table.title}\n\n{as_markdown(table)}" for table in result_tables(results))
    return f"""# {name} for embedded:target

A draft head that reads the hidden states of embedded:target
({HEAD_KINDS[recipe.kind].paper}), in the layout that `specctl train-draft` writes. A
demonstration, like the models of its family: it lets every command run with a draft head on a machine without weights.

- Made by `python -m tools.embedded.draft_heads --corpus DIR --kind {recipe.kind}` (torch {torch.__version__}).
- It learned in {steps:,} steps over {tokens:,} tokens: answers of the target, and text of the corpus.
  Muon trained the matrices of its layers, AdamW all other weights.
- Settings: {own}.
- Data: TinyStories (Eldan and Li, 2023), CDLA-Sharing-1.0; GSM8K (Cobbe et al., 2021), training split, calculator marks
  stripped, MIT. The text is not part of the project.
- Licence of the weights: the project's, Apache-2.0. SHA-256 of model.safetensors: `{sha256}`.

{tables}"""


def earlier(folder: Path, target: LlamaForCausalLM) -> ChainHead | BlockHead:
    """The head that a folder holds, in float32."""
    found = draft_head(Checkpoint(str(folder), "draft", None, folder, "folder"))
    if found is None:
        raise SystemExit(f"{folder}: not a draft head")
    return found.network(target).float()


def loaded(name: str) -> LlamaForCausalLM:
    """An embedded model in float32."""
    return finished(LlamaForCausalLM.from_pretrained(model_path(name), dtype=torch.float32))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--corpus", type=Path, required=True, help="folder with *.txt stories and *.jsonl questions")
    parser.add_argument("--kind", choices=list(HEADS), required=True)
    parser.add_argument("--work", type=Path, default=Path("embedded-draft-heads"), help="answers and checkpoints")
    parser.add_argument("--output", type=Path, default=model_path("target").parent, help="where the head's folder goes")
    for name, value in asdict(Course()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    args = parser.parse_args()
    course, recipe = Course(**{name: getattr(args, name) for name in asdict(Course())}), HEADS[args.kind]
    args.work.mkdir(parents=True, exist_ok=True)

    corpus = read_corpus(args.corpus)
    tokenizer = AutoTokenizer.from_pretrained(model_path("target"))
    target, draft = loaded("target"), loaded("draft")
    answers = answered(course, corpus, target, tokenizer, args.work / "answers.pt", dev=False)
    unseen = answered(course, corpus, target, tokenizer, args.work / "unseen.pt", dev=True)
    texts = lessons(course, answers, encode_documents(tokenizer, corpus.training_documents()))

    head = new_head(recipe, target, None, MASK, course.seed)
    if course.begin:
        head.load_state_dict(earlier(Path(course.begin), target).state_dict())
    learner = DraftLearner(head, recipe, Lessons(target, head.layers, texts), course.seed)
    schedule = Schedule(1, course.batch_size, course.lr, course.seed)
    training = Training(learner, schedule, len(texts), args.work / f"{args.kind}.state")
    training.run(lambda: print(f"step {training.step}/{training.steps}  loss {learner.loss:.3f}", flush=True))
    export(head.bfloat16(), recipe, course, texts, training.steps, args.output / args.kind, target, draft, unseen)


def export(
    head: ChainHead | BlockHead,
    recipe: Recipe,
    course: Course,
    texts: list[Answer],
    steps: int,
    folder: Path,
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    unseen: Answered,
) -> None:
    """Write a head of bfloat16 weights, then its card with what it is worth."""
    write_head(folder, head, Verifier.of("embedded:target", target))
    (folder / "model.safetensors").chmod(0o644)
    results = compare(head.float(), recipe.kind, target, draft, unseen)
    sha256 = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    tokens = sum(len(text.tokens) for text in texts)
    (folder / "README.md").write_text(card(results, recipe, course, tokens, steps, sha256), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Training of draft heads: a target's answers, a head that learns from them, and its acceptance."""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from specctl.decoding.logits.logits import TINY
from specctl.decoding.sampling import Sampling
from specctl.errors import UsageError
from specctl.models.draft_heads.block import BlockHead
from specctl.models.draft_heads.chain import ChainHead
from specctl.models.draft_heads.file_layout import Verifier, write_head
from specctl.models.draft_heads.kinds import HEAD_KINDS, Recipe
from specctl.models.draft_heads.training import Lesson, Teacher, drafted_blocks, drafted_steps, new_head
from specctl.models.files.token_counts import TokenCounts
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.running.pair import Pair
from specctl.observing.progress import Progress
from specctl.observing.prompt_answers import AnsweredPrompt
from specctl.outputs import write_whole
from specctl.profile.schema import Profile, SamplingTable, require_whole
from specctl.reporting.table import DEFINITIONS, Table, inert
from specctl.text_engine.engine import Answer as ReplicaAnswer
from specctl.training.epochs import Learner, Schedule
from specctl.training.lessons import Lessons, room_for_states
from specctl.training.material import Material, joined, parts_of
from specctl.training.model_card import Made, Report, card
from specctl.training.subject import STATE, Source, Subject

RESULTS, CARD, CONFIG = "evaluation.json", "README.md", "config.json"
TOKEN_COUNTS = "token_counts.json"  # For `draft.tokens`, of a head that learned from few tokens' logits
STATES = "states"  # Folder of the target's states for the answers, while a head is trained
SHORTEST = 2  # Tokens of the shortest usable answer: one to draft after another
DEPTH = 7  # Tokens of the longest evaluated round
BLOCKS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the target."""

    number: int  # index of the prompt in its suite, from 0; the turns of a conversation share it
    greedy: bool  # whether each token is the target's likeliest, not sampled
    prompt: torch.Tensor  # ``(P,)`` int32, the ids before the answer
    tokens: torch.Tensor  # ``(A,)`` int32, the target's


class AnswerFolder(Material[Answer]):
    """Answers in a folder of shards."""

    command, contents = "train-draft", "answers"

    @classmethod
    def pack(cls, items: Sequence[Answer]) -> dict[str, torch.Tensor]:
        return {
            "numbers": torch.tensor([answer.number for answer in items], dtype=torch.int32),
            "greedy": torch.tensor([answer.greedy for answer in items], dtype=torch.bool),
            "prompt_lengths": torch.tensor([len(answer.prompt) for answer in items], dtype=torch.int32),
            "answer_lengths": torch.tensor([len(answer.tokens) for answer in items], dtype=torch.int32),
            "tokens": joined([part for answer in items for part in (answer.prompt, answer.tokens)], torch.int32),
        }

    def unpack(self, tensors: dict[str, torch.Tensor]) -> Iterator[Answer]:
        numbers, greedy = tensors["numbers"].tolist(), tensors["greedy"].tolist()
        for number, likeliest, text in zip(numbers, greedy, parts_of(tensors), strict=True):
            yield Answer(number, likeliest, *text)


def answered_greedily(number: int) -> bool:
    """Whether a prompt is answered greedily: every second one, also among those for evaluation."""
    return (number + number // 10) % 2 == 0


def frequent_tokens(answers: Sequence[Answer], vocabulary: int, size: int) -> torch.Tensor | None:
    """The most frequent ids of the answers, ``(size,)`` int64, ascending; None for the whole vocabulary, as for size 0.

    Unused ids fill up the list, the lowest first.
    """
    if not size or size >= vocabulary:
        return None
    counts = Counter(token for answer in answers for token in answer.tokens.tolist())
    ranked = sorted(range(vocabulary), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(ranked[:size]))


class DraftLearner(Learner):
    """A draft head that learns from a target's answers.

    Attributes:
        loss: of the last step, in nats for most kinds; None before the first.
    """

    warm_up = 0.04
    clip = 0.5

    def __init__(self, head: ChainHead | BlockHead, recipe: Recipe, lessons: Lessons, seed: int) -> None:
        self.head, self._recipe, self._lessons, self._seed = head, recipe, lessons, seed
        self.networks, self.optimizers = [head], _optimizers(head, recipe.optimizer)
        self.facts = {"recipe": asdict(recipe)}
        self.loss: float | None = None

    def gradients(self, batch: Sequence[int], epoch: int, step: int) -> None:  # noqa: ARG002 - the step is enough
        """Accumulate the gradients of a batch's mean loss per answer token."""
        generator = torch.Generator().manual_seed(random.Random(f"step/{self._seed}/{step}").getrandbits(63))
        kind, total = HEAD_KINDS[self._recipe.kind].module, 0.0
        tokens = sum(self._lessons.length(index) for index in batch)
        for index in batch:
            loss = kind.loss(self.head, self._lessons.lesson(index), self._recipe, generator) / tokens
            loss.backward()
            total += float(loss.detach())
        self.loss = total


def _optimizers(head: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    named = [(name, weight) for name, weight in head.named_parameters() if weight.requires_grad]
    matrices: list[nn.Parameter] = []
    if kind == "muon":
        outer = ("embed_tokens", "lm_head", "markov_head", "confidence")
        matrices = [weight for name, weight in named if weight.ndim == 2 and not name.startswith(outer)]
    inner = {id(weight) for weight in matrices}
    others = [weight for _, weight in named if id(weight) not in inner]
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)]
    if matrices:
        # Scaled to use the same learning rate as AdamW.
        found.append(torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"))
    return found


@dataclass(frozen=True, slots=True)
class Drafted:
    """The distributions of one drafted token of several rounds."""

    start: int  # the answer token that the first round drafts first; each next round begins one token later
    index: int  # the token's index in its round, from 0
    logits: torch.Tensor  # ``(R, V)``; row i is for the answer's token ``start + i + index``, given the text before it


Drafts = Callable[[Answer, Lesson], Iterator[Drafted]]  # The rounds of a draft from every position of an answer


@torch.no_grad()  # a ``with`` block around ``yield`` would disable gradients for the caller
def head_drafts(head: ChainHead | BlockHead, lesson: Lesson, depth: int) -> Iterator[Drafted]:
    """The rounds of a draft head, of ``depth`` tokens or its maximum."""
    if isinstance(head, ChainHead):
        for step in drafted_steps(head, lesson, depth):
            yield Drafted(int(step.answer_rows[0]) - step.index, step.index, head.widened(step.logits))
        return
    for start in range(0, lesson.length, BLOCKS_AT_ONCE):
        end = min(start + BLOCKS_AT_ONCE, lesson.length)
        anchors = torch.arange(start, end, device=lesson.ids.device) + lesson.first - 1
        blocks = drafted_blocks(head, lesson, anchors)
        for index in range(min(depth, head.longest)):
            if (rounds := lesson.length - index - start) > 0:
                yield Drafted(start, index, blocks.logits[:rounds, index])


def model_drafts(logits: torch.Tensor, depth: int) -> Iterator[Drafted]:
    """The rounds of a draft model with logits ``(A, V)``, which do not depend on where a round began."""
    for index in range(min(depth, len(logits))):
        yield Drafted(0, index, logits[index:])


def drafts_of_head(head: ChainHead | BlockHead, depth: int) -> Drafts:
    return lambda _, lesson: head_drafts(head, lesson, depth)


def drafts_of_model(model: PreTrainedModel, depth: int) -> Drafts:
    reader = Teacher(model, ())
    return lambda answer, _: model_drafts(reader.lesson(answer.prompt, answer.tokens).logits, depth)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The target's acceptance of a draft's rounds."""

    draft: str  # its name
    answers: str  # ``greedy``, or the sampling settings
    rounds: int  # the number of rounds that were compared
    reached: tuple[float, ...]  # for each k from 1 the probability that the first k tokens are all accepted

    @property
    def by_position(self) -> tuple[float, ...]:
        """For each k, the acceptance probability of the k-th token given that all earlier ones are accepted; 0 if they
        never are.
        """
        before = (1.0, *self.reached)
        return tuple(now / then if then else 0.0 for then, now in zip(before, self.reached, strict=False))

    @property
    def lengths(self) -> tuple[float, ...]:
        """For each K, the mean number of accepted tokens in a round that drafts K."""
        return tuple(sum(self.reached[:count]) for count in range(1, len(self.reached) + 1))

    @property
    def document(self) -> dict[str, Any]:
        """Values that JSON can hold."""
        return {
            "draft": self.draft,
            "answers": self.answers,
            "rounds": self.rounds,
            "acceptance": list(self.by_position),
            "accepted": list(self.lengths),
        }


def acceptance_in_rounds(
    teacher: Teacher,
    drafts: Mapping[str, Drafts],
    answers: Sequence[Answer],
    sampling: Sampling,
    depth: int = DEPTH,
    after_answer: Callable[[], None] = lambda: None,
) -> list[Acceptance]:
    """The acceptance of several drafts in the same rounds, which begin at each position of the answers.

    For an answer x of the target, a round that drafts K tokens accepts the first k of them with probability ``sum over
    x_1..x_k of prod_i min(p(x_i), q_i(x_i))``. This is the mean over answers of ``prod_(i<k) min(1, q_i(x_i) / p(x_i))
    * sum_v min(p(v), q_k(v))``, where p and q_i are the distributions of the target and of the draft's i-th token,
    after temperature and filters, each given the answer before it. For a greedy target it is 1 if the draft's likeliest
    tokens are the answer's, else 0.

    Args:
        teacher: the target, with the layers that the drafts read.
        drafts: what to compare, by name.
        answers: the target's, made with ``sampling``.
        sampling: of target and drafts.
        depth: tokens of a round; rounds cut short by the answer's end are left out.
        after_answer: called after each answer.
    """
    totals = torch.zeros(len(drafts), depth, dtype=torch.float64)
    rounds = 0
    for answer in answers:
        lesson = teacher.lesson(answer.prompt, answer.tokens)
        # After a prompt of one token, a chain head has no features to draft from.
        first = 1 if lesson.first == 1 else 0
        count = lesson.length - depth + 1
        if count > first:
            for total, of in zip(totals, drafts.values(), strict=True):
                total += _reached(lesson, of(answer, lesson), sampling, depth)[first:count].sum(0)
            rounds += count - first
        after_answer()
    name = "greedy" if sampling.greedy else f"temperature {sampling.temperature:g}"
    means = (totals / max(rounds, 1)).tolist()
    return [Acceptance(draft, name, rounds, tuple(mean)) for draft, mean in zip(drafts, means, strict=True)]


def _reached(lesson: Lesson, drafted: Iterator[Drafted], sampling: Sampling, depth: int) -> torch.Tensor:
    """``(A, K)`` float64 on the CPU: the probability that the first k tokens of the round at each token are accepted.

    It is 0 where there is no such round.
    """
    target = sampling.probs(lesson.logits)  # (A, V)
    text = lesson.ids[lesson.first :]  # (A,)
    ratios, overlap = (torch.zeros(lesson.length, depth, dtype=torch.float64) for _ in range(2))
    for each in drafted:
        rows = len(each.logits)
        begin = each.start + each.index
        wanted = target[begin : begin + rows]
        own = sampling.probs(each.logits[:, : target.shape[1]].float())
        tokens = text[begin : begin + rows, None]
        ratio = (own.gather(1, tokens) / wanted.gather(1, tokens).clamp_min(TINY)).clamp(max=1)
        ratios[each.start : each.start + rows, each.index] = ratio[:, 0].double().cpu()
        overlap[each.start : each.start + rows, each.index] = torch.minimum(wanted, own).sum(1).double().cpu()
    before = torch.cat([torch.ones(lesson.length, 1, dtype=torch.float64), ratios[:, :-1].cumprod(1)], 1)
    return before * overlap


def result_tables(results: Sequence[Acceptance]) -> list[Table]:
    """Tables of acceptance by position, and of accepted tokens per round."""
    numbers = range(1, len(results[0].reached) + 1)
    rounds = {result.answers: result.rounds for result in results}
    counted = ", ".join(f"{count} rounds of {answers} answers" for answers, count in rounds.items())
    return [
        Table.filled(
            "Acceptance by position in the round",
            ("draft", "answers", *(f"token {number}" for number in numbers)),
            ([each.draft, each.answers, *each.by_position] for each in results),
            labels=2,
            note=f"{DEFINITIONS} {counted}, to prompts that were not used in training.",
        ),
        Table.filled(
            "Tokens accepted of a round",
            ("draft", "answers", *(f"of {number}" for number in numbers)),
            ([each.draft, each.answers, *each.lengths] for each in results),
            labels=2,
        ),
    ]


def draft_card(
    results: Sequence[Acceptance], recipe: Recipe, schedule: Schedule, facts: dict[str, Any], made: Made
) -> str:
    """The model card of a head, in Markdown; ``facts`` are models, prompts and settings of the answers."""
    kind, target = HEAD_KINDS[recipe.kind], inert(facts["target"])
    unused = {"kind"}.union(*(row.flags for row in HEAD_KINDS.values())) - kind.flags
    settings = {**asdict(recipe), **asdict(schedule)}
    return card(
        f"{kind.title} for {target}",
        f"A draft head that reads the hidden states of {target} ({kind.paper}), made by `specctl train-draft`. Use "
        "it with `model` in `[draft]` set to this folder.",
        facts,
        f"every second one greedy, the others at temperature {facts['sampling']['temperature']:g}. Every tenth prompt "
        "was kept for evaluation",
        (),
        {name: value for name, value in settings.items() if name not in unused and value != 0},
        made,
        result_tables(results),
    )


class DraftHeads(Subject[Answer, Pair]):
    """Networks that draft from a target's hidden states.

    They learn from its answers, every second one greedy, the others sampled. The profile's draft model, if any, speeds
    up answering and is the baseline for a head; its policy does not change the answers' distribution.
    """

    command, folder = "train-draft", AnswerFolder
    ends, others = (CONFIG,), (RESULTS, TOKEN_COUNTS)
    scratch = (STATE, STATES)
    maker = "specctl.training.draft_heads:replica"

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile)
        require_whole(profile.target, "target", self.command)
        if profile.draft is not None:
            require_whole(profile.draft, "draft", self.command)

    def sampling(self, number: int) -> SamplingTable:
        changes = {"temperature": 0.0} if answered_greedily(number) else {}
        return super().sampling(number).model_copy(update=changes)

    def items(self, pair: Pair, found: AnsweredPrompt) -> list[Answer]:  # noqa: ARG002 - the texts are enough
        greedy = found.settings.temperature == 0
        texts = [(each.prompt, each.tokens) for each in found.completions if len(each.tokens) >= SHORTEST]
        return [Answer(found.number, greedy, *(torch.tensor(part).int() for part in text)) for text in texts]

    def check(self, material: Material[Answer]) -> None:
        if material.facts["target"] != self.profile.target.model:
            raise UsageError(
                f"{material.path} holds answers of another target ({material.facts['target']}) than "
                f"{self.profile.target.model!r}",
                "collect answers of this target first",
            )

    def require(self, pair: Pair) -> None:
        pair.torch_model(0, self.command)

    def models(self, pair: Pair | None, progress: Progress) -> Pair:
        return self.load(progress) if pair is None else pair

    def make(
        self, output: Path, source: Source[Answer, Pair], recipe: Recipe, schedule: Schedule, progress: Progress
    ) -> Report:
        """Train a head, evaluate it on held-out prompts, and write it to ``output`` with its model card."""
        target, material = source.models.torch_model(0, self.command), source.material
        split, vocabulary = material.split(), target.config.get_text_config(decoder=True).vocab_size
        # A block head uses the target's output layer, and so its whole vocabulary.
        size = recipe.draft_vocabulary if "draft_vocabulary" in HEAD_KINDS[recipe.kind].flags else 0
        tokens = frequent_tokens(split.train, vocabulary, size)
        kind, mask = HEAD_KINDS[recipe.kind], _mask_token(source.models)
        head = new_head(recipe, target, tokens, mask, schedule.seed)
        if trimmed := tokens is not None and head.tokens is None:
            # A head with the target's output layer learns from the logits of these tokens, and is written as it is.
            cast(ChainHead, head).draft_only(DraftVocabulary(tokens.tolist(), vocabulary))
        several = (schedule.epochs > 1 or kind.fits) and room_for_states(
            output, split.train, head.layers, head.state_size
        )
        lessons = Lessons(target, head.layers, split.train, tokens, output / STATES if several else None)
        if kind.fits and not (output / STATE).is_file():
            with progress.counting("answers read", len(lessons)) as advance:
                kind.module.fit(head, lessons.each(advance))
        learner = DraftLearner(head, recipe, lessons, schedule.seed)
        seconds = self.train(output, learner, schedule, split.train, progress)
        began = perf_counter()
        teacher = Teacher(target, head.layers)
        results = self._compare(source, head.bfloat16().float(), recipe, teacher, split.dev, progress)
        made = Made.of(material.seconds, seconds, perf_counter() - began)
        documents = [result.document for result in results]
        write_whole(output / RESULTS, json.dumps(documents, indent=1) + "\n")
        write_whole(output / CARD, draft_card(results, recipe, schedule, material.facts, made))
        verifier = Verifier.of(material.facts["target"], target)
        if trimmed:
            counts = TokenCounts.of(answer.tokens.tolist() for answer in split.train)
            write_whole(output / TOKEN_COUNTS, counts.text())
            weights = head.state_dict()
            head = new_head(recipe, target, None, mask, schedule.seed)
            head.load_state_dict(weights)
        write_head(output, head.bfloat16(), verifier)  # its last file marks it as complete
        self.remove(output, *self.scratch)
        progress.say(f"wrote {output}")
        return Report({"drafts": documents}, result_tables(results))

    def _compare(
        self,
        source: Source[Answer, Pair],
        head: ChainHead | BlockHead,
        recipe: Recipe,
        teacher: Teacher,
        answers: list[Answer],
        progress: Progress,
    ) -> list[Acceptance]:
        """Compare the head with the profile's draft model, on greedy and on sampled answers."""
        depth = min(DEPTH, head.longest or DEPTH)
        drafts = {HEAD_KINDS[recipe.kind].title: drafts_of_head(head, depth)}
        models = source.models.models
        if self.profile.draft is not None and len(models) > 1 and (model := models[1]) is not None:
            drafts[self.profile.draft.model] = drafts_of_model(model, depth)
        sampled = Sampling.of(SamplingTable.model_validate(source.material.facts["sampling"]))
        results: list[Acceptance] = []
        with progress.counting("evaluated answers", len(answers)) as advance:
            for sampling in (Sampling(), *([] if sampled.greedy else [sampled])):
                some = [answer for answer in answers if answer.greedy == sampling.greedy]
                results += acceptance_in_rounds(teacher, drafts, some, sampling, depth, advance)
        if not (found := [each for each in results if each.rounds]):
            raise UsageError(f"no answer kept for evaluation has {depth} tokens", "set a larger --max-new-tokens")
        return found


def _mask_token(pair: Pair) -> int:
    """A special token for masks; no draft begins after it."""
    tokenizer: Any = pair.tokenizer
    known = (tokenizer.mask_token_id, tokenizer.pad_token_id, *sorted(pair.eos))
    return next((int(token) for token in known if token is not None), 0)


def replica(*, number: int, profile: Profile) -> ReplicaAnswer:  # noqa: ARG001 - all do the same
    """The maker of a replica that collects answers."""
    return DraftHeads(profile).replica()

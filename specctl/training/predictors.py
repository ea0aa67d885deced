"""Predictors of acceptance: examples from answers, training, evaluation, and their folders with reports."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from specctl.decoding.draft_tokens import draft_token_generator, draw_along
from specctl.decoding.sampling import Sampling
from specctl.errors import UsageError
from specctl.models.draft_heads.checkpoint import DraftHeadCheckpoint
from specctl.models.files.checkpoint import locate, weights_hash
from specctl.models.loading.model import load_model
from specctl.models.loading.pair_members import find_head
from specctl.models.predictors.predictor_checkpoint import CONFIG, KIND, WEIGHTS, Kind, save_predictor, save_weights
from specctl.models.running.pair import Pair
from specctl.observing.progress import Progress
from specctl.observing.prompt_answers import AnsweredPrompt
from specctl.outputs import write_whole
from specctl.policies import DISTRIBUTION_SIGNALS, SIGNAL_NAMES, TOP_PROBS
from specctl.profile.schema import DraftTable, Profile, require_whole
from specctl.profile.validation import require_models
from specctl.prompts.suites import Suite
from specctl.records import Completion
from specctl.reporting.document import render, write_files
from specctl.reporting.style import Picture, page, panels, style
from specctl.reporting.table import DEFINITIONS, DOWN, Columns, Table, inert
from specctl.text_engine.engine import Answer
from specctl.training.epochs import Schedule
from specctl.training.material import Material
from specctl.training.model_card import Made, Report, card
from specctl.training.predictor_evaluation import SEQUENCES_AT_ONCE, Evaluation, evaluate
from specctl.training.predictor_examples import (
    MIX,
    DraftStates,
    Example,
    ExampleFolder,
    ModelStates,
    Stored,
    stored_states,
)
from specctl.training.predictor_learner import DiscoNetwork, PredictorLearner, PredictorRecipe, features_of
from specctl.training.predictor_rounds import RoundTokens, read_model_rounds, read_rounds
from specctl.training.subject import STATE, Source, Subject

SWEEP_DEPTHS = (0, 1, 2, 3, 4)
SWEEP_WEIGHTS = (1.0, 3.0, 6.0, 12.0)
_SPECDEC = "SpecDec++: Huang, Guo, Wang 2024, arXiv 2405.19715"
_DISCO = "DISCO: Mamou and others 2024, arXiv 2405.04304"


def sweep_recipes(*, signals: bool = False) -> list[PredictorRecipe]:
    """The recipes of all predictors in SpecDec++'s Table 3, which read no signals."""
    return [PredictorRecipe(depth, weight, signals) for depth in SWEEP_DEPTHS for weight in SWEEP_WEIGHTS]


def predictor_tables(evaluation: Evaluation) -> list[Table]:
    """One predictor's tables: its scores and those of single signals, the verdict, and its reliability."""
    weight = evaluation.recipe.reject_weight
    depth = "" if evaluation.recipe.depth is None else f"depth {evaluation.recipe.depth}, "
    scores = [("the head", evaluation.predictor)]
    scores += [(SIGNAL_NAMES[name], found) for name, found in evaluation.signals.items()]
    rows = ([name, found.kl, found.loss, found.ece, found.auroc] for name, found in scores)
    return [
        Table.filled(
            f"How well acceptance is predicted ({depth}rejection weight {weight:g})",
            ("by", "KL (nats)", "weighted loss (nats)", "calibration error", "AUROC"),
            rows,
            note=f"{DEFINITIONS} {evaluation.tokens} tokens of {evaluation.prompts} prompts that were not used "
            f"in training, {evaluation.accepted:.1%} of them accepted.",
        ),
        _verdict(evaluation),
        Table.filled(
            "Reliability",
            ("predicted", "tokens", "mean prediction", "accepted"),
            (
                [f"{each.low:.1f} to {each.high:.1f}", each.count, each.middle, f"{each.value:.3f}"]
                for each in evaluation.reliability
            ),
            note=""
            if weight == 1
            else f"Predictions are too low by design: in training a rejection weighs {weight:g} times an acceptance.",
        ),
    ]


def sweep_tables(evaluations: Sequence[Evaluation]) -> list[Table]:
    """All predictors of a sweep: KL as in SpecDec++'s Table 3, then every score."""
    kl = {(e.recipe.depth, e.recipe.reject_weight): e.predictor.kl for e in evaluations}
    plain = next(e.signals for e in evaluations if e.recipe.reject_weight == 1)
    signals = ", ".join(f"{SIGNAL_NAMES[name]} {found.kl:.4f}" for name, found in plain.items())
    return [
        Table(
            f"KL (nats) by depth and rejection weight{DOWN}",
            ("depth", *(f"{weight:g}" for weight in SWEEP_WEIGHTS)),
            tuple((str(d), *(f"{kl[d, weight]:.4f}" for weight in SWEEP_WEIGHTS)) for d in SWEEP_DEPTHS),
            note=f"{DEFINITIONS} {evaluations[0].tokens} tokens of {evaluations[0].prompts} prompts that were not "
            f"used in training. KL of single signals: {signals}.",
        ),
        Table.of("Every head compared with the best single signal", _COMPARED, evaluations),
    ]


def predictor_card(evaluation: Evaluation, config: dict[str, Any], made: Made) -> str:
    """The model card of the predictor, in Markdown; ``config`` is its config.json."""
    sampling, settings = config["sampling"], config["training"]
    draft, target = inert(config["draft_model"]), inert(config["target_model"])
    disco = settings["depth"] is None
    unused = {"signals", "depth", "mix"} if disco else {"signals"}
    policy, paper = ("disco", _DISCO) if disco else ("specdec++", _SPECDEC)
    reads = "the draft's last hidden state"
    if disco:
        reads = (
            f"the {TOP_PROBS} largest probabilities of the draft's distribution after the token, its entropy, and the "
            "number of the token in its round"
        )
    if settings["signals"]:
        signals = ", ".join(SIGNAL_NAMES[name] for name in DISTRIBUTION_SIGNALS)
        reads += f", and the {signals} of the step that sampled the token"
    return card(
        f"An acceptance head for {draft}",
        f"Predicts whether {target} will accept a token that {draft} drafted ({paper}). Made by `specctl train-head`; "
        f"for the policy `{policy}`, set `head` in `[draft]` to this folder. It belongs to one set of draft weights, "
        f"SHA-256 `{config['draft_sha256']}`.",
        config,
        f"temperature {sampling['temperature']:g}, top-k {sampling['top_k']}",
        [f"It reads {reads}."],
        {name: value for name, value in settings.items() if name not in unused},
        made,
        predictor_tables(evaluation),
    )


def _verdict(evaluation: Evaluation) -> Table:
    by = "KL" if evaluation.recipe.reject_weight == 1 else "weighted loss"
    if beaten_by := [SIGNAL_NAMES[name] for name in evaluation.beaten_by]:
        return Table(
            f"The head is no better than {' or '.join(beaten_by)} alone, by {by}.",
            (),
            (),
            note="Train on more prompts, or use a policy that reads this signal: it predicts as well and costs less.",
            alarm=True,
        )
    return Table(f"The head is better than each single signal by {by}.", (), ())


def _best(evaluation: Evaluation) -> str:
    return min(evaluation.signals, key=lambda name: evaluation.signals[name].loss)


_COMPARED: Columns[Evaluation] = {
    "head": lambda one: one.recipe.name,
    "weighted loss": lambda one: one.predictor.loss,
    "best signal's loss": lambda one: one.signals[_best(one)].loss,
    "best signal": lambda one: SIGNAL_NAMES[_best(one)],
    "calibration error": lambda one: one.predictor.ece,
    "AUROC": lambda one: one.predictor.auroc,
}


def write_reliability(evaluation: Evaluation, folder: Path) -> list[Path]:
    """Write reliability.png and .svg and return their paths; without matplotlib, write nothing."""
    if find_spec("matplotlib") is None:
        return []
    drawn = render(draw_reliability(evaluation))
    return write_files({f"{drawn.name}.png": drawn.png, f"{drawn.name}.svg": drawn.svg}, folder)


def draw_reliability(evaluation: Evaluation) -> Picture:
    """Draw predicted against true acceptance."""
    weight = evaluation.recipe.reject_weight
    design = (
        ""
        if weight == 1
        else f" The rejection weight in training is {weight:g}, so points lie above the diagonal by design."
    )
    with style():
        picture = page(
            "reliability",
            "Predicted and true acceptance",
            "What to see: on the diagonal, predictions are right on average. A line spans the middle half of a bin's "
            f"tokens, the area of a point shows their number. {evaluation.tokens} tokens of "
            f"{evaluation.prompts} prompts.{design}",
            3.6,
        )
        (axes,) = panels(picture, 1, 1, "predicted acceptance", "acceptance probability")
        axes.plot([0, 1], [0, 1], "--", color="#777777", linewidth=1)
        bins = evaluation.reliability
        across = [each.middle for each in bins]
        lower, upper = [each.lower for each in bins], [each.upper for each in bins]
        axes.vlines(across, lower, upper, color="#0072B2", linewidth=1.5)
        sizes = [20 + 400 * each.count / evaluation.tokens for each in bins]
        axes.scatter(across, [each.value for each in bins], s=sizes, color="#0072B2", zorder=3)
        axes.set(xlim=(0, 1), ylim=(0, 1.02))
        axes.grid()
    return picture


SWEEP = "sweep.json"


class Predictors(Subject[Example, DraftStates]):
    """Networks on a draft that predict acceptance.

    Args:
        profile: the target and the draft, whose policy does not change the answers' distribution.
        kind: of the predictors.
        mix: share of target tokens in a draft model's input in training; None for SpecDec++'s.
    """

    command, folder = "train-head", ExampleFolder
    ends, others = (CONFIG, SWEEP), (WEIGHTS, SWEEP)
    maker = "specctl.training.predictors:replica"

    def __init__(self, profile: Profile, kind: Kind = "specdec++", mix: float | None = None) -> None:
        if profile.draft is None:
            hint = "name one with --draft or in the profile"
            raise UsageError("the profile has no draft to train a head on", hint)
        require_models([profile.draft], self.command, "name a draft model with --draft")
        if profile.draft.is_registered:
            raise UsageError("train-head reads hidden states, and a registered drafter has none", "name a draft model")
        require_whole(profile.draft, "draft", self.command)
        super().__init__(profile)
        self._kind, self._mix = kind, mix

    @property
    def setup(self) -> dict[str, Any]:
        return {"kind": self._kind}

    @property
    def _draft(self) -> DraftTable:
        assert self.profile.draft is not None
        return self.profile.draft

    def _draft_head(self) -> DraftHeadCheckpoint | None:
        """The draft if it is a draft head, by its files, without loading it."""
        head = find_head("draft", self._draft, ("target", self.profile.target))
        if head is not None and self._mix is not None:
            raise UsageError("--mix is for draft models: a draft head reads its own tokens", "leave it out")
        return head

    def _draft_hash(self, head: DraftHeadCheckpoint | None) -> str:
        """SHA-256 of the draft's weights, downloaded if needed, and of its adapter."""
        if head is not None:
            head.fetch_weights()
            return weights_hash(head.checkpoint)
        checkpoint = locate(self._draft, "draft")
        checkpoint.fetch_weights()
        return weights_hash(checkpoint)

    def facts(self, suite: Suite) -> dict[str, Any]:
        """Downloads the draft's weights if needed, to hash them."""
        head = self._draft_head()
        own = {"draft_sha256": self._draft_hash(head), KIND: self._kind}
        return {**super().facts(suite), **own, **({} if head is None else {"draft_head": head.kind})}

    def items(self, pair: Pair, found: AnsweredPrompt) -> list[Example]:
        pair.require_law("train-head")
        sampling = Sampling.measured(found.settings, pair)
        texts = [each for each in found.completions if each.tokens]
        made = [_example(pair, found.number, each, sampling, self._kind) for each in texts]
        return [example for example in made if example is not None]

    def require(self, pair: Pair) -> None:
        if self._kind != "disco" and pair.drafts[0].runs_model:
            pair.torch_model(1, self.command)

    def check(self, material: Material[Example]) -> None:
        path, facts = material.path, material.facts
        if facts["draft_sha256"] != self._draft_hash(self._draft_head()):
            raise UsageError(
                f"{path} was collected with another draft ({facts['draft']}) than {self._draft.model!r}",
                "collect examples with this draft first",
            )
        if (collected := facts[KIND]) != self._kind:
            raise UsageError(
                f"{path} was collected for heads of the kind {collected}, not {self._kind}",
                f"collect examples for this kind, or train with --kind {collected}",
            )

    def models(self, pair: Pair | None, progress: Progress) -> DraftStates:
        """The source of hidden states for a draft model; inputs for draft heads and DISCO are in the examples."""
        if self._kind == "disco":
            return Stored(torch.device("cpu"), features_of)
        if self._draft_head() is not None:
            device = self._draft.device
            if not isinstance(device, str) or device == "auto":
                device = "cuda" if torch.cuda.is_available() else "cpu"
            return Stored(torch.device(device), stored_states)
        mix = MIX if self._mix is None else self._mix
        if pair is not None and not next((model := pair.torch_model(1, self.command)).parameters()).is_meta:
            return ModelStates(model, mix)
        with progress.doing(f"loading {self._draft.model}"):
            return ModelStates(load_model(self._draft, role="draft").model, mix)

    def make(
        self,
        output: Path,
        source: Source[Example, DraftStates],
        recipes: Sequence[PredictorRecipe],
        schedule: Schedule,
        progress: Progress,
    ) -> Report:
        """Train a predictor for each recipe, evaluate it on held-out prompts, and write it with its model card.

        A single predictor is written to ``output``; several get one subfolder each, named by their recipes.
        """
        split, states, facts = source.material.split(), source.models, source.material.facts
        learner = PredictorLearner(states, recipes, split.train, schedule.seed)
        seconds = self.train(output, learner, schedule, split.train, progress)
        began = perf_counter()
        with progress.counting("evaluation batches", -(-len(split.dev) // SEQUENCES_AT_ONCE)) as advance:
            evaluations = evaluate(states, learner.networks, recipes, split, schedule.seed, advance)
        made = Made.of(source.material.seconds, seconds, perf_counter() - began)
        progress.say(f"evaluation: {evaluations[0].tokens} tokens in {made.seconds['evaluation']:.1f} s")
        for network, evaluation in zip(learner.networks, evaluations, strict=True):
            folder = output if len(recipes) == 1 else output / evaluation.recipe.name
            config = {
                "draft_model": facts["draft"],
                "draft_sha256": facts["draft_sha256"],
                "target_model": facts["target"],
                "sampling": facts["sampling"],
                "prompts": facts["prompts"],
                "training": {**asdict(evaluation.recipe), "mix": states.mixed, **asdict(schedule)},
                "metrics": evaluation.metrics,
                **asdict(made),
            }
            write_reliability(evaluation, folder)
            card = predictor_card(evaluation, config, made)
            if isinstance(network, DiscoNetwork):  # the last file marks the folder as complete
                save_weights(folder, network.weights(), {KIND: "disco", **config}, card)
            else:
                save_predictor(folder, network, config, card)
            progress.say(f"wrote {folder}")
        documents = [evaluation.document for evaluation in evaluations]
        if len(recipes) > 1:
            write_whole(output / SWEEP, json.dumps(documents, indent=1) + "\n")
        (output / STATE).unlink(missing_ok=True)
        tables = sweep_tables(evaluations) if len(recipes) > 1 else predictor_tables(evaluations[0])
        return Report({"heads": documents}, tables)


def _example(pair: Pair, number: int, completion: Completion, sampling: Sampling, kind: Kind) -> Example | None:
    """The draft tokens along an answer; None if the prompt fills the draft's context, or no token is left.

    A draft model drafts one token at every position, a draft head the rounds of `read_rounds`. DISCO reads a token's
    index in its round, so for DISCO a draft model drafts such rounds too.
    """
    target, draft, disco = pair.target, pair.drafts[0], kind == "disco"
    text = completion.prompt, completion.tokens[: draft.room(completion.prompt_tokens)]
    if not text[1]:
        return None
    generator = draft_token_generator(target, completion.seed)
    rounds: RoundTokens | None = None
    if draft.drafts_by_round:
        rounds = read_rounds(target, draft, *text, sampling, generator, pair.eos, distributions=disco)
        if rounds is None:
            return None
    elif disco:
        rounds = read_model_rounds(target, draft, *text, sampling, generator)
    found = draw_along(target, draft, *text, sampling, generator) if rounds is None else rounds.drawn
    ids, answer = (torch.tensor(part, dtype=torch.int32) for part in text)
    entropy, top_prob, token_prob = found.signals.unbind(1)
    drawn = found.tokens.int(), found.acceptance, entropy, top_prob, token_prob
    if rounds is None:
        return Example(number, ids, answer, *drawn)
    return Example(number, ids, answer, *drawn, rounds.hidden, rounds.top_probs, rounds.index if disco else None)


def replica(*, number: int, profile: Profile, kind: Kind) -> Answer:  # noqa: ARG001 - all do the same
    """The maker of a replica that collects examples for predictors of a kind."""
    return Predictors(profile, kind).replica()

"""Predictors of acceptance: from answers, and what the draft drafts along them, to trained ones in folders.

A draft model drafts one token at every position, a draft head the rounds of `read_rounds`; for DISCO, whose heads read
the number of a token in its round, a draft model drafts such rounds too.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from specctl.decoding.draft_tokens import draft_token_generator, draw_along
from specctl.decoding.sampling import Sampling
from specctl.errors import UsageError
from specctl.models.draft_heads.checkpoint import DraftHeadCheckpoint
from specctl.models.files.checkpoint import locate
from specctl.models.files.stored_weights import weights_hash
from specctl.models.loading.model import load_model
from specctl.models.loading.profile_models import find_head
from specctl.models.predictors.predictor_checkpoint import CONFIG, KIND, WEIGHTS, Kind, save_predictor, save_weights
from specctl.models.running.pair import Pair
from specctl.observing.progress import Progress
from specctl.observing.prompt_answers import Answered
from specctl.outputs import write_whole
from specctl.profile.lookup_policies import require_models
from specctl.profile.model_table import require_whole
from specctl.profile.schema import DraftTable, Profile
from specctl.prompts.suites import Suite
from specctl.records import Completion
from specctl.training.epochs import Schedule
from specctl.training.material import Material
from specctl.training.model_card import Made, Report
from specctl.training.predictors.disco_network import DiscoNetwork, features_of
from specctl.training.predictors.draft_states import MIX, DraftStates, ModelStates, Stored, stored_states
from specctl.training.predictors.example_rounds import RoundTokens, read_model_rounds, read_rounds
from specctl.training.predictors.examples import Example, ExampleFolder
from specctl.training.predictors.predictor_evaluation import SEQUENCES_AT_ONCE, evaluate
from specctl.training.predictors.predictor_learner import PredictorLearner, PredictorRecipe
from specctl.training.predictors.predictor_report import (
    predictor_card,
    predictor_config,
    predictor_tables,
    sweep_tables,
    write_reliability,
)
from specctl.training.subject import STATE, Source, Subject

SWEEP = "sweep.json"


class Predictors(Subject[Example, DraftStates]):
    """Networks on a draft that predict acceptance.

    Args:
        profile: the target and the draft, whose policy does not change the answers' distribution.
        kind: what they read.
        mix: share of the target's tokens in what a draft model reads in training; None for SpecDec++'s.
    """

    command, folder = "train-head", ExampleFolder
    ends, others = (CONFIG, SWEEP), (WEIGHTS, SWEEP)

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
    def _draft(self) -> DraftTable:
        assert self.profile.draft is not None
        return self.profile.draft

    def _draft_head(self) -> DraftHeadCheckpoint | None:
        """The draft, if it is a head on the target's states, told from its files without loading it."""
        head = find_head("draft", self._draft, ("target", self.profile.target))
        if head is not None and self._mix is not None:
            raise UsageError("--mix is for draft models: a draft head reads its own tokens", "leave it out")
        return head

    def _draft_hash(self, head: DraftHeadCheckpoint | None) -> str:
        """SHA-256 of the weights of the draft or draft head, downloaded if need be, and of its adapter."""
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

    def items(self, pair: Pair, found: Answered) -> list[Example]:
        pair.require_law("train-head")
        sampling = Sampling.measured(found.settings, pair)
        texts = [each for each in found.completions if each.tokens]
        made = [_example(pair, found.number, each, sampling, self._kind) for each in texts]
        return [example for example in made if example is not None]

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
        """Of a draft model its states; a draft head's, and what DISCO reads, are among the examples."""
        if self._kind == "disco":
            return Stored(torch.device("cpu"), features_of)
        if self._draft_head() is not None:
            # On the device that the draft is told to run on, else on the first GPU, if there is one.
            told = self._draft.device
            if isinstance(told, str) and told != "auto":
                return Stored(torch.device(told), stored_states)
            return Stored(torch.device("cuda" if torch.cuda.is_available() else "cpu"), stored_states)
        mix = MIX if self._mix is None else self._mix
        if pair is not None:
            return ModelStates(pair.models[1], mix)
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
        """Train a predictor for each recipe, evaluate it on prompts not used in training, write it with its card.

        Args:
            output: folder for a single predictor; several get one subfolder each, named by their recipes.
            source: the examples, and the draft's states.
            recipes: depth and loss weight of each.
            schedule: shared by all.
            progress: receives the stages.
        """
        split, states = source.material.split(), source.models
        learner = PredictorLearner(states, recipes, split.train, schedule.seed)
        seconds = self.train(output, learner, schedule, split.train, progress)
        began = perf_counter()
        with progress.counting("evaluation batches", -(-len(split.dev) // SEQUENCES_AT_ONCE)) as advance:
            evaluations = evaluate(states, learner.networks, recipes, split, schedule.seed, advance)
        made = Made.of(source.material.seconds, seconds, perf_counter() - began)
        progress.say(f"evaluation: {evaluations[0].tokens} tokens in {made.seconds['evaluation']:.1f} s")
        for network, evaluation in zip(learner.networks, evaluations, strict=True):
            folder = output if len(recipes) == 1 else output / evaluation.recipe.name
            config = predictor_config(evaluation, states.mixed, schedule, source.material.facts, made)
            write_reliability(evaluation, folder)
            card = predictor_card(evaluation, config, made)
            if isinstance(network, DiscoNetwork):  # the last file says that all is written
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
    target, draft = pair.target, pair.drafts[0]
    text = completion.prompt, completion.tokens[: draft.room(completion.prompt_tokens)]
    if not text[1]:
        return None  # the draft's context has no room behind the prompt
    generator = draft_token_generator(target, completion.seed)
    laws = kind == "disco"
    rounds: RoundTokens | None = None
    if draft.drafts_by_round:
        rounds = read_rounds(target, draft, *text, sampling, generator, pair.eos, laws=laws)
        if rounds is None:
            return None
    elif laws:
        rounds = read_model_rounds(target, draft, *text, sampling, generator)
    found = draw_along(target, draft, *text, sampling, generator) if rounds is None else rounds.drawn
    ids, answer = (torch.tensor(part, dtype=torch.int32) for part in text)
    entropy, top_prob, token_prob = found.signals.unbind(1)
    drawn = found.tokens.int(), found.acceptance, entropy, top_prob, token_prob
    if rounds is None:
        return Example(number, ids, answer, *drawn)
    return Example(number, ids, answer, *drawn, rounds.hidden, rounds.top_probs, rounds.index if laws else None)

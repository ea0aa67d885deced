"""The graph engine on a real device: what tests of its logic on the CPU cannot show."""

import pytest
import torch

from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.draws import uniforms
from specctl.decoding.logits.token_sampler import TokenSampler
from specctl.decoding.loop import decode
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.models.passes.cuda_capture import CudaCapture
from specctl.models.placing.engine_table import build_runner
from specctl.models.running.eager import EagerPasses
from specctl.models.running.engines import EngineSettings
from specctl.models.running.graph import GraphPasses
from specctl.models.running.slot import Slot
from specctl.policies import DISTRIBUTION_SIGNALS, POLICIES
from tests.support.toys import noisy_copy, random_model, random_predictor, seeded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
TOKENS: list[int] = torch.randint(0, 60, (200,), generator=seeded(9)).tolist()


def on_device(family: str, *, copy: bool = False) -> torch.nn.Module:
    model = noisy_copy(family) if copy else random_model(family)
    return type(model)(model.config).cuda().eval().requires_grad_(False)


def twins(family: str, *, copy: bool = False) -> tuple[Slot, Slot]:
    source = noisy_copy(family) if copy else random_model(family)
    model = on_device(family, copy=copy)
    model.load_state_dict(source.state_dict())
    heard: list[str] = []
    graph = build_runner(model, 60, family, EngineSettings(engine="graph", notice=heard.append))  # type: ignore[arg-type]
    assert isinstance(graph.passes, GraphPasses)
    assert heard == []
    return graph, Slot(EagerPasses(model, 60))  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt-neox"])
def test_replayed_passes_say_what_eager_ones_say(family: str) -> None:
    graph, eager = twins(family)
    with torch.inference_mode():
        for runner in (graph, eager):
            runner.extend(TOKENS[:40], keep=0)
        for width in (1, 1, 5, 9, 1, 20, 3, 1, 12):
            block = TOKENS[graph.length : graph.length + width]
            found, wanted = (runner.extend(block, keep=width).logits for runner in (graph, eager))
            torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)
            for runner in (graph, eager):
                runner.rollback(runner.length - width // 2)
    assert graph.preparing_seconds is not None, "capturing failed and fell back"


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_k=20, top_p=0.9)], ids=["greedy", "filtered"])
def test_a_captured_draft_step_reads_what_an_eager_one_reads(sampling: Sampling) -> None:
    graph, eager = twins("llama")
    read = TokenSampler(sampling, frozenset(DISTRIBUTION_SIGNALS), tops=True)
    with torch.inference_mode():
        for runner in (graph, eager):
            runner.extend(TOKENS[:40], keep=0)
        for token in TOKENS[40:60]:
            draws = torch.Generator("cuda").manual_seed(token)
            noise = None if sampling.greedy else uniforms((), torch.device("cuda"), draws)
            values, probs = graph.sample([token], read, None if noise is None else noise.item())
            found, expected = read(eager.extend([token], keep=1).logits[0], noise)
            torch.testing.assert_close(values, found, atol=1e-4, rtol=1e-3)
            if expected is not None:
                torch.testing.assert_close(probs, expected, atol=1e-4, rtol=1e-3)
    assert graph.preparing_seconds is not None, "capturing failed and fell back"


@pytest.mark.parametrize("policy", ["constant", "specdec++"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=["greedy", "sampled"])
def test_tokens_are_those_of_the_eager_engine(sampling: Sampling, policy: str) -> None:
    targets, drafts = twins("llama"), twins("llama", copy=True)
    head = random_predictor(hidden_size=32, spread=0.15).cuda()
    texts = []
    for target, draft in zip(targets, drafts, strict=True):
        drafter = ModelDrafter(draft, POLICIES[policy](), predictor=head)
        with torch.inference_mode():
            prefill(target, drafter, TOKENS[:30])
            draws = torch.Generator("cuda").manual_seed(0)
            rounds = list(decode(target, drafter, TOKENS[:30], 48, sampling, frozenset(), draws))
        texts.append([token for round_ in rounds for token in round_.emitted])
    assert texts[0] == texts[1]


def test_a_capture_replays_on_new_input() -> None:
    given = torch.zeros(4, device="cuda")
    replay = CudaCapture(given.device)(lambda: (given * 2,))
    given.fill_(3)
    (found,) = replay()
    assert found.tolist() == [6.0] * 4

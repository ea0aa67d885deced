"""What a model reads on a detour from a text is what it would read there alone."""

import torch

from specctl.models.running.eager import EagerPasses
from specctl.models.running.slot import Slot
from specctl.replay.recording.coupling import Detours
from tests.support.toys import random_model

TEXT = (7, 3, 12, 5, 9, 22, 31, 4, 18, 2)


def alone(*tokens: int, keep: int) -> torch.Tensor:
    return Slot(EagerPasses(random_model("llama"), 64)).extend(tokens, keep=keep).logits


@torch.inference_mode()
def test_detours_from_a_text_and_back() -> None:
    runner = Slot(EagerPasses(random_model("llama"), 64))
    runner.extend(TEXT[:8], keep=0)
    detours = Detours(runner, TEXT)
    for length, tokens in ((5, (40, 41)), (7, (42,)), (6, (43, 44, 45)), (9, (46,))):
        found = detours.behind(length, tokens, len(tokens))
        torch.testing.assert_close(found, alone(*TEXT[:length], *tokens, keep=len(tokens)))
    for length in (8, 8):
        detours.come_back(length)
        assert runner.length == 8
    torch.testing.assert_close(runner.extend(TEXT[8:9], keep=1).logits, alone(*TEXT[:9], keep=1))

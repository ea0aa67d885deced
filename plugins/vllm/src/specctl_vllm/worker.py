"""What ``--worker-cls specctl_vllm.worker.Worker`` names: the platform's worker with another drafter."""

from typing import Any

from specctl_vllm.asked_policy import asked_policy
from specctl_vllm.batch_drafts import BatchDrafts
from specctl_vllm.contract import check_contract, installed_package
from specctl_vllm.policy_drafting import PolicyDrafting

check_contract(installed_package())  # before anything of vLLM is used

from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.spec_decode.draft_model import DraftModelProposer  # noqa: E402

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class PolicyProposer(PolicyDrafting, DraftModelProposer):  # type: ignore[misc]  # vLLM's classes are not looked at
    """vLLM's proposer of draft models, stopped by policies."""

    def __init__(self, vllm_config: Any, device: Any, runner: Any) -> None:
        super().__init__(vllm_config, device, runner)
        self.drafts = BatchDrafts(asked_policy(vllm_config))
        self.runner = runner


class Worker(PlatformWorker):  # type: ignore[misc]
    """The platform's worker, whose drafter is replaced before models are loaded."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM's.

        Raises:
            UsageError, ProfileError: as `asked_policy`.
        """
        runner = self.model_runner
        asked_policy(self.vllm_config)
        if hasattr(runner, "drafter"):  # of several processes in a row the last one
            runner.drafter = PolicyProposer(runner.vllm_config, runner.device, runner)
        super().load_model(*args, **kwargs)

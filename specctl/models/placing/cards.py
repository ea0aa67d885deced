"""NVIDIA cards as their driver tells them, and what this build of torch makes of them; no context is made on a card."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass

SECONDS = 5
"""To wait for an answer of nvidia-smi."""
WSL = "/usr/lib/wsl/lib"
"""Where Windows puts nvidia-smi, which is not on every PATH."""
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""The oldest branch of the driver on Linux that runs programs built with a major version of CUDA (NVIDIA, CUDA Toolkit
Release Notes, minor version compatibility)."""
_FIELDS = "name,driver_version,memory.total,compute_cap"


@dataclass(frozen=True, slots=True)
class Card:
    """One card.

    Attributes:
        name: such as ``NVIDIA L4``.
        memory: bytes in all; None where the driver does not tell.
        capability: its compute capability, such as ``8.9``; None where the driver does not tell.
    """

    name: str
    memory: int | None
    capability: str | None


@dataclass(frozen=True, slots=True)
class Graphics:
    """The cards of a machine, and whether torch can use them.

    Attributes:
        driver: its version, such as ``580.82.07``; None without one.
        cards: in the driver's order.
        torch_version: torch's.
        built_for: the version of CUDA that torch was built for; None for a build without CUDA.
        architectures: what torch has kernels for, such as ``sm_90``; empty where that is not known.
        usable: how many devices torch sees.
        hidden: CUDA_VISIBLE_DEVICES; None if it is not set.
    """

    driver: str | None
    cards: tuple[Card, ...]
    torch_version: str
    built_for: str | None
    architectures: tuple[str, ...] = ()
    usable: int = 0
    hidden: str | None = None

    @property
    def oldest_driver(self) -> int | None:
        """The oldest branch of the driver that runs this build of torch; None without CUDA or if that is not known."""
        return None if self.built_for is None else OLDEST_DRIVER.get(int(self.built_for.partition(".")[0]))

    @property
    def obstacles(self) -> list[str]:
        """Why torch cannot use some of the cards, each as a sentence; empty where it can, and without cards."""
        if not self.cards:
            return []
        if self.built_for is None:
            return [
                f"torch {self.torch_version} was built without CUDA, so that everything runs on the CPU: install a "
                "build with CUDA (https://pytorch.org/get-started/locally)."
            ]
        if not self.usable and self.hidden in ("", "-1"):
            return [f"CUDA_VISIBLE_DEVICES = {self.hidden!r} hides every card."]
        oldest, driver = self.oldest_driver, int((self.driver or "0").partition(".")[0])
        if not self.usable:
            needs = f", which needs a driver of version {oldest} or newer" if oldest and driver < oldest else ""
            built = f"it was built for CUDA {self.built_for}{needs}"
            return [f"torch {self.torch_version} sees none of the cards; {built}, and the driver is {self.driver}."]
        without = {card.name: card.capability for card in self.cards if not self._has_kernels(card)}
        return [
            f"torch {self.torch_version} has no kernels for {name} (compute capability {capability}); it has them for "
            f"{', '.join(self.architectures)}."
            for name, capability in without.items()
        ]

    def _has_kernels(self, card: Card) -> bool:
        """Whether code of the card's own generation is there, or portable code that the driver translates."""
        if card.capability is None or not self.architectures:
            return True
        major, minor = map(int, card.capability.split("."))
        for name in self.architectures:
            kind, _, number = name.partition("_")
            digits = re.match(r"\d+", number)
            if digits is None:
                continue
            of = int(digits[0][:-1]), int(digits[0][-1])
            if (kind == "sm" and of[0] == major and of[1] <= minor) or (kind == "compute" and of <= (major, minor)):
                return True
        return False


def graphics() -> Graphics:
    """The cards of this machine."""
    import torch

    driver, cards = parsed(nvidia_smi(_FIELDS))
    usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Graphics(
        driver=driver,
        cards=cards,
        torch_version=torch.__version__,
        built_for=torch.version.cuda,
        architectures=tuple(torch.cuda.get_arch_list()) if usable else (),
        usable=usable,
        hidden=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def parsed(answer: str) -> tuple[str | None, tuple[Card, ...]]:
    """The driver's version and its cards.

    Args:
        answer: of nvidia-smi, a line with name, driver version, memory in MiB and compute capability for each card;
            lines of another form are left out.
    """
    driver, cards = None, []
    for line in answer.splitlines():
        parts = [part.strip() for part in line.rsplit(",", 3)]
        if len(parts) == 4 and re.fullmatch(r"\d+(\.\d+)+", parts[1]):
            driver = parts[1]
            memory = int(parts[2]) << 20 if parts[2].isdecimal() else None
            capability = parts[3] if re.fullmatch(r"\d+\.\d+", parts[3]) else None
            cards.append(Card(parts[0], memory, capability))
    return driver, tuple(cards)


def nvidia_smi(fields: str) -> str:
    """What the driver tells of each card, a line for each; empty without a driver that answers.

    Args:
        fields: as ``nvidia-smi --query-gpu`` takes them.
    """
    program = shutil.which("nvidia-smi", path=os.environ.get("PATH", "") + os.pathsep + WSL)
    if program is None:
        return ""
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return asked.stdout if asked.returncode == 0 else ""

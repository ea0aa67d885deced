"""The kinds of draft heads that can be trained: what a new one is, what it learns from, how it is written."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specctl.draft_training.blocks import drafted_blocks
from specctl.draft_training.chains import drafted_steps
from specctl.draft_training.lessons import Lesson
from specctl.draft_training.losses import dflash_loss, dspark_loss, eagle1_loss, eagle3_loss
from specctl.models.draft_heads.block import BlockConfig, BlockHead
from specctl.models.draft_heads.chain import ChainHead
from specctl.models.draft_heads.eagle1 import Eagle1Config, Eagle1Head
from specctl.models.draft_heads.eagle3 import Eagle3Config, Eagle3Head, new_eagle3
from specctl.models.draft_heads.layers import FIXED_FREQUENCIES, LayerShape
from specctl.models.loading.draft_head import HeadKind

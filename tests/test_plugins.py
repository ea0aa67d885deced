"""Policies and drafters of other distributions, found by their entry points: used like those that ship, or named."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from enumeration import largest_difference, law_of, walk
from made_traces import rounds_of
from plugged import installed, write_distribution
from toys import EOS, TableRunner, law, table
from typer.testing import CliRunner

from specctl.calibration.grids import grid
from specctl.commands.app import app
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.loop import decode
from specctl.decoding.sampling import Sampling
from specctl.errors import ProfileError, UsageError
from specctl.models.running.registered import RegisteredRunner
from specctl.plugins import DRAFTERS, PluginError
from specctl.policies import POLICIES, Rule, Setting, Signal
from specctl.profile import parse_policy, resolve
from specctl.records import DraftStep
from specctl.replay import metering

PAGE = Path(__file__).parents[1] / "docs" / "python.md"

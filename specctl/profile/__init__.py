"""Profiles: model pairs and settings in TOML files, found by name, merged with overrides and checked."""

from specctl.profile.resolution import ResolvedProfile, changed, parse_policy, resolve
from specctl.profile.schema import Profile
from specctl.profile.writing import write_profile

__all__ = ["Profile", "ResolvedProfile", "changed", "parse_policy", "resolve", "write_profile"]

"""The root of the repository, for tests that read its files or start processes in it."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

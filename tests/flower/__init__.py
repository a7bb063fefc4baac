"""Federations over Flower; all of it is left out where Flower is not installed."""

import pytest

pytest.importorskip("flwr")

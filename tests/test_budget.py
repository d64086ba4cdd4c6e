"""Communicators of one device may together promise no more SMs than it has."""

import pytest
import torch

import moelink
from moelink.transports.symmetric.sm_budget import SmBudget


class Holder:
    """Stands for a rank; the budget keeps it only weakly."""


def test_the_example_of_the_docstring():
    budget, device, first, second = SmBudget(), torch.device("cuda", 0), Holder(), Holder()
    budget.claim(first, device, 100, available=132)
    with pytest.raises(moelink.ConfigError, match=r"num_sms: expected at most 32 \(132 on cuda:0, 100 held"):
        budget.claim(second, device, 40, available=132)
    budget.claim(second, device, 32, available=132)
    budget.claim(Holder(), torch.device("cuda", 1), 132, available=132)
    budget.claim(Holder(), device, None, available=132)


def test_what_is_released_or_gone_can_be_claimed_again():
    budget, device, first = SmBudget(), torch.device("cuda", 0), Holder()
    budget.claim(first, device, 132, available=132)
    budget.release(first)
    budget.release(first)
    gone = Holder()
    budget.claim(gone, device, 132, available=132)
    del gone
    budget.claim(first, device, 132, available=132)

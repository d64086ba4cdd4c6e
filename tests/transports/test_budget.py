"""Communicators of one device may together promise no more SMs than it has."""

import pytest
import torch

import moelink
from moelink.transports.symmetric.rank import SmBudget


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


def test_lanes_claim_one_by_one_and_must_all_fit_at_the_first():
    budget, device, lanes = SmBudget(), torch.device("cuda", 0), [Holder(), Holder()]
    for num_sms in (None, 67):
        with pytest.raises(moelink.ConfigError, match="num_sms: expected at most 66"):
            budget.claim(lanes[0], device, num_sms, available=132, lanes=2)
    budget.claim(lanes[0], device, 60, available=132, lanes=2)
    with pytest.raises(moelink.ConfigError, match=r"at most 72 \(132 on cuda:0, 60 held by open communicators\)"):
        budget.claim(Holder(), device, 73, available=132)
    budget.claim(lanes[1], device, 60, available=132)
    with pytest.raises(moelink.ConfigError, match=r"at most 6 \(132 on cuda:0, 120 held .*, 2 lanes\)"):
        budget.claim(Holder(), device, 7, available=132, lanes=2)


def test_what_is_released_or_gone_can_be_claimed_again():
    budget, device, first = SmBudget(), torch.device("cuda", 0), Holder()
    budget.claim(first, device, 132, available=132)
    budget.release(first)
    budget.release(first)
    gone = Holder()
    budget.claim(gone, device, 132, available=132)
    del gone
    budget.claim(first, device, 132, available=132)

"""Every decoder takes or refuses inputs that once broke it, and some hundred mutants."""

import random

import pytest

from tests.fuzz.decoders import decoders
from tests.fuzz.fuzz import CORPUS, Campaign, Meter, blind_with

DECODERS = decoders()
NAMES = sorted(DECODERS)


@pytest.fixture(scope="module")
def campaigns():
    meter = Meter()
    yield {name: Campaign(decoder, meter) for name, decoder in DECODERS.items()}
    meter.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_real_input_is_taken(campaigns, name):
    assert all(campaigns[name].one(seed) for seed in campaigns[name].decoder.seeds)


@pytest.mark.parametrize("name", NAMES)
def test_what_was_once_found_is_taken_or_refused_in_little_memory(campaigns, name):
    for data in campaigns[name].found:
        campaigns[name].one(data)


@pytest.mark.parametrize("name", NAMES)
def test_mutants_are_taken_or_refused_in_little_memory(campaigns, name):
    campaign, draw = campaigns[name], random.Random(7)
    before, blind = campaign.taken, blind_with(draw)
    mutants = 60 if name in ("server", "library", "snapshot") else 200  # whole sessions take longer
    for _ in range(mutants):
        campaign.one(campaign.decoder.mutate(campaign.start(draw), draw, blind))
    assert before < campaign.taken < before + mutants


def test_every_folder_of_the_corpus_belongs_to_a_decoder():
    assert {path.name for path in CORPUS.iterdir()} <= set(NAMES)

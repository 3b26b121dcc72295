"""Drafters that cannot be run are refused by name."""

import pytest

from specdec.errors import InvalidRequest, ModelNotSupported
from specdec.methods import method_of_config
from specdec.refused_methods import REFUSED
from specdec.settings import SpeculativeSettings

CONFIGS = [
    ("LiLiCorr", {"architectures": ["DFlashDraftModel"], "dflash_config": {"lilicorr_candidate_topk": 16}}),
    ("XPress", {"speculators_model_type": "xpress"}),
    ("Domino", {"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "domino"}}),
    ("P-EAGLE", {"speculators_model_type": "peagle"}),
    ("P-EAGLE", {"architectures": ["LlamaForCausalLMEagle3"], "parallel_drafting": True}),
    ("Gemma", {"model_type": "gemma4_assistant"}),
    ("HASS", {"architectures": ["HassLlamaForCausalLM"]}),
    ("Hydra", {"model_type": "llama", "hydra_num_heads": 4}),
]


@pytest.mark.parametrize(("name", "config"), CONFIGS)
def test_a_config_is_refused_by_name(name, config):
    with pytest.raises(ModelNotSupported, match=f"^{name}.*use a head of method eagle3, dflash or dspark"):
        method_of_config(config)


@pytest.mark.parametrize("method", [*REFUSED, "p-eagle", "LiLiCorr"])
def test_a_method_is_refused_by_name(method):
    with pytest.raises(InvalidRequest, match=f'^method "{method}": [A-Z].*use a head of method'):
        SpeculativeSettings(method=method, model="head")


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {}}, "dflash"),
        ({"model_type": "muse_glimmer_assistant"}, "dflash"),
        ({"speculators_model_type": "dflash"}, "dflash"),
        ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 0}, "dspark"),
        ({"architectures": ["DFlashDraftModel"], "markov_rank": 256}, "dspark"),
        ({"speculators_model_type": "dspark"}, "dspark"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
    ],
)
def test_others_are_known(config, method):
    assert method_of_config(config) == method
